//! Covering arrays: few rows in which every possible pair of values of two factors occurs.

use crate::value::mix;

/// The values of one row, one index per factor.
pub(crate) type Row = Vec<usize>;

/// Rows that cover every pair of values that `possible` allows.
///
/// `possible` is asked about rows in which some factors are still open (`None`); it must not refuse what it would
/// allow when more is open. Greedy: each row starts from a pair that is missing, and takes for every other factor
/// the value that covers most of what is missing. The same arguments give the same rows.
pub(crate) fn cover(sizes: &[usize], seed: u64, possible: impl Fn(&[Option<usize>]) -> bool) -> Vec<Row> {
    let factors = sizes.len();
    if factors < 2 {
        return (0..sizes.first().copied().unwrap_or(0)).map(|v| vec![v]).collect();
    }
    let mut missing = Missing::new(sizes);
    let mut rows = Vec::new();
    let mut turn = seed;
    while let Some(pair) = missing.first() {
        // A greedy choice may run into a dead end where another order would not.
        let row = (0..4).find_map(|_| {
            turn = mix(turn);
            fill(sizes, pair, turn, &missing, &possible)
        });
        match row {
            Some(row) => {
                missing.take(&row);
                rows.push(row);
            }
            // The pair does not go together.
            None => missing.drop_pair(pair),
        }
    }
    rows
}

/// Two factors with a value each.
type Pair = ((usize, usize), (usize, usize));

fn fill(
    sizes: &[usize],
    ((f, a), (g, b)): Pair,
    turn: u64,
    missing: &Missing,
    possible: &impl Fn(&[Option<usize>]) -> bool,
) -> Option<Row> {
    let mut row: Vec<Option<usize>> = vec![None; sizes.len()];
    (row[f], row[g]) = (Some(a), Some(b));
    if !possible(&row) {
        return None;
    }
    let mut rest: Vec<usize> = (0..sizes.len()).filter(|k| row[*k].is_none()).collect();
    rest.sort_by_key(|k| mix(turn ^ *k as u64));
    for k in rest {
        let start = mix(turn ^ (k as u64) << 32) as usize % sizes[k];
        let mut best = None;
        for v in (0..sizes[k]).map(|v| (start + v) % sizes[k]) {
            row[k] = Some(v);
            if !possible(&row) {
                continue;
            }
            let gain =
                (0..sizes.len()).filter(|j| *j != k && row[*j].is_some_and(|w| missing.has((k, v), (*j, w)))).count();
            if best.is_none_or(|(most, _)| gain > most) {
                best = Some((gain, v));
            }
        }
        row[k] = Some(best?.1);
    }
    row.into_iter().collect()
}

/// Pairs that no row has yet.
struct Missing {
    sizes: Vec<usize>,
    /// Per pair of factors, a flag per pair of values.
    open: Vec<Vec<bool>>,
    /// Everything before is covered.
    from: (usize, usize),
}

impl Missing {
    fn new(sizes: &[usize]) -> Self {
        let n = sizes.len();
        let open = (0..n * n)
            .map(|k| if k / n < k % n { vec![true; sizes[k / n] * sizes[k % n]] } else { Vec::new() })
            .collect();
        Self { sizes: sizes.to_vec(), open, from: (0, 0) }
    }

    fn place(&self, p: (usize, usize), q: (usize, usize)) -> (usize, usize) {
        let ((f, a), (g, b)) = if p.0 < q.0 { (p, q) } else { (q, p) };
        (f * self.sizes.len() + g, a * self.sizes[g] + b)
    }

    fn has(&self, p: (usize, usize), q: (usize, usize)) -> bool {
        let (k, i) = self.place(p, q);
        self.open[k][i]
    }

    fn first(&mut self) -> Option<Pair> {
        let n = self.sizes.len();
        while self.from.0 < self.open.len() {
            let k = self.from.0;
            if let Some(i) = self.open[k][self.from.1..].iter().position(|o| *o) {
                self.from.1 += i;
                let (f, g) = (k / n, k % n);
                return Some(((f, self.from.1 / self.sizes[g]), (g, self.from.1 % self.sizes[g])));
            }
            self.from = (k + 1, 0);
        }
        None
    }

    fn drop_pair(&mut self, (p, q): Pair) {
        let (k, i) = self.place(p, q);
        self.open[k][i] = false;
    }

    fn take(&mut self, row: &[usize]) {
        for f in 0..row.len() {
            for g in f + 1..row.len() {
                self.drop_pair(((f, row[f]), (g, row[g])));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_possible_pair_is_covered_by_possible_rows() {
        let sizes = [5, 3, 7, 2, 4];
        // The first factor's 4 goes only with the second's 0.
        let possible = |r: &[Option<usize>]| !(r[0] == Some(4) && r[1].is_some_and(|v| v != 0));
        let rows = cover(&sizes, 1, possible);
        for f in 0..5 {
            for g in f + 1..5 {
                for a in 0..sizes[f] {
                    for b in 0..sizes[g] {
                        let there = rows.iter().any(|r| r[f] == a && r[g] == b);
                        let allowed = !((f, g) == (0, 1) && a == 4 && b != 0);
                        assert_eq!(there, allowed, "{f}={a} {g}={b}");
                    }
                }
            }
        }
        assert!(rows.iter().all(|r| possible(&r.iter().map(|v| Some(*v)).collect::<Vec<_>>())));
        // The two largest factors need 35.
        assert!(rows.len() < 50, "{}", rows.len());
        assert_eq!(rows, cover(&sizes, 1, possible));
    }

    #[test]
    fn one_factor_is_listed() {
        assert_eq!(cover(&[3], 1, |_| true), [[0], [1], [2]]);
        assert!(cover(&[], 1, |_| true).is_empty());
    }
}
