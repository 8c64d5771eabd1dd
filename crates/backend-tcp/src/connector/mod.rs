//! The connector: one thread per process that makes and accepts the data connections of all worlds.
//!
//! It owns each world's listening socket for as long as the world lives, so that ranks that were not connected at
//! creation can connect when they need to. All sockets are non-blocking, all messages before a connection is accepted
//! have a fixed length, and nothing is kept for a stranger but a socket and a small buffer. It sleeps in `poll(2)`,
//! without timers when nothing is going on.
//!
//! Two ranks may dial each other at once. The connection that the lower one makes stays: who is dialing a higher rank
//! answers that rank `Busy`. Who has tried all addresses without success stops insisting, because perhaps only the
//! other direction works. A connection counts when the dialer has confirmed that it takes it ([`crate::wire`]), and each
//! end speaks on one connection per peer at a time; so there are never two links for a pair, nor one that only one end
//! believes in.
//!
//! It is also the second channel on which ranks ask silent peers whether they live, and answers those questions whatever the
//! endpoints are doing: so it never waits for one. And it sees when processes on this machine end, by their descriptors.

mod dial;
mod guest;
mod probe;
#[cfg(test)]
mod refusals;
mod stream;
#[cfg(test)]
mod tests;
mod world;

use std::collections::BTreeMap;
use std::fmt;
use std::net::{SocketAddr, TcpStream};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use comm_core::{Error, Result};
use comm_transport::{Dialer, Endpoint, Prober};
use parking_lot::{Condvar, Mutex};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

pub(crate) use self::world::{Member, Members, Setup, Standing};
use self::world::{Source, World};
use crate::life::Process;

/// Where a peer can be reached.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Peer {
    /// In the order in which they are tried.
    pub(crate) addrs: Vec<SocketAddr>,
    pub(crate) same_host: bool,
    /// Its process, if that is one that can be seen from here.
    pub(crate) process: Option<Process>,
}

/// Where connections wait until there is an endpoint.
#[derive(Default)]
struct Lobby {
    state: Mutex<Waiting>,
    changed: Condvar,
}

#[derive(Default)]
struct Waiting {
    finished: BTreeMap<usize, TcpStream>,
    /// Peers that cannot be reached, and why.
    failed: BTreeMap<usize, String>,
    /// What went wrong last with peers that are still being tried.
    trouble: BTreeMap<usize, String>,
}

enum Command {
    Open(Box<World>),
    Want(u64, usize),
    Probe(u64, usize),
    Learn(u64, Vec<(usize, Peer)>),
    HandOver(u64, Weak<Endpoint>),
    Settle(u64, Standing),
    Close(u64),
}

struct Shared {
    event: OwnedFd,
    inbox: Mutex<Vec<Command>>,
}

impl Shared {
    fn send(&self, c: Command) {
        self.inbox.lock().push(c);
        self.wake();
    }

    fn wake(&self) {
        // A full counter means that it wakes up anyway.
        let _ = rustix::io::write(&self.event, &1u64.to_ne_bytes());
    }
}

/// The process's connector; started on first use.
fn connector() -> Result<Arc<Shared>> {
    static CONNECTOR: OnceLock<Mutex<Option<Arc<Shared>>>> = OnceLock::new();
    let mut slot = CONNECTOR.get_or_init(Mutex::default).lock();
    if let Some(s) = &*slot {
        return Ok(Arc::clone(s));
    }
    let failed = |e: std::io::Error| Error::io("starting the connector", &e);
    let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(|e| failed(e.into()))?;
    let shared = Arc::new(Shared { event, inbox: Mutex::default() });
    let own = Arc::clone(&shared);
    std::thread::Builder::new().name("rustcomms-connect".into()).spawn(move || run(&own)).map_err(failed)?;
    *slot = Some(Arc::clone(&shared));
    Ok(shared)
}

/// A world in the connector's care, from the moment all ranks have come. Dropped before
/// [`hand_over`](Self::hand_over), it ends the world.
pub(crate) struct Gathering {
    shared: Arc<Shared>,
    id: u64,
    lobby: Arc<Lobby>,
    over: bool,
}

impl fmt::Debug for Gathering {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Gathering").field("id", &self.id).finish_non_exhaustive()
    }
}

/// Why not all connections were made.
#[derive(Debug)]
pub(crate) struct Unconnected {
    /// The ranks, and what went wrong with each.
    pub(crate) missing: Vec<(usize, String)>,
}

impl Gathering {
    /// Opens the world's data port.
    pub(crate) fn open(setup: Setup) -> Result<Self> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let shared = connector()?;
        setup.listener.set_nonblocking(true).map_err(|e| Error::io("preparing the data port", &e))?;
        let id = NEXT.fetch_add(1, Ordering::Relaxed);
        let lobby = Arc::new(Lobby::default());
        shared.send(Command::Open(Box::new(World::new(id, setup, Arc::clone(&lobby)))));
        Ok(Self { shared, id, lobby, over: false })
    }

    /// Says where peers are.
    pub(crate) fn learn(&self, peers: Vec<(usize, Peer)>) {
        self.shared.send(Command::Learn(self.id, peers));
    }

    /// Wants connections to `peers`.
    pub(crate) fn want(&self, peers: impl IntoIterator<Item = usize>) {
        for p in peers {
            self.shared.send(Command::Want(self.id, p));
        }
    }

    /// Waits for connections to all of `peers`, at most until `until`; `Ok(false)` when they are not all there then. An
    /// error when one of them cannot be had at all.
    pub(crate) fn wait(&self, peers: &[usize], until: Instant) -> Result<bool, Unconnected> {
        let mut state = self.lobby.state.lock();
        loop {
            let left: Vec<usize> = peers.iter().copied().filter(|p| !state.finished.contains_key(p)).collect();
            if left.is_empty() {
                return Ok(true);
            }
            let failed: Vec<_> = left.iter().filter_map(|p| state.failed.get(p).map(|why| (*p, why.clone()))).collect();
            if !failed.is_empty() {
                return Err(Unconnected { missing: failed });
            }
            if self.lobby.changed.wait_until(&mut state, until).timed_out() {
                return Ok(left.iter().all(|p| state.finished.contains_key(p)));
            }
        }
    }

    /// Those of `peers` that are not connected, and what is known about it.
    pub(crate) fn missing(&self, peers: &[usize]) -> Unconnected {
        let state = self.lobby.state.lock();
        let left = peers.iter().filter(|p| !state.finished.contains_key(p));
        let why = |p: &usize| state.trouble.get(p).cloned().unwrap_or_else(|| "it has not connected".into());
        Unconnected { missing: left.map(|p| (*p, why(p))).collect() }
    }

    /// Why a peer cannot be reached.
    pub(crate) fn lost(&self, peer: usize) -> Option<String> {
        self.lobby.state.lock().failed.get(&peer).cloned()
    }

    /// What goes wrong with a peer that is still being tried.
    pub(crate) fn trouble(&self, peer: usize) -> Option<String> {
        self.lobby.state.lock().trouble.get(&peer).cloned()
    }

    /// Takes the connections that are there, those of peers that nobody waited for included.
    pub(crate) fn take(&self) -> BTreeMap<usize, TcpStream> {
        std::mem::take(&mut self.lobby.state.lock().finished)
    }

    /// What makes further connections for the endpoint.
    pub(crate) fn dialer(&self) -> Arc<dyn Dialer> {
        Arc::new(OnDemand { shared: Arc::clone(&self.shared), id: self.id })
    }

    /// What asks silent peers for the endpoint.
    pub(crate) fn prober(&self) -> Arc<dyn Prober> {
        Arc::new(OnDemand { shared: Arc::clone(&self.shared), id: self.id })
    }

    /// Nobody is to come any more: who asks is told why.
    pub(crate) fn settle(&self, standing: Standing) {
        self.shared.send(Command::Settle(self.id, standing));
    }

    /// Further connections go to `endpoint`; the world ends with it.
    pub(crate) fn hand_over(&mut self, endpoint: &Arc<Endpoint>) {
        self.over = true;
        self.shared.send(Command::HandOver(self.id, Arc::downgrade(endpoint)));
    }
}

impl Drop for Gathering {
    fn drop(&mut self) {
        if !self.over {
            self.shared.send(Command::Close(self.id));
        }
    }
}

/// The endpoint's way to the connector.
struct OnDemand {
    shared: Arc<Shared>,
    id: u64,
}

impl fmt::Debug for OnDemand {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OnDemand").field("world", &self.id).finish_non_exhaustive()
    }
}

impl Dialer for OnDemand {
    fn dial(&self, peer: usize) {
        self.shared.send(Command::Want(self.id, peer));
    }
}

impl Prober for OnDemand {
    fn probe(&self, peer: usize) {
        self.shared.send(Command::Probe(self.id, peer));
    }

    fn tells(&self) -> bool {
        true
    }
}

impl Drop for OnDemand {
    fn drop(&mut self) {
        // The endpoint goes: the connector looks which one.
        self.shared.wake();
    }
}

fn run(shared: &Shared) {
    let mut worlds: Vec<World> = Vec::new();
    loop {
        let commands = std::mem::take(&mut *shared.inbox.lock());
        for c in commands {
            obey(&mut worlds, c);
        }
        worlds.retain(World::is_alive);
        for w in &mut worlds {
            w.tick();
            w.deliver();
        }
        for (id, source) in sleep(shared, &worlds) {
            if let Some(w) = worlds.iter_mut().find(|w| w.id == id) {
                w.ready(source);
            }
        }
    }
}

fn obey(worlds: &mut Vec<World>, c: Command) {
    // Orders for a world that has just ended come too late.
    let to = |worlds: &mut Vec<World>, id: u64, f: &mut dyn FnMut(&mut World)| {
        worlds.iter_mut().filter(|w| w.id == id).for_each(f);
    };
    match c {
        Command::Open(w) => worlds.push(*w),
        Command::Want(id, peer) => to(worlds, id, &mut |w| w.want(peer)),
        Command::Probe(id, peer) => to(worlds, id, &mut |w| w.probe(peer)),
        Command::Learn(id, peers) => to(worlds, id, &mut |w| w.learn(&peers)),
        Command::HandOver(id, endpoint) => to(worlds, id, &mut |w| w.hand_over(endpoint.clone())),
        Command::Settle(id, standing) => to(worlds, id, &mut |w| w.settle(standing)),
        Command::Close(id) => worlds.retain(|w| w.id != id),
    }
}

/// Sleeps until there is a command, a socket is ready or a timer is due; returns what is ready.
fn sleep(shared: &Shared, worlds: &[World]) -> Vec<(u64, Source)> {
    let mut fds = vec![PollFd::new(&shared.event, PollFlags::IN)];
    let mut sources = Vec::new();
    for w in worlds {
        for (fd, source, writes) in w.sources() {
            fds.push(PollFd::from_borrowed_fd(fd, if writes { PollFlags::OUT } else { PollFlags::IN }));
            sources.push((w.id, source));
        }
    }
    let now = Instant::now();
    // Rounded up: waking up a little early would mean to look again and again.
    let timeout = worlds.iter().filter_map(World::timer).min().map(|t| {
        let d = t.saturating_duration_since(now) + Duration::from_micros(500);
        Timespec { tv_sec: d.as_secs() as i64, tv_nsec: d.subsec_nanos().into() }
    });
    match poll(&mut fds, timeout.as_ref()) {
        Ok(_) => {}
        Err(rustix::io::Errno::INTR) => return Vec::new(),
        Err(e) => {
            // Out of memory, at worst: not to be met again at full speed.
            tracing::error!(error = %e, "the connector cannot wait for its sockets");
            std::thread::sleep(Duration::from_millis(100));
            return Vec::new();
        }
    }
    if !fds[0].revents().is_empty() {
        let mut b = [0u8; 8];
        let _ = rustix::io::read(&shared.event, &mut b);
    }
    sources.into_iter().zip(&fds[1..]).filter(|(_, fd)| !fd.revents().is_empty()).map(|(s, _)| s).collect()
}
