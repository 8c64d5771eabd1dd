//! The simulation: schedules, polled in the order of simulated time.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::task::Poll;

use collectives::{AnySchedule, Schedule, Span, Token, Transport};
use rustcomms::{Error, Result};

use super::data::Data;
use super::model::Costs;
use super::queue::{Queue, Timed};

/// How ranks resemble each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Symmetry {
    /// What one rank does with the rank `d` above it, each does with the rank `d` above it.
    Rotation,
    /// What one rank does with the rank whose number differs in some bits, each does with the rank whose number differs in these.
    Cube,
}

impl Symmetry {
    /// How far `to` is from `from`.
    const fn distance(self, from: u32, to: u32, n: u32) -> u32 {
        match self {
            Self::Rotation => {
                if to >= from {
                    to - from
                } else {
                    to + n - from
                }
            }
            Self::Cube => from ^ to,
        }
    }

    /// The rank from which `to` is at this distance.
    const fn origin(self, to: u32, distance: u32, n: u32) -> u32 {
        match self {
            Self::Rotation => self.distance(distance, to, n),
            Self::Cube => to ^ distance,
        }
    }
}

/// When a schedule is polled again. All give the same result: schedules of the kinds named here can do nothing before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Patience {
    /// When a transfer is done that it has asked for. Right for all.
    None,
    /// When all its sends are done, or a receive that it has asked for. For schedules that post all sends at once.
    Sends,
    /// When everything is done. For schedules that post everything at once.
    All,
}

/// What a run has cost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// When the last rank was done, in picoseconds.
    pub time: u64,
    /// Messages of all ranks.
    pub messages: u64,
    /// Bytes of all ranks' messages.
    pub bytes: u64,
    /// The longest chain of messages of which each was posted by a rank that had got the one before.
    pub rounds: u32,
    /// Most messages that a rank has sent.
    pub most_sent: u64,
    /// Most messages that a rank has received.
    pub most_received: u64,
    /// Most bytes that a rank has sent.
    pub most_bytes_sent: u64,
    /// Most bytes that a rank has received.
    pub most_bytes_received: u64,
}

/// A message on its way.
#[derive(Clone, Copy, Debug)]
struct Event {
    time: u64,
    /// Which of the simulated ranks it happens to.
    node: u32,
    /// From which distance a message comes.
    distance: u32,
    step: u32,
    /// The message's place in its chain.
    depth: u32,
    kind: Kind,
}

#[derive(Clone, Copy, Debug)]
enum Kind {
    /// The first byte of so many is at the port.
    Head(u64),
    /// The message of so many is in.
    Whole(u64),
    /// A send is done.
    Wake,
}

impl Timed for Event {
    fn time(&self) -> u64 {
        self.time
    }
}

impl Event {
    /// The order of what happens to a rank at the same time. In distances, so that symmetric ranks stay so.
    const fn order(&self) -> (u32, u8, u32, u32) {
        let kind = match self.kind {
            Kind::Wake => 0,
            Kind::Whole(_) => 1,
            Kind::Head(_) => 2,
        };
        (self.node, kind, self.distance, self.step)
    }
}

/// A posted transfer.
#[derive(Clone, Copy, Debug)]
struct Slot {
    /// When it is or was done; [`OPEN`] for a receive whose message has not come.
    done: u64,
    depth: u32,
    /// Bytes to fold when it comes. The highest bit tells whether the schedule waits for it.
    fold: u32,
}

const OPEN: u64 = u64::MAX;
const ASKED: u32 = 1 << 31;
/// In the table of messages: it has come before its receive, with this depth.
const CAME: u32 = 1 << 31;

#[derive(Default, Clone, Copy, Debug)]
struct Mix(u64);

impl Hasher for Mix {
    fn finish(&self) -> u64 {
        self.0 ^ (self.0 >> 32)
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|b| self.write_u32(u32::from(*b)));
    }

    fn write_u32(&mut self, x: u32) {
        self.0 = (self.0.rotate_left(32) ^ u64::from(x)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }
}

/// Receives that are posted, by distance and step, and messages that came before.
type Expected = HashMap<(u32, u32), u32, BuildHasherDefault<Mix>>;

/// A simulated rank.
#[derive(Debug)]
struct Node {
    rank: u32,
    /// Until when the processor and the ports are busy.
    cpu: u64,
    port_out: u64,
    port_in: u64,
    slots: Vec<Cell<Slot>>,
    free: RefCell<Vec<u32>>,
    expected: Expected,
    open_recvs: usize,
    depth: Cell<u32>,
    /// Sends for which a poll is due, and the last one for which one was ordered.
    wakes: RefCell<Vec<u64>>,
    ordered: Cell<u64>,
    ready: bool,
    sent: u64,
    bytes_sent: u64,
    received: u64,
    bytes_received: u64,
}

impl Node {
    fn new(rank: u32) -> Self {
        Self {
            rank,
            cpu: 0,
            port_out: 0,
            port_in: 0,
            slots: Vec::new(),
            free: RefCell::default(),
            expected: Expected::default(),
            open_recvs: 0,
            depth: Cell::new(0),
            wakes: RefCell::default(),
            ordered: Cell::new(0),
            ready: false,
            sent: 0,
            bytes_sent: 0,
            received: 0,
            bytes_received: 0,
        }
    }

    fn slot(&mut self, slot: Slot) -> u32 {
        match self.free.get_mut().pop() {
            Some(i) => {
                self.slots[i as usize].set(slot);
                i
            }
            None => {
                self.slots.push(Cell::new(slot));
                self.slots.len() as u32 - 1
            }
        }
    }
}

/// What all ranks share.
#[derive(Debug)]
struct Shared {
    costs: Costs,
    size: u32,
    symmetry: Symmetry,
    patience: Patience,
    /// Whether every rank is simulated, or one for all.
    all: bool,
    queue: Queue<Event>,
    rounds: u32,
    data: Option<Data>,
}

/// A simulation of one operation.
#[derive(Debug)]
pub struct Engine {
    nodes: Vec<Node>,
    shared: Shared,
}

impl Engine {
    /// A world of `size` ranks that are all simulated.
    #[must_use]
    pub fn all(costs: Costs, size: u32, symmetry: Symmetry, patience: Patience) -> Self {
        Self::new(costs, size, symmetry, patience, 0..size, true)
    }

    /// A world of which one rank is simulated, and all others are taken to behave like it: what it sends to a distance, it
    /// receives from the rank from which it has that distance, at the same time.
    ///
    /// This is exact for schedules that have the symmetry.
    #[must_use]
    pub fn one(costs: Costs, size: u32, symmetry: Symmetry, patience: Patience, rank: u32) -> Self {
        Self::new(costs, size, symmetry, patience, rank..rank + 1, false)
    }

    fn new(
        costs: Costs,
        size: u32,
        symmetry: Symmetry,
        patience: Patience,
        ranks: std::ops::Range<u32>,
        all: bool,
    ) -> Self {
        let shared = Shared { costs, size, symmetry, patience, all, queue: Queue::new(), rounds: 0, data: None };
        Self { nodes: ranks.map(Node::new).collect(), shared }
    }

    /// Moves real bytes too.
    pub(super) fn with_data(mut self, data: Data) -> Self {
        self.shared.data = Some(data);
        self
    }

    pub(super) fn into_data(self) -> Option<Data> {
        self.shared.data
    }

    /// Runs a schedule for each simulated rank, which `make` makes, to the end.
    ///
    /// # Errors
    ///
    /// Those of `make`; `InvalidArgument` when nothing moves any more although ranks are not done, or messages are left over, which is
    /// a bug in a schedule, or the symmetry is not that of the schedule.
    pub fn run(&mut self, mut make: impl FnMut(usize) -> Result<AnySchedule>) -> Result<Counts> {
        let Self { nodes, shared } = self;
        let mut schedules = nodes.iter().map(|n| make(n.rank as usize)).collect::<Result<Vec<_>>>()?;
        for (i, s) in schedules.iter_mut().enumerate() {
            if let Some(data) = &mut shared.data {
                data.set_scratch(i, s.scratch());
            }
            poll(&mut nodes[i], shared, i, s, 0)?;
        }
        let mut batch = Vec::new();
        while shared.queue.pop(&mut batch) {
            batch.sort_unstable_by_key(Event::order);
            for e in batch.drain(..) {
                let i = e.node as usize;
                handle(&mut nodes[i], shared, i, &mut schedules[i], e)?;
            }
        }
        if let Some(n) = nodes.iter().find(|n| !n.ready || !n.expected.is_empty()) {
            return Err(Error::invalid(format!(
                "rank {} of {} {} after the last message, with {} unmatched",
                n.rank,
                shared.size,
                if n.ready { "is done" } else { "still waits" },
                n.expected.len()
            )));
        }
        Ok(counts(nodes, shared))
    }
}

fn counts(nodes: &[Node], shared: &Shared) -> Counts {
    let most = |f: fn(&Node) -> u64| nodes.iter().map(f).max().unwrap_or(0);
    let times = if shared.all { 1 } else { u64::from(shared.size) };
    Counts {
        time: most(|n| n.cpu),
        messages: times * nodes.iter().map(|n| n.sent).sum::<u64>(),
        bytes: times * nodes.iter().map(|n| n.bytes_sent).sum::<u64>(),
        rounds: shared.rounds,
        most_sent: most(|n| n.sent),
        most_received: most(|n| n.received),
        most_bytes_sent: most(|n| n.bytes_sent),
        most_bytes_received: most(|n| n.bytes_received),
    }
}

fn handle(node: &mut Node, shared: &mut Shared, i: usize, schedule: &mut AnySchedule, e: Event) -> Result<()> {
    match e.kind {
        Kind::Head(bytes) => {
            let bytes = bytes as usize;
            node.port_in = node.port_in.max(e.time) + shared.costs.port(bytes);
            node.received += 1;
            node.bytes_received += bytes as u64;
            shared.queue.push(Event { time: node.port_in, kind: Kind::Whole(bytes as u64), ..e });
        }
        Kind::Whole(bytes) => {
            // It was taken out as it came if the processor was free, but for the end of it.
            let (copied, rest) = (shared.costs.copy(bytes as usize), shared.costs.last_copy(bytes as usize));
            node.cpu = (node.cpu + copied).max(e.time + rest) + shared.costs.overhead;
            let key = (e.distance, e.step);
            let Some(at) = node.expected.remove(&key) else {
                node.expected.insert(key, CAME | e.depth);
                return Ok(());
            };
            let cell = &node.slots[at as usize];
            let slot = cell.get();
            node.cpu += shared.costs.fold((slot.fold & !ASKED) as usize);
            cell.set(Slot { done: node.cpu, depth: e.depth, fold: slot.fold });
            node.open_recvs -= 1;
            if let Some(data) = &mut shared.data {
                data.arrive(i, shared.symmetry.origin(node.rank, e.distance, shared.size), e.step);
            }
            let waits = slot.fold & ASKED != 0 && (shared.patience != Patience::All || node.open_recvs == 0);
            if waits {
                poll(node, shared, i, schedule, e.time)?;
            }
        }
        Kind::Wake => {
            if shared.patience != Patience::All || node.open_recvs == 0 {
                poll(node, shared, i, schedule, e.time)?;
            }
        }
    }
    Ok(())
}

fn poll(node: &mut Node, shared: &mut Shared, i: usize, schedule: &mut AnySchedule, at: u64) -> Result<()> {
    if node.ready {
        return Ok(());
    }
    node.cpu = node.cpu.max(at);
    let polled = schedule.poll(&mut View { node, shared, index: i });
    for time in node.wakes.get_mut().drain(..) {
        shared.queue.push(Event { time, node: i as u32, distance: 0, step: 0, depth: 0, kind: Kind::Wake });
    }
    match polled {
        Poll::Pending => Ok(()),
        Poll::Ready(result) => {
            node.ready = true;
            result
        }
    }
}

/// One rank's side of the simulation.
#[derive(Debug)]
struct View<'a> {
    node: &'a mut Node,
    shared: &'a mut Shared,
    index: usize,
}

impl View<'_> {
    fn peer(&self, peer: usize, step: u32) -> Result<u32> {
        match u32::try_from(peer) {
            Ok(p) if p < self.shared.size && p != self.node.rank => Ok(p),
            _ => Err(Error::invalid(format!("rank {} exchanges step {step} with rank {peer}", self.node.rank))),
        }
    }

    fn post(&mut self, peer: usize, step: u32, span: Span, own: Option<Span>) -> Result<Token> {
        let from = self.peer(peer, step)?;
        let fold = match own {
            None => 0,
            Some(own) => u32::try_from(own.len)
                .ok()
                .filter(|f| f & ASKED == 0)
                .ok_or_else(|| Error::invalid(format!("{} bytes are too many to fold at once", own.len)))?,
        };
        if let Some(data) = &mut self.shared.data {
            data.expect(self.index, from, step, span, own);
        }
        let key = (self.shared.symmetry.distance(from, self.node.rank, self.shared.size), step);
        // One that came before was taken in then; it is folded now.
        let came = self.node.expected.get(&key).copied().filter(|c| c & CAME != 0);
        let slot = match came {
            Some(came) => {
                self.node.expected.remove(&key);
                self.node.cpu += self.shared.costs.fold(fold as usize);
                if let Some(data) = &mut self.shared.data {
                    data.arrive(self.index, from, step);
                }
                Slot { done: self.node.cpu, depth: came & !CAME, fold }
            }
            None => Slot { done: OPEN, depth: 0, fold },
        };
        let at = self.node.slot(slot);
        if came.is_none() {
            self.node.open_recvs += 1;
            if self.node.expected.insert(key, at).is_some() {
                return Err(Error::invalid(format!(
                    "rank {} receives step {step} from rank {peer} twice",
                    self.node.rank
                )));
            }
        }
        Ok(Token(at))
    }

    fn charge_fold(&mut self, bytes: usize) {
        self.node.cpu += self.shared.costs.fold(bytes);
    }
}

impl Transport for View<'_> {
    fn rank(&self) -> usize {
        self.node.rank as usize
    }

    fn size(&self) -> usize {
        self.shared.size as usize
    }

    fn send(&mut self, peer: usize, step: u32, span: Span) -> Result<Token> {
        let to = self.peer(peer, step)?;
        let Self { node, shared, .. } = self;
        // The port takes bytes as the processor hands them on, so the first leaves before the processor is done.
        let start = node.cpu.max(node.port_out);
        node.cpu += shared.costs.overhead + shared.costs.copy(span.len);
        node.port_out = start + shared.costs.port(span.len);
        node.sent += 1;
        node.bytes_sent += span.len as u64;
        let depth = node.depth.get() + 1;
        shared.rounds = shared.rounds.max(depth);
        if let Some(data) = &mut shared.data {
            data.send(self.index, to, step, span);
        }
        shared.queue.push(Event {
            time: start + shared.costs.alpha,
            // Of one for all, the peer that has this rank at the same distance has sent the same.
            node: if shared.all { to } else { 0 },
            distance: shared.symmetry.distance(node.rank, to, shared.size),
            step,
            depth,
            kind: Kind::Head(span.len as u64),
        });
        let done = node.port_out.max(node.cpu);
        Ok(Token(node.slot(Slot { done, depth: 0, fold: 0 })))
    }

    fn recv(&mut self, peer: usize, step: u32, span: Span) -> Result<Token> {
        self.post(peer, step, span, None)
    }

    fn recv_fold(&mut self, peer: usize, step: u32, dst: Span, own: Span) -> Result<Token> {
        self.post(peer, step, dst, Some(own))
    }

    fn is_done(&self, t: Token) -> bool {
        let (node, cell) = (&*self.node, &self.node.slots[t.0 as usize]);
        let slot = cell.get();
        if slot.done <= node.cpu {
            node.depth.set(node.depth.get().max(slot.depth));
            node.free.borrow_mut().push(t.0);
            return true;
        }
        let asked = Slot { fold: slot.fold | ASKED, ..slot };
        if slot.done == OPEN {
            cell.set(asked);
        } else if self.shared.patience == Patience::None {
            // Once per send.
            if slot.fold & ASKED == 0 {
                cell.set(asked);
                node.wakes.borrow_mut().push(slot.done);
            }
        } else if node.ordered.get() != node.port_out {
            // Once for all sends: the port is free when the last is done.
            node.ordered.set(node.port_out);
            node.wakes.borrow_mut().push(node.port_out);
        }
        false
    }

    fn copy(&mut self, dst: Span, src: Span) {
        if let Some(data) = &mut self.shared.data {
            data.copy(self.index, dst, src);
        }
    }

    fn fold(&mut self, acc: Span, x: Span) {
        self.charge_fold(acc.len);
        if let Some(data) = &mut self.shared.data {
            data.fold(self.index, acc, x, false);
        }
    }

    fn fold_rev(&mut self, acc: Span, x: Span) {
        self.charge_fold(acc.len);
        if let Some(data) = &mut self.shared.data {
            data.fold(self.index, acc, x, true);
        }
    }

    fn finish(&mut self, span: Span, ranks: usize) {
        if let Some(data) = &mut self.shared.data {
            data.finish(self.index, span, ranks);
        }
    }
}
