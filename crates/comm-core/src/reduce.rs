//! [`Reducer`]: an operator bound to an element type, as backends run it, and the portable kernels.
//!
//! Kernels work on bytes of any alignment and are safe code that the compiler vectorises.
//! 16-bit and 8-bit floats are combined in `f32` and rounded once per step.

use std::cell::Cell;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, OnceLock};

use half::f16;

use crate::dtype::{DType, E4M3, E5M2};
use crate::error::{Error, ErrorKind, Result};
use crate::op::ReduceOp;

/// Folds a user's values; `acc` and `x` have equal length. `x` may be used as scratch.
pub(crate) trait CustomFold: Send + Sync {
    fn fold(&self, acc: &mut [u8], x: &mut [u8]);
}

/// What this thread does inside a custom operator. Folds run under the backend's locks, so a call into a
/// communicator from there would wait for its own caller.
#[derive(Default)]
struct Fold {
    depth: Cell<u32>,
    abort: Cell<Option<String>>,
}

thread_local! {
    static FOLD: Fold = Fold::default();
}

/// Whether the calling thread is inside a custom operator.
pub(crate) fn in_fold() -> bool {
    FOLD.with(|s| s.depth.get() > 0)
}

/// Makes the operation whose operator runs on this thread fail once the operator returns.
pub(crate) fn abort_fold(reason: &str) {
    FOLD.with(|s| s.abort.set(Some(reason.to_owned())));
}

type Kernel = fn(&mut [u8], &[u8]);

#[derive(Clone)]
enum Combine {
    Kernel(Kernel),
    /// A user's function, and whether it has panicked.
    Custom(Arc<dyn CustomFold>, Arc<OnceLock<String>>),
}

/// An operator bound to an element type.
///
/// One step of a reduction is [`fold`](Self::fold) (`acc = acc op x`) or
/// [`fold_rev`](Self::fold_rev) (`acc = x op acc`). A rank's own contribution first goes through
/// [`prescale`](Self::prescale), the final result through [`finish`](Self::finish).
#[derive(Clone)]
pub struct Reducer {
    op: ReduceOp,
    dtype: DType,
    unit: usize,
    commutative: bool,
    factor: Option<f64>,
    combine: Combine,
}

impl fmt::Debug for Reducer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reducer")
            .field("op", &self.op())
            .field("dtype", &self.dtype)
            .field("unit", &self.unit)
            .finish_non_exhaustive()
    }
}

impl Reducer {
    /// The built-in operator `op` on elements of type `dtype`.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Unsupported`] when the legality table does not allow the pair. `PreMulSum`,
    /// `MinLoc`, `MaxLoc` and `Custom` carry data or types that a code cannot, and exist only as
    /// types in [`op`](crate::op).
    pub fn builtin(op: ReduceOp, dtype: DType) -> Result<Self> {
        if op.is_legal(dtype) {
            return Ok(Self::builtin_unchecked(op, dtype));
        }
        let reason = match op {
            ReduceOp::PreMulSum | ReduceOp::MinLoc | ReduceOp::MaxLoc | ReduceOp::Custom => {
                format!("it exists only in the typed API; use comm_core::op's `{op:?}`")
            }
            _ => format!("{op} is not defined on {dtype}; see ReduceOp::is_legal for the table"),
        };
        Err(Error::new(ErrorKind::Unsupported { what: format!("operator {op} on {dtype}"), reason }))
    }

    pub(crate) fn builtin_unchecked(op: ReduceOp, dtype: DType) -> Self {
        let combine = Combine::Kernel(kernel(op, dtype));
        Self { op, dtype, unit: dtype.size(), commutative: true, factor: None, combine }
    }

    pub(crate) fn from_fold(op: ReduceOp, commutative: bool, fold: Arc<dyn CustomFold>, unit: usize) -> Self {
        Self { op, dtype: DType::U8, unit, commutative, factor: None, combine: Combine::Custom(fold, Arc::default()) }
    }

    pub(crate) fn with_dtype(mut self, dtype: DType) -> Self {
        self.dtype = dtype;
        self
    }

    pub(crate) fn with_factor(mut self, factor: f64) -> Self {
        self.factor = Some(factor);
        self
    }

    /// `Aborted` by `rank` if a custom operator has panicked, or called `abort`, during this operation; what it folded is then
    /// worthless. Backends ask before they pass results on and before they report success.
    ///
    /// # Errors
    ///
    /// As above.
    pub fn check(&self, rank: usize) -> Result<()> {
        match &self.combine {
            Combine::Custom(_, panicked) => match panicked.get() {
                Some(text) => Err(Error::new(ErrorKind::Aborted { rank, cause: text.clone() })),
                None => Ok(()),
            },
            Combine::Kernel(_) => Ok(()),
        }
    }

    /// The operator's code. A factor makes a sum a [`ReduceOp::PreMulSum`].
    #[must_use]
    pub fn op(&self) -> ReduceOp {
        if self.factor.is_some() { ReduceOp::PreMulSum } else { self.op }
    }

    /// The element type on the wire.
    #[must_use]
    pub const fn dtype(&self) -> DType {
        self.dtype
    }

    /// Bytes that one step treats as a whole; buffers may be cut only at multiples of it.
    #[must_use]
    pub const fn unit(&self) -> usize {
        self.unit
    }

    /// Whether contributions may be folded in any order. If not: rank order.
    #[must_use]
    pub const fn is_commutative(&self) -> bool {
        self.commutative
    }

    /// The factor of a `PreMulSum`.
    #[must_use]
    pub const fn factor(&self) -> Option<f64> {
        self.factor
    }

    /// `acc = acc op x`, element by element. `x` may be overwritten.
    pub fn fold(&self, acc: &mut [u8], x: &mut [u8]) {
        debug_assert_eq!(acc.len(), x.len());
        match &self.combine {
            Combine::Kernel(fold) => fold(acc, x),
            Combine::Custom(f, panicked) => {
                // Folds run under locks and on the engine's thread: a panic must not unwind through those.
                let depth = FOLD.with(|s| s.depth.replace(s.depth.get() + 1));
                let folded = catch_unwind(AssertUnwindSafe(|| f.fold(acc, x)));
                FOLD.with(|s| s.depth.set(depth));
                // The first text is kept.
                if let Err(payload) = folded {
                    let _ = panicked.set(format!("its custom operator panicked: {}", panic_text(payload.as_ref())));
                }
                if let Some(reason) = FOLD.with(|s| s.abort.take()) {
                    let _ = panicked.set(format!("its custom operator aborted: {reason}"));
                }
            }
        }
    }

    /// `acc = x op acc`, element by element. `x` is overwritten.
    ///
    /// Runs the same kernel as [`fold`](Self::fold) with the operands in their places, so that two
    /// ranks that fold the same pair from either side get the same bits, NaN payloads included.
    pub fn fold_rev(&self, acc: &mut [u8], x: &mut [u8]) {
        self.fold(x, acc);
        acc.copy_from_slice(x);
    }

    /// Applies the factor of a `PreMulSum` to a rank's own contribution; nothing for other operators.
    pub fn prescale(&self, buf: &mut [u8]) {
        let Some(factor) = self.factor else { return };
        match self.dtype {
            DType::F64 => map::<f64>(buf, |x| x * factor),
            DType::F32 => map::<f32>(buf, |x| x * factor as f32),
            DType::Bf16 => map::<Bf>(buf, |x| Bf::round(x.wide() * factor as f32)),
            DType::F16 => map::<f16>(buf, |x| f16::from_f32(x.to_f32() * factor as f32)),
            _ => {}
        }
    }

    /// Divides the sum of an `Avg` by the number of ranks; nothing for other operators.
    pub fn finish(&self, buf: &mut [u8], ranks: usize) {
        if self.op != ReduceOp::Avg || ranks <= 1 {
            return;
        }
        macro_rules! int {
            ($t:ty) => {
                // The divisor is applied in 128 bits: a world larger than the type's maximum still divides right.
                map::<$t>(buf, |x| (i128::from(x) / ranks as i128) as $t)
            };
        }
        let n = ranks as f32;
        match self.dtype {
            DType::I8 => int!(i8),
            DType::U8 => int!(u8),
            DType::I16 => int!(i16),
            DType::U16 => int!(u16),
            DType::I32 => int!(i32),
            DType::U32 => int!(u32),
            DType::I64 => int!(i64),
            DType::U64 => int!(u64),
            DType::F16 => map::<f16>(buf, |x| f16::from_f32(x.to_f32() / n)),
            DType::Bf16 => map::<Bf>(buf, |x| Bf::round(x.wide() / n)),
            DType::F32 => map::<f32>(buf, |x| x / n),
            DType::F64 => map::<f64>(buf, |x| x / ranks as f64),
            DType::E4M3 => map::<E4M3>(buf, |x| E4M3::from_f32(x.to_f32() / n)),
            DType::E5M2 => map::<E5M2>(buf, |x| E5M2::from_f32(x.to_f32() / n)),
            DType::Bool => {}
        }
    }

    /// Whether [`prescale`](Self::prescale) changes anything.
    #[must_use]
    pub const fn needs_prescale(&self) -> bool {
        self.factor.is_some()
    }

    /// Whether [`finish`](Self::finish) changes anything.
    #[must_use]
    pub fn needs_finish(&self, ranks: usize) -> bool {
        self.op == ReduceOp::Avg && ranks > 1
    }
}

/// One element as it lies in memory.
trait Lane: Copy {
    const BYTES: usize;
    fn load(b: &[u8]) -> Self;
    fn store(self, b: &mut [u8]);
}

macro_rules! lanes {
    ($($t:ty),*) => {$(
        impl Lane for $t {
            const BYTES: usize = size_of::<$t>();
            #[inline(always)]
            fn load(b: &[u8]) -> Self {
                let mut a = [0u8; size_of::<$t>()];
                a.copy_from_slice(b);
                <$t>::from_ne_bytes(a)
            }
            #[inline(always)]
            fn store(self, b: &mut [u8]) {
                b.copy_from_slice(&self.to_ne_bytes());
            }
        }
    )*};
}
lanes!(i8, u8, i16, u16, i32, u32, i64, u64, f16, f32, f64);

/// A bfloat16 with conversions the compiler can vectorise (the `half` crate's branch on NaN).
#[derive(Clone, Copy)]
struct Bf(u16);

impl Bf {
    #[inline(always)]
    fn wide(self) -> f32 {
        f32::from_bits(u32::from(self.0) << 16)
    }

    #[inline(always)]
    fn round(x: f32) -> Self {
        let b = x.to_bits();
        let nearest = b.wrapping_add(0x7fff + ((b >> 16) & 1)) >> 16;
        let quiet = (b >> 16) | 0x40;
        Self(if b & 0x7fff_ffff > 0x7f80_0000 { quiet } else { nearest } as u16)
    }
}

impl Lane for Bf {
    const BYTES: usize = 2;
    #[inline(always)]
    fn load(b: &[u8]) -> Self {
        Self(u16::load(b))
    }
    #[inline(always)]
    fn store(self, b: &mut [u8]) {
        self.0.store(b);
    }
}

macro_rules! byte_lanes {
    ($($t:ident),*) => {$(
        impl Lane for $t {
            const BYTES: usize = 1;
            #[inline(always)]
            fn load(b: &[u8]) -> Self {
                $t(b[0])
            }
            #[inline(always)]
            fn store(self, b: &mut [u8]) {
                b[0] = self.0;
            }
        }
    )*};
}
byte_lanes!(E4M3, E5M2);

/// A boolean: any non-zero byte is true, only 0 and 1 are stored.
#[derive(Clone, Copy)]
struct Bit(bool);

impl Lane for Bit {
    const BYTES: usize = 1;
    #[inline(always)]
    fn load(b: &[u8]) -> Self {
        Self(b[0] != 0)
    }
    #[inline(always)]
    fn store(self, b: &mut [u8]) {
        b[0] = u8::from(self.0);
    }
}

#[inline(always)]
fn zip<T: Lane>(acc: &mut [u8], x: &[u8], f: impl Fn(T, T) -> T) {
    for (a, b) in acc.chunks_exact_mut(T::BYTES).zip(x.chunks_exact(T::BYTES)) {
        f(T::load(a), T::load(b)).store(a);
    }
}

#[inline(always)]
fn map<T: Lane>(buf: &mut [u8], f: impl Fn(T) -> T) {
    for a in buf.chunks_exact_mut(T::BYTES) {
        f(T::load(a)).store(a);
    }
}

/// Whether the minimum of two floats is the first: NaN propagates, and of equal values (−0, +0) it is the
/// first, so that a canonical operand order gives identical bits on all ranks.
macro_rules! first_is_min {
    ($a:expr, $b:expr) => {{
        let (a, b) = ($a, $b);
        a <= b || a.is_nan()
    }};
}
macro_rules! first_is_max {
    ($a:expr, $b:expr) => {{
        let (a, b) = ($a, $b);
        a >= b || a.is_nan()
    }};
}

fn kernel(op: ReduceOp, dtype: DType) -> Kernel {
    macro_rules! int {
        ($t:ty) => {
            match op {
                ReduceOp::Sum | ReduceOp::Avg => |a, x| zip::<$t>(a, x, <$t>::wrapping_add),
                ReduceOp::Prod => |a, x| zip::<$t>(a, x, <$t>::wrapping_mul),
                ReduceOp::Min => |a, x| zip::<$t>(a, x, <$t>::min),
                ReduceOp::Max => |a, x| zip::<$t>(a, x, <$t>::max),
                ReduceOp::BAnd => |a, x| zip::<$t>(a, x, |u, v| u & v),
                ReduceOp::BOr => |a, x| zip::<$t>(a, x, |u, v| u | v),
                ReduceOp::BXor => |a, x| zip::<$t>(a, x, |u, v| u ^ v),
                _ => no_kernel,
            }
        };
    }
    // `wide` and `narrow` lead to and from the type in which the arithmetic is done.
    macro_rules! float {
        ($t:ty, $wide:expr, $narrow:expr) => {
            match op {
                ReduceOp::Sum | ReduceOp::Avg => |a, x| zip::<$t>(a, x, |u, v| $narrow($wide(u) + $wide(v))),
                ReduceOp::Prod => |a, x| zip::<$t>(a, x, |u, v| $narrow($wide(u) * $wide(v))),
                // The operand itself, not its way through the wide type and back, which saturates infinities.
                ReduceOp::Min => |a, x| zip::<$t>(a, x, |u, v| if first_is_min!($wide(u), $wide(v)) { u } else { v }),
                ReduceOp::Max => |a, x| zip::<$t>(a, x, |u, v| if first_is_max!($wide(u), $wide(v)) { u } else { v }),
                _ => no_kernel,
            }
        };
    }
    match dtype {
        DType::I8 => int!(i8),
        DType::U8 => int!(u8),
        DType::I16 => int!(i16),
        DType::U16 => int!(u16),
        DType::I32 => int!(i32),
        DType::U32 => int!(u32),
        DType::I64 => int!(i64),
        DType::U64 => int!(u64),
        DType::F32 => float!(f32, std::convert::identity, std::convert::identity),
        DType::F64 => float!(f64, std::convert::identity, std::convert::identity),
        DType::Bf16 => float!(Bf, Bf::wide, Bf::round),
        DType::F16 => float!(f16, f16::to_f32, f16::from_f32),
        DType::E4M3 => float!(E4M3, E4M3::to_f32, E4M3::from_f32),
        DType::E5M2 => float!(E5M2, E5M2::to_f32, E5M2::from_f32),
        DType::Bool => match op {
            ReduceOp::BAnd | ReduceOp::Min => |a, x| zip::<Bit>(a, x, |u, v| Bit(u.0 & v.0)),
            ReduceOp::BOr | ReduceOp::Max => |a, x| zip::<Bit>(a, x, |u, v| Bit(u.0 | v.0)),
            ReduceOp::BXor => |a, x| zip::<Bit>(a, x, |u, v| Bit(u.0 ^ v.0)),
            _ => no_kernel,
        },
    }
}

/// Stands where the legality table has a hole; unreachable because every constructor checks the table.
fn no_kernel(_: &mut [u8], _: &[u8]) {
    debug_assert!(false, "a reducer was built for a pair that the legality table does not allow");
}

/// What a panic's payload says.
#[must_use]
pub fn panic_text(payload: &(dyn std::any::Any + Send)) -> String {
    let text = payload.downcast_ref::<&str>().map(|s| (*s).to_owned());
    text.or_else(|| payload.downcast_ref::<String>().cloned()).unwrap_or_else(|| "(no message)".into())
}

/// Makes received `bool` bytes valid: every non-zero byte becomes 1.
pub fn normalize_bools(bytes: &mut [u8]) {
    for b in bytes {
        *b = u8::from(*b != 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::bf16;
    use proptest::prelude::*;

    fn bytes<T: Copy, const N: usize>(xs: &[T], f: impl Fn(T) -> [u8; N]) -> Vec<u8> {
        xs.iter().flat_map(|x| f(*x)).collect()
    }

    #[test]
    fn integer_average_truncates_toward_zero_and_sums_wrap() {
        let r = Reducer::builtin(ReduceOp::Avg, DType::I8).unwrap();
        let mut acc = [100i8 as u8, -7i8 as u8];
        r.fold(&mut acc, &mut [100u8, 0]);
        assert_eq!(acc[0] as i8, -56, "wraps");
        r.finish(&mut acc, 2);
        assert_eq!([acc[0] as i8, acc[1] as i8], [-28, -3]);
    }

    #[test]
    fn min_propagates_nan_and_order_is_canonical() {
        let r = Reducer::builtin(ReduceOp::Min, DType::F32).unwrap();
        for (a, b) in [(f32::NAN, 1.0), (1.0, f32::NAN)] {
            let mut acc = a.to_ne_bytes();
            r.fold(&mut acc, &mut b.to_ne_bytes());
            assert!(f32::from_ne_bytes(acc).is_nan());
        }
        // acc = x op acc with operands swapped gives the same bits as acc op x.
        for op in [ReduceOp::Min, ReduceOp::Max, ReduceOp::Sum, ReduceOp::Prod] {
            let r = Reducer::builtin(op, DType::F32).unwrap();
            for (a, b) in [(0.0f32, -0.0f32), (-0.0, 0.0), (f32::NAN, f32::from_bits(0x7fc0_1234))] {
                let (mut p, mut q) = (a.to_ne_bytes(), b.to_ne_bytes());
                r.fold(&mut p, &mut b.to_ne_bytes());
                r.fold_rev(&mut q, &mut a.to_ne_bytes());
                assert_eq!(p, q, "{op} {a} {b}");
            }
        }
    }

    #[test]
    fn bool_is_logical_and_stores_only_0_and_1() {
        let r = Reducer::builtin(ReduceOp::BXor, DType::Bool).unwrap();
        let mut acc = [1u8, 7, 0, 0];
        r.fold(&mut acc, &mut [1, 0, 9, 0]);
        assert_eq!(acc, [0, 1, 1, 0]);
    }

    #[test]
    fn premul_scales_own_contribution_only() {
        use crate::op::{Operator, PreMulSum};
        let r = PreMulSum(2.0f64).reducer();
        assert_eq!(r.op(), ReduceOp::PreMulSum);
        let mut mine = 3.0f64.to_ne_bytes();
        r.prescale(&mut mine);
        r.fold(&mut mine, &mut 10.0f64.to_ne_bytes());
        assert_eq!(f64::from_ne_bytes(mine), 16.0);
    }

    #[test]
    fn illegal_pairs_are_errors_with_advice() {
        let e = Reducer::builtin(ReduceOp::BAnd, DType::F32).unwrap_err();
        assert!(matches!(e.kind(), ErrorKind::Unsupported { .. }), "{e}");
        let e = Reducer::builtin(ReduceOp::PreMulSum, DType::F32).unwrap_err();
        assert!(e.to_string().contains("typed API"), "{e}");
    }

    proptest! {
        #[test]
        fn bf16_rounds_like_half(bits in any::<u32>()) {
            let x = f32::from_bits(bits);
            let (ours, theirs) = (Bf::round(x).0, bf16::from_f32(x));
            if x.is_nan() {
                prop_assert!(bf16::from_bits(ours).is_nan());
            } else {
                prop_assert_eq!(ours, theirs.to_bits());
            }
        }

        #[test]
        fn f64_sum_matches_a_plain_loop(a in prop::collection::vec(-1e9f64..1e9, 0..50)) {
            let b: Vec<f64> = a.iter().map(|x| x * 0.5 - 3.0).collect();
            let r = Reducer::builtin(ReduceOp::Sum, DType::F64).unwrap();
            let mut acc = bytes(&a, f64::to_ne_bytes);
            r.fold(&mut acc, &mut bytes(&b, f64::to_ne_bytes));
            let want: Vec<f64> = a.iter().zip(&b).map(|(x, y)| x + y).collect();
            prop_assert_eq!(acc, bytes(&want, f64::to_ne_bytes));
        }
    }
}
