//! Many operations at once: outstanding ones, several threads, several communicators.

use comm_core::{CallOptions, Communicator, Result, Work, op, wait_all, wait_any};

use super::values::mix;
use super::{END, Rank, same};

/// Hundreds of outstanding operations of all kinds, waited for in another order than they were issued in.
pub fn outstanding(r: &Rank<'_>) -> Result<()> {
    let count = |k: usize| [1usize, 100, 5000, 0, 3000][k % 5];
    let want = |k: usize| (0..r.n).map(|q| (q + k) as u64).sum::<u64>();
    let issue = |k: usize| r.comm.all_reduce_async(vec![(r.me + k) as u64; count(k)], op::Sum);
    let check = |k: usize, x: &[u64]| {
        assert_eq!(x.len(), count(k));
        assert!(x.iter().all(|v| *v == want(k)), "operation {k}: {:?} instead of {}", x.first(), want(k));
    };
    let mut works = (0..300).map(issue).collect::<Result<Vec<_>>>()?;
    for k in (0..works.len()).rev() {
        check(k, &works.remove(k).wait()?);
    }
    // By whichever is done first.
    let mut numbers: Vec<usize> = (0..60).collect();
    let mut works = numbers.iter().map(|k| issue(*k)).collect::<Result<Vec<_>>>()?;
    while !works.is_empty() {
        let (i, x) = wait_any(&mut works)?;
        check(numbers.remove(i), &x?);
    }
    // In a scope, with messages in between.
    let (next, prev) = ((r.me + 1) % r.n, (r.me + r.n - 1) % r.n);
    let mut bufs: Vec<Vec<u64>> = (0..200).map(|k| vec![(r.me + k) as u64; count(k)]).collect();
    let out: Vec<Vec<u64>> = (0..50).map(|k| vec![(r.me * 100 + k) as u64; 900 * k]).collect();
    let mut into: Vec<Vec<u64>> = (0..50).map(|k| vec![0; 900 * k]).collect();
    r.comm.scope(|s| {
        let mut messages = out.iter().zip(into.iter_mut());
        for (k, b) in bufs.iter_mut().enumerate() {
            s.all_reduce(b, op::Sum)?;
            if k % 4 == r.me % 4
                && let Some((o, i)) = messages.next()
            {
                s.send(o, next)?;
                s.recv(i, prev)?;
            }
        }
        Ok(())
    })?;
    for (k, b) in bufs.iter().enumerate() {
        check(k, b);
    }
    for (k, i) in into.iter().enumerate() {
        assert!(i.iter().all(|v| *v == (prev * 100 + k) as u64), "message {k}");
    }
    mixed(r)
}

/// All operations at once, on one rank asynchronous, on the others not.
fn mixed(r: &Rank<'_>) -> Result<()> {
    let n = r.n;
    for turn in 0..8 {
        let x: Vec<i64> = (0..64 * n).map(|i| mix(r.me, i, turn) as i64).collect();
        let column = |i: usize| (0..n).map(move |q| mix(q, i, turn) as i64);
        let sum: Vec<i64> = (0..64 * n).map(|i| column(i).fold(0, i64::wrapping_add)).collect();
        let max: Vec<i64> = (0..64 * n).map(|i| column(i).max().unwrap()).collect();
        let every: Vec<i64> = (0..n).flat_map(|q| (0..64 * n).map(move |i| mix(q, i, turn) as i64)).collect();
        let mine = r.me * 64..(r.me + 1) * 64;
        let root = turn as usize % n;
        let (a, b, c, d, e);
        if turn as usize % n == r.me {
            let wa = r.comm.all_reduce_async(x.clone(), op::Sum)?;
            let wb = r.comm.reduce_async(x.clone(), op::Max, root)?;
            let wc = r.comm.all_gather_async(x.clone(), vec![0; x.len() * n])?;
            let wd = r.comm.reduce_scatter_async(x.clone(), vec![0; 64], op::Sum)?;
            let we = r.comm.broadcast_async(x.clone(), root)?;
            let wf = r.comm.barrier_async()?;
            wf.wait()?;
            e = we.wait()?;
            d = wd.wait()?.1;
            c = wc.wait()?.1;
            b = wb.wait()?;
            a = wa.wait()?;
        } else {
            let (mut pa, mut pb, mut pc, mut pd, mut pe) =
                (x.clone(), x.clone(), vec![0; x.len() * n], vec![0; 64], x.clone());
            r.comm.all_reduce(&mut pa, op::Sum)?;
            r.comm.reduce(&mut pb, op::Max, root)?;
            r.comm.all_gather(&x, &mut pc)?;
            r.comm.reduce_scatter(&x, &mut pd, op::Sum)?;
            r.comm.broadcast(&mut pe, root)?;
            r.comm.barrier()?;
            (a, b, c, d, e) = (pa, pb, pc, pd, pe);
        }
        same(&a, &sum, &|| "mixed all_reduce".into());
        same(&b, if root == r.me { &max } else { &x }, &|| "mixed reduce".into());
        same(&c, &every, &|| "mixed all_gather".into());
        same(&d, &sum[mine], &|| "mixed reduce_scatter".into());
        same(&e, &every[root * 64 * n..(root + 1) * 64 * n], &|| "mixed broadcast".into());
    }
    Ok(())
}

/// Several threads send and receive on one communicator at once, each with a tag of its own; one of them
/// does collectives meanwhile.
pub fn threads(r: &Rank<'_>) -> Result<()> {
    let (comm, n, me) = (r.comm, r.n, r.me);
    let (next, prev) = ((me + 1) % n, (me + n - 1) % n);
    let talk = move |tag: u32| -> Result<()> {
        let w = comm.with(CallOptions::new().tag(tag));
        for k in 0..30usize {
            let count = [1usize, 500, 20_000][(k + tag as usize) % 3];
            let x: Vec<u32> = (0..count).map(|i| mix(me, i, (k as u64) << 8 | u64::from(tag)) as u32).collect();
            let want: Vec<u32> = (0..count).map(|i| mix(prev, i, (k as u64) << 8 | u64::from(tag)) as u32).collect();
            let mut y = vec![0u32; count];
            if n > 1 && me == 0 && k % 2 == 0 {
                w.send(&x, next)?;
                w.recv(&mut y, prev)?;
            } else if n > 1 && k % 2 == 0 {
                w.recv(&mut y, prev)?;
                w.send(&x, next)?;
            } else {
                let s = w.send_async(x, next)?;
                w.recv(&mut y, prev)?;
                s.wait()?;
            }
            same(&y, &want, &|| format!("thread {tag}, message {k}"));
        }
        Ok(())
    };
    std::thread::scope(|s| {
        let talkers: Vec<_> = (1..5).map(|t| s.spawn(move || talk(t))).collect();
        for k in 0..40u64 {
            let mut x = vec![k + me as u64; 700];
            comm.all_reduce(&mut x, op::Sum)?;
            let want = (0..n as u64).map(|q| q + k).sum::<u64>();
            assert!(x.iter().all(|v| *v == want));
        }
        talkers.into_iter().try_for_each(|t| t.join().unwrap())
    })
}

/// Several communicators: interleaved by one thread, and each by a thread of its own.
pub fn communicators(r: &Rank<'_>, make: &dyn Fn(&str) -> Result<Communicator>) -> Result<()> {
    let (n, me) = (r.n, r.me);
    let comms = ["one", "two", "three"].into_iter().map(make).collect::<Result<Vec<_>>>()?;
    for c in &comms {
        assert_eq!((c.rank(), c.size()), (me, r.n));
    }
    // Interleaved, with operations of the first outstanding while the others run.
    for k in 0..20u64 {
        let works: Vec<Work<Vec<u64>>> = comms
            .iter()
            .enumerate()
            .map(|(c, comm)| comm.all_reduce_async(vec![k + c as u64 + me as u64; 3000], op::Sum))
            .collect::<Result<_>>()?;
        let mut x = vec![me as u64; 10];
        comms[(k % 3) as usize].all_reduce(&mut x, op::Max)?;
        assert_eq!(x, vec![n as u64 - 1; 10]);
        for (c, x) in wait_all(works)?.into_iter().enumerate() {
            let want = (0..n as u64).map(|q| k + c as u64 + q).sum::<u64>();
            assert!(x.iter().all(|v| *v == want));
        }
    }
    // In the same order from one thread each.
    std::thread::scope(|s| {
        let all: Vec<_> = comms
            .iter()
            .enumerate()
            .map(|(c, comm)| {
                s.spawn(move || -> Result<()> {
                    for k in 0..60u64 {
                        let count = [1usize, 1000, 30_000][(k as usize + c) % 3];
                        let mut x = vec![k * 7 + c as u64 + me as u64; count];
                        comm.all_reduce(&mut x, op::Sum)?;
                        let want = (0..n as u64).map(|q| k * 7 + c as u64 + q).sum::<u64>();
                        assert!(x.iter().all(|v| *v == want), "communicator {c}, turn {k}");
                        comm.barrier()?;
                    }
                    Ok(())
                })
            })
            .collect();
        all.into_iter().try_for_each(|t| t.join().unwrap())
    })?;
    comms.iter().try_for_each(|c| c.finalize(END))
}
