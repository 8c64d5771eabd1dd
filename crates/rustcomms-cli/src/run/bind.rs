//! Which CPUs each local rank gets.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::str::FromStr;

#[cfg(target_os = "linux")]
use rustix::thread::CpuSet;

use super::Stop;

/// How the CPUs are shared out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Bind {
    /// Every rank may run wherever the launcher may.
    None,
    /// Equal shares of the cores.
    Core,
    /// Every rank gets all CPUs of one NUMA node.
    Numa,
    /// What the user wrote: one set for each local rank.
    List(Vec<BTreeSet<usize>>),
}

impl FromStr for Bind {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "none" => Ok(Self::None),
            "core" => Ok(Self::Core),
            "numa" => Ok(Self::Numa),
            _ => match text.strip_prefix("list:") {
                Some(sets) => sets.split('/').map(cpu_list).collect::<Result<_, _>>().map(Self::List),
                None => {
                    Err("it must be none, core, numa, or list: with CPUs for each rank, as in list:0-3,8/4-7".into())
                }
            },
        }
    }
}

/// The CPUs of `0-3,8`, as the kernel writes them, too.
fn cpu_list(text: &str) -> Result<BTreeSet<usize>, String> {
    let mut all = BTreeSet::new();
    for part in text.trim().split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let number = |t: &str| t.parse().ok().filter(|n| *n < MAX).ok_or_else(|| format!("'{part}' names no CPUs"));
        let (first, last): (usize, usize) = (number(first)?, number(last)?);
        if first > last {
            return Err(format!("'{part}' counts backwards"));
        }
        all.extend(first..=last);
    }
    Ok(all)
}

/// `0-3,8`.
pub(super) fn show(cpus: &BTreeSet<usize>) -> String {
    let mut runs: Vec<(usize, usize)> = Vec::new();
    for &c in cpus {
        match runs.last_mut() {
            Some((_, last)) if *last + 1 == c => *last = c,
            _ => runs.push((c, c)),
        }
    }
    let show = |(a, b): &(usize, usize)| if a == b { a.to_string() } else { format!("{a}-{b}") };
    runs.iter().map(show).collect::<Vec<_>>().join(",")
}

/// CPUs that a set of the system can name.
const MAX: usize = 1024;

/// A CPU and where it is; what the system does not tell is 0, and `core` the CPU itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Cpu {
    numa: usize,
    package: usize,
    core: usize,
    id: usize,
}

/// The set of each of `n` local ranks; `None` where nothing is to be set.
pub(super) fn shares(bind: &Bind, n: usize) -> Result<Vec<Option<BTreeSet<usize>>>, Stop> {
    if *bind == Bind::None {
        return Ok(vec![None; n]);
    }
    let allowed = allowed().map_err(|e| Stop::new(1, format!("cannot find out which CPUs may be used: {e}")))?;
    let shares = share_out(bind, &topology(&allowed), n).map_err(|text| Stop::new(2, text))?;
    Ok(shares.into_iter().map(Some).collect())
}

fn share_out(bind: &Bind, cpus: &[Cpu], n: usize) -> Result<Vec<BTreeSet<usize>>, String> {
    let allowed: BTreeSet<usize> = cpus.iter().map(|c| c.id).collect();
    let mut groups: BTreeMap<(usize, usize, usize), BTreeSet<usize>> = BTreeMap::new();
    for c in cpus {
        let key = if *bind == Bind::Numa { (c.numa, 0, 0) } else { (c.numa, c.package, c.core) };
        groups.entry(key).or_default().insert(c.id);
    }
    let mut groups: Vec<BTreeSet<usize>> = groups.into_values().collect();
    match bind {
        Bind::None => return Ok(vec![allowed; n]),
        Bind::List(sets) => {
            if sets.len() != n {
                return Err(format!("--bind names CPUs for {} ranks, but there are {n} on this node", sets.len()));
            }
            for (rank, set) in sets.iter().enumerate() {
                let outside: BTreeSet<usize> = set.difference(&allowed).copied().collect();
                if !outside.is_empty() {
                    return Err(format!(
                        "--bind gives local rank {rank} CPUs {} that this process may not use; it may use {}",
                        show(&outside),
                        show(&allowed)
                    ));
                }
            }
            return Ok(sets.clone());
        }
        Bind::Numa => {}
        // Fewer cores than ranks: threads of a core are the next smaller thing that need not be shared.
        Bind::Core if groups.len() < n => {
            let mut ordered = cpus.to_vec();
            ordered.sort_unstable();
            groups = ordered.iter().map(|c| BTreeSet::from([c.id])).collect();
        }
        Bind::Core => {}
    }
    if groups.is_empty() {
        return Err("this process may use no CPU that the system knows".into());
    }
    let share = |i: usize| match *bind {
        Bind::Core if groups.len() >= n => {
            groups[i * groups.len() / n..(i + 1) * groups.len() / n].iter().flatten().copied().collect()
        }
        // More ranks than there is to share out; or nodes, of which each rank gets one.
        _ => groups[i * groups.len() / n].clone(),
    };
    Ok((0..n).map(share).collect())
}

/// How many threads rank `i` should compute with: its CPUs, divided among those who have the same.
pub(super) fn threads(shares: &[Option<BTreeSet<usize>>], i: usize) -> usize {
    let usable = std::thread::available_parallelism().map_or(1, usize::from);
    match &shares[i] {
        None => usable / shares.len(),
        Some(mine) => {
            let sharers = |c: &usize| shares.iter().flatten().filter(|s| s.contains(c)).count().max(1);
            // A CPU that k ranks share counts as 1/k.
            mine.iter().map(|c| 1.0 / sharers(c) as f64).sum::<f64>().round() as usize
        }
    }
    .clamp(1, usable.max(1))
}

/// Where each of `allowed` is.
fn topology(allowed: &BTreeSet<usize>) -> Vec<Cpu> {
    let nodes: Vec<(usize, BTreeSet<usize>)> = fs::read_dir("/sys/devices/system/node")
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|e| {
            let number = e.file_name().to_str()?.strip_prefix("node")?.parse().ok()?;
            Some((number, cpu_list(&fs::read_to_string(e.path().join("cpulist")).ok()?).ok()?))
        })
        .collect();
    let place = |&id: &usize| {
        let read = |what: &str| {
            let path = format!("/sys/devices/system/cpu/cpu{id}/topology/{what}");
            fs::read_to_string(path).ok().and_then(|t| t.trim().parse().ok())
        };
        let numa = nodes.iter().find(|(_, cpus)| cpus.contains(&id)).map_or(0, |(n, _)| *n);
        Cpu { numa, package: read("physical_package_id").unwrap_or(0), core: read("core_id").unwrap_or(id), id }
    };
    allowed.iter().map(place).collect()
}

#[cfg(target_os = "linux")]
fn allowed() -> std::io::Result<BTreeSet<usize>> {
    let set = rustix::thread::sched_getaffinity(None)?;
    Ok((0..MAX.min(CpuSet::MAX_CPU)).filter(|c| set.is_set(*c)).collect())
}

#[cfg(not(target_os = "linux"))]
fn allowed() -> std::io::Result<BTreeSet<usize>> {
    Err(std::io::ErrorKind::Unsupported.into())
}

/// What is to be done in a child before its program starts.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Setter {
    #[cfg(target_os = "linux")]
    set: Option<CpuSet>,
}

impl Setter {
    /// Binds the calling thread, and what it becomes. A plain system call: nothing is allocated or locked.
    pub(super) fn set(&self) -> std::io::Result<()> {
        #[cfg(target_os = "linux")]
        if let Some(set) = &self.set {
            rustix::thread::sched_setaffinity(None, set)?;
        }
        Ok(())
    }
}

/// Binds to `cpus`, or not at all.
pub(super) fn setter(cpus: Option<&BTreeSet<usize>>) -> Setter {
    #[cfg(target_os = "linux")]
    return Setter {
        set: cpus.map(|cpus| {
            let mut set = CpuSet::new();
            cpus.iter().for_each(|c| set.set(*c));
            set
        }),
    };
    // Elsewhere `shares` has refused.
    #[cfg(not(target_os = "linux"))]
    {
        let _ = cpus;
        Setter::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two NUMA nodes of `cores` cores with two threads each, numbered as Linux does: second threads last.
    fn machine(cores: usize) -> Vec<Cpu> {
        let all = 2 * cores;
        (0..2 * all).map(|id| Cpu { numa: id % all / cores, package: id % all / cores, core: id % cores, id }).collect()
    }

    fn shown(bind: &str, cpus: &[Cpu], n: usize) -> Vec<String> {
        share_out(&bind.parse().unwrap(), cpus, n).unwrap().iter().map(show).collect()
    }

    #[test]
    fn cores_are_not_shared_while_there_are_enough() {
        let m = machine(2); // cores 0,4 1,5 on node 0; 2,6 3,7 on node 1
        assert_eq!(shown("core", &m, 1), ["0-7"]);
        assert_eq!(shown("core", &m, 2), ["0-1,4-5", "2-3,6-7"]);
        assert_eq!(shown("core", &m, 3), ["0,4", "1,5", "2-3,6-7"]);
        assert_eq!(shown("core", &m, 4), ["0,4", "1,5", "2,6", "3,7"]);
        // Threads, then nothing is left but to share.
        assert_eq!(shown("core", &m, 5), ["0", "1,4", "5", "2,6", "3,7"]);
        assert_eq!(shown("core", &m, 8), ["0", "4", "1", "5", "2", "6", "3", "7"]);
        assert_eq!(shown("core", &machine(1)[..1], 3), ["0", "0", "0"]);
        // A launcher that may use only part of the machine.
        assert_eq!(shown("core", &m[2..6], 2), ["4-5", "2-3"]);
    }

    /// For all shapes: nobody is without a CPU, sizes differ by one core, and nothing is in two shares unless it must be.
    #[test]
    fn shares_are_fair() {
        for cores in 1..9 {
            let m = machine(cores);
            for n in 1..40 {
                let shares = share_out(&Bind::Core, &m, n).unwrap();
                assert_eq!(shares.len(), n);
                assert!(shares.iter().all(|s| !s.is_empty()));
                let total: usize = shares.iter().map(BTreeSet::len).sum();
                let distinct: BTreeSet<usize> = shares.iter().flatten().copied().collect();
                if n <= m.len() {
                    assert_eq!(total, distinct.len(), "{cores} {n}: {shares:?}");
                }
                if n <= 2 * cores {
                    assert_eq!(distinct.len(), m.len(), "{cores} {n}: {shares:?}");
                }
                let (min, max) = (shares.iter().map(BTreeSet::len).min(), shares.iter().map(BTreeSet::len).max());
                assert!(max.unwrap() - min.unwrap() <= 2, "{cores} {n}: {shares:?}");
            }
        }
    }

    #[test]
    fn whole_nodes() {
        let m = machine(2);
        assert_eq!(shown("numa", &m, 1), ["0-1,4-5"]);
        assert_eq!(shown("numa", &m, 2), ["0-1,4-5", "2-3,6-7"]);
        assert_eq!(shown("numa", &m, 4), ["0-1,4-5", "0-1,4-5", "2-3,6-7", "2-3,6-7"]);
    }

    #[test]
    fn lists() {
        let m = machine(2);
        assert_eq!(shown("list:0-2,7/3,5", &m, 2), ["0-2,7", "3,5"]);
        let wrong = |text: &str| share_out(&text.parse().unwrap(), &m, 2).unwrap_err();
        assert!(wrong("list:0").contains("for 1 ranks, but there are 2"));
        assert!(wrong("list:0/7-9").contains("local rank 1 CPUs 8-9") && wrong("list:0/8").contains("it may use 0-7"));
        for text in ["cores", "list:", "list:0//1", "list:3-1", "list:a", "list:-1", "list:99999", "list:0-", "0-3"] {
            assert!(text.parse::<Bind>().is_err(), "{text}");
        }
    }

    #[test]
    fn threads_count_shared_cpus_once() {
        let of = |lists: &[&str]| -> Vec<Option<BTreeSet<usize>>> { lists.iter().map(|l| cpu_list(l).ok()).collect() };
        let usable = std::thread::available_parallelism().map_or(1, usize::from);
        assert_eq!(threads(&of(&["0-1", "2"]), 0), 2.min(usable));
        assert_eq!(threads(&of(&["0-1", "0-1"]), 0), 1);
        assert_eq!(threads(&of(&["0", "0", "0"]), 2), 1);
        assert_eq!(threads(&[None, None], 0), (usable / 2).max(1));
    }
}
