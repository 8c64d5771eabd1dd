//! From a method's arguments to a request: where every argument check is made, once for all forms.

mod blocks;

use crate::backend::{OpRequest, P2pOp};
use crate::buf::{RawBuf, RawBufMut};
use crate::comm::check;
use crate::comm::ops::With;
use crate::desc::{OpDesc, Operation};
use crate::error::{Error, Result};
use crate::reduce::Reducer;

/// A call's descriptor and its request, or the reason why there is none.
pub(in crate::comm) struct Prepared {
    pub(in crate::comm) desc: OpDesc,
    pub(in crate::comm) request: Result<OpRequest>,
}

impl With<'_> {
    pub(in crate::comm) fn next_send(&self, peer: usize, tag: u32) -> u64 {
        bump(&self.comm.inner().p2p_sends, peer, tag)
    }

    pub(in crate::comm) fn next_recv(&self, peer: usize, tag: u32) -> u64 {
        bump(&self.comm.inner().p2p_recvs, peer, tag)
    }

    pub(in crate::comm) fn p2p_send(&self, buf: Result<RawBuf>, peer: usize) -> Result<P2pOp> {
        let buf = buf?;
        self.comm.inner().check_usable(&OpDesc::new(Operation::Send))?;
        check::rank_in_range("destination", peer, self.size())?;
        check::reachable(&buf, self.comm.device())?;
        // Everything that can refuse the call locally comes before it takes a number the peer would wait for.
        self.check_options()?;
        let tag = self.options.tag;
        Ok(P2pOp::Send { buf, peer, tag, seq: self.next_send(peer, tag) })
    }

    pub(in crate::comm) fn p2p_recv(&self, buf: Result<RawBufMut>, peer: usize) -> Result<P2pOp> {
        let buf = buf?;
        self.comm.inner().check_usable(&OpDesc::new(Operation::Recv))?;
        check::rank_in_range("source", peer, self.size())?;
        check::reachable(&buf.as_const(), self.comm.device())?;
        // Everything that can refuse the call locally comes before it takes a number the peer would wait for.
        self.check_options()?;
        let tag = self.options.tag;
        Ok(P2pOp::Recv { buf, peer, tag, seq: self.next_recv(peer, tag) })
    }

    pub(in crate::comm) fn prep_send(&self, buf: Result<RawBuf>, peer: usize) -> Prepared {
        Prepared { desc: describe(Operation::Send, &buf), request: self.p2p_send(buf, peer).map(OpRequest::P2p) }
    }

    pub(in crate::comm) fn prep_recv(&self, buf: Result<RawBufMut>, peer: usize) -> Prepared {
        Prepared { desc: describe_mut(Operation::Recv, &buf), request: self.p2p_recv(buf, peer).map(OpRequest::P2p) }
    }

    pub(in crate::comm) fn prep_broadcast(&self, buf: Result<RawBufMut>, root: usize) -> Prepared {
        let desc = describe_mut(Operation::Broadcast, &buf).root(root);
        let request = buf.and_then(|buf| {
            check::rank_in_range("root", root, self.size())?;
            Ok(OpRequest::Broadcast { buf, root })
        });
        Prepared { desc, request }
    }

    pub(in crate::comm) fn prep_all_reduce(&self, buf: Result<RawBufMut>, reducer: Result<Reducer>) -> Prepared {
        let desc = with_redop(describe_mut(Operation::AllReduce, &buf), &reducer);
        let request =
            buf.and_then(|output| Ok(OpRequest::AllReduce { input: output.as_const(), output, reducer: reducer? }));
        Prepared { desc, request }
    }

    pub(in crate::comm) fn prep_all_reduce_into(
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

    pub(in crate::comm) fn prep_reduce(
        &self,
        buf: Result<RawBufMut>,
        reducer: Result<Reducer>,
        root: usize,
    ) -> Prepared {
        let desc = with_redop(describe_mut(Operation::Reduce, &buf), &reducer).root(root);
        let request = buf.and_then(|buf| {
            check::rank_in_range("root", root, self.size())?;
            let output = (root == self.comm.rank()).then_some(buf);
            Ok(OpRequest::Reduce { input: buf.as_const(), output, reducer: reducer?, root })
        });
        Prepared { desc, request }
    }

    pub(in crate::comm) fn prep_reduce_into(
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

    /// `exclusive`: [`Operation::Exscan`].
    pub(in crate::comm) fn prep_scan(
        &self,
        exclusive: bool,
        buf: Result<RawBufMut>,
        reducer: Result<Reducer>,
    ) -> Prepared {
        let input = buf.as_ref().map(RawBufMut::as_const).map_err(Clone::clone);
        let desc = with_redop(describe_mut(scan_of(exclusive), &buf), &reducer);
        let request = buf.and_then(|output| Ok(scan(exclusive, input?, output, reducer?)));
        Prepared { desc, request }
    }

    pub(in crate::comm) fn prep_scan_into(
        &self,
        exclusive: bool,
        input: Result<RawBuf>,
        output: Result<RawBufMut>,
        reducer: Result<Reducer>,
    ) -> Prepared {
        let desc = with_redop(describe(scan_of(exclusive), &input), &reducer);
        let request = both(input, output).and_then(|(input, output)| {
            check::counts("output", output.count(), "the input's length", input.count())?;
            check::disjoint(&input, &output)?;
            Ok(scan(exclusive, input, output, reducer?))
        });
        Prepared { desc, request }
    }

    pub(in crate::comm) fn prep_sendrecv(
        &self,
        send: Result<RawBuf>,
        dst: usize,
        recv: Result<RawBufMut>,
        src: usize,
    ) -> Prepared {
        let desc = describe(Operation::SendRecv, &send);
        let pair = send.and_then(|s| recv.map(|r| (s, r)));
        let request = pair.and_then(|(s, r)| {
            // Neither takes a number unless both can be posted.
            check::rank_in_range("destination", dst, self.size())?;
            check::rank_in_range("source", src, self.size())?;
            check::reachable(&s, self.comm.device())?;
            check::reachable(&r.as_const(), self.comm.device())?;
            check::disjoint(&s, &r)?;
            Ok(OpRequest::SendRecv([self.p2p_send(Ok(s), dst)?, self.p2p_recv(Ok(r), src)?]))
        });
        Prepared { desc, request }
    }

    pub(in crate::comm) fn prep_barrier(&self) -> Prepared {
        Prepared { desc: OpDesc::new(Operation::Barrier), request: Ok(OpRequest::Barrier) }
    }
}

const fn scan_of(exclusive: bool) -> Operation {
    if exclusive { Operation::Exscan } else { Operation::Scan }
}

const fn scan(exclusive: bool, input: RawBuf, output: RawBufMut, reducer: Reducer) -> OpRequest {
    if exclusive { OpRequest::Exscan { input, output, reducer } } else { OpRequest::Scan { input, output, reducer } }
}

fn bump(map: &parking_lot::Mutex<std::collections::HashMap<(usize, u32), u64>>, peer: usize, tag: u32) -> u64 {
    let mut map = map.lock();
    let next = map.entry((peer, tag)).or_insert(0);
    *next += 1;
    *next - 1
}

pub(in crate::comm) fn describe(op: Operation, buf: &Result<RawBuf>) -> OpDesc {
    let d = OpDesc::new(op);
    buf.as_ref().map_or(d, |b| d.elements(b.dtype(), b.count()))
}

pub(in crate::comm) fn describe_mut(op: Operation, buf: &Result<RawBufMut>) -> OpDesc {
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
