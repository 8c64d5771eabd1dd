//! Observers: typed events of every call, in order, with the same numbers everywhere.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::RwLock;

use crate::backend::Form;
use crate::desc::OpDesc;
use crate::error::Error;
use crate::time::Time;

/// The number of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum CallNumber {
    /// `collective_seq`: advanced only by calls that all members make, equal on all of them.
    Collective(u64),
    /// A point-to-point call.
    P2p {
        /// The other rank.
        peer: usize,
        /// The tag.
        tag: u32,
        /// Number per (peer, direction, tag); equal at both ends.
        seq: u64,
    },
    /// A call without a number of its own (a batch; its messages have theirs).
    Local,
}

impl CallNumber {
    /// The sequence number, if there is one.
    #[must_use]
    pub const fn seq(&self) -> Option<u64> {
        match self {
            Self::Collective(s) | Self::P2p { seq: s, .. } => Some(*s),
            Self::Local => None,
        }
    }
}

/// One call, as observers see it.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Call<'a> {
    /// The communicator's name.
    pub comm: &'a str,
    /// This rank.
    pub rank: usize,
    /// World size.
    pub size: usize,
    /// Local number of the call, unique in this process and communicator.
    pub op_id: u64,
    /// Number that peers know too.
    pub number: CallNumber,
    /// Operation, types, counts.
    pub desc: OpDesc,
    /// Form.
    pub form: Form,
    /// Timeout in force.
    pub timeout: Duration,
}

/// What happened.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum Event<'a> {
    /// The call was validated and numbered.
    Enqueued(Call<'a>),
    /// The backend took it.
    Started(Call<'a>),
    /// It completed.
    Completed {
        /// The call.
        call: Call<'a>,
        /// From call to completion.
        elapsed: Duration,
    },
    /// It failed.
    Failed {
        /// The call.
        call: Call<'a>,
        /// From call to failure.
        elapsed: Duration,
        /// Why.
        error: &'a Error,
    },
    /// The communicator was aborted from this rank.
    Aborted {
        /// The communicator's name.
        comm: &'a str,
        /// Why.
        cause: &'a Error,
    },
    /// A child communicator was created.
    Split {
        /// The parent's name.
        comm: &'a str,
        /// The child's name.
        child: &'a str,
        /// The child's ranks in the parent.
        ranks: &'a [usize],
    },
    /// The membership changed, by `reconfigure` or `shrink`: there is a new communicator.
    Reconfigured {
        /// The communicator's name.
        comm: &'a str,
        /// The new generation.
        generation: u32,
        /// This rank in the new membership.
        rank: usize,
        /// The number of its ranks.
        size: usize,
    },
    /// The communicator was finalized.
    Finalized {
        /// The communicator's name.
        comm: &'a str,
    },
}

/// Sees every call of a communicator. Methods are called from the calling thread or the thread that
/// completes the operation; they must not call into the same communicator.
pub trait Observer: Send + Sync {
    /// Before the call reaches the backend. An error refuses it: the caller gets
    /// [`ErrorKind::InvalidArgument`](crate::ErrorKind::InvalidArgument) with the reason, the other
    /// ranks of a collective get [`ErrorKind::PeerRefused`](crate::ErrorKind::PeerRefused).
    fn pre(&self, call: &Call<'_>) -> Result<(), String> {
        let _ = call;
        Ok(())
    }

    /// Something happened at `at`.
    fn event(&self, event: &Event<'_>, at: Time) {
        let _ = (event, at);
    }
}

type Entry = (u64, Arc<dyn Observer>);

/// The observers of one communicator.
#[derive(Default)]
pub(crate) struct Observers {
    any: AtomicBool,
    next: AtomicU64,
    list: RwLock<Vec<Entry>>,
    /// Those of the communicator that this one was split from.
    parent: Option<Arc<Self>>,
}

impl fmt::Debug for Observers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Observers").field("count", &self.list.read().len()).finish()
    }
}

/// Unregisters its observer when dropped.
#[derive(Debug)]
#[must_use = "dropping the guard unregisters the observer"]
pub struct ObserverGuard {
    owner: Weak<Observers>,
    id: u64,
}

impl ObserverGuard {
    /// Keeps the observer registered as long as the communicator lives.
    pub fn detach(mut self) {
        self.owner = Weak::new();
    }
}

impl Drop for ObserverGuard {
    fn drop(&mut self) {
        if let Some(o) = self.owner.upgrade() {
            let mut list = o.list.write();
            list.retain(|(id, _)| *id != self.id);
            o.any.store(!list.is_empty(), Ordering::Release);
        }
    }
}

impl Observers {
    pub(crate) fn register(self: &Arc<Self>, observer: Arc<dyn Observer>) -> ObserverGuard {
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        self.list.write().push((id, observer));
        self.any.store(true, Ordering::Release);
        ObserverGuard { owner: Arc::downgrade(self), id }
    }

    /// No observers of its own, and those of a parent.
    pub(crate) fn below(parent: Option<Arc<Self>>) -> Arc<Self> {
        Arc::new(Self { parent, ..Self::default() })
    }

    /// One load per generation of parents: all that a call costs when nobody watches.
    #[inline]
    pub(crate) fn any(&self) -> bool {
        self.any.load(Ordering::Acquire) || self.parent.as_ref().is_some_and(|p| p.any())
    }

    fn snapshot(&self) -> Vec<Entry> {
        let mut all = self.parent.as_ref().map_or_else(Vec::new, |p| p.snapshot());
        all.extend(self.list.read().iter().cloned());
        all
    }

    /// Asks all observers; the first refusal wins. A panicking observer refuses nothing.
    pub(crate) fn pre(&self, call: &Call<'_>) -> Result<(), String> {
        for (_, o) in self.snapshot() {
            match catch_unwind(AssertUnwindSafe(|| o.pre(call))) {
                Ok(r) => r?,
                Err(_) => tracing::error!(comm = call.comm, op_id = call.op_id, "an observer panicked in pre; ignored"),
            }
        }
        Ok(())
    }

    pub(crate) fn event(&self, event: &Event<'_>, at: Time) {
        for (_, o) in self.snapshot() {
            if catch_unwind(AssertUnwindSafe(|| o.event(event, at))).is_err() {
                tracing::error!("an observer panicked in event; ignored");
            }
        }
    }
}
