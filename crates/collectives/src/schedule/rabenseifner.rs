//! Rabenseifner's all_reduce: reduce-scatter by recursive halving, then all-gather by recursive doubling.
//!
//! In round `i` a member of the [`Cube`] and the one at distance `2^i` halve what both are responsible for: each
//! sends the other's half and folds its own. After `log2 n` rounds each is left with its share of the result;
//! the same rounds backwards, without folds, spread it. A rank sends and receives `2 (n − 1) / n` of the
//! buffer in `2 log2 n` hops, and in worlds that are no power of two some the whole buffer in two more.

use std::task::Poll;

use comm_core::Result;

use super::cube::Cube;
use super::post::Tokens;
use super::waves::{Piece, Plan, Waves};
use super::{Buf, Cut, Schedule, Shape, Span, Token, Transport};

/// Pieces under way.
const LANES: usize = 2;

/// all_reduce by Rabenseifner's algorithm. Large buffers are cut into pieces of two segments, whose longest messages
/// are one.
///
/// Partners combine lower block of ranks with higher block, so operators need not commute; each element is finished by
/// one rank before it is spread, so all ranks get the same bits.
///
/// Scratch: one piece and a little, and another one on ranks that serve a surplus rank, for each of up to two
/// pieces under way.
#[derive(Debug)]
pub struct Rabenseifner {
    waves: Waves<Halving, LANES>,
}

impl Rabenseifner {
    pub(super) fn all_reduce(shape: Shape) -> Self {
        let cut = Shape { segment: shape.wanted_segment().saturating_mul(2), ..shape }.cut();
        Self { waves: Waves::new(Halving { shape, cube: Cube::new(shape), cut }, cut) }
    }
}

impl Schedule for Rabenseifner {
    fn poll(&mut self, t: &mut dyn Transport) -> Poll<Result<()>> {
        self.waves.poll(t)
    }

    fn scratch(&self) -> usize {
        self.waves.lanes() * self.waves.plan.lane_bytes()
    }

    fn name(&self) -> &'static str {
        "rabenseifner"
    }
}

#[derive(Debug)]
struct Halving {
    shape: Shape,
    cube: Cube,
    cut: Cut,
}

#[derive(Debug, Default)]
struct Lane {
    sends: Tokens,
    /// By combination, with fillers where there is nothing to receive; then by round backwards.
    recvs: Tokens,
    spread: Tokens,
    /// Combinations done, and then rounds of the second half; for a surplus rank 1 once its contribution is sent.
    stage: usize,
    /// Whether this stage's message is posted.
    posted: bool,
    reduced: bool,
    served: bool,
}

/// One combination with what another member or the surplus rank holds.
struct Combine {
    peer: usize,
    /// Whether the peer's ranks are below ours.
    lower: bool,
    /// What is combined, what goes to the peer meanwhile, and where the peer's waits.
    keep: Span,
    give: Span,
    slot: Span,
}

impl Halving {
    /// The slots of the rounds together, each at most half of the one before rounded up, and a surplus rank's piece.
    fn lane_bytes(&self) -> usize {
        if self.cube.member().is_none() || self.shape.size == 1 {
            return 0;
        }
        self.cut.segment * (1 + self.cube.before()) + self.cube.rounds * self.shape.unit
    }

    fn step(&self, at: Piece, within: usize) -> u32 {
        (at.index * (2 * self.cube.rounds + 2) + within) as u32
    }

    /// What a member is responsible for after so many rounds: its offset and length in the piece.
    fn part(&self, member: usize, rounds: usize, at: Piece) -> (usize, usize) {
        let (mut off, mut len) = (0, at.len / self.shape.unit);
        for i in 0..rounds {
            let low = len.div_ceil(2);
            if member >> i & 1 == 0 {
                len = low;
            } else {
                (off, len) = (off + low, len - low);
            }
        }
        (off * self.shape.unit, len * self.shape.unit)
    }

    fn result(at: Piece, (off, len): (usize, usize)) -> Span {
        Span::new(Buf::Output, at.off + off, len)
    }

    /// The same place in the contribution.
    fn own(&self, span: Span) -> Span {
        Span { buf: self.shape.own(), ..span }
    }

    /// Peer, this member's half and the peer's half of a round.
    fn round(&self, member: usize, round: usize, at: Piece) -> (usize, Span, Span) {
        let other = member ^ (1 << round);
        let half = |m| Self::result(at, self.part(m, round + 1, at));
        (self.cube.rank_of(other), half(member), half(other))
    }

    fn combine(&self, member: usize, stage: usize, at: Piece) -> Combine {
        let base = at.lane * self.lane_bytes();
        let whole = Self::result(at, (0, at.len));
        if stage < self.cube.before() {
            let slot = Span::new(Buf::Scratch, base, at.len);
            return Combine {
                peer: self.shape.rank - 1,
                lower: true,
                keep: whole,
                give: Span { len: 0, ..whole },
                slot,
            };
        }
        let round = stage - self.cube.before();
        let used: usize = (1..=round).map(|rounds| self.part(member, rounds, at).1).sum();
        let (peer, keep, give) = self.round(member, round, at);
        let slot = Span::new(Buf::Scratch, base + self.cube.before() * self.cut.segment + used, keep.len);
        Combine { peer, lower: peer < self.shape.rank, keep, give, slot }
    }

    fn combine_step(&self, stage: usize, at: Piece) -> u32 {
        self.step(at, if stage < self.cube.before() { 0 } else { 1 + stage - self.cube.before() })
    }

    /// Goes on with the reduce-scatter; true once it is done and nothing of it is being sent.
    fn reduce(&self, t: &mut dyn Transport, lane: &mut Lane, member: usize, at: Piece) -> Result<bool> {
        while lane.stage < self.cube.combines() {
            let stage = lane.stage;
            let c = self.combine(member, stage, at);
            if !lane.posted && c.give.len > 0 {
                let src = if stage == 0 { self.own(c.give) } else { c.give };
                lane.sends.push(t.send(c.peer, self.combine_step(stage, at), src)?);
            }
            lane.posted = true;
            if c.keep.len > 0 {
                if !t.is_done(lane.recvs.get(stage)) {
                    return Ok(false);
                }
                match (stage, self.shape.in_place) {
                    (0, false) if c.lower => t.fold(c.keep, c.slot),
                    (0, false) => {}
                    _ if c.lower => t.fold_rev(c.keep, c.slot),
                    _ => t.fold(c.keep, c.slot),
                }
            }
            (lane.stage, lane.posted) = (stage + 1, false);
        }
        if !lane.reduced {
            lane.reduced = true;
            let share = Self::result(at, self.part(member, self.cube.rounds, at));
            if share.len > 0 {
                t.finish(share, self.shape.size);
            }
        }
        Ok(lane.sends.all_done(t))
    }

    /// Posts the receives of the all-gather, which fill what the reduce-scatter has given away.
    fn expect(&self, t: &mut dyn Transport, lane: &mut Lane, member: usize, at: Piece) -> Result<()> {
        for i in 0..self.cube.rounds {
            let (peer, _, theirs) = self.round(member, self.cube.rounds - 1 - i, at);
            lane.spread.push(match theirs.len {
                0 => Token(0),
                _ => t.recv(peer, self.step(at, 1 + self.cube.rounds + i), theirs)?,
            });
        }
        Ok(())
    }
}

impl Plan for Halving {
    type Lane = Lane;

    fn start(&self, t: &mut dyn Transport, lane: &mut Lane, at: Piece) -> Result<()> {
        *lane = Lane::default();
        let whole = Self::result(at, (0, at.len));
        let Some(member) = self.cube.member() else {
            lane.sends.push(t.send(self.shape.rank + 1, self.step(at, 0), self.own(whole))?);
            return Ok(());
        };
        for stage in 0..self.cube.combines() {
            let c = self.combine(member, stage, at);
            let step = self.combine_step(stage, at);
            lane.recvs.push(match (stage, self.shape.in_place) {
                _ if c.keep.len == 0 => Token(0),
                // The first combination out of place moves our contribution to the output on the way.
                (0, false) if c.lower => {
                    t.copy(c.slot, self.own(c.keep));
                    t.recv(c.peer, step, c.keep)?
                }
                (0, false) => t.recv_fold(c.peer, step, c.keep, self.own(c.keep))?,
                _ => t.recv(c.peer, step, c.slot)?,
            });
        }
        if self.shape.size == 1 && !self.shape.in_place {
            t.copy(whole, self.own(whole));
        }
        Ok(())
    }

    fn advance(&self, t: &mut dyn Transport, lane: &mut Lane, at: Piece) -> Result<bool> {
        let (rounds, whole) = (self.cube.rounds, Self::result(at, (0, at.len)));
        let after = self.step(at, 2 * rounds + 1);
        let Some(member) = self.cube.member() else {
            let neighbour = self.shape.rank + 1;
            // In place, the result must not arrive over the contribution before that is sent.
            if lane.stage == 0 && (lane.sends.all_done(t) || !self.shape.in_place) {
                lane.recvs.push(t.recv(neighbour, after, whole)?);
                lane.stage = 1;
            }
            if lane.stage == 1 && t.is_done(lane.recvs.get(0)) {
                lane.stage = 2;
            }
            return Ok(lane.sends.all_done(t) && lane.stage == 2);
        };
        let first = self.cube.combines();
        if lane.spread.is_empty() {
            if !self.reduce(t, lane, member, at)? {
                return Ok(false);
            }
            self.expect(t, lane, member, at)?;
        }
        while lane.stage < first + rounds {
            let i = lane.stage - first;
            let (peer, mine, theirs) = self.round(member, rounds - 1 - i, at);
            if !lane.posted && mine.len > 0 {
                lane.sends.push(t.send(peer, self.step(at, 1 + rounds + i), mine)?);
            }
            lane.posted = true;
            if theirs.len > 0 && !t.is_done(lane.spread.get(i)) {
                return Ok(false);
            }
            (lane.stage, lane.posted) = (lane.stage + 1, false);
        }
        if !lane.served && self.cube.serves() {
            lane.sends.push(t.send(self.shape.rank - 1, after, whole)?);
        }
        lane.served = true;
        Ok(lane.sends.all_done(t))
    }
}
