//! What `run_ranks` tells about ranks that go wrong.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use backend_sim::{RankPanic, run_ranks, run_ranks_with};
use comm_core::{CallOptions, CommOptions, Communicator, Error, ErrorKind, PeerCause, Result, op};

/// Runs something that fails, well before any deadline.
fn fails<T: Send + std::fmt::Debug + 'static>(
    n: usize,
    f: impl Fn(Communicator) -> Result<T> + Send + Sync + 'static,
) -> RankPanic {
    let start = Instant::now();
    let e = run_ranks(n, f).unwrap_err();
    assert!(start.elapsed() < Duration::from_secs(20), "that was a deadline: {e}");
    e
}

/// With a deadline that will be over.
fn is_late(n: usize, f: impl Fn(Communicator) -> Result<()> + Send + Sync + 'static) -> RankPanic {
    run_ranks_with(n, &CommOptions::new().name("late"), Duration::from_millis(300), f).unwrap_err()
}

#[test]
fn results_come_in_rank_order() {
    let out = run_ranks(4, |comm| {
        std::thread::sleep(Duration::from_millis(10 * (4 - comm.rank() as u64)));
        comm.barrier()?;
        Ok(comm.rank() * 10)
    });
    assert_eq!(out.unwrap(), [0, 10, 20, 30]);
}

#[test]
fn every_panic_is_told_and_consequences_are_not() {
    let meet = Arc::new(Barrier::new(2));
    let e = fails(4, move |comm| {
        if comm.rank() % 2 == 1 {
            meet.wait();
            panic!("odd rank {}", comm.rank());
        }
        comm.barrier()
    });
    let mut all: Vec<_> = e.others.iter().chain([&e]).map(|p| (p.rank, p.message.clone())).collect();
    all.sort();
    assert_eq!(all, [(1, "panicked: odd rank 1".to_owned()), (3, "panicked: odd rank 3".to_owned())]);
    let text = e.to_string();
    assert!(text.contains("rank 1: panicked: odd rank 1") && text.contains("rank 3: panicked: odd rank 3"), "{text}");
}

#[test]
fn a_panic_is_told_before_an_error_that_came_earlier() {
    let e = fails(3, |comm| match comm.rank() {
        0 => Err(Error::invalid("of the test")),
        1 => {
            std::thread::sleep(Duration::from_millis(50));
            panic!("and a bug")
        }
        _ => comm.barrier(),
    });
    assert_eq!((e.rank, e.message.as_str()), (1, "panicked: and a bug"));
    assert!(e.others.len() == 1 && e.others[0].rank == 0 && e.others[0].message.contains("of the test"), "{e}");
}

#[test]
fn a_rank_that_returns_while_others_wait_is_named() {
    let e = fails(3, |comm| if comm.rank() == 2 { Ok(()) } else { comm.barrier() });
    assert_ne!(e.rank, 2);
    assert!(e.message.contains("barrier") && e.message.contains("rank 2 had returned"), "{e}");
    // Or in a message.
    let e = fails(2, |comm| if comm.rank() == 0 { comm.recv(&mut [0u8], 1) } else { Ok(()) });
    assert!(e.rank == 0 && e.message.contains("recv") && e.message.contains("rank 1 had returned"), "{e}");
}

#[test]
fn the_deadline_says_who_is_where() {
    let e = is_late(4, |comm| match comm.rank() {
        0 => comm.all_reduce(&mut [0f32; 5], op::Sum),
        1 => comm.with(CallOptions::new().tag(9)).recv(&mut [0u16; 3], 2),
        // Neither call nor end; it does end, after the deadline.
        2 => {
            std::thread::sleep(Duration::from_secs(2));
            Ok(())
        }
        // Returned, but kept open.
        _ => {
            std::mem::forget(comm);
            Ok(())
        }
    });
    let at = |rank| e.others.iter().chain([&e]).find(|p| p.rank == rank).map_or("", |p| p.message.as_str());
    assert!(
        at(0).contains("did not end within 300ms; it is in all_reduce(f32, count 5, sum), collective 0 of 'late'"),
        "{e}"
    );
    assert!(at(1).contains("recv(u16, count 3) with rank 2, tag 9, message 0"), "{e}");
    assert!(at(2).contains("in no call"), "{e}");
    assert_eq!((e.others.len(), at(3)), (2, ""), "{e}");
}

#[test]
fn the_deadline_ends_calls_that_wait() {
    let ended = Arc::new(AtomicBool::new(false));
    let flag = Arc::clone(&ended);
    is_late(2, move |comm| {
        if comm.rank() == 1 {
            std::mem::forget(comm);
            return Ok(());
        }
        let e = comm.barrier().unwrap_err();
        flag.store(matches!(e.kind(), ErrorKind::Aborted { .. }), Ordering::SeqCst);
        Ok(())
    });
    let until = Instant::now() + Duration::from_secs(10);
    while !ended.load(Ordering::SeqCst) {
        assert!(Instant::now() < until, "the rank waits on");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_rank_may_drop_its_communicator_before_it_ends() {
    let dropped = Arc::new(Barrier::new(2));
    run_ranks(2, move |comm| {
        if comm.rank() == 0 {
            drop(comm);
            dropped.wait();
            return Ok(());
        }
        let e = comm.barrier().unwrap_err();
        assert!(matches!(e.kind(), ErrorKind::PeerFailed { rank: 0, cause: PeerCause::Closed }), "{e}");
        dropped.wait();
        Ok(())
    })
    .unwrap();
}

#[test]
fn a_world_of_no_ranks_is_an_error() {
    let e = run_ranks(0, |_| Ok(())).unwrap_err();
    assert!(e.to_string().contains("at least one rank"), "{e}");
}
