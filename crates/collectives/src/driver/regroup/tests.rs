//! What handles say, and what is made of them.

use std::time::Duration;

use proptest::prelude::*;

use super::*;

type Place = (String, u16);

impl super::Place for Place {
    fn host(&self) -> Option<&str> {
        Some(&self.0)
    }
}

fn handle(number: u64, generation: u32) -> Handle<Place> {
    let common = Common { name: "dp".into(), checksum: false, secret: false };
    let place = ("somewhere".to_owned(), 7);
    Handle { identity: Identity { number, generation }, token: number ^ 99, common, place }
}

fn text(number: u64, generation: u32) -> String {
    handle(number, generation).write("sim").unwrap()
}

fn request(uuid: u64, handles: &[String]) -> ReconfigureRequest {
    ReconfigureRequest::new(uuid, handles.to_vec(), Duration::from_secs(1), CommOptions::new())
}

/// As the communicator `number` of generation `generation` reads it.
fn read(uuid: u64, handles: &[String], number: u64, generation: u32) -> Result<Roster<Place>> {
    Roster::read(&request(uuid, handles), "sim", Identity { number, generation }, Some(number ^ 99))
}

fn invalid(e: &Error) -> String {
    assert!(matches!(e.kind(), ErrorKind::InvalidArgument { .. }), "{e}");
    e.to_string()
}

#[test]
fn ranks_are_indices_and_the_generation_is_one_more_than_the_highest() {
    let handles = [text(9, 4), text(3, 0), text(5, 6)];
    for (rank, (number, generation)) in [(9, 4), (3, 0), (5, 6)].into_iter().enumerate() {
        let r = read(1, &handles, number, generation).unwrap();
        assert_eq!((r.rank, r.size(), r.generation), (rank, 3, 7));
        assert_eq!(r.members[2], handle(5, 6));
    }
}

#[test]
fn sorted_texts_are_sorted_by_identity() {
    let mut texts = [text(0xff, 0), text(0x10, 9), text(0xffff_0000_0000_0000, 1), text(1, 0xffff_ffff)];
    texts.sort();
    let numbers = texts.iter().map(|t| split(t).unwrap().0.number);
    assert!(numbers.is_sorted());
}

#[test]
fn attempts_differ_by_uuid_members_and_order() {
    let (a, b) = (text(1, 0), text(2, 0));
    let key = |uuid, handles: &[String]| read(uuid, handles, 1, 0).map(|r| (r.key, r.attempt)).unwrap();
    let first = key(1, &[a.clone(), b.clone()]);
    assert_eq!(first, read(1, &[a.clone(), b.clone()], 2, 0).map(|r| (r.key, r.attempt)).unwrap());
    assert_ne!(first.0, first.1);
    let other = key(2, &[a.clone(), b.clone()]);
    assert!(first.0 != other.0 && first.1 != other.1);
    // By the uuid alone they are known to be meant for the same.
    for handles in [vec![b, a.clone()], vec![a]] {
        let other = key(1, &handles);
        assert!(first.0 != other.0 && first.1 == other.1);
    }
}

#[test]
fn refusals_name_who_does_not_come_and_why() {
    let r = read(7, &[text(9, 4), text(3, 2), text(5, 6)], 9, 4).unwrap();
    assert_eq!((r.rank_of(5), r.rank_of(6)), (Some(2), None));
    let stale = ErrorKind::StaleGeneration { ours: 3, theirs: 2, rank: Some(1) };
    let e = r.refused(1, Refusal::Stale { now: 3 });
    assert_eq!(e.kind(), &stale);
    assert!(e.to_string().contains("the handle of rank 1 is stale: it is of generation 2, and rank 1 at 3"), "{e}");
    let ErrorKind::Bootstrap { what, arrived, missing } = r.refused(1, Refusal::Finalized).kind().clone() else {
        panic!("another kind")
    };
    assert!(what.starts_with("attempt 7 to reconfigure, of 3 members: rank 1 on somewhere cannot come"), "{what}");
    assert_eq!((arrived, missing), (vec!["rank 0 on somewhere".to_owned()], vec![1]));
    let e = r.refused(2, Refusal::Differs);
    assert!(e.to_string().contains("rank 0 on somewhere and rank 2 on somewhere pass different handles"), "{e}");
    let e = r.failed("why", &[2, 0, 1], vec![1]);
    let ErrorKind::Bootstrap { arrived, .. } = e.kind() else { panic!("{e}") };
    assert_eq!(arrived, &["rank 0 on somewhere", "rank 2 on somewhere"]);
}

#[test]
fn who_is_closed_comes_to_no_attempt_and_gives_its_home_back() {
    let lineage: Lineage<u8> = Lineage::new(Identity { number: 1, generation: 4 });
    lineage.home(|| Ok(7)).unwrap();
    let failed = lineage.attempt::<()>(1, |home| {
        // The attempt has it.
        assert_eq!((lineage.close(), home), (None, Some(&7)));
        Err(Error::invalid("no"))
    });
    assert!(failed.is_err());
    for e in [lineage.home(|| unreachable!()).unwrap_err(), lineage.attempt::<()>(2, |_| unreachable!()).unwrap_err()] {
        assert_eq!(e.kind(), &ErrorKind::Finalized);
    }
    let other: Lineage<u8> = Lineage::new(Identity { number: 1, generation: 4 });
    other.home(|| Ok(7)).unwrap();
    assert_eq!((other.close().as_deref(), other.close()), (Some(&7), None));
}

#[test]
fn wrong_handles_are_named_by_their_index() {
    let own = text(1, 0);
    let foreign = handle(2, 0).write("tcp").unwrap();
    for (bad, what) in [
        (String::new(), "handle 1 is not what init_handle gives"),
        ("garbage".into(), "handle 1 is not what init_handle gives"),
        (own.to_uppercase(), "handle 1 is not what init_handle gives"),
        (format!("{}x", text(2, 0)), "handle 1 is not what init_handle gives"),
        (text(2, 0)[..40].into(), "handle 1"),
        ("rc1-0000000000000002-00000000-".into(), "handle 1 is not complete"),
        (format!("{}00", text(2, 0)), "handle 1 is damaged"),
        (foreign, "handle 1 is of backend 'tcp', not of 'sim'"),
        ("x".repeat(LONGEST + 1), "handle 1 has 65537 bytes"),
        (own.clone(), "handles 0 and 1 are of one communicator"),
        (text(1, 5), "handles 0 and 1 are of one communicator"),
        (text(2, u32::MAX), "handle 1 is of the last generation"),
    ] {
        let e = invalid(&read(1, &[own.clone(), bad.clone()], 1, 0).unwrap_err());
        assert!(e.contains(what), "{bad}: {e}");
    }
    for without in [vec![], vec![text(2, 0)]] {
        assert!(invalid(&read(1, &without, 1, 0).unwrap_err()).contains("do not contain this communicator's own"));
    }
}

#[test]
fn own_handles_of_another_generation_are_stale() {
    for (ours, theirs) in [(3, 2), (2, 3)] {
        let e = read(1, &[text(1, theirs)], 1, ours).unwrap_err();
        assert_eq!(e.kind(), &ErrorKind::StaleGeneration { ours, theirs, rank: None });
    }
    // Made up by somebody who knows the identity.
    let own = Identity { number: 1, generation: 0 };
    for token in [None, Some(5)] {
        let e = Roster::<Place>::read(&request(1, &[text(1, 0)]), "sim", own, token).unwrap_err();
        assert!(invalid(&e).contains("looks like this communicator's own"), "{e}");
    }
}

#[test]
fn another_version_is_told_from_a_damaged_handle() {
    let identity = Identity { number: 2, generation: 0 };
    let stamp = Stamp { protocol: 900, backend: "sim".into() };
    let mut body = postcard::to_allocvec(&stamp).unwrap();
    body.extend([0xff; 9]);
    body.extend(identity.check(&body).to_le_bytes());
    let hex: String = body.iter().map(|b| format!("{b:02x}")).collect();
    let theirs = format!("rc1-{:016x}-{:08x}-{hex}", 2, 0);
    let e = read(1, &[text(1, 0), theirs], 1, 0).unwrap_err();
    let expected = ErrorKind::VersionSkew { ours: u32::from(PROTOCOL), theirs: 900, who: "rank 1".into() };
    assert_eq!(e.kind(), &expected);
}

#[test]
fn different_settings_are_named_the_same_way_by_all() {
    let with = |number, change: &dyn Fn(&mut Common)| {
        let mut h = handle(number, 0);
        change(&mut h.common);
        h.write("sim").unwrap()
    };
    let own = text(1, 0);
    for (other, what) in [
        (with(2, &|c| c.name = "tp".into()), "rank 0 is called 'dp', rank 1 is called 'tp'"),
        (with(2, &|c| c.checksum = true), "rank 0 has checksums off, rank 1 has checksums on"),
        (with(2, &|c| c.secret = true), "rank 0 has no secret (RUSTCOMMS_SECRET), rank 1 has a secret"),
    ] {
        let handles = [own.clone(), other];
        for number in [1, 2] {
            let e = read(1, &handles, number, 0).unwrap_err();
            assert!(matches!(e.kind(), ErrorKind::Bootstrap { .. }) && e.to_string().contains(what), "{e}");
        }
    }
}

#[test]
fn a_lineage_makes_one_attempt_at_a_time_and_is_spent_by_success() {
    let lineage: Lineage<u8> = Lineage::new(Identity { number: 1, generation: 4 });
    let mut opened = 0;
    for _ in 0..2 {
        let home = lineage.home(|| {
            opened += 1;
            Ok(7)
        });
        assert_eq!(*home.unwrap(), 7);
    }
    assert_eq!(opened, 1);
    let failed = lineage.attempt::<()>(1, |home| {
        assert_eq!(home, Some(&7));
        let second = lineage.attempt::<()>(2, |_| unreachable!("two attempts at a time"));
        assert!(invalid(&second.unwrap_err()).contains("attempt 1"));
        Err(Error::invalid("no"))
    });
    assert!(failed.is_err());
    assert_eq!(lineage.attempt(3, |home| Ok((*home.unwrap(), 9))).unwrap(), 7);
    let stale = ErrorKind::StaleGeneration { ours: 4, theirs: 9, rank: None };
    assert_eq!(lineage.home(|| Ok(8)).unwrap_err().kind(), &stale);
    assert_eq!(lineage.attempt::<()>(4, |_| unreachable!("it is spent")).unwrap_err().kind(), &stale);
}

proptest! {
    #[test]
    fn handles_are_read_as_they_were_written(number: u64, generation in 0..u32::MAX, token: u64, name in "[a-z]{1,40}", port: u16) {
        let common = Common { name, checksum: token % 2 == 0, secret: token % 3 == 0 };
        let h = Handle { identity: Identity { number, generation }, token, common, place: ("x".to_owned(), port) };
        prop_assert_eq!(Handle::read(&h.write("sim").unwrap(), "sim", 0).unwrap(), h);
    }

    #[test]
    fn any_text_is_a_handle_or_an_error(any in ".{0,200}", digits in "[0-9a-f]{0,300}") {
        for t in [any, format!("rc1-0000000000000001-00000000-{digits}")] {
            let e = Handle::<Place>::read(&t, "sim", 0);
            prop_assert!(e.is_err(), "{t}");
        }
    }

    /// A handle of which one character was changed is none.
    #[test]
    fn a_changed_character_shows(at in any::<prop::sample::Index>(), to in proptest::char::range(' ', '~')) {
        let whole = text(0x0123_4567_89ab_cdef, 3);
        let at = at.index(whole.len());
        let mut changed = whole.clone();
        changed.replace_range(at..=at, &to.to_string());
        prop_assert!(changed == whole || Handle::<Place>::read(&changed, "sim", 0).is_err(), "{changed}");
    }
}
