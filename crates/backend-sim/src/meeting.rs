//! Where threads wait for each other until all have come, or until that cannot be any more.

use std::sync::Arc;
use std::time::Duration;

use comm_core::{Clock, Error, Parker, Result, Time};
use parking_lot::Mutex;

use crate::wires::Share;

/// How often those who wait look whether they still have to.
const LOOK: Duration = Duration::from_millis(50);

/// Ranks on their way to one world, and what each gets of it.
pub(crate) struct Meeting {
    state: Mutex<State>,
}

struct State {
    shares: Vec<Option<Share>>,
    arrived: Vec<bool>,
    /// Those who wait, each on a clock of its own.
    waiting: Vec<(Arc<dyn Clock>, Arc<Parker>)>,
    end: Option<Result<()>>,
    /// It has come to nothing because somebody's time was up.
    lapsed: bool,
}

impl Meeting {
    pub(crate) fn new(shares: Vec<Share>) -> Self {
        let arrived = vec![false; shares.len()];
        let shares = shares.into_iter().map(Some).collect();
        Self { state: Mutex::new(State { shares, arrived, waiting: Vec::new(), end: None, lapsed: false }) }
    }

    pub(crate) fn size(&self) -> usize {
        self.state.lock().arrived.len()
    }

    /// It has come to nothing, and `rank` need not hear of that: it has, or was what the others waited for.
    pub(crate) fn is_over_for(&self, rank: usize) -> bool {
        let state = self.state.lock();
        matches!(state.end, Some(Err(_))) && (state.lapsed || state.arrived[rank])
    }

    /// All have come, to whatever end: nobody will ask any more.
    pub(crate) fn all_came(&self) -> bool {
        self.state.lock().arrived.iter().all(|a| *a)
    }

    /// It has ended.
    pub(crate) fn has_ended(&self) -> bool {
        self.state.lock().end.is_some()
    }

    /// Rank `rank` comes. False when it is there already.
    pub(crate) fn enter(&self, rank: usize) -> bool {
        let mut state = self.state.lock();
        if std::mem::replace(&mut state.arrived[rank], true) {
            return false;
        }
        if state.end.is_none() && state.arrived.iter().all(|a| *a) {
            state.finish(Ok(()));
        }
        true
    }

    /// Those who are there.
    pub(crate) fn arrived(&self) -> Vec<usize> {
        self.state.lock().here()
    }

    /// It comes to nothing, if it has not ended yet.
    pub(crate) fn fail(&self, why: Error) {
        let mut state = self.state.lock();
        if state.end.is_none() {
            state.finish(Err(why));
        }
    }

    /// Waits for all. Once in a while `look` may find out that it is in vain; `late` says so when time is up.
    pub(crate) fn wait(
        &self,
        rank: usize,
        clock: &Arc<dyn Clock>,
        until: Time,
        look: impl Fn(&[usize]) -> Option<Error>,
        late: impl Fn(&[usize]) -> Error,
    ) -> Result<Share> {
        let parker = Arc::new(Parker::new());
        self.state.lock().waiting.push((Arc::clone(clock), Arc::clone(&parker)));
        loop {
            let mut state = self.state.lock();
            if let Some(end) = state.end.clone() {
                end?;
                let share = state.shares[rank].take();
                return share.ok_or_else(|| Error::invalid(format!("rank {rank} has taken its place already")));
            }
            let now = clock.now();
            let lapsed = now >= until;
            let vain = if lapsed { Some(late(&state.here())) } else { look(&state.here()) };
            if let Some(e) = vain {
                state.lapsed = lapsed;
                state.finish(Err(e));
                continue;
            }
            // Not with the lock held: a simulated clock lets others run meanwhile.
            drop(state);
            clock.park(&parker, Some(until.min(now.after(LOOK))));
        }
    }
}

impl State {
    fn here(&self) -> Vec<usize> {
        (0..self.arrived.len()).filter(|r| self.arrived[*r]).collect()
    }

    fn finish(&mut self, end: Result<()>) {
        if end.is_err() {
            // Nobody gets anything of it.
            self.shares.clear();
        }
        self.end = Some(end);
        for (clock, parker) in self.waiting.drain(..) {
            clock.unpark(&parker);
        }
    }
}
