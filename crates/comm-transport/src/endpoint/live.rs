//! Whether peers live, where no closed connection says so.
//!
//! Each rank sends something on each link at least every quarter of the shorter of the two ends' timeouts: frames of
//! calls, or else [`Kind::Heartbeat`], which tells its sender's own timeout, so that the two may differ. The first
//! heartbeat goes out a quarter of its sender's timeout after the link is there, however busy it is.
//!
//! A peer that has been silent for the timeout is asked on another way, the [`Prober`], and gets a quarter of the
//! timeout, at least [`LEAST_GRACE`], to answer there: a rank whose program holds the endpoint, in a reduce function
//! that runs for minutes, lives. Silence counts from the last sign of life, which is up to a quarter of the timeout
//! older than what stopped the peer; so nobody is given up who was stopped for less than the timeout.
//!
//! What links have carried is compared at timers, frames pay nothing. A rank that was itself kept from looking, because
//! it was stopped or got no core, blames nobody: it reads what has come meanwhile and begins anew.

use std::sync::Arc;
use std::time::Duration;

use comm_core::{PeerCause, Time};

use super::group::Gone;
use super::state::State;
use crate::frame::{Header, Kind};
use crate::overlay::Prober;

/// Time that a silent peer gets at least to answer the prober.
const LEAST_GRACE: Duration = Duration::from_millis(250);
/// How many times the time for an answer it may take until the prober says that there is none.
const LONGEST_QUESTION: u32 = 4;
/// No heartbeats more often than this, whatever peers ask for; and no timeout is shorter.
const LEAST_INTERVAL: Duration = Duration::from_millis(1);
/// How long nothing may come any more from a process that has ended before its link is given up.
const LAST_READ: Duration = Duration::from_millis(10);

/// Settings and timer of liveness.
pub(crate) struct Live {
    /// [`Duration::MAX`]: silence means nothing.
    timeout: Duration,
    prober: Option<Arc<dyn Prober>>,
    /// There is something to look after.
    active: bool,
    /// When to look next.
    next: Time,
}

impl Live {
    pub(crate) fn new(timeout: Duration, prober: Option<Arc<dyn Prober>>, now: Time) -> Self {
        // In a heartbeat, less than a microsecond would read as none.
        let timeout = timeout.max(LEAST_INTERVAL);
        Self { timeout, prober, active: timeout != Duration::MAX, next: now }
    }

    /// When [`check_pulses`](State::check_pulses) has something to do.
    pub(crate) fn timer(&self) -> Option<Time> {
        self.active.then_some(self.next)
    }

    fn grace(&self) -> Duration {
        (self.timeout / 4).max(LEAST_GRACE)
    }
}

/// How far a link has come in one direction; differs when something has moved.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Mark(pub(crate) u32, pub(crate) usize, pub(crate) usize);

/// What is known of a peer's life.
#[derive(Default)]
pub(crate) struct Pulse {
    rx: Mark,
    tx: Mark,
    /// When something was last known to have come.
    heard: Time,
    /// When something was last known to have gone out.
    sent: Time,
    /// The peer knows this rank's timeout.
    told: bool,
    /// The peer's timeout, if it has one.
    theirs: Option<Duration>,
    /// It has been asked whether it lives, and is given up then.
    verdict: Option<Time>,
    /// Its process has ended; since when nothing more has come.
    ended: Option<Time>,
}

impl Pulse {
    pub(crate) fn starting(now: Time) -> Self {
        Self { heard: now, sent: now, ..Self::default() }
    }

    /// How often the peer is to hear something.
    fn interval(&self, timeout: Duration) -> Option<Duration> {
        let shorter = self.theirs.map_or(timeout, |t| t.min(timeout));
        (shorter != Duration::MAX).then(|| (shorter / 4).max(LEAST_INTERVAL))
    }
}

impl State {
    /// A link to `p` is there.
    pub(super) fn start_pulse(&mut self, p: usize) {
        let now = self.now();
        let ended = self.peers[p].pulse.ended;
        self.peers[p].pulse = Pulse { ended, ..Pulse::starting(now) };
        self.live.next = self.live.next.min(now);
    }

    /// A group begins: what its members did before does not count.
    pub(super) fn await_members(&mut self, members: &[usize]) {
        if !self.live.active {
            return;
        }
        let now = self.now();
        for m in members {
            let pulse = &mut self.peers[*m].pulse;
            (pulse.heard, pulse.verdict) = (now, None);
        }
        self.live.next = self.live.next.min(now);
    }

    /// A heartbeat of `p` has come; `micros` is its own timeout, 0 if it has none.
    pub(super) fn learn_timeout(&mut self, p: usize, micros: u64) {
        let theirs = (micros > 0).then(|| Duration::from_micros(micros));
        let pulse = &mut self.peers[p].pulse;
        if pulse.theirs != theirs {
            pulse.theirs = theirs;
            self.live.active = true;
            self.live.next = self.live.next.min(self.notify.clock().now());
        }
    }

    /// `p` has shown on another way that it lives.
    pub(super) fn vouched(&mut self, p: usize) {
        let now = self.now();
        if let Some(peer) = self.peers.get_mut(p) {
            (peer.pulse.heard, peer.pulse.verdict) = (now, None);
        }
    }

    /// `p` was asked, and has not answered.
    pub(super) fn unanswered(&mut self, p: usize) {
        let now = self.now();
        if let Some(verdict) = self.peers.get_mut(p).and_then(|x| x.pulse.verdict.as_mut()) {
            *verdict = now.min(*verdict);
            self.live.next = self.live.next.min(now);
            // Whoever sleeps has to look at timers.
            self.ended = true;
        }
    }

    /// The process of `p` has ended. What it has written is still to be read.
    pub(super) fn process_ended(&mut self, p: usize) {
        let now = self.now();
        let Some(peer) = self.peers.get_mut(p).filter(|x| x.down.is_none()) else { return };
        if peer.link.is_none() {
            return self.lose_peer(p, PeerCause::Killed);
        }
        peer.pulse.ended.get_or_insert(now);
        self.live.active = true;
        self.live.next = self.live.next.min(now);
        self.pump_rx(p);
        // Whoever sleeps has to look at timers.
        self.ended = true;
    }

    /// Whether a group that goes on needs `p` alive: it has not got to its end there, or its survivors are being agreed on.
    fn is_needed(&self, p: usize) -> bool {
        self.groups.iter().flatten().any(|g| {
            let Some(rank) = g.rank_of(p) else { return false };
            if g.failed.is_some() || g.over {
                return g.agreement.waits();
            }
            match g.gone[rank] {
                None => true,
                Some(Gone::Finalized) => g.left.is_some() && !g.farewell[rank],
                Some(Gone::Closed | Gone::Moved(_)) => false,
            }
        })
    }

    /// Whether nothing has come from `p` since it was looked at last, nor is there now.
    fn is_silent(&mut self, p: usize) -> bool {
        self.pump_rx(p);
        let peer = &self.peers[p];
        peer.link.is_some() && peer.rx.mark() == peer.pulse.rx
    }

    /// [`check_pulses`](Self::check_pulses) if it is time.
    pub(super) fn check_pulses_at(&mut self, now: Time) {
        if self.live.active && self.live.next <= now {
            self.check_pulses(now);
        }
    }

    /// Looks what links have carried, sends heartbeats, and gives up who is silent.
    pub(super) fn check_pulses(&mut self, now: Time) {
        if !self.live.active {
            return;
        }
        let timeout = self.live.timeout;
        // By less than half of the time for an answer matters to nobody: else a rank with a timeout of a millisecond would
        // be late all the time where cores are rare, and never come to find anybody dead.
        let much = (timeout / 2).max(LEAST_GRACE / 2);
        let late = timeout != Duration::MAX && now > self.live.next.after(much);
        if late {
            // This process has slept itself.
            self.progress(true);
        }
        let mut next = Time(u64::MAX);
        let (mut doubted, mut silent, mut over) = (Vec::new(), Vec::new(), Vec::new());
        for p in 0..self.peers.len() {
            if self.peers[p].link.is_none() || self.peers[p].down.is_some() {
                continue;
            }
            let peer = &mut self.peers[p];
            let (rx, tx) = (peer.rx.mark(), peer.tx.mark());
            let pulse = &mut peer.pulse;
            if rx != pulse.rx || late {
                (pulse.rx, pulse.heard, pulse.verdict) = (rx, now, None);
                pulse.ended = pulse.ended.map(|_| now);
            }
            if pulse.told && tx != pulse.tx {
                (pulse.tx, pulse.sent) = (tx, now);
            }
            if let Some(quiet) = pulse.ended.map(|t| t.after(LAST_READ)) {
                if quiet <= now {
                    over.push(p);
                } else {
                    next = next.min(quiet);
                }
                continue;
            }
            if let Some(interval) = pulse.interval(timeout) {
                // A little early when it is time to look anyway: fewer wake-ups.
                if pulse.sent.after(interval * 3 / 4) <= now {
                    pulse.sent = now;
                    self.beat(p);
                }
                next = next.min(self.peers[p].pulse.sent.after(interval));
            }
            let pulse = &self.peers[p].pulse;
            match pulse.verdict {
                _ if timeout == Duration::MAX => {}
                Some(t) if t <= now => silent.push(p),
                Some(t) => next = next.min(t),
                None if pulse.heard.after(timeout) > now => next = next.min(pulse.heard.after(timeout)),
                None if self.is_needed(p) => doubted.push(p),
                // Should it be needed again, its silence shows then.
                None => next = next.min(now.after(timeout)),
            }
        }
        self.live.next = next;
        for p in over {
            if self.is_silent(p) {
                self.lose_peer(p, PeerCause::Killed);
            }
        }
        for p in doubted {
            if self.is_silent(p) {
                self.doubt(p, now);
            }
        }
        for p in silent {
            self.peers[p].pulse.verdict = None;
            if self.is_silent(p) && self.is_needed(p) {
                self.give_up(p, now);
            }
        }
        // Those that have just been heard after all.
        let looked = &mut self.live;
        let again = self.peers.iter().filter(|x| x.link.is_some() && x.rx.mark() != x.pulse.rx);
        if again.count() > 0 {
            looked.next = looked.next.min(now.after(LAST_READ));
        }
    }

    /// Sends a heartbeat, if some group has a use for it and nothing else is about to be written.
    fn beat(&mut self, p: usize) {
        let busy = !self.peers[p].tx.control_flushed();
        let shared = self.groups.iter().flatten().any(|g| !g.over && g.rank_of(p).is_some());
        if busy || !shared {
            return;
        }
        let timeout = self.live.timeout;
        let micros = if timeout == Duration::MAX { 0 } else { u64::try_from(timeout.as_micros()).unwrap_or(u64::MAX) };
        // It belongs to the link, not to a group.
        self.send_control(p, Header { offset: micros, ..Header::new(Kind::Heartbeat, 0, 0) }, Vec::new());
        let peer = &mut self.peers[p];
        (peer.pulse.told, peer.pulse.tx) = (true, peer.tx.mark());
    }

    /// `p` has been silent for too long: asks it on the other way.
    fn doubt(&mut self, p: usize, now: Time) {
        let grace = self.live.grace();
        // A prober that tells when it has asked in vain is waited for: it may need a while for a core.
        let tells = self.live.prober.as_ref().is_some_and(|p| p.tells());
        let verdict = now.after(if tells { grace * LONGEST_QUESTION } else { grace });
        self.peers[p].pulse.verdict = Some(verdict);
        self.live.next = self.live.next.min(verdict);
        if let Some(prober) = &self.live.prober {
            tracing::debug!(rank = self.rank, peer = p, "a peer is silent: asking it on another way");
            prober.probe(p);
        }
    }

    /// `p` does not answer on any way.
    fn give_up(&mut self, p: usize, now: Time) {
        let silence = now.since(self.peers[p].pulse.heard);
        tracing::warn!(
            rank = self.rank,
            peer = p,
            ?silence,
            "a peer has stopped sending heartbeats, and does not answer"
        );
        // Before the link is closed: should it only have slept, it finds out why it is alone.
        for g in self.groups_of(p) {
            self.tell_given_up(g, p);
            self.blame(g, p, PeerCause::NoHeartbeat);
        }
        if self.peers[p].tx.control_flushed() {
            return self.lose_peer(p, PeerCause::NoHeartbeat);
        }
        // It has left so much unread that the reason does not fit: that goes out if it ever reads on. Till then, or till
        // the connection ends, the link stays, and is used for nothing else.
        self.peers[p].down = Some(PeerCause::NoHeartbeat);
        self.moved = true;
        self.ended = true;
        self.agree_without(p);
    }
}

/// What an error of a link says of the peer: that its host does not answer, or that it has hung up.
pub(crate) fn cause_of(e: &std::io::Error) -> PeerCause {
    use std::io::ErrorKind::{HostUnreachable, NetworkUnreachable, TimedOut};
    match e.kind() {
        TimedOut | HostUnreachable | NetworkUnreachable => PeerCause::NoHeartbeat,
        _ => PeerCause::Killed,
    }
}
