//! Worlds of processes that do what the test tells them, one word at a time; and are stopped and killed.
//!
//! The test binary starts itself with `--exact child`. A child reads a command per line and answers each with a line.
#![allow(dead_code, missing_docs, unreachable_pub)]

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use comm_core::{CommOptions, Communicator, Error, ErrorKind, Result, Secret, op};
use comm_store::{TcpStoreServer, TcpStoreServerOptions};
use rustix::process::{Pid, Signal, kill_process};

const CHILD: &str = "RUSTCOMMS_LIVE_CHILD";
const HEARTBEAT: &str = "RUSTCOMMS_LIVE_HEARTBEAT";

/// Nothing takes as long.
pub const LIMIT: Duration = Duration::from_secs(60);

pub struct Rank {
    child: Child,
    lines: Receiver<(String, Instant)>,
}

/// Processes; killed when dropped.
pub struct World {
    pub ranks: Vec<Rank>,
    _server: Option<TcpStoreServer>,
}

impl Drop for World {
    fn drop(&mut self) {
        for r in &mut self.ranks {
            let _ = r.child.kill();
            let _ = r.child.wait();
        }
    }
}

impl World {
    /// `n` ranks that have met, with this heartbeat timeout and these variables.
    pub fn start(n: usize, heartbeat: Duration, variables: &[(&str, &str)]) -> Self {
        let secret = variables.iter().find(|v| v.0 == "RUSTCOMMS_SECRET").map(|v| Secret::new(v.1).unwrap());
        let server = TcpStoreServerOptions::new().secret(secret).bind("127.0.0.1:0").unwrap();
        let addr = server.local_addr().to_string();
        let variables = [&[("RUSTCOMMS_STORE", addr.as_str())], variables].concat();
        let here = |_: usize| Command::new(std::env::current_exe().unwrap());
        let mut w = Self::start_at(n, heartbeat, &variables, here);
        w._server = Some(server);
        w
    }

    /// The same where `place` says, with the store that the variables tell of.
    pub fn start_at(
        n: usize,
        heartbeat: Duration,
        variables: &[(&str, &str)],
        place: impl Fn(usize) -> Command,
    ) -> Self {
        let start = |rank: usize| {
            let mut c = place(rank);
            c.args(["--exact", "child", "--nocapture", "--test-threads=1"])
                .env("RUSTCOMMS_RANK", rank.to_string())
                .env("RUSTCOMMS_WORLD_SIZE", n.to_string())
                .env(CHILD, "1")
                .env(HEARTBEAT, heartbeat.as_millis().to_string())
                .envs(variables.iter().copied())
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .stderr(Stdio::inherit());
            let mut child = c.spawn().unwrap();
            let out = child.stdout.take().unwrap();
            let (tx, lines) = channel();
            std::thread::spawn(move || {
                for line in BufReader::new(out).lines().map_while(std::io::Result::ok) {
                    if let Some(i) = line.find('@') {
                        let _ = tx.send((line[i + 1..].to_owned(), Instant::now()));
                    }
                }
            });
            Rank { child, lines }
        };
        let mut w = Self { ranks: (0..n).map(start).collect(), _server: None };
        w.all("barrier", 0..n);
        w
    }

    pub fn tell(&mut self, rank: usize, command: &str) {
        let to = self.ranks[rank].child.stdin.as_mut().unwrap();
        writeln!(to, "{command}").unwrap();
        to.flush().unwrap();
    }

    pub fn hear(&self, rank: usize) -> (String, Instant) {
        match self.ranks[rank].lines.recv_timeout(LIMIT) {
            Ok((line, _)) if line.starts_with("PANIC") => panic!("rank {rank}: {line}"),
            Ok(said) => said,
            Err(e) => panic!("rank {rank} says nothing: {e}"),
        }
    }

    pub fn ask(&mut self, rank: usize, command: &str) -> String {
        self.tell(rank, command);
        self.hear(rank).0
    }

    /// All of `ranks` do it, and it goes well.
    pub fn all(&mut self, command: &str, ranks: impl Iterator<Item = usize> + Clone) {
        for r in ranks.clone() {
            self.tell(r, command);
        }
        for r in ranks {
            let said = self.hear(r).0;
            assert!(said.starts_with("OK"), "rank {r}, {command}: {said}");
        }
    }

    pub fn signal(&self, rank: usize, s: Signal) -> Instant {
        kill_process(self.pid(rank), s).unwrap();
        Instant::now()
    }

    pub fn pid(&self, rank: usize) -> Pid {
        Pid::from_child(&self.ranks[rank].child)
    }

    /// Processor time that a rank has used, in the system's ticks.
    pub fn ticks(&self, rank: usize) -> u64 {
        let text = std::fs::read_to_string(format!("/proc/{}/stat", self.pid(rank).as_raw_nonzero())).unwrap();
        let words: Vec<&str> = text.rsplit_once(')').unwrap().1.split_whitespace().collect();
        words[11].parse::<u64>().unwrap() + words[12].parse::<u64>().unwrap()
    }
}

/// A process that a rank has left behind; ends with the test.
pub struct Orphan(pub i32);

impl Drop for Orphan {
    fn drop(&mut self) {
        let _ = kill_process(Pid::from_raw(self.0).unwrap(), Signal::KILL);
    }
}

fn say(words: &str) {
    let mut out = std::io::stdout().lock();
    writeln!(out, "@{}", words.replace('\n', " ")).unwrap();
    out.flush().unwrap();
}

fn words(e: &Error) -> String {
    match e.kind() {
        ErrorKind::PeerFailed { rank, cause } => format!("PeerFailed {rank} {cause:?}"),
        ErrorKind::Aborted { rank, cause } => format!("Aborted {rank} {cause}"),
        k => format!("{} {e}", k.name()),
    }
}

/// Does what it is told, if this process is a child; ends with its standard input.
pub fn child() {
    if std::env::var_os(CHILD).is_none() {
        return;
    }
    std::panic::set_hook(Box::new(|p| say(&format!("PANIC {p}"))));
    let heartbeat = Duration::from_millis(std::env::var(HEARTBEAT).unwrap().parse().unwrap());
    let options = CommOptions::new().name("live").timeout(LIMIT).bootstrap_timeout(LIMIT).heartbeat_timeout(heartbeat);
    let mut comm = backend_tcp::connect(options).unwrap();
    let mut orphans = Vec::new();
    for line in std::io::stdin().lock().lines().map_while(std::io::Result::ok) {
        let (command, number) = line.split_once(' ').unwrap_or((&line, "0"));
        let number: u64 = number.parse().unwrap();
        let done = match command {
            "barrier" => comm.barrier(),
            "reduce" => sum(&comm),
            "operator" => operator(&comm, Duration::from_millis(number), std::thread::sleep),
            "spin" => operator(&comm, Duration::from_millis(number), spin),
            "stream" => stream(&comm, number as usize),
            "loop" => calls(&comm, Duration::from_millis(number)),
            "shrink" => match comm.shrink(LIMIT).and_then(|smaller| sum(&smaller).map(|()| smaller)) {
                Ok(smaller) => {
                    say(&format!("OK {:?}", smaller.ranks()));
                    continue;
                }
                Err(e) => Err(e),
            },
            "cause" => comm.cause().map_or(Ok(()), Err),
            "finalize" => comm.finalize(LIMIT),
            "burn" => {
                std::thread::spawn(|| {
                    loop {
                        std::hint::spin_loop();
                    }
                });
                Ok(())
            }
            "leave-child" => {
                let c = keep_sockets();
                say(&format!("OK {}", c.id()));
                orphans.push(c);
                continue;
            }
            "descriptors" => {
                say(&format!("OK {}", std::fs::read_dir("/proc/self/fd").unwrap().count()));
                continue;
            }
            "bulk" => match bulk(&comm, number as usize) {
                Ok((control, all)) => {
                    say(&format!("OK {} {}", control.as_millis(), all.as_millis()));
                    continue;
                }
                Err(e) => Err(e),
            },
            "go-on" => match go_on(&comm) {
                Ok(new) => {
                    comm = new;
                    say(&format!("OK {:?}", comm.ranks()));
                    continue;
                }
                Err(e) => Err(e),
            },
            "abort-after" => {
                let comm = comm.clone();
                std::thread::spawn(move || {
                    std::thread::sleep(Duration::from_millis(number));
                    comm.abort("enough of it");
                });
                Ok(())
            }
            _ => panic!("unknown command {line}"),
        };
        match done {
            Ok(()) => say("OK"),
            Err(e) => say(&format!("ERR {}", words(&e))),
        }
    }
    std::process::exit(0);
}

fn sum(comm: &Communicator) -> Result<()> {
    let mut x = [comm.rank() as u64; 5];
    comm.all_reduce(&mut x, op::Sum)?;
    assert_eq!(x, [(comm.size() * (comm.size() - 1) / 2) as u64; 5]);
    Ok(())
}

fn spin(time: Duration) {
    let start = Instant::now();
    while start.elapsed() < time {
        std::hint::spin_loop();
    }
}

/// A reduction whose function takes its time on rank 1, while it holds the endpoint: the others see it silent.
fn operator(comm: &Communicator, time: Duration, pass: fn(Duration)) -> Result<()> {
    let time = if comm.rank() == 1 { time } else { Duration::ZERO };
    let slow = op::custom(
        move |a: &mut [u64], b: &[u64]| {
            pass(time);
            a.iter_mut().zip(b).for_each(|(a, b)| *a += b);
        },
        true,
    );
    comm.all_reduce(&mut [1u64], slow)
}

/// Short calls one after the other, and nothing else.
fn calls(comm: &Communicator, time: Duration) -> Result<()> {
    let start = Instant::now();
    loop {
        // All stop after the same call.
        let mut on = [u8::from(start.elapsed() < time)];
        comm.broadcast(&mut on, 0)?;
        if on[0] == 0 {
            return Ok(());
        }
    }
}

/// Long calls until one fails.
fn stream(comm: &Communicator, bytes: usize) -> Result<()> {
    let mut x = vec![1f32; bytes / 4];
    loop {
        comm.all_reduce(&mut x, op::Max)?;
    }
}

/// The survivors' communicator, whose sums are right; as programs do it, again when somebody has died meanwhile.
fn go_on(comm: &Communicator) -> Result<Communicator> {
    let mut tries = 0;
    let new = loop {
        tries += 1;
        match comm.shrink(LIMIT / 3) {
            Err(e) if matches!(e.kind(), ErrorKind::PeerFailed { .. }) && tries < 8 => {}
            done => break done?,
        }
    };
    let mut x = vec![1u64 << new.ranks()[new.rank()]; 50_000];
    new.all_reduce(&mut x, op::Sum)?;
    let all: u64 = new.ranks().iter().map(|r| 1u64 << r).sum();
    assert!(x.iter().all(|v| *v == all), "{:b} is not {all:b}", x[0]);
    Ok(new)
}

/// A reduction of so many bytes, and while it is under way an exchange over the control plane: the times of both.
fn bulk(comm: &Communicator, bytes: usize) -> Result<(Duration, Duration)> {
    let (me, n) = (comm.rank() as u64, comm.size() as u64);
    let x: Vec<u64> = (0..bytes as u64 / 8).map(|i| me * 1_000_003 + i).collect();
    let start = Instant::now();
    let work = comm.all_reduce_async(x, op::Sum)?;
    // Until the connections are full.
    std::thread::sleep(Duration::from_millis(500));
    let asked = Instant::now();
    let got = comm.control()?.exchange(&[me as u8; 100], LIMIT)?;
    let control = asked.elapsed();
    assert!(got.iter().enumerate().all(|(r, bytes)| *bytes == [r as u8; 100]), "{got:?}");
    assert!(!work.is_completed(), "there was nothing in the way of the control message");
    let x = work.wait()?;
    let took = start.elapsed();
    let want = |i: u64| n * (n - 1) / 2 * 1_000_003 + n * i;
    assert!((0..).zip(&x).all(|(i, v)| *v == want(i)), "wrong sums");
    Ok((control, took))
}

/// A program that keeps this process's sockets, as a child does whose parent did not close them.
fn keep_sockets() -> Child {
    use std::os::fd::BorrowedFd;
    for f in std::fs::read_dir("/proc/self/fd").unwrap().map_while(std::io::Result::ok) {
        let is_socket = std::fs::read_link(f.path()).is_ok_and(|l| l.to_string_lossy().starts_with("socket:"));
        if is_socket {
            let number = f.file_name().to_string_lossy().parse().unwrap();
            // SAFETY: nothing of this process closes a socket while its ranks are idle.
            let fd = unsafe { BorrowedFd::borrow_raw(number) };
            rustix::io::fcntl_setfd(fd, rustix::io::FdFlags::empty()).unwrap();
        }
    }
    Command::new("sleep").arg("60").stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
}
