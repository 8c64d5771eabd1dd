//! A call refused on one rank reaches the others at once, and the communicator goes on.
// Arrays are `Copy`: without the borrow a receive would go into a copy.
#![allow(clippy::needless_borrows_for_generic_args)]

mod failing;

use std::sync::Arc;
use std::time::Duration;

use comm_core::{CommOptions, Communicator, ErrorKind, Operation, Result, op};
use failing::refused::{No, all, check, table};
use failing::{Call, FORMS, HANGS, How, cases, finalize, print_worst, run, timed, took, works};

fn make(n: usize, o: &CommOptions) -> Vec<Communicator> {
    backend_sim::world(n, o).unwrap()
}

#[test]
fn every_bad_call_on_every_rank() {
    cases(table(&all()), |c| check(make, c));
    print_worst();
}

#[test]
fn all_ranks_refuse_at_once() {
    for n in 2..=5 {
        let comms = make(n, &CommOptions::new().timeout(HANGS));
        run("all refuse", &comms, |comm| {
            for (i, how) in FORMS.into_iter().cycle().take(30).enumerate() {
                let bad = Call { root: 99, ..Call::new(Operation::Broadcast, 4) };
                let e = bad.issue(comm, how).unwrap_err();
                assert_eq!(e.kind().name(), "InvalidArgument", "{e}");
                works(comm, i);
            }
            finalize(comm);
        });
    }
}

/// Two of four refuse, one early and one late, for different reasons; the others hear of either.
#[test]
fn two_ranks_refuse_the_same_call() {
    for how in FORMS {
        let comms = make(4, &CommOptions::new().timeout(HANGS));
        run("two refuse", &comms, move |comm| {
            for i in 0..20 {
                let good = Call::new(Operation::AllReduce, 9);
                let r = match comm.rank() {
                    1 => Call { algo: Some("rnig"), ..good }.issue(comm, how),
                    3 => {
                        std::thread::sleep(Duration::from_millis(i % 3));
                        Call { algo: Some("chain"), ..good }.issue(comm, how)
                    }
                    _ => good.issue(comm, how),
                };
                match r.unwrap_err().kind() {
                    ErrorKind::InvalidArgument { .. } if comm.rank() % 2 == 1 => {}
                    ErrorKind::PeerRefused { rank: 1 | 3, .. } if comm.rank() % 2 == 0 => {}
                    k => panic!("rank {}: {k:?}", comm.rank()),
                }
                works(comm, i as usize);
            }
            finalize(comm);
        });
    }
}

/// A root's broadcast is complete for it long before the others refuse theirs; its next calls are not disturbed.
#[test]
fn refusals_reach_a_rank_that_is_long_past_the_call() {
    for n in 2..=5 {
        let comms = make(n, &CommOptions::new().timeout(HANGS));
        run("late refusal", &comms, |comm| {
            for how in FORMS {
                if comm.rank() == 0 {
                    Call::new(Operation::Broadcast, 5).issue(comm, how).unwrap();
                } else {
                    std::thread::sleep(Duration::from_millis(20));
                    let e = Call { root: 70, ..Call::new(Operation::Broadcast, 5) }.issue(comm, how).unwrap_err();
                    assert_eq!(e.kind().name(), "InvalidArgument");
                }
                works(comm, 1);
            }
            finalize(comm);
        });
    }
}

/// Refusals of calls that the others make much later, many in a row.
#[test]
fn a_rank_refuses_many_calls_ahead_of_the_others() {
    let comms = make(3, &CommOptions::new().timeout(HANGS));
    run("ahead", &comms, |comm| {
        const AHEAD: usize = 200;
        if comm.rank() != 2 {
            std::thread::sleep(Duration::from_millis(50));
        }
        for _ in 0..AHEAD {
            let call = Call { root: if comm.rank() == 2 { 9 } else { 2 }, ..Call::new(Operation::Broadcast, 3) };
            let e = call.issue(comm, How::Sync).unwrap_err();
            match e.kind() {
                ErrorKind::InvalidArgument { .. } if comm.rank() == 2 => {}
                ErrorKind::PeerRefused { rank: 2, .. } if comm.rank() != 2 => {}
                k => panic!("rank {}: {k:?}", comm.rank()),
            }
        }
        works(comm, 0);
        finalize(comm);
    });
}

/// A veto on one end of a message reaches the other end, whichever is first; numbering stays in step.
#[test]
fn a_vetoed_message_reaches_its_other_end() {
    #[derive(Clone, Copy, Debug)]
    struct Case {
        sender_vetoes: bool,
        count: usize,
        how: How,
        later: bool,
        batch: bool,
    }
    let mut list = Vec::new();
    for sender_vetoes in [true, false] {
        for count in [4usize, 100_000] {
            for how in FORMS {
                for later in [true, false] {
                    for batch in [true, false] {
                        list.push(Case { sender_vetoes, count, how, later, batch });
                    }
                }
            }
        }
    }
    cases(list, |&c| {
        let comms = make(3, &CommOptions::new().timeout(Duration::from_secs(5)));
        run(&format!("{c:?}"), &comms, move |comm| {
            let me = comm.rank();
            if me < 2 {
                let vetoes = (me == 0) == c.sender_vetoes;
                let guard = vetoes.then(|| comm.observe(Arc::new(No)));
                if vetoes == c.later {
                    std::thread::sleep(Duration::from_millis(15));
                }
                let (r, t) = timed(|| message(comm, me, c.count, 0.0, c.how, c.batch));
                drop(guard);
                took("vetoed message", t.saturating_sub(Duration::from_millis(15)));
                match r.map_err(|e| e.kind().clone()) {
                    Err(ErrorKind::InvalidArgument { what }) if vetoes => assert!(what.contains("not today")),
                    Err(ErrorKind::PeerRefused { rank, reason }) if !vetoes => {
                        assert_eq!(rank, 1 - me);
                        assert!(reason.contains("not today"), "{reason}");
                    }
                    // A short message is sent before its receiver is there.
                    Ok(_) if !vetoes && me == 0 && c.count == 4 => {}
                    other => panic!("rank {me} of {c:?}: {other:?}"),
                }
                // The next message arrives whole, and is not the refused one.
                let got = message(comm, me, c.count, 5.0, c.how, c.batch).unwrap();
                assert!(me == 0 || got.iter().all(|x| *x == 5.0), "an old message in {c:?}");
            }
            works(comm, 0);
            finalize(comm);
        });
    });
    print_worst();
}

fn message(comm: &Communicator, me: usize, count: usize, value: f32, how: How, batch: bool) -> Result<Vec<f32>> {
    let mut x = vec![if me == 0 { value } else { -1.0 }; count];
    match (me, how, batch) {
        (0, How::Sync, false) => comm.send(&x, 1)?,
        (0, How::Async, false) => drop(comm.send_async(x.clone(), 1)?.wait()?),
        (0, How::Scoped, false) => comm.scope(|s| s.send(&x, 1)?.wait().map(drop))?,
        (_, How::Sync, false) => comm.recv(&mut x, 0)?,
        (_, How::Async, false) => x = comm.recv_async(x, 0)?.wait()?,
        (_, How::Scoped, false) => comm.scope(|s| s.recv(&mut x, 0)?.wait().map(drop))?,
        (0, How::Sync, true) => comm.batch().send(&x, 1)?.issue()?,
        (_, How::Sync, true) => comm.batch().recv(&mut x, 0)?.issue()?,
        (0, How::Scoped, true) => comm.scope(|s| s.batch().send(&x, 1)?.issue()?.wait())?,
        (_, How::Scoped, true) => comm.scope(|s| s.batch().recv(&mut x, 0)?.issue()?.wait())?,
        (0, How::Async, true) => {
            let mut b = comm.batch_async();
            b.send(x.clone(), 1)?;
            b.issue()?.wait()?;
        }
        (_, How::Async, true) => {
            let mut b = comm.batch_async();
            let slot = b.recv(x, 0)?;
            x = b.issue()?.wait()?.take(slot).unwrap();
        }
    }
    Ok(x)
}

/// Rank 1 vetoes its message to rank 0, whose batch has a message with rank 2 too: rank 2 must not wait for it.
#[test]
fn the_rest_of_a_batch_is_refused_too() {
    let mut list = Vec::new();
    for count in [4usize, 100_000] {
        for first in [1usize, 2] {
            for rank0_sends in [true, false] {
                for late in [0usize, 1, 2] {
                    list.push((count, first, rank0_sends, late));
                }
            }
        }
    }
    cases(list, |&(count, first, rank0_sends, late)| {
        let comms = make(3, &CommOptions::new().timeout(Duration::from_secs(5)));
        run(&format!("count {count}, {first} first, 0 sends {rank0_sends}, late {late}"), &comms, move |comm| {
            let (x, mut y, mut z) = (vec![1f32; count], vec![0f32; count], vec![0f32; count]);
            if comm.rank() == late {
                std::thread::sleep(Duration::from_millis(15));
            }
            let (r, t) = timed(|| match comm.rank() {
                0 => {
                    let b = comm.batch();
                    let mut b = match (first, rank0_sends) {
                        (1, true) => b.recv(&mut y, 1)?.send(&x, 2)?,
                        (1, false) => b.recv(&mut y, 1)?.recv(&mut z, 2)?,
                        (_, true) => b.send(&x, 2)?.recv(&mut y, 1)?,
                        (_, false) => b.recv(&mut z, 2)?.recv(&mut y, 1)?,
                    };
                    b.issue()
                }
                1 => {
                    let _guard = comm.observe(Arc::new(No));
                    comm.send(&x, 0)
                }
                _ if rank0_sends => comm.recv(&mut y, 0),
                _ => comm.send(&x, 0),
            });
            took("rest of a refused batch", t.saturating_sub(Duration::from_millis(15)));
            match (comm.rank(), r.map_err(|e| e.kind().clone())) {
                (0, Err(ErrorKind::PeerRefused { rank: 1, .. })) | (1, Err(ErrorKind::InvalidArgument { .. })) => {}
                (2, Err(ErrorKind::PeerRefused { rank: 0, reason })) => assert!(reason.contains("rank 1"), "{reason}"),
                // It was sent, or there, before the refusal.
                (2, Ok(())) => {}
                other => panic!("{other:?}"),
            }
            works(comm, 0);
            finalize(comm);
        });
    });
}

/// Wrong ranks in messages, and empty batches, are refused where they are made; nobody else is concerned.
#[test]
fn messages_to_nowhere() {
    let comms = make(2, &CommOptions::new().timeout(HANGS));
    run("nowhere", &comms, |comm| {
        let mut x = [0u8; 4];
        let errors: Vec<comm_core::Error> = vec![
            comm.send(&x, 2).unwrap_err(),
            comm.recv(&mut x, usize::MAX).unwrap_err(),
            comm.send_async(x, 2).map(drop).unwrap_err(),
            comm.recv_async(x, 7).map(drop).unwrap_err(),
            comm.scope(|s| s.send(&x, 2).map(drop)).unwrap_err(),
            comm.batch().send(&x, 3).map(drop).unwrap_err(),
            comm.batch().issue().unwrap_err(),
            comm.with(comm_core::CallOptions::new().hint("tga", "1")).send(&x, 1).unwrap_err(),
        ];
        for e in errors {
            assert_eq!(e.kind().name(), "InvalidArgument", "{e}");
        }
        // The numbers of messages are where they were.
        if comm.rank() == 0 {
            comm.send(&[7u8; 4], 1).unwrap();
        } else {
            comm.recv(&mut x, 0).unwrap();
            assert_eq!(x, [7; 4]);
        }
        let mut y = [1i32];
        comm.all_reduce(&mut y, op::Sum).unwrap();
        finalize(comm);
    });
}

/// A short message may be under way when its receive is refused: it is nobody's then, and no reason to fail.
#[test]
fn a_message_under_way_to_a_refused_receive() {
    for round in 0..40 {
        let comms = make(2, &CommOptions::new().timeout(failing::HANGS));
        let gate = std::sync::Barrier::new(2);
        failing::run("under way", &comms, move |comm| {
            comm.barrier().unwrap();
            gate.wait();
            if comm.rank() == 0 {
                if round % 2 == 1 {
                    std::thread::sleep(std::time::Duration::from_micros(30 * round));
                }
                // It may hear of the refusal, or be done before.
                let sent = comm.send(&[1u8; 4], 1);
                assert!(sent.as_ref().map_or_else(|e| e.is_recoverable(), |()| true), "{sent:?}");
            } else {
                let guard = comm.observe(std::sync::Arc::new(failing::refused::No));
                let e = comm.recv(&mut [0u8; 4], 0).unwrap_err();
                assert!(e.is_recoverable(), "{e}");
                drop(guard);
            }
            failing::works(comm, 5);
            failing::finalize(comm);
        });
    }
}

/// A refused send concerns the message in its direction only, not the one of the same number that comes the other way.
#[test]
fn a_refused_send_leaves_what_comes_the_other_way() {
    for long in [false, true] {
        let comms = make(2, &CommOptions::new().timeout(HANGS));
        let gate = std::sync::Barrier::new(2);
        run("other way", &comms, move |comm| {
            let mut x = vec![comm.rank() as u32 + 5; if long { 50_000 } else { 4 }];
            if comm.rank() == 1 {
                let guard = comm.observe(Arc::new(No));
                assert!(comm.send(&x, 0).unwrap_err().is_recoverable());
                drop(guard);
                gate.wait();
                std::thread::sleep(Duration::from_millis(20));
                comm.recv(&mut x, 0).unwrap();
                assert!(x.iter().all(|v| *v == 5));
            } else {
                gate.wait();
                comm.send(&x, 1).unwrap();
                let e = comm.recv(&mut x, 1).unwrap_err();
                assert!(matches!(e.kind(), ErrorKind::PeerRefused { rank: 1, .. }), "{e}");
            }
            works(comm, 2);
            finalize(comm);
        });
    }
}
