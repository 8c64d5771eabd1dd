//! reduce_scatter by recursive halving: in round `i` a member of the [`Cube`] and the one at distance `2^i` halve the
//! blocks that both are responsible for.
//!
//! `log2 n` hops. Each sends the sums of the other's half and folds its own, until a member is left with the block of
//! its own rank, and of the surplus rank that it serves. What travels together lies together in scratch, for which
//! the contribution is copied there. Made for small blocks; of larger ones one piece after the other is reduced.

use std::task::Poll;

use comm_core::Result;

use super::cube::Cube;
use super::post::Tokens;
use super::waves::{Piece, Plan, Waves};
use super::{Buf, Cut, Schedule, Shape, Span, Transport};

/// Pieces under way.
const LANES: usize = 2;

/// Segments that the pieces of all ranks together fill at most, unless there are so many ranks or blocks so long that
/// a piece would be too short.
const TOGETHER: usize = 2;

/// reduce_scatter by recursive halving.
///
/// Partners combine lower block of ranks with higher block, so operators need not commute.
///
/// In place, `Output` holds all blocks and the result replaces this rank's own; the others stay as they are.
///
/// Scratch: about two pieces for each rank, and three on ranks that serve a surplus rank, for each of up to two
/// pieces under way.
#[derive(Debug)]
pub struct Halving {
    waves: Waves<Blockwise, LANES>,
}

impl Halving {
    pub(super) fn reduce_scatter(shape: Shape) -> Self {
        let segment = shape.wanted_segment().saturating_mul(TOGETHER) / shape.size;
        let cut = Shape { segment: segment.max(1), ..shape }.cut();
        Self { waves: Waves::new(Blockwise { shape, cube: Cube::new(shape), cut }, cut) }
    }
}

impl Schedule for Halving {
    fn poll(&mut self, t: &mut dyn Transport) -> Poll<Result<()>> {
        self.waves.poll(t)
    }

    fn scratch(&self) -> usize {
        self.waves.lanes() * self.waves.plan.slots() * self.waves.segment()
    }

    fn name(&self) -> &'static str {
        "halving"
    }
}

#[derive(Debug)]
struct Blockwise {
    shape: Shape,
    cube: Cube,
    cut: Cut,
}

#[derive(Debug, Default)]
struct Lane {
    sends: Tokens,
    recvs: Tokens,
    /// Combinations done.
    stage: usize,
    /// Whether this stage's message is posted.
    posted: bool,
    finished: bool,
}

impl Blockwise {
    /// All blocks' sums, a surplus rank's blocks, and what the rounds receive.
    fn slots(&self) -> usize {
        let n = self.shape.size;
        if n == 1 {
            0
        } else {
            n * (1 + self.cube.before()) + self.cube.member().map_or(0, |m| self.used(m, self.cube.rounds))
        }
    }

    /// Slots for what the first rounds receive.
    fn used(&self, member: usize, rounds: usize) -> usize {
        (1..=rounds).map(|r| self.part(member, r).1).sum()
    }

    fn step(&self, at: Piece, within: usize) -> u32 {
        (at.index * (self.cube.rounds + 2) + within) as u32
    }

    /// The blocks that a member is responsible for after so many rounds, as first and number in the order in which
    /// the sums lie in scratch: the halves of each round one after the other.
    fn part(&self, member: usize, rounds: usize) -> (usize, usize) {
        // The blocks of all members that agree with `m` in the lowest so many bits.
        let blocks = |m: usize, bits: usize| self.cube.ranks_of(m, bits);
        let low = |i: usize| blocks(member & ((1 << i) - 1), i + 1);
        let first = (0..rounds).filter(|i| member >> i & 1 == 1).map(low).sum();
        (first, blocks(member, rounds))
    }

    /// Pieces of scratch, from the `first` on.
    fn pieces(&self, at: Piece, first: usize, count: usize) -> Span {
        let base = at.lane * self.slots() * self.cut.segment;
        Span::new(Buf::Scratch, base + first * at.len, count * at.len)
    }

    /// Sums, from the `first` on.
    fn sums(&self, at: Piece, (first, count): (usize, usize)) -> Span {
        self.pieces(at, first, count)
    }

    /// Where what is combined waits.
    fn slot(&self, member: usize, stage: usize, at: Piece) -> Span {
        let n = self.shape.size;
        if stage < self.cube.before() {
            return self.pieces(at, n, n);
        }
        let round = stage - self.cube.before();
        let used = self.used(member, round);
        self.pieces(at, n * (1 + self.cube.before()) + used, self.part(member, round + 1).1)
    }

    /// Peer and step of a combination.
    fn peer(&self, member: usize, stage: usize, at: Piece) -> (usize, u32) {
        if stage < self.cube.before() {
            return (self.shape.rank - 1, self.step(at, 0));
        }
        let round = stage - self.cube.before();
        (self.cube.rank_of(member ^ (1 << round)), self.step(at, round + 1))
    }

    /// The contribution to a rank's block.
    fn own(&self, rank: usize, at: Piece) -> Span {
        Span::new(self.shape.own(), rank * self.shape.bytes + at.off, at.len)
    }

    fn result(&self, at: Piece) -> Span {
        let block = if self.shape.in_place { self.shape.rank * self.shape.bytes } else { 0 };
        Span::new(Buf::Output, block + at.off, at.len)
    }

    /// Copies the contribution to where the sums will be.
    ///
    /// In their order, which is that of the members' numbers read from the lowest bit on, so that each begins where the last one ended: looking
    /// up where takes the logarithm of the world for each.
    fn pack(&self, t: &mut dyn Transport, at: Piece) {
        let rounds = self.cube.rounds;
        let mut sum = self.sums(at, (0, 1));
        for i in 0..1usize << rounds {
            let m = if rounds == 0 { 0 } else { i.reverse_bits() >> (usize::BITS as usize - rounds) };
            let (count, last) = (self.cube.ranks_of(m, rounds), self.cube.rank_of(m));
            for rank in last + 1 - count..=last {
                t.copy(sum, self.own(rank, at));
                sum.off += at.len;
            }
        }
    }
}

impl Plan for Blockwise {
    type Lane = Lane;

    fn start(&self, t: &mut dyn Transport, lane: &mut Lane, at: Piece) -> Result<()> {
        *lane = Lane::default();
        if self.shape.size == 1 {
            if !self.shape.in_place {
                t.copy(self.result(at), self.own(0, at));
            }
            return Ok(());
        }
        if let Some(member) = self.cube.member() {
            for stage in 0..self.cube.combines() {
                let (peer, step) = self.peer(member, stage, at);
                lane.recvs.push(t.recv(peer, step, self.slot(member, stage, at))?);
            }
        }
        self.pack(t, at);
        if self.cube.member().is_none() {
            let neighbour = self.shape.rank + 1;
            lane.sends.push(t.send(neighbour, self.step(at, 0), self.sums(at, (0, self.shape.size)))?);
            // The only piece that comes replaces nothing that is being sent: in place, a copy is.
            lane.recvs.push(t.recv(neighbour, self.step(at, self.cube.rounds + 1), self.result(at))?);
        }
        Ok(())
    }

    fn advance(&self, t: &mut dyn Transport, lane: &mut Lane, at: Piece) -> Result<bool> {
        let Some(member) = self.cube.member() else {
            let received = lane.recvs.all_done(t);
            return Ok(lane.sends.all_done(t) && received);
        };
        while lane.stage < self.cube.combines() {
            let stage = lane.stage;
            let (peer, step) = self.peer(member, stage, at);
            let rounds = (stage + 1).saturating_sub(self.cube.before());
            if stage >= self.cube.before() && !lane.posted {
                let theirs = self.part(member ^ (1 << (rounds - 1)), rounds);
                lane.sends.push(t.send(peer, step, self.sums(at, theirs))?);
                lane.posted = true;
            }
            if !t.is_done(lane.recvs.get(stage)) {
                return Ok(false);
            }
            let (acc, came) = (self.sums(at, self.part(member, rounds)), self.slot(member, stage, at));
            if peer < self.shape.rank {
                t.fold_rev(acc, came);
            } else {
                t.fold(acc, came);
            }
            (lane.stage, lane.posted) = (stage + 1, false);
        }
        if !lane.finished {
            lane.finished = true;
            let n = self.shape.size;
            if n == 1 {
                t.finish(self.result(at), 1);
                return Ok(true);
            }
            let share @ (first, count) = self.part(member, self.cube.rounds);
            t.finish(self.sums(at, share), n);
            if count > 1 {
                let step = self.step(at, self.cube.rounds + 1);
                lane.sends.push(t.send(self.shape.rank - 1, step, self.sums(at, (first, 1)))?);
            }
            t.copy(self.result(at), self.sums(at, (first + count - 1, 1)));
        }
        Ok(lane.sends.all_done(t))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_lie_in_the_order_of_numbers_read_from_the_lowest_bit() {
        for n in 2..70 {
            let shape = Shape { rank: 0, size: n, bytes: 4, unit: 4, in_place: false, segment: 0 };
            let b = Blockwise { shape, cube: Cube::new(shape), cut: shape.cut() };
            let rounds = b.cube.rounds;
            let mut next = 0;
            for i in 0..1usize << rounds {
                let m = i.reverse_bits() >> (usize::BITS as usize - rounds);
                let (first, count) = b.part(m, rounds);
                assert_eq!(first, next, "member {m} of {n}");
                next += count;
            }
            assert_eq!(next, n);
        }
    }
}
