//! Ranks that make different calls: one case, over any world.

use super::*;

/// `odd` makes `other`, everybody else `base`.
#[derive(Clone, Debug)]
pub struct Case {
    pub n: usize,
    pub odd: usize,
    pub base: Call,
    pub other: Call,
    pub how: How,
    /// Calls that go well before.
    pub before: usize,
    /// Those whose call went well finalize instead of calling again.
    pub then_finalize: bool,
    /// Ranks drop their communicator with the error.
    pub leave: bool,
}

/// What one rank saw: its call's result, the error that ended it, when.
struct Saw {
    call: Result<Vec<f64>>,
    error: Error,
    at: Duration,
}

fn rank(comm: &Communicator, c: &Case, warm: &Barrier) -> Saw {
    for i in 0..c.before {
        works(comm, i);
    }
    // The failure of a later call may overtake the end of an earlier one; that is not what is tested here.
    warm.wait();
    let start = Instant::now();
    let call = if comm.rank() == c.odd { c.other } else { c.base };
    let r = call.issue(comm, c.how);
    let error = match &r {
        Err(e) => e.clone(),
        Ok(_) if c.then_finalize => {
            comm.finalize(HANGS).expect_err("finalize after a mismatch must say so, but all is well")
        }
        // When everybody's call was complete without the others', all do get to the barrier before they know.
        Ok(_) => Call::new(Operation::Barrier, 0).issue(comm, c.how).err().unwrap_or_else(|| {
            assert!(!call.needs_all() && !c.other.needs_all(), "a barrier after a mismatch must not pass");
            comm.finalize(HANGS).expect_err("finalize after a mismatch must say so, but all is well")
        }),
    };
    let at = start.elapsed();
    if r.is_err() && !c.leave {
        is_sticky(comm, &error);
        // The orderly end tells it once more.
        let last = comm.finalize(PROMISED).unwrap_err();
        assert_eq!(last.kind().name(), "Mismatch", "finalize: {last}");
    }
    Saw { call: r, error, at }
}

/// Runs the case and checks every rank.
pub fn check(make: MakeWorld, c: &Case) {
    let comms = make(c.n, &CommOptions::new().name("mismatch").timeout(HANGS));
    let what = format!("{c:?}");
    let (case, warm) = (c.clone(), Barrier::new(c.n));
    let seen = if c.leave {
        run_owned(&what, comms, move |comm| rank(&comm, &case, &warm))
    } else {
        run(&what, &comms, move |comm| rank(comm, &case, &warm))
    };
    for (r, saw) in seen.iter().enumerate() {
        took("mismatch", saw.at);
        let (mine, theirs_should) = if r == c.odd { (c.other, c.base) } else { (c.base, c.other) };
        let ErrorKind::Mismatch { seq, ranks, theirs, ours } = saw.error.kind() else {
            panic!("rank {r} got {} in {c:?}", saw.error);
        };
        assert_eq!(*seq, c.before as u64, "rank {r}: {} in {c:?}", saw.error);
        assert!(same_call(ours, &mine.desc(c.n)), "rank {r}: {} in {c:?}", saw.error);
        assert!(same_call(theirs, &theirs_should.desc(c.n)), "rank {r}: {} in {c:?}", saw.error);
        if r == c.odd {
            assert!(!ranks.is_empty() && !ranks.contains(&r), "rank {r}: {ranks:?} in {c:?}");
        } else {
            assert_eq!(ranks, &[c.odd], "rank {r} in {c:?}");
        }
        if let Ok(data) = &saw.call {
            // Only who needs nothing from the odd rank may have completed, and with data of its own call.
            assert!(!mine.needs_all(), "rank {r} completed {mine:?} in {c:?}");
            let clean = match mine.op {
                Operation::Broadcast => {
                    assert!(r == mine.root || mine.root != c.odd, "rank {r} took the odd rank's data in {c:?}");
                    mine.root as f64 + 1.0
                }
                Operation::Scatter | Operation::ScatterV => {
                    let own = r == mine.root || mine.count == 0;
                    assert!(own || mine.root != c.odd, "rank {r} took the odd rank's data in {c:?}");
                    mine.root as f64 + 1.0
                }
                Operation::Scan | Operation::Exscan => {
                    let last = if mine.op == Operation::Scan { r + 1 } else { r };
                    let foreign = (0..last).any(|i| i != r && (i == c.odd || r == c.odd));
                    assert!(!foreign || mine.count == 0, "rank {r} took the odd rank's data in {c:?}");
                    // Exscan leaves the first rank's buffer as it is.
                    let sum: usize = (0..last).map(|i| i + 1).sum();
                    if last == 0 { 1.0 } else { sum as f64 }
                }
                _ => {
                    assert!(
                        r != mine.root || mine.count == 0,
                        "the root cannot have everybody's contribution in {c:?}"
                    );
                    r as f64 + 1.0
                }
            };
            assert!(data.iter().all(|x| *x == clean), "rank {r} has foreign data in {c:?}");
        }
    }
}

/// Every kind of difference, with each rank as the odd one, in worlds of 2 to 5.
pub fn table(small: bool) -> Vec<Case> {
    let mut list = Vec::new();
    let mut i = 0usize;
    for n in 2..=5usize {
        for odd in 0..n {
            for (base, other) in pairs(n, if small { 16 } else { 50_000 }) {
                for how in FORMS {
                    // Endings take turns.
                    let (before, then_finalize, leave) = ((i / 3) % 2, (i / 2).is_multiple_of(2), i.is_multiple_of(5));
                    list.push(Case { n, odd, base, other, how, before, then_finalize, leave });
                    i += 1;
                }
            }
        }
    }
    list
}

fn pairs(n: usize, count: usize) -> Vec<(Call, Call)> {
    let mut list = Vec::new();
    for a in COLLECTIVES {
        for b in COLLECTIVES {
            if a != b {
                list.push((Call::new(a, count), Call::new(b, count)));
            }
        }
        let base = Call::new(a, count);
        if a == Operation::Barrier {
            continue;
        }
        list.push((base, Call { dtype: DType::I32, ..base }));
        list.push((base, Call { dtype: DType::F64, ..base }));
        // Where lengths are between two ranks, the others' calls are fine: see `pairwise`.
        if !is_pairwise(a) {
            list.push((base, Call { count: count + 1, ..base }));
            list.push((base, Call { count: count / 2, ..base }));
            list.push((base, Call { count: 0, ..base }));
        }
        if is_reduction(a) {
            list.push((base, Call { redop: ReduceOp::Max, ..base }));
        }
        if is_rooted(a) {
            for (x, y) in [(0, 1), (1, 0), (n - 1, 0), (0, n - 1)] {
                list.push((Call { root: x, ..base }, Call { root: y, ..base }));
            }
        }
    }
    let all_reduce = Call::new(Operation::AllReduce, count);
    for (x, y) in [("ring", "direct"), ("direct", "recursive_doubling"), ("recursive_doubling", "ring")] {
        list.push((Call { algo: Some(x), ..all_reduce }, Call { algo: Some(y), ..all_reduce }));
    }
    list
}
