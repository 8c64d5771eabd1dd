//! The client of a [`TcpStoreServer`](crate::TcpStoreServer), or of PyTorch's.

use std::fmt::Display;
use std::io;
use std::net::{Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use comm_core::{Error, ErrorKind, Result, Secret, Store};
use parking_lot::Mutex;

use crate::conn::{Answer, Conn, Fail, split};
use crate::protocol::{Encoder, Limits, Op};
use crate::{deadline_after, in_call, name_keys, shorten, timed_out};

/// How much longer than its timeout a wait may take, for the server to answer its cancellation.
const GRACE: Duration = Duration::from_secs(1);
/// How long a store that was there before may refuse connections.
const RECONNECT: Duration = Duration::from_secs(1);
/// Connections kept for later calls.
const IDLE: usize = 4;
/// The longest that one attempt to connect takes, and for which a server may answer nonsense or hang up.
const ATTEMPT: Duration = Duration::from_secs(10);

/// A [`Store`] kept by a [`TcpStoreServer`](crate::TcpStoreServer) or a PyTorch `TCPStore`.
///
/// Every call in progress has a connection of its own, so a blocking [`get`](Store::get) never
/// delays another thread's [`set`](Store::set); idle connections are kept for reuse. Calls return
/// when the server has carried them out. A connection that broke is replaced on the next call; the
/// call that met it fails, because it may or may not have been carried out.
///
/// Keys are sent with a slash in front, as PyTorch does, so both see the same keys.
///
/// Clones share the connections.
#[derive(Clone, Debug)]
pub struct TcpStore {
    addr: String,
    peer: Option<SocketAddr>,
    timeout: Duration,
    secret: Option<Secret>,
    idle: Arc<Mutex<Vec<Conn>>>,
}

impl TcpStore {
    /// Connects to the store at `addr` (`host:port`), which has no secret, waiting up to `timeout` for it to be there.
    ///
    /// An IPv6 address may stand in brackets; a link-local one names its interface, as in `[fe80::1%eth0]:29500`. A
    /// name that has several addresses is tried on all of them, again and again.
    ///
    /// # Errors
    ///
    /// As [`connect_with`](Self::connect_with).
    pub fn connect(addr: impl Display, timeout: Duration) -> Result<Self> {
        Self::connect_with(addr, timeout, None)
    }

    /// Connects to the store at `addr` (`host:port`), waiting up to `timeout` for it to be there. With a secret, the
    /// store must prove that it knows it, as this client does, on each connection.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` when `addr` is no address; `Bootstrap` when the store could not be reached in time, and as soon
    /// as it shows that it has another secret, or that only one end has any.
    pub fn connect_with(addr: impl Display, timeout: Duration, secret: Option<&Secret>) -> Result<Self> {
        let addr = addr.to_string();
        check_addr(&addr)?;
        let started = Instant::now();
        let deadline = deadline_after(timeout);
        let conn = open(&addr, secret, deadline, deadline).map_err(|last| {
            stranger(&addr, &last).unwrap_or_else(|| {
                bootstrap(format!(
                    "the store at {addr} could not be reached for {:.1?}: {last}. Check that the process which hosts \
                     it runs, that address and port are right, and that no firewall is between",
                    started.elapsed()
                ))
            })
        });
        let conn = conn.map_err(|e| e.with_context(|| in_call("store connect")))?;
        let (timeout, secret, peer) = (Duration::from_secs(60), secret.cloned(), conn.peer());
        Ok(Self { addr, peer, timeout, secret, idle: Arc::new(Mutex::new(vec![conn])) })
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
        Conn::open(&self.addr, self.secret.as_ref(), deadline_after(RECONNECT)).is_ok()
    }

    /// A connection that can be used.
    fn take(&self, deadline: Instant) -> Answer<Conn> {
        loop {
            let Some(c) = self.idle.lock().pop() else { break };
            if c.is_fresh() {
                return Ok(c);
            }
        }
        open(&self.addr, self.secret.as_ref(), deadline, deadline.min(deadline_after(RECONNECT)))
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
            Ok(mut conn) => {
                conn.begin();
                (f(&mut conn, deadline, late), Some(conn))
            }
            Err(e) => (Err(e), None),
        };
        if let (Ok(_) | Err(Fail::NotYet), Some(conn)) = (&answer, conn) {
            self.give(conn);
        }
        answer.map_err(|fail| {
            let op = format!("store {} at {}", op(), self.addr);
            if let Some(e) = stranger(&self.addr, &fail) {
                return e.with_context(|| in_call(&op));
            }
            match fail {
                Fail::NotYet | Fail::TimedOut => timed_out(&op, started),
                Fail::Io(_) | Fail::NoProof(_) | Fail::Secret(_) => self.broken(&op, &fail),
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

fn bootstrap(what: String) -> Error {
    Error::new(ErrorKind::Bootstrap { what, arrived: Vec::new(), missing: Vec::new() })
}

/// The error for a store that is there, but not for this client.
fn stranger(addr: &str, fail: &Fail) -> Option<Error> {
    match fail {
        Fail::NoProof(_) => Some(bootstrap(format!("the store at {addr} answers, but {fail}"))),
        Fail::Secret(what) => Some(bootstrap(format!("the store at {addr} {what}"))),
        _ => None,
    }
}

/// Tries until `deadline` to connect; gives up at `refused_until` if what it meets is refusal.
fn open(addr: &str, secret: Option<&Secret>, deadline: Instant, refused_until: Instant) -> Answer<Conn> {
    let mut pause = Duration::from_millis(2);
    let mut strange = None;
    loop {
        // A server that accepts and does not answer may be a stopped one; it gets another chance.
        let attempt = deadline.min(deadline_after(ATTEMPT));
        let fail = match Conn::open(addr, secret, attempt) {
            Ok(c) => return Ok(c),
            Err(e) => e,
        };
        let now = Instant::now();
        let until = match &fail {
            Fail::Secret(_) => return Err(fail),
            late if late.is_late() => deadline,
            // Somebody else may still hold the port, or a proxy whose store is not there yet; but not for long.
            Fail::NoProof(_) | Fail::Bad(_) => refused_until.min(*strange.get_or_insert(now) + ATTEMPT),
            _ => refused_until,
        };
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
        self.call(|| format!("get({})", name_keys(&[key])), timeout, |c, deadline, late| c.get(key, deadline, late))
    }

    fn add(&self, key: &str, delta: i64) -> Result<i64> {
        check_limits("add", &[key], &[])?;
        let mut closed = false;
        let op = || format!("add({}, {delta})", name_keys(&[key]));
        let result = self.call(op, self.timeout, |c, by, _| {
            let answer = c.add(key, delta, by);
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
        let op = || format!("compare_set({})", name_keys(&[key]));
        self.call(op, self.timeout, |c, by, _| c.compare_set(key, expected, desired, by))
    }

    fn delete_key(&self, key: &str) -> Result<bool> {
        check_limits("delete_key", &[key], &[])?;
        let op = || format!("delete_key({})", name_keys(&[key]));
        self.call(op, self.timeout, |c, by, _| c.delete_key(key, by))
    }

    fn num_keys(&self) -> Result<i64> {
        self.call(|| "num_keys".into(), self.timeout, |c, by, _| c.num_keys(by))
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
            |c, deadline, late| c.multi_get(keys, deadline, late),
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
        self.newer(op, timeout, |c, deadline, late| c.queue_pop(key, deadline, late))
    }

    fn queue_len(&self, key: &str) -> Result<i64> {
        check_limits("queue_len", &[key], &[])?;
        let op = || format!("queue_len({})", name_keys(&[key]));
        self.newer(op, self.timeout, |c, by, _| c.queue_len(key, by))
    }

    fn list_keys(&self) -> Result<Vec<String>> {
        self.newer(|| "list_keys".to_owned(), self.timeout, |c, by, _| c.list_keys(by))
    }
}
