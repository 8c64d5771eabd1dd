//! Calls that block, run on a thread of their own: the asynchronous forms of `split` and `reconfigure`.
//!
//! Backends have no asynchronous form of these. The thread comes from the clock, makes the value, puts it into the
//! work's place and ends the work; from there on it is a [`Work`] like any other.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::task::{Poll, Waker};

use parking_lot::Mutex;

use super::CommInner;
use super::ticket::Numbers;
use crate::backend::{Form, Pending};
use crate::error::{Error, Result};
use crate::reduce::panic_text;
use crate::time::{Clock, Parker, Time};
use crate::work::{Core, Hold, Work, internal};

#[derive(Default)]
struct Progress {
    result: Option<Result<()>>,
    waker: Option<Waker>,
    parked: Option<Arc<Parker>>,
}

/// What the thread and the work share.
struct Job {
    clock: Arc<dyn Clock>,
    progress: Mutex<Progress>,
}

impl Job {
    fn finish(&self, result: Result<()>) {
        let (waker, parked) = {
            let mut p = self.progress.lock();
            p.result = Some(result);
            (p.waker.take(), p.parked.take())
        };
        if let Some(parker) = parked {
            self.clock.unpark(&parker);
        }
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

/// The work's end of a job.
struct JobPending(Arc<Job>);

impl Pending for JobPending {
    fn poll(&mut self) -> Poll<Result<()>> {
        self.0.progress.lock().result.clone().map_or(Poll::Pending, Poll::Ready)
    }

    fn wait(&mut self, until: Option<Time>) -> Poll<Result<()>> {
        let parker = Arc::new(Parker::new());
        loop {
            {
                let mut p = self.0.progress.lock();
                if let Some(r) = &p.result {
                    return Poll::Ready(r.clone());
                }
                if until.is_some_and(|t| self.0.clock.now() >= t) {
                    p.parked = None;
                    return Poll::Pending;
                }
                p.parked = Some(Arc::clone(&parker));
            }
            self.0.clock.park(&parker, until);
        }
    }

    fn set_waker(&mut self, waker: &Waker) {
        let mut p = self.0.progress.lock();
        if p.result.is_some() {
            drop(p);
            waker.wake_by_ref();
        } else {
            // The old one goes after the lock: dropping it may end a communicator.
            let _old = p.waker.replace(waker.clone());
            drop(p);
        }
    }

    /// There are no buffers to protect: the thread runs to its end.
    fn cancel(&mut self) {}
}

/// Starts `body` as the call with these numbers. What it makes lies in the work, or is dropped when the work is gone.
pub(super) fn start<X: Send + 'static>(
    comm: &Arc<CommInner>,
    n: Numbers,
    body: impl FnOnce() -> Result<X> + Send + 'static,
) -> Result<Work<X>> {
    let clock = Arc::clone(comm.clock());
    let job = Arc::new(Job { clock: Arc::clone(&clock), progress: Mutex::default() });
    let hold = Hold::empty();
    let (theirs, place) = (Arc::clone(&job), Arc::clone(&hold));
    let thread = move || {
        let made = catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|p| {
            let text = format!("the thread of {} panicked: {}", n.desc.operation, panic_text(p.as_ref()));
            // Its destructor could panic again.
            std::mem::forget(p);
            Err(internal(&text))
        });
        // SAFETY: the work is not complete, so that nobody looks at the cell, and this runs once.
        let result = made.map(|x| unsafe { place.put(x) });
        drop(place);
        theirs.finish(result);
    };
    if let Err(e) = clock.spawn(n.desc.operation.name(), Box::new(thread)) {
        let e = Error::io(format!("starting a thread for {}", n.desc.operation), &e);
        return Err(comm.refuse(e, &n, Form::Async));
    }
    let core = Core::new(Arc::clone(comm), n, Form::Async, Some(Arc::clone(&hold) as _), Vec::new());
    core.launch(Box::new(JobPending(job)));
    Ok(Work::new(core, hold))
}
