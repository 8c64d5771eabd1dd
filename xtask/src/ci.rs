//! The steps of `cargo xtask ci`.

use std::path::Path;
use std::time::{Duration, Instant};

use crate::args::Selection;
use crate::chaos::{self, Chaos};
use crate::process::{Run, seconds};
use crate::{accept, conformance, crates, hygiene, namespaces};

/// A test run that takes longer hangs.
const TEST_DEADLINE: Duration = Duration::from_secs(25 * 60);

/// One step; cheap ones come first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    Fmt,
    Hygiene,
    Clippy,
    Doc,
    Test,
    CratesAlone,
    Kernels,
    Conformance,
    Chaos,
    Accept,
}

impl Step {
    /// All, in the order in which they run.
    pub(crate) const ALL: [Self; 10] = [
        Self::Fmt,
        Self::Hygiene,
        Self::Clippy,
        Self::Doc,
        Self::Test,
        Self::CratesAlone,
        Self::Kernels,
        Self::Conformance,
        Self::Chaos,
        Self::Accept,
    ];

    /// The name for `--only` and `--skip`.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Fmt => "fmt",
            Self::Hygiene => "hygiene",
            Self::Clippy => "clippy",
            Self::Doc => "doc",
            Self::Test => "test",
            Self::CratesAlone => "crates-alone",
            Self::Kernels => "kernels",
            Self::Conformance => "conformance",
            Self::Chaos => "chaos",
            Self::Accept => "accept",
        }
    }

    /// One line for `--help`.
    pub(crate) const fn about(self) -> &'static str {
        match self {
            Self::Fmt => "the sources are formatted",
            Self::Hygiene => "tracked files: no stubs, machine paths, binaries or overlong sources; manifests inherit",
            Self::Clippy => "no lint on the listed feature sets",
            Self::Doc => "the documentation builds without warnings",
            Self::Test => "all tests and doc tests, with a deadline, leaving no process behind",
            Self::CratesAlone => "each crate builds alone; the CPU build has no GPU crate and no async runtime",
            Self::Kernels => "committed GPU kernels match their sources (there are none yet)",
            Self::Conformance => {
                "every operation's calls over sim and tcp, with every algorithm, give what they should"
            }
            Self::Chaos => "random programs while ranks are killed and links damaged: no hang, no wrong value, no leak",
            Self::Accept => "release programs: the training example and perf compute what they should",
        }
    }

    pub(crate) fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|s| s.name() == name)
    }

    fn run(self, root: &Path) -> Result<(), String> {
        match self {
            Self::Fmt => {
                Run::cargo(root, &["fmt", "--all", "--check"]).run()?;
                Run::cargo(root, &["fmt", "--manifest-path", "fuzz/Cargo.toml", "--check"]).run()
            }
            Self::Hygiene => hygiene::run(root),
            Self::Clippy => clippy(root),
            Self::Doc => {
                Run::cargo(root, &["doc", "--workspace", "--no-deps"]).env("RUSTDOCFLAGS", "-D warnings").run()
            }
            Self::Test => {
                let mut tests = Run::cargo(root, &["test", "--workspace", "--all-targets"]).deadline(TEST_DEADLINE);
                if let Some((name, value)) = namespaces::requirement() {
                    tests = tests.env(name, value);
                }
                tests.run()?;
                Run::cargo(root, &["test", "--workspace", "--doc"]).deadline(TEST_DEADLINE).run()
            }
            Self::CratesAlone => crates::alone(root),
            Self::Kernels => {
                println!("    nothing to check: this version has no GPU kernels");
                Ok(())
            }
            Self::Conformance => conformance::run(root, false),
            Self::Chaos => chaos::run(root, &Chaos::QUICK),
            Self::Accept => accept::run(root),
        }
    }
}

/// Feature sets of the facade that programs choose, beside the default one of the whole workspace.
fn clippy(root: &Path) -> Result<(), String> {
    let sets: [&[&str]; 3] = [
        &["--workspace"],
        &["-p", "rustcomms", "--no-default-features"],
        &["-p", "rustcomms", "--features", "all-cpu"],
    ];
    for set in sets {
        let args = [&["clippy"], set, &["--all-targets", "--", "-D", "warnings"]].concat();
        Run::cargo(root, &args).run()?;
    }
    // The fuzz targets are a workspace of their own, which nothing else builds here. Linking would need libFuzzer, and
    // that a C++ compiler; being told that it is there already, its crate builds nothing.
    let args = ["clippy", "--manifest-path", "fuzz/Cargo.toml", "--target-dir", "target", "--", "-D", "warnings"];
    Run::cargo(root, &args).env("CUSTOM_LIBFUZZER_PATH", "/dev/null").run()
}

/// Runs the selected steps and stops at the first that fails.
pub(crate) fn run(root: &Path, selection: &Selection) -> Result<(), String> {
    let chosen: Vec<Step> = Step::ALL.into_iter().filter(|s| selection.takes(*s)).collect();
    let start = Instant::now();
    for (i, step) in chosen.iter().enumerate() {
        println!("== {} ({}/{}): {}", step.name(), i + 1, chosen.len(), step.about());
        let began = Instant::now();
        step.run(root)
            .map_err(|e| format!("ci: FAILED at step {} after {}: {e}", step.name(), seconds(began.elapsed())))?;
        println!("== {} passed in {}", step.name(), seconds(began.elapsed()));
    }
    let left: Vec<&str> = Step::ALL.into_iter().filter(|s| !chosen.contains(s)).map(Step::name).collect();
    let note = if left.is_empty() { String::new() } else { format!("; not run: {}", left.join(", ")) };
    println!("ci: {} step(s) passed in {}{note}", chosen.len(), seconds(start.elapsed()));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique_and_lead_back() {
        for step in Step::ALL {
            assert_eq!(Step::from_name(step.name()), Some(step));
        }
        assert_eq!(Step::from_name("Fmt"), None);
    }
}
