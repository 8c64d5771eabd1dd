//! The operations that can be measured: one row of a table each.

use rustcomms::{Communicator, DType, DynBuf, DynBufMut, OpDesc, Operation, ReduceOp, Result, With};

/// How the number of elements follows from the size asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sizing {
    /// All of it is one rank's buffer.
    Whole,
    /// Shards of all ranks together are that large, rounded down so that each is a multiple of 16 bytes.
    Shards,
    /// There is no data.
    Nothing,
}

/// Length of a buffer in terms of the count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Extent {
    /// The count.
    One,
    /// The count for each rank.
    PerRank,
}

/// Where one rank is in a call.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place {
    pub(crate) rank: usize,
    pub(crate) ranks: usize,
    pub(crate) root: usize,
    /// Elements, as the operation counts them.
    pub(crate) count: usize,
}

/// What a part of the output must be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Want {
    /// What this rank contributed, from this element on.
    From(usize, usize),
    /// The reduction of what all ranks contributed, from this element on.
    Reduced(usize),
    /// What it was before.
    Kept,
}

/// One call.
pub(crate) struct Call<'c> {
    pub(crate) with: With<'c>,
    pub(crate) comm: &'c Communicator,
    pub(crate) dtype: DType,
    /// Meaningless for operations that do not reduce.
    pub(crate) redop: ReduceOp,
    pub(crate) root: usize,
}

impl Call<'_> {
    fn input<'a>(&self, bytes: &'a [u8]) -> Result<DynBuf<'a>> {
        DynBuf::new(bytes, self.dtype)
    }

    fn output<'a>(&self, bytes: &'a mut [u8]) -> Result<DynBufMut<'a>> {
        DynBufMut::new(bytes, self.dtype)
    }

    fn is_root(&self) -> bool {
        self.comm.rank() == self.root
    }
}

type OutOfPlace = fn(&Call<'_>, &[u8], &mut [u8]) -> Result<()>;
type InPlace = fn(&Call<'_>, &mut [u8]) -> Result<()>;

/// A row of the table.
///
/// In place there is one buffer, as long as the longer of the two. A shard lies at `rank * count` of it.
pub(crate) struct Spec {
    pub(crate) name: &'static str,
    pub(crate) operation: Operation,
    pub(crate) reduces: bool,
    pub(crate) rooted: bool,
    pub(crate) sizing: Sizing,
    /// Bus bandwidth over algorithm bandwidth, for so many ranks.
    pub(crate) bus: fn(f64) -> f64,
    pub(crate) send: Extent,
    pub(crate) recv: Extent,
    /// What the output must be, in parts of `count` elements.
    pub(crate) want: fn(&Place) -> Vec<Want>,
    pub(crate) out_of_place: Option<OutOfPlace>,
    pub(crate) in_place: Option<InPlace>,
}

const fn once(_: f64) -> f64 {
    1.0
}

/// All data but a rank's own crosses the bus.
const fn others(n: f64) -> f64 {
    (n - 1.0) / n
}

/// In the order of `--help`.
pub(crate) const OPS: &[Spec] = &[
    Spec {
        name: "sendrecv",
        operation: Operation::Batch,
        reduces: false,
        rooted: false,
        sizing: Sizing::Whole,
        bus: once,
        send: Extent::One,
        recv: Extent::One,
        want: |p| vec![Want::From((p.rank + p.ranks - 1) % p.ranks, 0)],
        // A batch takes typed slices; messages are bytes on the wire whatever their type.
        out_of_place: Some(|c, send, recv| {
            let (rank, n) = (c.comm.rank(), c.comm.size());
            c.with.batch().send(send, (rank + 1) % n)?.recv(recv, (rank + n - 1) % n)?.issue()
        }),
        // Buffers of a batch must not overlap.
        in_place: None,
    },
    Spec {
        name: "broadcast",
        operation: Operation::Broadcast,
        reduces: false,
        rooted: true,
        sizing: Sizing::Whole,
        bus: once,
        send: Extent::One,
        recv: Extent::One,
        want: |p| vec![Want::From(p.root, 0)],
        // The library broadcasts in place; out of place, in NCCL too, is that and a copy at the root.
        out_of_place: Some(|c, send, recv| {
            if c.is_root() {
                recv.copy_from_slice(send);
            }
            c.with.broadcast_dyn(c.output(recv)?, c.root)
        }),
        in_place: Some(|c, buf| c.with.broadcast_dyn(c.output(buf)?, c.root)),
    },
    Spec {
        name: "all_reduce",
        operation: Operation::AllReduce,
        reduces: true,
        rooted: false,
        sizing: Sizing::Whole,
        bus: |n| 2.0 * others(n),
        send: Extent::One,
        recv: Extent::One,
        want: |_| vec![Want::Reduced(0)],
        out_of_place: Some(|c, send, recv| c.with.all_reduce_into_dyn(c.input(send)?, c.output(recv)?, c.redop)),
        in_place: Some(|c, buf| c.with.all_reduce_dyn(c.output(buf)?, c.redop)),
    },
    Spec {
        name: "reduce",
        operation: Operation::Reduce,
        reduces: true,
        rooted: true,
        sizing: Sizing::Whole,
        bus: once,
        send: Extent::One,
        recv: Extent::One,
        want: |p| vec![if p.rank == p.root { Want::Reduced(0) } else { Want::Kept }],
        // All ranks pass an output, so that it is seen if one other than the root's is written.
        out_of_place: Some(|c, send, recv| {
            c.with.reduce_into_dyn(c.input(send)?, Some(c.output(recv)?), c.redop, c.root)
        }),
        in_place: Some(|c, buf| c.with.reduce_dyn(c.output(buf)?, c.redop, c.root)),
    },
    Spec {
        name: "all_gather",
        operation: Operation::AllGather,
        reduces: false,
        rooted: false,
        sizing: Sizing::Shards,
        bus: others,
        send: Extent::One,
        recv: Extent::PerRank,
        want: |p| (0..p.ranks).map(|r| Want::From(r, 0)).collect(),
        out_of_place: Some(|c, send, recv| c.with.all_gather_dyn(c.input(send)?, c.output(recv)?)),
        in_place: Some(|c, buf| c.with.all_gather_in_place_dyn(c.output(buf)?)),
    },
    Spec {
        name: "reduce_scatter",
        operation: Operation::ReduceScatter,
        reduces: true,
        rooted: false,
        sizing: Sizing::Shards,
        bus: others,
        send: Extent::PerRank,
        recv: Extent::One,
        want: |p| vec![Want::Reduced(p.rank * p.count)],
        out_of_place: Some(|c, send, recv| c.with.reduce_scatter_dyn(c.input(send)?, c.output(recv)?, c.redop)),
        in_place: Some(|c, buf| c.with.reduce_scatter_in_place_dyn(c.output(buf)?, c.redop)),
    },
    Spec {
        name: "barrier",
        operation: Operation::Barrier,
        reduces: false,
        rooted: false,
        sizing: Sizing::Nothing,
        bus: once,
        send: Extent::One,
        recv: Extent::One,
        want: |_| Vec::new(),
        out_of_place: Some(|c, _, _| c.with.barrier()),
        in_place: None,
    },
];

impl Spec {
    /// The row of this name; accepts nccl-tests' spelling (`all_reduce_perf`) and names without underscores.
    pub(crate) fn find(name: &str) -> Result<&'static Self, String> {
        let plain = |s: &str| s.to_lowercase().replace(['_', '-'], "");
        let wanted = plain(name.strip_suffix("_perf").unwrap_or(name));
        let found = OPS.iter().find(|s| plain(s.name) == wanted);
        found.ok_or_else(|| format!("there is no operation '{name}'; the operations are {}", names()))
    }

    /// Elements as the operation counts them, for a size in bytes.
    pub(crate) fn count(&self, bytes: u64, dtype: DType, ranks: usize) -> u64 {
        let elements = bytes / dtype.size() as u64;
        match self.sizing {
            Sizing::Whole => elements,
            Sizing::Shards => {
                let unit = 16 / dtype.size() as u64;
                elements / ranks as u64 / unit * unit
            }
            Sizing::Nothing => 0,
        }
    }

    /// The bytes that the size column shows and that bandwidths are computed from.
    pub(crate) fn bytes(&self, count: u64, dtype: DType, ranks: usize) -> u64 {
        count * dtype.size() as u64 * if self.sizing == Sizing::Shards { ranks as u64 } else { 1 }
    }

    /// Algorithm and bus bandwidth in GB/s (1e9 bytes per second).
    pub(crate) fn bandwidths(&self, bytes: u64, time_us: f64, ranks: usize) -> (f64, f64) {
        if time_us <= 0.0 {
            return (0.0, 0.0);
        }
        let alg = bytes as f64 / (time_us * 1e3);
        (alg, alg * (self.bus)(ranks as f64))
    }

    /// The descriptor of a call.
    pub(crate) fn desc(&self, dtype: DType, count: u64, redop: Option<ReduceOp>, root: Option<usize>) -> OpDesc {
        let mut desc = OpDesc::new(self.operation);
        if self.sizing != Sizing::Nothing {
            desc = desc.elements(dtype, count as usize);
        }
        desc = redop.map_or(desc, |r| desc.redop(r));
        root.map_or(desc, |r| desc.root(r))
    }

    /// Whether algorithms can be chosen for it.
    pub(crate) const fn has_algorithms(&self) -> bool {
        self.operation.is_collective()
    }

    /// Elements of the send and of the receive buffer.
    pub(crate) fn lengths(&self, p: &Place) -> (usize, usize) {
        let of = |e: Extent| if e == Extent::PerRank { p.count * p.ranks } else { p.count };
        (of(self.send), of(self.recv))
    }

    /// Where input and output begin in the one buffer of the in-place form.
    pub(crate) fn offsets(&self, p: &Place) -> (usize, usize) {
        let own = p.rank * p.count;
        match (self.send, self.recv) {
            (Extent::One, Extent::PerRank) => (own, 0),
            (Extent::PerRank, Extent::One) => (0, own),
            _ => (0, 0),
        }
    }
}

/// The names of all operations.
pub(crate) fn names() -> String {
    OPS.iter().map(|s| s.name).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_in_every_spelling() {
        for s in OPS {
            assert_eq!(Spec::find(s.name).unwrap().name, s.name);
            assert_eq!(Spec::find(&format!("{}_perf", s.name)).unwrap().name, s.name);
        }
        for (given, name) in [
            ("allreduce", "all_reduce"),
            ("AllGather", "all_gather"),
            ("reduce-scatter", "reduce_scatter"),
            ("send_recv", "sendrecv"),
        ] {
            assert_eq!(Spec::find(given).unwrap().name, name);
        }
        let e = Spec::find("allredcue").err().unwrap();
        assert!(e.contains("'allredcue'") && e.contains("all_gather, reduce_scatter, barrier"), "{e}");
    }

    #[test]
    fn counts_follow_the_conventions() {
        let count = |op: &str, bytes, d, n| Spec::find(op).unwrap().count(bytes, d, n);
        assert_eq!(count("all_reduce", 1 << 20, DType::F32, 3), 1 << 18);
        assert_eq!(count("all_reduce", 10, DType::F32, 3), 2);
        assert_eq!(count("sendrecv", 7, DType::F64, 2), 0);
        // 256 elements over 3 ranks are 85, rounded down to a multiple of 4 elements.
        assert_eq!(count("all_gather", 1024, DType::F32, 3), 84);
        assert_eq!(count("reduce_scatter", 1024, DType::U8, 3), 336);
        assert_eq!(count("all_gather", 1024, DType::F64, 3), 42);
        assert_eq!(count("all_gather", 8, DType::F32, 2), 0);
        assert_eq!(count("barrier", 1024, DType::F32, 2), 0);
        let s = Spec::find("all_gather").unwrap();
        assert_eq!(s.bytes(84, DType::F32, 3), 1008);
        assert_eq!(Spec::find("reduce").unwrap().bytes(84, DType::F32, 3), 336);
    }

    #[test]
    fn bandwidths_follow_the_table() {
        let bw = |op: &str, n| Spec::find(op).unwrap().bandwidths(1_000_000, 1000.0, n);
        let near = |(alg, bus): (f64, f64), factor: f64| {
            assert!((alg - 1.0).abs() < 1e-12 && (bus - factor).abs() < 1e-12, "{alg} {bus} {factor}");
        };
        near(bw("all_reduce", 4), 1.5);
        near(bw("all_gather", 4), 0.75);
        near(bw("reduce_scatter", 4), 0.75);
        for op in ["broadcast", "reduce", "sendrecv"] {
            near(bw(op, 4), 1.0);
        }
        near(bw("all_reduce", 1), 0.0);
        assert_eq!(Spec::find("reduce").unwrap().bandwidths(8, 0.0, 2), (0.0, 0.0));
    }

    #[test]
    fn the_output_is_wanted_in_parts_that_cover_it() {
        let p = Place { rank: 2, ranks: 3, root: 1, count: 4 };
        for s in OPS.iter().filter(|s| s.sizing != Sizing::Nothing) {
            let (send, recv) = s.lengths(&p);
            assert_eq!((s.want)(&p).len() * p.count, recv, "{}", s.name);
            let (i, o) = s.offsets(&p);
            assert!(i + send <= send.max(recv) && o + recv <= send.max(recv), "{}", s.name);
        }
        let scatter = Spec::find("reduce_scatter").unwrap();
        assert_eq!(((scatter.want)(&p), scatter.offsets(&p)), (vec![Want::Reduced(8)], (0, 8)));
        assert_eq!((Spec::find("reduce").unwrap().want)(&p), [Want::Kept]);
    }
}
