//! Bruck's algorithms: `log2 n` messages per rank, in worlds of any size.
//!
//! In round `k` every rank sends to the rank at distance `2^k` above it and receives from the one below.
//! Blocks are counted by the distance they travel: block `i` of rank `r` comes from, or goes to, the rank
//! `i` away.
//!
//! * all_gather: a rank that knows the blocks of the `2^k` ranks below it, its own included, passes them all
//!   on, and learns of the next `2^k`.
//! * all_to_all: a block that has to travel `i` ranks up takes a hop of `2^k` for each bit `k` of `i`, with
//!   all others that take the same hop. A block is sent up to `log2 n` times, so this is for small ones.
//!
//! Both work in scratch, where what is sent together lies together, and copy each block to its place once it
//! is there for good.

use std::task::Poll;

use comm_core::Result;

use super::post::Tokens;
use super::waves::{Piece, Plan, Waves};
use super::{Buf, Cut, Schedule, Shape, Span, Transport};

/// Largest segment of an all_to_all: it needs many of them in scratch, and large blocks have better ways.
const SEGMENT: usize = 16 << 10;

/// all_gather or all_to_all in `log2 n` rounds.
///
/// Scratch: `n` segments for all_gather. For all_to_all half a world of segments of at most 16 KiB per round,
/// another half for sending, and in place one world more.
#[derive(Debug)]
pub struct Bruck {
    waves: Waves<Rounds, 1>,
}

impl Bruck {
    pub(super) fn all_gather(shape: Shape) -> Self {
        Self::new(shape, false, shape.cut())
    }

    /// In place, `Output` holds what is sent.
    pub(super) fn all_to_all(shape: Shape) -> Self {
        let small = Shape { segment: shape.effective_segment().min(SEGMENT), ..shape };
        Self::new(shape, true, small.cut())
    }

    fn new(shape: Shape, trades: bool, cut: Cut) -> Self {
        Self { waves: Waves::new(Rounds::new(shape, trades, cut.segment), cut) }
    }
}

impl Schedule for Bruck {
    fn poll(&mut self, t: &mut dyn Transport) -> Poll<Result<()>> {
        self.waves.poll(t)
    }

    fn scratch(&self) -> usize {
        // One lane, or none if there is nothing to do.
        self.waves.lanes() * self.waves.plan.slots() * self.waves.segment()
    }

    fn name(&self) -> &'static str {
        "bruck"
    }
}

#[derive(Debug)]
struct Rounds {
    shape: Shape,
    /// all_to_all; otherwise all_gather.
    trades: bool,
    segment: usize,
    rounds: usize,
}

#[derive(Debug, Default)]
struct Lane {
    sends: Tokens,
    recvs: Tokens,
    /// Rounds whose message is sent, has come, and is copied to its place as far as it stays.
    sent: usize,
    heard: usize,
    placed: usize,
}

/// How many of the numbers below `i` have bit `k`.
fn with_bit(k: usize, i: usize) -> usize {
    let bit = 1 << k;
    i / (2 * bit) * bit + (i % (2 * bit)).saturating_sub(bit)
}

impl Rounds {
    fn new(shape: Shape, trades: bool, segment: usize) -> Self {
        Self { shape, trades, segment, rounds: shape.size.next_power_of_two().ilog2() as usize }
    }

    /// The rank `d` below this one.
    const fn below(&self, d: usize) -> usize {
        (self.shape.rank + self.shape.size - d) % self.shape.size
    }

    const fn above(&self, d: usize) -> usize {
        (self.shape.rank + d) % self.shape.size
    }

    /// Blocks of a round's message.
    fn count(&self, k: usize) -> usize {
        let n = self.shape.size;
        if self.trades { with_bit(k, n) } else { (1 << k).min(n - (1 << k)) }
    }

    /// The first slot of what an all_to_all receives in a round. An all_gather has all its blocks in order.
    fn came(&self, k: usize) -> usize {
        (0..k).map(|j| self.count(j)).sum()
    }

    /// The first slot of what an all_to_all sends.
    fn packed(&self) -> usize {
        self.came(self.rounds)
    }

    /// The first slot of what an all_to_all had to send if that lay in its output.
    fn kept(&self) -> usize {
        // No round has more than half of the blocks.
        self.packed() + self.shape.size / 2
    }

    fn slots(&self) -> usize {
        let n = self.shape.size;
        match (self.trades, self.shape.in_place) {
            (false, _) if n == 1 => 0,
            (false, _) => n,
            (true, false) => self.kept(),
            // Its own block stays where it is.
            (true, true) => self.kept() + n - 1,
        }
    }

    /// Blocks `i..i + count` of those that lie from a slot on: without gaps, also if they are the last, shorter
    /// segments.
    fn run(&self, slot: usize, i: usize, count: usize, at: Piece) -> Span {
        Span::new(Buf::Scratch, slot * self.segment + i * at.len, count * at.len)
    }

    fn within(&self, slot: usize, i: usize, at: Piece) -> Span {
        self.run(slot, i, 1, at)
    }

    /// This piece of rank `p`'s block in a buffer that has all.
    fn block(&self, buf: Buf, p: usize, at: Piece) -> Span {
        Span::new(buf, p * self.shape.bytes + at.off, at.len)
    }

    /// Where block `i` lies after the rounds before `k`: where it came last, or where it was from the beginning.
    fn whereabouts(&self, i: usize, k: usize, at: Piece) -> Span {
        match (i & ((1 << k) - 1)).checked_ilog2() {
            Some(j) => self.within(self.came(j as usize), with_bit(j as usize, i), at),
            None if self.shape.in_place => self.within(self.kept(), i - 1, at),
            None => self.block(Buf::Input, self.above(i), at),
        }
    }

    /// The message of a round.
    fn message(&self, t: &mut dyn Transport, k: usize, at: Piece) -> Span {
        if !self.trades {
            return self.run(0, 0, self.count(k), at);
        }
        for (x, i) in (0..self.shape.size).filter(|i| i >> k & 1 == 1).enumerate() {
            t.copy(self.within(self.packed(), x, at), self.whereabouts(i, k, at));
        }
        self.run(self.packed(), 0, self.count(k), at)
    }

    /// Copies those blocks to the output that came in round `k` and go no further.
    fn place(&self, t: &mut dyn Transport, k: usize, at: Piece) {
        for i in 1 << k..(2 << k).min(self.shape.size) {
            let came = if self.trades { self.whereabouts(i, k + 1, at) } else { self.within(0, i, at) };
            t.copy(self.block(Buf::Output, self.below(i), at), came);
        }
    }
}

impl Plan for Rounds {
    type Lane = Lane;

    fn start(&self, t: &mut dyn Transport, lane: &mut Lane, at: Piece) -> Result<()> {
        let Shape { rank, size, in_place, .. } = self.shape;
        lane.sends.clear();
        lane.recvs.clear();
        (lane.sent, lane.heard, lane.placed) = (0, 0, 0);
        // Each round has memory of its own, so that no message of a faster rank comes unexpected.
        for k in 0..self.rounds {
            let (slot, i) = if self.trades { (self.came(k), 0) } else { (0, 1 << k) };
            let dst = self.run(slot, i, self.count(k), at);
            let step = at.index * self.rounds + k;
            lane.recvs.push(t.recv(self.below(1 << k), step as u32, dst)?);
        }
        let here = self.block(Buf::Output, rank, at);
        let own = match (in_place, self.trades) {
            (true, _) => here,
            (false, true) => self.block(Buf::Input, rank, at),
            (false, false) => Span::new(Buf::Input, at.off, at.len),
        };
        if !in_place {
            t.copy(here, own);
        }
        if !self.trades && size > 1 {
            t.copy(self.within(0, 0, at), own);
        }
        if self.trades && in_place {
            for i in 1..size {
                t.copy(self.within(self.kept(), i - 1, at), self.block(Buf::Output, self.above(i), at));
            }
        }
        Ok(())
    }

    fn advance(&self, t: &mut dyn Transport, lane: &mut Lane, at: Piece) -> Result<bool> {
        loop {
            let k = lane.sent;
            // Packing needs the last message to be gone; an all_gather sends what nobody changes.
            if k == lane.heard && k < self.rounds && (!self.trades || lane.sends.all_done(t)) {
                let span = self.message(t, k, at);
                lane.sends.push(t.send(self.above(1 << k), (at.index * self.rounds + k) as u32, span)?);
                lane.sent += 1;
            }
            // After the next send, so that the copies do not hold it up.
            if lane.placed < lane.heard {
                self.place(t, lane.placed, at);
                lane.placed += 1;
            }
            if lane.sent == lane.heard || !t.is_done(lane.recvs.get(lane.heard)) {
                break;
            }
            lane.heard += 1;
        }
        Ok(lane.sends.all_done(t) && lane.placed == self.rounds)
    }
}

#[cfg(test)]
mod tests {
    use super::with_bit;

    #[test]
    fn numbers_with_a_bit_are_counted() {
        for i in 0..70 {
            for k in 0..7 {
                assert_eq!(with_bit(k, i), (0..i).filter(|x| x >> k & 1 == 1).count());
                assert!(with_bit(k, i) <= i / 2, "the memory for packing is half a world");
            }
        }
    }
}
