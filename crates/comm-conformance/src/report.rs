//! What came out: per rank, and merged.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use comm_core::{Error, Result};

use crate::plan::Case;

/// Complaints that are kept in words; more are only counted.
const KEPT: usize = 40;

/// What one rank saw in the cases of its world.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RankReport {
    pub(crate) rank: usize,
    /// Cases that were run to their end, well or badly.
    pub(crate) done: usize,
    /// Number of the case, and what was wrong.
    pub(crate) complaints: Vec<(usize, String)>,
    /// Number of the case, and a hash of what all ranks should have alike.
    pub(crate) hashes: Vec<(usize, u64)>,
}

impl RankReport {
    pub(crate) fn complain(&mut self, case: usize, what: impl Into<String>) {
        self.complaints.push((case, what.into()));
    }

    /// The report as lines of text, for the way from a rank's process to the one that collects.
    #[must_use]
    pub fn to_text(&self) -> String {
        let mut text = format!("rank {} {}\n", self.rank, self.done);
        for (case, what) in &self.complaints {
            text.push_str(&format!("bad {case} {}\n", what.replace('\n', " | ")));
        }
        for (case, hash) in &self.hashes {
            text.push_str(&format!("hash {case} {hash:x}\n"));
        }
        text.push_str("end\n");
        text
    }

    /// Reads [`to_text`](Self::to_text)'s lines; text before and after is passed over.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` when there is no whole report.
    pub fn from_text(text: &str) -> Result<Self> {
        let mut report: Option<Self> = None;
        for line in text.lines() {
            let mut words = line.splitn(3, ' ');
            let (key, number, rest) = (words.next(), words.next().and_then(|w| w.parse().ok()), words.next());
            match (key, number, rest, &mut report) {
                (Some("rank"), Some(rank), Some(rest), None) => {
                    let done = rest.parse().map_err(|_| Error::invalid("a rank's report is damaged"))?;
                    report = Some(Self { rank, done, ..Self::default() });
                }
                (Some("bad"), Some(case), Some(what), Some(r)) => {
                    r.complain(case, what);
                }
                (Some("hash"), Some(case), Some(hash), Some(r)) => {
                    let hash =
                        u64::from_str_radix(hash, 16).map_err(|_| Error::invalid("a rank's report is damaged"))?;
                    r.hashes.push((case, hash));
                }
                (Some("end"), None, None, Some(_)) => return report.ok_or_else(|| Error::invalid("no report")),
                _ => {}
            }
        }
        Err(Error::invalid("a rank's report is missing or not whole"))
    }
}

/// A case that failed.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Failure {
    /// Ranks of its world.
    pub world: usize,
    /// The rank that complained; `None` when ranks differ from each other.
    pub rank: Option<usize>,
    /// The case, with all its factors.
    pub case: String,
    /// What was wrong.
    pub what: String,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "world of {}", self.world)?;
        if let Some(rank) = self.rank {
            write!(f, ", rank {rank}")?;
        }
        write!(f, ": {}: {}", self.case, self.what)
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Tally {
    cases: usize,
    failed: usize,
}

/// What came out of a run.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    groups: BTreeMap<String, Tally>,
    failures: Vec<Failure>,
    /// Complaints that were not kept.
    more: usize,
}

impl Report {
    /// Cases that went well.
    #[must_use]
    pub fn passed(&self) -> usize {
        self.groups.values().map(|t| t.cases - t.failed).sum()
    }

    /// Cases that did not, those that could not be run any more included.
    #[must_use]
    pub fn failed(&self) -> usize {
        self.groups.values().map(|t| t.failed).sum()
    }

    /// What was wrong, as far as it was kept.
    #[must_use]
    pub fn failures(&self) -> &[Failure] {
        &self.failures
    }

    /// The number of cases per operation, or per group of cases that are not of one operation (in brackets).
    pub fn counts(&self) -> impl Iterator<Item = (&str, usize)> {
        self.groups.iter().map(|(name, t)| (name.as_str(), t.cases))
    }

    /// Adds what came out of another run.
    pub fn add(&mut self, other: Self) {
        for (name, t) in other.groups {
            let mine = self.groups.entry(name).or_default();
            mine.cases += t.cases;
            mine.failed += t.failed;
        }
        self.more += other.more;
        for f in other.failures {
            self.keep(f);
        }
    }

    fn keep(&mut self, f: Failure) {
        if self.failures.len() < KEPT {
            self.failures.push(f);
        } else {
            self.more += 1;
        }
    }

    /// A report that says that a world could not be run at all.
    pub(crate) fn lost(cases: &[Case], world: usize, what: &str) -> Self {
        let mut report = Self::default();
        for c in cases {
            let t = report.groups.entry(c.group().to_owned()).or_default();
            t.cases += 1;
            t.failed += 1;
        }
        report.keep(Failure { world, rank: None, case: "all cases".into(), what: what.to_owned() });
        report
    }

    /// Puts together what the ranks of one world saw. `None`: the rank left no report.
    pub(crate) fn merge(cases: &[Case], ranks: &[Option<RankReport>]) -> Self {
        let world = ranks.len();
        let mut report = Self::default();
        let mut bad = BTreeSet::new();
        let name = |case: usize| cases.get(case).map_or_else(|| "the end".to_owned(), Case::describe);
        let mut complaints: Vec<(usize, usize, &str)> = Vec::new();
        for (rank, r) in ranks.iter().enumerate() {
            let Some(r) = r else {
                bad.extend(0..=cases.len());
                let what = "it left no report".to_owned();
                report.keep(Failure { world, rank: Some(rank), case: "all cases".into(), what });
                continue;
            };
            bad.extend(r.done..cases.len());
            complaints.extend(r.complaints.iter().map(|(case, what)| (*case, rank, what.as_str())));
        }
        // In the order of the cases: what came first may be the cause of the rest.
        complaints.sort_by_key(|c| (c.0, c.1));
        for (case, rank, what) in complaints {
            bad.insert(case);
            report.keep(Failure { world, rank: Some(rank), case: name(case), what: what.to_owned() });
        }
        let mut alike: BTreeMap<usize, BTreeSet<u64>> = BTreeMap::new();
        for (case, hash) in ranks.iter().flatten().flat_map(|r| &r.hashes) {
            alike.entry(*case).or_default().insert(*hash);
        }
        for (case, _) in alike.into_iter().filter(|(_, hashes)| hashes.len() > 1) {
            bad.insert(case);
            let what = "the ranks do not have identical bits".to_owned();
            report.keep(Failure { world, rank: None, case: name(case), what });
        }
        for (i, c) in cases.iter().enumerate() {
            let t = report.groups.entry(c.group().to_owned()).or_default();
            t.cases += 1;
            t.failed += usize::from(bad.contains(&i));
        }
        let end = report.groups.entry("finalize".into()).or_default();
        end.cases += 1;
        end.failed += usize::from(bad.contains(&cases.len()));
        report
    }
}

/// A line per operation, then what was wrong, then `N passed, N failed`.
impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (name, t) in &self.groups {
            write!(f, "{name:<26}{:>8} cases", t.cases)?;
            if t.failed > 0 {
                write!(f, ", {} failed", t.failed)?;
            }
            writeln!(f)?;
        }
        for failure in &self.failures {
            writeln!(f, "FAILED {failure}")?;
        }
        if self.more > 0 {
            writeln!(f, "and {} more complaints", self.more)?;
        }
        write!(f, "{} passed, {} failed", self.passed(), self.failed())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use comm_core::Operation;

    fn cases() -> Vec<Case> {
        [Operation::Barrier, Operation::AllReduce, Operation::AllReduce].map(Case::Support).to_vec()
    }

    fn rank(rank: usize, done: usize) -> RankReport {
        RankReport { rank, done, ..RankReport::default() }
    }

    #[test]
    fn reports_travel_as_text() {
        let mut r = rank(3, 2);
        r.complain(1, "two\nlines");
        r.complain(0, "");
        r.hashes.push((2, u64::MAX));
        let text = format!("noise\n{}more noise\n", r.to_text());
        let back = RankReport::from_text(&text).unwrap();
        assert_eq!((back.rank, back.done, &back.hashes), (3, 2, &r.hashes));
        assert_eq!(back.complaints[1], (0, String::new()));
        assert_eq!(back.complaints[0], (1, "two | lines".to_owned()));
        let cut = text.replace("end\n", "");
        assert!(RankReport::from_text(&cut).is_err());
    }

    #[test]
    fn a_case_fails_once_and_what_was_not_run_fails_too() {
        let (mut a, b) = (rank(0, 2), rank(1, 3));
        a.complain(0, "x");
        a.complain(0, "y");
        let r = Report::merge(&cases(), &[Some(a), Some(b)]);
        assert_eq!((r.passed(), r.failed()), (2, 2));
        assert!(r.to_string().ends_with("2 passed, 2 failed"), "{r}");
    }

    #[test]
    fn different_bits_and_missing_ranks_are_failures() {
        let (mut a, mut b) = (rank(0, 3), rank(1, 3));
        a.hashes.push((1, 5));
        b.hashes.push((1, 6));
        let r = Report::merge(&cases(), &[Some(a.clone()), Some(b)]);
        assert_eq!(r.failed(), 1);
        assert!(r.to_string().contains("identical bits"));
        assert_eq!(Report::merge(&cases(), &[Some(a), None]).failed(), 4);
    }
}
