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
//!   time. Messages of length zero are posted by barriers only.
//! * Which messages are exchanged depends on the [`Shape`]'s `size`, `bytes`, `unit` and `segment`,
//!   which must be the same on all ranks, and not on `in_place`, which may differ between ranks.
//! * `Input` is never written.

mod all_gather;
mod any;
mod barrier;
mod binomial;
mod chain;
mod direct;
mod doubling;
mod post;
mod ring;
mod waves;

use std::task::Poll;

use comm_core::{Error, Result};

pub use all_gather::AllGatherDirect;
pub use any::AnySchedule;
pub use barrier::Dissemination;
pub use binomial::Binomial;
pub use chain::Chain;
pub use direct::Direct;
pub use doubling::RecursiveDoubling;
pub use ring::Ring;

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

    /// Final division of `Avg` etc. over the given number of ranks (the communicator's size).
    fn finish(&mut self, span: Span);
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
    /// Bytes of the operation, a multiple of `unit`: of the whole buffer for all_reduce, reduce and
    /// broadcast; of one rank's shard for all_gather and reduce_scatter; ignored by a barrier.
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
        let wanted = if self.segment == 0 { Self::SEGMENT } else { self.segment };
        let unit = self.unit.max(1);
        // A ring exchanges less than 2 · size messages per segment between two ranks, others less than 64.
        let most = (1 << 16).min((1 << 31) / self.size.max(1)).max(1);
        // Capped before it is rounded up, which so cannot overflow: `bytes` is a multiple of `unit`.
        wanted.max(self.bytes.div_ceil(most)).min(self.bytes).max(1).next_multiple_of(unit)
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
        // Eight: no schedule has more than eight segments per rank in its scratch.
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
        Cut { bytes: self.bytes, segment: self.effective_segment() }
    }
}

/// A [`Shape`], and the root of operations that have one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// The numbers.
    pub shape: Shape,
    /// The root; ignored by operations without one.
    pub root: usize,
}

impl Request {
    fn check(&self, rooted: bool) -> Result<()> {
        self.shape.check()?;
        if rooted && self.root >= self.shape.size {
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
