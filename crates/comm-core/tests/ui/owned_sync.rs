//! The synchronous form borrows; the result in an owned buffer would be lost.
use comm_core::{Communicator, op};

fn misuse(comm: &Communicator) {
    let x = [1.0f32; 4];
    let _ = comm.all_reduce(x, op::Sum);
}

fn main() {}
