//! Ranks that meet, as threads or as processes: the test executable starts itself, with `--exact child`.
#![allow(dead_code, missing_docs, unreachable_pub)]

use std::io::{Read, Seek};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use comm_core::{CommOptions, Communicator, Error, ErrorKind, Result, Store, op};
use comm_store::MemoryStore;

/// A bootstrap timeout for attempts that are to fail.
pub const SHORT: Duration = Duration::from_secs(1);
/// Nothing takes as long.
pub const LIMIT: Duration = Duration::from_secs(30);

const CHILD: &str = "RUSTCOMMS_BOOT_CHILD";
/// Makes children talk to each of the others, both ends at the same moment.
pub const PAIRS: &str = "RUSTCOMMS_BOOT_PAIRS";
/// Makes children reduce 1 MiB, too, and say how many sockets they have.
pub const LONG: &str = "RUSTCOMMS_BOOT_LONG";
const TIMEOUT: &str = "RUSTCOMMS_BOOT_TIMEOUT";

pub fn memory() -> Arc<dyn Store> {
    Arc::new(MemoryStore::new())
}

pub fn options(store: &Arc<dyn Store>, name: &str, rank: usize, size: usize) -> CommOptions {
    let o = CommOptions::new().name(name).rank_and_size(rank, size).store(Arc::clone(store));
    o.bootstrap_timeout(LIMIT).timeout(LIMIT)
}

/// Runs `f` for each item, all at once; results in order. Nobody may take longer than [`LIMIT`].
pub fn all<T: Send + 'static, R: Send + 'static>(
    items: impl IntoIterator<Item = T>,
    f: impl Fn(T) -> R + Send + Sync + 'static,
) -> Vec<R> {
    let (tx, rx) = channel();
    let f = Arc::new(f);
    let mut n = 0;
    for (i, item) in items.into_iter().enumerate() {
        let (tx, f) = (tx.clone(), Arc::clone(&f));
        n += 1;
        std::thread::spawn(move || tx.send((i, f(item))));
    }
    drop(tx);
    let until = Instant::now() + LIMIT + Duration::from_secs(10);
    let mut out: Vec<Option<R>> = (0..n).map(|_| None).collect();
    for _ in 0..n {
        let left = until.saturating_duration_since(Instant::now());
        let (i, r) = rx.recv_timeout(left).expect("a rank hangs, or has panicked");
        out[i] = Some(r);
    }
    out.into_iter().flatten().collect()
}

/// Connects as all ranks of a world, at once.
pub fn world(n: usize, make: impl Fn(usize) -> CommOptions + Send + Sync + 'static) -> Vec<Result<Communicator>> {
    all(0..n, move |r| backend_tcp::connect(make(r)))
}

/// Adds up the ranks over all communicators of a world, and ends it.
pub fn use_up(comms: Vec<Communicator>) {
    for sum in all(comms, |c| {
        let (n, sum) = (c.size(), sum_of_ranks(&c));
        c.finalize(LIMIT).unwrap();
        (n, sum)
    }) {
        assert_eq!(sum.1, sum.0 * (sum.0 - 1) / 2);
    }
}

pub fn sum_of_ranks(c: &Communicator) -> usize {
    let mut x = vec![c.rank() as u64; 3];
    c.all_reduce(&mut x, op::Sum).unwrap();
    assert!(x.iter().all(|v| *v == x[0]));
    x[0] as usize
}

pub fn bootstrap(e: &Error) -> (&str, &[String], &[usize]) {
    match e.kind() {
        ErrorKind::Bootstrap { what, arrived, missing } => (what, arrived, missing),
        _ => panic!("expected a bootstrap error, got {e}"),
    }
}

/// This host's name, as errors give it.
pub fn host() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

/// Processes, killed when dropped.
pub struct Processes(Vec<(Child, std::fs::File)>);

impl Drop for Processes {
    fn drop(&mut self) {
        for (c, _) in &mut self.0 {
            let _ = c.kill();
            let _ = c.wait();
        }
    }
}

/// A process that joins a world as [`child`] does, with these variables.
pub fn spawn(timeout: Duration, variables: &[(&str, &str)]) -> Processes {
    let err = tempfile::tempfile().unwrap();
    let mut c = Command::new(std::env::current_exe().unwrap());
    c.args(["--exact", "child", "--nocapture", "--test-threads=1"])
        .env(CHILD, "1")
        .env(TIMEOUT, timeout.as_millis().to_string())
        .envs(variables.iter().copied())
        .stdin(Stdio::piped())
        .stdout(err.try_clone().unwrap())
        .stderr(Stdio::inherit());
    for name in ["RUSTCOMMS_SECRET", "RUSTCOMMS_CONNECT", "RUSTCOMMS_INTERFACE", "MASTER_ADDR", "MASTER_PORT"] {
        if !variables.iter().any(|v| v.0 == name) {
            c.env_remove(name);
        }
    }
    Processes(vec![(c.spawn().unwrap(), err)])
}

impl Processes {
    pub fn and(mut self, mut more: Self) -> Self {
        self.0.append(&mut more.0);
        self
    }

    pub fn kill(&mut self, i: usize) {
        self.0[i].0.kill().unwrap();
        self.0[i].0.wait().unwrap();
    }

    pub fn pid(&self, i: usize) -> u32 {
        self.0[i].0.id()
    }

    /// Waits for the processes that have not been killed; what each has said about its bootstrap.
    pub fn said(mut self) -> Vec<String> {
        let until = Instant::now() + LIMIT + Duration::from_secs(20);
        let mut out = Vec::new();
        for (c, f) in &mut self.0 {
            while c.try_wait().unwrap().is_none() {
                assert!(Instant::now() < until, "a process hangs in the bootstrap");
                std::thread::sleep(Duration::from_millis(5));
            }
            let mut text = String::new();
            f.rewind().unwrap();
            f.read_to_string(&mut text).unwrap();
            out.push(text.split_once('@').map_or_else(String::new, |(_, t)| t.lines().next().unwrap_or("").to_owned()));
        }
        out
    }
}

/// Each pair of ranks exchanges something, both ends at the same moment.
pub fn meet_everybody(c: &Communicator) {
    let (me, n) = (c.rank(), c.size());
    for k in 0..n {
        let peer = (k + n - me) % n;
        if peer == me {
            continue;
        }
        let mut got = [usize::MAX as u64; 2];
        c.sendrecv(&[me as u64, peer as u64], &mut got, peer, peer).unwrap();
        assert_eq!(got, [peer as u64, me as u64]);
    }
}

/// Reduces 1 MiB; returns the number of this process's sockets.
fn long(c: &Communicator) -> Result<usize> {
    let (me, n) = (c.rank(), c.size());
    let mut x: Vec<f32> = (0..1 << 18).map(|i| (i % 7 + me) as f32).collect();
    c.all_reduce(&mut x, op::Sum)?;
    let right = |(i, v): (usize, &f32)| *v as usize == n * (i % 7) + n * (n - 1) / 2;
    assert!(x.iter().enumerate().all(right), "a wrong sum");
    let is_socket = |f: std::io::Result<std::fs::DirEntry>| {
        let link = std::fs::read_link(f.ok()?.path()).ok()?;
        link.to_string_lossy().starts_with("socket:").then_some(())
    };
    Ok(std::fs::read_dir("/proc/self/fd").unwrap().filter_map(is_socket).count())
}

/// Joins the world of the environment, if this process is to; says `@OK sum` or `@` and the error.
pub fn child() {
    if std::env::var_os(CHILD).is_none() {
        return;
    }
    // A rank must not outlive the test that started it.
    std::thread::spawn(|| {
        let mut b = [0u8; 1];
        while matches!(std::io::stdin().read(&mut b), Ok(1)) {}
        std::process::exit(99);
    });
    let timeout = Duration::from_millis(std::env::var(TIMEOUT).unwrap().parse().unwrap());
    let o = CommOptions::new().bootstrap_timeout(timeout).timeout(LIMIT);
    match backend_tcp::connect(o) {
        Ok(c) => {
            if std::env::var_os(PAIRS).is_some() {
                meet_everybody(&c);
            }
            let mut sum = [c.rank() as u64];
            let done = c.all_reduce(&mut sum, op::Sum).and_then(|()| match std::env::var_os(LONG) {
                Some(_) => long(&c).map(|links| format!("{} {links}", sum[0])),
                None => Ok(sum[0].to_string()),
            });
            match done.and_then(|said| c.finalize(LIMIT).map(|()| said)) {
                Ok(said) => println!("@OK {said}"),
                Err(e) => println!("@LOST {}", e.to_string().replace('\n', " ")),
            }
        }
        Err(e) => println!("@{} {}", e.kind().name(), e.to_string().replace('\n', " ")),
    }
    std::process::exit(0);
}
