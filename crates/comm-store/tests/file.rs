//! What only a store in files has: runs that must not meet, processes that die, directories that are not there.

mod common;

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use comm_core::{ErrorKind, Store};
use comm_store::FileStore;
use common::{LONG, Shared, eventually};

const DIR: &str = "RUSTCOMMS_TEST_DIR";
const WHAT: &str = "RUSTCOMMS_TEST_WHAT";

/// A process of this binary that runs [`child`]; it is killed with this value.
struct Process(Child);

impl Process {
    fn start(dir: &Path, what: &str) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "child", "--nocapture"]).env(DIR, dir).env(WHAT, what);
        Self(command.stdin(Stdio::null()).stdout(Stdio::null()).spawn().unwrap())
    }

    fn ends_well(mut self) {
        let start = Instant::now();
        loop {
            if let Some(status) = self.0.try_wait().unwrap() {
                assert!(status.success(), "{status}");
                return;
            }
            assert!(start.elapsed() < LONG, "a child does not end");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

const PROCESSES: usize = 4;
const ADDS: i64 = 60;

/// Not a test of its own: what a child process does.
#[test]
fn child() {
    let (Ok(dir), Ok(what)) = (std::env::var(DIR), std::env::var(WHAT)) else { return };
    let store = FileStore::open(&dir, "job").unwrap();
    match what.as_str() {
        "writes for ever" => {
            for i in 0u64.. {
                store.set("busy", &i.to_le_bytes().repeat(5000)).unwrap();
                store.add("count", 1).unwrap();
                store.queue_push("grows", b"x").unwrap();
                store.queue_pop("grows", LONG).unwrap();
            }
        }
        me => {
            store.set(&format!("card/{me}"), me.as_bytes()).unwrap();
            let names: Vec<String> = (0..PROCESSES).map(|p| format!("card/{p}")).collect();
            let got = store.multi_get(&names.iter().map(String::as_str).collect::<Vec<_>>(), LONG).unwrap();
            assert!(got.iter().enumerate().all(|(p, v)| v == p.to_string().as_bytes()));
            for _ in 0..ADDS {
                store.add("sum", 1).unwrap();
                store.append("text", me.as_bytes()).unwrap();
            }
            store.queue_push("done", store.nonce().as_bytes()).unwrap();
        }
    }
}

#[test]
fn processes_meet() {
    let shared = Shared::new();
    // Nobody has made the run: the processes agree on one.
    let all: Vec<Process> = (0..PROCESSES).map(|p| Process::start(&shared.0, &p.to_string())).collect();
    let store = FileStore::open(&shared.0, "job").unwrap();
    for _ in 0..PROCESSES {
        assert_eq!(store.queue_pop("done", LONG).unwrap(), store.nonce().as_bytes());
    }
    all.into_iter().for_each(Process::ends_well);
    assert_eq!(store.add("sum", 0).unwrap(), PROCESSES as i64 * ADDS);
    let mut text = store.get("text", LONG).unwrap();
    text.sort_unstable();
    let want: Vec<u8> = (0..PROCESSES).flat_map(|p| p.to_string().into_bytes().repeat(ADDS as usize)).collect();
    assert_eq!(text, want);
    store.remove().unwrap();
    assert_eq!(std::fs::read_dir(&shared.0).unwrap().count(), 0);
}

#[test]
fn a_killed_writer_leaves_the_store_usable() {
    let shared = Shared::new();
    let store = FileStore::open(&shared.0, "job").unwrap();
    for round in 0..5 {
        let writer = Process::start(&shared.0, "writes for ever");
        let before = store.add("count", 0).unwrap();
        eventually("the writer writes", || store.add("count", 0).unwrap() > before + 20 + round);
        drop(writer);
        let busy = store.get("busy", LONG).unwrap();
        assert!(busy.len() == 40_000 && busy.chunks(8).all(|c| c == &busy[..8]), "half a value");
        let n = store.add("count", 1).unwrap();
        assert_eq!(store.add("count", 1).unwrap(), n + 1);
        store.list_keys().unwrap();
    }
    store.remove().unwrap();
}

#[test]
fn runs_do_not_meet() {
    let shared = Shared::new();
    let old = FileStore::create_new(&shared.0, "41234.0").unwrap();
    old.set("k", b"old").unwrap();
    let new = FileStore::create_new(&shared.0, "41234.1").unwrap();
    assert!(!new.check(&["k"]).unwrap());
    let odd = FileStore::open(&shared.0, "../a b/é").unwrap();
    assert_eq!(odd.path().parent(), new.path().parent());
    let e = FileStore::create_new(&shared.0, "41234.0").unwrap_err().to_string();
    assert!(e.contains("'41234.0' has left its store") && e.contains("remove that directory"), "{e}");
    assert_eq!(FileStore::open(&shared.0, "41234.0").unwrap().get("k", LONG).unwrap(), b"old");
    assert!(FileStore::open(&shared.0, "").unwrap_err().to_string().contains("name of its run"));
}

#[test]
fn a_removed_or_replaced_run_is_noticed() {
    let shared = Shared::new();
    let first = FileStore::open(&shared.0, "r").unwrap();
    let same = FileStore::open(&shared.0, "r").unwrap();
    assert_eq!(first.nonce(), same.nonce());
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| same.get("never", LONG));
        std::thread::sleep(Duration::from_millis(20));
        first.remove().unwrap();
        let e = waits.join().unwrap().unwrap_err();
        assert!(matches!(e.kind(), ErrorKind::Io { .. }), "{e}");
        assert!(e.to_string().contains("run 'r' was removed") && e.to_string().contains("get('never')"), "{e}");
    });
    let check = |want: &str| {
        for e in [
            same.set("k", b"1").unwrap_err(),
            same.add("k", 1).unwrap_err(),
            same.check(&["k"]).unwrap_err(),
            same.queue_len("k").unwrap_err(),
            same.list_keys().unwrap_err(),
            same.remove().unwrap_err(),
        ] {
            assert!(e.to_string().contains(want), "{e}");
        }
    };
    check("was removed");
    let second = FileStore::create_new(&shared.0, "r").unwrap();
    assert_ne!(second.nonce(), same.nonce());
    check("was replaced by another run");
    assert_eq!(second.num_keys().unwrap(), 0);
}

#[test]
fn a_directory_that_will_not_do_is_named() {
    let shared = Shared::new();
    let file = shared.0.join("file");
    std::fs::write(&file, b"").unwrap();
    std::fs::create_dir_all(shared.0.join("other/things")).unwrap();
    std::fs::create_dir(shared.0.join("odd")).unwrap();
    std::fs::write(shared.0.join("odd/run"), b"rustcomms file store 9").unwrap();
    for (dir, run, want) in [
        (shared.0.join("none").as_path(), "r", "none does not exist: make it"),
        (&file, "r", "file is not a directory"),
        (&shared.0, "other", "other is there, but not as the store of this run"),
        (&shared.0, "odd", "odd is there, but not as the store of this run"),
    ] {
        let e = FileStore::open(dir, run).unwrap_err();
        assert!(matches!(e.kind(), ErrorKind::Io { .. }) && e.to_string().contains(want), "{e}");
    }
    assert_eq!(std::fs::read_dir(&shared.0).unwrap().count(), 3);
    if cfg!(target_os = "linux") {
        // Nobody can make directories here, not even root.
        let e = FileStore::open("/proc/self", "r").unwrap_err().to_string();
        assert!(e.contains("cannot be written") && e.contains("all ranks must be able to"), "{e}");
    }
}

#[test]
fn long_keys_and_damaged_files() {
    let shared = Shared::new();
    let store = FileStore::open(&shared.0, "r").unwrap();
    let keys: Vec<String> = ["a", "b"].iter().map(|end| "ключ/".repeat(800) + end).collect();
    for key in &keys {
        store.set(key, key.as_bytes()).unwrap();
        store.queue_push(key, b"q").unwrap();
    }
    for key in &keys {
        assert_eq!(store.get(key, LONG).unwrap(), key.as_bytes());
        assert_eq!(store.queue_pop(key, LONG).unwrap(), b"q");
    }
    let mut listed = store.list_keys().unwrap();
    listed.sort();
    assert_eq!(listed, keys);
    for bytes in [&b""[..], b"rcf2", &record("other", b"1"), b"rcf1\x03\0\0\0key1", &[0xff; 500]] {
        std::fs::write(store.path().join("k.key"), bytes).unwrap();
        refused(&store, "");
    }
    // An element of 2^64-1 bytes, and one of which half is there.
    for body in [&[0xff; 8][..], &[4, 0, 0, 0, 0, 0, 0, 0, 1, 2], &[1]] {
        std::fs::write(store.path().join("q.key"), record("key", body)).unwrap();
        for e in [store.queue_pop("key", LONG).unwrap_err(), store.queue_len("key").unwrap_err()] {
            assert!(e.to_string().contains("middle of an element"), "{e}");
        }
    }
    store.set("key", b"good").unwrap();
    assert_eq!(store.get("key", LONG).unwrap(), b"good");
}

/// What the store writes for a value or a queue.
fn record(key: &str, body: &[u8]) -> Vec<u8> {
    let (lens, hash) = ((key.len() as u32, body.len() as u64), comm_core::Fnv::hash(body));
    let parts = [&b"rcf2"[..], &lens.0.to_le_bytes(), &lens.1.to_le_bytes(), &hash.to_le_bytes(), key.as_bytes(), body];
    parts.concat()
}

/// Every call on the damaged `key` fails with `Corrupt`, which names its file.
fn refused(store: &FileStore, words: &str) {
    for e in [
        store.get("key", LONG).unwrap_err(),
        store.add("key", 1).unwrap_err(),
        store.append("key", b"1").unwrap_err(),
        store.multi_get(&["key"], LONG).unwrap_err(),
        store.compare_set("key", b"", b"1").unwrap_err(),
    ] {
        assert!(matches!(e.kind(), ErrorKind::Corrupt { .. }), "{e}");
        assert!(e.to_string().contains("k.key") && e.to_string().contains(words), "{e}");
    }
}

#[test]
fn values_that_are_cut_off_or_altered_are_noticed() {
    let shared = Shared::new();
    let store = FileStore::open(&shared.0, "r").unwrap();
    store.set("key", b"12345").unwrap();
    let file = store.path().join("k.key");
    let whole = std::fs::read(&file).unwrap();
    assert_eq!(whole, record("key", b"12345"));
    for len in 0..whole.len() {
        std::fs::write(&file, &whole[..len]).unwrap();
        refused(&store, "");
    }
    std::fs::write(&file, &whole[..whole.len() - 1]).unwrap();
    refused(&store, "cut off");
    std::fs::write(&file, [&whole[..], b"6"].concat()).unwrap();
    refused(&store, "longer");
    for at in 0..whole.len() {
        let mut bent = whole.clone();
        bent[at] ^= 1;
        std::fs::write(&file, &bent).unwrap();
        refused(&store, "");
    }
    std::fs::write(&file, &whole).unwrap();
    assert_eq!(store.add("key", 0).unwrap(), 12_345);
}

/// What lies in a value's place must neither be waited for nor read without end.
#[test]
fn what_is_no_file_or_too_large_is_refused() {
    let shared = Shared::new();
    let store = FileStore::open(&shared.0, "r").unwrap();
    let file = store.path().join("k.key");
    assert!(Command::new("mkfifo").arg(&file).status().unwrap().success());
    refused(&store, "is no file");
    std::fs::remove_file(&file).unwrap();
    std::fs::create_dir(&file).unwrap();
    refused(&store, "is no file");
    std::fs::remove_dir(&file).unwrap();
    // Without blocks on the disk.
    std::fs::File::create(&file).unwrap().set_len(1 << 40).unwrap();
    let e = store.get("key", LONG).unwrap_err();
    assert!(matches!(e.kind(), ErrorKind::Corrupt { .. }) && e.to_string().contains("more than"), "{e}");
    let e = store.set("key", &vec![0; 256 << 20]).unwrap_err();
    assert!(matches!(e.kind(), ErrorKind::InvalidArgument { .. }) && e.to_string().contains("the most is"), "{e}");
    let e = store.set(&"k".repeat(9000), b"").unwrap_err();
    assert!(matches!(e.kind(), ErrorKind::InvalidArgument { .. }) && e.to_string().contains("the most is"), "{e}");
}

#[test]
fn a_marker_of_garbage_is_no_run() {
    let shared = Shared::new();
    let store = FileStore::open(&shared.0, "r").unwrap();
    let marker = store.path().join("run");
    for garbage in [&b""[..], b"\xff\xfe\0", b"rustcomms file store 1\nx\nr\n", &[b'x'; 100_000]] {
        std::fs::write(&marker, garbage).unwrap();
        assert!(FileStore::open(&shared.0, "r").is_err());
        let e = store.set("k", b"v").unwrap_err();
        assert!(matches!(e.kind(), ErrorKind::Corrupt { .. }), "{e}");
    }
}

#[test]
fn a_lock_that_is_never_released_ends_in_an_error() {
    let shared = Shared::new();
    let store = FileStore::open(&shared.0, "r").unwrap();
    let held = std::fs::File::options().write(true).open(store.path().join("lock")).unwrap();
    held.lock().unwrap();
    let hasty = store.with_timeout(Duration::from_millis(50));
    let e = hasty.set("k", b"v").unwrap_err();
    assert!(
        matches!(e.kind(), ErrorKind::Timeout { .. }) && e.to_string().contains("waiting for those who write"),
        "{e}"
    );
    held.unlock().unwrap();
    hasty.set("k", b"v").unwrap();
    assert_eq!(store.get("k", LONG).unwrap(), b"v");
}
