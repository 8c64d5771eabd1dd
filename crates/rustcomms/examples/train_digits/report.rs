//! What a human, or a program, gets to see.

use std::fmt::Write as _;
use std::io::{self, Write};
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;

use crate::data::Dataset;
use crate::exchange::Times;
use crate::net::Score;
use crate::train::{Config, Epoch, Outcome, Progress, steps_per_epoch};

/// Differences above this are more than rounding.
const TOLERANCE: f64 = 1e-4;

/// The results in numbers; what `--json` writes.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Report {
    test_accuracy: f64,
    /// Largest difference of a parameter from the training on one rank.
    max_param_diff: f64,
    /// Mean over ranks, as is `comm_s`.
    compute_s: f64,
    comm_s: f64,
    /// Share of all ranks' communication that computation hid.
    overlap: f64,
    epochs: usize,
}

impl Report {
    pub(crate) fn new(outcome: &Outcome, max_param_diff: f64) -> Self {
        let mean = mean_of(&outcome.times);
        Self {
            test_accuracy: accuracy(&outcome.test()),
            max_param_diff,
            compute_s: mean.compute.as_secs_f64(),
            comm_s: mean.comm.as_secs_f64(),
            overlap: mean.overlap(),
            epochs: outcome.epochs.len(),
        }
    }

    pub(crate) fn write(&self, mut to: impl Write) -> io::Result<()> {
        serde_json::to_writer_pretty(&mut to, self)?;
        writeln!(to)
    }

    pub(crate) fn print(&self, outcome: &Outcome, cfg: &Config, ranks: usize, backend: &str) {
        let mut text = String::new();
        // Writing to a String cannot fail.
        let _ = self.summary(&mut text, outcome, cfg, ranks, backend);
        say(&text);
    }

    fn summary(
        &self,
        t: &mut String,
        outcome: &Outcome,
        cfg: &Config,
        ranks: usize,
        backend: &str,
    ) -> std::fmt::Result {
        let test = outcome.test();
        let verdict = match self.max_param_diff {
            0.0 => "identical to the same training on one rank, which was run for comparison",
            d if d <= TOLERANCE => "rounding only",
            _ => "MORE THAN ROUNDING",
        };
        writeln!(t)?;
        writeln!(t, "held-out accuracy        {:.2} % ({} of {})", 100.0 * accuracy(&test), test.correct, test.rows)?;
        writeln!(
            t,
            "difference from 1 rank   {:.1e} at most, of {} parameters: {verdict}",
            self.max_param_diff,
            outcome.params.len()
        )?;
        writeln!(t, "ranks                    {ranks}, backend {backend}, {} rows a global batch", cfg.batch)?;
        let how = if cfg.overlap { "during the backward pass" } else { "one after the other (--no-overlap)" };
        writeln!(t, "gradients exchanged      {how}")?;
        writeln!(t)?;
        writeln!(t, "{:<8}{:>12}{:>18}{:>12}{:>12}", "rank", "compute", "communication", "waited", "overlapped")?;
        for (rank, times) in outcome.times.iter().enumerate() {
            row(t, &rank.to_string(), times)?;
        }
        if outcome.times.len() > 1 {
            row(t, "mean", &mean_of(&outcome.times))?;
        }
        Ok(())
    }
}

fn row(t: &mut String, name: &str, times: &Times) -> std::fmt::Result {
    let s = |d: Duration| format!("{:.3} s", d.as_secs_f64());
    let overlap = format!("{:.0} %", 100.0 * times.overlap());
    writeln!(t, "{name:<8}{:>12}{:>18}{:>12}{overlap:>12}", s(times.compute), s(times.comm), s(times.exposed))
}

fn mean_of(times: &[Times]) -> Times {
    let n = times.len().max(1) as u32;
    Times {
        compute: times.iter().map(|t| t.compute).sum::<Duration>() / n,
        comm: times.iter().map(|t| t.comm).sum::<Duration>() / n,
        exposed: times.iter().map(|t| t.exposed).sum::<Duration>() / n,
    }
}

fn accuracy(score: &Score) -> f64 {
    score.correct as f64 / score.rows.max(1) as f64
}

/// Prints to standard output, which may be closed (`| head`): then the training goes on in silence.
fn say(text: &str) {
    let _ = io::stdout().lock().write_all(text.as_bytes());
}

/// What rank 0 shows while it trains: a progress bar where standard error is a terminal, a line per epoch on
/// standard output. The other ranks are silent.
pub(crate) struct Screen {
    bar: Option<ProgressBar>,
    total: u64,
    epochs: usize,
    lines: bool,
}

impl Screen {
    pub(crate) fn new(first: bool, data: &Dataset, cfg: &Config, ranks: usize) -> Self {
        let total = (cfg.epochs * steps_per_epoch(data, cfg)) as u64;
        let bar = first.then(|| styled(ProgressBar::new(total)).with_message(format!("{ranks} ranks")));
        Self { bar, total, epochs: cfg.epochs, lines: first }
    }

    /// The same once more for the training on one rank; its epochs are of no interest.
    pub(crate) fn alone(&mut self) {
        self.finish();
        self.bar = Some(styled(ProgressBar::new(self.total)).with_message("1 rank, to compare"));
        self.lines = false;
    }

    pub(crate) fn finish(&mut self) {
        if let Some(bar) = self.bar.take() {
            bar.finish_and_clear();
        }
    }
}

impl Progress for Screen {
    fn step(&mut self) {
        if let Some(bar) = &self.bar {
            bar.inc(1);
        }
    }

    fn epoch(&mut self, e: &Epoch) {
        let Some(bar) = self.bar.as_ref().filter(|_| self.lines) else { return };
        let width = self.epochs.to_string().len();
        let line = format!(
            "epoch {:>width$}/{}   loss {:.4}   training accuracy {:6.2} %   held-out accuracy {:6.2} %   {:.2} s\n",
            e.number,
            self.epochs,
            e.train.loss / e.train.rows.max(1) as f64,
            100.0 * accuracy(&e.train),
            100.0 * accuracy(&e.test),
            e.seconds
        );
        bar.suspend(|| say(&line));
    }
}

fn styled(bar: ProgressBar) -> ProgressBar {
    // Only a misspelt template can fail; then the bar looks plain.
    match ProgressStyle::with_template("{msg:18} {wide_bar} {pos}/{len} steps {elapsed}") {
        Ok(style) => bar.with_style(style),
        Err(_) => bar,
    }
}
