//! Rounds, and which of their pairs count.

use std::collections::BTreeMap;

use super::place::Placement;

/// What a run of one side gave: microseconds per case, and where the cores were before and after.
#[derive(Clone, Debug)]
pub struct Timed {
    /// Per case.
    pub us: Vec<f64>,
    /// Before it ran.
    pub before: Placement,
    /// After it ran.
    pub after: Placement,
}

/// What there is of one row so far.
#[derive(Clone, Debug, Default)]
pub struct Cell {
    /// Pairs (ours, theirs) by the placement that all their probes agree on. Ours is 0 where ours cannot run.
    kept: BTreeMap<Placement, Vec<(f64, f64)>>,
    /// Pairs whose probes disagree.
    pub dropped: usize,
}

impl Cell {
    /// Takes a pair in, or drops it when the cores were moved in between.
    pub fn add(&mut self, case: usize, ours: Option<&Timed>, theirs: &Timed) {
        let at = &theirs.before;
        let same = theirs.after == *at && ours.is_none_or(|o| o.before == *at && o.after == *at);
        if same {
            let pair = (ours.map_or(0.0, |o| o.us[case]), theirs.us[case]);
            self.kept.entry(at.clone()).or_default().push(pair);
        } else {
            self.dropped += 1;
        }
    }

    /// Most pairs that any placement has.
    #[must_use]
    pub fn most(&self) -> usize {
        self.kept.values().map(Vec::len).max().unwrap_or(0)
    }

    /// The placement that has most pairs, and these: only pairs of one placement make a median. Of equals the nearest.
    #[must_use]
    pub fn best(&self) -> Option<(&Placement, &[(f64, f64)])> {
        let most = self.most();
        self.kept.iter().find(|(_, p)| p.len() == most).map(|(k, p)| (k, p.as_slice()))
    }

    /// Pairs that count nowhere: dropped ones, and those of other placements than the best one.
    #[must_use]
    pub fn left_out(&self) -> usize {
        self.dropped + self.kept.values().map(Vec::len).sum::<usize>() - self.most()
    }
}

#[cfg(test)]
mod tests {
    use super::super::place::Distance;
    use super::*;

    fn at(d: Distance) -> Placement {
        Placement(vec![d])
    }

    fn run(us: f64, before: Distance, after: Distance) -> Timed {
        Timed { us: vec![us, us * 2.0], before: at(before), after: at(after) }
    }

    #[test]
    fn mixed_pairs_are_dropped() {
        use Distance::{Cache, Far};
        let mut cell = Cell::default();
        assert!(cell.best().is_none() && cell.most() == 0);
        cell.add(1, Some(&run(1.0, Cache, Cache)), &run(3.0, Cache, Cache));
        // Each of the four probes can be the odd one; or both sides are of one piece, but not of the same.
        for [a, b, c, d] in [
            [Far, Cache, Cache, Cache],
            [Cache, Far, Cache, Cache],
            [Cache, Cache, Far, Cache],
            [Cache, Cache, Cache, Far],
            [Cache, Cache, Far, Far],
        ] {
            cell.add(1, Some(&run(1.0, a, b)), &run(3.0, c, d));
        }
        assert_eq!((cell.most(), cell.dropped, cell.left_out()), (1, 5, 5));
        assert_eq!(cell.best(), Some((&at(Cache), &[(2.0, 6.0)][..])));
    }

    #[test]
    fn a_row_is_of_one_placement() {
        use Distance::{Cache, Far};
        let mut cell = Cell::default();
        for i in 0..3 {
            cell.add(0, Some(&run(f64::from(i), Far, Far)), &run(9.0, Far, Far));
        }
        for _ in 0..2 {
            cell.add(0, Some(&run(1.0, Cache, Cache)), &run(2.0, Cache, Cache));
        }
        assert_eq!(cell.best(), Some((&at(Far), &[(0.0, 9.0), (1.0, 9.0), (2.0, 9.0)][..])));
        assert_eq!((cell.dropped, cell.left_out()), (0, 2));
    }

    #[test]
    fn without_ours_the_peer_is_looked_at_alone() {
        use Distance::{Cache, Far};
        let mut cell = Cell::default();
        cell.add(0, None, &run(2.0, Cache, Cache));
        cell.add(0, None, &run(2.0, Cache, Far));
        assert_eq!((cell.most(), cell.dropped), (1, 1));
    }
}
