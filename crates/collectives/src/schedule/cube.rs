//! Hypercubes: which ranks exchange with which in schedules of `log2 n` rounds.

use super::Shape;

/// The largest power of two of ranks that are not more than there are, and a place for the others.
///
/// Each surplus rank gives its contribution to its right neighbour, a member, before the first round and gets the
/// result from it. So at every moment a member holds the combination of a contiguous block of ranks.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cube {
    rank: usize,
    /// log2 of the number of members.
    pub(super) rounds: usize,
    surplus: usize,
}

impl Cube {
    pub(super) fn new(shape: Shape) -> Self {
        let rounds = shape.size.ilog2() as usize;
        Self { rank: shape.rank, rounds, surplus: shape.size - (1 << rounds) }
    }

    /// This rank's number among the members, or `None` for a surplus rank.
    pub(super) fn member(&self) -> Option<usize> {
        if self.rank >= 2 * self.surplus {
            Some(self.rank - self.surplus)
        } else if self.serves() {
            Some(self.rank / 2)
        } else {
            None
        }
    }

    /// Whether the left neighbour is a surplus rank that this one serves.
    pub(super) fn serves(&self) -> bool {
        self.rank < 2 * self.surplus && self.rank % 2 == 1
    }

    /// The rank that is this member.
    pub(super) fn rank_of(&self, member: usize) -> usize {
        if member < self.surplus { 2 * member + 1 } else { member + self.surplus }
    }
}
