//! An operation in flight: where its buffer lies, and how it comes to its end, once.

use std::any::Any;
use std::cell::UnsafeCell;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::sync::{Arc, OnceLock};
use std::task::{Poll, Wake, Waker};
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};

use super::normalize_all;
use crate::backend::{Form, Pending};
use crate::buf::RawBufMut;
use crate::comm::CommInner;
use crate::comm::ticket::Numbers;
use crate::error::{Error, ErrorKind, Phase, Result};
use crate::observe::Event;
use crate::reduce::in_fold;
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
    pub(super) comm: Arc<CommInner>,
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

    pub(super) fn observe(&self) {
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

    pub(super) fn set_user_waker(&self, w: &Waker) {
        let new = w.clone();
        // The old one is dropped after the lock: its destructor is user code.
        let _old = self.user.lock().replace(new);
    }

    pub(super) fn duration(&self) -> Option<Duration> {
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

pub(crate) fn internal(what: &str) -> Error {
    Error::new(ErrorKind::Backend { library: "comm-core".into(), code: -1, text: what.into() })
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
