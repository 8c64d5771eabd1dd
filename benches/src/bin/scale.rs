//! What each algorithm costs in worlds from 2 to 100,000 ranks: by running its schedules on a simulated clock, with latency and bandwidth
//! measured between two processes here. Writes `scale.md`, `scale.json` and `scale.svg`; `cargo xtask bench scale`.
//!
//! `--quick` takes fewer worlds and sizes, `--out DIR` another folder than `benches/results`, `--budget N` runs all ranks of a world only where they send at
//! most N small messages (and a third of that, longer ones); with 17000000 that is every world up to 4,096, in more than ten minutes. `--model FILE` takes the model from an earlier
//! `scale.json` instead of measuring; `--alpha`, `--overhead` (seconds), `--beta` and `--gamma` (seconds per byte) set single numbers.

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use benches::scale::measure::{Measured, measure};
use benches::scale::report::{Report, seconds};
use benches::scale::{Budget, Case, Fit, Model, Row, algorithms};
use collectives::Algorithm;
use rustcomms::{Error, Operation, Result, launch};
use serde_json::Value;

/// Ends the arguments of the ranks that measure: the file for what they find.
const MEASURE: &str = "--measure-into";

const SIZES: [usize; 3] = [8, 64 << 10, 16 << 20];
const WORLDS: [usize; 22] =
    [2, 3, 4, 5, 7, 8, 12, 16, 32, 64, 100, 128, 256, 512, 1000, 1024, 2048, 4095, 4096, 10_000, 32_768, 100_000];
const FEW_WORLDS: [usize; 9] = [2, 4, 7, 16, 64, 100, 1024, 4096, 100_000];

/// Largest world of an ordered reduction: each of its ranks looks through all others when it starts, which takes a simulation of
/// all of them the square of the world.
const MOST_ORDERED: usize = 10_000;

/// Rows at a time: some take gigabytes.
const THREADS: usize = 2;

#[derive(Debug, Default)]
struct Options {
    quick: bool,
    budget: Option<u64>,
    out: Option<PathBuf>,
    model: Option<PathBuf>,
    alpha: Option<f64>,
    beta: Option<f64>,
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
                "--model" => options.model = Some(value?.into()),
                MEASURE => options.measure_into = Some(value?.into()),
                "--alpha" => options.alpha = Some(number(value?)?),
                "--beta" => options.beta = Some(number(value?)?),
                "--overhead" => options.overhead = Some(number(value?)?),
                "--gamma" => options.gamma = Some(number(value?)?),
                _ => {
                    return Err(Error::invalid(format!(
                        "'{arg}' is unknown; known: --quick, --out DIR, --budget N, --model FILE, --alpha, --beta, --overhead, --gamma"
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
                (model, None)
            }
            None if given.iter().all(Option::is_some) => (Model::from_seconds(0.0, 0.0, 0.0, 0.0), None),
            None => {
                let measured = self.measure()?;
                let (fit, model) = measured.model()?;
                (model, Some((measured, fit)))
            }
        };
        let [alpha, beta, overhead, gamma] = given;
        let set = Model::from_seconds(
            alpha.unwrap_or(0.0),
            beta.unwrap_or(0.0),
            overhead.unwrap_or(0.0),
            gamma.unwrap_or(0.0),
        );
        let model = Model {
            alpha: alpha.map_or(base.alpha, |_| set.alpha),
            beta: beta.map_or(base.beta, |_| set.beta),
            overhead: overhead.map_or(base.overhead, |_| set.overhead),
            gamma: gamma.map_or(base.gamma, |_| set.gamma),
        };
        Ok((model, measured))
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
        let measured = measure(if options.quick { 7 } else { 31 })?;
        // Only the first rank's time of a round is that of a round: it waits for the answer.
        if std::env::var("RUSTCOMMS_RANK").is_ok_and(|r| r == "0") {
            write(file, &measured.to_json().to_string())?;
        }
        return Ok(ExitCode::SUCCESS);
    }
    let start = Instant::now();
    let (model, measured) = options.model()?;
    println!("# model: {}", model.to_json());
    if let Some((m, fit)) = &measured {
        for s in &m.samples {
            println!("# {:>9} bytes one way {:>10}, {:+.1} %", s.bytes, seconds(s.seconds), 100.0 * fit.residual(s));
        }
    }
    let budget = match options.budget {
        Some(small) => Budget { small, large: small / 3 },
        None if options.quick => Budget::QUICK,
        None => Budget::FULL,
    };
    let rows = cost(&cases(options.quick), model, budget)?;
    let report = Report { context: context(), model, measured, budget, rows };
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

fn cases(quick: bool) -> Vec<Case> {
    let worlds: &[usize] = if quick { &FEW_WORLDS } else { &WORLDS };
    let mut cases = Vec::new();
    for a in algorithms() {
        let sizes: &[usize] = match a.operation() {
            Operation::Barrier => &[0],
            _ if quick => &SIZES[..2],
            _ => &SIZES,
        };
        for &bytes in sizes {
            let most = if a == Algorithm::ReduceOrdered { MOST_ORDERED } else { usize::MAX };
            cases.extend(worlds.iter().filter(|n| **n <= most).map(|&n| Case::new(a, n, bytes)));
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
                if took > 2.0 {
                    eprintln!("# {case}: {} ({})", seconds(took), row.mode.name());
                }
                if let Ok(mut done) = done.lock() {
                    done.push((i, row));
                }
            }
        };
        let workers: Vec<_> = (0..THREADS).map(|_| s.spawn(work)).collect();
        workers.into_iter().try_for_each(|w| match w.join() {
            Ok(ended) => ended,
            Err(_) => Err(Error::invalid("a simulation has panicked; what it said is above")),
        })
    })?;
    let mut done = done.into_inner().unwrap_or_default();
    done.sort_by_key(|(i, _)| *i);
    Ok(done.into_iter().map(|(_, row)| row).collect())
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
    let args: Vec<String> = std::env::args().skip(1).collect();
    vec![
        ("machine", format!("{cpu}, {cores} cores, {} {}", first("uname", &["-s"]), first("uname", &["-r"]))),
        ("versions", format!("rustcomms {}, {}", env!("CARGO_PKG_VERSION"), first("rustc", &["--version"]))),
        ("commit", first("git", &["describe", "--always", "--dirty", "--exclude", "*"])),
        ("date", first("date", &["-u", "+%F"])),
        (
            "command",
            format!("cargo run --release -p benches --bin scale -- {}", args.join(" ")).trim_end_matches(" -- ").into(),
        ),
    ]
}
