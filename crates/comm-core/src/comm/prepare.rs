//! From a method's arguments to a request: where every argument check is made, once for all forms.

use crate::backend::{OpRequest, P2pOp};
use crate::buf::{RawBuf, RawBufMut};
use crate::comm::check;
use crate::comm::ops::With;
use crate::desc::{OpDesc, Operation};
use crate::error::{Error, Result};
use crate::reduce::Reducer;

/// A call's descriptor and its request, or the reason why there is none.
pub(super) struct Prepared {
    pub(super) desc: OpDesc,
    pub(super) request: Result<OpRequest>,
}

impl With<'_> {
    pub(super) fn next_send(&self, peer: usize, tag: u32) -> u64 {
        bump(&self.comm.inner().p2p_sends, peer, tag)
    }

    pub(super) fn next_recv(&self, peer: usize, tag: u32) -> u64 {
        bump(&self.comm.inner().p2p_recvs, peer, tag)
    }

    pub(super) fn p2p_send(&self, buf: Result<RawBuf>, peer: usize) -> Result<P2pOp> {
        let buf = buf?;
        check::rank_in_range("destination", peer, self.size())?;
        check::reachable(&buf, self.comm.device())?;
        // Everything that can refuse the call locally comes before it takes a number the peer would wait for.
        self.check_options()?;
        self.comm.inner().check_usable(&OpDesc::new(Operation::Send))?;
        let tag = self.options.tag;
        Ok(P2pOp::Send { buf, peer, tag, seq: self.next_send(peer, tag) })
    }

    pub(super) fn p2p_recv(&self, buf: Result<RawBufMut>, peer: usize) -> Result<P2pOp> {
        let buf = buf?;
        check::rank_in_range("source", peer, self.size())?;
        check::reachable(&buf.as_const(), self.comm.device())?;
        // Everything that can refuse the call locally comes before it takes a number the peer would wait for.
        self.check_options()?;
        self.comm.inner().check_usable(&OpDesc::new(Operation::Recv))?;
        let tag = self.options.tag;
        Ok(P2pOp::Recv { buf, peer, tag, seq: self.next_recv(peer, tag) })
    }

    pub(super) fn prep_send(&self, buf: Result<RawBuf>, peer: usize) -> Prepared {
        Prepared { desc: describe(Operation::Send, &buf), request: self.p2p_send(buf, peer).map(OpRequest::P2p) }
    }

    pub(super) fn prep_recv(&self, buf: Result<RawBufMut>, peer: usize) -> Prepared {
        Prepared { desc: describe_mut(Operation::Recv, &buf), request: self.p2p_recv(buf, peer).map(OpRequest::P2p) }
    }

    pub(super) fn prep_broadcast(&self, buf: Result<RawBufMut>, root: usize) -> Prepared {
        let desc = describe_mut(Operation::Broadcast, &buf).root(root);
        let request = buf.and_then(|buf| {
            check::rank_in_range("root", root, self.size())?;
            Ok(OpRequest::Broadcast { buf, root })
        });
        Prepared { desc, request }
    }

    pub(super) fn prep_all_reduce(&self, buf: Result<RawBufMut>, reducer: Result<Reducer>) -> Prepared {
        let desc = with_redop(describe_mut(Operation::AllReduce, &buf), &reducer);
        let request =
            buf.and_then(|output| Ok(OpRequest::AllReduce { input: output.as_const(), output, reducer: reducer? }));
        Prepared { desc, request }
    }

    pub(super) fn prep_all_reduce_into(
        &self,
        input: Result<RawBuf>,
        output: Result<RawBufMut>,
        reducer: Result<Reducer>,
    ) -> Prepared {
        let desc = with_redop(describe(Operation::AllReduce, &input), &reducer);
        let request = both(input, output).and_then(|(input, output)| {
            check::counts("output", output.count(), "the input's length", input.count())?;
            check::disjoint(&input, &output)?;
            Ok(OpRequest::AllReduce { input, output, reducer: reducer? })
        });
        Prepared { desc, request }
    }

    pub(super) fn prep_reduce(&self, buf: Result<RawBufMut>, reducer: Result<Reducer>, root: usize) -> Prepared {
        let desc = with_redop(describe_mut(Operation::Reduce, &buf), &reducer).root(root);
        let request = buf.and_then(|buf| {
            check::rank_in_range("root", root, self.size())?;
            let output = (root == self.comm.rank()).then_some(buf);
            Ok(OpRequest::Reduce { input: buf.as_const(), output, reducer: reducer?, root })
        });
        Prepared { desc, request }
    }

    pub(super) fn prep_reduce_into(
        &self,
        input: Result<RawBuf>,
        output: Option<Result<RawBufMut>>,
        reducer: Result<Reducer>,
        root: usize,
    ) -> Prepared {
        let desc = with_redop(describe(Operation::Reduce, &input), &reducer).root(root);
        let request = input.and_then(|input| {
            check::rank_in_range("root", root, self.size())?;
            let output = match output {
                Some(o) if root == self.comm.rank() => {
                    let (_, o) = both(Ok(input), o)?;
                    check::counts("output", o.count(), "the input's length", input.count())?;
                    check::disjoint(&input, &o)?;
                    Some(o)
                }
                None if root == self.comm.rank() => {
                    return Err(Error::invalid("the root must pass an output buffer to reduce_into"));
                }
                _ => None,
            };
            Ok(OpRequest::Reduce { input, output, reducer: reducer?, root })
        });
        Prepared { desc, request }
    }

    pub(super) fn prep_all_gather(&self, input: Result<RawBuf>, output: Result<RawBufMut>) -> Prepared {
        let desc = describe(Operation::AllGather, &input);
        let request = both(input, output).and_then(|(input, output)| {
            let want = check::times(input.count(), self.size());
            check::counts("output", output.count(), "world size times the input's length", want)?;
            check::disjoint(&input, &output)?;
            Ok(OpRequest::AllGather { input, output })
        });
        Prepared { desc, request }
    }

    /// `unit`: bytes of one value.
    pub(super) fn prep_all_gather_in_place(&self, buf: Result<RawBufMut>, unit: usize) -> Prepared {
        let mut desc = describe_mut(Operation::AllGather, &buf);
        let request = buf.and_then(|output| {
            let shard = check::divides("buffer", output.count(), output.dtype(), unit, self.size())?;
            desc.count = shard as u64;
            let bytes = shard * output.dtype().size();
            Ok(OpRequest::AllGather { input: output.slice(self.comm.rank() * bytes, bytes).as_const(), output })
        });
        Prepared { desc, request }
    }

    pub(super) fn prep_reduce_scatter(
        &self,
        input: Result<RawBuf>,
        output: Result<RawBufMut>,
        reducer: Result<Reducer>,
    ) -> Prepared {
        let mut desc = with_redop(describe(Operation::ReduceScatter, &input), &reducer);
        let request = both(input, output).and_then(|(input, output)| {
            let reducer = reducer?;
            desc.count = check::divides("input", input.count(), input.dtype(), reducer.unit(), self.size())? as u64;
            check::counts(
                "output",
                output.count(),
                "the input's length divided by the world size",
                desc.count as usize,
            )?;
            check::disjoint(&input, &output)?;
            Ok(OpRequest::ReduceScatter { input, output, reducer })
        });
        Prepared { desc, request }
    }

    pub(super) fn prep_reduce_scatter_in_place(&self, buf: Result<RawBufMut>, reducer: Result<Reducer>) -> Prepared {
        let mut desc = with_redop(describe_mut(Operation::ReduceScatter, &buf), &reducer);
        let request = buf.and_then(|all| {
            let reducer = reducer?;
            let shard = check::divides("buffer", all.count(), all.dtype(), reducer.unit(), self.size())?;
            desc.count = shard as u64;
            let bytes = shard * all.dtype().size();
            let output = all.slice(self.comm.rank() * bytes, bytes);
            Ok(OpRequest::ReduceScatter { input: all.as_const(), output, reducer })
        });
        Prepared { desc, request }
    }

    pub(super) fn prep_barrier(&self) -> Prepared {
        Prepared { desc: OpDesc::new(Operation::Barrier), request: Ok(OpRequest::Barrier) }
    }
}

fn bump(map: &parking_lot::Mutex<std::collections::HashMap<(usize, u32), u64>>, peer: usize, tag: u32) -> u64 {
    let mut map = map.lock();
    let next = map.entry((peer, tag)).or_insert(0);
    *next += 1;
    *next - 1
}

pub(super) fn describe(op: Operation, buf: &Result<RawBuf>) -> OpDesc {
    let d = OpDesc::new(op);
    buf.as_ref().map_or(d, |b| d.elements(b.dtype(), b.count()))
}

pub(super) fn describe_mut(op: Operation, buf: &Result<RawBufMut>) -> OpDesc {
    let d = OpDesc::new(op);
    buf.as_ref().map_or(d, |b| d.elements(b.dtype(), b.count()))
}

fn with_redop(desc: OpDesc, reducer: &Result<Reducer>) -> OpDesc {
    reducer.as_ref().map_or(desc, |r| desc.redop(r.op()))
}

fn both(input: Result<RawBuf>, output: Result<RawBufMut>) -> Result<(RawBuf, RawBufMut)> {
    let (i, o) = (input?, output?);
    check::same_dtype(i.dtype(), o.dtype())?;
    Ok((i, o))
}
