//! Everybody sends straight to whoever needs it, and the receiver folds in rank order.
//!
//! One hop, right for operators that do not commute, and the same bits wherever the same values are
//! folded. Costs `n − 1` messages per rank and segment.

use std::task::Poll;

use comm_core::Result;

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
        Self::new(shape, Goal::All, "direct")
    }

    /// reduce_scatter: block `j` goes straight to rank `j`, which folds it.
    ///
    /// In place, `Output` holds all blocks and the result replaces this rank's own; the other blocks stay as they are.
    pub(super) fn reduce_scatter(shape: Shape) -> Self {
        Self::new(shape, Goal::Blocks, "direct")
    }

    /// reduce: everybody sends to the root, which folds.
    pub(super) fn reduce(shape: Shape, root: usize) -> Self {
        Self::new(shape, Goal::Root(root), "ordered")
    }

    fn new(shape: Shape, goal: Goal, name: &'static str) -> Self {
        Self { waves: Waves::new(Exchange { shape, goal, segment: shape.effective_segment() }, shape.cut()), name }
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

    /// Where the contribution of rank `p` waits. Rank 0's needs no slot on others, and rank 1's none on
    /// rank 0 (both go straight to the result), so these two may share one.
    fn slot(&self, p: usize, at: Piece) -> Span {
        let i = at.lane * self.slots() + p.saturating_sub(1);
        Span::new(Buf::Scratch, i * self.segment, at.len)
    }

    /// What this rank contributes to rank `p`'s result.
    fn own(&self, p: usize, at: Piece) -> Span {
        let block = if self.goal == Goal::Blocks { p * self.shape.bytes } else { 0 };
        Span::new(self.shape.own(), block + at.off, at.len)
    }

    fn result(&self, at: Piece) -> Span {
        let whole = self.goal == Goal::Blocks && self.shape.in_place;
        let block = if whole { self.shape.rank * self.shape.bytes } else { 0 };
        Span::new(Buf::Output, block + at.off, at.len)
    }

    /// Whether the result replaces what others are still being sent; then a copy is sent.
    fn sends_copy(&self) -> bool {
        self.goal == Goal::All && self.shape.in_place && self.shape.size > 1
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
        if copy {
            t.copy(self.slot(me, at), self.own(me, at));
        }
        // Sends first, they are what others wait for; each rank starts at another peer.
        for p in (1..n).map(|d| (me + d) % n) {
            if matches!(self.goal, Goal::Root(r) if r != p) {
                continue;
            }
            let span = if copy { self.slot(me, at) } else { self.own(p, at) };
            lane.sends.push(t.send(p, step, span)?);
        }
        if !self.folds() {
            return Ok(());
        }
        let (own, dst) = (self.own(me, at), self.result(at));
        if n == 1 {
            if !in_place {
                t.copy(dst, own);
            }
            return Ok(());
        }
        if me > 0 && !copy {
            t.copy(self.slot(me, at), own);
        }
        for p in self.first()..n {
            lane.recvs.push(match p {
                _ if p == me => Token(0),
                0 => t.recv(p, step, dst)?,
                1 if me == 0 => t.recv_fold(p, step, dst, own)?,
                _ => t.recv(p, step, self.slot(p, at))?,
            });
        }
        Ok(())
    }

    fn advance(&self, t: &mut dyn Transport, lane: &mut Lane, at: Piece) -> Result<bool> {
        let Shape { rank: me, size: n, .. } = self.shape;
        let sent = lane.sends.all_done(t);
        if !self.folds() || lane.finished {
            return Ok(sent);
        }
        let first = self.first();
        while lane.next < n {
            let p = lane.next;
            // A fold may overwrite its operand, which is also what is sent.
            let here = if p == me { sent || !self.sends_copy() } else { t.is_done(lane.recvs.get(p - first)) };
            if !here {
                return Ok(false);
            }
            if p > first {
                t.fold(self.result(at), self.slot(p, at));
            }
            lane.next += 1;
        }
        t.finish(self.result(at), n);
        lane.finished = true;
        Ok(sent)
    }
}
