//! From a request to a schedule and its buffers.

use std::sync::Arc;

use comm_core::{Error, OpRequest, Operation, RawBlocks, RawBlocksMut, RawBuf, RawBufMut, Reducer, Result};

use super::buffers::{Buffers, Space};
use super::mesh::MeshBackend;
use super::task::Collective;
use crate::schedule::{AnySchedule, Blocks, Request, Shape};
use crate::select::Algorithm;

/// A collective as it was asked for; what an operation lacks stays at its default.
struct Asked<'a> {
    /// As in [`Shape::bytes`].
    bytes: usize,
    /// What the choice of the algorithm depends on: something that all ranks know alike.
    weight: usize,
    input: Space,
    output: Space,
    in_place: bool,
    reducer: Option<&'a Reducer>,
    root: usize,
    blocks: Blocks,
}

impl Asked<'_> {
    fn new(bytes: usize, input: Space, output: Space) -> Self {
        Self { bytes, weight: bytes, input, output, in_place: false, reducer: None, root: 0, blocks: Blocks::Even }
    }

    /// Blocks whose lengths all ranks know.
    fn known(self, lens: Arc<[usize]>) -> Self {
        let weight = lens.iter().sum::<usize>() / lens.len().max(1);
        Self { weight, ..self.uneven(lens) }
    }

    /// Blocks of which some ranks know less than others.
    fn uneven(self, lens: Arc<[usize]>) -> Self {
        Self { bytes: 0, weight: 0, blocks: Blocks::Uneven(lens), ..self }
    }
}

/// A collective in the terms of the schedules.
pub(super) struct Plan {
    pub(super) algorithm: Algorithm,
    request: Request,
    buffers: Buffers,
    reducer: Option<Reducer>,
}

fn lengths(b: &RawBlocks) -> Arc<[usize]> {
    b.iter().map(|b| b.bytes()).collect()
}

/// The list of a rank that knows its own block only.
fn only(rank: usize, size: usize, bytes: usize) -> Arc<[usize]> {
    (0..size).map(|r| if r == rank { bytes } else { 0 }).collect()
}

/// Whether the contribution already lies where the result goes. Without a byte it makes no difference, and in place
/// costs less.
fn inside(input: &RawBuf, output: &RawBufMut) -> bool {
    output.overlaps(input) || (input.bytes() == 0 && output.bytes() == 0)
}

fn within(input: &RawBuf, output: &RawBlocksMut) -> bool {
    output.overlaps(input) || output.bytes() == 0
}

impl MeshBackend {
    fn plan(&self, op: Operation, hint: Option<&str>, asked: Asked<'_>) -> Result<Plan> {
        let Asked { bytes, weight, input, output, in_place, reducer, root, blocks } = asked;
        let commutative = reducer.is_none_or(Reducer::is_commutative);
        let algorithm = self.choose(op, weight, commutative, hint)?;
        let shape = Shape {
            rank: self.info.rank,
            size: self.info.size,
            bytes,
            unit: reducer.map_or(1, Reducer::unit),
            in_place,
            segment: self.options.segment,
        };
        let buffers = Buffers::new(input, output, &self.pool);
        Ok(Plan { algorithm, request: Request { shape, root, blocks }, buffers, reducer: reducer.cloned() })
    }

    /// Translates a request; `None` for point-to-point.
    pub(super) fn translate(&self, request: &OpRequest, hint: Option<&str>) -> Result<Option<Plan>> {
        use OpRequest as R;
        let asked = match request {
            R::P2p(_) | R::Batch(_) | R::SendRecv(_) => return Ok(None),
            R::Barrier => Asked::new(0, Space::NONE, Space::NONE),
            R::Broadcast { buf, root } => {
                let asked = Asked::new(buf.bytes(), Space::NONE, Space::write(buf));
                Asked { in_place: true, root: *root, ..asked }
            }
            R::AllReduce { input, output, reducer }
            | R::Scan { input, output, reducer }
            | R::Exscan { input, output, reducer } => {
                let asked = Asked::new(input.bytes(), Space::read(input), Space::write(output));
                Asked { in_place: inside(input, output), reducer: Some(reducer), ..asked }
            }
            R::Reduce { input, output, reducer, root } => {
                let out = output.as_ref().map_or(Space::NONE, Space::write);
                let in_place = output.as_ref().is_some_and(|o| inside(input, o));
                let asked = Asked::new(input.bytes(), Space::read(input), out);
                Asked { in_place, reducer: Some(reducer), root: *root, ..asked }
            }
            R::AllGather { input, output } | R::AllGatherV { input, output } => {
                let asked = Asked::new(input.bytes(), Space::read(input), Space::write_blocks(output));
                let asked = Asked { in_place: within(input, output), ..asked };
                if matches!(request, R::AllGatherV { .. }) { asked.known(lengths(&output.as_const())) } else { asked }
            }
            R::Gather { input, output, root } | R::GatherV { input, output, root } => {
                self.gather(input, output.as_ref(), *root, matches!(request, R::GatherV { .. }))
            }
            R::Scatter { input, output, root } | R::ScatterV { input, output, root } => {
                self.scatter(input.as_ref(), output, *root, matches!(request, R::ScatterV { .. }))
            }
            R::ReduceScatter { input, output, reducer } | R::ReduceScatterV { input, output, reducer } => {
                let asked = reduce_scatter(input, output);
                let asked = Asked { reducer: Some(reducer), ..asked };
                if matches!(request, R::ReduceScatterV { .. }) { asked.known(lengths(input)) } else { asked }
            }
            R::AllToAll { input, output } => {
                let block = input.get(self.info.rank).bytes();
                let in_place = match (input.whole(), output.whole()) {
                    (Some(i), Some(o)) => inside(&i, &o),
                    _ => false,
                };
                let asked = Asked::new(block, Space::read_blocks(input), Space::write_blocks(output));
                Asked { in_place, ..asked }
            }
            R::AllToAllV { input, output } => {
                let blocks = Blocks::Pairs { send: lengths(input), recv: lengths(&output.as_const()) };
                let asked = Asked::new(0, Space::read_blocks(input), Space::write_blocks(output));
                Asked { blocks, ..asked }
            }
            other => {
                return Err(Error::unsupported(other.operation().name(), "this backend does not know the operation"));
            }
        };
        self.plan(request.operation(), hint, asked).map(Some)
    }

    fn gather(&self, input: &RawBuf, output: Option<&RawBlocksMut>, root: usize, uneven: bool) -> Asked<'static> {
        let out = output.map_or(Space::NONE, Space::write_blocks);
        let in_place = output.is_some_and(|o| within(input, o));
        let asked = Asked { in_place, root, ..Asked::new(input.bytes(), Space::read(input), out) };
        if !uneven {
            return asked;
        }
        let own = || only(self.info.rank, self.info.size, input.bytes());
        asked.uneven(output.map_or_else(own, |o| lengths(&o.as_const())))
    }

    fn scatter(&self, input: Option<&RawBlocks>, output: &RawBufMut, root: usize, uneven: bool) -> Asked<'static> {
        let from = input.map_or(Space::NONE, Space::read_blocks);
        let in_place = input.is_some_and(|i| i.bytes() == 0 || i.iter().any(|b| output.overlaps(&b)));
        let asked = Asked { in_place, root, ..Asked::new(output.bytes(), from, Space::write(output)) };
        if !uneven {
            return asked;
        }
        let own = || only(self.info.rank, self.info.size, output.bytes());
        asked.uneven(input.map_or_else(own, lengths))
    }

    /// Binds a plan to its schedule, scaling the contribution if the operator has a factor.
    ///
    /// # Safety
    ///
    /// The plan's buffers are valid and not used otherwise.
    pub(super) unsafe fn bind(&self, mut plan: Plan) -> Result<Collective> {
        let shape = &mut plan.request.shape;
        if let Some(r) = plan.reducer.as_ref().filter(|r| r.needs_prescale()) {
            // An exclusive scan leaves rank 0's buffer as it is.
            let in_output = shape.in_place && plan.algorithm.operation() != Operation::Exscan;
            // SAFETY: forwarded.
            unsafe {
                if in_output {
                    plan.buffers.scale(r);
                } else {
                    plan.buffers.scale_copy(r, shape.in_place);
                    shape.in_place = false;
                }
            }
        }
        let schedule = AnySchedule::new(plan.algorithm, &plan.request)?;
        Ok(Collective::new(schedule, plan.buffers, plan.reducer, self.info.rank, self.info.size))
    }
}

fn reduce_scatter(input: &RawBlocks, output: &RawBufMut) -> Asked<'static> {
    if let Some(all) = input.whole()
        && (output.overlaps(&all) || all.bytes() == 0)
    {
        // In place, schedules want the whole buffer as output. Its pointer came from a mutable range.
        let whole = RawBufMut::new(all.ptr().cast_mut(), all.bytes(), all.dtype(), all.device());
        let asked = Asked::new(output.bytes(), Space::read(&all), Space::write(&whole));
        return Asked { in_place: true, ..asked };
    }
    Asked::new(output.bytes(), Space::read_blocks(input), Space::write(output))
}
