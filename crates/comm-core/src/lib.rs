//! Vocabulary and contracts of rustcomms: element types, operators, errors, communicators, works, and
//! the traits that backends, stores and control planes implement.
//!
//! It is not a transport: there are no sockets, no GPU and no foreign functions here. A [`Communicator`]
//! validates, numbers, observes and tracks calls, then hands them to a [`Backend`], which moves the bytes.
//!
//! Extension crates (windows, object collectives, meshes) depend on this crate alone: they use
//! [`Communicator::begin`] for numbers and observers and [`Communicator::control`] for host-side messages.

mod backend;
mod blocks;
mod buf;
mod comm;
mod control;
mod desc;
mod device;
mod dtype;
mod error;
pub mod ext;
mod host;
mod observe;
pub mod op;
mod options;
mod reduce;
mod registry;
mod secret;
mod store;
mod time;
mod work;

pub use backend::{
    Backend, BackendInfo, CallInfo, Form, OpQuery, OpRequest, P2pOp, Pending, ReconfigureRequest, SplitRequest, Support,
};
pub use blocks::{IntoBufList, IntoBufListMut, RawBlocks, RawBlocksMut, StreamOrderedList};
pub use buf::{DynBuf, DynBufMut, Host, IntoBuf, IntoBufMut, RawBuf, RawBufMut, StreamOrdered};
pub use comm::{
    AsyncBatch, Batch, BatchBuffers, BatchSlot, BatchedOp, Communicator, Members, OpTicket, Scope, ScopedBatch,
    SplitOptions, With, abort_all,
};
pub use control::{Agreed, Control};
pub use desc::{Agreement, DESC_BYTES, Fnv, OpDesc, Operation};
pub use device::{Device, DeviceKind, StreamRef};
pub use dtype::{DType, E4M3, E5M2, Element, Pod};
pub use error::{Context, Error, ErrorKind, PeerCause, Phase, Result};
/// The 16-bit floats of the `half` crate, of the version that implements [`Element`].
pub use half::{bf16, f16};
pub use host::{HostBackend, host_backend};
pub use observe::{Call, CallNumber, Event, Observer, ObserverGuard};
pub use op::{Operator, ReduceOp};
pub use options::{
    CORE_HINTS, CallOptions, CommOptions, DEFAULT_BOOTSTRAP_TIMEOUT, DEFAULT_TIMEOUT, HintSpec, check_hints,
};
pub use reduce::{Reducer, check_outside_operator, normalize_bools, panic_text, simd_level};
pub use registry::{Factory, built_backends, is_backend_built, new_comm, register_backend};
pub use secret::{SECRET_VARIABLE, Secret};
pub use store::Store;
pub use time::{Clock, Parker, RealClock, Time};
pub use work::{ScopedWork, Work, WorkStatus, wait_all, wait_any};
