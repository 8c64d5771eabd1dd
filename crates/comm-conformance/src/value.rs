//! The contributions: a function of seed, rank and place, so that every rank knows everybody's.

use comm_core::ReduceOp;

use crate::kind::{Float, Kind};
use crate::oper::Oper;

/// Values repeat after this many elements (a prime, so that no block or segment is a multiple of it). Then results
/// repeat too, and long buffers are as cheap to predict as short ones.
pub(crate) const PERIOD: usize = 4099;

/// How contributions are chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Style {
    /// So that every order of folding gives the same bits.
    Exact,
    /// Floats with full mantissas: results depend on the order, within proven bounds.
    Rounded,
    /// Extremes: NaN and infinities, the smallest and the largest integers.
    Special,
}

/// What contributions to one call look like.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Values {
    pub(crate) kind: Kind,
    pub(crate) oper: Option<Oper>,
    pub(crate) style: Style,
    /// Ranks of the communicator.
    pub(crate) size: usize,
    pub(crate) seed: u64,
}

/// A good mixing of 64 bits (splitmix64).
pub(crate) const fn mix(x: u64) -> u64 {
    let x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

impl Values {
    fn hash(&self, rank: usize, i: usize) -> u64 {
        mix(self.seed ^ mix((rank as u64) << 32 | i as u64))
    }

    /// The bits of element `i` (modulo [`PERIOD`]) of what `rank` contributes.
    pub(crate) fn get(&self, rank: usize, i: usize) -> u128 {
        let i = i % PERIOD;
        let h = self.hash(rank, i);
        let bits = match (self.oper, self.kind.float()) {
            (None, _) => u128::from(h) << 64 | u128::from(mix(h)),
            (Some(oper), Some(f)) => match self.style {
                Style::Exact => self.exact_float(oper, f, rank, h),
                Style::Rounded => rounded_float(oper, f, rank, h),
                Style::Special => self.special_float(oper, f, rank, i, h),
            },
            (Some(oper), None) => self.whole(oper, i, h),
        };
        self.kind.canonical(bits)
    }

    /// Small integers whose partial sums the format holds, powers of two whose partial products it holds, and
    /// anything for minima and maxima.
    fn exact_float(&self, oper: Oper, f: Float, rank: usize, h: u64) -> u128 {
        let x = match oper {
            Oper::Builtin(ReduceOp::Min | ReduceOp::Max) => return any_finite(f, h),
            // The exponents of eight bits go from -6 to 8 at least.
            Oper::Builtin(ReduceOp::Prod) => {
                let power = if rank < 6 { (h % 3) as i32 - 1 } else { 0 };
                let sign = if h >> 32 & 1 == 1 { -1.0 } else { 1.0 };
                sign * 2f64.powi(power)
            }
            _ => {
                // Integers up to this are exact. Factors of up to 2 take half of it.
                let mut limit = 1i64 << (f.man + 1).min(40);
                if oper == Oper::PreMulSum {
                    limit /= 2;
                }
                let most = (limit / self.size as i64).max(1);
                if rank as i64 * most >= limit {
                    return 0;
                }
                // Half precision ends at 65504; staying small costs nothing.
                let most = most.min(1 << 20);
                (h % (2 * most as u64 + 1)) as f64 - most as f64
            }
        };
        // Not -0, whose sign a sum may lose.
        f.encode(if x == 0.0 { 0.0 } else { x })
    }

    fn special_float(&self, oper: Oper, f: Float, rank: usize, i: usize, h: u64) -> u128 {
        let n = self.size;
        let (one, other) = ((i / 7) % n, (i / 7 + 1 + (i / 11) % n.max(2)) % n);
        // Sums of eight bits saturate, so that infinities do not survive there.
        let selects = matches!(oper, Oper::Builtin(ReduceOp::Min | ReduceOp::Max));
        let infinite = f.infinite && (selects || !f.is_tiny());
        let special = match i % 7 {
            1 if rank == one => Some(f.nan(u128::from(h))),
            2 if rank == one && infinite => Some(f.encode(f64::INFINITY)),
            3 if rank == one && infinite => Some(f.encode(f64::NEG_INFINITY)),
            4 if infinite && rank == one => Some(f.encode(f64::INFINITY)),
            4 if infinite && rank == other => Some(f.encode(f64::NEG_INFINITY)),
            5 => Some(f.nan(u128::from(h))),
            _ => None,
        };
        special.unwrap_or_else(|| f.encode(if i % 7 == 6 { 0.0 } else { 1.0 }))
    }

    fn whole(&self, oper: Oper, i: usize, h: u64) -> u128 {
        let bits = u128::from(mix(h)) << 64 | u128::from(h);
        match (oper, self.kind) {
            // Ties, and now and then a NaN. Its payload is the same on all ranks: which of two survives is not defined.
            (Oper::MinLoc | Oper::MaxLoc, kind) => {
                let wide = matches!(kind, Kind::LocF64 | Kind::LocI64);
                let value = (h % 4) as i64 - 2;
                let nan = i % 5 == 1 && h >> 8 & 1 == 1;
                let value = match kind {
                    Kind::LocF32 if nan => 0x7fc0_0000 | i as u128 & 0xff,
                    Kind::LocF64 if nan => 0x7ff8_0000_0000_0000 | i as u128 & 0xff,
                    Kind::LocF32 => u128::from((value as f32).to_bits()),
                    Kind::LocF64 => u128::from((value as f64).to_bits()),
                    Kind::LocI32 => u128::from(value as i32 as u32),
                    _ => u128::from(value as u64),
                };
                // Ranks have different indices, not in their own order, and sometimes the same.
                let index = if i % 3 == 0 { 7 } else { u128::from(h >> 16 & 0xfff) };
                value | index << if wide { 64 } else { 32 }
            }
            (Oper::Ordered, Kind::U8) if h % 4 > 0 => 0,
            // Odd multipliers are never lost.
            (Oper::Ordered, Kind::Affine) => bits | 1,
            _ if self.style == Style::Special => {
                let width = 8 * self.kind.size() as u32;
                match h >> 5 & 3 {
                    0 => 0,
                    1 => u128::MAX,
                    2 => 1 << (width - 1),
                    _ => (1 << (width - 1)) - 1,
                }
            }
            (Oper::Builtin(ReduceOp::Prod), _) => bits | 1,
            _ => bits,
        }
    }
}

/// Any finite value but -0: its order against +0 is not defined.
fn any_finite(f: Float, h: u64) -> u128 {
    let width = f.exp + f.man + 1;
    let bits = u128::from(mix(h)) & ((1 << width) - 1);
    let x = f.decode(bits);
    if x.is_finite() && x != 0.0 { bits } else { 0 }
}

/// Random mantissas near 1, so that nothing overflows or gets too small: sums are multiples of the smallest
/// value's last place, and products of 8 stay between 2^-8 and 2^8.
fn rounded_float(oper: Oper, f: Float, rank: usize, h: u64) -> u128 {
    let sign = u128::from(h >> 63) << (f.exp + f.man);
    let man = u128::from(h) & ((1 << f.man) - 1);
    let below = match oper {
        Oper::Builtin(ReduceOp::Prod) if rank >= 8 => return f.encode(1.0),
        Oper::Builtin(ReduceOp::Prod) if f.is_tiny() => 0,
        Oper::Builtin(ReduceOp::Prod) => h >> 56 & 1,
        _ => h >> 56 & 3,
    };
    sign | ((f.bias() as u128) - u128::from(below)) << f.man | man
}
