//! Attempts that fail: soon, with the culprit's name, and without harm.

use super::*;

/// They all fail, and what they had goes on; the next attempt succeeds with the same handles.
fn retry(comms: &[&Communicator]) {
    let before = handles(comms);
    let new = form(comms);
    work(&new);
    assert_ne!(before, handles(&refs(&new)));
    end(&new);
}

pub fn handles_that_are_none(make: Make) {
    let c = some(make, 2);
    let own = handles(&refs(&c));
    let half = &own[1][..own[1].len() / 2];
    let mut changed = own[1].clone();
    let last = if changed.pop() == Some('0') { '1' } else { '0' };
    changed.push(last);
    for bad in ["", "garbage", "rc1-", half, &changed, &own[1].to_uppercase(), &format!("{}\u{e9}", own[1])] {
        let e = c[0].reconfigure(uuid(), [own[0].as_str(), bad], SHORT, &[]).unwrap_err();
        assert!(invalid(&e).contains("handle 1"), "'{bad}': {e}");
    }
    let e = c[0].reconfigure(uuid(), [&own[0], &own[1], &own[0]], SHORT, &[]).unwrap_err();
    assert!(invalid(&e).contains("0 and 2"), "{e}");
    let e = c[0].reconfigure(uuid(), [&own[1]], SHORT, &[]).unwrap_err();
    assert!(invalid(&e).contains("do not contain this communicator's own"), "{e}");
    let e = c[0].reconfigure(uuid(), Vec::<String>::new(), SHORT, &[]).unwrap_err();
    assert!(invalid(&e).contains("at least one member"), "{e}");
    let e = c[0].reconfigure(uuid(), &own, SHORT, &[("conect", "full")]).unwrap_err();
    assert!(invalid(&e).contains("did you mean 'connect'"), "{e}");
    retry(&refs(&c));
}

pub fn members_that_do_not_fit_together(make: Make) {
    let (a, b) = (make(options().name("a")).unwrap(), make(options().name("b")).unwrap());
    for e in attempt(uuid(), &[&a, &b], &handles(&[&a, &b]), LIMIT) {
        let e = e.unwrap_err();
        assert!(missing(&e).is_empty());
        assert!(e.to_string().contains("rank 0 is called 'a', rank 1 is called 'b'"), "{e}");
    }
    // What is said in the call itself.
    let c = some(make, 3);
    let (list, id) = (handles(&refs(&c)), uuid());
    let errors = thread::scope(|s| {
        let call = |(r, c): (usize, &Communicator)| {
            let hints: &[(&str, &str)] = if r == 2 { &[("connect", "ring")] } else { &[] };
            c.reconfigure(id, &list, LIMIT, hints).unwrap_err()
        };
        let calls: Vec<_> = c.iter().enumerate().map(|x| s.spawn(move || call(x))).collect();
        calls.into_iter().map(|c| c.join().unwrap()).collect::<Vec<_>>()
    });
    for e in errors {
        assert!(missing(&e).is_empty() && e.to_string().contains("connect=ring"), "{e}");
    }
    retry(&refs(&c));
}

pub fn a_dynamic_communicator_takes_no_rank(make: Make) {
    let e = make(options().rank_and_size(0, 2)).unwrap_err();
    assert!(invalid(&e).contains("before it is reconfigured"), "{e}");
    let e = make(options().hint("connect", "nonsense")).unwrap_err();
    assert!(invalid(&e).contains("nonsense"), "{e}");
}

/// Who does not come is named when time is up, by all who have.
pub fn one_does_not_come(make: Make) {
    for absent in 0..3 {
        let c = some(make, 3);
        let old = form(&[&c[(absent + 1) % 3], &c[(absent + 2) % 3]]);
        let mut now = refs(&old);
        now.insert(absent, &c[absent]);
        let list = handles(&now);
        let here: Vec<&Communicator> = now.iter().copied().filter(|x| x.size() == 2).collect();
        let (results, time) = took(|| attempt(uuid(), &here, &list, SHORT));
        for r in results {
            let e = r.unwrap_err();
            assert_eq!(missing(&e), [absent], "{e}");
        }
        assert!(time >= SHORT && time < SHORT + Duration::from_secs(5), "{time:?}");
        // The communicator is what it was.
        assert!(old.iter().all(|c| !c.is_failed()));
        work(&old);
        assert_eq!(list, handles(&now));
        retry(&now);
    }
}

/// Who comes when the others' time was up waits for them in turn, by the same uuid; they call again.
pub fn who_came_too_late_waits_for_those_who_call_again(make: Make) {
    for n in [2, 3] {
        let c = some(make, n);
        let (list, id) = (handles(&refs(&c)), uuid());
        let (early, late) = c.split_at(n - 1);
        for again in 0..2 {
            for r in attempt(id, &refs(early), &list, SHORT / 5) {
                let e = r.unwrap_err();
                assert_eq!(missing(&e), [n - 1], "{again}: {e}");
            }
            // In turn.
            let e = late[0].reconfigure(id, &list, SHORT / 5, &[]).unwrap_err();
            assert_eq!(missing(&e), (0..n - 1).collect::<Vec<_>>(), "{again}: {e}");
        }
        let made = thread::scope(|s| {
            let last = s.spawn(|| late[0].reconfigure(id, &list, LIMIT, &[]).unwrap());
            thread::sleep(Duration::from_millis(200));
            let mut made = attempt(id, &refs(early), &list, LIMIT).into_iter().map(|r| r.unwrap()).collect::<Vec<_>>();
            made.push(last.join().unwrap());
            made
        });
        work(&made);
        end(&made);
    }
}

/// The same where most members have no link to the one that does not come.
pub fn one_does_not_come_to_a_world_with_few_links(make: Make) {
    for absent in [0, 3] {
        let c: Vec<Communicator> = (0..6).map(|_| make(options().hint("connect", "ring")).unwrap()).collect();
        let list = handles(&refs(&c));
        let here: Vec<&Communicator> = c.iter().enumerate().filter(|(r, _)| *r != absent).map(|(_, c)| c).collect();
        let (results, time) = took(|| attempt(uuid(), &here, &list, 2 * SHORT));
        for r in results {
            let e = r.unwrap_err();
            assert_eq!(missing(&e), [absent], "{e}");
        }
        assert!(time > SHORT && time < 2 * SHORT + Duration::from_secs(5), "{time:?}");
        retry(&refs(&c));
    }
}

/// Each means another attempt: both find the other missing.
pub fn uuids_that_differ(make: Make) {
    let c = some(make, 2);
    let list = handles(&refs(&c));
    let errors = on_all(&c, |x| x.reconfigure(uuid(), &list, SHORT, &[]).unwrap_err());
    for (rank, e) in errors.iter().enumerate() {
        assert_eq!(missing(e), [1 - rank], "{e}");
    }
    retry(&refs(&c));
}

/// What comes of calls of one attempt that pass different lists, by who and which handles; one starts after the other.
fn pass(c: &[Communicator], lists: &[(usize, Vec<String>)]) -> Vec<Result<Communicator>> {
    let id = uuid();
    let (results, time) = took(|| {
        thread::scope(|s| {
            let call = |(who, list): &(usize, Vec<String>)| {
                let (c, list) = (&c[*who], list.clone());
                let call = s.spawn(move || c.reconfigure(id, list, LIMIT, &[]));
                thread::sleep(Duration::from_millis(80));
                call
            };
            let calls: Vec<_> = lists.iter().map(call).collect();
            calls.into_iter().map(|c| c.join().unwrap()).collect::<Vec<_>>()
        })
    });
    assert!(time < Duration::from_secs(10), "{time:?}");
    results
}

/// Members of one attempt that pass different lists learn it at once, and with whom they disagree.
pub fn lists_that_differ(make: Make) {
    let differ = |e: &Error| {
        let two = (0..3).filter(|r| e.to_string().contains(&format!("rank {r}"))).count() >= 2;
        assert!(missing(e).is_empty() && two && e.to_string().contains("different handles"), "{e}");
    };
    let c = some(make, 3);
    let list = handles(&refs(&c));
    let these = |ranks: &[usize]| -> Vec<String> { ranks.iter().map(|r| list[*r].clone()).collect() };
    // Another order, by two, and by one of three.
    for e in pass(&c, &[(0, these(&[0, 1])), (1, these(&[1, 0]))]) {
        differ(&e.unwrap_err());
    }
    for odd in 0..3 {
        let order = |who| if who == odd { these(&[2, 1, 0]) } else { these(&[0, 1, 2]) };
        let lists: Vec<_> = [(odd + 1) % 3, (odd + 2) % 3, odd].into_iter().map(|who| (who, order(who))).collect();
        for (e, (who, _)) in pass(&c, &lists).into_iter().zip(&lists) {
            let e = e.unwrap_err();
            assert!(e.to_string().contains("different handles"), "odd {odd}, {who}: {e}");
        }
    }
    retry(&refs(&c));
}

/// Who does not wait for a rank goes on when that one is found to be wrong.
pub fn who_is_not_waited_for_does_no_harm(make: Make) {
    let c = some(make, 3);
    let list = handles(&refs(&c));
    let mut results = pass(&c, &[(0, list.clone()), (1, list[1..].to_vec()), (2, list[1..].to_vec())]);
    let (two, e) = (results.split_off(1), results.remove(0).unwrap_err());
    assert!(
        matches!(e.kind(), ErrorKind::Bootstrap { .. } | ErrorKind::StaleGeneration { rank: Some(1 | 2), .. }),
        "{e}"
    );
    let two: Vec<Communicator> = two.into_iter().map(|r| r.unwrap()).collect();
    work(&two);
    retry(&[&two[1], &c[0], &two[0]]);
}

/// A handle of a member that has moved on since is told from one that is yet to come: at once, to all.
pub fn a_stale_handle_of_another(make: Make) {
    for together in [false, true] {
        let c = some(make, 4);
        let list = handles(&refs(&c[..3]));
        let now = if together { form(&[&c[3], &c[1]]) } else { form(&[&c[1]]) };
        let (results, time) = took(|| attempt(uuid(), &[&c[0], &c[2]], &list, LIMIT));
        for e in results {
            let e = e.unwrap_err();
            assert_eq!(e.kind(), &ErrorKind::StaleGeneration { ours: 1, theirs: 0, rank: Some(1) }, "{e}");
            assert!(e.to_string().contains("the handle of rank 1 is stale"), "{e}");
        }
        assert!(time < Duration::from_secs(10), "{time:?}");
        // One of them knows better than the other.
        let own = handles(&[now.last().unwrap()]).remove(0);
        let (id, newer) = (uuid(), [list[0].clone(), own]);
        let (results, time) = took(|| {
            thread::scope(|s| {
                let b = s.spawn(|| now.last().unwrap().reconfigure(id, &newer, LIMIT, &[]));
                thread::sleep(Duration::from_millis(80));
                let a = s.spawn(|| c[0].reconfigure(id, &list[..2], LIMIT, &[]));
                [a.join().unwrap(), b.join().unwrap()]
            })
        });
        assert!(time < Duration::from_secs(10), "{time:?}");
        let [a, b] = results.map(|r| r.unwrap_err());
        assert_eq!(stale(&a), (1, 0), "{a}");
        assert!(missing(&b).is_empty() && b.to_string().contains("different handles"), "{b}");
        retry(&[&c[0], now.last().unwrap()]);
    }
}

/// Who has been finalized is not waited for, whether it was dropped or not.
pub fn one_has_been_finalized(make: Make) {
    for members in [false, true] {
        for before in [false, true] {
            let mut c = some(make, 3);
            if members {
                c = c.iter().flat_map(|c| form(&[c])).collect();
            }
            let list = handles(&refs(&c));
            if before {
                c[1].finalize(LIMIT).unwrap();
            }
            let (results, time) = took(|| {
                thread::scope(|s| {
                    let inside = s.spawn(|| attempt(uuid(), &[&c[0], &c[2]], &list, LIMIT));
                    if !before {
                        thread::sleep(Duration::from_millis(200));
                        c[1].finalize(LIMIT).unwrap();
                    }
                    inside.join().unwrap()
                })
            });
            for e in results {
                let e = e.unwrap_err();
                assert_eq!(missing(&e), [1], "{e}");
                assert!(e.to_string().contains("finalized"), "{e}");
            }
            assert!(time < Duration::from_secs(10), "{time:?}");
            let e = c[1].init_handle().unwrap_err();
            assert!(matches!(e.kind(), ErrorKind::Finalized), "{e}");
            retry(&[&c[2], &c[0]]);
        }
    }
}

/// Two of five go while the others wait for them.
pub fn two_go_during_an_attempt(make: Make) {
    let mut c = some(make, 5);
    let old = form(&refs(&c));
    c.clear();
    let list = handles(&refs(&old));
    let mut stay = old;
    let go = [stay.remove(4), stay.remove(1)];
    let waiting = refs(&stay);
    let (results, time) = took(|| {
        thread::scope(|s| {
            let inside = s.spawn(|| attempt(uuid(), &waiting, &list, LIMIT));
            thread::sleep(Duration::from_millis(100));
            drop(go);
            inside.join().unwrap()
        })
    });
    for r in results {
        let e = r.unwrap_err();
        let who = missing(&e);
        assert!(!who.is_empty() && who.iter().all(|r| [1, 4].contains(r)), "{e}");
    }
    assert!(time < Duration::from_secs(10), "{time:?}");
    retry(&waiting);
}

/// A member that is gone before the attempt begins is found out at once.
pub fn one_is_gone_already(make: Make) {
    for n in [2, 4] {
        for gone in [0, n - 1] {
            let mut c = some(make, n);
            let list = handles(&refs(&c));
            drop(c.remove(gone));
            let (results, time) = took(|| attempt(uuid(), &refs(&c), &list, LIMIT));
            for r in results {
                let e = r.unwrap_err();
                assert_eq!(missing(&e), [gone], "{e}");
            }
            assert!(time < Duration::from_secs(10), "{time:?}");
            retry(&refs(&c));
        }
    }
}

/// Several attempts at a time, with and without success, disturb each other in nothing.
pub fn attempts_side_by_side(make: Make) {
    let c = some(make, 6);
    let all = handles(&refs(&c));
    thread::scope(|s| {
        // 4 and 5 wait for the others in vain.
        let in_vain = s.spawn(|| attempt(uuid(), &[&c[4], &c[5]], &all, SHORT));
        let one = s.spawn(|| form(&[&c[0], &c[3]]));
        let two = s.spawn(|| form(&[&c[2], &c[1]]));
        let (one, two) = (one.join().unwrap(), two.join().unwrap());
        for r in in_vain.join().unwrap() {
            let e = r.unwrap_err();
            // Those have moved on meanwhile.
            assert!(matches!(e.kind(), ErrorKind::StaleGeneration { ours: 1, theirs: 0, rank: Some(0..4) }), "{e}");
        }
        retry(&[&one[1], &c[5], &two[0], &c[4], &one[0], &two[1]]);
    });
}
