//! Hosts that lose sight of each other, as network namespaces: cut cables, in both directions and in one.

mod liveproc;
mod netns;

use std::time::{Duration, Instant};

use liveproc::World;
use netns::{Host, cable, two_hosts};

const SECOND: Duration = Duration::from_secs(1);
/// What a loaded machine may add.
const MARGIN: Duration = Duration::from_secs(4);

#[test]
fn child() {
    liveproc::child();
}

/// Ranks 0 and 1 on one host, rank 2 on the other.
fn world(hosts: &[Host; 2], heartbeat: Duration) -> World {
    cable(hosts, 0, &["10.1.0.1/24"], &["10.1.0.2/24"]);
    let exe = std::env::current_exe().unwrap();
    let place = |rank: usize| hosts[rank / 2].command(exe.to_str().unwrap());
    World::start_at(3, heartbeat, &[("MASTER_ADDR", "10.1.0.1"), ("MASTER_PORT", "29500")], place)
}

/// From now on what `from` sends to `to` is lost, and nobody learns it.
fn lose(host: &Host, dev: &str, to: &str) {
    host.sh(&format!("ip neigh replace {to} lladdr 02:00:00:00:00:99 nud permanent dev {dev}"));
}

fn mend(host: &Host, dev: &str, to: &str) {
    host.sh(&format!("ip neigh del {to} dev {dev}"));
}

#[test]
fn a_cut_cable_is_found_on_both_sides() {
    for (calling, silent) in [(true, true), (false, true), (true, false)] {
        let Some(hosts) = two_hosts("a_cut_cable_is_found_on_both_sides") else { return };
        let mut w = world(&hosts, SECOND);
        w.all("reduce", 0..3);
        if silent {
            lose(&hosts[0], "va0", "10.1.0.2");
            lose(&hosts[1], "vb0", "10.1.0.1");
        } else {
            hosts[1].sh("ip link set vb0 down");
        }
        let cut = Instant::now();
        if !calling {
            std::thread::sleep(3 * SECOND);
        }
        for r in 0..3 {
            w.tell(r, "reduce");
        }
        for r in 0..3 {
            let (said, at) = w.hear(r);
            let others = if r == 2 { ["0", "1"] } else { ["2", "2"] };
            assert!(others.iter().any(|o| said == format!("ERR PeerFailed {o} NoHeartbeat")), "rank {r}: {said}");
            assert!(at.saturating_duration_since(cut) < 3 * SECOND + MARGIN, "rank {r}");
        }
    }
}

/// One host hears the other, and is not heard.
#[test]
fn a_cut_in_one_direction_ends_the_world_on_all_ranks() {
    for deaf in [0, 1] {
        let Some(hosts) = two_hosts("a_cut_in_one_direction_ends_the_world_on_all_ranks") else { return };
        let mut w = world(&hosts, SECOND);
        w.all("reduce", 0..3);
        let (dev, to) = if deaf == 0 { ("vb0", "10.1.0.1") } else { ("va0", "10.1.0.2") };
        lose(&hosts[1 - deaf], dev, to);
        let cut = Instant::now();
        for r in 0..3 {
            w.tell(r, "reduce");
        }
        for r in 0..3 {
            let (mut said, mut at) = w.hear(r);
            // A call may go well that needs nothing more from the others.
            for _ in 0..3 {
                if said == "OK" {
                    w.tell(r, "reduce");
                    (said, at) = w.hear(r);
                }
            }
            // Who is not heard is told so: the other direction works.
            let told = said.starts_with("ERR Aborted") && said.contains("heartbeat");
            assert!(told || said.ends_with("NoHeartbeat"), "rank {r}: {said}");
            assert!(!said.contains(&format!("PeerFailed {r} ")), "rank {r} blames itself: {said}");
            assert!(at.saturating_duration_since(cut) < 3 * SECOND + MARGIN, "rank {r}");
        }
    }
}

#[test]
fn a_short_cut_is_mended_and_forgotten() {
    let Some(hosts) = two_hosts("a_short_cut_is_mended_and_forgotten") else { return };
    let mut w = world(&hosts, 4 * SECOND);
    for _ in 0..2 {
        lose(&hosts[0], "va0", "10.1.0.2");
        lose(&hosts[1], "vb0", "10.1.0.1");
        for r in 0..3 {
            w.tell(r, "reduce");
        }
        std::thread::sleep(SECOND);
        mend(&hosts[0], "va0", "10.1.0.2");
        mend(&hosts[1], "vb0", "10.1.0.1");
        for r in 0..3 {
            assert_eq!(w.hear(r).0, "OK", "rank {r}");
        }
    }
    w.all("finalize", 0..3);
}
