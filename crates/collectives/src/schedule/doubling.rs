//! Recursive doubling: in round `i` ranks exchange what they have with the rank at distance `2^i`.
//!
//! `log2 n` hops. In a world that is not a power of two each surplus rank first gives its
//! contribution to its right neighbour and gets the result from there.

use std::task::Poll;

use comm_core::Result;

use super::cube::Cube;
use super::post::{AHEAD, Tokens};
use super::waves::{Piece, Plan, Waves};
use super::{Buf, Schedule, Shape, Span, Transport};

/// all_reduce by recursive doubling.
///
/// At every moment a rank holds the combination of a contiguous block of ranks, and partners combine
/// lower block with higher block. So operators need not commute, and all ranks get the same bits.
///
/// Scratch: one segment per round, for each of up to four segments under way.
#[derive(Debug)]
pub struct RecursiveDoubling {
    waves: Waves<Doubling, AHEAD>,
}

impl RecursiveDoubling {
    pub(super) fn all_reduce(shape: Shape) -> Self {
        Self { waves: Waves::new(Doubling::new(shape), shape.cut()) }
    }
}

impl Schedule for RecursiveDoubling {
    fn poll(&mut self, t: &mut dyn Transport) -> Poll<Result<()>> {
        self.waves.poll(t)
    }

    fn scratch(&self) -> usize {
        self.waves.lanes() * self.waves.plan.combines() * self.waves.segment()
    }

    fn name(&self) -> &'static str {
        "recursive_doubling"
    }
}

#[derive(Debug)]
struct Doubling {
    shape: Shape,
    segment: usize,
    cube: Cube,
}

#[derive(Debug, Default)]
struct Lane {
    sends: Tokens,
    recvs: Tokens,
    /// Combinations done; for a surplus rank 1 once its contribution is sent.
    stage: usize,
    /// Whether this stage's message is posted.
    posted: bool,
    finished: bool,
}

/// One combination with what another rank holds.
struct Combine {
    peer: usize,
    step: u32,
    /// Whether the peer's ranks are below ours.
    lower: bool,
    /// Whether ours goes to the peer too.
    exchange: bool,
}

impl Doubling {
    fn new(shape: Shape) -> Self {
        Self { shape, segment: shape.effective_segment(), cube: Cube::new(shape) }
    }

    fn combines(&self) -> usize {
        match self.cube.member() {
            None => 0,
            Some(_) => self.cube.combines(),
        }
    }

    fn step(&self, at: Piece, within: usize) -> u32 {
        (at.index * (self.cube.rounds + 2) + within) as u32
    }

    fn combine(&self, member: usize, stage: usize, at: Piece) -> Combine {
        let before = usize::from(self.cube.serves());
        if stage < before {
            return Combine { peer: self.shape.rank - 1, step: self.step(at, 0), lower: true, exchange: false };
        }
        let round = stage - before;
        let other = member ^ (1 << round);
        let peer = self.cube.rank_of(other);
        Combine { peer, step: self.step(at, round + 1), lower: other < member, exchange: true }
    }

    fn slot(&self, stage: usize, at: Piece) -> Span {
        Span::new(Buf::Scratch, (at.lane * self.combines() + stage) * self.segment, at.len)
    }

    fn own(&self, at: Piece) -> Span {
        Span::new(self.shape.own(), at.off, at.len)
    }

    fn result(at: Piece) -> Span {
        Span::new(Buf::Output, at.off, at.len)
    }

    /// What this rank holds when `stage` combinations are done.
    fn held(&self, stage: usize, at: Piece) -> Span {
        if stage == 0 { self.own(at) } else { Self::result(at) }
    }
}

impl Plan for Doubling {
    type Lane = Lane;

    fn start(&self, t: &mut dyn Transport, lane: &mut Lane, at: Piece) -> Result<()> {
        lane.sends.clear();
        lane.recvs.clear();
        (lane.stage, lane.posted, lane.finished) = (0, false, false);
        let (own, dst) = (self.own(at), Self::result(at));
        let Some(member) = self.cube.member() else {
            lane.sends.push(t.send(self.shape.rank + 1, self.step(at, 0), own)?);
            return Ok(());
        };
        // Every round's receive is posted now, so that no message of a faster rank comes unexpected.
        for stage in 0..self.combines() {
            let c = self.combine(member, stage, at);
            lane.recvs.push(match (stage, self.shape.in_place) {
                // The first combination out of place moves our contribution to the output on the way.
                (0, false) if c.lower => {
                    t.copy(self.slot(0, at), own);
                    t.recv(c.peer, c.step, dst)?
                }
                (0, false) => t.recv_fold(c.peer, c.step, dst, own)?,
                _ => t.recv(c.peer, c.step, self.slot(stage, at))?,
            });
        }
        if self.shape.size == 1 && !self.shape.in_place {
            t.copy(dst, own);
        }
        Ok(())
    }

    fn advance(&self, t: &mut dyn Transport, lane: &mut Lane, at: Piece) -> Result<bool> {
        let dst = Self::result(at);
        let after = self.step(at, self.cube.rounds + 1);
        let Some(member) = self.cube.member() else {
            let neighbour = self.shape.rank + 1;
            // In place, the result must not arrive over the contribution before that is sent.
            if lane.stage == 0 && (lane.sends.all_done(t) || !self.shape.in_place) {
                lane.recvs.push(t.recv(neighbour, after, dst)?);
                lane.stage = 1;
            }
            if lane.stage == 1 && t.is_done(lane.recvs.get(0)) {
                lane.stage = 2;
            }
            return Ok(lane.sends.all_done(t) && lane.stage == 2);
        };
        while lane.stage < self.combines() {
            let (stage, in_place) = (lane.stage, self.shape.in_place);
            let c = self.combine(member, stage, at);
            if c.exchange && !lane.posted {
                lane.sends.push(t.send(c.peer, c.step, self.held(stage, at))?);
                lane.posted = true;
            }
            // The output is sent in each round but an out-of-place first one; it must stay until it is gone.
            if !lane.sends.all_done(t) || !t.is_done(lane.recvs.get(stage)) {
                return Ok(false);
            }
            match (stage, in_place) {
                (0, false) if c.lower => t.fold(dst, self.slot(0, at)),
                (0, false) => {}
                _ if c.lower => t.fold_rev(dst, self.slot(stage, at)),
                _ => t.fold(dst, self.slot(stage, at)),
            }
            lane.stage += 1;
            lane.posted = false;
        }
        if !lane.finished {
            t.finish(dst, self.shape.size);
            lane.finished = true;
            if self.cube.serves() {
                lane.sends.push(t.send(self.shape.rank - 1, after, dst)?);
            }
        }
        Ok(lane.sends.all_done(t))
    }
}
