//! From measured times to a model.

use std::fmt;

use collectives::select::select;
use rustcomms::{Error, Operation, Result};
use serde_json::{Value, json};

use super::case::{Budget, Case, Mode};
use super::model::{Model, Rates};

/// The time of an operation between two ranks: of the algorithm that the library picks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Timing {
    /// Broadcasts are from alternate roots, each after the other: what is measured is one way.
    pub op: Operation,
    /// Bytes as in [`Shape::bytes`](collectives::Shape::bytes).
    pub bytes: usize,
    /// Whether the model is fitted to it, or only compared with it.
    pub fitted: bool,
    /// Median, and the quartiles around it, in seconds.
    pub seconds: f64,
    /// The lower quartile.
    pub low: f64,
    /// The upper quartile.
    pub high: f64,
    /// Batches that count, and those that were taken.
    pub batches: (usize, usize),
}

/// What was measured.
#[derive(Clone, Debug, PartialEq)]
pub struct Measured {
    /// Times of operations.
    pub timings: Vec<Timing>,
    /// Seconds per message of many small ones in a row: the slower of sending and receiving.
    pub gap: f64,
    /// Seconds per byte of folding sums of `f32`, of blocks that stay in the cache and of others.
    pub gammas: (f64, f64),
}

/// A model and how well it fits.
#[derive(Clone, Debug, PartialEq)]
pub struct Fit {
    /// The model.
    pub model: Model,
    /// Whether the overhead is that of messages both ways at once, because the time per message of a row was longer.
    pub capped: bool,
    /// Root of the mean square of relative errors of the times that it was fitted to.
    pub error: f64,
    /// What it says that was timed takes, in seconds, in the order of the timings.
    pub predicted: Vec<f64>,
}

/// Of the time of an empty message, the receiver's overhead takes this much at most, or nothing would be left for the latency.
const MOST_OVERHEAD: f64 = 0.8;

/// A line with a bend.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Bent {
    /// At zero.
    pub intercept: f64,
    /// Slope up to the knee.
    pub near: f64,
    /// Slope beyond it.
    pub far: f64,
}

/// The bent line with the least squares of *relative* errors, so that an error of 10 % counts alike at 8 bytes and at 16 MiB; straight if no
/// point lies beyond the knee, or none before it.
///
/// `None` for too few points.
#[must_use]
pub(super) fn bent(points: &[(f64, f64)], knee: f64) -> Option<Bent> {
    let scale = points.iter().map(|p| p.0).fold(1.0, f64::max);
    let straight = |points: &[(f64, f64)]| {
        let rows: Vec<_> = points.iter().map(|&(x, y)| ([1.0, x / scale, 0.0], y)).collect();
        solve::<2>(&rows).map(|[a, b]| Bent { intercept: a, near: b / scale, far: b / scale })
    };
    let before = points.iter().filter(|p| p.0 <= knee).count();
    if before < 2 || before == points.len() {
        return straight(points);
    }
    let basis = |x: f64| [1.0, x.min(knee) / scale, (x - knee).max(0.0) / scale];
    let rows: Vec<_> = points.iter().map(|&(x, y)| (basis(x), y)).collect();
    solve::<3>(&rows).map(|[a, b, c]| Bent { intercept: a, near: b / scale, far: c / scale })
}

/// Weighted least squares in `K` unknowns by the normal equations.
fn solve<const K: usize>(rows: &[([f64; 3], f64)]) -> Option<[f64; K]> {
    let (mut m, mut v) = ([[0.0f64; K]; K], [0.0f64; K]);
    for (basis, y) in rows.iter().filter(|r| r.1 > 0.0) {
        let w = 1.0 / (y * y);
        for i in 0..K {
            v[i] += w * basis[i] * y;
            for j in 0..K {
                m[i][j] += w * basis[i] * basis[j];
            }
        }
    }
    // Gauss, with the diagonal as pivots: the matrix is positive definite if there is a solution.
    let sizes: [f64; K] = std::array::from_fn(|i| m[i][i]);
    for i in 0..K {
        if m[i][i] <= 1e-12 * sizes[i] {
            return None;
        }
        let (pivot, value) = (m[i], v[i]);
        for k in i + 1..K {
            let f = m[k][i] / pivot[i];
            m[k].iter_mut().zip(pivot).for_each(|(x, p)| *x -= f * p);
            v[k] -= f * value;
        }
    }
    for i in (0..K).rev() {
        v[i] = (v[i] - (i + 1..K).map(|j| m[i][j] * v[j]).sum::<f64>()) / m[i][i];
    }
    Some(v)
}

/// Seconds that the model says an operation takes between two ranks.
///
/// # Errors
///
/// Those of the selection table and of the simulation.
pub(super) fn predict(model: Model, op: Operation, bytes: usize) -> Result<f64> {
    let case = Case::new(select(op, bytes, 2, true, None)?, 2, bytes);
    Ok(case.run(model, Mode::All, Budget::FULL)?.time as f64 / 1e12)
}

impl Timing {
    /// How much longer it is predicted to take, relative to what was measured.
    #[must_use]
    pub fn error(&self, predicted: f64) -> f64 {
        predicted / self.seconds - 1.0
    }

    fn to_json(self) -> Value {
        json!([
            self.op.name(),
            self.bytes,
            self.fitted,
            self.seconds,
            self.low,
            self.high,
            self.batches.0,
            self.batches.1
        ])
    }

    fn from_json(v: &Value) -> Option<Self> {
        let bytes = |i: usize| usize::try_from(v.get(i)?.as_u64()?).ok();
        let time = |i: usize| v.get(i)?.as_f64();
        let op = OPERATIONS.into_iter().find(|op| v.get(0).and_then(Value::as_str) == Some(op.name()))?;
        Some(Self {
            op,
            bytes: bytes(1)?,
            fitted: v.get(2)?.as_bool()?,
            seconds: time(3)?,
            low: time(4)?,
            high: time(5)?,
            batches: (bytes(6)?, bytes(7)?),
        })
    }
}

/// Those that are timed.
pub(super) const OPERATIONS: [Operation; 5] =
    [Operation::Broadcast, Operation::AllGather, Operation::AllReduce, Operation::ReduceScatter, Operation::Barrier];

impl fmt::Display for Timing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of {} bytes", self.op.name(), self.bytes)
    }
}

impl Measured {
    /// Where the knee may be: between the sizes of the one-way times.
    fn knees(&self) -> Vec<usize> {
        let mut sizes: Vec<usize> =
            self.fitted(Operation::Broadcast).map(|t| t.bytes).filter(|b| *b >= 4 * Model::CHUNK).collect();
        sizes.sort_unstable();
        // The last leaves nothing beyond.
        sizes.pop();
        sizes.into_iter().flat_map(|b| [b, b / 2 * 3, b * 2]).collect()
    }

    fn fitted(&self, op: Operation) -> impl Iterator<Item = &Timing> {
        self.timings.iter().filter(move |t| t.op == op && t.fitted)
    }

    /// The model that fits best.
    ///
    /// One-way times make the time of an empty message and the bandwidth; all_gathers, which are both ways at once, what a byte costs the
    /// processors, because each has to do with twice as many, and the overhead; but not more than the time per message of a row of them. What is
    /// left of the empty message's time is latency. The knee is where the errors are least.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` when the times make no line that rises from above zero.
    pub fn fit(&self) -> Result<Fit> {
        let mut best: Option<Fit> = None;
        for knee in std::iter::once(usize::MAX).chain(self.knees()) {
            if let Some(fit) = self.fit_with(knee)?
                // A knee more must be worth it.
                && best.as_ref().is_none_or(|b| fit.error < 0.98 * b.error)
            {
                best = Some(fit);
            }
        }
        best.ok_or_else(|| {
            Error::invalid(
                "the measured times make no line that rises; run it again, or give the model with --model or --alpha, --overhead, --beta, --gamma",
            )
        })
    }

    fn fit_with(&self, knee: usize) -> Result<Option<Fit>> {
        // Formulas of lines do not know about messages that wait for each other. So what is fitted to are the times times the factor by which the
        // last model's lines differ from what its simulation says.
        let mut fit: Option<Fit> = None;
        for _ in 0..4 {
            let factor = |t: &Timing, line: f64| -> Result<f64> {
                Ok(match &fit {
                    Some(f) => line / predict(f.model, t.op, t.bytes)?,
                    None => 1.0,
                })
            };
            let model = fit.as_ref().map_or_else(|| Model::flat(0, 0, Rates::default()), |f| f.model);
            let (mut one_way, mut both) = (Vec::new(), Vec::new());
            for t in self.fitted(Operation::Broadcast) {
                let costs = model.at(t.bytes);
                let empty = model.alpha + model.overhead;
                let last = costs.last_copy(t.bytes) as f64 / 1e12;
                let line = (empty + costs.port(t.bytes)) as f64 / 1e12 + last;
                one_way.push((t.bytes as f64, t.seconds * factor(t, line)? - last));
            }
            for t in self.fitted(Operation::AllGather).filter(|t| t.bytes > Model::CHUNK) {
                let line = (2 * model.overhead + model.at(2 * t.bytes).copy(2 * t.bytes)) as f64 / 1e12;
                both.push((2.0 * t.bytes as f64, t.seconds * factor(t, line)?));
            }
            let (Some(line), Some(copies)) = (bent(&one_way, knee as f64), bent(&both, knee as f64)) else {
                return Ok(None);
            };
            let rises = |b: &Bent| b.near > 0.0 && b.far >= 0.9 * b.near;
            if line.intercept <= 0.0 || !rises(&line) {
                return Ok(None);
            }
            // What takes longer both ways at once than twice as long: rates that are wrong alike for both.
            let rates = |beta: f64, copy: f64, gamma: f64| {
                let beta = if copy > beta { (beta * copy).sqrt() } else { beta };
                Rates::from_seconds(beta, copy.clamp(0.0, beta), gamma)
            };
            // Two messages at once are two overheads in a row if these take longer than the message's way; if not, the overhead is less than half of the time.
            let exchange = self.fitted(Operation::AllGather).find(|t| t.bytes <= 64).map_or(0.0, |t| t.seconds);
            let most = (exchange.max(line.intercept) / 2.0).min(MOST_OVERHEAD * line.intercept);
            let overhead = self.gap.min(most);
            let picos = |s: f64| (s * 1e12).round() as u64;
            let near = rates(line.near, copies.near, self.gammas.0);
            let far = rates(line.far, copies.far, self.gammas.1);
            let model = Model {
                alpha: picos(line.intercept - overhead),
                overhead: picos(overhead),
                chunk: Model::CHUNK,
                knee,
                near,
                far: if knee == usize::MAX { near } else { far },
            };
            fit = Some(Fit { model, capped: overhead < self.gap, error: 0.0, predicted: Vec::new() });
        }
        let Some(mut fit) = fit else { return Ok(None) };
        fit.predicted = self.timings.iter().map(|t| predict(fit.model, t.op, t.bytes)).collect::<Result<_>>()?;
        let errors: Vec<f64> =
            self.timings.iter().zip(&fit.predicted).filter(|(t, _)| t.fitted).map(|(t, p)| t.error(*p)).collect();
        fit.error = (errors.iter().map(|e| e * e).sum::<f64>() / errors.len().max(1) as f64).sqrt();
        Ok(Some(fit))
    }

    /// As JSON.
    #[must_use]
    pub fn to_json(&self) -> Value {
        let columns = [
            "operation",
            "bytes",
            "fitted",
            "median_s",
            "lower_quartile_s",
            "upper_quartile_s",
            "batches",
            "batches_taken",
        ];
        let timings: Vec<_> = self.timings.iter().map(|t| t.to_json()).collect();
        json!({
            "columns": columns,
            "timings": timings,
            "gap_s": self.gap,
            "gamma_near_s_per_byte": self.gammas.0,
            "gamma_far_s_per_byte": self.gammas.1,
        })
    }

    /// From what [`to_json`](Self::to_json) makes.
    #[must_use]
    pub fn from_json(v: &Value) -> Option<Self> {
        let timings = v.get("timings")?.as_array()?.iter().map(Timing::from_json).collect::<Option<_>>()?;
        let number = |key: &str| v.get(key)?.as_f64();
        let gammas = (number("gamma_near_s_per_byte")?, number("gamma_far_s_per_byte")?);
        Some(Self { timings, gap: number("gap_s")?, gammas })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bent_line_is_found_again() {
        let f = |x: f64| 5.0 + 2.0 * x.min(100.0) + 7.0 * (x - 100.0).max(0.0);
        let points: Vec<_> = [1.0, 10.0, 50.0, 100.0, 200.0, 1000.0].map(|x| (x, f(x))).to_vec();
        let close = |b: Bent, to: [f64; 3]| {
            assert!([b.intercept, b.near, b.far].iter().zip(to).all(|(x, y)| (x / y - 1.0).abs() < 1e-6), "{b:?}");
        };
        close(bent(&points, 100.0).unwrap(), [5.0, 2.0, 7.0]);
        // Straight where all is on one side.
        close(bent(&points[..4], 500.0).unwrap(), [5.0, 2.0, 2.0]);
        assert_eq!(bent(&points[..1], 100.0), None);
        assert_eq!(bent(&[(3.0, 1.0), (3.0, 2.0)], 100.0), None);
    }

    /// What would be measured if the model were right, with some noise.
    pub(super) fn as_of(model: Model, noise: f64) -> Measured {
        let mut sign = 1.0;
        let timings = super::super::measure::PLAN.iter().map(|p| {
            sign = -sign;
            let seconds = predict(model, p.op, p.bytes).unwrap() * (1.0 + sign * noise);
            let batches = (10, 10);
            Timing { op: p.op, bytes: p.bytes, fitted: p.fitted, seconds, low: seconds, high: seconds, batches }
        });
        let overhead = model.overhead as f64 / 1e12;
        let per_byte = |x: u64| x as f64 / 1e12 / f64::from(1 << 20);
        let gammas = (per_byte(model.near.gamma), per_byte(model.far.gamma));
        Measured { timings: timings.collect(), gap: overhead, gammas }
    }

    const NEAR: Rates = Rates { beta: 220_000_000, copy: 160_000_000, gamma: 90_000_000 };
    const FAR: Rates = Rates { beta: 420_000_000, copy: 350_000_000, gamma: 140_000_000 };

    fn assert_close(found: &Model, want: &Model, tolerance: f64) {
        let all = |m: &Model| {
            let rates = |r: Rates| [r.beta, r.copy, r.gamma];
            let mut v = vec![m.alpha, m.overhead];
            v.extend(rates(m.near));
            v.extend(rates(m.far));
            v
        };
        for (x, y) in all(found).into_iter().zip(all(want)) {
            assert!((x as f64 / y as f64 - 1.0).abs() < tolerance, "{found:?}\nfor {want:?}");
        }
    }

    #[test]
    fn a_model_is_found_again_from_its_times() {
        let bent = Model { knee: 2 << 20, far: FAR, ..Model::flat(6_000_000, 2_500_000, NEAR) };
        let fit = as_of(bent, 0.0).fit().unwrap();
        assert_eq!(fit.model.knee, bent.knee);
        assert_close(&fit.model, &bent, 0.03);
        assert!(fit.error < 0.01 && !fit.capped, "{fit:?}");
        let flat = Model::flat(6_000_000, 2_500_000, NEAR);
        let fit = as_of(flat, 0.0).fit().unwrap();
        assert_close(&fit.model, &flat, 0.03);
    }

    #[test]
    fn noise_shows_in_the_error_and_not_much_in_the_model() {
        let model = Model { knee: 2 << 20, far: FAR, ..Model::flat(6_000_000, 2_500_000, NEAR) };
        let measured = as_of(model, 0.05);
        let fit = measured.fit().unwrap();
        assert!((0.02..0.08).contains(&fit.error), "{fit:?}");
        for (t, p) in measured.timings.iter().zip(&fit.predicted) {
            assert!(t.error(*p).abs() < 0.15, "{t}: {p}");
        }
    }

    #[test]
    fn the_overhead_is_that_of_a_row_or_of_messages_both_ways() {
        // Longer than the way: exchanges show it, whatever a row takes.
        let model = Model::flat(3_000_000, 8_000_000, NEAR);
        let measured = Measured { gap: 30e-6, ..as_of(model, 0.0) };
        let fit = measured.fit().unwrap();
        assert!(fit.capped);
        assert_close(&fit.model, &model, 0.03);
        // Shorter: exchanges only say that it is less than half.
        let model = Model::flat(8_000_000, 3_000_000, NEAR);
        let fit = as_of(model, 0.0).fit().unwrap();
        assert!(!fit.capped);
        assert_close(&fit.model, &model, 0.03);
        let fit = Measured { gap: 30e-6, ..as_of(model, 0.0) }.fit().unwrap();
        assert!((fit.model.overhead as f64 / 5.5e6 - 1.0).abs() < 0.03, "{fit:?}");
        assert!(Measured { timings: Vec::new(), ..measured }.fit().is_err());
    }

    #[test]
    fn what_is_more_than_twice_as_slow_both_ways_is_as_wrong_for_one_as_for_the_other() {
        let mut measured = as_of(Model::flat(6_000_000, 2_500_000, Rates { copy: NEAR.beta, ..NEAR }), 0.0);
        let gathers = measured.timings.iter_mut().filter(|t| t.op == Operation::AllGather && t.bytes > 8);
        gathers.for_each(|t| t.seconds *= 1.5);
        let fit = measured.fit().unwrap();
        let off = |op: Operation| {
            let last = measured.timings.iter().zip(&fit.predicted).rfind(|(t, _)| t.op == op);
            last.map_or(0.0, |(t, p)| t.error(*p))
        };
        assert!((0.15..0.3).contains(&off(Operation::Broadcast)), "{}", off(Operation::Broadcast));
        assert!((-0.25..-0.12).contains(&off(Operation::AllGather)), "{}", off(Operation::AllGather));
    }

    #[test]
    fn what_was_measured_survives_json() {
        let measured = as_of(Model::flat(6_000_000, 2_000_000, NEAR), 0.0);
        assert_eq!(Measured::from_json(&measured.to_json()), Some(measured));
    }
}
