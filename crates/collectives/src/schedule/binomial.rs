//! Binomial trees: `log2 n` hops between the root and the farthest rank.

use std::task::Poll;

use comm_core::Result;

use super::post::{AHEAD, Tokens};
use super::waves::{Piece, Plan, Waves};
use super::{Buf, Schedule, Shape, Span, Transport};

/// broadcast or reduce along a binomial tree. Made for small buffers; large ones are cut into segments.
///
/// The reduction folds along the distance from the root, not in rank order: for operators that commute.
///
/// Scratch: none for broadcast; for reduce one segment per child, for each of up to four segments under way.
#[derive(Debug)]
pub struct Binomial(Kind);

#[derive(Debug)]
enum Kind {
    Broadcast(Waves<Down, AHEAD>),
    Reduce(Waves<Up, AHEAD>),
}

impl Binomial {
    /// `Output` is the buffer on all ranks.
    pub(super) fn broadcast(shape: Shape, root: usize) -> Self {
        Self(Kind::Broadcast(Waves::new(Down { shape, root }, shape.cut())))
    }

    /// In place means that the contribution lies in `Output`; on ranks other than the root it is only read there.
    pub(super) fn reduce(shape: Shape, root: usize) -> Self {
        let segment = shape.effective_segment();
        Self(Kind::Reduce(Waves::new(Up { shape, root, segment }, shape.cut())))
    }
}

impl Schedule for Binomial {
    fn poll(&mut self, t: &mut dyn Transport) -> Poll<Result<()>> {
        match &mut self.0 {
            Kind::Broadcast(w) => w.poll(t),
            Kind::Reduce(w) => w.poll(t),
        }
    }

    fn scratch(&self) -> usize {
        match &self.0 {
            Kind::Broadcast(_) => 0,
            Kind::Reduce(w) => w.lanes() * w.plan.slots() * w.segment(),
        }
    }

    fn name(&self) -> &'static str {
        "binomial"
    }
}

/// The distances from the root of the parent and of the number of children of the rank at distance `d`.
/// Child `i` is at distance `d + 2^i`.
pub(super) fn family(d: usize, n: usize) -> (Option<usize>, usize) {
    // Below its lowest set bit a rank has a subtree; the root's ends where the world does.
    let limit = if d == 0 { n } else { (d & d.wrapping_neg()).min(n - d) };
    let children = limit.next_power_of_two().ilog2() as usize;
    (if d == 0 { None } else { Some(d & (d - 1)) }, children)
}

#[derive(Debug)]
struct Down {
    shape: Shape,
    root: usize,
}

#[derive(Debug, Default)]
struct DownLane {
    recv: Tokens,
    sends: Tokens,
    forwarded: bool,
}

impl Plan for Down {
    type Lane = DownLane;

    fn start(&self, t: &mut dyn Transport, lane: &mut DownLane, at: Piece) -> Result<()> {
        lane.recv.clear();
        lane.sends.clear();
        lane.forwarded = false;
        let (parent, _) = family(self.shape.distance_from(self.root), self.shape.size);
        if let Some(p) = parent {
            let span = Span::new(Buf::Output, at.off, at.len);
            lane.recv.push(t.recv(self.shape.at(self.root, p), at.index as u32, span)?);
        }
        Ok(())
    }

    fn advance(&self, t: &mut dyn Transport, lane: &mut DownLane, at: Piece) -> Result<bool> {
        if !lane.forwarded {
            if !lane.recv.all_done(t) {
                return Ok(false);
            }
            let d = self.shape.distance_from(self.root);
            let span = Span::new(Buf::Output, at.off, at.len);
            // The child with the largest subtree first.
            for i in (0..family(d, self.shape.size).1).rev() {
                lane.sends.push(t.send(self.shape.at(self.root, d + (1 << i)), at.index as u32, span)?);
            }
            lane.forwarded = true;
        }
        Ok(lane.sends.all_done(t))
    }
}

#[derive(Debug)]
struct Up {
    shape: Shape,
    root: usize,
    segment: usize,
}

#[derive(Debug, Default)]
struct UpLane {
    recvs: Tokens,
    send: Tokens,
    /// Children folded.
    folded: usize,
    passed: bool,
}

impl Up {
    fn is_root(&self) -> bool {
        self.shape.rank == self.root
    }

    fn family(&self) -> (Option<usize>, usize) {
        family(self.shape.distance_from(self.root), self.shape.size)
    }

    /// The root accumulates in its output, so its first child needs no slot; a leaf needs none at all.
    fn slots(&self) -> usize {
        self.family().1.saturating_sub(usize::from(self.is_root()))
    }

    /// Where the contribution of child `i` waits; child 0's is folded on arrival, into slot 0 as accumulator.
    fn slot(&self, i: usize, at: Piece) -> Span {
        let i = at.lane * self.slots() + i - usize::from(self.is_root());
        Span::new(Buf::Scratch, i * self.segment, at.len)
    }

    fn own(&self, at: Piece) -> Span {
        Span::new(self.shape.own(), at.off, at.len)
    }

    fn acc(&self, at: Piece) -> Span {
        if self.is_root() {
            Span::new(Buf::Output, at.off, at.len)
        } else if self.family().1 > 0 {
            self.slot(0, at)
        } else {
            self.own(at)
        }
    }
}

impl Plan for Up {
    type Lane = UpLane;

    fn start(&self, t: &mut dyn Transport, lane: &mut UpLane, at: Piece) -> Result<()> {
        lane.recvs.clear();
        lane.send.clear();
        (lane.folded, lane.passed) = (0, false);
        let (acc, own) = (self.acc(at), self.own(at));
        let d = self.shape.distance_from(self.root);
        for i in 0..self.family().1 {
            let child = self.shape.at(self.root, d + (1 << i));
            lane.recvs.push(match i {
                0 => t.recv_fold(child, at.index as u32, acc, own)?,
                _ => t.recv(child, at.index as u32, self.slot(i, at))?,
            });
        }
        if self.shape.size == 1 && !self.shape.in_place {
            t.copy(acc, own);
        }
        Ok(())
    }

    fn advance(&self, t: &mut dyn Transport, lane: &mut UpLane, at: Piece) -> Result<bool> {
        let (parent, children) = self.family();
        // Child 0 first, as its subtree is the smallest; the others follow in the order of their sizes.
        while lane.folded < children {
            if !t.is_done(lane.recvs.get(lane.folded)) {
                return Ok(false);
            }
            if lane.folded > 0 {
                t.fold(self.acc(at), self.slot(lane.folded, at));
            }
            lane.folded += 1;
        }
        if !lane.passed {
            lane.passed = true;
            match parent {
                Some(p) => lane.send.push(t.send(self.shape.at(self.root, p), at.index as u32, self.acc(at))?),
                None => t.finish(self.acc(at), self.shape.size),
            }
        }
        Ok(lane.send.all_done(t))
    }
}

#[cfg(test)]
mod tests {
    use super::family;

    #[test]
    fn every_rank_is_the_child_of_its_parent_and_of_nobody_else() {
        for n in 1..70 {
            let mut parents = vec![Vec::new(); n];
            for d in 0..n {
                for i in 0..family(d, n).1 {
                    parents[d + (1 << i)].push(d);
                }
            }
            for (d, p) in parents.iter().enumerate() {
                assert_eq!(p, &family(d, n).0.into_iter().collect::<Vec<_>>(), "{d} of {n}");
            }
        }
    }
}
