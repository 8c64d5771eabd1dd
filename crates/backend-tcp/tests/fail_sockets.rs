//! The failure cases of backend-sim over sockets: a sample of each table, ranks as threads.
// Arrays are `Copy`: without the borrow a receive would go into a copy.
#![allow(clippy::needless_borrows_for_generic_args)]

#[path = "../../backend-sim/tests/failing/mod.rs"]
mod failing;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use comm_core::{CommOptions, Communicator};
use comm_store::MemoryStore;
use failing::ends::{
    Where, a_rank_that_does_not_come, a_rank_that_leaves, abort_from_another_thread, finalize_against_a_call,
    finalize_that_times_out, finalize_with_work_in_flight, leave_right_after_finalize,
};
use failing::{COLLECTIVES, Call, FORMS, cases, mismatch, p2p, pairwise, print_worst, refused};

/// A world over sockets, whose ranks meet in a store in memory.
fn make(n: usize, o: &CommOptions) -> Vec<Communicator> {
    static WORLDS: AtomicUsize = AtomicUsize::new(0);
    let name = format!("{}-{}", o.effective_name(), WORLDS.fetch_add(1, Ordering::Relaxed));
    let store = Arc::new(MemoryStore::new());
    let ranks: Vec<_> = (0..n)
        .map(|r| {
            let o = o.clone().name(name.as_str()).rank_and_size(r, n).store(Arc::clone(&store) as _);
            let o = o.bootstrap_timeout(Duration::from_secs(20)).checksum(n == 2);
            std::thread::spawn(move || backend_tcp::connect(o).unwrap())
        })
        .collect();
    ranks.into_iter().map(|t| t.join().unwrap()).collect()
}

/// All pairs of a world of 2 to 5 and one of its ranks.
fn one_of() -> Vec<(usize, usize)> {
    (2..=5).flat_map(|n| (0..n).map(move |r| (n, r))).collect()
}

#[test]
fn mismatches() {
    cases(mismatch::table(true).into_iter().step_by(41).collect(), |c| mismatch::check(make, c));
    cases(mismatch::table(false).into_iter().step_by(211).collect(), |c| mismatch::check(make, c));
    cases(p2p::table().into_iter().step_by(2).collect(), |c| p2p::check(make, c));
    cases(pairwise::table().into_iter().step_by(5).collect(), |c| pairwise::check(make, c));
    pairwise::unmatched_batch(make);
    pairwise::left_over_message(make, 3, 2, 0);
    pairwise::left_over_message(make, 2, 1, 1);
    pairwise::left_over_work(make, 3, 2, 0, false);
    pairwise::left_over_work(make, 2, 0, 1, true);
    cases(pairwise::silent_table().into_iter().step_by(11).collect(), |&(n, odd, a, b)| {
        pairwise::silent(make, n, odd, a, b);
    });
    print_worst();
}

#[test]
fn refusals() {
    cases(refused::table(&refused::all()).into_iter().step_by(5).collect(), |c| refused::check(make, c));
    print_worst();
}

#[test]
fn missing_ranks() {
    let mut list = Vec::new();
    for (n, late) in one_of() {
        for (i, op) in COLLECTIVES.into_iter().enumerate().filter(|(i, _)| (i + n + late) % 2 == 0) {
            let call = Call { root: (late + i) % n, ..Call::new(op, if late % 2 == 0 { 6 } else { 70_000 }) };
            list.push((n, late, call, FORMS[(late + i) % 3]));
        }
    }
    cases(list, |&(n, late, call, how)| {
        a_rank_that_does_not_come(make, n, late, call, how, Duration::from_millis(300));
    });
    print_worst();
}

#[test]
fn closed_ranks_and_aborts() {
    let mut list = Vec::new();
    for (n, who) in one_of() {
        for (i, op) in COLLECTIVES.into_iter().enumerate() {
            for (j, count) in [3, 70_000].into_iter().enumerate() {
                let how = FORMS[(i + j + who) % 3];
                list.push((n, who, Where::Inside(Call { root: who, ..Call::new(op, count) }, how)));
            }
        }
        list.push((n, who, Where::Recv));
        list.push((n, who, Where::Between));
    }
    cases(list, |&(n, who, place)| a_rank_that_leaves(make, n, who, place));
    cases(one_of(), |&(n, who)| abort_from_another_thread(make, n, who, FORMS[(n + who) % 3]));
    print_worst();
}

#[test]
fn ends() {
    let mut list = Vec::new();
    for (n, who) in one_of() {
        for (i, op) in COLLECTIVES.into_iter().enumerate() {
            let count = if (i + who) % 2 == 0 { 9 } else { 70_000 };
            list.push((n, who, Call { root: (who + n / 4) % n, ..Call::new(op, count) }, FORMS[(i + n) % 3]));
        }
    }
    cases(list, |&(n, who, call, how)| finalize_against_a_call(make, n, who, call, how));
    cases(one_of(), |&(n, late)| finalize_that_times_out(make, n, late));
    for n in 1..=5 {
        finalize_with_work_in_flight(make, n);
        leave_right_after_finalize(make, n, 40);
    }
    print_worst();
}
