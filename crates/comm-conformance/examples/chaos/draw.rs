//! Numbers drawn from a seed.

/// A small generator (splitmix64): the same numbers for the same seed, everywhere.
pub(crate) struct Draw(u64);

impl Draw {
    pub(crate) const fn new(seed: u64) -> Self {
        Self(seed ^ 0x5bd1_e995_97f4_a7c1)
    }

    pub(crate) const fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let x = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }

    /// A number below `n`, which is positive.
    pub(crate) const fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }
}
