//! What a simulation has come to.

use std::fmt;
use std::time::Duration;

use comm_core::Error;

use super::faults::Happened;

/// How a rank ended.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Ended<T> {
    /// Its code returned a value.
    Value(T),
    /// Its code returned an error.
    Error(Error),
    /// Its code panicked.
    Panic(String),
    /// A fault killed it before its code returned.
    Killed,
    /// Its code did not return; where it is.
    Stuck(String),
}

impl<T> Ended<T> {
    /// The value, if there is one.
    pub const fn value(&self) -> Option<&T> {
        if let Self::Value(v) = self { Some(v) } else { None }
    }

    /// The error, if it ended with one.
    pub const fn error(&self) -> Option<&Error> {
        if let Self::Error(e) = self { Some(e) } else { None }
    }
}

/// What one rank has sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct RankStats {
    /// Frames with users' data. A message of up to 256 KiB is one frame, a longer one several.
    pub messages: u64,
    /// Bytes of data in them, headers not counted.
    pub bytes: u64,
    /// Small frames of the endpoint's own: credit, control plane, goodbyes.
    pub control: u64,
    /// Bytes in them, headers not counted.
    pub control_bytes: u64,
    /// Longest chain of data frames that ended at this rank: each was sent after the one before it had been received by
    /// its sender.
    pub rounds: u64,
    /// Steps that it made, frames that it wrote and frames that reached it.
    pub events: u64,
}

/// What a simulation has cost.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Stats {
    /// By rank.
    pub ranks: Vec<RankStats>,
    /// All ranks together; of the rounds, the most.
    pub total: RankStats,
    /// Virtual time from the start to the end of the last rank.
    pub elapsed: Duration,
    /// Decisions of the scheduler.
    pub steps: u64,
}

/// Why a simulation was stopped before its ranks had ended.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Trouble {
    /// Nothing can happen any more: all wait, and nothing is under way. As long as ranks send each other heartbeats
    /// ([`CommOptions::heartbeat_timeout`](comm_core::CommOptions::heartbeat_timeout)), something does, and it is the limit of virtual
    /// time that ends the run.
    Hang,
    /// The limit of virtual time.
    Time(Duration),
    /// The limit of steps.
    Steps(u64),
    /// A rank neither returned nor waited through the clock for so long a real time: it computes, or waits for something
    /// that is no part of the simulation.
    Real(Duration),
}

impl fmt::Display for Trouble {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Hang => f.write_str("nothing can happen any more: all wait, and nothing is under way"),
            Self::Time(limit) => write!(f, "it has not ended within {limit:?} of virtual time"),
            Self::Steps(limit) => write!(f, "it has not ended within {limit} steps"),
            Self::Real(limit) => write!(
                f,
                "a rank has neither returned nor waited through its communicator's clock for {limit:?} of real time"
            ),
        }
    }
}

/// What a simulation has come to.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Outcome<T> {
    /// How each rank ended.
    pub ranks: Vec<Ended<T>>,
    /// What it cost.
    pub stats: Stats,
    /// A hash over every decision, delivery and fault, with their times: equal for equal runs.
    pub digest: u64,
    /// What it can be run again with.
    pub seed: u64,
    /// Faults that really happened, in order.
    pub faults: Vec<Happened>,
    /// Why it was stopped, if it was, and where each rank was then.
    pub trouble: Option<(Trouble, Vec<String>)>,
    /// The last things that happened, if [`Simulation::trace`](crate::Simulation::trace) asked for them.
    pub trace: Vec<String>,
}

impl<T> Outcome<T> {
    /// The values of all ranks.
    ///
    /// # Errors
    ///
    /// When a rank has ended otherwise, or the simulation was stopped: a report that says so for each rank, and how to run
    /// the same again.
    pub fn values(self) -> Result<Vec<T>, SimFailure> {
        if self.trouble.is_some() || self.ranks.iter().any(|r| r.value().is_none()) {
            return Err(self.failure("not all ranks have returned a value"));
        }
        let value = |r| if let Ended::Value(v) = r { Some(v) } else { None };
        Ok(self.ranks.into_iter().filter_map(value).collect())
    }

    /// A report on this run for a test that does not like it: what each rank ended with, what happened, the seed.
    #[must_use]
    pub fn failure(&self, what: &str) -> SimFailure {
        use fmt::Write;
        let mut text = format!("{what}; {}", self.replay());
        // Writing to a string does not fail.
        if let Some((trouble, waits)) = &self.trouble {
            let _ = write!(text, "\n  stopped: {trouble}");
            for w in waits {
                let _ = write!(text, "\n    {w}");
            }
        }
        for (rank, end) in self.ranks.iter().enumerate() {
            let _ = match end {
                Ended::Value(_) => write!(text, "\n  rank {rank}: returned a value"),
                Ended::Error(e) => write!(text, "\n  rank {rank}: {e}"),
                Ended::Panic(p) => write!(text, "\n  rank {rank}: panicked: {p}"),
                Ended::Killed => write!(text, "\n  rank {rank}: killed"),
                Ended::Stuck(s) => write!(text, "\n  rank {rank}: did not end: {s}"),
            };
        }
        for f in &self.faults {
            let _ = write!(text, "\n  fault {f}");
        }
        for t in &self.trace {
            let _ = write!(text, "\n  trace {t}");
        }
        SimFailure { seed: self.seed, text }
    }

    /// How to run the same again.
    #[must_use]
    pub fn replay(&self) -> String {
        let seed = self.seed;
        format!("seed {seed}: run it again with {}={seed} or Simulation::seed({seed})", super::SEED_VARIABLE)
    }
}

/// A run that did not do what it should.
#[derive(Clone, Debug)]
pub struct SimFailure {
    /// What it can be run again with.
    pub seed: u64,
    text: String,
}

impl fmt::Display for SimFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl std::error::Error for SimFailure {}
