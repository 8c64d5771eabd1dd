//! Operators of the suite: which there are, and how the typed API makes them.

use comm_core::op::{self, Loc, Operator};
use comm_core::{DType, E4M3, E5M2, Pod, ReduceOp, Reducer, bf16, f16};

use crate::kind::{Affine, Kind, Rgb};

/// An operator as the suite names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Oper {
    /// One that has a code.
    Builtin(ReduceOp),
    /// A sum of contributions that each rank scales by its own factor.
    PreMulSum,
    /// The smallest value and where it is.
    MinLoc,
    /// The largest value and where it is.
    MaxLoc,
    /// A user's function that commutes.
    Commuting,
    /// A user's function that does not commute.
    Ordered,
}

impl Oper {
    /// The code by which backends know it.
    pub(crate) const fn code(self) -> ReduceOp {
        match self {
            Self::Builtin(op) => op,
            Self::PreMulSum => ReduceOp::PreMulSum,
            Self::MinLoc => ReduceOp::MinLoc,
            Self::MaxLoc => ReduceOp::MaxLoc,
            Self::Commuting | Self::Ordered => ReduceOp::Custom,
        }
    }

    /// The name in reports.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Commuting => "custom (commutes)",
            Self::Ordered => "custom (ordered)",
            _ => self.code().name(),
        }
    }
}

/// Every legal pair of type and operator: those of the library's table, and those that exist as types only.
pub(crate) fn legal() -> Vec<(Kind, Oper)> {
    let mut all = Vec::new();
    for op in ReduceOp::ALL {
        all.extend(Kind::dtypes().filter(|(_, d)| op.is_legal(*d)).map(|(k, _)| (k, Oper::Builtin(op))));
    }
    all.extend([Kind::F16, Kind::Bf16, Kind::F32, Kind::F64].map(|k| (k, Oper::PreMulSum)));
    for k in [Kind::LocF32, Kind::LocI32, Kind::LocF64, Kind::LocI64] {
        all.extend([(k, Oper::MinLoc), (k, Oper::MaxLoc)]);
    }
    all.extend([Kind::Bool, Kind::I64, Kind::Rgb].map(|k| (k, Oper::Commuting)));
    all.extend([Kind::U8, Kind::Affine].map(|k| (k, Oper::Ordered)));
    all
}

/// The factor of a rank's contribution to a [`Oper::PreMulSum`].
pub(crate) fn factor(rank: usize) -> f64 {
    if rank.is_multiple_of(2) { 2.0 } else { 1.0 }
}

/// An operator of any type's: what the typed API made of one, passed on.
///
/// So the calls need not be compiled once per operator; backends see no difference.
#[derive(Clone, Debug)]
pub(crate) struct Erased(pub(crate) Reducer);

impl<T: Pod> Operator<T> for Erased {
    fn reducer(&self) -> Reducer {
        self.0.clone()
    }
}

/// Makes a builtin operator through its type.
macro_rules! builtin {
    ($kind:expr, $op:ident: $($k:ident/$t:ident)*) => {
        match $kind {
            $(Kind::$k => Some(Operator::<$t>::reducer(&op::$op)),)*
            _ => None,
        }
    };
}

fn typed(kind: Kind, op: ReduceOp) -> Option<Reducer> {
    macro_rules! numbers {
        ($op:ident) => {
            builtin!(kind, $op: I8/i8 U8/u8 I16/i16 U16/u16 I32/i32 U32/u32 I64/i64 U64/u64 F16/f16 Bf16/bf16 F32/f32
                F64/f64 E4M3/E4M3 E5M2/E5M2)
        };
    }
    macro_rules! ordered {
        ($op:ident) => {
            builtin!(kind, $op: Bool/bool I8/i8 U8/u8 I16/i16 U16/u16 I32/i32 U32/u32 I64/i64 U64/u64 F16/f16
                Bf16/bf16 F32/f32 F64/f64 E4M3/E4M3 E5M2/E5M2)
        };
    }
    macro_rules! bitwise {
        ($op:ident) => {
            builtin!(kind, $op: Bool/bool I8/i8 U8/u8 I16/i16 U16/u16 I32/i32 U32/u32 I64/i64 U64/u64)
        };
    }
    match op {
        ReduceOp::Sum => numbers!(Sum),
        ReduceOp::Prod => numbers!(Prod),
        ReduceOp::Avg => numbers!(Avg),
        ReduceOp::Min => ordered!(Min),
        ReduceOp::Max => ordered!(Max),
        ReduceOp::BAnd => bitwise!(BAnd),
        ReduceOp::BOr => bitwise!(BOr),
        ReduceOp::BXor => bitwise!(BXor),
        _ => None,
    }
}

fn each<T: Copy>(f: impl Fn(T, T) -> T) -> impl Fn(&mut [T], &[T]) {
    move |acc, x| acc.iter_mut().zip(x).for_each(|(a, b)| *a = f(*a, *b))
}

/// The operator as the typed API makes it on a rank; `None` for a pair that is not legal.
pub(crate) fn reducer(kind: Kind, oper: Oper, rank: usize) -> Option<Reducer> {
    let scale = factor(rank);
    Some(match (oper, kind) {
        (Oper::Builtin(op), _) => return typed(kind, op),
        (Oper::PreMulSum, Kind::F16) => op::PreMulSum(f16::from_f64(scale)).reducer(),
        (Oper::PreMulSum, Kind::Bf16) => op::PreMulSum(bf16::from_f64(scale)).reducer(),
        (Oper::PreMulSum, Kind::F32) => op::PreMulSum(if scale > 1.0 { 2.0f32 } else { 1.0 }).reducer(),
        (Oper::PreMulSum, Kind::F64) => op::PreMulSum(scale).reducer(),
        (Oper::MinLoc, Kind::LocF32) => Operator::<Loc<f32, u32>>::reducer(&op::MinLoc),
        (Oper::MinLoc, Kind::LocI32) => Operator::<Loc<i32, u32>>::reducer(&op::MinLoc),
        (Oper::MinLoc, Kind::LocF64) => Operator::<Loc<f64, u64>>::reducer(&op::MinLoc),
        (Oper::MinLoc, Kind::LocI64) => Operator::<Loc<i64, u64>>::reducer(&op::MinLoc),
        (Oper::MaxLoc, Kind::LocF32) => Operator::<Loc<f32, u32>>::reducer(&op::MaxLoc),
        (Oper::MaxLoc, Kind::LocI32) => Operator::<Loc<i32, u32>>::reducer(&op::MaxLoc),
        (Oper::MaxLoc, Kind::LocF64) => Operator::<Loc<f64, u64>>::reducer(&op::MaxLoc),
        (Oper::MaxLoc, Kind::LocI64) => Operator::<Loc<i64, u64>>::reducer(&op::MaxLoc),
        (Oper::Commuting, Kind::Bool) => op::custom(each(|a: bool, b| a != b), true).reducer(),
        (Oper::Commuting, Kind::I64) => op::custom(each(i64::wrapping_add), true).reducer(),
        (Oper::Commuting, Kind::Rgb) => {
            op::custom(each(|a: Rgb, b: Rgb| Rgb(std::array::from_fn(|i| a.0[i].wrapping_add(b.0[i])))), true).reducer()
        }
        (Oper::Ordered, Kind::U8) => op::custom(each(|a: u8, b| if a == 0 { b } else { a }), false).reducer(),
        (Oper::Ordered, Kind::Affine) => op::custom(each(Affine::then), false).reducer(),
        _ => return None,
    })
}

impl Affine {
    /// First this function, then `next`.
    fn then(self, next: Self) -> Self {
        Self { a: self.a.wrapping_mul(next.a), b: self.b.wrapping_mul(next.a).wrapping_add(next.b) }
    }
}

/// Whether the `_dyn` calls take this operator on this type.
pub(crate) fn is_dynamic(kind: Kind, oper: Option<Oper>) -> Option<(DType, Option<ReduceOp>)> {
    let dtype = kind.own()?;
    match oper {
        None => Some((dtype, None)),
        Some(Oper::Builtin(op)) => Some((dtype, Some(op))),
        Some(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_legal_pair_can_be_made_and_no_other_builtin() {
        let legal = legal();
        assert_eq!(legal.len(), 3 * 14 + 2 * 15 + 3 * 9 + 4 + 8 + 5);
        for (kind, oper) in &legal {
            let r = reducer(*kind, *oper, 0).unwrap();
            assert_eq!((r.op(), r.dtype()), (oper.code(), kind.dtype()), "{kind:?} {oper:?}");
        }
        for op in ReduceOp::ALL {
            for (kind, dtype) in Kind::dtypes() {
                assert_eq!(reducer(kind, Oper::Builtin(op), 0).is_some(), op.is_legal(dtype), "{op} on {dtype}");
            }
        }
    }
}
