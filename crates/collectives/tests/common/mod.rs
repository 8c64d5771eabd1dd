//! An in-memory world: N ranks in one thread, polled and served in seeded random order, with every
//! rule of the `Transport` contract checked.

// Each test binary uses its own part of this.
#![allow(dead_code, unreachable_pub)]

mod case;

use std::cell::Cell;
use std::collections::{HashMap, HashSet, VecDeque};
use std::task::Poll;

use collectives::{AnySchedule, Buf, Schedule, Span, Token, Transport};
use comm_core::{Reducer, Result};

pub use case::{Case, Kind};

/// A small seeded generator.
#[derive(Debug)]
pub struct Rng(pub u64);

impl Rng {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, n: usize) -> usize {
        (self.next() % n.max(1) as u64) as usize
    }
}

/// When a send may be handed over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// At once; the receiver buffers what it did not expect.
    Eager,
    /// Only into a posted receive.
    Rendezvous,
    /// Either, at random per message.
    Mixed,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Pending,
    Done,
    Told,
}

/// A use of a span that is not over.
#[derive(Debug)]
struct Open {
    token: u32,
    span: Span,
    writes: bool,
}

#[derive(Debug, Default, Clone)]
pub struct Counts {
    pub messages: usize,
    pub bytes: usize,
    /// Bytes that went through `finish`.
    pub finished: usize,
    /// Bytes copied.
    pub copied: usize,
    pub most_sends: usize,
    pub most_recvs: usize,
    /// Peers that were sent to.
    pub peers: HashSet<usize>,
    open_sends: usize,
    open_recvs: usize,
}

#[derive(Debug)]
struct Node {
    bufs: [Vec<u8>; 3],
    /// Offsets in input and output that no span may cross.
    borders: [Vec<usize>; 2],
    tokens: Vec<Cell<State>>,
    open: Vec<Open>,
    counts: Counts,
}

#[derive(Debug)]
struct SendOp {
    from: usize,
    to: usize,
    step: u32,
    span: Span,
    token: u32,
    eager: bool,
    wire: Vec<u8>,
    taken: usize,
    handed: bool,
}

#[derive(Debug)]
struct RecvOp {
    rank: usize,
    dst: Span,
    own: Option<Span>,
    token: u32,
}

/// Key of a message: receiver, sender, step.
type Key = (usize, usize, u32);

#[derive(Debug)]
pub struct World {
    n: usize,
    reducer: Reducer,
    nodes: Vec<Node>,
    sends: Vec<SendOp>,
    queues: Vec<VecDeque<usize>>,
    busy: Vec<usize>,
    /// Sends that are handed over and not yet reported done.
    handed: Vec<usize>,
    /// Messages that came before their receive, and those of them whose receive is posted now.
    unexpected: HashMap<Key, usize>,
    late: Vec<usize>,
    recvs: HashMap<Key, RecvOp>,
    used: HashSet<(Key, bool)>,
    rng: Rng,
    mode: Mode,
    empty_messages: bool,
    changes: usize,
}

fn index(b: Buf) -> usize {
    match b {
        Buf::Input => 0,
        Buf::Output => 1,
        Buf::Scratch => 2,
    }
}

fn overlap(a: Span, b: Span) -> bool {
    a.buf == b.buf && a.off < b.off + b.len && b.off < a.off + a.len
}

impl World {
    /// `bufs[r]` are rank `r`'s input and output.
    pub fn new(reducer: Reducer, bufs: Vec<[Vec<u8>; 2]>, mode: Mode, seed: u64) -> Self {
        let n = bufs.len();
        let node = |[input, output]: [Vec<u8>; 2]| Node {
            bufs: [input, output, Vec::new()],
            borders: [Vec::new(), Vec::new()],
            tokens: Vec::new(),
            open: Vec::new(),
            counts: Counts::default(),
        };
        Self {
            n,
            reducer,
            nodes: bufs.into_iter().map(node).collect(),
            sends: Vec::new(),
            queues: vec![VecDeque::new(); n * n],
            busy: Vec::new(),
            handed: Vec::new(),
            unexpected: HashMap::new(),
            late: Vec::new(),
            recvs: HashMap::new(),
            used: HashSet::new(),
            rng: Rng(seed),
            mode,
            empty_messages: false,
            changes: 0,
        }
    }

    pub fn allow_empty_messages(&mut self) {
        self.empty_messages = true;
    }

    /// Where the blocks of a rank's input and output meet.
    pub fn set_borders(&mut self, rank: usize, borders: [Vec<usize>; 2]) {
        self.nodes[rank].borders = borders;
    }

    pub fn input(&self, rank: usize) -> &[u8] {
        &self.nodes[rank].bufs[0]
    }

    pub fn output(&self, rank: usize) -> &[u8] {
        &self.nodes[rank].bufs[1]
    }

    pub fn counts(&self, rank: usize) -> &Counts {
        &self.nodes[rank].counts
    }

    /// Runs one schedule per rank to the end. Ranks in `held` are polled only once nothing else moves;
    /// returns which ranks were ready at that moment.
    pub fn run_holding(&mut self, schedules: &mut [AnySchedule], held: &[usize]) -> Vec<bool> {
        for (node, s) in self.nodes.iter_mut().zip(schedules.iter()) {
            node.bufs[2] = vec![0xa5; s.scratch()];
        }
        let mut ready = vec![false; self.n];
        let mut ready_when_stuck = None;
        let mut idle = 0;
        while !ready.iter().all(|r| *r) {
            let before = self.changes;
            if self.rng.below(2) == 0 {
                let r = self.rng.below(self.n);
                let is_held = ready_when_stuck.is_none() && held.contains(&r);
                if !ready[r] && !is_held {
                    ready[r] = self.poll(r, &mut schedules[r]);
                }
            } else {
                self.tick();
            }
            idle = if self.changes == before { idle + 1 } else { 0 };
            if idle > 20_000 && !held.is_empty() && ready_when_stuck.is_none() {
                ready_when_stuck = Some(ready.clone());
                idle = 0;
            }
            assert!(idle < 100_000, "stuck; ready: {ready:?}; schedules: {schedules:#?}");
        }
        for (r, s) in schedules.iter_mut().enumerate() {
            assert!(self.poll(r, s), "rank {r} was ready before");
        }
        assert!(self.queues.iter().all(VecDeque::is_empty), "messages left over");
        assert!(self.unexpected.is_empty() && self.late.is_empty(), "unexpected messages left over");
        assert!(self.recvs.is_empty(), "receives left over");
        ready_when_stuck.unwrap_or_default()
    }

    pub fn run(&mut self, schedules: &mut [AnySchedule]) {
        self.run_holding(schedules, &[]);
    }

    fn poll(&mut self, rank: usize, schedule: &mut AnySchedule) -> bool {
        match schedule.poll(&mut View { world: self, rank }) {
            Poll::Pending => false,
            Poll::Ready(result) => {
                result.expect("the test transport does not fail");
                let open = &self.nodes[rank].open;
                assert!(open.is_empty(), "rank {rank} is ready with work under way: {open:?}");
                let told = |t: &Cell<State>| t.get() == State::Told;
                assert!(self.nodes[rank].tokens.iter().all(told), "rank {rank} is ready without having asked");
                self.changes += 1;
                true
            }
        }
    }

    /// One random event of the network.
    fn tick(&mut self) {
        match self.rng.below(4) {
            0 if !self.handed.is_empty() => {
                let i = self.rng.below(self.handed.len());
                let s = self.handed.swap_remove(i);
                let (from, token) = (self.sends[s].from, self.sends[s].token);
                self.nodes[from].counts.open_sends -= 1;
                self.complete(from, token);
            }
            1 if !self.late.is_empty() => {
                let i = self.rng.below(self.late.len());
                if self.deliver(self.late[i]) {
                    self.late.swap_remove(i);
                }
            }
            _ if !self.busy.is_empty() => {
                let i = self.rng.below(self.busy.len());
                let q = self.busy[i];
                if let Some(&s) = self.queues[q].front()
                    && self.progress(s)
                {
                    self.queues[q].pop_front();
                }
                if self.queues[q].is_empty() {
                    self.busy.swap_remove(i);
                }
            }
            _ => {}
        }
    }

    fn complete(&mut self, rank: usize, token: u32) {
        let node = &mut self.nodes[rank];
        assert_eq!(node.tokens[token as usize].replace(State::Done), State::Pending);
        node.open.retain(|o| o.token != token);
        self.changes += 1;
    }

    fn piece(&mut self, left: usize) -> usize {
        let unit = self.reducer.unit();
        if self.rng.below(2) == 0 || left <= unit { left } else { (1 + self.rng.below(left / unit)) * unit }
    }

    /// Moves the message at the head of a queue on; true when it leaves the queue.
    fn progress(&mut self, s: usize) -> bool {
        let SendOp { from, to, step, span, eager, .. } = self.sends[s];
        let key = (to, from, step);
        let posted = self.recvs.contains_key(&key);
        if !eager && !posted {
            return false;
        }
        let read = self.sends[s].wire.len();
        if !self.sends[s].handed {
            let k = self.piece(span.len - read);
            let src = &self.nodes[from].bufs[index(span.buf)][span.off + read..][..k];
            self.sends[s].wire.extend_from_slice(src);
            self.changes += 1;
            if read + k == span.len {
                self.sends[s].handed = true;
                self.handed.push(s);
            }
        }
        if posted {
            return self.deliver(s);
        }
        if self.sends[s].handed {
            self.unexpected.insert(key, s);
        }
        self.sends[s].handed
    }

    /// Delivers some of what is on the wire into the posted receive; true when it is complete.
    fn deliver(&mut self, s: usize) -> bool {
        let SendOp { from, to, step, span, taken, .. } = self.sends[s];
        let key = (to, from, step);
        let RecvOp { rank, dst, own, token } = self.recvs[&key];
        assert_eq!(dst.len, span.len, "rank {rank} receives another length from {from} in step {step}");
        let k = self.piece(self.sends[s].wire.len() - taken);
        let mut data = self.sends[s].wire[taken..taken + k].to_vec();
        let bufs = &mut self.nodes[rank].bufs;
        let at = dst.off + taken;
        match own {
            None => bufs[index(dst.buf)][at..at + k].copy_from_slice(&data),
            Some(own) => {
                let mine = bufs[index(own.buf)][own.off + taken..][..k].to_vec();
                let acc = &mut bufs[index(dst.buf)][at..at + k];
                acc.copy_from_slice(&mine);
                self.reducer.fold(acc, &mut data);
            }
        }
        self.sends[s].taken += k;
        self.changes += 1;
        let done = self.sends[s].taken == span.len && self.sends[s].handed;
        if done {
            self.recvs.remove(&key);
            self.nodes[rank].counts.open_recvs -= 1;
            self.complete(rank, token);
        }
        done
    }
}

/// One rank's side of the world.
#[derive(Debug)]
pub struct View<'a> {
    world: &'a mut World,
    rank: usize,
}

impl View<'_> {
    fn node(&mut self) -> &mut Node {
        &mut self.world.nodes[self.rank]
    }

    /// Panics if the span may not be read, or written, now. `except` is a use of the same operation.
    fn check(&self, span: Span, writes: bool, what: &str) {
        let node = &self.world.nodes[self.rank];
        let len = node.bufs[index(span.buf)].len();
        assert!(span.off + span.len <= len, "rank {}: {what} {span:?} of {len} bytes", self.rank);
        assert!(!writes || span.buf != Buf::Input, "rank {}: {what} writes {span:?}", self.rank);
        assert!(span.len.is_multiple_of(self.world.reducer.unit()), "rank {}: {what} cuts {span:?}", self.rank);
        for b in node.borders.get(index(span.buf)).into_iter().flatten() {
            let crosses = span.off < *b && *b < span.off + span.len;
            assert!(!crosses, "rank {}: {what} {span:?} crosses the blocks' border at {b}", self.rank);
        }
        for o in &node.open {
            let clash = overlap(o.span, span) && (writes || o.writes);
            assert!(!clash, "rank {}: {what} {span:?} during {o:?}", self.rank);
        }
        let empty_ok = self.world.empty_messages;
        assert!(span.len > 0 || empty_ok, "rank {}: {what} of nothing", self.rank);
    }

    fn token(&mut self, uses: &[(Span, bool)]) -> u32 {
        let node = self.node();
        let token = node.tokens.len() as u32;
        node.tokens.push(Cell::new(State::Pending));
        node.open.extend(uses.iter().map(|&(span, writes)| Open { token, span, writes }));
        self.world.changes += 1;
        token
    }

    fn post(&mut self, peer: usize, step: u32, dst: Span, own: Option<Span>) -> Result<Token> {
        assert!(peer < self.world.n && peer != self.rank, "rank {} receives from {peer}", self.rank);
        let key = (self.rank, peer, step);
        assert!(self.world.used.insert((key, true)), "rank {} receives twice: {key:?}", self.rank);
        self.check(dst, true, "receive into");
        let mut uses = vec![(dst, true)];
        if let Some(own) = own
            && own != dst
        {
            assert!(!overlap(own, dst) && own.len == dst.len, "own {own:?} and dst {dst:?}");
            self.check(own, false, "fold of own");
            uses.push((own, false));
        }
        let token = self.token(&uses);
        let counts = &mut self.node().counts;
        counts.open_recvs += 1;
        counts.most_recvs = counts.most_recvs.max(counts.open_recvs);
        let rank = self.rank;
        self.world.recvs.insert(key, RecvOp { rank, dst, own, token });
        if let Some(s) = self.world.unexpected.remove(&key) {
            self.world.late.push(s);
        }
        Ok(Token(token))
    }

    fn local(&mut self, acc: Span, x: Span, f: impl FnOnce(&Reducer, &mut [u8], &mut [u8])) {
        assert_eq!(x.buf, Buf::Scratch, "rank {}: folds may overwrite their operand", self.rank);
        assert!(acc.len == x.len && !overlap(acc, x));
        self.check(acc, true, "fold into");
        self.check(x, true, "fold of");
        let world = &mut *self.world;
        let bufs = &mut world.nodes[self.rank].bufs;
        let mut operand = bufs[2][x.off..x.off + x.len].to_vec();
        f(&world.reducer, &mut bufs[index(acc.buf)][acc.off..acc.off + acc.len], &mut operand);
        // Both folds may leave anything in the operand.
        bufs[2][x.off..x.off + x.len].fill(0xee);
    }
}

impl Transport for View<'_> {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.world.n
    }

    fn send(&mut self, peer: usize, step: u32, span: Span) -> Result<Token> {
        assert!(peer < self.world.n && peer != self.rank, "rank {} sends to {peer}", self.rank);
        let key = (peer, self.rank, step);
        assert!(self.world.used.insert((key, false)), "rank {} sends twice: {key:?}", self.rank);
        self.check(span, false, "send of");
        let token = self.token(&[(span, false)]);
        let counts = &mut self.node().counts;
        counts.messages += 1;
        counts.bytes += span.len;
        counts.open_sends += 1;
        counts.most_sends = counts.most_sends.max(counts.open_sends);
        counts.peers.insert(peer);
        let world = &mut *self.world;
        let eager = match world.mode {
            Mode::Eager => true,
            Mode::Rendezvous => false,
            Mode::Mixed => world.rng.below(2) == 0,
        };
        let (from, to) = (self.rank, peer);
        let op = SendOp { from, to, step, span, token, eager, wire: Vec::new(), taken: 0, handed: false };
        let q = self.rank * world.n + peer;
        if world.queues[q].is_empty() {
            world.busy.retain(|&b| b != q);
            world.busy.push(q);
        }
        world.queues[q].push_back(world.sends.len());
        world.sends.push(op);
        Ok(Token(token))
    }

    fn recv(&mut self, peer: usize, step: u32, span: Span) -> Result<Token> {
        self.post(peer, step, span, None)
    }

    fn recv_fold(&mut self, peer: usize, step: u32, dst: Span, own: Span) -> Result<Token> {
        self.post(peer, step, dst, Some(own))
    }

    fn is_done(&self, t: Token) -> bool {
        let state = &self.world.nodes[self.rank].tokens[t.0 as usize];
        match state.get() {
            State::Pending => false,
            State::Done => {
                state.set(State::Told);
                true
            }
            State::Told => panic!("rank {} asks again about {t:?}", self.rank),
        }
    }

    fn copy(&mut self, dst: Span, src: Span) {
        assert!(dst.len == src.len && !overlap(dst, src));
        self.check(dst, true, "copy to");
        self.check(src, false, "copy of");
        let node = self.node();
        let data = node.bufs[index(src.buf)][src.off..src.off + src.len].to_vec();
        node.bufs[index(dst.buf)][dst.off..dst.off + dst.len].copy_from_slice(&data);
        node.counts.copied += dst.len;
    }

    fn fold(&mut self, acc: Span, x: Span) {
        self.local(acc, x, Reducer::fold);
    }

    fn fold_rev(&mut self, acc: Span, x: Span) {
        self.local(acc, x, Reducer::fold_rev);
    }

    fn finish(&mut self, span: Span, ranks: usize) {
        self.check(span, true, "finish of");
        let world = &mut *self.world;
        assert!((1..=world.n).contains(&ranks), "rank {}: {ranks} contributions", self.rank);
        let node = &mut world.nodes[self.rank];
        world.reducer.finish(&mut node.bufs[index(span.buf)][span.off..span.off + span.len], ranks);
        node.counts.finished += span.len;
    }
}
