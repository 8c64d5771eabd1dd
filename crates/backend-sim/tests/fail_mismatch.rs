//! Ranks that make different calls get `Mismatch`, all of them, soon, and nobody a wrong result.
// Arrays are `Copy`: without the borrow a receive would go into a copy.
#![allow(clippy::needless_borrows_for_generic_args)]

mod failing;

use comm_core::{CommOptions, Communicator, Operation, op};
use failing::mismatch::{check, table};
use failing::{Call, How, cases, print_worst};

fn make(n: usize, o: &CommOptions) -> Vec<Communicator> {
    backend_sim::world(n, o).unwrap()
}

#[test]
fn every_pair_of_small_calls_and_every_odd_rank() {
    cases(table(true), |c| check(make, c));
    print_worst();
}

#[test]
fn long_calls_that_need_many_frames() {
    // Every seventh: the table is the same, the data a thousand times as long.
    cases(table(false).into_iter().step_by(7).collect(), |c| check(make, c));
    print_worst();
}

#[test]
fn messages_that_do_not_fit() {
    cases(failing::p2p::table(), |c| failing::p2p::check(make, c));
    print_worst();
}

#[test]
fn lengths_that_two_ranks_see_differently() {
    cases(failing::pairwise::table(), |c| failing::pairwise::check(make, c));
    print_worst();
}

#[test]
fn messages_without_counterpart() {
    failing::pairwise::unmatched_batch(make);
    for n in 1..=4 {
        for from in 0..n {
            for to in 0..n {
                failing::pairwise::left_over_message(make, n, from, to);
                if from != to {
                    failing::pairwise::left_over_work(make, n, from, to, (from + to) % 2 == 0);
                }
            }
        }
    }
    print_worst();
}

#[test]
fn calls_without_elements() {
    cases(failing::pairwise::silent_table(), |&(n, odd, a, b)| failing::pairwise::silent(make, n, odd, a, b));
    print_worst();
}

/// Each of two ranks thinks it is the root of a reduction: no data flows at all, and nobody may hang.
#[test]
fn two_roots_wait_for_each_other() {
    for n in 2..=5 {
        let comms = make(n, &CommOptions::new().timeout(failing::HANGS));
        let out = failing::run("two roots", &comms, |comm| {
            let root = if comm.rank() == 1 { 1 } else { 0 };
            let call = Call { root, ..Call::new(Operation::Reduce, 8) };
            let (r, t) = failing::timed(|| call.issue(comm, How::Sync));
            let r = r.and_then(|_| comm.finalize(failing::HANGS));
            (r.unwrap_err(), t)
        });
        for (r, (e, t)) in out.iter().enumerate() {
            assert_eq!(e.kind().name(), "Mismatch", "rank {r} of {n}: {e}");
            failing::took("two roots", *t);
        }
    }
    print_worst();
}

/// Messages to oneself are checked like others.
#[test]
fn a_message_to_oneself_that_does_not_fit() {
    let comms = make(1, &CommOptions::new().timeout(failing::HANGS));
    let w = comms[0].send_async(vec![1u8; 5], 0).unwrap();
    let e = comms[0].recv(&mut [0u8; 6], 0).unwrap_err();
    assert_eq!(e.kind().name(), "Mismatch", "{e}");
    drop(w.wait());
    comms[0].all_reduce(&mut [1i32], op::Sum).unwrap_err();
}
