//! The server: one thread, all connections, bounded memory. What they say goes to the [`Desk`].

use std::collections::HashMap;
use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use comm_core::{Error, Result, Secret};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::desk::{CHUNK, Desk, Refusal, Session};
use crate::pace::{Pace, Warnings, enough};
use crate::protocol::Limits;
use crate::state::ConnId;

/// Limits of a [`TcpStoreServer`]. Everything has a default that suits thousands of ranks.
#[derive(Clone, Debug)]
pub struct TcpStoreServerOptions {
    max_connections: usize,
    first_message_timeout: Duration,
    stall_timeout: Duration,
    idle_timeout: Option<Duration>,
    limits: Limits,
    max_memory: usize,
    secret: Option<Secret>,
}

impl Default for TcpStoreServerOptions {
    fn default() -> Self {
        Self {
            max_connections: 16_384,
            first_message_timeout: Duration::from_secs(10),
            stall_timeout: Duration::from_secs(60),
            idle_timeout: None,
            limits: Limits::default(),
            max_memory: 256 << 20,
            secret: None,
        }
    }
}

impl TcpStoreServerOptions {
    /// The defaults.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// The defaults, with the secret that `RUSTCOMMS_SECRET` names: what a launcher opens for ranks that inherit its
    /// environment.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` when the variable is set to what is no secret.
    pub fn of_environment() -> Result<Self> {
        Ok(Self::new().secret(Secret::from_environment()?))
    }

    /// The secret that clients must prove to know before the server listens to them (none). PyTorch's clients cannot,
    /// so with a secret they are turned away.
    #[must_use]
    pub fn secret(mut self, secret: Option<Secret>) -> Self {
        self.secret = secret;
        self
    }

    /// The most connections at once (16,384). One more takes the place of the oldest one that has not yet introduced
    /// itself (with a secret: not yet proven that it knows it), and is refused if there is none.
    #[must_use]
    pub fn max_connections(mut self, n: usize) -> Self {
        self.max_connections = n.max(1);
        self
    }

    /// How long a new connection may take to prove that it knows the secret and to introduce itself (10 s).
    #[must_use]
    pub fn first_message_timeout(mut self, t: Duration) -> Self {
        self.first_message_timeout = t;
        self
    }

    /// How long a connection may stop in the middle of a request, or leave replies unread (60 s). Who sends or reads a
    /// little now and then does no better: what is unfinished must move by 64 KiB per second of this time.
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

    /// The most memory in bytes for what is stored (values, queues and who waits for what) and what is in transit,
    /// about (256 MiB). A request that would exceed it ends its connection, because the protocol has no other answer,
    /// and changes nothing; the reason is logged. The last eighth is left to connections that hold little, so that a
    /// full store still answers questions.
    #[must_use]
    pub fn max_memory(mut self, bytes: usize) -> Self {
        self.max_memory = bytes;
        self
    }

    /// Starts a server with these limits.
    ///
    /// # Errors
    ///
    /// `Io` when the address cannot be bound or the thread not be started.
    pub fn bind(self, addr: impl ToSocketAddrs) -> Result<TcpStoreServer> {
        let listener =
            TcpListener::bind(addr).map_err(|e| Error::io("the store's server could not bind its address", &e))?;
        self.serve(listener)
    }

    /// Starts a server on a listener that exists, as torchrun's agents and systemd hand them over.
    ///
    /// # Errors
    ///
    /// `Io` when the listener cannot be used or the thread not be started.
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
            desk: Desk::new(self.limits, self.max_memory, self.secret.clone()),
            options: self,
            listener,
            waker: woken,
            shared: Arc::clone(&shared),
            conns: HashMap::new(),
            next_id: 0,
            accept_after: None,
            warnings: Warnings::new(),
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
    /// Starts a server with default limits and without secret. Port 0 takes a free one.
    ///
    /// # Errors
    ///
    /// As [`TcpStoreServerOptions::bind`].
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
    opened: Instant,
    /// When a byte last moved.
    progress: Instant,
    /// Of the request that is arriving.
    input: Pace,
    /// Of the replies that are leaving; `None` while it is owed nothing.
    output: Option<Pace>,
}

/// Why a connection ends.
enum End {
    /// The peer closed it, or it broke.
    Gone,
    /// The server does not want it any more.
    Refused(String),
}

impl End {
    fn refused(why: &str) -> Self {
        Self::Refused(why.into())
    }
}

struct Loop {
    options: TcpStoreServerOptions,
    listener: TcpListener,
    waker: UnixStream,
    shared: Arc<Shared>,
    conns: HashMap<ConnId, Conn>,
    next_id: ConnId,
    desk: Desk,
    /// No accepting before this, because the process has no descriptors left.
    accept_after: Option<Instant>,
    warnings: Warnings,
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
        self.shared.memory.store(self.desk.used(), Ordering::Relaxed);
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
            let Some(s) = self.desk.session(*id) else { continue };
            let owed = !s.output().is_empty();
            let mut interest = PollFlags::empty();
            interest.set(PollFlags::IN, s.listens());
            interest.set(PollFlags::OUT, owed);
            timed |= !s.introduced() || s.in_request() || owed;
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
                    if self.warnings.allow() {
                        tracing::warn!("the store cannot accept connections: {e}");
                    }
                    self.accept_after = Some(Instant::now() + Duration::from_millis(100));
                    self.evict();
                    return;
                }
            }
        }
    }

    fn admit(&mut self, stream: TcpStream, peer: SocketAddr) {
        if self.conns.len() >= self.options.max_connections && !self.evict() {
            if self.warnings.allow() {
                tracing::warn!(%peer, "the store refuses a connection: it has {} already", self.conns.len());
            }
            self.shared.refused.fetch_add(1, Ordering::Relaxed);
            return;
        }
        if let Err(e) = stream.set_nonblocking(true).and_then(|()| stream.set_nodelay(true)) {
            tracing::debug!(%peer, "the store could not set up a connection: {e}");
            return;
        }
        // A host that vanishes must not stay on the books for ever. Best effort.
        let _ = rustix::net::sockopt::set_socket_keepalive(&stream, true);
        let now = Instant::now();
        let id = self.next_id;
        self.next_id += 1;
        self.desk.open(id);
        self.conns.insert(id, Conn { stream, peer, opened: now, progress: now, input: Pace::new(now), output: None });
    }

    /// Drops the oldest connection that has not settled; false if all have.
    fn evict(&mut self) -> bool {
        // Ids grow with time.
        let Some(id) = self.conns.keys().copied().filter(|id| !self.desk.settled(*id)).min() else {
            return false;
        };
        self.close(id, End::Refused("it has not introduced itself, and its place is needed".into()));
        true
    }

    fn sweep(&mut self, now: Instant) {
        let o = &self.options;
        let over = |since: Instant, limit: Duration| now.saturating_duration_since(since) >= limit;
        let late = |c: &Conn, s: &Session| {
            if s.turned() {
                over(c.opened, o.first_message_timeout).then_some(End::Gone)
            } else if !s.introduced() {
                over(c.opened, o.first_message_timeout).then_some(End::refused("it did not introduce itself in time"))
            } else if let Some(output) = &c.output {
                over(output.since, o.stall_timeout).then_some(End::refused("it does not read its replies"))
            } else if s.in_request() {
                over(c.input.since, o.stall_timeout).then_some(End::refused("it stopped in the middle of a request"))
            } else {
                o.idle_timeout.is_some_and(|t| over(c.progress, t)).then_some(End::refused("it was idle too long"))
            }
        };
        let late: Vec<_> =
            self.conns.iter().filter_map(|(id, c)| Some((*id, late(c, self.desk.session(*id)?)?))).collect();
        for (id, why) in late {
            self.close(id, why);
        }
    }

    fn close(&mut self, id: ConnId, why: End) {
        let Some(c) = self.conns.remove(&id) else { return };
        let unproven = self.desk.session(id).is_some_and(Session::awaits_proof);
        self.desk.close(id);
        match why {
            End::Gone if unproven && self.warnings.allow() => {
                tracing::warn!(peer = %c.peer, "a connection to the store ended at the challenge: is the secret there another one?");
            }
            End::Gone => tracing::debug!(peer = %c.peer, "the store's connection ended"),
            End::Refused(why) => self.refuse(c.peer, &why),
        }
    }

    fn refuse(&mut self, peer: SocketAddr, why: &str) {
        if self.warnings.allow() {
            tracing::warn!(%peer, "the store closes a connection: {why}");
        }
        self.shared.refused.fetch_add(1, Ordering::Relaxed);
    }

    fn serve(&mut self, id: ConnId, flags: PollFlags) {
        if let Err(end) = self.serve_one(id, flags) {
            self.close(id, end);
        }
        // Those whose wait is over because of it are told at once.
        for id in self.desk.take_woken() {
            if let Err(end) = self.flush(id) {
                self.close(id, end);
            }
        }
    }

    fn serve_one(&mut self, id: ConnId, flags: PollFlags) -> Result<(), End> {
        self.flush(id)?;
        if !flags.intersects(PollFlags::IN | PollFlags::HUP | PollFlags::ERR) {
            return Ok(());
        }
        let mut scratch = std::mem::take(&mut self.scratch);
        let result = self.read(id, &mut scratch);
        self.scratch = scratch;
        result
    }

    fn read(&mut self, id: ConnId, scratch: &mut [u8]) -> Result<(), End> {
        // A large value should not cost one poll of everybody per chunk; nor should it shut everybody out.
        for _ in 0..16 {
            let Some(c) = self.conns.get_mut(&id) else { return Ok(()) };
            let Some(s) = self.desk.session(id).filter(|s| s.listens()) else { return Ok(()) };
            match c.stream.read(scratch) {
                Ok(0) => return Err(End::Gone),
                Ok(n) => {
                    c.progress = Instant::now();
                    if !s.in_request() {
                        c.input = Pace::new(c.progress);
                    }
                    c.input.moves(n, enough(self.options.stall_timeout));
                    match self.desk.input(id, &scratch[..n]) {
                        Ok(()) => {}
                        Err(Refusal::Close(why)) => return Err(End::Refused(why)),
                        Err(Refusal::Tell(why)) => {
                            let peer = c.peer;
                            self.refuse(peer, why);
                        }
                    }
                    self.flush(id)?;
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

    /// Writes what the socket takes, and carries out the requests that waited for that.
    fn flush(&mut self, id: ConnId) -> Result<(), End> {
        let Some(c) = self.conns.get_mut(&id) else { return Ok(()) };
        while let Some(s) = self.desk.session(id) {
            if s.output().is_empty() {
                c.output = None;
                if s.turned() {
                    // Its end of the connection is closed by the peer, or after a while: closing both ends with input
                    // unread would take the notice away from it. An error means that it is gone already.
                    let _ = c.stream.shutdown(Shutdown::Write);
                }
                return Ok(());
            }
            let pace = c.output.get_or_insert_with(|| Pace::new(Instant::now()));
            match c.stream.write(s.output()) {
                Ok(0) => return Err(End::Gone),
                Ok(n) => {
                    c.progress = Instant::now();
                    pace.moves(n, enough(self.options.stall_timeout));
                    match self.desk.sent(id, n) {
                        Ok(()) => {}
                        Err(Refusal::Close(why)) => return Err(End::Refused(why)),
                        // Only before the first request, behind which nothing can wait.
                        Err(Refusal::Tell(_)) => {}
                    }
                }
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => return Err(End::Gone),
            }
        }
        Ok(())
    }
}
