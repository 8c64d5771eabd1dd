//! Numbering a call and telling observers about it.

use std::sync::Arc;
use std::time::Duration;

use crate::backend::{CallInfo, Form};
use crate::comm::{CommInner, Communicator, HandleState};
use crate::desc::OpDesc;
use crate::error::{Context, Error, ErrorKind, Result};
use crate::observe::{Call, CallNumber, Event};
use crate::options::CallOptions;
use crate::reduce::check_outside_operator;
use crate::time::Time;

/// The numbers and times of one call.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Numbers {
    pub(crate) desc: OpDesc,
    pub(crate) op_id: u64,
    pub(crate) number: CallNumber,
    pub(crate) timeout: Duration,
    /// When the call was made; zero when nobody asks (a synchronous call without observers).
    pub(crate) called: Time,
}

impl CommInner {
    /// Checks that calls are possible at all.
    pub(crate) fn check_usable(&self, desc: &OpDesc) -> Result<()> {
        check_outside_operator().map_err(|e| e.with_context(|| self.context(Some(desc), None)))?;
        let e = match self.state() {
            HandleState::Live => return Ok(()),
            HandleState::Fresh => {
                self.transition(HandleState::Fresh, HandleState::Live);
                return Ok(());
            }
            HandleState::Stale => self.stale_error(),
            HandleState::Memberless => self.no_members(),
            HandleState::Finalizing | HandleState::Finalized | HandleState::Closed => ErrorKind::Finalized.into(),
        };
        Err(e.with_context(|| self.context(Some(desc), None)))
    }

    /// The answer of a dynamic communicator that has not been filled yet.
    pub(crate) fn no_members(&self) -> Error {
        Error::invalid(format!("communicator '{}' has no members yet: call reconfigure", self.name))
    }

    /// Gives a call its numbers. From here on a collective call counts on this rank, whatever becomes of it.
    pub(crate) fn number(&self, desc: OpDesc, number: CallNumber, timeout: Option<Duration>, timed: bool) -> Numbers {
        use std::sync::atomic::Ordering::Relaxed;
        let called = if timed || self.observers.any() { self.clock().now() } else { Time::default() };
        Numbers {
            desc,
            op_id: self.next_op_id.fetch_add(1, Relaxed),
            number,
            timeout: timeout.unwrap_or(self.options.timeout),
            called,
        }
    }

    pub(crate) fn next_collective(&self) -> CallNumber {
        CallNumber::Collective(self.collective_seq.fetch_add(1, std::sync::atomic::Ordering::Relaxed))
    }

    pub(crate) fn call_view<'a>(&'a self, n: &Numbers, form: Form) -> Call<'a> {
        Call {
            comm: &self.name,
            rank: self.rank(),
            size: self.size(),
            op_id: n.op_id,
            number: n.number,
            desc: n.desc,
            form,
            timeout: n.timeout,
        }
    }

    pub(crate) fn context(&self, desc: Option<&OpDesc>, seq: Option<u64>) -> Context {
        Context {
            comm: Some(Arc::clone(&self.name)),
            rank: (self.size() > 0).then(|| (self.rank(), self.size())),
            op: desc.map(|d| d.operation.name().into()),
            seq,
        }
    }

    /// Adds this call's place to an error.
    pub(crate) fn locate(&self, e: Error, n: &Numbers) -> Error {
        e.with_context(|| self.context(Some(&n.desc), n.number.seq()))
    }

    /// Observers may veto; on success they are told that the call is on its way.
    pub(crate) fn announce(&self, n: &Numbers, form: Form) -> Result<(), Error> {
        if !self.observers.any() {
            return Ok(());
        }
        let call = self.call_view(n, form);
        self.observers
            .pre(&call)
            .map_err(|reason| Error::invalid(format!("an observer refused the call: {reason}")))?;
        self.observers.event(&Event::Enqueued(call), self.clock().now());
        self.observers.event(&Event::Started(call), self.clock().now());
        Ok(())
    }

    /// Ends a call with its result: locates the error and tells observers.
    pub(crate) fn end<T>(&self, n: &Numbers, form: Form, result: Result<T>) -> Result<T> {
        let now = self.clock().now();
        match result {
            Ok(v) => {
                self.report_end(n, form, &Ok(()), now);
                Ok(v)
            }
            Err(e) => {
                let e = self.locate(e, n);
                self.report_end(n, form, &Err(e.clone()), now);
                Err(e)
            }
        }
    }

    /// Ends a call that this rank refuses: the others learn it at once.
    pub(crate) fn refuse(&self, e: Error, n: &Numbers, form: Form) -> Error {
        let e = self.locate(e, n);
        if n.number != CallNumber::Local {
            self.backend.refuse(&n.number, &n.desc, &e.kind().to_string());
        }
        if self.observers.any() {
            let now = self.clock().now();
            let (call, elapsed) = (self.call_view(n, form), now.since(n.called));
            self.observers.event(&Event::Failed { call, elapsed, error: &e }, now);
        }
        e
    }
}

/// An operation begun by an extension crate: numbered, observed, and ended exactly once.
///
/// Dropping the ticket without [`complete`](Self::complete) counts as a failure of the operation
/// on this rank only.
#[derive(Debug)]
#[must_use = "a ticket must be completed"]
pub struct OpTicket {
    comm: Arc<CommInner>,
    numbers: Option<Numbers>,
}

impl OpTicket {
    pub(crate) fn begin(comm: &Communicator, desc: OpDesc, options: &CallOptions<'_>) -> Result<Self> {
        let inner = comm.inner();
        inner.check_usable(&desc)?;
        let number = if desc.operation.is_collective() { inner.next_collective() } else { CallNumber::Local };
        let n = inner.number(desc, number, options.timeout, true);
        if let Err(e) = inner.announce(&n, Form::Sync) {
            return Err(inner.refuse(e, &n, Form::Sync));
        }
        Ok(Self { comm: Arc::clone(inner), numbers: Some(n) })
    }

    fn numbers(&self) -> &Numbers {
        // `numbers` is taken only by `complete`, which consumes the ticket, and by drop.
        self.numbers.as_ref().expect("the ticket is open until completed")
    }

    /// What a backend wants to know about the call.
    #[must_use]
    pub fn info(&self) -> CallInfo<'static> {
        let n = self.numbers();
        CallInfo::new(n.desc, n.number.seq().unwrap_or(0), n.op_id, n.timeout)
    }

    /// The call's `collective_seq`; `None` for calls that not all members make.
    #[must_use]
    pub fn collective_seq(&self) -> Option<u64> {
        match self.numbers().number {
            CallNumber::Collective(s) => Some(s),
            _ => None,
        }
    }

    /// Refuses the call: the other members get `PeerRefused`. Returns the error with its context.
    pub fn refuse(mut self, e: Error) -> Error {
        match self.numbers.take() {
            Some(n) => self.comm.refuse(e, &n, Form::Sync),
            None => e,
        }
    }

    /// Ends the call with its result.
    ///
    /// # Errors
    ///
    /// The error given, with its context filled in.
    pub fn complete<T>(mut self, result: Result<T>) -> Result<T> {
        let Some(n) = self.numbers.take() else { return result };
        self.comm.end(&n, Form::Sync, result)
    }
}

impl Drop for OpTicket {
    fn drop(&mut self) {
        if let Some(n) = self.numbers.take() {
            let e = self.comm.locate(Error::invalid("the operation was abandoned before it was complete"), &n);
            self.comm.report_end(&n, Form::Sync, &Err(e), self.comm.clock().now());
        }
    }
}
