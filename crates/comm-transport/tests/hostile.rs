//! Peers that send garbage, lies or too much: the endpoint names them, stays within its memory, and its
//! other links go on.

mod wire;

use std::io::Write;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use comm_core::{DType, ErrorKind, OpDesc, Operation, PeerCause, ReduceOp};
use comm_transport::{Connect, Dialer, Endpoint, EndpointOptions, FRAGMENT, Link, SocketLink};
use wire::*;

#[test]
fn garbage() {
    let mut s = Scene::new();
    s.raw(&[0xff; 4096]);
    s.corrupt("not a rustcomms frame");
}

#[test]
fn another_version_kind_or_descriptor() {
    for (at, value, words) in
        [(2, 9, "protocol version 9"), (3, 0, "unknown kind"), (3, 99, "unknown kind"), (48, 250, "unknown codes")]
    {
        let mut s = Scene::new();
        let mut b = frame(HEARTBEAT).bytes(0, &[]);
        b[at] = value;
        s.raw(&b);
        s.corrupt(words);
    }
}

#[test]
fn a_truncated_frame_and_the_end() {
    for cut in [1, 40, 79, 80, 81, 1000] {
        let mut s = Scene::new();
        let b = Frame { total: 5000, ..frame(CONTROL) }.bytes(0, &[7; 5000]);
        s.raw(&b[..cut]);
        drop(std::mem::replace(&mut s.peer, std::os::unix::net::UnixStream::pair().unwrap().0));
        let e = s.failure();
        let killed = matches!(e.kind(), ErrorKind::PeerFailed { rank: 1, cause: PeerCause::Killed });
        assert!(killed, "cut at {cut}: {e}");
        s.unharmed();
    }
}

#[test]
fn an_oversized_length() {
    for lie in [FRAGMENT as u32 + 1, u32::MAX] {
        let mut s = Scene::new();
        s.send(Frame { lie: Some(lie), total: u64::MAX, ..frame(COLLECTIVE) }, &[]);
        s.corrupt("more than the");
    }
}

#[test]
fn parts_outside_of_their_message() {
    for (offset, total) in [(u64::MAX, u64::MAX), (5, 4), (0, 3), (1 << 63, 1 << 62)] {
        for kind in [COLLECTIVE, EAGER, P2P, CONTROL] {
            let mut s = Scene::new();
            s.send(Frame { offset, total, ..frame(kind) }, &[1; 8]);
            s.corrupt("outside of its message");
        }
    }
    // A control message longer than any may be.
    let mut s = Scene::new();
    s.send(Frame { total: 1 << 40, ..frame(CONTROL) }, &[1; 8]);
    s.corrupt("outside of its message");
}

#[test]
fn wrong_frame_numbers() {
    let mut s = Scene::new();
    s.still_listens();
    s.raw(&frame(HEARTBEAT).bytes(0, &[]));
    s.corrupt("frame 0 arrived where frame 1 was due");
}

#[test]
fn messages_that_do_not_join() {
    // Begins in its middle.
    let mut s = Scene::new();
    s.send(Frame { offset: 8, total: 16, ..frame(COLLECTIVE) }, &[0; 8]);
    s.corrupt("in its middle");
    // Continues as another message.
    let mut s = Scene::new();
    s.send(Frame { total: 16, ..frame(COLLECTIVE) }, &[0; 8]);
    s.send(Frame { offset: 8, total: 24, ..frame(COLLECTIVE) }, &[0; 8]);
    s.corrupt("do not join");
    let mut s = Scene::new();
    s.send(Frame { total: 16, ..frame(CONTROL) }, &[0; 8]);
    s.send(Frame { offset: 4, total: 16, ..frame(CONTROL) }, &[0; 8]);
    s.corrupt("do not join");
}

#[test]
fn more_data_than_the_window() {
    for kind in [COLLECTIVE, EAGER] {
        for len in [0usize, 1000, 65_536] {
            let mut s = Scene::new();
            let mut seq = 0;
            while s.send(Frame { seq, total: len as u64, ..frame(kind) }, &vec![3; len])
                && s.us.failure(s.bad).is_none()
            {
                assert!(s.us.held() <= WINDOW + 128, "{} bytes held", s.us.held());
                seq += 1;
                assert!(seq < 100_000, "no end of credit with frames of {len} bytes");
            }
            s.corrupt("credit");
            assert_eq!(s.us.held(), 0, "what the peer had sent is still held");
        }
    }
}

/// What came before the group was created is there when it is: messages, data, goodbyes.
#[test]
fn early_frames_reach_their_group() {
    let mut s = Scene::new();
    s.send(Frame { comm: 500, step: 3, total: 2, ..frame(CONTROL) }, b"hi");
    // In two parts, the second of which comes in two pieces around the creation.
    s.send(Frame { comm: 500, step: 4, total: 200_000, ..frame(CONTROL) }, &vec![5; 100_000]);
    let rest =
        Frame { comm: 500, step: 4, offset: 100_000, total: 200_000, ..frame(CONTROL) }.bytes(2, &vec![6; 100_000]);
    s.raw(&rest[..30_000]);
    std::thread::sleep(Duration::from_millis(30));
    let g = s.us.create_group(spec(500, &[0, 1])).unwrap();
    s.raw(&rest[30_000..]);
    assert_eq!(s.us.recv_control(g, 1, 3, SOON).unwrap(), b"hi");
    let long = s.us.recv_control(g, 1, 4, SOON).unwrap();
    assert_eq!((long.len(), long[99_999], long[100_000]), (200_000, 5, 6));
    // And after it is forgotten, late frames go nowhere, however many.
    s.us.close(g);
    s.us.forget(g);
    s.raw(&Frame { comm: 500, total: 3, ..frame(CONTROL) }.bytes(3, b"bye"));
    for i in 0..300 {
        s.raw(&Frame { comm: 500, total: 200_000, ..frame(COLLECTIVE) }.bytes(4 + i, &vec![5; 200_000]));
    }
    s.raw(&Frame { step: 9, total: 5, ..frame(CONTROL) }.bytes(304, b"hello"));
    assert_eq!(s.us.recv_control(s.bad, 1, 9, SOON).unwrap(), b"hello");
}

#[test]
fn an_abort_that_cannot_be_read() {
    for payload in [&[][..], &[0xff; 300], &[0x80; 12]] {
        let mut s = Scene::new();
        s.send(frame(ABORT), payload);
        s.corrupt("abort");
    }
}

#[test]
fn bytes_one_at_a_time() {
    let mut s = Scene::new();
    let b = Frame { step: 2, total: 7, ..frame(CONTROL) }.bytes(0, b"letters");
    for x in b {
        s.raw(&[x]);
        std::thread::yield_now();
    }
    assert_eq!(s.us.recv_control(s.bad, 1, 2, SOON).unwrap(), b"letters");
}

#[test]
fn checksums_are_required_where_agreed() {
    let mut s = Scene::with(true);
    s.raw(&frame(HEARTBEAT).bytes(0, &[]));
    s.corrupt("without checksum");
    let mut s = Scene::with(true);
    let mut b = Frame { total: 3, ..frame(CONTROL) }.bytes(0, b"abc");
    b[3] |= 0x80;
    s.raw(&b);
    s.corrupt("checksum");
}

/// A mismatching descriptor in a call that this rank makes later, and one for a number no call can have.
#[test]
fn descriptors_and_numbers_that_make_no_sense() {
    let desc = OpDesc::new(Operation::AllReduce).elements(DType::F64, usize::MAX).redop(ReduceOp::BXor).root(12345);
    for seq in [0, 1, u64::MAX - 1, u64::MAX] {
        for kind in [COLLECTIVE, STATUS, QUERY, REFUSE, ARRIVALS] {
            let mut s = Scene::new();
            s.send(Frame { seq, desc, step: u32::MAX, ..frame(kind) }, &[]);
            s.still_listens();
            s.unharmed();
        }
    }
}

/// A peer that reads nothing: what this rank wants to tell it waits, the others go on.
#[test]
fn a_peer_that_does_not_read() {
    let s = Scene::new();
    for i in 0..100u32 {
        s.us.send_control(s.bad, 1, i, &vec![1; 200_000]).unwrap();
    }
    s.unharmed();
    let e = s.us.recv_control(s.bad, 1, 0, Duration::from_millis(50)).unwrap_err();
    assert!(matches!(e.kind(), ErrorKind::Timeout { missing, .. } if missing == &[1]), "{e}");
}

/// Counts what it is asked for and makes no link.
#[derive(Debug, Default)]
struct Deaf(AtomicUsize);

impl Dialer for Deaf {
    fn dial(&self, _: usize) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

/// Rank 0 of twelve in a ring, where rank 1 is hostile and the others do not answer: news, statuses and refusals in the
/// name of others, some of whom do not exist.
#[test]
fn news_and_frames_in_the_name_of_others() {
    let (a, mut peer) = UnixStream::pair().unwrap();
    let mut links: Vec<Option<Box<dyn Link>>> = (0..12).map(|_| None).collect();
    links[1] = Some(Box::new(SocketLink::new(a).unwrap()));
    let dialer = Arc::new(Deaf::default());
    let options = EndpointOptions { dialer: Some(dialer.clone()), connect: Connect::Ring, ..options(false) };
    let us = Endpoint::new(0, links, options).unwrap();
    let g = us.create_group(spec(BAD, &(0..12).collect::<Vec<_>>())).unwrap();
    let mut number = 0;
    let mut send = |f: Frame, payload: &[u8]| {
        peer.write_all(&f.bytes(number, payload)).unwrap();
        number += 1;
    };
    for origin in [0, 1, 5, 12, 13, 1 << 40, u64::MAX] {
        for step in [0, 1, 2] {
            send(Frame { total: origin, step, seq: 3, ..frame(STATUS) }, &[]);
            send(Frame { total: origin, step, seq: 4, ..frame(REFUSE) }, b"no");
            send(Frame { total: origin, step, seq: 5, ..frame(PUBLISH) }, &[]);
            send(Frame { total: origin, step, seq: 6, ..frame(QUERY) }, &[]);
            send(Frame { total: origin, step, seq: 7, ..frame(ARRIVALS) }, &[1, 0]);
        }
        send(Frame { offset: origin, ..frame(GOODBYE) }, &[]);
    }
    // (rank 4, finalized, nobody directly, no silent calls), twice; then what makes no sense.
    send(frame(NEWS), &[1, 4, 1, 0, 0]);
    send(frame(NEWS), &[2, 4, 1, 0, 0, 4, 2, 0, 0]);
    assert!(us.failure(g).is_none(), "{:?}", us.failure(g));
    send(frame(NEWS), &[1, 12, 1, 0, 0]);
    let until = Instant::now() + SOON;
    let e = loop {
        if let Some(e) = us.failure(g) {
            break e;
        }
        assert!(Instant::now() < until, "the endpoint noticed nothing");
        std::thread::sleep(Duration::from_millis(1));
    };
    assert!(matches!(e.kind(), ErrorKind::Corrupt { rank: Some(1), what } if what.contains("makes no sense")), "{e}");
    // One request per peer at most, however much is to be said to it.
    assert!(dialer.0.load(Ordering::SeqCst) <= 10);
}
