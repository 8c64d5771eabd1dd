//! Calls that must be refused: what the error says, what the other ranks get, and that life goes on.

mod common;

use comm_core::{
    DType, Device, DynBuf, DynBufMut, Error, ErrorKind, IntoBuf, IntoBufMut, Pod, RawBuf, RawBufMut, ReduceOp, Result,
    op,
};
use common::mock::Mock;
use common::{Raw, refused, world};

#[test]
fn roots_out_of_range() {
    let parts: &[&str] = &["root 9 is out of range", "ranks 0 to"];
    refused("broadcast", parts, |c| c.broadcast(&mut [0u32; 2], 9), |c| c.broadcast(&mut [0u32; 2], 0));
    refused(
        "broadcast",
        parts,
        |c| c.broadcast_async(vec![0u32; 2], 9).map(drop),
        |c| c.broadcast_async(vec![0u32; 2], 0)?.wait().map(drop),
    );
    refused("broadcast", parts, |c| c.scope(|s| s.broadcast(vec![0u32], 9).map(drop)), |c| c.broadcast(&mut [0u32], 0));
    refused("reduce", parts, |c| c.reduce(&mut [0u32; 2], op::Sum, 9), |c| c.reduce(&mut [0u32; 2], op::Sum, 0));
    refused(
        "reduce",
        parts,
        |c| c.reduce_into(&[0u32; 2], Some(&mut [0u32; 2]), op::Sum, 9),
        |c| c.reduce_into(&[0u32; 2], None::<&mut [u32; 2]>, op::Sum, 0),
    );
}

#[test]
fn lengths_that_do_not_fit() {
    refused(
        "all_reduce",
        &["output has 3 elements but must have 2", "input's length"],
        |c| c.all_reduce_into(&[0u32; 2], &mut [0u32; 3], op::Sum),
        |c| c.all_reduce_into(&[0u32; 2], &mut [0u32; 2], op::Sum),
    );
    refused(
        "reduce",
        &["output has 1 elements but must have 2"],
        |c| c.reduce_into(&[0u32; 2], Some(&mut [0u32; 1]), op::Sum, 0),
        |c| c.reduce(&mut [0u32; 2], op::Sum, 0),
    );
    refused(
        "reduce",
        &["root must pass an output"],
        |c| c.reduce_into(&[0u32; 2], None::<&mut [u32; 2]>, op::Sum, 0),
        |c| c.reduce(&mut [0u32; 2], op::Sum, 0),
    );
    refused(
        "all_gather",
        &["output has 1 elements but must have", "world size times"],
        |c| c.all_gather(&[0u32; 1], &mut [0u32; 1]),
        |c| c.all_gather(&[0u32; 1], &mut vec![0u32; c.size()]),
    );
    refused(
        "all_gather",
        &["buffer has 7 elements", "cannot share evenly; pad it to"],
        |c| c.all_gather_in_place(&mut [0u32; 7]),
        |c| c.all_gather_in_place(&mut [0u32; 6]),
    );
    refused(
        "reduce_scatter",
        &["input has 7 elements", "cannot share evenly"],
        |c| c.reduce_scatter(&[0u32; 7], &mut [0u32; 3], op::Sum),
        |c| c.reduce_scatter(&[0u32; 6], &mut vec![0u32; 6 / c.size()], op::Sum),
    );
    refused(
        "reduce_scatter",
        &["output has 1 elements but must have", "divided by the world size"],
        |c| c.reduce_scatter(&[0u32; 6], &mut [0u32; 1], op::Sum),
        |c| c.reduce_scatter(&[0u32; 6], &mut vec![0u32; 6 / c.size()], op::Sum),
    );
    refused(
        "reduce_scatter",
        &["buffer has 5 elements"],
        |c| c.reduce_scatter_in_place(&mut [0u32; 5], op::Sum),
        |c| c.reduce_scatter_in_place(&mut [0u32; 6], op::Sum),
    );
}

#[test]
fn shards_do_not_cut_users_values() {
    // Three values of eight bytes: the bytes could be shared by two or three ranks, the values only by three.
    world(2, |c| {
        let mut x = [op::Loc { value: c.rank() as f32, index: 1u32 }; 3];
        // All ranks refuse, each by itself.
        let e = c.reduce_scatter_in_place(&mut x, op::MaxLoc).unwrap_err();
        assert!(e.to_string().contains("3 elements") && e.to_string().contains("pad it to 4"), "{e}");
        let e = c.all_gather_in_place(&mut x).unwrap_err();
        assert!(e.to_string().contains("3 elements"), "{e}");
        let e = c.all_gather_in_place_async(x).unwrap_err();
        assert!(e.to_string().contains("3 elements"), "{e}");
        let e = c.scope(|s| s.all_gather_in_place(&mut x).map(drop)).unwrap_err();
        assert!(e.to_string().contains("3 elements"), "{e}");
        let (input, mut output) = ([op::Loc { value: 0.0f32, index: 1u32 }; 3], [op::Loc::default(); 1]);
        let e = c.reduce_scatter(&input, &mut output, op::MinLoc).unwrap_err();
        assert!(e.to_string().contains("3 elements"), "{e}");
        let mut x = [op::Loc { value: c.rank() as f32, index: 1u32 }; 4];
        c.reduce_scatter_in_place(&mut x, op::MaxLoc).unwrap();
        assert_eq!(x[c.rank() * 2 + 1].value, 1.0);
    });
}

#[test]
fn overlapping_buffers() {
    refused(
        "all_reduce",
        &["overlap", "in-place form"],
        |c| {
            let mut m = [0u32; 8];
            c.all_reduce_into(Raw::of(&mut m, 0, 4), Raw::of(&mut m, 3, 4), op::Sum)
        },
        |c| c.all_reduce(&mut [0u32; 4], op::Sum),
    );
    refused(
        "reduce",
        &["overlap"],
        |c| {
            let mut m = [0u32; 8];
            c.reduce_into(Raw::of(&mut m, 0, 4), Some(Raw::of(&mut m, 0, 4)), op::Sum, 0)
        },
        |c| c.reduce(&mut [0u32; 4], op::Sum, 0),
    );
    refused(
        "all_gather",
        &["overlap"],
        |c| {
            let mut m = [0u32; 8];
            c.all_gather(Raw::of(&mut m, 1, 1), Raw::of(&mut m, 0, c.size()))
        },
        |c| c.all_gather(&[0u32], &mut vec![0u32; c.size()]),
    );
    refused(
        "reduce_scatter",
        &["overlap"],
        |c| {
            let mut m = [0u32; 8];
            c.reduce_scatter(Raw::of(&mut m, 0, c.size()), Raw::of(&mut m, 0, 1), op::Sum)
        },
        |c| c.reduce_scatter(&vec![0u32; c.size()], &mut [0u32], op::Sum),
    );
}

#[test]
fn memory_of_another_device() {
    let gpu = |m: &mut [u32]| {
        let len = m.len();
        Raw::of(m, 0, len).on(Device::cuda(Some(1)))
    };
    let parts: &[&str] = &["cuda:1", "cpu memory"];
    refused(
        "all_reduce",
        parts,
        move |c| c.all_reduce(gpu(&mut [0; 4]), op::Sum),
        |c| c.all_reduce(&mut [0u32; 4], op::Sum),
    );
    refused("broadcast", parts, move |c| c.broadcast(gpu(&mut [0; 4]), 0), |c| c.broadcast(&mut [0u32; 4], 0));
    let mock = Mock::new();
    let c = mock.comm();
    let mut m = [0u32; 4];
    for e in [
        c.send(gpu(&mut m), 1).unwrap_err(),
        c.recv(gpu(&mut m), 1).unwrap_err(),
        c.send_async(gpu(&mut m), 1).unwrap_err(),
        c.batch_async().recv(gpu(&mut m), 1).unwrap_err(),
        c.batch_async().send(gpu(&mut m), 1).unwrap_err(),
    ] {
        assert!(e.to_string().contains("cuda:1"), "{e}");
    }
}

#[test]
fn peers_out_of_range() {
    world(2, |c| {
        for (e, name, what) in [
            (c.send(&[0u8], 2).unwrap_err(), "send", "destination 2"),
            (c.recv(&mut [0u8], 7).unwrap_err(), "recv", "source 7"),
            (c.send_async(vec![0u8], 2).unwrap_err(), "send", "destination 2"),
            (c.scope(|s| s.recv(vec![0u8], 2).map(drop)).unwrap_err(), "recv", "source 2"),
        ] {
            for part in [name, what, "'toys'", &format!("rank {} of 2", c.rank()), "ranks 0 to 1"] {
                assert!(e.to_string().contains(part), "{part} in {e}");
            }
        }
        c.barrier().unwrap();
    });
}

#[test]
fn mixed_types_and_illegal_operators_of_dynamic_calls() {
    world(2, |c| {
        let (x, mut y) = ([0u8; 8], [0u8; 8]);
        fn dynamic(y: &mut [u8]) -> DynBufMut<'_> {
            DynBufMut::new(y, DType::I32).unwrap()
        }
        let float = || DynBuf::new(&x, DType::F32).unwrap();
        if c.rank() == 0 {
            let e = c.all_reduce_into_dyn(float(), dynamic(&mut y), ReduceOp::Sum).unwrap_err();
            assert!(matches!(e.kind(), ErrorKind::InvalidArgument { .. }), "{e:?}");
            for part in ["all_reduce #0", "input is f32 but output is i32", "'toys'", "rank 0 of 2"] {
                assert!(e.to_string().contains(part), "{part} in {e}");
            }
        } else {
            let e = c.all_reduce_dyn(dynamic(&mut y), ReduceOp::Sum).unwrap_err();
            assert!(matches!(e.kind(), ErrorKind::PeerRefused { rank: 0, .. }), "{e:?}");
        }
        if c.rank() == 0 {
            let y = DynBufMut::new(&mut y, DType::F32).unwrap();
            let e = c.all_reduce_dyn(y, ReduceOp::BAnd).unwrap_err();
            assert!(matches!(e.kind(), ErrorKind::Unsupported { .. }), "{e:?}");
            for part in ["all_reduce #1", "band", "f32", "'toys'", "rank 0 of 2"] {
                assert!(e.to_string().contains(part), "{part} in {e}");
            }
        } else {
            let e = c.all_reduce_dyn(dynamic(&mut y), ReduceOp::Sum).unwrap_err();
            assert!(matches!(e.kind(), ErrorKind::PeerRefused { rank: 0, .. }), "{e:?}");
        }
        // Both refuse.
        for op in [ReduceOp::PreMulSum, ReduceOp::Custom, ReduceOp::MinLoc] {
            let e = c.reduce_dyn(dynamic(&mut y), op, 0).unwrap_err();
            assert!(e.to_string().contains("typed API"), "{e}");
        }
        let e = c.reduce_scatter_in_place_dyn(dynamic(&mut y), ReduceOp::MaxLoc).unwrap_err();
        assert!(matches!(e.kind(), ErrorKind::Unsupported { .. }), "{e:?}");
        c.barrier().unwrap();
    });
    let e = DynBuf::new(&[0; 7], DType::F64).unwrap_err();
    assert!(e.to_string().contains("7 bytes") && e.to_string().contains("f64"), "{e}");
}

#[test]
fn batches_that_are_empty_or_overlap() {
    let mock = Mock::new();
    let c = mock.comm();
    for e in [c.batch().issue().unwrap_err(), c.batch_async().issue().unwrap_err()] {
        for part in ["batch", "is empty", "'mocked'", "rank 0 of 2"] {
            assert!(e.to_string().contains(part), "{part} in {e}");
        }
    }
    assert!(c.scope(|s| s.batch().issue().map(drop)).is_err());
    let mut m = [0u32; 8];
    let mut b = c.batch_async();
    b.send(Raw::of(&mut m, 0, 2), 1).unwrap();
    // Sends may share memory.
    b.send(Raw::of(&mut m, 1, 2), 1).unwrap();
    let e = b.recv(Raw::of(&mut m, 2, 2), 1).unwrap_err();
    assert!(e.to_string().contains("overlaps the buffer of entry 1"), "{e}");
    b.recv(Raw::of(&mut m, 4, 2), 1).unwrap();
    let e = b.recv(Raw::of(&mut m, 5, 2), 1).unwrap_err();
    assert!(e.to_string().contains("entry 2"), "{e}");
    let e = b.send(Raw::of(&mut m, 5, 2), 1).unwrap_err();
    assert!(e.to_string().contains("receive buffer of entry 2"), "{e}");
    let e = b.send(Raw::of(&mut m, 0, 1), 5).unwrap_err();
    assert!(e.to_string().contains("destination 5"), "{e}");
    assert_eq!(b.ops().len(), 3, "what was refused is not in it");
    assert!(mock.refusals.lock().is_empty());
}

/// A view that is not contiguous.
#[derive(Debug)]
struct Strided;

// SAFETY: gives no range at all.
unsafe impl IntoBuf<Strided> for Strided {
    type Elem = f32;
    fn buf(&self) -> Result<RawBuf> {
        Err(Error::invalid("the view is not contiguous; copy it first"))
    }
}

// SAFETY: gives no range at all.
unsafe impl IntoBufMut<Strided> for Strided {
    fn buf_mut(&mut self) -> Result<RawBufMut> {
        Err(Error::invalid("the view is not contiguous; copy it first"))
    }
}

// SAFETY: gives no range at all.
unsafe impl comm_core::StreamOrdered<Strided> for Strided {}

#[test]
fn buffers_that_refuse_themselves() {
    refused(
        "all_reduce",
        &["not contiguous"],
        |c| c.all_reduce(Strided, op::Sum),
        |c| c.all_reduce(&mut [0f32; 4], op::Sum),
    );
    refused(
        "all_gather",
        &["not contiguous"],
        |c| c.all_gather(Strided, Strided),
        |c| c.all_gather(&[0f32], &mut vec![0f32; c.size()]),
    );
}

/// An empty foreign buffer, whose pointer is null.
#[derive(Debug)]
struct Null<T>(std::marker::PhantomData<T>);

// SAFETY: an empty range.
unsafe impl<T: Pod> IntoBuf<Strided> for Null<T> {
    type Elem = T;
    fn buf(&self) -> Result<RawBuf> {
        Ok(RawBuf::new(std::ptr::null(), 0, T::DTYPE, Device::CPU))
    }
}

// SAFETY: an empty range.
unsafe impl<T: Pod> IntoBufMut<Strided> for Null<T> {
    fn buf_mut(&mut self) -> Result<RawBufMut> {
        Ok(RawBufMut::new(std::ptr::null_mut(), 0, T::DTYPE, Device::CPU))
    }
}

// SAFETY: an empty range.
unsafe impl<T: Pod> comm_core::StreamOrdered<Strided> for Null<T> {}

#[test]
fn empty_buffers_may_have_no_address() {
    world(2, |c| {
        let null = || Null::<bool>(std::marker::PhantomData);
        c.all_reduce(null(), op::BAnd).unwrap();
        c.broadcast(null(), 1).unwrap();
        c.all_gather(null(), null()).unwrap();
        c.all_reduce_async(null(), op::BAnd).unwrap().wait().unwrap();
        c.send(null(), 1 - c.rank()).unwrap();
        c.recv(null(), 1 - c.rank()).unwrap();
    });
}

#[test]
fn a_communicator_without_members_refuses_everything() {
    let mock = Mock::of_size(0, std::sync::Arc::new(comm_core::RealClock));
    let c = mock.comm();
    let mut x = [1u32; 2];
    for e in [
        c.barrier().unwrap_err(),
        c.send(&x, 0).unwrap_err(),
        c.recv(&mut x, 0).unwrap_err(),
        c.broadcast(&mut x, 0).unwrap_err(),
        c.all_reduce(&mut x, op::Sum).unwrap_err(),
        c.all_gather_in_place(&mut x).unwrap_err(),
        c.all_gather(&[0u32; 0], &mut [0u32; 0]).unwrap_err(),
        c.reduce_scatter_in_place(&mut x, op::Sum).unwrap_err(),
        c.reduce_scatter(&[0u32; 0], &mut [0u32; 0], op::Sum).unwrap_err(),
    ] {
        assert!(e.to_string().contains("no members yet: call reconfigure"), "{e}");
    }
}

#[test]
fn operators_that_lie_about_their_type() {
    #[derive(Clone, Debug)]
    struct Liar(DType);
    impl comm_core::Operator<f32> for Liar {
        fn reducer(&self) -> comm_core::Reducer {
            comm_core::Reducer::builtin(ReduceOp::Sum, self.0).unwrap()
        }
    }
    refused(
        "all_reduce",
        &["works on f64", "12 bytes of f32"],
        |c| c.all_reduce(&mut [0f32; 3], Liar(DType::F64)),
        |c| c.all_reduce(&mut [0f32; 3], op::Sum),
    );
    refused(
        "reduce_scatter",
        &["works on u8"],
        |c| c.reduce_scatter_in_place(&mut [0f32; 6], Liar(DType::U8)),
        |c| c.reduce_scatter_in_place(&mut [0f32; 6], op::Sum),
    );
}
