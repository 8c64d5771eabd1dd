//! What is to be known of an operation to measure it: its buffers, its call, and what must become of the data.

use rustcomms::{Communicator, DType, DynBuf, DynBufMut, OpDesc, Operation, ReduceOp, Result, With};

pub(crate) use super::table::OPS;

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
    /// The count, or this rank's shard.
    One,
    /// That of each rank.
    PerRank,
}

/// How long the shards of ranks are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Blocks {
    /// The count.
    Even,
    /// Half of the count more and less in turn, so that it is the mean.
    Uneven,
    /// As uneven, but in an order that every rank begins elsewhere: what `i` has for `j` is as long as what `j` has
    /// for `i`.
    Pairs,
}

/// Where one rank is in a call.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place {
    pub(crate) rank: usize,
    pub(crate) ranks: usize,
    pub(crate) root: usize,
    /// Elements, as the operation counts them; of uneven shards the mean.
    pub(crate) count: usize,
    pub(crate) blocks: Blocks,
}

impl Place {
    /// Elements of the block that `owner` has for, or gets from, `other`; of shards, those of rank `other`.
    pub(crate) const fn block(&self, owner: usize, other: usize) -> usize {
        let k = match self.blocks {
            Blocks::Even => return self.count,
            Blocks::Uneven => other,
            Blocks::Pairs => (owner + other) % self.ranks,
        };
        let half = self.count / 2;
        match k % 2 {
            // The last of an odd number has no partner that it could take from.
            0 if k + 1 == self.ranks => self.count,
            0 => self.count + half,
            _ => self.count - half,
        }
    }

    /// Where that block begins in the buffer of `owner`.
    pub(crate) fn start(&self, owner: usize, other: usize) -> usize {
        (0..other).map(|r| self.block(owner, r)).sum()
    }

    /// Elements of all blocks of this rank.
    pub(crate) fn counts(&self) -> Vec<usize> {
        (0..self.ranks).map(|r| self.block(self.rank, r)).collect()
    }

    /// Elements of this rank's own shard.
    pub(crate) const fn own(&self) -> usize {
        self.block(self.rank, self.rank)
    }

    pub(crate) const fn is_root(&self) -> bool {
        self.rank == self.root
    }
}

/// What a part of the output must be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Want {
    /// What this rank contributed, from this element on.
    From(usize, usize),
    /// The reduction of what the first so many ranks contributed, from this element on.
    Reduced(usize, usize),
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
    pub(crate) fn input<'a>(&self, bytes: &'a [u8]) -> Result<DynBuf<'a>> {
        DynBuf::new(bytes, self.dtype)
    }

    pub(crate) fn output<'a>(&self, bytes: &'a mut [u8]) -> Result<DynBufMut<'a>> {
        DynBufMut::new(bytes, self.dtype)
    }

    pub(crate) fn is_root(&self) -> bool {
        self.comm.rank() == self.root
    }
}

type OutOfPlace = fn(&Call<'_>, &Place, &[u8], &mut [u8]) -> Result<()>;
type InPlace = fn(&Call<'_>, &Place, &mut [u8]) -> Result<()>;

/// A row of the table.
///
/// In place there is one buffer, as long as the longer of the two. A shard lies in it where its rank's block is.
pub(crate) struct Spec {
    pub(crate) name: &'static str,
    pub(crate) operation: Operation,
    pub(crate) reduces: bool,
    /// Reduces what the ranks up to this one, or before it, have.
    pub(crate) prefix: bool,
    pub(crate) rooted: bool,
    pub(crate) sizing: Sizing,
    pub(crate) blocks: Blocks,
    /// Bus bandwidth over algorithm bandwidth, for so many ranks.
    pub(crate) bus: fn(f64) -> f64,
    pub(crate) send: Extent,
    pub(crate) recv: Extent,
    /// What the output must be, in parts of so many elements.
    pub(crate) want: fn(&Place) -> Vec<(usize, Want)>,
    /// In place nothing but the output may change.
    pub(crate) keeps_rest: bool,
    pub(crate) out_of_place: Option<OutOfPlace>,
    pub(crate) in_place: Option<InPlace>,
}

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
        // Uneven blocks make up as much as even ones.
        let of = |e: Extent| if e == Extent::PerRank { p.count * p.ranks } else { p.own() };
        (of(self.send), of(self.recv))
    }

    /// Where input and output begin in the one buffer of the in-place form.
    pub(crate) fn offsets(&self, p: &Place) -> (usize, usize) {
        let own = p.start(p.rank, p.rank);
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
            ("alltoall_perf", "all_to_all"),
            ("alltoallv", "all_to_all_v"),
        ] {
            assert_eq!(Spec::find(given).unwrap().name, name);
        }
        let e = Spec::find("allredcue").err().unwrap();
        assert!(e.contains("'allredcue'") && e.contains("exscan, barrier"), "{e}");
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
        for op in [
            "reduce_scatter",
            "all_gather_v",
            "gather",
            "gather_v",
            "scatter",
            "scatter_v",
            "all_to_all",
            "all_to_all_v",
        ] {
            near(bw(op, 4), 0.75);
        }
        for op in ["broadcast", "reduce", "sendrecv", "scan", "exscan"] {
            near(bw(op, 4), 1.0);
        }
        near(bw("all_reduce", 1), 0.0);
        assert_eq!(Spec::find("reduce").unwrap().bandwidths(8, 0.0, 2), (0.0, 0.0));
    }

    #[test]
    fn uneven_blocks_add_up_and_pairs_fit() {
        for ranks in 1..=6 {
            let place = |rank, blocks| Place { rank, ranks, root: 0, count: 10, blocks };
            for rank in 0..ranks {
                for blocks in [Blocks::Even, Blocks::Uneven, Blocks::Pairs] {
                    assert_eq!(place(rank, blocks).counts().iter().sum::<usize>(), 10 * ranks);
                }
                for other in 0..ranks {
                    let block = |a, b| place(0, Blocks::Pairs).block(a, b);
                    assert_eq!(block(rank, other), block(other, rank));
                }
            }
        }
        assert_eq!(Place { rank: 0, ranks: 3, root: 0, count: 10, blocks: Blocks::Uneven }.counts(), [15, 5, 10]);
        assert_eq!(Place { rank: 1, ranks: 3, root: 0, count: 10, blocks: Blocks::Pairs }.counts(), [5, 10, 15]);
    }

    #[test]
    fn the_output_is_wanted_in_parts_that_cover_it() {
        for s in OPS.iter().filter(|s| s.sizing != Sizing::Nothing) {
            for rank in 0..3 {
                let p = Place { rank, ranks: 3, root: 1, count: 4, blocks: s.blocks };
                let (send, recv) = s.lengths(&p);
                assert_eq!((s.want)(&p).iter().map(|(len, _)| len).sum::<usize>(), recv, "{}", s.name);
                let (i, o) = s.offsets(&p);
                assert!(i + send <= send.max(recv) && o + recv <= send.max(recv), "{}", s.name);
            }
        }
        let p = Place { rank: 2, ranks: 3, root: 1, count: 4, blocks: Blocks::Even };
        let want = |op: &str| (Spec::find(op).unwrap().want)(&p);
        assert_eq!(want("reduce_scatter"), [(4, Want::Reduced(3, 8))]);
        assert_eq!(Spec::find("reduce_scatter").unwrap().offsets(&p), (0, 8));
        assert_eq!(want("reduce"), [(4, Want::Kept)]);
        assert_eq!((want("scan"), want("exscan")), (vec![(4, Want::Reduced(3, 0))], vec![(4, Want::Reduced(2, 0))]));
        assert_eq!(want("scatter"), [(4, Want::From(1, 8))]);
        assert_eq!(want("all_to_all")[1], (4, Want::From(1, 8)));
        // Lengths are 6, 2 and 4; rank 2 has its own first, rank 1 that of rank 2 in the middle.
        let p = Place { blocks: Blocks::Pairs, ..p };
        let want = (Spec::find("all_to_all_v").unwrap().want)(&p);
        assert_eq!(want, [(4, Want::From(0, 8)), (6, Want::From(1, 6)), (2, Want::From(2, 10))]);
    }
}
