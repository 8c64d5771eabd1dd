//! Real bytes for simulated messages, in small worlds: so that what is costed is known to work.

use std::collections::HashMap;

use collectives::{Algorithm, Buf, Span};
use rustcomms::{DType, Operation, ReduceOp, Reducer, Result};

use super::case::Case;
use super::engine::{Engine, Patience};
use super::model::Model;

/// Who gets, from whom, which step.
type Key = (u32, u32, u32);

/// The buffers of all ranks and what is on its way.
#[derive(Debug)]
pub(super) struct Data {
    /// Input, output and scratch by rank.
    bufs: Vec<[Vec<u8>; 3]>,
    wire: HashMap<Key, Vec<u8>>,
    recvs: HashMap<Key, (Span, Option<Span>)>,
    reducer: Reducer,
}

const fn index(b: Buf) -> usize {
    match b {
        Buf::Input => 0,
        Buf::Output => 1,
        Buf::Scratch => 2,
    }
}

impl Data {
    fn new(bufs: Vec<[Vec<u8>; 3]>, reducer: Reducer) -> Self {
        Self { bufs, wire: HashMap::new(), recvs: HashMap::new(), reducer }
    }

    pub(super) fn set_scratch(&mut self, rank: usize, bytes: usize) {
        self.bufs[rank][2] = vec![0xa5; bytes];
    }

    fn get(&self, rank: usize, s: Span) -> Vec<u8> {
        self.bufs[rank][index(s.buf)][s.off..s.off + s.len].to_vec()
    }

    fn slice(&mut self, rank: usize, s: Span) -> &mut [u8] {
        &mut self.bufs[rank][index(s.buf)][s.off..s.off + s.len]
    }

    pub(super) fn send(&mut self, from: usize, to: u32, step: u32, span: Span) {
        let bytes = self.get(from, span);
        self.wire.insert((to, from as u32, step), bytes);
    }

    pub(super) fn expect(&mut self, to: usize, from: u32, step: u32, dst: Span, own: Option<Span>) {
        self.recvs.insert((to as u32, from, step), (dst, own));
    }

    /// Puts a message that has come where it was expected.
    pub(super) fn arrive(&mut self, to: usize, from: u32, step: u32) {
        let key = (to as u32, from, step);
        let (Some(mut bytes), Some((dst, own))) = (self.wire.remove(&key), self.recvs.remove(&key)) else { return };
        if let Some(own) = own {
            let mut acc = self.get(to, own);
            self.reducer.fold(&mut acc, &mut bytes);
            bytes = acc;
        }
        self.slice(to, dst).copy_from_slice(&bytes);
    }

    pub(super) fn copy(&mut self, rank: usize, dst: Span, src: Span) {
        let bytes = self.get(rank, src);
        self.slice(rank, dst).copy_from_slice(&bytes);
    }

    pub(super) fn fold(&mut self, rank: usize, acc: Span, x: Span, reverse: bool) {
        let (mut left, mut right) = (self.get(rank, acc), self.get(rank, x));
        if reverse {
            self.reducer.fold_rev(&mut left, &mut right);
        } else {
            self.reducer.fold(&mut left, &mut right);
        }
        self.slice(rank, acc).copy_from_slice(&left);
        // Folds may leave anything in their operand.
        self.slice(rank, x).fill(0xee);
    }

    pub(super) fn finish(&mut self, rank: usize, span: Span, ranks: usize) {
        let reducer = self.reducer.clone();
        reducer.finish(self.slice(rank, span), ranks);
    }
}

/// Element `i` of what rank `r` contributes.
fn element(r: usize, i: usize) -> i32 {
    ((r as u32).wrapping_mul(0x85eb_ca6b) ^ (i as u32).wrapping_mul(0x9e37_79b9)).rotate_left(13) as i32
}

fn bytes(xs: impl Iterator<Item = i32>) -> Vec<u8> {
    xs.flat_map(i32::to_ne_bytes).collect()
}

/// Bytes that checking this case needs or moves, about.
fn volume(case: &Case) -> usize {
    let (to, from) = blocks(case.algorithm.operation(), case.n);
    let messages = if case.algorithm == Algorithm::AllReduceDirect { case.n } else { 0 };
    case.n.saturating_mul(case.bytes).saturating_mul(to + from + messages)
}

/// Blocks in the input and in the output.
pub(super) const fn blocks(op: Operation, n: usize) -> (usize, usize) {
    match op {
        Operation::AllGather | Operation::AllGatherV | Operation::Gather | Operation::GatherV => (1, n),
        Operation::ReduceScatter | Operation::ReduceScatterV | Operation::Scatter | Operation::ScatterV => (n, 1),
        Operation::AllToAll | Operation::AllToAllV => (n, n),
        _ => (1, 1),
    }
}

/// Largest world whose results are compared, and most bytes for that.
const RANKS: usize = 64;
const BYTES: usize = 24 << 20;

/// Runs the case with real `i32` sums and compares every rank's result with a serial computation; `None` where the world or its
/// buffers are too large for that.
///
/// # Errors
///
/// Those of the run, and `InvalidArgument` naming the rank whose result is wrong.
pub fn check(case: &Case, model: Model) -> Result<Option<()>> {
    let op = case.algorithm.operation();
    if case.n > RANKS || volume(case) > BYTES {
        return Ok(None);
    }
    let n = case.n;
    let (ins, outs) = blocks(op, n);
    let per = case.bytes / 4;
    let contribution = |r: usize| bytes((0..ins * per).map(|i| element(r, i)));
    let bufs = (0..n).map(|r| match op {
        Operation::Barrier => [Vec::new(), Vec::new(), Vec::new()],
        Operation::Broadcast if r == 0 => [Vec::new(), contribution(0), Vec::new()],
        Operation::AllReduce => [Vec::new(), contribution(r), Vec::new()],
        _ => [contribution(r), vec![0x5a; outs * case.bytes], Vec::new()],
    });
    let data = Data::new(bufs.collect(), Reducer::builtin(ReduceOp::Sum, DType::I32)?);
    let mut engine = Engine::all(model.at(case.buffer()), n as u32, case.symmetry(), Patience::None).with_data(data);
    engine.run(|r| case.schedule(r))?;
    let data = engine.into_data().ok_or_else(|| rustcomms::Error::invalid("the run has lost its data"))?;
    for r in 0..n {
        if let Some(want) = expected(op, n, per, r)
            && data.bufs.get(r).is_none_or(|b| b[1] != want)
        {
            return Err(rustcomms::Error::invalid(format!(
                "{} on {n} ranks with {} bytes: rank {r} has a wrong result",
                case.algorithm, case.bytes
            )));
        }
    }
    Ok(Some(()))
}

/// What rank `r`'s output must be; `None` where it is not defined.
fn expected(op: Operation, n: usize, per: usize, r: usize) -> Option<Vec<u8>> {
    let sum = |ranks: usize, from: usize| {
        bytes((from..from + per).map(|i| (0..ranks).fold(0i32, |acc, r| acc.wrapping_add(element(r, i)))))
    };
    let block = |of: usize, b: usize| (b * per..(b + 1) * per).map(move |i| element(of, i));
    Some(match op {
        Operation::AllReduce => sum(n, 0),
        Operation::Reduce if r == 0 => sum(n, 0),
        Operation::Broadcast => bytes(block(0, 0)),
        Operation::AllGather | Operation::AllGatherV => bytes((0..n).flat_map(|p| block(p, 0))),
        Operation::Gather | Operation::GatherV if r == 0 => bytes((0..n).flat_map(|p| block(p, 0))),
        Operation::Scatter | Operation::ScatterV => bytes(block(0, r)),
        Operation::ReduceScatter | Operation::ReduceScatterV => sum(n, r * per),
        Operation::AllToAll | Operation::AllToAllV => bytes((0..n).flat_map(|p| block(p, r))),
        Operation::Scan => sum(r + 1, 0),
        Operation::Exscan if r > 0 => sum(r, 0),
        _ => return None,
    })
}
