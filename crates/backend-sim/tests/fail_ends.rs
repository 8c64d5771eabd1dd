//! Timeouts, ranks that leave, aborts, and the end of communicators.
// Arrays are `Copy`: without the borrow a receive would go into a copy.
#![allow(clippy::needless_borrows_for_generic_args)]

mod failing;

use std::time::Duration;

use comm_core::{CallOptions, CommOptions, Communicator, ErrorKind, Operation};
use failing::ends::{
    Where, a_rank_that_does_not_come, a_rank_that_leaves, abort_from_another_thread, finalize_against_a_call,
    finalize_that_times_out, finalize_with_work_in_flight, leave_right_after_finalize,
};
use failing::{COLLECTIVES, Call, FORMS, HANGS, cases, print_worst, run, timed, took};

fn make(n: usize, o: &CommOptions) -> Vec<Communicator> {
    backend_sim::world(n, o).unwrap()
}

/// All pairs of a world of 2 to 5 and one of its ranks.
fn one_of() -> Vec<(usize, usize)> {
    (2..=5).flat_map(|n| (0..n).map(move |r| (n, r))).collect()
}

#[test]
fn a_missing_rank_is_named() {
    let mut list = Vec::new();
    for (n, late) in one_of() {
        for (i, op) in COLLECTIVES.into_iter().enumerate() {
            let call = Call { root: (late + i) % n, ..Call::new(op, if (n + i) % 2 == 0 { 6 } else { 70_000 }) };
            let ms = if (n + late + i) % 6 == 0 { 1000 } else { 300 };
            list.push((n, late, call, FORMS[(late + i) % 3], Duration::from_millis(ms)));
        }
    }
    cases(list, |&(n, late, call, how, timeout)| a_rank_that_does_not_come(make, n, late, call, how, timeout));
    print_worst();
}

/// Nobody waits for the work: the engine ends it, and the handle says so.
#[test]
fn work_times_out_by_itself() {
    for n in [2, 4] {
        let comms = make(n, &CommOptions::new().timeout(HANGS));
        run("by itself", &comms, |comm| {
            if comm.rank() == 1 {
                std::thread::sleep(Duration::from_millis(900));
                return;
            }
            let options = CallOptions::new().timeout(Duration::from_millis(300));
            let w = comm.with(options).all_reduce_async(vec![1f32; 10], comm_core::op::Sum).unwrap();
            std::thread::sleep(Duration::from_millis(800));
            let e = w.error().expect("the work should have ended by itself");
            assert!(
                matches!(e.kind(), ErrorKind::Timeout { missing, .. } if missing == &[1])
                    || matches!(e.kind(), ErrorKind::Aborted { .. }),
                "{e}"
            );
            assert!(w.duration().unwrap() < Duration::from_millis(800), "{:?}", w.duration());
            assert!(pollster::block_on(w).is_err());
            assert!(comm.is_failed());
        });
    }
}

#[test]
fn a_message_that_does_not_come() {
    let mut list = Vec::new();
    for how in FORMS {
        for send in [true, false] {
            list.push((how, send));
        }
    }
    cases(list, |&(how, send)| {
        let comms = make(3, &CommOptions::new().timeout(Duration::from_millis(300)));
        run("message", &comms, move |comm| {
            if comm.rank() != 2 {
                // They hear of it.
                std::thread::sleep(Duration::from_millis(600));
                let e = comm.cause().expect("all members hear of a failure");
                assert!(
                    matches!(e.kind(), ErrorKind::Aborted { rank: 2, cause } if cause.contains("timed out")),
                    "{e}"
                );
                return;
            }
            let mut x = vec![1u8; 100_000];
            let (r, t) = timed(|| match (how, send) {
                (failing::How::Sync, false) => comm.recv(&mut x, 1),
                (failing::How::Async, false) => comm.recv_async(x.clone(), 1)?.wait().map(drop),
                (failing::How::Scoped, false) => comm.scope(|s| s.recv(&mut x, 1)?.wait().map(drop)),
                (failing::How::Sync, true) => comm.send(&x, 1),
                (failing::How::Async, true) => comm.send_async(x.clone(), 1)?.wait().map(drop),
                (failing::How::Scoped, true) => comm.scope(|s| s.send(&x, 1)?.wait().map(drop)),
            });
            took("message timeout", t.saturating_sub(Duration::from_millis(300)));
            let e = r.unwrap_err();
            assert!(matches!(e.kind(), ErrorKind::Timeout { missing, .. } if missing == &[1]), "{e}");
        });
    });
}

#[test]
fn a_rank_that_closes_is_named() {
    let mut list = Vec::new();
    for (n, who) in one_of() {
        for op in COLLECTIVES {
            for count in [3, 70_000] {
                for how in FORMS {
                    list.push((n, who, Where::Inside(Call { root: who, ..Call::new(op, count) }, how)));
                }
            }
        }
        list.push((n, who, Where::Recv));
        list.push((n, who, Where::Between));
    }
    cases(list, |&(n, who, place)| a_rank_that_leaves(make, n, who, place));
    print_worst();
}

#[test]
fn abort_reaches_everybody() {
    let list: Vec<_> = one_of().into_iter().flat_map(|(n, r)| FORMS.map(|how| (n, r, how))).collect();
    cases(list, |&(n, who, how)| abort_from_another_thread(make, n, who, how));
    print_worst();
}

#[test]
fn finalize_while_others_call() {
    let mut list = Vec::new();
    for (n, who) in one_of() {
        for op in COLLECTIVES {
            for how in FORMS {
                list.push((n, who, Call { root: who, ..Call::new(op, 9) }, how));
                list.push((n, who, Call { root: (who + 1) % n, ..Call::new(op, 70_000) }, how));
            }
        }
    }
    cases(list, |&(n, who, call, how)| finalize_against_a_call(make, n, who, call, how));
    print_worst();
}

#[test]
fn finalize_drains_and_is_the_end() {
    for n in 1..=5 {
        finalize_with_work_in_flight(make, n);
    }
}

#[test]
fn finalize_names_who_does_not_come() {
    cases(one_of(), |&(n, late)| finalize_that_times_out(make, n, late));
}

#[test]
fn leaving_right_after_finalize_disturbs_nobody() {
    for n in 1..=5 {
        leave_right_after_finalize(make, n, 150);
    }
}

/// Finalize by some, a barrier by others: all are told what the others did.
#[test]
fn half_finalize_half_barrier() {
    let comms = make(4, &CommOptions::new().timeout(HANGS));
    let out = run("half", &comms, |comm| {
        let r = if comm.rank() < 2 { comm.finalize(HANGS) } else { comm.barrier() };
        r.unwrap_err()
    });
    for (r, e) in out.iter().enumerate() {
        let ErrorKind::Mismatch { ours, theirs, .. } = e.kind() else { panic!("rank {r}: {e}") };
        let mine = if r < 2 { Operation::Finalize } else { Operation::Barrier };
        assert!(ours.operation == mine && theirs.operation != mine, "rank {r}: {e}");
    }
}
