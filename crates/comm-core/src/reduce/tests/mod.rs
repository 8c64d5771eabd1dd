//! The operators' meaning, by example; `bits` compares every kernel with an independent computation.

mod bits;
mod oracle;

use super::lanes::{Bf, Narrow};
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
