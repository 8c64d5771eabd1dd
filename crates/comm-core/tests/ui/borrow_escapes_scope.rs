//! A buffer that lives only inside the scope's closure cannot be borrowed by a scoped operation.
use comm_core::{Communicator, op};

fn misuse(comm: &Communicator) {
    let _ = comm.scope(|s| {
        let mut x = vec![1.0f32; 4];
        s.all_reduce(&mut x, op::Sum)?;
        Ok(())
    });
}

fn main() {}
