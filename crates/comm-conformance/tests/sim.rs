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

#[test]
fn ranks_can_collect_their_reports_themselves() {
    let suite = suite().worlds(&[2]).filter("broadcast");
    let comms = backend_sim::world(2, &CommOptions::new().name("collected")).unwrap();
    let ranks: Vec<_> = comms
        .into_iter()
        .map(|comm| {
            let suite = suite.clone();
            std::thread::spawn(move || {
                let mut report = suite.run_rank(&comm);
                let whole = suite.gather(&comm, &report).unwrap();
                suite.finish(&comm, &mut report);
                (report, whole)
            })
        })
        .collect();
    let mut ranks: Vec<_> = ranks.into_iter().map(|t| t.join().unwrap()).collect();
    let whole = ranks[0].1.take().unwrap();
    assert!(ranks[1].1.is_none());
    assert!(whole.failed() == 0 && whole.passed() > 50, "{whole}");
    let apart = suite.merge(&ranks.into_iter().map(|(r, _)| Some(r)).collect::<Vec<_>>());
    assert_eq!(apart, whole);
}
