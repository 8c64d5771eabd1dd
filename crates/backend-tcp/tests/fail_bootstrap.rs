//! Worlds that do not come together: who came, who did not, and strangers at the data port.
// Arrays are `Copy`: without the borrow a receive would go into a copy.
#![allow(clippy::needless_borrows_for_generic_args)]

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use comm_core::{CommOptions, Communicator, Error, ErrorKind, Result, Store, op};
use comm_store::{MemoryStore, TcpStore, TcpStoreServer};

/// Connects as the given ranks, all at once; results in the order given. Nobody may take longer than `limit`.
fn connect(
    store: &Arc<dyn Store>,
    name: &str,
    ranks: &[(usize, usize)],
    timeout: Duration,
    limit: Duration,
) -> Vec<Result<Communicator>> {
    let (tx, rx) = channel();
    let start = Instant::now();
    for (i, (rank, size)) in ranks.iter().copied().enumerate() {
        let o = CommOptions::new().name(name).rank_and_size(rank, size).store(Arc::clone(store));
        let (tx, o) = (tx.clone(), o.bootstrap_timeout(timeout));
        std::thread::spawn(move || {
            let _ = tx.send((i, backend_tcp::connect(o)));
        });
    }
    let mut out: Vec<Option<Result<Communicator>>> = ranks.iter().map(|_| None).collect();
    for _ in ranks {
        let left = limit.saturating_sub(start.elapsed());
        let (i, r) = rx.recv_timeout(left).unwrap_or_else(|_| panic!("{name}: a rank hangs in the bootstrap"));
        out[i] = Some(r);
    }
    out.into_iter().flatten().collect()
}

fn memory() -> Arc<dyn Store> {
    Arc::new(MemoryStore::new())
}

fn bootstrap(e: &Error) -> (&str, &[String], &[usize]) {
    match e.kind() {
        ErrorKind::Bootstrap { what, arrived, missing } => (what, arrived, missing),
        _ => panic!("expected a bootstrap error, got {e}"),
    }
}

const SHORT: Duration = Duration::from_millis(700);
const LIMIT: Duration = Duration::from_secs(10);

#[test]
fn missing_ranks_are_listed_and_so_are_those_who_came() {
    let server = TcpStoreServer::bind("127.0.0.1:0").unwrap();
    let tcp: Arc<dyn Store> = Arc::new(TcpStore::connect(server.local_addr(), LIMIT).unwrap());
    for (name, store) in [("memory", memory()), ("tcp", tcp)] {
        for (size, absent) in [(2, vec![0]), (2, vec![1]), (4, vec![2]), (5, vec![0, 3, 4])] {
            let here: Vec<usize> = (0..size).filter(|r| !absent.contains(r)).collect();
            let ranks: Vec<_> = here.iter().map(|r| (*r, size)).collect();
            for r in connect(&store, &format!("{name}-{size}-{}", absent[0]), &ranks, SHORT, LIMIT) {
                let e = r.unwrap_err();
                let (_, arrived, missing) = bootstrap(&e);
                assert_eq!(missing, absent, "{e}");
                for (line, rank) in arrived.iter().zip(&here) {
                    assert!(line.starts_with(&format!("rank {rank} on ")) && line.len() > 10, "{e}");
                }
                assert_eq!(arrived.len(), here.len(), "{e}");
            }
        }
    }
}

/// Two processes with the same rank: one of them is left over, and says so in time; no world is mixed up.
#[test]
fn a_rank_that_is_there_twice() {
    let out = connect(&memory(), "twice", &[(0, 2), (1, 2), (1, 2)], SHORT, LIMIT);
    let failed: Vec<_> = out.iter().filter_map(|r| r.as_ref().err()).collect();
    assert_eq!(failed.len(), 1, "{out:?}");
    let (_, arrived, missing) = bootstrap(failed[0]);
    assert!(missing == [0] && arrived.len() == 1, "{}", failed[0]);
    assert!(out[0].is_ok());
}

#[test]
fn ranks_that_disagree_on_the_size() {
    // Everybody waits for rank 2, who says something else.
    let out = connect(&memory(), "size", &[(0, 3), (1, 3), (2, 4)], SHORT, LIMIT);
    for (i, r) in out.into_iter().enumerate() {
        let e = r.unwrap_err();
        let (what, _, missing) = bootstrap(&e);
        if i < 2 {
            assert!(what.contains("rank 2 says world size 4") && what.contains("says 3"), "{e}");
        } else {
            assert!(what.contains("world size 3") || missing == [3], "{e}");
        }
    }
    // Rank 2 is too many: two make a world without it.
    let out = connect(&memory(), "more", &[(0, 2), (1, 2), (2, 3)], SHORT, LIMIT);
    assert!(out[0].is_ok() && out[1].is_ok());
    let e = out[2].as_ref().unwrap_err();
    assert!(bootstrap(e).0.contains("says world size 2"), "{e}");
}

#[test]
fn impossible_settings() {
    let o = || CommOptions::new().name("x").store(memory()).bootstrap_timeout(SHORT);
    for o in [o().rank_and_size(2, 2), o().rank_and_size(0, 0), o().name("").rank_and_size(0, 2)] {
        let e = backend_tcp::connect(o).unwrap_err();
        assert_eq!(e.kind().name(), "InvalidArgument", "{e}");
    }
    let e = backend_tcp::connect(o().rank_and_size(0, 1).hint("alog", "ring")).unwrap_err();
    assert!(e.to_string().contains("did you mean 'algo'"), "{e}");
    // Nowhere to meet.
    let e = backend_tcp::connect(CommOptions::new().rank_and_size(0, 2)).unwrap_err();
    assert!(bootstrap(&e).0.contains("no store"), "{e}");
}

/// What rank 0 wrote into the store that is no entry of ours.
#[test]
fn garbage_in_the_store() {
    let store = memory();
    store.set("rustcomms/run/garbage/1/1", &[0xff; 20]).unwrap();
    let e = connect(&store, "garbage", &[(0, 2)], SHORT, LIMIT).remove(0).unwrap_err();
    assert!(matches!(e.kind(), ErrorKind::Corrupt { rank: Some(1), .. }), "{e}");
}

/// Where a rank's data port is: the one listening socket of this process that is new.
fn listening() -> Vec<u16> {
    let own: Vec<String> = std::fs::read_dir("/proc/self/fd")
        .unwrap()
        .filter_map(|f| Some(std::fs::read_link(f.ok()?.path()).ok()?.to_string_lossy().into_owned()))
        .filter_map(|l| Some(l.strip_prefix("socket:[")?.strip_suffix(']')?.to_owned()))
        .collect();
    let mut ports = Vec::new();
    for table in ["/proc/self/net/tcp", "/proc/self/net/tcp6"] {
        for line in std::fs::read_to_string(table).unwrap_or_default().lines().skip(1) {
            let words: Vec<&str> = line.split_whitespace().collect();
            if words[3] == "0A" && own.iter().any(|i| i == words[9]) {
                ports.push(u16::from_str_radix(words[1].rsplit(':').next().unwrap(), 16).unwrap());
            }
        }
    }
    ports
}

/// Strangers talk to the data ports while the ranks meet, and stay; the world comes together all the same.
#[test]
fn strangers_at_the_data_port() {
    let store = memory();
    let rank = |r: usize| {
        let o = CommOptions::new().name("strangers").rank_and_size(r, 3).store(Arc::clone(&store));
        let o = o.bootstrap_timeout(Duration::from_secs(20)).timeout(LIMIT);
        std::thread::spawn(move || backend_tcp::connect(o))
    };
    // Ranks 0 and 1 are there and wait for rank 2.
    let mut ranks = vec![rank(0), rank(1)];
    std::thread::sleep(Duration::from_millis(200));
    let mut strangers = Vec::new();
    for port in listening() {
        for i in 0..100 {
            // Other tests' ports come and go.
            let Ok(mut s) = TcpStream::connect(SocketAddr::from(([127, 0, 0, 1], port))) else { break };
            let _ = match i % 5 {
                0 => s.write_all(&[0xff; 10_000]),
                1 => s.write_all(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"),
                2 => s.write_all(b"RCOMMS\r\n"),
                3 => s.write_all(&[b"RCOMMS\r\n", &[1u8, 0, 0, 0][..], &[7; 28]].concat()),
                _ => Ok(()),
            };
            strangers.push(s);
        }
    }
    assert!(strangers.len() >= 200, "the data ports were not found");
    ranks.push(rank(2));
    let comms: Vec<Communicator> = ranks.into_iter().map(|t| t.join().unwrap().unwrap()).collect();
    // Who talks nonsense is hung up on.
    let mut dropped = 0;
    for s in &mut strangers {
        s.set_read_timeout(Some(Duration::from_millis(1))).unwrap();
        let mut b = [0; 64];
        if !matches!(s.read(&mut b), Err(e) if matches!(e.kind(), std::io::ErrorKind::WouldBlock | std::io::ErrorKind::TimedOut))
        {
            dropped += 1;
        }
    }
    assert!(dropped >= 100, "only {dropped} strangers were dropped");
    let sums: Vec<_> = comms
        .into_iter()
        .map(|c| {
            std::thread::spawn(move || {
                let mut x = [c.rank() as u32 + 1];
                c.all_reduce(&mut x, op::Sum).unwrap();
                c.finalize(LIMIT).unwrap();
                x[0]
            })
        })
        .collect();
    for s in sums {
        assert_eq!(s.join().unwrap(), 6);
    }
}

/// Durations that no clock can add end nowhere near a panic, and cards of failed attempts do not stay.
#[test]
fn absurd_timeouts_and_second_attempts() {
    let store: Arc<dyn Store> = Arc::new(MemoryStore::new());
    let lonely = CommOptions::new().name("again").rank_and_size(0, 2).store(Arc::clone(&store));
    let e = backend_tcp::connect(lonely.clone().bootstrap_timeout(Duration::from_millis(100))).unwrap_err();
    assert!(e.to_string().contains("'again'"), "{e}");
    // A rank that comes too late learns it at once.
    let late = CommOptions::new().name("again").rank_and_size(1, 2).store(Arc::clone(&store));
    let start = Instant::now();
    let e = backend_tcp::connect(late.bootstrap_timeout(LIMIT)).unwrap_err();
    assert!(e.to_string().contains("rank 0") && e.to_string().contains("given up"), "{e}");
    assert!(start.elapsed() < LIMIT / 2);
    let ranks: Vec<_> = (0..2)
        .map(|r| {
            let o = CommOptions::new().name("long").rank_and_size(r, 2).store(Arc::clone(&store));
            std::thread::spawn(move || {
                let c = backend_tcp::connect(o.bootstrap_timeout(Duration::MAX).timeout(Duration::MAX)).unwrap();
                c.barrier().unwrap();
                c.finalize(LIMIT).unwrap();
            })
        })
        .collect();
    for r in ranks {
        r.join().unwrap();
    }
}
