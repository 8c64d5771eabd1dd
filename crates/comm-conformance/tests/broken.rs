//! The suite can fail: every kind of fault is found, and named.

mod faulty;

use std::time::{Duration, Instant};

use comm_conformance::{Report, Suite, Table};
use faulty::{Fault, world};

fn run(fault: Fault, filter: &str) -> Report {
    let suite = Suite::new(Table::complete("sim")).worlds(&[3]).filter(filter).timeout(Duration::from_secs(10));
    suite.run(|n| world(n, fault))
}

/// Some cases fail, others do not, and a complaint says this.
fn is_found(fault: Fault, filter: &str, said: &str) {
    let sound = run(Fault::None, filter);
    assert_eq!(sound.failed(), 0, "without a fault: {sound}");
    let report = run(fault, filter);
    assert!(report.failed() > 0 && report.passed() > 0, "{fault:?}: {report}");
    assert!(report.failures().iter().any(|f| f.to_string().contains(said)), "{fault:?}: {report}");
    assert_eq!(report.passed() + report.failed(), sound.passed());
}

#[test]
fn a_wrong_element() {
    is_found(Fault::WrongElement, "all_reduce Out Sync i32", "elements wrong");
}

#[test]
fn an_input_that_is_written() {
    is_found(Fault::ClobbersInput, "all_reduce Out Sync", "input, block 0");
}

#[test]
fn memory_outside_that_is_written() {
    is_found(Fault::Spills, "all_gather Out Sync", "memory outside was written, 1 element(s) after");
}

#[test]
fn bits_that_differ_within_the_tolerance() {
    is_found(Fault::Differs, "all_reduce Out Sync f32", "the ranks do not have identical bits");
    let report = run(Fault::Differs, "all_reduce Out Sync f32 sum Rounded");
    assert!(report.failures().iter().all(|f| f.what.contains("identical bits")), "{report}");
}

#[test]
fn a_contribution_that_is_dropped() {
    is_found(Fault::DropsRank, "all_reduce Out Sync f32", "elements wrong");
}

#[test]
fn an_output_that_must_be_kept() {
    is_found(Fault::WritesOnRankZero, "exscan Out Sync", "instead of what was there before");
}

#[test]
fn an_order_that_is_not_kept() {
    is_found(Fault::IgnoresOrder, "scan Out Sync affine", "elements wrong");
}

#[test]
fn a_barrier_that_does_not_wait() {
    is_found(Fault::DeafBarrier, "barrier", "before rank");
}

#[test]
fn support_that_is_denied() {
    is_found(Fault::Denies, "support of", "is expected, but not supported: too much work");
}

#[test]
fn support_that_the_table_does_not_know() {
    let table = "backend = 'sim'\n[[unsupported]]\noperations = ['gather']\ndtypes = ['u8']\nreason = 'old'\n";
    let suite = Suite::new(Table::from_toml(table).unwrap()).worlds(&[2]).filter("support of");
    let report = suite.run(|n| world(n, Fault::None));
    assert_eq!(report.failed(), 1, "{report}");
    assert!(report.to_string().contains("is supported, but the table says it is not (old)"), "{report}");
    assert!(report.to_string().contains("expected to be answered with Unsupported, but it went well"), "{report}");
}

/// After a call that ends badly the rest is not run, and is not forgotten.
fn ends_the_world(fault: Fault, said: &str) {
    let suite = Suite::new(Table::complete("sim")).worlds(&[3]).filter("all_to_all Out");
    let suite = suite.timeout(Duration::from_secs(2)).deadline(Duration::from_secs(8));
    let sound = suite.run(|n| world(n, Fault::None));
    let start = Instant::now();
    let report = suite.run(|n| world(n, fault));
    assert!(start.elapsed() < Duration::from_secs(40), "it took {:?}", start.elapsed());
    assert_eq!(report.passed() + report.failed(), sound.passed());
    assert!(report.failed() > sound.passed() / 2, "{report}");
    assert!(report.failures().iter().any(|f| f.to_string().contains(said)), "{fault:?}: {report}");
}

#[test]
fn a_call_that_fails() {
    ends_the_world(Fault::Fails, "nothing is wrong, but it fails");
}

#[test]
fn a_call_that_panics() {
    ends_the_world(Fault::Panics, "panicked: a backend panicked");
}

#[test]
fn a_call_that_never_ends() {
    ends_the_world(Fault::Hangs, "rank 1: all cases: it left no report");
}

#[test]
fn a_world_that_cannot_be_made() {
    let suite = Suite::new(Table::complete("sim")).worlds(&[2]).filter("barrier");
    let report = suite.run(|_| world(1, Fault::None));
    assert_eq!(report.passed(), 0);
    assert!(report.failed() > 5 && report.to_string().contains("made with 1 communicators"), "{report}");
}
