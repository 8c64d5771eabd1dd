//! The protocol in random orders of calls, messages, losses and crashes.

use std::collections::VecDeque;

use super::machine::{Agreement, Message, Set};

struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        ((self.0 >> 11) % n as u64) as usize
    }
}

#[derive(Clone, Copy, Debug)]
enum Act {
    Call(usize),
    Deliver(usize, usize),
    /// The second learns that the first is lost.
    Notice(usize, usize),
    Crash(usize),
    Cut(usize, usize),
    Leave(usize),
    Nudge(usize),
}

/// Members with ordered links; a loss is noticed after everything that has still come over the link.
struct World {
    n: usize,
    members: Vec<Agreement>,
    alive: Vec<bool>,
    left: Vec<bool>,
    cut: Vec<Vec<bool>>,
    noticed: Vec<Vec<bool>>,
    links: Vec<Vec<VecDeque<Message>>>,
    waits: Vec<bool>,
    calls: Vec<usize>,
    results: Vec<Vec<Set>>,
    goal: usize,
    time: usize,
    last_loss: usize,
    last_call: Vec<usize>,
    /// Who lived, and had called, when the last one called.
    then: Vec<Vec<usize>>,
}

impl World {
    fn new(n: usize, goal: usize) -> Self {
        Self {
            n,
            members: (0..n).map(|r| Agreement::new(r, n)).collect(),
            alive: vec![true; n],
            left: vec![false; n],
            cut: vec![vec![false; n]; n],
            noticed: vec![vec![false; n]; n],
            links: vec![vec![VecDeque::new(); n]; n],
            waits: vec![false; n],
            calls: vec![0; n],
            results: vec![Vec::new(); n],
            goal,
            time: 0,
            last_loss: 0,
            last_call: vec![0; goal],
            then: vec![Vec::new(); goal],
        }
    }

    fn is_here(&self, r: usize) -> bool {
        self.alive[r] && !self.left[r]
    }

    fn is_done(&self, r: usize) -> bool {
        self.results[r].len() == self.goal || self.members[r].is_out()
    }

    fn acts(&self, crashes: bool, cuts: bool) -> Vec<Act> {
        let mut list = Vec::new();
        for a in 0..self.n {
            if self.is_here(a) {
                if !self.waits[a] && !self.is_done(a) {
                    list.push(Act::Call(a));
                }
                if self.is_done(a) && !self.waits[a] {
                    list.push(Act::Leave(a));
                }
                if crashes {
                    list.push(Act::Crash(a));
                }
            }
            for b in 0..self.n {
                if a == b || !self.is_here(b) {
                    continue;
                }
                if !self.links[a][b].is_empty() {
                    // Messages are more frequent than everything else.
                    list.extend([Act::Deliver(a, b); 4]);
                } else if (!self.is_here(a) || self.cut[a][b]) && !self.noticed[a][b] {
                    list.push(Act::Notice(a, b));
                }
                if cuts && a < b && self.is_here(a) && !self.cut[a][b] {
                    list.push(Act::Cut(a, b));
                }
            }
        }
        list
    }

    fn act(&mut self, act: Act, random: &mut Random) {
        self.time += 1;
        match act {
            Act::Call(r) => {
                let k = self.results[r].len();
                self.waits[r] = true;
                self.calls[r] = k + 1;
                self.last_call[k] = self.time;
                self.then[k] = (0..self.n).filter(|r| self.alive[*r]).collect();
                self.members[r].call();
                self.after(r);
            }
            Act::Deliver(a, b) => {
                let m = self.links[a][b].pop_front().unwrap();
                assert!(m.fits(self.n), "{m:?}");
                self.members[b].receive(a, m);
                self.after(b);
            }
            Act::Notice(a, b) => {
                self.noticed[a][b] = true;
                self.members[b].lose(a);
                self.after(b);
            }
            Act::Crash(r) => {
                self.alive[r] = false;
                self.last_loss = self.time;
                self.links.iter_mut().for_each(|l| l[r].clear());
                for link in &mut self.links[r] {
                    let kept = random.below(link.len() + 1);
                    link.truncate(kept);
                }
            }
            Act::Cut(a, b) => {
                self.last_loss = self.time;
                for (a, b) in [(a, b), (b, a)] {
                    self.cut[a][b] = true;
                    let kept = random.below(self.links[a][b].len() + 1);
                    self.links[a][b].truncate(kept);
                }
            }
            Act::Leave(r) => {
                self.left[r] = true;
                self.members[r].leave();
                self.links.iter_mut().for_each(|l| l[r].clear());
            }
            Act::Nudge(r) => {
                self.members[r].ask_missing();
                self.after(r);
            }
        }
    }

    fn after(&mut self, r: usize) {
        for (to, m) in self.members[r].outgoing() {
            if self.is_here(to) && !self.cut[r][to] && !self.noticed[to][r] {
                self.links[r][to].push_back(m);
            }
        }
        if self.waits[r] {
            // As the endpoint does: looks, and calls again if nothing is there.
            if let Some((number, set)) = self.members[r].take() {
                self.waits[r] = false;
                if set.has(r) {
                    assert_eq!(number as usize, self.results[r].len());
                    self.results[r].push(set);
                }
            } else if self.members[r].is_out() {
                self.waits[r] = false;
            }
        }
    }

    fn run(&mut self, random: &mut Random, mut crashes: usize, mut cuts: usize) {
        loop {
            let wild = self.time < 400;
            let mut list = self.acts(wild && crashes > 0, wild && cuts > 0);
            if list.is_empty() {
                return;
            }
            assert!(self.time < 20_000, "no end");
            if self.time.is_multiple_of(7) {
                list.extend((0..self.n).filter(|r| self.is_here(*r) && self.waits[*r]).map(Act::Nudge));
            }
            let act = list[random.below(list.len())];
            // Crashes are rarer, so that they come in later phases too.
            if matches!(act, Act::Crash(_) | Act::Cut(..)) && random.below(6) != 0 {
                self.time += 1;
                continue;
            }
            crashes -= usize::from(matches!(act, Act::Crash(_)));
            cuts -= usize::from(matches!(act, Act::Cut(..)));
            self.act(act, random);
        }
    }
}

fn ranks(set: &Set) -> Vec<usize> {
    set.iter().collect()
}

#[test]
fn members_that_crash_at_any_point_leave_the_others_with_one_answer() {
    let (mut repeated, mut with_dead) = (0, 0);
    for seed in 1..=6000u64 {
        let mut random = Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
        let n = 2 + random.below(5);
        let crashes = random.below(n);
        let goal = 1 + random.below(3);
        let mut w = World::new(n, goal);
        w.run(&mut random, crashes, 0);
        let what = format!("seed {seed}: {n} members, {crashes} crashes");
        let live: Vec<usize> = (0..n).filter(|r| w.alive[*r]).collect();
        for r in &live {
            assert_eq!(w.results[*r].len(), goal, "{what}: member {r} waits for ever");
        }
        for k in 0..goal {
            // Of the dead, too, that had decided.
            let sets: Vec<&Set> = w.results.iter().filter_map(|l| l.get(k)).collect();
            assert!(sets.windows(2).all(|s| s[0] == s[1]), "{what}: decision {k}: {sets:?}");
            let set = ranks(sets[0]);
            assert!(live.iter().all(|r| set.contains(r)), "{what}: {set:?} lacks some of {live:?}");
            assert!(set.iter().all(|r| w.calls[*r] > k), "{what}: {set:?} has one that never called");
            if w.last_loss < w.last_call[k] {
                assert_eq!(set, live, "{what}: decision {k} after the last crash");
                repeated += 1;
            }
            with_dead += usize::from(set.len() > live.len());
        }
    }
    // The interesting ones occur.
    assert!(repeated > 1000 && with_dead > 1000, "{repeated} {with_dead}");
}

#[test]
fn of_two_members_without_link_the_lower_one_stays_and_the_other_learns_it() {
    let mut out = 0;
    for seed in 1..=3000u64 {
        let mut random = Random(seed.wrapping_mul(0xd1b5_4a32_d192_ed03) | 1);
        let n = 3 + random.below(4);
        let goal = 1 + random.below(3);
        let mut w = World::new(n, goal);
        w.run(&mut random, 0, 1);
        for k in 0..goal {
            let sets: Vec<&Set> = w.results.iter().filter_map(|l| l.get(k)).collect();
            assert!(sets.windows(2).all(|s| s[0] == s[1]), "seed {seed}: decision {k}: {sets:?}");
        }
        let pair = (0..n).flat_map(|a| (a..n).map(move |b| (a, b))).find(|(a, b)| w.cut[*a][*b]);
        for r in 0..n {
            let is_out = w.members[r].is_out();
            assert!(w.results[r].len() == goal || is_out, "seed {seed}: member {r} waits for ever");
            // The lower one goes only if the cut was noticed on one side when the others decided.
            assert!(
                !is_out || pair.is_some_and(|(a, b)| r == a || r == b),
                "seed {seed}: {r} is out, {pair:?} was cut"
            );
            out += usize::from(is_out);
        }
        assert!((0..n).filter(|r| w.members[*r].is_out()).count() <= 1, "seed {seed}");
    }
    assert!(out > 1000, "{out}");
}

/// Cut links and crashes together may leave parts that nothing connects. Each part goes on. One decision may still name
/// members of another part, which were locked on it; one that repeats the decision before, as shrink wants it, does not
/// unless those have the same.
#[test]
fn cuts_and_crashes_together_end_and_do_not_mix() {
    let mut parted = 0;
    for seed in 1..=3000u64 {
        let mut random = Random(seed.wrapping_mul(0xa076_1d64_78bd_642f) | 1);
        let n = 3 + random.below(4);
        let goal = 1 + random.below(3);
        let (crashes, cuts) = (random.below(n - 1), 1 + random.below(3));
        let mut w = World::new(n, goal);
        w.run(&mut random, crashes, cuts);
        let live: Vec<usize> = (0..n).filter(|r| w.alive[*r]).collect();
        for a in &live {
            let is_out = w.members[*a].is_out();
            assert!(w.results[*a].len() == goal || is_out, "seed {seed}: member {a} waits for ever");
            for b in &live {
                for (x, y) in w.results[*a].windows(2).zip(w.results[*b].windows(2)) {
                    let repeated = x[0] == x[1] && y[0] == y[1];
                    let mixed = x[1] != y[1] && x[1].has(*b) && y[1].has(*a);
                    assert!(!repeated || !mixed, "seed {seed}: {a} has {x:?}, {b} has {y:?}");
                    parted += usize::from(repeated && x[1] != y[1]);
                }
            }
        }
    }
    assert!(parted > 100, "{parted}");
}

#[test]
fn who_does_not_come_is_named_and_not_left_out() {
    for n in 2..=6 {
        for late in 0..n {
            let mut w = World::new(n, 1);
            let mut random = Random(n as u64 * 77 + late as u64);
            for r in (0..n).filter(|r| *r != late) {
                w.act(Act::Call(r), &mut random);
            }
            let settle = |w: &mut World, random: &mut Random| {
                while let Some(act) = w.acts(false, false).into_iter().find(|a| matches!(a, Act::Deliver(..))) {
                    w.act(act, random);
                }
            };
            settle(&mut w, &mut random);
            for r in (0..n).filter(|r| *r != late) {
                w.act(Act::Nudge(r), &mut random);
                settle(&mut w, &mut random);
                assert_eq!(ranks(&w.members[r].missing()), [late], "{n} members, {late} late, as {r} sees it");
            }
            assert!(w.results.iter().all(Vec::is_empty));
            w.act(Act::Call(late), &mut random);
            settle(&mut w, &mut random);
            assert!(w.results.iter().all(|l| l == &[Set::all(n)]));
        }
    }
}

#[test]
fn nonsense_changes_nothing() {
    use super::machine::What;
    let n = 4;
    let mut a = Agreement::new(1, n);
    a.call();
    a.outgoing();
    let set = Set::all(n);
    for from in [0, 2, 3, 9] {
        for k in [0, 1, u64::MAX] {
            for what in [
                What::Ask,
                What::Ack { sub: 0 },
                What::Ack { sub: u32::MAX },
                What::Missing(set.clone()),
                What::Propose { sub: 1, set: set.clone() },
            ] {
                let from_other = from != 0 || !matches!(what, What::Propose { .. });
                if from_other {
                    a.receive(from, Message { k, what });
                }
            }
        }
    }
    let out = a.outgoing();
    // Only the coordinator's proposals count.
    assert!(!out.iter().any(|(_, m)| matches!(m.what, What::Ack { .. })), "{out:?}");
    assert!(out.len() < 64 && a.take().is_none() && !a.is_out());
    // Nobody makes it remember without bound, and what it has not taken is not lost.
    for k in 0..100 {
        a.receive(0, Message { k, what: What::Commit(set.clone()) });
    }
    let taken: Vec<u64> = std::iter::from_fn(|| a.take()).map(|(k, _)| k).collect();
    assert_eq!(taken, (0..16).collect::<Vec<_>>());
    assert!(!Message { k: 0, what: What::Commit(Set::none(n)) }.fits(n));
    assert!(!Message { k: 0, what: What::Commit(Set::all(5)) }.fits(n));
    assert!(!Message { k: 0, what: What::Commit(Set::all(65)) }.fits(n));
}
