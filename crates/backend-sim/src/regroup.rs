//! The dynamic regime in one process: a communicator that has given its handle away is known in a *town*, where the
//! members of a new one meet. What it promises is what backend tcp promises.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, OnceLock};

use collectives::{
    Common, EmptyBackend, Handle, Identity, Lineage, MeshBackend, MeshOptions, Place, Refusal, Regroup, Roster,
};
use comm_core::{CommOptions, Error, ReconfigureRequest, Result};
use comm_transport::Connect;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use crate::ground::{self, Ground};
use crate::meeting::Meeting;
use crate::wires::shares_on;

/// Who can be named, and who is being waited for. One per process, or per simulation.
#[derive(Default)]
pub(crate) struct Town {
    state: Mutex<Register>,
}

#[derive(Default)]
struct Register {
    /// Numbers given so far.
    given: u64,
    /// Tokens of communicators that can be reconfigured, and the rank whose each is, as its ground knows it.
    homes: BTreeMap<u64, ground::Identity>,
    /// What has become of communicators that cannot be reconfigured any more, by their numbers, as long as the newest of
    /// each lives.
    fates: BTreeMap<u64, Fate>,
    /// By the attempt's key; in an order that is the same when a simulation is repeated.
    meetings: BTreeMap<u64, Gathering>,
}

/// Why nobody comes by the handles of a communicator.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Fate {
    /// Its newest generation.
    generation: u32,
    finalized: bool,
}

/// An attempt under way.
#[derive(Clone)]
struct Gathering {
    meeting: Arc<Meeting>,
    connect: Connect,
    roster: Arc<Roster<Known>>,
}

impl Register {
    /// The attempt of `roster` fails, because nobody can come as `away`.
    fn without(&self, roster: &Roster<Known>, arrived: &[usize], away: Vec<usize>) -> Error {
        let refusal = |r: &usize| {
            let theirs = roster.members[*r].identity;
            let fate = self.fates.get(&theirs.number)?;
            match fate.generation {
                now if now > theirs.generation => Some((*r, Refusal::Stale { now })),
                _ => fate.finalized.then_some((*r, Refusal::Finalized)),
            }
        };
        match away.iter().find_map(refusal) {
            Some((rank, refusal)) => roster.refused(rank, refusal),
            None => roster.failed(&gone(roster, &away), arrived, away),
        }
    }

    /// Open attempts with the same uuid and other lists.
    fn rivals(&self, roster: &Roster<Known>) -> Vec<Gathering> {
        let same = |g: &&Gathering| g.roster.attempt == roster.attempt && g.roster.key != roster.key;
        self.meetings.values().filter(same).filter(|g| !g.meeting.has_ended()).cloned().collect()
    }
}

impl fmt::Debug for Town {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Town").finish_non_exhaustive()
    }
}

impl Town {
    /// That of everything in this process that is not simulated.
    pub(crate) fn of_process() -> Arc<Self> {
        static TOWN: OnceLock<Arc<Town>> = OnceLock::new();
        // Its numbers are not those of a simulation.
        let given = 1 << 40;
        let new = || Arc::new(Self { state: Mutex::new(Register { given, ..Register::default() }) });
        Arc::clone(TOWN.get_or_init(new))
    }

    /// A number that was not given before. Like a random one it says nothing about the order, or tests would come to
    /// rely on that; but a simulation that is repeated gets the same ones.
    fn number(&self) -> u64 {
        let mut state = self.state.lock();
        state.given += 1;
        // Splitmix64: no two counts give the same number.
        let z = state.given.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A communicator is gone, or another has taken its place.
    fn leave(&self, token: u64) {
        let mut state = self.state.lock();
        state.homes.remove(&token);
        let concerned_by = |g: &Gathering| g.roster.members.iter().any(|m| m.token == token);
        let concerned = |g: &&Gathering| concerned_by(g);
        let concerned: Vec<Gathering> = state.meetings.values().filter(concerned).cloned().collect();
        // An attempt that has ended is of no interest any more once one of its members cannot come.
        state.meetings.retain(|_, g| !(g.meeting.has_ended() && concerned_by(g)));
        let missing = |g: &Gathering| g.roster.members.iter().position(|m| m.token == token).into_iter().collect();
        let why = |g: &Gathering| state.without(&g.roster, &g.meeting.arrived(), missing(g));
        let failed: Vec<(Gathering, Error)> = concerned.into_iter().map(|g| (g.clone(), why(&g))).collect();
        drop(state);
        for (g, e) in failed {
            g.meeting.fail(e);
        }
    }
}

/// Where a communicator is found: the town knows.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Known;

impl Place for Known {
    fn host(&self) -> Option<&str> {
        None
    }
}

/// Known in the town as long as it lives.
#[derive(Debug)]
struct Home {
    town: Arc<Town>,
    token: u64,
    handle: String,
}

impl Drop for Home {
    fn drop(&mut self) {
        self.town.leave(self.token);
    }
}

/// A communicator's way to other memberships.
#[derive(Debug)]
pub(crate) struct SimRegroup {
    lineage: Lineage<Home>,
    ground: Arc<dyn Ground>,
    who: ground::Identity,
    options: CommOptions,
}

impl SimRegroup {
    /// The lineage of a new communicator of rank `who`.
    pub(crate) fn new(ground: &Arc<dyn Ground>, who: ground::Identity, options: &CommOptions) -> Arc<Self> {
        Self::at(ground, who, options, Identity { number: ground.town().number(), generation: 0 })
    }

    fn at(ground: &Arc<dyn Ground>, who: ground::Identity, options: &CommOptions, identity: Identity) -> Arc<Self> {
        let mut options = options.clone();
        (options.store, options.rank, options.size) = (None, None, None);
        Arc::new(Self { lineage: Lineage::new(identity), ground: Arc::clone(ground), who, options })
    }

    /// A communicator without members.
    pub(crate) fn empty(options: &CommOptions) -> Result<EmptyBackend> {
        EmptyBackend::new("sim", "in-process", options, || {
            let (ground, who) = ground::here();
            ground.check(who)?;
            Ok(Self::new(&ground, who, options))
        })
    }

    fn open(&self) -> Result<Home> {
        self.ground.check(self.who)?;
        let town = self.ground.town();
        // Frames always carry a checksum here, and nobody proves to know a secret.
        let common = Common { checksum: true, secret: false, ..Common::of(&self.options)? };
        let (identity, token) = (self.lineage.identity, town.number());
        let handle = Handle { identity, token, common, place: Known }.write("sim")?;
        town.state.lock().homes.insert(token, self.who);
        Ok(Home { town, token, handle })
    }

    fn make(&self, request: &ReconfigureRequest, home: Option<&Home>) -> Result<(MeshBackend, u32)> {
        self.ground.check(self.who)?;
        let clock = &request.options.clock;
        let until = clock.now().after(request.timeout);
        let roster = Roster::<Known>::read(request, "sim", self.lineage.identity, home.map(|h| h.token))?;
        let mesh = MeshOptions::of(&request.options)?;
        let roster = Arc::new(roster);
        let made = self.meet(&roster, &mesh, request, until);
        let made = made.map_err(|e| roster.in_call(e, &request.options))?;
        self.become_of(Fate { generation: roster.generation, finalized: false });
        Ok((made, roster.generation))
    }

    /// Who looks for this communicator hears what has become of it.
    fn become_of(&self, fate: Fate) {
        self.ground.town().state.lock().fates.insert(self.lineage.identity.number, fate);
    }

    /// The attempt of `roster`, and who its members are, as their ground knows them.
    fn place(
        &self,
        state: &mut Register,
        roster: &Arc<Roster<Known>>,
        mesh: &MeshOptions,
    ) -> Result<(Gathering, Vec<ground::Identity>)> {
        let key = roster.key;
        // One that was killed is away, too, though it has not let go of its home yet.
        let home = |r: &usize| state.homes.get(&roster.members[*r].token);
        let away = |r: &usize| home(r).is_none_or(|who| self.ground.check(*who).is_err());
        let away: Vec<usize> = (0..roster.size()).filter(away).collect();
        if !away.is_empty() {
            return Err(state.without(roster, &[], away));
        }
        // Not what a handle says: that may be anything.
        let members: Vec<ground::Identity> =
            roster.members.iter().filter_map(|m| state.homes.get(&m.token).copied()).collect();
        let make = || {
            let meeting = Arc::new(Meeting::new(shares_on(&self.ground, &members, mesh.connect)));
            Gathering { meeting, connect: mesh.connect, roster: Arc::clone(roster) }
        };
        // Who comes late hears what is wrong with the attempt; who has heard it begins another, and so does who was too late:
        // those whose time was up may call again.
        if state.meetings.get(&key).is_some_and(|g| g.meeting.is_over_for(roster.rank)) {
            state.meetings.remove(&key);
        }
        Ok((state.meetings.entry(key).or_insert_with(make).clone(), members))
    }

    fn meet(
        &self,
        roster: &Arc<Roster<Known>>,
        mesh: &MeshOptions,
        request: &ReconfigureRequest,
        until: comm_core::Time,
    ) -> Result<MeshBackend> {
        let town = self.ground.town();
        let key = roster.key;
        let (rivals, placed) = {
            let mut state = town.state.lock();
            let rivals = state.rivals(roster);
            (rivals, self.place(&mut state, roster, mesh))
        };
        for other in &rivals {
            // They wait for this rank in vain.
            if let Some(rank) = other.roster.rank_of(self.lineage.identity.number) {
                other.meeting.fail(other.roster.refused(rank, Refusal::Differs));
            }
        }
        let (gathering, members) = placed?;
        let meeting = &gathering.meeting;
        // And this rank for one of them.
        let whom = |r: &usize, g: &Gathering| roster.rank_of(g.roster.members[*r].identity.number);
        if let Some(rank) = rivals.iter().find_map(|g| g.meeting.arrived().iter().find_map(|r| whom(r, g))) {
            meeting.fail(roster.refused(rank, Refusal::Differs));
        }
        if gathering.connect != mesh.connect {
            let (theirs, own, ours) = (gathering.connect, roster.rank, mesh.connect);
            let what = format!("members do not fit together: rank {own} says connect={ours}, others {theirs}");
            meeting.fail(roster.failed(&what, &meeting.arrived(), Vec::new()));
        }
        let share = if meeting.enter(roster.rank) {
            let killed = |r: &usize| self.ground.check(members[*r]).is_err();
            let look = |arrived: &[usize]| {
                let dead: Vec<usize> = (0..members.len()).filter(killed).collect();
                (!dead.is_empty()).then(|| roster.failed(&gone(roster, &dead), arrived, dead))
            };
            let late = |arrived: &[usize]| {
                let missing: Vec<usize> = (0..members.len()).filter(|r| !arrived.contains(r)).collect();
                roster.late(&roster.names(&missing), arrived, missing)
            };
            meeting.wait(roster.rank, &request.options.clock, until, look, late)
        } else {
            // The one before has come to nothing, and not all who were there have left.
            let what = "an earlier attempt with the same uuid has not ended for all";
            Err(roster.failed(what, &[], Vec::new()))
        };
        let mut state = town.state.lock();
        if meeting.all_came() && state.meetings.get(&key).is_some_and(|g| Arc::ptr_eq(&g.meeting, meeting)) {
            state.meetings.remove(&key);
        }
        drop(state);
        let next = Identity { generation: roster.generation, ..self.lineage.identity };
        let next = Self::at(&self.ground, self.who, &request.options, next);
        let options = &request.options;
        crate::mesh(&self.ground, &members, (roster.rank, share?), options, (roster.key, roster.generation), next)
    }
}

impl Regroup for SimRegroup {
    fn handle(&self) -> Result<String> {
        Ok(self.lineage.home(|| self.open())?.handle.clone())
    }

    fn gather(&self, request: &ReconfigureRequest) -> Result<MeshBackend> {
        self.lineage.attempt(request.uuid, |home| self.make(request, home))
    }

    fn branch(&self, name: &str, generation: u32) -> Arc<dyn Regroup> {
        let identity = Identity { number: self.ground.town().number(), generation };
        Self::at(&self.ground, self.who, &self.options.clone().name(name), identity)
    }

    fn close(&self) {
        self.become_of(Fate { generation: self.lineage.identity.generation, finalized: true });
        // Its end tells those who wait.
        drop(self.lineage.close());
    }
}

impl Drop for SimRegroup {
    fn drop(&mut self) {
        let Identity { number, generation } = self.lineage.identity;
        let town = self.ground.town();
        let mut state = town.state.lock();
        if state.fates.get(&number).is_some_and(|f| f.generation == generation) {
            state.fates.remove(&number);
        }
    }
}

fn gone(roster: &Roster<Known>, ranks: &[usize]) -> String {
    format!("{} {}", roster.names(ranks), if ranks.len() == 1 { "is gone" } else { "are gone" })
}
