//! Child processes with a deadline, and without survivors.
//!
//! A test that hangs must fail, and a test that ends must leave no process behind. Every command gets an
//! environment variable of its own, which all its descendants inherit; whoever still has it when the
//! command is over is a leftover, orphans included. A process group would not do: it takes the command
//! out of the terminal's foreground, so that Ctrl-C would not reach it.

use std::ffi::OsStr;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// The variable that marks a command's descendants.
const MARK: &str = "RUSTCOMMS_XTASK_RUN";
/// How long descendants may outlive their command.
const GRACE: Duration = Duration::from_secs(5);
/// The deadline of a command that was not given another one.
pub(crate) const DEADLINE: Duration = Duration::from_secs(25 * 60);

/// A command to run in the workspace.
#[derive(Debug)]
pub(crate) struct Run {
    command: Command,
    line: String,
    deadline: Duration,
    grace: Duration,
}

impl Run {
    /// A program with arguments, run in `dir` without standard input.
    pub(crate) fn new(dir: &Path, program: impl AsRef<OsStr>, args: &[&str]) -> Self {
        let program = program.as_ref();
        let mut command = Command::new(program);
        command.args(args).current_dir(dir).stdin(Stdio::null());
        // What `cargo run` told xtask about xtask's own package is not true of what it starts.
        for (key, _) in std::env::vars_os() {
            let name = key.to_string_lossy();
            if name.starts_with("CARGO_PKG_") || name.starts_with("CARGO_MANIFEST_") {
                command.env_remove(&key);
            }
        }
        let shown = Path::new(program).strip_prefix(dir).unwrap_or(Path::new(program)).display().to_string();
        let line = std::iter::once(shown.as_str()).chain(args.iter().copied()).collect::<Vec<_>>().join(" ");
        Self { command, line, deadline: DEADLINE, grace: GRACE }
    }

    /// Cargo, the one that runs xtask.
    pub(crate) fn cargo(dir: &Path, args: &[&str]) -> Self {
        let cargo = std::env::var_os("CARGO").map_or_else(|| PathBuf::from("cargo"), PathBuf::from);
        let mut run = Self::new(dir, cargo, args);
        run.line = format!("cargo {}", args.join(" "));
        run
    }

    /// Sets a variable, and shows it with the command.
    pub(crate) fn env(mut self, key: &str, value: &str) -> Self {
        self.command.env(key, value);
        self.line = format!("{key}=\"{value}\" {}", self.line);
        self
    }

    /// Kills the command after this time.
    pub(crate) const fn deadline(mut self, deadline: Duration) -> Self {
        self.deadline = deadline;
        self
    }

    /// Prints the command, runs it, prints its time.
    pub(crate) fn run(self) -> Result<(), String> {
        println!("  $ {}", self.line);
        let line = self.line.clone();
        let start = Instant::now();
        self.finish(false)?;
        println!("    {} ({line})", seconds(start.elapsed()));
        Ok(())
    }

    /// Prints the command and runs it; what it prints last stays the last.
    pub(crate) fn run_last(self) -> Result<(), String> {
        println!("  $ {}", self.line);
        self.finish(false).map(drop)
    }

    /// Runs it silently and returns what it wrote to standard output.
    pub(crate) fn output(self) -> Result<String, String> {
        let line = self.line.clone();
        String::from_utf8(self.finish(true)?).map_err(|_| format!("`{line}` wrote something that is not UTF-8"))
    }

    fn finish(mut self, capture: bool) -> Result<Vec<u8>, String> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let mark = format!("{MARK}={}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        self.command.env(MARK, &mark[MARK.len() + 1..]);
        if capture {
            self.command.stdout(Stdio::piped());
        }
        let mut child = self.command.spawn().map_err(|e| format!("cannot start `{}`: {e}", self.line))?;
        let reader = child.stdout.take().map(|mut out| {
            thread::spawn(move || {
                let mut bytes = Vec::new();
                out.read_to_end(&mut bytes).map(|_| bytes)
            })
        });
        let status = wait(&mut child, self.deadline).map_err(|e| format!("cannot wait for `{}`: {e}", self.line))?;
        let Some(status) = status else {
            let killed = end_all(&mark, Duration::ZERO);
            // On systems where descendants cannot be found, at least the command itself goes.
            let _ = child.kill();
            let _ = child.wait();
            return Err(format!(
                "`{}` was not done after {}, and was killed with {} process(es) [{}]; it hangs, or needs a longer deadline",
                self.line,
                seconds(self.deadline),
                killed.len(),
                killed.join(", ")
            ));
        };
        // Before reading: a leftover may still hold the pipe open.
        let left = end_all(&mark, self.grace);
        let bytes = match reader {
            None => Vec::new(),
            Some(r) => match r.join() {
                Ok(Ok(bytes)) => bytes,
                _ => return Err(format!("cannot read what `{}` wrote", self.line)),
            },
        };
        if !status.success() {
            return Err(format!("`{}` failed: {}", self.line, describe(status)));
        }
        if !left.is_empty() {
            return Err(format!("`{}` left processes behind (killed now): {}", self.line, left.join(", ")));
        }
        Ok(bytes)
    }
}

/// Waits for the child; `None` when it is still there after `limit`.
fn wait(child: &mut Child, limit: Duration) -> std::io::Result<Option<ExitStatus>> {
    let start = Instant::now();
    let mut pause = Duration::from_millis(1);
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        if start.elapsed() >= limit {
            return Ok(None);
        }
        thread::sleep(pause);
        pause = (pause * 2).min(Duration::from_millis(50));
    }
}

fn describe(status: ExitStatus) -> String {
    #[cfg(unix)]
    if let Some(signal) = std::os::unix::process::ExitStatusExt::signal(&status) {
        return format!("killed by signal {signal}");
    }
    status.code().map_or_else(|| status.to_string(), |c| format!("exit status {c}"))
}

/// Gives the processes with this mark `grace` to end, then kills them; returns whom it killed.
fn end_all(mark: &str, grace: Duration) -> Vec<String> {
    let start = Instant::now();
    let mut killed = Vec::new();
    loop {
        let left = marked(mark);
        if left.is_empty() {
            return killed;
        }
        if start.elapsed() >= grace {
            for (pid, name) in &left {
                kill(*pid);
                let who = format!("{name} ({pid})");
                if !killed.contains(&who) {
                    killed.push(who);
                }
            }
            // Again: those that were killed may have forked meanwhile, or need a moment to go.
            if start.elapsed() >= grace + GRACE {
                return killed;
            }
        }
        thread::sleep(Duration::from_millis(20));
    }
}

/// The processes that were started with this `NAME=VALUE` in their environment. Empty where there is no /proc.
fn marked(mark: &str) -> Vec<(i32, String)> {
    let Ok(entries) = std::fs::read_dir("/proc") else { return Vec::new() };
    entries
        .filter_map(|e| {
            let path = e.ok()?.path();
            let pid: i32 = path.file_name()?.to_str()?.parse().ok()?;
            // Other users' processes cannot be read, and are not ours. A zombie has no environment.
            let environ = std::fs::read(path.join("environ")).ok()?;
            let ours = environ.split(|b| *b == 0).any(|v| v == mark.as_bytes());
            let name = || std::fs::read_to_string(path.join("comm")).map_or_else(|_| "?".into(), |n| n.trim().into());
            ours.then(|| (pid, name()))
        })
        .collect()
}

#[cfg(unix)]
fn kill(pid: i32) {
    if let Some(pid) = rustix::process::Pid::from_raw(pid) {
        // It may have ended by itself in between, which is as good.
        let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
    }
}

#[cfg(not(unix))]
fn kill(_pid: i32) {}

/// A duration for people: `0.4s`, `12.3s`, `3m05s`.
pub(crate) fn seconds(d: Duration) -> String {
    let s = d.as_secs_f64();
    if s < 59.95 { format!("{s:.1}s") } else { format!("{}m{:02}s", d.as_secs() / 60, d.as_secs() % 60) }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    fn sh(script: &str) -> Run {
        Run::new(Path::new("/"), "sh", &["-c", script]).deadline(Duration::from_secs(60))
    }

    /// Processes with exactly these arguments.
    fn running(args: &[&str]) -> usize {
        let want = args.iter().flat_map(|a| a.bytes().chain([0])).collect::<Vec<u8>>();
        let entries = std::fs::read_dir("/proc").unwrap();
        entries.filter(|e| std::fs::read(e.as_ref().unwrap().path().join("cmdline")).is_ok_and(|c| c == want)).count()
    }

    #[test]
    fn success_and_failure() {
        assert_eq!(sh("echo hello").output(), Ok("hello\n".to_owned()));
        assert_eq!(sh("exit 3").run(), Err("`sh -c exit 3` failed: exit status 3".to_owned()));
        assert!(sh("kill -9 $$").run().unwrap_err().contains("signal 9"));
        assert!(Run::new(Path::new("/"), "no-such-program", &[]).run().unwrap_err().contains("no-such-program"));
    }

    #[test]
    fn a_hang_ends_with_all_its_descendants() {
        // One direct child and one orphan, whose parent is gone when the deadline comes.
        let start = Instant::now();
        let script = "(sleep 86431 &) ; sleep 86432 & wait";
        let e = sh(script).deadline(Duration::from_millis(500)).run().unwrap_err();
        assert!(e.contains("was not done after 0.5s") && e.contains("3 process(es)"), "{e}");
        assert!(start.elapsed() < Duration::from_secs(30));
        assert_eq!(running(&["sleep", "86431"]) + running(&["sleep", "86432"]), 0);
    }

    #[test]
    fn a_leftover_is_an_error_and_is_ended() {
        let short = |script| Run { grace: Duration::from_millis(300), ..sh(script) };
        let e = short("sleep 86433 & exit 0").run().unwrap_err();
        assert!(e.contains("left processes behind") && e.contains("sleep ("), "{e}");
        assert_eq!(running(&["sleep", "86433"]), 0);
        // A leftover that holds the pipe does not make `output` wait for it.
        assert!(short("sleep 86434 & echo x").output().unwrap_err().contains("left processes behind"));
        assert_eq!(running(&["sleep", "86434"]), 0);
        // One that ends by itself in time is none.
        assert_eq!(sh("sleep 0.3 & exit 0").run(), Ok(()));
    }

    #[test]
    fn the_variables_of_xtask_do_not_leak() {
        let out = sh("env").env("SHOWN", "a b").output().unwrap();
        assert!(out.contains("SHOWN=a b\n") && out.contains(MARK));
        assert!(!out.lines().any(|l| l.starts_with("CARGO_PKG_") || l.starts_with("CARGO_MANIFEST_")), "{out}");
        assert_eq!(sh("env").env("SHOWN", "a b").line, "SHOWN=\"a b\" sh -c env");
    }

    #[test]
    fn times() {
        assert_eq!(seconds(Duration::from_millis(440)), "0.4s");
        assert_eq!(seconds(Duration::from_millis(59_940)), "59.9s");
        assert_eq!(seconds(Duration::from_secs(185)), "3m05s");
    }
}
