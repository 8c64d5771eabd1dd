//! The receiving side of one link: headers, payloads, and where they go.

use comm_core::PeerCause;

use super::live::{Mark, cause_of};
use super::matching::{absorb, compatible, key_of};
use super::op::Sink;
use super::state::{COLLECTIVE, OVERHEAD, State, Unexpected};
use crate::frame::{HEADER, Header, Kind};

/// Bytes read at once when no long payload is under way.
const BUFFER: usize = 16 << 10;
/// Buffers that wait for a link with something to read.
const SPARE: usize = 2;
/// Bytes that one link may deliver before the others get their turn.
const BUDGET: usize = 1 << 20;
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
    pub(super) fn admit_data(&mut self, p: usize, g: usize, h: &Header) -> Result<bool, String> {
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
}
