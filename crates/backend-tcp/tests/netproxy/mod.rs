//! A proxy in user space on the way of every connection between the ranks of a world, questions for a sign of life
//! included: it does to the bytes of a direction what the test says.
//!
//! Ranks are threads. Each one's store sends its card with the proxy's port in the place of its own, so nobody
//! connects past the proxy. It knows who speaks by the greeting with which each connection begins.
#![allow(dead_code, missing_docs, unreachable_pub)]

use std::collections::HashMap;
use std::io::{Read, Write};
use std::net::{IpAddr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use comm_core::{CommOptions, Communicator, Result, Store};
use comm_store::MemoryStore;
use socket2::SockRef;

/// Nothing takes as long.
pub const LIMIT: Duration = Duration::from_secs(60);

/// So much the proxy's sockets take while it does not read, so that a sender soon notices.
const ROOM: usize = 64 << 10;

/// What is done to the bytes that go from one rank to another. Counts begin when the rule is set.
#[derive(Clone, Debug)]
pub enum Rule {
    Pass,
    /// Each chunk is late by up to as many milliseconds.
    Delay(u64),
    /// One to seven bytes at a time.
    Split,
    /// What comes within this time goes on in one piece.
    Join(Duration),
    /// After some bytes, some are lost.
    Lose {
        after: usize,
        bytes: usize,
    },
    /// After some bytes, one has another bit.
    Flip {
        after: usize,
    },
    /// Nothing arrives; the sender does not notice.
    Hole,
    /// Nothing arrives, and soon the sender can send no more.
    Stop,
    /// As [`Hole`](Self::Hole) and [`Stop`](Self::Stop), but questions for a sign of life are still answered.
    HoleButProbes,
    StopButProbes,
    /// After some bytes both ends see the connection closed.
    Close {
        after: usize,
    },
    /// The same after or before the chunk that contains these bytes.
    CloseBehind(&'static str),
    CloseBefore(&'static str),
}

struct Shared {
    rules: Mutex<HashMap<(usize, usize), Rule>>,
    /// Both ends of each connection, for the two ranks in ascending order; of the ended ones too.
    streams: Mutex<Vec<((usize, usize), TcpStream)>>,
    listeners: Mutex<Vec<SocketAddr>>,
    ended: AtomicBool,
    probes: AtomicUsize,
}

fn lock<T>(m: &Mutex<T>) -> MutexGuard<'_, T> {
    m.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Closes everything when it is dropped.
pub struct Proxy(Arc<Shared>);

impl Drop for Proxy {
    fn drop(&mut self) {
        self.0.ended.store(true, Ordering::Relaxed);
        for (_, s) in lock(&self.0.streams).drain(..) {
            let _ = s.shutdown(Shutdown::Both);
        }
        for l in lock(&self.0.listeners).drain(..) {
            // For who accepts there to look up.
            let _ = TcpStream::connect(l);
        }
    }
}

impl Proxy {
    /// From now on, in this direction.
    pub fn set(&self, from: usize, to: usize, rule: Rule) {
        lock(&self.0.rules).insert((from, to), rule);
    }

    /// Closes the connections between two ranks.
    pub fn close(&self, a: usize, b: usize) {
        for (pair, s) in lock(&self.0.streams).iter() {
            if *pair == (a.min(b), a.max(b)) {
                let _ = s.shutdown(Shutdown::Both);
            }
        }
    }

    /// How often a sign of life was asked for.
    pub fn probes(&self) -> usize {
        self.0.probes.load(Ordering::Relaxed)
    }
}

/// A world of threads with a proxy between all, which does `rule` from the first byte.
pub fn world(n: usize, o: &CommOptions, rule: &Rule) -> (Proxy, Vec<Communicator>) {
    let pairs = (0..n).flat_map(|a| (0..n).map(move |b| (a, b))).filter(|(a, b)| a != b);
    let proxy = Proxy(Arc::new(Shared {
        rules: Mutex::new(pairs.map(|p| (p, rule.clone())).collect()),
        streams: Mutex::default(),
        listeners: Mutex::default(),
        ended: AtomicBool::new(false),
        probes: AtomicUsize::new(0),
    }));
    let store: Arc<dyn Store> = Arc::new(MemoryStore::new());
    let o = o.clone().name("proxied").bootstrap_timeout(LIMIT);
    let comms = run(vec![(); n], {
        let shared = Arc::clone(&proxy.0);
        move |rank, ()| {
            let detour = Detour { inner: Arc::clone(&store), rank, shared: Arc::clone(&shared) };
            backend_tcp::connect(o.clone().rank_and_size(rank, n).store(Arc::new(detour))).unwrap()
        }
    });
    (proxy, comms)
}

/// Runs `f` as every rank, each on a thread; results in rank order.
pub fn run<A: Send + 'static, T: Send + 'static>(
    ranks: Vec<A>,
    f: impl Fn(usize, A) -> T + Send + Sync + 'static,
) -> Vec<T> {
    let n = ranks.len();
    let f = Arc::new(f);
    let (tx, rx) = channel();
    for (rank, a) in ranks.into_iter().enumerate() {
        let (f, tx) = (Arc::clone(&f), tx.clone());
        std::thread::spawn(move || tx.send((rank, f(rank, a))));
    }
    drop(tx);
    let until = Instant::now() + LIMIT;
    let mut results: Vec<Option<T>> = (0..n).map(|_| None).collect();
    for _ in 0..n {
        match rx.recv_timeout(until.saturating_duration_since(Instant::now())) {
            Ok((rank, t)) => results[rank] = Some(t),
            Err(e) => {
                let missing: Vec<usize> = (0..n).filter(|r| results[*r].is_none()).collect();
                panic!("ranks {missing:?} have panicked, or did not end within {LIMIT:?}: {e}");
            }
        }
    }
    results.into_iter().flatten().collect()
}

/// What a rank writes into the store about itself, as far as its bytes go: the last but one is its port.
type Card = (usize, (String, String), (u32, String, u64, u64), u64, u16, Vec<(IpAddr, u8, String, u32, bool)>);

struct Detour {
    inner: Arc<dyn Store>,
    rank: usize,
    shared: Arc<Shared>,
}

impl std::fmt::Debug for Detour {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "the store of rank {}", self.rank)
    }
}

impl Detour {
    /// The card with a port of the proxy's, from where it goes on to the rank's own.
    fn card(&self, bytes: &[u8]) -> Vec<u8> {
        let (mut card, rest): (Card, _) = postcard::take_from_bytes(bytes).unwrap();
        assert!(card.0 == self.rank && rest.is_empty(), "what a card consists of has changed: {card:?}");
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        // What it accepts is like that, too.
        SockRef::from(&listener).set_recv_buffer_size(ROOM).unwrap();
        let at = listener.local_addr().unwrap();
        let to = SocketAddr::new(at.ip(), std::mem::replace(&mut card.4, at.port()));
        lock(&self.shared.listeners).push(at);
        let (shared, rank) = (Arc::clone(&self.shared), self.rank);
        std::thread::spawn(move || {
            for s in listener.incoming().map_while(std::io::Result::ok) {
                if shared.ended.load(Ordering::Relaxed) {
                    return;
                }
                let shared = Arc::clone(&shared);
                // Who hangs up early is not missed.
                std::thread::spawn(move || serve(&shared, rank, to, s));
            }
        });
        postcard::to_allocvec(&card).unwrap()
    }
}

impl Store for Detour {
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        self.inner.set(key, value)
    }
    fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>> {
        self.inner.get(key, timeout)
    }
    fn add(&self, key: &str, delta: i64) -> Result<i64> {
        self.inner.add(key, delta)
    }
    fn check(&self, keys: &[&str]) -> Result<bool> {
        self.inner.check(keys)
    }
    fn wait(&self, keys: &[&str], timeout: Duration) -> Result<()> {
        self.inner.wait(keys, timeout)
    }
    fn compare_set(&self, key: &str, expected: &[u8], desired: &[u8]) -> Result<Vec<u8>> {
        if !key.ends_with(&format!("/{}", self.rank)) || expected == desired {
            return self.inner.compare_set(key, expected, desired);
        }
        let card = self.card(desired);
        let there = self.inner.compare_set(key, expected, &card)?;
        Ok(if there == card { desired.to_vec() } else { there })
    }
    fn delete_key(&self, key: &str) -> Result<bool> {
        self.inner.delete_key(key)
    }
    fn num_keys(&self) -> Result<i64> {
        self.inner.num_keys()
    }
    fn append(&self, key: &str, value: &[u8]) -> Result<()> {
        self.inner.append(key, value)
    }
}

/// One connection that somebody makes to `rank`, whose own port is `to`.
fn serve(shared: &Arc<Shared>, rank: usize, to: SocketAddr, mut there: TcpStream) -> std::io::Result<()> {
    let mut greeting = [0; 60];
    there.read_exact(&mut greeting)?;
    let word = |at: usize| u32::from_le_bytes(std::array::from_fn(|i| greeting[at + i]));
    let (from, probe) = (word(28) as usize, word(36) == u32::MAX);
    assert_eq!(word(32) as usize, rank, "what a greeting consists of has changed");
    if probe {
        shared.probes.fetch_add(1, Ordering::Relaxed);
    }
    let mut here = TcpStream::connect(to)?;
    SockRef::from(&here).set_recv_buffer_size(ROOM)?;
    here.write_all(&greeting)?;
    for s in [&there, &here] {
        s.set_nodelay(true)?;
        lock(&shared.streams).push(((from.min(rank), from.max(rank)), s.try_clone()?));
    }
    let back = Pump { shared: Arc::clone(shared), way: (rank, from), probe };
    let (mut a, mut b) = (here.try_clone()?, there.try_clone()?);
    std::thread::spawn(move || back.run(&mut a, &mut b));
    Pump { shared: Arc::clone(shared), way: (from, rank), probe }.run(&mut there, &mut here);
    Ok(())
}

/// One direction of one connection.
struct Pump {
    shared: Arc<Shared>,
    way: (usize, usize),
    probe: bool,
}

impl Pump {
    fn run(&self, input: &mut TcpStream, output: &mut TcpStream) {
        let seed = self.way.0 * 31 + self.way.1;
        let mut random = 0x9e37_79b9_7f4a_7c15u64.wrapping_mul(seed as u64 + 1) | 1;
        let mut buf = vec![0; 64 << 10];
        loop {
            match input.read(&mut buf) {
                Ok(n) if n > 0 && self.forward(&mut buf[..n], input, output, &mut random).is_ok() => {}
                _ => break,
            }
        }
        // Where nothing arrives, nor does the end.
        while self.is_cut() && !self.shared.ended.load(Ordering::Relaxed) {
            std::thread::sleep(Duration::from_millis(20));
        }
        // The end of this direction only: what the other end has still to say is let through.
        let _ = output.shutdown(Shutdown::Write);
    }

    fn rule(&self) -> Rule {
        lock(&self.shared.rules)[&self.way].clone()
    }

    fn is_cut(&self) -> bool {
        match self.rule() {
            Rule::Hole | Rule::Stop => true,
            Rule::HoleButProbes | Rule::StopButProbes => !self.probe,
            _ => false,
        }
    }

    /// An error ends the connection.
    fn forward(
        &self,
        bytes: &mut [u8],
        input: &mut TcpStream,
        output: &mut TcpStream,
        random: &mut u64,
    ) -> std::io::Result<()> {
        let mut next = |below: u64| {
            *random ^= *random << 13;
            *random ^= *random >> 7;
            *random ^= *random << 17;
            *random % below
        };
        let mut rule = self.rule();
        if self.probe && !matches!(rule, Rule::Hole | Rule::Stop | Rule::Delay(_) | Rule::Split) {
            return output.write_all(bytes);
        }
        let close = |input: &TcpStream, output: &TcpStream| {
            let _ = input.shutdown(Shutdown::Both);
            let _ = output.shutdown(Shutdown::Both);
            Err(std::io::ErrorKind::ConnectionAborted.into())
        };
        let n = bytes.len();
        let contains = |text: &str| bytes.windows(text.len()).any(|w| w == text.as_bytes());
        match &mut rule {
            Rule::Pass => output.write_all(bytes),
            Rule::Delay(most) => {
                std::thread::sleep(Duration::from_millis(next(*most + 1)));
                output.write_all(bytes)
            }
            Rule::Split => {
                let mut left = &*bytes;
                while !left.is_empty() {
                    let piece = left.len().min(1 + next(7) as usize);
                    output.write_all(&left[..piece])?;
                    left = &left[piece..];
                }
                Ok(())
            }
            Rule::Join(time) => {
                let until = Instant::now() + *time;
                let mut all = bytes.to_vec();
                let mut more = vec![0; 1 << 20];
                while let Some(left) = until.checked_duration_since(Instant::now()).filter(|l| !l.is_zero()) {
                    input.set_read_timeout(Some(left))?;
                    match input.read(&mut more) {
                        Ok(0) => break,
                        Ok(n) => all.extend_from_slice(&more[..n]),
                        Err(e) if matches!(e.kind(), std::io::ErrorKind::WouldBlock | std::io::ErrorKind::TimedOut) => {
                        }
                        Err(e) => return Err(e),
                    }
                }
                input.set_read_timeout(None)?;
                output.write_all(&all)
            }
            Rule::Lose { after, bytes: lost } => {
                let before = n.min(*after);
                let gone = (n - before).min(*lost);
                let (before_left, lost_left) = (*after - before, *lost - gone);
                self.counted(if lost_left == 0 {
                    Rule::Pass
                } else {
                    Rule::Lose { after: before_left, bytes: lost_left }
                });
                output.write_all(&bytes[..before])?;
                output.write_all(&bytes[before + gone..])
            }
            Rule::Flip { after } => {
                if *after < n {
                    bytes[*after] ^= 0x10;
                }
                self.counted(if *after < n { Rule::Pass } else { Rule::Flip { after: *after - n } });
                output.write_all(bytes)
            }
            Rule::Close { after } => {
                let before = n.min(*after);
                output.write_all(&bytes[..before])?;
                self.counted(Rule::Close { after: *after - before });
                if before < n { close(input, output) } else { Ok(()) }
            }
            Rule::CloseBehind(text) => {
                let found = contains(text);
                output.write_all(bytes)?;
                if found { close(input, output) } else { Ok(()) }
            }
            Rule::CloseBefore(text) => {
                if contains(text) {
                    return close(input, output);
                }
                output.write_all(bytes)
            }
            Rule::Hole | Rule::HoleButProbes => Ok(()),
            Rule::Stop | Rule::StopButProbes => {
                while self.is_cut() {
                    if self.shared.ended.load(Ordering::Relaxed) {
                        return Err(std::io::ErrorKind::ConnectionAborted.into());
                    }
                    std::thread::sleep(Duration::from_millis(20));
                }
                output.write_all(bytes)
            }
        }
    }

    fn counted(&self, rule: Rule) {
        lock(&self.shared.rules).insert(self.way, rule);
    }
}
