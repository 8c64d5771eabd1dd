//! The adapter from [`HostBackend`] to [`Backend`].
//!
//! Asynchronous operations run on threads of the adapter, in lanes: collectives one after the other in the order of
//! their calls, point-to-point messages one after the other per peer, direction and tag, batches each on their own.
//! Lanes do not wait for each other, so that receives may be posted before the sends that bring their messages about.

use std::borrow::Cow;
use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::task::{Poll, Waker};
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

use super::HostBackend;
use crate::backend::{Backend, BackendInfo, CallInfo, OpQuery, OpRequest, P2pOp, Pending, Support};
use crate::blocks::{RawBlocks, RawBlocksMut};
use crate::buf::{RawBuf, RawBufMut};
use crate::control::Control;
use crate::desc::{OpDesc, Operation};
use crate::device::{Device, DeviceKind};
use crate::dtype::DType;
use crate::error::{Error, ErrorKind, Result};
use crate::observe::CallNumber;
use crate::time::{Clock, Time};

/// Makes a [`Backend`] of a [`HostBackend`].
pub fn host_backend<B: HostBackend>(backend: B) -> Arc<dyn Backend> {
    Arc::new(Adapter { shared: Arc::new(Shared { backend, lanes: Mutex::default() }) })
}

/// Operations of one lane run in the order of their calls.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Lane {
    Collective,
    Send(usize, u32),
    Recv(usize, u32),
    /// A batch's messages are ordered by their own numbers.
    Batch(u64),
}

impl Lane {
    const fn of(op: &P2pOp) -> Self {
        match *op {
            P2pOp::Send { peer, tag, .. } => Self::Send(peer, tag),
            P2pOp::Recv { peer, tag, .. } => Self::Recv(peer, tag),
        }
    }

    const fn of_request(request: &OpRequest, op_id: u64) -> Self {
        match request {
            OpRequest::P2p(op) => Self::of(op),
            OpRequest::Batch(_) | OpRequest::SendRecv(_) => Self::Batch(op_id),
            _ => Self::Collective,
        }
    }
}

struct Shared<B> {
    backend: B,
    /// What waits behind the job that a lane's thread runs. A lane is here exactly as long as it has a thread.
    lanes: Mutex<HashMap<Lane, VecDeque<Job>>>,
}

struct Job {
    request: OpRequest,
    desc: OpDesc,
    numbers: (u64, u64),
    timeout: Duration,
    hints: Vec<(String, String)>,
    cell: Arc<Cell>,
}

#[derive(Default)]
struct Cell {
    state: Mutex<CellState>,
    done: Condvar,
}

#[derive(Default)]
struct CellState {
    cancelled: bool,
    running: bool,
    result: Option<Result<()>>,
    waker: Option<Waker>,
}

impl Cell {
    fn finish(&self, r: Result<()>) {
        let mut s = self.state.lock();
        s.running = false;
        s.result = Some(r);
        let w = s.waker.take();
        drop(s);
        self.done.notify_all();
        if let Some(w) = w {
            w.wake();
        }
    }
}

struct Adapter<B> {
    shared: Arc<Shared<B>>,
}

impl<B: HostBackend> fmt::Debug for Adapter<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("HostBackend").field(&self.shared.backend).finish()
    }
}

/// Reads a range.
///
/// # Safety
///
/// The range is valid and not written during `'a`.
unsafe fn bytes<'a>(b: &RawBuf) -> &'a [u8] {
    // SAFETY: forwarded; an empty range needs no valid pointer.
    if b.bytes() == 0 { &[] } else { unsafe { std::slice::from_raw_parts(b.ptr(), b.bytes()) } }
}

/// Writes a range.
///
/// # Safety
///
/// The range is valid and not used otherwise during `'a`.
unsafe fn bytes_mut<'a>(b: &RawBufMut) -> &'a mut [u8] {
    // SAFETY: forwarded; an empty range needs no valid pointer.
    if b.bytes() == 0 { &mut [] } else { unsafe { std::slice::from_raw_parts_mut(b.ptr(), b.bytes()) } }
}

fn same(input: &RawBuf, output: &RawBufMut) -> bool {
    input.ptr() == output.ptr().cast_const() && input.bytes() == output.bytes()
}

/// A buffer of no bytes, which overlaps nothing.
const NOTHING: RawBufMut = RawBufMut::new(std::ptr::null_mut(), 0, DType::U8, Device::CPU);

/// A shard, copied if it lies inside the blocks that are to be written.
///
/// # Safety
///
/// As [`bytes`].
unsafe fn apart<'a>(shard: &RawBuf, written: &RawBlocksMut) -> Cow<'a, [u8]> {
    // SAFETY: forwarded; a copy is made before anything is written.
    let shard_bytes = unsafe { bytes(shard) };
    if written.overlaps(shard) { Cow::Owned(shard_bytes.to_vec()) } else { Cow::Borrowed(shard_bytes) }
}

/// All blocks in one slice, copied if they are separate buffers or `written` lies inside them.
///
/// # Safety
///
/// As [`bytes`], for each block.
unsafe fn joined<'a>(blocks: &RawBlocks, written: &RawBufMut) -> Cow<'a, [u8]> {
    // SAFETY: forwarded; copies are made before anything is written.
    unsafe {
        match blocks.whole() {
            Some(all) if written.overlaps(&all) => Cow::Owned(bytes(&all).to_vec()),
            Some(all) => Cow::Borrowed(bytes(&all)),
            None => Cow::Owned(blocks.iter().flat_map(|b| bytes(&b)).copied().collect()),
        }
    }
}

/// Has `f` write all blocks as one slice; separate buffers are filled afterwards.
///
/// # Safety
///
/// As [`bytes_mut`], for each block.
unsafe fn fill(blocks: &RawBlocksMut, f: impl FnOnce(&mut [u8]) -> Result<()>) -> Result<()> {
    // SAFETY: forwarded; blocks are disjoint.
    unsafe {
        if let Some(all) = blocks.whole() {
            return f(bytes_mut(&all));
        }
        let mut all = vec![0; blocks.bytes()];
        f(&mut all)?;
        let mut rest = &all[..];
        for b in blocks.iter() {
            let (block, more) = rest.split_at(b.bytes());
            bytes_mut(&b).copy_from_slice(block);
            rest = more;
        }
    }
    Ok(())
}

fn lengths(blocks: &RawBlocks) -> Vec<usize> {
    blocks.iter().map(|b| b.bytes()).collect()
}

impl<B: HostBackend> Shared<B> {
    /// Runs one request; a custom operator that panicked fails the communicator.
    ///
    /// # Safety
    ///
    /// As [`Backend::run`].
    unsafe fn run(&self, request: &OpRequest, call: &CallInfo<'_>) -> Result<()> {
        // Slices are made of host memory only, whatever device the communicator was made for.
        let on_host = crate::comm::check::request(request, self.backend.info().size, Device::CPU);
        let lawful = on_host.is_ok();
        // SAFETY: forwarded.
        let result = on_host.and_then(|()| unsafe { self.dispatch(request, call) });
        if let Err(e) = &result
            && (!lawful || matches!(e.kind(), ErrorKind::Unsupported { .. }))
            && call.desc.operation.is_collective()
        {
            // Ranks that make another call must not wait for this one.
            self.backend.refuse(&CallNumber::Collective(call.seq), &call.desc, &e.kind().to_string());
        }
        if let (Ok(()), Some(reducer)) = (&result, request.reducer())
            && let Err(e) = reducer.check(self.backend.info().rank)
        {
            self.backend.abort(&e);
            return Err(e);
        }
        result
    }

    /// Calls the backend's method for a request.
    ///
    /// # Safety
    ///
    /// As [`Backend::run`].
    unsafe fn dispatch(&self, request: &OpRequest, call: &CallInfo<'_>) -> Result<()> {
        let b = &self.backend;
        // SAFETY: for the whole function, the caller lends the request's buffers until we return; the communicator
        // made sure that they are disjoint unless in place, and in-place pairs are never borrowed twice here.
        unsafe {
            match request {
                OpRequest::P2p(op) => self.p2p(op, call),
                OpRequest::Batch(ops) => self.batch(ops, call),
                OpRequest::Broadcast { buf, root } => b.broadcast(bytes_mut(buf), *root, call),
                OpRequest::AllReduce { input, output, reducer } => {
                    let out = bytes_mut(output);
                    if !same(input, output) {
                        out.copy_from_slice(bytes(input));
                    }
                    b.all_reduce(out, reducer, call)
                }
                OpRequest::Reduce { input, output, reducer, root } => match output {
                    Some(o) => {
                        let out = bytes_mut(o);
                        if !same(input, o) {
                            out.copy_from_slice(bytes(input));
                        }
                        b.reduce(out, reducer, *root, call)
                    }
                    None => b.reduce(&mut bytes(input).to_vec(), reducer, *root, call),
                },
                // In place the shard lies inside the output: a copy keeps the two borrows apart.
                OpRequest::AllGather { input, output } => {
                    let shard = apart(input, output);
                    fill(output, |all| b.all_gather(&shard, all, call))
                }
                OpRequest::AllGatherV { input, output } => {
                    let (shard, lengths) = (apart(input, output), lengths(&output.as_const()));
                    fill(output, |all| b.all_gather_v(&shard, all, &lengths, call))
                }
                OpRequest::Gather { input, output: None, root } => b.gather(bytes(input), None, *root, call),
                OpRequest::Gather { input, output: Some(o), root } => {
                    let shard = apart(input, o);
                    fill(o, |all| b.gather(&shard, Some(all), *root, call))
                }
                OpRequest::GatherV { input, output: None, root } => b.gather_v(bytes(input), None, *root, call),
                OpRequest::GatherV { input, output: Some(o), root } => {
                    let (shard, lengths) = (apart(input, o), lengths(&o.as_const()));
                    fill(o, |all| b.gather_v(&shard, Some((all, &lengths)), *root, call))
                }
                OpRequest::Scatter { input: None, output, root } => b.scatter(None, bytes_mut(output), *root, call),
                OpRequest::Scatter { input: Some(i), output, root } => {
                    let all = joined(i, output);
                    b.scatter(Some(&all), bytes_mut(output), *root, call)
                }
                OpRequest::ScatterV { input: None, output, root } => b.scatter_v(None, bytes_mut(output), *root, call),
                OpRequest::ScatterV { input: Some(i), output, root } => {
                    let (all, lengths) = (joined(i, output), lengths(i));
                    b.scatter_v(Some((&all, &lengths)), bytes_mut(output), *root, call)
                }
                OpRequest::ReduceScatter { input, output, reducer } => {
                    let all = joined(input, output);
                    b.reduce_scatter(&all, bytes_mut(output), reducer, call)
                }
                OpRequest::ReduceScatterV { input, output, reducer } => {
                    let all = joined(input, output);
                    b.reduce_scatter_v(&all, &lengths(input), bytes_mut(output), reducer, call)
                }
                OpRequest::AllToAll { input, output } => {
                    let all = match (input.whole(), output.whole()) {
                        // In place both are the same memory.
                        (Some(i), Some(o)) if same(&i, &o) => Cow::Owned(bytes(&i).to_vec()),
                        _ => joined(input, &NOTHING),
                    };
                    fill(output, |o| b.all_to_all(&all, o, call))
                }
                OpRequest::AllToAllV { input, output } => {
                    let all = joined(input, &NOTHING);
                    let (sends, receives) = (lengths(input), lengths(&output.as_const()));
                    fill(output, |o| b.all_to_all_v((&all, &sends), (o, &receives), call))
                }
                OpRequest::SendRecv(ops) => self.batch(ops, call),
                OpRequest::Scan { input, output, reducer } => {
                    let out = bytes_mut(output);
                    if !same(input, output) {
                        out.copy_from_slice(bytes(input));
                    }
                    b.scan(out, reducer, call)
                }
                OpRequest::Exscan { input, output, reducer } => {
                    if same(input, output) {
                        return b.exscan(bytes_mut(output), reducer, call);
                    }
                    // Rank 0's output must stay as it is.
                    let mut data = bytes(input).to_vec();
                    b.exscan(&mut data, reducer, call)?;
                    if b.info().rank > 0 {
                        bytes_mut(output).copy_from_slice(&data);
                    }
                    Ok(())
                }
                OpRequest::Barrier => b.barrier(call),
            }
        }
    }

    /// Runs one message.
    ///
    /// # Safety
    ///
    /// As [`Backend::run`].
    unsafe fn p2p(&self, op: &P2pOp, call: &CallInfo<'_>) -> Result<()> {
        // In a batch the call is about the batch; the other end of a message compares the message.
        let (operation, dtype, count) = match op {
            P2pOp::Send { buf, .. } => (Operation::Send, buf.dtype(), buf.count()),
            P2pOp::Recv { buf, .. } => (Operation::Recv, buf.dtype(), buf.count()),
        };
        let call = &CallInfo { desc: OpDesc::new(operation).elements(dtype, count), ..*call };
        // SAFETY: lent by the caller.
        unsafe {
            match op {
                P2pOp::Send { buf, peer, tag, seq } => self.backend.send(bytes(buf), *peer, *tag, *seq, call),
                P2pOp::Recv { buf, peer, tag, seq } => self.backend.recv(bytes_mut(buf), *peer, *tag, *seq, call),
            }
        }
    }

    /// Each lane of the batch has a thread, so that neither two ranks that send to each other nor a ring of
    /// them can block, even where a send waits for its receiver.
    ///
    /// # Safety
    ///
    /// As [`Backend::run`].
    unsafe fn batch(&self, ops: &[P2pOp], call: &CallInfo<'_>) -> Result<()> {
        let mut lanes: Vec<Lane> = Vec::new();
        for lane in ops.iter().map(Lane::of) {
            if !lanes.contains(&lane) {
                lanes.push(lane);
            }
        }
        let run = |lane: Lane| {
            // SAFETY: lent by the caller; entries of a batch are disjoint.
            ops.iter().filter(|m| Lane::of(m) == lane).try_for_each(|m| unsafe { self.p2p(m, call) })
        };
        let Some((own, others)) = lanes.split_first() else { return Ok(()) };
        std::thread::scope(|s| {
            let spawn = |lane: &Lane| {
                let lane = *lane;
                std::thread::Builder::new().spawn_scoped(s, move || run(lane))
            };
            let others: Vec<_> = others.iter().map(spawn).collect();
            let own = run(*own);
            others.into_iter().fold(own, |first, other| {
                let r = match other {
                    Ok(t) => t.join().unwrap_or_else(|_| Err(panicked())),
                    Err(e) => Err(Error::io("starting a thread for a batch", &e)),
                };
                first.and(r)
            })
        })
    }

    /// Runs a lane until nothing waits in it.
    fn work(&self, lane: Lane, first: Job) {
        let mut job = first;
        loop {
            self.work_one(&job);
            let mut lanes = self.lanes.lock();
            let Entry::Occupied(mut waiting) = lanes.entry(lane) else { return };
            match waiting.get_mut().pop_front() {
                Some(next) => job = next,
                None => {
                    waiting.remove();
                    return;
                }
            }
        }
    }

    fn work_one(&self, job: &Job) {
        {
            let mut s = job.cell.state.lock();
            if s.cancelled {
                return;
            }
            s.running = true;
        }
        let call = CallInfo::new(job.desc, job.numbers.0, job.numbers.1, job.timeout).hints(&job.hints);
        // SAFETY: `Backend::start`'s caller lends the buffers until completion or `cancel`; `cancel` waits
        // while `running` is set.
        let r = catch_unwind(AssertUnwindSafe(|| unsafe { self.run(&job.request, &call) }));
        job.cell.finish(r.unwrap_or_else(|_| Err(panicked())));
    }
}

fn panicked() -> Error {
    Error::new(ErrorKind::Backend { library: "user backend".into(), code: -1, text: "it panicked".into() })
}

struct HostPending {
    cell: Arc<Cell>,
    clock: Arc<dyn Clock>,
}

impl Pending for HostPending {
    fn poll(&mut self) -> Poll<Result<()>> {
        self.cell.state.lock().result.clone().map_or(Poll::Pending, Poll::Ready)
    }

    fn wait(&mut self, until: Option<Time>) -> Poll<Result<()>> {
        let mut s = self.cell.state.lock();
        while s.result.is_none() {
            match until {
                None => self.cell.done.wait(&mut s),
                Some(t) => {
                    let left = t.since(self.clock.now());
                    if left.is_zero() {
                        return Poll::Pending;
                    }
                    self.cell.done.wait_for(&mut s, left);
                }
            }
        }
        s.result.clone().map_or(Poll::Pending, Poll::Ready)
    }

    fn set_waker(&mut self, waker: &Waker) {
        let mut s = self.cell.state.lock();
        if s.result.is_some() {
            drop(s);
            waker.wake_by_ref();
        } else {
            s.waker = Some(waker.clone());
        }
    }

    fn cancel(&mut self) {
        let mut s = self.cell.state.lock();
        s.cancelled = true;
        // A running call cannot be taken away from safe code: wait for it.
        while s.running {
            self.cell.done.wait(&mut s);
        }
    }
}

// SAFETY: buffers are touched only inside `Shared::run`, which ends before a completion is reported, and not
// after `cancel`, which waits for a run in progress and makes the worker skip a job that has not begun.
unsafe impl<B: HostBackend> Backend for Adapter<B> {
    fn info(&self) -> &BackendInfo {
        self.shared.backend.info()
    }

    fn supports(&self, query: &OpQuery) -> Support {
        if query.memory.kind != DeviceKind::Cpu {
            return Support::Unsupported { reason: "this backend works on host memory".into() };
        }
        if matches!(query.operation, Operation::Batch | Operation::SendRecv) {
            let p2p = OpQuery { operation: Operation::Send, ..*query };
            return self.shared.backend.supports(&p2p);
        }
        self.shared.backend.supports(query)
    }

    fn clock(&self) -> &Arc<dyn Clock> {
        self.shared.backend.clock()
    }

    unsafe fn run(&self, request: &OpRequest, call: &CallInfo<'_>) -> Result<()> {
        // SAFETY: forwarded.
        unsafe { self.shared.run(request, call) }
    }

    unsafe fn start(&self, request: OpRequest, call: &CallInfo<'_>) -> Result<Box<dyn Pending>> {
        let cell = Arc::new(Cell::default());
        let job = Job {
            request,
            desc: call.desc,
            numbers: (call.seq, call.op_id),
            timeout: call.timeout,
            hints: call.hints.to_vec(),
            cell: Arc::clone(&cell),
        };
        let lane = Lane::of_request(&job.request, call.op_id);
        match self.shared.lanes.lock().entry(lane) {
            Entry::Occupied(mut waiting) => waiting.get_mut().push_back(job),
            Entry::Vacant(free) => {
                let shared = Arc::clone(&self.shared);
                std::thread::Builder::new()
                    .name(format!("{}-async", self.info().name))
                    .spawn(move || shared.work(lane, job))
                    .map_err(|e| Error::io("starting a thread for an asynchronous operation", &e))?;
                free.insert(VecDeque::new());
            }
        }
        Ok(Box::new(HostPending { cell, clock: Arc::clone(self.clock()) }))
    }

    fn refuse(&self, number: &CallNumber, desc: &OpDesc, reason: &str) {
        self.shared.backend.refuse(number, desc, reason);
    }

    fn control(&self) -> Option<Arc<dyn Control>> {
        self.shared.backend.control()
    }

    fn failure(&self) -> Option<Error> {
        self.shared.backend.failure()
    }

    fn abort(&self, cause: &Error) {
        self.shared.backend.abort(cause);
    }

    fn finalize(&self, timeout: Duration) -> Result<()> {
        self.shared.backend.finalize(timeout)
    }

    fn close(&self) {
        self.shared.backend.close();
    }
}
