//! Chaos among processes: `kill -9` at a random moment, what the survivors say, and how they go on.
//!
//! A rank plays random programs until a call fails, says when and how, shrinks its communicator to the survivors, plays
//! on there, and says when it was back. Ranks and their parent read the same wall clock.

use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use comm_conformance::Program;
use comm_core::{CommOptions, Communicator, Error, Result, op};
use comm_store::{TcpStoreServer, TcpStoreServerOptions, env};

use crate::draw::Draw;
use crate::judge::named;
use crate::leaks::{ALLOCATOR, Leaks, RUN};
use crate::{Tally, vocabulary};

/// Within this time after the kill every survivor has an error.
const NOTICED: Duration = Duration::from_secs(1);
/// Within this time after its error every survivor has shrunk and summed.
const BACK: Duration = Duration::from_secs(2);
/// Time that a call, and a whole round, may take.
const TIMEOUT: Duration = Duration::from_secs(60);
const ROUND: Duration = Duration::from_secs(90);
/// Steps of a program; ranks play one after the other until something fails.
const STEPS: usize = 8;

const SEED: &str = "RUSTCOMMS_CHAOS_SEED";

fn wall() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_micros() as u64)
}

/// Processes of a world; those that are left are killed.
struct Ranks {
    children: Vec<Child>,
    lines: Receiver<(usize, String)>,
    /// What somebody has said before it was asked for.
    early: Vec<(usize, String)>,
    _server: TcpStoreServer,
}

impl Drop for Ranks {
    fn drop(&mut self) {
        for c in &mut self.children {
            // One that has ended already cannot be killed, which is fine.
            let _ = c.kill();
            let _ = c.wait();
        }
    }
}

impl Ranks {
    fn start(size: usize, seed: &str, environment: &[(&str, &str)]) -> std::io::Result<Self> {
        let server = TcpStoreServerOptions::of_environment().and_then(|o| o.bind("127.0.0.1:0"));
        let server = server.map_err(std::io::Error::other)?;
        let (tx, lines) = channel();
        let mut ranks = Self { children: Vec::new(), lines, early: Vec::new(), _server: server };
        for rank in 0..size {
            let mut c = Command::new(std::env::current_exe()?)
                .arg("--child")
                .env(env::RANK, rank.to_string())
                .env(env::WORLD_SIZE, size.to_string())
                .env(env::STORE, ranks._server.local_addr().to_string())
                .env(SEED, seed)
                .envs(environment.iter().copied())
                .env_remove("RUSTCOMMS_ALGO")
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .spawn()?;
            let (out, tx) = (c.stdout.take(), tx.clone());
            ranks.children.push(c);
            std::thread::spawn(move || {
                for line in out.into_iter().flat_map(|o| BufReader::new(o).lines()).map_while(Result::ok) {
                    // The receiver may have gone.
                    let _ = tx.send((rank, line));
                }
            });
        }
        Ok(ranks)
    }

    /// The next line, of those that were kept or of those that come.
    fn next(&self, kept: &mut Vec<(usize, String)>, until: Instant) -> Option<(usize, String)> {
        if !kept.is_empty() {
            return Some(kept.remove(0));
        }
        self.lines.recv_timeout(until.saturating_duration_since(Instant::now())).ok()
    }

    /// Waits for a line of each of `ranks` that begins with `word`; what follows it, in the order of `ranks`.
    fn hear(&mut self, word: &str, ranks: &[usize], until: Instant) -> std::result::Result<Vec<String>, String> {
        let mut heard: Vec<Option<String>> = vec![None; ranks.len()];
        let mut kept = std::mem::take(&mut self.early);
        while heard.iter().any(Option::is_none) {
            let Some((rank, line)) = self.next(&mut kept, until) else {
                let silent: Vec<usize> =
                    ranks.iter().zip(&heard).filter(|(_, h)| h.is_none()).map(|(r, _)| *r).collect();
                let why = if Instant::now() < until { "before they ended" } else { "in time" };
                return Err(format!("ranks {silent:?} did not say {word} {why}"));
            };
            if let Some(what) = line.strip_prefix("WRONG ") {
                return Err(format!("rank {rank}: {what}"));
            }
            match (line.strip_prefix(word), ranks.iter().position(|r| *r == rank)) {
                (Some(what), Some(i)) if heard[i].is_none() => heard[i] = Some(what.trim().to_owned()),
                // One may be ahead of the others.
                _ => self.early.push((rank, line)),
            }
        }
        self.early.append(&mut kept);
        Ok(heard.into_iter().flatten().collect())
    }

    /// What the ranks, all of which have ended, have complained about last.
    fn complaint(&mut self, until: Instant) -> std::result::Result<(), String> {
        let mut kept = std::mem::take(&mut self.early);
        while let Some((rank, line)) = self.next(&mut kept, until) {
            if let Some(what) = line.strip_prefix("WRONG ") {
                return Err(format!("rank {rank}: {what}"));
            }
        }
        Ok(())
    }

    fn ended(&mut self, rank: usize, until: Instant) -> Option<ExitStatus> {
        while Instant::now() < until {
            if let Ok(Some(s)) = self.children[rank].try_wait() {
                return Some(s);
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        None
    }
}

/// Times of all rounds, in seconds.
#[derive(Default)]
struct Times(Vec<f64>);

impl Times {
    fn line(&mut self, what: &str, limit: Duration) -> String {
        self.0.sort_by(f64::total_cmp);
        let at = |q: usize| self.0.get((self.0.len() * q / 100).min(self.0.len().saturating_sub(1))).copied();
        match (at(50), self.0.last()) {
            (Some(median), Some(worst)) => format!(
                "{what}: median {:.1} ms, worst {:.1} ms of {} (limit {} ms)",
                median * 1e3,
                worst * 1e3,
                self.0.len(),
                limit.as_millis()
            ),
            _ => format!("{what}: no times"),
        }
    }
}

/// Plays `rounds` rounds.
pub(crate) fn run(rounds: usize, first: u64, tally: &mut Tally) {
    let (mut noticed, mut back) = (Times::default(), Times::default());
    for k in 0..rounds {
        let seed = first.wrapping_add(k as u64);
        let outcome = round(seed, &mut noticed, &mut back);
        tally.note(outcome.map_err(|e| format!("processes, seed {seed}: {e}")));
    }
    println!("{}", noticed.line("kill -9 to a survivor's error", NOTICED));
    println!("{}", back.line("error to a correct all_reduce of the survivors", BACK));
}

fn round(seed: u64, noticed: &mut Times, back: &mut Times) -> std::result::Result<(), String> {
    let mut draw = Draw::new(seed);
    let size = 2 + draw.below(5);
    let victim = draw.below(size);
    let mut ranks =
        Ranks::start(size, &seed.to_string(), &[]).map_err(|e| format!("starting {size} processes: {e}"))?;
    let until = Instant::now() + ROUND;
    let all: Vec<usize> = (0..size).collect();
    ranks.hear("READY", &all, until)?;
    std::thread::sleep(Duration::from_micros(draw.below(300_000) as u64));
    let killed = wall();
    ranks.children[victim].kill().map_err(|e| format!("killing rank {victim}: {e}"))?;
    let left: Vec<usize> = all.into_iter().filter(|r| *r != victim).collect();
    let who = |what: &str| format!("rank {victim} of {size} killed: {what}");
    let errors = ranks.hear("ERROR", &left, until).map_err(|e| who(&e))?;
    let backs = ranks.hear("BACK", &left, until).map_err(|e| who(&e))?;
    for (r, (error, returned)) in left.iter().zip(errors.iter().zip(&backs)) {
        let (at, text) = error.split_once(' ').unwrap_or((error, ""));
        let time = |t: &str| t.parse::<u64>().map_err(|_| who(&format!("rank {r} said '{t}'")));
        let (at, returned) = (time(at)?, time(returned)?);
        let late = Duration::from_micros(at.saturating_sub(killed));
        let away = Duration::from_micros(returned.saturating_sub(at));
        noticed.0.push(late.as_secs_f64());
        back.0.push(away.as_secs_f64());
        if late > NOTICED {
            return Err(who(&format!("rank {r} had its error after {late:?}: {text}")));
        }
        if away > BACK {
            return Err(who(&format!("rank {r} was back after {away:?}")));
        }
        let named: Option<usize> = text.split(' ').next().and_then(|w| w.parse().ok());
        if named != Some(victim) {
            return Err(who(&format!("rank {r} blames another: {text}")));
        }
    }
    for r in left {
        match ranks.ended(r, until) {
            Some(s) if s.success() => {}
            Some(s) => return Err(who(&format!("rank {r} ended with {s}"))),
            None => return Err(who(&format!("rank {r} does not end"))),
        }
    }
    ranks.complaint(until).map_err(|e| who(&e))
}

/// What the processes of such a world say about leaks.
pub(crate) fn leaks(what: Leaks) -> std::result::Result<Vec<String>, String> {
    let size = what.processes();
    // In place of a seed.
    let mut ranks =
        Ranks::start(size, what.name(), &ALLOCATOR).map_err(|e| format!("starting {size} processes: {e}"))?;
    let all: Vec<usize> = (0..size).collect();
    ranks.hear("LEAKS", &all, Instant::now() + RUN)
}

fn say(line: &str) {
    let mut out = std::io::stdout().lock();
    // The parent may have gone, and will be noticed elsewhere.
    let _ = writeln!(out, "{}", line.replace('\n', " | ")).and_then(|()| out.flush());
}

/// A rank's part.
pub(crate) fn rank() -> Result<()> {
    end_with_parent();
    let asked = std::env::var(SEED).unwrap_or_default();
    if let Some(what) = Leaks::ALL.into_iter().find(|l| l.name() == asked) {
        say(&format!("LEAKS {}", what.measure()?));
        return Ok(());
    }
    let seed = asked.parse::<u64>().map_err(|_| Error::invalid(format!("{SEED} is '{asked}', which is no number")))?;
    let options = CommOptions::new().name("chaos").timeout(TIMEOUT).bootstrap_timeout(TIMEOUT);
    let comm = backend_tcp::connect(options)?;
    comm.barrier()?;
    say("READY");
    let size = comm.size();
    for turn in 0.. {
        let played = Program::random(seed << 20 | turn, size, STEPS, &vocabulary("tcp", false)).play(&comm, TIMEOUT);
        for w in played.wrong {
            say(&format!("WRONG {w}"));
        }
        if let Some((call, e)) = played.failed {
            return failed(&comm, seed, &call, &e);
        }
    }
    Ok(())
}

/// A call has failed: says so, and goes on with the survivors.
fn failed(comm: &Communicator, seed: u64, call: &str, e: &Error) -> Result<()> {
    let at = wall();
    // The communicator that the call was made on may be a child, whose ranks are others. The whole one fails too.
    let until = Instant::now() + NOTICED;
    let cause = loop {
        if let Some(cause) = comm.cause() {
            break cause;
        }
        if Instant::now() > until {
            break e.clone();
        }
        std::thread::sleep(Duration::from_millis(1));
    };
    let whole = e.context().comm.as_deref() == Some(comm.name());
    match named(if whole { e } else { &cause }) {
        Some(r) => say(&format!("ERROR {at} {r} {call}: {e}")),
        None => say(&format!("ERROR {at} nobody {call}: {e}; {cause}")),
    }
    let smaller = comm.shrink(TIMEOUT)?;
    let mut sum = [smaller.rank() as i64 + 1, 1];
    smaller.all_reduce(&mut sum, op::Sum)?;
    let n = smaller.size() as i64;
    if sum != [n * (n + 1) / 2, n] || n as usize + 1 != comm.size() {
        say(&format!("WRONG shrunk to {n} of {}: sums are {sum:?}", comm.size()));
    }
    say(&format!("BACK {}", wall()));
    let played = Program::random(!seed, smaller.size(), STEPS, &vocabulary("tcp", false)).play(&smaller, TIMEOUT);
    for w in played.wrong {
        say(&format!("WRONG after shrink: {w}"));
    }
    if let Some((call, e)) = played.failed {
        say(&format!("WRONG after shrink: {call}: {e}"));
    }
    smaller.finalize(TIMEOUT)
}

/// A rank does not outlive the program that started it.
fn end_with_parent() {
    std::thread::spawn(|| {
        let mut b = [0u8; 1];
        while matches!(std::io::stdin().read(&mut b), Ok(1)) {}
        std::process::exit(99);
    });
    std::thread::spawn(|| {
        std::thread::sleep(Duration::from_secs(320));
        std::process::exit(98);
    });
}
