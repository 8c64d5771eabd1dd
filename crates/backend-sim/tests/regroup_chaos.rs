//! Members of a world and newcomers make a new membership while something happens to them: who gets an error is told the
//! right rank, and those who are left find together without it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use backend_sim::{Ended, Fault, Faults, Network, Outcome, SimRank, Simulation, When};
use comm_core::{CommOptions, Communicator, Error, ErrorKind, Result, op};

const SECOND: Duration = Duration::from_secs(1);
/// Of the attempt to which something happens.
const ATTEMPT: Duration = Duration::from_secs(20);
/// When all that has happened is over, and those who are left meet.
const LATER: Duration = Duration::from_secs(200);

/// Chance for plans.
struct Dice(u64);

impl Dice {
    fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % n
    }
}

#[derive(Clone, Debug)]
struct Plan {
    size: usize,
    newcomers: usize,
    /// Members of the attempt, in the order of the list.
    list: Vec<usize>,
    /// When each comes, in microseconds.
    comes: Vec<u64>,
    faults: Faults,
    /// Whom a cut keeps from the second attempt.
    cut: Option<(usize, usize)>,
}

fn plan(seed: u64) -> Plan {
    let mut dice = Dice(seed ^ 0x5eed);
    let size = 3 + dice.below(4) as usize;
    let newcomers = 1 + dice.below(size as u64 - 1) as usize;
    let mut list: Vec<usize> = (0..size).collect();
    (1..size).rev().for_each(|i| list.swap(i, dice.below(i as u64 + 1) as usize));
    let comes: Vec<u64> = (0..size).map(|_| dice.below(3000)).collect();
    let (mut faults, mut cut) = (Faults::new(), None);
    // Mostly one, for which it is clearest who is to blame.
    for _ in 0..[0, 1, 1, 1, 1, 2][dice.below(6) as usize] {
        let a = dice.below(size as u64) as usize;
        let b = (a + 1 + dice.below(size as u64 - 1) as usize) % size;
        // From before the first has come until after all are together.
        let when = When::At(Duration::from_micros(100 + dice.below(3600)));
        faults = match dice.below(4) {
            0 | 1 => faults.kill(a, when),
            2 => faults.pause(a, when, [SECOND / 10, 3 * SECOND, 60 * SECOND][dice.below(3) as usize]),
            _ if cut.is_none() => {
                cut = Some((a, b));
                faults.cut(a, b, when)
            }
            _ => faults,
        };
    }
    Plan { size, newcomers, list, comes, faults, cut }
}

/// Where ranks leave their handles, by phase and rank.
type Board = Arc<Mutex<BTreeMap<(u64, usize), String>>>;

/// How a rank fared.
#[derive(Debug)]
struct Fared {
    /// What it got from the attempt to which something happened, and from a first call there.
    first: Result<(usize, usize, u32)>,
    /// With whom it was together in the end.
    second: Option<Vec<usize>>,
}

fn wait_until(options: &CommOptions, at: Duration) {
    let now = Duration::from_nanos(options.clock.now().0);
    options.clock.sleep(at.saturating_sub(now));
}

fn work(comm: &Communicator) -> Result<()> {
    let n = comm.size() as u64;
    let mut x = [comm.rank() as u64 + 1; 300];
    comm.all_reduce(&mut x, op::Sum)?;
    assert_eq!(x, [n * (n + 1) / 2; 300]);
    Ok(())
}

fn rank(sim: SimRank, plan: &Plan, board: &Board) -> Result<Fared> {
    let (me, options) = (sim.rank, sim.options);
    let old = match sim.world {
        Some(world) => world,
        None => backend_sim::connect(options.clone().dynamic())?,
    };
    board.lock().unwrap().insert((1, me), old.init_handle()?);
    wait_until(&options, Duration::from_micros(plan.comes[me]));
    let list: Vec<String> = loop {
        let all = board.lock().unwrap();
        let found: Vec<String> = plan.list.iter().filter_map(|r| all.get(&(1, *r)).cloned()).collect();
        drop(all);
        if found.len() == plan.size {
            break found;
        }
        options.clock.sleep(Duration::from_micros(50));
    };
    let made = old.reconfigure(1, &list, ATTEMPT, &[]);
    let (first, newest) = match made {
        Ok(new) => (work(&new).map(|()| (new.rank(), new.size(), new.generation())), new),
        Err(e) => (Err(e), old),
    };
    // Who is there then is left; the higher end of a cut leaves the field to the other.
    wait_until(&options, LATER);
    if plan.cut.is_some_and(|(a, b)| a.max(b) == me) {
        return Ok(Fared { first, second: None });
    }
    // The dead do not get here, though they know their handle still.
    backend_sim::connect(options.clone().dynamic())?;
    board.lock().unwrap().insert((2, me), newest.init_handle()?);
    wait_until(&options, LATER + SECOND);
    let rest: Vec<(usize, String)> =
        board.lock().unwrap().iter().filter(|(k, _)| k.0 == 2).map(|(k, h)| (k.1, h.clone())).collect();
    let (ranks, handles): (Vec<usize>, Vec<String>) = rest.into_iter().unzip();
    let last = newest.reconfigure(2, &handles, ATTEMPT, &[])?;
    assert_eq!(ranks[last.rank()], me);
    work(&last)?;
    last.finalize(ATTEMPT)?;
    Ok(Fared { first, second: Some(ranks) })
}

fn simulate(seed: u64, plan: &Plan) -> Outcome<Fared> {
    let board = Board::default();
    let own = plan.clone();
    Simulation::new(plan.size)
        .newcomers(plan.newcomers)
        .seed(seed)
        .trace(20)
        .network(Network::new(Duration::from_micros(20), 1e9).jitter(Duration::from_micros(100)))
        .options(CommOptions::new().name("chaos").timeout(ATTEMPT).heartbeat_timeout(SECOND))
        .faults(plan.faults.clone())
        .run_each(move |sim| rank(sim, &own, &board))
        .unwrap()
}

/// Ranks to which something has happened that others cannot overlook.
fn guilty(run: &Outcome<Fared>) -> BTreeSet<usize> {
    let about = |f: &Fault| match *f {
        Fault::Kill { rank } => vec![rank],
        Fault::Pause { rank, length } if length >= SECOND => vec![rank],
        Fault::Cut { from, to } => vec![from, to],
        _ => Vec::new(),
    };
    run.faults.iter().flat_map(|h| about(&h.fault)).collect()
}

/// The members that an error names, by their places in the list.
fn named(e: &Error) -> Option<Vec<usize>> {
    match e.kind() {
        ErrorKind::Bootstrap { missing, .. } | ErrorKind::Timeout { missing, .. } => Some(missing.clone()),
        ErrorKind::PeerFailed { rank, .. } => Some(vec![*rank]),
        ErrorKind::Aborted { cause, .. } => {
            let rest = cause.split("rank ").nth(1)?;
            let (number, _) = rest.split_once(" failed")?;
            Some(vec![number.parse().ok()?])
        }
        _ => None,
    }
}

/// What is wrong with a run.
fn judge(plan: &Plan, run: &Outcome<Fared>) -> std::result::Result<(), String> {
    if let Some((trouble, _)) = &run.trouble {
        return Err(format!("{trouble}"));
    }
    let guilty = guilty(run);
    let gave_up: BTreeSet<usize> =
        (0..plan.size).filter(|r| run.ranks[*r].value().is_some_and(|f| f.first.is_err())).collect();
    let living: Vec<usize> = (0..plan.size).filter(|r| !matches!(run.ranks[*r], Ended::Killed)).collect();
    let rest: Vec<usize> = living.iter().copied().filter(|r| plan.cut.is_none_or(|(a, b)| a.max(b) != *r)).collect();
    let mut first_hand = gave_up.is_empty();
    for r in &living {
        let Some(fared) = run.ranks[*r].value() else { return Err(format!("rank {r}: {:?}", run.ranks[*r])) };
        match &fared.first {
            Ok(made) => {
                let place = plan.list.iter().position(|m| m == r);
                if Some(made.0) != place || (made.1, made.2) != (plan.size, 1) {
                    return Err(format!("rank {r} has become {made:?}, not {place:?} of {}", plan.size));
                }
            }
            Err(e) => {
                let named: Vec<usize> = named(e).ok_or_else(|| format!("rank {r}, names nobody: {e}"))?;
                let named: Vec<usize> = named.iter().map(|place| plan.list[*place]).collect();
                // Who was cut off or stood still may be told so itself.
                let fits = |m: &usize| guilty.contains(m) || gave_up.contains(m) && m != r;
                if named.is_empty() || guilty.is_empty() || !named.iter().all(fits) {
                    return Err(format!("rank {r} names {named:?}, guilty are {guilty:?}: {e}"));
                }
                first_hand |= named.iter().any(|m| guilty.contains(m));
            }
        }
        let want = rest.contains(r).then_some(&rest);
        if fared.second.as_ref() != want {
            return Err(format!("rank {r} was together with {:?} in the end, not {want:?}", fared.second));
        }
    }
    if first_hand { Ok(()) } else { Err(format!("nobody names any of {guilty:?}")) }
}

#[test]
fn attempts_end_alike_or_name_the_right_rank_and_the_rest_finds_together() {
    let (mut failed, mut well) = (0, 0);
    for seed in 0..400 {
        let plan = plan(seed);
        let run = simulate(seed, &plan);
        if let Err(what) = judge(&plan, &run) {
            panic!("{}", run.failure(&format!("{what}\n  {plan:?}\n  {:?}", run.ranks)));
        }
        let some = run.ranks.iter().any(|r| r.value().is_some_and(|f| f.first.is_err()));
        failed += usize::from(some);
        well += usize::from(!some);
    }
    // Attempts are struck in their course, not before or after.
    assert!(failed > 100 && well > 50, "{failed} attempts failed, {well} went well");
}

#[test]
fn it_is_the_same_again_with_the_same_seed() {
    for seed in 0..30 {
        let plan = plan(seed);
        let (a, b) = (simulate(seed, &plan), simulate(seed, &plan));
        assert_eq!((a.digest, format!("{:?}", a.ranks)), (b.digest, format!("{:?}", b.ranks)), "seed {seed}");
    }
}

/// Stopped while another one dies: when it goes on, the others have given it up in a group that had failed already, and
/// it must not take itself for the only survivor.
#[test]
fn who_was_stopped_while_another_died_finds_no_world_of_its_own() {
    for seed in 0..12 {
        let (stopped, killed) = [(0, 1), (1, 0), (3, 2), (0, 3)][seed as usize % 4];
        for shrinks in [true, false] {
            let faults = Faults::new()
                .pause(stopped, When::At(Duration::from_millis(30 + seed)), 5 * SECOND)
                .kill(killed, When::At(Duration::from_millis(50 + 3 * seed)));
            let options = CommOptions::new().timeout(60 * SECOND).heartbeat_timeout(SECOND);
            let world = Simulation::new(4).seed(seed).options(options).faults(faults);
            let run = world.run(move |comm| {
                let mut x = [1u64; 100];
                while comm.all_reduce(&mut x, op::Max).is_ok() {
                    comm.options().clock.sleep(Duration::from_millis(1));
                }
                if shrinks {
                    return Ok(comm.shrink(60 * SECOND)?.ranks().to_vec());
                }
                comm.agree_survivors(60 * SECOND)
            });
            let run = run.unwrap();
            let rest: Vec<usize> = (0..4).filter(|r| ![stopped, killed].contains(r)).collect();
            for r in &rest {
                assert_eq!(run.ranks[*r].value(), Some(&rest), "{}", run.failure("survivors"));
            }
            let e = run.ranks[stopped].error().unwrap_or_else(|| panic!("{}", run.failure("alone")));
            assert!(matches!(e.kind(), ErrorKind::StaleGeneration { .. }), "{}", run.failure("its error"));
        }
    }
}

/// Stopped beyond its own deadline in the middle of the search for survivors: what has come meanwhile, to the very end of
/// the connections, says more than that nobody has come.
#[test]
fn who_was_stopped_beyond_its_own_deadline_blames_nobody_who_is_well() {
    for n in 2..6 {
        for seed in 0..10 {
            let faults = Faults::new().pause(0, When::At(Duration::from_millis(1)), 40 * SECOND);
            let options = CommOptions::new().timeout(ATTEMPT).heartbeat_timeout(SECOND);
            let run = Simulation::new(n).seed(seed).options(options).faults(faults).run(|comm| {
                if comm.rank() == 0 {
                    comm.abort("enough");
                } else {
                    comm.options().clock.sleep(Duration::from_millis(5));
                }
                comm.agree_survivors(ATTEMPT)
            });
            let run = run.unwrap();
            let rest: Vec<usize> = (1..n).collect();
            for r in &rest {
                assert_eq!(run.ranks[*r].value(), Some(&rest), "{}", run.failure("survivors"));
            }
            let stale = matches!(run.ranks[0].error().map(Error::kind), Some(ErrorKind::StaleGeneration { .. }));
            assert!(stale, "{}", run.failure("the one that was stopped"));
        }
    }
}
