//! The root and every other rank exchange one message each.

use std::task::Poll;

use comm_core::Result;

use super::blocks::Layout;
use super::post::Tokens;
use super::{Buf, Request, Schedule, Shape, Span, Transport};

/// gather, gather_v, scatter and scatter_v straight between the root and the others.
///
/// One message per rank, of the block's whole length; the root has up to 16 under way at a time. Those of
/// gather_v and scatter_v are exchanged even when they are empty. No scratch.
#[derive(Debug)]
pub struct Star {
    shape: Shape,
    root: usize,
    layout: Layout,
    gathers: bool,
    /// Whether empty blocks are sent too.
    always: bool,
    /// Distance from the root of the next rank whose message is due.
    next: usize,
    copied: bool,
    tokens: Tokens,
}

impl Star {
    pub(super) fn gather(request: &Request) -> Self {
        Self::new(request, true, false)
    }

    pub(super) fn gather_v(request: &Request) -> Self {
        Self::new(request, true, true)
    }

    pub(super) fn scatter(request: &Request) -> Self {
        Self::new(request, false, false)
    }

    pub(super) fn scatter_v(request: &Request) -> Self {
        Self::new(request, false, true)
    }

    fn new(request: &Request, gathers: bool, always: bool) -> Self {
        let Request { shape, root, .. } = *request;
        let layout = request.layout();
        Self { shape, root, layout, gathers, always, next: 1, copied: false, tokens: Tokens::default() }
    }

    fn exchanges(&self, p: usize) -> bool {
        self.always || self.layout.len(p) > 0
    }

    /// This rank's block where it lies alone.
    fn single(&self) -> Span {
        let buf = if self.gathers { Buf::Input } else { Buf::Output };
        Span::new(buf, 0, self.layout.len(self.shape.rank))
    }

    /// Rank `p`'s block among all at the root.
    fn block(&self, p: usize) -> Span {
        self.layout.span(if self.gathers { Buf::Output } else { Buf::Input }, p)
    }

    /// What the root does besides exchanging: its own block.
    fn copy_own(&mut self, t: &mut dyn Transport) {
        let (single, block) = (self.single(), self.block(self.root));
        if !self.copied && !self.shape.in_place && single.len > 0 {
            if self.gathers { t.copy(block, single) } else { t.copy(single, block) }
        }
        self.copied = true;
    }

    fn run(&mut self, t: &mut dyn Transport) -> Result<bool> {
        if self.shape.rank != self.root {
            // Only one message; `next` tells whether it is posted.
            if self.next == 1 && self.exchanges(self.shape.rank) {
                let (root, mine) = (self.root, self.single());
                self.tokens.push(if self.gathers { t.send(root, 0, mine)? } else { t.recv(root, 0, mine)? });
            }
            self.next = self.shape.size;
            return Ok(self.tokens.all_done(t));
        }
        loop {
            while self.next < self.shape.size && !self.tokens.is_full() {
                let p = self.shape.at(self.root, self.next);
                if self.exchanges(p) {
                    let block = self.block(p);
                    self.tokens.push(if self.gathers { t.recv(p, 0, block)? } else { t.send(p, 0, block)? });
                }
                self.next += 1;
            }
            // After the first messages, so that the copy does not hold them up.
            self.copy_own(t);
            let done = self.tokens.all_done(t);
            if self.next == self.shape.size || self.tokens.is_full() {
                return Ok(done);
            }
        }
    }
}

impl Schedule for Star {
    fn poll(&mut self, t: &mut dyn Transport) -> Poll<Result<()>> {
        match self.run(t) {
            Ok(true) => Poll::Ready(Ok(())),
            Ok(false) => Poll::Pending,
            Err(e) => Poll::Ready(Err(e)),
        }
    }

    fn scratch(&self) -> usize {
        0
    }

    fn name(&self) -> &'static str {
        "direct"
    }
}
