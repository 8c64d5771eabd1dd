//! What users do although they should not: calls from inside operators, finalize beside a running call,
//! endless refusals.

use std::sync::Mutex;
use std::time::Duration;

use backend_sim::{run_ranks, run_ranks_with};
use comm_core::{CallOptions, CommOptions, Error, ErrorKind, op};

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
fn whatever_is_called_inside_an_operator_does_not_hang() {
    let refused = |r: Result<(), Error>| match r {
        Err(e) => assert!(matches!(e.kind(), ErrorKind::InvalidArgument { .. }), "{e}"),
        Ok(()) => panic!("a call inside an operator went well"),
    };
    run_ranks(2, move |comm| {
        let peer = 1 - comm.rank();
        let (other, dropped) = (comm.dup("other")?, comm.dup("dropped")?);
        let work = other.recv_async(vec![0u8], peer)?;
        let (inner, spare) = (other.clone(), Mutex::new(Some((work, dropped))));
        let f = op::custom(
            move |a: &mut [i64], b: &[i64]| {
                refused(inner.finalize(LONG));
                refused(inner.agree_survivors(LONG).map(drop));
                refused(inner.split(&[0, 1], "child").map(drop));
                let control = inner.control().unwrap();
                refused(control.exchange(&[1], LONG).map(drop));
                refused(control.barrier(LONG));
                refused(control.send(peer, 1, &[1]));
                refused(control.recv(peer, 1, LONG).map(drop));
                refused(control.agree(0, LONG).map(drop));
                refused(control.subgroup(&[0, 1], 3).map(drop));
                control.publish(1, 1);
                assert!(control.failed().is_empty());
                if let Some((work, dropped)) = spare.lock().unwrap().take() {
                    assert!(!work.is_completed());
                    let work = work.try_wait().unwrap_err();
                    let work = work.wait_timeout(Duration::from_millis(10)).unwrap_err();
                    refused(work.wait().map(drop));
                    drop(dropped);
                }
                a.iter_mut().zip(b).for_each(|(a, b)| *a += b);
            },
            true,
        );
        for count in [4, 100_000] {
            let mut x = vec![1i64; count];
            comm.all_reduce(&mut x, f.clone())?;
            assert!(x.iter().all(|v| *v == 2));
            comm.all_reduce_async(x, f.clone())?.wait()?;
        }
        // What the operation whose work was given away waits for.
        other.send(&[7u8], peer)?;
        other.finalize(LONG)?;
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
    let flooded = std::sync::Barrier::new(2);
    run_ranks_with(2, &options, Duration::from_secs(40), move |comm| {
        if comm.rank() == 1 {
            for _ in 0..1500 {
                let _ = comm.with(CallOptions::new().hint("bogus", "")).barrier().unwrap_err();
            }
        }
        flooded.wait();
        // Until all of it is here, single calls are refused; each takes one of the 1500 away.
        let mut e = comm.barrier().unwrap_err();
        for _ in 0..200 {
            if !matches!(e.kind(), ErrorKind::PeerRefused { .. }) {
                break;
            }
            std::thread::sleep(Duration::from_millis(50));
            e = comm.barrier().unwrap_err();
        }
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

/// A batch that is issued inside an operator is refused before its messages take numbers that the others would wait for.
#[test]
fn a_batch_inside_an_operator_takes_no_numbers() {
    run_ranks_with(2, &CommOptions::new().timeout(LONG), LONG, |comm| {
        let (inner, me) = (comm.clone(), comm.rank());
        let f = op::custom(
            move |a: &mut [u32], b: &[u32]| {
                if me == 0 {
                    let sync = inner.batch().send(&[1u8; 4], 1).and_then(|mut b| b.issue());
                    assert!(sync.is_err());
                    let mut batch = inner.batch_async();
                    batch.send(vec![1u8; 4], 1).unwrap();
                    assert!(batch.issue().is_err());
                }
                a.iter_mut().zip(b).for_each(|(a, b)| *a += b);
            },
            true,
        );
        let mut x = [1u32; 3];
        comm.all_reduce(&mut x, f)?;
        if me == 0 {
            comm.send(&[7u8; 4], 1)?;
        } else {
            let mut y = [0u8; 4];
            comm.recv(&mut y, 0)?;
            assert_eq!(y, [7; 4]);
        }
        comm.finalize(LONG)
    })
    .unwrap();
}

/// Empty blocks of lists have no address; operations with them end like others, also in the middle of a frame.
#[test]
fn empty_lists_end_with_their_communicator() {
    run_ranks_with(2, &CommOptions::new().timeout(Duration::from_millis(400)), LONG, |comm| {
        let me = comm.rank();
        let f = op::custom(
            move |a: &mut [u32], b: &[u32]| {
                if me == 1 {
                    // Nothing is read from the link meanwhile, which fills up.
                    std::thread::sleep(Duration::from_millis(2500));
                }
                a.iter_mut().zip(b).for_each(|(a, b)| *a += b);
            },
            true,
        );
        let mut x = [1u32; 3];
        let slow = comm.all_reduce(&mut x, f);
        if me == 1 {
            return Ok(());
        }
        let empty = || vec![Vec::<u8>::new(); 2];
        let works: Vec<_> = (0..20_000).map_while(|_| comm.all_to_all_v_list_async(empty(), empty()).ok()).collect();
        let failed = works.into_iter().map(comm_core::Work::wait).filter(Result::is_err).count();
        assert!(slow.is_err() || failed > 0, "nothing was in flight when the time was up");
        Ok(())
    })
    .unwrap();
}
