//! Agreement on who is still there, in a group that has failed or not: the machine in `machine.rs`, its frames, and the
//! call that waits for it.
//!
//! A member is lost when its link is down (its process has ended, the connection broke, its heartbeats have stopped, it
//! cannot be dialled) or when it has said goodbye. Frames are handled by whoever drives the endpoint: ranks
//! whose call is over, or has not begun, answer too.

mod machine;
#[cfg(test)]
mod tests;

use std::time::Duration;

use comm_core::{ErrorKind, PeerCause, Result, check_outside_operator};

pub(super) use self::machine::Agreement;
use self::machine::{Message, Set, What};
use super::group::Group;
use super::state::State;
use super::{Endpoint, GroupId, check};
use crate::frame::{Header, Kind};

/// How long a call waits before it asks for whom; shorter for short timeouts.
const ASK_AFTER: Duration = Duration::from_millis(100);

/// Members that have agreed on each other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Survivors {
    /// Number of this agreement among those of the group, from 0; the same on all.
    pub number: u64,
    /// Their ranks in the group, ascending.
    pub ranks: Vec<usize>,
    /// The agreement before had the same result; as all get the same results, that too is the same on all.
    pub repeated: bool,
}

impl Endpoint {
    /// The members of a group that are still there, as all of them see it: each gets the same list, in the same order of
    /// agreements. Works on a group that has failed as on one that has not; needs every member that lives to call it.
    ///
    /// A call that has timed out counts as made: the others may agree later, and the next call gets what they have
    /// agreed on.
    ///
    /// # Errors
    ///
    /// `Timeout` naming the members that live and have not called; `StaleGeneration` when the others have agreed that
    /// this rank is gone, because its connections to them were cut, or have given it up and are out of reach; `Finalized`;
    /// what [`kill`](Self::kill) says.
    pub fn agree_survivors(&self, g: GroupId, timeout: Duration) -> Result<Survivors> {
        check_outside_operator()?;
        let start = self.clock().now();
        let until = start.after(timeout);
        let pause = ASK_AFTER.min(timeout / 4).max(Duration::from_millis(1));
        // What this rank reports first says whom it has lost: also those whose connections have ended without its having
        // looked, or of two whose link has broken it is the faster one that accuses the other.
        self.with(|st| st.progress(true));
        loop {
            let (st, index) = self.enter(g)?;
            let now = st.now();
            if let Some(r) = self.drive(st, Some(until.min(now.after(pause))), |st| st.survivors(index)) {
                return r;
            }
            let missing = self.with(|st| st.survivors_missing(index));
            if self.clock().now() >= until {
                return Err(self.timeout(start, missing));
            }
        }
    }
}

impl Endpoint {
    /// What [`agree_survivors`](Self::agree_survivors) has returned last.
    #[must_use]
    pub fn last_survivors(&self, g: GroupId) -> Option<Survivors> {
        let st = self.state.lock();
        check(&st, g).ok().and_then(|g| st.group(g)).and_then(Group::last_survivors)
    }

    /// How a member was lost, as far as this rank knows.
    #[must_use]
    pub fn loss(&self, g: GroupId, rank: usize) -> PeerCause {
        let st = self.state.lock();
        let group = check(&st, g).ok().and_then(|g| st.group(g)).filter(|g| rank < g.members.len());
        match group {
            Some(g) if g.gone[rank].is_some() => PeerCause::Closed,
            Some(g) => {
                let peer = &st.peers[g.members[rank]];
                // Others have lost it while the link to this rank is still up: it does not answer them.
                let silent = if peer.link.is_some() { PeerCause::NoHeartbeat } else { PeerCause::Killed };
                peer.down.unwrap_or(silent)
            }
            None => PeerCause::Killed,
        }
    }
}

impl Group {
    /// Whether `set`, which this rank is to go on with, lacks some of those who have said that they took it for dead, and is
    /// not more than half of the group. One whose link to a single other was cut stays with the rest.
    fn is_left_behind(&self, set: &Set) -> bool {
        let minority = 2 * set.iter().count() <= self.members.len();
        minority && self.given_up.iter().any(|a| !set.has(*a))
    }

    fn last_survivors(&self) -> Option<Survivors> {
        let (number, set, repeated) = self.agreement.last()?;
        Some(Survivors { number, ranks: set.iter().collect(), repeated })
    }
}

impl State {
    /// The next decision, if it is made; calls for it.
    fn survivors(&mut self, g: usize) -> Option<Result<Survivors>> {
        let killed = self.killed_as(self.group(g).map(|g| g.rank));
        let group = self.group_mut(g).filter(|g| g.left.is_none());
        let Some(group) = group else { return Some(Err(ErrorKind::Finalized.into())) };
        if let Some(e) = killed {
            return Some(Err(e));
        }
        group.agreement.call();
        let decision = group.agreement.take();
        let (rank, ours) = (group.rank, group.generation);
        let stale = || ErrorKind::StaleGeneration { ours, theirs: ours.saturating_add(1), rank: None };
        let result = match decision {
            // One that others have given up, while it was stopped or cut off, and that finds none of them, or others like
            // itself: those who gave it up have agreed without it.
            Some((_, set)) if group.is_left_behind(&set) => Some(Err(stale().into())),
            Some((_, set)) if set.has(rank) => group.last_survivors().map(Ok),
            None if !group.agreement.is_out() => None,
            _ => Some(Err(stale().into())),
        };
        self.send_agreement(g);
        result
    }

    /// Whom an agreement waits for, as far as is known here; asks the coordinator for more.
    fn survivors_missing(&mut self, g: usize) -> Vec<usize> {
        let Some(group) = self.group_mut(g) else { return Vec::new() };
        let missing = group.agreement.missing().iter().filter(|r| *r != group.rank).collect();
        group.agreement.ask_missing();
        self.send_agreement(g);
        missing
    }

    /// The link to `p` is down, or it cannot be had.
    pub(super) fn agree_without(&mut self, p: usize) {
        for g in self.groups_of(p) {
            if let Some(rank) = self.group(g).and_then(|g| g.rank_of(p)) {
                self.agree_without_member(g, rank);
            }
        }
    }

    /// A member is lost or has left.
    pub(super) fn agree_without_member(&mut self, g: usize, rank: usize) {
        if let Some(group) = self.group_mut(g) {
            group.agreement.lose(rank);
            self.ended = true;
            self.send_agreement(g);
        }
    }

    pub(super) fn agree_frame(&mut self, p: usize, g: usize, rank: usize, payload: &[u8]) {
        let Ok(message) = postcard::from_bytes::<Message>(payload) else {
            return self.corrupt(p, "an agreement frame that cannot be read".into());
        };
        let Some(group) = self.group_mut(g) else { return };
        let n = group.members.len();
        if !message.fits(n) {
            return self.corrupt(p, format!("an agreement frame of rank {rank} that makes no sense among {n}"));
        }
        group.agreement.receive(rank, message);
        // Whoever waits looks again.
        self.ended = true;
        self.send_agreement(g);
    }

    fn send_agreement(&mut self, g: usize) {
        let Some(group) = self.group_mut(g) else { return };
        let h = Header::new(Kind::Agree, group.id, group.generation);
        let out: Vec<(usize, Message)> =
            group.agreement.outgoing().into_iter().map(|(r, m)| (group.members[r], m)).collect();
        for (p, message) in out {
            let payload = postcard::to_allocvec(&message).unwrap_or_default();
            if matches!(message.what, What::Commit(_)) {
                // Who has asked is linked, and who is left out is not dialled for it.
                self.tell(p, h, payload);
            } else {
                self.send_control(p, h, payload);
            }
        }
    }
}
