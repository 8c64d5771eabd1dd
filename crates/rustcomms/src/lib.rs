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
