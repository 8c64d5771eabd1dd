//! Launchers of several nodes that do not fit together, or of which one is gone.

mod common;

use std::time::Duration;

use common::{Launcher, contents, eventually, free_port, node, pids, run, runs, stay};
use rustix::process::Signal;

#[test]
fn node_0_that_is_not_there() {
    let port = free_port();
    let ended = node("1", &port, &["--store-timeout", "0.4"], "true").end();
    assert_eq!(ended.code(), 1);
    for part in [&*format!("127.0.0.1:{port}"), "did not appear within", "--node-rank 0", "firewall"] {
        assert!(ended.err.contains(part), "{part} in {}", ended.err);
    }
    // A store, but not a launcher's.
    let server = comm_store::TcpStoreServer::bind("127.0.0.1:0").unwrap();
    let other = server.local_addr().port().to_string();
    let ended = node("1", &other, &["--store-timeout", "0.4"], "true").end();
    assert_eq!(ended.code(), 1);
    assert!(ended.err.contains("is the port another program's?"), "{}", ended.err);
}

/// A store that answers says itself what is wrong; no firewall is.
#[test]
fn another_secret_is_named_first() {
    let secret = |i: &str, port: &str, secret: Option<&str>| {
        let args = ["-n", "1", "--nnodes", "2", "--node-rank", i, "--master-addr", "127.0.0.1", "--master-port", port];
        let args = [&args[..], &["--linger", "0.1", "--store-timeout", "50"]].concat();
        Launcher::with(&args, &["/bin/sh", "-c", "echo up; sleep 1000"], |c| {
            c.env_remove("RUSTCOMMS_SECRET");
            if let Some(s) = secret {
                c.env("RUSTCOMMS_SECRET", s);
            }
        })
    };
    let right = "a secret that is long enough for all";
    for (theirs, ours) in
        [(Some(right), Some("another secret that is also long enough")), (Some(right), None), (None, Some(right))]
    {
        let port = free_port();
        let a = secret("0", &port, theirs);
        eventually("node 0 is up", || !contents(&a.out).is_empty());
        let ended = secret("1", &port, ours).end();
        assert_eq!(ended.code(), 1, "{}", ended.err);
        let first = format!("rustcomms run: the store at 127.0.0.1:{port} ");
        assert!(ended.err.starts_with(&first) && ended.err.contains("secret"), "{}", ended.err);
        assert!(!ended.err.contains("firewall") && !ended.err.contains("did not appear"), "{}", ended.err);
        a.signal(Signal::TERM);
        assert_eq!(a.end().code(), 143);
    }
}

/// While a run is not complete, a launcher whose options differ is one that it waits for.
#[test]
fn options_that_differ_end_a_run_that_is_not_complete() {
    for (mine, theirs) in [
        (["--nnodes", "3"], ["--nnodes", "2"]),
        (["-n", "3"], ["-n", "2"]),
        (["--max-restarts", "1"], ["--max-restarts", "0"]),
        (["--on-failure", "continue"], ["--on-failure", "stop"]),
    ] {
        // Node 0's ranks may be running, or have ended.
        for script in ["sleep 1000", "true"] {
            let port = free_port();
            let with = |i: &str, more: &[&str; 2]| {
                let mut args =
                    vec!["--node-rank", i, "--master-addr", "127.0.0.1", "--master-port", &port, "--linger", "1000"];
                for [option, value] in [["-n", "2"], ["--nnodes", "2"]].iter().filter(|o| o[0] != more[0]).chain([more])
                {
                    args.extend([option, value]);
                }
                Launcher::start(&args, &format!("echo started; {script}"))
            };
            let a = with("0", &theirs);
            eventually("node 0 is up", || contents(&a.out).len() == 2 * "[0] started\n".len());
            let b = with("1", &mine).end();
            assert_eq!((b.code(), &b.out[..]), (2, &b""[..]), "{}", b.err);
            let text = format!("node 1 has {} but node 0 has {}; they must be equal", mine.join(" "), theirs.join(" "));
            assert!(b.err.contains(&text), "{}", b.err);
            let a = a.end();
            assert_eq!(a.code(), 2, "{}", a.err);
            assert!(a.err.contains(&text), "{}", a.err);
        }
    }
}

/// Another run's launcher, a second one of the same node, and one that comes to a run that has all its nodes, are told
/// to go. The run goes on, and node 0 says who was there.
#[test]
fn strangers_do_not_end_a_run() {
    let port = free_port();
    let a = node("0", &port, &["--linger", "50", "--run-id", "R"], "sleep 1000");
    let more = ["--run-id", "other", "--max-restarts", "3"];
    let ended = node("1", &port, &more, "echo started").end();
    assert_eq!((ended.code(), &ended.out[..]), (2, &b""[..]), "{}", ended.err);
    let text = "belongs to run 'R', not to 'other'; use another port";
    assert!(ended.err.contains(text), "{}", ended.err);
    eventually("node 0 says it", || a.stderr().contains("node 1 was not let in: ") && a.stderr().contains(text));
    let b = node("1", &port, &[], "echo up; sleep 1000");
    eventually("node 1 is up", || !contents(&b.out).is_empty());
    for (more, text) in [
        (&[][..], "there is a node 1 in this run already"),
        (&["--max-restarts", "1"], "node 1 has --max-restarts 1 but node 0 has --max-restarts 0"),
    ] {
        let ended = node("1", &port, more, "echo started").end();
        assert_eq!((ended.code(), &ended.out[..]), (2, &b""[..]), "{}", ended.err);
        assert!(ended.err.contains(text), "{}", ended.err);
        eventually("node 0 says it", || a.stderr().contains(text));
    }
    b.signal(Signal::TERM);
    assert_eq!(b.end().code(), 143);
    assert_eq!(a.end().code(), 143);
}

/// A launcher that is killed cannot say so.
#[test]
fn node_0_notices_that_a_launcher_is_gone() {
    let text = "node 1: the launcher has not been heard of for 10s; it or its host is gone";
    // With restarts to spare: there is none without it.
    for more in
        [&["--grace", "0.1", "--linger", "1000"][..], &["--grace", "0.1", "--max-restarts", "3", "--linger", "1000"]]
    {
        let (port, dir) = (free_port(), tempfile::tempdir().unwrap());
        let script = stay(dir.path(), "");
        let nodes = ["0", "1"].map(|i| node(i, &port, more, &script));
        let pids = pids(dir.path(), 4);
        nodes[1].signal(Signal::KILL);
        let [a, _] = nodes.map(Launcher::end);
        assert_eq!(a.code(), 1, "{}", a.err);
        assert!(a.err.contains(text) && !a.err.contains("restart "), "{}", a.err);
        eventually("all ranks are gone", || pids.iter().all(|p| !runs(p)));
    }
}

/// Nor while node 0 only keeps the store for it.
#[test]
fn node_0_does_not_wait_for_a_launcher_that_is_gone() {
    let port = free_port();
    let a = node("0", &port, &["--linger", "1000"], "true");
    let b = node("1", &port, &[], "echo up; sleep 1000");
    eventually("node 1 is up", || !contents(&b.out).is_empty());
    b.signal(Signal::KILL);
    let a = a.end();
    assert_eq!(a.code(), 1, "{}", a.err);
    assert!(a.err.contains("node 1: the launcher has not been heard of for 10s"), "{}", a.err);
}

/// No launcher is gone that comes late, is stopped for a while, or is done long before the others.
#[test]
fn launchers_that_are_late_slow_or_done_are_not_gone() {
    let port = free_port();
    let late = std::thread::spawn({
        let port = port.clone();
        move || {
            let a = node("0", &port, &["--linger", "50"], "sleep 24");
            std::thread::sleep(Duration::from_secs(12));
            let b = node("1", &port, &[], "true");
            (a.end().fine(), b.end().fine())
        }
    });
    let port = free_port();
    let args = |i| ["-n", "1", "--nnodes", "2", "--node-rank", i, "--master-addr", "127.0.0.1", "--master-port", &port];
    let [a, b] = ["0", "1"].map(|i| Launcher::start(&args(i), "echo up; sleep 16"));
    eventually("both are up", || [&a, &b].iter().all(|l| !contents(&l.out).is_empty()));
    for slow in [&b, &a] {
        slow.signal(Signal::STOP);
        std::thread::sleep(Duration::from_secs(5));
        slow.signal(Signal::CONT);
    }
    a.end().fine();
    b.end().fine();
    late.join().unwrap();
}

/// As two nodes that were given the same options.
#[test]
fn a_second_node_0_is_told() {
    let port = free_port();
    let a = node("0", &port, &["--linger", "0.1"], "echo up; sleep 1000");
    eventually("node 0 is up", || !contents(&a.out).is_empty());
    let args = ["-n", "2", "--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", &port];
    let ended = run(&args, "echo started");
    assert_eq!(ended.code(), 1, "{}", ended.err);
    assert!(ended.err.contains(&format!("cannot host the store on port {port}")), "{}", ended.err);
}
