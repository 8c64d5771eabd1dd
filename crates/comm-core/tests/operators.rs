//! Every built-in operator on every type it is legal on, against plain arithmetic in wide types.

use comm_core::{DType, E4M3, E5M2, Operator, ReduceOp, Reducer, op};
use half::{bf16, f16};
use proptest::prelude::*;

const OPS: [ReduceOp; 8] = [
    ReduceOp::Sum,
    ReduceOp::Prod,
    ReduceOp::Min,
    ReduceOp::Max,
    ReduceOp::Avg,
    ReduceOp::BAnd,
    ReduceOp::BOr,
    ReduceOp::BXor,
];

/// How one element is read and written.
fn load_int(d: DType, b: &[u8]) -> i128 {
    macro_rules! as_int {
        ($t:ty) => {
            i128::from(<$t>::from_ne_bytes(b.try_into().unwrap()))
        };
    }
    match d {
        DType::Bool => i128::from(b[0] != 0),
        DType::I8 => as_int!(i8),
        DType::U8 => as_int!(u8),
        DType::I16 => as_int!(i16),
        DType::U16 => as_int!(u16),
        DType::I32 => as_int!(i32),
        DType::U32 => as_int!(u32),
        DType::I64 => as_int!(i64),
        DType::U64 => as_int!(u64),
        other => panic!("{other} is no integer"),
    }
}

/// The value of the low bits of `x`, as the type sees them.
fn wrap(d: DType, x: i128) -> i128 {
    let bits = 8 * d.size() as u32;
    let low = x & ((1i128 << bits) - 1);
    let signed = matches!(d, DType::I8 | DType::I16 | DType::I32 | DType::I64);
    if signed && low >> (bits - 1) == 1 { low - (1i128 << bits) } else { low }
}

fn int_oracle(op: ReduceOp, d: DType, a: i128, b: i128) -> i128 {
    let x = match op {
        ReduceOp::Sum | ReduceOp::Avg => a + b,
        // The low 64 bits of the product; the factors are 64 bits, so nothing below them is lost.
        ReduceOp::Prod => a.wrapping_mul(b),
        ReduceOp::Min => a.min(b),
        ReduceOp::Max => a.max(b),
        ReduceOp::BAnd => a & b,
        ReduceOp::BOr => a | b,
        ReduceOp::BXor => a ^ b,
        other => panic!("{other}"),
    };
    wrap(d, x)
}

/// The element as a wide float. Exact.
fn load_float(d: DType, b: &[u8]) -> f64 {
    match d {
        DType::F16 => f16::from_ne_bytes(b.try_into().unwrap()).to_f64(),
        DType::Bf16 => bf16::from_ne_bytes(b.try_into().unwrap()).to_f64(),
        DType::F32 => f64::from(f32::from_ne_bytes(b.try_into().unwrap())),
        DType::F64 => f64::from_ne_bytes(b.try_into().unwrap()),
        DType::E4M3 => f64::from(E4M3(b[0]).to_f32()),
        DType::E5M2 => f64::from(E5M2(b[0]).to_f32()),
        other => panic!("{other} is no float"),
    }
}

/// Rounds as the type does: narrow types via `f32`, as documented.
fn store_float(d: DType, x: f64) -> f64 {
    let narrow = x as f32;
    match d {
        DType::F16 => f16::from_f32(narrow).to_f64(),
        DType::Bf16 => bf16::from_f32(narrow).to_f64(),
        DType::F32 => f64::from(narrow),
        DType::F64 => x,
        DType::E4M3 => f64::from(E4M3::from_f32(narrow).to_f32()),
        DType::E5M2 => f64::from(E5M2::from_f32(narrow).to_f32()),
        other => panic!("{other} is no float"),
    }
}

fn float_oracle(op: ReduceOp, d: DType, a: f64, b: f64) -> f64 {
    let x = match op {
        ReduceOp::Sum | ReduceOp::Avg => a + b,
        ReduceOp::Prod => a * b,
        ReduceOp::Min | ReduceOp::Max if a.is_nan() || b.is_nan() => return f64::NAN,
        // One of the operands, unrounded: infinities too.
        ReduceOp::Min => return a.min(b),
        ReduceOp::Max => return a.max(b),
        other => panic!("{other}"),
    };
    store_float(d, x)
}

fn same(a: f64, b: f64) -> bool {
    // The sign of a zero is not the oracle's business: `f64::min` leaves it open.
    a == b || (a.is_nan() && b.is_nan())
}

fn check(op: ReduceOp, d: DType, a: &[u8], b: &[u8], ranks: usize) -> Result<(), TestCaseError> {
    let r = Reducer::builtin(op, d).unwrap();
    let n = a.len() / d.size() * d.size();
    let (a, b) = (&a[..n], &b[..n]);
    let mut acc = a.to_vec();
    r.fold(&mut acc, &mut b.to_vec());
    let mut rev = b.to_vec();
    r.fold_rev(&mut rev, &mut a.to_vec());
    prop_assert_eq!(&acc, &rev, "{} on {}: fold_rev with swapped operands", op, d);
    let mut fin = acc.clone();
    r.finish(&mut fin, ranks);
    prop_assert_eq!(r.needs_finish(ranks), op == ReduceOp::Avg && ranks > 1);
    for (i, _) in a.chunks(d.size()).enumerate() {
        let at = i * d.size()..(i + 1) * d.size();
        let (x, y, got, end) = (&a[at.clone()], &b[at.clone()], &acc[at.clone()], &fin[at]);
        if d.is_float() {
            let want = float_oracle(op, d, load_float(d, x), load_float(d, y));
            if matches!(op, ReduceOp::Min | ReduceOp::Max) {
                prop_assert!(got == x || got == y, "{} on {}: {:?} is neither {:?} nor {:?}", op, d, got, x, y);
            }
            let got = load_float(d, got);
            prop_assert!(same(got, want), "{} on {}: {:?} {:?} gave {} not {}", op, d, x, y, got, want);
            let want = if op == ReduceOp::Avg && ranks > 1 { store_float(d, got / ranks as f64) } else { got };
            let end = load_float(d, end);
            prop_assert!(same(end, want), "{} on {} / {}: {} not {}", op, d, ranks, end, want);
        } else {
            let want = int_oracle(op, d, load_int(d, x), load_int(d, y));
            prop_assert_eq!(load_int(d, got), want, "{} on {}: {:?} {:?}", op, d, x, y);
            let want = if op == ReduceOp::Avg { want / ranks as i128 } else { want };
            prop_assert_eq!(load_int(d, end), want, "{} on {} / {}", op, d, ranks);
            if d == DType::Bool {
                prop_assert!(got[0] <= 1);
            }
        }
    }
    Ok(())
}

proptest! {
    #[test]
    fn kernels_agree_with_plain_arithmetic(
        a in prop::collection::vec(any::<u8>(), 64),
        b in prop::collection::vec(any::<u8>(), 64),
        ranks in 1usize..1000,
    ) {
        for op in OPS {
            for d in DType::ALL.into_iter().filter(|d| op.is_legal(*d)) {
                check(op, d, &a, &b, ranks)?;
            }
        }
    }

    #[test]
    fn premul_is_a_rounded_product(x in any::<f32>(), y in -1e3f64..1e3, factor in -8i8..8) {
        let f = f32::from(factor) / 4.0;
        let r = op::PreMulSum(f).reducer();
        let mut b = x.to_ne_bytes();
        r.prescale(&mut b);
        prop_assert!(same(f64::from(f32::from_ne_bytes(b)), f64::from(x * f)));
        let r = op::PreMulSum(f16::from_f32(f)).reducer();
        let h = f16::from_f64(y);
        let mut b = h.to_ne_bytes();
        r.prescale(&mut b);
        prop_assert_eq!(f16::from_ne_bytes(b), f16::from_f32(h.to_f32() * f));
        prop_assert!(r.needs_prescale() && r.op() == ReduceOp::PreMulSum);
    }
}

#[test]
fn every_pair_of_small_floats() {
    // All codes of the 8-bit types, infinities and NaNs included.
    let all: Vec<u8> = (0..=255).collect();
    for d in [DType::E4M3, DType::E5M2, DType::I8, DType::U8] {
        for shift in 0..=255u8 {
            let b: Vec<u8> = all.iter().map(|x| x.wrapping_add(shift)).collect();
            for op in OPS.into_iter().filter(|o| o.is_legal(d)) {
                check(op, d, &all, &b, 3).unwrap();
            }
        }
    }
}

#[test]
fn the_ends_of_the_integers() {
    macro_rules! ends {
        ($($t:ty),*) => {$(
            let avg = Operator::<$t>::reducer(&op::Avg);
            for x in [<$t>::MIN, <$t>::MAX, 0, 1] {
                let mut b = x.to_ne_bytes();
                // More ranks than the type can count.
                avg.finish(&mut b, 100_000);
                let want = (i128::from(x) / 100_000) as $t;
                assert_eq!(<$t>::from_ne_bytes(b), want);
                let mut b = x.to_ne_bytes();
                avg.finish(&mut b, 1);
                assert_eq!(<$t>::from_ne_bytes(b), x);
            }
        )*};
    }
    ends!(i8, u8, i16, u16, i32, u32, i64, u64);
}

#[test]
fn locations_are_found_whatever_the_order() {
    let loc = |value: i64, index: u64| op::Loc { value, index };
    let all = [loc(3, 9), loc(-5, 2), loc(3, 4), loc(-5, 1), loc(0, 0)];
    let bytes = |l: op::Loc<i64, u64>| [l.value.to_ne_bytes(), l.index.to_ne_bytes()].concat();
    for start in 0..all.len() {
        for (r, want) in [
            (Operator::<op::Loc<i64, u64>>::reducer(&op::MinLoc), loc(-5, 1)),
            (Operator::<op::Loc<i64, u64>>::reducer(&op::MaxLoc), loc(3, 4)),
        ] {
            assert_eq!(r.unit(), 16);
            let mut acc = bytes(all[start]);
            for k in 1..all.len() {
                r.fold(&mut acc, &mut bytes(all[(start + k) % all.len()]));
            }
            assert_eq!(acc, bytes(want));
        }
    }
}

#[test]
fn a_value_without_size_has_a_unit_that_can_be_divided_by() {
    #[derive(Clone, Copy)]
    struct Unit;
    // SAFETY: no bytes at all.
    unsafe impl comm_core::Pod for Unit {}
    let op = op::custom(|_: &mut [Unit], _: &[Unit]| {}, true);
    let r = Operator::<Unit>::reducer(&op);
    assert_eq!(r.unit(), 1);
    r.fold(&mut [], &mut []);
}
