//! Where the model's numbers come from: two processes on this machine, over backend-tcp.
//!
//! Not a benchmark of the library: what is wanted are the costs that a schedule's single message has, so messages go as schedules send them,
//! through broadcasts between two ranks. Other programs run on the machine too, and take the processors away for milliseconds: so the
//! times are of short batches, many of them, and the one below which a tenth of them lie counts. A median would tell of the others.

use std::time::Duration;

use rustcomms::{CommOptions, Communicator, DType, Error, ReduceOp, Reducer, Result};
use serde_json::{Value, json};

use super::model::{Fit, Model, Sample, fit};
use crate::{pin, time};

/// What was measured.
#[derive(Clone, Debug, PartialEq)]
pub struct Measured {
    /// One-way times.
    pub samples: Vec<Sample>,
    /// Seconds per message of many small ones in a row: the slower of sending and receiving.
    pub gap: f64,
    /// Seconds per byte of folding sums of `f32`.
    pub gamma: f64,
}

/// Sizes of the one-way times.
const SIZES: [usize; 8] = [8, 64, 1 << 10, 8 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20];

/// Batches of one size in a round, but of the longest messages.
const BATCHES: usize = 10;

/// Small messages in a row.
const BURST: u32 = 64;

/// Measures as one of two ranks; both call it, with the same number of rounds.
///
/// # Errors
///
/// Those of the communicator.
pub fn measure(rounds: usize) -> Result<Measured> {
    let comm = rustcomms::connect(CommOptions::new().name("scale"))?;
    pin(comm.rank());
    let mut times = vec![Vec::new(); SIZES.len()];
    let mut bursts = Vec::new();
    let mut bufs: Vec<Vec<u8>> = SIZES.iter().map(|bytes| vec![1; *bytes]).collect();
    // Rounds are interleaved, so that a bad moment of the machine does not hit one size alone.
    for _ in 0..rounds {
        for (times, x) in times.iter_mut().zip(&mut bufs) {
            let n = ((64 << 10) / x.len()).clamp(1, 10) as u32;
            comm.barrier()?;
            for _ in 0..if x.len() > 1 << 20 { 3 } else { BATCHES } {
                times.push(repeat(n, || there_and_back(&comm, x))? / 2.0);
            }
        }
        comm.barrier()?;
        let mut x = [1u8; 8];
        for _ in 0..BATCHES {
            bursts.push(repeat(1, || {
                for _ in 0..BURST {
                    comm.broadcast(&mut x[..], 0)?;
                }
                comm.broadcast(&mut x[..], 1)
            })?);
        }
    }
    let gamma = gamma(rounds)?;
    comm.finalize(Duration::from_secs(10))?;
    let samples: Vec<_> = SIZES.iter().zip(times).map(|(&bytes, t)| Sample { bytes, seconds: tenth(t) }).collect();
    let there_and_back = 2.0 * samples.first().map_or(0.0, |s| s.seconds);
    let gap = (tenth(bursts) - there_and_back) / f64::from(BURST - 1);
    Ok(Measured { samples, gap: gap.max(0.0), gamma })
}

/// The time below which a tenth of them lie; 0 of none.
fn tenth(mut times: Vec<f64>) -> f64 {
    times.sort_unstable_by(f64::total_cmp);
    times.get(times.len() / 10).copied().unwrap_or_default()
}

fn there_and_back(comm: &Communicator, x: &mut [u8]) -> Result<()> {
    comm.broadcast(&mut *x, 0)?;
    comm.broadcast(&mut *x, 1)
}

/// Mean seconds of `n` calls.
fn repeat(n: u32, mut f: impl FnMut() -> Result<()>) -> Result<f64> {
    let mut ended = Ok(());
    let t = time(n, || {
        if ended.is_ok() {
            ended = f();
        }
    });
    ended.map(|()| t.as_secs_f64())
}

/// Seconds per byte of a sum of `f32`, in blocks as long as the library's segments.
fn gamma(rounds: usize) -> Result<f64> {
    let (mut acc, mut x) = (vec![0u8; 256 << 10], vec![0u8; 256 << 10]);
    let reducer = Reducer::builtin(ReduceOp::Sum, DType::F32)?;
    let bytes = acc.len() as f64;
    let times = (0..rounds.max(5)).map(|_| time(20, || reducer.fold(&mut acc, &mut x)).as_secs_f64() / bytes);
    Ok(tenth(times.collect()))
}

impl Measured {
    /// The line through the one-way times, and the model.
    ///
    /// A message's time is latency and two overheads and its bytes' time. The overhead is the time per message of a row of small
    /// ones, but at most two fifths of the whole, or nothing would be left for the latency.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` when the times do not make a line that rises from above zero.
    pub fn model(&self) -> Result<(Fit, Model)> {
        match fit(&self.samples) {
            Some(f) if f.intercept > 0.0 && f.slope > 0.0 => {
                let overhead = self.gap.min(0.4 * f.intercept);
                let alpha = 2.0f64.mul_add(-overhead, f.intercept);
                Ok((f, Model::from_seconds(alpha, f.slope, overhead, self.gamma)))
            }
            found => Err(Error::invalid(format!(
                "the measured times make no line ({found:?}); run it again, or give the model with --model or --alpha, --beta, --gamma"
            ))),
        }
    }

    /// As JSON.
    #[must_use]
    pub fn to_json(&self) -> Value {
        let samples: Vec<_> = self.samples.iter().map(|s| json!({ "bytes": s.bytes, "seconds": s.seconds })).collect();
        json!({ "samples": samples, "gap_s": self.gap, "gamma_s_per_byte": self.gamma })
    }

    /// From what [`to_json`](Self::to_json) makes.
    #[must_use]
    pub fn from_json(v: &Value) -> Option<Self> {
        let sample = |s: &Value| {
            let bytes = usize::try_from(s.get("bytes")?.as_u64()?).ok()?;
            Some(Sample { bytes, seconds: s.get("seconds")?.as_f64()? })
        };
        let samples = v.get("samples")?.as_array()?.iter().map(sample).collect::<Option<_>>()?;
        Some(Self { samples, gap: v.get("gap_s")?.as_f64()?, gamma: v.get("gamma_s_per_byte")?.as_f64()? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_overhead_leaves_something_for_the_latency() {
        let sample = |bytes: usize| Sample { bytes, seconds: 10e-6 + 1e-10 * bytes as f64 };
        let measured = |gap| Measured { samples: SIZES.map(sample).to_vec(), gap, gamma: 1e-10 };
        let (_, m) = measured(1e-6).model().unwrap();
        assert_eq!((m.alpha, m.overhead), (8_000_000, 1_000_000));
        let (_, m) = measured(30e-6).model().unwrap();
        assert_eq!((m.alpha, m.overhead), (2_000_000, 4_000_000));
        assert!(Measured { samples: Vec::new(), gap: 0.0, gamma: 0.0 }.model().is_err());
        let all = measured(1e-6);
        assert_eq!(Measured::from_json(&all.to_json()), Some(all));
    }
}
