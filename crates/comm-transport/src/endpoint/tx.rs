//! The sending side of one link: which frame goes next, and writing it piece by piece.

use std::collections::VecDeque;

use comm_core::{OpDesc, PeerCause};

use super::live::{Mark, cause_of};
use super::op::{OpId, PieceId};
use super::state::{COLLECTIVE, Key, OVERHEAD, State};
use crate::frame::{FRAGMENT, HEADER, Header, Kind};

/// Bytes that one pass writes to one peer, so that the others, and readers, get their turn.
const BUDGET: usize = 2 << 20;
/// Small frames that may wait for a peer to read.
const CONTROL_QUEUE: usize = 1 << 16;
/// A message is not cut into parts smaller than this for want of credit.
const LEAST_PART: u64 = 32 << 10;

/// A message, or what is left of it, that waits to be sent.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SendItem {
    pub(crate) key: Key,
    pub(crate) kind: Kind,
    pub(crate) comm: u64,
    pub(crate) generation: u32,
    pub(crate) desc: OpDesc,
    pub(crate) ptr: *const u8,
    pub(crate) total: u64,
    pub(crate) sent: u64,
    pub(crate) op: OpId,
    pub(crate) piece: PieceId,
}

enum Body {
    /// `len` bytes of the item's buffer.
    User(*const u8),
    Owned(Vec<u8>),
}

/// The frame that is being written.
struct OutFrame {
    head: [u8; HEADER],
    body: Body,
    len: usize,
    /// Bytes written, header included.
    written: usize,
    item: Option<SendItem>,
}

#[derive(Default)]
pub(crate) struct Tx {
    /// Small frames of our own; they go before data.
    control: VecDeque<(Header, Vec<u8>)>,
    data: VecDeque<SendItem>,
    current: Option<OutFrame>,
    next_frame: u32,
    /// The kernel's buffer is full: writability is awaited.
    pub(crate) blocked: bool,
    /// Writing has failed; what is queued stays so that those who wait for it are found.
    pub(crate) broken: bool,
    /// It has failed because the peer's host does not answer.
    pub(crate) unreachable: bool,
    /// Whether the poller is told to watch writability.
    pub(crate) watched: bool,
    /// Announced point-to-point messages that wait for clear-to-send.
    pub(crate) announced: Vec<SendItem>,
}

impl Tx {
    /// Whether something could be written now or when the link becomes writable.
    pub(crate) fn is_busy(&self) -> bool {
        !self.broken && (self.current.is_some() || !self.control.is_empty() || !self.data.is_empty())
    }

    /// Whether everything but data that waits for credit is written.
    pub(crate) fn control_flushed(&self) -> bool {
        self.broken || (self.current.is_none() && self.control.is_empty())
    }

    /// How far it has come: frames begun, and what is written of the one under way.
    pub(crate) fn mark(&self) -> Mark {
        Mark(self.next_frame, self.current.as_ref().map_or(0, |f| f.written), 0)
    }

    pub(crate) fn push_control(&mut self, h: Header, payload: Vec<u8>) {
        self.control.push_back((h, payload));
    }

    pub(crate) fn push_data(&mut self, item: SendItem) {
        self.data.push_back(item);
    }

    /// The connection is over.
    pub(crate) fn end(&mut self) {
        self.broken = true;
        self.blocked = false;
        self.control.clear();
    }

    /// Whether messages of a group are not written yet.
    pub(crate) fn has_data(&self, group: usize) -> bool {
        let current = self.current.as_ref().and_then(|f| f.item.as_ref());
        self.data.iter().chain(&self.announced).chain(current).any(|i| i.key.group == group)
    }

    /// Whether messages of an operation are not written yet.
    pub(crate) fn has_op(&self, op: OpId) -> bool {
        let current = self.current.as_ref().and_then(|f| f.item.as_ref());
        self.data.iter().chain(&self.announced).chain(current).any(|i| i.op == op)
    }

    /// Messages of an operation that are not written yet.
    pub(crate) fn items_of(&self, op: OpId) -> impl Iterator<Item = &SendItem> {
        let current = self.current.as_ref().and_then(|f| f.item.as_ref());
        self.data.iter().chain(&self.announced).chain(current).filter(move |i| i.op == op)
    }

    /// Forgets what an operation wanted to send. The rest of a frame whose header is out is kept in a
    /// copy: the stream must go on in step.
    pub(crate) fn purge(&mut self, op: OpId) {
        self.data.retain(|i| i.op != op);
        self.announced.retain(|i| i.op != op);
        if let Some(f) = &mut self.current
            && f.item.is_some_and(|i| i.op == op)
        {
            if let Body::User(ptr) = f.body {
                let rest = if f.len == 0 {
                    // The pointer of an empty buffer may be anything.
                    Vec::new()
                } else {
                    // SAFETY: the operation is still open (it is being ended under the lock), so its buffer is valid.
                    unsafe { std::slice::from_raw_parts(ptr, f.len) }.to_vec()
                };
                f.body = Body::Owned(rest);
            }
            f.item = None;
        }
    }
}

impl State {
    /// Queues a small frame to a peer and tries to write it.
    pub(crate) fn send_control(&mut self, p: usize, h: Header, payload: Vec<u8>) {
        debug_assert!(payload.len() <= FRAGMENT);
        if self.peers[p].tx.control.len() >= CONTROL_QUEUE {
            // A peer that asks and does not read must not fill this rank's memory.
            return self.corrupt(p, format!("it has left {CONTROL_QUEUE} small frames unread"));
        }
        if self.is_reachable(p) {
            self.peers[p].tx.push_control(h, payload);
            self.want_link(p);
            self.pump_tx(p);
        }
    }

    /// Chooses the next frame: our own small ones first, then the first message that has credit.
    fn next_frame(&mut self, p: usize) -> Option<OutFrame> {
        let checksum = self.checksum;
        let peer = &mut self.peers[p];
        let tx = &mut peer.tx;
        let number = tx.next_frame;
        if let Some((mut h, payload)) = tx.control.pop_front() {
            tx.next_frame = number.wrapping_add(1);
            h.frame = number;
            h.len = payload.len() as u32;
            let head = h.encode(checksum.then_some(&payload[..]));
            return Some(OutFrame { head, len: payload.len(), body: Body::Owned(payload), written: 0, item: None });
        }
        for i in 0..tx.data.len() {
            let item = tx.data[i];
            let left = item.total - item.sent;
            let mut len = left.min(FRAGMENT as u64);
            if item.kind == Kind::Collective {
                // Half of the credit is for the oldest call that is open here. A rank that is ahead would else
                // fill the receiver with data of calls which that one has not made, and have nothing left for
                // the call in which the receiver waits. The oldest call of all ranks is the oldest on each rank
                // that has it open, so it always goes on, and with it in the end every other.
                let group = self.groups[item.key.group].as_ref();
                let reserved = group.filter(|g| g.oldest_open() < Some(item.key.seq)).map_or(0, |g| g.window / 2);
                let credit = &mut peer.chans[item.key.group].credit[COLLECTIVE];
                let usable = credit.saturating_sub(reserved);
                if usable < OVERHEAD + left.min(LEAST_PART) {
                    continue;
                }
                len = len.min(usable - OVERHEAD);
                *credit -= len + OVERHEAD;
            }
            tx.data.remove(i);
            tx.next_frame = number.wrapping_add(1);
            let h = Header {
                len: len as u32,
                step: item.key.step,
                seq: item.key.seq,
                offset: item.sent,
                total: item.total,
                desc: item.desc,
                frame: number,
                ..Header::new(item.kind, item.comm, item.generation)
            };
            let ptr = item.ptr.wrapping_add(item.sent as usize);
            let head = if checksum && len > 0 {
                // SAFETY: the item's operation is open, so its buffer of `total` bytes is valid (Port::send).
                h.encode(Some(unsafe { std::slice::from_raw_parts(ptr, len as usize) }))
            } else {
                h.encode(checksum.then_some(&[]))
            };
            return Some(OutFrame { head, body: Body::User(ptr), len: len as usize, written: 0, item: Some(item) });
        }
        None
    }

    /// Writes to a peer until nothing is left or the link is full.
    pub(crate) fn pump_tx(&mut self, p: usize) {
        if self.peers[p].tx.broken {
            return;
        }
        if self.peers[p].link.is_none() {
            // What is queued goes out when the link is there.
            return self.want_link(p);
        }
        let mut budget = BUDGET;
        loop {
            if self.peers[p].tx.current.is_none() {
                if budget == 0 {
                    // The pass has moved something, so nobody goes to sleep before the next one.
                    return;
                }
                let Some(f) = self.next_frame(p) else {
                    self.peers[p].tx.blocked = false;
                    return;
                };
                self.peers[p].tx.current = Some(f);
            }
            let peer = &mut self.peers[p];
            let (Some(link), Some(f)) = (peer.link.as_mut(), peer.tx.current.as_mut()) else { return };
            let head = &f.head[f.written.min(HEADER)..];
            let off = f.written.saturating_sub(HEADER);
            let body: &[u8] = match &f.body {
                Body::Owned(v) => &v[off..],
                _ if f.len == 0 => &[],
                // SAFETY: as in `next_frame`: the operation is open, or `purge` has replaced the body by a copy.
                Body::User(ptr) => unsafe { std::slice::from_raw_parts(ptr.add(off), f.len - off) },
            };
            match link.write(head, body) {
                Ok(n) => {
                    f.written += n;
                    budget = budget.saturating_sub(n);
                    self.moved = true;
                    self.bytes_sent += n as u64;
                }
                Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => {
                    peer.tx.blocked = true;
                    return;
                }
                Err(e) => {
                    // The peer's last words (an abort, a goodbye) may still be unread and explain it: the end of
                    // the connection is noticed where they are read.
                    peer.tx.broken = true;
                    peer.tx.unreachable = cause_of(&e) == PeerCause::NoHeartbeat;
                    return;
                }
            }
            let peer = &mut self.peers[p];
            if peer.tx.current.as_ref().is_some_and(|f| f.written == HEADER + f.len) {
                let done = peer.tx.current.take();
                self.frames_sent += 1;
                if let Some(OutFrame { item: Some(mut item), len, .. }) = done {
                    item.sent += len as u64;
                    if item.sent == item.total {
                        self.piece_done(item.op, item.piece);
                    } else {
                        // Behind the others, so that a long message does not block a short one.
                        self.peers[p].tx.push_data(item);
                    }
                }
            }
        }
    }
}
