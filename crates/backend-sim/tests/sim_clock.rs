//! Time, threads and ends of a simulation.

use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use backend_sim::{Ended, Faults, SEED_VARIABLE, Simulation, Trouble, When};
use comm_core::{CommOptions, ErrorKind, Parker, op};

#[test]
fn time_is_virtual_and_the_same_for_all() {
    let start = Instant::now();
    let run = Simulation::new(3).run(|comm| {
        let clock = comm.options().clock.clone();
        assert_eq!(clock.now().0, 0);
        clock.sleep(Duration::from_secs(1000));
        let slept = clock.now().0;
        comm.barrier()?;
        Ok((slept, clock.now().0))
    });
    for (slept, after) in run.unwrap().values().unwrap() {
        assert_eq!(slept, 1_000_000_000_000);
        assert!(after > slept && after < slept + 1_000_000);
    }
    assert!(start.elapsed() < Duration::from_secs(60));
}

/// `Duration::MAX` is no time that comes: not as a limit of a call, of a pause, or of the run.
#[test]
fn what_waits_for_ever_is_a_hang() {
    let ever = Duration::MAX;
    let options = CommOptions::new().timeout(ever).heartbeat_timeout(ever);
    type Program = fn(&comm_core::Communicator) -> comm_core::Result<()>;
    let programs: [(Program, Faults); 5] = [
        (|c| if c.rank() == 0 { c.recv(&mut [0u8], 1) } else { Ok(()) }, Faults::new()),
        (|c| if c.rank() == 0 { c.agree_survivors(Duration::MAX).map(|_| ()) } else { c.barrier() }, Faults::new()),
        (|c| if c.rank() == 0 { c.monitored_barrier(Duration::MAX) } else { hold(c) }, Faults::new()),
        (hold, Faults::new()),
        (|c| c.barrier(), Faults::new().pause(0, When::Event(1), ever)),
    ];
    for (i, (program, faults)) in programs.into_iter().enumerate() {
        let world = Simulation::new(2).options(options.clone()).faults(faults);
        let run = || {
            world.run(move |comm| {
                let result = program(&comm);
                // Who leaves would end it.
                if comm.rank() == 1 && result.is_ok() { hold(&comm) } else { result }
            })
        };
        let (first, second) = (run().unwrap(), run().unwrap());
        // Endpoints that look once in a while reach the limit of time.
        let trouble = first.trouble.as_ref().map(|(t, _)| t);
        assert!(matches!(trouble, Some(Trouble::Hang | Trouble::Time(_))), "program {i}: {:?}", first.ranks);
        assert!(first.stats.elapsed < Duration::from_secs(4000), "program {i}: {:?}", first.stats.elapsed);
        assert_eq!(first.digest, second.digest, "program {i}");
        assert_eq!(format!("{:?}", first.ranks), format!("{:?}", second.ranks), "program {i}");
    }
    // Where nobody looks, it is the time that does not pass.
    for limit in [Duration::from_secs(3600), ever] {
        let sleeps = |comm: comm_core::Communicator| {
            comm.options().clock.sleep(Duration::MAX);
            comm.barrier()
        };
        let run = Simulation::new(2).options(options.clone()).limit(limit).run(sleeps).unwrap();
        assert!(matches!(run.trouble, Some((Trouble::Hang, _))), "{:?}", run.trouble);
        assert!(run.stats.elapsed < Duration::from_secs(1), "{:?}", run.stats.elapsed);
    }
}

/// Waits until the simulation ends.
fn hold(comm: &comm_core::Communicator) -> comm_core::Result<()> {
    comm.recv(&mut [0u8], 1 - comm.rank())
}

#[test]
fn threads_that_the_clock_starts_belong_to_their_rank() {
    let program = |comm: comm_core::Communicator| {
        let clock = comm.options().clock.clone();
        let (parker, sum) = (Arc::new(Parker::new()), Arc::new(AtomicU64::new(0)));
        let helper = {
            let (comm, clock, parker, sum) = (comm.clone(), clock.clone(), Arc::clone(&parker), Arc::clone(&sum));
            move || {
                let mut x = [comm.rank() as u64; 3];
                comm.all_reduce(&mut x, op::Sum).unwrap();
                clock.sleep(Duration::from_millis(1));
                sum.store(x[0], Ordering::SeqCst);
                clock.unpark(&parker);
            }
        };
        clock.spawn("helper", Box::new(helper)).unwrap();
        while sum.load(Ordering::SeqCst) == 0 {
            clock.park(&parker, None);
        }
        comm.finalize(Duration::from_secs(1))?;
        Ok((sum.load(Ordering::SeqCst), clock.now().0))
    };
    for seed in 0..20 {
        let simulation = Simulation::new(4).seed(seed);
        let (a, b) = (simulation.run(program).unwrap(), simulation.run(program).unwrap());
        assert_eq!(a.digest, b.digest);
        let values = a.values().unwrap();
        assert_eq!(values, b.values().unwrap());
        assert!(values.iter().all(|(sum, _)| *sum == 6));
    }
}

#[test]
fn a_hang_ends_the_run_and_says_who_waits_where() {
    let stuck = |comm: comm_core::Communicator| {
        comm.options().clock.park(&Parker::new(), None);
        Ok(())
    };
    // Heartbeats go on for ever: with them the limit of time ends it.
    let run = Simulation::new(2).seed(5).run(stuck).unwrap();
    assert!(matches!(run.trouble, Some((Trouble::Time(_), _))), "{:?}", run.trouble);
    let quiet = CommOptions::new().name("quiet").heartbeat_timeout(Duration::MAX);
    let run = Simulation::new(2).seed(5).options(quiet).run(stuck).unwrap();
    let (trouble, waits) = run.trouble.clone().unwrap();
    assert_eq!(trouble, Trouble::Hang);
    assert!(waits.len() == 2 && waits[0].starts_with("rank 0 waits in no call"), "{waits:?}");
    let text = run.values().unwrap_err().to_string();
    assert!(text.contains("nothing can happen any more") && text.contains("RUSTCOMMS_SIM_SEED=5"), "{text}");
}

#[test]
fn a_run_ends_at_its_limits_with_errors_and_the_calls_that_were_open() {
    let run = Simulation::new(2).limit(Duration::from_secs(5)).run(|comm| {
        if comm.rank() == 1 {
            comm.options().clock.sleep(Duration::from_secs(50));
        }
        comm.barrier()
    });
    let run = run.unwrap();
    let (trouble, waits) = run.trouble.clone().unwrap();
    assert_eq!(trouble, Trouble::Time(Duration::from_secs(5)));
    assert!(waits[0].contains("rank 0") && waits[0].contains("barrier"), "{waits:?}");
    let e = run.ranks[0].error().unwrap();
    assert!(matches!(e.kind(), ErrorKind::Aborted { cause, .. } if cause.contains("simulation was stopped")), "{e}");

    let run = Simulation::new(2).steps(1000).run(|comm| {
        loop {
            comm.barrier()?;
        }
    });
    let run: backend_sim::Outcome<()> = run.unwrap();
    assert_eq!(run.trouble.clone().unwrap().0, Trouble::Steps(1000));
    assert!(run.ranks.iter().all(|r| r.error().is_some()), "{:?}", run.ranks);
}

#[test]
fn a_closure_that_waits_outside_of_the_simulation_is_given_up() {
    let (tx, rx) = std::sync::mpsc::channel::<()>();
    let rx = Arc::new(std::sync::Mutex::new(rx));
    let start = Instant::now();
    let run = Simulation::new(2).real_limit(Duration::from_millis(300)).run(move |comm| {
        if comm.rank() == 0 {
            // Nobody ever sends: the test holds the other end.
            let _ = rx.lock().unwrap().recv();
        }
        comm.barrier()
    });
    let run = run.unwrap();
    assert_eq!(run.trouble.clone().unwrap().0, Trouble::Real(Duration::from_millis(300)));
    assert!(matches!(&run.ranks[0], Ended::Stuck(s) if s.contains("rank 0")), "{:?}", run.ranks);
    assert!(run.ranks[1].error().is_some(), "{:?}", run.ranks);
    assert!(start.elapsed() < Duration::from_secs(40));
    drop(tx);
}

#[test]
fn threads_from_outside_may_use_a_communicator_without_stopping_the_simulation() {
    let run = Simulation::new(2).run(|comm| {
        let other = comm.clone();
        // Not through the clock: the scheduler knows nothing of it.
        let stranger = std::thread::spawn(move || other.options().clock.sleep(Duration::from_secs(3600)));
        comm.barrier()?;
        stranger.join().map_err(|_| comm_core::Error::invalid("it panicked"))
    });
    run.unwrap().values().unwrap();
}

#[test]
fn communicators_that_outlive_the_simulation_say_that_it_is_over() {
    let comms = Simulation::new(2).run(Ok).unwrap().values().unwrap();
    for comm in comms {
        let e = comm.barrier().unwrap_err();
        assert!(e.to_string().contains("the simulation is over"), "{e}");
    }
}

#[test]
fn a_panic_is_told_to_the_others() {
    let run = Simulation::new(3).run(|comm| {
        assert_ne!(comm.rank(), 1, "one is the odd one out");
        comm.barrier()
    });
    let run = run.unwrap();
    assert!(matches!(&run.ranks[1], Ended::Panic(p) if p.contains("odd one out")), "{:?}", run.ranks);
    for rank in [0, 2] {
        let e = run.ranks[rank].error().unwrap();
        assert!(matches!(e.kind(), ErrorKind::Aborted { rank: 1, cause } if cause.contains("panicked")), "{e}");
    }
}

#[test]
fn a_helper_that_panics_ends_alone() {
    let run = Simulation::new(2).run(|comm| {
        let body = Box::new(|| panic!("the helper's own fault"));
        comm.options().clock.spawn("helper", body).map_err(|_| comm_core::Error::invalid("no thread"))?;
        comm.barrier()
    });
    run.unwrap().values().unwrap();
}

#[test]
fn newcomers_have_no_world_at_first() {
    let run = Simulation::new(3).newcomers(1).run_each(|rank| {
        assert_eq!(rank.options.clock.now().0, 0);
        let Some(world) = rank.world else { return Ok(rank.rank) };
        assert_eq!((world.rank(), world.size()), (rank.rank, 2));
        world.barrier()?;
        Ok(rank.rank)
    });
    assert_eq!(run.unwrap().values().unwrap(), [0, 1, 2]);
}

#[test]
fn what_cannot_be_run_is_an_error() {
    assert!(Simulation::new(0).run(|_| Ok(())).is_err());
    let odd = CommOptions::new().hint("no such hint", "1");
    assert!(Simulation::new(2).options(odd).run(|_| Ok(())).is_err());
}

#[test]
fn the_environment_overrides_the_seed() {
    let name = "the_environment_overrides_the_seed";
    if std::env::var_os(SEED_VARIABLE).is_some() {
        match Simulation::new(2).seed(1).run(|comm| comm.barrier()) {
            Ok(run) => println!("the seed is {}", run.seed),
            Err(e) => println!("refused: {e}"),
        }
        return;
    }
    let child = |seed: &str| {
        let exe = std::env::current_exe().unwrap();
        let out = Command::new(exe).args(["--exact", name, "--nocapture"]).env(SEED_VARIABLE, seed).output().unwrap();
        String::from_utf8_lossy(&out.stdout).into_owned()
    };
    assert!(child("4711").contains("the seed is 4711"));
    let text = child("many");
    assert!(text.contains("refused") && text.contains("RUSTCOMMS_SIM_SEED=many is no number"), "{text}");
}
