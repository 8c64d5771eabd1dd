//! The operations, in their synchronous and asynchronous forms.
//!
//! Each operation is written once, and the macro `forms!` makes its methods: the synchronous and the
//! asynchronous one of [`With`] and of [`Communicator`] (with default options), and the one of
//! [`Scope`](crate::Scope). A synchronous call is `With::run`, an asynchronous one `With::launch`; both
//! number the call first, so that whatever goes wrong later, the other ranks can be told.

#[macro_use]
mod forms;
mod blocks;
mod dynamic;
mod exchange;
mod messages;
mod reductions;

use std::sync::Arc;

use crate::backend::{CallInfo, Form, OpRequest, P2pOp};
use crate::buf::RawBufMut;
use crate::comm::batch::{AsyncBatch, Batch, BatchBuffers};
use crate::comm::prepare::{Prepared, describe, describe_mut};
use crate::comm::ticket::Numbers;
use crate::comm::{Communicator, check};
use crate::desc::Operation;
use crate::error::{Error, Result};
use crate::observe::CallNumber;
use crate::options::{CORE_HINTS, CallOptions, check_hints};
use crate::work::{AbortOnUnwind, Core, Hold, Work, bool_outputs, normalize_all};

/// A communicator together with options for single calls; see [`Communicator::with`].
#[derive(Clone, Debug)]
pub struct With<'c> {
    pub(in crate::comm) comm: &'c Communicator,
    pub(in crate::comm) options: CallOptions<'c>,
}

impl<'c> With<'c> {
    pub(in crate::comm) const fn new(comm: &'c Communicator, options: CallOptions<'c>) -> Self {
        Self { comm, options }
    }

    pub(in crate::comm) fn size(&self) -> usize {
        self.comm.size()
    }

    pub(in crate::comm) fn check_options(&self) -> Result<()> {
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
        let admitted = check::request(&request, self.size(), inner.device)
            .and_then(|()| self.check_options())
            .and_then(|()| inner.announce(&n, form));
        match admitted {
            Ok(()) => Ok((n, request)),
            Err(e) => {
                let e = inner.refuse(e, &n, form);
                if !matches!(request, OpRequest::P2p(_)) {
                    self.refuse_messages(request.messages(), &e);
                }
                Err(e)
            }
        }
    }

    /// A batch, or a pair, has no number of its own, but its messages have taken theirs, and peers wait for them.
    fn refuse_messages(&self, list: &[P2pOp], e: &Error) {
        let reason = e.kind().to_string();
        for m in list {
            let (number, desc) = match *m {
                P2pOp::Send { buf, peer, tag, seq } => {
                    (CallNumber::P2p { peer, tag, seq }, describe(Operation::Send, &Ok(buf)))
                }
                P2pOp::Recv { buf, peer, tag, seq } => {
                    (CallNumber::P2p { peer, tag, seq }, describe_mut(Operation::Recv, &Ok(buf)))
                }
            };
            self.comm.inner().backend.refuse(&number, &desc, &reason);
        }
    }

    /// The synchronous form.
    ///
    /// The caller of this function borrows the buffers of `p` until it returns.
    pub(in crate::comm) fn run(&self, p: Prepared) -> Result<()> {
        let inner = self.comm.inner();
        let (n, request) = self.admit(p, Form::Sync)?;
        /// On success, after an error and when a user's operator panics, the caller sees only valid `bool`s.
        struct Normalize(Vec<RawBufMut>);
        impl Drop for Normalize {
            fn drop(&mut self) {
                // SAFETY: `run` made it from buffers that it holds exclusively until it returns, and drops it when
                // the backend is done with them.
                unsafe { normalize_all(&self.0) };
            }
        }
        let bools = Normalize(bool_outputs(&request));
        // SAFETY: every public method that gets here holds its buffers borrowed (or exclusively owned)
        // until `run` returns, and `Backend::run` is done with them by then.
        let result = unsafe { inner.backend.run(&request, &self.info(&n)) };
        drop(bools);
        let result = result.map_err(|e| inner.locate(e, &n));
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
    pub(in crate::comm) unsafe fn start(
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
                // The caller does not know the operation yet and could not wait for it.
                let guard = AbortOnUnwind;
                core.launch(pending);
                guard.defuse();
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
    pub(in crate::comm) fn launch<X: Send + 'static>(
        &self,
        x: X,
        prepare: impl FnOnce(&mut X) -> Prepared,
    ) -> Result<Work<X>> {
        let hold = Hold::new(x);
        // SAFETY: the operation has not started, nobody else knows the cell.
        let prepared = unsafe { hold.with(prepare) };
        let Some(p) = prepared else { return Err(Error::invalid("the buffer is gone")) };
        // SAFETY: the buffers lie in `hold`, which the record keeps alive and in place until completion;
        // `Work` takes the value out only after that.
        let core = unsafe { self.start(p, Form::Async, Some(Arc::clone(&hold) as _))? };
        Ok(Work::new(core, hold))
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

    /// See [`Communicator::batch_again`].
    ///
    /// # Errors
    ///
    /// As there.
    pub fn batch_again(&self, buffers: BatchBuffers) -> Result<AsyncBatch<'c>> {
        AsyncBatch::again(self.clone(), buffers)
    }

    pub(in crate::comm) fn scoped<B>(
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

    /// A batch of the same messages as the one that gave these buffers back, which may have other contents and
    /// lengths now. More may be added.
    ///
    /// ```no_run
    /// # fn f(comm: &comm_core::Communicator) -> comm_core::Result<()> {
    /// let mut batch = comm.batch_async();
    /// let outgoing = batch.send(vec![0u64; 4], 1)?;
    /// batch.recv(vec![0u64; 4], 1)?;
    /// let mut buffers = batch.issue()?.wait()?;
    /// if let Some(b) = buffers.get_mut(outgoing) {
    ///     b.fill(1);
    /// }
    /// let buffers = comm.batch_again(buffers)?.issue()?.wait()?;
    /// # drop(buffers); Ok(()) }
    /// ```
    ///
    /// # Errors
    ///
    /// `InvalidArgument` when a buffer was taken out, or buffers overlap; the buffers are dropped then.
    pub fn batch_again(&self, buffers: BatchBuffers) -> Result<AsyncBatch<'_>> {
        With::new(self, CallOptions::new()).batch_again(buffers)
    }
}
