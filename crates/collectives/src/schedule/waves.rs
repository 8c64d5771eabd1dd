//! Schedules whose segments do not depend on each other: each segment is a small operation of its
//! own, and a few of them are under way at a time.

use std::fmt::Debug;
use std::task::Poll;

use comm_core::Result;

use super::{Cut, Transport};

/// One segment under way.
#[derive(Clone, Copy, Debug)]
pub(super) struct Piece {
    /// Its number, from which step numbers are made.
    pub(super) index: usize,
    /// The lane it runs in, from which scratch offsets are made.
    pub(super) lane: usize,
    /// Its offset in the buffer.
    pub(super) off: usize,
    /// Its length.
    pub(super) len: usize,
}

/// What is done with each segment.
pub(super) trait Plan: Debug + Send {
    /// The state of one segment under way.
    type Lane: Debug + Default + Send;

    /// Begins a segment. The lane may hold the state of an older one.
    fn start(&self, t: &mut dyn Transport, lane: &mut Self::Lane, at: Piece) -> Result<()>;

    /// Goes on with a segment; true once its sends, receives and folds are done. Not called after that.
    fn advance(&self, t: &mut dyn Transport, lane: &mut Self::Lane, at: Piece) -> Result<bool>;
}

/// Runs a plan over all segments, at most `W` of them at a time.
#[derive(Debug)]
pub(super) struct Waves<P: Plan, const W: usize> {
    pub(super) plan: P,
    cut: Cut,
    /// The oldest segment that is not done, and the first that is not started.
    head: usize,
    next: usize,
    lanes: [(P::Lane, bool); W],
}

impl<P: Plan, const W: usize> Waves<P, W> {
    pub(super) fn new(plan: P, cut: Cut) -> Self {
        Self { plan, cut, head: 0, next: 0, lanes: std::array::from_fn(|_| Default::default()) }
    }

    /// Lanes that are ever used; what a plan needs per lane is needed this many times.
    pub(super) fn lanes(&self) -> usize {
        self.cut.count().min(W)
    }

    pub(super) fn segment(&self) -> usize {
        self.cut.segment
    }

    fn run(&mut self, t: &mut dyn Transport) -> Result<bool> {
        let count = self.cut.count();
        loop {
            while self.next < count && self.next - self.head < W {
                let at = self.piece(self.next);
                let (lane, done) = &mut self.lanes[at.lane];
                *done = false;
                self.plan.start(t, lane, at)?;
                self.next += 1;
            }
            for i in self.head..self.next {
                let at = self.piece(i);
                let (lane, done) = &mut self.lanes[at.lane];
                *done = *done || self.plan.advance(t, lane, at)?;
            }
            let before = self.head;
            while self.head < self.next && self.lanes[self.head % W].1 {
                self.head += 1;
            }
            // Only a freed lane can make more happen: within a lane, `advance` went as far as it could.
            if self.head == before || self.next == count {
                return Ok(self.head == count);
            }
        }
    }

    pub(super) fn poll(&mut self, t: &mut dyn Transport) -> Poll<Result<()>> {
        match self.run(t) {
            Ok(true) => Poll::Ready(Ok(())),
            Ok(false) => Poll::Pending,
            Err(e) => Poll::Ready(Err(e)),
        }
    }

    fn piece(&self, index: usize) -> Piece {
        let (off, len) = self.cut.at(index);
        Piece { index, lane: index % W, off, len }
    }
}
