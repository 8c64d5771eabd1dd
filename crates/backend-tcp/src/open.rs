//! The store at which ranks meet: the one given, the one that the launcher tells of, or one that rank 0 hosts.

use std::collections::HashMap;
use std::io::ErrorKind as IoKind;
use std::net::SocketAddr;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use comm_core::{CommOptions, Error, ErrorKind, Result, Secret, Store};
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

/// Servers that rank 0 hosts, kept for the life of the process: later communicators meet there too.
fn servers() -> &'static Mutex<HashMap<String, TcpStoreServer>> {
    static SERVERS: OnceLock<Mutex<HashMap<String, TcpStoreServer>>> = OnceLock::new();
    SERVERS.get_or_init(Mutex::default)
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
    // What is missing under a launcher it says itself.
    if place.method != "single" {
        place.require_store()?;
    }
    let Some(addr) = &place.store else {
        return Err(failed(
            "there is no store to meet at: start the ranks with `rustcomms run` or torchrun, set RUSTCOMMS_STORE or \
             MASTER_ADDR and MASTER_PORT, or pass CommOptions::store"
                .into(),
        ));
    };
    let hosting = if place.rank0_hosts && rank == 0 { host(addr, secret)? } else { Hosting::Others };
    let left = until.saturating_duration_since(Instant::now());
    let taken = matches!(&hosting, Hosting::Kept(e) if e.kind() == IoKind::AddrInUse);
    let store = connect(addr, if taken { left.min(OTHER_HOST) } else { left }, secret).map_err(|e| {
        let (here, e) = (Host::this().name, e.brief());
        match &hosting {
            Hosting::Others => failed(e),
            Hosting::Kept(_) if taken => failed(format!(
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
    })?;
    let toward = store.peer_addr();
    let store = Arc::new(store.with_timeout(left.max(Duration::from_secs(1))));
    Ok(Opened { store, name: format!("the store at {addr}"), toward, run: place.run.clone() })
}

fn connect(addr: &str, timeout: Duration, secret: Option<&Secret>) -> Result<TcpStore> {
    let _ = secret;
    TcpStore::connect(addr, timeout)
}

/// Who hosts the store.
enum Hosting {
    /// This process.
    Here,
    /// It is another's task.
    Others,
    /// This process was to, and was kept from it; somebody else may be doing it, as in static torchrun setups.
    Kept(std::io::Error),
}

fn host(addr: &str, secret: Option<&Secret>) -> Result<Hosting> {
    let _ = secret;
    let mut servers = servers().lock();
    if servers.contains_key(addr) {
        return Ok(Hosting::Here);
    }
    match listen_for_store(addr)? {
        Ok(listener) => {
            servers.insert(addr.to_owned(), TcpStoreServerOptions::new().serve(listener)?);
            Ok(Hosting::Here)
        }
        Err(e) => {
            tracing::debug!(addr, error = %e, "rank 0 does not host the store itself");
            Ok(Hosting::Kept(e))
        }
    }
}
