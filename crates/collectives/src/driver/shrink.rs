//! A mesh of those who are left of a mesh: a new group on the same endpoint, over the same links.
//!
//! The survivors agree on a list (decision `k` of the old group), then once more. If the second list is the first,
//! all that are in it had the first one and were alive after it, and each makes the new group. If somebody has died in
//! between, the lists differ, all survivors see the same two, and the call fails on all of them; the next one finds the
//! second list and has it confirmed. So whether a shrink succeeds, with which list and under which number, depends on
//! nothing but the series of decisions, which is the same for all members. A round on the new group could not promise that: a
//! member that dies in it, or a timeout, would leave some with a communicator and others with an error, who then wait for each other in vain.
//! For the same reason a call that times out on one rank alone may be made again there: it finds the decision that it
//! has missed.
//!
//! Making the group is local and cannot fail. What a faster member sends to it before this one has made it
//! waits at the endpoint, within the bounds of credit.

use std::sync::Arc;
use std::time::Duration;

use comm_core::{Error, ErrorKind, Fnv, Result};
use comm_transport::GroupSpec;

use super::mesh::MeshBackend;

impl MeshBackend {
    /// The communicator of `survivors`, which this group has agreed on last.
    pub(super) fn shrink_to(&self, survivors: &[usize], timeout: Duration) -> Result<Self> {
        let last = self.endpoint.last_survivors(self.group);
        let Some(last) = last.filter(|l| l.ranks == survivors) else {
            return Err(Error::invalid(format!(
                "shrink takes the ranks that agree_survivors has returned last; {survivors:?} are not those"
            )));
        };
        let confirmed = if last.repeated { last } else { self.endpoint.agree_survivors(self.group, timeout)? };
        if let Some(rank) = survivors.iter().copied().find(|r| !confirmed.ranks.contains(r)) {
            let cause = self.endpoint.loss(self.group, rank);
            return Err(ErrorKind::PeerFailed { rank, cause }.into());
        }
        let mut id = Fnv::default();
        id.write(b"shrink");
        for part in [self.spec.id, confirmed.number].into_iter().chain(survivors.iter().map(|r| *r as u64)) {
            id.write(&part.to_le_bytes());
        }
        let spec = GroupSpec {
            id: id.finish(),
            generation: self.spec.generation.saturating_add(1),
            name: Arc::clone(&self.spec.name),
            members: survivors.iter().map(|r| self.spec.members[*r]).collect(),
            window: self.spec.window,
        };
        self.descend(survivors, spec, self.options.clone())
    }
}
