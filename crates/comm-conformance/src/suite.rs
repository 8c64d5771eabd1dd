//! Running the plan: one rank at a time, or all ranks of a world as threads.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use comm_core::{Communicator, Error, ErrorKind, Operation, ReduceOp, Result, Support, panic_text};

use crate::case::{Algo, CallCase, Form, Place, Split, query, reduces};
use crate::exec::{self, Ctx, Seen};
use crate::kind::Kind;
use crate::oper::{Oper, legal};
use crate::plan::{Case, Level, Settings, WORLDS};
use crate::report::{RankReport, Report};
use crate::table::Table;
use crate::value::Style;

/// The suite with its settings. All ranks must use the same.
#[derive(Clone, Debug)]
pub struct Suite {
    settings: Settings,
    timeout: Duration,
    deadline: Duration,
}

impl Suite {
    /// The suite for a backend of which this is expected.
    #[must_use]
    pub fn new(table: Table) -> Self {
        let settings = Settings {
            table,
            level: Level::Quick,
            seed: 1,
            algorithms: Vec::new(),
            worlds: WORLDS.to_vec(),
            filter: None,
        };
        Self { settings, timeout: Duration::from_secs(30), deadline: Duration::from_secs(600) }
    }

    /// How much is run. Default [`Level::Quick`].
    #[must_use]
    pub const fn level(mut self, level: Level) -> Self {
        self.settings.level = level;
        self
    }

    /// Chooses other values and other combinations.
    #[must_use]
    pub const fn seed(mut self, seed: u64) -> Self {
        self.settings.seed = seed;
        self
    }

    /// Algorithms to force, each for its operation, by the call's hint `algo`. Default none: the backend chooses.
    #[must_use]
    pub fn algorithms(mut self, algorithms: impl IntoIterator<Item = Algo>) -> Self {
        self.settings.algorithms = algorithms.into_iter().collect();
        self
    }

    /// The sizes over which a quick run is spread. Default [`WORLDS`].
    #[must_use]
    pub fn worlds(mut self, worlds: &[usize]) -> Self {
        self.settings.worlds = worlds.to_vec();
        self
    }

    /// Only cases whose description contains this text.
    #[must_use]
    pub fn filter(mut self, text: impl Into<String>) -> Self {
        self.settings.filter = Some(text.into());
        self
    }

    /// Time that one call may take. Default 30 s.
    #[must_use]
    pub const fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// Time that one world of threads may take. Default 600 s.
    #[must_use]
    pub const fn deadline(mut self, deadline: Duration) -> Self {
        self.deadline = deadline;
        self
    }

    /// The number of cases of a world.
    #[must_use]
    pub fn len(&self, size: usize) -> usize {
        self.settings.cases(size).len()
    }

    /// Runs all worlds, the ranks of each as threads of this process. `make` makes the communicators of a world, in
    /// rank order.
    pub fn run(&self, mut make: impl FnMut(usize) -> Result<Vec<Communicator>>) -> Report {
        let mut report = Report::default();
        for size in &self.settings.worlds {
            report.add(match make(*size) {
                Ok(comms) if comms.len() == *size => self.run_world(comms),
                Ok(comms) => self.lost(*size, &format!("it was made with {} communicators", comms.len())),
                Err(e) => self.lost(*size, &format!("it could not be made: {e}")),
            });
        }
        report
    }

    /// The report for a world that could not be run.
    #[must_use]
    pub fn lost(&self, size: usize, why: &str) -> Report {
        Report::lost(&self.settings.cases(size), size, why)
    }

    /// Runs one world, its ranks as threads of this process. A rank that does not end in time is left behind.
    pub fn run_world(&self, comms: Vec<Communicator>) -> Report {
        let size = comms.len();
        let suite = Arc::new(self.clone());
        let (to, from) = channel();
        for (rank, comm) in comms.into_iter().enumerate() {
            let (suite, to) = (Arc::clone(&suite), to.clone());
            let body = move || {
                let mut report = suite.run_rank(&comm);
                suite.finish(&comm, &mut report);
                // The receiver may have given up.
                let _ = to.send((rank, report));
            };
            if let Err(e) = std::thread::Builder::new().name(format!("conformance-{rank}")).spawn(body) {
                return self.lost(size, &format!("no thread for rank {rank}: {e}"));
            }
        }
        drop(to);
        let until = Instant::now() + self.deadline;
        let mut reports: Vec<Option<RankReport>> = vec![None; size];
        while let Ok((rank, report)) = from.recv_timeout(until.saturating_duration_since(Instant::now())) {
            reports[rank] = Some(report);
        }
        self.merge(&reports)
    }

    /// Runs this rank's part of all cases. Collective: all ranks of the communicator call it, with equal settings.
    ///
    /// What is wrong is recorded, and the next case follows. After a call that failed, nothing more is run: the
    /// communicator is aborted and the cases that are left count as failed.
    #[must_use]
    pub fn run_rank(&self, comm: &Communicator) -> RankReport {
        let mut report = RankReport { rank: comm.rank(), ..RankReport::default() };
        let name = comm.backend_name();
        if name != self.settings.table.backend() {
            report.complain(0, format!("the support table is that of {}, not {name}", self.settings.table.backend()));
        }
        for (i, case) in self.settings.cases(comm.size()).iter().enumerate() {
            let run = catch_unwind(AssertUnwindSafe(|| self.run_case(comm, case)));
            let what = match run {
                Ok(Ok(seen)) => {
                    report.complaints.extend(seen.complaints.into_iter().map(|c| (i, c)));
                    report.hashes.extend(seen.hash.map(|h| (i, h)));
                    report.done = i + 1;
                    continue;
                }
                Ok(Err(e)) => format!("a call failed: {e}"),
                Err(panic) => format!("panicked: {}", panic_text(panic.as_ref())),
            };
            comm.abort(&format!("conformance, {}: {what}", case.describe()));
            report.complain(i, what);
            break;
        }
        report
    }

    /// Finalizes the communicator, and notes how that went.
    pub fn finish(&self, comm: &Communicator, report: &mut RankReport) {
        if let Err(e) = comm.finalize(self.timeout) {
            report.complain(self.settings.cases(comm.size()).len(), format!("finalize: {e}"));
        }
    }

    /// Puts together what the ranks of one world reported, in rank order. `None` is a rank that was lost.
    #[must_use]
    pub fn merge(&self, ranks: &[Option<RankReport>]) -> Report {
        Report::merge(&self.settings.cases(ranks.len()), ranks)
    }

    /// Collects the ranks' reports over the communicator, through its control plane if it has one; rank 0 gets the
    /// whole. For launchers that give no other way; call it before [`finish`](Self::finish). Collective.
    ///
    /// # Errors
    ///
    /// When the communicator has failed; each rank then has its own report only.
    pub fn gather(&self, comm: &Communicator, report: &RankReport) -> Result<Option<Report>> {
        let mine = report.to_text().into_bytes();
        let all = match comm.control() {
            Ok(control) => control.exchange(&mine, self.timeout)?,
            Err(_) => {
                let mut lengths = vec![0u64; comm.size()];
                comm.all_gather(&[mine.len() as u64], &mut lengths)?;
                let most = lengths.iter().copied().max().unwrap_or(0) as usize;
                let mut padded = mine;
                padded.resize(most, b'\n');
                let mut all = vec![0u8; most * comm.size()];
                comm.all_gather(&padded, &mut all)?;
                all.chunks(most.max(1)).map(<[u8]>::to_vec).collect()
            }
        };
        if comm.rank() > 0 {
            return Ok(None);
        }
        let read = |b: &Vec<u8>| RankReport::from_text(&String::from_utf8_lossy(b)).ok();
        Ok(Some(self.merge(&all.iter().map(read).collect::<Vec<_>>())))
    }

    fn run_case(&self, comm: &Communicator, case: &Case) -> Result<Seen> {
        match case {
            Case::Call(c) => exec::run(&Ctx::new(comm, c, self.timeout)),
            Case::Scene(s, seed) => Ok(Seen { complaints: s.run(comm, *seed, self.timeout)?, hash: None }),
            Case::Support(op) => self.support(comm, *op),
        }
    }

    /// Compares the backend's answers with the table, and makes the calls that it must refuse.
    fn support(&self, comm: &Communicator, op: Operation) -> Result<Seen> {
        let mut seen = Seen::default();
        let cells: Vec<(Kind, Option<Oper>)> = if reduces(op) {
            legal().into_iter().map(|(k, o)| (k, Some(o))).collect()
        } else {
            Kind::dtypes().map(|(k, _)| (k, None)).collect()
        };
        for (kind, oper) in cells {
            let q = query(op, kind, oper.map(Oper::code));
            let expected = self.settings.table.unsupported(&q);
            for form in [Form::Sync, Form::Async, Form::Scoped] {
                let says = comm.supports(&q.form(form.query()));
                let cell = || format!("{op} of {} {} {form:?}", kind.name(), oper.map_or("", Oper::name));
                match (&says, expected) {
                    (Support::Unsupported { reason }, None) => {
                        seen.complaints.push(format!("{} is expected, but not supported: {reason}", cell()));
                    }
                    (Support::Unsupported { .. }, Some(_)) | (_, None) => {}
                    (_, Some(why)) => {
                        seen.complaints.push(format!("{} is supported, but the table says it is not ({why})", cell()));
                    }
                }
            }
            if expected.is_some()
                && let Some(complaint) = self.refused(comm, op, kind, oper)
            {
                seen.complaints.push(complaint);
            }
        }
        // A pair that is not legal is supported by nobody.
        let illegal = comm.supports(&query(op, Kind::F32, Some(ReduceOp::BAnd)));
        if reduces(op) && illegal.is_supported() {
            seen.complaints.push(format!("{op} claims to support band of f32"));
        }
        Ok(seen)
    }

    /// A call that the table says is not there must be answered so, and leave the communicator as it was.
    fn refused(&self, comm: &Communicator, op: Operation, kind: Kind, oper: Option<Oper>) -> Option<String> {
        let place = match op {
            Operation::Broadcast => Place::In,
            _ => Place::Out,
        };
        let case = CallCase {
            op,
            place,
            form: Form::Sync,
            kind,
            oper,
            style: Style::Exact,
            count: 3,
            split: Split::Uneven,
            root: 0,
            algo: None,
            seed: 3,
        };
        let answer = exec::run(&Ctx::new(comm, &case, self.timeout));
        let unsupported = matches!(answer.as_ref().map_err(Error::kind), Err(ErrorKind::Unsupported { .. }));
        match answer {
            _ if comm.is_failed() => Some(format!("{case}: not supported, but it failed the communicator")),
            Err(_) if unsupported => None,
            Err(e) => Some(format!("{case}: expected to be answered with Unsupported, not with: {e}")),
            Ok(_) => Some(format!("{case}: expected to be answered with Unsupported, but it went well")),
        }
    }
}
