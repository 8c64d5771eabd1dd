//! `rustcomms run`: starts the ranks of a run on this node and looks after them.

mod guard;
mod nodes;
mod output;
mod ranks;
mod supervise;

use std::ffi::OsString;
use std::process::ExitCode;
use std::sync::mpsc::{self, Receiver, Sender};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

pub(crate) use guard::{GUARD, guard};

/// Start N ranks of a program, with a store at which they find each other.
///
/// Every rank runs in a process group of its own and reads nothing from standard input. Its output
/// is copied line by line with its rank in front. If one rank fails, the others are ended, and the
/// exit code is that of the rank that failed first (128 + number if a signal killed it).
///
/// Ranks find RUSTCOMMS_RANK, RUSTCOMMS_WORLD_SIZE, RUSTCOMMS_LOCAL_RANK, RUSTCOMMS_LOCAL_WORLD_SIZE,
/// RUSTCOMMS_NODE_RANK, RUSTCOMMS_NNODES, RUSTCOMMS_STORE (host:port) and RUSTCOMMS_RUN_ID in their
/// environment, and the variables that torchrun sets. OMP_NUM_THREADS, unless it is set already,
/// becomes the number of processors divided by N, and at least 1, so that the ranks of a node do not
/// fight for them.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Ranks to start on this node.
    #[arg(short = 'n', long = "nproc", value_name = "N")]
    nproc: usize,
    /// Nodes of the run. Each runs this command, with the same -n.
    #[arg(long, value_name = "K", default_value_t = 1)]
    nnodes: usize,
    /// Number of this node, from 0. Node 0 hosts the store.
    #[arg(long, value_name = "I", default_value_t = 0)]
    node_rank: usize,
    /// Address of node 0, as the other nodes reach it [default with one node: 127.0.0.1].
    #[arg(long, value_name = "A")]
    master_addr: Option<String>,
    /// Port of the store on node 0 [default: a free one with one node, else 29500].
    #[arg(long, value_name = "P")]
    master_port: Option<u16>,
    /// Copy the ranks' output without the rank in front of each line.
    #[arg(long)]
    no_prefix: bool,
    /// Name of the run [default: made up, and the same on all nodes].
    #[arg(long, value_name = "ID")]
    run_id: Option<String>,
    /// Seconds that the other ranks have to end by themselves after one failed. On nodes other than
    /// that rank's it is at most 1.
    #[arg(long, value_name = "SECONDS", default_value = "3", value_parser = seconds)]
    grace: Duration,
    /// Seconds that node 0 keeps the store for the other nodes after its own ranks have ended.
    #[arg(long, value_name = "SECONDS", default_value = "60", value_parser = seconds)]
    linger: Duration,
    /// Seconds that the other nodes wait for node 0's store.
    #[arg(long, value_name = "SECONDS", default_value = "60", value_parser = seconds)]
    store_timeout: Duration,
    /// The program and its arguments.
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true, value_name = "PROGRAM")]
    command: Vec<OsString>,
}

fn seconds(text: &str) -> Result<Duration, String> {
    let s: f64 = text.parse().map_err(|_| "not a number".to_owned())?;
    // Longer than ten days is a mistake, and infinity is no duration.
    if (0.0..=1e6).contains(&s) { Ok(Duration::from_secs_f64(s)) } else { Err("must be between 0 and 1000000".into()) }
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
    /// Something failed on another node.
    Elsewhere(nodes::Failure),
    /// Node 0 is gone.
    StoreLost(String),
    /// All output is copied.
    Copied,
    /// The other nodes are done, or node 0 has waited long enough.
    Lingered(Result<(), String>),
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
}

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
        if a.nproc.checked_mul(a.nnodes).is_none_or(|n| n > 1 << 24) {
            return wrong(format!("{} nodes of {} ranks are more than this can start", a.nnodes, a.nproc));
        }
        if a.nnodes > 1 && a.master_port == Some(0) {
            return wrong("--master-port 0 cannot be known to the other nodes; name a port".into());
        }
        let host = match &a.master_addr {
            Some(h) if h.is_empty() => return wrong("--master-addr is empty".into()),
            Some(h) => h.trim_start_matches('[').trim_end_matches(']').to_owned(),
            None if a.nnodes == 1 => "127.0.0.1".into(),
            None => return wrong("with several nodes, --master-addr must name node 0's address, on every node".into()),
        };
        let port = a.master_port.unwrap_or(if a.nnodes == 1 { 0 } else { 29_500 });
        Ok(Self { nproc: a.nproc, nnodes: a.nnodes, node_rank: a.node_rank, host, port, run_id: a.run_id.clone() })
    }
}

/// A name that no other run has.
fn make_run_id() -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    format!("run-{:x}-{:x}", now.as_nanos(), std::process::id())
}

/// Sends the signals that want this to end to the main thread.
fn watch_signals(events: Sender<Event>) -> Result<(), Stop> {
    let wanted: Vec<i32> = [SIGINT, SIGTERM, SIGHUP].into_iter().filter(|&s| s != SIGHUP || !is_ignored(s)).collect();
    let failed = |e: std::io::Error| Stop::new(1, format!("cannot handle signals: {e}"));
    let mut signals = Signals::new(wanted).map_err(failed)?;
    let forward = move || {
        for s in signals.forever() {
            if events.send(Event::Signal(s)).is_err() {
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
