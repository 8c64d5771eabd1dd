//! Worlds of processes that are killed, stopped and timed: the parent's side and the child's.
//!
//! The test binary starts itself with `--exact child`; which scene a child plays is in its environment.
#![allow(dead_code, missing_docs, unreachable_pub)]

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use comm_core::{CommOptions, Communicator, Error, ErrorKind, op};
use comm_store::TcpStoreServer;
use rustix::process::{Pid, Signal, kill_process};

const SCENE: &str = "RUSTCOMMS_FAIL_SCENE";
const SIZE: &str = "RUSTCOMMS_FAIL_BYTES";
const VICTIM: &str = "RUSTCOMMS_FAIL_VICTIM";

/// A line of a child: its rank, the words after `@`, and when it came.
pub type Line = (usize, String, Instant);

/// A world of processes; killed when dropped.
pub struct World {
    pub children: Vec<Child>,
    lines: Receiver<Line>,
    _server: TcpStoreServer,
}

impl World {
    pub fn start(n: usize, scene: &str, victim: usize, bytes: usize) -> Self {
        let server = TcpStoreServer::bind("127.0.0.1:0").unwrap();
        let (tx, lines) = channel();
        let mut children = Vec::new();
        for rank in 0..n {
            let mut c = Command::new(std::env::current_exe().unwrap())
                .args(["--exact", "child", "--nocapture", "--test-threads=1"])
                .env("RUSTCOMMS_RANK", rank.to_string())
                .env("RUSTCOMMS_WORLD_SIZE", n.to_string())
                .env("RUSTCOMMS_STORE", server.local_addr().to_string())
                .env(SCENE, scene)
                .env(VICTIM, victim.to_string())
                .env(SIZE, bytes.to_string())
                .stdin(Stdio::null())
                .stdout(Stdio::piped())
                .stderr(Stdio::inherit())
                .spawn()
                .unwrap();
            let out = c.stdout.take().unwrap();
            let tx = tx.clone();
            std::thread::spawn(move || {
                for line in BufReader::new(out).lines().map_while(Result::ok) {
                    if let Some(i) = line.find('@') {
                        let _ = tx.send((rank, line[i + 1..].to_owned(), Instant::now()));
                    }
                }
            });
            children.push(c);
        }
        Self { children, lines, _server: server }
    }

    /// Waits for a line that begins with `word` from each of `ranks`.
    pub fn await_all(&self, word: &str, ranks: impl Iterator<Item = usize>, limit: Duration) -> Vec<Line> {
        let mut missing: Vec<usize> = ranks.collect();
        let until = Instant::now() + limit;
        let mut got = Vec::new();
        while !missing.is_empty() {
            match self.lines.recv_timeout(until.saturating_duration_since(Instant::now())) {
                Ok((rank, line, at)) if line.starts_with(word) => {
                    missing.retain(|r| *r != rank);
                    got.push((rank, line, at));
                }
                Ok((rank, line, _)) if line.starts_with("PANIC") => panic!("rank {rank}: {line}"),
                Ok(_) => {}
                Err(_) => panic!("ranks {missing:?} did not say {word} within {limit:?}; heard {got:?}"),
            }
        }
        got
    }

    pub fn signal(&self, rank: usize, s: Signal) {
        kill_process(Pid::from_child(&self.children[rank]), s).unwrap();
    }

    /// Waits until the ranks have ended by themselves.
    pub fn ended(&mut self, ranks: impl Iterator<Item = usize>) {
        let until = Instant::now() + Duration::from_secs(10);
        for r in ranks {
            loop {
                match self.children[r].try_wait().unwrap() {
                    Some(s) => {
                        assert!(s.success(), "rank {r}: {s}");
                        break;
                    }
                    None if Instant::now() > until => panic!("rank {r} does not end"),
                    None => std::thread::sleep(Duration::from_millis(2)),
                }
            }
        }
    }
}

impl Drop for World {
    fn drop(&mut self) {
        for c in &mut self.children {
            let _ = c.kill();
            let _ = c.wait();
        }
    }
}

fn say(words: &str) {
    let mut out = std::io::stdout().lock();
    writeln!(out, "@{words}").unwrap();
    out.flush().unwrap();
}

fn number(name: &str) -> usize {
    std::env::var(name).unwrap().parse().unwrap()
}

/// Plays a child's scene, if this process is a child.
pub fn child() {
    let Ok(scene) = std::env::var(SCENE) else { return };
    std::panic::set_hook(Box::new(|p| say(&format!("PANIC {p}").replace('\n', " "))));
    let (victim, bytes) = (number(VICTIM), number(SIZE));
    let timeout = if scene == "stopped" { Duration::from_secs(1) } else { Duration::from_secs(30) };
    let comm = backend_tcp::connect(
        CommOptions::new().timeout(timeout).bootstrap_timeout(Duration::from_secs(20)).name("killed"),
    )
    .unwrap();
    comm.barrier().unwrap();
    say("READY");
    let e = play(&comm, &scene, victim, bytes);
    // In every way the same answer, and no later than that.
    let next = comm.all_reduce(&mut [1f32; 3], op::Sum).unwrap_err();
    let cause = comm.cause().unwrap();
    let work = comm.all_reduce_async(vec![1i32], op::Sum).and_then(|w| w.wait().map(drop)).unwrap_err();
    assert!(comm.is_failed());
    for other in [&next, &cause, &work] {
        assert_eq!(words(other), words(&e), "first {e}, then {other}");
    }
    say(&format!("ERR {}", words(&e)));
    if scene == "stopped" {
        // Lives on, so that the others' errors are about the one that was stopped.
        std::thread::sleep(Duration::from_secs(1));
    }
    std::process::exit(0);
}

/// An error in one line.
fn words(e: &Error) -> String {
    match e.kind() {
        ErrorKind::PeerFailed { rank, cause } => format!("PeerFailed {rank} {cause:?}"),
        ErrorKind::Timeout { missing, .. } => format!("Timeout {missing:?}"),
        ErrorKind::Aborted { rank, cause } => format!("Aborted {rank} {cause}"),
        k => format!("{} {e}", k.name()),
    }
}

fn play(comm: &Communicator, scene: &str, victim: usize, bytes: usize) -> Error {
    let until = Instant::now() + Duration::from_secs(20);
    let mut x = vec![1f32; bytes / 4];
    let (n, me) = (comm.size(), comm.rank());
    let share = x.len() / n;
    loop {
        assert!(Instant::now() < until, "no error in scene {scene}");
        let r = match scene {
            "all_reduce" | "stopped" => comm.all_reduce(&mut x, op::Max),
            "barrier" => comm.barrier(),
            "recv" if comm.rank() != victim => comm.recv(&mut x, victim),
            "send" if comm.rank() != victim => comm.send(&x, victim),
            "between" | "recv" | "send" => {
                std::thread::sleep(Duration::from_millis(1));
                comm.cause().map_or(Ok(()), Err)
            }
            "compute" => {
                let t = Instant::now();
                while t.elapsed() < Duration::from_millis(60) {
                    std::hint::black_box(x.iter().sum::<f32>());
                }
                comm.all_reduce(&mut x, op::Max)
            }
            "async" => {
                let works: comm_core::Result<Vec<_>> =
                    (0..3).map(|_| comm.all_reduce_async(std::mem::take(&mut x), op::Max)).collect();
                let r = works.and_then(|mut w| {
                    let last = w.pop().unwrap().wait();
                    comm_core::wait_all(w).and(last)
                });
                x = vec![1f32; bytes / 4];
                r.map(drop)
            }
            "all_to_all_v" => {
                // More to higher ranks, nothing to oneself.
                let pair = |a: usize, b: usize| if a == b { 0 } else { share * (a + b + 1) / (2 * n) };
                let send: Vec<usize> = (0..n).map(|r| pair(me, r)).collect();
                let recv: Vec<usize> = (0..n).map(|r| pair(r, me)).collect();
                let mut out = vec![0f32; recv.iter().sum()];
                comm.all_to_all_v(&x[..send.iter().sum()], &mut out, &send, &recv)
            }
            "gather_scatter" => {
                let mut all = vec![0f32; share * n];
                comm.gather(&x[..share], (me == 0).then_some(&mut all), 0)
                    .and_then(|()| comm.scatter((me == 0).then_some(&all), &mut x[..share], 0))
            }
            "prefix" => comm.scan(&mut x, op::Max).and_then(|()| comm.exscan(&mut x, op::Max)),
            "reduce_scatter_v" => {
                let counts: Vec<usize> = (0..n).map(|r| if r == n - 1 { 0 } else { share }).collect();
                let mut out = vec![0f32; counts[me]];
                comm.reduce_scatter_v(&x[..share * (n - 1)], &mut out, &counts, op::Max)
            }
            "all_gather_v" => {
                let counts: Vec<usize> = (0..n).map(|r| if r == 0 { 0 } else { share }).collect();
                let mut out = vec![0f32; counts.iter().sum()];
                comm.all_gather_v(&x[..counts[me]], &mut out, &counts)
            }
            other => panic!("no scene {other}"),
        };
        if let Err(e) = r {
            return e;
        }
    }
}
