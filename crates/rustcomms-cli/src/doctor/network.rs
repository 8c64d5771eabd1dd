//! What the network of this host lets ranks do: loopback in both families, and the host's own name.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, TcpListener, TcpStream, ToSocketAddrs};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use super::{Findings, Verdict};

/// A name server that answers later is no help when ranks meet.
const RESOLVE: Duration = Duration::from_secs(5);
/// Loopback connects at once or not at all.
const CONNECT: Duration = Duration::from_secs(5);

pub(super) fn look(found: &mut Findings) {
    found.put(match connects(Ipv4Addr::LOCALHOST.into()) {
        Ok(()) => Verdict::Ok("loopback of IPv4: 127.0.0.1 can be bound and connected".into()),
        Err(e) => Verdict::Problem(format!(
            "loopback of IPv4: 127.0.0.1 does not work ({e}); is the interface lo up (`ip link set lo up`)?"
        )),
    });
    found.put(match connects(Ipv6Addr::LOCALHOST.into()) {
        Ok(()) => Verdict::Ok("loopback of IPv6: ::1 can be bound and connected".into()),
        Err(e) => Verdict::Note(format!(
            "loopback of IPv6: ::1 does not work ({e}); IPv4 is enough unless addresses are IPv6"
        )),
    });
    let name = rustix::system::uname().nodename().to_string_lossy().into_owned();
    found.put(host_name(&name, resolve(&name)));
}

fn connects(ip: IpAddr) -> io::Result<()> {
    let listener = TcpListener::bind((ip, 0))?;
    // The kernel completes it without accept.
    TcpStream::connect_timeout(&listener.local_addr()?, CONNECT).map(drop)
}

/// The addresses of `name`; an error text if there are none in time.
fn resolve(name: &str) -> Result<Vec<IpAddr>, String> {
    let (tx, rx) = channel();
    let asked = name.to_owned();
    let ask = move || {
        let found = (asked.as_str(), 0).to_socket_addrs();
        // Too late, nobody listens.
        let _ = tx.send(found.map(|all| all.map(|a| a.ip()).collect::<Vec<_>>()).map_err(|e| e.to_string()));
    };
    if let Err(e) = std::thread::Builder::new().name("resolve".into()).spawn(ask) {
        return Err(format!("cannot start a thread: {e}"));
    }
    rx.recv_timeout(RESOLVE).unwrap_or_else(|e| match e {
        RecvTimeoutError::Timeout => Err(format!("no answer within {RESOLVE:?}")),
        RecvTimeoutError::Disconnected => Err("the resolver failed".into()),
    })
}

/// Ranks tell each other the addresses of their interfaces, so a name matters only to those who write it as an address.
fn host_name(name: &str, found: Result<Vec<IpAddr>, String>) -> Verdict {
    const ONLY: &str = "ranks do not use it, only MASTER_ADDR, RUSTCOMMS_STORE or --master-addr where they name it";
    match found {
        Err(e) => Verdict::Note(format!("host name: {name} has no address here ({e}); {ONLY}")),
        Ok(mut all) => {
            all.sort();
            all.dedup();
            let shown = all.iter().map(IpAddr::to_string).collect::<Vec<_>>().join(", ");
            if all.is_empty() {
                Verdict::Note(format!("host name: {name} has no address here; {ONLY}"))
            } else if all.iter().all(IpAddr::is_loopback) {
                Verdict::Note(format!(
                    "host name: {name} is {shown} here, which other hosts cannot reach; harmless, {ONLY}"
                ))
            } else {
                Verdict::Ok(format!("host name: {name} is {shown}"))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_mean_loopback_are_no_problem() {
        let of = |all: &[&str]| host_name("n1", Ok(all.iter().map(|a| a.parse().unwrap()).collect()));
        assert!(
            matches!(of(&["127.0.1.1"]), Verdict::Note(t) if t.contains("n1 is 127.0.1.1 here") && t.contains("harmless"))
        );
        assert!(matches!(of(&["::1", "127.0.0.1", "::1"]), Verdict::Note(t) if t.contains("127.0.0.1, ::1 here")));
        assert!(matches!(of(&["127.0.1.1", "10.0.0.7"]), Verdict::Ok(t) if t.ends_with("n1 is 10.0.0.7, 127.0.1.1")));
        assert!(matches!(of(&[]), Verdict::Note(_)));
        assert!(matches!(host_name("n1", Err("why".into())), Verdict::Note(t) if t.contains("(why)")));
    }

    #[test]
    fn resolving_ends() {
        assert_eq!(resolve("127.0.0.1").unwrap(), [IpAddr::from([127, 0, 0, 1])]);
        assert!(resolve("no such name, by its blanks").is_err());
    }
}
