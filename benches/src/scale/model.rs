//! The cost model of links and ranks, and how it is fitted to measurements.

use serde_json::{Value, json};

/// What a message and a fold cost. Times are integers, so that equal schedules take exactly equal times.
///
/// A rank is one processor, one port out and one port in; each does one thing after the other. Sending costs the processor
/// `overhead`, then the port is busy for `beta` per byte; the first byte arrives `alpha` later, the port in takes `beta` per byte
/// (as the bytes come, unless it is busy), and receiving costs the processor `overhead` again. Folding costs it `gamma` per byte.
/// Copies within a rank are free. The network between the ports is never the bottleneck.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Model {
    /// Latency, in picoseconds.
    pub alpha: u64,
    /// Picoseconds that a mebibyte keeps a port busy: the reciprocal of the bandwidth.
    pub beta: u64,
    /// What a message costs the sender's processor, and the receiver's, in picoseconds.
    pub overhead: u64,
    /// Picoseconds that folding a mebibyte takes.
    pub gamma: u64,
}

const MIB: u128 = 1 << 20;

fn scaled(per_mib: u64, bytes: usize) -> u64 {
    // Rounded up: what is not empty takes time.
    let t = (u128::from(per_mib) * bytes as u128).div_ceil(MIB);
    u64::try_from(t).unwrap_or(u64::MAX)
}

fn picos(seconds: f64) -> u64 {
    (seconds * 1e12).round().max(0.0) as u64
}

impl Model {
    /// From seconds per message (latency, overhead) and seconds per byte (beta, gamma).
    #[must_use]
    pub fn from_seconds(alpha: f64, beta: f64, overhead: f64, gamma: f64) -> Self {
        let per_mib = |x: f64| picos(x * MIB as f64);
        Self { alpha: picos(alpha), beta: per_mib(beta), overhead: picos(overhead), gamma: per_mib(gamma) }
    }

    /// How long a message of so many bytes keeps a port busy, in picoseconds.
    #[must_use]
    pub fn port(&self, bytes: usize) -> u64 {
        scaled(self.beta, bytes)
    }

    /// How long folding so many bytes takes, in picoseconds.
    #[must_use]
    pub fn fold(&self, bytes: usize) -> u64 {
        scaled(self.gamma, bytes)
    }

    /// As JSON: `alpha_s`, `beta_s_per_byte`, `overhead_s`, `gamma_s_per_byte`.
    #[must_use]
    pub fn to_json(&self) -> Value {
        let per_byte = |x: u64| x as f64 / 1e12 / MIB as f64;
        json!({
            "alpha_s": self.alpha as f64 / 1e12,
            "beta_s_per_byte": per_byte(self.beta),
            "overhead_s": self.overhead as f64 / 1e12,
            "gamma_s_per_byte": per_byte(self.gamma),
        })
    }

    /// From what [`to_json`](Self::to_json) makes, or from a file of results, which has it under `model`.
    #[must_use]
    pub fn from_json(v: &Value) -> Option<Self> {
        let v = v.get("model").unwrap_or(v);
        let number = |key: &str| v.get(key)?.as_f64().filter(|x| *x >= 0.0);
        Some(Self::from_seconds(
            number("alpha_s")?,
            number("beta_s_per_byte")?,
            number("overhead_s")?,
            number("gamma_s_per_byte")?,
        ))
    }
}

/// A measured one-way time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sample {
    /// Bytes of the message.
    pub bytes: usize,
    /// From call to call, in seconds.
    pub seconds: f64,
}

/// A line through samples.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Fit {
    /// Time of an empty message, in seconds.
    pub intercept: f64,
    /// Seconds per byte.
    pub slope: f64,
}

impl Fit {
    /// How much a sample took longer than the line says, relative to the line.
    #[must_use]
    pub fn residual(&self, s: &Sample) -> f64 {
        let line = self.intercept + self.slope * s.bytes as f64;
        if line > 0.0 { s.seconds / line - 1.0 } else { 0.0 }
    }
}

/// The line with the least squares of *relative* errors: an error of 10 % counts alike at 8 bytes and at 16 MiB.
///
/// `None` for less than two sizes.
#[must_use]
pub fn fit(samples: &[Sample]) -> Option<Fit> {
    let (mut w, mut wx, mut wxx, mut wy, mut wxy) = (0.0, 0.0, 0.0, 0.0, 0.0);
    for s in samples.iter().filter(|s| s.seconds > 0.0) {
        let (x, y, weight) = (s.bytes as f64, s.seconds, 1.0 / (s.seconds * s.seconds));
        w += weight;
        wx += weight * x;
        wxx += weight * x * x;
        wy += weight * y;
        wxy += weight * x * y;
    }
    let det = w * wxx - wx * wx;
    if det <= f64::EPSILON * w * wxx {
        return None;
    }
    Some(Fit { intercept: (wxx * wy - wx * wxy) / det, slope: (w * wxy - wx * wy) / det })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_found_again_and_an_outlier_shows_in_its_residual() {
        let line = |bytes: usize| Sample { bytes, seconds: 5e-6 + 2e-10 * bytes as f64 };
        let mut samples: Vec<_> = [8, 4096, 65536, 1 << 20, 16 << 20].map(line).to_vec();
        let f = fit(&samples).unwrap();
        assert!((f.intercept / 5e-6 - 1.0).abs() < 1e-6 && (f.slope / 2e-10 - 1.0).abs() < 1e-6, "{f:?}");
        samples[2].seconds *= 1.5;
        let f = fit(&samples).unwrap();
        assert!(f.residual(&samples[2]) > 0.2 && f.residual(&samples[0]).abs() < 0.2, "{f:?}");
        assert_eq!(fit(&samples[..1]), None);
    }

    #[test]
    fn a_model_survives_json() {
        let m = Model::from_seconds(4.25e-6, 1.5e-10, 0.7e-6, 0.9e-10);
        assert_eq!(Model::from_json(&m.to_json()), Some(m));
        assert_eq!(Model::from_json(&json!({ "model": m.to_json() })), Some(m));
        assert_eq!(Model::from_json(&json!({ "alpha_s": 1.0 })), None);
        assert_eq!((m.port(0), m.port(1 << 20), m.fold(1)), (0, m.beta, 90));
    }
}
