//! Runs the conformance suite over the backends of this workspace: `sim`, whose ranks are threads, and `tcp`, whose
//! ranks are processes (this program starts itself).
//!
//! ```text
//! cargo run --release -p comm-conformance --example conformance -- --backend both [--full] [--seed N] [--filter TEXT]
//! ```

mod processes;

use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::{Parser, ValueEnum};
use collectives::Algorithm;
use comm_conformance::{Algo, Level, Report, Suite, Table, WORLDS};
use comm_core::CommOptions;

/// Calls of every operation in every form, checked against results worked out independently.
#[derive(Debug, Parser)]
struct Args {
    /// What to run it over.
    #[arg(long, value_enum, default_value = "both")]
    backend: Backend,
    /// All pairs of factors in every world, every type at one size, more long buffers.
    #[arg(long)]
    full: bool,
    /// Chooses values and combinations.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Only cases whose description contains this.
    #[arg(long)]
    filter: Option<String>,
    /// Only worlds of this size (may be repeated). Cases are spread over these alone.
    #[arg(long)]
    world: Vec<usize>,
    /// Leave the choice of algorithms to the backend.
    #[arg(long)]
    no_algorithms: bool,
    /// Be a rank of a world of processes. For this program's own use.
    #[arg(long, hide = true)]
    child: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Backend {
    Sim,
    Tcp,
    Both,
}

/// Time that a call may take; on a loaded machine everything takes long.
const TIMEOUT: Duration = Duration::from_secs(60);

impl Args {
    fn worlds(&self) -> &[usize] {
        if self.world.is_empty() { &WORLDS } else { &self.world }
    }

    /// Time that a world may take.
    const fn deadline(&self) -> Duration {
        Duration::from_secs(if self.full { 20 * 60 } else { 5 * 60 })
    }

    fn suite(&self, table: &str) -> Result<Suite, comm_core::Error> {
        let algorithms = Algorithm::ALL.iter().filter(|_| !self.no_algorithms);
        let suite = Suite::new(Table::from_toml(table)?)
            .level(if self.full { Level::Full } else { Level::Quick })
            .seed(self.seed)
            .algorithms(algorithms.map(|a| Algo::new(a.operation(), a.name(), a.keeps_order())))
            .worlds(self.worlds())
            .timeout(TIMEOUT)
            .deadline(self.deadline());
        Ok(match &self.filter {
            Some(f) => suite.filter(f),
            None => suite,
        })
    }
}

fn main() -> ExitCode {
    let args = Args::parse();
    match run(&args) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(e) => {
            eprintln!("conformance: {e}");
            ExitCode::from(2)
        }
    }
}

fn run(args: &Args) -> Result<bool, comm_core::Error> {
    let tcp = args.suite(include_str!("../../expected/tcp.toml"))?;
    if args.child {
        return processes::rank(&tcp, args.deadline());
    }
    let mut report = Report::default();
    if args.backend != Backend::Tcp {
        let sim = args.suite(include_str!("../../expected/sim.toml"))?;
        for size in args.worlds() {
            let name = format!("conformance-{size}");
            report.add(timed("sim", *size, || match backend_sim::world(*size, &CommOptions::new().name(name)) {
                Ok(comms) => sim.run_world(comms),
                Err(e) => sim.lost(*size, &e.to_string()),
            }));
        }
    }
    if args.backend != Backend::Sim {
        for size in args.worlds() {
            report.add(timed("tcp", *size, || processes::world(&tcp, *size, args.deadline())));
        }
    }
    println!("{report}");
    Ok(report.failed() == 0)
}

fn timed(backend: &str, size: usize, f: impl FnOnce() -> Report) -> Report {
    let start = Instant::now();
    let report = f();
    let (passed, failed, took) = (report.passed(), report.failed(), start.elapsed().as_secs_f64());
    println!("{backend:>4}, world of {size}: {passed} passed, {failed} failed in {took:.1} s");
    report
}
