//! Small frames: goodbyes, control-plane messages, and what peers say about calls.

use comm_core::{ErrorKind, OpDesc, Operation, PeerCause, Result};

use super::failure::Failure;
use super::group::{Gone, Known, REASON, SILENT};
use super::news::End;
use super::state::{COLLECTIVE, State};
use crate::frame::{FRAGMENT, Header, Kind};

/// Messages that one peer may have waiting in the control inbox.
const INBOX: usize = 4096;
/// And their bytes: two of the longest.
const INBOX_BYTES: usize = 128 << 20;

impl State {
    /// Says goodbye. After it this rank makes no more calls.
    pub(crate) fn say_goodbye(&mut self, g: usize, how: Gone) {
        let Some(group) = self.group(g) else { return };
        if group.left.is_some() {
            return;
        }
        if how != Gone::Finalized {
            // Who leaves because a member is lost must not be taken for the cause.
            self.blame_suspects(g);
        }
        let Some(group) = self.group_mut(g) else { return };
        group.left = Some(how);
        group.agreement.leave();
        // Who has failed waits for nobody.
        group.over = how != Gone::Finalized || group.failed.is_some();
        // The reason goes first: a member that has not heard it yet must not blame this rank for leaving.
        if let Some(f) = group.failed.clone() {
            self.tell_failure(g, &f);
        }
        self.tell_end(g, End::Left(how));
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

    /// Whether all members have finalized and found nothing wrong; the error if that cannot be any more.
    ///
    /// In two rounds: when all goodbyes are here, everything that anybody ever sent to this rank has been
    /// looked at; if it was in order, the others get a farewell. So nobody's finalize goes well when
    /// somebody else has found a mismatch.
    pub(crate) fn all_finalized(&mut self, g: usize) -> Option<Result<()>> {
        let group = self.group(g)?;
        if group.failed.is_none()
            && let Some((rank, how)) =
                group.gone.iter().enumerate().find_map(|(r, g)| Some((r, g.filter(|g| *g != Gone::Finalized)?)))
        {
            let error = how.error(rank, group.generation);
            self.fail_group(g, error, true);
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
        let parted = group.parted;
        if !parted && let Some((seq, calls)) = self.silent_difference(g) {
            self.fail_calls(g, seq, calls);
            return Some(Err(self.localized_at_finalize(g)));
        }
        // A message that nobody received is lost now, which its sender could not know.
        if !parted && let Some((p, key, theirs)) = self.leftover(g) {
            self.mismatch(g, p, key, theirs, Some(OpDesc::new(Operation::Finalize)));
            return Some(Err(self.localized(g, None)));
        }
        let group = self.group_mut(g)?;
        if !std::mem::replace(&mut group.parted, true) {
            self.tell_end(g, End::Farewell);
        }
        ended.then_some(Ok(()))
    }

    /// The first call without elements that members made differently.
    fn silent_difference(&self, g: usize) -> Option<(u64, Vec<(usize, OpDesc)>)> {
        let group = self.group(g)?;
        group.silent.iter().find_map(|(seq, ours)| {
            let theirs = |list: &Vec<(u64, OpDesc)>| list.iter().find(|(s, _)| s == seq).map(|(_, d)| *d);
            let mut calls: Vec<_> =
                group.silent_of.iter().enumerate().filter_map(|(r, l)| theirs(l).map(|d| (r, d))).collect();
            calls.push((group.rank, *ours));
            calls.sort_unstable_by_key(|(r, _)| *r);
            calls.iter().any(|(_, d)| d.disagreement(ours).is_some()).then_some((*seq, calls))
        })
    }

    /// Finalize returns: what comes now does not matter. A call that another thread has open ends here: nothing
    /// else would end it any more.
    pub(crate) fn end_finalize(&mut self, g: usize) {
        self.end_ops(g);
        // Why this rank leaves now, after its goodbye: one that has not heard it yet must not blame it for the end of its links.
        if let Some(f) = self.group(g).and_then(|g| g.failed.clone()) {
            self.tell_failure(g, &f);
        }
        if let Some(group) = self.group_mut(g) {
            group.over = true;
        }
    }

    /// Whether no operation of a group is open.
    pub(crate) fn is_idle(&self, g: usize) -> bool {
        !self.ops.iter().any(|s| s.live && s.group == g && s.result.is_none())
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
        if !self.is_reachable(p) {
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
        if let Some(how) = group.gone[rank] {
            return Some(Err(how.error(rank, group.generation)));
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
            Kind::Refuse => {
                let Some(origin) = self.origin(g, rank, &h) else { return };
                if self.group_mut(g).is_some_and(|g| !g.sparse || g.is_first(Kind::Refuse, origin, h.seq)) {
                    self.relay(g, p, Header { total: origin as u64 + 1, ..h }, &payload);
                    self.refused_by(g, origin, h.seq, reason(&payload));
                }
            }
            Kind::RefuseP2p => self.message_refused(p, g, rank, &h, reason(&payload)),
            Kind::RequestToSend => self.announced(p, g, &h),
            Kind::ClearToSend => self.cleared(p, g, &h),
            Kind::Abort => match postcard::from_bytes::<Failure>(&payload) {
                // Who hears of it first tells those whom the first ones cannot.
                Ok(f) => {
                    let Some(group) = self.group_mut(g) else { return };
                    if f.names(group.rank) && !group.given_up.contains(&f.origin) {
                        group.given_up.push(f.origin);
                    }
                    let pass_on = group.sparse;
                    self.fail(g, f, pass_on);
                }
                Err(_) => self.corrupt(p, "an abort frame that cannot be read".into()),
            },
            Kind::Goodbye => {
                // Who sends something else has nothing to compare.
                let silent = postcard::from_bytes::<Vec<(u64, OpDesc)>>(&payload).unwrap_or_default();
                let silent = if silent.len() <= SILENT { silent } else { Vec::new() };
                self.apply_goodbye(g, rank, End::from(h.offset), silent);
            }
            Kind::News => self.heard(p, g, &payload),
            Kind::Agree => self.agree_frame(p, g, rank, &payload),
            Kind::Status => self.status_frame(g, p, rank, h),
            Kind::Query => {
                self.tell_below(g, h, &[]);
                self.queried(g, h.seq);
            }
            Kind::Publish => {
                let Some(origin) = self.origin(g, rank, &h) else { return };
                if self.group(g).is_some_and(|g| g.rank == 0) {
                    self.published(g, origin, h.seq, h.offset);
                } else {
                    self.tell_root(g, h, false);
                }
            }
            Kind::Arrivals => {
                self.tell_below(g, h, &payload);
                if let (Ok(list), Some(group)) = (postcard::from_bytes::<Vec<usize>>(&payload), self.group_mut(g))
                    && list.len() <= group.members.len()
                {
                    group.monitor.learn(h.seq, list);
                }
            }
            Kind::Heartbeat | Kind::Collective | Kind::Eager | Kind::P2pData => {}
        }
    }

    pub(super) fn control_part(&mut self, p: usize, g: usize, rank: usize, h: &Header, payload: Vec<u8>) {
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

/// The text of a refusal, which a peer may make as long as a frame.
fn reason(payload: &[u8]) -> String {
    String::from_utf8_lossy(&payload[..payload.len().min(REASON)]).into_owned()
}
