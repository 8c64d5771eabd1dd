//! Optional abilities of backends. A backend offers those it has; nothing pretends.

use std::fmt;
use std::time::Duration;

use crate::backend::{CallInfo, OpRequest, Pending};
use crate::buf::{RawBuf, RawBufMut};
use crate::error::Result;

/// The extensions a backend offers.
#[derive(Clone, Copy, Default)]
#[non_exhaustive]
pub struct Extensions<'a> {
    /// One-sided access to peers' memory.
    pub rma: Option<&'a dyn Rma>,
    /// Memory that peers may read directly.
    pub allocator: Option<&'a dyn Allocator>,
    /// Registration of user memory.
    pub registration: Option<&'a dyn Registration>,
    /// Operations set up once and run many times.
    pub persistent: Option<&'a dyn Persistent>,
    /// Recording operations into device graphs.
    pub capture: Option<&'a dyn GraphCapture>,
}

impl fmt::Debug for Extensions<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Extensions")
            .field("rma", &self.rma.is_some())
            .field("allocator", &self.allocator.is_some())
            .field("registration", &self.registration.is_some())
            .field("persistent", &self.persistent.is_some())
            .field("capture", &self.capture.is_some())
            .finish()
    }
}

/// Memory from an [`Allocator`]; freed on drop.
///
/// # Safety
///
/// `raw` describes zero-initialised memory that belongs to the allocation alone until it is dropped.
pub unsafe trait Allocation: Send + fmt::Debug {
    /// The memory.
    fn raw(&self) -> RawBufMut;
}

/// Memory that peers may read directly: a shared segment on CPU, `ncclMemAlloc` or VMM memory on GPU.
pub trait Allocator: Send + Sync {
    /// Allocates zeroed memory of at least `bytes` bytes, aligned to at least 64.
    fn alloc(&self, bytes: usize) -> Result<Box<dyn Allocation>>;
}

/// A window: memory of every member that the others can reach.
pub trait WindowOps: Send + Sync + fmt::Debug {
    /// Writes into a peer's window. Complete locally when the returned object is done.
    ///
    /// # Safety
    ///
    /// `src` stays valid and unchanged until completion.
    unsafe fn put(&self, peer: usize, offset: usize, src: RawBuf, timeout: Duration) -> Result<Box<dyn Pending>>;

    /// Reads from a peer's window.
    ///
    /// # Safety
    ///
    /// `dst` stays valid and unused otherwise until completion.
    unsafe fn get(&self, peer: usize, offset: usize, dst: RawBufMut, timeout: Duration) -> Result<Box<dyn Pending>>;

    /// Waits until all puts to `peer` are visible there.
    fn flush(&self, peer: usize, timeout: Duration) -> Result<()>;

    /// Adds to a 64-bit counter of `peer` that belongs to this rank and `slot`.
    fn signal(&self, peer: usize, slot: usize, add: u64) -> Result<()>;

    /// Waits until the counter of `peer` and `slot` here has reached `at_least`; returns its value.
    fn wait_signal(&self, peer: usize, slot: usize, at_least: u64, timeout: Duration) -> Result<u64>;
}

/// One-sided access.
pub trait Rma: Send + Sync {
    /// Makes a window of `bytes` bytes on every member. Collective.
    fn create(&self, bytes: usize, signals: usize, timeout: Duration) -> Result<Box<dyn WindowOps>>;
}

/// Registration of user memory with the device or network.
pub trait Registration: Send + Sync {
    /// Registers a range; returns a key for [`deregister`](Self::deregister).
    ///
    /// # Safety
    ///
    /// The range stays allocated until it is deregistered.
    unsafe fn register(&self, range: RawBufMut) -> Result<u64>;

    /// Ends a registration.
    fn deregister(&self, key: u64) -> Result<()>;
}

/// A persistent operation: set up once, run many times.
pub trait PersistentOp: Send + fmt::Debug {
    /// Starts one run. Collective.
    ///
    /// # Safety
    ///
    /// The buffers given at set-up are valid and not used otherwise until the run is complete.
    unsafe fn start(&mut self, call: &CallInfo<'_>) -> Result<Box<dyn Pending>>;
}

/// Set-up of persistent operations.
pub trait Persistent: Send + Sync {
    /// Sets an operation up. Collective.
    ///
    /// # Safety
    ///
    /// The request's buffers stay allocated until the returned object is dropped.
    unsafe fn init(&self, request: OpRequest, call: &CallInfo<'_>) -> Result<Box<dyn PersistentOp>>;
}

/// Recording operations into device graphs.
pub trait GraphCapture: Send + Sync {
    /// Whether the stream of this call is being captured.
    fn is_capturing(&self, call: &CallInfo<'_>) -> Result<bool>;
}
