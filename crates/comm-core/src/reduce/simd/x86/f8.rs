//! Sums and products of 8-bit floats, through `f32` and back through halves.
//!
//! An 8-bit float is a half with fewer bits of mantissa: E5M2 by itself, E4M3 with its value times 2⁻⁸ (denormals included, as the
//! exponents' biases differ by 8). So bytes become halves by a shift, F16C widens them, and on the way back the last rounding,
//! in 16-bit lanes, is an addition. The rounding to a half that comes before it does no harm: a sum, or product, of so few bits is
//! either exact in a half or too far from a tie for its rounding to make one. All pairs are tested.
//!
//! NaN and infinity are left to the portable loop, block by block.

use std::arch::x86_64::*;

use super::super::super::kernels::{Op, zip};
use super::super::super::lanes::{E4, E5, Lane};

/// One of the two types in numbers.
pub(super) trait F8: Lane {
    /// How far a byte's magnitude is shifted to be a half's.
    const SHIFT: u32;
    /// The largest finite code. Those above, without sign, are for the portable loop.
    const MAX: u8;
    /// What a product of two halves has to be multiplied with to be scaled as one.
    const RESCALE: f32;
}

impl F8 for E4 {
    const SHIFT: u32 = 7;
    const MAX: u8 = 0x7e;
    const RESCALE: f32 = 256.0;
}

impl F8 for E5 {
    const SHIFT: u32 = 8;
    const MAX: u8 = 0x7b;
    const RESCALE: f32 = 1.0;
}

#[target_feature(enable = "avx2,f16c")]
pub(super) fn f8_avx2<T: F8, O: Op<T>, const MUL: bool>(acc: &mut [u8], x: &[u8]) {
    let (mut a, mut b) = (acc.chunks_exact_mut(32), x.chunks_exact(32));
    for (a, b) in a.by_ref().zip(b.by_ref()) {
        // SAFETY: both slices have 32 bytes.
        let (u, v) = unsafe { (_mm256_loadu_si256(a.as_ptr().cast()), _mm256_loadu_si256(b.as_ptr().cast())) };
        let (sign, max) = (_mm256_set1_epi8(-128), _mm256_set1_epi8(T::MAX as i8));
        let mags = (_mm256_andnot_si256(sign, u), _mm256_andnot_si256(sign, v));
        let odd = _mm256_or_si256(_mm256_cmpgt_epi8(mags.0, max), _mm256_cmpgt_epi8(mags.1, max));
        if _mm256_movemask_epi8(odd) != 0 {
            zip::<T, O>(a, b);
            continue;
        }
        let low = step::<T, MUL>(_mm256_castsi256_si128(u), _mm256_castsi256_si128(v));
        let high = step::<T, MUL>(_mm256_extracti128_si256::<1>(u), _mm256_extracti128_si256::<1>(v));
        // Packing works within 128 bits; the permutation puts the quarters in order.
        let r = _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_packus_epi16(low, high));
        // SAFETY: as above.
        unsafe { _mm256_storeu_si256(a.as_mut_ptr().cast(), r) };
    }
    zip::<T, O>(a.into_remainder(), b.remainder());
}

/// 16 finite pairs; the codes come in 16-bit lanes.
#[inline]
#[target_feature(enable = "avx2,f16c")]
fn step<T: F8, const MUL: bool>(u: __m128i, v: __m128i) -> __m256i {
    let (u, v) = (halves::<T>(u), halves::<T>(v));
    let low = combine::<T, MUL>(_mm256_castsi256_si128(u), _mm256_castsi256_si128(v));
    let high = combine::<T, MUL>(_mm256_extracti128_si256::<1>(u), _mm256_extracti128_si256::<1>(v));
    let h = _mm256_set_m128i(high, low);
    let sign = _mm256_and_si256(_mm256_srli_epi16::<8>(h), _mm256_set1_epi16(0x80));
    let mag = _mm256_and_si256(h, _mm256_set1_epi16(0x7fff));
    let odd = _mm256_and_si256(down::<T>(mag), _mm256_set1_epi16(1));
    let bias = _mm256_set1_epi16((1 << (T::SHIFT - 1)) - 1);
    let code = down::<T>(_mm256_add_epi16(_mm256_add_epi16(mag, bias), odd));
    _mm256_or_si256(_mm256_min_epi16(code, _mm256_set1_epi16(T::MAX.into())), sign)
}

#[inline]
#[target_feature(enable = "avx2")]
fn halves<T: F8>(x: __m128i) -> __m256i {
    let high = _mm256_slli_epi16::<8>(_mm256_cvtepu8_epi16(x));
    // One place less for the magnitude; the arithmetic shift leaves the sign, and a copy of it that goes.
    if T::SHIFT == 7 {
        _mm256_and_si256(_mm256_srai_epi16::<1>(high), _mm256_set1_epi16(0xbf80u16 as i16))
    } else {
        high
    }
}

#[inline]
#[target_feature(enable = "avx2,f16c")]
fn combine<T: F8, const MUL: bool>(u: __m128i, v: __m128i) -> __m128i {
    let (u, v) = (_mm256_cvtph_ps(u), _mm256_cvtph_ps(v));
    // No NaN is among them, so that the order of the operands is free.
    let r = if MUL { _mm256_mul_ps(_mm256_mul_ps(u, v), _mm256_set1_ps(T::RESCALE)) } else { _mm256_add_ps(u, v) };
    _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(r)
}

/// A half's magnitude shifted to be a code.
#[inline]
#[target_feature(enable = "avx2")]
fn down<T: F8>(x: __m256i) -> __m256i {
    if T::SHIFT == 7 { _mm256_srli_epi16::<7>(x) } else { _mm256_srli_epi16::<8>(x) }
}

/// As [`f8_avx2`], of 32 elements at once.
#[target_feature(enable = "avx512f,avx512bw,avx2,f16c")]
pub(super) fn f8_avx512<T: F8, O: Op<T>, const MUL: bool>(acc: &mut [u8], x: &[u8]) {
    let (mut a, mut b) = (acc.chunks_exact_mut(32), x.chunks_exact(32));
    for (a, b) in a.by_ref().zip(b.by_ref()) {
        // SAFETY: both slices have 32 bytes.
        let (u, v) = unsafe { (_mm256_loadu_si256(a.as_ptr().cast()), _mm256_loadu_si256(b.as_ptr().cast())) };
        let (sign, max) = (_mm256_set1_epi8(-128), _mm256_set1_epi8(T::MAX as i8));
        let mags = _mm256_max_epi8(_mm256_andnot_si256(sign, u), _mm256_andnot_si256(sign, v));
        if _mm256_movemask_epi8(_mm256_cmpgt_epi8(mags, max)) != 0 {
            zip::<T, O>(a, b);
            continue;
        }
        let (u, v) = (halves512::<T>(u), halves512::<T>(v));
        let low = combine512::<T, MUL>(_mm512_castsi512_si256(u), _mm512_castsi512_si256(v));
        let high = combine512::<T, MUL>(_mm512_extracti64x4_epi64::<1>(u), _mm512_extracti64x4_epi64::<1>(v));
        let h = _mm512_inserti64x4::<1>(_mm512_castsi256_si512(low), high);
        let sign = _mm512_and_si512(_mm512_srli_epi16::<8>(h), _mm512_set1_epi16(0x80));
        let mag = _mm512_and_si512(h, _mm512_set1_epi16(0x7fff));
        let odd = _mm512_and_si512(down512::<T>(mag), _mm512_set1_epi16(1));
        let bias = _mm512_set1_epi16((1 << (T::SHIFT - 1)) - 1);
        let code = down512::<T>(_mm512_add_epi16(_mm512_add_epi16(mag, bias), odd));
        let code = _mm512_or_si512(_mm512_min_epi16(code, _mm512_set1_epi16(T::MAX.into())), sign);
        // SAFETY: as above.
        unsafe { _mm256_storeu_si256(a.as_mut_ptr().cast(), _mm512_cvtepi16_epi8(code)) };
    }
    zip::<T, O>(a.into_remainder(), b.remainder());
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn halves512<T: F8>(x: __m256i) -> __m512i {
    let high = _mm512_slli_epi16::<8>(_mm512_cvtepu8_epi16(x));
    if T::SHIFT == 7 {
        _mm512_and_si512(_mm512_srai_epi16::<1>(high), _mm512_set1_epi16(0xbf80u16 as i16))
    } else {
        high
    }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn combine512<T: F8, const MUL: bool>(u: __m256i, v: __m256i) -> __m256i {
    let (u, v) = (_mm512_cvtph_ps(u), _mm512_cvtph_ps(v));
    let r = if MUL { _mm512_mul_ps(_mm512_mul_ps(u, v), _mm512_set1_ps(T::RESCALE)) } else { _mm512_add_ps(u, v) };
    _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(r)
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn down512<T: F8>(x: __m512i) -> __m512i {
    if T::SHIFT == 7 { _mm512_srli_epi16::<7>(x) } else { _mm512_srli_epi16::<8>(x) }
}
