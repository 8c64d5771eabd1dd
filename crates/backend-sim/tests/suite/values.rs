//! Contributions of ranks and what they must add up to, computed without the library: in 128-bit integers
//! or in f64, one rank after the other.
//!
//! Float contributions are small integers (powers of two for products), so that every order of folding gives
//! the same exact result in every float type.

use std::fmt::Debug;

use comm_core::op::Loc;
use comm_core::{E4M3, E5M2, Element, Pod};
use half::{bf16, f16};

/// A well-mixed number for (rank, index, seed).
pub fn mix(rank: usize, index: usize, seed: u64) -> u64 {
    let mut z = (rank as u64 + 1)
        .wrapping_mul(0x9e37_79b9_7f4a_7c15)
        .wrapping_add((index as u64).wrapping_mul(0xd1b5_4a32_d192_ed03))
        .wrapping_add(seed.wrapping_mul(0x2545_f491_4f6c_dd1d));
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Operators as the expectations know them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fold {
    Sum,
    Prod,
    Min,
    Max,
    Avg,
    And,
    Or,
    Xor,
}

/// Element types of the tests.
pub trait Num: Element + PartialEq + Debug {
    /// A contribution for sums, minima and the like.
    fn term(h: u64) -> Self;
    /// A contribution for products.
    fn factor(h: u64) -> Self;
    /// The serial fold.
    fn fold(f: Fold, xs: &[Self]) -> Self;
    /// Its bits, for hashes.
    fn bits(self) -> u64;
}

macro_rules! ints {
    ($($t:ty),*) => {$(
        impl Num for $t {
            fn term(h: u64) -> Self {
                h as $t
            }
            fn factor(h: u64) -> Self {
                h as $t
            }
            fn fold(f: Fold, xs: &[Self]) -> Self {
                let xs = xs.iter().map(|x| i128::from(*x));
                // Wrapping in 128 bits and cutting at the end wraps in the type itself.
                (match f {
                    Fold::Sum => xs.sum::<i128>(),
                    Fold::Avg => {
                        let n = xs.len() as i128;
                        i128::from(xs.sum::<i128>() as $t) / n
                    }
                    Fold::Prod => xs.fold(1i128, i128::wrapping_mul),
                    Fold::Min => xs.min().unwrap(),
                    Fold::Max => xs.max().unwrap(),
                    Fold::And => xs.fold(-1, |a, b| a & b),
                    Fold::Or => xs.fold(0, |a, b| a | b),
                    Fold::Xor => xs.fold(0, |a, b| a ^ b),
                }) as $t
            }
            fn bits(self) -> u64 {
                self as u64
            }
        }
    )*};
}
ints!(i8, u8, i16, u16, i32, u32, i64, u64);

/// Integers up to 64 are exact in bf16, up to 8 in E5M2: eight ranks must stay within.
macro_rules! floats {
    ($($t:ty, $reach:literal, $from:expr, $to:expr, $avg:expr;)*) => {$(
        impl Num for $t {
            fn term(h: u64) -> Self {
                let from: fn(f64) -> $t = $from;
                from((h % (2 * $reach + 1)) as f64 - f64::from($reach as i32))
            }
            fn factor(h: u64) -> Self {
                let from: fn(f64) -> $t = $from;
                from([1.0, -1.0, 2.0, 1.0][(h % 4) as usize])
            }
            fn fold(f: Fold, xs: &[Self]) -> Self {
                let (from, to): (fn(f64) -> $t, fn($t) -> f64) = ($from, $to);
                let avg: fn(f64, usize) -> $t = $avg;
                let ys = xs.iter().map(|x| to(*x));
                match f {
                    Fold::Sum => from(ys.sum()),
                    Fold::Avg => avg(ys.sum(), xs.len()),
                    Fold::Prod => from(ys.product()),
                    Fold::Min => from(ys.fold(f64::INFINITY, f64::min)),
                    Fold::Max => from(ys.fold(f64::NEG_INFINITY, f64::max)),
                    _ => unreachable!("bitwise operators do not exist on floats"),
                }
            }
            fn bits(self) -> u64 {
                let to: fn($t) -> f64 = $to;
                to(self).to_bits()
            }
        }
    )*};
}
floats! {
    f64, 1000, |x| x, |x| x, |s, n| s / n as f64;
    f32, 1000, |x| x as f32, f64::from, |s, n| s as f32 / n as f32;
    bf16, 8, bf16::from_f64, bf16::to_f64, |s, n| bf16::from_f32(s as f32 / n as f32);
    f16, 100, f16::from_f64, f16::to_f64, |s, n| f16::from_f32(s as f32 / n as f32);
    E4M3, 2, |x| E4M3::from_f32(x as f32), |x| f64::from(x.to_f32()), |s, n| E4M3::from_f32(s as f32 / n as f32);
    E5M2, 1, |x| E5M2::from_f32(x as f32), |x| f64::from(x.to_f32()), |s, n| E5M2::from_f32(s as f32 / n as f32);
}

/// Upper triangular 2x2 matrices under multiplication: associative, not commutative, and of a size that no
/// power of two divides evenly.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tri {
    pub a: u32,
    pub b: u32,
    pub c: u32,
}

// SAFETY: three u32 without padding; every bit pattern is valid.
unsafe impl Pod for Tri {}

impl Tri {
    pub fn make(h: u64) -> Self {
        Self { a: h as u32 | 1, b: (h >> 20) as u32, c: (h >> 40) as u32 | 1 }
    }

    pub fn times(self, r: Self) -> Self {
        Self {
            a: self.a.wrapping_mul(r.a),
            b: self.a.wrapping_mul(r.b).wrapping_add(self.b.wrapping_mul(r.c)),
            c: self.c.wrapping_mul(r.c),
        }
    }
}

/// The best of several located values; of equals the one with the smallest index.
pub fn best<V: PartialOrd + Copy, I: Ord + Copy>(xs: &[Loc<V, I>], less: fn(V, V) -> bool) -> Loc<V, I> {
    let mut best = xs[0];
    for x in &xs[1..] {
        if less(x.value, best.value) || (x.value == best.value && x.index < best.index) {
            best = *x;
        }
    }
    best
}
