//! Every operation over ranks that are threads of this process.

mod suite;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use backend_sim::run_ranks_with;
use comm_core::{CommOptions, Communicator, Result};
use suite::{END, Rank};

const WORLDS: &[usize] = &[1, 2, 3, 4, 5, 7, 8];

fn options() -> CommOptions {
    CommOptions::new().timeout(Duration::from_secs(60))
}

fn worlds(sizes: &[usize], f: impl Fn(&Rank<'_>) -> Result<()> + Send + Sync + Clone + 'static) {
    for &n in sizes {
        let f = f.clone();
        let body = move |comm: Communicator| {
            f(&Rank::new(&comm))?;
            comm.finalize(END)
        };
        run_ranks_with(n, &options().name(format!("world of {n}")), Duration::from_secs(110), body)
            .unwrap_or_else(|e| panic!("world of {n}: {e}"));
    }
}

/// Further communicators between the same threads. Names are shared by the whole process.
fn more(r: &Rank<'_>, test: &str, name: &str) -> Result<Communicator> {
    let o = options().name(format!("{test}/{}/{name}", r.n)).rank_and_size(r.me, r.n);
    backend_sim::connect(o.bootstrap_timeout(Duration::from_secs(30)))
}

#[test]
fn every_algorithm_form_and_root() {
    worlds(WORLDS, suite::collectives::algorithms_forms_roots);
}

#[test]
fn every_operator_and_type() {
    worlds(WORLDS, suite::collectives::operators);
}

#[test]
fn large_buffers() {
    worlds(WORLDS, suite::collectives::large);
}

#[test]
fn identical_bits_on_all_ranks() {
    worlds(&[1, 2, 3, 5, 8], suite::collectives::identical_bits);
}

#[test]
fn types_at_run_time() {
    worlds(&[1, 2, 3, 5], suite::collectives::dynamic);
}

#[test]
fn messages() {
    worlds(WORLDS, suite::movement::all);
}

#[test]
fn many_outstanding() {
    worlds(&[1, 2, 3, 4, 8], suite::concurrent::outstanding);
}

#[test]
fn several_threads() {
    worlds(&[1, 2, 3, 5], suite::concurrent::threads);
}

#[test]
fn several_communicators() {
    worlds(&[1, 2, 3, 5], |r| suite::concurrent::communicators(r, &|name| more(r, "several", name)));
}

#[test]
fn one_rank_ahead() {
    worlds(&[1, 2, 3, 4], suite::ahead::one_rank_ahead);
}

#[test]
fn unposted_messages_do_not_block_collectives() {
    worlds(&[2, 3], |r| suite::channels::unposted_large(r, false));
    worlds(&[2, 3], |r| suite::channels::unposted_small(r, false));
}

#[test]
fn crossed_communicators() {
    worlds(&[2, 3], |r| suite::channels::crossed(r, &|name| more(r, "crossed", name)));
}

#[test]
fn futures_without_a_driver() {
    static TURN: AtomicUsize = AtomicUsize::new(0);
    worlds(&[1, 2, 3, 5], |r| {
        TURN.fetch_add(1, Ordering::Relaxed);
        suite::futures::blocking(r)?;
        suite::futures::tokio_tasks(r, 0)?;
        suite::futures::tokio_tasks(r, 2)
    });
    assert_eq!(TURN.load(Ordering::Relaxed), 11, "every rank of every world took part");
}
