//! Waiting for links, for members that come one after the other.

use std::time::Duration;

use comm_core::Result;

use super::{Endpoint, GroupId, check};

impl Endpoint {
    /// Asks for links to `peers`, members of a group, and waits until all are there.
    ///
    /// # Errors
    ///
    /// The group's failure; `Timeout` that names those that have not come.
    pub fn await_links(&self, g: GroupId, peers: &[usize], timeout: Duration) -> Result<()> {
        let start = self.clock().now();
        let (mut st, index) = self.enter(g)?;
        let members = st.group(index).map(|g| g.members.clone()).unwrap_or_default();
        let wanted: Vec<(usize, usize)> = peers.iter().filter_map(|r| Some((*r, *members.get(*r)?))).collect();
        for (_, p) in &wanted {
            st.want_link(*p);
        }
        let got = self.drive(st, Some(start.after(timeout)), |st| {
            if st.group(index)?.failed.is_some() {
                return Some(Err(st.localized(index, None)));
            }
            // A lost peer fails the group a moment later; until then its explanation may still arrive.
            wanted.iter().all(|(_, p)| st.peers[*p].link.is_some()).then_some(Ok(()))
        });
        got.unwrap_or_else(|| {
            let here = self.linked(g);
            Err(self.timeout(start, wanted.iter().map(|(r, _)| *r).filter(|r| !here.contains(r)).collect()))
        })
    }

    /// Members of a group that have a link.
    #[must_use]
    pub fn linked(&self, g: GroupId) -> Vec<usize> {
        let st = self.state.lock();
        let Some(group) = check(&st, g).ok().and_then(|g| st.group(g)) else { return Vec::new() };
        (0..group.members.len()).filter(|r| st.peers[group.members[*r]].link.is_some()).collect()
    }
}
