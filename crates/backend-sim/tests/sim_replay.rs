//! The same seed gives the same run.

use std::time::Duration;

use backend_sim::{Ended, Faults, Network, Outcome, Simulation, When};
use comm_core::{CommOptions, Communicator, Result, op};

/// A bit of everything; the result depends on what others sent.
fn program(comm: Communicator) -> Result<Vec<u64>> {
    let (rank, n) = (comm.rank(), comm.size());
    let clock = comm.options().clock.clone();
    let mut seen = Vec::new();
    let mut x = vec![rank as u64 + 1; 300];
    comm.all_reduce(&mut x, op::Sum)?;
    seen.push(x[299]);
    let work = comm.all_reduce_async(vec![rank as u64; 5000], op::Max)?;
    let other = comm.broadcast_async(vec![rank as u64; 7], 1 % n)?;
    seen.push(work.wait()?[0]);
    seen.push(other.wait()?[6]);
    let (mut a, mut b) = ([rank as u64; 10], [rank as u64; 20]);
    comm.scope(|s| {
        s.all_reduce(&mut a, op::Sum)?;
        s.all_reduce(&mut b, op::Min)?;
        Ok(())
    })?;
    seen.extend([a[0], b[0]]);
    let dup = comm.dup("copy")?;
    let mut y = [rank as u64];
    dup.all_reduce(&mut y, op::Sum)?;
    comm.barrier()?;
    clock.sleep(Duration::from_micros(50 * rank as u64));
    dup.finalize(Duration::from_secs(10))?;
    comm.finalize(Duration::from_secs(10))?;
    seen.extend([y[0], clock.now().0]);
    Ok(seen)
}

fn describe(run: &Outcome<Vec<u64>>) -> String {
    format!("{:?} {:?} {:?} {:?}", run.ranks, run.stats, run.faults, run.trouble)
}

#[test]
fn a_seed_gives_the_same_run_again() {
    for seed in 0..20 {
        let simulation = Simulation::new(4).seed(seed);
        let (a, b) = (simulation.run(program).unwrap(), simulation.run(program).unwrap());
        assert_eq!(describe(&a), describe(&b), "seed {seed}");
        assert_eq!(a.digest, b.digest, "seed {seed}");
        a.values().unwrap();
    }
}
