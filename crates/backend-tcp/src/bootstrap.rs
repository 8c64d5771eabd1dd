//! How a world comes together: ranks meet in the store, connect to some, and learn of the rest from those.

use std::collections::BTreeMap;
use std::net::{Ipv6Addr, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use comm_core::{CommOptions, Context, Control, Error, ErrorKind, Fnv, Result};
use comm_store::{Place, discover};
use comm_transport::{Connect, Dialer, Endpoint, PROTOCOL, Prober};

use crate::address::{InterfaceFilter, candidates, listen, published};
use crate::connector::{Gathering, Peer, Setup, Unconnected};
use crate::host::Host;
use crate::life::Life;
use crate::open::open_store;
use crate::records::{Card, Settings, Stamp, decode_card, encode, process, random};
use crate::rendezvous::{Rendezvous, Seat};
use crate::wire::Greeting;

/// Time that connecting gets at least once all ranks have come, however late the last of them was; no more than what
/// all was given.
const CONNECT: Duration = Duration::from_secs(5);
/// How long a rank waits for one that should connect to it before it tries itself.
const OTHER_WAY: Duration = Duration::from_secs(2);
/// First and longest interval between looks whether another rank has given up.
const LOOK: Duration = Duration::from_millis(500);
const SLOW_LOOK: Duration = Duration::from_secs(4);

/// This rank's place, before anybody is met.
pub(crate) struct Seeker {
    pub(crate) rank: usize,
    pub(crate) size: usize,
    place: Place,
}

/// A world whose ranks have all come.
pub(crate) struct World {
    rank: usize,
    size: usize,
    connect: Connect,
    filter: InterfaceFilter,
    rendezvous: Rendezvous,
    seat: Seat,
    gathering: Gathering,
    /// Cards read from the store.
    near: BTreeMap<usize, Card>,
    until: Instant,
}

impl Seeker {
    /// What options and environment say.
    pub(crate) fn identify(options: &CommOptions) -> Result<Self> {
        let place = discover()?;
        let (rank, size) = match (options.rank, options.size) {
            (Some(r), Some(s)) => (r, s),
            (None, None) => (place.rank, place.size),
            _ => return Err(Error::invalid("set both rank and size in the options, or neither")),
        };
        if size == 0 || rank >= size {
            return Err(Error::invalid(format!("rank {rank} is not below the world size {size}")));
        }
        if u32::try_from(size).is_err() {
            return Err(Error::invalid(format!("a world of {size} ranks is too large")));
        }
        let name = options.effective_name();
        if name.is_empty() || name.len() > 256 {
            return Err(Error::invalid(format!("a communicator's name has 1 to 256 bytes, this one {}", name.len())));
        }
        Ok(Self { rank, size, place })
    }

    /// A key for a world of this rank alone.
    pub(crate) fn lonely_key(options: &CommOptions) -> String {
        format!("single/{}/{}", options.effective_name(), random())
    }

    /// Waits for all ranks.
    pub(crate) fn meet(self, options: &CommOptions, connect: Connect) -> Result<World> {
        let (rank, size) = (self.rank, self.size);
        // An absurdly long timeout is a day: `Instant` cannot hold everything that `Duration` can.
        let timeout = options.bootstrap_timeout.min(Duration::from_secs(86_400));
        let began = Instant::now();
        let until = began + timeout;
        let secret = options.effective_secret()?;
        let filter = InterfaceFilter::of(options.effective_interface().as_deref())?;
        let opened = open_store(options, &self.place, rank, secret.as_ref(), until)?;
        // Dual-stack where the host has IPv6, else IPv4.
        let listener = listen(Ipv6Addr::UNSPECIFIED.into(), 0)?;
        let port = listener.local_addr().map_err(|e| Error::io("opening the data port", &e))?.port();
        let addrs = published(&filter, opened.toward, port)?;
        let host = Host::this();
        let rendezvous = Rendezvous {
            store: opened.store,
            store_name: opened.name,
            scope: format!("rustcomms/{}/{}", opened.run, options.effective_name()),
            settings: Settings {
                stamp: Stamp { protocol: u32::from(PROTOCOL), rank, host: host.name.clone() },
                size,
                checksum: options.checksum,
                connect: connect.to_string(),
                secret: secret.is_some(),
            },
            card: Card { rank, host, life: Life::this(), process: process(), addrs },
            began,
            until,
        };
        let seat = rendezvous.meet()?;
        let until = until.max(Instant::now() + timeout.min(CONNECT));
        let key = Fnv::hash(seat.key.as_bytes());
        let me = Greeting { key, nonce: seat.nonce, from: rank as u32, ..Greeting::default() };
        let heartbeat = options.heartbeat_timeout;
        let gathering = Gathering::open(Setup { me, size, secret, listener, heartbeat, until, members: None })
            .map_err(|e| rendezvous.report(&seat, e))?;
        Ok(World { rank, size, connect, filter, rendezvous, seat, gathering, near: BTreeMap::new(), until })
    }
}

/// Adds the communicator's name and the rank to an error.
pub(crate) fn in_bootstrap(e: Error, options: &CommOptions, rank: usize, size: usize) -> Error {
    if matches!(e.kind(), ErrorKind::InvalidArgument { .. }) {
        // There is no communicator yet that would still be usable.
        return e;
    }
    e.with_context(|| Context {
        comm: Some(options.effective_name().into()),
        rank: Some((rank, size)),
        ..Context::default()
    })
}

impl World {
    /// The rendezvous key, unique to this communicator.
    pub(crate) fn key(&self) -> &str {
        &self.seat.key
    }

    /// Tells the others why this rank cannot go on. Returns the error to give.
    pub(crate) fn report(&self, e: Error) -> Error {
        self.rendezvous.report(&self.seat, e)
    }

    /// Connects to the ranks that this one is connected to from the start. Has the connections that others have made
    /// besides, too.
    pub(crate) fn connect(&mut self) -> Result<Vec<Option<TcpStream>>> {
        let first = self.connect.neighbours(self.rank, self.size);
        // Cards of those with whom the others' are exchanged are needed, too, whether they are connected or not.
        let mut near = Connect::Auto.neighbours(self.rank, self.size);
        near.extend(&first);
        near.sort_unstable();
        near.dedup();
        let cards = self.rendezvous.cards(&self.seat, &near)?;
        self.near = near.into_iter().zip(cards).collect();
        self.learn(self.near.values());
        self.gathering.want(first.iter().copied().filter(|p| *p < self.rank));
        self.wait(&first)?;
        let mut sockets: Vec<Option<TcpStream>> = (0..self.size).map(|_| None).collect();
        for (p, s) in self.gathering.take() {
            sockets[p] = Some(s);
        }
        Ok(sockets)
    }

    fn wait(&self, first: &[usize]) -> Result<()> {
        let other_way = Instant::now() + OTHER_WAY.min(self.until.saturating_duration_since(Instant::now()) / 2);
        let mut look = LOOK;
        loop {
            let now = Instant::now();
            match self.gathering.wait(first, self.until.min(now + look)) {
                Ok(true) => return Ok(()),
                Err(u) => return Err(self.unconnected(&u, "")),
                Ok(false) => {}
            }
            let now = Instant::now();
            if now >= self.until {
                return Err(self.unconnected(&self.gathering.missing(first), "; check firewalls and interfaces"));
            }
            // Whoever fails closes its connections, which shows nowhere until they are used.
            self.rendezvous.reported(&self.seat)?;
            if now >= other_way {
                // Perhaps they cannot reach this rank, and it can reach them.
                self.gathering.want(self.gathering.missing(first).missing.into_iter().map(|(p, _)| p));
            }
            look = (look * 2).min(SLOW_LOOK);
        }
    }

    fn unconnected(&self, u: &Unconnected, advice: &str) -> Error {
        const SHOWN: usize = 8;
        let who = |r: usize| self.near.get(&r).map_or_else(|| format!("rank {r}"), name);
        let me = name(&self.rendezvous.card);
        let mut why: Vec<String> =
            u.missing.iter().take(SHOWN).map(|(r, why)| format!("{} ({why})", who(*r))).collect();
        if u.missing.len() > SHOWN {
            why.push(format!("{} more", u.missing.len() - SHOWN));
        }
        let missing: Vec<usize> = u.missing.iter().map(|(r, _)| *r).collect();
        Error::new(ErrorKind::Bootstrap {
            what: format!("all ranks came, but {me} has no connection to {}{advice}", why.join(", ")),
            arrived: self.arrived(&missing),
            missing,
        })
    }

    /// Those whose cards are known, and this rank, without `missing`.
    fn arrived(&self, missing: &[usize]) -> Vec<String> {
        let mut cards: Vec<&Card> = self.near.values().chain([&self.rendezvous.card]).collect();
        cards.retain(|c| !missing.contains(&c.rank));
        cards.sort_unstable_by_key(|c| c.rank);
        cards.into_iter().map(name).collect()
    }

    fn learn<'a>(&self, cards: impl Iterator<Item = &'a Card>) {
        let own = &self.rendezvous.card;
        let peer = |c: &Card| {
            let same_host = own.host.same(&c.host);
            let process = c.life.process(&c.host, &own.life, &own.host);
            Peer { addrs: candidates(&own.addrs, &c.addrs, same_host, &self.filter), same_host, process }
        };
        self.gathering.learn(cards.map(|c| (c.rank, peer(c))).collect());
    }

    /// What makes further connections for the endpoint.
    pub(crate) fn dialer(&self) -> Arc<dyn Dialer> {
        self.gathering.dialer()
    }

    /// What asks silent peers for a sign of life.
    pub(crate) fn prober(&self) -> Arc<dyn Prober> {
        self.gathering.prober()
    }

    /// Further connections go to `endpoint`; the world ends with it.
    pub(crate) fn hand_over(&mut self, endpoint: &Arc<Endpoint>) {
        self.gathering.hand_over(endpoint);
    }

    /// Exchanges cards with everybody, over the control plane of the new group. Returns the hosts.
    pub(crate) fn introduce(&self, control: &dyn Control) -> Result<Vec<Host>> {
        let own = encode(&self.rendezvous.card)?;
        let left = self.until.saturating_duration_since(Instant::now());
        let raw = control.exchange(&own, left).map_err(|e| self.interrupted(&e))?;
        let cards: Vec<Card> = raw.iter().enumerate().map(|(r, bytes)| decode_card(bytes, r)).collect::<Result<_>>()?;
        self.learn(cards.iter().filter(|c| !self.near.contains_key(&c.rank)));
        Ok(cards.into_iter().map(|c| c.host).collect())
    }

    fn interrupted(&self, e: &Error) -> Error {
        let missing = match e.kind() {
            ErrorKind::PeerFailed { rank, .. } => vec![*rank],
            ErrorKind::Timeout { missing, .. } => missing.clone(),
            _ => return e.clone(),
        };
        let who: Vec<String> =
            missing.iter().map(|r| self.near.get(r).map_or_else(|| format!("rank {r}"), name)).collect();
        let what = format!(
            "all ranks came, but {} lost {} while they exchanged their addresses: {}",
            name(&self.rendezvous.card),
            who.join(", "),
            e.brief()
        );
        let arrived = self.arrived(&missing);
        Error::new(ErrorKind::Bootstrap { what, arrived, missing })
    }
}

fn name(c: &Card) -> String {
    format!("rank {} on {}", c.rank, c.host.name)
}
