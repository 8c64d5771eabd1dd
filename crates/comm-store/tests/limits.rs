//! A server under clients that want too much: descriptors, memory, time.

mod common;

use std::io::{Read, Seek};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use comm_core::Store;
use comm_store::{TcpStore, TcpStoreServer, TcpStoreServerOptions};
use common::{LONG, Raw, eventually, still_serves};

/// A value of `n` bytes at `/k`.
fn set(n: usize) -> Vec<u8> {
    [&[1u8][..], &2u64.to_le_bytes(), b"/k", &(n as u64).to_le_bytes(), &vec![7; n]].concat()
}

#[test]
fn many_small_hoarders_stay_within_the_memory() {
    let most = 8 << 20;
    let server = TcpStoreServerOptions::new().max_memory(most).bind("127.0.0.1:0").unwrap();
    // Each has no more than a connection may have that a full store still listens to; together they want 10 MiB.
    let mut hoarders: Vec<Raw> = (0..170).map(|_| Raw::new(server.local_addr())).collect();
    let half = &set(200_000)[..60_000];
    for c in &mut hoarders {
        let _ = std::io::Write::write_all(&mut c.0, half);
        assert!(server.memory() <= most, "{}", server.memory());
    }
    eventually("some were closed", || server.connections() < 170);
    assert!(server.memory() <= most, "{}", server.memory());
    drop(hoarders);
    eventually("what they sent is forgotten", || server.memory() == 0);
    still_serves(&server);
}

/// A peer that reads a little now and then is one that does not read.
#[test]
fn slow_readers_do_not_keep_their_replies() {
    let t = Duration::from_millis(500);
    let server = TcpStoreServerOptions::new().stall_timeout(t).bind("127.0.0.1:0").unwrap();
    let store = TcpStore::connect(server.local_addr(), LONG).unwrap();
    store.set("big", &vec![1; 8 << 20]).unwrap();
    let stored = server.memory();
    let mut c = Raw::new(server.local_addr());
    // Otherwise what it reads shows at the server in large steps.
    rustix::net::sockopt::set_socket_recv_buffer_size(&c.0, 4096).unwrap();
    c.say("0a 0200000000000000 0400000000000000 2f626967 0400000000000000 2f626967");
    eventually("the reply is there", || server.memory() > stored + (1 << 20));
    let start = Instant::now();
    while server.memory() > stored + (1 << 20) {
        assert!(start.elapsed() < LONG, "the reply is kept");
        let _ = c.0.read(&mut [0; 512]);
        std::thread::sleep(Duration::from_millis(20));
    }
    assert!(start.elapsed() >= t / 2);
    assert_eq!(store.get("big", LONG).unwrap().len(), 8 << 20);
}

#[test]
fn slow_senders_do_not_keep_half_a_request() {
    let t = Duration::from_millis(300);
    let server = TcpStoreServerOptions::new().stall_timeout(t).bind("127.0.0.1:0").unwrap();
    let mut c = Raw::new(server.local_addr());
    let request = set(4 << 20);
    c.send(&request[..3 << 20]);
    eventually("it has arrived", || server.memory() > 3 << 20);
    let start = Instant::now();
    for byte in &request[3 << 20..] {
        if std::io::Write::write_all(&mut c.0, &[*byte]).is_err() || server.memory() == 0 {
            break;
        }
        assert!(start.elapsed() < LONG, "the request is kept");
        std::thread::sleep(Duration::from_millis(20));
    }
    eventually("it is forgotten", || server.memory() == 0);
    // One that goes on, with pauses, is served: each pause is short, and each part is long.
    let mut c = Raw::new(server.local_addr());
    for part in request.chunks(256 << 10) {
        c.send(part);
        std::thread::sleep(t / 6);
    }
    c.say("0d 01020304");
    c.hear("01020304");
    still_serves(&server);
}

/// Idle for longer than the stall timeout between requests, and then a request in two parts.
#[test]
fn rest_between_requests_is_no_stall() {
    let t = Duration::from_millis(400);
    let server = TcpStoreServerOptions::new().stall_timeout(t).bind("127.0.0.1:0").unwrap();
    let mut c = Raw::new(server.local_addr());
    for _ in 0..2 {
        std::thread::sleep(t + t / 4);
        c.say("0d 0102");
        std::thread::sleep(t / 4);
        c.say("0304");
        c.hear("01020304");
    }
}

const CHILD: &str = "COMM_STORE_TEST_DESCRIPTORS";

/// CPU time of this process so far, from its open `/proc/self/stat`.
fn cpu(stat: &mut std::fs::File) -> Duration {
    let mut text = String::new();
    stat.rewind().unwrap();
    stat.read_to_string(&mut text).unwrap();
    // Behind the name, which may hold anything: state is the first field, user and system time are 12th and 13th.
    let fields: Vec<&str> = text[text.rfind(')').unwrap() + 2..].split(' ').collect();
    let ticks: u64 = fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap();
    Duration::from_millis(ticks * 10)
}

/// With no descriptor left, the server does not spin on a listener that stays readable; strangers make room, and when
/// there is some again it goes on.
#[test]
fn without_descriptors_the_server_waits() {
    if std::env::var_os(CHILD).is_none() {
        let exe = std::env::current_exe().unwrap();
        let line = "ulimit -n 64; exec \"$0\" --exact without_descriptors_the_server_waits --nocapture";
        let mut child =
            Command::new("sh").args(["-c", line]).arg(exe).env(CHILD, "1").stdin(Stdio::null()).spawn().unwrap();
        let start = Instant::now();
        loop {
            if let Some(status) = child.try_wait().unwrap() {
                assert!(status.success(), "{status}");
                return;
            }
            if start.elapsed() > 2 * LONG {
                child.kill().unwrap();
                panic!("the child hangs");
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }
    let server = TcpStoreServer::bind("127.0.0.1:0").unwrap();
    let mut good = Raw::new(server.local_addr());
    let mut stat = std::fs::File::open("/proc/self/stat").unwrap();
    // All descriptors but one are gone; the client's end of a connection takes that.
    let mut files = Vec::new();
    while let Ok(f) = std::fs::File::open("/dev/null") {
        files.push(f);
    }
    files.pop();
    let waiting = Raw::silent(server.local_addr());
    let before = cpu(&mut stat);
    std::thread::sleep(Duration::from_secs(1));
    let spent = cpu(&mut stat) - before;
    assert!(spent < Duration::from_millis(500), "{spent:?} of CPU time in a second of waiting");
    good.say("0d 01020304");
    good.hear("01020304");
    drop(files);
    let mut c = waiting;
    c.say("00 cef7853c 0d 39300000");
    c.hear("39300000");
    still_serves(&server);
}
