//! A question to a silent peer: whether it lives, on a connection of its own, and, on this machine, by what the kernel
//! says about its process.

use std::time::{Duration, Instant};

use super::Peer;
use super::dial::{Caller, Dial, Progress};
use super::stream::Stream;
use crate::life::Process;

/// How often the process is looked at.
const LOOK: Duration = Duration::from_millis(50);
/// The dial must not end before the probe does.
const BEYOND: Duration = Duration::from_secs(60);

pub(super) struct Probe {
    /// None when the peer cannot be connected to: its process may still be seen.
    dial: Option<Dial>,
    process: Option<Process>,
    look: Instant,
    /// Until when an answer counts.
    until: Instant,
    /// The time is up; what has come meanwhile is still looked at.
    last: bool,
}

/// What is known of the peer by now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sign {
    Nothing,
    /// It lives.
    Alive,
    /// It has not answered in time.
    Over,
}

impl Probe {
    pub(super) fn new(peer: usize, to: Peer, until: Instant) -> Self {
        let process = to.process;
        let dial = Some(Dial::probe(peer, to, until + BEYOND));
        Self { dial, process, look: Instant::now(), until, last: false }
    }

    pub(super) fn sockets(&self) -> impl Iterator<Item = (&Stream, u32, bool)> {
        self.dial.iter().flat_map(Dial::sockets)
    }

    pub(super) fn timer(&self) -> Instant {
        let look = self.process.is_some().then_some(self.look);
        self.dial.as_ref().map(Dial::timer).into_iter().chain(look).fold(self.until, Instant::min)
    }

    pub(super) fn tick(&mut self, caller: &mut Caller<'_>) -> Sign {
        let now = Instant::now();
        if let Some(process) = &self.process
            && (self.look <= now || self.until <= now)
        {
            // Where there are many more threads than cores, one that wants to answer may have to wait; then it is seen
            // to wait. One that is stopped does not want to.
            if process.wants_to_run() {
                return Sign::Alive;
            }
            self.look = now + LOOK;
        }
        if self.until <= now {
            // This thread may have waited for a core itself, and the answer for this thread.
            return if std::mem::replace(&mut self.last, true) { Sign::Over } else { Sign::Nothing };
        }
        let progress = self.dial.as_mut().map_or(Progress::Going, |d| d.tick(caller));
        self.sign(&progress)
    }

    pub(super) fn ready(&mut self, number: u32, caller: &Caller<'_>) -> Sign {
        let progress = self.dial.as_mut().map_or(Progress::Going, |d| d.ready(number, caller));
        self.sign(&progress)
    }

    fn sign(&mut self, progress: &Progress) -> Sign {
        match progress {
            Progress::Going => Sign::Nothing,
            Progress::Accepted(_) => Sign::Alive,
            Progress::Failed { .. } | Progress::Refused(_) => {
                self.dial = None;
                Sign::Nothing
            }
        }
    }
}
