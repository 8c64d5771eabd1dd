//! Cases: an algorithm with all its numbers, run and compared with a serial computation.

// Each test binary uses its own part of this.
#![allow(dead_code, unreachable_pub)]

use collectives::{Algorithm, AnySchedule, Request, Shape};
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
        let shape = Shape {
            rank,
            size: self.n,
            bytes: self.elements * unit,
            unit,
            in_place: self.is_in_place(rank),
            segment: self.segment,
        };
        Request { shape, root: self.root }
    }

    fn is_in_place(&self, rank: usize) -> bool {
        self.in_place >> (rank % 64) & 1 == 1
    }

    pub fn schedules(&self) -> Vec<AnySchedule> {
        (0..self.n).map(|r| AnySchedule::new(self.algorithm, &self.request(r)).unwrap()).collect()
    }

    /// What rank `r` contributes.
    fn contribution(&self, r: usize) -> Vec<u8> {
        let shards = if self.algorithm.operation() == Operation::ReduceScatter { self.n } else { 1 };
        self.kind.data(self.elements * shards, self.seed * 1000 + r as u64)
    }

    fn serial(&self) -> Vec<u8> {
        let reducer = self.kind.reducer();
        let mut acc = self.contribution(0);
        for r in 1..self.n {
            reducer.fold(&mut acc, &mut self.contribution(r));
        }
        reducer.finish(&mut acc, self.n);
        acc
    }

    /// Runs it, checks the result and that nothing else was touched; returns the world for its counts.
    pub fn run(&self) -> World {
        let op = self.algorithm.operation();
        let bytes = self.elements * self.kind.reducer().unit();
        let outputs = |r: usize| match op {
            Operation::AllGather => bytes * self.n,
            Operation::ReduceScatter if self.is_in_place(r) => bytes * self.n,
            _ => bytes,
        };
        let before: Vec<[Vec<u8>; 2]> = (0..self.n)
            .map(|r| {
                let mine = self.contribution(r);
                let mut out = vec![0x5a; outputs(r)];
                match op {
                    Operation::Broadcast if r == self.root => return [Vec::new(), mine],
                    Operation::Broadcast => return [Vec::new(), out],
                    Operation::AllGather if self.is_in_place(r) => {
                        out[r * bytes..(r + 1) * bytes].copy_from_slice(&mine);
                        return [Vec::new(), out];
                    }
                    _ => {}
                }
                if self.is_in_place(r) { [Vec::new(), mine] } else { [mine, out] }
            })
            .collect();
        let mut world = World::new(self.kind.reducer(), before.clone(), self.mode, self.seed);
        world.run(&mut self.schedules());
        for (r, b) in before.iter().enumerate() {
            assert_eq!(world.input(r), b[0], "rank {r}'s input changed: {self:?}");
        }
        self.check(&world, &before);
        world
    }

    fn check(&self, world: &World, before: &[[Vec<u8>; 2]]) {
        let bytes = self.elements * self.kind.reducer().unit();
        let block = |r: usize| r * bytes..(r + 1) * bytes;
        let gathered: Vec<u8> = (0..self.n).flat_map(|r| self.contribution(r)).collect();
        match self.algorithm.operation() {
            Operation::AllReduce => {
                let want = self.serial();
                for r in 0..self.n {
                    assert_eq!(world.output(r), world.output(0), "rank {r} differs from rank 0: {self:?}");
                }
                self.compare(world.output(0), &want);
            }
            Operation::Reduce => {
                for (r, b) in before.iter().enumerate() {
                    if r == self.root {
                        self.compare(world.output(r), &self.serial());
                    } else {
                        assert_eq!(world.output(r), b[1], "rank {r} is not the root: {self:?}");
                    }
                }
            }
            Operation::Broadcast => {
                let want = self.contribution(self.root);
                for r in 0..self.n {
                    assert_eq!(world.output(r), want, "rank {r}: {self:?}");
                }
            }
            Operation::AllGather => {
                for r in 0..self.n {
                    assert_eq!(world.output(r), gathered, "rank {r}: {self:?}");
                }
            }
            Operation::ReduceScatter => {
                let want = self.serial();
                for r in 0..self.n {
                    let out = world.output(r);
                    let out = if self.is_in_place(r) { &out[block(r)] } else { out };
                    self.compare(out, &want[block(r)]);
                }
            }
            op => panic!("no check for {op}"),
        }
    }

    /// Exact, except for floats that are not summed in rank order.
    fn compare(&self, got: &[u8], want: &[u8]) {
        let rank_order = matches!(
            self.algorithm,
            Algorithm::AllReduceDirect | Algorithm::ReduceOrdered | Algorithm::ReduceScatterDirect
        );
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
