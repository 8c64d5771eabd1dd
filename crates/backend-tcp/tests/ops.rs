//! Every operation over ranks that are processes.

mod common;
#[path = "../../backend-sim/tests/suite/mod.rs"]
mod suite;

use comm_core::{CommOptions, Communicator, Result};
use common::{options, world, world_with};
use suite::Rank;

const WORLDS: &[usize] = &[1, 2, 3, 4, 5, 8];

fn worlds(test: &str, sizes: &[usize], f: impl Fn(&Rank<'_>) -> Result<()>) {
    for &n in sizes {
        world(test, n, |comm| f(&Rank::new(comm)));
    }
}

fn more(name: &str) -> Result<Communicator> {
    backend_tcp::connect(options().name(name))
}

fn checked() -> CommOptions {
    options().checksum(true)
}

#[test]
fn every_algorithm_form_and_root() {
    worlds("every_algorithm_form_and_root", WORLDS, suite::collectives::algorithms_forms_roots);
}

#[test]
fn every_operator_and_type() {
    worlds("every_operator_and_type", WORLDS, suite::collectives::operators);
}

#[test]
fn large_buffers() {
    worlds("large_buffers", WORLDS, suite::collectives::large);
}

#[test]
fn identical_bits_on_all_ranks() {
    worlds("identical_bits_on_all_ranks", &[1, 2, 3, 5, 8], suite::collectives::identical_bits);
}

#[test]
fn types_at_run_time() {
    worlds("types_at_run_time", &[1, 2, 3], suite::collectives::dynamic);
}

#[test]
fn messages() {
    worlds("messages", WORLDS, suite::movement::all);
}

#[test]
fn many_outstanding() {
    worlds("many_outstanding", &[1, 2, 3, 4, 8], suite::concurrent::outstanding);
}

#[test]
fn several_threads() {
    worlds("several_threads", &[1, 2, 3, 5], suite::concurrent::threads);
}

#[test]
fn several_communicators() {
    worlds("several_communicators", &[1, 2, 3, 5], |r| suite::concurrent::communicators(r, &more));
}

#[test]
fn one_rank_ahead() {
    worlds("one_rank_ahead", &[1, 2, 3, 4], suite::ahead::one_rank_ahead);
}

#[test]
fn unposted_large_messages_stay_at_the_sender() {
    worlds("unposted_large_messages_stay_at_the_sender", &[2, 3], |r| suite::channels::unposted_large(r, true));
}

#[test]
fn unposted_small_messages_are_bounded() {
    worlds("unposted_small_messages_are_bounded", &[2, 3], |r| suite::channels::unposted_small(r, true));
}

#[test]
fn crossed_communicators() {
    worlds("crossed_communicators", &[2, 3], |r| suite::channels::crossed(r, &more));
}

#[test]
fn futures_without_a_driver() {
    worlds("futures_without_a_driver", &[1, 2, 3, 5], |r| {
        suite::futures::blocking(r)?;
        suite::futures::tokio_tasks(r, 0)?;
        suite::futures::tokio_tasks(r, 2)
    });
}

/// With a checksum on every frame.
#[test]
fn checksums() {
    for n in [2, 3, 5] {
        world_with("checksums", n, checked(), |comm| {
            assert!(comm.options().checksum);
            let r = Rank::new(comm);
            suite::collectives::large(&r)?;
            suite::movement::all(&r)
        });
    }
}
