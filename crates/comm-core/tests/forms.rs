//! Every operation in its three forms, in and out of place, in worlds of one to four ranks.

mod common;

use comm_core::{Communicator, DType, DynBuf, DynBufMut, ReduceOp, op};
use common::{world, world_on};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Form {
    Sync,
    Async,
    Scoped,
}

const FORMS: [Form; 3] = [Form::Sync, Form::Async, Form::Scoped];
const LENGTHS: [usize; 4] = [0, 1, 7, 1000];

/// Runs `check` in every world, form and length, and makes sure that the toys are all put away.
fn everywhere(check: impl Fn(&Communicator, Form, usize) + Send + Sync + Copy + 'static) {
    for n in 1..=4 {
        let shared = common::toy::World::new(n);
        world_on(&shared, move |c| {
            for form in FORMS {
                for len in LENGTHS {
                    check(&c, form, len);
                }
            }
        });
        assert!(shared.is_quiet(), "world of {n}");
    }
}

/// Rank `r`'s contribution.
fn mine(r: usize, len: usize) -> Vec<i64> {
    (0..len as i64).map(|i| (r as i64 + 1) * 1000 + i).collect()
}

fn sum(n: usize, len: usize) -> Vec<i64> {
    (0..len).map(|i| (0..n).map(|r| mine(r, len)[i]).sum()).collect()
}

#[test]
fn all_reduce() {
    everywhere(|c, form, len| {
        let (n, mut x) = (c.size(), mine(c.rank(), len));
        match form {
            Form::Sync => c.all_reduce(&mut x, op::Sum).unwrap(),
            Form::Async => x = c.all_reduce_async(x, op::Sum).unwrap().wait().unwrap(),
            Form::Scoped => c.scope(|s| s.all_reduce(&mut x, op::Sum).map(drop)).unwrap(),
        }
        assert_eq!(x, sum(n, len), "{form:?} {len}");
    });
}

#[test]
fn all_reduce_into() {
    everywhere(|c, form, len| {
        let (n, x, mut y) = (c.size(), mine(c.rank(), len), vec![-1i64; len]);
        let mut after = x.clone();
        match form {
            Form::Sync => c.all_reduce_into(&x, &mut y, op::Sum).unwrap(),
            Form::Async => (after, y) = c.all_reduce_into_async(x.clone(), y, op::Sum).unwrap().wait().unwrap(),
            Form::Scoped => c.scope(|s| s.all_reduce_into(&x[..], &mut y[..], op::Sum).map(drop)).unwrap(),
        }
        assert_eq!(y, sum(n, len), "{form:?} {len}");
        assert_eq!((&x, &after), (&mine(c.rank(), len), &x), "the input is unchanged");
    });
}

#[test]
fn reduce() {
    everywhere(|c, form, len| {
        for root in 0..c.size() {
            let mut x = mine(c.rank(), len);
            match form {
                Form::Sync => c.reduce(&mut x, op::Sum, root).unwrap(),
                Form::Async => x = c.reduce_async(x, op::Sum, root).unwrap().wait().unwrap(),
                Form::Scoped => c.scope(|s| s.reduce(&mut x, op::Sum, root).map(drop)).unwrap(),
            }
            // The others keep what they had, although toys scribble over what they are given.
            let want = if c.rank() == root { sum(c.size(), len) } else { mine(c.rank(), len) };
            assert_eq!(x, want, "{form:?} {len} root {root}");
        }
    });
}

#[test]
fn reduce_into() {
    everywhere(|c, form, len| {
        for root in 0..c.size() {
            let (x, at_root) = (mine(c.rank(), len), c.rank() == root);
            // Only the root needs an output; one that others pass is left alone.
            for with_output in [true, false] {
                let mut y = vec![-1i64; len];
                let given = at_root || with_output;
                match form {
                    Form::Sync => c.reduce_into(&x, given.then_some(&mut y), op::Sum, root).unwrap(),
                    Form::Async => {
                        let out = given.then(|| y.clone());
                        let w = c.reduce_into_async(x.clone(), out, op::Sum, root).unwrap();
                        let (back, out) = w.wait().unwrap();
                        assert_eq!(back, x);
                        assert_eq!(out.is_some(), given);
                        y = out.unwrap_or(y);
                    }
                    Form::Scoped => {
                        c.scope(|s| s.reduce_into(&x, given.then_some(&mut y), op::Sum, root).map(drop)).unwrap();
                    }
                }
                let want = if at_root { sum(c.size(), len) } else { vec![-1; len] };
                assert_eq!(y, want, "{form:?} {len} root {root}");
                assert_eq!(x, mine(c.rank(), len), "the input is unchanged");
            }
        }
    });
}

#[test]
fn broadcast() {
    everywhere(|c, form, len| {
        for root in 0..c.size() {
            let mut x = mine(c.rank(), len);
            match form {
                Form::Sync => c.broadcast(&mut x, root).unwrap(),
                Form::Async => x = c.broadcast_async(x, root).unwrap().wait().unwrap(),
                Form::Scoped => c.scope(|s| s.broadcast(&mut x, root).map(drop)).unwrap(),
            }
            assert_eq!(x, mine(root, len), "{form:?} {len} root {root}");
        }
    });
}

fn gathered(n: usize, len: usize) -> Vec<i64> {
    (0..n).flat_map(|r| mine(r, len)).collect()
}

#[test]
fn all_gather() {
    everywhere(|c, form, len| {
        let (n, x) = (c.size(), mine(c.rank(), len));
        let mut y = vec![-1i64; n * len];
        match form {
            Form::Sync => c.all_gather(&x, &mut y).unwrap(),
            Form::Async => {
                let (back, out) = c.all_gather_async(x.clone(), y).unwrap().wait().unwrap();
                assert_eq!(back, x);
                y = out;
            }
            Form::Scoped => c.scope(|s| s.all_gather(&x, &mut y).map(drop)).unwrap(),
        }
        assert_eq!(y, gathered(n, len), "{form:?} {len}");
        assert_eq!(x, mine(c.rank(), len), "the input is unchanged");
    });
}

#[test]
fn all_gather_in_place() {
    everywhere(|c, form, len| {
        let n = c.size();
        let mut y = vec![-1i64; n * len];
        y[c.rank() * len..(c.rank() + 1) * len].copy_from_slice(&mine(c.rank(), len));
        match form {
            Form::Sync => c.all_gather_in_place(&mut y).unwrap(),
            Form::Async => y = c.all_gather_in_place_async(y).unwrap().wait().unwrap(),
            Form::Scoped => c.scope(|s| s.all_gather_in_place(&mut y).map(drop)).unwrap(),
        }
        assert_eq!(y, gathered(n, len), "{form:?} {len}");
    });
}

#[test]
fn reduce_scatter() {
    everywhere(|c, form, len| {
        let (n, me) = (c.size(), c.rank());
        let (x, mut y) = (mine(me, n * len), vec![-1i64; len]);
        match form {
            Form::Sync => c.reduce_scatter(&x, &mut y, op::Sum).unwrap(),
            Form::Async => {
                let (back, out) = c.reduce_scatter_async(x.clone(), y, op::Sum).unwrap().wait().unwrap();
                assert_eq!(back, x);
                y = out;
            }
            Form::Scoped => c.scope(|s| s.reduce_scatter(&x, &mut y, op::Sum).map(drop)).unwrap(),
        }
        assert_eq!(y, sum(n, n * len)[me * len..(me + 1) * len], "{form:?} {len}");
        assert_eq!(x, mine(me, n * len), "the input is unchanged");
    });
}

#[test]
fn reduce_scatter_in_place() {
    everywhere(|c, form, len| {
        let (n, me) = (c.size(), c.rank());
        let mut x = mine(me, n * len);
        match form {
            Form::Sync => c.reduce_scatter_in_place(&mut x, op::Sum).unwrap(),
            Form::Async => x = c.reduce_scatter_in_place_async(x, op::Sum).unwrap().wait().unwrap(),
            Form::Scoped => c.scope(|s| s.reduce_scatter_in_place(&mut x, op::Sum).map(drop)).unwrap(),
        }
        assert_eq!(x[me * len..(me + 1) * len], sum(n, n * len)[me * len..(me + 1) * len], "{form:?} {len}");
    });
}

#[test]
fn send_and_recv_round_a_ring() {
    everywhere(|c, form, len| {
        let (n, me) = (c.size(), c.rank());
        let (next, prev) = ((me + 1) % n, (me + n - 1) % n);
        let (x, mut y) = (mine(me, len), vec![-1i64; len]);
        match form {
            Form::Sync => {
                c.send(&x, next).unwrap();
                c.recv(&mut y, prev).unwrap();
            }
            Form::Async => {
                let s = c.send_async(x.clone(), next).unwrap();
                let r = c.recv_async(y, prev).unwrap();
                assert_eq!(s.wait().unwrap(), x);
                y = r.wait().unwrap();
            }
            Form::Scoped => c
                .scope(|s| {
                    s.send(&x, next)?;
                    s.recv(&mut y, prev).map(drop)
                })
                .unwrap(),
        }
        assert_eq!(y, mine(prev, len), "{form:?} {len}");
        assert_eq!(x, mine(me, len));
    });
}

#[test]
fn receives_may_be_posted_before_sends_and_in_any_order_of_peers() {
    // The order that every MPI program uses: all receives, then all sends, then wait for all. A later
    // operation must not wait behind a receive whose message only comes after it.
    for form in [Form::Async, Form::Scoped] {
        world(3, move |c| {
            let (n, me) = (c.size(), c.rank());
            let peers: Vec<usize> = (0..n).filter(|p| *p != me).collect();
            match form {
                Form::Async => {
                    let recvs: Vec<_> = peers.iter().map(|p| c.recv_async(vec![-1i64; 3], *p).unwrap()).collect();
                    let sends: Vec<_> = peers.iter().map(|p| c.send_async(mine(me, 3), *p).unwrap()).collect();
                    comm_core::wait_all(sends).unwrap();
                    for (p, got) in peers.iter().zip(comm_core::wait_all(recvs).unwrap()) {
                        assert_eq!(got, mine(*p, 3));
                    }
                }
                _ => {
                    let (x, mut y) = (mine(me, 3), vec![vec![-1i64; 3]; n]);
                    c.scope(|s| {
                        for (p, y) in y.iter_mut().enumerate().filter(|(p, _)| *p != me) {
                            s.recv(y, p)?;
                        }
                        peers.iter().try_for_each(|p| s.send(&x, *p).map(drop))
                    })
                    .unwrap();
                    assert!(peers.iter().all(|p| y[*p] == mine(*p, 3)));
                }
            }
        });
    }
}

#[test]
fn an_asynchronous_receive_does_not_hold_up_collectives() {
    world(2, |c| {
        let r = c.recv_async(vec![0u8; 1], 1 - c.rank()).unwrap();
        let x = c.all_reduce_async(vec![1u8], op::Sum).unwrap().wait().unwrap();
        c.send(&x, 1 - c.rank()).unwrap();
        assert_eq!(r.wait().unwrap(), [2]);
    });
}

#[test]
fn tags_keep_messages_apart() {
    world(2, |c| {
        let tag = |t| c.with(comm_core::CallOptions::new().tag(t));
        if c.rank() == 0 {
            for (t, v) in [(7, 70u16), (8, 80), (7, 71)] {
                tag(t).send(&[v], 1).unwrap();
            }
        } else {
            let got: Vec<u16> = [8, 7, 7]
                .map(|t| {
                    let mut x = [0u16];
                    tag(t).recv(&mut x, 0).unwrap();
                    x[0]
                })
                .to_vec();
            assert_eq!(got, [80, 70, 71]);
        }
    });
}

#[test]
fn batches() {
    everywhere(|c, form, len| {
        let (n, me) = (c.size(), c.rank());
        let (next, prev) = ((me + 1) % n, (me + n - 1) % n);
        let (x, back, mut a, mut b) = (mine(me, len), mine(me + 50, len), vec![-1i64; len], vec![-1i64; len]);
        match form {
            Form::Sync => {
                let mut batch = c.batch().recv(&mut a, prev).unwrap().send(&x, next).unwrap();
                batch = batch.tag(9).recv(&mut b, next).unwrap().send(&back, prev).unwrap();
                assert_eq!(batch.ops().len(), 4);
                assert_eq!((batch.ops()[1].peer, batch.ops()[1].tag, batch.ops()[1].count), (next, 0, len));
                assert_eq!(batch.ops()[2].tag, 9);
                // A batch may be issued again.
                batch.issue().unwrap();
                batch.issue().unwrap();
            }
            Form::Async => {
                let mut batch = c.batch_async();
                let ra = batch.recv(a, prev).unwrap();
                let sa = batch.send(x.clone(), next).unwrap();
                batch.tag(9);
                let rb = batch.recv(b, next).unwrap();
                batch.send(back, prev).unwrap();
                let mut bufs = batch.issue().unwrap().wait().unwrap();
                (a, b) = (bufs.take(ra).unwrap(), bufs.take(rb).unwrap());
                assert_eq!(bufs.take(sa), Some(x));
                assert_eq!(bufs.take(sa), None, "taken before");
            }
            Form::Scoped => c
                .scope(|s| {
                    let batch = s.batch().recv(&mut a, prev)?.send(&x, next)?;
                    let batch = batch.tag(9).recv(&mut b, next)?.send(&back, prev)?;
                    batch.issue()?.wait()
                })
                .unwrap(),
        }
        assert_eq!(a, mine(prev, len), "{form:?} {len}");
        assert_eq!(b, mine(next + 50, len), "{form:?} {len}");
    });
}

#[test]
fn batches_of_inline_buffers() {
    // Arrays lie inside the batch's own allocation, which moves with the batch.
    world(2, |c| {
        let mut batch = c.batch_async();
        let slot = batch.recv([0u32; 4], 1 - c.rank()).unwrap();
        batch.send([c.rank() as u32 + 5; 4], 1 - c.rank()).unwrap();
        let moved = Box::new(batch);
        let mut bufs = moved.issue().unwrap().wait().unwrap();
        assert_eq!(bufs.take(slot), Some([6 - c.rank() as u32; 4]));
    });
}

#[test]
fn a_batch_is_issued_again_with_other_contents_and_lengths() {
    world(2, |c| {
        let (me, peer) = (c.rank() as u64, 1 - c.rank());
        let theirs = peer as u64;
        let mut batch = c.batch_async();
        let out = batch.send(vec![me; 4], peer).unwrap();
        batch.tag(3);
        batch.send([me + 10], peer).unwrap();
        let tagged = batch.recv([0u64], peer).unwrap();
        batch.tag(0);
        let got = batch.recv(vec![9u64; 4], peer).unwrap();
        let mut bufs = batch.issue().unwrap().wait().unwrap();
        assert_eq!(bufs.get_mut(got).unwrap()[..], [theirs; 4]);
        assert_eq!(bufs.get_mut(tagged), Some(&mut [theirs + 10]));
        for round in 1..4 {
            let len = 1000 * round;
            *bufs.get_mut(out).unwrap() = vec![me + 100 * round as u64; len];
            bufs.get_mut(got).unwrap().resize(len, 7);
            let again = c.batch_again(bufs).unwrap();
            let tags: Vec<_> = again.ops().iter().map(|o| (o.tag, o.count)).collect();
            assert_eq!(tags, [(0, len), (3, 1), (3, 1), (0, len)]);
            bufs = again.issue().unwrap().wait().unwrap();
            assert_eq!(*bufs.get_mut(got).unwrap(), vec![theirs + 100 * round as u64; len]);
            assert_eq!(bufs.get_mut(tagged), Some(&mut [theirs + 10]));
        }
        assert!(bufs.take(got).is_some());
        let e = c.batch_again(bufs).unwrap_err();
        assert!(e.to_string().contains("entry 3"), "{e}");
    });
}

#[test]
fn barrier() {
    use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
    static ARRIVED: [AtomicUsize; 12] = [const { AtomicUsize::new(0) }; 12];
    for n in 1..=4 {
        world(n, move |c| {
            for (i, form) in FORMS.into_iter().enumerate() {
                let arrived = &ARRIVED[(n - 1) * 3 + i];
                arrived.fetch_add(1, SeqCst);
                match form {
                    Form::Sync => c.barrier().unwrap(),
                    Form::Async => c.barrier_async().unwrap().wait().unwrap(),
                    Form::Scoped => c.scope(|s| s.barrier()?.wait()).unwrap(),
                }
                assert_eq!(arrived.load(SeqCst), n);
            }
        });
    }
}

#[test]
fn dynamic_calls() {
    fn bytes(x: &[i32]) -> Vec<u8> {
        x.iter().flat_map(|v| v.to_ne_bytes()).collect()
    }
    fn ints(x: &[u8]) -> Vec<i32> {
        x.as_chunks::<4>().0.iter().map(|c| i32::from_ne_bytes(*c)).collect()
    }
    world(2, |c| {
        let d = DType::I32;
        let (r, other) = (c.rank() as i32, 1 - c.rank());
        let x = bytes(&[r + 1, 10 * (r + 1)]);
        let (mut y, mut one, mut four) = (x.clone(), vec![0; 4], vec![0; 16]);
        c.all_reduce_dyn(DynBufMut::new(&mut y, d).unwrap(), ReduceOp::Max).unwrap();
        assert_eq!(ints(&y), [2, 20]);
        c.all_reduce_into_dyn(DynBuf::new(&x, d).unwrap(), DynBufMut::new(&mut y, d).unwrap(), ReduceOp::Sum).unwrap();
        assert_eq!(ints(&y), [3, 30]);
        y.copy_from_slice(&x);
        c.reduce_dyn(DynBufMut::new(&mut y, d).unwrap(), ReduceOp::Prod, 1).unwrap();
        assert_eq!(ints(&y), if r == 1 { [2, 200] } else { [1, 10] });
        let out = (r == 0).then(|| DynBufMut::new(&mut y, d).unwrap());
        c.reduce_into_dyn(DynBuf::new(&x, d).unwrap(), out, ReduceOp::Sum, 0).unwrap();
        assert_eq!(ints(&y), if r == 1 { [2, 200] } else { [3, 30] });
        c.reduce_scatter_dyn(DynBuf::new(&x, d).unwrap(), DynBufMut::new(&mut one, d).unwrap(), ReduceOp::Avg).unwrap();
        assert_eq!(ints(&one), [[1], [15]][c.rank()]);
        y.copy_from_slice(&x);
        c.reduce_scatter_in_place_dyn(DynBufMut::new(&mut y, d).unwrap(), ReduceOp::Sum).unwrap();
        assert_eq!(ints(&y)[c.rank()], [3, 30][c.rank()]);
        y.copy_from_slice(&x);
        c.broadcast_dyn(DynBufMut::new(&mut y, d).unwrap(), 1).unwrap();
        assert_eq!(ints(&y), [2, 20]);
        c.all_gather_dyn(DynBuf::new(&x, d).unwrap(), DynBufMut::new(&mut four, d).unwrap()).unwrap();
        assert_eq!(ints(&four), [1, 10, 2, 20]);
        four.fill(0);
        four[c.rank() * 8..][..8].copy_from_slice(&x);
        c.all_gather_in_place_dyn(DynBufMut::new(&mut four, d).unwrap()).unwrap();
        assert_eq!(ints(&four), [1, 10, 2, 20]);
        c.send_dyn(DynBuf::new(&x, d).unwrap(), other).unwrap();
        c.recv_dyn(DynBufMut::new(&mut y, d).unwrap(), other).unwrap();
        assert_eq!(ints(&y), [2 - r, 10 * (2 - r)]);
    });
}

#[test]
fn operators_with_data_and_users_types() {
    world(3, |c| {
        let r = c.rank();
        let mut x = [1.0f32, 2.0];
        c.all_reduce(&mut x, op::PreMulSum(10f32.powi(r as i32))).unwrap();
        assert_eq!(x, [111.0, 222.0]);
        let loc = |value, index| op::Loc { value, index };
        let mut l = [loc(5.0f64, r as u64), loc(r as f64, 7 + r as u64)];
        c.all_reduce(&mut l, op::MaxLoc).unwrap();
        assert_eq!(l, [loc(5.0, 0), loc(2.0, 9)]);
        // Not commutative: rank order.
        let concat =
            op::custom(|a: &mut [u64], b: &[u64]| a.iter_mut().zip(b).for_each(|(a, b)| *a = *a * 10 + b), false);
        let mut d = [r as u64 + 1];
        c.all_reduce(&mut d, concat).unwrap();
        assert_eq!(d, [123]);
        let mut avg = [-(r as i8) - 1; 3];
        c.all_reduce(&mut avg, op::Avg).unwrap();
        assert_eq!(avg, [-2; 3]);
    });
}

/// The bytes themselves: looking at a `bool` the compiler trusts the type, and a test would prove nothing.
fn bytes_of(x: &[bool]) -> &[u8] {
    // SAFETY: a `bool` is one initialised byte.
    unsafe { std::slice::from_raw_parts(x.as_ptr().cast(), x.len()) }
}

#[test]
fn received_bools_are_valid() {
    world(2, |c| {
        // The peer's bytes are no bools.
        if c.rank() == 0 {
            c.send(&[0u8, 1, 2, 255], 1).unwrap();
            c.broadcast(&mut [0u8, 1, 2, 255], 0).unwrap();
        } else {
            let mut x = [false; 4];
            c.recv(&mut x, 0).unwrap();
            assert_eq!(bytes_of(&x), [0, 1, 1, 1]);
            let y = c.broadcast_async(vec![false; 4], 0).unwrap().wait().unwrap();
            assert_eq!(bytes_of(&y), [0, 1, 1, 1]);
        }
    });
}

#[test]
fn bools_are_valid_after_errors_and_in_scratch_space_too() {
    use common::mock::Mock;
    fn all_valid(x: &[bool]) -> bool {
        bytes_of(x).iter().all(|b| *b <= 1)
    }
    let mock = Mock::new();
    let comm = mock.comm();
    *mock.sync_fill.lock() = Some(7);
    let check = |fails: bool| {
        let (mut x, mut y, mut z) = ([false; 4], [false; 8], [false; 4]);
        assert_eq!(comm.recv(&mut x, 1).is_err(), fails);
        assert!(all_valid(&x), "recv");
        assert_eq!(comm.all_reduce(&mut x, op::BOr).is_err(), fails);
        assert!(all_valid(&x), "all_reduce");
        assert_eq!(comm.all_gather(&x[..2], &mut z[..]).is_err(), fails);
        assert!(all_valid(&z), "all_gather");
        assert_eq!(comm.reduce_scatter_in_place(&mut y, op::BOr).is_err(), fails);
        assert!(all_valid(&y), "the part that is not the result");
        assert_eq!(comm.reduce(&mut x, op::BOr, 0).is_err(), fails);
        assert!(all_valid(&x), "reduce");
        assert_eq!(comm.batch().recv(&mut x, 1).unwrap().issue().is_err(), fails);
        assert!(all_valid(&x), "batch");
        let w = comm.all_reduce_async(vec![false; 4], op::BAnd).unwrap();
        let op = mock.op(mock.started() - 1);
        op.write(9);
        op.complete(if fails { Err(comm_core::Error::invalid("test")) } else { Ok(()) });
        let (x, r) = w.into_parts();
        assert_eq!(r.is_err(), fails);
        assert!(all_valid(&x.unwrap()), "async");
    };
    check(false);
    *mock.sync_result.lock() = Err(comm_core::Error::invalid("test"));
    check(true);
}

#[test]
fn custom_operators_see_only_valid_bools() {
    let xor = op::custom(|a: &mut [bool], b: &[bool]| a.iter_mut().zip(b).for_each(|(a, b)| *a = *a != *b), true);
    let r = comm_core::Operator::<bool>::reducer(&xor);
    let (mut acc, mut x) = ([2u8, 3, 0, 0], [4u8, 0, 5, 0]);
    r.fold(&mut acc, &mut x);
    assert_eq!(acc, [0, 1, 1, 0]);
}
