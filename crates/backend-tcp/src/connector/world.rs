//! What the connector does for one world.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::io::ErrorKind as IoKind;
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use collectives::Refusal;
use comm_core::{Error, Secret};
use comm_transport::{Endpoint, SocketLink};

use super::dial::{Caller, Dial, Progress};
use super::guest::{Guest, Said};
use super::probe::{Probe, Sign};
use super::stream::Stream;
use super::{Lobby, Peer};
use crate::life::Watched;
use crate::wire::{CONFIRM, Greeting, Outcome, PROBE};

/// Connections that may be in their handshake beyond those that are expected.
const STRANGERS: usize = 64;
/// How long nobody is accepted after an error that another attempt would meet again, such as no descriptor left.
const AFTER_ERROR: Duration = Duration::from_millis(100);
/// How long a dial on demand goes on at least; as long as a peer may be silent, if that is longer.
const ON_DEMAND: Duration = Duration::from_secs(10);
/// Least time that a probe takes.
const LEAST_PROBE: Duration = Duration::from_millis(250);
/// Longer than anything takes; `Instant` cannot hold everything that `Duration` can.
const DAY: Duration = Duration::from_secs(86_400);
/// Connections that are accepted in one go.
const BATCH: usize = 64;
/// Dropped strangers that the log tells of.
const TOLD: u32 = 20;

/// What the connector needs to know of a world.
#[derive(Debug)]
pub(crate) struct Setup {
    /// This rank's greeting, without addressee.
    pub(crate) me: Greeting,
    pub(crate) size: usize,
    pub(crate) secret: Option<Secret>,
    pub(crate) listener: TcpListener,
    /// Silence after which this rank takes a peer for dead.
    pub(crate) heartbeat: Duration,
    /// Until when ranks may connect before the endpoint exists.
    pub(crate) until: Instant,
    /// In the dynamic regime: who they are. They come at different times, and may connect until then although the endpoint
    /// exists.
    pub(crate) members: Option<Members>,
}

impl Setup {
    pub(super) const fn is_patient(&self) -> bool {
        self.members.is_some()
    }
}

/// The members of a world of the dynamic regime, and what to say when one will not come.
pub(crate) struct Members {
    pub(crate) list: Vec<Member>,
    pub(crate) refused: Box<dyn Fn(usize, Refusal) -> Error + Send>,
}

impl fmt::Debug for Members {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Members").field("list", &self.list).finish_non_exhaustive()
    }
}

/// A member by its handle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Member {
    pub(crate) number: u64,
    pub(crate) generation: u32,
    pub(crate) token: u64,
}

/// What a world is to those who look for it by this rank's handle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Standing {
    /// Its members come together.
    Open,
    /// They have come: this rank is at this generation.
    Settled(u32),
    /// This rank has been finalized.
    Finalized,
}

/// A descriptor of a world.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Source {
    Listener,
    Guest(u64),
    Attempt(usize, u32),
    Probe(usize, u32),
    Process(usize),
}

/// What has come of a peer.
enum News {
    Linked(usize, TcpStream),
    /// Why, and whether its process has ended.
    Unreachable(usize, String, bool),
    /// It will not come, as it says.
    Refused(usize, Refusal),
    Alive(usize),
    Unanswered(usize),
    Ended(usize),
}

pub(super) struct World {
    pub(super) id: u64,
    setup: Setup,
    standing: Standing,
    lobby: Arc<Lobby>,
    peers: Vec<Option<Peer>>,
    linked: Vec<bool>,
    guests: Vec<Guest>,
    dials: BTreeMap<usize, Dial>,
    /// Peers that are wanted, and whose addresses are not known yet.
    wanted: BTreeSet<usize>,
    probes: BTreeMap<usize, Probe>,
    /// Peers that are to be probed as soon as their addresses are known.
    doubted: BTreeSet<usize>,
    /// Processes of linked peers.
    processes: BTreeMap<usize, OwnedFd>,
    endpoint: Option<Weak<Endpoint>>,
    accept_after: Option<Instant>,
    attempts: u32,
    serial: u64,
    told: u32,
    news: Vec<News>,
    /// For the endpoint, once it is there.
    held: Vec<News>,
}

impl World {
    pub(super) fn new(id: u64, setup: Setup, lobby: Arc<Lobby>) -> Self {
        let size = setup.size;
        Self {
            id,
            setup,
            standing: Standing::Open,
            lobby,
            peers: vec![None; size],
            linked: vec![false; size],
            guests: Vec::new(),
            dials: BTreeMap::new(),
            wanted: BTreeSet::new(),
            probes: BTreeMap::new(),
            doubted: BTreeSet::new(),
            processes: BTreeMap::new(),
            endpoint: None,
            accept_after: None,
            attempts: 0,
            serial: 0,
            told: 0,
            news: Vec::new(),
            held: Vec::new(),
        }
    }

    fn rank(&self) -> usize {
        self.setup.me.from as usize
    }

    /// Whether somebody still uses the world.
    pub(super) fn is_alive(&self) -> bool {
        self.endpoint.as_ref().is_none_or(|e| e.strong_count() > 0)
    }

    /// Wants a connection to `peer`.
    pub(super) fn want(&mut self, peer: usize) {
        if peer == self.rank() || self.linked.get(peer) != Some(&false) || self.dials.contains_key(&peer) {
            return;
        }
        let Some(to) = &self.peers[peer] else {
            self.wanted.insert(peer);
            return;
        };
        let patience = self.setup.heartbeat.clamp(ON_DEMAND, DAY);
        let mut until = if self.endpoint.is_some() { Instant::now() + patience } else { self.setup.until };
        if self.setup.is_patient() {
            until = until.max(self.setup.until);
        }
        let mut dial = Dial::new(peer, to.clone(), until);
        if self.reservation(peer).is_some() {
            // It is about to come.
            dial.give_way();
        }
        self.dials.insert(peer, dial);
    }

    /// Asks whether `peer` lives.
    pub(super) fn probe(&mut self, peer: usize) {
        if peer == self.rank() || peer >= self.setup.size || self.probes.contains_key(&peer) {
            return;
        }
        let Some(to) = &self.peers[peer] else {
            self.doubted.insert(peer);
            return;
        };
        let until = Instant::now() + (self.setup.heartbeat / 4).clamp(LEAST_PROBE, DAY);
        self.probes.insert(peer, Probe::new(peer, to.clone(), until));
    }

    /// Watches the process of a linked peer, if that is possible: when a child that it has forked holds its connections
    /// open, nothing else shows that it has ended.
    fn watch(&mut self, peer: usize) {
        if self.endpoint.is_none() || !self.linked[peer] || self.processes.contains_key(&peer) {
            return;
        }
        match self.peers[peer].as_ref().and_then(|p| p.process).map(|p| p.watch()) {
            Some(Watched::Running(fd)) => drop(self.processes.insert(peer, fd)),
            Some(Watched::Ended) => self.news.push(News::Ended(peer)),
            Some(Watched::Unknown) | None => {}
        }
    }

    /// Learns where peers are.
    pub(super) fn learn(&mut self, peers: &[(usize, Peer)]) {
        for (p, peer) in peers {
            if let Some(slot) = self.peers.get_mut(*p) {
                *slot = Some(peer.clone());
                if self.wanted.remove(p) {
                    self.want(*p);
                }
                if self.doubted.remove(p) {
                    self.probe(*p);
                }
                self.watch(*p);
            }
        }
    }

    /// From now on connections go to the endpoint; those that nobody has taken in the lobby, too.
    pub(super) fn hand_over(&mut self, endpoint: Weak<Endpoint>) {
        self.endpoint = Some(endpoint);
        let left = std::mem::take(&mut self.lobby.state.lock().finished);
        self.news.extend(left.into_iter().map(|(p, s)| News::Linked(p, s)));
        self.news.append(&mut self.held);
        for p in 0..self.linked.len() {
            self.watch(p);
        }
    }

    /// Passes on what has happened. Called without any lock held; the endpoint does not make it wait.
    pub(super) fn deliver(&mut self) {
        if (self.endpoint.is_none() || self.setup.is_patient()) && !self.dials.is_empty() {
            let mut lobby = self.lobby.state.lock();
            lobby.trouble.extend(self.dials.iter().map(|(p, d)| (*p, d.trouble())));
        }
        if self.news.is_empty() {
            return;
        }
        let news = std::mem::take(&mut self.news);
        let Some(endpoint) = &self.endpoint else {
            let mut lobby = self.lobby.state.lock();
            for n in news {
                match n {
                    // The endpoint must hear it.
                    News::Refused(..) => self.held.push(n),
                    News::Linked(p, s) => drop(lobby.finished.insert(p, s)),
                    News::Unreachable(p, why, _) => drop(lobby.failed.insert(p, why)),
                    // Nobody has asked yet.
                    News::Alive(_) | News::Unanswered(_) | News::Ended(_) => {}
                }
            }
            self.lobby.changed.notify_all();
            return;
        };
        let Some(endpoint) = endpoint.upgrade() else { return };
        for n in news {
            match n {
                News::Linked(p, s) => {
                    let attached = SocketLink::new(s)
                        .map_err(|e| e.to_string())
                        .and_then(|l| endpoint.attach(p, Box::new(l)).map_err(|e| e.brief()));
                    if let Err(why) = attached {
                        endpoint.unreachable(p, &why);
                    }
                }
                News::Unreachable(p, why, ended) => {
                    if self.setup.is_patient() {
                        self.lobby.state.lock().failed.insert(p, why.clone());
                    }
                    tracing::warn!(rank = self.rank(), peer = p, why, "a rank cannot be reached");
                    if ended {
                        endpoint.lost_process(p);
                    } else {
                        endpoint.unreachable(p, &why);
                    }
                }
                News::Refused(p, refusal) => {
                    let open = self.standing == Standing::Open;
                    if let Some(members) = self.setup.members.as_ref().filter(|_| open) {
                        endpoint.call_off(&(members.refused)(p, refusal));
                    }
                }
                News::Alive(p) => endpoint.vouch(p),
                News::Unanswered(p) => endpoint.unanswered(p),
                News::Ended(p) => {
                    tracing::debug!(rank = self.rank(), peer = p, "the process of a rank has ended");
                    endpoint.lost_process(p);
                }
            }
        }
    }

    /// Descriptors to poll; those that wait to become writable say so.
    pub(super) fn sources(&self) -> impl Iterator<Item = (BorrowedFd<'_>, Source, bool)> {
        let listener = self.accept_after.is_none().then(|| (self.setup.listener.as_fd(), Source::Listener, false));
        let guests = self.guests.iter().map(|g| (g.stream.as_fd(), Source::Guest(g.serial), false));
        let dials = self
            .dials
            .iter()
            .flat_map(|(p, d)| d.sockets().map(|(s, number, writes)| (s.as_fd(), Source::Attempt(*p, number), writes)));
        let probes = self
            .probes
            .iter()
            .flat_map(|(p, d)| d.sockets().map(|(s, number, writes)| (s.as_fd(), Source::Probe(*p, number), writes)));
        let processes = self.processes.iter().map(|(p, fd)| (fd.as_fd(), Source::Process(*p), false));
        listener.into_iter().chain(guests).chain(dials).chain(probes).chain(processes)
    }

    /// When [`tick`](Self::tick) has something to do at the latest.
    pub(super) fn timer(&self) -> Option<Instant> {
        let guests = self.guests.iter().filter(|g| g.reserved().is_none()).map(|g| g.until);
        let probes = self.probes.values().map(Probe::timer);
        guests.chain(self.dials.values().map(Dial::timer)).chain(probes).chain(self.accept_after).min()
    }

    /// Looks at the time.
    pub(super) fn tick(&mut self) {
        let now = Instant::now();
        if self.accept_after.is_some_and(|t| t <= now) {
            self.accept_after = None;
        }
        while let Some(i) = self.guests.iter().position(|g| g.reserved().is_none() && g.until <= now) {
            let g = self.guests.remove(i);
            self.dismiss(&g, "it has not said who it is");
        }
        for peer in self.dials.keys().copied().collect::<Vec<_>>() {
            let Some(dial) = self.dials.get_mut(&peer) else { continue };
            let setup = &self.setup;
            let mut caller = Caller::of(setup, &mut self.attempts);
            let progress = dial.tick(&mut caller);
            self.progressed(peer, progress);
        }
        for peer in self.probes.keys().copied().collect::<Vec<_>>() {
            let Some(probe) = self.probes.get_mut(&peer) else { continue };
            let setup = &self.setup;
            let mut caller = Caller::of(setup, &mut self.attempts);
            let sign = probe.tick(&mut caller);
            self.probed(peer, sign);
        }
    }

    /// A descriptor is ready.
    pub(super) fn ready(&mut self, source: Source) {
        match source {
            Source::Listener => self.accept(),
            Source::Guest(serial) => self.hear(serial),
            Source::Attempt(peer, number) => {
                let Some(dial) = self.dials.get_mut(&peer) else { return };
                let setup = &self.setup;
                let caller = Caller::of(setup, &mut self.attempts);
                let progress = dial.ready(number, &caller);
                self.progressed(peer, progress);
            }
            Source::Probe(peer, number) => {
                let Some(probe) = self.probes.get_mut(&peer) else { return };
                let setup = &self.setup;
                let caller = Caller::of(setup, &mut self.attempts);
                let sign = probe.ready(number, &caller);
                self.probed(peer, sign);
            }
            Source::Process(peer) => {
                self.processes.remove(&peer);
                self.news.push(News::Ended(peer));
            }
        }
    }

    fn probed(&mut self, peer: usize, sign: Sign) {
        let news = match sign {
            Sign::Nothing => return,
            Sign::Alive => News::Alive(peer),
            Sign::Over => News::Unanswered(peer),
        };
        self.probes.remove(&peer);
        self.news.push(news);
    }

    fn progressed(&mut self, peer: usize, progress: Progress) {
        match progress {
            Progress::Going => {}
            Progress::Accepted(mut stream) => {
                // The peer's own connection has been accepted here: that of the lower rank stays.
                if self.reservation(peer).is_some() && peer < self.rank() {
                    if let Some(d) = self.dials.get_mut(&peer) {
                        d.give_way();
                    }
                    return;
                }
                match stream.write(&[CONFIRM]) {
                    Ok(()) => self.link(peer, stream),
                    Err(why) => {
                        tracing::debug!(peer, why, "a connection broke before it was confirmed");
                    }
                }
            }
            Progress::Refused(refusal) => {
                self.dials.remove(&peer);
                self.news.push(News::Refused(peer, refusal));
            }
            Progress::Failed { why, ended } => {
                self.dials.remove(&peer);
                self.news.push(News::Unreachable(peer, why, ended));
            }
        }
    }

    /// The connection to `peer` is made.
    fn link(&mut self, peer: usize, stream: Stream) {
        self.linked[peer] = true;
        self.dials.remove(&peer);
        self.wanted.remove(&peer);
        self.guests.retain(|g| g.reserved().is_none_or(|(p, _)| p != peer));
        self.news.push(News::Linked(peer, stream.into_socket()));
        self.watch(peer);
    }

    fn reservation(&self, peer: usize) -> Option<usize> {
        self.guests.iter().position(|g| g.reserved().is_some_and(|(p, _)| p == peer))
    }

    fn accept(&mut self) {
        for _ in 0..BATCH {
            match self.setup.listener.accept() {
                Ok((stream, from)) => {
                    // Those that have a connection may come to ask whether this rank lives, all at once.
                    let expected = self.setup.size;
                    let strangers = self.guests.iter().filter(|g| g.reserved().is_none()).count();
                    if strangers >= expected + STRANGERS {
                        // The oldest makes room.
                        if let Some(i) = self.guests.iter().position(|g| g.reserved().is_none()) {
                            let g = self.guests.remove(i);
                            self.dismiss(&g, "too many connections that have not said who they are");
                        }
                    }
                    // Small messages must not wait for each other.
                    let ready = stream.set_nonblocking(true).and_then(|()| stream.set_nodelay(true));
                    if ready.is_ok() {
                        self.serial += 1;
                        let secret = self.setup.secret.as_ref();
                        self.guests.push(Guest::new(self.serial, Stream::new(stream), from, secret));
                        self.hear(self.serial);
                    }
                }
                Err(e) if e.kind() == IoKind::WouldBlock => return,
                Err(e) if matches!(e.kind(), IoKind::Interrupted | IoKind::ConnectionAborted) => {}
                Err(e) => {
                    tracing::warn!(error = %e, "the data port cannot accept connections");
                    self.accept_after = Some(Instant::now() + AFTER_ERROR);
                    return;
                }
            }
        }
    }

    fn dismiss(&mut self, g: &Guest, why: &str) {
        self.told = self.told.saturating_add(1);
        // Who floods the port must not flood the log.
        if self.told <= TOLD {
            tracing::warn!(from = %g.from, why, "connection to the data port dropped");
        }
    }

    /// Listens to a guest.
    fn hear(&mut self, serial: u64) {
        loop {
            let Some(i) = self.guests.iter().position(|g| g.serial == serial) else { return };
            let said = self.guests[i].hear();
            let outcome = match said {
                Ok(Said::Nothing) => return,
                Ok(Said::Confirmed(peer)) => {
                    let g = self.guests.remove(i);
                    return self.link(peer, g.stream);
                }
                Ok(Said::Heard(peer, why)) => {
                    self.guests.remove(i);
                    self.news.push(News::Refused(peer, why));
                    return;
                }
                Ok(Said::Greeting(g)) => self.judge(&g).map(|o| (o, g)),
                // Peers that change their mind are no strangers.
                Err(_) if self.guests[i].is_known() => {
                    self.guests.remove(i);
                    return;
                }
                Err(why) => Err(why),
            };
            let answered = outcome.and_then(|(o, g)| {
                let generation = match self.standing {
                    Standing::Settled(now) => now,
                    Standing::Open | Standing::Finalized => self.setup.me.generation,
                };
                let answer = Greeting { to: g.from, code: o as u32, generation, ..self.setup.me };
                self.guests[i].stream.write(&answer.encode()).map(|()| (o, g))
            });
            match answered {
                Ok((Outcome::Accepted, g)) => {
                    let peer = g.from as usize;
                    // The peer makes one connection at a time: it has given the earlier one up.
                    self.guests.retain(|g| g.reserved().is_none_or(|(p, _)| p != peer));
                    if let Some(guest) = self.guests.iter_mut().find(|g| g.serial == serial) {
                        guest.reserve(peer, g.code);
                    }
                }
                Ok((Outcome::Differs, g)) => match self.rival(&g) {
                    Some((peer, why)) => self.guests[i].tell(peer, why),
                    None => {
                        self.guests.remove(i);
                        return;
                    }
                },
                Ok(_) => {
                    self.guests.remove(i);
                    return;
                }
                Err(why) => {
                    let g = self.guests.remove(i);
                    return self.dismiss(&g, &why);
                }
            }
        }
    }

    /// Nobody is to come any more.
    pub(super) fn settle(&mut self, standing: Standing) {
        self.standing = standing;
    }

    /// Which member it is that passes other handles for the same attempt, and what is wrong; `None` if it is none that is
    /// waited for here.
    fn rival(&self, g: &Greeting) -> Option<(usize, Refusal)> {
        let list = &self.setup.members.as_ref()?.list;
        let peer = list.iter().position(|m| m.number == g.who)?;
        let stale = g.generation > list[peer].generation;
        Some((peer, if stale { Refusal::Stale { now: g.generation } } else { Refusal::Differs }))
    }

    /// Decides about a connection; an error says why its maker does not belong here.
    fn judge(&self, g: &Greeting) -> Result<Outcome, String> {
        let me = &self.setup.me;
        if (g.key, g.nonce) != (me.key, me.nonce) {
            let own = self.setup.members.as_ref().and_then(|m| m.list.get(self.rank()));
            // Who knows the handle is told what has become of it.
            return match self.standing {
                _ if own.is_none_or(|m| m.token != g.whom) => Err("it belongs to another communicator".into()),
                Standing::Settled(_) => Ok(Outcome::Stale),
                Standing::Finalized => Ok(Outcome::Finalized),
                Standing::Open if g.key == me.key => Ok(Outcome::Differs),
                Standing::Open => Err("it makes another attempt to reconfigure".into()),
            };
        }
        let from = g.from as usize;
        if g.to != me.from || from >= self.setup.size || from == self.rank() {
            return Err(format!("it says it is rank {from} and looks for rank {}", g.to));
        }
        if g.code == PROBE {
            return Ok(Outcome::Alive);
        }
        if self.linked[from] {
            return Ok(Outcome::Linked);
        }
        if let Some((_, attempt)) = self.reservation(from).and_then(|i| self.guests[i].reserved())
            && attempt >= g.code
        {
            return Err(format!("rank {from} has made a newer connection"));
        }
        // Of two connections that cross, that of the lower rank stays.
        if from > self.rank() && self.dials.get(&from).is_some_and(Dial::contends) {
            return Ok(Outcome::Busy);
        }
        Ok(Outcome::Accepted)
    }
}
