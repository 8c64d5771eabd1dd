//! Shared by backend-sim and backend-tcp: what is left of a world after some of its ranks are gone.
#![allow(dead_code, missing_docs, unreachable_pub)]

use std::sync::{Arc, Barrier, Mutex, PoisonError};
use std::time::{Duration, Instant};

use comm_core::{CommOptions, Communicator, ErrorKind, Result, op};

use crate::failing::{HANGS, MakeWorld, run_owned};

/// Shrink and a correct all_reduce never take longer, however loaded the machine is. Promised are 2 s on one that
/// is not; what it was is printed.
const BACK: Duration = Duration::from_secs(15);

static WORST: Mutex<Duration> = Mutex::new(Duration::ZERO);

/// Prints the worst time so far; seen with `--nocapture`.
pub fn print_worst() {
    println!("worst time of a shrink and all_reduce: {:.1?}", *WORST.lock().unwrap_or_else(PoisonError::into_inner));
}

fn options() -> CommOptions {
    CommOptions::new().timeout(HANGS)
}

/// A sum over ranks of the first world that only the right members give.
pub fn sums(comm: &Communicator) {
    try_sums(comm).unwrap();
}

fn try_sums(comm: &Communicator) -> Result<()> {
    let n = comm.size();
    let root = comm.ranks()[comm.rank()] as u64;
    for len in [1usize, 5000, 100_000] {
        let mut x = vec![1u64 << root; len];
        comm.all_reduce(&mut x, op::Sum)?;
        let all: u64 = comm.ranks().iter().map(|r| 1u64 << r).sum();
        assert!(x.iter().all(|v| *v == all), "rank {} of {n}: {:b} is not {all:b}", comm.rank(), x[0]);
    }
    comm.barrier()
}

/// The new communicator is one of exactly these ranks of the first world.
pub fn is_of(comm: &Communicator, ranks: &[usize], generation: u32) {
    assert_eq!(comm.ranks(), ranks);
    assert_eq!((comm.size(), comm.generation()), (ranks.len(), generation));
    assert_eq!(comm.local_size(), ranks.len());
    assert!(!comm.is_failed(), "{:?}", comm.cause());
}

/// Shrinks as a program would: again when somebody has died meanwhile.
pub fn shrink(comm: &Communicator) -> Communicator {
    for _ in 0..8 {
        match comm.shrink(Duration::from_secs(10)) {
            Ok(c) => return c,
            Err(e) => assert!(matches!(e.kind(), ErrorKind::PeerFailed { .. }), "rank {}: {e}", comm.rank()),
        }
    }
    panic!("rank {}: shrink fails again and again", comm.rank());
}

fn survivors(n: usize, victims: &[usize]) -> Vec<usize> {
    (0..n).filter(|r| !victims.contains(r)).collect()
}

/// Some ranks drop their communicators while the others are in a reduction.
pub fn in_mid_all_reduce(make: MakeWorld, n: usize, victims: &[usize], len: usize) {
    let what = format!("{n} ranks, {victims:?} go in mid all_reduce of {len}");
    let (left, gone) = (survivors(n, victims), victims.to_vec());
    run_owned(&what.clone(), make(n, &options()), move |comm| {
        let place = gone.iter().position(|v| *v == comm.rank());
        let mut x = vec![1f32; len];
        let mut calls = 0;
        let e = loop {
            // Two that go do not go at once.
            if place.is_some_and(|p| calls == 3 + 2 * p) {
                return;
            }
            calls += 1;
            if let Err(e) = comm.all_reduce(&mut x, op::Max) {
                break e;
            }
        };
        if place.is_some() {
            return;
        }
        assert!(matches!(e.kind(), ErrorKind::PeerFailed { rank, .. } if gone.contains(rank)), "{what}: {e}");
        let t = Instant::now();
        let new = shrink(&comm);
        is_of(&new, &left, 1);
        sums(&new);
        let took = t.elapsed();
        let mut worst = WORST.lock().unwrap_or_else(PoisonError::into_inner);
        *worst = took.max(*worst);
        drop(worst);
        assert!(took < BACK, "{what}: back after {took:?}");
        let cause = comm.cause().unwrap();
        assert!(matches!(cause.kind(), ErrorKind::PeerFailed { rank, .. } if gone.contains(rank)), "{what}: {cause}");
        assert!(comm.barrier().is_err());
        // The old one may go first: the new one stands on its own.
        drop(comm);
        sums(&new);
        new.finalize(HANGS).unwrap();
    });
}

/// Of a whole communicator it is a copy, and both can be used.
pub fn of_a_healthy_communicator(make: MakeWorld, n: usize) {
    run_owned("healthy", make(n, &options()), move |comm| {
        let all: Vec<usize> = (0..n).collect();
        assert_eq!(comm.agree_survivors(HANGS).unwrap(), all);
        sums(&comm);
        let a = comm.shrink(HANGS).unwrap();
        let b = comm.shrink(HANGS).unwrap();
        for c in [&a, &comm, &b] {
            sums(c);
        }
        is_of(&a, &all, 1);
        is_of(&b, &all, 1);
        is_of(&comm, &all, 0);
        let c = b.shrink(HANGS).unwrap();
        is_of(&c, &all, 2);
        sums(&c);
        for c in [c, a, comm, b] {
            c.finalize(HANGS).unwrap();
        }
    });
}

/// Who lives and does not come is named, not left out; a later call gets all together.
pub fn one_does_not_come(make: MakeWorld, n: usize, late: usize, failed: bool) {
    let what = format!("{n} ranks, {late} comes late, failed: {failed}");
    let gate = Arc::new(Barrier::new(n));
    run_owned(&what.clone(), make(n, &options()), move |comm| {
        if failed && comm.rank() == 0 {
            comm.abort("to see what then");
        }
        let timeout = Duration::from_millis(300);
        if comm.rank() != late {
            // Where ranks are slow, others are missing too in the beginning.
            let mut calls = 0;
            let named = |calls: &mut u32| {
                *calls += 1;
                let t = Instant::now();
                let e = comm.agree_survivors(timeout).unwrap_err();
                assert!(t.elapsed() >= timeout && t.elapsed() < timeout + BACK, "{what}: {:?}", t.elapsed());
                let ErrorKind::Timeout { missing, .. } = e.kind() else {
                    panic!("{what}: rank {} got {e}", comm.rank())
                };
                assert!(*calls < 20, "{what}: rank {} got {e}", comm.rank());
                missing == &[late]
            };
            while !named(&mut calls) {}
        }
        gate.wait();
        let all: Vec<usize> = (0..comm.size()).collect();
        assert_eq!(comm.agree_survivors(HANGS).unwrap(), all, "{what}");
        let new = comm.shrink(HANGS).unwrap();
        is_of(&new, &all, 1);
        sums(&new);
        gate.wait();
    });
}

/// A rank is lost between the two agreements of a shrink: all others see that alike, and the next one goes well.
pub fn death_inside_shrink(make: MakeWorld, n: usize, victims: &[usize]) {
    let what = format!("{n} ranks, {victims:?} go inside shrink");
    let (left, gone) = (survivors(n, victims), victims.to_vec());
    let gate = Arc::new(Barrier::new(n));
    let ended = run_owned(&what.clone(), make(n, &options()), move |comm| {
        if comm.rank() == n - 1 {
            comm.abort("to see what then");
        }
        if gone.contains(&comm.rank()) {
            // The first half of it.
            assert_eq!(comm.agree_survivors(HANGS).unwrap().len(), n);
            drop(comm);
            gate.wait();
            return None;
        }
        let first = comm.shrink(HANGS);
        let failed = match &first {
            Ok(_) => false,
            Err(e) => {
                let known = matches!(e.kind(), ErrorKind::PeerFailed { rank, .. } if gone.contains(rank));
                assert!(known, "{what}: {e}");
                true
            }
        };
        let new = first.or_else(|_| comm.shrink(HANGS)).unwrap_or_else(|e| panic!("{what}: {e}"));
        is_of(&new, &left, 1);
        sums(&new);
        gate.wait();
        Some(failed)
    });
    let ended: Vec<bool> = ended.into_iter().flatten().collect();
    assert!(ended.iter().all(|e| *e), "those that lack a member fail together: {ended:?}");
}

/// From `n` down to one, the ranks in `order` one after the other, each new communicator made from the one before.
pub fn down_to_one(make: MakeWorld, n: usize, order: &[usize]) {
    let what = format!("{n} ranks, going in the order {order:?}");
    let order = order.to_vec();
    run_owned(&what, make(n, &options()), move |mut comm| {
        let me = comm.rank();
        for (i, victim) in order.iter().enumerate() {
            let done = try_sums(&comm);
            if *victim == me {
                return done.unwrap();
            }
            // It may have gone while this rank was still in the last call.
            let mut done = done;
            let e = loop {
                match done {
                    Ok(()) => done = comm.barrier(),
                    Err(e) => break e,
                }
            };
            assert!(matches!(e.kind(), ErrorKind::PeerFailed { .. }), "{e}");
            let new = shrink(&comm);
            is_of(&new, &survivors(n, &order[..=i]), i as u32 + 1);
            comm = new;
        }
        sums(&comm);
        assert_eq!(comm.size(), n - order.len());
        comm.finalize(HANGS).unwrap();
    });
}

/// The list first, then the communicator.
pub fn agree_then_shrink(make: MakeWorld, n: usize, victim: usize) {
    let left = survivors(n, &[victim]);
    run_owned("agree, then shrink", make(n, &options()), move |comm| -> Result<()> {
        if comm.rank() == victim {
            return Ok(());
        }
        for _ in 0..3 {
            assert_eq!(comm.agree_survivors(HANGS)?, left);
        }
        let new = shrink(&comm);
        is_of(&new, &left, 1);
        sums(&new);
        assert_eq!(new.agree_survivors(HANGS)?, (0..left.len()).collect::<Vec<_>>());
        new.finalize(HANGS)
    })
    .into_iter()
    .for_each(|r| r.unwrap());
}
