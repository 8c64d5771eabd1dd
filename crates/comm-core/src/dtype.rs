//! Element types: what can be moved ([`Pod`]) and what can be reduced ([`Element`]).

use std::fmt;

use half::{bf16, f16};
use serde::{Deserialize, Serialize};

/// The type of one element of a buffer.
///
/// Counterparts: `ncclDataType_t`, `MPI_Datatype`, `torch.dtype`.
#[non_exhaustive]
#[repr(u8)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum DType {
    /// One byte that is 0 or 1. Received bytes other than 0 are normalised to 1.
    Bool = 0,
    /// 8-bit signed integer.
    I8 = 1,
    /// 8-bit unsigned integer; also the unit in which user-defined [`Pod`] types travel.
    U8 = 2,
    /// 16-bit signed integer.
    I16 = 3,
    /// 16-bit unsigned integer.
    U16 = 4,
    /// 32-bit signed integer.
    I32 = 5,
    /// 32-bit unsigned integer.
    U32 = 6,
    /// 64-bit signed integer.
    I64 = 7,
    /// 64-bit unsigned integer.
    U64 = 8,
    /// IEEE 754 half precision.
    F16 = 9,
    /// bfloat16.
    Bf16 = 10,
    /// IEEE 754 single precision.
    F32 = 11,
    /// IEEE 754 double precision.
    F64 = 12,
    /// 8-bit float, 4 exponent and 3 mantissa bits, no infinities (OCP E4M3).
    E4M3 = 13,
    /// 8-bit float, 5 exponent and 2 mantissa bits (OCP E5M2).
    E5M2 = 14,
}

impl DType {
    /// Every data type, in the order of their codes.
    pub const ALL: [Self; 15] = [
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
    ];

    /// Bytes in one element.
    #[must_use]
    pub const fn size(self) -> usize {
        match self {
            Self::Bool | Self::I8 | Self::U8 | Self::E4M3 | Self::E5M2 => 1,
            Self::I16 | Self::U16 | Self::F16 | Self::Bf16 => 2,
            Self::I32 | Self::U32 | Self::F32 => 4,
            Self::I64 | Self::U64 | Self::F64 => 8,
        }
    }

    /// The data type with this wire code.
    #[must_use]
    pub fn from_code(code: u8) -> Option<Self> {
        Self::ALL.get(code as usize).copied()
    }

    /// The wire code.
    #[must_use]
    pub const fn code(self) -> u8 {
        self as u8
    }

    /// True for f16, bf16, f32, f64 and the 8-bit floats.
    #[must_use]
    pub const fn is_float(self) -> bool {
        matches!(self, Self::F16 | Self::Bf16 | Self::F32 | Self::F64 | Self::E4M3 | Self::E5M2)
    }

    /// The name used in messages, on command lines and in JSON (`f32`, `bf16`, …).
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Bool => "bool",
            Self::I8 => "i8",
            Self::U8 => "u8",
            Self::I16 => "i16",
            Self::U16 => "u16",
            Self::I32 => "i32",
            Self::U32 => "u32",
            Self::I64 => "i64",
            Self::U64 => "u64",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::F32 => "f32",
            Self::F64 => "f64",
            Self::E4M3 => "e4m3",
            Self::E5M2 => "e5m2",
        }
    }

    /// Parses a name; accepts our short names and nccl-tests' (`float`, `half`, `int32`, …).
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        let alias = match name {
            "float" => Self::F32,
            "double" => Self::F64,
            "half" => Self::F16,
            "bfloat16" => Self::Bf16,
            "int8" => Self::I8,
            "uint8" => Self::U8,
            "int32" => Self::I32,
            "uint32" => Self::U32,
            "int64" => Self::I64,
            "uint64" => Self::U64,
            "f8e4m3" => Self::E4M3,
            "f8e5m2" => Self::E5M2,
            other => return Self::ALL.into_iter().find(|d| d.name() == other),
        };
        Some(alias)
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Plain data that can be moved between ranks as bytes.
///
/// Implement it for your own structs to send, broadcast or gather them. Such a type travels as
/// [`DType::U8`]; the element counts in errors and observers are then bytes.
///
/// # Safety
///
/// * `size_of::<Self>()` is [`UNITS`](Self::UNITS) times the size of [`DTYPE`](Self::DTYPE), as by default.
/// * Every byte of a value is initialised (no padding, no `MaybeUninit`).
/// * Every bit pattern is a valid value — except for `bool`, which the library normalises itself.
/// * The type holds no pointers, references or other process-local meaning that a peer could not use.
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot travel between ranks",
    note = "`usize` and `isize` differ between machines: convert to `u64` or `i64`",
    note = "an array of arrays is one buffer after `as_flattened()`",
    note = "structs of your own: see the safety rules of `Pod` and implement it"
)]
pub unsafe trait Pod: Copy + Send + Sync + 'static {
    /// The element type on the wire.
    const DTYPE: DType = DType::U8;
    /// How many wire elements make one value.
    const UNITS: usize = size_of::<Self>();
}

/// A [`Pod`] that reductions understand: exactly one [`DType`] element.
///
/// Which operators apply to it is decided by [`Operator`](crate::op::Operator).
pub trait Element: Pod {}

macro_rules! elements {
    ($($t:ty => $d:ident),* $(,)?) => {$(
        // SAFETY: primitive or transparent wrapper without padding; every bit pattern is valid
        // (`bool` is covered by the normalisation promised in the trait's contract).
        unsafe impl Pod for $t {
            const DTYPE: DType = DType::$d;
            const UNITS: usize = 1;
        }
        impl Element for $t {}
    )*};
}

elements! {
    bool => Bool, i8 => I8, u8 => U8, i16 => I16, u16 => U16, i32 => I32, u32 => U32,
    i64 => I64, u64 => U64, f16 => F16, bf16 => Bf16, f32 => F32, f64 => F64,
    E4M3 => E4M3, E5M2 => E5M2,
}

/// An 8-bit float with 4 exponent and 3 mantissa bits (OCP FP8 E4M3, finite-only: no infinities).
///
/// A storage type: arithmetic goes through `f32`. Conversion rounds to nearest even and saturates
/// at ±448; NaN stays NaN.
#[repr(transparent)]
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct E4M3(pub u8);

/// An 8-bit float with 5 exponent and 2 mantissa bits (OCP FP8 E5M2).
///
/// A storage type: arithmetic goes through `f32`. Conversion rounds to nearest even and saturates
/// at ±57344, as CUDA's `__NV_SATFINITE` does; NaN stays NaN.
#[repr(transparent)]
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct E5M2(pub u8);

impl E4M3 {
    /// The value as `f32` (exact).
    #[must_use]
    pub fn to_f32(self) -> f32 {
        let mag = self.0 & 0x7f;
        if mag == 0x7f {
            return f32::NAN.copysign(if self.0 & 0x80 != 0 { -1.0 } else { 1.0 });
        }
        decode_f8(self.0, 4, 3, 7)
    }

    /// The nearest value, ties to even, saturating at ±448.
    #[must_use]
    pub fn from_f32(x: f32) -> Self {
        let sign = if x.is_sign_negative() { 0x80 } else { 0 };
        if x.is_nan() {
            return Self(sign | 0x7f);
        }
        Self(sign | encode_f8(x.abs(), 3, 7, 0x7e))
    }
}

impl E5M2 {
    /// The value as `f32` (exact).
    #[must_use]
    pub fn to_f32(self) -> f32 {
        let (mag, neg) = (self.0 & 0x7f, self.0 & 0x80 != 0);
        let sign = if neg { -1.0 } else { 1.0 };
        match mag {
            0x7c => f32::INFINITY * sign,
            0x7d..=0x7f => f32::NAN.copysign(sign),
            _ => decode_f8(self.0, 5, 2, 15),
        }
    }

    /// The nearest value, ties to even, saturating at ±57344.
    #[must_use]
    pub fn from_f32(x: f32) -> Self {
        let sign = if x.is_sign_negative() { 0x80 } else { 0 };
        if x.is_nan() {
            return Self(sign | 0x7f);
        }
        Self(sign | encode_f8(x.abs(), 2, 15, 0x7b))
    }
}

fn decode_f8(bits: u8, exp_bits: u32, man_bits: u32, bias: i32) -> f32 {
    let sign = if bits & 0x80 != 0 { -1.0f32 } else { 1.0 };
    let exp = i32::from((bits >> man_bits) & ((1 << exp_bits) - 1));
    let man = f32::from(bits & ((1 << man_bits) - 1)) / f32::from(1u8 << man_bits);
    if exp == 0 { sign * man * 2f32.powi(1 - bias) } else { sign * (1.0 + man) * 2f32.powi(exp - bias) }
}

/// Encodes a non-negative, non-NaN value; `max` is the code of the largest finite value.
fn encode_f8(x: f32, man_bits: u32, bias: i32, max: u8) -> u8 {
    if x == 0.0 {
        return 0;
    }
    // The exponent of x, not below the smallest normal's: smaller values are subnormal multiples.
    let exp = (x.to_bits() >> 23) as i32 - 127;
    let e = exp.max(1 - bias);
    // Exact: a power-of-two scaling that puts one unit in the last place at 1.0.
    let scaled = f64::from(x) * 2f64.powi(man_bits as i32 - e);
    let q = scaled.round_ties_even();
    let base = f64::from((e + bias - 1) << man_bits);
    let code = base + q;
    if code >= f64::from(max) { max } else { code as u8 }
}

macro_rules! f8_fmt {
    ($($t:ty),*) => {$(
        impl fmt::Debug for $t {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Debug::fmt(&self.to_f32(), f)
            }
        }
        impl fmt::Display for $t {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Display::fmt(&self.to_f32(), f)
            }
        }
    )*};
}
f8_fmt!(E4M3, E5M2);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_and_names_round_trip() {
        for d in DType::ALL {
            assert_eq!(DType::from_code(d.code()), Some(d));
            assert_eq!(DType::from_name(d.name()), Some(d));
        }
        assert_eq!(DType::from_code(15), None);
        assert_eq!(DType::from_name("float"), Some(DType::F32));
        assert_eq!(DType::from_name("quux"), None);
    }

    #[test]
    fn fp8_round_trips_every_code_and_saturates() {
        for b in 0..=255u8 {
            let v = E4M3(b).to_f32();
            let back = E4M3::from_f32(v);
            if v.is_nan() {
                assert!(back.to_f32().is_nan());
            } else {
                assert_eq!(back.0, b, "e4m3 {b:#x} = {v}");
            }
            let v = E5M2(b).to_f32();
            let back = E5M2::from_f32(v);
            if v.is_nan() {
                assert!(back.to_f32().is_nan());
            } else if v.is_infinite() {
                assert_eq!(back.to_f32(), 57344f32.copysign(v));
            } else {
                assert_eq!(back.0, b, "e5m2 {b:#x} = {v}");
            }
        }
        assert_eq!(E4M3::from_f32(1e9).to_f32(), 448.0);
        assert_eq!(E4M3::from_f32(-1e9).to_f32(), -448.0);
        assert_eq!(E5M2::from_f32(1e9).to_f32(), 57344.0);
        // Halfway between 1.0 and 1.125 goes to even.
        assert_eq!(E4M3::from_f32(1.0625).to_f32(), 1.0);
        assert_eq!(E4M3::from_f32(1.1875).to_f32(), 1.25);
    }
}
