//! `cargo xtask interop-store`: our store and launcher variables against a real PyTorch, which pip brings (5 GB).

use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::process::Run;

/// Long enough for the download.
const INSTALL: Duration = Duration::from_secs(60 * 60);

/// Builds our side, installs theirs if it is not there, and runs all checks.
pub(crate) fn run(root: &Path) -> Result<(), String> {
    let target = std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root.join("target"), |dir| root.join(dir));
    let venv = target.join("interop").join("venv");
    let python = venv.join("bin").join("python");
    install(root, &venv, &python)?;
    let script = root.join("xtask").join("interop.py");
    let peer = build(root, &target, "comm-store", "interop_peer")?;
    let rank = build(root, &target, "rustcomms", "reductions")?;
    let text = |p: &Path| p.to_str().map(str::to_owned).ok_or_else(|| format!("{} is not UTF-8", p.display()));
    Run::new(root, python, &[&text(&script)?, &text(&peer)?, &text(&rank)?])
        .deadline(Duration::from_secs(20 * 60))
        .run_last()
}

/// PyTorch in an environment of its own, once.
fn install(root: &Path, venv: &Path, python: &Path) -> Result<(), String> {
    let there = ["-c", "import torch, numpy; print(torch.__version__)"];
    if python.exists()
        && let Ok(version) = Run::new(root, python, &there).output()
    {
        println!("    PyTorch {}", version.trim());
        return Ok(());
    }
    println!("    PyTorch is not in {}; installing it there takes 6 GB and minutes", venv.display());
    let venv = venv.to_str().ok_or_else(|| format!("{} is not UTF-8", venv.display()))?;
    Run::new(root, "python3", &["-m", "venv", venv]).run()?;
    Run::new(root, python, &["-m", "pip", "install", "--quiet", "torch", "numpy"]).deadline(INSTALL).run()
}

fn build(root: &Path, target: &Path, package: &str, example: &str) -> Result<PathBuf, String> {
    Run::cargo(root, &["build", "--quiet", "-p", package, "--example", example]).run()?;
    Ok(target.join("debug").join("examples").join(example))
}
