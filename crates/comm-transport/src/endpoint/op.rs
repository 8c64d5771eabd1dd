//! Operations in flight: their tokens, their task, their end.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::task::{Poll, Waker};

use comm_core::{Error, ErrorKind, OpDesc, Reducer, Result, Time};

use super::state::State;

/// Names an operation in flight; stale ids are recognised.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct OpId {
    pub(crate) index: u32,
    pub(crate) life: u32,
}

/// A piece of an operation: one posted send or receive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PieceId(pub u32);

/// An operation's logic, polled whenever one of its pieces is done.
pub trait Task: Send {
    /// Advances; `Ready` ends the operation.
    fn poll(&mut self, port: &mut Port<'_>) -> Poll<Result<()>>;
}

/// Where received bytes go.
#[derive(Clone, Debug)]
pub enum Sink {
    /// Into memory.
    Copy(*mut u8),
    /// `dst = own op received`, element by element, as the bytes arrive. `own` may be `dst`.
    Fold {
        /// Result.
        dst: *mut u8,
        /// First operand.
        own: *const u8,
        /// The operator.
        reducer: Reducer,
    },
}

// SAFETY: raw pointers into buffers that the operation's owner keeps valid and unaliased until the operation
// is closed (contract of `Port::send` and `Port::recv`); they are used under the endpoint's lock only.
unsafe impl Send for Sink {}

pub(crate) struct OpSlot {
    pub(crate) life: u32,
    pub(crate) live: bool,
    pub(crate) group: usize,
    /// `collective_seq`; `None` for point-to-point operations.
    pub(crate) seq: Option<u64>,
    pub(crate) desc: OpDesc,
    bits: Vec<u64>,
    issued: u32,
    done: u32,
    /// Set when the operation is over.
    pub(crate) result: Option<Result<()>>,
    pub(crate) task: Option<Box<dyn Task>>,
    pub(crate) queued: bool,
    /// A piece was done since the task was last polled.
    pub(crate) touched: bool,
    pub(crate) detached: bool,
    pub(crate) waker: Option<Waker>,
    pub(crate) started: Time,
    pub(crate) deadline: Time,
    pub(crate) reported: bool,
    /// All members were told, because rank 0 did not answer.
    pub(crate) cried: bool,
}

impl OpSlot {
    pub(crate) fn empty() -> Self {
        Self {
            life: 0,
            live: false,
            group: 0,
            seq: None,
            desc: OpDesc::new(comm_core::Operation::Custom),
            bits: Vec::new(),
            issued: 0,
            done: 0,
            result: None,
            task: None,
            queued: false,
            touched: false,
            detached: false,
            waker: None,
            started: Time::default(),
            deadline: Time::default(),
            reported: false,
            cried: false,
        }
    }

    pub(crate) fn reset(&mut self, group: usize, seq: Option<u64>, desc: OpDesc, started: Time, deadline: Time) {
        self.life = self.life.wrapping_add(1);
        self.live = true;
        self.group = group;
        self.seq = seq;
        self.desc = desc;
        self.bits.clear();
        self.issued = 0;
        self.done = 0;
        self.result = None;
        self.task = None;
        self.queued = false;
        self.touched = false;
        self.detached = false;
        self.waker = None;
        self.started = started;
        self.deadline = deadline;
        self.reported = false;
        self.cried = false;
    }

    pub(crate) fn issue(&mut self) -> PieceId {
        let id = self.issued;
        self.issued += 1;
        if id as usize / 64 >= self.bits.len() {
            self.bits.push(0);
        }
        PieceId(id)
    }

    pub(crate) fn finish_piece(&mut self, p: PieceId) {
        let (word, bit) = (p.0 as usize / 64, 1u64 << (p.0 % 64));
        if self.bits[word] & bit == 0 {
            self.bits[word] |= bit;
            self.done += 1;
        }
    }

    pub(crate) fn is_done(&self, p: PieceId) -> bool {
        self.bits[p.0 as usize / 64] & (1u64 << (p.0 % 64)) != 0
    }

    pub(crate) const fn all_done(&self) -> bool {
        self.issued == self.done
    }
}

/// What a [`Task`] may do: post sends and receives of its operation and ask whether they are done.
#[allow(missing_debug_implementations)]
pub struct Port<'a> {
    pub(crate) st: &'a mut State,
    pub(crate) op: OpId,
}

impl Port<'_> {
    /// Posts a send to `peer` (a rank of the group).
    ///
    /// # Safety
    ///
    /// `len` bytes at `ptr` stay valid and unchanged until the piece is done or the operation is closed.
    pub unsafe fn send(&mut self, peer: usize, step: u32, ptr: *const u8, len: usize) -> Result<PieceId> {
        self.check()?;
        Ok(self.st.post_send(self.op, peer, step, ptr, len))
    }

    /// Posts a receive of exactly `len` bytes from `peer` (a rank of the group).
    ///
    /// # Safety
    ///
    /// The sink's memory (`len` bytes each) stays valid and otherwise unused until the piece is done or
    /// the operation is closed.
    pub unsafe fn recv(&mut self, peer: usize, step: u32, sink: Sink, len: usize) -> Result<PieceId> {
        self.check()?;
        Ok(self.st.post_recv(self.op, peer, step, sink, len))
    }

    /// Posts a point-to-point send.
    ///
    /// # Safety
    ///
    /// As [`send`](Self::send).
    pub unsafe fn send_message(&mut self, msg: Message, ptr: *const u8) -> Result<PieceId> {
        self.check_message(&msg)?;
        Ok(self.st.post_message_send(self.op, msg, ptr))
    }

    /// Posts a point-to-point receive.
    ///
    /// # Safety
    ///
    /// As [`recv`](Self::recv).
    pub unsafe fn recv_message(&mut self, msg: Message, ptr: *mut u8) -> Result<PieceId> {
        self.check_message(&msg)?;
        Ok(self.st.post_message_recv(self.op, msg, ptr))
    }

    /// A message of an operation that ended because another message was refused is refused too: its other end
    /// must not wait for it.
    fn check_message(&mut self, m: &Message) -> Result<()> {
        let r = self.check();
        if let Err(e) = &r
            && let comm_core::ErrorKind::PeerRefused { rank, reason } = e.kind()
            && *rank != m.peer
        {
            let text = format!("rank {rank} refused another message of its batch: {reason}");
            let g = self.st.ops[self.op.index as usize].group;
            self.st.refuse_message(g, m.peer, m.tag, m.seq, m.desc, &text);
        }
        r
    }

    /// Whether a piece is done.
    #[must_use]
    pub fn is_done(&self, p: PieceId) -> bool {
        self.st.ops[self.op.index as usize].is_done(p)
    }

    /// Whether all pieces are done.
    #[must_use]
    pub fn all_done(&self) -> bool {
        self.st.ops[self.op.index as usize].all_done()
    }

    /// An operation that has ended (its group failed while it posted) must not post again.
    fn check(&self) -> Result<()> {
        match &self.st.ops[self.op.index as usize].result {
            Some(Err(e)) => Err(e.clone()),
            Some(Ok(())) => Err(Error::invalid("the operation has ended")),
            None => Ok(()),
        }
    }
}

/// Identifies a point-to-point message between this rank and `peer`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Message {
    /// The other rank of the group.
    pub peer: usize,
    /// Tag.
    pub tag: u32,
    /// Number per (peer, direction, tag).
    pub seq: u64,
    /// Type and count.
    pub desc: OpDesc,
    /// Length in bytes.
    pub bytes: usize,
}

impl State {
    /// Marks a piece done and schedules its operation.
    pub(crate) fn piece_done(&mut self, op: OpId, piece: PieceId) {
        self.moved = true;
        let Some(slot) = self.slot(op) else { return };
        slot.finish_piece(piece);
        slot.touched = true;
        if slot.task.is_some() && !slot.queued {
            slot.queued = true;
            self.runnable.push_back(op);
        }
    }

    pub(crate) fn slot(&mut self, op: OpId) -> Option<&mut OpSlot> {
        self.ops.get_mut(op.index as usize).filter(|s| s.live && s.life == op.life)
    }

    /// Polls the tasks that have news.
    pub(crate) fn run_tasks(&mut self) {
        while let Some(op) = self.runnable.pop_front() {
            let Some(slot) = self.slot(op) else { continue };
            slot.queued = false;
            self.poll_task(op);
        }
    }

    /// Polls a task. A panic in it must not unwind through the endpoint: posted receives would outlive their
    /// buffers, and the engine would die. The operation fails instead, on all ranks.
    pub(crate) fn poll_contained(&mut self, op: OpId, task: &mut dyn Task) -> Poll<Result<()>> {
        let polled = catch_unwind(AssertUnwindSafe(|| task.poll(&mut Port { st: self, op })));
        polled.unwrap_or_else(|payload| {
            let rank = self.slot(op).map(|s| s.group).and_then(|g| self.group(g)).map_or(0, |g| g.rank);
            let cause = format!("the operation panicked: {}", comm_core::panic_text(payload.as_ref()));
            Poll::Ready(Err(ErrorKind::Aborted { rank, cause }.into()))
        })
    }

    /// Polls one task once.
    pub(crate) fn poll_task(&mut self, op: OpId) {
        let Some(slot) = self.slot(op) else { return };
        if slot.result.is_some() {
            return;
        }
        slot.touched = false;
        let Some(mut task) = slot.task.take() else { return };
        let polled = self.poll_contained(op, task.as_mut());
        match polled {
            Poll::Ready(r) => self.task_ended(op, r),
            Poll::Pending => {
                if let Some(slot) = self.slot(op)
                    && slot.result.is_none()
                {
                    slot.task = Some(task);
                    // Pieces that were done while the task posted others did not find it in its place.
                    if std::mem::take(&mut slot.touched) && !slot.queued {
                        slot.queued = true;
                        self.runnable.push_back(op);
                    }
                }
            }
        }
    }

    /// A task is through. An error of its own that peers would otherwise not hear of fails the group.
    pub(crate) fn task_ended(&mut self, op: OpId, result: Result<()>) {
        if let (Err(e), Some(slot)) = (&result, self.slot(op))
            && slot.result.is_none()
            && !e.is_recoverable()
        {
            let g = slot.group;
            self.fail_group(g, e.clone(), true);
        }
        self.finish_op(op, result);
    }

    /// Ends an operation with a result; wakes whoever waits. Idempotent: the first result stays.
    pub(crate) fn finish_op(&mut self, op: OpId, result: Result<()>) {
        let Some(slot) = self.slot(op) else { return };
        if slot.result.is_some() {
            return;
        }
        let pieces_left = !slot.all_done();
        if pieces_left {
            // From here on nothing touches the operation's buffers.
            self.purge(op);
        }
        let Some(slot) = self.slot(op) else { return };
        slot.result = Some(result);
        // The task's memory (scratch, request) goes when the operation is closed or here; nothing refers to it now.
        let task = slot.task.take();
        let waker = slot.waker.take();
        let detached = slot.detached;
        self.wakes.extend(waker);
        self.ended = true;
        self.moved = true;
        drop(task);
        if detached {
            self.async_ops -= 1;
        }
        self.retire(op);
    }
}
