//! Element types of the suite, and values as bits.
//!
//! Everything that is generated, predicted and compared is the bits of one element in a `u128`, so that only the calls
//! themselves are generic over the element type.

use comm_core::{DType, E4M3, E5M2, Pod, bf16, f16};

/// Three bytes: a struct of the user's whose size is no power of two.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Rgb(pub(crate) [u8; 3]);

/// A struct of the user's with fields of several sizes.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Record {
    a: u32,
    b: u16,
    c: [u8; 2],
}

/// The function `x -> a x + b` on wrapping numbers. Composition is associative and does not commute.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Affine {
    pub(crate) a: u32,
    pub(crate) b: u32,
}

/// Stands for any element of 16 bytes.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Wide([u64; 2]);

// SAFETY: plain numbers; no padding, every bit pattern is valid.
unsafe impl Pod for Wide {}
// SAFETY: bytes; no padding, every bit pattern is valid.
unsafe impl Pod for Rgb {}
// SAFETY: 4 + 2 + 2 bytes without padding (the largest alignment is 4), every bit pattern is valid.
unsafe impl Pod for Record {}
// SAFETY: two plain numbers without padding, every bit pattern is valid.
unsafe impl Pod for Affine {}

/// An element that is made from bits and turned back into them.
pub(crate) trait Item: Pod {
    /// From canonical bits; see [`Kind::canonical`].
    fn from_bits(bits: u128) -> Self;
    /// The bits, the lowest byte first in memory.
    fn to_bits(self) -> u128;
}

macro_rules! items {
    ($($t:ty: |$b:ident| $from:expr, |$x:ident| $to:expr;)*) => {$(
        impl Item for $t {
            // The conversions are exact for canonical bits.
            #[allow(clippy::cast_possible_truncation)]
            fn from_bits($b: u128) -> Self {
                $from
            }
            fn to_bits(self) -> u128 {
                let $x = self;
                $to
            }
        }
    )*};
}

items! {
    bool: |b| b & 1 == 1, |x| u128::from(x);
    i8: |b| b as Self, |x| u128::from(x as u8);
    u8: |b| b as Self, |x| u128::from(x);
    i16: |b| b as Self, |x| u128::from(x as u16);
    u16: |b| b as Self, |x| u128::from(x);
    i32: |b| b as Self, |x| u128::from(x as u32);
    u32: |b| b as Self, |x| u128::from(x);
    i64: |b| b as Self, |x| u128::from(x as u64);
    u64: |b| b as Self, |x| u128::from(x);
    f16: |b| Self::from_bits(b as u16), |x| u128::from(x.to_bits());
    bf16: |b| Self::from_bits(b as u16), |x| u128::from(x.to_bits());
    f32: |b| Self::from_bits(b as u32), |x| u128::from(x.to_bits());
    f64: |b| Self::from_bits(b as u64), |x| u128::from(x.to_bits());
    E4M3: |b| Self(b as u8), |x| u128::from(x.0);
    E5M2: |b| Self(b as u8), |x| u128::from(x.0);
    Rgb: |b| Self([b as u8, (b >> 8) as u8, (b >> 16) as u8]),
        |x| u128::from(x.0[0]) | u128::from(x.0[1]) << 8 | u128::from(x.0[2]) << 16;
    Record: |b| Self { a: b as u32, b: (b >> 32) as u16, c: [(b >> 48) as u8, (b >> 56) as u8] },
        |x| u128::from(x.a) | u128::from(x.b) << 32 | u128::from(x.c[0]) << 48 | u128::from(x.c[1]) << 56;
    Wide: |b| Self([b as u64, (b >> 64) as u64]), |x| u128::from(x.0[0]) | u128::from(x.0[1]) << 64;
}

/// Layout of a binary float.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Float {
    /// Exponent bits.
    pub(crate) exp: u32,
    /// Mantissa bits without the implied one.
    pub(crate) man: u32,
    /// Whether there are infinities (all formats but e4m3).
    pub(crate) infinite: bool,
}

impl Float {
    const fn new(exp: u32, man: u32, infinite: bool) -> Self {
        Self { exp, man, infinite }
    }

    /// Eight bits, whose sums saturate instead of reaching infinity.
    pub(crate) const fn is_tiny(self) -> bool {
        self.exp + self.man == 7
    }

    /// The exponent's offset.
    pub(crate) const fn bias(self) -> i32 {
        (1 << (self.exp - 1)) - 1
    }

    /// The value of these bits, which a double holds exactly.
    pub(crate) fn decode(self, bits: u128) -> f64 {
        if self.man == 52 {
            return f64::from_bits(bits as u64);
        }
        let man = (bits & ((1 << self.man) - 1)) as u64;
        let exp = ((bits >> self.man) & ((1 << self.exp) - 1)) as i32;
        let sign = if bits >> (self.man + self.exp) & 1 == 1 { -1.0 } else { 1.0 };
        let top = (1 << self.exp) - 1;
        let part = man as f64 / (1u64 << self.man) as f64;
        if exp == top && self.infinite {
            return if man == 0 { sign * f64::INFINITY } else { f64::NAN };
        }
        if exp == top && man == (1 << self.man) - 1 {
            return f64::NAN;
        }
        if exp == 0 {
            return sign * part * 2f64.powi(1 - self.bias());
        }
        sign * (1.0 + part) * 2f64.powi(exp - self.bias())
    }

    /// The bits of a value that the format holds exactly, as a normal number, zero or infinity.
    pub(crate) fn encode(self, x: f64) -> u128 {
        let sign = u128::from(x.is_sign_negative()) << (self.man + self.exp);
        if x == 0.0 {
            return sign;
        }
        let top = (1u128 << self.exp) - 1;
        if x.is_infinite() {
            return sign | top << self.man;
        }
        let bits = x.to_bits();
        let exp = ((bits >> 52) & 0x7ff) as i32 - 1023 + self.bias();
        let man = u128::from(bits & ((1 << 52) - 1)) >> (52 - self.man);
        sign | (exp.max(0) as u128) << self.man | man
    }

    /// A quiet NaN with this payload.
    pub(crate) fn nan(self, payload: u128) -> u128 {
        let man = (1u128 << self.man) - 1;
        let top = ((1u128 << self.exp) - 1) << self.man;
        if self.infinite { top | 1 << (self.man - 1) | payload & (man >> 1) } else { top | man }
    }

    /// Whether these bits are a NaN.
    pub(crate) fn is_nan(self, bits: u128) -> bool {
        self.decode(bits).is_nan()
    }

    /// Half a unit in the last place of 1: the largest relative error of one rounding.
    pub(crate) fn unit(self) -> f64 {
        2f64.powi(-(self.man as i32) - 1)
    }
}

/// What the suite knows of an element type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Kind {
    Bool,
    I8,
    U8,
    I16,
    U16,
    I32,
    U32,
    I64,
    U64,
    F16,
    Bf16,
    F32,
    F64,
    E4M3,
    E5M2,
    Rgb,
    Record,
    Affine,
    LocF32,
    LocI32,
    LocF64,
    LocI64,
}

impl Kind {
    /// Types that are moved: the library's own, and structs of the user's.
    pub(crate) const MOVED: [Self; 17] = [
        Self::Bool,
        Self::I8,
        Self::U8,
        Self::I16,
        Self::U16,
        Self::I32,
        Self::U32,
        Self::I64,
        Self::U64,
        Self::F16,
        Self::Bf16,
        Self::F32,
        Self::F64,
        Self::E4M3,
        Self::E5M2,
        Self::Rgb,
        Self::Record,
    ];

    /// The library's types, in the order of their codes.
    pub(crate) fn dtypes() -> impl Iterator<Item = (Self, DType)> {
        Self::MOVED.into_iter().zip(DType::ALL)
    }

    /// The library's type that this is; `None` for structs.
    pub(crate) fn own(self) -> Option<DType> {
        Self::dtypes().find(|(k, _)| *k == self).map(|(_, d)| d)
    }

    /// The element type on the wire.
    pub(crate) fn dtype(self) -> DType {
        self.own().unwrap_or(DType::U8)
    }

    /// Bytes of one element.
    pub(crate) fn size(self) -> usize {
        match self {
            Self::Rgb => 3,
            Self::Record | Self::Affine | Self::LocF32 | Self::LocI32 => 8,
            Self::LocF64 | Self::LocI64 => 16,
            _ => self.dtype().size(),
        }
    }

    /// The format, of floats.
    pub(crate) const fn float(self) -> Option<Float> {
        match self {
            Self::F16 => Some(Float::new(5, 10, true)),
            Self::Bf16 => Some(Float::new(8, 7, true)),
            Self::F32 => Some(Float::new(8, 23, true)),
            Self::F64 => Some(Float::new(11, 52, true)),
            Self::E4M3 => Some(Float::new(4, 3, false)),
            Self::E5M2 => Some(Float::new(5, 2, true)),
            _ => None,
        }
    }

    /// Whether it is a signed integer.
    pub(crate) const fn is_signed(self) -> bool {
        matches!(self, Self::I8 | Self::I16 | Self::I32 | Self::I64)
    }

    /// Of arbitrary bits those that are a value of this type.
    pub(crate) fn canonical(self, bits: u128) -> u128 {
        match self {
            Self::Bool => bits & 1,
            _ if self.size() == 16 => bits,
            _ => bits & ((1 << (8 * self.size())) - 1),
        }
    }

    /// The name in reports.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Rgb => "struct of 3 bytes",
            Self::Record => "struct of 8 bytes",
            Self::Affine => "affine function",
            Self::LocF32 => "f32 and index",
            Self::LocI32 => "i32 and index",
            Self::LocF64 => "f64 and index",
            Self::LocI64 => "i64 and index",
            _ => self.dtype().name(),
        }
    }
}

/// Evaluates an expression with `$T` as the Rust type of a [`Kind`] that is moved.
macro_rules! with_type {
    ($kind:expr, $T:ident => $body:expr) => {
        $crate::kind::with_type!(@ $kind, $T => $body;
            Bool: bool, I8: i8, U8: u8, I16: i16, U16: u16, I32: i32, U32: u32, I64: i64, U64: u64,
            F16: comm_core::f16, Bf16: comm_core::bf16, F32: f32, F64: f64,
            E4M3: comm_core::E4M3, E5M2: comm_core::E5M2, Rgb: $crate::kind::Rgb, Record: $crate::kind::Record)
    };
    (@ $kind:expr, $T:ident => $body:expr; $($k:ident: $t:ty),*) => {
        match $kind {
            $($crate::kind::Kind::$k => {
                type $T = $t;
                $body
            })*
            other => Err(comm_core::Error::invalid(format!("the suite does not move {}", other.name()))),
        }
    };
}
pub(crate) use with_type;

/// Evaluates an expression with `$T` as a type of the size of a [`Kind`]: buffers tell their element type at run time (see
/// [`Guarded`](crate::buffer::Guarded)), so that the calls need not be compiled for each of them.
macro_rules! with_carrier {
    ($kind:expr, $T:ident => $body:expr) => {
        $crate::kind::with_carrier!(@ $kind, $T => $body;
            1: u8, 2: u16, 3: $crate::kind::Rgb, 4: u32, 8: u64, 16: $crate::kind::Wide)
    };
    (@ $kind:expr, $T:ident => $body:expr; $($size:literal: $t:ty),*) => {
        match $kind.size() {
            $($size => {
                type $T = $t;
                $body
            })*
            other => Err(comm_core::Error::invalid(format!("the suite has no elements of {other} bytes"))),
        }
    };
}
pub(crate) use with_carrier;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_go_there_and_back() {
        let raw = 0x0123_4567_89ab_cdef_fedc_ba98_7654_3210u128;
        for kind in Kind::MOVED {
            let bits = kind.canonical(raw);
            let typed = with_type!(kind, T => Ok((Item::to_bits(<T as Item>::from_bits(bits)), size_of::<T>())));
            assert_eq!(typed.unwrap(), (bits, kind.size()), "{kind:?}");
        }
        for kind in Kind::MOVED.into_iter().chain([Kind::Affine, Kind::LocF32, Kind::LocF64]) {
            let bits = kind.canonical(raw);
            let there = with_carrier!(kind, T => Ok((Item::to_bits(<T as Item>::from_bits(bits)), size_of::<T>())));
            assert_eq!(there.unwrap(), (bits, kind.size()), "{kind:?}");
        }
    }

    #[test]
    fn decoding_agrees_with_the_types() {
        for b in 0..=u16::MAX {
            let ours = Kind::F16.float().unwrap().decode(b.into());
            assert!(ours == f16::from_bits(b).to_f64() || ours.is_nan() && f16::from_bits(b).is_nan(), "{b:#x}");
            let ours = Kind::Bf16.float().unwrap().decode(b.into());
            assert!(ours == bf16::from_bits(b).to_f64() || ours.is_nan() && bf16::from_bits(b).is_nan(), "{b:#x}");
        }
        for b in 0..=u8::MAX {
            let (ours, theirs) = (Kind::E4M3.float().unwrap().decode(b.into()), f64::from(E4M3(b).to_f32()));
            assert!(ours == theirs || ours.is_nan() && theirs.is_nan(), "e4m3 {b:#x}");
            let (ours, theirs) = (Kind::E5M2.float().unwrap().decode(b.into()), f64::from(E5M2(b).to_f32()));
            assert!(ours == theirs || ours.is_nan() && theirs.is_nan(), "e5m2 {b:#x}");
        }
    }

    #[test]
    fn encoding_is_exact() {
        for kind in [Kind::F16, Kind::Bf16, Kind::F32, Kind::F64, Kind::E4M3, Kind::E5M2] {
            let f = kind.float().unwrap();
            for x in [0.0, 1.0, -1.0, 2.0, 3.0, -0.5, 8.0, 0.25] {
                assert_eq!(f.decode(f.encode(x)), x, "{kind:?}");
            }
            assert!(f.is_nan(f.nan(0)) && f.is_nan(f.nan(5)), "{kind:?}");
            if f.infinite {
                assert_eq!(f.decode(f.encode(f64::NEG_INFINITY)), f64::NEG_INFINITY, "{kind:?}");
            }
        }
    }
}
