//! What a call must compute, worked out again: in doubles and in wide integers, in rank order, without the
//! library's own kernels.

use std::ops::Range;

use comm_core::ReduceOp;

use crate::kind::{Float, Kind};
use crate::oper::{Oper, factor};
use crate::value::{Style, Values};

/// What one element must be.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Want {
    /// These bits.
    Bits(u128),
    /// A float at most so far from this.
    Close(f64, f64),
    /// Any NaN.
    Nan,
}

impl Want {
    /// Whether these bits are right.
    pub(crate) fn is_met(self, kind: Kind, bits: u128) -> bool {
        match (self, kind.float()) {
            (Self::Bits(want), _) => bits == want,
            (Self::Close(want, tolerance), Some(f)) => (f.decode(bits) - want).abs() <= tolerance,
            (Self::Nan, Some(f)) => f.is_nan(bits),
            _ => false,
        }
    }

    /// For reports.
    pub(crate) fn show(self, kind: Kind) -> String {
        match self {
            Self::Bits(bits) => show(kind, bits),
            Self::Close(want, tolerance) => format!("{want:e} +- {tolerance:e}"),
            Self::Nan => "NaN".to_owned(),
        }
    }
}

/// Bits, and what they mean.
pub(crate) fn show(kind: Kind, bits: u128) -> String {
    match kind.float() {
        Some(f) => format!("{:e} ({bits:#x})", f.decode(bits)),
        None => format!("{bits:#x}"),
    }
}

/// The reduction of element `i` of the contributions of `ranks`.
pub(crate) fn reduce(v: &Values, oper: Oper, ranks: Range<usize>, i: usize) -> Want {
    let count = ranks.len();
    let parts = || ranks.clone().map(|r| (r, v.get(r, i)));
    match (oper, v.kind.float()) {
        (Oper::MinLoc | Oper::MaxLoc, _) => Want::Bits(located(v.kind, oper, parts().map(|p| p.1))),
        (_, Some(f)) => float(v, oper, f, count, parts()),
        (Oper::Commuting | Oper::Ordered, None) => Want::Bits(custom(v.kind, oper, parts().map(|p| p.1))),
        (_, None) => Want::Bits(whole(v.kind, oper.code(), count, parts().map(|p| p.1))),
    }
}

/// Sums without error as long as the terms have 53 bits in common ranges: the sum and what rounding took from it.
fn two_sum((sum, lost): (f64, f64), x: f64) -> (f64, f64) {
    let s = sum + x;
    let part = s - sum;
    (s, lost + ((sum - (s - part)) + (x - part)))
}

fn float(v: &Values, oper: Oper, f: Float, count: usize, parts: impl Iterator<Item = (usize, u128)> + Clone) -> Want {
    let op = oper.code();
    if matches!(op, ReduceOp::Min | ReduceOp::Max) {
        let mut best: Option<(f64, u128)> = None;
        for (_, bits) in parts {
            let x = f.decode(bits);
            if x.is_nan() {
                return Want::Nan;
            }
            let better = best.is_none_or(|(b, _)| if op == ReduceOp::Min { x < b } else { x > b });
            if better {
                best = Some((x, bits));
            }
        }
        return Want::Bits(best.map_or(0, |(_, bits)| bits));
    }
    let values = parts.map(|(rank, bits)| f.decode(bits) * if oper == Oper::PreMulSum { factor(rank) } else { 1.0 });
    let n = count as f64;
    let product = op == ReduceOp::Prod;
    let exact = if product {
        values.clone().product::<f64>()
    } else {
        let (sum, lost) = values.clone().fold((0.0, 0.0), two_sum);
        let sum = if sum.is_finite() { sum + lost } else { sum };
        if op == ReduceOp::Avg { sum / n } else { sum }
    };
    if exact.is_nan() {
        return Want::Nan;
    }
    if exact.is_infinite() {
        return Want::Bits(f.encode(exact));
    }
    let magnitude = if product { exact.abs() } else { values.map(f64::abs).sum::<f64>() };
    // Every order makes count - 1 steps, each rounded once, or twice by way of f32; plus one rounding for a factor.
    // A double's own reference is as inexact as the result.
    let unit = f.unit() * if f.man == 52 { 2.0 } else { 1.0 } + if f.man < 23 { 2f64.powi(-24) } else { 0.0 };
    let steps = (n - 1.0) + if oper == Oper::PreMulSum { 1.0 } else { 0.0 };
    let bound = ((1.0 + unit).powf(steps) - 1.0) * magnitude;
    let smallest = 2f64.powi(2 - f.bias() - f.man as i32 - 1);
    match (v.style, op) {
        // Dividing the exact sum rounds once. A backend that divides the terms instead rounds each of them.
        (Style::Exact, ReduceOp::Avg) if count.is_power_of_two() => {
            Want::Close(exact, 2.0 * unit * exact.abs() + smallest)
        }
        (_, ReduceOp::Avg) => Want::Close(exact, (bound + 2.0 * unit * magnitude) / n + smallest),
        (Style::Rounded, _) => Want::Close(exact, bound),
        _ => Want::Bits(f.encode(if exact == 0.0 && !product { 0.0 } else { exact })),
    }
}

/// Integers and `bool`, in 128 bits.
fn whole(kind: Kind, op: ReduceOp, count: usize, parts: impl Iterator<Item = u128>) -> u128 {
    let width = 8 * kind.size() as u32;
    // As a number: sign extended where there is a sign.
    let number = |bits: u128| {
        if kind.is_signed() { ((bits << (128 - width)) as i128) >> (128 - width) } else { bits as i128 }
    };
    let folded = parts.reduce(|a, b| {
        let (x, y) = (number(a), number(b));
        let wide = match op {
            ReduceOp::Sum | ReduceOp::Avg => x.wrapping_add(y),
            ReduceOp::Prod => x.wrapping_mul(y),
            ReduceOp::Min => x.min(y),
            ReduceOp::Max => x.max(y),
            ReduceOp::BAnd => x & y,
            ReduceOp::BOr => x | y,
            _ => x ^ y,
        };
        kind.canonical(wide as u128)
    });
    let folded = folded.unwrap_or(0);
    if op == ReduceOp::Avg { kind.canonical((number(folded) / count.max(1) as i128) as u128) } else { folded }
}

/// The user's functions of [`reducer`](crate::oper::reducer), on bits.
fn custom(kind: Kind, oper: Oper, parts: impl Iterator<Item = u128>) -> u128 {
    let bytes = |a: u128, b: u128| (0..3).map(|i| (((a >> (8 * i)) + (b >> (8 * i))) & 0xff) << (8 * i)).sum::<u128>();
    let low = |x: u128| x & 0xffff_ffff;
    let step = |a: u128, b: u128| match (oper, kind) {
        (Oper::Commuting, Kind::Bool) => a ^ b,
        (Oper::Commuting, Kind::Rgb) => bytes(a, b),
        (Oper::Commuting, _) => kind.canonical(a + b),
        (_, Kind::Affine) => {
            let (a1, b1, a2, b2) = (low(a), low(a >> 32), low(b), low(b >> 32));
            low(a1 * a2) | low(b1 * a2 + b2) << 32
        }
        _ if a == 0 => b,
        _ => a,
    };
    parts.reduce(step).unwrap_or(0)
}

/// The extreme value with the smallest index; a NaN is more extreme than any number.
fn located(kind: Kind, oper: Oper, parts: impl Iterator<Item = u128>) -> u128 {
    let half = 4 * kind.size() as u32;
    let key = |bits: u128| {
        let (low, index) = (bits & ((1 << half) - 1), bits >> half);
        let value = match kind {
            Kind::LocF32 => f64::from(f32::from_bits(low as u32)),
            Kind::LocF64 => f64::from_bits(low as u64),
            Kind::LocI32 => f64::from(low as u32 as i32),
            // The suite's values are small.
            _ => low as u64 as i64 as f64,
        };
        let rank = if oper == Oper::MinLoc { value } else { -value };
        (if rank.is_nan() { f64::NEG_INFINITY } else { rank }, index)
    };
    parts.reduce(|a, b| if key(b) < key(a) { b } else { a }).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn values(kind: Kind, oper: Oper, style: Style, size: usize) -> Values {
        Values { kind, oper: Some(oper), style, size, seed: 99 }
    }

    #[test]
    fn integers_wrap_and_averages_truncate_toward_zero() {
        let f = |op, xs: [i8; 2]| whole(Kind::I8, op, 2, xs.iter().map(|x| u128::from(*x as u8))) as u8 as i8;
        assert_eq!(f(ReduceOp::Sum, [100, 100]), -56);
        assert_eq!(f(ReduceOp::Avg, [100, 100]), -28);
        assert_eq!(f(ReduceOp::Avg, [-7, 0]), -3);
        assert_eq!(f(ReduceOp::Min, [-7, 3]), -7);
        assert_eq!(whole(Kind::Bool, ReduceOp::Max, 2, [0, 1].into_iter()), 1);
    }

    #[test]
    fn exact_values_fold_to_the_same_bits_in_every_order() {
        for kind in [Kind::F16, Kind::Bf16, Kind::F32, Kind::E4M3, Kind::E5M2] {
            for op in [ReduceOp::Sum, ReduceOp::Prod] {
                let f = kind.float().unwrap();
                let v = values(kind, Oper::Builtin(op), Style::Exact, 8);
                for i in 0..200 {
                    let mut xs: Vec<f64> = (0..8).map(|r| f.decode(v.get(r, i))).collect();
                    for turn in 0..8 {
                        xs.rotate_left(1);
                        let mut acc = xs[0];
                        for x in &xs[1..] {
                            acc = if op == ReduceOp::Sum { acc + x } else { acc * x };
                            assert_eq!(f.decode(f.encode(acc)), acc, "{kind:?} {op} {i} {turn}");
                        }
                        let want = reduce(&v, Oper::Builtin(op), 0..8, i);
                        assert!(want.is_met(kind, f.encode(if acc == 0.0 { 0.0 } else { acc })), "{kind:?} {op} {i}");
                    }
                }
            }
        }
    }

    #[test]
    fn a_missing_contribution_is_outside_of_the_tolerance() {
        // What the tolerance must not hide: a result from which a rank's part is missing.
        for kind in [Kind::F16, Kind::Bf16, Kind::F32, Kind::F64] {
            let sum = Oper::Builtin(ReduceOp::Sum);
            let v = values(kind, sum, Style::Rounded, 8);
            let outside = |i: &usize| {
                let (all, some) = (reduce(&v, sum, 0..8, *i), reduce(&v, sum, 0..7, *i));
                let (Want::Close(all, tolerance), Want::Close(some, _)) = (all, some) else { panic!("{all:?}") };
                (all - some).abs() > tolerance
            };
            // Eight roundings of bf16 can hide the smallest of eight contributions.
            let least = if kind == Kind::Bf16 { 80 } else { 100 };
            assert!((0..100).filter(outside).count() >= least, "{kind:?}");
        }
    }

    #[test]
    fn order_matters_to_the_ordered_operator() {
        let parts = [3u128 | 5 << 32, 7 | 11 << 32];
        let there = custom(Kind::Affine, Oper::Ordered, parts.into_iter());
        let back = custom(Kind::Affine, Oper::Ordered, parts.into_iter().rev());
        assert_eq!(there, 21 | (5 * 7 + 11) << 32);
        assert_ne!(there, back);
    }
}
