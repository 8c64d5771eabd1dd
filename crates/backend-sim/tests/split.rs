//! Children of a communicator.

use backend_sim::run_ranks;
use comm_core::{ErrorKind, op};

#[test]
fn halves_colours_copies_and_outsiders() {
    let n = 5;
    run_ranks(n, move |comm| {
        let me = comm.rank();
        // Even ranks in reverse order; odd ranks stay outside.
        let list: Vec<usize> = if me % 2 == 0 { vec![4, 2, 0] } else { Vec::new() };
        let child = comm.split(&list, "evens")?;
        assert_eq!(child.is_some(), me % 2 == 0);
        if let Some(c) = &child {
            assert_eq!((c.rank(), c.size(), c.ranks()), ((4 - me) / 2, 3, &[4, 2, 0][..]));
            let mut all = [0u64; 3];
            c.all_gather(&[me as u64], &mut all)?;
            assert_eq!(all, [4, 2, 0]);
            // A grandchild.
            let grand = c
                .split_by(Some(i64::from(c.rank() == 0)), -(c.rank() as i64), "grand")?
                .expect("everybody has a colour");
            assert_eq!(grand.ranks(), if c.rank() == 0 { &[4][..] } else { &[0, 2][..] });
            grand.barrier()?;
        }
        let copy = comm.dup("copy")?;
        let mut x = [1i32; 3];
        copy.all_reduce(&mut x, op::Sum)?;
        comm.all_reduce(&mut x, op::Sum)?;
        assert_eq!(x, [25; 3]);
        assert_eq!(comm.split_by_host("host")?.size(), n);
        comm.finalize(std::time::Duration::from_secs(10))
    })
    .unwrap();
}

#[test]
fn bad_lists_are_errors_on_all_ranks_and_leave_the_parent_usable() {
    run_ranks(4, |comm| {
        let me = comm.rank();
        // A list that is bad in itself, on one rank.
        let list = if me == 2 { vec![0, 0] } else { vec![0, 1, 2, 3] };
        let e = comm.split(&list, "bad").map(|_| ()).unwrap_err();
        match e.kind() {
            ErrorKind::InvalidArgument { .. } if me == 2 => {}
            ErrorKind::PeerRefused { rank: 2, .. } if me != 2 => {}
            other => panic!("rank {me}: {other}"),
        }
        // Lists that do not fit together.
        let list = if me == 3 { vec![3] } else { vec![0, 1, 2, 3] };
        let e = comm.split(&list, "overlap").map(|_| ()).unwrap_err();
        assert!(matches!(e.kind(), ErrorKind::InvalidArgument { .. }), "rank {me}: {e}");
        let mut x = [me as i64];
        comm.all_reduce(&mut x, op::Sum)?;
        assert_eq!(x, [6]);
        comm.finalize(std::time::Duration::from_secs(10))
    })
    .unwrap();
}

#[test]
fn a_child_that_fails_leaves_the_parent_whole() {
    run_ranks(3, |comm| {
        let child = comm.dup("child")?;
        if comm.rank() == 1 {
            child.abort("test");
        }
        let e = loop {
            if let Err(e) = child.barrier() {
                break e;
            }
        };
        assert!(matches!(e.kind(), ErrorKind::Aborted { rank: 1, .. }), "{e}");
        let mut x = [1i64];
        comm.all_reduce(&mut x, op::Sum)?;
        assert_eq!(x, [3]);
        comm.finalize(std::time::Duration::from_secs(10))
    })
    .unwrap();
}
