//! Reconfigure and shrink, as far as they are the core's.

mod common;

use std::collections::{BTreeSet, HashSet};
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::mpsc::channel;
use std::time::Duration;

use comm_core::{
    CallNumber, CommOptions, Communicator, Device, Error, ErrorKind, Event, Members, Observer, ObserverGuard,
    RealClock, Time, op,
};
use common::mock::Mock;
use common::within_deadline;
use parking_lot::Mutex;

const LONG: Duration = Duration::from_secs(5);

fn mock(generation: u32, rank: usize, size: usize) -> Arc<Mock> {
    Mock::of_generation(generation, rank, size, Arc::new(RealClock))
}

fn next(of: &Mock, made: &Arc<Mock>) {
    of.made.lock().push_back(Ok(Some(Arc::clone(made))));
}

/// What happened, in words.
#[derive(Default)]
struct Log(Mutex<Vec<String>>);

impl Observer for Log {
    fn event(&self, event: &Event<'_>, _: Time) {
        let text = match event {
            Event::Reconfigured { comm, generation, rank, size, .. } => {
                format!("reconfigured {comm} to generation {generation}, rank {rank} of {size}")
            }
            Event::Completed { call, .. } => format!("completed {} {:?}", call.desc.operation, call.number),
            Event::Failed { call, error, .. } => format!("failed {} {}", call.desc.operation, error.kind().name()),
            _ => return,
        };
        self.0.lock().push(text);
    }
}

impl Log {
    fn on(comm: &Communicator) -> (Arc<Self>, ObserverGuard) {
        let log = Arc::new(Self::default());
        let guard = comm.observe(Arc::clone(&log) as _);
        (log, guard)
    }

    fn take(&self) -> Vec<String> {
        std::mem::take(&mut *self.0.lock())
    }
}

fn is_stale(e: &Error, ours: u32, theirs: u32) -> bool {
    *e.kind() == ErrorKind::StaleGeneration { ours, theirs, rank: None }
}

#[test]
fn a_list_gives_the_order_and_a_set_is_sorted() {
    let (old, comm) = {
        let m = mock(0, 0, 2);
        let c = m.comm();
        (m, c)
    };
    let strings = |l: &[&str]| l.iter().map(|s| (*s).to_owned()).collect::<Vec<_>>();
    let all: Vec<(Members, Vec<String>)> = vec![
        (vec!["b".to_owned(), "a".into()].into(), strings(&["b", "a"])),
        ((&vec!["b".to_owned(), "a".into()]).into(), strings(&["b", "a"])),
        (["c", "b", "a"].into(), strings(&["c", "b", "a"])),
        (["c", "b"].as_slice().into(), strings(&["c", "b"])),
        ((&["c", "b"]).into(), strings(&["c", "b"])),
        (BTreeSet::from(["b".to_owned(), "a".into()]).into(), strings(&["a", "b"])),
        (HashSet::from(["c".to_owned(), "b".into(), "a".into()]).into(), strings(&["a", "b", "c"])),
    ];
    for (members, want) in all {
        // Refused by the backend: the communicator stays as it is.
        let e = comm.reconfigure(7, members, LONG, &[]).unwrap_err();
        assert!(matches!(e.kind(), ErrorKind::Unsupported { .. }), "{e}");
        let request = old.reconfigures.lock().pop().unwrap();
        assert_eq!((request.handles, request.uuid, request.timeout), (want, 7, LONG));
    }
    for (members, what) in [
        (Members::List(Vec::new()), "list of handles is empty"),
        (BTreeSet::new().into(), "list of handles is empty"),
        (["a", "b", "a"].into(), "ranks 0 and 2 have the same handle 'a'"),
    ] {
        for e in [
            comm.reconfigure(1, members.clone(), LONG, &[]).unwrap_err(),
            comm.reconfigure_async(1, members, LONG, &[]).unwrap_err(),
        ] {
            assert!(matches!(e.kind(), ErrorKind::InvalidArgument { .. }), "{e}");
            assert!(e.to_string().contains(what) && e.to_string().contains("reconfigure: "), "{e}");
        }
    }
    assert!(old.reconfigures.lock().is_empty());
    assert!(old.refusals.lock().is_empty(), "it is no collective of the old members");
}

#[test]
fn options_and_observers_survive_and_hints_are_added() {
    let old = mock(2, 1, 4);
    let options =
        CommOptions::new().name("dp").timeout(Duration::from_secs(3)).heartbeat_timeout(LONG).hint("algo", "ring");
    let comm = Communicator::from_backend(Arc::clone(&old) as _, Device::CPU, options).unwrap();
    let (log, _guard) = Log::on(&comm);
    let e = comm.reconfigure(1, ["a"], LONG, &[("allgo", "x")]).unwrap_err();
    assert!(e.to_string().contains("did you mean 'algo'"), "{e}");
    assert_eq!(log.take(), ["failed reconfigure InvalidArgument"]);
    let new = mock(3, 2, 3);
    next(&old, &new);
    let made = comm.reconfigure(9, ["a", "b", "c"], LONG, &[("algo", "tree")]).unwrap();
    let request = old.reconfigures.lock().pop().unwrap();
    assert_eq!((request.options.hints["algo"].as_str(), request.options.size), ("tree", Some(3)));
    let o = made.options();
    assert_eq!((made.name(), o.timeout, o.heartbeat_timeout), ("dp", Duration::from_secs(3), LONG));
    assert_eq!((o.rank, o.size, o.hints["algo"].as_str()), (Some(2), Some(3), "tree"));
    assert_eq!((made.rank(), made.size(), made.generation(), made.ranks()), (2, 3, 3, &[0, 1, 2][..]));
    assert_eq!(comm.options().hints["algo"], "ring");
    assert_eq!(log.take(), ["reconfigured dp to generation 3, rank 2 of 3", "completed reconfigure Local"]);
    made.barrier().unwrap();
    assert_eq!(log.take(), ["completed barrier Collective(0)"]);
}

#[test]
fn the_old_handle_is_stale_whatever_it_had_failed_with() {
    for failed in [false, true] {
        let old = mock(0, 0, 2);
        let comm = old.comm();
        let clone = comm.clone();
        comm.barrier().unwrap();
        if failed {
            comm.abort("before");
        }
        next(&old, &mock(1, 0, 2));
        let new = comm.reconfigure(1, ["a", "b"], LONG, &[]).unwrap();
        let mut x = [0u8];
        let errors = [
            comm.barrier().unwrap_err(),
            clone.all_reduce(&mut x, op::Sum).unwrap_err(),
            comm.send(&x, 1).unwrap_err(),
            comm.recv_async(vec![0u8], 7).unwrap_err(),
            comm.batch().send(&x, 1).and_then(|mut b| b.issue()).unwrap_err(),
            comm.scope(|s| s.barrier().map(drop)).unwrap_err(),
            comm.split(&[0], "x").unwrap_err(),
            comm.dup_async("x").map(drop).unwrap_err(),
            comm.reconfigure(2, ["a"], LONG, &[]).unwrap_err(),
            comm.agree_survivors(LONG).unwrap_err(),
            comm.shrink(LONG).unwrap_err(),
            comm.monitored_barrier(LONG).unwrap_err(),
        ];
        for e in errors {
            assert!(is_stale(&e, 0, 1), "{e}");
            assert!(e.to_string().contains("generation 1 has taken its place"), "{e}");
        }
        assert!(comm.is_failed() && is_stale(&comm.cause().unwrap(), 0, 1));
        // What it had failed with is its first cause to the backend still, and an abort does not reach it any more.
        let aborts = old.aborts.lock().len();
        comm.abort("after");
        assert_eq!(old.aborts.lock().len(), aborts);
        // It ends at once and well, and once.
        comm.finalize(Duration::ZERO).unwrap();
        assert_eq!(clone.finalize(LONG).unwrap_err().kind(), &ErrorKind::Finalized);
        assert_eq!((old.closes.load(SeqCst), old.finalizes.load(SeqCst)), (1, 0));
        new.barrier().unwrap();
    }
    // Dropped instead.
    let old = mock(0, 0, 2);
    let comm = old.comm();
    next(&old, &mock(1, 0, 1));
    let _new = comm.reconfigure(1, ["a"], LONG, &[]).unwrap();
    drop(comm);
    assert_eq!(old.closes.load(SeqCst), 1);
}

#[test]
fn after_a_failed_attempt_the_old_communicator_is_as_it_was() {
    let old = mock(0, 0, 2);
    let comm = old.comm();
    comm.barrier().unwrap();
    let late = ErrorKind::Bootstrap { what: "not all came".into(), arrived: Vec::new(), missing: vec![1] };
    old.made.lock().extend([Err(late.clone().into()), Err(late.clone().into())]);
    let e = comm.reconfigure(1, ["a", "b"], LONG, &[]).unwrap_err();
    assert_eq!(e.kind(), &late);
    for part in ["'mocked'", "rank 0 of 2", "reconfigure: "] {
        assert!(e.to_string().contains(part), "{part} in {e}");
    }
    assert_eq!(comm.reconfigure_async(1, ["a", "b"], LONG, &[]).unwrap().wait().unwrap_err().kind(), &late);
    assert!(!comm.is_failed());
    // Attempts take no number that others count.
    assert_eq!(comm.begin(comm_core::OpDesc::new(comm_core::Operation::Custom)).unwrap().collective_seq(), Some(1));
    next(&old, &mock(1, 0, 2));
    comm.reconfigure(1, ["a", "b"], LONG, &[]).unwrap();
    assert!(is_stale(&comm.barrier().unwrap_err(), 0, 1));
}

#[test]
fn one_reconfigure_at_a_time() {
    let (go, wait) = channel::<()>();
    let old = mock(0, 0, 2);
    let comm = old.comm();
    let wait = Mutex::new(wait);
    *old.on_make.lock() = Some(Box::new(move || wait.lock().recv().unwrap()));
    next(&old, &mock(1, 0, 2));
    let first = comm.reconfigure_async(1, ["a", "b"], LONG, &[]).unwrap();
    for e in [
        comm.reconfigure(1, ["a", "b"], LONG, &[]).unwrap_err(),
        comm.reconfigure_async(2, ["a"], LONG, &[]).map(drop).unwrap_err(),
    ] {
        assert!(matches!(e.kind(), ErrorKind::InvalidArgument { .. }), "{e}");
        assert!(e.to_string().contains("another reconfigure"), "{e}");
    }
    assert!(!first.is_completed());
    let Err(first) = first.wait_timeout(Duration::from_millis(5)) else { panic!("it waits for the test") };
    go.send(()).unwrap();
    let made = within_deadline(move || first.wait().unwrap());
    assert_eq!(made.generation(), 1);
    assert!(is_stale(&comm.barrier().unwrap_err(), 0, 1));
}

#[test]
fn a_dropped_work_runs_to_its_end_and_closes_what_it_made() {
    let (go, wait) = channel::<()>();
    let (old, new) = (mock(0, 0, 2), mock(1, 0, 2));
    let comm = old.comm();
    let wait = Mutex::new(wait);
    *old.on_make.lock() = Some(Box::new(move || wait.lock().recv().unwrap()));
    next(&old, &new);
    drop(comm.reconfigure_async(1, ["a", "b"], LONG, &[]).unwrap());
    assert_eq!(new.closes.load(SeqCst), 0);
    go.send(()).unwrap();
    within_deadline(move || {
        while new.closes.load(SeqCst) == 0 {
            std::thread::yield_now();
        }
        assert!(new.aborts.lock().is_empty() && new.finalizes.load(SeqCst) == 0);
    });
    assert!(is_stale(&comm.barrier().unwrap_err(), 0, 1));
}

/// What is in flight comes first: then there is nobody left to end with, or all that there were.
#[test]
fn finalize_waits_for_a_reconfigure() {
    for (members, succeeds) in [(2, true), (2, false), (0, true), (0, false)] {
        let (go, wait) = channel::<()>();
        let (old, new) = (mock(0, 0, members), mock(1, 0, 2));
        let comm = old.comm();
        let wait = Mutex::new(wait);
        *old.on_make.lock() = Some(Box::new(move || wait.lock().recv().unwrap()));
        if succeeds {
            next(&old, &new);
        }
        let made = comm.reconfigure_async(1, ["a", "b"], LONG, &[]).unwrap();
        std::thread::scope(|s| {
            let ends = s.spawn(|| comm.finalize(LONG));
            while comm.init_handle().unwrap_err().kind() != &ErrorKind::Finalized {
                std::thread::yield_now();
            }
            assert_eq!((old.closes.load(SeqCst), old.finalizes.load(SeqCst)), (0, 0));
            go.send(()).unwrap();
            ends.join().unwrap().unwrap();
        });
        assert_eq!(made.wait().map(|c| c.size()).ok(), succeeds.then_some(2));
        let ended = (old.closes.load(SeqCst), old.finalizes.load(SeqCst));
        assert_eq!(ended, if succeeds { (1, 0) } else { (0, 1) });
        assert_eq!(comm.barrier().unwrap_err().kind(), &ErrorKind::Finalized);
    }
    // While it has all the time there is, finalize has not.
    let (go, wait) = channel::<()>();
    let old = mock(0, 0, 2);
    let comm = old.comm();
    let wait = Mutex::new(wait);
    *old.on_make.lock() = Some(Box::new(move || wait.lock().recv().unwrap()));
    let made = comm.reconfigure_async(1, ["a", "b"], LONG, &[]).unwrap();
    let e = comm.finalize(Duration::from_millis(30)).unwrap_err();
    assert!(matches!(e.kind(), ErrorKind::Timeout { .. }), "{e}");
    go.send(()).unwrap();
    made.wait().unwrap_err();
}

#[test]
fn a_panicking_backend_is_an_error_of_the_work() {
    let old = mock(0, 0, 2);
    let comm = old.comm();
    *old.on_make.lock() = Some(Box::new(|| panic!("a bug")));
    let e = comm.reconfigure_async(1, ["a"], LONG, &[]).unwrap().wait().unwrap_err();
    assert!(e.to_string().contains("a bug"), "{e}");
    *old.on_make.lock() = None;
    next(&old, &mock(1, 0, 1));
    comm.reconfigure(1, ["a"], LONG, &[]).unwrap();
}

#[test]
fn without_members_every_operation_says_what_to_do() {
    let empty = mock(0, 0, 0);
    let comm = empty.comm();
    assert_eq!((comm.rank(), comm.size(), comm.ranks()), (0, 0, &[][..]));
    let (x, mut y) = (vec![1u32; 2], vec![0u32; 2]);
    let all = [
        comm.send(&x, 0).unwrap_err(),
        comm.recv(&mut y, 0).unwrap_err(),
        comm.sendrecv(&x, &mut y, 0, 0).unwrap_err(),
        comm.broadcast(&mut y, 0).unwrap_err(),
        comm.all_reduce(&mut y, op::Sum).unwrap_err(),
        comm.all_reduce_async(y.clone(), op::Sum).map(drop).unwrap_err(),
        comm.reduce(&mut y, op::Sum, 0).unwrap_err(),
        comm.all_gather(&x, &mut y).unwrap_err(),
        comm.all_gather_in_place(&mut y).unwrap_err(),
        comm.reduce_scatter(&x, &mut y, op::Sum).unwrap_err(),
        comm.all_to_all(&x, &mut y).unwrap_err(),
        comm.scan(&mut y, op::Sum).unwrap_err(),
        comm.barrier().unwrap_err(),
        comm.monitored_barrier(LONG).unwrap_err(),
        comm.split(&[], "x").unwrap_err(),
        comm.split_by(Some(1), 0, "x").unwrap_err(),
        comm.split_by_host("x").unwrap_err(),
        comm.dup("x").unwrap_err(),
        comm.dup_async("x").map(drop).unwrap_err(),
        comm.agree_survivors(LONG).unwrap_err(),
        comm.shrink(LONG).unwrap_err(),
        comm.control().map(drop).unwrap_err(),
    ];
    for e in all {
        assert!(matches!(e.kind(), ErrorKind::InvalidArgument { .. }), "{e}");
        assert!(e.to_string().contains("communicator 'mocked' has no members yet: call reconfigure"), "{e}");
        assert!(!e.to_string().contains("of 0"), "{e}");
    }
    assert!(empty.refusals.lock().is_empty() && empty.started() == 0);
    next(&empty, &mock(1, 0, 1));
    let made = comm.reconfigure(1, ["a"], LONG, &[]).unwrap();
    assert_eq!((made.size(), made.options().rank), (1, Some(0)));
    assert!(is_stale(&comm.barrier().unwrap_err(), 0, 1));
    drop(comm);

    let empty = mock(0, 0, 0);
    let comm = empty.comm();
    comm.finalize(LONG).unwrap();
    assert_eq!(comm.barrier().unwrap_err().kind(), &ErrorKind::Finalized);
    // So that those who wait for it learn that it does not come.
    assert_eq!((empty.closes.load(SeqCst), empty.finalizes.load(SeqCst)), (0, 1));
}

#[test]
fn shrink_keeps_options_order_and_the_old_cause() {
    let old = mock(0, 2, 4);
    let comm = old.comm();
    let (log, _guard) = Log::on(&comm);
    comm.abort("a rank is lost");
    *old.survivors.lock() = vec![0, 2, 3];
    assert_eq!(comm.agree_survivors(LONG).unwrap(), [0, 2, 3]);
    assert_eq!(log.take(), ["completed agree_survivors Local"]);
    let e = comm.shrink(LONG).unwrap_err();
    assert!(e.to_string().contains("shrink: ") && e.to_string().contains("'mocked'"), "{e}");
    assert_eq!(log.take(), ["failed shrink Unsupported"]);
    next(&old, &mock(1, 1, 3));
    let made = comm.shrink(LONG).unwrap();
    assert_eq!((made.rank(), made.size(), made.ranks(), made.generation()), (1, 3, &[0, 2, 3][..], 1));
    assert_eq!((made.options().rank, made.options().size, made.name()), (Some(1), Some(3), "mocked"));
    assert_eq!(log.take(), ["reconfigured mocked to generation 1, rank 1 of 3", "completed shrink Local"]);
    assert!(matches!(comm.cause().unwrap().kind(), ErrorKind::Aborted { rank: 2, .. }));
    next(&old, &mock(1, 1, 3));
    assert_eq!(comm.shrink_async(LONG).unwrap().wait().unwrap().size(), 3);
    *old.survivors.lock() = vec![0, 9];
    for e in [comm.agree_survivors(LONG).unwrap_err(), comm.shrink(LONG).unwrap_err()] {
        assert!(e.to_string().contains("rank 9 of 4"), "{e}");
    }
    assert!(old.refusals.lock().iter().all(|(n, ..)| *n == CallNumber::Local));
}
