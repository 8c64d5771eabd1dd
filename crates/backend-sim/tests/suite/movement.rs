//! Point-to-point messages, structs, booleans, messages to oneself.

use comm_core::{CallOptions, DType, DynBuf, DynBufMut, Pod, Result};

use super::values::mix;
use super::{FORMS, Form, Rank, inner, padded, same, unpadded};

/// Around the limit up to which messages are sent unasked (64 KiB), in u32.
const SIZES: &[usize] = &[0, 1, 3, 1023, 1024, 16 << 10, (16 << 10) + 1, 300_007];

fn data(from: usize, to: usize, count: usize, salt: u64) -> Vec<u32> {
    (0..count).map(|i| mix(from * 1000 + to, i, salt) as u32).collect()
}

pub fn all(r: &Rank<'_>) -> Result<()> {
    ring(r)?;
    everybody_to_everybody(r)?;
    tags(r)?;
    batches(r)?;
    to_self(r)?;
    dropped(r)?;
    structs(r)?;
    booleans(r)
}

/// Each rank sends to the next, in all forms, one form at the sender and another at the receiver.
fn ring(r: &Rank<'_>) -> Result<()> {
    let (next, prev) = ((r.me + 1) % r.n, (r.me + r.n - 1) % r.n);
    if r.n == 1 {
        return Ok(());
    }
    for &count in SIZES {
        for out in FORMS {
            for into in FORMS {
                let x = data(r.me, next, count, 1);
                let want = data(prev, r.me, count, 1);
                // An odd world has two senders in a row: rank 0 receives last, so that the chain resolves.
                let got = if r.me.is_multiple_of(2) {
                    send(r, out, x, next)?;
                    recv(r, into, count, prev)?
                } else {
                    let got = recv(r, into, count, prev)?;
                    send(r, out, x, next)?;
                    got
                };
                same(&got, &want, &|| format!("ring x{count} {out:?} to {into:?}, rank {} of {}", r.me, r.n));
            }
        }
    }
    Ok(())
}

fn send(r: &Rank<'_>, form: Form, x: Vec<u32>, to: usize) -> Result<()> {
    let before = x.clone();
    let x = match form {
        Form::Async => r.comm.send_async(x, to)?.wait()?,
        Form::Sync => {
            r.comm.send(&x, to)?;
            x
        }
        Form::Scoped => {
            r.comm.scope(|s| s.send(&x, to)?.wait().map(drop))?;
            x
        }
    };
    same(&x, &before, &|| "send changed its buffer".into());
    Ok(())
}

fn recv(r: &Rank<'_>, form: Form, count: usize, from: usize) -> Result<Vec<u32>> {
    if form == Form::Async {
        return r.comm.recv_async(vec![9u32; count], from)?.wait();
    }
    let mut v = padded(&vec![9u32; count], 0xdead_beef);
    if form == Form::Sync {
        r.comm.recv(inner(&mut v), from)?;
    } else {
        r.comm.scope(|s| s.recv(inner(&mut v), from).map(drop))?;
    }
    Ok(unpadded(v, 0xdead_beef))
}

/// All pairs at once, several messages per pair of mixed sizes, received from the last pair first.
fn everybody_to_everybody(r: &Rank<'_>) -> Result<()> {
    let counts = |from: usize, to: usize| (0..5).map(move |k| [0, 7, 2000, 17_000, 40_000][(from + to + k) % 5]);
    let mut sends = Vec::new();
    for to in 0..r.n {
        for (k, count) in counts(r.me, to).enumerate() {
            sends.push(r.comm.send_async(data(r.me, to, count, k as u64), to)?);
        }
    }
    for from in (0..r.n).rev() {
        for (k, count) in counts(from, r.me).enumerate() {
            let mut x = vec![0u32; count];
            r.comm.recv(&mut x, from)?;
            same(&x, &data(from, r.me, count, k as u64), &|| format!("message {k} from {from} to {}", r.me));
        }
    }
    comm_core::wait_all(sends)?;
    Ok(())
}

/// Messages of different tags are received in another order than they are sent; those of one tag in order.
fn tags(r: &Rank<'_>) -> Result<()> {
    let (next, prev) = ((r.me + 1) % r.n, (r.me + r.n - 1) % r.n);
    let tagged = |t: u32| r.comm.with(CallOptions::new().tag(t));
    for count in [5usize, 20_000] {
        let mut works = Vec::new();
        for k in 0..12u32 {
            works.push(tagged(k % 4).send_async(data(r.me, next, count, u64::from(k)), next)?);
        }
        for tag in [2, 0, 3, 1] {
            for k in [tag, tag + 4, tag + 8] {
                let mut x = vec![0u32; count];
                tagged(tag).recv(&mut x, prev)?;
                same(&x, &data(prev, r.me, count, u64::from(k)), &|| format!("tag {tag}, message {k}"));
            }
        }
        comm_core::wait_all(works)?;
    }
    Ok(())
}

/// Batches in their three forms: both directions, all peers and oneself, in an order that would deadlock
/// as single calls.
fn batches(r: &Rank<'_>) -> Result<()> {
    for count in [0usize, 3, 1023, 40_000] {
        let out: Vec<Vec<u32>> = (0..r.n).map(|to| data(r.me, to, count, 3)).collect();
        let want: Vec<Vec<u32>> = (0..r.n).map(|from| data(from, r.me, count, 3)).collect();
        let check = |got: &[Vec<u32>], what: &str| {
            for (from, (g, w)) in got.iter().zip(&want).enumerate() {
                same(g, w, &|| format!("{what} x{count} from {from} to {}", r.me));
            }
        };
        let mut into = vec![vec![0u32; count]; r.n];
        {
            let mut b = r.comm.batch();
            // Receives first on even ranks, sends first on odd ones.
            if r.me % 2 == 1 {
                for (to, x) in out.iter().enumerate() {
                    b = b.send(x, to)?;
                }
            }
            for (from, x) in into.iter_mut().enumerate() {
                b = b.recv(x, from)?;
            }
            if r.me.is_multiple_of(2) {
                for (to, x) in out.iter().enumerate() {
                    b = b.send(x, to)?;
                }
            }
            assert_eq!(b.ops().len(), 2 * r.n);
            // A batch may be issued again.
            b.issue()?;
            b.issue()?;
        }
        check(&into, "batch");

        let mut into = vec![vec![0u32; count]; r.n];
        r.comm.scope(|s| {
            let mut b = s.batch().tag(5);
            for (from, x) in into.iter_mut().enumerate() {
                b = b.recv(x, from)?;
            }
            for (to, x) in out.iter().enumerate() {
                b = b.send(x, to)?;
            }
            b.issue()?.wait()
        })?;
        check(&into, "scoped batch");

        let mut b = r.comm.batch_async();
        b.tag(6);
        let slots = (0..r.n).map(|from| b.recv(vec![0u32; count], from)).collect::<Result<Vec<_>>>()?;
        for (to, x) in out.iter().enumerate() {
            b.send(x.clone(), to)?;
        }
        let mut buffers = b.issue()?.wait()?;
        let got: Vec<Vec<u32>> = slots.into_iter().map(|s| buffers.take(s).unwrap()).collect();
        check(&got, "async batch");
    }
    Ok(())
}

/// Messages to oneself, posted before and after, small and large.
fn to_self(r: &Rank<'_>) -> Result<()> {
    let me = r.me;
    for count in [0usize, 1, 1000, 16 << 10, (16 << 10) + 1, 500_000] {
        let x = data(me, me, count, 4);
        let what = |w: &str| format!("to oneself x{count}, {w}");
        // The send first.
        let s = r.comm.send_async(x.clone(), me)?;
        let mut y = vec![0u32; count];
        r.comm.recv(&mut y, me)?;
        same(&y, &x, &|| what("send first"));
        same(&s.wait()?, &x, &|| what("the sent buffer"));
        // The receive first.
        let w = r.comm.recv_async(vec![0u32; count], me)?;
        assert!(!w.is_completed(), "nothing has been sent");
        r.comm.send(&x, me)?;
        same(&w.wait()?, &x, &|| what("receive first"));
        // In order, several.
        let works = (0..4).map(|k| r.comm.send_async(data(me, me, count, k), me)).collect::<Result<Vec<_>>>()?;
        for k in 0..4 {
            let mut y = vec![0u32; count];
            r.comm.recv(&mut y, me)?;
            same(&y, &data(me, me, count, k), &|| what("in order"));
        }
        comm_core::wait_all(works)?;
        // From a scope, and a batch with itself.
        let mut y = vec![0u32; count];
        r.comm.scope(|s| {
            s.recv(&mut y, me)?;
            s.send(&x, me).map(drop)
        })?;
        same(&y, &x, &|| what("scoped"));
        let mut y = vec![0u32; count];
        r.comm.batch().send(&x, me)?.recv(&mut y, me)?.issue()?;
        same(&y, &x, &|| what("batch"));
    }
    // Up to 64 KiB, a synchronous send to oneself returns before its receive is posted.
    let x = data(me, me, 16 << 10, 5);
    r.comm.send(&x, me)?;
    let mut y = vec![0u32; x.len()];
    r.comm.recv(&mut y, me)?;
    same(&y, &x, &|| "synchronous, to oneself".into());
    Ok(())
}

/// A dropped handle lets the operation run to its end.
fn dropped(r: &Rank<'_>) -> Result<()> {
    let (next, prev) = ((r.me + 1) % r.n, (r.me + r.n - 1) % r.n);
    for count in [3usize, 100_000] {
        drop(r.comm.send_async(data(r.me, next, count, 6), next)?);
        let mut x = vec![0u32; count];
        r.comm.recv(&mut x, prev)?;
        same(&x, &data(prev, r.me, count, 6), &|| "a send whose handle is gone".into());
        // A receive whose handle is gone takes its message away: the next receive gets the next one.
        drop(r.comm.recv_async(vec![0u32; count], prev)?);
        let s = r.comm.send_async(data(r.me, next, count, 7), next)?;
        let t = r.comm.send_async(data(r.me, next, count, 8), next)?;
        r.comm.recv(&mut x, prev)?;
        same(&x, &data(prev, r.me, count, 8), &|| "after a receive whose handle is gone".into());
        comm_core::wait_all([s, t])?;
        // A reduction: rank 0 does not wait for its part, the others get theirs.
        let w = r.comm.all_reduce_async(vec![r.me as u64 + 1; count], comm_core::op::Sum)?;
        if r.me == 0 {
            drop(w);
        } else {
            let sum = (r.n * (r.n + 1) / 2) as u64;
            assert!(w.wait()?.iter().all(|v| *v == sum));
        }
    }
    r.comm.barrier()
}

/// A type of the program's own; 20 bytes.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
struct Particle {
    id: u32,
    at: [f32; 3],
    kind: [u8; 4],
}

// SAFETY: u32, f32 and u8 without padding; every bit pattern is valid.
unsafe impl Pod for Particle {}

fn structs(r: &Rank<'_>) -> Result<()> {
    let make = |q: usize, i: usize| {
        let h = mix(q, i, 71);
        Particle { id: h as u32, at: [q as f32, i as f32, (h % 1000) as f32], kind: [1, 2, q as u8, (h >> 50) as u8] }
    };
    let none = Particle { id: 0, at: [0.0; 3], kind: [0; 4] };
    for count in [1usize, 13, 20_001] {
        let mine: Vec<Particle> = (0..count).map(|i| make(r.me, i)).collect();
        let every: Vec<Particle> = (0..r.n).flat_map(|q| (0..count).map(move |i| make(q, i))).collect();
        let mut out = vec![none; count * r.n];
        r.comm.all_gather(&mine, &mut out)?;
        same(&out, &every, &|| "all_gather of structs".into());
        let root = r.n / 2;
        let mut b = if r.me == root { mine.clone() } else { vec![none; count] };
        r.comm.broadcast(&mut b, root)?;
        same(&b, &every[root * count..(root + 1) * count], &|| "broadcast of structs".into());
        let (next, prev) = ((r.me + 1) % r.n, (r.me + r.n - 1) % r.n);
        let w = r.comm.send_async(mine.into_boxed_slice(), next)?;
        let mut x = vec![none; count];
        r.comm.recv(&mut x, prev)?;
        same(&x, &every[prev * count..(prev + 1) * count], &|| "message of structs".into());
        w.wait()?;
    }
    Ok(())
}

/// What arrives as `bool` is 0 or 1, whatever the sender's bytes were.
fn booleans(r: &Rank<'_>) -> Result<()> {
    let wild = [0u8, 1, 2, 0xff, 0x80, 0, 3];
    let clean = [0u8, 1, 1, 1, 1, 0, 1];
    let d = DType::Bool;
    let (next, prev) = ((r.me + 1) % r.n, (r.me + r.n - 1) % r.n);
    let bits = |x: &[bool]| x.iter().map(|b| u8::from(*b)).collect::<Vec<u8>>();
    // Whether a `bool` holds a byte other than 0 and 1 cannot be asked in Rust: the dynamic form shows the bytes.
    let mut got = [7u8; 7];
    if r.n > 1 {
        if r.me == 0 {
            r.comm.send_dyn(DynBuf::new(&wild, d)?, next)?;
            r.comm.recv_dyn(DynBufMut::new(&mut got, d)?, prev)?;
        } else {
            r.comm.recv_dyn(DynBufMut::new(&mut got, d)?, prev)?;
            r.comm.send_dyn(DynBuf::new(&wild, d)?, next)?;
        }
        assert_eq!(got, clean, "recv");
        // Typed, asynchronous receive.
        let w = r.comm.recv_async(vec![false; 7], prev)?;
        r.comm.send_dyn(DynBuf::new(&wild, d)?, next)?;
        assert_eq!(bits(&w.wait()?), clean, "recv_async");
        let mut x = [false; 7];
        r.comm.scope(|s| {
            s.recv(&mut x, prev)?;
            r.comm.send_dyn(DynBuf::new(&wild, d)?, next)
        })?;
        assert_eq!(bits(&x), clean, "scoped recv");
    }
    let mut b = if r.me == 0 { wild } else { [9; 7] };
    r.comm.broadcast_dyn(DynBufMut::new(&mut b, d)?, 0)?;
    assert_eq!(b, clean, "broadcast");
    let mut all = vec![9u8; 7 * r.n];
    r.comm.all_gather_dyn(DynBuf::new(&wild, d)?, DynBufMut::new(&mut all, d)?)?;
    assert_eq!(all, clean.repeat(r.n), "all_gather");
    let mut b = wild;
    r.comm.all_reduce_dyn(DynBufMut::new(&mut b, d)?, comm_core::ReduceOp::BOr)?;
    assert_eq!(b, clean, "all_reduce");
    Ok(())
}
