//! Names, listeners and connections on addresses of which some may be dead.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::time::{Duration, Instant};

use comm_core::{Error, Result};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use socket2::{Domain, Protocol, SockAddr, Socket, Type};

use super::filter::LOOPBACKS;

/// How long an attempt is alone before the next address is tried beside it, as RFC 8305 recommends.
const HEAD_START: Duration = Duration::from_millis(250);
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
    let opened = match open(ip) {
        Err(e) if ip == IpAddr::V6(Ipv6Addr::UNSPECIFIED) && e.kind() != io::ErrorKind::AddrInUse => {
            open(IpAddr::V4(Ipv4Addr::UNSPECIFIED))
        }
        opened => opened,
    };
    opened.map_err(|e| Error::io(format!("listening on {}", SocketAddr::new(ip, port)), &e))
}

/// Opens the port of the store at `addr` (`host:port`, as the ranks are told it), for the rank that hosts it.
///
/// # Errors
///
/// `InvalidArgument` for what is no such address, `Io` as when the port is in use.
pub(crate) fn listen_for_store(addr: &str) -> Result<TcpListener> {
    let split = addr.rsplit_once(':').and_then(|(host, port)| Some((host, port.parse().ok()?)));
    match split {
        Some((host, port)) if !host.is_empty() => listen(bind_address_for_store(host), port),
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

/// One round over the addresses of a peer: each gets a short head start before the next is tried beside it, so a dead
/// one costs little. Connections come out as they are made; who finds that it has reached somebody else asks for the
/// next one. Attempts that are left over end when this is dropped.
#[derive(Debug)]
pub(crate) struct Dial {
    /// Not yet tried, the best one last.
    waiting: Vec<SocketAddr>,
    trying: Vec<(SocketAddr, Socket)>,
    /// When the next one may start.
    next_start: Instant,
    failed: Vec<(SocketAddr, String)>,
}

impl Dial {
    /// A round over `addrs`, best first.
    pub(crate) fn new(addrs: &[SocketAddr]) -> Self {
        let waiting = addrs.iter().rev().copied().collect();
        Self { waiting, trying: Vec::new(), next_start: Instant::now(), failed: Vec::new() }
    }

    /// The next connection: blocking, without delay of small segments. `None` when no address is left, or `until` has
    /// come; [`failures`](Self::failures) says why.
    ///
    /// # Errors
    ///
    /// `Io` when the system has no sockets left or cannot wait.
    pub(crate) fn next(&mut self, until: Instant) -> Result<Option<(SocketAddr, TcpStream)>> {
        loop {
            if self.trying.is_empty() && self.waiting.is_empty() {
                return Ok(None);
            }
            let now = Instant::now();
            if now >= until {
                for (a, _) in self.trying.drain(..) {
                    self.failed.push((a, "no answer in time".into()));
                }
                return Ok(None);
            }
            if (self.trying.is_empty() || now >= self.next_start)
                && let Some(a) = self.waiting.pop()
            {
                self.next_start = now + HEAD_START;
                match start(a) {
                    Ok(s) => self.trying.push((a, s)),
                    Err(e) if matches!(e.raw_os_error(), Some(code) if is_exhausted(code)) => {
                        return Err(Error::io("opening a connection", &e));
                    }
                    Err(e) => self.failed.push((a, e.to_string())),
                }
                continue;
            }
            let wake = if self.waiting.is_empty() { until } else { until.min(self.next_start) };
            if let Some(done) = self.wait(wake.saturating_duration_since(now))? {
                return Ok(Some(done));
            }
        }
    }

    /// Waits until an attempt succeeds; failed ones make way for the next at once.
    fn wait(&mut self, timeout: Duration) -> Result<Option<(SocketAddr, TcpStream)>> {
        let mut fds: Vec<PollFd<'_>> = self.trying.iter().map(|(_, s)| PollFd::new(s, PollFlags::OUT)).collect();
        // Rounded up, so that the last fraction of a millisecond does not become a busy loop.
        let timeout = timeout + Duration::from_millis(1);
        let spec =
            Timespec { tv_sec: timeout.as_secs().min(86_400).cast_signed(), tv_nsec: timeout.subsec_nanos().into() };
        match poll(&mut fds, Some(&spec)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(e) => return Err(Error::io("waiting for connections", &e.into())),
        }
        let ready: Vec<bool> = fds.iter().map(|f| !f.revents().is_empty()).collect();
        for at in (0..ready.len()).filter(|at| ready[*at]) {
            let outcome = match self.trying[at].1.take_error() {
                Ok(None) => finish(&self.trying[at].1),
                Ok(Some(e)) | Err(e) => Err(e),
            };
            match outcome {
                Ok(()) => {
                    let (a, s) = self.trying.remove(at);
                    return Ok(Some((a, s.into())));
                }
                Err(e) => {
                    self.failed.push((self.trying[at].0, e.to_string()));
                    self.next_start = Instant::now();
                }
            }
        }
        // The order of those that are left is theirs in which they started.
        let failed = &self.failed;
        self.trying.retain(|(a, _)| !failed.iter().any(|(f, _)| f == a));
        Ok(None)
    }

    /// What failed and why: `10.0.0.1:4000: Connection refused (os error 111); …`, a few of many.
    pub(crate) fn failures(&self) -> String {
        const SHOWN: usize = 6;
        let mut text: Vec<String> = self.failed.iter().take(SHOWN).map(|(a, why)| format!("{a}: {why}")).collect();
        if self.failed.len() > SHOWN {
            text.push(format!("and {} more", self.failed.len() - SHOWN));
        }
        if text.is_empty() {
            text.push("no address to try".into());
        }
        text.join("; ")
    }
}

/// EMFILE, ENFILE, ENOBUFS and ENOMEM: no other address would do better.
fn is_exhausted(code: i32) -> bool {
    use rustix::io::Errno;
    [Errno::MFILE, Errno::NFILE, Errno::NOBUFS, Errno::NOMEM].iter().any(|e| e.raw_os_error() == code)
}

fn start(a: SocketAddr) -> io::Result<Socket> {
    let s = Socket::new(Domain::for_address(a), Type::STREAM, Some(Protocol::TCP))?;
    s.set_nonblocking(true)?;
    match s.connect(&SockAddr::from(a)) {
        Ok(()) => Ok(s),
        Err(e) if e.raw_os_error() == Some(rustix::io::Errno::INPROGRESS.raw_os_error()) => Ok(s),
        Err(e) => Err(e),
    }
}

fn finish(s: &Socket) -> io::Result<()> {
    let (own, peer) = (s.local_addr()?.as_socket(), s.peer_addr()?.as_socket());
    // While nobody listens on a local port, connecting to it can meet itself.
    if own == peer {
        return Err(io::ErrorKind::ConnectionRefused.into());
    }
    s.set_nonblocking(false)?;
    s.set_tcp_nodelay(true)
}

#[cfg(test)]
mod tests {
    use super::*;
    use comm_core::ErrorKind;
    use std::io::{Read, Write};

    /// A port on which nobody listens and nobody will: it is bound.
    fn dead() -> (Socket, SocketAddr) {
        let s = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
        s.bind(&SocketAddr::from((Ipv4Addr::LOCALHOST, 0)).into()).unwrap();
        let a = s.local_addr().unwrap().as_socket().unwrap();
        (s, a)
    }

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(20)
    }

    #[test]
    fn the_best_that_lives_comes_first_then_the_others() {
        let live: Vec<TcpListener> = (0..2).map(|_| TcpListener::bind("127.0.0.1:0").unwrap()).collect();
        let [a, b] = [0, 1].map(|i: usize| live[i].local_addr().unwrap());
        let (_held, d) = dead();
        let mut round = Dial::new(&[d, a, b]);
        let (at, mut s) = round.next(soon()).unwrap().unwrap();
        assert_eq!(at, a);
        // It blocks, as what std returns does.
        let mut peer = live[0].accept().unwrap().0;
        let echo = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(50));
            peer.write_all(b"x").unwrap();
        });
        s.read_exact(&mut [0; 1]).unwrap();
        echo.join().unwrap();
        // The first turned out to be somebody else.
        assert_eq!(round.next(soon()).unwrap().unwrap().0, b);
        assert!(round.next(soon()).unwrap().is_none());
        assert!(round.failures().contains(&format!("{d}: Connection refused")), "{}", round.failures());
    }

    /// A listener whose queue is full swallows what comes, like a host that is not there.
    #[test]
    fn a_silent_address_does_not_hold_up_the_next() {
        let s = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
        s.bind(&SocketAddr::from((Ipv4Addr::LOCALHOST, 0)).into()).unwrap();
        s.listen(0).unwrap();
        let silent = s.local_addr().unwrap().as_socket().unwrap();
        let _fill: Vec<_> = (0..3).filter_map(|_| start(silent).ok()).collect();
        let live = TcpListener::bind("127.0.0.1:0").unwrap();
        let a = live.local_addr().unwrap();
        let until = Instant::now() + Duration::from_secs(60);
        assert_eq!(Dial::new(&[silent, a]).next(until).unwrap().unwrap().0, a);
        // The silent one would have taken all of its time.
        assert!(Instant::now() < until);
        let mut alone = Dial::new(&[silent]);
        assert!(alone.next(Instant::now() + Duration::from_millis(100)).unwrap().is_none());
        assert!(alone.failures().contains("no answer in time"), "{}", alone.failures());
    }

    #[test]
    fn no_address_is_said() {
        let mut none = Dial::new(&[]);
        assert!(none.next(soon()).unwrap().is_none());
        assert_eq!(none.failures(), "no address to try");
    }

    #[test]
    fn failures_of_very_many_addresses_are_a_short_text() {
        let (_held, d) = dead();
        let many: Vec<SocketAddr> =
            (1..=100).map(|i| SocketAddr::new(Ipv4Addr::new(127, 0, 1, i).into(), d.port())).collect();
        let mut round = Dial::new(&many);
        assert!(round.next(soon()).unwrap().is_none());
        assert!(round.failures().ends_with("and 94 more"), "{}", round.failures());
    }

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
            let l = listen_for_store(addr).unwrap();
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
