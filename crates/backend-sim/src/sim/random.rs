//! Chance out of a seed, and a digest of what it led to.

use std::time::Duration;

/// SplitMix64: every seed is as good as any other.
#[derive(Clone, Debug)]
pub(crate) struct Random(u64);

impl Random {
    pub(crate) const fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub(crate) const fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `n`; 0 if `n` is 0.
    pub(crate) const fn below(&mut self, n: u64) -> u64 {
        // The high half of a product: even enough, and no division.
        ((self.next() as u128 * n as u128) >> 64) as u64
    }

    /// True with this chance. Asks for no number where the answer is clear, so that a run without faults does not depend on
    /// what faults there could be.
    pub(crate) fn chance(&mut self, chance: f64) -> bool {
        chance > 0.0 && ((self.next() >> 11) as f64) < chance * (1u64 << 53) as f64
    }

    /// A duration up to `most`.
    pub(crate) fn within(&mut self, most: Duration) -> Duration {
        let most = u64::try_from(most.as_nanos()).unwrap_or(u64::MAX);
        if most == 0 { Duration::ZERO } else { Duration::from_nanos(self.below(most.saturating_add(1))) }
    }
}

/// A rolling hash over what has happened.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Digest(pub(crate) u64);

impl Digest {
    pub(crate) const fn new() -> Self {
        Self(0xcbf2_9ce4_8422_2325)
    }

    pub(crate) fn add(&mut self, words: [u64; 4]) {
        for w in words {
            self.0 = (self.0.rotate_left(5) ^ w).wrapping_mul(0x517c_c1b7_2722_0a95);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chances_come_true_as_often_as_they_say() {
        let mut r = Random::new(3);
        let hits = (0..100_000).filter(|_| r.chance(0.1)).count();
        assert!((9_500..10_500).contains(&hits), "{hits}");
        assert!((0..1000).all(|_| r.below(7) < 7));
        assert!((0..1000).all(|_| r.within(Duration::from_nanos(3)) <= Duration::from_nanos(3)));
        assert_eq!(r.below(0), 0);
    }

    #[test]
    fn what_cannot_happen_costs_no_number() {
        let (mut a, mut b) = (Random::new(9), Random::new(9));
        assert!(!a.chance(0.0) && a.within(Duration::ZERO).is_zero());
        assert_eq!(a.next(), b.next());
    }

    #[test]
    fn the_digest_depends_on_order() {
        let (mut a, mut b) = (Digest::new(), Digest::new());
        a.add([1, 2, 3, 4]);
        b.add([2, 1, 3, 4]);
        assert_ne!(a.0, b.0);
    }
}
