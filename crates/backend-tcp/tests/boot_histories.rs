//! Ranks that have created different communicators before, or failed to, and meet all the same.

mod boot;

use std::sync::Arc;
use std::time::{Duration, Instant};

use boot::{LIMIT, SHORT, all, bootstrap, memory, options, use_up, world};
use comm_core::{Communicator, Result, Store};
use comm_store::{FileStore, TcpStore, TcpStoreServer};

fn made(name: &str, store: &Arc<dyn Store>, n: usize) -> Vec<Communicator> {
    let (name, store) = (name.to_owned(), Arc::clone(store));
    world(n, move |r| options(&store, &name, r, n)).into_iter().map(Result::unwrap).collect()
}

#[test]
fn one_after_another() {
    let server = TcpStoreServer::bind("127.0.0.1:0").unwrap();
    let tcp: Arc<dyn Store> = Arc::new(TcpStore::connect(server.local_addr(), LIMIT).unwrap());
    let dir = tempfile::tempdir().unwrap();
    let file: Arc<dyn Store> = Arc::new(FileStore::open(dir.path(), "x").unwrap());
    for store in [memory(), tcp, file] {
        // Each rank makes them in its own time, without waiting for the others.
        let store = Arc::clone(&store);
        let sums = all(0..3, move |r| {
            let mut sums = Vec::new();
            for i in 0..6 {
                let name = if i % 3 == 2 { "other" } else { "a" };
                let c = backend_tcp::connect(options(&store, name, r, 3)).unwrap();
                sums.push(boot::sum_of_ranks(&c));
                if i % 2 == 0 {
                    c.finalize(LIMIT).unwrap();
                }
            }
            sums
        });
        assert!(sums.iter().all(|s| *s == [3; 6]), "{sums:?}");
    }
}

/// Threads of each rank create communicators at the same time, of the same name and of different ones.
#[test]
fn at_once() {
    for same in [true, false] {
        let store = memory();
        let jobs: Vec<(usize, usize)> = (0..5).flat_map(|k| (0..3).map(move |r| (k, r))).collect();
        let comms = all(jobs, move |(k, r)| {
            let name = if same { "same".to_owned() } else { format!("c{k}") };
            let c = backend_tcp::connect(options(&store, &name, r, 3)).unwrap();
            boot::sum_of_ranks(&c)
        });
        assert_eq!(comms, [3; 15]);
    }
}

/// Some ranks have made communicators of the name before, of fewer ranks, and others never.
#[test]
fn different_histories() {
    let store = memory();
    use_up(made("a", &store, 2));
    use_up(made("a", &store, 2));
    use_up(made("b", &store, 3));
    use_up(made("a", &store, 5));
    use_up(made("a", &store, 3));
    use_up(made("b", &store, 5));
    // A hint where to begin that is behind, ahead of nothing, or lost.
    for value in ["1", "0", "-7"] {
        store.set("rustcomms/run/a/current", value.as_bytes()).unwrap();
        use_up(made("a", &store, 4));
    }
    store.delete_key("rustcomms/run/a/current").unwrap();
    use_up(made("a", &store, 2));
}

/// An attempt that has failed is reported to each rank once; those who try again meet, whoever was there before.
#[test]
fn a_failed_attempt_and_then_another() {
    let store = memory();
    for (round, present) in [&[0, 1][..], &[2], &[0, 2], &[0, 1, 2, 3]].into_iter().enumerate() {
        let s = Arc::clone(&store);
        let out = all(present.to_vec(), move |r| {
            backend_tcp::connect(options(&s, "again", r, 5).bootstrap_timeout(SHORT)).unwrap_err()
        });
        for e in out {
            bootstrap(&e);
            assert!(e.to_string().contains("'again'"), "{round}: {e}");
        }
    }
    // Now all five come, and try again after errors: each must need few attempts.
    let s = Arc::clone(&store);
    let out = all(0..5, move |r| {
        let start = Instant::now();
        for attempt in 0..6 {
            match backend_tcp::connect(options(&s, "again", r, 5)) {
                Ok(c) => return c,
                // Told at once, not after a timeout.
                Err(e) => assert!(start.elapsed() < LIMIT / 2, "rank {r}, attempt {attempt}: {e}"),
            }
        }
        panic!("rank {r} does not get in");
    });
    use_up(out);
}

/// A rank that comes after the others have given up learns it at once, once; then it waits for their next attempt.
#[test]
fn too_late() {
    let store = memory();
    let lonely = backend_tcp::connect(options(&store, "late", 0, 2).bootstrap_timeout(Duration::from_millis(100)));
    assert_eq!(bootstrap(&lonely.unwrap_err()).2, [1]);
    let start = Instant::now();
    let e = backend_tcp::connect(options(&store, "late", 1, 2)).unwrap_err();
    let what = bootstrap(&e).0;
    assert!(what.starts_with("rank 0 on ") && what.contains("gave up") && what.contains("closer together"), "{e}");
    assert!(start.elapsed() < LIMIT / 2);
    let e = backend_tcp::connect(options(&store, "late", 1, 2).bootstrap_timeout(SHORT)).unwrap_err();
    let (what, _, missing) = bootstrap(&e);
    assert_eq!(missing, [0]);
    assert!(what.contains("An earlier attempt had failed: ") && what.contains("rank 0 on "), "{e}");
    let s = Arc::clone(&store);
    let zero = std::thread::spawn(move || backend_tcp::connect(options(&s, "late", 0, 2)).unwrap_err());
    assert!(bootstrap(&zero.join().unwrap()).0.starts_with("rank 1 on "));
    use_up(made("late", &store, 2));
}

#[test]
fn child() {
    boot::child();
}

/// A start that has failed is no concern of a later one at the same store and under the same name.
#[test]
fn starts_after_one_that_has_failed() {
    let server = comm_store::TcpStoreServer::bind("127.0.0.1:0").unwrap();
    let addr = server.local_addr().to_string();
    let start = |ranks: &[&str], timeout: Duration| {
        let one = |r: &&str| {
            let place = [("RUSTCOMMS_RANK", *r), ("RUSTCOMMS_WORLD_SIZE", "3"), ("RUSTCOMMS_STORE", addr.as_str())];
            boot::spawn(timeout, &place)
        };
        ranks.iter().map(one).reduce(boot::Processes::and).unwrap()
    };
    for said in start(&["0", "1"], SHORT).said() {
        assert!(said.contains("missing: rank 2"), "{said}");
    }
    // Those that are started at once may still belong to it.
    std::thread::sleep(Duration::from_millis(2200));
    for _ in 0..3 {
        assert_eq!(start(&["0", "1", "2"], LIMIT).said(), ["OK 3"; 3]);
    }
}

/// Ranks that are killed while they wait leave cards at a store that lives on; so do ranks that say other things.
#[test]
fn starts_after_ranks_were_killed() {
    let server = comm_store::TcpStoreServer::bind("127.0.0.1:0").unwrap();
    let (addr, client) = {
        let addr = server.local_addr().to_string();
        (addr.clone(), comm_store::TcpStore::connect(&addr, LIMIT).unwrap())
    };
    let start = |ranks: &[usize], size: &str, timeout: Duration| {
        let one = |r: &usize| {
            let place = [("RUSTCOMMS_RANK", ["0", "1", "2"][*r]), ("RUSTCOMMS_WORLD_SIZE", size)];
            boot::spawn(timeout, &[&place[..], &[("RUSTCOMMS_STORE", &addr), ("RUSTCOMMS_RUN_ID", "again")]].concat())
        };
        ranks.iter().map(one).reduce(boot::Processes::and).unwrap()
    };
    for (round, (left, size)) in [(&[0][..], "3"), (&[1], "3"), (&[0, 2], "3"), (&[1], "2")].into_iter().enumerate() {
        let mut waiting = start(left, size, LIMIT);
        let current = client.add("rustcomms/again/world/current", 0).unwrap().max(1);
        for r in left {
            client.wait(&[&format!("rustcomms/again/world/{current}/{r}")], LIMIT).unwrap();
        }
        (0..left.len()).for_each(|i| waiting.kill(i));
        // Started in all orders: the dead rank's successor first, and last.
        let order: &[usize] = if round % 2 == 0 { &[0, 1, 2] } else { &[2, 1, 0] };
        assert_eq!(start(order, "3", LIMIT).said(), ["OK 3"; 3], "round {round}");
    }
}

/// One has the wrong settings, corrects them and tries again, as do the others.
#[test]
fn corrected_settings() {
    let store = memory();
    let out = all(0..3, move |r| {
        let mut failures = 0;
        loop {
            let o = options(&store, "fix", r, 3).checksum(r == 1 && failures == 0);
            match backend_tcp::connect(o) {
                Ok(c) => return c,
                Err(e) => {
                    failures += 1;
                    assert!(failures < 5 && bootstrap(&e).0.contains("checksums"), "rank {r}: {e}");
                }
            }
        }
    });
    use_up(out);
}
