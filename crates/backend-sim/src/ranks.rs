//! Running a closure as N ranks.

use std::collections::BTreeMap;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use comm_core::{
    Backend, CallNumber, CommOptions, Communicator, Error, ErrorKind, Event, Observer, PeerCause, Result, Time,
};

/// Time after which [`run_ranks`] gives up.
const DEADLINE: Duration = Duration::from_secs(60);

/// A rank that panicked, failed or did not end, and others of which the same is true.
///
/// Of ranks that only met the consequences (a peer that is gone, an abort elsewhere) nothing is told.
#[derive(Clone, Debug)]
pub struct RankPanic {
    /// The rank.
    pub rank: usize,
    /// What happened: the panic's message, the error, or the call in which the deadline found it.
    pub message: String,
    /// The other ranks in trouble. Their own lists are empty.
    pub others: Vec<Self>,
}

impl fmt::Display for RankPanic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {}: {}", self.rank, self.message)?;
        self.others.iter().try_for_each(|other| write!(f, "; {other}"))
    }
}

impl std::error::Error for RankPanic {}

/// Runs `f` as `n` ranks of one world, each on a thread of its own; returns their results in rank order.
///
/// The threads may outlive the call (a rank that loops cannot be ended), so closure and result are `'static`: `f` borrows
/// nothing from its caller. Move what it needs into it, or share it through an [`Arc`]:
///
/// ```
/// use std::sync::Arc;
///
/// let table = Arc::new(vec![10, 20, 30]);
/// let shared = Arc::clone(&table);
/// let mine = backend_sim::run_ranks(3, move |comm| Ok(shared[comm.rank()]));
/// assert_eq!(mine.unwrap(), *table);
/// ```
///
/// A rank that panics aborts its communicator, so that the others do not wait for it. A rank that returns has left:
/// whoever needs it afterwards gets [`PeerFailed`](comm_core::ErrorKind::PeerFailed). So ranks end together, or with
/// [`finalize`](Communicator::finalize), which also notices messages that nobody received.
///
/// ```
/// let e = backend_sim::run_ranks(3, |comm| {
///     assert_ne!(comm.rank(), 1, "one is the odd one out");
///     comm.barrier()
/// });
/// let e = e.unwrap_err();
/// assert_eq!(e.rank, 1);
/// assert!(e.to_string().contains("one is the odd one out"));
/// ```
///
/// # Errors
///
/// The ranks that panicked, returned an error, or did not end within 60 seconds, with the calls in which the latter are.
pub fn run_ranks<T, F>(n: usize, f: F) -> Result<Vec<T>, RankPanic>
where
    T: Send + 'static,
    F: Fn(Communicator) -> Result<T> + Send + Sync + 'static,
{
    run_ranks_with(n, &CommOptions::new().name("run_ranks"), DEADLINE, f)
}

/// [`run_ranks`] with options for the communicators and a deadline.
///
/// When it is over, communicators of ranks that have not ended are aborted, so that calls in which they wait fail. A rank
/// that loops without a call cannot be ended: its thread stays.
///
/// # Errors
///
/// As [`run_ranks`].
pub fn run_ranks_with<T, F>(n: usize, options: &CommOptions, deadline: Duration, f: F) -> Result<Vec<T>, RankPanic>
where
    T: Send + 'static,
    F: Fn(Communicator) -> Result<T> + Send + Sync + 'static,
{
    let failed = |rank: usize, e: &Error| RankPanic { rank, message: e.to_string(), others: Vec::new() };
    let comms = crate::world(n, options).map_err(|e| failed(0, &e))?;
    let f = Arc::new(f);
    let (tx, rx) = channel();
    let mut ranks = Vec::new();
    for (rank, comm) in comms.into_iter().enumerate() {
        let (f, tx) = (Arc::clone(&f), tx.clone());
        let at = Arc::new(Rank { rank, calls: Calls::default(), backend: Arc::clone(comm.backend()) });
        comm.observe(Arc::clone(&at) as Arc<dyn Observer>).detach();
        ranks.push(Arc::clone(&at));
        let body = move || {
            let end = match catch_unwind(AssertUnwindSafe(|| f(comm))) {
                Ok(Ok(value)) => End::Value(value),
                Ok(Err(e)) => End::Error(e),
                Err(payload) => End::Panic(comm_core::panic_text(payload.as_ref())),
            };
            // A clone that lives on elsewhere does not tell the others.
            if let End::Panic(text) = &end {
                at.abort(&format!("it panicked: {text}"));
            }
            // The receiver may have given up.
            let _ = tx.send((rank, end));
        };
        let started = std::thread::Builder::new().name(format!("rank-{rank}")).spawn(body);
        if let Err(e) = started {
            ranks.iter().for_each(|r| r.abort("a rank could not be started"));
            return Err(failed(rank, &Error::io("starting a rank's thread", &e)));
        }
    }
    drop(tx);
    let ends = collect(&rx, n, Instant::now() + deadline.min(Duration::from_secs(86_400)));
    let report = Report::of(&ends, &ranks, deadline);
    match report.into_error() {
        Some(e) => {
            ranks.iter().for_each(|r| r.abort("the test is over"));
            Err(e)
        }
        None => {
            let value = |(_, end)| if let End::Value(value) = end { Some(value) } else { None };
            let mut ends = ends;
            ends.sort_by_key(|(rank, _)| *rank);
            Ok(ends.into_iter().filter_map(value).collect())
        }
    }
}

/// How a rank ended.
enum End<T> {
    Value(T),
    Error(Error),
    Panic(String),
}

/// The ends of ranks in the order of time, up to the deadline.
fn collect<T>(rx: &Receiver<(usize, End<T>)>, n: usize, until: Instant) -> Vec<(usize, End<T>)> {
    let mut ends = Vec::new();
    while ends.len() < n
        && let Ok(end) = rx.recv_timeout(until.saturating_duration_since(Instant::now()))
    {
        ends.push(end);
    }
    ends
}

/// What is told of ranks that are in trouble, most telling first.
struct Report {
    panics: Vec<RankPanic>,
    errors: Vec<RankPanic>,
    stuck: Vec<RankPanic>,
    consequences: Vec<RankPanic>,
}

impl Report {
    fn of<T>(ends: &[(usize, End<T>)], ranks: &[Arc<Rank>], deadline: Duration) -> Self {
        let mut report = Self { panics: Vec::new(), errors: Vec::new(), stuck: Vec::new(), consequences: Vec::new() };
        let of = |rank: &usize| ends.iter().find(|(r, _)| r == rank).map(|(_, end)| end);
        for (rank, end) in ends {
            let tell = |message| RankPanic { rank: *rank, message, others: Vec::new() };
            match end {
                End::Value(_) => {}
                End::Panic(text) => report.panics.push(tell(format!("panicked: {text}"))),
                End::Error(e) => match e.kind() {
                    ErrorKind::PeerFailed { rank: gone, cause: PeerCause::Closed }
                        if matches!(of(gone), Some(End::Value(_))) =>
                    {
                        let why = format!("{e}; rank {gone} had returned while this rank still needed it");
                        report.errors.push(tell(why));
                    }
                    ErrorKind::PeerFailed { .. } | ErrorKind::Aborted { .. } | ErrorKind::PeerRefused { .. } => {
                        report.consequences.push(tell(e.to_string()));
                    }
                    _ => report.errors.push(tell(e.to_string())),
                },
            }
        }
        for (rank, at) in ranks.iter().enumerate().filter(|(rank, _)| of(rank).is_none()) {
            let message = format!("did not end within {deadline:?}; it is in {}", at.calls);
            report.stuck.push(RankPanic { rank, message, others: Vec::new() });
        }
        report
    }

    fn into_error(self) -> Option<RankPanic> {
        let mut told: Vec<_> = self.panics.into_iter().chain(self.errors).chain(self.stuck).collect();
        if told.is_empty() {
            // Something that none of the ranks did by itself, e.g. an abort that was asked for.
            told = self.consequences;
        }
        let mut told = told.into_iter();
        let first = told.next()?;
        Some(RankPanic { others: told.collect(), ..first })
    }
}

/// A rank while it runs.
struct Rank {
    rank: usize,
    calls: Calls,
    /// Not a communicator: that would keep open what the rank drops.
    backend: Arc<dyn Backend>,
}

impl Rank {
    fn abort(&self, why: &str) {
        self.backend.abort(&ErrorKind::Aborted { rank: self.rank, cause: why.to_owned() }.into());
    }
}

/// The calls that have begun and not ended, by communicator and number.
#[derive(Default)]
pub(crate) struct Calls(Mutex<BTreeMap<(String, u64), String>>);

impl Observer for Rank {
    fn event(&self, event: &Event<'_>, _: Time) {
        self.calls.note(event);
    }
}

impl Calls {
    pub(crate) fn note(&self, event: &Event<'_>) {
        let mut calls = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match event {
            Event::Enqueued(c) => {
                let number = match c.number {
                    CallNumber::Collective(seq) => format!(", collective {seq}"),
                    CallNumber::P2p { peer, tag, seq } => format!(" with rank {peer}, tag {tag}, message {seq}"),
                    _ => String::new(),
                };
                calls.insert((c.comm.to_owned(), c.op_id), format!("{}{number} of '{}'", c.desc, c.comm));
            }
            Event::Completed { call, .. } | Event::Failed { call, .. } => {
                calls.remove(&(call.comm.to_owned(), call.op_id));
            }
            _ => {}
        }
    }
}

impl fmt::Display for Calls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let calls = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut texts = calls.values().map(String::as_str);
        match texts.next() {
            None => f.write_str("no call: it computes, waits for something else, or finalizes"),
            Some(first) => {
                f.write_str(first)?;
                texts.try_for_each(|text| write!(f, ", {text}"))
            }
        }
    }
}
