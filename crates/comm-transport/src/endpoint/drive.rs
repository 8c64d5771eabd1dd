//! Driving an endpoint: whoever waits makes progress, spins, yields, and then sleeps in the links.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use comm_core::{Parker, Time};
use parking_lot::MutexGuard;

use super::state::State;
use super::{Endpoint, FLUSH, NAP};

/// Passes over the links before a call says that time is up; somebody may send without end.
const LAST_PASSES: usize = 64;

impl Endpoint {
    pub(super) fn with<R>(&self, f: impl FnOnce(&mut State) -> R) -> R {
        let mut st = self.state.lock();
        st.open_mail();
        let r = f(&mut st);
        // Whoever sleeps in the links now must learn that a link is full.
        self.watch_writability(&mut st);
        self.settle(st);
        r
    }

    /// Releases the lock; then wakes those who have news.
    pub(super) fn settle(&self, mut st: MutexGuard<'_, State>) {
        if st.wakes.is_empty() && !st.ended {
            // A thread that spins would otherwise take the lock again before a waiting one wakes up.
            MutexGuard::unlock_fair(st);
            return;
        }
        let wakes = std::mem::take(&mut st.wakes);
        let ended = std::mem::take(&mut st.ended);
        drop(st);
        if ended && self.asleep.load(Ordering::SeqCst) > 0 {
            self.wake_waiters();
        }
        for w in wakes {
            w.wake();
        }
    }

    fn wake_waiters(&self) {
        if self.poller.load(Ordering::SeqCst) {
            self.notify.wake();
        }
        for p in self.sleepers.lock().iter() {
            self.clock().unpark(p);
        }
    }

    /// Drives the endpoint until `look` has what it wants, or until `until`.
    pub(super) fn drive<'a, R>(
        &'a self,
        mut st: MutexGuard<'a, State>,
        until: Option<Time>,
        mut look: impl FnMut(&mut State) -> Option<R>,
    ) -> Option<R> {
        self.notify.drivers.fetch_add(1, Ordering::SeqCst);
        let patience = *self.patience.lock();
        let mut idle = 0u32;
        let mut all = false;
        let mut timed_pass = 0u32;
        let out = loop {
            let mut moved = st.progress(all);
            all = false;
            if let Some(r) = look(&mut st) {
                break Some(r);
            }
            moved |= st.moved;
            // A busy endpoint may never come to rest: look at the clock now and then.
            timed_pass += 1;
            if timed_pass.is_multiple_of(256) {
                let now = st.now();
                st.tick(now);
                if until.is_some_and(|t| t <= now) {
                    break look(&mut st);
                }
            }
            self.settle(st);
            if moved {
                idle = 0;
            } else if idle < patience.spins {
                idle += 1;
                std::hint::spin_loop();
            } else if idle < patience.spins + patience.yields {
                idle += 1;
                rustix::thread::sched_yield();
            } else {
                self.asleep.fetch_add(1, Ordering::SeqCst);
                let (done, guard) = self.sleep(until, &mut look);
                self.asleep.fetch_sub(1, Ordering::SeqCst);
                st = guard;
                if done.is_some() {
                    break done;
                }
                if until.is_some_and(|t| t <= st.now()) {
                    // Who has been stopped itself finds what has come meanwhile, which says more than that time is up:
                    // all of it, as the end of a connection shows only after what was sent before it.
                    let mut passes = 0;
                    while st.progress(true) && passes < LAST_PASSES {
                        passes += 1;
                    }
                    break look(&mut st);
                }
                all = true;
                // After a wake-up there is something to do; if not, sleep again soon.
                idle = patience.spins + patience.yields / 2;
                continue;
            }
            st = self.state.lock();
        };
        let async_ops = st.async_ops;
        // Under the lock: whoever starts an operation after this one's last look finds nobody driving and tells the
        // engine itself.
        let left = self.notify.drivers.fetch_sub(1, Ordering::SeqCst) - 1;
        self.settle(st);
        if left > 0 {
            // Somebody else may be waiting for this thread to look after the links.
            if self.asleep.load(Ordering::SeqCst) > 0 {
                self.wake_waiters();
            }
        } else if async_ops > 0 || (self.parked && self.notify.engine_listens.load(Ordering::SeqCst)) {
            self.notify.engine.kick();
        }
        out
    }

    /// Sleeps once. Returns with the lock held.
    fn sleep<R>(
        &self,
        until: Option<Time>,
        look: &mut impl FnMut(&mut State) -> Option<R>,
    ) -> (Option<R>, MutexGuard<'_, State>) {
        if self.poller.compare_exchange(false, true, Ordering::SeqCst, Ordering::SeqCst).is_err() {
            let parker = Arc::new(Parker::new());
            self.sleepers.lock().push(Arc::clone(&parker));
            let mut st = self.state.lock();
            let now = st.now();
            st.tick(now);
            let done = look(&mut st);
            if done.is_none() {
                self.watch_writability(&mut st);
                self.settle(st);
                let nap = now.after(NAP / 5);
                self.clock().park(&parker, Some(until.map_or(nap, |t| t.min(nap))));
                st = self.state.lock();
            }
            self.sleepers.lock().retain(|p| !Arc::ptr_eq(p, &parker));
            return (done, st);
        }
        self.notify.announce_sleep();
        let mut st = self.state.lock();
        let moved = st.progress(true);
        let now = st.now();
        st.tick(now);
        let done = look(&mut st);
        if done.is_some() || moved || st.moved || !st.runnable.is_empty() {
            self.notify.cancel_sleep();
            self.poller.store(false, Ordering::SeqCst);
            return (done, st);
        }
        self.watch_writability(&mut st);
        let nap = st.next_timer(now).map_or(NAP, |d| d.min(NAP)).max(Duration::from_micros(50));
        let until = until.map_or(now.after(nap), |t| t.min(now.after(nap)));
        self.settle(st);
        let mut ready = Vec::new();
        self.notify.sleep(until, &mut ready);
        self.poller.store(false, Ordering::SeqCst);
        (None, self.state.lock())
    }

    /// Links that are full wake the sleeper when they can be written to, others do not.
    pub(super) fn watch_writability(&self, st: &mut State) {
        for (p, peer) in st.peers.iter_mut().enumerate() {
            if peer.tx.blocked != peer.tx.watched
                && let Some(fd) = peer.link.as_ref().and_then(|l| l.fd())
                && self.notify.rewatch(fd, p, peer.tx.blocked).is_ok()
            {
                peer.tx.watched = peer.tx.blocked;
            }
        }
    }

    /// Waits a moment for our own small frames (aborts, goodbyes) to be written.
    pub(super) fn flush(&self) {
        let until = self.clock().now().after(FLUSH);
        let st = self.state.lock();
        let flushed = |st: &mut State| {
            let idle = st.peers.iter().all(|p| p.link.is_none() || p.down.is_some() || p.tx.control_flushed());
            idle.then_some(())
        };
        let _ = self.drive(st, Some(until), flushed);
    }
}
