//! [`HostBackend`]: the safe way to write a backend. Bytes in, bytes out.
//!
//! [`host_backend`] adapts one to [`Backend`](crate::Backend).

mod adapter;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::backend::{BackendInfo, CallInfo, OpQuery, Support};
use crate::control::Control;
use crate::desc::OpDesc;
use crate::error::{Error, Result};
use crate::observe::CallNumber;
use crate::reduce::Reducer;
use crate::time::Clock;

pub use adapter::host_backend;

/// A backend for host memory, written without `unsafe`.
///
/// Implement what you can; what is left out answers `Unsupported`, and [`supports`](Self::supports)
/// must say the same. Arguments are validated before they get here. Methods may be called from the
/// caller's thread and from threads of the adapter, several at a time; a collective that is called
/// asynchronously runs after those called so before it.
///
/// When a collective answers `Unsupported`, the adapter [`refuse`](Self::refuse)s it, for ranks that make another call there.
/// The example `own_backend` of the crate `rustcomms` is a complete backend.
pub trait HostBackend: Send + Sync + fmt::Debug + 'static {
    /// What this is.
    fn info(&self) -> &BackendInfo;

    /// Whether and how an operation is done.
    fn supports(&self, query: &OpQuery) -> Support;

    /// The clock that deadlines are measured on.
    fn clock(&self) -> &Arc<dyn Clock>;

    /// Sends `data` to `peer`; `seq` numbers the messages per peer and tag. `call` describes this message, also in a batch.
    fn send(&self, data: &[u8], peer: usize, tag: u32, seq: u64, call: &CallInfo<'_>) -> Result<()> {
        let _ = (data, peer, tag, seq);
        Err(self.lacks(call))
    }

    /// Receives exactly `data.len()` bytes from `peer`.
    fn recv(&self, data: &mut [u8], peer: usize, tag: u32, seq: u64, call: &CallInfo<'_>) -> Result<()> {
        let _ = (data, peer, tag, seq);
        Err(self.lacks(call))
    }

    /// Copies root's `data` into everybody's.
    fn broadcast(&self, data: &mut [u8], root: usize, call: &CallInfo<'_>) -> Result<()> {
        let _ = (data, root);
        Err(self.lacks(call))
    }

    /// Reduces `data` in place on all ranks. The reducer folds, scales and finishes bytes.
    fn all_reduce(&self, data: &mut [u8], reducer: &Reducer, call: &CallInfo<'_>) -> Result<()> {
        let _ = (data, reducer);
        Err(self.lacks(call))
    }

    /// Reduces to the root: there `data` is replaced by the result, elsewhere its contents do not matter afterwards.
    fn reduce(&self, data: &mut [u8], reducer: &Reducer, root: usize, call: &CallInfo<'_>) -> Result<()> {
        let _ = (data, reducer, root);
        Err(self.lacks(call))
    }

    /// Concatenates everybody's `input` into `output`.
    fn all_gather(&self, input: &[u8], output: &mut [u8], call: &CallInfo<'_>) -> Result<()> {
        let _ = (input, output);
        Err(self.lacks(call))
    }

    /// Concatenates everybody's `input` into `output`; `lengths` has the bytes of each rank, the same on all ranks.
    fn all_gather_v(&self, input: &[u8], output: &mut [u8], lengths: &[usize], call: &CallInfo<'_>) -> Result<()> {
        let _ = (input, output, lengths);
        Err(self.lacks(call))
    }

    /// Concatenates everybody's `input` into the root's `output`, which is `None` elsewhere.
    fn gather(&self, input: &[u8], output: Option<&mut [u8]>, root: usize, call: &CallInfo<'_>) -> Result<()> {
        let _ = (input, output, root);
        Err(self.lacks(call))
    }

    /// Concatenates everybody's `input` into the root's output, which comes with the bytes of each rank.
    fn gather_v(
        &self,
        input: &[u8],
        output: Option<(&mut [u8], &[usize])>,
        root: usize,
        call: &CallInfo<'_>,
    ) -> Result<()> {
        let _ = (input, output, root);
        Err(self.lacks(call))
    }

    /// Deals the blocks of the root's `input`, which is `None` elsewhere, out to all.
    fn scatter(&self, input: Option<&[u8]>, output: &mut [u8], root: usize, call: &CallInfo<'_>) -> Result<()> {
        let _ = (input, output, root);
        Err(self.lacks(call))
    }

    /// Deals the blocks of the root's input out to all; it comes with the bytes of each rank.
    fn scatter_v(
        &self,
        input: Option<(&[u8], &[usize])>,
        output: &mut [u8],
        root: usize,
        call: &CallInfo<'_>,
    ) -> Result<()> {
        let _ = (input, output, root);
        Err(self.lacks(call))
    }

    /// Sends block `r` of `input` to rank `r` and puts what comes from it into block `r` of `output`.
    fn all_to_all(&self, input: &[u8], output: &mut [u8], call: &CallInfo<'_>) -> Result<()> {
        let _ = (input, output);
        Err(self.lacks(call))
    }

    /// [`all_to_all`](Self::all_to_all) with the bytes that go to and come from each rank.
    fn all_to_all_v(
        &self,
        (input, sends): (&[u8], &[usize]),
        (output, receives): (&mut [u8], &[usize]),
        call: &CallInfo<'_>,
    ) -> Result<()> {
        let _ = (input, sends, output, receives);
        Err(self.lacks(call))
    }

    /// Replaces `data` by the reduction over the ranks up to and including this one, in rank order.
    fn scan(&self, data: &mut [u8], reducer: &Reducer, call: &CallInfo<'_>) -> Result<()> {
        let _ = (data, reducer);
        Err(self.lacks(call))
    }

    /// Replaces `data` by the reduction over the ranks before this one, in rank order. On rank 0 it stays as it is.
    fn exscan(&self, data: &mut [u8], reducer: &Reducer, call: &CallInfo<'_>) -> Result<()> {
        let _ = (data, reducer);
        Err(self.lacks(call))
    }

    /// Reduces everybody's `input` and leaves the own block in `output`; `lengths` has the bytes of each block.
    fn reduce_scatter_v(
        &self,
        input: &[u8],
        lengths: &[usize],
        output: &mut [u8],
        reducer: &Reducer,
        call: &CallInfo<'_>,
    ) -> Result<()> {
        let _ = (input, lengths, output, reducer);
        Err(self.lacks(call))
    }

    /// Reduces everybody's `input` and leaves the own block in `output`.
    fn reduce_scatter(&self, input: &[u8], output: &mut [u8], reducer: &Reducer, call: &CallInfo<'_>) -> Result<()> {
        let _ = (input, output, reducer);
        Err(self.lacks(call))
    }

    /// Returns when all ranks have called it.
    fn barrier(&self, call: &CallInfo<'_>) -> Result<()> {
        Err(self.lacks(call))
    }

    /// The control plane, if there is one.
    fn control(&self) -> Option<Arc<dyn Control>> {
        None
    }

    /// Another rank must not wait for this one in this call.
    fn refuse(&self, number: &CallNumber, desc: &OpDesc, reason: &str);

    /// The error that the communicator failed with.
    fn failure(&self) -> Option<Error>;

    /// Ends everything in flight on all ranks. Any thread, never blocks.
    fn abort(&self, cause: &Error);

    /// Collective end.
    fn finalize(&self, timeout: Duration) -> Result<()>;

    /// Local end.
    fn close(&self);

    /// The error for an operation that is not implemented.
    fn lacks(&self, call: &CallInfo<'_>) -> Error {
        Error::unsupported(
            call.desc.operation.name(),
            format!("backend {} does not implement it; ask `supports` first", self.info().name),
        )
    }
}
