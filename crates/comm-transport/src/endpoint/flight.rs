//! The handle on an asynchronous operation, as [`comm_core::Pending`].

use std::sync::Arc;
use std::task::{Poll, Waker};

use comm_core::{ErrorKind, Pending, Result, Time};

use super::Endpoint;
use super::op::OpId;
use super::state::State;

/// An operation in flight.
pub(super) struct Flight {
    pub(super) endpoint: Arc<Endpoint>,
    pub(super) op: OpId,
    pub(super) result: Option<Result<()>>,
}

impl Flight {
    fn take(&mut self, st: &mut State) -> Option<Result<()>> {
        if self.result.is_none() {
            self.result = st.release_op(self.op);
        }
        self.result.clone()
    }
}

impl Pending for Flight {
    fn poll(&mut self) -> Poll<Result<()>> {
        let endpoint = Arc::clone(&self.endpoint);
        let found = endpoint.with(|st| {
            if self.take(st).is_none() {
                st.progress(true);
            }
            self.take(st).map_or(Poll::Pending, Poll::Ready)
        });
        if found.is_pending() {
            endpoint.clock().relax();
        }
        found
    }

    fn wait(&mut self, until: Option<Time>) -> Poll<Result<()>> {
        let endpoint = Arc::clone(&self.endpoint);
        let st = endpoint.state.lock();
        endpoint.drive(st, until, |st| self.take(st)).map_or(Poll::Pending, Poll::Ready)
    }

    fn set_waker(&mut self, waker: &Waker) {
        let endpoint = Arc::clone(&self.endpoint);
        let done = endpoint.with(|st| match st.slot(self.op) {
            Some(slot) if slot.result.is_none() => {
                slot.waker = Some(waker.clone());
                false
            }
            _ => true,
        });
        if done {
            waker.wake_by_ref();
        }
    }

    fn cancel(&mut self) {
        let endpoint = Arc::clone(&self.endpoint);
        endpoint.with(|st| {
            let Some(slot) = st.slot(self.op) else { return };
            if slot.result.is_none() {
                let (g, desc) = (slot.group, slot.desc);
                let rank = st.group(g).map_or(0, |g| g.rank);
                let cause = format!("{desc} was cancelled");
                st.fail_group(g, ErrorKind::Aborted { rank, cause }.into(), true);
                // A group that had left already does not fail any more; the operation ends all the same.
                st.finish_op(self.op, Err(ErrorKind::Finalized.into()));
            }
        });
    }
}

impl Drop for Flight {
    fn drop(&mut self) {
        if self.result.is_none() {
            self.cancel();
            let endpoint = Arc::clone(&self.endpoint);
            endpoint.with(|st| st.release_op(self.op));
        }
    }
}
