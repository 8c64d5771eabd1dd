//! The conformance suite over the workspace's backends: every operation's calls, checked against independent results.

use std::path::Path;
use std::time::Duration;

use crate::accept::program;
use crate::crates::Workspace;
use crate::process::Run;

/// What a quick and a full run may take, on two cores.
const QUICK: Duration = Duration::from_secs(6 * 60);
const FULL: Duration = Duration::from_secs(30 * 60);

/// Builds the runner and runs it over sim and tcp, with every algorithm. It prints the number of cases per operation,
/// and last `N passed, N failed`; first over worlds that are connected sparsely, then over ordinary ones.
pub(crate) fn run(root: &Path, full: bool) -> Result<(), String> {
    let target = Workspace::read(root)?.target;
    Run::cargo(root, &["build", "--release", "-p", "comm-conformance", "--example", "conformance"]).run()?;
    let runner = program(&target, "examples/conformance", "the example conformance of crates/comm-conformance")?;
    let (args, deadline): (&[&str], _) = if full { (&["--full"], FULL) } else { (&[], QUICK) };
    // Worlds in which most ranks have no link to each other when they start; the default is what small worlds do.
    Run::new(root, &runner, args).env("RUSTCOMMS_CONNECT", "ring").deadline(deadline).run()?;
    Run::new(root, &runner, args).deadline(deadline).run_last()
}
