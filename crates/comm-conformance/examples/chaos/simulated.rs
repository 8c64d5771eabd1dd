//! Chaos in simulations: a seed decides on the world, the program, the network, the faults, and the order of everything.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use backend_sim::{Ended, Fault, Faults, Happened, Network, Outcome, Simulation, When};
use comm_conformance::{Played, Program};
use comm_core::{CommOptions, Communicator, Error, ErrorKind, PeerCause, Result, op};
use parking_lot::Mutex;

use crate::draw::Draw;
use crate::judge::Guilt;
use crate::{Tally, vocabulary};

/// Virtual times: of a call, of the silence that makes a rank dead, of everything.
const TIMEOUT: Duration = Duration::from_secs(20);
const HEARTBEAT: Duration = Duration::from_secs(1);
const LIMIT: Duration = Duration::from_secs(600);
/// Longest contribution, in elements: simulated frames are copied several times.
const LONGEST: usize = 3000;
const CALLED_OFF: &str = "chaos calls it off";

/// What a seed has decided on.
struct Plan {
    size: usize,
    steps: usize,
    faults: Faults,
    network: Network,
    connect: &'static str,
    deed: Deed,
}

/// What the program does besides.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Deed {
    /// A rank that calls everything off after so many steps.
    aborts: Option<(usize, usize)>,
    /// All meet at a monitored barrier when they are done.
    meets: bool,
    /// Survivors make a new membership of their handles instead of shrinking.
    regroups: bool,
}

/// How a rank fared.
struct Fared {
    played: Played,
    /// The root communicator's first cause.
    cause: Option<Error>,
    /// After a failure.
    after: Option<After>,
    /// After a program that went through.
    finalized: Option<Result<()>>,
}

/// How a rank fared after a failure.
struct After {
    /// The ranks of the world that have agreed on each other, as far as this one has heard.
    survivors: Option<Vec<usize>>,
    /// They have had a world of their own.
    formed: bool,
    /// What was wrong there, or why it came to no end.
    end: Result<Vec<String>>,
}

fn plan(seed: u64) -> Plan {
    let mut draw = Draw::new(seed);
    let size = 2 + draw.below(7);
    let steps = 4 + draw.below(8);
    let when = |draw: &mut Draw| When::Event(1 + draw.below(400) as u64);
    let pair = |draw: &mut Draw| {
        let a = draw.below(size);
        (a, (a + 1 + draw.below(size - 1)) % size)
    };
    let number = |draw: &mut Draw| 1 + draw.below(40) as u64;
    let mut faults = Faults::new();
    // Mostly one fault, which says most about who is blamed; sometimes several, or none.
    let count = [0, 1, 1, 1, 1, 1, 2, 3][draw.below(8)];
    for _ in 0..count {
        let (a, b) = pair(&mut draw);
        faults = match draw.below(9) {
            0 | 1 => faults.kill(a, when(&mut draw)),
            2 => faults.drop_frame(a, b, number(&mut draw)),
            3 => faults.duplicate_frame(a, b, number(&mut draw)),
            4 => faults.corrupt_frame(a, b, number(&mut draw)),
            5 => faults.disconnect(a, b, when(&mut draw)),
            6 => faults.cut(a, b, when(&mut draw)),
            7 => {
                let ms = [1, 100, 900, 3000, 40_000][draw.below(5)];
                faults.pause(a, when(&mut draw), Duration::from_millis(ms))
            }
            _ => faults.delay_rate(0.2, Duration::from_millis(50)).at_most(50),
        };
    }
    let network = match draw.below(3) {
        0 => Network::default(),
        1 => Network::new(Duration::from_micros(10), 1e10).jitter(Duration::from_millis(2)),
        _ => Network::new(Duration::from_millis(1), 1e8).jitter(Duration::from_micros(300)),
    };
    let connect = if draw.below(3) == 0 { "ring" } else { "auto" };
    let aborts = (draw.below(8) == 0).then(|| (draw.below(size), draw.below(steps)));
    let deed = Deed { aborts, meets: draw.below(3) == 0, regroups: draw.below(3) == 0 };
    Plan { size, steps, faults, network, connect, deed }
}

/// Plays `seeds` seeds.
pub(crate) fn run(seeds: u64, first: u64, tally: &mut Tally) {
    let start = Instant::now();
    let (mut faults, mut failed, mut shrunk, mut slowest) = (0, 0, 0, (Duration::ZERO, 0));
    for seed in (0..seeds).map(|k| first.wrapping_add(k)) {
        let plan = plan(seed);
        let began = Instant::now();
        match simulate(seed, &plan) {
            Ok(outcome) => {
                faults += outcome.faults.len();
                for fared in outcome.ranks.iter().filter_map(Ended::value) {
                    failed += usize::from(fared.played.failed.is_some());
                    shrunk += usize::from(fared.after.as_ref().is_some_and(|a| a.end.is_ok()));
                }
                let verdict = check(&plan, &outcome);
                tally.note(verdict.map_err(|e| format!("{e}\n  {}", told(seed, &plan, &outcome))));
            }
            Err(e) => tally.note(Err(format!("seed {seed}: {e}"))),
        }
        let took = began.elapsed();
        slowest = slowest.max((took, seed));
    }
    println!(
        "simulated: {seeds} worlds, {faults} faults, {failed} ranks got errors, {shrunk} went on in smaller worlds; \
         {:.1} s, slowest {:.0} ms (seed {})",
        start.elapsed().as_secs_f64(),
        slowest.0.as_secs_f64() * 1e3,
        slowest.1
    );
}

fn simulate(seed: u64, plan: &Plan) -> Result<Outcome<Fared>> {
    let options =
        CommOptions::new().name("chaos").timeout(TIMEOUT).heartbeat_timeout(HEARTBEAT).hint("connect", plan.connect);
    let (steps, deed) = (plan.steps, plan.deed);
    let handles = Arc::new(Mutex::new(BTreeMap::new()));
    Simulation::new(plan.size)
        .seed(seed)
        .options(options)
        .network(plan.network)
        .faults(plan.faults.clone())
        .limit(LIMIT)
        .run(move |comm| Ok(rank(&comm, seed, steps, deed, &handles)))
}

/// Where ranks leave their handles: by their ranks in the world.
type Handles = Arc<Mutex<BTreeMap<usize, String>>>;

/// A rank's part.
fn rank(comm: &Communicator, seed: u64, steps: usize, deed: Deed, handles: &Handles) -> Fared {
    let from = vocabulary("sim", true).longest(LONGEST);
    let program = Program::random(seed, comm.size(), steps, &from);
    let aborts = deed.aborts.filter(|(who, _)| *who == comm.rank());
    let mut played = program.first(aborts.map_or(steps, |(_, after)| after)).play(comm, TIMEOUT);
    if played.failed.is_none() && aborts.is_some() {
        comm.abort(CALLED_OFF);
    }
    if played.failed.is_none() && (deed.meets || aborts.is_some()) {
        let met = comm.monitored_barrier(TIMEOUT);
        played.failed = met.err().map(|e| ("monitored_barrier".to_owned(), e));
    }
    if played.failed.is_none() {
        let finalized = comm.finalize(TIMEOUT);
        return Fared { played, cause: None, after: None, finalized: Some(finalized) };
    }
    let cause = comm.cause();
    let mut after = After { survivors: None, formed: false, end: Ok(Vec::new()) };
    let smaller = if deed.regroups { regroup(comm, seed, handles, &mut after) } else { comm.shrink(TIMEOUT) };
    after.end = smaller.and_then(|smaller| {
        after.formed = true;
        after.survivors.get_or_insert_with(|| smaller.ranks().to_vec());
        go_on(&smaller, seed)
    });
    Fared { played, cause, after: Some(after), finalized: None }
}

/// A new membership of the survivors: each leaves its handle before they agree on who they are.
fn regroup(comm: &Communicator, seed: u64, handles: &Handles, after: &mut After) -> Result<Communicator> {
    let own = comm.init_handle()?;
    handles.lock().insert(comm.rank(), own);
    let survivors = comm.agree_survivors(TIMEOUT)?;
    after.survivors = Some(survivors.clone());
    let list: Vec<String> = {
        let handles = handles.lock();
        survivors.iter().filter_map(|r| handles.get(r).cloned()).collect()
    };
    if list.len() < survivors.len() {
        return Err(Error::invalid(format!("{survivors:?} have agreed, and not all of them have called")));
    }
    let new = comm.reconfigure(seed, list, TIMEOUT, &[])?;
    if survivors.get(new.rank()) != Some(&comm.rank()) {
        return Err(Error::invalid(format!("rank {} has become {} of {survivors:?}", comm.rank(), new.rank())));
    }
    Ok(new)
}

/// The survivors' world works: what is wrong there.
fn go_on(smaller: &Communicator, seed: u64) -> Result<Vec<String>> {
    let n = smaller.size() as i64;
    let mut sum = [smaller.rank() as i64 + 1, 1];
    smaller.all_reduce(&mut sum, op::Sum)?;
    let mut wrong = Vec::new();
    if sum != [n * (n + 1) / 2, n] {
        wrong.push(format!("the sums over {n} survivors are {sum:?}"));
    }
    let from = vocabulary("sim", true).longest(LONGEST);
    let played = Program::random(!seed, smaller.size(), 3, &from).play(smaller, TIMEOUT);
    wrong.extend(played.wrong);
    if let Some((_, e)) = played.failed {
        return Err(e);
    }
    smaller.finalize(TIMEOUT)?;
    Ok(wrong)
}

/// What has happened to the world, and, if `after` says so, to that of its survivors, by ranks of the first.
fn guilt(plan: &Plan, happened: &[Happened], ranks: &[Ended<Fared>], after: bool) -> Guilt {
    let mut g = Guilt { aborts: plan.deed.aborts.map(|(who, _)| (who, CALLED_OFF)), ..Guilt::default() };
    // Stops of a rank that follow each other closely are one.
    let mut stops: BTreeMap<usize, (Duration, Duration)> = BTreeMap::new();
    for h in happened {
        match h.fault {
            Fault::Drop { from, to, .. } | Fault::Duplicate { from, to, .. } | Fault::Corrupt { from, to, .. } => {
                g.damaged.insert((from, to));
            }
            Fault::Cut { from, to } => {
                g.cut.insert((from, to));
            }
            Fault::Disconnect { a, b } => {
                g.parted.insert((a, b));
            }
            Fault::Kill { rank } => {
                g.killed.insert(rank);
            }
            Fault::Pause { rank, length } => {
                let at = Duration::from_nanos(h.at.0);
                let stop = stops.entry(rank).or_insert((at, at));
                if at > stop.1 + HEARTBEAT / 2 {
                    *stop = (at, at);
                }
                stop.1 = stop.1.max(at + length);
                if stop.1 - stop.0 >= HEARTBEAT {
                    g.silent.insert(rank);
                }
            }
            // Delays harm nobody.
            _ => {}
        }
    }
    let left = |f: &Fared| match &f.after {
        Some(a) => !after || a.end.is_err(),
        None => matches!(f.finalized, Some(Err(_))),
    };
    g.left = (0..ranks.len()).filter(|r| ranks[*r].value().is_some_and(left)).collect();
    g
}

fn check(plan: &Plan, outcome: &Outcome<Fared>) -> std::result::Result<(), String> {
    if let Some((trouble, waits)) = &outcome.trouble {
        return Err(format!("{trouble}: {}", waits.join("; ")));
    }
    let [first, second] = [false, true].map(|after| guilt(plan, &outcome.faults, &outcome.ranks, after));
    for (r, ended) in outcome.ranks.iter().enumerate() {
        let fared = match ended {
            Ended::Value(f) => f,
            Ended::Killed => continue,
            Ended::Panic(p) => return Err(format!("rank {r} panicked: {p}")),
            other => return Err(format!("rank {r} ended as {}", short(other))),
        };
        let later = fared.after.as_ref().and_then(|a| a.end.as_ref().ok());
        if let Some(w) = fared.played.wrong.iter().chain(later.into_iter().flatten()).next() {
            return Err(format!("rank {r}: {w}"));
        }
        let failures = fared.played.failed.iter().map(|(call, e)| (call.as_str(), e));
        let failures = failures.chain(fared.cause.iter().map(|e| ("cause", e)));
        let ended = fared.finalized.iter().filter_map(|f| f.as_ref().err()).map(|e| ("finalize", e));
        for (call, e) in failures.chain(ended) {
            if first.is_none() {
                return Err(format!("rank {r}: nothing happened, yet {call}: {e}"));
            }
            // Ranks of children are numbered otherwise; the cause of the whole is looked at as well.
            let whole = e.context().comm.as_deref() == Some("chaos");
            let verdict = if whole { first.judge(r, e).map(drop) } else { first.fits(plan.size, e) };
            verdict.map_err(|why| format!("rank {r}, {call}: {e}: {why}"))?;
        }
        if let Some(after) = &fared.after {
            agreed(r, after, &first, outcome)?;
            if let Err(e) = &after.end {
                judge_after(plan, r, after, &second, e).map_err(|why| format!("rank {r}, afterwards: {e}: {why}"))?;
            }
        }
    }
    Ok(())
}

/// Judges why a rank has not got through with the survivors.
fn judge_after(plan: &Plan, r: usize, after: &After, guilt: &Guilt, e: &Error) -> std::result::Result<(), String> {
    let whole = e.context().comm.as_deref() == Some("chaos");
    if !whole {
        return guilt.fits(plan.size, e);
    }
    // What others have lost is only known to be lost here, not how.
    if let (ErrorKind::PeerFailed { rank, .. }, None) = (e.kind(), &after.survivors)
        && guilt.can_be_lost(*rank)
        && *rank != r
    {
        return Ok(());
    }
    // Who has stood still comes too late to what it has agreed on: the others have gone on without it, and have ended, or
    // have closed their connections when they gave it up.
    let late = match e.kind() {
        ErrorKind::Bootstrap { missing, .. } | ErrorKind::Timeout { missing, .. } => !missing.is_empty(),
        ErrorKind::PeerFailed { cause, .. } => *cause == PeerCause::Killed,
        _ => false,
    };
    if late && guilt.silent.contains(&r) {
        return Ok(());
    }
    match (&after.survivors, e.context().rank) {
        (_, Some((_, size))) if size == plan.size => guilt.judge(r, e).map(drop),
        // Those who had agreed are numbered in their order.
        (Some(list), Some((me, size))) if size == list.len() && list.get(me) == Some(&r) => {
            guilt.among(list).judge(me, e).map(drop)
        }
        (list, numbers) => Err(format!("it comes from {numbers:?} where {list:?} have agreed")),
    }
}

/// The survivors that a rank has found have found the same, and nobody is left out to whom nothing has happened.
fn agreed(r: usize, after: &After, guilt: &Guilt, outcome: &Outcome<Fared>) -> std::result::Result<(), String> {
    let Some(list) = &after.survivors else { return Ok(()) };
    if !list.contains(&r) {
        return Err(format!("rank {r} is none of its survivors, {list:?}"));
    }
    let looking = |s: usize| outcome.ranks[s].value().and_then(|f| f.after.as_ref());
    for s in 0..outcome.ranks.len() {
        let Some(other) = looking(s) else { continue };
        match &other.survivors {
            Some(theirs) if list.contains(&s) && after.formed && other.formed && theirs != list => {
                return Err(format!("rank {r} has found {list:?}, rank {s} {theirs:?}"));
            }
            _ if list.contains(&s) || guilt.can_be_lost(s) => {}
            _ => return Err(format!("rank {r} has found {list:?}, without rank {s}, to which nothing has happened")),
        }
    }
    // Who has got to its end, or is dead when they find each other, is none of them; nor is anybody who never was.
    let distinct: BTreeSet<usize> = list.iter().copied().collect();
    if distinct.len() != list.len() || list.iter().any(|s| *s >= outcome.ranks.len()) {
        return Err(format!("rank {r} has found {list:?}"));
    }
    Ok(())
}

fn short(ended: &Ended<Fared>) -> String {
    match ended {
        Ended::Error(e) => format!("an error: {e}"),
        Ended::Stuck(at) => format!("stuck: {at}"),
        _ => "something else".to_owned(),
    }
}

/// What somebody needs who looks into it.
fn told(seed: u64, plan: &Plan, outcome: &Outcome<Fared>) -> String {
    let faults: Vec<String> = outcome.faults.iter().take(6).map(|h| format!("{} at {} ns", h.fault, h.at.0)).collect();
    let ranks: Vec<String> = outcome
        .ranks
        .iter()
        .enumerate()
        .map(|(r, e)| match e {
            Ended::Value(f) => {
                let failed = f.played.failed.as_ref().map_or_else(|| "all".into(), |(c, e)| format!("{c}: {e}"));
                let after = match &f.after {
                    None => String::new(),
                    Some(After { survivors, end: Ok(_), .. }) => format!(", then one of {survivors:?}"),
                    Some(After { survivors, end: Err(e), .. }) => format!(", then ({survivors:?}) {e}"),
                };
                let end = match &f.finalized {
                    None => String::new(),
                    Some(Ok(())) => ", finalized".into(),
                    Some(Err(e)) => format!(", {e}"),
                };
                format!("rank {r}: {} steps, {failed}{after}{end}", f.played.done)
            }
            other => {
                format!("rank {r}: {}", if matches!(other, Ended::Killed) { "killed".into() } else { short(other) })
            }
        })
        .collect();
    format!(
        "seed {seed}, {} ranks, {} steps, connect {}, {:?}: {}\n    {}\n  again: cargo run --release -p comm-conformance --example \
         chaos -- --seeds 1 --first {seed}",
        plan.size,
        plan.steps,
        plan.connect,
        plan.deed,
        faults.join("; "),
        ranks.join("\n    ")
    )
}
