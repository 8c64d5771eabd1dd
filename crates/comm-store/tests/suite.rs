//! Every store behaves alike.

mod common;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use comm_core::{ErrorKind, Phase, Store};
use comm_store::{FileStore, MemoryStore, PrefixStore, TcpStore, TcpStoreServer};
use common::LONG;

const SHORT: Duration = Duration::from_millis(60);

fn with_tcp(f: impl FnOnce(Arc<dyn Store>)) {
    let server = TcpStoreServer::bind("127.0.0.1:0").unwrap();
    f(Arc::new(TcpStore::connect(server.local_addr(), LONG).unwrap()));
}

fn with_file(f: impl FnOnce(Arc<dyn Store>)) {
    let shared = common::Shared::new();
    let store = FileStore::open(&shared.0, "suite").unwrap();
    f(Arc::new(store.clone()));
    store.remove().unwrap();
    assert_eq!(std::fs::read_dir(&shared.0).unwrap().count(), 0);
}

macro_rules! suite {
    ($($name:ident),*) => {
        mod memory {
            $(#[test] fn $name() { super::$name(super::Arc::new(super::MemoryStore::new())) })*
        }
        mod tcp {
            $(#[test] fn $name() { super::with_tcp(super::$name) })*
        }
        mod file {
            $(#[test] fn $name() { super::with_file(super::$name) })*
        }
        mod prefix_of_memory {
            use super::{Arc, MemoryStore, PrefixStore};
            $(#[test] fn $name() { super::$name(Arc::new(PrefixStore::new("p", Arc::new(MemoryStore::new())))) })*
        }
        mod prefix_of_tcp {
            use super::{Arc, PrefixStore};
            $(#[test] fn $name() { super::with_tcp(|s| super::$name(Arc::new(PrefixStore::new("a/b", s)))) })*
        }
    };
}

suite!(
    values,
    numbers,
    compare_set,
    check_and_wait,
    timeouts_say_what_and_leave_the_store_usable,
    a_blocked_get_blocks_nobody,
    a_wait_is_ended_by_every_kind_of_write,
    many_threads_wait,
    queues,
    consumers_share_a_queue,
    adds_are_atomic,
    listing_and_deleting
);

fn values(s: Arc<dyn Store>) {
    s.set("k", b"v1").unwrap();
    assert_eq!(s.get("k", LONG).unwrap(), b"v1");
    s.set("k", b"").unwrap();
    assert_eq!(s.get("k", LONG).unwrap(), b"");
    s.append("k", b"ab").unwrap();
    s.append("k", &[0, 255]).unwrap();
    s.append("new", b"x").unwrap();
    assert_eq!(s.get("k", LONG).unwrap(), b"ab\0\xff");
    s.multi_set(&[("m1", b"1"), ("m2", b""), ("m3", b"333")]).unwrap();
    let got = s.multi_get(&["m3", "new", "m2", "m1"], LONG).unwrap();
    assert_eq!(got, [&b"333"[..], b"x", b"", b"1"]);
    assert_eq!(s.multi_get(&[], LONG).unwrap(), Vec::<Vec<u8>>::new());
    let big: Vec<u8> = (0..8 << 20).map(|i: u32| (i * 7) as u8).collect();
    s.set("big", &big).unwrap();
    assert!(s.get("big", LONG).unwrap() == big);
    s.set("", b"empty name").unwrap();
    s.set("ключ/é", b"utf8").unwrap();
    assert_eq!(s.get("", LONG).unwrap(), b"empty name");
    assert_eq!(s.get("ключ/é", LONG).unwrap(), b"utf8");
}

fn numbers(s: Arc<dyn Store>) {
    assert_eq!(s.add("n", 5).unwrap(), 5);
    assert_eq!(s.add("n", -7).unwrap(), -2);
    assert_eq!(s.get("n", LONG).unwrap(), b"-2");
    s.set("n", b" 40 apples").unwrap();
    assert_eq!(s.add("n", 2).unwrap(), 42);
    s.set("text", b"apples").unwrap();
    s.set("max", i64::MAX.to_string().as_bytes()).unwrap();
    for key in ["text", "max"] {
        let e = s.add(key, 1).unwrap_err();
        assert!(matches!(e.kind(), ErrorKind::InvalidArgument { .. }), "{e}");
        assert!(e.to_string().contains("no decimal number"), "{e}");
    }
    assert_eq!(s.get("text", LONG).unwrap(), b"apples");
    assert_eq!(s.add("n", 0).unwrap(), 42);
}

fn compare_set(s: Arc<dyn Store>) {
    assert_eq!(s.compare_set("k", b"x", b"y").unwrap(), b"x");
    assert!(!s.check(&["k"]).unwrap());
    assert_eq!(s.compare_set("k", b"", b"first").unwrap(), b"first");
    assert_eq!(s.compare_set("k", b"", b"second").unwrap(), b"first");
    assert_eq!(s.compare_set("k", b"first", b"third").unwrap(), b"third");
    assert_eq!(s.compare_set("k", b"first", b"fourth").unwrap(), b"third");
    assert_eq!(s.get("k", LONG).unwrap(), b"third");
}

fn check_and_wait(s: Arc<dyn Store>) {
    assert!(s.check(&[]).unwrap());
    assert!(!s.check(&["a"]).unwrap());
    s.set("a", b"").unwrap();
    assert!(s.check(&["a"]).unwrap());
    assert!(!s.check(&["a", "b"]).unwrap());
    s.wait(&[], LONG).unwrap();
    s.wait(&["a", "a"], LONG).unwrap();
    // Time enough: it exists, so even no time at all suffices.
    s.wait(&["a"], Duration::ZERO).unwrap();
    s.queue_push("q", b"1").unwrap();
    assert!(s.check(&["q"]).unwrap());
    s.wait(&["a", "q"], LONG).unwrap();
    let names: Vec<String> = (0..5000).map(|i| format!("many{i}")).collect();
    let keys: Vec<&str> = names.iter().map(String::as_str).collect();
    let pairs: Vec<(&str, &[u8])> = keys.iter().map(|k| (*k, k.as_bytes())).collect();
    s.multi_set(&pairs).unwrap();
    s.wait(&keys, LONG).unwrap();
    assert!(s.multi_get(&keys, LONG).unwrap().iter().zip(&keys).all(|(v, k)| v == k.as_bytes()));
}

fn timeouts_say_what_and_leave_the_store_usable(s: Arc<dyn Store>) {
    let start = Instant::now();
    for i in 0..5 {
        for (call, e) in [
            ("store get('", s.get("missing", SHORT).unwrap_err()),
            ("store wait('", s.wait(&["missing", "too"], SHORT).unwrap_err()),
            ("store multi_get('", s.multi_get(&["missing"], SHORT).unwrap_err()),
            ("store queue_pop('", s.queue_pop("missing", SHORT).unwrap_err()),
            ("store get('", s.get("missing", Duration::ZERO).unwrap_err()),
        ] {
            match e.kind() {
                ErrorKind::Timeout { phase: Phase::Running, elapsed, missing, .. } => {
                    assert!(missing.is_empty() && *elapsed < LONG);
                }
                other => panic!("{other:?}"),
            }
            let op = e.context().op.clone().unwrap();
            assert!(op.starts_with(call) && op.contains("missing'"), "{op}");
        }
        let n = i.to_string();
        s.set("there", n.as_bytes()).unwrap();
        assert_eq!(s.get("there", LONG).unwrap(), n.as_bytes());
    }
    assert!(start.elapsed() >= SHORT * 20, "timeouts came early");
}

fn a_blocked_get_blocks_nobody(s: Arc<dyn Store>) {
    std::thread::scope(|scope| {
        let got = scope.spawn(|| s.get("late", LONG));
        // The other thread may not wait yet; many rounds make sure that it does in most.
        for i in 0..200 {
            s.set("other", &[i]).unwrap();
            assert_eq!(s.get("other", LONG).unwrap(), [i]);
        }
        assert!(!got.is_finished());
        s.set("late", b"now").unwrap();
        assert_eq!(got.join().unwrap().unwrap(), b"now");
    });
}

fn a_wait_is_ended_by_every_kind_of_write(s: Arc<dyn Store>) {
    type Write = fn(&dyn Store, &str);
    let writes: [(&str, Write); 6] = [
        ("set", |s, k| s.set(k, b"1").unwrap()),
        ("add", |s, k| assert_eq!(s.add(k, 1).unwrap(), 1)),
        ("append", |s, k| s.append(k, b"1").unwrap()),
        ("compare_set", |s, k| assert_eq!(s.compare_set(k, b"", b"1").unwrap(), b"1")),
        ("multi_set", |s, k| s.multi_set(&[("unrelated", b"1"), (k, b"1")]).unwrap()),
        ("queue_push", |s, k| s.queue_push(k, b"1").unwrap()),
    ];
    for (name, write) in writes {
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| s.wait(&[name], LONG));
            std::thread::sleep(Duration::from_millis(20));
            assert!(!waits.is_finished(), "{name}");
            write(&*s, name);
            waits.join().unwrap().unwrap();
        });
    }
}

fn many_threads_wait(s: Arc<dyn Store>) {
    const THREADS: usize = 48;
    let start = Barrier::new(THREADS + 1);
    std::thread::scope(|scope| {
        for t in 0..THREADS {
            let (s, start) = (&s, &start);
            scope.spawn(move || {
                start.wait();
                // Each waits for its neighbour's key, for one of its own, and for one that all wait for.
                let (own, next) = (format!("t{t}"), format!("t{}", (t + 1) % THREADS));
                s.set(&own, own.as_bytes()).unwrap();
                let got = s.multi_get(&[&next, "go", &own], LONG).unwrap();
                assert_eq!(got, [next.as_bytes(), b"!", own.as_bytes()]);
            });
        }
        start.wait();
        std::thread::sleep(Duration::from_millis(30));
        s.set("go", b"!").unwrap();
    });
}

fn queues(s: Arc<dyn Store>) {
    assert_eq!(s.queue_len("q").unwrap(), 0);
    for v in [&b"1"[..], b"", b"333"] {
        s.queue_push("q", v).unwrap();
    }
    assert_eq!(s.queue_len("q").unwrap(), 3);
    for v in [&b"1"[..], b"", b"333"] {
        assert_eq!(s.queue_pop("q", LONG).unwrap(), v);
    }
    assert_eq!(s.queue_len("q").unwrap(), 0);
    assert!(!s.check(&["q"]).unwrap());
    // A plain value of that name ends waits at once and is still no element.
    s.set("q", b"value").unwrap();
    assert!(matches!(s.queue_pop("q", SHORT).unwrap_err().kind(), ErrorKind::Timeout { .. }));
    assert!(!s.list_keys().unwrap().contains(&"other".to_owned()));
}

fn consumers_share_a_queue(s: Arc<dyn Store>) {
    const CONSUMERS: usize = 6;
    const EACH: usize = 20;
    let sum = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..CONSUMERS {
            scope.spawn(|| {
                for _ in 0..EACH {
                    let v = s.queue_pop("jobs", LONG).unwrap();
                    sum.fetch_add(String::from_utf8(v).unwrap().parse().unwrap(), Ordering::Relaxed);
                }
            });
        }
        for i in 0..CONSUMERS * EACH {
            s.queue_push("jobs", i.to_string().as_bytes()).unwrap();
        }
    });
    assert_eq!(sum.into_inner(), (0..CONSUMERS * EACH).sum());
}

fn adds_are_atomic(s: Arc<dyn Store>) {
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                for _ in 0..50 {
                    s.add("n", 3).unwrap();
                }
            });
        }
    });
    assert_eq!(s.add("n", 0).unwrap(), 8 * 50 * 3);
}

fn listing_and_deleting(s: Arc<dyn Store>) {
    assert_eq!(s.num_keys().unwrap(), 0);
    for k in ["a", "b", "c/d"] {
        s.set(k, b"1").unwrap();
    }
    s.queue_push("queue", b"1").unwrap();
    assert_eq!(s.num_keys().unwrap(), 3);
    let mut keys = s.list_keys().unwrap();
    keys.sort();
    assert_eq!(keys, ["a", "b", "c/d"]);
    assert!(s.delete_key("b").unwrap());
    assert!(!s.delete_key("b").unwrap());
    assert!(!s.check(&["b"]).unwrap());
    assert_eq!(s.num_keys().unwrap(), 2);
}

#[test]
fn prefixes_keep_apart_and_nest() {
    let base: Arc<dyn Store> = Arc::new(MemoryStore::new());
    let a: Arc<dyn Store> = Arc::new(PrefixStore::new("a", Arc::clone(&base)));
    let b = PrefixStore::new("b", Arc::clone(&base));
    let ab = PrefixStore::new("b", Arc::clone(&a));
    a.set("k", b"1").unwrap();
    b.set("k", b"2").unwrap();
    ab.set("k", b"3").unwrap();
    let mut keys = base.list_keys().unwrap();
    keys.sort();
    assert_eq!(keys, ["a/b/k", "a/k", "b/k"]);
    assert_eq!(b.list_keys().unwrap(), ["k"]);
    assert_eq!(ab.list_keys().unwrap(), ["k"]);
}

#[test]
fn clones_of_a_memory_store_share() {
    let a = MemoryStore::new();
    let b = a.clone();
    a.set("k", b"1").unwrap();
    assert_eq!(b.get("k", LONG).unwrap(), b"1");
}
