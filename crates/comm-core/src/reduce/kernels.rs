//! Which code runs an operator on a data type: the portable loops, and the choice between them and the vector code.

use super::lanes::{Arith, Bf, Bit, E4, E5, Hf, Lane, Narrow};
use super::simd::{self, Kernel, Level};
use crate::dtype::DType;
use crate::op::ReduceOp;

/// An operator on one pair of elements. The first operand is the accumulator's.
pub(super) trait Op<T> {
    fn apply(u: T, v: T) -> T;
}

pub(super) struct Sum;
pub(super) struct Prod;
pub(super) struct Min;
pub(super) struct Max;
pub(super) struct And;
pub(super) struct Or;
pub(super) struct Xor;

macro_rules! op {
    ($op:ident, $t:ty, |$u:ident, $v:ident| $e:expr) => {
        impl Op<$t> for $op {
            #[inline(always)]
            fn apply($u: $t, $v: $t) -> $t {
                $e
            }
        }
    };
}

macro_rules! ints {
    ($($t:ty),*) => {$(
        op!(Sum, $t, |u, v| u.wrapping_add(v));
        op!(Prod, $t, |u, v| u.wrapping_mul(v));
        op!(Min, $t, |u, v| u.min(v));
        op!(Max, $t, |u, v| u.max(v));
        op!(And, $t, |u, v| u & v);
        op!(Or, $t, |u, v| u | v);
        op!(Xor, $t, |u, v| u ^ v);
    )*};
}
ints!(i8, u8, i16, u16, i32, u32, i64, u64);

// Minimum and maximum give one of their operands as it is: NaN propagates, the first if there are two, and of equal values
// (−0, +0) it is the first, so that a canonical operand order gives identical bits on all ranks.

macro_rules! floats {
    ($($t:ty),*) => {$(
        op!(Sum, $t, |u, v| u.plus(v));
        op!(Prod, $t, |u, v| u.times(v));
        op!(Min, $t, |u, v| if (u <= v) | u.is_nan() { u } else { v });
        op!(Max, $t, |u, v| if (u >= v) | u.is_nan() { u } else { v });
    )*};
}
floats!(f32, f64);

macro_rules! narrow_floats {
    ($($t:ty),*) => {$(
        op!(Sum, $t, |u, v| Narrow::round(u.wide().plus(v.wide())));
        op!(Prod, $t, |u, v| Narrow::round(u.wide().times(v.wide())));
        op!(Min, $t, |u, v| if u.nan() | (!v.nan() & (u.order() <= v.order())) { u } else { v });
        op!(Max, $t, |u, v| if u.nan() | (!v.nan() & (u.order() >= v.order())) { u } else { v });
    )*};
}
narrow_floats!(Bf, Hf, E4, E5);

op!(And, Bit, |u, v| Bit(u.0 & v.0));
op!(Or, Bit, |u, v| Bit(u.0 | v.0));
op!(Xor, Bit, |u, v| Bit(u.0 ^ v.0));

/// The portable loop. Vector code hands its tails to it.
#[inline(always)]
pub(super) fn zip<T: Lane, O: Op<T>>(acc: &mut [u8], x: &[u8]) {
    for (a, b) in acc.chunks_exact_mut(T::BYTES).zip(x.chunks_exact(T::BYTES)) {
        O::apply(T::load(a), T::load(b)).store(a);
    }
}

#[inline(always)]
pub(super) fn map<T: Lane>(buf: &mut [u8], f: impl Fn(T) -> T) {
    for a in buf.chunks_exact_mut(T::BYTES) {
        f(T::load(a)).store(a);
    }
}

/// `acc = acc op x` for elements of type `dtype`, as fast as `level` allows.
pub(super) fn kernel(op: ReduceOp, dtype: DType, level: Level) -> Kernel {
    if let Some(kernel) = simd::explicit(op, dtype, level) {
        return kernel;
    }
    let kernel = match dtype {
        DType::I8 => numeric::<i8>(op, level).or_else(|| bitwise::<i8>(op, level)),
        DType::U8 => numeric::<u8>(op, level).or_else(|| bitwise::<u8>(op, level)),
        DType::I16 => numeric::<i16>(op, level).or_else(|| bitwise::<i16>(op, level)),
        DType::U16 => numeric::<u16>(op, level).or_else(|| bitwise::<u16>(op, level)),
        DType::I32 => numeric::<i32>(op, level).or_else(|| bitwise::<i32>(op, level)),
        DType::U32 => numeric::<u32>(op, level).or_else(|| bitwise::<u32>(op, level)),
        DType::I64 => numeric::<i64>(op, level).or_else(|| bitwise::<i64>(op, level)),
        DType::U64 => numeric::<u64>(op, level).or_else(|| bitwise::<u64>(op, level)),
        DType::F32 => numeric::<f32>(op, level),
        DType::F64 => numeric::<f64>(op, level),
        DType::Bf16 => numeric::<Bf>(op, level),
        DType::F16 => numeric::<Hf>(op, level),
        DType::E4M3 => numeric::<E4>(op, level),
        DType::E5M2 => numeric::<E5>(op, level),
        DType::Bool => match op {
            ReduceOp::Min => bitwise::<Bit>(ReduceOp::BAnd, level),
            ReduceOp::Max => bitwise::<Bit>(ReduceOp::BOr, level),
            _ => bitwise::<Bit>(op, level),
        },
    };
    kernel.unwrap_or_else(Kernel::none)
}

fn numeric<T: Lane>(op: ReduceOp, level: Level) -> Option<Kernel>
where
    Sum: Op<T>,
    Prod: Op<T>,
    Min: Op<T>,
    Max: Op<T>,
{
    Some(match op {
        ReduceOp::Sum | ReduceOp::Avg => simd::versioned::<T, Sum>(level),
        ReduceOp::Prod => simd::versioned::<T, Prod>(level),
        ReduceOp::Min => simd::versioned::<T, Min>(level),
        ReduceOp::Max => simd::versioned::<T, Max>(level),
        _ => return None,
    })
}

fn bitwise<T: Lane>(op: ReduceOp, level: Level) -> Option<Kernel>
where
    And: Op<T>,
    Or: Op<T>,
    Xor: Op<T>,
{
    Some(match op {
        ReduceOp::BAnd => simd::versioned::<T, And>(level),
        ReduceOp::BOr => simd::versioned::<T, Or>(level),
        ReduceOp::BXor => simd::versioned::<T, Xor>(level),
        _ => return None,
    })
}

/// Multiplies by `factor`; nothing for types that `PreMulSum` does not have.
pub(super) fn scale(dtype: DType, buf: &mut [u8], factor: f64, level: Level) {
    let f = factor as f32;
    match dtype {
        DType::F64 => simd::map::<f64>(level, buf, |x| x.times(factor)),
        DType::F32 => simd::map::<f32>(level, buf, |x| x.times(f)),
        DType::Bf16 => simd::map::<Bf>(level, buf, |x| Narrow::round(x.wide().times(f))),
        DType::F16 => simd::map::<Hf>(level, buf, |x| Narrow::round(x.wide().times(f))),
        _ => {}
    }
}

/// Divides by the number of ranks; integers truncate toward zero.
pub(super) fn divide(dtype: DType, buf: &mut [u8], ranks: usize, level: Level) {
    // Wider than the type where there is a wider one: a world larger than the type's maximum still divides right. Worlds
    // above `i64::MAX` there are none.
    let (wide, n) = (i64::try_from(ranks).unwrap_or(i64::MAX), ranks as f32);
    match dtype {
        DType::I8 => map::<i8>(buf, |x| (i64::from(x) / wide) as i8),
        DType::U8 => map::<u8>(buf, |x| (i64::from(x) / wide) as u8),
        DType::I16 => map::<i16>(buf, |x| (i64::from(x) / wide) as i16),
        DType::U16 => map::<u16>(buf, |x| (i64::from(x) / wide) as u16),
        DType::I32 => map::<i32>(buf, |x| (i64::from(x) / wide) as i32),
        DType::U32 => map::<u32>(buf, |x| (i64::from(x) / wide) as u32),
        DType::I64 => map::<i64>(buf, |x| x / wide),
        DType::U64 => map::<u64>(buf, |x| x / wide.unsigned_abs()),
        DType::F16 => simd::map::<Hf>(level, buf, |x| Narrow::round(x.wide().over(n))),
        DType::Bf16 => simd::map::<Bf>(level, buf, |x| Narrow::round(x.wide().over(n))),
        DType::F32 => simd::map::<f32>(level, buf, |x| x.over(n)),
        DType::F64 => simd::map::<f64>(level, buf, |x| x.over(ranks as f64)),
        DType::E4M3 => simd::map::<E4>(level, buf, |x| Narrow::round(x.wide().over(n))),
        DType::E5M2 => simd::map::<E5>(level, buf, |x| Narrow::round(x.wide().over(n))),
        DType::Bool => {}
    }
}
