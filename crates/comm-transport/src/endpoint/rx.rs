//! The receiving side of one link: headers, payloads, and where they go.

use comm_core::{OpDesc, PeerCause};

use super::live::{Mark, cause_of};
use super::op::Sink;
use super::state::{COLLECTIVE, Key, OVERHEAD, P2P, Posted, State, Unexpected};
use crate::frame::{HEADER, Header, Kind};

/// Bytes read at once when no long payload is under way.
const BUFFER: usize = 16 << 10;
/// Buffers that wait for a link with something to read.
const SPARE: usize = 2;
/// Bytes that one link may deliver before the others get their turn.
const BUDGET: usize = 1 << 20;
/// Bytes that one peer may send for communicators that this rank has not created yet: the windows of a few.
const ORPHANS: u64 = 32 << 20;
/// Payloads of at least this many bytes are read straight into their place.
const DIRECT: usize = 2 << 10;

/// The frame whose payload is being read.
struct InFrame {
    header: Header,
    left: usize,
    crc: Option<crc32fast::Hasher>,
    /// Payload of our own small frames and of orphans; other data goes to its message instead.
    small: Vec<u8>,
    /// Of a group that this rank has not created yet.
    orphan: bool,
    /// The payload is read and dropped.
    discard: bool,
    /// It contradicts what this rank does, if its checksum says that it is what was sent.
    judge: bool,
    /// Index of the group the frame belongs to.
    group: Option<usize>,
}

#[derive(Default)]
pub(crate) struct Rx {
    buf: Vec<u8>,
    start: usize,
    end: usize,
    frame: Option<InFrame>,
    next_frame: u32,
}

impl Rx {
    pub(crate) fn in_frame(&self) -> bool {
        self.frame.is_some() || self.start < self.end
    }

    pub(crate) fn clear(&mut self) {
        *self = Self::default();
    }

    /// How far it has come: frames begun, and what is left of the one under way.
    pub(crate) fn mark(&self) -> Mark {
        Mark(self.next_frame, self.frame.as_ref().map_or(0, |f| f.left), self.end - self.start)
    }

    /// The group was closed: frames of it that are under way go nowhere.
    pub(crate) fn forget_group(&mut self, group: usize) {
        if let Some(f) = &mut self.frame
            && f.group == Some(group)
        {
            f.discard = true;
            f.group = None;
        }
    }
}

/// The outcome of one read.
enum Got {
    Bytes,
    /// Nothing more for now.
    Drained,
    Gone(PeerCause),
}

impl State {
    /// Reads from a peer until nothing is left or the budget is used.
    pub(crate) fn pump_rx(&mut self, p: usize) {
        self.read_on(p);
        // Most links are silent most of the time: together they need few buffers.
        let rx = &mut self.peers[p].rx;
        if rx.start == rx.end && !rx.buf.is_empty() {
            (rx.start, rx.end) = (0, 0);
            let buf = std::mem::take(&mut rx.buf);
            if self.spare.len() < SPARE {
                self.spare.push(buf);
            }
        }
    }

    fn read_on(&mut self, p: usize) {
        let mut budget = BUDGET;
        loop {
            if self.peers[p].link.is_none() || !self.consume_buffered(p) {
                return;
            }
            if budget == 0 {
                return;
            }
            match self.read_some(p, &mut budget) {
                Got::Bytes => self.moved = true,
                Got::Drained => {
                    // What came with the last read is still to be looked at.
                    if self.peers[p].rx.start == self.peers[p].rx.end {
                        return;
                    }
                    self.consume_buffered(p);
                    return;
                }
                Got::Gone(cause) => {
                    // Who could not be written to any more reads as closed.
                    let unreachable = self.peers[p].tx.unreachable;
                    self.lose_peer(p, if unreachable { PeerCause::NoHeartbeat } else { cause });
                    return;
                }
            }
        }
    }

    /// Works through what the buffer holds. False when the link was given up.
    fn consume_buffered(&mut self, p: usize) -> bool {
        loop {
            let rx = &mut self.peers[p].rx;
            if let Some(f) = &rx.frame {
                let n = f.left.min(rx.end - rx.start);
                if n == 0 && f.left > 0 {
                    return true;
                }
                if n > 0 {
                    let mut buf = std::mem::take(&mut rx.buf);
                    let at = rx.start;
                    rx.start += n;
                    self.deliver(p, &mut buf[at..at + n]);
                    if self.peers[p].link.is_none() {
                        return false;
                    }
                    self.peers[p].rx.buf = buf;
                }
                if self.peers[p].rx.frame.as_ref().is_some_and(|f| f.left == 0) && !self.end_frame(p) {
                    return false;
                }
                continue;
            }
            if rx.end - rx.start < HEADER {
                return true;
            }
            let raw: [u8; HEADER] = std::array::from_fn(|i| rx.buf[rx.start + i]);
            rx.start += HEADER;
            match Header::decode(&raw) {
                Ok(h) => {
                    if h.frame != rx.next_frame {
                        let ahead = h.frame.wrapping_sub(rx.next_frame) < u32::MAX / 2;
                        let how = if ahead { "frames were lost" } else { "a frame came again" };
                        let what = format!("{how}: frame {} arrived where frame {} was due", h.frame, rx.next_frame);
                        self.corrupt(p, what);
                        return false;
                    }
                    rx.next_frame = rx.next_frame.wrapping_add(1);
                    if self.checksum && h.crc.is_none() {
                        self.corrupt(p, "a frame without checksum where checksums are agreed".into());
                        return false;
                    }
                    let crc = h.crc.map(|_| Header::crc_start(&raw));
                    if !self.begin_frame(p, h, crc) {
                        return false;
                    }
                }
                Err(bad) => {
                    self.corrupt(p, bad.to_string());
                    return false;
                }
            }
        }
    }

    /// One read, straight into the payload's place when that is known and worth it.
    fn read_some(&mut self, p: usize, budget: &mut usize) -> Got {
        let rx = &self.peers[p].rx;
        if let Some(f) = &rx.frame
            && f.left >= DIRECT
        {
            return self.read_payload(p, budget);
        }
        let peer = &mut self.peers[p];
        let Some(link) = peer.link.as_mut() else { return Got::Gone(PeerCause::Killed) };
        let rx = &mut peer.rx;
        if rx.buf.is_empty() {
            rx.buf = self.spare.pop().unwrap_or_else(|| vec![0; BUFFER]);
        }
        if rx.start > 0 {
            rx.buf.copy_within(rx.start..rx.end, 0);
            rx.end -= rx.start;
            rx.start = 0;
        }
        let room = rx.buf.len() - rx.end;
        let end = rx.end;
        match link.read(&mut rx.buf[end..]) {
            Ok(0) => Got::Gone(PeerCause::Killed),
            Ok(n) => {
                rx.end += n;
                *budget = budget.saturating_sub(n);
                self.moved = true;
                // A short read emptied the socket: asking again would only cost a system call.
                if n < room { Got::Drained } else { Got::Bytes }
            }
            Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => Got::Drained,
            Err(e) => Got::Gone(cause_of(&e)),
        }
    }

    fn read_payload(&mut self, p: usize, budget: &mut usize) -> Got {
        let mut scratch = self.take_scratch();
        let peer = &mut self.peers[p];
        let (Some(link), Some(f)) = (peer.link.as_mut(), peer.rx.frame.as_mut()) else {
            self.keep_scratch(scratch);
            return Got::Gone(PeerCause::Killed);
        };
        let want = f.left;
        // Straight into a posted buffer, unless the bytes are folded.
        let place = match (f.discard, f.group) {
            (false, Some(g)) if f.header.kind.is_data() => {
                let key = key_of(&f.header, g);
                peer.posted.iter().position(|x| x.key == key)
            }
            _ => None,
        };
        let direct = place.and_then(|i| match peer.posted[i].sink {
            // The posted length equals the message's (checked when the frame began), so `left` bytes fit.
            Sink::Copy(dst) => Some((i, dst.wrapping_add(peer.posted[i].got as usize))),
            Sink::Fold { .. } => None,
        });
        let got = match direct {
            Some((i, dst)) => {
                // SAFETY: a posted receive's buffer is valid and unaliased until its operation is closed
                // (Port::recv); `got + left` does not exceed its length.
                let into = unsafe { std::slice::from_raw_parts_mut(dst, want) };
                let r = link.read(into);
                if let Ok(n) = r {
                    if let Some(c) = &mut f.crc {
                        c.update(&into[..n]);
                    }
                    peer.posted[i].got += n as u64;
                    f.left -= n;
                }
                r
            }
            None => {
                let n = want.min(scratch.len());
                let r = link.read(&mut scratch[..n]);
                if let Ok(n) = r {
                    self.deliver(p, &mut scratch[..n]);
                }
                r
            }
        };
        self.keep_scratch(scratch);
        match got {
            Ok(0) => Got::Gone(PeerCause::Killed),
            Ok(n) => {
                *budget = budget.saturating_sub(n);
                Got::Bytes
            }
            Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => Got::Drained,
            Err(e) => Got::Gone(cause_of(&e)),
        }
    }

    /// Looks at a new frame. False when the link was given up.
    fn begin_frame(&mut self, p: usize, h: Header, crc: Option<crc32fast::Hasher>) -> bool {
        let group = self.by_id.get(&h.comm).copied();
        let group = group.filter(|g| self.groups[*g].as_ref().is_some_and(|g| g.rank_of(p).is_some()));
        let stale = group.is_some_and(|g| self.groups[g].as_ref().is_some_and(|g| g.generation != h.generation));
        // A heartbeat is no group's.
        let orphan = h.kind != Kind::Heartbeat && !self.by_id.contains_key(&h.comm) && !self.dead.contains(&h.comm);
        let left = h.len as usize;
        let mut f = InFrame { header: h, left, crc, small: Vec::new(), orphan, discard: stale, judge: false, group };
        if group.is_none() && !orphan {
            // A late frame of a communicator that is gone here, or not the peer's.
            f.discard = true;
        }
        if let (Some(g), false) = (group, f.discard)
            && h.kind.is_data()
        {
            f.judge = f.crc.is_some() && self.contradicts(p, g, &h);
            match if f.judge { Ok(false) } else { self.admit_data(p, g, &h) } {
                Ok(wanted) => f.discard = !wanted,
                Err(what) => {
                    self.corrupt(p, what);
                    return false;
                }
            }
        }
        self.peers[p].rx.frame = Some(f);
        self.peers[p].rx.frame.as_ref().is_some_and(|f| f.left > 0) || self.end_frame(p)
    }

    /// Whether a data frame is none that the peer should have sent. Not to be believed before its checksum.
    fn contradicts(&self, p: usize, g: usize, h: &Header) -> bool {
        let key = key_of(h, g);
        if let Some(x) = self.peers[p].posted.iter().find(|x| x.key == key) {
            return !compatible(key.kind, &x.desc, &h.desc) || h.total != x.len || h.offset != x.got;
        }
        key.kind == COLLECTIVE && self.own_call(g, key.seq).is_some_and(|ours| ours.disagreement(&h.desc).is_some())
    }

    /// Checks a data frame against what this rank does. `Ok(false)`: nobody wants it.
    fn admit_data(&mut self, p: usize, g: usize, h: &Header) -> Result<bool, String> {
        let key = key_of(h, g);
        let known = self.peers[p].posted.iter().position(|x| x.key == key);
        if let Some(i) = known {
            let posted = &self.peers[p].posted[i];
            let (ours, len, got) = (posted.desc, posted.len, posted.got);
            if !compatible(key.kind, &ours, &h.desc) {
                self.mismatch(g, p, key, h.desc, Some(ours));
                return Ok(false);
            }
            if key.kind == COLLECTIVE && h.offset == 0 {
                self.arrived(g, p, key.seq);
            }
            if h.total != len && got == 0 && self.lengths_differ(g, p, key, (h.desc, h.total), (ours, len)) {
                return Ok(false);
            }
            if h.total != len || h.offset != got {
                return Err(format!(
                    "a part of {} bytes at {} of {} where {} of {} bytes were due",
                    h.len, h.offset, h.total, got, len
                ));
            }
            return Ok(true);
        }
        let wanted = match key.kind {
            COLLECTIVE => self.admit_collective(p, g, key.seq, &h.desc),
            // A message that was under way when its receive was refused.
            _ => !self.is_refused_here(g, p, &key),
        };
        if !wanted {
            return Ok(false);
        }
        if h.kind == Kind::P2pData {
            // Its receive was cancelled.
            return Ok(false);
        }
        let Some(window) = self.groups[g].as_ref().map(|g| g.window) else { return Ok(false) };
        let peer = &mut self.peers[p];
        let cost = u64::from(h.len) + OVERHEAD;
        if peer.chans[g].held[key.kind] + cost > window + OVERHEAD {
            return Err("more unrequested data than its credit allows".into());
        }
        match peer.unexpected.iter_mut().find(|u| u.key == key) {
            Some(u) => {
                if u.total != h.total || u.data.len() as u64 != h.offset {
                    return Err("parts of a message do not join".into());
                }
            }
            None => {
                if h.offset != 0 {
                    return Err("a message begins in its middle".into());
                }
                let data = Vec::with_capacity(h.len as usize);
                peer.unexpected.push(Unexpected { key, desc: h.desc, total: h.total, data, cost: 0 });
            }
        }
        Ok(true)
    }

    /// A peer has begun a call.
    fn arrived(&mut self, g: usize, p: usize, seq: u64) {
        if let Some(group) = self.groups[g].as_mut()
            && let Some(rank) = group.rank_of(p)
        {
            group.saw(rank, seq);
        }
    }

    /// Takes payload bytes of the current frame to their place.
    fn deliver(&mut self, p: usize, bytes: &mut [u8]) {
        let peer = &mut self.peers[p];
        let Some(f) = peer.rx.frame.as_mut() else { return };
        f.left -= bytes.len();
        if let Some(c) = &mut f.crc {
            c.update(bytes);
        }
        if f.discard {
            return;
        }
        if f.orphan || !f.header.kind.is_data() {
            f.small.extend_from_slice(bytes);
            return;
        }
        let Some(g) = f.group else { return };
        let key = key_of(&f.header, g);
        if let Some(x) = peer.posted.iter_mut().find(|x| x.key == key) {
            absorb(x, bytes);
        } else if let Some(u) = peer.unexpected.iter_mut().find(|u| u.key == key) {
            u.data.extend_from_slice(bytes);
        } else {
            // Its receive was cancelled while the frame was under way.
            f.discard = true;
        }
    }

    /// The current frame is complete. False when the link was given up.
    fn end_frame(&mut self, p: usize) -> bool {
        let Some(f) = self.peers[p].rx.frame.take() else { return true };
        let h = f.header;
        if let Some(c) = f.crc
            && h.crc != Some(c.finalize())
        {
            self.corrupt(p, format!("the checksum of a {:?} frame is wrong", h.kind));
            return false;
        }
        self.moved = true;
        if h.kind == Kind::Heartbeat {
            self.learn_timeout(p, h.offset);
            return true;
        }
        if f.orphan {
            self.orphan(p, h, f.small);
            return self.peers[p].link.is_some();
        }
        if !h.kind.is_data() {
            if let (Some(g), false) = (f.group, f.discard) {
                self.control_frame(p, h, g, f.small);
            }
            return self.peers[p].link.is_some();
        }
        let Some(g) = f.group else { return true };
        let key = key_of(&h, g);
        if h.kind == Kind::Collective || h.kind == Kind::Eager {
            // Held data is paid for when it is consumed, everything else now.
            let cost = u64::from(h.len) + OVERHEAD;
            let peer = &mut self.peers[p];
            match peer.unexpected.iter_mut().find(|u| u.key == key) {
                Some(u) if !f.discard => {
                    u.cost += cost;
                    peer.chans[g].held[key.kind] += cost;
                }
                _ => self.return_credit(p, g, key.kind, cost),
            }
        }
        if f.judge
            && let Err(what) = self.admit_data(p, g, &h)
        {
            self.corrupt(p, what);
            return false;
        }
        if f.discard {
            return self.peers[p].link.is_some();
        }
        self.complete_posted(p, &key);
        self.peers[p].link.is_some()
    }

    /// A whole frame of a group that did not exist here when the frame began: the peer was faster. It is kept
    /// until the group exists.
    fn orphan(&mut self, p: usize, h: Header, payload: Vec<u8>) {
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
    fn complete_posted(&mut self, p: usize, key: &Key) {
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
fn absorb(x: &mut Posted, bytes: &mut [u8]) {
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
