//! Everybody sends straight to whoever needs it, and the receiver folds in rank order.
//!
//! One hop, right for operators that do not commute, and the same bits wherever the same values are
//! folded. Costs `n − 1` messages per rank and segment.

use std::ops::Range;
use std::task::Poll;

use comm_core::Result;

use super::blocks::Layout;
use super::post::Tokens;
use super::waves::{Piece, Plan, Waves};
use super::{Buf, Schedule, Shape, Span, Token, Transport};

/// Segments under way; two let one arrive while the other is folded.
const LANES: usize = 2;

/// Direct exchange with folds in rank order.
///
/// Scratch: `n − 1` segments for each of up to two segments under way, on ranks that fold.
#[derive(Debug)]
pub struct Direct {
    waves: Waves<Exchange, LANES>,
    name: &'static str,
}

impl Direct {
    /// all_reduce: everybody sends everything to everybody and folds everything.
    pub(super) fn all_reduce(shape: Shape) -> Self {
        Self::new(shape, Goal::All, Layout::Even(shape.bytes), "direct")
    }

    /// reduce_scatter and reduce_scatter_v: block `j` goes straight to rank `j`, which folds it.
    ///
    /// In place, `Output` holds all blocks and the result replaces this rank's own; the other blocks stay as they are.
    pub(super) fn reduce_scatter(shape: Shape, blocks: Layout) -> Self {
        Self::new(shape, Goal::Blocks, blocks, "direct")
    }

    /// reduce: everybody sends to the root, which folds.
    pub(super) fn reduce(shape: Shape, root: usize) -> Self {
        Self::new(shape, Goal::Root(root), Layout::Even(shape.bytes), "ordered")
    }

    fn new(shape: Shape, goal: Goal, blocks: Layout, name: &'static str) -> Self {
        let cut = shape.cut_of(blocks.longest());
        Self { waves: Waves::new(Exchange { shape, goal, blocks, segment: cut.segment }, cut), name }
    }
}

impl Schedule for Direct {
    fn poll(&mut self, t: &mut dyn Transport) -> Poll<Result<()>> {
        self.waves.poll(t)
    }

    fn scratch(&self) -> usize {
        let plan = &self.waves.plan;
        if plan.folds() { self.waves.lanes() * plan.slots() * self.waves.segment() } else { 0 }
    }

    fn name(&self) -> &'static str {
        self.name
    }
}

/// Who gets the result of what.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Goal {
    /// Everybody the whole.
    All,
    /// Rank `j` block `j`.
    Blocks,
    /// One rank the whole.
    Root(usize),
}

#[derive(Debug)]
struct Exchange {
    shape: Shape,
    goal: Goal,
    /// Whose block is what part of the buffer, where ranks get different parts.
    blocks: Layout,
    segment: usize,
}

#[derive(Debug, Default)]
struct Lane {
    sends: Tokens,
    /// By rank, from `first` on; this rank's own entry is a filler.
    recvs: Tokens,
    /// The next rank whose contribution is due.
    next: usize,
    finished: bool,
}

impl Exchange {
    fn folds(&self) -> bool {
        match self.goal {
            Goal::Root(r) => r == self.shape.rank,
            Goal::All | Goal::Blocks => true,
        }
    }

    const fn slots(&self) -> usize {
        self.shape.size - 1
    }

    /// Where the contribution of rank `p` to this rank's result waits. Rank 0's needs no slot on others, and
    /// rank 1's none on rank 0 (both go straight to the result), so these two may share one.
    fn slot(&self, p: usize, at: Piece, result: Span) -> Span {
        let i = at.lane * self.slots() + p.saturating_sub(1);
        Span { buf: Buf::Scratch, off: i * self.segment, ..result }
    }

    /// What this rank contributes to rank `p`'s result; `None` if that has no such segment.
    fn own(&self, p: usize, at: Piece) -> Option<Span> {
        let (off, len) = match self.goal {
            Goal::All | Goal::Root(_) => (at.off, at.len),
            Goal::Blocks => self.blocks.part(p, at.off, at.len)?,
        };
        Some(Span::new(self.shape.own(), off, len))
    }

    /// Where the result goes; `None` if this rank's has no such segment.
    fn result(&self, at: Piece) -> Option<Span> {
        let own = self.own(self.shape.rank, at)?;
        // In place, it replaces the contribution; else a block is all that there is of the output.
        Some(if self.shape.in_place { own } else { Span { buf: Buf::Output, off: at.off, ..own } })
    }

    /// Whether the result replaces what others are still being sent; then a copy is sent.
    fn sends_copy(&self) -> bool {
        self.goal == Goal::All && self.shape.in_place && self.shape.size > 1
    }

    /// How far above this rank those are that need its contribution. Of a reduce it is one at most, and nobody looks at all ranks for it.
    fn receivers(&self) -> Range<usize> {
        let Shape { rank: me, size: n, .. } = self.shape;
        match self.goal {
            Goal::All | Goal::Blocks => 1..n,
            Goal::Root(r) if r == me => 0..0,
            Goal::Root(r) => {
                let d = (r + n - me) % n;
                d..d + 1
            }
        }
    }

    /// The first rank that contributes by message: 0, or 1 on rank 0.
    fn first(&self) -> usize {
        usize::from(self.shape.rank == 0)
    }
}

impl Plan for Exchange {
    type Lane = Lane;

    fn start(&self, t: &mut dyn Transport, lane: &mut Lane, at: Piece) -> Result<()> {
        let Shape { rank: me, size: n, in_place, .. } = self.shape;
        let step = at.index as u32;
        lane.sends.clear();
        lane.recvs.clear();
        lane.next = self.first();
        lane.finished = false;
        let copy = self.sends_copy();
        let (own, dst) = (self.own(me, at), self.result(at));
        if let (true, Some(own)) = (copy, own) {
            t.copy(self.slot(me, at, own), own);
        }
        // Sends first, they are what others wait for; each rank starts at another peer.
        for p in self.receivers().map(|d| (me + d) % n) {
            if let Some(own) = self.own(p, at) {
                let span = if copy { self.slot(me, at, own) } else { own };
                lane.sends.push(t.send(p, step, span)?);
            }
        }
        let (true, Some(own), Some(dst)) = (self.folds(), own, dst) else { return Ok(()) };
        if n == 1 {
            if !in_place {
                t.copy(dst, own);
            }
            return Ok(());
        }
        if me > 0 && !copy {
            t.copy(self.slot(me, at, dst), own);
        }
        for p in self.first()..n {
            lane.recvs.push(match p {
                _ if p == me => Token(0),
                0 => t.recv(p, step, dst)?,
                1 if me == 0 => t.recv_fold(p, step, dst, own)?,
                _ => t.recv(p, step, self.slot(p, at, dst))?,
            });
        }
        Ok(())
    }

    fn advance(&self, t: &mut dyn Transport, lane: &mut Lane, at: Piece) -> Result<bool> {
        let Shape { rank: me, size: n, .. } = self.shape;
        let sent = lane.sends.all_done(t);
        let (true, false, Some(dst)) = (self.folds(), lane.finished, self.result(at)) else { return Ok(sent) };
        let first = self.first();
        while lane.next < n {
            let p = lane.next;
            // A fold may overwrite its operand, which is also what is sent.
            let here = if p == me { sent || !self.sends_copy() } else { t.is_done(lane.recvs.get(p - first)) };
            if !here {
                return Ok(false);
            }
            if p > first {
                t.fold(dst, self.slot(p, at, dst));
            }
            lane.next += 1;
        }
        t.finish(dst, n);
        lane.finished = true;
        Ok(sent)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_looks_at_those_alone_that_need_what_it_has() {
        for n in 1..9 {
            for rank in 0..n {
                let shape = Shape { rank, size: n, bytes: 4, unit: 4, in_place: false, segment: 0 };
                let to = |goal| {
                    let e = Exchange { shape, goal, blocks: Layout::Even(4), segment: 4 };
                    e.receivers().map(|d| (rank + d) % n).collect::<Vec<_>>()
                };
                let others: Vec<_> = (rank + 1..n).chain(0..rank).collect();
                assert_eq!((to(Goal::All), to(Goal::Blocks)), (others.clone(), others));
                for root in 0..n {
                    let want = if rank == root { Vec::new() } else { vec![root] };
                    assert_eq!(to(Goal::Root(root)), want, "rank {rank} of {n}, root {root}");
                }
            }
        }
    }
}
