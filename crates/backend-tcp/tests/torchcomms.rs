//! torchcomms' own tables of values and expectations, over ranks that are processes; see backend-sim's
//! `suite/torchcomms.rs`.

mod common;
#[path = "../../backend-sim/tests/suite/mod.rs"]
mod suite;

use comm_core::Result;
use common::world;
use suite::Rank;

/// Theirs run on 4 ranks only.
fn worlds(test: &str, f: impl Fn(&Rank<'_>) -> Result<()>) {
    for n in [1, 2, 3, 4] {
        world(test, n, |comm| f(&Rank::new(comm)));
    }
}

#[test]
fn all_reduce_test() {
    worlds("all_reduce_test", suite::torchcomms::all_reduce_test);
}

#[test]
fn broadcast_test() {
    worlds("broadcast_test", suite::torchcomms::broadcast_test);
}

#[test]
fn reduce_test() {
    worlds("reduce_test", suite::torchcomms::reduce_test);
}

#[test]
fn all_gather_test() {
    worlds("all_gather_test", suite::torchcomms::all_gather_test);
}

#[test]
fn all_gather_single_test() {
    worlds("all_gather_single_test", suite::torchcomms::all_gather_single_test);
}

#[test]
fn all_gather_v_test() {
    worlds("all_gather_v_test", suite::torchcomms::all_gather_v_test);
}

#[test]
fn reduce_scatter_test() {
    worlds("reduce_scatter_test", suite::torchcomms::reduce_scatter_test);
}

#[test]
fn reduce_scatter_single_test() {
    worlds("reduce_scatter_single_test", suite::torchcomms::reduce_scatter_single_test);
}

#[test]
fn reduce_scatter_v_test() {
    worlds("reduce_scatter_v_test", suite::torchcomms::reduce_scatter_v_test);
}

#[test]
fn all_to_all_test() {
    worlds("all_to_all_test", suite::torchcomms::all_to_all_test);
}

#[test]
fn all_to_all_single_test() {
    worlds("all_to_all_single_test", suite::torchcomms::all_to_all_single_test);
}

#[test]
fn all_to_all_v_single_test() {
    worlds("all_to_all_v_single_test", suite::torchcomms::all_to_all_v_single_test);
}

#[test]
fn scatter_test() {
    worlds("scatter_test", suite::torchcomms::scatter_test);
}

#[test]
fn gather_test() {
    worlds("gather_test", suite::torchcomms::gather_test);
}

#[test]
fn gather_single_test() {
    worlds("gather_single_test", suite::torchcomms::gather_single_test);
}

#[test]
fn barrier_test() {
    worlds("barrier_test", suite::torchcomms::barrier_test);
}

#[test]
fn send_recv_test() {
    worlds("send_recv_test", suite::torchcomms::send_recv_test);
}

#[test]
fn batch_send_recv_test() {
    worlds("batch_send_recv_test", suite::torchcomms::batch_send_recv_test);
}

#[test]
fn options_test() {
    worlds("options_test", suite::torchcomms::options_test);
}
