//! `rustcomms run --on-failure` as real processes, on one node and on two.

mod common;

use std::path::Path;
use std::time::Duration;

use common::{Ended, Launcher, contents, eventually, free_port, lines, node, pids, run, runs, stay};
use rustix::process::Signal;

const GO_ON: [&str; 2] = ["--on-failure", "continue"];

/// The lines of our own, without process ids.
fn said(ended: &Ended) -> Vec<String> {
    let ours = ended.err.lines().filter_map(|l| l.strip_prefix("rustcomms run: "));
    let no_pid = |l: &str| match (l.find(" (pid "), l.find(") ")) {
        (Some(a), Some(b)) if a < b => format!("{}{}", &l[..a], &l[b + 1..]),
        _ => l.to_owned(),
    };
    ours.map(no_pid).collect()
}

/// A script that waits for the file `go`.
fn until(go: &Path) -> String {
    format!("while [ ! -e {} ]; do sleep 0.02; done", go.display())
}

/// They hear of it at once, and outlive the grace.
#[test]
fn the_others_go_on() {
    let dir = tempfile::tempdir().unwrap();
    let go = dir.path().join("go");
    let script = format!(
        "[ $RANK = 1 ] && {{ echo last words; kill -9 $$; }}; [ $RANK = 3 ] && exit 4; {}; echo end",
        until(&go)
    );
    let launcher = Launcher::start(&["-n", "5", "--on-failure", "continue", "--grace", "0.1"], &script);
    eventually("failures are told", || launcher.stderr().matches("; the others go on").count() == 2);
    std::thread::sleep(Duration::from_millis(1500));
    std::fs::write(&go, "").unwrap();
    let ended = launcher.end();
    assert_eq!(ended.code(), 0, "{}", ended.err);
    assert_eq!(ended.lines(), lines(&["[1] last words", "[0] end", "[2] end", "[4] end"]));
    let said = said(&ended);
    assert!(said.contains(&"rank 1 was killed by signal 9 (SIGKILL); the others go on".into()), "{said:?}");
    assert!(said.contains(&"rank 3 exited with code 4; the others go on".into()), "{said:?}");
    let last = "summary: ranks 0,2,4 ended well; rank 1 was killed by signal 9 (SIGKILL); rank 3 exited with code 4";
    assert_eq!((said.len(), &*said[2]), (3, last), "{said:?}");
}

/// Who dies in the middle of a line, long before the others end.
#[test]
fn last_words_without_an_end_do_not_wait() {
    for (more, want) in [(&[][..], "[0] half\n[1] all\n"), (&["--no-prefix"], "half\nall")] {
        let dir = tempfile::tempdir().unwrap();
        let go = dir.path().join("go");
        let script = format!("[ $RANK = 0 ] && printf half && kill -9 $$; {}; printf all", until(&go));
        let launcher = Launcher::start(&[&["-n", "2"], &GO_ON[..], more].concat(), &script);
        eventually("it is written", || String::from_utf8(contents(&launcher.out)).unwrap().contains("half\n"));
        std::fs::write(&go, "").unwrap();
        assert_eq!(String::from_utf8(launcher.end().out).unwrap(), want);
    }
}

#[test]
fn stop_is_the_default() {
    for more in [&[][..], &["--on-failure", "stop"], &["--on-failure=stop"]] {
        let args = [&["-n", "3", "--grace", "0.1"], more].concat();
        let ended = run(&args, "[ $RANK = 1 ] && kill -9 $$; exec sleep 1000");
        assert_eq!(ended.code(), 128 + 9, "{}", ended.err);
        assert_eq!(said(&ended)[0], "rank 1 was killed by signal 9 (SIGKILL)");
        assert!(ended.err.contains("SIGTERM: rank 0, 2") && !ended.err.contains("summary"), "{}", ended.err);
    }
}

#[test]
fn if_none_ends_well_the_first_failure_is_the_code() {
    let args = ["-n", "3", "--on-failure", "continue"];
    let ended = run(&args, "[ $RANK = 1 ] && exit 7; sleep 0.7; kill -15 $$");
    assert_eq!(ended.code(), 7, "{}", ended.err);
    let said = said(&ended);
    let last = "summary: no rank ended well; ranks 0,2 were killed by signal 15 (SIGTERM); rank 1 exited with code 7";
    assert_eq!((&*said[0], &**said.last().unwrap()), ("rank 1 exited with code 7; the others go on", last));
    // Who fails last leaves nobody who could go on.
    assert_eq!(said.iter().filter(|l| l.ends_with("go on")).count(), 2, "{said:?}");
    assert_eq!(run(&["-n", "1", "--on-failure", "continue"], "kill -SEGV $$").code(), 128 + 11);
    run(&args, "true").fine();
}

/// A script is killed, but not the program that it has started: to its peers, the rank would live on.
#[test]
fn what_a_failed_rank_leaves_is_ended_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let launcher = Launcher::start(&["-n", "2", "--on-failure", "continue"], &stay(dir.path(), "trap '' TERM"));
    // Child and rank, of each.
    let pids = pids(dir.path(), 2);
    let killed = std::process::Command::new("kill").args(["-9", &pids[3]]).status().unwrap();
    assert!(killed.success());
    eventually("its child is gone", || !runs(&pids[2]));
    // Nor is a zombie left of it.
    eventually("its number is free", || !Path::new(&format!("/proc/{}", pids[3])).exists());
    assert!(runs(&pids[0]) && runs(&pids[1]));
    launcher.signal(Signal::INT);
    launcher.signal(Signal::TERM);
    let ended = launcher.end();
    assert!([130, 143].contains(&ended.code()), "{}", ended.err);
    assert!(pids.iter().all(|p| !runs(p)));
}

#[test]
fn an_interrupt_ends_those_who_went_on() {
    for (signal, code) in [(Signal::INT, 130), (Signal::TERM, 143)] {
        let dir = tempfile::tempdir().unwrap();
        let before = "[ $RANK = 2 ] && exit 3; [ $RANK = 3 ] && exit 0";
        let args = ["-n", "4", "--on-failure", "continue", "--grace", "0.1"];
        let launcher = Launcher::start(&args, &stay(dir.path(), before));
        let pids = pids(dir.path(), 2);
        eventually("the failure is told", || launcher.stderr().contains("go on"));
        launcher.signal(signal);
        let ended = launcher.end();
        assert_eq!(ended.code(), code, "{}", ended.err);
        assert!(ended.err.contains("summary: rank 3 ended well; "), "{}", ended.err);
        assert!(pids.iter().all(|p| !runs(p)), "{pids:?}");
    }
}

#[test]
fn mistakes_are_explained() {
    for (args, text) in [
        (&["--on-failure", "go"][..], "invalid value 'go' for '--on-failure"),
        (&["--on-failure", ""], "--on-failure"),
        (&["--on-failure", "continue", "--max-restarts", "2"], "--max-restarts 2 starts all ranks anew"),
    ] {
        let ended = run(&[&["-n", "1"], args].concat(), "echo started");
        assert_eq!((ended.code(), &ended.out[..]), (2, &b""[..]), "{}", ended.err);
        assert!(ended.err.contains(text), "{args:?}: {}", ended.err);
        assert!(ended.err.contains("stop") || ended.err.contains("choose one"), "what can be said: {}", ended.err);
    }
    run(&["-n", "1", "--on-failure", "continue", "--max-restarts", "0"], "true").fine();
    // What cannot be started ends the run all the same.
    let ended = Launcher::with(&["-n", "2", "--on-failure", "continue"], &["./no-such-file"], |_| {}).end();
    assert_eq!(ended.code(), 127, "{}", ended.err);
}

const RANK_OF_TEST: &str = "RUSTCOMMS_CLI_TEST_SURVIVE";

/// The store is the launcher's, so the end of rank 0 does not take it away; the others miss rank 0 until their time is over.
#[test]
fn a_world_that_does_not_form_ends() {
    if std::env::var_os(RANK_OF_TEST).is_some() {
        if std::env::var("RANK").unwrap() == "0" {
            std::process::exit(5);
        }
        let options = rustcomms::CommOptions::new().bootstrap_timeout(Duration::from_secs(1));
        eprintln!("connect: {}", rustcomms::connect(options).unwrap_err());
        std::process::exit(6);
    }
    let me = std::env::current_exe().unwrap();
    let program = [me.to_str().unwrap(), "--exact", "a_world_that_does_not_form_ends", "--nocapture"];
    let ended = Launcher::with(&["-n", "3", "--on-failure", "continue"], &program, |c| {
        c.env(RANK_OF_TEST, "1");
    })
    .end();
    assert_eq!((ended.code(), ended.err.matches("] connect: ").count()), (5, 2), "{}", ended.err);
    let last = "summary: no rank ended well; rank 0 exited with code 5; ranks 1-2 exited with code 6";
    assert_eq!(said(&ended).last().unwrap(), last, "{}", ended.err);
}

/// Some services start programs so; the kernel then forgets how children end.
#[test]
fn ends_are_known_where_sigchld_was_ignored() {
    for (script, code) in [("exit 0", 0), ("[ $RANK = 1 ] && exit 3; exit 0", 3), ("kill -9 $$", 128 + 9)] {
        let launcher = env!("CARGO_BIN_EXE_rustcomms");
        // The outer one runs only this.
        let inner = ["env", "--ignore-signal=CHLD", launcher, "run", "-n", "2", "--", "/bin/sh", "-c", script];
        let ended = Launcher::with(&["-n", "1"], &inner, |_| {}).end();
        assert_eq!(ended.code(), code, "{}", ended.err);
    }
    // No shell: those set it anew.
    let ignored = ["env", "--ignore-signal=CHLD", "grep", "SigIgn", "/proc/self/status"];
    let mask = Launcher::with(&["-n", "1", "--no-prefix"], &ignored, |_| {}).end().fine().out;
    let mask = String::from_utf8(mask).unwrap();
    let mask = u64::from_str_radix(mask.trim().strip_prefix("SigIgn:\t").unwrap(), 16).unwrap();
    assert_eq!(mask >> 16 & 1, 1, "it was not ignored, so this tests nothing");
}

/// One rank of the run that ended well is enough for all nodes; they wait for it, whatever --linger says.
#[test]
fn a_node_without_survivors_waits_for_the_others() {
    for failing in ["0", "1"] {
        let (port, dir) = (free_port(), tempfile::tempdir().unwrap());
        let go = dir.path().join("go");
        let more = [&GO_ON[..], &["--linger", "0.5"]].concat();
        let nodes = ["0", "1"].map(|i| {
            // Node 0 waits for those who have come only.
            let came = dir.path().join("came");
            let script = if i == failing {
                format!("{}; kill -9 $$", until(&came))
            } else {
                format!("touch {}; {}", came.display(), until(&go))
            };
            node(i, &port, &more, &script)
        });
        let fails = usize::from(failing == "1");
        let summary = "summary of this node: no rank ended well; ranks ";
        eventually("all of a node have failed", || nodes[fails].stderr().contains(summary));
        std::thread::sleep(Duration::from_millis(1500));
        std::fs::write(&go, "").unwrap();
        for (i, ended) in nodes.map(Launcher::end).into_iter().enumerate() {
            assert_eq!(ended.code(), 0, "node {i} where {failing} fails: {}", ended.err);
            assert_eq!(ended.err.contains("summary"), i == fails, "{}", ended.err);
        }
    }
}

#[test]
fn nodes_that_have_all_failed_have_each_its_code() {
    let (port, dir) = (free_port(), tempfile::tempdir().unwrap());
    let all = format!("touch {0}/$RANK; while [ $(ls {0} | wc -l) -lt 4 ]; do sleep 0.02; done", dir.path().display());
    let nodes = ["0", "1"].map(|i| node(i, &port, &GO_ON, &format!("{all}; exit 3{i}")));
    let codes = nodes.map(|n| n.end().code());
    assert_eq!(codes, [30, 31]);
    // Node 0 does not wait long for nodes that never come.
    let ended = node("0", &free_port(), &[&GO_ON[..], &["--linger", "0.3"]].concat(), "true").end();
    assert_eq!(ended.code(), 0, "{}", ended.err);
    assert!(ended.err.contains("these nodes have not come: 1"), "{}", ended.err);
}

/// Neither the loss of node 0 with its store nor that of another launcher ends the others' ranks.
#[test]
fn the_loss_of_a_launcher_ends_no_other_node() {
    std::thread::scope(|s| {
        for (lost, text) in [(0, "is gone: "), (1, "node 1: the launcher has not been heard of for 10s")] {
            s.spawn(move || {
                let (port, dir) = (free_port(), tempfile::tempdir().unwrap());
                let go = dir.path().join("go");
                let script = format!("echo up; {}; echo end", until(&go));
                let mut nodes =
                    ["0", "1"].map(|i| Some(node(i, &port, &[&GO_ON[..], &["--grace", "0.1"]].concat(), &script)));
                for n in nodes.iter().flatten() {
                    eventually("it is up", || String::from_utf8(contents(&n.out)).unwrap().matches("up").count() == 2);
                }
                let gone = nodes[lost].take().unwrap();
                gone.signal(Signal::KILL);
                gone.end();
                let rest = nodes[1 - lost].take().unwrap();
                eventually("it is told", || rest.stderr().contains(text));
                std::thread::sleep(Duration::from_millis(1500));
                std::fs::write(&go, "").unwrap();
                let ended = rest.end();
                assert_eq!(ended.code(), 0, "{}", ended.err);
                assert_eq!(String::from_utf8(ended.out).unwrap().matches("end").count(), 2);
            });
        }
    });
}

/// Also one that comes when a node's own ranks have ended, well or not.
#[test]
fn an_interrupt_ends_all_nodes() {
    for (interrupted, there) in [(0, "sleep 1000"), (1, "sleep 1000"), (0, "exit 0"), (0, "exit 3"), (1, "exit 3")] {
        let (port, dir) = (free_port(), tempfile::tempdir().unwrap());
        let up = dir.path().join("up");
        let nodes = [0, 1].map(|i| {
            let script = if i == interrupted {
                format!("{}; echo up; {there}", until(&up))
            } else {
                format!("echo up; touch {}; sleep 1000", up.display())
            };
            node(&i.to_string(), &port, &[&GO_ON[..], &["--grace", "0.1"]].concat(), &script)
        });
        for n in &nodes {
            eventually("it is up", || String::from_utf8(contents(&n.out)).unwrap().matches("up").count() == 2);
        }
        std::thread::sleep(Duration::from_millis(700));
        nodes[interrupted].signal(Signal::INT);
        for (i, ended) in nodes.map(Launcher::end).into_iter().enumerate() {
            assert_eq!(ended.code(), 130, "node {i} of {interrupted} {there}: {}", ended.err);
            assert!(ended.err.contains("interrupted by signal 2 (SIGINT)"), "{}", ended.err);
        }
    }
}
