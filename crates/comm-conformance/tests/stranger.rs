//! A backend that somebody else might write, with a support table that has holes.

mod board;

use comm_conformance::{Suite, Table};

fn table() -> Table {
    Table::from_toml(include_str!("../expected/example.toml")).unwrap()
}

#[test]
fn a_small_backend_passes_with_its_own_table() {
    let report = Suite::new(table()).worlds(&[1, 3]).run(board::world);
    assert_eq!(report.failed(), 0, "{report}");
    assert!(report.passed() > 2000, "{report}");
    let counts: Vec<(&str, usize)> = report.counts().collect();
    assert!(counts.iter().any(|(op, n)| *op == "all_to_all_v" && *n > 50), "{counts:?}");
    assert!(counts.iter().all(|(op, _)| *op != "scan"), "{counts:?}");
}

#[test]
fn it_does_not_pass_with_the_table_of_one_that_does_everything() {
    let report = Suite::new(Table::complete("board")).worlds(&[2]).filter("support of").run(board::world);
    // Scan and exscan, and the hole in all_reduce.
    assert_eq!(report.failed(), 3, "{report}");
    let said: Vec<String> = report.failures().iter().map(ToString::to_string).collect();
    assert!(said.iter().any(|s| s.contains("all_reduce of e4m3 avg Sync is expected, but not supported")), "{said:?}");
}

#[test]
fn the_table_is_that_of_the_backend() {
    let report = Suite::new(Table::complete("other")).worlds(&[1]).filter("support of send").run(board::world);
    assert!(report.to_string().contains("the support table is that of other, not board"), "{report}");
    assert!(report.failed() > 0);
}
