//! Time, parking and wake-ups behind one trait, so that a simulator can own all three.

use std::fmt;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

/// A point on a [`Clock`]: nanoseconds since that clock's origin.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Time(pub u64);

impl Time {
    /// This time plus a duration, saturating.
    #[must_use]
    pub fn after(self, d: Duration) -> Self {
        Self(self.0.saturating_add(u64::try_from(d.as_nanos()).unwrap_or(u64::MAX)))
    }

    /// The duration since `earlier`; zero if `earlier` is later.
    #[must_use]
    pub fn since(self, earlier: Self) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }
}

/// Source of time and the only way to sleep.
///
/// Everything in the workspace that waits asks a clock. The default is [`RealClock`]; `backend-sim`
/// can inject a virtual one.
pub trait Clock: Send + Sync + fmt::Debug {
    /// The current time. Monotonic.
    fn now(&self) -> Time;
    /// Blocks the calling thread for `d`.
    fn sleep(&self, d: Duration);
    /// Blocks until [`unpark`](Clock::unpark) is called on `parker`, or `until` is reached. A token
    /// stored by an earlier unpark makes it return at once. Spurious returns are allowed.
    fn park(&self, parker: &Parker, until: Option<Time>);
    /// Wakes the thread parked on `parker`, or stores a token for its next park.
    fn unpark(&self, parker: &Parker);

    /// Called by whoever looks whether something has happened, finds that it has not, and may look again at once. No lock
    /// is held. Real time goes on by itself; a simulator lets the others run.
    fn relax(&self) {}

    /// Starts a thread that waits through this clock. Nobody joins it.
    ///
    /// # Errors
    ///
    /// When the system has no thread left.
    fn spawn(&self, name: &str, body: Box<dyn FnOnce() + Send>) -> std::io::Result<()> {
        std::thread::Builder::new().name(name.to_owned()).spawn(body).map(drop)
    }
}

/// A place where one thread can be parked; holds at most one wake-up token.
#[derive(Default)]
pub struct Parker {
    token: AtomicBool,
    lock: Mutex<()>,
    cond: Condvar,
}

impl Parker {
    /// A parker without a token.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Takes the token if there is one. For implementers of [`Clock`].
    pub fn take_token(&self) -> bool {
        self.token.swap(false, Ordering::AcqRel)
    }
}

impl fmt::Debug for Parker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Parker").field("token", &self.token.load(Ordering::Relaxed)).finish()
    }
}

/// The operating system's monotonic clock.
#[derive(Clone, Copy, Debug, Default)]
pub struct RealClock;

fn origin() -> Instant {
    static ORIGIN: OnceLock<Instant> = OnceLock::new();
    *ORIGIN.get_or_init(Instant::now)
}

impl Clock for RealClock {
    fn now(&self) -> Time {
        Time(u64::try_from(origin().elapsed().as_nanos()).unwrap_or(u64::MAX))
    }

    fn sleep(&self, d: Duration) {
        std::thread::sleep(d);
    }

    fn park(&self, parker: &Parker, until: Option<Time>) {
        if parker.take_token() {
            return;
        }
        let mut guard = parker.lock.lock();
        while !parker.take_token() {
            match until {
                None => parker.cond.wait(&mut guard),
                Some(t) => {
                    let left = t.since(self.now());
                    if left.is_zero() || parker.cond.wait_for(&mut guard, left).timed_out() {
                        parker.take_token();
                        return;
                    }
                }
            }
        }
    }

    fn unpark(&self, parker: &Parker) {
        parker.token.store(true, Ordering::Release);
        // Taking the lock orders this wake-up after a parker that has checked the token but not yet slept.
        drop(parker.lock.lock());
        parker.cond.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    #[test]
    fn a_token_set_before_park_is_not_lost() {
        let p = Parker::new();
        RealClock.unpark(&p);
        RealClock.park(&p, None);
        let t = RealClock.now();
        RealClock.park(&p, Some(t.after(Duration::from_millis(5))));
        assert!(RealClock.now() >= t.after(Duration::from_millis(5)));
    }

    #[test]
    fn unpark_wakes_another_thread() {
        let p = Arc::new(Parker::new());
        let q = Arc::clone(&p);
        let h = std::thread::spawn(move || RealClock.park(&q, None));
        std::thread::sleep(Duration::from_millis(10));
        RealClock.unpark(&p);
        h.join().unwrap();
    }
}
