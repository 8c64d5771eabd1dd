//! Schedules: what each rank sends, receives, folds and copies, as state machines that never block.
//!
//! A schedule is polled. Each poll posts what may be posted and folds what has arrived; it goes as
//! far as it can and returns. All effects go through a [`Transport`].
//!
//! Rules that every schedule here keeps, and drivers may rely on:
//!
//! * Nothing is written into a span that an unfinished send or receive still uses, and nothing is
//!   read from a span that an unfinished receive fills.
//! * A schedule does not ask about a token again once it was told that the token is done, so a
//!   driver may recycle tokens.
//! * Large buffers are cut into segments, and a bounded number of sends and receives is posted at a
//!   time; a direct exchange may post one message per peer, as long as the block that it carries.
//! * Messages of length zero are posted only by barriers, which have no others, and by gather_v,
//!   scatter_v and all_to_all_v: their lengths are known to the two ends alone, and ends that disagree
//!   must be told.
//! * Which messages are exchanged depends on the [`Shape`]'s `size`, `bytes`, `unit` and `segment`,
//!   which must be the same on all ranks, and on the [`Blocks`], of which both ends of a message must
//!   know the same, and not on `in_place`, which may differ between ranks.
//! * `Input` is never written.
//! * Buffers that consist of blocks (see below) may be separate pieces of the user's memory. No span
//!   that is given to a transport crosses the border between two blocks of such a buffer.
//!
//! # Buffers
//!
//! Some buffers are the blocks of all ranks in rank order: `Output` of all_gather and all_gather_v, of
//! gather and gather_v at the root, and of all_to_all and all_to_all_v; `Input` of scatter and scatter_v
//! at the root, of reduce_scatter and reduce_scatter_v, and of all_to_all and all_to_all_v. All others are
//! the one block or vector that the rank contributes or gets. In place means:
//!
//! * all_reduce, reduce at the root, scan, exscan: `Output` holds the contribution. (On ranks other than
//!   the root reduce only reads it there.)
//! * all_gather(_v), gather(_v) at the root: the contribution lies at its place among the blocks of `Output`.
//! * reduce_scatter(_v): `Output` holds the contribution, all blocks; the result replaces this rank's own
//!   block, and what the others hold after that is not defined.
//! * scatter(_v) at the root: its own block stays in `Input`; `Output` is not used.
//! * all_to_all: `Output` holds what is to be sent. all_to_all_v has no such form and ignores `in_place`,
//!   as do gather(_v) and scatter(_v) on ranks other than the root.
//! * broadcast, barrier: nothing; `Output` is the only buffer, or there is none.
//!
//! exscan leaves `Output` of rank 0 as it is.

mod all_gather;
mod any;
mod barrier;
mod binomial;
mod blocks;
mod bruck;
mod chain;
mod cube;
mod direct;
mod doubling;
mod exchange;
mod halving;
mod post;
mod prefix;
mod prefix_chain;
mod rabenseifner;
mod ring;
mod star;
mod tree;
mod waves;

use std::task::Poll;

use comm_core::{Error, Result};

use crate::select::Algorithm;

pub use all_gather::AllGatherDirect;
pub use any::AnySchedule;
pub use barrier::Dissemination;
pub use binomial::Binomial;
pub use blocks::Blocks;
pub use bruck::Bruck;
pub use chain::Chain;
pub use direct::Direct;
pub use doubling::RecursiveDoubling;
pub use exchange::Exchange;
pub use halving::Halving;
pub use prefix::PrefixDoubling;
pub use prefix_chain::PrefixChain;
pub use rabenseifner::Rabenseifner;
pub use ring::Ring;
pub use star::Star;
pub use tree::Tree;

/// Which buffer of the operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Buf {
    /// What this rank contributes. Never written. Not used by in-place operations.
    Input,
    /// Where the result goes; of an in-place operation also what this rank contributes.
    Output,
    /// Memory of the operation's own, [`Schedule::scratch`] bytes, with arbitrary content.
    Scratch,
}

/// A byte range of one buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// The buffer.
    pub buf: Buf,
    /// Where the range starts.
    pub off: usize,
    /// Its length.
    pub len: usize,
}

impl Span {
    const fn new(buf: Buf, off: usize, len: usize) -> Self {
        Self { buf, off, len }
    }
}

/// Identifies a posted send or receive of this operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Token(pub u32);

/// What a schedule may do. Implemented by the driver over an endpoint, by simulators and by tests.
pub trait Transport {
    /// This rank.
    fn rank(&self) -> usize;

    /// The number of ranks.
    fn size(&self) -> usize;

    /// Posts a send. The span must stay unchanged until the token is done.
    ///
    /// # Errors
    ///
    /// When the peer or the communicator has failed.
    fn send(&mut self, peer: usize, step: u32, span: Span) -> Result<Token>;

    /// Posts a receive of exactly `span.len` bytes. Messages between a pair are matched by step; each
    /// (peer, direction, step) is used once per operation.
    ///
    /// # Errors
    ///
    /// When the peer or the communicator has failed.
    fn recv(&mut self, peer: usize, step: u32, span: Span) -> Result<Token>;

    /// Posts a receive whose bytes are folded as they arrive: `dst = own op received`.
    ///
    /// `own` and `dst` have equal length and are the same span or do not overlap. `own` is only read
    /// (unless it is `dst`).
    ///
    /// # Errors
    ///
    /// When the peer or the communicator has failed.
    fn recv_fold(&mut self, peer: usize, step: u32, dst: Span, own: Span) -> Result<Token>;

    /// Whether the send or receive is done.
    fn is_done(&self, t: Token) -> bool;

    /// Copies `src` to `dst`, which have equal length and do not overlap.
    fn copy(&mut self, dst: Span, src: Span);

    /// `acc = acc op x` (`x` in `Scratch`, may be overwritten).
    fn fold(&mut self, acc: Span, x: Span);

    /// `acc = x op acc` (`x` in `Scratch`, is overwritten).
    fn fold_rev(&mut self, acc: Span, x: Span);

    /// Final division of `Avg` etc. over the given number of contributions: the communicator's size, but
    /// fewer for scan and exscan.
    fn finish(&mut self, span: Span, ranks: usize);
}

/// A per-rank state machine. Pure: all effects go through the [`Transport`]; never blocks.
pub trait Schedule: Send + std::fmt::Debug {
    /// Advances as far as possible. Ready once this rank's part is complete, which includes its sends
    /// being done.
    ///
    /// # Errors
    ///
    /// What the transport failed with. The operation cannot be continued then.
    fn poll(&mut self, t: &mut dyn Transport) -> Poll<Result<()>>;

    /// Scratch bytes needed.
    fn scratch(&self) -> usize;

    /// Name for `RUSTCOMMS_ALGO`, perf and logs, e.g. "ring".
    fn name(&self) -> &'static str;
}

/// The numbers from which a schedule is built.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// This rank.
    pub rank: usize,
    /// The number of ranks.
    pub size: usize,
    /// Bytes of the operation, a multiple of `unit`: of the whole buffer for all_reduce, reduce,
    /// broadcast, scan and exscan; of one block for all_gather, gather, scatter, reduce_scatter and
    /// all_to_all; ignored by a barrier, and where [`Blocks`] give the lengths.
    pub bytes: usize,
    /// Bytes that must not be torn apart: [`Reducer::unit`](comm_core::Reducer::unit), or 1.
    pub unit: usize,
    /// Whether this rank's contribution already lies in `Output`; `Input` is not used then.
    pub in_place: bool,
    /// Bytes of one segment of a pipelined transfer; 0 stands for [`Shape::SEGMENT`].
    /// Rounded up to a multiple of `unit`, and raised for buffers of very many segments, because a step
    /// number has 32 bits.
    pub segment: usize,
}

impl Shape {
    /// The default segment: large enough that per-message costs vanish, small enough to stay in cache.
    pub const SEGMENT: usize = 256 << 10;

    /// Most ranks of one communicator.
    pub const MAX_RANKS: usize = 1 << 24;

    /// The segment in use.
    #[must_use]
    pub fn effective_segment(&self) -> usize {
        self.segment_of(self.bytes)
    }

    const fn wanted_segment(&self) -> usize {
        if self.segment == 0 { Self::SEGMENT } else { self.segment }
    }

    /// The segment into which a transfer of so many bytes, a multiple of `unit`, is cut.
    fn segment_of(&self, bytes: usize) -> usize {
        let wanted = self.wanted_segment();
        let unit = self.unit.max(1);
        // A ring exchanges less than 2 · size messages per segment between two ranks, others less than 64.
        let most = (1 << 16).min((1 << 31) / self.size.max(1)).max(1);
        // Capped before it is rounded up, which so cannot overflow: `bytes` is a multiple of `unit`.
        wanted.max(bytes.div_ceil(most)).min(bytes).max(1).next_multiple_of(unit)
    }

    /// Whether the numbers make sense together.
    ///
    /// # Errors
    ///
    /// [`InvalidArgument`](comm_core::ErrorKind::InvalidArgument) naming the number that is wrong.
    pub fn check(&self) -> Result<()> {
        let Self { rank, size, bytes, unit, .. } = *self;
        if rank >= size {
            return Err(Error::invalid(format!("rank {rank} is not below the world size {size}")));
        }
        if size > Self::MAX_RANKS {
            return Err(Error::invalid(format!(
                "a world of {size} ranks is larger than {}; split the communicator",
                Self::MAX_RANKS
            )));
        }
        if unit == 0 || !bytes.is_multiple_of(unit) {
            return Err(Error::invalid(format!(
                "{bytes} bytes on rank {rank} are not a multiple of the reducer's unit of {unit} bytes"
            )));
        }
        // Eight: no schedule has more than eight segments per rank in its scratch (Bruck's all_to_all may, but
        // of a small size).
        match bytes.max(unit).checked_mul(size).and_then(|b| b.checked_mul(8)) {
            Some(all) if all <= isize::MAX as usize => Ok(()),
            _ => Err(Error::invalid(format!("{bytes} bytes on each of {size} ranks exceed the address space"))),
        }
    }

    /// The buffer that holds this rank's contribution.
    const fn own(&self) -> Buf {
        if self.in_place { Buf::Output } else { Buf::Input }
    }

    /// This rank's distance from `root` along the ranks.
    const fn distance_from(&self, root: usize) -> usize {
        (self.rank + self.size - root) % self.size
    }

    /// The rank at distance `d` from `root`.
    const fn at(&self, root: usize, d: usize) -> usize {
        (root + d) % self.size
    }

    fn cut(&self) -> Cut {
        self.cut_of(self.bytes)
    }

    /// How a transfer of so many bytes, a multiple of `unit`, is cut.
    fn cut_of(&self, bytes: usize) -> Cut {
        Cut { bytes, segment: self.segment_of(bytes) }
    }
}

/// A [`Shape`], the root of operations that have one, and the blocks of those that have them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// The numbers.
    pub shape: Shape,
    /// The root; ignored by operations without one.
    pub root: usize,
    /// How long the blocks are.
    pub blocks: Blocks,
}

impl Request {
    /// Without blocks, or with blocks of equal length.
    #[must_use]
    pub const fn even(shape: Shape, root: usize) -> Self {
        Self { shape, root, blocks: Blocks::Even }
    }

    fn check(&self, algorithm: Algorithm) -> Result<()> {
        self.shape.check()?;
        self.blocks.check(algorithm.operation(), &self.shape)?;
        if algorithm.is_rooted() && self.root >= self.shape.size {
            let (root, size) = (self.root, self.shape.size);
            return Err(Error::invalid(format!("root {root} is not below the world size {size}")));
        }
        Ok(())
    }
}

/// A buffer cut into segments.
#[derive(Clone, Copy, Debug)]
struct Cut {
    bytes: usize,
    segment: usize,
}

impl Cut {
    const fn count(&self) -> usize {
        self.bytes.div_ceil(self.segment)
    }

    /// Offset and length of segment `i`.
    fn at(&self, i: usize) -> (usize, usize) {
        let off = i * self.segment;
        (off, self.segment.min(self.bytes - off))
    }
}
