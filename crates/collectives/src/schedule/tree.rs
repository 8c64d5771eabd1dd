//! gather and scatter along binomial trees: the blocks of a whole subtree travel together.
//!
//! `log2 n` messages at the root instead of `n − 1`, at the price of copies on the way. Made for small
//! blocks; of larger ones one piece after the other is gathered or scattered, so that scratch stays bounded.

use std::task::Poll;

use comm_core::Result;

use super::binomial::family;
use super::post::Tokens;
use super::waves::{Piece, Plan, Waves};
use super::{Buf, Cut, Schedule, Shape, Span, Transport};

/// Pieces under way.
const LANES: usize = 2;

/// Segments that the pieces of all ranks together fill at most, unless blocks are so long or ranks so many that
/// a piece would be too short.
const TOGETHER: usize = 8;

/// gather to, or scatter from, the root along a binomial tree.
///
/// Scratch: one piece per rank of the subtree, for each of up to two pieces under way, on ranks that are not leaves.
#[derive(Debug)]
pub struct Tree(Kind);

#[derive(Debug)]
enum Kind {
    Gather(Waves<Up, LANES>),
    Scatter(Waves<Down, LANES>),
}

impl Tree {
    pub(super) fn gather(shape: Shape, root: usize) -> Self {
        let nodes = Nodes::new(shape, root);
        Self(Kind::Gather(Waves::new(Up(nodes), nodes.cut)))
    }

    pub(super) fn scatter(shape: Shape, root: usize) -> Self {
        let nodes = Nodes::new(shape, root);
        Self(Kind::Scatter(Waves::new(Down(nodes), nodes.cut)))
    }
}

impl Schedule for Tree {
    fn poll(&mut self, t: &mut dyn Transport) -> Poll<Result<()>> {
        match &mut self.0 {
            Kind::Gather(w) => w.poll(t),
            Kind::Scatter(w) => w.poll(t),
        }
    }

    fn scratch(&self) -> usize {
        match &self.0 {
            Kind::Gather(w) => w.lanes() * w.plan.0.slots() * w.segment(),
            Kind::Scatter(w) => w.lanes() * w.plan.0.slots() * w.segment(),
        }
    }

    fn name(&self) -> &'static str {
        "binomial"
    }
}

/// A rank's place in the tree. Its subtree are the ranks from its distance from the root on.
#[derive(Clone, Copy, Debug)]
struct Nodes {
    shape: Shape,
    root: usize,
    cut: Cut,
    distance: usize,
    parent: Option<usize>,
    children: usize,
    /// Ranks of the subtree.
    ranks: usize,
}

impl Nodes {
    fn new(shape: Shape, root: usize) -> Self {
        let distance = shape.distance_from(root);
        let (parent, children) = family(distance, shape.size);
        let segment = shape.wanted_segment().saturating_mul(TOGETHER) / shape.size;
        let cut = Shape { segment: segment.max(1), ..shape }.cut();
        let parent = parent.map(|p| shape.at(root, p));
        let mut nodes = Self { shape, root, cut, distance, parent, children, ranks: 1 };
        nodes.ranks += (0..children).map(|i| nodes.child(i).1).sum::<usize>();
        nodes
    }

    /// The rank of child `i`, and how many ranks its subtree has. It begins `2^i` after this rank's.
    fn child(&self, i: usize) -> (usize, usize) {
        let d = self.distance + (1 << i);
        (self.shape.at(self.root, d), (1 << i).min(self.shape.size - d))
    }

    fn slots(&self) -> usize {
        if self.children > 0 { self.ranks } else { 0 }
    }

    /// The scratch for the pieces of `count` ranks of the subtree from the `first` on.
    fn scratch(&self, at: Piece, first: usize, count: usize) -> Span {
        Span::new(Buf::Scratch, at.lane * self.slots() * self.cut.segment + first * at.len, count * at.len)
    }

    /// The piece of the rank that is the `i`-th of the subtree in the root's buffer.
    fn block(&self, buf: Buf, at: Piece, i: usize) -> Span {
        let r = self.shape.at(self.root, self.distance + i);
        Span::new(buf, r * self.shape.bytes + at.off, at.len)
    }

    fn single(buf: Buf, at: Piece) -> Span {
        Span::new(buf, at.off, at.len)
    }

    /// What is exchanged with child `i`; `all` is the root's buffer.
    fn bundle(&self, all: Buf, at: Piece, i: usize) -> Span {
        match self.child(i).1 {
            1 if self.parent.is_none() => self.block(all, at, 1 << i),
            count => self.scratch(at, 1 << i, count),
        }
    }
}

#[derive(Debug, Default)]
struct Lane {
    recvs: Tokens,
    sends: Tokens,
    /// Receives that are done.
    came: usize,
    passed: bool,
}

impl Lane {
    fn reset(&mut self) {
        self.recvs.clear();
        self.sends.clear();
        (self.came, self.passed) = (0, false);
    }
}

#[derive(Debug)]
struct Up(Nodes);

impl Plan for Up {
    type Lane = Lane;

    fn start(&self, t: &mut dyn Transport, lane: &mut Lane, at: Piece) -> Result<()> {
        lane.reset();
        let own = Nodes::single(Buf::Input, at);
        for i in 0..self.0.children {
            lane.recvs.push(t.recv(self.0.child(i).0, at.index as u32, self.0.bundle(Buf::Output, at, i))?);
        }
        match self.0.parent {
            None if !self.0.shape.in_place => t.copy(self.0.block(Buf::Output, at, 0), own),
            Some(_) if self.0.children > 0 => t.copy(self.0.scratch(at, 0, 1), own),
            _ => {}
        }
        Ok(())
    }

    fn advance(&self, t: &mut dyn Transport, lane: &mut Lane, at: Piece) -> Result<bool> {
        while lane.came < self.0.children {
            if !t.is_done(lane.recvs.get(lane.came)) {
                return Ok(false);
            }
            let first = 1 << lane.came;
            let (_, count) = self.0.child(lane.came);
            if self.0.parent.is_none() && count > 1 {
                for i in first..first + count {
                    t.copy(self.0.block(Buf::Output, at, i), self.0.scratch(at, i, 1));
                }
            }
            lane.came += 1;
        }
        if let (Some(parent), false) = (self.0.parent, lane.passed) {
            let leaf = self.0.children == 0;
            let span = if leaf { Nodes::single(Buf::Input, at) } else { self.0.scratch(at, 0, self.0.ranks) };
            lane.sends.push(t.send(parent, at.index as u32, span)?);
        }
        lane.passed = true;
        Ok(lane.sends.all_done(t))
    }
}

#[derive(Debug)]
struct Down(Nodes);

impl Plan for Down {
    type Lane = Lane;

    fn start(&self, t: &mut dyn Transport, lane: &mut Lane, at: Piece) -> Result<()> {
        lane.reset();
        if let Some(parent) = self.0.parent {
            let leaf = self.0.children == 0;
            let span = if leaf { Nodes::single(Buf::Output, at) } else { self.0.scratch(at, 0, self.0.ranks) };
            lane.recvs.push(t.recv(parent, at.index as u32, span)?);
        }
        Ok(())
    }

    fn advance(&self, t: &mut dyn Transport, lane: &mut Lane, at: Piece) -> Result<bool> {
        if !lane.passed {
            if !lane.recvs.all_done(t) {
                return Ok(false);
            }
            // The child with the largest subtree first.
            for i in (0..self.0.children).rev() {
                let (child, count) = self.0.child(i);
                if self.0.parent.is_none() && count > 1 {
                    for i in (1 << i)..(1 << i) + count {
                        t.copy(self.0.scratch(at, i, 1), self.0.block(Buf::Input, at, i));
                    }
                }
                lane.sends.push(t.send(child, at.index as u32, self.0.bundle(Buf::Input, at, i))?);
            }
            let own = Nodes::single(Buf::Output, at);
            match self.0.parent {
                None if !self.0.shape.in_place => t.copy(own, self.0.block(Buf::Input, at, 0)),
                Some(_) if self.0.children > 0 => t.copy(own, self.0.scratch(at, 0, 1)),
                _ => {}
            }
            lane.passed = true;
        }
        Ok(lane.sends.all_done(t))
    }
}
