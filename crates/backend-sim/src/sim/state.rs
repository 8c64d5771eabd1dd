//! What the scheduler's lock protects, and the next thing that happens.

use std::cmp::Ordering as Order;
use std::collections::{BinaryHeap, HashMap, HashSet, VecDeque};
use std::fmt;
use std::sync::{Arc, Weak};
use std::time::Duration;

use comm_core::Time;
use comm_transport::{Endpoint, Notify, Turned, Ward};

use super::Settings;
use super::core::Seat;
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

/// Something that can go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unit {
    Thread(usize),
    Engine(usize),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Run {
    Ready,
    Running,
    Parked,
    Ended,
}

pub(super) struct Thread {
    pub(super) seat: Arc<Seat>,
    pub(super) rank: usize,
    pub(super) name: String,
    pub(super) run: Run,
    /// Counts parkings, so that a timer of an earlier one is known.
    pub(super) epoch: u64,
    pub(super) parker: Option<usize>,
    /// How often in a row it has looked again.
    pub(super) relaxed: u32,
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

pub(super) struct Event {
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
    pub(super) threads: Vec<Thread>,
    pub(super) live: usize,
    pub(super) running: Option<usize>,
    pub(super) ready: Vec<Unit>,
    pub(super) events: BinaryHeap<Event>,
    number: u64,
    pub(crate) ranks: Vec<Rank>,
    pub(crate) pipes: Vec<Pipe>,
    /// Ways on which everything is lost.
    pub(crate) cuts: HashSet<(usize, usize)>,
    /// Frames by sender and receiver.
    pub(crate) counts: HashMap<(usize, usize), u64>,
    /// Address of a parker, and the thread that is parked on it.
    pub(super) parked: HashMap<usize, usize>,
    pub(crate) todo: VecDeque<Todo>,
    pub(crate) steps: u64,
    pub(crate) happened: Vec<Happened>,
    pub(crate) random_faults: u64,
    /// Faults that wait for an event of their rank.
    placed: Vec<(usize, u64, RankFault)>,
    pub(crate) trouble: Option<(Trouble, Vec<String>)>,
    pub(super) grace: (u64, u64),
    trace: VecDeque<String>,
    pub(crate) elapsed: u64,
}
/// The next thing that the scheduler does.
pub(super) enum Step {
    Thread(usize),
    Engine(usize, Vec<Ward>),
    Todo(Todo),
    Done,
    Nothing,
}

/// What calls end with that are open when a simulation is stopped.
pub(super) fn stopped(trouble: &Trouble) -> String {
    format!("the simulation was stopped: {trouble}")
}

impl State {
    pub(super) fn new(settings: Settings) -> Self {
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
        let mut state = Self {
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
        for (at, rank, fault) in timed {
            state.at(at, Due::Fault(rank, fault));
        }
        state
    }

    /// Does something at a time. The last one there is means never: what waits for ever hangs, and time does not pass by it.
    pub(crate) fn at(&mut self, at: u64, due: Due) {
        if at == u64::MAX {
            return;
        }
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

    pub(super) fn wake(&mut self, thread: usize) {
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
    pub(super) fn step(&mut self) -> Step {
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

    pub(super) fn after_turn(&mut self, rank: usize, turns: &[Turned]) {
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

    pub(super) fn all_endpoints(&self) -> Vec<Weak<Endpoint>> {
        self.ranks.iter().flat_map(|r| r.endpoints.iter().cloned()).collect()
    }

    /// Ends the simulation before its time: all calls fail.
    pub(super) fn stop(&mut self, trouble: Trouble) {
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
