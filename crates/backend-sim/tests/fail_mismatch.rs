//! Ranks that make different calls get `Mismatch`, all of them, soon, and nobody a wrong result.

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
