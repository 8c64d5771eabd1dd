//! The dynamic regime over sockets, among threads.

#[path = "../../backend-sim/tests/regroup/mod.rs"]
mod regroup;

use std::sync::Arc;

use comm_core::{Communicator, Secret};
use comm_store::MemoryStore;

macro_rules! scenes {
    ($module:ident: $($name:ident),* $(,)?) => {
        $(#[test]
        fn $name() {
            regroup::$module::$name(backend_tcp::connect);
        })*
    };
}

scenes!(changes:
    members_come_to_a_communicator_that_had_none,
    ranks_follow_the_list_and_a_set_is_sorted,
    a_rank_is_left_out,
    alone_and_together_and_alone,
    the_same_members_again,
    a_half_first_and_then_everyone,
    two_halves_become_one,
    after_an_abort,
    three_of_four_go_on_and_a_newcomer_joins,
    down_to_one_and_grown_again,
    what_was_set_survives,
    what_is_replaced_is_stale,
    who_waits_in_a_call_learns_that_it_is_left_out,
    a_child_is_reconfigured_by_itself,
    a_world_with_few_links,
    the_last_to_come_finds_the_others_ready,
    as_a_work,
    what_does_not_need_a_rank_that_moves_on,
    who_is_left_out_shrinks,
    finalize_waits_for_the_next_membership,
    works_of_a_communicator_that_is_dropped,
);

scenes!(wrong:
    handles_that_are_none,
    members_that_do_not_fit_together,
    a_dynamic_communicator_takes_no_rank,
    one_does_not_come,
    who_came_too_late_waits_for_those_who_call_again,
    one_does_not_come_to_a_world_with_few_links,
    uuids_that_differ,
    lists_that_differ,
    who_is_not_waited_for_does_no_harm,
    a_stale_handle_of_another,
    one_has_been_finalized,
    two_go_during_an_attempt,
    one_is_gone_already,
    attempts_side_by_side,
);

/// A world that met in a store goes on without it, and without the rank 0 that would have kept it.
#[test]
fn any_world_goes_on_without_its_store_and_rank_0() {
    let store = Arc::new(MemoryStore::new());
    let mut world: Vec<Communicator> = std::thread::scope(|s| {
        let options = |r| {
            let mut o = regroup::options().rank_and_size(r, 4).store(Arc::clone(&store) as Arc<_>);
            o.dynamic = false;
            o
        };
        let ranks: Vec<_> = (0..4).map(|r| s.spawn(move || backend_tcp::connect(options(r)).unwrap())).collect();
        ranks.into_iter().map(|r| r.join().unwrap()).collect()
    });
    drop(store);
    drop(world.remove(0));
    let rest = regroup::form(&regroup::refs(&world));
    assert_eq!(rest[0].generation(), 1);
    regroup::end(&rest);
}

#[test]
fn members_prove_that_they_know_the_secret() {
    let with = |secret: &str| {
        let secret = Secret::new(secret).unwrap();
        backend_tcp::connect(regroup::options().secret(secret).checksum(true)).unwrap()
    };
    let same = [with("open"), with("open"), with("open")];
    regroup::end(&regroup::form(&regroup::refs(&same)));
    let other = [with("open"), with("shut")];
    let list = regroup::handles(&regroup::refs(&other));
    for e in regroup::attempt(regroup::uuid(), &regroup::refs(&other), &list, regroup::LIMIT) {
        let e = e.unwrap_err();
        assert!(e.to_string().contains("secret"), "{e}");
    }
    let none = backend_tcp::connect(regroup::options().checksum(true)).unwrap();
    let mixed = [&other[0], &none];
    for e in regroup::attempt(regroup::uuid(), &mixed, &regroup::handles(&mixed), regroup::LIMIT) {
        assert!(e.unwrap_err().to_string().contains("rank 1 has no secret"));
    }
}

/// More members than are linked to everybody.
#[test]
fn a_dozen_members() {
    let c = regroup::some(backend_tcp::connect, 12);
    let now = regroup::form(&regroup::refs(&c));
    let rest: Vec<&Communicator> = now.iter().rev().step_by(2).collect();
    regroup::end(&regroup::form(&rest));
}
