//! `rustcomms doctor`: what this machine and this environment are, and whether communication works on them.
//!
//! [`environment`] reads the variables, [`limits`] and [`network`] look at the system, [`libraries`] loads what later backends
//! use, and [`loopback`] runs two ranks.

mod environment;
mod libraries;
mod limits;
mod loopback;
mod network;

use std::io::Write;
use std::process::ExitCode;

pub(crate) use libraries::{PROBE, ProbeArgs, probe};
use rustcomms::store::discover;

/// Look at this machine and its settings, and try every operation on it
///
/// Prints the version, what reductions use of the processor, the RUSTCOMMS_ variables, set or not, and which algorithm is
/// chosen when. Then two ranks of this process connect over backend tcp, run each operation on few and on many bytes,
/// and compare the results; each line says which algorithm ran and how long one call took.
///
/// Before that it tries what ranks need of the system: descriptors, processes, locked and shared memory, loopback in both
/// families, the host's name; and loads the libraries that GPU and RDMA backends would use, each in a process of its own.
///
/// These are ok; or a note, which says what could be better, or is missing and not needed; or a problem. Names of variables
/// that nobody reads get a warning. The exit code is 1 when something is wrong: values that cannot be
/// used, no connection, a wrong result. Times are for orientation; rustcomms perf measures.
#[derive(Debug, clap::Args)]
#[command(verbatim_doc_comment)]
pub(crate) struct Args {}

/// What is found, as it is found.
struct Findings {
    problems: usize,
    warnings: usize,
}

impl Findings {
    fn say(text: &str) {
        // Standard output may be closed, and then there is nobody to tell.
        let _ = writeln!(std::io::stdout().lock(), "{text}");
    }

    fn put(&mut self, verdict: Verdict) {
        match verdict {
            Verdict::Ok(text) => Self::say(&format!("  ok: {text}")),
            Verdict::Note(text) => Self::say(&format!("  note: {text}")),
            Verdict::Problem(text) => self.problem(&text),
        }
    }

    fn warn(&mut self, text: &str) {
        self.warnings += 1;
        Self::say(&format!("  warning: {text}"));
    }

    fn problem(&mut self, text: &str) {
        self.problems += 1;
        Self::say(&format!("  PROBLEM: {text}"));
    }
}

/// What became of something that was tried, with what to do about it.
#[derive(Debug)]
enum Verdict {
    Ok(String),
    /// Not as it could be, but nothing fails for that alone.
    Note(String),
    Problem(String),
}

/// Runs the command.
pub(crate) fn execute(_: &Args) -> ExitCode {
    let mut found = Findings { problems: 0, warnings: 0 };
    Findings::say(&format!(
        "rustcomms {} on {} {}, backends: {}",
        env!("CARGO_PKG_VERSION"),
        std::env::consts::OS,
        std::env::consts::ARCH,
        rustcomms::built_backends().join(", ")
    ));
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    Findings::say(&format!("\nprocessor: {cores} cores; it has {}", features()));
    Findings::say(&format!("  reductions use {}", rustcomms::simd_level()));

    Findings::say("\nenvironment:");
    environment::look(&mut found);
    let mut world = None;
    match discover() {
        Ok(place) => {
            world = (place.method != "single").then_some(place.size);
            if place.method == "single" {
                Findings::say("  no launcher: this process is no rank of a run");
            } else {
                let (rank, size, method) = (place.rank, place.size, place.method);
                Findings::say(&format!("  this process is rank {rank} of {size}, says {method}"));
                if let Err(e) = place.require_meeting() {
                    found.warn(&e.to_string());
                }
            }
            place.why.iter().for_each(|why| Findings::say(&format!("    {why}")));
        }
        Err(e) => found.problem(&e.to_string()),
    }

    Findings::say("\nlimits:");
    limits::look(&mut found, world);
    Findings::say("\nnetwork:");
    network::look(&mut found);
    Findings::say("\nlibraries:");
    libraries::look(&mut found);

    Findings::say("\nalgorithms, the first row that fits:");
    for line in collectives::Table::tcp().to_string().lines() {
        Findings::say(&format!("  {line}"));
    }
    if let Some(text) = environment::forced() {
        Findings::say(&format!("  {text}"));
    }

    Findings::say("\nloopback, two ranks over backend tcp:");
    loopback::run(&mut found);

    let of = |n: usize, what: &str| format!("{n} {what}{}", if n == 1 { "" } else { "s" });
    Findings::say(&format!("\n{}, {}", of(found.problems, "problem"), of(found.warnings, "warning")));
    ExitCode::from(u8::from(found.problems > 0))
}

/// What the processor has of that which reductions could use.
fn features() -> String {
    let mut all: Vec<&str> = Vec::new();
    #[cfg(target_arch = "x86_64")]
    {
        macro_rules! check {
            ($($name:tt)*) => { $(if std::arch::is_x86_feature_detected!($name) { all.push($name); })* };
        }
        check!("sse4.2" "avx" "avx2" "fma" "f16c" "avx512f" "avx512bw" "avx512vl" "avx512bf16" "avx512fp16");
    }
    if all.is_empty() {
        all.push("nothing that they look for");
    }
    all.join(", ")
}
