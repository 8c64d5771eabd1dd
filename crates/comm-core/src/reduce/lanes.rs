//! Elements as they lie in memory, and the arithmetic that defines what every kernel must give, bit for bit.
//!
//! Processors, and the compiler that may swap the operands of an addition, leave open which NaN comes out of two. Here it is
//! fixed: **the first operand's NaN made quiet, else the second's, else ([`NAN32`]) the negative quiet NaN without a payload**,
//! which is what x86 instructions give when their operands are in this order.

/// One element.
pub(super) trait Lane: Copy {
    const BYTES: usize;
    fn load(b: &[u8]) -> Self;
    fn store(self, b: &mut [u8]);
}

macro_rules! plain {
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
plain!(i8, u8, i16, u16, i32, u32, i64, u64, f32, f64);

/// A boolean: any non-zero byte is true, only 0 and 1 are stored.
#[derive(Clone, Copy)]
pub(super) struct Bit(pub(super) bool);

/// A bfloat16.
#[derive(Clone, Copy)]
pub(super) struct Bf(pub(super) u16);

/// Two neighbouring bfloat16s. As an `f32`, the upper needs but a mask and the lower a shift, so that nothing has to be
/// unpacked. Which of them is first in memory does not matter.
#[derive(Clone, Copy)]
pub(super) struct Bf2(u32);

impl Bf2 {
    #[inline(always)]
    pub(super) fn halves(self) -> (Bf, Bf) {
        (Bf((self.0 >> 16) as u16), Bf(self.0 as u16))
    }

    #[inline(always)]
    pub(super) fn of(upper: Bf, lower: Bf) -> Self {
        Self(u32::from(upper.0) << 16 | u32::from(lower.0))
    }

    #[inline(always)]
    pub(super) fn wide(self) -> (f32, f32) {
        (f32::from_bits(self.0 & 0xffff_0000), f32::from_bits(self.0 << 16))
    }

    /// Rounds two numbers that are not NaN.
    #[inline(always)]
    pub(super) fn rounded(upper: f32, lower: f32) -> Self {
        let nearest = |x: f32| x.to_bits().wrapping_add(0x7fff + (x.to_bits() >> 16 & 1));
        Self(nearest(upper) & 0xffff_0000 | nearest(lower) >> 16)
    }
}

/// An IEEE half.
#[derive(Clone, Copy)]
pub(super) struct Hf(pub(super) u16);

/// An 8-bit float: `MAN` bits of mantissa, the exponent's `BIAS`, the code `MAX` of the largest finite value. Codes above `INF`
/// are NaN; `INF` itself is infinity if it is above `MAX`.
#[derive(Clone, Copy)]
pub(super) struct F8<const MAN: u32, const BIAS: u32, const MAX: u32, const INF: u32>(pub(super) u8);

/// [`DType::E4M3`](crate::DType::E4M3).
pub(super) type E4 = F8<3, 7, 0x7e, 0x7e>;
/// [`DType::E5M2`](crate::DType::E5M2).
pub(super) type E5 = F8<2, 15, 0x7b, 0x7c>;

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

macro_rules! wrapped {
    ($bits:ty: $([$($g:tt)*] $t:ty),*) => {$(
        impl<$($g)*> Lane for $t {
            const BYTES: usize = size_of::<$bits>();
            #[inline(always)]
            fn load(b: &[u8]) -> Self {
                Self(<$bits>::load(b))
            }
            #[inline(always)]
            fn store(self, b: &mut [u8]) {
                self.0.store(b);
            }
        }
    )*};
}
wrapped!(u16: [] Bf, [] Hf);
wrapped!(u32: [] Bf2);
wrapped!(u8: [const M: u32, const B: u32, const X: u32, const I: u32] F8<M, B, X, I>);

/// The NaN of an invalid operation (∞ − ∞, 0 · ∞).
pub(super) const NAN32: u32 = 0xffc0_0000;
const NAN64: u64 = 0xfff8_0000_0000_0000;
const QUIET32: u32 = 1 << 22;
const QUIET64: u64 = 1 << 51;

/// `if cond { a } else { b }` by masks. From an `if` the compiler makes a branch here and there, and then no vectors.
trait Pick: Copy {
    fn pick(cond: bool, a: Self, b: Self) -> Self;
}

macro_rules! picks {
    ($($t:ty),*) => {$(
        impl Pick for $t {
            #[inline(always)]
            fn pick(cond: bool, a: Self, b: Self) -> Self {
                b ^ ((a ^ b) & <$t>::from(cond).wrapping_neg())
            }
        }
    )*};
}
picks!(u32, u64);

#[inline(always)]
fn pick<T: Pick>(cond: bool, a: T, b: T) -> T {
    T::pick(cond, a, b)
}

/// Floats in which sums, products and quotients are computed.
pub(super) trait Arith: Copy {
    /// `self + x`, with the NaN that the module's documentation names.
    fn plus(self, x: Self) -> Self;
    /// `self · x`, likewise.
    fn times(self, x: Self) -> Self;
    /// `self / x`, likewise.
    fn over(self, x: Self) -> Self;
}

macro_rules! arith {
    ($($t:ty, $quiet:ident, $nan:ident, $settle:ident;)*) => {$(
        impl Arith for $t {
            #[inline(always)]
            fn plus(self, x: Self) -> Self {
                $settle(self + x, self, x)
            }
            #[inline(always)]
            fn times(self, x: Self) -> Self {
                $settle(self * x, self, x)
            }
            #[inline(always)]
            fn over(self, x: Self) -> Self {
                $settle(self / x, self, x)
            }
        }

        /// The result `r` of an operation on `a` and `b`, or, where it is NaN, the right NaN.
        #[inline(always)]
        fn $settle(r: $t, a: $t, b: $t) -> $t {
            let second = pick(b.is_nan(), b.to_bits() | $quiet, $nan);
            let nan = pick(a.is_nan(), a.to_bits() | $quiet, second);
            <$t>::from_bits(pick(r.is_nan(), nan, r.to_bits()))
        }
    )*};
}
arith! {
    f32, QUIET32, NAN32, settle32;
    f64, QUIET64, NAN64, settle64;
}

/// Narrow floats: arithmetic goes through `f32`, comparison stays in integers.
pub(super) trait Narrow: Lane {
    /// The value in `f32` (exact).
    fn wide(self) -> f32;
    /// The nearest value, ties to even.
    fn round(x: f32) -> Self;
    /// Whether this is a NaN.
    fn nan(self) -> bool;
    /// An integer that orders the values that are not NaN; equal for both zeros.
    fn order(self) -> i16;
}

/// Sign and magnitude to two's complement. Shifts and masks, for which every instruction set has vectors.
#[inline(always)]
fn signed16(bits: u16) -> i16 {
    let sign = (bits as i16) >> 15;
    ((bits & 0x7fff) as i16 ^ sign) - sign
}

impl Narrow for Bf {
    #[inline(always)]
    fn wide(self) -> f32 {
        f32::from_bits(u32::from(self.0) << 16)
    }
    #[inline(always)]
    fn round(x: f32) -> Self {
        let b = x.to_bits();
        let nearest = b.wrapping_add(0x7fff + ((b >> 16) & 1)) >> 16;
        let quiet = (b >> 16) | 0x40;
        Self(pick(b & 0x7fff_ffff > 0x7f80_0000, quiet, nearest) as u16)
    }
    #[inline(always)]
    fn nan(self) -> bool {
        self.0 & 0x7fff > 0x7f80
    }
    #[inline(always)]
    fn order(self) -> i16 {
        signed16(self.0)
    }
}

// Denormal halves and 8-bit floats meet no denormal `f32` on the way: an addition of a larger number moves their bits into
// place and rounds. So a thread that flushes denormals gets the same results.

impl Narrow for Hf {
    /// As `VCVTPH2PS`: NaN comes out quiet, with its payload.
    #[inline(always)]
    fn wide(self) -> f32 {
        let (sign, mag) = (u32::from(self.0 & 0x8000) << 16, u32::from(self.0 & 0x7fff) << 13);
        let normal = mag + (112 << 23);
        let tiny = (f32::from_bits(mag + (113 << 23)) - f32::from_bits(113 << 23)).to_bits();
        let special = mag | 0x7f80_0000 | (u32::from(mag > 0x0f80_0000) * QUIET32);
        let finite = pick(mag < 1 << 23, tiny, normal);
        f32::from_bits(sign | pick(mag >= 0x0f80_0000, special, finite))
    }
    /// As `VCVTPS2PH`: NaN comes out quiet, with the payload's upper bits.
    #[inline(always)]
    fn round(x: f32) -> Self {
        let (sign, mag) = (x.to_bits() >> 16 & 0x8000, x.to_bits() & 0x7fff_ffff);
        let normal = mag.wrapping_sub(112 << 23).wrapping_add(0xfff + (mag >> 13 & 1)) >> 13;
        let tiny = (f32::from_bits(mag) + 0.5).to_bits().wrapping_sub(0.5f32.to_bits());
        let special = pick(mag > 0x7f80_0000, 0x7e00 | (mag >> 13 & 0x3ff), 0x7c00);
        let finite = pick(mag < 113 << 23, tiny, normal);
        Self((sign | pick(mag >= 143 << 23, special, finite)) as u16)
    }
    #[inline(always)]
    fn nan(self) -> bool {
        self.0 & 0x7fff > 0x7c00
    }
    #[inline(always)]
    fn order(self) -> i16 {
        signed16(self.0)
    }
}

impl<const MAN: u32, const BIAS: u32, const MAX: u32, const INF: u32> Narrow for F8<MAN, BIAS, MAX, INF> {
    #[inline(always)]
    fn wide(self) -> f32 {
        let (sign, code) = (u32::from(self.0 & 0x80) << 24, u32::from(self.0 & 0x7f));
        let mag = code << (23 - MAN);
        let least = (128 - BIAS) << 23;
        let normal = mag + ((127 - BIAS) << 23);
        let tiny = (f32::from_bits(mag + least) - f32::from_bits(least)).to_bits();
        let finite = pick(code < 1 << MAN, tiny, normal);
        let special = pick(code > INF, 0x7fc0_0000, 0x7f80_0000);
        f32::from_bits(sign | pick(code > MAX, special, finite))
    }
    /// Saturates: what is above the largest finite value, infinity included, becomes that. NaN loses its payload.
    #[inline(always)]
    fn round(x: f32) -> Self {
        let (sign, mag) = (x.to_bits() >> 24 & 0x80, x.to_bits() & 0x7fff_ffff);
        let drop = 23 - MAN;
        let nearest = (mag + (1 << (drop - 1)) - 1 + (mag >> drop & 1)) >> drop;
        let normal = nearest.wrapping_sub((127 - BIAS) << MAN);
        let unit = f32::from_bits((151 - BIAS - MAN) << 23);
        let tiny = (f32::from_bits(mag) + unit).to_bits().wrapping_sub(unit.to_bits());
        let top = pick(nearest > MAX + ((127 - BIAS) << MAN), MAX, normal);
        let finite = pick(mag < (128 - BIAS) << 23, tiny, top);
        Self((sign | pick(mag > 0x7f80_0000, 0x7f, finite)) as u8)
    }
    #[inline(always)]
    fn nan(self) -> bool {
        u32::from(self.0 & 0x7f) > INF
    }
    #[inline(always)]
    fn order(self) -> i16 {
        let sign = (self.0 as i8) >> 7;
        i16::from(((self.0 & 0x7f) as i8 ^ sign) - sign)
    }
}
