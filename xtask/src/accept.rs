//! The acceptance commands: release programs run as users run them, and their reports are checked.

use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::crates::Workspace;
use crate::expect;
use crate::process::Run;

/// One run of a program takes seconds; this is for slow and busy machines.
const DEADLINE: Duration = Duration::from_secs(5 * 60);

/// Builds the programs, runs them, and checks their reports against [`expect`].
pub(crate) fn run(root: &Path) -> Result<(), String> {
    let target = Workspace::read(root)?.target;
    Run::cargo(root, &["build", "--release", "--bins", "--examples"]).run()?;
    let train = program(&target, "examples/train_digits", "the example train_digits of crates/rustcomms")?;
    let perf = program(&target, "rustcomms", "the binary rustcomms of crates/rustcomms-cli")?;
    let reports = target.join("xtask-accept");
    std::fs::create_dir_all(&reports).map_err(|e| format!("cannot create {}: {e}", reports.display()))?;

    let ranks = expect::TRAIN_RANKS.to_string();
    checked(root, &train, &["--ranks", &ranks], &reports.join("train_digits.json"), expect::training)?;
    for op in expect::OPS {
        for &world in expect::worlds(op) {
            let ranks = world.to_string();
            let args = [&["perf", op, "--ranks", &ranks], &expect::PERF_ARGS[..]].concat();
            let report = reports.join(format!("{op}-{world}.json"));
            checked(root, &perf, &args, &report, |json| expect::perf(op, world, json))?;
        }
    }
    Ok(())
}

/// A program that the build should have made.
pub(crate) fn program(target: &Path, name: &str, what: &str) -> Result<PathBuf, String> {
    let path = target.join("release").join(format!("{name}{}", std::env::consts::EXE_SUFFIX));
    if path.is_file() {
        Ok(path)
    } else {
        Err(format!("target/release/{name} is missing after the release build: {what} does not exist"))
    }
}

/// Runs a program that writes its report to `file`, and checks it.
fn checked(
    root: &Path,
    program: &Path,
    args: &[&str],
    file: &Path,
    check: impl Fn(&str) -> Result<String, String>,
) -> Result<(), String> {
    // A report of an earlier run must not stand in for one that was never written.
    match std::fs::remove_file(file) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
            return Err(format!("cannot remove the old {}: {e}", file.display()));
        }
        _ => {}
    }
    let line = format!("{} {}", program.file_name().unwrap_or_default().display(), args.join(" "));
    let file_name = file.to_str().ok_or_else(|| format!("{} is not UTF-8", file.display()))?;
    Run::new(root, program, &[args, &["--json", file_name]].concat()).deadline(DEADLINE).run()?;
    let json =
        std::fs::read_to_string(file).map_err(|e| format!("`{line}` wrote no report {}: {e}", file.display()))?;
    let summary = check(&json).map_err(|e| format!("`{line}`: {e}"))?;
    println!("    {summary}");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_program_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let e = program(dir.path(), "examples/train_digits", "the example").unwrap_err();
        assert!(e.contains("target/release/examples/train_digits is missing"), "{e}");
        std::fs::create_dir_all(dir.path().join("release")).unwrap();
        std::fs::write(dir.path().join("release/rustcomms"), "").unwrap();
        #[cfg(unix)]
        assert!(program(dir.path(), "rustcomms", "the binary").is_ok());
    }

    #[cfg(unix)]
    #[test]
    fn reports_are_fresh_and_checked() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("report.json");
        let sh = |script: &str, check: fn(&str) -> Result<String, String>| {
            checked(dir.path(), Path::new("/bin/sh"), &["-c", script], &file, check)
        };
        // `sh -c SCRIPT --json FILE`: $1 is the file.
        assert_eq!(sh("printf 7 > \"$1\"", |j| if j == "7" { Ok("ok".into()) } else { Err("not 7".into()) }), Ok(()));
        assert!(sh("printf 8 > \"$1\"", |_| Err("not 7".into())).unwrap_err().ends_with("not 7"));
        assert!(sh("exit 1", |_| Ok("".into())).unwrap_err().contains("exit status 1"));
        // The file of the call before the last one is still there, but not accepted.
        assert!(sh("printf 7 > \"$1\"", |_| Ok("".into())).is_ok());
        assert!(sh("true", |_| Ok("".into())).unwrap_err().contains("wrote no report"));
    }
}
