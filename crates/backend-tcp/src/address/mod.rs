//! Where a rank can be reached, and which of a peer's addresses to try in which order.
//!
//! A rank publishes all its addresses; the one that connects chooses, because only it knows its own networks. A host's
//! name plays no part in it: `/etc/hosts` often maps the host's own name to `127.0.1.1`.

mod dial;
mod filter;

use std::cmp::Reverse;
use std::collections::HashSet;
use std::fmt::{self, Write};
use std::net::{IpAddr, SocketAddr, SocketAddrV6};

use comm_core::{Error, Result};
use serde::de::{Deserializer, SeqAccess, Visitor};
use serde::{Deserialize, Serialize};

pub(crate) use dial::{listen, listen_for_store};
pub(crate) use filter::InterfaceFilter;
use filter::{LOOPBACKS, Network, is_link_local};

/// The most addresses that a rank publishes, and that are believed of another.
pub(crate) const MAX_ADDRESSES: usize = 64;
/// The longest interface name that is believed of another rank, in bytes. Linux has 15.
const MAX_NAME: usize = 64;
/// The most addresses that a connector tries.
const MAX_CANDIDATES: usize = 128;

/// One address of an interface.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Address {
    /// Without a scope: that of a link-local address is only known to who uses it.
    pub(crate) ip: IpAddr,
    /// Bits of `ip` that all hosts on its network have in common.
    pub(crate) prefix: u8,
    /// The interface's name, on the host that has it.
    #[serde(deserialize_with = "short_name")]
    pub(crate) interface: String,
    /// The interface's number, on the host that has it; 0 if it is not known.
    pub(crate) index: u32,
    /// The address that its host uses toward the store.
    pub(crate) toward_store: bool,
}

impl Address {
    /// `127.0.0.0/8`, thus `127.0.1.1` too, and `::1`.
    pub(crate) fn is_loopback(&self) -> bool {
        self.ip.is_loopback()
    }

    pub(crate) fn is_link_local(&self) -> bool {
        is_link_local(self.ip)
    }

    fn network(&self) -> Network {
        Network::new(self.ip, self.prefix)
    }

    /// On an interface as containers and virtual machines have them on their host: other hosts seldom reach it, and
    /// often have the same address. The store's traffic proves the contrary.
    fn is_inner(&self) -> bool {
        const BEGINNINGS: [&str; 13] = [
            "docker", "virbr", "veth", "vnet", "cni", "flannel", "cali", "cilium", "podman", "lxcbr", "lxdbr", "br-",
            "tap",
        ];
        !self.toward_store && BEGINNINGS.iter().any(|b| self.interface.starts_with(b))
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.ip, self.prefix)
    }
}

/// All addresses under which a rank's listener can be reached, best first. At most [`MAX_ADDRESSES`], in what is
/// decoded, too.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Addresses {
    /// The listener's port.
    pub(crate) port: u16,
    #[serde(deserialize_with = "bounded")]
    pub(crate) entries: Vec<Address>,
    /// All addresses of this host, whatever the filter says, to tell a peer's from one's own. Not published.
    #[serde(skip)]
    local: Vec<IpAddr>,
}

fn short_name<'de, D: Deserializer<'de>>(d: D) -> std::result::Result<String, D::Error> {
    struct Name;
    impl Visitor<'_> for Name {
        type Value = String;
        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            write!(f, "an interface name of at most {MAX_NAME} bytes")
        }
        fn visit_str<E: serde::de::Error>(self, v: &str) -> std::result::Result<String, E> {
            if v.len() > MAX_NAME { Err(E::invalid_length(v.len(), &self)) } else { Ok(v.into()) }
        }
    }
    d.deserialize_str(Name)
}

fn bounded<'de, D: Deserializer<'de>>(d: D) -> std::result::Result<Vec<Address>, D::Error> {
    struct List;
    impl<'de> Visitor<'de> for List {
        type Value = Vec<Address>;
        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            write!(f, "at most {MAX_ADDRESSES} addresses")
        }
        fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> std::result::Result<Self::Value, A::Error> {
            let mut list = Vec::new();
            while let Some(a) = seq.next_element()? {
                if list.len() == MAX_ADDRESSES {
                    return Err(serde::de::Error::invalid_length(MAX_ADDRESSES + 1, &self));
                }
                list.push(a);
            }
            Ok(list)
        }
    }
    d.deserialize_seq(List)
}

/// The addresses of this host under which a listener on `port` of all interfaces can be reached, as far as `filter`
/// allows them. `toward` is where the store is, if it has an address.
///
/// Loopback addresses are always among them, for ranks on the same host.
///
/// # Errors
///
/// `InvalidArgument`, listing what there is, when a filter allows none. `Io` when there is a filter and
/// the system does not tell its interfaces.
pub(crate) fn published(filter: &InterfaceFilter, toward: Option<SocketAddr>, port: u16) -> Result<Addresses> {
    let found = match if_addrs::get_if_addrs() {
        Ok(found) => found,
        // Where the system keeps it to itself, as some sandboxes do, the address toward the store is left.
        Err(e) if filter.is_empty() => {
            tracing::warn!(error = %e, "the network interfaces cannot be listed");
            Vec::new()
        }
        Err(e) => return Err(Error::io("listing the network interfaces", &e)),
    };
    let found = found
        .into_iter()
        .filter(|i| i.is_oper_up() || i.is_loopback())
        .map(|i| Address {
            ip: i.ip(),
            prefix: match &i.addr {
                if_addrs::IfAddr::V4(a) => a.prefixlen,
                if_addrs::IfAddr::V6(a) => a.prefixlen,
            },
            index: i.index.unwrap_or(0),
            interface: i.name,
            toward_store: false,
        })
        .collect();
    select(filter, found, toward.and_then(dial::source_toward), port)
}

/// The part of [`published`] that asks nobody.
///
/// `source` is the address toward the store, with the number of its interface or 0 where the address tells enough.
fn select(
    filter: &InterfaceFilter,
    found: Vec<Address>,
    source: Option<(IpAddr, u32)>,
    port: u16,
) -> Result<Addresses> {
    let admitted = |a: &Address| filter.admits(&a.interface, a.ip);
    if !filter.is_empty() && !found.iter().any(admitted) {
        return Err(Error::invalid(format!(
            "no interface is left by '{filter}' ({} or the option); this host has {}",
            comm_store::env::INTERFACE,
            list(&found)
        )));
    }
    let local = found.iter().map(|a| a.ip).chain(source.map(|s| s.0)).collect();
    let mut entries: Vec<Address> = found.into_iter().filter(|a| a.is_loopback() || admitted(a)).collect();
    let is_source = |a: &Address, (ip, index): (IpAddr, u32)| a.ip == ip && (index == 0 || a.index == index);
    for a in &mut entries {
        a.interface.truncate(a.interface.floor_char_boundary(MAX_NAME));
        a.toward_store = false;
    }
    if let Some(source) = source {
        match entries.iter_mut().find(|a| is_source(a, source)) {
            Some(a) => a.toward_store = true,
            // Addresses may come and go between the two questions.
            None if filter.is_empty() => {
                let (ip, index) = source;
                entries.push(Address { ip, prefix: u8::MAX, interface: String::new(), index, toward_store: true });
            }
            None => {}
        }
    }
    let first = entries.iter().find(|a| a.toward_store).map(|a| a.index);
    entries.sort_by_key(|a| {
        let standing = match a {
            _ if a.is_loopback() => 4,
            _ if a.toward_store => 0,
            _ if a.is_link_local() => 3,
            _ if a.is_inner() => 2,
            _ => 1,
        };
        (standing, Some(a.index) != first, a.index, a.ip.is_ipv6())
    });
    // A host with very many addresses does without the last ones, but not without loopback.
    let mut loopback = entries.split_off(entries.iter().position(Address::is_loopback).unwrap_or(entries.len()));
    loopback.sort_by_key(|a| !LOOPBACKS.contains(&a.ip));
    loopback.truncate(4);
    entries.truncate(MAX_ADDRESSES - loopback.len());
    entries.append(&mut loopback);
    Ok(Addresses { port, entries, local })
}

/// `lo (127.0.0.1/8, ::1/128), eth0 (10.0.0.2/24)`
fn list(found: &[Address]) -> String {
    if found.is_empty() {
        return "no address at all".into();
    }
    let mut names: Vec<&str> = Vec::new();
    for a in found {
        if !names.contains(&a.interface.as_str()) {
            names.push(&a.interface);
        }
    }
    let mut text = String::new();
    for name in names {
        let theirs: Vec<String> = found.iter().filter(|a| a.interface == name).map(ToString::to_string).collect();
        let _ = write!(text, "{}{name} ({})", if text.is_empty() { "" } else { ", " }, theirs.join(", "));
    }
    text
}

/// Where the rank with the addresses `mine` should try to reach the one with `theirs`, in that order, each once.
///
/// On the same host, as [`Host::same`](crate::host::Host::same) says, that is loopback; the rest follows in case that
/// host only looks the same, as copies of a virtual machine do. On another host it is first what is in a network that
/// both have, interface by interface, then the address that the peer uses toward the store, then the others, last
/// those of bridges for containers, and those that are valid on one link only. IPv6 addresses of that last kind get the
/// scope of each own interface that has one. Loopback is never taken to another host, nor is an address that this host
/// has itself. Addresses outside of the filter's networks come after those inside.
pub(crate) fn candidates(
    mine: &Addresses,
    theirs: &Addresses,
    same_host: bool,
    filter: &InterfaceFilter,
) -> Vec<SocketAddr> {
    let port = theirs.port;
    let mut ranked: Vec<((bool, u8, usize, usize), SocketAddr)> = Vec::new();
    for (at, a) in theirs.entries.iter().enumerate() {
        let ip = a.ip.to_canonical();
        if ip.is_loopback() || ip.is_unspecified() || ip.is_multicast() || mine.has(ip) {
            continue;
        }
        let outside = !filter.admits_peer(ip);
        if let (IpAddr::V6(ip), true) = (ip, is_link_local(ip)) {
            for (own, scope) in mine.scopes().into_iter().enumerate() {
                ranked.push(((outside, 5, own, at), SocketAddrV6::new(ip, port, 0, scope).into()));
            }
            continue;
        }
        let shared = mine.neighbour(a);
        let class = match shared {
            _ if is_link_local(ip) => 4,
            _ if a.is_inner() => 3,
            Some((_, inner)) => {
                if inner {
                    3
                } else {
                    0
                }
            }
            None if a.toward_store => 1,
            None => 2,
        };
        ranked.push(((outside, class, shared.map_or(usize::MAX, |(own, _)| own), at), SocketAddr::new(ip, port)));
    }
    ranked.sort_by_key(|(key, _)| *key);
    let mut order: Vec<SocketAddr> = Vec::new();
    if same_host {
        let mut known: Vec<IpAddr> = theirs.entries.iter().filter(|a| a.is_loopback()).map(|a| a.ip).collect();
        // Without a list loopback is there all the same.
        if known.is_empty() {
            known.push(LOOPBACKS[0]);
        }
        known.sort_by_key(|ip| (Reverse(LOOPBACKS.contains(ip)), ip.is_ipv6()));
        order.extend(known.into_iter().map(|ip| SocketAddr::new(ip, port)));
    }
    order.extend(ranked.into_iter().map(|(_, a)| a));
    let mut seen = HashSet::new();
    order.retain(|a| seen.insert(*a));
    order.truncate(MAX_CANDIDATES);
    order
}

impl Addresses {
    /// Whether this host itself has the address. Many hosts have the same ones on their bridges for containers.
    fn has(&self, ip: IpAddr) -> bool {
        // Link-local addresses may be the same on different links, such as `fe80::1` of routers.
        self.local.contains(&ip) && !is_link_local(ip)
    }

    /// The first own address in whose network the peer's is, and whether that is a bridge for containers.
    fn neighbour(&self, peer: &Address) -> Option<(usize, bool)> {
        let near = |a: &Address| {
            let (mine, theirs) = (a.network(), peer.network());
            !a.is_loopback() && mine.is_shared() && mine.contains(peer.ip) && theirs.contains(a.ip)
        };
        self.entries.iter().position(near).map(|at| (at, self.entries[at].is_inner()))
    }

    /// Interfaces through which link-local IPv6 peers can be reached, best first.
    fn scopes(&self) -> Vec<u32> {
        let mut scopes = Vec::new();
        for a in &self.entries {
            if a.ip.is_ipv6() && a.is_link_local() && a.index != 0 && !scopes.contains(&a.index) {
                scopes.push(a.index);
            }
        }
        scopes
    }
}

impl fmt::Display for Addresses {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "port {} of {}", self.port, list(&self.entries))
    }
}

#[cfg(test)]
mod tests;
