//! Chance decides who goes on: the network here has no jitter and nothing fails, so that only the order differs.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use backend_sim::{Network, Simulation};
use comm_core::{CommOptions, Communicator, Result, op};

const SEEDS: u64 = 200;
const RANKS: usize = 4;

/// Who went on, in order, as the ranks themselves have seen it.
type Order = Arc<Mutex<Vec<usize>>>;

/// Calls whose results depend on everybody's part, and floats whose sums depend on the order of adding.
fn program(comm: &Communicator, order: &Order) -> Result<Vec<u64>> {
    let (me, n) = (comm.rank(), comm.size());
    let note = || order.lock().unwrap().push(me);
    let mut seen = Vec::new();
    for i in 0..6u64 {
        note();
        let mut x: Vec<f32> = (0..257).map(|k| 0.1 + me as f32 / 3.0 + k as f32 * 1e-3 + i as f32).collect();
        comm.all_reduce(&mut x, op::Sum)?;
        note();
        seen.extend(x.iter().map(|v| u64::from(v.to_bits())));
        let a = comm.all_reduce_async(vec![me as u64 + i; 40], op::Max)?;
        let b = comm.broadcast_async(vec![me as u64 * 7 + i; 3], i as usize % n)?;
        note();
        seen.extend(b.wait()?);
        seen.extend(a.wait()?);
        let mut got = [0u64];
        comm.sendrecv(&[me as u64 * 100 + i], &mut got, (me + 1) % n, (me + n - 1) % n)?;
        seen.extend(got);
        note();
    }
    comm.finalize(Duration::from_secs(10))?;
    Ok(seen)
}

struct Run {
    digest: u64,
    order: Vec<usize>,
    results: Vec<Vec<u64>>,
}

fn run(seed: u64) -> Run {
    let order = Order::default();
    let kept = Arc::clone(&order);
    let world = Simulation::new(RANKS)
        .seed(seed)
        .network(Network::new(Duration::from_micros(10), f64::INFINITY))
        .options(CommOptions::new().name("order"));
    let run = world.run(move |comm| program(&comm, &kept)).unwrap();
    let (digest, replay) = (run.digest, run.replay());
    let results = run.values().unwrap_or_else(|e| panic!("{replay}: {e}"));
    let order = order.lock().unwrap().clone();
    Run { digest, order, results }
}

#[test]
fn each_seed_has_an_order_of_its_own_and_no_result_depends_on_it() {
    let runs: Vec<Run> = (0..SEEDS).map(run).collect();
    let digests: BTreeSet<u64> = runs.iter().map(|r| r.digest).collect();
    assert_eq!(digests.len() as u64, SEEDS);
    // The digest might only be that of the seed; what the ranks have seen is not.
    let orders: BTreeSet<&[usize]> = runs.iter().map(|r| &r.order[..]).collect();
    assert!(orders.len() as u64 > SEEDS * 9 / 10, "{} orders for {SEEDS} seeds", orders.len());
    // Nobody is preferred: each begins often, and each is now and then the last to begin.
    for rank in 0..RANKS {
        let begins = runs.iter().filter(|r| r.order[0] == rank).count();
        let lasts = runs.iter().filter(|r| {
            let first = |x: usize| r.order.iter().position(|o| *o == x);
            (0..RANKS).all(|x| first(x) <= first(rank))
        });
        let lasts = lasts.count();
        assert!(begins > 20 && lasts > 20, "rank {rank} is {begins} times the first, {lasts} times the last");
    }
    for (seed, r) in runs.iter().enumerate() {
        assert_eq!(r.results, runs[0].results, "seed {seed}");
    }
}

#[test]
fn a_seed_gives_its_order_again() {
    for seed in 0..SEEDS / 4 {
        let (a, b) = (run(seed), run(seed));
        assert_eq!((a.digest, a.order, a.results), (b.digest, b.order, b.results), "seed {seed}");
    }
}
