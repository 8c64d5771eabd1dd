//! The first bytes on a data connection, and the mesh of connections.
//!
//! The connector sends a fixed-size greeting; the acceptor checks it and answers with one as fixed.
//! Nothing is parsed beyond those bytes, nothing is allocated for a stranger but a small buffer, and a
//! stranger that says nothing is dropped after a while; the listener goes on.

use std::io::{ErrorKind as IoKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use comm_core::{Error, ErrorKind, Result};
use comm_transport::PROTOCOL;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

const MAGIC: [u8; 8] = *b"RCOMMS\r\n";
const GREETING: usize = 40;
/// Time that a stranger gets to say who he is.
const PATIENCE: Duration = Duration::from_secs(5);
/// Connections that may be in their greeting beyond those that are expected.
const STRANGERS: usize = 64;

/// Who connects to whom in which communicator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Greeting {
    /// Hash of the rendezvous key.
    pub(crate) key: u64,
    /// A random number that only those who read rank 0's entry in the store know.
    pub(crate) nonce: u64,
    pub(crate) from: u32,
    pub(crate) to: u32,
}

impl Greeting {
    fn encode(&self) -> [u8; GREETING] {
        let mut b = [0; GREETING];
        b[..8].copy_from_slice(&MAGIC);
        b[8..12].copy_from_slice(&u32::from(PROTOCOL).to_le_bytes());
        b[12..20].copy_from_slice(&self.key.to_le_bytes());
        b[20..28].copy_from_slice(&self.nonce.to_le_bytes());
        b[28..32].copy_from_slice(&self.from.to_le_bytes());
        b[32..36].copy_from_slice(&self.to.to_le_bytes());
        b
    }

    fn decode(b: &[u8; GREETING]) -> std::result::Result<Self, String> {
        let word = |i: usize| u32::from_le_bytes(std::array::from_fn(|k| b[i + k]));
        let long = |i: usize| u64::from_le_bytes(std::array::from_fn(|k| b[i + k]));
        if b[..8] != MAGIC {
            return Err("it is not a rustcomms greeting".into());
        }
        if word(8) != u32::from(PROTOCOL) {
            return Err(format!("it speaks protocol {}, this process {PROTOCOL}", word(8)));
        }
        Ok(Self { key: long(12), nonce: long(20), from: word(28), to: word(32) })
    }
}

/// A connection whose greeting is being read.
struct Guest {
    stream: TcpStream,
    from: SocketAddr,
    buf: [u8; GREETING],
    got: usize,
    until: Instant,
}

impl Guest {
    /// Reads on. `Ok(None)`: not complete yet.
    fn read(&mut self) -> std::result::Result<Option<Greeting>, String> {
        while self.got < GREETING {
            match self.stream.read(&mut self.buf[self.got..]) {
                Ok(0) => return Err("it closed before it had said who it is".into()),
                Ok(n) => self.got += n,
                Err(e) if e.kind() == IoKind::WouldBlock => return Ok(None),
                Err(e) if e.kind() == IoKind::Interrupted => {}
                Err(e) => return Err(e.to_string()),
            }
        }
        Greeting::decode(&self.buf).map(Some)
    }
}

/// Connects to every lower rank and accepts every higher one. `addr(r)` lists where rank `r` may be reached.
pub(crate) fn mesh(
    listener: &TcpListener,
    me: Greeting,
    size: usize,
    addr: &dyn Fn(usize) -> Vec<SocketAddr>,
    until: Instant,
) -> Result<Vec<Option<TcpStream>>> {
    let rank = me.from as usize;
    let mut links: Vec<Option<TcpStream>> = (0..size).map(|_| None).collect();
    for (peer, link) in links.iter_mut().enumerate().take(rank) {
        let mut s = dial(peer, &addr(peer), until)?;
        let hello = Greeting { to: peer as u32, ..me };
        s.write_all(&hello.encode()).map_err(|e| Error::io(format!("greeting rank {peer}"), &e))?;
        *link = Some(s);
    }
    accept(listener, me, &mut links, until)?;
    for (peer, s) in links.iter_mut().enumerate().take(rank) {
        if let Some(s) = s {
            await_answer(s, me, peer, until)?;
        }
    }
    Ok(links)
}

fn left(until: Instant) -> Duration {
    until.saturating_duration_since(Instant::now())
}

fn failed(what: String, missing: Vec<usize>) -> Error {
    Error::new(ErrorKind::Bootstrap { what, arrived: Vec::new(), missing })
}

fn dial(peer: usize, addrs: &[SocketAddr], until: Instant) -> Result<TcpStream> {
    let mut last = String::from("it published no address");
    while !left(until).is_zero() {
        for a in addrs {
            // An unreachable address must not eat the time of the next one.
            let timeout = left(until).min(Duration::from_secs(5)).max(Duration::from_millis(1));
            match TcpStream::connect_timeout(a, timeout) {
                Ok(s) => return Ok(s),
                Err(e) => last = format!("{a}: {e}"),
            }
        }
        if addrs.is_empty() {
            break;
        }
        std::thread::sleep(Duration::from_millis(20).min(left(until)));
    }
    Err(failed(format!("rank {peer} cannot be reached ({last}); check firewalls and interfaces"), vec![peer]))
}

fn accept(listener: &TcpListener, me: Greeting, links: &mut [Option<TcpStream>], until: Instant) -> Result<()> {
    let rank = me.from as usize;
    listener.set_nonblocking(true).map_err(|e| Error::io("preparing the data port", &e))?;
    let mut guests: Vec<Guest> = Vec::new();
    let missing = |links: &[Option<TcpStream>]| -> Vec<usize> {
        (rank + 1..links.len()).filter(|r| links[*r].is_none()).collect()
    };
    loop {
        let expected = missing(links);
        if expected.is_empty() {
            return Ok(());
        }
        if left(until).is_zero() {
            return Err(failed("not all ranks connected to this one in time".into(), expected));
        }
        wait_readable(listener, &guests, left(until).min(Duration::from_millis(500)))?;
        loop {
            match listener.accept() {
                Ok((stream, from)) => {
                    // The oldest strangers make room.
                    if guests.len() >= expected.len() + STRANGERS {
                        guests.remove(0);
                    }
                    if stream.set_nonblocking(true).is_ok() {
                        guests.push(Guest {
                            stream,
                            from,
                            buf: [0; GREETING],
                            got: 0,
                            until: Instant::now() + PATIENCE,
                        });
                    }
                }
                Err(e) if e.kind() == IoKind::WouldBlock => break,
                Err(e) if matches!(e.kind(), IoKind::Interrupted | IoKind::ConnectionAborted) => {}
                Err(e) => return Err(Error::io("accepting connections on the data port", &e)),
            }
        }
        let mut i = 0;
        while i < guests.len() {
            match guests[i].read() {
                Ok(None) if Instant::now() < guests[i].until => i += 1,
                Ok(None) => drop_stranger(&guests.swap_remove(i), "it said nothing"),
                Err(why) => drop_stranger(&guests.swap_remove(i), &why),
                Ok(Some(g)) => {
                    let guest = guests.swap_remove(i);
                    if let Err(why) = admit(&guest, g, me, links) {
                        drop_stranger(&guest, &why);
                    } else {
                        links[g.from as usize] = Some(guest.stream);
                    }
                }
            }
        }
    }
}

fn drop_stranger(g: &Guest, why: &str) {
    tracing::warn!(from = %g.from, why, "connection to the data port dropped");
}

/// Checks a greeting and answers it.
fn admit(guest: &Guest, g: Greeting, me: Greeting, links: &[Option<TcpStream>]) -> std::result::Result<(), String> {
    if (g.key, g.nonce) != (me.key, me.nonce) {
        return Err("it belongs to another communicator".into());
    }
    let from = g.from as usize;
    if g.to != me.from || from <= me.from as usize || from >= links.len() {
        return Err(format!("it says it is rank {from} and looks for rank {}", g.to));
    }
    if links[from].is_some() {
        return Err(format!("rank {from} is connected already"));
    }
    let answer = Greeting { to: g.from, ..me };
    guest.stream.set_nonblocking(false).map_err(|e| e.to_string())?;
    (&guest.stream).write_all(&answer.encode()).map_err(|e| e.to_string())
}

fn wait_readable(listener: &TcpListener, guests: &[Guest], timeout: Duration) -> Result<()> {
    let mut fds = vec![PollFd::new(listener, PollFlags::IN)];
    fds.extend(guests.iter().map(|g| PollFd::new(&g.stream, PollFlags::IN)));
    let spec = Timespec { tv_sec: timeout.as_secs() as i64, tv_nsec: timeout.subsec_nanos().into() };
    match poll(&mut fds, Some(&spec)) {
        Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
        Err(e) => Err(Error::io("waiting on the data port", &e.into())),
    }
}

/// Reads the acceptor's answer: both ends now know that they mean the same communicator.
fn await_answer(s: &mut TcpStream, me: Greeting, peer: usize, until: Instant) -> Result<()> {
    let timeout = left(until).max(Duration::from_millis(1));
    s.set_read_timeout(Some(timeout)).map_err(|e| Error::io("preparing a connection", &e))?;
    let mut b = [0; GREETING];
    s.read_exact(&mut b).map_err(|e| failed(format!("rank {peer} did not answer the greeting ({e})"), vec![peer]))?;
    s.set_read_timeout(None).map_err(|e| Error::io("preparing a connection", &e))?;
    let g = Greeting::decode(&b)
        .map_err(|why| failed(format!("what answers in place of rank {peer}: {why}"), vec![peer]))?;
    if (g.key, g.nonce, g.from, g.to) != (me.key, me.nonce, peer as u32, me.from) {
        return Err(failed(format!("another process answers in place of rank {peer}"), vec![peer]));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: Greeting = Greeting { key: 7, nonce: 9, from: 0, to: 0 };

    #[test]
    fn greetings_round_trip_and_garbage_is_named() {
        let g = Greeting { from: 3, to: 1, ..KEY };
        assert_eq!(Greeting::decode(&g.encode()), Ok(g));
        assert!(Greeting::decode(&[0; GREETING]).unwrap_err().contains("not a rustcomms"));
        let mut b = g.encode();
        b[8] = 77;
        assert!(Greeting::decode(&b).unwrap_err().contains("protocol 77"));
    }

    /// Strangers of all kinds come to rank 0's data port; ranks 1 and 2 get in all the same.
    #[test]
    fn strangers_are_dropped_and_ranks_admitted() {
        let listeners: Vec<TcpListener> = (0..3).map(|_| TcpListener::bind("127.0.0.1:0").unwrap()).collect();
        let addrs: Vec<SocketAddr> = listeners.iter().map(|l| l.local_addr().unwrap()).collect();
        let mut strangers = Vec::new();
        // More than may wait in their greeting, fewer than the kernel queues for a listener (128) before it accepts.
        for i in 0..100usize {
            let mut s = TcpStream::connect(addrs[0]).unwrap();
            match i % 5 {
                0 => s.write_all(&[0xff; 4096]).unwrap(),
                1 => s.write_all(&MAGIC[..5]).unwrap(),
                2 => s.write_all(&Greeting { nonce: 1, from: 1, ..KEY }.encode()).unwrap(),
                3 => s.write_all(&Greeting { from: 900, ..KEY }.encode()).unwrap(),
                _ => {}
            }
            if i % 2 == 0 {
                strangers.push(s);
            }
        }
        let until = Instant::now() + Duration::from_secs(20);
        let done: Vec<_> = listeners
            .into_iter()
            .enumerate()
            .map(|(r, l)| {
                let addrs = addrs.clone();
                std::thread::spawn(move || {
                    mesh(&l, Greeting { from: r as u32, ..KEY }, 3, &|p| vec![addrs[p]], until)
                        .map(|m| m.iter().flatten().count())
                })
            })
            .collect();
        for d in done {
            assert_eq!(d.join().unwrap().unwrap(), 2);
        }
        drop(strangers);
    }

    #[test]
    fn a_rank_that_never_connects_is_named() {
        let l = TcpListener::bind("127.0.0.1:0").unwrap();
        let until = Instant::now() + Duration::from_millis(200);
        let e = mesh(&l, KEY, 3, &|_| Vec::new(), until).unwrap_err();
        assert!(matches!(e.kind(), ErrorKind::Bootstrap { missing, .. } if missing == &[1, 2]), "{e}");
    }
}
