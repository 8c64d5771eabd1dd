//! Point-to-point messages whose two ends do not fit.

use super::*;

#[derive(Clone, Debug)]
pub struct Case {
    pub n: usize,
    pub from: usize,
    pub to: usize,
    /// Elements that the sender sends and the receiver expects.
    pub counts: (usize, usize),
    /// The receiver expects another type of the same size.
    pub other_type: bool,
    pub how: How,
    /// The receiver calls this much later than the sender; negative: earlier.
    pub later_ms: i64,
    /// Collectives that go well before.
    pub before: usize,
}

fn send(comm: &Communicator, c: &Case) -> Result<()> {
    let x = vec![1.0f32; c.counts.0];
    match c.how {
        How::Sync => comm.send(&x, c.to),
        How::Async => comm.send_async(x, c.to)?.wait().map(drop),
        How::Scoped => comm.scope(|s| s.send(&x, c.to)?.wait().map(drop)),
    }
}

fn recv<T: comm_core::Pod + Default + Send>(comm: &Communicator, c: &Case) -> Result<()> {
    let mut x = vec![T::default(); c.counts.1];
    match c.how {
        How::Sync => comm.recv(&mut x, c.from),
        How::Async => comm.recv_async(x, c.from)?.wait().map(drop),
        How::Scoped => comm.scope(|s| s.recv(&mut x, c.from)?.wait().map(drop)),
    }
}

/// Runs the case: both ends get `Mismatch` that says what the other wanted, the others `Aborted` that says so.
pub fn check(make: MakeWorld, c: &Case) {
    let comms = make(c.n, &CommOptions::new().name("p2p").timeout(HANGS));
    let (case, warm) = (c.clone(), Barrier::new(c.n));
    let seen = run(&format!("{c:?}"), &comms, move |comm| {
        let c = &case;
        for i in 0..c.before {
            works(comm, i);
        }
        warm.wait();
        let wait = |ms: i64| std::thread::sleep(Duration::from_millis(ms.max(0) as u64));
        let (r, t) = if comm.rank() == c.from {
            wait(-c.later_ms);
            timed(|| send(comm, c))
        } else if comm.rank() == c.to {
            wait(c.later_ms);
            timed(|| if c.other_type { recv::<i32>(comm, c) } else { recv::<f32>(comm, c) })
        } else {
            (Ok(()), Duration::ZERO)
        };
        // Everybody's next call.
        let (next, t2) = timed(|| comm.barrier());
        let next = next.expect_err("a barrier after a mismatched message must not pass");
        is_sticky(comm, &next);
        assert_eq!(comm.finalize(PROMISED).unwrap_err().kind().name(), next.kind().name());
        (r, next, t.saturating_sub(Duration::from_millis(c.later_ms.unsigned_abs())).max(t2))
    });
    let sent = OpDesc::new(Operation::Send).elements(DType::F32, c.counts.0);
    let dtype = if c.other_type { DType::I32 } else { DType::F32 };
    let wanted = OpDesc::new(Operation::Recv).elements(dtype, c.counts.1);
    for (r, (own, next, t)) in seen.iter().enumerate() {
        took("mismatch of messages", t.saturating_sub(Duration::from_millis(c.later_ms.unsigned_abs())));
        let (mine, other, peer) = if r == c.from { (sent, wanted, c.to) } else { (wanted, sent, c.from) };
        let involved = r == c.from || r == c.to;
        if r == c.to {
            assert!(own.is_err(), "the receiver took a message that does not fit: {c:?}");
        }
        for e in own.as_ref().err().into_iter().chain([next]) {
            match e.kind() {
                ErrorKind::Mismatch { seq: 0, ranks, theirs, ours } if involved => {
                    assert_eq!(ranks, &[peer], "rank {r}: {e} in {c:?}");
                    assert!(same_call(theirs, &other) && same_call(ours, &mine), "rank {r}: {e} in {c:?}");
                }
                ErrorKind::Aborted { rank, cause } if !involved => {
                    assert!(*rank == c.from || *rank == c.to, "rank {r}: {e}");
                    assert!(cause.contains("do not match"), "rank {r}: {e}");
                }
                _ => panic!("rank {r} got {e} in {c:?}"),
            }
        }
    }
}

/// Short, long, and short against long; early and late receivers; with and without collectives before.
pub fn table() -> Vec<Case> {
    let mut list = Vec::new();
    let mut i = 0;
    for n in 2..=4usize {
        for (counts, other_type) in [
            ((10, 11), false),
            ((11, 10), false),
            ((10, 0), false),
            ((0, 10), false),
            ((10, 10), true),
            ((50_000, 50_001), false),
            ((50_001, 50_000), false),
            ((50_000, 50_000), true),
            ((10, 50_000), false),
            ((50_000, 10), false),
        ] {
            for later_ms in [-20, 0, 20] {
                for how in FORMS {
                    let from = i % n;
                    let to = (from + 1 + (i / 7) % (n - 1)) % n;
                    list.push(Case { n, from, to, counts, other_type, how, later_ms, before: (i / 2) % 2 });
                    i += 1;
                }
            }
        }
    }
    list
}
