//! Messages between two ranks: send, recv, sendrecv, tags, batches.
//!
//! ```text
//! cargo run --example messages            # starts 4 ranks itself; an argument changes the number
//! rustcomms run -n 4 -- target/debug/examples/messages
//! ```

use std::process::ExitCode;
use std::time::Duration;

use rustcomms::{CallOptions, CommOptions, Communicator, Error, Result, launch};

pub(crate) fn main() -> Result<ExitCode> {
    if !launch::is_rank() {
        let number = |n: String| n.parse().map_err(|_| Error::invalid(format!("'{n}' is not a number of ranks")));
        return launch::spawn_local(std::env::args().nth(1).map_or(Ok(4), number)?);
    }
    let comm = rustcomms::connect(CommOptions::new())?;
    down_the_line(&comm)?;
    ring(&comm)?;
    tags(&comm)?;
    neighbours(&comm)?;
    halo(&comm)?;
    if comm.rank() == 0 {
        println!("messages: {} ranks, all right", comm.size());
    }
    comm.finalize(Duration::from_secs(30))?;
    Ok(ExitCode::SUCCESS)
}

/// A word travels from rank 0 to the last; each rank adds its number. `recv` waits, `send` returns when the buffer may
/// be reused, which for a short message like this is at once.
fn down_the_line(comm: &Communicator) -> Result<()> {
    let (me, n) = (comm.rank(), comm.size());
    let mut total = [0u32];
    if me > 0 {
        comm.recv(&mut total, me - 1)?;
        assert_eq!(total, [(0..me as u32).sum()]);
    }
    total[0] += me as u32;
    if me + 1 < n { comm.send(&total, me + 1) } else { Ok(()) }
}

/// Everybody sends to the right and receives from the left. With long messages, `send` and then `recv` would wait
/// for each other all round the ring; `sendrecv` does both at once. A world of one sends to itself.
fn ring(comm: &Communicator) -> Result<()> {
    let (me, n) = (comm.rank(), comm.size());
    let (right, left) = ((me + 1) % n, (me + n - 1) % n);
    let (out, mut got) = (vec![me as f64; 200_000], vec![-1.0; 200_000]);
    comm.sendrecv(&out, &mut got, right, left)?;
    assert!(got.iter().all(|x| *x == left as f64));
    Ok(())
}

/// Messages of a pair match by tag and, within a tag, by order. So the receiver may take them in another order
/// than they were sent.
fn tags(comm: &Communicator) -> Result<()> {
    const HEAD: u32 = 1;
    const BODY: u32 = 2;
    let with = |tag| comm.with(CallOptions::new().tag(tag));
    let (me, n) = (comm.rank(), comm.size());
    if me == 0 && n > 1 {
        with(BODY).send(&[10u8, 20, 30], n - 1)?;
        with(HEAD).send(&[3u16], n - 1)?;
    }
    if me == n - 1 && n > 1 {
        let mut len = [0u16];
        with(HEAD).recv(&mut len, 0)?;
        let mut body = vec![0u8; usize::from(len[0])];
        with(BODY).recv(&mut body, 0)?;
        assert_eq!(body, [10, 20, 30]);
    }
    Ok(())
}

/// A batch posts all its messages together, so that their order cannot deadlock: here a value to each neighbour.
fn neighbours(comm: &Communicator) -> Result<()> {
    let (me, n) = (comm.rank(), comm.size());
    let (right, left) = ((me + 1) % n, (me + n - 1) % n);
    let (to_left, to_right) = ([me as i32; 8], [-(me as i32); 8]);
    let (mut from_left, mut from_right) = ([0i32; 8], [0i32; 8]);
    // What leaves to the left arrives from the right. Tags tell the two apart where both neighbours are one rank.
    let mut batch = comm.batch().tag(7).send(&to_left, left)?.recv(&mut from_right, right)?;
    batch = batch.tag(8).send(&to_right, right)?.recv(&mut from_left, left)?;
    assert_eq!(batch.ops().len(), 4);
    batch.issue()?;
    assert_eq!((from_right, from_left), ([right as i32; 8], [-(left as i32); 8]));
    Ok(())
}

/// The exchange of borders that stencil codes make in each step. This batch owns its buffers and gives them back when its
/// messages are done; with new contents they go out again. Meanwhile the rank updates the cells that need no neighbour.
fn halo(comm: &Communicator) -> Result<()> {
    const CELLS: usize = 4;
    let (me, n) = (comm.rank(), comm.size());
    let (right, left) = ((me + 1) % n, (me + n - 1) % n);
    let whole: Vec<u64> = (0..n * CELLS).map(|i| (i * i) as u64).collect();
    let mut cells = whole[me * CELLS..][..CELLS].to_vec();

    let mut batch = comm.batch_async();
    batch.tag(7);
    let to_left = batch.send(vec![cells[0]], left)?;
    let from_right = batch.recv(vec![0u64], right)?;
    batch.tag(8);
    let to_right = batch.send(vec![cells[CELLS - 1]], right)?;
    let from_left = batch.recv(vec![0u64], left)?;
    for _ in 0..STEPS {
        let work = batch.issue()?;
        let inner: Vec<u64> = cells.windows(3).map(|w| w[0] + w[2]).collect();
        let mut buffers = work.wait()?;
        let [before, after] = [from_left, from_right].map(|slot| buffers.get_mut(slot).map_or(0, |b| b[0]));
        cells = [&[before + cells[1]], &*inner, &[cells[CELLS - 2] + after]].concat();
        for (slot, cell) in [(to_left, cells[0]), (to_right, cells[CELLS - 1])] {
            if let Some(buffer) = buffers.get_mut(slot) {
                buffer[0] = cell;
            }
        }
        batch = comm.batch_again(buffers)?;
    }
    assert_eq!(cells, alone(whole)[me * CELLS..][..CELLS]);
    Ok(())
}

/// Steps of [`halo`].
const STEPS: usize = 3;

/// What [`halo`] computes, on one rank: each cell becomes the sum of its two neighbours, round the ring.
fn alone(mut cells: Vec<u64>) -> Vec<u64> {
    let n = cells.len();
    for _ in 0..STEPS {
        cells = (0..n).map(|i| cells[(i + n - 1) % n] + cells[(i + 1) % n]).collect();
    }
    cells
}
