//! Meeting at a store: who opens it, and how the other ranks learn where it is.

mod inherited;
mod local;
mod pmi;
mod round;

use std::collections::HashMap;
use std::fs::File;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, ToSocketAddrs, UdpSocket};
use std::time::{Duration, Instant};

use comm_core::{Error, ErrorKind, Result};
use parking_lot::{MappedMutexGuard, Mutex, MutexGuard};

use crate::{Place, TcpStore, TcpStoreServer};

pub use pmi::PmiServer;

/// How the ranks of a run find their store.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Meeting {
    /// Nothing tells, or there is nobody to meet.
    Unknown,
    /// At the address [`Place::store`], which all ranks know: `RUSTCOMMS_STORE`, or `MASTER_ADDR` and `MASTER_PORT`, of which
    /// one alone does nothing (a Slurm step supplies the other).
    Address,
    /// Rank 0 opens the store and publishes its address through the launcher's PMI server.
    ///
    /// An MPI library in the same process uses that server, too. `MPI_Init` may come before or after, but not at the
    /// same time, and `MPI_Finalize` before `exit`; else set `MASTER_ADDR` and `MASTER_PORT`. Setting
    /// [`env::PMI`](crate::env::PMI) to 0 alone is enough only where all ranks are on one host and `RUSTCOMMS_RUN_ID` is set.
    Pmi(PmiServer),
    /// All ranks are on this host: rank 0 opens the store on loopback and leaves its address in a file. The launcher's
    /// variables must tell both, [`Place::local_size`] that equals [`Place::size`] and a name of the job (Open MPI's and PALS'
    /// do; else `RUSTCOMMS_RUN_ID`).
    LocalFile {
        /// What tells this job from others on this host, for as long as it lives.
        job: String,
    },
}

/// What a rank needs in order to open a store or to enter it. The default knows no secret: who needs one starts the server
/// with [`TcpStoreServerOptions::secret`](crate::TcpStoreServerOptions::secret) in `bind` and enters with
/// [`TcpStore::connect_with`] in `connect`.
#[allow(missing_debug_implementations)] // Functions.
pub struct Means<'a> {
    /// Starts a server at `host:port`; port 0 takes a free one.
    pub bind: &'a dyn Fn(&str) -> Result<TcpStoreServer>,
    /// Enters the store at `host:port`, which may take this long.
    pub connect: &'a dyn Fn(&str, Duration) -> Result<TcpStore>,
    /// The addresses of this host under which others may reach it, the best one first.
    pub addresses: &'a dyn Fn() -> Vec<IpAddr>,
}

impl Default for Means<'static> {
    fn default() -> Self {
        Self {
            bind: &|addr| TcpStoreServer::bind(addr),
            connect: &|addr, timeout| TcpStore::connect(addr, timeout),
            addresses: &addresses,
        }
    }
}

/// A store that was entered.
#[derive(Debug)]
#[non_exhaustive]
pub struct Met {
    /// The store.
    pub store: TcpStore,
    /// The name under which this start of the run has its keys there: [`Place::run`], or what the ranks agreed on.
    pub run: String,
}

/// What this process has opened, for its whole life: later communicators meet there, too.
#[derive(Debug, Default)]
struct Opened {
    servers: HashMap<String, TcpStoreServer>,
    /// Where meetings without an address have led. Those through PMI stay failed, because the conversation is torn.
    met: HashMap<Meeting, Result<Vec<String>>>,
    /// Names that the ranks of a run have agreed on for this start of it.
    starts: HashMap<String, String>,
    files: Vec<File>,
}

fn opened(deadline: Instant) -> Result<MappedMutexGuard<'static, Opened>> {
    static OPENED: Mutex<Option<Opened>> = Mutex::new(None);
    let guard = OPENED.try_lock_until(deadline).ok_or_else(|| {
        bootstrap("another thread of this process was still looking for the store when the time was over".into())
    })?;
    Ok(MutexGuard::map(guard, Option::get_or_insert_default))
}

/// Opens the run's store, where that is this rank's part, and enters it.
///
/// What it opens lasts as long as the process, and is found again by later calls.
///
/// `rank` is the caller's rank in the world that is to meet, which decides who opens a store at [`Place::store`]. Without
/// an address all ranks of the launcher meet, and [`Place::rank`] decides.
///
/// With [`Meeting::Pmi`], and with [`Place::unnumbered`], all ranks that the launcher started must call this, as often as
/// they like; the first call waits for them. The PMI launcher is told when the process exits (through `exit` or the end of
/// `main`; a rank that ends otherwise ends the whole job).
///
/// # Errors
///
/// `Bootstrap` when the store cannot be found or reached until `deadline`, when ranks that must come do not, when nothing
/// tells where it is, or when a PMI server or the file says something unexpected; and whatever the functions in `means`
/// return.
pub fn open(place: &Place, rank: usize, deadline: Instant, means: &Means<'_>) -> Result<Met> {
    let addrs = match &place.meeting {
        Meeting::Address => vec![at_address(place, rank, deadline, means)?],
        Meeting::Unknown => vec![place.require_store()?.to_owned()],
        meeting => {
            let mut opened = opened(deadline)?;
            match opened.met.get(meeting) {
                Some(met) => met.clone()?,
                None => {
                    let met = meet(place, deadline, means, &mut opened);
                    if met.is_ok() || matches!(meeting, Meeting::Pmi(_)) {
                        opened.met.insert(meeting.clone(), met.clone());
                    }
                    met?
                }
            }
        }
    };
    let store = enter(&addrs, deadline, means)?;
    let Some(unnumbered) = place.unnumbered.as_ref().filter(|_| place.size > 1) else {
        return Ok(Met { store, run: place.run.clone() });
    };
    let mut opened = opened(deadline)?;
    let run = match opened.starts.get(unnumbered) {
        Some(run) => run.clone(),
        None => {
            let name = round::agree(&store, unnumbered, place.rank, place.size, deadline)?;
            let run = format!("{unnumbered}.{name}");
            opened.starts.insert(unnumbered.clone(), run.clone());
            run
        }
    };
    Ok(Met { store, run })
}

fn at_address(place: &Place, rank: usize, deadline: Instant, means: &Means<'_>) -> Result<String> {
    let addr = place.require_store()?.to_owned();
    if place.rank0_hosts && rank == 0 {
        let mut opened = opened(deadline)?;
        if !opened.servers.contains_key(&addr) {
            match (means.bind)(&addr) {
                Ok(server) => {
                    opened.servers.insert(addr.clone(), server);
                }
                // Somebody else may host it, as static torchrun setups do; if not, connecting says so.
                Err(e) => tracing::debug!(addr, error = %e, "rank 0 does not host the store itself"),
            }
        }
    }
    Ok(addr)
}

/// Finds out where the store is, and opens it at rank 0.
fn meet(place: &Place, deadline: Instant, means: &Means<'_>, opened: &mut Opened) -> Result<Vec<String>> {
    let first = place.rank == 0;
    match &place.meeting {
        Meeting::LocalFile { job } => {
            let spot = local::Spot::of(job)?;
            if !first {
                return Ok(vec![spot.find(place.size - 1, deadline)?.to_string()]);
            }
            let server = (means.bind)("127.0.0.1:0")?;
            let addr = server.local_addr();
            opened.files.push(spot.publish(addr, deadline)?);
            opened.servers.insert(addr.to_string(), server);
            Ok(vec![addr.to_string()])
        }
        Meeting::Pmi(server) => {
            let mut client = pmi::Client::open(server, deadline)?;
            let mine = first.then(|| {
                let (server, addrs) = serve(place, means)?;
                opened.servers.insert(server.local_addr().to_string(), server);
                Ok(addrs)
            });
            let met = client.meet(mine.as_ref());
            // The server counts on a goodbye, whatever came of it.
            client.keep();
            met
        }
        Meeting::Address | Meeting::Unknown => Err(Error::invalid("this meeting needs no search")),
    }
}

/// Opens a store for all ranks of `place`, and lists the addresses under which they may reach it.
fn serve(place: &Place, means: &Means<'_>) -> Result<(TcpStoreServer, Vec<String>)> {
    if place.local_size == Some(place.size) {
        let server = (means.bind)("127.0.0.1:0")?;
        let addr = server.local_addr().to_string();
        return Ok((server, vec![addr]));
    }
    // Dual-stack where the host has IPv6, else IPv4.
    let server = (means.bind)("[::]:0").or_else(|_| (means.bind)("0.0.0.0:0"))?;
    let port = server.local_addr().port();
    let mut ips = (means.addresses)();
    if server.local_addr().is_ipv4() {
        ips.retain(IpAddr::is_ipv4);
    }
    // A host without a network. Never beside others: elsewhere it may lead to another run's store.
    if ips.is_empty() {
        ips.push(IpAddr::V4(Ipv4Addr::LOCALHOST));
    }
    Ok((server, ips.into_iter().map(|ip| SocketAddr::new(ip, port).to_string()).collect()))
}

/// Enters the store at the first of these addresses at which there is one.
fn enter(addrs: &[String], deadline: Instant, means: &Means<'_>) -> Result<TcpStore> {
    let left = || deadline.saturating_duration_since(Instant::now());
    if let [addr] = addrs {
        return (means.connect)(addr, left());
    }
    let mut last = bootstrap("the store has no address".into());
    // An address that leads nowhere must not use up the time of those behind it, and one may be slow: several rounds.
    let mut patience = Duration::from_millis(500);
    while !left().is_zero() {
        for addr in addrs {
            match (means.connect)(addr, left().min(patience)) {
                Ok(store) => return Ok(store),
                Err(e) => last = e,
            }
        }
        patience *= 4;
    }
    Err(last)
}

/// This host's addresses that others may know: those with which it would leave towards the world, and those of its name.
fn addresses() -> Vec<IpAddr> {
    // Addresses for documentation: nothing is sent, the kernel only chooses a way.
    let outward = ["192.0.2.1:9", "[2001:db8::1]:9"].into_iter().filter_map(|to: &str| {
        let to: SocketAddr = to.parse().ok()?;
        let socket = UdpSocket::bind(if to.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" }).ok()?;
        socket.connect(to).ok()?;
        socket.local_addr().ok().map(|a| a.ip())
    });
    let mut found: Vec<IpAddr> = outward.collect();
    let name = rustix::system::uname().nodename().to_string_lossy().into_owned();
    found.extend((name.as_str(), 0).to_socket_addrs().into_iter().flatten().map(|a| a.ip()));
    let mut kept: Vec<IpAddr> = Vec::new();
    for ip in found {
        // Link-local ones mean nothing without their interface.
        let far = match ip {
            IpAddr::V4(ip) => !ip.is_loopback() && !ip.is_unspecified() && !ip.is_link_local(),
            IpAddr::V6(ip) => !ip.is_loopback() && !ip.is_unspecified() && !ip.is_unicast_link_local(),
        };
        if far && !kept.contains(&ip) {
            kept.push(ip);
        }
    }
    kept
}

fn bootstrap(what: String) -> Error {
    Error::new(ErrorKind::Bootstrap { what, arrived: Vec::new(), missing: Vec::new() })
}
