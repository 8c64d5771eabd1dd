//! `rustcomms doctor` as a real process.

use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Longer than the command gives itself.
const LONG: Duration = Duration::from_secs(150);

/// Ends with the test.
struct Guard(Child);

impl Drop for Guard {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Exit code and standard output, with these variables and no others of ours.
fn doctor(variables: &[(&str, &str)]) -> (Option<i32>, String) {
    // A file, not a pipe: nobody reads while it runs.
    let file = tempfile::NamedTempFile::new().unwrap();
    let mut c = Command::new(env!("CARGO_BIN_EXE_rustcomms"));
    c.arg("doctor").stdin(Stdio::null()).stdout(file.reopen().unwrap());
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy().into_owned();
        // xtask finds leftover processes by one of them.
        if text.starts_with("RUSTCOMMS_") && text != "RUSTCOMMS_XTASK_RUN" || ["RANK", "WORLD_SIZE"].contains(&&*text) {
            c.env_remove(name);
        }
    }
    c.envs(variables.iter().copied());
    let mut child = Guard(c.spawn().unwrap());
    let text = || std::fs::read_to_string(file.path()).unwrap();
    let start = Instant::now();
    loop {
        if let Some(status) = child.0.try_wait().unwrap() {
            return (status.code(), text());
        }
        assert!(start.elapsed() < LONG, "doctor hangs: {}", text());
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// The words of the loopback's lines.
fn rows(out: &str) -> Vec<Vec<&str>> {
    let table = out.lines().skip_while(|l| !l.trim().starts_with("operation            bytes"));
    table.skip(1).take_while(|l| !l.is_empty()).map(|l| l.split_whitespace().collect()).collect()
}

#[test]
fn a_sound_machine() {
    let (code, out) = doctor(&[]);
    assert_eq!(code, Some(0), "{out}");
    let version = format!("rustcomms {} on {}", env!("CARGO_PKG_VERSION"), std::env::consts::OS);
    let simd = format!("reductions use {}\n", rustcomms::simd_level());
    for part in [
        version.as_str(),
        simd.as_str(),
        "no RUSTCOMMS_ variable is set",
        "  not set: RUSTCOMMS_TIMEOUT (seconds that an operation may take); default: 600\n",
        "  not set, a launcher sets them: RUSTCOMMS_RANK, ",
        "no launcher",
        "\n0 problems, 0 warnings\n",
    ] {
        assert!(out.contains(part), "{part}: {out}");
    }
    assert!(!out.contains("warning:") && !out.contains("PROBLEM") && !out.contains("overrides"), "{out}");
    // The table as the library prints it.
    for line in collectives::Table::tcp().to_string().lines() {
        assert!(out.contains(line), "{line}: {out}");
    }
    // Every operation that moves data, at both sizes.
    let rows = rows(&out);
    let names =
        ["batch", "sendrecv", "broadcast", "all_reduce", "reduce", "all_gather", "all_gather_v", "gather", "gather_v"];
    let more =
        ["scatter", "scatter_v", "reduce_scatter", "reduce_scatter_v", "all_to_all", "all_to_all_v", "scan", "exscan"];
    for name in names.iter().chain(&more) {
        let of: Vec<_> = rows.iter().filter(|r| r[0] == *name).collect();
        assert_eq!(of.iter().map(|r| r[1]).collect::<Vec<_>>(), ["64", "1048576"], "{name}: {out}");
        assert!(of.iter().all(|r| r[3].parse::<u64>().is_ok()), "{name}: {out}");
    }
    let algorithm = |name: &str| rows.iter().filter(|r| r[0] == name).map(|r| r[2]).collect::<Vec<_>>();
    assert_eq!((algorithm("scan"), algorithm("barrier")), (vec!["recursive_doubling", "chain"], vec!["dissemination"]));
    assert!(out.contains("send, recv"), "{out}");
}

#[test]
fn settings_are_listed_honoured_and_checked() {
    let (code, out) = doctor(&[
        ("RUSTCOMMS_ALGO", "ring"),
        ("RUSTCOMMS_SIMD", "portable"),
        ("RUSTCOMMS_TIMEOUT", "7.5"),
        ("RUSTCOMMS_LAUNCHER", "single"),
        ("RUSTCOMMS_PMI", "0"),
        ("RUSTCOMMS_SECRET", "sesame"),
        ("RUSTCOMMS_INTERFACE", "lo"),
        ("RUSTCOMMS_CONNECT", "full"),
        ("RUSTCOMMS_SIM_SEED", "7"),
        ("RUSTCOMMS_BOOTSTRAP_TIMEOUT", "60"),
    ]);
    assert_eq!(code, Some(0), "{out}");
    assert!(!out.contains("sesame"), "{out}");
    for part in
        ["RUSTCOMMS_ALGO=ring (", "RUSTCOMMS_SIMD=portable (", "RUSTCOMMS_TIMEOUT=7.5 (", "reductions use portable\n"]
    {
        assert!(out.contains(part), "{part}: {out}");
    }
    assert!(!out.contains("not set: "), "{out}");
    let ring = "all_reduce, all_gather, all_gather_v, reduce_scatter, reduce_scatter_v\n";
    assert!(out.contains(&format!("RUSTCOMMS_ALGO=ring overrides them where the operation has it: {ring}")), "{out}");
    let rows = rows(&out);
    // Who has no ring keeps its own choice.
    for (name, small) in [("all_reduce", "ring"), ("all_gather", "ring"), ("broadcast", "binomial")] {
        assert!(rows.iter().any(|r| r[..3] == [name, "64", small]), "{name}: {out}");
    }
}

#[test]
fn a_misspelt_variable_is_a_warning() {
    let (code, out) = doctor(&[("RUSTCOMMS_TIMOUT", "a secret")]);
    assert_eq!(code, Some(0), "{out}");
    assert!(
        out.contains("warning: RUSTCOMMS_TIMOUT is set, but nothing reads it; did you mean RUSTCOMMS_TIMEOUT?"),
        "{out}"
    );
    assert!(out.ends_with("\n0 problems, 1 warning\n") && !out.contains("a secret"), "{out}");
}

#[test]
fn what_cannot_work_is_a_problem() {
    for (name, value, text) in [
        ("RUSTCOMMS_ALGO", "rnig", "there is no algorithm 'rnig'"),
        ("RUSTCOMMS_TIMEOUT", "5s", "RUSTCOMMS_TIMEOUT=5s cannot be used"),
        ("RUSTCOMMS_RANK", "0", "RUSTCOMMS_WORLD_SIZE is not"),
    ] {
        let (code, out) = doctor(&[(name, value)]);
        assert_eq!(code, Some(1), "{name}={value}: {out}");
        assert!(out.contains("PROBLEM: ") && out.contains(text), "{name}={value}: {out}");
        assert!(!out.contains("\n0 problems"), "{out}");
    }
}
