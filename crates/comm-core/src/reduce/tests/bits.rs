//! Every kernel that this processor can run, against the oracle, bit by bit.

use half::{bf16, f16};

use super::super::kernels::{divide, kernel, scale};
use super::super::lanes::{Bf, E4, E5, Hf, Lane, Narrow};
use super::super::simd::{Level, simd_level};
use super::oracle::{combined, divided, is_nan, scaled};
use crate::dtype::{DType, E4M3, E5M2};
use crate::op::ReduceOp;

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

fn legal(d: DType) -> impl Iterator<Item = ReduceOp> {
    OPS.into_iter().filter(move |op| op.is_legal(d))
}

fn pack(d: DType, xs: &[u64]) -> Vec<u8> {
    xs.iter().flat_map(|x| x.to_le_bytes().into_iter().take(d.size())).collect()
}

fn unpack(d: DType, bytes: &[u8]) -> Vec<u64> {
    let one = |c: &[u8]| c.iter().rev().fold(0, |n, b| n << 8 | u64::from(*b));
    bytes.chunks_exact(d.size()).map(one).collect()
}

/// Elements as this machine stores them.
fn native(d: DType, mut bytes: Vec<u8>) -> Vec<u8> {
    if cfg!(target_endian = "big") {
        bytes.chunks_exact_mut(d.size()).for_each(<[u8]>::reverse);
    }
    bytes
}

/// All levels give what the oracle does.
fn check(op: ReduceOp, d: DType, us: &[u64], vs: &[u64]) {
    let want: Vec<u64> = us.iter().zip(vs).map(|(&u, &v)| combined(op, d, u, v)).collect();
    let x = native(d, pack(d, vs));
    for level in Level::all() {
        let mut acc = native(d, pack(d, us));
        kernel(op, d, level).run(&mut acc, &x);
        let got = unpack(d, &native(d, acc));
        if got != want {
            let i = (0..want.len()).find(|&i| got[i] != want[i]).unwrap();
            panic!("{op} of {d}, {}: {:#x}, {:#x} give {:#x}, not {:#x}", level.name(), us[i], vs[i], got[i], want[i]);
        }
    }
}

/// A small generator, so that a failure repeats.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Random bits, and in one of four cases a value at an edge.
    fn element(&mut self, d: DType, edges: &[u64]) -> u64 {
        let r = self.next();
        if r & 3 == 0 { edges[(r >> 2) as usize % edges.len()] } else { r >> (64 - 8 * d.size()) }
    }
}

/// Zeros, denormals, ends of the range, infinities and NaNs of both signs, with what lies beside them.
fn edges(d: DType) -> Vec<u64> {
    let sign = 1u64 << (8 * d.size() - 1);
    let man = match d {
        DType::F64 => 52,
        DType::F32 => 23,
        DType::F16 => 10,
        DType::Bf16 => 7,
        DType::E4M3 => 3,
        DType::E5M2 => 2,
        _ => return vec![0, 1, 2, sign - 1, sign, sign | (sign - 1), sign | (sign - 2), sign + 1],
    };
    let inf = (sign - 1) >> man << man;
    let quiet = 1u64 << (man - 1);
    let one = (sign - 1) >> (man + 1) << man;
    let mags = [
        0,
        1,
        2,
        quiet,
        (1 << man) - 1,
        1 << man,
        (1 << man) + 1,
        one,
        one + 1,
        one - 1,
        inf - 1,
        inf - 2,
        inf,
        inf + 1,
        inf | quiet,
        inf | quiet | 1,
        sign - 1,
    ];
    mags.iter().flat_map(|&m| [m, m | sign]).collect()
}

#[test]
fn eight_bit_types_on_all_pairs() {
    let us: Vec<u64> = (0..1u64 << 16).map(|i| i >> 8).collect();
    let vs: Vec<u64> = (0..1u64 << 16).map(|i| i & 0xff).collect();
    for d in [DType::Bool, DType::I8, DType::U8, DType::E4M3, DType::E5M2] {
        for op in legal(d) {
            check(op, d, &us, &vs);
        }
    }
}

/// A NaN sends its whole block another way; here there is none.
#[test]
fn eight_bit_floats_on_all_finite_pairs() {
    for (d, top) in [(DType::E4M3, 0x7e), (DType::E5M2, 0x7b)] {
        let finite: Vec<u64> = (0..256).filter(|b| b & 0x7f <= top).collect();
        let us: Vec<u64> = finite.iter().flat_map(|&u| vec![u; finite.len()]).collect();
        let vs: Vec<u64> = finite.iter().flat_map(|_| finite.clone()).collect();
        check(ReduceOp::Sum, d, &us, &vs);
        check(ReduceOp::Prod, d, &us, &vs);
    }
}

#[test]
fn sixteen_bit_floats_on_all_values_against_edges_and_random_ones() {
    let mut random = Random(1);
    let all: Vec<u64> = (0..1u64 << 16).collect();
    for d in [DType::F16, DType::Bf16] {
        let others = edges(d).into_iter().chain((0..2).map(|_| random.next() & 0xffff)).collect::<Vec<_>>();
        for op in [ReduceOp::Sum, ReduceOp::Prod, ReduceOp::Min, ReduceOp::Max] {
            for &v in &others {
                let vs = vec![v; all.len()];
                check(op, d, &all, &vs);
                check(op, d, &vs, &all);
            }
        }
    }
}

#[test]
fn random_pairs_of_every_type() {
    let mut random = Random(2);
    for d in DType::ALL.into_iter().filter(|d| d.size() > 1) {
        let (edges, n) = (edges(d), if d.size() == 2 && d.is_float() { 1 << 20 } else { 1 << 16 });
        let us: Vec<u64> = (0..n).map(|_| random.element(d, &edges)).collect();
        let vs: Vec<u64> = (0..n).map(|_| random.element(d, &edges)).collect();
        for op in legal(d) {
            check(op, d, &us, &vs);
        }
    }
}

/// Where a NaN sends a block another way, this is the way without.
#[test]
fn random_pairs_of_floats_without_nan() {
    let mut random = Random(6);
    for d in DType::ALL.into_iter().filter(|d| d.is_float()) {
        let edges = edges(d);
        for op in legal(d) {
            let pairs: Vec<(u64, u64)> = (0..1 << 16)
                .map(|_| (random.element(d, &edges), random.element(d, &edges)))
                .filter(|&(u, v)| !is_nan(d, u) && !is_nan(d, v) && !is_nan(d, combined(op, d, u, v)))
                .collect();
            let (us, vs): (Vec<u64>, Vec<u64>) = pairs.into_iter().unzip();
            check(op, d, &us, &vs);
        }
    }
}

/// Sums around the denormals, where one instruction flushes and its replacement must take over.
#[test]
fn bf16_around_the_least_normal() {
    let mut random = Random(3);
    let mut small = || (0..1 << 16).map(|_| random.next() & 0x81ff).collect::<Vec<_>>();
    let (us, vs) = (small(), small());
    check(ReduceOp::Sum, DType::Bf16, &us, &vs);
    // Products that are denormal.
    let low: Vec<u64> = us.iter().map(|u| 0x2000 + (u & 0x8fff)).collect();
    let high: Vec<u64> = vs.iter().map(|v| 0x1f80 + (v & 0x81ff)).collect();
    check(ReduceOp::Prod, DType::Bf16, &low, &high);
}

#[test]
fn every_length_and_alignment_touches_its_bytes_alone() {
    let mut random = Random(4);
    for d in DType::ALL {
        let edges = edges(d);
        for op in legal(d) {
            for n in 0..=130 {
                let us: Vec<u64> = (0..n).map(|_| random.element(d, &edges)).collect();
                let vs: Vec<u64> = (0..n).map(|_| random.element(d, &edges)).collect();
                let want: Vec<u64> = us.iter().zip(&vs).map(|(&u, &v)| combined(op, d, u, v)).collect();
                let want = native(d, pack(d, &want));
                for (level, (i, j)) in Level::all().into_iter().flat_map(|l| [(0, 0), (1, 6), (7, 3)].map(|o| (l, o))) {
                    let mut acc = vec![0xa5; i + want.len() + 9];
                    acc[i..i + want.len()].copy_from_slice(&native(d, pack(d, &us)));
                    let x = [vec![0x5a; j], native(d, pack(d, &vs))].concat();
                    kernel(op, d, level).run(&mut acc[i..i + want.len()], &x[j..]);
                    assert_eq!(acc[i..i + want.len()], want[..], "{op} of {n} {d}, {}", level.name());
                    assert!(acc[..i].iter().chain(&acc[i + want.len()..]).all(|&b| b == 0xa5), "{op} {d} {n}");
                }
            }
        }
    }
}

#[test]
fn scaling_and_dividing() {
    let mut random = Random(5);
    for d in DType::ALL.into_iter().filter(|&d| d != DType::Bool) {
        let edges = edges(d);
        let n = 1 << 13;
        let us: Vec<u64> = (0..n).map(|i| if i < 256 { i } else { random.element(d, &edges) } & mask(d)).collect();
        for level in Level::all() {
            for ranks in [2, 3, 7, 128, 300, 70_000] {
                let mut buf = native(d, pack(d, &us));
                divide(d, &mut buf, ranks, level);
                let want: Vec<u64> = us.iter().map(|&u| divided(d, u, ranks)).collect();
                assert_eq!(unpack(d, &native(d, buf)), want, "{d} / {ranks}, {}", level.name());
            }
            if ReduceOp::PreMulSum.is_legal(d) || matches!(d, DType::F16 | DType::Bf16 | DType::F32 | DType::F64) {
                for factor in [0.0, -0.3, 1e30, f64::INFINITY] {
                    let mut buf = native(d, pack(d, &us));
                    scale(d, &mut buf, factor, level);
                    let want: Vec<u64> = us.iter().map(|&u| scaled(d, u, factor)).collect();
                    assert_eq!(unpack(d, &native(d, buf)), want, "{d} · {factor}, {}", level.name());
                }
            }
        }
    }
}

fn mask(d: DType) -> u64 {
    u64::MAX >> (64 - 8 * d.size())
}

#[test]
fn conversions_equal_the_public_ones() {
    let (e4, e5) = (|b: u8| E4::load(&[b]), |b: u8| E5::load(&[b]));
    for b in 0..=u8::MAX {
        assert_eq!(e4(b).wide().to_bits(), E4M3(b).to_f32().to_bits(), "{b:#x}");
        assert_eq!(e5(b).wide().to_bits(), E5M2(b).to_f32().to_bits(), "{b:#x}");
        assert_eq!(e4(b).nan(), is_nan(DType::E4M3, b.into()));
    }
    for b in 0..=u16::MAX {
        assert_eq!(Hf(b).wide().to_bits(), f16::from_bits(b).to_f32_const().to_bits(), "{b:#x}");
    }
    // Each upper half with lower halves at and beside the ties of each rounding.
    let lows = [0u32, 1, 0x7fff, 0x8000, 0x8001, 0xffff, 0x0fff, 0x1000, 0x1001, 0x3000, 0xf000, 0xefff, 0x5a5a];
    for x in (0..=u32::from(u16::MAX)).flat_map(|h| lows.map(|l| f32::from_bits(h << 16 | l))) {
        assert_eq!(E4::round(x).0, E4M3::from_f32(x).0, "{x:e}");
        assert_eq!(E5::round(x).0, E5M2::from_f32(x).0, "{x:e}");
        assert_eq!(Hf::round(x).0, f16::from_f32_const(x).to_bits(), "{x:e}");
        assert_eq!(Bf::round(x).0, bf16::from_f32(x).to_bits(), "{x:e}");
    }
}

#[test]
fn a_cap_lowers_the_level_and_never_raises_it() {
    for level in Level::all() {
        assert_eq!(level.capped("portable"), Some(Level::PORTABLE));
        assert_eq!(level.capped("avx512"), Some(level));
        assert_eq!(level.capped("AVX2"), None);
        assert_eq!(level.capped(level.name()), Some(level));
    }
}

/// The child is this test again, with the variable set.
#[test]
fn the_environment_caps_the_level() {
    const CHILD: &str = "RUSTCOMMS_TEST_SIMD_CHILD";
    if std::env::var_os(CHILD).is_some() {
        println!("level={}", simd_level());
        return;
    }
    let best = Level::detected().name();
    for (asked, want) in [("portable", "portable"), ("no such level", best), ("", best), ("avx512", best)] {
        let me = std::env::current_exe().unwrap();
        let out = std::process::Command::new(me)
            .args(["reduce::tests::bits::the_environment_caps_the_level", "--exact", "--nocapture"])
            .env(CHILD, "1")
            .env("RUSTCOMMS_SIMD", asked)
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&out.stdout);
        assert!(text.contains(&format!("level={want}")), "{asked}: {text}");
    }
}
