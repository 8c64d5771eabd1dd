//! The simulation: N ranks in virtual time, one at a time, in an order that a seed decides.

mod clock;
mod core;
mod faults;
mod net;
mod outcome;
mod random;
mod state;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Weak};
use std::time::Duration;

use comm_core::{Backend, Clock, CommOptions, Communicator, Error, ErrorKind, Observer, Result};
use parking_lot::Mutex;

use self::clock::{SimClock, SimGround};
use self::core::Core;
use crate::ground::{Ground, Identity};
use crate::ranks::Calls;

pub use self::faults::{Fault, Faults, Happened, When};
pub use self::net::Network;
pub use self::outcome::{Ended, Outcome, RankStats, SimFailure, Stats, Trouble};

/// Overrides the seed of every simulation.
pub const SEED_VARIABLE: &str = "RUSTCOMMS_SIM_SEED";

/// Longest virtual time, most steps, and longest real time without a step, unless the simulation says otherwise.
const TIME_LIMIT: Duration = Duration::from_secs(3600);
const STEP_LIMIT: u64 = 50_000_000;
const REAL_LIMIT: Duration = Duration::from_secs(60);

/// What a simulation is run with.
#[derive(Clone, Debug)]
pub(crate) struct Settings {
    pub(crate) size: usize,
    pub(crate) seed: u64,
    pub(crate) network: Network,
    pub(crate) faults: Faults,
    pub(crate) time_limit: Duration,
    pub(crate) step_limit: u64,
    pub(crate) real_limit: Duration,
    /// How many of the last happenings are kept.
    pub(crate) trace: usize,
    pub(crate) newcomers: usize,
}

/// N ranks in one process and in virtual time, whose every step a seed decides.
///
/// Each rank's closure runs on a thread of its own, but only one at a time; whenever it waits, chance decides who goes on,
/// and when nobody can, time jumps to the next moment at which something happens. So a run takes no longer than its
/// computing, timeouts of hours cost nothing, and the same seed gives the same run: the same interleaving, the same
/// errors, the same virtual times.
///
/// ```
/// use backend_sim::{Faults, Simulation, When};
/// use comm_core::{ErrorKind, op};
///
/// let crash = Simulation::new(4).seed(7).faults(Faults::new().kill(2, When::Event(9)));
/// let run = crash.run(|comm| {
///     let mut x = [1.0f32; 1000];
///     (0..100).try_for_each(|_| comm.all_reduce(&mut x, op::Max))
/// }).unwrap();
/// assert!(run.trouble.is_none(), "nobody hangs");
/// let e = run.ranks[0].error().unwrap();
/// assert!(matches!(e.kind(), ErrorKind::PeerFailed { rank: 2, .. }), "{e}");
/// ```
///
/// # What a closure must do
///
/// It waits through its communicator only, or through the clock in the communicator's options: a closure that waits for
/// another rank on a channel or a lock keeps the only thread that may run, which ends the run with [`Trouble::Real`] after
/// a minute. For time it asks `comm.options().clock`, and helper threads it starts with
/// [`Clock::spawn`](comm_core::Clock::spawn). What it does must depend on nothing but its rank and what it receives, or the
/// run cannot be repeated. A rank that is killed cannot be ended from outside: its calls fail until its closure returns.
///
/// Neither NCCL nor MPI has a counterpart.
#[derive(Clone, Debug)]
#[must_use]
pub struct Simulation {
    settings: Settings,
    options: CommOptions,
}

impl Simulation {
    /// `n` ranks, seed 0, no faults.
    pub fn new(n: usize) -> Self {
        let settings = Settings {
            size: n,
            seed: 0,
            network: Network::default(),
            faults: Faults::default(),
            time_limit: TIME_LIMIT,
            step_limit: STEP_LIMIT,
            real_limit: REAL_LIMIT,
            trace: 0,
            newcomers: 0,
        };
        Self { settings, options: CommOptions::new().name("simulation") }
    }

    /// What chance follows from, unless `RUSTCOMMS_SIM_SEED` says otherwise.
    pub const fn seed(mut self, seed: u64) -> Self {
        self.settings.seed = seed;
        self
    }

    /// Options of the communicators; rank, size and clock are the simulation's.
    pub fn options(mut self, options: CommOptions) -> Self {
        self.options = options;
        self
    }

    /// How long frames are under way.
    pub const fn network(mut self, network: Network) -> Self {
        self.settings.network = network;
        self
    }

    /// What goes wrong.
    pub fn faults(mut self, faults: Faults) -> Self {
        self.settings.faults = faults;
        self
    }

    /// Longest virtual time; an hour if not set. When it is over, all calls fail.
    pub const fn limit(mut self, limit: Duration) -> Self {
        self.settings.time_limit = limit;
        self
    }

    /// Most steps of the scheduler; 50 million if not set. When they are used up, all calls fail.
    pub const fn steps(mut self, limit: u64) -> Self {
        self.settings.step_limit = limit;
        self
    }

    /// Longest real time in which a rank computes between two calls; a minute if not set.
    pub const fn real_limit(mut self, limit: Duration) -> Self {
        self.settings.real_limit = limit;
        self
    }

    /// Keeps a readable list of the last so many things that happen; see [`Outcome::trace`].
    pub const fn trace(mut self, last: usize) -> Self {
        self.settings.trace = last;
        self
    }

    /// The last `n` ranks are in no world at first; see [`run_each`](Self::run_each).
    pub const fn newcomers(mut self, n: usize) -> Self {
        self.settings.newcomers = n;
        self
    }

    /// Runs `f` as all ranks of one world.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` when there is nothing to run: no ranks, options that make no sense, faults at ranks that do not
    /// exist, or a seed in the environment that is no number; `Io` when a thread cannot be started. What happens in a run is
    /// in the outcome.
    pub fn run<T, F>(&self, f: F) -> Result<Outcome<T>>
    where
        T: Send + 'static,
        F: Fn(Communicator) -> Result<T> + Send + Sync + 'static,
    {
        self.run_each(move |rank| match rank.world {
            Some(world) => f(world),
            None => Err(Error::invalid("a newcomer has no world: Simulation::run_each")),
        })
    }

    /// Runs `f` as all ranks, of which the [`newcomers`](Self::newcomers) are in no world.
    ///
    /// # Errors
    ///
    /// As [`run`](Self::run).
    pub fn run_each<T, F>(&self, f: F) -> Result<Outcome<T>>
    where
        T: Send + 'static,
        F: Fn(SimRank) -> Result<T> + Send + Sync + 'static,
    {
        let mut settings = self.settings.clone();
        if settings.size == 0 {
            return Err(Error::invalid("a simulation has at least one rank"));
        }
        if let Some(seed) = seed_of_environment()? {
            settings.seed = seed;
        }
        let (n, seed, newcomers) = (settings.size, settings.seed, settings.newcomers);
        settings.faults.check(n)?;
        let core = Core::new(settings);
        let clock: Arc<dyn Clock> = Arc::new(SimClock(Arc::clone(&core)));
        let ground: Arc<dyn Ground> = Arc::new(SimGround::new(Arc::clone(&core)));
        let options = self.options.clone().clock(clock);
        let old = n.saturating_sub(newcomers);
        let comms = if old > 0 { crate::world_on(&ground, old, &options)? } else { Vec::new() };
        let worlds = comms.into_iter().map(Some).chain((old..n).map(|_| None));
        let f = Arc::new(f);
        let ends: Arc<Mutex<Vec<Option<Ended<T>>>>> = Arc::new(Mutex::new((0..n).map(|_| None).collect()));
        let mut threads = Vec::new();
        for (rank, world) in worlds.enumerate() {
            let backend = world.as_ref().map(|w| Arc::downgrade(w.backend()));
            let watch = Arc::new(Watch { calls: Calls::default(), backend });
            if let Some(world) = &world {
                world.observe(Arc::clone(&watch) as Arc<dyn Observer>).detach();
            }
            let sim = SimRank { rank, options: options.clone(), world };
            core.lock().ranks[rank].calls = Some(Arc::clone(&watch) as Arc<_>);
            let thread = core.add_thread(rank, "rank");
            let (f, ends, own) = (Arc::clone(&f), Arc::clone(&ends), Arc::clone(&core));
            let body = move || {
                let end = match catch_unwind(AssertUnwindSafe(|| f(sim))) {
                    Ok(Ok(value)) => Ended::Value(value),
                    Ok(Err(e)) => Ended::Error(e),
                    Err(payload) => Ended::Panic(comm_core::panic_text(payload.as_ref())),
                };
                if let Ended::Panic(text) = &end {
                    watch.abort(rank, text);
                }
                let mut st = own.lock();
                st.ranks[rank].over = true;
                st.elapsed = st.now;
                let end = if st.ranks[rank].killed && !matches!(end, Ended::Panic(_)) { Ended::Killed } else { end };
                drop(st);
                // Nobody asks any more for one that comes when the run has been given up.
                if let Some(place) = ends.lock().get_mut(rank) {
                    *place = Some(end);
                }
            };
            let entry = Arc::clone(&core);
            let builder = std::thread::Builder::new().name(format!("sim-rank-{rank}"));
            match builder.spawn(move || entry.enter(thread, body)) {
                Ok(handle) => threads.push(handle),
                Err(e) => {
                    core.drop_thread(thread);
                    // Nothing of those that have been started has run; their calls fail.
                    core.abandon();
                    return Err(Error::io("starting a rank's thread", &e));
                }
            }
        }
        let waits = if core.conduct() {
            // They have nothing left to do.
            threads.into_iter().for_each(|t| drop(t.join()));
            Vec::new()
        } else {
            core.lock().waits()
        };
        let ranks = std::mem::take(&mut *ends.lock());
        let stuck = |rank: usize| {
            let own = waits.iter().find(|w| w.starts_with(&format!("rank {rank} ")));
            Ended::Stuck(own.cloned().unwrap_or_default())
        };
        let ranks = ranks.into_iter().enumerate().map(|(r, end)| end.unwrap_or_else(|| stuck(r))).collect();
        let mut st = core.lock();
        let outcome = Outcome {
            ranks,
            stats: stats(&st),
            digest: st.digest.0,
            seed,
            faults: st.happened.clone(),
            trouble: st.trouble.clone(),
            trace: st.take_trace(),
        };
        Ok(outcome)
    }
}

fn stats(st: &self::state::State) -> Stats {
    let ranks: Vec<RankStats> = st.ranks.iter().map(|r| r.stats).collect();
    let mut total = RankStats::default();
    for r in &ranks {
        total.messages += r.messages;
        total.bytes += r.bytes;
        total.control += r.control;
        total.control_bytes += r.control_bytes;
        total.rounds = total.rounds.max(r.rounds);
        total.events += r.events;
    }
    Stats { ranks, total, elapsed: Duration::from_nanos(st.elapsed), steps: st.steps }
}

fn seed_of_environment() -> Result<Option<u64>> {
    let Some(text) = std::env::var_os(SEED_VARIABLE).filter(|v| !v.is_empty()) else { return Ok(None) };
    let number = text.to_str().and_then(|t| t.trim().parse().ok());
    number.map(Some).ok_or_else(|| Error::invalid(format!("{SEED_VARIABLE}={} is no number", text.display())))
}

/// The ground under the calling thread and who it is, if it belongs to a simulation.
pub(crate) fn here() -> Option<(Arc<dyn Ground>, Identity)> {
    let here = self::core::here()?;
    Some((Arc::new(SimGround::new(here.core)), here.rank as Identity))
}

/// What a rank of a simulation starts with.
#[derive(Debug)]
#[non_exhaustive]
pub struct SimRank {
    /// Its number among all ranks of the simulation, by which faults name it.
    pub rank: usize,
    /// The simulation's options with its clock, for communicators that the rank makes itself.
    pub options: CommOptions,
    /// The world that it is in from the start; `None` for a newcomer.
    pub world: Option<Communicator>,
}

/// A rank as it is watched from outside.
struct Watch {
    calls: Calls,
    backend: Option<Weak<dyn Backend>>,
}

impl Watch {
    fn abort(&self, rank: usize, text: &str) {
        if let Some(b) = self.backend.as_ref().and_then(Weak::upgrade) {
            b.abort(&ErrorKind::Aborted { rank, cause: format!("it panicked: {text}") }.into());
        }
    }
}

impl std::fmt::Display for Watch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.calls.fmt(f)
    }
}

impl Observer for Watch {
    fn event(&self, event: &comm_core::Event<'_>, _: comm_core::Time) {
        self.calls.note(event);
    }
}
