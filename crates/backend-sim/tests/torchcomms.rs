//! torchcomms' own tables of values and expectations, over ranks that are threads; see `suite/torchcomms.rs`.

mod suite;

use comm_core::{CommOptions, Result};
use suite::Rank;

/// Theirs run on 4 ranks only.
const WORLDS: &[usize] = &[1, 2, 3, 4, 5, 8];

fn worlds(f: fn(&Rank<'_>) -> Result<()>) {
    for &n in WORLDS {
        let options = CommOptions::new().timeout(std::time::Duration::from_secs(60));
        let deadline = std::time::Duration::from_secs(120);
        backend_sim::run_ranks_with(n, &options, deadline, move |comm| {
            f(&Rank::new(&comm))?;
            comm.finalize(suite::END)
        })
        .unwrap();
    }
}

#[test]
fn all_reduce_test() {
    worlds(suite::torchcomms::all_reduce_test);
}

#[test]
fn broadcast_test() {
    worlds(suite::torchcomms::broadcast_test);
}

#[test]
fn reduce_test() {
    worlds(suite::torchcomms::reduce_test);
}

#[test]
fn all_gather_test() {
    worlds(suite::torchcomms::all_gather_test);
}

#[test]
fn all_gather_single_test() {
    worlds(suite::torchcomms::all_gather_single_test);
}

#[test]
fn all_gather_v_test() {
    worlds(suite::torchcomms::all_gather_v_test);
}

#[test]
fn reduce_scatter_test() {
    worlds(suite::torchcomms::reduce_scatter_test);
}

#[test]
fn reduce_scatter_single_test() {
    worlds(suite::torchcomms::reduce_scatter_single_test);
}

#[test]
fn reduce_scatter_v_test() {
    worlds(suite::torchcomms::reduce_scatter_v_test);
}

#[test]
fn all_to_all_test() {
    worlds(suite::torchcomms::all_to_all_test);
}

#[test]
fn all_to_all_single_test() {
    worlds(suite::torchcomms::all_to_all_single_test);
}

#[test]
fn all_to_all_v_single_test() {
    worlds(suite::torchcomms::all_to_all_v_single_test);
}

#[test]
fn scatter_test() {
    worlds(suite::torchcomms::scatter_test);
}

#[test]
fn gather_test() {
    worlds(suite::torchcomms::gather_test);
}

#[test]
fn gather_single_test() {
    worlds(suite::torchcomms::gather_single_test);
}

#[test]
fn barrier_test() {
    worlds(suite::torchcomms::barrier_test);
}

#[test]
fn send_recv_test() {
    worlds(suite::torchcomms::send_recv_test);
}

#[test]
fn batch_send_recv_test() {
    worlds(suite::torchcomms::batch_send_recv_test);
}

#[test]
fn options_test() {
    worlds(suite::torchcomms::options_test);
}
