//! Bad arguments of the operations on blocks, of prefix reductions and of `sendrecv`: refused with an error that helps, told
//! to the other ranks, and survived.

mod common;

use std::sync::Arc;

use comm_core::{CommOptions, Communicator, Device, ErrorKind, Observer, Operation, RealClock, Result, op};
use common::mock::Mock;
use common::{Raw, refused, world, world_on};

type Call = fn(&Communicator) -> Result<()>;

/// No buffer, where only the root needs one.
const NONE: Option<&mut [u32]> = None;
const NO_LIST: Option<&mut [Vec<u32>]> = None;

/// What the other ranks call, with root 0; blocks have one element.
fn good(op: &str) -> Call {
    match op {
        "all_gather" => |c| c.all_gather(&[0u32], &mut vec![0u32; c.size()]),
        "all_gather_v" => |c| c.all_gather_v(&[0u32], &mut vec![0u32; c.size()], &vec![1; c.size()]),
        "gather" => |c| c.gather(&[0u32], NONE, 0),
        "gather_v" => |c| c.gather_v(&[0u32], NONE, &[], 0),
        "scatter" => |c| c.scatter(None::<&[u32]>, &mut [0u32][..], 0),
        "scatter_v" => |c| c.scatter_v(None::<&[u32]>, &mut [0u32][..], &[], 0),
        "reduce_scatter" => |c| c.reduce_scatter(&vec![0u32; c.size()], &mut [0u32], op::Sum),
        "reduce_scatter_v" => |c| c.reduce_scatter_v(&vec![0u32; c.size()], &mut [0u32], &vec![1; c.size()], op::Sum),
        "all_to_all" => |c| c.all_to_all(&vec![0u32; c.size()], &mut vec![0u32; c.size()]),
        "all_to_all_v" => |c| {
            let ones = vec![1; c.size()];
            c.all_to_all_v(&vec![0u32; c.size()], &mut vec![0u32; c.size()], &ones, &ones)
        },
        "scan" => |c| c.scan(&mut [0u32], op::Sum),
        "exscan" => |c| c.exscan(&mut [0u32], op::Sum),
        other => panic!("{other}"),
    }
}

fn all_refused(parts: &'static [&'static str], calls: &[(&'static str, Call)]) {
    for (name, bad) in calls {
        refused(name, parts, *bad, good(name));
    }
}

/// A list of `n` buffers of `len`.
fn list(n: usize, len: usize) -> Vec<Vec<u32>> {
    vec![vec![0; len]; n]
}

#[test]
fn roots_out_of_range() {
    all_refused(
        &["root 9 is out of range", "ranks 0 to"],
        &[
            ("gather", |c| c.gather(&[0u32], NONE, 9)),
            ("gather", |c| c.gather_in_place(&mut [0u32], 9)),
            ("gather", |c| c.gather_list(&[0u32], NO_LIST, 9)),
            ("gather", |c| c.gather_async(vec![0u32], None::<Vec<u32>>, 9).map(drop)),
            ("gather", |c| c.scope(|s| s.gather(vec![0u32], None::<Vec<u32>>, 9).map(drop))),
            ("gather_v", |c| c.gather_v(&[0u32], NONE, &[], 9)),
            ("gather_v", |c| c.gather_v_in_place(&mut [0u32], &[], 9)),
            ("gather_v", |c| c.gather_v_list(&[0u32], NO_LIST, 9)),
            ("scatter", |c| c.scatter(None::<&[u32]>, &mut [0u32][..], 9)),
            ("scatter", |c| c.scatter_in_place(&mut [0u32], 9)),
            ("scatter", |c| c.scatter_list(None::<&[Vec<u32>]>, &mut [0u32], 9)),
            ("scatter_v", |c| c.scatter_v(None::<&[u32]>, &mut [0u32][..], &[], 9)),
            ("scatter_v", |c| c.scatter_v_in_place(&mut [0u32], &[], 9)),
            ("scatter_v", |c| c.scatter_v_list(None::<&[Vec<u32>]>, &mut [0u32], 9)),
        ],
    );
}

#[test]
fn roots_without_a_buffer() {
    all_refused(
        &["the root must pass an output to gather", "only other ranks may leave it out"],
        &[
            ("gather", |c| c.gather(&[0u32], NONE, 0)),
            ("gather", |c| c.gather_list(&[0u32], NO_LIST, 0)),
            ("gather_v", |c| c.gather_v(&[0u32], NONE, &vec![1; c.size()], 0)),
            ("gather_v", |c| c.gather_v_list_async(vec![0u32], None::<Vec<Vec<u32>>>, 0).map(drop)),
        ],
    );
    all_refused(
        &["the root must pass an input to scatter"],
        &[
            ("scatter", |c| c.scatter(None::<&[u32]>, &mut [0u32][..], 0)),
            ("scatter", |c| c.scatter_list(None::<&[Vec<u32>]>, &mut [0u32], 0)),
            ("scatter_v", |c| c.scatter_v(None::<&[u32]>, &mut [0u32][..], &vec![1; c.size()], 0)),
            ("scatter_v", |c| c.scatter_v_list(None::<&[Vec<u32>]>, &mut [0u32], 0)),
        ],
    );
}

/// The calls that take counts, with these, and buffers of `n` elements.
macro_rules! with_counts {
    ($counts:path) => {
        &[
            ("all_gather_v", |c| c.all_gather_v(&[0u32], &mut list(1, c.size())[0], &$counts(c.size()))),
            ("all_gather_v", |c| c.all_gather_v_in_place(&mut list(1, c.size())[0], &$counts(c.size()))),
            ("gather_v", |c| c.gather_v(&[0u32], Some(&mut list(1, c.size())[0]), &$counts(c.size()), 0)),
            ("gather_v", |c| c.gather_v_in_place(&mut list(1, c.size())[0], &$counts(c.size()), 0)),
            ("scatter_v", |c| c.scatter_v(Some(&list(1, c.size())[0]), &mut vec![0u32], &$counts(c.size()), 0)),
            ("scatter_v", |c| c.scatter_v_in_place(&mut list(1, c.size())[0], &$counts(c.size()), 0)),
            ("reduce_scatter_v", |c| {
                c.reduce_scatter_v(&list(1, c.size())[0], &mut [0u32], &$counts(c.size()), op::Sum)
            }),
            ("reduce_scatter_v", |c| {
                c.reduce_scatter_v_in_place(&mut list(1, c.size())[0], &$counts(c.size()), op::Sum)
            }),
            ("all_to_all_v", |c| {
                let (x, ones) = (vec![0u32; c.size()], vec![1; c.size()]);
                c.all_to_all_v(&x, &mut x.clone(), &$counts(c.size()), &ones)
            }),
            ("all_to_all_v", |c| {
                let (x, ones) = (vec![0u32; c.size()], vec![1; c.size()]);
                c.all_to_all_v(&x, &mut x.clone(), &ones, &$counts(c.size()))
            }),
        ]
    };
}

#[test]
fn counts_that_are_not_one_per_rank() {
    fn short(n: usize) -> Vec<usize> {
        let mut counts = vec![0; n - 1];
        counts[0] = n;
        counts
    }
    fn none(_: usize) -> Vec<usize> {
        Vec::new()
    }
    fn long(n: usize) -> Vec<usize> {
        [vec![1; n], vec![0]].concat()
    }
    let parts: &[&str] = &["there are ", "counts but", "pass one per rank, in rank order"];
    all_refused(parts, with_counts!(short));
    all_refused(parts, with_counts!(none));
    all_refused(parts, with_counts!(long));
}

#[test]
fn counts_that_do_not_add_up() {
    fn counts(n: usize, first: usize) -> Vec<usize> {
        let mut counts = vec![1; n];
        counts[0] = first;
        counts
    }
    fn more(n: usize) -> Vec<usize> {
        counts(n, 3)
    }
    fn fewer(n: usize) -> Vec<usize> {
        counts(n, 0)
    }
    fn overflowing(n: usize) -> Vec<usize> {
        counts(n, usize::MAX)
    }
    // The sum fits, its bytes do not; modulo 2^64 both would.
    fn overflowing_bytes(n: usize) -> Vec<usize> {
        counts(n, (1 << 62) + 1)
    }
    // Wraps around to the right sum.
    fn wrapping(n: usize) -> Vec<usize> {
        let mut counts = counts(n, usize::MAX);
        counts[n - 1] = n - (n - 2) + 1;
        counts
    }
    let parts: &[&str] = &["counts make", "together; they must be equal"];
    all_refused(parts, with_counts!(more));
    all_refused(parts, with_counts!(fewer));
    all_refused(parts, with_counts!(overflowing));
    all_refused(parts, with_counts!(overflowing_bytes));
    all_refused(parts, with_counts!(wrapping));
}

/// Counts for an own block of two and nothing from the others.
fn two(n: usize) -> Vec<usize> {
    let mut counts = vec![0; n];
    counts[0] = 2;
    counts
}

/// One element for every rank.
fn ones(n: usize) -> Vec<usize> {
    vec![1; n]
}

/// Lists of one element each but for one, which has two.
fn uneven(n: usize) -> Vec<Vec<u32>> {
    let mut l = list(n, 1);
    l[n - 1].push(0);
    l
}

#[test]
fn own_blocks_that_do_not_fit() {
    let parts: &[&str] = &["has 1 elements but must have 2", "block 0"];
    all_refused(
        parts,
        &[
            ("all_gather_v", |c| c.all_gather_v(&[0u32], &mut [0u32; 2], &two(c.size()))),
            ("all_gather_v", |c| c.all_gather_v_list(&[0u32], &mut list(c.size(), 2))),
            ("all_gather", |c| c.all_gather_list(&[0u32], &mut list(c.size(), 2))),
            ("gather_v", |c| c.gather_v(&[0u32], Some(&mut [0u32; 2]), &two(c.size()), 0)),
            ("gather_v", |c| c.gather_v_list(&[0u32], Some(&mut list(c.size(), 2)), 0)),
            ("gather", |c| c.gather_list(&[0u32], Some(&mut list(c.size(), 2)), 0)),
            ("scatter_v", |c| c.scatter_v(Some(&[0u32; 2]), &mut [0u32], &two(c.size()), 0)),
            ("scatter_v", |c| c.scatter_v_list(Some(&list(c.size(), 2)), &mut [0u32], 0)),
            ("scatter", |c| c.scatter_list(Some(&list(c.size(), 2)), &mut [0u32], 0)),
            ("reduce_scatter_v", |c| c.reduce_scatter_v(&[0u32; 2], &mut [0u32], &two(c.size()), op::Sum)),
            ("reduce_scatter_v", |c| c.reduce_scatter_v_list(&list(c.size(), 2), &mut [0u32], op::Sum)),
            ("reduce_scatter", |c| c.reduce_scatter_list(&list(c.size(), 2), &mut [0u32], op::Sum)),
        ],
    );
    all_refused(
        &["sends 1 elements to itself but receives 2 from itself", "entry 0 on both sides"],
        &[("all_to_all", |c| c.all_to_all_list(&list(c.size(), 1), &mut list(c.size(), 2)))],
    );
    all_refused(
        &["sends 2 elements to itself but receives 1 from itself", "entry 0 on both sides"],
        &[
            ("all_to_all_v", |c| {
                c.all_to_all_v(&[0u32; 2], &mut vec![0u32; c.size()], &two(c.size()), &ones(c.size()))
            }),
            ("all_to_all_v", |c| c.all_to_all_v_list(&list(c.size(), 2), &mut list(c.size(), 1))),
            ("all_to_all_v", |c| {
                let (x, y) = (list(c.size(), 2), list(c.size(), 1));
                c.all_to_all_v_list_async(x, y).map(drop)
            }),
        ],
    );
}

#[test]
fn lists_that_are_not_one_buffer_per_rank() {
    all_refused(
        &["there are 1 output buffers but", "pass one per rank"],
        &[
            ("all_gather", |c| c.all_gather_list(&[0u32], &mut list(1, 1))),
            ("all_gather_v", |c| c.all_gather_v_list(&[0u32], &mut list(1, 1))),
            ("gather", |c| c.gather_list(&[0u32], Some(&mut list(1, 1)), 0)),
            ("gather_v", |c| c.gather_v_list(&[0u32], Some(&mut list(1, 1)), 0)),
            ("all_to_all", |c| c.all_to_all_list(&list(c.size(), 1), &mut list(1, 1))),
            ("all_to_all_v", |c| c.all_to_all_v_list(&list(c.size(), 1), &mut list(1, 1))),
            ("all_to_all_v", |c| c.scope(|s| s.all_to_all_v_list(list(c.size(), 1), list(1, 1)).map(drop))),
        ],
    );
    all_refused(
        &["there are 0 input buffers but", "pass one per rank"],
        &[
            ("scatter", |c| c.scatter_list(Some(&list(0, 1)), &mut [0u32], 0)),
            ("scatter_v", |c| c.scatter_v_list(Some(&list(0, 1)), &mut [0u32], 0)),
            ("reduce_scatter", |c| c.reduce_scatter_list(&list(0, 1), &mut [0u32], op::Sum)),
            ("reduce_scatter_v", |c| c.reduce_scatter_v_list(&list(0, 1), &mut [0u32], op::Sum)),
            ("all_to_all", |c| c.all_to_all_list(&list(0, 1), &mut list(c.size(), 1))),
            ("all_to_all_v", |c| c.all_to_all_v_list(&list(0, 1), &mut list(c.size(), 1))),
        ],
    );
}

#[test]
fn lists_of_unequal_buffers() {
    all_refused(
        &["has 2 elements but buffer 0 has 1", "_list takes equal lengths", "_v_list uneven ones"],
        &[
            ("all_gather", |c| c.all_gather_list(&[0u32], &mut uneven(c.size()))),
            ("gather", |c| c.gather_list(&[0u32], Some(&mut uneven(c.size())), 0)),
            ("scatter", |c| c.scatter_list(Some(&uneven(c.size())), &mut [0u32], 0)),
            ("reduce_scatter", |c| c.reduce_scatter_list(&uneven(c.size()), &mut [0u32], op::Sum)),
            ("all_to_all", |c| c.all_to_all_list(&uneven(c.size()), &mut list(c.size(), 1))),
            ("all_to_all", |c| c.all_to_all_list(&list(c.size(), 1), &mut uneven(c.size()))),
        ],
    );
}

/// Buffers of one element from `at` on, each `step` after the one before.
fn strip(m: &mut [u32], at: usize, step: usize, n: usize) -> Vec<Raw> {
    (0..n).map(|i| Raw::of(m, at + i * step, 1)).collect()
}

#[test]
fn lists_of_overlapping_buffers() {
    all_refused(
        &["output buffers 0 and 1 overlap; they must be disjoint"],
        &[
            ("all_gather", |c| {
                let m = &mut [0; 16];
                c.all_gather_list_async(Raw::of(m, 8, 1), strip(m, 0, 0, c.size())).map(drop)
            }),
            ("all_gather_v", |c| {
                let m = &mut [0; 16];
                let mut out = strip(m, 0, 2, c.size());
                out[1] = Raw::of(m, 0, 3);
                c.all_gather_v_list_async(Raw::of(m, 8, 1), out).map(drop)
            }),
            ("gather", |c| {
                let m = &mut [0; 16];
                c.gather_list_async(Raw::of(m, 8, 1), Some(strip(m, 0, 0, c.size())), 0).map(drop)
            }),
            ("gather_v", |c| {
                let m = &mut [0; 16];
                c.gather_v_list_async(Raw::of(m, 8, 1), Some(strip(m, 0, 0, c.size())), 0).map(drop)
            }),
            ("all_to_all", |c| {
                let m = &mut [0; 16];
                c.all_to_all_list_async(strip(m, 8, 1, c.size()), strip(m, 0, 0, c.size())).map(drop)
            }),
            ("all_to_all_v", |c| {
                let m = &mut [0; 16];
                c.all_to_all_v_list_async(strip(m, 8, 1, c.size()), strip(m, 0, 0, c.size())).map(drop)
            }),
        ],
    );
}

#[test]
fn outputs_that_overlap_inputs() {
    all_refused(
        &["input and output overlap", "in-place form"],
        &[
            ("all_gather_v", |c| {
                let (m, n) = (&mut [0; 16], c.size());
                c.all_gather_v(Raw::of(m, 1, 1), Raw::of(m, 0, n), &ones(n))
            }),
            ("all_gather", |c| {
                let m = &mut [0; 16];
                c.all_gather_list_async(Raw::of(m, 1, 1), strip(m, 0, 1, c.size())).map(drop)
            }),
            ("gather", |c| {
                let (m, n) = (&mut [0; 16], c.size());
                c.gather(Raw::of(m, 0, 1), Some(Raw::of(m, 0, n)), 0)
            }),
            ("gather_v", |c| {
                let (m, n) = (&mut [0; 16], c.size());
                c.gather_v(Raw::of(m, 0, 1), Some(Raw::of(m, 0, n)), &ones(n), 0)
            }),
            ("gather_v", |c| {
                let m = &mut [0; 16];
                c.gather_v_list_async(Raw::of(m, 1, 1), Some(strip(m, 0, 1, c.size())), 0).map(drop)
            }),
            ("scatter", |c| {
                let (m, n) = (&mut [0; 16], c.size());
                c.scatter(Some(Raw::of(m, 0, n)), Raw::of(m, 0, 1), 0)
            }),
            ("scatter_v", |c| {
                let (m, n) = (&mut [0; 16], c.size());
                c.scatter_v(Some(Raw::of(m, 0, n)), Raw::of(m, n - 1, 1), &ones(n), 0)
            }),
            ("scatter", |c| {
                let m = &mut [0; 16];
                c.scatter_list_async(Some(strip(m, 0, 1, c.size())), Raw::of(m, 1, 1), 0).map(drop)
            }),
            ("reduce_scatter_v", |c| {
                let (m, n) = (&mut [0; 16], c.size());
                c.reduce_scatter_v(Raw::of(m, 0, n), Raw::of(m, 1, 1), &ones(n), op::Sum)
            }),
            ("reduce_scatter", |c| {
                let m = &mut [0; 16];
                c.reduce_scatter_list_async(strip(m, 0, 1, c.size()), Raw::of(m, 1, 1), op::Sum).map(drop)
            }),
            ("all_to_all", |c| {
                let (m, n) = (&mut [0; 16], c.size());
                c.all_to_all(Raw::of(m, 0, n), Raw::of(m, n - 1, n))
            }),
            ("all_to_all", |c| {
                let (m, n) = (&mut [0; 16], c.size());
                c.all_to_all_list_async(strip(m, 0, 1, n), strip(m, n - 1, 1, n)).map(drop)
            }),
            ("all_to_all_v", |c| {
                let (m, n) = (&mut [0; 16], c.size());
                c.all_to_all_v(Raw::of(m, 0, n), Raw::of(m, 0, n), &ones(n), &ones(n))
            }),
            ("scan", |c| {
                let m = &mut [0; 16];
                c.scan_into(Raw::of(m, 0, 2), Raw::of(m, 1, 2), op::Sum)
            }),
            ("exscan", |c| {
                let m = &mut [0; 16];
                c.exscan_into(Raw::of(m, 0, 2), Raw::of(m, 0, 2), op::Sum)
            }),
        ],
    );
}

#[test]
fn lengths_that_do_not_fit() {
    all_refused(
        &["has 7 elements", "cannot share evenly; pad it to"],
        &[
            ("gather", |c| c.gather_in_place(&mut [0u32; 7], 0)),
            ("scatter", |c| c.scatter_in_place(&mut [0u32; 7], 0)),
            ("all_to_all", |c| c.all_to_all_in_place(&mut [0u32; 7])),
            ("all_to_all", |c| c.all_to_all(&[0u32; 7], &mut [0u32; 7])),
            ("all_to_all", |c| c.all_to_all_in_place_async([0u32; 7]).map(drop)),
        ],
    );
    all_refused(
        &["output has 7 elements but must have"],
        &[
            ("gather", |c| c.gather(&[0u32], Some(&mut [0u32; 7]), 0)),
            ("all_to_all", |c| c.all_to_all(&vec![0u32; c.size()], &mut [0u32; 7])),
            ("scan", |c| c.scan_into(&[0u32], &mut [0u32; 7], op::Sum)),
            ("exscan", |c| c.exscan_into(&[0u32], &mut [0u32; 7], op::Sum)),
        ],
    );
    all_refused(
        &["input has 7 elements but must have", "world size times the output's length"],
        &[("scatter", |c| c.scatter(Some(&[0u32; 7]), &mut [0u32], 0))],
    );
}

#[test]
fn memory_of_another_device() {
    fn gpu(m: &mut [u32]) -> Raw {
        let len = m.len();
        Raw::of(m, 0, len).on(Device::cuda(Some(1)))
    }
    fn gpus(m: &mut [u32], n: usize) -> Vec<Raw> {
        strip(m, 0, 1, n).into_iter().map(|r| r.on(Device::cuda(Some(1)))).collect()
    }
    all_refused(
        &["cuda:1", "cpu memory"],
        &[
            ("all_gather_v", |c| c.all_gather_v_in_place(gpu(&mut vec![0; c.size()]), &ones(c.size()))),
            ("gather", |c| c.gather_in_place(gpu(&mut vec![0; c.size()]), 0)),
            ("scatter", |c| c.scatter_in_place(gpu(&mut vec![0; c.size()]), 0)),
            ("all_to_all", |c| c.all_to_all_in_place(gpu(&mut vec![0; c.size()]))),
            ("scan", |c| c.scan(gpu(&mut [0; 1]), op::Sum)),
            ("exscan", |c| c.exscan(gpu(&mut [0; 1]), op::Sum)),
            ("reduce_scatter_v", |c| {
                c.reduce_scatter_v_in_place(gpu(&mut vec![0; c.size()]), &ones(c.size()), op::Sum)
            }),
            ("reduce_scatter", |c| {
                let m = &mut [0; 16];
                c.reduce_scatter_list_async(gpus(m, c.size()), Raw::of(m, 8, 1), op::Sum).map(drop)
            }),
            ("all_to_all_v", |c| {
                let m = &mut [0; 16];
                c.all_to_all_v_list_async(strip(m, 8, 1, c.size()), gpus(m, c.size())).map(drop)
            }),
        ],
    );
    all_refused(
        &["output buffer 1 is u32 on cpu but buffer 0 is u32 on cuda:1; they must be alike"],
        &[("all_gather", |c| {
            let m = &mut [0; 16];
            let mut out = gpus(m, c.size());
            out[1] = Raw::of(m, 1, 1);
            c.all_gather_list_async(Raw::of(m, 8, 1), out).map(drop)
        })],
    );
}

#[test]
fn a_communicator_without_members_refuses_everything() {
    let mock = Mock::of_size(0, Arc::new(RealClock));
    let c = &mock.comm();
    let (mut x, mut y, mut none) = ([1u32; 2], [1u32; 2], list(0, 0));
    for e in [
        c.all_gather(&x, &mut y),
        c.all_gather_list(&x, &mut none),
        c.all_gather_v(&x, &mut y, &[]),
        c.all_gather_v(&x[..0], &mut y[..0], &[]),
        c.all_gather_v_in_place(&mut x, &[2]),
        c.all_gather_v_list(&x, &mut none),
        c.gather(&x, Some(&mut y), 0),
        c.gather_in_place(&mut x, 0),
        c.gather_list(&x, Some(&mut none), 0),
        c.gather_v(&x, NONE, &[], 0),
        c.gather_v_in_place(&mut x, &[], 1),
        c.gather_v_list(&x, NO_LIST, 0),
        c.scatter(Some(&x), &mut y, 0),
        c.scatter_in_place(&mut x, 0),
        c.scatter_list(Some(&none), &mut y, 0),
        c.scatter_v(Some(&x), &mut y, &[], 0),
        c.scatter_v_in_place(&mut x, &[], 0),
        c.scatter_v_list(None::<&[Vec<u32>]>, &mut y, 0),
        c.reduce_scatter(&x, &mut y, op::Sum),
        c.reduce_scatter_list(&none, &mut y, op::Sum),
        c.reduce_scatter_v(&x, &mut y, &[], op::Sum),
        c.reduce_scatter_v_in_place(&mut x, &[], op::Sum),
        c.reduce_scatter_v_list(&none, &mut y, op::Sum),
        c.all_to_all(&x, &mut y),
        c.all_to_all_in_place(&mut x),
        c.all_to_all_list(&list(0, 0), &mut none),
        c.all_to_all_v(&x, &mut y, &[], &[]),
        c.all_to_all_v_list(&list(0, 0), &mut none),
        c.scan(&mut x, op::Sum),
        c.scan_into(&x, &mut y, op::Sum),
        c.exscan(&mut x, op::Sum),
        c.exscan_into(&x, &mut y, op::Sum),
        c.sendrecv(&x, &mut y, 0, 0),
    ] {
        let e = e.unwrap_err();
        assert!(e.to_string().contains("no members yet: call reconfigure"), "{e}");
    }
}

#[test]
fn a_refused_sendrecv_takes_no_number() {
    // What each rank refuses by itself concerns nobody else: the next pair of messages meets.
    world(2, |c| {
        let (me, peer) = (c.rank(), 1 - c.rank());
        if me == 0 {
            let mut m = [0u32; 4];
            for (e, part) in [
                (c.sendrecv(&[0u8], &mut [0u8], 2, peer), "destination 2 is out of range"),
                (c.sendrecv(&[0u8], &mut [0u8], peer, 5), "source 5 is out of range"),
                (c.sendrecv_async(vec![0u8], vec![0u8], peer, 5).map(drop), "source 5 is out of range"),
                (c.scope(|s| s.sendrecv(vec![0u8], vec![0u8], 9, peer).map(drop)), "destination 9 is out of range"),
                (c.sendrecv(Raw::of(&mut m, 0, 2), Raw::of(&mut m, 1, 2), peer, peer), "overlap"),
                (
                    c.sendrecv(Raw::of(&mut m, 0, 1), Raw::of(&mut m, 1, 1).on(Device::cuda(Some(0))), peer, peer),
                    "cuda",
                ),
                (c.with(comm_core::CallOptions::new().hint("chunks", "1")).sendrecv(&[0u8], &mut [0u8], 1, 1), "chunk"),
            ] {
                let e = e.unwrap_err();
                for part in ["sendrecv", "'toys'", "rank 0 of 2", part, "still usable"] {
                    assert!(e.to_string().contains(part), "{part} in {e}");
                }
                assert!(matches!(e.kind(), ErrorKind::InvalidArgument { .. }), "{e:?}");
            }
        }
        let mut got = [0u64];
        c.sendrecv(&[me as u64 + 10], &mut got, peer, peer).unwrap();
        assert_eq!(got, [peer as u64 + 10]);
    });
}

#[test]
fn both_ends_hear_of_a_sendrecv_that_an_observer_refuses() {
    #[derive(Debug)]
    struct Veto;
    impl Observer for Veto {
        fn pre(&self, call: &comm_core::Call<'_>) -> Result<(), String> {
            match call.desc.operation {
                Operation::SendRecv => Err("not today".into()),
                _ => Ok(()),
            }
        }
    }
    let shared = common::toy::World::new(3);
    world_on(&shared, |c| {
        // Rank 0 would have sent to 1 and received from 2.
        if c.rank() == 0 {
            let guard = c.observe(Arc::new(Veto));
            let e = c.sendrecv(&[1u8], &mut [0u8], 1, 2).unwrap_err();
            assert!(e.to_string().contains("not today"), "{e}");
            drop(guard);
        }
        c.barrier().unwrap();
        let e = match c.rank() {
            1 => c.recv(&mut [0u8], 0).unwrap_err(),
            2 => c.send(&[0u8], 0).unwrap_err(),
            _ => return,
        };
        let ErrorKind::PeerRefused { rank: 0, reason } = e.kind() else { panic!("{e:?}") };
        assert!(reason.contains("not today"), "{reason}");
    });
    assert!(shared.is_quiet());
}

/// A communicator of a device lets its memory through; a host backend under it must not follow such pointers.
#[test]
fn a_host_backend_takes_host_memory_on_every_communicator() {
    let shared = common::toy::World::new(2);
    let ranks: Vec<_> = (0..2)
        .map(|rank| {
            let shared = Arc::clone(&shared);
            std::thread::spawn(move || {
                let options = CommOptions::new().timeout(std::time::Duration::from_secs(10));
                let c = shared.comm_on(Device::cuda(Some(1)), rank, options).unwrap();
                for asynchronous in [false, true] {
                    let mut m = [1u32; 2];
                    let device = if rank == 0 { Device::cuda(Some(1)) } else { Device::CPU };
                    let buf = Raw::of(&mut m, 0, 2).on(device);
                    let r = if asynchronous {
                        c.scan_async(buf, op::Sum).and_then(|w| w.wait().map(drop))
                    } else {
                        c.scan(buf, op::Sum)
                    };
                    let e = r.unwrap_err();
                    if rank == 0 {
                        assert!(matches!(e.kind(), ErrorKind::InvalidArgument { .. }), "{e}");
                        assert!(e.to_string().contains("cuda:1"), "{e}");
                    } else {
                        assert!(matches!(e.kind(), ErrorKind::PeerRefused { rank: 0, .. }), "{e}");
                    }
                    assert_eq!(m, [1; 2], "the memory was touched");
                }
                let mut x = [1u32];
                c.all_reduce(&mut x, op::Sum).unwrap();
                assert_eq!(x, [2]);
            })
        })
        .collect();
    for r in ranks {
        r.join().unwrap();
    }
}
