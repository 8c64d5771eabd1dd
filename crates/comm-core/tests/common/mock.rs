//! A [`Backend`] whose operations end when the test says so.

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::task::{Poll, Waker};
use std::time::Duration;

use comm_core::{
    Backend, BackendInfo, CallInfo, CallNumber, Clock, CommOptions, Communicator, Control, Device, Error, OpDesc,
    OpQuery, OpRequest, Operation, P2pOp, Pending, RawBufMut, RealClock, ReconfigureRequest, Result, SplitRequest,
    Support, Time,
};
use parking_lot::{Condvar, Mutex};

/// When operations end by themselves, to hit the narrow places.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Trick {
    /// Only when the test says so.
    #[default]
    None,
    /// Before `start` returns.
    InStart,
    /// On another thread, after `set_waker` was called but before it stores the waker.
    InSetWaker,
    /// Never: `wait` panics, which no backend may do.
    PanicInWait,
    /// On another thread, after the n-th `poll` has found nothing but before it returns `Pending`.
    InPoll(usize),
}

#[derive(Default)]
struct OpState {
    result: Option<Result<()>>,
    waker: Option<Waker>,
}

/// One operation in flight.
pub(crate) struct Op {
    pub(crate) request: OpRequest,
    state: Mutex<OpState>,
    done: Condvar,
    polls: AtomicUsize,
    /// Waits in progress.
    pub(crate) waiting: AtomicUsize,
    /// Calls of `cancel`.
    pub(crate) cancels: AtomicUsize,
    /// The `Pending` was dropped.
    pub(crate) dropped: AtomicBool,
}

impl fmt::Debug for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.request.fmt(f)
    }
}

impl Op {
    /// Ends the operation and wakes whoever wants to know, as an engine thread would.
    pub(crate) fn complete(&self, result: Result<()>) {
        let waker = {
            let mut s = self.state.lock();
            s.result.get_or_insert(result);
            s.waker.take()
        };
        self.done.notify_all();
        if let Some(w) = waker {
            w.wake();
        }
    }

    /// Ends the operation without a wake-up: only who asks will know.
    pub(crate) fn complete_silently(&self, result: Result<()>) {
        self.state.lock().result.get_or_insert(result);
    }

    pub(crate) fn output(&self) -> RawBufMut {
        match &self.request {
            OpRequest::AllReduce { output, .. } => *output,
            OpRequest::AllGather { output, .. } => output.whole().unwrap(),
            OpRequest::Broadcast { buf, .. } | OpRequest::P2p(P2pOp::Recv { buf, .. }) => *buf,
            other => panic!("{other:?} has no output that tests write"),
        }
    }

    /// Writes every byte of the outputs, as a backend in mid-flight would. Miri and the drop counters
    /// tell if the memory is not ours any more.
    pub(crate) fn write(&self, byte: u8) {
        for out in outputs(&self.request) {
            // SAFETY: the operation has not been completed, so its output belongs to the backend.
            unsafe { std::ptr::write_bytes(out.ptr(), byte, out.bytes()) };
        }
    }

    /// Reads the output's first byte.
    pub(crate) fn first(&self) -> u8 {
        // SAFETY: as in `write`.
        unsafe { self.output().ptr().read() }
    }
}

struct MockPending {
    op: Arc<Op>,
    trick: Trick,
}

impl MockPending {
    fn elsewhere(&self) {
        let op = Arc::clone(&self.op);
        std::thread::spawn(move || op.complete(Ok(()))).join().unwrap();
    }
}

impl Pending for MockPending {
    fn poll(&mut self) -> Poll<Result<()>> {
        let n = self.op.polls.fetch_add(1, Ordering::SeqCst) + 1;
        let found = self.op.state.lock().result.clone();
        if found.is_none() && self.trick == Trick::InPoll(n) {
            self.elsewhere();
        }
        found.map_or(Poll::Pending, Poll::Ready)
    }

    fn wait(&mut self, until: Option<Time>) -> Poll<Result<()>> {
        self.op.waiting.fetch_add(1, Ordering::SeqCst);
        assert!(self.trick != Trick::PanicInWait, "a backend that panics");
        let mut s = self.op.state.lock();
        while s.result.is_none() {
            match until {
                None => self.op.done.wait(&mut s),
                Some(t) => {
                    let left = t.since(RealClock.now());
                    if left.is_zero() {
                        break;
                    }
                    self.op.done.wait_for(&mut s, left);
                }
            }
        }
        self.op.waiting.fetch_sub(1, Ordering::SeqCst);
        s.result.clone().map_or(Poll::Pending, Poll::Ready)
    }

    fn set_waker(&mut self, waker: &Waker) {
        if self.trick == Trick::InSetWaker {
            self.elsewhere();
        }
        let mut s = self.op.state.lock();
        if s.result.is_some() {
            drop(s);
            waker.wake_by_ref();
        } else {
            s.waker = Some(waker.clone());
        }
    }

    fn cancel(&mut self) {
        self.op.cancels.fetch_add(1, Ordering::SeqCst);
        self.op.state.lock().result.get_or_insert_with(|| Err(Error::invalid("cancelled")));
    }
}

impl Drop for MockPending {
    fn drop(&mut self) {
        self.op.dropped.store(true, Ordering::SeqCst);
    }
}

/// The backend. Synchronous calls end at once with [`Mock::sync_result`].
pub(crate) struct Mock {
    info: BackendInfo,
    clock: Arc<dyn Clock>,
    /// Applies to operations started from now on.
    pub(crate) trick: Mutex<Trick>,
    /// What `run` returns.
    pub(crate) sync_result: Mutex<Result<()>>,
    /// Written into the outputs by `run`, before it returns.
    pub(crate) sync_fill: Mutex<Option<u8>>,
    /// Called once, inside `run`.
    pub(crate) on_run: Mutex<Option<Box<dyn FnOnce() + Send>>>,
    /// What `start` fails with.
    pub(crate) start_error: Mutex<Option<Error>>,
    ops: Mutex<Vec<Arc<Op>>>,
    /// Calls of `refuse`.
    pub(crate) refusals: Mutex<Vec<(CallNumber, Operation, String)>>,
    /// Calls of `abort`.
    pub(crate) aborts: Mutex<Vec<Error>>,
    /// Calls of `close` and `finalize`.
    pub(crate) closes: AtomicUsize,
    pub(crate) finalizes: AtomicUsize,
    /// What `split`, `reconfigure` and `shrink` make, one after the other; `None`: no child.
    pub(crate) made: Mutex<VecDeque<Result<Option<Arc<Mock>>>>>,
    /// Called inside of each of these.
    pub(crate) on_make: Mutex<Option<Box<dyn Fn() + Send + Sync>>>,
    pub(crate) splits: Mutex<Vec<SplitRequest>>,
    pub(crate) reconfigures: Mutex<Vec<ReconfigureRequest>>,
    /// What `agree_survivors` finds.
    pub(crate) survivors: Mutex<Vec<usize>>,
}

impl fmt::Debug for Mock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Mock")
    }
}

impl Mock {
    /// Rank 0 of 2; nobody is rank 1.
    pub(crate) fn new() -> Arc<Self> {
        Self::with_clock(Arc::new(RealClock))
    }

    pub(crate) fn with_clock(clock: Arc<dyn Clock>) -> Arc<Self> {
        Self::of_size(2, clock)
    }

    pub(crate) fn of_size(size: usize, clock: Arc<dyn Clock>) -> Arc<Self> {
        Self::rank_of(0, size, clock)
    }

    pub(crate) fn rank_of(rank: usize, size: usize, clock: Arc<dyn Clock>) -> Arc<Self> {
        Self::of_generation(0, rank, size, clock)
    }

    pub(crate) fn of_generation(generation: u32, rank: usize, size: usize, clock: Arc<dyn Clock>) -> Arc<Self> {
        let mut info = BackendInfo::new("mock", rank, size);
        info.generation = generation;
        Arc::new(Self {
            info,
            clock,
            trick: Mutex::default(),
            sync_result: Mutex::new(Ok(())),
            sync_fill: Mutex::default(),
            on_run: Mutex::default(),
            start_error: Mutex::default(),
            ops: Mutex::default(),
            refusals: Mutex::default(),
            aborts: Mutex::default(),
            closes: AtomicUsize::new(0),
            finalizes: AtomicUsize::new(0),
            made: Mutex::default(),
            on_make: Mutex::default(),
            splits: Mutex::default(),
            reconfigures: Mutex::default(),
            survivors: Mutex::default(),
        })
    }

    /// The next thing that the test wants made.
    fn make(&self, what: &str) -> Result<Option<Arc<dyn Backend>>> {
        if let Some(f) = &*self.on_make.lock() {
            f();
        }
        let next = self.made.lock().pop_front();
        let made = next.unwrap_or_else(|| Err(Error::unsupported(what, "the test wants none")))?;
        Ok(made.map(|m| m as Arc<dyn Backend>))
    }

    pub(crate) fn comm(self: &Arc<Self>) -> Communicator {
        let options = CommOptions::new().name("mocked");
        Communicator::from_backend(Arc::clone(self) as _, Device::CPU, options).unwrap()
    }

    /// The i-th operation that was started.
    pub(crate) fn op(&self, i: usize) -> Arc<Op> {
        Arc::clone(&self.ops.lock()[i])
    }

    pub(crate) fn started(&self) -> usize {
        self.ops.lock().len()
    }
}

fn outputs(request: &OpRequest) -> Vec<RawBufMut> {
    use OpRequest as R;
    match request {
        R::AllReduce { output, .. }
        | R::Scan { output, .. }
        | R::Exscan { output, .. }
        | R::Scatter { output, .. }
        | R::ScatterV { output, .. } => vec![*output],
        R::AllGather { output, .. }
        | R::AllGatherV { output, .. }
        | R::AllToAll { output, .. }
        | R::AllToAllV { output, .. } => output.iter().collect(),
        R::Gather { output, .. } | R::GatherV { output, .. } => output.iter().flat_map(|o| o.iter()).collect(),
        R::ReduceScatter { input, output, .. } | R::ReduceScatterV { input, output, .. } => match input.whole() {
            // The rest of an in-place buffer is scratch.
            Some(i) if output.overlaps(&i) => {
                vec![RawBufMut::new(i.ptr().cast_mut(), i.bytes(), i.dtype(), i.device())]
            }
            _ => vec![*output],
        },
        R::Reduce { output, .. } => output.iter().copied().collect(),
        R::Broadcast { buf, .. } => vec![*buf],
        R::P2p(_) | R::Batch(_) | R::SendRecv(_) => {
            let recv = |m: &P2pOp| if let P2pOp::Recv { buf, .. } = m { Some(*buf) } else { None };
            request.messages().iter().filter_map(recv).collect()
        }
        _ => Vec::new(),
    }
}

// SAFETY: buffers are touched only in `run`, and by tests through `Op::write` before they complete the operation.
unsafe impl Backend for Mock {
    fn info(&self) -> &BackendInfo {
        &self.info
    }

    fn supports(&self, _query: &OpQuery) -> Support {
        Support::Native
    }

    fn clock(&self) -> &Arc<dyn Clock> {
        &self.clock
    }

    unsafe fn run(&self, request: &OpRequest, _call: &CallInfo<'_>) -> Result<()> {
        let hook = self.on_run.lock().take();
        if let Some(f) = hook {
            f();
        }
        if let Some(byte) = *self.sync_fill.lock() {
            for out in outputs(request) {
                // SAFETY: lent by the caller until we return.
                unsafe { std::ptr::write_bytes(out.ptr(), byte, out.bytes()) };
            }
        }
        self.sync_result.lock().clone()
    }

    unsafe fn start(&self, request: OpRequest, _call: &CallInfo<'_>) -> Result<Box<dyn Pending>> {
        if let Some(e) = self.start_error.lock().clone() {
            return Err(e);
        }
        let op = Arc::new(Op {
            request,
            state: Mutex::default(),
            done: Condvar::new(),
            polls: AtomicUsize::new(0),
            waiting: AtomicUsize::new(0),
            cancels: AtomicUsize::new(0),
            dropped: AtomicBool::new(false),
        });
        self.ops.lock().push(Arc::clone(&op));
        let trick = *self.trick.lock();
        if trick == Trick::InStart {
            op.complete(Ok(()));
        }
        Ok(Box::new(MockPending { op, trick }))
    }

    fn refuse(&self, number: &CallNumber, desc: &OpDesc, reason: &str) {
        self.refusals.lock().push((*number, desc.operation, reason.to_owned()));
    }

    fn control(&self) -> Option<Arc<dyn Control>> {
        None
    }

    fn failure(&self) -> Option<Error> {
        self.aborts.lock().first().cloned()
    }

    fn abort(&self, cause: &Error) {
        self.aborts.lock().push(cause.clone());
    }

    fn finalize(&self, _timeout: Duration) -> Result<()> {
        self.finalizes.fetch_add(1, Ordering::SeqCst);
        Ok(())
    }

    fn close(&self) {
        self.closes.fetch_add(1, Ordering::SeqCst);
    }

    fn split(&self, request: &SplitRequest) -> Result<Option<Arc<dyn Backend>>> {
        self.splits.lock().push(request.clone());
        self.make("split")
    }

    fn reconfigure(&self, request: &ReconfigureRequest) -> Result<Arc<dyn Backend>> {
        self.reconfigures.lock().push(request.clone());
        Ok(self.make("reconfigure")?.unwrap())
    }

    fn agree_survivors(&self, _timeout: Duration) -> Result<Vec<usize>> {
        Ok(self.survivors.lock().clone())
    }

    fn shrink(&self, survivors: &[usize], _timeout: Duration) -> Result<Arc<dyn Backend>> {
        assert_eq!(*self.survivors.lock(), survivors);
        Ok(self.make("shrink")?.unwrap())
    }
}
