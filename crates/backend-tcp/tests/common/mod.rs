//! Ranks as processes: the test executable starts itself once per rank, under the same test's name.
//!
//! A test calls [`world`] once per size. In the parent that starts the ranks and waits for them, with a deadline
//! after which they are killed; in a child it runs the body if the size is the child's.
#![allow(dead_code, unreachable_pub, missing_docs, missing_debug_implementations)]

use std::fs::File;
use std::io::{Read, Seek};
use std::process::{Child, Command, Stdio};
use std::sync::Once;
use std::time::{Duration, Instant};

use comm_core::{CommOptions, Communicator, Result};
use comm_store::{TcpStoreServer, env};

/// Tells a process that it is a rank, and of which test.
const CHILD: &str = "RUSTCOMMS_TEST_CHILD";

/// How a rank ends that has done everything.
const DONE: i32 = 77;

/// Nothing that ends well takes as long, even on a loaded machine.
const DEADLINE: Duration = Duration::from_secs(100);

/// Ranks of a world; those that are left are killed.
struct Ranks(Vec<(Child, File)>);

impl Drop for Ranks {
    fn drop(&mut self) {
        for (c, _) in &mut self.0 {
            // One that has ended already cannot be killed, which is fine.
            let _ = c.kill();
            let _ = c.wait();
        }
    }
}

/// The options that children use.
pub fn options() -> CommOptions {
    CommOptions::new().timeout(Duration::from_secs(60)).bootstrap_timeout(Duration::from_secs(60))
}

/// A rank must not outlive the test that started it: it ends with its standard input.
fn end_with_parent() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        std::thread::spawn(|| {
            let mut b = [0u8; 1];
            while matches!(std::io::stdin().read(&mut b), Ok(1)) {}
            std::process::exit(99);
        });
        std::thread::spawn(|| {
            std::thread::sleep(DEADLINE + Duration::from_secs(10));
            std::process::exit(98);
        });
    });
}

/// Runs `body` as `n` processes. `test` is the calling test's own name.
pub fn world(test: &str, n: usize, body: impl FnOnce(&Communicator) -> Result<()>) {
    world_with(test, n, options(), body);
}

/// [`world`] with other options.
pub fn world_with(test: &str, n: usize, options: CommOptions, body: impl FnOnce(&Communicator) -> Result<()>) {
    if let Ok(name) = std::env::var(CHILD) {
        assert_eq!(name, test, "a test passes the name of another");
        if std::env::var(env::WORLD_SIZE).unwrap() == n.to_string() {
            end_with_parent();
            let comm = backend_tcp::connect(options).unwrap();
            assert_eq!(comm.size(), n);
            body(&comm).unwrap();
            comm.finalize(Duration::from_secs(30)).unwrap();
            drop(comm);
            // Not 0: that is also what a process says that has found no test of this name.
            std::process::exit(DONE);
        }
        return;
    }
    let server = TcpStoreServer::bind("127.0.0.1:0").unwrap();
    let mut ranks = Ranks(Vec::new());
    for rank in 0..n {
        let err = tempfile();
        let mut c = Command::new(std::env::current_exe().unwrap());
        c.args([test, "--exact", "--nocapture", "--test-threads=1"])
            .env(CHILD, test)
            .env(env::RANK, rank.to_string())
            .env(env::WORLD_SIZE, n.to_string())
            .env(env::STORE, server.local_addr().to_string())
            .env_remove("RUSTCOMMS_ALGO")
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(err.try_clone().unwrap());
        ranks.0.push((c.spawn().unwrap(), err));
    }
    let until = Instant::now() + DEADLINE;
    let mut left = n;
    let mut done = vec![false; n];
    while left > 0 {
        let late = Instant::now() > until;
        for (rank, done) in done.iter_mut().enumerate() {
            if *done {
                continue;
            }
            let status = ranks.0[rank].0.try_wait().unwrap();
            if status.is_some_and(|s| s.code() == Some(DONE)) {
                *done = true;
                left -= 1;
            } else if status.is_some() || late {
                // The first to fail may only be the first to notice: show what all have said.
                std::thread::sleep(Duration::from_millis(200));
                let said: Vec<String> = (0..n).map(|r| format!("--- rank {r}\n{}", text(&mut ranks.0[r].1))).collect();
                let how =
                    status.map_or_else(|| format!("did not end within {DEADLINE:?}"), |s| format!("ended with {s}"));
                panic!("{test}: rank {rank} of {n} {how}\n{}", said.join("\n"));
            }
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn text(f: &mut File) -> String {
    let mut s = Vec::new();
    f.rewind().unwrap();
    f.read_to_end(&mut s).unwrap();
    String::from_utf8_lossy(&s).into_owned()
}

/// A file without a name.
fn tempfile() -> File {
    static NEXT: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(0);
    let k = NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    let path = std::env::temp_dir().join(format!("rustcomms-test-{}-{k}", std::process::id()));
    let f = File::options().read(true).write(true).create_new(true).open(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
    f
}
