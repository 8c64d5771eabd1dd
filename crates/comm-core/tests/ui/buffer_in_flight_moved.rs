//! A buffer given to an asynchronous operation cannot be touched before the work gives it back.
use comm_core::{Communicator, op};

fn misuse(comm: &Communicator) {
    let mut x = vec![1.0f32; 4];
    let work = comm.all_reduce_async(x, op::Sum).unwrap();
    x[0] = 2.0;
    let _ = work.wait();
}

fn main() {}
