//! Cases: an algorithm with all its numbers, run and compared with a serial computation.

// Each test binary uses its own part of this.
#![allow(dead_code, unreachable_pub)]

use collectives::{Algorithm, AnySchedule, Blocks, Request, Shape};
use comm_core::op::{Loc, Operator, custom};
use comm_core::{DType, Operation, ReduceOp, Reducer};

use super::{Mode, Rng, World};

/// What the elements are and how they are combined.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    I64Sum,
    I64Avg,
    F32Sum,
    F32Avg,
    /// Composition of affine maps: associative, not commutative, exact.
    Affine,
}

impl Kind {
    pub fn reducer(self) -> Reducer {
        match self {
            Self::I64Sum => Reducer::builtin(ReduceOp::Sum, DType::I64).unwrap(),
            Self::I64Avg => Reducer::builtin(ReduceOp::Avg, DType::I64).unwrap(),
            Self::F32Sum => Reducer::builtin(ReduceOp::Sum, DType::F32).unwrap(),
            Self::F32Avg => Reducer::builtin(ReduceOp::Avg, DType::F32).unwrap(),
            // (a, b) stands for x -> a x + b; first the left map, then the right one.
            Self::Affine => custom(
                |acc: &mut [Loc<i64, u64>], x: &[Loc<i64, u64>]| {
                    for (l, r) in acc.iter_mut().zip(x) {
                        let value = l.value.wrapping_mul(r.value);
                        let index = l.index.wrapping_mul(r.value as u64).wrapping_add(r.index);
                        *l = Loc { value, index };
                    }
                },
                false,
            )
            .reducer(),
        }
    }

    fn element(self, rng: &mut Rng) -> Vec<u8> {
        match self {
            Self::I64Sum | Self::I64Avg => (rng.next() as i64).to_ne_bytes().to_vec(),
            Self::F32Sum | Self::F32Avg => {
                // Very different magnitudes, so that another order of summation shows in the bits.
                let x = (rng.below(2001) as f32 - 1000.0) * 2f32.powi(rng.below(20) as i32 - 10);
                x.to_ne_bytes().to_vec()
            }
            Self::Affine => [(rng.next() | 1).to_ne_bytes(), rng.next().to_ne_bytes()].concat(),
        }
    }

    fn data(self, elements: usize, seed: u64) -> Vec<u8> {
        let mut rng = Rng(seed);
        (0..elements).flat_map(|_| self.element(&mut rng)).collect()
    }
}

#[derive(Clone, Copy, Debug)]
pub struct Case {
    pub algorithm: Algorithm,
    pub n: usize,
    pub elements: usize,
    pub kind: Kind,
    pub root: usize,
    /// Which ranks operate in place: bit `r mod 64`.
    pub in_place: u64,
    pub segment: usize,
    pub mode: Mode,
    pub seed: u64,
}

impl Case {
    pub fn new(algorithm: Algorithm, n: usize, elements: usize, kind: Kind) -> Self {
        Self { algorithm, n, elements, kind, root: 0, in_place: 0, segment: 64, mode: Mode::Mixed, seed: 1 }
    }

    pub fn request(&self, rank: usize) -> Request {
        let unit = self.kind.reducer().unit();
        let list = |len: &dyn Fn(usize) -> usize| (0..self.n).map(|r| len(r) * unit).collect();
        let blocks = match self.op() {
            Operation::AllGatherV | Operation::ReduceScatterV => Blocks::Uneven(list(&|r| self.block(r))),
            // What others have only the root knows; elsewhere it must not matter.
            Operation::GatherV | Operation::ScatterV => {
                let known = |r| if rank == self.root || r == rank { self.block(r) } else { self.root + r };
                Blocks::Uneven(list(&known))
            }
            Operation::AllToAllV => {
                Blocks::Pairs { send: list(&|r| self.pair(rank, r)), recv: list(&|r| self.pair(r, rank)) }
            }
            _ => Blocks::Even,
        };
        let shape = Shape {
            rank,
            size: self.n,
            bytes: if blocks == Blocks::Even { self.elements * unit } else { 0 },
            unit,
            in_place: self.in_place >> (rank % 64) & 1 == 1,
            segment: self.segment,
        };
        Request { shape, root: self.root, blocks }
    }

    fn op(&self) -> Operation {
        self.algorithm.operation()
    }

    fn is_root(&self, rank: usize) -> bool {
        rank == self.root
    }

    /// Whether the rank's contribution lies in its output, or, for scatter at the root, stays in its input.
    fn is_in_place(&self, rank: usize) -> bool {
        let applies = match self.op() {
            Operation::Broadcast | Operation::AllToAllV => false,
            Operation::Gather | Operation::GatherV | Operation::Scatter | Operation::ScatterV => self.is_root(rank),
            _ => true,
        };
        applies && self.in_place >> (rank % 64) & 1 == 1
    }

    pub fn schedules(&self) -> Vec<AnySchedule> {
        (0..self.n).map(|r| AnySchedule::new(self.algorithm, &self.request(r)).unwrap()).collect()
    }

    /// Elements of rank `r`'s block; uneven ones are often empty and up to twice as long as even ones.
    fn block(&self, r: usize) -> usize {
        match self.op() {
            Operation::AllGatherV | Operation::ReduceScatterV | Operation::GatherV | Operation::ScatterV => {
                self.uneven(r)
            }
            _ => self.elements,
        }
    }

    /// Elements of the block that goes from one rank to another.
    fn pair(&self, from: usize, to: usize) -> usize {
        if self.op() == Operation::AllToAllV { self.uneven(from * self.n + to) } else { self.elements }
    }

    fn uneven(&self, i: usize) -> usize {
        let mut rng = Rng(self.seed << 20 | i as u64);
        if rng.below(4) == 0 { 0 } else { rng.below(2 * self.elements + 1) }
    }

    /// Bytes before the first block, the second and so on, and all.
    fn starts(&self, len: impl Fn(usize) -> usize) -> Vec<usize> {
        let unit = self.kind.reducer().unit();
        (0..=self.n).map(|end| (0..end).map(&len).sum::<usize>() * unit).collect()
    }

    /// Where the blocks of a buffer lie that has one per rank.
    fn blocks(&self) -> Vec<usize> {
        self.starts(|r| self.block(r))
    }

    /// What rank `r` contributes.
    fn contribution(&self, r: usize) -> Vec<u8> {
        let elements = match self.op() {
            Operation::ReduceScatter | Operation::ReduceScatterV => (0..self.n).map(|b| self.block(b)).sum(),
            Operation::Scatter | Operation::ScatterV if self.is_root(r) => (0..self.n).map(|b| self.block(b)).sum(),
            Operation::Scatter | Operation::ScatterV => 0,
            Operation::AllToAll | Operation::AllToAllV => (0..self.n).map(|to| self.pair(r, to)).sum(),
            _ => self.block(r),
        };
        self.kind.data(elements, self.seed * 1000 + r as u64)
    }

    /// The contributions of the first so many ranks, combined one after the other.
    fn serial(&self, ranks: usize) -> Vec<u8> {
        let reducer = self.kind.reducer();
        let mut acc = self.contribution(0);
        for r in 1..ranks {
            reducer.fold(&mut acc, &mut self.contribution(r));
        }
        reducer.finish(&mut acc, ranks);
        acc
    }

    /// Input and output of a rank before the operation.
    fn buffers(&self, r: usize) -> [Vec<u8>; 2] {
        let unit = self.kind.reducer().unit();
        let filler = |bytes: usize| vec![0x5a; bytes];
        let (mine, in_place) = (self.contribution(r), self.is_in_place(r));
        match self.op() {
            Operation::Broadcast if self.is_root(r) => [Vec::new(), mine],
            Operation::Broadcast => [Vec::new(), filler(mine.len())],
            Operation::Gather | Operation::GatherV if !self.is_root(r) => [mine, Vec::new()],
            Operation::AllGather | Operation::AllGatherV | Operation::Gather | Operation::GatherV => {
                let starts = self.blocks();
                let mut out = filler(starts[self.n]);
                if !in_place {
                    return [mine, out];
                }
                out[starts[r]..starts[r + 1]].copy_from_slice(&mine);
                [Vec::new(), out]
            }
            Operation::Scatter | Operation::ScatterV if in_place => [mine, Vec::new()],
            _ if in_place => [Vec::new(), mine],
            Operation::Scatter | Operation::ScatterV | Operation::ReduceScatter | Operation::ReduceScatterV => {
                [mine, filler(self.block(r) * unit)]
            }
            Operation::AllToAllV => [mine, filler(self.starts(|from| self.pair(from, r))[self.n])],
            _ => {
                let bytes = mine.len();
                [mine, filler(bytes)]
            }
        }
    }

    /// The borders between the blocks of a rank's input and output.
    fn borders(&self, r: usize) -> [Vec<usize>; 2] {
        match self.op() {
            Operation::AllGather | Operation::AllGatherV => [Vec::new(), self.blocks()],
            Operation::Gather | Operation::GatherV if self.is_root(r) => [Vec::new(), self.blocks()],
            Operation::Scatter | Operation::ScatterV if self.is_root(r) => [self.blocks(), Vec::new()],
            Operation::ReduceScatter | Operation::ReduceScatterV if self.is_in_place(r) => [Vec::new(), self.blocks()],
            Operation::ReduceScatter | Operation::ReduceScatterV => [self.blocks(), Vec::new()],
            Operation::AllToAll | Operation::AllToAllV => {
                [self.starts(|to| self.pair(r, to)), self.starts(|from| self.pair(from, r))]
            }
            _ => [Vec::new(), Vec::new()],
        }
    }

    /// Runs it, checks the result and that nothing else was touched; returns the world for its counts.
    pub fn run(&self) -> World {
        let before: Vec<[Vec<u8>; 2]> = (0..self.n).map(|r| self.buffers(r)).collect();
        let mut world = World::new(self.kind.reducer(), before.clone(), self.mode, self.seed);
        for r in 0..self.n {
            world.set_borders(r, self.borders(r));
        }
        if matches!(self.op(), Operation::GatherV | Operation::ScatterV | Operation::AllToAllV) {
            world.allow_empty_messages();
        }
        world.run(&mut self.schedules());
        for (r, b) in before.iter().enumerate() {
            assert_eq!(world.input(r), b[0], "rank {r}'s input changed: {self:?}");
        }
        self.check(&world, &before);
        world
    }

    fn check(&self, world: &World, before: &[[Vec<u8>; 2]]) {
        let all = || (0..self.n).map(|r| self.contribution(r)).collect::<Vec<_>>();
        let same = |r: usize, want: &[u8]| assert!(world.output(r) == want, "rank {r} has something else: {self:?}");
        match self.op() {
            Operation::AllReduce => {
                let want = self.serial(self.n);
                for r in 0..self.n {
                    assert_eq!(world.output(r), world.output(0), "rank {r} differs from rank 0: {self:?}");
                }
                self.compare(world.output(0), &want);
            }
            Operation::Reduce => {
                for (r, b) in before.iter().enumerate() {
                    if self.is_root(r) {
                        self.compare(world.output(r), &self.serial(self.n));
                    } else {
                        same(r, &b[1]);
                    }
                }
            }
            Operation::Broadcast => {
                let want = self.contribution(self.root);
                (0..self.n).for_each(|r| same(r, &want));
            }
            Operation::AllGather | Operation::AllGatherV => {
                let want = all().concat();
                (0..self.n).for_each(|r| same(r, &want));
            }
            Operation::Gather | Operation::GatherV => same(self.root, &all().concat()),
            Operation::Scatter | Operation::ScatterV => {
                let (data, starts) = (self.contribution(self.root), self.blocks());
                for r in (0..self.n).filter(|r| !self.is_in_place(*r)) {
                    same(r, &data[starts[r]..starts[r + 1]]);
                }
            }
            Operation::ReduceScatter | Operation::ReduceScatterV => {
                let (want, starts) = (self.serial(self.n), self.blocks());
                for r in 0..self.n {
                    let (out, block) = (world.output(r), starts[r]..starts[r + 1]);
                    let out = if self.is_in_place(r) { &out[block.clone()] } else { out };
                    self.compare(out, &want[block]);
                }
            }
            Operation::AllToAll | Operation::AllToAllV => {
                let all = all();
                for to in 0..self.n {
                    let block = |from: usize| {
                        let starts = self.starts(|r| self.pair(from, r));
                        &all[from][starts[to]..starts[to + 1]]
                    };
                    same(to, &(0..self.n).map(block).collect::<Vec<_>>().concat());
                }
            }
            Operation::Scan => (0..self.n).for_each(|r| self.compare(world.output(r), &self.serial(r + 1))),
            Operation::Exscan => {
                same(0, &before[0][1]);
                (1..self.n).for_each(|r| self.compare(world.output(r), &self.serial(r)));
            }
            op => panic!("no check for {op}"),
        }
    }

    /// Exact, except for floats that are not summed one rank after the other.
    fn compare(&self, got: &[u8], want: &[u8]) {
        let rank_order = matches!(
            self.algorithm,
            Algorithm::AllReduceDirect
                | Algorithm::ReduceOrdered
                | Algorithm::ReduceScatterDirect
                | Algorithm::ReduceScatterVDirect
                | Algorithm::ScanChain
                | Algorithm::ExscanChain
        );
        assert_eq!(got.len(), want.len());
        if rank_order || !matches!(self.kind, Kind::F32Sum | Kind::F32Avg) {
            assert!(got == want, "wrong result: {self:?}\n got {got:?}\nwant {want:?}");
            return;
        }
        let floats =
            |b: &[u8]| -> Vec<f32> { b.chunks_exact(4).map(|c| f32::from_ne_bytes(c.try_into().unwrap())).collect() };
        for (g, w) in floats(got).into_iter().zip(floats(want)) {
            // Inputs are below 2^20; rounding errors are relative to them, not to the sum.
            assert!((g - w).abs() <= 1e-6 * 1048576.0, "{g} instead of {w}: {self:?}");
        }
    }
}
