//! Collective algorithms as per-rank state machines, and the driver that runs them.
//!
//! It is not a transport: no sockets, threads or clocks here. A [`Schedule`] sees the world only through a
//! [`Transport`], so the same code runs over real links, in a simulator and in tests. [`MeshBackend`] is the
//! glue to an endpoint that the CPU backends share.
//!
//! [`select`](select::select) picks an [`Algorithm`] from a printable table; [`AnySchedule`] holds a
//! schedule of any algorithm without a heap allocation (for up to 16 ranks), [`build`] boxes one.

mod driver;
pub mod schedule;
pub mod select;

pub use driver::{
    Common, EmptyBackend, Handle, Identity, Lineage, MESH_HINTS, MeshBackend, MeshOptions, Place, Refusal, Regroup,
    Roster,
};
pub use schedule::{AnySchedule, Blocks, Buf, Request, Schedule, Shape, Span, Token, Transport};
pub use select::{Algorithm, Rule, Table, build, select};
