//! The vector code and the choice of it, once per process. All `unsafe` of reductions is in here.
//!
//! The portable loops define the results; everything here gives the same bits, tested over all inputs where there are few
//! enough. What the compiler vectorises well by itself is the portable loop, compiled again for AVX2 ([`versioned`]). Written
//! by hand is what it does not: sums and products of floats ([`explicit`]).

use std::fmt;
use std::sync::OnceLock;

use super::kernels::{self, Op};
use super::lanes::Lane;
use crate::dtype::DType;
use crate::op::ReduceOp;

// Miri interprets neither the instructions nor the assembly.
#[cfg(all(target_arch = "x86_64", not(miri)))]
mod x86;

const VARIABLE: &str = "RUSTCOMMS_SIMD";

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[cfg_attr(not(all(target_arch = "x86_64", not(miri))), allow(dead_code))]
enum Isa {
    Portable,
    /// AVX2 and F16C.
    Avx2,
    /// AVX-512 F, BW, DQ, VL and BF16, besides AVX2 and F16C.
    Avx512,
}

/// A set of instructions **that this processor has**: only detection makes one above [`PORTABLE`](Self::PORTABLE), which is what
/// makes it safe to run the code chosen by it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Level(Isa);

impl Level {
    pub(super) const PORTABLE: Self = Self(Isa::Portable);

    pub(super) const fn name(self) -> &'static str {
        match self.0 {
            Isa::Portable => "portable",
            Isa::Avx2 => "avx2",
            Isa::Avx512 => "avx512",
        }
    }

    /// The best that this processor has.
    pub(super) fn detected() -> Self {
        #[cfg(all(target_arch = "x86_64", not(miri)))]
        if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("f16c") {
            if is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512vl")
                && is_x86_feature_detected!("avx512bf16")
            {
                return Self(Isa::Avx512);
            }
            return Self(Isa::Avx2);
        }
        Self::PORTABLE
    }

    /// Every level that this processor has, from the least.
    #[cfg(test)]
    pub(super) fn all() -> Vec<Self> {
        let all = [Self::PORTABLE, Self(Isa::Avx2), Self(Isa::Avx512)];
        all.into_iter().filter(|&l| l <= Self::detected()).collect()
    }

    /// The level named, or this one if it is lower. `None` if there is no level of that name.
    pub(super) fn capped(self, name: &str) -> Option<Self> {
        let asked = [Isa::Portable, Isa::Avx2, Isa::Avx512].into_iter().find(|&i| Self(i).name() == name)?;
        Some(self.min(Self(asked)))
    }

    /// The level that this process uses.
    pub(super) fn current() -> Self {
        static CURRENT: OnceLock<Level> = OnceLock::new();
        *CURRENT.get_or_init(|| {
            let best = Self::detected();
            match std::env::var(VARIABLE) {
                Ok(name) if !name.is_empty() => best.capped(&name).unwrap_or_else(|| {
                    tracing::warn!("{VARIABLE}={name} is none of portable, avx2, avx512; using {}", best.name());
                    best
                }),
                _ => best,
            }
        })
    }
}

/// Whether the variable says something that exists.
pub(crate) fn check_environment() -> crate::Result<()> {
    let Some(text) = std::env::var_os(VARIABLE).filter(|v| !v.is_empty()) else { return Ok(()) };
    if text.to_str().is_some_and(|t| ["portable", "avx2", "avx512"].contains(&t)) {
        return Ok(());
    }
    let text = text.to_string_lossy().chars().take(80).collect::<String>();
    Err(crate::Error::invalid(format!("{VARIABLE} is '{text}'; it can be portable, avx2 or avx512")))
}

/// The instructions that reductions on this machine use: `portable`, `avx2` (with F16C) or `avx512` (with BF16).
///
/// Chosen once per process from what the processor has. The environment variable `RUSTCOMMS_SIMD` caps it at one of these
/// names, for tests and diagnosis; it never asks for more than there is; a value that is none of them is an error when a
/// communicator is made. Results are the same, bit for bit, at each level.
///
/// # Examples
///
/// ```
/// assert!(["portable", "avx2", "avx512"].contains(&comm_core::simd_level()));
/// ```
#[must_use]
pub fn simd_level() -> &'static str {
    Level::current().name()
}

/// `acc = acc op x` over bytes of any alignment. Elements that only one of the two has are left alone.
///
/// Invariant: the function may be run on this processor.
#[derive(Clone, Copy)]
pub(super) struct Kernel(unsafe fn(&mut [u8], &[u8]));

impl Kernel {
    /// Stands where the legality table has a hole; never run, because every constructor of a reducer checks the table.
    pub(super) fn none() -> Self {
        fn none(_: &mut [u8], _: &[u8]) {
            debug_assert!(false, "a reducer was built for a pair that the legality table does not allow");
        }
        Self(none)
    }

    /// Code that needs no instructions beyond the target's.
    pub(super) fn portable(f: fn(&mut [u8], &[u8])) -> Self {
        Self(f)
    }

    pub(super) fn run(self, acc: &mut [u8], x: &[u8]) {
        // SAFETY: a function in a `Kernel` is safe but for the instructions it needs, and this module chose it by a
        // `Level`, which has been detected.
        unsafe { (self.0)(acc, x) }
    }
}

impl fmt::Debug for Kernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Kernel")
    }
}

/// The portable loop over `O`, compiled for `level`.
pub(super) fn versioned<T: Lane, O: Op<T>>(level: Level) -> Kernel {
    match level.0 {
        #[cfg(all(target_arch = "x86_64", not(miri)))]
        Isa::Avx512 => Kernel(x86::zip_avx512::<T, O>),
        #[cfg(all(target_arch = "x86_64", not(miri)))]
        Isa::Avx2 => Kernel(x86::zip_avx2::<T, O>),
        _ => kernels::portable::<T, O>(),
    }
}

/// The portable loop over one buffer, compiled for `level`.
pub(super) fn map<T: Lane>(level: Level, buf: &mut [u8], f: impl Fn(T) -> T) {
    match level.0 {
        #[cfg(all(target_arch = "x86_64", not(miri)))]
        // SAFETY: a `Level` this high has been detected.
        Isa::Avx2 | Isa::Avx512 => unsafe { x86::map_avx2(buf, f) },
        _ => kernels::map(buf, f),
    }
}

/// Code written for just this operator and type, if there is some at `level`.
pub(super) fn explicit(op: ReduceOp, dtype: DType, level: Level) -> Option<Kernel> {
    match level.0 {
        #[cfg(all(target_arch = "x86_64", not(miri)))]
        Isa::Avx512 => x86::avx512(op, dtype).or_else(|| x86::avx2(op, dtype)).map(Kernel),
        #[cfg(all(target_arch = "x86_64", not(miri)))]
        Isa::Avx2 => x86::avx2(op, dtype).map(Kernel),
        _ => {
            let _ = (op, dtype);
            None
        }
    }
}
