//! Where the model's numbers come from: operations between two processes on this machine, over backend-tcp.
//!
//! Not a benchmark of the library: what is wanted are the costs that a schedule's single message has. Other programs may run on the machine,
//! too, and take the processors away for milliseconds. A batch of calls during which a rank waited for a processor, as the kernel's books
//! say, does not count; of the others the median does.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use collectives::Shape;
use rustcomms::{CommOptions, Communicator, DType, Operation, ReduceOp, Reducer, Result, op};

use super::fit::{Measured, Timing};
use crate::pin;

/// What is timed.
#[derive(Clone, Copy, Debug)]
pub(super) struct Planned {
    pub(super) op: Operation,
    pub(super) bytes: usize,
    pub(super) fitted: bool,
}

const fn planned(op: Operation, bytes: usize, fitted: bool) -> Planned {
    Planned { op, bytes, fitted }
}

/// As the library cuts buffers.
const SEGMENT: usize = Shape::SEGMENT;

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;

/// Every second size is for comparison only, and so are all operations that fold.
pub(super) const PLAN: [Planned; 34] = {
    use Operation::{AllGather, AllReduce, Barrier, Broadcast, ReduceScatter};
    [
        planned(Broadcast, 8, true),
        planned(Broadcast, 64, false),
        planned(Broadcast, KIB, true),
        planned(Broadcast, 4 * KIB, false),
        planned(Broadcast, 8 * KIB, true),
        planned(Broadcast, 32 * KIB, false),
        planned(Broadcast, 64 * KIB, true),
        planned(Broadcast, 128 * KIB, false),
        planned(Broadcast, 256 * KIB, true),
        planned(Broadcast, 512 * KIB, false),
        planned(Broadcast, MIB, true),
        planned(Broadcast, 2 * MIB, false),
        planned(Broadcast, 4 * MIB, true),
        planned(Broadcast, 8 * MIB, false),
        planned(Broadcast, 16 * MIB, true),
        planned(Broadcast, 32 * MIB, true),
        planned(AllGather, 8, true),
        planned(AllGather, 64 * KIB, false),
        planned(AllGather, 128 * KIB, true),
        planned(AllGather, 256 * KIB, false),
        planned(AllGather, 512 * KIB, true),
        planned(AllGather, MIB, false),
        planned(AllGather, 2 * MIB, true),
        planned(AllGather, 4 * MIB, false),
        planned(AllGather, 8 * MIB, true),
        planned(AllReduce, 8, false),
        planned(AllReduce, 4 * KIB, false),
        planned(AllReduce, 64 * KIB, false),
        planned(AllReduce, MIB, false),
        planned(AllReduce, 16 * MIB, false),
        planned(ReduceScatter, 8, false),
        planned(ReduceScatter, 64 * KIB, false),
        planned(ReduceScatter, MIB, false),
        planned(Barrier, 0, false),
    ]
};

/// Small messages in a row.
const BURST: u32 = 64;

/// How much is measured: it ends when every time has so many batches that count, or when the time is up.
#[derive(Clone, Copy, Debug)]
pub struct Effort {
    /// Batches that count.
    pub batches: usize,
    /// Most time.
    pub limit: Duration,
}

/// Part of a batch for which its ranks may have waited for a processor.
const WAITED: f64 = 0.02;

/// Batches that are enough for quartiles; with fewer that count, all do.
const ENOUGH: usize = 8;

/// What the kernel knows about the time for which this thread was ready to run, and did not.
struct Waits(Option<File>);

impl Waits {
    fn of_this_thread() -> Self {
        // Without it all batches count.
        Self(File::open("/proc/thread-self/schedstat").ok())
    }

    /// Seconds since the thread began.
    fn seconds(&self) -> f64 {
        let mut text = [0u8; 96];
        let read = self.0.as_ref().and_then(|f| f.read_at(&mut text, 0).ok()).unwrap_or(0);
        let text = std::str::from_utf8(&text[..read]).unwrap_or("");
        text.split_whitespace().nth(1).and_then(|ns| ns.parse::<f64>().ok()).unwrap_or(0.0) / 1e9
    }
}

/// A batch: how long a call took, how long all of them, and how long this rank waited for a processor meanwhile.
#[derive(Clone, Copy, Debug)]
struct Batch {
    each: f64,
    all: f64,
    waited: f64,
}

/// Batches of one kind.
#[derive(Clone, Debug, Default)]
struct Batches(Vec<Batch>);

impl Batches {
    /// Times of those that count, sorted.
    fn good(&self) -> Vec<f64> {
        let of = |good: &dyn Fn(&Batch) -> bool| {
            let mut times: Vec<f64> = self.0.iter().filter(|b| good(b)).map(|b| b.each).collect();
            times.sort_unstable_by(f64::total_cmp);
            times
        };
        let good = of(&|b| b.waited <= WAITED * b.all);
        if good.len() >= ENOUGH { good } else { of(&|_| true) }
    }

    fn median(&self) -> f64 {
        let times = self.good();
        times.get(times.len() / 2).copied().unwrap_or_default()
    }

    fn timing(&self, p: &Planned) -> Timing {
        let times = self.good();
        let at = |part: usize| times.get(times.len() * part / 4).copied().unwrap_or_default();
        let batches = (times.len(), self.0.len());
        Timing { op: p.op, bytes: p.bytes, fitted: p.fitted, seconds: at(2), low: at(1), high: at(3), batches }
    }
}

struct Bench {
    comm: Communicator,
    waits: Waits,
    input: Vec<f32>,
    output: Vec<f32>,
}

/// Measures as one of two ranks; both call it.
///
/// # Errors
///
/// Those of the communicator.
pub fn measure(effort: Effort) -> Result<Measured> {
    let comm = rustcomms::connect(CommOptions::new().name("scale"))?;
    pin(comm.rank());
    let longest = PLAN.iter().map(|p| 2 * p.bytes).max().unwrap_or(0);
    let buffer = || vec![0f32; longest / size_of::<f32>()];
    let mut bench = Bench { comm, waits: Waits::of_this_thread(), input: buffer(), output: buffer() };
    let start = Instant::now();
    let mut times = vec![Batches::default(); PLAN.len() + 1];
    loop {
        // Not before both are here, or each would count the other's pause as its own round, and pause for twice as long.
        bench.comm.barrier()?;
        let mut round = Vec::new();
        // Interleaved, so that a bad moment of the machine does not hit one size alone.
        for (i, p) in PLAN.iter().enumerate() {
            bench.comm.barrier()?;
            for _ in 0..if p.bytes > 4 * MIB { 2 } else { 4 } {
                round.push((i, bench.batch(|b| b.calls(p))?));
            }
        }
        bench.comm.barrier()?;
        for _ in 0..4 {
            round.push((PLAN.len(), bench.batch(Bench::burst)?));
        }
        // What counts is decided by the waits of both.
        let mut waits: Vec<f64> = round.iter().map(|(_, b)| b.waited).collect();
        bench.comm.all_reduce(&mut waits[..], op::Max)?;
        for ((i, b), waited) in round.into_iter().zip(waits) {
            times[i].0.push(Batch { waited, ..b });
        }
        let good = |b: &Batches| b.0.iter().filter(|b| b.waited <= WAITED * b.all).count();
        let enough = times.iter().all(|b| good(b) >= effort.batches) || start.elapsed() > effort.limit;
        // Rank 0's word.
        let mut end = [u8::from(enough)];
        bench.comm.broadcast(&mut end[..], 0)?;
        if end[0] == 1 {
            break;
        }
    }
    let gammas = (bench.gamma(SEGMENT)?, bench.gamma(32 * MIB)?);
    bench.comm.finalize(Duration::from_secs(10))?;
    let gap = times.last().map_or(0.0, Batches::median);
    let timings: Vec<_> = PLAN.iter().zip(&times).map(|(p, b)| b.timing(p)).collect();
    // A row of messages, the last of them answered.
    let there_and_back = timings.first().map_or(0.0, |t| 2.0 * t.seconds);
    let gap = (gap - there_and_back) / f64::from(BURST - 1);
    Ok(Measured { timings, gap: gap.max(0.0), gammas })
}

impl Bench {
    /// Times `f`, which says how many calls it has made.
    fn batch(&mut self, f: impl FnOnce(&mut Self) -> Result<u32>) -> Result<Batch> {
        let before = self.waits.seconds();
        let start = Instant::now();
        let calls = f(self)?;
        let all = start.elapsed().as_secs_f64();
        Ok(Batch { each: all / f64::from(calls), all, waited: self.waits.seconds() - before })
    }

    /// As many calls as move about 64 KiB, at most 20 and an even number.
    fn calls(&mut self, p: &Planned) -> Result<u32> {
        let pairs = (64 * KIB / p.bytes.max(1)).clamp(1, 10) as u32;
        for _ in 0..pairs {
            self.call(p, 0)?;
            self.call(p, 1)?;
        }
        Ok(2 * pairs)
    }

    fn call(&mut self, p: &Planned, root: usize) -> Result<()> {
        let Self { comm, input, output, .. } = self;
        let n = p.bytes / size_of::<f32>();
        match p.op {
            Operation::Broadcast => comm.broadcast(&mut output[..n], root),
            Operation::AllGather => comm.all_gather(&input[..n], &mut output[..2 * n]),
            Operation::AllReduce => comm.all_reduce(&mut output[..n], op::Sum),
            Operation::ReduceScatter => comm.reduce_scatter(&input[..2 * n], &mut output[..n], op::Sum),
            _ => comm.barrier(),
        }
    }

    /// Many small messages in a row and an answer; counted as one call.
    fn burst(&mut self) -> Result<u32> {
        let mut x = [1u8; 8];
        for _ in 0..BURST {
            self.comm.broadcast(&mut x[..], 0)?;
        }
        self.comm.broadcast(&mut x[..], 1)?;
        Ok(1)
    }

    /// Seconds per byte of a sum of `f32`: of pieces as long as the library's segments, into a buffer of so many bytes.
    fn gamma(&mut self, bytes: usize) -> Result<f64> {
        let reducer = Reducer::builtin(ReduceOp::Sum, DType::F32)?;
        let (mut acc, mut x) = (vec![0u8; bytes], vec![0u8; SEGMENT]);
        let mut times = Batches::default();
        for _ in 0..40 {
            let batch = self.batch(|_| {
                // A buffer that stays in the cache more than once, or there would be little to time.
                for _ in 0..(4 * MIB / bytes).max(1) {
                    acc.chunks_exact_mut(SEGMENT).for_each(|piece| reducer.fold(piece, &mut x));
                }
                Ok(((4 * MIB).max(bytes) / SEGMENT) as u32)
            })?;
            times.0.push(batch);
        }
        Ok(times.median() / SEGMENT as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batches_that_waited_for_a_processor_do_not_count_unless_few_did_not() {
        let batch = |each: f64, waited: f64| Batch { each, all: 10.0 * each, waited };
        let mut b = Batches((1..=9).map(|i| batch(f64::from(i), 0.0)).collect());
        assert_eq!(b.median(), 5.0);
        b.0.extend((0..40).map(|_| batch(100.0, 50.0)));
        assert_eq!(b.median(), 5.0);
        let t = b.timing(&PLAN[0]);
        assert_eq!((t.low, t.seconds, t.high, t.batches), (3.0, 5.0, 7.0, (9, 49)));
        b.0.drain(..5);
        assert_eq!(b.timing(&PLAN[0]).batches, (44, 44));
        assert_eq!(b.median(), 100.0);
    }

    #[test]
    fn the_kernel_keeps_books_about_this_thread() {
        let waits = Waits::of_this_thread();
        let before = waits.seconds();
        assert!(before.is_finite() && waits.seconds() >= before);
    }

    #[test]
    fn the_plan_can_make_a_model() {
        let fitted = |op| PLAN.iter().filter(move |p| p.op == op && p.fitted).count();
        assert!(fitted(Operation::Broadcast) >= 6 && fitted(Operation::AllGather) >= 4);
        assert!(PLAN.iter().all(|p| p.bytes.is_multiple_of(size_of::<f32>())));
        // Whoever reads results finds each operation again.
        assert!(PLAN.iter().all(|p| super::super::fit::OPERATIONS.contains(&p.op)));
    }
}
