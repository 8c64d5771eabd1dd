//! The endpoint: this process's end of the links to a set of peers, shared by the communicators over them.
//!
//! Everything lies under one lock. Whoever waits for something drives: takes the lock, makes a pass
//! over the links, looks whether it has what it wants, releases the lock; a while spinning, a while
//! yielding, then asleep in the links. Of several waiting threads one sleeps in the links (the
//! *poller*) and the others are woken when something ended or when the poller leaves. When nobody
//! drives, the process's engine does. User code (wakers) runs without the lock.
//!
//! No channel blocks another: receivers always drain their links; data that nobody has asked for is
//! bounded by credit per peer and communicator, long point-to-point messages wait at the sender, and
//! long messages are cut into frames that take turns.

mod agree;
mod control;
mod drive;
mod failure;
mod flight;
mod group;
mod kill;
mod links;
mod live;
mod mail;
mod matching;
mod monitor;
mod news;
mod op;
mod p2p;
mod rx;
mod state;
mod tx;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::task::Poll;
use std::time::Duration;

use comm_core::{Clock, Error, ErrorKind, OpDesc, Parker, Pending, Phase, Result, Time, check_outside_operator};
use parking_lot::{Mutex, MutexGuard};

pub use self::agree::Survivors;
use self::flight::Flight;
use self::group::Gone;
pub use self::group::GroupSpec;
use self::mail::Mailbox;
pub use self::op::{Message, OpId, PieceId, Port, Sink, Task};
pub use self::p2p::EAGER;
use self::state::State;
use crate::engine::{Driven, Engine, EngineHandle, Turn};
use crate::link::Link;
use crate::overlay::{Connect, Dialer, Prober};
use crate::wait::Notify;

/// Longest sleep of a waiting thread before it looks at timers again.
const NAP: Duration = Duration::from_millis(100);
/// How long an error waits for the abort messages to be written, so that they are out before the caller
/// can end the process.
const FLUSH: Duration = Duration::from_millis(100);
/// How long finalize waits for the others to say that nothing more comes.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// How long a waiting thread keeps its core.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Patience {
    /// Passes without pause.
    pub spins: u32,
    /// Passes with a yield in between, after that.
    pub yields: u32,
}

impl Patience {
    /// For `ranks` ranks on a host that may use `cores` cores: spinning takes a core away from the rank one
    /// waits for when there are more ranks than cores.
    #[must_use]
    pub const fn fitting(ranks: usize, cores: usize) -> Self {
        if ranks <= cores { Self { spins: 100, yields: 20 } } else { Self { spins: 1, yields: 8 } }
    }
}

/// Settings of an endpoint.
#[derive(Clone, Debug)]
pub struct EndpointOptions {
    /// Whether frames carry a checksum; the same on all ranks.
    pub checksum: bool,
    /// How waiting threads behave.
    pub patience: Patience,
    /// Source of time.
    pub clock: Arc<dyn Clock>,
    /// Who makes the connections that are missing at creation, when they are needed. Without one, a peer without link
    /// is one that is gone.
    pub dialer: Option<Arc<dyn Dialer>>,
    /// Which links groups have from the start, if there is a dialer.
    pub connect: Connect,
    /// Silence after which a peer counts as dead, if nobody vouches for it; [`Duration::MAX`]: never.
    pub heartbeat: Duration,
    /// Who asks a silent peer on another way whether it lives. Without one, silence alone decides.
    pub prober: Option<Arc<dyn Prober>>,
    /// Who gives the endpoint its turns while nobody waits in it; `None`: the process's engine thread. With an engine of
    /// its own an endpoint sleeps through the clock only, and its links need no descriptors.
    pub engine: Option<Arc<dyn Engine>>,
}

impl EndpointOptions {
    /// No checksum, no dialer, no heartbeats; patience for one rank.
    #[must_use]
    pub fn new(clock: Arc<dyn Clock>) -> Self {
        Self {
            checksum: false,
            patience: Patience::fitting(1, 1),
            clock,
            dialer: None,
            connect: Connect::Auto,
            heartbeat: Duration::MAX,
            prober: None,
            engine: None,
        }
    }
}

/// A group of an endpoint, as its owner names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GroupId {
    index: usize,
    id: u64,
}

/// This process's end of the links to a set of peers, shared by the communicators over them. Whoever waits
/// for something drives it; when nobody does, the process's engine does.
pub struct Endpoint {
    state: Mutex<State>,
    mail: Arc<Mailbox>,
    /// Ranks, this one included.
    size: usize,
    notify: Arc<Notify>,
    patience: Mutex<Patience>,
    poller: AtomicBool,
    /// Threads in [`sleep`](Self::sleep), the poller included.
    asleep: AtomicUsize,
    sleepers: Mutex<Vec<Arc<Parker>>>,
    last_calls: AtomicU64,
    parked: bool,
    /// The engine knows the endpoint.
    registered: AtomicBool,
}

impl fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Endpoint").field("notify", &self.notify).finish_non_exhaustive()
    }
}

impl Endpoint {
    /// Takes the links to all peers; `links[rank]` is `None`.
    ///
    /// # Errors
    ///
    /// When the engine or the descriptors for waiting cannot be created.
    pub fn new(rank: usize, mut links: Vec<Option<Box<dyn Link>>>, options: EndpointOptions) -> Result<Arc<Self>> {
        let (engine, simulated) = match &options.engine {
            Some(own) => (EngineHandle::Own(Arc::clone(own)), true),
            None => (EngineHandle::get()?, false),
        };
        let polled = !simulated && (options.dialer.is_some() || links.iter().flatten().any(|l| l.fd().is_some()));
        let notify = if polled {
            Notify::polled(engine, Arc::clone(&options.clock)).map_err(|e| Error::io("creating an endpoint", &e))?
        } else {
            Notify::parked(engine, Arc::clone(&options.clock))
        };
        let notify = Arc::new(notify);
        for (p, link) in links.iter_mut().enumerate() {
            let Some(link) = link else { continue };
            if let Some(fd) = link.fd() {
                notify.watch(fd, p).map_err(|e| Error::io("watching a link", &e))?;
            }
            link.attach(&notify);
        }
        let (mail, size) = (Arc::<Mailbox>::default(), links.len());
        let endpoint = Arc::new(Self {
            state: Mutex::new(State::new(rank, links, Arc::clone(&notify), Arc::clone(&mail), &options)),
            mail,
            size,
            notify,
            patience: Mutex::new(options.patience),
            poller: AtomicBool::new(false),
            asleep: AtomicUsize::new(0),
            sleepers: Mutex::default(),
            last_calls: AtomicU64::new(0),
            parked: !polled,
            registered: AtomicBool::new(false),
        });
        Ok(endpoint)
    }

    /// Sets how waiting threads behave from their next wait on, for who learns only later how many ranks share the host.
    pub fn set_patience(&self, patience: Patience) {
        *self.patience.lock() = patience;
    }

    /// The clock.
    #[must_use]
    pub fn clock(&self) -> &Arc<dyn Clock> {
        self.notify.clock()
    }

    /// Creates a group. Collective over its members, in the sense that each must do it.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` for members that are not distinct ranks of the endpoint including this one, or
    /// an id that is in use.
    pub fn create_group(self: &Arc<Self>, spec: GroupSpec) -> Result<GroupId> {
        check_outside_operator()?;
        let id = spec.id;
        let index = self.with(|st| st.create_group(spec))?;
        // Not before the first group is there: a peer that is ready sooner may have sent data for it, which the
        // engine would throw away as that of a communicator that is gone. Further groups are made over one that
        // exists, and their makers wait for each other before they use them.
        if !self.registered.swap(true, Ordering::SeqCst) {
            self.notify.engine.register(self)?;
        }
        Ok(GroupId { index, id })
    }

    /// Runs an operation to its end on the calling thread. Does not allocate beyond what its pieces need.
    ///
    /// # Errors
    ///
    /// The operation's error.
    pub fn run(
        &self,
        g: GroupId,
        seq: Option<u64>,
        desc: OpDesc,
        timeout: Duration,
        task: &mut dyn Task,
    ) -> Result<()> {
        let (mut st, index) = self.enter(g)?;
        let op = match st.open_op(index, seq, desc, timeout) {
            Ok(op) => op,
            Err(e) => {
                self.settle(st);
                return Err(e);
            }
        };
        let first = step(&mut st, op, task);
        let result = match first {
            Some(r) => {
                st.release_op(op);
                self.settle(st);
                r
            }
            None => {
                let r = self.drive(st, None, |st| {
                    let r = step(st, op, task)?;
                    st.release_op(op);
                    Some(r)
                });
                r.unwrap_or_else(|| Err(ErrorKind::Finalized.into()))
            }
        };
        if result.as_ref().is_err_and(|e| !e.is_recoverable()) {
            self.flush();
        }
        result
    }

    /// Starts an operation; the engine, or whoever drives the endpoint, carries it on.
    ///
    /// # Errors
    ///
    /// When the group has failed or is gone.
    pub fn start(
        self: &Arc<Self>,
        g: GroupId,
        seq: Option<u64>,
        desc: OpDesc,
        timeout: Duration,
        task: Box<dyn Task>,
    ) -> Result<Box<dyn Pending>> {
        let op = self.with(|st| {
            let g = check(st, g)?;
            let op = st.open_op(g, seq, desc, timeout)?;
            if let Some(slot) = st.slot(op)
                && slot.result.is_none()
            {
                slot.task = Some(task);
                slot.detached = true;
                st.async_ops += 1;
                st.poll_task(op);
                st.run_tasks();
            }
            Ok::<_, Error>(op)
        })?;
        if self.notify.drivers.load(Ordering::SeqCst) == 0 {
            self.notify.engine.kick();
        }
        Ok(Box::new(Flight { endpoint: Arc::clone(self), op, result: None }))
    }

    /// This rank takes no part in collective call `seq`.
    pub fn refuse(&self, g: GroupId, seq: u64, desc: OpDesc, reason: &str) {
        self.on_group(g, |st, g| st.refuse(g, seq, desc, reason));
    }

    /// This rank takes no part in a point-to-point message.
    pub fn refuse_message(&self, g: GroupId, peer: usize, tag: u32, seq: u64, desc: OpDesc, reason: &str) {
        self.on_group(g, |st, g| st.refuse_message(g, peer, tag, seq, desc, reason));
    }

    /// Tells the group's rank 0 the hash over this rank's calls up to `seq`; it fails the group when ranks differ.
    pub fn publish(&self, g: GroupId, seq: u64, hash: u64) {
        self.on_group(g, |st, g| st.publish(g, seq, hash));
    }

    /// Fails a group on all its members.
    pub fn fail(&self, g: GroupId, cause: &Error) {
        self.on_group(g, |st, g| st.fail_group(g, cause.clone(), true));
    }

    /// Another membership, of generation `theirs`, has taken a group's place for this rank. What it has open here ends with
    /// `StaleGeneration`; the other members' calls that need this rank end so as well, and name it.
    pub fn leave_for(&self, g: GroupId, theirs: u32) {
        self.on_group(g, |st, g| st.leave_for(g, theirs));
    }

    /// The error that a group has failed with.
    #[must_use]
    pub fn failure(&self, g: GroupId) -> Option<Error> {
        let st = self.state.lock();
        let g = check(&st, g).ok()?;
        st.group(g).filter(|g| g.failed.is_some()).map(|_| st.localized(g, None))
    }

    /// Members of a group whose connection is gone or who have left.
    #[must_use]
    pub fn lost(&self, g: GroupId) -> Vec<usize> {
        if check_outside_operator().is_err() {
            return Vec::new();
        }
        let st = self.state.lock();
        let Some(group) = check(&st, g).ok().and_then(|g| st.group(g)) else { return Vec::new() };
        (0..group.members.len()).filter(|r| st.peers[group.members[*r]].down.is_some()).collect()
    }

    /// Frames and bytes written so far.
    #[must_use]
    pub fn traffic(&self) -> (u64, u64) {
        let st = self.state.lock();
        (st.frames_sent, st.bytes_sent)
    }

    /// Bytes held for receives that have not been posted; for tests of boundedness.
    #[must_use]
    pub fn held(&self) -> u64 {
        let st = self.state.lock();
        st.peers.iter().flat_map(|p| &p.chans).map(|c| c.held[0] + c.held[1]).sum()
    }

    /// Sends a control-plane message.
    ///
    /// # Errors
    ///
    /// The group's failure, or `PeerFailed`.
    pub fn send_control(&self, g: GroupId, peer: usize, tag: u32, bytes: &[u8]) -> Result<()> {
        check_outside_operator()?;
        self.with(|st| {
            let g = check(st, g)?;
            st.send_message(g, peer, tag, bytes)
        })
    }

    /// Receives the next control-plane message of `peer` with `tag`.
    ///
    /// # Errors
    ///
    /// `Timeout`; the group's failure; `PeerFailed`.
    pub fn recv_control(&self, g: GroupId, peer: usize, tag: u32, timeout: Duration) -> Result<Vec<u8>> {
        check_outside_operator()?;
        let start = self.clock().now();
        let (st, index) = self.enter(g)?;
        let got = self.drive(st, Some(start.after(timeout)), |st| st.take_message(index, peer, tag));
        got.unwrap_or_else(|| Err(self.timeout(start, vec![peer])))
    }

    /// The endpoint's state, to go on with, and a group's place in it.
    ///
    /// # Errors
    ///
    /// `Finalized` when the group is gone.
    fn enter(&self, g: GroupId) -> Result<(MutexGuard<'_, State>, usize)> {
        let st = self.state.lock();
        match check(&st, g) {
            Ok(index) => Ok((st, index)),
            Err(e) => {
                self.settle(st);
                Err(e)
            }
        }
    }

    fn timeout(&self, start: Time, missing: Vec<usize>) -> Error {
        ErrorKind::Timeout {
            phase: Phase::Running,
            elapsed: self.clock().now().since(start),
            missing,
            unmatched: Vec::new(),
        }
        .into()
    }

    /// Collective end of a group: returns when all members have called it.
    ///
    /// # Errors
    ///
    /// The group's failure; `PeerFailed` when a member left without finalizing; `Timeout`.
    pub fn finalize(&self, g: GroupId, timeout: Duration) -> Result<()> {
        let start = self.clock().now();
        let (mut st, index) = self.enter(g)?;
        // What the group has failed with must be read before saying goodbye ends it.
        let failed = st.group(index).filter(|g| g.failed.is_some()).map(|_| st.localized_at_finalize(index));
        if let Some(e) = failed {
            st.say_goodbye(index, Gone::Finalized);
            self.settle(st);
            self.flush();
            return Err(e);
        }
        // Calls that other threads of the program have open come first: they may still need the others.
        let mut leaving = false;
        let ended = self.drive(st, Some(start.after(timeout)), |st| {
            if !leaving {
                if !st.is_idle(index) {
                    return None;
                }
                leaving = true;
                st.say_goodbye(index, Gone::Finalized);
            }
            st.all_finalized(index)
        });
        let result = ended.unwrap_or_else(|| {
            self.with(|st| {
                let e = self.timeout(start, st.not_finalized(index));
                // Those who come later must not wait for this rank.
                st.fail_group(index, e.clone(), true);
                Err(e)
            })
        });
        if result.is_ok() {
            self.last_words(index);
        }
        self.with(|st| st.end_finalize(index));
        self.flush();
        result
    }

    /// Waits until nothing of a sparse group is under way to this rank any more: a socket that is closed with something
    /// unread takes with it what it was still to send. Not for long: it is no error.
    fn last_words(&self, index: usize) {
        let mut st = self.state.lock();
        st.say_last_word(index);
        let until = self.clock().now().after(LAST_WORDS);
        let _ = self.drive(st, Some(until), |st| (!st.awaits_last_words(index)).then_some(()));
    }

    /// Local end of a group: everything of it in flight fails, peers are told without waiting for them.
    pub fn close(&self, g: GroupId) {
        self.on_group(g, |st, g| st.close_group(g));
    }

    /// Forgets a group that was closed or finalized.
    pub fn forget(&self, g: GroupId) {
        self.on_group(g, |st, g| st.drop_group(g));
    }

    fn on_group(&self, g: GroupId, f: impl FnOnce(&mut State, usize)) {
        if check_outside_operator().is_err() && self.state.is_locked() {
            // This very thread may hold the lock, further up its stack.
            tracing::warn!("a custom operator has called or dropped what belongs to a communicator; ignored");
            return;
        }
        self.with(|st| {
            if let Ok(g) = check(st, g) {
                f(st, g);
            }
        });
    }
}

impl Driven for Endpoint {
    fn notify(&self) -> &Arc<Notify> {
        &self.notify
    }

    fn turn(&self) -> Turn {
        // A wake-up that found no sleeper any more would wake the engine over and over.
        if !self.poller.load(Ordering::SeqCst) {
            self.notify.forget_wake();
            if self.poller.load(Ordering::SeqCst) {
                self.notify.wake();
            }
        }
        let mut st = self.state.lock();
        let calls = st.calls;
        let mut passes = 0;
        while st.progress(true) && passes < 64 {
            passes += 1;
        }
        let more = passes == 64;
        let now = st.now();
        st.tick(now);
        self.watch_writability(&mut st);
        let next = if more { Some(Duration::ZERO) } else { st.next_timer(now) };
        let used = self.last_calls.swap(calls, Ordering::Relaxed) != calls && st.async_ops == 0;
        self.settle(st);
        Turn { used, next }
    }
}

/// Finds a group's place, unless the place belongs to another group by now.
fn check(st: &State, g: GroupId) -> Result<usize> {
    match st.group(g.index) {
        Some(group) if group.id == g.id => Ok(g.index),
        _ => Err(ErrorKind::Finalized.into()),
    }
}

/// Polls the task of a synchronous operation.
fn step(st: &mut State, op: OpId, task: &mut dyn Task) -> Option<Result<()>> {
    let ended = |st: &mut State| st.slot(op).and_then(|s| s.result.clone());
    if let Some(r) = ended(st) {
        return Some(r);
    }
    if let Poll::Ready(r) = st.poll_contained(op, task) {
        st.task_ended(op, r);
    }
    ended(st)
}
