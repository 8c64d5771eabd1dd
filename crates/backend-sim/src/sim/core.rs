//! The scheduler: which of the simulation's threads and engines goes on, and what the time is.
//!
//! One thread of the simulation runs at a time; the others wait for their turn at a [`Seat`]. Whoever stops running
//! (because it waits, or has ended) makes the next decisions itself, with no lock of an endpoint held: it lets frames
//! arrive, gives engines their turns on its own stack, and at last lets a thread go on, which may be itself.
//!
//! The state's lock comes after every lock of an endpoint: nothing calls an endpoint with it held. What has to be done
//! to endpoints is put into `todo` and done by the scheduler between two steps.

use std::cell::{Cell, RefCell};
use std::cmp::Ordering as Order;
use std::collections::{BinaryHeap, HashMap, HashSet, VecDeque};
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use comm_core::Time;
use comm_transport::{Endpoint, Notify, Turned, Ward};
use parking_lot::{Condvar, Mutex, MutexGuard};

use super::Settings;
use super::faults::{Happened, RankFault, When};
use super::net::Pipe;
use super::outcome::{RankStats, Trouble};
use super::random::{Digest, Random};
use crate::ground::Job;

/// Steps and virtual time that the ranks of a stopped simulation have to end with errors.
const GRACE_STEPS: u64 = 200_000;
const GRACE_TIME: Duration = Duration::from_secs(3600);
/// Least time between two turns of an engine that asks for them.
const LEAST: Duration = Duration::from_micros(1);

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

/// Something that can go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unit {
    Thread(usize),
    Engine(usize),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Run {
    Ready,
    Running,
    Parked,
    Ended,
}

struct Thread {
    seat: Arc<Seat>,
    rank: usize,
    name: String,
    run: Run,
    /// Counts parkings, so that a timer of an earlier one is known.
    epoch: u64,
    parker: Option<usize>,
}

/// Something that is due at a time.
pub(crate) enum Due {
    Timer { thread: usize, epoch: u64 },
    Arrival { pipe: usize },
    Engine { rank: usize, epoch: u64 },
    Resume { rank: usize },
    Fault(usize, RankFault),
    Job(Job),
}

struct Event {
    at: u64,
    /// Events of one time come in random order.
    tie: u64,
    number: u64,
    due: Due,
}

impl PartialEq for Event {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Order::Equal
    }
}

impl Eq for Event {}

impl PartialOrd for Event {
    fn partial_cmp(&self, other: &Self) -> Option<Order> {
        Some(self.cmp(other))
    }
}

impl Ord for Event {
    /// The earliest is the greatest: it lies on top of the heap.
    fn cmp(&self, other: &Self) -> Order {
        (other.at, other.tie, other.number).cmp(&(self.at, self.tie, self.number))
    }
}

/// A rank of the simulation.
#[derive(Default)]
pub(crate) struct Rank {
    pub(crate) killed: bool,
    pub(crate) paused_until: u64,
    frozen: Vec<Unit>,
    wards: Vec<Ward>,
    engine_ready: bool,
    engine_epoch: u64,
    pub(crate) endpoints: Vec<Weak<Endpoint>>,
    /// Longest chain of messages that has reached it.
    pub(crate) depth: u64,
    pub(crate) stats: RankStats,
    /// Its closure has returned.
    pub(crate) over: bool,
    /// Where its calls are listed, for reports.
    pub(crate) calls: Option<Arc<dyn fmt::Display + Send + Sync>>,
}

/// What the scheduler does between two steps, without its lock.
pub(crate) enum Todo {
    Notify(Arc<Notify>),
    Kill(Vec<Weak<Endpoint>>, String),
    Job(Job),
}

pub(crate) struct State {
    pub(crate) settings: Settings,
    pub(crate) random: Random,
    pub(crate) digest: Digest,
    pub(crate) now: u64,
    threads: Vec<Thread>,
    live: usize,
    running: Option<usize>,
    ready: Vec<Unit>,
    events: BinaryHeap<Event>,
    number: u64,
    pub(crate) ranks: Vec<Rank>,
    pub(crate) pipes: Vec<Pipe>,
    /// Ways on which everything is lost.
    pub(crate) cuts: HashSet<(usize, usize)>,
    /// Frames by sender and receiver.
    pub(crate) counts: HashMap<(usize, usize), u64>,
    /// Address of a parker, and the thread that is parked on it.
    parked: HashMap<usize, usize>,
    pub(crate) todo: VecDeque<Todo>,
    pub(crate) steps: u64,
    pub(crate) happened: Vec<Happened>,
    pub(crate) random_faults: u64,
    /// Faults that wait for an event of their rank.
    placed: Vec<(usize, u64, RankFault)>,
    pub(crate) trouble: Option<(Trouble, Vec<String>)>,
    grace: (u64, u64),
    trace: VecDeque<String>,
    pub(crate) elapsed: u64,
}

/// A simulation.
pub(crate) struct Core {
    state: Mutex<State>,
    now: AtomicU64,
    ended: Condvar,
    /// The simulation is over or was given up: time is real, and threads that are left run as they like.
    free: AtomicBool,
    free_since: OnceLock<(Instant, u64)>,
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

enum Step {
    Thread(usize),
    Engine(usize, Vec<Ward>),
    Todo(Todo),
    Done,
    Nothing,
}

impl Core {
    pub(crate) fn new(settings: Settings) -> Arc<Self> {
        let mut random = Random::new(settings.seed);
        let mut placed = Vec::new();
        let mut timed = Vec::new();
        for (rank, when, fault) in &settings.faults.ranks {
            match *when {
                When::At(t) => timed.push((Time(0).after(t).0, *rank, *fault)),
                When::Event(k) => placed.push((*rank, k.max(1), *fault)),
                When::Within(k) => placed.push((*rank, 1 + random.below(k.max(1)), *fault)),
            }
        }
        let n = settings.size;
        let mut digest = Digest::new();
        digest.add([settings.seed, n as u64, 0, 0]);
        let state = State {
            random,
            digest,
            now: 0,
            threads: Vec::new(),
            live: 0,
            running: None,
            ready: Vec::new(),
            events: BinaryHeap::new(),
            number: 0,
            ranks: (0..n).map(|_| Rank::default()).collect(),
            pipes: Vec::new(),
            cuts: HashSet::new(),
            counts: HashMap::new(),
            parked: HashMap::new(),
            todo: VecDeque::new(),
            steps: 0,
            happened: Vec::new(),
            random_faults: 0,
            placed,
            trouble: None,
            grace: (u64::MAX, u64::MAX),
            trace: VecDeque::new(),
            elapsed: 0,
            settings,
        };
        let core = Self {
            state: Mutex::new(state),
            now: AtomicU64::new(0),
            ended: Condvar::new(),
            free: AtomicBool::new(false),
            free_since: OnceLock::new(),
        };
        let mut st = core.state.lock();
        for (at, rank, fault) in timed {
            st.at(at, Due::Fault(rank, fault));
        }
        drop(st);
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
        t.parker = Some(parker);
        let epoch = t.epoch;
        st.parked.insert(parker, me);
        if let Some(t) = until {
            st.at(t.0, Due::Timer { thread: me, epoch });
        }
        self.schedule(st, Some(me));
        true
    }

    /// Lets the others go on; some virtual time passes if there are none.
    pub(crate) fn relax(self: &Arc<Self>) {
        if Self::is_in_turn() || self.me().is_none() {
            return;
        }
        let st = self.lock();
        let next = match st.events.peek() {
            _ if !st.ready.is_empty() => st.now,
            Some(e) => e.at.max(st.now),
            None => st.now + 1000,
        };
        drop(st);
        let own = 0u8;
        self.park(std::ptr::from_ref(&own).addr(), Some(Time(next)), || false);
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
        st.threads.push(Thread { seat, rank, name: name.to_owned(), run: Run::Ready, epoch: 0, parker: None });
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
        body();
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
        st.todo.clear();
        st.events.clear();
        drop(st);
        // By a thread of its own: one that computes without end may hold an endpoint's lock.
        let kill = move || endpoints.iter().filter_map(Weak::upgrade).for_each(|e| e.kill(&text));
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
                return;
            }
            if st.live == 0 {
                self.ended.notify_all();
                return;
            }
            if st.steps >= st.grace.0 || st.now >= st.grace.1 {
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

fn stopped(trouble: &Trouble) -> String {
    format!("the simulation was stopped: {trouble}")
}

impl State {
    /// Does something at a time.
    pub(crate) fn at(&mut self, at: u64, due: Due) {
        let tie = self.random.next();
        self.number += 1;
        self.events.push(Event { at: at.max(self.now), tie, number: self.number, due });
    }

    /// Notes something in the digest and, if wanted, the trace.
    pub(crate) fn note(&mut self, words: [u64; 3], text: impl FnOnce() -> String) {
        self.digest.add([words[0], words[1], words[2], self.now]);
        if self.settings.trace > 0 {
            if self.trace.len() == self.settings.trace {
                self.trace.pop_front();
            }
            self.trace.push_back(format!("{:?}: {}", Duration::from_nanos(self.now), text()));
        }
    }

    pub(crate) fn take_trace(&mut self) -> Vec<String> {
        std::mem::take(&mut self.trace).into()
    }

    fn wake(&mut self, thread: usize) {
        let t = &mut self.threads[thread];
        if t.run != Run::Parked {
            return;
        }
        t.run = Run::Ready;
        t.epoch += 1;
        if let Some(p) = t.parker.take() {
            self.parked.remove(&p);
        }
        self.ready.push(Unit::Thread(thread));
    }

    /// The engine of a rank is to look at its endpoints.
    pub(crate) fn kick(&mut self, rank: usize) {
        if !self.ranks[rank].engine_ready {
            self.ranks[rank].engine_ready = true;
            self.ready.push(Unit::Engine(rank));
        }
    }

    pub(crate) fn adopt(&mut self, rank: usize, ward: Ward) {
        self.ranks[rank].wards.push(ward);
    }

    /// An event of a rank; faults that were placed there happen.
    pub(crate) fn event_of(&mut self, rank: usize) {
        let r = &mut self.ranks[rank];
        r.stats.events += 1;
        let number = r.stats.events;
        while let Some(i) = self.placed.iter().position(|(r, k, _)| *r == rank && *k <= number) {
            let (_, _, fault) = self.placed.swap_remove(i);
            self.strike(rank, fault);
        }
        self.random_faults_of(rank);
    }

    fn is_frozen(&self, rank: usize) -> bool {
        self.ranks[rank].paused_until > self.now
    }

    /// The next thing that happens.
    fn step(&mut self) -> Step {
        if let Some(todo) = self.todo.pop_front() {
            return Step::Todo(todo);
        }
        self.steps += 1;
        if self.trouble.is_none() {
            if self.steps > self.settings.step_limit {
                self.stop(Trouble::Steps(self.settings.step_limit));
                return Step::Done;
            }
            let limit = self.settings.time_limit;
            if self.now > Time(0).after(limit).0 {
                self.stop(Trouble::Time(limit));
                return Step::Done;
            }
        }
        self.drop_stale();
        let due = self.events.peek().is_some_and(|e| e.at <= self.now);
        let n = self.ready.len() + usize::from(due);
        let i = if n > 1 { self.random.below(n as u64) as usize } else { 0 };
        if i < self.ready.len() {
            let unit = self.ready.swap_remove(i);
            return self.go_on(unit);
        }
        let Some(event) = self.events.pop() else { return Step::Nothing };
        self.now = event.at;
        self.happen(event.due);
        Step::Done
    }

    /// Timers that are not needed any more must not make time pass.
    fn drop_stale(&mut self) {
        while let Some(e) = self.events.peek() {
            let stale = match &e.due {
                Due::Timer { thread, epoch } => self.threads[*thread].epoch != *epoch,
                Due::Engine { rank, epoch } => self.ranks[*rank].engine_epoch != *epoch,
                _ => false,
            };
            if !stale {
                return;
            }
            self.events.pop();
        }
    }

    fn go_on(&mut self, unit: Unit) -> Step {
        let rank = match unit {
            Unit::Thread(t) => self.threads[t].rank,
            Unit::Engine(r) => r,
        };
        if self.is_frozen(rank) {
            self.ranks[rank].frozen.push(unit);
            return Step::Done;
        }
        self.event_of(rank);
        if !self.todo.is_empty() || self.is_frozen(rank) {
            // Something has just happened to it: that comes first.
            self.ready.push(unit);
            return Step::Done;
        }
        match unit {
            Unit::Thread(t) => {
                self.note([1, t as u64, 0], || format!("rank {rank} goes on"));
                self.threads[t].run = Run::Running;
                Step::Thread(t)
            }
            Unit::Engine(r) => {
                self.note([2, r as u64, 0], || format!("rank {r}'s engine has its turn"));
                self.ranks[r].engine_ready = false;
                Step::Engine(r, self.ranks[r].wards.clone())
            }
        }
    }

    fn after_turn(&mut self, rank: usize, turns: &[Turned]) {
        // Endpoints that were adopted meanwhile lie behind those that had their turn.
        let mut gone = turns.iter().map(|t| *t == Turned::Gone);
        self.ranks[rank].wards.retain(|_| gone.next() != Some(true));
        self.ranks[rank].engine_epoch += 1;
        let next = turns.iter().filter_map(|t| if let Turned::Idle(d) = t { *d } else { None }).min();
        if let Some(d) = next {
            let epoch = self.ranks[rank].engine_epoch;
            let at = Time(self.now).after(d.max(LEAST)).0;
            self.at(at, Due::Engine { rank, epoch });
        }
    }

    fn happen(&mut self, due: Due) {
        match due {
            Due::Timer { thread, .. } => {
                self.note([3, thread as u64, 0], || format!("thread {thread} has waited long enough"));
                self.wake(thread);
            }
            Due::Arrival { pipe } => self.arrive(pipe),
            Due::Engine { rank, .. } => self.kick(rank),
            Due::Resume { rank } => {
                if !self.is_frozen(rank) {
                    self.note([4, rank as u64, 0], || format!("rank {rank} is no longer stopped"));
                    let frozen = std::mem::take(&mut self.ranks[rank].frozen);
                    self.ready.extend(frozen);
                }
            }
            Due::Fault(rank, fault) => self.strike(rank, fault),
            Due::Job(job) => self.todo.push_back(Todo::Job(job)),
        }
    }

    fn all_endpoints(&self) -> Vec<Weak<Endpoint>> {
        self.ranks.iter().flat_map(|r| r.endpoints.iter().cloned()).collect()
    }

    /// Ends the simulation before its time: all calls fail.
    fn stop(&mut self, trouble: Trouble) {
        if self.trouble.is_some() {
            return;
        }
        self.grace = (self.steps + GRACE_STEPS, Time(self.now).after(GRACE_TIME).0);
        self.todo.push_back(Todo::Kill(self.all_endpoints(), stopped(&trouble)));
        // A stopped rank must hear of it.
        for r in 0..self.ranks.len() {
            self.ranks[r].paused_until = 0;
            let frozen = std::mem::take(&mut self.ranks[r].frozen);
            self.ready.extend(frozen);
        }
        let waits = self.waits();
        self.trouble = Some((trouble, waits));
    }

    /// Where the threads that have not ended are.
    pub(crate) fn waits(&self) -> Vec<String> {
        let mut list = Vec::new();
        for (i, t) in self.threads.iter().enumerate().filter(|(_, t)| t.run != Run::Ended) {
            let how = match t.run {
                Run::Parked => "waits",
                Run::Running if self.running == Some(i) => "runs",
                _ => "could go on",
            };
            let paused = if self.is_frozen(t.rank) { ", stopped" } else { "" };
            list.push(match self.ranks[t.rank].calls.as_ref().filter(|_| i < self.ranks.len()) {
                Some(calls) => format!("rank {} {how}{paused} in {calls}", t.rank),
                None => format!("rank {}'s thread '{}' {how}{paused}", t.rank, t.name),
            });
        }
        list
    }
}
