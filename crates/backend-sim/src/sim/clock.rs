//! What the rest of the workspace meets of a simulation: its clock, its engines, its links.

use std::fmt;
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use comm_core::{Clock, ErrorKind, Parker, RealClock, Result, Time};
use comm_transport::{Endpoint, EndpointOptions, Engine, Link, Patience, Prober, Ward};

use super::core::{Core, here};
use super::net::{SimLink, killed_text};
use super::state::Due;
use crate::ground::{Ground, Identity, Job};
use crate::regroup::Town;

/// How long a thread that is no part of the simulation sleeps at a time.
const NAP: Duration = Duration::from_millis(1);

/// Virtual time.
///
/// A thread that does not belong to the simulation may use it too: it sleeps for moments of real time, and what it does
/// makes the run depend on real time.
#[derive(Debug)]
pub(crate) struct SimClock(pub(crate) Arc<Core>);

fn address(parker: &Parker) -> usize {
    std::ptr::from_ref(parker).addr()
}

impl Clock for SimClock {
    fn now(&self) -> Time {
        self.0.now()
    }

    fn sleep(&self, d: Duration) {
        let own = Parker::new();
        if !self.0.park(address(&own), Some(self.now().after(d)), || false) {
            RealClock.sleep(d.min(NAP));
        }
    }

    fn park(&self, parker: &Parker, until: Option<Time>) {
        if self.0.park(address(parker), until, || parker.take_token()) {
            parker.take_token();
        } else {
            let left = until.map_or(NAP, |t| t.since(self.now()).min(NAP));
            RealClock.park(parker, Some(RealClock.now().after(left)));
        }
    }

    fn unpark(&self, parker: &Parker) {
        RealClock.unpark(parker);
        self.0.unpark(address(parker));
    }

    fn relax(&self) {
        self.0.relax();
    }

    fn spawn(&self, name: &str, body: Box<dyn FnOnce() + Send>) -> std::io::Result<()> {
        let builder = std::thread::Builder::new().name(name.to_owned());
        let Some(here) = here().filter(|h| Arc::ptr_eq(&h.core, &self.0) && !self.0.is_free()) else {
            return builder.spawn(body).map(drop);
        };
        let thread = self.0.add_thread(here.rank, name);
        let core = Arc::clone(&self.0);
        let started = builder.spawn(move || core.enter(thread, body));
        if started.is_err() {
            self.0.drop_thread(thread);
        }
        started.map(drop)
    }
}

/// The engine of one rank.
struct SimEngine {
    core: Arc<Core>,
    rank: usize,
}

impl fmt::Debug for SimEngine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SimEngine").field("rank", &self.rank).finish_non_exhaustive()
    }
}

impl Engine for SimEngine {
    fn adopt(&self, ward: Ward) {
        self.core.lock().adopt(self.rank, ward);
    }

    fn kick(&self) {
        self.core.lock().kick(self.rank);
    }
}

/// Asks whether a rank lives, as the kernel of its host would answer.
struct SimProber {
    core: Arc<Core>,
    rank: usize,
    /// By endpoint rank.
    members: Vec<usize>,
    endpoint: OnceLock<Weak<Endpoint>>,
}

impl fmt::Debug for SimProber {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SimProber").field("rank", &self.rank).finish_non_exhaustive()
    }
}

impl Prober for SimProber {
    fn probe(&self, peer: usize) {
        let (Some(to), Some(endpoint)) = (self.members.get(peer).copied(), self.endpoint.get().cloned()) else {
            return;
        };
        let mut st = self.core.lock();
        let latency = st.settings.network.latency;
        let (core, me) = (Arc::clone(&self.core), self.rank);
        let answer = move || {
            let st = core.lock();
            let silent = st.ranks[to].killed || st.ranks[to].paused_until > st.now;
            let lost = st.cuts.contains(&(me, to)) || st.cuts.contains(&(to, me));
            drop(st);
            if !silent
                && !lost
                && let Some(endpoint) = endpoint.upgrade()
            {
                endpoint.vouch(peer);
            }
        };
        let at = Time(st.now).after(2 * latency).0;
        st.at(at, Due::Job(Box::new(answer)));
    }
}

/// What a simulation makes worlds of.
#[derive(Debug)]
pub(crate) struct SimGround {
    core: Arc<Core>,
    /// The probers of endpoints that are being made.
    probers: parking_lot::Mutex<Vec<(usize, Arc<SimProber>)>>,
}

impl SimGround {
    pub(crate) fn new(core: Arc<Core>) -> Self {
        Self { core, probers: parking_lot::Mutex::default() }
    }
}

impl Ground for SimGround {
    fn town(&self) -> Arc<Town> {
        Arc::clone(&self.core.town)
    }

    fn pair(&self, a: Identity, b: Identity) -> (Box<dyn Link>, Box<dyn Link>) {
        let (x, y) = SimLink::pair(&self.core, a as usize, b as usize);
        (Box::new(x), Box::new(y))
    }

    fn later(&self, job: Job) -> Result<()> {
        let mut st = self.core.lock();
        let at = Time(st.now).after(st.settings.network.latency).0;
        st.at(at, Due::Job(job));
        Ok(())
    }

    fn endpoint_options(&self, me: Identity, members: &[Identity], options: EndpointOptions) -> EndpointOptions {
        let rank = me as usize;
        let members = members.iter().map(|m| *m as usize).collect();
        let prober = Arc::new(SimProber { core: Arc::clone(&self.core), rank, members, endpoint: OnceLock::new() });
        let mut probers = self.probers.lock();
        // One whose endpoint could not be made.
        probers.retain(|(r, _)| *r != rank);
        probers.push((rank, Arc::clone(&prober)));
        drop(probers);
        EndpointOptions {
            checksum: true,
            // Whoever waits lets the others go on at once.
            patience: Patience { spins: 0, yields: 0 },
            prober: Some(prober),
            engine: Some(Arc::new(SimEngine { core: Arc::clone(&self.core), rank })),
            ..options
        }
    }

    fn made(&self, me: Identity, endpoint: &Arc<Endpoint>, _: &EndpointOptions) {
        let rank = me as usize;
        let mut probers = self.probers.lock();
        if let Some(i) = probers.iter().position(|(r, _)| *r == rank) {
            let (_, prober) = probers.swap_remove(i);
            // Each prober is given its endpoint once.
            let _ = prober.endpoint.set(Arc::downgrade(endpoint));
        }
        drop(probers);
        let mut st = self.core.lock();
        st.ranks[rank].endpoints.retain(|e| e.strong_count() > 0);
        st.ranks[rank].endpoints.push(Arc::downgrade(endpoint));
        let killed = st.ranks[rank].killed;
        drop(st);
        if killed {
            endpoint.kill(&killed_text(rank));
        }
    }

    fn check(&self, me: Identity) -> Result<()> {
        let rank = me as usize;
        let st = self.core.lock();
        if st.ranks[rank].killed {
            return Err(ErrorKind::Aborted { rank, cause: killed_text(rank) }.into());
        }
        Ok(())
    }
}
