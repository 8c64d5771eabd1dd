//! Survivors over sockets: the cases of backend-sim with ranks as threads, and processes that are killed.
// Arrays are `Copy`: without the borrow a receive would go into a copy.
#![allow(clippy::needless_borrows_for_generic_args)]

#[path = "../../backend-sim/tests/failing/mod.rs"]
mod failing;
mod failproc;
#[path = "../../backend-sim/tests/shrinking/mod.rs"]
mod shrinking;

use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use comm_core::{CommOptions, Communicator, op};
use comm_store::MemoryStore;
use failing::cases;
use failproc::World;
use rustix::process::Signal;
use shrinking::{
    agree_then_shrink, death_inside_shrink, down_to_one, in_mid_all_reduce, of_a_healthy_communicator,
    one_does_not_come, shrink, sums,
};

/// A world over sockets, whose ranks meet in a store in memory.
fn make(n: usize, o: &CommOptions) -> Vec<Communicator> {
    static WORLDS: AtomicUsize = AtomicUsize::new(0);
    let name = format!("{}-{}", o.effective_name(), WORLDS.fetch_add(1, Ordering::Relaxed));
    let store = Arc::new(MemoryStore::new());
    let ranks: Vec<_> = (0..n)
        .map(|r| {
            let o = o.clone().name(name.as_str()).rank_and_size(r, n).store(Arc::clone(&store) as _);
            let o = o.bootstrap_timeout(Duration::from_secs(60));
            std::thread::spawn(move || backend_tcp::connect(o).unwrap())
        })
        .collect();
    ranks.into_iter().map(|t| t.join().unwrap()).collect()
}

#[test]
fn survivors_go_on_over_sockets() {
    let list = vec![(2, vec![0]), (3, vec![1]), (4, vec![0]), (4, vec![1, 0]), (5, vec![4]), (8, vec![0, 7])];
    cases(list, |(n, victims)| in_mid_all_reduce(make, *n, victims, 20_000));
    // Few links to begin with.
    in_mid_all_reduce(make, 12, &[0, 5], 3000);
}

#[test]
fn the_other_cases_over_sockets() {
    of_a_healthy_communicator(make, 3);
    of_a_healthy_communicator(make, 10);
    cases(vec![(3, 0, true), (4, 2, false)], |&(n, late, failed)| one_does_not_come(make, n, late, failed));
    cases(vec![(3, vec![0]), (4, vec![1, 3])], |(n, victims)| death_inside_shrink(make, *n, victims));
    down_to_one(make, 4, &[0, 3, 1]);
    agree_then_shrink(make, 3, 1);
}

/// Plays a rank, if this process is a child: reduces and shrinks until as many are left as the parent wants.
#[test]
fn child() {
    let number = |name: &str| std::env::var(name).ok().and_then(|v| v.parse::<usize>().ok());
    // What `World::start` calls the victim is here the number of victims.
    let (Some(victims), Some(bytes)) = (number("RUSTCOMMS_FAIL_VICTIM"), number("RUSTCOMMS_FAIL_BYTES")) else {
        return;
    };
    let say = |words: &str| {
        let mut out = std::io::stdout().lock();
        writeln!(out, "@{words}").unwrap();
        out.flush().unwrap();
    };
    std::panic::set_hook(Box::new(move |p| say(&format!("PANIC {p}").replace('\n', " "))));
    let options = CommOptions::new().timeout(Duration::from_secs(30)).bootstrap_timeout(Duration::from_secs(60));
    let mut comm = backend_tcp::connect(options.name("shrunk")).unwrap();
    let goal = comm.size() - victims;
    comm.barrier().unwrap();
    say("READY");
    let mut back = Instant::now();
    let mut x = vec![1f32; bytes / 4];
    while comm.size() > goal {
        while comm.all_reduce(&mut x, op::Max).is_ok() {}
        back = Instant::now();
        comm = shrink(&comm);
    }
    sums(&comm);
    say(&format!("BACK {} {:?}", back.elapsed().as_micros(), comm.ranks()));
    comm.finalize(Duration::from_secs(20)).unwrap();
    std::process::exit(0);
}

/// Kills ranks one after the other with pauses; returns the longest times to the (last) error and from there to a
/// correct all_reduce among the others.
fn kill(n: usize, victims: &[usize], bytes: usize, pauses: &[Duration]) -> (Duration, Duration) {
    let mut w = World::start(n, "shrink", victims.len(), bytes);
    w.await_all("READY", 0..n, Duration::from_secs(60));
    let mut t = Instant::now();
    for (v, pause) in victims.iter().zip(pauses) {
        std::thread::sleep(*pause);
        t = Instant::now();
        w.signal(*v, Signal::KILL);
    }
    let left: Vec<usize> = (0..n).filter(|r| !victims.contains(r)).collect();
    let (mut error, mut back) = (Duration::ZERO, Duration::ZERO);
    for (rank, line, at) in w.await_all("BACK", left.iter().copied(), Duration::from_secs(30)) {
        let (took, ranks) = line["BACK ".len()..].split_once(' ').unwrap();
        let took = Duration::from_micros(took.parse().unwrap());
        let what = format!("{n} ranks, {victims:?} killed after {pauses:?}: rank {rank}");
        assert_eq!(ranks, format!("{left:?}"), "{what}");
        let total = at.saturating_duration_since(t);
        assert!(total < Duration::from_secs(10), "{what} was back after {total:?}");
        error = error.max(total.saturating_sub(took));
        back = back.max(took);
    }
    w.ended(left.into_iter());
    (error, back)
}

fn print(what: &str, times: &mut Vec<(Duration, Duration)>) {
    let worst = |f: fn(&(Duration, Duration)) -> Duration, t: &mut Vec<(Duration, Duration)>| {
        t.sort_by_key(f);
        (f(&t[t.len() / 2]), f(&t[t.len() - 1]))
    };
    let (error, back) = (worst(|t| t.0, times), worst(|t| t.1, times));
    println!(
        "{what}: {} times; to the error {:.1?} (worst {:.1?}), back at work {:.1?} later (worst {:.1?})",
        times.len(),
        error.0,
        error.1,
        back.0,
        back.1
    );
}

#[test]
fn a_killed_rank_is_left_out_and_the_others_go_on() {
    let mut times = Vec::new();
    for (i, n) in [2usize, 3, 4, 5, 8, 12].into_iter().enumerate() {
        for victim in [0, n - 1] {
            let bytes = [8, 1 << 20, 64 << 10][(i + victim) % 3];
            times.push(kill(n, &[victim], bytes, &[Duration::from_millis(i as u64 * 3)]));
        }
    }
    print("one killed", &mut times);
}

/// The second one dies while the others are in shrink, or just before or after it.
#[test]
fn a_second_one_killed_at_any_moment_of_shrink_is_left_out_too() {
    let nanos = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().subsec_nanos();
    let mut seed = u64::from(nanos) | 1;
    println!("seed {seed}");
    let mut random = move |n: u64| {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        seed % n
    };
    let mut times = Vec::new();
    for round in 0..16 {
        let n = 3 + random(4) as usize;
        let first = random(n as u64) as usize;
        // The lowest that is left leads.
        let lead = usize::from(first == 0);
        let other = (first + 1 + random(n as u64 - 1) as usize) % n;
        let second = if round % 2 == 0 && lead != first { lead } else { other };
        let pause = Duration::from_micros(random(if round % 4 < 2 { 60_000 } else { 35_000 }));
        times.push(kill(n, &[first, second], 4096, &[Duration::from_millis(5), pause]));
    }
    print("two killed", &mut times);
}
