//! Processes that are killed or stopped: every survivor learns who, soon, and blames nobody else.
// Arrays are `Copy`: without the borrow a receive would go into a copy.
#![allow(clippy::needless_borrows_for_generic_args)]

mod failproc;

use std::time::{Duration, Instant};

use failproc::World;
use rustix::process::Signal;

const PROMISED: Duration = Duration::from_secs(2);

#[test]
fn child() {
    failproc::child();
}

/// A small generator, so that rounds differ; the seed is printed.
struct Random(u64);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % n
    }
}

fn seed() -> u64 {
    let t = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
    (t.as_nanos() as u64) | 1
}

/// Kills one rank and returns the longest time until a survivor had said so.
fn kill(n: usize, scene: &str, victim: usize, bytes: usize, after: Duration) -> Duration {
    let mut w = World::start(n, scene, victim, bytes);
    w.await_all("READY", 0..n, Duration::from_secs(20));
    std::thread::sleep(after);
    let t = Instant::now();
    w.signal(victim, Signal::KILL);
    let survivors = move || (0..n).filter(move |r| *r != victim);
    let mut worst = Duration::ZERO;
    for (rank, line, at) in w.await_all("ERR", survivors(), Duration::from_secs(10)) {
        let what = format!("{scene} of {bytes} bytes, {n} ranks, {victim} killed after {after:?}: rank {rank}");
        assert_eq!(line, format!("ERR PeerFailed {victim} Killed"), "{what}");
        let took = at.saturating_duration_since(t);
        assert!(took < PROMISED, "{what} knew after {took:?}");
        worst = worst.max(took);
    }
    w.ended(survivors());
    worst
}

/// Each rank in turn, rank 0 too, in worlds of 2 to 5, inside every kind of call and between calls.
#[test]
fn each_rank_in_turn_in_every_situation() {
    const SCENES: [(&str, usize); 13] = [
        ("all_reduce", 16 << 20),
        ("all_reduce", 8),
        ("barrier", 0),
        ("recv", 4096),
        ("send", 1 << 20),
        ("between", 0),
        ("compute", 4096),
        ("async", 256 << 10),
        ("all_to_all_v", 4 << 20),
        ("gather_scatter", 1 << 20),
        ("prefix", 2 << 20),
        ("reduce_scatter_v", 4 << 20),
        ("all_gather_v", 1 << 20),
    ];
    let mut worst = Duration::ZERO;
    let mut i = 0u64;
    for n in 2..=5 {
        for victim in 0..n {
            for (scene, bytes) in SCENES {
                worst = worst.max(kill(n, scene, victim, bytes, Duration::from_millis(i % 7 * 5)));
                i += 1;
            }
        }
    }
    println!("worst time to error after a kill: {worst:.1?} in {i} kills");
}

/// Twenty rounds of kill -9 on a random rank in mid all_reduce; the survivors exit right after the error.
#[test]
fn twenty_rounds_in_mid_all_reduce() {
    let seed = seed();
    println!("seed {seed}");
    let mut random = Random(seed);
    let mut worst = Duration::ZERO;
    for _ in 0..20 {
        let bytes = 8 << random.below(22);
        let victim = random.below(4) as usize;
        let after = Duration::from_micros(random.below(40_000));
        worst = worst.max(kill(4, "all_reduce", victim, bytes, after));
    }
    println!("worst time to error in mid all_reduce: {worst:.1?}");
}

/// A stopped rank is missed by name when the time is up; when it goes on it gets an error too.
#[test]
fn a_stopped_rank_is_missed_and_learns_it_later() {
    for (n, bytes) in [(2, 8), (3, 1 << 20), (4, 8 << 20)] {
        for victim in [0, n - 1] {
            let mut w = World::start(n, "stopped", victim, bytes);
            w.await_all("READY", 0..n, Duration::from_secs(20));
            std::thread::sleep(Duration::from_millis(20));
            w.signal(victim, Signal::STOP);
            let t = Instant::now();
            let survivors = (0..n).filter(|r| *r != victim);
            for (rank, line, at) in w.await_all("ERR", survivors, Duration::from_secs(10)) {
                let took = at.saturating_duration_since(t);
                // The timeout of a second, and the promise.
                assert!(took < Duration::from_secs(1) + PROMISED, "rank {rank} knew after {took:?}");
                // Who was stopped inside the call had arrived at it; and another may be stuck in the call before.
                let missing = line.strip_prefix("ERR Timeout ");
                let named = missing.is_some_and(|m| m == "[]" || m.contains(&victim.to_string()));
                let told = line.starts_with("ERR Aborted") && line.contains("timed out");
                assert!(named || told, "rank {rank} of {n}, {victim} stopped: {line}");
            }
            w.signal(victim, Signal::CONT);
            let (_, line, _) = w.await_all("ERR", std::iter::once(victim), Duration::from_secs(3)).remove(0);
            assert!(line.starts_with("ERR Aborted") || line.starts_with("ERR Timeout"), "{line}");
            w.ended(0..n);
        }
    }
}
