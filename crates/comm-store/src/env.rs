//! Names of the environment variables that launchers set and ranks read.

/// Global rank of this process.
pub const RANK: &str = "RUSTCOMMS_RANK";
/// Number of ranks of the run.
pub const WORLD_SIZE: &str = "RUSTCOMMS_WORLD_SIZE";
/// Rank among the processes of this node.
pub const LOCAL_RANK: &str = "RUSTCOMMS_LOCAL_RANK";
/// Number of ranks on this node.
pub const LOCAL_WORLD_SIZE: &str = "RUSTCOMMS_LOCAL_WORLD_SIZE";
/// Number of this node, from 0.
pub const NODE_RANK: &str = "RUSTCOMMS_NODE_RANK";
/// Number of nodes of the run.
pub const NNODES: &str = "RUSTCOMMS_NNODES";
/// `host:port` of the [`TcpStoreServer`](crate::TcpStoreServer) that the ranks meet at.
pub const STORE: &str = "RUSTCOMMS_STORE";
/// Name of the run, at most 256 bytes; ranks prefix their keys with it, so that runs do not meet each other's values. After the n-th restart
/// the launcher adds `.n` to it, because the store keeps what was there before.
pub const RUN_ID: &str = "RUSTCOMMS_RUN_ID";
/// The interfaces and networks that ranks use among each other: names, beginnings of names (`ib*`) and networks
/// (`10.0.0.0/8`) with commas between, with `!` in front those that they do not use.
pub const INTERFACE: &str = "RUSTCOMMS_INTERFACE";
/// How often the launcher has restarted the ranks. Discovery needs only [`RUN_ID`], which differs too.
pub const RESTART_COUNT: &str = "RUSTCOMMS_RESTART_COUNT";
/// The one launcher of [`LAUNCHERS`](crate::LAUNCHERS) whose variables count, or `auto`.
pub const LAUNCHER: &str = "RUSTCOMMS_LAUNCHER";
/// `0`, `off`, `no` or `false` keeps ranks from meeting through the launcher's PMI server, for programs whose MPI library
/// talks to it at the same time. The ranks then need [`MASTER_ADDR`](torch::MASTER_ADDR) and
/// [`MASTER_PORT`](torch::MASTER_PORT), or [`RUN_ID`] if all are on one host. `1`, `on`, `yes` and `true` are the default;
/// anything else is an error.
pub const PMI: &str = "RUSTCOMMS_PMI";

/// What torchrun sets for its workers, so that programs written for it find themselves too.
pub mod torch {
    /// Global rank.
    pub const RANK: &str = "RANK";
    /// Number of ranks.
    pub const WORLD_SIZE: &str = "WORLD_SIZE";
    /// Rank on this node.
    pub const LOCAL_RANK: &str = "LOCAL_RANK";
    /// Number of ranks on this node.
    pub const LOCAL_WORLD_SIZE: &str = "LOCAL_WORLD_SIZE";
    /// Number of this node.
    pub const GROUP_RANK: &str = "GROUP_RANK";
    /// Number of nodes.
    pub const GROUP_WORLD_SIZE: &str = "GROUP_WORLD_SIZE";
    /// Rank within the role; there is one role.
    pub const ROLE_RANK: &str = "ROLE_RANK";
    /// Number of ranks of the role.
    pub const ROLE_WORLD_SIZE: &str = "ROLE_WORLD_SIZE";
    /// Name of the role.
    pub const ROLE_NAME: &str = "ROLE_NAME";
    /// Host of the store.
    pub const MASTER_ADDR: &str = "MASTER_ADDR";
    /// Port of the store.
    pub const MASTER_PORT: &str = "MASTER_PORT";
    /// `True` if the launcher hosts the store, so that rank 0 must not.
    pub const USE_AGENT_STORE: &str = "TORCHELASTIC_USE_AGENT_STORE";
    /// Name of the run.
    pub const RUN_ID: &str = "TORCHELASTIC_RUN_ID";
    /// How often the run was restarted.
    pub const RESTART_COUNT: &str = "TORCHELASTIC_RESTART_COUNT";
    /// How often it may be.
    pub const MAX_RESTARTS: &str = "TORCHELASTIC_MAX_RESTARTS";
}
