//! Whom an error names, and whether that is right.

use comm_core::{Error, ErrorKind};

/// The ranks to which something happened.
#[derive(Clone, Debug)]
pub(crate) struct Culprits(pub(crate) Vec<usize>);

impl Culprits {
    /// Every rank: for asking whom an error names.
    pub(crate) fn any(size: usize) -> Self {
        Self((0..size).collect())
    }

    fn has(&self, rank: usize) -> bool {
        self.0.contains(&rank)
    }
}

/// The verdict on an error.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Verdict {
    /// The rank that it names as the cause.
    pub(crate) named: Option<usize>,
    /// It is of a kind that a fault explains, and names nobody to whom nothing happened.
    pub(crate) right: bool,
}

/// Judges an error of a rank to whose world something has happened.
pub(crate) fn judge(e: &Error, culprits: &Culprits) -> Verdict {
    let name = |r: usize| Verdict { named: Some(r), right: culprits.has(r) };
    match e.kind() {
        ErrorKind::PeerFailed { rank, .. } | ErrorKind::Corrupt { rank: Some(rank), .. } => name(*rank),
        // Who called it off says why: the cause names the culprit.
        ErrorKind::Aborted { rank, cause } => match named_in(cause) {
            Some(r) => name(r),
            None => Verdict { named: None, right: culprits.has(*rank) },
        },
        ErrorKind::Timeout { missing, unmatched, .. } => match missing.iter().find(|r| culprits.has(**r)) {
            Some(r) => name(*r),
            // All had arrived, and somebody stopped on the way; or those who wait for the culprit are missing too.
            None => Verdict { named: None, right: missing.is_empty() && !unmatched.is_empty() },
        },
        // An attempt at a new membership: who gives it up first is what the others see of it.
        ErrorKind::Bootstrap { missing, .. } => match missing.iter().find(|r| culprits.has(**r)) {
            Some(r) => name(*r),
            None => Verdict { named: None, right: false },
        },
        _ => Verdict { named: None, right: false },
    }
}

/// The rank of which the text of an error says that it failed.
fn named_in(cause: &str) -> Option<usize> {
    let at = ["rank ", "from rank "].iter().filter_map(|w| {
        let ends = [" failed", ": "];
        let i = cause.find(w)? + w.len();
        let rest = &cause[i..];
        let digits = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
        ends.iter().any(|e| rest[digits..].starts_with(e)).then(|| rest[..digits].parse().ok()).flatten()
    });
    at.into_iter().next()
}
