//! How ranks find each other: through a store, under keys `rustcomms/{run}/{name}/{creation}/…`.
//!
//! The *creation* number counts how often this rank has created a communicator of this name in this
//! run; it lives in the store, per rank and name, so that ranks with different histories of other
//! names still meet.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs, UdpSocket};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use comm_core::{CommOptions, Context, Error, ErrorKind, Fnv, Result, Store};
use comm_store::{Place, TcpStore, TcpStoreServer, discover};
use comm_transport::PROTOCOL;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use crate::handshake::{Greeting, mesh};
use crate::host::Host;

/// A connected world.
pub(crate) struct World {
    pub(crate) rank: usize,
    pub(crate) size: usize,
    pub(crate) sockets: Vec<Option<TcpStream>>,
    pub(crate) hosts: Vec<Host>,
    /// The rendezvous key, unique to this communicator.
    pub(crate) key: String,
}

/// What each rank publishes.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Card {
    protocol: u32,
    size: usize,
    host: Host,
    addrs: Vec<SocketAddr>,
    /// Rank 0's is the communicator's secret number.
    nonce: u64,
    checksum: bool,
    /// The rank was here, but its attempt has failed: nobody listens at its addresses any more.
    gave_up: bool,
}

/// Finds all ranks and connects to them.
pub(crate) fn join(options: &CommOptions) -> Result<World> {
    let (place, rank, size) = identify(options)?;
    let name = options.effective_name();
    if name.is_empty() || name.len() > 256 {
        return Err(Error::invalid(format!("a communicator's name has 1 to 256 bytes, this one {}", name.len())));
    }
    if size == 1 {
        let key = format!("single/{name}/{}", random());
        return Ok(World { rank, size, sockets: vec![None], hosts: vec![Host::this()], key });
    }
    // An absurdly long timeout is a day: `Instant` cannot hold everything that `Duration` can.
    let until = Instant::now() + options.bootstrap_timeout.min(Duration::from_secs(86_400));
    let (store, toward) = open_store(options, &place, rank, until)?;
    let scope = format!("rustcomms/{}/{name}", place.run);
    let creation = store.add(&format!("{scope}/created/{rank}"), 1)?;
    let key = format!("{scope}/{creation}");

    let (listener, addrs) = listen(toward)?;
    let mine = Card {
        protocol: u32::from(PROTOCOL),
        size,
        host: Host::this(),
        addrs,
        nonce: random(),
        checksum: options.checksum,
        gave_up: false,
    };
    let card =
        postcard::to_allocvec(&mine).map_err(|e| Error::invalid(format!("the rank's entry cannot be encoded: {e}")))?;
    let own_key = format!("{key}/{rank}");
    store.set(&own_key, &card)?;
    let met = meet(store.as_ref(), &key, &mine, rank, &listener, until);
    if met.is_err() {
        // A card that stays as it is would send a later rank to a port that is closed. The store may be gone itself.
        let left = Card { gave_up: true, ..mine.clone() };
        if let Ok(card) = postcard::to_allocvec(&left) {
            let _ = store.set(&own_key, &card);
        }
    }
    let (sockets, cards) =
        met.map_err(|e| e.with_context(|| Context { comm: Some(name.into()), ..Context::default() }))?;
    Ok(World { rank, size, sockets, hosts: cards.into_iter().map(|c| c.host).collect(), key })
}

/// Reads everybody's card and connects.
fn meet(
    store: &dyn Store,
    key: &str,
    mine: &Card,
    rank: usize,
    listener: &TcpListener,
    until: Instant,
) -> Result<(Vec<Option<TcpStream>>, Vec<Card>)> {
    let cards = collect(store, key, mine, rank, until)?;
    let greeting = Greeting { key: Fnv::hash(key.as_bytes()), nonce: cards[0].nonce, from: rank as u32, to: 0 };
    let reach = |p: usize| {
        let c = &cards[p];
        if c.host.id == mine.host.id {
            // On the same host loopback always works, whatever names and interfaces say.
            let port = c.addrs.first().map_or(0, SocketAddr::port);
            return vec![SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), port)];
        }
        // An address that only means "myself" must not be taken to another host.
        c.addrs.iter().copied().filter(|a| !a.ip().is_loopback()).collect()
    };
    let sockets = mesh(listener, greeting, mine.size, &reach, until)?;
    Ok((sockets, cards))
}

fn identify(options: &CommOptions) -> Result<(Place, usize, usize)> {
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
    Ok((place, rank, size))
}

/// Servers that rank 0 hosts, kept for the life of the process: later communicators meet there too.
fn servers() -> &'static Mutex<HashMap<String, TcpStoreServer>> {
    static SERVERS: OnceLock<Mutex<HashMap<String, TcpStoreServer>>> = OnceLock::new();
    SERVERS.get_or_init(Mutex::default)
}

/// The store, and its address if it has one.
fn open_store(
    options: &CommOptions,
    place: &Place,
    rank: usize,
    until: Instant,
) -> Result<(Arc<dyn Store>, Option<SocketAddr>)> {
    if let Some(s) = &options.store {
        return Ok((Arc::clone(s), None));
    }
    // What is missing under a launcher it says itself.
    if place.method != "single" {
        place.require_store()?;
    }
    let Some(addr) = &place.store else {
        return Err(Error::new(ErrorKind::Bootstrap {
            what: "there is no store to meet at: start the ranks with `rustcomms run` or torchrun, set RUSTCOMMS_STORE or \
                   MASTER_ADDR and MASTER_PORT, or pass CommOptions::store"
                .into(),
            arrived: Vec::new(),
            missing: Vec::new(),
        }));
    };
    if place.rank0_hosts && rank == 0 {
        let mut servers = servers().lock();
        if !servers.contains_key(addr) {
            match TcpStoreServer::bind(addr.as_str()) {
                Ok(s) => {
                    servers.insert(addr.clone(), s);
                }
                // Somebody else may host it, as static torchrun setups do; if not, connecting says so.
                Err(e) => tracing::debug!(addr, error = %e, "rank 0 does not host the store itself"),
            }
        }
    }
    let left = until.saturating_duration_since(Instant::now());
    let store = TcpStore::connect(addr, left)?;
    let toward = addr.to_socket_addrs().ok().and_then(|mut a| a.next());
    Ok((Arc::new(store.with_timeout(left.max(Duration::from_secs(1)))), toward))
}

/// Opens the data port and lists the addresses under which others may reach it.
fn listen(toward: Option<SocketAddr>) -> Result<(TcpListener, Vec<SocketAddr>)> {
    let fail = |e: &std::io::Error| Error::io("opening the data port", e);
    // Dual-stack where the host has IPv6, else IPv4.
    let listener = TcpListener::bind("[::]:0").or_else(|_| TcpListener::bind("0.0.0.0:0")).map_err(|e| fail(&e))?;
    let port = listener.local_addr().map_err(|e| fail(&e))?.port();
    // The source address that the kernel would use toward the store is one that others can reach.
    let outward = toward.and_then(|t| {
        let s = UdpSocket::bind(if t.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" }).ok()?;
        s.connect(t).ok()?;
        s.local_addr().ok().map(|a| a.ip())
    });
    let ip = outward.unwrap_or(IpAddr::V4(Ipv4Addr::LOCALHOST));
    Ok((listener, vec![SocketAddr::new(ip, port)]))
}

/// Waits for everybody's card.
fn collect(store: &dyn Store, key: &str, mine: &Card, rank: usize, until: Instant) -> Result<Vec<Card>> {
    let keys: Vec<String> = (0..mine.size).map(|r| format!("{key}/{r}")).collect();
    let names: Vec<&str> = keys.iter().map(String::as_str).collect();
    let raw = match store.multi_get(&names, until.saturating_duration_since(Instant::now())) {
        Ok(v) => v,
        Err(e) if matches!(e.kind(), ErrorKind::Timeout { .. }) => return Err(absent(store, &names)),
        Err(e) => return Err(e),
    };
    let mut cards = Vec::with_capacity(raw.len());
    for (r, bytes) in raw.iter().enumerate() {
        let card: Card = postcard::from_bytes(bytes).map_err(|e| {
            Error::new(ErrorKind::Corrupt { rank: Some(r), what: format!("its entry in the store: {e}") })
        })?;
        if card.protocol != mine.protocol {
            let who = format!("rank {r} on {}", card.host.name);
            return Err(ErrorKind::VersionSkew { ours: mine.protocol, theirs: card.protocol, who }.into());
        }
        if (card.size, card.checksum) != (mine.size, mine.checksum) {
            return Err(Error::new(ErrorKind::Bootstrap {
                what: format!(
                    "rank {r} says world size {} (checksums {}), rank {rank} says {} (checksums {})",
                    card.size, card.checksum, mine.size, mine.checksum
                ),
                arrived: Vec::new(),
                missing: Vec::new(),
            }));
        }
        cards.push(card);
    }
    // Asked last: a rank gives up because of what disagrees, which says more.
    if let Some((r, card)) = cards.iter().enumerate().find(|(_, c)| c.gave_up) {
        return Err(Error::new(ErrorKind::Bootstrap {
            what: format!(
                "rank {r} on {} came and has given up waiting; start the ranks closer together",
                card.host.name
            ),
            arrived: Vec::new(),
            missing: vec![r],
        }));
    }
    Ok(cards)
}

/// Who came and who did not.
fn absent(store: &dyn Store, keys: &[&str]) -> Error {
    let (mut arrived, mut missing) = (Vec::new(), Vec::new());
    for (r, key) in keys.iter().enumerate() {
        let here = store.check(&[key]).unwrap_or(false);
        let card = here.then(|| store.get(key, Duration::from_secs(1)).ok()).flatten();
        match card.and_then(|b| postcard::from_bytes::<Card>(&b).ok()) {
            Some(c) => arrived.push(format!("rank {r} on {}", c.host.name)),
            None if here => arrived.push(format!("rank {r}")),
            None => missing.push(r),
        }
    }
    Error::new(ErrorKind::Bootstrap { what: "not all ranks came in time".into(), arrived, missing })
}

/// A random number, from the operating system through the standard library's hasher keys.
fn random() -> u64 {
    use std::hash::{BuildHasher, Hasher};
    let mut h = std::collections::hash_map::RandomState::new().build_hasher();
    h.write_u32(std::process::id());
    h.finish()
}
