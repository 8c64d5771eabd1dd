//! Collectives: every operator, type, root, algorithm, form and size against the serial fold.

use std::fmt::Debug;

use comm_core::op::{self, Loc};
use comm_core::{E4M3, E5M2, Fnv, Operation, Operator, Pod, Reducer, Result, With};
use half::{bf16, f16};

use super::collectives_crate::Algorithm;
use super::values::{Fold, Num, Tri, best, mix};
use super::{FORMS, Form, Rank, algorithms, inner, padded, same, unpadded};

/// Small sizes, with 1 Ki and an odd one.
pub const SMALL: &[usize] = &[0, 1, 3, 1023, 1024];

fn all_reduce<T: Pod + PartialEq + Debug>(w: &With<'_>, form: Form, x: &[T], pad: T, op: Erased) -> Result<Vec<T>> {
    if form == Form::Async {
        return w.all_reduce_async(x.to_vec(), op)?.wait();
    }
    let mut v = padded(x, pad);
    if form == Form::Sync {
        w.all_reduce(inner(&mut v), op)?;
    } else {
        w.scope(|s| s.all_reduce(inner(&mut v), op).map(drop))?;
    }
    Ok(unpadded(v, pad))
}

/// Returns the output after checking that the input is unchanged.
fn all_reduce_into<T: Pod + PartialEq + Debug>(
    w: &With<'_>,
    form: Form,
    x: &[T],
    pad: T,
    op: Erased,
) -> Result<Vec<T>> {
    let input = x.to_vec();
    let (input, out) = if form == Form::Async {
        w.all_reduce_into_async(input, vec![pad; x.len()], op)?.wait()?
    } else {
        let mut v = padded(&vec![pad; x.len()], pad);
        if form == Form::Sync {
            w.all_reduce_into(&input, inner(&mut v), op)?;
        } else {
            w.scope(|s| s.all_reduce_into(&input[..], inner(&mut v), op)?.wait().map(drop))?;
        }
        (input, unpadded(v, pad))
    };
    same(&input, x, &|| "all_reduce_into changed its input".into());
    Ok(out)
}

fn reduce<T: Pod + PartialEq + Debug>(
    w: &With<'_>,
    form: Form,
    x: &[T],
    pad: T,
    op: Erased,
    root: usize,
) -> Result<Vec<T>> {
    if form == Form::Async {
        return w.reduce_async(x.to_vec(), op, root)?.wait();
    }
    let mut v = padded(x, pad);
    if form == Form::Sync {
        w.reduce(inner(&mut v), op, root)?;
    } else {
        w.scope(|s| s.reduce(inner(&mut v), op, root)?.wait().map(drop))?;
    }
    Ok(unpadded(v, pad))
}

/// The output as the rank passes it: the root always, others on odd turns, where it must stay as it is.
fn reduce_into<T: Pod + PartialEq + Debug>(
    w: &With<'_>,
    form: Form,
    x: &[T],
    pad: T,
    op: Erased,
    (root, passes): (usize, bool),
) -> Result<Option<Vec<T>>> {
    let input = x.to_vec();
    let (input, out) = if form == Form::Async {
        let out = passes.then(|| vec![pad; x.len()]);
        w.reduce_into_async(input, out, op, root)?.wait()?
    } else {
        let mut v = padded(&vec![pad; x.len()], pad);
        let out = passes.then(|| inner(&mut v));
        if form == Form::Sync {
            w.reduce_into(&input[..], out, op, root)?;
        } else {
            w.scope(|s| s.reduce_into(&input[..], out, op, root).map(drop))?;
        }
        (input, passes.then(|| unpadded(v, pad)))
    };
    same(&input, x, &|| "reduce_into changed its input".into());
    Ok(out)
}

fn reduce_scatter<T: Pod + PartialEq + Debug>(
    w: &With<'_>,
    form: Form,
    x: &[T],
    pad: T,
    op: Erased,
    block: usize,
) -> Result<Vec<T>> {
    let input = x.to_vec();
    let (input, out) = if form == Form::Async {
        w.reduce_scatter_async(input, vec![pad; block], op)?.wait()?
    } else {
        let mut v = padded(&vec![pad; block], pad);
        if form == Form::Sync {
            w.reduce_scatter(&input, inner(&mut v), op)?;
        } else {
            w.scope(|s| s.reduce_scatter(&input[..], inner(&mut v), op)?.wait().map(drop))?;
        }
        (input, unpadded(v, pad))
    };
    same(&input, x, &|| "reduce_scatter changed its input".into());
    Ok(out)
}

fn reduce_scatter_in_place<T: Pod + PartialEq + Debug>(
    w: &With<'_>,
    form: Form,
    x: &[T],
    pad: T,
    op: Erased,
) -> Result<Vec<T>> {
    if form == Form::Async {
        return w.reduce_scatter_in_place_async(x.to_vec(), op)?.wait();
    }
    let mut v = padded(x, pad);
    if form == Form::Sync {
        w.reduce_scatter_in_place(inner(&mut v), op)?;
    } else {
        w.scope(|s| s.reduce_scatter_in_place(inner(&mut v), op).map(drop))?;
    }
    Ok(unpadded(v, pad))
}

/// An operator behind its erased form: one copy of everything below per element type, not per operator, or the
/// tests take minutes to compile.
#[derive(Clone, Debug)]
struct Erased(Reducer);

impl<T: Pod> Operator<T> for Erased {
    fn reducer(&self) -> Reducer {
        self.0.clone()
    }
}

fn erased<T: Pod>(op: &impl Operator<T>) -> Erased {
    Erased(op.reducer())
}

/// How much of the product of algorithms, forms and roots is gone through.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Depth {
    /// All of it.
    Full,
    /// Each call once; algorithms and roots take turns, forms differ between ranks.
    Turns,
    /// Every algorithm once, the first and last root.
    Algorithms,
}

/// One operator on one type.
pub struct Case<'a, T> {
    pub name: &'a str,
    /// As this rank passes it.
    op: Erased,
    pub commutative: bool,
    /// Contribution of (rank, index).
    pub gen_: &'a dyn Fn(usize, usize) -> T,
    /// The fold of the contributions of all ranks, in rank order.
    pub want: &'a dyn Fn(&[T]) -> T,
    pub bits: &'a dyn Fn(&T) -> u64,
}

impl<T: Pod + PartialEq + Debug> Case<'_, T> {
    pub fn run(&self, r: &Rank<'_>, counts: &[usize], depth: Depth) -> Result<()> {
        for &count in counts {
            self.rooted_and_all(r, count, depth)?;
            // A long input is divided, a short one is the block.
            self.scatter(r, if count > 10_000 { count / r.n } else { count }, depth)?;
        }
        Ok(())
    }

    fn wanted(&self, n: usize, from: usize, count: usize) -> Vec<T> {
        let mut column = Vec::with_capacity(n);
        (from..from + count)
            .map(|i| {
                column.clear();
                column.extend((0..n).map(|q| (self.gen_)(q, i)));
                (self.want)(&column)
            })
            .collect()
    }

    fn plans(&self, r: &Rank<'_>, op: Operation, depth: Depth) -> Vec<(Option<Algorithm>, Form)> {
        let algos = algorithms(op, self.commutative);
        match depth {
            Depth::Full => algos.iter().flat_map(|a| FORMS.map(|f| (*a, f))).collect(),
            Depth::Algorithms => algos.iter().map(|a| (*a, r.any_form(r.turn()))).collect(),
            Depth::Turns => {
                let k = r.turn();
                vec![(algos[k % algos.len()], r.any_form(k))]
            }
        }
    }

    fn rooted_and_all(&self, r: &Rank<'_>, count: usize, depth: Depth) -> Result<()> {
        let x: Vec<T> = (0..count).map(|i| (self.gen_)(r.me, i)).collect();
        let want = self.wanted(r.n, 0, count);
        let pad = (self.gen_)(77, 123_456);
        for (algo, form) in self.plans(r, Operation::AllReduce, depth) {
            let w = r.with(algo);
            let say =
                |what: &str| format!("{what} {} x{count} by {algo:?}, {form:?}, rank {} of {}", self.name, r.me, r.n);
            let got = all_reduce(&w, form, &x, pad, self.op.clone())?;
            same(&got, &want, &|| say("all_reduce"));
            r.common(got.iter().map(self.bits));
            let got = all_reduce_into(&w, form, &x, pad, self.op.clone())?;
            same(&got, &want, &|| say("all_reduce_into"));
            r.common(got.iter().map(self.bits));
        }
        let roots: Vec<usize> = match depth {
            Depth::Full => (0..r.n).collect(),
            Depth::Algorithms => vec![0, r.n - 1],
            Depth::Turns => vec![r.turn() % r.n],
        };
        for root in roots {
            for (algo, form) in self.plans(r, Operation::Reduce, depth) {
                let w = r.with(algo);
                let say = |what: &str| {
                    format!("{what} {} x{count} to {root} by {algo:?}, {form:?}, rank {} of {}", self.name, r.me, r.n)
                };
                let got = reduce(&w, form, &x, pad, self.op.clone(), root)?;
                // Everybody else's buffer is unchanged.
                same(&got, if root == r.me { &want } else { &x }, &|| say("reduce"));
                let odd = r.turn() % 2 == 1;
                let passes = root == r.me || odd;
                let got = reduce_into(&w, form, &x, pad, self.op.clone(), (root, passes))?;
                assert_eq!(got.is_some(), passes);
                if let Some(got) = got {
                    let untouched = vec![pad; count];
                    same(&got, if root == r.me { &want } else { &untouched }, &|| say("reduce_into"));
                }
            }
        }
        Ok(())
    }

    fn scatter(&self, r: &Rank<'_>, block: usize, depth: Depth) -> Result<()> {
        let x: Vec<T> = (0..block * r.n).map(|i| (self.gen_)(r.me, i)).collect();
        let mine = r.me * block;
        let want = self.wanted(r.n, mine, block);
        let pad = (self.gen_)(78, 123_456);
        for (algo, form) in self.plans(r, Operation::ReduceScatter, depth) {
            let w = r.with(algo);
            let say =
                |what: &str| format!("{what} {} x{block} by {algo:?}, {form:?}, rank {} of {}", self.name, r.me, r.n);
            let got = reduce_scatter(&w, form, &x, pad, self.op.clone(), block)?;
            same(&got, &want, &|| say("reduce_scatter"));
            let got = reduce_scatter_in_place(&w, form, &x, pad, self.op.clone())?;
            assert_eq!(got.len(), x.len());
            same(&got[mine..mine + block], &want, &|| say("reduce_scatter_in_place"));
        }
        Ok(())
    }
}

fn number<T: Num, O: Operator<T>>(r: &Rank<'_>, op: O, f: Fold, counts: &[usize], depth: Depth) -> Result<()> {
    let seed = f as u64 + 1;
    let gen_ = |q: usize, i: usize| {
        let h = mix(q, i, seed);
        if f == Fold::Prod { T::factor(h) } else { T::term(h) }
    };
    numbers::<T>(r, erased(&op), f, &gen_, counts, depth)
}

fn numbers<T: Num>(
    r: &Rank<'_>,
    op: Erased,
    f: Fold,
    gen_: &dyn Fn(usize, usize) -> T,
    counts: &[usize],
    depth: Depth,
) -> Result<()> {
    let name = format!("{f:?} of {}", std::any::type_name::<T>());
    let want = |xs: &[T]| T::fold(f, xs);
    Case { name: &name, op, commutative: true, gen_, want: &want, bits: &|x| x.bits() }.run(r, counts, depth)
}

macro_rules! arithmetic {
    ($r:expr, $counts:expr, $depth:expr, $($t:ty),*) => {$(
        number::<$t, _>($r, op::Sum, Fold::Sum, $counts, $depth)?;
        number::<$t, _>($r, op::Prod, Fold::Prod, $counts, $depth)?;
        number::<$t, _>($r, op::Min, Fold::Min, $counts, $depth)?;
        number::<$t, _>($r, op::Max, Fold::Max, $counts, $depth)?;
        number::<$t, _>($r, op::Avg, Fold::Avg, $counts, $depth)?;
    )*};
}

macro_rules! bitwise {
    ($r:expr, $counts:expr, $depth:expr, $($t:ty),*) => {$(
        number::<$t, _>($r, op::BAnd, Fold::And, $counts, $depth)?;
        number::<$t, _>($r, op::BOr, Fold::Or, $counts, $depth)?;
        number::<$t, _>($r, op::BXor, Fold::Xor, $counts, $depth)?;
    )*};
}

/// Every operator on every type on which it is defined.
pub fn operators(r: &Rank<'_>) -> Result<()> {
    use Depth::Turns;
    arithmetic!(r, SMALL, Turns, f32, f64, i32, i64, bf16, u8);
    arithmetic!(r, &[3, 70], Turns, i8, i16, u16, u32, u64, f16, E4M3, E5M2);
    bitwise!(r, &[1, 1023], Turns, i32, i64, u8);
    bitwise!(r, &[3], Turns, i8, i16, u16, u32, u64);
    bools(r)?;
    premul(r)?;
    located(r)?;
    r.compare("operators")
}

fn bools(r: &Rank<'_>) -> Result<()> {
    let gen_ = |q: usize, i: usize| mix(q, i, 9).is_multiple_of(3);
    let all = |xs: &[bool]| xs.iter().all(|x| *x);
    let any = |xs: &[bool]| xs.iter().any(|x| *x);
    let odd = |xs: &[bool]| xs.iter().filter(|x| **x).count() % 2 == 1;
    macro_rules! each {
        ($($op:ident $want:expr;)*) => {$(
            Case { name: stringify!($op), op: erased::<bool>(&op::$op), commutative: true, gen_: &gen_, want: &$want, bits: &|x| u64::from(*x) }
                .run(r, &[1, 65], Depth::Turns)?;
        )*};
    }
    each! { BAnd all; Min all; BOr any; Max any; BXor odd; }
    Ok(())
}

/// Each rank has its own factor.
fn premul(r: &Rank<'_>) -> Result<()> {
    macro_rules! each {
        ($($t:ty, $from:expr, $to:expr;)*) => {$(
            let (from, to): (fn(f64) -> $t, fn($t) -> f64) = ($from, $to);
            let factor = |q: usize| [1.0, 2.0, -1.0, 0.5][q % 4];
            // Even values of small size: halves and sums of eight stay exact in bf16.
            let gen_ = |q: usize, i: usize| from((mix(q, i, 21) % 5) as f64 * 2.0 - 4.0);
            let want = |xs: &[$t]| from(xs.iter().enumerate().map(|(q, x)| to(*x) * factor(q)).sum());
            let op = erased(&op::PreMulSum(from(factor(r.me))));
            let case = Case { name: concat!("PreMulSum ", stringify!($t)), op, commutative: true, gen_: &gen_, want: &want, bits: &|x| to(*x).to_bits() };
            case.run(r, &[0, 1, 3, 1023], Depth::Turns)?;
            case.run(r, &[5], Depth::Algorithms)?;
        )*};
    }
    each! {
        f32, |x| x as f32, f64::from;
        f64, |x| x, |x| x;
        bf16, bf16::from_f64, bf16::to_f64;
        f16, f16::from_f64, f16::to_f64;
    }
    Ok(())
}

fn located(r: &Rank<'_>) -> Result<()> {
    macro_rules! each {
        ($($v:ty, $i:ty;)*) => {$(
            // Few values, so that there are ties.
            let gen_ = |q: usize, i: usize| Loc { value: (mix(q, i, 5) % 4) as $v, index: (mix(q, i, 6) % 1000) as $i };
            let least = |xs: &[Loc<$v, $i>]| best(xs, |a, b| a < b);
            let most = |xs: &[Loc<$v, $i>]| best(xs, |a, b| a > b);
            let bits = |l: &Loc<$v, $i>| l.value as u64 * 1000 + l.index as u64;
            Case { name: "MinLoc", op: erased::<Loc<$v, $i>>(&op::MinLoc), commutative: true, gen_: &gen_, want: &least, bits: &bits }.run(r, &[0, 1, 257], Depth::Turns)?;
            Case { name: "MaxLoc", op: erased::<Loc<$v, $i>>(&op::MaxLoc), commutative: true, gen_: &gen_, want: &most, bits: &bits }.run(r, &[3, 1024], Depth::Algorithms)?;
        )*};
    }
    each! { f32, u32; i32, u32; f64, u64; i64, u64; }
    Ok(())
}

fn matrices(r: &Rank<'_>, counts: &[usize], depth: Depth) -> Result<()> {
    let op = op::custom(|acc: &mut [Tri], x: &[Tri]| acc.iter_mut().zip(x).for_each(|(a, b)| *a = a.times(*b)), false);
    let gen_ = |q: usize, i: usize| Tri::make(mix(q, i, 31));
    let want = |xs: &[Tri]| xs[1..].iter().fold(xs[0], |a, b| a.times(*b));
    let bits = |t: &Tri| u64::from(t.a) << 32 ^ u64::from(t.b) << 16 ^ u64::from(t.c);
    Case { name: "matrix product", op: erased(&op), commutative: false, gen_: &gen_, want: &want, bits: &bits }
        .run(r, counts, depth)
}

fn own_sum(r: &Rank<'_>, counts: &[usize], depth: Depth) -> Result<()> {
    let op = op::custom(|acc: &mut [i64], x: &[i64]| acc.iter_mut().zip(x).for_each(|(a, b)| *a ^= b), true);
    let gen_ = |q: usize, i: usize| mix(q, i, 32) as i64;
    let want = |xs: &[i64]| xs.iter().fold(0, |a, b| a ^ b);
    Case { name: "own xor", op: erased(&op), commutative: true, gen_: &gen_, want: &want, bits: &|x| *x as u64 }
        .run(r, counts, depth)
}

/// Every algorithm, form and root.
pub fn algorithms_forms_roots(r: &Rank<'_>) -> Result<()> {
    number::<f64, _>(r, op::Sum, Fold::Sum, &[0, 1, 3, 257], Depth::Full)?;
    number::<i32, _>(r, op::Avg, Fold::Avg, &[5], Depth::Full)?;
    matrices(r, &[0, 1, 3, 129], Depth::Full)?;
    own_sum(r, &[2], Depth::Full)?;
    movement(r, &[0, 1, 3, 1023], true)?;
    barriers(r)?;
    r.compare("algorithms")
}

/// More than a MiB, and less than a MiB but more than a segment, so that pipelines have several segments.
pub fn large(r: &Rank<'_>) -> Result<()> {
    number::<f32, _>(r, op::Sum, Fold::Sum, &[270_001], Depth::Algorithms)?;
    number::<u8, _>(r, op::BXor, Fold::Xor, &[300_001], Depth::Turns)?;
    matrices(r, &[40_001], Depth::Algorithms)?;
    movement(r, &[270_001], false)?;
    r.compare("large")
}

/// Broadcast and all-gather. `full`: in all forms, from all roots.
fn movement(r: &Rank<'_>, counts: &[usize], full: bool) -> Result<()> {
    for &count in counts {
        let roots: Vec<usize> = if full { (0..r.n).collect() } else { vec![0, r.n - 1] };
        for root in roots {
            for algo in algorithms(Operation::Broadcast, true) {
                let turn = r.turn();
                let forms: &[Form] = if full { &FORMS } else { &[r.any_form(turn)] };
                for &form in forms {
                    let want: Vec<i32> = (0..count).map(|i| mix(root, i, 41) as i32).collect();
                    let x = if root == r.me { want.clone() } else { vec![-7; count] };
                    let w = r.with(algo);
                    let got = if form == Form::Async {
                        w.broadcast_async(x, root)?.wait()?
                    } else {
                        let mut v = padded(&x, -9);
                        if form == Form::Sync {
                            w.broadcast(inner(&mut v), root)?;
                        } else {
                            w.scope(|s| s.broadcast(inner(&mut v), root).map(drop))?;
                        }
                        unpadded(v, -9)
                    };
                    same(&got, &want, &|| {
                        format!("broadcast x{count} from {root} by {algo:?}, {form:?}, rank {} of {}", r.me, r.n)
                    });
                }
            }
        }
        for algo in algorithms(Operation::AllGather, true) {
            let turn = r.turn();
            let forms: &[Form] = if full { &FORMS } else { &[r.any_form(turn)] };
            for &form in forms {
                all_gather(r, count, algo, form)?;
            }
        }
    }
    Ok(())
}

fn all_gather(r: &Rank<'_>, count: usize, algo: Option<Algorithm>, form: Form) -> Result<()> {
    let w = r.with(algo);
    let want: Vec<u16> = (0..r.n).flat_map(|q| (0..count).map(move |i| mix(q, i, 42) as u16)).collect();
    let mine = r.me * count..(r.me + 1) * count;
    let x = want[mine.clone()].to_vec();
    let say = || format!("all_gather x{count} by {algo:?}, {form:?}, rank {} of {}", r.me, r.n);
    let empty = vec![9u16; want.len()];
    let mut placed = empty.clone();
    placed[mine].copy_from_slice(&x);
    let (input, out, in_place) = match form {
        Form::Async => {
            let (i, o) = w.all_gather_async(x.clone(), empty)?.wait()?;
            (i, o, w.all_gather_in_place_async(placed)?.wait()?)
        }
        Form::Sync => {
            let (mut v, mut p) = (padded(&empty, 1), padded(&placed, 1));
            w.all_gather(&x, inner(&mut v))?;
            w.all_gather_in_place(inner(&mut p))?;
            (x.clone(), unpadded(v, 1), unpadded(p, 1))
        }
        Form::Scoped => {
            let (mut v, mut p) = (padded(&empty, 1), padded(&placed, 1));
            let input = x.clone();
            // Both at once.
            w.scope(|s| {
                s.all_gather(&input[..], inner(&mut v))?;
                s.all_gather_in_place(inner(&mut p)).map(drop)
            })?;
            (input, unpadded(v, 1), unpadded(p, 1))
        }
    };
    same(&input, &x, &say);
    same(&out, &want, &say);
    same(&in_place, &want, &say);
    Ok(())
}

fn barriers(r: &Rank<'_>) -> Result<()> {
    for algo in algorithms(Operation::Barrier, true) {
        let w = r.with(algo);
        for _ in 0..5 {
            w.barrier()?;
            w.barrier_async()?.wait()?;
            w.scope(|s| s.barrier().map(drop))?;
        }
    }
    Ok(())
}

/// Floats that round, NaNs with payloads, infinities, zeros of both signs: no expectation but that all ranks
/// have the same bits, and that a second run with the same algorithm has them too.
pub fn identical_bits(r: &Rank<'_>) -> Result<()> {
    let wild = |q: usize, i: usize| {
        let h = mix(q, i, 51);
        match h % 16 {
            0 => f32::from_bits(0x7fc0_0000 | (h >> 40) as u32 & 0xffff),
            1 => 0.0,
            2 => -0.0,
            3 if i.is_multiple_of(7) => f32::INFINITY,
            4 if i.is_multiple_of(5) => f32::NEG_INFINITY,
            _ => ((h >> 32) as i32 as f32) * 1.0e-3 * f32::powi(10.0, (h % 7) as i32 - 3),
        }
    };
    macro_rules! each {
        ($($op:ident)*) => {$(
            for algo in algorithms(Operation::AllReduce, true) {
                for count in [1usize, 1000, 100_003] {
                    if count > 1000 && stringify!($op) != "Sum" {
                        continue;
                    }
                    let w = r.with(algo);
                    let x: Vec<f32> = (0..count).map(|i| wild(r.me, i)).collect();
                    let first = all_reduce(&w, r.any_form(r.turn()), &x, 1.0, erased::<f32>(&op::$op))?;
                    let second = all_reduce(&w, r.any_form(r.turn()), &x, 1.0, erased::<f32>(&op::$op))?;
                    let bits = |v: &[f32]| v.iter().map(|x| x.to_bits()).collect::<Vec<u32>>();
                    same(&bits(&first), &bits(&second), &|| format!("{} x{count} by {algo:?} twice", stringify!($op)));
                    r.common(first.iter().map(|x| u64::from(x.to_bits())));
                    r.compare(&format!("{} x{count} by {algo:?}", stringify!($op)))?;
                }
            }
        )*};
    }
    each! { Sum Prod Min Max Avg }
    Ok(())
}

/// The `_dyn` calls agree with the typed ones.
pub fn dynamic(r: &Rank<'_>) -> Result<()> {
    use comm_core::{DType, DynBuf, DynBufMut, ReduceOp};
    let bytes = |x: &[i32]| -> Vec<u8> { x.iter().flat_map(|v| v.to_ne_bytes()).collect() };
    let x: Vec<i32> = (0..6 * r.n).map(|i| mix(r.me, i, 61) as i32).collect();
    let total: Vec<i32> = (0..6 * r.n)
        .map(|i| i32::fold(Fold::Max, &(0..r.n).map(|q| mix(q, i, 61) as i32).collect::<Vec<_>>()))
        .collect();
    let d = DType::I32;
    let c = r.comm;
    let mut b = bytes(&x);
    c.all_reduce_dyn(DynBufMut::new(&mut b, d)?, ReduceOp::Max)?;
    assert_eq!(b, bytes(&total));
    let (i, mut o) = (bytes(&x), vec![1u8; 4 * x.len()]);
    c.all_reduce_into_dyn(DynBuf::new(&i, d)?, DynBufMut::new(&mut o, d)?, ReduceOp::Max)?;
    assert_eq!(o, bytes(&total));
    let root = r.n - 1;
    let mut b = bytes(&x);
    c.reduce_dyn(DynBufMut::new(&mut b, d)?, ReduceOp::Max, root)?;
    assert_eq!(b, if r.me == root { bytes(&total) } else { i.clone() });
    let mut o = vec![1u8; 4 * x.len()];
    let out = if r.me == root { Some(DynBufMut::new(&mut o, d)?) } else { None };
    c.reduce_into_dyn(DynBuf::new(&i, d)?, out, ReduceOp::Max, root)?;
    assert_eq!(o, if r.me == root { bytes(&total) } else { vec![1u8; 4 * x.len()] });
    let mine = r.me * 24..r.me * 24 + 24;
    let mut o = vec![1u8; 24];
    c.reduce_scatter_dyn(DynBuf::new(&i, d)?, DynBufMut::new(&mut o, d)?, ReduceOp::Max)?;
    assert_eq!(o, bytes(&total)[mine.clone()]);
    let mut b = bytes(&x);
    c.reduce_scatter_in_place_dyn(DynBufMut::new(&mut b, d)?, ReduceOp::Max)?;
    assert_eq!(b[mine.clone()], bytes(&total)[mine.clone()]);
    let mut g = vec![0u8; 24 * r.n];
    c.all_gather_dyn(DynBuf::new(&bytes(&total)[mine.clone()], d)?, DynBufMut::new(&mut g, d)?)?;
    assert_eq!(g, bytes(&total));
    let mut g = vec![0u8; 24 * r.n];
    g[mine.clone()].copy_from_slice(&bytes(&total)[mine]);
    c.all_gather_in_place_dyn(DynBufMut::new(&mut g, d)?)?;
    assert_eq!(g, bytes(&total));
    let mut b = if r.me == root { bytes(&total) } else { vec![0u8; 4 * x.len()] };
    c.broadcast_dyn(DynBufMut::new(&mut b, d)?, root)?;
    assert_eq!(b, bytes(&total));
    Ok(())
}

/// A hash over bytes, for tests that only compare.
pub fn hash(bytes: &[u8]) -> u64 {
    Fnv::hash(bytes)
}
