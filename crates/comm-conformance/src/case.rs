//! One call of the suite: every factor that a case fixes.

use std::fmt;

use comm_core::{OpQuery, Operation, ReduceOp};

use crate::kind::Kind;
use crate::oper::Oper;
use crate::value::{Style, Values, mix};

/// Where results go.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Place {
    /// Into a buffer of their own.
    Out,
    /// Where the contribution was.
    In,
    /// From or into a buffer per rank.
    List,
}

/// How the call is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Form {
    /// Borrows, returns when done.
    Sync,
    /// Takes the buffers, then waits.
    Async,
    /// Takes the buffers, then is polled by an executor.
    Future,
    /// Borrows, inside a scope.
    Scoped,
    /// Takes the buffers, and the handle is dropped at once.
    Dropped,
    /// Type and operator chosen at run time, memory of any alignment.
    Dynamic,
}

impl Form {
    pub(crate) const ALL: [Self; 6] =
        [Self::Sync, Self::Async, Self::Future, Self::Scoped, Self::Dropped, Self::Dynamic];

    /// The form in a question to the backend.
    pub(crate) const fn query(self) -> comm_core::Form {
        match self {
            Self::Sync | Self::Dynamic => comm_core::Form::Sync,
            Self::Async | Self::Future | Self::Dropped => comm_core::Form::Async,
            Self::Scoped => comm_core::Form::Scoped,
        }
    }
}

/// How uneven the blocks of a `_v` operation are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Split {
    /// Different lengths, some of them zero.
    Uneven,
    /// One block has everything.
    One,
    /// All blocks are empty.
    Empty,
}

/// An algorithm that a call can be told to use.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Algo {
    /// The operation that has it.
    pub operation: Operation,
    /// Its name, as the call's hint `algo` takes it.
    pub name: String,
    /// Whether it folds in rank order, so that operators need not commute.
    pub ordered: bool,
}

impl Algo {
    /// An algorithm.
    #[must_use]
    pub fn new(operation: Operation, name: impl Into<String>, ordered: bool) -> Self {
        Self { operation, name: name.into(), ordered }
    }
}

/// Operations with the places that they have.
pub(crate) const CALLS: &[(Operation, &[Place])] = &[
    (Operation::Send, &[Place::Out]),
    (Operation::Recv, &[Place::Out]),
    (Operation::Batch, &[Place::Out]),
    (Operation::SendRecv, &[Place::Out]),
    (Operation::Broadcast, &[Place::In]),
    (Operation::AllReduce, &[Place::Out, Place::In]),
    (Operation::Reduce, &[Place::Out, Place::In]),
    (Operation::AllGather, &[Place::Out, Place::In, Place::List]),
    (Operation::AllGatherV, &[Place::Out, Place::In, Place::List]),
    (Operation::Gather, &[Place::Out, Place::In, Place::List]),
    (Operation::GatherV, &[Place::Out, Place::In, Place::List]),
    (Operation::Scatter, &[Place::Out, Place::In, Place::List]),
    (Operation::ScatterV, &[Place::Out, Place::In, Place::List]),
    (Operation::ReduceScatter, &[Place::Out, Place::In, Place::List]),
    (Operation::ReduceScatterV, &[Place::Out, Place::In, Place::List]),
    (Operation::AllToAll, &[Place::Out, Place::In, Place::List]),
    (Operation::AllToAllV, &[Place::Out, Place::List]),
    (Operation::Scan, &[Place::Out, Place::In]),
    (Operation::Exscan, &[Place::Out, Place::In]),
    (Operation::Barrier, &[Place::Out]),
];

/// Whether the operation reduces.
pub(crate) const fn reduces(op: Operation) -> bool {
    matches!(
        op,
        Operation::AllReduce
            | Operation::Reduce
            | Operation::ReduceScatter
            | Operation::ReduceScatterV
            | Operation::Scan
            | Operation::Exscan
    )
}

/// Whether a rank plays a part of its own: a root, or the distance between the ends of a message.
pub(crate) const fn has_root(op: Operation) -> bool {
    matches!(
        op,
        Operation::Send
            | Operation::Recv
            | Operation::SendRecv
            | Operation::Broadcast
            | Operation::Reduce
            | Operation::Gather
            | Operation::GatherV
            | Operation::Scatter
            | Operation::ScatterV
    )
}

/// Whether blocks differ in length.
pub(crate) const fn is_uneven(op: Operation) -> bool {
    matches!(
        op,
        Operation::AllGatherV
            | Operation::GatherV
            | Operation::ScatterV
            | Operation::ReduceScatterV
            | Operation::AllToAllV
    )
}

/// Whether the operation has one block per rank.
pub(crate) const fn has_blocks(op: Operation) -> bool {
    is_uneven(op)
        || matches!(
            op,
            Operation::AllGather
                | Operation::Gather
                | Operation::Scatter
                | Operation::ReduceScatter
                | Operation::AllToAll
        )
}

/// Whether there is a `_dyn` call.
pub(crate) const fn has_dynamic(op: Operation, place: Place) -> bool {
    match place {
        Place::List => false,
        Place::In => !is_uneven(op),
        Place::Out => !matches!(op, Operation::Barrier | Operation::Batch),
    }
}

/// A call with every factor fixed. All ranks have the same.
#[derive(Clone, Debug)]
pub(crate) struct CallCase {
    pub(crate) op: Operation,
    pub(crate) place: Place,
    pub(crate) form: Form,
    pub(crate) kind: Kind,
    pub(crate) oper: Option<Oper>,
    pub(crate) style: Style,
    /// Elements of one contribution or one block.
    pub(crate) count: usize,
    pub(crate) split: Split,
    /// The root, or the distance that messages go.
    pub(crate) root: usize,
    pub(crate) algo: Option<String>,
    pub(crate) seed: u64,
}

impl CallCase {
    pub(crate) const fn values(&self, size: usize) -> Values {
        Values { kind: self.kind, oper: self.oper, style: self.style, size, seed: self.seed }
    }

    /// The length of each block, per rank.
    pub(crate) fn counts(&self, size: usize) -> Vec<usize> {
        if !is_uneven(self.op) {
            // Long cases are as long in all.
            let each = if has_blocks(self.op) && self.count >= 1 << 20 { self.count / size } else { self.count };
            return vec![each; size];
        }
        let total = if self.count >= 1 << 20 { self.count } else { self.count * size };
        match self.split {
            Split::Empty => vec![0; size],
            Split::One => {
                let holder = (mix(self.seed) % size as u64) as usize;
                (0..size).map(|r| if r == holder { total } else { 0 }).collect()
            }
            Split::Uneven => {
                let each = 2 * total / size;
                let length = |r: usize| match mix(self.seed ^ r as u64) {
                    h if h.is_multiple_of(3) => 0,
                    h => (h % (each as u64 + 1)) as usize,
                };
                (0..size).map(length).collect()
            }
        }
    }

    /// What each rank sends to each other in an all-to-all.
    pub(crate) fn matrix(&self, size: usize) -> Vec<Vec<usize>> {
        if self.op == Operation::AllToAll {
            return vec![self.counts(size); size];
        }
        let row = |i: usize| {
            let shifted = Self { seed: mix(self.seed ^ (i as u64) << 20), ..self.clone() };
            let count = if self.count >= 1 << 20 { self.count / size } else { self.count };
            Self { count, ..shifted }.counts(size)
        };
        (0..size).map(row).collect()
    }

    /// The question to the backend.
    pub(crate) fn query(&self) -> OpQuery {
        query(self.op, self.kind, self.oper.map(Oper::code)).form(self.form.query())
    }
}

/// The question whether an operation is there.
pub(crate) fn query(op: Operation, kind: Kind, redop: Option<ReduceOp>) -> OpQuery {
    let mut q = OpQuery::new(op);
    if op != Operation::Barrier {
        q = q.dtype(kind.dtype());
    }
    match redop {
        Some(r) => q.redop(r),
        None => q,
    }
}

impl fmt::Display for CallCase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.op)?;
        if self.op == Operation::Barrier {
            return write!(f, " {:?}", self.form);
        }
        write!(f, " {:?} {:?} {}", self.place, self.form, self.kind.name())?;
        if let Some(oper) = self.oper {
            write!(f, " {} {:?}", oper.name(), self.style)?;
        }
        write!(f, " count {}", self.count)?;
        if is_uneven(self.op) {
            write!(f, " {:?}", self.split)?;
        }
        if has_root(self.op) {
            write!(f, " root {}", self.root)?;
        }
        if let Some(a) = &self.algo {
            write!(f, " by {a}")?;
        }
        write!(f, " seed {:#x}", self.seed)
    }
}
