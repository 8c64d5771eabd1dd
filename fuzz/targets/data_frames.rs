//! What a peer of a data connection might send, in frames and in garbage, to an endpoint that may be in a call.
//!
//! The first byte chooses the scene: which operations are posted (bits 0 to 2), whether frames carry checksums (bit
//! 3), and whether the endpoint is one of twelve in a ring, whose other neighbour never comes, and not one of two (bit 4).
//! Then come steps: 0 to 127, that many raw bytes; 128 to 239, a frame of that kind (modulo 19), whose fields follow
//! in short form; 240 to 255, the endpoint gets a turn. All that the endpoint reads comes in pieces of uneven length.
#![no_main]

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::task::Poll;
use std::time::Duration;

use comm_core::{Clock, DType, OpDesc, Operation, Parker, RealClock, ReduceOp, Result, Time};
use comm_transport::{
    Connect, Dialer, Endpoint, EndpointOptions, FRAGMENT, GroupSpec, HEADER, Link, Message, Notify, PROTOCOL, Patience,
    Port, Sink, Task,
};

const COMM: u64 = 77;
/// The least that a group has.
const WINDOW: u64 = 2 * FRAGMENT as u64;
const TURN: Duration = Duration::ZERO;
/// Nothing takes as long.
const LONG: Duration = Duration::from_secs(60);

/// Time that passes when somebody sleeps, and then at once.
#[derive(Debug, Default)]
struct Jumps(AtomicU64);

impl Clock for Jumps {
    fn now(&self) -> Time {
        Time(self.0.load(Ordering::SeqCst))
    }

    fn sleep(&self, d: Duration) {
        self.0.fetch_max(self.now().after(d).0, Ordering::SeqCst);
    }

    fn park(&self, parker: &Parker, until: Option<Time>) {
        if !parker.take_token() {
            self.0.fetch_max(until.map_or(0, |t| t.0), Ordering::SeqCst);
        }
    }

    fn unpark(&self, parker: &Parker) {
        RealClock.unpark(parker);
    }
}

/// What the peer has sent and the endpoint not read.
#[derive(Debug, Default)]
struct Wire {
    bytes: Vec<u8>,
    at: usize,
    piece: usize,
    ended: bool,
    reader: Option<Arc<Notify>>,
}

#[derive(Debug)]
struct Script(Arc<Mutex<Wire>>);

impl Link for Script {
    fn write(&mut self, head: &[u8], body: &[u8]) -> io::Result<usize> {
        Ok(head.len() + body.len())
    }

    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let mut wire = self.0.lock().unwrap();
        let left = wire.bytes.len() - wire.at;
        if left == 0 {
            return if wire.ended { Ok(0) } else { Err(io::ErrorKind::WouldBlock.into()) };
        }
        wire.piece = (wire.piece * 7 + 13) % 301;
        let (n, at) = (left.min(buf.len()).min(1 + wire.piece), wire.at);
        buf[..n].copy_from_slice(&wire.bytes[at..at + n]);
        wire.at += n;
        Ok(n)
    }

    fn attach(&mut self, notify: &Arc<Notify>) {
        self.0.lock().unwrap().reader = Some(Arc::clone(notify));
    }
}

/// An operation of rank 0 that sends to rank 1 and receives from it.
struct Call {
    out: Vec<u8>,
    into: Vec<u8>,
    message: Option<(u32, u64)>,
    posted: bool,
}

impl Task for Call {
    fn poll(&mut self, port: &mut Port<'_>) -> Poll<Result<()>> {
        if !std::mem::replace(&mut self.posted, true) {
            let (len, from, to) = (self.out.len(), self.out.as_ptr(), self.into.as_mut_ptr());
            // SAFETY: both buffers belong to the task, which the endpoint keeps until the operation has ended.
            let posted = unsafe {
                match self.message {
                    None => port.recv(1, 0, Sink::Copy(to), len).and(port.send(1, 0, from, len)),
                    Some((tag, seq)) => {
                        let m = |op| Message { peer: 1, tag, seq, desc: bytes(op, len), bytes: len };
                        port.recv_message(m(Operation::Recv), to).and(port.send_message(m(Operation::Send), from))
                    }
                }
            };
            if let Err(e) = posted {
                return Poll::Ready(Err(e));
            }
        }
        if port.all_done() { Poll::Ready(Ok(())) } else { Poll::Pending }
    }
}

fn bytes(op: Operation, len: usize) -> OpDesc {
    let desc = OpDesc::new(op).elements(DType::U8, len);
    if op == Operation::AllReduce { desc.redop(ReduceOp::Sum) } else { desc }
}

/// Reads the front of the input.
struct Input<'a>(&'a [u8]);

impl<'a> Input<'a> {
    fn byte(&mut self) -> Option<u8> {
        let (first, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(*first)
    }

    fn take(&mut self, n: usize) -> &'a [u8] {
        let (head, rest) = self.0.split_at(n.min(self.0.len()));
        self.0 = rest;
        head
    }

    /// A number that is often small, sometimes around a limit, and rarely huge.
    fn number(&mut self) -> u64 {
        match self.byte().unwrap_or(0) {
            n @ 0..200 => u64::from(n),
            n @ 200..250 => (1 << (n - 200)) - 1 + u64::from(self.byte().unwrap_or(0) % 3),
            n => u64::MAX - u64::from(n - 250),
        }
    }
}

/// A frame from the table of comm-transport, with fields from the input.
fn frame(input: &mut Input<'_>, kind: u8, number: u32, out: &mut Vec<u8>) {
    let flags = input.byte().unwrap_or(0);
    let (step, seq) = (input.number(), input.number());
    let (offset, total, len) = (input.number(), input.number(), input.number() as usize);
    let op = [Operation::AllReduce, Operation::Send, Operation::Recv, Operation::Barrier][usize::from(flags & 3)];
    let comm = if flags & 4 == 0 { COMM } else { COMM + 1 };
    // Payloads are long with little input: lengths matter to the endpoint, contents hardly.
    let mut payload = input.take(len.min(100)).to_vec();
    payload.resize(len.min(70_000), 7);
    let announced = if flags & 8 == 0 { payload.len() as u32 } else { input.number() as u32 };
    let desc = if flags & 16 == 0 { bytes(op, total as usize) } else { bytes(op, 5) };
    let start = out.len();
    out.extend([b'R', 0xc3, PROTOCOL, kind]);
    out.extend(announced.to_le_bytes());
    out.extend(comm.to_le_bytes());
    out.extend(u32::from(flags >> 7).to_le_bytes());
    out.extend((step as u32).to_le_bytes());
    for field in [seq, offset, total] {
        out.extend(field.to_le_bytes());
    }
    out.extend(desc.to_bytes());
    out.extend(number.to_le_bytes());
    out.extend([0; 4]);
    assert_eq!(out.len() - start, HEADER);
    if flags & 32 != 0 {
        // Damaged where it hurts.
        let at = start + usize::from(input.byte().unwrap_or(0)) % HEADER;
        out[at] ^= input.byte().unwrap_or(1);
    }
    out.extend(payload);
}

/// Makes no link.
#[derive(Debug)]
struct Deaf;

impl Dialer for Deaf {
    fn dial(&self, _: usize) {}
}

fn play(data: &[u8]) {
    let mut input = Input(data);
    let scene = input.byte().unwrap_or(0);
    let wire = Arc::new(Mutex::new(Wire::default()));
    let clock = Arc::new(Jumps::default());
    let sparse = scene & 16 != 0;
    let options = EndpointOptions {
        checksum: scene & 8 != 0,
        patience: Patience { spins: 0, yields: 0 },
        dialer: sparse.then(|| Arc::new(Deaf) as Arc<dyn Dialer>),
        connect: Connect::Ring,
        // An endpoint that can dial sleeps in the kernel, where time does not jump.
        ..EndpointOptions::new(if sparse { Arc::new(RealClock) } else { Arc::clone(&clock) as Arc<dyn Clock> })
    };
    let size = if sparse { 12 } else { 2 };
    let mut links: Vec<Option<Box<dyn Link>>> = (0..size).map(|_| None).collect();
    links[1] = Some(Box::new(Script(Arc::clone(&wire))));
    let us = Endpoint::new(0, links, options).unwrap();
    let members = (0..size).collect();
    let spec = GroupSpec { id: COMM, generation: 0, name: "fuzz".into(), members, window: WINDOW };
    let group = us.create_group(spec).unwrap();
    let mut calls = Vec::new();
    for (bit, len, message) in [(1, 10, None), (2, 5000, None), (4, 300, Some((3, 0)))] {
        if scene & bit != 0 {
            let task = Call { out: vec![1; len], into: vec![0; len], message, posted: false };
            let (seq, desc) = match message {
                None => (Some(calls.len() as u64), bytes(Operation::AllReduce, len)),
                Some(_) => (None, bytes(Operation::Send, len)),
            };
            calls.extend(us.start(group, seq, desc, LONG, Box::new(task)).ok());
        }
    }
    let turn = || {
        let _ = us.recv_control(group, 1, 1, TURN);
        // Collectives and messages have a window each; short frames count for more than their bytes.
        assert!(us.held() <= 2 * WINDOW + 1024, "{} bytes held", us.held());
    };
    let mut number = 0u32;
    while let Some(step) = input.byte() {
        match step {
            n @ 0..128 => {
                let raw = input.take(usize::from(n));
                wire.lock().unwrap().bytes.extend(raw);
            }
            kind @ 128..240 => {
                let mut out = Vec::new();
                frame(&mut input, (kind - 128) % 19, number, &mut out);
                number += 1;
                wire.lock().unwrap().bytes.extend(out);
            }
            _ => turn(),
        }
        if wire.lock().unwrap().bytes.len() > 1 << 20 {
            break;
        }
    }
    turn();
    if sparse {
        us.close(group);
        us.forget(group);
        return;
    }
    // The peer hangs up. Whatever it has said, nobody waits for it any longer.
    let reader = {
        let mut wire = wire.lock().unwrap();
        wire.ended = true;
        wire.reader.clone()
    };
    reader.iter().for_each(|r| r.notify());
    let hung_up = clock.now();
    while us.recv_control(group, 1, 1, LONG).is_ok() {}
    let waited = clock.now().since(hung_up);
    assert!(waited < LONG / 10, "{waited:?} for a peer that is gone");
    us.close(group);
    us.forget(group);
}

libfuzzer_sys::fuzz_target!(|data: &[u8]| play(data));
