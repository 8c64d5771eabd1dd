//! What the buffers of one rank hold before and after a call, for every operation.

use std::ops::Range;

use comm_core::Operation;

use crate::case::{CallCase, Place};
use crate::expect::{Want, reduce};
use crate::value::{PERIOD, Values};

/// Where the elements of a block come from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Source {
    /// What memory held before.
    Sentinel,
    /// A rank's contribution, from this element on.
    From(usize, usize),
    /// The reduction of the contributions of these ranks, from this element on.
    Fold(Range<usize>, usize),
    /// Anything.
    Any,
}

/// A part of a buffer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Block {
    pub(crate) len: usize,
    pub(crate) before: Source,
    pub(crate) after: Source,
}

impl Block {
    const fn new(len: usize, before: Source, after: Source) -> Self {
        Self { len, before, after }
    }

    /// One that the call leaves alone.
    fn kept(len: usize, source: Source) -> Self {
        Self { len, before: source.clone(), after: source }
    }

    /// What the elements must be afterwards, for as many as do not repeat. `None`: nothing is asked of them here.
    pub(crate) fn wants(&self, v: &Values) -> Option<Vec<Want>> {
        let n = self.len.min(PERIOD);
        match &self.after {
            Source::Sentinel | Source::Any => None,
            Source::From(rank, start) => Some((0..n).map(|k| Want::Bits(v.get(*rank, start + k))).collect()),
            Source::Fold(ranks, start) => {
                let oper = v.oper?;
                Some((0..n).map(|k| reduce(v, oper, ranks.clone(), start + k)).collect())
            }
        }
    }
}

/// The buffers of one rank. `None`: it passes none.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Layout {
    pub(crate) input: Option<Vec<Block>>,
    pub(crate) output: Option<Vec<Block>>,
}

/// Where each block starts.
pub(crate) fn offsets(counts: &[usize]) -> Vec<usize> {
    counts
        .iter()
        .scan(0, |at, n| {
            let here = *at;
            *at += n;
            Some(here)
        })
        .collect()
}

/// The layout of rank `me` of `n`.
pub(crate) fn layout(case: &CallCase, n: usize, me: usize) -> Layout {
    use Operation as O;
    let in_place = case.place == Place::In;
    // Ranks whose buffer does not matter pass none, or one that must stay as it is.
    let shy = (case.seed >> 7).is_multiple_of(2);
    match case.op {
        O::SendRecv | O::Send | O::Recv => {
            let (len, from) = (|r: usize| message(case, r), (me + n - case.root % n) % n);
            Layout {
                input: Some(vec![Block::kept(len(me), Source::From(me, 0))]),
                output: Some(vec![Block::new(len(from), Source::Sentinel, Source::From(from, 0))]),
            }
        }
        O::Batch => {
            let len = |from: usize, k: usize| if case.count == 0 { 0 } else { case.count + (from + k) % 3 };
            let start = |k: usize| 101 * k;
            let input = |k: usize| Block::kept(len(me, k), Source::From(me, start(k)));
            // Message `t` of rank `p` to this rank is number `2 me + t` there.
            let output = |k: usize| {
                let (from, number) = (k / 2, 2 * me + k % 2);
                Block::new(len(from, number), Source::Sentinel, Source::From(from, start(number)))
            };
            Layout { input: Some((0..2 * n).map(input).collect()), output: Some((0..2 * n).map(output).collect()) }
        }
        O::Broadcast => Layout {
            input: None,
            output: Some(vec![Block::new(case.count, Source::From(me, 0), Source::From(case.root, 0))]),
        },
        O::AllReduce | O::Reduce | O::Scan | O::Exscan => {
            let ranks = match case.op {
                O::Scan => 0..me + 1,
                O::Exscan => 0..me,
                _ => 0..n,
            };
            let written = !ranks.is_empty() && (case.op != O::Reduce || me == case.root);
            let before = if in_place { Source::From(me, 0) } else { Source::Sentinel };
            let after = if written { Source::Fold(ranks, 0) } else { before.clone() };
            let input = (!in_place).then(|| vec![Block::kept(case.count, Source::From(me, 0))]);
            let passed = in_place || written || case.op != O::Reduce || !shy;
            Layout { input, output: passed.then(|| vec![Block::new(case.count, before, after)]) }
        }
        O::AllGather | O::AllGatherV | O::Gather | O::GatherV => gathered(case, n, me, shy),
        O::Scatter | O::ScatterV => scattered(case, n, me, shy),
        O::ReduceScatter | O::ReduceScatterV => {
            let counts = case.counts(n);
            let at = offsets(&counts);
            let mine = Source::Fold(0..n, at[me]);
            let part = |r: usize| Source::From(me, at[r]);
            if in_place {
                let block = |r: usize| Block::new(counts[r], part(r), if r == me { mine.clone() } else { Source::Any });
                return Layout { input: None, output: Some((0..n).map(block).collect()) };
            }
            Layout {
                input: Some((0..n).map(|r| Block::kept(counts[r], part(r))).collect()),
                output: Some(vec![Block::new(counts[me], Source::Sentinel, mine)]),
            }
        }
        O::AllToAll | O::AllToAllV => {
            let m = case.matrix(n);
            let at: Vec<Vec<usize>> = m.iter().map(|row| offsets(row)).collect();
            let out = |r: usize| {
                let before = if in_place { Source::From(me, at[me][r]) } else { Source::Sentinel };
                Block::new(m[r][me], before, Source::From(r, at[r][me]))
            };
            let input = || (0..n).map(|r| Block::kept(m[me][r], Source::From(me, at[me][r]))).collect();
            Layout { input: (!in_place).then(input), output: Some((0..n).map(out).collect()) }
        }
        _ => Layout::default(),
    }
}

/// The length of the message that a rank sends.
pub(crate) const fn message(case: &CallCase, rank: usize) -> usize {
    if case.count == 0 { 0 } else { case.count + rank % 3 }
}

fn gathered(case: &CallCase, n: usize, me: usize, shy: bool) -> Layout {
    let counts = case.counts(n);
    let in_place = case.place == Place::In;
    let everywhere = matches!(case.op, Operation::AllGather | Operation::AllGatherV);
    let shard = Block::kept(counts[me], Source::From(me, 0));
    let receives = everywhere || me == case.root;
    if in_place && !receives {
        return Layout { input: None, output: Some(vec![shard]) };
    }
    let block = |r: usize| {
        let before = if in_place && r == me { Source::From(me, 0) } else { Source::Sentinel };
        let after = if receives { Source::From(r, 0) } else { Source::Sentinel };
        Block::new(counts[r], before, after)
    };
    let passed = receives || !shy;
    Layout { input: (!in_place).then(|| vec![shard]), output: passed.then(|| (0..n).map(block).collect()) }
}

fn scattered(case: &CallCase, n: usize, me: usize, shy: bool) -> Layout {
    let counts = case.counts(n);
    let at = offsets(&counts);
    let in_place = case.place == Place::In;
    let all = || (0..n).map(|r| Block::kept(counts[r], Source::From(me, at[r]))).collect::<Vec<_>>();
    if in_place && me == case.root {
        return Layout { input: None, output: Some(all()) };
    }
    let shard = Block::new(counts[me], Source::Sentinel, Source::From(case.root, at[me]));
    let passed = !in_place && (me == case.root || !shy);
    Layout { input: passed.then(all), output: Some(vec![shard]) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::case::{Form, Split};
    use crate::kind::Kind;
    use crate::value::Style;

    fn case(op: Operation, place: Place) -> CallCase {
        CallCase {
            op,
            place,
            form: Form::Sync,
            kind: Kind::U8,
            oper: None,
            style: Style::Exact,
            count: 4,
            split: Split::Uneven,
            root: 1,
            algo: None,
            seed: 5,
        }
    }

    #[test]
    fn blocks_of_an_all_to_all_fit_together() {
        let c = case(Operation::AllToAllV, Place::Out);
        let all: Vec<Layout> = (0..5).map(|r| layout(&c, 5, r)).collect();
        for (i, from) in all.iter().enumerate() {
            for (j, to) in all.iter().enumerate() {
                let (s, d) = (&from.input.as_ref().unwrap()[j], &to.output.as_ref().unwrap()[i]);
                assert_eq!((s.len, &s.after), (d.len, &d.after));
            }
        }
    }

    #[test]
    fn what_is_not_written_is_kept() {
        let l = layout(&case(Operation::Exscan, Place::Out), 3, 0);
        assert_eq!(l.output.unwrap()[0].after, Source::Sentinel);
        let l = layout(&case(Operation::Reduce, Place::In), 3, 0);
        assert_eq!(l.output.unwrap()[0].after, Source::From(0, 0));
        let l = layout(&case(Operation::ScatterV, Place::In), 3, 1);
        assert!(l.output.unwrap().iter().all(|b| b.before == b.after));
    }

    #[test]
    fn uneven_splits_have_zeros() {
        let c = case(Operation::AllGatherV, Place::Out);
        let lengths: Vec<usize> = (0..20).flat_map(|seed| CallCase { seed, ..c.clone() }.counts(4)).collect();
        assert!(lengths.contains(&0) && lengths.iter().any(|l| *l > 4), "{lengths:?}");
    }
}
