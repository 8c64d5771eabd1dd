//! What users do although they should not: calls from inside operators, finalize beside a running call,
//! endless refusals.

use std::time::Duration;

use backend_sim::{run_ranks, run_ranks_with};
use comm_core::{CallOptions, CommOptions, ErrorKind, op};

const LONG: Duration = Duration::from_secs(30);

#[test]
fn calls_from_inside_an_operator_are_refused_and_do_not_hang() {
    run_ranks(3, |comm| {
        let inner = comm.clone();
        let f = op::custom(
            move |a: &mut [i64], b: &[i64]| {
                let e = inner.barrier().unwrap_err();
                assert!(matches!(e.kind(), ErrorKind::InvalidArgument { .. }), "{e}");
                assert!(!inner.is_failed() && inner.cause().is_none());
                a.iter_mut().zip(b).for_each(|(a, b)| *a += b);
            },
            true,
        );
        for count in [4, 100_000] {
            let mut x = vec![comm.rank() as i64; count];
            comm.all_reduce(&mut x, f.clone())?;
            assert!(x.iter().all(|v| *v == 3));
        }
        comm.finalize(LONG)
    })
    .unwrap();
}

#[test]
fn abort_from_inside_an_operator_fails_the_operation_everywhere() {
    for count in [4usize, 100_000] {
        run_ranks(3, move |comm| {
            let (inner, bad) = (comm.clone(), comm.rank() == 1);
            let f = op::custom(
                move |a: &mut [f32], b: &[f32]| {
                    if bad {
                        inner.abort("saw a NaN");
                    }
                    a.iter_mut().zip(b).for_each(|(a, b)| *a += b);
                },
                true,
            );
            let mut x = vec![1f32; count];
            let e = comm.all_reduce(&mut x, f).and_then(|()| comm.barrier()).unwrap_err();
            let named = matches!(e.kind(), ErrorKind::Aborted { rank: 1, cause } if cause.contains("saw a NaN"));
            assert!(named, "rank {}: {e}", comm.rank());
            Ok(())
        })
        .unwrap();
    }
}

/// A barrier in one thread and finalize in another, started a little apart: both end, and when finalize says that
/// all is well, so does the barrier, or it says that the communicator is finalized.
#[test]
fn finalize_beside_a_call_of_another_thread_leaves_nobody_waiting() {
    for round in 0..150u64 {
        let options = CommOptions::new().timeout(Duration::from_secs(5)).name("beside");
        run_ranks_with(3, &options, Duration::from_secs(20), move |comm| {
            let other = comm.clone();
            let h = std::thread::spawn(move || other.barrier());
            for _ in 0..(round * 37 + comm.rank() as u64 * 11) % 400 {
                std::hint::spin_loop();
            }
            let ended = comm.finalize(Duration::from_secs(4));
            let called = h.join().expect("the barrier panicked");
            if ended.is_ok() {
                let fine = called.as_ref().map_or_else(|e| matches!(e.kind(), ErrorKind::Finalized), |()| true);
                assert!(fine, "finalize went well, but: {called:?}");
            }
            Ok(())
        })
        .unwrap_or_else(|e| panic!("round {round}: {e}"));
    }
}

#[test]
fn more_refusals_than_can_be_remembered_are_an_error_that_says_so() {
    let options = CommOptions::new().timeout(Duration::from_secs(20)).name("flood");
    run_ranks_with(2, &options, Duration::from_secs(40), |comm| {
        if comm.rank() == 1 {
            for _ in 0..1500 {
                let _ = comm.with(CallOptions::new().hint("bogus", "")).barrier().unwrap_err();
            }
        } else {
            std::thread::sleep(Duration::from_millis(300));
        }
        let e = comm.barrier().unwrap_err();
        assert!(e.to_string().contains("refused more than 1024 calls"), "{e}");
        Ok(())
    })
    .unwrap();
}

#[test]
fn bad_settings_are_refused_before_the_ranks_meet() {
    for (hint, value) in [("alog", "ring"), ("algo", "no-such")] {
        let e = backend_sim::connect(CommOptions::new().rank_and_size(0, 2).hint(hint, value)).unwrap_err();
        assert!(matches!(e.kind(), ErrorKind::InvalidArgument { .. }), "{e}");
    }
}

/// A rank that panics while it holds its communicator: the others read that it panicked, not that it closed.
#[test]
fn a_panic_is_not_taken_for_an_orderly_end() {
    let options = CommOptions::new().timeout(LONG).name("panics");
    let ranks: Vec<_> = backend_sim::world(3, &options)
        .unwrap()
        .into_iter()
        .map(|comm| {
            std::thread::spawn(move || {
                assert_ne!(comm.rank(), 1, "the program's bug");
                comm.barrier().unwrap_err()
            })
        })
        .collect();
    for (rank, r) in ranks.into_iter().enumerate() {
        match r.join() {
            Ok(e) => {
                let told = matches!(e.kind(), ErrorKind::Aborted { rank: 1, cause } if cause.contains("panicked"));
                assert!(told, "rank {rank}: {e}");
            }
            Err(_) => assert_eq!(rank, 1),
        }
    }
}
