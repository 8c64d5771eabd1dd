//! The backend of the example `own_backend`, over ranks that are threads.

#[path = "../examples/own_backend/backend.rs"]
mod backend;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Once};
use std::time::{Duration, Instant};

use rustcomms::{CommOptions, Communicator, Device, ErrorKind, OpQuery, Operation, PeerCause, Result, op};

const LONG: Duration = Duration::from_secs(30);

fn join(name: &str, rank: usize, size: usize) -> Result<Communicator> {
    static ONCE: Once = Once::new();
    ONCE.call_once(backend::register);
    let options = CommOptions::new().name(name).rank_and_size(rank, size).timeout(LONG);
    rustcomms::new_comm("board", Device::CPU, options)
}

/// Runs `body` as the ranks of a world; nothing may take as long as a timeout.
fn ranks<T: Send>(size: usize, body: impl Fn(Communicator) -> T + Sync) -> Vec<T> {
    static NAMES: AtomicUsize = AtomicUsize::new(0);
    let name = format!("world {}", NAMES.fetch_add(1, Ordering::SeqCst));
    let start = Instant::now();
    let out = std::thread::scope(|s| {
        let run = |rank| body(join(&name, rank, size).unwrap());
        let threads: Vec<_> = (0..size).map(|rank| s.spawn(move || run(rank))).collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    });
    assert!(start.elapsed() < LONG, "somebody waited for a timeout");
    out
}

fn end(comm: &Communicator) {
    comm.finalize(LONG).unwrap();
}

#[test]
fn the_six_operations_move_bytes() {
    for n in [1, 2, 3, 5] {
        ranks(n, |comm| {
            let me = comm.rank();
            for root in 0..n {
                let mut x: Vec<u32> = (0..50).map(|i| if me == root { i * 7 + root as u32 } else { 0 }).collect();
                comm.broadcast(&mut x, root).unwrap();
                assert!(x.iter().enumerate().all(|(i, v)| *v == i as u32 * 7 + root as u32));
            }
            let mut x = [me as i64 + 1, -(me as i64)];
            comm.all_reduce(&mut x, op::Sum).unwrap();
            let total = (n * (n + 1) / 2) as i64;
            assert_eq!(x, [total, n as i64 - total]);
            // Does not commute: the first contribution wins.
            let mut x = [me as u8 + 10];
            comm.all_reduce(&mut x, op::custom(|_: &mut [u8], _: &[u8]| (), false)).unwrap();
            assert_eq!(x, [10]);
            let mut x = [2.0f32];
            comm.all_reduce(&mut x, op::PreMulSum(0.5)).unwrap();
            assert_eq!(x, [n as f32]);
            let mut all = vec![0u16; 2 * n];
            all[2 * me..2 * me + 2].copy_from_slice(&[me as u16, 9]);
            comm.all_gather_in_place(&mut all).unwrap();
            assert!(all.chunks(2).enumerate().all(|(r, c)| c == [r as u16, 9]));
            let (next, prev) = ((me + 1) % n, (me + n - 1) % n);
            // Longer than any buffer between: nobody may wait for anybody here.
            let (out, mut got) = (vec![me as u8; 1 << 20], vec![0u8; 1 << 20]);
            comm.send(&out, next).unwrap();
            comm.recv(&mut got, prev).unwrap();
            assert!(got.iter().all(|b| *b == prev as u8));
            comm.sendrecv(&out, &mut got, prev, next).unwrap();
            assert!(got.iter().all(|b| *b == next as u8));
            comm.barrier().unwrap();
            end(&comm);
            assert!(!comm.is_failed());
        });
    }
}

#[test]
fn supports_says_what_calls_do() {
    ranks(2, |comm| {
        let supported = |op| comm.supports(&OpQuery::new(op)).is_supported();
        assert!(
            [Operation::Send, Operation::Batch, Operation::SendRecv, Operation::Barrier].into_iter().all(supported)
        );
        assert!(![Operation::Reduce, Operation::Scatter, Operation::Scan, Operation::Split].into_iter().any(supported));
        // One rank asks for what there is not; the other does not wait for it.
        let e = match comm.rank() {
            0 => comm.reduce(&mut [1u8], op::Sum, 0).unwrap_err(),
            _ => comm.barrier().unwrap_err(),
        };
        match e.kind() {
            ErrorKind::Unsupported { .. } => assert_eq!(comm.rank(), 0),
            ErrorKind::PeerRefused { rank: 0, reason } => assert!(reason.contains("not supported"), "{e}"),
            _ => panic!("{e}"),
        }
        comm.barrier().unwrap();
        // Also when the others, whose call is another one, are there before.
        match comm.rank() {
            1 => {
                std::thread::sleep(Duration::from_millis(30));
                comm.reduce(&mut [1u8], op::Sum, 0).unwrap_err();
            }
            _ => {
                let e = comm.barrier().unwrap_err();
                assert!(matches!(e.kind(), ErrorKind::PeerRefused { rank: 1, .. }), "{e}");
            }
        }
        comm.barrier().unwrap();
        end(&comm);
    });
}

#[test]
fn a_missing_rank_is_named() {
    for n in [2, 4] {
        let errors = ranks(n, |comm| {
            let late = comm.rank() == n - 1;
            if late {
                std::thread::sleep(Duration::from_millis(400));
            }
            let short = rustcomms::CallOptions::new().timeout(Duration::from_millis(100));
            let e = comm.with(short).all_reduce(&mut [1u8], op::Sum).unwrap_err();
            // It stays so.
            assert_eq!(comm.barrier().unwrap_err().kind(), e.kind());
            assert_eq!(comm.cause().unwrap().kind(), e.kind());
            e
        });
        let named =
            |e: &rustcomms::Error| matches!(e.kind(), ErrorKind::Timeout { missing, .. } if *missing == [n - 1]);
        assert!(errors[..n - 1].iter().any(named), "{errors:?}");
        for e in errors.iter().filter(|e| !named(e)) {
            let told = matches!(e.kind(), ErrorKind::Aborted { cause, .. } if cause.contains("timed out"));
            assert!(told && e.to_string().contains(&format!("rank {}", n - 1)), "{e}");
        }
    }
}

#[test]
fn a_rank_that_does_not_join_is_named() {
    let comm = join("alone", 0, 2).unwrap();
    let e = comm.with(rustcomms::CallOptions::new().timeout(Duration::from_millis(50))).barrier().unwrap_err();
    assert!(matches!(e.kind(), ErrorKind::Timeout { missing, .. } if *missing == [1]), "{e}");
    // One that comes afterwards learns that it is too late, and does not wait.
    let e = join("alone", 1, 2).unwrap().barrier().unwrap_err();
    assert!(matches!(e.kind(), ErrorKind::Aborted { rank: 0, cause } if cause.contains("timed out")), "{e}");
    let e = join("large", 2, 2).unwrap_err();
    assert!(matches!(e.kind(), ErrorKind::InvalidArgument { .. }), "{e}");
}

#[test]
fn it_works_on_host_memory() {
    join("host", 0, 1).unwrap();
    let options = CommOptions::new().name("device").rank_and_size(0, 1);
    let e = rustcomms::new_comm("board", Device::cuda(None), options).unwrap_err();
    assert!(matches!(e.kind(), ErrorKind::InvalidArgument { .. }), "{e}");
}

#[test]
fn a_name_serves_again() {
    for size in [2, 1, 3] {
        let comms: Vec<_> = (0..size).map(|rank| join("again", rank, size).unwrap()).collect();
        std::thread::scope(|s| {
            comms.iter().for_each(|comm| drop(s.spawn(|| comm.barrier().and_then(|()| comm.finalize(LONG)).unwrap())));
        });
    }
}

#[test]
fn a_rank_that_leaves_is_named() {
    ranks(3, |comm| {
        comm.barrier().unwrap();
        if comm.rank() == 1 {
            return;
        }
        let e = if comm.rank() == 0 { comm.recv(&mut [0u8], 1) } else { comm.barrier() }.unwrap_err();
        assert!(matches!(e.kind(), ErrorKind::PeerFailed { rank: 1, cause: PeerCause::Closed }), "{e}");
    });
}

#[test]
fn different_calls_are_shown_to_all() {
    for odd in 0..3 {
        let errors = ranks(3, |comm| {
            let mut x = vec![0u8; if comm.rank() == odd { 4 } else { 5 }];
            comm.all_reduce(&mut x, op::Sum).unwrap_err()
        });
        for (rank, e) in errors.iter().enumerate() {
            let ErrorKind::Mismatch { seq: 0, ranks, theirs, ours } = e.kind() else { panic!("{e}") };
            assert_eq!((theirs.count, ours.count), if rank == odd { (5, 4) } else { (4, 5) }, "{e}");
            assert!(if rank == odd { !ranks.is_empty() && !ranks.contains(&odd) } else { *ranks == [odd] }, "{e}");
        }
    }
    // A message, also in a batch: its sender, who was done, is told of it in the next call.
    ranks(2, |comm| {
        let e = match comm.rank() {
            0 => comm.batch().send(&[1i32], 1).unwrap().issue().and_then(|()| comm.barrier()),
            _ => comm.batch().recv(&mut [1f32], 0).unwrap().issue(),
        };
        let e = e.unwrap_err();
        match e.kind() {
            ErrorKind::Mismatch { seq: 0, ranks, theirs, ours } => {
                assert!(comm.rank() == 1 && *ranks == [0] && theirs.dtype != ours.dtype, "{e}");
            }
            ErrorKind::Aborted { rank: 1, cause } => {
                assert!(comm.rank() == 0 && ["i32", "f32"].iter().all(|dtype| cause.contains(dtype)), "{e}");
            }
            _ => panic!("{e}"),
        }
    });
}

#[test]
fn a_refused_call_harms_nobody_else() {
    ranks(3, |comm| {
        for _ in 0..3 {
            let mut x = [0u8; 5];
            let out = if comm.rank() == 2 { &mut x[..3] } else { &mut x[..] };
            let input = [1u8; 5];
            let e = comm.all_reduce_into(&input, out, op::Sum).unwrap_err();
            match e.kind() {
                ErrorKind::InvalidArgument { .. } => assert_eq!(comm.rank(), 2),
                ErrorKind::PeerRefused { rank: 2, .. } => {}
                _ => panic!("{e}"),
            }
        }
        comm.barrier().unwrap();
        end(&comm);
    });
}

#[test]
fn a_refused_message_harms_nobody_else() {
    struct Veto;
    impl rustcomms::Observer for Veto {
        fn pre(&self, _: &rustcomms::Call<'_>) -> Result<(), String> {
            Err("not today".to_owned())
        }
    }
    for (receiver_first, n) in [(false, 2), (true, 2), (true, 1)] {
        ranks(n, |comm| {
            let (from, to) = (comm.rank() == 0, comm.rank() == n - 1);
            let late = if receiver_first { from } else { to };
            let pause = || std::thread::sleep(Duration::from_millis(if late && n > 1 { 30 } else { 0 }));
            // The sender does not want it.
            pause();
            if from {
                let _veto = comm.observe(Arc::new(Veto));
                let e = comm.send(&[1u8], n - 1).unwrap_err();
                assert!(matches!(e.kind(), ErrorKind::InvalidArgument { .. }), "{e}");
            }
            if to {
                let e = comm.recv(&mut [0u8], 0).unwrap_err();
                assert!(matches!(e.kind(), ErrorKind::PeerRefused { rank: 0, .. }), "{e}");
            }
            comm.barrier().unwrap();
            // The receiver does not. A sender who was there before is done.
            pause();
            if to {
                let _veto = comm.observe(Arc::new(Veto));
                let e = comm.recv(&mut [0u8], 0).unwrap_err();
                assert!(matches!(e.kind(), ErrorKind::InvalidArgument { .. }), "{e}");
            }
            if from {
                match comm.send(&[1u8], n - 1) {
                    Err(e) => assert!(matches!(e.kind(), ErrorKind::PeerRefused { rank, .. } if *rank == n - 1), "{e}"),
                    Ok(()) => assert!(!receiver_first),
                }
            }
            // The next message is the next.
            let mut x = [0u8];
            if from {
                comm.send(&[7u8], n - 1).unwrap();
            }
            if to {
                comm.recv(&mut x, 0).unwrap();
                assert_eq!(x, [7]);
            }
            end(&comm);
        });
    }
}

#[test]
fn an_abort_ends_what_waits() {
    ranks(2, |comm| {
        if comm.rank() == 0 {
            std::thread::sleep(Duration::from_millis(30));
            comm.abort("enough");
        }
        let e = comm.recv_async(vec![0u8; 3], 1 - comm.rank()).and_then(|w| w.wait()).unwrap_err();
        assert!(matches!(e.kind(), ErrorKind::Aborted { rank: 0, cause } if cause == "enough"), "{e}");
        comm.finalize(LONG).unwrap_err();
    });
}
