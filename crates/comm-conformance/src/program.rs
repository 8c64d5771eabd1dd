//! Random programs, the same on all ranks: what a world does while something happens to it.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use comm_core::{Communicator, Error, OpQuery, Operation, panic_text};

use crate::case::{Algo, CALLS, CallCase, Form, Split, has_dynamic, has_root, reduces};
use crate::exec::{self, Ctx};
use crate::kind::Kind;
use crate::oper::{Oper, is_dynamic, legal};
use crate::plan::has_style;
use crate::scene::Scene;
use crate::table::Table;
use crate::value::{Style, mix};

/// A sequence of calls in which operation, type, operator, form, lengths, roots and algorithms are drawn from a seed.
///
/// Every rank of a communicator that makes the program from the same seed has the same. What the calls leave in memory is
/// compared with results that are worked out independently, as in the [`Suite`](crate::Suite); but when a call fails,
/// the program ends there, and the error is the result.
#[derive(Clone, Debug)]
pub struct Program {
    steps: Vec<Step>,
}

#[derive(Clone, Debug)]
enum Step {
    Call(CallCase),
    Scene(Scene, u64),
}

/// From what programs are drawn.
#[derive(Clone, Debug)]
pub struct Vocabulary {
    table: Table,
    algorithms: Vec<Algo>,
    virtual_time: bool,
    longest: usize,
}

impl Vocabulary {
    /// All calls that a backend of which this is expected has.
    #[must_use]
    pub const fn new(table: Table) -> Self {
        Self { table, algorithms: Vec::new(), virtual_time: false, longest: 20_011 }
    }

    /// Algorithms to force now and then, by the call's hint `algo`.
    #[must_use]
    pub fn algorithms(mut self, algorithms: impl IntoIterator<Item = Algo>) -> Self {
        self.algorithms = algorithms.into_iter().collect();
        self
    }

    /// Only what waits through the communicator's clock: no executor or thread of its own, which a simulator could not
    /// see waiting.
    #[must_use]
    pub const fn virtual_time(mut self) -> Self {
        self.virtual_time = true;
        self
    }

    /// The longest contribution or block, in elements. Default 20,011.
    #[must_use]
    pub const fn longest(mut self, elements: usize) -> Self {
        self.longest = elements;
        self
    }

    fn has(&self, q: &OpQuery) -> bool {
        self.table.unsupported(q).is_none()
    }

    fn scenes(&self) -> impl Iterator<Item = Scene> + '_ {
        let real = |s: &Scene| matches!(s, Scene::Futures | Scene::Threads);
        Scene::ALL
            .iter()
            .copied()
            .filter(move |s| !(s.fails() || self.virtual_time && real(s)) && s.needs().iter().all(|q| self.has(q)))
    }

    fn forms(&self) -> Vec<Form> {
        let real = |f: &Form| matches!(f, Form::Future | Form::Dropped);
        Form::ALL.into_iter().filter(|f| !(self.virtual_time && real(f))).collect()
    }
}

/// How a rank's part of a program ended.
#[derive(Clone, Debug, Default)]
pub struct Played {
    /// Steps that went through.
    pub done: usize,
    /// What was wrong in memory after calls that went well, and calls that panicked.
    pub wrong: Vec<String>,
    /// The call that failed, and how. The program ended there.
    pub failed: Option<(String, Error)>,
}

/// Draws from a seed.
struct Draw(u64);

impl Draw {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(1);
        mix(self.0)
    }

    fn below(&mut self, n: usize) -> usize {
        (self.next() % n.max(1) as u64) as usize
    }

    fn one<T: Clone>(&mut self, of: &[T]) -> Option<T> {
        (!of.is_empty()).then(|| of[self.below(of.len())].clone())
    }

    fn chance(&mut self, percent: usize) -> bool {
        self.below(100) < percent
    }
}

impl Program {
    /// A program of `steps` steps for `size` ranks.
    #[must_use]
    pub fn random(seed: u64, size: usize, steps: usize, from: &Vocabulary) -> Self {
        let mut draw = Draw(mix(seed ^ mix(size as u64)));
        let scenes: Vec<Scene> = from.scenes().collect();
        let step = |_| loop {
            if draw.chance(12)
                && let Some(scene) = draw.one(&scenes)
            {
                break Step::Scene(scene, draw.next());
            }
            if let Some(call) = random_call(&mut draw, size, from) {
                break Step::Call(call);
            }
        };
        Self { steps: (0..steps).map(step).collect() }
    }

    /// Its first steps, as far as there are so many.
    #[must_use]
    pub fn first(mut self, steps: usize) -> Self {
        self.steps.truncate(steps);
        self
    }

    /// The number of steps.
    #[must_use]
    pub fn len(&self) -> usize {
        self.steps.len()
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.steps.is_empty()
    }

    /// Each step in words.
    #[must_use]
    pub fn describe(&self) -> Vec<String> {
        self.steps.iter().map(Step::describe).collect()
    }

    /// Plays this rank's part. Collective: all ranks of the communicator play the same program, each call with `timeout`.
    #[must_use]
    pub fn play(&self, comm: &Communicator, timeout: Duration) -> Played {
        let mut played = Played::default();
        for step in &self.steps {
            match catch_unwind(AssertUnwindSafe(|| step.run(comm, timeout))) {
                Ok(Ok(wrong)) => {
                    played.wrong.extend(wrong.into_iter().map(|w| format!("{}: {w}", step.describe())));
                    played.done += 1;
                }
                Ok(Err(e)) => {
                    played.failed = Some((step.describe(), e));
                    break;
                }
                Err(panic) => {
                    let what = format!("{}: panicked: {}", step.describe(), panic_text(panic.as_ref()));
                    comm.abort(&what);
                    played.wrong.push(what);
                    break;
                }
            }
        }
        played
    }
}

impl Step {
    fn describe(&self) -> String {
        match self {
            Self::Call(c) => c.to_string(),
            Self::Scene(s, seed) => format!("{} seed {seed:#x}", s.name()),
        }
    }

    fn run(&self, comm: &Communicator, timeout: Duration) -> Result<Vec<String>, Error> {
        match self {
            Self::Call(c) => exec::run(&Ctx::new(comm, &c.of_rank(comm.rank()), timeout)).map(|seen| seen.complaints),
            Self::Scene(s, seed) => s.run(comm, *seed, timeout),
        }
    }
}

/// A call; `None` when what was drawn does not go together.
fn random_call(draw: &mut Draw, size: usize, from: &Vocabulary) -> Option<CallCase> {
    let (op, places) = draw.one(CALLS)?;
    let (kind, oper) = if op == Operation::Barrier {
        (Kind::U8, None)
    } else if reduces(op) {
        let (k, o) = draw.one(&legal())?;
        (k, Some(o))
    } else {
        (draw.one(&Kind::MOVED)?, None)
    };
    let named: Vec<&Algo> = from.algorithms.iter().filter(|a| a.operation == op).collect();
    let algo = if draw.chance(50) { draw.one(&named) } else { None };
    let case = CallCase {
        op,
        place: draw.one(places)?,
        form: draw.one(&from.forms())?,
        kind,
        oper,
        style: draw.one(&[Style::Exact, Style::Exact, Style::Rounded, Style::Special])?,
        count: draw.one(&[0, 1, 3, 77, 1024, draw_length(from.longest, size)])?,
        split: draw.one(&[Split::Uneven, Split::Uneven, Split::One, Split::Empty])?,
        root: if has_root(op) { draw.below(size) } else { 0 },
        algo: algo.map(|a| a.name.clone()),
        // Neighbours would take forms that wait in real time.
        mixed: !from.virtual_time && draw.chance(25),
        seed: draw.next(),
    };
    let dynamic = case.form != Form::Dynamic || has_dynamic(op, case.place) && is_dynamic(kind, oper).is_some();
    let ordered = oper != Some(Oper::Ordered) || algo.is_none_or(|a| a.ordered);
    let styled = reduces(op) && has_style(kind, oper, case.style) || case.style == Style::Exact;
    // To oneself one message after the other: only what is sent ahead.
    let message = matches!(op, Operation::Send | Operation::Recv) && case.form == Form::Dynamic;
    let ahead = !message || case.count * kind.size() <= 32 << 10;
    (dynamic && ordered && styled && ahead && from.has(&case.query())).then_some(case)
}

/// Lengths that are neither round nor the same in all worlds.
const fn draw_length(longest: usize, size: usize) -> usize {
    longest.saturating_sub(size)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn programs_are_the_same_for_a_seed_and_have_everything_over_many() {
        let from = Vocabulary::new(Table::complete("x"));
        let text = |seed| Program::random(seed, 4, 20, &from).describe();
        assert_eq!(text(7), text(7));
        assert_ne!(text(7), text(8));
        let all: Vec<Step> = (0..200).flat_map(|s| Program::random(s, 4, 20, &from).steps).collect();
        let ops: BTreeSet<Operation> =
            all.iter().filter_map(|s| if let Step::Call(c) = s { Some(c.op) } else { None }).collect();
        assert_eq!(ops.len(), CALLS.len());
        let scenes: BTreeSet<&str> =
            all.iter().filter_map(|s| if let Step::Scene(s, _) = s { Some(s.name()) } else { None }).collect();
        assert_eq!(scenes.len(), Scene::ALL.iter().filter(|s| !s.fails()).count());
    }

    #[test]
    fn virtual_time_has_nothing_that_waits_on_its_own() {
        let from = Vocabulary::new(Table::complete("x")).virtual_time();
        for seed in 0..200 {
            for step in Program::random(seed, 3, 20, &from).steps {
                match step {
                    Step::Call(c) => assert!(!matches!(c.form, Form::Future | Form::Dropped) && !c.mixed, "{c}"),
                    Step::Scene(s, _) => assert!(!matches!(s, Scene::Futures | Scene::Threads)),
                }
            }
        }
    }

    #[test]
    fn a_program_goes_through_where_nothing_happens() {
        let from = Vocabulary::new(Table::complete("sim"));
        for seed in 0..6 {
            let played = backend_sim::run_ranks(3, {
                let from = from.clone();
                move |comm| Ok(Program::random(seed, 3, 12, &from).play(&comm, Duration::from_secs(20)))
            });
            for p in played.unwrap() {
                assert_eq!((p.done, p.wrong, p.failed.map(|f| f.0)), (12, vec![], None), "seed {seed}");
            }
        }
    }
}
