//! How ranks find each other: through a store, under keys `rustcomms/{run}/{name}/{generation}/…`.
//!
//! A generation is one attempt of all ranks to meet. Each rank puts the settings and its card there, counts itself, and
//! waits for the verdict: `Go` by the rank that came last, or `Failed` by the first that gives up or finds something
//! wrong, so that all learn at once why. A rank begins with the generation that is current and goes on to the next when
//! that has its verdict already, or when this process takes part in it (an earlier or concurrent communicator of the same
//! name). A failure, however, is first told to each rank that was started before it, or hardly after: it is about them,
//! too. So ranks with different histories meet, after a failed attempt all who try again do, and what an earlier start
//! has left at a store that lives on is no concern of a later one.
//!
//! Ranks that were killed while they waited have left cards that look like those of the living. Where it can be told,
//! on the same machine, a card of a process that is dead makes the generation `Stale`, and the living meet in the next.

use std::collections::HashSet;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use comm_core::{Error, ErrorKind, Result, Store};
use parking_lot::Mutex;

use crate::life::{Fate, began, wall};
use crate::records::{
    Card, Failure, Settings, Stamp, Verdict, decode, decode_card, decode_stamp, encode, process, random,
};

/// How long a rank that gives up may take to find out who is there.
const ROLL_CALL: Duration = Duration::from_secs(2);
/// Keys in one request: stores have limits.
const KEYS: usize = 1024;
/// Ranks that are listed by a rank that gives up. A world size may be a typing error.
const LISTED: usize = 16 << 10;
/// Ranks of each kind that others are told of when they are too many.
const NAMED: usize = 64;
/// How much later than a failure a rank may have been started and still be told of it: ranks of one start are not
/// started at the same moment, and hosts' clocks differ.
const LATER: u64 = 2000;
/// What no record consists of: comparing with it reads a key without waiting for it.
const PROBE: &[u8] = b"?";

/// One rank's part in the meeting.
pub(crate) struct Rendezvous {
    pub(crate) store: Arc<dyn Store>,
    /// The store's name in errors.
    pub(crate) store_name: String,
    /// `rustcomms/{run}/{name}`.
    pub(crate) scope: String,
    pub(crate) settings: Settings,
    pub(crate) card: Card,
    pub(crate) began: Instant,
    pub(crate) until: Instant,
}

/// A place among the ranks, all of which have come.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Seat {
    /// The generation's keys begin with this.
    pub(crate) key: String,
    /// A number that only those know who can read the store.
    pub(crate) nonce: u64,
}

enum Step {
    Seated(Seat),
    /// The generation is not for this rank. If it has failed before this rank came: why.
    Next(Option<String>),
}

/// Failed attempts of which ranks of this process know.
fn told() -> &'static Mutex<HashSet<(u64, usize)>> {
    static TOLD: OnceLock<Mutex<HashSet<(u64, usize)>>> = OnceLock::new();
    TOLD.get_or_init(Mutex::default)
}

fn bootstrap(what: String) -> Error {
    Error::new(ErrorKind::Bootstrap { what, arrived: Vec::new(), missing: Vec::new() })
}

fn verdict_key(key: &str) -> String {
    format!("{key}/verdict")
}

fn failed_key(key: &str) -> String {
    format!("{key}/failed")
}

impl Rendezvous {
    fn rank(&self) -> usize {
        self.card.rank
    }

    fn size(&self) -> usize {
        self.settings.size
    }

    fn protocol(&self) -> u32 {
        self.settings.stamp.protocol
    }

    fn left(&self) -> Duration {
        self.until.saturating_duration_since(Instant::now())
    }

    fn who(&self) -> String {
        self.settings.stamp.who()
    }

    /// Waits for all ranks.
    pub(crate) fn meet(&self) -> Result<Seat> {
        let current = format!("{}/current", self.scope);
        let start = self.store.add(&current, 0).map_err(|e| self.uncountable(e, &current))?;
        let mut g = start.max(1);
        let mut earlier = None;
        loop {
            match self.attempt(&format!("{}/{g}", self.scope), earlier.as_deref())? {
                Step::Seated(seat) => {
                    return Ok(seat);
                }
                Step::Next(why) => {
                    g = g.saturating_add(1);
                    earlier = why.or(earlier);
                }
            }
            if self.left().is_zero() {
                let what = format!("time was up before {} had found an attempt that all ranks can join", self.who());
                return Err(bootstrap(what));
            }
        }
    }

    /// `earlier`: why an earlier attempt has failed, for the error that this one may end with.
    fn attempt(&self, key: &str, earlier: Option<&str>) -> Result<Step> {
        let there = self.store.compare_set(&verdict_key(key), PROBE, PROBE);
        let there = there.map_err(|e| self.gone(&e, "meeting the other ranks"))?;
        if there != PROBE {
            return self.pass(&there);
        }
        let mine = encode(&self.settings)?;
        let there = self.set_once(&format!("{key}/settings"), &mine)?;
        if there != mine
            && let Some((failure, error)) = self.compare(&there)
        {
            // Who has said otherwise may be long dead.
            return match self.writer(key, &there)? {
                Some(dead) => self.discard(key, &dead),
                None => self.condemn(key, failure, error),
            };
        }

        let mine = encode(&self.card)?;
        let there = self.set_once(&format!("{key}/{}", self.rank()), &mine)?;
        if there != mine {
            let error = match decode_card(&there, self.rank()) {
                Ok(other) if other.process == process() => return Ok(Step::Next(None)),
                Ok(other) if self.fate(&other) != Fate::Alive => return self.discard(key, &other),
                Ok(other) => bootstrap(format!(
                    "rank {} is there twice: pid {} on {} and pid {} on {}; every process needs its own rank",
                    self.rank(),
                    other.life.pid,
                    other.host.name,
                    self.card.life.pid,
                    self.card.host.name
                )),
                Err(e) => e,
            };
            return self.condemn(key, self.failure(&error), error);
        }

        let arrived = format!("{key}/arrived");
        let count = self.store.add(&arrived, 1).map_err(|e| self.uncountable(e, &arrived))?;
        if usize::try_from(count) == Ok(self.size()) {
            if let Some(step) = self.bury(key)? {
                return Ok(step);
            }
            let verdict = Verdict::Go { nonce: random() };
            let there = self.set_once(&verdict_key(key), &encode(&verdict)?)?;
            let seat = self.obey(key, &there)?;
            if matches!(seat, Step::Seated(_)) {
                self.begin_at(number(key).saturating_add(1));
            }
            return Ok(seat);
        }
        match self.store.get(&verdict_key(key), self.left()) {
            Ok(there) => self.obey(key, &there),
            Err(e) if matches!(e.kind(), ErrorKind::Timeout { .. }) => self.give_up(key, earlier),
            Err(e) => Err(self.gone(&e, "waiting for ranks")),
        }
    }

    /// Does what the verdict says.
    fn obey(&self, key: &str, there: &[u8]) -> Result<Step> {
        match decode(there, None, "the verdict in the store")? {
            Verdict::Go { nonce } => Ok(Step::Seated(Seat { key: key.to_owned(), nonce })),
            Verdict::Failed(f) => {
                told().lock().insert((f.id, self.rank()));
                Err(f.error(self.protocol()))
            }
            Verdict::Stale { .. } => Ok(Step::Next(None)),
        }
    }

    /// Goes past a generation that has had its verdict before this rank came.
    fn pass(&self, there: &[u8]) -> Result<Step> {
        let Verdict::Failed(f) = decode(there, None, "the verdict in the store")? else { return Ok(Step::Next(None)) };
        let why = f.error(self.protocol());
        let before = began().saturating_sub(f.at);
        if before >= LATER || !told().lock().insert((f.id, self.rank())) {
            return Ok(Step::Next(Some(why.brief())));
        }
        Err(why)
    }

    /// Later ranks need not look at generations before `next`. Only a place to begin at: without it, they look at more.
    fn begin_at(&self, next: i64) {
        let _ = self.store.set(&format!("{}/current", self.scope), next.to_string().as_bytes());
    }

    /// The card of the rank that has written the settings, if its process is dead.
    fn writer(&self, key: &str, settings: &[u8]) -> Result<Option<Card>> {
        let Ok(stamp) = decode_stamp(settings, "the settings in the store") else { return Ok(None) };
        let card = self.store.compare_set(&format!("{key}/{}", stamp.rank), PROBE, PROBE);
        let card = card.map_err(|e| self.gone(&e, "meeting the other ranks"))?;
        // Of another version, or garbage, nothing is known.
        Ok(decode_card(&card, stamp.rank).ok().filter(|c| c.process != process() && self.fate(c) != Fate::Alive))
    }

    fn fate(&self, other: &Card) -> Fate {
        other.life.fate(&other.host, &self.card.life, &self.card.host)
    }

    /// The generation has a card of a process that is dead: the living go on to the next.
    fn discard(&self, key: &str, dead: &Card) -> Result<Step> {
        let who = format!("rank {} (pid {}) on {}", dead.rank, dead.life.pid, dead.host.name);
        let there = self.set_once(&verdict_key(key), &encode(&Verdict::Stale { who })?)?;
        self.begin_at(number(key).saturating_add(1));
        match decode(&there, None, "the verdict in the store")? {
            Verdict::Failed(_) => self.pass(&there),
            Verdict::Go { .. } | Verdict::Stale { .. } => Ok(Step::Next(None)),
        }
    }

    /// The last rank looks whether all whom it can see are alive: nobody else will, and connecting to the dead fails.
    fn bury(&self, key: &str) -> Result<Option<Step>> {
        if self.size() > LISTED {
            return Ok(None);
        }
        let all: Vec<usize> = (0..self.size()).collect();
        let cards = match self.read_cards(key, &all, self.left().max(ROLL_CALL)) {
            Ok(cards) => cards,
            Err(e) => {
                let e = self.gone(&e, "meeting the other ranks");
                return self.condemn(key, self.failure(&e), e).map(Some);
            }
        };
        let dead = |c: &&Card| c.process != process() && self.fate(c) != Fate::Alive;
        let Some(dead) = cards.iter().find(dead) else { return Ok(None) };
        if self.fate(dead) == Fate::Past {
            return self.discard(key, dead).map(Some);
        }
        let what = format!(
            "rank {} (pid {}) on {} has died while the ranks were meeting; look at its log, and start the ranks again",
            dead.rank, dead.life.pid, dead.host.name
        );
        let error = Error::new(ErrorKind::Bootstrap { what, arrived: Vec::new(), missing: vec![dead.rank] });
        self.condemn(key, self.failure(&error), error).map(Some)
    }

    /// Fails the generation with what this rank has found, unless it has ended already.
    fn condemn(&self, key: &str, failure: Failure, error: Error) -> Result<Step> {
        let id = failure.id;
        let there = self.set_once(&verdict_key(key), &encode(&Verdict::Failed(failure))?)?;
        // Not behind it: ranks that are about to come are to be told.
        self.begin_at(number(key));
        match decode(&there, None, "the verdict in the store")? {
            Verdict::Failed(f) if f.id == id => {
                told().lock().insert((id, self.rank()));
                Err(error)
            }
            // It has come about without this rank, which belongs to a later one.
            Verdict::Go { .. } => Ok(Step::Next(None)),
            Verdict::Failed(_) | Verdict::Stale { .. } => self.obey(key, &there),
        }
    }

    /// What `there` says otherwise than this rank, as others and as this rank put it.
    fn compare(&self, there: &[u8]) -> Option<(Failure, Error)> {
        let what = "the settings in the store";
        let stamp = match decode_stamp(there, what) {
            Ok(s) => s,
            Err(e) => return Some((self.failure(&e), e)),
        };
        if stamp.protocol != self.protocol() {
            let versions = vec![stamp, self.settings.stamp.clone()];
            let failure = Failure { versions, ..self.failure(&bootstrap(String::new())) };
            let error = failure.error(self.protocol());
            return Some((failure, error));
        }
        let other: Settings = match decode(there, Some(stamp.rank), what) {
            Ok(o) => o,
            Err(e) => return Some((self.failure(&e), e)),
        };
        let (ours, theirs) = self.settings.difference(&other)?;
        let error = bootstrap(format!("{} {ours}, {} {theirs}; all ranks must say the same", self.who(), stamp.who()));
        Some((self.failure(&error), error))
    }

    /// Time is up.
    fn give_up(&self, key: &str, earlier: Option<&str>) -> Result<Step> {
        let error = self.roll_call(key).map_or_else(
            |e| e,
            |(arrived, missing)| {
                // It is counted after it has put its card there.
                let why = if missing.is_empty() {
                    "one of the ranks, all of which came, was not counted"
                } else {
                    "not all ranks came"
                };
                let what = format!(
                    "{} gave up waiting after {:.1?}: {why} in time; look whether one of them has ended with an error of \
                     its own, start the ranks closer together, or raise the bootstrap timeout{}",
                    self.who(),
                    self.began.elapsed(),
                    earlier.map_or_else(String::new, |e| format!(". An earlier attempt had failed: {}", shorten(e.into(), 500)))
                );
                Error::new(ErrorKind::Bootstrap { what, arrived, missing })
            },
        );
        match self.condemn(key, self.failure(&error), error)? {
            // The last rank has come at the last moment; it counts on this one.
            Step::Next(_) => {
                let there = self.store.get(&verdict_key(key), ROLL_CALL).map_err(|e| self.gone(&e, "meeting"))?;
                self.obey(key, &there)
            }
            seated @ Step::Seated(_) => Ok(seated),
        }
    }

    /// Who has come, with hosts, and who has not, among the first [`LISTED`] ranks. An error when a rank's card is none.
    fn roll_call(&self, key: &str) -> Result<(Vec<String>, Vec<usize>)> {
        let listed = self.size().min(LISTED);
        let keys = self.card_keys(key, 0..listed);
        let names: Vec<&str> = keys.iter().map(String::as_str).collect();
        let until = Instant::now() + ROLL_CALL;
        let waiting = |e: Error| self.gone(&e, "waiting for ranks");
        // Parts that are there need no closer look, and most ranks are.
        let mut here: Vec<usize> = Vec::new();
        let mut open: Vec<(usize, usize)> =
            (0..listed).step_by(KEYS).map(|start| (start, listed.min(start + KEYS))).collect();
        while let Some((start, end)) = open.pop() {
            let late = Instant::now() >= until;
            if !late && self.store.check(&names[start..end]).map_err(waiting)? {
                here.extend(start..end);
            } else if end - start > 1 && !late {
                let middle = start + (end - start) / 2;
                open.extend([(start, middle), (middle, end)]);
            }
        }
        here.sort_unstable();
        let missing = (0..listed).filter(|r| here.binary_search(r).is_err()).collect();
        let cards = self.read_cards(key, &here, ROLL_CALL).map_err(waiting)?;
        Ok((cards.iter().map(|c| format!("rank {} on {}", c.rank, c.host.name)).collect(), missing))
    }

    fn card_keys(&self, key: &str, ranks: impl IntoIterator<Item = usize>) -> Vec<String> {
        ranks.into_iter().map(|r| format!("{key}/{r}")).collect()
    }

    fn read_cards(&self, key: &str, ranks: &[usize], timeout: Duration) -> Result<Vec<Card>> {
        let mut cards = Vec::with_capacity(ranks.len());
        for part in ranks.chunks(KEYS) {
            let keys = self.card_keys(key, part.iter().copied());
            let names: Vec<&str> = keys.iter().map(String::as_str).collect();
            let raw = self.store.multi_get(&names, timeout)?;
            if raw.len() != names.len() {
                let what = format!("{} answers with {} values for {} keys", self.store_name, raw.len(), names.len());
                return Err(ErrorKind::Corrupt { rank: None, what }.into());
            }
            for (r, bytes) in part.iter().zip(&raw) {
                cards.push(decode_card(bytes, *r)?);
            }
        }
        Ok(cards)
    }

    /// The cards of `ranks`, all of which have come.
    pub(crate) fn cards(&self, seat: &Seat, ranks: &[usize]) -> Result<Vec<Card>> {
        self.read_cards(&seat.key, ranks, self.left().max(ROLL_CALL))
            .map_err(|e| self.gone(&e, "reading where the ranks are"))
    }

    /// Tells the others that this rank cannot be part of the world after all. Returns the error to give: if another has
    /// failed before, what it says is the reason.
    pub(crate) fn report(&self, seat: &Seat, error: Error) -> Error {
        let failure = self.failure(&error);
        let Ok(record) = encode(&failure) else { return error };
        let Ok(there) = self.store.compare_set(&failed_key(&seat.key), b"", &record) else { return error };
        match decode::<Failure>(&there, None, "a rank's reason in the store") {
            Ok(f) if f.id != failure.id => f.error(self.protocol()),
            _ => error,
        }
    }

    /// What a rank has said that cannot be part of the world after all.
    pub(crate) fn reported(&self, seat: &Seat) -> Result<()> {
        let there = self.store.compare_set(&failed_key(&seat.key), PROBE, PROBE);
        let there = there.map_err(|e| self.gone(&e, "connecting to the other ranks"))?;
        if there == PROBE {
            return Ok(());
        }
        let f: Failure = decode(&there, None, "a rank's reason in the store")?;
        Err(f.error(self.protocol()))
    }

    /// An error of this rank's, for others.
    fn failure(&self, error: &Error) -> Failure {
        let stamp: &Stamp = &self.settings.stamp;
        let (what, arrived, missing) = match error.kind() {
            ErrorKind::Bootstrap { what, arrived, missing } => (what.clone(), arrived.clone(), missing.clone()),
            _ => (format!("{}: {}", stamp.who(), error.brief()), Vec::new(), Vec::new()),
        };
        let shortened = shorten(what, 2048);
        let mut f = Failure {
            id: random(),
            at: wall(),
            rank: stamp.rank,
            host: stamp.host.clone(),
            what: shortened,
            arrived,
            missing,
            versions: Vec::new(),
        };
        // Thousands of ranks do not fit; how many there are says enough then.
        let counts = (f.arrived.len(), f.missing.len());
        if encode(&f).is_err() {
            f.missing.truncate(NAMED);
            if encode(&f).is_err() {
                f.arrived.truncate(NAMED);
            }
            f.what.push_str(&format!(" ({} ranks came, {} did not; not all are listed)", counts.0, counts.1));
        }
        f
    }

    fn set_once(&self, key: &str, value: &[u8]) -> Result<Vec<u8>> {
        self.store.compare_set(key, b"", value).map_err(|e| self.gone(&e, "meeting the other ranks"))
    }

    /// The error when the store does not do what it should.
    fn gone(&self, e: &Error, doing: &str) -> Error {
        let how = match e.kind() {
            ErrorKind::Io { .. } => "went away",
            ErrorKind::Timeout { .. } => "stopped answering",
            _ => return e.clone(),
        };
        bootstrap(format!(
            "{} {how} while {} was {doing} ({:.1?} after it began): {}. Look at the process that hosts it",
            self.store_name,
            self.who(),
            self.began.elapsed(),
            e.brief()
        ))
    }

    fn uncountable(&self, e: Error, key: &str) -> Error {
        if matches!(e.kind(), ErrorKind::InvalidArgument { .. }) {
            let what = format!("the counter '{key}' in {}: {}", self.store_name, e.brief());
            return ErrorKind::Corrupt { rank: None, what }.into();
        }
        self.gone(&e, "counting the ranks")
    }
}

/// The generation of a key that ends with it.
fn number(key: &str) -> i64 {
    key.rsplit_once('/').and_then(|(_, g)| g.parse().ok()).unwrap_or(0)
}

/// At most `bytes` of a text.
fn shorten(mut text: String, bytes: usize) -> String {
    if text.len() > bytes {
        let end = (0..=bytes).rev().find(|i| text.is_char_boundary(*i)).unwrap_or(0);
        text.truncate(end);
        text.push_str("...");
    }
    text
}
