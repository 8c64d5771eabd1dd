//! Leaks: memory, descriptors and threads after ten thousand calls, and a thousand communicators made and ended.

use std::time::Duration;

use comm_conformance::Program;
use comm_core::{CommOptions, Communicator, Error, Result, op};

use crate::{Tally, vocabulary};

/// Calls and communicators in all, of which the first tenth are not measured: pools fill, tables grow to their size.
const CALLS: usize = 10_000;
const SPLITS: usize = 1_000;
const PARTS: usize = 10;
/// Growth that is no leak, in bytes.
const GROWTH: u64 = 1 << 20;
const TIMEOUT: Duration = Duration::from_secs(60);

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

/// One tenth of everything that the ranks of a process do, `ranks` of them.
fn part(comm: &Communicator, k: usize, ranks: usize) -> Result<()> {
    let from = vocabulary(comm.backend_name(), true).longest(500);
    let played = Program::random(k as u64, comm.size(), CALLS / PARTS / ranks, &from).play(comm, TIMEOUT);
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

/// This rank's part; the verdict in words. `ranks` share the process, and what it holds.
fn measured(comm: &Communicator, ranks: usize) -> Result<String> {
    part(comm, 0, ranks)?;
    let before = Held::now()?;
    // Nobody goes on before everybody has counted: ranks may share a process.
    comm.barrier()?;
    for k in 1..PARTS {
        part(comm, k, ranks)?;
    }
    let after = Held::now()?;
    comm.barrier()?;
    let grown = after.resident.saturating_sub(before.resident);
    let same = (before.descriptors, before.threads) == (after.descriptors, after.threads);
    let verdict = if grown <= GROWTH && same { "fine" } else { "LEAK" };
    Ok(format!(
        "{verdict}: rank {}: {} KiB more than after the first tenth (of {} KiB), descriptors {} -> {}, threads {} -> {}",
        comm.rank(),
        grown >> 10,
        before.resident >> 10,
        before.descriptors,
        after.descriptors,
        before.threads,
        after.threads
    ))
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
    let options = CommOptions::new().name("leaks").timeout(TIMEOUT);
    let ended = backend_sim::run_ranks_with(3, &options, Duration::from_secs(300), |comm| {
        let said = measured(&comm, comm.size())?;
        comm.finalize(TIMEOUT)?;
        Ok(said)
    });
    note(tally, "sim", ended.map_err(|e| e.to_string()));
    note(tally, "tcp", crate::processes::leaks(3));
}

/// A rank of a world of processes.
pub(crate) fn rank() -> Result<String> {
    let comm = backend_tcp::connect(CommOptions::new().name("leaks").timeout(TIMEOUT).bootstrap_timeout(TIMEOUT))?;
    let said = measured(&comm, 1)?;
    comm.finalize(TIMEOUT)?;
    Ok(said)
}
