//! What the system lets a rank have: descriptors, processes, locked and shared memory.

use std::fs::{self, OpenOptions};
use std::io::{self, Read, Write};
use std::path::Path;

use rustix::process::{Resource, Rlimit, getrlimit};

use super::{Findings, Verdict};

const MIB: u64 = 1 << 20;
/// Descriptors of a rank beside the connections: standard streams, listener, store, wake-ups, files of the program.
const OWN: u64 = 32;
/// Where processes of a host share memory.
const SHM: &str = "/dev/shm";

/// Looks at the limits for a rank of `world`, if it is one.
pub(super) fn look(found: &mut Findings, world: Option<usize>) {
    found.put(descriptors(&getrlimit(Resource::Nofile), world));
    found.put(processes(getrlimit(Resource::Nproc).current, cgroup_limit()));
    found.put(memlock(getrlimit(Resource::Memlock).current));
    found.put(shared_memory(Path::new(SHM)));
}

fn count(n: Option<u64>) -> String {
    n.map_or("unlimited".into(), |n| n.to_string())
}

fn size(bytes: u64) -> String {
    match bytes {
        0..MIB => format!("{} KiB", bytes >> 10),
        _ if bytes < 10 << 30 => format!("{} MiB", bytes / MIB),
        _ => format!("{} GiB", bytes >> 30),
    }
}

/// Connections of a rank with one to every other, and with those only that rings, trees and hypercubes use.
fn connections(world: usize) -> (u64, u64) {
    let full = world.saturating_sub(1) as u64;
    let rounds = u64::from(world.max(1).next_power_of_two().trailing_zeros());
    (full, full.min(2 * rounds))
}

fn descriptors(limit: &Rlimit, world: Option<usize>) -> Verdict {
    let soft = limit.current.unwrap_or(u64::MAX);
    let have = format!("open descriptors: {} (hard limit {})", count(limit.current), count(limit.maximum));
    let Some(world) = world else {
        let ranks = count(limit.current.map(|n| n.saturating_sub(OWN) + 1));
        let text = format!("{have}, enough for connections to all of {ranks} ranks");
        return if soft < 1024 {
            Verdict::Note(format!("{text}; more with `ulimit -n 65536` before the launcher"))
        } else {
            Verdict::Ok(text)
        };
    };
    let (full, sparse) = connections(world);
    let need = full + OWN;
    let text = format!(
        "{have}; a rank of {world} needs about {need} with a connection to every other one, {} with those of rings and trees",
        sparse + OWN
    );
    if soft >= need {
        return Verdict::Ok(text);
    }
    let how = if limit.maximum.is_none_or(|n| n >= need) {
        format!("`ulimit -n {need}` before the launcher")
    } else {
        format!("the hard limit must be raised first (limits.conf, or LimitNOFILE= of the service), to at least {need}")
    };
    Verdict::Problem(format!("{text}: {how}"))
}

/// `pids.max` of this process's control group, if it has one.
fn cgroup_limit() -> Option<u64> {
    let groups = fs::read_to_string("/proc/self/cgroup").ok()?;
    let path = groups.lines().find_map(|l| l.strip_prefix("0::/"))?;
    fs::read_to_string(Path::new("/sys/fs/cgroup").join(path).join("pids.max")).ok()?.trim().parse().ok()
}

fn processes(user: Option<u64>, group: Option<u64>) -> Verdict {
    let text = format!("processes and threads: {} for the user, {} for the control group", count(user), count(group));
    match user.into_iter().chain(group).min() {
        Some(n) if n < 1024 => Verdict::Note(format!(
            "{text}; few for many ranks of many threads: `ulimit -u`, TasksMax= of the service, or --pids-limit of the container"
        )),
        _ => Verdict::Ok(text),
    }
}

fn memlock(limit: Option<u64>) -> Verdict {
    let text = format!("locked memory: {}", limit.map_or("unlimited".into(), size));
    match limit {
        Some(n) if n < 64 * MIB => Verdict::Note(format!(
            "{text}; nothing here needs it, but RDMA and pinned buffers of GPUs do: `ulimit -l unlimited`"
        )),
        _ => Verdict::Ok(text),
    }
}

/// Looks at the file system of shared memory, and writes and reads 1 MiB there.
fn shared_memory(dir: &Path) -> Verdict {
    let name = dir.display();
    if !dir.is_dir() {
        return Verdict::Note(format!(
            "shared memory: there is no {name}; GPU libraries want it (mount a tmpfs there)"
        ));
    }
    let space = match rustix::fs::statvfs(dir) {
        Ok(s) => (s.f_blocks.saturating_mul(s.f_frsize), s.f_bavail.saturating_mul(s.f_frsize)),
        Err(e) => return Verdict::Problem(format!("shared memory: {name} cannot be looked at: {e}")),
    };
    let text = format!("shared memory: {name} of {}, {} free", size(space.0), size(space.1));
    if let Err(e) = try_file(dir) {
        return Verdict::Problem(format!(
            "{text}, but 1 MiB cannot be written there: {e}; remove old files, or make it larger and writable"
        ));
    }
    if space.1 <= 64 * MIB {
        return Verdict::Note(format!(
            "{text}; little for several ranks of GPU libraries: --shm-size=1g of the container, or `mount -o remount,size=`"
        ));
    }
    Verdict::Ok(format!("{text}; 1 MiB written and read"))
}

fn try_file(dir: &Path) -> io::Result<()> {
    let path = dir.join(format!("rustcomms-doctor-{}", std::process::id()));
    let wrote = vec![0x5a; MIB as usize];
    let work = || {
        // Nobody else's file, and no link that somebody has put there.
        let mut file = OpenOptions::new().write(true).create_new(true).open(&path)?;
        file.write_all(&wrote)?;
        let mut read = Vec::new();
        fs::File::open(&path)?.read_to_end(&mut read)?;
        if read == wrote { Ok(()) } else { Err(io::Error::other("it reads back differently")) }
    };
    let result = work();
    if !matches!(&result, Err(e) if e.kind() == io::ErrorKind::AlreadyExists) {
        // If it cannot be removed, the result says what is wrong, or the next doctor does.
        let _ = fs::remove_file(&path);
    }
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limit(current: u64, maximum: u64) -> Rlimit {
        Rlimit { current: Some(current), maximum: Some(maximum) }
    }

    #[test]
    fn a_world_needs_descriptors() {
        assert_eq!(
            [1, 2, 3, 4, 5, 64, 1000].map(connections),
            [(0, 0), (1, 1), (2, 2), (3, 3), (4, 4), (63, 12), (999, 20)]
        );
        let of = |soft, hard, world| descriptors(&limit(soft, hard), world);
        assert!(matches!(of(1024, 4096, None), Verdict::Ok(t) if t.contains("to all of 993 ranks")));
        assert!(matches!(of(256, 4096, None), Verdict::Note(t) if t.contains("ulimit -n")));
        assert!(matches!(of(1024, 1024, Some(993)), Verdict::Ok(t) if t.contains("about 1024") && t.contains(" 52 ")));
        assert!(matches!(of(1024, 4096, Some(994)), Verdict::Problem(t) if t.contains("`ulimit -n 1025`")));
        assert!(matches!(of(1024, 1024, Some(994)), Verdict::Problem(t) if t.contains("hard limit must")));
        let none = Rlimit { current: None, maximum: None };
        assert!(matches!(descriptors(&none, Some(1 << 20)), Verdict::Ok(_)));
        assert!(matches!(descriptors(&none, None), Verdict::Ok(t) if t.contains("unlimited ranks")));
    }

    #[test]
    fn small_limits_are_notes() {
        assert!(matches!(processes(None, None), Verdict::Ok(t) if t.contains("unlimited for the user")));
        assert!(
            matches!(processes(Some(9000), Some(100)), Verdict::Note(t) if t.contains("100 for the control group"))
        );
        assert!(matches!(memlock(Some(8 * MIB)), Verdict::Note(t) if t.contains("8 MiB") && t.contains("ulimit -l")));
        assert!(matches!(memlock(None), Verdict::Ok(_)));
    }

    #[test]
    fn sizes() {
        assert_eq!([size(65_536), size(64 * MIB), size(24 << 30)], ["64 KiB", "64 MiB", "24 GiB"]);
    }

    #[test]
    fn shared_memory_is_tried() {
        let dir = tempfile::tempdir().unwrap();
        assert!(matches!(shared_memory(dir.path()), Verdict::Ok(_) | Verdict::Note(_)));
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0, "nothing is left");
        assert!(matches!(shared_memory(&dir.path().join("no")), Verdict::Note(t) if t.contains("there is no")));
        // Somebody else's file is neither used nor removed.
        let taken = dir.path().join(format!("rustcomms-doctor-{}", std::process::id()));
        fs::write(&taken, "x").unwrap();
        assert!(matches!(shared_memory(dir.path()), Verdict::Problem(t) if t.contains("cannot be written")));
        assert_eq!(fs::read(&taken).unwrap(), b"x");
    }
}
