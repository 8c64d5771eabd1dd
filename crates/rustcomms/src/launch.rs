//! A program that starts its own ranks: for examples, tests and tools that should run with one command.
//!
//! Real runs use a launcher (`rustcomms run`, torchrun), which forwards signals, labels output and spans hosts.

use std::ffi::OsString;
use std::io::Write;
use std::process::{Child, Command, ExitCode, ExitStatus};
use std::time::{Duration, Instant};

use comm_core::{Error, Result};
use comm_store::{TcpStoreServer, TcpStoreServerOptions, env};

/// Time that the others get to report their own errors after one rank has failed.
const GRACE: Duration = Duration::from_secs(3);

/// What becomes of the other ranks when one fails: exits with another code than 0, or is killed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum OnFailure {
    /// They have the [`grace`](LaunchOptions::grace) to report their own errors, and are killed then. The exit code is that of
    /// the rank that failed first.
    #[default]
    Stop,
    /// They go on as long as they want, for programs that do so after [`shrink`](crate::Communicator::shrink) or
    /// [`reconfigure`](crate::Communicator::reconfigure). Standard error says at once who failed, and at the end who ended
    /// how. The exit code is 0 if at least one rank ended with 0, else that of the rank that failed first.
    Continue,
}

/// How the ranks of a program that starts its own are looked after.
///
/// ```no_run
/// use rustcomms::launch::{self, LaunchOptions, OnFailure};
///
/// # fn main() -> rustcomms::Result<std::process::ExitCode> {
/// if !launch::is_rank() {
///     return LaunchOptions::new().on_failure(OnFailure::Continue).spawn_local(4);
/// }
/// // A rank: connect, and shrink after a PeerFailed.
/// # Ok(std::process::ExitCode::SUCCESS)
/// # }
/// ```
#[derive(Clone, Debug)]
#[must_use]
pub struct LaunchOptions {
    on_failure: OnFailure,
    grace: Duration,
}

impl Default for LaunchOptions {
    fn default() -> Self {
        Self { on_failure: OnFailure::Stop, grace: GRACE }
    }
}

impl LaunchOptions {
    /// The defaults: one failure stops all, after 3 s.
    pub fn new() -> Self {
        Self::default()
    }

    /// What becomes of the other ranks when one fails.
    pub fn on_failure(mut self, what: OnFailure) -> Self {
        self.on_failure = what;
        self
    }

    /// How long the others have to end by themselves with [`OnFailure::Stop`]; 3 s by default.
    pub fn grace(mut self, grace: Duration) -> Self {
        self.grace = grace;
        self
    }

    /// As [`spawn_local`].
    ///
    /// # Errors
    ///
    /// As [`spawn_local`].
    pub fn spawn_local(&self, ranks: usize) -> Result<ExitCode> {
        let program = std::env::current_exe().map_err(|e| Error::io("finding this program", &e))?;
        self.spawn_program(ranks, &program.into_os_string(), &std::env::args_os().skip(1).collect::<Vec<_>>())
    }

    /// As [`spawn_program`].
    ///
    /// # Errors
    ///
    /// As [`spawn_local`].
    pub fn spawn_program(&self, ranks: usize, program: &OsString, args: &[OsString]) -> Result<ExitCode> {
        let (_store, mut children) = start(ranks, program, args)?;
        children.wait(self)
    }
}

/// Whether a launcher's variables are present, so that this process is a rank.
#[must_use]
pub fn is_rank() -> bool {
    // Variables that make no sense are a launcher's too: what is wrong with them says `connect`.
    comm_store::discover().map_or(true, |p| p.method != "single")
}

/// Runs this program again as `ranks` ranks, with the same arguments, and hosts their store; returns
/// when all have ended: success, or the code of the rank that failed first (128 + number if a signal killed it).
///
/// The ranks share standard output and error with this process, and end with it. When one fails, the others are
/// killed after 3 s; [`LaunchOptions`] has another choice.
///
/// # Errors
///
/// `InvalidArgument` for 0 ranks, and in a process that is a rank itself; `Io` when a process cannot be started, and when the
/// system does not tell how a rank ended, because this process ignores `SIGCHLD` or waits for all its children elsewhere.
pub fn spawn_local(ranks: usize) -> Result<ExitCode> {
    LaunchOptions::new().spawn_local(ranks)
}

/// [`spawn_local`] for another program and arguments.
///
/// # Errors
///
/// As [`spawn_local`].
pub fn spawn_program(ranks: usize, program: &OsString, args: &[OsString]) -> Result<ExitCode> {
    LaunchOptions::new().spawn_program(ranks, program, args)
}

/// The store, which is there as long as the value, and the ranks.
fn start(ranks: usize, program: &OsString, args: &[OsString]) -> Result<(TcpStoreServer, Children)> {
    if ranks == 0 {
        return Err(Error::invalid("a run has at least one rank"));
    }
    if is_rank() {
        return Err(Error::invalid(
            "this process is a rank already and must not start ranks; call launch::is_rank() first and join with connect",
        ));
    }
    let store = TcpStoreServerOptions::of_environment()?.bind("127.0.0.1:0")?;
    let addr = store.local_addr();
    let run = format!("local-{}", std::process::id());
    let mut children = Children(Vec::new());
    for rank in 0..ranks {
        let (r, n) = (rank.to_string(), ranks.to_string());
        let mut command = Command::new(program);
        command.args(args);
        for (name, value) in [
            (env::RANK, &r),
            (env::WORLD_SIZE, &n),
            (env::LOCAL_RANK, &r),
            (env::LOCAL_WORLD_SIZE, &n),
            (env::STORE, &addr.to_string()),
            (env::RUN_ID, &run),
        ] {
            command.env(name, value);
        }
        die_with_parent(&mut command);
        let child = command.spawn().map_err(|e| Error::io(format!("starting rank {rank}"), &e))?;
        children.0.push(Some(child));
    }
    Ok((store, children))
}

/// The kernel ends a rank when the thread that started it ends.
fn die_with_parent(command: &mut Command) {
    use std::os::unix::process::CommandExt;
    let parent = rustix::process::getpid();
    let arm = move || {
        rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))?;
        // The parent may have ended between fork and here.
        if rustix::process::getppid() != Some(parent) {
            return Err(std::io::Error::from_raw_os_error(3));
        }
        Ok(())
    };
    // SAFETY: between fork and exec only async-signal-safe system calls are made, no allocation, no locks.
    unsafe { command.pre_exec(arm) };
}

/// Tells the user something.
fn say(text: std::fmt::Arguments<'_>) {
    // If nobody reads it, nobody misses it.
    let _ = writeln!(std::io::stderr().lock(), "{text}");
}

/// Why the system does not tell how a process ended.
const LOST: &str =
    "how it ended is not known; this process must not ignore SIGCHLD, nor wait for all its children elsewhere";

struct Children(Vec<Option<Child>>);

impl Children {
    /// Waits for all, and returns the run's exit code.
    fn wait(&mut self, options: &LaunchOptions) -> Result<ExitCode> {
        let goes_on = options.on_failure == OnFailure::Continue;
        let mut ended: Vec<(usize, ExitStatus)> = Vec::new();
        let mut first: Option<(u8, Instant)> = None;
        while self.0.iter().any(Option::is_some) {
            for rank in 0..self.0.len() {
                let Some(child) = &mut self.0[rank] else { continue };
                let status = match child.try_wait() {
                    Ok(None) => continue,
                    Ok(Some(status)) => status,
                    Err(e) => {
                        // Its number may be another's by now.
                        self.0[rank] = None;
                        return Err(Error::io(format!("waiting for rank {rank}: {LOST}"), &e));
                    }
                };
                self.0[rank] = None;
                ended.push((rank, status));
                if status.success() {
                    continue;
                }
                if goes_on {
                    let rest = if self.0.iter().any(Option::is_some) { "; the others go on" } else { "" };
                    say(format_args!("rank {rank} failed: {status}{rest}"));
                } else if first.is_none() {
                    say(format_args!("rank {rank} failed first: {status}"));
                }
                first.get_or_insert((code(status), Instant::now()));
            }
            if !goes_on && first.is_some_and(|(_, t)| t.elapsed() > options.grace) {
                self.kill();
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        let Some((code, _)) = first else { return Ok(ExitCode::SUCCESS) };
        if !goes_on {
            return Ok(ExitCode::from(code));
        }
        ended.sort_by_key(|(rank, _)| *rank);
        let well: Vec<String> = ended.iter().filter(|(_, s)| s.success()).map(|(r, _)| r.to_string()).collect();
        let failed: Vec<String> =
            ended.iter().filter(|(_, s)| !s.success()).map(|(r, s)| format!("rank {r} failed: {s}")).collect();
        let first = match well.len() {
            0 => "no rank ended well".to_owned(),
            1 => format!("rank {} ended well", well[0]),
            _ => format!("ranks {} ended well", well.join(", ")),
        };
        say(format_args!("summary: {first}; {}", failed.join("; ")));
        Ok(if well.is_empty() { ExitCode::from(code) } else { ExitCode::SUCCESS })
    }

    fn kill(&mut self) {
        for child in self.0.iter_mut().flatten() {
            // It may have ended by itself meanwhile.
            let _ = child.kill();
        }
    }
}

impl Drop for Children {
    fn drop(&mut self) {
        self.kill();
        for child in self.0.iter_mut().flatten() {
            let _ = child.wait();
        }
    }
}

/// A shell's view of a status: the code, or 128 plus the signal.
fn code(status: ExitStatus) -> u8 {
    use std::os::unix::process::ExitStatusExt;
    let code = status.code().or_else(|| status.signal().map(|s| 128 + s)).unwrap_or(1);
    u8::try_from(code).unwrap_or(1)
}
