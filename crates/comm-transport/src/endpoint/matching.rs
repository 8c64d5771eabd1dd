//! Which message goes into which receive: those that wait for each other on either side, and credit for what is held.

use comm_core::OpDesc;

use super::op::Sink;
use super::state::{COLLECTIVE, Key, OVERHEAD, P2P, Posted, State, Unexpected};
use crate::frame::{Header, Kind};

/// Bytes that one peer may send for communicators that this rank has not created yet: the windows of a few.
const ORPHANS: u64 = 32 << 20;

impl State {
    /// A whole frame of a group that did not exist here when the frame began: the peer was faster. It is kept
    /// until the group exists.
    pub(super) fn orphan(&mut self, p: usize, h: Header, payload: Vec<u8>) {
        if let Some(g) = self.by_id.get(&h.comm).copied() {
            return self.adopt(p, g, h, payload);
        }
        let cost = payload.len() as u64 + OVERHEAD;
        self.peers[p].orphaned += cost;
        if self.peers[p].orphaned > ORPHANS {
            return self.corrupt(p, "too much data for communicators that do not exist here".into());
        }
        self.orphans.push_back((p, h, payload));
    }

    /// Takes a frame that came before its group.
    pub(crate) fn adopt(&mut self, p: usize, g: usize, h: Header, payload: Vec<u8>) {
        let known = self.groups[g].as_ref().is_some_and(|g| g.rank_of(p).is_some() && g.generation == h.generation);
        if !known {
            return;
        }
        if !h.kind.is_data() {
            return self.control_frame(p, h, g, payload);
        }
        let key = key_of(&h, g);
        let wanted = match self.admit_data(p, g, &h) {
            Ok(w) => w,
            Err(what) => return self.corrupt(p, what),
        };
        let cost = u64::from(h.len) + OVERHEAD;
        let peer = &mut self.peers[p];
        let mut payload = payload;
        if let Some(x) = peer.posted.iter_mut().find(|x| wanted && x.key == key) {
            absorb(x, &mut payload);
            self.complete_posted(p, &key);
        } else if let Some(u) = peer.unexpected.iter_mut().find(|u| wanted && u.key == key) {
            u.data.append(&mut payload);
            u.cost += cost;
            peer.chans[g].held[key.kind] += cost;
            return;
        }
        if h.kind != Kind::P2pData {
            self.return_credit(p, g, key.kind, cost);
        }
    }

    /// Ends a posted receive that has all its bytes.
    pub(super) fn complete_posted(&mut self, p: usize, key: &Key) {
        let peer = &mut self.peers[p];
        if let Some(i) = peer.posted.iter().position(|x| x.key == *key && x.got == x.len) {
            let x = peer.posted.swap_remove(i);
            self.piece_done(x.op, x.piece);
        }
    }

    /// Credit for consumed bytes goes back in lumps.
    pub(crate) fn return_credit(&mut self, p: usize, g: usize, kind: usize, cost: u64) {
        let Some((id, generation, window)) = self.groups[g].as_ref().map(|g| (g.id, g.generation, g.window)) else {
            return;
        };
        let owed = &mut self.peers[p].chans[g].owed[kind];
        *owed += cost;
        if *owed >= window / 4 {
            let h = Header { step: kind as u32, offset: *owed, ..Header::new(Kind::Credit, id, generation) };
            *owed = 0;
            self.send_control(p, h, Vec::new());
        }
    }

    /// Posts a receive; takes what has arrived already.
    pub(crate) fn register(&mut self, p: usize, mut x: Posted) {
        let peer = &mut self.peers[p];
        let Some(i) = peer.unexpected.iter().position(|u| u.key == x.key) else {
            peer.posted.push(x);
            return;
        };
        let mut u = peer.unexpected.swap_remove(i);
        peer.chans[x.key.group].held[x.key.kind] -= u.cost;
        let key = x.key;
        if compatible(key.kind, &x.desc, &u.desc) && u.total == x.len {
            absorb(&mut x, &mut u.data);
            if x.got == x.len {
                self.piece_done(x.op, x.piece);
            } else {
                // The rest is under way.
                peer.posted.push(x);
            }
        } else if !self.lengths_differ(key.group, p, key, (u.desc, u.total), (x.desc, x.len)) {
            self.mismatch(key.group, p, key, u.desc, Some(x.desc));
        }
        // A frame under way pays for itself when it ends.
        if u.cost > 0 {
            self.return_credit(p, key.group, key.kind, u.cost);
        }
    }

    /// Throws away held data that nobody will ask for.
    pub(crate) fn drop_unexpected(&mut self, p: usize, unwanted: impl Fn(&Unexpected) -> bool) {
        let peer = &mut self.peers[p];
        let mut i = 0;
        let mut returns = Vec::new();
        while i < peer.unexpected.len() {
            if unwanted(&peer.unexpected[i]) {
                let u = peer.unexpected.swap_remove(i);
                peer.chans[u.key.group].held[u.key.kind] -= u.cost;
                returns.push((u.key, u.cost));
            } else {
                i += 1;
            }
        }
        for (key, cost) in returns {
            self.return_credit(p, key.group, key.kind, cost);
        }
    }
}

/// The message a data frame belongs to.
pub(crate) fn key_of(h: &Header, group: usize) -> Key {
    let kind = if h.kind == Kind::Collective { COLLECTIVE } else { P2P };
    Key { group, kind, seq: h.seq, step: h.step }
}

/// Whether a message may go into a receive.
pub(crate) fn compatible(kind: usize, ours: &OpDesc, theirs: &OpDesc) -> bool {
    if kind == COLLECTIVE {
        ours == theirs || ours.disagreement(theirs).is_none()
    } else {
        ours.dtype == theirs.dtype && ours.count == theirs.count
    }
}

/// Puts bytes where a posted receive wants them. `bytes` may be overwritten.
pub(super) fn absorb(x: &mut Posted, bytes: &mut [u8]) {
    debug_assert!(x.got + bytes.len() as u64 <= x.len);
    let (dst, own, reducer) = match &x.sink {
        Sink::Copy(dst) => {
            // SAFETY: the posted buffer is valid and unaliased (Port::recv); frames that would exceed its length were
            // refused when they began; `bytes` is the endpoint's own memory.
            unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), dst.add(x.got as usize), bytes.len()) };
            x.got += bytes.len() as u64;
            return;
        }
        Sink::Fold { dst, own, reducer } => (*dst, *own, reducer),
    };
    let unit = reducer.unit();
    let mut rest = bytes;
    // The stream may cut elements: first complete the one that was begun, then fold the whole ones.
    while !rest.is_empty() {
        if x.carry.is_empty() && rest.len() >= unit {
            let n = rest.len() / unit * unit;
            let (whole, tail) = rest.split_at_mut(n);
            // SAFETY: `got` lies on an element of the posted range, which is valid for its whole length.
            unsafe { fold_at(dst, own, x.got as usize, whole, reducer) };
            x.got += n as u64;
            rest = tail;
        } else {
            let n = (unit - x.carry.len()).min(rest.len());
            let (part, tail) = rest.split_at_mut(n);
            x.carry.extend_from_slice(part);
            x.got += n as u64;
            rest = tail;
            if x.carry.len() == unit {
                // SAFETY: as above; the element begins `unit` bytes back.
                unsafe { fold_at(dst, own, x.got as usize - unit, &mut x.carry, reducer) };
                x.carry.clear();
            }
        }
    }
}

/// `dst[at..] = own[at..] op x`.
///
/// # Safety
///
/// `x.len()` bytes at `at` of both ranges are valid; `own` is `dst` or does not overlap it.
unsafe fn fold_at(dst: *mut u8, own: *const u8, at: usize, x: &mut [u8], reducer: &comm_core::Reducer) {
    // SAFETY: forwarded.
    let acc = unsafe { std::slice::from_raw_parts_mut(dst.add(at), x.len()) };
    if !std::ptr::eq(own, dst) {
        // SAFETY: forwarded; the ranges do not overlap.
        acc.copy_from_slice(unsafe { std::slice::from_raw_parts(own.add(at), x.len()) });
    }
    reducer.fold(acc, x);
}
