//! Which algorithm runs: a table by operation, size and number of ranks, printable and overridable.

use std::borrow::Cow;
use std::fmt;

use comm_core::{Error, Operation, Result};

use crate::schedule::{AnySchedule, Request, Schedule};

macro_rules! algorithms {
    ($($(#[$doc:meta])* $variant:ident = $op:ident, $name:literal, $ordered:literal;)*) => {
        /// An operation together with the way to do it.
        #[non_exhaustive]
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum Algorithm { $($(#[$doc])* $variant,)* }

        impl Algorithm {
            /// Every algorithm.
            pub const ALL: &'static [Self] = &[$(Self::$variant,)*];

            /// The operation it performs.
            #[must_use]
            pub const fn operation(self) -> Operation {
                match self { $(Self::$variant => Operation::$op,)* }
            }

            /// Its name among the algorithms of its operation: what `RUSTCOMMS_ALGO` takes.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self { $(Self::$variant => $name,)* }
            }

            /// Whether it folds in rank order (or not at all), so that operators need not commute.
            #[must_use]
            pub const fn keeps_order(self) -> bool {
                match self { $(Self::$variant => $ordered,)* }
            }
        }
    };
}

algorithms! {
    /// Everybody sends everything to everybody.
    AllReduceDirect = AllReduce, "direct", true;
    /// Exchanges at doubling distances.
    AllReduceRecursiveDoubling = AllReduce, "recursive_doubling", true;
    /// Reduce-scatter by recursive halving, all-gather by recursive doubling.
    AllReduceRabenseifner = AllReduce, "rabenseifner", true;
    /// Reduce-scatter and all-gather on a ring.
    AllReduceRing = AllReduce, "ring", false;
    /// Up a binomial tree.
    ReduceBinomial = Reduce, "binomial", false;
    /// Along a pipelined chain.
    ReduceChain = Reduce, "chain", false;
    /// Everybody sends to the root.
    ReduceOrdered = Reduce, "ordered", true;
    /// Down a binomial tree.
    BroadcastBinomial = Broadcast, "binomial", true;
    /// Along a pipelined chain.
    BroadcastChain = Broadcast, "chain", true;
    /// Everybody sends its shard to everybody.
    AllGatherDirect = AllGather, "direct", true;
    /// What a rank has goes to ranks at doubling distances.
    AllGatherBruck = AllGather, "bruck", true;
    /// Shards travel round a ring.
    AllGatherRing = AllGather, "ring", true;
    /// Everybody sends its shard to everybody.
    AllGatherVDirect = AllGatherV, "direct", true;
    /// Shards travel round a ring.
    AllGatherVRing = AllGatherV, "ring", true;
    /// Up a binomial tree.
    GatherBinomial = Gather, "binomial", true;
    /// Everybody sends to the root.
    GatherDirect = Gather, "direct", true;
    /// Everybody sends to the root.
    GatherVDirect = GatherV, "direct", true;
    /// Down a binomial tree.
    ScatterBinomial = Scatter, "binomial", true;
    /// The root sends to everybody.
    ScatterDirect = Scatter, "direct", true;
    /// The root sends to everybody.
    ScatterVDirect = ScatterV, "direct", true;
    /// Everybody sends each block to its owner.
    ReduceScatterDirect = ReduceScatter, "direct", true;
    /// Exchanges of half of the blocks that are left.
    ReduceScatterHalving = ReduceScatter, "halving", true;
    /// Partial sums travel round a ring.
    ReduceScatterRing = ReduceScatter, "ring", false;
    /// Everybody sends each block to its owner.
    ReduceScatterVDirect = ReduceScatterV, "direct", true;
    /// Partial sums travel round a ring.
    ReduceScatterVRing = ReduceScatterV, "ring", false;
    /// Everybody sends to everybody at once.
    AllToAllDirect = AllToAll, "direct", true;
    /// Blocks travel together over distances that are powers of two.
    AllToAllBruck = AllToAll, "bruck", true;
    /// One distance after the other, few peers at a time.
    AllToAllPairwise = AllToAll, "pairwise", true;
    /// Everybody sends to everybody at once.
    AllToAllVDirect = AllToAllV, "direct", true;
    /// One distance after the other, few peers at a time.
    AllToAllVPairwise = AllToAllV, "pairwise", true;
    /// Sums go to ranks at doubling distances.
    ScanRecursiveDoubling = Scan, "recursive_doubling", true;
    /// Along a pipelined chain.
    ScanChain = Scan, "chain", true;
    /// Sums go to ranks at doubling distances.
    ExscanRecursiveDoubling = Exscan, "recursive_doubling", true;
    /// Along a pipelined chain.
    ExscanChain = Exscan, "chain", true;
    /// Messages at doubling distances.
    BarrierDissemination = Barrier, "dissemination", true;
}

impl Algorithm {
    /// Its number in descriptors: ranks must run the same algorithm. Never 0.
    #[must_use]
    pub fn code(self) -> u8 {
        Self::ALL.iter().position(|a| *a == self).map_or(u8::MAX, |i| i as u8 + 1)
    }

    /// The algorithm of an operation with this name.
    #[must_use]
    pub fn from_name(op: Operation, name: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|a| a.operation() == op && a.name() == name)
    }

    /// Whether the operation has a root.
    #[must_use]
    pub const fn is_rooted(self) -> bool {
        matches!(
            self.operation(),
            Operation::Reduce
                | Operation::Broadcast
                | Operation::Gather
                | Operation::GatherV
                | Operation::Scatter
                | Operation::ScatterV
        )
    }

    /// Whether it may run with such an operator.
    const fn allows(self, commutative: bool) -> bool {
        commutative || self.keeps_order()
    }
}

impl fmt::Display for Algorithm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.operation(), self.name())
    }
}

/// One row of a [`Table`]: the algorithm's operation uses it up to these sizes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rule {
    /// What is chosen.
    pub algorithm: Algorithm,
    /// Most bytes, as in [`Shape::bytes`](crate::Shape::bytes).
    pub max_bytes: usize,
    /// Most ranks.
    pub max_ranks: usize,
    /// Whether the number of ranks must be a power of two.
    pub only_powers_of_two: bool,
}

impl Rule {
    /// A row.
    #[must_use]
    pub const fn new(algorithm: Algorithm, max_bytes: usize, max_ranks: usize) -> Self {
        Self { algorithm, max_bytes, max_ranks, only_powers_of_two: false }
    }

    /// The same row for worlds of a power of two of ranks only.
    #[must_use]
    pub const fn only_powers_of_two(mut self) -> Self {
        self.only_powers_of_two = true;
        self
    }

    const fn fits(&self, bytes: usize, n: usize) -> bool {
        bytes <= self.max_bytes && n <= self.max_ranks && (n.is_power_of_two() || !self.only_powers_of_two)
    }
}

const ANY: usize = usize::MAX;

/// For links through the kernel, where a hop costs microseconds. What ranks may not know alike, the lengths of
/// gather_v, scatter_v and all_to_all_v, chooses nothing. Rows for operators that do not commute
/// are those that are reached when the ones before them are not allowed.
const TCP: &[Rule] = &[
    Rule::new(Algorithm::AllReduceDirect, 4 << 10, 8),
    Rule::new(Algorithm::AllReduceRecursiveDoubling, 32 << 10, ANY),
    // In other worlds than of powers of two some ranks exchange the whole buffer in two more hops, which costs more
    // than a ring's hops until there are many of those.
    Rule::new(Algorithm::AllReduceRabenseifner, 512 << 10, ANY).only_powers_of_two(),
    Rule::new(Algorithm::AllReduceRing, 512 << 10, 16),
    Rule::new(Algorithm::AllReduceRabenseifner, 512 << 10, ANY),
    Rule::new(Algorithm::AllReduceRing, ANY, ANY),
    Rule::new(Algorithm::AllReduceRabenseifner, ANY, ANY),
    Rule::new(Algorithm::ReduceBinomial, 64 << 10, ANY),
    Rule::new(Algorithm::ReduceChain, ANY, ANY),
    Rule::new(Algorithm::ReduceOrdered, ANY, ANY),
    Rule::new(Algorithm::BroadcastBinomial, 64 << 10, ANY),
    Rule::new(Algorithm::BroadcastChain, ANY, ANY),
    Rule::new(Algorithm::AllGatherDirect, ANY, 8),
    Rule::new(Algorithm::AllGatherBruck, 4 << 10, ANY),
    Rule::new(Algorithm::AllGatherRing, ANY, ANY),
    Rule::new(Algorithm::AllGatherVDirect, ANY, 8),
    Rule::new(Algorithm::AllGatherVRing, ANY, ANY),
    Rule::new(Algorithm::GatherDirect, ANY, 8),
    Rule::new(Algorithm::GatherBinomial, 4 << 10, ANY),
    Rule::new(Algorithm::GatherDirect, ANY, ANY),
    Rule::new(Algorithm::GatherVDirect, ANY, ANY),
    Rule::new(Algorithm::ScatterDirect, ANY, 8),
    Rule::new(Algorithm::ScatterBinomial, 4 << 10, ANY),
    Rule::new(Algorithm::ScatterDirect, ANY, ANY),
    Rule::new(Algorithm::ScatterVDirect, ANY, ANY),
    Rule::new(Algorithm::ReduceScatterDirect, ANY, 8),
    Rule::new(Algorithm::ReduceScatterHalving, 4 << 10, ANY),
    Rule::new(Algorithm::ReduceScatterRing, ANY, ANY),
    Rule::new(Algorithm::ReduceScatterDirect, ANY, ANY),
    Rule::new(Algorithm::ReduceScatterVDirect, ANY, 8),
    Rule::new(Algorithm::ReduceScatterVRing, ANY, ANY),
    Rule::new(Algorithm::ReduceScatterVDirect, ANY, ANY),
    Rule::new(Algorithm::AllToAllDirect, ANY, 8),
    Rule::new(Algorithm::AllToAllBruck, 256, ANY),
    Rule::new(Algorithm::AllToAllPairwise, ANY, ANY),
    Rule::new(Algorithm::AllToAllVDirect, ANY, 8),
    Rule::new(Algorithm::AllToAllVPairwise, ANY, ANY),
    Rule::new(Algorithm::ScanRecursiveDoubling, 64 << 10, ANY),
    Rule::new(Algorithm::ScanChain, ANY, ANY),
    Rule::new(Algorithm::ExscanRecursiveDoubling, 64 << 10, ANY),
    Rule::new(Algorithm::ExscanChain, ANY, ANY),
    Rule::new(Algorithm::BarrierDissemination, ANY, ANY),
];

/// The rules by which algorithms are chosen: the first row that fits and is allowed.
///
/// All ranks of a communicator must use the same table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Table {
    rules: Cow<'static, [Rule]>,
}

impl Default for Table {
    fn default() -> Self {
        Self::tcp()
    }
}

impl Table {
    /// The table for socket links.
    #[must_use]
    pub const fn tcp() -> Self {
        Self { rules: Cow::Borrowed(TCP) }
    }

    /// The rows.
    #[must_use]
    pub fn rules(&self) -> &[Rule] {
        &self.rules
    }

    /// Puts a row before all others.
    #[must_use]
    pub fn prefer(mut self, rule: Rule) -> Self {
        self.rules.to_mut().insert(0, rule);
        self
    }

    /// Chooses the algorithm for an operation of `bytes` bytes (as in [`Shape::bytes`](crate::Shape::bytes))
    /// on `n` ranks; `forced` names one instead.
    ///
    /// # Errors
    ///
    /// [`Unsupported`](comm_core::ErrorKind::Unsupported) for an operation without schedules here;
    /// [`InvalidArgument`](comm_core::ErrorKind::InvalidArgument), with the valid names, for a forced name
    /// that the operation does not have or that cannot be used with an operator that does not commute.
    pub fn select(
        &self,
        op: Operation,
        bytes: usize,
        n: usize,
        commutative: bool,
        forced: Option<&str>,
    ) -> Result<Algorithm> {
        if let Some(name) = forced {
            return match Algorithm::from_name(op, name) {
                Some(a) if a.allows(commutative) => Ok(a),
                found => Err(refuse(op, name, commutative, found.is_some())),
            };
        }
        let fits = |r: &&Rule| {
            let a = r.algorithm;
            a.operation() == op && a.allows(commutative) && r.fits(bytes, n)
        };
        self.rules.iter().find(fits).map(|r| r.algorithm).ok_or_else(|| no_schedule(op))
    }
}

fn no_schedule(op: Operation) -> Error {
    let mut ops: Vec<_> = Algorithm::ALL.iter().map(|a| a.operation().name()).collect();
    ops.dedup();
    Error::unsupported(format!("{op} by a schedule"), format!("there are schedules for {}", ops.join(", ")))
}

fn refuse(op: Operation, name: &str, commutative: bool, exists: bool) -> Error {
    let of_op: Vec<_> = Algorithm::ALL.iter().filter(|a| a.operation() == op).collect();
    if of_op.is_empty() {
        return no_schedule(op);
    }
    let valid: Vec<_> = of_op.iter().filter(|a| a.allows(commutative)).map(|a| a.name()).collect();
    let valid = valid.join(", ");
    Error::invalid(if exists {
        format!(
            "{op} by '{name}' does not fold in rank order and needs a commutative operator; use one of {valid}, or leave the choice to the table"
        )
    } else {
        format!("{op} has no algorithm '{name}'; use one of {valid}, or leave the choice to the table")
    })
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{:<16}{:>12}{:>11}  {:<20}operators", "operation", "max bytes", "max ranks", "algorithm")?;
        for r in self.rules() {
            let (bytes, ranks) = (limit(r.max_bytes, true), limit(r.max_ranks, false));
            let ranks = if r.only_powers_of_two { format!("{ranks} 2^k") } else { ranks };
            let which = if r.algorithm.keeps_order() { "all" } else { "commutative" };
            let (op, name) = (r.algorithm.operation().name(), r.algorithm.name());
            writeln!(f, "{op:<16}{bytes:>12}{ranks:>11}  {name:<20}{which}")?;
        }
        Ok(())
    }
}

fn limit(x: usize, bytes: bool) -> String {
    match x {
        ANY => "any".to_owned(),
        _ if bytes && x > 0 && x.is_multiple_of(1 << 20) => format!("{} MiB", x >> 20),
        _ if bytes && x > 0 && x.is_multiple_of(1 << 10) => format!("{} KiB", x >> 10),
        _ => x.to_string(),
    }
}

/// Chooses an algorithm from the table for socket links; see [`Table::select`].
///
/// # Errors
///
/// As [`Table::select`].
pub fn select(op: Operation, bytes: usize, n: usize, commutative: bool, forced: Option<&str>) -> Result<Algorithm> {
    const DEFAULT: Table = Table::tcp();
    DEFAULT.select(op, bytes, n, commutative, forced)
}

/// One rank's schedule, boxed; [`AnySchedule::new`] is the same without the box.
///
/// # Errors
///
/// As [`AnySchedule::new`].
pub fn build(algorithm: Algorithm, request: &Request) -> Result<Box<dyn Schedule>> {
    Ok(Box::new(AnySchedule::new(algorithm, request)?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use comm_core::ErrorKind;

    const KIB: usize = 1 << 10;

    #[test]
    fn thresholds_are_those_of_the_table() {
        let pick = |op, bytes, n| select(op, bytes, n, true, None).unwrap().name();
        assert_eq!(pick(Operation::AllReduce, 4 * KIB, 8), "direct");
        assert_eq!(pick(Operation::AllReduce, 4 * KIB, 9), "recursive_doubling");
        assert_eq!(pick(Operation::AllReduce, 4 * KIB + 1, 2), "recursive_doubling");
        assert_eq!(pick(Operation::AllReduce, 32 * KIB, 2), "recursive_doubling");
        assert_eq!(pick(Operation::AllReduce, 32 * KIB + 1, 2), "rabenseifner");
        assert_eq!(pick(Operation::AllReduce, 512 * KIB, 2), "rabenseifner");
        assert_eq!(pick(Operation::AllReduce, 512 * KIB, 64), "rabenseifner");
        assert_eq!(pick(Operation::AllReduce, 512 * KIB + 1, 64), "ring");
        assert_eq!(pick(Operation::AllReduce, 512 * KIB, 15), "ring");
        assert_eq!(pick(Operation::AllReduce, 512 * KIB, 17), "rabenseifner");
        assert_eq!(pick(Operation::Broadcast, 64 * KIB, 4), "binomial");
        assert_eq!(pick(Operation::Broadcast, 64 * KIB + 1, 4), "chain");
        assert_eq!(pick(Operation::Reduce, 64 * KIB, 4), "binomial");
        assert_eq!(pick(Operation::Reduce, 64 * KIB + 1, 4), "chain");
        for op in [Operation::AllGather, Operation::ReduceScatter] {
            assert_eq!(pick(op, 1 << 30, 8), "direct");
            assert_eq!(pick(op, 4 * KIB + 1, 9), "ring");
        }
        assert_eq!(pick(Operation::AllGather, 4 * KIB, 9), "bruck");
        assert_eq!(pick(Operation::ReduceScatter, 4 * KIB, 9), "halving");
        for op in [Operation::Gather, Operation::Scatter] {
            assert_eq!(pick(op, 8, 8), "direct");
            assert_eq!(pick(op, 4 * KIB, 9), "binomial");
            assert_eq!(pick(op, 4 * KIB + 1, 9), "direct");
        }
        assert_eq!(pick(Operation::AllToAll, 1, 8), "direct");
        assert_eq!(pick(Operation::AllToAll, 256, 9), "bruck");
        assert_eq!(pick(Operation::AllToAll, 257, 9), "pairwise");
        for op in [Operation::Scan, Operation::Exscan] {
            assert_eq!(pick(op, 64 * KIB, 9), "recursive_doubling");
            assert_eq!(pick(op, 64 * KIB + 1, 2), "chain");
        }
        assert_eq!(pick(Operation::Barrier, 0, 1), "dissemination");
    }

    #[test]
    fn what_ranks_may_not_know_alike_chooses_nothing() {
        for op in [Operation::GatherV, Operation::ScatterV, Operation::AllToAllV] {
            for n in [1, 2, 8, 9, 1000] {
                let small = select(op, 0, n, true, None).unwrap();
                assert_eq!(small, select(op, usize::MAX, n, true, None).unwrap());
            }
        }
    }

    #[test]
    fn operators_that_do_not_commute_get_ordered_algorithms_at_every_size() {
        let ops = [Operation::AllReduce, Operation::Reduce, Operation::ReduceScatter, Operation::ReduceScatterV];
        for op in ops.into_iter().chain([Operation::Scan, Operation::Exscan]) {
            for shift in 0..40 {
                for n in [1, 2, 8, 9, 1000] {
                    let a = select(op, 1 << shift, n, false, None).unwrap();
                    assert!(a.keeps_order(), "{a} for {} bytes on {n} ranks", 1u64 << shift);
                }
            }
        }
    }

    #[test]
    fn forced_names_are_checked_and_the_error_lists_the_valid_ones() {
        for &a in Algorithm::ALL {
            assert_eq!(select(a.operation(), 1, 2, true, Some(a.name())).unwrap(), a);
        }
        let e = select(Operation::AllReduce, 1, 2, true, Some("rnig")).unwrap_err();
        assert!(matches!(e.kind(), ErrorKind::InvalidArgument { .. }));
        assert!(e.to_string().contains("direct, recursive_doubling, rabenseifner, ring"), "{e}");
        let e = select(Operation::AllReduce, 1, 2, false, Some("ring")).unwrap_err();
        assert!(matches!(e.kind(), ErrorKind::InvalidArgument { .. }));
        assert!(e.to_string().contains("direct, recursive_doubling, rabenseifner, or leave"), "{e}");
        for forced in [None, Some("ring")] {
            let e = select(Operation::Send, 1, 2, true, forced).unwrap_err();
            assert!(matches!(e.kind(), ErrorKind::Unsupported { .. }), "{e}");
        }
    }

    #[test]
    fn a_preferred_rule_wins_and_the_table_prints_it() {
        let table = Table::default().prefer(Rule::new(Algorithm::AllReduceRing, 3 << 20, 2));
        assert_eq!(table.select(Operation::AllReduce, 8, 2, true, None).unwrap(), Algorithm::AllReduceRing);
        assert_eq!(table.select(Operation::AllReduce, 8, 3, true, None).unwrap(), Algorithm::AllReduceDirect);
        let text = table.to_string();
        let first = text.lines().nth(1).unwrap();
        for part in ["all_reduce", "3 MiB", "ring", "commutative"] {
            assert!(first.contains(part), "{first}");
        }
        assert_eq!(text.lines().count(), 1 + table.rules().len());
    }
}
