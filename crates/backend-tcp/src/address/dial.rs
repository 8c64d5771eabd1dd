//! Names, and listeners.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, UdpSocket};
use std::time::Duration;

use comm_core::{Error, Result};
use socket2::{Domain, Protocol, Socket, Type};

use super::filter::LOOPBACKS;

/// Connections that the kernel keeps for a listener until it accepts them.
const BACKLOG: i32 = 4096;

/// The addresses of `host`: a name, or an IPv4 or IPv6 address, with or without brackets, with a scope where it is
/// link-local (`fe80::1%eth0`). The system's resolver knows no deadline; what takes longer than `timeout` is given up.
///
/// # Errors
///
/// `Bootstrap` when the name has no address or none is found in time.
pub(crate) fn resolve(host: &str, port: u16, timeout: Duration) -> Result<Vec<SocketAddr>> {
    let bare = host.strip_prefix('[').and_then(|h| h.strip_suffix(']')).unwrap_or(host);
    let addr = if bare.contains(':') { format!("[{bare}]:{port}") } else { format!("{bare}:{port}") };
    comm_store::resolve(&addr, timeout)
}

/// Where the rank that hosts the store binds it when `host` is what the others know it by.
///
/// Only a host that says loopback is bound there alone. All else gets the wildcard: the name may lead elsewhere on
/// other hosts than here, where `/etc/hosts` may map it to `127.0.1.1`.
pub(crate) fn bind_address_for_store(host: &str) -> IpAddr {
    let bare = host.strip_prefix('[').and_then(|h| h.strip_suffix(']')).unwrap_or(host);
    match bare.parse::<IpAddr>().map(|ip| ip.to_canonical()) {
        Ok(ip) if ip.is_loopback() => ip,
        Err(_) if is_localhost(bare) => {
            // What peers find under the name counts, and they try IPv4 and IPv6.
            let found = resolve(bare, 1, Duration::from_secs(5)).unwrap_or_default();
            let has = |ip: IpAddr| found.iter().any(|a| a.ip() == ip);
            LOOPBACKS.into_iter().find(|ip| has(*ip)).unwrap_or(LOOPBACKS[0])
        }
        _ => IpAddr::V6(Ipv6Addr::UNSPECIFIED),
    }
}

fn is_localhost(name: &str) -> bool {
    let name = name.strip_suffix('.').unwrap_or(name).to_ascii_lowercase();
    name == "localhost" || name.ends_with(".localhost")
}

/// Listens on `ip`, on any free port if `port` is 0. The wildcard `::` takes IPv4 too, whatever the system's default
/// for it is, and becomes `0.0.0.0` on a host without IPv6.
///
/// # Errors
///
/// `Io`, as when the port is in use.
pub(crate) fn listen(ip: IpAddr, port: u16) -> Result<TcpListener> {
    open(ip, port).map_err(|e| Error::io(format!("listening on {}", SocketAddr::new(ip, port)), &e))
}

fn open(ip: IpAddr, port: u16) -> io::Result<TcpListener> {
    let open = |ip: IpAddr| -> io::Result<TcpListener> {
        let addr = SocketAddr::new(ip, port);
        let s = Socket::new(Domain::for_address(addr), Type::STREAM, Some(Protocol::TCP))?;
        if ip.is_ipv6() && ip.is_unspecified() {
            s.set_only_v6(false)?;
        }
        // The port of a run that has just ended is free for the next.
        s.set_reuse_address(true)?;
        s.bind(&addr.into())?;
        s.listen(BACKLOG)?;
        Ok(s.into())
    };
    match open(ip) {
        Err(e) if ip == IpAddr::V6(Ipv6Addr::UNSPECIFIED) && e.kind() != io::ErrorKind::AddrInUse => {
            open(IpAddr::V4(Ipv4Addr::UNSPECIFIED))
        }
        opened => opened,
    }
}

/// Opens the port of the store at `addr` (`host:port`, as the ranks are told it), for the rank that hosts it; or says
/// what the system has against it, as when the port is in use.
///
/// # Errors
///
/// `InvalidArgument` for what is no such address.
pub(crate) fn listen_for_store(addr: &str) -> Result<io::Result<TcpListener>> {
    let split = addr.rsplit_once(':').and_then(|(host, port)| Some((host, port.parse().ok()?)));
    match split {
        Some((host, port)) if !host.is_empty() => Ok(open(bind_address_for_store(host), port)),
        _ => Err(Error::invalid(format!("the store's address must be host:port, not '{addr}'"))),
    }
}

/// The address that this host uses toward `to`, and the number of its interface if it is a link-local one, else 0.
/// Sends nothing.
pub(crate) fn source_toward(to: SocketAddr) -> Option<(IpAddr, u32)> {
    let any: IpAddr = if to.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    let s = UdpSocket::bind((any, 0)).ok()?;
    s.connect(to).ok()?;
    let own = s.local_addr().ok()?;
    let scope = if let SocketAddr::V6(own) = own { own.scope_id() } else { 0 };
    let ip = own.ip().to_canonical();
    (!ip.is_unspecified()).then_some((ip, scope))
}

#[cfg(test)]
mod tests {
    use super::*;
    use comm_core::ErrorKind;
    use std::net::TcpStream;

    #[test]
    fn only_loopback_is_bound_to_loopback() {
        for (host, want) in [
            ("127.0.0.1", "127.0.0.1"),
            ("127.0.1.1", "127.0.1.1"),
            ("::1", "::1"),
            ("[::1]", "::1"),
            ("::ffff:127.0.0.1", "127.0.0.1"),
            ("10.0.0.1", "::"),
            ("0.0.0.0", "::"),
            ("fd00::1", "::"),
            ("fe80::1%eth0", "::"),
            ("node7", "::"),
            ("localhost.example.org", "::"),
        ] {
            assert_eq!(bind_address_for_store(host), want.parse::<IpAddr>().unwrap(), "{host}");
        }
        for host in ["localhost", "LocalHost", "localhost."] {
            assert!(bind_address_for_store(host).is_loopback(), "{host}");
        }
    }

    #[test]
    fn the_wildcard_takes_both_families() {
        let l = listen(Ipv6Addr::UNSPECIFIED.into(), 0).unwrap();
        let port = l.local_addr().unwrap().port();
        TcpStream::connect((Ipv4Addr::LOCALHOST, port)).unwrap();
        if l.local_addr().unwrap().is_ipv6() && UdpSocket::bind((Ipv6Addr::LOCALHOST, 0)).is_ok() {
            TcpStream::connect((Ipv6Addr::LOCALHOST, port)).unwrap();
        }
        // The same port again is an error, not a second store beside the first.
        for ip in [IpAddr::V6(Ipv6Addr::UNSPECIFIED), Ipv4Addr::UNSPECIFIED.into(), Ipv4Addr::LOCALHOST.into()] {
            let e = listen(ip, port).unwrap_err();
            assert!(matches!(e.kind(), ErrorKind::Io { .. }) && e.to_string().contains(&port.to_string()), "{ip}: {e}");
        }
    }

    #[test]
    fn the_store_of_an_address() {
        for (addr, want) in [("127.0.0.1:0", "127.0.0.1"), ("localhost:0", "127.0.0.1"), ("10.77.0.1:0", "::")] {
            let l = listen_for_store(addr).unwrap().unwrap();
            let ip = l.local_addr().unwrap().ip();
            assert!(ip == want.parse::<IpAddr>().unwrap() || ip.is_unspecified() && want == "::", "{addr}: {ip}");
        }
        for addr in ["", "host", ":5", "host:", "host:99999"] {
            let e = listen_for_store(addr).unwrap_err();
            assert!(matches!(e.kind(), ErrorKind::InvalidArgument { .. }), "{addr}: {e}");
        }
    }

    #[test]
    fn literals_resolve_to_themselves() {
        for host in ["127.0.0.1", "::1", "[::1]", "fe80::1%1", "[fe80::1%1]", "fd00::1"] {
            let found = resolve(host, 29500, Duration::from_secs(5)).unwrap();
            assert_eq!(found.len(), 1, "{host}: {found:?}");
            let bare = host.trim_matches(['[', ']']);
            assert_eq!(found[0], bare_addr(bare), "{host}");
        }
        assert!(resolve("localhost", 1, Duration::from_secs(5)).unwrap().iter().all(|a| a.ip().is_loopback()));
        let e = resolve("no-such-host.invalid", 1, Duration::from_secs(20)).unwrap_err();
        assert!(e.to_string().contains("no-such-host.invalid"), "{e}");
    }

    fn bare_addr(text: &str) -> SocketAddr {
        if text.contains(':') { format!("[{text}]:29500") } else { format!("{text}:29500") }.parse().unwrap()
    }

    #[test]
    fn the_source_toward_loopback_is_loopback() {
        assert_eq!(source_toward(SocketAddr::from((Ipv4Addr::LOCALHOST, 9))), Some((Ipv4Addr::LOCALHOST.into(), 0)));
    }
}
