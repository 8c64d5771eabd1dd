//! Abort from anywhere, at any time, and the barrier that names the missing.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Barrier};
use std::task::{Context, Poll, Wake, Waker};
use std::time::{Duration, Instant};

use backend_sim::{run_ranks, run_ranks_with};
use comm_core::{CommOptions, Communicator, Error, ErrorKind, Event, Observer, Result, Time, abort_all, op};

const LONG: Duration = Duration::from_secs(20);
/// Far less than any timeout in force.
const SOON: Duration = Duration::from_secs(15);

#[track_caller]
fn aborted(e: &Error, rank: usize, cause: &str) {
    let expected = ErrorKind::Aborted { rank, cause: cause.into() };
    assert_eq!(*e.kind(), expected, "{e}");
}

/// All later calls of every form, and finalize, give the first cause.
#[track_caller]
fn stays(comm: &Communicator, rank: usize, cause: &str) {
    assert!(comm.is_failed());
    aborted(&comm.cause().unwrap(), rank, cause);
    let peer = (comm.rank() + 1) % comm.size();
    let mut x = [1u32];
    let later = [
        comm.barrier().unwrap_err(),
        comm.all_reduce(&mut x, op::Sum).unwrap_err(),
        comm.all_reduce_async(vec![1u32], op::Sum).and_then(comm_core::Work::wait).unwrap_err(),
        comm.scope(|s| s.barrier().and_then(comm_core::ScopedWork::wait)).unwrap_err(),
        comm.send(&x, peer).unwrap_err(),
        comm.recv(&mut x, peer).unwrap_err(),
        comm.split(&[], "late").unwrap_err(),
        comm.dup_async("late").and_then(comm_core::Work::wait).unwrap_err(),
        comm.control().unwrap().exchange(b"late", LONG).unwrap_err(),
        comm.monitored_barrier(LONG).unwrap_err(),
        comm.finalize(LONG).unwrap_err(),
    ];
    for e in later {
        aborted(&e, rank, cause);
    }
}

/// One way of waiting for something that never comes.
type Waiting = (&'static str, fn(&Communicator) -> Result<()>);

const WAYS: &[Waiting] = &[
    ("sync", |c| c.barrier()),
    ("async", |c| c.all_reduce_async(vec![1u32], op::Sum)?.wait().map(drop)),
    ("scope", |c| {
        let (mut a, mut b) = ([1u32; 4], [2u64; 4]);
        c.scope(|s| {
            s.all_reduce(&mut a, op::Sum)?;
            s.all_reduce(&mut b, op::Sum)?;
            Ok(())
        })
    }),
    ("batch", |c| {
        let (next, prev) = ((c.rank() + 1) % c.size(), (c.rank() + c.size() - 1) % c.size());
        let (a, mut b) = (vec![1u8; 1 << 20], vec![0u8; 1 << 20]);
        c.batch().tag(9).send(&a, next)?.recv(&mut b, prev)?.issue()
    }),
    ("p2p", |c| c.recv(&mut [0u8], c.size() - 1)),
    ("split", |c| c.dup("child").map(drop)),
    ("split_async", |c| c.split_by_async(Some(0), 0, "child")?.wait().map(drop)),
    ("control", |c| c.control()?.exchange(b"x", LONG).map(drop)),
    ("control recv", |c| c.control()?.recv(c.size() - 1, 3, LONG).map(drop)),
    ("monitored_barrier", |c| c.monitored_barrier(LONG)),
    ("finalize", |c| c.finalize(LONG)),
];

#[test]
fn whoever_waits_in_whatever_gets_the_cause() {
    for (name, wait) in WAYS {
        run_ranks(3, move |comm| {
            let start = Instant::now();
            // The last rank never comes, and aborts when the others wait.
            if comm.rank() == 2 {
                std::thread::sleep(Duration::from_millis(50));
                comm.abort("enough");
            } else {
                let e = wait(&comm).unwrap_err();
                aborted(&e, 2, "enough");
            }
            assert!(start.elapsed() < SOON, "{name}: {:?}", start.elapsed());
            if *name == "finalize" && comm.rank() != 2 {
                assert_eq!(comm.barrier().unwrap_err().kind(), &ErrorKind::Finalized);
            } else {
                stays(&comm, 2, "enough");
            }
            Ok(())
        })
        .unwrap_or_else(|e| panic!("{name}: {e}"));
    }
}

#[test]
fn threads_that_wait_in_everything_at_a_time_end_together() {
    run_ranks(3, |comm| {
        let me = comm.rank();
        if me == 2 {
            std::thread::sleep(Duration::from_millis(80));
            comm.abort("all of it");
        } else {
            // Tags keep the messages of the threads apart; collectives of several threads have no common order and may
            // be refused as a mismatch, so one thread has them.
            let ways: [fn(&Communicator) -> Result<()>; 5] = [
                |c| c.all_reduce(&mut [1u32], op::Sum),
                |c| c.with(comm_core::CallOptions::new().tag(1)).recv(&mut [0u8], 2),
                |c| c.with(comm_core::CallOptions::new().tag(2)).recv_async(vec![0u8], 2)?.wait().map(drop),
                |c| c.control()?.recv(2, 5, LONG).map(drop),
                |c| c.batch().tag(4).recv(&mut [0u8], 2)?.issue(),
            ];
            let threads: Vec<_> = ways
                .into_iter()
                .map(|w| {
                    let c = comm.clone();
                    std::thread::spawn(move || w(&c).unwrap_err())
                })
                .collect();
            for t in threads {
                aborted(&t.join().unwrap(), 2, "all of it");
            }
        }
        stays(&comm, 2, "all of it");
        Ok(())
    })
    .unwrap();
}

#[test]
fn the_first_of_many_aborts_stays() {
    for _ in 0..20 {
        run_ranks(2, |comm| {
            let start = Arc::new(Barrier::new(4));
            let threads: Vec<_> = (0..4)
                .map(|t| {
                    let (c, start) = (comm.clone(), Arc::clone(&start));
                    std::thread::spawn(move || {
                        start.wait();
                        c.abort(&format!("thread {t} of rank {}", c.rank()));
                        c.cause().unwrap()
                    })
                })
                .collect();
            let causes: Vec<Error> = threads.into_iter().map(|t| t.join().unwrap()).collect();
            for c in &causes {
                assert_eq!(c.kind(), causes[0].kind(), "every thread reads the same first cause");
            }
            comm.abort("once more");
            assert_eq!(comm.cause().unwrap().kind(), causes[0].kind());
            assert_eq!(comm.barrier().unwrap_err().kind(), causes[0].kind());
            assert_eq!(comm.finalize(LONG).unwrap_err().kind(), causes[0].kind());
            Ok(())
        })
        .unwrap();
    }
}

#[test]
fn a_rank_that_comes_late_gets_it_too() {
    run_ranks(3, |comm| {
        match comm.rank() {
            0 => comm.abort("gone"),
            1 => aborted(&comm.barrier().unwrap_err(), 0, "gone"),
            _ => {
                std::thread::sleep(Duration::from_millis(100));
                aborted(&comm.all_reduce(&mut [1u8], op::Sum).unwrap_err(), 0, "gone");
            }
        }
        // The others do not end before it has come.
        std::thread::sleep(Duration::from_millis(150));
        stays(&comm, 0, "gone");
        Ok(())
    })
    .unwrap();
}

/// Aborts in the middle of a call of its own communicator.
struct Aborter {
    comm: std::sync::Mutex<Option<Communicator>>,
    seen: AtomicUsize,
}

impl Observer for Aborter {
    fn event(&self, event: &Event<'_>, _: Time) {
        match event {
            Event::Started(_) => {
                if let Some(c) = self.comm.lock().unwrap().take() {
                    c.abort("an observer");
                }
            }
            Event::Aborted { .. } => {
                self.seen.fetch_add(1, SeqCst);
            }
            _ => {}
        }
    }
}

#[test]
fn an_observer_may_abort() {
    run_ranks(2, |comm| {
        let aborter = Arc::new(Aborter { comm: std::sync::Mutex::new(None), seen: AtomicUsize::new(0) });
        let _guard = comm.observe(Arc::clone(&aborter) as _);
        if comm.rank() == 1 {
            *aborter.comm.lock().unwrap() = Some(comm.clone());
        }
        aborted(&comm.barrier().unwrap_err(), 1, "an observer");
        comm.abort("again");
        assert_eq!(aborter.seen.load(SeqCst), usize::from(comm.rank() == 1), "told once, where it was done");
        stays(&comm, 1, "an observer");
        Ok(())
    })
    .unwrap();
}

struct AbortingWaker(Communicator, AtomicBool);

impl Wake for AbortingWaker {
    fn wake(self: Arc<Self>) {
        self.0.abort("a waker");
        self.1.store(true, SeqCst);
    }
}

#[test]
fn a_waker_may_abort() {
    run_ranks(2, |comm| {
        let waker = Arc::new(AbortingWaker(comm.clone(), AtomicBool::new(false)));
        if comm.rank() == 0 {
            let mut work = comm.recv_async(vec![0u8], 1)?;
            let raw = Waker::from(Arc::clone(&waker));
            let poll = std::pin::Pin::new(&mut work).poll(&mut Context::from_waker(&raw));
            if let Poll::Ready(r) = poll {
                r?;
                comm.abort("a waker");
            }
            // The message comes, the waker aborts, and the next call meets it.
            while !comm.is_failed() {
                std::thread::yield_now();
            }
            aborted(&comm.barrier().unwrap_err(), 0, "a waker");
        } else {
            std::thread::sleep(Duration::from_millis(30));
            comm.send(&[1u8], 0)?;
            aborted(&comm.barrier().unwrap_err(), 0, "a waker");
        }
        stays(&comm, 0, "a waker");
        Ok(())
    })
    .unwrap();
}

#[test]
fn a_custom_operator_may_abort_and_ends_its_operation() {
    run_ranks(3, |comm| {
        let (c, me) = (comm.clone(), comm.rank());
        let add = move |acc: &mut [u32], x: &[u32]| {
            if me == 1 {
                c.abort("an operator");
            }
            acc.iter_mut().zip(x).for_each(|(a, x)| *a += x);
        };
        let operator = op::custom(add, true);
        let mut x = [1u32; 64];
        let r = comm.all_reduce(&mut x, operator);
        // Rank 1 folds something in any algorithm but those where another rank does it all.
        let e = r.and_then(|()| comm.barrier()).and_then(|()| comm.barrier()).unwrap_err();
        let ErrorKind::Aborted { rank: 1, cause } = e.kind() else { panic!("{e}") };
        assert!(cause.contains("an operator"), "{cause}");
        Ok(())
    })
    .unwrap();
}

#[test]
fn abort_all_ends_threads_that_wait_in_parents_and_children_in_any_order() {
    let all_made = Arc::new(Barrier::new(2));
    run_ranks(2, move |comm| {
        let (a, b) = (comm.dup("a")?, comm.dup("b")?);
        let grand = a.dup("grand")?;
        all_made.wait();
        let all = [&grand, &comm, &b, &a];
        if comm.rank() == 1 {
            std::thread::sleep(Duration::from_millis(50));
            abort_all(all, "all at once");
        } else {
            let threads: Vec<_> = all
                .iter()
                .map(|c| {
                    let c = (*c).clone();
                    std::thread::spawn(move || c.barrier().unwrap_err())
                })
                .collect();
            for t in threads {
                aborted(&t.join().unwrap(), 1, "all at once");
            }
        }
        all.into_iter().for_each(|c| stays(c, 1, "all at once"));
        Ok(())
    })
    .unwrap();
}

#[test]
fn communicators_aborted_from_both_sides_do_not_wait_for_each_other() {
    for _ in 0..10 {
        let both = Arc::new(Barrier::new(2));
        run_ranks(2, move |comm| {
            let other = comm.dup("other")?;
            both.wait();
            let me = comm.rank();
            // Each rank aborts both, in its own order, while a thread waits in each.
            let waiting: Vec<_> = [&comm, &other]
                .map(|c| {
                    let c = c.clone();
                    std::thread::spawn(move || c.recv(&mut [0u8], 1 - c.rank()).unwrap_err())
                })
                .into_iter()
                .collect();
            if me == 0 {
                abort_all([&comm, &other], "zero")
            } else {
                abort_all([&other, &comm], "one")
            }
            for w in waiting {
                let e = w.join().unwrap();
                assert!(matches!(e.kind(), ErrorKind::Aborted { .. }), "{e}");
            }
            for c in [&comm, &other] {
                let first = c.cause().unwrap();
                assert_eq!(c.finalize(LONG).unwrap_err().kind(), first.kind());
            }
            Ok(())
        })
        .unwrap();
    }
}

/// The ranks in `late` come only when the barrier is over; the one in `strict` has little time, and comes last of the
/// others.
fn missing(n: usize, late: &'static [usize], strict: usize, connect: &str) {
    let came = Arc::new(AtomicUsize::new(0));
    let over = Arc::new(AtomicUsize::new(0));
    let options = CommOptions::new().name("roll call").hint("connect", connect);
    run_ranks_with(n, &options, LONG + LONG, move |comm| {
        let me = comm.rank();
        let expected = n - late.len();
        comm.monitored_barrier(LONG)?;
        comm.barrier()?;
        let until = |done: &dyn Fn() -> bool| {
            while !done() {
                std::thread::sleep(Duration::from_millis(1));
            }
        };
        if late.contains(&me) {
            until(&|| over.load(SeqCst) >= expected);
            let e = comm.monitored_barrier(LONG).unwrap_err();
            let ErrorKind::Aborted { cause, .. } = e.kind() else { panic!("rank {me}: {e}") };
            assert!(cause.contains("monitored_barrier") && cause.contains("not arrived"), "rank {me}: {cause}");
            over.fetch_add(1, SeqCst);
            return Ok(());
        }
        let timeout = if me == strict {
            until(&|| came.load(SeqCst) == expected - 1);
            // The others say so before they enter.
            std::thread::sleep(Duration::from_millis(300));
            Duration::from_millis(30)
        } else {
            came.fetch_add(1, SeqCst);
            LONG
        };
        let e = comm.monitored_barrier(timeout).unwrap_err();
        let ErrorKind::Timeout { missing, .. } = e.kind() else { panic!("rank {me}: {e}") };
        assert_eq!(missing, late, "rank {me}: {e}");
        assert!(e.to_string().contains("monitored_barrier #3"), "{e}");
        // And so it stays.
        for later in [comm.cause().unwrap(), comm.barrier().unwrap_err()] {
            let ErrorKind::Timeout { missing, .. } = later.kind() else { panic!("rank {me}, later: {later}") };
            assert_eq!(missing, late, "rank {me}, later: {later}");
        }
        over.fetch_add(1, SeqCst);
        // Nobody leaves before the late ones have heard.
        until(&|| over.load(SeqCst) == n);
        Ok(())
    })
    .unwrap_or_else(|e| panic!("{n} ranks, late {late:?}, strict {strict}, connect {connect}: {e}"));
}

#[test]
fn a_monitored_barrier_names_all_the_missing_on_every_rank_that_came() {
    missing(4, &[2], 0, "auto");
    missing(4, &[0], 3, "auto");
    missing(6, &[0, 1, 4], 5, "auto");
    missing(2, &[0], 1, "auto");
}

#[test]
fn it_does_so_where_not_all_ranks_have_links() {
    missing(12, &[3, 7], 11, "auto");
    missing(12, &[0, 5, 6], 1, "auto");
    missing(9, &[0], 4, "ring");
}

#[test]
fn a_monitored_barrier_meets_only_its_like() {
    let all = Arc::new(Barrier::new(3));
    run_ranks(3, move |comm| {
        for _ in 0..3 {
            comm.monitored_barrier(LONG)?;
        }
        // One that is ahead must not fail the call that another is still in.
        all.wait();
        let e = if comm.rank() == 1 { comm.barrier() } else { comm.monitored_barrier(LONG) };
        let e = e.and_then(|()| comm.barrier()).unwrap_err();
        assert!(matches!(e.kind(), ErrorKind::Mismatch { seq: 6, .. }), "{e}");
        Ok(())
    })
    .unwrap();
}
