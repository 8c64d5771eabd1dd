//! What a person sees: rank 0 prints the table, and moves a bar on a terminal.

use std::io::{IsTerminal, Write};

use indicatif::{ProgressBar, ProgressStyle};
use rustcomms::Communicator;

use super::Failure;
use super::plan::Plan;
use super::report::{self, Row};

/// Rank 0's output; other ranks' is silent.
#[derive(Debug)]
pub(crate) struct Screen {
    first: bool,
    bar: Option<ProgressBar>,
    /// The line about algorithms that was printed last.
    algorithms: Option<String>,
    /// Whether the columns have their names yet.
    named: bool,
}

impl Screen {
    /// `total` is the number of measurements.
    pub(crate) fn new(first: bool, progress: bool, total: usize) -> Self {
        // No bar draws by itself: between measurements only, never into one.
        let bar = (first && progress && std::io::stderr().is_terminal()).then(|| {
            let style = ProgressStyle::with_template("{bar:30} {pos}/{len} {msg}");
            ProgressBar::new(total as u64).with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
        });
        Self { first, bar, algorithms: None, named: false }
    }

    /// Prints lines to standard output.
    fn print(&self, text: &str) -> Result<(), Failure> {
        if !self.first {
            return Ok(());
        }
        let write = || {
            let mut out = std::io::stdout().lock();
            writeln!(out, "{text}")?;
            out.flush()
        };
        let written = match &self.bar {
            Some(bar) => bar.suspend(write),
            None => write(),
        };
        written.map_err(|e| format!("cannot write to standard output: {e}").into())
    }

    /// The head of the table.
    pub(crate) fn head(&self, comm: &Communicator, plan: &Plan) -> Result<(), Failure> {
        let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        let mut hosts = comm.hosts().to_vec();
        hosts.sort_unstable();
        hosts.dedup();
        let hosts = if hosts.len() > 1 { format!("{} hosts, rank 0's with ", hosts.len()) } else { String::new() };
        let (op, backend, transport, n) = (plan.spec.name, comm.backend_name(), comm.transport(), comm.size());
        let plural = if n == 1 { "" } else { "s" };
        let mut lines = vec![
            format!("# rustcomms perf {op}, version {}", env!("CARGO_PKG_VERSION")),
            format!("# backend {backend}, transport {transport}, {n} rank{plural} on {hosts}{cores} cores"),
            report::settings(plan),
        ];
        lines.extend(plan.notes.iter().map(|n| format!("# note: {n}")));
        self.print(&lines.join("\n"))
    }

    /// Which algorithm runs at which size, when it is not what was said before, and why not another that was asked for.
    pub(crate) fn algorithms(&mut self, by_size: &[(u64, String)], why_not: Option<&str>) -> Result<(), Failure> {
        let text = report::algorithms(by_size, why_not);
        if text == self.algorithms {
            return Ok(());
        }
        self.algorithms = text;
        self.algorithms.as_deref().map_or(Ok(()), |t| self.print(t))
    }

    /// A line of the table.
    pub(crate) fn row(&mut self, row: &Row) -> Result<(), Failure> {
        if !std::mem::replace(&mut self.named, true) {
            self.print(&report::columns())?;
        }
        self.print(&row.line())
    }

    /// The lines under the table.
    pub(crate) fn footer(&self, rows: &[Row]) -> Result<(), Failure> {
        self.print(&report::footer(rows))
    }

    /// What is measured now.
    pub(crate) fn at(&self, what: &str) {
        if let Some(bar) = &self.bar {
            bar.set_message(what.to_owned());
        }
    }

    /// One measurement more is done.
    pub(crate) fn done(&self) {
        if let Some(bar) = &self.bar {
            bar.inc(1);
        }
    }

    /// Removes the bar.
    pub(crate) fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

/// Says what is wrong; standard error may be closed, and then there is nobody to tell.
pub(crate) fn complain(rank: Option<(usize, usize)>, what: &str) {
    let who = rank.map_or_else(String::new, |(r, n)| format!("rank {r} of {n}: "));
    // One write, so that lines of ranks do not mix.
    let _ = std::io::stderr().write_all(format!("rustcomms perf: {who}{what}\n").as_bytes());
}
