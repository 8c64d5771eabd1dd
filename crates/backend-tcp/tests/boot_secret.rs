//! Ranks with a secret: alike they meet; otherwise they say what is wrong.

mod boot;

use std::time::{Duration, Instant};

use boot::{LIMIT, all, bootstrap, memory, options, use_up};
use comm_core::{ErrorKind, Secret};
use comm_store::TcpStoreServerOptions;

fn secret(s: &str) -> Secret {
    Secret::new(s).unwrap()
}

#[test]
fn the_same_secret() {
    for connect in ["auto", "full", "ring"] {
        let store = memory();
        let comms = all(0..4, move |r| {
            let o = options(&store, "same", r, 4).secret(secret("x")).hint("connect", connect);
            backend_tcp::connect(o).unwrap()
        });
        use_up(comms);
    }
}

/// One rank has another secret than the rest: all ranks fail, before the deadline, and the cause is named.
#[test]
fn another_secret() {
    for odd in 0..3 {
        let (store, start) = (memory(), Instant::now());
        let out = all(0..3, move |r| {
            let s = if r == odd { "y" } else { "x" };
            backend_tcp::connect(options(&store, "odd", r, 3).secret(secret(s))).unwrap_err()
        });
        for e in &out {
            let what = bootstrap(e).0;
            assert!(what.contains("RUSTCOMMS_SECRET") && what.contains("same on all ranks"), "{e}");
            assert!(!what.contains("panic"));
        }
        assert!(start.elapsed() < LIMIT / 2);
    }
}

#[test]
fn a_secret_on_one_side() {
    for with in 0..3 {
        let (store, start) = (memory(), Instant::now());
        let out = all(0..3, move |r| {
            let o = options(&store, "side", r, 3);
            backend_tcp::connect(if r == with { o.secret(secret("x")) } else { o }).unwrap_err()
        });
        for e in out {
            let what = bootstrap(&e).0;
            let both = what.contains("has a secret") && what.contains("has no secret");
            assert!(both && what.contains(&format!("rank {with} on")), "{e}");
        }
        assert!(start.elapsed() < LIMIT / 2);
    }
}

#[test]
fn the_secret_is_in_no_record_and_no_error() {
    let store = memory();
    let s = std::sync::Arc::clone(&store);
    let comms =
        all(0..2, move |r| backend_tcp::connect(options(&s, "hidden", r, 2).secret(secret("correct horse"))).unwrap());
    use_up(comms);
    for key in store.list_keys().unwrap() {
        let value = store.get(&key, LIMIT).unwrap();
        assert!(!value.windows(7).any(|w| w == b"correct"), "{key}");
    }
    let e = Secret::new("").unwrap_err();
    assert!(matches!(e.kind(), ErrorKind::InvalidArgument { .. }));
}

#[test]
fn child() {
    boot::child();
}

/// The secret comes from the environment, for the store, too; an empty one is no secret.
#[test]
fn secrets_of_the_environment() {
    let server = |s: Option<&str>| TcpStoreServerOptions::new().secret(s.map(secret)).bind("127.0.0.1:0").unwrap();
    let rank = |r: usize, addr: &str, timeout: Duration, secret: Option<&str>| {
        let place = [("RUSTCOMMS_RANK", ["0", "1"][r]), ("RUSTCOMMS_WORLD_SIZE", "2"), ("RUSTCOMMS_STORE", addr)];
        let variable = secret.map(|s| ("RUSTCOMMS_SECRET", s));
        boot::spawn(timeout, &place.into_iter().chain(variable).collect::<Vec<_>>())
    };
    let store = server(Some("x"));
    let addr = store.local_addr().to_string();
    assert_eq!(rank(0, &addr, LIMIT, Some("x")).and(rank(1, &addr, LIMIT, Some("x"))).said(), ["OK 1"; 2]);

    // Who does not know the store's secret, or wants one of it that it has not, hears it at once.
    let open = server(None);
    for (store, wrong) in [(&store, Some("y")), (&store, None), (&open, Some("x"))] {
        let start = Instant::now();
        let said = rank(1, &store.local_addr().to_string(), LIMIT, wrong).said().remove(0);
        assert!(said.starts_with("Bootstrap") && said.contains("RUSTCOMMS_SECRET"), "{wrong:?}: {said}");
        assert!(start.elapsed() < LIMIT / 2, "{wrong:?}");
    }
    let said = rank(0, "127.0.0.1:1", LIMIT, Some("")).said().remove(0);
    assert!(said.starts_with("InvalidArgument") && said.contains("protects nothing"), "{said}");
}
