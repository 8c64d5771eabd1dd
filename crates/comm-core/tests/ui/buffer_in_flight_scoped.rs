//! A buffer borrowed by a scoped operation cannot be touched inside the scope.
use comm_core::{Communicator, op};

fn misuse(comm: &Communicator) {
    let mut x = vec![1.0f32; 4];
    let _ = comm.scope(|s| {
        s.all_reduce(&mut x, op::Sum)?;
        x[0] = 2.0;
        Ok(())
    });
}

fn main() {}
