//! The contract between [`Communicator`](crate::Communicator) and those who move the bytes.

use std::fmt;
use std::sync::Arc;
use std::task::{Poll, Waker};
use std::time::Duration;

use crate::blocks::{RawBlocks, RawBlocksMut};
use crate::buf::{RawBuf, RawBufMut};
use crate::control::Control;
use crate::desc::{OpDesc, Operation};
use crate::device::{Device, StreamRef};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::ext::Extensions;
use crate::observe::CallNumber;
use crate::op::ReduceOp;
use crate::options::{CommOptions, HintSpec};
use crate::reduce::Reducer;
use crate::time::{Clock, Time};

/// What a backend is.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct BackendInfo {
    /// Registry name, e.g. `tcp`.
    pub name: &'static str,
    /// Version of the backend, or of the library under it.
    pub version: String,
    /// How bytes move, e.g. `sockets`.
    pub transport: String,
    /// This rank in the communicator.
    pub rank: usize,
    /// Ranks in the communicator.
    pub size: usize,
    /// This rank among those on the same host.
    pub local_rank: usize,
    /// Ranks on the same host.
    pub local_size: usize,
    /// Host name of each rank, for people.
    pub hosts: Vec<String>,
    /// Which host each rank is on: ranks with equal numbers share one. Names do not tell: two hosts may have the same.
    pub host_of: Vec<usize>,
    /// Hints it understands.
    pub hints: &'static [HintSpec],
    /// Membership generation; 0 until reconfigured.
    pub generation: u32,
}

impl BackendInfo {
    /// All ranks on one unnamed host, generation 0, no hints.
    #[must_use]
    pub fn new(name: &'static str, rank: usize, size: usize) -> Self {
        Self {
            name,
            version: env!("CARGO_PKG_VERSION").to_owned(),
            transport: name.to_owned(),
            rank,
            size,
            local_rank: rank,
            local_size: size,
            hosts: vec![String::new(); size],
            host_of: vec![0; size],
            hints: &[],
            generation: 0,
        }
    }
}

/// How a call is made.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Form {
    /// Returns when done (CPU) or enqueued (GPU).
    Sync,
    /// Returns a work handle.
    Async,
    /// Borrowed and overlapping, inside a scope.
    Scoped,
}

/// A question to [`Backend::supports`].
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct OpQuery {
    /// The operation.
    pub operation: Operation,
    /// The element type; `None` for operations without elements.
    pub dtype: Option<DType>,
    /// The reduce operator, for reductions.
    pub redop: Option<ReduceOp>,
    /// The form.
    pub form: Form,
    /// Where the memory is.
    pub memory: Device,
}

impl OpQuery {
    /// Asks about the synchronous form on host memory.
    #[must_use]
    pub const fn new(operation: Operation) -> Self {
        Self { operation, dtype: None, redop: None, form: Form::Sync, memory: Device::CPU }
    }

    /// With this element type.
    #[must_use]
    pub const fn dtype(mut self, dtype: DType) -> Self {
        self.dtype = Some(dtype);
        self
    }

    /// With this operator.
    #[must_use]
    pub const fn redop(mut self, op: ReduceOp) -> Self {
        self.redop = Some(op);
        self
    }

    /// In this form.
    #[must_use]
    pub const fn form(mut self, form: Form) -> Self {
        self.form = form;
        self
    }

    /// On this memory.
    #[must_use]
    pub const fn memory(mut self, memory: Device) -> Self {
        self.memory = memory;
        self
    }
}

/// The answer of [`Backend::supports`]. The same on all ranks of a communicator.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Support {
    /// Done directly.
    Native,
    /// Done out of other operations.
    Composed {
        /// What that costs, in words.
        cost: String,
    },
    /// Not done; the call fails before anything is sent.
    Unsupported {
        /// Why, and what can be done instead.
        reason: String,
    },
}

impl Support {
    /// True unless unsupported.
    #[must_use]
    pub const fn is_supported(&self) -> bool {
        !matches!(self, Self::Unsupported { .. })
    }
}

/// A point-to-point message of a request.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum P2pOp {
    /// To a peer.
    Send {
        /// The data.
        buf: RawBuf,
        /// Destination rank.
        peer: usize,
        /// Tag.
        tag: u32,
        /// Number among sends to this peer with this tag.
        seq: u64,
    },
    /// From a peer.
    Recv {
        /// Where the data goes.
        buf: RawBufMut,
        /// Source rank.
        peer: usize,
        /// Tag.
        tag: u32,
        /// Number among receives from this peer with this tag.
        seq: u64,
    },
}

/// An operation on erased, validated buffers.
///
/// Where input and output are the same memory (at the place the operation's documentation names),
/// the operation is in place; otherwise they do not overlap.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum OpRequest {
    /// One point-to-point message.
    P2p(P2pOp),
    /// Several point-to-point messages that progress together.
    Batch(Vec<P2pOp>),
    /// Root's buffer to all.
    Broadcast {
        /// Read at the root, written elsewhere.
        buf: RawBufMut,
        /// The root.
        root: usize,
    },
    /// Reduction for all. In place: `input` is `output`.
    AllReduce {
        /// This rank's contribution.
        input: RawBuf,
        /// The result.
        output: RawBufMut,
        /// The operator.
        reducer: Reducer,
    },
    /// Reduction for the root. In place at the root: `input` is `output`.
    Reduce {
        /// This rank's contribution.
        input: RawBuf,
        /// The result; `None` except at the root.
        output: Option<RawBufMut>,
        /// The operator.
        reducer: Reducer,
        /// The root.
        root: usize,
    },
    /// Equal shards to all. In place: `input` is the own block of `output`.
    AllGather {
        /// This rank's shard.
        input: RawBuf,
        /// All shards in rank order.
        output: RawBlocksMut,
    },
    /// [`AllGather`](Self::AllGather) with blocks of uneven length, which all ranks know.
    AllGatherV {
        /// This rank's shard.
        input: RawBuf,
        /// All shards in rank order.
        output: RawBlocksMut,
    },
    /// Equal shards to the root. In place at the root: `input` is the own block of `output`.
    Gather {
        /// This rank's shard.
        input: RawBuf,
        /// All shards in rank order; `None` except at the root.
        output: Option<RawBlocksMut>,
        /// The root.
        root: usize,
    },
    /// [`Gather`](Self::Gather) with blocks of uneven length, of which other ranks know their own only.
    GatherV {
        /// This rank's shard.
        input: RawBuf,
        /// All shards in rank order; `None` except at the root.
        output: Option<RawBlocksMut>,
        /// The root.
        root: usize,
    },
    /// Equal shards from the root. In place at the root: `output` is the own block of `input`.
    Scatter {
        /// One block per rank; `None` except at the root.
        input: Option<RawBlocks>,
        /// This rank's shard.
        output: RawBufMut,
        /// The root.
        root: usize,
    },
    /// [`Scatter`](Self::Scatter) with blocks of uneven length, of which other ranks know their own only.
    ScatterV {
        /// One block per rank; `None` except at the root.
        input: Option<RawBlocks>,
        /// This rank's shard.
        output: RawBufMut,
        /// The root.
        root: usize,
    },
    /// Reduction, one shard per rank. In place: `output` is the own block of `input`, and the whole of `input` may
    /// be written.
    ReduceScatter {
        /// This rank's contribution: one block per rank.
        input: RawBlocks,
        /// The own block of the result.
        output: RawBufMut,
        /// The operator.
        reducer: Reducer,
    },
    /// [`ReduceScatter`](Self::ReduceScatter) with blocks of uneven length, which all ranks know.
    ReduceScatterV {
        /// This rank's contribution: one block per rank.
        input: RawBlocks,
        /// The own block of the result.
        output: RawBufMut,
        /// The operator.
        reducer: Reducer,
    },
    /// Block `j` of rank `i` becomes block `i` of rank `j`; all are equal. In place: both are the same memory.
    AllToAll {
        /// What goes to each rank.
        input: RawBlocks,
        /// What comes from each rank.
        output: RawBlocksMut,
    },
    /// [`AllToAll`](Self::AllToAll) with uneven blocks; the length of each is known to its two ranks. Never in place.
    AllToAllV {
        /// What goes to each rank.
        input: RawBlocks,
        /// What comes from each rank.
        output: RawBlocksMut,
    },
    /// A send and a receive that progress together.
    SendRecv([P2pOp; 2]),
    /// Reduction over the ranks up to and including this one. In place: `input` is `output`.
    Scan {
        /// This rank's contribution.
        input: RawBuf,
        /// The result.
        output: RawBufMut,
        /// The operator.
        reducer: Reducer,
    },
    /// Reduction over the ranks before this one; on rank 0 `output` is not touched. In place: `input` is `output`.
    Exscan {
        /// This rank's contribution.
        input: RawBuf,
        /// The result.
        output: RawBufMut,
        /// The operator.
        reducer: Reducer,
    },
    /// All wait for all.
    Barrier,
}

impl OpRequest {
    /// The operator of a reduction.
    #[must_use]
    pub const fn reducer(&self) -> Option<&Reducer> {
        match self {
            Self::AllReduce { reducer, .. }
            | Self::Reduce { reducer, .. }
            | Self::ReduceScatter { reducer, .. }
            | Self::ReduceScatterV { reducer, .. }
            | Self::Scan { reducer, .. }
            | Self::Exscan { reducer, .. } => Some(reducer),
            _ => None,
        }
    }

    /// The messages of a point-to-point request; empty for collectives.
    #[must_use]
    pub fn messages(&self) -> &[P2pOp] {
        match self {
            Self::P2p(op) => std::slice::from_ref(op),
            Self::Batch(ops) => ops,
            Self::SendRecv(ops) => ops,
            _ => &[],
        }
    }

    /// The operation that this request asks for.
    #[must_use]
    pub const fn operation(&self) -> Operation {
        match self {
            Self::P2p(P2pOp::Send { .. }) => Operation::Send,
            Self::P2p(P2pOp::Recv { .. }) => Operation::Recv,
            Self::Batch(_) => Operation::Batch,
            Self::Broadcast { .. } => Operation::Broadcast,
            Self::AllReduce { .. } => Operation::AllReduce,
            Self::Reduce { .. } => Operation::Reduce,
            Self::AllGather { .. } => Operation::AllGather,
            Self::ReduceScatter { .. } => Operation::ReduceScatter,
            Self::SendRecv(_) => Operation::SendRecv,
            Self::AllGatherV { .. } => Operation::AllGatherV,
            Self::Gather { .. } => Operation::Gather,
            Self::GatherV { .. } => Operation::GatherV,
            Self::Scatter { .. } => Operation::Scatter,
            Self::ScatterV { .. } => Operation::ScatterV,
            Self::ReduceScatterV { .. } => Operation::ReduceScatterV,
            Self::AllToAll { .. } => Operation::AllToAll,
            Self::AllToAllV { .. } => Operation::AllToAllV,
            Self::Scan { .. } => Operation::Scan,
            Self::Exscan { .. } => Operation::Exscan,
            Self::Barrier => Operation::Barrier,
        }
    }
}

/// What a backend needs to know about a call besides the request.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct CallInfo<'a> {
    /// The descriptor, which travels in headers.
    pub desc: OpDesc,
    /// `collective_seq` of a collective; 0 for point-to-point, whose numbers are in the request.
    pub seq: u64,
    /// Number for observers.
    pub op_id: u64,
    /// Longest time, counted from now.
    pub timeout: Duration,
    /// Stream for GPU operations.
    pub stream: Option<StreamRef<'a>>,
    /// Forced algorithm, if the caller gave the hint `algo`.
    pub algorithm: Option<&'a str>,
    /// All hints of the call, already checked for known names.
    pub hints: &'a [(String, String)],
}

impl<'a> CallInfo<'a> {
    /// A call without stream and hints.
    #[must_use]
    pub const fn new(desc: OpDesc, seq: u64, op_id: u64, timeout: Duration) -> Self {
        Self { desc, seq, op_id, timeout, stream: None, algorithm: None, hints: &[] }
    }

    /// With this stream.
    #[must_use]
    pub const fn stream(mut self, stream: Option<StreamRef<'a>>) -> Self {
        self.stream = stream;
        self
    }

    /// With these hints.
    #[must_use]
    pub fn hints(mut self, hints: &'a [(String, String)]) -> Self {
        self.algorithm = hints.iter().rev().find(|(k, _)| k == "algo").map(|(_, v)| v.as_str());
        self.hints = hints;
        self
    }
}

/// An operation in flight.
pub trait Pending: Send {
    /// Makes progress if the backend needs it and tells whether the operation is done.
    fn poll(&mut self) -> Poll<Result<()>>;

    /// Waits until the operation is done or `until` is reached; drives progress meanwhile.
    fn wait(&mut self, until: Option<Time>) -> Poll<Result<()>>;

    /// Registers who is woken when the operation is done. Replaces an earlier waker. If it is done
    /// already, wakes at once. No lock of the backend is held while it wakes, and a waker is not kept
    /// after completion: waking polls, and the waker keeps the communicator alive.
    fn set_waker(&mut self, waker: &Waker);

    /// Ends the operation. After it returns no thread, DMA engine or peer touches its buffers; where
    /// that cannot be promised it blocks until it can.
    fn cancel(&mut self);
}

/// Which ranks a child communicator has; argument of [`Backend::split`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct SplitRequest {
    /// Ranks of the parent, in the child's order; empty: this rank takes part but joins no child.
    pub ranks: Vec<usize>,
    /// The first of the two numbers that this split has among the parent's collectives, `seq` and `seq + 1`: for the
    /// ranks to compare what they pass, and to wait until all have their child.
    pub seq: u64,
    /// Options of the child.
    pub options: CommOptions,
    /// Longest time.
    pub timeout: Duration,
}

impl SplitRequest {
    /// A request.
    #[must_use]
    pub const fn new(ranks: Vec<usize>, seq: u64, options: CommOptions, timeout: Duration) -> Self {
        Self { ranks, seq, options, timeout }
    }
}

/// New membership; argument of [`Backend::reconfigure`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ReconfigureRequest {
    /// Names this attempt, equal on all members.
    pub uuid: u64,
    /// Init handles of all members, in rank order.
    pub handles: Vec<String>,
    /// Longest time.
    pub timeout: Duration,
    /// Options of the new communicator: those of the old one, with the hints of this call.
    pub options: CommOptions,
}

impl ReconfigureRequest {
    /// A request.
    #[must_use]
    pub const fn new(uuid: u64, handles: Vec<String>, timeout: Duration, options: CommOptions) -> Self {
        Self { uuid, handles, timeout, options }
    }
}

/// Moves bytes for one communicator.
///
/// Arguments are validated by [`Communicator`](crate::Communicator): ranks in range, lengths and
/// types consistent, operator legal, buffers disjoint unless in place. An unknown or unsupported
/// request is answered with `Unsupported` before anything is sent.
///
/// # Safety
///
/// Implementers promise: the buffers of a request are touched only between `run`'s (or `start`'s)
/// call and its completion, never after an error was reported or `cancel` returned, and written
/// only where the operation says so; and dropping a [`Pending`] without completion keeps this promise
/// as long as the caller keeps the buffers alive until the backend's `close` or `finalize`.
/// `start` and the methods of [`Pending`] do not unwind while an operation is in flight: the process is
/// aborted if one does, because borrowed buffers could not be protected.
pub unsafe trait Backend: Send + Sync + fmt::Debug {
    /// What this is.
    fn info(&self) -> &BackendInfo;

    /// Whether and how an operation is done.
    fn supports(&self, query: &OpQuery) -> Support;

    /// The clock that deadlines are measured on.
    fn clock(&self) -> &Arc<dyn Clock>;

    /// Runs an operation to its end. Does not allocate for small messages.
    ///
    /// # Safety
    ///
    /// The request's buffers are valid, and not used otherwise, until this returns.
    unsafe fn run(&self, request: &OpRequest, call: &CallInfo<'_>) -> Result<()>;

    /// Starts an operation.
    ///
    /// # Safety
    ///
    /// The request's buffers are valid, and not used otherwise, until the returned object reports
    /// completion or its `cancel` has returned.
    unsafe fn start(&self, request: OpRequest, call: &CallInfo<'_>) -> Result<Box<dyn Pending>>;

    /// Tells the other members (the peer, for a point-to-point call) that this rank does not take part
    /// in the call with this number, so that they fail with `PeerRefused` instead of waiting.
    fn refuse(&self, number: &CallNumber, desc: &OpDesc, reason: &str);

    /// The control plane, if there is one.
    fn control(&self) -> Option<Arc<dyn Control>>;

    /// The error that the communicator failed with.
    fn failure(&self) -> Option<Error>;

    /// Ends everything in flight on all ranks with this cause. Any thread, never blocks.
    fn abort(&self, cause: &Error);

    /// Collective end: returns when all members have called it and nothing is in flight. One without members ends at once;
    /// from here on [`reconfigure`](Self::reconfigure) is not called any more, and others need not wait for it there.
    fn finalize(&self, timeout: Duration) -> Result<()>;

    /// Local end: releases what can be released without waiting for anybody.
    fn close(&self);

    /// Creates child communicators.
    fn split(&self, request: &SplitRequest) -> Result<Option<Arc<dyn Backend>>> {
        let _ = request;
        Err(Error::unsupported("split", format!("backend {} cannot create children", self.info().name)))
    }

    /// Changes the membership.
    fn reconfigure(&self, request: &ReconfigureRequest) -> Result<Arc<dyn Backend>> {
        let _ = request;
        Err(Error::unsupported("reconfigure", format!("backend {} has a fixed membership", self.info().name)))
    }

    /// The opaque handle by which others can name this member in `reconfigure`.
    fn init_handle(&self) -> Result<String> {
        Err(Error::unsupported("init_handle", format!("backend {} has a fixed membership", self.info().name)))
    }

    /// The members of a failed communicator that are still there, as all of them see it.
    fn agree_survivors(&self, timeout: Duration) -> Result<Vec<usize>> {
        let _ = timeout;
        let reason = format!("backend {} cannot agree on survivors", self.info().name);
        Err(Error::unsupported("agree_survivors", reason))
    }

    /// A communicator of these members of a failed one.
    fn shrink(&self, survivors: &[usize], timeout: Duration) -> Result<Arc<dyn Backend>> {
        let _ = (survivors, timeout);
        Err(Error::unsupported("shrink", format!("backend {} cannot shrink", self.info().name)))
    }

    /// The operations started until [`group_end`](Self::group_end) may be launched together.
    fn group_begin(&self) {}

    /// Launches what was started since [`group_begin`](Self::group_begin).
    fn group_end(&self) {}

    /// Optional abilities.
    fn ext(&self) -> Extensions<'_> {
        Extensions::default()
    }

    /// What the backend would do for this operation and size, for perf and doctor; e.g. an algorithm's name.
    fn explain(&self, desc: &OpDesc) -> String {
        let _ = desc;
        String::new()
    }
}
