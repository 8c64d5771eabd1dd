//! The operations that can be measured: one row each.

use rustcomms::Operation;

use super::ops::{Blocks, Call, Extent, Place, Sizing, Spec, Want};

const fn once(_: f64) -> f64 {
    1.0
}

/// All data but a rank's own crosses the bus.
const fn others(n: f64) -> f64 {
    (n - 1.0) / n
}

/// Everybody's shard, in rank order.
fn shards(p: &Place) -> Vec<(usize, Want)> {
    (0..p.ranks).map(|r| (p.block(p.rank, r), Want::From(r, 0))).collect()
}

/// The same at the root only.
fn shards_at_root(p: &Place) -> Vec<(usize, Want)> {
    if p.is_root() { shards(p) } else { vec![(p.count * p.ranks, Want::Kept)] }
}

/// A block from everybody.
fn blocks(p: &Place) -> Vec<(usize, Want)> {
    (0..p.ranks).map(|r| (p.block(r, p.rank), Want::From(r, p.start(r, p.rank)))).collect()
}

/// The own shard of all ranks' sums.
fn own_sums(p: &Place) -> Vec<(usize, Want)> {
    vec![(p.own(), Want::Reduced(p.ranks, p.start(p.rank, p.rank)))]
}

/// The own shard of what the root has.
fn own_of_root(p: &Place) -> Vec<(usize, Want)> {
    vec![(p.own(), Want::From(p.root, p.start(p.rank, p.rank)))]
}

/// In place, gathers and scatters have all blocks in the buffer of the root and elsewhere just the shard.
fn in_place<'b>(c: &Call<'_>, p: &Place, buf: &'b mut [u8]) -> &'b mut [u8] {
    if c.is_root() {
        return buf;
    }
    let size = c.dtype.size();
    &mut buf[p.start(p.rank, p.rank) * size..][..p.own() * size]
}

/// What most rows have.
pub(crate) const USUAL: Spec = Spec {
    name: "",
    operation: Operation::Barrier,
    reduces: false,
    prefix: false,
    rooted: false,
    sizing: Sizing::Whole,
    blocks: Blocks::Even,
    bus: once,
    send: Extent::One,
    recv: Extent::One,
    want: |_| Vec::new(),
    keeps_rest: false,
    out_of_place: None,
    in_place: None,
};

/// In the order of `--help`.
pub(crate) const OPS: &[Spec] = &[
    Spec {
        name: "sendrecv",
        operation: Operation::SendRecv,
        want: |p| vec![(p.count, Want::From((p.rank + p.ranks - 1) % p.ranks, 0))],
        out_of_place: Some(|c, p, send, recv| {
            let (next, previous) = ((p.rank + 1) % p.ranks, (p.rank + p.ranks - 1) % p.ranks);
            c.with.sendrecv_dyn(c.input(send)?, c.output(recv)?, next, previous)
        }),
        // The two buffers must not overlap.
        ..USUAL
    },
    Spec {
        name: "broadcast",
        operation: Operation::Broadcast,
        rooted: true,
        want: |p| vec![(p.count, Want::From(p.root, 0))],
        // The library broadcasts in place; out of place, in NCCL too, is that and a copy at the root.
        out_of_place: Some(|c, _, send, recv| {
            if c.is_root() {
                recv.copy_from_slice(send);
            }
            c.with.broadcast_dyn(c.output(recv)?, c.root)
        }),
        in_place: Some(|c, _, buf| c.with.broadcast_dyn(c.output(buf)?, c.root)),
        ..USUAL
    },
    Spec {
        name: "all_reduce",
        operation: Operation::AllReduce,
        reduces: true,
        bus: |n| 2.0 * others(n),
        want: |p| vec![(p.count, Want::Reduced(p.ranks, 0))],
        out_of_place: Some(|c, _, send, recv| c.with.all_reduce_into_dyn(c.input(send)?, c.output(recv)?, c.redop)),
        in_place: Some(|c, _, buf| c.with.all_reduce_dyn(c.output(buf)?, c.redop)),
        ..USUAL
    },
    Spec {
        name: "reduce",
        operation: Operation::Reduce,
        reduces: true,
        rooted: true,
        want: |p| vec![(p.count, if p.is_root() { Want::Reduced(p.ranks, 0) } else { Want::Kept })],
        // All ranks pass an output, so that it is seen if one other than the root's is written.
        out_of_place: Some(|c, _, send, recv| {
            c.with.reduce_into_dyn(c.input(send)?, Some(c.output(recv)?), c.redop, c.root)
        }),
        in_place: Some(|c, _, buf| c.with.reduce_dyn(c.output(buf)?, c.redop, c.root)),
        ..USUAL
    },
    Spec {
        name: "all_gather",
        operation: Operation::AllGather,
        sizing: Sizing::Shards,
        bus: others,
        recv: Extent::PerRank,
        want: shards,
        out_of_place: Some(|c, _, send, recv| c.with.all_gather_dyn(c.input(send)?, c.output(recv)?)),
        in_place: Some(|c, _, buf| c.with.all_gather_in_place_dyn(c.output(buf)?)),
        ..USUAL
    },
    Spec {
        name: "all_gather_v",
        operation: Operation::AllGatherV,
        sizing: Sizing::Shards,
        blocks: Blocks::Uneven,
        bus: others,
        recv: Extent::PerRank,
        want: shards,
        out_of_place: Some(|c, p, send, recv| c.with.all_gather_v_dyn(c.input(send)?, c.output(recv)?, &p.counts())),
        in_place: Some(|c, p, buf| c.with.all_gather_v_in_place_dyn(c.output(buf)?, &p.counts())),
        ..USUAL
    },
    Spec {
        name: "gather",
        operation: Operation::Gather,
        rooted: true,
        sizing: Sizing::Shards,
        bus: others,
        recv: Extent::PerRank,
        want: shards_at_root,
        out_of_place: Some(|c, _, send, recv| c.with.gather_dyn(c.input(send)?, Some(c.output(recv)?), c.root)),
        in_place: Some(|c, p, buf| c.with.gather_in_place_dyn(c.output(in_place(c, p, buf))?, c.root)),
        ..USUAL
    },
    Spec {
        name: "gather_v",
        operation: Operation::GatherV,
        rooted: true,
        sizing: Sizing::Shards,
        blocks: Blocks::Uneven,
        bus: others,
        recv: Extent::PerRank,
        want: shards_at_root,
        out_of_place: Some(|c, p, send, recv| {
            c.with.gather_v_dyn(c.input(send)?, Some(c.output(recv)?), &p.counts(), c.root)
        }),
        in_place: Some(|c, p, buf| c.with.gather_v_in_place_dyn(c.output(in_place(c, p, buf))?, &p.counts(), c.root)),
        ..USUAL
    },
    Spec {
        name: "scatter",
        operation: Operation::Scatter,
        rooted: true,
        sizing: Sizing::Shards,
        bus: others,
        send: Extent::PerRank,
        want: own_of_root,
        keeps_rest: true,
        out_of_place: Some(|c, _, send, recv| c.with.scatter_dyn(Some(c.input(send)?), c.output(recv)?, c.root)),
        in_place: Some(|c, p, buf| c.with.scatter_in_place_dyn(c.output(in_place(c, p, buf))?, c.root)),
        ..USUAL
    },
    Spec {
        name: "scatter_v",
        operation: Operation::ScatterV,
        rooted: true,
        sizing: Sizing::Shards,
        blocks: Blocks::Uneven,
        bus: others,
        send: Extent::PerRank,
        want: own_of_root,
        keeps_rest: true,
        out_of_place: Some(|c, p, send, recv| {
            c.with.scatter_v_dyn(Some(c.input(send)?), c.output(recv)?, &p.counts(), c.root)
        }),
        in_place: Some(|c, p, buf| c.with.scatter_v_in_place_dyn(c.output(in_place(c, p, buf))?, &p.counts(), c.root)),
        ..USUAL
    },
    Spec {
        name: "reduce_scatter",
        operation: Operation::ReduceScatter,
        reduces: true,
        sizing: Sizing::Shards,
        bus: others,
        send: Extent::PerRank,
        want: own_sums,
        out_of_place: Some(|c, _, send, recv| c.with.reduce_scatter_dyn(c.input(send)?, c.output(recv)?, c.redop)),
        in_place: Some(|c, _, buf| c.with.reduce_scatter_in_place_dyn(c.output(buf)?, c.redop)),
        ..USUAL
    },
    Spec {
        name: "reduce_scatter_v",
        operation: Operation::ReduceScatterV,
        reduces: true,
        sizing: Sizing::Shards,
        blocks: Blocks::Uneven,
        bus: others,
        send: Extent::PerRank,
        want: own_sums,
        out_of_place: Some(|c, p, send, recv| {
            c.with.reduce_scatter_v_dyn(c.input(send)?, c.output(recv)?, &p.counts(), c.redop)
        }),
        in_place: Some(|c, p, buf| c.with.reduce_scatter_v_in_place_dyn(c.output(buf)?, &p.counts(), c.redop)),
        ..USUAL
    },
    Spec {
        name: "all_to_all",
        operation: Operation::AllToAll,
        sizing: Sizing::Shards,
        bus: others,
        send: Extent::PerRank,
        recv: Extent::PerRank,
        want: blocks,
        out_of_place: Some(|c, _, send, recv| c.with.all_to_all_dyn(c.input(send)?, c.output(recv)?)),
        in_place: Some(|c, _, buf| c.with.all_to_all_in_place_dyn(c.output(buf)?)),
        ..USUAL
    },
    Spec {
        name: "all_to_all_v",
        operation: Operation::AllToAllV,
        sizing: Sizing::Shards,
        blocks: Blocks::Pairs,
        bus: others,
        send: Extent::PerRank,
        recv: Extent::PerRank,
        want: blocks,
        out_of_place: Some(|c, p, send, recv| {
            // What goes to a rank is as long as what comes from it.
            c.with.all_to_all_v_dyn(c.input(send)?, c.output(recv)?, &p.counts(), &p.counts())
        }),
        ..USUAL
    },
    Spec {
        name: "scan",
        operation: Operation::Scan,
        reduces: true,
        prefix: true,
        want: |p| vec![(p.count, Want::Reduced(p.rank + 1, 0))],
        out_of_place: Some(|c, _, send, recv| c.with.scan_into_dyn(c.input(send)?, c.output(recv)?, c.redop)),
        in_place: Some(|c, _, buf| c.with.scan_dyn(c.output(buf)?, c.redop)),
        ..USUAL
    },
    Spec {
        name: "exscan",
        operation: Operation::Exscan,
        reduces: true,
        prefix: true,
        want: |p| vec![(p.count, if p.rank == 0 { Want::Kept } else { Want::Reduced(p.rank, 0) })],
        out_of_place: Some(|c, _, send, recv| c.with.exscan_into_dyn(c.input(send)?, c.output(recv)?, c.redop)),
        in_place: Some(|c, _, buf| c.with.exscan_dyn(c.output(buf)?, c.redop)),
        ..USUAL
    },
    Spec {
        name: "barrier",
        operation: Operation::Barrier,
        sizing: Sizing::Nothing,
        out_of_place: Some(|c, _, _, _| c.with.barrier()),
        ..USUAL
    },
];
