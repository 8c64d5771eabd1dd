//! Groups: the members of one communicator on an endpoint, what they have called, and how they fail.
//!
//! The life of a collective call `seq` here: *future* (only peers' frames know it), *open* (an
//! operation exists), *closed* (in the history, with its descriptor, for late frames), *old*.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use comm_core::{Error, ErrorKind, OpDesc, Operation, PeerCause, Result};

use super::agree::Agreement;
use super::failure::Failure;
use super::monitor::Monitor;
use super::op::{OpId, OpSlot, PieceId, Sink};
use super::state::{COLLECTIVE, Chan, Key, Posted, State};
use super::tx::SendItem;
use crate::frame::{FRAGMENT, Kind};
use crate::overlay::Connect;

/// How many closed calls are remembered to check late frames against.
const HISTORY: usize = 512;

/// How many calls without elements are remembered.
pub(super) const SILENT: usize = 64;

/// Forgotten groups whose late frames are recognised.
const DEAD: usize = 1024;

/// Longest text of a refusal that is sent or kept.
pub(super) const REASON: usize = 4096;

/// How a member left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Gone {
    Finalized,
    Closed,
    /// It is in another membership now, of this generation.
    Moved(u32),
}

impl Gone {
    /// What calls that need it, member `rank` of a group of generation `ours`, end with.
    pub(super) fn error(self, rank: usize, ours: u32) -> Error {
        match self {
            Self::Finalized | Self::Closed => ErrorKind::PeerFailed { rank, cause: PeerCause::Closed },
            Self::Moved(theirs) => ErrorKind::StaleGeneration { ours, theirs, rank: Some(rank) },
        }
        .into()
    }
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
    pub(super) ranks: Vec<Option<usize>>,
    pub(crate) rank: usize,
    pub(crate) window: u64,
    pub(crate) failed: Option<Failure>,
    /// Members that have said that they took this one for dead.
    pub(super) given_up: Vec<usize>,
    pub(super) open: Vec<(u64, OpId)>,
    history: VecDeque<Closed>,
    pub(super) newest: Option<u64>,
    pub(super) refused: BTreeMap<u64, (usize, String)>,
    pub(crate) refused_p2p: Vec<super::p2p::RefusedP2p>,
    pub(super) gone: Vec<Option<Gone>>,
    /// Members that have said that all goodbyes reached them and nothing was wrong.
    pub(super) farewell: Vec<bool>,
    pub(super) left: Option<Gone>,
    pub(super) connect: Connect,
    /// Some members have no link to each other, see `news`.
    pub(super) sparse: bool,
    /// Members that news is passed on to, in a sparse group.
    pub(super) overlay: Vec<usize>,
    /// Which goodbyes and farewells have come by.
    pub(super) heard: Vec<u8>,
    pub(super) news: Vec<super::news::Fact>,
    pub(super) relayed: VecDeque<(Kind, usize, u64)>,
    /// Members that will send nothing more, and whether this one has said so.
    pub(super) last_word: Vec<bool>,
    pub(super) ended: bool,
    /// This rank has sent its farewell.
    pub(super) parted: bool,
    /// Nothing that arrives matters any more: closed, or finalize has returned.
    pub(super) over: bool,
    /// Highest collective call that each member is known to have made, plus one.
    pub(super) seen: Vec<u64>,
    /// The last calls without elements, of which no data tells the others: compared when all finalize.
    pub(super) silent: VecDeque<(u64, OpDesc)>,
    /// Those of the members that have finalized.
    pub(super) silent_of: Vec<Vec<(u64, OpDesc)>>,
    pub(super) inbox: HashMap<(usize, u32), VecDeque<Vec<u8>>>,
    pub(super) inbox_count: Vec<usize>,
    pub(super) inbox_bytes: Vec<usize>,
    pub(super) parts: HashMap<usize, Vec<u8>>,
    pub(crate) monitor: Monitor,
    /// What the members know of each other's end, see `agree`.
    pub(super) agreement: Agreement,
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

    /// The oldest collective call that has not ended here.
    pub(crate) fn oldest_open(&self) -> Option<u64> {
        self.open.iter().map(|(seq, _)| *seq).min()
    }

    /// Whether an operation is one of the first `n` collective calls that have not ended here.
    pub(crate) fn is_among_oldest(&self, op: OpId, n: usize) -> bool {
        self.open.iter().take(n).any(|(_, o)| *o == op)
    }

    pub(super) fn remember(&mut self, seq: u64, desc: OpDesc, refused: bool) {
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
        if let Some(e) = self.killed_as(spec.members.iter().position(|m| *m == self.rank)) {
            return Err(e);
        }
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
        let overlay = self.connect.neighbours(rank, n);
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
            silent: VecDeque::new(),
            silent_of: vec![Vec::new(); n],
            left: None,
            connect: self.connect,
            sparse: overlay.len() + 1 < n,
            overlay,
            heard: vec![0; n],
            news: Vec::new(),
            relayed: VecDeque::new(),
            last_word: vec![false; n],
            ended: false,
            parted: false,
            over: false,
            seen: vec![0; n],
            inbox: HashMap::new(),
            inbox_count: vec![0; n],
            inbox_bytes: vec![0; n],
            parts: HashMap::new(),
            monitor: Monitor::default(),
            agreement: Agreement::new(rank, n),
            given_up: Vec::new(),
        };
        self.await_members(&group.members);
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
            if m != self.rank && !self.is_reachable(m) {
                let cause = self.peers[m].down.unwrap_or(PeerCause::Killed);
                self.blame(g, m, cause);
                self.agree_without(m);
            }
        }
        let overlay = self.groups[g].as_ref().map(|g| g.overlay.iter().map(|r| g.members[*r]).collect::<Vec<_>>());
        for m in overlay.unwrap_or_default() {
            self.want_link(m);
        }
        Ok(g)
    }

    /// Forgets a group. Its operations must have ended.
    pub(crate) fn drop_group(&mut self, g: usize) {
        self.end_ops(g);
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
        // A program that makes one short call after the other never waits long enough to look at timers.
        self.check_pulses_at(now);
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
            if desc.count == 0 && desc.dtype.is_some() && !desc.operation.is_pairwise() {
                if group.silent.len() == SILENT {
                    group.silent.pop_front();
                }
                group.silent.push_back((seq, desc));
            }
            group.open.push((seq, op));
            group.newest = Some(group.newest.map_or(seq, |n| n.max(seq)));
            let queried = group.monitor.take_query(seq);
            if let Some((p, theirs)) = self.early_disagreement(g, seq, &desc) {
                let key = Key { group: g, kind: COLLECTIVE, seq, step: 0 };
                self.mismatch(g, p, key, theirs, Some(desc));
            } else if queried {
                self.tell_status(g, seq, desc, false);
            }
            if desc.operation == Operation::MonitoredBarrier {
                self.announce(op);
            }
        }
        Ok(op)
    }

    /// A peer's frame for this call that came before the call and says otherwise.
    pub(super) fn early_disagreement(&self, g: usize, seq: u64, desc: &OpDesc) -> Option<(usize, OpDesc)> {
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
    pub(super) fn drop_call(&mut self, g: usize, seq: u64) {
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
        self.post(op, rank, Posted { key, desc, sink, len: len as u64, got: 0, carry: Vec::new(), op, piece });
        piece
    }

    /// Posts a receive unless its peer is gone and has left nothing.
    pub(crate) fn post(&mut self, op: OpId, rank: usize, x: Posted) {
        let g = x.key.group;
        let Some(p) = self.group(g).and_then(|g| g.members.get(rank).copied()) else { return };
        if self.peers[p].unexpected.iter().any(|u| u.key == x.key) || self.address(g, rank, op).is_some() {
            self.register(p, x);
        } else {
            self.forsaken_message(op, x.key, x.desc);
        }
    }

    /// Endpoint rank, id and generation for a frame to a member; fails the group when the member is gone.
    pub(crate) fn address(&mut self, g: usize, rank: usize, op: OpId) -> Option<(usize, u64, u32)> {
        let group = self.groups[g].as_ref()?;
        let p = *group.members.get(rank)?;
        let found = (p, group.id, group.generation);
        if group.gone[rank].is_none() && self.is_reachable(p) {
            return Some(found);
        }
        let lost = || ErrorKind::PeerFailed { rank, cause: self.peers[p].down.unwrap_or(PeerCause::Killed) }.into();
        let error = group.gone[rank].map_or_else(lost, |how| how.error(rank, group.generation));
        if group.gone[rank].is_none() && group.failed.is_none() && self.peers[p].down.is_some() {
            // Blame is decided in a moment; the operation waits for that.
            return None;
        }
        if group.gone[rank] == Some(Gone::Finalized) && group.failed.is_none() {
            self.forsaken(op, p);
            return None;
        }
        self.fail_group(g, error, true);
        None
    }
}
