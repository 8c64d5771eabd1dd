//! What a reduction must give, computed one element at a time with other means than the kernels: 128-bit integers, the `half`
//! crate, the public conversions of the 8-bit floats, and the NaN rule in integers.

use half::{bf16, f16};

use crate::dtype::{DType, E4M3, E5M2};
use crate::op::ReduceOp;

/// Where a float's parts lie: mask of the magnitude, the code of infinity (NaN is above it), the quiet bit.
fn parts(d: DType) -> (u64, u64, u64) {
    match d {
        DType::F64 => (i64::MAX as u64, 0x7ff << 52, 1 << 51),
        DType::F32 => (0x7fff_ffff, 0x7f80_0000, 1 << 22),
        DType::F16 => (0x7fff, 0x7c00, 1 << 9),
        DType::Bf16 => (0x7fff, 0x7f80, 1 << 6),
        DType::E4M3 => (0x7f, 0x7e, 0x7f),
        DType::E5M2 => (0x7f, 0x7c, 0x7f),
        _ => unreachable!("{d} is no float"),
    }
}

pub(super) fn is_nan(d: DType, bits: u64) -> bool {
    let (mag, inf, _) = parts(d);
    bits & mag > inf
}

/// Exact.
fn value(d: DType, bits: u64) -> f64 {
    match d {
        DType::F64 => f64::from_bits(bits),
        DType::F32 => f32::from_bits(bits as u32).into(),
        DType::F16 => f16::from_bits(bits as u16).into(),
        DType::Bf16 => bf16::from_bits(bits as u16).into(),
        DType::E4M3 => E4M3(bits as u8).to_f32().into(),
        DType::E5M2 => E5M2(bits as u8).to_f32().into(),
        _ => unreachable!(),
    }
}

/// `f64` results of `f64` operands, `f32` results of the others; rounded once to the type, the NaN of the rule.
fn arithmetic(d: DType, u: u64, v: u64, wide: impl Fn(f64, f64) -> f64, single: impl Fn(f32, f32) -> f32) -> u64 {
    let (mag, inf, quiet) = parts(d);
    let (a, b) = (value(d, u), value(d, v));
    let s = single(a as f32, b as f32);
    let invalid = if d == DType::F64 { wide(a, b).is_nan() } else { s.is_nan() };
    if is_nan(d, u) || is_nan(d, v) {
        let nan = if is_nan(d, u) { u } else { v };
        return nan | quiet;
    }
    if invalid {
        return (mag + 1) | inf | quiet;
    }
    match d {
        DType::F64 => wide(a, b).to_bits(),
        DType::F32 => s.to_bits().into(),
        DType::F16 => f16::from_f32(s).to_bits().into(),
        DType::Bf16 => bf16::from_f32(s).to_bits().into(),
        DType::E4M3 => E4M3::from_f32(s).0.into(),
        DType::E5M2 => E5M2::from_f32(s).0.into(),
        _ => unreachable!(),
    }
}

/// The integer that `bits` stand for.
fn integer(d: DType, bits: u64) -> i128 {
    match d {
        DType::I8 => (bits as i8).into(),
        DType::I16 => (bits as i16).into(),
        DType::I32 => (bits as i32).into(),
        DType::I64 => (bits as i64).into(),
        _ => bits.into(),
    }
}

fn wrapped(d: DType, x: i128) -> u64 {
    x as u64 & (u64::MAX >> (64 - 8 * d.size()))
}

/// The bits of `u op v`.
pub(super) fn combined(op: ReduceOp, d: DType, u: u64, v: u64) -> u64 {
    if d == DType::Bool {
        let (u, v) = (u != 0, v != 0);
        return u64::from(match op {
            ReduceOp::BAnd | ReduceOp::Min => u && v,
            ReduceOp::BOr | ReduceOp::Max => u || v,
            ReduceOp::BXor => u != v,
            _ => unreachable!(),
        });
    }
    if d.is_float() {
        let (a, b) = (value(d, u), value(d, v));
        let first = |better: bool| if is_nan(d, u) || (!is_nan(d, v) && (better || a == b)) { u } else { v };
        return match op {
            ReduceOp::Sum | ReduceOp::Avg => arithmetic(d, u, v, |a, b| a + b, |a, b| a + b),
            ReduceOp::Prod => arithmetic(d, u, v, |a, b| a * b, |a, b| a * b),
            ReduceOp::Min => first(a < b),
            ReduceOp::Max => first(a > b),
            _ => unreachable!(),
        };
    }
    let (a, b) = (integer(d, u), integer(d, v));
    match op {
        ReduceOp::Sum | ReduceOp::Avg => wrapped(d, a + b),
        ReduceOp::Prod => wrapped(d, a.wrapping_mul(b)),
        ReduceOp::Min => wrapped(d, a.min(b)),
        ReduceOp::Max => wrapped(d, a.max(b)),
        ReduceOp::BAnd => u & v,
        ReduceOp::BOr => u | v,
        ReduceOp::BXor => u ^ v,
        _ => unreachable!(),
    }
}

/// The bits of `u` scaled as a `PreMulSum` scales.
pub(super) fn scaled(d: DType, u: u64, factor: f64) -> u64 {
    arithmetic(d, u, 0, |a, _| a * factor, |a, _| a * factor as f32)
}

/// The bits of `u` divided as an `Avg` divides.
pub(super) fn divided(d: DType, u: u64, ranks: usize) -> u64 {
    if d.is_float() {
        return arithmetic(d, u, 0, |a, _| a / ranks as f64, |a, _| a / ranks as f32);
    }
    wrapped(d, integer(d, u) / ranks as i128)
}
