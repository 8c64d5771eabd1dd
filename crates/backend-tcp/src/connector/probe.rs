//! A question to a silent peer: whether it lives, on a connection of its own, and, on this machine, by what the kernel
//! says about its process.

use std::time::{Duration, Instant};

use super::Peer;
use super::dial::{Caller, Dial, Progress};
use super::stream::Stream;
use crate::life::Process;

/// How often the process is looked at.
const LOOK: Duration = Duration::from_millis(50);

pub(super) struct Probe {
    dial: Dial,
    process: Option<Process>,
    look: Instant,
}

/// What is known of the peer by now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sign {
    Nothing,
    /// It lives.
    Alive,
    /// There will be no answer.
    Over,
}

impl From<Progress> for Sign {
    fn from(p: Progress) -> Self {
        match p {
            Progress::Going => Self::Nothing,
            Progress::Accepted(_) => Self::Alive,
            Progress::Failed { .. } => Self::Over,
        }
    }
}

impl Probe {
    pub(super) fn new(peer: usize, to: Peer, until: Instant) -> Self {
        let process = to.process;
        Self { dial: Dial::probe(peer, to, until), process, look: Instant::now() }
    }

    pub(super) fn sockets(&self) -> impl Iterator<Item = (&Stream, u32, bool)> {
        self.dial.sockets()
    }

    pub(super) fn timer(&self) -> Instant {
        if self.process.is_some() { self.dial.timer().min(self.look) } else { self.dial.timer() }
    }

    pub(super) fn tick(&mut self, caller: &mut Caller<'_>) -> Sign {
        let now = Instant::now();
        if let Some(process) = &self.process
            && self.look <= now
        {
            // Where there are many more threads than cores, one that wants to answer may have to wait; then it is seen
            // to wait. One that is stopped does not want to.
            if process.wants_to_run() {
                return Sign::Alive;
            }
            self.look = now + LOOK;
        }
        self.dial.tick(caller).into()
    }

    pub(super) fn ready(&mut self, number: u32, caller: &Caller<'_>) -> Sign {
        self.dial.ready(number, caller).into()
    }
}
