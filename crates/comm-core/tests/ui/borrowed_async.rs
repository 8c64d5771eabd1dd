//! The asynchronous form takes ownership; a borrow could end while the operation is in flight.
use comm_core::{Communicator, op};

fn misuse(comm: &Communicator) {
    let mut x = vec![1.0f32; 4];
    let work = comm.all_reduce_async(&mut x, op::Sum).unwrap();
    std::mem::forget(work);
    drop(x);
}

fn main() {}
