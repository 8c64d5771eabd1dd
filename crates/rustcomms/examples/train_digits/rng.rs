//! A small random number generator, so that every rank and every run draws the same numbers.

/// SplitMix64: one addition and a mixing function per number.
#[derive(Clone, Debug)]
pub(crate) struct Rng(u64);

impl Rng {
    /// The generator of one `stream` (initial weights, one epoch's order, …) of a seed.
    pub(crate) fn new(seed: u64, stream: u64) -> Self {
        // Mixed once, so that neighbouring streams start far apart.
        let mut mixer = Self(stream);
        Self(seed ^ mixer.next())
    }

    /// The next 64 random bits.
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Uniform in `-limit..limit`.
    pub(crate) fn symmetric(&mut self, limit: f32) -> f32 {
        // 24 bits are what an f32 between 0 and 1 can hold.
        let unit = (self.next() >> 40) as f32 / (1u32 << 24) as f32;
        (2.0 * unit - 1.0) * limit
    }

    /// Uniform in `0..n`; `n` is not 0.
    pub(crate) fn below(&mut self, n: usize) -> usize {
        ((u128::from(self.next()) * n as u128) >> 64) as usize
    }

    /// Puts `items` into a random order.
    pub(crate) fn shuffle<T>(&mut self, items: &mut [T]) {
        for i in (1..items.len()).rev() {
            items.swap(i, self.below(i + 1));
        }
    }
}
