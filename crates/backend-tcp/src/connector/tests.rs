//! Two or more ends in one process, without endpoints: which connections come about.

use std::io::{Read, Write};
use std::net::TcpListener;

use super::*;
use crate::wire::{GREETING, Greeting};
use comm_core::Secret;
use socket2::{Domain, Socket, Type};

const LIMIT: Duration = Duration::from_secs(30);
const HEARTBEAT: Duration = Duration::from_millis(300);

fn me(rank: usize) -> Greeting {
    Greeting { key: 7, nonce: 9, from: rank as u32, ..Greeting::default() }
}

fn end(rank: usize, size: usize, secret: Option<&str>, limit: Duration) -> (Gathering, SocketAddr) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let addr = listener.local_addr().unwrap();
    let secret = secret.map(|s| Secret::new(s).unwrap());
    let until = Instant::now() + limit;
    let setup = Setup { me: me(rank), size, secret, listener, heartbeat: HEARTBEAT, until, members: None };
    (Gathering::open(setup).unwrap(), addr)
}

fn at(addrs: &[SocketAddr], same_host: bool) -> Peer {
    Peer { addrs: addrs.to_vec(), same_host, process: None }
}

/// An address where nobody listens, and nobody will as long as the socket lives: it is bound.
fn nobody() -> (Socket, SocketAddr) {
    let s = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
    s.bind(&SocketAddr::from(([127, 0, 0, 1], 0)).into()).unwrap();
    let a = s.local_addr().unwrap().as_socket().unwrap();
    (s, a)
}

/// An address that swallows what comes: a listener whose queue is full.
fn hole() -> (Vec<Socket>, SocketAddr) {
    let (s, a) = nobody();
    s.listen(0).unwrap();
    let mut all = vec![s];
    for _ in 0..3 {
        let s = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
        s.set_nonblocking(true).unwrap();
        let _ = s.connect(&a.into());
        all.push(s);
    }
    (all, a)
}

/// Takes the one connection that each of two ends has, and checks that it is the same one.
fn joined(a: &Gathering, pa: usize, b: &Gathering, pb: usize) {
    let until = Instant::now() + LIMIT;
    assert!(a.wait(&[pb], until).unwrap() && b.wait(&[pa], until).unwrap());
    // A second one, if it existed, would come right away.
    let (mut x, mut y) = (a.take(), b.take());
    let (x, y) = (x.remove(&pb).unwrap(), y.remove(&pa).unwrap());
    assert_eq!(x.local_addr().unwrap(), y.peer_addr().unwrap());
    assert_eq!(y.local_addr().unwrap(), x.peer_addr().unwrap());
    (&x).write_all(b"x").unwrap();
    let mut byte = [0];
    y.set_nonblocking(false).unwrap();
    (&y).read_exact(&mut byte).unwrap();
    assert_eq!(&byte, b"x");
}

/// Both dial at the same time, in all ways: there is one connection afterwards, never none.
#[test]
fn crossing_dials_leave_one_connection() {
    for round in 0..120 {
        let secret = (round % 3 == 0).then_some("s");
        let ((a, at_a), (b, at_b)) = (end(0, 2, secret, LIMIT), end(1, 2, secret, LIMIT));
        a.learn(vec![(1, at(&[at_b], round % 2 == 0))]);
        b.learn(vec![(0, at(&[at_a], round % 2 == 0))]);
        if round % 4 < 2 {
            a.want([1]);
            b.want([0]);
        } else {
            b.want([0, 0]);
            a.want([1, 1]);
        }
        joined(&a, 0, &b, 1);
    }
}

/// Only one of two can reach the other, and both try.
#[test]
fn one_direction_is_enough() {
    for (round, lower) in [(0, true), (1, false), (2, true), (3, false)] {
        let secret = (round > 1).then_some("s");
        let ((a, at_a), (b, at_b)) = (end(0, 2, secret, LIMIT), end(1, 2, secret, LIMIT));
        let (_held, dead) = nobody();
        let (to_b, to_a) = if lower { (at_b, dead) } else { (dead, at_a) };
        a.learn(vec![(1, at(&[to_b], false))]);
        b.learn(vec![(0, at(&[to_a], false))]);
        a.want([1]);
        b.want([0]);
        joined(&a, 0, &b, 1);
    }
}

/// Addresses that do not answer, refuse or belong to others come before the right one.
#[test]
fn wrong_addresses_do_not_matter() {
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let (_other, at_other) = end(5, 9, None, LIMIT);
    let ((a, _), (b, at_b)) = (end(0, 2, None, LIMIT), end(1, 2, None, LIMIT));
    let ((_held, dead), (_kept, hole)) = (nobody(), hole());
    a.learn(vec![(1, at(&[dead, hole, at_other, silent.local_addr().unwrap(), at_b], false))]);
    a.want([1]);
    joined(&a, 0, &b, 1);
}

/// Every pair of six, wanted by one end, by both, before and after the addresses are known.
#[test]
fn a_full_mesh() {
    let ends: Vec<_> = (0..6).map(|r| end(r, 6, None, LIMIT)).collect();
    for (r, (g, _)) in ends.iter().enumerate() {
        let peers: Vec<_> = (0..6).filter(|p| *p != r).map(|p| (p, at(&[ends[p].1], true))).collect();
        if r % 2 == 0 {
            g.learn(peers);
            g.want(0..6);
        } else {
            g.want(0..r);
            g.learn(peers);
        }
    }
    for (r, (g, _)) in ends.iter().enumerate() {
        let all: Vec<usize> = (0..6).filter(|p| *p != r).collect();
        assert!(g.wait(&all, Instant::now() + LIMIT).unwrap(), "{:?}", g.missing(&all));
    }
    let rows: Vec<_> = ends.iter().map(|(g, _)| g.take()).collect();
    for a in 0..6 {
        assert_eq!(rows[a].len(), 5);
        for b in 0..a {
            assert_eq!(rows[a][&b].local_addr().unwrap(), rows[b][&a].peer_addr().unwrap());
        }
    }
}

#[test]
fn a_closed_listener_on_this_host_ends_the_dial_and_another_does_not() {
    let (a, _) = end(0, 3, None, LIMIT);
    let (_held, dead) = nobody();
    a.learn(vec![(1, at(&[dead], true)), (2, at(&[dead], false))]);
    a.want([1, 2]);
    let start = Instant::now();
    let u = a.wait(&[1, 2], Instant::now() + LIMIT).unwrap_err();
    assert!(start.elapsed() < LIMIT / 2);
    assert!(u.missing.len() == 1 && u.missing[0].0 == 1 && u.missing[0].1.contains("has ended"), "{u:?}");
    // A firewall may open: the other is tried on until the deadline, with a reason to tell.
    assert!(a.missing(&[2]).missing[0].1.contains("refused"), "{:?}", a.missing(&[2]));
    let (b, _) = end(0, 2, None, Duration::from_millis(300));
    b.learn(vec![(1, at(&[dead, dead], false))]);
    b.want([1]);
    let u = b.wait(&[1], Instant::now() + LIMIT).unwrap_err();
    assert_eq!(u.missing[0].1.matches("refused").count(), 2, "{u:?}");
}

#[test]
fn secrets_that_differ_are_named() {
    let ((a, _), (b, at_b)) = (end(0, 2, Some("x"), LIMIT), end(1, 2, Some("y"), LIMIT));
    a.learn(vec![(1, at(&[at_b], false))]);
    a.want([1]);
    let u = a.wait(&[1], Instant::now() + LIMIT).unwrap_err();
    assert!(u.missing[0].1.contains("RUSTCOMMS_SECRET"), "{u:?}");
    assert!(b.take().is_empty());
}

/// What the other end says until it closes, within the limit.
fn answer(s: &mut std::net::TcpStream) -> Vec<u8> {
    s.set_read_timeout(Some(LIMIT)).unwrap();
    let mut all = Vec::new();
    let mut b = [0; 256];
    loop {
        match s.read(&mut b) {
            Ok(n) if n > 0 => all.extend_from_slice(&b[..n]),
            Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => panic!("neither answer nor end"),
            _ => return all,
        }
    }
}

/// A recorded handshake, sent again, gets a challenge that it does not answer, and nothing else; greetings, good ones
/// too, get nothing at all when there is a secret.
#[test]
fn with_a_secret_strangers_are_not_listened_to() {
    let (a, at_a) = end(0, 2, Some("s"), LIMIT);
    // Between the two a relay that writes down what rank 1 says.
    let relay = TcpListener::bind("127.0.0.1:0").unwrap();
    let (b, _) = end(1, 2, Some("s"), LIMIT);
    b.learn(vec![(0, at(&[relay.local_addr().unwrap()], true))]);
    b.want([0]);
    let (mut left, _) = relay.accept().unwrap();
    let mut right = TcpStream::connect(at_a).unwrap();
    let mut said = Vec::new();
    let pass = |from: &mut TcpStream, to: &mut TcpStream, n: usize| {
        let mut bytes = vec![0; n];
        from.read_exact(&mut bytes).unwrap();
        to.write_all(&bytes).unwrap();
        bytes
    };
    said.extend(pass(&mut left, &mut right, 40));
    pass(&mut right, &mut left, 64);
    said.extend(pass(&mut left, &mut right, 32 + GREETING));
    pass(&mut right, &mut left, GREETING);
    said.extend(pass(&mut left, &mut right, 1));
    assert!(a.wait(&[1], Instant::now() + LIMIT).unwrap());
    let first = a.take();

    let mut again = TcpStream::connect(at_a).unwrap();
    again.write_all(&said).unwrap();
    assert_eq!(answer(&mut again).len(), 64, "a replay got more than a challenge");
    let greeting = Greeting { to: 0, code: 1, ..me(1) }.encode();
    let mut plain = TcpStream::connect(at_a).unwrap();
    plain.write_all(&greeting).unwrap();
    assert_eq!(answer(&mut plain), b"");
    // A greeting in the place of the proof.
    let mut late = TcpStream::connect(at_a).unwrap();
    late.write_all(&[&said[..40], &greeting, &[0; 100]].concat()).unwrap();
    assert_eq!(answer(&mut late).len(), 64);
    assert!(a.take().is_empty());
    drop(first);
}

/// Strangers of all kinds come, more than may wait; ranks get in all the same.
#[test]
fn strangers_are_dropped_and_ranks_admitted() {
    for secret in [None, Some("s")] {
        let ends: Vec<_> = (0..3).map(|r| end(r, 3, secret, LIMIT)).collect();
        let mut strangers = Vec::new();
        for i in 0..200usize {
            let mut s = TcpStream::connect(ends[0].1).unwrap();
            // Who is dropped meanwhile cannot write.
            let _ = match i % 5 {
                0 => s.write_all(&[0xff; 4096]),
                1 => s.write_all(b"RCOMM"),
                2 => s.write_all(&Greeting { nonce: 1, ..me(1) }.encode()),
                3 => s.write_all(&Greeting { from: 900, ..me(1) }.encode()),
                _ => Ok(()),
            };
            if i % 2 == 0 {
                strangers.push(s);
            }
        }
        for (r, (g, _)) in ends.iter().enumerate().skip(1) {
            g.learn((0..r).map(|p| (p, at(&[ends[p].1], true))).collect());
            g.want(0..r);
        }
        for (r, (g, _)) in ends.iter().enumerate() {
            let all: Vec<usize> = (0..3).filter(|p| *p != r).collect();
            assert!(g.wait(&all, Instant::now() + LIMIT).unwrap(), "{:?}", g.missing(&all));
            assert_eq!(g.take().len(), 2);
        }
    }
}

/// An accepted connection that is not confirmed does not count, and does not stand in the way of the next.
#[test]
fn what_is_not_confirmed_does_not_count() {
    let ((a, at_a), (b, at_b)) = (end(0, 2, None, LIMIT), end(1, 2, None, LIMIT));
    let mut half = TcpStream::connect(at_a).unwrap();
    half.write_all(&Greeting { code: 1, ..me(1) }.encode()).unwrap();
    let mut b40 = [0; GREETING];
    half.read_exact(&mut b40).unwrap();
    assert_eq!(Greeting::decode(&b40).unwrap().code, 1);
    assert!(!a.wait(&[1], Instant::now() + Duration::from_millis(50)).unwrap());
    // An older attempt of the same rank is one that it has given up.
    let mut older = TcpStream::connect(at_a).unwrap();
    older.write_all(&Greeting { code: 0, ..me(1) }.encode()).unwrap();
    assert_eq!(answer(&mut older), b"");
    a.learn(vec![(1, at(&[at_b], true))]);
    a.want([1]);
    joined(&a, 0, &b, 1);
    assert_eq!(answer(&mut half), b"");
    // Who comes now hears that there is a connection already.
    let mut late = TcpStream::connect(at_a).unwrap();
    late.write_all(&Greeting { code: 9, ..me(1) }.encode()).unwrap();
    assert_eq!(Greeting::decode(answer(&mut late).as_slice().try_into().unwrap()).unwrap().code, 3);
}

/// A world that nobody holds any more listens no more.
#[test]
fn a_dropped_gathering_closes_its_port() {
    let (a, at_a) = end(0, 2, None, LIMIT);
    TcpStream::connect(at_a).unwrap();
    drop(a);
    let until = Instant::now() + LIMIT;
    while TcpStream::connect(at_a).is_ok() {
        assert!(Instant::now() < until, "the port is still open");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// A peer played by the test: where it listens, and what it says.
struct Puppet {
    rank: usize,
    listener: TcpListener,
}

impl Puppet {
    fn new(rank: usize) -> (Self, Peer) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let peer = at(&[listener.local_addr().unwrap()], false);
        (Self { rank, listener }, peer)
    }

    /// Takes a dial and reads its greeting.
    fn take(&self, from: usize) -> TcpStream {
        let mut s = self.listener.accept().unwrap().0;
        s.set_read_timeout(Some(LIMIT)).unwrap();
        let g = read_greeting(&mut s);
        assert_eq!((g.from as usize, g.to as usize), (from, self.rank));
        s
    }

    fn accept(&self, s: &mut TcpStream, to: usize) {
        s.write_all(&Greeting { to: to as u32, code: 1, ..me(self.rank) }.encode()).unwrap();
    }

    /// Dials, and reads the answer's code.
    fn dial(&self, to: SocketAddr, rank: usize) -> (TcpStream, u32) {
        let mut s = TcpStream::connect(to).unwrap();
        s.set_read_timeout(Some(LIMIT)).unwrap();
        s.write_all(&Greeting { to: rank as u32, code: 1, ..me(self.rank) }.encode()).unwrap();
        let code = read_greeting(&mut s).code;
        (s, code)
    }
}

fn read_greeting(s: &mut TcpStream) -> Greeting {
    let mut b = [0; GREETING];
    s.read_exact(&mut b).unwrap();
    Greeting::decode(&b).unwrap()
}

/// Who is dialing a higher rank has that rank wait; who is dialing a lower one accepts that one's connection, and then
/// keeps it even if its own is accepted, too.
#[test]
fn of_two_connections_that_cross_that_of_the_lower_rank_stays() {
    let (a, at_a) = end(0, 2, None, LIMIT);
    let (higher, peer) = Puppet::new(1);
    a.learn(vec![(1, peer)]);
    a.want([1]);
    let mut own = higher.take(0);
    let (mut theirs, code) = higher.dial(at_a, 0);
    assert_eq!(code, 2);
    assert_eq!(answer(&mut theirs), b"");
    higher.accept(&mut own, 0);
    assert!(a.wait(&[1], Instant::now() + LIMIT).unwrap());
    assert_eq!(a.take()[&1].peer_addr().unwrap(), own.local_addr().unwrap());

    let (b, at_b) = end(1, 2, None, LIMIT);
    let (lower, peer) = Puppet::new(0);
    b.learn(vec![(0, peer)]);
    b.want([0]);
    let mut own = lower.take(1);
    let (mut theirs, code) = lower.dial(at_b, 1);
    assert_eq!(code, 1);
    lower.accept(&mut own, 1);
    assert_eq!(answer(&mut own), b"", "it has taken its own connection");
    assert!(!b.wait(&[0], Instant::now() + Duration::from_millis(50)).unwrap());
    theirs.write_all(&[crate::wire::CONFIRM]).unwrap();
    assert!(b.wait(&[0], Instant::now() + LIMIT).unwrap());
    assert_eq!(b.take()[&0].peer_addr().unwrap(), theirs.local_addr().unwrap());
}

/// A peer whose connection was accepted does not confirm it, but accepts this rank's, which is the lower one.
#[test]
fn a_reservation_gives_way_to_the_lower_ranks_own_connection() {
    let (a, at_a) = end(0, 2, None, LIMIT);
    let (higher, peer) = Puppet::new(1);
    let (mut theirs, code) = higher.dial(at_a, 0);
    assert_eq!(code, 1);
    a.learn(vec![(1, peer)]);
    a.want([1]);
    let mut own = higher.take(0);
    higher.accept(&mut own, 0);
    let mut confirmed = [0];
    own.read_exact(&mut confirmed).unwrap();
    assert_eq!(confirmed, [crate::wire::CONFIRM]);
    assert_eq!(answer(&mut theirs), b"");
    assert!(a.wait(&[1], Instant::now() + LIMIT).unwrap());
    assert_eq!(a.take()[&1].peer_addr().unwrap(), own.local_addr().unwrap());
}

/// A peer that says `Busy`, `Linked`, nonsense or nothing is dialed again, until it accepts.
#[test]
fn who_is_put_off_tries_again() {
    let (b, _) = end(1, 2, None, LIMIT);
    let (lower, peer) = Puppet::new(0);
    b.learn(vec![(0, peer)]);
    b.want([0]);
    for code in [2, 3, 77] {
        let mut s = lower.take(1);
        s.write_all(&Greeting { to: 1, code, ..me(0) }.encode()).unwrap();
        assert_eq!(answer(&mut s), b"");
    }
    for other in [Greeting { nonce: 1, ..me(0) }, Greeting { key: 1, ..me(0) }, me(1), me(7)] {
        let mut s = lower.take(1);
        s.write_all(&Greeting { to: 1, code: 1, ..other }.encode()).unwrap();
        assert_eq!(answer(&mut s), b"");
    }
    drop(lower.take(1));
    let mut s = lower.take(1);
    s.write_all(&[0; GREETING]).unwrap();
    assert_eq!(answer(&mut s), b"");
    let mut s = lower.take(1);
    lower.accept(&mut s, 1);
    assert!(b.wait(&[0], Instant::now() + LIMIT).unwrap());
}

/// What ranks say may come in any pieces.
#[test]
fn a_handshake_byte_by_byte() {
    for secret in [None, Some("s")] {
        let ((a, at_a), (b, _)) = (end(0, 2, secret, LIMIT), end(1, 2, secret, LIMIT));
        let relay = TcpListener::bind("127.0.0.1:0").unwrap();
        b.learn(vec![(0, at(&[relay.local_addr().unwrap()], false))]);
        b.want([0]);
        let left = relay.accept().unwrap().0;
        let right = TcpStream::connect(at_a).unwrap();
        for (mut from, mut to) in [(left.try_clone().unwrap(), right.try_clone().unwrap()), (right, left)] {
            std::thread::spawn(move || {
                to.set_nodelay(true).unwrap();
                let mut byte = [0];
                while matches!(from.read(&mut byte), Ok(1)) && to.write_all(&byte).is_ok() {
                    std::thread::sleep(Duration::from_micros(200));
                }
            });
        }
        let until = Instant::now() + LIMIT;
        assert!(a.wait(&[1], until).unwrap() && b.wait(&[0], until).unwrap());
    }
}

/// Who says nothing, or stops in the middle, is hung up on after a while.
#[test]
fn silence_has_an_end() {
    let (_a, at_a) = end(0, 2, None, LIMIT);
    let (_b, at_b) = end(0, 2, Some("s"), LIMIT);
    let mut silent = Vec::new();
    for (addr, first) in [(at_a, &b""[..]), (at_a, b"RCOMMS"), (at_b, b""), (at_b, b"RCAUTH1\n")] {
        let mut s = TcpStream::connect(addr).unwrap();
        s.write_all(first).unwrap();
        silent.push(s);
    }
    // A hello alone gets a challenge, and then the same.
    let mut hello = TcpStream::connect(at_b).unwrap();
    hello.write_all(&[b"RCAUTH1\n".as_slice(), &[7; 32]].concat()).unwrap();
    for s in &mut silent {
        assert_eq!(answer(s), b"");
    }
    assert_eq!(answer(&mut hello).len(), 64);
}

/// An endpoint without a link asks for one, gets it, and hears when there is none to be had.
#[test]
fn endpoints_connect_on_demand() {
    use comm_core::{ErrorKind, PeerCause, RealClock};
    use comm_transport::{Connect, EndpointOptions, GroupSpec, Patience};

    let endpoint = |rank: usize, mut g: Gathering| {
        let options = EndpointOptions {
            patience: Patience::fitting(2, 1),
            dialer: Some(g.dialer()),
            connect: Connect::Ring,
            ..EndpointOptions::new(Arc::new(RealClock))
        };
        let e = Endpoint::new(rank, (0..3).map(|_| None).collect(), options).unwrap();
        g.hand_over(&e);
        let spec = GroupSpec { id: 1, generation: 0, name: "g".into(), members: vec![0, 1, 2], window: 1 << 20 };
        let group = e.create_group(spec).unwrap();
        (e, group)
    };
    let ((a, at_a), (b, at_b)) = (end(0, 3, None, LIMIT), end(1, 3, None, LIMIT));
    let (_held, dead) = nobody();
    a.learn(vec![(1, at(&[at_b], true)), (2, at(&[dead], true))]);
    b.learn(vec![(0, at(&[at_a], true))]);
    let ((a, ga), (b, gb)) = (endpoint(0, a), endpoint(1, b));
    std::thread::scope(|s| {
        let other = s.spawn(|| {
            b.send_control(gb, 0, 5, b"from 1").unwrap();
            b.recv_control(gb, 0, 5, LIMIT).unwrap()
        });
        a.send_control(ga, 1, 5, b"from 0").unwrap();
        assert_eq!(a.recv_control(ga, 1, 5, LIMIT).unwrap(), b"from 1");
        assert_eq!(other.join().unwrap(), b"from 0");
    });
    // It may be said when it is sent, or later.
    let e = a.send_control(ga, 2, 5, b"x").and_then(|()| a.recv_control(ga, 2, 5, LIMIT).map(drop)).unwrap_err();
    assert!(matches!(e.kind(), ErrorKind::PeerFailed { rank: 2, cause: PeerCause::Killed }), "{e}");
}

/// Who asks for a sign of life gets one and is hung up on; who has no business here does not.
#[test]
fn a_probe_is_answered_whatever_else_is_there() {
    let ((a, at_a), (b, at_b)) = (end(0, 2, None, LIMIT), end(1, 2, None, LIMIT));
    let ask = |g: Greeting| {
        let mut s = TcpStream::connect(at_a).unwrap();
        s.write_all(&Greeting { code: crate::wire::PROBE, ..g }.encode()).unwrap();
        let said = answer(&mut s);
        (!said.is_empty()).then(|| Greeting::decode(said.as_slice().try_into().unwrap()).unwrap().code)
    };
    for _ in 0..3 {
        assert_eq!(ask(me(1)), Some(4));
    }
    for other in [Greeting { nonce: 1, ..me(1) }, Greeting { key: 1, ..me(1) }, me(0), me(7)] {
        assert_eq!(ask(other), None);
    }
    // It is no connection, and stands in the way of none.
    assert!(!a.wait(&[1], Instant::now() + Duration::from_millis(50)).unwrap());
    b.learn(vec![(0, at(&[at_a], true))]);
    b.want([0]);
    joined(&a, 0, &b, 1);
    assert_eq!(ask(me(1)), Some(4));
    drop((a, b, at_b));
}

/// An endpoint hears from a silent peer through the connector, over wrong addresses too, with and without a secret, and
/// when the address becomes known after the question; from one that does not answer it hears nothing.
#[test]
fn silent_peers_are_probed() {
    use comm_core::{ErrorKind, PeerCause, RealClock};
    use comm_transport::{EndpointOptions, GroupSpec, Link, SocketLink};

    let silent = || {
        let (x, y) = std::os::unix::net::UnixStream::pair().unwrap();
        let link: Box<dyn Link> = Box::new(SocketLink::new(x).unwrap());
        (link, y)
    };
    for (secret, answers, late) in
        [(None, true, false), (Some("s"), true, false), (None, true, true), (None, false, false)]
    {
        let ((mut a, _), (_b, at_b)) = (end(0, 2, secret, LIMIT), end(1, 2, secret, LIMIT));
        let (_held, dead) = nobody();
        let mute = TcpListener::bind("127.0.0.1:0").unwrap();
        let addrs = if answers { vec![dead, at_b] } else { vec![dead, mute.local_addr().unwrap()] };
        let (link, _open) = silent();
        let options = EndpointOptions {
            heartbeat: HEARTBEAT,
            prober: Some(a.prober()),
            ..EndpointOptions::new(Arc::new(RealClock))
        };
        let e = Endpoint::new(0, vec![None, Some(link)], options).unwrap();
        a.hand_over(&e);
        if !late {
            a.learn(vec![(1, at(&addrs, false))]);
        }
        let spec = GroupSpec { id: 1, generation: 0, name: "g".into(), members: vec![0, 1], window: 1 << 20 };
        let g = e.create_group(spec).unwrap();
        if late {
            std::thread::sleep(Duration::from_millis(350));
            a.learn(vec![(1, at(&addrs, false))]);
        }
        std::thread::sleep(4 * HEARTBEAT);
        let until = Instant::now() + LIMIT;
        while !answers && e.failure(g).is_none() && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(5));
        }
        let failed = e.failure(g);
        if answers {
            assert!(failed.is_none(), "{secret:?} {late}: {failed:?}");
        } else {
            let failed = failed.expect("nobody has answered");
            let named = ErrorKind::PeerFailed { rank: 1, cause: PeerCause::NoHeartbeat };
            assert_eq!(failed.kind(), &named);
        }
    }
}
