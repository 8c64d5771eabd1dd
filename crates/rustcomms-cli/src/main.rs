//! The rustcomms command: run, perf, doctor, store.
//!
//! One module per subcommand; this file only chooses between them.

mod doctor;
mod perf;
mod run;
mod store;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Collective communication for Rust.
#[derive(Debug, Parser)]
#[command(name = "rustcomms", version, propagate_version = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Doctor(doctor::Args),
    Perf(perf::Args),
    Run(run::Args),
    #[command(name = run::GUARD, hide = true)]
    Guard,
    #[command(name = doctor::PROBE, hide = true)]
    Probe(doctor::ProbeArgs),
    Store(store::Args),
}

fn main() -> ExitCode {
    match Cli::parse().command {
        Command::Doctor(args) => doctor::execute(&args),
        Command::Perf(args) => perf::execute(&args),
        Command::Run(args) => run::execute(&args),
        Command::Guard => run::guard(),
        Command::Probe(args) => doctor::probe(&args),
        Command::Store(args) => store::execute(&args),
    }
}
