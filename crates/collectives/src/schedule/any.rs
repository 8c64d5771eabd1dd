//! A schedule of any algorithm in one value, so that running one needs no heap allocation.

use std::task::Poll;

use comm_core::Result;

use super::{
    AllGatherDirect, Binomial, Bruck, Chain, Direct, Dissemination, Exchange, Halving, PrefixChain, PrefixDoubling,
    Rabenseifner, RecursiveDoubling, Request, Ring, Schedule, Star, Transport, Tree,
};
use crate::select::Algorithm;

/// Any schedule. Up to 16 ranks, neither making nor running one allocates.
// The sizes differ because token lists lie inside; boxing the large ones would be the allocation this type avoids.
#[allow(clippy::large_enum_variant)]
#[derive(Debug)]
pub enum AnySchedule {
    /// Everybody to everybody, folds in rank order.
    Direct(Direct),
    /// Exchanges at doubling distances.
    RecursiveDoubling(RecursiveDoubling),
    /// Recursive halving, then recursive doubling.
    Rabenseifner(Rabenseifner),
    /// Recursive halving of all blocks.
    Halving(Halving),
    /// Pipelined ring.
    Ring(Ring),
    /// Binomial tree.
    Binomial(Binomial),
    /// Pipelined chain.
    Chain(Chain),
    /// Every shard to everybody at once.
    AllGatherDirect(AllGatherDirect),
    /// Rounds at doubling distances through scratch.
    Bruck(Bruck),
    /// Exchanges of every pair.
    Exchange(Exchange),
    /// The root with each of the others.
    Star(Star),
    /// Binomial tree for blocks.
    Tree(Tree),
    /// Sums of the ranks below, at doubling distances.
    PrefixDoubling(PrefixDoubling),
    /// Sums of the ranks below, along a pipelined chain.
    PrefixChain(PrefixChain),
    /// The barrier.
    Dissemination(Dissemination),
}

impl AnySchedule {
    /// One rank's schedule for an operation.
    ///
    /// # Errors
    ///
    /// [`InvalidArgument`](comm_core::ErrorKind::InvalidArgument) when the request's numbers contradict each
    /// other, see [`Shape::check`](super::Shape::check), or the root is not a rank.
    pub fn new(algorithm: Algorithm, request: &Request) -> Result<Self> {
        request.check(algorithm)?;
        let Request { shape, root, .. } = *request;
        let exchange = |pairwise| {
            let (send, recv) = request.layouts();
            Self::Exchange(Exchange::uneven(shape, send, recv, pairwise))
        };
        Ok(match algorithm {
            Algorithm::AllReduceDirect => Self::Direct(Direct::all_reduce(shape)),
            Algorithm::AllReduceRecursiveDoubling => Self::RecursiveDoubling(RecursiveDoubling::all_reduce(shape)),
            Algorithm::AllReduceRabenseifner => Self::Rabenseifner(Rabenseifner::all_reduce(shape)),
            Algorithm::AllReduceRing => Self::Ring(Ring::all_reduce(shape)),
            Algorithm::ReduceBinomial => Self::Binomial(Binomial::reduce(shape, root)),
            Algorithm::ReduceChain => Self::Chain(Chain::reduce(shape, root)),
            Algorithm::ReduceOrdered => Self::Direct(Direct::reduce(shape, root)),
            Algorithm::BroadcastBinomial => Self::Binomial(Binomial::broadcast(shape, root)),
            Algorithm::BroadcastChain => Self::Chain(Chain::broadcast(shape, root)),
            Algorithm::AllGatherDirect | Algorithm::AllGatherVDirect => {
                Self::AllGatherDirect(AllGatherDirect::new(shape, request.layout()))
            }
            Algorithm::AllGatherBruck => Self::Bruck(Bruck::all_gather(shape)),
            Algorithm::AllGatherRing | Algorithm::AllGatherVRing => {
                Self::Ring(Ring::all_gather(shape, request.layout()))
            }
            Algorithm::ReduceScatterDirect | Algorithm::ReduceScatterVDirect => {
                Self::Direct(Direct::reduce_scatter(shape, request.layout()))
            }
            Algorithm::ReduceScatterRing | Algorithm::ReduceScatterVRing => {
                Self::Ring(Ring::reduce_scatter(shape, request.layout()))
            }
            Algorithm::AllToAllDirect => Self::Exchange(Exchange::even(shape, false)),
            Algorithm::AllToAllBruck => Self::Bruck(Bruck::all_to_all(shape)),
            Algorithm::AllToAllPairwise => Self::Exchange(Exchange::even(shape, true)),
            Algorithm::AllToAllVDirect => exchange(false),
            Algorithm::AllToAllVPairwise => exchange(true),
            Algorithm::GatherBinomial => Self::Tree(Tree::gather(shape, root)),
            Algorithm::GatherDirect => Self::Star(Star::gather(request)),
            Algorithm::GatherVDirect => Self::Star(Star::gather_v(request)),
            Algorithm::ScatterBinomial => Self::Tree(Tree::scatter(shape, root)),
            Algorithm::ScatterDirect => Self::Star(Star::scatter(request)),
            Algorithm::ScatterVDirect => Self::Star(Star::scatter_v(request)),
            Algorithm::ReduceScatterHalving => Self::Halving(Halving::reduce_scatter(shape)),
            Algorithm::ScanRecursiveDoubling => Self::PrefixDoubling(PrefixDoubling::scan(shape)),
            Algorithm::ScanChain => Self::PrefixChain(PrefixChain::scan(shape)),
            Algorithm::ExscanRecursiveDoubling => Self::PrefixDoubling(PrefixDoubling::exscan(shape)),
            Algorithm::ExscanChain => Self::PrefixChain(PrefixChain::exscan(shape)),
            Algorithm::BarrierDissemination => Self::Dissemination(Dissemination::barrier(shape)),
        })
    }

    fn inner(&self) -> &dyn Schedule {
        match self {
            Self::Direct(s) => s,
            Self::RecursiveDoubling(s) => s,
            Self::Ring(s) => s,
            Self::Binomial(s) => s,
            Self::Chain(s) => s,
            Self::AllGatherDirect(s) => s,
            Self::Bruck(s) => s,
            Self::Exchange(s) => s,
            Self::Rabenseifner(s) => s,
            Self::Halving(s) => s,
            Self::Star(s) => s,
            Self::Tree(s) => s,
            Self::PrefixDoubling(s) => s,
            Self::PrefixChain(s) => s,
            Self::Dissemination(s) => s,
        }
    }
}

impl Schedule for AnySchedule {
    fn poll(&mut self, t: &mut dyn Transport) -> Poll<Result<()>> {
        match self {
            Self::Direct(s) => s.poll(t),
            Self::RecursiveDoubling(s) => s.poll(t),
            Self::Ring(s) => s.poll(t),
            Self::Binomial(s) => s.poll(t),
            Self::Chain(s) => s.poll(t),
            Self::AllGatherDirect(s) => s.poll(t),
            Self::Bruck(s) => s.poll(t),
            Self::Exchange(s) => s.poll(t),
            Self::Rabenseifner(s) => s.poll(t),
            Self::Halving(s) => s.poll(t),
            Self::Star(s) => s.poll(t),
            Self::Tree(s) => s.poll(t),
            Self::PrefixDoubling(s) => s.poll(t),
            Self::PrefixChain(s) => s.poll(t),
            Self::Dissemination(s) => s.poll(t),
        }
    }

    fn scratch(&self) -> usize {
        self.inner().scratch()
    }

    fn name(&self) -> &'static str {
        self.inner().name()
    }
}
