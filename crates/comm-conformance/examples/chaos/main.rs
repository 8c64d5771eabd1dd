//! Chaos: random programs in random worlds to which something happens. `cargo xtask chaos` runs it.
//!
//! ```text
//! cargo run --release -p comm-conformance --example chaos -- --seeds 1000 --processes 100 --leaks
//! ```
//!
//! `--seeds` plays in a simulation, where a seed decides on everything: on the program, the network, the faults, and in
//! which order ranks run. `--processes` plays over `tcp`, with a process per rank of which one is killed.

mod draw;
mod judge;
mod leaks;
mod processes;
mod simulated;

use std::process::ExitCode;
use std::time::Instant;

use clap::Parser;
use collectives::Algorithm;
use comm_conformance::{Algo, Table, Vocabulary};

/// Random programs in worlds to which something happens.
#[derive(Debug, Parser)]
struct Args {
    /// Simulated worlds.
    #[arg(long, default_value_t = 0)]
    seeds: u64,
    /// Worlds of processes of which one is killed.
    #[arg(long, default_value_t = 0)]
    processes: usize,
    /// The first seed.
    #[arg(long, default_value_t = 1)]
    first: u64,
    /// Count memory, descriptors and threads after many calls and communicators.
    #[arg(long)]
    leaks: bool,
    /// Be a rank of a world of processes. For this program's own use.
    #[arg(long, hide = true)]
    child: bool,
}

/// What has passed and failed.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    passed: usize,
    failed: usize,
}

impl Tally {
    /// Counts one outcome, and tells of a bad one.
    pub(crate) fn note(&mut self, outcome: Result<(), String>) {
        match outcome {
            Ok(()) => self.passed += 1,
            Err(e) => {
                self.failed += 1;
                println!("FAILED {e}");
            }
        }
    }
}

/// What programs are made of over a backend of ours.
pub(crate) fn vocabulary(backend: &str, virtual_time: bool) -> Vocabulary {
    let algorithms = Algorithm::ALL.iter().map(|a| Algo::new(a.operation(), a.name(), a.keeps_order()));
    let v = Vocabulary::new(Table::complete(backend)).algorithms(algorithms);
    if virtual_time { v.virtual_time() } else { v }
}

fn main() -> ExitCode {
    let args = Args::parse();
    if args.child {
        return match processes::rank() {
            Ok(()) => ExitCode::SUCCESS,
            Err(e) => {
                println!("WRONG {e}");
                ExitCode::FAILURE
            }
        };
    }
    let (start, mut tally) = (Instant::now(), Tally::default());
    if args.seeds > 0 {
        simulated::run(args.seeds, args.first, &mut tally);
    }
    if args.processes > 0 {
        processes::run(args.processes, args.first, &mut tally);
    }
    if args.leaks {
        leaks::run(&mut tally);
    }
    println!("chaos: {:.1} s", start.elapsed().as_secs_f64());
    println!("{} passed, {} failed", tally.passed, tally.failed);
    if tally.failed == 0 && tally.passed > 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
