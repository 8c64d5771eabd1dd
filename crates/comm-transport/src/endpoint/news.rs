//! How news reaches members that this rank has no link to.
//!
//! In a *sparse* group (larger than [`SMALL_WORLD`](crate::SMALL_WORLD), unless connected fully) a member has links to
//! few others, the group's overlay. Data makes the links it needs; news does not:
//!
//! * a failure goes to all linked members, and each that hears of it for the first time tells its own;
//! * so do refusals, and calls for help when rank 0 is silent, marked with the rank they come from;
//! * goodbyes and farewells travel in [`Kind::News`] frames, many in one, each passed on once;
//! * what rank 0 asks and answers goes down, and what it is told goes up, a binomial tree, whose edges are links of
//!   the overlay.
//!
//! A goodbye says that everything its sender ever sent has arrived. Over a link that is so because links keep order.
//! A member without link to the sender may take it from the news, because nothing was sent to it; the news lists the
//! members that have a link beside those of the overlay, or are about to have one, and that must wait for it there.

use comm_core::{ErrorKind, OpDesc};
use serde::{Deserialize, Serialize};

use super::group::{Gone, Group, SILENT};
use super::state::State;
use crate::frame::{FRAGMENT, Header, Kind};

/// Recent refusals and calls for help that were passed on.
const RELAYED: usize = 4096;

const GOODBYE: u8 = 1;
const FAREWELL: u8 = 2;

/// What a goodbye frame says, in its offset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    /// 0: closed; 1: finalized; 4 and more: moved on, to a membership of generation `offset - 4`.
    Left(Gone),
    /// 2: has seen all others leave.
    Farewell,
    /// 3: nothing more will come.
    LastWord,
}

impl From<u64> for End {
    fn from(offset: u64) -> Self {
        match offset {
            0 => Self::Left(Gone::Closed),
            1 => Self::Left(Gone::Finalized),
            2 => Self::Farewell,
            3 => Self::LastWord,
            n => Self::Left(Gone::Moved(u32::try_from(n - 4).unwrap_or(u32::MAX))),
        }
    }
}

impl From<End> for u64 {
    fn from(end: End) -> Self {
        match end {
            End::Left(Gone::Closed) => 0,
            End::Left(Gone::Finalized) => 1,
            End::Farewell => 2,
            End::LastWord => 3,
            End::Left(Gone::Moved(generation)) => Self::from(generation) + 4,
        }
    }
}

/// That a member has left, or has seen all others leave.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Fact {
    rank: u32,
    /// As the offset of a goodbye frame, see [`End`].
    how: u64,
    /// Members beyond the overlay that hear it on a link.
    direct: Vec<u32>,
    silent: Vec<(u64, OpDesc)>,
}

impl Group {
    /// Whether `rank` is linked to `other` from the start.
    fn is_neighbour(&self, rank: usize, other: usize) -> bool {
        self.connect.neighbours(rank, self.members.len()).contains(&other)
    }

    /// The next member on the way to rank 0.
    fn above(&self) -> usize {
        if self.sparse { self.rank & self.rank.wrapping_sub(1) } else { 0 }
    }

    /// The members that hear of rank 0 from this rank.
    fn below(&self) -> Vec<usize> {
        let n = self.members.len();
        if !self.sparse {
            return if self.rank == 0 { (1..n).collect() } else { Vec::new() };
        }
        let room = if self.rank == 0 { usize::BITS } else { self.rank.trailing_zeros() };
        (0..room).map_while(|k| 1usize.checked_shl(k)).map(|d| self.rank + d).take_while(|r| *r < n).collect()
    }

    /// Whether this is the first time that something of a kind, from a rank, about a call, comes by.
    pub(super) fn is_first(&mut self, kind: Kind, origin: usize, seq: u64) -> bool {
        let key = (kind, origin, seq);
        if self.relayed.contains(&key) {
            return false;
        }
        if self.relayed.len() == RELAYED {
            self.relayed.pop_front();
        }
        self.relayed.push_back(key);
        true
    }
}

impl State {
    /// Whether frames can be sent to `p`, now or once a link is there.
    pub(crate) fn is_reachable(&self, p: usize) -> bool {
        let peer = &self.peers[p];
        peer.down.is_none() && (peer.link.is_some() || (self.dialer.is_some() && p != self.rank))
    }

    /// Whether a link to `p` is there or asked for.
    pub(crate) fn is_linked(&self, p: usize) -> bool {
        let peer = &self.peers[p];
        peer.link.is_some() || (peer.wanted && peer.down.is_none())
    }

    /// Asks for a link to `p` unless there is one.
    pub(crate) fn want_link(&mut self, p: usize) {
        let me = self.rank;
        let peer = &mut self.peers[p];
        if peer.link.is_none()
            && peer.down.is_none()
            && !peer.wanted
            && p != me
            && let Some(dialer) = &self.dialer
        {
            peer.wanted = true;
            dialer.dial(p);
        }
    }

    /// Sends a small frame to a peer that has a link or will have one; makes none for it.
    pub(crate) fn tell(&mut self, p: usize, h: Header, payload: Vec<u8>) {
        if self.is_linked(p) {
            self.send_control(p, h, payload);
        }
    }

    /// Tells all members that this rank has links to.
    pub(super) fn tell_linked(&mut self, g: usize, h: Header, payload: &[u8]) {
        let Some(members) = self.group(g).map(|g| g.members.clone()) else { return };
        for m in members {
            if m != self.rank {
                self.tell(m, h, payload.to_vec());
            }
        }
    }

    /// Passes on what came from `p` and began at another member, along the overlay.
    pub(super) fn relay(&mut self, g: usize, p: usize, h: Header, payload: &[u8]) {
        let Some(group) = self.group(g).filter(|g| g.sparse) else { return };
        let to: Vec<usize> = group.overlay.iter().map(|r| group.members[*r]).filter(|m| *m != p).collect();
        for m in to {
            self.tell(m, h, payload.to_vec());
        }
    }

    /// A link to `p` has come: what was waiting for it goes out, and what `p` may have missed.
    pub(crate) fn linked(&mut self, p: usize) {
        self.moved = true;
        // Somebody may be waiting for the link itself.
        self.ended = true;
        for g in self.groups_of(p) {
            if let Some(f) = self.group(g).and_then(|g| g.failed.clone()) {
                self.tell_failure_to(g, &f, &[p]);
            }
        }
        self.pump_tx(p);
        self.pump_rx(p);
        self.run_tasks();
    }

    /// Sends something to rank 0: straight, or up the tree. `straight` makes a link to it if there is none.
    pub(super) fn tell_root(&mut self, g: usize, h: Header, straight: bool) {
        let Some(group) = self.group(g) else { return };
        let next = if straight { 0 } else { group.above() };
        let h = Header { total: if h.total == 0 { group.rank as u64 + 1 } else { h.total }, ..h };
        let p = group.members[next];
        self.send_control(p, h, Vec::new());
    }

    /// Sends what rank 0 says further down the tree.
    pub(super) fn tell_below(&mut self, g: usize, h: Header, payload: &[u8]) {
        let Some(group) = self.group(g) else { return };
        let to: Vec<usize> = group.below().iter().map(|r| group.members[*r]).collect();
        for m in to {
            self.send_control(m, h, payload.to_vec());
        }
    }

    /// The rank that a frame began at: its sender, unless it says otherwise.
    pub(super) fn origin(&self, g: usize, sender: usize, h: &Header) -> Option<usize> {
        let n = self.group(g)?.members.len();
        match usize::try_from(h.total).ok()?.checked_sub(1) {
            None => Some(sender),
            Some(r) => (r < n).then_some(r),
        }
    }

    /// This rank leaves, or has seen all others leave: tells everybody.
    pub(super) fn tell_end(&mut self, g: usize, end: End) {
        let Some(group) = self.group(g) else { return };
        let h = Header { offset: end.into(), ..Header::new(Kind::Goodbye, group.id, group.generation) };
        let silent: Vec<(u64, OpDesc)> =
            if end == End::Left(Gone::Finalized) { group.silent.iter().copied().collect() } else { Vec::new() };
        let payload = if silent.is_empty() { Vec::new() } else { postcard::to_allocvec(&silent).unwrap_or_default() };
        self.tell_linked(g, h, &payload);
        let Some(group) = self.group(g).filter(|g| g.sparse) else { return };
        let direct = (0..group.members.len())
            .filter(|r| self.is_linked(group.members[*r]) && !group.overlay.contains(r))
            .map(|r| r as u32)
            .collect();
        let fact = Fact { rank: group.rank as u32, how: end.into(), direct, silent };
        let rank = group.rank;
        if let Some(group) = self.group_mut(g) {
            group.heard[rank] |= if end == End::Farewell { FAREWELL } else { GOODBYE };
            group.news.push(fact);
        }
        self.has_news = true;
        self.spread_news();
    }

    /// The last frame of a group on each link of a sparse one: its ends close when nothing is under way any more.
    pub(super) fn say_last_word(&mut self, g: usize) {
        let Some(group) = self.group_mut(g).filter(|g| g.sparse && !g.ended) else { return };
        group.ended = true;
        let h = Header { offset: End::LastWord.into(), ..Header::new(Kind::Goodbye, group.id, group.generation) };
        self.tell_linked(g, h, &[]);
    }

    /// Whether some linked member has not said its last word.
    pub(super) fn awaits_last_words(&self, g: usize) -> bool {
        self.group(g).is_some_and(|group| {
            group.sparse
                && group.members.iter().enumerate().any(|(r, m)| self.peers[*m].link.is_some() && !group.last_word[r])
        })
    }

    /// Passes on the goodbyes that this pass has brought.
    pub(crate) fn spread_news(&mut self) {
        if !std::mem::take(&mut self.has_news) {
            return;
        }
        for g in 0..self.groups.len() {
            let Some(group) = self.group_mut(g) else { continue };
            let news = std::mem::take(&mut group.news);
            if news.is_empty() {
                continue;
            }
            let h = Header::new(Kind::News, group.id, group.generation);
            let to: Vec<usize> = group.overlay.iter().map(|r| group.members[*r]).collect();
            for part in frames(&news) {
                for m in &to {
                    self.tell(*m, h, part.clone());
                }
            }
        }
    }

    /// News from a neighbour.
    pub(super) fn heard(&mut self, p: usize, g: usize, payload: &[u8]) {
        let Ok(facts) = postcard::from_bytes::<Vec<Fact>>(payload) else {
            return self.corrupt(p, "news that cannot be read".into());
        };
        for f in facts {
            let Some(group) = self.group_mut(g) else { return };
            let (rank, me, n) = (f.rank as usize, group.rank, group.members.len());
            let end = End::from(f.how);
            if rank >= n || end == End::LastWord || f.direct.len() > n || f.silent.len() > SILENT {
                return self.corrupt(p, format!("news of rank {rank} of {n} that makes no sense"));
            }
            let bit = if end == End::Farewell { FAREWELL } else { GOODBYE };
            if group.heard[rank] & bit != 0 || !group.sparse {
                continue;
            }
            group.heard[rank] |= bit;
            group.news.push(f.clone());
            let on_a_link = group.is_neighbour(rank, me) || f.direct.contains(&(me as u32));
            self.has_news = true;
            if rank != me && (bit == FAREWELL || !on_a_link) {
                self.apply_goodbye(g, rank, end, f.silent);
            }
        }
    }

    /// A member has said goodbye.
    pub(super) fn apply_goodbye(&mut self, g: usize, rank: usize, end: End, silent: Vec<(u64, OpDesc)>) {
        self.ended = true;
        let Some(group) = self.group_mut(g) else { return };
        let p = group.members[rank];
        match end {
            // Not its goodbye as well: that may still be on its way over a link, behind data.
            End::Farewell => group.farewell[rank] = true,
            End::LastWord => group.last_word[rank] = true,
            End::Left(gone) => {
                group.gone[rank] = Some(gone);
                if gone == Gone::Finalized && !silent.is_empty() {
                    group.silent_of[rank] = silent;
                }
                match gone {
                    Gone::Finalized => self.miss(g, p),
                    Gone::Closed | Gone::Moved(_) => self.fail_if_needed(g, p, rank),
                }
                self.agree_without_member(g, rank);
            }
        }
    }

    /// Sends the frame of a failure to some members.
    pub(super) fn tell_failure_to(&mut self, g: usize, failure: &super::failure::Failure, to: &[usize]) {
        let Some(group) = self.group(g) else { return };
        let h = Header::new(Kind::Abort, group.id, group.generation);
        let mut payload = postcard::to_allocvec(failure).unwrap_or_default();
        if payload.len() > FRAGMENT {
            // Better a shorter reason than none.
            let cause = failure.error.to_string().chars().take(4096).collect();
            let error = ErrorKind::Aborted { rank: failure.origin, cause }.into();
            let short = super::failure::Failure { origin: failure.origin, error, calls: None };
            payload = postcard::to_allocvec(&short).unwrap_or_default();
        }
        for m in to {
            if *m != self.rank {
                self.tell(*m, h, payload.clone());
            }
        }
    }
}

/// Facts in as few frames as hold them.
fn frames(news: &[Fact]) -> Vec<Vec<u8>> {
    // A fact has at most 64 calls of 32 bytes and a list of ranks; half a frame leaves room for the last one.
    let (mut out, mut from, mut bytes) = (Vec::new(), 0, 0);
    for (i, f) in news.iter().enumerate() {
        bytes += 24 + f.silent.len() * 48 + f.direct.len() * 5;
        if bytes > FRAGMENT / 2 || i + 1 == news.len() {
            out.push(postcard::to_allocvec(&news[from..=i].to_vec()).unwrap_or_default());
            (from, bytes) = (i + 1, 0);
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ends_are_read_as_they_were_written() {
        let left = [Gone::Closed, Gone::Finalized, Gone::Moved(0), Gone::Moved(u32::MAX)].map(End::Left);
        for end in left.into_iter().chain([End::Farewell, End::LastWord]) {
            assert_eq!(End::from(u64::from(end)), end);
        }
        // A peer may send any number.
        assert_eq!(End::from(u64::MAX), End::Left(Gone::Moved(u32::MAX)));
    }
}
