//! Bitwise operators are not defined on floats.
use comm_core::{Communicator, op};

fn misuse(comm: &Communicator) {
    let mut x = vec![1.0f32; 4];
    let _ = comm.all_reduce(&mut x, op::BAnd);
}

fn main() {}
