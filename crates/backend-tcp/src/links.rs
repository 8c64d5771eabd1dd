//! Which ranks are connected at creation: the hint `connect`.

use std::fmt;

use comm_core::{CommOptions, Error, HintSpec, Result};
use comm_transport::neighbours;
use serde::{Deserialize, Serialize};

/// The hints of this backend.
pub const HINTS: &[HintSpec] = &[HintSpec {
    name: "connect",
    doc: "which ranks are connected at creation, alike on all ranks (else RUSTCOMMS_CONNECT): auto (all in a small world, \
          else as many as make every rank reachable in a few steps), full (all), lazy (two, for tests); the others are \
          connected when they first need it",
}];

/// Which ranks are connected at creation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Connect {
    /// All in a small world, else the overlay of [`neighbours`].
    #[default]
    Auto,
    /// All.
    Full,
    /// The next rank and the one before.
    Lazy,
}

impl fmt::Display for Connect {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Auto => "auto",
            Self::Full => "full",
            Self::Lazy => "lazy",
        })
    }
}

impl Connect {
    /// What the hint `connect` says, or else the variable `RUSTCOMMS_CONNECT`.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` for a value that does not exist.
    pub fn of(options: &CommOptions) -> Result<Self> {
        let environment = || std::env::var("RUSTCOMMS_CONNECT").ok().filter(|v| !v.is_empty());
        let Some(text) = options.hints.get("connect").cloned().or_else(environment) else { return Ok(Self::Auto) };
        [Self::Auto, Self::Full, Self::Lazy].into_iter().find(|c| c.to_string() == text).ok_or_else(|| {
            Error::invalid(format!("connect is auto, full or lazy, not '{text}' (hint connect or RUSTCOMMS_CONNECT)"))
        })
    }

    /// The ranks that `rank` of `size` is connected to from the start, in ascending order. If `a` is in `b`'s list, `b`
    /// is in `a`'s.
    #[must_use]
    pub fn first_links(self, rank: usize, size: usize) -> Vec<usize> {
        match self {
            Self::Auto | Self::Full => neighbours(rank, size, self == Self::Full),
            Self::Lazy => {
                let mut list = vec![(rank + 1) % size, (rank + size - 1) % size];
                list.sort_unstable();
                list.dedup();
                list.retain(|r| *r != rank);
                list
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_links_are_mutual() {
        for c in [Connect::Auto, Connect::Full, Connect::Lazy] {
            for size in 1..40 {
                for rank in 0..size {
                    let list = c.first_links(rank, size);
                    assert!(list.is_sorted() && !list.contains(&rank), "{c} {size} {rank}");
                    assert!(list.iter().all(|p| c.first_links(*p, size).contains(&rank)), "{c} {size} {rank}");
                    assert!(size == 1 || !list.is_empty());
                }
            }
        }
        assert_eq!(Connect::Lazy.first_links(0, 5), [1, 4]);
        assert_eq!(Connect::Lazy.first_links(1, 2), [0]);
    }

    #[test]
    fn values_are_checked() {
        let of = |v: &str| Connect::of(&CommOptions::new().hint("connect", v));
        assert_eq!(of("lazy").unwrap(), Connect::Lazy);
        assert!(of("ful").unwrap_err().to_string().contains("'ful'"));
    }
}
