//! Whom an error names, and whether what has happened explains it.
//!
//! Strict: each kind of error is right for some faults only, and for the ranks that they are about. Who had nothing to do
//! with any fault may be named for one thing alone, that it has left after an error of its own.

use std::collections::BTreeSet;

use comm_core::{Error, ErrorKind, PeerCause};

/// What has happened to the ranks of a world.
#[derive(Clone, Debug, Default)]
pub(crate) struct Guilt {
    /// Ranks that were killed.
    pub(crate) killed: BTreeSet<usize>,
    /// Ranks that stood still for longer than the heartbeat timeout.
    pub(crate) silent: BTreeSet<usize>,
    /// Ways, from whom to whom, on which everything is lost.
    pub(crate) cut: BTreeSet<(usize, usize)>,
    /// Pairs whose connections have ended.
    pub(crate) parted: BTreeSet<(usize, usize)>,
    /// Ways, from whom to whom, on which a frame was lost, repeated or damaged.
    pub(crate) damaged: BTreeSet<(usize, usize)>,
    /// The rank that calls everything off, and with what words.
    pub(crate) aborts: Option<(usize, &'static str)>,
    /// Ranks that have left after an error of their own.
    pub(crate) left: BTreeSet<usize>,
}

fn at_end(pairs: &BTreeSet<(usize, usize)>, rank: usize) -> bool {
    pairs.iter().any(|(a, b)| [*a, *b].contains(&rank))
}

impl Guilt {
    /// Nothing has happened that anybody could notice.
    pub(crate) fn is_none(&self) -> bool {
        let Self { killed, silent, cut, parted, damaged, aborts, left: _ } = self;
        killed.is_empty()
            && silent.is_empty()
            && aborts.is_none()
            && [cut, parted, damaged].iter().all(|pairs| pairs.is_empty())
    }

    /// Whether others can have lost `rank` for what was done to it or to its connections.
    pub(crate) fn can_be_lost(&self, rank: usize) -> bool {
        self.killed.contains(&rank) || self.outlives(rank)
    }

    /// The same, where it lives on.
    fn outlives(&self, rank: usize) -> bool {
        self.silent.contains(&rank) || [&self.cut, &self.parted, &self.damaged].iter().any(|p| at_end(p, rank))
    }

    /// Whether somebody can see that `rank` is gone in this way.
    fn explains(&self, rank: usize, cause: PeerCause) -> bool {
        match cause {
            // Whoever cannot go on with a connection ends it.
            PeerCause::Killed => self.can_be_lost(rank),
            PeerCause::NoHeartbeat => self.silent.contains(&rank) || at_end(&self.cut, rank),
            PeerCause::Closed => self.left.contains(&rank),
            _ => false,
        }
    }

    /// Whether the words of an error of another rank are explained: whom they name.
    fn explains_words(&self, words: &str) -> Result<usize, String> {
        let told = named_in(words).ok_or("its words name no rank")?;
        let right = match told {
            Told::Failed(rank, cause) => self.explains(rank, cause),
            Told::Corrupt(rank) => self.has_damaged(rank),
        };
        let (Told::Failed(rank, _) | Told::Corrupt(rank)) = told;
        if right { Ok(rank) } else { Err(format!("nothing that has happened to rank {rank} explains its words")) }
    }

    fn has_damaged(&self, sender: usize) -> bool {
        self.damaged.iter().any(|(from, _)| *from == sender)
    }

    /// Judges an error that rank `me` got in the world to which all this has happened: whom it rightly names, or what is
    /// wrong with it.
    pub(crate) fn judge(&self, me: usize, e: &Error) -> Result<usize, String> {
        match e.kind() {
            ErrorKind::PeerFailed { rank, .. } if *rank == me => Err("it names the rank that has it".into()),
            ErrorKind::PeerFailed { rank, cause } if self.explains(*rank, *cause) => Ok(*rank),
            ErrorKind::PeerFailed { rank, cause } => {
                Err(format!("nothing that has happened to rank {rank} explains that {cause}"))
            }
            ErrorKind::Corrupt { rank: Some(rank), .. } if self.has_damaged(*rank) => Ok(*rank),
            ErrorKind::Corrupt { .. } => Err("no frame of that rank was touched".into()),
            ErrorKind::Aborted { rank, cause } => match self.aborts {
                Some((who, words)) if *rank == who && cause == words => Ok(who),
                // Who was taken for dead is told so by name; those who have lost others say whom.
                _ => match self.explains_words(cause)? {
                    own if own == me && !self.outlives(me) => {
                        Err("nothing has happened to the rank that has it".into())
                    }
                    named => Ok(named),
                },
            },
            // Nothing here keeps a rank from coming but that it is gone.
            ErrorKind::Timeout { missing, .. } | ErrorKind::Bootstrap { missing, .. } => {
                match missing.iter().find(|r| !self.can_be_lost(**r) && !self.left.contains(r)) {
                    _ if missing.is_empty() => Err("it names nobody".into()),
                    Some(r) => Err(format!("nothing has happened to rank {r}")),
                    None => Ok(missing[0]),
                }
            }
            ErrorKind::StaleGeneration { ours, theirs, rank: None } if ours < theirs && self.outlives(me) => Ok(me),
            ErrorKind::StaleGeneration { .. } => Err("nothing has happened to the rank that has it".into()),
            _ => Err("no fault leads to errors of this kind".into()),
        }
    }

    /// The same for an error of a communicator whose ranks are others: whether its kind fits for any of them.
    pub(crate) fn fits(&self, size: usize, e: &Error) -> Result<(), String> {
        let lost = |cause| (0..size).any(|r| self.explains(r, cause));
        let right = match e.kind() {
            ErrorKind::PeerFailed { cause, .. } => lost(*cause),
            ErrorKind::Corrupt { rank, .. } => rank.is_some() && !self.damaged.is_empty(),
            ErrorKind::Aborted { cause, .. } => match named_in(cause) {
                Some(Told::Failed(_, cause)) => lost(cause),
                Some(Told::Corrupt(_)) => !self.damaged.is_empty(),
                None => self.aborts.is_some_and(|(_, words)| words == cause),
            },
            ErrorKind::Timeout { missing, .. } | ErrorKind::Bootstrap { missing, .. } => {
                !missing.is_empty() && (0..size).any(|r| self.can_be_lost(r))
            }
            _ => false,
        };
        if right { Ok(()) } else { Err("no fault leads to that".into()) }
    }

    /// As the members of a list see it, numbered by their places there.
    pub(crate) fn among(&self, list: &[usize]) -> Self {
        let place = |r: &usize| list.iter().position(|m| m == r);
        let ranks = |set: &BTreeSet<usize>| set.iter().filter_map(place).collect();
        let pairs =
            |set: &BTreeSet<(usize, usize)>| set.iter().filter_map(|(a, b)| Some((place(a)?, place(b)?))).collect();
        Self {
            killed: ranks(&self.killed),
            silent: ranks(&self.silent),
            cut: pairs(&self.cut),
            parted: pairs(&self.parted),
            damaged: pairs(&self.damaged),
            aborts: None,
            left: ranks(&self.left),
        }
    }
}

/// What the words of another rank's error say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Told {
    Failed(usize, PeerCause),
    Corrupt(usize),
}

/// Reads the text of an error as [`ErrorKind`] writes it.
fn named_in(words: &str) -> Option<Told> {
    let number = |rest: &str| {
        let digits = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
        Some((rest[..digits].parse().ok()?, rest[digits..].to_owned()))
    };
    if let Some((_, rest)) = words.split_once("corrupt data from rank ") {
        return number(rest).map(|(rank, _)| Told::Corrupt(rank));
    }
    words.match_indices("rank ").find_map(|(i, w)| {
        let (rank, rest) = number(&words[i + w.len()..])?;
        let why = rest.strip_prefix(" failed: ")?;
        let causes = [PeerCause::Closed, PeerCause::Killed, PeerCause::NoHeartbeat];
        let cause = causes.into_iter().find(|c| why.starts_with(&c.to_string()))?;
        Some(Told::Failed(rank, cause))
    })
}

/// The rank that an error names as the cause.
pub(crate) fn named(e: &Error) -> Option<usize> {
    match e.kind() {
        ErrorKind::PeerFailed { rank, .. } | ErrorKind::Corrupt { rank: Some(rank), .. } => Some(*rank),
        ErrorKind::Aborted { cause, .. } => named_in(cause).map(|(Told::Failed(r, _) | Told::Corrupt(r))| r),
        ErrorKind::Timeout { missing, .. } | ErrorKind::Bootstrap { missing, .. } => missing.first().copied(),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use comm_core::Phase;

    use super::*;

    fn failed(rank: usize, cause: PeerCause) -> Error {
        ErrorKind::PeerFailed { rank, cause }.into()
    }

    fn corrupt(rank: Option<usize>) -> Error {
        ErrorKind::Corrupt { rank, what: "a checksum".into() }.into()
    }

    /// What `origin` says of an error of its own.
    fn told(origin: usize, e: &Error) -> Error {
        ErrorKind::Aborted { rank: origin, cause: e.brief() }.into()
    }

    fn late(missing: &[usize]) -> Error {
        let (phase, elapsed) = (Phase::Running, Duration::from_secs(20));
        ErrorKind::Timeout { phase, elapsed, missing: missing.to_vec(), unmatched: Vec::new() }.into()
    }

    fn absent(missing: &[usize]) -> Error {
        ErrorKind::Bootstrap { what: "x".into(), arrived: Vec::new(), missing: missing.to_vec() }.into()
    }

    fn stale() -> Error {
        ErrorKind::StaleGeneration { ours: 0, theirs: 1, rank: None }.into()
    }

    /// Every kind of fault, around ranks 1 and 2; 0 and 3 have nothing to do with it.
    fn faults() -> Vec<(&'static str, Guilt)> {
        let pair = BTreeSet::from([(1, 2)]);
        let one = BTreeSet::from([1]);
        let none = Guilt::default;
        vec![
            ("kill", Guilt { killed: one.clone(), ..none() }),
            ("pause", Guilt { silent: one, ..none() }),
            ("cut", Guilt { cut: pair.clone(), ..none() }),
            ("disconnect", Guilt { parted: pair.clone(), ..none() }),
            ("damage", Guilt { damaged: pair, ..none() }),
            ("abort", Guilt { aborts: Some((1, "enough")), ..none() }),
        ]
    }

    #[test]
    fn each_fault_explains_its_own_errors_and_no_others() {
        use PeerCause::{Closed, Killed, NoHeartbeat};
        let enough: Error = ErrorKind::Aborted { rank: 1, cause: "enough".into() }.into();
        // At rank 0, and which faults explain it.
        let cases: Vec<(Error, &[&str])> = vec![
            (failed(1, Killed), &["kill", "pause", "cut", "disconnect", "damage"]),
            (failed(2, Killed), &["cut", "disconnect", "damage"]),
            (failed(1, NoHeartbeat), &["pause", "cut"]),
            (failed(2, NoHeartbeat), &["cut"]),
            (failed(1, Closed), &[]),
            (corrupt(Some(1)), &["damage"]),
            (corrupt(Some(2)), &[]),
            (corrupt(None), &[]),
            (enough, &["abort"]),
            (told(2, &failed(1, Killed)), &["kill", "pause", "cut", "disconnect", "damage"]),
            (told(2, &failed(1, NoHeartbeat)), &["pause", "cut"]),
            (told(2, &corrupt(Some(1))), &["damage"]),
            (ErrorKind::Aborted { rank: 1, cause: "rank 1 feels bad".into() }.into(), &[]),
            (ErrorKind::Aborted { rank: 2, cause: "enough".into() }.into(), &[]),
            (ErrorKind::Aborted { rank: 1, cause: "enough!".into() }.into(), &[]),
            (late(&[1]), &["kill", "pause", "cut", "disconnect", "damage"]),
            (late(&[1, 2]), &["cut", "disconnect", "damage"]),
            (absent(&[2]), &["cut", "disconnect", "damage"]),
            (late(&[]), &[]),
            (absent(&[]), &[]),
            (stale(), &[]),
            (ErrorKind::Finalized.into(), &[]),
            (Error::invalid("x"), &[]),
        ];
        for (e, explained) in cases {
            for (fault, guilt) in faults() {
                let verdict = guilt.judge(0, &e);
                assert_eq!(verdict.is_ok(), explained.contains(&fault), "{fault}: {e}: {verdict:?}");
            }
        }
    }

    #[test]
    fn nobody_else_may_be_blamed_for_anything() {
        let causes = [PeerCause::Closed, PeerCause::Killed, PeerCause::NoHeartbeat];
        for (fault, guilt) in faults() {
            for me in [1, 2, 3] {
                let blames = causes.map(|c| failed(0, c));
                let others = [corrupt(Some(0)), late(&[0]), late(&[0, 1]), absent(&[0]), absent(&[1, 0])];
                for e in blames.iter().chain(&others) {
                    assert!(guilt.judge(me, e).is_err(), "{fault}: {e}");
                    assert!(guilt.judge(me, &told(2, e)).is_err(), "{fault}: {e}");
                }
            }
        }
    }

    #[test]
    fn who_has_left_may_be_named_for_that_alone() {
        for (fault, guilt) in faults() {
            let guilt = Guilt { left: BTreeSet::from([0]), ..guilt };
            assert_eq!(guilt.judge(3, &failed(0, PeerCause::Closed)), Ok(0), "{fault}");
            assert_eq!(guilt.judge(3, &absent(&[0])), Ok(0), "{fault}");
            assert!(guilt.judge(3, &failed(0, PeerCause::Killed)).is_err(), "{fault}");
            assert!(guilt.judge(3, &failed(0, PeerCause::NoHeartbeat)).is_err(), "{fault}");
            assert!(guilt.judge(3, &corrupt(Some(0))).is_err(), "{fault}");
        }
    }

    #[test]
    fn only_who_lives_and_was_cut_off_may_be_told_that_it_is_dead() {
        let dead = |me: usize| told(0, &failed(me, PeerCause::NoHeartbeat));
        for (fault, guilt) in faults() {
            assert_eq!(guilt.judge(1, &dead(1)).is_ok(), ["pause", "cut"].contains(&fault), "{fault}");
            assert!(guilt.judge(3, &dead(3)).is_err() && guilt.judge(3, &stale()).is_err(), "{fault}");
            let out = ["pause", "cut", "disconnect", "damage"].contains(&fault);
            assert_eq!(guilt.judge(1, &stale()).is_ok(), out, "{fault}");
            assert!(guilt.judge(1, &failed(1, PeerCause::Killed)).is_err(), "{fault}");
        }
    }
}
