//! Where the ranks come from: a launcher, or this program itself.

use std::process::ExitCode;

use rustcomms::{CommOptions, Communicator};

use crate::Failure;

/// Whether this process is a rank that somebody launched.
pub(crate) fn is_rank() -> bool {
    rustcomms::launch::is_rank()
}

/// Runs `rank_main` as one of the launcher's ranks or, if there is no launcher, starts `ranks` of them
/// here and returns when all have ended.
pub(crate) fn run(ranks: usize, rank_main: impl Fn(Communicator) -> ExitCode) -> Result<ExitCode, Failure> {
    if is_rank() {
        return Ok(rank_main(rustcomms::connect(CommOptions::new().name("train"))?));
    }
    Ok(rustcomms::launch::spawn_local(ranks)?)
}
