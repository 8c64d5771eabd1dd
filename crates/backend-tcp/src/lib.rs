//! The embedded CPU backend, `tcp`: ranks are processes on one or more hosts, joined by sockets. It needs
//! nothing but Rust.
//!
//! It is not a launcher: rank, size and store come from [`CommOptions`] or from the environment that `rustcomms run`,
//! torchrun and the launchers of MPI, Slurm and others provide ([`comm_store::discover`]).
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

mod address;
mod bootstrap;
mod connector;
#[doc(hidden)]
pub mod fuzzing;
mod host;
mod life;
mod open;
mod records;
mod regroup;
mod rendezvous;
mod wire;

use std::net::TcpStream;
use std::sync::Arc;

use collectives::{MESH_HINTS, MeshBackend, MeshOptions};
use comm_core::{
    BackendInfo, CommOptions, Communicator, Device, DeviceKind, Error, ErrorKind, Fnv, Result, register_backend,
};
use comm_transport::{Connect, Dialer, Endpoint, EndpointOptions, GroupSpec, Link, Patience, Prober, SocketLink};

use self::bootstrap::{Seeker, World, in_bootstrap};
use self::host::Host;
use self::regroup::TcpRegroup;

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
/// Rank, size and store come from the options where they are set, else from the launcher's variables
/// ([`comm_store::discover`]); without any the world has one rank.
///
/// Ranks meet by the communicator's name and the order in which each has created communicators of that name. When the
/// attempt fails, all ranks that are at the store learn why at once; those that call again meet again, and ranks of a
/// later start are not concerned.
///
/// With [`CommOptions::dynamic`] nobody is met: the communicator has no members before it is reconfigured. Then there is
/// no rank and no size, and neither store nor launcher is looked for.
///
/// # Errors
///
/// `InvalidArgument` for incomplete or contradictory settings; `Bootstrap` when not all ranks come
/// within the bootstrap timeout, listing who came and who did not, when they disagree on settings or the store goes
/// away, or when they cannot connect to each other within the same time, or at least 5 s (at most the bootstrap timeout)
/// after the last has come; `VersionSkew` when a rank speaks another protocol; `Corrupt` for what ranks did not write;
/// `Mismatch` or `Aborted` when the world has come together, and others have made calls that failed by the time that this
/// rank knew everybody.
pub fn connect(options: CommOptions) -> Result<Communicator> {
    if options.dynamic {
        return Communicator::from_backend(Arc::new(TcpRegroup::empty(&options)?), Device::CPU, options);
    }
    let mesh = MeshOptions::of(&options)?;
    let seeker = Seeker::identify(&options)?;
    let (rank, size) = (seeker.rank, seeker.size);
    let backend = if size == 1 {
        let endpoint = endpoint(&options, rank, vec![None], None, None, mesh.connect)?;
        let spec = spec(&options, &Seeker::lonely_key(&options), size);
        MeshBackend::new(endpoint, spec, info(rank, &[Host::this()]), mesh)?
    } else {
        let joined = seeker.meet(&options, mesh.connect).and_then(|world| join(&options, world, (rank, size), mesh));
        joined.map_err(|e| in_bootstrap(e, &options, rank, size))?
    };
    let backend = backend.with_regroup(TcpRegroup::new(&options));
    Communicator::from_backend(Arc::new(backend), Device::CPU, options.rank_and_size(rank, size))
}

/// Connects to a world whose ranks have all come.
fn join(
    options: &CommOptions,
    mut world: World,
    (rank, size): (usize, usize),
    mesh: MeshOptions,
) -> Result<MeshBackend> {
    // The others are told before the connections are closed: who sees that asks for the reason.
    let sockets = world.connect().map_err(|e| world.report(e))?;
    let (dialer, prober) = (Some(world.dialer()), Some(world.prober()));
    let endpoint = endpoint(options, rank, sockets, dialer, prober, mesh.connect);
    let endpoint = endpoint.map_err(|e| world.report(e))?;
    world.hand_over(&endpoint);
    let spec = spec(options, world.key(), size);
    MeshBackend::introduced(Arc::clone(&endpoint), spec, rank, mesh, |control| {
        let hosts = world.introduce(control).map_err(|e| match e.kind() {
            // The others are in calls by now, and have found something there: that is no matter of meeting.
            ErrorKind::Mismatch { .. } | ErrorKind::Aborted { .. } => e,
            _ => world.report(e),
        })?;
        let info = info(rank, &hosts);
        endpoint.set_patience(patience(info.local_size));
        Ok(info)
    })
}

fn endpoint(
    options: &CommOptions,
    rank: usize,
    sockets: Vec<Option<TcpStream>>,
    dialer: Option<Arc<dyn Dialer>>,
    prober: Option<Arc<dyn Prober>>,
    connect: Connect,
) -> Result<Arc<Endpoint>> {
    let mut links: Vec<Option<Box<dyn Link>>> = Vec::with_capacity(sockets.len());
    for s in sockets {
        links.push(match s {
            None => None,
            Some(s) => Some(Box::new(SocketLink::new(s).map_err(|e| Error::io("preparing a connection", &e))?)),
        });
    }
    let checksum = options.checksum;
    // Until it is known who else is on this host.
    let patience = patience(links.len());
    let rest = EndpointOptions::new(Arc::clone(&options.clock));
    let heartbeat = options.heartbeat_timeout;
    Endpoint::new(rank, links, EndpointOptions { checksum, patience, dialer, connect, heartbeat, prober, ..rest })
}

fn patience(local_size: usize) -> Patience {
    Patience::fitting(local_size, std::thread::available_parallelism().map_or(1, std::num::NonZero::get))
}

fn info(rank: usize, hosts: &[Host]) -> BackendInfo {
    let mut info = BackendInfo::new("tcp", rank, hosts.len());
    info.transport = "sockets".into();
    info.hints = MESH_HINTS;
    info.local_rank = hosts[..rank].iter().filter(|h| h.same(&hosts[rank])).count();
    info.local_size = hosts.iter().filter(|h| h.same(&hosts[rank])).count();
    info.hosts = hosts.iter().map(|h| h.name.clone()).collect();
    // The first rank's number on each host stands for the host.
    info.host_of = hosts.iter().map(|h| hosts.iter().position(|other| other.same(h)).unwrap_or(0)).collect();
    info
}

fn spec(options: &CommOptions, key: &str, size: usize) -> GroupSpec {
    GroupSpec {
        id: Fnv::hash(key.as_bytes()),
        generation: 0,
        name: options.effective_name().into(),
        members: (0..size).collect(),
        window: (HELD / size as u64).clamp(512 << 10, 4 << 20),
    }
}
