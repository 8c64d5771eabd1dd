//! The one place where arguments are validated.

use crate::backend::{OpRequest, P2pOp};
use crate::buf::{RawBuf, RawBufMut};
use crate::device::{Device, DeviceKind};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::reduce::Reducer;

pub(super) fn rank_in_range(what: &str, rank: usize, size: usize) -> Result<()> {
    if rank < size {
        return Ok(());
    }
    let Some(last) = size.checked_sub(1) else { return no_members() };
    Err(Error::invalid(format!("{what} {rank} is out of range: this communicator has ranks 0 to {last}")))
}

/// The answer of a dynamic communicator that has not been filled yet.
pub(super) fn no_members<T>() -> Result<T> {
    Err(Error::invalid("this communicator has no members yet: call reconfigure"))
}

/// A typed operator is made for the element type by the compiler, but `Operator` may be implemented by anybody.
pub(super) fn reducible(buf: &RawBuf, reducer: &Reducer) -> Result<()> {
    if reducer.dtype() == buf.dtype() && buf.bytes().is_multiple_of(reducer.unit()) {
        return Ok(());
    }
    Err(Error::invalid(format!(
        "the operator works on {} in units of {} bytes, but the buffer has {} bytes of {}",
        reducer.dtype(),
        reducer.unit(),
        buf.bytes(),
        buf.dtype()
    )))
}

pub(super) fn same_dtype(a: DType, b: DType) -> Result<()> {
    if a == b {
        Ok(())
    } else {
        Err(Error::invalid(format!("input is {a} but output is {b}; they must have the same type")))
    }
}

pub(super) fn counts(what: &str, have: usize, rule: &str, want: usize) -> Result<()> {
    if have == want {
        return Ok(());
    }
    Err(Error::invalid(format!("{what} has {have} elements but must have {want} ({rule})")))
}

/// Saturates where the product overflows: no buffer is that long.
pub(super) fn times(count: usize, size: usize) -> usize {
    count.saturating_mul(size)
}

/// Wire elements of one rank's share of `count`. Values of `unit` bytes (a user's struct) are not cut.
pub(super) fn divides(what: &str, count: usize, dtype: DType, unit: usize, size: usize) -> Result<usize> {
    if size == 0 {
        return no_members();
    }
    let per_value = (unit / dtype.size()).max(1);
    let values = count / per_value;
    if count.is_multiple_of(per_value) && values.is_multiple_of(size) {
        return Ok(count / size);
    }
    Err(Error::invalid(format!(
        "{what} has {values} elements, which {size} ranks cannot share evenly; pad it to {}",
        values.next_multiple_of(size)
    )))
}

/// A communicator of host memory cannot take device memory: its backend would follow a pointer that the host
/// must not. (The other way round is the backend's to say.)
pub(super) fn reachable(buf: &RawBuf, device: Device) -> Result<()> {
    if device.kind != DeviceKind::Cpu || buf.device().kind == DeviceKind::Cpu {
        return Ok(());
    }
    Err(Error::invalid(format!(
        "a buffer lies on {} but this communicator works on {device} memory; copy it there, or use a communicator of that device",
        buf.device()
    )))
}

/// What all collective requests must satisfy; point-to-point calls ask before they take a number.
pub(crate) fn request(request: &OpRequest, size: usize, device: Device) -> Result<()> {
    use OpRequest as R;
    if size == 0 {
        return no_members();
    }
    match request {
        R::AllReduce { input, reducer, .. }
        | R::Reduce { input, reducer, .. }
        | R::Scan { input, reducer, .. }
        | R::Exscan { input, reducer, .. } => reducible(input, reducer)?,
        R::ReduceScatter { input, reducer, .. } | R::ReduceScatterV { input, reducer, .. } => {
            input.iter().try_for_each(|b| reducible(&b, reducer))?;
        }
        _ => {}
    }
    let written = |buf: &RawBufMut| reachable(&buf.as_const(), device);
    match request {
        R::P2p(_) | R::Batch(_) | R::SendRecv(_) => messages(request.messages(), device),
        R::Barrier => Ok(()),
        R::Broadcast { buf, .. } => written(buf),
        R::AllReduce { input, output, .. } | R::Scan { input, output, .. } | R::Exscan { input, output, .. } => {
            reachable(input, device)?;
            written(output)
        }
        R::Reduce { input, output, .. } => {
            reachable(input, device)?;
            output.as_ref().map_or(Ok(()), written)
        }
        R::AllGather { input, output } | R::AllGatherV { input, output } => {
            reachable(input, device)?;
            output.iter().try_for_each(|b| written(&b))
        }
        R::Gather { input, output, .. } | R::GatherV { input, output, .. } => {
            reachable(input, device)?;
            output.iter().flat_map(|o| o.iter()).try_for_each(|b| written(&b))
        }
        R::Scatter { input, output, .. } | R::ScatterV { input, output, .. } => {
            input.iter().flat_map(|i| i.iter()).try_for_each(|b| reachable(&b, device))?;
            written(output)
        }
        R::ReduceScatter { input, output, .. } | R::ReduceScatterV { input, output, .. } => {
            input.iter().try_for_each(|b| reachable(&b, device))?;
            written(output)
        }
        R::AllToAll { input, output } | R::AllToAllV { input, output } => {
            input.iter().try_for_each(|b| reachable(&b, device))?;
            output.iter().try_for_each(|b| written(&b))
        }
    }
}

fn messages(list: &[P2pOp], device: Device) -> Result<()> {
    list.iter().try_for_each(|m| match m {
        P2pOp::Send { buf, .. } => reachable(buf, device),
        P2pOp::Recv { buf, .. } => reachable(&buf.as_const(), device),
    })
}

/// Input and output must be disjoint.
pub(super) fn disjoint(input: &RawBuf, output: &RawBufMut) -> Result<()> {
    if output.overlaps(input) {
        return Err(Error::invalid(
            "input and output overlap; pass disjoint buffers, or use the in-place form of the operation",
        ));
    }
    Ok(())
}

pub(super) fn split_list(ranks: &[usize], own: usize, size: usize) -> Result<()> {
    let mut seen = vec![false; size];
    for &r in ranks {
        rank_in_range("split rank", r, size)?;
        if std::mem::replace(&mut seen[r], true) {
            return Err(Error::invalid(format!("split list {ranks:?} names rank {r} twice")));
        }
    }
    if !ranks.is_empty() && !seen[own] {
        return Err(Error::invalid(format!(
            "split list {ranks:?} does not contain this rank ({own}); pass an empty list to join no child"
        )));
    }
    Ok(())
}
