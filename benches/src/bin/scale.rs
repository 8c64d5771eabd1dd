//! What each algorithm costs in worlds from 2 to 100,000 ranks: by running its schedules on a simulated clock, with latency and bandwidth
//! measured between two processes here. Writes `scale.md`, `scale.json` and `scale.svg`; `cargo xtask bench scale`.
//!
//! `--quick` takes fewer worlds and sizes, `--only PART` the algorithms whose name (`all_reduce:ring`) has that part, `--out DIR` another folder than `benches/results`, `--budget N` runs all ranks of a world only where they send at
//! most N small messages (a quarter of that, longer ones, a seventh, where buffers are cut into segments). `--model FILE` takes the model from an earlier
//! `scale.json` instead of measuring, and with it what was measured then; `--context NAME=VALUE` replaces what is said about where it ran (`commit`, `versions`), on a machine that has no
//! compiler and no history; `--alpha`, `--overhead` (seconds), `--beta` and `--gamma` (seconds per byte) set single numbers.

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use benches::scale::measure::{Effort, measure};
use benches::scale::report::{Report, seconds};
use benches::scale::{Budget, Case, Fit, Measured, Mode, Model, Rates, Row, algorithms};
use collectives::Algorithm;
use rustcomms::{Error, Operation, Result, launch};
use serde_json::Value;

/// Ends the arguments of the ranks that measure: the file for what they find.
const MEASURE: &str = "--measure-into";

const SIZES: [usize; 3] = [8, 64 << 10, 16 << 20];
const WORLDS: [usize; 22] =
    [2, 3, 4, 5, 7, 8, 12, 16, 32, 64, 100, 128, 256, 512, 1000, 1024, 2048, 4095, 4096, 10_000, 32_768, 100_000];
const FEW_WORLDS: [usize; 9] = [2, 4, 7, 16, 64, 100, 1024, 4096, 100_000];

/// Largest world of which all ranks run a reduce_scatter by halving with blocks that are cut: each rank copies a piece of each block when it starts with a piece, so
/// that takes a simulation the square of the world, for each of several pieces.
const MOST_SQUARE: usize = 10_000;

fn is_left_out(case: &Case, budget: Budget) -> bool {
    case.algorithm == Algorithm::ReduceScatterHalving && case.n > MOST_SQUARE && case.mode(budget) == Mode::Line
}

/// Most rows at a time: some take gigabytes.
const THREADS: usize = 12;

fn threads() -> usize {
    std::thread::available_parallelism().map_or(1, std::num::NonZero::get).min(THREADS)
}

#[derive(Debug, Default)]
struct Options {
    quick: bool,
    budget: Option<u64>,
    out: Option<PathBuf>,
    only: Option<String>,
    /// What this machine cannot tell about the program that it runs.
    told: Vec<(String, String)>,
    model: Option<PathBuf>,
    alpha: Option<f64>,
    beta: Option<f64>,
    copy: Option<f64>,
    overhead: Option<f64>,
    gamma: Option<f64>,
    measure_into: Option<PathBuf>,
}

impl Options {
    fn parse(args: impl Iterator<Item = String>) -> Result<Self> {
        let mut options = Self::default();
        let mut args = args;
        while let Some(arg) = args.next() {
            if arg == "--quick" {
                options.quick = true;
                continue;
            }
            let value = args.next().ok_or_else(|| Error::invalid(format!("{arg} is unknown or needs a value")));
            let number = |v: String| {
                v.parse::<f64>()
                    .ok()
                    .filter(|x| x.is_finite() && *x >= 0.0)
                    .ok_or_else(|| Error::invalid(format!("{arg} takes a number of seconds, not '{v}'")))
            };
            match arg.as_str() {
                "--out" => options.out = Some(value?.into()),
                "--budget" => {
                    let v = value?;
                    let parsed = v.parse().map_err(|_| Error::invalid(format!("--budget takes a number, not '{v}'")));
                    options.budget = Some(parsed?);
                }
                "--context" => {
                    let v = value?;
                    let told = v.split_once('=').map(|(k, v)| (k.to_owned(), v.to_owned()));
                    options.told.push(told.ok_or_else(|| Error::invalid("--context takes NAME=VALUE"))?);
                }
                "--only" => options.only = Some(value?),
                "--model" => options.model = Some(value?.into()),
                MEASURE => options.measure_into = Some(value?.into()),
                "--alpha" => options.alpha = Some(number(value?)?),
                "--beta" => options.beta = Some(number(value?)?),
                "--copy" => options.copy = Some(number(value?)?),
                "--overhead" => options.overhead = Some(number(value?)?),
                "--gamma" => options.gamma = Some(number(value?)?),
                _ => {
                    return Err(Error::invalid(format!(
                        "'{arg}' is unknown; known: --quick, --out DIR, --only PART, --budget N, --context NAME=VALUE, --model FILE, --alpha, --overhead, --beta, --copy, --gamma"
                    )));
                }
            }
        }
        Ok(options)
    }

    /// The model, and how it was measured if it was.
    fn model(&self) -> Result<(Model, Option<(Measured, Fit)>)> {
        let given = [self.alpha, self.beta, self.overhead, self.gamma];
        let (base, measured) = match &self.model {
            Some(file) => {
                let v: Value = serde_json::from_str(&read(file)?).unwrap_or(Value::Null);
                let model = Model::from_json(&v)
                    .ok_or_else(|| Error::invalid(format!("{} holds no model; scale.json does", file.display())))?;
                // What it was fitted to is worth telling as long as the numbers are these.
                let times = v.get("measured").and_then(|m| Measured::from_json(m.get("times")?));
                let fit = times.as_ref().map(Measured::fit).transpose()?.filter(|f| f.model == model);
                (model, times.zip(fit))
            }
            None if given.iter().all(Option::is_some) => (Model::flat(0, 0, Rates::default()), None),
            None => {
                let measured = self.measure()?;
                let fit = measured.fit()?;
                (fit.model, Some((measured, fit)))
            }
        };
        let or = |x: Option<f64>, base: u64| x.map_or(base, |s| (s * 1e12).round() as u64);
        let rates = |base: Rates| {
            let set =
                Rates::from_seconds(self.beta.unwrap_or(0.0), self.copy.unwrap_or(0.0), self.gamma.unwrap_or(0.0));
            let beta = if self.beta.is_some() { set.beta } else { base.beta };
            let copy = if self.copy.is_some() { set.copy } else { base.copy };
            let gamma = if self.gamma.is_some() { set.gamma } else { base.gamma };
            // No port is done before the processor that feeds it.
            Rates { beta, copy: copy.min(beta), gamma }
        };
        let (near, far) = (rates(base.near), rates(base.far));
        let (alpha, overhead) = (or(self.alpha, base.alpha), or(self.overhead, base.overhead));
        let model = Model { alpha, overhead, near, far, ..base };
        Ok((model, measured.filter(|_| model == base)))
    }

    /// Starts two ranks of this program that measure.
    fn measure(&self) -> Result<Measured> {
        let file = std::env::temp_dir().join(format!("rustcomms-scale-{}.json", std::process::id()));
        let program = std::env::current_exe().map_err(|e| Error::io("finding this program", &e))?;
        let mut args = vec![MEASURE.into(), file.clone().into_os_string()];
        if self.quick {
            args.push("--quick".into());
        }
        let code = launch::spawn_program(2, &program.into_os_string(), &args)?;
        let found = read(&file);
        let _ = std::fs::remove_file(&file);
        if code != ExitCode::SUCCESS {
            return Err(Error::invalid("the ranks that measure the model have failed; what they said is above"));
        }
        let v: Value = serde_json::from_str(&found?).unwrap_or(Value::Null);
        Measured::from_json(&v).ok_or_else(|| Error::invalid("the ranks that measure the model have left no result"))
    }
}

fn read(file: &Path) -> Result<String> {
    std::fs::read_to_string(file).map_err(|e| Error::io(format!("reading {}", file.display()), &e))
}

fn main() -> Result<ExitCode> {
    let options = Options::parse(std::env::args().skip(1))?;
    if let Some(file) = &options.measure_into {
        let (batches, limit) = if options.quick { (15, 8) } else { (41, 60) };
        let measured = measure(Effort { batches, limit: Duration::from_secs(limit) })?;
        // Only the first rank's time of a round is that of a round: it waits for the answer.
        if std::env::var("RUSTCOMMS_RANK").is_ok_and(|r| r == "0") {
            write(file, &measured.to_json().to_string())?;
        }
        return Ok(ExitCode::SUCCESS);
    }
    let start = Instant::now();
    let start_load = load();
    let (model, measured) = options.model()?;
    println!("# model: {}", model.to_json());
    if let Some((m, fit)) = &measured {
        for (t, p) in m.timings.iter().zip(&fit.predicted) {
            let (which, error) = (if t.fitted { "fitted" } else { "" }, 100.0 * t.error(*p));
            println!("# {t}: {}, predicted {}, {error:+.1} % {which} {:?}", seconds(t.seconds), seconds(*p), t.batches);
        }
    }
    let measured_load =
        if options.model.is_none() { format!("{} when the model was measured, ", load()) } else { String::new() };
    let budget = match options.budget {
        Some(most) => Budget { small: most, whole: most / 4, cut: most / 7 },
        None if options.quick => Budget::QUICK,
        None => Budget::FULL,
    };
    let rows = cost(&cases(&options, budget), model, budget)?;
    let end_load = load();
    let mut context = context();
    for (name, value) in &options.told {
        context.iter_mut().filter(|(n, _)| n == name).for_each(|(_, v)| v.clone_from(value));
    }
    if let Some(file) = &options.model {
        context.push(("model", taken_from(file)?));
    }
    context.push((
        "load",
        format!(
            "{start_load} at the start, {measured_load}{end_load} at the end \
             (averages of a minute; of the last {} are our own)",
            threads()
        ),
    ));
    let report = Report { context, model, measured, budget, rows };
    let out = options.out.unwrap_or_else(|| PathBuf::from("benches/results"));
    std::fs::create_dir_all(&out).map_err(|e| Error::io(format!("making {}", out.display()), &e))?;
    for (name, text) in [("scale.md", report.markdown()), ("scale.json", report.json()), ("scale.svg", report.svg())] {
        write(&out.join(name), &text)?;
    }
    println!(
        "{} rows, {} of them with checked data, in {}; {} has scale.md, scale.json, scale.svg",
        report.rows.len(),
        report.rows.iter().filter(|r| r.checked).count(),
        seconds(start.elapsed().as_secs_f64()),
        out.display()
    );
    Ok(ExitCode::SUCCESS)
}

fn write(file: &Path, text: &str) -> Result<()> {
    std::fs::write(file, text).map_err(|e| Error::io(format!("writing {}", file.display()), &e))
}

fn cases(options: &Options, budget: Budget) -> Vec<Case> {
    let quick = options.quick;
    let worlds: &[usize] = if quick { &FEW_WORLDS } else { &WORLDS };
    let mut cases = Vec::new();
    let wanted = |a: &Algorithm| options.only.as_ref().is_none_or(|part| a.to_string().contains(part));
    for a in algorithms().filter(wanted) {
        let sizes: &[usize] = match a.operation() {
            Operation::Barrier => &[0],
            _ if quick => &SIZES[..2],
            _ => &SIZES,
        };
        for &bytes in sizes {
            cases.extend(worlds.iter().map(|&n| Case::new(a, n, bytes)).filter(|c| !is_left_out(c, budget)));
        }
    }
    cases
}

/// Costs all cases, a few at a time; the rows are in the order of the cases.
fn cost(cases: &[Case], model: Model, budget: Budget) -> Result<Vec<Row>> {
    let next = AtomicUsize::new(0);
    let done: Mutex<Vec<(usize, Row)>> = Mutex::new(Vec::new());
    std::thread::scope(|s| {
        let work = || -> Result<()> {
            loop {
                let i = next.fetch_add(1, Ordering::Relaxed);
                let Some(case) = cases.get(i) else { return Ok(()) };
                let start = Instant::now();
                let row = case.cost(model, budget)?;
                let took = start.elapsed().as_secs_f64();
                if took > 5.0 {
                    eprintln!("# {case}: {} ({})", seconds(took), row.mode.name());
                }
                if let Ok(mut done) = done.lock() {
                    done.push((i, row));
                }
            }
        };
        let workers: Vec<_> = (0..threads()).map(|_| s.spawn(work)).collect();
        workers.into_iter().try_for_each(|w| match w.join() {
            Ok(ended) => ended,
            Err(_) => Err(Error::invalid("a simulation has panicked; what it said is above")),
        })
    })?;
    let mut done = done.into_inner().unwrap_or_default();
    done.sort_by_key(|(i, _)| *i);
    Ok(done.into_iter().map(|(_, row)| row).collect())
}

/// Where, when and how the model of an earlier file was measured.
fn taken_from(file: &Path) -> Result<String> {
    let v: Value = serde_json::from_str(&read(file)?).unwrap_or(Value::Null);
    let of = |key: &str| v.get("context").and_then(|c| c.get(key)?.as_str()).unwrap_or("unknown").to_owned();
    let [machine, versions, commit, date, load] = ["machine", "versions", "commit", "date", "load"].map(of);
    Ok(format!("measured in an earlier run: {machine}; {versions}; commit {commit}; {date}; load {load}"))
}

/// How many programs want to run, on average of the last minute.
fn load() -> String {
    let text = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    text.split_whitespace().next().unwrap_or("unknown").to_owned()
}

/// Where, when and how.
fn context() -> Vec<(&'static str, String)> {
    let first = |program: &str, args: &[&str]| {
        let out = Command::new(program).args(args).output().ok().filter(|o| o.status.success());
        let text = out.and_then(|o| String::from_utf8(o.stdout).ok());
        text.map_or_else(|| "unknown".to_owned(), |t| t.trim().to_owned())
    };
    let cpu = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let cpu =
        cpu.lines().find_map(|l| l.strip_prefix("model name")?.split_once(':')).map_or("unknown", |(_, m)| m.trim());
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    // What replaces something here is told where it is.
    let mut args: Vec<String> = std::env::args().skip(1).collect();
    while let Some(i) = args.iter().position(|a| a == "--context") {
        args.drain(i..args.len().min(i + 2));
    }
    let known = |a: &String| matches!(a.as_str(), "--quick" | "--out");
    let program =
        if args.first().is_none_or(known) { "xtask bench scale" } else { "run --release -p benches --bin scale --" };
    vec![
        ("machine", format!("{cpu}, {cores} cores, {} {}", first("uname", &["-s"]), first("uname", &["-r"]))),
        ("versions", format!("rustcomms {}, {}", env!("CARGO_PKG_VERSION"), first("rustc", &["--version"]))),
        ("commit", first("git", &["describe", "--always", "--dirty", "--exclude", "*"])),
        ("date", first("date", &["-u", "+%F"])),
        ("command", format!("cargo {program} {}", args.join(" ")).trim_end().into()),
    ]
}
