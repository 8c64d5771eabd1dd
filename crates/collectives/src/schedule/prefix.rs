//! scan and exscan by recursive doubling: in round `k` sums go to the rank `2^k` above.
//!
//! `log2 n` hops. After round `k` a rank holds the combination of the `2^(k+1)` ranks up to itself, or of all
//! there are; what it receives combines the ranks just below those, so operators need not commute.

use std::task::Poll;

use comm_core::Result;

use super::post::Tokens;
use super::waves::{Piece, Plan, Waves};
use super::{Buf, Schedule, Shape, Span, Transport};

/// Segments under way.
const LANES: usize = 2;

/// scan or exscan by recursive doubling. Made for small buffers; large ones are cut into segments.
///
/// Scratch: one segment per round, and two more for exscan, for each of up to two segments under way.
#[derive(Debug)]
pub struct PrefixDoubling {
    waves: Waves<Prefix, LANES>,
}

impl PrefixDoubling {
    pub(super) fn scan(shape: Shape) -> Self {
        Self::new(shape, false)
    }

    pub(super) fn exscan(shape: Shape) -> Self {
        Self::new(shape, true)
    }

    fn new(shape: Shape, exclusive: bool) -> Self {
        Self { waves: Waves::new(Prefix { shape, exclusive, segment: shape.effective_segment() }, shape.cut()) }
    }
}

impl Schedule for PrefixDoubling {
    fn poll(&mut self, t: &mut dyn Transport) -> Poll<Result<()>> {
        self.waves.poll(t)
    }

    fn scratch(&self) -> usize {
        self.waves.lanes() * self.waves.plan.slots() * self.waves.segment()
    }

    fn name(&self) -> &'static str {
        "recursive_doubling"
    }
}

#[derive(Debug)]
struct Prefix {
    shape: Shape,
    exclusive: bool,
    segment: usize,
}

#[derive(Debug, Default)]
struct Lane {
    sends: Tokens,
    recvs: Tokens,
    round: usize,
    /// Whether this round's message is posted, and whether its message has come.
    posted: bool,
    came: bool,
    finished: bool,
}

/// The number of rounds in which there is a rank within so many ranks.
const fn rounds(ranks: usize) -> usize {
    if ranks == 0 { 0 } else { ranks.ilog2() as usize + 1 }
}

impl Prefix {
    /// Rounds with a message from below.
    const fn incoming(&self) -> usize {
        rounds(self.shape.rank)
    }

    /// Rounds with a message to above.
    const fn outgoing(&self) -> usize {
        rounds(self.shape.size - 1 - self.shape.rank)
    }

    /// Whether exscan needs the inclusive sum beside its result: it is sent after a combination.
    const fn keeps_sum(&self) -> bool {
        self.exclusive && self.incoming() > 0 && self.outgoing() > 1
    }

    fn slots(&self) -> usize {
        self.incoming() + if self.keeps_sum() { 2 } else { 0 }
    }

    fn step(&self, at: Piece, round: usize) -> u32 {
        (at.index * rounds(self.shape.size) + round) as u32
    }

    /// Where the message of a round waits; after those, where the inclusive sum is and an operand's copy.
    fn slot(&self, i: usize, at: Piece) -> Span {
        Span::new(Buf::Scratch, (at.lane * self.slots() + i) * self.segment, at.len)
    }

    fn own(&self, at: Piece) -> Span {
        Span::new(self.shape.own(), at.off, at.len)
    }

    fn result(at: Piece) -> Span {
        Span::new(Buf::Output, at.off, at.len)
    }

    /// What is sent in a round.
    fn held(&self, round: usize, at: Piece) -> Span {
        if round == 0 || self.incoming() == 0 {
            self.own(at)
        } else if self.exclusive {
            self.slot(self.incoming(), at)
        } else {
            Self::result(at)
        }
    }

    /// Puts a round's message before what is here.
    fn combine(&self, t: &mut dyn Transport, round: usize, at: Piece) {
        let (dst, came) = (Self::result(at), self.slot(round, at));
        if self.outgoing() > round + 1 && self.exclusive {
            let (sum, copy) = (self.slot(self.incoming(), at), self.slot(self.incoming() + 1, at));
            if round == 0 {
                t.copy(sum, self.own(at));
            }
            // A fold may overwrite its operand, and there are two.
            t.copy(copy, came);
            t.fold_rev(sum, copy);
        }
        if self.exclusive && round == 0 {
            t.copy(dst, came);
        } else {
            t.fold_rev(dst, came);
        }
    }
}

impl Plan for Prefix {
    type Lane = Lane;

    fn start(&self, t: &mut dyn Transport, lane: &mut Lane, at: Piece) -> Result<()> {
        *lane = Lane::default();
        // Every round's receive is posted now, so that no message of a faster rank comes unexpected.
        for round in 0..self.incoming() {
            let peer = self.shape.rank - (1 << round);
            lane.recvs.push(t.recv(peer, self.step(at, round), self.slot(round, at))?);
        }
        if self.outgoing() > 0 {
            lane.sends.push(t.send(self.shape.rank + 1, self.step(at, 0), self.own(at))?);
            lane.posted = true;
        }
        // After the first message, so that the copy does not hold it up.
        if !self.exclusive && !self.shape.in_place {
            t.copy(Self::result(at), self.own(at));
        }
        Ok(())
    }

    fn advance(&self, t: &mut dyn Transport, lane: &mut Lane, at: Piece) -> Result<bool> {
        let Shape { rank, in_place, .. } = self.shape;
        while lane.round < self.incoming().max(self.outgoing()) {
            let round = lane.round;
            if round < self.outgoing() && !lane.posted {
                lane.sends.push(t.send(rank + (1 << round), self.step(at, round), self.held(round, at))?);
                lane.posted = true;
            }
            if round < self.incoming() {
                lane.came = lane.came || t.is_done(lane.recvs.get(round));
                // What is sent must stay until it is gone; out of place, the first round sends the input.
                if !lane.came || ((round > 0 || in_place) && !lane.sends.all_done(t)) {
                    return Ok(false);
                }
                self.combine(t, round, at);
            }
            lane.round += 1;
            (lane.posted, lane.came) = (false, false);
        }
        if !lane.sends.all_done(t) {
            return Ok(false);
        }
        if !lane.finished {
            lane.finished = true;
            let ranks = rank + usize::from(!self.exclusive);
            if ranks > 0 {
                t.finish(Self::result(at), ranks);
            }
        }
        Ok(true)
    }
}
