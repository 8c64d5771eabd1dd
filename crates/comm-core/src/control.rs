//! The host-side control plane that every communicator has beside its data plane.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::error::{Error, Result};

/// The outcome of [`Control::agree`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Agreed {
    /// Bitwise and of all members' flags.
    pub flags: u64,
    /// Members that are known to have failed, as all survivors see it.
    pub failed: Vec<usize>,
}

/// Small messages between the members of one communicator, host to host, whatever the data plane is.
///
/// Ranks are those of the communicator. The collective methods (exchange, barrier, agree, subgroup)
/// must be called by all members in the same order and are independent of the data plane's order.
/// Every blocking method fails with `Timeout`, or with the error that the communicator failed with.
pub trait Control: Send + Sync + fmt::Debug {
    /// This member's rank.
    fn rank(&self) -> usize;

    /// The number of members.
    fn size(&self) -> usize;

    /// Every member contributes bytes (any length, at most 1 MiB) and gets everybody's, in rank order.
    fn exchange(&self, bytes: &[u8], timeout: Duration) -> Result<Vec<Vec<u8>>>;

    /// Sends a small message. Messages of one pair and tag arrive in order.
    fn send(&self, peer: usize, tag: u32, bytes: &[u8]) -> Result<()>;

    /// Receives the next message from `peer` with `tag`.
    fn recv(&self, peer: usize, tag: u32, timeout: Duration) -> Result<Vec<u8>>;

    /// Returns when all members have called it.
    fn barrier(&self, timeout: Duration) -> Result<()>;

    /// Agrees on the bitwise and of `flags` and on the set of failed members.
    fn agree(&self, flags: u64, timeout: Duration) -> Result<Agreed>;

    /// Tells the plane how far this member is, for comparison with the others: the number of the
    /// newest collective call and a hash over all calls up to it.
    fn publish(&self, seq: u64, rolling_hash: u64);

    /// Fails the communicator on all members with this cause.
    fn abort(&self, cause: &Error);

    /// A plane among some of the members, in the order given, without new connections. Collective
    /// over exactly those members; `id` is the same on all of them and unused before.
    fn subgroup(&self, ranks: &[usize], id: u64) -> Result<Arc<dyn Control>>;

    /// Members known to be gone.
    fn failed(&self) -> Vec<usize>;
}
