//! Pipelined chain: segments pass from rank to rank, each link busy with another segment.
//!
//! Every link carries the buffer once; the latency of the chain is paid once, not per segment.

use std::task::Poll;

use comm_core::Result;

use super::post::{AHEAD, Window};
use super::{Buf, Cut, Schedule, Shape, Span, Transport};

/// Segments that a rank between the ends of a reducing chain holds: those being received and those being sent.
const SLOTS: usize = 2 * AHEAD;

/// broadcast from the root to the end of the chain, or reduce from its end to the root. The chain runs
/// along the ranks, beginning with the root.
///
/// The reduction does not fold in rank order: for operators that commute.
///
/// Scratch: none for broadcast; up to eight segments for reduce between the chain's ends.
#[derive(Debug)]
pub struct Chain {
    shape: Shape,
    cut: Cut,
    reduces: bool,
    from: Option<usize>,
    to: Option<usize>,
    recv: Flow,
    send: Flow,
}

/// One direction: the number of segments posted, and of those that are done.
#[derive(Debug, Default)]
pub(super) struct Flow {
    pub(super) posted: usize,
    pub(super) done: usize,
    pub(super) window: Window,
}

impl Flow {
    pub(super) fn retire(&mut self, t: &dyn Transport) -> bool {
        let done = self.window.retire(t);
        self.done += usize::from(done);
        done
    }
}

impl Chain {
    /// `Output` is the buffer on all ranks.
    pub(super) fn broadcast(shape: Shape, root: usize) -> Self {
        let (prev, next) = Self::neighbours(shape, root);
        Self::new(shape, false, prev, next)
    }

    /// In place means that the contribution lies in `Output`; on ranks other than the root it is only read there.
    pub(super) fn reduce(shape: Shape, root: usize) -> Self {
        let (prev, next) = Self::neighbours(shape, root);
        Self::new(shape, true, next, prev)
    }

    fn new(shape: Shape, reduces: bool, from: Option<usize>, to: Option<usize>) -> Self {
        Self { shape, cut: shape.cut(), reduces, from, to, recv: Flow::default(), send: Flow::default() }
    }

    /// The neighbours towards the root and away from it.
    fn neighbours(shape: Shape, root: usize) -> (Option<usize>, Option<usize>) {
        let d = shape.distance_from(root);
        let prev = if d > 0 { Some(shape.at(root, d - 1)) } else { None };
        let next = if d + 1 < shape.size { Some(shape.at(root, d + 1)) } else { None };
        (prev, next)
    }

    /// Whether this rank adds to what passes through it.
    fn relays_sums(&self) -> bool {
        self.reduces && self.from.is_some() && self.to.is_some()
    }

    /// Where segment `i` lies here once it is received and folded.
    fn here(&self, i: usize) -> Span {
        let (off, len) = self.cut.at(i);
        if self.relays_sums() {
            Span::new(Buf::Scratch, i % SLOTS * self.cut.segment, len)
        } else if self.reduces && self.from.is_none() {
            Span::new(self.shape.own(), off, len)
        } else {
            Span::new(Buf::Output, off, len)
        }
    }

    /// One round of whatever is possible; true if anything was.
    fn turn(&mut self, t: &mut dyn Transport) -> Result<bool> {
        let count = self.cut.count();
        let mut moved = false;
        while self.recv.retire(t) {
            if self.reduces && self.to.is_none() {
                t.finish(self.here(self.recv.done - 1), self.shape.size);
            }
            moved = true;
        }
        while self.send.retire(t) {
            moved = true;
        }
        if let Some(from) = self.from {
            while self.recv.posted < count && !self.recv.window.is_full() {
                let i = self.recv.posted;
                if self.relays_sums() && i - self.send.done >= SLOTS {
                    break;
                }
                let dst = self.here(i);
                let token = if self.reduces {
                    let (off, len) = self.cut.at(i);
                    t.recv_fold(from, i as u32, dst, Span::new(self.shape.own(), off, len))?
                } else {
                    t.recv(from, i as u32, dst)?
                };
                self.recv.window.push(token);
                self.recv.posted += 1;
                moved = true;
            }
        }
        if let Some(to) = self.to {
            let ready = if self.from.is_some() { self.recv.done } else { count };
            while self.send.posted < ready && !self.send.window.is_full() {
                let i = self.send.posted;
                self.send.window.push(t.send(to, i as u32, self.here(i))?);
                self.send.posted += 1;
                moved = true;
            }
        }
        Ok(moved)
    }

    fn run(&mut self, t: &mut dyn Transport) -> Result<bool> {
        let count = self.cut.count();
        if self.shape.size == 1 {
            // Alone: `recv.done` only remembers that this was done.
            if self.reduces && self.recv.done < count {
                let whole = Span::new(Buf::Output, 0, self.shape.bytes);
                if !self.shape.in_place {
                    t.copy(whole, Span { buf: Buf::Input, ..whole });
                }
                t.finish(whole, 1);
                self.recv.done = count;
            }
            return Ok(true);
        }
        while self.turn(t)? {}
        Ok((self.from.is_none() || self.recv.done == count) && (self.to.is_none() || self.send.done == count))
    }
}

impl Schedule for Chain {
    fn poll(&mut self, t: &mut dyn Transport) -> Poll<Result<()>> {
        match self.run(t) {
            Ok(true) => Poll::Ready(Ok(())),
            Ok(false) => Poll::Pending,
            Err(e) => Poll::Ready(Err(e)),
        }
    }

    fn scratch(&self) -> usize {
        if self.relays_sums() { self.cut.count().min(SLOTS) * self.cut.segment } else { 0 }
    }

    fn name(&self) -> &'static str {
        "chain"
    }
}
