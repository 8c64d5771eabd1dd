//! Requests of the operations that deal in one block per rank: gathers, scatters and exchanges.
//!
//! Counts come in values; `unit` is the bytes of one.

use super::{Prepared, both, describe, describe_mut, with_redop};
use crate::backend::OpRequest;
use crate::blocks::{RawBlocks, RawBlocksMut};
use crate::buf::{RawBuf, RawBufMut};
use crate::comm::check;
use crate::comm::ops::With;
use crate::desc::{OpDesc, Operation};
use crate::error::{Error, Result};
use crate::reduce::Reducer;

impl With<'_> {
    pub(in crate::comm) fn prep_all_gather(&self, input: Result<RawBuf>, output: Result<RawBufMut>) -> Prepared {
        let desc = describe(Operation::AllGather, &input);
        let request = both(input, output).and_then(|(input, output)| {
            let output = self.shards_mut("world size times the input's length", &input, output)?;
            Ok(OpRequest::AllGather { input, output })
        });
        Prepared { desc, request }
    }

    pub(in crate::comm) fn prep_all_gather_in_place(&self, buf: Result<RawBufMut>, unit: usize) -> Prepared {
        let mut desc = describe_mut(Operation::AllGather, &buf);
        let request = buf.and_then(|output| {
            let output = self.even("buffer", output, unit)?;
            let input = self.own(&output);
            desc.count = input.count() as u64;
            Ok(OpRequest::AllGather { input, output })
        });
        Prepared { desc, request }
    }

    pub(in crate::comm) fn prep_all_gather_v(
        &self,
        input: Result<RawBuf>,
        output: Result<RawBufMut>,
        counts: &[usize],
        unit: usize,
    ) -> Prepared {
        let output = output.and_then(|o| self.packed("output", "counts", o, counts, unit));
        self.all_gather_of(Operation::AllGatherV, input, output)
    }

    pub(in crate::comm) fn prep_all_gather_v_in_place(
        &self,
        buf: Result<RawBufMut>,
        counts: &[usize],
        unit: usize,
    ) -> Prepared {
        let mut desc = OpDesc::new(Operation::AllGatherV);
        let request = buf.and_then(|b| self.packed("buffer", "counts", b, counts, unit)).map(|output| {
            let input = self.own(&output);
            desc = described(desc.operation, &input, Some(&output.as_const()));
            OpRequest::AllGatherV { input, output }
        });
        Prepared { desc, request }
    }

    /// `op`: `AllGather` or `AllGatherV`.
    pub(in crate::comm) fn prep_all_gather_list(
        &self,
        op: Operation,
        input: Result<RawBuf>,
        output: Result<Vec<RawBufMut>>,
    ) -> Prepared {
        let output = output.and_then(|o| self.list_mut("output", op, o));
        self.all_gather_of(op, input, output)
    }

    fn all_gather_of(&self, op: Operation, input: Result<RawBuf>, output: Result<RawBlocksMut>) -> Prepared {
        let mut desc = describe(op, &input);
        let request = input.and_then(|input| {
            let output = output?;
            desc = described(op, &input, Some(&output.as_const()));
            self.fits("input", "the output's", &input, &output.as_const())?;
            apart(&output, &input)?;
            Ok(match op {
                Operation::AllGatherV => OpRequest::AllGatherV { input, output },
                _ => OpRequest::AllGather { input, output },
            })
        });
        Prepared { desc, request }
    }

    pub(in crate::comm) fn prep_gather(
        &self,
        input: Result<RawBuf>,
        output: Option<Result<RawBufMut>>,
        root: usize,
    ) -> Prepared {
        let shards = |input: &RawBuf, o: RawBufMut| self.shards_mut("world size times the input's length", input, o);
        self.gather_of(Operation::Gather, input, output, root, shards)
    }

    pub(in crate::comm) fn prep_gather_v(
        &self,
        input: Result<RawBuf>,
        output: Option<Result<RawBufMut>>,
        counts: &[usize],
        unit: usize,
        root: usize,
    ) -> Prepared {
        self.gather_of(Operation::GatherV, input, output, root, |_, o| self.packed("output", "counts", o, counts, unit))
    }

    /// `op`: `Gather` or `GatherV`.
    pub(in crate::comm) fn prep_gather_list(
        &self,
        op: Operation,
        input: Result<RawBuf>,
        output: Option<Result<Vec<RawBufMut>>>,
        root: usize,
    ) -> Prepared {
        self.gather_of(op, input, output, root, |_, o| self.list_mut("output", op, o))
    }

    fn gather_of<B>(
        &self,
        op: Operation,
        input: Result<RawBuf>,
        output: Option<Result<B>>,
        root: usize,
        cut: impl FnOnce(&RawBuf, B) -> Result<RawBlocksMut>,
    ) -> Prepared {
        let desc = describe(op, &input).root(root);
        let request = input.and_then(|input| {
            check::rank_in_range("root", root, self.size())?;
            let output = match output {
                _ if root != self.comm.rank() => None,
                None => return Err(no_buffer(op, "an output")),
                Some(o) => {
                    let o = cut(&input, o?)?;
                    self.fits("input", "the output's", &input, &o.as_const())?;
                    apart(&o, &input)?;
                    Some(o)
                }
            };
            Ok(gather(op, input, output, root))
        });
        Prepared { desc, request }
    }

    /// At the root the buffer holds all blocks, elsewhere this rank's; `counts` as for `gather_v`, `None` for equal
    /// blocks.
    pub(in crate::comm) fn prep_gather_in_place(
        &self,
        buf: Result<RawBufMut>,
        counts: Option<&[usize]>,
        unit: usize,
        root: usize,
    ) -> Prepared {
        let op = if counts.is_some() { Operation::GatherV } else { Operation::Gather };
        let mut desc = describe_mut(op, &buf).root(root);
        let request = buf.and_then(|buf| {
            check::rank_in_range("root", root, self.size())?;
            if root != self.comm.rank() {
                return Ok(gather(op, buf.as_const(), None, root));
            }
            let all = match counts {
                Some(c) => self.packed("buffer", "counts", buf, c, unit)?,
                None => self.even("buffer", buf, unit)?,
            };
            let own = self.own(&all);
            desc.count = own.count() as u64;
            Ok(gather(op, own, Some(all), root))
        });
        Prepared { desc, request }
    }

    pub(in crate::comm) fn prep_scatter(
        &self,
        input: Option<Result<RawBuf>>,
        output: Result<RawBufMut>,
        root: usize,
    ) -> Prepared {
        self.scatter_of(Operation::Scatter, input, output, root, |i, o| {
            let want = check::times(o.count(), self.size());
            check::counts("input", i.count(), "world size times the output's length", want)?;
            Ok(RawBlocks::even(i, self.size()))
        })
    }

    pub(in crate::comm) fn prep_scatter_v(
        &self,
        input: Option<Result<RawBuf>>,
        counts: &[usize],
        unit: usize,
        output: Result<RawBufMut>,
        root: usize,
    ) -> Prepared {
        self.scatter_of(Operation::ScatterV, input, output, root, |i, _| {
            let bytes = self.lengths("input", "counts", &i, counts, unit)?;
            Ok(RawBlocks::packed(i, &bytes))
        })
    }

    /// `op`: `Scatter` or `ScatterV`.
    pub(in crate::comm) fn prep_scatter_list(
        &self,
        op: Operation,
        input: Option<Result<Vec<RawBuf>>>,
        output: Result<RawBufMut>,
        root: usize,
    ) -> Prepared {
        self.scatter_of(op, input, output, root, |i, _| self.list("input", op, i))
    }

    fn scatter_of<B>(
        &self,
        op: Operation,
        input: Option<Result<B>>,
        output: Result<RawBufMut>,
        root: usize,
        cut: impl FnOnce(B, &RawBufMut) -> Result<RawBlocks>,
    ) -> Prepared {
        let desc = describe_mut(op, &output).root(root);
        let request = output.and_then(|output| {
            check::rank_in_range("root", root, self.size())?;
            let input = match input {
                _ if root != self.comm.rank() => None,
                None => return Err(no_buffer(op, "an input")),
                Some(i) => {
                    let i = cut(i?, &output)?;
                    self.fits("output", "the input's", &output.as_const(), &i)?;
                    for b in i.iter() {
                        check::disjoint(&b, &output)?;
                    }
                    Some(i)
                }
            };
            Ok(scatter(op, input, output, root))
        });
        Prepared { desc, request }
    }

    /// At the root the buffer holds all blocks, elsewhere this rank's; see `prep_gather_in_place`.
    pub(in crate::comm) fn prep_scatter_in_place(
        &self,
        buf: Result<RawBufMut>,
        counts: Option<&[usize]>,
        unit: usize,
        root: usize,
    ) -> Prepared {
        let op = if counts.is_some() { Operation::ScatterV } else { Operation::Scatter };
        let mut desc = describe_mut(op, &buf).root(root);
        let request = buf.and_then(|buf| {
            check::rank_in_range("root", root, self.size())?;
            if root != self.comm.rank() {
                return Ok(scatter(op, None, buf, root));
            }
            let all = match counts {
                Some(c) => self.packed("buffer", "counts", buf, c, unit)?,
                None => self.even("buffer", buf, unit)?,
            };
            let own = all.get(self.comm.rank());
            desc.count = own.count() as u64;
            Ok(scatter(op, Some(all.as_const()), own, root))
        });
        Prepared { desc, request }
    }

    pub(in crate::comm) fn prep_reduce_scatter(
        &self,
        input: Result<RawBuf>,
        output: Result<RawBufMut>,
        reducer: Result<Reducer>,
    ) -> Prepared {
        let mut desc = with_redop(describe(Operation::ReduceScatter, &input), &reducer);
        let request = both(input, output).and_then(|(input, output)| {
            let reducer = reducer?;
            desc.count = check::divides("input", input.count(), input.dtype(), reducer.unit(), self.size())? as u64;
            let want = desc.count as usize;
            check::counts("output", output.count(), "the input's length divided by the world size", want)?;
            check::disjoint(&input, &output)?;
            Ok(OpRequest::ReduceScatter { input: RawBlocks::even(input, self.size()), output, reducer })
        });
        Prepared { desc, request }
    }

    /// `counts`: of uneven blocks, else they are equal.
    pub(in crate::comm) fn prep_reduce_scatter_in_place(
        &self,
        buf: Result<RawBufMut>,
        counts: Option<&[usize]>,
        reducer: Result<Reducer>,
    ) -> Prepared {
        let op = if counts.is_some() { Operation::ReduceScatterV } else { Operation::ReduceScatter };
        let mut desc = with_redop(describe_mut(op, &buf), &reducer);
        let request = buf.and_then(|buf| {
            let reducer = reducer?;
            let all = match counts {
                Some(c) => self.packed("buffer", "counts", buf, c, reducer.unit())?,
                None => self.even("buffer", buf, reducer.unit())?,
            };
            let output = all.get(self.comm.rank());
            desc = described(op, &output.as_const(), Some(&all.as_const())).redop(reducer.op());
            Ok(reduce_scatter(op, all.as_const(), output, reducer))
        });
        Prepared { desc, request }
    }

    pub(in crate::comm) fn prep_reduce_scatter_v(
        &self,
        input: Result<RawBuf>,
        counts: &[usize],
        output: Result<RawBufMut>,
        reducer: Result<Reducer>,
    ) -> Prepared {
        let input = input.and_then(|i| {
            let unit = reducer.as_ref().map_or_else(|_| i.dtype().size(), Reducer::unit);
            let bytes = self.lengths("input", "counts", &i, counts, unit)?;
            Ok(RawBlocks::packed(i, &bytes))
        });
        self.reduce_scatter_of(Operation::ReduceScatterV, input, output, reducer)
    }

    /// `op`: `ReduceScatter` or `ReduceScatterV`.
    pub(in crate::comm) fn prep_reduce_scatter_list(
        &self,
        op: Operation,
        input: Result<Vec<RawBuf>>,
        output: Result<RawBufMut>,
        reducer: Result<Reducer>,
    ) -> Prepared {
        let input = input.and_then(|i| self.list("input", op, i));
        self.reduce_scatter_of(op, input, output, reducer)
    }

    fn reduce_scatter_of(
        &self,
        op: Operation,
        input: Result<RawBlocks>,
        output: Result<RawBufMut>,
        reducer: Result<Reducer>,
    ) -> Prepared {
        let mut desc = with_redop(describe_mut(op, &output), &reducer);
        let request = output.and_then(|output| {
            let (input, reducer) = (input?, reducer?);
            desc = described(op, &output.as_const(), Some(&input)).redop(reducer.op());
            self.fits("output", "the input's", &output.as_const(), &input)?;
            for b in input.iter() {
                check::disjoint(&b, &output)?;
            }
            Ok(reduce_scatter(op, input, output, reducer))
        });
        Prepared { desc, request }
    }

    pub(in crate::comm) fn prep_all_to_all(
        &self,
        input: Result<RawBuf>,
        output: Result<RawBufMut>,
        unit: usize,
    ) -> Prepared {
        let mut desc = describe(Operation::AllToAll, &input);
        let request = both(input, output).and_then(|(input, output)| {
            let block = check::divides("input", input.count(), input.dtype(), unit, self.size())?;
            desc.count = block as u64;
            check::counts("output", output.count(), "the input's length", input.count())?;
            check::disjoint(&input, &output)?;
            let (input, output) = (RawBlocks::even(input, self.size()), RawBlocksMut::even(output, self.size()));
            Ok(OpRequest::AllToAll { input, output })
        });
        Prepared { desc, request }
    }

    pub(in crate::comm) fn prep_all_to_all_in_place(&self, buf: Result<RawBufMut>, unit: usize) -> Prepared {
        let mut desc = describe_mut(Operation::AllToAll, &buf);
        let request = buf.and_then(|buf| {
            let output = self.even("buffer", buf, unit)?;
            desc.count = self.own(&output).count() as u64;
            Ok(OpRequest::AllToAll { input: output.as_const(), output })
        });
        Prepared { desc, request }
    }

    pub(in crate::comm) fn prep_all_to_all_v(
        &self,
        input: Result<RawBuf>,
        send_counts: &[usize],
        output: Result<RawBufMut>,
        recv_counts: &[usize],
        unit: usize,
    ) -> Prepared {
        let input = input.and_then(|i| {
            let bytes = self.lengths("input", "send counts", &i, send_counts, unit)?;
            Ok(RawBlocks::packed(i, &bytes))
        });
        let output = output.and_then(|o| self.packed("output", "receive counts", o, recv_counts, unit));
        self.all_to_all_of(Operation::AllToAllV, input, output)
    }

    /// `op`: `AllToAll` or `AllToAllV`.
    pub(in crate::comm) fn prep_all_to_all_list(
        &self,
        op: Operation,
        input: Result<Vec<RawBuf>>,
        output: Result<Vec<RawBufMut>>,
    ) -> Prepared {
        let input = input.and_then(|i| self.list("input", op, i));
        let output = output.and_then(|o| self.list_mut("output", op, o));
        self.all_to_all_of(op, input, output)
    }

    fn all_to_all_of(&self, op: Operation, input: Result<RawBlocks>, output: Result<RawBlocksMut>) -> Prepared {
        let mut desc = OpDesc::new(op);
        let request = input.and_then(|input| {
            let own = input.get(self.comm.rank());
            // What goes to oneself stands for the call; the lengths of pairs are compared when they arrive.
            desc = desc.elements(own.dtype(), own.count());
            let output = output?;
            check::same_dtype(input.dtype(), output.dtype())?;
            let (rank, expected) = (self.comm.rank(), output.get(self.comm.rank()).count());
            if own.count() != expected {
                return Err(Error::invalid(format!(
                    "this rank sends {} elements to itself but receives {expected} from itself: entry {rank} on both \
                     sides must be equal",
                    own.count()
                )));
            }
            for b in input.iter() {
                apart(&output, &b)?;
            }
            Ok(match op {
                Operation::AllToAllV => OpRequest::AllToAllV { input, output },
                _ => OpRequest::AllToAll { input, output },
            })
        });
        Prepared { desc, request }
    }

    fn own(&self, blocks: &RawBlocksMut) -> RawBuf {
        blocks.get(self.comm.rank()).as_const()
    }

    /// A buffer of one block per rank, each as long as `one`.
    fn shards_mut(&self, rule: &str, one: &RawBuf, all: RawBufMut) -> Result<RawBlocksMut> {
        if self.size() == 0 {
            return check::no_members();
        }
        check::same_dtype(one.dtype(), all.dtype())?;
        check::counts("output", all.count(), rule, check::times(one.count(), self.size()))?;
        check::disjoint(one, &all)?;
        Ok(RawBlocksMut::even(all, self.size()))
    }

    fn even(&self, what: &str, buf: RawBufMut, unit: usize) -> Result<RawBlocksMut> {
        check::divides(what, buf.count(), buf.dtype(), unit, self.size())?;
        Ok(RawBlocksMut::even(buf, self.size()))
    }

    fn packed(&self, what: &str, name: &str, buf: RawBufMut, counts: &[usize], unit: usize) -> Result<RawBlocksMut> {
        let bytes = self.lengths(what, name, &buf.as_const(), counts, unit)?;
        Ok(RawBlocksMut::packed(buf, &bytes))
    }

    /// The bytes of each rank's block of `buf`.
    fn lengths(&self, what: &str, name: &str, buf: &RawBuf, counts: &[usize], unit: usize) -> Result<Vec<usize>> {
        self.one_per_rank(name, counts.len())?;
        if unit == 0 {
            // Values without size: any number of them is no byte.
            return Ok(vec![0; counts.len()]);
        }
        let sum = counts.iter().try_fold(0usize, |sum, c| sum.checked_add(*c));
        let (sum, have) = (sum.unwrap_or(usize::MAX), buf.bytes() / unit);
        if sum != have || !buf.bytes().is_multiple_of(unit) {
            return Err(Error::invalid(format!(
                "{what} has {have} elements but its {name} make {sum} together; they must be equal"
            )));
        }
        Ok(counts.iter().map(|c| c * unit).collect())
    }

    fn one_per_rank(&self, name: &str, have: usize) -> Result<()> {
        match self.size() {
            0 => check::no_members(),
            n if n == have => Ok(()),
            n => {
                Err(Error::invalid(format!("there are {have} {name} but {n} ranks; pass one per rank, in rank order")))
            }
        }
    }

    fn list(&self, what: &str, op: Operation, bufs: Vec<RawBuf>) -> Result<RawBlocks> {
        self.one_per_rank(&format!("{what} buffers"), bufs.len())?;
        alike(what, op, bufs.iter().copied())?;
        Ok(RawBlocks::list(bufs))
    }

    fn list_mut(&self, what: &str, op: Operation, bufs: Vec<RawBufMut>) -> Result<RawBlocksMut> {
        self.one_per_rank(&format!("{what} buffers"), bufs.len())?;
        alike(what, op, bufs.iter().map(RawBufMut::as_const))?;
        let mut ranges: Vec<_> = bufs
            .iter()
            .enumerate()
            .filter(|(_, b)| b.bytes() > 0)
            .map(|(i, b)| (b.ptr() as usize, b.bytes(), i))
            .collect();
        ranges.sort_unstable();
        if let Some([(_, _, i), (_, _, j)]) =
            ranges.windows(2).find_map(|w| if w[0].0 + w[0].1 > w[1].0 { <&[_; 2]>::try_from(w).ok() } else { None })
        {
            return Err(Error::invalid(format!("{what} buffers {i} and {j} overlap; they must be disjoint")));
        }
        Ok(RawBlocksMut::list(bufs))
    }

    /// The block of this rank on one side must be as long as its buffer on the other.
    fn fits(&self, what: &str, other: &str, own: &RawBuf, blocks: &RawBlocks) -> Result<()> {
        let rank = self.comm.rank();
        check::same_dtype(own.dtype(), blocks.dtype())?;
        check::counts(what, own.count(), &format!("{other} block {rank}"), blocks.get(rank).count())
    }
}

fn gather(op: Operation, input: RawBuf, output: Option<RawBlocksMut>, root: usize) -> OpRequest {
    match op {
        Operation::GatherV => OpRequest::GatherV { input, output, root },
        _ => OpRequest::Gather { input, output, root },
    }
}

fn scatter(op: Operation, input: Option<RawBlocks>, output: RawBufMut, root: usize) -> OpRequest {
    match op {
        Operation::ScatterV => OpRequest::ScatterV { input, output, root },
        _ => OpRequest::Scatter { input, output, root },
    }
}

fn reduce_scatter(op: Operation, input: RawBlocks, output: RawBufMut, reducer: Reducer) -> OpRequest {
    match op {
        Operation::ReduceScatterV => OpRequest::ReduceScatterV { input, output, reducer },
        _ => OpRequest::ReduceScatter { input, output, reducer },
    }
}

/// A descriptor of `op`; where ranks must agree on all block lengths, with their hash.
fn described(op: Operation, own: &RawBuf, blocks: Option<&RawBlocks>) -> OpDesc {
    let desc = OpDesc::new(op).elements(own.dtype(), own.count());
    match blocks {
        Some(b) if op.agreement().splits => desc.splits(&b.iter().map(|b| b.count()).collect::<Vec<_>>()),
        _ => desc,
    }
}

fn no_buffer(op: Operation, what: &str) -> Error {
    Error::invalid(format!("the root must pass {what} to {op}; only other ranks may leave it out"))
}

/// Buffers of a list have one type and place; equal lengths too unless the operation takes uneven blocks.
fn alike(what: &str, op: Operation, mut bufs: impl Iterator<Item = RawBuf>) -> Result<()> {
    let uneven = matches!(
        op,
        Operation::AllGatherV
            | Operation::GatherV
            | Operation::ScatterV
            | Operation::ReduceScatterV
            | Operation::AllToAllV
    );
    let Some(first) = bufs.next() else { return Ok(()) };
    for (i, b) in bufs.enumerate() {
        if b.dtype() != first.dtype() || b.device() != first.device() {
            return Err(Error::invalid(format!(
                "{what} buffer {} is {} on {} but buffer 0 is {} on {}; they must be alike",
                i + 1,
                b.dtype(),
                b.device(),
                first.dtype(),
                first.device()
            )));
        }
        if !uneven && b.bytes() != first.bytes() {
            return Err(Error::invalid(format!(
                "{what} buffer {} has {} elements but buffer 0 has {}; {op}_list takes equal lengths, {op}_v_list uneven ones",
                i + 1,
                b.count(),
                first.count()
            )));
        }
    }
    Ok(())
}

/// Blocks that are written must be disjoint from what is read.
fn apart(blocks: &RawBlocksMut, input: &RawBuf) -> Result<()> {
    if let Some(whole) = blocks.whole() {
        return check::disjoint(input, &whole);
    }
    blocks.iter().try_for_each(|b| check::disjoint(input, &b))
}
