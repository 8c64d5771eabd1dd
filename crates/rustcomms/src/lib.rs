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

#[cfg(feature = "tcp")]
pub mod launch;

use std::sync::Once;

pub use comm_core::*;
#[cfg(feature = "tcp")]
pub use comm_store as store;

/// Ranks as threads of one process, for users' tests.
///
/// Depend on rustcomms with the feature `sim` in `[dev-dependencies]`, and write code that takes a [`Communicator`]:
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
#[cfg(feature = "sim")]
pub mod testing {
    pub use backend_sim::{RankPanic, run_ranks, run_ranks_with};
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
