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
    // And the same with lists in another order.
    let (id, turned) = (uuid(), vec![list[1].clone(), list[0].clone()]);
    let errors = thread::scope(|s| {
        let a = s.spawn(|| c[0].reconfigure(id, &list, SHORT, &[]).unwrap_err());
        let b = s.spawn(|| c[1].reconfigure(id, &turned, SHORT, &[]).unwrap_err());
        [a.join().unwrap(), b.join().unwrap()]
    });
    for e in errors {
        assert_eq!(missing(&e), [1], "{e}");
    }
    retry(&refs(&c));
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
            assert!(missing(&r.unwrap_err()).iter().all(|r| *r < 4));
        }
        retry(&[&one[1], &c[5], &two[0], &c[4], &one[0], &two[1]]);
    });
}
