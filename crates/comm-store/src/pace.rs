//! How slow a connection may be, and how often the server says what is wrong with one.

use std::time::{Duration, Instant};

/// The slowest that a request or a reply may move, in bytes per second, over the time that a connection may stall.
const SLOWEST: u64 = 64 << 10;
/// This much counts as moving, however short that time is.
const MOVING: usize = 64 << 10;
/// Warnings about connections that are logged in so much time; more are counted. Strangers must not fill a disk.
const WARNINGS: (u32, Duration) = (20, Duration::from_secs(10));

/// What must move in the time for which a connection may stall.
pub(crate) fn enough(stall_timeout: Duration) -> usize {
    let bytes = stall_timeout.as_secs().saturating_mul(SLOWEST);
    usize::try_from(bytes).unwrap_or(usize::MAX).max(MOVING)
}

/// Whether something that has begun goes on fast enough.
#[derive(Debug)]
pub(crate) struct Pace {
    pub(crate) since: Instant,
    moved: usize,
}

impl Pace {
    pub(crate) fn new(now: Instant) -> Self {
        Self { since: now, moved: 0 }
    }

    /// `n` bytes have moved, of which it takes `enough` to begin anew.
    pub(crate) fn moves(&mut self, n: usize, enough: usize) {
        self.moved += n;
        if self.moved >= enough {
            *self = Self::new(Instant::now());
        }
    }
}

/// How many warnings may still be logged.
#[derive(Debug)]
pub(crate) struct Warnings {
    until: Instant,
    left: u32,
    more: u64,
}

impl Warnings {
    pub(crate) fn new() -> Self {
        Self { until: Instant::now(), left: 0, more: 0 }
    }

    /// Whether the next one is logged.
    pub(crate) fn allow(&mut self) -> bool {
        self.allow_at(Instant::now())
    }

    fn allow_at(&mut self, now: Instant) -> bool {
        if now >= self.until {
            if self.more > 0 {
                tracing::warn!("{} more warnings of the store about connections are not shown", self.more);
            }
            *self = Self { until: now + WARNINGS.1, left: WARNINGS.0, more: 0 };
        }
        let allowed = self.left > 0;
        if allowed {
            self.left -= 1;
        } else {
            self.more += 1;
        }
        allowed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn little_by_little_is_not_moving() {
        let start = Instant::now();
        let mut pace = Pace::new(start);
        let most = enough(Duration::from_secs(60));
        assert_eq!((most, enough(Duration::ZERO)), (60 << 16, 1 << 16));
        (0..most - 1).for_each(|_| pace.moves(1, most));
        assert_eq!(pace.since, start);
        pace.moves(1, most);
        assert!(pace.since > start && pace.moved == 0);
    }

    #[test]
    fn warnings_are_few_and_the_others_counted() {
        let mut w = Warnings::new();
        let start = Instant::now();
        let (most, time) = WARNINGS;
        assert_eq!((0..1000).filter(|_| w.allow_at(start)).count(), most as usize);
        assert_eq!(w.more, 1000 - u64::from(most));
        assert_eq!((0..1000).filter(|_| w.allow_at(start + time)).count(), most as usize);
    }
}
