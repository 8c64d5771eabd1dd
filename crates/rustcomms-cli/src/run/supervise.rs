//! Looks after the ranks from their start to the exit code.

use std::io::{ErrorKind, Write};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

use rustix::process::{Rlimit, Signal};
use signal_hook::consts::SIGPIPE;

use super::guard::Guard;
use super::nodes::{Meeting, Nodes};
use super::output::Output;
use super::ranks::{Outcome, Rank, raise_descriptor_limit, signal};
use super::{Args, Event, OnFailure, Plan, Stop, survive};

/// From SIGTERM to SIGKILL.
const TERM_TO_KILL: Duration = Duration::from_secs(1);
/// The most grace for ranks of a node other than the one where the failure was.
const ELSEWHERE: Duration = Duration::from_secs(1);
/// From SIGKILL to giving up on a process that the kernel cannot end.
const KILL_TO_LEAVE: Duration = Duration::from_secs(10);
/// How long the pipes of ended ranks may be held open by processes that left their groups.
const HOLDERS: Duration = Duration::from_secs(1);

/// What `Instant` can hold without doubt.
const FOR_EVER: Duration = Duration::from_secs(10 * 365 * 86_400);

/// How hard the ranks are being ended; each stage has the time of the next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Running,
    Grace(Instant),
    Term(Instant),
    Kill(Instant),
}

/// What follows when all ranks have ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Next {
    /// This is the exit code.
    End(i32),
    Restart,
}

/// What outlives the ranks of a generation.
struct Site<'a> {
    args: &'a Args,
    plan: &'a Plan,
    nodes: Nodes,
    guard: Option<Guard>,
    descriptors: Rlimit,
    events: &'a Sender<Event>,
    inbox: &'a Receiver<Event>,
    /// Whether node 0's store is gone, which does not end a run that goes on after failures.
    store_lost: bool,
}

struct Run<'s, 'a> {
    site: &'s mut Site<'a>,
    ranks: Vec<Rank>,
    output: Output,
    stage: Stage,
    /// The exit code, once something has failed.
    code: Option<i32>,
    /// The code of the rank that failed first here, where that ends nobody else.
    outlived: Option<i32>,
    /// What failed first here has been a crash.
    crashed: bool,
    /// Whether a signal asked for the end, or the end of standard output.
    interrupted: bool,
    /// What failed would fail again, or is nothing that ranks could do better next time.
    last: bool,
    grace: Duration,
    /// What came while something else was waited for.
    kept: Vec<Event>,
}

/// Says something when no rank runs.
fn tell(text: impl std::fmt::Display) {
    // If nobody reads it, nobody misses it.
    let _ = writeln!(std::io::stderr().lock(), "rustcomms run: {text}");
}

/// Starts the ranks, again if need be, and returns the exit code when all is over.
pub(super) fn supervise(
    args: &Args,
    plan: &Plan,
    nodes: Nodes,
    events: &Sender<Event>,
    inbox: &Receiver<Event>,
) -> Result<i32, Stop> {
    let descriptors = raise_descriptor_limit();
    let guard = Guard::start().map_err(|e| tell(format_args!("continuing without a guard process: {e}"))).ok();
    let mut site = Site { args, plan, nodes, guard, descriptors, events, inbox, store_lost: false };
    loop {
        if let Next::End(code) = site.attempt()? {
            return Ok(code);
        }
        if let Next::End(code) = site.regroup()? {
            return Ok(code);
        }
    }
}

impl<'a> Site<'a> {
    /// One generation of ranks, from their start to the end of all.
    fn attempt(&mut self) -> Result<Next, Stop> {
        let (args, plan) = (self.args, self.plan);
        let (mut ranks, mut pipes, mut failed) = (Vec::new(), Vec::new(), None);
        for local in 0..plan.nproc {
            let started = Rank::start(args, plan, &self.nodes, local, self.descriptors).and_then(|(rank, p)| {
                if let Some(g) = &mut self.guard {
                    g.add(rank.pid);
                }
                let watched = rank.watch(local, self.events.clone());
                ranks.push(rank);
                pipes.push(p);
                watched.map_err(|e| Stop::new(1, format!("cannot start a thread: {e}")))
            });
            if let Err(stop) = started {
                failed = Some(stop);
                break;
            }
        }
        let output = match Output::start(pipes, !args.no_prefix, self.events.clone()) {
            Ok(output) => output,
            Err(e) => {
                ranks.iter_mut().for_each(|r| r.bury(self.guard.as_mut()));
                let text = format!("cannot copy the ranks' output: {e}");
                self.nodes.report(1, text.clone(), true);
                self.nodes.done(true, args.linger, self.events);
                return Err(Stop::new(1, text));
            }
        };
        if args.verbose && self.nodes.generation == 0 {
            for (rank, share) in ranks.iter().zip(&plan.shares) {
                output.say(format_args!("rank {}: {}", rank.rank, share.show()));
            }
        }
        let mut run = Run {
            site: self,
            ranks,
            output,
            stage: Stage::Running,
            code: None,
            outlived: None,
            crashed: false,
            interrupted: false,
            last: false,
            grace: args.grace,
            kept: Vec::new(),
        };
        if let Some(stop) = failed {
            run.last = true;
            run.fail(stop.code, &stop.text, true);
            run.kill();
        }
        run.until_all_ended();
        Ok(run.wind_up())
    }

    /// Goes on to the next generation, together with the other nodes.
    fn regroup(&mut self) -> Result<Next, Stop> {
        // The others' ranks have as long as ours to end.
        self.nodes.advance(self.args.store_timeout + TERM_TO_KILL + KILL_TO_LEAVE, self.events)?;
        let now = self.nodes.generation;
        let (code, text) = loop {
            match self.inbox.recv() {
                Ok(Event::Met { generation, meeting: Meeting::Ready, result }) if generation == now => match result {
                    Ok(()) => return Ok(Next::Restart),
                    Err(text) => break (1, text),
                },
                Ok(Event::Signal(s)) => break (128 + s, format!("interrupted by {}; not restarting", signal(s))),
                Ok(Event::Elsewhere { generation, failure: f }) if generation == now => {
                    break (f.code, format!("node {}: {}", f.node, f.text));
                }
                Ok(Event::StoreLost(text)) => break (1, text),
                Ok(_) => {}
                Err(_) => break (1, "all threads are gone".into()),
            }
        };
        tell(&text);
        self.nodes.report(code, text, true);
        Ok(Next::End(self.leave(Some(code))))
    }

    fn goes_on(&self) -> bool {
        self.args.on_failure == OnFailure::Continue
    }

    /// Where ranks go on after failures, when all here have ended: whether the run has failed, and the exit code then. `failed`
    /// is the code of the first rank that failed here if none ended well. What came before this is `kept`.
    fn conclude(&mut self, failed: Option<i32>, kept: Vec<Event>) -> Option<i32> {
        let now = self.nodes.generation;
        if self.store_lost || !self.nodes.conclude(failed.is_none(), self.args.linger, self.events) {
            return failed;
        }
        let mut kept = kept.into_iter();
        loop {
            match kept.next().map_or_else(|| self.inbox.recv(), Ok) {
                Ok(Event::Verdict(Ok(well))) => return failed.filter(|_| !well),
                Ok(Event::Verdict(Err(text)) | Event::StoreLost(text)) => {
                    if failed.is_some() {
                        tell(format_args!("{text}; how the ranks of the other nodes ended is not known"));
                    }
                    return failed;
                }
                Ok(Event::Elsewhere { generation, failure: f }) if generation == now => {
                    tell(format_args!("node {}: {}", f.node, f.text));
                    return Some(f.code);
                }
                Ok(Event::Signal(s)) => {
                    let text = format!("interrupted by {}; ending the run on all nodes", signal(s));
                    tell(&text);
                    self.nodes.report(128 + s, text, true);
                    return Some(128 + s);
                }
                Ok(Event::Refused(text) | Event::NodeLost(text)) => tell(text),
                Ok(_) => {}
                Err(_) => return failed,
            }
        }
    }

    /// Lets the other nodes finish, and returns the exit code.
    fn leave(&mut self, mut code: Option<i32>) -> i32 {
        // Where ranks go on after failures, it has been settled who has not come.
        if self.nodes.done(code.is_some() || self.goes_on(), self.args.linger, self.events) {
            let result = loop {
                match self.inbox.recv() {
                    Ok(Event::Lingered(result)) => break result,
                    Ok(Event::Signal(s)) => return code.unwrap_or(128 + s),
                    Ok(Event::Refused(text) | Event::NodeLost(text)) => tell(text),
                    Ok(_) => {}
                    Err(_) => break Ok(()),
                }
            };
            if let Err(text) = result {
                tell(text);
            }
            if let (None, Some(f)) = (code, self.nodes.failure()) {
                tell(format_args!("node {}: {}", f.node, f.text));
                code = Some(f.code);
            }
        }
        code.unwrap_or(0)
    }
}

impl Run<'_, '_> {
    fn until_all_ended(&mut self) {
        while self.ranks.iter().any(|r| r.ended.is_none()) {
            let next = match self.stage {
                Stage::Running => None,
                Stage::Grace(t) | Stage::Term(t) | Stage::Kill(t) => Some(t),
            };
            // Without a deadline there is always somebody to send: the ranks' watchers.
            let left = next.map_or(Duration::from_secs(3600), |t| t.saturating_duration_since(Instant::now()));
            match self.site.inbox.recv_timeout(left) {
                Ok(event) => self.handle(event),
                Err(RecvTimeoutError::Timeout) => {
                    if !self.escalate() {
                        return;
                    }
                }
                Err(RecvTimeoutError::Disconnected) => return,
            }
        }
    }

    fn handle(&mut self, event: Event) {
        match event {
            Event::Ended { local, how } => {
                let r = &mut self.ranks[local];
                r.ended = Some(how);
                if self.site.goes_on() && self.code.is_none() {
                    self.outlive(local, how);
                } else if how != Outcome::Exited(0) && self.code.is_none() {
                    let text = format!("rank {} (pid {}) {how}", r.rank, r.pid.as_raw_nonzero());
                    self.crashed = how.is_crash();
                    self.fail(how.code(), &text, true);
                } else if how.is_crash()
                    && !self.crashed
                    && !self.interrupted
                    && !self.last
                    && matches!(self.stage, Stage::Grace(_))
                {
                    // A process tells its peers that it goes before it is gone, so they may be seen to end first.
                    self.crashed = true;
                    self.code = Some(how.code());
                    self.output.say(format_args!(
                        "rank {} (pid {}) {how}: probably the cause",
                        r.rank,
                        r.pid.as_raw_nonzero()
                    ));
                }
            }
            Event::Signal(s) => self.interrupted(s),
            Event::Elsewhere { generation, failure: f } => {
                // Another generation's is settled. This node's own failure comes back, too.
                if generation == self.site.nodes.generation {
                    let text = format!("node {}: {}", f.node, f.text);
                    let ends = f.last && !self.last;
                    if ends && self.restartable() && self.code.is_some() {
                        // Without it, there would have been a restart.
                        self.code = Some(f.code);
                    }
                    self.last |= f.last;
                    if self.code.is_none() {
                        self.grace = self.grace.min(ELSEWHERE);
                        self.fail(f.code, &text, false);
                    } else if ends {
                        // Why there is no restart after this node's own failure.
                        self.output.say(text);
                    }
                }
            }
            Event::StoreLost(text) => {
                self.last = true;
                self.site.store_lost = true;
                if self.code.is_none() && self.site.goes_on() {
                    self.output.say(format_args!("{text}; the ranks of this node go on"));
                } else if self.code.is_none() {
                    self.grace = self.grace.min(ELSEWHERE);
                    self.fail(1, &text, false);
                }
            }
            Event::OutputLost(kind, why) => self.output_lost(kind, &why),
            Event::Refused(text) | Event::NodeLost(text) => self.output.say(text),
            Event::Joined(_) | Event::Copied | Event::Lingered(_) | Event::Met { .. } | Event::Verdict(_) => {}
        }
    }

    /// A rank ended in a run that goes on without it.
    fn outlive(&mut self, local: usize, how: Outcome) {
        if how == Outcome::Exited(0) {
            return;
        }
        self.outlived.get_or_insert(how.code());
        let rest = if self.live().next().is_some() { "; the others go on" } else { "" };
        let r = &mut self.ranks[local];
        // Where the rank is a script, the program proper may still run, and its peers would not know that it has failed.
        r.bury(self.site.guard.as_mut());
        self.output.say(format_args!("rank {} (pid {}) {how}{rest}", r.rank, r.pid.as_raw_nonzero()));
    }

    /// Something failed first: says so, and begins to end the rest.
    fn fail(&mut self, code: i32, text: &str, here: bool) {
        self.code = Some(code);
        self.stage = Stage::Grace(Instant::now() + self.grace);
        self.output.say(text);
        if here {
            self.site.nodes.report(code, text.to_owned(), self.last);
        }
    }

    /// Nobody reads what the ranks say: the end, as for any filter.
    fn output_lost(&mut self, kind: ErrorKind, why: &str) {
        let (code, text) = match kind {
            ErrorKind::BrokenPipe => (128 + SIGPIPE, "standard output is closed; ending all ranks".to_owned()),
            _ => (1, format!("cannot write to standard output: {why}; ending all ranks")),
        };
        let counts = self.code.is_none() || self.restartable();
        self.last = true;
        if counts {
            // How the ranks end now is no news.
            self.interrupted = true;
            self.code = Some(code);
            self.site.nodes.report(code, text.clone(), true);
        }
        if self.live().next().is_none() {
            // The thread that copies may say nothing more.
            return tell(text);
        }
        self.output.say(text);
        for r in self.live() {
            r.signal(Signal::TERM);
        }
        if self.stage == Stage::Running {
            self.stage = Stage::Grace(Instant::now() + self.grace);
        }
    }

    /// Whether the ranks would be started again, now or after their failure.
    fn restartable(&self) -> bool {
        !self.last && self.site.nodes.generation < self.site.args.max_restarts
    }

    fn interrupted(&mut self, s: i32) {
        self.interrupted = true;
        if self.restartable() && self.code.is_some() {
            // The signal ends the run, not what failed.
            self.code = Some(128 + s);
        }
        self.last = true;
        if let Some(code) = self.code {
            // The second time somebody asks, or the first while a failure is being handled that
            // nobody wants to wait for.
            self.output.say(format_args!("{}; killing all ranks at once", signal(s)));
            self.kill();
            self.site.nodes.report(code, format!("interrupted by {}; not restarting", signal(s)), true);
            return;
        }
        for r in self.live() {
            r.signal(Signal::from_named_raw(s).unwrap_or(Signal::TERM));
        }
        self.fail(128 + s, &format!("interrupted by {}; ending all ranks", signal(s)), true);
    }

    fn live(&self) -> impl Iterator<Item = &Rank> {
        self.ranks.iter().filter(|r| r.ended.is_none())
    }

    /// The time of the present stage is over; false if there is nothing left to try.
    fn escalate(&mut self) -> bool {
        match self.stage {
            Stage::Running => {}
            Stage::Grace(_) => {
                let left: Vec<String> = self.live().map(|r| r.rank.to_string()).collect();
                for r in self.live() {
                    r.signal(Signal::TERM);
                    // A stopped process hears nothing until it goes on.
                    r.signal(Signal::CONT);
                }
                self.output.say(format_args!("ending those that still run with SIGTERM: rank {}", left.join(", ")));
                self.stage = Stage::Term(Instant::now() + TERM_TO_KILL);
            }
            Stage::Term(_) => self.kill(),
            Stage::Kill(_) => {
                for r in self.live() {
                    let pid = r.pid.as_raw_nonzero();
                    self.output
                        .say(format_args!("rank {} (pid {pid}) does not end even when killed; leaving it", r.rank));
                }
                self.last = true;
                let text = "ranks do not end even when killed; not restarting".to_owned();
                self.site.nodes.report(self.code.unwrap_or(1), text, true);
                return false;
            }
        }
        true
    }

    fn kill(&mut self) {
        self.live().for_each(|r| r.signal(Signal::KILL));
        self.stage = Stage::Kill(Instant::now() + KILL_TO_LEAVE);
    }

    /// Whether all ranks are to be started again, and what is to be said about it.
    fn restarts(&mut self) -> (bool, Option<String>) {
        let (done, max) = (self.site.nodes.generation, self.site.args.max_restarts);
        if self.code.is_none() || self.last || self.interrupted || max == 0 {
            return (false, None);
        }
        // Of several that failed, the one that all nodes know decides.
        if let Some(f) = self.site.nodes.failure().filter(|f| f.last) {
            if done < max {
                self.code = Some(f.code);
            }
            return (false, Some(format!("node {}: {}", f.node, f.text)));
        }
        if done >= max {
            let all = if max == 1 { "the 1 restart is".into() } else { format!("all {max} restarts are") };
            return (false, Some(format!("{all} used up; not restarting")));
        }
        (true, Some(format!("restart {} of {max}: starting all ranks anew", done + 1)))
    }

    /// Cleans up after the ranks, copies the rest of their output, and decides what follows. If it is the end, lets the
    /// other nodes finish.
    fn wind_up(mut self) -> Next {
        for r in &mut self.ranks {
            r.bury(self.site.guard.as_mut());
        }
        if self.site.goes_on()
            && let Some(text) = survive::summary(&self.ranks)
        {
            let node = if self.site.plan.nnodes > 1 { " of this node" } else { "" };
            self.output.say(format_args!("summary{node}: {text}"));
        }
        let (mut restart, said) = self.restarts();
        if let Some(text) = said {
            self.output.say(text);
        }
        self.output.finish(HOLDERS);
        // Normally the last line is waited for, however slow its reader is; whoever interrupts wants an end.
        let patience = if self.interrupted { 2 * HOLDERS } else { FOR_EVER };
        if let Some(s) = self.until_copied(patience) {
            let code = if restart { 128 + s } else { self.code.unwrap_or(128 + s) };
            // Nobody else must wait for this node.
            self.site.nodes.report(code, format!("interrupted by {}; not restarting", signal(s)), true);
            self.site.nodes.flush();
            return Next::End(code);
        }
        restart &= !self.last;
        if self.code.is_none() && self.site.nodes.must_stay() {
            if !self.stay() {
                return Next::End(0);
            }
            let (again, said) = self.restarts();
            said.into_iter().for_each(tell);
            restart = again;
        }
        if self.code.is_none() && self.site.goes_on() {
            let well = self.ranks.iter().any(|r| r.ended == Some(Outcome::Exited(0)));
            self.code = self.site.conclude(self.outlived.filter(|_| !well), self.kept);
        }
        if restart { Next::Restart } else { Next::End(self.site.leave(self.code)) }
    }

    /// All ranks here have ended well: waits until those of the other nodes have, or fail, and the ranks here must be
    /// started again with them. False if node 0 waits no longer.
    fn stay(&mut self) -> bool {
        let hosts = self.site.nodes.hosts();
        let now = self.site.nodes.generation;
        // Who hosts the store decides how long it is there; the others are told by its end.
        let patience = if hosts { self.site.args.linger } else { FOR_EVER };
        if let Err(stop) = self.site.nodes.meet(Meeting::Finished, patience, self.site.events) {
            self.kept.push(Event::StoreLost(stop.text));
        }
        let mut kept = std::mem::take(&mut self.kept).into_iter();
        let (code, text) = loop {
            match kept.next().map_or_else(|| self.site.inbox.recv(), Ok) {
                Ok(Event::Met { generation, meeting: Meeting::Finished, result }) if generation == now => {
                    match result {
                        Ok(()) => return true,
                        Err(text) if hosts => {
                            tell(text);
                            return false;
                        }
                        Err(text) => {
                            self.last = true;
                            break (1, text);
                        }
                    }
                }
                Ok(Event::Elsewhere { generation, failure: f }) if generation == now => {
                    self.last |= f.last;
                    break (f.code, format!("node {}: {}", f.node, f.text));
                }
                Ok(Event::StoreLost(text)) => {
                    self.last = true;
                    break (1, text);
                }
                Ok(Event::Signal(s)) => {
                    self.interrupted = true;
                    let text = format!("interrupted by {}; not restarting", signal(s));
                    self.site.nodes.report(128 + s, text.clone(), true);
                    break (128 + s, text);
                }
                Ok(Event::Refused(text)) => tell(text),
                Ok(_) => {}
                Err(_) => break (1, "all threads are gone".into()),
            }
        };
        tell(text);
        self.code = Some(code);
        true
    }

    /// Waits for the end of the output, at most for `patience`; a signal ends that and is returned.
    fn until_copied(&mut self, patience: Duration) -> Option<i32> {
        let deadline = Instant::now() + patience;
        loop {
            match self.site.inbox.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(Event::Signal(s)) => return Some(s),
                Ok(Event::Copied) | Err(_) => return None,
                Ok(Event::OutputLost(kind, why)) => self.output_lost(kind, &why),
                Ok(event) => self.kept.push(event),
            }
        }
    }
}
