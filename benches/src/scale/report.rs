//! The results as text: a table per operation and size, what the selection table picks beside what the model likes best, and JSON.

use std::fmt::Write as _;

use collectives::select::select;
use rustcomms::Operation;
use serde_json::{Value, json};

use super::case::{Budget, Mode, Row};
use super::fit::{Fit, Measured};
use super::model::{Model, Rates};

/// What has no rows.
const LEFT_OUT: &str = "Left out: above 10,000 ranks reduce_scatter by halving with blocks that are cut, where one rank cannot stand for all: each copies a piece of every
block when it starts with a piece, so that simulating all takes several times the square of the world. The library does not pick it there.
";

/// Everything that a run has found.
#[derive(Clone, Debug)]
pub struct Report {
    /// Names and values that tell where, when and how: machine, versions, commit, date, command.
    pub context: Vec<(&'static str, String)>,
    /// The model.
    pub model: Model,
    /// How it was measured, unless it was given.
    pub measured: Option<(Measured, Fit)>,
    /// What was allowed.
    pub budget: Budget,
    /// The rows, in the order of algorithms.
    pub rows: Vec<Row>,
}

/// A time with three digits.
#[must_use]
pub fn seconds(s: f64) -> String {
    let (x, unit) = match s {
        s if s < 1e-3 => (s * 1e6, "us"),
        s if s < 1.0 => (s * 1e3, "ms"),
        s => (s, "s"),
    };
    match x {
        x if x < 10.0 => format!("{x:.2} {unit}"),
        x if x < 100.0 => format!("{x:.1} {unit}"),
        x => format!("{x:.0} {unit}"),
    }
}

/// A count with three digits: `999`, `1.05k`, `4.19M`.
#[must_use]
pub fn count(x: u64) -> String {
    let of = |y: f64, unit: &str| match y {
        y if y < 10.0 => format!("{y:.2}{unit}"),
        y if y < 100.0 => format!("{y:.1}{unit}"),
        y => format!("{y:.0}{unit}"),
    };
    match x {
        0..=9_999 => x.to_string(),
        10_000..=999_999 => of(x as f64 / 1e3, "k"),
        1_000_000..=999_999_999 => of(x as f64 / 1e6, "M"),
        _ => of(x as f64 / 1e9, "G"),
    }
}

/// Bytes in the largest unit that leaves a number above 1.
#[must_use]
pub fn size(bytes: u64) -> String {
    let (mut x, mut units) = (bytes as f64, ["B", "KiB", "MiB", "GiB", "TiB"].into_iter().peekable());
    while x >= 1024.0 && units.len() > 1 {
        x /= 1024.0;
        units.next();
    }
    let unit = units.peek().copied().unwrap_or("B");
    if x.fract() == 0.0 { format!("{x:.0} {unit}") } else { format!("{x:.1} {unit}") }
}

impl Report {
    /// Operations in the order of their rows.
    fn operations(&self) -> Vec<Operation> {
        let mut ops: Vec<Operation> = Vec::new();
        for r in &self.rows {
            let op = r.case.algorithm.operation();
            if !ops.contains(&op) {
                ops.push(op);
            }
        }
        ops
    }

    /// The rows of an operation with a size, by world.
    #[must_use]
    pub fn worlds(&self, op: Operation, bytes: usize) -> Vec<(usize, Vec<&Row>)> {
        let of = |r: &&Row| r.case.algorithm.operation() == op && r.case.bytes == bytes;
        let mut worlds: Vec<usize> = self.rows.iter().filter(of).map(|r| r.case.n).collect();
        worlds.sort_unstable();
        worlds.dedup();
        worlds.into_iter().map(|n| (n, self.rows.iter().filter(of).filter(|r| r.case.n == n).collect())).collect()
    }

    fn sizes(&self, op: Operation) -> Vec<usize> {
        let of = self.rows.iter().filter(|r| r.case.algorithm.operation() == op);
        let mut sizes: Vec<usize> = of.map(|r| r.case.bytes).collect();
        sizes.sort_unstable();
        sizes.dedup();
        sizes
    }

    /// All rows as JSON, one a line, so that differences can be read.
    #[must_use]
    pub fn json(&self) -> String {
        let context: serde_json::Map<_, _> =
            self.context.iter().map(|(k, v)| ((*k).to_owned(), Value::from(v.clone()))).collect();
        let measured = self.measured.as_ref().map(|(m, f)| {
            json!({ "times": m.to_json(), "predicted_s": f.predicted, "error": f.error, "overhead_is_capped": f.capped })
        });
        let mut text = String::from("{\n");
        let _ = writeln!(text, "\"context\": {},", Value::Object(context));
        let _ = writeln!(text, "\"model\": {},", self.model.to_json());
        let _ = writeln!(text, "\"measured\": {},", measured.unwrap_or(Value::Null));
        let _ = writeln!(text, "\"columns\": {},", json!(Row::COLUMNS));
        text.push_str("\"rows\": [\n");
        let rows: Vec<String> = self.rows.iter().map(|r| r.to_json().to_string()).collect();
        text.push_str(&rows.join(",\n"));
        text.push_str("\n]\n}\n");
        text
    }

    /// The whole as Markdown.
    #[must_use]
    pub fn markdown(&self) -> String {
        let mut text = String::from("# What each algorithm costs, from 2 to 100,000 ranks\n\n");
        for (name, value) in &self.context {
            let _ = writeln!(text, "* {name}: {value}");
        }
        self.describe_model(&mut text);
        self.describe_reading(&mut text);
        self.describe_selection(&mut text);
        for op in self.operations() {
            for bytes in self.sizes(op) {
                let of = if op == Operation::Barrier { String::new() } else { format!(", {}", size(bytes as u64)) };
                let _ = writeln!(text, "\n## {}{of}\n", op.name());
                self.table(&mut text, op, bytes);
            }
        }
        text
    }

    fn describe_model(&self, text: &mut String) {
        let m = &self.model;
        let _ = write!(
            text,
            "
## The model

A rank is one processor, one port out and one port in, each doing one thing after the other. A message costs the sender's processor the overhead and the
copy of its bytes to the kernel, keeps the port out busy for its bytes meanwhile, is at the receiver's port a latency after the sender's processor began, keeps that busy for its bytes (as
they come), and costs the receiver's processor the copy of its bytes (as they come, but the last {} only when all have) and the overhead. Folding costs the
processor too; copies within a rank are free, sends never wait for their receivers, and nothing between the ports is ever the bottleneck: no switch,
no shared memory bus.

| latency (alpha) | overhead (o), per message and side |
|---|---|
| {} | {} |

| bytes of a rank's buffer | port (beta), per MiB | that is | processor copies (c), per MiB and side | folds (gamma), per MiB of f32 |
|---|---|---|---|---|
",
            size(m.chunk as u64),
            picos(m.alpha),
            picos(m.overhead)
        );
        let mut line = |which: String, r: Rates| {
            let gigabytes = (1 << 20) as f64 / (r.beta.max(1) as f64 / 1e12) / 1e9;
            let (beta, copy, gamma) = (picos(r.beta), picos(r.copy), picos(r.gamma));
            let _ = writeln!(text, "| {which} | {beta} | {gigabytes:.2} GB/s | {copy} | {gamma} |");
        };
        if m.knee == usize::MAX {
            line("all".to_owned(), m.near);
        } else {
            line(format!("the first {}", size(m.knee as u64)), m.near);
            line("those beyond".to_owned(), m.far);
        }
        match &self.measured {
            Some((measured, fit)) => describe_fit(text, measured, fit),
            None => text.push_str("\nThese numbers were given, not measured.\n"),
        }
    }

    fn describe_reading(&self, text: &mut String) {
        let of = |mode: Mode, most: usize| self.rows.iter().filter(|r| r.mode == mode && r.case.n <= most).count();
        let [all, one, about, line] = Mode::EACH.map(|m| of(m, usize::MAX));
        let [all_few, one_few, about_few, line_few] = Mode::EACH.map(|m| of(m, 4096));
        let _ = write!(
            text,
            "
## How to read the tables

Each cell: modelled time until the last rank is done; rounds (the longest chain of messages of which each was posted by a rank that had got the one
before); messages of the whole world; the most bytes that one rank sends or receives; how it was run. Bold is the model's best; `*` is what the library picks
(`collectives::select`). Sizes are those of `Shape::bytes`: of one block for operations with a block per rank, of the whole buffer for others.
all_reduce is in place, all others out of place, roots are rank 0, elements have 4 bytes.

What was run are the library's schedules, {} rows; in brackets those of up to 4,096 ranks:

* {all} ({all_few}) rows `all`: every rank's schedule, message by message, where that is up to {} messages of up to 64 bytes, {} longer ones, or {} where buffers are cut into segments.
* {one} ({one_few}) rows `one`: all ranks do the same, seen from where they are, so one rank's schedule was run, which receives when its own sends would arrive.
  Unit tests show that this gives exactly what all ranks give.
* {about} ({about_few}) rows `one~`: the same where ranks differ a little: chunks of a ring that differ by an element, folds in rank order of long buffers. Tests
  show times within 10 %, and within 20 % where a ring has one chunk less than ranks.
* {line} ({line_few}) rows `line~`: no rank can stand for all; every rank's schedule was run with two smaller sizes, cut into equal segments, and the costs continue
  in a line: what is extrapolated is the number of segments, not that of ranks. Tests show times within 3 %.

Messages, rounds and bytes are exact in rows `all` and `one`, whatever the model is. Times are the model's: its numbers are measured between two processes of
one machine, and everything about more ranks is the schedules' doing. They are not a forecast for a machine with so many processes, nor for a network.

{} rows were also run with real data, and each rank's result was right.
{}With blocks of one length all_gather_v, reduce_scatter_v, gather_v and scatter_v run the schedules of all_gather, reduce_scatter, gather and scatter.
",
            self.rows.len(),
            count(self.budget.small),
            count(self.budget.whole),
            count(self.budget.cut),
            self.rows.iter().filter(|r| r.checked).count(),
            LEFT_OUT,
        );
    }

    /// Where the library's choice costs more than the best, in the model.
    fn describe_selection(&self, text: &mut String) {
        text.push_str(
            "
## What is picked, and what the model likes best

Where the library's choice takes more than 1.1 times as long as the fastest algorithm, in the model. The selection table was made from measurements
with all ranks on one machine, where processors and memory are shared; the model gives every rank its own, as in a world of hosts with
loopback's latency.

| operation | size | ranks | picked | best | times as long |
|---|---|---|---|---|---|
",
        );
        let (mut all, mut same) = (0, 0);
        for op in self.operations() {
            for bytes in self.sizes(op) {
                let mut runs: Vec<Difference> = Vec::new();
                let mut continues = false;
                for (n, rows) in self.worlds(op, bytes) {
                    all += 1;
                    let Some(d) = Difference::of(op, bytes, n, &rows) else {
                        same += 1;
                        continues = false;
                        continue;
                    };
                    match runs.last_mut() {
                        Some(last) if continues && last.names == d.names => last.extend(&d),
                        _ => runs.push(d),
                    }
                    continues = true;
                }
                for d in runs {
                    let _ = writeln!(text, "| {} | {} | {d}", op.name(), size(bytes as u64));
                }
            }
        }
        let _ = writeln!(text, "\nIn {same} of {all} combinations the choice is the best, or within 1.1 times of it.");
    }

    fn table(&self, text: &mut String, op: Operation, bytes: usize) {
        let worlds = self.worlds(op, bytes);
        let Some((_, first)) = worlds.first() else { return };
        let _ = write!(text, "| ranks |");
        first.iter().for_each(|r| {
            let _ = write!(text, " {} |", r.case.algorithm.name());
        });
        let _ = writeln!(text, "\n|---|{}", "---|".repeat(first.len()));
        for (n, rows) in &worlds {
            let best = rows.iter().map(|r| r.counts.time).min();
            let picked = select(op, bytes, *n, true, None).ok();
            let _ = write!(text, "| {n} |");
            for column in first {
                let Some(r) = rows.iter().find(|r| r.case.algorithm == column.case.algorithm) else {
                    text.push_str(" left out |");
                    continue;
                };
                let c = &r.counts;
                let time = seconds(r.seconds());
                let time = if Some(c.time) == best { format!("**{time}**") } else { time };
                let star = if picked == Some(r.case.algorithm) { " *" } else { "" };
                let most = size(c.most_bytes_sent.max(c.most_bytes_received));
                let mode = r.mode.name();
                let (rounds, messages) = (count(u64::from(c.rounds)), count(c.messages));
                let _ = write!(text, " {time}{star}; {rounds}; {messages}; {most}; {mode} |");
            }
            text.push('\n');
        }
    }
}

fn picos(x: u64) -> String {
    seconds(x as f64 / 1e12)
}

/// Where the model's numbers come from, and how far what it says is from what was measured.
fn describe_fit(text: &mut String, measured: &Measured, fit: &Fit) {
    let _ = write!(
        text,
        "
### Where its numbers come from

Measured between two processes over backend-tcp on loopback, each on a core of its own, with the algorithms that the library picks. Times are medians of
batches, taken in turns over all sizes; batches do not count during which a rank waited for a processor for more than 2 % of the time (by the kernel's
books), unless fewer than 8 would be left.

* alpha + o and beta: broadcasts with alternate roots, one way; alpha is what the receiver's overhead leaves.
* o: {} per message of 64 in a row{}
* c: all_gathers, which are both ways at once; not more than beta, or what streams one way would be slower. Where they say more (the processors then get
  in each other's way), both are the geometric mean, so that the error is shared.
* gamma: folds of 256 KiB, into a buffer of that length and into one of 32 MiB.
* The sizes marked are fitted to, by least squares of relative errors; the knee is where these are least, if it is worth it.

### Predicted and measured

Predicted is what the simulation gives for two ranks with this model, as for all rows below.

| operation | size | measured | quartiles | batches | fitted to | predicted | off by |
|---|---|---|---|---|---|---|---|
",
        seconds(measured.gap),
        if fit.capped { ", but each a call of its own; so, half of an all_gather of 8 B, which is two overheads." } else { "." }
    );
    for (t, &predicted) in measured.timings.iter().zip(&fit.predicted) {
        let (good, taken) = t.batches;
        let _ = writeln!(
            text,
            "| {} | {} | {} | {} to {} | {good} of {taken} | {} | {} | {:+.0} % |",
            t.op.name(),
            size(t.bytes as u64),
            seconds(t.seconds),
            seconds(t.low),
            seconds(t.high),
            if t.fitted { "yes" } else { "" },
            seconds(predicted),
            100.0 * t.error(predicted)
        );
    }
    text.push('\n');
    let same = |op: Operation| matches!(op, Operation::Broadcast | Operation::AllGather);
    for (what, fitted, of_kind) in [
        ("fitted to", true, true),
        ("of the same operations with other sizes", false, true),
        ("of operations that nothing was fitted to", false, false),
    ] {
        let of =
            measured.timings.iter().zip(&fit.predicted).filter(|(t, _)| t.fitted == fitted && same(t.op) == of_kind);
        let mut errors: Vec<f64> = of.map(|(t, p)| 100.0 * t.error(*p).abs()).collect();
        errors.sort_unstable_by(f64::total_cmp);
        if let (Some(middle), Some(worst)) = (errors.get(errors.len() / 2), errors.last()) {
            let n = errors.len();
            let _ = writeln!(text, "* {n} times {what}: off by {middle:.0} % in the median, {worst:.0} % at most.");
        }
    }
}

/// Worlds, one after the other, in which the choice is not the best.
#[derive(Debug)]
struct Difference {
    names: (&'static str, &'static str),
    worlds: (usize, usize),
    factors: (f64, f64),
}

impl Difference {
    fn of(op: Operation, bytes: usize, n: usize, rows: &[&Row]) -> Option<Self> {
        let algorithm = select(op, bytes, n, true, None).ok()?;
        let picked = rows.iter().find(|r| r.case.algorithm == algorithm)?;
        let best = rows.iter().min_by_key(|r| r.counts.time)?;
        let factor = picked.counts.time as f64 / best.counts.time.max(1) as f64;
        let names = (picked.case.algorithm.name(), best.case.algorithm.name());
        (factor > 1.1).then_some(Self { names, worlds: (n, n), factors: (factor, factor) })
    }

    const fn extend(&mut self, next: &Self) {
        self.worlds.1 = next.worlds.1;
        self.factors = (self.factors.0.min(next.factors.0), self.factors.1.max(next.factors.1));
    }
}

impl std::fmt::Display for Difference {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let ((from, to), (least, most)) = (self.worlds, self.factors);
        let factor = |x: f64| if x < 10.0 { format!("{x:.1}") } else { format!("{x:.0}") };
        let range = |a: String, b: String| if a == b { a } else { format!("{a} to {b}") };
        let worlds = range(from.to_string(), to.to_string());
        write!(f, "{worlds} | {} | {} | {} |", self.names.0, self.names.1, range(factor(least), factor(most)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scale::{Case, algorithms};
    use collectives::Algorithm;

    const MODEL: Model =
        Model::flat(6_000_000, 1_500_000, Rates { beta: 220_000_000, copy: 160_000_000, gamma: 90_000_000 });

    pub(crate) fn report() -> Report {
        let budget = Budget::QUICK;
        let mut rows = Vec::new();
        for a in algorithms() {
            let sizes: &[usize] = if a.operation() == Operation::Barrier { &[0] } else { &[8, 64 << 10] };
            for &bytes in sizes {
                rows.extend([2, 5, 100].map(|n| Case::new(a, n, bytes).cost(MODEL, budget).unwrap()));
            }
        }
        Report { context: vec![("machine", "of a test".into())], model: MODEL, measured: None, budget, rows }
    }

    #[test]
    fn numbers_have_three_digits() {
        assert_eq!([1.5e-6, 99.94e-6, 0.1234, 45.0].map(seconds), ["1.50 us", "99.9 us", "123 ms", "45.0 s"]);
        assert_eq!([7, 9_999, 10_500, 4_190_000, 10_000_000_000].map(count), ["7", "9999", "10.5k", "4.19M", "10.0G"]);
        assert_eq!(
            [0, 8, 65536, 1536, 16 << 20, 1 << 50].map(size),
            ["0 B", "8 B", "64 KiB", "1.5 KiB", "16 MiB", "1024 TiB"]
        );
    }

    #[test]
    fn every_row_is_in_the_table_and_in_the_json() {
        let report = report();
        let v: Value = serde_json::from_str(&report.json()).unwrap();
        assert_eq!(v["rows"].as_array().unwrap().len(), report.rows.len());
        assert_eq!(v["rows"][0].as_array().unwrap().len(), v["columns"].as_array().unwrap().len());
        assert_eq!(Model::from_json(&v), Some(report.model));
        let text = report.markdown();
        let cells = |line: &str| line.matches("; ").count() / 4;
        assert_eq!(
            text.lines().filter(|l| l.contains(" | ") && l.contains("; ")).map(cells).sum::<usize>(),
            report.rows.len()
        );
        // One choice and one best per line at least.
        for line in text.lines().filter(|l| l.contains("; ") && l.starts_with("| ")) {
            assert!(line.contains("**") && line.contains(" *;"), "{line}");
        }
    }

    #[test]
    fn worlds_with_the_same_difference_are_one_line() {
        let mut report = report();
        report.rows.retain(|r| r.case.algorithm.operation() == Operation::AllReduce && r.case.bytes == 8);
        for r in &mut report.rows {
            r.counts.time = if r.case.algorithm == Algorithm::AllReduceRing { 10 } else { 30 };
        }
        let text = report.markdown();
        assert!(text.contains("| all_reduce | 8 B | 2 to 5 | direct | ring | 3.0 |"), "{text}");
        assert!(text.contains("| all_reduce | 8 B | 100 | recursive_doubling | ring | 3.0 |"), "{text}");
        assert!(text.contains("In 0 of 3 combinations"), "{text}");
    }
}
