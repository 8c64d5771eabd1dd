//! Which code runs an operator on a data type: the portable loops, and the choice between them and the vector code.

use std::convert;
use std::sync::OnceLock;

use super::lanes::{Arith, Bf, Bf2, Bit, E4, E5, Hf, Lane, Narrow};
use super::simd::{self, Kernel, Level};
use crate::dtype::DType;
use crate::op::ReduceOp;

/// An operator on one pair of elements. The first operand is the accumulator's.
pub(super) trait Op<T> {
    fn apply(u: T, v: T) -> T;

    /// Whether [`quick`](Self::quick) is quicker.
    const HAS_QUICK: bool = false;

    /// The same, and `false`; or anything, and `true`.
    #[inline(always)]
    fn quick(u: T, v: T) -> (T, bool) {
        (Self::apply(u, v), false)
    }
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

/// An operator that computes in the type `$w`. Quick is not to ask which NaN.
macro_rules! computed {
    ($op:ident, $t:ty, |$u:ident, $v:ident| $e:expr, $plain:expr, $round:path) => {
        impl Op<$t> for $op {
            #[inline(always)]
            fn apply($u: $t, $v: $t) -> $t {
                $round($e)
            }
            const HAS_QUICK: bool = true;
            #[inline(always)]
            fn quick($u: $t, $v: $t) -> ($t, bool) {
                let r = $plain;
                ($round(r), r.is_nan())
            }
        }
    };
}

macro_rules! floats {
    ($($t:ty),*) => {$(
        computed!(Sum, $t, |u, v| u.plus(v), u + v, convert::identity);
        computed!(Prod, $t, |u, v| u.times(v), u * v, convert::identity);
        op!(Min, $t, |u, v| if (u <= v) | u.is_nan() { u } else { v });
        op!(Max, $t, |u, v| if (u >= v) | u.is_nan() { u } else { v });
    )*};
}
floats!(f32, f64);

macro_rules! narrow_floats {
    ($($t:ty),*) => {$(
        computed!(Sum, $t, |u, v| u.wide().plus(v.wide()), u.wide() + v.wide(), Narrow::round);
        computed!(Prod, $t, |u, v| u.wide().times(v.wide()), u.wide() * v.wide(), Narrow::round);
        op!(Min, $t, |u, v| if u.nan() | (!v.nan() & (u.order() <= v.order())) { u } else { v });
        op!(Max, $t, |u, v| if u.nan() | (!v.nan() & (u.order() >= v.order())) { u } else { v });
    )*};
}
narrow_floats!(Bf, Hf, E4, E5);

macro_rules! bf16_pairs {
    ($($op:ident, $sign:tt;)*) => {$(
        impl Op<Bf2> for $op {
            #[inline(always)]
            fn apply(u: Bf2, v: Bf2) -> Bf2 {
                let ((a, b), (c, d)) = (u.halves(), v.halves());
                Bf2::of(<Self as Op<Bf>>::apply(a, c), <Self as Op<Bf>>::apply(b, d))
            }
            const HAS_QUICK: bool = true;
            #[inline(always)]
            fn quick(u: Bf2, v: Bf2) -> (Bf2, bool) {
                let ((a, b), (c, d)) = (u.wide(), v.wide());
                let (upper, lower) = (a $sign c, b $sign d);
                (Bf2::rounded(upper, lower), upper.is_nan() | lower.is_nan())
            }
        }
    )*};
}
bf16_pairs! { Sum, +; Prod, *; }

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

/// The same, block by block in the quick way, and again in the other where that fails.
fn zip_quick<T: Lane, O: Op<T>>(acc: &mut [u8], x: &[u8]) {
    const BLOCK: usize = 512;
    let mut results = [0; BLOCK];
    let (mut acc, mut x) = (acc.chunks_exact_mut(BLOCK), x.chunks_exact(BLOCK));
    for (a, b) in acc.by_ref().zip(x.by_ref()) {
        let mut failed = false;
        let pairs = a.chunks_exact(T::BYTES).zip(b.chunks_exact(T::BYTES));
        for ((u, v), r) in pairs.zip(results.chunks_exact_mut(T::BYTES)) {
            let (result, odd) = O::quick(T::load(u), T::load(v));
            result.store(r);
            failed |= odd;
        }
        if failed { zip::<T, O>(a, b) } else { a.copy_from_slice(&results) }
    }
    zip::<T, O>(acc.into_remainder(), x.remainder());
}

/// The portable kernel.
pub(super) fn portable<T: Lane, O: Op<T>>() -> Kernel {
    Kernel::portable(if O::HAS_QUICK { zip_quick::<T, O> } else { zip::<T, O> })
}

/// The portable kernel of bf16, two at once where it is quick.
fn bf16<O: Op<Bf> + Op<Bf2>>(acc: &mut [u8], x: &[u8]) {
    let pairs = acc.len().min(x.len()) / Bf2::BYTES * Bf2::BYTES;
    let ((acc, last), (x, y)) = (acc.split_at_mut(pairs), x.split_at(pairs));
    zip_quick::<Bf2, O>(acc, x);
    zip::<Bf, O>(last, y);
}

/// The results of all pairs of 8-bit floats, by operator and type.
static TABLES: [OnceLock<Box<[u8; 1 << 16]>>; 4] = [const { OnceLock::new() }; 4];

/// The portable kernel of 8-bit floats, for which arithmetic without vectors is slow. `SLOT`: its table.
fn looked_up<T: Lane, O: Op<T>, const SLOT: usize>(acc: &mut [u8], x: &[u8]) {
    let table = TABLES[SLOT].get_or_init(|| {
        let mut results = Box::new([0; 1 << 16]);
        let mut second = [0; 256];
        (0..=u8::MAX).zip(&mut second).for_each(|(v, b)| *b = v);
        for (u, row) in (0..=u8::MAX).zip(results.chunks_exact_mut(256)) {
            row.fill(u);
            zip::<T, O>(row, &second);
        }
        results
    });
    for (a, b) in acc.iter_mut().zip(x) {
        *a = table[usize::from(*a) << 8 | usize::from(*b)];
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
    if level == Level::PORTABLE {
        match (dtype, op) {
            (DType::Bf16, ReduceOp::Sum | ReduceOp::Avg) => return Kernel::portable(bf16::<Sum>),
            (DType::Bf16, ReduceOp::Prod) => return Kernel::portable(bf16::<Prod>),
            (DType::E4M3, ReduceOp::Sum | ReduceOp::Avg) => return Kernel::portable(looked_up::<E4, Sum, 0>),
            (DType::E4M3, ReduceOp::Prod) => return Kernel::portable(looked_up::<E4, Prod, 1>),
            (DType::E5M2, ReduceOp::Sum | ReduceOp::Avg) => return Kernel::portable(looked_up::<E5, Sum, 2>),
            (DType::E5M2, ReduceOp::Prod) => return Kernel::portable(looked_up::<E5, Prod, 3>),
            _ => {}
        }
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
