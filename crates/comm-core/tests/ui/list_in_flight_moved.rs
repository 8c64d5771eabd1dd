//! A list given to an asynchronous operation cannot be touched before the work gives it back.
use comm_core::Communicator;

fn misuse(comm: &Communicator) {
    let mut list = vec![vec![0.0f32; 4]; comm.size()];
    let work = comm.all_gather_list_async(vec![1.0f32; 4], list).unwrap();
    list[0][0] = 2.0;
    let _ = work.wait();
}

fn main() {}
