//! Looks after the ranks from their start to the exit code.

use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

use rustix::process::Signal;

use super::guard::Guard;
use super::nodes::Nodes;
use super::output::Output;
use super::ranks::{Outcome, Rank, raise_descriptor_limit, signal};
use super::{Args, Event, Plan, Stop};

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

struct Run<'a> {
    ranks: Vec<Rank>,
    guard: Option<Guard>,
    output: Output,
    nodes: Nodes,
    stage: Stage,
    /// The exit code, once something has failed.
    code: Option<i32>,
    /// What failed first here has been a crash.
    crashed: bool,
    /// Whether a signal asked for the end.
    interrupted: bool,
    grace: Duration,
    events: &'a Sender<Event>,
}

/// Starts the ranks and returns the exit code when all is over.
pub(super) fn supervise(
    args: &Args,
    plan: &Plan,
    mut nodes: Nodes,
    events: &Sender<Event>,
    inbox: &Receiver<Event>,
) -> Result<i32, Stop> {
    let descriptors = raise_descriptor_limit();
    let mut guard =
        Guard::start().map_err(|e| eprintln!("rustcomms run: continuing without a guard process: {e}")).ok();
    let (mut ranks, mut pipes, mut failed) = (Vec::new(), Vec::new(), None);
    for local in 0..plan.nproc {
        let started = Rank::start(args, plan, (&plan.host, nodes.port), &nodes.run_id, local, descriptors).and_then(
            |(rank, p)| {
                if let Some(g) = &mut guard {
                    g.add(rank.pid);
                }
                let watched = rank.watch(local, events.clone());
                ranks.push(rank);
                pipes.push(p);
                watched.map_err(|e| Stop::new(1, format!("cannot start a thread: {e}")))
            },
        );
        if let Err(stop) = started {
            failed = Some(stop);
            break;
        }
    }
    let output = match Output::start(pipes, !args.no_prefix, events.clone()) {
        Ok(output) => output,
        Err(e) => {
            ranks.iter_mut().for_each(Rank::bury);
            let text = format!("cannot copy the ranks' output: {e}");
            nodes.report(1, text.clone());
            nodes.done(true, args.linger, events);
            return Err(Stop::new(1, text));
        }
    };
    let mut run = Run {
        ranks,
        guard,
        output,
        nodes,
        stage: Stage::Running,
        code: None,
        crashed: false,
        interrupted: false,
        grace: args.grace,
        events,
    };
    if let Some(stop) = failed {
        run.fail(stop.code, &stop.text, true);
        run.kill();
    }
    run.until_all_ended(inbox);
    Ok(run.wind_up(args, inbox))
}

impl Run<'_> {
    fn until_all_ended(&mut self, inbox: &Receiver<Event>) {
        while self.ranks.iter().any(|r| r.ended.is_none()) {
            let next = match self.stage {
                Stage::Running => None,
                Stage::Grace(t) | Stage::Term(t) | Stage::Kill(t) => Some(t),
            };
            // Without a deadline there is always somebody to send: the ranks' watchers.
            let left = next.map_or(Duration::from_secs(3600), |t| t.saturating_duration_since(Instant::now()));
            match inbox.recv_timeout(left) {
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
                if how != Outcome::Exited(0) && self.code.is_none() {
                    let text = format!("rank {} (pid {}) {how}", r.rank, r.pid.as_raw_nonzero());
                    self.crashed = how.is_crash();
                    self.fail(how.code(), &text, true);
                } else if how.is_crash() && !self.crashed && !self.interrupted && matches!(self.stage, Stage::Grace(_))
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
            Event::Elsewhere(f) => {
                // This node's own failure comes back, too.
                if self.code.is_none() {
                    self.grace = self.grace.min(ELSEWHERE);
                    self.fail(f.code, &format!("node {}: {}", f.node, f.text), false);
                }
            }
            Event::StoreLost(text) => {
                if self.code.is_none() {
                    self.grace = self.grace.min(ELSEWHERE);
                    self.fail(1, &text, false);
                }
            }
            Event::Joined(_) | Event::Copied | Event::Lingered(_) => {}
        }
    }

    /// Something failed first: says so, and begins to end the rest.
    fn fail(&mut self, code: i32, text: &str, here: bool) {
        self.code = Some(code);
        self.stage = Stage::Grace(Instant::now() + self.grace);
        self.output.say(text);
        if here {
            self.nodes.report(code, text.to_owned());
        }
    }

    fn interrupted(&mut self, s: i32) {
        self.interrupted = true;
        if self.code.is_some() {
            // The second time somebody asks, or the first while a failure is being handled that
            // nobody wants to wait for.
            self.output.say(format_args!("{}; killing all ranks at once", signal(s)));
            self.kill();
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
                return false;
            }
        }
        true
    }

    fn kill(&mut self) {
        self.live().for_each(|r| r.signal(Signal::KILL));
        self.stage = Stage::Kill(Instant::now() + KILL_TO_LEAVE);
    }

    /// Cleans up after the ranks, copies the rest of their output and lets the other nodes finish.
    fn wind_up(mut self, args: &Args, inbox: &Receiver<Event>) -> i32 {
        for r in &mut self.ranks {
            // In this order: burying gives the number away.
            if let Some(g) = &mut self.guard {
                g.remove(r.pid);
            }
            r.bury();
        }
        self.output.finish(HOLDERS);
        // Normally the last line is waited for, however slow its reader is; whoever interrupts wants an end.
        let patience = if self.interrupted { 2 * HOLDERS } else { FOR_EVER };
        if let Some(code) = self.until(inbox, patience, |e| matches!(e, Event::Copied)) {
            return code;
        }
        if self.nodes.done(self.code.is_some(), args.linger, self.events) {
            let mut result = Ok(());
            let interrupted = self.until(inbox, FOR_EVER, |e| match e {
                Event::Lingered(r) => {
                    result = std::mem::replace(r, Ok(()));
                    true
                }
                _ => false,
            });
            if let Some(code) = interrupted {
                return code;
            }
            if let Err(text) = result {
                eprintln!("rustcomms run: {text}");
            }
            if let (None, Some(f)) = (self.code, self.nodes.failure()) {
                eprintln!("rustcomms run: node {}: {}", f.node, f.text);
                self.code = Some(f.code);
            }
        }
        self.code.unwrap_or(0)
    }

    /// Waits for an event of the winding up, at most for `patience`; a signal ends that, with this code.
    fn until(
        &self,
        inbox: &Receiver<Event>,
        patience: Duration,
        mut is_it: impl FnMut(&mut Event) -> bool,
    ) -> Option<i32> {
        let deadline = Instant::now() + patience;
        loop {
            match inbox.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(Event::Signal(s)) => return Some(self.code.unwrap_or(128 + s)),
                Ok(mut event) => {
                    if is_it(&mut event) {
                        return None;
                    }
                }
                Err(_) => return None,
            }
        }
    }
}
