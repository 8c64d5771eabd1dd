//! The network: links that take time and have faults.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use comm_core::Time;
use comm_transport::{HEADER, Link, Notify, carries_data};

use super::core::Core;
use super::faults::{Fault, FrameFault, Happened, RankFault};
use super::state::{Due, State, Todo};

/// Bytes of one direction of a link that are under way or unread before the writer has to wait.
const CAPACITY: usize = 1 << 20;

/// How long frames are under way.
///
/// Each direction of each link is a line of its own: a frame of `b` bytes that is written when the line is free arrives
/// `latency + b / bandwidth + jitter` later, never before one that was written earlier; `jitter` is drawn for each frame.
/// Frames on different links overtake each other.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct Network {
    /// Time that the first byte needs.
    pub latency: Duration,
    /// Bytes per second; infinity for a line on which length costs nothing.
    pub bandwidth: f64,
    /// Most that is added, evenly distributed.
    pub jitter: Duration,
}

impl Default for Network {
    /// 10 µs, 10 GB/s, and up to 10 µs of jitter.
    fn default() -> Self {
        Self { latency: Duration::from_micros(10), bandwidth: 1e10, jitter: Duration::from_micros(10) }
    }
}

impl Network {
    /// A network without jitter.
    #[must_use]
    pub const fn new(latency: Duration, bandwidth: f64) -> Self {
        Self { latency, bandwidth, jitter: Duration::ZERO }
    }

    /// With this much jitter.
    #[must_use]
    pub const fn jitter(mut self, most: Duration) -> Self {
        self.jitter = most;
        self
    }

    /// Time that a frame occupies its line, in nanoseconds.
    fn length(&self, bytes: usize) -> u64 {
        let seconds = bytes as f64 / self.bandwidth;
        // A bandwidth of 0 or below makes no sense; it counts as no bandwidth limit.
        if seconds.is_finite() && seconds > 0.0 { (seconds * 1e9) as u64 } else { 0 }
    }
}

/// What is under way on a line.
struct Flying {
    at: u64,
    /// Empty: the end of the stream.
    bytes: Vec<u8>,
    depth: u64,
}

/// One direction of a link.
pub(crate) struct Pipe {
    from: usize,
    to: usize,
    flying: VecDeque<Flying>,
    unread: VecDeque<Flying>,
    /// Bytes of the front of `unread` that are read.
    read: usize,
    held: usize,
    last_at: u64,
    free_at: u64,
    /// Nothing can be written any more.
    broken: bool,
    /// The end of the stream is on its way.
    ending: bool,
    /// The end of the stream has arrived.
    ended: bool,
    /// Nobody will read.
    deaf: bool,
    starved: bool,
    reader: Option<Arc<Notify>>,
    writer: Option<Arc<Notify>>,
}

/// One end of a simulated link.
#[derive(Debug)]
pub(crate) struct SimLink {
    core: Arc<Core>,
    tx: usize,
    rx: usize,
}

impl SimLink {
    /// The ends of a new link, that of `a` and that of `b`.
    pub(crate) fn pair(core: &Arc<Core>, a: usize, b: usize) -> (Self, Self) {
        let mut st = core.lock();
        let there = st.add_pipe(a, b);
        let back = st.add_pipe(b, a);
        drop(st);
        let end = |tx, rx| Self { core: Arc::clone(core), tx, rx };
        (end(there, back), end(back, there))
    }
}

impl Link for SimLink {
    fn write(&mut self, head: &[u8], body: &[u8]) -> io::Result<usize> {
        let len = head.len() + body.len();
        let mut st = self.core.lock();
        let pipe = &mut st.pipes[self.tx];
        if pipe.broken {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        // A frame is taken whole or not at all.
        if pipe.held > 0 && pipe.held + len > CAPACITY {
            pipe.starved = true;
            return Err(io::ErrorKind::WouldBlock.into());
        }
        let mut frame = Vec::with_capacity(len);
        frame.extend_from_slice(head);
        frame.extend_from_slice(body);
        st.send(self.tx, frame);
        Ok(len)
    }

    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let mut st = self.core.lock();
        let pipe = &mut st.pipes[self.rx];
        let mut n = 0;
        let mut depth = 0;
        while n < buf.len()
            && let Some(front) = pipe.unread.front()
        {
            let rest = &front.bytes[pipe.read..];
            let take = rest.len().min(buf.len() - n);
            buf[n..n + take].copy_from_slice(&rest[..take]);
            n += take;
            pipe.read += take;
            depth = depth.max(front.depth);
            if pipe.read == front.bytes.len() {
                pipe.unread.pop_front();
                pipe.read = 0;
            }
        }
        if n == 0 {
            return if pipe.ended { Ok(0) } else { Err(io::ErrorKind::WouldBlock.into()) };
        }
        pipe.held -= n;
        let writer = if std::mem::take(&mut pipe.starved) { pipe.writer.clone() } else { None };
        let to = pipe.to;
        let rank = &mut st.ranks[to];
        rank.depth = rank.depth.max(depth);
        rank.stats.rounds = rank.depth;
        drop(st);
        if let Some(w) = writer {
            w.notify();
        }
        Ok(n)
    }

    fn attach(&mut self, notify: &Arc<Notify>) {
        let mut st = self.core.lock();
        st.pipes[self.tx].writer = Some(Arc::clone(notify));
        st.pipes[self.rx].reader = Some(Arc::clone(notify));
        let old = !st.pipes[self.rx].unread.is_empty() || st.pipes[self.rx].ended;
        drop(st);
        if old {
            // What arrived before the reader was known has not woken anybody.
            notify.notify();
        }
    }
}

impl Drop for SimLink {
    fn drop(&mut self) {
        let mut st = self.core.lock();
        // What was written is still on its way.
        st.end_stream(self.tx);
        let pipe = &mut st.pipes[self.tx];
        let writer = pipe.writer.take();
        let pipe = &mut st.pipes[self.rx];
        let reader = pipe.reader.take();
        pipe.deaf = true;
        pipe.broken = true;
        pipe.unread.clear();
        // The other side may wait for room.
        let other = pipe.writer.clone();
        drop(st);
        if let Some(o) = other {
            o.notify();
        }
        drop((writer, reader));
    }
}

impl State {
    fn add_pipe(&mut self, from: usize, to: usize) -> usize {
        self.pipes.push(Pipe {
            from,
            to,
            flying: VecDeque::new(),
            unread: VecDeque::new(),
            read: 0,
            held: 0,
            last_at: self.now,
            free_at: self.now,
            broken: false,
            ending: false,
            ended: false,
            deaf: self.ranks[to].killed,
            starved: false,
            reader: None,
            writer: None,
        });
        let id = self.pipes.len() - 1;
        if self.ranks[from].killed {
            self.end_stream(id);
        }
        id
    }

    /// Puts a frame, or the end of the stream, on its way.
    fn fly(&mut self, id: usize, bytes: Vec<u8>, depth: u64, extra: u64) {
        let network = self.settings.network;
        let jitter = self.random.within(network.jitter);
        let pipe = &mut self.pipes[id];
        pipe.free_at = pipe.free_at.max(self.now) + network.length(bytes.len());
        let at = Time(pipe.free_at).after(network.latency).after(jitter).0.saturating_add(extra).max(pipe.last_at);
        pipe.last_at = at;
        pipe.held += bytes.len();
        pipe.flying.push_back(Flying { at, bytes, depth });
        self.at(at, Due::Arrival { pipe: id });
    }

    /// A rank has written a frame.
    fn send(&mut self, id: usize, mut bytes: Vec<u8>) {
        let (from, to) = (self.pipes[id].from, self.pipes[id].to);
        let count = self.counts.entry((from, to)).or_default();
        *count += 1;
        let frame = *count;
        let data = carries_data(&bytes);
        let payload = (bytes.len().saturating_sub(HEADER)) as u64;
        let sender = &mut self.ranks[from];
        let depth = if data { sender.depth + 1 } else { 0 };
        let stats = &mut sender.stats;
        let (frames, sum) =
            if data { (&mut stats.messages, &mut stats.bytes) } else { (&mut stats.control, &mut stats.control_bytes) };
        *frames += 1;
        *sum += payload;
        self.note([5, id as u64, bytes.len() as u64], || {
            let kind = if data { "data" } else { "a small frame" };
            format!("rank {from} sends {kind} to rank {to}: frame {frame}, {payload} bytes")
        });
        let lost = self.pipes[id].deaf || self.cuts.contains(&(from, to));
        let mut copies = 1;
        let mut extra = Duration::ZERO;
        for fault in self.frame_faults(from, to, frame) {
            match fault {
                FrameFault::Drop => {
                    copies = 0;
                    self.record(Fault::Drop { from, to, frame });
                }
                FrameFault::Duplicate => {
                    copies = 2;
                    self.record(Fault::Duplicate { from, to, frame });
                }
                FrameFault::Corrupt => {
                    let bit = self.corrupt(&mut bytes);
                    self.record(Fault::Corrupt { from, to, frame, bit });
                }
                FrameFault::Delay(by) => {
                    extra += by;
                    self.record(Fault::Delay { from, to, frame, by });
                }
            }
        }
        if !lost {
            let extra = u64::try_from(extra.as_nanos()).unwrap_or(u64::MAX);
            for _ in 1..copies {
                self.fly(id, bytes.clone(), depth, extra);
            }
            if copies > 0 {
                self.fly(id, bytes, depth, extra);
            }
        }
        if self.may_strike() && self.random.chance(self.settings.faults.rates.disconnect) {
            self.random_faults += 1;
            self.strike(from, RankFault::Disconnect(to));
        }
        self.event_of(from);
    }

    /// Flips one to three bits close to each other; returns the first.
    fn corrupt(&mut self, bytes: &mut [u8]) -> usize {
        let bits = bytes.len() as u64 * 8;
        let first = self.random.below(bits) as usize;
        let more = self.random.below(4) as usize;
        bytes[first / 8] ^= 1 << (first % 8);
        // Two more, which are never the first one again.
        for (i, gap) in [(1, 1), (2, 5)] {
            let bit = first + gap;
            if more & i != 0 && bit < bytes.len() * 8 {
                bytes[bit / 8] ^= 1 << (bit % 8);
            }
        }
        first
    }

    fn frame_faults(&mut self, from: usize, to: usize, frame: u64) -> Vec<FrameFault> {
        let mut list: Vec<FrameFault> = Vec::new();
        if self.settings.faults.frames.is_empty() && self.settings.faults.rates == super::faults::Rates::default() {
            return list;
        }
        let placed = self.settings.faults.frames.iter().filter(|(f, t, k, _)| (*f, *t, *k) == (from, to, frame));
        list.extend(placed.map(|(.., fault)| *fault));
        let rates = self.settings.faults.rates;
        let chances = [
            (rates.drop, FrameFault::Drop),
            (rates.duplicate, FrameFault::Duplicate),
            (rates.corrupt, FrameFault::Corrupt),
            (rates.delay.0, FrameFault::Delay(rates.delay.1)),
        ];
        for (chance, fault) in chances {
            if !self.may_strike() || !self.random.chance(chance) {
                continue;
            }
            self.random_faults += 1;
            list.push(match fault {
                FrameFault::Delay(most) => FrameFault::Delay(self.random.within(most)),
                other => other,
            });
        }
        list
    }

    fn may_strike(&self) -> bool {
        self.settings.faults.most.is_none_or(|most| self.random_faults < most)
    }

    /// Faults at random places in the life of a rank.
    pub(crate) fn random_faults_of(&mut self, rank: usize) {
        let rates = self.settings.faults.rates;
        if rates.kill > 0.0 && self.may_strike() && self.random.chance(rates.kill) {
            let others = self.ranks.iter().enumerate().any(|(r, x)| r != rank && !x.killed);
            if others && !self.ranks[rank].killed && !self.ranks[rank].over {
                self.random_faults += 1;
                self.strike(rank, RankFault::Kill);
            }
        }
        if rates.pause.0 > 0.0 && self.may_strike() && self.random.chance(rates.pause.0) {
            self.random_faults += 1;
            let length = self.random.within(rates.pause.1);
            self.strike(rank, RankFault::Pause(length));
        }
    }

    fn record(&mut self, fault: Fault) {
        self.note([6, self.happened.len() as u64, 0], || fault.to_string());
        self.happened.push(Happened { at: Time(self.now), fault });
    }

    /// A fault of a rank happens.
    pub(crate) fn strike(&mut self, rank: usize, fault: RankFault) {
        if rank >= self.ranks.len() || self.trouble.is_some() {
            return;
        }
        match fault {
            RankFault::Kill => self.kill(rank),
            RankFault::Pause(length) => {
                let until = Time(self.now).after(length).0;
                self.record(Fault::Pause { rank, length });
                self.ranks[rank].paused_until = self.ranks[rank].paused_until.max(until);
                self.at(until, Due::Resume { rank });
            }
            RankFault::Disconnect(peer) => {
                self.record(Fault::Disconnect { a: rank, b: peer });
                for id in 0..self.pipes.len() {
                    let pipe = &mut self.pipes[id];
                    if [(rank, peer), (peer, rank)].contains(&(pipe.from, pipe.to)) {
                        let lost: usize = pipe.flying.iter().map(|f| f.bytes.len()).sum();
                        pipe.held -= lost;
                        pipe.flying.clear();
                        pipe.ending = false;
                        pipe.last_at = self.now;
                        self.end_stream(id);
                    }
                }
            }
            RankFault::Cut(to) => {
                self.record(Fault::Cut { from: rank, to });
                self.cuts.insert((rank, to));
            }
        }
    }

    fn kill(&mut self, rank: usize) {
        if self.ranks[rank].killed || self.ranks[rank].over {
            return;
        }
        self.record(Fault::Kill { rank });
        self.ranks[rank].killed = true;
        for id in 0..self.pipes.len() {
            if self.pipes[id].from == rank {
                self.end_stream(id);
            }
            if self.pipes[id].to == rank {
                self.pipes[id].deaf = true;
            }
        }
        let endpoints = self.ranks[rank].endpoints.clone();
        self.todo.push_back(Todo::Kill(endpoints, killed_text(rank)));
    }

    /// Nothing more is written to a pipe; its reader sees the end after what is under way.
    fn end_stream(&mut self, id: usize) {
        let pipe = &mut self.pipes[id];
        pipe.broken = true;
        if !pipe.ended && !std::mem::replace(&mut pipe.ending, true) {
            self.fly(id, Vec::new(), 0, 0);
        }
    }

    /// The next frame of a pipe reaches its reader.
    pub(crate) fn arrive(&mut self, id: usize) {
        let pipe = &mut self.pipes[id];
        // What was lost in the meantime does not arrive.
        let Some(f) = pipe.flying.pop_front_if(|f| f.at <= self.now) else { return };
        let (from, to) = (pipe.from, pipe.to);
        if pipe.deaf || self.cuts.contains(&(from, to)) {
            pipe.held -= f.bytes.len();
            return;
        }
        if f.bytes.is_empty() {
            pipe.ended = true;
        } else {
            pipe.unread.push_back(f);
        }
        let reader = pipe.reader.clone();
        self.note([7, id as u64, 0], || format!("something from rank {from} reaches rank {to}"));
        self.todo.extend(reader.map(Todo::Notify));
        self.event_of(to);
    }
}

/// What the calls of a killed rank end with.
pub(crate) fn killed_text(rank: usize) -> String {
    format!("the simulation has killed rank {rank}")
}
