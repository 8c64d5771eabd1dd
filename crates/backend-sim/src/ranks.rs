//! Running a closure as N ranks.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use comm_core::{CommOptions, Communicator, Error, Result};

/// Time after which [`run_ranks`] gives up.
const DEADLINE: Duration = Duration::from_secs(60);

/// A rank that panicked, failed or did not end.
#[derive(Clone, Debug)]
pub struct RankPanic {
    /// The rank.
    pub rank: usize,
    /// What happened.
    pub message: String,
}

impl fmt::Display for RankPanic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {}: {}", self.rank, self.message)
    }
}

impl std::error::Error for RankPanic {}

/// Runs `f` as `n` ranks of one world, each on a thread of its own; returns their results in rank order.
///
/// # Errors
///
/// The first rank that panicked, returned an error, or did not end within 60 seconds. Communicators of
/// other ranks get `PeerFailed` when one of them is gone, so that they end too.
pub fn run_ranks<T, F>(n: usize, f: F) -> Result<Vec<T>, RankPanic>
where
    T: Send + 'static,
    F: Fn(Communicator) -> Result<T> + Send + Sync + 'static,
{
    run_ranks_with(n, &CommOptions::new().name("run_ranks"), DEADLINE, f)
}

/// [`run_ranks`] with options for the communicators and a deadline.
///
/// # Errors
///
/// As [`run_ranks`].
pub fn run_ranks_with<T, F>(n: usize, options: &CommOptions, deadline: Duration, f: F) -> Result<Vec<T>, RankPanic>
where
    T: Send + 'static,
    F: Fn(Communicator) -> Result<T> + Send + Sync + 'static,
{
    let failed = |rank: usize, e: &Error| RankPanic { rank, message: e.to_string() };
    let comms = crate::world(n, options).map_err(|e| failed(0, &e))?;
    let f = std::sync::Arc::new(f);
    let (tx, rx) = channel();
    for (rank, comm) in comms.into_iter().enumerate() {
        let (f, tx) = (std::sync::Arc::clone(&f), tx.clone());
        let body = move || {
            let out = catch_unwind(AssertUnwindSafe(|| f(comm)));
            let out = match out {
                Ok(Ok(v)) => Ok(v),
                Ok(Err(e)) => Err(RankPanic { rank, message: e.to_string() }),
                Err(p) => Err(RankPanic { rank, message: format!("panicked: {}", comm_core::panic_text(p.as_ref())) }),
            };
            // The receiver may have given up.
            let _ = tx.send((rank, out));
        };
        std::thread::Builder::new()
            .name(format!("rank-{rank}"))
            .spawn(body)
            .map_err(|e| failed(rank, &Error::io("starting a rank's thread", &e)))?;
    }
    drop(tx);
    let until = Instant::now() + deadline.min(Duration::from_secs(86_400));
    let mut results: Vec<Option<T>> = (0..n).map(|_| None).collect();
    let mut first: Option<RankPanic> = None;
    for _ in 0..n {
        match rx.recv_timeout(until.saturating_duration_since(Instant::now())) {
            Ok((rank, Ok(v))) => results[rank] = Some(v),
            // What the others then say (a peer failed) is a consequence.
            Ok((_, Err(e))) => first = first.or(Some(e)),
            Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {
                let rank = results.iter().position(Option::is_none).unwrap_or(0);
                let message = format!("did not end within {deadline:?}");
                return Err(first.unwrap_or(RankPanic { rank, message }));
            }
        }
    }
    match first {
        Some(e) => Err(e),
        None => Ok(results.into_iter().flatten().collect()),
    }
}
