//! Ours beside Open MPI and Gloo: same operations, sizes and counts, in interleaved rounds. Writes `cpu.md` and `cpu.json`.
//!
//! `cargo xtask bench compare` installs and compiles the peers, and then runs this; `--help` lists the options. `compare needs OPTIONS` only
//! says which peers and how many seconds that takes, `compare rank …` is a rank of ours.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

use benches::compare::drive::{self, Lab};
use benches::compare::estimate::estimate;
use benches::compare::limits::{Floor, measure};
use benches::compare::options::{Options, Peer, Transport, USAGE};
use benches::compare::place::{self, PROBE, Probe};
use benches::compare::report::{self, Context};
use benches::compare::side::{self, LIMIT, Side, Spec};
use benches::compare::{ours, side::check_peers};

/// How long each floor is tried.
const FLOOR: Duration = Duration::from_millis(40);

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let ended = match args.split_first() {
        Some((first, rest)) if first == "rank" => ours::rank(rest).map_err(|e| format!("ruler: {e}")),
        Some((first, rest)) if first == "needs" => needs(rest),
        _ if args.iter().any(|a| a == "--help" || a == "-h") => {
            print!("{USAGE}");
            Ok(())
        }
        _ => compare(&args),
    };
    match ended {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("{e}");
            ExitCode::FAILURE
        }
    }
}

/// For xtask, which compiles the peers: their names, then seconds within which compare ends.
fn needs(args: &[String]) -> Result<(), String> {
    let o = Options::parse(args)?;
    println!("{}", o.against.iter().map(|p| p.name()).collect::<Vec<_>>().join(","));
    // A round that has begun is ended: three launches, and their probes.
    println!("{}", o.budget.as_secs() + 4 * LIMIT.as_secs());
    Ok(())
}

struct Machine {
    cores: Vec<usize>,
    end: Instant,
    table_end: Instant,
    start: Instant,
}

impl Lab for Machine {
    fn probe(&mut self, world: usize) -> Probe {
        place::probe(&self.cores, world, PROBE)
    }

    fn run(&mut self, side: Side, spec: &Spec<'_>) -> Result<Vec<f64>, String> {
        side::run(side, spec)
    }

    fn floor(&mut self, floor: &Floor) -> Result<f64, String> {
        measure(floor, &self.cores, FLOOR).map_err(|e| e.to_string())
    }

    fn begin(&mut self, part: f64) {
        let now = Instant::now();
        self.table_end = now + self.end.saturating_duration_since(now).mul_f64(part);
    }

    fn is_over(&mut self) -> bool {
        Instant::now() >= self.table_end
    }

    fn say(&mut self, text: &str) {
        println!("{:>6.0} s  {text}", self.start.elapsed().as_secs_f64());
    }
}

fn compare(args: &[String]) -> Result<(), String> {
    let o = Options::parse(args)?;
    check_peers(&o.against, &o.peers)?;
    let free = field("/proc/meminfo", "MemAvailable");
    let free = free.split(' ').next().and_then(|kib| kib.parse::<usize>().ok()).map_or(usize::MAX, |kib| kib << 10);
    if o.memory() > free / 10 * 8 {
        return Err(format!(
            "the ranks need {} MiB and more, of {} MiB that are free: take a smaller --world or smaller --sizes",
            o.memory() >> 20,
            free >> 20
        ));
    }
    side::remove_stale();
    // The program that runs, whatever is committed meanwhile.
    let commit = first("git", &["describe", "--always", "--dirty", "--exclude", "*"]);
    let start = Instant::now();
    let end = start + o.budget;
    let mut machine = Machine { cores: place::cores(), end, table_end: end, start };
    let (guess, budget) = (estimate(&o).as_secs(), o.budget.as_secs());
    println!("about {guess} s on a machine that does nothing else; no round begins after {budget} s (--budget)");
    let before = load();
    let results = drive::run(&o, &mut machine);
    let took = start.elapsed();
    let context = context(&o, args, commit, &before, took);
    let cores = machine.cores.len();
    write(&o.out.join("cpu.md"), &report::markdown(&o, &results, &context, cores))?;
    write(&o.json, &report::json_rows(&o, &results, cores))?;
    let rows: usize = results.tables.iter().map(|t| t.rows.len()).sum();
    println!("{rows} rows in {:.0} s: {} and {}", took.as_secs_f64(), o.out.join("cpu.md").display(), o.json.display());
    let (ours, theirs): (Vec<_>, Vec<_>) = results.failures().partition(|(side, _)| *side == Side::Ours);
    for (_, failure) in &theirs {
        println!("a peer failed: {failure}");
    }
    match ours.as_slice() {
        [] => Ok(()),
        [(_, first), ..] => Err(format!("{} launches of ours failed; the first: {first}", ours.len())),
    }
}

fn write(file: &Path, text: &str) -> Result<(), String> {
    if let Some(folder) = file.parent() {
        std::fs::create_dir_all(folder).map_err(|e| format!("cannot make the folder {}: {e}", folder.display()))?;
    }
    std::fs::write(file, text).map_err(|e| format!("cannot write {}: {e}", file.display()))
}

/// What a program prints.
fn first(program: &str, args: &[&str]) -> String {
    let out = Command::new(program).args(args).output().ok().filter(|o| o.status.success());
    let text = out.and_then(|o| String::from_utf8(o.stdout).ok()).unwrap_or_default();
    text.lines().next().map_or_else(|| "unknown".to_owned(), |l| l.trim().to_owned())
}

/// The value behind `name:` in a file of /proc.
fn field(file: &str, name: &str) -> String {
    let text = std::fs::read_to_string(file).unwrap_or_default();
    let value = text.lines().find_map(|l| l.strip_prefix(name)?.split_once(':').map(|(_, v)| v.trim().to_owned()));
    value.unwrap_or_else(|| "unknown".to_owned())
}

fn load() -> String {
    let text = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    text.split_whitespace().next().unwrap_or("unknown").to_owned()
}

/// As it was typed, but for where the peers' programs lie, which is this machine's own affair, and the note, which has a line of its own.
fn command(args: &[String]) -> String {
    let mut shown = vec!["cargo xtask bench compare"];
    let mut args = args.iter().map(String::as_str);
    while let Some(arg) = args.next() {
        if ["--peers", "--note"].contains(&arg) {
            args.next();
        } else if !arg.starts_with("--peers=") && !arg.starts_with("--note=") {
            shown.push(arg);
        }
    }
    format!("`{}`", shown.join(" "))
}

/// Where, when and how.
fn context(o: &Options, args: &[String], commit: String, load_before: &str, took: Duration) -> Context {
    let cores = place::cores().len();
    let congestion = std::fs::read_to_string("/proc/sys/net/ipv4/tcp_congestion_control").unwrap_or_default();
    let mut versions = format!("rustcomms {}, {}", env!("CARGO_PKG_VERSION"), first("rustc", &["--version"]));
    if o.against.contains(&Peer::OpenMpi) {
        let _ = write!(versions, ", {}", first("mpirun", &["--version"]));
    }
    if o.against.contains(&Peer::Gloo) {
        let _ = write!(versions, ", libgloo {}", first("dpkg-query", &["-W", "-f=${Version}", "libgloo-dev"]));
    }
    let _ = write!(versions, ", {}", first("g++", &["--version"]));
    let settings: BTreeMap<String, String> = std::env::vars()
        .filter(|(k, _)| {
            ["RUSTCOMMS_", "OMPI_", "GLOO_"].iter().any(|p| k.starts_with(p))
                && k != "RUSTCOMMS_XTASK_RUN"
                && k != "RUSTCOMMS_SECRET"
        })
        .collect();
    let settings: Vec<String> = settings.iter().map(|(k, v)| format!("{k}={v}")).collect();
    let cases = o.ops.first().map(|op| o.cases(*op, o.worlds[0])).unwrap_or_default();
    let mut context: Context = vec![
        (
            "machine",
            format!(
                "{}, {cores} cores, {} of memory, {} {}, TCP congestion control {}",
                field("/proc/cpuinfo", "model name"),
                field("/proc/meminfo", "MemTotal"),
                first("uname", &["-s"]),
                first("uname", &["-r"]),
                congestion.trim()
            ),
        ),
        ("versions", versions),
        ("commit", commit),
        ("date", first("date", &["-u", "+%F"])),
        ("command", command(args)),
        (
            "a rank of ours",
            format!(
                "`compare rank TRANSPORT PINNED {} CASES`, with `RUSTCOMMS_RANK`, `RUSTCOMMS_WORLD_SIZE` and `RUSTCOMMS_STORE`",
                LIMIT.as_secs()
            ),
        ),
    ];
    if o.against.contains(&Peer::OpenMpi) {
        for transport in &o.transports {
            let spec = Spec {
                world: o.worlds[0],
                transport: *transport,
                pinned: true,
                cases: &cases,
                peers: Path::new("target/peers"),
            };
            let line = side::mpirun(&spec, &PathBuf::from("FOLDER"), rustix::process::geteuid().is_root()).join(" ");
            let name = match transport {
                Transport::Shm => "Open MPI over shm",
                Transport::Tcp => "Open MPI over tcp",
            };
            context.push((name, format!("`mpirun {line}`")));
        }
    }
    if o.against.contains(&Peer::Gloo) {
        context.push((
            "a rank of Gloo",
            format!("`target/peers/gloo RANK WORLD FOLDER PINNED {} CASES`", LIMIT.as_secs()),
        ));
    }
    context.push(("settings in the environment", if settings.is_empty() { "none".into() } else { settings.join(" ") }));
    context.push((
        "load average",
        format!(
            "{load_before} at the beginning, {} at the end; the run itself keeps up to {} processes busy",
            load(),
            o.worlds.iter().max().unwrap_or(&0)
        ),
    ));
    if !o.note.is_empty() {
        context.push(("note", o.note.clone()));
    }
    context.push(("took", format!("{:.0} s", took.as_secs_f64())));
    context
}
