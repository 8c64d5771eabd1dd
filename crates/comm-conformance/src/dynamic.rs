//! Calls whose type and operator are chosen at run time, on memory of any alignment.

use comm_core::{DType, DynBuf, DynBufMut, Error, Operation, ReduceOp, Result};

use crate::buffer::sentinel;
use crate::case::Place;
use crate::exec::{Ctx, Readable, Seen, to_bytes};
use crate::kind::Kind;
use crate::layout::{Block, layout};
use crate::oper::is_dynamic;

/// Bytes of a guard zone: odd, so that no element is aligned.
const GUARD: usize = 67;

/// Elements as bytes, between guard zones.
#[derive(Debug)]
struct Bytes {
    mem: Vec<u8>,
    kind: Kind,
    len: usize,
}

impl Bytes {
    fn new(x: &Ctx<'_>, blocks: &[Block]) -> Self {
        let kind = x.case.kind;
        let len = blocks.iter().map(|b| b.len).sum::<usize>();
        let mut initial = x.initial(blocks, move |i| sentinel(kind, i));
        let mut mem: Vec<u8> = (0..GUARD).map(guard).collect();
        for i in 0..len {
            mem.extend(to_bytes(kind, initial(i)));
        }
        mem.extend((0..GUARD).map(guard));
        Self { mem, kind, len }
    }

    fn end(&self) -> usize {
        GUARD + self.len * self.kind.size()
    }

    fn lend(&self, dtype: DType) -> Result<DynBuf<'_>> {
        DynBuf::new(&self.mem[GUARD..self.end()], dtype)
    }

    fn lend_mut(&mut self, dtype: DType) -> Result<DynBufMut<'_>> {
        let end = self.end();
        DynBufMut::new(&mut self.mem[GUARD..end], dtype)
    }
}

fn guard(i: usize) -> u8 {
    sentinel(Kind::U8, i) as u8
}

impl Readable for Bytes {
    fn len(&self) -> usize {
        self.len
    }

    fn bits(&self, i: usize) -> u128 {
        let at = GUARD + i * self.kind.size();
        let bytes = &self.mem[at..at + self.kind.size()];
        bytes.iter().rev().fold(0, |bits, b| bits << 8 | u128::from(*b))
    }

    fn sentinel(&self, i: usize) -> u128 {
        sentinel(self.kind, i)
    }

    fn spilled(&self) -> Option<String> {
        let end = self.end();
        let bad = (0..GUARD).find(|i| self.mem[*i] != guard(*i) || self.mem[end + *i] != guard(*i))?;
        Some(format!("near byte {bad} of a guard zone"))
    }
}

/// Runs a case on this rank.
pub(crate) fn run(x: &Ctx<'_>) -> Result<Seen> {
    let Some((dtype, op)) = is_dynamic(x.case.kind, x.case.oper) else {
        return Err(Error::invalid("the suite made a dynamic case of a type that has no dtype"));
    };
    let l = layout(x.case, x.comm.size(), x.comm.rank());
    let input = l.input.as_deref().map(|b| Bytes::new(x, b));
    let mut output = l.output.as_deref().map(|b| Bytes::new(x, b));
    make(x, dtype, op, input.as_ref(), output.as_mut())?;
    let mut seen = Seen::default();
    x.check("input", input.as_slice(), l.input.as_deref(), &mut seen);
    x.check("output", output.as_slice(), l.output.as_deref(), &mut seen);
    Ok(seen)
}

fn make(x: &Ctx<'_>, d: DType, op: Option<ReduceOp>, i: Option<&Bytes>, o: Option<&mut Bytes>) -> Result<()> {
    use Operation as O;
    let (w, n, me, root) = (x.with(), x.comm.size(), x.comm.rank(), x.case.root);
    let gone = || Error::invalid("the suite made a case without the buffer that it needs");
    let i = i.map(|b| b.lend(d)).transpose()?;
    let o = o.map(|b| b.lend_mut(d)).transpose()?;
    let in_place = x.case.place == Place::In;
    match (x.case.op, op) {
        (O::AllReduce, Some(op)) if in_place => w.all_reduce_dyn(o.ok_or_else(gone)?, op),
        (O::AllReduce, Some(op)) => w.all_reduce_into_dyn(i.ok_or_else(gone)?, o.ok_or_else(gone)?, op),
        (O::Reduce, Some(op)) if in_place => w.reduce_dyn(o.ok_or_else(gone)?, op, root),
        (O::Reduce, Some(op)) => w.reduce_into_dyn(i.ok_or_else(gone)?, o, op, root),
        (O::Scan, Some(op)) if in_place => w.scan_dyn(o.ok_or_else(gone)?, op),
        (O::Scan, Some(op)) => w.scan_into_dyn(i.ok_or_else(gone)?, o.ok_or_else(gone)?, op),
        (O::Exscan, Some(op)) if in_place => w.exscan_dyn(o.ok_or_else(gone)?, op),
        (O::Exscan, Some(op)) => w.exscan_into_dyn(i.ok_or_else(gone)?, o.ok_or_else(gone)?, op),
        (O::ReduceScatter, Some(op)) if in_place => w.reduce_scatter_in_place_dyn(o.ok_or_else(gone)?, op),
        (O::ReduceScatter, Some(op)) => w.reduce_scatter_dyn(i.ok_or_else(gone)?, o.ok_or_else(gone)?, op),
        (O::ReduceScatterV, Some(op)) => {
            w.reduce_scatter_v_dyn(i.ok_or_else(gone)?, o.ok_or_else(gone)?, &x.case.counts(n), op)
        }
        (O::Broadcast, _) => w.broadcast_dyn(o.ok_or_else(gone)?, root),
        (O::AllGather, _) if in_place => w.all_gather_in_place_dyn(o.ok_or_else(gone)?),
        (O::AllGather, _) => w.all_gather_dyn(i.ok_or_else(gone)?, o.ok_or_else(gone)?),
        (O::AllGatherV, _) => w.all_gather_v_dyn(i.ok_or_else(gone)?, o.ok_or_else(gone)?, &x.known_counts()),
        (O::Gather, _) if in_place => w.gather_in_place_dyn(o.ok_or_else(gone)?, root),
        (O::Gather, _) => w.gather_dyn(i.ok_or_else(gone)?, o, root),
        (O::GatherV, _) => w.gather_v_dyn(i.ok_or_else(gone)?, o, &x.known_counts(), root),
        (O::Scatter, _) if in_place => w.scatter_in_place_dyn(o.ok_or_else(gone)?, root),
        (O::Scatter, _) => w.scatter_dyn(i, o.ok_or_else(gone)?, root),
        (O::ScatterV, _) => w.scatter_v_dyn(i, o.ok_or_else(gone)?, &x.known_counts(), root),
        (O::AllToAll, _) if in_place => w.all_to_all_in_place_dyn(o.ok_or_else(gone)?),
        (O::AllToAll, _) => w.all_to_all_dyn(i.ok_or_else(gone)?, o.ok_or_else(gone)?),
        (O::AllToAllV, _) => {
            let (sends, receives) = x.exchanged();
            w.all_to_all_v_dyn(i.ok_or_else(gone)?, o.ok_or_else(gone)?, &sends, &receives)
        }
        (O::SendRecv, _) => {
            w.sendrecv_dyn(i.ok_or_else(gone)?, o.ok_or_else(gone)?, (me + root) % n, (me + n - root % n) % n)
        }
        // One after the other round the ring, so that no two wait for each other; to oneself, one after the other
        // as long as the message is short (longer ones wait for their receiver).
        (O::Send | O::Recv, _) => {
            let (dst, src) = ((me + root) % n, (me + n - root % n) % n);
            let (i, o) = (i.ok_or_else(gone)?, o.ok_or_else(gone)?);
            // In each cycle of the ring the smallest rank sends first.
            let first = (0..n).map(|k| (me + k * root) % n).min() == Some(me);
            if first {
                w.send_dyn(i, dst)?;
                w.recv_dyn(o, src)
            } else {
                w.recv_dyn(o, src)?;
                w.send_dyn(i, dst)
            }
        }
        (op, _) => Err(Error::invalid(format!("the suite has no dynamic {op}"))),
    }
}
