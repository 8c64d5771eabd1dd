//! How long a comparison takes, roughly.

use std::time::Duration;

use super::limits::floor_of;
use super::options::{Case, Options, Peer};
use super::ours;
use super::place::PROBE;
use super::side::Side;

/// From start to end of processes that do nothing.
const LAUNCH_S: f64 = 0.5;

/// Without pairs that are dropped, on a machine that does nothing else.
#[must_use]
pub fn estimate(o: &Options) -> Duration {
    let mut total = 0.0;
    for world in &o.worlds {
        for transport in &o.transports {
            let mut sides: Vec<Side> = o.against.iter().map(|p| Side::Peer(*p)).collect();
            sides.extend(ours::missing(*transport).is_none().then_some(Side::Ours));
            let rounds = o.need(*world) as f64;
            for pinned in &o.pins {
                for op in &o.ops {
                    let cases = o.cases(*op, *world);
                    let floors: usize = cases.iter().map(|c| floor_of(c, *transport, *world).bytes).sum();
                    // Every third round, each at least twice and for a while.
                    total += rounds / 3.0 * (floors as f64 * 2e-9 + 0.05 * cases.len() as f64);
                    total += rounds * PROBE.as_secs_f64() * (sides.len() + 1) as f64;
                    for side in &sides {
                        let all: f64 = cases.iter().map(|c| case_s(c, *side, *world, *pinned)).sum();
                        total += rounds * (LAUNCH_S + all);
                    }
                }
            }
        }
    }
    Duration::from_secs_f64(total)
}

fn case_s(case: &Case, side: Side, world: usize, pinned: bool) -> f64 {
    let pairs = world as f64 / 2.0;
    // Gloo's thread for its sockets and the caller wait for each other's slices on one core.
    let call = match side {
        Side::Peer(Peer::Gloo) if pinned => 4.5e-3,
        Side::Peer(Peer::Gloo) => 4e-4 * pairs * pairs,
        _ => 2e-5 * pairs * pairs,
    };
    let bytes = case.bytes as f64;
    let checks = 2.0 * bytes * world as f64 * 2e-9;
    (case.iterations + case.warm_up) as f64 * (call + bytes * pairs / 1e9) + checks
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_takes_longer() {
        let of = |line: &str| {
            estimate(&Options::parse(&line.split_whitespace().map(str::to_owned).collect::<Vec<_>>()).unwrap())
        };
        let (quick, tcp, all) = (of("--quick"), of("--transport tcp"), of(""));
        assert!(quick < Duration::from_secs(300), "{quick:?}");
        assert!(quick < tcp && tcp < all && all < Duration::from_secs(3 * 3600), "{tcp:?} {all:?}");
        assert!(of("--against openmpi") < all && of("--rounds 1") < all);
    }
}
