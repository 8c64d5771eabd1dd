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

    /// Combinations of a member: one per round, and before them one with the surplus rank that it serves.
    pub(super) fn combines(&self) -> usize {
        self.rounds + self.before()
    }

    /// Those before the rounds.
    pub(super) fn before(&self) -> usize {
        usize::from(self.serves())
    }

    /// The rank that is this member.
    pub(super) const fn rank_of(&self, member: usize) -> usize {
        if member < self.surplus { 2 * member + 1 } else { member + self.surplus }
    }

    /// How many ranks, members and surplus ranks that they serve, are those members that have the lowest `bits` bits
    /// of this one.
    pub(super) const fn ranks_of(&self, member: usize, bits: usize) -> usize {
        let lowest = member & ((1 << bits) - 1);
        let serving = if self.surplus > lowest { ((self.surplus - lowest - 1) >> bits) + 1 } else { 0 };
        (1 << (self.rounds - bits)) + serving
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cube(rank: usize, size: usize) -> Cube {
        Cube::new(Shape { rank, size, bytes: 0, unit: 1, in_place: false, segment: 0 })
    }

    #[test]
    fn every_rank_is_a_member_or_served_by_its_right_neighbour() {
        for n in 1..70 {
            let mut members = Vec::new();
            for r in 0..n {
                match cube(r, n).member() {
                    Some(m) => {
                        assert_eq!(cube(r, n).rank_of(m), r);
                        members.push(m);
                    }
                    None => assert!(cube(r + 1, n).serves()),
                }
            }
            assert_eq!(members, (0..1 << cube(0, n).rounds).collect::<Vec<_>>(), "{n} ranks");
        }
    }

    #[test]
    fn ranks_are_counted_with_those_that_members_serve() {
        for n in 1..70 {
            let rounds = cube(0, n).rounds;
            for bits in 0..=rounds {
                for m in 0..1 << rounds {
                    let alike = |r: &usize| cube(*r, n).member().is_some_and(|o| (o ^ m) & ((1 << bits) - 1) == 0);
                    let ranks = (0..n).filter(alike).map(|r| 1 + usize::from(cube(r, n).serves())).sum::<usize>();
                    assert_eq!(cube(0, n).ranks_of(m, bits), ranks, "{n} ranks, {bits} bits of {m}");
                }
            }
        }
    }
}
