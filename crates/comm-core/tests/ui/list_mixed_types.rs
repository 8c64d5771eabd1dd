//! All buffers of a list have one element type, which is that of the other side.
use comm_core::{Communicator, op};

fn sides(comm: &Communicator, x: &[f32], outputs: &mut [Vec<i32>]) {
    let _ = comm.all_gather_list(x, outputs);
}

fn within(comm: &Communicator, a: &mut [f32], b: &mut [f64]) {
    let _ = comm.gather_list(&[1.0f32], Some(&mut [a, b]), 0);
}

fn operator(comm: &Communicator, inputs: &[Vec<f32>], y: &mut [f32]) {
    let _ = comm.reduce_scatter_list(inputs, y, op::BAnd);
}

fn main() {}
