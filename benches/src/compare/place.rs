//! Where the cores lie: how long a cache line takes from one to another.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// How long a probe takes.
pub const PROBE: Duration = Duration::from_millis(200);

/// Messages there and back that are timed together: short beside a scheduler's slice, long beside a clock's tick.
const BATCH: u32 = 50;

/// What two cores share.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Distance {
    /// Two threads of one physical core.
    Core,
    /// The last level of cache.
    Cache,
    /// Neither.
    Far,
}

impl Distance {
    /// From the one-way time between the cores in nanoseconds. On virtual machines of Zen 3 and 4, threads of one core take 20 to 25, cores
    /// of one cache 40 to 62, others 150 to 270.
    #[must_use]
    pub fn from_ns(ns: f64) -> Self {
        if ns < 34.0 {
            Self::Core
        } else if ns < 120.0 {
            Self::Cache
        } else {
            Self::Far
        }
    }
}

/// How far the other cores in use are from the first one. Equal placements can be compared.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Placement(pub Vec<Distance>);

impl fmt::Display for Placement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() {
            return f.write_str("one core");
        }
        let names: Vec<&str> = self
            .0
            .iter()
            .map(|d| match d {
                Distance::Core => "same core",
                Distance::Cache => "same L3",
                Distance::Far => "far",
            })
            .collect();
        let different: BTreeSet<&Distance> = self.0.iter().collect();
        f.write_str(&if different.len() == 1 { names[0].to_owned() } else { names.join("/") })
    }
}

/// What a probe has found.
#[derive(Clone, Debug, PartialEq)]
pub struct Probe {
    /// The classes.
    pub placement: Placement,
    /// The longest of the one-way times behind them, in nanoseconds; 0 on one core.
    pub ns: f64,
}

/// The cores that this process may use.
#[must_use]
pub fn cores() -> Vec<usize> {
    let Ok(set) = rustix::thread::sched_getaffinity(None) else { return vec![0] };
    let cores: Vec<usize> = (0..rustix::thread::CpuSet::MAX_CPU).filter(|c| set.is_set(*c)).collect();
    if cores.is_empty() { vec![0] } else { cores }
}

/// Keeps the calling thread, and those it starts, on one core; whether that worked.
pub fn pin(core: usize) -> bool {
    let mut set = rustix::thread::CpuSet::new();
    set.set(core);
    rustix::thread::sched_setaffinity(None, &set).is_ok()
}

/// Probes the first `world` of these cores.
#[must_use]
pub fn probe(cores: &[usize], world: usize, time: Duration) -> Probe {
    let used = &cores[..world.clamp(1, cores.len().max(1)).min(cores.len())];
    let Some((first, others)) = used.split_first() else { return Probe { placement: Placement(Vec::new()), ns: 0.0 } };
    let each = time / others.len().max(1) as u32;
    let ns: Vec<f64> = others.iter().map(|o| one_way_ns(*first, *o, each)).collect();
    Probe {
        placement: Placement(ns.iter().map(|n| Distance::from_ns(*n)).collect()),
        ns: ns.iter().copied().fold(0.0, f64::max),
    }
}

/// One cache line per word, and none that the processor fetches along with its neighbour.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Line(AtomicU32);

/// The time below which a quarter of the batches lie: other programs on the cores lengthen the rest, but do not move the cores.
fn one_way_ns(a: usize, b: usize, time: Duration) -> f64 {
    let (there, back, stop) = (Line::default(), Line::default(), AtomicBool::new(false));
    let mut batches = std::thread::scope(|s| {
        s.spawn(|| {
            pin(b);
            let mut seen = 0;
            while !stop.load(Ordering::Relaxed) {
                let now = there.0.load(Ordering::Acquire);
                if now != seen {
                    seen = now;
                    back.0.store(now, Ordering::Release);
                }
                std::hint::spin_loop();
            }
        });
        let timed = s.spawn(|| {
            pin(a);
            let (start, mut i, mut batches) = (Instant::now(), 0u32, Vec::with_capacity(1 << 15));
            while start.elapsed() < time {
                let t = Instant::now();
                for _ in 0..BATCH {
                    i = i.wrapping_add(1);
                    there.0.store(i, Ordering::Release);
                    while back.0.load(Ordering::Acquire) != i {
                        std::hint::spin_loop();
                    }
                }
                batches.push(t.elapsed().as_secs_f64() * 1e9 / f64::from(2 * BATCH));
            }
            stop.store(true, Ordering::Relaxed);
            batches
        });
        timed.join().unwrap_or_default()
    });
    batches.sort_unstable_by(f64::total_cmp);
    batches.get(batches.len() / 4).copied().unwrap_or(f64::INFINITY)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distances() {
        assert_eq!([22.0, 57.0, 260.0].map(Distance::from_ns), [Distance::Core, Distance::Cache, Distance::Far]);
        assert_eq!(Placement(vec![]).to_string(), "one core");
        assert_eq!(Placement(vec![Distance::Cache; 3]).to_string(), "same L3");
        assert_eq!(Placement(vec![Distance::Cache, Distance::Far]).to_string(), "same L3/far");
    }

    #[test]
    fn a_probe_has_a_distance_for_each_other_core_in_use() {
        let short = Duration::from_millis(5);
        let all = cores();
        assert_eq!(probe(&all, 1, short).placement, Placement(vec![]));
        let two = probe(&all, 2, short);
        assert_eq!(two.placement.0.len(), 1.min(all.len() - 1));
        assert_eq!(probe(&all[..1], 4, short).placement, Placement(vec![]));
        assert_eq!(probe(&[], 4, short).placement, Placement(vec![]));
    }
}
