//! An algorithm in a world with a size, and the ways to run it.

use std::fmt;

use collectives::{Algorithm, AnySchedule, Request, Shape};
use rustcomms::{Error, Operation, Result};
use serde_json::{Value, json};

use super::data::blocks;
use super::engine::{Counts, Engine, Patience, Symmetry};
use super::model::{Costs, Model};

/// One run to cost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Case {
    /// The algorithm.
    pub algorithm: Algorithm,
    /// Ranks.
    pub n: usize,
    /// Bytes as in [`Shape::bytes`]: of the buffer, or of one block for operations with a block per rank.
    pub bytes: usize,
    /// As [`Shape::segment`]; 0 for what the library does.
    pub segment: usize,
}

/// How a row was computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Every rank's schedule was run.
    All,
    /// One rank's schedule was run, and all others behave like it. Exact.
    One,
    /// The same, although they do so only nearly.
    OneAbout,
    /// Every rank's schedule was run with two smaller sizes, cut into segments as the whole is; time and counts continue in a line.
    Line,
}

impl Mode {
    /// All of them.
    pub const EACH: [Self; 4] = [Self::All, Self::One, Self::OneAbout, Self::Line];

    /// Its name in tables.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::All => "all",
            Self::One => "one",
            Self::OneAbout => "one~",
            Self::Line => "line~",
        }
    }
}

/// How many messages are simulated for one row at most, before it is computed in another mode than [`Mode::All`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Budget {
    /// For messages of up to 64 bytes.
    pub small: u64,
    /// For others, where nothing is cut into segments.
    pub whole: u64,
    /// Where it is.
    pub cut: u64,
}

impl Budget {
    /// About ten minutes on two idle cores. All ranks of worlds up to 4,096 even where a small message goes to every pair of them, up to 2,048 if it is a long
    /// one, and of all worlds where each rank sends a few messages or their logarithm.
    pub const FULL: Self = Self { small: 17_000_000, whole: 4_200_000, cut: 2_500_000 };
    /// For a look.
    pub const QUICK: Self = Self { small: 300_000, whole: 300_000, cut: 100_000 };

    const fn of(&self, bytes: usize, pieces: usize) -> u64 {
        match pieces {
            0 | 1 if bytes <= 64 => self.small,
            0 | 1 => self.whole,
            _ => self.cut,
        }
    }
}

/// A costed case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Row {
    /// What.
    pub case: Case,
    /// How.
    pub mode: Mode,
    /// The cost.
    pub counts: Counts,
    /// Whether the case was also run with real data, and every rank had the right result.
    pub checked: bool,
}

impl Row {
    /// Seconds until the last rank is done.
    #[must_use]
    pub fn seconds(&self) -> f64 {
        self.counts.time as f64 / 1e12
    }

    /// What the places of [`to_json`](Self::to_json) mean.
    pub const COLUMNS: [&'static str; 14] = [
        "operation",
        "algorithm",
        "ranks",
        "bytes",
        "mode",
        "seconds",
        "rounds",
        "messages",
        "message_bytes",
        "most_sent",
        "most_received",
        "most_bytes_sent",
        "most_bytes_received",
        "checked",
    ];

    /// As a JSON array.
    #[must_use]
    pub fn to_json(&self) -> Value {
        let (case, c) = (&self.case, &self.counts);
        json!([
            case.algorithm.operation().name(),
            case.algorithm.name(),
            case.n,
            case.bytes,
            self.mode.name(),
            self.seconds(),
            c.rounds,
            c.messages,
            c.bytes,
            c.most_sent,
            c.most_received,
            c.most_bytes_sent,
            c.most_bytes_received,
            self.checked,
        ])
    }
}

/// The algorithms that are costed. With blocks of one length, all_gather_v, reduce_scatter_v, gather_v and scatter_v run the schedules of
/// all_gather, reduce_scatter, gather and scatter, so only these are.
pub fn algorithms() -> impl Iterator<Item = Algorithm> {
    let same = [Operation::AllGatherV, Operation::ReduceScatterV, Operation::GatherV, Operation::ScatterV];
    Algorithm::ALL.iter().copied().filter(move |a| !same.contains(&a.operation()))
}

/// Bytes of an element: `f32` in the model, `i32` where data is checked.
const UNIT: usize = 4;

impl Case {
    /// As the library runs it.
    #[must_use]
    pub const fn new(algorithm: Algorithm, n: usize, bytes: usize) -> Self {
        Self { algorithm, n, bytes, segment: 0 }
    }

    /// Rank `r`'s schedule. all_reduce is done in place, all others out of place; the root is rank 0.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` for bytes that are not whole elements.
    pub fn schedule(&self, rank: usize) -> Result<AnySchedule> {
        AnySchedule::new(self.algorithm, &Request::even(self.shape(rank), 0))
    }

    fn shape(&self, rank: usize) -> Shape {
        let in_place = self.algorithm.operation() == Operation::AllReduce;
        Shape { rank, size: self.n, bytes: self.bytes, unit: UNIT, in_place, segment: self.segment }
    }

    /// The way in which its ranks resemble each other, if they do.
    #[must_use]
    pub const fn symmetry(&self) -> Symmetry {
        match self.algorithm {
            Algorithm::AllReduceRecursiveDoubling
            | Algorithm::AllReduceRabenseifner
            | Algorithm::ReduceScatterHalving => Symmetry::Cube,
            _ => Symmetry::Rotation,
        }
    }

    /// The mode in which one rank can stand for all, if it can.
    fn by_one(&self) -> Option<Mode> {
        let elements = self.bytes / UNIT;
        let cube = self.n.is_power_of_two();
        match self.algorithm {
            Algorithm::AllGatherDirect
            | Algorithm::AllGatherBruck
            | Algorithm::AllGatherRing
            | Algorithm::ReduceScatterRing
            | Algorithm::AllToAllDirect
            | Algorithm::AllToAllBruck
            | Algorithm::AllToAllPairwise
            | Algorithm::AllToAllVDirect
            | Algorithm::AllToAllVPairwise
            | Algorithm::BarrierDissemination => Some(Mode::One),
            Algorithm::AllReduceRing if elements.is_multiple_of(self.n) => Some(Mode::One),
            // Chunks differ by an element.
            Algorithm::AllReduceRing => Some(Mode::OneAbout),
            // Folds are in rank order; the first rank waits longest for the next one.
            Algorithm::AllReduceDirect | Algorithm::ReduceScatterDirect if self.pieces() == 1 => Some(Mode::One),
            Algorithm::AllReduceDirect | Algorithm::ReduceScatterDirect => Some(Mode::OneAbout),
            Algorithm::AllReduceRecursiveDoubling | Algorithm::ReduceScatterHalving if cube => Some(Mode::One),
            Algorithm::AllReduceRabenseifner
                if cube
                    && (elements % (self.piece() / UNIT)).is_multiple_of(self.n)
                    && (self.piece() / UNIT).is_multiple_of(self.n) =>
            {
                Some(Mode::One)
            }
            _ => None,
        }
    }

    /// How the schedule cuts the buffer: about the bytes of a piece that goes its way by itself.
    pub(super) fn piece(&self) -> usize {
        let wanted = if self.segment == 0 { Shape::SEGMENT } else { self.segment };
        let together = match self.algorithm {
            // Messages as long as the block.
            Algorithm::AllGatherDirect
            | Algorithm::GatherDirect
            | Algorithm::ScatterDirect
            | Algorithm::AllToAllVDirect
            | Algorithm::AllToAllVPairwise
            | Algorithm::BarrierDissemination => return self.bytes.max(UNIT),
            Algorithm::AllReduceRing => return wanted.saturating_mul(self.n),
            Algorithm::AllReduceRabenseifner => wanted * 2,
            Algorithm::AllToAllBruck => 16 << 10,
            Algorithm::GatherBinomial | Algorithm::ScatterBinomial => (wanted * 8 / self.n).max(1),
            Algorithm::ReduceScatterHalving => (wanted * 2 / self.n).max(1),
            _ => wanted,
        };
        Shape { segment: together, ..self.shape(0) }.effective_segment()
    }

    pub(super) fn pieces(&self) -> usize {
        self.bytes.div_ceil(self.piece()).max(1)
    }

    /// Pieces that the schedule has under way at once, at most.
    const fn lanes(&self) -> usize {
        match self.algorithm {
            Algorithm::AllReduceRabenseifner
            | Algorithm::ReduceScatterHalving
            | Algorithm::ReduceOrdered
            | Algorithm::GatherBinomial
            | Algorithm::ScatterBinomial
            | Algorithm::ScanRecursiveDoubling
            | Algorithm::ExscanRecursiveDoubling => 2,
            _ => 4,
        }
    }

    /// About how many messages the whole world sends for one piece.
    fn messages_per_piece(&self) -> u64 {
        let n = self.n as u64;
        let rounds = u64::from(self.n.next_power_of_two().ilog2());
        match self.algorithm {
            // Looking for its next chunk among empty ones costs about as much as an eighth of a message.
            Algorithm::AllReduceRing => 2 * n * ((self.bytes / UNIT) as u64).min(n).max(n / 8),
            Algorithm::AllReduceRabenseifner => 2 * n * rounds,
            Algorithm::AllReduceRecursiveDoubling
            | Algorithm::ScanRecursiveDoubling
            | Algorithm::ExscanRecursiveDoubling
            | Algorithm::BarrierDissemination => n * rounds,
            // Each copies all blocks besides.
            Algorithm::ReduceScatterHalving | Algorithm::AllGatherBruck | Algorithm::AllToAllBruck => {
                n * rounds + n * n / 8
            }
            Algorithm::AllReduceDirect
            | Algorithm::ReduceScatterDirect
            | Algorithm::ReduceScatterRing
            | Algorithm::AllGatherDirect
            | Algorithm::AllGatherRing
            | Algorithm::AllToAllDirect
            | Algorithm::AllToAllPairwise
            | Algorithm::AllToAllVDirect
            | Algorithm::AllToAllVPairwise => n * (n - 1),
            _ => n,
        }
    }

    /// The mode that a budget leaves.
    #[must_use]
    pub fn mode(&self, budget: Budget) -> Mode {
        if self.messages_per_piece().saturating_mul(self.pieces() as u64) <= budget.of(self.bytes, self.pieces()) {
            return Mode::All;
        }
        // A line needs two sizes whose pieces do not all go at once; less than that is run as it is.
        let other = if self.pieces() <= 2 * self.lanes() { Mode::All } else { Mode::Line };
        self.by_one().unwrap_or(other)
    }

    fn patience(&self) -> Patience {
        match self.algorithm {
            Algorithm::AllGatherDirect => Patience::All,
            Algorithm::AllReduceDirect | Algorithm::ReduceScatterDirect | Algorithm::ReduceOrdered
                if self.pieces() == 1 =>
            {
                Patience::Sends
            }
            _ => Patience::None,
        }
    }

    /// The same for one rank of very many, which would look through its sends each time that one is done.
    fn patience_of_one(&self) -> Patience {
        match self.algorithm {
            Algorithm::AllReduceDirect | Algorithm::ReduceScatterDirect => Patience::Sends,
            _ => self.patience(),
        }
    }

    /// Runs it in this mode.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` where the case cannot be run so.
    pub fn run(&self, model: Model, mode: Mode, budget: Budget) -> Result<Counts> {
        let n = u32::try_from(self.n).map_err(|_| Error::invalid(format!("{} ranks are too many", self.n)))?;
        let costs = model.at(self.buffer());
        match mode {
            Mode::All => Engine::all(costs, n, self.symmetry(), self.patience()).run(|r| self.schedule(r)),
            Mode::One | Mode::OneAbout => {
                let even = Self { bytes: self.evened(), ..*self };
                let patience = self.patience_of_one();
                let counts = Engine::one(costs, n, self.symmetry(), patience, 0).run(|r| even.schedule(r))?;
                Ok(self.uneven(counts, &costs))
            }
            Mode::Line => self.line(costs, n, budget),
        }
    }

    /// Bytes of the longest buffer that a rank has: the root's for operations with one.
    pub(super) const fn buffer(&self) -> usize {
        let (to, from) = blocks(self.algorithm.operation(), self.n);
        self.bytes.saturating_mul(if to > from { to } else { from })
    }

    /// The bytes, or for a ring that cannot cut them into equal chunks, a few more.
    fn evened(&self) -> usize {
        let multiple = if self.algorithm == Algorithm::AllReduceRing { UNIT * self.n } else { UNIT };
        self.bytes.next_multiple_of(multiple)
    }

    /// Counts of the evened run, with what is known of the ring whose chunks are single elements or empty.
    fn uneven(&self, counts: Counts, costs: &Costs) -> Counts {
        let elements = self.bytes / UNIT;
        if self.algorithm != Algorithm::AllReduceRing || elements >= self.n {
            return counts;
        }
        let (hops, chunks, bytes) = (2 * (self.n as u64 - 1), elements as u64, self.bytes as u64);
        // Where a rank has a message in every hop, these follow each other as fast as it can take them; the few that there are go at the speed of one
        // alone, after they have drawn apart.
        let alone = costs.alpha + costs.port(UNIT) + costs.last_copy(UNIT) + costs.overhead;
        let free = hops * alone + hops / 2 * costs.fold(UNIT);
        let apart = chunks * (counts.time.saturating_sub(free) / hops.max(1));
        Counts {
            time: counts.time.min(free + apart),
            messages: hops * chunks,
            bytes: hops * bytes,
            // Each chunk comes round twice.
            most_sent: 2 * chunks,
            most_received: 2 * chunks,
            most_bytes_sent: 2 * bytes,
            most_bytes_received: 2 * bytes,
            ..counts
        }
    }

    /// The line through the costs of two smaller sizes.
    fn line(&self, costs: Costs, n: u32, budget: Budget) -> Result<Counts> {
        let piece = self.piece();
        // Segments as long as those of the whole, whatever limits them there.
        let segment = match self.algorithm {
            Algorithm::AllReduceRabenseifner => piece / 2,
            Algorithm::GatherBinomial | Algorithm::ScatterBinomial => (piece * self.n).div_ceil(8),
            Algorithm::ReduceScatterHalving => (piece * self.n).div_ceil(2),
            _ => piece,
        };
        let affordable = (budget.cut / self.messages_per_piece()).max(1) as usize;
        // Few pieces are all under way at once, which says nothing about those that follow.
        let most = affordable.clamp(2 * self.lanes(), 64);
        let at = |pieces: usize| -> Result<(f64, Counts)> {
            let case = Self { bytes: pieces * piece, segment, ..*self };
            let counts = Engine::all(costs, n, self.symmetry(), self.patience()).run(|r| case.schedule(r))?;
            Ok((case.bytes as f64, counts))
        };
        let ((x1, a), (x2, b)) = (at(most / 2)?, at(most)?);
        let scale = (self.bytes as f64 - x2) / (x2 - x1);
        let on = |f: fn(&Counts) -> u64| {
            let (a, b) = (f(&a) as f64, f(&b) as f64);
            (b + (b - a) * scale).round().max(0.0) as u64
        };
        Ok(Counts {
            time: on(|c| c.time),
            messages: on(|c| c.messages),
            bytes: on(|c| c.bytes),
            rounds: u32::try_from(on(|c| u64::from(c.rounds))).unwrap_or(u32::MAX),
            most_sent: on(|c| c.most_sent),
            most_received: on(|c| c.most_received),
            most_bytes_sent: on(|c| c.most_bytes_sent),
            most_bytes_received: on(|c| c.most_bytes_received),
        })
    }

    /// Runs it as the budget allows, and with real data where the world is small.
    ///
    /// # Errors
    ///
    /// As [`run`](Self::run), and for a wrong result.
    pub fn cost(&self, model: Model, budget: Budget) -> Result<Row> {
        let mode = self.mode(budget);
        let counts = self.run(model, mode, budget)?;
        let checked = super::check(self, model)?.is_some();
        Ok(Row { case: *self, mode, counts, checked })
    }
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} on {} ranks with {} bytes", self.algorithm, self.n, self.bytes)
    }
}
