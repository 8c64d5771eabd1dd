//! The driver: runs schedules over an endpoint, as a [`comm_core::Backend`] that backend-tcp and
//! backend-sim share.

mod buffers;
mod mesh;
mod plan;
mod pool;
mod shrink;
mod split;
mod task;

pub use mesh::{MESH_HINTS, MeshBackend, MeshOptions};
