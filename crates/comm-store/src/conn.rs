//! One client connection: requests out, replies in, each by a deadline.

use std::collections::HashSet;
use std::fmt;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use rustix::net::{RecvFlags, recv, sockopt};

use crate::protocol::{Encoder, MAGIC, Op, STOP_WAITING, WAIT_CANCELED};

/// How long an address may leave a connection request unanswered while there are others to try. Long enough for one
/// lost packet; the next round tries it again.
const SILENT: Duration = Duration::from_secs(2);
/// No reply is believed to be longer.
const MAX_REPLY: u64 = 1 << 30;

/// Why an exchange failed.
#[derive(Debug)]
pub(crate) enum Fail {
    /// The wait ran out, and the connection is fine.
    NotYet,
    /// The server did not answer by the deadline.
    TimedOut,
    /// The connection broke.
    Io(io::Error),
    /// The server said something that is no answer.
    Bad(String),
}

impl fmt::Display for Fail {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotYet => f.write_str("the wait ran out"),
            Self::TimedOut => f.write_str("no answer in time"),
            Self::Io(e) if e.kind() == io::ErrorKind::UnexpectedEof => f.write_str("the server closed the connection"),
            Self::Io(e) => write!(f, "{e}"),
            Self::Bad(what) => f.write_str(what),
        }
    }
}

impl From<io::Error> for Fail {
    fn from(e: io::Error) -> Self {
        match e.kind() {
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => Self::TimedOut,
            _ => Self::Io(e),
        }
    }
}

pub(crate) type Answer<T> = Result<T, Fail>;

/// A connection that has introduced itself.
#[derive(Debug)]
pub(crate) struct Conn {
    stream: TcpStream,
    buf: Box<[u8]>,
    at: usize,
    have: usize,
    nonce: u32,
}

/// What is left until `deadline`, but never zero, which the socket calls do not take.
fn left(deadline: Instant) -> Option<Duration> {
    let left = deadline.saturating_duration_since(Instant::now());
    (!left.is_zero()).then(|| left.clamp(Duration::from_millis(1), Duration::from_secs(1_000_000)))
}

/// Resolves `addr` (`host:port`) by `deadline`. The system's resolver knows no deadlines, so names go through a
/// thread of their own, which is left behind if it is late.
pub(crate) fn resolve(addr: &str, deadline: Instant) -> Answer<Vec<SocketAddr>> {
    if let Ok(a) = addr.parse() {
        return Ok(vec![a]);
    }
    let (host, port) = split(addr).ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "it is not host:port"))?;
    let (tx, rx) = mpsc::channel();
    let host = host.to_owned();
    std::thread::Builder::new().name("rustcomms-resolve".into()).spawn(move || {
        // Nobody listens any more if this is late.
        let _ = tx.send((host.as_str(), port).to_socket_addrs().map(Iterator::collect::<Vec<_>>));
    })?;
    match rx.recv_timeout(left(deadline).ok_or(Fail::TimedOut)?) {
        Ok(found) => {
            let mut found = found?;
            // The resolver may list an address once per line of a hosts file.
            let mut seen = HashSet::new();
            found.retain(|a| seen.insert(*a));
            Ok(found)
        }
        Err(_) => Err(Fail::TimedOut),
    }
}

/// Host and port. The brackets of an IPv6 address go, because the resolver, which alone knows interfaces by name
/// (`[fe80::1%eth0]:29500`), takes none.
pub(crate) fn split(addr: &str) -> Option<(&str, u16)> {
    let (host, port) = addr.rsplit_once(':')?;
    let host = host.strip_prefix('[').and_then(|h| h.strip_suffix(']')).unwrap_or(host);
    (!host.is_empty()).then_some(host).zip(port.parse().ok())
}

impl Conn {
    /// Connects and shakes hands, on the first address of the host that answers.
    pub(crate) fn open(addr: &str, deadline: Instant) -> Answer<Self> {
        let found = resolve(addr, deadline)?;
        let mut last = Fail::Io(io::Error::new(io::ErrorKind::NotFound, "the name has no address"));
        for (at, a) in found.iter().enumerate() {
            // An address at which nobody answers must leave time for the others.
            let others = (found.len() - at - 1) as u32;
            let share = left(deadline).ok_or(Fail::TimedOut)? / (others + 1);
            let deadline = if others == 0 { deadline } else { Instant::now() + share };
            let connect = if others == 0 { share } else { share.min(SILENT) };
            match Self::open_one(*a, connect, deadline) {
                Ok(c) => return Ok(c),
                Err(e) => last = e,
            }
        }
        Err(last)
    }

    fn open_one(addr: SocketAddr, connect: Duration, deadline: Instant) -> Answer<Self> {
        let stream = TcpStream::connect_timeout(&addr, connect.max(Duration::from_millis(1)))?;
        // While nobody listens on a local port, connecting to it can meet itself.
        if stream.local_addr()? == stream.peer_addr()? {
            return Err(Fail::Io(io::ErrorKind::ConnectionRefused.into()));
        }
        stream.set_nodelay(true)?;
        // A server whose host vanishes would leave waits hanging until their own timeouts. Best effort.
        let _ = sockopt::set_socket_keepalive(&stream, true);
        #[cfg(target_os = "linux")]
        {
            let _ = sockopt::set_tcp_keepidle(&stream, Duration::from_secs(20));
            let _ = sockopt::set_tcp_keepintvl(&stream, Duration::from_secs(5));
            let _ = sockopt::set_tcp_keepcnt(&stream, 4);
        }
        let mut c = Self { stream, buf: vec![0; 4096].into(), at: 0, have: 0, nonce: std::process::id() };
        c.send(&Encoder::new().op(Op::Validate).u32(MAGIC).op(Op::Ping).u32(c.nonce).0, deadline)?;
        c.pong(deadline)?;
        Ok(c)
    }

    /// The address at which the server was reached.
    pub(crate) fn peer(&self) -> Option<SocketAddr> {
        self.stream.peer_addr().ok()
    }

    /// Whether an idle connection can be used: neither closed by the server nor out of step.
    pub(crate) fn is_fresh(&self) -> bool {
        let mut byte = [0u8; 1];
        let quiet = recv(&self.stream, &mut byte[..], RecvFlags::PEEK | RecvFlags::DONTWAIT);
        self.at == self.have && matches!(quiet, Err(rustix::io::Errno::AGAIN))
    }

    pub(crate) fn send(&mut self, mut bytes: &[u8], deadline: Instant) -> Answer<()> {
        while !bytes.is_empty() {
            self.stream.set_write_timeout(Some(left(deadline).ok_or(Fail::TimedOut)?))?;
            match self.stream.write(bytes) {
                Ok(n) => bytes = &bytes[n..],
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e.into()),
            }
        }
        Ok(())
    }

    /// Sends a request that has no reply, and waits until the server has carried it out: it answers
    /// in order, so the answer to a ping behind the request says so. Without it, another
    /// connection of this client could overtake the request.
    pub(crate) fn send_confirmed(&mut self, request: Encoder, deadline: Instant) -> Answer<()> {
        self.nonce = self.nonce.wrapping_add(1);
        self.send(&request.op(Op::Ping).u32(self.nonce).0, deadline)?;
        self.pong(deadline)
    }

    fn pong(&mut self, deadline: Instant) -> Answer<()> {
        let mut answer = [0; 4];
        self.read(&mut answer, deadline)?;
        if u32::from_le_bytes(answer) != self.nonce {
            return Err(Fail::Bad(format!("it answered a ping with {answer:02x?}; is it a TCPStore?")));
        }
        Ok(())
    }

    /// Waits for the reply to WAIT until `deadline`, and then cancels it, for which the server has
    /// until `late`.
    pub(crate) fn wait(&mut self, keys: &[&str], deadline: Instant, late: Instant) -> Answer<()> {
        self.send(&Encoder::new().op(Op::Wait).keys(keys).0, late)?;
        match self.u8(deadline) {
            Ok(STOP_WAITING) => return Ok(()),
            Ok(b) => return Err(Fail::Bad(format!("it answered a wait with {b}"))),
            Err(Fail::TimedOut) => {}
            Err(e) => return Err(e),
        }
        self.send(&Encoder::new().op(Op::CancelWait).0, late)?;
        match self.u8(late)? {
            WAIT_CANCELED => Err(Fail::NotYet),
            // The wait ended while the cancellation was on its way, which is answered all the same.
            STOP_WAITING => match self.u8(late)? {
                WAIT_CANCELED => Ok(()),
                b => Err(Fail::Bad(format!("it answered a cancellation with {b}"))),
            },
            b => Err(Fail::Bad(format!("it answered a cancellation with {b}"))),
        }
    }

    fn fill(&mut self, deadline: Instant) -> Answer<()> {
        loop {
            self.stream.set_read_timeout(Some(left(deadline).ok_or(Fail::TimedOut)?))?;
            match self.stream.read(&mut self.buf) {
                Ok(0) => return Err(Fail::Io(io::ErrorKind::UnexpectedEof.into())),
                Ok(n) => {
                    (self.at, self.have) = (0, n);
                    return Ok(());
                }
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e.into()),
            }
        }
    }

    fn read(&mut self, mut out: &mut [u8], deadline: Instant) -> Answer<()> {
        while !out.is_empty() {
            if self.at == self.have {
                self.fill(deadline)?;
            }
            let n = out.len().min(self.have - self.at);
            let (head, rest) = out.split_at_mut(n);
            head.copy_from_slice(&self.buf[self.at..self.at + n]);
            self.at += n;
            out = rest;
        }
        Ok(())
    }

    pub(crate) fn u8(&mut self, deadline: Instant) -> Answer<u8> {
        let mut b = [0];
        self.read(&mut b, deadline)?;
        Ok(b[0])
    }

    pub(crate) fn i64(&mut self, deadline: Instant) -> Answer<i64> {
        let mut b = [0; 8];
        self.read(&mut b, deadline)?;
        Ok(i64::from_le_bytes(b))
    }

    pub(crate) fn bytes(&mut self, deadline: Instant) -> Answer<Vec<u8>> {
        let len = self.i64(deadline)? as u64;
        if len > MAX_REPLY {
            return Err(Fail::Bad(format!("it announced a value of {len} bytes")));
        }
        // Memory follows the bytes that arrive, not those that are announced.
        let mut out = Vec::new();
        while (out.len() as u64) < len {
            let have = out.len();
            let next = (len - have as u64).min((have as u64).max(1 << 20)) as usize;
            out.reserve_exact(next);
            out.resize(have + next, 0);
            self.read(&mut out[have..], deadline)?;
        }
        Ok(out)
    }
}
