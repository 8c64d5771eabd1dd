//! The store at which ranks meet: the one given, the one that the launcher tells of, or one that rank 0 hosts.

use std::io::ErrorKind as IoKind;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use comm_core::{CommOptions, Error, ErrorKind, Result, Secret, Store};
use comm_store::meeting::{self, Means};
use comm_store::{Place, TcpStore, TcpStoreServer, TcpStoreServerOptions};
use parking_lot::Mutex;

use crate::address::listen_for_store;
use crate::host::Host;

/// How long what holds the port that rank 0 was to serve may take to show that it is a store.
const OTHER_HOST: Duration = Duration::from_secs(5);

/// An open store.
pub(crate) struct Opened {
    pub(crate) store: Arc<dyn Store>,
    /// Its name in errors.
    pub(crate) name: String,
    /// Its address, if it has one: an address of this host toward it is one that other ranks can reach.
    pub(crate) toward: Option<SocketAddr>,
    /// The name of this run, under which it has its keys there.
    pub(crate) run: String,
}

fn failed(what: String) -> Error {
    Error::new(ErrorKind::Bootstrap { what, arrived: Vec::new(), missing: Vec::new() })
}

/// Opens the store of `place`, or the one in the options.
pub(crate) fn open_store(
    options: &CommOptions,
    place: &Place,
    rank: usize,
    secret: Option<&Secret>,
    until: Instant,
) -> Result<Opened> {
    if let Some(s) = &options.store {
        return Ok(Opened { store: Arc::clone(s), name: "the store".into(), toward: None, run: place.run.clone() });
    }
    if place.method == "single" {
        return Err(failed(
            "there is no store to meet at: start the ranks with `rustcomms run` or torchrun, set RUSTCOMMS_STORE or \
             MASTER_ADDR and MASTER_PORT, or pass CommOptions::store"
                .into(),
        ));
    }
    let hosting = Mutex::new(Hosting::Others);
    let bind = |addr: &str| {
        let (how, server) = host(addr, secret)?;
        *hosting.lock() = how;
        server
    };
    let connect = |addr: &str, timeout: Duration| {
        let hosting = hosting.lock();
        let taken = matches!(&*hosting, Hosting::Kept(e) if *e == IoKind::AddrInUse);
        let timeout = if taken { timeout.min(OTHER_HOST) } else { timeout };
        TcpStore::connect_with(addr, timeout, secret).map_err(|e| explain(addr, &hosting, e))
    };
    let means = Means { bind: &bind, connect: &connect, ..Means::default() };
    let met = meeting::open(place, rank, until, &means)?;
    let toward = met.store.peer_addr();
    let name = format!("the store at {}", met.store.addr());
    let left = until.saturating_duration_since(Instant::now());
    let store = Arc::new(met.store.with_timeout(left.max(Duration::from_secs(1))));
    Ok(Opened { store, name, toward, run: met.run })
}

/// Why the store cannot be entered, given who was to host it.
fn explain(addr: &str, hosting: &Hosting, e: Error) -> Error {
    let here = Host::this().name;
    let e = match e.kind() {
        // Said again as the reason of another error of the kind.
        ErrorKind::Bootstrap { what, .. } => what.clone(),
        _ => e.brief(),
    };
    match hosting {
        Hosting::Others => failed(e),
        Hosting::Kept(IoKind::AddrInUse) => failed(format!(
            "port {} on {here} is taken by another program: rank 0 was to host the store at {addr}, and what listens \
             there does not answer as one ({e}). End that program, or give all ranks another port (MASTER_PORT or \
             RUSTCOMMS_STORE)",
            addr.rsplit_once(':').map_or("", |(_, p)| p)
        )),
        Hosting::Kept(why) => {
            failed(format!("rank 0 on {here} cannot host the store at {addr} ({why}), and nobody else does: {e}"))
        }
        Hosting::Here => failed(format!(
            "rank 0 hosts the store on {here}, but under {addr} it cannot be reached from there: {e}. The address \
             (MASTER_ADDR or RUSTCOMMS_STORE) must be one of the host on which rank 0 runs"
        )),
    }
}

/// Who hosts the store.
enum Hosting {
    /// This process.
    Here,
    /// It is another's task, or this process has done it before.
    Others,
    /// This process was to, and was kept from it; somebody else may be doing it, as in static torchrun setups.
    Kept(IoKind),
}

fn host(addr: &str, secret: Option<&Secret>) -> Result<(Hosting, Result<TcpStoreServer>)> {
    match listen_for_store(addr)? {
        Ok(listener) => {
            let server = TcpStoreServerOptions::new().secret(secret.cloned()).serve(listener)?;
            Ok((Hosting::Here, Ok(server)))
        }
        Err(e) => Ok((Hosting::Kept(e.kind()), Err(Error::io(format!("hosting the store at {addr}"), &e)))),
    }
}
