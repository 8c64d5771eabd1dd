//! Input and output have the same element type.
use comm_core::{Communicator, op};

fn misuse(comm: &Communicator) {
    let x = vec![1.0f32; 4];
    let mut y = vec![1i32; 4];
    let _ = comm.all_reduce_into(&x, &mut y, op::Sum);
}

fn main() {}
