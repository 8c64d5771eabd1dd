//! What an endpoint's lock protects, and the pass over all links that makes progress.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::task::Waker;
use std::time::Duration;

use comm_core::{ErrorKind, OpDesc, PeerCause, Time};

use super::EndpointOptions;
use super::group::Group;
use super::live::{Live, Pulse};
use super::mail::Mailbox;
use super::op::{OpId, OpSlot, PieceId, Sink};
use super::rx::Rx;
use super::tx::Tx;
use crate::frame::Header;
use crate::link::Link;
use crate::overlay::{Connect, Dialer};
use crate::wait::Notify;

/// How long the end of a connection without goodbye may be explained by an abort that is still on its
/// way through another connection, before the peer itself is blamed.
const BLAME_DELAY: Duration = Duration::from_millis(25);
/// How long a call that waits for a member that has finalized may be explained by a mismatch before that
/// member is blamed.
pub(crate) const LAST_WORD: Duration = Duration::from_millis(250);
/// In a spinning pass only links that somebody waits for are read; all are read every so many passes.
const ALL_LINKS_EVERY: u32 = 16;

/// Which half of the credit a frame uses.
pub(crate) const COLLECTIVE: usize = 0;
pub(crate) const P2P: usize = 1;
/// Credit that a frame costs beside its payload: what the receiver needs to remember it.
pub(crate) const OVERHEAD: u64 = 128;

/// Per peer and group: how much may be sent before the receiver has consumed it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Chan {
    /// What this rank may still send.
    pub(crate) credit: [u64; 2],
    /// What this rank has consumed and not yet returned.
    pub(crate) owed: [u64; 2],
    /// Bytes held for receives that are not posted yet.
    pub(crate) held: [u64; 2],
}

/// Names a message between this rank and one peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Key {
    pub(crate) group: usize,
    /// `COLLECTIVE` or `P2P`.
    pub(crate) kind: usize,
    pub(crate) seq: u64,
    /// Step or tag.
    pub(crate) step: u32,
}

/// A posted receive.
pub(crate) struct Posted {
    pub(crate) key: Key,
    pub(crate) desc: OpDesc,
    pub(crate) sink: Sink,
    pub(crate) len: u64,
    pub(crate) got: u64,
    /// Bytes of an element that has not arrived whole (folds only).
    pub(crate) carry: Vec<u8>,
    pub(crate) op: OpId,
    pub(crate) piece: PieceId,
}

/// A message, or its beginning, that arrived before its receive was posted.
pub(crate) struct Unexpected {
    pub(crate) key: Key,
    pub(crate) desc: OpDesc,
    pub(crate) total: u64,
    pub(crate) data: Vec<u8>,
    /// Credit to return when it is consumed.
    pub(crate) cost: u64,
}

/// One other rank of the endpoint.
pub(crate) struct Peer {
    pub(crate) link: Option<Box<dyn Link>>,
    pub(crate) down: Option<PeerCause>,
    /// A link has been asked for.
    pub(crate) wanted: bool,
    pub(crate) rx: Rx,
    pub(crate) tx: Tx,
    pub(crate) pulse: Pulse,
    pub(crate) chans: Vec<Chan>,
    pub(crate) posted: Vec<Posted>,
    pub(crate) unexpected: Vec<Unexpected>,
    /// Point-to-point messages announced by the peer: key, descriptor, length.
    pub(crate) announced: Vec<(Key, OpDesc, u64)>,
    /// Cost of its frames among the orphans.
    pub(crate) orphaned: u64,
}

pub(crate) struct State {
    pub(crate) rank: usize,
    pub(crate) peers: Vec<Peer>,
    pub(crate) groups: Vec<Option<Group>>,
    pub(crate) by_id: HashMap<u64, usize>,
    pub(crate) ops: Vec<OpSlot>,
    pub(crate) free_ops: Vec<u32>,
    pub(crate) runnable: VecDeque<OpId>,
    /// Wakers to call once the lock is released.
    pub(crate) wakes: Vec<Waker>,
    /// Something ended, or waiters have news, since the lock was taken.
    pub(crate) ended: bool,
    /// The current pass moved something.
    pub(crate) moved: bool,
    pub(crate) async_ops: usize,
    pub(crate) calls: u64,
    pub(crate) checksum: bool,
    pub(crate) scratch: Vec<u8>,
    pub(crate) notify: Arc<Notify>,
    /// Frames for groups that this rank has not created yet.
    pub(crate) orphans: VecDeque<(usize, Header, Vec<u8>)>,
    /// Ids of groups that were forgotten here: late frames of theirs are no orphans.
    pub(crate) dead: VecDeque<u64>,
    /// Connections that ended without goodbye, and when.
    suspects: Vec<(usize, Time, PeerCause)>,
    /// Operations that wait for a member that has finalized, the endpoint rank, and since when.
    pub(crate) forsaken: Vec<super::failure::Forsaken>,
    pass: u32,
    /// Messages from this rank to itself: sends that wait for their receive.
    pub(crate) own_sends: Vec<super::p2p::OwnSend>,
    /// Counters for metrics and tests.
    pub(crate) frames_sent: u64,
    pub(crate) bytes_sent: u64,
    pub(crate) dialer: Option<Arc<dyn Dialer>>,
    pub(crate) connect: Connect,
    /// Some group has news to pass on.
    pub(crate) has_news: bool,
    /// Buffers of links on which nothing is under way.
    pub(crate) spare: Vec<Vec<u8>>,
    /// Why the endpoint was killed, see [`Endpoint::kill`](super::Endpoint::kill).
    pub(crate) killed: Option<String>,
    pub(crate) live: Live,
    pub(crate) mail: Arc<Mailbox>,
}

// SAFETY: the raw pointers in posted receives, queued sends and self-messages point into buffers of operations
// whose owners promised (Port's contract) to keep them valid until the operation is closed; `purge` removes
// them before an operation is reported ended with pieces left. They are dereferenced under the lock only.
unsafe impl Send for State {}

impl State {
    pub(crate) fn new(
        rank: usize,
        links: Vec<Option<Box<dyn Link>>>,
        notify: Arc<Notify>,
        mail: Arc<Mailbox>,
        options: &EndpointOptions,
    ) -> Self {
        let now = options.clock.now();
        let peers = links
            .into_iter()
            .map(|link| Peer {
                link,
                down: None,
                wanted: false,
                rx: Rx::default(),
                tx: Tx::default(),
                pulse: Pulse::starting(now),
                chans: Vec::new(),
                posted: Vec::new(),
                unexpected: Vec::new(),
                announced: Vec::new(),
                orphaned: 0,
            })
            .collect();
        Self {
            rank,
            peers,
            groups: Vec::new(),
            by_id: HashMap::new(),
            ops: Vec::new(),
            free_ops: Vec::new(),
            runnable: VecDeque::new(),
            wakes: Vec::new(),
            ended: false,
            moved: false,
            async_ops: 0,
            calls: 0,
            checksum: options.checksum,
            scratch: Vec::new(),
            notify,
            orphans: VecDeque::new(),
            dead: VecDeque::new(),
            suspects: Vec::new(),
            forsaken: Vec::new(),
            pass: 0,
            own_sends: Vec::new(),
            frames_sent: 0,
            bytes_sent: 0,
            dialer: options.dialer.clone(),
            // Without a dialer every member is linked, or gone.
            connect: if options.dialer.is_some() { options.connect } else { Connect::Full },
            has_news: false,
            spare: Vec::new(),
            killed: None,
            live: Live::new(options.heartbeat, options.prober.clone(), now),
            mail,
        }
    }

    pub(crate) fn now(&self) -> Time {
        self.notify.clock().now()
    }

    /// One pass: writes what can be written, reads what is there, polls tasks with news. Returns
    /// whether anything moved. With `all == false` (spinning) idle links are mostly skipped.
    pub(crate) fn progress(&mut self, all: bool) -> bool {
        self.moved = false;
        self.open_mail();
        self.pass = self.pass.wrapping_add(1);
        let all = all || self.pass.is_multiple_of(ALL_LINKS_EVERY);
        for p in 0..self.peers.len() {
            let peer = &self.peers[p];
            if peer.link.is_none() {
                continue;
            }
            if peer.tx.is_busy() {
                self.pump_tx(p);
            }
            let peer = &self.peers[p];
            if all || !peer.posted.is_empty() || peer.tx.is_busy() || peer.rx.in_frame() {
                self.pump_rx(p);
            }
        }
        self.spread_news();
        self.run_tasks();
        self.moved
    }

    /// The connection to `p` is over. Who is to blame is decided a moment later, see [`BLAME_DELAY`].
    pub(crate) fn lose_peer(&mut self, p: usize, cause: PeerCause) {
        let now = self.now();
        let peer = &mut self.peers[p];
        // One that was given up may have its link still.
        let known = peer.down.is_some();
        peer.down.get_or_insert(cause);
        if let Some(link) = peer.link.take()
            && let Some(fd) = link.fd()
        {
            self.notify.unwatch(fd);
        }
        let peer = &mut self.peers[p];
        peer.tx.end();
        peer.rx.clear();
        self.moved = true;
        if known {
            return;
        }
        self.suspects.push((p, now, cause));
        // Those who only wait for others' news must look again.
        self.ended = true;
        self.agree_without(p);
    }

    /// Blames members whose connections are over, without waiting for a better explanation.
    pub(crate) fn blame_suspects(&mut self, g: usize) {
        let suspects: Vec<(usize, PeerCause)> = self.suspects.iter().map(|(p, _, cause)| (*p, *cause)).collect();
        for (p, cause) in suspects {
            self.blame(g, p, cause);
        }
    }

    /// Whether the blame for the end of the connection to `p` is still open.
    pub(crate) fn is_suspect(&self, p: usize) -> bool {
        self.suspects.iter().any(|(s, ..)| *s == p)
    }

    /// The link to `p` carried something that is not our protocol.
    pub(crate) fn corrupt(&mut self, p: usize, what: String) {
        tracing::error!(peer = p, what, "corrupt data; connection dropped");
        for g in self.groups_of(p) {
            let rank = self.groups[g].as_ref().and_then(|g| g.rank_of(p));
            self.fail_group(g, ErrorKind::Corrupt { rank, what: what.clone() }.into(), true);
        }
        self.lose_peer(p, PeerCause::Killed);
    }

    /// Live groups that have `p` as a member.
    pub(crate) fn groups_of(&self, p: usize) -> Vec<usize> {
        let member = |g: &Option<Group>| g.as_ref().is_some_and(|g| g.rank_of(p).is_some());
        (0..self.groups.len()).filter(|g| member(&self.groups[*g])).collect()
    }

    /// Timers: lost peers, deadlines, calls that wait conspicuously long.
    pub(crate) fn tick(&mut self, now: Time) {
        if self.suspects.first().is_some_and(|(_, t, _)| t.after(BLAME_DELAY) <= now) {
            // One more look at everything: an explanation may have arrived.
            self.progress(true);
            for (p, _, cause) in std::mem::take(&mut self.suspects) {
                for g in self.groups_of(p) {
                    self.blame(g, p, cause);
                }
            }
        }
        self.check_pulses(now);
        self.check_forsaken(now);
        self.check_deadlines(now);
        self.monitor_tick(now);
    }

    /// When [`tick`](Self::tick) should run next at the latest.
    pub(crate) fn next_timer(&self, now: Time) -> Option<Duration> {
        let mut next: Option<Time> = self.suspects.first().map(|(_, t, _)| t.after(BLAME_DELAY));
        let mut earlier = |t: Time| next = Some(next.map_or(t, |n| n.min(t)));
        if let Some(t) = self.forsaken.first().map(|f| f.since) {
            earlier(t.after(LAST_WORD));
        }
        for (i, s) in self.ops.iter().enumerate().filter(|(_, s)| s.live && s.result.is_none()) {
            earlier(s.deadline);
            if let Some(t) = self.reports_at(i) {
                earlier(t);
            } else if let Some(t) = self.cries_at(i) {
                earlier(t);
            }
        }
        if let Some(t) = self.monitor_timer() {
            earlier(t);
        }
        if let Some(t) = self.live.timer() {
            earlier(t);
        }
        next.map(|t| t.since(now))
    }

    /// A buffer for bytes on their way; give it back with [`keep_scratch`](Self::keep_scratch).
    pub(crate) fn take_scratch(&mut self) -> Vec<u8> {
        let mut s = std::mem::take(&mut self.scratch);
        if s.is_empty() {
            s = vec![0; crate::frame::FRAGMENT / 2];
        }
        s
    }

    pub(crate) fn keep_scratch(&mut self, s: Vec<u8>) {
        self.scratch = s;
    }
}
