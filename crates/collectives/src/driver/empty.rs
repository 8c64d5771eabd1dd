//! [`EmptyBackend`]: a communicator that has no members yet.

use std::sync::Arc;
use std::time::Duration;

use comm_core::{
    Backend, BackendInfo, CallInfo, CallNumber, Clock, Control, Error, ErrorKind, OpDesc, OpQuery, OpRequest, Pending,
    ReconfigureRequest, Result, Support,
};
use parking_lot::Mutex;

use super::mesh::supports;
use super::regroup::Regroup;

/// A dynamic communicator before it is reconfigured for the first time: it can be named and reconfigured, and has nobody
/// to exchange anything with.
#[derive(Debug)]
pub struct EmptyBackend {
    info: BackendInfo,
    clock: Arc<dyn Clock>,
    regroup: Arc<dyn Regroup>,
    failed: Mutex<Option<Error>>,
}

impl EmptyBackend {
    /// A communicator without members; `info` says size 0.
    #[must_use]
    pub const fn new(info: BackendInfo, clock: Arc<dyn Clock>, regroup: Arc<dyn Regroup>) -> Self {
        Self { info, clock, regroup, failed: Mutex::new(None) }
    }

    fn refused<T>(&self) -> Result<T> {
        match self.failure() {
            Some(e) => Err(e),
            None => Err(Error::invalid("the communicator has no members yet: call reconfigure")),
        }
    }

    fn fail(&self, cause: Error) {
        self.failed.lock().get_or_insert(cause);
    }
}

// SAFETY: no operation is ever begun, so no buffer is touched.
unsafe impl Backend for EmptyBackend {
    fn info(&self) -> &BackendInfo {
        &self.info
    }

    fn supports(&self, query: &OpQuery) -> Support {
        supports(self.info.name, query)
    }

    fn clock(&self) -> &Arc<dyn Clock> {
        &self.clock
    }

    unsafe fn run(&self, _: &OpRequest, _: &CallInfo<'_>) -> Result<()> {
        self.refused()
    }

    unsafe fn start(&self, _: OpRequest, _: &CallInfo<'_>) -> Result<Box<dyn Pending>> {
        self.refused()
    }

    fn refuse(&self, _: &CallNumber, _: &OpDesc, _: &str) {}

    fn control(&self) -> Option<Arc<dyn Control>> {
        None
    }

    fn failure(&self) -> Option<Error> {
        self.failed.lock().clone()
    }

    fn abort(&self, cause: &Error) {
        self.fail(cause.clone());
    }

    fn finalize(&self, _: Duration) -> Result<()> {
        self.failure().map_or(Ok(()), Err)
    }

    fn close(&self) {}

    fn reconfigure(&self, request: &ReconfigureRequest) -> Result<Arc<dyn Backend>> {
        let new = self.regroup.gather(request)?;
        let (ours, theirs) = (self.info.generation, new.info().generation);
        self.fail(ErrorKind::StaleGeneration { ours, theirs }.into());
        Ok(Arc::new(new))
    }

    fn init_handle(&self) -> Result<String> {
        self.regroup.handle()
    }
}
