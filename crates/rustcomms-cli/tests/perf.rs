//! `rustcomms perf` as real processes.

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

/// Long enough for a loaded machine; nothing should take as long.
const LONG: Duration = Duration::from_secs(120);
/// Variables by which a process finds that it is a rank.
const RANK_VARIABLES: [&str; 6] =
    ["RUSTCOMMS_RANK", "RUSTCOMMS_WORLD_SIZE", "RUSTCOMMS_STORE", "RUSTCOMMS_ALGO", "RANK", "WORLD_SIZE"];

struct Ended {
    code: Option<i32>,
    out: String,
    err: String,
}

/// Ends with the test; ranks end with the process that started them.
struct Guard(Child);

impl Drop for Guard {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn rustcomms(args: &[&str], change: impl FnOnce(&mut Command)) -> Ended {
    // Files, not pipes: nobody reads while it runs.
    let dir = tempfile::tempdir().unwrap();
    let file = |name: &str| std::fs::File::create(dir.path().join(name)).unwrap();
    let mut c = Command::new(env!("CARGO_BIN_EXE_rustcomms"));
    c.args(args).stdin(Stdio::null()).stdout(file("out")).stderr(file("err"));
    for v in RANK_VARIABLES {
        c.env_remove(v);
    }
    change(&mut c);
    let mut child = Guard(c.spawn().unwrap());
    let text = |name: &str| std::fs::read_to_string(dir.path().join(name)).unwrap();
    let start = Instant::now();
    loop {
        if let Some(status) = child.0.try_wait().unwrap() {
            return Ended { code: status.code(), out: text("out"), err: text("err") };
        }
        assert!(start.elapsed() < LONG, "{args:?} hangs: {} {}", text("out"), text("err"));
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn perf(line: &str) -> Ended {
    let args: Vec<_> = std::iter::once("perf").chain(line.split_whitespace()).collect();
    rustcomms(&args, |_| {})
}

/// Runs and reads the report.
fn report(line: &str) -> (Ended, Vec<Value>) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("report.json");
    // Ranks that wait for each other say where, before the test gives up.
    let ended = perf(&format!("{line} --timeout 30 --json {}", path.display()));
    assert_eq!(ended.code, Some(0), "{line}: {} {}", ended.out, ended.err);
    assert_eq!(ended.err, "", "{line}");
    let rows = read(&path);
    (ended, rows)
}

fn read(path: &Path) -> Vec<Value> {
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

/// The lines of the table, split at spaces.
fn table(out: &str) -> Vec<Vec<&str>> {
    out.lines().filter(|l| !l.starts_with('#')).map(|l| l.split_whitespace().collect()).collect()
}

/// What an operation's rows must say for 8, 64, 512 and 4096 bytes of f32 on `n` ranks.
fn check_operation(op: &str) {
    let rooted = op == "broadcast" || op == "reduce" || op.starts_with("gather") || op.starts_with("scatter");
    let reduces = op.contains("reduce") || op.contains("scan");
    let sharded = op.contains("gather") || op.contains("scatter") || op.starts_with("all_to_all");
    let no_in_place = op == "sendrecv" || op == "all_to_all_v";
    for n in [1u64, 2, 3, 5] {
        let root = n - 1;
        let more = if rooted { format!("-r {root}") } else { String::new() };
        let (ended, rows) = report(&format!("{op} --ranks {n} -b 8 -e 4K -f 8 -n 3 -w 1 {more}"));
        let table = table(&ended.out);
        assert_eq!((rows.len(), table.len()), (4, 4), "{}", ended.out);
        for ((row, line), size) in rows.iter().zip(&table).zip([8u64, 64, 512, 4096]) {
            let count = if sharded { size / 4 / n / 4 * 4 } else { size / 4 };
            let bytes = count * 4 * if sharded { n } else { 1 };
            let null = Value::Null;
            for (key, want) in [
                ("op", op.into()),
                ("backend", "tcp".into()),
                ("transport", "sockets".into()),
                ("world", n.into()),
                ("bytes", bytes.into()),
                ("count", count.into()),
                ("dtype", "f32".into()),
                ("redop", if reduces { "sum".into() } else { null.clone() }),
                ("root", if rooted { root.into() } else { null.clone() }),
            ] {
                assert_eq!(row[key], want, "{key} of {row}");
            }
            let factor = match op {
                "all_reduce" => 2.0 * (n - 1) as f64 / n as f64,
                _ if sharded => (n - 1) as f64 / n as f64,
                _ => 1.0,
            };
            for form in ["out_of_place", "in_place"] {
                if no_in_place && form == "in_place" {
                    assert!(row[form].is_null());
                    continue;
                }
                let figure = |key: &str| row[form][key].as_f64().unwrap_or_else(|| panic!("{key} of {row}"));
                assert_eq!(row[form]["wrong"], 0, "{row}");
                assert!(figure("time_us") > 0.0 && figure("min_us") > 0.0, "{row}");
                assert!(figure("min_us") <= figure("p99_us"), "{row}");
                let algbw = bytes as f64 / figure("time_us") / 1e3;
                assert!((figure("algbw") - algbw).abs() <= 1e-9 * algbw, "{row}");
                assert!((figure("busbw") - factor * algbw).abs() <= 1e-9 * algbw, "{row}");
            }
            let root = if rooted { root.to_string() } else { "-1".into() };
            let redop = if reduces { "sum" } else { "none" };
            assert_eq!(line[..5], [&*bytes.to_string(), &*count.to_string(), "float", redop, &*root]);
            assert_eq!((line.len(), line[8]), (13, "0"), "{line:?}");
            assert_eq!(line[12], if no_in_place { "N/A" } else { "0" });
        }
        let plural = if n == 1 { "rank" } else { "ranks" };
        let head = format!("# backend tcp, transport sockets, {n} {plural} on ");
        assert_eq!(ended.out.matches(&head).count(), 1, "only one rank prints: {}", ended.out);
        assert!(ended.out.contains("# Out of bounds values : 0 OK\n"), "{}", ended.out);
        assert!(ended.out.contains("# Avg bus bandwidth    : "), "{}", ended.out);
    }
}

#[test]
fn sendrecv() {
    check_operation("sendrecv");
}

#[test]
fn broadcast() {
    check_operation("broadcast");
}

#[test]
fn all_reduce() {
    check_operation("all_reduce");
}

#[test]
fn reduce() {
    check_operation("reduce");
}

#[test]
fn all_gather() {
    check_operation("all_gather");
}

#[test]
fn reduce_scatter() {
    check_operation("reduce_scatter");
}

#[test]
fn all_gather_v() {
    check_operation("all_gather_v");
}

#[test]
fn gather() {
    check_operation("gather");
}

#[test]
fn gather_v() {
    check_operation("gather_v");
}

#[test]
fn scatter() {
    check_operation("scatter");
}

#[test]
fn scatter_v() {
    check_operation("scatter_v");
}

#[test]
fn reduce_scatter_v() {
    check_operation("reduce_scatter_v");
}

#[test]
fn all_to_all() {
    check_operation("all_to_all");
}

#[test]
fn all_to_all_v() {
    check_operation("all_to_all_v");
}

#[test]
fn scan() {
    check_operation("scan");
}

#[test]
fn exscan() {
    check_operation("exscan");
}

#[test]
fn barrier() {
    for n in [1, 2, 3, 5] {
        let (ended, rows) = report(&format!("barrier --ranks {n} -n 3"));
        assert_eq!((rows.len(), &rows[0]["op"], &rows[0]["world"]), (1, &"barrier".into(), &n.into()));
        let none = ["dtype", "redop", "root", "in_place"].map(|k| rows[0].get(k));
        assert_eq!(none, [Some(&Value::Null); 4]);
        assert_eq!((&rows[0]["bytes"], &rows[0]["out_of_place"]["wrong"]), (&0.into(), &0.into()));
        assert!(rows[0]["out_of_place"]["time_us"].as_f64().unwrap() > 0.0);
        assert_eq!(table(&ended.out)[0][..5], ["0", "0", "none", "none", "-1"]);
    }
}

#[test]
fn every_type_and_operator() {
    for (op, cases, skipped) in [("all_gather", 15, 0), ("all_reduce", 14 * 5 + 8 * 3 + 5, 3 + 6 * 3)] {
        let (ended, rows) = report(&format!("{op}_perf --ranks 3 -b 256 -e 256 -n 1 -w 0 -d all -o all"));
        assert_eq!(rows.len(), cases, "{}", ended.out);
        assert_eq!(ended.out.matches("# note: skipped ").count(), skipped, "{}", ended.out);
        assert!(rows.iter().all(|r| r["out_of_place"]["wrong"] == 0 && r["in_place"]["wrong"] == 0), "{rows:?}");
    }
    let (_, rows) = report("reduce --ranks 3 -b 4K -e 4K -n 1 -w 0 -d bf16 -o max -r all");
    assert_eq!(rows.iter().map(|r| r["root"].as_u64().unwrap()).collect::<Vec<_>>(), [0, 1, 2]);
    assert!(rows.iter().all(|r| r["dtype"] == "bf16" && r["redop"] == "max"), "{rows:?}");
}

#[test]
fn algorithms_are_told_and_forced() {
    let (ended, rows) = report("all_reduce --ranks 2 -b 8 -e 256K -f 32768 -n 1");
    let names: Vec<_> = rows.iter().map(|r| r["algorithm"].as_str().unwrap()).collect();
    assert_eq!(names, ["direct", "rabenseifner"]);
    assert!(ended.out.contains("# algorithm: direct (8 B), rabenseifner (262144 B)\n"), "{}", ended.out);
    let (ended, rows) = report("all_reduce --ranks 3 -b 8 -e 64 -n 1 --algo ring");
    assert!(rows.iter().all(|r| r["algorithm"] == "ring" && r["in_place"]["wrong"] == 0));
    assert!(ended.out.contains("# algorithm: ring (8 to 32 B)\n"), "{}", ended.out);
    let ended = perf("all_reduce --ranks 3 -b 8 -e 8 --algo rnig");
    assert_eq!(ended.code, Some(1));
    let names = "direct, recursive_doubling, rabenseifner, ring";
    assert!(ended.err.contains(&format!("no algorithm 'rnig'; use one of {names}")), "{}", ended.err);
    assert!(ended.err.contains("rank 1 of 3"), "each rank says it: {}", ended.err);

    // The environment forces it where it exists, and what is told is what runs.
    let json = tempfile::NamedTempFile::new().unwrap();
    for (op, name, told) in
        [("scan", "chain", "chain"), ("all_to_all", "bruck", "bruck"), ("scan", "bruck", "recursive_doubling")]
    {
        let path = json.path().to_str().unwrap();
        let args = ["perf", op, "--ranks", "3", "-b", "1K", "-e", "1K", "-n", "1", "--json", path];
        let ended = rustcomms(&args, |c| {
            c.env("RUSTCOMMS_ALGO", name);
        });
        assert_eq!(ended.code, Some(0), "{}", ended.err);
        let rows = read(json.path());
        assert_eq!(
            (&rows[0]["algorithm"], &rows[0]["out_of_place"]["wrong"]),
            (&told.into(), &0.into()),
            "{op} by {name}"
        );
        let why_not = "; RUSTCOMMS_ALGO=bruck is not among those of scan: recursive_doubling, chain\n";
        assert_eq!(ended.out.contains(why_not), told != name, "{}", ended.out);
    }
}

#[test]
fn without_checks_nothing_is_called_right() {
    let (ended, rows) = report("all_reduce --ranks 2 -b 8 -e 8 -n 1 -c 0");
    assert_eq!((&rows[0]["in_place"]["wrong"], table(&ended.out)[0][8]), (&Value::Null, "N/A"));
}

#[test]
fn joins_the_ranks_of_a_launcher() {
    let dir = tempfile::tempdir().unwrap();
    let json = dir.path().join("r.json");
    let program = env!("CARGO_BIN_EXE_rustcomms");
    let run = |more: &[&str]| {
        let args =
            ["run", "-n", "3", "--no-prefix", "--", program, "perf", "all_gather", "-b", "64", "-e", "64", "-n", "2"];
        rustcomms(&[&args, more].concat(), |_| {})
    };
    let ended = run(&["--json", json.to_str().unwrap()]);
    assert_eq!((ended.code, &*ended.err), (Some(0), ""), "{}", ended.out);
    let rows = read(&json);
    assert_eq!((rows.len(), &rows[0]["world"], &rows[0]["in_place"]["wrong"]), (1, &3.into(), &0.into()));
    assert_eq!(table(&ended.out).len(), 1, "only one rank prints: {}", ended.out);
    assert_eq!(run(&["--ranks", "3"]).code, Some(0));
    let ended = run(&["--ranks", "2"]);
    assert_eq!(ended.code, Some(2));
    assert!(ended.err.contains("--ranks 2, but this is rank 0 of 3 by its environment"), "{}", ended.err);
    // torchrun's variables make a rank, too.
    let alone = rustcomms(&["perf", "barrier", "-n", "1"], |c| {
        c.env("RANK", "0").env("WORLD_SIZE", "1");
    });
    assert_eq!(alone.code, Some(0), "{}", alone.err);
    assert!(alone.out.contains(", 1 rank on "), "{}", alone.out);
}

#[test]
fn mistakes_are_said_once_and_before_ranks_are_started() {
    for (line, text) in [
        ("all_redcue", "there is no operation 'all_redcue'; the operations are sendrecv, broadcast, all_reduce"),
        ("all_reduce -d float31", "-d: there is no type 'float31'; there are bool, i8"),
        ("all_reduce -o mean", "-o: there is no operator 'mean'; there are sum, prod"),
        ("all_reduce -d half -o bxor", "bxor is not defined on f16; it is on bool, i8"),
        ("broadcast --ranks 3 -r 3", "'3' is not a root; with 3 ranks there are 0 to 2"),
        ("all_reduce -b 1M -e 8", "-b 1048576 is more than -e 8"),
    ] {
        let ended = perf(line);
        assert_eq!((ended.code, &*ended.out), (Some(2), ""), "{line}: {}", ended.err);
        assert!(ended.err.contains(text), "{line}: {}", ended.err);
        assert_eq!(ended.err.lines().count(), 1, "{line}: {}", ended.err);
    }
    for (line, text) in [
        ("", "<OP>"),
        ("barrier --ranks 0", "--ranks"),
        ("barrier -n x", "at least 1"),
        ("barrier --timeout 0", "--timeout"),
    ] {
        let ended = perf(line);
        assert_eq!(ended.code, Some(2), "{line}");
        assert!(ended.err.contains(text), "{line}: {}", ended.err);
    }
    let ended = rustcomms(&["perf", "barrier"], |c| {
        c.env("RUSTCOMMS_RANK", "0");
    });
    assert_eq!(ended.code, Some(2));
    assert!(ended.err.contains("RUSTCOMMS_WORLD_SIZE is not"), "{}", ended.err);
}

#[test]
fn an_error_on_one_rank_ends_all() {
    let dir = tempfile::tempdir().unwrap();
    let missing = dir.path().join("no/such/folder/r.json");
    let ended = perf(&format!("all_reduce --ranks 3 --json {}", missing.display()));
    assert_eq!(ended.code, Some(1), "{}", ended.err);
    assert!(ended.err.contains(&format!("rank 0 of 3: cannot create {}", missing.display())), "{}", ended.err);
    assert!(ended.out.is_empty(), "{}", ended.out);
}

#[test]
fn help_names_the_launchers() {
    let ended = perf("--help");
    let names = ["rustcomms run", "torchrun", "Open MPI", "mpiexec of MPICH", "srun", "MVAPICH", "PALS", "Kubernetes"];
    // All that discovery knows but `single`, which is none.
    assert_eq!(names.len() + 1, comm_store::LAUNCHERS.len());
    let text = ended.out.replace('\n', " ");
    assert!(names.iter().all(|n| text.contains(n)), "{text}");
}

/// Numbers that would ask for more memory or time than there is.
#[test]
fn numbers_have_limits() {
    for value in ["18446744073709551615", "9223372036854775807", "1000000000000", "4294967296"] {
        for option in ["-n", "-w", "-c", "--ranks", "-r", "--timeout"] {
            let ended = perf(&format!("broadcast -b 8 -e 8 {option} {value}"));
            assert_eq!(ended.code, Some(2), "{option} {value}: {} {}", ended.out, ended.err);
            assert!(ended.err.contains(value), "{option} {value}: {}", ended.err);
        }
    }
    let most = i64::MAX;
    for op in ["all_reduce", "all_gather_v", "reduce_scatter_v", "all_to_all", "scatter_v", "gather_v", "sendrecv"] {
        let ended = perf(&format!("{op} -b {most} -e {most} -i {most} --no-progress"));
        assert_eq!(ended.code, Some(1), "{op}: {}", ended.err);
        assert!(ended.err.contains("no memory for a buffer"), "{op}: {}", ended.err);
    }
}
