//! What a simulation counts, against numbers worked out by hand.

use std::time::Duration;

use backend_sim::{Network, Outcome, Simulation};
use comm_core::{CommOptions, Communicator, Result, op};

const LATENCY: Duration = Duration::from_micros(100);

fn run<T: Send + 'static>(n: usize, algo: &str, f: fn(&Communicator) -> Result<T>) -> Outcome<T> {
    let mut options = CommOptions::new().name("costs");
    if !algo.is_empty() {
        options = options.hint("algo", algo);
    }
    let quiet = Simulation::new(n).network(Network::new(LATENCY, f64::INFINITY)).options(options);
    let run = quiet.run(move |comm| f(&comm)).unwrap();
    assert!(run.trouble.is_none(), "{}", run.failure("trouble"));
    run
}

#[test]
fn a_barrier_takes_log2_n_rounds() {
    for (n, rounds) in [(2, 1), (3, 2), (4, 2), (5, 3), (8, 3), (16, 4)] {
        let run = run(n, "", Communicator::barrier);
        assert_eq!(run.stats.total.rounds, rounds, "{n} ranks");
        assert_eq!(run.stats.total.messages, n as u64 * rounds, "{n} ranks");
        assert_eq!(run.stats.total.bytes, 0);
        assert_eq!(run.stats.elapsed, LATENCY * rounds as u32, "{n} ranks");
    }
}

#[test]
fn a_ring_all_reduce_sends_each_byte_almost_twice() {
    let run = run(4, "ring", |comm| comm.all_reduce(&mut [1u64; 1024], op::Sum));
    // Two passes of n - 1 steps, each with a quarter of the 8 KiB.
    assert_eq!(run.stats.total.rounds, 6);
    assert_eq!(run.stats.total.messages, 4 * 6);
    for rank in &run.stats.ranks {
        assert_eq!((rank.messages, rank.bytes), (6, 6 * 2048));
    }
    assert_eq!(run.stats.elapsed, LATENCY * 6);
}

#[test]
fn a_binomial_broadcast_sends_to_each_rank_once() {
    let run = run(8, "binomial", |comm| comm.broadcast(&mut [comm.rank() as u8; 100], 0));
    assert_eq!(run.stats.total.messages, 7);
    assert_eq!(run.stats.total.bytes, 700);
    assert_eq!(run.stats.total.rounds, 3);
    assert_eq!(run.stats.ranks[0].messages, 3);
    assert_eq!(run.stats.ranks[7].messages, 0);
}

#[test]
fn small_frames_of_the_endpoint_are_counted_apart() {
    let run = run(2, "", |comm| comm.finalize(Duration::from_secs(1)));
    assert_eq!(run.stats.total.messages, 0);
    assert_eq!(run.stats.total.rounds, 0);
    // Goodbye and farewell of both.
    assert!(run.stats.total.control >= 4, "{:?}", run.stats);
}

#[test]
fn bandwidth_is_what_long_messages_take() {
    let wire = Network::new(Duration::ZERO, 1e9);
    let run = Simulation::new(2).network(wire).run(|comm| {
        let mut x = vec![comm.rank() as u8; 10_000_000];
        comm.broadcast(&mut x, 0)?;
        Ok(comm.options().clock.now().0)
    });
    let times = run.unwrap().values().unwrap();
    // 10 ms, and a little for the headers.
    assert!((10_000_000..10_200_000).contains(&times[1]), "{times:?}");
}

#[test]
fn waiting_costs_virtual_time_only() {
    let start = std::time::Instant::now();
    let run = Simulation::new(3).limit(Duration::from_secs(1_000_000)).run(|comm| {
        comm.options().clock.sleep(Duration::from_secs(3600) * comm.rank() as u32);
        comm.barrier()
    });
    let run = run.unwrap();
    // The operation's timeout is 10 minutes, the others come an hour later.
    assert!(run.ranks.iter().all(|r| r.error().is_some()), "{:?}", run.ranks);
    assert!(run.stats.elapsed >= Duration::from_secs(3600));
    assert!(start.elapsed() < Duration::from_secs(60));
}
