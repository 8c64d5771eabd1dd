//! The rustcomms command: run, perf.
fn main() {}
