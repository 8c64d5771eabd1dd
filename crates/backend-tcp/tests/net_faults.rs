//! Three hosts at a switch, as network namespaces: one loses its cable, or has a slow one.

mod liveproc;
mod netns;

use std::time::{Duration, Instant};

use liveproc::World;
use netns::Lan;

const SECOND: Duration = Duration::from_secs(1);
/// What a loaded machine may add.
const MARGIN: Duration = Duration::from_secs(8);

#[test]
fn child() {
    liveproc::child();
}

/// Rank `r` is on host `places[r]`; the store is rank 0's.
fn world(lan: &Lan, places: &[usize], heartbeat: Duration) -> World {
    let master = format!("10.1.0.{}", places[0] + 1);
    let exe = std::env::current_exe().unwrap();
    let place = |rank: usize| lan.hosts[places[rank]].command(exe.to_str().unwrap());
    World::start_at(places.len(), heartbeat, &[("MASTER_ADDR", &master), ("MASTER_PORT", "29500")], place)
}

/// `said` is an error that blames the silence of one of these.
fn blames(said: &str, ranks: &[usize]) -> bool {
    ranks.iter().any(|r| {
        said == format!("ERR PeerFailed {r} NoHeartbeat")
            || said.starts_with("ERR Aborted")
                && said.contains(&format!("rank {r} failed"))
                && said.contains("heartbeat")
    })
}

/// Both sides of the cut know it in time, and each goes on by itself.
fn one_host_is_cut_off(lan: &Lan, places: &[usize], host: usize, bytes: usize) {
    let heartbeat = 2 * SECOND;
    let n = places.len();
    let mut w = world(lan, places, heartbeat);
    w.all("reduce", 0..n);
    let command = if bytes == 0 { "loop 60000".to_owned() } else { format!("stream {bytes}") };
    for r in 0..n {
        w.tell(r, &command);
    }
    std::thread::sleep(SECOND / 2);
    let cut = Instant::now();
    lan.unplug(host);
    let side = |cut_off: bool| -> Vec<usize> { (0..n).filter(|r| (places[*r] == host) == cut_off).collect() };
    let what = format!("{places:?} without host {host}, {command}");
    for (r, place) in places.iter().enumerate() {
        let (said, at) = w.hear(r);
        assert!(blames(&said, &side(*place != host)), "{what}: rank {r}: {said}");
        let took = at.saturating_duration_since(cut);
        // The last sign of life may be a quarter older than the cut.
        assert!(took >= heartbeat * 3 / 4 && took < heartbeat * 5 / 4 + MARGIN, "{what}: rank {r} knew after {took:?}");
    }
    for r in 0..n {
        w.tell(r, "go-on");
    }
    let began = Instant::now();
    let said: Vec<_> = (0..n).map(|r| w.hear(r)).collect();
    for (r, place) in places.iter().enumerate() {
        assert_eq!(said[r].0, format!("OK {:?}", side(*place == host)), "{what}: rank {r}: {said:?}");
        let took = said[r].1.saturating_duration_since(began);
        assert!(took < heartbeat * 5 / 2 + MARGIN, "{what}: rank {r} was back after {took:?}");
    }
    // The two do not find each other again.
    lan.plug(host);
    w.all("reduce", 0..n);
    w.all("finalize", 0..n);
}

#[test]
fn a_host_that_is_cut_off_and_the_others_each_go_on_by_themselves() {
    let test = "a_host_that_is_cut_off_and_the_others_each_go_on_by_themselves";
    // With one rank or two, with rank 0, among short calls or long ones.
    for (places, host, bytes) in [
        (&[0, 0, 1, 1, 2][..], 2, 0),
        (&[0, 0, 1, 1, 2], 0, 0),
        (&[0, 1, 2, 1], 1, 8_000_000),
        (&[0, 1, 2, 2], 0, 8_000_000),
        (&[0, 1, 2, 0, 1], 2, 8_000_000),
    ] {
        let Some(lan) = Lan::new(test, 3) else { return };
        one_host_is_cut_off(&lan, places, host, bytes);
    }
}

/// All three lose each other: each rank finds those of its own host.
#[test]
fn hosts_that_all_lose_their_cables_end_as_one_group_each() {
    let Some(lan) = Lan::new("hosts_that_all_lose_their_cables_end_as_one_group_each", 3) else { return };
    let places = [0, 1, 2, 1, 0];
    let mut w = world(&lan, &places, SECOND);
    w.all("reduce", 0..5);
    for k in 0..3 {
        lan.unplug(k);
    }
    for r in 0..5 {
        w.tell(r, "reduce");
    }
    for r in 0..5 {
        let others: Vec<usize> = (0..5).filter(|o| places[*o] != places[r]).collect();
        let said = w.hear(r).0;
        assert!(blames(&said, &others), "rank {r}: {said}");
    }
    for r in 0..5 {
        w.tell(r, "go-on");
    }
    for (r, want) in ["[0, 4]", "[1, 3]", "[2]", "[1, 3]", "[0, 4]"].into_iter().enumerate() {
        assert_eq!(w.hear(r).0, format!("OK {want}"), "rank {r}");
    }
    w.all("reduce", 0..5);
    w.all("finalize", 0..5);
}

/// Transfers take many times the heartbeat timeout, in which each heartbeat waits behind what is under way.
#[test]
fn a_slow_cable_is_slow_and_nobody_is_taken_for_dead() {
    let Some(lan) = Lan::new("a_slow_cable_is_slow_and_nobody_is_taken_for_dead", 3) else { return };
    lan.slow(2, "20mbit");
    for (places, bytes) in [(&[0, 2][..], 12_000_000u64), (&[0, 1, 1, 2], 8_000_000)] {
        let n = places.len();
        let mut w = world(&lan, places, SECOND);
        for r in 0..n {
            w.tell(r, &format!("bulk {bytes}"));
        }
        // Each rank gets at least that much of the others' in 20 Mbit/s.
        let least = bytes * (n as u64 - 1) / n as u64 * 8 / 20_000;
        for r in 0..n {
            let said = w.hear(r).0;
            let times: Vec<u64> = said
                .strip_prefix("OK ")
                .unwrap_or_else(|| panic!("rank {r}: {said}"))
                .split(' ')
                .map(|t| t.parse().unwrap())
                .collect();
            println!("{places:?}, {bytes} bytes: rank {r} had a control message after {} of {} ms", times[0], times[1]);
            assert!(times[1] >= least, "the cable is not slow: {times:?}, not {least}");
            assert!(times[0] < times[1] - 500, "rank {r}: a control message waits for the data: {times:?}");
        }
        w.all("cause", 0..n);
        w.all("reduce", 0..n);
        w.all("finalize", 0..n);
    }
}

/// It overtakes what has not been given to the kernel yet.
#[test]
fn an_abort_gets_through_a_slow_cable_that_is_full() {
    let Some(lan) = Lan::new("an_abort_gets_through_a_slow_cable_that_is_full", 3) else { return };
    lan.slow(2, "20mbit");
    // By the one behind the cable, and by one before it.
    for aborts in [2, 0] {
        let mut w = world(&lan, &[0, 1, 2], SECOND);
        w.all("abort-after 2000", aborts..=aborts);
        let aborted = Instant::now() + 2 * SECOND;
        for r in 0..3 {
            // Alone it takes most of half a minute.
            w.tell(r, "stream 60000000");
        }
        for r in 0..3 {
            let (said, at) = w.hear(r);
            assert!(said.starts_with(&format!("ERR Aborted {aborts}")) && said.contains("enough of it"), "{r}: {said}");
            let took = at.saturating_duration_since(aborted);
            println!("rank {aborts} aborts, rank {r} knew after {took:?}");
            assert!(took < 3 * SECOND + MARGIN, "rank {r} knew after {took:?}");
        }
    }
}
