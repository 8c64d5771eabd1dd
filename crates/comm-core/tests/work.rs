//! Works: waiting, polling, dropping, leaking, and the races between them.

mod common;

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use comm_core::{Error, ErrorKind, Work, WorkStatus, op, wait_all, wait_any};
use common::mock::{Mock, Trick};
use common::{Counted, within_deadline, world};
use proptest::prelude::Rng as _;
use proptest::test_runner::{RngAlgorithm, TestRng};

const SHORT: Duration = Duration::from_millis(5);

/// Counts its wake-ups.
#[derive(Default)]
struct Count(AtomicUsize);

impl Wake for Count {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, SeqCst);
    }
}

fn broken() -> Error {
    Error::new(ErrorKind::Corrupt { rank: Some(1), what: "test".into() })
}

#[test]
fn works_are_futures_on_any_executor() {
    world(2, |c| {
        let x = pollster::block_on(c.all_reduce_async(vec![1.5f32; 3], op::Sum).unwrap()).unwrap();
        assert_eq!(x, [3.0; 3]);
    });
    for threads in [1, 2] {
        world(2, move |c| {
            let rt = if threads == 1 {
                tokio::runtime::Builder::new_current_thread().build().unwrap()
            } else {
                tokio::runtime::Builder::new_multi_thread().worker_threads(2).build().unwrap()
            };
            let (a, b) = rt.block_on(async {
                let a = tokio::spawn(c.all_reduce_async(vec![c.rank() as u32; 4], op::Max).unwrap());
                let b = tokio::spawn(c.all_gather_async(vec![c.rank() as u8], vec![0u8; 2]).unwrap());
                // Works that nobody drives: the engine wakes the tasks.
                (a.await.unwrap().unwrap(), b.await.unwrap().unwrap())
            });
            assert_eq!((a, b.1), (vec![1; 4], vec![0, 1]));
        });
    }
}

#[test]
fn wait_timeout_hands_the_work_back_and_it_completes_later() {
    let mock = Mock::new();
    let comm = mock.comm();
    let (buf, drops) = Counted::new(&[7; 4]);
    let w = comm.all_reduce_async(buf, op::Sum).unwrap();
    assert_eq!((w.status(), w.is_completed(), w.duration()), (WorkStatus::Running, false, None));
    assert!(w.error().is_none());
    let w = w.wait_timeout(SHORT).unwrap_err();
    let w = w.wait_timeout(Duration::ZERO).unwrap_err();
    let w = w.try_wait().unwrap_err();
    mock.op(0).write(0);
    mock.op(0).complete(Ok(()));
    assert_eq!((w.status(), w.is_completed()), (WorkStatus::Completed, true));
    assert!(w.duration().unwrap() >= SHORT);
    let back = w.wait_timeout(SHORT).unwrap().unwrap();
    assert_eq!(*back.data, [0; 4]);
    assert_eq!(drops.load(SeqCst), 0);
    drop(back);
    assert_eq!(drops.load(SeqCst), 1);
    assert_eq!(mock.op(0).cancels.load(SeqCst), 0);
    assert!(mock.op(0).dropped.load(SeqCst));
}

#[test]
fn a_failed_work_tells_its_error_and_keeps_the_buffer_for_into_parts() {
    let mock = Mock::new();
    let comm = mock.comm();
    let (buf, drops) = Counted::new(&[7; 4]);
    let w = comm.all_reduce_async(buf, op::Sum).unwrap();
    mock.op(0).complete(Err(broken()));
    assert_eq!(w.status(), WorkStatus::Failed);
    let e = w.error().unwrap();
    for part in ["'mocked'", "rank 0 of 2", "all_reduce #0", "corrupt"] {
        assert!(e.to_string().contains(part), "{part} in {e}");
    }
    let (buf, r) = w.into_parts();
    assert_eq!(r.unwrap_err(), e);
    assert_eq!(buf.unwrap().data.len(), 4);
    assert_eq!(drops.load(SeqCst), 1);
    let w = comm.all_reduce_async(Counted::new(&[1]).0, op::Sum).unwrap();
    mock.op(1).complete(Err(broken()));
    assert!(matches!(w.try_wait().unwrap().unwrap_err().kind(), ErrorKind::Corrupt { .. }));
}

/// `error` and `duration` must not need another call that polls first.
#[test]
fn nothing_about_a_work_is_stale() {
    // Completed without a wake-up: only who polls finds out.
    let mock = Mock::new();
    let comm = mock.comm();
    let w = comm.all_reduce_async(vec![0u32], op::Sum).unwrap();
    mock.op(0).complete_silently(Err(broken()));
    assert!(w.error().is_some());
    let w = comm.all_reduce_async(vec![0u32], op::Sum).unwrap();
    mock.op(1).complete_silently(Ok(()));
    assert!(w.duration().is_some());
}

#[test]
fn a_start_that_fails_gives_its_error_and_frees_the_buffer() {
    let mock = Mock::new();
    let comm = mock.comm();
    *mock.start_error.lock() = Some(broken());
    let (buf, drops) = Counted::new(&[7; 4]);
    let e = comm.all_reduce_async(buf, op::Sum).unwrap_err();
    assert!(e.to_string().contains("all_reduce #0"), "{e}");
    assert_eq!(drops.load(SeqCst), 1);
    // Nothing is left in flight.
    comm.finalize(SHORT).unwrap();
}

#[test]
fn dropping_a_work_lets_the_operation_end_and_frees_the_buffer_once() {
    let mock = Mock::new();
    let comm = mock.comm();
    let (buf, drops) = Counted::new(&[7; 4]);
    drop(comm.all_reduce_async(buf, op::Sum).unwrap());
    assert_eq!(drops.load(SeqCst), 0, "in flight");
    mock.op(0).write(1);
    assert_eq!(mock.op(0).first(), 1);
    mock.op(0).complete(Ok(()));
    assert_eq!(drops.load(SeqCst), 1);
    assert_eq!(mock.op(0).cancels.load(SeqCst), 0);
    assert!(mock.op(0).dropped.load(SeqCst));
    comm.finalize(SHORT).unwrap();
}

#[test]
fn the_buffer_outlives_work_and_communicator() {
    let mock = Mock::new();
    let comm = mock.comm();
    let (buf, drops) = Counted::new(&[7; 4]);
    let w = comm.all_reduce_async(buf, op::Sum).unwrap();
    drop(comm);
    drop(w);
    assert_eq!(mock.closes.load(SeqCst), 1);
    assert_eq!(drops.load(SeqCst), 0);
    mock.op(0).write(1);
    mock.op(0).complete(Ok(()));
    assert_eq!(drops.load(SeqCst), 1);
    assert_eq!(Arc::strong_count(&mock), 1, "the record and the communicator are gone");
}

#[test]
fn forgetting_a_work_frees_nothing_in_flight() {
    let mock = Mock::new();
    let comm = mock.comm();
    let (buf, drops) = Counted::new(&[7; 4]);
    std::mem::forget(comm.all_reduce_async(buf, op::Sum).unwrap());
    assert_eq!(drops.load(SeqCst), 0);
    mock.op(0).write(1);
    mock.op(0).complete(Ok(()));
    // The leaked handle owns it now.
    assert_eq!(drops.load(SeqCst), 0);
    comm.finalize(SHORT).unwrap();
}

#[test]
fn a_panicking_destructor_does_not_reach_the_engine() {
    struct Bomb(Counted);
    impl Drop for Bomb {
        fn drop(&mut self) {
            panic!("a destructor that panics");
        }
    }
    // SAFETY: as `Counted`.
    unsafe impl comm_core::IntoBuf<Bomb> for Bomb {
        type Elem = u32;
        fn buf(&self) -> comm_core::Result<comm_core::RawBuf> {
            self.0.buf()
        }
    }
    // SAFETY: as `Counted`.
    unsafe impl comm_core::IntoBufMut<Bomb> for Bomb {
        fn buf_mut(&mut self) -> comm_core::Result<comm_core::RawBufMut> {
            self.0.buf_mut()
        }
    }
    let mock = Mock::new();
    let comm = mock.comm();
    let (buf, drops) = Counted::new(&[7; 4]);
    drop(comm.all_reduce_async(Bomb(buf), op::Sum).unwrap());
    mock.op(0).complete(Ok(()));
    assert_eq!(drops.load(SeqCst), 1);
    within_deadline(move || comm.finalize(Duration::from_secs(5))).unwrap();
}

#[test]
fn a_destructor_may_finalize() {
    struct Last(Counted, comm_core::Communicator, Arc<AtomicBool>);
    impl Drop for Last {
        fn drop(&mut self) {
            self.1.finalize(Duration::from_secs(5)).unwrap();
            self.2.store(true, SeqCst);
        }
    }
    // SAFETY: as `Counted`.
    unsafe impl comm_core::IntoBuf<Last> for Last {
        type Elem = u32;
        fn buf(&self) -> comm_core::Result<comm_core::RawBuf> {
            self.0.buf()
        }
    }
    // SAFETY: as `Counted`.
    unsafe impl comm_core::IntoBufMut<Last> for Last {
        fn buf_mut(&mut self) -> comm_core::Result<comm_core::RawBufMut> {
            self.0.buf_mut()
        }
    }
    within_deadline(|| {
        let mock = Mock::new();
        let comm = mock.comm();
        let done = Arc::new(AtomicBool::new(false));
        drop(comm.all_reduce_async(Last(Counted::new(&[7; 4]).0, comm.clone(), Arc::clone(&done)), op::Sum).unwrap());
        mock.op(0).complete(Ok(()));
        assert!(done.load(SeqCst));
    });
}

#[test]
fn a_completion_is_never_lost_wherever_it_falls() {
    for trick in [Trick::InStart, Trick::InSetWaker, Trick::InPoll(1), Trick::InPoll(2)] {
        within_deadline(move || {
            let mock = Mock::new();
            let comm = mock.comm();
            *mock.trick.lock() = trick;
            let (buf, drops) = Counted::new(&[7; 4]);
            let count = Arc::new(Count::default());
            let waker = Waker::from(Arc::clone(&count));
            let mut w = pin!(comm.all_reduce_async(buf, op::Sum).unwrap());
            let mut cx = Context::from_waker(&waker);
            let first = w.as_mut().poll(&mut cx);
            if first.is_pending() {
                assert!(count.0.load(SeqCst) > 0, "{trick:?}: nobody was woken");
                assert!(w.as_mut().poll(&mut cx).is_ready(), "{trick:?}");
            }
            assert_eq!(drops.load(SeqCst), usize::from(first.is_pending()), "{trick:?}");
            drop(first);
            assert_eq!(drops.load(SeqCst), 1, "{trick:?}");
        });
    }
}

#[test]
fn the_newest_waker_is_woken() {
    let mock = Mock::new();
    let comm = mock.comm();
    let (a, b) = (Arc::new(Count::default()), Arc::new(Count::default()));
    let mut w = pin!(comm.all_reduce_async(vec![0u32], op::Sum).unwrap());
    assert!(w.as_mut().poll(&mut Context::from_waker(&Waker::from(Arc::clone(&a)))).is_pending());
    assert!(w.as_mut().poll(&mut Context::from_waker(&Waker::from(Arc::clone(&b)))).is_pending());
    mock.op(0).complete(Ok(()));
    assert_eq!((a.0.load(SeqCst), b.0.load(SeqCst)), (0, 1));
    let mut cx = Context::from_waker(Waker::noop());
    assert!(matches!(w.as_mut().poll(&mut cx), Poll::Ready(Ok(_))));
    // Against the rules of futures, but not undefined.
    assert!(matches!(w.as_mut().poll(&mut cx), Poll::Ready(Err(_))));
}

#[test]
fn a_waker_may_run_the_task_at_once() {
    struct Inline(parking_lot::Mutex<Option<Work<Vec<u32>>>>, AtomicUsize);
    impl Wake for Inline {
        fn wake(self: Arc<Self>) {
            let mut w = self.0.lock().take().unwrap();
            let waker = Waker::from(Arc::clone(&self));
            let r = std::pin::Pin::new(&mut w).poll(&mut Context::from_waker(&waker));
            assert!(matches!(r, Poll::Ready(Ok(_))));
            self.1.fetch_add(1, SeqCst);
        }
    }
    within_deadline(|| {
        let mock = Mock::new();
        let comm = mock.comm();
        let task = Arc::new(Inline(parking_lot::Mutex::new(None), AtomicUsize::new(0)));
        let waker = Waker::from(Arc::clone(&task));
        let mut w = comm.all_reduce_async(vec![0u32], op::Sum).unwrap();
        assert!(std::pin::Pin::new(&mut w).poll(&mut Context::from_waker(&waker)).is_pending());
        *task.0.lock() = Some(w);
        mock.op(0).complete(Ok(()));
        assert_eq!(task.1.load(SeqCst), 1);
    });
}

#[test]
fn a_timed_wait_keeps_its_deadline_behind_another_waiter() {
    within_deadline(|| {
        let mock = Mock::new();
        let comm = mock.comm();
        let w = comm.all_reduce_async(vec![0u32], op::Sum).unwrap();
        let (op, waiting) = (mock.op(0), comm.clone());
        // Finalize waits for the operation and meanwhile holds it.
        let finalizer = std::thread::spawn(move || waiting.finalize(Duration::from_secs(15)));
        while op.waiting.load(SeqCst) == 0 {
            std::thread::yield_now();
        }
        let (tx, rx) = std::sync::mpsc::channel();
        let timed = std::thread::spawn(move || {
            let w = w.wait_timeout(SHORT).unwrap_err();
            tx.send(()).unwrap();
            w.wait().unwrap()
        });
        rx.recv_timeout(Duration::from_secs(5)).expect("wait_timeout waited for the other waiter's deadline");
        op.complete(Ok(()));
        finalizer.join().unwrap().unwrap();
        assert_eq!(timed.join().unwrap(), [0]);
    });
}

#[test]
fn finalize_times_out_on_what_does_not_end_and_the_work_still_completes() {
    let mock = Mock::new();
    let comm = mock.comm();
    let w = comm.all_reduce_async(vec![3u32], op::Sum).unwrap();
    let e = comm.finalize(SHORT).unwrap_err();
    assert!(matches!(e.kind(), ErrorKind::Timeout { .. }), "{e}");
    mock.op(0).complete(Ok(()));
    assert_eq!(w.wait().unwrap(), [3]);
}

#[test]
fn wait_all_waits_for_all_and_gives_the_first_error() {
    let mock = Mock::new();
    let comm = mock.comm();
    let works: Vec<_> = (0..3).map(|i| comm.all_reduce_async(vec![i as u32], op::Sum).unwrap()).collect();
    let ids: Vec<u64> = works.iter().map(Work::op_id).collect();
    assert_eq!(ids, [0, 1, 2]);
    let late = mock.op(2);
    let ender = std::thread::spawn(move || {
        std::thread::sleep(SHORT);
        late.complete(Err(Error::invalid("late")));
    });
    mock.op(0).complete(Ok(()));
    mock.op(1).complete(Err(broken()));
    let e = wait_all(works).unwrap_err();
    assert!(matches!(e.kind(), ErrorKind::Corrupt { .. }));
    assert!(mock.op(2).dropped.load(SeqCst), "the last one has ended too");
    ender.join().unwrap();
    let works: Vec<_> = (0..2).map(|i| comm.all_reduce_async(vec![i as u32], op::Sum).unwrap()).collect();
    mock.op(3).complete(Ok(()));
    mock.op(4).complete(Ok(()));
    assert_eq!(wait_all(works).unwrap(), [[0], [1]]);
    assert!(wait_all(Vec::<Work<()>>::new()).unwrap().is_empty());
}

#[test]
fn wait_any_takes_them_as_they_come() {
    let mock = Mock::new();
    let comm = mock.comm();
    let mut works: Vec<_> = (0..3).map(|i| comm.all_reduce_async(vec![i as u32], op::Sum).unwrap()).collect();
    mock.op(1).complete(Ok(()));
    assert_eq!(wait_any(&mut works).unwrap(), (1, Ok(vec![1])));
    let op = mock.op(2);
    let ender = std::thread::spawn(move || {
        std::thread::sleep(SHORT);
        op.complete(Err(broken()));
    });
    let (i, r) = wait_any(&mut works).unwrap();
    assert!(i == 1 && r.is_err());
    ender.join().unwrap();
    mock.op(0).complete(Ok(()));
    assert_eq!(wait_any(&mut works).unwrap(), (0, Ok(vec![0])));
    assert!(matches!(wait_any(&mut works).unwrap_err().kind(), ErrorKind::InvalidArgument { .. }));
}

/// Completion on one thread against everything that a handle can do on another.
#[test]
fn a_thousand_races() {
    within_deadline(|| {
        let rounds = if cfg!(miri) { 20 } else { 1000 };
        let mut rng = TestRng::deterministic_rng(RngAlgorithm::ChaCha);
        let (jobs, todo) = std::sync::mpsc::channel::<(Arc<common::mock::Op>, u32)>();
        let engine = std::thread::spawn(move || {
            for (op, spins) in todo {
                for _ in 0..spins {
                    std::hint::spin_loop();
                }
                op.write(9);
                op.complete(Ok(()));
            }
        });
        let mock = Mock::new();
        let comm = mock.comm();
        for round in 0..rounds {
            let (buf, drops) = Counted::new(&[1; 3]);
            let w = comm.all_reduce_async(buf, op::Sum).unwrap();
            let op = mock.op(round);
            jobs.send((Arc::clone(&op), rng.next_u32() % 3000)).unwrap();
            let back = match rng.next_u32() % 6 {
                0 => Some(w.wait().unwrap()),
                1 => Some(pollster::block_on(w).unwrap()),
                2 => {
                    let mut w = w;
                    loop {
                        match w.wait_timeout(Duration::from_nanos(u64::from(rng.next_u32() % 2000))) {
                            Ok(r) => break Some(r.unwrap()),
                            Err(again) => w = again,
                        }
                    }
                }
                3 => {
                    // A timed wait first, then the future: the wake-up may fall between them.
                    match w.wait_timeout(Duration::from_nanos(u64::from(rng.next_u32() % 2000))) {
                        Ok(r) => Some(r.unwrap()),
                        Err(w) => Some(pollster::block_on(w).unwrap()),
                    }
                }
                4 => {
                    while !w.is_completed() {
                        std::hint::spin_loop();
                    }
                    Some(w.try_wait().unwrap().unwrap())
                }
                _ => {
                    drop(w);
                    while !op.dropped.load(SeqCst) || drops.load(SeqCst) == 0 {
                        std::thread::yield_now();
                    }
                    None
                }
            };
            if let Some(b) = &back {
                assert_eq!((&*b.data, drops.load(SeqCst)), (&[0x0909_0909; 3][..], 0));
            }
            drop(back);
            assert_eq!(drops.load(SeqCst), 1, "round {round}");
        }
        drop(jobs);
        engine.join().unwrap();
        comm.finalize(SHORT).unwrap();
    });
}

/// Pollers on many threads contend for the backend's object while it completes: the last wake-up must
/// not fall between one that has just looked and one that finds the lock taken.
#[test]
fn contended_wake_ups_are_not_lost() {
    within_deadline(|| {
        let rounds = if cfg!(miri) { 20 } else { 3000 };
        let mock = Mock::new();
        let comm = mock.comm();
        let (jobs, todo) = std::sync::mpsc::channel::<Arc<common::mock::Op>>();
        let engine = std::thread::spawn(move || todo.into_iter().for_each(|op| op.complete(Ok(()))));
        for round in 0..rounds {
            let w = comm.all_reduce_async(vec![0u32], op::Sum).unwrap();
            jobs.send(mock.op(round)).unwrap();
            let woken = Arc::new(Count::default());
            let waker = Waker::from(Arc::clone(&woken));
            let mut w = pin!(w);
            // Polled once; from then on only the engine can bring it forward.
            if w.as_mut().poll(&mut Context::from_waker(&waker)).is_pending() {
                while woken.0.load(SeqCst) == 0 {
                    std::hint::spin_loop();
                }
            }
        }
        drop(jobs);
        engine.join().unwrap();
    });
}
