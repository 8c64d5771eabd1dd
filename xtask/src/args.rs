//! The command line, parsed by hand: a few commands and options do not need a library.

use crate::bench::{self, Bench};
use crate::chaos::Chaos;
use crate::ci::Step;
use crate::fuzz::Fuzz;

/// What to do.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Command {
    Accept,
    Bench(Bench),
    /// `bench compare`, whose options the program that compares understands.
    Compare(Vec<String>),
    Chaos(Chaos),
    Ci(Selection),
    Conformance {
        full: bool,
    },
    Fuzz(Fuzz),
    Interop,
    Help,
}

/// Which steps of `ci` to run.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Selection {
    /// If not empty, only these.
    pub(crate) only: Vec<Step>,
    /// Never these.
    pub(crate) skip: Vec<Step>,
}

impl Selection {
    /// Whether this step is to run.
    pub(crate) fn takes(&self, step: Step) -> bool {
        (self.only.is_empty() || self.only.contains(&step)) && !self.skip.contains(&step)
    }
}

/// Understands the arguments after `cargo xtask`.
pub(crate) fn parse(args: &[String]) -> Result<Command, String> {
    let Some((command, rest)) = args.split_first() else { return Ok(Command::Help) };
    if let [bench, name, options @ ..] = args
        && bench == "bench"
        && bench::Name::from_name(name) == Some(bench::Name::Compare)
    {
        return Ok(Command::Compare(options.to_vec()));
    }
    if args.iter().any(|a| a == "--help" || a == "-h") {
        return Ok(Command::Help);
    }
    match command.as_str() {
        "help" => Ok(Command::Help),
        "ci" => selection(rest).map(Command::Ci),
        "accept" => match rest.first() {
            None => Ok(Command::Accept),
            Some(extra) => Err(format!("accept takes no argument, not '{extra}'")),
        },
        "interop-store" => match rest.first() {
            None => Ok(Command::Interop),
            Some(extra) => Err(format!("interop-store takes no argument, not '{extra}'")),
        },
        "conformance" => match rest {
            [] => Ok(Command::Conformance { full: false }),
            [full] if full == "--full" => Ok(Command::Conformance { full: true }),
            _ => Err(format!("conformance takes --full or nothing, not '{}'", rest.join(" "))),
        },
        "chaos" => chaos(rest).map(Command::Chaos),
        "fuzz" => fuzz(rest).map(Command::Fuzz),
        "bench" => bench(rest).map(Command::Bench),
        other => Err(format!(
            "unknown command '{other}'; known: ci, accept, bench, chaos, conformance, fuzz, interop-store, help"
        )),
    }
}

fn selection(args: &[String]) -> Result<Selection, String> {
    let mut chosen = Selection::default();
    let mut args = args.iter();
    while let Some(arg) = args.next() {
        let (option, inline) = option(arg);
        let list = match option {
            "--only" => &mut chosen.only,
            "--skip" => &mut chosen.skip,
            other => return Err(format!("ci does not know '{other}'; it takes --only STEP and --skip STEP")),
        };
        let value = inline.or_else(|| args.next().map(String::as_str));
        let value = value.ok_or_else(|| format!("{option} needs the name of a step: {}", step_names()))?;
        list.push(
            Step::from_name(value).ok_or_else(|| format!("no step is called '{value}'; steps: {}", step_names()))?,
        );
    }
    if Step::ALL.iter().any(|s| chosen.takes(*s)) {
        Ok(chosen)
    } else {
        Err("--only and --skip together leave no step to run".to_owned())
    }
}

/// An option and its value if that is in the same argument: both `--only fmt` and `--only=fmt` are understood.
fn option(arg: &str) -> (&str, Option<&str>) {
    arg.split_once('=').map_or((arg, None), |(o, v)| (o, Some(v)))
}

fn fuzz(args: &[String]) -> Result<Fuzz, String> {
    let mut chosen = Fuzz::default();
    let mut args = args.iter();
    while let Some(arg) = args.next() {
        let (option, inline) = option(arg);
        if !["--target", "--runs", "--rss-limit-mb"].contains(&option) {
            return Err(format!("fuzz does not know '{option}'; it takes --target T, --runs N and --rss-limit-mb N"));
        }
        let value =
            inline.or_else(|| args.next().map(String::as_str)).ok_or_else(|| format!("{option} needs a value"))?;
        let number = || value.parse::<u64>().map_err(|_| format!("{option} needs a number, not '{value}'"));
        match option {
            "--target" => chosen.targets.push(value.to_owned()),
            "--runs" => chosen.runs = number()?,
            _ => chosen.rss_limit_mb = number()?,
        }
    }
    Ok(chosen)
}

/// Without arguments everything; with some, what they name.
fn chaos(args: &[String]) -> Result<Chaos, String> {
    let mut chosen = if args.is_empty() { Chaos::FULL } else { Chaos::NONE };
    let mut args = args.iter();
    while let Some(arg) = args.next() {
        let (option, inline) = option(arg);
        if option == "--leaks" {
            chosen.leaks = true;
            continue;
        }
        if !["--seeds", "--processes", "--first"].contains(&option) {
            return Err(format!(
                "chaos does not know '{option}'; it takes --seeds N, --processes N, --first SEED and --leaks"
            ));
        }
        let value =
            inline.or_else(|| args.next().map(String::as_str)).ok_or_else(|| format!("{option} needs a number"))?;
        let number = value.parse::<u64>().map_err(|_| format!("{option} needs a number, not '{value}'"))?;
        match option {
            "--seeds" => chosen.seeds = number,
            "--processes" => chosen.processes = number,
            _ => chosen.first = number,
        }
    }
    if chosen == (Chaos { first: chosen.first, ..Chaos::NONE }) {
        return Err("chaos has nothing to do: give --seeds N, --processes N or --leaks, or no argument".to_owned());
    }
    Ok(chosen)
}

fn bench(args: &[String]) -> Result<Bench, String> {
    let names = || bench::Name::ALL.map(bench::Name::name).join(", ");
    let Some((name, rest)) = args.split_first() else { return Err(format!("bench needs a name: {}", names())) };
    let name =
        bench::Name::from_name(name).ok_or_else(|| format!("no bench is called '{name}'; known: {}", names()))?;
    let mut chosen = Bench { name, quick: false, out: None };
    let mut rest = rest.iter();
    while let Some(arg) = rest.next() {
        match option(arg) {
            ("--quick", None) => chosen.quick = true,
            ("--out", inline) => {
                let value = inline.or_else(|| rest.next().map(String::as_str));
                chosen.out = Some(value.ok_or("--out needs a folder")?.to_owned());
            }
            _ => return Err(format!("bench does not know '{arg}'; it takes --quick and --out DIR")),
        }
    }
    Ok(chosen)
}

fn step_names() -> String {
    Step::ALL.map(Step::name).join(", ")
}

/// The text of `--help`.
pub(crate) fn help() -> String {
    let mut text = String::from(
        "cargo xtask: automation of the rustcomms workspace

USAGE
    cargo xtask ci [--only STEP]... [--skip STEP]...   run the checks in order, stop at the first failure
    cargo xtask accept                                 build release programs and check what they compute
    cargo xtask conformance [--full]                   run the conformance suite over sim and tcp; --full takes up to 30 min
    cargo xtask chaos [--seeds N] [--processes N] [--leaks] [--first SEED]
                                                       random programs while ranks are killed, links cut and frames damaged,
                                                       simulated and with processes; leaks; without arguments 1000, 100, leaks
    cargo xtask interop-store                          our store and torchrun's ranks against a real PyTorch (pip: 6 GB)
    cargo xtask fuzz [--target T]... [--runs N] [--rss-limit-mb N]
                                                       feed the fuzz targets N inputs each (1000000), within N MiB (256)
    cargo xtask bench scale [--quick] [--out DIR]      run a benchmark whose results are kept in benches/results
    cargo xtask bench compare [OPTIONS]                likewise; --help lists its options
    cargo xtask help                                   this text

STEPS OF ci
",
    );
    for step in Step::ALL {
        text.push_str(&format!("    {:<14}{}\n", step.name(), step.about()));
    }
    text.push_str("\nBENCHES\n");
    for name in bench::Name::ALL {
        text.push_str(&format!("    {:<14}{}\n", name.name(), name.about()));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(line: &str) -> Result<Command, String> {
        parse(&line.split_whitespace().map(str::to_owned).collect::<Vec<_>>())
    }

    fn ci(line: &str) -> Selection {
        match args(line) {
            Ok(Command::Ci(s)) => s,
            other => panic!("{line}: {other:?}"),
        }
    }

    #[test]
    fn commands() {
        assert_eq!(args(""), Ok(Command::Help));
        assert_eq!(args("--help"), Ok(Command::Help));
        assert_eq!(args("ci --only fmt -h"), Ok(Command::Help));
        assert_eq!(args("accept"), Ok(Command::Accept));
        assert_eq!(args("ci"), Ok(Command::Ci(Selection::default())));
        assert_eq!(args("conformance"), Ok(Command::Conformance { full: false }));
        assert_eq!(args("conformance --full"), Ok(Command::Conformance { full: true }));
        assert!(args("conformance --fast").unwrap_err().contains("'--fast'"));
        assert_eq!(args("interop-store"), Ok(Command::Interop));
        assert!(args("interop-store fast").unwrap_err().contains("'fast'"));
        assert!(args("accept now").unwrap_err().contains("'now'"));
        assert_eq!(args("fuzz"), Ok(Command::Fuzz(Fuzz::default())));
        let chosen = Fuzz { targets: vec!["a".into(), "b".into()], runs: 7, rss_limit_mb: 99 };
        assert_eq!(args("fuzz --target a --target=b --runs 7 --rss-limit-mb=99"), Ok(Command::Fuzz(chosen)));
        assert!(args("fuzz --runs many").unwrap_err().contains("'many'"));
        assert!(args("fuzz --runs").unwrap_err().contains("needs a value"));
        assert!(args("fuzz --fast").unwrap_err().contains("'--fast'"));
        assert_eq!(args("chaos"), Ok(Command::Chaos(Chaos::FULL)));
        let chosen = Chaos { seeds: 7, processes: 0, first: 3, leaks: false };
        assert_eq!(args("chaos --seeds 7 --first=3"), Ok(Command::Chaos(chosen)));
        assert_eq!(args("chaos --leaks"), Ok(Command::Chaos(Chaos { leaks: true, ..Chaos::NONE })));
        assert!(args("chaos --first 3").unwrap_err().contains("nothing to do"));
        assert!(args("chaos --seeds many").unwrap_err().contains("'many'"));
        assert!(args("chaos --processes").unwrap_err().contains("needs a number"));
        assert!(args("chaos --fast").unwrap_err().contains("'--fast'"));
        let bench = |quick, out: Option<&str>| Bench { name: bench::Name::Scale, quick, out: out.map(str::to_owned) };
        assert_eq!(args("bench scale"), Ok(Command::Bench(bench(false, None))));
        assert_eq!(args("bench scale --quick --out there"), Ok(Command::Bench(bench(true, Some("there")))));
        assert_eq!(args("bench scale --out=there"), Ok(Command::Bench(bench(false, Some("there")))));
        let compare = |o: &[&str]| Ok(Command::Compare(o.iter().map(|s| (*s).to_owned()).collect()));
        assert_eq!(args("bench compare"), compare(&[]));
        assert_eq!(args("bench compare --world 2 --help"), compare(&["--world", "2", "--help"]));
        assert!(args("bench").unwrap_err().contains("scale"));
        assert!(args("bench scales").unwrap_err().contains("'scales'"));
        assert!(args("bench scale --fast").unwrap_err().contains("'--fast'"));
        assert!(args("bench scale --out").unwrap_err().contains("needs a folder"));
        assert!(args("lint").unwrap_err().contains("'lint'"));
    }

    #[test]
    fn only_and_skip_repeat_and_combine() {
        let s = ci("ci --only fmt --only=doc --skip doc");
        assert_eq!(s.only, [Step::Fmt, Step::Doc]);
        assert!(s.takes(Step::Fmt) && !s.takes(Step::Doc) && !s.takes(Step::Test));
        let s = ci("ci --skip accept");
        assert!(Step::ALL.iter().all(|x| s.takes(*x) == (*x != Step::Accept)));
    }

    #[test]
    fn mistakes_name_the_choices() {
        assert!(args("ci --only format").unwrap_err().contains("hygiene"));
        assert!(args("ci --only").unwrap_err().contains("needs the name"));
        assert!(args("ci --fast").unwrap_err().contains("--fast"));
        assert!(args("ci --only fmt --skip fmt").unwrap_err().contains("no step"));
    }

    #[test]
    fn help_lists_every_step_and_command() {
        let text = help();
        for step in Step::ALL {
            assert!(text.contains(step.name()) && text.contains(step.about()), "{step:?}");
        }
        assert!(
            text.contains("cargo xtask accept")
                && text.contains("cargo xtask conformance")
                && text.contains("cargo xtask bench")
                && text.contains("--skip STEP")
        );
    }
}
