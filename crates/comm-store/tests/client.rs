//! The client against servers that are late, gone, silent or wrong, and clients that die.

mod common;

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use comm_core::{ErrorKind, Store};
use comm_store::{TcpStore, TcpStoreServer};
use common::{LONG, eventually, still_serves};

/// A server that shakes hands and then does `f` with each connection.
fn fake(f: impl Fn(TcpStream) + Send + Sync + 'static) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let addr = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        for s in listener.incoming() {
            let mut s = s.unwrap();
            let mut hello = [0; 10];
            if s.read_exact(&mut hello).is_ok() {
                s.write_all(&hello[6..]).unwrap();
                f(s);
            }
        }
    });
    addr
}

#[test]
fn nobody_there() {
    // A port that was free a moment ago.
    let addr = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let start = Instant::now();
    let e = TcpStore::connect(addr, Duration::from_millis(300)).unwrap_err();
    assert!(start.elapsed() >= Duration::from_millis(100) && start.elapsed() < LONG);
    assert!(matches!(e.kind(), ErrorKind::Bootstrap { .. }), "{e}");
    for part in [&*addr.to_string(), "0.", "s:", "refused", "firewall"] {
        assert!(e.to_string().contains(part), "{part} in {e}");
    }
}

#[test]
fn addresses_that_are_none() {
    for addr in ["", "host", "host:", ":1", "host:port", "1.2.3.4:0", "1.2.3.4:70000"] {
        let e = TcpStore::connect(addr, LONG).unwrap_err();
        assert!(matches!(e.kind(), ErrorKind::InvalidArgument { .. }), "{addr}: {e}");
    }
    for addr in ["[fe80::1]:29500", "fe80::1:29500"] {
        let e = TcpStore::connect(addr, LONG).unwrap_err();
        assert!(matches!(e.kind(), ErrorKind::InvalidArgument { .. }), "{addr}: {e}");
        assert!(e.to_string().contains("[fe80::1%eth0]"), "{addr}: {e}");
    }
    let e = TcpStore::connect("no-such-host.invalid:1", Duration::from_millis(200)).unwrap_err();
    assert!(e.to_string().contains("no-such-host.invalid:1"), "{e}");
}

#[test]
fn addresses_in_all_forms() {
    let server = TcpStoreServer::bind("127.0.0.1:0").unwrap();
    let port = server.local_addr().port();
    // Where both families have the name, the store answers at one of the two addresses only.
    for host in ["127.0.0.1", "localhost", "::ffff:127.0.0.1", "[::ffff:127.0.0.1]"] {
        let store = TcpStore::connect(format!("{host}:{port}"), LONG).unwrap_or_else(|e| panic!("{host}: {e}"));
        assert_eq!(store.peer_addr().unwrap().ip().to_canonical(), server.local_addr().ip(), "{host}");
    }
    for (addr, want) in [
        ("[fe80::1%1]:5", "[fe80::1%1]:5"),
        ("fe80::1%1:5", "[fe80::1%1]:5"),
        ("[fd00::1]:5", "[fd00::1]:5"),
        ("fd00::1:5", "[fd00::1]:5"),
        ("10.0.0.1:5", "10.0.0.1:5"),
    ] {
        assert_eq!(comm_store::resolve(addr, LONG).unwrap(), [want.parse::<SocketAddr>().unwrap()], "{addr}");
    }
    // By name, which only the resolver knows. Its number is that of the first interface everywhere on Linux.
    if cfg!(target_os = "linux") {
        for addr in ["[fe80::1%lo]:5", "fe80::1%lo:5"] {
            let found = comm_store::resolve(addr, LONG).unwrap();
            assert_eq!(found, ["[fe80::1%1]:5".parse::<SocketAddr>().unwrap()], "{addr}");
        }
    }
    for addr in ["", "host", "[::1]", "no-such-host.invalid:1", "[fe80::1%no-such-interface]:5"] {
        let e = comm_store::resolve(addr, LONG).unwrap_err();
        assert!(matches!(e.kind(), ErrorKind::Bootstrap { .. }), "{addr}: {e}");
    }
}

#[test]
fn a_late_server_is_waited_for() {
    let addr = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let client = std::thread::spawn(move || TcpStore::connect(format!("localhost:{}", addr.port()), LONG));
    std::thread::sleep(Duration::from_millis(300));
    let server = TcpStoreServer::bind(addr).unwrap();
    client.join().unwrap().unwrap().set("k", b"v").unwrap();
    still_serves(&server);
}

#[test]
fn a_silent_server_times_out_every_call() {
    let addr = fake(std::mem::forget);
    let t = Duration::from_millis(100);
    let s = TcpStore::connect(addr, LONG).unwrap().with_timeout(t);
    let start = Instant::now();
    for e in [
        s.set("k", b"v").unwrap_err(),
        s.get("k", t).unwrap_err(),
        s.add("k", 1).unwrap_err(),
        s.num_keys().unwrap_err(),
        s.queue_pop("k", t).unwrap_err(),
    ] {
        assert!(matches!(e.kind(), ErrorKind::Timeout { .. }), "{e}");
    }
    assert!(start.elapsed() < LONG);
}

#[test]
fn one_that_accepts_and_never_answers() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let start = Instant::now();
    let e = TcpStore::connect(listener.local_addr().unwrap(), Duration::from_millis(300)).unwrap_err();
    assert!(matches!(e.kind(), ErrorKind::Bootstrap { .. }), "{e}");
    assert!(start.elapsed() < LONG);
}

#[test]
fn wrong_answers_are_errors_and_cost_no_memory() {
    // A value of 2^62 bytes; to a check, 9.
    let addr = fake(|mut s| {
        s.write_all(&[9]).unwrap();
        std::mem::forget(s);
    });
    let s = TcpStore::connect(addr, LONG).unwrap();
    let wrong =
        |e: comm_core::Error| assert!(matches!(e.kind(), ErrorKind::Corrupt { .. } | ErrorKind::Timeout { .. }), "{e}");
    wrong(s.check(&["k"]).unwrap_err());
    let addr = fake(|mut s| {
        let mut request = [0; 64];
        let _ = s.read(&mut request).unwrap();
        s.write_all(&[0, 0, 0, 0, 0, 0, 0, 0x40]).unwrap();
        std::mem::forget(s);
    });
    let s = TcpStore::connect(addr, LONG).unwrap();
    wrong(s.compare_set("k", b"", b"v").unwrap_err());
}

/// Every answer of every call: negative counts, absurd lengths, values no answer may have.
#[test]
fn garbage_for_every_call_is_corrupt() {
    type Call = fn(&TcpStore) -> comm_core::Result<()>;
    let calls: [Call; 12] = [
        |s| s.set("k", b"v"),
        |s| s.get("k", LONG).map(drop),
        |s| s.check(&["k"]).map(drop),
        |s| s.wait(&["k"], LONG),
        |s| s.compare_set("k", b"", b"v").map(drop),
        |s| s.delete_key("k").map(drop),
        |s| s.num_keys().map(drop),
        |s| s.append("k", b"v"),
        |s| s.multi_get(&["k"], LONG).map(drop),
        |s| s.queue_pop("k", LONG).map(drop),
        |s| s.queue_len("k").map(drop),
        |s| s.list_keys().map(drop),
    ];
    let addr = fake(|mut s| {
        let mut request = [0; 64];
        let _ = s.read(&mut request);
        let _ = s.write_all(&[0xf7; 64]);
        std::mem::forget(s);
    });
    for (i, call) in calls.iter().enumerate() {
        let store = TcpStore::connect(addr, LONG).unwrap();
        let e = call(&store).unwrap_err();
        assert!(matches!(e.kind(), ErrorKind::Corrupt { .. }), "{i}: {e}");
        assert!(e.to_string().contains(&addr.to_string()), "{i}: {e}");
    }
}

#[test]
fn an_old_server_has_no_queues() {
    let addr = fake(drop);
    let s = TcpStore::connect(addr, LONG).unwrap();
    for e in [s.queue_push("q", b"1").unwrap_err(), s.queue_len("q").unwrap_err(), s.list_keys().unwrap_err()] {
        assert!(matches!(e.kind(), ErrorKind::Unsupported { .. }), "{e}");
    }
    let e = s.set("k", b"v").unwrap_err();
    assert!(matches!(e.kind(), ErrorKind::Io { .. }), "{e}");
}

#[test]
fn what_the_server_would_not_take_is_refused_here() {
    let server = TcpStoreServer::bind("127.0.0.1:0").unwrap();
    let s = TcpStore::connect(server.local_addr(), LONG).unwrap();
    let long = "k".repeat(8192);
    let big = vec![0; (8 << 20) + 1];
    for e in [
        s.set(&long, b"").unwrap_err(),
        s.get(&long, LONG).unwrap_err(),
        s.set("k", &big).unwrap_err(),
        s.append("k", &big).unwrap_err(),
        s.multi_set(&[("k", &big)]).unwrap_err(),
        s.check(&vec!["k"; 131_073]).unwrap_err(),
    ] {
        assert!(matches!(e.kind(), ErrorKind::InvalidArgument { .. }), "{e}");
        assert!(e.to_string().len() < 500, "{e}");
    }
    assert_eq!(server.refused(), 0);
    s.set(&long[1..], &big[1..]).unwrap();
    assert!(s.get(&long[1..], LONG).unwrap() == big[1..]);
}

#[test]
fn a_wait_that_is_satisfied_while_it_is_cancelled_succeeds() {
    let addr = fake(|mut s| {
        // WAIT of one key of two bytes, then nothing until the cancellation; then both answers.
        let mut wait = [0; 19];
        s.read_exact(&mut wait).unwrap();
        let mut cancel = [0; 1];
        s.read_exact(&mut cancel).unwrap();
        assert_eq!(cancel, [12]);
        s.write_all(&[0, 1]).unwrap();
        // And the connection is in step: a ping is answered.
        let mut num = [0; 1];
        s.read_exact(&mut num).unwrap();
        assert_eq!(num, [7]);
        s.write_all(&5i64.to_le_bytes()).unwrap();
        std::mem::forget(s);
    });
    let s = TcpStore::connect(addr, LONG).unwrap();
    s.wait(&["k"], Duration::from_millis(50)).unwrap();
    assert_eq!(s.num_keys().unwrap(), 5);
}

const CHILD: &str = "COMM_STORE_TEST_CHILD";

#[test]
fn a_client_killed_while_it_waits() {
    if let Ok(addr) = std::env::var(CHILD) {
        let s = TcpStore::connect(addr, LONG).unwrap();
        std::thread::scope(|scope| {
            for i in 0..3 {
                let s = &s;
                scope.spawn(move || s.get(["never", "later", "queue"][i], LONG));
            }
        });
        return;
    }
    let server = TcpStoreServer::bind("127.0.0.1:0").unwrap();
    let s = TcpStore::connect(server.local_addr(), LONG).unwrap();
    s.set("before", b"1").unwrap();
    // The server publishes its figures after it has answered.
    eventually("the value is counted", || server.memory() > 0);
    let memory = server.memory();
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "a_client_killed_while_it_waits"])
        .env(CHILD, server.local_addr().to_string())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let all_wait = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        eventually("three waits are registered", || {
            server.memory() >= memory + 3 * 2 * 128 && server.connections() == 4
        });
    }));
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(all_wait.is_ok());
    eventually("they are forgotten", || server.connections() == 1 && server.memory() == memory);
    s.set("later", b"1").unwrap();
    s.queue_push("queue", b"1").unwrap();
    assert_eq!(s.queue_pop("queue", LONG).unwrap(), b"1");
    still_serves(&server);
}
