//! The engine: one thread per process that makes progress for endpoints when nobody drives them.
//!
//! A thread that waits in a call drives its endpoint itself; the engine then keeps away, because a
//! second reader would only add wake-ups (see cpu.md A.4 on what that costs Gloo). It learns of events
//! on undriven endpoints from their descriptors, which it watches one shot at a time, or, for
//! in-process links, from [`Notify`](crate::wait::Notify). An endpoint that was used since the last
//! look is not watched at all but looked at again a little later: in a tight loop of calls the engine
//! costs a few wake-ups per second.

use std::fmt;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use comm_core::{Error, RealClock, Result, Time};
use parking_lot::Mutex;
use rustix::event::{EventfdFlags, epoll, eventfd};

use crate::wait::{Notify, wait_epoll};

/// First and longest interval between looks at an endpoint that is being driven.
const TICK: Duration = Duration::from_millis(5);
const SLOW_TICK: Duration = Duration::from_millis(40);
const KICK: u64 = u64::MAX;

/// What the engine drives.
pub(crate) trait Driven: Send + Sync {
    fn notify(&self) -> &Arc<Notify>;

    /// Makes progress and looks at timers. Returns whether calls were made since the last turn, and
    /// when it wants the next turn at the latest.
    fn turn(&self) -> Turn;
}

pub(crate) struct Turn {
    pub(crate) used: bool,
    pub(crate) next: Option<Duration>,
}

/// Who gives endpoints their turns while nobody waits in them, in place of the process's engine thread: a simulator.
///
/// Both methods may be called with an endpoint's lock held, so they do not call an endpoint from within.
pub trait Engine: Send + Sync + fmt::Debug {
    /// Takes an endpoint into its care, for as long as that lives.
    fn adopt(&self, ward: Ward);

    /// Something has happened on one of its endpoints: each is to have its turn soon.
    fn kick(&self);
}

/// An endpoint in the care of an [`Engine`].
#[derive(Clone)]
pub struct Ward(Weak<dyn Driven>);

/// What an endpoint says after its turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turned {
    /// It does not exist any more.
    Gone,
    /// Somebody waits in it and does the work. It kicks when that has an end.
    Driven,
    /// It wants its next turn after this time at the latest, or not before it kicks.
    Idle(Option<Duration>),
}

impl fmt::Debug for Ward {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ward").field("alive", &(self.0.strong_count() > 0)).finish()
    }
}

impl Ward {
    /// Gives the endpoint its turn. Takes its lock, and runs wakers.
    #[must_use]
    pub fn turn(&self) -> Turned {
        let Some(d) = self.0.upgrade() else { return Turned::Gone };
        let n = d.notify();
        // Listen before looking, so that what comes after the look is heard.
        n.engine_listens.store(true, Ordering::SeqCst);
        if n.drivers.load(Ordering::SeqCst) > 0 {
            return Turned::Driven;
        }
        Turned::Idle(d.turn().next)
    }
}

struct Entry {
    id: u64,
    driven: Weak<dyn Driven>,
    armed: bool,
    tick: Duration,
    due: Option<Time>,
}

pub(crate) struct Shared {
    epoll: OwnedFd,
    event: OwnedFd,
    new: Mutex<Vec<Entry>>,
}

/// A handle on the process's engine, or on another one.
#[derive(Clone)]
pub(crate) enum EngineHandle {
    Process(Arc<Shared>),
    Own(Arc<dyn Engine>),
}

static ENGINE: OnceLock<Mutex<Option<EngineHandle>>> = OnceLock::new();

impl EngineHandle {
    /// The process's engine; started on first use.
    pub(crate) fn get() -> Result<Self> {
        let mut slot = ENGINE.get_or_init(|| Mutex::new(None)).lock();
        if let Some(e) = &*slot {
            return Ok(e.clone());
        }
        let e = Self::start().map_err(|e| Error::io("starting the progress engine", &e))?;
        *slot = Some(e.clone());
        Ok(e)
    }

    fn start() -> io::Result<Self> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        epoll::add(&epoll, &event, epoll::EventData::new_u64(KICK), epoll::EventFlags::IN)?;
        let shared = Arc::new(Shared { epoll, event, new: Mutex::default() });
        let theirs = Arc::clone(&shared);
        std::thread::Builder::new().name("rustcomms-engine".into()).spawn(move || run(&theirs))?;
        Ok(Self::Process(shared))
    }

    /// Makes the engine look at all endpoints soon.
    pub(crate) fn kick(&self) {
        match self {
            // A full counter means that a kick is pending already.
            Self::Process(shared) => drop(rustix::io::write(&shared.event, &1u64.to_ne_bytes())),
            Self::Own(engine) => engine.kick(),
        }
    }

    /// Puts an endpoint into the engine's care for as long as it lives.
    pub(crate) fn register(&self, driven: &Arc<impl Driven + 'static>) -> Result<()> {
        static NEXT: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(0);
        let shared = match self {
            Self::Process(shared) => shared,
            Self::Own(engine) => {
                let weak = Arc::downgrade(driven);
                engine.adopt(Ward(weak));
                engine.kick();
                return Ok(());
            }
        };
        let id = NEXT.fetch_add(1, Ordering::Relaxed);
        if let Some(fd) = driven.notify().poll_fd() {
            let flags = epoll::EventFlags::ONESHOT;
            epoll::add(&shared.epoll, fd, epoll::EventData::new_u64(id), flags)
                .map_err(|e| Error::io("watching an endpoint", &e.into()))?;
        }
        let weak = Arc::downgrade(driven);
        shared.new.lock().push(Entry { id, driven: weak, armed: false, tick: TICK, due: None });
        self.kick();
        Ok(())
    }
}

fn run(shared: &Shared) {
    let mut entries: Vec<Entry> = Vec::new();
    loop {
        entries.append(&mut shared.new.lock());
        let now = comm_core::Clock::now(&RealClock);
        let mut sleep: Option<Duration> = None;
        entries.retain_mut(|e| {
            let Some(d) = e.driven.upgrade() else { return false };
            let wait = look(shared, e, d.as_ref(), now);
            if let Some(w) = wait {
                sleep = Some(sleep.map_or(w, |s| s.min(w)));
            }
            true
        });
        wait_epoll(shared.epoll.as_fd(), sleep, |data| {
            if data == KICK {
                let mut b = [0u8; 8];
                let _ = rustix::io::read(&shared.event, &mut b);
                // A kick may concern any endpoint.
                for e in &mut entries {
                    e.due = None;
                }
            } else if let Some(e) = entries.iter_mut().find(|e| e.id == data) {
                e.armed = false;
                e.due = None;
            }
        });
    }
}

/// Gives one endpoint its turn if it is due; returns when to look again at the latest.
fn look(shared: &Shared, e: &mut Entry, d: &dyn Driven, now: Time) -> Option<Duration> {
    let n = d.notify();
    if n.drivers.load(Ordering::SeqCst) > 0 {
        // Somebody drives it. If that one leaves work behind it kicks us.
        e.tick = (e.tick * 2).min(SLOW_TICK);
        e.due = None;
        n.engine_listens.store(false, Ordering::SeqCst);
        return Some(e.tick);
    }
    if e.armed && e.due.is_some_and(|t| t > now) {
        return e.due.map(|t| t.since(now));
    }
    // In-process links: listen before looking, so that what comes after the look is heard.
    n.engine_listens.store(true, Ordering::SeqCst);
    let turn = d.turn();
    if turn.used && turn.next.is_none_or(|d| d > TICK) {
        n.engine_listens.store(false, Ordering::SeqCst);
        e.tick = TICK;
        return Some(e.tick);
    }
    if let Some(fd) = n.poll_fd()
        && !e.armed
    {
        let flags = epoll::EventFlags::IN | epoll::EventFlags::ONESHOT;
        let _ = epoll::modify(&shared.epoll, fd, epoll::EventData::new_u64(e.id), flags);
    }
    e.armed = true;
    e.tick = TICK;
    e.due = turn.next.map(|d| now.after(d));
    turn.next
}
