//! Communicating while computing: asynchronous calls, scopes, groups and futures.
//!
//! ```text
//! cargo run --example overlap             # starts 4 ranks itself; an argument changes the number
//! rustcomms run -n 4 -- target/debug/examples/overlap
//! ```

use std::process::ExitCode;
use std::time::Duration;

use rustcomms::{CommOptions, Communicator, Error, Result, launch, op, wait_all, wait_any};

pub(crate) fn main() -> Result<ExitCode> {
    if !launch::is_rank() {
        let number = |n: String| n.parse().map_err(|_| Error::invalid(format!("'{n}' is not a number of ranks")));
        return launch::spawn_local(std::env::args().nth(1).map_or(Ok(4), number)?);
    }
    let comm = rustcomms::connect(CommOptions::new())?;
    owned(&comm)?;
    borrowed(&comm)?;
    grouped(&comm)?;
    // Any executor will do: completion wakes the task, nobody polls.
    pollster::block_on(awaited(&comm))?;
    if comm.rank() == 0 {
        println!("overlap: {} ranks, all right", comm.size());
    }
    comm.finalize(Duration::from_secs(30))?;
    Ok(ExitCode::SUCCESS)
}

/// The asynchronous form takes the buffer, so that nobody can touch it meanwhile, and the work gives it back.
/// All ranks start collectives in the same order; they may wait for them in any.
fn owned(comm: &Communicator) -> Result<()> {
    let (me, n) = (comm.rank() as f64, comm.size() as f64);
    let total = n * (n - 1.0) / 2.0;
    let layers = (1..=4).map(|layer| comm.all_reduce_async(vec![me * f64::from(layer); 5000], op::Sum));
    let works = layers.collect::<Result<Vec<_>>>()?;
    let busy: f64 = (1..10_000).map(f64::from).sum(); // … compute here …
    assert_eq!(busy, 49_995_000.0);
    for (layer, sum) in (1..).zip(wait_all(works)?) {
        assert!(sum.iter().all(|x| *x == total * f64::from(layer)));
    }

    // What is done first comes first. Two buffers come back as a pair.
    let mut works = Vec::new();
    for _ in 0..3 {
        works.push(comm.all_gather_async(vec![me], vec![0.0; comm.size()])?);
    }
    while !works.is_empty() {
        let (_, done) = wait_any(&mut works)?;
        let (mine, all) = done?;
        assert_eq!((mine[0], all[comm.size() - 1]), (me, n - 1.0));
    }
    Ok(())
}

/// In a scope buffers are borrowed. When it ends, all is done; no borrow can leave it.
fn borrowed(comm: &Communicator) -> Result<()> {
    let (me, n) = (comm.rank(), comm.size());
    let (mut sums, mut name, mine, mut all) = (vec![me as u64; 1000], *b"????", [me as u8], vec![0u8; n]);
    if me == 0 {
        name = *b"root";
    }
    comm.scope(|s| {
        let first = s.all_reduce(&mut sums, op::Sum)?;
        s.broadcast(&mut name, 0)?;
        s.all_gather(&mine, &mut all)?;
        // One borrow may come back early.
        let sums = first.wait()?;
        sums[0] += 1;
        Ok(())
    })?;
    assert_eq!((sums[0], sums[1]), ((n * (n - 1) / 2) as u64 + 1, (n * (n - 1) / 2) as u64));
    assert_eq!((&name, all), (b"root", (0..n as u8).collect()));
    Ok(())
}

/// A group is a scope whose operations a backend may launch together.
fn grouped(comm: &Communicator) -> Result<()> {
    let (me, n) = (comm.rank(), comm.size());
    let out: Vec<u32> = (0..n).map(|to| (100 * me + to) as u32).collect();
    let mut got = vec![[0u32]; n];
    // An all_to_all made by hand.
    comm.group(|g| {
        for (to, x) in out.iter().enumerate() {
            g.send(std::slice::from_ref(x), to)?;
        }
        for (from, x) in got.iter_mut().enumerate() {
            g.recv(x, from)?;
        }
        Ok(())
    })?;
    assert!(got.iter().enumerate().all(|(from, x)| x[0] == (100 * from + me) as u32));
    Ok(())
}

/// A work is a future.
async fn awaited(comm: &Communicator) -> Result<()> {
    let (me, n) = (comm.rank(), comm.size());
    let sum = comm.all_reduce_async(vec![1i32; 10], op::Sum)?;
    let ends = comm.scan_async([me as i32], op::Sum)?;
    assert_eq!(sum.await?, vec![n as i32; 10]);
    assert_eq!(ends.await?, [(me * (me + 1) / 2) as i32]);
    comm.barrier_async()?.await
}
