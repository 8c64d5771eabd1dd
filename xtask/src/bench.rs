//! `cargo xtask bench NAME`: the benchmark programs whose results are kept in `benches/results`.

use std::path::Path;
use std::time::Duration;

use crate::process::Run;

/// Long enough for a full run of any of them on a busy machine.
const DEADLINE: Duration = Duration::from_secs(30 * 60);

/// A benchmark, and what it is told.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Bench {
    pub(crate) name: Name,
    /// Fewer and shorter runs.
    pub(crate) quick: bool,
    /// Where results go, if not to `benches/results`.
    pub(crate) out: Option<String>,
}

/// Which benchmark: a program of the package `benches` with this name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Name {
    Compare,
    Scale,
}

impl Name {
    pub(crate) const ALL: [Self; 2] = [Self::Compare, Self::Scale];

    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Compare => "compare",
            Self::Scale => "scale",
        }
    }

    pub(crate) const fn about(self) -> &'static str {
        match self {
            Self::Compare => {
                "ours beside Open MPI and Gloo; has options of its own, see `cargo xtask bench compare --help`"
            }
            Self::Scale => "cost of each algorithm from 2 to 100,000 simulated ranks",
        }
    }

    pub(crate) fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|n| n.name() == name)
    }
}

/// Builds the program with optimisation and runs it; its last lines stay the last.
pub(crate) fn run(root: &Path, bench: &Bench) -> Result<(), String> {
    let mut args = vec!["run", "--release", "--quiet", "-p", "benches", "--bin", bench.name.name(), "--"];
    if bench.quick {
        args.push("--quick");
    }
    if let Some(out) = &bench.out {
        args.extend(["--out", out]);
    }
    Run::cargo(root, &["build", "--release", "--quiet", "-p", "benches", "--bin", bench.name.name()]).run()?;
    Run::cargo(root, &args).deadline(DEADLINE).run_last()
}
