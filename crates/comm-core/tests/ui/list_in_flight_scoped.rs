//! A buffer of a list borrowed by a scoped operation cannot be touched inside the scope, nor lent to another one.
use comm_core::{Communicator, op};

fn touched(comm: &Communicator) {
    let (x, mut list) = (vec![1.0f32; 4], vec![vec![0.0f32; 4]; comm.size()]);
    let _ = comm.scope(|s| {
        s.all_gather_list(&x, &mut list)?;
        list[0][0] = 2.0;
        Ok(())
    });
}

fn lent_twice(comm: &Communicator) {
    let (inputs, mut shared) = (vec![vec![1.0f32; 4]; comm.size()], vec![0.0f32; 4]);
    let _ = comm.scope(|s| {
        s.reduce_scatter_list(&inputs, &mut shared, op::Sum)?;
        s.all_to_all_v_list(&inputs, [&mut shared[..]]).map(drop)
    });
}

fn main() {}
