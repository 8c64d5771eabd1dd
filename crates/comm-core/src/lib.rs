//! Vocabulary and contracts of rustcomms: element types, operators, errors, time and stores.

mod desc;
mod device;
mod dtype;
mod error;
pub mod op;
mod reduce;
mod store;
mod time;

pub use desc::{Agreement, DESC_BYTES, Fnv, OpDesc, Operation};
pub use device::{Device, DeviceKind, StreamRef};
pub use dtype::{DType, E4M3, E5M2, Element, Pod};
pub use error::{Context, Error, ErrorKind, PeerCause, Phase, Result};
pub use op::{Operator, ReduceOp};
pub use reduce::{Reducer, normalize_bools};
pub use store::Store;
pub use time::{Clock, Parker, RealClock, Time};
