//! all_gather by direct exchange: every rank sends its shard to every other, all at once.

use std::task::Poll;

use comm_core::Result;

use super::post::Tokens;
use super::{Buf, Schedule, Shape, Span, Transport};

/// all_gather by direct exchange. One message per pair, of the shard's whole length. No scratch.
#[derive(Debug)]
pub struct AllGatherDirect {
    shape: Shape,
    started: bool,
    sends: Tokens,
    recvs: Tokens,
}

impl AllGatherDirect {
    pub(super) fn new(shape: Shape) -> Self {
        Self { shape, started: false, sends: Tokens::default(), recvs: Tokens::default() }
    }

    fn run(&mut self, t: &mut dyn Transport) -> Result<bool> {
        let Shape { rank, size, bytes, in_place, .. } = self.shape;
        if bytes == 0 {
            return Ok(true);
        }
        if !self.started {
            self.started = true;
            let block = |p: usize| Span::new(Buf::Output, p * bytes, bytes);
            let own = if in_place { block(rank) } else { Span::new(Buf::Input, 0, bytes) };
            for d in 1..size {
                self.sends.push(t.send((rank + d) % size, 0, own)?);
            }
            for d in 1..size {
                let p = (rank + size - d) % size;
                self.recvs.push(t.recv(p, 0, block(p))?);
            }
            if !in_place {
                t.copy(block(rank), own);
            }
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
