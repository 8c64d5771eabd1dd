//! The dynamic regime in one process: a communicator that has given its handle away is known in a *town*, where the
//! members of a new one meet. What it promises is what backend tcp promises.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::sync::{Arc, OnceLock};

use collectives::{
    Common, EmptyBackend, Handle, Identity, Lineage, MESH_HINTS, MeshBackend, MeshOptions, Regroup, Roster,
};
use comm_core::{Backend, BackendInfo, CommOptions, Context, Error, ErrorKind, ReconfigureRequest, Result};
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
    /// By the attempt's key.
    meetings: HashMap<(u64, u64), Gathering>,
}

/// An attempt under way.
#[derive(Clone)]
struct Gathering {
    meeting: Arc<Meeting>,
    connect: Connect,
    roster: Arc<Roster<Place>>,
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
        drop(state);
        for g in concerned {
            let rank = g.roster.members.iter().position(|m| m.token == token);
            let missing: Vec<usize> = rank.into_iter().collect();
            g.meeting.fail(|arrived| failed(&g.roster, &gone(&missing), arrived, missing));
        }
    }
}

/// Where a communicator is found: the town knows.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Place;

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
        if options.rank.is_some() || options.size.is_some() {
            let what = "a dynamic communicator has no rank and size before it is reconfigured: do not set them";
            return Err(Error::invalid(what));
        }
        MeshOptions::of(options)?;
        Common::of(options)?;
        let mut info = BackendInfo::new("sim", 0, 0);
        info.transport = "in-process".into();
        info.hints = MESH_HINTS;
        let (ground, who) = ground::here();
        ground.check(who)?;
        Ok(EmptyBackend::new(info, Arc::clone(&options.clock), Self::new(&ground, who, options)))
    }

    fn open(&self) -> Result<Home> {
        self.ground.check(self.who)?;
        let town = self.ground.town();
        // Frames always carry a checksum here, and nobody proves to know a secret.
        let common = Common { checksum: true, secret: false, ..Common::of(&self.options)? };
        let (identity, token) = (self.lineage.identity, town.number());
        let handle = Handle { identity, token, common, place: Place }.write("sim")?;
        town.state.lock().homes.insert(token, self.who);
        Ok(Home { town, token, handle })
    }

    fn make(&self, request: &ReconfigureRequest, home: Option<&Home>) -> Result<MeshBackend> {
        self.ground.check(self.who)?;
        let clock = &request.options.clock;
        let until = clock.now().after(request.timeout);
        let roster = Roster::<Place>::read(request, "sim", self.lineage.identity, home.map(|h| h.token))?;
        let mesh = MeshOptions::of(&request.options)?;
        let made = self.meet(&Arc::new(roster.clone()), &mesh, request, until);
        made.map_err(|e| {
            e.with_context(|| Context {
                comm: Some(request.options.effective_name().into()),
                rank: Some((roster.rank, roster.size())),
                ..Context::default()
            })
        })
    }

    fn meet(
        &self,
        roster: &Arc<Roster<Place>>,
        mesh: &MeshOptions,
        request: &ReconfigureRequest,
        until: comm_core::Time,
    ) -> Result<MeshBackend> {
        let town = self.ground.town();
        let key = (roster.key, roster.nonce);
        let (gathering, members) = {
            let mut state = town.state.lock();
            let away = |r: &usize| !state.homes.contains_key(&roster.members[*r].token);
            let away: Vec<usize> = (0..roster.size()).filter(away).collect();
            if !away.is_empty() {
                return Err(failed(roster, &gone(&away), &[], away));
            }
            // Not what a handle says: that may be anything.
            let members: Vec<ground::Identity> =
                roster.members.iter().filter_map(|m| state.homes.get(&m.token).copied()).collect();
            let make = || {
                let meeting = Arc::new(Meeting::new(shares_on(&self.ground, &members, mesh.connect)));
                Gathering { meeting, connect: mesh.connect, roster: Arc::clone(roster) }
            };
            // Who comes late hears what has become of the attempt; who has heard it begins another.
            if state.meetings.get(&key).is_some_and(|g| g.meeting.is_over_for(roster.rank)) {
                state.meetings.remove(&key);
            }
            (state.meetings.entry(key).or_insert_with(make).clone(), members)
        };
        let meeting = &gathering.meeting;
        if gathering.connect != mesh.connect {
            let (theirs, own, ours) = (gathering.connect, roster.rank, mesh.connect);
            let what = format!("members do not fit together: rank {own} says connect={ours}, others {theirs}");
            meeting.fail(|arrived| failed(roster, &what, arrived, Vec::new()));
        }
        let share = if meeting.enter(roster.rank) {
            let killed = |r: &usize| self.ground.check(members[*r]).is_err();
            let look = |arrived: &[bool]| {
                let dead: Vec<usize> = (0..members.len()).filter(killed).collect();
                (!dead.is_empty()).then(|| failed(roster, &gone(&dead), arrived, dead))
            };
            let late = |arrived: &[bool]| {
                let missing = (0..arrived.len()).filter(|r| !arrived[*r]).collect();
                let what = "time was up before all had come; all members call reconfigure with the same uuid and the \
                            same handles in the same order";
                failed(roster, what, arrived, missing)
            };
            meeting.wait(roster.rank, &request.options.clock, until, look, late)
        } else {
            // The one before has come to nothing, and not all who were there have left.
            let what = "an earlier attempt with the same uuid has not ended for all";
            Err(failed(roster, what, &[], Vec::new()))
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
        self.lineage.attempt(request.uuid, |home| {
            let new = self.make(request, home)?;
            let generation = new.info().generation;
            Ok((new, generation))
        })
    }

    fn branch(&self, name: &str, generation: u32) -> Arc<dyn Regroup> {
        let identity = Identity { number: self.ground.town().number(), generation };
        Self::at(&self.ground, self.who, &self.options.clone().name(name), identity)
    }
}

fn gone(ranks: &[usize]) -> String {
    let list: Vec<String> = ranks.iter().map(|r| format!("rank {r}")).collect();
    let what = if ranks.len() == 1 { "is gone, or is" } else { "are gone, or are" };
    format!("{} {what} part of a newer communicator", list.join(", "))
}

/// The attempt of `roster` has failed for lack of `missing`.
fn failed(roster: &Roster<Place>, why: &str, arrived: &[bool], missing: Vec<usize>) -> Error {
    let what = format!("the attempt to reconfigure, of {} members, has failed: {why}", roster.size());
    let here = arrived.iter().enumerate().filter(|(r, a)| **a && !missing.contains(r));
    let arrived = here.map(|(r, _)| format!("rank {r}")).collect();
    Error::new(ErrorKind::Bootstrap { what, arrived, missing })
}
