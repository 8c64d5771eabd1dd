//! What links and endpoints are made with: in real worlds pipes in memory and real threads, in a simulation what that
//! brings.
//!
//! Whoever makes a world, or takes an existing rank into a new one, asks [`here`] for the ground it stands on and for
//! who it is. Everything that has to wait waits through the clock of the communicator's options, and not with a lock
//! held: then it works in a simulation too.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use comm_core::{Error, Result};
use comm_transport::{Endpoint, EndpointOptions, Link, MemLink};
use parking_lot::Mutex;

use crate::regroup::Town;

/// Names a rank for as long as it lives, in whatever worlds it is: what a process is to backend tcp.
pub(crate) type Identity = u64;

/// Something that is done soon, on another thread or at another time.
pub(crate) type Job = Box<dyn FnOnce() + Send>;

/// Makes what worlds consist of.
pub(crate) trait Ground: Send + Sync + fmt::Debug {
    /// The two ends of a new link: that of `a` and that of `b`.
    fn pair(&self, a: Identity, b: Identity) -> (Box<dyn Link>, Box<dyn Link>);

    /// Does something soon. May be called with an endpoint's lock held; the job runs without.
    ///
    /// # Errors
    ///
    /// When a thread for it cannot be started.
    fn later(&self, job: Job) -> Result<()>;

    /// Completes the settings of an endpoint of rank `me`; `members` are the identities by endpoint rank.
    fn endpoint_options(&self, me: Identity, members: &[Identity], options: EndpointOptions) -> EndpointOptions;

    /// The endpoint with those settings has been made. `options` are what [`endpoint_options`](Self::endpoint_options)
    /// gave.
    fn made(&self, me: Identity, endpoint: &Arc<Endpoint>, options: &EndpointOptions);

    /// Where its communicators are known to each other.
    fn town(&self) -> Arc<Town> {
        Town::of_process()
    }

    /// Whether a rank may still make something.
    ///
    /// # Errors
    ///
    /// For a rank that was killed: what its calls end with.
    fn check(&self, me: Identity) -> Result<()>;
}

/// The ground under the calling thread, and who it is: a rank of a simulation, or somebody new.
pub(crate) fn here() -> (Arc<dyn Ground>, Identity) {
    static NEXT: AtomicU64 = AtomicU64::new(1 << 32);
    if let Some(simulated) = crate::sim::here() {
        return simulated;
    }
    (Arc::new(Real), NEXT.fetch_add(1, Ordering::Relaxed))
}

/// Pipes in memory, real time.
#[derive(Debug)]
pub(crate) struct Real;

impl Ground for Real {
    fn pair(&self, _: Identity, _: Identity) -> (Box<dyn Link>, Box<dyn Link>) {
        let (a, b) = MemLink::pair();
        (Box::new(a), Box::new(b))
    }

    fn later(&self, job: Job) -> Result<()> {
        // The thread lives as long as the process.
        let _ = electrician()?.send(job);
        Ok(())
    }

    fn endpoint_options(&self, _: Identity, _: &[Identity], options: EndpointOptions) -> EndpointOptions {
        // A thread of this process is neither stopped by itself nor cut off.
        EndpointOptions { heartbeat: Duration::MAX, ..options }
    }

    fn made(&self, _: Identity, _: &Arc<Endpoint>, _: &EndpointOptions) {}

    fn check(&self, _: Identity) -> Result<()> {
        Ok(())
    }
}

/// Where jobs go: one thread per process, because an endpoint asks for a link with its lock held, and the link's other
/// end belongs to another endpoint.
fn electrician() -> Result<Sender<Job>> {
    static JOBS: OnceLock<Mutex<Option<Sender<Job>>>> = OnceLock::new();
    let mut slot = JOBS.get_or_init(|| Mutex::new(None)).lock();
    if let Some(s) = &*slot {
        return Ok(s.clone());
    }
    let (tx, rx) = channel::<Job>();
    let work = move || {
        while let Ok(job) = rx.recv() {
            job();
        }
    };
    std::thread::Builder::new()
        .name("rustcomms-wires".into())
        .spawn(work)
        .map_err(|e| Error::io("starting the thread that makes pipes", &e))?;
    *slot = Some(tx.clone());
    Ok(tx)
}
