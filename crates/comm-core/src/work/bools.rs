//! Outputs of `bool`s, in which what has come over a wire must be made 0 or 1.

use crate::backend::{OpRequest, P2pOp};
use crate::blocks::RawBlocksMut;
use crate::buf::RawBufMut;
use crate::device::DeviceKind;
use crate::dtype::DType;
use crate::reduce::normalize_bools;

/// The outputs of a request whose bytes must be normalised, whatever the outcome: after an error too the
/// caller gets a buffer of `bool`s back.
pub(crate) fn bool_outputs(request: &OpRequest) -> Vec<RawBufMut> {
    use OpRequest as R;
    fn is_bool(b: &&RawBufMut) -> bool {
        b.dtype() == DType::Bool && b.device().kind == DeviceKind::Cpu && b.bytes() > 0
    }
    let one = |b: &RawBufMut| Some(b).filter(is_bool).copied().into_iter().collect();
    let blocks = |b: &RawBlocksMut| match b.whole() {
        Some(all) => one(&all),
        None => b.iter().filter(|b| is_bool(&b)).collect(),
    };
    let received = |m: &P2pOp| match m {
        P2pOp::Recv { buf, .. } => Some(*buf).filter(|b| is_bool(&b)),
        P2pOp::Send { .. } => None,
    };
    match request {
        R::P2p(_) | R::Batch(_) | R::SendRecv(_) => request.messages().iter().filter_map(received).collect(),
        R::Broadcast { buf, .. } => one(buf),
        // In place the whole buffer is writable, and what surrounds the result is scratch. The pointer came from
        // a mutable range.
        R::ReduceScatter { input, output, .. } | R::ReduceScatterV { input, output, .. } => match input.whole() {
            Some(i) if output.overlaps(&i) => {
                one(&RawBufMut::new(i.ptr().cast_mut(), i.bytes(), i.dtype(), i.device()))
            }
            _ => one(output),
        },
        // Reductions store 0 and 1 themselves, but a copy of a world of one does not pass through them.
        R::AllReduce { output, .. }
        | R::Scan { output, .. }
        | R::Exscan { output, .. }
        | R::Scatter { output, .. }
        | R::ScatterV { output, .. } => one(output),
        R::Reduce { output, .. } => output.as_ref().map_or_else(Vec::new, one),
        R::AllGather { output, .. }
        | R::AllGatherV { output, .. }
        | R::AllToAll { output, .. }
        | R::AllToAllV { output, .. } => blocks(output),
        R::Gather { output, .. } | R::GatherV { output, .. } => output.as_ref().map_or_else(Vec::new, blocks),
        R::Barrier => Vec::new(),
    }
}

/// Makes the bytes of these outputs valid `bool`s.
///
/// # Safety
///
/// The ranges are valid and nobody else uses them.
pub(crate) unsafe fn normalize_all(outputs: &[RawBufMut]) {
    for b in outputs {
        // SAFETY: by the caller's promise; `bool_outputs` leaves empty ranges out, whose pointer may be anything.
        normalize_bools(unsafe { std::slice::from_raw_parts_mut(b.ptr(), b.bytes()) });
    }
}
