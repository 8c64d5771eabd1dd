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
/// and last `N passed, N failed`.
pub(crate) fn run(root: &Path, full: bool) -> Result<(), String> {
    let target = Workspace::read(root)?.target;
    Run::cargo(root, &["build", "--release", "-p", "comm-conformance", "--example", "conformance"]).run()?;
    let runner = program(&target, "examples/conformance", "the example conformance of crates/comm-conformance")?;
    let (args, deadline): (&[&str], _) = if full { (&["--full"], FULL) } else { (&[], QUICK) };
    Run::new(root, &runner, args).deadline(deadline).run_last()
}
