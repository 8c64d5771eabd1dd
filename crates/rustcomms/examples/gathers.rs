//! Collecting and dealing out: all_gather, gather and scatter, with equal and uneven shares, in one buffer or in
//! a buffer per rank.
//!
//! ```text
//! cargo run --example gathers             # starts 4 ranks itself; an argument changes the number
//! rustcomms run -n 4 -- target/debug/examples/gathers
//! ```

use std::process::ExitCode;
use std::time::Duration;

use rustcomms::{CommOptions, Communicator, Error, Result, launch};

pub(crate) fn main() -> Result<ExitCode> {
    if !launch::is_rank() {
        let number = |n: String| n.parse().map_err(|_| Error::invalid(format!("'{n}' is not a number of ranks")));
        return launch::spawn_local(std::env::args().nth(1).map_or(Ok(4), number)?);
    }
    let comm = rustcomms::connect(CommOptions::new())?;
    everybody_knows(&comm)?;
    uneven_shares(&comm)?;
    a_farm(&comm)?;
    if comm.rank() == 0 {
        println!("gathers: {} ranks, all right", comm.size());
    }
    comm.finalize(Duration::from_secs(30))?;
    Ok(ExitCode::SUCCESS)
}

/// Everybody gets everybody's shard, in rank order.
fn everybody_knows(comm: &Communicator) -> Result<()> {
    let (me, n) = (comm.rank(), comm.size());
    let mine = [me as f32, -(me as f32)];
    let mut all = vec![0.0; 2 * n];
    comm.all_gather(&mine, &mut all)?;
    let right = |all: &[f32]| all.chunks(2).enumerate().all(|(r, c)| c == [r as f32, -(r as f32)]);
    assert!(right(&all));

    // In place: the shard lies already where it belongs, and nothing is copied.
    let mut all = vec![0.0; 2 * n];
    all[2 * me..][..2].copy_from_slice(&mine);
    comm.all_gather_in_place(&mut all)?;
    assert!(right(&all));

    // Into a buffer per rank.
    let mut each = vec![vec![0.0; 2]; n];
    comm.all_gather_list(&mine, &mut each)?;
    assert!(right(&each.concat()));
    Ok(())
}

/// Ranks have shares of different length: first the lengths, then the shares.
fn uneven_shares(comm: &Communicator) -> Result<()> {
    let (me, n) = (comm.rank(), comm.size());
    // Some have nothing at all.
    let mine = vec![me as u16; (7 * me) % 5];
    let mut lengths = vec![0u64; n];
    comm.all_gather(&[mine.len() as u64], &mut lengths)?;
    let counts: Vec<usize> = lengths.iter().map(|l| *l as usize).collect();
    let mut all = vec![u16::MAX; counts.iter().sum()];
    comm.all_gather_v(&mine, &mut all, &counts)?;
    let want: Vec<u16> = (0..n).flat_map(|r| vec![r as u16; (7 * r) % 5]).collect();
    assert_eq!(all, want);

    // Only the root collects; the others need neither counts nor an output.
    let root = n / 2;
    let mut all = (me == root).then(|| vec![u16::MAX; want.len()]);
    comm.gather_v(&mine, all.as_mut(), if me == root { &counts } else { &[] }, root)?;
    assert!(all.is_none_or(|all| all == want));
    Ok(())
}

/// Rank 0 deals out work and collects the results.
fn a_farm(comm: &Communicator) -> Result<()> {
    let (me, n) = (comm.rank(), comm.size());
    let work: Option<Vec<i64>> = (me == 0).then(|| (0..3 * n as i64).collect());
    let mut mine = [0; 3];
    comm.scatter(work.as_ref(), &mut mine, 0)?;
    let squares = mine.map(|x| x * x);
    let mut results = (me == 0).then(|| vec![0; 3 * n]);
    comm.gather(&squares, results.as_mut(), 0)?;
    if let Some(results) = results {
        assert!(results.iter().enumerate().all(|(i, x)| *x == (i * i) as i64));
    }

    // With a buffer per rank they may differ in length. `None` has to say of what type it would be.
    let mut mine = vec![0u8; me + 1];
    let parts: Option<Vec<Vec<u8>>> = (me == 0).then(|| (0..n).map(|r| vec![r as u8; r + 1]).collect());
    comm.scatter_v_list(parts.as_ref(), &mut mine, 0)?;
    assert_eq!(mine, vec![me as u8; me + 1]);
    let mut back: Option<Vec<Vec<u8>>> = (me == 0).then(|| (0..n).map(|r| vec![0; r + 1]).collect());
    comm.gather_v_list(&mine, back.as_mut(), 0)?;
    assert_eq!(back, parts);
    Ok(())
}
