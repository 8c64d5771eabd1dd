//! The rounds of a comparison.

use std::collections::BTreeMap;
use std::path::Path;

use super::limits::{Floor, Floors, floor_of};
use super::options::{Case, Op, Options, Peer, Transport};
use super::ours;
use super::place::{Placement, Probe};
use super::rounds::{Cell, Timed};
use super::side::{Side, Spec};

/// Rounds at most, as a multiple of those that a row needs.
const BOUND: usize = 3;

/// Launches of a peer that may fail, per operation and table.
const PEERS_MAY_FAIL: usize = 3;

/// What a comparison is made with; tests have another one.
pub trait Lab {
    /// Where the cores lie that this many ranks use.
    fn probe(&mut self, world: usize) -> Probe;
    /// Runs one side once.
    ///
    /// # Errors
    ///
    /// What went wrong, in words.
    fn run(&mut self, side: Side, spec: &Spec<'_>) -> Result<Vec<f64>, String>;
    /// The time of a floor in microseconds.
    ///
    /// # Errors
    ///
    /// What went wrong, in words.
    fn floor(&mut self, floor: &Floor) -> Result<f64, String>;
    /// A table begins, which may take this part of what is left of the budget.
    fn begin(&mut self, part: f64);
    /// Whether that is over.
    fn is_over(&mut self) -> bool;
    /// Tells people how far it is.
    fn say(&mut self, text: &str);
}

/// A row as it grows.
#[derive(Clone, Debug)]
pub struct Row {
    /// Operation and size.
    pub case: Case,
    /// Whom ours is compared with.
    pub peer: Peer,
    /// The pairs.
    pub cell: Cell,
}

/// Rows with the same ranks, transport and pinning.
#[derive(Clone, Debug)]
pub struct Table {
    /// Number of ranks.
    pub world: usize,
    /// Between them.
    pub transport: Transport,
    /// One core each, or not.
    pub pinned: bool,
    /// Its rows.
    pub rows: Vec<Row>,
    /// What failed, and why, each time.
    pub failures: BTreeMap<(Side, Op), Vec<String>>,
    /// Whether the budget ended it.
    pub cut: bool,
    /// Rounds that were begun.
    pub rounds: usize,
}

impl Table {
    /// Why this is not tried again: ours must not fail at all; a peer may, as some give wrong results now and then.
    #[must_use]
    pub fn given_up(&self, side: Side, op: Op) -> Option<&str> {
        let failures = self.failures.get(&(side, op))?;
        let most = if side == Side::Ours { 1 } else { PEERS_MAY_FAIL };
        if failures.len() < most { None } else { failures.last().map(String::as_str) }
    }
}

/// Everything that was measured.
#[derive(Clone, Debug, Default)]
pub struct Results {
    /// In the order of the options.
    pub tables: Vec<Table>,
    /// Shortest times of floors, where the cores lay alike before and after.
    pub floors: BTreeMap<Placement, Floors>,
    /// How many probes saw which placement, and the sum of their nanoseconds.
    pub probes: BTreeMap<Placement, (usize, f64)>,
}

impl Results {
    /// All failures, and whose they are.
    pub fn failures(&self) -> impl Iterator<Item = (Side, &str)> {
        self.tables
            .iter()
            .flat_map(|t| t.failures.iter().flat_map(|((side, _), all)| all.iter().map(|text| (*side, text.as_str()))))
    }
}

/// Runs all tables.
pub fn run(o: &Options, lab: &mut dyn Lab) -> Results {
    let mut results = Results::default();
    let mut shapes = Vec::new();
    for world in &o.worlds {
        for transport in &o.transports {
            shapes.extend(o.pins.iter().map(|pinned| (*world, *transport, *pinned)));
        }
    }
    for (i, shape) in shapes.iter().enumerate() {
        // What a table leaves of its share goes to those behind it.
        let part = 1.0 / (shapes.len() - i) as f64;
        lab.begin(part);
        let table = Run { o, lab, results: &mut results, shape: *shape }.table();
        results.tables.push(table);
    }
    results
}

struct Run<'a> {
    o: &'a Options,
    lab: &'a mut dyn Lab,
    results: &'a mut Results,
    shape: (usize, Transport, bool),
}

impl Run<'_> {
    fn table(&mut self) -> Table {
        let (world, transport, pinned) = self.shape;
        let mut rows = Vec::new();
        for op in &self.o.ops {
            for case in self.o.cases(*op, world) {
                rows.extend(self.o.against.iter().map(|peer| Row { case, peer: *peer, cell: Cell::default() }));
            }
        }
        let mut t = Table { world, transport, pinned, rows, failures: BTreeMap::new(), cut: false, rounds: 0 };
        let need = self.o.need(world);
        let name = format!("{world} ranks, {}, {}", transport.name(), if pinned { "pinned" } else { "not pinned" });
        if let Some(why) = ours::missing(transport) {
            self.lab.say(&format!("{name}: {why}; the peers run alone"));
        }
        while t.rounds < need * BOUND && !t.cut {
            let wanted: Vec<(Op, Vec<Peer>)> =
                self.o.ops.iter().map(|op| (*op, lacking(&t, *op, need))).filter(|(_, p)| !p.is_empty()).collect();
            if wanted.is_empty() {
                break;
            }
            if t.rounds.is_multiple_of(3) {
                self.floors(&t);
            }
            for (op, peers) in wanted {
                if self.lab.is_over() {
                    t.cut = true;
                    break;
                }
                self.round(&mut t, op, &peers);
            }
            t.rounds += 1;
            let least = t.rows.iter().map(|r| r.cell.most()).min().unwrap_or(0);
            let dropped: usize = t.rows.iter().map(|r| r.cell.left_out()).sum();
            self.lab
                .say(&format!("{name}: round {}, {least} of {need} pairs in every row, {dropped} left out", t.rounds));
        }
        t
    }

    fn probe(&mut self) -> Probe {
        let probe = self.lab.probe(self.shape.0);
        let (count, ns) = self.results.probes.entry(probe.placement.clone()).or_default();
        *count += 1;
        *ns += probe.ns;
        probe
    }

    /// Ours and the peers one after the other; every second time the other way round, so that nobody is always first.
    fn round(&mut self, t: &mut Table, op: Op, peers: &[Peer]) {
        let cases = self.o.cases(op, t.world);
        let mut sides: Vec<Side> = peers.iter().map(|p| Side::Peer(*p)).collect();
        if ours::missing(t.transport).is_none() {
            sides.insert(0, Side::Ours);
        }
        if t.rounds % 2 == 1 {
            sides.reverse();
        }
        let peers_at: &Path = &self.o.peers;
        let mut timed: BTreeMap<Side, Timed> = BTreeMap::new();
        let mut before = self.probe().placement;
        for side in sides {
            let spec =
                Spec { world: t.world, transport: t.transport, pinned: t.pinned, cases: &cases, peers: peers_at };
            match self.lab.run(side, &spec) {
                Ok(us) => {
                    let after = self.probe().placement;
                    timed.insert(side, Timed { us, before, after: after.clone() });
                    before = after;
                }
                Err(e) => {
                    let e = format!("{}: {e}", op.name());
                    self.lab.say(&format!("FAILED: {e}"));
                    t.failures.entry((side, op)).or_default().push(e);
                    before = self.probe().placement;
                }
            }
        }
        let ours = timed.get(&Side::Ours);
        if ours.is_none() && ours::missing(t.transport).is_none() {
            return;
        }
        for row in t.rows.iter_mut().filter(|r| r.case.op == op && peers.contains(&r.peer)) {
            if let (Some(theirs), Some(case)) =
                (timed.get(&Side::Peer(row.peer)), cases.iter().position(|c| *c == row.case))
            {
                row.cell.add(case, ours, theirs);
            }
        }
    }

    /// The floors of all rows, if the cores stay where they are meanwhile.
    fn floors(&mut self, t: &Table) {
        let mut wanted: Vec<Floor> = t.rows.iter().map(|r| floor_of(&r.case, t.transport, t.world)).collect();
        wanted.push(Floor { transport: t.transport, both: false, bytes: 4 });
        wanted.sort_unstable();
        wanted.dedup();
        let before = self.probe();
        let mut times = Vec::new();
        for floor in wanted {
            match self.lab.floor(&floor) {
                Ok(us) => times.push((floor, us)),
                Err(e) => self.lab.say(&format!("no limit for {} bytes over {}: {e}", floor.bytes, t.transport.name())),
            }
        }
        let after = self.probe();
        if before.placement == after.placement {
            let floors = self.results.floors.entry(after.placement).or_default();
            times.into_iter().for_each(|(floor, us)| floors.add(floor, us));
        }
    }
}

/// The peers for which a row of this operation has too few pairs, and whom, as ours, it has not failed with.
fn lacking(t: &Table, op: Op, need: usize) -> Vec<Peer> {
    if t.given_up(Side::Ours, op).is_some() {
        return Vec::new();
    }
    let lacks = |p: &Peer| {
        t.given_up(Side::Peer(*p), op).is_none()
            && t.rows.iter().any(|r| r.case.op == op && r.peer == *p && r.cell.most() < need)
    };
    Peer::ALL.into_iter().filter(lacks).collect()
}

#[cfg(test)]
mod tests {
    use super::super::place::Distance;
    use super::*;

    /// Times as told; cores that move whenever a probe's number is in `moved`.
    #[derive(Default)]
    struct Fake {
        probes: usize,
        far: Vec<usize>,
        launches: Vec<(Side, Op)>,
        fails: Option<(Side, Op)>,
        fails_once: bool,
        over_after: Option<usize>,
        said: Vec<String>,
        parts: Vec<f64>,
    }

    impl Lab for Fake {
        fn probe(&mut self, _: usize) -> Probe {
            self.probes += 1;
            let d = if self.far.contains(&self.probes) { Distance::Far } else { Distance::Cache };
            Probe { placement: Placement(vec![d]), ns: 50.0 }
        }

        fn run(&mut self, side: Side, spec: &Spec<'_>) -> Result<Vec<f64>, String> {
            let op = spec.cases[0].op;
            self.launches.push((side, op));
            let before = self.launches.iter().filter(|l| **l == (side, op)).count() > 1;
            if self.fails == Some((side, op)) && !(self.fails_once && before) {
                return Err("it broke".into());
            }
            Ok(vec![if side == Side::Ours { 1.0 } else { 3.0 }; spec.cases.len()])
        }

        fn floor(&mut self, _: &Floor) -> Result<f64, String> {
            Ok(0.5)
        }

        fn begin(&mut self, part: f64) {
            self.parts.push(part);
        }

        fn is_over(&mut self) -> bool {
            self.over_after.is_some_and(|n| self.launches.len() >= n)
        }

        fn say(&mut self, text: &str) {
            self.said.push(text.into());
        }
    }

    fn options(line: &str) -> Options {
        Options::parse(&line.split_whitespace().map(str::to_owned).collect::<Vec<_>>()).unwrap()
    }

    fn most(t: &Table) -> Vec<usize> {
        t.rows.iter().map(|r| r.cell.most()).collect()
    }

    const ONE: &str = "--world 2 --transport tcp --pin yes --rounds 3 --sizes 8,64K --ops all_reduce,barrier";

    #[test]
    fn sides_alternate() {
        let mut fake = Fake::default();
        let results = run(&options(ONE), &mut fake);
        let (ours, mpi, gloo) = (Side::Ours, Side::Peer(Peer::OpenMpi), Side::Peer(Peer::Gloo));
        let order: Vec<Side> = fake.launches.iter().filter(|(_, op)| *op == Op::Barrier).map(|(s, _)| *s).collect();
        assert_eq!(order, [ours, mpi, gloo, gloo, mpi, ours, ours, mpi, gloo]);
        assert_eq!(most(&results.tables[0]), [3; 6]);
        assert_eq!(results.floors[&Placement(vec![Distance::Cache])].iter().count(), 4);
        assert_eq!(results.tables[0].rounds, 3);
    }

    #[test]
    fn dropped_pairs_are_repeated_and_only_those() {
        // Probes 1 and 2 are the floors', 3 to 6 those of the first round of all_reduce: gloo's second one differs.
        let mut fake = Fake { far: vec![6], ..Fake::default() };
        let t = run(&options(ONE), &mut fake).tables.remove(0);
        assert_eq!((most(&t), t.rounds), (vec![3; 6], 4));
        let dropped: Vec<usize> = t.rows.iter().map(|r| r.cell.dropped).collect();
        assert_eq!(dropped, [0, 1, 0, 1, 0, 0]);
        let last: Vec<Side> = fake.launches[fake.launches.len() - 2..].iter().map(|(s, _)| *s).collect();
        assert_eq!(last, [Side::Peer(Peer::Gloo), Side::Ours]);
    }

    #[test]
    fn repeating_has_a_bound() {
        let mut fake = Fake { far: (0..1000).step_by(2).collect(), ..Fake::default() };
        let results = run(&options(ONE), &mut fake);
        assert_eq!((most(&results.tables[0]), results.tables[0].rounds), (vec![0; 6], 9));
        assert!(results.floors.is_empty());
    }

    #[test]
    fn what_fails_is_given_up_and_the_rest_goes_on() {
        let gloo = (Side::Peer(Peer::Gloo), Op::AllReduce);
        let mut fake = Fake { fails: Some(gloo), ..Fake::default() };
        let results = run(&options(ONE), &mut fake);
        assert_eq!(most(&results.tables[0]), [3, 0, 3, 0, 3, 3]);
        assert_eq!(results.failures().collect::<Vec<_>>(), [(gloo.0, "all_reduce: it broke"); PEERS_MAY_FAIL]);
        assert_eq!(fake.launches.iter().filter(|l| **l == gloo).count(), PEERS_MAY_FAIL);
        // One failure of a peer costs a round, one of ours the row.
        let mut fake = Fake { fails: Some(gloo), fails_once: true, ..Fake::default() };
        let results = run(&options(ONE), &mut fake);
        assert_eq!((most(&results.tables[0]), results.failures().count()), (vec![3; 6], 1));
        let ours = (Side::Ours, Op::Barrier);
        let mut fake = Fake { fails: Some(ours), fails_once: true, ..Fake::default() };
        assert_eq!(most(&run(&options(ONE), &mut fake).tables[0]), [3, 3, 3, 3, 0, 0]);
        assert_eq!(fake.launches.iter().filter(|l| **l == ours).count(), 1);
    }

    #[test]
    fn the_budget_ends_it() {
        let mut fake = Fake { over_after: Some(7), ..Fake::default() };
        let t = run(&options(ONE), &mut fake).tables.remove(0);
        assert!(t.cut && fake.parts == [1.0]);
        assert_eq!((most(&t), fake.launches.len()), (vec![2, 2, 2, 2, 1, 1], 9));
    }

    #[test]
    fn over_shared_memory_the_peers_run_alone_and_it_is_said() {
        let mut fake = Fake::default();
        let results = run(&options(&ONE.replace("tcp", "shm")), &mut fake);
        assert!(fake.launches.iter().all(|(s, _)| *s != Side::Ours));
        assert!(fake.said.iter().any(|s| s.contains("no shared-memory transport yet")), "{:?}", fake.said);
        assert_eq!(most(&results.tables[0]), [3; 6]);
    }
}
