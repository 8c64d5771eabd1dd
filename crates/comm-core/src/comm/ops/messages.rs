//! Point-to-point messages, broadcast and barrier.

use std::sync::atomic::Ordering;
use std::time::Duration;

use crate::backend::{CallInfo, Form, OpRequest};
use crate::comm::{Communicator, With};
use crate::desc::{OpDesc, Operation};
use crate::error::Result;
use crate::observe::CallNumber;
use crate::work::Work;

forms! {
    /// Sends `buf` to `dst`; returns when the buffer may be reused. Messages of a pair match by tag
    /// ([`CallOptions::tag`](crate::CallOptions::tag), else 0) and order. Up to 64 KiB are sent ahead and wait at the
    /// receiver; longer messages wait here until the receiver asks for them. So a rank that sends to itself must have
    /// posted the receive (asynchronously, in a scope, a batch, or with [`sendrecv`](Self::sendrecv)) when the
    /// message is longer than that.
    ///
    /// Counterpart: `ncclSend`, `MPI_Send`, `torchcomms send`.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` for a rank out of range; `Mismatch` when the receiver expects another length or type.
    fn send, send_async [B: IntoBuf + StreamOrdered] (buf: B; dst: usize) |w, b| w.prep_send(b.buf(), dst);

    /// Receives exactly `buf`'s length from `src`, the next message with the call's tag. Counterpart: `ncclRecv`, `MPI_Recv`, `torchcomms recv`.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` for a rank out of range; `Mismatch` when the message has another length or type.
    fn recv, recv_async [B: IntoBufMut + StreamOrdered] (buf: B; src: usize) |w, b| w.prep_recv(b.buf_mut(), src);

    /// Sends `send` to `dst` and receives `recv` from `src`, which progress together: rings and exchanges of pairs
    /// cannot deadlock, whatever the lengths, and a rank may exchange with itself. Both messages have the call's tag.
    /// Types and lengths of the two may differ. The other ends may be any of [`send`](Self::send), [`recv`](Self::recv), `sendrecv` and batches.
    ///
    /// Counterpart: `MPI_Sendrecv` (whose arguments are in another order); `ncclSend` and `ncclRecv` in a group; a torchcomms batch of two.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` for a rank out of range or overlapping buffers; `Mismatch` when an other end expects another
    /// length or type.
    fn sendrecv, sendrecv_async [I: IntoBuf + StreamOrdered, B: IntoBufMut + StreamOrdered]
        (send: I, recv: B; dst: usize, src: usize)
        |w, (s, r)| w.prep_sendrecv(s.buf(), dst, r.buf_mut(), src);

    /// Copies root's `buf` into everybody's. All pass the same length. Collective.
    /// Counterpart: `ncclBroadcast`, `MPI_Bcast`, `torchcomms broadcast`.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` for a root out of range; `Mismatch` when ranks differ in root, length or type.
    fn broadcast, broadcast_async [B: IntoBufMut + StreamOrdered] (buf: B; root: usize)
        |w, b| w.prep_broadcast(b.buf_mut(), root);
}

impl With<'_> {
    /// Returns when all ranks have called it; blocks the host. Collective.
    /// Counterpart: `MPI_Barrier`, `torchcomms barrier`.
    ///
    /// # Errors
    ///
    /// `Mismatch` when another rank makes another call.
    pub fn barrier(&self) -> Result<()> {
        self.run(self.prep_barrier())
    }

    /// Asynchronous [`barrier`](Self::barrier).
    ///
    /// # Errors
    ///
    /// As [`barrier`](Self::barrier).
    pub fn barrier_async(&self) -> Result<Work<()>> {
        self.launch((), |()| self.prep_barrier())
    }
}

impl Communicator {
    /// Returns when all ranks have called it; blocks the host. Collective.
    /// Counterpart: `MPI_Barrier`, `torchcomms barrier`.
    ///
    /// # Errors
    ///
    /// `Mismatch` when another rank makes another call.
    pub fn barrier(&self) -> Result<()> {
        self.with(crate::CallOptions::new()).barrier()
    }

    /// Asynchronous [`barrier`](Self::barrier).
    ///
    /// # Errors
    ///
    /// As [`barrier`](Self::barrier).
    pub fn barrier_async(&self) -> Result<Work<()>> {
        self.with(crate::CallOptions::new()).barrier_async()
    }

    /// A [`barrier`](Self::barrier) to find out who is missing: if not all ranks have come after `timeout`, every rank
    /// that has come gets a [`Timeout`](crate::ErrorKind::Timeout) with all the missing ones, however short the time; the
    /// communicator has failed with it then, and ranks that come later get `Aborted` with that text. When it returns well, every rank
    /// knew that all had come. It costs a message from each rank to each other one, and two barriers: the second one,
    /// which has as much time again, keeps a late rank from passing by what the others have left for it. Collective.
    ///
    /// Counterpart: torch's `monitored_barrier(wait_all_ranks=True)`.
    ///
    /// # Errors
    ///
    /// `Timeout` as above; `Mismatch` when another rank makes another call.
    pub fn monitored_barrier(&self, timeout: Duration) -> Result<()> {
        let i = self.inner();
        let desc = OpDesc::new(Operation::MonitoredBarrier);
        i.check_usable(&desc)?;
        let first = i.collective_seq.fetch_add(2, Ordering::Relaxed);
        let n = i.number(desc, CallNumber::Collective(first), Some(timeout), true);
        i.announce(&n, Form::Sync).map_err(|e| i.refuse(e, &n, Form::Sync))?;
        let result = (first..first + 2).try_for_each(|seq| {
            let call = CallInfo::new(desc, seq, n.op_id, timeout);
            // SAFETY: the request has no buffers.
            unsafe { i.backend.run(&OpRequest::Barrier, &call) }
        });
        i.end(&n, Form::Sync, result)
    }
}
