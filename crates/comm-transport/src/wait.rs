//! How an endpoint sleeps and who wakes it.

use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use comm_core::{Clock, Parker, Time};
use rustix::buffer::spare_capacity;
use rustix::event::{EventfdFlags, Timespec, epoll, eventfd};

use crate::engine::EngineHandle;

/// The endpoint's own wake-up token in its epoll set.
const WAKE: u64 = u64::MAX;

/// Where the threads that wait for one endpoint sleep.
///
/// A single thread at a time sleeps "in the links" (the poller); others park on parkers of their own.
/// `sleeping` is raised before the poller looks at the links for the last time, so that a notifier
/// that comes after that look sees it (both sides use sequentially consistent accesses).
pub struct Notify {
    sleeping: AtomicBool,
    /// Threads that drive the endpoint now; 0 means that the engine looks after it.
    pub(crate) drivers: AtomicUsize,
    /// The engine has nobody to wait on (in-process links): tell it about events.
    pub(crate) engine_listens: AtomicBool,
    pub(crate) engine: EngineHandle,
    sleeper: Sleeper,
    clock: Arc<dyn Clock>,
}

enum Sleeper {
    Poll { epoll: OwnedFd, event: OwnedFd },
    Park(Parker),
}

impl fmt::Debug for Notify {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Notify")
            .field("sleeping", &self.sleeping)
            .field("drivers", &self.drivers)
            .finish_non_exhaustive()
    }
}

impl Notify {
    /// For endpoints whose links have descriptors.
    pub(crate) fn polled(engine: EngineHandle, clock: Arc<dyn Clock>) -> io::Result<Self> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        epoll::add(&epoll, &event, epoll::EventData::new_u64(WAKE), epoll::EventFlags::IN)?;
        Ok(Self::with(engine, clock, Sleeper::Poll { epoll, event }))
    }

    /// For endpoints whose links are in-process.
    pub(crate) fn parked(engine: EngineHandle, clock: Arc<dyn Clock>) -> Self {
        Self::with(engine, clock, Sleeper::Park(Parker::new()))
    }

    fn with(engine: EngineHandle, clock: Arc<dyn Clock>, sleeper: Sleeper) -> Self {
        Self {
            sleeping: AtomicBool::new(false),
            drivers: AtomicUsize::new(0),
            engine_listens: AtomicBool::new(true),
            engine,
            sleeper,
            clock,
        }
    }

    pub(crate) fn clock(&self) -> &Arc<dyn Clock> {
        &self.clock
    }

    /// The descriptor that becomes readable when a link has events.
    pub(crate) fn poll_fd(&self) -> Option<BorrowedFd<'_>> {
        match &self.sleeper {
            Sleeper::Poll { epoll, .. } => Some(epoll.as_fd()),
            Sleeper::Park(_) => None,
        }
    }

    /// Adds a link's descriptor under the peer's number.
    pub(crate) fn watch(&self, fd: BorrowedFd<'_>, peer: usize) -> io::Result<()> {
        if let Sleeper::Poll { epoll, .. } = &self.sleeper {
            epoll::add(epoll, fd, epoll::EventData::new_u64(peer as u64), epoll::EventFlags::IN)?;
        }
        Ok(())
    }

    /// Changes whether writability of a link wakes too.
    pub(crate) fn rewatch(&self, fd: BorrowedFd<'_>, peer: usize, write: bool) -> io::Result<()> {
        if let Sleeper::Poll { epoll, .. } = &self.sleeper {
            let flags = if write { epoll::EventFlags::IN | epoll::EventFlags::OUT } else { epoll::EventFlags::IN };
            epoll::modify(epoll, fd, epoll::EventData::new_u64(peer as u64), flags)?;
        }
        Ok(())
    }

    /// Stops watching a descriptor that is about to be closed.
    pub(crate) fn unwatch(&self, fd: BorrowedFd<'_>) {
        if let Sleeper::Poll { epoll, .. } = &self.sleeper {
            // The descriptor may have been removed before; closing it removes it in any case.
            let _ = epoll::delete(epoll, fd);
        }
    }

    /// Something happened: wakes the poller if it sleeps, else tells the engine if nobody drives.
    pub fn notify(&self) {
        if self.sleeping.load(Ordering::SeqCst) {
            self.wake();
        } else if self.engine_listens.load(Ordering::SeqCst)
            && self.drivers.load(Ordering::SeqCst) == 0
            && self.engine_listens.swap(false, Ordering::SeqCst)
        {
            self.engine.kick();
        }
    }

    /// Wakes the poller unconditionally.
    pub(crate) fn wake(&self) {
        match &self.sleeper {
            Sleeper::Poll { event, .. } => {
                // A full counter means that a wake-up is pending already.
                let _ = rustix::io::write(event, &1u64.to_ne_bytes());
            }
            Sleeper::Park(p) => self.clock.unpark(p),
        }
    }

    /// Forgets a wake-up that nobody sleeps for any more.
    pub(crate) fn forget_wake(&self) {
        if let Sleeper::Poll { event, .. } = &self.sleeper {
            let mut b = [0u8; 8];
            // Nothing to read means nothing to forget.
            let _ = rustix::io::read(event, &mut b);
        }
    }

    /// Announces that the caller is about to sleep; it must look at the links once more before it does.
    pub(crate) fn announce_sleep(&self) {
        self.sleeping.store(true, Ordering::SeqCst);
        std::sync::atomic::fence(Ordering::SeqCst);
    }

    pub(crate) fn cancel_sleep(&self) {
        self.sleeping.store(false, Ordering::SeqCst);
    }

    /// Sleeps until an event, a wake-up, or `until`. Reports the peers with events.
    pub(crate) fn sleep(&self, until: Time, ready: &mut Vec<usize>) {
        match &self.sleeper {
            Sleeper::Poll { epoll, event } => {
                let left = until.since(self.clock.now());
                if !left.is_zero() {
                    wait_epoll(epoll.as_fd(), Some(left), |data| {
                        if data == WAKE {
                            let mut b = [0u8; 8];
                            let _ = rustix::io::read(event, &mut b);
                        } else {
                            ready.push(data as usize);
                        }
                    });
                }
            }
            Sleeper::Park(p) => self.clock.park(p, Some(until)),
        }
        self.sleeping.store(false, Ordering::SeqCst);
    }
}

/// Waits on an epoll set; an interrupted or failed wait is an empty one.
pub(crate) fn wait_epoll(epoll: BorrowedFd<'_>, timeout: Option<Duration>, mut each: impl FnMut(u64)) {
    let spec = timeout.map(|d| Timespec { tv_sec: d.as_secs() as i64, tv_nsec: d.subsec_nanos().into() });
    let mut events: Vec<epoll::Event> = Vec::with_capacity(32);
    if epoll::wait(epoll, spare_capacity(&mut events), spec.as_ref()).is_ok() {
        for e in &events {
            each(e.data.u64());
        }
    }
}
