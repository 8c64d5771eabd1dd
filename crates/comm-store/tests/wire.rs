//! The protocol byte by byte, as captured from PyTorch 2.15, and what the server does with bytes
//! that are no protocol at all.

mod common;

use std::time::{Duration, Instant};

use comm_core::{ErrorKind, Store};
use comm_store::{TcpStore, TcpStoreServer, TcpStoreServerOptions};
use common::{LONG, Raw, eventually, hex, still_serves};

fn server() -> TcpStoreServer {
    TcpStoreServer::bind("127.0.0.1:0").unwrap()
}

#[test]
fn the_captured_exchanges() {
    let server = server();
    let mut c = Raw::new(server.local_addr());
    // set k v1, get k
    c.say("01 0200000000000000 2f6b 0200000000000000 7631");
    c.say("06 0100000000000000 0200000000000000 2f6b");
    c.hear("00");
    c.say("03 0200000000000000 2f6b");
    c.hear("0200000000000000 7631");
    // add n 5, add n -2
    c.say("04 0200000000000000 2f6e 0500000000000000");
    c.hear("0500000000000000");
    c.say("04 0200000000000000 2f6e feffffffffffffff");
    c.hear("0300000000000000");
    c.say("03 0200000000000000 2f6e");
    c.hear("0100000000000000 33");
    // check k,zz and check k,n
    c.say("05 0200000000000000 0200000000000000 2f6b 0300000000000000 2f7a7a");
    c.hear("01");
    c.say("05 0200000000000000 0200000000000000 2f6b 0200000000000000 2f6e");
    c.hear("00");
    // a wait that is cancelled
    c.say("06 0100000000000000 0600000000000000 2f6e65766572");
    c.say("0c");
    c.hear("01");
    // queue_push q item, queue_len, queue_pop, queue_pop of nothing
    c.say("0e 0200000000000000 2f71 0400000000000000 6974656d");
    c.say("10 0200000000000000 2f71");
    c.hear("0100000000000000");
    c.say("06 0100000000000000 0200000000000000 2f71");
    c.hear("00");
    c.say("0f 0200000000000000 2f71");
    c.hear("0100000000000000 0400000000000000 6974656d");
    c.say("0f 0200000000000000 2f71");
    c.hear("0000000000000000");
    // barrier bar 1
    c.say("12 0400000000000000 2f626172 0100000000000000");
    c.hear("00");
    // get of a missing key; multi_get k, missing, n
    c.say("03 0200000000000000 2f3f");
    c.hear("0000000000000000");
    c.say("0a 0300000000000000 0200000000000000 2f6b 0200000000000000 2f3f 0200000000000000 2f6e");
    c.hear("0200000000000000 7631 0000000000000000 0100000000000000 33");
    // compare_set: missing with expectation, equal, different
    c.say("02 0200000000000000 2f63 0100000000000000 78 0100000000000000 79");
    c.hear("0100000000000000 78");
    c.say("02 0200000000000000 2f6b 0200000000000000 7631 0100000000000000 79");
    c.hear("0100000000000000 79");
    c.say("02 0200000000000000 2f6b 0200000000000000 7631 0100000000000000 7a");
    c.hear("0100000000000000 79");
    // append, multi_set, getnumkeys (k, n, bar, a, m), delete twice, ping
    c.say("09 0200000000000000 2f61 0100000000000000 31 09 0200000000000000 2f61 0100000000000000 32");
    c.say("0b 0100000000000000 0200000000000000 2f6d 0000000000000000");
    c.say("07");
    c.hear("0500000000000000");
    c.say("03 0200000000000000 2f61");
    c.hear("0200000000000000 3132");
    for k in ["6b", "6e", "61"] {
        c.say(&format!("08 0200000000000000 2f{k}"));
        c.hear("0100000000000000");
    }
    c.say("08 0200000000000000 2f6b 08 0400000000000000 2f626172");
    c.hear("0000000000000000 0100000000000000");
    c.say("11");
    c.hear("0100000000000000 0200000000000000 2f6d");
    c.say("0d 01020304");
    c.hear("01020304");
    // An old client says no ping.
    let mut old = Raw::silent(server.local_addr());
    old.say("00 cef7853c 07");
    old.hear("0100000000000000");
}

#[test]
fn requests_in_one_segment_or_in_one_per_byte() {
    let all = hex("00 cef7853c 0d 39300000 01 0200000000000000 2f6b 0200000000000000 7631 \
         03 0200000000000000 2f6b 05 0100000000000000 0200000000000000 2f6b 07 \
         06 0100000000000000 0200000000000000 2f77 01 0200000000000000 2f77 0000000000000000 07");
    for piece in [all.len(), 1, 7] {
        let server = server();
        let mut c = Raw::silent(server.local_addr());
        all.chunks(piece).for_each(|p| c.send(p));
        c.hear("39300000 0200000000000000 7631 00 0100000000000000 00 0200000000000000");
    }
}

#[test]
fn a_barrier_holds_all_until_the_last() {
    let server = server();
    let mut all: Vec<Raw> = (0..3).map(|_| Raw::new(server.local_addr())).collect();
    for c in &mut all[..2] {
        // The pong alone: the barrier has not answered before it.
        c.say("12 0200000000000000 2f62 0300000000000000 0d 77000000");
        c.hear("77000000");
    }
    // The last one's pong comes behind the barrier's answer.
    all[2].say("12 0200000000000000 2f62 0300000000000000 0d 77000000");
    all[2].hear("00 77000000");
    for c in &mut all[..2] {
        c.hear("00");
    }
    let mut c = Raw::new(server.local_addr());
    c.say("03 0200000000000000 2f62");
    c.hear("0100000000000000 33");
}

#[test]
fn replies_that_are_not_read_stop_the_reader_and_lose_nothing() {
    let server = server();
    let store = TcpStore::connect(server.local_addr(), LONG).unwrap();
    let value: Vec<u8> = (0..100_000u32).map(|i| (i / 7) as u8).collect();
    store.set("big", &value).unwrap();
    let mut c = Raw::new(server.local_addr());
    let n = 500;
    let writer = c.0.try_clone().unwrap();
    let request = hex("03 0400000000000000 2f626967");
    let sender = std::thread::spawn(move || {
        let mut w = Raw(writer);
        (0..n).for_each(|_| w.send(&request));
    });
    std::thread::sleep(Duration::from_millis(100));
    assert!(server.memory() < 4 << 20, "unread replies pile up: {}", server.memory());
    still_serves(&server);
    let mut want = 100_000u64.to_le_bytes().to_vec();
    want.extend(&value);
    let mut got = vec![0; want.len()];
    for i in 0..n {
        std::io::Read::read_exact(&mut c.0, &mut got).unwrap();
        assert!(got == want, "reply {i}");
    }
    sender.join().unwrap();
}

#[test]
fn hostile_input_closes_its_connection_only() {
    let server = server();
    let hello = "00 cef7853c";
    let k9000 = [hex(hello), hex("03 2823000000000000"), vec![b'x'; 9000]].concat();
    let v9m = [hex(hello), hex("01 0100000000000000 6b 0000900000000000"), vec![b'x'; 1 << 20]].concat();
    let cases: Vec<(&str, Vec<u8>)> = vec![
        ("http", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n".to_vec()),
        ("tls", hex("16 0301 0200 0100 01fc 0303")),
        ("garbage first byte", hex("ff")),
        ("a request without introduction", hex("01 0100000000000000 6b 0100000000000000 76")),
        ("a wrong magic", hex("00 cef7853d")),
        ("an unknown opcode", hex("00 cef7853c 13")),
        ("an unknown opcode behind a good request", hex("00 cef7853c 07 c8")),
        ("a 9000-byte key", k9000),
        ("a 9 MiB value", v9m),
        ("a key of 2^64-1 bytes", hex("00 cef7853c 03 ffffffffffffffff")),
        ("a negative value length", hex("00 cef7853c 01 0100000000000000 6b ffffffffffffff7f")),
        ("131073 keys", hex("00 cef7853c 06 0100020000000000")),
        ("2^63 keys", hex("00 cef7853c 0a 0000000000000080")),
        ("2^64-1 pairs", hex("00 cef7853c 0b ffffffffffffffff")),
        (
            "an addition to text",
            hex("00 cef7853c 01 0100000000000000 74 0100000000000000 74 04 0100000000000000 74 0100000000000000"),
        ),
        (
            "a second wait",
            hex("00 cef7853c 06 0100000000000000 0100000000000000 3f 06 0100000000000000 0100000000000000 3f"),
        ),
    ];
    let mut refused = server.refused();
    for (what, bytes) in cases {
        let mut c = Raw::silent(server.local_addr());
        // The server may close before all is written, which is the point.
        let _ = std::io::Write::write_all(&mut c.0, &bytes);
        let said = c.closed();
        assert!(said.is_empty() || said.len() == 8, "{what}: {said:?}");
        eventually(what, || server.refused() > refused);
        refused = server.refused();
        still_serves(&server);
    }
    for (what, bytes) in [
        ("nothing", vec![]),
        ("half a magic", hex("00 cef7")),
        ("half a length", hex("00 cef7853c 01 0200")),
        ("half a value", hex("00 cef7853c 01 0200000000000000 2f6b 0000400000000000 7631")),
        ("half a list", hex("00 cef7853c 06 0000020000000000 0100000000000000 6b")),
        ("a wait", hex("00 cef7853c 06 0100000000000000 0100000000000000 3f")),
    ] {
        let mut c = Raw::silent(server.local_addr());
        c.send(&bytes);
        drop(c);
        still_serves(&server);
        eventually(what, || server.connections() == 0);
    }
    // What the good client stored, the text, and nothing else.
    eventually("memory is given back", || server.memory() < 2000);
}

#[test]
fn announced_counts_cost_nothing() {
    let server = server();
    let conns: Vec<Raw> = (0..100)
        .map(|i| {
            let mut c = Raw::new(server.local_addr());
            // 131,072 keys or an 8 MiB value, of which little comes.
            c.say(if i % 2 == 0 {
                "0b 0000020000000000 0100000000000000 6b"
            } else {
                "01 0100000000000000 6b 0000800000000000 aa"
            });
            c
        })
        .collect();
    still_serves(&server);
    assert!(server.memory() < 1 << 20, "{}", server.memory());
    assert_eq!(conns.len(), 100);
}

#[test]
fn the_memory_limit_holds_and_reading_still_works_at_it() {
    let server = TcpStoreServerOptions::new().max_memory(20 << 20).bind("127.0.0.1:0").unwrap();
    let store = TcpStore::connect(server.local_addr(), LONG).unwrap();
    store.set("small", b"1").unwrap();
    let value = vec![1; 2 << 20];
    let stored = (0..50).filter(|i| store.set(&format!("v{i}"), &value).is_ok()).count();
    assert!((5..=10).contains(&stored), "{stored}");
    let e = store.set("another", &value).unwrap_err();
    assert!(matches!(e.kind(), ErrorKind::Io { .. }) && e.to_string().contains("limits"), "{e}");
    assert_eq!(store.get("small", LONG).unwrap(), b"1");
    assert!(store.check(&["small", "v0"]).unwrap());
    // One small request must not become an answer of 200 GiB.
    let e = store.multi_get(&vec!["v0"; 100_000], LONG).unwrap_err();
    assert!(matches!(e.kind(), ErrorKind::Io { .. }), "{e}");
    assert!(server.memory() <= 20 << 20, "{}", server.memory());
    for i in 0..50 {
        store.delete_key(&format!("v{i}")).unwrap();
    }
    store.set("another", &value).unwrap();
    assert!(store.get("another", LONG).unwrap() == value);
}

#[test]
fn silent_connections_over_the_limit_make_way() {
    let server = TcpStoreServerOptions::new().max_connections(20).bind("127.0.0.1:0").unwrap();
    let silent: Vec<Raw> = (0..220).map(|_| Raw::silent(server.local_addr())).collect();
    still_serves(&server);
    eventually("200 are closed", || server.refused() >= 200 && server.connections() <= 20);
    drop(silent);
    // Those that have introduced themselves stay; the next ones are refused.
    let good: Vec<Raw> = (0..20).map(|_| Raw::new(server.local_addr())).collect();
    let e = TcpStore::connect(server.local_addr(), Duration::from_millis(300)).unwrap_err();
    assert!(matches!(e.kind(), ErrorKind::Bootstrap { .. }), "{e}");
    for mut c in good {
        c.say("0d 01000000");
        c.hear("01000000");
    }
    still_serves(&server);
}

#[test]
fn silence_has_its_limits() {
    let t = Duration::from_millis(150);
    let server = TcpStoreServerOptions::new().first_message_timeout(t).stall_timeout(t).bind("127.0.0.1:0").unwrap();
    let start = Instant::now();
    let silent = Raw::silent(server.local_addr());
    let mut half = Raw::new(server.local_addr());
    half.say("01 0100000000000000");
    let mut idle = Raw::new(server.local_addr());
    let mut waits = Raw::new(server.local_addr());
    waits.say("06 0100000000000000 0200000000000000 2f77");
    assert!(silent.closed().is_empty());
    assert!(half.closed().is_empty());
    assert!(start.elapsed() >= t);
    std::thread::sleep(2 * t);
    // To be idle between requests, or to wait, is no fault.
    idle.say("01 0200000000000000 2f77 0000000000000000 0d 01000000");
    idle.hear("01000000");
    waits.hear("00");
    let server = TcpStoreServerOptions::new().idle_timeout(Some(t)).bind("127.0.0.1:0").unwrap();
    assert!(Raw::new(server.local_addr()).closed().is_empty());
    // The client does not notice: it replaces the connection.
    let store = TcpStore::connect(server.local_addr(), LONG).unwrap();
    eventually("the idle connection is closed", || server.connections() == 0);
    store.set("k", b"v").unwrap();
}

#[test]
fn dropping_the_server_frees_its_port_and_fails_its_clients() {
    let server = server();
    let addr = server.local_addr();
    let store = TcpStore::connect(addr, LONG).unwrap();
    let start = Instant::now();
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| store.get("never", LONG));
        eventually("the waiter is there", || server.connections() == 1);
        std::thread::sleep(Duration::from_millis(30));
        drop(server);
        let e = waits.join().unwrap().unwrap_err();
        assert!(matches!(e.kind(), ErrorKind::Io { .. }), "{e}");
        assert!(e.to_string().contains("get('never')") && e.to_string().contains(&addr.to_string()), "{e}");
    });
    let e = store.set("k", b"v").unwrap_err();
    assert!(matches!(e.kind(), ErrorKind::Io { .. }), "{e}");
    assert!(start.elapsed() < LONG / 2);
    // It comes back, and so does the client.
    let server = TcpStoreServer::bind(addr).unwrap();
    store.set("k", b"v").unwrap();
    still_serves(&server);
}
