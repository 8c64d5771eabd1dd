//! Random arguments for everything that takes blocks: a call is refused or accepted, never panics, and what the backend is
//! asked for keeps the promises that it relies on.

mod common;

use std::ops::Range;
use std::sync::Arc;

use comm_core::{
    Communicator, DType, Device, ErrorKind, OpRequest, P2pOp, Pod, RawBlocks, RawBuf, RawBufMut, RealClock, Result, op,
};
use common::Raw;
use common::mock::{Mock, Trick};
use proptest::prelude::*;

/// A rank of a world whose operations end at once, untouched.
fn mocked(rank: usize, size: usize) -> (Arc<Mock>, Communicator) {
    let mock = Mock::rank_of(rank, size, Arc::new(RealClock));
    *mock.trick.lock() = Trick::InStart;
    let comm = mock.comm();
    (mock, comm)
}

/// A buffer of `u32`s at an address; nobody ever reads or writes there.
#[derive(Clone, Copy, Debug)]
struct Span {
    at: usize,
    len: usize,
}

impl Span {
    fn raw(self) -> Raw {
        let ptr = std::ptr::without_provenance_mut(0x10_0000 + 4 * self.at);
        Raw(RawBufMut::new(ptr, 4 * self.len, DType::U32, Device::CPU))
    }
}

/// Arguments of any of the calls.
#[derive(Clone, Debug)]
struct Args {
    rank: usize,
    size: usize,
    root: usize,
    /// The buffers, at either side one for all blocks, one for this rank's, and one for each.
    all: [Span; 2],
    own: [Span; 2],
    lists: [Vec<Span>; 2],
    counts: [Vec<usize>; 2],
    /// Whether a buffer that may be left out is passed.
    given: bool,
}

impl Args {
    /// Good ones. `sends` and `receives` agree at `rank`.
    fn good(rank: usize, root: usize, sends: &[usize], receives: &[usize]) -> Self {
        let mut end = 0;
        // Gaps, and nothing twice.
        let mut span = |len: usize| {
            let at = end + 1;
            end = at + len;
            Span { at, len }
        };
        let counts = [sends.to_vec(), receives.to_vec()];
        let all = counts.clone().map(|c| span(c.iter().sum()));
        let own = counts.clone().map(|c| span(c[rank]));
        let lists = counts.clone().map(|c| c.into_iter().map(&mut span).collect());
        Self { rank, size: sends.len(), root, all, own, lists, counts, given: true }
    }

    /// Spoils something.
    fn spoil(&mut self, (what, i, v): (u8, usize, usize)) {
        let side = i % 2;
        let (list, counts) = (&mut self.lists[side], &mut self.counts[side]);
        let (many, number) = (list.len().max(1), counts.len().max(1));
        match what {
            0 => self.root = v % 8,
            1 => self.given = false,
            2 => self.all[side].len = v % 40,
            3 => self.own[side].len = v % 12,
            4 => self.all[side].at = v % 100,
            5 => self.own[side].at = v % 100,
            6 => list.iter_mut().skip(i % many).take(1).for_each(|s| s.len = v % 8),
            7 => list.iter_mut().skip(i % many).take(1).for_each(|s| s.at = v % 100),
            8 => drop(list.pop()),
            9 => list.push(Span { at: v % 100, len: v % 4 }),
            10 => drop(counts.pop()),
            11 => counts.push(v % 3),
            12 => counts.iter_mut().skip(i % number).take(1).for_each(|c| *c = v % 9),
            13 => counts.iter_mut().skip(i % number).take(1).for_each(|c| *c = usize::MAX - v % 50),
            // Bytes that overflow to what the elements would be.
            14 => counts.iter_mut().skip(i % number).take(1).for_each(|c| *c = c.wrapping_add(1 << 62)),
            _ => counts.rotate_left(1 % number),
        }
    }

    fn list(&self, side: usize) -> Vec<Raw> {
        self.lists[side].iter().map(|s| s.raw()).collect()
    }
}

type Call = fn(&Communicator, &Args) -> Result<()>;

/// What is called; `true` where blocks may be uneven.
const CALLS: &[(&str, bool, Call)] = &[
    ("all_gather", false, |c, a| c.all_gather_async(a.own[0].raw(), a.all[1].raw()).map(drop)),
    ("all_gather_in_place", false, |c, a| c.all_gather_in_place_async(a.all[1].raw()).map(drop)),
    ("all_gather_list", false, |c, a| c.all_gather_list_async(a.own[0].raw(), a.list(1)).map(drop)),
    ("all_gather_v", true, |c, a| c.all_gather_v_async(a.own[0].raw(), a.all[1].raw(), &a.counts[1]).map(drop)),
    ("all_gather_v_in_place", true, |c, a| c.all_gather_v_in_place_async(a.all[1].raw(), &a.counts[1]).map(drop)),
    ("all_gather_v_list", true, |c, a| c.all_gather_v_list_async(a.own[0].raw(), a.list(1)).map(drop)),
    ("gather", false, |c, a| c.gather_async(a.own[0].raw(), a.given.then(|| a.all[1].raw()), a.root).map(drop)),
    ("gather_in_place", false, |c, a| c.gather_in_place_async(a.all[1].raw(), a.root).map(drop)),
    ("gather_list", false, |c, a| c.gather_list_async(a.own[0].raw(), a.given.then(|| a.list(1)), a.root).map(drop)),
    ("gather_v", true, |c, a| {
        c.gather_v_async(a.own[0].raw(), a.given.then(|| a.all[1].raw()), &a.counts[1], a.root).map(drop)
    }),
    ("gather_v_in_place", true, |c, a| c.gather_v_in_place_async(a.all[1].raw(), &a.counts[1], a.root).map(drop)),
    ("gather_v_list", true, |c, a| c.gather_v_list_async(a.own[0].raw(), a.given.then(|| a.list(1)), a.root).map(drop)),
    ("scatter", false, |c, a| c.scatter_async(a.given.then(|| a.all[0].raw()), a.own[1].raw(), a.root).map(drop)),
    ("scatter_in_place", false, |c, a| c.scatter_in_place_async(a.all[0].raw(), a.root).map(drop)),
    ("scatter_list", false, |c, a| c.scatter_list_async(a.given.then(|| a.list(0)), a.own[1].raw(), a.root).map(drop)),
    ("scatter_v", true, |c, a| {
        c.scatter_v_async(a.given.then(|| a.all[0].raw()), a.own[1].raw(), &a.counts[0], a.root).map(drop)
    }),
    ("scatter_v_in_place", true, |c, a| c.scatter_v_in_place_async(a.all[0].raw(), &a.counts[0], a.root).map(drop)),
    ("scatter_v_list", true, |c, a| {
        c.scatter_v_list_async(a.given.then(|| a.list(0)), a.own[1].raw(), a.root).map(drop)
    }),
    ("reduce_scatter", false, |c, a| c.reduce_scatter_async(a.all[0].raw(), a.own[1].raw(), op::Sum).map(drop)),
    ("reduce_scatter_in_place", false, |c, a| c.reduce_scatter_in_place_async(a.all[0].raw(), op::Sum).map(drop)),
    ("reduce_scatter_list", false, |c, a| c.reduce_scatter_list_async(a.list(0), a.own[1].raw(), op::Sum).map(drop)),
    ("reduce_scatter_v", true, |c, a| {
        c.reduce_scatter_v_async(a.all[0].raw(), a.own[1].raw(), &a.counts[0], op::Sum).map(drop)
    }),
    ("reduce_scatter_v_in_place", true, |c, a| {
        c.reduce_scatter_v_in_place_async(a.all[0].raw(), &a.counts[0], op::Sum).map(drop)
    }),
    ("reduce_scatter_v_list", true, |c, a| c.reduce_scatter_v_list_async(a.list(0), a.own[1].raw(), op::Sum).map(drop)),
    ("all_to_all", false, |c, a| c.all_to_all_async(a.all[0].raw(), a.all[1].raw()).map(drop)),
    ("all_to_all_in_place", false, |c, a| c.all_to_all_in_place_async(a.all[0].raw()).map(drop)),
    ("all_to_all_list", false, |c, a| c.all_to_all_list_async(a.list(0), a.list(1)).map(drop)),
    ("all_to_all_v", true, |c, a| {
        c.all_to_all_v_async(a.all[0].raw(), a.all[1].raw(), &a.counts[0], &a.counts[1]).map(drop)
    }),
    ("all_to_all_v_list", true, |c, a| c.all_to_all_v_list_async(a.list(0), a.list(1)).map(drop)),
    ("scan", false, |c, a| c.scan_async(a.own[0].raw(), op::Sum).map(drop)),
    ("scan_into", true, |c, a| c.scan_into_async(a.own[0].raw(), a.own[1].raw(), op::Sum).map(drop)),
    ("exscan_into", true, |c, a| c.exscan_into_async(a.own[0].raw(), a.own[1].raw(), op::Sum).map(drop)),
    ("sendrecv", true, |c, a| c.sendrecv_async(a.all[0].raw(), a.own[1].raw(), a.root, a.rank).map(drop)),
];

fn addresses(b: &RawBuf) -> Range<usize> {
    b.ptr() as usize..b.ptr() as usize + b.bytes()
}

fn apart(a: &RawBuf, b: &RawBuf) -> bool {
    let (a, b) = (addresses(a), addresses(b));
    a.is_empty() || b.is_empty() || a.end <= b.start || b.end <= a.start
}

/// One block per rank, whole values of `unit` bytes; those of one buffer fill it in order, equal ones are equal.
fn lawful_blocks(b: &RawBlocks, size: usize, unit: usize, even: bool) {
    assert_eq!(b.len(), size);
    let list: Vec<RawBuf> = b.iter().collect();
    assert!(list.iter().all(|x| x.bytes().is_multiple_of(unit)), "{b:?} in units of {unit}");
    assert!(!even || list.iter().all(|x| x.bytes() == list[0].bytes()), "{b:?}");
    assert_eq!(b.bytes(), list.iter().map(RawBuf::bytes).sum::<usize>());
    if let Some(whole) = b.whole() {
        let mut at = addresses(&whole).start;
        for x in list {
            assert_eq!(addresses(&x).start, at, "{b:?}");
            at = addresses(&x).end;
        }
        assert_eq!(at, addresses(&whole).end, "{b:?}");
    }
}

/// A buffer for the own block among `blocks`: it is that block, or apart from all; as long as it in any case.
fn lawful_own(own: &RawBuf, blocks: &RawBlocks, rank: usize) {
    assert_eq!(own.bytes(), blocks.get(rank).bytes(), "{own:?} {blocks:?}");
    let same = addresses(own) == addresses(&blocks.get(rank)) && blocks.whole().is_some();
    assert!(same || blocks.iter().all(|b| apart(own, &b)), "{own:?} {blocks:?}");
}

fn all_apart(blocks: &RawBlocks) {
    let list: Vec<RawBuf> = blocks.iter().collect();
    for (i, a) in list.iter().enumerate() {
        assert!(list[..i].iter().all(|b| apart(a, b)), "{blocks:?}");
    }
}

/// What the documentation of [`OpRequest`] promises to backends.
fn lawful(request: &OpRequest, rank: usize, size: usize, unit: usize) {
    use OpRequest as R;
    let check_root = |root: usize, has: bool| assert!(root < size && has == (root == rank), "{request:?}");
    match request {
        R::AllGather { input, output } | R::AllGatherV { input, output } => {
            let output = output.as_const();
            lawful_blocks(&output, size, unit, matches!(request, R::AllGather { .. }));
            all_apart(&output);
            lawful_own(input, &output, rank);
        }
        R::Gather { input, output, root } | R::GatherV { input, output, root } => {
            check_root(*root, output.is_some());
            if let Some(o) = output.as_ref().map(comm_core::RawBlocksMut::as_const) {
                lawful_blocks(&o, size, unit, matches!(request, R::Gather { .. }));
                all_apart(&o);
                lawful_own(input, &o, rank);
            }
        }
        R::Scatter { input, output, root } | R::ScatterV { input, output, root } => {
            check_root(*root, input.is_some());
            if let Some(i) = input {
                lawful_blocks(i, size, unit, matches!(request, R::Scatter { .. }));
                lawful_own(&output.as_const(), i, rank);
            }
        }
        R::ReduceScatter { input, output, .. } | R::ReduceScatterV { input, output, .. } => {
            lawful_blocks(input, size, unit, matches!(request, R::ReduceScatter { .. }));
            lawful_own(&output.as_const(), input, rank);
        }
        R::AllToAll { input, output } | R::AllToAllV { input, output } => {
            let (even, output) = (matches!(request, R::AllToAll { .. }), output.as_const());
            lawful_blocks(input, size, unit, even);
            lawful_blocks(&output, size, unit, even);
            all_apart(&output);
            assert_eq!(input.get(rank).bytes(), output.get(rank).bytes());
            let same = match (input.whole(), output.whole()) {
                (Some(i), Some(o)) => addresses(&i) == addresses(&o),
                _ => false,
            };
            assert!((even && same) || input.iter().all(|i| output.iter().all(|o| apart(&i, &o))), "{request:?}");
        }
        R::Scan { input, output, .. } | R::Exscan { input, output, .. } => {
            let output = output.as_const();
            assert_eq!(input.bytes(), output.bytes());
            assert!(addresses(input) == addresses(&output) || apart(input, &output));
        }
        R::SendRecv([P2pOp::Send { buf, peer, .. }, P2pOp::Recv { buf: into, peer: from, .. }]) => {
            assert!(*peer < size && *from < size && apart(buf, &into.as_const()));
        }
        other => panic!("{other:?}"),
    }
}

/// The lengths of this rank's blocks, in a world of one to five, sent and received.
fn lengths(even: bool) -> impl Strategy<Value = (usize, Vec<usize>, Vec<usize>)> {
    (1..=5usize).prop_flat_map(move |n| {
        let some = || prop::collection::vec(0..5usize, n);
        (0..n, some(), some()).prop_map(move |(rank, mut sends, mut receives)| {
            if even {
                let len = sends[0];
                sends.fill(len);
                receives.clone_from(&sends);
            }
            receives[rank] = sends[rank];
            (rank, sends, receives)
        })
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 8000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn calls_are_refused_or_lawful(
        call in 0..CALLS.len(),
        even in lengths(true),
        uneven in lengths(false),
        root in 0..5usize,
        spoilt in prop::collection::vec((0..16u8, any::<usize>(), any::<usize>()), 0..4),
    ) {
        let (name, v, f) = CALLS[call];
        let (rank, sends, receives) = if v { uneven } else { even };
        let mut args = Args::good(rank, root % sends.len(), &sends, &receives);
        spoilt.iter().for_each(|s| args.spoil(*s));
        let (mock, comm) = mocked(args.rank, args.size);
        match f(&comm, &args) {
            Ok(()) => {
                prop_assert_eq!(mock.started(), 1);
                let request = &mock.op(0).request;
                lawful(request, args.rank, args.size, 4);
                prop_assert!(name.starts_with(request.operation().name()));
            }
            Err(e) => {
                prop_assert!(!spoilt.is_empty(), "{name} refuses {args:?}: {e}");
                prop_assert!(matches!(e.kind(), ErrorKind::InvalidArgument { .. }), "{e:?}");
                prop_assert!(e.to_string().contains(&format!("rank {} of {}", args.rank, args.size)), "{e}");
                prop_assert_eq!(mock.started(), 0);
                // Peers are told of what they would wait for.
                prop_assert_eq!(mock.refusals.lock().len(), usize::from(name != "sendrecv"));
            }
        }
        prop_assert!(!comm.is_failed());
    }

    #[test]
    fn users_values_are_never_cut(
        size in 1..=5usize,
        rank in 0..5usize,
        len in 0..20usize,
        counts in prop::collection::vec(0..6usize, 0..7),
    ) {
        values_of::<u8>(rank % size, size, len, &counts);
        values_of::<Bytes<0>>(rank % size, size, len, &counts);
        values_of::<Bytes<3>>(rank % size, size, len, &counts);
        values_of::<Bytes<16>>(rank % size, size, len, &counts);
        values_of::<Triple>(rank % size, size, len, &counts);
    }
}

#[derive(Clone, Copy, Debug)]
#[allow(dead_code)]
struct Bytes<const N: usize>([u8; N]);

// SAFETY: bytes.
unsafe impl<const N: usize> Pod for Bytes<N> {}

impl<const N: usize> Default for Bytes<N> {
    fn default() -> Self {
        Self([0; N])
    }
}

/// Three wire elements that nobody looks at.
#[derive(Clone, Copy, Debug, Default)]
#[allow(dead_code)]
struct Triple([f32; 3]);

// SAFETY: floats.
unsafe impl Pod for Triple {
    const DTYPE: DType = DType::F32;
    const UNITS: usize = 3;
}

/// Calls on `len` values are accepted exactly when these can be shared as asked, and blocks are whole values.
fn values_of<T: Pod + Default>(rank: usize, size: usize, len: usize, counts: &[usize]) {
    let none = op::custom(|_: &mut [T], _: &[T]| {}, true);
    let evenly = len.is_multiple_of(size);
    let counted = counts.len() == size && counts.iter().sum::<usize>() == len;
    let check = |name: &str, fits: bool, call: &dyn Fn(&Communicator, Vec<T>) -> Result<()>| {
        let (mock, c) = mocked(rank, size);
        let r = call(&c, vec![T::default(); len]);
        // Of values without a byte there is nothing to count.
        assert!(r.is_ok() == fits || size_of::<T>() == 0, "{name} of {len} by {size} or {counts:?}: {r:?}");
        if r.is_ok() {
            lawful(&mock.op(0).request, rank, size, size_of::<T>().max(1));
        }
    };
    check("all_gather", evenly, &|c, x| c.all_gather_in_place_async(x).map(drop));
    check("gather", evenly, &|c, x| c.gather_in_place_async(x, rank).map(drop));
    check("scatter", evenly, &|c, x| c.scatter_in_place_async(x, rank).map(drop));
    check("reduce_scatter", evenly, &|c, x| c.reduce_scatter_in_place_async(x, none.clone()).map(drop));
    check("all_to_all", evenly, &|c, x| c.all_to_all_in_place_async(x).map(drop));
    check("all_to_all", evenly, &|c, x| c.all_to_all_async(x.clone(), x).map(drop));
    check("all_gather_v", counted, &|c, x| c.all_gather_v_in_place_async(x, counts).map(drop));
    check("gather_v", counted, &|c, x| c.gather_v_in_place_async(x, counts, rank).map(drop));
    check("scatter_v", counted, &|c, x| c.scatter_v_in_place_async(x, counts, rank).map(drop));
    check("reduce_scatter_v", counted, &|c, x| c.reduce_scatter_v_in_place_async(x, counts, none.clone()).map(drop));
    check("all_to_all_v", counted, &|c, x| c.all_to_all_v_async(x.clone(), x, counts, counts).map(drop));
}
