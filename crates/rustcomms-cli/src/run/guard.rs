//! A second process that outlives the launcher for a moment, to end what it left.
//!
//! When the launcher is killed with SIGKILL, the kernel kills the ranks (they asked for it when they
//! started), but not what the ranks have started: for a shell script as the rank, that is
//! the program proper. The guard holds the read end of a pipe whose write end only the launcher has;
//! when the pipe ends, it kills the process groups that the launcher had named and not taken back.

use std::collections::BTreeSet;
use std::io::{BufRead, Write};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, ChildStdin, Command, ExitCode, Stdio};

use rustix::process::{Pid, Signal, kill_process_group};

/// The name of the hidden subcommand.
pub(crate) const GUARD: &str = "run-guard";

/// The guard's process.
pub(crate) fn guard() -> ExitCode {
    let mut groups = BTreeSet::new();
    for line in std::io::stdin().lock().lines() {
        let Ok(line) = line else { break };
        match (line.get(..1), line.get(1..).and_then(|n| n.parse::<i32>().ok())) {
            (Some("+"), Some(n)) => drop(groups.insert(n)),
            (Some("-"), Some(n)) => drop(groups.remove(&n)),
            _ => return ExitCode::FAILURE,
        }
    }
    for pid in groups.into_iter().filter_map(Pid::from_raw) {
        // Mostly gone already.
        let _ = kill_process_group(pid, Signal::KILL);
    }
    ExitCode::SUCCESS
}

/// The file of the running program. The one at its path can be a newer build by now; the link is the file that runs.
pub(crate) fn this_program() -> std::io::Result<PathBuf> {
    let link = PathBuf::from("/proc/self/exe");
    if link.exists() { Ok(link) } else { std::env::current_exe() }
}

/// The launcher's end.
#[derive(Debug)]
pub(super) struct Guard {
    child: Child,
    pipe: Option<ChildStdin>,
}

impl Guard {
    /// Starts the guard, outside the launcher's process group, where no terminal's signals come.
    pub(super) fn start() -> std::io::Result<Self> {
        let mut child = Command::new(this_program()?)
            .arg(GUARD)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .process_group(0)
            .spawn()?;
        let pipe = child.stdin.take();
        Ok(Self { child, pipe })
    }

    fn tell(&mut self, sign: char, pid: Pid) {
        // Without a guard, the ranks themselves still die with the launcher.
        if let Some(pipe) = &mut self.pipe
            && pipe.write_all(format!("{sign}{}\n", pid.as_raw_nonzero()).as_bytes()).is_err()
        {
            self.pipe = None;
        }
    }

    /// `group` is to be killed if the launcher dies.
    pub(super) fn add(&mut self, group: Pid) {
        self.tell('+', group);
    }

    /// `group` has ended; its number may soon be another's.
    pub(super) fn remove(&mut self, group: Pid) {
        self.tell('-', group);
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.pipe = None;
        // It has nothing left to do and ends at once.
        let _ = self.child.wait();
    }
}
