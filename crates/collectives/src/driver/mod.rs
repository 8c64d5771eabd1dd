//! The driver: runs schedules over an endpoint, as a [`comm_core::Backend`] that backend-tcp and
//! backend-sim share.

mod buffers;
mod empty;
mod mesh;
mod plan;
mod pool;
mod regroup;
mod shrink;
mod split;
mod task;

pub use empty::EmptyBackend;
pub use mesh::{MESH_HINTS, MeshBackend, MeshOptions};
pub use regroup::{Common, Handle, Identity, Lineage, Place, Refusal, Regroup, Roster};
