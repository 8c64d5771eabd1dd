//! Dissemination barrier: in round `k` everybody tells the rank at distance `2^k`; `log2 n` rounds.

use std::task::Poll;

use comm_core::Result;

use super::post::Tokens;
use super::{Buf, Schedule, Shape, Span, Transport};

/// barrier by dissemination. Its messages are empty. No scratch.
#[derive(Debug)]
pub struct Dissemination {
    rank: usize,
    size: usize,
    /// Rounds whose message is sent, and rounds whose message has come.
    sent: usize,
    heard: usize,
    recvs: Tokens,
    sends: Tokens,
}

impl Dissemination {
    pub(super) fn barrier(shape: Shape) -> Self {
        let Shape { rank, size, .. } = shape;
        Self { rank, size, sent: 0, heard: 0, recvs: Tokens::default(), sends: Tokens::default() }
    }

    fn run(&mut self, t: &mut dyn Transport) -> Result<bool> {
        const EMPTY: Span = Span::new(Buf::Scratch, 0, 0);
        let (rank, n) = (self.rank, self.size);
        let rounds = n.next_power_of_two().ilog2() as usize;
        if self.sent == 0 {
            for k in 0..rounds {
                self.recvs.push(t.recv((rank + n - (1 << k)) % n, k as u32, EMPTY)?);
            }
        }
        while self.heard < rounds {
            // Round k tells of everybody that this rank has heard of in the rounds before.
            if self.sent == self.heard {
                self.sends.push(t.send((rank + (1 << self.sent)) % n, self.sent as u32, EMPTY)?);
                self.sent += 1;
            }
            if !t.is_done(self.recvs.get(self.heard)) {
                break;
            }
            self.heard += 1;
        }
        Ok(self.sends.all_done(t) && self.heard == rounds)
    }
}

impl Schedule for Dissemination {
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
        "dissemination"
    }
}
