//! The cost model of links and ranks.

use serde_json::{Value, json};

/// What a byte costs, in picoseconds per mebibyte.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rates {
    /// Keeps a port busy: the reciprocal of the bandwidth.
    pub beta: u64,
    /// Keeps the processor busy that hands it to the kernel, and the one that takes it out. Not more than `beta`.
    pub copy: u64,
    /// Keeps the processor busy that folds it.
    pub gamma: u64,
}

/// What messages and folds cost. Times are integers, so that equal schedules take exactly equal times.
///
/// A rank is one processor, one port out and one port in; each does one thing after the other.
///
/// * Sending costs the processor `overhead` and `copy` per byte; the port out is busy for `beta` per byte meanwhile and after.
/// * The first byte is at the receiver's port `alpha` after the processor has begun, or after the port was free if that was later; so `alpha` is what others
///   call latency and the sender's overhead, but may be less, where a message arrives before its sender has done with it. The port takes `beta` per byte, as the bytes
///   come, unless it is busy.
/// * Receiving costs the processor `copy` per byte, as the bytes come, unless it is busy, but the last `chunk` bytes only when all have
///   come; and then `overhead`. Folding costs it `gamma` per byte.
/// * Copies within a rank are free, and the network between the ports is never the bottleneck.
///
/// Bytes of a rank's buffer up to `knee` have the rates `near`, those beyond it `far`: what does not stay in the cache costs more. All messages
/// of an operation have the mean over the operation's buffer, see [`at`](Self::at).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Model {
    /// From the beginning of a send to the arrival of its first byte, in picoseconds.
    pub alpha: u64,
    /// What a message costs the sender's processor, and the receiver's, in picoseconds.
    pub overhead: u64,
    /// Bytes that are handed on at once.
    pub chunk: usize,
    /// Bytes of a buffer that stay in the cache.
    pub knee: usize,
    /// Rates of these.
    pub near: Rates,
    /// Rates of the others.
    pub far: Rates,
}

/// A [`Model`] for an operation of one size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Costs {
    /// As in [`Model`].
    pub alpha: u64,
    /// As in [`Model`].
    pub overhead: u64,
    chunk: usize,
    rates: Rates,
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

impl Rates {
    /// From seconds per byte.
    #[must_use]
    pub fn from_seconds(beta: f64, copy: f64, gamma: f64) -> Self {
        let per_mib = |x: f64| picos(x * MIB as f64);
        Self { beta: per_mib(beta), copy: per_mib(copy), gamma: per_mib(gamma) }
    }

    fn to_json(self) -> Value {
        let per_byte = |x: u64| x as f64 / 1e12 / MIB as f64;
        json!({
            "beta_s_per_byte": per_byte(self.beta),
            "copy_s_per_byte": per_byte(self.copy),
            "gamma_s_per_byte": per_byte(self.gamma),
        })
    }

    fn from_json(v: &Value) -> Option<Self> {
        let [beta, copy, gamma] = ["beta_s_per_byte", "copy_s_per_byte", "gamma_s_per_byte"].map(|k| number(v, k));
        Some(Self::from_seconds(beta?, copy?, gamma?))
    }
}

fn number(v: &Value, key: &str) -> Option<f64> {
    v.get(key)?.as_f64().filter(|x| x.is_finite() && *x >= 0.0)
}

impl Model {
    /// The bytes that loopback hands on at once: its largest packet.
    pub const CHUNK: usize = 64 << 10;

    /// With rates that do not depend on the buffer.
    #[must_use]
    pub const fn flat(alpha: u64, overhead: u64, rates: Rates) -> Self {
        Self { alpha, overhead, chunk: Self::CHUNK, knee: usize::MAX, near: rates, far: rates }
    }

    /// What an operation costs whose ranks have buffers of so many bytes.
    #[must_use]
    pub fn at(&self, buffer: usize) -> Costs {
        let mean = |near: u64, far: u64| {
            let (all, beyond) = (buffer.max(1) as u128, buffer.saturating_sub(self.knee) as u128);
            let t = (u128::from(near) * (all - beyond) + u128::from(far) * beyond) / all;
            u64::try_from(t).unwrap_or(u64::MAX)
        };
        let rates = Rates {
            beta: mean(self.near.beta, self.far.beta),
            copy: mean(self.near.copy, self.far.copy),
            gamma: mean(self.near.gamma, self.far.gamma),
        };
        Costs { alpha: self.alpha, overhead: self.overhead, chunk: self.chunk, rates }
    }

    /// As JSON; numbers in seconds, bytes and seconds per byte.
    #[must_use]
    pub fn to_json(&self) -> Value {
        json!({
            "alpha_s": self.alpha as f64 / 1e12,
            "overhead_s": self.overhead as f64 / 1e12,
            "chunk_bytes": self.chunk,
            // There is none where rates do not depend on the buffer.
            "knee_bytes": (self.knee != usize::MAX).then_some(self.knee),
            "near": self.near.to_json(),
            "far": self.far.to_json(),
        })
    }

    /// From what [`to_json`](Self::to_json) makes, or from a file of results, which has it under `model`.
    #[must_use]
    pub fn from_json(v: &Value) -> Option<Self> {
        let v = v.get("model").unwrap_or(v);
        let bytes = |x: &Value| usize::try_from(x.as_u64()?).ok();
        let knee = match v.get("knee_bytes")? {
            Value::Null => usize::MAX,
            x => bytes(x)?,
        };
        Some(Self {
            alpha: picos(number(v, "alpha_s")?),
            overhead: picos(number(v, "overhead_s")?),
            chunk: bytes(v.get("chunk_bytes")?)?,
            knee,
            near: Rates::from_json(v.get("near")?)?,
            far: Rates::from_json(v.get("far")?)?,
        })
    }
}

impl Costs {
    /// How long a message of so many bytes keeps a port busy, in picoseconds.
    #[must_use]
    pub fn port(&self, bytes: usize) -> u64 {
        scaled(self.rates.beta, bytes)
    }

    /// How long handing on so many bytes keeps a processor busy, in picoseconds.
    #[must_use]
    pub fn copy(&self, bytes: usize) -> u64 {
        scaled(self.rates.copy, bytes)
    }

    /// The part of that of a received message that cannot begin before all of it has come.
    #[must_use]
    pub fn last_copy(&self, bytes: usize) -> u64 {
        self.copy(bytes.min(self.chunk))
    }

    /// How long folding so many bytes takes, in picoseconds.
    #[must_use]
    pub fn fold(&self, bytes: usize) -> u64 {
        scaled(self.rates.gamma, bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_model_survives_json() {
        let near = Rates::from_seconds(1.5e-10, 1e-10, 0.9e-10);
        let far = Rates::from_seconds(3.5e-10, 2e-10, 1.9e-10);
        let flat = Model::flat(4_250_000, 700_000, near);
        for m in [flat, Model { knee: 1 << 20, far, ..flat }] {
            assert_eq!(Model::from_json(&m.to_json()), Some(m));
            assert_eq!(Model::from_json(&json!({ "model": m.to_json() })), Some(m));
        }
        assert_eq!(Model::from_json(&json!({ "alpha_s": 1.0 })), None);
        let c = flat.at(8);
        assert_eq!((c.port(0), c.port(1 << 20), c.fold(1)), (0, near.beta, 90));
        assert_eq!((c.last_copy(100), c.last_copy(1 << 20)), (c.copy(100), c.copy(Model::CHUNK)));
    }

    #[test]
    fn what_lies_beyond_the_knee_costs_more() {
        let rates = |x| Rates { beta: x, copy: x, gamma: x };
        let m = Model { knee: 1000, far: rates(5 << 20), ..Model::flat(0, 0, rates(1 << 20)) };
        for (bytes, t) in [(1, 1), (1000, 1000), (1001, 1005), (2000, 6000), (11_000, 51_000)] {
            let c = m.at(bytes);
            // The mean is rounded down to a picosecond per MiB.
            assert!([c.port(bytes), c.copy(bytes), c.fold(bytes)].iter().all(|x| (t - 1..=t).contains(x)), "{bytes}");
        }
        assert_eq!(m.at(0).port(10), 10);
    }
}
