//! Measuring, on every rank.

use std::time::{Duration, Instant};

use collectives::Algorithm;
use rustcomms::{CallOptions, Communicator, DType, ReduceOp};
use rustix::time::{ClockId, clock_gettime};

use super::Failure;
use super::numbers::{Numbers, Wrong};
use super::ops::{Call, Place, Sizing, Spec};
use super::plan::{Case, Plan};
use super::report::{Measured, Row, describe};
use super::screen::{Screen, complain};
use super::site::{Form, Site};

/// A rank describes at most so many wrong results.
const MOST_MESSAGES: usize = 10;
/// How late one rank comes to a barrier that is checked.
const LATE: Duration = Duration::from_millis(2);
/// Barriers in one check.
const BARRIERS: usize = 4;

/// What all ranks know at the end.
#[derive(Debug)]
pub(crate) struct Outcome {
    /// Every rank has them, though only one prints them.
    pub(crate) rows: Vec<Row>,
    /// Wrong elements on all ranks together.
    pub(crate) wrong: u64,
}

/// Measures all that is planned. Collective.
pub(crate) fn run(comm: &Communicator, plan: &Plan, screen: &mut Screen) -> Result<Outcome, Failure> {
    let mut bench = Bench::new(comm, plan)?;
    let mut rows = Vec::new();
    for case in &plan.cases {
        screen.algorithms(&bench.algorithms(case), bench.not_forced().as_deref())?;
        for &size in &plan.sizes {
            let row = bench.row(case, size, screen)?;
            screen.row(&row)?;
            rows.push(row);
        }
    }
    Ok(Outcome { rows, wrong: bench.wrong })
}

struct Bench<'c> {
    comm: &'c Communicator,
    plan: &'c Plan,
    /// The input, out of place.
    send: Vec<u8>,
    /// The output, or the one buffer.
    recv: Vec<u8>,
    /// Number of the data; the same on all ranks.
    salt: u64,
    /// Wrong elements so far on all ranks.
    wrong: u64,
    messages: usize,
}

impl<'c> Bench<'c> {
    fn new(comm: &'c Communicator, plan: &'c Plan) -> Result<Self, Failure> {
        let last = plan.sizes.last().copied().unwrap_or(0);
        let bytes = |case: &Case| {
            let (send, recv) =
                plan.spec.lengths(&place(plan.spec, comm, case, plan.spec.count(last, case.dtype, comm.size())));
            send.max(recv) * case.dtype.size()
        };
        // Allocated once, so that first touches of memory are not in the times.
        let most = plan.cases.iter().map(bytes).max().unwrap_or(0);
        Ok(Self { comm, plan, send: buffer(most)?, recv: buffer(most)?, salt: 0, wrong: 0, messages: 0 })
    }

    /// The algorithm at each size.
    fn algorithms(&self, case: &Case) -> Vec<(u64, String)> {
        let (spec, n) = (self.plan.spec, self.comm.size());
        let at = |size: &u64| {
            let count = spec.count(*size, case.dtype, n);
            (spec.bytes(count, case.dtype, n), self.algorithm(case, count))
        };
        self.plan.sizes.iter().map(at).collect()
    }

    fn algorithm(&self, case: &Case, count: u64) -> String {
        match &self.plan.algo {
            Some(forced) => forced.clone(),
            None => self.comm.explain(&self.plan.spec.desc(case.dtype, count, case.redop, case.root)),
        }
    }

    /// Why the algorithm that the environment forces on all operations is not this one's.
    fn not_forced(&self) -> Option<String> {
        let name = std::env::var("RUSTCOMMS_ALGO").ok().filter(|v| !v.is_empty() && self.plan.algo.is_none())?;
        let spec = self.plan.spec;
        let all = Algorithm::ALL.iter().filter(|a| a.operation() == spec.operation);
        let names: Vec<&str> = all.map(|a| a.name()).collect();
        (!names.contains(&name.as_str()))
            .then(|| format!("RUSTCOMMS_ALGO={name} is not among those of {}: {}", spec.name, names.join(", ")))
    }

    /// One size in both forms.
    fn row(&mut self, case: &Case, size: u64, screen: &mut Screen) -> Result<Row, Failure> {
        let (spec, n) = (self.plan.spec, self.comm.size());
        let count = spec.count(size, case.dtype, n);
        let bytes = spec.bytes(count, case.dtype, n);
        let mut form = |form: Form, exists: bool| -> Result<Option<Measured>, Failure> {
            if !exists {
                return Ok(None);
            }
            screen.at(&format!("{} {bytes} B {}", describe(case), form.name()));
            let measured = self.measure(case, count, form)?;
            screen.done();
            Ok(Some(measured))
        };
        let out_of_place = form(Form::OutOfPlace, spec.out_of_place.is_some())?;
        let in_place = form(Form::InPlace, spec.in_place.is_some())?;
        Ok(Row {
            op: spec.name,
            backend: self.comm.backend_name(),
            transport: self.comm.transport().to_owned(),
            world: n,
            bytes,
            count,
            dtype: (spec.sizing != Sizing::Nothing).then(|| case.dtype.name()),
            redop: case.redop.map(ReduceOp::name),
            root: case.root,
            algorithm: Some(self.algorithm(case, count)).filter(|a| !a.is_empty()),
            out_of_place,
            in_place,
        })
    }

    fn measure(&mut self, case: &Case, count: u64, form: Form) -> Result<Measured, Failure> {
        let (spec, n) = (self.plan.spec, self.comm.size());
        let nanos = self.time(case, count, form)?;
        let times = self.times(&nanos)?;
        let wrong = match (self.plan.checks, spec.sizing) {
            (0, _) => None,
            (rounds, Sizing::Nothing) => self.check_order(rounds)?,
            (rounds, _) => Some(self.check_data(case, count, form, rounds)?),
        };
        let (algbw, busbw) = spec.bandwidths(spec.bytes(count, case.dtype, n), times.mean, n);
        Ok(Measured { time_us: times.mean, min_us: times.min, p99_us: times.p99, algbw, busbw, wrong })
    }

    fn numbers(&mut self, case: &Case) -> Numbers {
        self.salt += 1;
        let (ranks, prefix) = (self.comm.size(), self.plan.spec.prefix);
        Numbers { dtype: case.dtype, redop: case.redop, ranks, prefix, salt: self.salt }
    }

    /// A call as this case makes it.
    fn call(&self, case: &Case) -> Call<'c> {
        let options = CallOptions::new();
        let options = match &self.plan.algo {
            // Per call: the communicator's hint would also change the calls that only measure.
            Some(name) => options.hint("algo", name),
            None => options,
        };
        Call {
            with: self.comm.with(options),
            comm: self.comm,
            dtype: case.dtype,
            redop: case.redop.unwrap_or(ReduceOp::Sum),
            root: case.root.unwrap_or(0),
        }
    }

    fn site(&mut self, case: &Case, count: u64, form: Form) -> Site<'_> {
        let place = place(self.plan.spec, self.comm, case, count);
        Site::new(self.plan.spec, place, case.dtype.size(), form, &mut self.send, &mut self.recv)
    }

    /// Nanoseconds of each timed call on this rank.
    fn time(&mut self, case: &Case, count: u64, form: Form) -> Result<Vec<u64>, Failure> {
        let (plan, comm) = (self.plan, self.comm);
        let mut ends: Vec<Instant> = reserve(plan.iters, "the timings")?;
        let numbers = self.numbers(case);
        let call = self.call(case);
        let mut site = self.site(case, count, form);
        site.fill(&numbers);
        for _ in 0..plan.warmup {
            site.call(&call)?;
        }
        comm.barrier()?;
        // Calls follow each other at once, so the end of one is the beginning of the next.
        let mut last = Instant::now();
        for _ in 0..plan.iters {
            site.call(&call)?;
            ends.push(Instant::now());
        }
        let mut nanos = reserve(plan.iters, "the timings")?;
        for end in ends {
            nanos.push(u64::try_from(end.duration_since(last).as_nanos()).unwrap_or(u64::MAX));
            last = end;
        }
        Ok(nanos)
    }

    /// Figures over all ranks. Collective.
    fn times(&self, mine: &[u64]) -> Result<Times, Failure> {
        let n = self.comm.size();
        let mut all: Vec<u64> = reserve(mine.len() * n, "the timings of all ranks")?;
        all.resize(mine.len() * n, 0);
        self.comm.all_gather(mine, &mut all)?;
        Ok(Times::of(&all, n))
    }

    /// Sums over ranks; moves the numbers only, so that a wrong reduction cannot hide itself. Collective.
    fn total(&mut self, mine: u64) -> Result<u64, Failure> {
        let mut all = vec![0u64; self.comm.size()];
        self.comm.all_gather(&[mine], &mut all)?;
        // What this rank knows to be wrong stays wrong, whatever arrived.
        let total = all.iter().sum::<u64>().max(mine);
        self.wrong += total;
        Ok(total)
    }

    /// Calls on fresh data and compares with what the generator says. Collective.
    fn check_data(&mut self, case: &Case, count: u64, form: Form, rounds: usize) -> Result<u64, Failure> {
        let mut mine = 0;
        for _ in 0..rounds {
            let numbers = self.numbers(case);
            let call = self.call(case);
            let mut site = self.site(case, count, form);
            site.fill(&numbers);
            site.call(&call)?;
            let wrong = site.check(&numbers);
            mine += wrong.count;
            self.describe(case, count, form, &wrong);
        }
        self.total(mine)
    }

    fn describe(&mut self, case: &Case, count: u64, form: Form, wrong: &Wrong) {
        let Some((at, what)) = &wrong.first else { return };
        self.messages += 1;
        if self.messages > MOST_MESSAGES {
            return;
        }
        let (op, case, form, of) = (self.plan.spec.name, describe(case), form.name(), wrong.count);
        let text = format!("{op} {case}, count {count}, {form}: {of} wrong, the first is element {at}: {what}");
        complain(Some((self.comm.rank(), self.comm.size())), &text);
    }

    /// That nobody leaves a barrier before all have come. `None` when ranks have no clock in common. Collective.
    fn check_order(&mut self, rounds: usize) -> Result<Option<u64>, Failure> {
        let (comm, n) = (self.comm, self.comm.size());
        if comm.local_size() != n {
            return Ok(None);
        }
        let call = self.call(&Case { dtype: DType::U8, redop: None, root: None });
        let mut site = self.site(&Case { dtype: DType::U8, redop: None, root: None }, 0, Form::OutOfPlace);
        let mut mine = 0;
        for round in 0..rounds * BARRIERS {
            if round % n == comm.rank() {
                std::thread::sleep(LATE);
            }
            let came = now();
            site.call(&call)?;
            let left = now();
            let mut all = vec![0; n];
            comm.all_gather(&[came], &mut all)?;
            mine += u64::from(all.iter().any(|came| *came > left));
        }
        self.total(mine).map(Some)
    }
}

fn place(spec: &Spec, comm: &Communicator, case: &Case, count: u64) -> Place {
    let root = case.root.unwrap_or(0);
    Place { rank: comm.rank(), ranks: comm.size(), root, count: count as usize, blocks: spec.blocks }
}

/// Nanoseconds of the host's clock, which all its processes read alike.
fn now() -> u64 {
    let t = clock_gettime(ClockId::Monotonic);
    t.tv_sec as u64 * 1_000_000_000 + t.tv_nsec as u64
}

/// An empty vector with room, or an error instead of an abort.
fn reserve<T>(len: usize, what: &str) -> Result<Vec<T>, Failure> {
    let mut v = Vec::new();
    let bytes = len.saturating_mul(size_of::<T>());
    v.try_reserve_exact(len).map_err(|_| format!("no memory for {what} ({bytes} bytes); measure fewer or smaller"))?;
    Ok(v)
}

fn buffer(bytes: usize) -> Result<Vec<u8>, Failure> {
    let mut v = reserve(bytes, "a buffer")?;
    v.resize(bytes, 0);
    Ok(v)
}

/// Microseconds.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Times {
    mean: f64,
    min: f64,
    p99: f64,
}

impl Times {
    /// From nanoseconds of each call, rank after rank, equally many of each.
    fn of(all: &[u64], ranks: usize) -> Self {
        let iters = all.len() / ranks;
        let total: f64 = all.iter().map(|t| *t as f64).sum();
        // A collective is as slow as its slowest rank.
        let mut slowest: Vec<u64> =
            (0..iters).map(|i| all.iter().skip(i).step_by(iters).copied().max().unwrap_or(0)).collect();
        slowest.sort_unstable();
        let at = |i: usize| slowest.get(i).map_or(0.0, |t| *t as f64 / 1e3);
        // The nearest rank: the smallest time that at least 99 % of the calls stay within.
        Self { mean: total / 1e3 / all.len().max(1) as f64, min: at(0), p99: at((iters * 99).div_ceil(100).max(1) - 1) }
    }
}

#[cfg(test)]
#[path = "bench_tests.rs"]
mod tests;
