//! What goes wrong in a simulation, and where.

use std::fmt;
use std::time::Duration;

use comm_core::{Error, Time};

/// A place in the life of a rank.
///
/// An *event* of a rank is a step that it makes (one of its threads or its engine goes on), a frame that it writes, or a
/// frame that reaches it; the first one is number 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum When {
    /// At this virtual time after the start.
    At(Duration),
    /// With the rank's event of this number.
    Event(u64),
    /// With one of the rank's first so many events; the seed says which.
    Within(u64),
}

/// What happens to a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FrameFault {
    Drop,
    Duplicate,
    Corrupt,
    Delay(Duration),
}

/// What happens to a rank or a link of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RankFault {
    Kill,
    Pause(Duration),
    Disconnect(usize),
    Cut(usize),
}

/// Chances of faults at random places.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Rates {
    pub(crate) drop: f64,
    pub(crate) duplicate: f64,
    pub(crate) corrupt: f64,
    pub(crate) delay: (f64, Duration),
    pub(crate) disconnect: f64,
    pub(crate) kill: f64,
    pub(crate) pause: (f64, Duration),
}

/// The faults of a simulation: some at chosen places, some at random ones. The default is none.
///
/// Frames from one rank to another are counted from 1, of whatever kind they are. Placing a fault where nothing comes by
/// (a frame that is never sent, an event that is never reached) is no error: [`Outcome::faults`](crate::Outcome::faults)
/// says what really happened.
///
/// ```
/// use std::time::Duration;
/// use backend_sim::{Faults, When};
///
/// let faults = Faults::new()
///     .kill(2, When::Event(40))
///     .delay_frame(0, 1, 3, Duration::from_millis(2))
///     .drop_rate(0.001)
///     .at_most(2);
/// ```
#[derive(Clone, Debug, Default)]
#[must_use]
pub struct Faults {
    pub(crate) frames: Vec<(usize, usize, u64, FrameFault)>,
    pub(crate) ranks: Vec<(usize, When, RankFault)>,
    pub(crate) rates: Rates,
    pub(crate) most: Option<u64>,
}

impl Faults {
    /// None.
    pub fn new() -> Self {
        Self::default()
    }

    /// Whether all this can happen to `n` ranks.
    pub(crate) fn check(&self, n: usize) -> comm_core::Result<()> {
        let other = |fault: &RankFault| match fault {
            RankFault::Disconnect(peer) | RankFault::Cut(peer) => Some(*peer),
            RankFault::Kill | RankFault::Pause(_) => None,
        };
        let frames = self.frames.iter().map(|(from, to, ..)| (*from, Some(*to)));
        for (rank, other) in frames.chain(self.ranks.iter().map(|(rank, _, fault)| (*rank, other(fault)))) {
            if let Some(r) = [Some(rank), other].into_iter().flatten().find(|r| *r >= n) {
                return Err(Error::invalid(format!("a fault is placed at rank {r} of a simulation of {n} ranks")));
            }
            if other == Some(rank) {
                return Err(Error::invalid(format!("a fault is placed between rank {rank} and itself")));
            }
        }
        let r = &self.rates;
        let rates = [r.drop, r.duplicate, r.corrupt, r.delay.0, r.disconnect, r.kill, r.pause.0];
        match rates.into_iter().find(|c| !(0.0..=1.0).contains(c)) {
            Some(c) => Err(Error::invalid(format!("a fault's rate is {c}; it is a chance, from 0 to 1"))),
            None => Ok(()),
        }
    }

    /// Loses frame `number` from one rank to another.
    pub fn drop_frame(self, from: usize, to: usize, number: u64) -> Self {
        self.frame(from, to, number, FrameFault::Drop)
    }

    /// Brings frame `number` from one rank to another twice.
    pub fn duplicate_frame(self, from: usize, to: usize, number: u64) -> Self {
        self.frame(from, to, number, FrameFault::Duplicate)
    }

    /// Flips bits of frame `number` from one rank to another; the seed says which.
    pub fn corrupt_frame(self, from: usize, to: usize, number: u64) -> Self {
        self.frame(from, to, number, FrameFault::Corrupt)
    }

    /// Holds up frame `number` from one rank to another, and with it those behind it.
    pub fn delay_frame(self, from: usize, to: usize, number: u64, by: Duration) -> Self {
        self.frame(from, to, number, FrameFault::Delay(by))
    }

    fn frame(mut self, from: usize, to: usize, number: u64, fault: FrameFault) -> Self {
        self.frames.push((from, to, number, fault));
        self
    }

    /// Kills a rank: its links end without a goodbye, nothing more gets out, its own calls fail.
    pub fn kill(self, rank: usize, when: When) -> Self {
        self.rank(rank, when, RankFault::Kill)
    }

    /// Stops a rank for a virtual time, as `SIGSTOP` does: nothing of it runs, but what is sent to it arrives.
    pub fn pause(self, rank: usize, when: When, for_: Duration) -> Self {
        self.rank(rank, when, RankFault::Pause(for_))
    }

    /// Ends the links between `rank` and `peer`: what is under way is lost, both see the end of the stream. Events are
    /// those of `rank`.
    pub fn disconnect(self, rank: usize, peer: usize, when: When) -> Self {
        self.rank(rank, when, RankFault::Disconnect(peer))
    }

    /// From then on everything from `rank` to `peer` is lost, and nobody is told: a cable that is cut in one direction.
    pub fn cut(self, rank: usize, peer: usize, when: When) -> Self {
        self.rank(rank, when, RankFault::Cut(peer))
    }

    fn rank(mut self, rank: usize, when: When, fault: RankFault) -> Self {
        self.ranks.push((rank, when, fault));
        self
    }

    /// Loses each frame with this chance.
    pub const fn drop_rate(mut self, chance: f64) -> Self {
        self.rates.drop = chance;
        self
    }

    /// Brings each frame twice with this chance.
    pub const fn duplicate_rate(mut self, chance: f64) -> Self {
        self.rates.duplicate = chance;
        self
    }

    /// Flips bits of each frame with this chance.
    pub const fn corrupt_rate(mut self, chance: f64) -> Self {
        self.rates.corrupt = chance;
        self
    }

    /// Holds up each frame with this chance, by up to `most`.
    pub const fn delay_rate(mut self, chance: f64, most: Duration) -> Self {
        self.rates.delay = (chance, most);
        self
    }

    /// Ends the link of each frame with this chance.
    pub const fn disconnect_rate(mut self, chance: f64) -> Self {
        self.rates.disconnect = chance;
        self
    }

    /// Kills a rank with this chance at each of its events; never all ranks.
    pub const fn kill_rate(mut self, chance: f64) -> Self {
        self.rates.kill = chance;
        self
    }

    /// Stops a rank with this chance at each of its events, for up to `most`.
    pub const fn pause_rate(mut self, chance: f64, most: Duration) -> Self {
        self.rates.pause = (chance, most);
        self
    }

    /// No more than so many faults at random places.
    pub const fn at_most(mut self, faults: u64) -> Self {
        self.most = Some(faults);
        self
    }
}

/// A fault that has happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Fault {
    /// A frame was lost.
    Drop {
        /// Who sent it.
        from: usize,
        /// To whom.
        to: usize,
        /// Which one.
        frame: u64,
    },
    /// A frame came twice.
    Duplicate {
        /// Who sent it.
        from: usize,
        /// To whom.
        to: usize,
        /// Which one.
        frame: u64,
    },
    /// A frame came with wrong bits.
    Corrupt {
        /// Who sent it.
        from: usize,
        /// To whom.
        to: usize,
        /// Which one.
        frame: u64,
        /// The first of the wrong bits, counted from the frame's beginning.
        bit: usize,
    },
    /// A frame was held up.
    Delay {
        /// Who sent it.
        from: usize,
        /// To whom.
        to: usize,
        /// Which one.
        frame: u64,
        /// For how long.
        by: Duration,
    },
    /// The links between two ranks ended.
    Disconnect {
        /// One of them.
        a: usize,
        /// The other.
        b: usize,
    },
    /// Nothing gets from one rank to another any more.
    Cut {
        /// Who sends.
        from: usize,
        /// Who gets nothing.
        to: usize,
    },
    /// A rank was killed.
    Kill {
        /// Which one.
        rank: usize,
    },
    /// A rank was stopped for a time.
    Pause {
        /// Which one.
        rank: usize,
        /// For how long.
        length: Duration,
    },
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Drop { from, to, frame } => write!(f, "frame {frame} from rank {from} to rank {to} was lost"),
            Self::Duplicate { from, to, frame } => write!(f, "frame {frame} from rank {from} to rank {to} came twice"),
            Self::Corrupt { from, to, frame, bit } => {
                write!(f, "frame {frame} from rank {from} to rank {to} was corrupted from bit {bit} on")
            }
            Self::Delay { from, to, frame, by } => {
                write!(f, "frame {frame} from rank {from} to rank {to} was held up for {by:?}")
            }
            Self::Disconnect { a, b } => write!(f, "ranks {a} and {b} were disconnected"),
            Self::Cut { from, to } => write!(f, "the way from rank {from} to rank {to} was cut"),
            Self::Kill { rank } => write!(f, "rank {rank} was killed"),
            Self::Pause { rank, length } => write!(f, "rank {rank} was stopped for {length:?}"),
        }
    }
}

/// A fault, and when it happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Happened {
    /// Virtual time.
    pub at: Time,
    /// What.
    pub fault: Fault,
}

impl fmt::Display for Happened {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "at {:?}: {}", Duration::from_nanos(self.at.0), self.fault)
    }
}
