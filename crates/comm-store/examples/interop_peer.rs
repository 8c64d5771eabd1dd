//! The Rust end of `cargo xtask interop-store`; the other one is PyTorch.
//!
//! `interop_peer serve` runs a server until its standard input ends, and prints its port first.
//! `interop_peer check PORT libuv|legacy` tries every operation on a server of PyTorch's of that kind, and prints a line for
//! each check: `ok NAME` or `FAILED NAME: why`.

use std::io::Read;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use comm_core::{Error, ErrorKind, Result, Store};
use comm_store::{PrefixStore, TcpStore, TcpStoreServer};

const LONG: Duration = Duration::from_secs(30);
const SHORT: Duration = Duration::from_millis(200);

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let ended = match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["serve"] => serve().map(|()| true),
        ["check", port, kind] => Ok(check(&format!("127.0.0.1:{port}"), kind == "libuv")),
        _ => Err(Error::invalid("usage: interop_peer serve | check PORT libuv|legacy")),
    };
    match ended {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(e) => {
            eprintln!("interop_peer: {e}");
            ExitCode::FAILURE
        }
    }
}

fn serve() -> Result<()> {
    let server = TcpStoreServer::bind("127.0.0.1:0")?;
    println!("{}", server.local_addr().port());
    // Until whoever started this is gone, or closes the pipe.
    let _ = std::io::stdin().read_to_end(&mut Vec::new());
    Ok(())
}

type Check = fn(&TcpStore) -> Outcome;
type Outcome = std::result::Result<(), String>;

/// Fails the check when two values differ.
fn same<T: PartialEq + std::fmt::Debug>(what: &str, got: T, want: T) -> Outcome {
    if got == want {
        return Ok(());
    }
    let short = |v: T| format!("{v:?}").chars().take(200).collect::<String>();
    Err(format!("{what}: {} instead of {}", short(got), short(want)))
}

/// What the call should have ended with.
fn fails<T: std::fmt::Debug>(what: &str, result: Result<T>, kind: fn(&ErrorKind) -> bool) -> Outcome {
    match result {
        Err(e) if kind(e.kind()) => Ok(()),
        other => Err(format!("{what}: {other:?}")),
    }
}

fn timeout(kind: &ErrorKind) -> bool {
    matches!(kind, ErrorKind::Timeout { .. })
}

fn text<T>(result: Result<T>) -> std::result::Result<T, String> {
    result.map_err(|e| e.to_string())
}

fn check(addr: &str, libuv: bool) -> bool {
    let both: [(&str, Check); 14] = [
        ("set and get", set_and_get),
        ("values of all bytes, and of 4 MiB", big_and_binary),
        ("add", add),
        ("check", present),
        ("wait, woken by another connection", woken),
        ("waits that run out, and the connection after them", run_out),
        ("compare_set", compare_set),
        ("delete_key and num_keys", delete_and_count),
        ("append", append),
        ("multi_set and multi_get", several),
        ("list_keys", list),
        ("PrefixStore in a PrefixStore", prefixes),
        ("8 threads on one client", threads),
        ("8 clients", clients),
    ];
    let queues: (&str, Check) =
        if libuv { ("queues", queues) } else { ("queues are refused by a server without them", no_queues) };
    let mut all = true;
    for (name, f) in both.into_iter().chain([queues, ("what was left for PyTorch", leave)]) {
        match text(TcpStore::connect(addr, LONG)).and_then(|store| f(&store.with_timeout(LONG))) {
            Ok(()) => println!("ok {name}"),
            Err(why) => {
                all = false;
                println!("FAILED {name}: {why}");
            }
        }
    }
    all
}

fn set_and_get(s: &TcpStore) -> Outcome {
    text(s.set("sg/k", b"v1"))?;
    same("get", text(s.get("sg/k", LONG))?, b"v1".to_vec())?;
    text(s.set("sg/k", b""))?;
    same("an empty value", text(s.get("sg/k", LONG))?, Vec::new())?;
    let key = format!("sg/{}", "é".repeat(2000));
    text(s.set(&key, b"x"))?;
    same("a long key", text(s.get(&key, LONG))?, b"x".to_vec())?;
    same("PyTorch's value", text(s.get("from python", LONG))?, b"py\x00\xff".to_vec())
}

fn big_and_binary(s: &TcpStore) -> Outcome {
    let bytes: Vec<u8> = (0..=255).collect();
    text(s.set("big/bytes", &bytes))?;
    same("all bytes", text(s.get("big/bytes", LONG))?, bytes)?;
    let big: Vec<u8> = (0..4u32 << 20).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    text(s.set("big/4m", &big))?;
    if text(s.get("big/4m", LONG))? == big { Ok(()) } else { Err("4 MiB came back changed".into()) }
}

fn add(s: &TcpStore) -> Outcome {
    same("from nothing", text(s.add("add/n", 5))?, 5)?;
    same("negative", text(s.add("add/n", -7))?, -2)?;
    same("as text", text(s.get("add/n", LONG))?, b"-2".to_vec())?;
    text(s.set("add/n", b"41"))?;
    same("to text", text(s.add("add/n", 1))?, 42)?;
    same("large", text(s.add("add/big", i64::MAX))?, i64::MAX)
}

fn present(s: &TcpStore) -> Outcome {
    text(s.set("check/a", b"1"))?;
    same("both", text(s.check(&["check/a", "check/b"]))?, false)?;
    text(s.set("check/b", b""))?;
    same("both now", text(s.check(&["check/a", "check/b"]))?, true)?;
    text(s.wait(&["check/a", "check/b", "check/a"], LONG))
}

fn woken(s: &TcpStore) -> Outcome {
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| s.wait(&["woken/a", "woken/b"], LONG));
        let gets = scope.spawn(|| s.get("woken/b", LONG));
        std::thread::sleep(Duration::from_millis(100));
        text(s.set("woken/a", b"1"))?;
        text(s.add("woken/b", 3))?;
        text(waits.join().map_err(|_| "a thread panicked")?)?;
        same("get", text(gets.join().map_err(|_| "a thread panicked")?)?, b"3".to_vec())
    })
}

fn run_out(s: &TcpStore) -> Outcome {
    for i in 0..5 {
        let start = Instant::now();
        fails("wait", s.wait(&["never/a", "never/b"], SHORT), timeout)?;
        fails("get", s.get("never/a", SHORT), timeout)?;
        fails("multi_get", s.multi_get(&["never/a", "from python"], SHORT), timeout)?;
        same("early", start.elapsed() < 3 * SHORT, false)?;
        same("late", start.elapsed() > LONG, false)?;
        same("the next answer", text(s.add("after/n", 1))?, i + 1)?;
    }
    Ok(())
}

fn compare_set(s: &TcpStore) -> Outcome {
    same("missing, expected", text(s.compare_set("cs/a", b"x", b"y"))?, b"x".to_vec())?;
    same("nothing stored", text(s.check(&["cs/a"]))?, false)?;
    same("missing, not expected", text(s.compare_set("cs/a", b"", b"1"))?, b"1".to_vec())?;
    same("equal", text(s.compare_set("cs/a", b"1", b"2"))?, b"2".to_vec())?;
    same("different", text(s.compare_set("cs/a", b"1", b"3"))?, b"2".to_vec())?;
    same("the value", text(s.get("cs/a", LONG))?, b"2".to_vec())
}

fn delete_and_count(s: &TcpStore) -> Outcome {
    let before = text(s.num_keys())?;
    text(s.set("del/a", b"1"))?;
    same("one more", text(s.num_keys())?, before + 1)?;
    same("there", text(s.delete_key("del/a"))?, true)?;
    same("gone", text(s.delete_key("del/a"))?, false)?;
    same("as before", text(s.num_keys())?, before)
}

fn append(s: &TcpStore) -> Outcome {
    text(s.append("app/a", b"1"))?;
    text(s.append("app/a", b"\x00\xff"))?;
    same("value", text(s.get("app/a", LONG))?, b"1\x00\xff".to_vec())
}

fn several(s: &TcpStore) -> Outcome {
    text(s.multi_set(&[("m/a", b"1"), ("m/b", b""), ("m/c", b"333")]))?;
    let got = text(s.multi_get(&["m/c", "m/a", "m/b", "m/c"], LONG))?;
    same("values", got, vec![b"333".to_vec(), b"1".to_vec(), Vec::new(), b"333".to_vec()])?;
    let keys: Vec<String> = (0..2000).map(|i| format!("m/{i}")).collect();
    let pairs: Vec<(&str, &[u8])> = keys.iter().map(|k| (k.as_str(), k.as_bytes())).collect();
    text(s.multi_set(&pairs))?;
    let names: Vec<&str> = keys.iter().map(String::as_str).collect();
    let got = text(s.multi_get(&names, LONG))?;
    same("2000 values", got.iter().zip(&keys).all(|(g, k)| g == k.as_bytes()), true)
}

fn list(s: &TcpStore) -> Outcome {
    text(s.set("list/é", b"1"))?;
    let keys = text(s.list_keys())?;
    same("listed", keys.iter().filter(|k| *k == "list/é" || *k == "from python").count(), 2)?;
    same("without the slash", keys.iter().any(|k| k.starts_with('/')), false)
}

fn prefixes(s: &TcpStore) -> Outcome {
    let inner: Arc<dyn Store> = Arc::new(text(TcpStore::connect(s.addr(), LONG))?);
    let outer = PrefixStore::new("in", Arc::new(PrefixStore::new("out", inner)));
    text(outer.set("k", b"1"))?;
    same("under its full name", text(s.get("out/in/k", LONG))?, b"1".to_vec())?;
    same("what PyTorch put there", text(outer.get("py", LONG))?, b"nested".to_vec())
}

fn threads(s: &TcpStore) -> Outcome {
    std::thread::scope(|scope| {
        let all: Vec<_> = (0..8).map(|t| scope.spawn(move || work(s, "threads", t))).collect();
        all.into_iter().try_for_each(|t| t.join().map_err(|_| "a thread panicked")?)
    })?;
    same("sum", text(s.add("threads/n", 0))?, 800)
}

fn clients(s: &TcpStore) -> Outcome {
    std::thread::scope(|scope| {
        let client = move |t| work(&text(TcpStore::connect(s.addr(), LONG))?, "clients", t);
        let all: Vec<_> = (0..8).map(|t| scope.spawn(move || client(t))).collect();
        all.into_iter().try_for_each(|t| t.join().map_err(|_| "a thread panicked")?)
    })?;
    same("sum", text(s.add("clients/n", 0))?, 800)
}

/// Counts, and hands each value on to the next of 8.
fn work(s: &TcpStore, name: &str, t: usize) -> Outcome {
    for i in 0..100 {
        text(s.add(&format!("{name}/n"), 1))?;
        if i % 10 == 0 {
            text(s.set(&format!("{name}/{i}/{t}"), &[t as u8]))?;
            let next = (t + 1) % 8;
            same("neighbour", text(s.get(&format!("{name}/{i}/{next}"), LONG))?, vec![next as u8])?;
        }
    }
    Ok(())
}

fn queues(s: &TcpStore) -> Outcome {
    text(s.queue_push("q/a", b"1"))?;
    text(s.queue_push("q/a", b""))?;
    same("length", text(s.queue_len("q/a"))?, 2)?;
    same("first", text(s.queue_pop("q/a", LONG))?, b"1".to_vec())?;
    same("second", text(s.queue_pop("q/a", LONG))?, Vec::new())?;
    fails("nothing", s.queue_pop("q/a", SHORT), timeout)?;
    same("length", text(s.queue_len("q/a"))?, 0)?;
    same("PyTorch's element", text(s.queue_pop("q/py", LONG))?, b"element".to_vec())?;
    std::thread::scope(|scope| {
        let pops: Vec<_> = (0..4).map(|_| scope.spawn(|| s.queue_pop("q/b", LONG))).collect();
        std::thread::sleep(Duration::from_millis(50));
        for i in 0..4u8 {
            text(s.queue_push("q/b", &[i]))?;
        }
        let mut got = Vec::new();
        for p in pops {
            got.extend(text(p.join().map_err(|_| "a thread panicked")?)?);
        }
        got.sort_unstable();
        same("each once", got, vec![0, 1, 2, 3])
    })
}

fn no_queues(s: &TcpStore) -> Outcome {
    let unsupported = |kind: &ErrorKind| matches!(kind, ErrorKind::Unsupported { .. });
    fails("queue_push", s.queue_push("q/a", b"1"), unsupported)?;
    fails("queue_len", s.queue_len("q/a"), unsupported)?;
    same("the next answer", text(s.add("after queues", 1))?, 1)
}

fn leave(s: &TcpStore) -> Outcome {
    text(s.set("from rust", b"rs\x00\xfe"))?;
    text(s.append("from rust", b"."))
}
