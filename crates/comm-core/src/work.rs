//! [`Work`]: a handle on an asynchronous operation.
//!
//! Who may touch what: the buffer lies in a [`Hold`] that the in-flight [`Core`] keeps alive, so that
//! neither dropping nor leaking the handle frees memory in use. `Core::complete` runs exactly once,
//! under the `pending` lock, after the backend has promised not to touch the buffer any more; it
//! publishes the result with release order (`done`). Only then does [`Work`] take the buffer out.

use std::any::Any;
use std::cell::UnsafeCell;
use std::fmt;
use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::sync::{Arc, OnceLock};
use std::task::{Context as TaskContext, Poll, Wake, Waker};
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};

use crate::backend::{Form, Pending};
use crate::blocks::RawBlocksMut;
use crate::buf::RawBufMut;
use crate::comm::CommInner;
use crate::comm::ticket::Numbers;
use crate::device::DeviceKind;
use crate::dtype::DType;
use crate::error::{Error, ErrorKind, Phase, Result};
use crate::observe::Event;
use crate::reduce::{check_outside_operator, in_fold, normalize_bools};
use crate::time::Time;

/// A buffer in its final place for the time of an operation.
pub(crate) struct Hold<X>(UnsafeCell<Option<X>>);

// SAFETY: the cell is accessed by one party at a time: the starter before the operation begins, the
// backend (through raw pointers into X) until `Core::complete`, and the single `Work` after it.
unsafe impl<X: Send> Sync for Hold<X> {}

impl<X> Hold<X> {
    pub(crate) fn new(x: X) -> Arc<Self> {
        Arc::new(Self(UnsafeCell::new(Some(x))))
    }

    /// A place for a value that an operation makes.
    pub(crate) fn empty() -> Arc<Self> {
        Arc::new(Self(UnsafeCell::new(None)))
    }

    /// Puts the value there.
    ///
    /// # Safety
    ///
    /// Nobody else accesses the cell during the call: the operation is not complete, and this is the only one who makes
    /// its value.
    pub(crate) unsafe fn put(&self, x: X) {
        // SAFETY: exclusive by the caller's promise.
        unsafe { *self.0.get() = Some(x) };
    }

    /// Runs `f` on the value in place.
    ///
    /// # Safety
    ///
    /// Nobody else accesses the cell during the call: the operation has not started.
    pub(crate) unsafe fn with<R>(&self, f: impl FnOnce(&mut X) -> R) -> Option<R> {
        // SAFETY: exclusive by the caller's promise.
        unsafe { (*self.0.get()).as_mut().map(f) }
    }

    /// The value in place.
    ///
    /// # Safety
    ///
    /// The operation is complete, and nobody else accesses the cell while the reference lives.
    // The caller borrows what it found the cell through mutably.
    #[allow(clippy::mut_from_ref)]
    pub(crate) unsafe fn get_mut(&self) -> Option<&mut X> {
        // SAFETY: exclusive by the caller's promise.
        unsafe { (*self.0.get()).as_mut() }
    }

    /// Takes the value out.
    ///
    /// # Safety
    ///
    /// The operation is complete, and nobody else accesses the cell.
    pub(crate) unsafe fn take(&self) -> Option<X> {
        // SAFETY: exclusive by the caller's promise.
        unsafe { (*self.0.get()).take() }
    }
}

/// The in-flight record of one operation.
pub(crate) struct Core {
    comm: Arc<CommInner>,
    pub(crate) numbers: Numbers,
    form: Form,
    pending: Mutex<Option<Box<dyn Pending>>>,
    /// Set by the backend's wake; whoever holds `pending` looks at it before it lets go.
    notified: AtomicBool,
    done: AtomicBool,
    outcome: OnceLock<(Result<()>, Time)>,
    user: Mutex<Option<Waker>>,
    keep: Mutex<Option<Arc<dyn Any + Send + Sync>>>,
    bools: Vec<RawBufMut>,
    /// Set when the caller has been given the result.
    observed: AtomicBool,
}

impl fmt::Debug for Core {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Core").field("numbers", &self.numbers).field("done", &self.is_done()).finish_non_exhaustive()
    }
}

impl Core {
    pub(crate) fn new(
        comm: Arc<CommInner>,
        numbers: Numbers,
        form: Form,
        keep: Option<Arc<dyn Any + Send + Sync>>,
        bools: Vec<RawBufMut>,
    ) -> Arc<Self> {
        Arc::new(Self {
            comm,
            numbers,
            form,
            pending: Mutex::new(None),
            notified: AtomicBool::new(false),
            done: AtomicBool::new(false),
            outcome: OnceLock::new(),
            user: Mutex::new(None),
            keep: Mutex::new(keep),
            bools,
            observed: AtomicBool::new(false),
        })
    }

    /// Attaches the backend's object and enters the communicator's in-flight table.
    pub(crate) fn launch(self: &Arc<Self>, mut pending: Box<dyn Pending>) {
        self.comm.inflight.lock().insert(self.numbers.op_id, Arc::clone(self));
        pending.set_waker(&Waker::from(Arc::clone(self)));
        *self.pending.lock() = Some(pending);
        self.try_finish();
    }

    pub(crate) fn is_done(&self) -> bool {
        self.done.load(Ordering::Acquire)
    }

    /// The result once done.
    pub(crate) fn outcome(&self) -> Option<&Result<()>> {
        if !self.is_done() {
            return None;
        }
        self.outcome.get().map(|(r, _)| r)
    }

    pub(crate) fn was_observed(&self) -> bool {
        self.observed.load(Ordering::Acquire)
    }

    fn observe(&self) {
        self.observed.store(true, Ordering::Release);
    }

    /// Polls the backend unless somebody else holds it; nobody's notification is lost.
    pub(crate) fn try_finish(&self) {
        self.notified.store(true, Ordering::Release);
        if in_fold() {
            // The backend is in use further up this thread's stack; others look at what was noted.
            return;
        }
        loop {
            // Pairs with the fence of whoever holds `pending`: either we find it free, or the holder, who looks
            // at `notified` after letting go, finds our notification. Without the fences both could read old values.
            fence(Ordering::SeqCst);
            if !self.notified.load(Ordering::Acquire) || self.is_done() {
                return;
            }
            let Some(mut slot) = self.pending.try_lock() else { return };
            while self.notified.swap(false, Ordering::AcqRel) {
                if let Some(p) = slot.as_mut()
                    && let Poll::Ready(r) = p.poll()
                {
                    self.complete(slot, r);
                    return;
                }
            }
        }
    }

    /// The backend's object, or nothing if somebody else holds it until `until`.
    fn enter(&self, until: Option<Time>) -> Option<MutexGuard<'_, Option<Box<dyn Pending>>>> {
        loop {
            if let Some(slot) = self.pending.try_lock() {
                return Some(slot);
            }
            // The holder may be waiting for longer than we may, and through the clock, so we must not block elsewhere.
            let left = until.map_or(Duration::MAX, |t| t.since(self.comm.clock().now()));
            if self.is_done() || left.is_zero() {
                return None;
            }
            self.comm.clock().sleep(left.min(Duration::from_micros(100)));
        }
    }

    /// Waits until done or `until`; drives the backend. True when done.
    pub(crate) fn wait(&self, until: Option<Time>) -> bool {
        if in_fold() {
            return self.is_done();
        }
        while !self.is_done() {
            let Some(mut slot) = self.enter(until) else { return self.is_done() };
            if self.is_done() {
                break;
            }
            let Some(p) = slot.as_mut() else {
                // Another thread is between creating and launching; it holds no lock for long.
                drop(slot);
                self.comm.clock().sleep(Duration::from_micros(1));
                continue;
            };
            match p.wait(until) {
                Poll::Ready(r) => self.complete(slot, r),
                Poll::Pending => {
                    drop(slot);
                    // As in `try_finish`.
                    fence(Ordering::SeqCst);
                    if self.notified.load(Ordering::Acquire) {
                        self.try_finish();
                    }
                    if until.is_some_and(|t| self.comm.clock().now() >= t) {
                        return self.is_done();
                    }
                }
            }
        }
        true
    }

    /// Runs exactly once: whoever gets here took the object out of `pending` with its lock held.
    fn complete(&self, mut slot: MutexGuard<'_, Option<Box<dyn Pending>>>, result: Result<()>) {
        // SAFETY: the backend reported completion and touches the buffers no more; the record (`keep`)
        // or the scope still holds them; nobody else has seen the completion yet.
        unsafe { normalize_all(&self.bools) };
        let now = self.comm.clock().now();
        let result = result.map_err(|e| self.comm.locate(e, &self.numbers));
        // Contained already, except for destructors of observers that have just been unregistered.
        contained("an observer", || self.comm.report_end(&self.numbers, self.form, &result, now));
        let _ = self.outcome.set((result, now));
        *slot = None;
        // Before user code runs: it may finalize, which waits for all that is in this table.
        self.comm.inflight.lock().remove(&self.numbers.op_id);
        self.done.store(true, Ordering::Release);
        drop(slot);
        // From here on user code, without a lock held. It runs on the backend's thread, which must survive it.
        let (keep, waker) = (self.keep.lock().take(), self.user.lock().take());
        // The buffer now belongs to the handle alone; if that is gone it is freed here.
        contained("the destructor of a buffer", || drop(keep));
        contained("a waker", || waker.into_iter().for_each(Waker::wake));
    }

    fn set_user_waker(&self, w: &Waker) {
        let new = w.clone();
        // The old one is dropped after the lock: its destructor is user code.
        let _old = self.user.lock().replace(new);
    }

    fn duration(&self) -> Option<Duration> {
        self.outcome.get().map(|(_, t)| t.since(self.numbers.called))
    }
}

/// Ends the process if it is dropped: stands where unwinding would give borrowed memory back to safe code while
/// a backend still works on it. Only a backend or clock that panics gets there; user code is contained.
pub(crate) struct AbortOnUnwind;

impl AbortOnUnwind {
    pub(crate) fn defuse(self) {
        std::mem::forget(self);
    }
}

impl Drop for AbortOnUnwind {
    fn drop(&mut self) {
        tracing::error!("a backend or clock panicked while an operation was in flight; aborting the process");
        std::process::abort();
    }
}

/// Runs user code that must not unwind into a backend.
fn contained(what: &str, f: impl FnOnce()) {
    if let Err(panic) = catch_unwind(AssertUnwindSafe(f)) {
        tracing::error!("{what} panicked; ignored");
        // Its destructor could panic again.
        std::mem::forget(panic);
    }
}

impl Wake for Core {
    fn wake(self: Arc<Self>) {
        self.try_finish();
    }
}

/// How far an operation is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum WorkStatus {
    /// In flight.
    Running,
    /// Done; the result is valid.
    Completed,
    /// Failed; see [`Work::error`].
    Failed,
}

/// A handle on an operation in flight that owns, in the end, its buffer(s) `X`.
///
/// The buffer lies in the communicator's in-flight record until the operation is done, so that
/// dropping or leaking the handle is harmless: a dropped one lets the operation run to its end.
///
/// A `Work` is also a [`Future`] that resolves at host completion; its waker is called by the
/// progress engine, so any executor will do.
///
/// Counterpart: torchcomms `TorchWork`, `MPI_Request`.
#[must_use = "an operation's error is only seen by waiting for it"]
pub struct Work<X> {
    core: Arc<Core>,
    hold: Arc<Hold<X>>,
}

impl<X> fmt::Debug for Work<X> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Work").field("call", &self.core.numbers).field("status", &self.status()).finish()
    }
}

impl<X> Work<X> {
    pub(crate) fn new(core: Arc<Core>, hold: Arc<Hold<X>>) -> Self {
        Self { core, hold }
    }

    fn finished(&self) -> (Option<X>, Result<()>) {
        self.core.observe();
        let unfinished = || check_outside_operator().and(Err(internal("a work was taken before it was done")));
        let r = self.core.outcome().cloned().unwrap_or_else(unfinished);
        // SAFETY: the operation is complete (`outcome` checked `done`), and this handle, which is not
        // clonable, is the only one that takes.
        let x = if self.core.is_done() { unsafe { self.hold.take() } } else { None };
        (x, r)
    }

    fn result(&self) -> Result<X> {
        let (x, r) = self.finished();
        r?;
        x.ok_or_else(|| internal("the buffer was already taken"))
    }

    /// Waits for completion on the host and returns the buffer. On GPU backends too; there,
    /// `wait` of stream-ordered buffers is the cheaper form.
    ///
    /// # Errors
    ///
    /// The operation's error. The buffer is then dropped; [`into_parts`](Self::into_parts) keeps it.
    pub fn wait(self) -> Result<X> {
        self.core.wait(None);
        self.result()
    }

    /// Waits for completion on the host; the same as [`wait`](Self::wait) on CPU backends.
    ///
    /// # Errors
    ///
    /// As [`wait`](Self::wait).
    pub fn wait_host(self) -> Result<X> {
        self.wait()
    }

    /// Waits and returns the buffer in any case; after an error its contents are unspecified.
    pub fn into_parts(self) -> (Option<X>, Result<()>) {
        self.core.wait(None);
        self.finished()
    }

    /// Waits for at most `timeout`. The operation goes on if that was too short.
    ///
    /// # Errors
    ///
    /// `Ok(self)` inside `Err` hands the work back: not done yet.
    pub fn wait_timeout(self, timeout: Duration) -> std::result::Result<Result<X>, Self> {
        let until = self.core.comm.clock().now().after(timeout);
        if self.core.wait(Some(until)) { Ok(self.result()) } else { Err(self) }
    }

    /// Takes the result if the operation is done, else hands the work back.
    ///
    /// # Errors
    ///
    /// The work itself, if it is not done.
    pub fn try_wait(self) -> std::result::Result<Result<X>, Self> {
        self.core.try_finish();
        if self.core.is_done() { Ok(self.result()) } else { Err(self) }
    }

    /// Whether the operation is done, well or badly. Asks the backend: never stale.
    #[must_use]
    pub fn is_completed(&self) -> bool {
        self.core.try_finish();
        self.core.is_done()
    }

    /// How far it is.
    #[must_use]
    pub fn status(&self) -> WorkStatus {
        self.core.try_finish();
        match self.core.outcome() {
            None => WorkStatus::Running,
            Some(Ok(())) => WorkStatus::Completed,
            Some(Err(_)) => WorkStatus::Failed,
        }
    }

    /// The error, if it has failed.
    #[must_use]
    pub fn error(&self) -> Option<Error> {
        self.core.try_finish();
        self.core.outcome().and_then(|r| r.clone().err())
    }

    /// Time from call to completion, once done.
    #[must_use]
    pub fn duration(&self) -> Option<Duration> {
        self.core.try_finish();
        self.core.duration()
    }

    /// The call's local number, as observers see it.
    #[must_use]
    pub fn op_id(&self) -> u64 {
        self.core.numbers.op_id
    }
}

impl<X> Future for Work<X> {
    type Output = Result<X>;

    fn poll(self: Pin<&mut Self>, cx: &mut TaskContext<'_>) -> Poll<Self::Output> {
        let this = self.get_mut();
        if !this.core.is_done() {
            // Register first, then look: a completion in between wakes us.
            this.core.set_user_waker(cx.waker());
            this.core.try_finish();
            if !this.core.is_done() {
                return Poll::Pending;
            }
        }
        Poll::Ready(this.result())
    }
}

/// Waits for all and returns their buffers in order.
///
/// # Errors
///
/// The first error in order, after all have ended.
pub fn wait_all<X>(works: impl IntoIterator<Item = Work<X>>) -> Result<Vec<X>> {
    let results: Vec<Result<X>> = works.into_iter().map(Work::wait).collect();
    results.into_iter().collect()
}

/// Waits until one of `works` is done, removes it from the list and returns its index there and its result.
///
/// # Errors
///
/// `InvalidArgument` when the list is empty.
pub fn wait_any<X>(works: &mut Vec<Work<X>>) -> Result<(usize, Result<X>)> {
    if works.is_empty() {
        return Err(Error::invalid("wait_any was given no work to wait for"));
    }
    check_outside_operator()?;
    // Each turn drives one of them for a while, so that progress does not depend on the engine.
    let mut turn = 0usize;
    loop {
        for i in 0..works.len() {
            if works[i].is_completed() {
                return Ok((i, works.remove(i).wait()));
            }
        }
        let w = &works[turn % works.len()];
        let until = w.core.comm.clock().now().after(Duration::from_micros(200));
        w.core.wait(Some(until));
        turn += 1;
    }
}

pub(crate) fn internal(what: &str) -> Error {
    Error::new(ErrorKind::Backend { library: "comm-core".into(), code: -1, text: what.into() })
}

/// A handle on an operation inside a scope; see [`Communicator::scope`](crate::Communicator::scope).
pub struct ScopedWork<'scope, B> {
    pub(crate) core: Arc<Core>,
    pub(crate) hold: Arc<Hold<B>>,
    pub(crate) scope: std::marker::PhantomData<fn(&'scope ()) -> &'scope ()>,
}

impl<B> fmt::Debug for ScopedWork<'_, B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ScopedWork").field("call", &self.core.numbers).finish_non_exhaustive()
    }
}

impl<B> ScopedWork<'_, B> {
    /// Waits for completion and gives the borrow back.
    ///
    /// # Errors
    ///
    /// The operation's error.
    pub fn wait(self) -> Result<B> {
        self.core.wait(None);
        self.core.observe();
        self.core.outcome().cloned().unwrap_or_else(|| Err(internal("a scoped work was taken before it was done")))?;
        // SAFETY: complete, and this handle is the only one that takes.
        unsafe { self.hold.take() }.ok_or_else(|| internal("the borrow was already taken"))
    }

    /// Whether the operation is done, well or badly.
    #[must_use]
    pub fn is_completed(&self) -> bool {
        self.core.try_finish();
        self.core.is_done()
    }
}

impl CommInner {
    pub(crate) fn report_end(&self, n: &Numbers, form: Form, result: &Result<()>, now: Time) {
        if let Err(e) = result
            && !e.is_recoverable()
        {
            tracing::debug!(comm = %self.name, op_id = n.op_id, error = %e, "operation failed");
        }
        if self.observers.any() {
            let call = self.call_view(n, form);
            // An observer that came in the middle of a call that nobody timed.
            let elapsed = if n.called == Time::default() { Duration::ZERO } else { now.since(n.called) };
            match result {
                Ok(()) => self.observers.event(&Event::Completed { call, elapsed }, now),
                Err(error) => self.observers.event(&Event::Failed { call, elapsed, error }, now),
            }
        }
    }

    /// Waits until nothing is in flight.
    pub(crate) fn drain(&self, until: Time) -> Result<()> {
        loop {
            let Some(core) = self.inflight.lock().values().next().cloned() else { return Ok(()) };
            if !core.wait(Some(until)) {
                return Err(Error::new(ErrorKind::Timeout {
                    phase: Phase::Running,
                    elapsed: self.clock().now().since(core.numbers.called),
                    missing: Vec::new(),
                    unmatched: Vec::new(),
                }));
            }
        }
    }
}

/// The outputs of a request whose bytes must be normalised, whatever the outcome: after an error too the
/// caller gets a buffer of `bool`s back.
pub(crate) fn bool_outputs(request: &crate::backend::OpRequest) -> Vec<RawBufMut> {
    use crate::backend::{OpRequest as R, P2pOp};
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
