//! Making a connection to one peer: its addresses in turn, over and over, until one works or time is up.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use collectives::Refusal;
use comm_core::Secret;
use comm_store::auth;

use super::stream::Stream;
use super::{Member, Peer, Setup};
use crate::wire::{CONFIRM, GREETING, Greeting, Outcome, PROBE};

/// After this time without result the next address is tried beside.
const STAGGER: Duration = Duration::from_millis(250);
/// Time that an address gets to take the connection.
const CONNECT: Duration = Duration::from_secs(3);
/// Time that who has taken it gets for each message.
const ANSWER: Duration = Duration::from_secs(5);
/// How long a peer may take to make the connection that it prefers to ours.
const YIELD: Duration = Duration::from_secs(1);
/// Longest pause between two rounds over the addresses.
const PAUSE: Duration = Duration::from_millis(500);
/// The same where a peer that has refused may be about to come.
const SHORT_PAUSE: Duration = Duration::from_millis(80);

/// One connection being made.
struct Attempt {
    number: u32,
    addr: SocketAddr,
    stream: Stream,
    until: Instant,
    step: Step,
}

enum Step {
    Connecting,
    Challenge(auth::Initiator),
    Answer,
}

/// Why an attempt has failed.
struct Failed {
    why: String,
    /// It will not get better.
    hopeless: bool,
    /// The process has ended.
    ended: bool,
}

impl From<String> for Failed {
    fn from(why: String) -> Self {
        Self { why, hopeless: false, ended: false }
    }
}

/// What the peer has answered.
enum Answer {
    Of(Outcome),
    Refused(Refusal),
}

/// What has come of a dial.
pub(super) enum Progress {
    /// Nothing yet.
    Going,
    /// The peer accepts this connection; it wants a confirmation.
    Accepted(Stream),
    /// The peer says why it will not come.
    Refused(Refusal),
    /// The peer will not be reached; perhaps because its process has `ended`.
    Failed { why: String, ended: bool },
}

/// Who dials, for all dials of a world.
pub(super) struct Caller<'a> {
    pub(super) me: Greeting,
    pub(super) secret: Option<&'a Secret>,
    pub(super) attempts: &'a mut u32,
    /// Of the dynamic regime.
    members: &'a [Member],
    /// Longest pause between two rounds over the addresses.
    pause: Duration,
}

impl<'a> Caller<'a> {
    pub(super) fn of(setup: &'a Setup, attempts: &'a mut u32) -> Self {
        let pause = if setup.is_patient() { SHORT_PAUSE } else { PAUSE };
        let members = setup.members.as_ref().map_or(&[][..], |m| &m.list);
        Self { me: setup.me, secret: setup.secret.as_ref(), attempts, members, pause }
    }

    fn greeting(&self, peer: usize, code: u32) -> [u8; GREETING] {
        let whom = self.members.get(peer).map_or(0, |m| m.token);
        Greeting { to: peer as u32, code, whom, ..self.me }.encode()
    }

    /// What the peer says of itself, if this is an answer of the peer that will not come.
    fn refusal(&self, peer: usize, answer: &Greeting) -> Option<Refusal> {
        let from_it = self.members.get(peer).is_some_and(|m| m.number == answer.who) && answer.to == self.me.from;
        match Outcome::of(answer.code).filter(|_| from_it)? {
            Outcome::Stale => Some(Refusal::Stale { now: answer.generation }),
            Outcome::Finalized => Some(Refusal::Finalized),
            Outcome::Differs => Some(Refusal::Differs),
            Outcome::Accepted | Outcome::Busy | Outcome::Linked | Outcome::Alive => None,
        }
    }
}

pub(super) struct Dial {
    peer: usize,
    to: Peer,
    until: Instant,
    next: usize,
    attempts: Vec<Attempt>,
    last_start: Instant,
    rounds: u32,
    /// Everything that has failed in this round has failed for good.
    hopeless: bool,
    /// Everything that has failed in this round has failed because the process has ended.
    ended: bool,
    /// Only a sign of life is wanted.
    probes: bool,
    pause: Option<Instant>,
    /// What has failed in this round.
    failures: Vec<String>,
    /// What went wrong in the last.
    trouble: String,
}

impl Dial {
    pub(super) fn new(peer: usize, to: Peer, until: Instant) -> Self {
        let trouble = if to.addrs.is_empty() { "it has published no address".into() } else { String::new() };
        Self {
            peer,
            to,
            until,
            next: 0,
            attempts: Vec::new(),
            last_start: Instant::now(),
            rounds: 0,
            hopeless: true,
            ended: true,
            probes: false,
            pause: None,
            failures: Vec::new(),
            trouble,
        }
    }

    /// Asks whether the peer lives, on a connection that both ends close then.
    pub(super) fn probe(peer: usize, to: Peer, until: Instant) -> Self {
        Self { probes: true, ..Self::new(peer, to, until) }
    }

    /// Whether the peer's own connection has to wait for this one. Not once all addresses have failed: perhaps only the
    /// peer can reach this rank.
    pub(super) const fn contends(&self) -> bool {
        self.rounds == 0
    }

    /// Leaves the field to a connection of the peer's for a while.
    pub(super) fn give_way(&mut self) {
        self.attempts.clear();
        self.next = 0;
        self.pause = Some(Instant::now() + YIELD);
    }

    /// What to poll: descriptor, number of the attempt, and whether it waits to become writable.
    pub(super) fn sockets(&self) -> impl Iterator<Item = (&Stream, u32, bool)> {
        self.attempts.iter().map(|a| (&a.stream, a.number, matches!(a.step, Step::Connecting)))
    }

    /// When [`tick`](Self::tick) has something to do.
    pub(super) fn timer(&self) -> Instant {
        if let Some(p) = self.pause {
            return p.min(self.until);
        }
        let speaking = self.attempts.iter().any(|a| !matches!(a.step, Step::Connecting));
        let stagger = (!speaking && self.next < self.to.addrs.len()).then(|| self.last_start + STAGGER);
        self.attempts.iter().map(|a| a.until).chain(stagger).fold(self.until, Instant::min)
    }

    /// Looks at the time: gives up on attempts, starts others.
    pub(super) fn tick(&mut self, caller: &mut Caller<'_>) -> Progress {
        let now = Instant::now();
        if now >= self.until {
            let why = format!("{}; check firewalls and interfaces", self.trouble());
            return Progress::Failed { why, ended: false };
        }
        if self.pause.is_some_and(|p| now < p) {
            return Progress::Going;
        }
        self.pause = None;
        while let Some(i) = self.attempts.iter().position(|a| a.until <= now) {
            let a = self.attempts.remove(i);
            let why = if matches!(a.step, Step::Connecting) { "no connection" } else { "no answer" };
            self.failed(a.addr, format!("{why} in time").into());
        }
        if self.attempts.iter().any(|a| !matches!(a.step, Step::Connecting)) {
            return Progress::Going;
        }
        while self.next < self.to.addrs.len() && (self.attempts.is_empty() || now >= self.last_start + STAGGER) {
            let addr = self.to.addrs[self.next];
            self.next += 1;
            self.last_start = now;
            *caller.attempts += 1;
            match Stream::connect(addr) {
                Ok(stream) => {
                    let until = now + CONNECT;
                    let step = Step::Connecting;
                    self.attempts.push(Attempt { number: *caller.attempts, addr, stream, until, step });
                }
                Err(e) => self.failed(addr, self.judge(&e)),
            }
        }
        if !self.attempts.is_empty() {
            return Progress::Going;
        }
        // The round is over.
        self.rounds += 1;
        if !self.failures.is_empty() {
            self.trouble = summary(&self.failures);
            self.failures.clear();
        }
        if self.rounds >= 2 && self.hopeless {
            return Progress::Failed { why: self.trouble(), ended: self.ended };
        }
        self.hopeless = !self.to.addrs.is_empty();
        self.ended = self.hopeless;
        self.next = 0;
        self.pause = Some(now + (Duration::from_millis(10) * 2u32.pow(self.rounds.min(6))).min(caller.pause));
        Progress::Going
    }

    /// What is going wrong.
    pub(super) fn trouble(&self) -> String {
        match (self.trouble.as_str(), self.failures.as_slice()) {
            ("", []) => "no answer".into(),
            ("", failures) => summary(failures),
            (trouble, _) => trouble.into(),
        }
    }

    /// A listener on this host that refuses is closed, and its process gone; elsewhere a firewall may have refused.
    fn judge(&self, e: &std::io::Error) -> Failed {
        let hopeless = self.to.same_host && e.kind() == std::io::ErrorKind::ConnectionRefused;
        let why = if hopeless { format!("{e}: its process has ended, or given up") } else { e.to_string() };
        Failed { why, hopeless, ended: hopeless }
    }

    fn failed(&mut self, addr: SocketAddr, f: Failed) {
        tracing::debug!(peer = self.peer, %addr, why = f.why, "a connection could not be made");
        self.hopeless &= f.hopeless;
        self.ended &= f.ended;
        self.failures.push(format!("{addr}: {}", f.why));
    }

    /// Carries on with an attempt whose socket is ready.
    pub(super) fn ready(&mut self, number: u32, caller: &Caller<'_>) -> Progress {
        let Some(i) = self.attempts.iter().position(|a| a.number == number) else { return Progress::Going };
        match self.advance(i, caller) {
            Ok(None) => Progress::Going,
            Ok(Some(Answer::Refused(refusal))) => {
                let mut a = self.attempts.swap_remove(i);
                // A peer that makes the same attempt fails as well, if this rank has not gone meanwhile.
                if let (Refusal::Differs, Err(why)) = (refusal, a.stream.write(&[CONFIRM])) {
                    tracing::debug!(peer = self.peer, why, "a rank with other handles does not wait for an answer");
                }
                self.attempts.clear();
                Progress::Refused(refusal)
            }
            Ok(Some(Answer::Of(Outcome::Accepted | Outcome::Alive))) => {
                let a = self.attempts.swap_remove(i);
                self.attempts.clear();
                // Should the connection not be taken after all, the round goes on.
                Progress::Accepted(a.stream)
            }
            Ok(Some(Answer::Of(o))) => {
                let text = if o == Outcome::Busy { "it makes the connection itself" } else { "it is connected" };
                self.trouble = format!("{}: {text}, yet that connection has not come", self.attempts[i].addr);
                self.give_way();
                Progress::Going
            }
            Err(f) => {
                let a = self.attempts.remove(i);
                self.failed(a.addr, f);
                Progress::Going
            }
        }
    }

    fn advance(&mut self, i: usize, caller: &Caller<'_>) -> Result<Option<Answer>, Failed> {
        let now = Instant::now();
        if matches!(self.attempts[i].step, Step::Connecting) {
            self.attempts[i].stream.connected().map_err(|e| self.judge(&e))?;
            // Only one speaks at a time: the peer could not know which of two is meant.
            let number = self.attempts[i].number;
            let code = if self.probes { PROBE } else { number };
            self.attempts.retain(|a| a.number == number);
            let a = &mut self.attempts[0];
            a.until = now + ANSWER;
            if let Some(secret) = caller.secret {
                let (initiator, hello) = auth::Initiator::new(secret, auth::DATA).map_err(|e| e.brief())?;
                a.stream.write(&hello)?;
                a.step = Step::Challenge(initiator);
            } else {
                a.stream.write(&caller.greeting(self.peer, code))?;
                a.step = Step::Answer;
            }
            return Ok(None);
        }
        let a = &mut self.attempts[i];
        if let Step::Challenge(initiator) = &a.step {
            let challenge = a
                .stream
                .read::<{ auth::CHALLENGE }>()
                .map_err(|e| format!("{e} instead of proving that it knows the secret (RUSTCOMMS_SECRET)"))?;
            let Some(challenge) = challenge else { return Ok(None) };
            let Some(proof) = initiator.answer(&challenge) else {
                let why = "what listens there does not know this rank's secret: RUSTCOMMS_SECRET must be the same on \
                           all ranks";
                return Err(Failed { why: why.into(), hopeless: true, ended: false });
            };
            let mut both = [0; auth::PROOF + GREETING];
            both[..auth::PROOF].copy_from_slice(&proof);
            let code = if self.probes { PROBE } else { a.number };
            both[auth::PROOF..].copy_from_slice(&caller.greeting(self.peer, code));
            a.stream.write(&both)?;
            a.step = Step::Answer;
            a.until = now + ANSWER;
            return Ok(None);
        }
        let Some(bytes) = a.stream.read::<GREETING>()? else { return Ok(None) };
        let answer = Greeting::decode(&bytes)?;
        let me = &caller.me;
        if let Some(refusal) = caller.refusal(self.peer, &answer).filter(|_| !self.probes) {
            return Ok(Some(Answer::Refused(refusal)));
        }
        if (answer.key, answer.nonce) != (me.key, me.nonce) || (answer.from as usize, answer.to) != (self.peer, me.from)
        {
            return Err("another process answers there".to_owned().into());
        }
        match Outcome::of(answer.code) {
            Some(o) if (o == Outcome::Alive) == self.probes => Ok(Some(Answer::Of(o))),
            _ => Err(format!("it answers with the unknown code {}", answer.code).into()),
        }
    }
}

/// The failures of one round over the addresses.
fn summary(failures: &[String]) -> String {
    const SHOWN: usize = 6;
    let more = failures.len().saturating_sub(SHOWN);
    let text = failures[..failures.len() - more].join("; ");
    if more == 0 { text } else { format!("{text}; and {more} more") }
}
