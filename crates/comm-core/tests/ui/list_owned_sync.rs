//! The synchronous form borrows; the results in owned buffers would be lost.
use comm_core::Communicator;

fn misuse(comm: &Communicator, x: &[f32]) {
    let _ = comm.all_gather_list(x, vec![vec![0.0f32; 4]; 2]);
}

fn main() {}
