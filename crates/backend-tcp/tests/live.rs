//! Ranks that are stopped, starved, busy or dead behind open sockets: who is taken for dead, when, by whom.

mod liveproc;

use std::time::{Duration, Instant};

use liveproc::{Orphan, World};
use rustix::process::Signal;

const SECOND: Duration = Duration::from_secs(1);
/// What a loaded machine may add.
const MARGIN: Duration = Duration::from_secs(3);

#[test]
fn child() {
    liveproc::child();
}

/// The survivors' error, and that it came in time.
fn named(w: &World, victim: usize, since: Instant, heartbeat: Duration) {
    for r in (0..w.ranks.len()).filter(|r| *r != victim) {
        let (said, at) = w.hear(r);
        assert_eq!(said, format!("ERR PeerFailed {victim} NoHeartbeat"), "rank {r}");
        let took = at.saturating_duration_since(since);
        // A heartbeat that was late itself makes the last sign of life older.
        assert!(took >= heartbeat * 9 / 10 && took < heartbeat * 3 / 2 + MARGIN, "rank {r} knew after {took:?}");
    }
}

#[test]
fn a_stopped_rank_is_named_after_the_timeout_and_learns_it_when_it_goes_on() {
    for victim in [0, 2] {
        let mut w = World::start(4, 2 * SECOND, &[]);
        let stopped = w.signal(victim, Signal::STOP);
        for r in (0..4).filter(|r| *r != victim) {
            w.tell(r, "reduce");
        }
        named(&w, victim, stopped, 2 * SECOND);
        w.signal(victim, Signal::CONT);
        let said = w.ask(victim, "reduce");
        assert!(said.starts_with("ERR Aborted") && said.contains("heartbeat"), "{said}");
    }
}

/// In the middle of long messages, when nothing more fits into its connections.
#[test]
fn a_rank_that_stops_among_long_messages_learns_it_too() {
    for victim in [1, 3] {
        let mut w = World::start(4, SECOND, &[]);
        for r in 0..4 {
            w.tell(r, "stream 64000000");
        }
        std::thread::sleep(SECOND / 2);
        w.signal(victim, Signal::STOP);
        for r in (0..4).filter(|r| *r != victim) {
            assert_eq!(w.hear(r).0, format!("ERR PeerFailed {victim} NoHeartbeat"), "rank {r}");
        }
        w.signal(victim, Signal::CONT);
        let said = w.hear(victim).0;
        assert!(said.starts_with("ERR Aborted") && said.contains("heartbeat"), "{said}");
    }
}

/// The world has failed by then, so nobody's calls need the one that stops; finding the survivors does.
#[test]
fn a_rank_that_stops_when_the_survivors_are_to_be_found_is_none() {
    let mut w = World::start(5, SECOND, &[]);
    w.signal(1, Signal::KILL);
    for r in [0, 2, 3, 4] {
        let said = w.ask(r, "reduce");
        assert_eq!(said, "ERR PeerFailed 1 Killed", "rank {r}");
    }
    w.signal(3, Signal::STOP);
    for r in [0, 2, 4] {
        w.tell(r, "shrink");
    }
    for r in [0, 2, 4] {
        assert_eq!(w.hear(r).0, "OK [0, 2, 4]", "rank {r}");
    }
}

#[test]
fn a_short_stop_goes_unnoticed() {
    let mut w = World::start(3, 2 * SECOND, &[]);
    for round in 0..3 {
        w.signal(round, Signal::STOP);
        std::thread::sleep(SECOND * 8 / 5);
        w.signal(round, Signal::CONT);
        std::thread::sleep(SECOND / 2);
    }
    w.all("reduce", 0..3);
    w.all("finalize", 0..3);
}

/// No call is open, and many have no link to the one that is stopped: all know it, and the next call fails at once.
#[test]
fn a_rank_that_stops_in_an_idle_sparse_world_is_named_by_all() {
    let mut w = World::start(12, SECOND, &[]);
    w.signal(5, Signal::STOP);
    std::thread::sleep(3 * SECOND);
    for r in (0..12).filter(|r| *r != 5) {
        let start = Instant::now();
        assert_eq!(w.ask(r, "cause"), "ERR PeerFailed 5 NoHeartbeat", "rank {r}");
        assert_eq!(w.ask(r, "reduce"), "ERR PeerFailed 5 NoHeartbeat", "rank {r}");
        assert!(start.elapsed() < MARGIN);
    }
}

#[test]
fn a_rank_that_stops_before_finalize_is_named_there() {
    let mut w = World::start(4, SECOND, &[]);
    let stopped = w.signal(3, Signal::STOP);
    for r in 0..3 {
        w.tell(r, "finalize");
    }
    named(&w, 3, stopped, SECOND);
}

/// While one rank's reduce function sleeps, its endpoint says nothing; with a secret, too.
#[test]
fn a_rank_in_a_long_reduce_function_lives() {
    for secret in [&[][..], &[("RUSTCOMMS_SECRET", "s")]] {
        let mut w = World::start(3, SECOND / 2, secret);
        w.all("operator 2500", 0..3);
        w.all("finalize", 0..3);
    }
}

/// It computes for several timeouts and calls nothing, with one busy thread per core, and with three: the second way
/// vouches for it. Its program holds the endpoint, so that nothing comes on the first.
#[test]
fn a_rank_that_only_computes_lives() {
    let cores = std::thread::available_parallelism().unwrap().get();
    for busy in [cores, 3 * cores] {
        let mut w = World::start(3, SECOND / 2, &[]);
        for _ in 1..busy {
            w.all("burn", 1..=1);
        }
        w.all("spin 3000", 0..3);
        w.all("cause", 0..3);
        w.all("finalize", 0..3);
    }
}

/// Ranks that call without pause still have time for those that they exchange nothing with.
#[test]
fn a_loop_of_short_calls_leaves_nobody_silent() {
    let mut w = World::start(4, SECOND / 2, &[]);
    w.all("loop 3000", 0..4);
    w.all("finalize", 0..4);
}

/// Many more busy threads than cores.
#[test]
fn sixty_four_busy_ranks_see_no_death() {
    let mut w = World::start(64, SECOND, &[]);
    w.all("burn", 0..64);
    std::thread::sleep(10 * SECOND);
    w.all("reduce", 0..64);
    w.all("cause", 0..64);
}

/// A child of the dead process keeps its connections open: only the end of the process shows.
#[test]
fn a_killed_rank_whose_child_holds_its_sockets_is_noticed_at_once() {
    let mut w = World::start(4, 30 * SECOND, &[]);
    w.all("reduce", 0..4);
    let said = w.ask(1, "leave-child");
    let _orphan = Orphan(said.strip_prefix("OK ").unwrap().parse().unwrap());
    for r in [0, 2, 3] {
        w.tell(r, "reduce");
    }
    std::thread::sleep(SECOND / 5);
    let killed = w.signal(1, Signal::KILL);
    for r in [0, 2, 3] {
        let (said, at) = w.hear(r);
        assert_eq!(said, "ERR PeerFailed 1 Killed");
        assert!(at.saturating_duration_since(killed) < MARGIN, "rank {r} knew after {:?}", at - killed);
    }
}

/// The same after a proper end: nobody is blamed.
#[test]
fn an_orderly_end_with_open_sockets_is_no_death() {
    let mut w = World::start(3, SECOND, &[]);
    let said = w.ask(1, "leave-child");
    let _orphan = Orphan(said.strip_prefix("OK ").unwrap().parse().unwrap());
    w.all("reduce", 0..3);
    w.all("finalize", 0..3);
    w.signal(1, Signal::KILL);
    std::thread::sleep(2 * SECOND);
    assert_eq!([w.ask(0, "cause"), w.ask(2, "cause")], ["OK", "OK"]);
}

#[test]
fn idle_ranks_cost_nothing() {
    let w = World::start(4, 30 * SECOND, &[]);
    std::thread::sleep(SECOND / 2);
    let before: Vec<u64> = (0..4).map(|r| w.ticks(r)).collect();
    std::thread::sleep(5 * SECOND);
    let used: Vec<u64> = (0..4).map(|r| w.ticks(r) - before[r]).collect();
    assert_eq!(used, [0; 4], "ticks in 5 s");
}

/// Asking and answering leaves no descriptor behind.
#[test]
fn probes_leave_nothing_behind() {
    let mut w = World::start(2, SECOND / 5, &[]);
    let count = |w: &mut World| [0, 1].map(|r| w.ask(r, "descriptors"));
    let before = count(&mut w);
    for _ in 0..3 {
        w.all("operator 1500", 0..2);
    }
    std::thread::sleep(SECOND / 2);
    assert_eq!(count(&mut w), before);
    w.all("finalize", 0..2);
}
