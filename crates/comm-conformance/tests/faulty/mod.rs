//! A backend that is `sim` but for one fault, in its synchronous calls.

use std::sync::Arc;
use std::time::Duration;

use comm_core::{
    Backend, BackendInfo, CallInfo, CallNumber, Clock, CommOptions, Communicator, Control, DType, Device, Error,
    OpDesc, OpQuery, OpRequest, Operation, Pending, RawBuf, ReduceOp, Result, SplitRequest, Support,
};

/// What is wrong with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// Nothing.
    None,
    /// The last element of an all_reduce is off on rank 1.
    WrongElement,
    /// An all_reduce writes into its input.
    ClobbersInput,
    /// An all_gather writes a byte too much.
    Spills,
    /// Rank 1's all_reduce of floats differs in the last bit.
    Differs,
    /// A rank's contribution counts for nothing.
    DropsRank,
    /// Exscan writes on rank 0.
    WritesOnRankZero,
    /// A barrier waits for nobody.
    DeafBarrier,
    /// `supports` denies scan.
    Denies,
    /// An all_to_all fails on rank 1.
    Fails,
    /// An all_to_all panics on rank 1.
    Panics,
    /// An all_to_all of rank 1 never ends.
    Hangs,
    /// A custom operator that does not commute is folded with rank 1's operands exchanged for rank 0's.
    IgnoresOrder,
}

#[derive(Debug)]
struct Faulty {
    inner: Arc<dyn Backend>,
    fault: Fault,
}

/// The communicators of a world.
pub(crate) fn world(size: usize, fault: Fault) -> Result<Vec<Communicator>> {
    let sound = backend_sim::world(size, &CommOptions::new().name("faulty"))?;
    let wrap = |c: Communicator| {
        let inner = Arc::clone(c.backend());
        let options = c.options().clone();
        // Dropping it would close the backend; the process is short.
        std::mem::forget(c);
        Communicator::from_backend(Arc::new(Faulty { inner, fault }), Device::CPU, options)
    };
    sound.into_iter().map(wrap).collect()
}

/// Changes a byte.
///
/// # Safety
///
/// The byte may be written.
unsafe fn spoil(at: *mut u8, mask: u8) {
    // SAFETY: by the caller's promise.
    unsafe { *at ^= mask };
}

impl Faulty {
    /// Makes the call, and the mistake.
    ///
    /// # Safety
    ///
    /// As [`Backend::run`]; and the byte after the output of an all_gather may be written.
    unsafe fn spoiled(&self, request: &OpRequest, call: &CallInfo<'_>) -> Result<()> {
        let me = self.info().rank;
        match (self.fault, request) {
            (Fault::Fails, OpRequest::AllToAll { .. }) if me == 1 => {
                return Err(Error::invalid("nothing is wrong, but it fails"));
            }
            (Fault::Panics, OpRequest::AllToAll { .. }) if me == 1 => panic!("a backend panicked"),
            (Fault::Hangs, OpRequest::AllToAll { .. }) if me == 1 => std::thread::sleep(Duration::from_secs(3600)),
            (Fault::DeafBarrier, OpRequest::Barrier) => return Ok(()),
            (Fault::DropsRank, OpRequest::AllReduce { output, reducer, .. }) if me == 1 => {
                let nothing = vec![0u8; output.bytes()];
                let input = RawBuf::new(nothing.as_ptr(), nothing.len(), output.dtype(), output.device());
                let request = OpRequest::AllReduce { input, output: *output, reducer: reducer.clone() };
                // SAFETY: forwarded; `nothing` lives until the call is over.
                return unsafe { self.inner.run(&request, call) };
            }
            (Fault::IgnoresOrder, OpRequest::Scan { output, reducer, .. }) if !reducer.is_commutative() && me == 1 => {
                let nothing = vec![1u8; output.bytes()];
                let input = RawBuf::new(nothing.as_ptr(), nothing.len(), output.dtype(), output.device());
                let request = OpRequest::Scan { input, output: *output, reducer: reducer.clone() };
                // SAFETY: as above.
                return unsafe { self.inner.run(&request, call) };
            }
            _ => {}
        }
        // SAFETY: forwarded.
        unsafe { self.inner.run(request, call)? };
        // SAFETY: the buffers are lent until this returns; that some of them must not be written is the point.
        unsafe {
            match (self.fault, request) {
                (Fault::WrongElement, OpRequest::AllReduce { output, .. }) if me == 1 && output.bytes() > 0 => {
                    spoil(output.ptr().add(output.bytes() - 1), 1);
                }
                (Fault::ClobbersInput, OpRequest::AllReduce { input, .. }) if input.bytes() > 0 => {
                    spoil(input.ptr().cast_mut(), 1);
                }
                (Fault::Spills, OpRequest::AllGather { output, .. }) => {
                    if let Some(all) = output.whole().filter(|o| o.bytes() > 0) {
                        spoil(all.ptr().add(all.bytes()), 1);
                    }
                }
                (Fault::Differs, OpRequest::AllReduce { output, reducer, .. }) => {
                    let sum = reducer.op() == ReduceOp::Sum && reducer.dtype() == DType::F32;
                    if me == 1 && sum && output.bytes() > 0 {
                        spoil(output.ptr(), 1);
                    }
                }
                (Fault::WritesOnRankZero, OpRequest::Exscan { output, .. }) if me == 0 && output.bytes() > 0 => {
                    spoil(output.ptr(), 1);
                }
                _ => {}
            }
        }
        Ok(())
    }
}

// SAFETY: apart from the faults, what the inner backend promises.
unsafe impl Backend for Faulty {
    fn info(&self) -> &BackendInfo {
        self.inner.info()
    }

    fn supports(&self, query: &OpQuery) -> Support {
        if self.fault == Fault::Denies && query.operation == Operation::Scan {
            return Support::Unsupported { reason: "too much work".into() };
        }
        self.inner.supports(query)
    }

    fn clock(&self) -> &Arc<dyn Clock> {
        self.inner.clock()
    }

    unsafe fn run(&self, request: &OpRequest, call: &CallInfo<'_>) -> Result<()> {
        // SAFETY: forwarded; the suite's buffers lie between guard zones.
        unsafe { self.spoiled(request, call) }
    }

    unsafe fn start(&self, request: OpRequest, call: &CallInfo<'_>) -> Result<Box<dyn Pending>> {
        // SAFETY: forwarded.
        unsafe { self.inner.start(request, call) }
    }

    fn refuse(&self, number: &CallNumber, desc: &OpDesc, reason: &str) {
        self.inner.refuse(number, desc, reason);
    }

    fn control(&self) -> Option<Arc<dyn Control>> {
        self.inner.control()
    }

    fn failure(&self) -> Option<Error> {
        self.inner.failure()
    }

    fn abort(&self, cause: &Error) {
        self.inner.abort(cause);
    }

    fn finalize(&self, timeout: Duration) -> Result<()> {
        self.inner.finalize(timeout)
    }

    fn close(&self) {
        self.inner.close();
    }

    fn split(&self, request: &SplitRequest) -> Result<Option<Arc<dyn Backend>>> {
        self.inner.split(request)
    }
}
