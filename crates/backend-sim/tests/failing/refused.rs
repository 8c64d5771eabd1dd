//! Calls that one rank refuses: it gets its own error, the others `PeerRefused`, and work goes on.

use super::*;
use comm_core::{Device, DynBuf, DynBufMut, IntoBuf, IntoBufMut, Observer, RawBuf, RawBufMut, StreamOrdered};

/// Memory that lies where the test says, to make buffers overlap: borrowed memory cannot.
#[derive(Clone, Copy)]
struct At(*mut f32, usize);

// SAFETY: points into a vector that the test keeps alive and untouched during the call.
unsafe impl IntoBuf for At {
    type Elem = f32;
    fn buf(&self) -> Result<RawBuf> {
        Ok(RawBuf::new(self.0.cast(), self.1 * 4, DType::F32, Device::CPU))
    }
}
// SAFETY: as above.
unsafe impl IntoBufMut for At {
    fn buf_mut(&mut self) -> Result<RawBufMut> {
        Ok(RawBufMut::new(self.0.cast(), self.1 * 4, DType::F32, Device::CPU))
    }
}
// SAFETY: host memory.
unsafe impl StreamOrdered for At {}

/// What is wrong with the call of the rank that refuses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bad {
    BroadcastRoot,
    ReduceRoot,
    ReduceIntoNoOutput,
    ReduceIntoLength,
    AllReduceIntoLength,
    AllReduceIntoOverlap,
    AllReduceIllegal,
    ReduceIllegal,
    ReduceScatterIllegal,
    AllGatherLength,
    AllGatherInPlaceDivides,
    AllGatherOverlap,
    ReduceScatterDivides,
    ReduceScatterLength,
    ReduceScatterInPlaceDivides,
    ReduceScatterOverlap,
    DynTypes,
    /// A misspelt hint on this operation.
    Hint(Operation),
    /// An algorithm that the operation does not have.
    Algorithm(Operation),
    /// An observer's veto.
    Veto(Operation),
}

pub fn all() -> Vec<Bad> {
    use Bad::*;
    let mut list = vec![
        BroadcastRoot,
        ReduceRoot,
        ReduceIntoNoOutput,
        ReduceIntoLength,
        AllReduceIntoLength,
        AllReduceIntoOverlap,
        AllReduceIllegal,
        ReduceIllegal,
        ReduceScatterIllegal,
        AllGatherLength,
        AllGatherInPlaceDivides,
        AllGatherOverlap,
        ReduceScatterDivides,
        ReduceScatterLength,
        ReduceScatterInPlaceDivides,
        ReduceScatterOverlap,
        DynTypes,
    ];
    for op in COLLECTIVES {
        list.extend([Hint(op), Algorithm(op), Veto(op)]);
    }
    list
}

impl Bad {
    /// The right form of the call.
    pub fn good(self, root: usize, count: usize) -> Call {
        use Bad::*;
        let op = match self {
            BroadcastRoot => Operation::Broadcast,
            ReduceRoot | ReduceIntoNoOutput | ReduceIntoLength | ReduceIllegal => Operation::Reduce,
            AllReduceIntoLength | AllReduceIntoOverlap | AllReduceIllegal | DynTypes => Operation::AllReduce,
            AllGatherLength | AllGatherInPlaceDivides | AllGatherOverlap => Operation::AllGather,
            ReduceScatterDivides
            | ReduceScatterLength
            | ReduceScatterInPlaceDivides
            | ReduceScatterOverlap
            | ReduceScatterIllegal => Operation::ReduceScatter,
            Hint(op) | Algorithm(op) | Veto(op) => op,
        };
        Call { root, ..Call::new(op, count) }
    }

    /// Whether the rank has to be the root for its call to be wrong.
    fn only_at_root(self) -> bool {
        matches!(self, Self::ReduceIntoNoOutput | Self::ReduceIntoLength)
    }

    /// Whether the run-time typed calls, which are synchronous, are meant.
    fn only_sync(self) -> bool {
        use Bad::*;
        matches!(
            self,
            AllReduceIllegal
                | ReduceIllegal
                | ReduceScatterIllegal
                | DynTypes
                | AllReduceIntoOverlap
                | AllGatherOverlap
                | ReduceScatterOverlap
        )
    }

    /// What the error must be, and say.
    fn says(self) -> (&'static str, &'static str) {
        use Bad::*;
        match self {
            BroadcastRoot | ReduceRoot => ("InvalidArgument", "out of range: this communicator has ranks 0 to"),
            ReduceIntoNoOutput => ("InvalidArgument", "must pass an output"),
            ReduceIntoLength | AllReduceIntoLength | AllGatherLength | ReduceScatterLength => {
                ("InvalidArgument", "but must have")
            }
            AllReduceIntoOverlap | AllGatherOverlap | ReduceScatterOverlap => ("InvalidArgument", "overlap"),
            AllReduceIllegal | ReduceIllegal | ReduceScatterIllegal => ("Unsupported", "band"),
            AllGatherInPlaceDivides | ReduceScatterDivides | ReduceScatterInPlaceDivides => {
                ("InvalidArgument", "cannot share evenly")
            }
            DynTypes => ("InvalidArgument", "must have the same type"),
            Hint(_) => ("InvalidArgument", "did you mean 'algo'"),
            Algorithm(_) => ("InvalidArgument", "has no algorithm 'rnig'"),
            Veto(_) => ("InvalidArgument", "not today"),
        }
    }

    /// Makes the wrong call.
    fn issue(self, comm: &Communicator, root: usize, count: usize, how: How) -> Result<()> {
        use Bad::*;
        let (n, r) = (comm.size(), comm.rank());
        let x = vec![1f32; count];
        let mut y = vec![1f32; count * n + 1];
        let all = count * n;
        let base = y.as_mut_ptr();
        let mut bytes = vec![0u8; 8 * n];
        let good = self.good(root, count);
        match self {
            BroadcastRoot => Call { root: n, ..good }.issue(comm, how).map(drop),
            ReduceRoot => Call { root: usize::MAX, ..good }.issue(comm, how).map(drop),
            ReduceIntoNoOutput => match how {
                How::Sync => comm.reduce_into(&x, None::<&mut Vec<f32>>, Sum, root),
                How::Async => comm.reduce_into_async(x, None::<Vec<f32>>, Sum, root)?.wait().map(drop),
                How::Scoped => comm.scope(|s| s.reduce_into(&x, None::<&mut Vec<f32>>, Sum, root)?.wait().map(drop)),
            },
            ReduceIntoLength => match how {
                How::Sync => comm.reduce_into(&x, Some(&mut y), Sum, root),
                How::Async => comm.reduce_into_async(x, Some(y), Sum, root)?.wait().map(drop),
                How::Scoped => comm.scope(|s| s.reduce_into(&x, Some(&mut y), Sum, root)?.wait().map(drop)),
            },
            AllReduceIntoLength => match how {
                How::Sync => comm.all_reduce_into(&x, &mut y, Sum),
                How::Async => comm.all_reduce_into_async(x, y, Sum)?.wait().map(drop),
                How::Scoped => comm.scope(|s| s.all_reduce_into(&x, &mut y, Sum)?.wait().map(drop)),
            },
            AllReduceIntoOverlap => comm.all_reduce_into(At(base, count), At(base.wrapping_add(1), count), Sum),
            AllReduceIllegal => comm.all_reduce_dyn(DynBufMut::new(&mut bytes, DType::F32)?, ReduceOp::BAnd),
            ReduceIllegal => comm.reduce_dyn(DynBufMut::new(&mut bytes, DType::F32)?, ReduceOp::BAnd, root),
            ReduceScatterIllegal => {
                comm.reduce_scatter_in_place_dyn(DynBufMut::new(&mut bytes, DType::F32)?, ReduceOp::BAnd)
            }
            AllGatherLength => match how {
                How::Sync => comm.all_gather(&x, &mut y),
                How::Async => comm.all_gather_async(x, y)?.wait().map(drop),
                How::Scoped => comm.scope(|s| s.all_gather(&x, &mut y)?.wait().map(drop)),
            },
            AllGatherInPlaceDivides => match how {
                How::Sync => comm.all_gather_in_place(&mut y),
                How::Async => comm.all_gather_in_place_async(y)?.wait().map(drop),
                How::Scoped => comm.scope(|s| s.all_gather_in_place(&mut y)?.wait().map(drop)),
            },
            AllGatherOverlap => comm.all_gather(At(base.wrapping_add(r * count), count), At(base, all)),
            ReduceScatterDivides => match how {
                How::Sync => comm.reduce_scatter(&y, &mut x.clone(), Sum),
                How::Async => comm.reduce_scatter_async(y, x, Sum)?.wait().map(drop),
                How::Scoped => {
                    let mut z = x;
                    comm.scope(|s| s.reduce_scatter(&y, &mut z, Sum)?.wait().map(drop))
                }
            },
            ReduceScatterLength => match how {
                How::Sync => comm.reduce_scatter(&y[..all], &mut vec![0f32; count + 1][..], Sum),
                How::Async => comm.reduce_scatter_async(vec![0f32; all], vec![0f32; count + 1], Sum)?.wait().map(drop),
                How::Scoped => {
                    let mut z = vec![0f32; count + 1];
                    comm.scope(|s| s.reduce_scatter(&y[..all], &mut z, Sum)?.wait().map(drop))
                }
            },
            ReduceScatterInPlaceDivides => match how {
                How::Sync => comm.reduce_scatter_in_place(&mut y, Sum),
                How::Async => comm.reduce_scatter_in_place_async(y, Sum)?.wait().map(drop),
                How::Scoped => comm.scope(|s| s.reduce_scatter_in_place(&mut y, Sum)?.wait().map(drop)),
            },
            ReduceScatterOverlap => comm.reduce_scatter(At(base, all), At(base.wrapping_add(r * count), count), Sum),
            DynTypes => {
                let (a, b) = bytes.split_at_mut(4 * n);
                comm.all_reduce_into_dyn(DynBuf::new(a, DType::F32)?, DynBufMut::new(b, DType::I32)?, ReduceOp::Sum)
            }
            Hint(_) => hinted(good, comm, how, "alog", "ring"),
            Algorithm(_) => Call { algo: Some("rnig"), ..good }.issue(comm, how).map(drop),
            Veto(_) => {
                let guard = comm.observe(Arc::new(No));
                let r = good.issue(comm, how).map(drop);
                drop(guard);
                r
            }
        }
    }
}

/// An observer that refuses everything.
pub struct No;

impl Observer for No {
    fn pre(&self, _: &comm_core::Call<'_>) -> std::result::Result<(), String> {
        Err("not today".into())
    }
}

/// The call with an arbitrary hint.
fn hinted(call: Call, comm: &Communicator, how: How, name: &str, value: &str) -> Result<()> {
    let with = comm.with(CallOptions::new().hint(name, value));
    let n = comm.size();
    let mut x = vec![1f32; call.count];
    let mut y = vec![1f32; call.count * n];
    if how == How::Async {
        return match call.op {
            Operation::Broadcast => with.broadcast_async(x, call.root)?.wait().map(drop),
            Operation::AllReduce => with.all_reduce_async(x, Sum)?.wait().map(drop),
            Operation::Reduce => with.reduce_async(x, Sum, call.root)?.wait().map(drop),
            Operation::AllGather => with.all_gather_async(x, y)?.wait().map(drop),
            Operation::ReduceScatter => with.reduce_scatter_async(y, x, Sum)?.wait().map(drop),
            _ => with.barrier_async()?.wait(),
        };
    }
    match call.op {
        Operation::Broadcast => with.broadcast(&mut x, call.root),
        Operation::AllReduce => with.all_reduce(&mut x, Sum),
        Operation::Reduce => with.reduce(&mut x, Sum, call.root),
        Operation::AllGather => with.all_gather(&x, &mut y),
        Operation::ReduceScatter => with.reduce_scatter(&y, &mut x, Sum),
        _ => with.barrier(),
    }
}

#[derive(Clone, Debug)]
pub struct Case {
    pub n: usize,
    pub bad: Bad,
    pub who: usize,
    pub root: usize,
    pub count: usize,
    pub how: How,
    /// The refusing rank calls this much later than the others; negative: earlier.
    pub later_ms: i64,
}

pub fn table(bads: &[Bad]) -> Vec<Case> {
    let mut list = Vec::new();
    let mut i = 0;
    for n in 2..=5usize {
        for who in 0..n {
            for &bad in bads {
                for how in FORMS {
                    if bad.only_sync() && how != How::Sync {
                        continue;
                    }
                    let root = if bad.only_at_root() { who } else { i % n };
                    // A call of one rank, too short to divide, would be right.
                    let count = if i % 4 == 0 { 40_000 } else { 12 };
                    let later_ms = [-10, 0, 10][i % 3];
                    list.push(Case { n, bad, who, root, count, how, later_ms });
                    i += 1;
                }
            }
        }
    }
    list
}

pub fn check(make: MakeWorld, c: &Case) {
    let comms = make(c.n, &CommOptions::new().name("refused").timeout(HANGS));
    let case = c.clone();
    let seen =
        run(&format!("{c:?}"), &comms, move |comm| {
            let c = &case;
            let wait = |ms: i64| std::thread::sleep(Duration::from_millis(ms.max(0) as u64));
            let good = c.bad.good(c.root, c.count);
            let refuses = comm.rank() == c.who;
            wait(if refuses { c.later_ms } else { -c.later_ms });
            let (r, t) = timed(|| {
                if refuses { c.bad.issue(comm, c.root, c.count, c.how) } else { good.issue(comm, c.how).map(drop) }
            });
            // The same again, everybody rightly; then a reduction; then the end.
            good.issue(comm, c.how).unwrap_or_else(|e| panic!("the call after a refused one: {e}"));
            works(comm, 7);
            assert!(!comm.is_failed() && comm.cause().is_none());
            finalize(comm);
            (r, t)
        });
    let (kind, words) = c.bad.says();
    for (r, (own, t)) in seen.iter().enumerate() {
        took("refused call", t.saturating_sub(Duration::from_millis(c.later_ms.unsigned_abs())));
        match own {
            Err(e) if r == c.who => {
                assert_eq!(e.kind().name(), kind, "{e} in {c:?}");
                assert!(e.to_string().contains(words), "{e} in {c:?}");
                assert!(e.context().op.is_some() && e.context().rank == Some((r, c.n)), "{e}");
            }
            Err(e) => {
                let ErrorKind::PeerRefused { rank, reason } = e.kind() else { panic!("rank {r} got {e} in {c:?}") };
                assert_eq!(*rank, c.who, "{e}");
                assert!(reason.contains(words), "rank {r}: {e} in {c:?}");
            }
            // Complete without the refusing rank.
            Ok(()) => {
                assert_ne!(r, c.who, "a wrong call went well in {c:?}");
                assert!(!c.bad.good(c.root, c.count).needs_all(), "rank {r} completed in {c:?}");
            }
        }
    }
}
