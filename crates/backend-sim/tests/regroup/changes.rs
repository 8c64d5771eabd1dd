//! Memberships that change: all of torchcomms' ReconfigureTest, and what it leaves out.

use std::collections::BTreeSet;

use super::*;

/// ReconfigureTest `basic` and the all-reduce after it; and what a communicator is before.
pub fn members_come_to_a_communicator_that_had_none(make: Make) {
    let c = some(make, 3);
    for x in &c {
        assert_eq!((x.size(), x.generation()), (0, 0));
        assert!(!x.is_failed());
        let e = x.all_reduce(&mut [1f32; 4], op::Sum).unwrap_err();
        assert!(invalid(&e).contains("no members yet"), "{e}");
        // Without anybody, and twice the same.
        assert_eq!(x.init_handle().unwrap(), x.init_handle().unwrap());
    }
    end(&form(&refs(&c)));
}

pub fn ranks_follow_the_list_and_a_set_is_sorted(make: Make) {
    let c = some(make, 4);
    let first = form(&[&c[3], &c[1], &c[0], &c[2]]);
    let backwards: Vec<&Communicator> = first.iter().rev().collect();
    let second = form(&backwards);
    let set: BTreeSet<String> = handles(&refs(&second)).into_iter().collect();
    let sorted: Vec<String> = set.iter().cloned().collect();
    let id = uuid();
    let third = on_all(&second, |c| {
        let own = c.init_handle().unwrap();
        let new = c.reconfigure(id, set.clone(), LIMIT, &[]).unwrap();
        assert_eq!(sorted[new.rank()], own);
        new
    });
    let mut ranks: Vec<usize> = third.iter().map(Communicator::rank).collect();
    work(&third);
    ranks.sort_unstable();
    assert_eq!(ranks, [0, 1, 2, 3]);
    // Identities last: the order of a set is the same next time.
    let again: BTreeSet<String> = handles(&refs(&third)).into_iter().collect();
    let order = |set: &BTreeSet<String>| set.iter().map(|h| h[..20].to_owned()).collect::<Vec<_>>();
    assert_eq!(order(&set), order(&again));
}

/// ReconfigureTest `shrink`: without the last rank, without one in the middle; values as there.
pub fn a_rank_is_left_out(make: Make) {
    for without in [3, 1, 0] {
        let c = some(make, 4);
        let old = form(&refs(&c));
        let rest: Vec<&Communicator> = old.iter().filter(|c| c.rank() != without).collect();
        let new = form(&rest);
        on_all(&new, |c| {
            for i in 0..3 {
                let mut x = vec![(c.rank() + 1 + i) as f32; 2048];
                c.all_reduce(&mut x, op::Sum).unwrap();
                assert!(x.iter().all(|v| *v == (6 + 3 * i) as f32));
            }
            let mut x = [if c.rank() == 0 { 42f32 } else { 0.0 }; 7];
            c.broadcast(&mut x, 0).unwrap();
            assert_eq!(x, [42.0; 7]);
        });
        // It learns that there is a newer one without it, and may come back.
        let left = &old[without];
        let e = left.barrier().unwrap_err();
        assert_eq!(stale(&e), (1, 2), "{e}");
        let mut all = vec![left];
        all.extend(&new);
        end(&form(&all));
    }
}

/// ReconfigureTest `solo`: alone, all, alone.
pub fn alone_and_together_and_alone(make: Make) {
    let c = some(make, 3);
    let alone: Vec<Communicator> = c.iter().flat_map(|c| form(&[c])).collect();
    let all = form(&refs(&alone));
    let alone: Vec<Communicator> = all.iter().flat_map(|c| form(&[c])).collect();
    assert!(alone.iter().all(|c| (c.rank(), c.size(), c.generation()) == (0, 1, 3)));
    end(&form(&refs(&alone)));
}

/// ReconfigureTest `identity`.
pub fn the_same_members_again(make: Make) {
    let c = some(make, 3);
    let mut now = form(&refs(&c));
    for _ in 0..3 {
        now = form(&refs(&now));
    }
    assert_eq!(now[0].generation(), 4);
    end(&now);
}

/// ReconfigureTest `late`: a half first, then everyone.
pub fn a_half_first_and_then_everyone(make: Make) {
    let c = some(make, 4);
    let half = form(&[&c[2], &c[3]]);
    end(&form(&[&c[0], &half[0], &c[1], &half[1]]));
}

/// ReconfigureTest `split brain`.
pub fn two_halves_become_one(make: Make) {
    let c = some(make, 5);
    let (a, b) = (form(&[&c[0], &c[1]]), form(&[&c[2], &c[3], &c[4]]));
    let b = form(&refs(&b));
    end(&form(&[&b[1], &a[0], &b[0], &a[1], &b[2]]));
}

/// ReconfigureTest `after abort`.
pub fn after_an_abort(make: Make) {
    let c = some(make, 3);
    c[1].abort("before there is anybody");
    let old = form(&refs(&c));
    old[2].abort("enough");
    for e in on_all(&old, |c| c.barrier().unwrap_err()) {
        assert!(matches!(e.kind(), ErrorKind::Aborted { rank: 2, .. }), "{e}");
    }
    end(&form(&refs(&old)));
}

/// One of four goes in mid all_reduce; three go on; a newcomer makes four again.
pub fn three_of_four_go_on_and_a_newcomer_joins(make: Make) {
    for victim in [2, 0] {
        let c = some(make, 4);
        let mut old = form(&refs(&c));
        let gone = old.remove(victim);
        let errors = thread::scope(|s| {
            let inside = s.spawn(|| on_all(&old, |c| c.all_reduce(&mut vec![1f32; 1 << 18], op::Sum).unwrap_err()));
            thread::sleep(Duration::from_millis(30));
            drop(gone);
            inside.join().unwrap()
        });
        for e in errors {
            assert!(matches!(e.kind(), ErrorKind::PeerFailed { rank, .. } if *rank == victim), "{e}");
        }
        let three = form(&refs(&old));
        let newcomer = make(options()).unwrap();
        let mut four = vec![&newcomer];
        four.extend(&three);
        end(&form(&four));
    }
}

pub fn down_to_one_and_grown_again(make: Make) {
    let c = some(make, 3);
    let old = form(&refs(&c));
    drop(c);
    let mut one = old;
    while one.len() > 1 {
        one.pop();
        one = form(&refs(&one));
    }
    let more = some(make, 2);
    end(&form(&[&more[0], &one[0], &more[1]]));
}

pub fn what_was_set_survives(make: Make) {
    let time = Duration::from_millis(34_567);
    let c: Vec<Communicator> =
        (0..2).map(|_| make(options().name("kept").timeout(time).hint("connect", "full")).unwrap()).collect();
    let mut now = form(&refs(&c));
    for hint in [None, Some(("algo", "ring"))] {
        let (id, list) = (uuid(), handles(&refs(&now)));
        let hints: Vec<(&str, &str)> = hint.into_iter().collect();
        now = on_all(&now, |c| c.reconfigure(id, &list, LIMIT, &hints).unwrap());
        work(&now);
    }
    for c in &now {
        let o = c.options();
        assert_eq!((c.name(), o.timeout), ("kept", time));
        let hint = |name: &str| o.hints.get(name).map(String::as_str);
        assert_eq!((hint("connect"), hint("algo")), (Some("full"), Some("ring")));
    }
    end(&now);
}

/// The old handle, in every way.
pub fn what_is_replaced_is_stale(make: Make) {
    let c = some(make, 2);
    let old = form(&refs(&c));
    let given = handles(&refs(&old));
    let work = old[0].recv_async(vec![0u8; 8], 1).unwrap();
    let new = form(&refs(&old));
    assert_eq!(stale(&work.wait().unwrap_err()), (1, 2));
    for (x, (ours, theirs)) in old.iter().map(|c| (c, (1, 2))).chain(c.iter().map(|c| (c, (0, 1)))) {
        assert!(x.is_failed());
        assert_eq!(stale(&x.barrier().unwrap_err()), (ours, theirs));
        assert_eq!(stale(&x.init_handle().unwrap_err()), (ours, theirs));
        let list = handles(&refs(&new));
        assert_eq!(stale(&x.reconfigure(uuid(), &list, SHORT, &[]).unwrap_err()), (ours, theirs));
    }
    // And the new one does not take the old one's handle for its own.
    let e = new[0].reconfigure(uuid(), &given, SHORT, &[]).unwrap_err();
    assert_eq!(stale(&e), (2, 1));
    super::work(&new);
    end(&new);
}

/// Those who are in a call when the others go on without them.
pub fn who_waits_in_a_call_learns_that_it_is_left_out(make: Make) {
    let c = some(make, 3);
    let old = form(&refs(&c));
    thread::scope(|s| {
        let waits = s.spawn(|| old[1].all_reduce(&mut [1f32; 4], op::Sum).unwrap_err());
        thread::sleep(Duration::from_millis(50));
        let new = form(&[&old[2], &old[0]]);
        assert_eq!(stale(&waits.join().unwrap()), (1, 2));
        end(&new);
    });
}

/// Children are communicators like others; the parent stays what it is.
pub fn a_child_is_reconfigured_by_itself(make: Make) {
    let c = some(make, 4);
    let all = form(&refs(&c));
    let pairs = on_all(&all, |c| {
        let mine = if c.rank() < 2 { [0, 1] } else { [2, 3] };
        c.split(&mine, "pair").unwrap().unwrap()
    });
    let crossed = form(&[&pairs[3], &pairs[0], &pairs[2], &pairs[1]]);
    work(&all);
    end(&crossed);
    end(&all);
}

/// Links that are made when they are needed.
pub fn a_world_with_few_links(make: Make) {
    let c: Vec<Communicator> = (0..5).map(|_| make(options().hint("connect", "ring")).unwrap()).collect();
    let now = form(&refs(&c));
    on_all(&now, |c| {
        let n = c.size();
        let (x, mut y) = (vec![c.rank() as u64; n], vec![0u64; n]);
        c.all_to_all(&x, &mut y).unwrap();
        assert!(y.iter().enumerate().all(|(r, v)| *v == r as u64));
    });
    end(&form(&refs(&now)));
}

/// Members come one after the other; the last is not waited for longer than it takes.
pub fn the_last_to_come_finds_the_others_ready(make: Make) {
    for (n, last) in [(2, 0), (2, 1), (4, 0), (4, 2)] {
        let c = some(make, n);
        let (list, id) = (handles(&refs(&c)), uuid());
        let (list, c) = (&list, &c);
        let (made, late) = thread::scope(|s| {
            let call = |r: usize| s.spawn(move || took(|| c[r].reconfigure(id, list, LIMIT, &[]).unwrap()));
            let early: Vec<_> = (0..n).filter(|r| *r != last).map(call).collect();
            thread::sleep(Duration::from_millis(700));
            let late = call(last);
            let mut made: Vec<Communicator> = early.into_iter().map(|h| h.join().unwrap().0).collect();
            let (c, late) = late.join().unwrap();
            made.insert(last, c);
            (made, late)
        });
        println!("rank {last} of {n}, the last to come, needed {late:.1?}");
        assert!(late < Duration::from_secs(2), "rank {last} of {n}: {late:?}");
        work(&made);
        end(&made);
    }
}

pub fn as_a_work(make: Make) {
    let c = some(make, 2);
    let (list, id) = (handles(&refs(&c)), uuid());
    let first = c[0].reconfigure_async(id, &list, LIMIT, &[]).unwrap();
    let e = c[0].reconfigure(uuid(), &list, LIMIT, &[]).unwrap_err();
    assert!(invalid(&e).contains("under way"), "{e}");
    let second = c[1].reconfigure_async(id, &list, LIMIT, &[]).unwrap();
    let made = [first.wait().unwrap(), second.wait().unwrap()];
    assert_eq!(made.each_ref().map(Communicator::rank), [0, 1]);
    work(&made);
    end(&made);
}

/// Who has moved on is missed only by those who need it; what the others have among themselves goes on.
pub fn what_does_not_need_a_rank_that_moves_on(make: Make) {
    let c = some(make, 4);
    let old = form(&refs(&c));
    let between = old[0].recv_async(vec![0u8; 4], 1).unwrap();
    let from_it = old[2].recv_async(vec![0u8; 4], 3).unwrap();
    let moved = form(&[&old[3]]);
    let gone = ErrorKind::StaleGeneration { ours: 1, theirs: 2, rank: Some(3) };
    let e = from_it.wait().unwrap_err();
    assert_eq!(e.kind(), &gone);
    assert!(e.to_string().contains("rank 3 has moved on to another membership"), "{e}");
    // Its wait has failed the communicator; so this is another one.
    drop(between);
    let more = form(&[&old[0], &old[1], &old[2], &moved[0]]);
    let between = more[0].recv_async(vec![0u8; 4], 1).unwrap();
    let moved = form(&[&more[3]]);
    more[1].send(&[1u8, 2, 3, 4], 0).unwrap();
    assert_eq!(between.wait().unwrap(), [1, 2, 3, 4]);
    assert!(!more[2].is_failed());
    for e in on_all(&more[..3], |c| c.barrier().unwrap_err()) {
        assert!(matches!(e.kind(), ErrorKind::StaleGeneration { ours: 3, theirs: 4, rank: Some(3) }), "{e}");
    }
    for e in on_all(&more[..3], |c| c.finalize(LIMIT).unwrap_err()) {
        assert_eq!(stale(&e), (3, 4), "{e}");
    }
    end(&moved);
}

/// Those who are left out end together, or go on by themselves.
pub fn who_is_left_out_shrinks(make: Make) {
    let c = some(make, 4);
    let old = form(&refs(&c));
    let moved = form(&[&old[0], &old[2]]);
    let rest = [&old[1], &old[3]];
    let made = thread::scope(|s| rest.map(|c| s.spawn(|| c.shrink(LIMIT).unwrap())).map(|h| h.join().unwrap()));
    assert_eq!(made.each_ref().map(Communicator::rank), [0, 1]);
    work(&made);
    end(&made);
    end(&moved);
}

/// A communicator that is finalized while it is being reconfigured: that comes first.
pub fn finalize_waits_for_the_next_membership(make: Make) {
    let c = some(make, 2);
    let old = form(&refs(&c));
    for comms in [&old, &some(make, 2)] {
        let (list, id) = (handles(&refs(comms)), uuid());
        let first = comms[0].reconfigure_async(id, &list, LIMIT, &[]).unwrap();
        let made = thread::scope(|s| {
            let ends = s.spawn(|| comms[0].finalize(LIMIT));
            thread::sleep(Duration::from_millis(50));
            let second = comms[1].reconfigure(id, &list, LIMIT, &[]).unwrap();
            ends.join().unwrap().unwrap();
            [first.wait().unwrap(), second]
        });
        comms[1].finalize(LIMIT).unwrap();
        work(&made);
        end(&made);
    }
    // One that comes to nothing leaves the members that it had.
    let c = some(make, 3);
    let old = form(&refs(&c[..2]));
    let mut list = handles(&refs(&old));
    list.extend(handles(&[&c[2]]));
    let first = old[0].reconfigure_async(uuid(), &list, SHORT, &[]).unwrap();
    end(&old);
    // The other one's finalize says that it will not come.
    assert_eq!(missing(&first.wait().unwrap_err()), [1]);
}

/// What a work needs of a communicator ends with it.
pub fn works_of_a_communicator_that_is_dropped(make: Make) {
    let c = some(make, 2);
    let mut old = form(&refs(&c));
    let (dups, shrinks) = (old[0].dup_async("twin").unwrap(), old[0].shrink_async(LIMIT).unwrap());
    // They have begun.
    thread::sleep(Duration::from_millis(50));
    let (list, id) = (handles(&refs(&old)), uuid());
    let moves = old[0].reconfigure_async(id, &list, LIMIT, &[]).unwrap();
    drop(old.remove(0));
    for e in [shrinks.wait().unwrap_err(), dups.wait().unwrap_err()] {
        assert!(matches!(e.kind(), ErrorKind::Finalized), "{e}");
    }
    // This one needs nothing of it.
    let second = old[0].reconfigure(id, &list, LIMIT, &[]).unwrap();
    let made = [moves.wait().unwrap(), second];
    work(&made);
    end(&made);
}
