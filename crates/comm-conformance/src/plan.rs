//! Which cases a world of a size runs: the same on all ranks, computed from the suite's settings.

use comm_core::{Operation, ReduceOp};

use crate::case::{Algo, CALLS, CallCase, Form, Place, Split, has_dynamic, has_root, is_uneven, query, reduces};
use crate::kind::Kind;
use crate::oper::{Oper, is_dynamic, legal};
use crate::pairs::cover;
use crate::scene::Scene;
use crate::table::Table;
use crate::value::{Style, mix};

/// The world sizes that the suite is made for.
pub const WORLDS: [usize; 7] = [1, 2, 3, 4, 5, 7, 8];

/// How much is run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Level {
    /// Every pair of factors in some world: minutes.
    #[default]
    Quick,
    /// Every pair of factors in every world, every legal operation, type and operator at one size, and more long
    /// buffers: tens of minutes.
    Full,
}

/// A case of a plan.
#[derive(Clone, Debug)]
pub(crate) enum Case {
    /// The answers of `supports`, and calls that must be refused.
    Support(Operation),
    /// A call.
    Call(CallCase),
    /// Several calls together.
    Scene(Scene, u64),
}

impl Case {
    /// Under which name it is counted.
    pub(crate) const fn group(&self) -> &'static str {
        match self {
            Self::Support(_) => "(support tables)",
            Self::Call(c) => c.op.name(),
            Self::Scene(..) => "(several calls together)",
        }
    }

    pub(crate) fn describe(&self) -> String {
        match self {
            Self::Support(op) => format!("support of {op}"),
            Self::Call(c) => c.to_string(),
            Self::Scene(s, seed) => format!("{} seed {seed:#x}", s.name()),
        }
    }
}

/// The last is odd too, and longer than what is sent ahead.
const SHORT: [usize; 6] = [0, 1, 3, 77, 1024, 20_011];
const LONG: usize = 1 << 20;
/// Types for long buffers, in turn.
const LONG_TYPES: [(Kind, Oper); 6] = [
    (Kind::F32, Oper::Builtin(ReduceOp::Sum)),
    (Kind::I32, Oper::Builtin(ReduceOp::BXor)),
    (Kind::Bf16, Oper::Builtin(ReduceOp::Max)),
    (Kind::U8, Oper::Builtin(ReduceOp::Sum)),
    (Kind::F64, Oper::Builtin(ReduceOp::Avg)),
    (Kind::F16, Oper::PreMulSum),
];

/// What a plan is made from.
#[derive(Clone, Debug)]
pub(crate) struct Settings {
    pub(crate) table: Table,
    pub(crate) level: Level,
    pub(crate) seed: u64,
    pub(crate) algorithms: Vec<Algo>,
    pub(crate) worlds: Vec<usize>,
    pub(crate) filter: Option<String>,
}

impl Settings {
    /// The cases of a world of `size` ranks.
    pub(crate) fn cases(&self, size: usize) -> Vec<Case> {
        let mut all: Vec<Case> = CALLS.iter().map(|(op, _)| Case::Support(*op)).collect();
        for (op, places) in CALLS {
            let calls = self.pairs(*op, places, size).into_iter().chain(self.long(*op, places, size));
            let calls = calls.chain(self.every_type(*op, places, size));
            all.extend(calls.filter(|c| self.table.unsupported(&c.query()).is_none()).map(Case::Call));
        }
        for scene in Scene::ALL {
            if scene.needs().iter().all(|q| self.table.unsupported(q).is_none()) {
                let times = if self.level == Level::Full { 4 } else { 1 };
                all.extend((0..times).map(|t| Case::Scene(*scene, mix(self.seed ^ t))));
            }
        }
        if let Some(f) = &self.filter {
            all.retain(|c| c.describe().contains(f.as_str()));
        }
        all
    }

    /// The algorithms of an operation; first none in particular.
    fn algos(&self, op: Operation) -> Vec<Option<&Algo>> {
        let named = self.algorithms.iter().filter(|a| a.operation == op).map(Some);
        std::iter::once(None).chain(named).collect()
    }

    fn types(op: Operation) -> Vec<(Kind, Option<Oper>)> {
        if op == Operation::Barrier {
            return vec![(Kind::U8, None)];
        }
        if reduces(op) {
            return legal().into_iter().map(|(k, o)| (k, Some(o))).collect();
        }
        Kind::MOVED.into_iter().map(|k| (k, None)).collect()
    }

    /// Cases in which every pair of two factors' values occurs.
    fn pairs(&self, op: Operation, places: &[Place], size: usize) -> Vec<CallCase> {
        let full = self.level == Level::Full;
        let (types, algos) = (Self::types(op), self.algos(op));
        let counts = if op == Operation::Barrier { &SHORT[..1] } else { &SHORT[..] };
        let styles: &[Style] =
            if reduces(op) { &[Style::Exact, Style::Rounded, Style::Special] } else { &[Style::Exact] };
        let splits: &[Split] =
            if is_uneven(op) { &[Split::Uneven, Split::One, Split::Empty] } else { &[Split::Uneven] };
        // In a quick run the world is one more factor; else each world has every pair.
        let world = self.worlds.iter().position(|w| *w == size).filter(|_| !full);
        let worlds = if world.is_some() { self.worlds.len() } else { 1 };
        let most = if world.is_some() { self.worlds.iter().copied().max().unwrap_or(size) } else { size };
        let roots = if has_root(op) { most } else { 1 };
        let sizes = [
            places.len(),
            Form::ALL.len(),
            types.len(),
            counts.len(),
            roots,
            algos.len(),
            styles.len(),
            splits.len(),
            worlds,
        ];
        let dropping = self.table.unsupported(&query(Operation::Barrier, Kind::U8, None)).is_none();
        let possible = |r: &[Option<usize>]| {
            let (form, kind) = (r[1].map(|f| Form::ALL[f]), r[2].map(|t| types[t]));
            let dynamic = form == Some(Form::Dynamic);
            let placed = r[0].is_none_or(|p| has_dynamic(op, places[p]));
            let typed = kind.is_none_or(|(k, o)| is_dynamic(k, o).is_some());
            let ordered = kind.is_none_or(|(_, o)| o != Some(Oper::Ordered))
                || r[5].is_none_or(|a| algos[a].is_none_or(|a| a.ordered));
            let styled = r[6].is_none_or(|s| kind.is_none_or(|(k, o)| has_style(k, o, styles[s])));
            (!dynamic || placed && typed) && ordered && styled && (form != Some(Form::Dropped) || dropping)
        };
        let key = mix(self.seed ^ mix(op as u64) ^ if world.is_some() { 0 } else { size as u64 });
        let rows = cover(&sizes, key, possible).into_iter().enumerate();
        let here = rows.filter(|(_, r)| world.is_none_or(|w| r[8] == w));
        let case = |(i, r): (usize, Vec<usize>)| CallCase {
            op,
            place: places[r[0]],
            form: Form::ALL[r[1]],
            kind: types[r[2]].0,
            oper: types[r[2]].1,
            style: styles[r[6]],
            count: counts[r[3]],
            split: splits[r[7]],
            root: r[4] % size,
            algo: algos[r[5]].map(|a| a.name.clone()),
            mixed: mix(i as u64) % 4 == 1,
            seed: mix(key ^ (i as u64) << 8 ^ size as u64),
        };
        // To oneself one message after the other: only what is sent ahead.
        let alone = |c: &CallCase| {
            let message = matches!(op, Operation::Send | Operation::Recv) && c.form == Form::Dynamic;
            !message || c.count * c.kind.size() <= 32 << 10
        };
        here.map(case).filter(alone).collect()
    }

    /// Long buffers, with every algorithm.
    fn long(&self, op: Operation, places: &[Place], size: usize) -> Vec<CallCase> {
        let full = self.level == Level::Full;
        if op == Operation::Barrier || !full && size != 4 {
            return Vec::new();
        }
        let key = mix(self.seed ^ mix(op as u64) ^ (size as u64) << 32);
        let mut cases = Vec::new();
        for (a, algo) in self.algos(op).into_iter().enumerate() {
            // In a quick run the places take turns.
            let some = if full { places } else { &places[a % places.len()..][..1] };
            for place in some {
                let i = cases.len() as u64;
                let seed = mix(key ^ i);
                let (kind, oper) = LONG_TYPES[seed as usize % LONG_TYPES.len()];
                let form = [Form::Sync, Form::Async, Form::Scoped][(seed >> 16) as usize % 3];
                cases.push(CallCase {
                    op,
                    place: *place,
                    form,
                    kind,
                    oper: reduces(op).then_some(oper),
                    style: Style::Exact,
                    count: LONG,
                    split: Split::Uneven,
                    root: (seed >> 32) as usize % size,
                    algo: algo.map(|a| a.name.clone()),
                    mixed: false,
                    seed,
                });
            }
        }
        cases
    }

    /// Every legal operation, type and operator at one size.
    fn every_type(&self, op: Operation, places: &[Place], size: usize) -> Vec<CallCase> {
        if self.level != Level::Full || size != 4 {
            return Vec::new();
        }
        let place = |(kind, oper)| {
            places.iter().map(move |place| CallCase {
                op,
                place: *place,
                form: Form::Sync,
                kind,
                oper,
                style: Style::Exact,
                count: 77,
                split: Split::Uneven,
                root: 1,
                algo: None,
                mixed: false,
                seed: mix(kind as u64 ^ mix(op as u64)),
            })
        };
        Self::types(op).into_iter().flat_map(place).collect()
    }
}

/// Whether contributions of this style mean something else than exact ones.
pub(crate) fn has_style(kind: Kind, oper: Option<Oper>, style: Style) -> bool {
    let selects = matches!(oper, Some(Oper::Builtin(ReduceOp::Min | ReduceOp::Max)));
    match style {
        Style::Exact => true,
        Style::Rounded => kind.float().is_some() && !selects,
        Style::Special => matches!(oper, Some(Oper::Builtin(_) | Oper::PreMulSum)) && kind != Kind::Bool,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    fn settings(level: Level) -> Settings {
        let algorithms = ["ring", "direct"].map(|n| Algo::new(Operation::AllReduce, n, n == "direct")).to_vec();
        Settings { table: Table::complete("x"), level, seed: 1, algorithms, worlds: WORLDS.to_vec(), filter: None }
    }

    fn calls(s: &Settings, size: usize) -> Vec<CallCase> {
        let call = |c| if let Case::Call(c) = c { Some(c) } else { None };
        s.cases(size).into_iter().filter_map(call).collect()
    }

    #[test]
    fn a_quick_run_has_every_legal_pair_of_every_reduction_and_every_algorithm_with_every_form() {
        let s = settings(Level::Quick);
        let all: Vec<CallCase> = WORLDS.into_iter().flat_map(|w| calls(&s, w)).collect();
        for op in [Operation::AllReduce, Operation::Exscan, Operation::ReduceScatterV] {
            let there: HashSet<_> = all.iter().filter(|c| c.op == op).map(|c| (c.kind, c.oper)).collect();
            for (k, o) in legal() {
                assert!(there.contains(&(k, Some(o))), "{op} {k:?} {o:?}");
            }
        }
        for form in Form::ALL {
            for algo in [None, Some("ring"), Some("direct")] {
                let fits = |c: &&CallCase| c.op == Operation::AllReduce && c.form == form && c.algo.as_deref() == algo;
                assert!(all.iter().any(|c| fits(&c)), "{form:?} {algo:?}");
            }
        }
        assert!(all.iter().all(|c| c.oper != Some(Oper::Ordered) || c.algo.as_deref() != Some("ring")));
        assert!(all.iter().any(|c| c.count == LONG));
        let dynamic = all.iter().filter(|c| c.form == Form::Dynamic);
        assert!(dynamic.clone().all(|c| has_dynamic(c.op, c.place) && is_dynamic(c.kind, c.oper).is_some()));
        assert!(dynamic.count() > 100);
    }

    #[test]
    fn a_full_run_has_every_root_in_every_world() {
        let s = settings(Level::Full);
        for size in [3, 8] {
            let roots: HashSet<usize> =
                calls(&s, size).iter().filter(|c| c.op == Operation::Scatter).map(|c| c.root).collect();
            assert_eq!(roots.len(), size);
        }
    }

    #[test]
    fn ranks_make_the_same_plan() {
        let s = settings(Level::Quick);
        let text = |s: &Settings| s.cases(5).iter().map(Case::describe).collect::<Vec<_>>();
        assert_eq!(text(&s), text(&s.clone()));
        assert!(text(&s).len() > 200);
    }
}
