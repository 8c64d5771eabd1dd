//! A program that starts its own ranks: for examples, tests and tools that should run with one command.
//!
//! Real runs use a launcher (`rustcomms run`, torchrun), which forwards signals, labels output and spans hosts.

use std::ffi::OsString;
use std::process::{Child, Command, ExitCode, ExitStatus};
use std::time::{Duration, Instant};

use comm_core::{Error, Result};
use comm_store::{TcpStoreServerOptions, env};

/// Time that the others get to report their own errors after one rank has failed.
const GRACE: Duration = Duration::from_secs(3);

/// Whether a launcher's variables are present, so that this process is a rank.
#[must_use]
pub fn is_rank() -> bool {
    // Variables that make no sense are a launcher's too: what is wrong with them says `connect`.
    comm_store::discover().map_or(true, |p| p.method != "single")
}

/// Runs this program again as `ranks` ranks, with the same arguments, and hosts their store; returns
/// when all have ended: success, or the code of the rank that failed first.
///
/// The ranks share standard output and error with this process, and end with it.
///
/// # Errors
///
/// `InvalidArgument` for 0 ranks, and in a process that is a rank itself; `Io` when a process cannot be started.
pub fn spawn_local(ranks: usize) -> Result<ExitCode> {
    let program = std::env::current_exe().map_err(|e| Error::io("finding this program", &e))?;
    spawn_program(ranks, &program.into_os_string(), &std::env::args_os().skip(1).collect::<Vec<_>>())
}

/// [`spawn_local`] for another program and arguments.
///
/// # Errors
///
/// As [`spawn_local`].
pub fn spawn_program(ranks: usize, program: &OsString, args: &[OsString]) -> Result<ExitCode> {
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
    Ok(children.wait())
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

struct Children(Vec<Option<Child>>);

impl Children {
    fn wait(&mut self) -> ExitCode {
        let mut first: Option<(usize, ExitStatus, Instant)> = None;
        while self.0.iter().any(Option::is_some) {
            for (rank, slot) in self.0.iter_mut().enumerate() {
                let Some(child) = slot else { continue };
                let Ok(Some(status)) = child.try_wait() else { continue };
                *slot = None;
                if !status.success() && first.is_none() {
                    eprintln!("rank {rank} failed first: {status}");
                    first = Some((rank, status, Instant::now()));
                }
            }
            if first.as_ref().is_some_and(|(_, _, t)| t.elapsed() > GRACE) {
                self.kill();
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        match first {
            None => ExitCode::SUCCESS,
            Some((_, status, _)) => ExitCode::from(code(status)),
        }
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
