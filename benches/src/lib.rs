//! Side-by-side benchmark programs: each measures ours and a peer, or a floor, in the same run, interleaved,
//! and prints ratios.
//!
//! They are not tests: nothing here asserts on time.

pub mod compare;
pub mod scale;

use std::time::{Duration, Instant};

/// The median of some durations.
#[must_use]
pub fn median(mut xs: Vec<Duration>) -> Duration {
    xs.sort_unstable();
    xs.get(xs.len() / 2).copied().unwrap_or_default()
}

/// The median of some numbers; 0 of none.
#[must_use]
pub fn median_of(mut xs: Vec<f64>) -> f64 {
    xs.sort_unstable_by(f64::total_cmp);
    xs.get(xs.len() / 2).copied().unwrap_or_default()
}

/// Mean time of one of `n` runs of `f`.
pub fn time(n: u32, mut f: impl FnMut()) -> Duration {
    let t = Instant::now();
    for _ in 0..n {
        f();
    }
    t.elapsed() / n
}

/// Runs the calling process on one core.
pub fn pin(core: usize) {
    let mut set = rustix::thread::CpuSet::new();
    set.set(core % std::thread::available_parallelism().map_or(1, std::num::NonZero::get));
    // Without the right to pin, the run is only noisier.
    let _ = rustix::thread::sched_setaffinity(None, &set);
}
