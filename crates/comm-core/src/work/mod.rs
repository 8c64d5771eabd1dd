//! [`Work`]: a handle on an asynchronous operation.
//!
//! Who may touch what: the buffer lies in a [`Hold`] that the in-flight [`Core`] keeps alive, so that
//! neither dropping nor leaking the handle frees memory in use. `Core::complete` runs exactly once,
//! under the `pending` lock, after the backend has promised not to touch the buffer any more; it
//! publishes the result with release order (`done`). Only then does [`Work`] take the buffer out.

mod bools;
mod core;

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context as TaskContext, Poll};
use std::time::Duration;

pub(crate) use self::bools::{bool_outputs, normalize_all};
pub(crate) use self::core::{AbortOnUnwind, Core, Hold, internal};
use crate::error::{Error, Result};
use crate::reduce::check_outside_operator;

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
