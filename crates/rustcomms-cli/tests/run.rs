//! `rustcomms run` as real processes, with shell scripts as ranks.

mod common;

use std::collections::{BTreeMap, BTreeSet};
use std::process::{Command, Stdio};
use std::time::Duration;

use comm_core::Store;
use common::{LONG, Launcher, contents, eventually, free_port, lines, node, pids, run, runs, stay};
use rustix::process::Signal;

#[test]
fn the_environment() {
    let names = "RUSTCOMMS_RANK RUSTCOMMS_WORLD_SIZE RUSTCOMMS_LOCAL_RANK RUSTCOMMS_LOCAL_WORLD_SIZE RUSTCOMMS_NODE_RANK \
        RUSTCOMMS_NNODES RUSTCOMMS_STORE RUSTCOMMS_RUN_ID RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK \
        GROUP_WORLD_SIZE ROLE_RANK ROLE_WORLD_SIZE ROLE_NAME MASTER_ADDR MASTER_PORT TORCHELASTIC_USE_AGENT_STORE \
        RUSTCOMMS_RESTART_COUNT TORCHELASTIC_RUN_ID TORCHELASTIC_RESTART_COUNT TORCHELASTIC_MAX_RESTARTS OMP_NUM_THREADS";
    let script = format!("for n in {names}; do eval \"echo $n=\\$$n\"; done");
    let ended = run(&["-n", "3", "--run-id", "my run"], &script).fine();
    let mut vars: BTreeMap<String, BTreeMap<String, String>> = BTreeMap::new();
    for line in ended.lines() {
        let (rank, rest) = line.split_once(' ').unwrap();
        let (name, value) = rest.split_once('=').unwrap();
        vars.entry(rank.into()).or_default().insert(name.into(), value.into());
    }
    let port = vars["[0]"]["MASTER_PORT"].clone();
    let omp = (std::thread::available_parallelism().unwrap().get() / 3).max(1).to_string();
    for r in ["0", "1", "2"] {
        let v = &vars[&format!("[{r}]")];
        for (name, value) in [
            ("RUSTCOMMS_RANK", r),
            ("RUSTCOMMS_WORLD_SIZE", "3"),
            ("RUSTCOMMS_LOCAL_RANK", r),
            ("RUSTCOMMS_LOCAL_WORLD_SIZE", "3"),
            ("RUSTCOMMS_NODE_RANK", "0"),
            ("RUSTCOMMS_NNODES", "1"),
            ("RUSTCOMMS_STORE", &format!("127.0.0.1:{port}")),
            ("RUSTCOMMS_RUN_ID", "my run"),
            ("RANK", r),
            ("WORLD_SIZE", "3"),
            ("LOCAL_RANK", r),
            ("LOCAL_WORLD_SIZE", "3"),
            ("GROUP_RANK", "0"),
            ("GROUP_WORLD_SIZE", "1"),
            ("ROLE_RANK", r),
            ("ROLE_WORLD_SIZE", "3"),
            ("ROLE_NAME", "default"),
            ("MASTER_ADDR", "127.0.0.1"),
            ("MASTER_PORT", &port),
            ("TORCHELASTIC_USE_AGENT_STORE", "True"),
            ("TORCHELASTIC_RUN_ID", "my run"),
            ("TORCHELASTIC_RESTART_COUNT", "0"),
            ("RUSTCOMMS_RESTART_COUNT", "0"),
            ("TORCHELASTIC_MAX_RESTARTS", "0"),
            ("OMP_NUM_THREADS", &omp),
        ] {
            assert_eq!(v[name], value, "{name} of rank {r}");
        }
    }
    let ended = Launcher::with(&["-n", "1"], &["/bin/sh", "-c", "echo $OMP_NUM_THREADS; ulimit -n"], |c| {
        c.env("OMP_NUM_THREADS", "77");
    });
    let ours = Command::new("/bin/sh").args(["-c", "ulimit -n"]).output().unwrap().stdout;
    let want = format!("[0] 77\n[0] {}", String::from_utf8(ours).unwrap());
    assert_eq!(String::from_utf8(ended.end().fine().out).unwrap(), want);
    // Run ids are made up, and differ.
    let ids: Vec<_> = (0..2).map(|_| run(&["-n", "1"], "echo $RUSTCOMMS_RUN_ID").fine().out).collect();
    assert!(ids[0].len() > 8 && ids[0] != ids[1]);
}

const RANK_OF_TEST: &str = "RUSTCOMMS_CLI_TEST_RANK";

#[test]
fn ranks_meet_at_the_store() {
    if std::env::var_os(RANK_OF_TEST).is_some() {
        let env = |n| std::env::var(n).unwrap();
        let store = comm_store::TcpStore::connect(env(comm_store::env::STORE), LONG).unwrap();
        let (rank, size) = (env(comm_store::env::RANK), env(comm_store::env::WORLD_SIZE).parse::<i64>().unwrap());
        store.set(&format!("hello/{rank}"), rank.as_bytes()).unwrap();
        let keys: Vec<String> = (0..size).map(|r| format!("hello/{r}")).collect();
        let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
        let all = store.multi_get(&keys, LONG).unwrap();
        eprintln!("met {}", String::from_utf8(all.concat()).unwrap());
        return;
    }
    let me = std::env::current_exe().unwrap();
    let me = me.to_str().unwrap();
    let program = [me, "--exact", "ranks_meet_at_the_store", "--nocapture"];
    let ended = Launcher::with(&["-n", "4"], &program, |c| {
        c.env(RANK_OF_TEST, "1");
    })
    .end();
    assert_eq!(ended.code(), 0, "{}", ended.err);
    for r in 0..4 {
        assert!(ended.err.contains(&format!("[{r}] met 0123\n")), "{}", ended.err);
    }
}

#[test]
fn output_has_prefixes_and_keeps_its_bytes() {
    let ended = run(&["-n", "2"], r"printf 'out\377\000 %s\n\n' $RANK; echo err $RANK >&2; printf 'no end %s' $RANK");
    assert_eq!(ended.code(), 0);
    let got: BTreeSet<&[u8]> = ended.out.split_inclusive(|b| *b == b'\n').collect();
    let want: [&[u8]; 6] =
        [b"[0] \n", b"[0] no end 0\n", b"[0] out\xff\0 0\n", b"[1] \n", b"[1] no end 1\n", b"[1] out\xff\0 1\n"];
    assert_eq!(got.into_iter().collect::<Vec<_>>(), want);
    let err: BTreeSet<&str> = ended.err.lines().collect();
    assert_eq!(err, BTreeSet::from(["[0] err 0", "[1] err 1"]));
    let ended = run(&["-n", "1", "--no-prefix"], r"printf 'a\377\000b\nlast without end'").fine();
    assert_eq!(ended.out, b"a\xff\0b\nlast without end");
    let ended = run(&["-n", "3", "--no-prefix"], r"printf 'line %s\ntail %s' $RANK $RANK").fine();
    assert_eq!(ended.lines(), lines(&["line 0", "line 1", "line 2", "tail 0", "tail 1", "tail 2"]));
    assert_eq!(run(&["-n", "1"], "cat").fine().out, b"");
}

#[test]
fn much_interleaved_output_stays_whole() {
    // Both streams go into the same file of ours, and every line tells its number and its length.
    let script = "awk -v r=$RANK 'BEGIN { for (i = 0; i < 20000; i++) { s = \"x\"; n = (i * 7 + r) % 300; \
        while (length(s) < n) s = s s; s = substr(s, 1, n); \
        if (i % 2) print r, i, n, s; else print r, i, n, s > \"/dev/stderr\" } }'";
    let out = tempfile::tempfile().unwrap();
    let copy = out.try_clone().unwrap();
    let launcher = Launcher::with(&["-n", "4"], &["/bin/sh", "-c", script], |c| {
        c.stdout(copy.try_clone().unwrap()).stderr(copy);
    });
    assert_eq!(launcher.end().code(), 0);
    let text = String::from_utf8(contents(&out)).unwrap();
    let mut seen = vec![BTreeSet::new(); 4];
    for line in text.lines() {
        let parts: Vec<&str> = line.split(' ').collect();
        let (rank, i, n): (usize, usize, usize) =
            (parts[1].parse().unwrap(), parts[2].parse().unwrap(), parts[3].parse().unwrap());
        assert_eq!(parts[0], format!("[{rank}]"), "{line}");
        assert_eq!(parts[4], "x".repeat(n), "{line}");
        assert_eq!(n, (i * 7 + rank) % 300);
        assert!(seen[rank].insert(i), "twice: {line}");
    }
    assert!(seen.iter().all(|s| s.len() == 20_000), "{:?}", seen.iter().map(BTreeSet::len).collect::<Vec<_>>());
}

/// Peers hear of a panic before the panicking process has ended; the launcher names it all the same.
#[test]
fn a_crash_right_after_a_consequence_is_named_as_the_cause() {
    let launcher = Launcher::start(&["-n", "2", "--grace", "5"], "[ $RANK = 0 ] && exit 1; sleep 0.3; exit 101");
    let ended = launcher.end();
    assert_eq!(ended.code(), 101, "{}", ended.err);
    assert!(ended.err.contains("rank 1 (pid ") && ended.err.contains("code 101: probably the cause"), "{}", ended.err);
}

#[test]
fn the_first_failure_is_named_and_gives_the_code() {
    let dir = tempfile::tempdir().unwrap();
    let script = stay(
        dir.path(),
        &format!("while [ $RANK = 2 ]; do [ -e {}/go ] && exit 3; sleep 0.02; done", dir.path().display()),
    );
    let launcher = Launcher::start(&["-n", "4", "--grace", "0.2"], &script);
    // Ranks 0, 1 and 3.
    let up: Vec<_> =
        [0, 1, 3].iter().flat_map(|i| [dir.path().join(format!("c{i}")), dir.path().join(format!("r{i}"))]).collect();
    eventually("ranks are up", || up.iter().all(|n| n.exists()));
    std::fs::write(dir.path().join("go"), "").unwrap();
    let ended = launcher.end();
    assert_eq!(ended.code(), 3, "{}", ended.err);
    let first = ended.err.lines().next().unwrap();
    assert!(
        first.starts_with("rustcomms run: rank 2 (pid ") && first.ends_with(") exited with code 3"),
        "{}",
        ended.err
    );
    assert!(ended.err.contains("SIGTERM: rank 0, 1, 3"), "{}", ended.err);
    assert!(!ended.err.contains("rank 0 (pid"), "consequences are no failures: {}", ended.err);
    for name in up {
        let pid = std::fs::read_to_string(name).unwrap();
        assert!(!runs(pid.trim()), "{pid}");
    }
}

#[test]
fn signals_of_ranks_are_named() {
    let ended = run(&["-n", "2", "--grace", "0"], "[ $RANK = 1 ] && kill -9 $$; sleep 1000");
    assert_eq!(ended.code(), 128 + 9);
    assert!(
        ended.err.contains("rank 1 (pid ") && ended.err.contains("was killed by signal 9 (SIGKILL)"),
        "{}",
        ended.err
    );
    let ended = run(&["-n", "1"], "kill -SEGV $$");
    assert_eq!(ended.code(), 128 + 11);
    assert!(ended.err.contains("signal 11 (SIGSEGV)"), "{}", ended.err);
}

#[test]
fn the_others_may_end_by_themselves() {
    let script = "[ $RANK = 0 ] && exit 5; sleep 0.3; echo my own error >&2; exit 7";
    let ended = run(&["-n", "2", "--grace", "50"], script);
    assert_eq!(ended.code(), 5);
    assert!(ended.err.contains("[1] my own error\n"), "{}", ended.err);
    assert!(ended.took < Duration::from_secs(40), "waited although all had ended");
}

#[test]
fn the_stubborn_are_killed() {
    let ended =
        run(&["-n", "2", "--grace", "0.1"], "[ $RANK = 0 ] && exit 4; trap '' TERM INT; while :; do sleep 1; done");
    assert_eq!(ended.code(), 4);
    // And those that a rank leaves behind, whether it failed or not.
    let ended = run(&["-n", "1"], "sleep 1000 & echo $!").fine();
    let pid = String::from_utf8(ended.out).unwrap();
    let pid = pid.trim().strip_prefix("[0] ").unwrap();
    eventually("what a rank left is ended", || !runs(pid));
}

/// Whether this process was started with the signal ignored, which its children inherit.
fn hangups_are_ignored() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let mask = status.lines().find_map(|l| l.strip_prefix("SigIgn:")).unwrap();
    u64::from_str_radix(mask.trim(), 16).unwrap() & 1 == 1
}

#[test]
fn interrupts_leave_nobody() {
    for (signal, number) in [(Signal::INT, 2), (Signal::TERM, 15), (Signal::HUP, 1)] {
        let dir = tempfile::tempdir().unwrap();
        let launcher = Launcher::start(&["-n", "3", "--grace", "0.3"], &stay(dir.path(), ""));
        let pids = pids(dir.path(), 3);
        launcher.signal(signal);
        let mut number = number;
        if signal == Signal::HUP && hangups_are_ignored() {
            // As `nohup` wants it, which this test was started with: the run goes on.
            std::thread::sleep(Duration::from_millis(300));
            assert!(pids.iter().all(|p| runs(p)), "{}", launcher.stderr());
            launcher.signal(Signal::TERM);
            number = 15;
        }
        let ended = launcher.end();
        assert_eq!(ended.code(), 128 + number, "{}", ended.err);
        assert!(ended.err.contains("interrupted by signal"), "{}", ended.err);
        assert!(pids.iter().all(|p| !runs(p)), "{pids:?}");
    }
}

#[test]
fn ranks_hear_of_the_interrupt_and_can_end_well() {
    let dir = tempfile::tempdir().unwrap();
    let launcher =
        Launcher::start(&["-n", "2", "--grace", "50"], &stay(dir.path(), "trap 'echo saved; kill $!; exit 0' INT"));
    pids(dir.path(), 2);
    launcher.signal(Signal::INT);
    let ended = launcher.end();
    assert_eq!(ended.code(), 130);
    assert_eq!(ended.lines(), lines(&["[0] saved", "[1] saved"]));
}

#[test]
fn the_second_interrupt_kills_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let launcher = Launcher::start(&["-n", "2", "--grace", "1000"], &stay(dir.path(), "trap '' INT TERM"));
    let pids = pids(dir.path(), 2);
    launcher.signal(Signal::INT);
    eventually("it is heard", || launcher.stderr().contains("interrupted"));
    assert!(pids.iter().all(|p| runs(p)));
    launcher.signal(Signal::INT);
    assert_eq!(launcher.end().code(), 130);
    assert!(pids.iter().all(|p| !runs(p)), "{pids:?}");
}

#[test]
fn a_killed_launcher_leaves_nobody() {
    let dir = tempfile::tempdir().unwrap();
    let launcher = Launcher::start(&["-n", "3"], &stay(dir.path(), "trap '' INT TERM HUP"));
    let pids = pids(dir.path(), 3);
    launcher.signal(Signal::KILL);
    assert_eq!(launcher.end().status.code(), None);
    eventually("ranks and their children are gone", || pids.iter().all(|p| !runs(p)));
}

/// As filters end when nobody reads them: `rustcomms run ... | head -1`.
#[test]
fn a_reader_that_goes_away_ends_the_run() {
    for more in [&[][..], &["--no-prefix"], &["--max-restarts", "3"]] {
        for script in [
            "while :; do echo some line of output; done",
            // All have ended well before it is known.
            "echo one line",
            // Those that do not want to are killed.
            "trap '' TERM; while :; do echo some line of output; done",
        ] {
            let (dir, program) = (tempfile::tempdir().unwrap(), ["/bin/sh", "-c"]);
            let script = format!("echo $$ > {}/$RANK; {script}", dir.path().display());
            let args = [&["-n", "2", "--grace", "0.2"], more].concat();
            let mut launcher = Launcher::with(&args, &[&program[..], &[&script]].concat(), |c| {
                c.stdout(Stdio::piped());
            });
            drop(launcher.child.stdout.take());
            let ended = launcher.end();
            assert_eq!(ended.code(), 128 + 13, "{args:?} {script}: {}", ended.err);
            assert_eq!(ended.err.matches("standard output is closed; ending all ranks").count(), 1, "{}", ended.err);
            assert!(!ended.err.contains("cause") && !ended.err.contains("restart "), "{}", ended.err);
            for rank in ["0", "1"] {
                let pid = std::fs::read_to_string(dir.path().join(rank)).unwrap_or_default();
                assert!(pid.is_empty() || !runs(pid.trim()), "rank {rank} still runs");
            }
        }
    }
    // A full disk is an error, but no signal.
    let full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    let ended = Launcher::with(&["-n", "1"], &["/bin/sh", "-c", "while :; do echo line; done"], |c| {
        c.stdout(full);
    });
    let ended = ended.end();
    assert_eq!(ended.code(), 1, "{}", ended.err);
    assert!(ended.err.contains("cannot write to standard output: No space left"), "{}", ended.err);
    // Without standard error the ranks go on.
    let mut quiet = Launcher::with(&["-n", "1"], &["/bin/sh", "-c", "echo lost >&2; echo lost >&2; echo end"], |c| {
        c.stderr(Stdio::piped());
    });
    drop(quiet.child.stderr.take());
    let ended = quiet.end();
    assert_eq!((ended.code(), ended.lines()), (0, lines(&["[0] end"])));
}

/// What belongs to the program and what does not.
#[test]
fn options_end_at_the_program() {
    for line in [
        &["-n2", "/bin/echo", "-n1", "--no-prefix", "--", "-x"][..],
        &["--nproc=2", "--", "/bin/echo", "-n1", "--no-prefix", "--", "-x"],
        &["-vn2", "/bin/echo", "-n1", "--no-prefix", "--", "-x"],
    ] {
        let out = Command::new(env!("CARGO_BIN_EXE_rustcomms")).arg("run").args(line).output().unwrap();
        let (out, err) = (String::from_utf8(out.stdout).unwrap(), String::from_utf8(out.stderr).unwrap());
        // echo takes -n1 for a text.
        let want = ["[0] -n1 --no-prefix -- -x", "[1] -n1 --no-prefix -- -x"];
        assert_eq!(out.lines().collect::<BTreeSet<_>>(), BTreeSet::from(want), "{line:?}: {err}");
    }
}

/// Numbers that would ask for more memory, processes or time than there is.
#[test]
fn numbers_have_limits() {
    let options = ["-n", "--nnodes", "--node-rank", "--max-restarts", "--gpus-per-node", "--omp-threads", "--grace"];
    for option in options.into_iter().chain(["--linger", "--store-timeout", "--master-port"]) {
        for value in [
            "18446744073709551615",
            "9223372036854775807",
            "1000000000000",
            "4294967296",
            "16777216",
            "-1",
            "1e300",
            "NaN",
        ] {
            let given = [option, if option == "-n" { "" } else { "=" }, value].concat();
            let args = if option == "-n" { vec![&*given] } else { vec!["-n", "1", &given] };
            let ended = Launcher::with(&args, &["true"], |_| {}).end();
            assert_eq!(ended.code(), 2, "{args:?}: {}", ended.err);
            assert!(ended.err.contains(option) && ended.err.contains(value), "{args:?}: {}", ended.err);
        }
    }
    let ended = Launcher::with(&["-n", "4096", "--nnodes", "65536", "--master-addr", "::1"], &["true"], |_| {}).end();
    assert_eq!(ended.code(), 2, "{}", ended.err);
}

#[test]
fn help_tells_of_the_secret() {
    for command in ["run", "store"] {
        let help = Command::new(env!("CARGO_BIN_EXE_rustcomms")).args([command, "--help"]).output().unwrap();
        let help = String::from_utf8(help.stdout).unwrap();
        assert!(help.contains("RUSTCOMMS_SECRET") && help.contains("CommOptions::secret"), "{help}");
        assert!(command != "run" || help.contains("exit code is 141"), "{help}");
    }
}

#[test]
fn mistakes_are_explained() {
    let dir = tempfile::tempdir().unwrap();
    let plain = dir.path().join("plain");
    std::fs::write(&plain, "#!/bin/sh\n").unwrap();
    let no_interpreter = dir.path().join("script");
    std::fs::write(&no_interpreter, "#!/no/such/interpreter\n").unwrap();
    std::fs::set_permissions(&no_interpreter, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let (plain, script) = (plain.to_str().unwrap(), no_interpreter.to_str().unwrap());
    for (args, program, code, text) in [
        (&["-n", "2"][..], "no-such-program-here", 127, "no such program in PATH"),
        (&["-n", "2"], "./no-such-file", 127, "cannot start './no-such-file': there is no such file"),
        (&["-n", "2"], script, 127, "interpreter"),
        (&["-n", "2"], plain, 126, "not an executable file"),
        (&["-n", "0"], "true", 2, "-n 0 would start nothing"),
        (&["-n", "x"], "true", 2, "invalid value 'x'"),
        (&["-n", "1", "--nnodes", "0"], "true", 2, "--nnodes must be at least 1"),
        (
            &["-n", "1", "--node-rank", "1"],
            "true",
            2,
            "--node-rank 1 is out of range: with --nnodes 1 it must be 0 to 0",
        ),
        (&["-n", "1", "--nnodes", "2", "--node-rank", "2"], "true", 2, "it must be 0 to 1"),
        (&["-n", "1", "--nnodes", "2"], "true", 2, "--master-addr must name"),
        (&["-n", "1", "--grace", "-1"], "true", 2, "--grace"),
        (&["-n", "99999999999"], "true", 2, "more than this can start"),
    ] {
        let ended = Launcher::with(args, &[program], |_| {}).end();
        assert_eq!(ended.code(), code, "{args:?} {program}: {}", ended.err);
        assert!(ended.err.contains(text), "{args:?} {program}: {}", ended.err);
    }
}

/// What is wrong with the store's place is told by its kind.
#[test]
fn a_store_that_cannot_be_hosted_is_explained() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    // 192.0.2.0/24 is nobody's.
    for (option, value, text, wrong) in [
        ("--master-port", &*port, "another program, perhaps another run, has it", "address of this host"),
        ("--master-addr", "192.0.2.1", "--master-addr 192.0.2.1 is no address of this host", "another"),
        ("--master-addr", "no.such.host.invalid", "--master-addr", "another run"),
    ] {
        let ended = run(&["-n", "1", option, value], "echo started");
        assert_eq!((ended.code(), &ended.out[..]), (1, &b""[..]));
        assert!(ended.err.contains("cannot host the store") && ended.err.contains(value), "{}", ended.err);
        assert!(ended.err.contains(text) && !ended.err.contains(wrong), "{}", ended.err);
    }
}

#[test]
fn two_nodes() {
    let port = free_port();
    let script = "echo $RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE $GROUP_RANK/$GROUP_WORLD_SIZE $RUSTCOMMS_RUN_ID";
    // The second comes first and waits.
    let b = node("1", &port, &["--store-timeout", "50"], script);
    std::thread::sleep(Duration::from_millis(300));
    let a = node("0", &port, &["--run-id", "R"], script);
    assert_eq!(a.end().fine().lines(), lines(&["[0] 0/4 0/2 0/2 R", "[1] 1/4 1/2 0/2 R"]));
    assert_eq!(b.end().fine().lines(), lines(&["[2] 2/4 0/2 1/2 R", "[3] 3/4 1/2 1/2 R"]));
}

#[test]
fn node_0_keeps_the_store_for_the_others() {
    let port = free_port();
    let dir = tempfile::tempdir().unwrap();
    let go = dir.path().join("go");
    let a = node("0", &port, &["--linger", "50"], "true");
    let b = node("1", &port, &[], &format!("echo up; while [ ! -e {} ]; do sleep 0.02; done", go.display()));
    eventually("node 1 is up", || contents(&b.out).len() == 2 * "[2] up\n".len());
    std::thread::sleep(Duration::from_millis(300));
    std::net::TcpStream::connect(format!("127.0.0.1:{port}")).unwrap();
    std::fs::write(go, "").unwrap();
    b.end().fine();
    a.end().fine();
    // But not for ever.
    let port = free_port();
    let a = node("0", &port, &["--linger", "0.3"], "true").end();
    assert_eq!(a.code(), 0);
    assert!(a.err.contains("these nodes are not done: 1"), "{}", a.err);
}

#[test]
fn a_failure_on_one_node_ends_the_others() {
    for failing in ["0", "1"] {
        let port = free_port();
        let dir = tempfile::tempdir().unwrap();
        let go = dir.path().join("go");
        let stays = stay(dir.path(), "trap '' TERM");
        let fails = format!(
            "[ $LOCAL_RANK = 1 ] && while :; do [ -e {} ] && exit 9; sleep 0.02; done; sleep 1000",
            go.display()
        );
        let script = |i: &str| if i == failing { fails.clone() } else { stays.clone() };
        // Where it fails, the grace is short; elsewhere a long one must not count.
        let grace = |i: &str| if i == failing { "0.1" } else { "50" };
        let a = node("0", &port, &["--grace", grace("0")], &script("0"));
        let b = node("1", &port, &["--grace", grace("1")], &script("1"));
        let first = if failing == "0" { 2 } else { 0 };
        let names: Vec<_> = (first..first + 2).map(|i| dir.path().join(format!("r{i}"))).collect();
        eventually("the other node is up", || names.iter().all(|n| n.exists()));
        let pids: Vec<String> = names.iter().map(|n| std::fs::read_to_string(n).unwrap()).collect();
        std::fs::write(go, "").unwrap();
        let (here, there) = if failing == "0" { (a, b) } else { (b, a) };
        let ended = there.end();
        assert_eq!(ended.code(), 9, "{}", ended.err);
        let text = format!("node {failing}: rank {} (pid ", if failing == "0" { 1 } else { 3 });
        assert!(ended.err.contains(&text) && ended.err.contains("exited with code 9"), "{}", ended.err);
        assert!(ended.took < Duration::from_secs(40), "the long grace counted");
        assert!(pids.iter().all(|p| !runs(p.trim())));
        let ended = here.end();
        assert_eq!(ended.code(), 9, "{}", ended.err);
        assert!(!ended.err.contains("node"), "{}", ended.err);
    }
}

#[test]
fn an_interrupt_or_the_loss_of_node_0_ends_all_nodes() {
    for (signal, code, text) in
        [(Signal::INT, 130, "node 0: interrupted by signal 2"), (Signal::KILL, 1, "store at 127.0.0.1:")]
    {
        let port = free_port();
        let dir = tempfile::tempdir().unwrap();
        let script = stay(dir.path(), "");
        let a = node("0", &port, &["--grace", "0.1"], &script);
        let b = node("1", &port, &["--grace", "50"], &script);
        let pids = pids(dir.path(), 4);
        a.signal(signal);
        let ended = b.end();
        assert_eq!(ended.code(), code, "{}", ended.err);
        assert!(ended.err.contains(text), "{}", ended.err);
        a.end();
        eventually("all ranks are gone", || pids.iter().all(|p| !runs(p)));
    }
}

#[test]
fn an_interrupt_ends_the_waiting_for_node_0() {
    let waits = node("1", &free_port(), &["--store-timeout", "1000"], "true");
    // There is no sign of it waiting; before it handles signals, one ends it, too, with no code.
    std::thread::sleep(Duration::from_millis(500));
    waits.signal(Signal::INT);
    let ended = waits.end();
    assert_eq!(ended.code(), 130);
    assert!(ended.err.contains("before any rank started"), "{}", ended.err);
}
