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
    let suite = suite().worlds(&[1, 3]);
    let report = suite.run(|n| backend_sim::world(n, &CommOptions::new().name(format!("conformance-{n}"))));
    assert_eq!(report.failed(), 0, "{report}");
    assert!(report.passed() > 3000, "{report}");
}
