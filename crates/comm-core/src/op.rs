//! Reduce operators as types, and the legality table from which both the trait impls and the
//! run-time check are made.
//!
//! ```compile_fail
//! use comm_core::op::{BAnd, Operator};
//! fn takes<T: comm_core::Pod, O: Operator<T>>(_: O) {}
//! takes::<f32, _>(BAnd); // bitwise on floats does not compile
//! ```

use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;

use half::{bf16, f16};
use serde::{Deserialize, Serialize};

use crate::dtype::{DType, E4M3, E5M2, Element, Pod};
use crate::reduce::{CustomFold, Reducer, normalize_bools};

/// A reduce operator chosen at run time; the currency of the `_dyn` calls, descriptors and errors.
///
/// Counterparts: `ncclRedOp_t`, `MPI_Op`, `torchcomms.ReduceOp`.
#[non_exhaustive]
#[repr(u8)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum ReduceOp {
    /// Sum. Integers wrap.
    Sum = 0,
    /// Product. Integers wrap.
    Prod = 1,
    /// Minimum. A NaN in any input makes the result NaN.
    Min = 2,
    /// Maximum. A NaN in any input makes the result NaN.
    Max = 3,
    /// Mean. For integers the wrapping sum divided by the number of contributions (the world size; in prefix reductions the ranks up to this one), truncated toward zero.
    Avg = 4,
    /// Bitwise and; logical and for `bool`.
    BAnd = 5,
    /// Bitwise or; logical or for `bool`.
    BOr = 6,
    /// Bitwise exclusive or; logical for `bool`.
    BXor = 7,
    /// Sum of inputs that are first multiplied by a factor of each rank's own.
    PreMulSum = 8,
    /// Smallest value and where it is; equal values take the smallest index.
    MinLoc = 9,
    /// Largest value and where it is; equal values take the smallest index.
    MaxLoc = 10,
    /// A user's function.
    Custom = 11,
}

impl ReduceOp {
    /// Every operator, in the order of their codes.
    pub const ALL: [Self; 12] = [
        Self::Sum,
        Self::Prod,
        Self::Min,
        Self::Max,
        Self::Avg,
        Self::BAnd,
        Self::BOr,
        Self::BXor,
        Self::PreMulSum,
        Self::MinLoc,
        Self::MaxLoc,
        Self::Custom,
    ];

    /// The operator with this wire code.
    #[must_use]
    pub fn from_code(code: u8) -> Option<Self> {
        Self::ALL.get(code as usize).copied()
    }

    /// The name used in messages, on command lines and in JSON.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Sum => "sum",
            Self::Prod => "prod",
            Self::Min => "min",
            Self::Max => "max",
            Self::Avg => "avg",
            Self::BAnd => "band",
            Self::BOr => "bor",
            Self::BXor => "bxor",
            Self::PreMulSum => "premulsum",
            Self::MinLoc => "minloc",
            Self::MaxLoc => "maxloc",
            Self::Custom => "custom",
        }
    }

    /// The operator with this name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|o| o.name() == name)
    }

    /// Whether this operator may be applied to elements of this type through the `_dyn` calls.
    ///
    /// Generated from the same table as the [`Operator`] impls.
    #[must_use]
    pub const fn is_legal(self, dtype: DType) -> bool {
        legal(self, dtype)
    }
}

impl fmt::Display for ReduceOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// An operator that may be applied to elements of type `T`.
///
/// Implemented for exactly the legal pairs, so that an illegal one does not compile.
#[diagnostic::on_unimplemented(
    message = "the operator `{Self}` is not defined on elements of type `{T}`",
    note = "`ReduceOp::is_legal` has the table; `op::custom` makes an operator from a function"
)]
pub trait Operator<T: Pod>: Clone + fmt::Debug + Send + Sync + 'static {
    /// The erased form that backends run.
    fn reducer(&self) -> Reducer;
}

macro_rules! unit_ops {
    ($($(#[$doc:meta])* $name:ident;)*) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct $name;
    )*};
}

unit_ops! {
    /// Sum; integers wrap.
    Sum;
    /// Product; integers wrap.
    Prod;
    /// Minimum; NaN in any input makes the result NaN.
    Min;
    /// Maximum; NaN in any input makes the result NaN.
    Max;
    /// Mean; for integers the wrapping sum divided by the number of contributions (the world size; in prefix reductions the ranks up to this one), truncated toward zero.
    Avg;
    /// Bitwise and; logical for `bool`.
    BAnd;
    /// Bitwise or; logical for `bool`.
    BOr;
    /// Bitwise exclusive or; logical for `bool`.
    BXor;
    /// Minimum with its index over [`Loc`] pairs.
    MinLoc;
    /// Maximum with its index over [`Loc`] pairs.
    MaxLoc;
}

/// The legality table. One row per operator lists the element types it applies to; the macro emits
/// the trait impls and the run-time function, so the two cannot differ.
macro_rules! legality {
    ($($op:ident: $($t:ident/$d:ident)*;)*) => {
        $($(
            impl Operator<$t> for $op {
                fn reducer(&self) -> Reducer {
                    Reducer::builtin_unchecked(ReduceOp::$op, DType::$d)
                }
            }
        )*)*

        const fn legal(op: ReduceOp, dtype: DType) -> bool {
            match op {
                $(ReduceOp::$op => matches!(dtype, $(DType::$d)|*),)*
                _ => false,
            }
        }
    };
}

legality! {
    Sum:  i8/I8 u8/U8 i16/I16 u16/U16 i32/I32 u32/U32 i64/I64 u64/U64 f16/F16 bf16/Bf16 f32/F32 f64/F64 E4M3/E4M3 E5M2/E5M2;
    Prod: i8/I8 u8/U8 i16/I16 u16/U16 i32/I32 u32/U32 i64/I64 u64/U64 f16/F16 bf16/Bf16 f32/F32 f64/F64 E4M3/E4M3 E5M2/E5M2;
    Min:  bool/Bool i8/I8 u8/U8 i16/I16 u16/U16 i32/I32 u32/U32 i64/I64 u64/U64 f16/F16 bf16/Bf16 f32/F32 f64/F64 E4M3/E4M3 E5M2/E5M2;
    Max:  bool/Bool i8/I8 u8/U8 i16/I16 u16/U16 i32/I32 u32/U32 i64/I64 u64/U64 f16/F16 bf16/Bf16 f32/F32 f64/F64 E4M3/E4M3 E5M2/E5M2;
    Avg:  i8/I8 u8/U8 i16/I16 u16/U16 i32/I32 u32/U32 i64/I64 u64/U64 f16/F16 bf16/Bf16 f32/F32 f64/F64 E4M3/E4M3 E5M2/E5M2;
    BAnd: bool/Bool i8/I8 u8/U8 i16/I16 u16/U16 i32/I32 u32/U32 i64/I64 u64/U64;
    BOr:  bool/Bool i8/I8 u8/U8 i16/I16 u16/U16 i32/I32 u32/U32 i64/I64 u64/U64;
    BXor: bool/Bool i8/I8 u8/U8 i16/I16 u16/U16 i32/I32 u32/U32 i64/I64 u64/U64;
}

/// Sum of inputs that each rank first multiplies by its own factor. The factor may differ between ranks.
///
/// Counterpart: `ncclRedOpCreatePreMulSum`, torchcomms `PREMUL_SUM`. Floats of 16 bits and more.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PreMulSum<T>(pub T);

macro_rules! premul {
    ($($t:ident/$d:ident, $to:expr;)*) => {$(
        impl Operator<$t> for PreMulSum<$t> {
            fn reducer(&self) -> Reducer {
                let to: fn($t) -> f64 = $to;
                Reducer::builtin_unchecked(ReduceOp::Sum, DType::$d).with_factor(to(self.0))
            }
        }
    )*};
}

premul! {
    f16/F16, |x| x.to_f64();
    bf16/Bf16, |x| x.to_f64();
    f32/F32, f64::from;
    f64/F64, |x| x;
}

/// A value and where it comes from, the element of [`MinLoc`] and [`MaxLoc`].
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Loc<V, I> {
    /// The compared value.
    pub value: V,
    /// The index that travels with it.
    pub index: I,
}

macro_rules! loc_ops {
    ($($v:ident, $i:ident;)*) => {$(
        // SAFETY: two plain numbers of equal size and alignment, `repr(C)`: no padding, every bit pattern valid.
        unsafe impl Pod for Loc<$v, $i> {}
        impl Operator<Loc<$v, $i>> for MinLoc {
            fn reducer(&self) -> Reducer {
                loc_reducer::<$v, $i>(ReduceOp::MinLoc, |a, b| b < a)
            }
        }
        impl Operator<Loc<$v, $i>> for MaxLoc {
            fn reducer(&self) -> Reducer {
                loc_reducer::<$v, $i>(ReduceOp::MaxLoc, |a, b| b > a)
            }
        }
    )*};
}

loc_ops! {
    f32, u32;
    i32, u32;
    f64, u64;
    i64, u64;
}

fn loc_reducer<V, I>(code: ReduceOp, better: fn(V, V) -> bool) -> Reducer
where
    V: Element + PartialOrd,
    I: Element + Ord,
    Loc<V, I>: Pod,
{
    let fold = move |acc: &mut [Loc<V, I>], x: &[Loc<V, I>]| {
        for (a, b) in acc.iter_mut().zip(x) {
            // A NaN wins over every number, so that it is not lost.
            let (nan_a, nan_b) = (is_nan(a.value), is_nan(b.value));
            let equal = (nan_a && nan_b) || a.value == b.value;
            let b_wins = if equal { b.index < a.index } else { !nan_a && (nan_b || better(a.value, b.value)) };
            if b_wins {
                *a = *b;
            }
        }
    };
    Reducer::from_fold(
        code,
        true,
        Arc::new(TypedFold { fold, _t: PhantomData::<fn(Loc<V, I>)> }),
        size_of::<Loc<V, I>>(),
    )
}

#[allow(clippy::eq_op)]
fn is_nan<V: PartialOrd>(v: V) -> bool {
    v != v
}

/// An operator made from a function, see [`custom`].
pub struct Custom<T, F> {
    fold: Arc<TypedFold<T, F>>,
    commutative: bool,
}

impl<T, F> Clone for Custom<T, F> {
    fn clone(&self) -> Self {
        Self { fold: Arc::clone(&self.fold), commutative: self.commutative }
    }
}

impl<T, F> fmt::Debug for Custom<T, F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Custom").field("commutative", &self.commutative).finish_non_exhaustive()
    }
}

/// Makes an operator from a function on host memory: `f(acc, x)` folds `x` into `acc` element by element.
///
/// `f` must be associative. With `commutative == false` contributions are folded in rank order.
/// The function is called with slices of equal length, any length, from whichever thread drives
/// progress; it must not call a communicator (such
/// calls are refused; `abort` makes the operation fail once the function returns).
///
/// Counterpart: `MPI_Op_create`. CPU backends only.
pub fn custom<T, F>(f: F, commutative: bool) -> Custom<T, F>
where
    T: Pod,
    F: Fn(&mut [T], &[T]) + Send + Sync + 'static,
{
    Custom { fold: Arc::new(TypedFold { fold: f, _t: PhantomData }), commutative }
}

impl<T, F> Operator<T> for Custom<T, F>
where
    T: Pod,
    F: Fn(&mut [T], &[T]) + Send + Sync + 'static,
{
    fn reducer(&self) -> Reducer {
        let fold = Arc::clone(&self.fold);
        Reducer::from_fold(ReduceOp::Custom, self.commutative, fold, size_of::<T>().max(1)).with_dtype(T::DTYPE)
    }
}

struct TypedFold<T, F> {
    fold: F,
    _t: PhantomData<fn(T)>,
}

/// Runs `f` on `T`s that are stored in bytes of any alignment.
fn with_values<T: Pod>(bytes: &mut [u8], f: impl FnOnce(&mut [T])) {
    let n = bytes.len() / size_of::<T>().max(1);
    if bytes.as_ptr().cast::<T>().is_aligned() {
        // SAFETY: aligned (just checked), `n * size_of::<T>()` bytes long, exclusively borrowed, and `Pod`
        // promises that every bit pattern is a valid `T`.
        f(unsafe { std::slice::from_raw_parts_mut(bytes.as_mut_ptr().cast::<T>(), n) });
        return;
    }
    let mut copy: Vec<T> = Vec::with_capacity(n);
    // SAFETY: the copy has room for `n` values; source bytes are initialised; `Pod` makes them valid; the
    // two allocations do not overlap. Afterwards the values are written back to the same bytes.
    unsafe {
        std::ptr::copy_nonoverlapping(bytes.as_ptr(), copy.as_mut_ptr().cast::<u8>(), n * size_of::<T>());
        copy.set_len(n);
        f(&mut copy);
        std::ptr::copy_nonoverlapping(copy.as_ptr().cast::<u8>(), bytes.as_mut_ptr(), n * size_of::<T>());
    }
}

impl<T, F> CustomFold for TypedFold<T, F>
where
    T: Pod,
    F: Fn(&mut [T], &[T]) + Send + Sync + 'static,
{
    fn fold(&self, acc: &mut [u8], x: &mut [u8]) {
        if T::DTYPE == DType::Bool {
            // What a peer sent may be no `bool`s, and the function gets references to them.
            normalize_bools(acc);
            normalize_bools(x);
        }
        with_values::<T>(acc, |a| with_values::<T>(x, |b| (self.fold)(a, b)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn table_and_kernels_cover_the_same_pairs() {
        for op in ReduceOp::ALL {
            assert_eq!(ReduceOp::from_code(op as u8), Some(op));
            assert_eq!(ReduceOp::from_name(op.name()), Some(op));
            for d in DType::ALL {
                assert_eq!(Reducer::builtin(op, d).is_ok(), op.is_legal(d), "{op} on {d}");
            }
        }
        assert!(!ReduceOp::BAnd.is_legal(DType::F32));
        assert!(!ReduceOp::Sum.is_legal(DType::Bool));
    }

    #[test]
    fn min_and_max_loc_take_the_smallest_index_of_equals() {
        let r = Operator::<Loc<f32, u32>>::reducer(&MaxLoc);
        let mut a = [Loc { value: 1.0f32, index: 3u32 }, Loc { value: 2.0, index: 5 }];
        let b = [Loc { value: 1.0f32, index: 1u32 }, Loc { value: f32::NAN, index: 9 }];
        let bytes = |x: &[Loc<f32, u32>]| -> Vec<u8> {
            x.iter().flat_map(|l| [l.value.to_ne_bytes(), l.index.to_ne_bytes()].concat()).collect()
        };
        let mut acc = bytes(&a);
        r.fold(&mut acc, &mut bytes(&b));
        a[0].index = 1;
        assert_eq!(acc[..8], bytes(&a)[..8]);
        assert!(f32::from_ne_bytes(acc[8..12].try_into().unwrap()).is_nan());
    }

    #[test]
    fn custom_folds_unaligned_memory() {
        let op = custom(|a: &mut [u32], b: &[u32]| a.iter_mut().zip(b).for_each(|(a, b)| *a ^= b), true);
        let r = Operator::<u32>::reducer(&op);
        let mut mem = [0u8; 17];
        mem[1..5].copy_from_slice(&7u32.to_ne_bytes());
        let mut x = 5u32.to_ne_bytes();
        r.fold(&mut mem[1..5], &mut x);
        assert_eq!(u32::from_ne_bytes(mem[1..5].try_into().unwrap()), 2);
    }
}
