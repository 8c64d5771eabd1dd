//! `cargo xtask chaos`: random programs in worlds to which something happens.

use std::path::Path;
use std::time::Duration;

use crate::accept::program;
use crate::crates::Workspace;
use crate::process::Run;

/// What is run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Chaos {
    /// Simulated worlds.
    pub(crate) seeds: u64,
    /// Worlds of processes.
    pub(crate) processes: u64,
    /// The first seed of both.
    pub(crate) first: u64,
    /// Whether to look for leaks.
    pub(crate) leaks: bool,
}

impl Chaos {
    /// Everything, as often as a release wants.
    pub(crate) const FULL: Self = Self { seeds: 1000, processes: 100, first: 1, leaks: true };
    /// A look, for every commit.
    pub(crate) const QUICK: Self = Self { seeds: 200, processes: 10, first: 1, leaks: true };
    /// Nothing.
    pub(crate) const NONE: Self = Self { seeds: 0, processes: 0, first: 1, leaks: false };
}

/// On two cores that are shared: a world of processes takes about a second, leaks up to two minutes.
const DEADLINE: Duration = Duration::from_secs(25 * 60);

/// Builds the program and runs it. It prints what failed, times, and last `N passed, N failed`.
pub(crate) fn run(root: &Path, chaos: &Chaos) -> Result<(), String> {
    let target = Workspace::read(root)?.target;
    Run::cargo(root, &["build", "--release", "-p", "comm-conformance", "--example", "chaos"]).run()?;
    let runner = program(&target, "examples/chaos", "the example chaos of crates/comm-conformance")?;
    let [seeds, processes, first] = [chaos.seeds, chaos.processes, chaos.first].map(|n| n.to_string());
    let mut args = vec!["--seeds", &seeds, "--processes", &processes, "--first", &first];
    if chaos.leaks {
        args.push("--leaks");
    }
    Run::new(root, &runner, &args).deadline(DEADLINE).run_last()
}
