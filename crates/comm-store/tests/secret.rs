//! A store and clients of which both, one or none know the secret, and strangers who would like to.

mod common;

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use comm_core::{Error, ErrorKind, Secret, Store};
use comm_store::auth::{self, CHALLENGE, HELLO, Initiator, PROOF};
use comm_store::{TcpStore, TcpStoreServer, TcpStoreServerOptions};
use common::{LONG, Raw, eventually, hex};

const TEXT: &str = "correct horse battery staple";
/// The introduction of a client, and its ping.
const INTRODUCTION: &str = "00 cef7853c 0d 39300000";

fn secret() -> Secret {
    Secret::new(TEXT).unwrap()
}

fn options() -> TcpStoreServerOptions {
    TcpStoreServerOptions::new().secret(Some(secret()))
}

fn server() -> TcpStoreServer {
    options().bind("127.0.0.1:0").unwrap()
}

fn client(addr: SocketAddr) -> TcpStore {
    TcpStore::connect_with(addr, LONG, Some(&secret())).unwrap()
}

/// Whether the server serves those who know the secret, and has stored nothing else than they did.
fn serves_only_friends(server: &TcpStoreServer) {
    let good = client(server.local_addr());
    let n = good.add("good", 1).unwrap();
    assert_eq!(good.get("good", LONG).unwrap(), n.to_string().into_bytes());
    assert_eq!(good.num_keys().unwrap(), 1, "{:?}", good.list_keys());
}

/// A bootstrap error that says all of `words` and names the address.
fn says(e: &Error, addr: impl std::fmt::Display, words: &[&str]) {
    assert!(matches!(e.kind(), ErrorKind::Bootstrap { .. }), "{e}");
    let text = e.to_string();
    assert!(text.contains(&addr.to_string()), "{text}");
    words.iter().for_each(|w| assert!(text.contains(w), "'{w}' in: {text}"));
    assert!(!text.contains(TEXT), "the secret is shown: {text}");
}

/// A connection that has proven that it knows the secret, and said nothing else.
fn proven(addr: SocketAddr) -> Raw {
    let mut c = Raw::silent(addr);
    let (initiator, hello) = Initiator::new(&secret(), auth::STORE).unwrap();
    c.send(&hello);
    let mut challenge = [0; CHALLENGE];
    c.0.read_exact(&mut challenge).unwrap();
    c.send(&initiator.answer(&challenge).unwrap());
    c
}

#[test]
fn who_knows_it_is_served_through_clones_and_reconnections() {
    let server = options().idle_timeout(Some(Duration::from_millis(100))).bind("127.0.0.1:0").unwrap();
    let store = client(server.local_addr());
    store.set("k", b"v").unwrap();
    let other = store.clone();
    for s in [&store, &other] {
        eventually("the idle connection is closed", || server.connections() == 0);
        assert_eq!(s.get("k", LONG).unwrap(), b"v");
    }
    std::thread::scope(|scope| {
        // Two at once need two connections.
        let waits = scope.spawn(|| other.get("later", LONG).unwrap());
        store.set("later", b"x").unwrap();
        assert_eq!(waits.join().unwrap(), b"x");
    });
    eventually("only idle connections were closed", || server.connections() == 0);
    assert!(!format!("{store:?} {:?}", options()).contains(TEXT));
}

#[test]
fn one_secret_at_one_end_or_two_of_them() {
    let with = server();
    let addr = with.local_addr();
    let start = Instant::now();
    says(&TcpStore::connect(addr, LONG).unwrap_err(), addr, &["asks for a secret", "set RUSTCOMMS_SECRET"]);
    let wrong = Secret::new("another").unwrap();
    let e = TcpStore::connect_with(addr, LONG, Some(&wrong)).unwrap_err();
    says(&e, addr, &["does not prove that it knows this process's secret", "the same on all ranks"]);
    serves_only_friends(&with);
    let without = TcpStoreServer::bind("127.0.0.1:0").unwrap();
    let addr = without.local_addr();
    let e = TcpStore::connect_with(addr, LONG, Some(&secret())).unwrap_err();
    says(&e, addr, &["has no secret", "PyTorch's", "RUSTCOMMS_SECRET"]);
    common::still_serves(&without);
    // For good: nobody waits for a store that is there to change its mind.
    assert!(start.elapsed() < LONG / 2, "{:?}", start.elapsed());
}

#[test]
fn a_store_that_was_replaced_by_one_with_another_secret() {
    let first = server();
    let addr = first.local_addr();
    let store = client(addr);
    store.set("k", b"v").unwrap();
    drop(first);
    let other = TcpStoreServerOptions::new().secret(Some(Secret::new("another").unwrap())).bind(addr).unwrap();
    says(&store.set("k", b"v").unwrap_err(), addr, &["does not prove that it knows"]);
    drop(other);
    let _plain = TcpStoreServer::bind(addr).unwrap();
    says(&store.get("k", LONG).unwrap_err(), addr, &["has no secret"]);
}

/// A server that does `f` with each connection.
fn fake(f: impl Fn(TcpStream) + Send + Sync + 'static) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let addr = listener.local_addr().unwrap();
    std::thread::spawn(move || listener.incoming().for_each(|s| f(s.unwrap())));
    addr
}

/// PyTorch's server closes the connection on what it does not know; others say nothing at all.
#[test]
fn servers_that_know_no_handshake_cost_no_more_than_the_timeout() {
    let silent = fake(std::mem::forget);
    let closes = fake(|mut s| {
        let _ = s.read(&mut [0]);
    });
    let closes_at_once = fake(drop);
    for addr in [silent, closes, closes_at_once] {
        let start = Instant::now();
        let e = TcpStore::connect_with(addr, Duration::from_millis(400), Some(&secret())).unwrap_err();
        assert!(start.elapsed() < LONG / 2);
        says(&e, addr, &["does not prove that it knows the secret", "PyTorch's", "RUSTCOMMS_SECRET"]);
    }
}

/// Who does not know the secret gets a hello from clients and nothing else.
#[test]
fn an_impostor_learns_nothing() {
    let heard = Arc::new(Mutex::new(Vec::new()));
    let log = Arc::clone(&heard);
    let addr = fake(move |mut s| {
        let mut hello = [0; HELLO];
        s.read_exact(&mut hello).unwrap();
        let _ = s.write_all(&[7; CHALLENGE]);
        let _ = s.shutdown(Shutdown::Write);
        let mut more = Vec::new();
        let _ = s.read_to_end(&mut more);
        log.lock().unwrap().push((hello, more));
    });
    let e = TcpStore::connect_with(addr, LONG, Some(&secret())).unwrap_err();
    says(&e, addr, &["does not prove that it knows"]);
    eventually("the impostor has seen the end", || !heard.lock().unwrap().is_empty());
    let heard = heard.lock().unwrap();
    assert!(heard.iter().all(|(hello, more)| hello[..8] == auth::MAGIC && more.is_empty()), "{heard:?}");
}

/// What a client says through a proxy.
fn recorded(server: SocketAddr) -> Vec<u8> {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let addr = listener.local_addr().unwrap();
    let proxy = std::thread::spawn(move || {
        let (mut from, _) = listener.accept().unwrap();
        let mut to = TcpStream::connect(server).unwrap();
        let (mut back, mut answers) = (from.try_clone().unwrap(), to.try_clone().unwrap());
        let returns = std::thread::spawn(move || std::io::copy(&mut answers, &mut back));
        let (mut log, mut buf) = (Vec::new(), [0; 4096]);
        while let Ok(n @ 1..) = from.read(&mut buf) {
            log.extend(&buf[..n]);
            to.write_all(&buf[..n]).unwrap();
        }
        to.shutdown(Shutdown::Both).unwrap();
        let _ = returns.join();
        log
    });
    let store = client(addr);
    store.add("good", 1).unwrap();
    store.set("replayed", b"yes").unwrap();
    assert!(store.delete_key("replayed").unwrap());
    store.set("replayed", b"yes").unwrap();
    drop(store);
    proxy.join().unwrap()
}

#[test]
fn a_recorded_session_is_refused() {
    let server = server();
    let log = recorded(server.local_addr());
    assert!(log.len() > HELLO + PROOF + 50 && log.starts_with(&auth::MAGIC));
    assert!(!log.windows(TEXT.len()).any(|w| w == TEXT.as_bytes()), "the secret travels");
    let good = client(server.local_addr());
    assert!(good.delete_key("replayed").unwrap());
    for cuts in [&[][..], &[HELLO], &[HELLO, HELLO + PROOF], &[1, HELLO + 1]] {
        let refused = server.refused();
        let mut c = Raw::silent(server.local_addr());
        let mut from = 0;
        for to in cuts.iter().copied().chain([log.len()]) {
            // The server may have closed it already.
            let _ = c.0.write_all(&log[from..to]);
            from = to;
            std::thread::sleep(Duration::from_millis(20));
        }
        let said = c.closed();
        // A challenge of its own, if that came through before the connection was reset; nothing else.
        assert!(said.is_empty() || said.len() == CHALLENGE, "{said:?}");
        eventually("it is refused", || server.refused() == refused + 1);
    }
    assert!(!good.check(&["replayed"]).unwrap());
    serves_only_friends(&server);
}

#[test]
fn garbage_of_all_kinds_behind_a_bad_proof_is_not_read() {
    let server = server();
    let set = hex("00 cef7853c 01 0200000000000000 2f6b 0200000000000000 7631 0d 01020304");
    let huge = hex("00 cef7853c 01 0200000000000000 2f6b 0000800000000000");
    let hello = [&auth::MAGIC[..], &[3; 32]].concat();
    for (i, proof) in [vec![0; PROOF], vec![0xff; PROOF], hello[..PROOF].to_vec()].into_iter().enumerate() {
        for behind in [&set[..], &huge, b"GET / HTTP/1.1\r\n\r\n", &[0xff; 5000], &hello, &[]] {
            let refused = server.refused();
            let mut c = Raw::silent(server.local_addr());
            c.send(&hello);
            if i > 0 {
                let mut challenge = [0; CHALLENGE];
                c.0.read_exact(&mut challenge).unwrap();
            }
            let _ = c.0.write_all(&[&proof[..], behind].concat());
            let said = c.closed();
            assert!(said.is_empty() || said.len() == CHALLENGE, "{said:?}");
            eventually("it is refused", || server.refused() == refused + 1);
        }
    }
    serves_only_friends(&server);
}

/// What is no offer of proof is told so, wherever it differs, and whatever follows is thrown away.
#[test]
fn other_first_bytes_are_answered_with_a_notice() {
    let server = server();
    let set = hex("00 cef7853c 01 0200000000000000 2f6b 0200000000000000 7631");
    let mut all = vec![set, b"GET / HTTP/1.1\r\n\r\n".to_vec(), vec![0xff; 100_000]];
    all.extend((0..8).map(|i| [&auth::MAGIC[..i], b"?", &[0; 100]].concat()));
    for bytes in all {
        let mut c = Raw::silent(server.local_addr());
        let _ = c.0.write_all(&bytes);
        assert_eq!(c.closed(), b"RCSTORE secret?\n", "{:?}", &bytes[..10]);
    }
    serves_only_friends(&server);
    // And a hello to a server without secret.
    let plain = TcpStoreServer::bind("127.0.0.1:0").unwrap();
    let mut c = Raw::silent(plain.local_addr());
    auth::MAGIC.iter().for_each(|b| c.send(&[*b]));
    assert_eq!(c.closed(), b"RCSTORE nosecret");
    for i in 1..8 {
        let c = {
            let mut c = Raw::silent(plain.local_addr());
            c.send(&[&auth::MAGIC[..i], b"?"].concat());
            c
        };
        assert!(c.closed().is_empty());
    }
    common::still_serves(&plain);
}

#[test]
fn half_open_handshakes_end_by_themselves() {
    let server = options().first_message_timeout(Duration::from_millis(200)).bind("127.0.0.1:0").unwrap();
    let addr = server.local_addr();
    let (_, hello) = Initiator::new(&secret(), auth::STORE).unwrap();
    for (bytes, answer) in [(&hello[..0], 0), (&hello[..7], 0), (&hello[..39], 0), (&hello[..], CHALLENGE)] {
        let mut c = Raw::silent(addr);
        c.send(bytes);
        assert_eq!(c.closed().len(), answer);
    }
    let mut c = Raw::silent(addr);
    c.send(&hello);
    c.send(&[0; PROOF - 1]);
    assert_eq!(c.closed().len(), CHALLENGE);
    // Proven, and then nothing or half an introduction.
    assert!(proven(addr).closed().is_empty());
    let mut c = proven(addr);
    c.say("00 cef7");
    assert!(c.closed().is_empty());
    // One that was told to go, and stays.
    let mut c = Raw::silent(addr);
    c.say("00");
    c.hear(&"RCSTORE secret?\n".bytes().map(|b| format!("{b:02x}")).collect::<String>());
    eventually("nobody is left", || server.connections() == 0);
    serves_only_friends(&server);
}

#[test]
fn handshakes_byte_by_byte() {
    let server = server();
    let mut c = Raw::silent(server.local_addr());
    let (initiator, hello) = Initiator::new(&secret(), auth::STORE).unwrap();
    hello.iter().for_each(|b| c.send(&[*b]));
    let mut challenge = [0; CHALLENGE];
    for b in &mut challenge {
        c.0.read_exact(std::slice::from_mut(b)).unwrap();
    }
    let rest = [&initiator.answer(&challenge).unwrap()[..], &hex(INTRODUCTION)].concat();
    rest.iter().for_each(|b| c.send(&[*b]));
    c.hear("39300000");
    serves_only_friends(&server);
}

#[test]
fn strangers_do_not_take_the_places_of_those_who_proved() {
    let server = options().max_connections(8).bind("127.0.0.1:0").unwrap();
    let addr = server.local_addr();
    let mut friends: Vec<Raw> = (0..6).map(|_| proven(addr)).collect();
    // More than places, with and without a hello.
    let hello = [&auth::MAGIC[..], &[3; 32]].concat();
    let strangers: Vec<Raw> = (0..60)
        .map(|i| {
            let mut c = Raw::silent(addr);
            let _ = c.0.write_all(&hello[..if i % 2 == 0 { 0 } else { HELLO }]);
            c
        })
        .collect();
    eventually("the strangers make room for each other", || server.refused() >= 58 && server.connections() <= 8);
    for c in &mut friends {
        c.say(INTRODUCTION);
        c.hear("39300000");
    }
    // And for a friend, too.
    serves_only_friends(&server);
    drop(strangers);
}
