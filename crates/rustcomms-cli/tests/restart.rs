//! `rustcomms run --max-restarts` as real processes, on one node and on two.

mod common;

use std::path::Path;
use std::time::Duration;

use comm_core::Store;
use common::{Ended, LONG, Launcher, contents, eventually, free_port, lines, node, pids, run, runs};
use rustix::process::Signal;

/// The lines of our own that begin with `text`.
fn said<'a>(ended: &'a Ended, text: &str) -> Vec<&'a str> {
    let ours = ended.err.lines().filter_map(|l| l.strip_prefix("rustcomms run: "));
    ours.filter(|l| l.starts_with(text)).collect()
}

#[test]
fn all_ranks_are_started_anew_under_another_name() {
    // Rank 1 fails twice. Rank 0 ends well long before, and has to come again; rank 2 is ended.
    let dir = tempfile::tempdir().unwrap();
    let body = "echo $RUSTCOMMS_RUN_ID $TORCHELASTIC_RUN_ID $N $TORCHELASTIC_RESTART_COUNT $TORCHELASTIC_MAX_RESTARTS $RUSTCOMMS_STORE; \
        touch $D/$N.$RANK; [ $N = 2 ] && exit 0; [ $RANK = 2 ] && sleep 1000; [ $RANK = 0 ] && exit 0; \
        while [ $(ls $D/$N.* | wc -l) -lt 3 ]; do sleep 0.02; done; exit 3";
    let args = ["-n", "3", "--max-restarts", "5", "--run-id", "R", "--grace", "0.1"];
    let ended = run(&args, &format!("N=$RUSTCOMMS_RESTART_COUNT; D={}; {body}", dir.path().display()));
    assert_eq!(ended.code(), 0, "{}", ended.err);
    let store = String::from_utf8(ended.out.clone()).unwrap();
    let store = store.lines().next().unwrap().rsplit(' ').next().unwrap();
    let mut want = Vec::new();
    for (run, n) in [("R", 0), ("R.1", 1), ("R.2", 2)] {
        // The store is the same one throughout.
        want.extend((0..3).map(|rank| format!("[{rank}] {run} R {n} {n} 5 {store}")));
    }
    assert_eq!(ended.lines(), lines(&want.iter().map(String::as_str).collect::<Vec<_>>()));
    assert_eq!(ended.out.iter().filter(|b| **b == b'\n').count(), 9, "each rank three times");
    assert_eq!(said(&ended, "rank 1 (pid ").len(), 2, "{}", ended.err);
    let restarts = ["restart 1 of 5: starting all ranks anew", "restart 2 of 5: starting all ranks anew"];
    assert_eq!(said(&ended, "restart "), restarts);
}

#[test]
fn the_budget_ends() {
    for (max, text) in
        [("2", "all 2 restarts are used up; not restarting"), ("1", "the 1 restart is used up; not restarting")]
    {
        let ended =
            run(&["-n", "2", "--max-restarts", max], "[ $RANK = 1 ] && exit $((10 + RUSTCOMMS_RESTART_COUNT)); exit 0");
        assert_eq!(ended.code(), 10 + max.parse::<i32>().unwrap(), "the code of the last failure: {}", ended.err);
        assert!(ended.err.contains(text), "{}", ended.err);
        assert_eq!(said(&ended, "restart ").len().to_string(), max, "{}", ended.err);
    }
    // Without restarts, nobody speaks of them.
    let ended = run(&["-n", "1"], "exit 3");
    assert!(ended.code() == 3 && !ended.err.contains("restart"), "{}", ended.err);
}

#[test]
fn what_cannot_start_is_not_tried_again() {
    let ended = Launcher::with(&["-n", "2", "--max-restarts", "5"], &["./no-such-file"], |_| {}).end();
    assert_eq!(ended.code(), 127, "{}", ended.err);
    assert!(!ended.err.contains("restart"), "{}", ended.err);
}

#[test]
fn interrupts_never_restart() {
    for (signal, number) in [(Signal::INT, 2), (Signal::TERM, 15)] {
        let dir = tempfile::tempdir().unwrap();
        let launcher =
            Launcher::start(&["-n", "2", "--max-restarts", "5", "--grace", "0.2"], &common::stay(dir.path(), ""));
        let pids = pids(dir.path(), 2);
        launcher.signal(signal);
        let ended = launcher.end();
        assert_eq!(ended.code(), 128 + number, "{}", ended.err);
        assert!(!ended.err.contains("restart "), "{}", ended.err);
        assert!(pids.iter().all(|p| !runs(p)), "{pids:?}");
    }
    // Nor when it comes while a failure is being handled.
    let launcher = Launcher::start(
        &["-n", "2", "--max-restarts", "5", "--grace", "1000"],
        "[ $RANK = 1 ] && exit 3; trap '' TERM; while :; do sleep 0.1; done",
    );
    eventually("the failure is told", || launcher.stderr().contains("exited with code 3"));
    launcher.signal(Signal::INT);
    let ended = launcher.end();
    // It is what ended the run: there would have been a restart.
    assert_eq!(ended.code(), 130, "{}", ended.err);
    assert!(!ended.err.contains("restart "), "{}", ended.err);
    // Where the failure had ended it, the code is the failure's.
    let launcher = Launcher::start(
        &["-n", "2", "--grace", "1000"],
        "[ $RANK = 1 ] && exit 3; trap '' TERM; while :; do sleep 0.1; done",
    );
    eventually("the failure is told", || launcher.stderr().contains("exited with code 3"));
    launcher.signal(Signal::INT);
    assert_eq!(launcher.end().code(), 3);
}

/// Whenever it comes: while ranks start, run, fail, are ended, or their last output is copied.
#[test]
fn an_interrupt_of_a_restart_storm_gives_its_code() {
    for i in 0..40 {
        let args = ["-n", "2", "--max-restarts", "1000000", "--grace", "0.01"];
        let launcher = Launcher::start(&args, "echo $RANK; exit 5");
        eventually("it storms", || launcher.stderr().contains("restart 2 of"));
        std::thread::sleep(Duration::from_micros(i * 700));
        launcher.signal(Signal::INT);
        let ended = launcher.end();
        assert_eq!(ended.code(), 130, "{i}: {}", ended.err);
    }
}

const RANK_OF_TEST: &str = "RUSTCOMMS_CLI_TEST_RANK";

/// Ranks that use the library meet again, although the store still has what they left there when one of them died.
#[test]
fn communicators_come_up_again() {
    if std::env::var_os(RANK_OF_TEST).is_some() {
        let comm = rustcomms::connect(rustcomms::CommOptions::new()).unwrap();
        let mut x = [comm.rank() as i64 + 1];
        comm.all_reduce(&mut x, rustcomms::op::Sum).unwrap();
        let restarts = std::env::var(comm_store::env::RESTART_COUNT).unwrap();
        if restarts != "2" {
            if comm.rank() == 1 {
                // In the middle of everything.
                std::process::abort();
            }
            let e = comm.all_reduce(&mut x, rustcomms::op::Sum).unwrap_err();
            panic!("as it must be: {e}");
        }
        let place = comm_store::discover().unwrap();
        assert_eq!(place.run, "again.2");
        let store = comm_store::TcpStore::connect(place.require_store().unwrap(), LONG).unwrap();
        eprintln!("sum {} of {}, keys of before: {}", x[0], comm.size(), store.num_keys().unwrap() > 0);
        comm.finalize(LONG).unwrap();
        return;
    }
    let me = std::env::current_exe().unwrap();
    let program = [me.to_str().unwrap(), "--exact", "communicators_come_up_again", "--nocapture"];
    let args = ["-n", "3", "--max-restarts", "2", "--run-id", "again"];
    let ended = Launcher::with(&args, &program, |c| {
        c.env(RANK_OF_TEST, "1").env("RUST_BACKTRACE", "0");
    })
    .end();
    assert_eq!(ended.code(), 0, "{}", ended.err);
    for rank in 0..3 {
        assert!(ended.err.contains(&format!("[{rank}] sum 6 of 3, keys of before: true\n")), "{}", ended.err);
    }
}

/// A script for two nodes of two ranks: `$N` restarts so far, `$RANK` and what `body` does.
fn script(dir: &Path, body: &str) -> String {
    format!("N=$RUSTCOMMS_RESTART_COUNT; D={}; echo $N $RUSTCOMMS_RUN_ID; {body}", dir.display())
}

#[test]
fn both_nodes_restart_together() {
    for failing in [1, 2] {
        let (port, dir) = (free_port(), tempfile::tempdir().unwrap());
        // The failing rank waits until the others of its generation are there.
        let body = format!(
            "touch $D/$N.$RANK; [ $N = 2 ] && exit 0; \
             if [ $RANK = {failing} ]; then while [ $(ls $D/$N.* | wc -l) -lt 4 ]; do sleep 0.02; done; exit 9; fi; sleep 1000"
        );
        let more = ["--max-restarts", "2", "--run-id", "R", "--grace", "0.1"];
        let nodes = ["0", "1"].map(|i| node(i, &port, &more, &script(dir.path(), &body)));
        let ended = nodes.map(Launcher::end);
        for (i, e) in ended.iter().enumerate() {
            assert_eq!(e.code(), 0, "{}", e.err);
            let mut want = Vec::new();
            for (n, run) in ["R", "R.1", "R.2"].iter().enumerate() {
                want.extend((0..2).map(|local| format!("[{}] {n} {run}", 2 * i + local)));
            }
            assert_eq!(e.lines(), lines(&want.iter().map(String::as_str).collect::<Vec<_>>()), "{}", e.err);
            assert_eq!(said(e, "restart ").len(), 2, "{}", e.err);
        }
        let (here, there) = if failing < 2 { (&ended[0], &ended[1]) } else { (&ended[1], &ended[0]) };
        assert_eq!(said(here, &format!("rank {failing} (pid ")).len(), 2, "{}", here.err);
        assert_eq!(said(there, &format!("node {}: rank {failing} (pid ", failing / 2)).len(), 2, "{}", there.err);
    }
}

/// Ranks of both nodes fail at once, again and again: together they have one budget, and one failure per generation counts.
#[test]
fn the_budget_is_the_runs() {
    let (port, dir) = (free_port(), tempfile::tempdir().unwrap());
    let body = "touch $D/$N.$RANK; while [ $(ls $D/$N.* | wc -l) -lt 4 ]; do sleep 0.02; done; exit $((20 + RANK))";
    let more = ["--max-restarts", "3", "--run-id", "R", "--grace", "0.1"];
    let nodes = ["0", "1"].map(|i| node(i, &port, &more, &script(dir.path(), body)));
    for e in nodes.map(Launcher::end) {
        assert!((20..24).contains(&e.code()), "{}: {}", e.code(), e.err);
        assert_eq!(said(&e, "restart ").len(), 3, "{}", e.err);
        assert!(e.err.contains("all 3 restarts are used up"), "{}", e.err);
    }
    let mut started: Vec<String> =
        std::fs::read_dir(dir.path()).unwrap().map(|f| f.unwrap().file_name().into_string().unwrap()).collect();
    started.sort();
    let want: Vec<String> = (0..4).flat_map(|n| (0..4).map(move |r| format!("{n}.{r}"))).collect();
    assert_eq!(started, want);
}

/// A node whose ranks have all ended well stays, and its ranks come again when one fails elsewhere.
#[test]
fn a_node_that_is_done_restarts_with_the_others() {
    for done in ["0", "1"] {
        let (port, dir) = (free_port(), tempfile::tempdir().unwrap());
        let body = format!(
            "[ $GROUP_RANK = {done} ] && exit 0; [ $N = 1 ] && exit 0; while [ ! -e $D/go ]; do sleep 0.02; done; exit 5"
        );
        let more = ["--max-restarts", "1", "--grace", "0.1", "--linger", "50"];
        let nodes = ["0", "1"].map(|i| node(i, &port, &more, &script(dir.path(), &body)));
        let idle = &nodes[usize::from(done == "1")];
        eventually("the ranks have ended", || contents(&idle.out).iter().filter(|b| **b == b'\n').count() == 2);
        std::thread::sleep(Duration::from_millis(300));
        std::fs::write(dir.path().join("go"), "").unwrap();
        for e in nodes.map(Launcher::end) {
            assert_eq!(e.code(), 0, "{}", e.err);
            assert_eq!(e.out.iter().filter(|b| **b == b'\n').count(), 4, "each rank twice: {}", e.err);
        }
    }
}

/// An interrupt of one launcher ends all nodes, whatever their ranks are doing: running, done, or failing at the same time.
#[test]
fn an_interrupt_ends_a_run_that_could_restart() {
    for interrupted in [0, 1] {
        for (body, name) in [
            ("touch $D/$RANK; sleep 1000", "running"),
            ("touch $D/$RANK; [ $GROUP_RANK = 0 ] && exit 0; sleep 1000", "node 0 is done"),
            ("touch $D/$RANK; [ $GROUP_RANK = 1 ] && exit 0; sleep 1000", "node 1 is done"),
        ] {
            let (port, dir) = (free_port(), tempfile::tempdir().unwrap());
            let more = ["--max-restarts", "9", "--grace", "0.1", "--linger", "50"];
            let nodes = ["0", "1"].map(|i| node(i, &port, &more, &script(dir.path(), body)));
            eventually("all are up", || (0..4).all(|r| dir.path().join(r.to_string()).exists()));
            std::thread::sleep(Duration::from_millis(300));
            nodes[interrupted].signal(Signal::INT);
            for e in nodes.map(Launcher::end) {
                assert_eq!(e.code(), 130, "{name}, {interrupted}: {}", e.err);
                assert_eq!(said(&e, "restart "), [""; 0], "{name}, {interrupted}: {}", e.err);
            }
        }
    }
}

/// Of two nodes that fail at once, one is interrupted right then: the other has begun to restart, and hears of it.
#[test]
fn an_interrupt_reaches_those_who_restart_already() {
    let (port, dir) = (free_port(), tempfile::tempdir().unwrap());
    // Node 1 takes long to end, so that node 0 waits for it.
    let body = "touch $D/$RANK; while [ ! -e $D/go ]; do sleep 0.02; done; [ $RANK = 0 ] && exit 7; \
        [ $RANK = 1 ] && exit 0; trap '' TERM; while :; do sleep 0.1; done";
    let more = ["--max-restarts", "9", "--grace", "1"];
    let nodes = ["0", "1"].map(|i| node(i, &port, &more, &script(dir.path(), body)));
    eventually("all are up", || (0..4).all(|r| dir.path().join(r.to_string()).exists()));
    std::fs::write(dir.path().join("go"), "").unwrap();
    eventually("node 0 restarts", || nodes[0].stderr().contains("restart 1 of 9"));
    nodes[1].signal(Signal::INT);
    let [a, b] = nodes.map(Launcher::end);
    // If it came late, node 1 was restarting, too, and is interrupted in that.
    assert!(a.err.contains("node 1: interrupted by signal 2"), "{}", a.err);
    assert!(a.code() == 130 && b.code() == 130, "{} {}: {} {}", a.code(), b.code(), a.err, b.err);
}

/// A launcher that was killed cannot come again. The others do not wait for ever.
#[test]
fn a_launcher_that_is_gone_is_named() {
    let (port, dir) = (free_port(), tempfile::tempdir().unwrap());
    let body = "touch $D/$RANK; while [ ! -e $D/go ]; do sleep 0.02; done; [ $RANK = 0 ] && exit 7; sleep 1000";
    let more = ["--max-restarts", "9", "--grace", "0.1", "--store-timeout", "50", "--linger", "0.3"];
    let a = node("0", &port, &more, &script(dir.path(), body));
    let b = node("1", &port, &["--max-restarts", "9", "--store-timeout", "50"], &script(dir.path(), body));
    eventually("all are up", || (0..4).all(|r| dir.path().join(r.to_string()).exists()));
    b.signal(Signal::KILL);
    b.end();
    std::fs::write(dir.path().join("go"), "").unwrap();
    let ended = a.end();
    assert_eq!(ended.code(), 1, "{}", ended.err);
    assert!(
        ended.err.contains("node 1: the launcher has not been heard of for 10s; it or its host is gone"),
        "{}",
        ended.err
    );
}

/// Node 0 dies while node 1's ranks are done and stand by, or are to be restarted.
#[test]
fn without_node_0_nobody_restarts() {
    for body in ["touch $D/$RANK; [ $GROUP_RANK = 1 ] && exit 0; sleep 1000", "touch $D/$RANK; sleep 1000"] {
        let (port, dir) = (free_port(), tempfile::tempdir().unwrap());
        let nodes = ["0", "1"].map(|i| node(i, &port, &["--max-restarts", "9"], &script(dir.path(), body)));
        eventually("all are up", || (0..4).all(|r| dir.path().join(r.to_string()).exists()));
        nodes[0].signal(Signal::KILL);
        let [_, b] = nodes.map(Launcher::end);
        assert_eq!(b.code(), 1, "{}", b.err);
        assert!(b.err.contains("is gone") && said(&b, "restart ").is_empty(), "{}", b.err);
    }
}
