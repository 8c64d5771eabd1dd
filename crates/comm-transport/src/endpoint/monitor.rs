//! Who has arrived at which call, for errors that name ranks, and for mismatches that no data frame shows.
//!
//! Two ranks that both think they are the root of a reduction wait for each other and exchange no
//! data. So a call that has been open for [`SUSPICIOUS`] is reported to the group's rank 0, which asks
//! all others about it, compares the answers, and tells the waiting ranks who has arrived. A program
//! whose calls are short never sends any of this. If rank 0 itself does not answer, the waiting ranks
//! tell each other.
//!
//! Of the calls that a rank has open only the [`OLDEST`] are reported: the others wait for them anyway. And
//! only a report makes rank 0 ask, never an answer, so that a question asked once costs one answer per rank
//! even if rank 0 has meanwhile forgotten the call.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use comm_core::{ErrorKind, OpDesc, Time};

use super::op::OpId;
use super::state::State;
use crate::frame::{Header, Kind};

/// Time after which an open call is reported.
const SUSPICIOUS: Duration = Duration::from_millis(100);
/// How many of its open calls a rank reports.
pub(crate) const OLDEST: usize = 8;
/// Time after which a call of which rank 0 says nothing is reported to everybody.
const UNANSWERED: Duration = Duration::from_millis(160);
/// The same in a large group, in which news takes several steps and whose ranks may have few cores among them.
const SUSPICIOUS_FAR: Duration = Duration::from_millis(250);
const UNANSWERED_FAR: Duration = Duration::from_millis(1000);
/// What a group has to be larger than for that.
const NEAR: usize = 16;
/// In `step` of a status that is not only for rank 0.
const CRY: u32 = 1;
/// Groups in which everybody may tell everybody.
const SMALL: usize = 256;
/// Least interval between news to the waiting ranks.
const NEWS: Duration = Duration::from_millis(20);
/// Calls that are followed at a time.
const CALLS: usize = 64;
/// Published hashes that are remembered.
const PUBLISHED: usize = 1024;

#[derive(Default)]
pub(crate) struct Monitor {
    /// Rank 0 only: who called what.
    calls: BTreeMap<u64, Vec<Option<OpDesc>>>,
    /// Rank 0 only: calls whose list has changed.
    changed: BTreeSet<u64>,
    sent: Time,
    /// Calls that rank 0 wants to hear about when they are made.
    queries: BTreeSet<u64>,
    /// Rank 0 only: the first published hash after each call, and whose it was.
    published: BTreeMap<u64, (usize, u64)>,
    /// What rank 0 said.
    arrived: BTreeMap<u64, Vec<usize>>,
}

impl Monitor {
    pub(crate) fn take_query(&mut self, seq: u64) -> bool {
        !self.queries.is_empty() && self.queries.remove(&seq)
    }

    /// Remembers that rank 0 wants to hear of a call.
    fn want(&mut self, seq: u64) {
        self.queries.insert(seq);
        while self.queries.len() > CALLS {
            self.queries.pop_first();
        }
    }

    pub(crate) fn learn(&mut self, seq: u64, ranks: Vec<usize>) {
        self.arrived.insert(seq, ranks);
        while self.arrived.len() > CALLS {
            self.arrived.pop_first();
        }
    }

    pub(crate) fn has_arrived(&self, seq: u64, rank: usize) -> bool {
        self.arrived.get(&seq).is_some_and(|l| l.contains(&rank))
            || self.calls.get(&seq).is_some_and(|l| l.get(rank).is_some_and(Option::is_some))
    }
}

fn is_far(group: &super::group::Group) -> bool {
    group.sparse && group.members.len() > NEAR
}

impl State {
    /// Reports an open call to rank 0.
    pub(crate) fn report(&mut self, op: OpId) {
        let Some(slot) = self.slot(op) else { return };
        slot.reported = true;
        let (g, desc) = (slot.group, slot.desc);
        let Some(seq) = slot.seq else { return };
        self.tell_status(g, seq, desc, true);
    }

    /// Tells rank 0 about a call. `asks`: nobody has asked; this rank wonders where the others are.
    pub(crate) fn tell_status(&mut self, g: usize, seq: u64, desc: OpDesc, asks: bool) {
        let Some(group) = self.group(g) else { return };
        if group.rank == 0 {
            return self.status(g, 0, seq, desc, asks);
        }
        let offset = u64::from(asks);
        let h = Header { seq, desc, offset, ..Header::new(Kind::Status, group.id, group.generation) };
        self.tell_root(g, h, false);
    }

    /// A status has come: for rank 0, on its way to it, or for everybody.
    pub(super) fn status_frame(&mut self, g: usize, p: usize, sender: usize, h: Header) {
        let Some(origin) = self.origin(g, sender, &h) else { return };
        let Some(group) = self.group_mut(g) else { return };
        let asks = h.offset == 1;
        if group.rank == 0 || !group.sparse {
            self.status(g, origin, h.seq, h.desc, asks);
        } else if h.step != CRY {
            self.tell_root(g, Header { total: origin as u64 + 1, ..h }, false);
        } else if group.is_first(Kind::Status, origin, h.seq) {
            self.relay(g, p, Header { total: origin as u64 + 1, ..h }, &[]);
            self.status(g, origin, h.seq, h.desc, asks);
        }
    }

    /// Rank 0: member `rank` is in, or has made, call `seq`.
    pub(crate) fn status(&mut self, g: usize, rank: usize, seq: u64, desc: OpDesc, asks: bool) {
        let own = self.own_call(g, seq);
        let Some(group) = self.group_mut(g) else { return };
        if group.failed.is_some() {
            return;
        }
        group.saw(rank, seq);
        if group.rank != 0 {
            // Rank 0 is silent, so its part falls to everybody.
            let differing = own.filter(|own| own.disagreement(&desc).is_some());
            if let Some(own) = differing {
                let mine = (group.rank, own);
                self.fail_calls(g, seq, vec![(rank, desc), mine]);
            }
            return;
        }
        let n = group.members.len();
        let first = !group.monitor.calls.contains_key(&seq);
        // An answer about a call that is not followed any more, or a report that crossed the last answer.
        if first && (!asks || group.monitor.arrived.get(&seq).is_some_and(|l| l.len() == n)) {
            return;
        }
        let list = group.monitor.calls.entry(seq).or_insert_with(|| vec![None; n]);
        list[rank] = Some(desc);
        if let Some(own) = own {
            list[0] = Some(own);
        }
        let known: Vec<(usize, OpDesc)> = list.iter().enumerate().filter_map(|(r, d)| d.map(|d| (r, d))).collect();
        if known.iter().any(|(_, d)| d.disagreement(&desc).is_some()) {
            return self.fail_calls(g, seq, known);
        }
        if known.len() == n {
            group.monitor.calls.remove(&seq);
            group.monitor.changed.remove(&seq);
            let all: Vec<usize> = (0..n).collect();
            group.monitor.learn(seq, all.clone());
            return self.tell_arrivals(g, seq, &all);
        }
        group.monitor.changed.insert(seq);
        while group.monitor.calls.len() > CALLS {
            group.monitor.calls.pop_first();
        }
        if first {
            if own.is_none() {
                group.monitor.want(seq);
            }
            let h = Header { seq, ..Header::new(Kind::Query, group.id, group.generation) };
            self.tell_below(g, h, &[]);
        }
    }

    /// A member is asked about a call.
    pub(crate) fn queried(&mut self, g: usize, seq: u64) {
        if let Some(desc) = self.own_call(g, seq) {
            return self.tell_status(g, seq, desc, false);
        }
        if let Some(group) = self.group_mut(g) {
            group.monitor.want(seq);
        }
    }

    /// Tells rank 0 the hash over this rank's calls.
    pub(crate) fn publish(&mut self, g: usize, seq: u64, hash: u64) {
        let Some(group) = self.group(g) else { return };
        if group.rank == 0 {
            return self.published(g, 0, seq, hash);
        }
        let h = Header { seq, offset: hash, ..Header::new(Kind::Publish, group.id, group.generation) };
        self.tell_root(g, h, false);
    }

    /// Rank 0: compares a member's hash with the first one published after the same call.
    pub(crate) fn published(&mut self, g: usize, rank: usize, seq: u64, hash: u64) {
        let Some(group) = self.group_mut(g) else { return };
        let (first, theirs) = *group.monitor.published.entry(seq).or_insert((rank, hash));
        while group.monitor.published.len() > PUBLISHED {
            group.monitor.published.pop_first();
        }
        if theirs != hash {
            let cause = format!("ranks {first} and {rank} have made different calls up to collective {seq}");
            self.fail_group(g, ErrorKind::Aborted { rank: 0, cause }.into(), true);
        }
    }

    fn tell_arrivals(&mut self, g: usize, seq: u64, ranks: &[usize]) {
        let Some(group) = self.group(g) else { return };
        let h = Header { seq, ..Header::new(Kind::Arrivals, group.id, group.generation) };
        let payload = postcard::to_allocvec(ranks).unwrap_or_default();
        if group.sparse {
            self.tell_below(g, h, &payload);
        }
        // In a sparse group this reaches those who have called straight because the tree is broken somewhere.
        let to: Vec<usize> = self
            .group(g)
            .map(|g| ranks.iter().filter(|r| **r != 0).map(|r| g.members[*r]).collect())
            .unwrap_or_default();
        for m in to {
            self.tell(m, h, payload.clone());
        }
    }

    /// When the call in slot `i` is to be reported, if it is.
    pub(crate) fn reports_at(&self, i: usize) -> Option<Time> {
        let s = &self.ops[i];
        if !s.live || s.result.is_some() || s.reported || s.seq.is_none() {
            return None;
        }
        let op = OpId { index: i as u32, life: s.life };
        self.group(s.group)
            .filter(|g| g.is_among_oldest(op, OLDEST))
            .map(|g| s.started.after(if is_far(g) { SUSPICIOUS_FAR } else { SUSPICIOUS }))
    }

    /// When everybody is to hear of the call in slot `i` because rank 0 says nothing, if they are.
    pub(crate) fn cries_at(&self, i: usize) -> Option<Time> {
        let s = &self.ops[i];
        if !s.live || s.result.is_some() || !s.reported || s.cried || s.seq.is_none() {
            return None;
        }
        let far = self.group(s.group).is_some_and(is_far);
        Some(s.started.after(if far { UNANSWERED_FAR } else { UNANSWERED }))
    }

    pub(crate) fn monitor_tick(&mut self, now: Time) {
        for i in 0..self.ops.len() {
            if self.reports_at(i).is_some_and(|t| t <= now) {
                self.report(OpId { index: i as u32, life: self.ops[i].life });
            }
        }
        for i in 0..self.ops.len() {
            if self.cries_at(i).is_some_and(|t| t <= now) {
                self.cry(i);
            }
        }
        for g in 0..self.groups.len() {
            let Some(group) = self.group_mut(g) else { continue };
            if group.monitor.changed.is_empty() || group.monitor.sent.after(NEWS) > now {
                continue;
            }
            group.monitor.sent = now;
            let changed = std::mem::take(&mut group.monitor.changed);
            for seq in changed {
                let ranks: Vec<usize> = self
                    .group(g)
                    .and_then(|g| g.monitor.calls.get(&seq))
                    .map(|l| l.iter().enumerate().filter_map(|(r, d)| d.map(|_| r)).collect())
                    .unwrap_or_default();
                self.tell_arrivals(g, seq, &ranks);
            }
        }
    }

    /// Tells everybody that this rank waits in a call, unless rank 0 has taken it up.
    fn cry(&mut self, op: usize) {
        let slot = &mut self.ops[op];
        slot.cried = true;
        let (g, desc) = (slot.group, slot.desc);
        let (Some(seq), Some(group)) = (slot.seq, self.group(g)) else { return };
        if group.rank == 0 || group.members.len() > SMALL || group.monitor.arrived.contains_key(&seq) {
            return;
        }
        let total = group.rank as u64 + 1;
        let h = Header { seq, desc, step: CRY, total, ..Header::new(Kind::Status, group.id, group.generation) };
        let sparse = group.sparse;
        let all = if sparse { &group.overlay } else { &(0..group.members.len()).collect() };
        let others: Vec<usize> =
            all.iter().filter(|r| **r != 0 && **r != group.rank).map(|r| group.members[*r]).collect();
        for m in others {
            self.send_control(m, h, Vec::new());
        }
        if sparse {
            // Somebody on the way to rank 0 may be stopped.
            self.tell_root(g, Header { step: 0, offset: 1, ..h }, true);
        }
    }

    /// Tells everybody at once that this rank is in a monitored barrier, whose time may be too short for anything else.
    /// In a group that is too large for that, rank 0 is asked at once.
    pub(crate) fn announce(&mut self, op: OpId) {
        let Some(slot) = self.slot(op) else { return };
        let (g, desc) = (slot.group, slot.desc);
        let (Some(seq), Some(group)) = (slot.seq, self.group(g)) else { return };
        if group.members.len() > SMALL {
            return self.report(op);
        }
        let total = group.rank as u64 + 1;
        let h = Header { seq, desc, step: CRY, total, ..Header::new(Kind::Status, group.id, group.generation) };
        let all = if group.sparse { &group.overlay } else { &(0..group.members.len()).collect() };
        let others: Vec<usize> = all.iter().filter(|r| **r != group.rank).map(|r| group.members[*r]).collect();
        for m in others {
            self.send_control(m, h, Vec::new());
        }
    }

    pub(crate) fn monitor_timer(&self) -> Option<Time> {
        self.groups.iter().flatten().filter(|g| !g.monitor.changed.is_empty()).map(|g| g.monitor.sent.after(NEWS)).min()
    }
}
