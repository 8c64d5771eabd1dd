//! The dynamic regime: how communicators are named to those who do not know them yet, and made anew of any of them.
//!
//! Every communicator has a *lineage*: an identity that it keeps through all memberships, and a generation. Its *handle*
//! says so, with what others need to reach it and the settings that all members must share. Whoever has the handles of
//! all members in one order can make the communicator of them; no store and no rank is special, so any may die.

use std::fmt;
use std::sync::Arc;

use comm_core::{CommOptions, Context, Error, ErrorKind, Fnv, ReconfigureRequest, Result};
use comm_transport::PROTOCOL;
use parking_lot::Mutex;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::mesh::MeshBackend;

/// What every handle begins with: the format's name and number.
const PREFIX: &str = "rc1-";
/// The longest handle that is read, in bytes.
const LONGEST: usize = 64 << 10;
/// The longest name of a communicator, in bytes.
const LONGEST_NAME: usize = 256;
/// Members that are named in an error.
const SHOWN: usize = 8;

/// How a backend's communicators get new memberships: one per communicator, held by its [`MeshBackend`] or
/// [`EmptyBackend`](super::EmptyBackend).
pub trait Regroup: Send + Sync + fmt::Debug {
    /// The communicator's handle. Asks nobody; the same at every call until the communicator has been reconfigured.
    ///
    /// # Errors
    ///
    /// `StaleGeneration` once it has been reconfigured; what the backend's preparations may fail with.
    fn handle(&self) -> Result<String>;

    /// Makes the communicator of all that `request` names. Collective over them. When it fails, nothing has changed.
    ///
    /// # Errors
    ///
    /// As [`Roster::read`]; `StaleGeneration` when the communicator has been reconfigured, or a member of the list; `Bootstrap`
    /// when not all members come, or not with the same list.
    fn gather(&self, request: &ReconfigureRequest) -> Result<MeshBackend>;

    /// The lineage of a communicator that was made from this one in another way, by a split or by shrinking.
    fn branch(&self, name: &str, generation: u32) -> Arc<dyn Regroup>;

    /// The communicator has been finalized: it comes to no attempt any more, and who waits for it there learns so at once.
    fn close(&self);
}

/// Where a backend finds a communicator.
pub trait Place: Clone + Serialize + DeserializeOwned {
    /// The name of its host, for people, where that says anything.
    fn host(&self) -> Option<&str>;
}

/// Which communicator a handle is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Identity {
    /// Random; the same in all generations. Handles are ordered by it.
    pub number: u64,
    /// Membership generation.
    pub generation: u32,
}

/// What all members of a communicator must have in common.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Common {
    /// The communicator's name.
    pub name: String,
    /// Whether frames carry a checksum.
    pub checksum: bool,
    /// Whether there is a secret.
    pub secret: bool,
}

impl Common {
    /// What options say.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` for a name that is empty or too long; as [`CommOptions::effective_secret`].
    pub fn of(options: &CommOptions) -> Result<Self> {
        let name = options.effective_name();
        if name.is_empty() || name.len() > LONGEST_NAME {
            let n = name.len();
            return Err(Error::invalid(format!("a communicator's name has 1 to {LONGEST_NAME} bytes, this one {n}")));
        }
        let secret = options.effective_secret()?.is_some();
        Ok(Self { name: name.into(), checksum: options.checksum, secret })
    }

    /// What the two say differently, in words, each side's.
    fn difference(&self, other: &Self) -> Option<(String, String)> {
        let on = |b: bool| if b { "has checksums on" } else { "has checksums off" };
        let has = |b: bool| if b { "has a secret (RUSTCOMMS_SECRET)" } else { "has no secret (RUSTCOMMS_SECRET)" };
        if self.name != other.name {
            return Some((format!("is called '{}'", self.name), format!("is called '{}'", other.name)));
        }
        if self.secret != other.secret {
            return Some((has(self.secret).into(), has(other.secret).into()));
        }
        (self.checksum != other.checksum).then(|| (on(self.checksum).into(), on(other.checksum).into()))
    }
}

/// One communicator as another can name it. `P` is where a backend finds it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Handle<P> {
    /// Which communicator it is.
    pub identity: Identity,
    /// A random number of this handle.
    pub token: u64,
    /// What all members must have in common.
    pub common: Common,
    /// Where it is.
    pub place: P,
}

/// Who wrote a handle; the first thing in every version of its body.
#[derive(Debug, Serialize, Deserialize)]
struct Stamp {
    protocol: u32,
    backend: String,
}

#[derive(Serialize, Deserialize)]
struct Body<P> {
    token: u64,
    common: Common,
    place: P,
}

impl<P: Place> Handle<P> {
    /// The handle as text, for backend `backend`.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` for a place that is too large.
    pub fn write(&self, backend: &str) -> Result<String> {
        let stamp = Stamp { protocol: u32::from(PROTOCOL), backend: backend.into() };
        let body = Body { token: self.token, common: self.common.clone(), place: self.place.clone() };
        let encoded = postcard::to_allocvec(&(stamp, body));
        let mut bytes = encoded.map_err(|e| Error::invalid(format!("a handle cannot be encoded: {e}")))?;
        bytes.extend(self.identity.check(&bytes).to_le_bytes());
        let Identity { number, generation } = self.identity;
        let mut text = format!("{PREFIX}{number:016x}-{generation:08x}-");
        for b in bytes {
            text.push_str(&format!("{b:02x}"));
        }
        if text.len() > LONGEST {
            return Err(Error::invalid(format!("a handle has {} bytes; the limit is {LONGEST}", text.len())));
        }
        Ok(text)
    }

    /// Reads what somebody claims to be a handle for `backend`. Whose it is comes first, because it has the same form in
    /// all versions.
    ///
    /// # Errors
    ///
    /// What is wrong with it, as a sentence about it; or `VersionSkew`.
    fn read(text: &str, backend: &str, index: usize) -> Result<Self> {
        let wrong = |what: &str| Error::invalid(format!("handle {index} {what}"));
        if text.len() > LONGEST {
            return Err(wrong(&format!("has {} bytes; the limit is {LONGEST}", text.len())));
        }
        let (identity, bytes) = split(text).ok_or_else(|| wrong("is not what init_handle gives, or was cut"))?;
        let Some((body, check)) = bytes.split_last_chunk::<4>() else {
            return Err(wrong("is not complete"));
        };
        if identity.check(body) != u32::from_le_bytes(*check) {
            return Err(wrong("is damaged or not complete"));
        }
        let (stamp, rest): (Stamp, &[u8]) =
            postcard::take_from_bytes(body).map_err(|e| wrong(&format!("cannot be read: {e}")))?;
        if stamp.protocol != u32::from(PROTOCOL) {
            let who = format!("rank {index}");
            return Err(ErrorKind::VersionSkew { ours: u32::from(PROTOCOL), theirs: stamp.protocol, who }.into());
        }
        if stamp.backend != backend {
            return Err(wrong(&format!("is of backend '{}', not of '{backend}'", shown(&stamp.backend))));
        }
        match postcard::take_from_bytes::<Body<P>>(rest) {
            Ok((Body { token, common, place }, [])) if common.name.len() <= LONGEST_NAME => {
                Ok(Self { identity, token, common, place })
            }
            Ok(_) => Err(wrong("has more in it than belongs there")),
            Err(e) => Err(wrong(&format!("cannot be read: {e}"))),
        }
    }
}

impl Identity {
    /// What shows that a handle has come whole.
    fn check(self, body: &[u8]) -> u32 {
        let mut h = Fnv::default();
        h.write(&self.number.to_le_bytes());
        h.write(&self.generation.to_le_bytes());
        h.write(body);
        let h = h.finish();
        (h ^ (h >> 32)) as u32
    }
}

/// A text of somebody else's in an error.
fn shown(text: &str) -> String {
    text.chars().take(40).collect()
}

/// Takes a handle's text apart.
fn split(text: &str) -> Option<(Identity, Vec<u8>)> {
    // Only what `write` writes: one communicator must not have two handles that differ.
    let digit = |b: &u8| b.is_ascii_digit() || (b'a'..=b'f').contains(b);
    let mut parts = text.strip_prefix(PREFIX)?.splitn(3, '-');
    let (number, generation, body) = (parts.next()?, parts.next()?, parts.next()?);
    let hex = [number, generation, body].iter().all(|p| p.as_bytes().iter().all(digit));
    if !hex || number.len() != 16 || generation.len() != 8 || body.len() % 2 != 0 {
        return None;
    }
    let number = u64::from_str_radix(number, 16).ok()?;
    let generation = u32::from_str_radix(generation, 16).ok()?;
    let nibble = |b: u8| (b as char).to_digit(16).map(|d| d as u8);
    let bytes = body.as_bytes().chunks_exact(2).map(|c| Some((nibble(c[0])? << 4) | nibble(c[1])?));
    Some((Identity { number, generation }, bytes.collect::<Option<_>>()?))
}

/// The members of a communicator that is to be, as this rank sees them.
#[derive(Clone, Debug)]
pub struct Roster<P> {
    /// This rank.
    pub rank: usize,
    /// The number that the user has given to the attempt.
    pub uuid: u64,
    /// The generation of the new communicator: 1 more than the highest among the members.
    pub generation: u32,
    /// All members, in rank order.
    pub members: Vec<Handle<P>>,
    /// Names this attempt: equal on all that have passed the same handles in the same order and the same uuid.
    pub key: u64,
    /// Equal on all that have passed the same uuid, whatever the handles.
    pub attempt: u64,
}

/// Why a member does not come to an attempt, as it says itself or as others know.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// The list has a handle of an earlier generation of it; it is at generation `now`.
    Stale {
        /// Its generation.
        now: u32,
    },
    /// It has been finalized.
    Finalized,
    /// It makes an attempt with the same uuid and other handles, or the same in another order.
    Differs,
}

impl<P: Place> Roster<P> {
    /// Reads the handles of a request, of which one must be the caller's own: `own`, and `token` if it has been given
    /// away.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` that names the index, for what is no handle of `backend`, for two of one communicator, and when
    /// the own one is not among them; `VersionSkew` for one of another version; `StaleGeneration` when the own one is
    /// older or newer than this communicator; `Bootstrap` when members have different settings.
    pub fn read(request: &ReconfigureRequest, backend: &str, own: Identity, token: Option<u64>) -> Result<Self> {
        let handles = &request.handles;
        let members: Vec<Handle<P>> =
            handles.iter().enumerate().map(|(i, text)| Handle::read(text, backend, i)).collect::<Result<_>>()?;
        let mut order: Vec<usize> = (0..members.len()).collect();
        order.sort_by_key(|i| members[*i].identity.number);
        if let Some(w) = order.windows(2).find(|w| members[w[0]].identity.number == members[w[1]].identity.number) {
            return Err(Error::invalid(format!("handles {} and {} are of one communicator", w[0], w[1])));
        }
        let Some(rank) = members.iter().position(|m| m.identity.number == own.number) else {
            let what = "the handles do not contain this communicator's own, which init_handle gives";
            return Err(Error::invalid(what));
        };
        let mine = &members[rank];
        if mine.identity.generation != own.generation {
            let (ours, theirs) = (own.generation, mine.identity.generation);
            return Err(ErrorKind::StaleGeneration { ours, theirs, rank: None }.into());
        }
        if token != Some(mine.token) {
            return Err(Error::invalid(format!("handle {rank} looks like this communicator's own, but is not")));
        }
        if u32::try_from(members.len()).is_err() {
            return Err(Error::invalid(format!("a communicator of {} members is too large", members.len())));
        }
        let newest = members.iter().enumerate().max_by_key(|(_, m)| m.identity.generation);
        let generation = newest.map_or(0, |(_, m)| m.identity.generation).checked_add(1).ok_or_else(|| {
            Error::invalid(format!("handle {} is of the last generation there is", newest.map_or(0, |(i, _)| i)))
        })?;
        // All compare with the first, so that all say the same.
        for (r, m) in members.iter().enumerate() {
            if let Some((first, other)) = members[0].common.difference(&m.common) {
                let what = format!("members do not fit together: rank 0 {first}, rank {r} {other}");
                return Err(Error::new(ErrorKind::Bootstrap { what, arrived: Vec::new(), missing: Vec::new() }));
            }
        }
        let mut h = Fnv::default();
        h.write(&request.uuid.to_le_bytes());
        let attempt = h.finish();
        for m in &members {
            h.write(&m.identity.number.to_le_bytes());
            h.write(&m.token.to_le_bytes());
        }
        Ok(Self { rank, uuid: request.uuid, generation, members, key: h.finish(), attempt })
    }

    /// Ranks in the new communicator.
    #[must_use]
    pub fn size(&self) -> usize {
        self.members.len()
    }

    /// The member that is communicator `number`.
    #[must_use]
    pub fn rank_of(&self, number: u64) -> Option<usize> {
        self.members.iter().position(|m| m.identity.number == number)
    }

    /// Members, in words.
    #[must_use]
    pub fn names(&self, ranks: &[usize]) -> String {
        let name = |r: &usize| match self.members[*r].place.host() {
            // Somebody else's text.
            Some(host) => format!("rank {r} on {}", host.chars().take(64).collect::<String>()),
            None => format!("rank {r}"),
        };
        let mut all: Vec<String> = ranks.iter().take(SHOWN).map(name).collect();
        if ranks.len() > SHOWN {
            all.push(format!("{} more", ranks.len() - SHOWN));
        }
        all.join(", ")
    }

    /// This attempt has failed for lack of `missing`, while `arrived` were there.
    #[must_use]
    pub fn failed(&self, why: &str, arrived: &[usize], missing: Vec<usize>) -> Error {
        let what = format!("attempt {} to reconfigure, of {} members: {why}", self.uuid, self.size());
        let mut here: Vec<usize> = arrived.iter().chain([&self.rank]).copied().collect();
        here.retain(|r| !missing.contains(r));
        here.sort_unstable();
        here.dedup();
        let arrived = here.into_iter().take(4 * SHOWN).map(|r| self.names(&[r])).collect();
        Error::new(ErrorKind::Bootstrap { what, arrived, missing })
    }

    /// This attempt has failed because time was up before `who`, the members `missing`, had come.
    #[must_use]
    pub fn late(&self, who: &str, arrived: &[usize], missing: Vec<usize>) -> Error {
        let what = format!(
            "time was up before {who} had come; all members call reconfigure with the same uuid and the same handles in \
             the same order"
        );
        self.failed(&what, arrived, missing)
    }

    /// This attempt has failed because of what member `rank` is, or passes.
    #[must_use]
    pub fn refused(&self, rank: usize, refusal: Refusal) -> Error {
        match refusal {
            Refusal::Stale { now } => {
                let theirs = self.members[rank].identity.generation;
                ErrorKind::StaleGeneration { ours: now, theirs, rank: Some(rank) }.into()
            }
            Refusal::Finalized => {
                let what = format!("{} cannot come: its communicator has been finalized", self.names(&[rank]));
                self.failed(&what, &[], vec![rank])
            }
            Refusal::Differs => {
                let what = format!(
                    "members do not fit together: {} and {} pass different handles, or the same in different orders; all \
                     members pass the same",
                    self.names(&[self.rank]),
                    self.names(&[rank])
                );
                self.failed(&what, &[], Vec::new())
            }
        }
    }

    /// An error of the attempt, with what it was about.
    #[must_use]
    pub fn in_call(&self, e: Error, options: &CommOptions) -> Error {
        if matches!(e.kind(), ErrorKind::InvalidArgument { .. }) {
            // There is no communicator yet that would still be usable.
            return e;
        }
        e.with_context(|| Context {
            comm: Some(options.effective_name().into()),
            rank: Some((self.rank, self.size())),
            ..Context::default()
        })
    }
}

/// Where a lineage is at, for backends: who it is, its home of type `H` while others can name it, and that one attempt is
/// made at a time.
#[derive(Debug)]
pub struct Lineage<H> {
    /// Which communicator it is.
    pub identity: Identity,
    state: Mutex<State<H>>,
}

#[derive(Debug)]
struct State<H> {
    home: Option<Arc<H>>,
    /// The attempt that is being made.
    attempt: Option<u64>,
    /// The generation of the communicator that has taken its place.
    successor: Option<u32>,
    /// It has been finalized.
    finalized: bool,
}

impl<H> Lineage<H> {
    /// One that nobody knows yet.
    #[must_use]
    pub const fn new(identity: Identity) -> Self {
        Self { identity, state: Mutex::new(State { home: None, attempt: None, successor: None, finalized: false }) }
    }

    /// Its home, which is opened if there is none.
    ///
    /// # Errors
    ///
    /// `StaleGeneration` once it has been reconfigured; `Finalized` once it has been closed; those of `open`.
    pub fn home(&self, open: impl FnOnce() -> Result<H>) -> Result<Arc<H>> {
        let mut state = self.state.lock();
        self.check(&state)?;
        if let Some(h) = &state.home {
            return Ok(Arc::clone(h));
        }
        let home = Arc::new(open()?);
        state.home = Some(Arc::clone(&home));
        Ok(home)
    }

    /// Nobody finds it any more, from now on. Its home, if it has one that no attempt uses.
    pub fn close(&self) -> Option<Arc<H>> {
        let mut state = self.state.lock();
        state.finalized = true;
        let home = state.home.take();
        home.filter(|_| state.attempt.is_none())
    }

    /// Makes an attempt to be reconfigured: `gather` gets the home, if there is one, and returns what has come of it and
    /// its generation. From its success on this lineage is spent.
    ///
    /// # Errors
    ///
    /// `StaleGeneration` once it has been reconfigured; `Finalized` once it has been closed; `InvalidArgument` while
    /// another attempt is being made; those of `gather`.
    pub fn attempt<T>(&self, uuid: u64, gather: impl FnOnce(Option<&H>) -> Result<(T, u32)>) -> Result<T> {
        let mut state = self.state.lock();
        self.check(&state)?;
        if let Some(other) = state.attempt {
            let what = format!("attempt {other} to reconfigure this communicator has not ended; wait for it");
            return Err(Error::invalid(what));
        }
        state.attempt = Some(uuid);
        let home = state.home.clone();
        drop(state);
        // Also when it unwinds.
        let _over = Over(self);
        let (new, generation) = gather(home.as_deref())?;
        let mut state = self.state.lock();
        state.successor = Some(generation);
        state.home = None;
        Ok(new)
    }

    fn check(&self, state: &State<H>) -> Result<()> {
        let ours = self.identity.generation;
        match state.successor {
            Some(theirs) => Err(ErrorKind::StaleGeneration { ours, theirs, rank: None }.into()),
            None if state.finalized => Err(ErrorKind::Finalized.into()),
            None => Ok(()),
        }
    }
}

struct Over<'a, H>(&'a Lineage<H>);

impl<H> Drop for Over<'_, H> {
    fn drop(&mut self) {
        self.0.state.lock().attempt = None;
    }
}

#[cfg(test)]
mod tests;
