//! x86-64. Sums and products of floats, by hand, and the portable loops compiled for AVX2.
//!
//! Additions and multiplications are assembly: the intrinsics are the compiler's own addition, whose operands it may swap, and of
//! two NaNs the instruction returns the first. In assembly the order stands, and with it the rule of
//! [`lanes`](super::super::lanes).

use std::arch::asm;
use std::arch::x86_64::*;

use super::super::kernels::{self, Op, Prod, Sum, zip};
use super::super::lanes::{Bf, E4, E5, Hf, Lane};
use crate::dtype::DType;
use crate::op::ReduceOp;

mod f8;

use f8::{f8_avx2, f8_avx512};

type Fold = unsafe fn(&mut [u8], &[u8]);

/// What AVX2 and F16C have.
pub(super) fn avx2(op: ReduceOp, dtype: DType) -> Option<Fold> {
    let mul = product(op)?;
    Some(match (dtype, mul) {
        (DType::F32, false) => f32_avx2::<Sum, false>,
        (DType::F32, true) => f32_avx2::<Prod, true>,
        (DType::F64, false) => f64_avx2::<Sum, false>,
        (DType::F64, true) => f64_avx2::<Prod, true>,
        (DType::Bf16, false) => bf16_avx2::<Sum, false>,
        (DType::Bf16, true) => bf16_avx2::<Prod, true>,
        (DType::F16, false) => f16_avx2::<Sum, false>,
        (DType::F16, true) => f16_avx2::<Prod, true>,
        (DType::E4M3, false) => f8_avx2::<E4, Sum, false>,
        (DType::E4M3, true) => f8_avx2::<E4, Prod, true>,
        (DType::E5M2, false) => f8_avx2::<E5, Sum, false>,
        (DType::E5M2, true) => f8_avx2::<E5, Prod, true>,
        _ => return None,
    })
}

/// What AVX-512 has that pays over AVX2.
pub(super) fn avx512(op: ReduceOp, dtype: DType) -> Option<Fold> {
    let mul = product(op)?;
    Some(match (dtype, mul) {
        (DType::Bf16, false) => bf16_avx512::<Sum, false>,
        (DType::Bf16, true) => bf16_avx512::<Prod, true>,
        (DType::F16, false) => f16_avx512::<Sum, false>,
        (DType::F16, true) => f16_avx512::<Prod, true>,
        (DType::E4M3, false) => f8_avx512::<E4, Sum, false>,
        (DType::E4M3, true) => f8_avx512::<E4, Prod, true>,
        (DType::E5M2, false) => f8_avx512::<E5, Sum, false>,
        (DType::E5M2, true) => f8_avx512::<E5, Prod, true>,
        _ => return None,
    })
}

/// Whether the operator multiplies; `None` if it neither adds nor multiplies.
fn product(op: ReduceOp) -> Option<bool> {
    match op {
        ReduceOp::Sum | ReduceOp::Avg => Some(false),
        ReduceOp::Prod => Some(true),
        _ => None,
    }
}

/// The portable loop, which the compiler vectorises for AVX2 here.
#[target_feature(enable = "avx2")]
pub(super) fn zip_avx2<T: Lane, O: Op<T>>(acc: &mut [u8], x: &[u8]) {
    zip::<T, O>(acc, x);
}

/// As [`zip_avx2`], for AVX-512.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2")]
pub(super) fn zip_avx512<T: Lane, O: Op<T>>(acc: &mut [u8], x: &[u8]) {
    zip::<T, O>(acc, x);
}

/// The portable loop over one buffer, likewise.
#[target_feature(enable = "avx2")]
pub(super) fn map_avx2<T: Lane>(buf: &mut [u8], f: impl Fn(T) -> T) {
    kernels::map(buf, f);
}

/// Defines a kernel: `$block` on every whole block of `$bytes` bytes, the portable loop on the rest.
macro_rules! kernel {
    ($(#[$doc:meta])* $name:ident, $features:literal, $lane:ty, $bytes:literal, $block:ident) => {
        $(#[$doc])*
        #[target_feature(enable = $features)]
        fn $name<O: Op<$lane>, const MUL: bool>(acc: &mut [u8], x: &[u8]) {
            let n = acc.len().min(x.len());
            let whole = n - n % $bytes;
            let (a, b) = (acc.as_mut_ptr(), x.as_ptr());
            for i in (0..whole).step_by($bytes) {
                // SAFETY: i + $bytes ≤ whole ≤ the length of both slices, and the slices do not overlap.
                unsafe { $block::<MUL>(a.add(i), b.add(i)) };
            }
            zip::<$lane, O>(&mut acc[whole..n], &x[whole..n]);
        }
    };
}

/// An addition, or multiplication, whose operands stay where they are.
macro_rules! ordered {
    ($name:ident, $features:literal, $t:ty, $reg:ident, $add:literal, $mul:literal) => {
        #[inline]
        #[target_feature(enable = $features)]
        fn $name<const MUL: bool>(a: $t, b: $t) -> $t {
            let r: $t;
            // SAFETY: one instruction that reads two registers and writes a third; the features are the function's.
            unsafe {
                if MUL {
                    asm!(concat!($mul, " {r}, {a}, {b}"), r = lateout($reg) r, a = in($reg) a, b = in($reg) b,
                        options(pure, nomem, nostack));
                } else {
                    asm!(concat!($add, " {r}, {a}, {b}"), r = lateout($reg) r, a = in($reg) a, b = in($reg) b,
                        options(pure, nomem, nostack));
                }
            }
            r
        }
    };
}
ordered!(ps, "avx2", __m256, ymm_reg, "vaddps", "vmulps");
ordered!(pd, "avx2", __m256d, ymm_reg, "vaddpd", "vmulpd");
ordered!(ps512, "avx512f", __m512, zmm_reg, "vaddps", "vmulps");

// In what follows: `a` and `b` are valid for the block's bytes, `a` for writing too, and may be unaligned.

kernel!(f32_avx2, "avx2", f32, 128, f32_block);

#[inline]
#[target_feature(enable = "avx2")]
unsafe fn f32_block<const MUL: bool>(a: *mut u8, b: *const u8) {
    for i in 0..4 {
        // SAFETY: the caller's block has 4 · 32 bytes.
        unsafe {
            let (a, b) = (a.cast::<f32>().add(8 * i), b.cast::<f32>().add(8 * i));
            _mm256_storeu_ps(a, ps::<MUL>(_mm256_loadu_ps(a), _mm256_loadu_ps(b)));
        }
    }
}

kernel!(f64_avx2, "avx2", f64, 128, f64_block);

#[inline]
#[target_feature(enable = "avx2")]
unsafe fn f64_block<const MUL: bool>(a: *mut u8, b: *const u8) {
    for i in 0..4 {
        // SAFETY: the caller's block has 4 · 32 bytes.
        unsafe {
            let (a, b) = (a.cast::<f64>().add(4 * i), b.cast::<f64>().add(4 * i));
            _mm256_storeu_pd(a, pd::<MUL>(_mm256_loadu_pd(a), _mm256_loadu_pd(b)));
        }
    }
}

kernel!(f16_avx2, "avx2,f16c", Hf, 32, f16_block);

#[inline]
#[target_feature(enable = "avx2,f16c")]
unsafe fn f16_block<const MUL: bool>(a: *mut u8, b: *const u8) {
    for i in 0..2 {
        // SAFETY: the caller's block has 2 · 16 bytes.
        unsafe {
            let (a, b) = (a.cast::<__m128i>().add(i), b.cast::<__m128i>().add(i));
            let r = ps::<MUL>(_mm256_cvtph_ps(_mm_loadu_si128(a)), _mm256_cvtph_ps(_mm_loadu_si128(b)));
            _mm_storeu_si128(a, _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(r));
        }
    }
}

kernel!(f16_avx512, "avx512f,avx2,f16c", Hf, 64, f16_block512);

#[inline]
#[target_feature(enable = "avx512f,avx2,f16c")]
unsafe fn f16_block512<const MUL: bool>(a: *mut u8, b: *const u8) {
    for i in 0..2 {
        // SAFETY: the caller's block has 2 · 32 bytes.
        unsafe {
            let (a, b) = (a.cast::<__m256i>().add(i), b.cast::<__m256i>().add(i));
            let r = ps512::<MUL>(_mm512_cvtph_ps(_mm256_loadu_si256(a)), _mm512_cvtph_ps(_mm256_loadu_si256(b)));
            _mm256_storeu_si256(a, _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(r));
        }
    }
}

// bf16: a 32-bit lane holds two elements. The upper one is an f32 once the lower is masked away, the lower one once it is
// shifted up; nothing has to be unpacked.

kernel!(bf16_avx2, "avx2", Bf, 32, bf16_block);

#[inline]
#[target_feature(enable = "avx2")]
unsafe fn bf16_block<const MUL: bool>(a: *mut u8, b: *const u8) {
    // SAFETY: the caller's block has 32 bytes.
    let (u, v) = unsafe { (_mm256_loadu_si256(a.cast()), _mm256_loadu_si256(b.cast())) };
    let upper = _mm256_set1_epi32(0xffff_0000u32 as i32);
    let hi = |x| _mm256_castsi256_ps(_mm256_and_si256(x, upper));
    let lo = |x| _mm256_castsi256_ps(_mm256_slli_epi32::<16>(x));
    let (h, l) = (bf16_round(ps::<MUL>(hi(u), hi(v))), bf16_round(ps::<MUL>(lo(u), lo(v))));
    let r = _mm256_blend_epi16::<0b1010_1010>(_mm256_srli_epi32::<16>(l), h);
    // SAFETY: as above.
    unsafe { _mm256_storeu_si256(a.cast(), r) };
}

/// Rounds to bf16, in the upper half of each lane; the lower half is what is left over. As [`Bf::round`](super::super::lanes::Narrow).
#[inline]
#[target_feature(enable = "avx2")]
fn bf16_round(x: __m256) -> __m256i {
    let b = _mm256_castps_si256(x);
    let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(b), _mm256_set1_epi32(1));
    let nearest = _mm256_add_epi32(_mm256_add_epi32(b, _mm256_set1_epi32(0x7fff)), odd);
    // An addition has made each NaN quiet, so that its upper half as it stands is the answer.
    let nan = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(x, x));
    _mm256_blendv_epi8(nearest, b, nan)
}

kernel!(bf16_avx512, "avx512f,avx512bw,avx512dq,avx512bf16,avx2", Bf, 64, bf16_block512);

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512bf16,avx2")]
unsafe fn bf16_block512<const MUL: bool>(a: *mut u8, b: *const u8) {
    // SAFETY: the caller's block has 64 bytes.
    let (u, v) = unsafe { (_mm512_loadu_si512(a.cast()), _mm512_loadu_si512(b.cast())) };
    let upper = _mm512_set1_epi32(0xffff_0000u32 as i32);
    let hi = |x| _mm512_castsi512_ps(_mm512_and_si512(x, upper));
    let lo = |x| _mm512_castsi512_ps(_mm512_slli_epi32::<16>(x));
    let (h, l) = (ps512::<MUL>(hi(u), hi(v)), ps512::<MUL>(lo(u), lo(v)));
    const DENORMAL: i32 = 0x20;
    // The instruction takes denormals for zero. A normal number never rounds to one, so these are all that it gets wrong.
    let denormal = _mm512_fpclass_ps_mask::<DENORMAL>(h) | _mm512_fpclass_ps_mask::<DENORMAL>(l);
    let r = if denormal == 0 {
        let both = _mm512_cvtne2ps_pbh(h, l);
        // SAFETY: both are 64 bytes without padding of which every pattern is valid.
        let both = unsafe { std::mem::transmute::<__m512bh, __m512i>(both) };
        _mm512_permutexvar_epi16(interleaved(), both)
    } else {
        _mm512_mask_blend_epi16(0xaaaa_aaaa, _mm512_srli_epi32::<16>(bf16_round512(l)), bf16_round512(h))
    };
    // SAFETY: as above.
    unsafe { _mm512_storeu_si512(a.cast(), r) };
}

/// The permutation that takes words alternately from the lower and the upper half.
#[inline]
#[target_feature(enable = "avx512f")]
fn interleaved() -> __m512i {
    let mut at = [0u16; 32];
    for (i, at) in at.iter_mut().enumerate() {
        *at = (i / 2 + i % 2 * 16) as u16;
    }
    // SAFETY: an array of 64 bytes, read once.
    unsafe { _mm512_loadu_si512(at.as_ptr().cast()) }
}

/// As [`bf16_round`], of 16 lanes.
#[inline]
#[target_feature(enable = "avx512f")]
fn bf16_round512(x: __m512) -> __m512i {
    let b = _mm512_castps_si512(x);
    let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(b), _mm512_set1_epi32(1));
    let nearest = _mm512_add_epi32(_mm512_add_epi32(b, _mm512_set1_epi32(0x7fff)), odd);
    _mm512_mask_mov_epi32(nearest, _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(x, x), b)
}
