//! Rings: every rank sends to its right neighbour only, so every link carries the least there is.
//!
//! The buffer consists of `n` chunks. In ring step `s` rank `r` sends chunk `r − s` and receives chunk
//! `r − s − 1`; what it receives in one step it sends in the next. `n − 1` steps with folds reduce each
//! chunk on its way round, `n − 1` without distribute it.
//!
//! Chunks are cut into slices of [`GROUP`] segments, and the ring runs once per slice, without a gap
//! between them. The order of all messages on a link is therefore (slice, step, segment): a segment may
//! go on as soon as it has come in and is folded, while it is still in the cache, and the next slice's
//! first step keeps the link busy meanwhile. It also bounds what must be held between receiving a
//! segment and sending it on to [`GROUP`] segments.

use std::task::Poll;

use comm_core::Result;

use super::blocks::Layout;
use super::post::{AHEAD, Window};
use super::{Buf, Schedule, Shape, Span, Transport};

/// Segments of one chunk that make a slice.
const GROUP: usize = 4;

/// Segments of scratch that an out-of-place reduce_scatter passes partial sums through. With fewer than
/// `GROUP + 1` a ring in which every send waits for its receiver stands still.
const SLOTS: usize = GROUP + AHEAD;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Goal {
    AllReduce,
    ReduceScatter,
    AllGather,
}

/// The pipelined ring for all_reduce, reduce_scatter and all_gather; for the latter two with uneven blocks too.
///
/// Does not fold in rank order: for operators that commute. Each element is folded along one path and
/// finished once, by one rank, before it is distributed, so all ranks get the same bits.
///
/// Scratch: none, but up to eight segments for an out-of-place reduce_scatter.
#[derive(Debug)]
pub struct Ring {
    shape: Shape,
    goal: Goal,
    /// The chunks of reduce_scatter and all_gather; an all_reduce makes its own, which differ by a unit at most.
    blocks: Layout,
    segment: usize,
    steps: usize,
    slices: usize,
    recv: Flow,
    send: Flow,
    /// Slots of scratch taken by receives, and by sends, in the order in which they were posted, and
    /// freed by sends that are done.
    taken: usize,
    passed: usize,
    freed: usize,
    started: bool,
}

/// A message's place in the order: slice, ring step, segment.
type Place = (usize, usize, usize);

/// One direction: the first message that is not posted, and the first that is not done.
#[derive(Debug)]
struct Flow {
    next: Place,
    oldest: Place,
    posted: u32,
    window: Window,
}

impl Ring {
    pub(super) fn all_reduce(shape: Shape) -> Self {
        Self::new(shape, Goal::AllReduce, Layout::Even(0))
    }

    /// In place, `Output` holds all blocks; the result is left in this rank's own, and arbitrary content in the others.
    pub(super) fn reduce_scatter(shape: Shape, blocks: Layout) -> Self {
        Self::new(shape, Goal::ReduceScatter, blocks)
    }

    pub(super) fn all_gather(shape: Shape, blocks: Layout) -> Self {
        Self::new(shape, Goal::AllGather, blocks)
    }

    fn new(shape: Shape, goal: Goal, blocks: Layout) -> Self {
        let once = shape.size - 1;
        let flow = || Flow { next: (0, 0, 0), oldest: (0, 0, 0), posted: 0, window: Window::default() };
        let mut ring = Self {
            shape,
            goal,
            blocks,
            segment: 0,
            steps: if goal == Goal::AllReduce { 2 * once } else { once },
            slices: 0,
            recv: flow(),
            send: flow(),
            taken: 0,
            passed: 0,
            freed: 0,
            started: false,
        };
        let longest = ring.longest();
        ring.segment = shape.segment_of(if goal == Goal::AllReduce { shape.bytes } else { longest });
        // With one rank there is nothing to exchange.
        ring.slices = if once == 0 { 0 } else { longest.div_ceil(GROUP * ring.segment) };
        (ring.send.next, ring.recv.next) = (ring.seek((0, 0, 0), 0), ring.seek((0, 0, 0), 1));
        (ring.send.oldest, ring.recv.oldest) = (ring.send.next, ring.recv.next);
        ring
    }

    /// Offset and length of a chunk.
    fn chunk(&self, c: usize) -> (usize, usize) {
        let Shape { bytes, unit, size, .. } = self.shape;
        match self.goal {
            Goal::AllReduce => {
                let (each, more) = (bytes / unit / size, bytes / unit % size);
                (unit * (c * each + c.min(more)), unit * (each + usize::from(c < more)))
            }
            Goal::ReduceScatter | Goal::AllGather => (self.blocks.offset(c), self.blocks.len(c)),
        }
    }

    /// The length of the longest chunk.
    fn longest(&self) -> usize {
        match self.goal {
            // None is longer than the first.
            Goal::AllReduce => self.chunk(0).1,
            Goal::ReduceScatter | Goal::AllGather => self.blocks.longest(),
        }
    }

    /// The chunk that is sent in step `s`, and received in step `s − 1`.
    fn chunk_of(&self, s: usize) -> usize {
        let n = self.shape.size;
        // One back, so that the last chunk received is the rank's own.
        let shift = usize::from(self.goal == Goal::ReduceScatter);
        (self.shape.rank + 2 * n - s - shift) % n
    }

    /// Where the message at a place lies in its chunk; `later` is 0 for sends and 1 for receives.
    fn within(&self, (g, s, j): Place, later: usize) -> Option<(usize, usize)> {
        let (_, len) = self.chunk(self.chunk_of(s + later));
        let off = (g * GROUP + j) * self.segment;
        if off < len { Some((off, self.segment.min(len - off))) } else { None }
    }

    /// The first message at or after a place. Chunks differ in length, so some places are empty.
    fn seek(&self, mut at: Place, later: usize) -> Place {
        while at.0 < self.slices {
            if at.1 == self.steps {
                at = (at.0 + 1, 0, 0);
            } else if at.2 < GROUP && self.within(at, later).is_some() {
                break;
            } else {
                at = (at.0, at.1 + 1, 0);
            }
        }
        at
    }

    fn after(&self, (g, s, j): Place, later: usize) -> Place {
        self.seek((g, s, j + 1), later)
    }

    const fn folds(&self, s: usize) -> bool {
        match self.goal {
            Goal::AllReduce => s + 1 < self.shape.size,
            Goal::ReduceScatter => true,
            Goal::AllGather => false,
        }
    }

    /// Whether what is received in step `s` is complete with it.
    const fn completes(&self, s: usize) -> bool {
        self.folds(s) && s + 2 == self.shape.size
    }

    /// Whether what is received in step `s` passes through scratch.
    fn is_relayed(&self, s: usize) -> bool {
        self.goal == Goal::ReduceScatter && !self.shape.in_place && !self.completes(s)
    }

    fn slot(&self, i: usize, len: usize) -> Span {
        Span::new(Buf::Scratch, i % SLOTS * self.segment, len)
    }

    /// Where chunk data lies that is not relayed.
    fn at_rest(&self, buf: Buf, s: usize, later: usize, (off, len): (usize, usize)) -> Span {
        // Out of place, one side of these operations is a single shard.
        let shard = match self.goal {
            Goal::AllReduce => false,
            Goal::ReduceScatter => buf == Buf::Output && !self.shape.in_place,
            Goal::AllGather => buf == Buf::Input,
        };
        let start = if shard { 0 } else { self.chunk(self.chunk_of(s + later)).0 };
        Span::new(buf, start + off, len)
    }

    /// Whether a receive at this place would overwrite what is still being sent: in the second round of
    /// an all_reduce, chunks arrive where the first round's sends took theirs.
    fn is_blocked(&self, (g, s, j): Place) -> bool {
        if self.is_relayed(s) {
            return self.taken - self.freed >= SLOTS;
        }
        let (first, n) = (s + 1 - self.shape.size.min(s + 1), self.shape.size);
        let from_output = first > 0 || self.shape.in_place;
        self.goal == Goal::AllReduce && s + 1 >= n && from_output && self.send.oldest <= (g, first, j)
    }

    fn post_recv(&mut self, t: &mut dyn Transport, part: (usize, usize)) -> Result<()> {
        let at @ (_, s, _) = self.recv.next;
        let Shape { rank, size, .. } = self.shape;
        let left = (rank + size - 1) % size;
        let dst = if self.is_relayed(s) {
            self.taken += 1;
            self.slot(self.taken - 1, part.1)
        } else {
            self.at_rest(Buf::Output, s, 1, part)
        };
        let token = if self.folds(s) {
            t.recv_fold(left, self.recv.posted, dst, self.at_rest(self.shape.own(), s, 1, part))?
        } else {
            t.recv(left, self.recv.posted, dst)?
        };
        self.recv.window.push(token);
        self.recv.posted += 1;
        self.recv.next = self.after(at, 1);
        Ok(())
    }

    fn post_send(&mut self, t: &mut dyn Transport, part: (usize, usize)) -> Result<()> {
        let at @ (_, s, _) = self.send.next;
        let right = (self.shape.rank + 1) % self.shape.size;
        let src = if s > 0 && self.is_relayed(s - 1) {
            self.passed += 1;
            self.slot(self.passed - 1, part.1)
        } else {
            self.at_rest(if s == 0 { self.shape.own() } else { Buf::Output }, s, 0, part)
        };
        self.send.window.push(t.send(right, self.send.posted, src)?);
        self.send.posted += 1;
        self.send.next = self.after(at, 0);
        Ok(())
    }

    /// One round of whatever is possible; true if anything was.
    fn turn(&mut self, t: &mut dyn Transport) -> Result<bool> {
        let mut moved = false;
        while self.recv.window.retire(t) {
            let at @ (_, s, _) = self.recv.oldest;
            if self.completes(s)
                && let Some(part) = self.within(at, 1)
            {
                t.finish(self.at_rest(Buf::Output, s, 1, part), self.shape.size);
            }
            self.recv.oldest = self.after(at, 1);
            moved = true;
        }
        while self.send.window.retire(t) {
            let at @ (_, s, _) = self.send.oldest;
            self.freed += usize::from(s > 0 && self.is_relayed(s - 1));
            self.send.oldest = self.after(at, 0);
            moved = true;
        }
        while !self.recv.window.is_full()
            && self.recv.next.0 < self.slices
            && !self.is_blocked(self.recv.next)
            && let Some(part) = self.within(self.recv.next, 1)
        {
            self.post_recv(t, part)?;
            moved = true;
        }
        while !self.send.window.is_full()
            && self.send.next.0 < self.slices
            && self.has_come(self.send.next)
            && let Some(part) = self.within(self.send.next, 0)
        {
            self.post_send(t, part)?;
            moved = true;
        }
        Ok(moved)
    }

    /// Whether what is to be sent at this place is here.
    fn has_come(&self, (g, s, j): Place) -> bool {
        s == 0 || self.recv.oldest > (g, s - 1, j)
    }

    fn start(&mut self, t: &mut dyn Transport) {
        let Shape { rank, size, bytes, in_place, .. } = self.shape;
        let (block, bytes) = match self.goal {
            Goal::AllReduce => (0, bytes),
            Goal::ReduceScatter => (0, self.blocks.len(rank)),
            Goal::AllGather => (self.blocks.offset(rank), self.blocks.len(rank)),
        };
        let dst = Span::new(Buf::Output, block, bytes);
        if bytes > 0 && !in_place && (size == 1 || self.goal == Goal::AllGather) {
            t.copy(dst, Span::new(Buf::Input, 0, bytes));
        }
        if bytes > 0 && size == 1 && self.goal != Goal::AllGather {
            t.finish(dst, size);
        }
    }

    fn run(&mut self, t: &mut dyn Transport) -> Result<bool> {
        while self.turn(t)? {}
        if !self.started {
            // After the first sends, so that the copy does not hold them up.
            self.started = true;
            self.start(t);
        }
        Ok(self.recv.oldest.0 >= self.slices && self.send.oldest.0 >= self.slices)
    }
}

impl Schedule for Ring {
    fn poll(&mut self, t: &mut dyn Transport) -> Poll<Result<()>> {
        match self.run(t) {
            Ok(true) => Poll::Ready(Ok(())),
            Ok(false) => Poll::Pending,
            Err(e) => Poll::Ready(Err(e)),
        }
    }

    fn scratch(&self) -> usize {
        // Two ranks relay nothing.
        let relays = self.goal == Goal::ReduceScatter && !self.shape.in_place && self.shape.size > 2;
        if relays && self.slices > 0 { SLOTS * self.segment } else { 0 }
    }

    fn name(&self) -> &'static str {
        "ring"
    }
}
