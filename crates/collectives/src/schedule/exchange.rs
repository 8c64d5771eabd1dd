//! all_to_all by exchanges: each pair of ranks exchanges its two blocks.
//!
//! In turn `m` a rank exchanges with the ranks `m` above and `m` below it. All ranks take the turns in the
//! same order, and a few at a time: so every rank is receiver and sender of as many, nobody is crowded, and
//! as both blocks of a pair travel together, an exchange in place needs scratch for those under way only.

use std::task::Poll;

use comm_core::Result;

use super::blocks::Layout;
use super::post::AHEAD;
use super::waves::{Piece, Plan, Waves};
use super::{Buf, Cut, Schedule, Shape, Span, Token, Transport};

/// Turns of the direct exchange under way, with two peers each: all of up to 16 ranks.
const WIDE: usize = 8;

/// all_to_all and all_to_all_v: direct, with many peers at once, or pairwise, with few.
///
/// Blocks of one length are cut into segments. For large ones the two differ in the order of these: direct
/// goes over all peers segment by segment, pairwise over all segments peer by peer.
///
/// Of uneven blocks each is one message, an empty one too: only its two ends know the length, and if they
/// disagree, they learn that from the message.
///
/// Scratch: none, but in place two segments for each turn under way.
#[derive(Debug)]
pub struct Exchange {
    kind: Kind,
    copied: bool,
}

#[derive(Debug)]
enum Kind {
    Direct(Waves<Turns, WIDE>),
    Pairwise(Waves<Turns, AHEAD>),
}

impl Exchange {
    /// Blocks of [`Shape::bytes`]. In place, `Output` holds what is sent.
    pub(super) fn even(shape: Shape, pairwise: bool) -> Self {
        let (cut, blocks) = (shape.cut(), || Layout::Even(shape.bytes));
        Self::new(Turns { shape, send: blocks(), recv: blocks(), cut: Some(cut), pairwise })
    }

    /// Block `p` of `Input` goes to rank `p`, block `p` of `Output` comes from there.
    pub(super) fn uneven(shape: Shape, send: Layout, recv: Layout, pairwise: bool) -> Self {
        let shape = Shape { in_place: false, ..shape };
        Self::new(Turns { shape, send, recv, cut: None, pairwise })
    }

    fn new(turns: Turns) -> Self {
        let cut = Cut { bytes: turns.turns() * turns.segments(), segment: 1 };
        let kind =
            if turns.pairwise { Kind::Pairwise(Waves::new(turns, cut)) } else { Kind::Direct(Waves::new(turns, cut)) };
        Self { kind, copied: false }
    }

    /// The plan, and how many exchanges are under way at most.
    fn plan(&self) -> (&Turns, usize) {
        match &self.kind {
            Kind::Direct(w) => (&w.plan, w.lanes()),
            Kind::Pairwise(w) => (&w.plan, w.lanes()),
        }
    }
}

impl Schedule for Exchange {
    fn poll(&mut self, t: &mut dyn Transport) -> Poll<Result<()>> {
        let polled = match &mut self.kind {
            Kind::Direct(w) => w.poll(t),
            Kind::Pairwise(w) => w.poll(t),
        };
        if !self.copied {
            // After the first sends, so that the copy does not hold them up.
            self.copied = true;
            self.plan().0.copy_own(t);
        }
        polled
    }

    fn scratch(&self) -> usize {
        let (turns, lanes) = self.plan();
        let in_place = turns.cut.filter(|_| turns.shape.in_place);
        in_place.map_or(0, |cut| lanes * turns.sides() * cut.segment)
    }

    fn name(&self) -> &'static str {
        if self.plan().0.pairwise { "pairwise" } else { "direct" }
    }
}

/// One piece is one segment of the exchanges of one turn.
#[derive(Debug)]
struct Turns {
    shape: Shape,
    send: Layout,
    recv: Layout,
    /// How blocks are cut, if they are.
    cut: Option<Cut>,
    pairwise: bool,
}

/// What is under way: sends and receives of up to two peers.
#[derive(Debug, Default)]
struct Lane([Option<Token>; 4]);

impl Turns {
    const fn turns(&self) -> usize {
        self.shape.size / 2
    }

    fn segments(&self) -> usize {
        self.cut.map_or(1, |c| c.count())
    }

    /// Peers of a turn, at most.
    fn sides(&self) -> usize {
        (self.shape.size - 1).min(2)
    }

    /// The distance of a piece's turn, and the segment.
    fn place(&self, at: Piece) -> (usize, usize) {
        let (turns, segments) = (self.turns(), self.segments());
        if self.pairwise {
            (at.index / segments + 1, at.index % segments)
        } else {
            (at.index % turns + 1, at.index / turns)
        }
    }

    /// Segment `k` of the block that goes to, or comes from, rank `p`.
    fn span(&self, buf: Buf, layout: &Layout, p: usize, k: usize) -> Span {
        let (off, len) = self.cut.map_or((0, layout.len(p)), |c| c.at(k));
        Span::new(buf, layout.offset(p) + off, len)
    }

    fn copy_own(&self, t: &mut dyn Transport) {
        let Shape { rank, in_place, .. } = self.shape;
        let (from, to) = (self.send.span(Buf::Input, rank), self.recv.span(Buf::Output, rank));
        if !in_place && to.len > 0 {
            t.copy(to, from);
        }
    }
}

impl Plan for Turns {
    type Lane = Lane;

    fn start(&self, t: &mut dyn Transport, lane: &mut Lane, at: Piece) -> Result<()> {
        let Shape { rank, size, in_place, .. } = self.shape;
        let (m, k) = self.place(at);
        let peers = [(rank + m) % size, (rank + size - m) % size];
        // At half a world's distance both are the same rank.
        let peers = if 2 * m == size { &peers[..1] } else { &peers[..] };
        let mut kept = [Span::new(Buf::Scratch, 0, 0); 2];
        for (side, &p) in peers.iter().enumerate() {
            kept[side] = match self.cut {
                Some(cut) if in_place => {
                    let there = self.span(Buf::Output, &self.send, p, k);
                    let slot = (at.lane * self.sides() + side) * cut.segment;
                    let slot = Span { buf: Buf::Scratch, off: slot, ..there };
                    t.copy(slot, there);
                    slot
                }
                _ => self.span(Buf::Input, &self.send, p, k),
            };
        }
        for (side, &p) in peers.iter().enumerate() {
            lane.0[side] = Some(t.send(p, k as u32, kept[side])?);
        }
        for (side, &p) in peers.iter().enumerate() {
            lane.0[2 + side] = Some(t.recv(p, k as u32, self.span(Buf::Output, &self.recv, p, k))?);
        }
        Ok(())
    }

    fn advance(&self, t: &mut dyn Transport, lane: &mut Lane, _: Piece) -> Result<bool> {
        for open in &mut lane.0 {
            if open.is_some_and(|token| t.is_done(token)) {
                *open = None;
            }
        }
        Ok(lane.0.iter().all(Option::is_none))
    }
}
