//! The same operations on users' types, with operators that carry data, on `bool`s, with types chosen at run time, and with
//! options; and `sendrecv` against its counterparts.

mod common;

use std::time::Duration;

use comm_core::{
    CallOptions, Communicator, DType, DynBuf, DynBufMut, Error, ErrorKind, OpQuery, Operation, Pod, ReduceOp, op,
};
use common::mock::Mock;
use common::{world, world_on};

/// Twelve bytes that travel as bytes.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Item {
    id: u32,
    weight: f32,
    from: u32,
}

// SAFETY: three words without padding, of which every pattern is a value.
unsafe impl Pod for Item {}

fn item(rank: usize, i: usize) -> Item {
    Item { id: (100 * rank + i) as u32, weight: i as f32 / 2.0, from: rank as u32 }
}

fn items(rank: usize, from: usize, len: usize) -> Vec<Item> {
    (from..from + len).map(|i| item(rank, i)).collect()
}

fn blank(len: usize) -> Vec<Item> {
    vec![Item::default(); len]
}

#[test]
fn counts_of_users_types_are_values() {
    world(3, |c| {
        let me = c.rank();
        let counts = [2usize, 0, 3];
        let (own, at) = (counts[me], [0, 2, 2][me]);
        let all: Vec<Item> = (0..3).flat_map(|r| items(r, 0, counts[r])).collect();
        let mine = items(me, 0, own);

        let mut y = blank(5);
        c.all_gather_v(&mine, &mut y, &counts).unwrap();
        assert_eq!(y, all);
        y = blank(5);
        y[at..at + own].copy_from_slice(&mine);
        c.all_gather_v_in_place(&mut y, &counts).unwrap();
        assert_eq!(y, all);
        let list = counts.map(blank);
        let (_, list) = c.all_gather_v_list_async(mine.clone(), list).unwrap().wait().unwrap();
        assert_eq!(list.concat(), all);

        y = blank(5);
        c.gather_v(&mine, (me == 1).then_some(&mut y), &counts, 1).unwrap();
        assert_eq!(y, if me == 1 { all.clone() } else { blank(5) });
        y = if me == 2 { [blank(2), mine.clone()].concat() } else { mine.clone() };
        c.gather_v_in_place(&mut y, &counts, 2).unwrap();
        assert_eq!(y, if me == 2 { all.clone() } else { mine.clone() });

        let mut y = blank(own);
        c.scatter_v((me == 0).then_some(&all), &mut y, &counts, 0).unwrap();
        assert_eq!(y, mine, "scattered what had been gathered");
        y = if me == 1 { all.clone() } else { blank(own) };
        c.scatter_v_in_place(&mut y, &counts, 1).unwrap();
        assert_eq!(y, if me == 1 { all } else { mine });

        let sends = [1, 2, 0].map(|k: usize| (k + me) % 3);
        let receives = [0, 1, 2].map(|i: usize| ([1, 2, 0][me] + i) % 3);
        let (x, mut y) = (items(me, 0, 3), blank(3));
        c.all_to_all_v(&x, &mut y, &sends, &receives).unwrap();
        // What rank `i` sends to me begins after what it sends to those before me.
        let want: Vec<Item> = (0..3)
            .flat_map(|i| {
                let sends = [1, 2, 0].map(|k: usize| (k + i) % 3);
                items(i, sends[..me].iter().sum(), sends[me])
            })
            .collect();
        assert_eq!(y, want);

        let (mut z, mut y) = (items(me, 0, 6), blank(6));
        c.all_to_all(&items(me, 0, 6), &mut y).unwrap();
        c.all_to_all_in_place(&mut z).unwrap();
        assert_eq!(y, (0..3).flat_map(|i| items(i, 2 * me, 2)).collect::<Vec<_>>());
        assert_eq!(z, y);

        // Bytes that three ranks could share, but values that they cannot.
        for e in [
            c.all_to_all_in_place(&mut y[..4]),
            c.gather_in_place(&mut y[..4], me),
            c.scatter_in_place(&mut y[..4], me),
        ] {
            let e = e.unwrap_err();
            assert!(e.to_string().contains("4 elements") && e.to_string().contains("pad it to 6"), "{e}");
        }
        // Counts in bytes are refused.
        let e = c.all_gather_v(&items(me, 0, own), &mut blank(5), &counts.map(|n| 12 * n)).unwrap_err();
        assert!(e.to_string().contains("has 5 elements but its counts make 60 together"), "{e}");
    });
}

#[test]
fn operators_on_users_types() {
    world(3, |c| {
        let me = c.rank();
        let newest = op::custom(
            |a: &mut [Item], b: &[Item]| {
                a.iter_mut()
                    .zip(b)
                    .for_each(|(a, b)| *a = Item { id: a.id * 10 + b.id, weight: a.weight + b.weight, ..*b });
            },
            false,
        );
        let mine = |len: usize| vec![Item { id: me as u32 + 1, weight: 0.5, from: me as u32 }; len];
        let folded = |ranks: usize| Item {
            id: (1..=ranks as u32).fold(0, |a, b| a * 10 + b),
            weight: 0.5 * ranks as f32,
            from: ranks as u32 - 1,
        };
        let (counts, mut y) = ([1usize, 0, 2], blank([1, 0, 2][me]));
        c.reduce_scatter_v(&mine(3), &mut y, &counts, newest.clone()).unwrap();
        assert_eq!(y, vec![folded(3); counts[me]]);
        let mut x = mine(3);
        c.reduce_scatter_v_in_place(&mut x, &counts, newest.clone()).unwrap();
        assert_eq!(x[[0, 1, 1][me]..][..counts[me]], y);
        c.reduce_scatter_v_list(&counts.map(mine), &mut y, newest.clone()).unwrap();
        assert_eq!(y, vec![folded(3); counts[me]]);
        // Prefixes in rank order.
        let mut x = mine(2);
        c.scan(&mut x, newest.clone()).unwrap();
        assert_eq!(x, [folded(me + 1); 2]);
        let mut x = mine(2);
        c.exscan(&mut x, newest).unwrap();
        assert_eq!(x, if me == 0 { mine(2) } else { vec![folded(me); 2] });
        let mut l = [op::Loc { value: [3.0f64, 7.0, 5.0][me], index: me as u64 }];
        c.scan(&mut l, op::MaxLoc).unwrap();
        assert_eq!((l[0].value, l[0].index), [(3.0, 0), (7.0, 1), (7.0, 1)][me]);
    });
}

#[test]
fn an_operator_that_panics_fails_the_call_and_no_more() {
    world(2, |c| {
        let bad = op::custom(|_: &mut [u32], b: &[u32]| assert_eq!(b[0], 99, "no such value"), true);
        let input = vec![vec![1u32; 2], vec![2; 3]];
        let (bufs, r) = c.reduce_scatter_v_list_async(input, vec![0; c.rank() + 2], bad).unwrap().into_parts();
        let e = r.unwrap_err();
        assert!(matches!(e.kind(), ErrorKind::Aborted { .. }) && e.to_string().contains("no such value"), "{e}");
        assert_eq!(bufs.unwrap().0[1], [2; 3]);
        assert!(c.is_failed() && c.barrier().is_err());
    });
}

#[test]
fn factors_and_averages_of_prefixes_and_blocks() {
    for form in 0..3 {
        world(4, move |c| {
            let me = c.rank();
            let factor = op::PreMulSum(10f64.powi(me as i32));
            let x = [1.0f64, 2.0];
            let want = |ranks: usize| [[0.0, 0.0], [1.0, 2.0], [11.0, 22.0], [111.0, 222.0], [1111.0, 2222.0]][ranks];
            let (mut a, mut b, mut d) = (x, x, [-1.0; 2]);
            match form {
                0 => {
                    c.scan(&mut a, factor).unwrap();
                    c.exscan(&mut b, factor).unwrap();
                    c.exscan_into(&x, &mut d, factor).unwrap();
                }
                1 => {
                    a = c.scan_async(a, factor).unwrap().wait().unwrap();
                    b = c.exscan_async(b, factor).unwrap().wait().unwrap();
                    d = c.exscan_into_async(x, d, factor).unwrap().wait().unwrap().1;
                }
                _ => c
                    .scope(|s| {
                        s.scan(&mut a, factor)?;
                        s.exscan(&mut b, factor)?;
                        s.exscan_into(&x, &mut d, factor).map(drop)
                    })
                    .unwrap(),
            }
            assert_eq!(a, want(me + 1));
            // Rank 0's buffers stay as they are, not even scaled.
            assert_eq!(b, if me == 0 { x } else { want(me) });
            assert_eq!(d, if me == 0 { [-1.0; 2] } else { want(me) });

            // Divided by the number of ranks that took part, toward zero.
            let (mut a, mut b) = ([-(me as i8) - 4; 3], [-(me as i8) - 4; 3]);
            c.scan(&mut a, op::Avg).unwrap();
            c.exscan(&mut b, op::Avg).unwrap();
            assert_eq!(a, [[-4, -4, -5, -5][me]; 3]);
            assert_eq!(b, [[-4, -4, -4, -5][me]; 3]);

            let counts = [2, 0, 1, 1];
            let mut y = vec![0.0; counts[me]];
            c.reduce_scatter_v(&[1.0, 2.0, 3.0, 4.0], &mut y, &counts, factor).unwrap();
            assert_eq!(y, [&[1111.0, 2222.0][..], &[], &[3333.0], &[4444.0]][me]);
            c.reduce_scatter_v(&[1.0, 2.0, 3.0, 4.0].map(|v| v + me as f64), &mut y, &counts, op::Avg).unwrap();
            assert_eq!(y, [&[2.5, 3.5][..], &[], &[4.5], &[5.5]][me]);
        });
    }
}

/// The bytes themselves: looking at a `bool` the compiler trusts the type, and a test would prove nothing.
fn bytes_of(x: &[bool]) -> &[u8] {
    // SAFETY: a `bool` is one initialised byte.
    unsafe { std::slice::from_raw_parts(x.as_ptr().cast(), x.len()) }
}

#[test]
fn bools_are_valid_in_every_request() {
    let mock = Mock::new();
    let c = &mock.comm();
    // The backend leaves sevens wherever it may write.
    *mock.sync_fill.lock() = Some(7);
    let check = |fails: bool| {
        macro_rules! written {
            ($call:expr, $($out:expr),+) => {{
                assert_eq!($call.is_err(), fails);
                $(
                    assert!(bytes_of(&$out).iter().all(|b| *b == 1), "{}: {:?}", stringify!($call), bytes_of(&$out));
                    $out.fill(false);
                )+
            }};
        }
        let (x, four, lists) = ([true; 1], [true; 4], [[true; 2]; 2]);
        let (mut y, mut z, mut l) = ([false; 2], [false; 4], [[false; 2]; 2]);
        written!(c.all_gather_list(&y.clone(), &mut l), l[0], l[1]);
        written!(c.all_gather_v(&x, &mut z, &[1, 3]), z);
        written!(c.all_gather_v_in_place(&mut z, &[0, 4]), z);
        written!(c.all_gather_v_list(&y.clone(), &mut l), l[0], l[1]);
        written!(c.gather(&y.clone(), Some(&mut z), 0), z);
        written!(c.gather_in_place(&mut z, 0), z);
        written!(c.gather_list(&y.clone(), Some(&mut l), 0), l[0], l[1]);
        written!(c.gather_v(&x, Some(&mut z), &[1, 3], 0), z);
        written!(c.gather_v_in_place(&mut z, &[1, 3], 0), z);
        written!(c.gather_v_list(&y.clone(), Some(&mut l), 0), l[0], l[1]);
        written!(c.scatter(Some(&four), &mut y, 0), y);
        written!(c.scatter(None::<&[bool]>, &mut y, 1), y);
        written!(c.scatter_in_place(&mut y, 1), y);
        written!(c.scatter_list(Some(&lists), &mut y, 0), y);
        written!(c.scatter_v(Some(&four), &mut y, &[2, 2], 0), y);
        written!(c.scatter_v_in_place(&mut y, &[], 1), y);
        written!(c.scatter_v_list(Some(&lists), &mut y, 0), y);
        written!(c.reduce_scatter(&four, &mut y, op::BOr), y);
        written!(c.reduce_scatter_list(&lists, &mut y, op::BOr), y);
        written!(c.reduce_scatter_v(&four, &mut y, &[2, 2], op::BOr), y);
        // The part that is not the result, too.
        written!(c.reduce_scatter_v_in_place(&mut z, &[1, 3], op::BOr), z);
        written!(c.reduce_scatter_v_list(&lists, &mut y, op::BOr), y);
        written!(c.all_to_all(&four, &mut z), z);
        written!(c.all_to_all_in_place(&mut z), z);
        written!(c.all_to_all_list(&lists, &mut l), l[0], l[1]);
        written!(c.all_to_all_v(&four, &mut z, &[1, 3], &[1, 3]), z);
        written!(c.all_to_all_v_list(&lists, &mut l), l[0], l[1]);
        written!(c.scan(&mut y, op::BOr), y);
        written!(c.scan_into(&y.clone(), &mut y, op::BXor), y);
        written!(c.exscan(&mut y, op::BOr), y);
        written!(c.exscan_into(&y.clone(), &mut y, op::BAnd), y);
        written!(c.sendrecv(&four, &mut y, 1, 1), y);

        // In place the root's own block is what the backend may write.
        assert_eq!(c.scatter_in_place(&mut z, 0).is_err(), fails);
        assert_eq!(bytes_of(&z), [1, 1, 0, 0]);

        let w = c.all_to_all_v_list_async(lists, l).unwrap();
        let op = mock.op(mock.started() - 1);
        op.write(9);
        op.complete(if fails { Err(Error::invalid("test")) } else { Ok(()) });
        let (bufs, r) = w.into_parts();
        assert_eq!(r.is_err(), fails);
        assert!(bytes_of(bufs.unwrap().1.as_flattened()).iter().all(|b| *b == 1), "async");
        let w = c.sendrecv_async(x, y, 1, 1).unwrap();
        let op = mock.op(mock.started() - 1);
        op.write(9);
        op.complete(if fails { Err(Error::invalid("test")) } else { Ok(()) });
        assert_eq!(bytes_of(&w.into_parts().0.unwrap().1), [1, 1], "async");
    };
    check(false);
    *mock.sync_result.lock() = Err(Error::invalid("test"));
    check(true);
}

#[test]
fn received_bools_are_valid() {
    // The peer's bytes are no bools; between real buffers.
    world(2, |c| {
        let bad = [0u8, 2, 255, 1];
        if c.rank() == 0 {
            c.scatter_v(Some(&bad), &mut [0u8], &[1, 3], 0).unwrap();
            c.all_gather_v_list(&bad[..3], &mut [vec![0; 3], vec![0; 1]]).unwrap();
            c.all_to_all_in_place(&mut bad.clone()).unwrap();
            c.sendrecv(&bad, &mut [0u8; 1], 1, 1).unwrap();
        } else {
            let mut x = [false; 3];
            c.scatter_v(None::<&[bool]>, &mut x, &[], 0).unwrap();
            assert_eq!(bytes_of(&x), [1, 1, 1]);
            let mut l = [vec![false; 3], vec![false; 1]];
            c.all_gather_v_list(&[true], &mut l).unwrap();
            assert_eq!((bytes_of(&l[0]), bytes_of(&l[1])), (&[0, 1, 1][..], &[1][..]));
            let mut x = [false; 4];
            c.all_to_all_in_place(&mut x).unwrap();
            assert_eq!(bytes_of(&x), [1, 1, 0, 0]);
            c.sendrecv(&[true], &mut x, 0, 0).unwrap();
            assert_eq!(bytes_of(&x), [0, 1, 1, 1]);
        }
    });
}

#[test]
fn dynamic_calls() {
    const D: DType = DType::I16;
    fn bytes(x: &[i16]) -> Vec<u8> {
        x.iter().flat_map(|v| v.to_ne_bytes()).collect()
    }
    fn values(x: &[u8]) -> Vec<i16> {
        x.as_chunks().0.iter().map(|c| i16::from_ne_bytes(*c)).collect()
    }
    fn read(x: &[u8]) -> DynBuf<'_> {
        DynBuf::new(x, D).unwrap()
    }
    fn write(x: &mut [u8]) -> DynBufMut<'_> {
        DynBufMut::new(x, D).unwrap()
    }
    world(2, |c| {
        let (me, r) = (c.rank(), c.rank() as i16);
        let (own, counts) = ([1, 3][me], [1usize, 3]);
        let mine = bytes(&vec![r + 1; own]);
        let all = [1, 2, 2, 2];
        let pair = bytes(&[r + 1, 10 * (r + 1)]);

        let mut y = vec![0; 8];
        c.all_gather_v_dyn(read(&mine), write(&mut y), &counts).unwrap();
        assert_eq!(values(&y), all);
        y.fill(0);
        c.gather_dyn(read(&pair), (me == 1).then(|| write(&mut y)), 1).unwrap();
        assert_eq!(values(&y), [[0; 4], [1, 10, 2, 20]][me]);
        y = if me == 0 { [&pair[..], &[0; 4]].concat() } else { pair.clone() };
        c.gather_in_place_dyn(write(&mut y), 0).unwrap();
        assert_eq!(values(&y), [&[1, 10, 2, 20][..], &[2, 20]][me]);
        y = vec![0; 8];
        c.gather_v_dyn(read(&mine), (me == 0).then(|| write(&mut y)), &counts, 0).unwrap();
        assert_eq!(values(&y), if me == 0 { all } else { [0; 4] });

        let four = bytes(&[5, 6, 7, 8]);
        let mut y = vec![0; 4];
        c.scatter_dyn((me == 1).then(|| read(&four)), write(&mut y), 1).unwrap();
        assert_eq!(values(&y), [[5, 6], [7, 8]][me]);
        y = if me == 0 { four.clone() } else { vec![0; 4] };
        c.scatter_in_place_dyn(write(&mut y), 0).unwrap();
        assert_eq!(values(&y), [&[5, 6, 7, 8][..], &[7, 8]][me]);
        y = vec![0; 2 * own];
        c.scatter_v_dyn((me == 0).then(|| read(&four)), write(&mut y), &counts, 0).unwrap();
        assert_eq!(values(&y), [&[5][..], &[6, 7, 8]][me]);

        c.reduce_scatter_v_dyn(read(&bytes(&[r, 1, 2, 3])), write(&mut y), &counts, ReduceOp::Sum).unwrap();
        assert_eq!(values(&y), [&[1][..], &[2, 4, 6]][me]);

        let mut y = vec![0; 8];
        let x = bytes(&[10 * r, 10 * r + 1, 10 * r + 2, 10 * r + 3]);
        c.all_to_all_dyn(read(&x), write(&mut y)).unwrap();
        assert_eq!(values(&y), [[0, 1, 10, 11], [2, 3, 12, 13]][me]);
        y.copy_from_slice(&x);
        c.all_to_all_in_place_dyn(write(&mut y)).unwrap();
        assert_eq!(values(&y), [[0, 1, 10, 11], [2, 3, 12, 13]][me]);
        let (sends, receives) = ([[1, 3], [2, 2]][me], [[1, 2], [3, 2]][me]);
        let mut y = vec![0; 2 * (receives[0] + receives[1])];
        c.all_to_all_v_dyn(read(&x), write(&mut y), &sends, &receives).unwrap();
        assert_eq!(values(&y), [&[0, 10, 11][..], &[1, 2, 3, 12, 13]][me]);

        let mut y = bytes(&[r + 1]);
        c.scan_dyn(write(&mut y), ReduceOp::Prod).unwrap();
        assert_eq!(values(&y), [[1], [2]][me]);
        c.exscan_dyn(write(&mut y), ReduceOp::Max).unwrap();
        assert_eq!(values(&y), [1]);
        let mut z = bytes(&[-1, -1]);
        c.scan_into_dyn(read(&pair), write(&mut z), ReduceOp::BXor).unwrap();
        assert_eq!(values(&z), [[1, 10], [3, 30]][me]);
        z = bytes(&[-1, -1]);
        c.exscan_into_dyn(read(&pair), write(&mut z), ReduceOp::Sum).unwrap();
        assert_eq!(values(&z), [[-1, -1], [1, 10]][me]);

        c.sendrecv_dyn(read(&pair), write(&mut z), 1 - me, 1 - me).unwrap();
        assert_eq!(values(&z), [2 - r, 10 * (2 - r)]);

        // Types must agree within a call, and operators must be defined on them.
        let e = c.all_to_all_dyn(read(&x), DynBufMut::new(&mut [0; 8], DType::U16).unwrap()).unwrap_err();
        assert!(e.to_string().contains("input is i16 but output is u16"), "{e}");
        let counts = [1, 1];
        let e =
            c.all_gather_v_dyn(read(&x[..2]), DynBufMut::new(&mut [0; 4], DType::U16).unwrap(), &counts).unwrap_err();
        assert!(e.to_string().contains("input is i16 but output is u16"), "{e}");
        let float = DynBufMut::new(&mut z, DType::F16).unwrap();
        let e = c.scan_dyn(float, ReduceOp::BAnd).unwrap_err();
        assert!(matches!(e.kind(), ErrorKind::Unsupported { .. }), "{e:?}");
        let e = c.reduce_scatter_v_dyn(read(&x[..4]), write(&mut y), &counts, ReduceOp::MinLoc).unwrap_err();
        assert!(e.to_string().contains("typed API"), "{e}");
    });
}

#[test]
fn options_reach_every_form() {
    world(2, |c| {
        let with = c.with(CallOptions::new().hint("chunk", "4096"));
        let mut y = [0u8; 3];
        with.all_gather_v(&vec![c.rank() as u8 + 1; c.rank() + 1], &mut y, &[1, 2]).unwrap();
        assert_eq!(y, [1, 2, 2]);
        assert_eq!(with.scan_async([2u8], op::Prod).unwrap().wait().unwrap(), [[2], [4]][c.rank()]);
        with.scope(|s| s.all_to_all_in_place(&mut y[..2]).map(drop)).unwrap();
        assert_eq!(y[..2], [[1, 1], [2, 2]][c.rank()]);
        // Hints are checked, and the other ranks told.
        let unknown = c.with(CallOptions::new().hint("chunks", "1"));
        let bad = |c: &Communicator| c.scan(&mut [1u8], op::Sum).unwrap_err();
        if c.rank() == 0 {
            let e = unknown.scan(&mut [1u8], op::Sum).unwrap_err();
            assert!(e.to_string().contains("chunk"), "{e}");
        } else {
            assert!(matches!(bad(&c).kind(), ErrorKind::PeerRefused { rank: 0, .. }));
        }
        c.barrier().unwrap();
    });
    world(2, |c| {
        if c.rank() == 0 {
            let hurry = c.with(CallOptions::new().timeout(Duration::from_millis(30)));
            let e = hurry.all_to_all_v(&[1u8], &mut [0u8], &[0, 1], &[0, 1]).unwrap_err();
            let ErrorKind::Timeout { missing, .. } = e.kind() else { panic!("{e:?}") };
            assert_eq!(missing[..], [1]);
            assert!(e.to_string().contains("all_to_all_v #0"), "{e}");
        }
    });
}

#[test]
fn a_communicator_can_be_asked_for_the_operations() {
    world(1, |c| {
        for o in [Operation::AllToAllV, Operation::Exscan, Operation::GatherV, Operation::SendRecv] {
            assert!(c.supports(&OpQuery::new(o)).is_supported(), "{o}");
        }
        let q = OpQuery::new(Operation::Scan).dtype(DType::F32).redop(ReduceOp::BXor);
        assert!(!c.supports(&q).is_supported());
        assert!(!c.supports(&OpQuery::new(Operation::Put)).is_supported());
    });
}

#[test]
fn sendrecv_meets_sends_receives_and_batches() {
    let shared = common::toy::World::new(2);
    world_on(&shared, |c| {
        let peer = 1 - c.rank();
        let tagged = |tag| c.with(CallOptions::new().tag(tag));
        if c.rank() == 0 {
            // The two sides have types and lengths of their own.
            let (x, mut y) = ([1.5f32, 2.5, 3.5], [0u8; 2]);
            c.sendrecv(&x, &mut y, peer, peer).unwrap();
            assert_eq!(y, [7, 8]);
            tagged(3).sendrecv(&[30u16], &mut y[..1], peer, peer).unwrap();
            assert_eq!(y, [9, 8]);
            let (_, z) = c.sendrecv_async([4i8], vec![0i64; 2], peer, peer).unwrap().wait().unwrap();
            assert_eq!(z, [-1, -2]);
        } else {
            let mut x = [0.0f32; 3];
            c.send(&[7u8, 8], peer).unwrap();
            c.recv(&mut x, peer).unwrap();
            assert_eq!(x, [1.5, 2.5, 3.5]);
            let mut t = [0u16];
            tagged(3).batch().send(&[9u8], peer).unwrap().recv(&mut t, peer).unwrap().issue().unwrap();
            assert_eq!(t, [30]);
            let mut z = [0i8];
            c.scope(|s| s.sendrecv(&[-1i64, -2], &mut z, peer, peer).map(drop)).unwrap();
            assert_eq!(z, [4]);
        }
        // With oneself, beside the others.
        let mut own = [0u32; 2];
        c.sendrecv(&[c.rank() as u32, 9], &mut own, c.rank(), c.rank()).unwrap();
        assert_eq!(own, [c.rank() as u32, 9]);
    });
    assert!(shared.is_quiet());
}
