//! A scoped handle cannot leave its scope.
use comm_core::{Communicator, op};

fn misuse(comm: &Communicator) {
    let mut x = vec![1.0f32; 4];
    let work = comm.scope(|s| s.all_reduce(&mut x, op::Sum)).unwrap();
    let _ = work.wait();
}

fn main() {}
