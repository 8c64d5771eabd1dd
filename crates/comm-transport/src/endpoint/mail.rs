//! What other threads have to tell an endpoint, without waiting for its lock: the connector must answer other ranks
//! while a reduce function of the program runs under it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use comm_core::{Error, PeerCause, Result};
use parking_lot::Mutex;

use super::Endpoint;
use super::state::State;
use crate::link::Link;

enum Letter {
    Attach(usize, Box<dyn Link>),
    Unreachable(usize, String),
    Vouch(usize),
    Unanswered(usize),
    Ended(usize),
    CallOff(Error),
}

/// Letters that nobody has opened yet.
#[derive(Default)]
pub(crate) struct Mailbox {
    full: AtomicBool,
    letters: Mutex<Vec<Letter>>,
}

impl Endpoint {
    /// Gives the endpoint a link to `peer`, whether it had asked for one or the peer has made it. Who has two at a time
    /// must agree with the peer on the one to use: of two links, the second is dropped. Never waits for the endpoint.
    ///
    /// # Errors
    ///
    /// When the link cannot be watched.
    pub fn attach(&self, peer: usize, mut link: Box<dyn Link>) -> Result<()> {
        if peer >= self.size {
            return Ok(());
        }
        if let Some(fd) = link.fd() {
            self.notify.watch(fd, peer).map_err(|e| Error::io("watching a link", &e))?;
        }
        link.attach(&self.notify);
        self.deliver(Letter::Attach(peer, link));
        Ok(())
    }

    /// No link to `peer` can be had: it does not answer where it said it would. It counts as dead, of unknown cause.
    /// Never waits for the endpoint.
    pub fn unreachable(&self, peer: usize, why: &str) {
        self.deliver(Letter::Unreachable(peer, why.to_owned()));
    }

    /// `peer` has shown on another way that it lives, see [`Prober`](crate::Prober). Never waits for the endpoint.
    pub fn vouch(&self, peer: usize) {
        self.deliver(Letter::Vouch(peer));
    }

    /// `peer` was asked for a sign of life, had time to answer, and has not, see [`Prober::tells`](crate::Prober::tells).
    /// Never waits for the endpoint.
    pub fn unanswered(&self, peer: usize) {
        self.deliver(Letter::Unanswered(peer));
    }

    /// The process of `peer` has ended, whatever its connections say: a child that it has forked may hold them open. What
    /// it has written is read first. Never waits for the endpoint.
    pub fn lost_process(&self, peer: usize) {
        self.deliver(Letter::Ended(peer));
    }

    /// Fails all groups of the endpoint, on all members. Never waits for the endpoint.
    pub fn call_off(&self, cause: &Error) {
        self.deliver(Letter::CallOff(cause.clone()));
    }

    fn deliver(&self, letter: Letter) {
        self.mail.letters.lock().push(letter);
        self.mail.full.store(true, Ordering::SeqCst);
        if let Some(mut st) = self.state.try_lock() {
            st.open_mail();
            self.watch_writability(&mut st);
            self.settle(st);
        } else if self.poller.load(Ordering::SeqCst) {
            // Who has the lock looks in its next pass, unless it makes no further one.
            self.notify.wake();
        }
        // There may be timers now that nobody else knows of: the end of a link, say, that was read just now.
        self.notify.engine.kick();
    }
}

impl State {
    /// Does what other threads have asked for.
    pub(super) fn open_mail(&mut self) {
        if !self.mail.full.load(Ordering::SeqCst) {
            return;
        }
        let mail = Arc::clone(&self.mail);
        mail.full.store(false, Ordering::SeqCst);
        let letters = std::mem::take(&mut *mail.letters.lock());
        for letter in letters {
            match letter {
                Letter::Attach(p, link) => self.take_link(p, link),
                Letter::Unreachable(p, why) => {
                    if self.peers.get(p).is_some_and(|x| x.link.is_none() && x.down.is_none()) {
                        tracing::debug!(peer = p, why, "a peer cannot be reached");
                        self.lose_peer(p, PeerCause::NoHeartbeat);
                    }
                }
                Letter::Vouch(p) => self.vouched(p),
                Letter::Unanswered(p) => self.unanswered(p),
                Letter::Ended(p) => self.process_ended(p),
                Letter::CallOff(e) => (0..self.groups.len()).for_each(|g| self.fail_group(g, e.clone(), true)),
            }
        }
    }

    fn take_link(&mut self, p: usize, link: Box<dyn Link>) {
        let peer = &mut self.peers[p];
        if peer.link.is_some() || peer.down.is_some() || p == self.rank {
            if let Some(fd) = link.fd() {
                self.notify.unwatch(fd);
            }
            return;
        }
        peer.link = Some(link);
        self.start_pulse(p);
        self.linked(p);
    }
}
