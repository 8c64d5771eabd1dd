//! Point-to-point messages: short ones go at once, within the receiver's credit; long ones, and short
//! ones without credit, are announced and wait until the receiver has a buffer.

use comm_core::{ErrorKind, OpDesc, Operation};

use super::matching::compatible;
use super::op::{Message, OpId, PieceId, Sink};
use super::state::{Key, OVERHEAD, P2P, Posted, State};
use super::tx::SendItem;
use crate::frame::{Header, Kind};

/// Longest message that is sent before the receiver asks for it.
pub const EAGER: usize = 64 << 10;
/// Announcements of one peer that may wait for their receives.
const ANNOUNCED: usize = 1 << 16;
/// Refusals that may wait for their counterparts.
const REFUSED: usize = 1024;
/// Bytes of messages to oneself that are kept in copies.
const OWN_COPIES: usize = 1 << 20;

/// A message from this rank to itself that waits for its receive.
pub(crate) struct OwnSend {
    pub(crate) key: Key,
    desc: OpDesc,
    data: OwnData,
    pub(crate) op: OpId,
    piece: PieceId,
}

enum OwnData {
    Copy(Vec<u8>),
    InPlace(*const u8, usize),
}

/// A message in which one end takes no part.
pub(crate) struct RefusedP2p {
    peer: usize,
    seq: u64,
    tag: u32,
    /// The direction as the refusing end calls it.
    operation: Operation,
    reason: String,
    /// Refused here: what arrives for it is dropped.
    ours: bool,
}

impl State {
    fn message_key(&self, op: OpId, m: &Message) -> Key {
        Key { group: self.ops[op.index as usize].group, kind: P2P, seq: m.seq, step: m.tag }
    }

    /// Takes a refusal of the peer that concerns this message.
    fn take_refusal(&mut self, key: &Key, rank: usize, operation: Operation) -> Option<String> {
        let group = self.group_mut(key.group)?;
        let i = group.refused_p2p.iter().position(|r| {
            !r.ours && r.peer == rank && r.seq == key.seq && r.tag == key.step && r.operation == operation
        })?;
        Some(group.refused_p2p.swap_remove(i).reason)
    }

    pub(crate) fn post_message_send(&mut self, op: OpId, m: Message, ptr: *const u8) -> PieceId {
        let key = self.message_key(op, &m);
        let piece = self.ops[op.index as usize].issue();
        if self.group(key.group).is_some_and(|g| g.rank == m.peer) {
            self.send_to_self(key, &m, ptr, op, piece);
            return piece;
        }
        if let Some(reason) = self.take_refusal(&key, m.peer, Operation::Recv) {
            self.end_refused(op, m.peer, reason);
            return piece;
        }
        let Some((p, comm, generation)) = self.address(key.group, m.peer, op) else {
            self.forsaken_message(op, key, m.desc);
            return piece;
        };
        let item = SendItem {
            key,
            kind: Kind::Eager,
            comm,
            generation,
            desc: m.desc,
            ptr,
            total: m.bytes as u64,
            sent: 0,
            op,
            piece,
        };
        let cost = m.bytes as u64 + OVERHEAD;
        let credit = &mut self.peers[p].chans[key.group].credit[P2P];
        if m.bytes <= EAGER && *credit >= cost {
            *credit -= cost;
            self.peers[p].tx.push_data(item);
            self.pump_tx(p);
        } else {
            self.peers[p].tx.announced.push(SendItem { kind: Kind::P2pData, ..item });
            let h = Header {
                step: m.tag,
                seq: m.seq,
                total: m.bytes as u64,
                desc: m.desc,
                ..Header::new(Kind::RequestToSend, comm, generation)
            };
            self.send_control(p, h, Vec::new());
        }
        piece
    }

    pub(crate) fn post_message_recv(&mut self, op: OpId, m: Message, ptr: *mut u8) -> PieceId {
        let key = self.message_key(op, &m);
        let piece = self.ops[op.index as usize].issue();
        let len = m.bytes as u64;
        let x = Posted { key, desc: m.desc, sink: Sink::Copy(ptr), len, got: 0, carry: Vec::new(), op, piece };
        if self.group(key.group).is_some_and(|g| g.rank == m.peer) {
            self.recv_from_self(x);
            return piece;
        }
        if let Some(reason) = self.take_refusal(&key, m.peer, Operation::Send) {
            self.end_refused(op, m.peer, reason);
            return piece;
        }
        let Some(p) = self.group(key.group).and_then(|g| g.members.get(m.peer).copied()) else { return piece };
        if let Some(i) = self.peers[p].announced.iter().position(|(k, ..)| *k == key) {
            let (_, theirs, total) = self.peers[p].announced.swap_remove(i);
            self.match_announced(p, x, theirs, total);
            return piece;
        }
        self.post(op, m.peer, x);
        piece
    }

    /// Both ends of an announced message are known: let it come, or report that they do not fit.
    fn match_announced(&mut self, p: usize, x: Posted, theirs: OpDesc, total: u64) {
        let key = x.key;
        if !compatible(P2P, &x.desc, &theirs) || total != x.len {
            return self.mismatch(key.group, p, key, theirs, Some(x.desc));
        }
        let Some(group) = self.group(key.group) else { return };
        let h = Header { step: key.step, seq: key.seq, ..Header::new(Kind::ClearToSend, group.id, group.generation) };
        self.peers[p].posted.push(x);
        self.send_control(p, h, Vec::new());
    }

    /// A peer announces a message.
    pub(crate) fn announced(&mut self, p: usize, g: usize, h: &Header) {
        let key = Key { group: g, kind: P2P, seq: h.seq, step: h.step };
        if self.is_refused_here(g, p, &key) {
            return;
        }
        let peer = &mut self.peers[p];
        if let Some(i) = peer.posted.iter().position(|x| x.key == key) {
            let x = peer.posted.swap_remove(i);
            self.match_announced(p, x, h.desc, h.total);
        } else if peer.announced.len() < ANNOUNCED {
            peer.announced.push((key, h.desc, h.total));
        } else {
            self.corrupt(p, format!("more than {ANNOUNCED} announced messages that nobody receives"));
        }
    }

    /// A peer is ready for an announced message.
    pub(crate) fn cleared(&mut self, p: usize, g: usize, h: &Header) {
        let key = Key { group: g, kind: P2P, seq: h.seq, step: h.step };
        let tx = &mut self.peers[p].tx;
        if let Some(i) = tx.announced.iter().position(|x| x.key == key) {
            let item = tx.announced.swap_remove(i);
            tx.push_data(item);
            self.pump_tx(p);
        }
    }

    pub(super) fn is_refused_here(&self, g: usize, p: usize, key: &Key) -> bool {
        self.group(g).is_some_and(|group| {
            let rank = group.rank_of(p);
            group.refused_p2p.iter().any(|r| r.ours && Some(r.peer) == rank && r.seq == key.seq && r.tag == key.step)
        })
    }

    /// This rank takes no part in a message.
    pub(crate) fn refuse_message(&mut self, g: usize, rank: usize, tag: u32, seq: u64, desc: OpDesc, reason: &str) {
        let Some(group) = self.group_mut(g) else { return };
        let Some(p) = group.members.get(rank).copied() else { return };
        if group.failed.is_some() || rank == group.rank {
            return;
        }
        let h = Header { step: tag, seq, desc, ..Header::new(Kind::RefuseP2p, group.id, group.generation) };
        let operation = desc.operation;
        if operation == Operation::Recv {
            if group.refused_p2p.len() == REFUSED {
                group.refused_p2p.remove(0);
            }
            group.refused_p2p.push(RefusedP2p { peer: rank, seq, tag, operation, reason: String::new(), ours: true });
        }
        let key = Key { group: g, kind: P2P, seq, step: tag };
        self.peers[p].announced.retain(|(k, ..)| *k != key);
        self.drop_unexpected(p, |u| u.key == key);
        let mut text = reason.as_bytes().to_vec();
        text.truncate(super::group::REASON);
        self.send_control(p, h, text);
    }

    /// A peer takes no part in a message.
    pub(crate) fn message_refused(&mut self, p: usize, g: usize, rank: usize, h: &Header, reason: String) {
        let key = Key { group: g, kind: P2P, seq: h.seq, step: h.step };
        let peer = &self.peers[p];
        let op = if h.desc.operation == Operation::Send {
            peer.posted.iter().find(|x| x.key == key).map(|x| x.op)
        } else {
            peer.tx.announced.iter().find(|x| x.key == key).map(|x| x.op)
        };
        if let Some(op) = op {
            self.end_refused(op, rank, reason);
        } else if let Some(group) = self.group_mut(g) {
            // The oldest are likely of messages that were sent before they were refused: nobody asks for them.
            if group.refused_p2p.len() == REFUSED {
                group.refused_p2p.remove(0);
            }
            let operation = h.desc.operation;
            group.refused_p2p.push(RefusedP2p { peer: rank, seq: h.seq, tag: h.step, operation, reason, ours: false });
        }
    }

    /// Ends an operation because a peer refused one of its messages. The ends of its other messages must not
    /// wait for them either.
    fn end_refused(&mut self, op: OpId, rank: usize, reason: String) {
        let mut rest: Vec<(usize, Key, OpDesc)> = Vec::new();
        for (p, peer) in self.peers.iter().enumerate() {
            rest.extend(peer.posted.iter().filter(|x| x.op == op).map(|x| (p, x.key, x.desc)));
            rest.extend(peer.tx.items_of(op).map(|x| (p, x.key, x.desc)));
        }
        let text = format!("rank {rank} refused another message of its batch: {reason}");
        self.finish_op(op, Err(ErrorKind::PeerRefused { rank, reason }.into()));
        for (p, key, desc) in rest {
            if let Some(other) = self.group(key.group).and_then(|g| g.rank_of(p)).filter(|other| *other != rank) {
                self.refuse_message(key.group, other, key.step, key.seq, desc, &text);
            }
        }
    }

    fn send_to_self(&mut self, key: Key, m: &Message, ptr: *const u8, op: OpId, piece: PieceId) {
        let me = self.rank;
        let posted = &mut self.peers[me].posted;
        if let Some(i) = posted.iter().position(|x| x.key == key) {
            let x = posted.swap_remove(i);
            return self.hand_over(&x, m.desc, ptr, m.bytes, Some((op, piece)));
        }
        let copied: usize =
            self.own_sends.iter().map(|s| if let OwnData::Copy(v) = &s.data { v.len() } else { 0 }).sum();
        let copy = m.bytes <= EAGER && copied + m.bytes <= OWN_COPIES;
        let data = if copy {
            let mut v = vec![0u8; m.bytes];
            // SAFETY: the send's buffer is valid (Port::send_message); the copy is ours.
            unsafe { std::ptr::copy_nonoverlapping(ptr, v.as_mut_ptr(), m.bytes) };
            OwnData::Copy(v)
        } else {
            OwnData::InPlace(ptr, m.bytes)
        };
        // A copied message outlives its operation; no live operation has this life number again soon.
        let owner = if copy { OpId { index: u32::MAX, life: 0 } } else { op };
        self.own_sends.push(OwnSend { key, desc: m.desc, data, op: owner, piece });
        if copy {
            self.piece_done(op, piece);
        }
    }

    fn recv_from_self(&mut self, x: Posted) {
        let Some(i) = self.own_sends.iter().position(|s| s.key == x.key) else {
            let me = self.rank;
            self.peers[me].posted.push(x);
            return;
        };
        let s = self.own_sends.swap_remove(i);
        match s.data {
            OwnData::Copy(v) => self.hand_over(&x, s.desc, v.as_ptr(), v.len(), None),
            OwnData::InPlace(ptr, len) => self.hand_over(&x, s.desc, ptr, len, Some((s.op, s.piece))),
        }
    }

    /// Copies a message of this rank to itself.
    fn hand_over(&mut self, x: &Posted, desc: OpDesc, from: *const u8, len: usize, send: Option<(OpId, PieceId)>) {
        if !compatible(P2P, &x.desc, &desc) || len as u64 != x.len {
            let me = self.rank;
            return self.mismatch(x.key.group, me, x.key, desc, Some(x.desc));
        }
        if let Sink::Copy(to) = x.sink {
            // SAFETY: both buffers are valid for `len` bytes (Port); they may overlap only if the program sends a
            // buffer onto itself, which `copy` allows.
            unsafe { std::ptr::copy(from, to, len) };
        }
        if let Some((op, piece)) = send {
            self.piece_done(op, piece);
        }
        self.piece_done(x.op, x.piece);
    }

    /// The ranks that a point-to-point operation still waits for.
    pub(crate) fn partners(&self, op: OpId) -> Vec<usize> {
        let Some(group) = self.group(self.ops[op.index as usize].group) else { return Vec::new() };
        let waits = |p: &usize| {
            let peer = &self.peers[*p];
            peer.posted.iter().any(|x| x.op == op) || peer.tx.has_op(op)
        };
        let mut ranks: Vec<usize> = (0..self.peers.len()).filter(waits).filter_map(|p| group.rank_of(p)).collect();
        if self.own_sends.iter().any(|s| s.op == op) && !ranks.contains(&group.rank) {
            ranks.push(group.rank);
        }
        ranks
    }

    /// The ranks whose part in a collective an operation waits for, in words.
    pub(crate) fn data_missing(&self, op: OpId) -> Vec<String> {
        let Some(group) = self.group(self.ops[op.index as usize].group) else { return Vec::new() };
        let mut all = Vec::new();
        for (p, peer) in self.peers.iter().enumerate() {
            let Some(rank) = group.rank_of(p).filter(|r| *r != group.rank) else { continue };
            if peer.posted.iter().any(|x| x.op == op) {
                all.push(format!("data from rank {rank}"));
            }
            if peer.tx.has_op(op) {
                all.push(format!("rank {rank} to take data"));
            }
        }
        all
    }

    /// The messages of an operation that wait for their counterparts, in words.
    pub(crate) fn unmatched(&self, op: OpId) -> Vec<String> {
        const SHOWN: usize = 8;
        let Some(group) = self.group(self.ops[op.index as usize].group) else { return Vec::new() };
        let text = |rank: usize, key: &Key, desc: &OpDesc| {
            let way = if desc.operation == Operation::Send { "to" } else { "from" };
            format!("{desc} {way} rank {rank} (tag {}, message {})", key.step, key.seq)
        };
        let mut all = Vec::new();
        for (p, peer) in self.peers.iter().enumerate() {
            let Some(rank) = group.rank_of(p) else { continue };
            let waiting = peer
                .posted
                .iter()
                .filter(|x| x.op == op)
                .map(|x| (x.key, x.desc))
                .chain(peer.tx.items_of(op).map(|i| (i.key, i.desc)));
            all.extend(waiting.map(|(key, desc)| text(rank, &key, &desc)));
        }
        let own = self.own_sends.iter().filter(|s| s.op == op);
        all.extend(own.map(|s| text(group.rank, &s.key, &s.desc)));
        if all.len() > SHOWN {
            let more = format!("and {} more", all.len() - SHOWN);
            all.truncate(SHOWN);
            all.push(more);
        }
        all
    }

    /// A message of an operation that waits for endpoint rank `p`.
    pub(super) fn waits_for(&self, op: OpId, p: usize) -> Option<(Key, OpDesc)> {
        let peer = &self.peers[p];
        let receives = peer.posted.iter().filter(|x| x.op == op).map(|x| (x.key, x.desc));
        receives.chain(peer.tx.items_of(op).map(|i| (i.key, i.desc))).next()
    }

    /// A message that came and that nobody received.
    pub(super) fn leftover(&self, g: usize) -> Option<(usize, Key, OpDesc)> {
        let come = self.peers.iter().enumerate().find_map(|(p, peer)| {
            // One that is only announced belongs to a call that has ended with an error.
            let mut data = peer.unexpected.iter().filter(|u| u.key.group == g && u.key.kind == P2P);
            data.next().map(|u| (p, u.key, u.desc))
        });
        let own = self.own_sends.iter().find(|s| s.key.group == g).map(|s| (self.rank, s.key, s.desc));
        come.or(own)
    }
}
