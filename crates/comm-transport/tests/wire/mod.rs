//! A peer that is not an endpoint: frames made by hand from the table in `frame.rs`, and what an endpoint
//! makes of them.
#![allow(dead_code, missing_docs, unreachable_pub)]

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use comm_core::{Error, ErrorKind, OpDesc, Operation, RealClock};
use comm_transport::{Endpoint, EndpointOptions, GroupId, GroupSpec, HEADER, Link, PROTOCOL, Patience, SocketLink};

pub const WINDOW: u64 = 1 << 20;
/// The communicator of the endpoint and the hostile peer, and that of the endpoint and its good peer.
pub const BAD: u64 = 77;
pub const GOOD: u64 = 78;
pub const SOON: Duration = Duration::from_secs(2);

#[derive(Clone, Copy, Debug)]
pub struct Frame {
    pub kind: u8,
    pub comm: u64,
    pub generation: u32,
    pub step: u32,
    pub seq: u64,
    pub offset: u64,
    pub total: u64,
    pub desc: OpDesc,
    /// Announced length, if it is not the payload's.
    pub lie: Option<u32>,
}

pub const COLLECTIVE: u8 = 1;
pub const EAGER: u8 = 2;
pub const RTS: u8 = 3;
pub const CTS: u8 = 4;
pub const P2P: u8 = 5;
pub const CREDIT: u8 = 6;
pub const CONTROL: u8 = 7;
pub const REFUSE: u8 = 8;
pub const REFUSE_P2P: u8 = 9;
pub const ABORT: u8 = 10;
pub const GOODBYE: u8 = 11;
pub const HEARTBEAT: u8 = 12;
pub const STATUS: u8 = 13;
pub const QUERY: u8 = 14;
pub const ARRIVALS: u8 = 15;
pub const PUBLISH: u8 = 16;
pub const NEWS: u8 = 17;
pub const AGREE: u8 = 18;

pub fn frame(kind: u8) -> Frame {
    let desc = OpDesc::new(Operation::Barrier);
    Frame { kind, comm: BAD, generation: 0, step: 0, seq: 0, offset: 0, total: 0, desc, lie: None }
}

impl Frame {
    /// The bytes; `number` is the frame's number on the link.
    pub fn bytes(&self, number: u32, payload: &[u8]) -> Vec<u8> {
        let mut b = vec![b'R', 0xc3, PROTOCOL, self.kind];
        b.extend(self.lie.unwrap_or(payload.len() as u32).to_le_bytes());
        b.extend(self.comm.to_le_bytes());
        b.extend(self.generation.to_le_bytes());
        b.extend(self.step.to_le_bytes());
        b.extend(self.seq.to_le_bytes());
        b.extend(self.offset.to_le_bytes());
        b.extend(self.total.to_le_bytes());
        b.extend(self.desc.to_bytes());
        b.extend(number.to_le_bytes());
        b.extend([0; 4]);
        assert_eq!(b.len(), HEADER);
        b.extend(payload);
        b
    }
}

/// An endpoint of rank 0 between a hostile peer (1) and a good one (2).
pub struct Scene {
    pub us: Arc<Endpoint>,
    pub bad: GroupId,
    pub good: GroupId,
    pub friend: Arc<Endpoint>,
    pub friends: GroupId,
    pub peer: UnixStream,
    next: u32,
}

pub fn options(checksum: bool) -> EndpointOptions {
    EndpointOptions { checksum, patience: Patience::fitting(3, 1), ..EndpointOptions::new(Arc::new(RealClock)) }
}

pub fn spec(id: u64, members: &[usize]) -> GroupSpec {
    GroupSpec { id, generation: 0, name: format!("group {id}").into(), members: members.to_vec(), window: WINDOW }
}

fn link(s: UnixStream) -> Option<Box<dyn Link>> {
    Some(Box::new(SocketLink::new(s).unwrap()))
}

impl Scene {
    pub fn new() -> Self {
        Self::with(false)
    }

    pub fn with(checksum: bool) -> Self {
        let (a, peer) = UnixStream::pair().unwrap();
        let (b, c) = UnixStream::pair().unwrap();
        let us = Endpoint::new(0, vec![None, link(a), link(b)], options(checksum)).unwrap();
        let friend = Endpoint::new(2, vec![link(c), None, None], options(checksum)).unwrap();
        let bad = us.create_group(spec(BAD, &[0, 1])).unwrap();
        let good = us.create_group(spec(GOOD, &[0, 2])).unwrap();
        let friends = friend.create_group(spec(GOOD, &[0, 2])).unwrap();
        peer.set_write_timeout(Some(Duration::from_secs(10))).unwrap();
        Self { us, bad, good, friend, friends, peer, next: 0 }
    }

    /// Sends a frame in order. False when the endpoint has hung up.
    pub fn send(&mut self, f: Frame, payload: &[u8]) -> bool {
        let b = f.bytes(self.next, payload);
        self.next = self.next.wrapping_add(1);
        self.raw(&b)
    }

    pub fn raw(&mut self, b: &[u8]) -> bool {
        // What the endpoint says must not fill its link: a peer that reads nothing is another test.
        self.peer.set_nonblocking(true).unwrap();
        let mut sink = [0u8; 65536];
        while matches!(self.peer.read(&mut sink), Ok(n) if n > 0) {}
        self.peer.set_nonblocking(false).unwrap();
        self.peer.write_all(b).is_ok()
    }

    /// The error that the hostile peer's group gets, in time.
    pub fn failure(&self) -> Error {
        let until = Instant::now() + SOON;
        loop {
            if let Some(e) = self.us.failure(self.bad) {
                return e;
            }
            assert!(Instant::now() < until, "the endpoint noticed nothing");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// The group of the hostile peer fails with `Corrupt` that names it and says `words`.
    pub fn corrupt(&self, words: &str) {
        let e = self.failure();
        match e.kind() {
            ErrorKind::Corrupt { rank: Some(1), what } if what.contains(words) => {}
            _ => panic!("expected corrupt data with '{words}', got {e}"),
        }
        self.unharmed();
    }

    /// The other link and its group work.
    pub fn unharmed(&self) {
        for (i, len) in [0usize, 10, 300_000].into_iter().enumerate() {
            let message = vec![i as u8; len];
            self.us.send_control(self.good, 1, 5, &message).unwrap();
            assert_eq!(self.friend.recv_control(self.friends, 0, 5, SOON).unwrap(), message);
            self.friend.send_control(self.friends, 0, 6, &message).unwrap();
            assert_eq!(self.us.recv_control(self.good, 1, 6, SOON).unwrap(), message);
        }
        assert!(self.us.failure(self.good).is_none());
    }

    /// The hostile peer's group still works: a message of its arrives.
    pub fn still_listens(&mut self) {
        assert!(self.send(Frame { step: 9, total: 5, ..frame(CONTROL) }, b"hello"));
        assert_eq!(self.us.recv_control(self.bad, 1, 9, SOON).unwrap(), b"hello");
    }
}

/// Memory of this process, in bytes.
pub fn memory() -> usize {
    let s = std::fs::read_to_string("/proc/self/statm").unwrap();
    let pages: usize = s.split(' ').nth(1).unwrap().parse().unwrap();
    pages * 4096
}
