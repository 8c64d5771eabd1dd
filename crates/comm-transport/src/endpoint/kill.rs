//! The end of an endpoint as when its process is killed, for simulators.

use comm_core::{Error, ErrorKind, PeerCause};

use super::Endpoint;
use super::state::State;

impl Endpoint {
    /// Ends the endpoint as if its process were killed now: its links end without a goodbye, nothing more gets out, and
    /// nothing is told to anybody. A thread cannot be ended from outside, so that is all that can be simulated of a
    /// killed rank: what it has in flight, and everything that it tries afterwards, fails with
    /// [`Aborted`](ErrorKind::Aborted) that says `reason`, until its code returns.
    ///
    /// The first call counts.
    pub fn kill(&self, reason: &str) {
        let links = self.with(|st| st.kill(reason));
        // The ends of links may wake others; no lock is held here.
        drop(links);
    }
}

impl State {
    fn kill(&mut self, reason: &str) -> Vec<Box<dyn crate::Link>> {
        if self.killed.is_some() {
            return Vec::new();
        }
        self.killed = Some(reason.to_owned());
        let mut links = Vec::new();
        for p in 0..self.peers.len() {
            let peer = &mut self.peers[p];
            peer.down.get_or_insert(PeerCause::Killed);
            peer.tx.end();
            peer.rx.clear();
            if let Some(link) = peer.link.take() {
                if let Some(fd) = link.fd() {
                    self.notify.unwatch(fd);
                }
                links.push(link);
            }
        }
        for g in 0..self.groups.len() {
            if let Some(e) = self.killed_as(self.group(g).map(|g| g.rank)) {
                self.fail_group(g, e, false);
            }
        }
        self.orphans.clear();
        // Those who wait for something else than an operation must look again too.
        self.ended = true;
        links
    }

    /// The error of a killed endpoint, for a group in which it has this rank.
    pub(crate) fn killed_as(&self, rank: Option<usize>) -> Option<Error> {
        let cause = self.killed.clone()?;
        Some(ErrorKind::Aborted { rank: rank.unwrap_or(self.rank), cause }.into())
    }
}
