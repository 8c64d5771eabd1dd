//! `cargo xtask bench compare`: ours beside Open MPI and Gloo. Installs and compiles these, and runs the program that compares.

use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::crates::Workspace;
use crate::process::Run;

/// Installing and compiling a peer.
const SET_UP: Duration = Duration::from_secs(10 * 60);

/// A program of `benches/peers`.
#[derive(Debug, PartialEq, Eq)]
struct Peer {
    name: &'static str,
    /// Of Debian.
    packages: &'static [&'static str],
    source: &'static str,
    /// The compiler and what it is told besides names of files, before and behind them.
    compiler: &'static str,
    flags: &'static [&'static str],
    libraries: &'static [&'static str],
}

/// The peers are compiled for this processor: what they lose shall not be lost there.
const PEERS: [Peer; 2] = [
    Peer {
        name: "openmpi",
        packages: &["openmpi-bin", "libopenmpi-dev"],
        source: "openmpi.c",
        compiler: "mpicc",
        flags: &["-std=c11", "-D_GNU_SOURCE", "-O3", "-march=native", "-Wall", "-Wextra"],
        libraries: &[],
    },
    Peer {
        name: "gloo",
        packages: &["libgloo-dev", "g++"],
        source: "gloo.cc",
        compiler: "g++",
        flags: &["-std=c++17", "-D_GNU_SOURCE", "-O3", "-march=native", "-Wall"],
        libraries: &["-lgloo", "-lpthread"],
    },
];

/// Everything, with the options that follow `bench compare`; the program understands them.
pub(crate) fn run(root: &Path, options: &[String]) -> Result<(), String> {
    Run::cargo(root, &["build", "--release", "--quiet", "-p", "benches", "--bin", "compare"]).deadline(SET_UP).run()?;
    let program = |first: &[&'static str]| -> Vec<String> {
        let fixed = ["run", "--release", "--quiet", "-p", "benches", "--bin", "compare", "--"];
        fixed.iter().chain(first).map(|s| (*s).to_owned()).chain(options.iter().cloned()).collect()
    };
    fn strs(args: &[String]) -> Vec<&str> {
        args.iter().map(String::as_str).collect()
    }
    if options.iter().any(|o| o == "--help" || o == "-h") {
        return Run::cargo(root, &strs(&program(&[]))).run_last();
    }
    // Before anything is installed: a mistake in the options is told here.
    let needs = Run::cargo(root, &strs(&program(&["needs"]))).output()?;
    let (peers, deadline) =
        needs_of(&needs).ok_or_else(|| format!("compare does not say what it needs, but '{needs}'"))?;
    let folder = Workspace::read(root)?.target.join("peers");
    std::fs::create_dir_all(&folder).map_err(|e| format!("cannot make the folder {}: {e}", folder.display()))?;
    for peer in peers {
        install(peer.packages, &is_installed(root), &mut |words| {
            Run::new(root, words[0], &words[1..]).env("DEBIAN_FRONTEND", "noninteractive").deadline(SET_UP).run()
        })?;
        compile(root, peer, &folder)?;
    }
    let mut args = program(&[]);
    if !options.iter().any(|o| o == "--peers" || o.starts_with("--peers=")) && folder != root.join("target/peers") {
        args.extend(["--peers".to_owned(), folder.display().to_string()]);
    }
    Run::cargo(root, &strs(&args)).deadline(deadline).run_last()
}

/// The two lines of `compare needs`: names of peers, and seconds.
fn needs_of(text: &str) -> Option<(Vec<&'static Peer>, Duration)> {
    let (names, seconds) = text.trim().split_once('\n')?;
    let find = |name: &str| PEERS.iter().find(|p| p.name == name);
    Some((names.split(',').map(find).collect::<Option<_>>()?, Duration::from_secs(seconds.trim().parse().ok()?)))
}

/// Says of a Debian package whether it is there; `None` on systems without such packages.
fn is_installed(root: &Path) -> impl Fn(&str) -> Option<bool> {
    let all = Run::new(root, "dpkg-query", &["-W", "-f=${Package} ${db:Status-Status}\n"]).output().ok();
    move |package| all.as_ref().map(|all| all.lines().any(|l| l.split_once(' ') == Some((package, "installed"))))
}

/// Installs those that are missing. Where there are no such packages, compiling shows whether the peer is there.
fn install(
    packages: &[&str],
    is_installed: &dyn Fn(&str) -> Option<bool>,
    run: &mut dyn FnMut(&[&str]) -> Result<(), String>,
) -> Result<(), String> {
    let missing: Vec<&str> = packages.iter().copied().filter(|p| is_installed(p) == Some(false)).collect();
    if missing.is_empty() {
        return Ok(());
    }
    let mut tried = Vec::new();
    // As root, or as one who may become root without a password; with the lists that are there, or newer ones.
    for sudo in [&[][..], &["sudo", "-n"]] {
        for update in [false, true] {
            let steps: [&[&str]; 2] =
                [&["apt-get", "update"], &["apt-get", "install", "-y", "--no-install-recommends"]];
            let mut ended = Ok(());
            for step in if update { &steps[..] } else { &steps[1..] } {
                let packages = if step[1] == "install" { missing.as_slice() } else { &[] };
                let words: Vec<&str> = [sudo, step, packages].concat();
                ended = run(&words);
                if let Err(e) = &ended {
                    tried.push(e.clone());
                    break;
                }
            }
            if ended.is_ok() {
                return Ok(());
            }
        }
    }
    Err(format!(
        "{} cannot be installed; install with the rights for it (`apt-get install {}`), or leave the peer out with --against. Tried: {}",
        missing.join(", "),
        missing.join(" "),
        tried.join("; ")
    ))
}

fn compile(root: &Path, peer: &Peer, folder: &Path) -> Result<(), String> {
    let to: PathBuf = folder.join(peer.name);
    let (source, to) = (format!("benches/peers/{}", peer.source), to.display().to_string());
    let args: Vec<&str> = [peer.flags, &[source.as_str(), "-o", to.as_str()], peer.libraries].concat();
    Run::new(root, peer.compiler, &args).deadline(SET_UP).run().map_err(|e| {
        format!(
            "{e}; the peer {} needs what Debian has as {}, or leave it out with --against",
            peer.name,
            peer.packages.join(", ")
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_compare_needs() {
        let (peers, deadline) = needs_of("gloo,openmpi\n4560\n").unwrap();
        assert_eq!((peers[0].name, peers[1].name, deadline.as_secs()), ("gloo", "openmpi", 4560));
        for bad in ["", "gloo", "gloo\nsoon", "mpich\n60"] {
            assert!(needs_of(bad).is_none(), "{bad}");
        }
    }

    #[test]
    fn only_what_is_missing_is_installed() {
        let mut ran = Vec::new();
        let mut run = |words: &[&str]| {
            ran.push(words.join(" "));
            Ok(())
        };
        install(&["a", "b"], &|_| Some(true), &mut run).unwrap();
        install(&["a", "b"], &|_| None, &mut run).unwrap();
        install(&["a", "b", "c"], &|p| Some(p == "b"), &mut run).unwrap();
        assert_eq!(ran, ["apt-get install -y --no-install-recommends a c"]);
    }

    #[test]
    fn everything_is_tried_and_told() {
        let mut ran = Vec::new();
        let e = install(&["a"], &|_| Some(false), &mut |words| {
            ran.push(words.join(" "));
            if words.contains(&"update") { Ok(()) } else { Err(format!("`{}` failed", words.join(" "))) }
        })
        .unwrap_err();
        let install = "apt-get install -y --no-install-recommends a";
        let sudo = format!("sudo -n {install}");
        assert_eq!(ran, [install, "apt-get update", install, &sudo, "sudo -n apt-get update", &sudo]);
        assert!(
            e.contains("--against") && e.contains("`apt-get install a`") && e.contains(&format!("`{sudo}` failed")),
            "{e}"
        );
    }

    #[test]
    fn the_sources_are_there() {
        let folder = crate::root().join("benches/peers");
        assert!(PEERS.iter().all(|p| folder.join(p.source).is_file()), "{}", folder.display());
    }
}
