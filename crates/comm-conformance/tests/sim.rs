//! A slice of the suite over ranks in one process; `cargo xtask conformance` runs all of it.

use collectives::Algorithm;
use comm_conformance::{Algo, Suite, Table};
use comm_core::CommOptions;

fn suite() -> Suite {
    Suite::new(Table::from_toml(include_str!("../expected/sim.toml")).unwrap())
        .algorithms(Algorithm::ALL.iter().map(|a| Algo::new(a.operation(), a.name(), a.keeps_order())))
        .seed(7)
}

#[test]
fn sim_does_what_is_expected_of_it() {
    let suite = suite();
    for size in [1, 3] {
        let comms = backend_sim::world(size, &CommOptions::new().name("conformance")).unwrap();
        let report = suite.run_world(comms);
        assert_eq!(report.failed(), 0, "{report}");
        assert!(report.passed() > 800, "{report}");
    }
}
