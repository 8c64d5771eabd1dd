//! Leaks: memory, descriptors and threads after ten thousand calls, and a thousand communicators made and ended.

use std::time::Duration;

use comm_conformance::Program;
use comm_core::{CommOptions, Communicator, Error, Result, op};

use crate::{Tally, vocabulary};

/// Calls and communicators in all, of which the first tenth are not measured: pools fill, tables grow to their size.
const CALLS: usize = 10_000;
const SPLITS: usize = 1_000;
const PARTS: usize = 10;
/// Environment of a process that is measured. What is resident is then about what is allocated: the C library keeps
/// nothing that has been freed, and does not grow by a heap per thread. Left alone it keeps one to two MiB more or less
/// from one moment to the next, for threads that allocate at once, which is no leak of ours.
pub(crate) const ALLOCATOR: [(&str, &str); 4] = [
    ("MALLOC_ARENA_MAX", "1"),
    ("MALLOC_MMAP_THRESHOLD_", "65536"),
    ("MALLOC_TRIM_THRESHOLD_", "65536"),
    ("MALLOC_TOP_PAD_", "0"),
];
/// Growth that is no leak, in bytes.
const GROWTH: u64 = 1 << 20;
const TIMEOUT: Duration = Duration::from_secs(60);
/// Longest time for all of it.
pub(crate) const RUN: Duration = Duration::from_secs(300);
/// Ranks of a world that is measured.
const RANKS: usize = 3;

/// What a process holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Held {
    resident: u64,
    descriptors: usize,
    threads: usize,
}

impl Held {
    fn now() -> Result<Self> {
        let failed = |e: std::io::Error| Error::io("reading /proc/self", &e);
        let count = |dir: &str| std::fs::read_dir(dir).map(Iterator::count).map_err(failed);
        let statm = std::fs::read_to_string("/proc/self/statm").map_err(failed)?;
        let pages = statm.split_whitespace().nth(1).and_then(|w| w.parse::<u64>().ok());
        let pages = pages.ok_or_else(|| Error::invalid("/proc/self/statm is not what it should be"))?;
        Ok(Self { resident: pages * page(), descriptors: count("/proc/self/fd")?, threads: count("/proc/self/task")? })
    }
}

/// Bytes of a page of memory.
fn page() -> u64 {
    rustix::param::page_size() as u64
}

/// One tenth of everything that the ranks of a process do, `ranks` of them. All tenths are the same: the largest buffers
/// come in each.
fn part(comm: &Communicator, ranks: usize) -> Result<()> {
    let from = vocabulary(comm.backend_name(), true).longest(500);
    let played = Program::random(0, comm.size(), CALLS / PARTS / ranks, &from).play(comm, TIMEOUT);
    if let Some((call, e)) = played.failed {
        return Err(e.with_context(|| comm_core::Context { op: Some(call.into()), ..Default::default() }));
    }
    if let Some(w) = played.wrong.first() {
        return Err(Error::invalid(w.clone()));
    }
    let (n, me) = (comm.size(), comm.rank());
    for i in 0..SPLITS / PARTS / ranks {
        // All, in another order; or the even and the odd ones; or without one.
        let ranks: Vec<usize> = match i % 3 {
            0 => (0..n).rev().collect(),
            1 => (0..n).filter(|r| r % 2 == me % 2).collect(),
            _ if me == i % n => Vec::new(),
            _ => (0..n).filter(|r| *r != i % n).collect(),
        };
        if let Some(child) = comm.split(&ranks, "child")? {
            let mut x = [1i64];
            child.all_reduce(&mut x, op::Sum)?;
            if x[0] as usize != ranks.len() {
                return Err(Error::invalid(format!("a sum over {} ranks is {}", ranks.len(), x[0])));
            }
            child.finalize(TIMEOUT)?;
        }
    }
    comm.barrier()
}

/// What this process holds, with everybody at rest; `None` on ranks that share it with rank 0.
fn at_rest(comm: &Communicator, ranks: usize) -> Result<Option<Held>> {
    comm.barrier()?;
    // One of them counts: the descriptor by which another reads what there is would count too.
    let held = if ranks == 1 || comm.rank() == 0 { Some(Held::now()?) } else { None };
    comm.barrier()?;
    Ok(held)
}

/// This rank's part; the verdict in words, of one rank per process. `ranks` share the process, and what it holds.
fn measured(comm: &Communicator, ranks: usize) -> Result<Option<String>> {
    part(comm, ranks)?;
    let before = at_rest(comm, ranks)?;
    for _ in 1..PARTS {
        part(comm, ranks)?;
    }
    let (Some(before), Some(after)) = (before, at_rest(comm, ranks)?) else { return Ok(None) };
    let grown = after.resident.saturating_sub(before.resident);
    let same = (before.descriptors, before.threads) == (after.descriptors, after.threads);
    let verdict = if grown <= GROWTH && same { "fine" } else { "LEAK" };
    Ok(Some(format!(
        "{verdict}: rank {}: {} KiB more than after the first tenth (of {} KiB), descriptors {} -> {}, threads {} -> {}",
        comm.rank(),
        grown >> 10,
        before.resident >> 10,
        before.descriptors,
        after.descriptors,
        before.threads,
        after.threads
    )))
}

fn note(tally: &mut Tally, over: &str, said: std::result::Result<Vec<String>, String>) {
    match said {
        Ok(lines) => {
            for line in lines {
                println!("leaks over {over}: {line}");
                tally.note(if line.starts_with("fine") { Ok(()) } else { Err(format!("leaks over {over}: {line}")) });
            }
        }
        Err(e) => tally.note(Err(format!("leaks over {over}: {e}"))),
    }
}

/// Threads of one process, and processes.
pub(crate) fn run(tally: &mut Tally) {
    println!("leaks: {CALLS} calls, {SPLITS} communicators made and finalized, per process");
    note(tally, "sim", crate::processes::leaks(Leaks::Threads));
    note(tally, "tcp", crate::processes::leaks(Leaks::Processes));
}

/// How the ranks that are measured are made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Leaks {
    /// Over `sim`, in one process.
    Threads,
    /// Over `tcp`.
    Processes,
}

impl Leaks {
    pub(crate) const ALL: [Self; 2] = [Self::Threads, Self::Processes];

    /// Processes that it takes.
    pub(crate) const fn processes(self) -> usize {
        match self {
            Self::Threads => 1,
            Self::Processes => RANKS,
        }
    }

    /// What a process is told so that it knows.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Threads => "leaks over sim",
            Self::Processes => "leaks over tcp",
        }
    }

    /// A process's part.
    pub(crate) fn measure(self) -> Result<String> {
        let options = CommOptions::new().name("leaks").timeout(TIMEOUT).bootstrap_timeout(TIMEOUT);
        let rank = |comm: Communicator, ranks| {
            let said = measured(&comm, ranks)?;
            comm.finalize(TIMEOUT)?;
            Ok(said)
        };
        let said = match self {
            Self::Threads => {
                let all = backend_sim::run_ranks_with(RANKS, &options, RUN, move |comm| rank(comm, RANKS))
                    .map_err(|e| Error::invalid(e.to_string()))?;
                all.into_iter().flatten().next()
            }
            Self::Processes => rank(backend_tcp::connect(options)?, 1)?,
        };
        said.ok_or_else(|| Error::invalid("nobody has measured"))
    }
}
