//! [`EmptyBackend`]: a communicator that has no members yet.

use std::sync::Arc;
use std::time::Duration;

use comm_core::{
    Backend, BackendInfo, CallInfo, CallNumber, Clock, CommOptions, Control, Error, ErrorKind, OpDesc, OpQuery,
    OpRequest, Pending, ReconfigureRequest, Result, Support,
};
use parking_lot::Mutex;

use super::mesh::{MESH_HINTS, MeshOptions, supports};
use super::regroup::{Common, Regroup};

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
    /// A communicator without members, of backend `name` over `transport`, with the lineage that `regroup` makes. What
    /// would be wrong at every attempt to reconfigure it is said now.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` for options with a rank or size; as [`MeshOptions::of`] and [`Common::of`]; those of `regroup`.
    pub fn new(
        name: &'static str,
        transport: &str,
        options: &CommOptions,
        regroup: impl FnOnce() -> Result<Arc<dyn Regroup>>,
    ) -> Result<Self> {
        if options.rank.is_some() || options.size.is_some() {
            let what = "a dynamic communicator has no rank and size before it is reconfigured: do not set them";
            return Err(Error::invalid(what));
        }
        MeshOptions::of(options)?;
        Common::of(options)?;
        let mut info = BackendInfo::new(name, 0, 0);
        info.transport = transport.into();
        info.hints = MESH_HINTS;
        Ok(Self { info, clock: Arc::clone(&options.clock), regroup: regroup()?, failed: Mutex::new(None) })
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
        self.regroup.close();
        self.failure().map_or(Ok(()), Err)
    }

    fn close(&self) {}

    fn reconfigure(&self, request: &ReconfigureRequest) -> Result<Arc<dyn Backend>> {
        let new = self.regroup.gather(request)?;
        let (ours, theirs) = (self.info.generation, new.info().generation);
        self.fail(ErrorKind::StaleGeneration { ours, theirs, rank: None }.into());
        Ok(Arc::new(new))
    }

    fn init_handle(&self) -> Result<String> {
        self.regroup.handle()
    }
}
