//! Where ranks listen and how they reach each other.

use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, UdpSocket};

use comm_core::{Error, Result};

use crate::connector::Peer;
use crate::host::Host;
use crate::records::Card;

/// Connections that may wait to be accepted.
const BACKLOG: i32 = 4096;

/// Opens the data port, and lists the addresses under which others may reach it. `toward` is the store's address.
pub(crate) fn listen(toward: Option<SocketAddr>, interface: Option<&str>) -> Result<(TcpListener, Vec<SocketAddr>)> {
    let _ = interface;
    let fail = |e: &std::io::Error| Error::io("opening the data port", e);
    // Dual-stack where the host has IPv6, else IPv4.
    let listener = TcpListener::bind("[::]:0").or_else(|_| TcpListener::bind("0.0.0.0:0")).map_err(|e| fail(&e))?;
    // std's backlog of 128 is short of the ranks that can come at once; listening again raises it.
    rustix::net::listen(&listener, BACKLOG).map_err(|e| fail(&e.into()))?;
    let port = listener.local_addr().map_err(|e| fail(&e))?.port();
    Ok((listener, own_addresses(port, toward)))
}

/// The addresses under which others may reach this process's `port`.
fn own_addresses(port: u16, toward: Option<SocketAddr>) -> Vec<SocketAddr> {
    // The source address that the kernel would use toward the store is one that others can reach.
    let outward = toward.and_then(|t| {
        let s = UdpSocket::bind(if t.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" }).ok()?;
        s.connect(t).ok()?;
        s.local_addr().ok().map(|a| a.ip())
    });
    vec![SocketAddr::new(outward.unwrap_or(IpAddr::V4(Ipv4Addr::LOCALHOST)), port)]
}

/// How a rank on host `here` reaches the owner of `card`.
pub(crate) fn candidates(here: &Host, card: &Card) -> Peer {
    if card.host.id == here.id {
        // On the same host loopback always works, whatever names and interfaces say.
        let port = card.addrs.first().map(SocketAddr::port);
        let addrs = port.map(|p| SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), p)).into_iter().collect();
        return Peer { addrs, same_host: true };
    }
    // An address that only means "myself" must not be taken to another host.
    let addrs = card.addrs.iter().copied().filter(|a| !a.ip().is_loopback()).collect();
    Peer { addrs, same_host: false }
}
