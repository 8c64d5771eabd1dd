//! `rustcomms perf`: measures one operation over real ranks and checks its results.
//!
//! [`ops`] is what is to be known of an operation, `table` has a row of it for each, [`numbers`] the data and what must become of them, [`site`] the buffers of a
//! call, [`mod@bench`] the measurement, [`plan`] the arguments' meaning, [`report`] the output.

pub(crate) mod bench;
mod numbers;
pub(crate) mod ops;
pub(crate) mod plan;
pub(crate) mod report;
pub(crate) mod screen;
mod site;
pub(crate) mod table;

use std::fs::File;
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use rustcomms::store::discover;
use rustcomms::{CommOptions, Communicator, launch};

use self::bench::Outcome;
use self::plan::Plan;
use self::screen::{Screen, complain};

/// Any error, as a message for a human.
type Failure = Box<dyn std::error::Error + Send + Sync>;

/// How long ranks wait for each other at the end.
const FINALIZE: Duration = Duration::from_secs(60);
/// Ranks that are started when nobody says how many.
const DEFAULT_RANKS: usize = 2;

/// Measure an operation and check its results
///
/// The letters, the columns, the sizes and the bandwidths are those of nccl-tests; what reads its output reads
/// this. Without the variables of a launcher (rustcomms run, torchrun, Open MPI's mpirun, mpiexec of MPICH or Intel
/// MPI, srun, MVAPICH's mpirun_rsh, mpiexec of PALS, indexed jobs of Kubernetes) the command starts its own ranks
/// on this machine.
///
/// OP is sendrecv (each rank sends to the next), broadcast, all_reduce, reduce, all_gather, all_gather_v, gather,
/// gather_v, scatter, scatter_v, reduce_scatter, reduce_scatter_v, all_to_all, all_to_all_v, scan, exscan or barrier;
/// nccl-tests' spelling (all_reduce_perf, alltoall) is understood.
///
/// Sizes: for sendrecv, broadcast, all_reduce, reduce, scan and exscan the bytes of one rank's buffer; for the others
/// those of all ranks' shards together, each rounded down to a multiple of 16 bytes, so that small sizes become 0. The
/// count column is elements per rank (per shard). The shards of operations whose names end in _v have half of that more
/// and less in turn. algbw is bytes by time, in 1e9 bytes per second; busbw multiplies it by 2(n-1)/n for all_reduce,
/// and by (n-1)/n for those whose sizes are those of shards.
///
/// Time: for each size and form, -w calls to warm up, a barrier, and -n timed calls that follow each other at once.
/// The time column is their total by their number, averaged over ranks. With one root all the time, consecutive
/// broadcasts and reduces overlap, as in nccl-tests: the root of a broadcast goes on before the data has
/// arrived everywhere. The JSON has also the fastest call and the 99th percentile, each call taken from its
/// slowest rank.
///
/// Forms: sendrecv, all_to_all_v and barrier have no in-place form (N/A). An out-of-place broadcast is an in-place one after the
/// root has copied its input to its output, within the time.
///
/// Checks: after the timed calls, calls on fresh data whose results are known exactly, on every type and operator; all
/// elements are compared bit by bit, also that inputs and other ranks' outputs are unchanged. A barrier is checked
/// by the clock, on one machine: nobody leaves before all have come. The exit code is 1 if anything is wrong.
#[derive(Debug, clap::Args)]
#[command(verbatim_doc_comment)]
pub(crate) struct Args {
    /// The operation.
    #[arg(value_name = "OP")]
    op: String,
    /// Ranks to start on this machine [default: 2]; under a launcher at most a check of its number.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    ranks: Option<u16>,
    /// Smallest size; K, M and G are powers of two [default: 8].
    #[arg(short = 'b', long = "minbytes", value_name = "SIZE", value_parser = plan::size)]
    min_bytes: Option<u64>,
    /// Largest size [default: 64M].
    #[arg(short = 'e', long = "maxbytes", value_name = "SIZE", value_parser = plan::size)]
    max_bytes: Option<u64>,
    /// Factor from one size to the next [default: 4].
    #[arg(short = 'f', long = "stepfactor", value_name = "N", conflicts_with = "step_bytes")]
    step_factor: Option<u64>,
    /// Bytes from one size to the next, instead of a factor.
    #[arg(short = 'i', long = "stepbytes", value_name = "SIZE", value_parser = plan::size)]
    step_bytes: Option<u64>,
    /// Timed calls per size and form.
    #[arg(short = 'n', long, value_name = "N", default_value_t = 20, value_parser = calls::<1>)]
    iters: usize,
    /// Calls to warm up, per size and form.
    #[arg(short = 'w', long = "warmup_iters", value_name = "N", default_value_t = 5, value_parser = calls::<0>)]
    warmup_iters: usize,
    /// Element type, as we or nccl-tests name it (f32, float, …), or all [default: float].
    #[arg(short = 'd', long = "datatype", value_name = "TYPE")]
    dtype: Option<String>,
    /// Reduce operator, or all; what is not defined on a type is left out under all [default: sum].
    #[arg(short = 'o', long = "op", value_name = "OPERATOR")]
    op_name: Option<String>,
    /// Root rank of broadcast, reduce, gathers and scatters, or all [default: 0].
    #[arg(short = 'r', long, value_name = "RANK")]
    root: Option<String>,
    /// Checked calls per size and form; 0 checks nothing.
    #[arg(short = 'c', long, value_name = "N", default_value_t = 1, value_parser = calls::<0>)]
    check: usize,
    /// Use this algorithm of the operation at every size, instead of choosing.
    #[arg(long, value_name = "NAME")]
    algo: Option<String>,
    /// Seconds that one call may take [default: 600, or RUSTCOMMS_TIMEOUT].
    #[arg(long, value_name = "SECONDS", value_parser = timeout)]
    timeout: Option<Duration>,
    /// Write the results to this file, as a JSON array with an object for each line of the table. Types have our names
    /// there; what an operation does not have is null.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Show no progress bar; without a terminal there is none anyway.
    #[arg(long)]
    no_progress: bool,
}

/// More calls than this at one size are a mistake; the time of each is kept.
const MOST_CALLS: usize = 10_000_000;

fn calls<const LEAST: usize>(text: &str) -> Result<usize, String> {
    let n = text.parse().ok().filter(|n| (LEAST..=MOST_CALLS).contains(n));
    n.ok_or_else(|| format!("must be a number of at least {LEAST}, and at most {MOST_CALLS}"))
}

fn timeout(text: &str) -> Result<Duration, String> {
    let s: f64 = text.parse().map_err(|_| "not a number".to_owned())?;
    // Longer than ten days is a mistake, and infinity is no duration.
    if s > 0.0 && s <= 1e6 {
        Ok(Duration::from_secs_f64(s))
    } else {
        Err("must be more than 0, and at most 1000000".into())
    }
}

/// Runs the command.
pub(crate) fn execute(args: &Args) -> ExitCode {
    let wrong = |e: &dyn std::fmt::Display| {
        complain(None, &e.to_string());
        ExitCode::from(2)
    };
    let place = match discover() {
        Ok(p) => p,
        Err(e) => return wrong(&e),
    };
    let wanted = args.ranks.map(usize::from);
    if launch::is_rank() {
        if let Some(n) = wanted.filter(|n| *n != place.size) {
            return wrong(&format!(
                "--ranks {n}, but this is rank {} of {} by its environment",
                place.rank, place.size
            ));
        }
        return match Plan::new(args, place.size) {
            Ok(plan) => as_rank(args, &plan),
            Err(e) => wrong(&e),
        };
    }
    let ranks = wanted.unwrap_or(DEFAULT_RANKS);
    // What is wrong before ranks are started is said once, not by every rank.
    if let Err(e) = Plan::new(args, ranks) {
        return wrong(&e);
    }
    launch::spawn_local(ranks).unwrap_or_else(|e| {
        complain(None, &e.to_string());
        ExitCode::FAILURE
    })
}

/// Takes part as the rank that the environment says.
fn as_rank(args: &Args, plan: &Plan) -> ExitCode {
    let mut options = CommOptions::new().name("perf");
    options.timeout = args.timeout.unwrap_or(options.timeout);
    let comm = match rustcomms::connect(options) {
        Ok(c) => c,
        Err(e) => {
            complain(None, &e.to_string());
            return ExitCode::FAILURE;
        }
    };
    match measure(&comm, args, plan) {
        Ok(0) => ExitCode::SUCCESS,
        Ok(_) => ExitCode::FAILURE,
        Err(e) => {
            // Errors of calls name the rank themselves.
            let named = e.downcast_ref::<rustcomms::Error>().is_some_and(|e| e.context().rank.is_some());
            complain((!named).then(|| (comm.rank(), comm.size())), &e.to_string());
            // The others need not wait for this rank.
            comm.abort(&format!("perf ends there: {e}"));
            ExitCode::FAILURE
        }
    }
}

/// What every rank does; returns how many elements were wrong.
fn measure(comm: &Communicator, args: &Args, plan: &Plan) -> Result<u64, Failure> {
    let first = comm.rank() == 0;
    // Before the measurement, which may take long.
    let json = match &args.json {
        Some(path) if first => {
            Some((path, File::create(path).map_err(|e| format!("cannot create {}: {e}", path.display()))?))
        }
        _ => None,
    };
    let mut screen = Screen::new(first, !args.no_progress, plan.len());
    screen.head(comm, plan)?;
    let Outcome { rows, wrong } = bench::run(comm, plan, &mut screen)?;
    screen.finish();
    screen.footer(&rows)?;
    if let Some((path, mut file)) = json {
        let text = serde_json::to_string_pretty(&rows)?;
        writeln!(file, "{text}").map_err(|e| format!("cannot write {}: {e}", path.display()))?;
    }
    comm.finalize(FINALIZE)?;
    Ok(wrong)
}
