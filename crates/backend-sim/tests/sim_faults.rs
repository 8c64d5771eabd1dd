//! Each fault at chosen places: who learns of it, how, and who is blamed.

use std::time::Duration;

use backend_sim::{Ended, Fault, Faults, Outcome, Simulation, When};
use comm_core::{CommOptions, Communicator, ErrorKind, PeerCause, Result, op};

/// Many calls in which every rank needs every other.
fn calls(comm: Communicator) -> Result<usize> {
    let n = comm.size() as u64;
    for i in 0..40 {
        let mut x = [comm.rank() as u64 + i; 64];
        comm.all_reduce(&mut x, op::Sum)?;
        assert_eq!(x, [n * (n - 1) / 2 + n * i; 64]);
    }
    Ok(comm.rank())
}

fn options() -> CommOptions {
    CommOptions::new().name("faults").timeout(Duration::from_secs(20))
}

fn run(n: usize, seed: u64, faults: Faults) -> Outcome<usize> {
    let run = Simulation::new(n).seed(seed).options(options()).trace(20).faults(faults).run(calls).unwrap();
    assert!(run.trouble.is_none(), "{}", run.failure("it does not end"));
    assert!(!run.ranks.iter().any(|r| matches!(r, Ended::Panic(_))), "{}", run.failure("a wrong value"));
    run
}

#[test]
fn a_killed_rank_is_named_by_all_others() {
    for seed in 0..100 {
        let run = run(4, seed, Faults::new().kill(2, When::Within(300)));
        assert!(matches!(run.faults[..], [h] if h.fault == Fault::Kill { rank: 2 }), "{}", run.failure("no kill"));
        assert!(matches!(run.ranks[2], Ended::Killed), "{}", run.failure("it lives"));
        for rank in [0, 1, 3] {
            // A rank that needed nothing of it any more may have got to its end.
            let right = match &run.ranks[rank] {
                Ended::Value(_) => true,
                Ended::Error(e) => matches!(e.kind(), ErrorKind::PeerFailed { rank: 2, cause: PeerCause::Killed }),
                _ => false,
            };
            assert!(right, "{}", run.failure("the wrong one is blamed"));
        }
        assert!(run.ranks.iter().any(|r| r.error().is_some()), "{}", run.failure("nobody noticed"));
    }
}

#[test]
fn the_killed_rank_itself_gets_errors_from_whatever_it_tries() {
    let run = Simulation::new(3).faults(Faults::new().kill(0, When::At(Duration::from_millis(1)))).run(|comm| {
        if comm.rank() > 0 {
            comm.options().clock.sleep(Duration::from_secs(1));
            return Ok(());
        }
        comm.options().clock.sleep(Duration::from_millis(2));
        let killed = |e: &comm_core::Error| {
            assert!(
                matches!(e.kind(), ErrorKind::Aborted { rank: 0, cause } if cause.contains("killed rank 0")),
                "{e}"
            );
        };
        killed(&comm.barrier().unwrap_err());
        killed(&comm.all_reduce_async(vec![1u8], op::Max).and_then(comm_core::Work::wait).unwrap_err());
        assert!(comm.dup("copy").is_err());
        assert!(comm.send(&[1u8], 1).is_err());
        assert!(comm.finalize(Duration::from_secs(1)).is_err());
        Ok(())
    });
    let run = run.unwrap();
    assert!(matches!(run.ranks[0], Ended::Killed), "{}", run.failure("a panic"));
}

#[test]
fn a_lost_frame_is_corruption_and_names_its_sender() {
    for k in 1..40 {
        let run = run(2, k, Faults::new().drop_frame(0, 1, k));
        let e = run.ranks[1].error().unwrap_or_else(|| panic!("{}", run.failure("nothing noticed")));
        match e.kind() {
            ErrorKind::Corrupt { rank: Some(0), what } => assert!(what.contains("lost"), "{e}"),
            _ => panic!("{}", run.failure("not what it is")),
        }
    }
}

#[test]
fn a_lost_frame_with_none_behind_it_ends_in_a_timeout_that_names_its_sender() {
    // Who waits for it sends nothing that would show it: the last frame of rank 0.
    let lost = Simulation::new(2).options(options()).faults(Faults::new().drop_frame(0, 1, 1));
    let run = lost.run(|comm| comm.broadcast(&mut [comm.rank() as u8; 8], 0).map(|()| comm.options().clock.now().0));
    let run = run.unwrap();
    let e = run.ranks[1].error().unwrap_or_else(|| panic!("{}", run.failure("nothing noticed")));
    let named = match e.kind() {
        ErrorKind::Timeout { missing, unmatched, .. } => missing == &[0] || !unmatched.is_empty(),
        // Rank 0 has left, and its goodbye is frame 2.
        ErrorKind::Corrupt { rank: Some(0), .. } => true,
        _ => false,
    };
    assert!(named, "{}", run.failure("not named"));
}

#[test]
fn a_repeated_frame_is_corruption_and_names_its_sender() {
    for k in 1..40 {
        let run = run(2, k, Faults::new().duplicate_frame(1, 0, k));
        match run.ranks[0].error().map(comm_core::Error::kind) {
            Some(ErrorKind::Corrupt { rank: Some(1), what }) => assert!(what.contains("again"), "{what}"),
            // Its last one: rank 0 had all it wanted.
            None if k >= 39 => {}
            _ => panic!("{}", run.failure("not what it is")),
        }
    }
}

#[test]
fn flipped_bits_are_corruption_and_name_the_sender() {
    for seed in 0..300 {
        let run = run(2, seed, Faults::new().corrupt_frame(0, 1, 1 + seed % 30));
        match run.ranks[1].error().map(comm_core::Error::kind) {
            Some(ErrorKind::Corrupt { rank: Some(0), .. }) => {}
            // The bits are those of the length: what follows is taken for the rest of the frame, and none is left over.
            Some(ErrorKind::Timeout { .. }) => {}
            _ => panic!("{}", run.failure("not what it is")),
        }
    }
}

#[test]
fn a_delay_harms_nobody() {
    let by = Duration::from_millis(700);
    let slow = run(3, 5, Faults::new().delay_frame(0, 1, 5, by).delay_frame(2, 1, 9, by));
    assert_eq!(slow.faults.len(), 2);
    assert!(slow.stats.elapsed >= by, "{:?}", slow.stats.elapsed);
    assert_eq!(slow.values().unwrap(), [0, 1, 2]);
}

#[test]
fn a_lost_link_is_blamed_on_one_of_its_ends() {
    for seed in 0..100 {
        let run = run(3, seed, Faults::new().disconnect(0, 2, When::Within(200)));
        for end in &run.ranks {
            let right = match end {
                Ended::Value(_) => true,
                Ended::Error(e) => {
                    matches!(e.kind(), ErrorKind::PeerFailed { rank: 0 | 2, cause: PeerCause::Killed })
                }
                _ => false,
            };
            assert!(right, "{}", run.failure("the wrong one is blamed"));
        }
    }
}

#[test]
fn a_stopped_rank_is_waited_for() {
    for seed in 0..50 {
        let length = Duration::from_secs(5);
        let run = run(4, seed, Faults::new().pause(1, When::Within(100), length));
        assert!(run.stats.elapsed >= length, "{:?}", run.stats.elapsed);
        assert_eq!(run.values().unwrap(), [0, 1, 2, 3]);
    }
}

#[test]
fn a_rank_that_is_stopped_for_too_long_is_named() {
    for seed in 0..20 {
        let faults = Faults::new().pause(1, When::Within(100), Duration::from_secs(600));
        let options = options().heartbeat_timeout(Duration::from_secs(5));
        let run = Simulation::new(3).seed(seed).options(options).faults(faults).run(calls).unwrap();
        for rank in [0, 2] {
            let kind = run.ranks[rank].error().map(comm_core::Error::kind);
            let named = matches!(kind, Some(ErrorKind::PeerFailed { rank: 1, cause: PeerCause::NoHeartbeat }));
            assert!(named, "{}", run.failure("it is not named"));
        }
    }
}

/// Makes calls; if one fails, what comes of looking for the survivors.
fn outlive(comm: &Communicator) -> Option<Result<Vec<usize>>> {
    let ended = (0..8).try_for_each(|_| comm.all_reduce(&mut [1i32; 5], op::Sum));
    ended.is_err().then(|| comm.shrink(Duration::from_secs(200)).map(|smaller| smaller.ranks().to_vec()))
}

/// Two of them wake up, lose all others, and have each other.
#[test]
fn ranks_that_were_given_up_together_are_no_world() {
    let mut stopped = 0;
    for seed in 0..30 {
        let connect = if seed % 2 == 0 { "auto" } else { "ring" };
        let options =
            CommOptions::new().name("given up").heartbeat_timeout(Duration::from_secs(5)).hint("connect", connect);
        let asleep = Duration::from_secs(60);
        let faults = Faults::new().pause(0, When::Within(40), asleep).pause(3, When::Within(40), asleep);
        let simulation = Simulation::new(6).seed(seed).options(options).faults(faults);
        let outcome = simulation.run(|comm| Ok(outlive(&comm))).unwrap();
        for (rank, ended) in outcome.ranks.iter().enumerate() {
            match (rank, ended.value()) {
                (_, Some(None)) => {}
                (0 | 3, Some(Some(Err(_)))) => stopped += 1,
                (_, Some(Some(Ok(ranks)))) => {
                    let awake = [1, 2, 4, 5].iter().all(|r| ranks.contains(r));
                    assert!(awake, "{}", outcome.failure(&format!("rank {rank} has found {ranks:?}")));
                }
                _ => panic!("seed {seed}, rank {rank}: {}", outcome.failure("it ended otherwise")),
            }
        }
    }
    assert!(stopped > 20, "{stopped}");
}

/// It wakes up in a world that has failed without it, and whose members are out of reach.
#[test]
fn a_rank_that_was_given_up_finds_no_world_of_its_own() {
    let mut stopped = 0;
    for seed in 0..30 {
        let options = CommOptions::new().name("given up").heartbeat_timeout(Duration::from_secs(5));
        let faults = Faults::new().pause(1, When::Within(60), Duration::from_secs(60));
        let simulation = Simulation::new(4).seed(seed).options(options).faults(faults);
        let outcome = simulation.run(|comm| Ok(outlive(&comm))).unwrap();
        for (rank, ended) in outcome.ranks.iter().enumerate() {
            match (rank, ended.value()) {
                (_, Some(None)) => {}
                (1, Some(Some(Err(e)))) => {
                    assert!(matches!(e.kind(), ErrorKind::StaleGeneration { .. }), "seed {seed}: {e}");
                    stopped += 1;
                }
                (_, Some(Some(Ok(ranks)))) => assert!(rank != 1 && ranks.len() <= 3 && !ranks.contains(&1), "{seed}"),
                _ => panic!("seed {seed}, rank {rank}: {}", outcome.failure("it ended otherwise")),
            }
        }
    }
    assert!(stopped > 10, "the rank was given up in {stopped} of 30 runs");
}

#[test]
fn faults_that_cannot_be_are_refused() {
    for faults in [
        Faults::new().kill(3, When::Event(1)),
        Faults::new().cut(1, 77, When::Event(1)),
        Faults::new().disconnect(0, 0, When::Event(1)),
        Faults::new().drop_frame(0, 3, 1),
        Faults::new().drop_rate(f64::NAN),
        Faults::new().kill_rate(2.0),
        Faults::new().pause_rate(-0.5, Duration::from_secs(1)),
    ] {
        let e = Simulation::new(3).faults(faults).run(|_| Ok(())).map(drop).unwrap_err();
        assert!(matches!(e.kind(), ErrorKind::InvalidArgument { .. }), "{e}");
    }
}

#[test]
fn a_way_that_is_cut_is_noticed_by_both_ends() {
    for seed in 0..20 {
        let run = run(2, seed, Faults::new().cut(0, 1, When::Within(60)));
        assert!(run.ranks.iter().all(|r| r.error().is_some()), "{}", run.failure("somebody noticed nothing"));
    }
}

#[test]
fn faults_happen_at_the_step_they_are_placed_at() {
    for k in [1, 7, 50] {
        let run = run(3, 1, Faults::new().kill(1, When::Event(k)));
        assert_eq!(run.faults.len(), 1);
    }
    let at = Duration::from_micros(300);
    let run = run(3, 1, Faults::new().kill(1, When::At(at)));
    assert_eq!(Duration::from_nanos(run.faults[0].at.0), at);
    let e = Simulation::new(2).faults(Faults::new().kill(2, When::Event(1))).run(calls).unwrap_err();
    assert!(e.to_string().contains("rank 2"), "{e}");
}
