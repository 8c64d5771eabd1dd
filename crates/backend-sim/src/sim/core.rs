//! The scheduler: which of the simulation's threads and engines goes on, and what the time is.
//!
//! One thread of the simulation runs at a time; the others wait for their turn at a [`Seat`]. Whoever stops running
//! (because it waits, or has ended) makes the next decisions itself, with no lock of an endpoint held: it lets frames
//! arrive, gives engines their turns on its own stack, and at last lets a thread go on, which may be itself.
//!
//! The state's lock comes after every lock of an endpoint: nothing calls an endpoint with it held. What has to be done
//! to endpoints is put into `todo` and done by the scheduler between two steps.

use std::cell::{Cell, RefCell};
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use comm_core::Time;
use comm_transport::{Turned, Ward};
use parking_lot::{Condvar, Mutex, MutexGuard};

use super::Settings;
use super::outcome::Trouble;
use super::state::{Due, Run, State, Step, Thread, Todo, Unit, stopped};
use crate::regroup::Town;

/// Where a thread of the simulation waits for its turn.
#[derive(Default)]
pub(crate) struct Seat {
    go: Mutex<bool>,
    news: Condvar,
}

impl Seat {
    fn open(&self) {
        *self.go.lock() = true;
        self.news.notify_one();
    }

    fn wait(&self) {
        let mut go = self.go.lock();
        while !*go {
            self.news.wait(&mut go);
        }
        *go = false;
    }
}

/// A simulation.
pub(crate) struct Core {
    state: Mutex<State>,
    now: AtomicU64,
    ended: Condvar,
    /// The simulation is over or was given up: time is real, and threads that are left run as they like.
    free: AtomicBool,
    free_since: OnceLock<(Instant, u64)>,
    /// Where its communicators are known to each other.
    pub(crate) town: Arc<Town>,
}

impl fmt::Debug for Core {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Simulation").field("now", &self.now()).finish_non_exhaustive()
    }
}

/// The calling thread's place in a simulation.
#[derive(Clone)]
pub(crate) struct Here {
    pub(crate) core: Arc<Core>,
    thread: usize,
    pub(crate) rank: usize,
}

thread_local! {
    static HERE: RefCell<Option<Here>> = const { RefCell::new(None) };
    /// The rank whose engine, or other work, the thread does in between: it must not wait there.
    static IN_TURN: Cell<bool> = const { Cell::new(false) };
}

/// The calling thread's place, if it belongs to a simulation.
pub(crate) fn here() -> Option<Here> {
    HERE.with(|h| h.borrow().clone())
}

impl Core {
    pub(crate) fn new(settings: Settings) -> Arc<Self> {
        let state = State::new(settings);
        let core = Self {
            state: Mutex::new(state),
            now: AtomicU64::new(0),
            ended: Condvar::new(),
            free: AtomicBool::new(false),
            free_since: OnceLock::new(),
            town: Arc::default(),
        };
        Arc::new(core)
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    pub(crate) fn now(&self) -> Time {
        match self.free_since.get() {
            Some((since, base)) => Time(*base).after(since.elapsed()),
            None => Time(self.now.load(Ordering::Acquire)),
        }
    }

    pub(crate) fn is_free(&self) -> bool {
        self.free.load(Ordering::Acquire)
    }

    /// The calling thread's number, if it belongs to this simulation and may wait.
    fn me(self: &Arc<Self>) -> Option<usize> {
        let here = HERE.with(|h| h.borrow().as_ref().map(|h| (Arc::ptr_eq(&h.core, self), h.thread)));
        here.filter(|(same, _)| *same && !self.is_free()).map(|(_, thread)| thread)
    }

    pub(crate) fn is_in_turn() -> bool {
        IN_TURN.get()
    }

    /// Puts the calling thread to sleep until it is woken or until a time. `ready` is asked under the lock whether there is
    /// still a reason to. False when the thread is none of the simulation's.
    pub(crate) fn park(self: &Arc<Self>, parker: usize, until: Option<Time>, ready: impl Fn() -> bool) -> bool {
        let Some(me) = self.me() else { return false };
        if Self::is_in_turn() {
            // An engine never waits: that would stop all ranks.
            return true;
        }
        let mut st = self.lock();
        if ready() {
            return true;
        }
        let t = &mut st.threads[me];
        t.run = Run::Parked;
        t.relaxed = 0;
        t.parker = Some(parker);
        let epoch = t.epoch;
        st.parked.insert(parker, me);
        if let Some(t) = until {
            st.at(t.0, Due::Timer { thread: me, epoch });
        }
        self.schedule(st, Some(me));
        true
    }

    /// Lets the others go on. Takes a little virtual time, or two that look again and again would wait for each other in
    /// a moment that does not end; the longer it goes on, the more.
    pub(crate) fn relax(self: &Arc<Self>) {
        if Self::is_in_turn() {
            return;
        }
        let Some(me) = self.me() else { return };
        let mut st = self.lock();
        let times = st.threads[me].relaxed;
        let until = Time(st.now + (1000 << (times / 16).min(10)));
        drop(st);
        let own = 0u8;
        self.park(std::ptr::from_ref(&own).addr(), Some(until), || false);
        st = self.lock();
        st.threads[me].relaxed = times.saturating_add(1);
    }

    /// The thread that is parked there, if any, can go on.
    pub(crate) fn unpark(&self, parker: usize) {
        let mut st = self.lock();
        if let Some(thread) = st.parked.get(&parker).copied() {
            st.wake(thread);
        }
    }

    /// Makes a thread of the simulation; it is up to the caller to start it with [`enter`](Self::enter).
    pub(crate) fn add_thread(&self, rank: usize, name: &str) -> usize {
        let mut st = self.lock();
        let thread = st.threads.len();
        let seat = Arc::new(Seat::default());
        st.threads.push(Thread {
            seat,
            rank,
            name: name.to_owned(),
            run: Run::Ready,
            epoch: 0,
            parker: None,
            relaxed: 0,
        });
        st.live += 1;
        st.ready.push(Unit::Thread(thread));
        thread
    }

    /// The thread could not be started after all.
    pub(crate) fn drop_thread(&self, thread: usize) {
        let mut st = self.lock();
        st.ready.retain(|u| *u != Unit::Thread(thread));
        st.threads[thread].run = Run::Ended;
        st.live -= 1;
    }

    /// Runs `body` as a thread of the simulation, from its first turn to its end.
    pub(crate) fn enter(self: &Arc<Self>, thread: usize, body: impl FnOnce()) {
        let (seat, rank) = {
            let st = self.lock();
            (Arc::clone(&st.threads[thread].seat), st.threads[thread].rank)
        };
        seat.wait();
        HERE.with(|h| *h.borrow_mut() = Some(Here { core: Arc::clone(self), thread, rank }));
        // A helper's panic, which the hook has reported, ends that helper and not the simulation.
        let _ = catch_unwind(AssertUnwindSafe(body));
        HERE.with(|h| *h.borrow_mut() = None);
        let mut st = self.lock();
        st.threads[thread].run = Run::Ended;
        st.live -= 1;
        st.running = None;
        if !self.is_free() {
            self.schedule(st, None);
        } else {
            self.ended.notify_all();
        }
    }

    /// Starts the simulation from outside and waits for its end. False when threads are left.
    pub(crate) fn conduct(self: &Arc<Self>) -> bool {
        self.schedule(self.lock(), None);
        let mut st = self.lock();
        let limit = st.settings.real_limit;
        let (mut steps, mut since) = (st.steps, Instant::now());
        while st.live > 0 && !self.is_free() {
            self.ended.wait_for(&mut st, Duration::from_millis(100));
            if st.steps != steps {
                (steps, since) = (st.steps, Instant::now());
            } else if since.elapsed() > limit && st.live > 0 && !self.is_free() {
                st.stop(Trouble::Real(limit));
                self.set_free(&mut st);
            }
        }
        self.set_free(&mut st);
        let endpoints = st.all_endpoints();
        let text = match &st.trouble {
            Some((trouble, _)) => stopped(trouble),
            None => "the simulation is over".to_owned(),
        };
        // What is in them may end links, which takes the lock.
        let rest = (std::mem::take(&mut st.todo), std::mem::take(&mut st.events));
        drop(st);
        drop(rest);
        let kill = move || endpoints.iter().filter_map(Weak::upgrade).for_each(|e| e.kill(&text));
        if self.lock().live == 0 {
            kill();
            return true;
        }
        // By a thread of its own: one that computes without end may hold an endpoint's lock.
        let killer = std::thread::Builder::new().name("sim-end".into()).spawn(kill);
        let until = Instant::now() + Duration::from_secs(2);
        let mut st = self.lock();
        while st.live > 0 && !self.ended.wait_until(&mut st, until).timed_out() {}
        let left = st.live > 0;
        drop(st);
        if let (Ok(killer), false) = (killer, left) {
            // A panic in it would be one in an endpoint, which the ranks have met too.
            let _ = killer.join();
        }
        !left
    }

    /// Gives the simulation up before it has begun.
    pub(crate) fn abandon(&self) {
        let mut st = self.lock();
        self.set_free(&mut st);
        let endpoints = st.all_endpoints();
        drop(st);
        endpoints.iter().filter_map(Weak::upgrade).for_each(|e| e.kill("the simulation could not be started"));
    }

    fn set_free(&self, st: &mut State) {
        if !self.free.swap(true, Ordering::AcqRel) {
            let _ = self.free_since.set((Instant::now(), st.now));
            st.threads.iter().filter(|t| t.run != Run::Ended).for_each(|t| t.seat.open());
            self.ended.notify_all();
        }
    }

    /// Makes decisions until thread `me` is to go on, or, without one, until another is or all have ended.
    fn schedule<'a>(&'a self, mut st: MutexGuard<'a, State>, me: Option<usize>) {
        st.running = None;
        loop {
            if self.is_free() {
                self.ended.notify_all();
                return;
            }
            if st.live == 0 {
                self.ended.notify_all();
                return;
            }
            if st.trouble.is_some() && (st.steps >= st.grace.0 || st.now >= st.grace.1) {
                // The threads do not end: from here on by themselves.
                return self.set_free(&mut st);
            }
            match st.step() {
                Step::Thread(t) => {
                    st.running = Some(t);
                    if me == Some(t) {
                        return;
                    }
                    let seat = Arc::clone(&st.threads[t].seat);
                    let own = me.map(|me| Arc::clone(&st.threads[me].seat));
                    drop(st);
                    seat.open();
                    if let Some(own) = own {
                        own.wait();
                    }
                    return;
                }
                Step::Engine(rank, wards) => {
                    drop(st);
                    let turns: Vec<Turned> = in_turn(|| wards.iter().map(Ward::turn).collect());
                    st = self.lock();
                    st.after_turn(rank, &turns);
                }
                Step::Todo(todo) => {
                    drop(st);
                    in_turn(|| match todo {
                        Todo::Notify(n) => n.notify(),
                        Todo::Kill(endpoints, why) => {
                            endpoints.iter().filter_map(Weak::upgrade).for_each(|e| e.kill(&why));
                        }
                        Todo::Job(job) => job(),
                    });
                    st = self.lock();
                }
                Step::Done => self.now.store(st.now, Ordering::Release),
                Step::Nothing if st.trouble.is_some() => return self.set_free(&mut st),
                Step::Nothing => st.stop(Trouble::Hang),
            }
        }
    }
}

fn in_turn<R>(f: impl FnOnce() -> R) -> R {
    let before = IN_TURN.replace(true);
    let r = f();
    IN_TURN.set(before);
    r
}
