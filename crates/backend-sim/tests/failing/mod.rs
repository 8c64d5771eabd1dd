//! Shared by the failure tests of backend-sim and backend-tcp: worlds of threads with hard deadlines,
//! calls as data, and a record of how long errors took.
#![allow(dead_code, missing_docs, unreachable_pub)]

pub mod blocks;
pub mod ends;
pub mod mismatch;
pub mod p2p;
pub mod pairwise;
pub mod refused;

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, Barrier, Mutex};
use std::time::{Duration, Instant};

use comm_core::op::{Max, Operator, Sum};
use comm_core::{
    CallOptions, CommOptions, Communicator, DType, Element, Error, ErrorKind, OpDesc, Operation, ReduceOp, Result,
};

/// What the issue promises: an error on every other rank within this time.
pub const PROMISED: Duration = Duration::from_secs(2);
/// Nothing in these tests may take longer; who does hangs.
pub const HANGS: Duration = Duration::from_secs(20);

/// How a backend makes a world of threads.
pub type MakeWorld = fn(usize, &CommOptions) -> Vec<Communicator>;

/// Runs `f` as every rank of a world, each on a thread; results in rank order.
///
/// Panics when a rank panics or does not end in time, naming it. The communicators outlive all ranks, so
/// that no rank sees another leave unless the test drops them itself ([`run_owned`]).
pub fn run<T, F>(what: &str, comms: &[Communicator], f: F) -> Vec<T>
where
    T: Send + 'static,
    F: Fn(&Communicator) -> T + Send + Sync + 'static,
{
    run_owned(what, comms.to_vec(), move |c| f(&c))
}

/// [`run`] where each rank owns its communicator.
pub fn run_owned<T, F>(what: &str, comms: Vec<Communicator>, f: F) -> Vec<T>
where
    T: Send + 'static,
    F: Fn(Communicator) -> T + Send + Sync + 'static,
{
    let n = comms.len();
    let f = Arc::new(f);
    let start = Arc::new(Barrier::new(n));
    let (tx, rx) = channel();
    for (rank, comm) in comms.into_iter().enumerate() {
        let (f, tx, start) = (Arc::clone(&f), tx.clone(), Arc::clone(&start));
        std::thread::Builder::new()
            .name(format!("rank-{rank}"))
            .spawn(move || {
                start.wait();
                let out = catch_unwind(AssertUnwindSafe(|| f(comm)));
                let _ = tx.send((rank, out));
            })
            .unwrap();
    }
    drop(tx);
    let until = Instant::now() + HANGS;
    let mut results: Vec<Option<T>> = (0..n).map(|_| None).collect();
    for _ in 0..n {
        match rx.recv_timeout(until.saturating_duration_since(Instant::now())) {
            Ok((rank, Ok(v))) => results[rank] = Some(v),
            Ok((rank, Err(p))) => {
                eprintln!("{what}: rank {rank} panicked");
                resume_unwind(p);
            }
            Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {
                let hung: Vec<usize> = (0..n).filter(|r| results[*r].is_none()).collect();
                panic!("{what}: ranks {hung:?} hang");
            }
        }
    }
    results.into_iter().flatten().collect()
}

/// Runs many cases on a few threads: they mostly wait. Failures are listed with their cases.
pub fn cases<C, F>(list: Vec<C>, f: F)
where
    C: std::fmt::Debug + Send + 'static,
    F: Fn(&C) + Send + Sync + 'static,
{
    let total = list.len();
    let list = Arc::new(Mutex::new(list.into_iter()));
    let (f, failures) = (Arc::new(f), Arc::new(Mutex::new(Vec::new())));
    let workers: Vec<_> = (0..6)
        .map(|_| {
            let (list, f, failures) = (Arc::clone(&list), Arc::clone(&f), Arc::clone(&failures));
            std::thread::spawn(move || {
                loop {
                    let Some(c) = list.lock().unwrap().next() else { return };
                    if let Err(p) = catch_unwind(AssertUnwindSafe(|| f(&c))) {
                        let text = p.downcast_ref::<String>().cloned();
                        let text = text.or_else(|| p.downcast_ref::<&str>().map(|s| (*s).to_owned()));
                        failures.lock().unwrap().push(format!("{c:?}: {}", text.unwrap_or_default()));
                    }
                }
            })
        })
        .collect();
    for w in workers {
        w.join().unwrap();
    }
    let failures = failures.lock().unwrap();
    let shown: Vec<_> = failures.iter().take(12).map(String::as_str).collect();
    assert!(failures.is_empty(), "{} of {total} cases failed:\n{}", failures.len(), shown.join("\n"));
}

static WORST: Mutex<BTreeMap<String, (Duration, usize)>> = Mutex::new(BTreeMap::new());

/// Records how long an error took, and checks the promise.
pub fn took(what: &str, d: Duration) {
    let mut worst = WORST.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let e = worst.entry(what.to_owned()).or_default();
    *e = (e.0.max(d), e.1 + 1);
    drop(worst);
    assert!(d < PROMISED, "{what}: an error took {d:?}");
}

/// Prints the worst times so far; seen with `--nocapture`.
pub fn print_worst() {
    for (what, (d, n)) in WORST.lock().unwrap_or_else(std::sync::PoisonError::into_inner).iter() {
        println!("worst time to error, {what}: {d:.1?} ({n} errors)");
    }
}

/// In which form a call is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum How {
    Sync,
    Async,
    Scoped,
}

pub const FORMS: [How; 3] = [How::Sync, How::Async, How::Scoped];

/// A collective call as data. `count` is the descriptor's: per rank for gathers and scatters.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Call {
    pub op: Operation,
    pub dtype: DType,
    pub count: usize,
    pub redop: ReduceOp,
    pub root: usize,
    pub algo: Option<&'static str>,
}

/// The operations of these tests.
pub const COLLECTIVES: [Operation; 16] = [
    Operation::Broadcast,
    Operation::AllReduce,
    Operation::Reduce,
    Operation::AllGather,
    Operation::ReduceScatter,
    Operation::Barrier,
    Operation::AllGatherV,
    Operation::Gather,
    Operation::GatherV,
    Operation::Scatter,
    Operation::ScatterV,
    Operation::ReduceScatterV,
    Operation::AllToAll,
    Operation::AllToAllV,
    Operation::Scan,
    Operation::Exscan,
];

/// Whether the call has an operator.
pub const fn is_reduction(op: Operation) -> bool {
    matches!(
        op,
        Operation::AllReduce
            | Operation::Reduce
            | Operation::ReduceScatter
            | Operation::ReduceScatterV
            | Operation::Scan
            | Operation::Exscan
    )
}

/// Whether the call has a root.
pub const fn is_rooted(op: Operation) -> bool {
    matches!(
        op,
        Operation::Broadcast
            | Operation::Reduce
            | Operation::Gather
            | Operation::GatherV
            | Operation::Scatter
            | Operation::ScatterV
    )
}

/// Whether lengths are a matter between two ranks.
pub const fn is_pairwise(op: Operation) -> bool {
    matches!(op, Operation::GatherV | Operation::ScatterV | Operation::AllToAllV)
}

impl Call {
    pub fn new(op: Operation, count: usize) -> Self {
        Self { op, dtype: DType::F32, count, redop: ReduceOp::Sum, root: 0, algo: None }
    }

    /// What errors must say about this call.
    pub fn desc(&self, n: usize) -> OpDesc {
        let mut d = OpDesc::new(self.op);
        if self.op == Operation::Barrier {
            return d;
        }
        d = d.elements(self.dtype, self.count);
        if is_rooted(self.op) {
            d = d.root(self.root);
        }
        if is_reduction(self.op) {
            d = d.redop(self.redop);
        }
        if self.op.agreement().splits { d.splits(&vec![self.count; n]) } else { d }
    }

    /// Whether a rank can only complete it with something from every other rank.
    pub fn needs_all(&self) -> bool {
        let nothing = self.count == 0 && !matches!(self.op, Operation::Barrier | Operation::AllToAllV);
        !nothing && !is_rooted(self.op) && !matches!(self.op, Operation::Scan | Operation::Exscan)
    }

    /// Makes the call. On success, the buffer that holds the result, as numbers.
    pub fn issue(&self, comm: &Communicator, how: How) -> Result<Vec<f64>> {
        match self.dtype {
            DType::F32 => self.typed::<f32>(comm, how, |x| x as f32, f64::from),
            DType::F64 => self.typed::<f64>(comm, how, |x| x, |x| x),
            DType::I32 => self.typed::<i32>(comm, how, |x| x as i32, f64::from),
            other => panic!("the tests have no {other}"),
        }
    }

    fn typed<T>(&self, comm: &Communicator, how: How, from: fn(f64) -> T, to: fn(T) -> f64) -> Result<Vec<f64>>
    where
        T: Element + Send + 'static,
        Sum: Operator<T>,
        Max: Operator<T>,
    {
        match self.redop {
            ReduceOp::Sum => self.with_op::<T, _>(comm, how, Sum, from, to),
            ReduceOp::Max => self.with_op::<T, _>(comm, how, Max, from, to),
            other => panic!("the tests have no {other}"),
        }
    }

    fn with_op<T, O>(
        &self,
        comm: &Communicator,
        how: How,
        op: O,
        from: fn(f64) -> T,
        to: fn(T) -> f64,
    ) -> Result<Vec<f64>>
    where
        T: Element + Send + 'static,
        O: Operator<T>,
    {
        let n = comm.size();
        let mine = |len: usize| vec![from(comm.rank() as f64 + 1.0); len];
        let mut options = CallOptions::new();
        if let Some(a) = self.algo {
            options = options.hint("algo", a);
        }
        let with = comm.with(options);
        let numbers = |v: Vec<T>| v.into_iter().map(to).collect::<Vec<f64>>();
        let (c, root) = (self.count, self.root);
        match self.op {
            Operation::Broadcast => {
                let mut x = mine(c);
                match how {
                    How::Sync => with.broadcast(&mut x, root)?,
                    How::Async => x = with.broadcast_async(x, root)?.wait()?,
                    How::Scoped => with.scope(|s| s.broadcast(&mut x, root)?.wait().map(drop))?,
                }
                Ok(numbers(x))
            }
            Operation::AllReduce => {
                let mut x = mine(c);
                match how {
                    How::Sync => with.all_reduce(&mut x, op)?,
                    How::Async => x = with.all_reduce_async(x, op)?.wait()?,
                    How::Scoped => with.scope(|s| s.all_reduce(&mut x, op)?.wait().map(drop))?,
                }
                Ok(numbers(x))
            }
            Operation::Reduce => {
                let mut x = mine(c);
                match how {
                    How::Sync => with.reduce(&mut x, op, root)?,
                    How::Async => x = with.reduce_async(x, op, root)?.wait()?,
                    How::Scoped => with.scope(|s| s.reduce(&mut x, op, root)?.wait().map(drop))?,
                }
                Ok(numbers(x))
            }
            Operation::AllGather => {
                let (x, mut y) = (mine(c), mine(c * n));
                match how {
                    How::Sync => with.all_gather(&x, &mut y)?,
                    How::Async => y = with.all_gather_async(x, y)?.wait()?.1,
                    How::Scoped => with.scope(|s| s.all_gather(&x, &mut y)?.wait().map(drop))?,
                }
                Ok(numbers(y))
            }
            Operation::ReduceScatter => {
                let (x, mut y) = (mine(c * n), mine(c));
                match how {
                    How::Sync => with.reduce_scatter(&x, &mut y, op)?,
                    How::Async => y = with.reduce_scatter_async(x, y, op)?.wait()?.1,
                    How::Scoped => with.scope(|s| s.reduce_scatter(&x, &mut y, op)?.wait().map(drop))?,
                }
                Ok(numbers(y))
            }
            Operation::Barrier => {
                match how {
                    How::Sync => with.barrier()?,
                    How::Async => with.barrier_async()?.wait()?,
                    How::Scoped => with.scope(|s| s.barrier()?.wait())?,
                }
                Ok(Vec::new())
            }
            _ => blocks::issue(self, &with, how, (comm.rank(), n), op, &mine).map(numbers),
        }
    }
}

/// An all_reduce whose result is checked: the communicator works.
pub fn works(comm: &Communicator, salt: usize) {
    let n = comm.size() as i64;
    let mut x: Vec<i64> = (0..33).map(|i| (comm.rank() + i + salt) as i64).collect();
    comm.all_reduce(&mut x, Sum).unwrap_or_else(|e| panic!("the communicator should work: {e}"));
    let base = n * (n - 1) / 2;
    for (i, v) in x.iter().enumerate() {
        assert_eq!(*v, base + n * (i + salt) as i64, "element {i}");
    }
}

/// The communicator has failed for good: later calls, `is_failed` and `cause` say so.
pub fn is_sticky(comm: &Communicator, first: &Error) {
    assert!(comm.is_failed(), "after {first}");
    let cause = comm.cause().expect("a failed communicator has a cause");
    assert!(!cause.is_recoverable());
    for how in FORMS {
        let later = Call::new(Operation::AllReduce, 3).issue(comm, how).unwrap_err();
        assert_eq!(later.kind().name(), cause.kind().name(), "first {first}; cause {cause}; later {later}");
        assert_eq!(later.context().comm.as_deref(), Some(comm.name()));
        assert_eq!(later.context().rank, Some((comm.rank(), comm.size())));
    }
}

/// Time since the first call, with the result.
pub fn timed<T>(f: impl FnOnce() -> T) -> (T, Duration) {
    let t = Instant::now();
    let r = f();
    (r, t.elapsed())
}

/// Whether two descriptors say the same, apart from the backend's own field.
pub fn same_call(a: &OpDesc, b: &OpDesc) -> bool {
    OpDesc { flags: 0, ..*a } == OpDesc { flags: 0, ..*b }
}

/// The rank and cause of a `PeerFailed`.
pub fn peer_failed(e: &Error) -> Option<(usize, comm_core::PeerCause)> {
    match e.kind() {
        ErrorKind::PeerFailed { rank, cause } => Some((*rank, *cause)),
        _ => None,
    }
}

/// The end of the world: finalize, which must succeed.
pub fn finalize(comm: &Communicator) {
    comm.finalize(Duration::from_secs(10)).unwrap_or_else(|e| panic!("finalize: {e}"));
}
