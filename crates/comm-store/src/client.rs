//! The client of a [`TcpStoreServer`](crate::TcpStoreServer), or of PyTorch's.

use std::fmt::Display;
use std::io;
use std::net::{Ipv6Addr, SocketAddr};
use std::time::{Duration, Instant};

use comm_core::{Error, ErrorKind, Result, Store};
use parking_lot::Mutex;

use crate::conn::{Answer, Conn, Fail, split};
use crate::protocol::{Encoder, Limits, NOT_READY, Op, READY};
use crate::{deadline_after, in_call, name_keys, shorten, timed_out};

/// How much longer than its timeout a wait may take, for the server to answer its cancellation.
const GRACE: Duration = Duration::from_secs(1);
/// How long a store that was there before may refuse connections.
const RECONNECT: Duration = Duration::from_secs(1);
/// Connections kept for later calls.
const IDLE: usize = 4;
/// Waits for a queue begin anew this often: the server wakes one waiter per element, and if that
/// one dies before it takes the element, the others would not hear of it.
const QUEUE_SLICE: Duration = Duration::from_secs(1);

/// A [`Store`] kept by a [`TcpStoreServer`](crate::TcpStoreServer) or a PyTorch `TCPStore`.
///
/// Every call in progress has a connection of its own, so a blocking [`get`](Store::get) never
/// delays another thread's [`set`](Store::set); idle connections are kept for reuse. Calls return
/// when the server has carried them out. A connection that broke is replaced on the next call; the
/// call that met it fails, because it may or may not have been carried out.
///
/// Keys are sent with a slash in front, as PyTorch does, so both see the same keys.
#[derive(Debug)]
pub struct TcpStore {
    addr: String,
    peer: Option<SocketAddr>,
    timeout: Duration,
    idle: Mutex<Vec<Conn>>,
}

impl TcpStore {
    /// Connects to the store at `addr` (`host:port`), waiting up to `timeout` for it to be there.
    ///
    /// An IPv6 address may stand in brackets; a link-local one names its interface, as in `[fe80::1%eth0]:29500`. A
    /// name that has several addresses is tried on all of them, again and again.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` for what is no such address, `Bootstrap` when the store cannot be reached in time.
    pub fn connect(addr: impl Display, timeout: Duration) -> Result<Self> {
        let addr = addr.to_string();
        check_addr(&addr)?;
        let started = Instant::now();
        let deadline = deadline_after(timeout);
        match open(&addr, deadline, deadline) {
            Ok(conn) => {
                let peer = conn.peer();
                Ok(Self { addr, peer, timeout: Duration::from_secs(60), idle: Mutex::new(vec![conn]) })
            }
            Err(last) => Err(Error::new(ErrorKind::Bootstrap {
                what: format!(
                    "the store at {addr} could not be reached for {:.1?}: {last}. Check that the process which hosts \
                     it runs, that address and port are right, and that no firewall is between",
                    started.elapsed()
                ),
                arrived: Vec::new(),
                missing: Vec::new(),
            })
            .with_context(|| in_call("store connect"))),
        }
    }

    /// How long calls without a timeout of their own may take (60 s).
    #[must_use]
    pub fn with_timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// Where the store is.
    #[must_use]
    pub fn addr(&self) -> &str {
        &self.addr
    }

    /// The address at which the store was first reached: which one of a name's it was.
    #[must_use]
    pub fn peer_addr(&self) -> Option<SocketAddr> {
        self.peer
    }

    /// Whether the store still answers, asked through a new connection.
    fn answers(&self) -> bool {
        Conn::open(&self.addr, deadline_after(RECONNECT)).is_ok()
    }

    /// A connection that can be used.
    fn take(&self, deadline: Instant) -> Answer<Conn> {
        loop {
            let Some(c) = self.idle.lock().pop() else { break };
            if c.is_fresh() {
                return Ok(c);
            }
        }
        open(&self.addr, deadline, deadline.min(deadline_after(RECONNECT)))
    }

    fn give(&self, conn: Conn) {
        let mut idle = self.idle.lock();
        if idle.len() < IDLE {
            idle.push(conn);
        }
    }

    /// Runs one exchange. `f` gets the deadline of the call, and a later one for the answers that a
    /// wait needs after it ran out.
    fn call<T>(
        &self,
        op: impl Fn() -> String,
        timeout: Duration,
        f: impl FnOnce(&mut Conn, Instant, Instant) -> Answer<T>,
    ) -> Result<T> {
        let started = Instant::now();
        let deadline = deadline_after(timeout);
        let late = deadline_after(timeout.saturating_add(GRACE));
        let (answer, conn) = match self.take(late) {
            Ok(mut conn) => (f(&mut conn, deadline, late), Some(conn)),
            Err(e) => (Err(e), None),
        };
        if let (Ok(_) | Err(Fail::NotYet), Some(conn)) = (&answer, conn) {
            self.give(conn);
        }
        answer.map_err(|fail| {
            let op = format!("store {} at {}", op(), self.addr);
            match fail {
                Fail::NotYet | Fail::TimedOut => timed_out(&op, started),
                Fail::Io(_) => self.broken(&op, &fail),
                Fail::Bad(what) => Error::new(ErrorKind::Corrupt { rank: None, what: format!("the store: {what}") })
                    .with_context(|| in_call(&op)),
            }
        })
    }

    fn broken(&self, op: &str, why: &Fail) -> Error {
        let what = format!(
            "the connection to the store failed: {why}. Its host process may have ended, or the request broke one of \
             the store's limits; whether the call took effect is not known"
        );
        Error::new(ErrorKind::Io { what }).with_context(|| in_call(op))
    }

    /// A call of which older servers know nothing; those close the connection.
    fn newer<T>(
        &self,
        op: impl Fn() -> String,
        timeout: Duration,
        f: impl FnOnce(&mut Conn, Instant, Instant) -> Answer<T>,
    ) -> Result<T> {
        let mut dropped = false;
        let result = self.call(&op, timeout, |c, deadline, late| {
            let answer = f(c, deadline, late);
            dropped = matches!(&answer, Err(Fail::Io(e)) if matches!(e.kind(),
                io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe));
            answer
        });
        if dropped && self.answers() {
            return Err(Error::unsupported(
                op(),
                format!(
                    "the store at {} closed the connection on it, as servers do that are too old for it",
                    self.addr
                ),
            )
            .with_context(|| in_call(&format!("store {} at {}", op(), self.addr))));
        }
        result
    }
}

/// Tries until `deadline` to connect; gives up at `refused_until` if what it meets is refusal.
fn open(addr: &str, deadline: Instant, refused_until: Instant) -> Answer<Conn> {
    let mut pause = Duration::from_millis(2);
    loop {
        // A server that accepts and does not answer may be a stopped one; it gets another chance.
        let attempt = deadline.min(deadline_after(Duration::from_secs(10)));
        let fail = match Conn::open(addr, attempt) {
            Ok(c) => return Ok(c),
            Err(e) => e,
        };
        let now = Instant::now();
        let until = if matches!(fail, Fail::TimedOut) { deadline } else { refused_until };
        if now + pause >= until {
            return Err(fail);
        }
        std::thread::sleep(pause);
        pause = (pause * 2).min(Duration::from_millis(250));
    }
}

fn check_addr(addr: &str) -> Result<()> {
    let bad = |what: String| Err(Error::invalid(what).with_context(|| in_call("store connect")));
    match split(addr) {
        None | Some((_, 0)) => bad(format!("the store's address must be host:port, not '{addr}'")),
        Some((host, _)) if host.parse::<Ipv6Addr>().is_ok_and(|ip| ip.is_unicast_link_local()) => bad(format!(
            "the store's address {addr} is valid on one link only and must name this host's interface on it:              [{host}%eth0]"
        )),
        Some(_) => Ok(()),
    }
}

/// What the server would close the connection for, said clearly.
fn check_limits(op: &str, keys: &[&str], values: &[&[u8]]) -> Result<()> {
    let limits = Limits::default();
    let bad = |what: String| Err(Error::invalid(what).with_context(|| in_call(&format!("store {op}"))));
    if keys.len() > limits.keys {
        return bad(format!("{} keys in one call; the most is {}", keys.len(), limits.keys));
    }
    if let Some(k) = keys.iter().find(|k| k.len() >= limits.key) {
        return bad(format!("the key '{}' has {} bytes; the most is {}", shorten(k), k.len(), limits.key - 1));
    }
    if let Some(v) = values.iter().find(|v| v.len() > limits.value) {
        return bad(format!("the value for {} has {} bytes; the most is {}", name_keys(keys), v.len(), limits.value));
    }
    Ok(())
}

impl Store for TcpStore {
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        check_limits("set", &[key], &[value])?;
        let request = Encoder::new().op(Op::Set).key(key).bytes(value);
        self.call(|| format!("set({})", name_keys(&[key])), self.timeout, |c, by, _| c.send_confirmed(request, by))
    }

    fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>> {
        check_limits("get", &[key], &[])?;
        self.call(
            || format!("get({})", name_keys(&[key])),
            timeout,
            |c, deadline, late| loop {
                c.wait(&[key], deadline, late)?;
                c.send(&Encoder::new().op(Op::Get).key(key).0, late)?;
                let value = c.bytes(late)?;
                // Nothing is also what a key gives that was deleted after the wait.
                if !value.is_empty() || c.check(&[key], late)? {
                    return Ok(value);
                }
            },
        )
    }

    fn add(&self, key: &str, delta: i64) -> Result<i64> {
        check_limits("add", &[key], &[])?;
        let mut closed = false;
        let op = || format!("add({}, {delta})", name_keys(&[key]));
        let result = self.call(op, self.timeout, |c, by, _| {
            c.send(&Encoder::new().op(Op::Add).key(key).i64(delta).0, by)?;
            let answer = c.i64(by);
            closed = matches!(&answer, Err(Fail::Io(e)) if matches!(e.kind(),
                io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset));
            answer
        });
        if closed && self.answers() {
            let what = "the store closed the connection, as it does if the key holds no decimal number or the sum \
                        does not fit into 64 bits";
            return Err(Error::invalid(what).with_context(|| in_call(&format!("store {} at {}", op(), self.addr))));
        }
        result
    }

    fn check(&self, keys: &[&str]) -> Result<bool> {
        check_limits("check", keys, &[])?;
        self.call(|| format!("check({})", name_keys(keys)), self.timeout, |c, by, _| c.check(keys, by))
    }

    fn wait(&self, keys: &[&str], timeout: Duration) -> Result<()> {
        check_limits("wait", keys, &[])?;
        self.call(|| format!("wait({})", name_keys(keys)), timeout, |c, deadline, late| c.wait(keys, deadline, late))
    }

    fn compare_set(&self, key: &str, expected: &[u8], desired: &[u8]) -> Result<Vec<u8>> {
        check_limits("compare_set", &[key], &[expected, desired])?;
        let request = Encoder::new().op(Op::CompareSet).key(key).bytes(expected).bytes(desired);
        self.call(
            || format!("compare_set({})", name_keys(&[key])),
            self.timeout,
            |c, by, _| {
                c.send(&request.0, by)?;
                c.bytes(by)
            },
        )
    }

    fn delete_key(&self, key: &str) -> Result<bool> {
        check_limits("delete_key", &[key], &[])?;
        let op = || format!("delete_key({})", name_keys(&[key]));
        self.call(op, self.timeout, |c, by, _| {
            c.send(&Encoder::new().op(Op::DeleteKey).key(key).0, by)?;
            Ok(c.i64(by)? > 0)
        })
    }

    fn num_keys(&self) -> Result<i64> {
        self.call(
            || "num_keys".into(),
            self.timeout,
            |c, by, _| {
                c.send(&Encoder::new().op(Op::GetNumKeys).0, by)?;
                c.i64(by)
            },
        )
    }

    fn append(&self, key: &str, value: &[u8]) -> Result<()> {
        check_limits("append", &[key], &[value])?;
        let request = Encoder::new().op(Op::Append).key(key).bytes(value);
        let op = || format!("append({})", name_keys(&[key]));
        self.call(op, self.timeout, |c, by, _| c.send_confirmed(request, by))
    }

    fn multi_get(&self, keys: &[&str], timeout: Duration) -> Result<Vec<Vec<u8>>> {
        check_limits("multi_get", keys, &[])?;
        self.call(
            || format!("multi_get({})", name_keys(keys)),
            timeout,
            |c, deadline, late| loop {
                c.wait(keys, deadline, late)?;
                c.send(&Encoder::new().op(Op::MultiGet).keys(keys).0, late)?;
                let values = keys.iter().map(|_| c.bytes(late)).collect::<Answer<Vec<_>>>()?;
                if values.iter().all(|v| !v.is_empty()) || c.check(keys, late)? {
                    return Ok(values);
                }
            },
        )
    }

    fn multi_set(&self, pairs: &[(&str, &[u8])]) -> Result<()> {
        let (keys, values): (Vec<&str>, Vec<&[u8]>) = pairs.iter().copied().unzip();
        check_limits("multi_set", &keys, &values)?;
        let start = Encoder::new().op(Op::MultiSet).u64(pairs.len() as u64);
        let request = pairs.iter().fold(start, |e, (k, v)| e.key(k).bytes(v));
        let op = || format!("multi_set({})", name_keys(&keys));
        self.call(op, self.timeout, |c, by, _| c.send_confirmed(request, by))
    }

    fn queue_push(&self, key: &str, value: &[u8]) -> Result<()> {
        check_limits("queue_push", &[key], &[value])?;
        let request = Encoder::new().op(Op::QueuePush).key(key).bytes(value);
        let op = || format!("queue_push({})", name_keys(&[key]));
        self.newer(op, self.timeout, |c, by, _| c.send_confirmed(request, by))
    }

    fn queue_pop(&self, key: &str, timeout: Duration) -> Result<Vec<u8>> {
        check_limits("queue_pop", &[key], &[])?;
        let op = || format!("queue_pop({})", name_keys(&[key]));
        self.newer(op, timeout, |c, deadline, late| {
            let mut pause = Duration::from_millis(1);
            loop {
                let slice = deadline.min(deadline_after(QUEUE_SLICE));
                match c.wait(&[key], slice, late) {
                    Err(Fail::NotYet) if Instant::now() < deadline => continue,
                    waited => waited?,
                }
                c.send(&Encoder::new().op(Op::QueuePop).key(key).0, late)?;
                if c.i64(late)? > 0 {
                    return c.bytes(late);
                }
                // Another consumer was faster, or a plain value has the queue's name, for which the
                // wait ends at once.
                if Instant::now() >= deadline {
                    return Err(Fail::NotYet);
                }
                std::thread::sleep(pause.min(deadline.saturating_duration_since(Instant::now())));
                pause = (pause * 2).min(Duration::from_millis(20));
            }
        })
    }

    fn queue_len(&self, key: &str) -> Result<i64> {
        check_limits("queue_len", &[key], &[])?;
        let op = || format!("queue_len({})", name_keys(&[key]));
        self.newer(op, self.timeout, |c, by, _| {
            c.send(&Encoder::new().op(Op::QueueLen).key(key).0, by)?;
            c.i64(by)
        })
    }

    fn list_keys(&self) -> Result<Vec<String>> {
        let op = || "list_keys".to_owned();
        self.newer(op, self.timeout, |c, by, _| {
            c.send(&Encoder::new().op(Op::ListKeys).0, by)?;
            let n = c.i64(by)?;
            let mut keys = Vec::new();
            for _ in 0..n {
                // Keys without the slash are PyTorch's own.
                if let Some((b'/', key)) = c.bytes(by)?.split_first() {
                    keys.push(String::from_utf8_lossy(key).into_owned());
                }
            }
            Ok(keys)
        })
    }
}

impl Conn {
    fn check(&mut self, keys: &[&str], deadline: Instant) -> Answer<bool> {
        self.send(&Encoder::new().op(Op::Check).keys(keys).0, deadline)?;
        match self.u8(deadline)? {
            READY => Ok(true),
            NOT_READY => Ok(false),
            b => Err(Fail::Bad(format!("it answered a check with {b}"))),
        }
    }
}
