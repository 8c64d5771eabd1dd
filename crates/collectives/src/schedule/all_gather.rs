//! all_gather by direct exchange: every rank sends its block to every other, all at once.

use std::task::Poll;

use comm_core::Result;

use super::blocks::Layout;
use super::post::Tokens;
use super::{Buf, Schedule, Shape, Span, Transport};

/// all_gather and all_gather_v by direct exchange. One message per pair, of the block's whole length; none
/// for an empty block. No scratch.
#[derive(Debug)]
pub struct AllGatherDirect {
    shape: Shape,
    blocks: Layout,
    started: bool,
    sends: Tokens,
    recvs: Tokens,
}

impl AllGatherDirect {
    pub(super) fn new(shape: Shape, blocks: Layout) -> Self {
        Self { shape, blocks, started: false, sends: Tokens::default(), recvs: Tokens::default() }
    }

    fn start(&mut self, t: &mut dyn Transport) -> Result<()> {
        let Shape { rank, size, in_place, .. } = self.shape;
        let block = |p: usize| self.blocks.span(Buf::Output, p);
        let here = block(rank);
        let own = if in_place { here } else { Span::new(Buf::Input, 0, here.len) };
        if own.len > 0 {
            for d in 1..size {
                self.sends.push(t.send((rank + d) % size, 0, own)?);
            }
        }
        for p in (1..size).map(|d| (rank + size - d) % size) {
            if block(p).len > 0 {
                self.recvs.push(t.recv(p, 0, block(p))?);
            }
        }
        if own.len > 0 && !in_place {
            t.copy(here, own);
        }
        Ok(())
    }

    fn run(&mut self, t: &mut dyn Transport) -> Result<bool> {
        if !self.started {
            self.started = true;
            self.start(t)?;
        }
        let received = self.recvs.all_done(t);
        Ok(self.sends.all_done(t) && received)
    }
}

impl Schedule for AllGatherDirect {
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
