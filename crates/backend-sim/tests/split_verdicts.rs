//! Splits that do not fit together: an error on all ranks that says who passed what, and a parent that goes on.

use backend_sim::{run_ranks, run_ranks_with};
use comm_core::{CommOptions, Communicator, Error, ErrorKind, Result, SplitOptions, op};
use std::time::Duration;

const LONG: Duration = Duration::from_secs(20);

/// The parent works, and its next split too.
fn goes_on(comm: &Communicator) -> Result<()> {
    let mut x = [comm.rank() as u64];
    comm.all_reduce(&mut x, op::Sum)?;
    assert_eq!(x[0] as usize, comm.size() * (comm.size() - 1) / 2);
    let child = comm.dup("next")?;
    child.barrier()?;
    child.finalize(LONG)
}

type Lists = &'static [(&'static [usize], &'static str)];

/// What ranks pass, and what all are told.
const MISFITS: &[(Lists, &[&str])] = &[
    (
        &[(&[0, 1], "a"), (&[1, 2], "a"), (&[1, 2], "a"), (&[3], "a")],
        &["split lists overlap", "rank 0 passed [0, 1]", "rank 1", "passed [1, 2]"],
    ),
    (
        &[(&[0, 1, 2, 3], "a"), (&[0, 1, 2, 3], "a"), (&[], "a"), (&[], "a")],
        &["rank 0 passed [0, 1, 2, 3]", "ranks [2, 3] are in it and passed an empty list"],
    ),
    (
        &[(&[0, 1, 2, 3], "a"), (&[0, 1, 2, 3], "a"), (&[0, 1, 2, 3], "a"), (&[3], "a")],
        &["rank 0 passed [0, 1, 2, 3]", "rank 3", "passed [3]"],
    ),
    (
        &[(&[0, 1], "a"), (&[1, 0], "a"), (&[2, 3], "a"), (&[2, 3], "a")],
        &["different orders", "rank 0 passed [0, 1]", "rank 1 passed [1, 0]"],
    ),
    (
        &[(&[0, 1], "a"), (&[0, 1], "a"), (&[2, 3], "left"), (&[2, 3], "right")],
        &["names of the child differ", "rank 2 calls it 'left'", "rank 3 'right'"],
    ),
];

#[test]
fn each_misfit_is_told_apart_on_all_ranks() {
    run_ranks(4, |comm| {
        for (lists, parts) in MISFITS {
            let (list, name) = lists[comm.rank()];
            let sync = comm.split(list, name).map(drop).unwrap_err();
            let work = comm.split_async(list, name)?.wait().map(drop).unwrap_err();
            for e in [sync, work] {
                assert!(matches!(e.kind(), ErrorKind::InvalidArgument { .. }), "{e}");
                for part in *parts {
                    assert!(e.to_string().contains(part), "{part} in {e}");
                }
                assert!(e.to_string().contains("split #") && e.is_recoverable(), "{e}");
            }
            goes_on(&comm)?;
        }
        comm.finalize(LONG)
    })
    .unwrap();
}

#[test]
fn in_a_larger_world_too() {
    let options = CommOptions::new().name("large");
    run_ranks_with(12, &options, LONG + LONG, |comm| {
        let all: Vec<usize> = (0..12).collect();
        let list = if comm.rank() == 7 { Vec::new() } else { all };
        let e = comm.split(&list, "most").map(drop).unwrap_err();
        assert!(e.to_string().contains("rank 7 is in it and passed an empty list"), "{e}");
        goes_on(&comm)?;
        comm.finalize(LONG)
    })
    .unwrap();
}

/// The rank with the bad argument has the error, the others hear of it.
#[track_caller]
fn refused_by(rank: usize, me: usize, e: &Error, what: &str) {
    match e.kind() {
        ErrorKind::InvalidArgument { .. } if me == rank => {}
        ErrorKind::PeerRefused { rank: r, .. } if me != rank && *r == rank => {}
        _ => panic!("rank {me}: {e}"),
    }
    assert!(e.to_string().contains(what) && e.is_recoverable(), "rank {me}: {e}");
}

#[test]
fn a_list_that_is_bad_in_itself_is_that_ranks_error() {
    run_ranks(3, |comm| {
        let me = comm.rank();
        for (bad, what) in [(&[1, 1][..], "twice"), (&[1, 9], "9 is out of range"), (&[0, 2], "does not contain")] {
            let list = if me == 1 { bad } else { &[0, 1, 2] };
            refused_by(1, me, &comm.split(list, "x").map(drop).unwrap_err(), what);
            let work = comm.split_async(list, "x").and_then(comm_core::Work::wait);
            refused_by(1, me, &work.map(drop).unwrap_err(), what);
        }
        let options = |bad: bool| if bad { SplitOptions::new("x").hint("algo", "rnig") } else { "x".into() };
        for e in [
            comm.dup(options(me == 2)).map(drop).unwrap_err(),
            comm.split_by(Some(1), 0, if me == 2 { SplitOptions::new("x").hint("agol", "") } else { "x".into() })
                .map(drop)
                .unwrap_err(),
        ] {
            refused_by(2, me, &e, if e.to_string().contains("rnig") { "rnig" } else { "agol" });
        }
        goes_on(&comm)?;
        comm.finalize(LONG)
    })
    .unwrap();
}

#[test]
fn a_rank_with_open_work_refuses() {
    run_ranks(3, |comm| {
        let me = comm.rank();
        let open = if me == 0 { Some((comm.recv_async(vec![0u8], 1)?, comm.recv_async(vec![0u8], 2)?)) } else { None };
        refused_by(0, me, &comm.dup("x").map(drop).unwrap_err(), "2 operations are in flight");
        refused_by(0, me, &comm.split_by(None, 0, "x").map(drop).unwrap_err(), "2 operations are in flight");
        if let Some((a, b)) = open {
            comm.barrier()?;
            a.wait()?;
            b.wait()?;
        } else {
            comm.barrier()?;
            comm.send(&[1u8], 0)?;
        }
        goes_on(&comm)?;
        let one = if me == 2 { Some(comm.recv_async(vec![0u8], 1)?) } else { None };
        let e = comm.split_async(&[0, 1, 2], "x").and_then(comm_core::Work::wait).map(drop).unwrap_err();
        refused_by(2, me, &e, "1 operation is in flight");
        if me == 1 {
            comm.send(&[1u8], 2)?;
        }
        one.map_or(Ok(()), |w| w.wait().map(drop))?;
        comm.barrier()?;
        goes_on(&comm)?;
        comm.finalize(LONG)
    })
    .unwrap();
}

#[test]
fn an_observers_veto_is_a_refusal() {
    struct Veto;
    impl comm_core::Observer for Veto {
        fn pre(&self, call: &comm_core::Call<'_>) -> Result<(), String> {
            let veto = call.desc.operation == comm_core::Operation::Split;
            if veto { Err("no children".into()) } else { Ok(()) }
        }
    }
    run_ranks(2, |comm| {
        let guard = (comm.rank() == 1).then(|| comm.observe(std::sync::Arc::new(Veto)));
        refused_by(1, comm.rank(), &comm.dup("x").map(drop).unwrap_err(), "no children");
        let e = comm.dup_async("x").and_then(comm_core::Work::wait).map(drop).unwrap_err();
        refused_by(1, comm.rank(), &e, "no children");
        drop(guard);
        goes_on(&comm)?;
        comm.finalize(LONG)
    })
    .unwrap();
}
