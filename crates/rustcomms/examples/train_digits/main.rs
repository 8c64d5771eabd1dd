//! Data-parallel training of a small neural network on handwritten digits.
//!
//! ```text
//! cargo run --release --example train_digits -- --ranks 4
//! ```
//!
//! starts four ranks on this host and trains over them; under `rustcomms run` (or torchrun) the
//! program joins the ranks it finds. Read `train.rs` first: it is the training loop, with the two calls that make it
//! data-parallel, a broadcast of the parameters and an asynchronous all_reduce of each layer's gradient.
//!
//! At the end rank 0 repeats the training alone and says how far the parameters differ: only by rounding.

mod agree;
mod data;
mod exchange;
mod net;
mod report;
mod rng;
mod train;
mod world;

use std::fs::File;
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;
use rustcomms::Communicator;

use crate::agree::agree;
use crate::data::Dataset;
use crate::report::{Report, Screen};
use crate::train::{Config, max_difference, train, train_alone};

/// Any error, as a message for a human.
type Failure = Box<dyn std::error::Error + Send + Sync>;

/// How long ranks wait for each other at the end.
const FINALIZE: Duration = Duration::from_secs(60);

/// Trains a small neural network on handwritten digits, data-parallel over several ranks.
#[derive(Parser, Debug)]
#[command(name = "train_digits")]
struct Args {
    /// Ranks to start on this host; a launcher's ranks (rustcomms run, torchrun, …) are joined instead
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..=256))]
    ranks: u16,
    /// Passes over the training rows
    #[arg(long, default_value_t = Config::default().epochs as u32, value_parser = clap::value_parser!(u32).range(1..))]
    epochs: u32,
    /// Rows of a global batch, which the ranks share
    #[arg(long, default_value_t = Config::default().batch as u32, value_parser = clap::value_parser!(u32).range(1..))]
    batch: u32,
    /// Learning rate
    #[arg(long, default_value_t = Config::default().rate, value_parser = learning_rate)]
    lr: f32,
    /// Seed of the initial weights and of the order of rows
    #[arg(long, default_value_t = Config::default().seed)]
    seed: u64,
    /// Wait for each gradient at once instead of going on with the backward pass
    #[arg(long)]
    no_overlap: bool,
    /// Write the results to this file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Train on this file instead of the digits in the program (rows of 64 pixels 0 to 16 and a digit)
    #[arg(long, value_name = "FILE")]
    data: Option<PathBuf>,
}

fn learning_rate(text: &str) -> Result<f32, String> {
    match text.parse::<f32>() {
        Ok(rate) if rate.is_finite() && rate > 0.0 => Ok(rate),
        _ => Err("a learning rate is a number above 0".to_owned()),
    }
}

impl Args {
    fn config(&self) -> Config {
        Config {
            epochs: self.epochs as usize,
            batch: self.batch as usize,
            rate: self.lr,
            seed: self.seed,
            overlap: !self.no_overlap,
            ..Config::default()
        }
    }

    fn dataset(&self) -> Result<Dataset, Failure> {
        let Some(path) = &self.data else { return Ok(Dataset::embedded()?) };
        let text = std::fs::read_to_string(path).map_err(|e| format!("cannot read {}: {e}", path.display()))?;
        Ok(Dataset::parse(&path.display().to_string(), &text, None)?)
    }
}

fn main() -> ExitCode {
    let args = Args::parse();
    let data = args.dataset();
    // What is wrong before ranks are started is said once, not by every rank.
    if let Err(e) = &data
        && !world::is_rank()
    {
        return fail(&format!("{e}"));
    }
    let rank_main = |comm: Communicator| {
        let (rank, size) = (comm.rank(), comm.size());
        match run_rank(&comm, &args, &data) {
            Ok(()) => ExitCode::SUCCESS,
            Err(e) => fail(&format!("rank {rank} of {size}: {e}")),
        }
    };
    world::run(usize::from(args.ranks), rank_main).unwrap_or_else(|e| fail(&format!("{e}")))
}

/// Says what is wrong; standard error may be closed, and then there is nobody to tell.
fn fail(what: &str) -> ExitCode {
    let _ = writeln!(std::io::stderr(), "train_digits: error: {what}");
    ExitCode::FAILURE
}

/// What every rank does.
fn run_rank(comm: &Communicator, args: &Args, data: &Result<Dataset, Failure>) -> Result<(), Failure> {
    let cfg = args.config();
    let first = comm.rank() == 0;

    let prepared = prepare(args, data, first);
    agree(comm, &cfg, prepared.as_ref().ok().map(|(data, _)| *data), FINALIZE)?;
    let (data, json) = prepared?;

    let mut screen = Screen::new(first, data, &cfg, comm.size());
    let outcome = train(comm, data, &cfg, &mut screen)?;
    let (size, backend) = (comm.size(), comm.backend_name());
    // The others may go; what follows needs rank 0 alone.
    comm.finalize(FINALIZE)?;
    if !first {
        return Ok(());
    }

    screen.alone();
    let alone = train_alone(data, &cfg, &mut screen)?;
    screen.finish();
    let report = Report::new(&outcome, max_difference(&outcome.params, &alone.params));
    report.print(&outcome, &cfg, size, backend);
    if let Some((path, file)) = json {
        report.write(file).map_err(|e| format!("cannot write {}: {e}", path.display()))?;
    }
    Ok(())
}

/// What can fail on one rank alone: the data and, on rank 0, the file for the results.
#[expect(clippy::type_complexity, reason = "one use")]
fn prepare<'a>(
    args: &Args,
    data: &'a Result<Dataset, Failure>,
    first: bool,
) -> Result<(&'a Dataset, Option<(PathBuf, File)>), Failure> {
    let data = data.as_ref().map_err(ToString::to_string)?;
    let json = match &args.json {
        Some(path) if first => {
            let file = File::create(path).map_err(|e| format!("cannot create {}: {e}", path.display()))?;
            Some((path.clone(), file))
        }
        _ => None,
    };
    Ok((data, json))
}
