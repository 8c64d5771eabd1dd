//! How a group fails: disagreement, refusals, lost members, deadlines; and how each member puts it.

use std::sync::Arc;

use comm_core::{Error, ErrorKind, OpDesc, Operation, PeerCause, Phase, Time};
use serde::{Deserialize, Serialize};

use super::group::{Gone, Known, REASON};
use super::op::OpId;
use super::state::{COLLECTIVE, Key, State};
use crate::frame::{Header, Kind};

/// Upper bound of what is remembered about calls that this rank has not made yet.
const FUTURE: usize = 1024;

/// Why a group has failed, in a form that every member can put in its own terms.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Failure {
    /// The member that noticed.
    pub(super) origin: usize,
    pub(super) error: Error,
    /// For a mismatch: the call's number and who called what.
    pub(super) calls: Option<(u64, Vec<(usize, OpDesc)>)>,
}

impl Failure {
    /// Whether it is the loss of `rank`.
    pub(super) fn names(&self, rank: usize) -> bool {
        matches!(self.error.kind(), ErrorKind::PeerFailed { rank: lost, .. } if *lost == rank)
    }
}

/// An operation that waits for a member that has finalized.
#[derive(Clone, Copy)]
pub(crate) struct Forsaken {
    pub(super) op: OpId,
    p: usize,
    pub(super) since: Time,
    /// The message that was to go there or come from there.
    message: Option<(Key, OpDesc)>,
}

impl State {
    /// Ranks disagree: `theirs` from endpoint rank `p`, `ours` here.
    pub(crate) fn mismatch(&mut self, g: usize, p: usize, key: Key, theirs: OpDesc, ours: Option<OpDesc>) {
        let Some(group) = self.group(g) else { return };
        let (Some(ours), Some(rank)) = (ours, group.rank_of(p)) else { return };
        let me = group.rank;
        let error = ErrorKind::Mismatch { seq: key.seq, ranks: vec![rank], theirs, ours };
        // A message concerns two ranks only; the others learn that the communicator has failed.
        let calls = (key.kind == COLLECTIVE).then(|| (key.seq, vec![(rank, theirs), (me, ours)]));
        let calls = calls.or_else(|| Some((u64::MAX, vec![(rank, theirs), (me, ours)])));
        self.fail(g, Failure { origin: me, error: error.into(), calls }, true);
    }

    /// A block of an operation whose lengths only its two ranks know, of another length than expected: reported with
    /// this block's lengths as counts. False when it is something else.
    pub(crate) fn lengths_differ(
        &mut self,
        g: usize,
        p: usize,
        key: Key,
        (theirs, total): (OpDesc, u64),
        (ours, len): (OpDesc, u64),
    ) -> bool {
        let size = |d: &OpDesc| d.dtype.map_or(1, |t| t.size() as u64);
        let pairwise = key.kind == COLLECTIVE && ours.operation.is_pairwise() && ours.operation == theirs.operation;
        if !pairwise || ours.dtype != theirs.dtype {
            return false;
        }
        let theirs = OpDesc { count: total / size(&theirs), ..theirs };
        let ours = OpDesc { count: len / size(&ours), ..ours };
        self.mismatch(g, p, key, theirs, Some(ours));
        true
    }

    /// Checks a collective frame for which nothing is posted. True when its data should be kept.
    pub(crate) fn admit_collective(&mut self, p: usize, g: usize, seq: u64, theirs: &OpDesc) -> bool {
        let Some(group) = self.group_mut(g) else { return false };
        if let Some(r) = group.rank_of(p) {
            group.saw(r, seq);
        }
        if group.failed.is_some() || group.over {
            return false;
        }
        let finalizing = group.left.is_some();
        let key = Key { group: g, kind: COLLECTIVE, seq, step: 0 };
        match group.known(seq) {
            Known::Open(op) => {
                let ours = self.ops[op.index as usize].desc;
                if ours.disagreement(theirs).is_some() {
                    self.mismatch(g, p, key, *theirs, Some(ours));
                    return false;
                }
                true
            }
            Known::Closed(ours) => {
                if ours.disagreement(theirs).is_some() {
                    self.mismatch(g, p, key, *theirs, Some(ours));
                }
                false
            }
            // This rank makes no more calls: the peer is in one that does not match finalize.
            Known::Future if finalizing => {
                self.mismatch(g, p, key, *theirs, Some(OpDesc::new(Operation::Finalize)));
                false
            }
            Known::Future => true,
            Known::Refused | Known::Old => false,
        }
    }

    /// The descriptor of a call that this rank has made.
    pub(crate) fn own_call(&self, g: usize, seq: u64) -> Option<OpDesc> {
        let group = self.group(g)?;
        match group.known(seq) {
            Known::Open(op) => Some(self.ops[op.index as usize].desc),
            Known::Closed(d) => Some(d),
            // Finalize stands for every call that this rank will not make; `u64::MAX` is no call, see `mismatch`.
            Known::Future if group.left == Some(Gone::Finalized) && seq != u64::MAX => {
                Some(OpDesc::new(Operation::Finalize))
            }
            _ => None,
        }
    }

    /// Fails a group with an error that reads the same everywhere.
    pub(crate) fn fail_group(&mut self, g: usize, error: Error, tell: bool) {
        let Some(origin) = self.group(g).map(|g| g.rank) else { return };
        self.fail(g, Failure { origin, error, calls: None }, tell);
    }

    /// Reports differing calls that the coordinator found.
    pub(crate) fn fail_calls(&mut self, g: usize, seq: u64, calls: Vec<(usize, OpDesc)>) {
        let Some(origin) = self.group(g).map(|g| g.rank) else { return };
        let ours = self.own_call(g, seq).or_else(|| calls.first().map(|c| c.1));
        let Some(ours) = ours else { return };
        let other = calls.iter().find(|(_, d)| ours.disagreement(d).is_some());
        let Some((_, theirs)) = other else { return };
        let ranks = calls.iter().filter(|(_, d)| theirs.disagreement(d).is_none()).map(|(r, _)| *r).collect();
        let error = ErrorKind::Mismatch { seq, ranks, theirs: *theirs, ours }.into();
        self.fail(g, Failure { origin, error, calls: Some((seq, calls)) }, true);
    }

    pub(crate) fn fail(&mut self, g: usize, failure: Failure, tell: bool) {
        let Some(group) = self.group_mut(g) else { return };
        if group.failed.is_some() || group.over {
            return;
        }
        tracing::debug!(comm = %group.name, rank = group.rank, error = %failure.error, "communicator failed");
        group.failed = Some(failure.clone());
        self.end_ops(g);
        if tell {
            self.tell_failure(g, &failure);
        }
    }

    /// Ends what is in flight with the group's failure.
    pub(super) fn end_ops(&mut self, g: usize) {
        let ops: Vec<OpId> = (0..self.ops.len())
            .filter(|i| self.ops[*i].live && self.ops[*i].group == g && self.ops[*i].result.is_none())
            .map(|i| OpId { index: i as u32, life: self.ops[i].life })
            .collect();
        for op in ops {
            let slot = &self.ops[op.index as usize];
            let own = slot.seq.map(|s| (s, slot.desc));
            let error = self.localized(g, own);
            self.finish_op(op, Err(error));
        }
        for p in 0..self.peers.len() {
            self.drop_unexpected(p, |u| u.key.group == g);
            self.peers[p].announced.retain(|(k, ..)| k.group != g);
        }
        self.ended = true;
        self.moved = true;
    }

    /// Local end: what is in flight fails, the others are told and not waited for.
    pub(crate) fn close_group(&mut self, g: usize) {
        self.say_goodbye(g, Gone::Closed);
        if let Some(group) = self.group_mut(g)
            && group.failed.is_none()
        {
            group.failed = Some(Failure { origin: group.rank, error: ErrorKind::Finalized.into(), calls: None });
            self.end_ops(g);
        }
    }

    /// Another membership, of generation `theirs`, has taken the group's place for this rank: as
    /// [`close_group`](Self::close_group), and the others know why.
    pub(crate) fn leave_for(&mut self, g: usize, theirs: u32) {
        self.say_goodbye(g, Gone::Moved(theirs));
        if let Some(group) = self.group_mut(g)
            && group.failed.is_none()
        {
            let error = ErrorKind::StaleGeneration { ours: group.generation, theirs, rank: None }.into();
            group.failed = Some(Failure { origin: group.rank, error, calls: None });
            self.end_ops(g);
        }
    }

    pub(super) fn tell_failure(&mut self, g: usize, failure: &Failure) {
        let Some(members) = self.group(g).map(|g| g.members.clone()) else { return };
        self.tell_failure_to(g, failure, &members);
    }

    /// The group's failure as this rank should see it in a call (number and descriptor), or between calls.
    pub(crate) fn localized(&self, g: usize, own: Option<(u64, OpDesc)>) -> Error {
        let Some((group, f)) = self.group(g).and_then(|g| g.failed.as_ref().map(|f| (g, f))) else {
            return ErrorKind::Finalized.into();
        };
        let told = || -> Error {
            let cause = match &f.calls {
                // "This rank" would be another one there.
                Some((seq, calls)) => list_calls(*seq, calls),
                None => f.error.brief(),
            };
            ErrorKind::Aborted { rank: f.origin, cause }.into()
        };
        if let Some((seq, calls)) = &f.calls {
            if f.origin == group.rank && *seq == u64::MAX {
                return f.error.clone();
            }
            let listed = calls.iter().find(|(r, _)| *r == group.rank).map(|(_, d)| *d);
            let ours = match (own, listed) {
                // Lengths between two ranks are in the list only.
                (_, Some(d)) if d.operation.is_pairwise() => Some(d),
                (Some((s, d)), _) if s == *seq => Some(d),
                // A message's two ends: the other one is the rank that did not notice.
                _ => self.own_call(g, *seq).or(listed),
            };
            let Some(ours) = ours else { return told() };
            let others = || calls.iter().filter(|(r, _)| *r != group.rank);
            // Counts of such operations may well differ, and count only where nothing else does.
            let length = |d: &OpDesc| listed.is_some() && ours.operation.is_pairwise() && ours.count != d.count;
            let other = others().find(|(_, d)| differs(*seq, &ours, d)).or_else(|| others().find(|(_, d)| length(d)));
            let Some((_, theirs)) = other else { return told() };
            let ranks = calls.iter().filter(|(r, d)| *r != group.rank && d == theirs).map(|(r, _)| *r).collect();
            // A message's own number is in the error; `seq` marks that it was no collective.
            let seq = if let ErrorKind::Mismatch { seq, .. } = f.error.kind() { *seq } else { *seq };
            return ErrorKind::Mismatch { seq, ranks, theirs: *theirs, ours }.into();
        }
        match f.error.kind() {
            ErrorKind::PeerFailed { rank, .. } if *rank == group.rank => told(),
            ErrorKind::PeerFailed { .. }
            | ErrorKind::Corrupt { .. }
            | ErrorKind::Aborted { .. }
            // These say the same of all members: that there is a newer communicator, or that it came to none.
            | ErrorKind::StaleGeneration { .. }
            | ErrorKind::Bootstrap { .. } => f.error.kind().clone().into(),
            _ if f.origin == group.rank => f.error.clone(),
            // All who have called a monitored barrier learn the same, in it and later, whoever's time was up first.
            ErrorKind::Timeout { missing, .. } if !missing.contains(&group.rank) && self.was_in_barrier(g, own, &f.error) => {
                f.error.kind().clone().into()
            }
            _ => told(),
        }
    }

    /// Whether an error comes from a monitored barrier that this rank has called: in `own`, which it is about to see the
    /// error in, or before.
    fn was_in_barrier(&self, g: usize, own: Option<(u64, OpDesc)>, error: &Error) -> bool {
        let barrier = Operation::MonitoredBarrier;
        let Some(seq) = error.context().seq.filter(|_| error.context().op.as_deref() == Some(barrier.name())) else {
            return false;
        };
        let here = own.filter(|(s, _)| *s == seq).map(|(_, d)| d).or_else(|| self.own_call(g, seq));
        here.is_some_and(|d| d.operation == barrier)
    }

    /// The failure as finalize should put it, which stands for a call that this rank has not made.
    pub(crate) fn localized_at_finalize(&self, g: usize) -> Error {
        let seq = self.group(g).and_then(|g| g.failed.as_ref()?.calls.as_ref()).map(|(seq, _)| *seq);
        let own = seq.filter(|s| *s != u64::MAX && self.own_call(g, *s).is_none());
        self.localized(g, own.map(|s| (s, OpDesc::new(Operation::Finalize))))
    }

    /// A member's connection is over.
    pub(crate) fn blame(&mut self, g: usize, p: usize, cause: PeerCause) {
        let Some(group) = self.group(g) else { return };
        let Some(rank) = group.rank_of(p) else { return };
        if group.over {
            return;
        }
        match group.gone[rank] {
            None => self.fail_group(g, ErrorKind::PeerFailed { rank, cause }.into(), true),
            // It has not got to its end: all goodbyes and farewells.
            Some(Gone::Finalized) if group.left.is_some() && !group.farewell[rank] => {
                self.fail_group(g, ErrorKind::PeerFailed { rank, cause }.into(), true);
            }
            Some(_) => self.fail_if_needed(g, p, rank),
        }
    }

    /// `p` is given up in a group that has failed with something else, which tells nobody anything new: it itself has to
    /// know, or it finds itself alone and takes itself for the only survivor.
    pub(super) fn tell_given_up(&mut self, g: usize, p: usize) {
        let Some(group) = self.group(g).filter(|g| g.failed.is_some() && !g.over) else { return };
        let Some(rank) = group.rank_of(p) else { return };
        let error = ErrorKind::PeerFailed { rank, cause: PeerCause::NoHeartbeat }.into();
        let failure = Failure { origin: group.rank, error, calls: None };
        self.tell_failure_to(g, &failure, &[p]);
    }

    /// A member has said goodbye: calls that still wait for it fail; others may go on.
    pub(super) fn fail_if_needed(&mut self, g: usize, p: usize, rank: usize) {
        let peer = &self.peers[p];
        let waits = peer.posted.iter().any(|x| x.key.group == g) || peer.tx.has_data(g);
        if waits && let Some(group) = self.group(g) {
            let error = group.gone[rank].unwrap_or(Gone::Closed).error(rank, group.generation);
            self.fail_group(g, error, true);
        }
    }

    /// A member has finalized. A call here that waits for it was made in error, but the peer's last calls may
    /// explain it better: whoever waits reports its call at once, and blames the peer if no better news comes.
    pub(super) fn miss(&mut self, g: usize, p: usize) {
        let waiting: Vec<OpId> = (0..self.ops.len())
            .filter(|i| self.ops[*i].live && self.ops[*i].group == g && self.ops[*i].result.is_none())
            .map(|i| OpId { index: i as u32, life: self.ops[i].life })
            .filter(|op| self.peers[p].posted.iter().any(|x| x.op == *op) || self.peers[p].tx.has_op(*op))
            .collect();
        for op in waiting {
            self.forsaken(op, p);
        }
    }

    /// Operation `op` waits for a member that has finalized.
    pub(super) fn forsaken(&mut self, op: OpId, p: usize) {
        if self.forsaken.iter().any(|f| f.op == op) {
            return;
        }
        let now = self.now();
        self.forsaken.push(Forsaken { op, p, since: now, message: None });
        if self.slot(op).is_some_and(|s| !s.reported) {
            self.report(op);
        }
    }

    /// Which message it is that finds its peer gone.
    pub(super) fn forsaken_message(&mut self, op: OpId, key: Key, desc: OpDesc) {
        if let Some(f) = self.forsaken.iter_mut().find(|f| f.op == op) {
            f.message.get_or_insert((key, desc));
        }
    }

    /// Blames members that have finalized for the calls that still wait for them.
    pub(crate) fn check_forsaken(&mut self, now: Time) {
        while let Some(Forsaken { op, p, since, message }) = self.forsaken.first().copied()
            && since.after(super::state::LAST_WORD) <= now
        {
            self.forsaken.remove(0);
            let Some(g) = self.slot(op).filter(|s| s.result.is_none()).map(|s| s.group) else { continue };
            let Some(rank) = self.group(g).and_then(|g| g.rank_of(p)) else { continue };
            // A message has one counterpart, which the peer has not called and will not call.
            let message = message.or_else(|| self.waits_for(op, p)).filter(|(key, _)| key.kind != COLLECTIVE);
            if let Some((key, ours)) = message {
                self.mismatch(g, p, key, OpDesc::new(Operation::Finalize), Some(ours));
            } else {
                self.fail_group(g, ErrorKind::PeerFailed { rank, cause: PeerCause::Closed }.into(), true);
            }
        }
    }

    /// This rank takes no part in call `seq`.
    pub(crate) fn refuse(&mut self, g: usize, seq: u64, desc: OpDesc, reason: &str) {
        let Some(group) = self.group_mut(g) else { return };
        if group.failed.is_some() || group.left.is_some() {
            return;
        }
        group.refused.remove(&seq);
        group.remember(seq, desc, true);
        let h = Header { seq, desc, ..Header::new(Kind::Refuse, group.id, group.generation) };
        let me = group.rank;
        group.is_first(Kind::Refuse, me, seq);
        self.drop_call(g, seq);
        let mut text = reason.as_bytes().to_vec();
        text.truncate(REASON);
        let h = Header { total: me as u64 + 1, ..h };
        self.tell_linked(g, h, &text);
    }

    pub(super) fn refused_by(&mut self, g: usize, rank: usize, seq: u64, reason: String) {
        let Some(group) = self.group_mut(g) else { return };
        group.saw(rank, seq);
        match group.known(seq) {
            Known::Open(op) => self.finish_op(op, Err(ErrorKind::PeerRefused { rank, reason }.into())),
            Known::Future if group.refused.len() < FUTURE => {
                group.refused.insert(seq, (rank, reason));
            }
            Known::Future => {
                let cause = format!("rank {rank} has refused more than {FUTURE} calls that this rank has not made yet");
                let me = group.rank;
                self.fail_group(g, ErrorKind::Aborted { rank: me, cause }.into(), true);
            }
            _ => {}
        }
    }

    /// Ends the calls whose time is up.
    pub(crate) fn check_deadlines(&mut self, now: Time) {
        for i in 0..self.ops.len() {
            let s = &self.ops[i];
            if !s.live || s.result.is_some() || s.deadline > now {
                continue;
            }
            let g = s.group;
            let op = OpId { index: i as u32, life: s.life };
            let (missing, unmatched) = match s.seq {
                Some(seq) => {
                    let missing = self.group(g).map(|g| g.missing(seq)).unwrap_or_default();
                    // One that has arrived may have stopped on the way.
                    let waits = if missing.is_empty() { self.data_missing(op) } else { Vec::new() };
                    (missing, waits)
                }
                None => (self.partners(op), self.unmatched(op)),
            };
            let s = &self.ops[i];
            let kind = ErrorKind::Timeout { phase: Phase::Running, elapsed: now.since(s.started), missing, unmatched };
            let name = self.group(g).map(|g| (Arc::clone(&g.name), g.rank, g.members.len()));
            let (desc, seq) = (s.desc, s.seq);
            let error = Error::new(kind).with_context(|| comm_core::Context {
                comm: name.as_ref().map(|n| Arc::clone(&n.0)),
                rank: name.as_ref().map(|n| (n.1, n.2)),
                op: Some(desc.operation.name().into()),
                seq,
            });
            self.fail_group(g, error.clone(), true);
            // A group that is over does not fail any more; the call ends all the same.
            self.finish_op(op, Err(error));
        }
    }
}

/// Whether two calls differ: for collectives by the table, for messages in type or count.
fn differs(seq: u64, a: &OpDesc, b: &OpDesc) -> bool {
    if seq == u64::MAX { a.dtype != b.dtype || a.count != b.count } else { a.disagreement(b).is_some() }
}

/// Who called what, for a rank that took no part.
fn list_calls(seq: u64, calls: &[(usize, OpDesc)]) -> String {
    const SHOWN: usize = 8;
    let mut text = if seq == u64::MAX {
        "messages do not match".to_owned()
    } else {
        format!("calls do not match at collective {seq}")
    };
    for (i, (rank, desc)) in calls.iter().take(SHOWN).enumerate() {
        let sep = if i == 0 { ':' } else { ',' };
        text.push_str(&format!("{sep} rank {rank} called {desc}"));
    }
    if calls.len() > SHOWN {
        text.push_str(&format!(" and {} more", calls.len() - SHOWN));
    }
    text
}
