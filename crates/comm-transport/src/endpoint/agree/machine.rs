//! The protocol by which the members of a group agree on who is still there: a state machine without I/O.
//!
//! It is Paxos with two changes. Members are ordered, and each has one coordinator at a time, the lowest member that it
//! has not lost; as losses are never taken back, its coordinators only go up, and so the coordinator's rank is the ballot.
//! And the quorum is everybody who is not lost, because a group may shrink to one.
//!
//! A *decision* has a number; decision `k` is made by *instance* `k`. A member is, in the instance after its last
//! decision, in one of these states:
//!
//! | state | leaves it by |
//! |---|---|
//! | *idle*: its program has not called | the call: `Report { here }` to its coordinator |
//! | *here*: has called, knows no proposal | `Propose` of its coordinator, answered by `Ack` |
//! | *locked*: has accepted a ballot and its set | a higher ballot (still locked), or `Commit` |
//! | *decided*: `Commit` has come | the call that takes the decision; it is idle in the next instance |
//!
//! A `Report` goes to the coordinator, again when what it says has changed, and to the next coordinator when one is
//! lost. It says whether the member is here, whom it has lost, and what it is locked on. It is a promise too: from then
//! on the member accepts no proposal of a lower coordinator. The coordinator asks everybody once (`Ask`), which shows that those
//! are lost that it had no link to, and makes those who know the decision tell it. Then:
//!
//! 1. It leaves out those that it has lost itself, then those that the others have lost, in the order of the accusers'
//!    ranks; accusations by somebody who is left out do not count. So of two members whose link is cut the lower one stays.
//! 2. When all others have reported, and somebody is locked, it takes over the set of the highest ballot: that may
//!    have been decided. The set may contain the lost coordinator then; the next instance leaves it out.
//! 3. Else, when all others are here, it proposes them. Members that live and do not come are waited for, not left out.
//! 4. When all of the set that are not lost since have acknowledged, that is the decision. If one was lost before that, a set
//!    of its own is proposed anew under the next ballot (the second half of a ballot counts them).
//!
//! *Why two members do not decide differently.* A set is decided when everybody in it has locked it, except those
//! that its coordinator lost. A later coordinator hears from everybody whom it has not lost, itself included. It could
//! miss the locked set only if it had lost every single member that has locked it, that is, if nothing connects the two
//! any more. A member that has moved on to it has lost the earlier coordinator and accepts nothing more from there.
//!
//! *Why it ends.* When nobody is lost any more, all living members have the same coordinator; what it waits for comes from
//! those who live; and each member that has decided answers whatever belongs to an earlier instance with the decision.
//!
//! Who has decided tells those that the set leaves out, as long as it has links to them: they live perhaps, and must learn that
//! they are out before goodbyes tell them that everybody has gone.

use std::collections::{BTreeMap, VecDeque};

use serde::{Deserialize, Serialize};

/// Decisions that are remembered for those who have missed them.
const KEPT: usize = 16;

/// Some of a group's members, a bit each.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Set(Vec<u64>);

impl std::fmt::Debug for Set {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_set().entries(self.iter()).finish()
    }
}

impl Set {
    pub(super) fn none(n: usize) -> Self {
        Self(vec![0; n.div_ceil(64)])
    }

    pub(super) fn all(n: usize) -> Self {
        let mut s = Self::none(n);
        (0..n).for_each(|r| s.add(r));
        s
    }

    pub(super) fn has(&self, r: usize) -> bool {
        self.0.get(r / 64).is_some_and(|w| w >> (r % 64) & 1 == 1)
    }

    pub(super) fn add(&mut self, r: usize) {
        if let Some(w) = self.0.get_mut(r / 64) {
            *w |= 1 << (r % 64);
        }
    }

    pub(super) fn remove(&mut self, r: usize) {
        if let Some(w) = self.0.get_mut(r / 64) {
            *w &= !(1 << (r % 64));
        }
    }

    pub(super) fn join(&mut self, other: &Self) {
        self.0.iter_mut().zip(&other.0).for_each(|(a, b)| *a |= b);
    }

    pub(super) fn without(&self, other: &Self) -> Self {
        Self(self.0.iter().zip(&other.0).map(|(a, b)| a & !b).collect())
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = usize> + '_ {
        let bits = |(i, w): (usize, &u64)| {
            let mut w = *w;
            std::iter::from_fn(move || {
                let b = (w != 0).then(|| w.trailing_zeros() as usize)?;
                w &= w - 1;
                Some(64 * i + b)
            })
        };
        self.0.iter().enumerate().flat_map(bits)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.iter().all(|w| *w == 0)
    }

    /// Whether these are members of a group of `n`.
    fn fits(&self, n: usize) -> bool {
        self.0.len() == n.div_ceil(64) && (n.is_multiple_of(64) || self.0.last().is_none_or(|w| w >> (n % 64) == 0))
    }
}

/// Who proposes, and which of its proposals.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(super) struct Ballot {
    who: u32,
    sub: u32,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Report {
    /// The program has called.
    here: bool,
    /// It has waited for a while and wants to know for whom.
    waits: bool,
    lost: Set,
    locked: Option<(Ballot, Set)>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum What {
    Report(Report),
    Ask,
    Propose {
        sub: u32,
        set: Set,
    },
    Ack {
        sub: u32,
    },
    Commit(Set),
    /// The instance waits for these.
    Missing(Set),
}

/// A message about instance `k`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Message {
    pub(super) k: u64,
    pub(super) what: What,
}

impl Message {
    /// Whether it makes sense in a group of `n`.
    pub(super) fn fits(&self, n: usize) -> bool {
        match &self.what {
            What::Report(r) => r.lost.fits(n) && r.locked.as_ref().is_none_or(|(_, s)| s.fits(n)),
            What::Propose { set, .. } | What::Commit(set) | What::Missing(set) => set.fits(n) && !set.is_empty(),
            What::Ask | What::Ack { .. } => true,
        }
    }
}

struct Proposal {
    set: Set,
    /// Taken over from an earlier coordinator, so it must not be changed.
    adopted: bool,
    acks: Set,
}

/// One member's part in the agreements of its group.
pub(crate) struct Agreement {
    me: usize,
    n: usize,
    /// Members that this one has lost, or that a decision has left out; with itself if that is this one.
    lost: Set,
    /// Decisions made, which is the number of the instance at hand.
    number: u64,
    decisions: VecDeque<Set>,
    /// Decisions that the program has taken, the last of them, and whether it was the same as the one before.
    taken: u64,
    last: Option<(Set, bool)>,
    here: bool,
    /// Somebody is in an instance below this, so that a report is due even if the program has not called.
    wanted: u64,
    reports: BTreeMap<usize, Report>,
    locked: Option<(Ballot, Set)>,
    /// What this member does as coordinator.
    asked: bool,
    sub: u32,
    proposal: Option<Proposal>,
    /// Whom the coordinator waits for, as it has said last.
    missing: Option<Set>,
    /// This rank has left the group: it only tells what it knows.
    left: bool,
    outbox: Vec<(usize, Message)>,
}

impl Agreement {
    pub(in crate::endpoint) fn new(me: usize, n: usize) -> Self {
        Self {
            me,
            n,
            lost: Set::none(n),
            number: 0,
            decisions: VecDeque::new(),
            taken: 0,
            last: None,
            here: false,
            wanted: 0,
            reports: BTreeMap::new(),
            locked: None,
            asked: false,
            sub: 0,
            proposal: None,
            missing: None,
            left: false,
            outbox: Vec::new(),
        }
    }

    /// A decision has left this member out.
    pub(super) fn is_out(&self) -> bool {
        self.lost.has(self.me)
    }

    /// What is to be sent, in order.
    pub(super) fn outgoing(&mut self) -> Vec<(usize, Message)> {
        std::mem::take(&mut self.outbox)
    }

    /// The program calls, unless it has or a decision waits for it.
    pub(super) fn call(&mut self) {
        if self.here || self.left || self.is_out() || self.number > self.taken {
            return;
        }
        self.here = true;
        self.report(false);
        self.step();
    }

    /// The next decision that the program has not taken, and its number.
    pub(super) fn take(&mut self) -> Option<(u64, Set)> {
        let behind = usize::try_from(self.number - self.taken).ok().filter(|b| *b > 0)?;
        let set = self.decisions.get(self.decisions.len().checked_sub(behind)?)?.clone();
        self.taken += 1;
        let repeated = self.last.as_ref().is_some_and(|(s, _)| *s == set);
        self.last = Some((set.clone(), repeated));
        Some((self.taken - 1, set))
    }

    /// The last decision that the program has taken, its number, and whether it repeats the one before.
    pub(super) fn last(&self) -> Option<(u64, &Set, bool)> {
        self.last.as_ref().map(|(set, repeated)| (self.taken - 1, set, *repeated))
    }

    /// The program has waited for a while: asks for whom.
    pub(super) fn ask_missing(&mut self) {
        self.report(true);
    }

    /// Whom this member waits for, as far as it knows.
    pub(super) fn missing(&self) -> Set {
        let c = self.coordinator();
        if c != self.me {
            let mut unknown = Set::none(self.n);
            unknown.add(c);
            return self.missing.clone().unwrap_or(unknown);
        }
        let rest = Set::all(self.n).without(&self.left_out());
        let mut absent = Set::none(self.n);
        for r in rest.iter() {
            let here = if r == self.me { self.here } else { self.reports.get(&r).is_some_and(|x| x.here) };
            if !here {
                absent.add(r);
            }
        }
        match &self.proposal {
            Some(p) if absent.is_empty() => p.set.without(&p.acks).without(&self.left_out()),
            _ => absent,
        }
    }

    /// This rank leaves the group.
    pub(in crate::endpoint) fn leave(&mut self) {
        self.left = true;
    }

    /// A member is lost.
    pub(super) fn lose(&mut self, r: usize) {
        if r >= self.n || r == self.me || self.lost.has(r) {
            return;
        }
        let before = self.coordinator();
        self.lost.add(r);
        self.reports.remove(&r);
        if self.is_out() || self.left {
            return;
        }
        if self.coordinator() == before {
            if self.here {
                self.report(false);
            }
        } else {
            self.missing = None;
            if self.is_engaged() {
                self.report(false);
            }
        }
        self.step();
    }

    /// A message has come; [`Message::fits`] was asked.
    pub(super) fn receive(&mut self, from: usize, m: Message) {
        if from >= self.n || from == self.me {
            return;
        }
        let k = m.k;
        if k < self.number {
            let ago = usize::try_from(self.number - k).unwrap_or(usize::MAX);
            if matches!(m.what, What::Report(_) | What::Ask | What::Propose { .. })
                && let Some(set) = self.decisions.len().checked_sub(ago).and_then(|i| self.decisions.get(i)).cloned()
            {
                self.outbox.push((from, Message { k, what: What::Commit(set) }));
            }
            return;
        }
        if self.left || self.is_out() || (self.lost.has(from) && !matches!(m.what, What::Commit(_))) {
            return;
        }
        if k > self.number {
            // It has decisions that this member lacks. The report makes it tell.
            self.wanted = self.wanted.max(k.saturating_add(1));
            let report = self.own_report(false);
            self.send(from, What::Report(report));
            return;
        }
        match m.what {
            What::Ask => {
                // Also when it comes from another than the coordinator: then the coordinator is perhaps lost, and sending
                // shows it.
                self.wanted = self.wanted.max(k.saturating_add(1));
                self.report(false);
            }
            What::Report(r) => {
                let waits = r.waits;
                self.reports.insert(from, r);
                self.step();
                if waits && k == self.number {
                    let mut missing = self.missing();
                    missing.remove(from);
                    if !missing.is_empty() {
                        self.send(from, What::Missing(missing));
                    }
                }
            }
            What::Propose { sub, set } => {
                let ballot = Ballot { who: from as u32, sub };
                if from == self.coordinator() && self.locked.as_ref().is_none_or(|(b, _)| *b < ballot) {
                    self.locked = Some((ballot, set));
                    self.send(from, What::Ack { sub });
                }
            }
            What::Ack { sub } => {
                if sub == self.sub
                    && let Some(p) = &mut self.proposal
                {
                    p.acks.add(from);
                    self.step();
                }
            }
            What::Commit(set) => {
                // What the program has not taken is bounded by what is remembered.
                if self.number - self.taken < KEPT as u64 {
                    self.decide(set, Some(from));
                }
            }
            What::Missing(set) => {
                if from == self.coordinator() {
                    self.missing = Some(set);
                }
            }
        }
    }

    /// The lowest member that is not lost.
    fn coordinator(&self) -> usize {
        (0..self.n).find(|r| !self.lost.has(*r)).unwrap_or(self.me)
    }

    /// Whether an instance is under way, as far as this member knows.
    fn is_engaged(&self) -> bool {
        self.here || self.locked.is_some() || self.wanted > self.number || !self.reports.is_empty()
    }

    fn send(&mut self, to: usize, what: What) {
        self.outbox.push((to, Message { k: self.number, what }));
    }

    /// Sends to those of a set who are not lost, this member and `but`.
    fn tell(&mut self, to: &Set, but: Option<usize>, what: &What) {
        for r in to.without(&self.lost).iter() {
            if r != self.me && Some(r) != but {
                self.send(r, what.clone());
            }
        }
    }

    fn own_report(&self, waits: bool) -> Report {
        Report { here: self.here, waits, lost: self.lost.clone(), locked: self.locked.clone() }
    }

    /// Tells the coordinator how things are here.
    fn report(&mut self, waits: bool) {
        let c = self.coordinator();
        if c != self.me && !self.left && !self.is_out() {
            let report = self.own_report(waits);
            self.send(c, What::Report(report));
        }
    }

    /// Those who will not be in the set: lost to this member, or to others, in the order of ranks.
    fn left_out(&self) -> Set {
        let mut out = self.lost.clone();
        for (r, report) in &self.reports {
            if !out.has(*r) {
                out.join(&report.lost);
            }
        }
        out.remove(self.me);
        out
    }

    /// What the coordinator can do now.
    fn step(&mut self) {
        let full = self.number - self.taken >= KEPT as u64;
        if self.left || full || self.is_out() || self.coordinator() != self.me || !self.is_engaged() {
            return;
        }
        if !self.asked {
            self.asked = true;
            self.tell(&Set::all(self.n), None, &What::Ask);
        }
        let out = self.left_out();
        let mut rest = Set::all(self.n).without(&out);
        if self.proposal.as_ref().is_some_and(|p| !p.adopted && p.set != rest) {
            self.proposal = None;
        }
        if self.proposal.is_none() {
            let others = || rest.iter().filter(|r| *r != self.me);
            if !others().all(|r| self.reports.contains_key(&r)) {
                return;
            }
            // Own proposals are not taken over: their coordinator knows that they were not decided.
            let locks = self.reports.values().filter_map(|r| r.locked.as_ref()).chain(&self.locked);
            let highest =
                locks.filter(|(b, _)| b.who != self.me as u32).max_by_key(|(b, _)| *b).map(|(_, s)| s.clone());
            let adopted = highest.is_some();
            if let Some(set) = highest {
                rest = set;
            } else if !self.here || !others().all(|r| self.reports.get(&r).is_some_and(|x| x.here)) {
                return;
            }
            self.sub = self.sub.saturating_add(1);
            self.locked = Some((Ballot { who: self.me as u32, sub: self.sub }, rest.clone()));
            self.tell(&rest, None, &What::Propose { sub: self.sub, set: rest.clone() });
            let mut acks = Set::none(self.n);
            acks.add(self.me);
            self.proposal = Some(Proposal { set: rest, adopted, acks });
        }
        if let Some(p) = &self.proposal
            && p.set.without(&p.acks).without(&out).is_empty()
        {
            let set = p.set.clone();
            self.decide(set, None);
        }
    }

    fn decide(&mut self, set: Set, from: Option<usize>) {
        let left_out = Set::all(self.n).without(&set);
        // Those left out may lack the decision before, too, but not more: they were here for it.
        if let (Some(last), Some(k)) = (self.decisions.back().cloned(), self.number.checked_sub(1)) {
            for r in left_out.without(&self.lost).iter().filter(|r| *r != self.me) {
                self.outbox.push((r, Message { k, what: What::Commit(last.clone()) }));
            }
        }
        let mut to = if self.coordinator() == self.me { Set::all(self.n) } else { left_out.clone() };
        self.reports.keys().for_each(|r| to.add(*r));
        self.tell(&to, from, &What::Commit(set.clone()));
        self.lost.join(&left_out);
        self.number += 1;
        if self.decisions.len() == KEPT {
            self.decisions.pop_front();
        }
        self.decisions.push_back(set);
        self.here = false;
        self.reports.clear();
        self.locked = None;
        self.asked = false;
        self.sub = 0;
        self.proposal = None;
        self.missing = None;
        if self.wanted > self.number {
            self.report(false);
            self.step();
        }
    }
}
