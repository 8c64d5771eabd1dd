//! Which ranks are connected from the start: enough that news reaches everybody in `log2 n` steps, few enough that a
//! large world has no full mesh.

use std::fmt;
use std::str::FromStr;

/// Worlds up to this size are connected fully: it costs little, and no call waits for a connection.
pub const SMALL_WORLD: usize = 8;

/// Which links a world has from the start; others are made when data needs them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Connect {
    /// All in a world of up to [`SMALL_WORLD`] ranks; in a larger one those to the ranks at distances that are powers of
    /// two, in both directions, 2 log2 n of them.
    #[default]
    Auto,
    /// All.
    Full,
    /// Those to the two next ranks, which is enough for news to get everywhere, but slowly: for tests of what happens
    /// where there is no link.
    Ring,
}

impl Connect {
    /// The ranks that `rank` of `size` is linked to from the start, in ascending order. If `a` is a neighbour of `b`, `b`
    /// is one of `a`.
    #[must_use]
    pub fn neighbours(self, rank: usize, size: usize) -> Vec<usize> {
        if self == Self::Full || (self == Self::Auto && size <= SMALL_WORLD) {
            return (0..size).filter(|r| *r != rank).collect();
        }
        let farthest = if self == Self::Ring { 1 } else { size };
        let mut list: Vec<usize> = std::iter::successors(Some(1usize), |d| d.checked_mul(2))
            .take_while(|d| *d < size && *d <= farthest)
            .flat_map(|d| [(rank + d) % size, (rank + size - d) % size])
            .collect();
        list.sort_unstable();
        list.dedup();
        list
    }
}

impl fmt::Display for Connect {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Auto => "auto",
            Self::Full => "full",
            Self::Ring => "ring",
        })
    }
}

impl FromStr for Connect {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "auto" => Ok(Self::Auto),
            "full" => Ok(Self::Full),
            "ring" => Ok(Self::Ring),
            _ => Err(format!("there is no way to connect called '{text}'; there are auto, full, and for tests ring")),
        }
    }
}

/// Makes the connections that an endpoint asks for, beside those that it was created with.
pub trait Dialer: Send + Sync + fmt::Debug {
    /// Wants a connection to endpoint rank `peer`. Returns at once, and does not call the endpoint from within: the
    /// outcome comes later through [`Endpoint::attach`](crate::Endpoint::attach) or
    /// [`Endpoint::unreachable`](crate::Endpoint::unreachable). A second request for the same peer changes nothing.
    fn dial(&self, peer: usize);
}

/// A second way to a peer, beside its link, on which it can show that it lives.
pub trait Prober: Send + Sync + fmt::Debug {
    /// Asks endpoint rank `peer` for a sign of life. Returns at once, and does not call the endpoint from within: the
    /// answer, if one comes, goes to [`Endpoint::vouch`](crate::Endpoint::vouch).
    fn probe(&self, peer: usize);

    /// Whether it says when it has asked in vain, through [`Endpoint::unanswered`](crate::Endpoint::unanswered): on a
    /// machine with more to do than it can, it takes a while until a question is put at all. If not, the endpoint
    /// counts the time itself.
    fn tells(&self) -> bool {
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_are_mutual_few_and_reach_everybody() {
        for size in 1..200 {
            for connect in [Connect::Auto, Connect::Full, Connect::Ring] {
                for rank in 0..size {
                    let list = connect.neighbours(rank, size);
                    assert!(!list.contains(&rank) && list.iter().all(|p| *p < size) && list.is_sorted());
                    assert!(list.iter().all(|p| connect.neighbours(*p, size).contains(&rank)));
                }
            }
            let few = Connect::Auto.neighbours(0, size);
            let log = size.next_power_of_two().ilog2() as usize;
            assert!(few.len() <= if size <= SMALL_WORLD { size - 1 } else { 2 * log }, "{size}: {}", few.len());
            assert_eq!(Connect::Full.neighbours(0, size).len(), size - 1);
            assert_eq!(Connect::Ring.neighbours(0, size).len(), (size - 1).min(2));
            // Bruck's rounds and the binomial tree use distances that are powers of two.
            for d in std::iter::successors(Some(1), |d| Some(d * 2)).take_while(|d| *d < size) {
                assert!(few.contains(&d));
            }
        }
    }
}
