//! What somebody hears who comes to a home by its handle, and not for the attempt that is made there.

use std::io::{Read, Write};
use std::net::TcpListener;

use comm_core::{CommOptions, ErrorKind};
use comm_transport::Connect;

use super::*;
use crate::wire::{CONFIRM, GREETING, Greeting, PROBE};

const LIMIT: Duration = Duration::from_secs(30);
const TOKEN: u64 = 70;

/// Rank 0 of an attempt of two, which is 0 of lineage 40 and generation 3; the other is lineage 41 of generation 5.
fn home() -> (Gathering, SocketAddr) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let addr = listener.local_addr().unwrap();
    let list =
        [(40, 3), (41, 5)].map(|(number, generation)| Member { number, generation, token: number + 30 }).to_vec();
    let refused = |rank, why| {
        assert_eq!(rank, 1);
        ErrorKind::Aborted { rank, cause: format!("{why:?}") }.into()
    };
    let members = Some(Members { list, refused: Box::new(refused) });
    let me = Greeting { key: 7, nonce: 9, who: 40, generation: 3, ..Greeting::default() };
    let until = Instant::now() + LIMIT;
    let setup = Setup { me, size: 2, secret: None, listener, heartbeat: LIMIT, until, members };
    (Gathering::open(setup).unwrap(), addr)
}

/// What its other member says who is in the same attempt with another list.
fn other() -> Greeting {
    Greeting { key: 7, nonce: 1, from: 1, to: 0, code: 1, who: 41, generation: 5, whom: TOKEN }
}

/// The connection, and the answer, if there is one.
fn ask(addr: SocketAddr, g: Greeting) -> (TcpStream, Option<Greeting>) {
    let mut s = TcpStream::connect(addr).unwrap();
    s.set_read_timeout(Some(LIMIT)).unwrap();
    s.write_all(&g.encode()).unwrap();
    let mut b = [0; GREETING];
    let said = s.read_exact(&mut b).is_ok().then(|| Greeting::decode(&b).unwrap());
    (s, said)
}

fn code(addr: SocketAddr, g: Greeting) -> Option<u32> {
    ask(addr, g).1.map(|g| g.code)
}

#[test]
fn only_who_knows_the_handle_is_told_what_has_become_of_it() {
    let (g, at) = home();
    assert_eq!(code(at, other()), Some(7));
    let strangers = [
        // By another handle; in another attempt, for which this rank may come later; not even knowing the number.
        Greeting { whom: TOKEN + 1, ..other() },
        Greeting { key: 8, ..other() },
        Greeting { whom: 0, ..other() },
    ];
    for s in strangers {
        assert_eq!(code(at, s), None);
    }
    // Who asks whether this rank lives belongs to the same attempt, or is none of its members.
    assert_ne!(code(at, Greeting { code: PROBE, ..other() }), Some(4));
    // The thread that answers hears of it a little later.
    let settle = |standing, expected| {
        g.settle(standing);
        let until = Instant::now() + LIMIT;
        while code(at, other()) != Some(expected) {
            assert!(Instant::now() < until, "{standing:?} is not told");
        }
    };
    settle(Standing::Settled(6), 5);
    for s in [other(), Greeting { key: 8, ..other() }] {
        let answer = ask(at, s).1.unwrap();
        assert_eq!((answer.code, answer.generation, answer.who), (5, 6, 40));
    }
    assert_eq!(code(at, strangers[0]), None);
    settle(Standing::Finalized, 6);
    // Those of the attempt itself are connected on demand as before.
    assert_eq!(code(at, Greeting { nonce: 9, ..other() }), Some(1));
}

/// An attempt fails for another list only when the one who passes it is there: its greeting may be an old one.
#[test]
fn an_attempt_is_not_ended_by_what_was_left_in_the_queue() {
    let options = CommOptions::new();
    for (theirs, why) in [(other(), "Differs"), (Greeting { generation: 6, ..other() }, "Stale { now: 6 }")] {
        let (mut g, at) = home();
        let none = vec![None, None];
        let endpoint = crate::endpoint(&options, 0, none, Some(g.dialer()), None, Connect::Ring).unwrap();
        let group = endpoint.create_group(crate::spec(&options, "x", 2)).unwrap();
        g.hand_over(&endpoint);
        let (gone, said) = ask(at, theirs);
        assert_eq!(said.unwrap().code, 7);
        drop(gone);
        // Nobody here waits for this one.
        let (mut stranger, said) = ask(at, Greeting { who: 50, ..theirs });
        assert_eq!(said.unwrap().code, 7);
        let _ = stranger.write_all(&[CONFIRM]);
        std::thread::sleep(Duration::from_millis(100));
        assert!(endpoint.failure(group).is_none());
        let (mut there, said) = ask(at, theirs);
        assert_eq!(said.unwrap().code, 7);
        there.write_all(&[CONFIRM]).unwrap();
        let until = Instant::now() + LIMIT;
        let failure = loop {
            if let Some(e) = endpoint.failure(group) {
                break e;
            }
            assert!(Instant::now() < until, "it has not failed");
            std::thread::sleep(Duration::from_millis(5));
        };
        let expected = ErrorKind::Aborted { rank: 1, cause: why.into() };
        assert_eq!(failure.kind(), &expected);
        endpoint.close(group);
        endpoint.forget(group);
    }
}
