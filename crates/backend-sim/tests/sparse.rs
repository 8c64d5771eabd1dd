//! Worlds in which most ranks have no link to each other: larger than 8 ranks, or in a ring. Everything that the other
//! tests show for small worlds holds there too; what is special is that links are made on the way, and that news of
//! failures and ends has to be passed on.
// Arrays are `Copy`: without the borrow a receive would go into a copy.
#![allow(clippy::needless_borrows_for_generic_args)]

mod failing;
mod suite;

use std::time::Duration;

use comm_core::{CallOptions, CommOptions, Communicator, ErrorKind, Operation, op};
use failing::ends::{
    Where, a_rank_that_does_not_come, a_rank_that_leaves, abort_from_another_thread, finalize_against_a_call,
    finalize_that_times_out, finalize_with_work_in_flight, leave_right_after_finalize,
};
use failing::refused::{self, Bad};
use failing::{COLLECTIVES, Call, FORMS, HANGS, How, cases, mismatch, print_worst, run, run_owned};
use suite::Rank;

/// Few links by size.
fn auto(n: usize, o: &CommOptions) -> Vec<Communicator> {
    backend_sim::world(n, o).unwrap()
}

/// Two links a rank.
fn ring(n: usize, o: &CommOptions) -> Vec<Communicator> {
    backend_sim::world(n, &o.clone().hint("connect", "ring")).unwrap()
}

const MAKERS: [fn(usize, &CommOptions) -> Vec<Communicator>; 2] = [auto, ring];

/// Worlds, how they are linked, and some ranks of each: the first, the last, odd ones between.
fn places() -> Vec<(usize, usize, usize)> {
    let mut list = Vec::new();
    for make in 0..2 {
        for n in [9, 12, 17] {
            for rank in [0, 1, 6, n - 1] {
                list.push((make, n, rank));
            }
        }
    }
    list
}

#[test]
fn every_operation_goes_well() {
    for make in MAKERS {
        for n in [9, 12, 16, 33] {
            let comms = make(n, &CommOptions::new().timeout(HANGS));
            run("every operation", &comms, |comm| {
                for (i, op) in COLLECTIVES.into_iter().enumerate() {
                    for count in [0, 3, 5000] {
                        let call = Call { root: (i * 5) % comm.size(), ..Call::new(op, count) };
                        call.issue(comm, FORMS[i % 3]).unwrap_or_else(|e| panic!("{call:?}: {e}"));
                    }
                }
                comm.finalize(HANGS).unwrap();
            });
        }
    }
}

#[test]
fn every_algorithm_gives_the_right_result() {
    for make in MAKERS {
        let comms = make(10, &CommOptions::new().timeout(HANGS));
        run("algorithms", &comms, |comm| {
            suite::collectives::algorithms_forms_roots(&Rank::new(comm)).unwrap();
            comm.finalize(HANGS).unwrap();
        });
    }
}

/// Every pair exchanges messages, both ends first, so that both ask for the link at once.
#[test]
fn messages_between_all_pairs() {
    for make in MAKERS {
        for n in [9, 20] {
            let comms = make(n, &CommOptions::new().timeout(HANGS));
            run("pairs", &comms, |comm| {
                let (n, me) = (comm.size(), comm.rank());
                for d in 1..n {
                    for len in [1usize, 100_000] {
                        let (to, from) = ((me + d) % n, (me + n - d) % n);
                        let x = vec![(me * 1000 + d) as u32; len];
                        let mut y = vec![0u32; len];
                        comm.sendrecv(&x, &mut y, to, from).unwrap();
                        assert!(y.iter().all(|v| *v == (from * 1000 + d) as u32));
                    }
                }
                comm.finalize(HANGS).unwrap();
            });
        }
    }
}

/// Children of ranks that have no links among them.
#[test]
fn children_of_far_ranks() {
    for make in MAKERS {
        let comms = make(24, &CommOptions::new().timeout(HANGS));
        run("children", &comms, |comm| {
            let me = comm.rank();
            let list: Vec<usize> = (0..24).filter(|r| r % 5 == me % 5).collect();
            let child = comm.split(&list, "far").unwrap().unwrap();
            for i in 0..3 {
                let mut x = [me as u64 + i];
                child.all_reduce(&mut x, op::Sum).unwrap();
                assert_eq!(x[0], list.iter().map(|r| *r as u64 + i).sum::<u64>());
            }
            child.barrier().unwrap();
            child.finalize(HANGS).unwrap();
            comm.barrier().unwrap();
            comm.finalize(HANGS).unwrap();
        });
    }
}

#[test]
fn a_missing_rank_is_named() {
    let mut list = Vec::new();
    for (i, (make, n, late)) in places().into_iter().enumerate() {
        for k in [0, 5] {
            let op = COLLECTIVES[(i + k) % COLLECTIVES.len()];
            let call = Call { root: (late + i) % n, ..Call::new(op, if i % 2 == 0 { 6 } else { 70_000 }) };
            list.push((make, n, late, call, FORMS[i % 3]));
        }
    }
    // Long enough for news of who has arrived to have come around.
    let timeout = Duration::from_millis(1200);
    cases(list, move |&(make, n, late, call, how)| {
        a_rank_that_does_not_come(MAKERS[make], n, late, call, how, timeout);
    });
    print_worst();
}

#[test]
fn a_rank_that_leaves_is_named() {
    let mut list = Vec::new();
    for (make, n, who) in places() {
        let call = Call { root: (who + 1) % n, ..Call::new(COLLECTIVES[list.len() % 16], 6) };
        for place in [Where::Inside(call, FORMS[list.len() % 3]), Where::Recv, Where::Between] {
            list.push((make, n, who, place));
        }
    }
    cases(list, |&(make, n, who, place)| a_rank_that_leaves(MAKERS[make], n, who, place));
    print_worst();
}

#[test]
fn an_abort_reaches_everybody() {
    let list = places();
    cases(list, |&(make, n, who)| abort_from_another_thread(MAKERS[make], n, who, FORMS[who % 3]));
    print_worst();
}

#[test]
fn other_calls_are_reported_to_everybody() {
    let mut list = Vec::new();
    for (i, (make, n, odd)) in places().into_iter().enumerate() {
        for k in 0..4 {
            let (a, b) = (COLLECTIVES[(i + k) % 16], COLLECTIVES[(i + 5 * k + 7) % 16]);
            if a == b {
                continue;
            }
            let base = Call { root: i % n, ..Call::new(a, 6) };
            let other = Call { root: (i + 1) % n, ..Call::new(b, 6) };
            let (how, leave) = (FORMS[k % 3], k % 2 == 1);
            let c = mismatch::Case { n, odd, base, other, how, before: k, then_finalize: k == 2, leave };
            list.push((make, c));
        }
    }
    // Two roots of a reduction exchange nothing: only those who wait can find it.
    for (make, n, odd) in places() {
        let base = Call { root: (odd + 1) % n, ..Call::new(Operation::Reduce, 6) };
        let other = Call { root: (odd + 2) % n, ..base };
        let c = mismatch::Case { n, odd, base, other, how: How::Sync, before: 0, then_finalize: false, leave: false };
        list.push((make, c));
    }
    cases(list, |(make, c)| mismatch::check(MAKERS[*make], c));
    print_worst();
}

#[test]
fn refused_calls_end_everywhere_and_do_no_harm() {
    let bads: Vec<Bad> = refused::all().into_iter().step_by(4).collect();
    let table: Vec<refused::Case> = refused::table(&bads).into_iter().step_by(29).collect();
    assert!(table.len() > 3);
    let mut list = Vec::new();
    for (i, c) in table.into_iter().take(12).enumerate() {
        for n in [9, 12] {
            list.push((i % 2, refused::Case { n, ..c.clone() }));
        }
    }
    cases(list, |(make, c)| refused::check(MAKERS[*make], c));
    print_worst();
}

#[test]
fn ends_of_all_kinds() {
    let mut list = Vec::new();
    for (make, n, who) in places() {
        list.push((make, n, who));
    }
    cases(list, |&(make, n, who)| {
        let call = Call { root: (who + 1) % n, ..Call::new(Operation::AllReduce, 6) };
        finalize_against_a_call(MAKERS[make], n, who, call, FORMS[who % 3]);
        finalize_that_times_out(MAKERS[make], n, who);
    });
    for make in MAKERS {
        finalize_with_work_in_flight(make, 9);
        finalize_with_work_in_flight(make, 17);
        leave_right_after_finalize(make, 9, 20);
        leave_right_after_finalize(make, 20, 5);
    }
    print_worst();
}

/// Calls without elements leave no trace in data: what each rank called last is compared when all finalize.
#[test]
fn calls_without_elements() {
    for make in MAKERS {
        for (n, odd) in [(9, 4), (17, 16)] {
            let base = Call::new(Operation::AllReduce, 0);
            let other = Call::new(Operation::Broadcast, 0);
            failing::pairwise::silent(make, n, odd, base, other);
        }
    }
}

/// A message to a rank without link that does not come: its own two ranks time out, and say so.
#[test]
fn a_message_that_nobody_sends() {
    for make in MAKERS {
        let comms = make(12, &CommOptions::new().timeout(HANGS));
        run_owned("message", comms, |comm| {
            if comm.rank() == 3 {
                let options = CallOptions::new().timeout(Duration::from_millis(400));
                let e = comm.with(options).recv(&mut [0u8; 3], 9).unwrap_err();
                assert!(matches!(e.kind(), ErrorKind::Timeout { missing, .. } if missing == &[9]), "{e}");
            } else {
                let e = comm.barrier().unwrap_err();
                assert!(matches!(e.kind(), ErrorKind::Aborted { rank: 3, .. }), "{e}");
            }
        });
    }
}
