//! What the backend moves bytes over: a board in memory that all ranks of a world see, where they leave letters.
//!
//! In a real backend this would be sockets, or a library. Two things are worth copying there: no wait is without a
//! deadline, and what ends one rank's wait is told to all, so that nobody waits for a lost cause.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use rustcomms::{Error, ErrorKind, OpDesc, Phase, Result};

/// What a letter is about. With `Declined` the receiver of a message tells its sender that it does not want it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum About {
    Start,
    Collective(u64),
    Message { tag: u32, seq: u64 },
    Declined { tag: u32, seq: u64 },
    End,
}

/// A call and its bytes, or the reason why the sender of the letter refuses it.
pub(crate) type Letter = Result<(OpDesc, Arc<[u8]>), String>;

#[derive(Debug, Default)]
struct State {
    /// By sender, receiver and subject.
    letters: HashMap<(usize, usize, About), Letter>,
    /// What each rank knows to be the end of the communicator.
    over: HashMap<usize, Error>,
}

#[derive(Debug)]
pub(crate) struct Board {
    pub(crate) size: usize,
    state: Mutex<State>,
    changed: Condvar,
}

impl State {
    /// `me` met an error that all must hear of, unless they have heard of another.
    fn fail(&mut self, me: usize, size: usize, e: &Error) {
        self.over.insert(me, e.clone());
        for rank in 0..size {
            self.over.entry(rank).or_insert_with(|| match e.kind() {
                // Seen from there.
                ErrorKind::Mismatch { seq, ranks, theirs, ours } if ranks.contains(&rank) => {
                    ErrorKind::Mismatch { seq: *seq, ranks: vec![me], theirs: *ours, ours: *theirs }.into()
                }
                ErrorKind::PeerFailed { .. } | ErrorKind::Aborted { .. } => e.kind().clone().into(),
                _ => ErrorKind::Aborted { rank: me, cause: e.to_string() }.into(),
            });
        }
    }
}

impl Board {
    pub(crate) fn new(size: usize) -> Self {
        Self { size, state: Mutex::default(), changed: Condvar::new() }
    }

    /// Leaves a letter for each of these ranks; false if there was one already.
    pub(crate) fn post(&self, me: usize, to: &[usize], about: About, letter: &Letter) -> bool {
        let mut state = self.state.lock();
        let fresh = to.iter().filter(|to| state.letters.insert((me, **to, about), letter.clone()).is_none()).count();
        self.changed.notify_all();
        fresh == to.len()
    }

    /// Takes a letter away if it is there.
    pub(crate) fn remove(&self, from: usize, me: usize, about: About) -> Option<Letter> {
        self.state.lock().letters.remove(&(from, me, about))
    }

    /// Waits for a letter from each of these ranks that fits this rank's call, and takes them.
    pub(crate) fn take(
        &self,
        me: usize,
        from: &[usize],
        about: About,
        ours: OpDesc,
        timeout: Duration,
    ) -> Result<Vec<Arc<[u8]>>> {
        let (start, mut state) = (Instant::now(), self.state.lock());
        // A call made after the end does not pass, even if what it needs is there.
        let late = state.over.contains_key(&me);
        let seq = if let About::Collective(seq) | About::Message { seq, .. } = about { seq } else { 0 };
        let error: Error = loop {
            let (mut missing, mut odd) = (Vec::new(), Vec::new());
            for &rank in from {
                match state.letters.get(&(rank, me, about)) {
                    None => missing.push(rank),
                    Some(Err(reason)) => {
                        let reason = reason.clone();
                        state.letters.retain(|(_, to, what), _| (*to, *what) != (me, about));
                        return Err(ErrorKind::PeerRefused { rank, reason }.into());
                    }
                    Some(Ok((theirs, _))) if disagree(about, &ours, theirs) => odd.push((rank, *theirs)),
                    Some(Ok(_)) => {}
                }
            }
            if let Some(&(_, theirs)) = odd.first() {
                let ranks = odd.iter().map(|(rank, _)| *rank).collect();
                break ErrorKind::Mismatch { seq, ranks, theirs, ours }.into();
            }
            if missing.is_empty() && !late {
                let letters = from.iter().filter_map(|rank| state.letters.remove(&(*rank, me, about))?.ok());
                return Ok(letters.map(|(_, bytes)| bytes).collect());
            }
            if let Some(e) = state.over.get(&me) {
                return Err(e.clone());
            }
            let elapsed = start.elapsed();
            if elapsed >= timeout {
                let message = matches!(about, About::Message { .. });
                let unmatched =
                    from.iter().filter(|_| message).map(|rank| format!("{ours} from rank {rank}")).collect();
                break ErrorKind::Timeout { phase: Phase::Running, elapsed, missing, unmatched }.into();
            }
            self.changed.wait_for(&mut state, timeout - elapsed);
        };
        state.fail(me, self.size, &error);
        self.changed.notify_all();
        Err(error)
    }

    /// `me` is done with the communicator. Others that are not learn why.
    pub(crate) fn end(&self, me: usize, e: &Error) {
        let mut state = self.state.lock();
        if !state.over.contains_key(&me) {
            state.fail(me, self.size, e);
            self.changed.notify_all();
        }
    }

    /// `me` has ended as it should.
    pub(crate) fn retire(&self, me: usize) {
        self.state.lock().over.insert(me, ErrorKind::Finalized.into());
    }

    /// What the communicator failed with.
    pub(crate) fn failure(&self, me: usize) -> Option<Error> {
        self.state.lock().over.get(&me).filter(|e| *e.kind() != ErrorKind::Finalized).cloned()
    }
}

/// The two ends of a message differ in their operation, which is no mismatch.
fn disagree(about: About, ours: &OpDesc, theirs: &OpDesc) -> bool {
    let message = matches!(about, About::Message { .. });
    let operation = if message { ours.operation } else { theirs.operation };
    ours.disagreement(&OpDesc { operation, ..*theirs }).is_some()
}
