//! Several calls together: communicators side by side, threads, calls in flight, messages out of order.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::Thread;
use std::time::{Duration, Instant};

use comm_core::{
    CallOptions, Communicator, DType, Error, ErrorKind, OpQuery, Operation, ReduceOp, Result, With, Work, op, wait_all,
    wait_any,
};

use crate::endings::{called_off, misfits, missed, regrouped};
use crate::value::mix;

/// One of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Scene {
    /// Children of one communicator, used in different orders by different ranks.
    Interleaved,
    /// Threads with a communicator each.
    Threads,
    /// Groups of some of the ranks.
    Subgroups,
    /// Many calls in flight, waited for in other orders than they were made in.
    InFlight,
    /// Futures polled together.
    Futures,
    /// Borrowed calls that overlap.
    Overlap,
    /// Messages with several tags, received in another order.
    Tags,
    /// Short messages that wait for their receiver, to oneself too.
    Ahead,
    /// Many short calls in a row.
    Row,
    /// Calls that one rank, or every rank, refuses.
    Refused,
    /// Children that do not come about.
    Misfits,
    /// A child that is called off, and its survivors.
    CalledOff,
    /// A rank that does not come to a monitored barrier.
    Missed,
    /// A new membership.
    Regrouped,
}

impl Scene {
    pub(crate) const ALL: &'static [Self] = &[
        Self::Interleaved,
        Self::Threads,
        Self::Subgroups,
        Self::InFlight,
        Self::Futures,
        Self::Overlap,
        Self::Tags,
        Self::Ahead,
        Self::Row,
        Self::Refused,
        Self::Misfits,
        Self::CalledOff,
        Self::Missed,
        Self::Regrouped,
    ];

    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Interleaved => "communicators interleaved",
            Self::Threads => "threads with a communicator each",
            Self::Subgroups => "groups of some ranks",
            Self::InFlight => "many calls in flight",
            Self::Futures => "futures polled together",
            Self::Overlap => "borrowed calls that overlap",
            Self::Tags => "tags out of order",
            Self::Ahead => "short messages sent ahead",
            Self::Row => "many short calls in a row",
            Self::Refused => "refused calls",
            Self::Misfits => "splits that do not fit",
            Self::CalledOff => "a child that is called off",
            Self::Missed => "a barrier that somebody misses",
            Self::Regrouped => "a new membership",
        }
    }

    /// Whether something fails on purpose in it, which could not be told from what else goes wrong.
    pub(crate) const fn fails(self) -> bool {
        matches!(self, Self::Misfits | Self::CalledOff | Self::Missed | Self::Regrouped)
    }

    /// What the backend must do for it.
    pub(crate) fn needs(self) -> Vec<OpQuery> {
        let moved = |op| OpQuery::new(op).dtype(DType::I64);
        let sum = moved(Operation::AllReduce).redop(ReduceOp::Sum);
        let split = OpQuery::new(Operation::Split);
        let (broadcast, gather) = (moved(Operation::Broadcast), moved(Operation::AllGather));
        match self {
            Self::Interleaved | Self::Subgroups => vec![split, sum, gather],
            Self::Threads => vec![split, sum, broadcast, gather, OpQuery::new(Operation::Barrier)],
            Self::InFlight | Self::Futures => vec![sum],
            Self::Overlap => vec![sum, broadcast],
            Self::Tags | Self::Ahead => vec![moved(Operation::Send), moved(Operation::Recv)],
            Self::Row => vec![sum, broadcast, gather],
            Self::Refused => vec![broadcast, sum],
            Self::Misfits => vec![split, sum, moved(Operation::Send), moved(Operation::Recv)],
            Self::CalledOff => vec![split, sum, OpQuery::new(Operation::Barrier), OpQuery::new(Operation::Shrink)],
            Self::Missed => vec![split, sum, OpQuery::new(Operation::MonitoredBarrier)],
            Self::Regrouped => vec![split, sum, gather, OpQuery::new(Operation::Reconfigure)],
        }
    }

    /// Plays it. What it returns was wrong.
    pub(crate) fn run(self, comm: &Communicator, seed: u64, timeout: Duration) -> Result<Vec<String>> {
        let mut s = Stage { comm, seed, timeout, wrong: Vec::new() };
        match self {
            Self::Interleaved => s.interleaved()?,
            Self::Threads => s.threads()?,
            Self::Subgroups => s.subgroups()?,
            Self::InFlight => s.in_flight()?,
            Self::Futures => s.futures()?,
            Self::Overlap => s.overlap()?,
            Self::Tags => s.tags()?,
            Self::Ahead => s.ahead()?,
            Self::Row => row(comm, seed, timeout, 100, &mut s.wrong)?,
            Self::Refused => s.refused()?,
            Self::Misfits => misfits(comm, seed, timeout, &mut s.wrong)?,
            Self::CalledOff => called_off(comm, seed, timeout, &mut s.wrong)?,
            Self::Missed => missed(comm, seed, timeout, &mut s.wrong)?,
            Self::Regrouped => regrouped(comm, seed, timeout, &mut s.wrong)?,
        }
        Ok(s.wrong)
    }
}

/// A rank's number in call `k`.
fn number(seed: u64, rank: usize, k: usize, i: usize) -> i64 {
    mix(seed ^ mix((rank as u64) << 40 | (k as u64) << 20 | (i % 97) as u64)) as i64 >> 8
}

fn numbers(seed: u64, rank: usize, k: usize, len: usize) -> Vec<i64> {
    (0..len).map(|i| number(seed, rank, k, i)).collect()
}

fn sum(seed: u64, ranks: &[usize], k: usize, len: usize) -> Vec<i64> {
    let one = |i| ranks.iter().map(|r| number(seed, *r, k, i)).fold(0, i64::wrapping_add);
    (0..len).map(one).collect()
}

fn expect<T: PartialEq>(wrong: &mut Vec<String>, what: impl FnOnce() -> String, got: &[T], want: &[T]) {
    if got != want {
        let at = got.iter().zip(want).position(|(a, b)| a != b);
        wrong.push(format!("{}: wrong from element {}", what(), at.map_or("-".into(), |i| i.to_string())));
    }
}

/// Short calls of several kinds, one after the other.
fn row(comm: &Communicator, seed: u64, timeout: Duration, times: usize, wrong: &mut Vec<String>) -> Result<()> {
    let (n, me) = (comm.size(), comm.rank());
    let w = comm.with(CallOptions::new().timeout(timeout));
    let ranks: Vec<usize> = (0..n).collect();
    for k in 0..times {
        let len = 1 + k % 5;
        match k % 3 {
            0 => {
                let mut x = numbers(seed, me, k, len);
                w.all_reduce(&mut x, op::Sum)?;
                expect(wrong, || format!("all_reduce {k}"), &x, &sum(seed, &ranks, k, len));
            }
            1 => {
                let mut x = numbers(seed, me, k, len);
                w.broadcast(&mut x, k % n)?;
                expect(wrong, || format!("broadcast {k}"), &x, &numbers(seed, k % n, k, len));
            }
            _ => {
                let mut all = vec![0; n * len];
                w.all_gather(&numbers(seed, me, k, len), &mut all)?;
                let want: Vec<i64> = ranks.iter().flat_map(|r| numbers(seed, *r, k, len)).collect();
                expect(wrong, || format!("all_gather {k}"), &all, &want);
            }
        }
    }
    Ok(())
}

struct Stage<'a> {
    comm: &'a Communicator,
    seed: u64,
    timeout: Duration,
    wrong: Vec<String>,
}

impl<'a> Stage<'a> {
    fn size(&self) -> usize {
        self.comm.size()
    }

    fn me(&self) -> usize {
        self.comm.rank()
    }

    fn everybody(&self) -> Vec<usize> {
        (0..self.size()).collect()
    }

    fn with(&self) -> With<'a> {
        self.comm.with(CallOptions::new().timeout(self.timeout))
    }

    fn start(&self, comm: &Communicator, k: usize, len: usize) -> Result<Work<Vec<i64>>> {
        let x = numbers(self.seed, self.me(), k, len);
        comm.with(CallOptions::new().timeout(self.timeout)).all_reduce_async(x, op::Sum)
    }

    fn interleaved(&mut self) -> Result<()> {
        let (n, me, everybody) = (self.size(), self.me(), self.everybody());
        let backwards: Vec<usize> = everybody.iter().rev().copied().collect();
        let mut comms = vec![self.comm.dup("left")?, self.comm.dup("right")?];
        comms.extend(self.comm.split(&backwards, "backwards")?);
        if comms[2].rank() != n - 1 - me {
            self.wrong.push(format!("rank {me} is {} backwards", comms[2].rank()));
        }
        for round in 0..4 {
            let len = |c: usize| [3, 1000, 30_000][(c + round) % 3];
            // Neighbours start them in opposite orders, and wait in yet others.
            let mut order = [0, 1, 2];
            order.rotate_left((round + me) % 3);
            if me % 2 == 1 {
                order.reverse();
            }
            let mut works = Vec::new();
            for c in order {
                works.push((c, self.start(&comms[c], 10 * round + c, len(c))?));
            }
            works.rotate_left(round % 3);
            for (c, work) in works {
                let want = sum(self.seed, &everybody, 10 * round + c, len(c));
                expect(&mut self.wrong, || format!("communicator {c}, round {round}"), &work.wait()?, &want);
            }
            let mut all = vec![0; n];
            comms[2].with(CallOptions::new().timeout(self.timeout)).all_gather(&[me as i64], &mut all)?;
            let want: Vec<i64> = backwards.iter().map(|r| *r as i64).collect();
            expect(&mut self.wrong, || "gathered backwards".into(), &all, &want);
        }
        comms.into_iter().try_for_each(|c| c.finalize(self.timeout))
    }

    fn threads(&mut self) -> Result<()> {
        let comms = (0..3).map(|t| self.comm.dup(format!("thread {t}"))).collect::<Result<Vec<_>>>()?;
        let (seed, timeout) = (self.seed, self.timeout);
        let results: Vec<Result<Vec<String>>> = std::thread::scope(|s| {
            let body = |t: usize, comm: &Communicator| {
                let mut wrong = Vec::new();
                row(comm, mix(seed ^ t as u64), timeout, 30, &mut wrong)?;
                comm.with(CallOptions::new().timeout(timeout)).barrier()?;
                Ok(wrong.into_iter().map(|w| format!("thread {t}: {w}")).collect())
            };
            let spawned: Vec<_> = comms.iter().enumerate().map(|(t, c)| s.spawn(move || body(t, c))).collect();
            let gone = || Err(Error::invalid("a thread of the suite panicked"));
            spawned.into_iter().map(|t| t.join().unwrap_or_else(|_| gone())).collect()
        });
        for r in results {
            self.wrong.extend(r?);
        }
        comms.into_iter().try_for_each(|c| c.finalize(timeout))
    }

    fn subgroups(&mut self) -> Result<()> {
        let me = self.me();
        // The last rank, if there are more than two, joins none.
        let idle = self.size() > 2 && me + 1 == self.size();
        let color = (!idle).then_some((me % 2) as i64);
        let Some(half) = self.comm.split_by(color, 0, "half")? else { return Ok(()) };
        // Ranks of the root, which this communicator may have been split or shrunk from.
        let here = |root: &usize| self.comm.ranks().iter().position(|r| r == root).unwrap_or(usize::MAX);
        let members: Vec<usize> = half.ranks().iter().map(here).collect();
        if members.get(half.rank()) != Some(&me) || members.iter().any(|r| r % 2 != me % 2) {
            self.wrong.push(format!("rank {me} is number {} of {members:?}", half.rank()));
        }
        for k in 0..5 {
            let got = self.start(&half, k, 100)?.wait()?;
            expect(&mut self.wrong, || format!("sum {k} of {members:?}"), &got, &sum(self.seed, &members, k, 100));
        }
        half.finalize(self.timeout)
    }

    fn in_flight(&mut self) -> Result<()> {
        let everybody = self.everybody();
        let len = |k: usize| [1, 500, 9000, 40][k % 4];
        let check = |s: &mut Self, k: usize, got: &[i64]| {
            expect(&mut s.wrong, || format!("call {k} in flight"), got, &sum(s.seed, &everybody, k, len(k)));
        };
        let mut works = (0..12).map(|k| self.start(self.comm, k, len(k))).collect::<Result<Vec<_>>>()?;
        let mut names: Vec<usize> = (0..12).collect();
        // Three from the end, four as they come, the rest together.
        for _ in 0..3 {
            if let (Some(w), Some(k)) = (works.pop(), names.pop()) {
                check(self, k, &w.wait()?);
            }
        }
        for _ in 0..4 {
            let (i, got) = wait_any(&mut works)?;
            let k = names.remove(i);
            check(self, k, &got?);
        }
        for (k, got) in names.into_iter().zip(wait_all(works)?) {
            check(self, k, &got);
        }
        Ok(())
    }

    fn futures(&mut self) -> Result<()> {
        let everybody = self.everybody();
        let mut works = (0..6).map(|k| self.start(self.comm, k, 700 * k).map(Some)).collect::<Result<Vec<_>>>()?;
        let bell = Arc::new(Bell { thread: std::thread::current(), rung: AtomicBool::new(true) });
        let waker = Waker::from(Arc::clone(&bell));
        let until = Instant::now() + self.timeout + Duration::from_secs(5);
        while works.iter().any(Option::is_some) {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(Error::invalid("futures that were polled together were never all woken"));
            }
            if !bell.rung.swap(false, Ordering::AcqRel) {
                std::thread::park_timeout(left);
                continue;
            }
            for (k, slot) in works.iter_mut().enumerate() {
                let Some(work) = slot else { continue };
                if let Poll::Ready(got) = Pin::new(work).poll(&mut Context::from_waker(&waker)) {
                    *slot = None;
                    let want = sum(self.seed, &everybody, k, 700 * k);
                    expect(&mut self.wrong, || format!("future {k}"), &got?, &want);
                }
            }
        }
        Ok(())
    }

    fn overlap(&mut self) -> Result<()> {
        let (n, me, seed) = (self.size(), self.me(), self.seed);
        let mut x = numbers(seed, me, 0, 6000);
        let (a, rest) = x.split_at_mut(1000);
        let (b, c) = rest.split_at_mut(3000);
        self.with().scope(|s| {
            s.all_reduce(&mut *a, op::Sum)?;
            let b = s.broadcast(&mut *b, n - 1)?;
            let early = s.all_reduce(&mut *c, op::Max)?;
            let c = early.wait()?;
            c[0] = c[0].wrapping_add(1);
            b.wait().map(drop)
        })?;
        let everybody = self.everybody();
        let max = |i: usize| everybody.iter().map(|r| number(seed, *r, 0, i)).max().unwrap_or(0);
        let mut want = sum(seed, &everybody, 0, 1000);
        want.extend((1000..4000).map(|i| number(seed, n - 1, 0, i)));
        want.extend((4000..6000).map(max));
        want[4000] = want[4000].wrapping_add(1);
        expect(&mut self.wrong, || "parts of one buffer".into(), &x, &want);
        Ok(())
    }

    fn tags(&mut self) -> Result<()> {
        let (n, me, seed) = (self.size(), self.me(), self.seed);
        let (next, previous) = ((me + 1) % n, (me + n - 1) % n);
        // Tag 9 has two messages, which keep their order; one message is too long to be sent ahead.
        let letters = [(9, 0, 5), (3, 1, 100), (7, 2, 20_000), (9, 3, 5)];
        let at = |tag| self.comm.with(CallOptions::new().timeout(self.timeout).tag(tag));
        let sent = letters.map(|(tag, k, len)| at(tag).send_async(numbers(seed, me, k, len), next));
        for (tag, k, len) in [letters[2], letters[0], letters[1], letters[3]] {
            let mut got = vec![0; len];
            at(tag).recv(&mut got, previous)?;
            expect(&mut self.wrong, || format!("letter {k} with tag {tag}"), &got, &numbers(seed, previous, k, len));
        }
        sent.into_iter().try_for_each(|w| w?.wait().map(drop))
    }

    fn ahead(&mut self) -> Result<()> {
        let (n, me, seed) = (self.size(), self.me(), self.seed);
        let w = self.with();
        for (k, distance) in [0, 1, n - 1].into_iter().enumerate() {
            let (to, from) = ((me + distance) % n, (me + n - distance) % n);
            w.send(&numbers(seed, me, k, 8000), to)?;
            let mut got = vec![0; 8000];
            w.recv(&mut got, from)?;
            expect(&mut self.wrong, || format!("from {from} to {me}"), &got, &numbers(seed, from, k, 8000));
        }
        Ok(())
    }

    fn refused(&mut self) -> Result<()> {
        let (n, me) = (self.size(), self.me());
        let w = self.with();
        let mut x = [7i64; 3];
        // Everybody is wrong.
        let r = w.broadcast(&mut x, n);
        if let Some(e) = self.comm.cause() {
            // Something else has happened.
            return Err(e);
        }
        if !matches!(r.as_ref().map_err(Error::kind), Err(ErrorKind::InvalidArgument { .. })) {
            self.wrong.push(format!("a root out of range gave {r:?}"));
        }
        // One is wrong: the others are told.
        let bad = self.seed as usize % n;
        let r = w.broadcast(&mut x, if me == bad { n + 1 } else { bad });
        if let Err(e) = &r
            && !e.is_recoverable()
        {
            // Something else has happened.
            return Err(e.clone());
        }
        let right = match r.as_ref().map_err(Error::kind) {
            Err(ErrorKind::InvalidArgument { .. }) => me == bad,
            Err(ErrorKind::PeerRefused { rank, .. }) => me != bad && *rank == bad,
            _ => false,
        };
        if !right {
            self.wrong.push(format!("a call that rank {bad} refused gave {r:?}"));
        }
        // And the communicator goes on.
        let got = self.start(self.comm, 5, 10)?.wait()?;
        let want = sum(self.seed, &self.everybody(), 5, 10);
        expect(&mut self.wrong, || "after the refused calls".into(), &got, &want);
        Ok(())
    }
}

struct Bell {
    thread: Thread,
    rung: AtomicBool,
}

impl Wake for Bell {
    fn wake(self: Arc<Self>) {
        self.rung.store(true, Ordering::Release);
        self.thread.unpark();
    }
}
