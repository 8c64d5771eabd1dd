//! The suite of comm-conformance over the backend of the example `own_backend`.

#[path = "../examples/own_backend/backend.rs"]
mod backend;

use comm_conformance::{Suite, Table};
use rustcomms::{CommOptions, Communicator, Device, Result};

/// The communicators of a world. Joining waits for nobody.
fn world(size: usize) -> Result<Vec<Communicator>> {
    let options = |rank| CommOptions::new().name(format!("suite {size}")).rank_and_size(rank, size);
    (0..size).map(|rank| rustcomms::new_comm("board", Device::CPU, options(rank))).collect()
}

#[test]
fn the_example_passes_the_suite() {
    backend::register();
    let table = Table::from_toml(include_str!("../examples/own_backend/expected.toml")).unwrap();
    let report = Suite::new(table).worlds(&[1, 2, 4]).seed(3).run(world);
    println!("{report}");
    assert_eq!(report.failed(), 0, "{report}");
    assert!(report.passed() > 100, "{report}");
}
