//! Which ranks are connected from the start: enough that news reaches everybody in `log2 n` steps, few enough that a
//! large world has no full mesh.

use std::fmt;

/// Worlds up to this size are connected fully: it costs little, and no call waits for a connection.
pub const SMALL_WORLD: usize = 8;

/// Makes the connections that an endpoint asks for, beside those that it was created with.
pub trait Dialer: Send + Sync + fmt::Debug {
    /// Wants a connection to endpoint rank `peer`. Returns at once, and does not call the endpoint from within: the
    /// outcome comes later through [`Endpoint::attach`](crate::Endpoint::attach) or
    /// [`Endpoint::unreachable`](crate::Endpoint::unreachable). A second request for the same peer changes nothing.
    fn dial(&self, peer: usize);
}

/// The ranks that `rank` of `size` is connected to from the start, in ascending order: all others in a small world or
/// if `full`, else those at distances that are powers of two, in both directions. If `a` is a neighbour of `b`, `b` is
/// one of `a`.
#[must_use]
pub fn neighbours(rank: usize, size: usize, full: bool) -> Vec<usize> {
    if full || size <= SMALL_WORLD {
        return (0..size).filter(|r| *r != rank).collect();
    }
    let mut list: Vec<usize> = std::iter::successors(Some(1usize), |d| Some(d * 2))
        .take_while(|d| *d < size)
        .flat_map(|d| [(rank + d) % size, (rank + size - d) % size])
        .collect();
    list.sort_unstable();
    list.dedup();
    list
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_are_mutual_few_and_reach_everybody() {
        for size in 1..200 {
            for rank in 0..size {
                let list = neighbours(rank, size, false);
                assert!(!list.contains(&rank) && list.iter().all(|p| *p < size));
                assert!(list.iter().all(|p| neighbours(*p, size, false).contains(&rank)));
                assert_eq!(neighbours(rank, size, true).len(), size - 1);
                let bound = if size <= SMALL_WORLD { size - 1 } else { 2 * size.next_power_of_two().ilog2() as usize };
                assert!(list.len() <= bound, "{size}: {}", list.len());
            }
            // Bruck's rounds use distances that are powers of two.
            for d in std::iter::successors(Some(1), |d| Some(d * 2)).take_while(|d| *d < size) {
                assert!(neighbours(0, size, false).contains(&d));
            }
        }
    }
}
