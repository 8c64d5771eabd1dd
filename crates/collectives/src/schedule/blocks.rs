//! How long the blocks of an operation are that moves one block per rank or per pair of ranks.

use std::sync::Arc;

use comm_core::{Error, Operation, Result};

use super::{Buf, Request, Shape, Span};

/// The lengths of an operation's blocks, in bytes.
///
/// The buffers of a block operation are its blocks in rank order, without gaps.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Blocks {
    /// Every block is [`Shape::bytes`] long. Operations without blocks have this too.
    #[default]
    Even,
    /// One length per rank: for all_gather_v and reduce_scatter_v, which all ranks must know alike, and for
    /// gather_v and scatter_v, where the root must know all and of the others' lists only their own entry counts.
    Uneven(Arc<[usize]>),
    /// For all_to_all_v. The entries of the rank itself must be equal.
    Pairs {
        /// What this rank sends to each rank.
        send: Arc<[usize]>,
        /// What this rank receives from each rank.
        recv: Arc<[usize]>,
    },
}

impl Blocks {
    /// Whether the lengths fit the operation and the other numbers.
    pub(super) fn check(&self, op: Operation, shape: &Shape) -> Result<()> {
        match (op, self) {
            (_, Self::Even) => Ok(()),
            (
                Operation::AllGatherV | Operation::GatherV | Operation::ScatterV | Operation::ReduceScatterV,
                Self::Uneven(lens),
            ) => check(lens, shape),
            (Operation::AllToAllV, Self::Pairs { send, recv }) => {
                check(send, shape)?;
                check(recv, shape)?;
                let (to, from) = (send[shape.rank], recv[shape.rank]);
                if to != from {
                    let rank = shape.rank;
                    return Err(Error::invalid(format!(
                        "rank {rank} sends {to} bytes to itself and receives {from} from itself; they must be as many"
                    )));
                }
                Ok(())
            }
            (Operation::AllToAllV, Self::Uneven(_)) => {
                Err(Error::invalid(format!("{op} needs the lengths of its blocks by pair of ranks, not by rank")))
            }
            (_, Self::Uneven(_)) => Err(Error::invalid(format!("{op} has no blocks of uneven length"))),
            (_, Self::Pairs { .. }) => Err(Error::invalid(format!("{op} has no blocks by pair of ranks"))),
        }
    }
}

fn check(lens: &[usize], shape: &Shape) -> Result<()> {
    let Shape { size, unit, .. } = *shape;
    if lens.len() != size {
        return Err(Error::invalid(format!(
            "{} block lengths for {size} ranks; there must be one per rank",
            lens.len()
        )));
    }
    if let Some((r, len)) = lens.iter().enumerate().find(|(_, len)| !len.is_multiple_of(unit)) {
        return Err(Error::invalid(format!(
            "rank {r}'s block of {len} bytes is not a multiple of the reducer's unit of {unit} bytes"
        )));
    }
    // Eight: as in `Shape::check`.
    let sum = lens.iter().try_fold(0usize, |sum, len| sum.checked_add(*len));
    match sum.and_then(|sum| sum.checked_mul(8)) {
        Some(all) if all <= isize::MAX as usize => Ok(()),
        _ => Err(Error::invalid(format!("the blocks of {size} ranks together exceed the address space"))),
    }
}

/// Most ranks whose blocks a layout holds without allocating.
const INLINE: usize = 16;

/// Where the blocks of one buffer lie.
#[derive(Clone, Debug)]
pub(super) enum Layout {
    /// All of this length.
    Even(usize),
    /// Where each begins, and, from there on, where the last ends.
    Few([usize; INLINE + 1]),
    /// The same of more ranks.
    Many(Box<[usize]>),
}

impl Layout {
    fn new(lens: &[usize]) -> Self {
        let mut end = 0;
        let ends = lens.iter().map(|len| {
            end += len;
            end
        });
        if lens.len() > INLINE {
            return Self::Many(std::iter::once(0).chain(ends).collect());
        }
        let mut few = [0; INLINE + 1];
        few[1..].iter_mut().zip(ends).for_each(|(slot, end)| *slot = end);
        few[lens.len()..].fill(end);
        Self::Few(few)
    }

    /// Length of rank `r`'s block.
    pub(super) fn len(&self, r: usize) -> usize {
        match self {
            Self::Even(len) => *len,
            Self::Few(starts) => starts[r + 1] - starts[r],
            Self::Many(starts) => starts[r + 1] - starts[r],
        }
    }

    /// Where rank `r`'s block begins.
    pub(super) fn offset(&self, r: usize) -> usize {
        match self {
            Self::Even(len) => r * len,
            Self::Few(starts) => starts[r],
            Self::Many(starts) => starts[r],
        }
    }

    /// Length of the longest block.
    pub(super) fn longest(&self) -> usize {
        let starts = match self {
            Self::Even(len) => return *len,
            Self::Few(starts) => &starts[..],
            Self::Many(starts) => starts,
        };
        starts.windows(2).map(|pair| pair[1] - pair[0]).max().unwrap_or(0)
    }

    /// What bytes `off..off + len` of rank `r`'s block are in the buffer, as offset and length; `None` where
    /// the block has ended before.
    pub(super) fn part(&self, r: usize, off: usize, len: usize) -> Option<(usize, usize)> {
        let all = self.len(r);
        if off < all { Some((self.offset(r) + off, len.min(all - off))) } else { None }
    }

    /// Rank `r`'s block of a buffer.
    pub(super) fn span(&self, buf: Buf, r: usize) -> Span {
        Span::new(buf, self.offset(r), self.len(r))
    }
}

impl Request {
    /// Where the blocks lie of an operation that has one per rank.
    pub(super) fn layout(&self) -> Layout {
        match &self.blocks {
            Blocks::Uneven(lens) => Layout::new(lens),
            Blocks::Even | Blocks::Pairs { .. } => Layout::Even(self.shape.bytes),
        }
    }

    /// Where the blocks lie that an all_to_all sends, and those that it receives.
    pub(super) fn layouts(&self) -> (Layout, Layout) {
        match &self.blocks {
            Blocks::Pairs { send, recv } => (Layout::new(send), Layout::new(recv)),
            Blocks::Even | Blocks::Uneven(_) => (self.layout(), self.layout()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: Shape = Shape { rank: 1, size: 3, bytes: 0, unit: 4, in_place: false, segment: 0 };

    #[test]
    fn blocks_lie_one_after_the_other() {
        let blocks = Blocks::Uneven([8, 0, 4].into());
        blocks.check(Operation::AllGatherV, &SHAPE).unwrap();
        let layout = Request { shape: SHAPE, root: 0, blocks }.layout();
        let spans: Vec<_> = (0..3).map(|r| (layout.offset(r), layout.len(r))).collect();
        assert_eq!(spans, [(0, 8), (8, 0), (8, 4)]);
        assert_eq!(layout.span(Buf::Output, 2), Span::new(Buf::Output, 8, 4));
    }

    #[test]
    fn layouts_of_few_and_of_many_ranks_are_alike() {
        for n in [1, 15, 16, 17, 40] {
            let lens: Vec<usize> = (0..n).map(|i| i * 7 % 5).collect();
            let layout = Layout::new(&lens);
            assert_eq!(matches!(layout, Layout::Few(_)), n <= 16);
            let mut end = 0;
            for (r, &len) in lens.iter().enumerate() {
                assert_eq!((layout.offset(r), layout.len(r)), (end, len), "{r} of {n}");
                let parts: Vec<_> = (0..3).filter_map(|k| layout.part(r, 2 * k, 2)).collect();
                assert_eq!(parts.iter().map(|p| p.1).sum::<usize>(), len);
                assert!(parts.iter().enumerate().all(|(k, p)| p.0 == end + 2 * k && (1..=2).contains(&p.1)));
                end += len;
            }
            assert_eq!(layout.longest(), lens.iter().copied().max().unwrap());
        }
        assert_eq!((Layout::Even(3).offset(2), Layout::Even(3).longest()), (6, 3));
    }

    #[test]
    fn lengths_that_do_not_fit_are_errors() {
        let uneven = |lens: &[usize]| Blocks::Uneven(lens.into());
        let pairs = |send: &[usize], recv: &[usize]| Blocks::Pairs { send: send.into(), recv: recv.into() };
        let bad = [
            (Operation::AllGatherV, uneven(&[4, 4]), "one per rank"),
            (Operation::GatherV, uneven(&[4, 6, 4]), "multiple"),
            (Operation::ScatterV, uneven(&[usize::MAX & !3; 3]), "address space"),
            (Operation::ReduceScatterV, uneven(&[1 << 62, 0, 0]), "address space"),
            (Operation::AllToAllV, pairs(&[4, 8, 4], &[4, 4, 4]), "itself"),
            (Operation::AllToAllV, pairs(&[4, 8, 4], &[4, 8]), "one per rank"),
            (Operation::AllToAllV, uneven(&[4, 4, 4]), "by pair"),
            (Operation::Gather, uneven(&[4, 4, 4]), "uneven"),
            (Operation::AllReduce, pairs(&[4, 4, 4], &[4, 4, 4]), "pair"),
        ];
        for (op, blocks, part) in bad {
            let e = blocks.check(op, &SHAPE).unwrap_err();
            assert!(e.to_string().contains(part), "{e}");
        }
        pairs(&[4, 8, 0], &[16, 8, 4]).check(Operation::AllToAllV, &SHAPE).unwrap();
    }
}
