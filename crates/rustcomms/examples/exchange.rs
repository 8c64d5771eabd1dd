//! Everybody has something for everybody: all_to_all and reduce_scatter, as a distributed transpose, a sample sort, and
//! sums of which each rank keeps a part.
//!
//! ```text
//! cargo run --example exchange            # starts 4 ranks itself; an argument changes the number
//! rustcomms run -n 4 -- target/debug/examples/exchange
//! ```

use std::process::ExitCode;
use std::time::Duration;

use rustcomms::{CommOptions, Communicator, Error, Result, launch, op};

pub(crate) fn main() -> Result<ExitCode> {
    if !launch::is_rank() {
        let number = |n: String| n.parse().map_err(|_| Error::invalid(format!("'{n}' is not a number of ranks")));
        return launch::spawn_local(std::env::args().nth(1).map_or(Ok(4), number)?);
    }
    let comm = rustcomms::connect(CommOptions::new())?;
    transpose(&comm)?;
    sample_sort(&comm)?;
    sums(&comm)?;
    if comm.rank() == 0 {
        println!("exchange: {} ranks, all right", comm.size());
    }
    comm.finalize(Duration::from_secs(30))?;
    Ok(ExitCode::SUCCESS)
}

/// A square matrix lies on the ranks by rows, `ROWS` each, and shall lie by columns.
fn transpose(comm: &Communicator) -> Result<()> {
    const ROWS: usize = 3;
    let (me, n) = (comm.rank(), comm.size());
    let side = ROWS * n;
    let value = |row: usize, column: usize| (row * side + column) as f64;
    let rows: Vec<f64> = (0..ROWS * side).map(|i| value(me * ROWS + i / side, i % side)).collect();
    // For each rank a tile of ROWS x ROWS: the columns that it will own, each one after the other.
    let tile = |r: usize| (0..ROWS).flat_map(move |c| (0..ROWS).map(move |row| (row, r * ROWS + c)));
    let out: Vec<f64> = (0..n).flat_map(tile).map(|(row, column)| rows[row * side + column]).collect();
    let mut tiles = vec![0.0; out.len()];
    comm.all_to_all(&out, &mut tiles)?;
    // Tile `r` has rows `r * ROWS..` of my columns.
    for (i, x) in tiles.iter().enumerate() {
        let (r, c, row) = (i / (ROWS * ROWS), i / ROWS % ROWS, i % ROWS);
        assert_eq!(*x, value(r * ROWS + row, me * ROWS + c));
    }
    Ok(())
}

/// Sorts numbers that are spread over the ranks: each rank ends with a range of them, the ranges in rank order.
fn sample_sort(comm: &Communicator) -> Result<()> {
    let (me, n) = (comm.rank(), comm.size());
    let mut mine: Vec<u32> =
        (0..1000 + 10 * me as u32).map(|i| (i + 7919 * me as u32).wrapping_mul(2_654_435_761)).collect();
    mine.sort_unstable();
    // Samples of all decide where the ranges end.
    let sample: Vec<u32> = (0..n).map(|i| mine[i * mine.len() / n]).collect();
    let mut samples = vec![0; n * n];
    comm.all_gather(&sample, &mut samples)?;
    samples.sort_unstable();
    let ends: Vec<usize> = (1..n).map(|r| mine.partition_point(|x| *x < samples[r * n])).chain([mine.len()]).collect();
    let sends: Vec<usize> = ends.iter().scan(0, |last, end| Some(end - std::mem::replace(last, *end))).collect();

    // Everybody learns what it will get, and gets it. Zero is a fine number of elements.
    let mut receives = vec![0u64; n];
    comm.all_to_all(&sends.iter().map(|c| *c as u64).collect::<Vec<_>>(), &mut receives)?;
    let receives: Vec<usize> = receives.iter().map(|c| *c as usize).collect();
    let mut sorted = vec![0; receives.iter().sum()];
    comm.all_to_all_v(&mine, &mut sorted, &sends, &receives)?;
    sorted.sort_unstable();

    // Nothing is lost, and no rank has anything below what the ranks before it have.
    let sum = |x: &[u32]| [x.len() as u64, x.iter().map(|x| u64::from(*x)).sum()];
    let (mut before, mut after) = (sum(&mine), sum(&sorted));
    comm.all_reduce(&mut before, op::Sum)?;
    comm.all_reduce(&mut after, op::Sum)?;
    assert_eq!(before, after);
    let mut most = [0u32];
    comm.exscan_into(&[sorted.last().copied().unwrap_or(0)], &mut most, op::Max)?;
    assert!(sorted.first().is_none_or(|x| *x >= most[0]), "rank {me} begins below {most:?}");
    Ok(())
}

/// Everybody has a value for everything; each rank wants the sums of its own part.
fn sums(comm: &Communicator) -> Result<()> {
    let (me, n) = (comm.rank(), comm.size());
    let total = (n * (n + 1) / 2) as i32;
    let all: Vec<i32> = (0..4 * n as i32).map(|i| i * (me as i32 + 1)).collect();
    let mut part = [0; 4];
    comm.reduce_scatter(&all, &mut part, op::Sum)?;
    assert!(part.iter().zip(4 * me as i32..).all(|(x, i)| *x == i * total));

    // Parts of different length: rank r has r elements of n (n - 1) / 2.
    let counts: Vec<usize> = (0..n).collect();
    let all = vec![me as i32 + 1; counts.iter().sum()];
    let mut part = vec![0; me];
    comm.reduce_scatter_v(&all, &mut part, &counts, op::Sum)?;
    assert_eq!(part, vec![total; me]);
    Ok(())
}
