//! The same seed gives the same run, whatever is in it.

use std::time::Duration;

use backend_sim::{Faults, Outcome, Simulation, When};
use comm_core::{CommOptions, Communicator, Result, op};

/// A bit of everything; the result depends on what others sent and on the time.
fn program(comm: Communicator) -> Result<Vec<u64>> {
    let (rank, n) = (comm.rank(), comm.size());
    let clock = comm.options().clock.clone();
    let mut seen = Vec::new();
    let mut x = vec![rank as u64 + 1; 300];
    comm.all_reduce(&mut x, op::Sum)?;
    seen.push(x[299]);
    let work = comm.all_reduce_async(vec![rank as u64; 5000], op::Max)?;
    let other = comm.broadcast_async(vec![rank as u64; 7], 1 % n)?;
    while !other.is_completed() {}
    seen.push(work.wait()?[0]);
    seen.push(other.wait()?[6]);
    let (mut a, mut b) = ([rank as u64; 10], [rank as u64; 20]);
    comm.scope(|s| {
        s.all_reduce(&mut a, op::Sum)?;
        s.all_reduce(&mut b, op::Min)?;
        Ok(())
    })?;
    seen.extend([a[0], b[0]]);
    let mine: Vec<usize> = (0..n).filter(|r| r % 2 == rank % 2).collect();
    let half = comm.split(&mine, if rank % 2 == 0 { "even" } else { "odd" })?;
    let mut y = [rank as u64];
    if let Some(half) = half {
        half.all_reduce(&mut y, op::Sum)?;
        comm.barrier()?;
        clock.sleep(Duration::from_micros(50 * rank as u64));
        half.finalize(Duration::from_secs(10))?;
    }
    comm.finalize(Duration::from_secs(10))?;
    seen.extend([y[0], clock.now().0]);
    Ok(seen)
}

fn describe(run: &Outcome<Vec<u64>>) -> String {
    format!("{:?} {:?} {:?} {:?}", run.ranks, run.stats, run.faults, run.trouble)
}

/// Runs it twice and compares everything; gives the digest.
fn twice(simulation: &Simulation) -> u64 {
    let (a, b) = (simulation.run(program).unwrap(), simulation.run(program).unwrap());
    assert_eq!(describe(&a), describe(&b), "{}", a.replay());
    assert_eq!(a.digest, b.digest, "{}", a.replay());
    a.digest
}

#[test]
fn a_seed_gives_the_same_run_again_and_another_one_another() {
    let mut digests: Vec<u64> = (0..20).map(|seed| twice(&Simulation::new(4).seed(seed))).collect();
    digests.sort_unstable();
    digests.dedup();
    assert_eq!(digests.len(), 20, "each seed has its own run");
}

#[test]
fn runs_without_faults_are_right_for_every_seed() {
    for seed in 0..50 {
        let run = Simulation::new(5).seed(seed).run(program).unwrap();
        let replay = run.replay();
        for (rank, seen) in run.values().unwrap().into_iter().enumerate() {
            let half = if rank % 2 == 0 { 6 } else { 4 };
            assert_eq!(seen[..6], [15, 4, 1, 10, 0, half], "{replay}");
        }
    }
}

#[test]
fn a_seed_gives_the_same_run_with_faults() {
    let most = Duration::from_millis(1);
    for seed in 0..60 {
        let faults = Faults::new()
            .drop_rate(0.002)
            .duplicate_rate(0.002)
            .corrupt_rate(0.002)
            .delay_rate(0.05, most)
            .disconnect_rate(0.001)
            .pause_rate(0.01, most)
            .kill_rate(0.001);
        twice(&Simulation::new(4).seed(seed).faults(faults));
        twice(&Simulation::new(3).seed(seed).faults(Faults::new().kill(1, When::Within(100))));
    }
}

#[test]
fn links_that_are_made_on_demand_are_part_of_the_run() {
    for (n, connect) in [(12, "auto"), (5, "ring"), (9, "ring")] {
        for seed in 0..5 {
            let options = CommOptions::new().name("sparse").hint("connect", connect);
            twice(&Simulation::new(n).seed(seed).options(options.clone()));
            let faults = Faults::new().kill(n - 1, When::Within(200));
            twice(&Simulation::new(n).seed(seed).options(options).faults(faults));
        }
    }
}

#[test]
fn the_trace_says_what_happened_last() {
    let run = Simulation::new(2).trace(10).run(|comm| comm.barrier()).unwrap();
    assert_eq!(run.trace.len(), 10);
    assert!(run.trace.iter().any(|t| t.contains("rank 0 goes on") || t.contains("reaches rank")), "{:?}", run.trace);
}
