//! scan and exscan along a pipelined chain: sums pass from rank to rank, each link busy with another segment.
//!
//! Every link carries the buffer once; the latency of the chain is paid once, not per segment.

use std::task::Poll;

use comm_core::Result;

use super::chain::Flow;
use super::post::AHEAD;
use super::{Buf, Cut, Schedule, Shape, Span, Transport};

/// Segments that a rank holds: those being received and, for exscan, those being sent.
const SLOTS: usize = 2 * AHEAD;

/// scan or exscan along the chain of ranks.
///
/// Folds one rank after the other, so that operators need not commute.
///
/// Scratch: up to nine segments, but none on rank 0 and, for exscan, on the last.
#[derive(Debug)]
pub struct PrefixChain {
    shape: Shape,
    exclusive: bool,
    cut: Cut,
    recv: Flow,
    send: Flow,
}

impl PrefixChain {
    pub(super) fn scan(shape: Shape) -> Self {
        Self::new(shape, false)
    }

    pub(super) fn exscan(shape: Shape) -> Self {
        Self::new(shape, true)
    }

    fn new(shape: Shape, exclusive: bool) -> Self {
        Self { shape, exclusive, cut: shape.cut(), recv: Flow::default(), send: Flow::default() }
    }

    const fn is_first(&self) -> bool {
        self.shape.rank == 0
    }

    const fn is_last(&self) -> bool {
        self.shape.rank + 1 == self.shape.size
    }

    /// Whether segments arrive where they are to stay.
    const fn keeps(&self) -> bool {
        self.exclusive && self.is_last()
    }

    fn slots(&self) -> usize {
        if self.is_first() || self.keeps() { 0 } else { self.cut.count().min(SLOTS) }
    }

    fn span(&self, buf: Buf, i: usize) -> Span {
        let (off, len) = self.cut.at(i);
        Span::new(buf, off, len)
    }

    fn slot(&self, i: usize) -> Span {
        let (_, len) = self.cut.at(i);
        Span::new(Buf::Scratch, i % SLOTS * self.cut.segment, len)
    }

    /// The sum that goes on to the next rank.
    fn passed(&self, i: usize) -> Span {
        if self.is_first() {
            self.span(self.shape.own(), i)
        } else if self.exclusive {
            self.slot(i)
        } else {
            self.span(Buf::Output, i)
        }
    }

    fn finish(&self, t: &mut dyn Transport, i: usize) {
        let ranks = self.shape.rank + usize::from(!self.exclusive);
        if ranks > 0 {
            t.finish(self.span(Buf::Output, i), ranks);
        }
    }

    /// Segment `i` has come: the combination of all ranks below.
    fn combine(&self, t: &mut dyn Transport, i: usize) {
        let (own, dst) = (self.span(self.shape.own(), i), self.span(Buf::Output, i));
        if !self.exclusive {
            if !self.shape.in_place {
                t.copy(dst, own);
            }
            t.fold_rev(dst, self.slot(i));
            // Between the ends, the sum goes on before it is finished.
            if self.is_last() {
                self.finish(t, i);
            }
            return;
        }
        if !self.keeps() {
            // The slot after all others is free between polls. In place, the result replaces the contribution.
            let copy = Span { off: self.slots() * self.cut.segment, ..self.slot(i) };
            t.copy(copy, own);
            t.copy(dst, self.slot(i));
            t.fold(self.slot(i), copy);
        }
        self.finish(t, i);
    }

    /// One round of whatever is possible; true if anything was.
    fn turn(&mut self, t: &mut dyn Transport) -> Result<bool> {
        let Shape { rank, in_place, .. } = self.shape;
        let count = self.cut.count();
        let mut moved = false;
        while self.recv.retire(t) {
            self.combine(t, self.recv.done - 1);
            moved = true;
        }
        while self.send.retire(t) {
            if !self.exclusive {
                self.finish(t, self.send.done - 1);
            }
            moved = true;
        }
        while !self.is_first() && self.recv.posted < count && !self.recv.window.is_full() {
            let i = self.recv.posted;
            // A slot is free once its sum is sent, or here to stay.
            let freed = if self.exclusive && !self.keeps() { self.send.done } else { self.recv.done };
            if i - freed >= SLOTS {
                break;
            }
            let dst = if self.keeps() { self.span(Buf::Output, i) } else { self.slot(i) };
            self.recv.window.push(t.recv(rank - 1, i as u32, dst)?);
            self.recv.posted += 1;
            moved = true;
        }
        let ready = if self.is_first() { count } else { self.recv.done };
        while !self.is_last() && self.send.posted < ready && !self.send.window.is_full() {
            let i = self.send.posted;
            self.send.window.push(t.send(rank + 1, i as u32, self.passed(i))?);
            self.send.posted += 1;
            if self.is_first() && !self.exclusive && !in_place {
                t.copy(self.span(Buf::Output, i), self.span(Buf::Input, i));
            }
            moved = true;
        }
        Ok(moved)
    }

    fn run(&mut self, t: &mut dyn Transport) -> Result<bool> {
        let count = self.cut.count();
        if self.shape.size == 1 {
            // Alone: `recv.done` only remembers that this was done.
            if !self.exclusive && self.recv.done < count {
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
        Ok((self.is_first() || self.recv.done == count) && (self.is_last() || self.send.done == count))
    }
}

impl Schedule for PrefixChain {
    fn poll(&mut self, t: &mut dyn Transport) -> Poll<Result<()>> {
        match self.run(t) {
            Ok(true) => Poll::Ready(Ok(())),
            Ok(false) => Poll::Pending,
            Err(e) => Poll::Ready(Err(e)),
        }
    }

    fn scratch(&self) -> usize {
        let slots = self.slots();
        (slots + usize::from(self.exclusive && slots > 0)) * self.cut.segment
    }

    fn name(&self) -> &'static str {
        "chain"
    }
}
