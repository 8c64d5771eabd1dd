//! The operations, in their synchronous and asynchronous forms.
//!
//! Each operation is written once, as a method of [`With`]; the macro repeats it on [`Communicator`]
//! with default options. A synchronous call is `With::run`, an asynchronous one `With::launch`; both
//! number the call first, so that whatever goes wrong later, the other ranks can be told.

use std::sync::Arc;

use crate::backend::{CallInfo, Form, OpRequest, P2pOp};
use crate::buf::{DynBuf, DynBufMut, IntoBuf, IntoBufMut, RawBuf, RawBufMut, StreamOrdered};
use crate::comm::batch::{AsyncBatch, Batch};
use crate::comm::ticket::Numbers;
use crate::comm::{Communicator, check};
use crate::desc::{OpDesc, Operation};
use crate::error::{Error, Result};
use crate::observe::CallNumber;
use crate::op::{Operator, ReduceOp};
use crate::options::{CORE_HINTS, CallOptions, check_hints};
use crate::reduce::Reducer;
use crate::work::{Core, Hold, Work, bool_outputs};

/// A communicator together with options for single calls; see [`Communicator::with`].
#[derive(Clone, Debug)]
pub struct With<'c> {
    pub(super) comm: &'c Communicator,
    pub(super) options: CallOptions<'c>,
}

/// A call's descriptor and its request, or the reason why there is none.
pub(super) struct Prepared {
    pub(super) desc: OpDesc,
    pub(super) request: Result<OpRequest>,
}

impl<'c> With<'c> {
    pub(super) const fn new(comm: &'c Communicator, options: CallOptions<'c>) -> Self {
        Self { comm, options }
    }

    pub(super) fn size(&self) -> usize {
        self.comm.size()
    }

    pub(super) fn check_options(&self) -> Result<()> {
        if self.options.hints.is_empty() {
            return Ok(());
        }
        let known = self.comm.inner().backend.info().hints;
        check_hints(self.options.hints.iter().map(|(k, _)| k.as_str()), &[CORE_HINTS, known])
    }

    fn info<'a>(&'a self, n: &Numbers) -> CallInfo<'a> {
        let call = CallInfo::new(n.desc, n.number.seq().unwrap_or(0), n.op_id, n.timeout).stream(self.options.stream);
        if self.options.hints.is_empty() { call } else { call.hints(&self.options.hints) }
    }

    /// The number of a call: for point-to-point requests those that they already carry.
    fn number_of(&self, p: &Prepared) -> CallNumber {
        if p.desc.operation.is_collective() {
            return self.comm.inner().next_collective();
        }
        match &p.request {
            Ok(OpRequest::P2p(P2pOp::Send { peer, tag, seq, .. } | P2pOp::Recv { peer, tag, seq, .. })) => {
                CallNumber::P2p { peer: *peer, tag: *tag, seq: *seq }
            }
            _ => CallNumber::Local,
        }
    }

    /// Numbers, checks and announces a call.
    fn admit(&self, p: Prepared, form: Form) -> Result<(Numbers, OpRequest)> {
        let inner = self.comm.inner();
        inner.check_usable(&p.desc)?;
        let number = self.number_of(&p);
        let n = inner.number(p.desc, number, self.options.timeout, form != Form::Sync);
        let request = match p.request {
            Ok(r) => r,
            Err(e) => return Err(inner.refuse(e, &n, form)),
        };
        match self.check_options().and_then(|()| inner.announce(&n, form)) {
            Ok(()) => Ok((n, request)),
            Err(e) => {
                let e = inner.refuse(e, &n, form);
                // A batch has no number of its own, but its messages have taken theirs.
                if let OpRequest::Batch(list) = &request {
                    for m in list {
                        let (number, desc) = message_number(m);
                        inner.backend.refuse(&number, &desc, &e.kind().to_string());
                    }
                }
                Err(e)
            }
        }
    }

    /// The synchronous form.
    ///
    /// The caller of this function borrows the buffers of `p` until it returns.
    pub(super) fn run(&self, p: Prepared) -> Result<()> {
        let inner = self.comm.inner();
        let (n, request) = self.admit(p, Form::Sync)?;
        // SAFETY: every public method that gets here holds its buffers borrowed (or exclusively owned)
        // until `run` returns, and `Backend::run` is done with them by then.
        let mut result = unsafe { inner.backend.run(&request, &self.info(&n)) };
        if result.is_ok() {
            for b in bool_outputs(&request) {
                // SAFETY: as above; the backend is done with the buffer.
                crate::reduce::normalize_bools(unsafe { std::slice::from_raw_parts_mut(b.ptr(), b.bytes()) });
            }
        } else {
            result = result.map_err(|e| inner.locate(e, &n));
        }
        if inner.observers.any() || result.is_err() {
            inner.report_end(&n, Form::Sync, &result, inner.clock().now());
        }
        result
    }

    /// Starts an operation; the record keeps `keep` alive until it is complete.
    ///
    /// # Safety
    ///
    /// The buffers of `p` stay valid and otherwise unused until the returned record is complete: they lie
    /// in `keep`, or the caller waits for the record before it gives the borrow back.
    pub(super) unsafe fn start(
        &self,
        p: Prepared,
        form: Form,
        keep: Option<Arc<dyn std::any::Any + Send + Sync>>,
    ) -> Result<Arc<Core>> {
        let inner = self.comm.inner();
        let (n, request) = self.admit(p, form)?;
        let core = Core::new(Arc::clone(inner), n, form, keep, bool_outputs(&request));
        // SAFETY: forwarded from the caller.
        match unsafe { inner.backend.start(request, &self.info(&n)) } {
            Ok(pending) => {
                core.launch(pending);
                Ok(core)
            }
            Err(e) => {
                let e = inner.locate(e, &n);
                inner.report_end(&n, form, &Err(e.clone()), inner.clock().now());
                Err(e)
            }
        }
    }

    /// The asynchronous form over owned buffers.
    pub(super) fn launch<X: Send + 'static>(&self, x: X, prepare: impl FnOnce(&mut X) -> Prepared) -> Result<Work<X>> {
        let hold = Hold::new(x);
        // SAFETY: the operation has not started, nobody else knows the cell.
        let prepared = unsafe { hold.with(prepare) };
        let Some(p) = prepared else { return Err(Error::invalid("the buffer is gone")) };
        // SAFETY: the buffers lie in `hold`, which the record keeps alive and in place until completion;
        // `Work` takes the value out only after that.
        let core = unsafe { self.start(p, Form::Async, Some(Arc::clone(&hold) as _))? };
        Ok(Work::new(core, hold))
    }

    pub(super) fn next_send(&self, peer: usize, tag: u32) -> u64 {
        bump(&self.comm.inner().p2p_sends, peer, tag)
    }

    pub(super) fn next_recv(&self, peer: usize, tag: u32) -> u64 {
        bump(&self.comm.inner().p2p_recvs, peer, tag)
    }

    pub(super) fn p2p_send(&self, buf: Result<RawBuf>, peer: usize) -> Result<P2pOp> {
        let buf = buf?;
        check::rank_in_range("destination", peer, self.size())?;
        // Everything that can refuse the call locally comes before it takes a number the peer would wait for.
        self.check_options()?;
        self.comm.inner().check_usable(&OpDesc::new(Operation::Send))?;
        let tag = self.options.tag;
        Ok(P2pOp::Send { buf, peer, tag, seq: self.next_send(peer, tag) })
    }

    pub(super) fn p2p_recv(&self, buf: Result<RawBufMut>, peer: usize) -> Result<P2pOp> {
        let buf = buf?;
        check::rank_in_range("source", peer, self.size())?;
        // Everything that can refuse the call locally comes before it takes a number the peer would wait for.
        self.check_options()?;
        self.comm.inner().check_usable(&OpDesc::new(Operation::Recv))?;
        let tag = self.options.tag;
        Ok(P2pOp::Recv { buf, peer, tag, seq: self.next_recv(peer, tag) })
    }

    pub(super) fn prep_send(&self, buf: Result<RawBuf>, peer: usize) -> Prepared {
        Prepared { desc: describe(Operation::Send, &buf), request: self.p2p_send(buf, peer).map(OpRequest::P2p) }
    }

    pub(super) fn prep_recv(&self, buf: Result<RawBufMut>, peer: usize) -> Prepared {
        Prepared { desc: describe_mut(Operation::Recv, &buf), request: self.p2p_recv(buf, peer).map(OpRequest::P2p) }
    }

    pub(super) fn prep_broadcast(&self, buf: Result<RawBufMut>, root: usize) -> Prepared {
        let desc = describe_mut(Operation::Broadcast, &buf).root(root);
        let request = buf.and_then(|buf| {
            check::rank_in_range("root", root, self.size())?;
            Ok(OpRequest::Broadcast { buf, root })
        });
        Prepared { desc, request }
    }

    pub(super) fn prep_all_reduce(&self, buf: Result<RawBufMut>, reducer: Result<Reducer>) -> Prepared {
        let desc = with_redop(describe_mut(Operation::AllReduce, &buf), &reducer);
        let request =
            buf.and_then(|output| Ok(OpRequest::AllReduce { input: output.as_const(), output, reducer: reducer? }));
        Prepared { desc, request }
    }

    pub(super) fn prep_all_reduce_into(
        &self,
        input: Result<RawBuf>,
        output: Result<RawBufMut>,
        reducer: Result<Reducer>,
    ) -> Prepared {
        let desc = with_redop(describe(Operation::AllReduce, &input), &reducer);
        let request = both(input, output).and_then(|(input, output)| {
            check::counts("output", output.count(), "the input's length", input.count())?;
            check::disjoint(&input, &output)?;
            Ok(OpRequest::AllReduce { input, output, reducer: reducer? })
        });
        Prepared { desc, request }
    }

    pub(super) fn prep_reduce(&self, buf: Result<RawBufMut>, reducer: Result<Reducer>, root: usize) -> Prepared {
        let desc = with_redop(describe_mut(Operation::Reduce, &buf), &reducer).root(root);
        let request = buf.and_then(|buf| {
            check::rank_in_range("root", root, self.size())?;
            let output = (root == self.comm.rank()).then_some(buf);
            Ok(OpRequest::Reduce { input: buf.as_const(), output, reducer: reducer?, root })
        });
        Prepared { desc, request }
    }

    pub(super) fn prep_reduce_into(
        &self,
        input: Result<RawBuf>,
        output: Option<Result<RawBufMut>>,
        reducer: Result<Reducer>,
        root: usize,
    ) -> Prepared {
        let desc = with_redop(describe(Operation::Reduce, &input), &reducer).root(root);
        let request = input.and_then(|input| {
            check::rank_in_range("root", root, self.size())?;
            let output = match output {
                Some(o) if root == self.comm.rank() => {
                    let (_, o) = both(Ok(input), o)?;
                    check::counts("output", o.count(), "the input's length", input.count())?;
                    check::disjoint(&input, &o)?;
                    Some(o)
                }
                None if root == self.comm.rank() => {
                    return Err(Error::invalid("the root must pass an output buffer to reduce_into"));
                }
                _ => None,
            };
            Ok(OpRequest::Reduce { input, output, reducer: reducer?, root })
        });
        Prepared { desc, request }
    }

    pub(super) fn prep_all_gather(&self, input: Result<RawBuf>, output: Result<RawBufMut>) -> Prepared {
        let desc = describe(Operation::AllGather, &input);
        let request = both(input, output).and_then(|(input, output)| {
            let want = check::times(input.count(), self.size());
            check::counts("output", output.count(), "world size times the input's length", want)?;
            check::disjoint(&input, &output)?;
            Ok(OpRequest::AllGather { input, output })
        });
        Prepared { desc, request }
    }

    pub(super) fn prep_all_gather_in_place(&self, buf: Result<RawBufMut>) -> Prepared {
        let mut desc = describe_mut(Operation::AllGather, &buf);
        let request = buf.and_then(|output| {
            let shard = check::divides("buffer", output.count(), self.size())?;
            desc.count = shard as u64;
            let bytes = shard * output.dtype().size();
            Ok(OpRequest::AllGather { input: output.slice(self.comm.rank() * bytes, bytes).as_const(), output })
        });
        Prepared { desc, request }
    }

    pub(super) fn prep_reduce_scatter(
        &self,
        input: Result<RawBuf>,
        output: Result<RawBufMut>,
        reducer: Result<Reducer>,
    ) -> Prepared {
        let mut desc = with_redop(describe(Operation::ReduceScatter, &input), &reducer);
        let request = both(input, output).and_then(|(input, output)| {
            desc.count = check::divides("input", input.count(), self.size())? as u64;
            check::counts(
                "output",
                output.count(),
                "the input's length divided by the world size",
                desc.count as usize,
            )?;
            check::disjoint(&input, &output)?;
            Ok(OpRequest::ReduceScatter { input, output, reducer: reducer? })
        });
        Prepared { desc, request }
    }

    pub(super) fn prep_reduce_scatter_in_place(&self, buf: Result<RawBufMut>, reducer: Result<Reducer>) -> Prepared {
        let mut desc = with_redop(describe_mut(Operation::ReduceScatter, &buf), &reducer);
        let request = buf.and_then(|all| {
            let shard = check::divides("buffer", all.count(), self.size())?;
            desc.count = shard as u64;
            let bytes = shard * all.dtype().size();
            let output = all.slice(self.comm.rank() * bytes, bytes);
            Ok(OpRequest::ReduceScatter { input: all.as_const(), output, reducer: reducer? })
        });
        Prepared { desc, request }
    }

    pub(super) fn prep_barrier(&self) -> Prepared {
        Prepared { desc: OpDesc::new(Operation::Barrier), request: Ok(OpRequest::Barrier) }
    }
}

/// The number of a message and what it is, as its other end knows them.
fn message_number(m: &P2pOp) -> (CallNumber, OpDesc) {
    match m {
        P2pOp::Send { buf, peer, tag, seq } => (
            CallNumber::P2p { peer: *peer, tag: *tag, seq: *seq },
            OpDesc::new(Operation::Send).elements(buf.dtype(), buf.count()),
        ),
        P2pOp::Recv { buf, peer, tag, seq } => (
            CallNumber::P2p { peer: *peer, tag: *tag, seq: *seq },
            OpDesc::new(Operation::Recv).elements(buf.dtype(), buf.count()),
        ),
    }
}

fn bump(map: &parking_lot::Mutex<std::collections::HashMap<(usize, u32), u64>>, peer: usize, tag: u32) -> u64 {
    let mut map = map.lock();
    let next = map.entry((peer, tag)).or_insert(0);
    *next += 1;
    *next - 1
}

fn describe(op: Operation, buf: &Result<RawBuf>) -> OpDesc {
    let d = OpDesc::new(op);
    buf.as_ref().map_or(d, |b| d.elements(b.dtype(), b.count()))
}

fn describe_mut(op: Operation, buf: &Result<RawBufMut>) -> OpDesc {
    let d = OpDesc::new(op);
    buf.as_ref().map_or(d, |b| d.elements(b.dtype(), b.count()))
}

fn with_redop(desc: OpDesc, reducer: &Result<Reducer>) -> OpDesc {
    reducer.as_ref().map_or(desc, |r| desc.redop(r.op()))
}

fn both(input: Result<RawBuf>, output: Result<RawBufMut>) -> Result<(RawBuf, RawBufMut)> {
    let (i, o) = (input?, output?);
    check::same_dtype(i.dtype(), o.dtype())?;
    Ok((i, o))
}

/// The same methods on [`With`] and, with default options, on [`Communicator`].
macro_rules! operations {
    ($($(#[$doc:meta])* fn $name:ident [$($g:tt)*] (&$this:ident $(, $arg:ident: $ty:ty)*) -> $ret:ty $body:block)*) => {
        impl<'c> With<'c> {$(
            $(#[$doc])*
            pub fn $name<$($g)*>(&$this $(, $arg: $ty)*) -> $ret $body
        )*}

        impl Communicator {$(
            $(#[$doc])*
            pub fn $name<$($g)*>(&self $(, $arg: $ty)*) -> $ret {
                With::new(self, CallOptions::new()).$name($($arg),*)
            }
        )*}
    };
}

operations! {
    /// Sends `buf` to `dst`; returns when the buffer may be reused. Messages of a pair match by tag
    /// and order. Counterpart: `ncclSend`, `MPI_Send`, `torchcomms send`.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` for a rank out of range; `Mismatch` when the receiver expects another length or type.
    fn send[M, B: IntoBuf<M> + StreamOrdered<M>](&self, buf: B, dst: usize) -> Result<()> {
        self.run(self.prep_send(buf.buf(), dst))
    }

    /// Asynchronous [`send`](Self::send) of an owned buffer.
    ///
    /// # Errors
    ///
    /// As [`send`](Self::send); those of the transfer come from the work.
    fn send_async[M, B: IntoBuf<M> + Send + 'static](&self, buf: B, dst: usize) -> Result<Work<B>> {
        self.launch(buf, |b| self.prep_send(b.buf(), dst))
    }

    /// Receives exactly `buf`'s length from `src`. Counterpart: `ncclRecv`, `MPI_Recv`, `torchcomms recv`.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` for a rank out of range; `Mismatch` when the message has another length or type.
    fn recv[M, B: IntoBufMut<M> + StreamOrdered<M>](&self, buf: B, src: usize) -> Result<()> {
        let mut buf = buf;
        self.run(self.prep_recv(buf.buf_mut(), src))
    }

    /// Asynchronous [`recv`](Self::recv) into an owned buffer.
    ///
    /// # Errors
    ///
    /// As [`recv`](Self::recv); those of the transfer come from the work.
    fn recv_async[M, B: IntoBufMut<M> + Send + 'static](&self, buf: B, src: usize) -> Result<Work<B>> {
        self.launch(buf, |b| self.prep_recv(b.buf_mut(), src))
    }

    /// Copies root's `buf` into everybody's. All pass the same length. Collective.
    /// Counterpart: `ncclBroadcast`, `MPI_Bcast`, `torchcomms broadcast`.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` for a root out of range; `Mismatch` when ranks differ in root, length or type.
    fn broadcast[M, B: IntoBufMut<M> + StreamOrdered<M>](&self, buf: B, root: usize) -> Result<()> {
        let mut buf = buf;
        self.run(self.prep_broadcast(buf.buf_mut(), root))
    }

    /// Asynchronous [`broadcast`](Self::broadcast).
    ///
    /// # Errors
    ///
    /// As [`broadcast`](Self::broadcast).
    fn broadcast_async[M, B: IntoBufMut<M> + Send + 'static](&self, buf: B, root: usize) -> Result<Work<B>> {
        self.launch(buf, |b| self.prep_broadcast(b.buf_mut(), root))
    }

    /// Reduces everybody's `buf` element by element and gives all the result, in place. Collective.
    /// Identical bits on all ranks. Counterpart: `ncclAllReduce`, `MPI_Allreduce`, `torchcomms all_reduce`.
    ///
    /// # Errors
    ///
    /// `Mismatch` when ranks differ in operator, length or type.
    fn all_reduce[M, B: IntoBufMut<M> + StreamOrdered<M>, O: Operator<B::Elem>](&self, buf: B, op: O) -> Result<()> {
        let mut buf = buf;
        self.run(self.prep_all_reduce(buf.buf_mut(), Ok(op.reducer())))
    }

    /// Asynchronous [`all_reduce`](Self::all_reduce).
    ///
    /// # Errors
    ///
    /// As [`all_reduce`](Self::all_reduce).
    fn all_reduce_async[M, B: IntoBufMut<M> + Send + 'static, O: Operator<B::Elem>](&self, buf: B, op: O) -> Result<Work<B>> {
        self.launch(buf, |b| self.prep_all_reduce(b.buf_mut(), Ok(op.reducer())))
    }

    /// [`all_reduce`](Self::all_reduce) from `input` into `output` of the same length; `input` is unchanged.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` when lengths differ or the buffers overlap; else as [`all_reduce`](Self::all_reduce).
    fn all_reduce_into[M, I: IntoBuf<M> + StreamOrdered<M>, B: IntoBufMut<M, Elem = I::Elem> + StreamOrdered<M>, O: Operator<I::Elem>](&self, input: I, output: B, op: O) -> Result<()> {
        let mut output = output;
        self.run(self.prep_all_reduce_into(input.buf(), output.buf_mut(), Ok(op.reducer())))
    }

    /// Asynchronous [`all_reduce_into`](Self::all_reduce_into).
    ///
    /// # Errors
    ///
    /// As [`all_reduce_into`](Self::all_reduce_into).
    fn all_reduce_into_async[M, I: IntoBuf<M> + Send + 'static, B: IntoBufMut<M, Elem = I::Elem> + Send + 'static, O: Operator<I::Elem>](&self, input: I, output: B, op: O) -> Result<Work<(I, B)>> {
        self.launch((input, output), |(i, o)| self.prep_all_reduce_into(i.buf(), o.buf_mut(), Ok(op.reducer())))
    }

    /// Reduces everybody's `buf`; the root gets the result in place, the others' buffers are unchanged.
    /// Collective. Counterpart: `ncclReduce`, `MPI_Reduce`, `torchcomms reduce`.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` for a root out of range; `Mismatch` when ranks differ in root, operator, length or type.
    fn reduce[M, B: IntoBufMut<M> + StreamOrdered<M>, O: Operator<B::Elem>](&self, buf: B, op: O, root: usize) -> Result<()> {
        let mut buf = buf;
        self.run(self.prep_reduce(buf.buf_mut(), Ok(op.reducer()), root))
    }

    /// Asynchronous [`reduce`](Self::reduce).
    ///
    /// # Errors
    ///
    /// As [`reduce`](Self::reduce).
    fn reduce_async[M, B: IntoBufMut<M> + Send + 'static, O: Operator<B::Elem>](&self, buf: B, op: O, root: usize) -> Result<Work<B>> {
        self.launch(buf, |b| self.prep_reduce(b.buf_mut(), Ok(op.reducer()), root))
    }

    /// [`reduce`](Self::reduce) from `input` into `output`, which only the root needs to pass.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` when the root passes no output, lengths differ or buffers overlap; else as
    /// [`reduce`](Self::reduce).
    fn reduce_into[M, I: IntoBuf<M> + StreamOrdered<M>, B: IntoBufMut<M, Elem = I::Elem> + StreamOrdered<M>, O: Operator<I::Elem>](&self, input: I, output: Option<B>, op: O, root: usize) -> Result<()> {
        let mut output = output;
        self.run(self.prep_reduce_into(input.buf(), output.as_mut().map(|o| o.buf_mut()), Ok(op.reducer()), root))
    }

    /// Asynchronous [`reduce_into`](Self::reduce_into).
    ///
    /// # Errors
    ///
    /// As [`reduce_into`](Self::reduce_into).
    fn reduce_into_async[M, I: IntoBuf<M> + Send + 'static, B: IntoBufMut<M, Elem = I::Elem> + Send + 'static, O: Operator<I::Elem>](&self, input: I, output: Option<B>, op: O, root: usize) -> Result<Work<(I, Option<B>)>> {
        self.launch((input, output), |(i, o)| self.prep_reduce_into(i.buf(), o.as_mut().map(|o| o.buf_mut()), Ok(op.reducer()), root))
    }

    /// Concatenates everybody's `input` (equal lengths) in rank order into `output` of world size times
    /// that length. Collective. Counterpart: `ncclAllGather`, `MPI_Allgather`, `torchcomms all_gather_single`.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` when the lengths do not fit or buffers overlap; `Mismatch` when ranks differ in length or type.
    fn all_gather[M, I: IntoBuf<M> + StreamOrdered<M>, B: IntoBufMut<M, Elem = I::Elem> + StreamOrdered<M>](&self, input: I, output: B) -> Result<()> {
        let mut output = output;
        self.run(self.prep_all_gather(input.buf(), output.buf_mut()))
    }

    /// Asynchronous [`all_gather`](Self::all_gather).
    ///
    /// # Errors
    ///
    /// As [`all_gather`](Self::all_gather).
    fn all_gather_async[M, I: IntoBuf<M> + Send + 'static, B: IntoBufMut<M, Elem = I::Elem> + Send + 'static](&self, input: I, output: B) -> Result<Work<(I, B)>> {
        self.launch((input, output), |(i, o)| self.prep_all_gather(i.buf(), o.buf_mut()))
    }

    /// [`all_gather`](Self::all_gather) in place: this rank's shard already lies at `rank * shard` of `buf`.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` when the length does not divide by the world size.
    fn all_gather_in_place[M, B: IntoBufMut<M> + StreamOrdered<M>](&self, buf: B) -> Result<()> {
        let mut buf = buf;
        self.run(self.prep_all_gather_in_place(buf.buf_mut()))
    }

    /// Asynchronous [`all_gather_in_place`](Self::all_gather_in_place).
    ///
    /// # Errors
    ///
    /// As [`all_gather_in_place`](Self::all_gather_in_place).
    fn all_gather_in_place_async[M, B: IntoBufMut<M> + Send + 'static](&self, buf: B) -> Result<Work<B>> {
        self.launch(buf, |b| self.prep_all_gather_in_place(b.buf_mut()))
    }

    /// Reduces everybody's `input` and leaves block `rank` of the result in `output`, whose length is the
    /// input's divided by the world size. Collective. `input` is unchanged.
    /// Counterpart: `ncclReduceScatter`, `MPI_Reduce_scatter_block`, `torchcomms reduce_scatter_single`.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` when the lengths do not fit or buffers overlap; `Mismatch` when ranks differ in
    /// operator, length or type.
    fn reduce_scatter[M, I: IntoBuf<M> + StreamOrdered<M>, B: IntoBufMut<M, Elem = I::Elem> + StreamOrdered<M>, O: Operator<I::Elem>](&self, input: I, output: B, op: O) -> Result<()> {
        let mut output = output;
        self.run(self.prep_reduce_scatter(input.buf(), output.buf_mut(), Ok(op.reducer())))
    }

    /// Asynchronous [`reduce_scatter`](Self::reduce_scatter).
    ///
    /// # Errors
    ///
    /// As [`reduce_scatter`](Self::reduce_scatter).
    fn reduce_scatter_async[M, I: IntoBuf<M> + Send + 'static, B: IntoBufMut<M, Elem = I::Elem> + Send + 'static, O: Operator<I::Elem>](&self, input: I, output: B, op: O) -> Result<Work<(I, B)>> {
        self.launch((input, output), |(i, o)| self.prep_reduce_scatter(i.buf(), o.buf_mut(), Ok(op.reducer())))
    }

    /// [`reduce_scatter`](Self::reduce_scatter) in place: the result lies at `rank * block` of `buf`; the
    /// rest of `buf` is unspecified afterwards.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` when the length does not divide by the world size.
    fn reduce_scatter_in_place[M, B: IntoBufMut<M> + StreamOrdered<M>, O: Operator<B::Elem>](&self, buf: B, op: O) -> Result<()> {
        let mut buf = buf;
        self.run(self.prep_reduce_scatter_in_place(buf.buf_mut(), Ok(op.reducer())))
    }

    /// Asynchronous [`reduce_scatter_in_place`](Self::reduce_scatter_in_place).
    ///
    /// # Errors
    ///
    /// As [`reduce_scatter_in_place`](Self::reduce_scatter_in_place).
    fn reduce_scatter_in_place_async[M, B: IntoBufMut<M> + Send + 'static, O: Operator<B::Elem>](&self, buf: B, op: O) -> Result<Work<B>> {
        self.launch(buf, |b| self.prep_reduce_scatter_in_place(b.buf_mut(), Ok(op.reducer())))
    }

    /// Returns when all ranks have called it; blocks the host. Collective.
    /// Counterpart: `MPI_Barrier`, `torchcomms barrier`.
    ///
    /// # Errors
    ///
    /// `Mismatch` when another rank makes another call.
    fn barrier[](&self) -> Result<()> {
        self.run(self.prep_barrier())
    }

    /// Asynchronous [`barrier`](Self::barrier).
    ///
    /// # Errors
    ///
    /// As [`barrier`](Self::barrier).
    fn barrier_async[](&self) -> Result<Work<()>> {
        self.launch((), |()| self.prep_barrier())
    }

    /// [`all_reduce`](Self::all_reduce) with type and operator chosen at run time.
    ///
    /// # Errors
    ///
    /// `Unsupported` when the operator is not legal on the type; else as [`all_reduce`](Self::all_reduce).
    fn all_reduce_dyn[](&self, buf: DynBufMut<'_>, op: ReduceOp) -> Result<()> {
        { let mut buf = buf; let raw = buf.raw(); self.run(self.prep_all_reduce(Ok(raw), Reducer::builtin(op, raw.dtype()))) }
    }

    /// [`all_reduce_into`](Self::all_reduce_into) with type and operator chosen at run time.
    ///
    /// # Errors
    ///
    /// `Unsupported` when the operator is not legal on the type; `InvalidArgument` when the types differ;
    /// else as [`all_reduce_into`](Self::all_reduce_into).
    fn all_reduce_into_dyn[](&self, input: DynBuf<'_>, output: DynBufMut<'_>, op: ReduceOp) -> Result<()> {
        { let mut output = output; let i = input.raw(); self.run(self.prep_all_reduce_into(Ok(i), Ok(output.raw()), Reducer::builtin(op, i.dtype()))) }
    }

    /// [`reduce`](Self::reduce) with type and operator chosen at run time.
    ///
    /// # Errors
    ///
    /// `Unsupported` when the operator is not legal on the type; else as [`reduce`](Self::reduce).
    fn reduce_dyn[](&self, buf: DynBufMut<'_>, op: ReduceOp, root: usize) -> Result<()> {
        { let mut buf = buf; let raw = buf.raw(); self.run(self.prep_reduce(Ok(raw), Reducer::builtin(op, raw.dtype()), root)) }
    }

    /// [`reduce_into`](Self::reduce_into) with type and operator chosen at run time.
    ///
    /// # Errors
    ///
    /// `Unsupported` when the operator is not legal on the type; else as [`reduce_into`](Self::reduce_into).
    fn reduce_into_dyn[](&self, input: DynBuf<'_>, output: Option<DynBufMut<'_>>, op: ReduceOp, root: usize) -> Result<()> {
        { let mut output = output; let i = input.raw(); self.run(self.prep_reduce_into(Ok(i), output.as_mut().map(|o| Ok(o.raw())), Reducer::builtin(op, i.dtype()), root)) }
    }

    /// [`reduce_scatter`](Self::reduce_scatter) with type and operator chosen at run time.
    ///
    /// # Errors
    ///
    /// `Unsupported` when the operator is not legal on the type; else as [`reduce_scatter`](Self::reduce_scatter).
    fn reduce_scatter_dyn[](&self, input: DynBuf<'_>, output: DynBufMut<'_>, op: ReduceOp) -> Result<()> {
        { let mut output = output; let i = input.raw(); self.run(self.prep_reduce_scatter(Ok(i), Ok(output.raw()), Reducer::builtin(op, i.dtype()))) }
    }

    /// [`reduce_scatter_in_place`](Self::reduce_scatter_in_place) with type and operator chosen at run time.
    ///
    /// # Errors
    ///
    /// `Unsupported` when the operator is not legal on the type; else as
    /// [`reduce_scatter_in_place`](Self::reduce_scatter_in_place).
    fn reduce_scatter_in_place_dyn[](&self, buf: DynBufMut<'_>, op: ReduceOp) -> Result<()> {
        { let mut buf = buf; let raw = buf.raw(); self.run(self.prep_reduce_scatter_in_place(Ok(raw), Reducer::builtin(op, raw.dtype()))) }
    }

    /// [`broadcast`](Self::broadcast) with the type chosen at run time.
    ///
    /// # Errors
    ///
    /// As [`broadcast`](Self::broadcast).
    fn broadcast_dyn[](&self, buf: DynBufMut<'_>, root: usize) -> Result<()> {
        { let mut buf = buf; self.run(self.prep_broadcast(Ok(buf.raw()), root)) }
    }

    /// [`all_gather`](Self::all_gather) with the type chosen at run time.
    ///
    /// # Errors
    ///
    /// As [`all_gather`](Self::all_gather).
    fn all_gather_dyn[](&self, input: DynBuf<'_>, output: DynBufMut<'_>) -> Result<()> {
        { let mut output = output; self.run(self.prep_all_gather(Ok(input.raw()), Ok(output.raw()))) }
    }

    /// [`all_gather_in_place`](Self::all_gather_in_place) with the type chosen at run time.
    ///
    /// # Errors
    ///
    /// As [`all_gather_in_place`](Self::all_gather_in_place).
    fn all_gather_in_place_dyn[](&self, buf: DynBufMut<'_>) -> Result<()> {
        { let mut buf = buf; self.run(self.prep_all_gather_in_place(Ok(buf.raw()))) }
    }

    /// [`send`](Self::send) with the type chosen at run time.
    ///
    /// # Errors
    ///
    /// As [`send`](Self::send).
    fn send_dyn[](&self, buf: DynBuf<'_>, dst: usize) -> Result<()> {
        self.run(self.prep_send(Ok(buf.raw()), dst))
    }

    /// [`recv`](Self::recv) with the type chosen at run time.
    ///
    /// # Errors
    ///
    /// As [`recv`](Self::recv).
    fn recv_dyn[](&self, buf: DynBufMut<'_>, src: usize) -> Result<()> {
        { let mut buf = buf; self.run(self.prep_recv(Ok(buf.raw()), src)) }
    }
}

impl<'c> With<'c> {
    /// A batch of borrowed point-to-point messages that progress together.
    #[must_use]
    pub fn batch<'a>(&self) -> Batch<'c, 'a> {
        Batch::new(self.clone())
    }

    /// A batch of owned buffers, for asynchronous issue.
    #[must_use]
    pub fn batch_async(&self) -> AsyncBatch<'c> {
        AsyncBatch::new(self.clone())
    }

    pub(super) fn scoped<B>(
        &self,
        buf: B,
        prepare: impl FnOnce(&mut B) -> Prepared,
    ) -> Result<(Arc<Core>, Arc<Hold<B>>)> {
        let hold = Hold::new(buf);
        // SAFETY: the operation has not started, nobody else knows the cell.
        let prepared = unsafe { hold.with(prepare) };
        let Some(p) = prepared else { return Err(Error::invalid("the buffer is gone")) };
        // SAFETY: the scope keeps `B`'s borrow alive ('scope) and waits for the record before it ends; `hold` only
        // guards against reborrows in between. If the handle is leaked the borrow still outlives the scope.
        let core = unsafe { self.start(p, Form::Scoped, None)? };
        Ok((core, hold))
    }
}

impl Communicator {
    /// A batch of borrowed point-to-point messages that progress together.
    ///
    /// ```no_run
    /// # fn f(comm: &comm_core::Communicator) -> comm_core::Result<()> {
    /// let (next, prev) = ((comm.rank() + 1) % comm.size(), (comm.rank() + comm.size() - 1) % comm.size());
    /// let (a, mut b) = ([1.0f32; 4], [0.0f32; 4]);
    /// comm.batch().send(&a, next)?.recv(&mut b, prev)?.issue()
    /// # }
    /// ```
    #[must_use]
    pub fn batch<'c, 'a>(&'c self) -> Batch<'c, 'a> {
        Batch::new(With::new(self, CallOptions::new()))
    }

    /// A batch of owned buffers, for asynchronous issue.
    #[must_use]
    pub fn batch_async(&self) -> AsyncBatch<'_> {
        AsyncBatch::new(With::new(self, CallOptions::new()))
    }
}
