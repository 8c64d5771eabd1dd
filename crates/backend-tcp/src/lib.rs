//! The embedded CPU backend, `tcp`: ranks are processes on one or more hosts, joined by sockets. It needs
//! nothing but Rust.
//!
//! It is not a launcher: rank, size and store come from [`CommOptions`] or from the environment that
//! `rustcomms run` or torchrun provide.
//!
//! ```no_run
//! use comm_core::{CommOptions, op};
//!
//! # fn main() -> comm_core::Result<()> {
//! let comm = backend_tcp::connect(CommOptions::new().name("dp"))?;
//! let mut x = vec![comm.rank() as f32; 1024];
//! comm.all_reduce(&mut x, op::Sum)?;
//! comm.finalize(std::time::Duration::from_secs(10))
//! # }
//! ```

#[allow(dead_code, unused_imports, reason = "bootstrap publishes a single address so far")]
mod address;
mod bootstrap;
mod handshake;
mod host;

use std::sync::Arc;

use collectives::{MeshBackend, MeshOptions};
use comm_core::{BackendInfo, CommOptions, Communicator, Device, DeviceKind, Error, Fnv, Result, register_backend};
use comm_transport::{Connect, Endpoint, EndpointOptions, GroupSpec, Link, Patience, SocketLink};

/// Memory that unrequested data of all peers together may take in one communicator, roughly.
const HELD: u64 = 64 << 20;

/// Makes the backend `tcp` known to [`comm_core::new_comm`].
pub fn register() {
    register_backend("tcp", |device, options| {
        if device.kind != DeviceKind::Cpu {
            return Err(Error::unsupported(
                format!("device {device}"),
                "backend tcp works on host memory; pass Device::CPU",
            ));
        }
        connect(options)
    });
}

/// Joins the world that options and environment describe. Collective over all its ranks.
///
/// Rank, size and store come from the options where they are set, else from `RUSTCOMMS_*`, else from
/// torchrun's variables; without any the world has one rank.
///
/// # Errors
///
/// `InvalidArgument` for incomplete or contradictory settings; `Bootstrap` when not all ranks come
/// within the bootstrap timeout, listing who came and who did not; `VersionSkew` when a rank speaks
/// another protocol.
pub fn connect(options: CommOptions) -> Result<Communicator> {
    let mesh = MeshOptions::of(&options)?;
    let world = bootstrap::join(&options)?;
    let (rank, size) = (world.rank, world.size);
    let mut links: Vec<Option<Box<dyn Link>>> = Vec::with_capacity(size);
    for s in world.sockets {
        links.push(match s {
            None => None,
            Some(s) => Some(Box::new(SocketLink::new(s).map_err(|e| Error::io("preparing a connection", &e))?)),
        });
    }
    let mut info = BackendInfo::new("tcp", rank, size);
    info.transport = "sockets".into();
    info.local_rank = world.hosts[..rank].iter().filter(|h| **h == world.hosts[rank]).count();
    info.local_size = world.hosts.iter().filter(|h| **h == world.hosts[rank]).count();
    info.hosts = world.hosts.iter().map(|h| h.name.clone()).collect();
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let patience = Patience::fitting(info.local_size, cores);
    let endpoint = Endpoint::new(
        rank,
        links,
        EndpointOptions {
            checksum: options.checksum,
            patience,
            clock: Arc::clone(&options.clock),
            dialer: None,
            connect: Connect::Auto,
        },
    )?;
    let name = options.effective_name();
    let spec = GroupSpec {
        id: Fnv::hash(world.key.as_bytes()),
        generation: 0,
        name: name.into(),
        members: (0..size).collect(),
        window: (HELD / size as u64).clamp(512 << 10, 4 << 20),
    };
    let backend = MeshBackend::new(endpoint, spec, info, mesh)?;
    let options = options.rank_and_size(rank, size);
    Communicator::from_backend(Arc::new(backend), Device::CPU, options)
}
