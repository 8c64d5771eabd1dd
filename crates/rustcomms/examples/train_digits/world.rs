//! Where the ranks come from.
//!
//! STAND-IN until the facade can launch processes: the ranks are threads of this process.

use std::process::ExitCode;

use rustcomms::Communicator;

use crate::Failure;

#[path = "../../tests/memory_world/mod.rs"]
mod memory_world;

/// Whether this process is a rank that somebody launched.
pub(crate) const fn is_rank() -> bool {
    false
}

/// Runs `rank_main` as one of the launcher's ranks or, if there is no launcher, starts `ranks` of them here and
/// returns when all have ended.
pub(crate) fn run(ranks: usize, rank_main: impl Fn(Communicator) -> ExitCode + Sync) -> Result<ExitCode, Failure> {
    let comms = memory_world::world(ranks, None)?;
    let codes = std::thread::scope(|s| {
        let threads: Vec<_> = comms.into_iter().map(|c| s.spawn(|| rank_main(c))).collect();
        threads.into_iter().map(|t| t.join().unwrap_or(ExitCode::FAILURE)).collect::<Vec<_>>()
    });
    Ok(if codes.iter().all(|c| *c == ExitCode::SUCCESS) { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
