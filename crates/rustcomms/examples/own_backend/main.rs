//! A backend of your own, used like any other.
//!
//! ```text
//! cargo run --example own_backend
//! ```
//!
//! `backend.rs` is all of the backend: under 200 lines, without `unsafe`.

mod backend;

use std::time::Duration;

use rustcomms::{CommOptions, Communicator, Device, ErrorKind, Result, op};

const RANKS: usize = 4;

fn main() -> Result<()> {
    backend::register();
    // Ranks are threads here, so this program needs no launcher.
    std::thread::scope(|s| {
        let ranks: Vec<_> = (0..RANKS).map(|rank| s.spawn(move || run(rank))).collect();
        ranks.into_iter().try_for_each(|r| r.join().unwrap_or_else(|p| std::panic::resume_unwind(p)))
    })
}

fn run(rank: usize) -> Result<()> {
    let options = CommOptions::new().rank_and_size(rank, RANKS).timeout(Duration::from_secs(30));
    let comm = rustcomms::new_comm("board", Device::CPU, options.clone().name("first"))?;

    let mut word = if rank == 2 { *b"hello" } else { *b"....." };
    comm.broadcast(&mut word, 2)?;
    assert_eq!(&word, b"hello");

    // The adapter makes asynchronous and scoped forms of the blocking methods.
    let sum = comm.all_reduce_async(vec![rank as f64; 3], op::Sum)?;
    let mut all = [0; RANKS];
    comm.all_gather(&[rank as u64], &mut all)?;
    assert_eq!((sum.wait()?, all), (vec![6.0; 3], [0, 1, 2, 3]));

    let (next, prev) = ((rank + 1) % RANKS, (rank + RANKS - 1) % RANKS);
    let mut from = [0];
    comm.send(&[rank as u64], next)?;
    comm.recv(&mut from, prev)?;
    assert_eq!(from, [prev as u64]);
    comm.barrier()?;
    comm.finalize(Duration::from_secs(10))?;

    missing(&rustcomms::new_comm("board", Device::CPU, options.name("second"))?);
    if rank == 0 {
        println!("own_backend: {RANKS} ranks over backend {}: all right", comm.backend_name());
    }
    Ok(())
}

/// One rank does not come to a call. The others do not hang, and learn who it was.
fn missing(comm: &Communicator) {
    let late = RANKS - 1;
    if comm.rank() == late {
        std::thread::sleep(Duration::from_millis(600));
        return;
    }
    let e = comm.with(rustcomms::CallOptions::new().timeout(Duration::from_millis(100))).barrier().unwrap_err();
    // The first to give up tells the others why.
    let named = match e.kind() {
        ErrorKind::Timeout { missing, .. } => missing.contains(&late),
        ErrorKind::Aborted { cause, .. } => cause.contains("timed out") && cause.contains("rank"),
        _ => false,
    };
    assert!(named, "{e}");
}
