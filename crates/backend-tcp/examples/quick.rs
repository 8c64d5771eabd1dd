//! A first contact: every rank contributes its number, all print the sum.

use comm_core::{CommOptions, Result, op};

fn main() -> Result<()> {
    let comm = backend_tcp::connect(CommOptions::new())?;
    let mut x = vec![comm.rank() as i64 + 1; 1000];
    comm.all_reduce(&mut x, op::Sum)?;
    println!("rank {} of {}: {}", comm.rank(), comm.size(), x[0]);
    comm.finalize(std::time::Duration::from_secs(10))
}
