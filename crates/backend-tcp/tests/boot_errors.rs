//! Worlds that do not come together: every rank says why, in time.

mod boot;

use std::io::{Read, Write};
use std::net::TcpListener;
use std::sync::Arc;
use std::time::{Duration, Instant};

use boot::{LIMIT, SHORT, all, bootstrap, host, memory, options, spawn, world};
use comm_core::{CommOptions, Communicator, Error, ErrorKind, Result, Store};
use comm_store::{TcpStore, TcpStoreServer};

#[test]
fn child() {
    boot::child();
}

/// Connects as the given ranks of worlds of the given sizes, all at once.
fn connect(
    store: &Arc<dyn Store>,
    name: &str,
    ranks: &[(usize, usize)],
    timeout: Duration,
) -> Vec<Result<Communicator>> {
    let list: Vec<CommOptions> =
        ranks.iter().map(|(r, n)| options(store, name, *r, *n).bootstrap_timeout(timeout)).collect();
    all(list, backend_tcp::connect)
}

fn soon(start: Instant) {
    assert!(start.elapsed() < LIMIT / 2, "it took {:?}", start.elapsed());
}

#[test]
fn missing_ranks_are_listed_and_so_are_those_who_came() {
    let server = TcpStoreServer::bind("127.0.0.1:0").unwrap();
    let tcp: Arc<dyn Store> = Arc::new(TcpStore::connect(server.local_addr(), LIMIT).unwrap());
    for (name, store) in [("memory", memory()), ("tcp", tcp)] {
        for (size, absent) in [(2, vec![0]), (2, vec![1]), (4, vec![2]), (5, vec![0, 3, 4]), (40, vec![7, 30])] {
            let here: Vec<usize> = (0..size).filter(|r| !absent.contains(r)).collect();
            let ranks: Vec<_> = here.iter().map(|r| (*r, size)).collect();
            let timeout = if size > 8 { SHORT * 4 } else { SHORT };
            for r in connect(&store, &format!("{name}-{size}-{}", absent[0]), &ranks, timeout) {
                let e = r.unwrap_err();
                let (what, arrived, missing) = bootstrap(&e);
                assert!(missing == absent && what.contains("gave up waiting"), "{e}");
                let expected: Vec<String> = here.iter().map(|r| format!("rank {r} on {}", host())).collect();
                assert_eq!(arrived, expected, "{e}");
            }
        }
    }
}

/// A world size that is a typing error costs an error, not the memory.
#[test]
fn far_too_many_ranks() {
    for size in [5_000, 3_000_000_000] {
        let e = connect(&memory(), "many", &[(1, size), (4, size)], SHORT * 2).remove(0).unwrap_err();
        let (_, arrived, missing) = bootstrap(&e);
        assert!(missing.contains(&0) && !missing.contains(&4) && missing.len() < 20_000, "{size}");
        assert_eq!(arrived, [format!("rank 1 on {}", host()), format!("rank 4 on {}", host())]);
        assert!(e.to_string().len() < 200_000);
    }
}

/// Two processes with the same rank: all processes learn it at once.
#[test]
fn a_rank_that_is_there_twice() {
    let server = TcpStoreServer::bind("127.0.0.1:0").unwrap();
    let store = server.local_addr().to_string();
    let start = Instant::now();
    let rank = |r: &str| {
        spawn(LIMIT, &[("RUSTCOMMS_RANK", r), ("RUSTCOMMS_WORLD_SIZE", "3"), ("RUSTCOMMS_STORE", store.as_str())])
    };
    let ranks = rank("0").and(rank("1")).and(rank("1"));
    let pids = [ranks.pid(1), ranks.pid(2)];
    for said in ranks.said() {
        assert!(said.starts_with("Bootstrap") && said.contains("rank 1 is there twice"), "{said}");
        for pid in pids {
            assert!(said.contains(&format!("pid {pid} on {}", host())), "{said}");
        }
    }
    soon(start);
}

#[test]
fn ranks_that_disagree() {
    let start = Instant::now();
    let store = memory();
    let name = host();
    for out in
        [connect(&store, "size", &[(0, 3), (1, 3), (2, 4)], LIMIT), connect(&store, "more", &[(0, 3), (1, 4)], LIMIT)]
    {
        for r in out {
            let e = r.unwrap_err();
            let what = bootstrap(&e).0;
            assert!(what.contains("says world size") && what.contains(" 3") && what.contains(" 4"), "{e}");
            assert_eq!(what.matches(&format!(" on {name}")).count(), 2, "{e}");
        }
    }
    type Change = fn(CommOptions) -> CommOptions;
    let table: [(&str, &str, Change); 3] = [
        ("checksum", "has checksums", |o| o.checksum(true)),
        ("connect", "connect=full", |o| o.hint("connect", "full")),
        ("secret", "RUSTCOMMS_SECRET", |o| o.secret(comm_core::Secret::new("s").unwrap())),
    ];
    for (label, words, change) in table {
        let make = |r: usize| options(&store, label, r, 3);
        for r in all([make(0), change(make(1)), make(2)], backend_tcp::connect) {
            let e = r.unwrap_err();
            assert!(bootstrap(&e).0.contains(words), "{label}: {e}");
        }
    }
    soon(start);
}

/// A rank of another version was here first.
#[test]
fn another_version() {
    let store = memory();
    // Protocol 999, rank 2, host "far", and what this version knows nothing of.
    let settings = [&[0xe7, 0x07, 2, 3][..], b"far", &[0xff; 30]].concat();
    store.set("rustcomms/run/skew/1/settings", &settings).unwrap();
    let start = Instant::now();
    for r in connect(&store, "skew", &[(0, 3), (1, 3)], LIMIT) {
        let e = r.unwrap_err();
        let expected = matches!(e.kind(), ErrorKind::VersionSkew { theirs: 999, who, .. } if who == "rank 2 on far");
        assert!(expected, "{e}");
    }
    soon(start);
}

#[test]
fn impossible_settings() {
    let o = || CommOptions::new().name("x").store(memory()).bootstrap_timeout(SHORT);
    let long = "x".repeat(257);
    for o in [
        o().rank_and_size(2, 2),
        o().rank_and_size(0, 0),
        o().name("").rank_and_size(0, 2),
        o().name(long).rank_and_size(0, 2),
        o().rank_and_size(0, 2).hint("connect", "some"),
    ] {
        let e = backend_tcp::connect(o).unwrap_err();
        assert_eq!(e.kind().name(), "InvalidArgument", "{e}");
    }
    for (given, meant) in [("alog", "algo"), ("conect", "connect")] {
        let e = backend_tcp::connect(o().rank_and_size(0, 1).hint(given, "ring")).unwrap_err();
        assert!(e.to_string().contains(&format!("did you mean '{meant}'")), "{e}");
    }
    // Nowhere to meet.
    let e = backend_tcp::connect(CommOptions::new().rank_and_size(0, 2)).unwrap_err();
    assert!(bootstrap(&e).0.contains("no store"), "{e}");
}

/// What is in the store was not written by ranks: whoever finds it names it, and the others learn it.
#[test]
fn garbage_in_the_store() {
    let corrupt = |e: &Error, rank: Option<usize>| matches!(e.kind(), ErrorKind::Corrupt { rank: r, .. } if *r == rank);
    let (long, junk) = (vec![1u8; 20_000], vec![0xff; 20]);
    for (i, (key, value, rank)) in [
        ("1", &junk, Some(1)),
        ("1", &long, Some(1)),
        ("settings", &junk, None),
        ("settings", &long, None),
        ("verdict", &junk, None),
        ("verdict", &long, None),
        ("arrived", &junk, None),
    ]
    .into_iter()
    .enumerate()
    {
        for (size, here) in [(2, &[(0, 2), (1, 2)][..]), (2, &[(0, 2)]), (3, &[(0, 3), (1, 3)])] {
            let (store, name) = (memory(), format!("garbage{i}"));
            store.set(&format!("rustcomms/run/{name}/1/{key}"), value).unwrap();
            let out: Vec<Error> = connect(&store, &name, here, SHORT).into_iter().map(Result::unwrap_err).collect();
            assert!(out.iter().any(|e| corrupt(e, rank)), "{key}, {size}: {out:?}");
            for e in &out {
                let told = matches!(e.kind(), ErrorKind::Bootstrap { what, .. } if what.contains("corrupt"));
                assert!(corrupt(e, rank) || told, "{key}, {size}: {e}");
            }
        }
    }
    let store = memory();
    store.set("rustcomms/run/count/current", b"many").unwrap();
    let e = connect(&store, "count", &[(0, 2)], SHORT).remove(0).unwrap_err();
    assert!(corrupt(&e, None) && e.to_string().contains("current"), "{e}");
}

/// A card in the store whose owner is gone before anybody has connected to it.
#[test]
fn a_rank_that_ends_after_all_have_come() {
    for ghost in [0usize, 1, 2] {
        let (store, name) = (memory(), format!("ghost{ghost}"));
        let life = (1u32, "", 0u64, 0u64);
        let card = (ghost, ("limbo", "nowhere"), life, 1u64, (80u16, Vec::<u8>::new()));
        let key = format!("rustcomms/run/{name}/1");
        store.set(&format!("{key}/{ghost}"), &postcard::to_allocvec(&card).unwrap()).unwrap();
        store.add(&format!("{key}/arrived"), 1).unwrap();
        let here: Vec<_> = (0..3).filter(|r| *r != ghost).map(|r| (r, 3)).collect();
        for r in connect(&store, &name, &here, SHORT) {
            let e = r.unwrap_err();
            let (what, arrived, missing) = bootstrap(&e);
            assert!(missing == [ghost] && what.contains(&format!("rank {ghost} on limbo")), "{e}");
            assert!(arrived.iter().any(|a| a.ends_with(&format!(" on {}", host()))), "{e}");
        }
    }
}

#[test]
fn a_rank_that_is_killed_while_it_waits() {
    let server = TcpStoreServer::bind("127.0.0.1:0").unwrap();
    let (store, timeout) = (server.local_addr().to_string(), Duration::from_secs(4));
    let rank = |r: &str| {
        let place = [("RUSTCOMMS_RANK", r), ("RUSTCOMMS_WORLD_SIZE", "4"), ("RUSTCOMMS_STORE", store.as_str())];
        spawn(timeout, &[&place[..], &[("RUSTCOMMS_RUN_ID", "killed")]].concat())
    };
    let mut ranks = rank("2").and(rank("0")).and(rank("1"));
    let client = TcpStore::connect(&store, LIMIT).unwrap();
    client.wait(&["rustcomms/killed/world/1/2"], LIMIT).unwrap();
    ranks.kill(0);
    for said in &ranks.said()[1..] {
        let named = said.contains(&format!("rank 2 on {}", host())) && said.contains("missing: rank 3");
        assert!(said.starts_with("Bootstrap") && named, "{said}");
    }
}

/// A rank is killed a little sooner or later after it has come: the others get an error that names it, in time, or had
/// everything already.
#[test]
fn a_rank_that_is_killed_at_any_moment() {
    for round in 0..10u64 {
        let server = TcpStoreServer::bind("127.0.0.1:0").unwrap();
        let (store, timeout, victim) = (server.local_addr().to_string(), Duration::from_secs(3), round as usize % 4);
        let rank = |r: usize| {
            let place = [("RUSTCOMMS_RANK", ["0", "1", "2", "3"][r]), ("RUSTCOMMS_WORLD_SIZE", "4")];
            let more = [
                ("RUSTCOMMS_STORE", store.as_str()),
                ("RUSTCOMMS_CONNECT", ["auto", "ring"][(round / 4 % 2) as usize]),
            ];
            spawn(timeout, &[&place[..], &more, &[("RUSTCOMMS_RUN_ID", "x")]].concat())
        };
        let mut ranks = (0..4).map(rank).reduce(boot::Processes::and).unwrap();
        let client = TcpStore::connect(&store, LIMIT).unwrap();
        client.wait(&[&format!("rustcomms/x/world/1/{victim}")], LIMIT).unwrap();
        std::thread::sleep(Duration::from_micros(round * 700));
        ranks.kill(victim);
        for (r, said) in ranks.said().iter().enumerate().filter(|(r, _)| *r != victim) {
            let named = said.contains(&format!("rank {victim}"));
            let error = (said.starts_with("Bootstrap") || said.starts_with("LOST")) && named;
            assert!(said == "OK 6" || error, "round {round}, victim {victim}, rank {r}: {said}");
        }
    }
}

#[test]
fn a_store_that_goes_away() {
    for ranks in [&[(0, 3)][..], &[(0, 3), (2, 3)]] {
        let server = TcpStoreServer::bind("127.0.0.1:0").unwrap();
        let addr = server.local_addr().to_string();
        let stores: Vec<CommOptions> = ranks
            .iter()
            .map(|(r, n)| {
                let store: Arc<dyn Store> = Arc::new(TcpStore::connect(&addr, LIMIT).unwrap());
                options(&store, "dying", *r, *n)
            })
            .collect();
        let watcher = TcpStore::connect(&addr, LIMIT).unwrap();
        let start = Instant::now();
        let killer = std::thread::spawn(move || {
            watcher.wait(&["rustcomms/run/dying/1/0"], LIMIT).unwrap();
            std::thread::sleep(Duration::from_millis(100));
            drop(server);
        });
        for r in all(stores, backend_tcp::connect) {
            let e = r.unwrap_err();
            let what = bootstrap(&e).0;
            assert!(what.contains("went away while") && what.contains(&addr), "{e}");
        }
        soon(start);
        killer.join().unwrap();
    }
}

/// Where rank 0 was to host the store, or others look for it, something else is or nothing.
#[test]
fn no_store_at_the_address() {
    // A program that says something else, one that hangs up, and one that says nothing.
    for talk in [Some(&b"HTTP/1.1 400 Bad Request\r\n\r\n"[..]), Some(b""), None] {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port().to_string();
        std::thread::spawn(move || {
            let mut kept = Vec::new();
            for s in listener.incoming() {
                let Ok(mut s) = s else { return };
                match talk {
                    Some(t) => {
                        let _ = s.read(&mut [0; 64]).and_then(|_| s.write_all(t));
                    }
                    None => kept.push(s),
                }
            }
        });
        let place =
            |r| [("RANK", r), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", port.as_str())];
        let start = Instant::now();
        let said = spawn(LIMIT, &place("0")).said().remove(0);
        let words = format!("port {port} on {} is taken by another program", host());
        assert!(said.starts_with("Bootstrap") && said.contains(&words), "{said}");
        soon(start);
        let said = spawn(SHORT, &place("1")).said().remove(0);
        assert!(said.starts_with("Bootstrap") && said.contains(&port) && said.contains("firewall"), "{said}");
    }
    // Nobody listens: the port of a listener that is closed.
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port().to_string();
    let place = [("RANK", "1"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", port.as_str())];
    let said = spawn(SHORT, &place).said().remove(0);
    let parts = ["could not be reached", &format!("127.0.0.1:{port}"), "refused", "Check that"];
    assert!(said.starts_with("Bootstrap") && parts.iter().all(|p| said.contains(p)), "{said}");
    // The address of a host on which rank 0 does not run (TEST-NET-1, nobody's).
    let place = [("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "192.0.2.1"), ("MASTER_PORT", port.as_str())];
    let said = spawn(SHORT, &place).said().remove(0);
    assert!(said.starts_with("Bootstrap") && said.contains("must be one of the host on which rank 0 runs"), "{said}");
}

/// Durations that no clock can add end nowhere near a panic.
#[test]
fn absurd_timeouts() {
    let store = memory();
    let make = move |r| options(&store, "long", r, 2).bootstrap_timeout(Duration::MAX).timeout(Duration::MAX);
    boot::use_up(world(2, make).into_iter().map(Result::unwrap).collect());
}
