//! Collective communication for Rust: communicators over interchangeable backends, with every operation
//! synchronous, asynchronous and scoped, and errors instead of hangs.
//!
//! This crate is not an implementation: it brings the vocabulary ([`comm_core`]) and the backends that its
//! features choose together, and registers them on first use. Programs that want one backend only can
//! depend on that backend's crate.
//!
//! ```no_run
//! use rustcomms::{CommOptions, Result, op};
//!
//! fn main() -> Result<()> {
//!     let comm = rustcomms::connect(CommOptions::new())?; // joins the world that the launcher made
//!     let mut gradient = vec![comm.rank() as f32; 1 << 20];
//!     comm.all_reduce(&mut gradient, op::Avg)?;
//!     let work = comm.all_reduce_async(gradient, op::Sum)?; // … compute here …
//!     let gradient = work.wait()?;
//!     println!("rank {} of {}: {}", comm.rank(), comm.size(), gradient[0]);
//!     comm.finalize(std::time::Duration::from_secs(10))
//! }
//! ```
//!
//! # Start
//!
//! * *Features*: `tcp` (on by default) is the backend whose ranks are processes, with `connect`, `launch` and `store`. `sim`
//!   is the backend whose ranks are threads of one process, with `testing`. `all-cpu` is both.
//! * *Launchers*: `rustcomms run -n 4 -- PROGRAM` (crate `rustcomms-cli`) starts ranks on one machine or several; so do torchrun, `mpirun`
//!   of Open MPI, `mpiexec` of MPICH and Intel MPI, MVAPICH and PALS, `srun`, and Kubernetes' indexed jobs, whose variables are understood,
//!   see below. A program that shall need no launcher asks `launch::is_rank` and starts its ranks with `launch::spawn_local`, or
//!   with `launch::LaunchOptions` where that is to be set up. Without any, `connect` makes a world of one rank.
//! * *Tests*: `testing::run_ranks` runs a closure as N ranks, and names those that panic, fail or hang. `testing::Simulation` runs it in
//!   virtual time, with faults; a seed decides on everything, so that a run can be repeated.
//! * *After a failure*: [`Communicator::shrink`] goes on with the survivors, [`Communicator::reconfigure`] with whom you like,
//!   newcomers too; the example `elastic` does. Launchers end the other ranks when one has failed, unless told otherwise:
//!   `rustcomms run --on-failure continue`, or `launch::LaunchOptions` with `OnFailure::Continue`. Survivors may have got to different
//!   steps: let them agree on one, as by an `all_reduce` with [`op::Min`]. Make a `barrier` before `finalize`, after which nobody goes on.
//! * *Examples*, in `crates/rustcomms/examples`: `messages`, `reductions`, `gathers`, `exchange` and `overlap` show the operations,
//!   `own_backend` a backend of one's own, `elastic` ranks that come and go, `train_digits` data-parallel training. `cargo run --example messages` starts 4 ranks.
//! * *When something is wrong*: `rustcomms doctor` looks at machine and settings, and tries every operation.
//!
//! # Settings
//!
//! Environment variables. What the program sets ([`CommOptions`], [`CallOptions`]) comes first.
//!
//! | variable | default | meaning |
//! |---|---|---|
//! | `RUSTCOMMS_TIMEOUT` | 600 | seconds that an operation may take |
//! | `RUSTCOMMS_BOOTSTRAP_TIMEOUT` | 120 | seconds that ranks wait for each other when they meet, see [`CommOptions::bootstrap_timeout`] |
//! | `RUSTCOMMS_ALGO` | chosen by operation, size and ranks | algorithm for every operation that has one of this name; the others choose. A name that no operation has is an error. All ranks need the same |
//! | `RUSTCOMMS_SIMD` | all that the processor has | most that reductions use of it: `portable`, `avx2` or `avx512`; results are the same. Anything else is an error when a communicator is made. See [`simd_level`] |
//! | `RUSTCOMMS_LAUNCHER` | `auto` | launcher whose variables count: `auto` (found out), `rustcomms`, `torchrun`, `openmpi`, `pmi`, `slurm`, `mvapich`, `pals`, `kubernetes` or `single` |
//! | `RUSTCOMMS_PMI` | `1` | whether ranks may meet through the PMI server of MPICH's, Intel MPI's or MVAPICH's launcher where no store is named, see below: `1`, `on`, `yes`, `true`, or `0`, `off`, `no`, `false`; anything else is an error |
//! | `RUSTCOMMS_SECRET` | none | what the ranks and the store prove to each other to know: 32 random bytes, in any writing, see [`Secret`] and below |
//! | `RUSTCOMMS_INTERFACE` | all | interfaces and networks over which ranks connect, see [`CommOptions::interface`] |
//! | `RUSTCOMMS_CONNECT` | `auto` | links of a world from the start: `auto` (all up to 8 ranks, else 2 log2 n each, others when data needs them) or `full`; the same on all ranks. The hint `connect` comes first |
//! | `RUSTCOMMS_SIM_SEED` | what the program says | seed of every `testing::Simulation`: a run that failed prints it |
//! | `RUSTCOMMS_RANK`, `RUSTCOMMS_WORLD_SIZE` | a world of one rank | rank of this process, and number of ranks; both or neither |
//! | `RUSTCOMMS_STORE` | `MASTER_ADDR` and `MASTER_PORT`, where rank 0 then hosts the store | host:port of the store at which ranks meet |
//! | `RUSTCOMMS_RUN_ID` | `run` | name of the run, at most 256 bytes, which keeps runs apart that share a store or a host |
//! | `RUSTCOMMS_RESTART_COUNT` | not set | how often the launcher has restarted the ranks, for the program; the name of the run tells it, too |
//! | `RUSTCOMMS_LOCAL_RANK`, `RUSTCOMMS_LOCAL_WORLD_SIZE` | not set | rank and ranks on this host, for the program (`store::discover`) and for meeting without an address, see below; communicators find out by themselves |
//! | `RUSTCOMMS_NODE_RANK`, `RUSTCOMMS_NNODES` | not set | number of this host and of all hosts, for the program |
//!
//! All but the first ten are set by launchers. Without `RUSTCOMMS_RANK`, torchrun's variables count: `RANK`, `WORLD_SIZE`,
//! `LOCAL_RANK`, `LOCAL_WORLD_SIZE`, `MASTER_ADDR`, `MASTER_PORT`, `TORCHELASTIC_USE_AGENT_STORE`, `TORCHELASTIC_RUN_ID` and
//! `TORCHELASTIC_RESTART_COUNT`; then those of Open MPI, PMI, MVAPICH, a Slurm step, PALS and Kubernetes' indexed jobs.
//!
//! # Meeting
//!
//! Ranks meet in the first of these ways that is open to them:
//!
//! 1. At `RUSTCOMMS_STORE`, a store that somebody hosts; else at `MASTER_ADDR` and `MASTER_PORT`, where rank 0 hosts it unless torchrun does.
//!    Both are needed: one without the other is ignored. Only a Slurm step supplies what is missing, and both where neither is set.
//! 2. Through the PMI server of `mpiexec` (MPICH, Intel MPI, MVAPICH), which may span hosts. A program whose MPI library talks to
//!    that server at the same time as ours cannot use it, nor can a rank that is several of our programs one after the other: set
//!    `MASTER_ADDR` and `MASTER_PORT`. `RUSTCOMMS_PMI=0` keeps ranks from it, but then they need these two all the same or, on one host,
//!    `RUSTCOMMS_RUN_ID`.
//! 3. Through a file below `XDG_RUNTIME_DIR`, `TMPDIR` or `/tmp`, if all are on one host: under Open MPI and PALS, and wherever
//!    `RUSTCOMMS_RUN_ID` is set, to a name that no other run has at the time. That they are on one host must be told: the ranks on it are
//!    as many as the world has. Open MPI, MPICH and Intel MPI tell it; ranks that are started by hand, with `RUSTCOMMS_RANK` and
//!    `RUSTCOMMS_WORLD_SIZE`, need `RUSTCOMMS_LOCAL_WORLD_SIZE`, too (and `RUSTCOMMS_LOCAL_RANK`, if the program asks for it).
//!
//! So Open MPI across hosts needs `MASTER_ADDR` and `MASTER_PORT`. `rustcomms doctor` tells what was found and what decided.
//!
//! What shows at the store (a rank that is there twice or has other settings, one that has given up) all ranks learn at once. A rank
//! that fails before it gets there, for a bad setting of its own or a wrong secret, is missed when the bootstrap timeout is over.
//!
//! The stores of `rustcomms run`, `rustcomms store` and `launch::spawn_local` take their secret from `RUSTCOMMS_SECRET` only: a program
//! that sets [`CommOptions::secret`] in its code cannot enter them unless the variable has the same value where they run. PyTorch's
//! store knows no secrets, so ranks with one cannot meet at torchrun's.

#[cfg(feature = "tcp")]
pub mod launch;

use std::sync::Once;

pub use comm_core::*;
#[cfg(feature = "tcp")]
pub use comm_store as store;

/// Ranks as threads of one process, for users' tests.
///
/// Depend on rustcomms with the feature `sim` in `[dev-dependencies]`, and write code that takes a [`Communicator`]. The closure
/// that the ranks run is `'static`: what it needs is moved into it, or shared through an [`Arc`](std::sync::Arc).
///
/// ```
/// use rustcomms::testing::run_ranks;
/// use rustcomms::{Communicator, Result, op};
///
/// /// What is to be tested: the mean over the values of all ranks, which may have none.
/// fn mean(comm: &Communicator, values: &[f64]) -> Result<f64> {
///     let mut sums = [values.iter().sum(), values.len() as f64];
///     comm.all_reduce(&mut sums, op::Sum)?;
///     Ok(sums[0] / sums[1])
/// }
///
/// let means = run_ranks(4, |comm| mean(&comm, &[1.0, 2.0, 6.0][..comm.rank()]));
/// assert_eq!(means.unwrap(), [13.0 / 6.0; 4]);
/// ```
///
/// A rank that panics, fails, or leaves while others need it ends the run at once, with an error that names it; a deadline
/// names the ranks that have not ended and the calls that they are in:
///
/// ```
/// use rustcomms::testing::run_ranks;
///
/// let e = run_ranks(3, |comm| {
///     if comm.rank() == 2 {
///         return Ok(()); // a bug: the others wait for it
///     }
///     comm.barrier()
/// });
/// assert!(e.unwrap_err().message.contains("rank 2 had returned while this rank still needed it"));
/// ```
///
/// [`Simulation`](testing::Simulation) shows what a program does when ranks die: here at a moment that the seed chooses.
///
/// ```
/// use std::time::Duration;
///
/// use rustcomms::testing::{Faults, Simulation, When};
/// use rustcomms::{Communicator, ErrorKind, Result, op};
///
/// /// Adds up 1 per step and rank, and goes on without those who are lost.
/// fn add_up(mut comm: Communicator) -> Result<i64> {
///     let (mut total, mut step) = (0, 0);
///     while step < 20 {
///         let mut x = [1i64];
///         match comm.all_reduce(&mut x, op::Sum) {
///             Ok(()) => (total, step) = (total + x[0], step + 1),
///             Err(e) if matches!(e.kind(), ErrorKind::PeerFailed { .. }) => {
///                 comm = comm.shrink(Duration::from_secs(10))?;
///                 // Some may have had the result of the last step, others not.
///                 let mut all = [(step, total)].map(|(s, t)| [s, t]).concat();
///                 comm.all_reduce(&mut all[..], op::Min)?;
///                 (step, total) = (all[0], all[1]);
///             }
///             Err(e) => return Err(e),
///         }
///     }
///     Ok(total)
/// }
///
/// for seed in 0..10 {
///     let crash = Faults::new().kill(1, When::Within(200));
///     let run = Simulation::new(4).seed(seed).faults(crash).run(add_up).unwrap();
///     assert!(run.trouble.is_none());
///     for rank in [0, 2, 3] {
///         let total = run.ranks[rank].value();
///         assert!(total.is_some_and(|t| (60..=80).contains(t)), "{}", run.failure("a survivor's total"));
///     }
/// }
/// ```
#[cfg(feature = "sim")]
pub mod testing {
    pub use backend_sim::{
        Ended, Fault, Faults, Happened, Network, Outcome, RankPanic, RankStats, SEED_VARIABLE, SimFailure, SimRank,
        Simulation, Stats, Trouble, When, run_ranks, run_ranks_with,
    };
}

/// Registers the backends that this build has; every function here that looks one up does it first.
pub fn register_built_backends() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        #[cfg(feature = "tcp")]
        backend_tcp::register();
        #[cfg(feature = "sim")]
        backend_sim::register();
    });
}

/// Creates a communicator over the backend of this name. Collective over all its ranks.
///
/// Counterpart: `torchcomms.new_comm`.
///
/// # Errors
///
/// `Unsupported` for a backend that is not built in, listing those that are; else what the backend says.
pub fn new_comm(backend: &str, device: Device, options: CommOptions) -> Result<Communicator> {
    register_built_backends();
    comm_core::new_comm(backend, device, options)
}

/// The names of the backends in this build, and of those registered since. Counterpart: `torchcomms.built_backends`.
#[must_use]
pub fn built_backends() -> Vec<String> {
    register_built_backends();
    comm_core::built_backends()
}

/// Whether a backend of this name is built in or registered. Counterpart: `torchcomms.is_backend_built`.
#[must_use]
pub fn is_backend_built(name: &str) -> bool {
    register_built_backends();
    comm_core::is_backend_built(name)
}

/// Joins the world that options and environment describe, over the embedded CPU backend. Collective.
///
/// # Errors
///
/// As [`backend_tcp::connect`].
#[cfg(feature = "tcp")]
pub fn connect(options: CommOptions) -> Result<Communicator> {
    register_built_backends();
    backend_tcp::connect(options)
}
