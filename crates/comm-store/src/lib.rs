//! Rendezvous of rustcomms: stores ([`TcpStore`] and its server, [`FileStore`], [`MemoryStore`], [`PrefixStore`]), which
//! place the launcher gave this process ([`discover`]), and how the ranks find their store ([`meeting`]).
//!
//! Not a database and not a data path: a store holds the few small values through which ranks find
//! each other. [`TcpStore`] and [`TcpStoreServer`] speak the protocol of PyTorch's `TCPStore`
//! (little-endian, opcodes 0 to 18), so either end can be PyTorch. That protocol has no
//! authentication and no encryption: bind servers to trusted networks only, or give both ends a [`comm_core::Secret`],
//! which PyTorch does not know. Then both prove that they know it before either listens to the other; see [`auth`].
//!
//! ```
//! use std::time::Duration;
//! use comm_core::Store;
//! use comm_store::{TcpStore, TcpStoreServer};
//!
//! let server = TcpStoreServer::bind("127.0.0.1:0")?;
//! let store = TcpStore::connect(server.local_addr(), Duration::from_secs(10))?;
//! store.set("answer", b"42")?;
//! assert_eq!(store.get("answer", Duration::from_secs(1))?, b"42");
//! assert_eq!(store.add("answer", 1)?, 43);
//! # Ok::<(), comm_core::Error>(())
//! ```
//!
//! [`FileStore`] is a store in a directory that all ranks share, for hosts that share a file system but no known address;
//! [`MemoryStore`] is one for the threads of a process, and [`PrefixStore`] gives each of several users of a store keys of
//! their own.
//!
//! [`discover`] reads the environment variables of the [`LAUNCHERS`], ours and others', and does nothing else: [`Place`] tells
//! rank, size, hosts, the store if it is named, and why. [`meeting::open`] acts on it: it opens the store where that is this
//! rank's part, or learns its address through the launcher's PMI server or a file, and enters.
//!
//! Unix only: the server's loop is `poll(2)`.

pub mod auth;
mod client;
mod conn;
mod desk;
mod discover;
pub mod env;
mod exchange;
mod file;
#[doc(hidden)]
pub mod fuzzing;
pub mod meeting;
mod memory;
mod pace;
mod prefix;
mod protocol;
mod server;
mod state;

pub use client::TcpStore;
pub use discover::{LAUNCHERS, Place, discover, discover_as, discover_as_in, discover_in};
pub use file::FileStore;
pub use memory::MemoryStore;
pub use prefix::PrefixStore;
pub use server::{TcpStoreServer, TcpStoreServerOptions};

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use comm_core::{Context, Error, ErrorKind, Phase, Result};

/// The addresses of `host:port`, each once: of a name, or the IPv4 or IPv6 address itself, in brackets or not, with a
/// scope where it is link-local (`[fe80::1%eth0]:29500`). Resolvers know no deadline; one that takes longer than
/// `timeout` is left alone.
///
/// # Errors
///
/// `Bootstrap` when there is none, or none in time.
pub fn resolve(addr: &str, timeout: Duration) -> Result<Vec<SocketAddr>> {
    let what = match conn::resolve(addr, deadline_after(timeout)) {
        Ok(found) if !found.is_empty() => return Ok(found),
        Ok(_) => "it has none".to_owned(),
        Err(e) => e.to_string(),
    };
    Err(Error::new(ErrorKind::Bootstrap {
        what: format!("no address was found for {}: {what}", shorten(addr)),
        arrived: Vec::new(),
        missing: Vec::new(),
    }))
}

/// `timeout` from now. Absurdly long timeouts become a century, because `Instant` cannot hold them.
fn deadline_after(timeout: Duration) -> Instant {
    let now = Instant::now();
    now.checked_add(timeout).unwrap_or_else(|| now + Duration::from_secs(100 * 365 * 86_400))
}

/// The error of a store call that waited too long.
fn timed_out(op: &str, started: Instant) -> Error {
    Error::new(ErrorKind::Timeout {
        phase: Phase::Running,
        elapsed: started.elapsed(),
        missing: Vec::new(),
        unmatched: Vec::new(),
    })
    .with_context(|| in_call(op))
}

/// The context of an error in a store call. The key belongs into it: a timeout that does not say
/// what was waited for helps nobody.
fn in_call(op: &str) -> Context {
    Context { op: Some(op.into()), ..Context::default() }
}

/// `'a'`, or `'a', 'b', 'c' and 7 more`, for error texts.
fn name_keys(keys: &[&str]) -> String {
    const SHOWN: usize = 3;
    let mut text = keys.iter().take(SHOWN).map(|k| format!("'{}'", shorten(k))).collect::<Vec<_>>().join(", ");
    if keys.len() > SHOWN {
        text.push_str(&format!(" and {} more", keys.len() - SHOWN));
    }
    text
}

/// Keys can be 8 KiB long; error texts should not.
fn shorten(key: &str) -> String {
    const SHOWN: usize = 80;
    match key.char_indices().nth(SHOWN) {
        Some((at, _)) => format!("{}...", &key[..at]),
        None => key.to_owned(),
    }
}
