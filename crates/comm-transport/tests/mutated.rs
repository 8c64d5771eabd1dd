//! Recorded conversations, damaged at random: the endpoint neither panics nor hangs, and its other link works.

mod wire;

use std::io;
use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, OnceLock};
use std::task::Poll;
use std::time::{Duration, Instant};

use comm_core::{DType, OpDesc, Operation, ReduceOp};
use comm_transport::{Endpoint, Link, Message, Port, Sink, SocketLink, Task};
use proptest::prelude::*;
use wire::*;

/// A link that keeps a copy of what is written.
#[derive(Debug)]
struct Tee(SocketLink, Arc<Mutex<Vec<u8>>>);

impl Link for Tee {
    fn write(&mut self, head: &[u8], body: &[u8]) -> io::Result<usize> {
        let n = self.0.write(head, body)?;
        let (h, b) = (n.min(head.len()), n.saturating_sub(head.len()));
        let mut log = self.1.lock().unwrap();
        log.extend_from_slice(&head[..h]);
        log.extend_from_slice(&body[..b]);
        Ok(n)
    }

    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        self.0.read(buf)
    }

    fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.0.fd()
    }
}

/// Sends to and receives from the other of two ranks.
struct Swap {
    out: Vec<u8>,
    into: Vec<u8>,
    messages: Option<(u32, u64)>,
    posted: bool,
}

impl Swap {
    fn new(len: usize, messages: Option<(u32, u64)>) -> Self {
        Self { out: vec![1; len], into: vec![0; len], messages, posted: false }
    }
}

impl Task for Swap {
    fn poll(&mut self, port: &mut Port<'_>) -> Poll<comm_core::Result<()>> {
        if !std::mem::replace(&mut self.posted, true) {
            let (len, from, to) = (self.out.len(), self.out.as_ptr(), self.into.as_mut_ptr());
            let peer = 1 - RANK.get();
            // SAFETY: both buffers belong to the task, which outlives the operation that `run` drives.
            let r = unsafe {
                match self.messages {
                    None => port.recv(peer, 0, Sink::Copy(to), len).and(port.send(peer, 0, from, len)),
                    Some((tag, seq)) => {
                        let m = |op| {
                            let desc = OpDesc::new(op).elements(DType::U8, len);
                            Message { peer, tag, seq, desc, bytes: len }
                        };
                        port.recv_message(m(Operation::Recv), to).and(port.send_message(m(Operation::Send), from))
                    }
                }
            };
            if let Err(e) = r {
                return Poll::Ready(Err(e));
            }
        }
        if port.all_done() { Poll::Ready(Ok(())) } else { Poll::Pending }
    }
}

thread_local! {
    static RANK: std::cell::Cell<usize> = const { std::cell::Cell::new(0) };
}

fn all_reduce(len: usize) -> OpDesc {
    OpDesc::new(Operation::AllReduce).elements(DType::U8, len).redop(ReduceOp::Sum)
}

/// Everything that two ranks can say to each other, as rank 1 said it.
fn recording() -> &'static [u8] {
    static LOG: OnceLock<Vec<u8>> = OnceLock::new();
    LOG.get_or_init(|| {
        let log = Arc::new(Mutex::new(Vec::new()));
        let (a, b) = UnixStream::pair().unwrap();
        let tee: Box<dyn Link> = Box::new(Tee(SocketLink::new(b).unwrap(), Arc::clone(&log)));
        let zero: Box<dyn Link> = Box::new(SocketLink::new(a).unwrap());
        let ends = [
            Endpoint::new(0, vec![None, Some(zero), None], options(false)).unwrap(),
            Endpoint::new(1, vec![Some(tee), None, None], options(false)).unwrap(),
        ];
        let talk = |rank: usize, e: &Arc<Endpoint>| {
            RANK.set(rank);
            let g = e.create_group(spec(BAD, &[0, 1])).unwrap();
            let other = 1 - rank;
            for (seq, len) in [0, 10, 5000, 300_000].into_iter().enumerate() {
                let t = Duration::from_secs(5);
                e.run(g, Some(seq as u64), all_reduce(len), t, &mut Swap::new(len, None)).unwrap();
                e.run(g, None, all_reduce(len), t, &mut Swap::new(len, Some((3, seq as u64)))).unwrap();
                e.send_control(g, other, 1, &vec![2; len]).unwrap();
                e.recv_control(g, other, 1, t).unwrap();
                e.publish(g, seq as u64, 99);
            }
            e.refuse(g, 4, all_reduce(1), "no");
            e.refuse_message(g, other, 3, 4, OpDesc::new(Operation::Send).elements(DType::U8, 1), "no");
            // One rank is late, so that the other asks.
            if rank == 0 {
                std::thread::sleep(Duration::from_millis(150));
            }
            e.run(g, Some(5), all_reduce(7), Duration::from_secs(5), &mut Swap::new(7, None)).unwrap();
            e.finalize(g, Duration::from_secs(5)).unwrap();
        };
        std::thread::scope(|s| {
            s.spawn(|| talk(0, &ends[0]));
            s.spawn(|| talk(1, &ends[1]));
        });
        let log = log.lock().unwrap().clone();
        assert!(log.len() > 600_000);
        log
    })
}

#[derive(Clone, Debug)]
enum Damage {
    Flip(u64, u8),
    Cut(u64, u16),
    Insert(u64, Vec<u8>),
    Repeat(u64, u16),
    End(u64),
}

fn damage() -> impl Strategy<Value = Damage> {
    prop_oneof![
        (any::<u64>(), 0..8u8).prop_map(|(at, bit)| Damage::Flip(at, bit)),
        (any::<u64>(), any::<u16>()).prop_map(|(at, n)| Damage::Cut(at, n)),
        (any::<u64>(), prop::collection::vec(any::<u8>(), 1..200)).prop_map(|(at, b)| Damage::Insert(at, b)),
        (any::<u64>(), any::<u16>()).prop_map(|(at, n)| Damage::Repeat(at, n)),
        any::<u64>().prop_map(Damage::End),
    ]
}

/// Places near the headers of the early, short frames are likelier than the middle of long payloads.
fn place(at: u64, len: usize) -> usize {
    let len = len.max(1) as u64;
    (if at.is_multiple_of(4) { (at / 4) % len } else { (at / 4) % len.min(3000) }) as usize
}

fn apply(log: &mut Vec<u8>, d: &Damage) {
    let n = log.len();
    match d {
        Damage::Flip(at, bit) if n > 0 => log[place(*at, n)] ^= 1 << bit,
        Damage::Cut(at, k) => {
            let at = place(*at, n).min(n);
            log.drain(at..(at + *k as usize).min(n));
        }
        Damage::Insert(at, b) => {
            let at = place(*at, n).min(n);
            log.splice(at..at, b.iter().copied());
        }
        Damage::Repeat(at, k) => {
            let at = place(*at, n).min(n);
            let part = log[at..(at + *k as usize).min(n)].to_vec();
            log.splice(at..at, part);
        }
        Damage::End(at) => log.truncate(place(*at, n)),
        Damage::Flip(..) => {}
    }
}

fn play(log: &[u8], in_a_call: bool) {
    let mut s = Scene::new();
    let us = Arc::clone(&s.us);
    let bad = s.bad;
    // Sometimes the endpoint is inside the calls that the recording is about.
    let caller = in_a_call.then(|| {
        std::thread::spawn(move || {
            RANK.set(0);
            let mut r = Ok(());
            for (seq, len) in [0, 10, 5000, 300_000].into_iter().enumerate() {
                let t = Duration::from_secs(5);
                r = r.and_then(|()| us.run(bad, Some(seq as u64), all_reduce(len), t, &mut Swap::new(len, None)));
                let mut messages = Swap::new(len, Some((3, seq as u64)));
                r = r.and_then(|()| us.run(bad, None, all_reduce(len), t, &mut messages));
            }
            r
        })
    });
    for part in log.chunks(10_000) {
        if !s.raw(part) {
            break;
        }
    }
    s.peer.shutdown(std::net::Shutdown::Both).unwrap();
    let t = Instant::now();
    // The peer is gone: whatever it said, nobody waits for it.
    while s.us.recv_control(s.bad, 1, 1, SOON).is_ok() {}
    assert!(t.elapsed() < SOON, "a receive from a peer that is gone took {:?}", t.elapsed());
    if let Some(c) = caller {
        let _ = c.join().expect("the call panicked");
        assert!(t.elapsed() < SOON, "a call with a peer that is gone took {:?}", t.elapsed());
    }
    s.unharmed();
}

#[test]
fn the_recording_itself_is_understood() {
    play(recording(), true);
    play(recording(), false);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, max_shrink_iters: 200, ..ProptestConfig::default() })]
    #[test]
    fn damaged_conversations_do_no_harm(list in prop::collection::vec(damage(), 1..4), in_a_call in any::<bool>()) {
        let mut log = recording().to_vec();
        for d in &list {
            apply(&mut log, d);
        }
        play(&log, in_a_call);
    }
}
