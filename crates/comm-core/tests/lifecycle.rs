//! Creation, finalize, drop, abort, options and the registry.

mod common;

use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

use comm_core::{
    CallOptions, CommOptions, Communicator, DType, Device, DynBufMut, Error, ErrorKind, OpDesc, OpQuery, Operation,
    ReduceOp, built_backends, is_backend_built, new_comm, op, register_backend,
};
use common::mock::Mock;
use common::{toy, world, world_on};

const LONG: Duration = Duration::from_secs(5);

#[test]
fn getters() {
    world(3, |c| {
        assert_eq!((c.size(), c.name(), c.backend_name(), c.device()), (3, "toys", "toy", Device::CPU));
        assert_eq!((c.ranks(), c.generation(), c.is_failed()), (&[0, 1, 2][..], 0, false));
        assert_eq!((c.local_rank(), c.local_size(), c.hosts().len()), (c.rank(), 3, 3));
        assert!(c.cause().is_none() && !c.backend_version().is_empty());
        assert!(format!("{c:?} {:?}", c.options()).contains("toys"));
        assert!(c.supports(&OpQuery::new(Operation::AllReduce)).is_supported());
        assert!(c.supports(&OpQuery::new(Operation::Batch)).is_supported());
        assert!(!c.supports(&OpQuery::new(Operation::Put)).is_supported());
        let gpu = OpQuery::new(Operation::AllReduce).memory(Device::cuda(None));
        assert!(!c.supports(&gpu).is_supported());
        let illegal = OpQuery::new(Operation::AllReduce).redop(ReduceOp::BAnd).dtype(DType::F32);
        assert!(!c.supports(&illegal).is_supported());
    });
}

#[test]
fn what_a_backend_lacks_is_unsupported() {
    world(2, |c| {
        for e in [
            c.control().unwrap_err(),
            c.alloc(64).unwrap_err(),
            c.init_handle().unwrap_err(),
            c.split(&[0, 1], "child").unwrap_err(),
            c.reconfigure(1, ["a"], LONG, &[]).unwrap_err(),
        ] {
            assert!(matches!(e.kind(), ErrorKind::Unsupported { .. }), "{e}");
            assert!(e.to_string().contains("toy"), "{e}");
        }
        c.barrier().unwrap();
    });
}

#[test]
fn finalize_ends_on_all_ranks_and_only_once() {
    let shared = toy::World::new(3);
    world_on(&shared, |c| {
        let clone = c.clone();
        let pending = c.all_reduce_async(vec![1u32], op::Sum).unwrap();
        c.finalize(LONG).unwrap();
        // What was in flight was waited for.
        assert_eq!(pending.try_wait().unwrap().unwrap(), [3]);
        for again in [c.finalize(LONG), clone.finalize(LONG)] {
            let e = again.unwrap_err();
            assert_eq!(e.kind(), &ErrorKind::Finalized);
            assert!(e.to_string().contains("'toys'") && e.to_string().contains("finalize"), "{e}");
        }
    });
    assert_eq!(shared.finalizes.load(SeqCst), 3);
    assert_eq!(shared.closes.load(SeqCst), 0, "close after finalize");
}

#[test]
fn finalize_times_out_when_a_rank_stays_away() {
    world(2, |c| {
        if c.rank() == 0 {
            let e = c.finalize(Duration::from_millis(20)).unwrap_err();
            assert!(matches!(e.kind(), ErrorKind::Timeout { .. }), "{e}");
            assert!(e.to_string().contains("finalize"), "{e}");
        }
    });
}

#[test]
fn every_call_after_finalize_says_so_and_names_itself() {
    let mock = Mock::new();
    let c = mock.comm();
    c.finalize(LONG).unwrap();
    let (x, mut y, mut z) = (vec![1u32; 2], vec![0u32; 2], vec![0u32; 4]);
    let mut bytes = [0u8; 8];
    let errors: Vec<(&str, Error)> = vec![
        ("send", c.send(&x, 1).unwrap_err()),
        ("recv", c.recv(&mut y, 1).unwrap_err()),
        ("broadcast", c.broadcast(&mut y, 0).unwrap_err()),
        ("all_reduce", c.all_reduce(&mut y, op::Sum).unwrap_err()),
        ("all_reduce", c.all_reduce_into(&x, &mut y, op::Sum).unwrap_err()),
        ("reduce", c.reduce(&mut y, op::Sum, 0).unwrap_err()),
        ("reduce", c.reduce_into(&x, Some(&mut y), op::Sum, 0).unwrap_err()),
        ("all_gather", c.all_gather(&x, &mut z).unwrap_err()),
        ("all_gather", c.all_gather_in_place(&mut z).unwrap_err()),
        ("reduce_scatter", c.reduce_scatter(&z, &mut y, op::Sum).unwrap_err()),
        ("reduce_scatter", c.reduce_scatter_in_place(&mut z, op::Sum).unwrap_err()),
        ("barrier", c.barrier().unwrap_err()),
        ("send", c.send_async(x.clone(), 1).unwrap_err()),
        ("recv", c.recv_async(x.clone(), 1).unwrap_err()),
        ("broadcast", c.broadcast_async(x.clone(), 1).unwrap_err()),
        ("all_reduce", c.all_reduce_async(x.clone(), op::Sum).unwrap_err()),
        ("all_reduce", c.all_reduce_into_async(x.clone(), x.clone(), op::Sum).unwrap_err()),
        ("reduce", c.reduce_async(x.clone(), op::Sum, 0).unwrap_err()),
        ("reduce", c.reduce_into_async(x.clone(), Some(x.clone()), op::Sum, 0).unwrap_err()),
        ("all_gather", c.all_gather_async(x.clone(), z.clone()).unwrap_err()),
        ("all_gather", c.all_gather_in_place_async(z.clone()).unwrap_err()),
        ("reduce_scatter", c.reduce_scatter_async(z.clone(), x.clone(), op::Sum).unwrap_err()),
        ("reduce_scatter", c.reduce_scatter_in_place_async(z.clone(), op::Sum).unwrap_err()),
        ("barrier", c.barrier_async().unwrap_err()),
        ("batch", c.batch().send(&x, 1).unwrap().issue().unwrap_err()),
        ("all_reduce", c.all_reduce_dyn(DynBufMut::new(&mut bytes, DType::F32).unwrap(), ReduceOp::Sum).unwrap_err()),
        ("barrier", c.scope(|s| s.barrier().map(drop)).unwrap_err()),
        ("custom", c.begin(OpDesc::new(Operation::Custom)).unwrap_err()),
        ("split", c.split(&[0], "x").unwrap_err()),
        ("reconfigure", c.reconfigure(0, ["a"], LONG, &[]).unwrap_err()),
    ];
    for (name, e) in errors {
        assert_eq!(e.kind(), &ErrorKind::Finalized, "{name}");
        for part in [name, "'mocked'", "rank 0 of 2", "no calls after finalize"] {
            assert!(e.to_string().contains(part), "{part} in {e}");
        }
    }
    assert_eq!(mock.started(), 0);
    // The other ranks are in finalize too: nobody is told.
    assert!(mock.refusals.lock().is_empty());
}

#[test]
fn dropping_the_last_clone_closes_the_backend_once() {
    let mock = Mock::new();
    let c = mock.comm();
    let clones: Vec<_> = (0..3).map(|_| c.clone()).collect();
    drop(c);
    drop(clones);
    assert_eq!(mock.closes.load(SeqCst), 1);
    assert_eq!(mock.finalizes.load(SeqCst), 0);
    let c = mock.comm();
    let clone = c.clone();
    c.finalize(LONG).unwrap();
    drop((c, clone));
    assert_eq!(mock.closes.load(SeqCst), 1, "close after finalize");
}

#[test]
fn abort_ends_what_is_in_flight_and_every_later_call() {
    world(3, |c| {
        if c.rank() == 1 {
            std::thread::sleep(Duration::from_millis(20));
            c.abort("enough");
        }
        // Rank 1 never joins this one.
        let mut x = [0u8];
        let e = if c.rank() == 1 { c.barrier().unwrap_err() } else { c.all_reduce(&mut x, op::Sum).unwrap_err() };
        let ErrorKind::Aborted { rank: 1, cause } = e.kind() else { panic!("{e}") };
        assert_eq!(cause, "enough");
        assert!(!e.is_recoverable());
        assert!(c.is_failed());
        assert_eq!(c.cause().unwrap().kind(), e.kind());
        assert_eq!(c.all_reduce_async(vec![0u8], op::Sum).unwrap().wait().unwrap_err().kind(), e.kind());
        assert_eq!(c.finalize(LONG).unwrap_err().kind(), e.kind());
        assert_eq!(c.finalize(LONG).unwrap_err().kind(), &ErrorKind::Finalized);
    });
}

#[test]
fn timeouts_fail_the_call_and_name_who_is_missing() {
    world(2, |c| {
        if c.rank() == 1 {
            return;
        }
        let e = c.with(CallOptions::new().timeout(Duration::from_millis(10))).barrier().unwrap_err();
        let ErrorKind::Timeout { missing, .. } = e.kind() else { panic!("{e}") };
        assert_eq!(missing, &[1]);
        for part in ["barrier #0", "'toys'", "rank 0 of 2", "not arrived: rank 1"] {
            assert!(e.to_string().contains(part), "{part} in {e}");
        }
        assert!(c.is_failed());
    });
}

#[test]
fn unknown_hints_at_creation_name_the_nearest() {
    let shared = toy::World::new(1);
    let e = shared.comm_with(0, CommOptions::new().hint("chunks", "4")).unwrap_err();
    assert!(matches!(e.kind(), ErrorKind::InvalidArgument { .. }), "{e}");
    assert!(e.to_string().contains("'chunks'") && e.to_string().contains("did you mean 'chunk'"), "{e}");
    // A communicator that never was is not closed.
    assert_eq!(shared.closes.load(SeqCst), 0);
    shared.comm_with(0, CommOptions::new().hint("chunk", "4").hint("algo", "ring")).unwrap();
}

#[test]
fn unknown_hints_of_a_call_reach_the_others_and_the_communicator_goes_on() {
    world(2, |c| {
        if c.rank() == 0 {
            let e = c.with(CallOptions::new().hint("chnk", "1")).barrier().unwrap_err();
            for part in ["did you mean 'chunk'", "barrier #0", "'toys'", "rank 0 of 2"] {
                assert!(e.to_string().contains(part), "{part} in {e}");
            }
        } else {
            let e = c.barrier().unwrap_err();
            let ErrorKind::PeerRefused { rank: 0, reason } = e.kind() else { panic!("{e}") };
            assert!(reason.contains("chnk"));
        }
        c.with(CallOptions::new().hint("chunk", "1")).barrier().unwrap();
    });
}

#[test]
fn a_refused_send_or_receive_takes_no_number() {
    world(2, |c| {
        let bad = || c.with(CallOptions::new().hint("alg", "x"));
        let peer = 1 - c.rank();
        if c.rank() == 0 {
            let e = bad().send(&[1u8], peer).unwrap_err();
            assert!(e.to_string().contains("send") && e.to_string().contains("did you mean 'algo'"), "{e}");
            assert!(c.send(&[1u8], 7).is_err());
            assert!(bad().send_async(vec![1u8], peer).is_err());
            assert!(bad().scope(|s| s.send(&[1u8], peer).map(drop)).is_err());
            assert!(bad().batch().send(&[1u8], peer).unwrap().issue().is_err());
            // The number of this one is still 0.
            c.send(&[42u8], peer).unwrap();
        } else {
            let mut x = [0u8];
            assert!(bad().recv(&mut x, peer).is_err());
            assert!(bad().batch().recv(&mut x, peer).unwrap().issue().is_err());
            c.recv(&mut x, peer).unwrap();
            assert_eq!(x, [42]);
        }
    });
}

#[test]
fn the_registry_makes_communicators_by_name() {
    register_backend("lifecycle-toy", |_, options| toy::World::new(1).comm_with(0, options));
    assert!(is_backend_built("lifecycle-toy") && !is_backend_built("lifecycle-other"));
    assert!(built_backends().contains(&"lifecycle-toy".to_owned()));
    let c = new_comm("lifecycle-toy", Device::CPU, CommOptions::new().name("reg")).unwrap();
    assert_eq!((c.name(), c.size()), ("reg", 1));
    let e = new_comm("lifecycle-typo", Device::CPU, CommOptions::new()).unwrap_err();
    assert!(matches!(e.kind(), ErrorKind::Unsupported { .. }), "{e}");
    for part in ["'lifecycle-typo'", "lifecycle-toy"] {
        assert!(e.to_string().contains(part), "{part} in {e}");
    }
    // Registering again replaces.
    register_backend("lifecycle-toy", |_, _| Err(Error::invalid("replaced")));
    let e = new_comm("lifecycle-toy", Device::CPU, CommOptions::new()).unwrap_err();
    assert!(e.to_string().contains("replaced"));
}

#[test]
fn a_factory_may_use_the_registry() {
    register_backend("lifecycle-alias", |device, options| {
        register_backend("lifecycle-target", |_, options| toy::World::new(1).comm_with(0, options));
        new_comm("lifecycle-target", device, options)
    });
    assert_eq!(new_comm("lifecycle-alias", Device::CPU, CommOptions::new()).unwrap().size(), 1);
}

#[test]
fn a_communicator_may_be_used_from_many_threads() {
    fn check<T: Send + Sync>(_: &T) {}
    world(2, |c| {
        check(&c);
        let peer = 1 - c.rank();
        let threads: Vec<_> = (0..4u32)
            .map(|t| {
                let c: Communicator = c.clone();
                std::thread::spawn(move || {
                    let mine = c.with(CallOptions::new().tag(t));
                    for i in 0..50u32 {
                        mine.send(&[t * 1000 + i], peer).unwrap();
                        let mut x = [0u32];
                        mine.recv(&mut x, peer).unwrap();
                        assert_eq!(x, [t * 1000 + i]);
                    }
                })
            })
            .collect();
        threads.into_iter().for_each(|t| t.join().unwrap());
        c.finalize(LONG).unwrap();
    });
    let mock = Mock::new();
    drop(mock.comm());
    assert_eq!(Arc::strong_count(&mock), 1);
}
