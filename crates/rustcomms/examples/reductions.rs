//! Reductions: all_reduce, reduce, scan and exscan, with operators that are types.
//!
//! ```text
//! cargo run --example reductions          # starts 4 ranks itself; an argument changes the number
//! rustcomms run -n 4 -- target/debug/examples/reductions
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
    everybody(&comm)?;
    the_root(&comm)?;
    prefixes(&comm)?;
    own_operators(&comm)?;
    if comm.rank() == 0 {
        println!("reductions: {} ranks, all right", comm.size());
    }
    comm.finalize(Duration::from_secs(30))?;
    Ok(ExitCode::SUCCESS)
}

/// Everybody gets the result, in place or in another buffer. An operator that a type does not have, such as
/// `op::BXor` on floats, does not compile.
fn everybody(comm: &Communicator) -> Result<()> {
    let (me, n) = (comm.rank() as f32, comm.size() as f32);
    let mut x = [me, me * me];
    comm.all_reduce(&mut x, op::Sum)?;
    assert_eq!(x, [n * (n - 1.0) / 2.0, n * (n - 1.0) * (2.0 * n - 1.0) / 6.0]);

    let (mine, mut all) = ([1u32 << (comm.rank() % 32)], [0u32]);
    comm.all_reduce_into(&mine, &mut all, op::BOr)?;
    assert_eq!((mine, all[0].count_ones()), ([1 << (comm.rank() % 32)], comm.size().min(32) as u32));

    // A weighted sum: each rank brings a factor of its own.
    let mut x = [1.0f64; 3];
    comm.all_reduce(&mut x, op::PreMulSum(f64::from(me + 1.0)))?;
    assert_eq!(x, [f64::from(n * (n + 1.0) / 2.0); 3]);
    Ok(())
}

/// Only the root gets the result; the others' buffers are unchanged.
fn the_root(comm: &Communicator) -> Result<()> {
    let root = comm.size() - 1;
    let mut x = [comm.rank() as i64, -1];
    comm.reduce(&mut x, op::Max, root)?;
    // Here rank and maximum happen to be the same at the root, elsewhere it is what it was.
    assert_eq!(x, [comm.rank() as i64, -1]);

    let mut product = [0u64];
    let output = (comm.rank() == root).then_some(&mut product);
    comm.reduce_into(&[2u64], output, op::Prod, root)?;
    assert_eq!(product, [if comm.rank() == root { 1 << comm.size() } else { 0 }]);
    Ok(())
}

/// Where does this rank's part of a list begin? At the sum of the lengths before it: an exclusive scan.
fn prefixes(comm: &Communicator) -> Result<()> {
    let length = |rank: usize| 10 + rank as u64 % 3;
    let (me, mine) = (comm.rank(), [length(comm.rank())]);
    // Nothing comes before rank 0: its output stays as it is.
    let mut start = [0];
    comm.exscan_into(&mine, &mut start, op::Sum)?;
    assert_eq!(start, [(0..me).map(length).sum()]);

    let mut end = mine;
    comm.scan(&mut end, op::Sum)?;
    assert_eq!(end[0], start[0] + mine[0]);
    Ok(())
}

/// The best value and who has it, and an operator of one's own.
fn own_operators(comm: &Communicator) -> Result<()> {
    let (me, n) = (comm.rank(), comm.size());
    // Of equal values the lowest index wins.
    let mut best = [op::Loc { value: (me as f32 - n as f32 / 2.0).abs(), index: me as u32 }];
    comm.all_reduce(&mut best, op::MinLoc)?;
    assert_eq!(best[0].index, (n / 2) as u32);

    // Maps compose to maps, and their order matters: with `false` contributions are folded in rank order.
    let mut all = [Map::of(me)];
    let then = |first: &mut [Map], next: &[Map]| first.iter_mut().zip(next).for_each(|(f, n)| *f = f.then(*n));
    comm.all_reduce(&mut all, op::custom(then, false))?;
    assert_eq!(all[0].apply(1), (0..n).fold(1, |x, rank| Map::of(rank).apply(x)));
    Ok(())
}

/// The map from `x` to `a x + b`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Map {
    a: i64,
    b: i64,
}

// SAFETY: `repr(C)`, two plain numbers of one size: no padding, and every bit pattern is a value.
unsafe impl rustcomms::Pod for Map {}

impl Map {
    const fn of(rank: usize) -> Self {
        Self { a: 2, b: rank as i64 }
    }

    const fn then(self, next: Self) -> Self {
        Self { a: next.a * self.a, b: next.a * self.b + next.b }
    }

    const fn apply(self, x: i64) -> i64 {
        self.a * x + self.b
    }
}
