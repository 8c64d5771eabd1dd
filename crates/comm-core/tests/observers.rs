//! Observers and tickets: which events, in which order, with which numbers.

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::time::Duration;

use comm_core::{
    Call, CallNumber, CallOptions, Clock, Communicator, DType, Error, ErrorKind, Event, Form, Observer, OpDesc,
    Operation, Parker, Time, op,
};
use common::mock::Mock;
use common::{world, world_on};
use parking_lot::Mutex;

/// What was seen: the step, the call's local number, its shared number, operation and form.
#[derive(Clone, Debug, PartialEq)]
struct Seen {
    step: &'static str,
    op_id: u64,
    number: CallNumber,
    operation: Operation,
    form: Form,
    error: Option<Error>,
}

#[derive(Default)]
struct Log {
    seen: Mutex<Vec<Seen>>,
    other: Mutex<Vec<String>>,
    times: Mutex<Vec<Time>>,
    veto: Mutex<Option<Operation>>,
}

impl Log {
    fn add(&self, step: &'static str, c: &Call<'_>, error: Option<Error>) {
        let (op_id, number, operation, form) = (c.op_id, c.number, c.desc.operation, c.form);
        self.seen.lock().push(Seen { step, op_id, number, operation, form, error });
    }

    fn take(&self) -> Vec<Seen> {
        std::mem::take(&mut *self.seen.lock())
    }

    fn steps(&self) -> Vec<&'static str> {
        self.take().iter().map(|s| s.step).collect()
    }
}

impl Observer for Log {
    fn pre(&self, call: &Call<'_>) -> Result<(), String> {
        self.add("pre", call, None);
        if *self.veto.lock() == Some(call.desc.operation) { Err("not on my watch".into()) } else { Ok(()) }
    }

    fn event(&self, event: &Event<'_>, at: Time) {
        self.times.lock().push(at);
        match event {
            Event::Enqueued(c) => self.add("enqueued", c, None),
            Event::Started(c) => self.add("started", c, None),
            Event::Completed { call, .. } => self.add("completed", call, None),
            Event::Failed { call, error, .. } => self.add("failed", call, Some((*error).clone())),
            other => self.other.lock().push(format!("{other:?}")),
        }
    }
}

const GOOD: [&str; 4] = ["pre", "enqueued", "started", "completed"];

#[test]
fn every_call_has_four_events_with_the_same_numbers() {
    world(2, |c| {
        let log = Arc::new(Log::default());
        let _guard = c.observe(log.clone());
        let mut x = vec![1u32; 2];
        c.all_reduce(&mut x, op::Sum).unwrap();
        c.all_reduce_async(x.clone(), op::Sum).unwrap().wait().unwrap();
        c.scope(|s| s.all_reduce(&mut x, op::Sum).map(drop)).unwrap();
        let seen = log.take();
        for (i, form) in [Form::Sync, Form::Async, Form::Scoped].into_iter().enumerate() {
            let of_call: Vec<_> = seen.iter().filter(|s| s.op_id == i as u64).collect();
            assert_eq!(of_call.iter().map(|s| s.step).collect::<Vec<_>>(), GOOD, "{form:?}");
            for s in of_call {
                assert_eq!(
                    (s.number, s.operation, s.form),
                    (CallNumber::Collective(i as u64), Operation::AllReduce, form)
                );
            }
        }
        assert_eq!(seen.len(), 12);
        assert!(log.times.lock().is_sorted(), "times go forward");
    });
}

#[test]
fn calls_carry_what_was_asked_for() {
    #[derive(Default)]
    struct Once(AtomicUsize);
    impl Observer for Once {
        fn pre(&self, c: &Call<'_>) -> Result<(), String> {
            assert_eq!((c.comm, c.rank, c.size), ("mocked", 0, 2));
            assert_eq!(c.timeout, Duration::from_secs(77));
            let want =
                OpDesc::new(Operation::Reduce).elements(DType::F64, 3).redop(comm_core::ReduceOp::PreMulSum).root(1);
            assert_eq!(c.desc, want);
            self.0.fetch_add(1, SeqCst);
            Ok(())
        }
        fn event(&self, event: &Event<'_>, _: Time) {
            if let Event::Completed { elapsed, .. } = event {
                assert!(*elapsed < Duration::from_secs(60), "measured from the call");
                self.0.fetch_add(10, SeqCst);
            }
        }
    }
    let comm = Mock::new().comm();
    let once = Arc::new(Once::default());
    let _guard = comm.observe(once.clone());
    comm.with(CallOptions::new().timeout(Duration::from_secs(77)))
        .reduce(&mut [1.0f64; 3], op::PreMulSum(2.0), 1)
        .unwrap();
    // Panics of observers are contained, so count what went well.
    assert_eq!(once.0.load(SeqCst), 11);
}

#[test]
fn collective_numbers_are_equal_on_all_ranks_whatever_else_they_do() {
    let numbers = world(3, |c| {
        let log = Arc::new(Log::default());
        let _guard = c.observe(log.clone());
        for round in 0..10usize {
            // Messages between some of the ranks take no collective numbers.
            if c.rank() == round % 3 {
                c.send(&[1u8], (c.rank() + 1) % 3).unwrap();
            } else if c.rank() == (round + 1) % 3 {
                c.recv(&mut [0u8], (c.rank() + 2) % 3).unwrap();
            }
            // A call that one rank refuses counts on that rank too.
            if round == 4 && c.rank() == 2 {
                c.broadcast(&mut [0u8], 9).unwrap_err();
            } else {
                assert_eq!(c.broadcast(&mut [0u8], round % 3).is_err(), round == 4);
            }
            c.barrier().unwrap();
        }
        let of = |s: &Seen| match s.number {
            CallNumber::Collective(n) if matches!(s.step, "completed" | "failed") => Some((n, s.operation)),
            _ => None,
        };
        log.take().iter().filter_map(of).collect::<Vec<_>>()
    });
    assert_eq!(numbers[0].len(), 20);
    assert_eq!(numbers[0].iter().map(|n| n.0).collect::<Vec<_>>(), (0..20).collect::<Vec<_>>());
    assert!(numbers.iter().all(|n| *n == numbers[0]), "{numbers:?}");
}

#[test]
fn messages_are_numbered_per_peer_direction_and_tag() {
    let mock = Mock::new();
    let comm = mock.comm();
    let log = Arc::new(Log::default());
    let _guard = comm.observe(log.clone());
    let mut x = [0u8];
    let tag3 = comm.with(CallOptions::new().tag(3));
    comm.send(&[1u8], 1).unwrap();
    comm.send(&[1u8], 1).unwrap();
    tag3.send(&[1u8], 1).unwrap();
    comm.recv(&mut x, 1).unwrap();
    comm.send(&[1u8], 0).unwrap();
    let w = comm.send_async(vec![1u8], 1).unwrap();
    mock.op(0).complete(Ok(()));
    w.wait().unwrap();
    // A batch takes numbers for its messages, each time it is issued.
    let mut b = comm.batch().send(&[1u8], 1).unwrap();
    b.issue().unwrap();
    b.issue().unwrap();
    comm.send(&[1u8], 1).unwrap();
    let got: Vec<_> =
        log.take().into_iter().filter(|s| s.step == "completed").map(|s| (s.operation, s.number)).collect();
    let p2p = |peer, tag, seq| CallNumber::P2p { peer, tag, seq };
    let (send, recv, batch) = (Operation::Send, Operation::Recv, Operation::Batch);
    let want = [
        (send, p2p(1, 0, 0)),
        (send, p2p(1, 0, 1)),
        (send, p2p(1, 3, 0)),
        (recv, p2p(1, 0, 0)),
        (send, p2p(0, 0, 0)),
        (send, p2p(1, 0, 2)),
        (batch, CallNumber::Local),
        (batch, CallNumber::Local),
        (send, p2p(1, 0, 5)),
    ];
    assert_eq!(got, want);
}

#[test]
fn a_veto_reaches_the_caller_and_the_other_ranks() {
    let shared = common::toy::World::new(3);
    world_on(&shared, |c| {
        let log = Arc::new(Log::default());
        let _guard = c.observe(log.clone());
        for form in [Form::Sync, Form::Async, Form::Scoped] {
            if c.rank() == 1 {
                *log.veto.lock() = Some(Operation::AllReduce);
            }
            let mut x = vec![1u8];
            let e = match form {
                Form::Sync => c.all_reduce(&mut x, op::Sum).unwrap_err(),
                // The others' calls start and fail later.
                Form::Async => c.all_reduce_async(x, op::Sum).and_then(comm_core::Work::wait).unwrap_err(),
                _ => c.scope(|s| s.all_reduce(&mut x, op::Sum).map(drop)).unwrap_err(),
            };
            let steps = log.take();
            if c.rank() == 1 {
                assert!(matches!(e.kind(), ErrorKind::InvalidArgument { .. }), "{e:?}");
                assert!(e.to_string().contains("not on my watch") && e.to_string().contains("all_reduce"), "{e}");
                assert_eq!(steps.iter().map(|s| s.step).collect::<Vec<_>>(), ["pre", "failed"]);
            } else {
                let ErrorKind::PeerRefused { rank: 1, reason } = e.kind() else { panic!("{e:?}") };
                assert!(reason.contains("not on my watch"));
                assert_eq!(steps.iter().map(|s| s.step).collect::<Vec<_>>(), ["pre", "enqueued", "started", "failed"]);
            }
            assert_eq!(steps.last().unwrap().error.as_ref(), Some(&e), "observers get the error that the caller gets");
            *log.veto.lock() = None;
            c.barrier().unwrap();
            log.take();
        }
    });
    assert!(shared.is_quiet());
}

#[test]
fn a_veto_of_messages_reaches_their_peers() {
    let shared = common::toy::World::new(2);
    world_on(&shared, |c| {
        let log = Arc::new(Log::default());
        let _guard = c.observe(log.clone());
        let mut x = [0u8];
        if c.rank() == 0 {
            *log.veto.lock() = Some(Operation::Send);
            c.send(&[1u8], 1).unwrap_err();
            *log.veto.lock() = Some(Operation::Batch);
            c.batch().send(&[1u8], 1).unwrap().recv(&mut x, 1).unwrap().issue().unwrap_err();
            let mut b = c.batch_async();
            b.send([2u8], 1).unwrap();
            b.issue().unwrap_err();
            *log.veto.lock() = None;
            c.barrier().unwrap();
            c.send(&[42u8], 1).unwrap();
            c.recv(&mut x, 1).unwrap();
            assert_eq!(x, [43]);
        } else {
            // One of `send`, two of the batches; the batch's receive refuses what we would send.
            for _ in 0..3 {
                let e = c.recv(&mut x, 0).unwrap_err();
                let ErrorKind::PeerRefused { rank: 0, reason } = e.kind() else { panic!("{e:?}") };
                assert!(reason.contains("not on my watch"), "{reason}");
            }
            c.barrier().unwrap();
            let e = c.send(&[1u8], 0).unwrap_err();
            assert!(matches!(e.kind(), ErrorKind::PeerRefused { rank: 0, .. }), "{e:?}");
            // Both sides still count alike.
            c.recv(&mut x, 0).unwrap();
            assert_eq!(x, [42]);
            c.send(&[43u8], 0).unwrap();
        }
    });
    assert!(shared.is_quiet());
}

#[test]
fn failing_operations_report_their_error() {
    let mock = Mock::new();
    let comm = mock.comm();
    let log = Arc::new(Log::default());
    let _guard = comm.observe(log.clone());
    let broken = || Error::new(ErrorKind::Corrupt { rank: Some(1), what: "test".into() });
    *mock.sync_result.lock() = Err(broken());
    let e = comm.barrier().unwrap_err();
    let w = comm.all_reduce_async(vec![0u32], op::Sum).unwrap();
    mock.op(0).complete(Err(broken()));
    let f = w.wait().unwrap_err();
    *mock.start_error.lock() = Some(broken());
    let g = comm.all_reduce_async(vec![0u32], op::Sum).unwrap_err();
    let seen = log.take();
    assert_eq!(seen.iter().map(|s| s.step).collect::<Vec<_>>(), [["pre", "enqueued", "started", "failed"]; 3].concat());
    let errors: Vec<_> = seen.into_iter().filter_map(|s| s.error).collect();
    assert_eq!(errors, [e, f, g]);
}

#[test]
fn a_panicking_observer_is_contained() {
    struct Bad;
    impl Observer for Bad {
        fn pre(&self, _: &Call<'_>) -> Result<(), String> {
            panic!("pre");
        }
        fn event(&self, _: &Event<'_>, _: Time) {
            panic!("event");
        }
    }
    world(2, |c| {
        let log = Arc::new(Log::default());
        let _bad = c.observe(Arc::new(Bad));
        let _good = c.observe(log.clone());
        let mut x = [1u8];
        c.all_reduce(&mut x, op::Sum).unwrap();
        assert_eq!(x, [2]);
        let x = c.all_reduce_async(vec![1u8], op::Sum).unwrap().wait().unwrap();
        assert_eq!(x, [2]);
        assert_eq!(log.steps(), [GOOD, GOOD].concat());
    });
}

#[test]
fn guards_unregister_and_detached_ones_stay() {
    let comm = Mock::new().comm();
    let (a, b) = (Arc::new(Log::default()), Arc::new(Log::default()));
    let guard = comm.observe(a.clone());
    comm.observe(b.clone()).detach();
    comm.barrier().unwrap();
    drop(guard);
    assert_eq!(Arc::strong_count(&a), 1);
    comm.barrier().unwrap();
    assert_eq!((a.steps().len(), b.steps().len()), (4, 8));
    // A guard may outlive its communicator.
    let guard = comm.observe(a.clone());
    drop(comm);
    drop(guard);
    assert_eq!((Arc::strong_count(&a), Arc::strong_count(&b)), (1, 1));
}

#[test]
fn an_observer_may_come_and_go_in_an_event() {
    struct Leaver(Mutex<Option<comm_core::ObserverGuard>>, AtomicUsize);
    impl Observer for Leaver {
        fn event(&self, _: &Event<'_>, _: Time) {
            self.1.fetch_add(1, SeqCst);
            self.0.lock().take();
        }
    }
    common::within_deadline(|| {
        let comm = Mock::new().comm();
        let leaver = Arc::new(Leaver(Mutex::new(None), AtomicUsize::new(0)));
        *leaver.0.lock() = Some(comm.observe(leaver.clone()));
        comm.barrier().unwrap();
        assert_eq!(leaver.1.load(SeqCst), 1);
    });
}

#[test]
fn an_observer_that_comes_in_the_middle_of_a_call_sees_no_absurd_time() {
    struct Elapsed(Mutex<Vec<Duration>>);
    impl Observer for Elapsed {
        fn event(&self, e: &Event<'_>, _: Time) {
            if let Event::Completed { elapsed, .. } = e {
                self.0.lock().push(*elapsed);
            }
        }
    }
    /// Its origin is long ago.
    #[derive(Debug)]
    struct Stopped;
    impl Clock for Stopped {
        fn now(&self) -> Time {
            Time(3_600_000_000_000)
        }
        fn sleep(&self, _: Duration) {}
        fn park(&self, _: &Parker, _: Option<Time>) {}
        fn unpark(&self, _: &Parker) {}
    }
    let mock = Mock::with_clock(Arc::new(Stopped));
    let comm = mock.comm();
    let elapsed = Arc::new(Elapsed(Mutex::default()));
    let (late, log) = (comm.clone(), elapsed.clone());
    *mock.on_run.lock() = Some(Box::new(move || late.observe(log).detach()));
    comm.barrier().unwrap();
    comm.barrier().unwrap();
    assert_eq!(*elapsed.0.lock(), [Duration::ZERO; 2]);
}

#[test]
fn aborts_and_finalizes_are_seen() {
    let mock = Mock::new();
    let comm = mock.comm();
    let log = Arc::new(Log::default());
    let _guard = comm.observe(log.clone());
    comm.abort("reason");
    assert_eq!(mock.aborts.lock().len(), 1);
    // The backend's own end went well; that the communicator had failed is not forgotten.
    let e = comm.finalize(Duration::from_secs(1)).unwrap_err();
    assert!(matches!(e.kind(), ErrorKind::Aborted { rank: 0, .. }), "{e}");
    let other = log.other.lock();
    assert!(other[0].contains("Aborted") && other[0].contains("reason"), "{other:?}");
    assert!(other[1].contains("Finalized") && other[1].contains("mocked"), "{other:?}");
    assert_eq!(other.len(), 2);
}

fn begin(c: &Communicator) -> comm_core::OpTicket {
    c.begin(OpDesc::new(Operation::WindowCreate).elements(DType::F32, 8)).unwrap()
}

#[test]
fn tickets_number_and_report_like_any_call() {
    let mock = Mock::new();
    let comm = mock.comm();
    let log = Arc::new(Log::default());
    let _guard = comm.observe(log.clone());
    comm.barrier().unwrap();
    log.take();
    let t = begin(&comm);
    assert_eq!((t.collective_seq(), t.info().seq, t.info().op_id), (Some(1), 1, 1));
    assert_eq!(t.info().desc.count, 8);
    assert_eq!(t.complete(Ok(5)).unwrap(), 5);
    assert_eq!(log.steps(), GOOD);

    let e = begin(&comm).complete::<()>(Err(Error::invalid("inner"))).unwrap_err();
    for part in ["window_create #2", "'mocked'", "rank 0 of 2", "inner"] {
        assert!(e.to_string().contains(part), "{part} in {e}");
    }
    let seen = log.take();
    assert_eq!((seen[3].step, seen[3].error.as_ref()), ("failed", Some(&e)));
    assert!(mock.refusals.lock().is_empty(), "the others learn it through the operation itself");

    let e = begin(&comm).refuse(Error::invalid("bad size"));
    assert!(e.to_string().contains("window_create #3"), "{e}");
    assert_eq!(log.steps(), ["pre", "enqueued", "started", "failed"]);
    let refusals = std::mem::take(&mut *mock.refusals.lock());
    assert_eq!(refusals.len(), 1);
    assert_eq!((refusals[0].0, refusals[0].1), (CallNumber::Collective(3), Operation::WindowCreate));
    assert!(refusals[0].2.contains("bad size"));

    drop(begin(&comm));
    let seen = log.take();
    assert_eq!(seen.len(), 4);
    assert!(seen[3].error.as_ref().unwrap().to_string().contains("abandoned"));

    // One-sided calls are no collectives: they take no number and nobody else is told.
    let t = comm.begin(OpDesc::new(Operation::Put)).unwrap();
    assert_eq!(t.collective_seq(), None);
    t.refuse(Error::invalid("x"));
    assert!(mock.refusals.lock().is_empty());
    *log.veto.lock() = Some(Operation::WindowCreate);
    let e = comm.begin(OpDesc::new(Operation::WindowCreate)).unwrap_err();
    assert!(e.to_string().contains("not on my watch") && e.to_string().contains("window_create #5"), "{e}");
    assert_eq!(mock.refusals.lock().len(), 1);
    // The next collective goes on from there.
    *log.veto.lock() = None;
    assert_eq!(begin(&comm).collective_seq(), Some(6));
}

#[test]
fn a_refused_split_reaches_the_others() {
    let mock = Mock::new();
    let comm = mock.comm();
    for (list, what) in [(&[0, 5][..], "split rank 5"), (&[0, 0], "twice"), (&[1], "does not contain this rank")] {
        let e = comm.split(list, "child").unwrap_err();
        assert!(e.to_string().contains(what) && e.to_string().contains("split #"), "{e}");
    }
    assert_eq!(mock.refusals.lock().len(), 3);
}
