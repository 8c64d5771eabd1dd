//! Agreement on survivors at the level of endpoints: cut links, calls that are over, hostile frames.

mod wire;

use std::io::Read;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use comm_core::{ErrorKind, Result};
use comm_transport::{Endpoint, EndpointOptions, GroupId, HEADER, Link, SocketLink, Survivors};
use wire::{ABORT, AGREE, CONTROL, SOON, Scene, frame, options, spec};

/// A world whose links can be cut.
struct World {
    ends: Vec<(Arc<Endpoint>, GroupId)>,
    wires: Vec<(usize, usize, UnixStream)>,
}

impl World {
    fn new(n: usize) -> Self {
        let mut rows: Vec<Vec<Option<Box<dyn Link>>>> = (0..n).map(|_| (0..n).map(|_| None).collect()).collect();
        let mut wires = Vec::new();
        for (a, b) in (0..n).flat_map(|a| (a + 1..n).map(move |b| (a, b))) {
            let (x, y) = UnixStream::pair().unwrap();
            wires.push((a, b, x.try_clone().unwrap()));
            rows[a][b] = Some(Box::new(SocketLink::new(x).unwrap()));
            rows[b][a] = Some(Box::new(SocketLink::new(y).unwrap()));
        }
        let members: Vec<usize> = (0..n).collect();
        let end = |(rank, row)| {
            let e = Endpoint::new(rank, row, options(true)).unwrap();
            let g = e.create_group(spec(5, &members)).unwrap();
            (e, g)
        };
        Self { ends: rows.into_iter().enumerate().map(end).collect(), wires }
    }

    fn cut(&self, pair: (usize, usize)) {
        let (.., wire) = self.wires.iter().find(|(a, b, _)| (*a, *b) == pair).unwrap();
        wire.shutdown(Shutdown::Both).unwrap();
    }

    /// What each of some ranks gets, all calling at once.
    fn agree(&self, ranks: &[usize], timeout: Duration) -> Vec<Result<Survivors>> {
        let call = |r: &usize| {
            let (e, g) = (Arc::clone(&self.ends[*r].0), self.ends[*r].1);
            std::thread::spawn(move || e.agree_survivors(g, timeout))
        };
        let calls: Vec<_> = ranks.iter().map(call).collect();
        calls.into_iter().map(|c| c.join().unwrap()).collect()
    }
}

#[test]
fn who_is_cut_off_from_a_lower_member_is_told_that_it_is_out() {
    for n in 3..=5usize {
        for a in 0..n {
            for b in a + 1..n {
                let w = World::new(n);
                w.cut((a, b));
                // Both ends have noticed, as their groups have failed.
                let until = Instant::now() + SOON;
                while [a, b].iter().any(|r| w.ends[*r].0.lost(w.ends[*r].1).is_empty()) {
                    assert!(Instant::now() < until);
                    std::thread::sleep(Duration::from_millis(1));
                }
                let all: Vec<usize> = (0..n).collect();
                let left: Vec<usize> = (0..n).filter(|r| *r != b).collect();
                let t = Instant::now();
                for (r, got) in w.agree(&all, Duration::from_secs(10)).into_iter().enumerate() {
                    match got {
                        Ok(s) if r != b => assert_eq!(s, Survivors { number: 0, ranks: left.clone(), repeated: false }),
                        Err(e) if r == b => {
                            let stale =
                                matches!(e.kind(), ErrorKind::StaleGeneration { ours: 0, theirs: 1, rank: None });
                            assert!(stale, "{n} ranks, {a}-{b} cut: {e}");
                        }
                        other => panic!("{n} ranks, {a}-{b} cut: rank {r} got {other:?}"),
                    }
                }
                assert!(t.elapsed() < Duration::from_secs(5), "{:?}", t.elapsed());
                // And it stays so.
                assert!(w.agree(&[b], Duration::from_secs(10)).remove(0).is_err());
                for s in w.agree(&left, Duration::from_secs(10)) {
                    assert_eq!(s.unwrap(), Survivors { number: 1, ranks: left.clone(), repeated: true });
                }
            }
        }
    }
}

/// A call that has timed out has been made: who comes later need not wait for it, and it need not be told twice.
#[test]
fn ranks_whose_call_is_over_still_answer() {
    for late in 0..3usize {
        let w = World::new(3);
        let early: Vec<usize> = (0..3).filter(|r| *r != late).collect();
        for (r, got) in w.agree(&early, Duration::from_millis(200)).into_iter().enumerate() {
            let e = got.unwrap_err();
            let named = matches!(e.kind(), ErrorKind::Timeout { missing, .. } if missing == &[late]);
            assert!(named, "{r} of {early:?}: {e}");
        }
        let all = Survivors { number: 0, ranks: vec![0, 1, 2], repeated: false };
        assert_eq!(w.agree(&[late], Duration::from_secs(10)).remove(0).unwrap(), all);
        for got in w.agree(&early, Duration::from_secs(10)) {
            assert_eq!(got.unwrap(), all);
        }
    }
}

#[test]
fn a_group_that_was_closed_has_no_survivors() {
    let w = World::new(2);
    let (e, g) = &w.ends[0];
    e.close(*g);
    assert!(matches!(e.agree_survivors(*g, SOON).unwrap_err().kind(), ErrorKind::Finalized));
    assert_eq!(w.agree(&[1], Duration::from_secs(10)).remove(0).unwrap().ranks, [1]);
}

#[test]
fn frames_that_make_no_sense_end_the_connection() {
    // Nothing; a set of two that names the fourth, one without anybody, one of too many words.
    for payload in [&[][..], &[0], &[0, 9], &[0, 4, 1, 8], &[0, 4, 1, 0], &[0, 4, 2, 3, 0], &[0, 0, 1, 0, 2, 1, 1, 0]] {
        let mut s = Scene::new();
        s.send(frame(AGREE), payload);
        s.corrupt("agreement frame");
        s.unharmed();
    }
}

#[test]
fn frames_of_other_instances_and_other_parts_change_nothing() {
    let mut s = Scene::new();
    // Asks, proposals, acknowledgements and lists, of now and of much later.
    for k in [0, 1, 100] {
        for what in [&[1][..], &[2, 1, 1, 3], &[3, 1], &[3, 0], &[5, 1, 3], &[2, 0, 1, 1]] {
            let payload: Vec<u8> = [&[k][..], what].concat();
            assert!(s.send(frame(AGREE), &payload), "{payload:?}");
        }
    }
    // The decisions of a hundred instances, of which it remembers few.
    for k in 0..100 {
        assert!(s.send(frame(AGREE), &[k, 4, 1, 3]));
    }
    std::thread::sleep(Duration::from_millis(50));
    assert!(s.us.failure(s.bad).is_none());
    for number in 0..16 {
        let got = s.us.agree_survivors(s.bad, SOON).unwrap();
        assert_eq!((got.number, got.ranks), (number, vec![0, 1]));
    }
    s.unharmed();
}

#[test]
fn a_decision_without_this_rank_makes_it_stale() {
    let mut s = Scene::new();
    assert!(s.send(frame(AGREE), &[0, 4, 1, 2]));
    let e = s.us.agree_survivors(s.bad, SOON).unwrap_err();
    assert!(matches!(e.kind(), ErrorKind::StaleGeneration { ours: 0, theirs: 1, rank: None }), "{e}");
    s.unharmed();
}

/// Who does not read, behind links into which nothing fits any more: it is given up and no survivor, although its link
/// stays for the reason that is to go out. Before the members look for survivors, and while they do.
#[test]
fn a_silent_member_behind_full_links_is_no_survivor() {
    // More than any socket holds.
    const MUCH: usize = 8 << 20;
    const HEARTBEAT: Duration = Duration::from_millis(300);
    for agreeing in [false, true] {
        let pair = || UnixStream::pair().unwrap();
        let ((a, mut to_a), (b, mut to_b), (x, y)) = (pair(), pair(), pair());
        let link = |s: UnixStream| -> Option<Box<dyn Link>> { Some(Box::new(SocketLink::new(s).unwrap())) };
        let end = |rank: usize, links| {
            let e = Endpoint::new(rank, links, EndpointOptions { heartbeat: HEARTBEAT, ..options(false) }).unwrap();
            let g = e.create_group(spec(5, &[0, 1, 2])).unwrap();
            (e, g)
        };
        // Rank 1 is nothing but two sockets.
        let ends = vec![end(0, vec![None, link(a), link(x)]), end(2, vec![link(y), link(b), None])];
        for (e, g) in &ends {
            e.send_control(*g, 1, 3, &vec![7; MUCH]).unwrap();
        }
        let until = Instant::now() + Duration::from_secs(10);
        while !agreeing && ends.iter().any(|(e, g)| e.failure(*g).is_none()) {
            assert!(Instant::now() < until, "nobody has given it up");
            std::thread::sleep(Duration::from_millis(5));
        }
        let w = World { ends, wires: Vec::new() };
        let t = Instant::now();
        for (r, got) in w.agree(&[0, 1], Duration::from_secs(20)).into_iter().enumerate() {
            let want = Survivors { number: 0, ranks: vec![0, 2], repeated: false };
            assert_eq!(got.unwrap(), want, "endpoint {r}, agreeing when it was given up: {agreeing}");
        }
        assert!(t.elapsed() < Duration::from_secs(10), "{:?}", t.elapsed());
        // The links were full and are there: should it read on, it gets everything, and last why it is alone, by whoever
        // was the first to give it up.
        let reasons: usize = [&mut to_a, &mut to_b].into_iter().map(|peer| read_on(peer, MUCH)).sum();
        assert!(reasons > 0);
    }
}

/// Reads a message of so many bytes, and what comes after it: the number of aborts.
fn read_on(peer: &mut UnixStream, message: usize) -> usize {
    let (mut read, mut aborts) = (0, 0);
    let mut until = Instant::now() + Duration::from_secs(10);
    peer.set_read_timeout(Some(Duration::from_secs(1))).unwrap();
    loop {
        let mut head = [0u8; HEADER];
        let got = peer.read_exact(&mut head);
        if read == message && (got.is_err() || Instant::now() > until) {
            return aborts;
        }
        assert!(got.is_ok() && Instant::now() < until, "{got:?} after {read} bytes");
        let mut payload = vec![0; u32::from_le_bytes(head[4..8].try_into().unwrap()) as usize];
        peer.read_exact(&mut payload).unwrap();
        match head[3] {
            CONTROL => {
                read += payload.len();
                // Who has heard of it from the other one goes on to send heartbeats.
                if read == message {
                    until = Instant::now() + Duration::from_secs(1);
                }
            }
            ABORT => {
                assert_eq!(read, message, "the link was not full");
                aborts += 1;
            }
            // Heartbeats, and what the agreement had to say.
            _ => {}
        }
    }
}
