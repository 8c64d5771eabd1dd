//! What endpoints hold and send, over a world that is put together by hand so that they can be asked.

use std::sync::{Arc, Barrier};
use std::time::Duration;

use collectives::{MeshBackend, MeshOptions};
use comm_core::{BackendInfo, CommOptions, Communicator, Device, op, wait_all};
use comm_transport::{Endpoint, EndpointOptions, GroupSpec, MemLink, Patience};

const WINDOW: u64 = 4 << 20;
const END: Duration = Duration::from_secs(20);

type Member = (Communicator, Arc<Endpoint>);

fn endpoints(n: usize) -> Vec<Arc<Endpoint>> {
    let options = CommOptions::new();
    let make = |(rank, links)| {
        let o = EndpointOptions {
            checksum: true,
            patience: Patience::fitting(n, 2),
            ..EndpointOptions::new(Arc::clone(&options.clock))
        };
        Endpoint::new(rank, links, o).unwrap()
    };
    MemLink::mesh(n).into_iter().enumerate().map(make).collect()
}

fn member(endpoint: &Arc<Endpoint>, rank: usize, n: usize) -> Communicator {
    let spec = GroupSpec { id: 7, generation: 0, name: "inside".into(), members: (0..n).collect(), window: WINDOW };
    let info = BackendInfo::new("sim", rank, n);
    let backend = MeshBackend::new(Arc::clone(endpoint), spec, info, MeshOptions::default()).unwrap();
    let options = CommOptions::new().rank_and_size(rank, n).timeout(Duration::from_secs(30));
    Communicator::from_backend(Arc::new(backend), Device::CPU, options).unwrap()
}

fn world(n: usize) -> Vec<Member> {
    endpoints(n).into_iter().enumerate().map(|(r, e)| (member(&e, r, n), e)).collect()
}

fn on_threads<T: Send + 'static>(world: Vec<Member>, f: impl Fn(Member) -> T + Send + Sync + 'static) -> Vec<T> {
    let f = Arc::new(f);
    let threads: Vec<_> = world
        .into_iter()
        .map(|m| {
            let f = Arc::clone(&f);
            std::thread::spawn(move || f(m))
        })
        .collect();
    threads.into_iter().map(|t| t.join().unwrap()).collect()
}

/// A long message that nobody has asked for is not at the receiver; short ones are, within the window.
#[test]
fn what_is_held_for_unposted_receives_is_bounded() {
    on_threads(world(2), |(comm, endpoint)| {
        if comm.rank() == 0 {
            let big = comm.send_async(vec![1u8; 64 << 20], 1).unwrap();
            let small: Vec<_> = (0..10_000).map(|k| comm.send_async(vec![k as u32; 256], 1).unwrap()).collect();
            comm.barrier().unwrap();
            comm.barrier().unwrap();
            big.wait().unwrap();
            wait_all(small).unwrap();
        } else {
            comm.barrier().unwrap();
            std::thread::sleep(Duration::from_millis(300));
            let held = endpoint.held();
            assert!(held > 0, "short messages go ahead");
            assert!(held <= WINDOW + 128, "{held} bytes are held");
            comm.barrier().unwrap();
            let mut x = vec![0u8; 64 << 20];
            comm.recv(&mut x, 0).unwrap();
            assert!(x.iter().all(|b| *b == 1));
            for k in 0..10_000u32 {
                let mut x = [0u32; 256];
                comm.recv(&mut x, 0).unwrap();
                assert_eq!(x, [k; 256]);
            }
            assert_eq!(endpoint.held(), 0);
        }
        comm.finalize(END).unwrap();
    });
}

/// A rank that is late makes the others wonder; that must not cost more than a few frames, however many calls
/// they have outstanding.
#[test]
fn waiting_with_many_outstanding_calls_is_quiet() {
    const N: usize = 4;
    const CALLS: u64 = 300;
    let frames = on_threads(world(N), |(comm, endpoint)| {
        let late = comm.rank() == N - 1;
        if late {
            std::thread::sleep(Duration::from_millis(1500));
        }
        let works: Vec<_> = (0..CALLS).map(|k| comm.all_reduce_async(vec![k; 8], op::Sum).unwrap()).collect();
        for (k, x) in wait_all(works).unwrap().into_iter().enumerate() {
            assert_eq!(x, [(k * N) as u64; 8]);
        }
        comm.finalize(END).unwrap();
        endpoint.traffic().0
    });
    let data = CALLS * (N as u64 - 1);
    for (rank, sent) in frames.into_iter().enumerate() {
        assert!(sent < 2 * data + 500, "rank {rank} sent {sent} frames for {data} messages");
    }
}

/// The first call of the fastest rank arrives before the slowest has made its communicator.
#[test]
fn data_for_a_communicator_that_is_being_made_is_kept() {
    for _ in 0..20 {
        let endpoints = endpoints(3);
        let ready = Arc::new(Barrier::new(3));
        let threads: Vec<_> = endpoints
            .into_iter()
            .enumerate()
            .map(|(rank, e)| {
                let ready = Arc::clone(&ready);
                std::thread::spawn(move || {
                    ready.wait();
                    if rank == 0 {
                        // Long enough for everybody else, and for the engine to look.
                        std::thread::sleep(Duration::from_millis(20));
                    }
                    let comm = member(&e, rank, 3);
                    let mut x = [rank as u64 + 1; 4];
                    comm.all_reduce(&mut x, op::Sum).unwrap();
                    assert_eq!(x, [6; 4]);
                    comm.finalize(END).unwrap();
                })
            })
            .collect();
        for t in threads {
            t.join().unwrap();
        }
    }
}
