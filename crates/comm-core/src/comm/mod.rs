//! [`Communicator`]: the object users hold.
//!
//! States of a handle:
//!
//! ```text
//! Memberless, Fresh, Live, Stale --finalize--> Finalizing --> Finalized
//!                              \--last clone dropped--> Closed
//! Fresh --first call--> Live                      Memberless, Live --reconfigure--> Stale
//! ```
//!
//! *Memberless*: dynamic and not filled yet. *Fresh*: made by an asynchronous call, and perhaps never seen by the user.
//! *Stale*: another membership has taken its place.
//!
//! Failure is not a state of the handle but of the backend (`Backend::failure`): it is sticky, every
//! later call gets the first cause, and `finalize` still ends the handle in an orderly way.
//! Validation, numbering, observing and tracking happen here, once, for all backends.

pub(crate) mod batch;
pub(crate) mod check;
mod family;
mod job;
mod ops;
mod prepare;
pub(crate) mod scope;
pub(crate) mod ticket;

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;

pub use self::batch::{AsyncBatch, Batch, BatchBuffers, BatchSlot, BatchedOp};
pub use self::family::{Members, SplitOptions};
pub use self::ops::With;
pub use self::scope::{Scope, ScopedBatch};
pub use self::ticket::OpTicket;

use crate::backend::{Backend, BackendInfo, OpQuery, Support};
use crate::control::Control;
use crate::desc::{OpDesc, Operation};
use crate::device::Device;
use crate::error::{Context, Error, ErrorKind, Result};
use crate::ext::{Allocation, Extensions};
use crate::observe::{Event, Observer, ObserverGuard, Observers};
use crate::options::{CORE_HINTS, CallOptions, CommOptions, check_hints};
use crate::reduce::{abort_fold, check_outside_operator, in_fold};
use crate::time::{Clock, Time};
use crate::work::Core;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum HandleState {
    Live = 0,
    Finalizing = 1,
    Finalized = 2,
    Closed = 3,
    Memberless = 4,
    Fresh = 5,
    Stale = 6,
}

/// What clones of a communicator, works and tickets share.
pub(crate) struct CommInner {
    pub(crate) name: Arc<str>,
    pub(crate) device: Device,
    pub(crate) backend: Arc<dyn Backend>,
    pub(crate) options: CommOptions,
    pub(crate) observers: Arc<Observers>,
    pub(crate) collective_seq: AtomicU64,
    pub(crate) next_op_id: AtomicU64,
    /// Next number per (peer, tag) of sends and of receives.
    pub(crate) p2p_sends: Mutex<HashMap<(usize, u32), u64>>,
    pub(crate) p2p_recvs: Mutex<HashMap<(usize, u32), u64>>,
    /// In the order of calls.
    pub(crate) inflight: Mutex<BTreeMap<u64, Arc<Core>>>,
    /// Ranks in the root communicator.
    ranks: Vec<usize>,
    state: AtomicU8,
    /// A reconfigure of this handle is under way.
    reconfiguring: AtomicBool,
    /// Of a stale handle: the generation of the membership that took its place.
    successor: AtomicU32,
}

impl fmt::Debug for CommInner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Communicator")
            .field("name", &self.name)
            .field("rank", &self.rank())
            .field("size", &self.size())
            .field("backend", &self.backend.info().name)
            .field("state", &self.state())
            .finish_non_exhaustive()
    }
}

impl CommInner {
    pub(crate) fn rank(&self) -> usize {
        self.backend.info().rank
    }

    pub(crate) fn size(&self) -> usize {
        self.backend.info().size
    }

    pub(crate) fn clock(&self) -> &Arc<dyn Clock> {
        self.backend.clock()
    }

    pub(crate) fn state(&self) -> HandleState {
        match self.state.load(Ordering::Acquire) {
            0 => HandleState::Live,
            1 => HandleState::Finalizing,
            2 => HandleState::Finalized,
            4 => HandleState::Memberless,
            5 => HandleState::Fresh,
            6 => HandleState::Stale,
            _ => HandleState::Closed,
        }
    }

    pub(crate) fn transition(&self, from: HandleState, to: HandleState) -> bool {
        self.state.compare_exchange(from as u8, to as u8, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }

    /// Begins the handle's end and tells from which state; `None` when it had begun before.
    fn leave(&self, to: HandleState) -> Option<HandleState> {
        loop {
            let from = self.state();
            if matches!(from, HandleState::Finalizing | HandleState::Finalized | HandleState::Closed) {
                return None;
            }
            if self.transition(from, to) {
                return Some(from);
            }
        }
    }

    /// What calls on a stale handle get.
    pub(crate) fn stale_error(&self) -> Error {
        let (ours, theirs) = (self.backend.info().generation, self.successor.load(Ordering::Acquire));
        ErrorKind::StaleGeneration { ours, theirs, rank: None }.into()
    }

    /// Why the communicator cannot be used any more, if so.
    pub(crate) fn failure(&self) -> Option<Error> {
        if self.state() == HandleState::Stale { Some(self.stale_error()) } else { self.backend.failure() }
    }
}

/// Counts the user's clones; the last one to go closes the communicator.
struct Handle {
    inner: Arc<CommInner>,
    /// The process that made it.
    process: u32,
}

impl Drop for Handle {
    fn drop(&mut self) {
        let i = &self.inner;
        if self.process != std::process::id() {
            // A forked child shares the parent's connections: closing here would say goodbye in the parent's name.
            std::mem::forget(Arc::clone(i));
            return;
        }
        if in_fold() {
            // Further up this thread's stack the backend is in use.
            let inner = Arc::clone(i);
            if i.clock().spawn("rustcomms-close", Box::new(move || Self::close(&inner))).is_err() {
                std::mem::forget(Arc::clone(i));
            }
            return;
        }
        Self::close(i);
    }
}

impl Handle {
    fn close(i: &CommInner) {
        let Some(from) = i.leave(HandleState::Closed) else { return };
        let replaced = || matches!(i.failure().map(|e| e.kind().name()), Some("StaleGeneration"));
        // A world of one has nobody to leave in the lurch.
        if from == HandleState::Live && i.size() > 1 && !replaced() {
            tracing::warn!(comm = %i.name, rank = i.rank(), "communicator dropped without finalize; peers that still need this rank get PeerFailed");
        }
        if matches!(from, HandleState::Live | HandleState::Fresh) && std::thread::panicking() {
            // The others should not read that it was closed when it was a bug.
            let kind = ErrorKind::Aborted { rank: i.rank(), cause: "its thread panicked".into() };
            i.backend.abort(&Error::new(kind).with_context(|| i.context(None, None)));
        }
        i.backend.close();
    }
}

/// A group of ranks that communicate, and this process's place in it.
///
/// Cheap to clone, `Send + Sync`. Every operation exists in three forms: `op` (borrows its buffers),
/// `op_async` (takes them and gives them back through [`Work`](crate::Work)), and, inside
/// [`scope`](Self::scope), borrowed and overlapping. Calls on one communicator must be issued in the
/// same order by all its ranks; if they are not, the ranks get
/// [`ErrorKind::Mismatch`] instead of a hang.
///
/// A call in which this rank's part is complete before the ranks' disagreement shows (a broadcast's root) returns well;
/// the error then comes from the next call or from `finalize`. Of calls without elements, which exchange nothing, and of
/// messages that nobody received, `finalize` tells. Where two ranks disagree about a message, or about a block that only
/// the two know, they get `Mismatch` and the others `Aborted` with its text.
///
/// Buffers are slices, vectors, boxed slices and arrays, borrowed by the synchronous forms. A `&mut [T]` that you were
/// given yourself is moved into the call, as everywhere in generic code; write `&mut *x` to use it again. The type
/// parameter `M` of the methods lets other crates add buffers of their own and never has to be named.
///
/// A communicator belongs to the process that made it: do not use it in a forked child.
///
/// Guarantees: `all_reduce` gives identical bits on all ranks, and the same bits from run to run
/// with the same algorithm. After an error of an operation that is not [recoverable](Error::is_recoverable) the
/// communicator has failed, and every later call returns that error. Errors of [`shrink`](Self::shrink),
/// [`agree_survivors`](Self::agree_survivors) and [`reconfigure`](Self::reconfigure) leave it as it was.
#[derive(Clone)]
pub struct Communicator {
    handle: Arc<Handle>,
}

impl fmt::Debug for Communicator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.inner().fmt(f)
    }
}

impl Communicator {
    /// Wraps a connected backend. For backends; users call [`new_comm`](crate::new_comm) or a backend's `connect`.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` for hints that neither the core nor the backend knows.
    pub fn from_backend(backend: Arc<dyn Backend>, device: Device, options: CommOptions) -> Result<Self> {
        let ranks = (0..backend.info().size).collect();
        Self::assemble(backend, device, options, ranks, Arc::default(), HandleState::Live)
    }

    /// `state`: `Fresh` or `Live`.
    fn assemble(
        backend: Arc<dyn Backend>,
        device: Device,
        options: CommOptions,
        ranks: Vec<usize>,
        observers: Arc<Observers>,
        state: HandleState,
    ) -> Result<Self> {
        check_hints(options.hints.keys().map(String::as_str), &[CORE_HINTS, backend.info().hints])?;
        let state = if backend.info().size == 0 { HandleState::Memberless } else { state };
        let inner = CommInner {
            name: options.effective_name().into(),
            device,
            backend,
            options,
            observers,
            collective_seq: AtomicU64::new(0),
            next_op_id: AtomicU64::new(0),
            p2p_sends: Mutex::default(),
            p2p_recvs: Mutex::default(),
            inflight: Mutex::default(),
            ranks,
            state: AtomicU8::new(state as u8),
            reconfiguring: AtomicBool::new(false),
            successor: AtomicU32::new(0),
        };
        Ok(Self { handle: Arc::new(Handle { inner: Arc::new(inner), process: std::process::id() }) })
    }

    pub(crate) fn inner(&self) -> &Arc<CommInner> {
        &self.handle.inner
    }

    fn info(&self) -> &BackendInfo {
        self.inner().backend.info()
    }

    /// This process's rank, from 0.
    #[must_use]
    pub fn rank(&self) -> usize {
        self.inner().rank()
    }

    /// The number of ranks ("world size").
    #[must_use]
    pub fn size(&self) -> usize {
        self.inner().size()
    }

    /// The name given at creation.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.inner().name
    }

    /// The device given at creation.
    #[must_use]
    pub fn device(&self) -> Device {
        self.inner().device
    }

    /// The backend's registry name.
    #[must_use]
    pub fn backend_name(&self) -> &'static str {
        self.info().name
    }

    /// The version of the backend, or of the library under it.
    #[must_use]
    pub fn backend_version(&self) -> &str {
        &self.info().version
    }

    /// How the backend moves bytes.
    #[must_use]
    pub fn transport(&self) -> &str {
        &self.info().transport
    }

    /// The options in force.
    #[must_use]
    pub fn options(&self) -> &CommOptions {
        &self.inner().options
    }

    /// The ranks of the members in the communicator that all splits started from.
    #[must_use]
    pub fn ranks(&self) -> &[usize] {
        &self.inner().ranks
    }

    /// The membership generation; 0 until reconfigured.
    #[must_use]
    pub fn generation(&self) -> u32 {
        self.info().generation
    }

    /// This rank among those on the same host.
    #[must_use]
    pub fn local_rank(&self) -> usize {
        self.info().local_rank
    }

    /// The number of ranks on the same host.
    #[must_use]
    pub fn local_size(&self) -> usize {
        self.info().local_size
    }

    /// The host of each rank.
    #[must_use]
    pub fn hosts(&self) -> &[String] {
        &self.info().hosts
    }

    /// Whether the communicator has failed, or another membership has taken its place: every later call fails.
    #[must_use]
    pub fn is_failed(&self) -> bool {
        !in_fold() && self.inner().failure().is_some()
    }

    /// The first error that the communicator failed with. After an [`abort`](Self::abort), on whichever rank, it is
    /// [`Aborted`](ErrorKind::Aborted) with that rank and reason; there is no other way to ask whether one was aborted.
    #[must_use]
    pub fn cause(&self) -> Option<Error> {
        if in_fold() {
            return None;
        }
        let i = self.inner();
        i.failure().map(|e| e.with_context(|| i.context(None, None)))
    }

    /// Whether and how the backend does an operation. The same answer on all ranks.
    #[must_use]
    pub fn supports(&self, query: &OpQuery) -> Support {
        if let (Some(op), Some(d)) = (query.redop, query.dtype) {
            // MinLoc, MaxLoc and custom operators exist for types that have no dtype of their own.
            let typed_only = matches!(
                op,
                crate::ReduceOp::MinLoc
                    | crate::ReduceOp::MaxLoc
                    | crate::ReduceOp::Custom
                    | crate::ReduceOp::PreMulSum
            );
            if !typed_only && !op.is_legal(d) {
                return Support::Unsupported { reason: format!("{op} is not defined on {d}") };
            }
        }
        self.inner().backend.supports(query)
    }

    /// What the backend would do for an operation of this shape, e.g. the algorithm's name.
    #[must_use]
    pub fn explain(&self, desc: &OpDesc) -> String {
        self.inner().backend.explain(desc)
    }

    /// The host-side control plane.
    ///
    /// # Errors
    ///
    /// `Unsupported` when the backend has none; `InvalidArgument` before the first `reconfigure` of a dynamic one.
    pub fn control(&self) -> Result<Arc<dyn Control>> {
        let i = self.inner();
        if i.state() == HandleState::Memberless {
            return Err(i.no_members().with_context(|| i.context(None, None)));
        }
        i.backend.control().ok_or_else(|| {
            Error::unsupported("the control plane", format!("backend {} has none", i.backend.info().name))
        })
    }

    /// The backend's optional abilities.
    #[must_use]
    pub fn ext(&self) -> Extensions<'_> {
        self.inner().backend.ext()
    }

    /// The backend itself, for extension crates.
    #[must_use]
    pub fn backend(&self) -> &Arc<dyn Backend> {
        &self.inner().backend
    }

    /// Memory that peers may read directly: `bytes` zeroed bytes, freed on drop.
    ///
    /// # Errors
    ///
    /// `Unsupported` when the backend has no allocator.
    pub fn alloc(&self, bytes: usize) -> Result<Box<dyn Allocation>> {
        match self.ext().allocator {
            Some(a) => a.alloc(bytes),
            None => Err(Error::unsupported(
                "alloc",
                format!("backend {} has no allocator; use ordinary memory", self.backend_name()),
            )),
        }
    }

    /// A view with options for single calls: `comm.with(CallOptions::new().timeout(t)).all_reduce(…)`.
    #[must_use]
    pub fn with<'c>(&'c self, options: CallOptions<'c>) -> With<'c> {
        With::new(self, options)
    }

    /// Begins an operation of an extension crate: numbers it, asks observers, and tells them of its end.
    ///
    /// # Errors
    ///
    /// `Finalized` after finalize; `InvalidArgument` when an observer refuses.
    pub fn begin(&self, desc: OpDesc) -> Result<OpTicket> {
        OpTicket::begin(self, desc, &CallOptions::new())
    }

    /// Registers an observer until the guard is dropped.
    pub fn observe(&self, observer: Arc<dyn Observer>) -> ObserverGuard {
        self.inner().observers.register(observer)
    }

    /// Fails the communicator on all ranks: everything in flight ends with `Aborted`, as does every
    /// later call. Any thread; does not block. Inside a custom operator: that operation fails once the operator returns.
    ///
    /// [`shrink`](Self::shrink), [`agree_survivors`](Self::agree_survivors) and [`reconfigure`](Self::reconfigure) go on: they
    /// are for communicators that have failed, and end by themselves.
    ///
    /// The first cause stays: aborting a communicator that has failed changes nothing. Ranks that come later, and
    /// `finalize`, get the cause too. Its children are communicators of their own; see [`abort_all`].
    ///
    /// Counterpart: `ncclCommAbort`, torchcomms `abort`; unlike `MPI_Abort` it ends no process.
    pub fn abort(&self, reason: &str) {
        abort_all([self], reason);
    }

    /// Ends the communicator in an orderly way. Collective: waits for what is in flight here, then for
    /// all ranks, at most `timeout`. One that another membership has replaced, and a dynamic one without members, end
    /// at once and well; so does one of which a [`reconfigure_async`](Self::reconfigure_async) is in flight, as soon as
    /// that has succeeded. From here on it comes to no membership: who waits for it there learns so at once.
    ///
    /// It is the end whatever it returns: [`shrink`](Self::shrink) and [`reconfigure`](Self::reconfigure) are calls too. What returned
    /// well before is complete, so a loss in finalize harms nobody's results. A program that wants to go on after any loss
    /// makes a [`barrier`](Self::barrier) first, and treats its `PeerFailed` as that of any other call.
    ///
    /// # Errors
    ///
    /// The first error of the communicator, if it had failed; `Timeout` when not all ranks came;
    /// `Finalized` when it was finalized before.
    pub fn finalize(&self, timeout: Duration) -> Result<()> {
        let i = self.inner();
        let desc = OpDesc::new(Operation::Finalize);
        check_outside_operator().map_err(|e| e.with_context(|| i.context(Some(&desc), None)))?;
        let Some(from) = i.leave(HandleState::Finalizing) else {
            return Err(Error::new(ErrorKind::Finalized).with_context(|| i.context(Some(&desc), None)));
        };
        let start = i.clock().now();
        let result = if from == HandleState::Stale {
            // Nobody is waited for, and what is in flight ends here.
            i.backend.close();
            i.drain(start.after(timeout))
        } else {
            self.finalize_members(from, start, timeout)
        };
        i.transition(HandleState::Finalizing, HandleState::Finalized);
        if i.observers.any() {
            i.observers.event(&Event::Finalized { comm: &i.name }, i.clock().now());
        }
        result.map_err(|e| e.with_context(|| Context { op: Some("finalize".into()), ..i.context(None, None) }))
    }

    fn finalize_members(&self, from: HandleState, start: Time, timeout: Duration) -> Result<()> {
        let i = self.inner();
        // Asked first: ending the backend may put its failure away.
        let failed = i.backend.failure().map_or(Ok(()), Err);
        let drained = i.drain(start.after(timeout));
        let replaced = || i.successor.load(Ordering::Acquire) != 0;
        if replaced() {
            // By a reconfigure that was under way: now it is like any that another membership has replaced.
            i.backend.close();
            return drained;
        }
        let left = timeout.saturating_sub(i.clock().now().since(start));
        let ended = i.backend.finalize(left);
        let stale = |e: &Error| matches!(e.kind(), ErrorKind::StaleGeneration { rank: None, .. });
        let moving = || replaced() || i.reconfiguring.load(Ordering::Acquire);
        // A dynamic one without members has nobody to end with; or another thread's reconfigure has come to its end.
        if from == HandleState::Memberless || (ended.as_ref().is_err_and(stale) && moving()) {
            return drained;
        }
        // What others called instead is said best in terms of this call.
        let failed = match &ended {
            Err(e) if failed.is_err() && matches!(e.kind(), ErrorKind::Mismatch { .. }) => ended.clone(),
            _ => failed,
        };
        failed.and(drained).and(ended)
    }
}

/// Aborts several communicators, as [`Communicator::abort`]: parents and children, or all that a program has.
///
/// It waits for nobody and takes no lock for longer than one look, so that it ends whatever threads wait in which of
/// them, in any order; observers are told after all have failed. Inside a custom operator: that operation fails once the
/// operator returns, the others are left alone.
///
/// Counterpart: `ncclCommAbort` for each between `ncclGroupStart` and `ncclGroupEnd`.
pub fn abort_all<'c>(comms: impl IntoIterator<Item = &'c Communicator>, reason: &str) {
    if in_fold() {
        return abort_fold(reason);
    }
    let mut failed = Vec::new();
    for c in comms {
        let i = c.inner();
        if i.failure().is_some() {
            continue;
        }
        let kind = ErrorKind::Aborted { rank: i.rank(), cause: reason.to_owned() };
        let cause = Error::new(kind).with_context(|| i.context(None, None));
        i.backend.abort(&cause);
        failed.push((i, cause));
    }
    for (i, cause) in failed {
        if i.observers.any() {
            i.observers.event(&Event::Aborted { comm: &i.name, cause: &cause }, i.clock().now());
        }
    }
}
