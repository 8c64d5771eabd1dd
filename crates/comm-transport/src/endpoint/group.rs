//! Groups: the members of one communicator on an endpoint, what they have called, and how they fail.
//!
//! The life of a collective call `seq` here: *future* (only peers' frames know it), *open* (an
//! operation exists), *closed* (in the history, with its descriptor, for late frames), *old*.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use comm_core::{Error, ErrorKind, OpDesc, Operation, PeerCause, Phase, Result, Time};
use serde::{Deserialize, Serialize};

use super::monitor::Monitor;
use super::op::{OpId, OpSlot, PieceId, Sink};
use super::state::{COLLECTIVE, Chan, Key, Posted, State};
use super::tx::SendItem;
use crate::frame::{FRAGMENT, Header, Kind};

/// How many closed calls are remembered to check late frames against.
const HISTORY: usize = 512;
/// Upper bound of what is remembered about calls that this rank has not made yet.
const FUTURE: usize = 1024;
/// Messages that one peer may have waiting in the control inbox.
const INBOX: usize = 4096;
/// And their bytes: two of the longest.
const INBOX_BYTES: usize = 128 << 20;

/// Forgotten groups whose late frames are recognised.
const DEAD: usize = 1024;

/// Longest text of a refusal that is sent or kept.
pub(super) const REASON: usize = 4096;

/// How a member left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Gone {
    Finalized,
    Closed,
}

struct Closed {
    seq: u64,
    desc: OpDesc,
    refused: bool,
}

/// What is known about a collective call.
pub(crate) enum Known {
    Open(OpId),
    Closed(OpDesc),
    /// Refused here or elsewhere: its frames are of no interest.
    Refused,
    Future,
    Old,
}

/// Why a group has failed, in a form that every member can put in its own terms.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Failure {
    /// The member that noticed.
    origin: usize,
    error: Error,
    /// For a mismatch: the call's number and who called what.
    calls: Option<(u64, Vec<(usize, OpDesc)>)>,
}

/// What a new group is made from.
#[derive(Clone, Debug)]
pub struct GroupSpec {
    /// The communicator's id: equal on all members, different from every other.
    pub id: u64,
    /// Membership generation.
    pub generation: u32,
    /// The communicator's name.
    pub name: Arc<str>,
    /// Members as endpoint ranks, in the group's rank order; includes this rank.
    pub members: Vec<usize>,
    /// Bytes per peer and kind that may be sent before the receiver has consumed them.
    pub window: u64,
}

pub(crate) struct Group {
    pub(crate) id: u64,
    pub(crate) generation: u32,
    pub(crate) name: Arc<str>,
    pub(crate) members: Vec<usize>,
    ranks: Vec<Option<usize>>,
    pub(crate) rank: usize,
    pub(crate) window: u64,
    pub(crate) failed: Option<Failure>,
    open: Vec<(u64, OpId)>,
    history: VecDeque<Closed>,
    newest: Option<u64>,
    refused: BTreeMap<u64, (usize, String)>,
    pub(crate) refused_p2p: Vec<super::p2p::RefusedP2p>,
    gone: Vec<Option<Gone>>,
    /// Members that have said that all goodbyes reached them and nothing was wrong.
    farewell: Vec<bool>,
    left: Option<Gone>,
    /// This rank has sent its farewell.
    parted: bool,
    /// Nothing that arrives matters any more: closed, or finalize has returned.
    over: bool,
    /// Highest collective call that each member is known to have made, plus one.
    seen: Vec<u64>,
    inbox: HashMap<(usize, u32), VecDeque<Vec<u8>>>,
    inbox_count: Vec<usize>,
    inbox_bytes: Vec<usize>,
    parts: HashMap<usize, Vec<u8>>,
    pub(crate) monitor: Monitor,
}

impl Group {
    pub(crate) fn rank_of(&self, endpoint_rank: usize) -> Option<usize> {
        self.ranks.get(endpoint_rank).copied().flatten()
    }

    pub(crate) fn known(&self, seq: u64) -> Known {
        if let Some((_, op)) = self.open.iter().find(|(s, _)| *s == seq) {
            return Known::Open(*op);
        }
        if self.refused.contains_key(&seq) {
            return Known::Refused;
        }
        if let Some(c) = self.history.iter().rev().find(|c| c.seq == seq) {
            return if c.refused { Known::Refused } else { Known::Closed(c.desc) };
        }
        match self.newest {
            Some(n) if n.saturating_sub(seq) >= HISTORY as u64 => Known::Old,
            _ => Known::Future,
        }
    }

    fn remember(&mut self, seq: u64, desc: OpDesc, refused: bool) {
        if self.history.len() == HISTORY {
            self.history.pop_front();
        }
        self.history.push_back(Closed { seq, desc, refused });
        self.newest = Some(self.newest.map_or(seq, |n| n.max(seq)));
    }

    /// Members that are not known to have made call `seq`.
    pub(crate) fn missing(&self, seq: u64) -> Vec<usize> {
        (0..self.members.len())
            .filter(|r| *r != self.rank && self.seen[*r] <= seq && !self.monitor.has_arrived(seq, *r))
            .collect()
    }

    pub(crate) fn saw(&mut self, rank: usize, seq: u64) {
        // A peer may send any number.
        self.seen[rank] = self.seen[rank].max(seq.saturating_add(1));
    }
}

impl State {
    pub(crate) fn group(&self, g: usize) -> Option<&Group> {
        self.groups.get(g).and_then(Option::as_ref)
    }

    pub(crate) fn group_mut(&mut self, g: usize) -> Option<&mut Group> {
        self.groups.get_mut(g).and_then(Option::as_mut)
    }

    pub(crate) fn create_group(&mut self, spec: GroupSpec) -> Result<usize> {
        let n = spec.members.len();
        let Some(rank) = spec.members.iter().position(|m| *m == self.rank) else {
            return Err(Error::invalid(format!(
                "the members {:?} do not include this rank {}",
                spec.members, self.rank
            )));
        };
        let mut ranks = vec![None; self.peers.len()];
        for (r, m) in spec.members.iter().enumerate() {
            match ranks.get_mut(*m) {
                Some(slot @ None) => *slot = Some(r),
                _ => {
                    return Err(Error::invalid(format!(
                        "the members {:?} are not distinct ranks of this endpoint",
                        spec.members
                    )));
                }
            }
        }
        if self.by_id.contains_key(&spec.id) {
            return Err(Error::invalid(format!("a communicator with the id of '{}' exists already", spec.name)));
        }
        let group = Group {
            id: spec.id,
            generation: spec.generation,
            name: spec.name,
            members: spec.members,
            ranks,
            rank,
            window: spec.window.max(2 * FRAGMENT as u64),
            failed: None,
            open: Vec::new(),
            history: VecDeque::new(),
            newest: None,
            refused: BTreeMap::new(),
            refused_p2p: Vec::new(),
            gone: vec![None; n],
            farewell: vec![false; n],
            left: None,
            parted: false,
            over: false,
            seen: vec![0; n],
            inbox: HashMap::new(),
            inbox_count: vec![0; n],
            inbox_bytes: vec![0; n],
            parts: HashMap::new(),
            monitor: Monitor::default(),
        };
        let window = group.window;
        let g = self.groups.iter().position(Option::is_none).unwrap_or_else(|| {
            self.groups.push(None);
            self.groups.len() - 1
        });
        self.by_id.insert(group.id, g);
        self.groups[g] = Some(group);
        let fresh = Chan { credit: [window; 2], owed: [0; 2], held: [0; 2] };
        for peer in &mut self.peers {
            peer.chans.resize(self.groups.len(), fresh);
            peer.chans[g] = fresh;
        }
        // Frames may have come before the group.
        let id = self.groups[g].as_ref().map(|g| g.id);
        self.dead.retain(|d| Some(*d) != id);
        for (p, h, payload) in std::mem::take(&mut self.orphans) {
            if Some(h.comm) == id {
                self.peers[p].orphaned -= payload.len() as u64 + super::state::OVERHEAD;
                self.adopt(p, g, h, payload);
            } else {
                self.orphans.push_back((p, h, payload));
            }
        }
        // A member may be gone already.
        for m in self.groups[g].as_ref().map(|g| g.members.clone()).unwrap_or_default() {
            if m != self.rank && self.peers[m].link.is_none() {
                let cause = self.peers[m].down.unwrap_or(PeerCause::Killed);
                self.blame(g, m, cause);
            }
        }
        Ok(g)
    }

    /// Forgets a group. Its operations must have ended.
    pub(crate) fn drop_group(&mut self, g: usize) {
        let Some(group) = self.groups[g].take() else { return };
        self.by_id.remove(&group.id);
        if self.dead.len() == DEAD {
            self.dead.pop_front();
        }
        self.dead.push_back(group.id);
        for peer in &mut self.peers {
            peer.posted.retain(|x| x.key.group != g);
            peer.unexpected.retain(|u| u.key.group != g);
            peer.announced.retain(|(k, ..)| k.group != g);
            peer.rx.forget_group(g);
        }
        self.own_sends.retain(|s| s.key.group != g);
    }

    /// Opens an operation of a group.
    pub(crate) fn open_op(&mut self, g: usize, seq: Option<u64>, desc: OpDesc, timeout: Duration) -> Result<OpId> {
        self.calls += 1;
        let now = self.now();
        let Some(group) = self.groups[g].as_mut() else { return Err(ErrorKind::Finalized.into()) };
        if group.left.is_some() {
            return Err(ErrorKind::Finalized.into());
        }
        if let Some(f) = &group.failed {
            // The call that the failure is about counts, so that later calls get the same answer.
            if let (Some(s), Some((failed, _))) = (seq, &f.calls)
                && s == *failed
            {
                group.remember(s, desc, false);
            }
            return Err(self.localized(g, seq.map(|s| (s, desc))));
        }
        if let Some(seq) = seq
            && let Some((rank, reason)) = group.refused.remove(&seq)
        {
            group.remember(seq, desc, true);
            self.drop_call(g, seq);
            return Err(ErrorKind::PeerRefused { rank, reason }.into());
        }
        let index = self.free_ops.pop().unwrap_or_else(|| {
            self.ops.push(OpSlot::empty());
            (self.ops.len() - 1) as u32
        });
        let slot = &mut self.ops[index as usize];
        slot.reset(g, seq, desc, now, now.after(timeout));
        let op = OpId { index, life: slot.life };
        if let Some(seq) = seq {
            let Some(group) = self.groups[g].as_mut() else { return Err(ErrorKind::Finalized.into()) };
            group.open.push((seq, op));
            group.newest = Some(group.newest.map_or(seq, |n| n.max(seq)));
            let queried = group.monitor.take_query(seq);
            if let Some((p, theirs)) = self.early_disagreement(g, seq, &desc) {
                let key = Key { group: g, kind: COLLECTIVE, seq, step: 0 };
                self.mismatch(g, p, key, theirs, Some(desc));
            } else if queried {
                self.report(op);
            }
        }
        Ok(op)
    }

    /// A peer's frame for this call that came before the call and says otherwise.
    fn early_disagreement(&self, g: usize, seq: u64, desc: &OpDesc) -> Option<(usize, OpDesc)> {
        self.peers.iter().enumerate().find_map(|(p, peer)| {
            peer.unexpected
                .iter()
                .find(|u| {
                    u.key.group == g
                        && u.key.kind == COLLECTIVE
                        && u.key.seq == seq
                        && desc.disagreement(&u.desc).is_some()
                })
                .map(|u| (p, u.desc))
        })
    }

    /// Gives an ended operation's slot back.
    pub(crate) fn release_op(&mut self, op: OpId) -> Option<Result<()>> {
        let slot = self.slot(op)?;
        let r = slot.result.take()?;
        slot.live = false;
        slot.task = None;
        self.free_ops.push(op.index);
        Some(r)
    }

    /// An operation has ended: its call becomes history.
    pub(crate) fn retire(&mut self, op: OpId) {
        let Some(slot) = self.slot(op) else { return };
        let (g, desc) = (slot.group, slot.desc);
        let refused = matches!(&slot.result, Some(Err(e)) if matches!(e.kind(), ErrorKind::PeerRefused { .. }));
        let Some(seq) = slot.seq else { return };
        if let Some(group) = self.groups[g].as_mut() {
            group.open.retain(|(_, o)| *o != op);
            group.remember(seq, desc, refused);
        }
        if refused {
            self.drop_call(g, seq);
        }
    }

    /// Throws away what has arrived for a collective call.
    fn drop_call(&mut self, g: usize, seq: u64) {
        for p in 0..self.peers.len() {
            self.drop_unexpected(p, |u| u.key.group == g && u.key.kind == COLLECTIVE && u.key.seq == seq);
        }
    }

    /// Removes everything that points into an operation's buffers.
    pub(crate) fn purge(&mut self, op: OpId) {
        for peer in &mut self.peers {
            peer.posted.retain(|x| x.op != op);
            peer.tx.purge(op);
        }
        self.own_sends.retain(|s| s.op != op);
    }

    pub(crate) fn post_send(&mut self, op: OpId, rank: usize, step: u32, ptr: *const u8, len: usize) -> PieceId {
        let slot = &mut self.ops[op.index as usize];
        let (g, seq, desc) = (slot.group, slot.seq.unwrap_or(0), slot.desc);
        let piece = slot.issue();
        let Some((p, comm, generation)) = self.address(g, rank, op) else { return piece };
        self.peers[p].tx.push_data(SendItem {
            key: Key { group: g, kind: COLLECTIVE, seq, step },
            kind: Kind::Collective,
            comm,
            generation,
            desc,
            ptr,
            total: len as u64,
            sent: 0,
            op,
            piece,
        });
        self.pump_tx(p);
        piece
    }

    pub(crate) fn post_recv(&mut self, op: OpId, rank: usize, step: u32, sink: Sink, len: usize) -> PieceId {
        let slot = &mut self.ops[op.index as usize];
        let (g, seq, desc) = (slot.group, slot.seq.unwrap_or(0), slot.desc);
        let piece = slot.issue();
        let key = Key { group: g, kind: COLLECTIVE, seq, step };
        self.post(
            op,
            rank,
            Posted { key, desc, sink, len: len as u64, got: 0, carry: Vec::new(), panicked: None, op, piece },
        );
        piece
    }

    /// Posts a receive unless its peer is gone and has left nothing.
    pub(crate) fn post(&mut self, op: OpId, rank: usize, x: Posted) {
        let g = x.key.group;
        let Some(p) = self.group(g).and_then(|g| g.members.get(rank).copied()) else { return };
        if self.peers[p].unexpected.iter().any(|u| u.key == x.key) || self.address(g, rank, op).is_some() {
            self.register(p, x);
        }
    }

    /// Endpoint rank, id and generation for a frame to a member; fails the group when the member is gone.
    pub(crate) fn address(&mut self, g: usize, rank: usize, op: OpId) -> Option<(usize, u64, u32)> {
        let group = self.groups[g].as_ref()?;
        let p = *group.members.get(rank)?;
        if group.gone[rank].is_none() && self.peers[p].link.is_some() {
            return Some((p, group.id, group.generation));
        }
        let cause = if group.gone[rank].is_some() {
            PeerCause::Closed
        } else {
            self.peers[p].down.unwrap_or(PeerCause::Killed)
        };
        if group.gone[rank].is_none() && group.failed.is_none() && self.peers[p].down.is_some() {
            // Blame is decided in a moment; the operation waits for that.
            return None;
        }
        if group.gone[rank] == Some(Gone::Finalized) && group.failed.is_none() {
            self.forsaken(op, p);
            return None;
        }
        self.fail_group(g, ErrorKind::PeerFailed { rank, cause }.into(), true);
        None
    }

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
    fn end_ops(&mut self, g: usize) {
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

    fn tell_failure(&mut self, g: usize, failure: &Failure) {
        let Some(group) = self.group(g) else { return };
        let h = Header::new(Kind::Abort, group.id, group.generation);
        let members = group.members.clone();
        let mut payload = postcard::to_allocvec(failure).unwrap_or_default();
        if payload.len() > FRAGMENT {
            // Better a shorter reason than none.
            let cause = failure.error.to_string().chars().take(4096).collect();
            let error = ErrorKind::Aborted { rank: failure.origin, cause }.into();
            payload =
                postcard::to_allocvec(&Failure { origin: failure.origin, error, calls: None }).unwrap_or_default();
        }
        for m in members {
            if m != self.rank {
                self.send_control(m, h, payload.clone());
            }
        }
    }

    /// The group's failure as this rank should see it in a call (number and descriptor), or between calls.
    pub(crate) fn localized(&self, g: usize, own: Option<(u64, OpDesc)>) -> Error {
        let Some((group, f)) = self.group(g).and_then(|g| g.failed.as_ref().map(|f| (g, f))) else {
            return ErrorKind::Finalized.into();
        };
        let told = || -> Error {
            let cause = match &f.calls {
                // "This rank" would be another one there.
                Some((seq, calls)) if *seq != u64::MAX => list_calls(*seq, calls),
                _ => f.error.to_string(),
            };
            ErrorKind::Aborted { rank: f.origin, cause }.into()
        };
        if let Some((seq, calls)) = &f.calls {
            if f.origin == group.rank && *seq == u64::MAX {
                return f.error.clone();
            }
            let ours = match own {
                Some((s, d)) if s == *seq => Some(d),
                _ => self.own_call(g, *seq),
            };
            // A message's two ends: the other one is the rank that did not notice.
            let ours = ours.or_else(|| calls.iter().find(|(r, _)| *r == group.rank).map(|(_, d)| *d));
            let Some(ours) = ours else { return told() };
            let other = calls.iter().find(|(r, d)| *r != group.rank && differs(*seq, &ours, d));
            let Some((_, theirs)) = other else { return told() };
            let ranks = calls.iter().filter(|(r, d)| *r != group.rank && d == theirs).map(|(r, _)| *r).collect();
            // A message's own number is in the error; `seq` marks that it was no collective.
            let seq = if let ErrorKind::Mismatch { seq, .. } = f.error.kind() { *seq } else { *seq };
            return ErrorKind::Mismatch { seq, ranks, theirs: *theirs, ours }.into();
        }
        match f.error.kind() {
            ErrorKind::PeerFailed { rank, .. } if *rank == group.rank => told(),
            ErrorKind::PeerFailed { .. } | ErrorKind::Corrupt { .. } | ErrorKind::Aborted { .. } => {
                f.error.kind().clone().into()
            }
            _ if f.origin == group.rank => f.error.clone(),
            _ => told(),
        }
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

    /// A member has said goodbye: calls that still wait for it fail; others may go on.
    fn fail_if_needed(&mut self, g: usize, p: usize, rank: usize) {
        let peer = &self.peers[p];
        let waits = peer.posted.iter().any(|x| x.key.group == g) || peer.tx.has_data(g);
        if waits {
            self.fail_group(g, ErrorKind::PeerFailed { rank, cause: PeerCause::Closed }.into(), true);
        }
    }

    /// A member has finalized. A call here that waits for it was made in error, but the peer's last calls may
    /// explain it better: whoever waits reports its call at once, and blames the peer if no better news comes.
    fn miss(&mut self, g: usize, p: usize) {
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
    fn forsaken(&mut self, op: OpId, p: usize) {
        if self.forsaken.iter().any(|(o, ..)| *o == op) {
            return;
        }
        let now = self.now();
        self.forsaken.push((op, p, now));
        if self.slot(op).is_some_and(|s| !s.reported) {
            self.report(op);
        }
    }

    /// Blames members that have finalized for the calls that still wait for them.
    pub(crate) fn check_forsaken(&mut self, now: Time) {
        while let Some((op, p, since)) = self.forsaken.first().copied()
            && since.after(super::state::LAST_WORD) <= now
        {
            self.forsaken.remove(0);
            let Some(g) = self.slot(op).filter(|s| s.result.is_none()).map(|s| s.group) else { continue };
            let Some(rank) = self.group(g).and_then(|g| g.rank_of(p)) else { continue };
            self.fail_group(g, ErrorKind::PeerFailed { rank, cause: PeerCause::Closed }.into(), true);
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
        let members = group.members.clone();
        self.drop_call(g, seq);
        let mut text = reason.as_bytes().to_vec();
        text.truncate(REASON);
        for m in members {
            if m != self.rank {
                self.send_control(m, h, text.clone());
            }
        }
    }

    fn refused_by(&mut self, g: usize, rank: usize, seq: u64, reason: String) {
        let Some(group) = self.group_mut(g) else { return };
        group.saw(rank, seq);
        match group.known(seq) {
            Known::Open(op) => self.finish_op(op, Err(ErrorKind::PeerRefused { rank, reason }.into())),
            Known::Future if group.refused.len() < FUTURE => {
                group.refused.insert(seq, (rank, reason));
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
            let missing = match s.seq {
                Some(seq) => self.group(g).map(|g| g.missing(seq)).unwrap_or_default(),
                None => self.partners(op),
            };
            let s = &self.ops[i];
            let kind = ErrorKind::Timeout { phase: Phase::Running, elapsed: now.since(s.started), missing };
            let name = self.group(g).map(|g| (Arc::clone(&g.name), g.rank, g.members.len()));
            let (desc, seq) = (s.desc, s.seq);
            let error = Error::new(kind).with_context(|| comm_core::Context {
                comm: name.as_ref().map(|n| Arc::clone(&n.0)),
                rank: name.as_ref().map(|n| (n.1, n.2)),
                op: Some(desc.operation.name().into()),
                seq,
            });
            self.fail_group(g, error, true);
        }
    }

    /// Says goodbye. After it this rank makes no more calls.
    pub(crate) fn say_goodbye(&mut self, g: usize, how: Gone) {
        let Some(group) = self.group_mut(g) else { return };
        if group.left.is_some() {
            return;
        }
        group.left = Some(how);
        // Who has failed waits for nobody.
        group.over = how == Gone::Closed || group.failed.is_some();
        // The reason goes first: a member that has not heard it yet must not blame this rank for leaving.
        if let Some(f) = group.failed.clone() {
            self.tell_failure(g, &f);
        }
        self.tell_end(g, u64::from(how == Gone::Finalized));
        // What peers have sent for calls that this rank will not make now.
        let early = self.peers.iter().enumerate().find_map(|(p, peer)| {
            let future = |u: &&super::state::Unexpected| {
                u.key.group == g
                    && u.key.kind == COLLECTIVE
                    && self.group(g).is_some_and(|g| matches!(g.known(u.key.seq), Known::Future))
            };
            peer.unexpected.iter().find(future).map(|u| (p, u.key, u.desc))
        });
        if let Some((p, key, theirs)) = early {
            self.mismatch(g, p, key, theirs, Some(OpDesc::new(Operation::Finalize)));
        }
    }

    fn tell_end(&mut self, g: usize, offset: u64) {
        let Some(group) = self.group(g) else { return };
        let h = Header { offset, ..Header::new(Kind::Goodbye, group.id, group.generation) };
        let members = group.members.clone();
        for m in members {
            if m != self.rank {
                self.send_control(m, h, Vec::new());
            }
        }
    }

    /// Whether all members have finalized and found nothing wrong; the error if that cannot be any more.
    ///
    /// In two rounds: when all goodbyes are here, everything that anybody ever sent to this rank has been
    /// looked at; if it was in order, the others get a farewell. So nobody's finalize goes well when
    /// somebody else has found a mismatch.
    pub(crate) fn all_finalized(&mut self, g: usize) -> Option<Result<()>> {
        let group = self.group(g)?;
        if group.failed.is_none()
            && let Some(rank) = group.gone.iter().position(|g| *g == Some(Gone::Closed))
        {
            self.fail_group(g, ErrorKind::PeerFailed { rank, cause: PeerCause::Closed }.into(), true);
        }
        // One that said goodbye and then was lost before its farewell.
        let lost = self.group(g)?.members.iter().enumerate().find_map(|(r, m)| {
            let cause = self.peers[*m].down.filter(|_| !self.is_suspect(*m))?;
            let group = self.group(g)?;
            (group.gone[r] == Some(Gone::Finalized) && !group.farewell[r]).then_some((r, cause))
        });
        if let Some((rank, cause)) = lost {
            self.fail_group(g, ErrorKind::PeerFailed { rank, cause }.into(), true);
        }
        if self.group(g)?.failed.is_some() {
            return Some(Err(self.localized(g, None)));
        }
        let group = self.group_mut(g)?;
        let others = |list: &mut dyn Iterator<Item = bool>| list.enumerate().all(|(r, x)| x || r == group.rank);
        if !others(&mut group.gone.iter().map(Option::is_some)) {
            // A member whose connection is gone fails the group in a moment, see `blame`.
            return None;
        }
        let ended = others(&mut group.farewell.iter().copied());
        if !std::mem::replace(&mut group.parted, true) {
            self.tell_end(g, 2);
        }
        ended.then_some(Ok(()))
    }

    /// Finalize returns: what comes now does not matter.
    pub(crate) fn end_finalize(&mut self, g: usize) {
        if let Some(group) = self.group_mut(g) {
            group.over = true;
        }
    }

    /// Members that have not finalized.
    pub(crate) fn not_finalized(&self, g: usize) -> Vec<usize> {
        self.group(g)
            .map(|g| {
                let absent = |r: &usize| *r != g.rank && if g.parted { !g.farewell[*r] } else { g.gone[*r].is_none() };
                (0..g.members.len()).filter(absent).collect()
            })
            .unwrap_or_default()
    }

    /// Sends a control-plane message, in parts if it is long.
    pub(crate) fn send_message(&mut self, g: usize, rank: usize, tag: u32, bytes: &[u8]) -> Result<()> {
        let Some(group) = self.group_mut(g) else { return Err(ErrorKind::Finalized.into()) };
        let (me, id, generation, p) = (group.rank, group.id, group.generation, group.members[rank]);
        if group.failed.is_some() {
            return Err(self.localized(g, None));
        }
        if rank == me {
            group.inbox.entry((me, tag)).or_default().push_back(bytes.to_vec());
            return Ok(());
        }
        if self.peers[p].link.is_none() {
            let cause = self.peers[p].down.unwrap_or(PeerCause::Killed);
            return Err(ErrorKind::PeerFailed { rank, cause }.into());
        }
        let total = bytes.len() as u64;
        let mut offset = 0;
        loop {
            let part = &bytes[offset..(offset + FRAGMENT).min(bytes.len())];
            let h = Header { step: tag, offset: offset as u64, total, ..Header::new(Kind::Control, id, generation) };
            self.send_control(p, h, part.to_vec());
            offset += part.len();
            if offset == bytes.len() {
                return Ok(());
            }
        }
    }

    /// Takes the next control-plane message; the error if none can come any more.
    pub(crate) fn take_message(&mut self, g: usize, rank: usize, tag: u32) -> Option<Result<Vec<u8>>> {
        let Some(group) = self.group_mut(g) else { return Some(Err(ErrorKind::Finalized.into())) };
        if let Some(q) = group.inbox.get_mut(&(rank, tag)) {
            let m = q.pop_front();
            if q.is_empty() {
                group.inbox.remove(&(rank, tag));
            }
            if let Some(m) = m {
                group.inbox_count[rank] = group.inbox_count[rank].saturating_sub(1);
                group.inbox_bytes[rank] = group.inbox_bytes[rank].saturating_sub(m.len());
                return Some(Ok(m));
            }
        }
        if group.failed.is_some() {
            return Some(Err(self.localized(g, None)));
        }
        if group.left.is_some() {
            return Some(Err(ErrorKind::Finalized.into()));
        }
        if group.gone[rank].is_some() {
            return Some(Err(ErrorKind::PeerFailed { rank, cause: PeerCause::Closed }.into()));
        }
        // A lost peer fails the group a moment later; until then its explanation may still arrive.
        None
    }

    /// Handles a small frame of a group.
    pub(crate) fn control_frame(&mut self, p: usize, h: Header, g: usize, payload: Vec<u8>) {
        let Some(rank) = self.group(g).and_then(|g| g.rank_of(p)) else { return };
        match h.kind {
            Kind::Credit => {
                let window = self.group(g).map_or(0, |g| g.window);
                if let Some(c) = self.peers[p].chans[g].credit.get_mut(h.step as usize) {
                    *c = c.saturating_add(h.offset).min(window);
                }
                self.pump_tx(p);
            }
            Kind::Control => self.control_part(p, g, rank, &h, payload),
            Kind::Refuse => self.refused_by(g, rank, h.seq, reason(&payload)),
            Kind::RefuseP2p => self.message_refused(p, g, rank, &h, reason(&payload)),
            Kind::RequestToSend => self.announced(p, g, &h),
            Kind::ClearToSend => self.cleared(p, g, &h),
            Kind::Abort => match postcard::from_bytes::<Failure>(&payload) {
                Ok(f) => self.fail(g, f, false),
                Err(_) => self.corrupt(p, "an abort frame that cannot be read".into()),
            },
            Kind::Goodbye => {
                let how = if h.offset == 0 { Gone::Closed } else { Gone::Finalized };
                if let Some(group) = self.group_mut(g) {
                    group.gone[rank] = Some(how);
                    group.farewell[rank] |= h.offset == 2;
                }
                self.ended = true;
                match how {
                    Gone::Finalized => self.miss(g, p),
                    Gone::Closed => self.fail_if_needed(g, p, rank),
                }
            }
            Kind::Status => self.status(g, rank, h.seq, h.desc),
            Kind::Query => self.queried(g, h.seq),
            Kind::Publish => self.published(g, rank, h.seq, h.offset),
            Kind::Arrivals => {
                if let (Ok(list), Some(group)) = (postcard::from_bytes::<Vec<usize>>(&payload), self.group_mut(g))
                    && list.len() <= group.members.len()
                {
                    group.monitor.learn(h.seq, list);
                }
            }
            Kind::Heartbeat | Kind::Collective | Kind::Eager | Kind::P2pData => {}
        }
    }

    fn control_part(&mut self, p: usize, g: usize, rank: usize, h: &Header, payload: Vec<u8>) {
        let Some(group) = self.group_mut(g) else { return };
        let mut whole = group.parts.remove(&rank).unwrap_or_default();
        if whole.len() as u64 != h.offset {
            return self.corrupt(p, "parts of a control message do not join".into());
        }
        if whole.is_empty() {
            whole = payload;
        } else {
            whole.extend_from_slice(&payload);
        }
        if (whole.len() as u64) < h.total {
            group.parts.insert(rank, whole);
            return;
        }
        group.inbox_count[rank] += 1;
        group.inbox_bytes[rank] += whole.len();
        if group.inbox_count[rank] > INBOX || group.inbox_bytes[rank] > INBOX_BYTES {
            return self
                .corrupt(p, format!("more than {INBOX} control messages, or {INBOX_BYTES} bytes, that nobody reads"));
        }
        group.inbox.entry((rank, h.step)).or_default().push_back(whole);
        self.ended = true;
    }
}

/// Whether two calls differ: for collectives by the table, for messages in type or count.
fn differs(seq: u64, a: &OpDesc, b: &OpDesc) -> bool {
    if seq == u64::MAX { a.dtype != b.dtype || a.count != b.count } else { a.disagreement(b).is_some() }
}

/// The text of a refusal, which a peer may make as long as a frame.
fn reason(payload: &[u8]) -> String {
    String::from_utf8_lossy(&payload[..payload.len().min(REASON)]).into_owned()
}

/// Who called what, for a rank that took no part.
fn list_calls(seq: u64, calls: &[(usize, OpDesc)]) -> String {
    const SHOWN: usize = 8;
    let mut text = format!("calls do not match at collective {seq}");
    for (i, (rank, desc)) in calls.iter().take(SHOWN).enumerate() {
        let sep = if i == 0 { ':' } else { ',' };
        text.push_str(&format!("{sep} rank {rank} called {desc}"));
    }
    if calls.len() > SHOWN {
        text.push_str(&format!(" and {} more", calls.len() - SHOWN));
    }
    text
}
