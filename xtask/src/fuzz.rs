//! The fuzz targets of `fuzz/`: what reads bytes of others, on inputs that libFuzzer makes up.
//!
//! They are built by the workspace's own toolchain. Its instrumentation is there but not for everybody, hence
//! `RUSTC_BOOTSTRAP`; sanitizers are not used, because what is fuzzed is safe Rust.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::crates::Workspace;
use crate::process::{Run, seconds};

/// What installs what cargo lacks.
const CARGO_FUZZ: [&str; 5] = ["install", "cargo-fuzz", "--locked", "--version", "0.13.2"];
/// Longest input in bytes. Lengths within it are written in few bytes, so longer ones would only be slower.
const MAX_LEN: &str = "-max_len=2048";
/// An input that takes longer hangs, in seconds.
const TIMEOUT: &str = "-timeout=10";

/// What to run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Fuzz {
    /// If not empty, only these.
    pub(crate) targets: Vec<String>,
    /// Inputs to each.
    pub(crate) runs: u64,
    /// Memory that a target may take, in MiB.
    pub(crate) rss_limit_mb: u64,
}

impl Default for Fuzz {
    fn default() -> Self {
        Self { targets: Vec::new(), runs: 1_000_000, rss_limit_mb: 256 }
    }
}

/// Builds the targets, runs each, and prints last `N targets passed, N failed`.
pub(crate) fn run(root: &Path, fuzz: &Fuzz) -> Result<(), String> {
    let dir = root.join("fuzz");
    let manifest = dir.join("Cargo.toml");
    let text = std::fs::read_to_string(&manifest).map_err(|e| format!("cannot read {}: {e}", manifest.display()))?;
    let all = targets(&text);
    let chosen = choose(&all, &fuzz.targets)?;
    let out = Workspace::read(root)?.target.join("fuzz");
    let out_text = out.display().to_string();
    if Run::cargo(root, &["fuzz", "--version"]).output().is_err() {
        Run::cargo(root, &CARGO_FUZZ).run()?;
    }
    let host = host(root)?;
    let mut build = vec!["fuzz", "build", "--fuzz-dir", ".", "--release", "--sanitizer", "none"];
    build.extend(["--target", &host, "--target-dir", &out_text]);
    Run::cargo(&dir, &build).env("RUSTC_BOOTSTRAP", "1").run()?;
    let mut failed = 0;
    for target in &chosen {
        let program = out.join(&host).join("release").join(target);
        if let Err(e) = one(&dir, &out, &program, target, fuzz) {
            println!("    {e}");
            failed += 1;
        }
    }
    println!("{} targets passed, {failed} failed", chosen.len() - failed);
    if failed == 0 { Ok(()) } else { Err(format!("{failed} target(s) found something, see above")) }
}

fn one(dir: &Path, out: &Path, program: &Path, target: &str, fuzz: &Fuzz) -> Result<(), String> {
    let io = |what: &str, path: &Path, e: &std::io::Error| format!("{target}: cannot {what} {}: {e}", path.display());
    // What was found interesting stays for the next time; seeds are written anew.
    let (corpus, seeds, found) = (out.join("corpus"), out.join("seeds"), out.join("found"));
    let [corpus, seeds, found] = [corpus, seeds, found].map(|d| d.join(target));
    for d in [&corpus, &seeds, &found] {
        std::fs::create_dir_all(d).map_err(|e| io("make", d, &e))?;
    }
    let list = dir.join("seeds").join(format!("{target}.txt"));
    let text = std::fs::read_to_string(&list).map_err(|e| io("read", &list, &e))?;
    for (name, bytes) in read_seeds(&text).map_err(|e| format!("{}: {e}", list.display()))? {
        let file = seeds.join(name);
        std::fs::write(&file, bytes).map_err(|e| io("write", &file, &e))?;
    }
    let log = out.join(format!("{target}.log"));
    let own = [
        format!("-runs={}", fuzz.runs),
        format!("-rss_limit_mb={}", fuzz.rss_limit_mb),
        format!("-artifact_prefix={}/", found.display()),
    ];
    let shown = |p: &Path| p.display().to_string();
    let paths = [shown(&log), shown(program), shown(&corpus), shown(&seeds)];
    // libFuzzer writes a line per discovery; the log has them, the terminal need not.
    let script = "log=$0; exec \"$@\" >\"$log\" 2>&1";
    let mut args = vec!["-c", script];
    args.extend(paths.iter().map(String::as_str));
    args.extend(own.iter().map(String::as_str));
    args.extend([TIMEOUT, MAX_LEN, "-print_final_stats=1"]);
    // The slowest target does thousands in a second; a machine may be slower by far.
    let deadline = Duration::from_secs(600 + fuzz.runs / 500);
    let start = Instant::now();
    let ended = Run::new(dir, "sh", &args).deadline(deadline).output();
    let text = String::from_utf8_lossy(&std::fs::read(&log).unwrap_or_default()).into_owned();
    match ended {
        Ok(_) => {
            let stats = stats(&text);
            let of = |key: &str| stats.get(key).map_or("?", String::as_str);
            println!(
                "    {target}: {} executions in {}, peak rss {} MiB, no finding",
                of("number_of_executed_units"),
                seconds(start.elapsed()),
                of("peak_rss_mb")
            );
            Ok(())
        }
        Err(e) => {
            let lines: Vec<&str> = text.lines().collect();
            for line in &lines[lines.len().saturating_sub(40)..] {
                println!("    {line}");
            }
            let (input, log) = (found.display(), log.display());
            Err(format!("{target}: FAILED: {e}\n    the input lies in {input}, all of what it said in {log}"))
        }
    }
}

/// The names of the programs in a manifest.
fn targets(manifest: &str) -> Vec<String> {
    let mut bin = false;
    let mut names = Vec::new();
    for line in manifest.lines().map(str::trim) {
        if line.starts_with('[') {
            bin = line == "[[bin]]";
        } else if let Some(name) = line.strip_prefix("name = ").filter(|_| bin) {
            names.push(name.trim_matches('"').to_owned());
        }
    }
    names
}

fn choose(all: &[String], wanted: &[String]) -> Result<Vec<String>, String> {
    if let Some(unknown) = wanted.iter().find(|w| !all.contains(w)) {
        return Err(format!("no target is called '{unknown}'; targets: {}", all.join(", ")));
    }
    Ok(all.iter().filter(|t| wanted.is_empty() || wanted.contains(t)).cloned().collect())
}

/// The target triple of this machine, which is part of the programs' paths.
fn host(root: &Path) -> Result<String, String> {
    let rustc = std::env::var_os("RUSTC").map_or_else(|| PathBuf::from("rustc"), PathBuf::from);
    let text = Run::new(root, rustc, &["-vV"]).output()?;
    let host = text.lines().find_map(|l| l.strip_prefix("host: "));
    host.map(str::to_owned).ok_or_else(|| "rustc does not say for what it compiles".to_owned())
}

/// The seeds in a text: a name and bytes in hex per line, `#` before remarks.
fn read_seeds(text: &str) -> Result<Vec<(&str, Vec<u8>)>, String> {
    let mut seeds = Vec::new();
    for (i, line) in text.lines().enumerate().filter(|(_, l)| !l.is_empty() && !l.starts_with('#')) {
        let bad = |what: &str| format!("line {}: {what}", i + 1);
        let (name, hex) = line.split_once(' ').unwrap_or((line, ""));
        if !name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_') {
            return Err(bad("a seed's name has letters, digits and underscores"));
        }
        let digits: Option<Vec<u32>> = hex.chars().map(|c| c.to_digit(16)).collect();
        let digits = digits.filter(|d| d.len().is_multiple_of(2)).ok_or_else(|| bad("not pairs of hex digits"))?;
        seeds.push((name, digits.chunks(2).map(|d| (d[0] * 16 + d[1]) as u8).collect()));
    }
    Ok(seeds)
}

/// The figures that libFuzzer prints last.
fn stats(log: &str) -> BTreeMap<&str, String> {
    let lines = log.lines().filter_map(|l| l.strip_prefix("stat::")?.split_once(':'));
    lines.map(|(key, value)| (key, value.trim().to_owned())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn targets_are_the_programs_of_the_manifest() {
        let text = "[package]\nname = \"p\"\n[[bin]]\nname = \"a\"\npath = \"a.rs\"\n[lib]\nname = \"l\"\n[[bin]]\nname = \"b\"\n";
        let all = targets(text);
        assert_eq!(all, ["a", "b"]);
        assert_eq!(choose(&all, &[]), Ok(all.clone()));
        assert_eq!(choose(&all, &["b".to_owned()]), Ok(vec!["b".to_owned()]));
        assert!(choose(&all, &["c".to_owned()]).unwrap_err().contains("targets: a, b"));
    }

    #[test]
    fn seeds_are_hex() {
        let text = "# remark\n\nempty \none 00fF\nnone";
        let seeds = read_seeds(text).unwrap();
        assert_eq!(seeds, [("empty", vec![]), ("one", vec![0, 255]), ("none", vec![])]);
        assert!(read_seeds("x 0").unwrap_err().contains("line 1"));
        assert!(read_seeds("# r\nx 0g").unwrap_err().contains("line 2"));
        assert!(read_seeds("../x 00").is_err());
    }

    /// The committed ones are few and small, and there are some for every target.
    #[test]
    fn committed_seeds_are_small() {
        let dir = crate::root().join("fuzz");
        for target in targets(&std::fs::read_to_string(dir.join("Cargo.toml")).unwrap()) {
            let text = std::fs::read_to_string(dir.join("seeds").join(format!("{target}.txt"))).unwrap();
            let seeds = read_seeds(&text).unwrap();
            assert!((1..=50).contains(&seeds.len()), "{target}: {}", seeds.len());
            assert!(seeds.iter().all(|(_, b)| b.len() <= 1024), "{target}");
        }
    }

    #[test]
    fn figures_are_found_in_a_log() {
        let s = stats("#5 DONE\nstat::number_of_executed_units: 5\nstat::peak_rss_mb:              28\n");
        assert_eq!((s["number_of_executed_units"].as_str(), s["peak_rss_mb"].as_str()), ("5", "28"));
    }
}
