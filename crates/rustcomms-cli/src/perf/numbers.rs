//! Test data, and what an operation must make of it: formulas that share no code with the library's kernels.
//!
//! Every input element is an integer computed from rank, index and a salt. For reductions on floats the integers
//! are so small that every partial result, in whatever order, is exactly representable; so results are compared
//! bit by bit. Integer arithmetic wraps as the library documents it, and there all bits of the inputs are used.

use std::ops::Range;

use rustcomms::{DType, ReduceOp};

/// Element `i` has the value of element `i % PERIOD`, so that tables stay small. A prime: shards and segments,
/// whose lengths are round, never begin at the same place of it, so data in the wrong place is seen.
const PERIOD: usize = 65_521;

/// What a float format can hold.
struct Float {
    exponent_bits: u32,
    mantissa_bits: u32,
    /// All integers up to this are representable, and few enough to stay away from the largest value.
    integers: i128,
    /// Powers of two up to this are representable.
    doublings: usize,
}

fn float(dtype: DType) -> Option<Float> {
    let f = |exponent_bits, mantissa_bits, integers, doublings| {
        Some(Float { exponent_bits, mantissa_bits, integers, doublings })
    };
    match dtype {
        DType::E5M2 => f(5, 2, 8, 15),
        DType::E4M3 => f(4, 3, 16, 8),
        DType::Bf16 => f(8, 7, 256, 100),
        DType::F16 => f(5, 10, 2048, 15),
        DType::F32 => f(8, 23, 1 << 24, 100),
        DType::F64 => f(11, 52, 1 << 40, 100),
        _ => None,
    }
}

fn is_signed(dtype: DType) -> bool {
    matches!(dtype, DType::I8 | DType::I16 | DType::I32 | DType::I64)
}

/// SplitMix64's finaliser over a combination of the three.
fn hash(salt: u64, rank: usize, index: usize) -> u64 {
    let mut x = salt
        .wrapping_add((rank as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15))
        .wrapping_add((index as u64 + 1).wrapping_mul(0xd1b5_4a32_d192_ed03));
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// The data of one call.
#[derive(Clone, Debug)]
pub(crate) struct Numbers {
    pub(crate) dtype: DType,
    /// The operator, for operations that reduce; others move arbitrary bits.
    pub(crate) redop: Option<ReduceOp>,
    /// Ranks that take part.
    pub(crate) ranks: usize,
    /// Whether the first few of them are reduced, too.
    pub(crate) prefix: bool,
    /// Makes the data of each call its own.
    pub(crate) salt: u64,
}

impl Numbers {
    /// The integer that `rank` contributes at `index`.
    fn input(&self, rank: usize, index: usize) -> i128 {
        let h = hash(self.salt, rank, index);
        let Some(op) = self.redop else { return self.wrap(i128::from(h)) };
        match float(self.dtype) {
            Some(f) => self.float_input(&f, op, rank, index, h),
            None => self.wrap(i128::from(match (op, self.dtype) {
                // An even factor would soon make all products 0.
                (ReduceOp::Prod, _) => h | 1,
                (ReduceOp::BAnd, _) | (ReduceOp::Min, DType::Bool) => !self.few_bits(rank, index),
                (ReduceOp::BOr, _) | (ReduceOp::Max, DType::Bool) => self.few_bits(rank, index),
                _ => h,
            })),
        }
    }

    /// So few bits set that all ranks' together are about half of them.
    fn few_bits(&self, rank: usize, index: usize) -> u64 {
        let times = u64::from(self.ranks.next_power_of_two().ilog2().max(1));
        (0..times).fold(u64::MAX, |bits, k| bits & hash(self.salt ^ (k + 1) << 32, rank, index))
    }

    fn float_input(&self, f: &Float, op: ReduceOp, rank: usize, index: usize, h: u64) -> i128 {
        // At most `budget` ranks contribute something; which ones changes from element to element.
        let takes_part = |budget: usize| {
            let stride = self.ranks.div_ceil(budget);
            (rank + index + self.salt as usize).is_multiple_of(stride)
        };
        let between = |low: i128, high: i128| low + i128::from(h >> 8) % (high - low + 1);
        // Magnitudes of all ranks add up to at most `budget`.
        let summand = |budget: i128| {
            let budget_ranks = usize::try_from(budget).unwrap_or(usize::MAX);
            if !takes_part(budget_ranks) {
                return 0;
            }
            let most = (budget / self.ranks.min(budget_ranks) as i128).min(1000);
            between(-most, most)
        };
        let ranks = self.ranks as i128;
        match op {
            ReduceOp::Sum => summand(f.integers),
            // The mean of some must be an integer, whoever they are: the same for all.
            ReduceOp::Avg if self.prefix => {
                let most = (f.integers / ranks).min(1000);
                -most + i128::from(hash(self.salt, 0, index) >> 8) % (2 * most + 1)
            }
            // Multiples of the number of ranks, so that the mean is an integer.
            ReduceOp::Avg if ranks <= f.integers => ranks * summand(f.integers / ranks),
            // No room for that: two ranks cancel, all others are 0.
            ReduceOp::Avg => {
                let first = (index + self.salt as usize) % self.ranks;
                i128::from(rank == first) - i128::from(rank == (first + 1) % self.ranks)
            }
            ReduceOp::Prod if takes_part(f.doublings) => [1, 2, -1, -2][(h >> 8) as usize % 4],
            ReduceOp::Prod => 1,
            _ => between(-f.integers, f.integers),
        }
    }

    /// The value as the type stores it: integers wrap.
    fn wrap(&self, x: i128) -> i128 {
        let bits = 8 * self.dtype.size() as u32;
        match self.dtype {
            DType::Bool => x & 1,
            d if is_signed(d) => x << (128 - bits) >> (128 - bits),
            _ => x & ((1 << bits) - 1),
        }
    }

    /// The reduction of what `ranks` contribute at `index`.
    fn reduced(&self, ranks: Range<usize>, index: usize) -> i128 {
        let n = ranks.len().max(1) as i128;
        let fold: fn(i128, i128) -> i128 = match self.redop {
            Some(ReduceOp::Prod) => i128::wrapping_mul,
            Some(ReduceOp::Min) => i128::min,
            Some(ReduceOp::Max) => i128::max,
            Some(ReduceOp::BAnd) => |a, b| a & b,
            Some(ReduceOp::BOr) => |a, b| a | b,
            Some(ReduceOp::BXor) => |a, b| a ^ b,
            _ => i128::wrapping_add,
        };
        let whole = ranks.map(|r| self.input(r, index)).reduce(fold).unwrap_or(0);
        let whole = if float(self.dtype).is_some() { whole } else { self.wrap(whole) };
        if self.redop == Some(ReduceOp::Avg) { whole / n } else { whole }
    }

    /// Appends the bytes of an integer.
    fn put(&self, x: i128, out: &mut Vec<u8>) {
        let bits = match float(self.dtype).filter(|_| self.redop.is_some()) {
            Some(f) => encode(&f, x),
            None => x as u64,
        };
        // Only the low bytes count; which end of the eight they are at is the machine's choice.
        let size = self.dtype.size();
        let all = bits.to_ne_bytes();
        out.extend_from_slice(if cfg!(target_endian = "little") { &all[..size] } else { &all[8 - size..] });
    }

    /// The elements `start..` of `f`, at most `len` and one period of them.
    fn table(&self, start: usize, len: usize, f: impl Fn(usize) -> i128) -> Vec<u8> {
        let mut table = Vec::with_capacity(len.min(PERIOD) * self.dtype.size());
        for k in 0..len.min(PERIOD) {
            self.put(f((start + k) % PERIOD), &mut table);
        }
        table
    }

    /// Writes what `rank` contributes from its element `start` on.
    pub(crate) fn fill(&self, rank: usize, start: usize, out: &mut [u8]) {
        let table = self.table(start, out.len() / self.dtype.size(), |i| self.input(rank, i));
        for part in out.chunks_mut(table.len().max(1)) {
            part.copy_from_slice(&table[..part.len()]);
        }
    }

    /// Compares with what `rank` contributes from its element `start` on.
    pub(crate) fn compare_input(&self, rank: usize, start: usize, got: &[u8]) -> Wrong {
        self.compare(&self.table(start, got.len() / self.dtype.size(), |i| self.input(rank, i)), got)
    }

    /// Compares with the reduction of what `ranks` contribute from their element `start` on.
    pub(crate) fn compare_reduced(&self, ranks: Range<usize>, start: usize, got: &[u8]) -> Wrong {
        self.compare(&self.table(start, got.len() / self.dtype.size(), |i| self.reduced(ranks.clone(), i)), got)
    }

    /// Compares with one byte everywhere.
    pub(crate) fn compare_byte(&self, byte: u8, got: &[u8]) -> Wrong {
        self.compare(&vec![byte; got.len().min(PERIOD * self.dtype.size())], got)
    }

    fn compare(&self, table: &[u8], got: &[u8]) -> Wrong {
        let size = self.dtype.size();
        let mut wrong = Wrong::default();
        for (c, part) in got.chunks(table.len().max(1)).enumerate() {
            let want = &table[..part.len()];
            if part == want {
                continue;
            }
            for (i, (g, w)) in part.chunks_exact(size).zip(want.chunks_exact(size)).enumerate() {
                if g != w {
                    let at = c * table.len() / size + i;
                    wrong.add(at, || format!("bytes {} instead of {}", hex(g), hex(w)));
                }
            }
        }
        wrong
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

/// The bits of an integer that the format represents exactly.
fn encode(f: &Float, x: i128) -> u64 {
    if x == 0 {
        return 0;
    }
    let magnitude = x.unsigned_abs();
    let exponent = magnitude.ilog2();
    let bias = (1u64 << (f.exponent_bits - 1)) - 1;
    // The highest bit is implied.
    let rest = magnitude ^ (1 << exponent);
    let mantissa = match exponent.checked_sub(f.mantissa_bits) {
        Some(down) => {
            debug_assert_eq!(rest & ((1 << down) - 1), 0, "{x} is not exact");
            rest >> down
        }
        None => rest << (f.mantissa_bits - exponent),
    };
    let sign = u64::from(x < 0) << (f.exponent_bits + f.mantissa_bits);
    sign | (u64::from(exponent) + bias) << f.mantissa_bits | mantissa as u64
}

/// How many elements differ from what they should be, and the first of them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Wrong {
    pub(crate) count: u64,
    /// Index and description.
    pub(crate) first: Option<(usize, String)>,
}

impl Wrong {
    fn add(&mut self, at: usize, what: impl FnOnce() -> String) {
        self.count += 1;
        if self.first.is_none() {
            self.first = Some((at, what()));
        }
    }

    /// Adds what is wrong in a part that begins at element `offset`.
    pub(crate) fn merge(&mut self, offset: usize, part: Self) {
        self.count += part.count;
        if self.first.is_none() {
            self.first = part.first.map(|(at, what)| (offset + at, what));
        }
    }
}

#[cfg(test)]
#[path = "numbers_tests.rs"]
mod tests;
