//! [`Reducer`]: an operator bound to an element type, as backends run it, and the kernels.
//!
//! Kernels work on bytes of any alignment. 16-bit and 8-bit floats are combined in `f32` and rounded once per step.
//! `lanes` defines the arithmetic, `kernels` has the portable loops, `simd` the vector code, which gives the same bits.

use std::cell::Cell;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, OnceLock};

use crate::dtype::DType;
use crate::error::{Error, ErrorKind, Result};
use crate::op::ReduceOp;
use kernels::{divide, kernel, scale};
use simd::{Kernel, Level};

mod kernels;
mod lanes;
mod simd;
#[cfg(test)]
mod tests;

pub(crate) use simd::check_environment;
pub use simd::simd_level;

/// Folds a user's values; `acc` and `x` have equal length. `x` may be used as scratch.
pub(crate) trait CustomFold: Send + Sync {
    fn fold(&self, acc: &mut [u8], x: &mut [u8]);
}

/// What this thread does inside a custom operator. Folds run under the backend's locks, so a call into a
/// communicator from there would wait for its own caller.
#[derive(Default)]
struct Fold {
    depth: Cell<u32>,
    abort: Cell<Option<String>>,
}

thread_local! {
    static FOLD: Fold = Fold::default();
}

/// Whether the calling thread is inside a custom operator.
pub(crate) fn in_fold() -> bool {
    FOLD.with(|s| s.depth.get() > 0)
}

/// Whether calls are possible on this thread: not inside a custom operator, which runs where the backend cannot be
/// entered again. For backends and control planes; a [`Communicator`](crate::Communicator) asks by itself.
///
/// # Errors
///
/// `InvalidArgument` inside a custom operator.
pub fn check_outside_operator() -> Result<()> {
    if in_fold() {
        return Err(Error::invalid("a custom operator must not call a communicator; fold values only"));
    }
    Ok(())
}

/// Makes the operation whose operator runs on this thread fail once the operator returns.
pub(crate) fn abort_fold(reason: &str) {
    FOLD.with(|s| s.abort.set(Some(reason.to_owned())));
}

#[derive(Clone)]
enum Combine {
    Kernel(Kernel),
    /// A user's function, and whether it has panicked.
    Custom(Arc<dyn CustomFold>, Arc<OnceLock<String>>),
}

/// An operator bound to an element type.
///
/// One step of a reduction is [`fold`](Self::fold) (`acc = acc op x`) or
/// [`fold_rev`](Self::fold_rev) (`acc = x op acc`). A rank's own contribution first goes through
/// [`prescale`](Self::prescale), the final result through [`finish`](Self::finish).
#[derive(Clone)]
pub struct Reducer {
    op: ReduceOp,
    dtype: DType,
    unit: usize,
    commutative: bool,
    factor: Option<f64>,
    combine: Combine,
}

impl fmt::Debug for Reducer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reducer")
            .field("op", &self.op())
            .field("dtype", &self.dtype)
            .field("unit", &self.unit)
            .finish_non_exhaustive()
    }
}

impl Reducer {
    /// The built-in operator `op` on elements of type `dtype`.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Unsupported`] when the legality table does not allow the pair. `PreMulSum`,
    /// `MinLoc`, `MaxLoc` and `Custom` carry data or types that a code cannot, and exist only as
    /// types in [`op`](crate::op).
    pub fn builtin(op: ReduceOp, dtype: DType) -> Result<Self> {
        if op.is_legal(dtype) {
            return Ok(Self::builtin_unchecked(op, dtype));
        }
        let reason = match op {
            ReduceOp::PreMulSum | ReduceOp::MinLoc | ReduceOp::MaxLoc | ReduceOp::Custom => {
                format!("it exists only in the typed API; use comm_core::op's `{op:?}`")
            }
            _ => format!("{op} is not defined on {dtype}; see ReduceOp::is_legal for the table"),
        };
        Err(Error::new(ErrorKind::Unsupported { what: format!("operator {op} on {dtype}"), reason }))
    }

    pub(crate) fn builtin_unchecked(op: ReduceOp, dtype: DType) -> Self {
        let combine = Combine::Kernel(kernel(op, dtype, Level::current()));
        Self { op, dtype, unit: dtype.size(), commutative: true, factor: None, combine }
    }

    pub(crate) fn from_fold(op: ReduceOp, commutative: bool, fold: Arc<dyn CustomFold>, unit: usize) -> Self {
        Self { op, dtype: DType::U8, unit, commutative, factor: None, combine: Combine::Custom(fold, Arc::default()) }
    }

    pub(crate) fn with_dtype(mut self, dtype: DType) -> Self {
        self.dtype = dtype;
        self
    }

    pub(crate) fn with_factor(mut self, factor: f64) -> Self {
        self.factor = Some(factor);
        self
    }

    /// `Aborted` by `rank` if a custom operator has panicked, or called `abort`, during this operation; what it folded is then
    /// worthless. Backends ask before they pass results on and before they report success.
    ///
    /// # Errors
    ///
    /// As above.
    pub fn check(&self, rank: usize) -> Result<()> {
        match &self.combine {
            Combine::Custom(_, panicked) => match panicked.get() {
                Some(text) => Err(Error::new(ErrorKind::Aborted { rank, cause: text.clone() })),
                None => Ok(()),
            },
            Combine::Kernel(_) => Ok(()),
        }
    }

    /// The operator's code. A factor makes a sum a [`ReduceOp::PreMulSum`].
    #[must_use]
    pub fn op(&self) -> ReduceOp {
        if self.factor.is_some() { ReduceOp::PreMulSum } else { self.op }
    }

    /// The element type on the wire.
    #[must_use]
    pub const fn dtype(&self) -> DType {
        self.dtype
    }

    /// Bytes that one step treats as a whole; buffers may be cut only at multiples of it.
    #[must_use]
    pub const fn unit(&self) -> usize {
        self.unit
    }

    /// Whether contributions may be folded in any order. If not: rank order.
    #[must_use]
    pub const fn is_commutative(&self) -> bool {
        self.commutative
    }

    /// The factor of a `PreMulSum`.
    #[must_use]
    pub const fn factor(&self) -> Option<f64> {
        self.factor
    }

    /// `acc = acc op x`, element by element. `x` may be overwritten.
    pub fn fold(&self, acc: &mut [u8], x: &mut [u8]) {
        debug_assert_eq!(acc.len(), x.len());
        match &self.combine {
            Combine::Kernel(kernel) => kernel.run(acc, x),
            Combine::Custom(f, panicked) => {
                // Folds run under locks and on the engine's thread: a panic must not unwind through those.
                let depth = FOLD.with(|s| s.depth.replace(s.depth.get() + 1));
                let folded = catch_unwind(AssertUnwindSafe(|| f.fold(acc, x)));
                FOLD.with(|s| s.depth.set(depth));
                // The first text is kept.
                if let Err(payload) = folded {
                    let _ = panicked.set(format!("its custom operator panicked: {}", panic_text(payload.as_ref())));
                }
                if let Some(reason) = FOLD.with(|s| s.abort.take()) {
                    let _ = panicked.set(format!("its custom operator aborted: {reason}"));
                }
            }
        }
    }

    /// `acc = x op acc`, element by element. `x` is overwritten.
    ///
    /// Runs the same kernel as [`fold`](Self::fold) with the operands in their places, so that two
    /// ranks that fold the same pair from either side get the same bits, NaN payloads included.
    pub fn fold_rev(&self, acc: &mut [u8], x: &mut [u8]) {
        self.fold(x, acc);
        acc.copy_from_slice(x);
    }

    /// Applies the factor of a `PreMulSum` to a rank's own contribution; nothing for other operators.
    pub fn prescale(&self, buf: &mut [u8]) {
        if let Some(factor) = self.factor {
            scale(self.dtype, buf, factor, Level::current());
        }
    }

    /// Divides the sum of an `Avg` by the number of ranks; nothing for other operators.
    pub fn finish(&self, buf: &mut [u8], ranks: usize) {
        if self.needs_finish(ranks) {
            divide(self.dtype, buf, ranks, Level::current());
        }
    }

    /// Whether [`prescale`](Self::prescale) changes anything.
    #[must_use]
    pub const fn needs_prescale(&self) -> bool {
        self.factor.is_some()
    }

    /// Whether [`finish`](Self::finish) changes anything.
    #[must_use]
    pub fn needs_finish(&self, ranks: usize) -> bool {
        self.op == ReduceOp::Avg && ranks > 1
    }
}

/// What a panic's payload says.
#[must_use]
pub fn panic_text(payload: &(dyn std::any::Any + Send)) -> String {
    let text = payload.downcast_ref::<&str>().map(|s| (*s).to_owned());
    text.or_else(|| payload.downcast_ref::<String>().cloned()).unwrap_or_else(|| "(no message)".into())
}

/// Makes received `bool` bytes valid: every non-zero byte becomes 1.
pub fn normalize_bools(bytes: &mut [u8]) {
    for b in bytes {
        *b = u8::from(*b != 0);
    }
}
