//! Errors are values: what happened, in which call, on which ranks, and what to do.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::desc::{OpDesc, Operation};

/// The result type of this workspace.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why a peer is gone.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum PeerCause {
    /// It dropped or finalized its communicator while this rank still needed it.
    Closed,
    /// Its process ended, or its connection broke, without a goodbye.
    Killed,
    /// It stopped answering heartbeats.
    NoHeartbeat,
}

impl fmt::Display for PeerCause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Closed => "it closed its communicator",
            Self::Killed => "its process ended or its connection broke",
            Self::NoHeartbeat => "it stopped sending heartbeats",
        })
    }
}

/// How far an operation was when it timed out.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Phase {
    /// It had not started to run.
    Queued,
    /// It was running and waited for peers.
    Running,
}

/// What went wrong.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum ErrorKind {
    /// The caller passed something impossible. The communicator stays usable.
    InvalidArgument {
        /// What is wrong and what would be right.
        what: String,
    },
    /// The backend, or this build, cannot do it. Nothing was sent.
    Unsupported {
        /// What was asked for.
        what: String,
        /// Why it cannot be done, and what can.
        reason: String,
    },
    /// Ranks made different calls. The communicator has failed.
    Mismatch {
        /// The sequence number of the call.
        seq: u64,
        /// The ranks whose call differs from this rank's.
        ranks: Vec<usize>,
        /// Their call.
        theirs: OpDesc,
        /// This rank's call.
        ours: OpDesc,
    },
    /// Another rank refused its part of this call (bad argument there, or an observer's veto).
    /// The communicator stays usable; this call had no result.
    PeerRefused {
        /// The rank that refused.
        rank: usize,
        /// Why.
        reason: String,
    },
    /// The call did not complete in time. The communicator has failed.
    Timeout {
        /// How far it was.
        phase: Phase,
        /// Time since the call.
        elapsed: Duration,
        /// Ranks that are not known to have arrived at this call; empty when all had.
        missing: Vec<usize>,
        /// What the call still waited for, in words: messages without counterpart; of a collective that every rank
        /// had begun, whose data did not come.
        unmatched: Vec<String>,
    },
    /// A peer is gone. The communicator has failed.
    PeerFailed {
        /// Its rank.
        rank: usize,
        /// How it was lost.
        cause: PeerCause,
    },
    /// Received bytes were damaged or not of our protocol. The communicator has failed.
    Corrupt {
        /// The rank they came from, if known.
        rank: Option<usize>,
        /// What was wrong with them.
        what: String,
    },
    /// The communicator was aborted, here or elsewhere.
    Aborted {
        /// The rank that aborted it.
        rank: usize,
        /// Its reason, with the original error's text.
        cause: String,
    },
    /// A message or handle belongs to an older membership of the communicator.
    StaleGeneration {
        /// The generation of this communicator, or of the one whose handle is stale.
        ours: u32,
        /// The generation that was met.
        theirs: u32,
        /// The member that it is about, if it is about one: who has moved on to another membership (`theirs` is newer
        /// than `ours`), or whose handle in a list is stale (`theirs` is older). `None` when it is this communicator.
        rank: Option<usize>,
    },
    /// The communicator could not be created.
    Bootstrap {
        /// What was being done.
        what: String,
        /// Ranks that arrived, with their hosts.
        arrived: Vec<String>,
        /// Ranks that did not.
        missing: Vec<usize>,
    },
    /// Two processes run incompatible versions.
    VersionSkew {
        /// This process's protocol version.
        ours: u32,
        /// The other's.
        theirs: u32,
        /// Who the other is.
        who: String,
    },
    /// The communicator was finalized, or is being finalized, or its last handle was dropped.
    Finalized,
    /// A library underneath failed.
    Backend {
        /// Its name.
        library: String,
        /// Its code.
        code: i64,
        /// Its text.
        text: String,
    },
    /// The operating system failed.
    Io {
        /// What was being done, and the system's answer.
        what: String,
    },
}

impl ErrorKind {
    /// The variant's name, for logs and JSON.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        match self {
            Self::InvalidArgument { .. } => "InvalidArgument",
            Self::Unsupported { .. } => "Unsupported",
            Self::Mismatch { .. } => "Mismatch",
            Self::PeerRefused { .. } => "PeerRefused",
            Self::Timeout { .. } => "Timeout",
            Self::PeerFailed { .. } => "PeerFailed",
            Self::Corrupt { .. } => "Corrupt",
            Self::Aborted { .. } => "Aborted",
            Self::StaleGeneration { .. } => "StaleGeneration",
            Self::Bootstrap { .. } => "Bootstrap",
            Self::VersionSkew { .. } => "VersionSkew",
            Self::Finalized => "Finalized",
            Self::Backend { .. } => "Backend",
            Self::Io { .. } => "Io",
        }
    }

    /// What the caller can do about it.
    #[must_use]
    pub fn advice(&self) -> &'static str {
        match self {
            Self::Mismatch { theirs, ours, .. } if is_unmatched(theirs, ours) => {
                "match every send with a receive before finalize"
            }
            Self::Mismatch { theirs, ours, .. } if differ_in_length(theirs, ours) => {
                "make both ranks use the same length and type for what they exchange"
            }
            Self::Mismatch { theirs, ours, .. } if theirs.disagreement(ours) == Some("algorithm") => {
                "set RUSTCOMMS_ALGO, and the hint `algo`, alike on all ranks"
            }
            Self::InvalidArgument { .. } => "correct the argument; the communicator is still usable",
            Self::Unsupported { .. } => "ask `supports` first, or choose another backend, operator or type",
            Self::Mismatch { .. } => "make every rank issue the same calls in the same order",
            Self::PeerRefused { .. } => "look at that rank's own error; the communicator is still usable",
            Self::Timeout { .. } => "look at what the missing ranks are doing, or raise the timeout",
            Self::PeerFailed { .. } => {
                "look at that rank's log; the others can go on without it: `shrink`, or `reconfigure` with their handles"
            }
            Self::Corrupt { .. } => "check that only rustcomms processes use this port, and the network's health",
            Self::Aborted { .. } => "look at the cause; those who are left can go on: `shrink`, or `reconfigure`",
            Self::StaleGeneration { .. } => "use the handles of the newest membership",
            Self::Bootstrap { missing, .. } if missing.is_empty() => "mend what it says, and start the ranks again",
            Self::Bootstrap { .. } => {
                "start the missing ranks and check that every rank has the same master address and world size"
            }
            Self::VersionSkew { .. } => "run the same version of rustcomms on every rank",
            Self::Finalized => "make no calls after finalize; create a new communicator",
            Self::Backend { .. } => "see the library's documentation for the code",
            Self::Io { .. } => "see the system's message",
        }
    }

    /// Whether the communicator can be used after this error without reconfiguring it.
    #[must_use]
    pub const fn leaves_communicator_usable(&self) -> bool {
        matches!(self, Self::InvalidArgument { .. } | Self::Unsupported { .. } | Self::PeerRefused { .. })
    }
}

/// Whether one is a message and the other finalize: it has no counterpart.
fn is_unmatched(theirs: &OpDesc, ours: &OpDesc) -> bool {
    let end = |d: &OpDesc| d.operation == Operation::Finalize;
    (end(theirs) && !ours.operation.is_collective()) || (end(ours) && !theirs.operation.is_collective())
}

/// Whether two ends of a message, or of a block between two ranks, disagree about it and nothing else.
fn differ_in_length(theirs: &OpDesc, ours: &OpDesc) -> bool {
    let message = !theirs.operation.is_collective() && !ours.operation.is_collective();
    message || (ours.operation.is_pairwise() && theirs.disagreement(ours).is_none() && theirs.count != ours.count)
}

fn ranks(f: &mut fmt::Formatter<'_>, list: &[usize]) -> fmt::Result {
    match list {
        [] => f.write_str("no rank"),
        [one] => write!(f, "rank {one}"),
        many => {
            f.write_str("ranks ")?;
            for (i, r) in many.iter().enumerate() {
                write!(f, "{}{r}", if i == 0 { "" } else { ", " })?;
            }
            Ok(())
        }
    }
}

impl fmt::Display for ErrorKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::InvalidArgument { what } => write!(f, "invalid argument: {what}"),
            Self::Unsupported { what, reason } => write!(f, "{what} is not supported: {reason}"),
            Self::Mismatch { seq, ranks: r, theirs, ours } => {
                let message = !theirs.operation.is_collective() || !ours.operation.is_collective();
                let what = if message { "message" } else { "collective" };
                write!(f, "calls do not match at {what} {seq}: ")?;
                ranks(f, r)?;
                write!(f, " called {theirs} while this rank called {ours}")?;
                // The two ends of a message make different calls by nature.
                let ends = message && theirs.operation != Operation::Finalize && ours.operation != Operation::Finalize;
                let theirs = if ends { OpDesc { operation: ours.operation, ..*theirs } } else { *theirs };
                match theirs.disagreement(ours) {
                    Some(field) => write!(f, " ({field} differs)"),
                    None if ours.operation.is_pairwise() && theirs.count != ours.count => {
                        f.write_str(" (the two differ about the length of the block between them)")
                    }
                    None => Ok(()),
                }
            }
            Self::PeerRefused { rank, reason } => write!(f, "rank {rank} refused the call: {reason}"),
            Self::Timeout { phase, elapsed, missing, unmatched } => {
                write!(
                    f,
                    "timed out after {elapsed:.3?} ({})",
                    match phase {
                        Phase::Queued => "queued",
                        Phase::Running => "running",
                    }
                )?;
                if missing.is_empty() {
                    f.write_str("; every rank had arrived")?;
                } else {
                    f.write_str("; not arrived: ")?;
                    ranks(f, missing)?;
                }
                if unmatched.is_empty() { Ok(()) } else { write!(f, "; still waiting for: {}", unmatched.join(", ")) }
            }
            Self::PeerFailed { rank, cause } => write!(f, "rank {rank} failed: {cause}"),
            Self::Corrupt { rank: Some(r), what } => write!(f, "corrupt data from rank {r}: {what}"),
            Self::Corrupt { rank: None, what } => write!(f, "corrupt data: {what}"),
            Self::Aborted { rank, cause } => write!(f, "aborted by rank {rank}: {cause}"),
            Self::StaleGeneration { ours, theirs, rank: None } if ours < theirs => {
                write!(f, "this communicator is of generation {ours}; generation {theirs} has taken its place")
            }
            Self::StaleGeneration { ours, theirs, rank: None } => {
                write!(f, "stale generation {theirs}; this communicator is at generation {ours}")
            }
            Self::StaleGeneration { ours, theirs, rank: Some(r) } if ours < theirs => {
                write!(
                    f,
                    "rank {r} has moved on to another membership, of generation {theirs}; this communicator is of \
                     generation {ours}"
                )
            }
            Self::StaleGeneration { ours, theirs, rank: Some(r) } => {
                write!(
                    f,
                    "the handle of rank {r} is stale: it is of generation {theirs}, and rank {r} at {ours} by now"
                )
            }
            Self::Bootstrap { what, arrived, missing } => {
                write!(f, "could not create the communicator: {what}")?;
                if !arrived.is_empty() || !missing.is_empty() {
                    write!(f, "; arrived: [{}]; missing: ", arrived.join(", "))?;
                    ranks(f, missing)?;
                }
                Ok(())
            }
            Self::VersionSkew { ours, theirs, who } => {
                write!(f, "{who} speaks protocol version {theirs}, this process {ours}")
            }
            Self::Finalized => f.write_str("the communicator is finalized"),
            Self::Backend { library, code, text } => write!(f, "{library} failed with code {code}: {text}"),
            Self::Io { what } => f.write_str(what),
        }
    }
}

/// Where an error happened.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Context {
    /// The communicator's name.
    pub comm: Option<Arc<str>>,
    /// This rank and the world size.
    pub rank: Option<(usize, usize)>,
    /// The call.
    pub op: Option<Arc<str>>,
    /// The call's number: `collective_seq`, or `p2p_seq` for point-to-point calls.
    pub seq: Option<u64>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Inner {
    kind: ErrorKind,
    context: Context,
}

/// An error: a [kind](ErrorKind) and its [context](Context). One pointer wide; clones are cheap,
/// because a failed communicator hands the same error to every later call.
#[derive(Clone, PartialEq, Serialize, Deserialize)]
pub struct Error(Arc<Inner>);

impl Error {
    /// An error without context; callers up the stack add it.
    #[must_use]
    pub fn new(kind: ErrorKind) -> Self {
        Self(Arc::new(Inner { kind, context: Context::default() }))
    }

    /// [`ErrorKind::InvalidArgument`].
    pub fn invalid(what: impl Into<String>) -> Self {
        Self::new(ErrorKind::InvalidArgument { what: what.into() })
    }

    /// [`ErrorKind::Unsupported`].
    pub fn unsupported(what: impl Into<String>, reason: impl Into<String>) -> Self {
        Self::new(ErrorKind::Unsupported { what: what.into(), reason: reason.into() })
    }

    /// [`ErrorKind::Io`] for `what`, with the system's answer.
    #[must_use]
    pub fn io(what: impl fmt::Display, e: &std::io::Error) -> Self {
        Self::new(ErrorKind::Io { what: format!("{what}: {e}") })
    }

    /// What went wrong.
    #[must_use]
    pub fn kind(&self) -> &ErrorKind {
        &self.0.kind
    }

    /// Where.
    #[must_use]
    pub fn context(&self) -> &Context {
        &self.0.context
    }

    /// Fills in those parts of the context that are still unknown.
    #[must_use]
    pub fn with_context(mut self, add: impl FnOnce() -> Context) -> Self {
        let c = add();
        let inner = Arc::make_mut(&mut self.0);
        let have = &mut inner.context;
        have.comm = have.comm.take().or(c.comm);
        have.rank = have.rank.take().or(c.rank);
        have.op = have.op.take().or(c.op);
        have.seq = have.seq.take().or(c.seq);
        self
    }

    /// The same kind in another place: for a sticky error delivered to a later call.
    #[must_use]
    pub fn at(&self, context: Context) -> Self {
        Self(Arc::new(Inner { kind: self.0.kind.clone(), context }))
    }

    /// The same context with another kind.
    #[must_use]
    pub fn with_kind(&self, kind: ErrorKind) -> Self {
        Self(Arc::new(Inner { kind, context: self.0.context.clone() }))
    }

    /// Call and kind, without place and advice: for use inside of another error.
    #[must_use]
    pub fn brief(&self) -> String {
        match (&self.0.context.op, self.0.context.seq) {
            (Some(op), Some(seq)) => format!("{op} #{seq}: {}", self.kind()),
            (Some(op), None) => format!("{op}: {}", self.kind()),
            _ => self.kind().to_string(),
        }
    }

    /// Whether the communicator can be used after this error without reconfiguring it.
    #[must_use]
    pub fn is_recoverable(&self) -> bool {
        self.kind().leaves_communicator_usable()
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let c = &self.0.context;
        if let Some(comm) = &c.comm {
            write!(f, "communicator '{comm}'")?;
            match c.rank {
                Some((rank, size)) => write!(f, ", rank {rank} of {size}: ")?,
                None => f.write_str(": ")?,
            }
        }
        match (&c.op, c.seq) {
            (Some(op), Some(seq)) => write!(f, "{op} #{seq}: ")?,
            (Some(op), None) => write!(f, "{op}: ")?,
            _ => {}
        }
        let advice = match self.kind() {
            // There is no communicator yet.
            ErrorKind::InvalidArgument { .. } if c.comm.is_none() => "correct the argument or setting",
            ErrorKind::Bootstrap { .. } if c.op.as_deref() == Some(Operation::Reconfigure.name()) => {
                "the old communicator is as it was: call again with another uuid and the handles of those who can come"
            }
            // Those who go on need a communicator that has not been finalized.
            ErrorKind::PeerFailed { .. } | ErrorKind::Aborted { .. }
                if c.op.as_deref() == Some(Operation::Finalize.name()) =>
            {
                "calls that returned well are complete; to go on after such a loss, make a `barrier` before finalize"
            }
            kind => kind.advice(),
        };
        write!(f, "{} ({advice})", self.kind())
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

impl std::error::Error for Error {}

impl From<ErrorKind> for Error {
    fn from(kind: ErrorKind) -> Self {
        Self::new(kind)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::DType;

    #[test]
    fn a_mismatched_message_says_what_differs() {
        let ours = OpDesc::new(Operation::Recv).elements(DType::F32, 4);
        let theirs = OpDesc::new(Operation::Send).elements(DType::F32, 5);
        let text = Error::new(ErrorKind::Mismatch { seq: 3, ranks: vec![2], theirs, ours }).to_string();
        assert!(text.contains("at message 3: rank 2 called send(f32, count 5)"), "{text}");
        assert!(text.contains("(count differs)"), "{text}");
    }

    #[test]
    fn a_failed_finalize_does_not_advise_what_cannot_be_done_any_more() {
        let lost = || Error::from(ErrorKind::PeerFailed { rank: 1, cause: PeerCause::Killed });
        let of = |op: &str| lost().with_context(|| Context { op: Some(op.into()), ..Context::default() }).to_string();
        assert!(of("barrier").contains("`shrink`"));
        let text = of("finalize");
        assert!(text.starts_with("finalize: rank 1 failed") && !text.contains("shrink"), "{text}");
        assert!(text.contains("a `barrier` before finalize"), "{text}");
    }

    #[test]
    fn a_mismatch_names_ranks_calls_field_and_advice() {
        let ours = OpDesc::new(Operation::AllReduce).elements(DType::F32, 4);
        let theirs = OpDesc::new(Operation::Broadcast).elements(DType::F32, 4).root(0);
        let e = Error::new(ErrorKind::Mismatch { seq: 57, ranks: vec![2], theirs, ours }).with_context(|| Context {
            comm: Some("dp".into()),
            rank: Some((1, 4)),
            op: Some("all_reduce".into()),
            seq: Some(57),
        });
        let text = e.to_string();
        for part in [
            "'dp'",
            "rank 1 of 4",
            "all_reduce #57",
            "rank 2 called broadcast(f32, count 4, root 0)",
            "operation differs",
            "same order",
        ] {
            assert!(text.contains(part), "{part} in {text}");
        }
        assert_eq!(size_of::<Error>(), size_of::<usize>());
        assert_eq!(size_of::<Result<()>>(), size_of::<usize>());
    }

    #[test]
    fn context_is_filled_once() {
        let e = Error::invalid("x").with_context(|| Context { seq: Some(1), ..Context::default() });
        let e = e.with_context(|| Context { seq: Some(2), op: Some("send".into()), ..Context::default() });
        assert_eq!(e.context().seq, Some(1));
        assert_eq!(e.context().op.as_deref(), Some("send"));
    }
}
