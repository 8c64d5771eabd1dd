//! Every operation on blocks, every prefix reduction and `sendrecv`, in three forms and all layouts of the buffers, which
//! ranks mix in one call, in worlds of one to four ranks.

mod common;

use comm_core::{Communicator, op};
use common::world_on;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Form {
    Sync,
    Async,
    Scoped,
}

const FORMS: [Form; 3] = [Form::Sync, Form::Async, Form::Scoped];

/// How a rank passes its blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Layout {
    /// In one buffer.
    Single,
    /// In one buffer that is input and output.
    InPlace,
    /// In a buffer each.
    List,
}

const LAYOUTS: [Layout; 3] = [Layout::Single, Layout::InPlace, Layout::List];

/// One call of an operation in a form: `input => output`, or the one buffer of an operation in place.
macro_rules! call {
    ($c:ident, $form:ident, $name:ident, $async:ident, $x:ident => $y:ident $(, $a:expr)*) => {
        match $form {
            Form::Sync => $c.$name(&$x, &mut $y $(, $a)*).unwrap(),
            Form::Async => ($x, $y) = $c.$async($x, $y $(, $a)*).unwrap().wait().unwrap(),
            Form::Scoped => $c.scope(|s| s.$name(&$x, &mut $y $(, $a)*).map(drop)).unwrap(),
        }
    };
    ($c:ident, $form:ident, $name:ident, $async:ident, $x:ident => ?$y:ident $(, $a:expr)*) => {
        match $form {
            Form::Sync => $c.$name(&$x, $y.as_mut() $(, $a)*).unwrap(),
            Form::Async => ($x, $y) = $c.$async($x, $y $(, $a)*).unwrap().wait().unwrap(),
            Form::Scoped => $c.scope(|s| s.$name(&$x, $y.as_mut() $(, $a)*).map(drop)).unwrap(),
        }
    };
    ($c:ident, $form:ident, $name:ident, $async:ident, ?$x:ident => $y:ident $(, $a:expr)*) => {
        match $form {
            Form::Sync => $c.$name($x.as_ref(), &mut $y $(, $a)*).unwrap(),
            Form::Async => ($x, $y) = $c.$async($x, $y $(, $a)*).unwrap().wait().unwrap(),
            Form::Scoped => $c.scope(|s| s.$name($x.as_ref(), &mut $y $(, $a)*).map(drop)).unwrap(),
        }
    };
    ($c:ident, $form:ident, $name:ident, $async:ident, $y:ident $(, $a:expr)*) => {
        match $form {
            Form::Sync => $c.$name(&mut $y $(, $a)*).unwrap(),
            Form::Async => $y = $c.$async($y $(, $a)*).unwrap().wait().unwrap(),
            Form::Scoped => $c.scope(|s| s.$name(&mut $y $(, $a)*).map(drop)).unwrap(),
        }
    };
}

/// Elements per block in calls of equal blocks.
const LENGTHS: [usize; 3] = [0, 1, 6];

/// Elements per block in calls of uneven ones; zero at every place, and everywhere.
fn uneven(n: usize) -> Vec<Vec<usize>> {
    let mut all: Vec<Vec<usize>> = (0..4).map(|k| (0..n).map(|r| [3, 0, 7, 1][(r + k) % 4]).collect()).collect();
    all.push(vec![0; n]);
    all
}

/// Runs `check` in every world and form, with ranks of one layout and of all three.
fn everywhere(check: impl Fn(&Communicator, Form, Layout) + Send + Sync + Copy + 'static) {
    for n in 1..=4 {
        let shared = common::toy::World::new(n);
        world_on(&shared, move |c| {
            for form in FORMS {
                for i in 0..3 {
                    check(&c, form, LAYOUTS[i]);
                    check(&c, form, LAYOUTS[(c.rank() + i) % 3]);
                    // Forms need not agree either.
                    check(&c, FORMS[(c.rank() + i) % 3], LAYOUTS[(2 * c.rank() + i) % 3]);
                }
            }
        });
        assert!(shared.is_quiet(), "world of {n}");
    }
}

/// What rank `r` has for block `b`.
fn block(r: usize, b: usize, len: usize) -> Vec<i64> {
    (0..len).map(|i| (1_000_000 * (r + 1) + 1000 * b + i) as i64).collect()
}

/// What rank `r` has for all blocks.
fn blocks(r: usize, counts: &[usize]) -> Vec<Vec<i64>> {
    counts.iter().enumerate().map(|(b, len)| block(r, b, *len)).collect()
}

/// Outputs that nothing has been written to.
fn blank(counts: &[usize]) -> Vec<Vec<i64>> {
    counts.iter().map(|len| vec![-1; *len]).collect()
}

/// Where block `b` lies among all.
fn place(counts: &[usize], b: usize) -> std::ops::Range<usize> {
    let from = counts[..b].iter().sum();
    from..from + counts[b]
}

/// All blocks in one buffer that is blank but for rank `r`'s.
fn own_in_place(r: usize, counts: &[usize], own: &[i64]) -> Vec<i64> {
    let mut all = blank(counts).concat();
    all[place(counts, r)].copy_from_slice(own);
    all
}

fn equal(n: usize) -> impl Iterator<Item = Vec<usize>> {
    LENGTHS.into_iter().map(move |len| vec![len; n])
}

#[test]
fn all_gather() {
    everywhere(|c, form, layout| {
        let me = c.rank();
        for counts in equal(c.size()) {
            let (mut x, mut y) = (block(me, 0, counts[me]), blank(&counts).concat());
            match layout {
                Layout::Single => call!(c, form, all_gather, all_gather_async, x => y),
                Layout::InPlace => {
                    y = own_in_place(me, &counts, &x);
                    call!(c, form, all_gather_in_place, all_gather_in_place_async, y);
                }
                Layout::List => {
                    let mut list = blank(&counts);
                    call!(c, form, all_gather_list, all_gather_list_async, x => list);
                    y = list.concat();
                }
            }
            let want: Vec<i64> = (0..c.size()).flat_map(|r| block(r, 0, counts[r])).collect();
            assert_eq!((y, x), (want, block(me, 0, counts[me])), "{form:?} {layout:?} {counts:?}");
        }
    });
}

#[test]
fn all_gather_v() {
    everywhere(|c, form, layout| {
        let me = c.rank();
        for counts in uneven(c.size()) {
            let (mut x, mut y) = (block(me, 0, counts[me]), blank(&counts).concat());
            match layout {
                Layout::Single => call!(c, form, all_gather_v, all_gather_v_async, x => y, &counts),
                Layout::InPlace => {
                    y = own_in_place(me, &counts, &x);
                    call!(c, form, all_gather_v_in_place, all_gather_v_in_place_async, y, &counts);
                }
                Layout::List => {
                    let mut list = blank(&counts);
                    call!(c, form, all_gather_v_list, all_gather_v_list_async, x => list);
                    for (r, b) in list.iter().enumerate() {
                        assert_eq!(b.len(), counts[r]);
                    }
                    y = list.concat();
                }
            }
            let want: Vec<i64> = (0..c.size()).flat_map(|r| block(r, 0, counts[r])).collect();
            assert_eq!((y, x), (want, block(me, 0, counts[me])), "{form:?} {layout:?} {counts:?}");
        }
    });
}

/// Gathers at every root; `v` with the operation for uneven blocks.
fn gather_everywhere(c: &Communicator, form: Form, layout: Layout, counts: &[usize], v: bool) {
    let me = c.rank();
    for root in 0..c.size() {
        let (mut x, at_root) = (block(me, 0, counts[me]), me == root);
        // Others may pass an output, of whatever length: it is left alone. And whatever counts.
        let spare = (root + counts[me]).is_multiple_of(2);
        let given = if at_root { counts } else { &[] };
        let mut y = at_root.then(|| blank(counts).concat()).or_else(|| spare.then(|| vec![-1; 5]));
        match layout {
            Layout::Single if v => call!(c, form, gather_v, gather_v_async, x => ?y, given, root),
            Layout::Single => call!(c, form, gather, gather_async, x => ?y, root),
            Layout::InPlace => {
                let mut buf = if at_root { own_in_place(me, counts, &x) } else { x.clone() };
                if v {
                    call!(c, form, gather_v_in_place, gather_v_in_place_async, buf, given, root);
                } else {
                    call!(c, form, gather_in_place, gather_in_place_async, buf, root);
                }
                if at_root { y = Some(buf) } else { x = buf }
            }
            Layout::List => {
                let mut list = at_root.then(|| blank(counts)).or_else(|| spare.then(|| blank(&[2, 3])));
                if v {
                    call!(c, form, gather_v_list, gather_v_list_async, x => ?list, root);
                } else {
                    call!(c, form, gather_list, gather_list_async, x => ?list, root);
                }
                y = list.map(|l| l.concat());
            }
        }
        assert_eq!(x, block(me, 0, counts[me]), "the input is unchanged");
        if at_root {
            let want: Vec<i64> = (0..c.size()).flat_map(|r| block(r, 0, counts[r])).collect();
            assert_eq!(y, Some(want), "{form:?} {layout:?} {counts:?} root {root}");
        } else {
            assert_eq!(y, spare.then(|| vec![-1; 5]), "not the root's output");
        }
    }
}

#[test]
fn gather() {
    everywhere(|c, form, layout| equal(c.size()).for_each(|counts| gather_everywhere(c, form, layout, &counts, false)));
}

#[test]
fn gather_v() {
    everywhere(|c, form, layout| {
        uneven(c.size()).iter().for_each(|counts| gather_everywhere(c, form, layout, counts, true));
    });
}

fn scatter_everywhere(c: &Communicator, form: Form, layout: Layout, counts: &[usize], v: bool) {
    let me = c.rank();
    for root in 0..c.size() {
        let (at_root, all) = (me == root, blocks(me, counts));
        let spare = (root + counts[me]).is_multiple_of(2);
        let given = if at_root { counts } else { &[] };
        let mut y = vec![-1; counts[me]];
        match layout {
            Layout::Single => {
                let mut x = at_root.then(|| all.concat()).or_else(|| spare.then(|| vec![-2; 5]));
                let before = x.clone();
                if v {
                    call!(c, form, scatter_v, scatter_v_async, ?x => y, given, root);
                } else {
                    call!(c, form, scatter, scatter_async, ?x => y, root);
                }
                assert_eq!(x, before, "the input is unchanged");
            }
            Layout::InPlace => {
                let mut buf = if at_root { all.concat() } else { y.clone() };
                if v {
                    call!(c, form, scatter_v_in_place, scatter_v_in_place_async, buf, given, root);
                } else {
                    call!(c, form, scatter_in_place, scatter_in_place_async, buf, root);
                }
                if at_root {
                    assert_eq!(buf, all.concat(), "the root's buffer is unchanged");
                    buf = buf[place(counts, me)].to_vec();
                }
                y = buf;
            }
            Layout::List => {
                let mut list = at_root.then(|| all.clone()).or_else(|| spare.then(|| blank(&[2, 3])));
                let before = list.clone();
                if v {
                    call!(c, form, scatter_v_list, scatter_v_list_async, ?list => y, root);
                } else {
                    call!(c, form, scatter_list, scatter_list_async, ?list => y, root);
                }
                assert_eq!(list, before, "the inputs are unchanged");
            }
        }
        assert_eq!(y, block(root, me, counts[me]), "{form:?} {layout:?} {counts:?} root {root}");
    }
}

#[test]
fn scatter() {
    everywhere(|c, form, layout| {
        equal(c.size()).for_each(|counts| scatter_everywhere(c, form, layout, &counts, false));
    });
}

#[test]
fn scatter_v() {
    everywhere(|c, form, layout| {
        uneven(c.size()).iter().for_each(|counts| scatter_everywhere(c, form, layout, counts, true));
    });
}

fn reduce_scatter_everywhere(c: &Communicator, form: Form, layout: Layout, counts: &[usize], v: bool) {
    let (me, n) = (c.rank(), c.size());
    let (all, mut y) = (blocks(me, counts), vec![-1; counts[me]]);
    match layout {
        Layout::Single => {
            let mut x = all.concat();
            if v {
                call!(c, form, reduce_scatter_v, reduce_scatter_v_async, x => y, counts, op::Sum);
            } else {
                call!(c, form, reduce_scatter, reduce_scatter_async, x => y, op::Sum);
            }
            assert_eq!(x, all.concat(), "the input is unchanged");
        }
        Layout::InPlace => {
            let mut buf = all.concat();
            if v {
                call!(c, form, reduce_scatter_v_in_place, reduce_scatter_v_in_place_async, buf, counts, op::Sum);
            } else {
                call!(c, form, reduce_scatter_in_place, reduce_scatter_in_place_async, buf, op::Sum);
            }
            y = buf[place(counts, me)].to_vec();
        }
        Layout::List => {
            let mut list = all.clone();
            if v {
                call!(c, form, reduce_scatter_v_list, reduce_scatter_v_list_async, list => y, op::Sum);
            } else {
                call!(c, form, reduce_scatter_list, reduce_scatter_list_async, list => y, op::Sum);
            }
            assert_eq!(list, all, "the inputs are unchanged");
        }
    }
    let want: Vec<i64> = (0..counts[me]).map(|i| (0..n).map(|r| block(r, me, counts[me])[i]).sum()).collect();
    assert_eq!(y, want, "{form:?} {layout:?} {counts:?}");
}

#[test]
fn reduce_scatter() {
    everywhere(|c, form, layout| {
        equal(c.size()).for_each(|counts| reduce_scatter_everywhere(c, form, layout, &counts, false));
    });
}

#[test]
fn reduce_scatter_v() {
    everywhere(|c, form, layout| {
        uneven(c.size()).iter().for_each(|counts| reduce_scatter_everywhere(c, form, layout, counts, true));
    });
}

#[test]
fn all_to_all() {
    everywhere(|c, form, layout| {
        let me = c.rank();
        for counts in equal(c.size()) {
            let (all, mut y) = (blocks(me, &counts), blank(&counts).concat());
            match layout {
                Layout::Single => {
                    let mut x = all.concat();
                    call!(c, form, all_to_all, all_to_all_async, x => y);
                    assert_eq!(x, all.concat(), "the input is unchanged");
                }
                Layout::InPlace => {
                    y = all.concat();
                    call!(c, form, all_to_all_in_place, all_to_all_in_place_async, y);
                }
                Layout::List => {
                    let (mut list, mut out) = (all.clone(), blank(&counts));
                    call!(c, form, all_to_all_list, all_to_all_list_async, list => out);
                    assert_eq!(list, all, "the inputs are unchanged");
                    y = out.concat();
                }
            }
            let want: Vec<i64> = (0..c.size()).flat_map(|r| block(r, me, counts[me])).collect();
            assert_eq!(y, want, "{form:?} {layout:?} {counts:?}");
        }
    });
}

#[test]
fn all_to_all_v() {
    everywhere(|c, form, layout| {
        let (me, n) = (c.rank(), c.size());
        for k in 0..5 {
            // From `i` to `j`; the two directions of a pair differ.
            let count = |i: usize, j: usize| [2, 0, 5, 1, 0][(3 * i + 2 * j + k) % 5];
            let sends: Vec<usize> = (0..n).map(|j| count(me, j)).collect();
            let receives: Vec<usize> = (0..n).map(|i| count(i, me)).collect();
            let all = blocks(me, &sends);
            let y = if layout == Layout::List {
                let (mut list, mut out) = (all.clone(), blank(&receives));
                call!(c, form, all_to_all_v_list, all_to_all_v_list_async, list => out);
                assert_eq!(list, all, "the inputs are unchanged");
                out.concat()
            } else {
                let (mut x, mut y) = (all.concat(), blank(&receives).concat());
                call!(c, form, all_to_all_v, all_to_all_v_async, x => y, &sends, &receives);
                assert_eq!(x, all.concat(), "the input is unchanged");
                y
            };
            let want: Vec<i64> = (0..n).flat_map(|i| block(i, me, count(i, me))).collect();
            assert_eq!(y, want, "{form:?} {layout:?} {sends:?} {receives:?}");
        }
    });
}

#[test]
fn scan_and_exscan() {
    everywhere(|c, form, layout| {
        let me = c.rank();
        for len in LENGTHS {
            let (x, blank) = (block(me, 0, len), vec![-1; len]);
            let (mut inclusive, mut exclusive) = (blank.clone(), blank.clone());
            if layout == Layout::InPlace {
                (inclusive, exclusive) = (x.clone(), x.clone());
                call!(c, form, scan, scan_async, inclusive, op::Sum);
                call!(c, form, exscan, exscan_async, exclusive, op::Sum);
            } else {
                let mut input = x.clone();
                call!(c, form, scan_into, scan_into_async, input => inclusive, op::Sum);
                call!(c, form, exscan_into, exscan_into_async, input => exclusive, op::Sum);
                assert_eq!(input, x, "the input is unchanged");
            }
            let sum = |ranks: usize| -> Vec<i64> {
                (0..len).map(|i| (0..ranks).map(|r| block(r, 0, len)[i]).sum()).collect()
            };
            assert_eq!(inclusive, sum(me + 1), "{form:?} {layout:?} {len}");
            // Nothing comes before rank 0, whose output stays as it was.
            let untouched = if layout == Layout::InPlace { x } else { blank };
            assert_eq!(exclusive, if me == 0 { untouched } else { sum(me) }, "{form:?} {layout:?} {len}");
        }
    });
}

#[test]
fn sendrecv() {
    everywhere(|c, form, layout| {
        let (me, n) = (c.rank(), c.size());
        // Rings in both directions, and oneself; the two sides have types of their own.
        for (dst, src) in [((me + 1) % n, (me + n - 1) % n), ((me + n - 1) % n, (me + 1) % n), (me, me)] {
            for len in LENGTHS {
                let (mut x, mut y) = (block(me, dst, len), vec![-1; len]);
                call!(c, form, sendrecv, sendrecv_async, x => y, dst, src);
                assert_eq!((y, x), (block(src, me, len), block(me, dst, len)), "{form:?} {layout:?}");
            }
        }
    });
}
