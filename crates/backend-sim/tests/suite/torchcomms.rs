//! The values and expectations of torchcomms' own integration tests, operation by operation: one function per file
//! there, under that file's name. Rank `r` of `n`; "ones·k" is a buffer filled with `k`.
//!
//! Their variants (synchronous; asynchronous with `wait`; handle dropped right after; inputs freed right after the
//! call) are the forms here: an asynchronous call owns its inputs, so that "freed" is what it always is.

use std::fmt::Debug;
use std::time::Duration;

use comm_core::op::{Avg, Max, PreMulSum, Sum};
use comm_core::{CallOptions, Element, ErrorKind, Operator, Result, bf16, f16};

use super::{FORMS, Form, Rank, same};

/// Their sweep. The large one runs with `f32` only, as their reduced sweep does.
const COUNTS: [usize; 3] = [0, 4, 1024];
const LARGE: usize = 1 << 20;

/// The element types of their sweeps.
pub trait Val: Element + PartialEq + Debug {
    fn of(x: usize) -> Self;
    /// What no result is.
    fn sentinel() -> Self;
    /// Whether sums of this many ones·(r + 1) fit.
    fn holds(x: usize) -> bool;
}

macro_rules! vals {
    ($($t:ty, $of:expr, $sentinel:expr, $most:expr;)*) => {$(
        impl Val for $t {
            fn of(x: usize) -> Self { let of: fn(usize) -> $t = $of; of(x) }
            fn sentinel() -> Self { $sentinel }
            fn holds(x: usize) -> bool { x <= $most }
        }
    )*};
}

vals! {
    f32, |x| x as f32, f32::MAX, 1 << 24;
    i32, |x| x as i32, -1, 1 << 30;
    i8, |x| x as i8, -1, 127;
    bf16, |x| bf16::from_f32(x as f32), bf16::MAX, 256;
}

/// Runs for every type, count and form of the sweep.
macro_rules! sweep {
    ($f:ident, $r:expr) => {{
        let r: &Rank<'_> = $r;
        for form in FORMS {
            for count in COUNTS {
                $f::<f32>(r, count, form)?;
                $f::<i32>(r, count, form)?;
                $f::<i8>(r, count, form)?;
            }
        }
        // Theirs run on 4 ranks.
        if r.n <= 4 {
            $f::<f32>(r, LARGE, Form::Sync)?;
            $f::<f32>(r, LARGE, Form::Async)?;
        }
        Result::<()>::Ok(())
    }};
}

fn all<T: Val>(got: &[T], len: usize, want: usize, what: &str) {
    same(got, &vec![T::of(want); len], &|| what.to_owned());
}

fn fill<T: Val>(len: usize, value: usize) -> Vec<T> {
    vec![T::of(value); len]
}

fn blank<T: Val>(len: usize) -> Vec<T> {
    vec![T::sentinel(); len]
}

fn reduced<T: Val>(r: &Rank<'_>, count: usize, form: Form, op: impl Operator<T>) -> Result<Vec<T>> {
    let mut x = fill::<T>(count, r.me + 1);
    match form {
        Form::Sync => r.comm.all_reduce(&mut x, op)?,
        Form::Async => x = r.comm.all_reduce_async(x, op)?.wait()?,
        Form::Scoped => r.comm.scope(|s| s.all_reduce(&mut x, op).map(drop))?,
    }
    Ok(x)
}

pub fn all_reduce_test(r: &Rank<'_>) -> Result<()> {
    fn one<T: Val>(r: &Rank<'_>, count: usize, form: Form) -> Result<()>
    where
        Sum: Operator<T>,
        Max: Operator<T>,
        Avg: Operator<T>,
    {
        let n = r.n;
        assert!(T::holds(n * (n + 1) / 2), "the test's own sums must fit");
        all(&reduced::<T>(r, count, form, Sum)?, count, n * (n + 1) / 2, "SUM");
        all(&reduced::<T>(r, count, form, Max)?, count, n, "MAX");
        if n % 2 == 1 || T::of(1) == T::of(3) {
            all(&reduced::<T>(r, count, form, Avg)?, count, n.div_ceil(2), "AVG");
        }
        Ok(())
    }
    sweep!(one, r)?;
    // AVG of an even number of ranks: halves as floats, rounded down as integers.
    let n = r.n;
    same(&reduced::<f32>(r, 4, Form::Sync, Avg)?, &[(n as f32 + 1.0) / 2.0; 4], &|| "AVG of floats".into());
    same(&reduced::<i32>(r, 4, Form::Sync, Avg)?, &[(n as i32 + 1) / 2; 4], &|| "AVG of integers".into());
    // PREMUL_SUM with factor 2: n (n + 1).
    let w = n * (n + 1);
    for form in FORMS {
        all(&reduced::<f32>(r, 1024, form, PreMulSum(2.0f32))?, 1024, w, "PREMUL_SUM f32");
        all(&reduced::<bf16>(r, 1024, form, PreMulSum(bf16::from_f32(2.0)))?, 1024, w, "PREMUL_SUM bf16");
        let mut h = vec![f16::from_f32(r.me as f32 + 1.0); 1024];
        r.comm.all_reduce(&mut h, PreMulSum(f16::from_f32(2.0)))?;
        assert!(h.iter().all(|x| x.to_f32() == w as f32), "PREMUL_SUM f16");
        let mut d = vec![r.me as f64 + 1.0; 1024];
        r.comm.all_reduce(&mut d, PreMulSum(2.0f64))?;
        assert!(d.iter().all(|x| *x == w as f64), "PREMUL_SUM f64");
    }
    Ok(())
}

pub fn broadcast_test(r: &Rank<'_>) -> Result<()> {
    fn one<T: Val>(r: &Rank<'_>, count: usize, form: Form) -> Result<()> {
        // Theirs has root 0 only.
        for root in 0..r.n {
            for value in [42, 99] {
                let mut x = fill::<T>(count, if r.me == root { value } else { 0 });
                match form {
                    Form::Sync => r.comm.broadcast(&mut x, root)?,
                    Form::Async => x = r.comm.broadcast_async(x, root)?.wait()?,
                    Form::Scoped => r.comm.scope(|s| s.broadcast(&mut x, root).map(drop))?,
                }
                all(&x, count, value, "broadcast");
            }
        }
        Ok(())
    }
    sweep!(one, r)
}

pub fn reduce_test(r: &Rank<'_>) -> Result<()> {
    fn one<T: Val>(r: &Rank<'_>, count: usize, form: Form) -> Result<()>
    where
        Sum: Operator<T>,
        Max: Operator<T>,
    {
        for root in 0..r.n {
            for max in [false, true] {
                let mut x = fill::<T>(count, r.me + 1);
                match (form, max) {
                    (Form::Sync, false) => r.comm.reduce(&mut x, Sum, root)?,
                    (Form::Sync, true) => r.comm.reduce(&mut x, Max, root)?,
                    (Form::Async, false) => x = r.comm.reduce_async(x, Sum, root)?.wait()?,
                    (Form::Async, true) => x = r.comm.reduce_async(x, Max, root)?.wait()?,
                    (Form::Scoped, false) => r.comm.scope(|s| s.reduce(&mut x, Sum, root).map(drop))?,
                    (Form::Scoped, true) => r.comm.scope(|s| s.reduce(&mut x, Max, root).map(drop))?,
                }
                let result = if max { r.n } else { r.n * (r.n + 1) / 2 };
                // They do not check other ranks, whose buffers some of their backends clobber.
                all(&x, count, if r.me == root { result } else { r.me + 1 }, "reduce");
            }
        }
        Ok(())
    }
    sweep!(one, r)?;
    let mut x = [r.me as i32 + 1; 4];
    r.comm.reduce(&mut x, Avg, 0)?;
    assert_eq!(x, [if r.me == 0 { (r.n as i32 + 1) / 2 } else { r.me as i32 + 1 }; 4], "AVG");
    Ok(())
}

pub fn all_gather_test(r: &Rank<'_>) -> Result<()> {
    fn one<T: Val>(r: &Rank<'_>, count: usize, form: Form) -> Result<()> {
        let (x, mut out) = (fill::<T>(count, r.me + 1), vec![blank::<T>(count); r.n]);
        match form {
            Form::Sync => r.comm.all_gather_list(&x, &mut out)?,
            Form::Async => (_, out) = r.comm.all_gather_list_async(x, out)?.wait()?,
            Form::Scoped => r.comm.scope(|s| s.all_gather_list(&x, &mut out).map(drop))?,
        }
        (0..r.n).for_each(|i| all(&out[i], count, i + 1, "all_gather"));
        Ok(())
    }
    sweep!(one, r)
}

pub fn all_gather_single_test(r: &Rank<'_>) -> Result<()> {
    fn one<T: Val>(r: &Rank<'_>, count: usize, form: Form) -> Result<()> {
        let (x, mut out) = (fill::<T>(count, r.me + 1), blank::<T>(count * r.n));
        match form {
            Form::Sync => r.comm.all_gather(&x, &mut out)?,
            Form::Async => (_, out) = r.comm.all_gather_async(x, out)?.wait()?,
            Form::Scoped => r.comm.scope(|s| s.all_gather(&x, &mut out).map(drop))?,
        }
        (0..r.n).for_each(|i| all(&out[i * count..(i + 1) * count], count, i + 1, "all_gather_single"));
        Ok(())
    }
    sweep!(one, r)?;
    // bool: the segment of rank i is (i even).
    let mut out = vec![true; 5 * r.n];
    r.comm.all_gather(&[r.me.is_multiple_of(2); 5], &mut out)?;
    assert!(out.iter().enumerate().all(|(i, b)| *b == (i / 5).is_multiple_of(2)), "{out:?}");
    Ok(())
}

pub fn all_gather_v_test(r: &Rank<'_>) -> Result<()> {
    // Theirs is synchronous only.
    fn one<T: Val>(r: &Rank<'_>, count: usize, form: Form) -> Result<()> {
        let x = fill::<T>(count + r.me, r.me + 1);
        let mut out: Vec<Vec<T>> = (0..r.n).map(|i| blank(count + i)).collect();
        match form {
            Form::Sync => r.comm.all_gather_v_list(&x, &mut out)?,
            Form::Async => (_, out) = r.comm.all_gather_v_list_async(x, out)?.wait()?,
            Form::Scoped => r.comm.scope(|s| s.all_gather_v_list(&x, &mut out).map(drop))?,
        }
        (0..r.n).for_each(|i| all(&out[i], count + i, i + 1, "all_gather_v"));
        Ok(())
    }
    sweep!(one, r)
}

pub fn reduce_scatter_test(r: &Rank<'_>) -> Result<()> {
    fn one<T: Val>(r: &Rank<'_>, count: usize, form: Form) -> Result<()>
    where
        Sum: Operator<T>,
        Max: Operator<T>,
        Avg: Operator<T>,
    {
        fn call<T: Val>(r: &Rank<'_>, count: usize, form: Form, op: impl Operator<T>) -> Result<Vec<T>> {
            let list: Vec<Vec<T>> = (0..r.n).map(|j| fill(count, j + 1)).collect();
            let mut out = blank::<T>(count);
            match form {
                Form::Sync => r.comm.reduce_scatter_list(&list, &mut out, op)?,
                Form::Async => (_, out) = r.comm.reduce_scatter_list_async(list, out, op)?.wait()?,
                Form::Scoped => r.comm.scope(|s| s.reduce_scatter_list(&list, &mut out, op).map(drop))?,
            }
            Ok(out)
        }
        all(&call::<T>(r, count, form, Sum)?, count, r.n * (r.me + 1), "SUM");
        all(&call::<T>(r, count, form, Max)?, count, r.me + 1, "MAX");
        all(&call::<T>(r, count, form, Avg)?, count, r.me + 1, "AVG");
        Ok(())
    }
    sweep!(one, r)
}

pub fn reduce_scatter_single_test(r: &Rank<'_>) -> Result<()> {
    fn one<T: Val>(r: &Rank<'_>, count: usize, form: Form) -> Result<()>
    where
        Sum: Operator<T>,
        Max: Operator<T>,
        Avg: Operator<T>,
    {
        fn call<T: Val>(r: &Rank<'_>, count: usize, form: Form, op: impl Operator<T>) -> Result<Vec<T>> {
            let x: Vec<T> = (0..r.n).flat_map(|j| fill(count, j + 1)).collect();
            let mut out = blank::<T>(count);
            match form {
                Form::Sync => r.comm.reduce_scatter(&x, &mut out, op)?,
                Form::Async => (_, out) = r.comm.reduce_scatter_async(x, out, op)?.wait()?,
                Form::Scoped => r.comm.scope(|s| s.reduce_scatter(&x, &mut out, op).map(drop))?,
            }
            Ok(out)
        }
        all(&call::<T>(r, count, form, Sum)?, count, r.n * (r.me + 1), "SUM");
        all(&call::<T>(r, count, form, Max)?, count, r.me + 1, "MAX");
        all(&call::<T>(r, count, form, Avg)?, count, r.me + 1, "AVG");
        Ok(())
    }
    sweep!(one, r)
}

pub fn reduce_scatter_v_test(r: &Rank<'_>) -> Result<()> {
    fn one<T: Val>(r: &Rank<'_>, count: usize, form: Form) -> Result<()>
    where
        Sum: Operator<T>,
        Max: Operator<T>,
    {
        fn call<T: Val>(r: &Rank<'_>, count: usize, form: Form, op: impl Operator<T>) -> Result<Vec<T>> {
            let list: Vec<Vec<T>> = (0..r.n).map(|j| fill(count + j, j + 1)).collect();
            let mut out = blank::<T>(count + r.me);
            match form {
                Form::Sync => r.comm.reduce_scatter_v_list(&list, &mut out, op)?,
                Form::Async => (_, out) = r.comm.reduce_scatter_v_list_async(list, out, op)?.wait()?,
                Form::Scoped => r.comm.scope(|s| s.reduce_scatter_v_list(&list, &mut out, op).map(drop))?,
            }
            Ok(out)
        }
        all(&call::<T>(r, count, form, Sum)?, count + r.me, r.n * (r.me + 1), "SUM");
        all(&call::<T>(r, count, form, Max)?, count + r.me, r.me + 1, "MAX");
        Ok(())
    }
    sweep!(one, r)
}

pub fn all_to_all_test(r: &Rank<'_>) -> Result<()> {
    fn one<T: Val>(r: &Rank<'_>, count: usize, form: Form) -> Result<()> {
        let (x, mut out) = (vec![fill::<T>(count, r.me + 1); r.n], vec![blank::<T>(count); r.n]);
        match form {
            Form::Sync => r.comm.all_to_all_list(&x, &mut out)?,
            Form::Async => (_, out) = r.comm.all_to_all_list_async(x, out)?.wait()?,
            Form::Scoped => r.comm.scope(|s| s.all_to_all_list(&x, &mut out).map(drop))?,
        }
        (0..r.n).for_each(|j| all(&out[j], count, j + 1, "all_to_all"));
        Ok(())
    }
    sweep!(one, r)
}

pub fn all_to_all_single_test(r: &Rank<'_>) -> Result<()> {
    fn one<T: Val>(r: &Rank<'_>, count: usize, form: Form) -> Result<()> {
        let (x, mut out) = (fill::<T>(count * r.n, r.me + 1), blank::<T>(count * r.n));
        match form {
            Form::Sync => r.comm.all_to_all(&x, &mut out)?,
            Form::Async => (_, out) = r.comm.all_to_all_async(x, out)?.wait()?,
            Form::Scoped => r.comm.scope(|s| s.all_to_all(&x, &mut out).map(drop))?,
        }
        (0..r.n).for_each(|j| all(&out[j * count..(j + 1) * count], count, j + 1, "all_to_all_single"));
        Ok(())
    }
    sweep!(one, r)
}

/// How many elements rank `i` sends to rank `j`.
type Pattern = fn(usize, usize, usize) -> usize;

pub fn all_to_all_v_single_test(r: &Rank<'_>) -> Result<()> {
    let patterns: [(&str, Pattern); 5] = [
        ("uniform", |_, _, count| count),
        ("variable", |i, j, count| (i + 1) * (j + 1) * count),
        ("zeros where (i + j) mod 3 is 0", |i, j, count| if (i + j) % 3 == 0 { 0 } else { count }),
        ("all empty", |_, _, _| 0),
        ("only to larger ranks", |i, j, count| if i < j { count } else { 0 }),
    ];
    fn one<T: Val>(r: &Rank<'_>, value: fn(usize, usize) -> usize, count: usize, p: &(&str, Pattern)) -> Result<()> {
        let send: Vec<usize> = (0..r.n).map(|j| p.1(r.me, j, count)).collect();
        let recv: Vec<usize> = (0..r.n).map(|j| p.1(j, r.me, count)).collect();
        let x: Vec<T> = send.iter().enumerate().flat_map(|(j, c)| fill(*c, value(r.me, j))).collect();
        let want: Vec<T> = recv.iter().enumerate().flat_map(|(j, c)| fill(*c, value(j, r.me))).collect();
        for form in FORMS {
            let (x, mut out) = (x.clone(), blank::<T>(want.len()));
            match form {
                Form::Sync => r.comm.all_to_all_v(&x, &mut out, &send, &recv)?,
                Form::Async => (_, out) = r.comm.all_to_all_v_async(x, out, &send, &recv)?.wait()?,
                Form::Scoped => r.comm.scope(|s| s.all_to_all_v(&x, &mut out, &send, &recv).map(drop))?,
            }
            same(&out, &want, &|| format!("{}, {count}, {form:?}", p.0));
            assert!(!out.contains(&T::sentinel()), "a sentinel is left: {}", p.0);
        }
        Ok(())
    }
    for p in &patterns {
        for count in [0, 4, 1024] {
            one::<f32>(r, |i, j| i * 100 + j + 1, count, p)?;
            one::<i32>(r, |i, j| i * 100 + j + 1, count, p)?;
            one::<i8>(r, |i, j| (i * 10 + j + 1) % 128, count, p)?;
            one::<bf16>(r, |i, j| i * 100 + j + 1, count, p)?;
        }
    }
    // Theirs counts rows of a tensor of shape (n / 2, 2); rows of two values are a `Pod` here, and counts are rows too.
    let rows: Vec<[f32; 2]> = (0..r.n).map(|j| [r.me as f32, j as f32]).collect();
    let flat: Vec<f32> = rows.concat();
    let mut out = vec![f32::NAN; 2 * r.n];
    r.comm.all_to_all_v(&flat, &mut out, &vec![2; r.n], &vec![2; r.n])?;
    assert!((0..r.n).all(|j| out[2 * j..2 * j + 2] == [j as f32, r.me as f32]), "{out:?}");
    Ok(())
}

pub fn scatter_test(r: &Rank<'_>) -> Result<()> {
    fn one<T: Val>(r: &Rank<'_>, count: usize, form: Form) -> Result<()> {
        for root in 0..r.n {
            let list = (r.me == root).then(|| (0..r.n).map(|j| fill::<T>(count, j + 1)).collect::<Vec<_>>());
            let mut out = blank::<T>(count);
            match form {
                Form::Sync => r.comm.scatter_list(list.as_ref(), &mut out, root)?,
                Form::Async => (_, out) = r.comm.scatter_list_async(list, out, root)?.wait()?,
                Form::Scoped => r.comm.scope(|s| s.scatter_list(list.as_ref(), &mut out, root).map(drop))?,
            }
            all(&out, count, r.me + 1, "scatter");
        }
        Ok(())
    }
    sweep!(one, r)
}

pub fn gather_test(r: &Rank<'_>) -> Result<()> {
    fn one<T: Val>(r: &Rank<'_>, count: usize, form: Form) -> Result<()> {
        for root in 0..r.n {
            let (x, mut out) = (fill::<T>(count, r.me + 1), (r.me == root).then(|| vec![blank::<T>(count); r.n]));
            match form {
                Form::Sync => r.comm.gather_list(&x, out.as_mut(), root)?,
                Form::Async => (_, out) = r.comm.gather_list_async(x, out, root)?.wait()?,
                Form::Scoped => r.comm.scope(|s| s.gather_list(&x, out.as_mut(), root).map(drop))?,
            }
            assert_eq!(out.is_some(), r.me == root);
            out.iter().flatten().enumerate().for_each(|(i, b)| all(b, count, i + 1, "gather"));
        }
        Ok(())
    }
    sweep!(one, r)
}

pub fn gather_single_test(r: &Rank<'_>) -> Result<()> {
    fn one<T: Val>(r: &Rank<'_>, count: usize, form: Form) -> Result<()> {
        for root in 0..r.n {
            let (x, mut out) = (fill::<T>(count, r.me + 1), (r.me == root).then(|| blank::<T>(count * r.n)));
            match form {
                Form::Sync => r.comm.gather(&x, out.as_mut(), root)?,
                Form::Async => (_, out) = r.comm.gather_async(x, out, root)?.wait()?,
                Form::Scoped => r.comm.scope(|s| s.gather(&x, out.as_mut(), root).map(drop))?,
            }
            if let Some(o) = out {
                (0..r.n).for_each(|i| all(&o[i * count..(i + 1) * count], count, i + 1, "gather_single"));
            }
        }
        Ok(())
    }
    sweep!(one, r)
}

pub fn barrier_test(r: &Rank<'_>) -> Result<()> {
    r.comm.barrier()?;
    r.comm.barrier_async()?.wait()?;
    r.comm.scope(|s| s.barrier().map(drop))?;
    // A synchronous barrier blocks the host: nobody leaves before the last one has come.
    let mut times = vec![0u64; 2 * r.n];
    let now = || std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default().as_micros();
    if r.me == r.n - 1 {
        std::thread::sleep(Duration::from_millis(30));
    }
    let came = now() as u64;
    r.comm.barrier()?;
    r.comm.all_gather(&[came, now() as u64], &mut times)?;
    let last = times.iter().step_by(2).max().unwrap();
    assert!(times.iter().skip(1).step_by(2).all(|left| left >= last), "{times:?}");
    Ok(())
}

pub fn send_recv_test(r: &Rank<'_>) -> Result<()> {
    fn one<T: Val>(r: &Rank<'_>, count: usize, form: Form) -> Result<()> {
        let (next, prev) = ((r.me + 1) % r.n, (r.me + r.n - 1) % r.n);
        for i in 0..if count > 1024 { 4 } else { 8 } {
            let (x, mut y) = (fill::<T>(count, r.me + 1 + i), blank::<T>(count));
            // Even ranks send first, odd ones receive first; at the seam of an odd ring two senders meet, so the
            // last rank receives first. A ring of one sends to itself.
            let first = r.me.is_multiple_of(2) && (r.me + 1 < r.n || r.n.is_multiple_of(2));
            match form {
                Form::Sync if r.n == 1 => r.comm.sendrecv(&x, &mut y, next, prev)?,
                Form::Sync if first => {
                    r.comm.send(&x, next)?;
                    r.comm.recv(&mut y, prev)?;
                }
                Form::Sync => {
                    r.comm.recv(&mut y, prev)?;
                    r.comm.send(&x, next)?;
                }
                Form::Async => {
                    let (s, w) = (r.comm.send_async(x, next)?, r.comm.recv_async(y, prev)?);
                    y = w.wait()?;
                    s.wait()?;
                }
                Form::Scoped => r.comm.scope(|s| {
                    s.send(&x, next)?;
                    s.recv(&mut y, prev).map(drop)
                })?,
            }
            all(&y, count, prev + 1 + i, "send/recv");
        }
        Ok(())
    }
    sweep!(one, r)
}

pub fn batch_send_recv_test(r: &Rank<'_>) -> Result<()> {
    const TENSORS: usize = 3;
    fn one<T: Val>(r: &Rank<'_>, count: usize, form: Form) -> Result<()> {
        let (next, prev) = ((r.me + 1) % r.n, (r.me + r.n - 1) % r.n);
        let value = |rank: usize, id: usize| (rank + 1) * 10 + id;
        let xs: Vec<Vec<T>> = (0..TENSORS).map(|id| fill(count, value(r.me, id))).collect();
        let mut ys: Vec<Vec<T>> = vec![blank(count); TENSORS];
        match form {
            Form::Sync => {
                let mut b = r.comm.batch();
                for x in &xs {
                    b = b.send(x, next)?;
                }
                for y in &mut ys {
                    b = b.recv(y, prev)?;
                }
                assert_eq!(b.ops().len(), 2 * TENSORS);
                b.issue()?;
                // A batch is not emptied by issuing it.
                b.issue()?;
            }
            Form::Async => {
                let mut b = r.comm.batch_async();
                for x in xs {
                    b.send(x, next)?;
                }
                let slots: Vec<_> = ys.drain(..).map(|y| b.recv(y, prev)).collect::<Result<_>>()?;
                let bufs = b.issue()?.wait()?;
                let mut bufs = r.comm.batch_again(bufs)?.issue()?.wait()?;
                ys = slots.into_iter().map(|s| bufs.take(s).unwrap()).collect();
            }
            Form::Scoped => r.comm.scope(|s| {
                let mut b = s.batch();
                for x in &xs {
                    b = b.send(x, next)?;
                }
                for y in &mut ys {
                    b = b.recv(y, prev)?;
                }
                b.issue().map(drop)
            })?,
        }
        ys.iter().enumerate().for_each(|(id, y)| all(y, count, value(prev, id), "batch"));
        Ok(())
    }
    sweep!(one, r)?;
    let e = r.comm.batch().issue().unwrap_err();
    assert!(matches!(e.kind(), ErrorKind::InvalidArgument { .. }), "an empty batch: {e}");
    let e = r.comm.batch().send(&[1u8], r.n).unwrap_err();
    assert!(matches!(e.kind(), ErrorKind::InvalidArgument { .. }), "a peer out of range: {e}");
    Ok(())
}

/// Theirs passes `{"hint_key": "hint_value"}` and 600 s to every operation and checks nothing; an unknown hint is an
/// error here, which reaches the caller and leaves the communicator usable.
pub fn options_test(r: &Rank<'_>) -> Result<()> {
    let n = r.n;
    let timeout = CallOptions::new().timeout(Duration::from_secs(600));
    let with = r.comm.with(timeout.clone());
    let (x, mut y, mut all) = (vec![1.0f32; n], vec![0.0f32; n], vec![0.0f32; n * n]);
    with.broadcast(&mut y, 0)?;
    with.all_reduce(&mut y, Sum)?;
    with.reduce(&mut y, Sum, 0)?;
    with.all_gather(&x, &mut all)?;
    with.all_gather_list(&x[..1], &mut vec![vec![0.0f32]; n])?;
    with.all_gather_v_list(&x[..1], &mut vec![vec![0.0f32]; n])?;
    with.reduce_scatter(&x, &mut y[..1], Sum)?;
    with.reduce_scatter_list(&vec![vec![0.0f32]; n], &mut y[..1], Sum)?;
    with.reduce_scatter_v_list(&vec![vec![0.0f32]; n], &mut y[..1], Sum)?;
    with.all_to_all(&x, &mut y)?;
    with.all_to_all_list(&vec![vec![0.0f32]; n], &mut vec![vec![0.0f32]; n])?;
    with.all_to_all_v(&x, &mut y, &vec![1; n], &vec![1; n])?;
    with.scatter_list((r.me == 0).then(|| vec![vec![0.0f32]; n]).as_ref(), &mut y[..1], 0)?;
    with.gather_list(&x[..1], (r.me == 0).then(|| vec![vec![0.0f32]; n]).as_mut(), 0)?;
    with.gather(&x[..1], (r.me == 0).then_some(&mut y), 0)?;
    with.sendrecv(&x, &mut y, (r.me + 1) % n, (r.me + n - 1) % n)?;
    with.batch().send(&x, (r.me + 1) % n)?.recv(&mut y, (r.me + n - 1) % n)?.issue()?;
    with.barrier()?;
    let e = r.comm.with(timeout.hint("hint_key", "hint_value")).barrier().unwrap_err();
    assert!(e.is_recoverable() && e.to_string().contains("hint_key"), "{e}");
    r.comm.barrier()
}
