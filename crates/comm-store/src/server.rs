//! The server: one thread, all connections, bounded memory.

use std::collections::HashMap;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use comm_core::{Error, Result};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::protocol::{Limits, Parser, STOP_WAITING, Step};
use crate::state::{ConnId, State};

/// Replies that a connection may leave unread before the server stops listening to it.
const OUT_HIGH: usize = 256 << 10;
/// How much is read at once.
const CHUNK: usize = 64 << 10;
/// What a connection may hold without drawing on the shared budget: enough for small requests, so
/// that a full store still answers questions.
const FREE: usize = 2 * CHUNK;

/// Limits of a [`TcpStoreServer`]. Everything has a default that suits thousands of ranks.
#[derive(Clone, Debug)]
pub struct TcpStoreServerOptions {
    max_connections: usize,
    first_message_timeout: Duration,
    stall_timeout: Duration,
    idle_timeout: Option<Duration>,
    limits: Limits,
    max_memory: usize,
}

impl Default for TcpStoreServerOptions {
    fn default() -> Self {
        Self {
            max_connections: 16_384,
            first_message_timeout: Duration::from_secs(10),
            stall_timeout: Duration::from_secs(60),
            idle_timeout: None,
            limits: Limits::default(),
            max_memory: 1 << 30,
        }
    }
}

impl TcpStoreServerOptions {
    /// The defaults.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// The most connections at once (16,384). One more is refused, unless a connection that has not
    /// yet introduced itself can be dropped in its favour.
    #[must_use]
    pub fn max_connections(mut self, n: usize) -> Self {
        self.max_connections = n.max(1);
        self
    }

    /// How long a new connection may take to introduce itself (10 s).
    #[must_use]
    pub fn first_message_timeout(mut self, t: Duration) -> Self {
        self.first_message_timeout = t;
        self
    }

    /// How long a connection may stop in the middle of a request, or leave replies unread (60 s).
    #[must_use]
    pub fn stall_timeout(mut self, t: Duration) -> Self {
        self.stall_timeout = t;
        self
    }

    /// How long a connection may be silent between requests (for ever: ranks may compute for days
    /// between two questions).
    #[must_use]
    pub fn idle_timeout(mut self, t: Option<Duration>) -> Self {
        self.idle_timeout = t;
        self
    }

    /// The longest key in bytes (8 KiB).
    #[must_use]
    pub fn max_key(mut self, bytes: usize) -> Self {
        self.limits.key = bytes;
        self
    }

    /// The longest value in one request in bytes (8 MiB).
    #[must_use]
    pub fn max_value(mut self, bytes: usize) -> Self {
        self.limits.value = bytes;
        self
    }

    /// The most keys in one request (131,072).
    #[must_use]
    pub fn max_keys_per_request(mut self, n: usize) -> Self {
        self.limits.keys = n;
        self
    }

    /// The most memory in bytes for what is stored and what is in transit, about (1 GiB). Requests
    /// that would exceed it close their connection.
    #[must_use]
    pub fn max_memory(mut self, bytes: usize) -> Self {
        self.max_memory = bytes;
        self
    }

    /// Starts a server with these limits.
    pub fn bind(self, addr: impl ToSocketAddrs) -> Result<TcpStoreServer> {
        let listener =
            TcpListener::bind(addr).map_err(|e| Error::io("the store's server could not bind its address", &e))?;
        self.serve(listener)
    }

    /// Starts a server on a listener that exists, as torchrun's agents and systemd hand them over.
    pub fn serve(self, listener: TcpListener) -> Result<TcpStoreServer> {
        let io = |e: io::Error| Error::io("the store's server could not start", &e);
        let addr = listener.local_addr().map_err(io)?;
        listener.set_nonblocking(true).map_err(io)?;
        // std's backlog of 128 is short of the ranks that can come at once; listening again raises it.
        rustix::net::listen(&listener, 4096).map_err(|e| io(e.into()))?;
        let (waker, woken) = UnixStream::pair().map_err(io)?;
        woken.set_nonblocking(true).map_err(io)?;
        let shared = Arc::new(Shared::default());
        let server = Loop {
            options: self,
            listener,
            waker: woken,
            shared: Arc::clone(&shared),
            conns: HashMap::new(),
            next_id: 0,
            state: State::default(),
            charged: 0,
            accept_after: None,
            scratch: vec![0; CHUNK],
        };
        let thread =
            std::thread::Builder::new().name("rustcomms-store".into()).spawn(move || server.run()).map_err(io)?;
        Ok(TcpStoreServer { addr, shared, waker, thread: Some(thread) })
    }
}

#[derive(Debug, Default)]
struct Shared {
    stop: AtomicBool,
    connections: AtomicUsize,
    memory: AtomicUsize,
    refused: AtomicU64,
}

/// The server of a [`TcpStore`](crate::TcpStore), on a thread of its own. Dropping it stops the
/// thread and closes all connections.
///
/// It speaks PyTorch's TCPStore protocol. Connections that break the protocol or its limits are
/// closed, which is all that the protocol allows for; the reasons are logged through `tracing`.
#[derive(Debug)]
pub struct TcpStoreServer {
    addr: SocketAddr,
    shared: Arc<Shared>,
    waker: UnixStream,
    thread: Option<JoinHandle<()>>,
}

impl TcpStoreServer {
    /// Starts a server with default limits. Port 0 takes a free one.
    pub fn bind(addr: impl ToSocketAddrs) -> Result<Self> {
        TcpStoreServerOptions::new().bind(addr)
    }

    /// Where it listens.
    #[must_use]
    pub fn local_addr(&self) -> SocketAddr {
        self.addr
    }

    /// How many connections are open.
    #[must_use]
    pub fn connections(&self) -> usize {
        self.shared.connections.load(Ordering::Relaxed)
    }

    /// How many bytes are stored and in transit, approximately.
    #[must_use]
    pub fn memory(&self) -> usize {
        self.shared.memory.load(Ordering::Relaxed)
    }

    /// How many connections were refused, or closed because of what they did.
    #[must_use]
    pub fn refused(&self) -> u64 {
        self.shared.refused.load(Ordering::Relaxed)
    }
}

impl Drop for TcpStoreServer {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        // Nothing to do if it fails: then the thread is gone already.
        let _ = self.waker.write(&[0]);
        if let Some(t) = self.thread.take()
            && t.join().is_err()
        {
            tracing::error!("the store's thread panicked");
        }
    }
}

#[derive(Debug)]
struct Conn {
    stream: TcpStream,
    peer: SocketAddr,
    parser: Parser,
    /// Input behind a request whose replies have not been read yet.
    pending: Vec<u8>,
    out: Vec<u8>,
    sent: usize,
    opened: Instant,
    progress: Instant,
    /// What it counts for in [`Loop::charged`].
    charge: usize,
}

impl Conn {
    fn unsent(&self) -> usize {
        self.out.len() - self.sent
    }

    fn listens(&self) -> bool {
        self.unsent() < OUT_HIGH && self.pending.is_empty()
    }

    fn held(&self) -> usize {
        self.parser.held() + self.out.capacity() + self.pending.capacity()
    }

    /// Writes what the socket takes.
    fn flush(&mut self) -> io::Result<()> {
        while self.sent < self.out.len() {
            match self.stream.write(&self.out[self.sent..]) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(n) => {
                    self.sent += n;
                    self.progress = Instant::now();
                }
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                    // Otherwise a peer that always leaves a little unread would let this grow for ever.
                    if self.sent >= self.out.len() / 2 {
                        self.out.drain(..self.sent);
                        self.sent = 0;
                    }
                    return Ok(());
                }
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
        self.sent = 0;
        if self.out.capacity() > CHUNK {
            self.out = Vec::new();
        } else {
            self.out.clear();
        }
        Ok(())
    }
}

/// Why a connection ends.
enum End {
    /// The peer closed it, or it broke.
    Gone,
    /// The server does not want it any more.
    Refused(String),
}

struct Loop {
    options: TcpStoreServerOptions,
    listener: TcpListener,
    waker: UnixStream,
    shared: Arc<Shared>,
    conns: HashMap<ConnId, Conn>,
    next_id: ConnId,
    state: State,
    /// What connections hold beyond what is free.
    charged: usize,
    /// No accepting before this, because the process has no descriptors left.
    accept_after: Option<Instant>,
    scratch: Vec<u8>,
}

impl Loop {
    fn run(mut self) {
        let tick =
            [Some(self.options.first_message_timeout), Some(self.options.stall_timeout), self.options.idle_timeout];
        let tick = tick.into_iter().flatten().min().unwrap_or_default() / 4;
        let tick = tick.clamp(Duration::from_millis(5), Duration::from_secs(1));
        let mut ready = Vec::new();
        let mut next_sweep = Instant::now() + tick;
        while !self.shared.stop.load(Ordering::Acquire) {
            self.publish();
            if let Err(e) = self.poll(next_sweep, &mut ready) {
                // Only a broken process gets here (out of memory for the descriptor table).
                tracing::error!("the store's poll failed: {e}");
                std::thread::sleep(Duration::from_millis(100));
            }
            for (id, flags) in ready.drain(..) {
                match id {
                    Some(id) => self.serve(id, flags),
                    None => self.accept(),
                }
            }
            let now = Instant::now();
            if now >= next_sweep {
                self.sweep(now);
                next_sweep = now + tick;
            }
        }
    }

    fn publish(&self) {
        self.shared.connections.store(self.conns.len(), Ordering::Relaxed);
        self.shared.memory.store(self.used(), Ordering::Relaxed);
    }

    fn used(&self) -> usize {
        self.state.bytes() + self.charged
    }

    /// Waits for something to do. Connections come first in `ready`, the listener (`None`) last, so
    /// that those who closed make room for those who come.
    fn poll(&mut self, next_sweep: Instant, ready: &mut Vec<(Option<ConnId>, PollFlags)>) -> io::Result<()> {
        let now = Instant::now();
        self.accept_after = self.accept_after.filter(|t| *t > now);
        let accepts = self.accept_after.is_none();
        let mut timed = !accepts || self.options.idle_timeout.is_some();
        let mut ids = Vec::with_capacity(self.conns.len());
        let mut fds = Vec::with_capacity(self.conns.len() + 2);
        for (id, c) in &self.conns {
            let mut interest = PollFlags::empty();
            interest.set(PollFlags::IN, c.listens());
            interest.set(PollFlags::OUT, c.unsent() > 0 || !c.pending.is_empty());
            timed |= !c.parser.validated() || c.parser.in_request() || c.unsent() > 0;
            ids.push(*id);
            fds.push(PollFd::from_borrowed_fd(c.stream.as_fd(), interest));
        }
        fds.push(PollFd::from_borrowed_fd(self.waker.as_fd(), PollFlags::IN));
        if accepts {
            fds.push(PollFd::from_borrowed_fd(self.listener.as_fd(), PollFlags::IN));
        }
        let timeout = timed.then(|| {
            let until = self.accept_after.map_or(next_sweep, |t| next_sweep.min(t));
            let left = until.saturating_duration_since(now);
            Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() }
        });
        match poll(&mut fds, timeout.as_ref()) {
            Ok(_) => {}
            Err(e) if e == rustix::io::Errno::INTR => return Ok(()),
            Err(e) => return Err(e.into()),
        }
        let hot = |fd: &PollFd<'_>| (!fd.revents().is_empty()).then(|| fd.revents());
        ready.extend(ids.iter().zip(&fds).filter_map(|(id, fd)| Some((Some(*id), hot(fd)?))));
        if let Some(flags) = fds.get(ids.len() + 1).and_then(hot) {
            ready.push((None, flags));
        }
        Ok(())
    }

    fn accept(&mut self) {
        // Bounded, so that a flood of connections does not starve those that are open.
        for _ in 0..256 {
            match self.listener.accept() {
                Ok((stream, peer)) => self.admit(stream, peer),
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return,
                Err(e) if e.kind() == io::ErrorKind::Interrupted || e.kind() == io::ErrorKind::ConnectionAborted => {}
                Err(e) => {
                    // No descriptors or no memory. The listener stays readable, so polling it now would spin.
                    tracing::warn!("the store cannot accept connections: {e}");
                    self.accept_after = Some(Instant::now() + Duration::from_millis(100));
                    self.evict();
                    return;
                }
            }
        }
    }

    fn admit(&mut self, stream: TcpStream, peer: SocketAddr) {
        if self.conns.len() >= self.options.max_connections && !self.evict() {
            tracing::warn!(%peer, "the store refuses a connection: it has {} already", self.conns.len());
            self.shared.refused.fetch_add(1, Ordering::Relaxed);
            return;
        }
        if let Err(e) = stream.set_nonblocking(true).and_then(|()| stream.set_nodelay(true)) {
            tracing::warn!(%peer, "the store could not set up a connection: {e}");
            return;
        }
        // A host that vanishes must not stay on the books for ever. Best effort.
        let _ = rustix::net::sockopt::set_socket_keepalive(&stream, true);
        let now = Instant::now();
        let id = self.next_id;
        self.next_id += 1;
        let conn = Conn {
            stream,
            peer,
            parser: Parser::new(self.options.limits),
            pending: Vec::new(),
            out: Vec::new(),
            sent: 0,
            opened: now,
            progress: now,
            charge: 0,
        };
        self.conns.insert(id, conn);
    }

    /// Drops the oldest connection that has not introduced itself; false if all have.
    fn evict(&mut self) -> bool {
        // Ids grow with time.
        let Some(id) = self.conns.iter().filter(|(_, c)| !c.parser.validated()).map(|(id, _)| *id).min() else {
            return false;
        };
        self.close(id, End::Refused("it has not introduced itself, and its place is needed".into()));
        true
    }

    fn sweep(&mut self, now: Instant) {
        let o = &self.options;
        let late = |c: &Conn| {
            let quiet = now.saturating_duration_since(c.progress);
            if !c.parser.validated() {
                (now.saturating_duration_since(c.opened) >= o.first_message_timeout)
                    .then_some("it did not introduce itself in time")
            } else if c.unsent() > 0 {
                (quiet >= o.stall_timeout).then_some("it does not read its replies")
            } else if c.parser.in_request() {
                (quiet >= o.stall_timeout).then_some("it stopped in the middle of a request")
            } else {
                o.idle_timeout.is_some_and(|t| quiet >= t).then_some("it was idle too long")
            }
        };
        let late: Vec<_> = self.conns.iter().filter_map(|(id, c)| Some((*id, late(c)?))).collect();
        for (id, why) in late {
            self.close(id, End::Refused(why.into()));
        }
    }

    fn close(&mut self, id: ConnId, why: End) {
        let Some(c) = self.conns.remove(&id) else { return };
        self.charged -= c.charge;
        self.state.forget(id);
        match why {
            End::Gone => tracing::debug!(peer = %c.peer, "the store's connection ended"),
            End::Refused(why) => {
                tracing::warn!(peer = %c.peer, "the store closes a connection: {why}");
                self.shared.refused.fetch_add(1, Ordering::Relaxed);
            }
        }
    }

    fn serve(&mut self, id: ConnId, flags: PollFlags) {
        let mut woken = Vec::new();
        let result = self.serve_one(id, flags, &mut woken);
        if let Err(end) = result.and_then(|()| self.account(id)) {
            self.close(id, end);
        }
        for id in woken {
            self.release(id);
        }
    }

    /// Tells a waiting connection that its wait is over.
    fn release(&mut self, id: ConnId) {
        let Some(c) = self.conns.get_mut(&id) else { return };
        c.out.push(STOP_WAITING);
        if c.flush().is_err() {
            self.close(id, End::Gone);
        }
    }

    /// Updates what `id` counts for, and ends it if the store cannot afford it.
    fn account(&mut self, id: ConnId) -> Result<(), End> {
        let Some(c) = self.conns.get_mut(&id) else { return Ok(()) };
        self.charged -= c.charge;
        c.charge = c.held().saturating_sub(FREE);
        self.charged += c.charge;
        if c.charge > 0 && self.used() > self.options.max_memory {
            return Err(End::Refused("the store's memory limit is reached".into()));
        }
        Ok(())
    }

    fn serve_one(&mut self, id: ConnId, flags: PollFlags, woken: &mut Vec<ConnId>) -> Result<(), End> {
        let Some(c) = self.conns.get_mut(&id) else { return Ok(()) };
        c.flush().map_err(|_| End::Gone)?;
        if !c.pending.is_empty() {
            if c.unsent() < OUT_HIGH {
                let pending = std::mem::take(&mut c.pending);
                self.process(id, &pending, woken)?;
            }
            return Ok(());
        }
        if !flags.intersects(PollFlags::IN | PollFlags::HUP | PollFlags::ERR) {
            return Ok(());
        }
        let mut scratch = std::mem::take(&mut self.scratch);
        let result = self.read(id, &mut scratch, woken);
        self.scratch = scratch;
        result
    }

    fn read(&mut self, id: ConnId, scratch: &mut [u8], woken: &mut Vec<ConnId>) -> Result<(), End> {
        // A large value should not cost one poll of everybody per chunk; nor should it shut everybody out.
        for _ in 0..16 {
            let Some(c) = self.conns.get_mut(&id).filter(|c| c.listens()) else { return Ok(()) };
            match c.stream.read(scratch) {
                Ok(0) => return Err(End::Gone),
                Ok(n) => {
                    c.progress = Instant::now();
                    self.process(id, &scratch[..n], woken)?;
                    if n < scratch.len() {
                        return Ok(());
                    }
                }
                Err(e) if matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => return Ok(()),
                Err(_) => return Err(End::Gone),
            }
        }
        Ok(())
    }

    /// Carries out the requests in `input`; keeps what is behind a reply that the peer does not read.
    fn process(&mut self, id: ConnId, mut input: &[u8], woken: &mut Vec<ConnId>) -> Result<(), End> {
        let Some(c) = self.conns.get_mut(&id) else { return Ok(()) };
        while let Step::Request(request) = c.parser.next(&mut input).map_err(|b| End::Refused(b.to_string()))? {
            let used = self.state.bytes() + self.charged;
            let budget = self.options.max_memory.saturating_sub(used);
            let before = woken.len();
            let applied = self.state.apply(id, request, budget, &mut c.out, woken);
            applied.map_err(|r| End::Refused(r.to_string()))?;
            // A connection can end its own wait, and then its replies must stay in order.
            let own = woken[before..].iter().filter(|w| **w == id).count();
            if own > 0 {
                c.out.extend(std::iter::repeat_n(STOP_WAITING, own));
                let mut at = 0;
                woken.retain(|w| {
                    at += 1;
                    at <= before || *w != id
                });
            }
            if c.unsent() >= OUT_HIGH {
                c.flush().map_err(|_| End::Gone)?;
                if c.unsent() >= OUT_HIGH {
                    c.pending = input.to_vec();
                    return Ok(());
                }
            }
        }
        c.flush().map_err(|_| End::Gone)
    }
}
