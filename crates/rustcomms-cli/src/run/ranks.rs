//! The processes of the ranks: starting, signalling, and hearing of their end.

use std::fmt;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::Sender;

use comm_store::env;
use rustix::process::{Pid, Resource, Rlimit, Signal, WaitId, WaitIdOptions, getrlimit, kill_process_group, waitid};

use super::guard::Guard;
use super::nodes::{Nodes, join_host_port};
use super::{Args, Event, Plan, Stop, bind};

/// How a rank ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    Exited(i32),
    Killed(i32),
}

impl Outcome {
    /// A crash rather than a decision: a signal, or the code of a Rust panic. When it comes right after another
    /// rank's ordinary error, that error is usually its consequence.
    pub(super) fn is_crash(self) -> bool {
        matches!(self, Self::Killed(_) | Self::Exited(101))
    }

    /// As a shell would report it.
    pub(super) fn code(self) -> i32 {
        match self {
            Self::Exited(c) => c,
            Self::Killed(s) => 128 + s,
        }
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Exited(c) => write!(f, "exited with code {c}"),
            Self::Killed(s) => write!(f, "was killed by {}", signal(*s)),
        }
    }
}

/// `signal 9 (SIGKILL)`.
pub(crate) fn signal(number: i32) -> String {
    match signal_hook::low_level::signal_name(number) {
        Some(name) => format!("signal {number} ({name})"),
        None => format!("signal {number}"),
    }
}

/// A rank's process.
#[derive(Debug)]
pub(super) struct Rank {
    /// Its number in the run.
    pub(super) rank: usize,
    pub(super) pid: Pid,
    child: Child,
    pub(super) ended: Option<Outcome>,
    /// Whether its number is the system's again.
    buried: bool,
}

/// A rank's output.
#[derive(Debug)]
pub(super) struct Pipes {
    pub(super) rank: usize,
    pub(super) out: OwnedFd,
    pub(super) err: OwnedFd,
}

/// Lets the launcher have as many descriptors as the system allows, because it hosts a store with
/// connections from every rank. Returns the limit as it was, which the ranks shall have.
pub(crate) fn raise_descriptor_limit() -> Rlimit {
    let was = getrlimit(Resource::Nofile);
    // Nothing is lost if it cannot be raised, until there are very many ranks.
    let _ = rustix::process::setrlimit(Resource::Nofile, Rlimit { current: was.maximum, maximum: was.maximum });
    was
}

impl Rank {
    /// Starts local rank `local`. Must be called on the main thread: the kernel's promise to kill
    /// the child with its parent is about the thread that started it.
    pub(super) fn start(
        args: &Args,
        plan: &Plan,
        nodes: &Nodes,
        local: usize,
        descriptors: Rlimit,
    ) -> Result<(Self, Pipes), Stop> {
        let rank = plan.node_rank * plan.nproc + local;
        let world = plan.nproc * plan.nnodes;
        let mut c = Command::new(&args.command[0]);
        c.args(&args.command[1..]);
        let (host, port) = (plan.host.as_str(), nodes.port);
        for (names, value) in [
            (&[env::RANK, env::torch::RANK, env::torch::ROLE_RANK][..], rank),
            (&[env::WORLD_SIZE, env::torch::WORLD_SIZE, env::torch::ROLE_WORLD_SIZE], world),
            (&[env::LOCAL_RANK, env::torch::LOCAL_RANK], local),
            (&[env::LOCAL_WORLD_SIZE, env::torch::LOCAL_WORLD_SIZE], plan.nproc),
            (&[env::NODE_RANK, env::torch::GROUP_RANK], plan.node_rank),
            (&[env::NNODES, env::torch::GROUP_WORLD_SIZE], plan.nnodes),
            (&[env::torch::MASTER_PORT], usize::from(port)),
            (&[env::RESTART_COUNT, env::torch::RESTART_COUNT], nodes.generation),
            (&[env::torch::MAX_RESTARTS], plan.max_restarts),
        ] {
            c.envs(names.iter().map(|n| (n, value.to_string())));
        }
        c.env(env::STORE, join_host_port(host, port));
        c.env(env::torch::MASTER_ADDR, host);
        // torch adds the restarts itself.
        c.env(env::RUN_ID, nodes.run_id()).env(env::torch::RUN_ID, nodes.base_run_id());
        // The launcher hosts the store, so no rank must; torch reads these as Python would print them.
        c.env(env::torch::USE_AGENT_STORE, "True").env(env::torch::ROLE_NAME, "default");
        let share = &plan.shares[local];
        c.envs(share.variables.iter().map(|(name, value)| (name, value)));
        c.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0);
        prepare(&mut c, descriptors, bind::setter(share.cpus.as_ref()));
        let mut child = c.spawn().map_err(|e| cannot_start(args, rank, &e))?;
        let lost = || Stop::new(1, "the system started a process without its pipes or number");
        let (out, err) = (child.stdout.take().ok_or_else(lost)?, child.stderr.take().ok_or_else(lost)?);
        let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw).ok_or_else(lost)?;
        Ok((Self { rank, pid, child, ended: None, buried: false }, Pipes { rank, out: out.into(), err: err.into() }))
    }

    /// Tells the main thread when the process has ended, leaving its number in use, so that its
    /// group can still be signalled without hitting another's.
    pub(super) fn watch(&self, local: usize, events: Sender<Event>) -> io::Result<()> {
        let pid = self.pid;
        let wait = move || {
            loop {
                match waitid(WaitId::Pid(pid), WaitIdOptions::EXITED | WaitIdOptions::NOWAIT) {
                    Ok(Some(s)) => {
                        let how = match (s.exit_status(), s.terminating_signal()) {
                            (Some(code), _) => Outcome::Exited(code),
                            (None, Some(signal)) => Outcome::Killed(signal),
                            (None, None) => continue,
                        };
                        // The main thread is gone only if the process ends.
                        let _ = events.send(Event::Ended { local, how });
                        return;
                    }
                    Ok(None) | Err(rustix::io::Errno::INTR) => {}
                    // Cannot happen to a child that nobody has reaped; do not leave the run hanging.
                    Err(_) => {
                        let _ = events.send(Event::Ended { local, how: Outcome::Exited(1) });
                        return;
                    }
                }
            }
        };
        std::thread::Builder::new().name(format!("wait-{}", self.rank)).stack_size(128 << 10).spawn(wait).map(drop)
    }

    /// Signals the rank and all that it has started in its group.
    pub(super) fn signal(&self, signal: Signal) {
        // It may have ended, and left nobody.
        let _ = kill_process_group(self.pid, signal);
    }

    /// Ends what the rank left in its group, and then gives its number back to the system, and to `guard` before. Once is
    /// enough: the number may be another's afterwards.
    pub(super) fn bury(&mut self, guard: Option<&mut Guard>) {
        if self.buried {
            return;
        }
        if let Some(g) = guard {
            g.remove(self.pid);
        }
        self.signal(Signal::KILL);
        if self.ended.is_some() {
            // It has ended, so this does not block; the outcome is known.
            let _ = self.child.wait();
            self.buried = true;
        }
    }
}

/// Makes the child of `c` die when this thread does, have the descriptor limit `descriptors`, and run where `bind` says.
fn prepare(c: &mut Command, descriptors: Rlimit, bind: bind::Setter) {
    let parent = rustix::process::getpid();
    let setup = move || {
        #[cfg(target_os = "linux")]
        rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
        // The parent may have died before the line above.
        if rustix::process::getppid() != Some(parent) {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        // Best effort, like the raising.
        let _ = rustix::process::setrlimit(Resource::Nofile, descriptors);
        bind.set()
    };
    // SAFETY: between fork and exec only async-signal-safe calls are allowed. The closure makes
    // four plain system calls on values it owns; it allocates nothing and takes no lock.
    unsafe { c.pre_exec(setup) };
}

/// Says why a program does not start, with the exit code that shells use for it.
fn cannot_start(args: &Args, rank: usize, e: &io::Error) -> Stop {
    let program = args.command[0].to_string_lossy();
    match e.kind() {
        io::ErrorKind::NotFound if program.contains('/') => Stop::new(
            127,
            format!("cannot start '{program}': there is no such file, or the interpreter in its first line is missing"),
        ),
        io::ErrorKind::NotFound => Stop::new(
            127,
            format!("cannot start '{program}': there is no such program in PATH; for a file write ./{program}"),
        ),
        io::ErrorKind::PermissionDenied => {
            Stop::new(126, format!("cannot start '{program}': it is not an executable file (chmod +x?)"))
        }
        _ => Stop::new(126, format!("cannot start rank {rank} of '{program}': {e}")),
    }
}
