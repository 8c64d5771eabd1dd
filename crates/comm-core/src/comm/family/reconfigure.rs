//! New memberships: `reconfigure` by handles, `shrink` to the survivors.

use std::collections::{BTreeSet, HashSet};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use crate::backend::{Backend, Form, ReconfigureRequest};
use crate::comm::ticket::Numbers;
use crate::comm::{CommInner, Communicator, HandleState, job};
use crate::desc::{OpDesc, Operation};
use crate::error::{Error, ErrorKind, Result};
use crate::observe::{CallNumber, Event};
use crate::options::{CORE_HINTS, CommOptions, check_hints};
use crate::work::Work;

/// The members of a new membership, by their [init handles](Communicator::init_handle).
///
/// Made by `into` from vectors, slices, arrays, `BTreeSet` and `HashSet`. All members must name the same ranks: the same
/// list, or the same set.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Members {
    /// Rank = index in the list.
    List(Vec<String>),
    /// Rank = place among the handles in their sorted order.
    Set(BTreeSet<String>),
}

impl Members {
    /// The handles in rank order.
    fn in_order(self) -> Result<Vec<String>> {
        let list = match self {
            Self::List(list) => list,
            Self::Set(set) => set.into_iter().collect(),
        };
        if list.is_empty() {
            return Err(Error::invalid("the list of handles is empty: a communicator has at least one member"));
        }
        let mut seen = BTreeSet::new();
        match list.iter().enumerate().find(|(_, h)| !seen.insert(h.as_str())) {
            Some((at, handle)) => {
                let first = list.iter().position(|h| h == handle).unwrap_or(at);
                Err(Error::invalid(format!("ranks {first} and {at} have the same handle '{handle}'")))
            }
            None => Ok(list),
        }
    }
}

impl From<Vec<String>> for Members {
    fn from(list: Vec<String>) -> Self {
        Self::List(list)
    }
}

impl From<&Vec<String>> for Members {
    fn from(list: &Vec<String>) -> Self {
        Self::List(list.clone())
    }
}

impl<S: AsRef<str>> From<&[S]> for Members {
    fn from(list: &[S]) -> Self {
        Self::List(list.iter().map(|h| h.as_ref().to_owned()).collect())
    }
}

impl<S: AsRef<str>, const N: usize> From<[S; N]> for Members {
    fn from(list: [S; N]) -> Self {
        list.as_slice().into()
    }
}

impl<S: AsRef<str>, const N: usize> From<&[S; N]> for Members {
    fn from(list: &[S; N]) -> Self {
        list.as_slice().into()
    }
}

impl From<BTreeSet<String>> for Members {
    fn from(set: BTreeSet<String>) -> Self {
        Self::Set(set)
    }
}

impl<H> From<HashSet<String, H>> for Members {
    fn from(set: HashSet<String, H>) -> Self {
        Self::Set(set.into_iter().collect())
    }
}

/// A reconfigure under way; the only one of its handle.
struct Attempt {
    comm: Arc<CommInner>,
    request: ReconfigureRequest,
}

impl Drop for Attempt {
    fn drop(&mut self) {
        self.comm.reconfiguring.store(false, Ordering::Release);
    }
}

impl Attempt {
    fn new(
        comm: &Arc<CommInner>,
        uuid: u64,
        members: Members,
        timeout: Duration,
        hints: &[(&str, &str)],
    ) -> Result<Self> {
        let handles = members.in_order()?;
        check_hints(hints.iter().map(|(name, _)| *name), &[CORE_HINTS, comm.backend.info().hints])?;
        let mut options = sized(&comm.options, None, handles.len());
        options.hints.extend(hints.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())));
        if comm.reconfiguring.swap(true, Ordering::AcqRel) {
            return Err(Error::invalid("another reconfigure of this communicator is under way; wait for its end"));
        }
        Ok(Self { comm: Arc::clone(comm), request: ReconfigureRequest::new(uuid, handles, timeout, options) })
    }

    /// Asks the backend. The old handle is stale afterwards, or as it was.
    fn run(self, state: HandleState) -> Result<Communicator> {
        let c = &self.comm;
        let backend = c.backend.reconfigure(&self.request)?;
        let size = backend.info().size;
        let made = c.successor_of(backend, self.request.options.clone(), (0..size).collect(), state)?;
        c.successor.store(made.generation(), Ordering::Release);
        for from in [HandleState::Live, HandleState::Fresh, HandleState::Memberless] {
            c.transition(from, HandleState::Stale);
        }
        c.tell_reconfigured(&made);
        Ok(made)
    }
}

/// The options of a communicator of another membership.
fn sized(options: &CommOptions, rank: Option<usize>, size: usize) -> CommOptions {
    CommOptions { rank, size: Some(size), ..options.clone() }
}

impl CommInner {
    /// Checks, numbers and announces a call that changes the membership: no collective of the old one, whose members may
    /// be dead or elsewhere.
    fn membership_call(&self, operation: Operation, timeout: Duration, form: Form) -> Result<Numbers> {
        let desc = OpDesc::new(operation);
        match self.check_usable(&desc) {
            Err(_) if operation == Operation::Reconfigure && self.state() == HandleState::Memberless => {}
            other => other?,
        }
        let n = self.number(desc, CallNumber::Local, Some(timeout), true);
        self.announce(&n, form).map_err(|e| self.refuse(e, &n, form))?;
        Ok(n)
    }

    fn successor_of(
        &self,
        backend: Arc<dyn Backend>,
        options: CommOptions,
        ranks: Vec<usize>,
        state: HandleState,
    ) -> Result<Communicator> {
        let info = backend.info();
        let options = sized(&options, Some(info.rank), info.size);
        Communicator::assemble(backend, self.device, options, ranks, Arc::clone(&self.observers), state)
    }

    fn tell_reconfigured(&self, made: &Communicator) {
        if self.observers.any() {
            let (generation, rank, size) = (made.generation(), made.rank(), made.size());
            self.observers.event(&Event::Reconfigured { comm: &self.name, generation, rank, size }, self.clock().now());
        }
    }

    fn survivors(&self, timeout: Duration) -> Result<Vec<usize>> {
        let survivors = self.backend.agree_survivors(timeout)?;
        match survivors.iter().find(|r| **r >= self.size()) {
            None => Ok(survivors),
            Some(r) => {
                let (library, size) = (self.backend.info().name.into(), self.size());
                let text = format!("agree_survivors names rank {r} of {size}");
                Err(ErrorKind::Backend { library, code: -1, text }.into())
            }
        }
    }

    fn shrink(&self, timeout: Duration, state: HandleState) -> Result<Communicator> {
        let until = self.clock().now().after(timeout);
        let survivors = self.survivors(timeout)?;
        let backend = self.backend.shrink(&survivors, until.since(self.clock().now()))?;
        let ranks = survivors.iter().map(|r| self.ranks[*r]).collect();
        let made = self.successor_of(backend, self.options.clone(), ranks, state)?;
        self.tell_reconfigured(&made);
        Ok(made)
    }
}

impl Communicator {
    /// The opaque handle by which `reconfigure` can name this member. Pass it to the others by any means (a store, a
    /// file, a message).
    ///
    /// Counterpart: torchcomms `get_init_handle`.
    ///
    /// # Errors
    ///
    /// `Unsupported` on backends with a fixed membership.
    pub fn init_handle(&self) -> Result<String> {
        let i = self.inner();
        if matches!(i.state(), HandleState::Finalizing | HandleState::Finalized | HandleState::Closed) {
            return Err(Error::new(ErrorKind::Finalized).with_context(|| i.context(None, None)));
        }
        i.backend.init_handle().map_err(|e| e.with_context(|| i.context(None, None)))
    }

    /// A communicator with a new membership: those whose [handles](Self::init_handle) are given, which all make this
    /// call with the same `uuid` (any number that names the attempt) and the same members. Rank = index in a list, or
    /// place in the sorted order of a set. It works on a communicator that has failed, and on a
    /// [dynamic](CommOptions::dynamic) one without members. It is no numbered collective of the old membership.
    ///
    /// `hints` are added to those of the options; the other options and the observers stay. `timeout` is for this call.
    ///
    /// After success this handle is stale: what is in flight on it and every later call end with
    /// [`StaleGeneration`](ErrorKind::StaleGeneration). Old members that are left out find this rank gone: their calls that
    /// need it end with `StaleGeneration` that names it, and the old communicator has failed with that on all who are left,
    /// as with any loss. What they have among themselves up to then goes on: a call to which this rank has given its part
    /// before it moved on comes to its end, and they can [`shrink`](Self::shrink). After an error this handle is what it
    /// was, and the call may be made again.
    ///
    /// Members that are there learn at once when one of them, or one that they wait for, passes other members or the same
    /// in another order with the same `uuid`, is named by a stale handle, was finalized or is gone. Who has not called yet
    /// is waited for until `timeout`; so is one whose attempt has failed meanwhile, because it may call again.
    ///
    /// Counterpart: torchcomms `reconfigure`; `ncclCommGrow` and `ncclCommShrink`; `MPI_Comm_create_from_group`.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` for no or equal handles, unknown hints, and while another `reconfigure` of this handle is under
    /// way; `Unsupported` on backends with a fixed membership; `Timeout` or `Bootstrap` when not all members came, or not
    /// with the same handles and settings: it names two that differ; `StaleGeneration` when this communicator's own handle in the
    /// list, or, naming it, another member's, is not that of its newest generation.
    pub fn reconfigure(
        &self,
        uuid: u64,
        handles: impl Into<Members>,
        timeout: Duration,
        hints: &[(&str, &str)],
    ) -> Result<Self> {
        let i = self.inner();
        let n = i.membership_call(Operation::Reconfigure, timeout, Form::Sync)?;
        let attempt = Attempt::new(i, uuid, handles.into(), timeout, hints);
        i.end(&n, Form::Sync, attempt.and_then(|a| a.run(HandleState::Live)))
    }

    /// Asynchronous [`reconfigure`](Self::reconfigure). When the work is dropped, the attempt runs to its end and the new
    /// communicator is closed. It needs nothing of this communicator: when that is dropped, the work goes on.
    /// [`finalize`](Self::finalize) waits for it: after its success it ends at once and well, else with the old members.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` as there; the other errors come from the work.
    pub fn reconfigure_async(
        &self,
        uuid: u64,
        handles: impl Into<Members>,
        timeout: Duration,
        hints: &[(&str, &str)],
    ) -> Result<Work<Self>> {
        let i = self.inner();
        let n = i.membership_call(Operation::Reconfigure, timeout, Form::Async)?;
        match Attempt::new(i, uuid, handles.into(), timeout, hints) {
            Ok(attempt) => job::start(i, n, move || attempt.run(HandleState::Fresh)),
            Err(e) => i.end(&n, Form::Async, Err(e)),
        }
    }

    /// The members of a failed communicator that are still there, as all of them see it, in rank order. All survivors
    /// call it.
    ///
    /// Counterpart: ULFM's `MPIX_Comm_agree` and `MPIX_Comm_get_failed`.
    ///
    /// # Errors
    ///
    /// `Timeout` naming members that live and have not called; the call may be made again. `StaleGeneration` on a rank that
    /// lives and that the others have given up: it was stopped or cut off for longer than
    /// [`heartbeat_timeout`](CommOptions::heartbeat_timeout). Where a network falls apart, the ranks on each side agree on
    /// those of their side. `Unsupported` on backends that cannot agree after a failure.
    pub fn agree_survivors(&self, timeout: Duration) -> Result<Vec<usize>> {
        let i = self.inner();
        let n = i.membership_call(Operation::AgreeSurvivors, timeout, Form::Sync)?;
        i.end(&n, Form::Sync, i.survivors(timeout))
    }

    /// A communicator of the survivors, in their old order; its generation is one more. All survivors call it, at most
    /// `timeout` apart. The failed communicator keeps its cause.
    ///
    /// Counterpart: `MPIX_Comm_shrink`, `ncclCommShrink`.
    ///
    /// # Errors
    ///
    /// As [`agree_survivors`](Self::agree_survivors), and `PeerFailed` on all survivors when another of them dies
    /// meanwhile: call it again on this communicator, which is as it was.
    pub fn shrink(&self, timeout: Duration) -> Result<Self> {
        let i = self.inner();
        let n = i.membership_call(Operation::Shrink, timeout, Form::Sync)?;
        i.end(&n, Form::Sync, i.shrink(timeout, HandleState::Live))
    }

    /// Asynchronous [`shrink`](Self::shrink). When the work is dropped, it runs to its end and the new communicator is
    /// closed. It needs this communicator: when the last clone is dropped before, the work ends with `Finalized`.
    ///
    /// # Errors
    ///
    /// Those of the call; those of the agreement, and `Finalized`, come from the work.
    pub fn shrink_async(&self, timeout: Duration) -> Result<Work<Self>> {
        let i = self.inner();
        let n = i.membership_call(Operation::Shrink, timeout, Form::Async)?;
        let comm = Arc::clone(i);
        job::start(i, n, move || comm.shrink(timeout, HandleState::Fresh))
    }
}
