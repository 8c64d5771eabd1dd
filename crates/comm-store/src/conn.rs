//! One client connection: requests out, replies in, each by a deadline.

use std::collections::HashSet;
use std::fmt;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use comm_core::{SECRET_VARIABLE, Secret};
use rustix::net::{RecvFlags, recv, sockopt};

use crate::auth::{self, CHALLENGE, Initiator};
use crate::protocol::{ASKS_FOR_SECRET, Encoder, HAS_NO_SECRET, MAGIC, NOTICE, Op};

/// How long an address may leave a connection request unanswered while there are others to try. Long enough for one
/// lost packet; the next round tries it again.
const SILENT: Duration = Duration::from_secs(2);
/// What the replies of one call may hold, in bytes.
const MAX_REPLY: u64 = 1 << 30;
/// What a value in a reply counts for beside its bytes.
const ITEM: u64 = 32;
/// Memory that is taken for a value before its bytes come.
const AHEAD: u64 = 64 << 10;

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
    /// It does not prove that it knows the secret, because it hung up or says nothing.
    NoProof(Box<Fail>),
    /// It and this client disagree about a secret, for good.
    Secret(&'static str),
}

impl Fail {
    /// Whether trying again at once can meet something else.
    pub(crate) fn is_late(&self) -> bool {
        match self {
            Self::TimedOut => true,
            Self::NoProof(why) => why.is_late(),
            _ => false,
        }
    }
}

impl fmt::Display for Fail {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotYet => f.write_str("the wait ran out"),
            Self::TimedOut => f.write_str("no answer in time"),
            Self::Io(e) if e.kind() == io::ErrorKind::UnexpectedEof => f.write_str("the server closed the connection"),
            Self::Io(e) => write!(f, "{e}"),
            Self::Bad(what) => f.write_str(what),
            Self::NoProof(why) => write!(
                f,
                "it does not prove that it knows the secret ({why}). Has it none (is it PyTorch's? it and \
                 {SECRET_VARIABLE} exclude each other)?"
            ),
            Self::Secret(what) => f.write_str(what),
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

/// What a connection needs of a socket.
pub(crate) trait Wire {
    /// Reads what is there into `buf`, of which something must come by `deadline`; 0 at the end.
    fn read_by(&mut self, buf: &mut [u8], deadline: Instant) -> Answer<usize>;
    /// Writes a part of `bytes`, of which something must go by `deadline`.
    fn write_by(&mut self, bytes: &[u8], deadline: Instant) -> Answer<usize>;
}

impl Wire for TcpStream {
    fn read_by(&mut self, buf: &mut [u8], deadline: Instant) -> Answer<usize> {
        loop {
            self.set_read_timeout(Some(left(deadline).ok_or(Fail::TimedOut)?))?;
            match self.read(buf) {
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                read => return Ok(read?),
            }
        }
    }

    fn write_by(&mut self, bytes: &[u8], deadline: Instant) -> Answer<usize> {
        loop {
            self.set_write_timeout(Some(left(deadline).ok_or(Fail::TimedOut)?))?;
            match self.write(bytes) {
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                written => return Ok(written?),
            }
        }
    }
}

/// A connection that has introduced itself.
#[derive(Debug)]
pub(crate) struct Conn<W = TcpStream> {
    stream: W,
    buf: Box<[u8]>,
    at: usize,
    have: usize,
    nonce: u32,
    /// What the replies of this call may still hold.
    room: u64,
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
    pub(crate) fn open(addr: &str, secret: Option<&Secret>, deadline: Instant) -> Answer<Self> {
        let found = resolve(addr, deadline)?;
        let mut last = Fail::Io(io::Error::new(io::ErrorKind::NotFound, "the name has no address"));
        for (at, a) in found.iter().enumerate() {
            // An address at which nobody answers must leave time for the others.
            let others = (found.len() - at - 1) as u32;
            let share = left(deadline).ok_or(Fail::TimedOut)? / (others + 1);
            let deadline = if others == 0 { deadline } else { Instant::now() + share };
            let connect = if others == 0 { share } else { share.min(SILENT) };
            match Self::open_one(*a, secret, connect, deadline) {
                Ok(c) => return Ok(c),
                // Who is there tells more than who is not.
                Err(e) if !matches!(last, Fail::Secret(_)) => last = e,
                Err(_) => {}
            }
        }
        Err(last)
    }

    fn open_one(addr: SocketAddr, secret: Option<&Secret>, connect: Duration, deadline: Instant) -> Answer<Self> {
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
        Self::greet(stream, secret, deadline)
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
}

impl<W: Wire> Conn<W> {
    /// A connection over which hands have been shaken.
    pub(crate) fn introduced(stream: W) -> Self {
        Self { stream, buf: vec![0; 4096].into(), at: 0, have: 0, nonce: 0, room: MAX_REPLY }
    }

    /// Shakes hands over a fresh connection: proof of the secret if there is one, then introduction.
    pub(crate) fn greet(stream: W, secret: Option<&Secret>, deadline: Instant) -> Answer<Self> {
        let mut c = Self::introduced(stream);
        c.nonce = std::process::id();
        let mut hello = match secret {
            Some(secret) => c.prove(secret, deadline)?,
            None => Vec::new(),
        };
        hello.extend(Encoder::new().op(Op::Validate).u32(MAGIC).op(Op::Ping).u32(c.nonce).0);
        c.send(&hello, deadline)?;
        let mut answer = [0; 4];
        c.read(&mut answer, deadline)?;
        if secret.is_none() && ASKS_FOR_SECRET.starts_with(&answer) {
            let mut rest = [0; NOTICE - 4];
            c.read(&mut rest, deadline)?;
            if ASKS_FOR_SECRET.ends_with(&rest) {
                return Err(Fail::Secret(
                    "asks for a secret: set RUSTCOMMS_SECRET to the one that its other users have",
                ));
            }
        }
        c.is_pong(answer)?;
        Ok(c)
    }

    /// Sends the first message of the handshake, has the second, and returns the third.
    fn prove(&mut self, secret: &Secret, deadline: Instant) -> Answer<Vec<u8>> {
        let (initiator, hello) =
            Initiator::new(secret, auth::STORE).map_err(|e| Fail::Io(io::Error::other(e.to_string())))?;
        let mut challenge = [0; CHALLENGE];
        let (first, rest) = challenge.split_at_mut(NOTICE);
        let unproven = |why| Fail::NoProof(Box::new(why));
        self.send(&hello, deadline).map_err(unproven)?;
        self.read(first, deadline).map_err(unproven)?;
        if *first == HAS_NO_SECRET {
            return Err(Fail::Secret(
                "has no secret (is it PyTorch's? it and a secret exclude each other): set RUSTCOMMS_SECRET where the store \
                 is hosted, as in the environment of `rustcomms run`, or use no secret here",
            ));
        }
        self.read(rest, deadline).map_err(unproven)?;
        match initiator.answer(&challenge) {
            Some(proof) => Ok(proof.into()),
            None => Err(Fail::Secret(
                "does not prove that it knows this process's secret: it has another (RUSTCOMMS_SECRET must be the same on \
                 all ranks and where the store is hosted), or it is no store of rustcomms",
            )),
        }
    }

    /// A call begins.
    pub(crate) fn begin(&mut self) {
        self.room = MAX_REPLY;
    }

    pub(crate) fn send(&mut self, mut bytes: &[u8], deadline: Instant) -> Answer<()> {
        while !bytes.is_empty() {
            match self.stream.write_by(bytes, deadline)? {
                0 => return Err(Fail::Io(io::ErrorKind::WriteZero.into())),
                n => bytes = &bytes[n..],
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
        let mut answer = [0; 4];
        self.read(&mut answer, deadline)?;
        self.is_pong(answer)
    }

    fn is_pong(&self, answer: [u8; 4]) -> Answer<()> {
        if u32::from_le_bytes(answer) != self.nonce {
            return Err(Fail::Bad(format!("it answered a ping with {answer:02x?}; is it a TCPStore?")));
        }
        Ok(())
    }

    fn read(&mut self, mut out: &mut [u8], deadline: Instant) -> Answer<()> {
        while !out.is_empty() {
            if self.at == self.have {
                match self.stream.read_by(&mut self.buf, deadline)? {
                    0 => return Err(Fail::Io(io::ErrorKind::UnexpectedEof.into())),
                    n => (self.at, self.have) = (0, n),
                }
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

    /// A number of things, which is not negative.
    pub(crate) fn count(&mut self, of: &str, deadline: Instant) -> Answer<i64> {
        match self.i64(deadline)? {
            n if n >= 0 => Ok(n),
            n => Err(Fail::Bad(format!("it announced {n} {of}"))),
        }
    }

    pub(crate) fn bytes(&mut self, deadline: Instant) -> Answer<Vec<u8>> {
        let len = self.i64(deadline)? as u64;
        let cost = len.saturating_add(ITEM);
        if cost > self.room {
            return Err(Fail::Bad(format!(
                "it announced a value of {len} bytes; its replies to one call may have {MAX_REPLY} together"
            )));
        }
        self.room -= cost;
        // Memory follows the bytes that arrive, not those that are announced.
        let mut out = Vec::new();
        while (out.len() as u64) < len {
            let have = out.len();
            let next = (len - have as u64).min((have as u64).max(AHEAD)) as usize;
            out.reserve_exact(next);
            out.resize(have + next, 0);
            self.read(&mut out[have..], deadline)?;
        }
        Ok(out)
    }
}
