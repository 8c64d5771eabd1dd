//! The host-side control plane of a communicator, [`comm_core::Control`], over a group of an endpoint.
//!
//! It is not a data plane: messages are small, copied, and go before data on the same links. It works
//! alike over sockets and in-process links, and needs no connections of its own.
//!
//! Collective methods run in `log2 n` rounds in which every member talks to one member at doubling
//! distance (Bruck's all-gather); no member is a bottleneck.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use comm_core::{Agreed, Control, Error, ErrorKind, Result};
use comm_transport::{Endpoint, GroupId, GroupSpec};
use parking_lot::Mutex;

/// Longest contribution to an exchange.
pub const MAX_BYTES: usize = 1 << 20;
/// Tags from here on belong to the plane itself.
const OWN_TAGS: u32 = 1 << 31;
const ROUNDS: u32 = OWN_TAGS;

/// The control plane of one communicator.
pub struct MeshControl {
    endpoint: Arc<Endpoint>,
    group: GroupId,
    spec: GroupSpec,
    rank: usize,
    /// One collective at a time, in the same order on all members.
    turn: Mutex<u32>,
    /// A plane that owns its group (a subgroup) ends it.
    owns: bool,
}

impl fmt::Debug for MeshControl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MeshControl")
            .field("name", &self.spec.name)
            .field("rank", &self.rank)
            .field("members", &self.spec.members)
            .finish_non_exhaustive()
    }
}

impl Drop for MeshControl {
    fn drop(&mut self) {
        if self.owns {
            self.endpoint.close(self.group);
            self.endpoint.forget(self.group);
        }
    }
}

impl MeshControl {
    /// The plane of a group that somebody else owns. `rank` is this rank in the group, `spec` what the
    /// group was created from.
    #[must_use]
    pub fn new(endpoint: Arc<Endpoint>, group: GroupId, rank: usize, spec: GroupSpec) -> Self {
        Self { endpoint, group, spec, rank, turn: Mutex::new(0), owns: false }
    }

    /// Asks for links to `ranks` and waits until all are there, for members that come one after the other.
    ///
    /// # Errors
    ///
    /// As [`Endpoint::await_links`].
    pub fn await_links(&self, ranks: &[usize], timeout: Duration) -> Result<()> {
        self.endpoint.await_links(self.group, ranks, timeout)
    }

    /// Members that have a link to this one.
    #[must_use]
    pub fn linked(&self) -> Vec<usize> {
        self.endpoint.linked(self.group)
    }

    /// Bruck's all-gather of byte strings.
    fn gather(&self, own: Vec<u8>, timeout: Duration) -> Result<Vec<Vec<u8>>> {
        let n = self.size();
        let mut turn = self.turn.lock();
        let call = *turn;
        *turn = turn.wrapping_add(1);
        let clock = self.endpoint.clock();
        let until = clock.now().after(timeout);
        // blocks[i] is the contribution of rank (rank + i) % n.
        let mut blocks = vec![own];
        let mut distance = 1;
        while distance < n {
            let to = (self.rank + n - distance) % n;
            let from = (self.rank + distance) % n;
            let count = distance.min(n - distance);
            let message = postcard::to_allocvec(&(call, &blocks[..count])).map_err(|e| encode_error(&e))?;
            self.endpoint.send_control(self.group, to, ROUNDS, &message)?;
            let left = until.since(clock.now());
            let got = self.endpoint.recv_control(self.group, from, ROUNDS, left)?;
            let (their_call, more): (u32, Vec<Vec<u8>>) = postcard::from_bytes(&got).map_err(|e| {
                Error::new(ErrorKind::Corrupt { rank: Some(from), what: format!("control message: {e}") })
            })?;
            if their_call != call || more.len() != count {
                return Err(self.out_of_step(from, their_call, call));
            }
            blocks.extend(more);
            distance *= 2;
        }
        drop(turn);
        blocks.truncate(n);
        // Back into rank order.
        blocks.rotate_right(self.rank);
        Ok(blocks)
    }

    fn out_of_step(&self, from: usize, theirs: u32, ours: u32) -> Error {
        let what = format!("rank {from} is in control collective {theirs} while this rank is in {ours}");
        Error::new(ErrorKind::Corrupt { rank: Some(from), what })
    }

    fn check_rank(&self, peer: usize) -> Result<()> {
        if peer < self.size() {
            return Ok(());
        }
        Err(Error::invalid(format!(
            "rank {peer} is out of range: this communicator has ranks 0 to {}",
            self.size() - 1
        )))
    }
}

fn encode_error(e: &postcard::Error) -> Error {
    Error::invalid(format!("a control message cannot be encoded: {e}"))
}

fn check_tag(tag: u32) -> Result<()> {
    if tag < OWN_TAGS {
        Ok(())
    } else {
        Err(Error::invalid(format!("control tag {tag} is reserved; use tags below 2^31")))
    }
}

fn check_length(len: usize) -> Result<()> {
    if len <= MAX_BYTES {
        return Ok(());
    }
    Err(Error::invalid(format!("a control message has {len} bytes; the limit is {MAX_BYTES}; send bulk data as data")))
}

impl Control for MeshControl {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.spec.members.len()
    }

    fn exchange(&self, bytes: &[u8], timeout: Duration) -> Result<Vec<Vec<u8>>> {
        check_length(bytes.len())?;
        self.gather(bytes.to_vec(), timeout)
    }

    fn send(&self, peer: usize, tag: u32, bytes: &[u8]) -> Result<()> {
        self.check_rank(peer)?;
        check_tag(tag)?;
        check_length(bytes.len())?;
        self.endpoint.send_control(self.group, peer, tag, bytes)
    }

    fn recv(&self, peer: usize, tag: u32, timeout: Duration) -> Result<Vec<u8>> {
        self.check_rank(peer)?;
        check_tag(tag)?;
        self.endpoint.recv_control(self.group, peer, tag, timeout)
    }

    fn barrier(&self, timeout: Duration) -> Result<()> {
        self.gather(Vec::new(), timeout).map(drop)
    }

    fn agree(&self, flags: u64, timeout: Duration) -> Result<Agreed> {
        let mine = postcard::to_allocvec(&(flags, self.failed())).map_err(|e| encode_error(&e))?;
        let mut agreed = Agreed { flags: u64::MAX, failed: Vec::new() };
        for (r, bytes) in self.gather(mine, timeout)?.iter().enumerate() {
            let (f, failed): (u64, Vec<usize>) = postcard::from_bytes(bytes)
                .map_err(|e| Error::new(ErrorKind::Corrupt { rank: Some(r), what: format!("control message: {e}") }))?;
            agreed.flags &= f;
            agreed.failed.extend(failed);
        }
        agreed.failed.sort_unstable();
        agreed.failed.dedup();
        Ok(agreed)
    }

    fn publish(&self, seq: u64, rolling_hash: u64) {
        self.endpoint.publish(self.group, seq, rolling_hash);
    }

    fn abort(&self, cause: &Error) {
        self.endpoint.fail(self.group, cause);
    }

    fn subgroup(&self, ranks: &[usize], id: u64) -> Result<Arc<dyn Control>> {
        for r in ranks {
            self.check_rank(*r)?;
        }
        let rank = ranks.iter().position(|r| *r == self.rank).ok_or_else(|| {
            Error::invalid(format!("the subgroup {ranks:?} does not contain this rank {}", self.rank))
        })?;
        let name = format!("{}/{id:x}", self.spec.name);
        let members: Vec<usize> = ranks.iter().map(|r| self.spec.members[*r]).collect();
        let spec = GroupSpec { id: mix(self.spec.id, id), name: name.into(), members, ..self.spec.clone() };
        let group = self.endpoint.create_group(spec.clone())?;
        let mut plane = Self::new(Arc::clone(&self.endpoint), group, rank, spec);
        plane.owns = true;
        Ok(Arc::new(plane))
    }

    fn failed(&self) -> Vec<usize> {
        self.endpoint.lost(self.group)
    }
}

/// The id of a subgroup: from the parent's and its own.
fn mix(parent: u64, id: u64) -> u64 {
    let mut h = comm_core::Fnv::default();
    h.write(&parent.to_le_bytes());
    h.write(&id.to_le_bytes());
    h.finish()
}
