//! `rustcomms run`: starts the ranks of a run on this node and looks after them.

mod beat;
mod bind;
mod devices;
mod guard;
mod nodes;
mod output;
mod ranks;
mod supervise;
mod survive;

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::process::ExitCode;
use std::sync::mpsc::{self, Receiver, Sender};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use signal_hook::consts::{SIGCHLD, SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use bind::Bind;
pub(crate) use guard::{GUARD, guard, this_program};
pub(crate) use ranks::{raise_descriptor_limit, signal};

/// Start N ranks of a program, with a store at which they find each other.
///
/// Every rank runs in a process group of its own and reads nothing from standard input. Its output
/// is copied line by line with its rank in front. If one rank fails, the others are ended, and the
/// exit code is that of the rank that failed first (128 + number if a signal killed it). With
/// --max-restarts, all ranks of all nodes are started anew instead, those that had ended well too,
/// under the run id with the number of restarts added.
///
/// With --on-failure continue, for programs whose ranks go on without those that they have lost (shrink, reconfigure), a
/// rank that fails is reported, what it has started is killed, and nobody else is ended. The exit code is 0 if at least one
/// rank of the run ended with 0, else that of the rank of this node that failed first; the last line says who ended how. A rank
/// that cannot be started, a signal to this command and a closed standard output end the run all the same.
///
/// A signal to this command ends the run with exit
/// code 128 + its number, also where it would have restarted. When nobody reads standard output any more
/// (as after | head), the ranks are ended, and the exit code is 141.
///
/// Launchers of several nodes know within seconds if another one is gone (after 10 s if it fell silent), and
/// end their ranks; there is no restart without it. With --on-failure continue they go on; the store is gone with node 0, so
/// ranks that have not met by then end by their own bootstrap timeout.
///
/// Ranks find RUSTCOMMS_RANK, RUSTCOMMS_WORLD_SIZE, RUSTCOMMS_LOCAL_RANK, RUSTCOMMS_LOCAL_WORLD_SIZE,
/// RUSTCOMMS_NODE_RANK, RUSTCOMMS_NNODES, RUSTCOMMS_STORE (host:port), RUSTCOMMS_RUN_ID and
/// RUSTCOMMS_RESTART_COUNT in their environment, and the variables that torchrun sets.
///
/// RUSTCOMMS_SECRET, if set, is what everybody must know who uses the store: set it to the same on all nodes; the
/// ranks inherit it. Ranks that set a secret in their program only (CommOptions::secret) do not get into a store
/// that has another or none; set the variable instead.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Ranks to start on this node.
    #[arg(short = 'n', long = "nproc", value_name = "N", allow_negative_numbers = true)]
    nproc: usize,
    /// Nodes of the run. Each runs this command, with the same -n.
    #[arg(long, value_name = "K", default_value_t = 1, allow_negative_numbers = true)]
    nnodes: usize,
    /// Number of this node, from 0. Node 0 hosts the store.
    #[arg(long, value_name = "I", default_value_t = 0, allow_negative_numbers = true)]
    node_rank: usize,
    /// Address of node 0, as the other nodes reach it; a link-local one with its interface here, as in
    /// fe80::1%eth0 [default with one node: 127.0.0.1].
    #[arg(long, value_name = "A")]
    master_addr: Option<String>,
    /// Port of the store on node 0 [default: a free one with one node, else 29500].
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    master_port: Option<u16>,
    /// Copy the ranks' output without the rank in front of each line.
    #[arg(long)]
    no_prefix: bool,
    /// Name of the run [default: made up, and the same on all nodes].
    #[arg(long, value_name = "ID")]
    run_id: Option<String>,
    /// What becomes of the other ranks when one fails.
    #[arg(long, value_name = "WHAT", value_enum, default_value_t = OnFailure::Stop)]
    on_failure: OnFailure,
    /// Seconds that the other ranks have to end by themselves after one failed, or after a signal. On nodes other than
    /// that rank's it is at most 1.
    #[arg(long, value_name = "SECONDS", default_value = "3", value_parser = seconds, allow_negative_numbers = true)]
    grace: Duration,
    /// Restarts of the whole run, the failures on all nodes taken together. The same on all nodes. Not with
    /// --on-failure continue.
    #[arg(long, value_name = "N", default_value_t = 0, allow_negative_numbers = true)]
    max_restarts: usize,
    /// CPUs of each rank, of those that this command itself may use: none: all; core: its share of the
    /// cores, shared with no other rank while there are enough; numa: those of one NUMA node;
    /// list:0-3,8/4-7: these, with a slash between ranks.
    #[arg(long, value_name = "HOW", default_value = "none")]
    bind: Bind,
    /// OMP_NUM_THREADS of each rank: a number; auto: unless it is set already, as many as the rank has
    /// CPUs, or its share of those that ranks share; keep: as it is.
    #[arg(long, value_name = "N|auto|keep", default_value = "auto")]
    omp_threads: OmpThreads,
    /// GPUs of this node, to be shared out: narrows CUDA_VISIBLE_DEVICES and HIP_VISIBLE_DEVICES (or
    /// ROCR_VISIBLE_DEVICES, where only that is set), of which the first N count if they are set. Each
    /// rank gets as many, or as many ranks get each.
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    gpus_per_node: Option<usize>,
    /// Say what each rank gets of the above.
    #[arg(short, long)]
    verbose: bool,
    /// Seconds that node 0 keeps the store for the other nodes after its own ranks have ended, and with
    /// --max-restarts, starts its ranks again if those of another node fail. With --on-failure continue it counts for
    /// nodes that have not come only: those that have are waited for as long as they are there.
    #[arg(long, value_name = "SECONDS", default_value = "60", value_parser = seconds, allow_negative_numbers = true)]
    linger: Duration,
    /// Seconds that the other nodes wait for node 0's store, and that nodes wait for each other before a restart.
    #[arg(long, value_name = "SECONDS", default_value = "60", value_parser = seconds, allow_negative_numbers = true)]
    store_timeout: Duration,
    /// The program and its arguments.
    #[arg(required = true, trailing_var_arg = true, value_name = "PROGRAM")]
    command: Vec<OsString>,
}

fn seconds(text: &str) -> Result<Duration, String> {
    let s: f64 = text.parse().map_err(|_| "not a number".to_owned())?;
    // Longer than ten days is a mistake, and infinity is no duration.
    if (0.0..=1e6).contains(&s) { Ok(Duration::from_secs_f64(s)) } else { Err("must be between 0 and 1000000".into()) }
}

/// What becomes of the other ranks when one fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum OnFailure {
    /// They are ended, after the grace.
    Stop,
    /// They go on. The same on all nodes.
    Continue,
}

impl OnFailure {
    fn name(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Continue => "continue",
        }
    }
}

/// Where a rank's OMP_NUM_THREADS comes from.
#[derive(Clone, Copy, Debug)]
enum OmpThreads {
    Auto,
    Keep,
    Number(usize),
}

impl std::str::FromStr for OmpThreads {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match (text, text.parse()) {
            ("auto", _) => Ok(Self::Auto),
            ("keep", _) => Ok(Self::Keep),
            (_, Ok(n)) if (1..=most::THREADS).contains(&n) => Ok(Self::Number(n)),
            _ => Err(format!("it must be a number from 1 to {}, auto or keep", most::THREADS)),
        }
    }
}

/// Why the command ends before or beside its ranks.
#[derive(Debug)]
struct Stop {
    code: i32,
    text: String,
}

impl Stop {
    fn new(code: i32, text: impl Into<String>) -> Self {
        Self { code, text: text.into() }
    }
}

/// What the main thread waits for.
#[derive(Debug)]
enum Event {
    /// The store is there, or will not be.
    Joined(Result<nodes::Nodes, Stop>),
    /// A local rank ended.
    Ended { local: usize, how: ranks::Outcome },
    /// Somebody wants this to end.
    Signal(i32),
    /// Something failed first in a generation, on this or another node.
    Elsewhere { generation: usize, failure: nodes::Failure },
    /// The nodes have met, or have not.
    Met { generation: usize, meeting: nodes::Meeting, result: Result<(), String> },
    /// Somebody wanted to take part and was not let in.
    Refused(String),
    /// Standard output takes nothing any more.
    OutputLost(std::io::ErrorKind, String),
    /// Node 0 is gone.
    StoreLost(String),
    /// All output is copied.
    Copied,
    /// The other nodes are done, or node 0 has waited long enough.
    Lingered(Result<(), String>),
    /// In a run that goes on after failures, a node's launcher has fallen silent.
    NodeLost(String),
    /// In such a run: whether a rank of any node ended well, or why that is not known.
    Verdict(Result<bool, String>),
}

/// The shape of the run.
#[derive(Clone, Debug)]
struct Plan {
    nproc: usize,
    nnodes: usize,
    node_rank: usize,
    host: String,
    /// 0 for a free one.
    port: u16,
    run_id: Option<String>,
    max_restarts: usize,
    on_failure: OnFailure,
    /// What each local rank gets.
    shares: Vec<Share>,
}

/// What a rank gets of its node.
#[derive(Clone, Debug, Default)]
struct Share {
    /// CPUs that it is bound to, if it is.
    cpus: Option<BTreeSet<usize>>,
    /// Variables for it alone.
    variables: Vec<(&'static str, String)>,
}

impl Share {
    /// Of all local ranks.
    fn all(a: &Args) -> Result<Vec<Self>, Stop> {
        let cpus = bind::shares(&a.bind, a.nproc)?;
        let devices = match a.gpus_per_node {
            Some(gpus) => {
                devices::shares(gpus, a.nproc, &|name| std::env::var(name).ok()).map_err(|e| Stop::new(2, e))?
            }
            None => vec![Vec::new(); a.nproc],
        };
        let threads = |i: usize| match a.omp_threads {
            OmpThreads::Auto if std::env::var_os(OMP).is_none() => Some(bind::threads(&cpus, i)),
            OmpThreads::Auto | OmpThreads::Keep => None,
            OmpThreads::Number(n) => Some(n),
        };
        let share = |(i, mut variables): (usize, Vec<_>)| {
            variables.extend(threads(i).map(|n| (OMP, n.to_string())));
            Self { cpus: cpus[i].clone(), variables }
        };
        Ok(devices.into_iter().enumerate().map(share).collect())
    }

    /// For --verbose.
    fn show(&self) -> String {
        let cpus = self.cpus.as_ref().map_or("not bound".into(), |c| format!("bound to CPUs {}", bind::show(c)));
        self.variables.iter().fold(cpus, |all, (name, value)| format!("{all}, {name}={value}"))
    }
}

/// How many threads OpenMP's programs, and many others, use.
const OMP: &str = "OMP_NUM_THREADS";

impl Plan {
    fn new(a: &Args) -> Result<Self, Stop> {
        let wrong = |text: String| Err(Stop::new(2, text));
        if a.nproc == 0 {
            return wrong("-n 0 would start nothing; it must be at least 1".into());
        }
        if a.nnodes == 0 {
            return wrong("--nnodes must be at least 1".into());
        }
        if a.node_rank >= a.nnodes {
            return wrong(format!(
                "--node-rank {} is out of range: with --nnodes {} it must be 0 to {}",
                a.node_rank,
                a.nnodes,
                a.nnodes - 1
            ));
        }
        for (option, given, most) in [
            ("-n", a.nproc, most::RANKS_OF_A_NODE),
            ("--nnodes", a.nnodes, most::NODES),
            ("--max-restarts", a.max_restarts, most::RESTARTS),
            ("--gpus-per-node", a.gpus_per_node.unwrap_or(1), most::GPUS),
        ] {
            if given > most {
                return wrong(format!(
                    "{option} {given} is more than this can start or share out; it must be at most {most}"
                ));
            }
        }
        if a.nproc * a.nnodes > most::RANKS {
            return wrong(format!("{} nodes of {} ranks are more than this can start", a.nnodes, a.nproc));
        }
        if a.on_failure == OnFailure::Continue && a.max_restarts > 0 {
            return wrong(format!(
                "--max-restarts {} starts all ranks anew when one fails, --on-failure continue lets the others go on; choose one of them",
                a.max_restarts
            ));
        }
        if a.nnodes > 1 && a.master_port == Some(0) {
            return wrong("--master-port 0 cannot be known to the other nodes; name a port".into());
        }
        let host = match &a.master_addr {
            Some(h) if h.is_empty() => return wrong("--master-addr is empty".into()),
            Some(h) => nodes::scoped(h.trim_start_matches('[').trim_end_matches(']')).map_err(|e| Stop::new(2, e))?,
            None if a.nnodes == 1 => "127.0.0.1".into(),
            None => return wrong("with several nodes, --master-addr must name node 0's address, on every node".into()),
        };
        let port = a.master_port.unwrap_or(if a.nnodes == 1 { 0 } else { 29_500 });
        Ok(Self {
            nproc: a.nproc,
            nnodes: a.nnodes,
            node_rank: a.node_rank,
            host,
            port,
            run_id: a.run_id.clone(),
            max_restarts: a.max_restarts,
            on_failure: a.on_failure,
            shares: Share::all(a)?,
        })
    }
}

/// The most of what options can ask for: more is a mistake, and would only fail later and worse.
mod most {
    pub(super) const RANKS_OF_A_NODE: usize = 4096;
    pub(super) const NODES: usize = 65_536;
    pub(super) const RANKS: usize = 1 << 24;
    pub(super) const RESTARTS: usize = 1_000_000;
    pub(super) const GPUS: usize = 1024;
    pub(super) const THREADS: usize = 65_536;
}

/// A name that no other run has.
fn make_run_id() -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    format!("run-{:x}-{:x}", now.as_nanos(), std::process::id())
}

/// Sends the signals that want this to end to the main thread.
fn watch_signals(events: Sender<Event>) -> Result<(), Stop> {
    let mut wanted: Vec<i32> =
        [SIGINT, SIGTERM, SIGHUP].into_iter().filter(|&s| s != SIGHUP || !is_ignored(s)).collect();
    if is_ignored(SIGCHLD) {
        // Some services start programs so. The kernel would forget how the ranks ended.
        wanted.push(SIGCHLD);
    }
    let failed = |e: std::io::Error| Stop::new(1, format!("cannot handle signals: {e}"));
    let mut signals = Signals::new(wanted).map_err(failed)?;
    let forward = move || {
        for s in signals.forever() {
            if s != SIGCHLD && events.send(Event::Signal(s)).is_err() {
                return;
            }
        }
    };
    std::thread::Builder::new().name("signals".into()).spawn(forward).map_err(failed)?;
    Ok(())
}

/// Whether this process was started with `signal` ignored, as `nohup` does.
fn is_ignored(signal: i32) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|l| l.strip_prefix("SigIgn:")).unwrap_or_default();
    u64::from_str_radix(mask.trim(), 16).is_ok_and(|m| m >> (signal - 1) & 1 == 1)
}

/// Waits for the store, unless a signal comes first.
fn join(plan: &Plan, timeout: Duration, tx: &Sender<Event>, rx: &Receiver<Event>) -> Result<nodes::Nodes, Stop> {
    let (plan, tx) = (plan.clone(), tx.clone());
    let work = move || {
        let joined = nodes::Nodes::join(&plan, timeout, &tx);
        // Nobody listens any more if a signal came first.
        let _ = tx.send(Event::Joined(joined));
    };
    std::thread::Builder::new()
        .name("join".into())
        .spawn(work)
        .map_err(|e| Stop::new(1, format!("cannot start a thread: {e}")))?;
    loop {
        match rx.recv() {
            Ok(Event::Joined(joined)) => return joined,
            Ok(Event::Signal(s)) => {
                return Err(Stop::new(128 + s, format!("interrupted by {} before any rank started", ranks::signal(s))));
            }
            // The other nodes can fail before this one has started; it is told again on joining.
            Ok(_) => {}
            Err(_) => return Err(Stop::new(1, "the thread that joins the store panicked")),
        }
    }
}

fn try_execute(args: &Args) -> Result<i32, Stop> {
    let plan = Plan::new(args)?;
    let (tx, rx) = mpsc::channel();
    watch_signals(tx.clone())?;
    let nodes = join(&plan, args.store_timeout, &tx, &rx)?;
    supervise::supervise(args, &plan, nodes, &tx, &rx)
}

/// Runs the command.
pub(crate) fn execute(args: &Args) -> ExitCode {
    let code = try_execute(args).unwrap_or_else(|stop| {
        eprintln!("rustcomms run: {}", stop.text);
        stop.code
    });
    // Codes of processes have 8 bits.
    ExitCode::from(code.clamp(0, 255) as u8)
}
