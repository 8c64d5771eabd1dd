//! N ranks in one process: the backend `sim`, for users' tests and for simulation.
//!
//! It is not a shortcut: every byte is framed, checksummed and moved through the same endpoint and the
//! same algorithms as over sockets; only the links are pipes in memory. Each rank is a thread of the
//! caller's.
//!
//! There are two ways to run a closure as several ranks. [`run_ranks`] runs it on threads in real time. A [`Simulation`]
//! runs the same closure in virtual time, one step at a time in an order that a seed decides, with faults wherever they are
//! wanted, and counts what it costs; a run that fails can be repeated exactly.
//!
//! ```
//! use comm_core::op;
//!
//! let sums = backend_sim::run_ranks(3, |comm| {
//!     let mut x = [comm.rank() as i32 + 1; 4];
//!     comm.all_reduce(&mut x, op::Sum)?;
//!     Ok(x[0])
//! });
//! assert_eq!(sums.unwrap(), [6, 6, 6]);
//! ```
//!
//! ```
//! use backend_sim::{Faults, Simulation};
//! use comm_core::{ErrorKind, op};
//!
//! let lossy = Simulation::new(3).seed(1).faults(Faults::new().drop_frame(0, 1, 2));
//! let run = lossy.run(|comm| {
//!     let mut x = [comm.rank() as i32; 4];
//!     (0..10).try_for_each(|_| comm.all_reduce(&mut x, op::Max))
//! }).unwrap();
//! let e = run.ranks[1].error().unwrap();
//! assert!(matches!(e.kind(), ErrorKind::Corrupt { rank: Some(0), .. }), "{e}; {}", run.replay());
//! assert!(run.stats.total.messages > 0);
//! ```

mod fabric;
mod ground;
mod meeting;
mod ranks;
mod regroup;
mod sim;
mod wires;

use std::sync::Arc;

use collectives::{MESH_HINTS, MeshBackend, MeshOptions};
use comm_core::{BackendInfo, CommOptions, Communicator, Device, DeviceKind, Error, Fnv, Result, register_backend};
use comm_transport::{Endpoint, EndpointOptions, GroupSpec, Patience};

use crate::ground::{Ground, Identity, here};
use crate::regroup::SimRegroup;
use crate::wires::Share;

pub use ranks::{RankPanic, run_ranks, run_ranks_with};
pub use sim::{
    Ended, Fault, Faults, Happened, Network, Outcome, RankStats, SEED_VARIABLE, SimFailure, SimRank, Simulation, Stats,
    Trouble, When,
};

/// Bytes per peer that may be under way before they are received.
const WINDOW: u64 = 4 << 20;

/// Makes the backend `sim` known to [`comm_core::new_comm`].
pub fn register() {
    register_backend("sim", |device, options| {
        if device.kind != DeviceKind::Cpu {
            return Err(Error::unsupported(
                format!("device {device}"),
                "backend sim works on host memory; pass Device::CPU",
            ));
        }
        connect(options)
    });
}

/// Joins the world of the options' name in this process. Collective: `size` threads call it with the
/// ranks 0 to `size - 1`.
///
/// With [`CommOptions::dynamic`] nobody is met: the communicator has no members before it is reconfigured, and neither
/// rank nor size.
///
/// # Errors
///
/// `InvalidArgument` without rank and size, or for a rank that has joined already or another world
/// size; `Bootstrap` when not all ranks join within the bootstrap timeout, naming the missing.
pub fn connect(options: CommOptions) -> Result<Communicator> {
    if options.dynamic {
        return Communicator::from_backend(Arc::new(SimRegroup::empty(&options)?), Device::CPU, options);
    }
    let (Some(rank), Some(size)) = (options.rank, options.size) else {
        return Err(Error::invalid("backend sim needs a rank and a size: CommOptions::rank_and_size"));
    };
    if sim::here().is_some() {
        // The others wait in real time, which the only thread that runs must not.
        return Err(Error::unsupported(
            "meeting by name inside a simulation",
            "a simulation makes its world itself; split or reconfigure that",
        ));
    }
    let connect = MeshOptions::of(&options)?.connect;
    let share = fabric::join(options.effective_name(), rank, size, connect, options.bootstrap_timeout, &options.clock)?;
    let (ground, _) = here();
    let members: Vec<Identity> = (0..size as Identity).collect();
    assemble(&ground, &members, rank, share, options)
}

/// A world of `size` communicators, ready to be given to threads.
///
/// # Errors
///
/// `InvalidArgument` for a size of 0.
pub fn world(size: usize, options: &CommOptions) -> Result<Vec<Communicator>> {
    if size == 0 {
        return Err(Error::invalid("a world has at least one rank"));
    }
    let (ground, _) = here();
    world_on(&ground, size, options)
}

fn world_on(ground: &Arc<dyn Ground>, size: usize, options: &CommOptions) -> Result<Vec<Communicator>> {
    let members: Vec<Identity> = (0..size as Identity).collect();
    let shares = wires::shares_on(ground, &members, MeshOptions::of(options)?.connect);
    let make = |(r, share)| assemble(ground, &members, r, share, options.clone().rank_and_size(r, size));
    shares.into_iter().enumerate().map(make).collect()
}

/// A rank's communicator over all members of a world, out of its share of the links.
fn assemble(
    ground: &Arc<dyn Ground>,
    members: &[Identity],
    rank: usize,
    share: Share,
    options: CommOptions,
) -> Result<Communicator> {
    let regroup = SimRegroup::new(ground, members[rank], &options);
    let id = Fnv::hash(options.effective_name().as_bytes());
    let backend = mesh(ground, members, (rank, share), &options, (id, 0), regroup)?;
    Communicator::from_backend(Arc::new(backend), Device::CPU, options)
}

/// The backend of a rank's communicator with this id and generation.
fn mesh(
    ground: &Arc<dyn Ground>,
    members: &[Identity],
    (rank, share): (usize, Share),
    options: &CommOptions,
    (id, generation): (u64, u32),
    regroup: Arc<SimRegroup>,
) -> Result<MeshBackend> {
    let mesh = MeshOptions::of(options)?;
    let me = members[rank];
    ground.check(me)?;
    let Share { row: links, wires } = share;
    let size = links.len();
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let settings = EndpointOptions {
        checksum: true,
        patience: Patience::fitting(size, cores),
        dialer: wires.as_ref().map(|w| w.dialer(rank)).transpose()?,
        connect: mesh.connect,
        heartbeat: options.heartbeat_timeout,
        ..EndpointOptions::new(Arc::clone(&options.clock))
    };
    let settings = ground.endpoint_options(me, members, settings);
    let endpoint = Endpoint::new(rank, links, settings.clone())?;
    ground.made(me, &endpoint, &settings);
    if let Some(w) = &wires {
        w.register(rank, &endpoint);
    }
    let mut info = BackendInfo::new("sim", rank, size);
    info.transport = "in-process".into();
    info.hints = MESH_HINTS;
    info.hosts = vec!["localhost".into(); size];
    info.generation = generation;
    let name = options.effective_name();
    let spec = GroupSpec { id, generation, name: name.into(), members: (0..size).collect(), window: WINDOW };
    Ok(MeshBackend::new(endpoint, spec, info, mesh)?.with_regroup(regroup))
}
