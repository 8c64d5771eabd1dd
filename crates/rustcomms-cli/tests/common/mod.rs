//! Launchers as child processes, with shell scripts as ranks.

// Every test file uses a part.
#![allow(dead_code)]

use std::collections::BTreeSet;
use std::fs::File;
use std::io::Read;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

/// Long enough for a loaded machine; nothing should take as long.
pub(crate) const LONG: Duration = Duration::from_secs(60);

/// A launcher that is killed when the test ends, however it ends.
pub(crate) struct Launcher {
    pub(crate) child: Child,
    pub(crate) out: File,
    pub(crate) err: File,
}

pub(crate) struct Ended {
    pub(crate) status: ExitStatus,
    pub(crate) out: Vec<u8>,
    pub(crate) err: String,
    pub(crate) took: Duration,
}

impl Ended {
    pub(crate) fn code(&self) -> i32 {
        self.status.code().unwrap_or_else(|| panic!("{:?}: {}", self.status, self.err))
    }

    pub(crate) fn lines(&self) -> BTreeSet<String> {
        String::from_utf8(self.out.clone()).unwrap().lines().map(str::to_owned).collect()
    }

    /// That it succeeded and said nothing.
    pub(crate) fn fine(self) -> Self {
        assert_eq!((self.code(), &*self.err), (0, ""));
        self
    }
}

impl Launcher {
    pub(crate) fn start(args: &[&str], script: &str) -> Self {
        Self::with(args, &["/bin/sh", "-c", script], |_| {})
    }

    pub(crate) fn with(args: &[&str], program: &[&str], change: impl FnOnce(&mut Command)) -> Self {
        let (out, err) = (tempfile::tempfile().unwrap(), tempfile::tempfile().unwrap());
        let mut c = Command::new(env!("CARGO_BIN_EXE_rustcomms"));
        c.arg("run").args(args).arg("--").args(program).env_remove("OMP_NUM_THREADS");
        c.stdin(Stdio::null()).stdout(out.try_clone().unwrap()).stderr(err.try_clone().unwrap());
        change(&mut c);
        Self { child: c.spawn().unwrap(), out, err }
    }

    pub(crate) fn signal(&self, s: Signal) {
        kill_process(Pid::from_raw(self.child.id() as i32).unwrap(), s).unwrap();
    }

    pub(crate) fn end(mut self) -> Ended {
        let start = Instant::now();
        let status = loop {
            match self.child.try_wait().unwrap() {
                Some(s) => break s,
                None if start.elapsed() > LONG => panic!("hangs; stderr so far: {}", self.stderr()),
                None => std::thread::sleep(Duration::from_millis(5)),
            }
        };
        Ended { status, out: contents(&self.out), err: self.stderr(), took: start.elapsed() }
    }

    pub(crate) fn stderr(&self) -> String {
        String::from_utf8_lossy(&contents(&self.err)).into_owned()
    }
}

impl Drop for Launcher {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// All of a file that another process writes through the same open file.
pub(crate) fn contents(file: &File) -> Vec<u8> {
    let mut all = Vec::new();
    File::open(format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(file)))
        .unwrap()
        .read_to_end(&mut all)
        .unwrap();
    all
}

pub(crate) fn run(args: &[&str], script: &str) -> Ended {
    Launcher::start(args, script).end()
}

pub(crate) fn lines(of: &[&str]) -> BTreeSet<String> {
    of.iter().map(|s| (*s).to_owned()).collect()
}

pub(crate) fn eventually(what: &str, mut f: impl FnMut() -> bool) {
    let start = Instant::now();
    while !f() {
        assert!(start.elapsed() < LONG, "never: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Whether a process runs. A zombie does not: who adopts it may be slow to bury it.
pub(crate) fn runs(pid: &str) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").is_some_and(|(_, rest)| !rest.starts_with(['Z', 'X']))
}

/// A script that writes the pids of itself and of a child of its own into `dir` and then stays.
pub(crate) fn stay(dir: &Path, before: &str) -> String {
    let dir = dir.display();
    format!(
        "{before}\nsleep 1000 & echo $! > {dir}/c$RANK.tmp; mv {dir}/c$RANK.tmp {dir}/c$RANK; echo $$ > {dir}/r$RANK.tmp; mv {dir}/r$RANK.tmp {dir}/r$RANK; while :; do wait; sleep 0.05; done"
    )
}

/// The pids that `n` ranks of [`stay`] wrote, when all have.
pub(crate) fn pids(dir: &Path, n: usize) -> Vec<String> {
    let names: Vec<_> = (0..n).flat_map(|i| [dir.join(format!("c{i}")), dir.join(format!("r{i}"))]).collect();
    eventually("all ranks are up", || names.iter().all(|n| n.exists()));
    let pids: Vec<String> = names.iter().map(|n| std::fs::read_to_string(n).unwrap().trim().to_owned()).collect();
    assert!(pids.iter().all(|p| runs(p)), "{pids:?}");
    pids
}

pub(crate) fn free_port() -> String {
    std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port().to_string()
}

/// Starts node `i` of two.
pub(crate) fn node(i: &str, port: &str, more: &[&str], script: &str) -> Launcher {
    let args = ["-n", "2", "--nnodes", "2", "--node-rank", i, "--master-addr", "127.0.0.1", "--master-port", port];
    Launcher::start(&[&args, more].concat(), script)
}
