//! Two ranks of this process, connected through the kernel as those of two processes are.

use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::Duration;

use rustcomms::store::{TcpStore, TcpStoreServerOptions};
use rustcomms::{CommOptions, Communicator, DType, Operation, ReduceOp, Result, Secret};

use super::Findings;
use crate::perf::bench;
use crate::perf::ops::{OPS, Sizing, Spec, Want};
use crate::perf::plan::{Case, Plan, Step};
use crate::perf::report::{Measured, Row};
use crate::perf::screen::Screen;
use crate::perf::table::USUAL;

const RANKS: usize = 2;
/// Few and many bytes: sent ahead, and after the receiver has asked for them.
const SIZES: [u64; 2] = [64, 1 << 20];
/// Time that a call, and that connecting may take.
const CALL: Duration = Duration::from_secs(20);
/// Time that all together may take.
const ALL: Duration = Duration::from_secs(120);

/// Messages beside those that perf measures: the rank exchanges with the other one.
const MESSAGES: &[Spec] = &[
    Spec {
        name: "send, recv",
        operation: Operation::Send,
        want: |p| vec![(p.count, Want::From(1 - p.rank, 0))],
        out_of_place: Some(|c, p, send, recv| {
            if p.rank == 0 {
                c.with.send_dyn(c.input(send)?, 1)?;
                return c.with.recv_dyn(c.output(recv)?, 1);
            }
            c.with.recv_dyn(c.output(recv)?, 0)?;
            c.with.send_dyn(c.input(send)?, 0)
        }),
        ..USUAL
    },
    Spec {
        name: "batch",
        operation: Operation::Batch,
        want: |p| vec![(p.count, Want::From(1 - p.rank, 0))],
        out_of_place: Some(|c, p, send, recv| c.with.batch().send(send, 1 - p.rank)?.recv(recv, 1 - p.rank)?.issue()),
        ..USUAL
    },
];

/// What happens in the ranks.
enum News {
    Connected(String),
    /// An operation went through; with its rows, and how many elements were wrong.
    Done(Vec<Row>, u64),
    Failed(usize, String),
    Ended,
}

/// Runs every operation and prints a line for each size.
pub(super) fn run(found: &mut Findings) {
    let server = match TcpStoreServerOptions::of_environment().and_then(|o| o.bind("127.0.0.1:0")) {
        Ok(s) => s,
        Err(e) => return found.problem(&format!("no store can be opened on 127.0.0.1: {e}")),
    };
    let addr = server.local_addr();
    let (tx, rx) = channel();
    for rank in 0..RANKS {
        let tx = tx.clone();
        let body = move || {
            let first = rank == 0;
            // Nobody listens any more when the time is over.
            let tell = |news| drop(tx.send(news));
            if let Err(e) = take_part(rank, &addr.to_string(), &|news| {
                if first {
                    tell(news)
                }
            }) {
                tell(News::Failed(rank, e));
            }
            tell(News::Ended);
        };
        if let Err(e) = std::thread::Builder::new().name(format!("rank-{rank}")).spawn(body) {
            return found.problem(&format!("no thread can be started: {e}"));
        }
    }
    let until = std::time::Instant::now() + ALL;
    let mut ended = 0;
    while ended < RANKS {
        match rx.recv_timeout(until.saturating_duration_since(std::time::Instant::now())) {
            Ok(News::Connected(how)) => {
                Findings::say(&format!("  {how}"));
                let (op, bytes, name) = ("operation", "bytes", "algorithm");
                Findings::say(&format!("  {op:<17}{bytes:>9}  {name:<20}{:>10}{:>11}", "us", "in place"));
            }
            Ok(News::Done(rows, wrong)) => {
                rows.iter().for_each(|r| Findings::say(&line(r)));
                if wrong > 0 {
                    found.problem(&format!("{wrong} wrong results of {}", rows.first().map_or("", |r| r.op)));
                }
            }
            Ok(News::Failed(rank, e)) => found.problem(&format!("rank {rank}: {e}")),
            Ok(News::Ended) => ended += 1,
            Err(_) => return found.problem(&format!("the ranks did not end within {ALL:?}")),
        }
    }
}

/// A row: what ran, and microseconds of a call in both forms.
fn line(row: &Row) -> String {
    let time = |m: Option<Measured>| m.map_or_else(|| "-".to_owned(), |m| format!("{:.0}", m.time_us));
    let algorithm = row.algorithm.as_deref().unwrap_or("-");
    let (out, inp) = (time(row.out_of_place), time(row.in_place));
    format!("  {:<17}{:>9}  {algorithm:<20}{out:>10}{inp:>11}", row.op, row.bytes)
}

/// What each rank does; an error says what failed.
fn take_part(rank: usize, store: &str, tell: &dyn Fn(News)) -> std::result::Result<(), String> {
    let comm = connect(rank, store).map_err(|e| e.to_string())?;
    let (backend, version, transport) = (comm.backend_name(), comm.backend_version(), comm.transport());
    tell(News::Connected(format!("connected: backend {backend} {version}, transport {transport}")));
    for spec in MESSAGES.iter().chain(OPS) {
        let outcome = bench::run(&comm, &plan(spec), &mut Screen::new(false, false, 0)).map_err(|e| {
            // The other rank need not wait.
            comm.abort(&format!("doctor ends there: {e}"));
            e.to_string()
        })?;
        tell(News::Done(outcome.rows, outcome.wrong));
    }
    comm.finalize(CALL).map_err(|e| e.to_string())
}

fn connect(rank: usize, store: &str) -> Result<Communicator> {
    let store = Arc::new(TcpStore::connect_with(store, CALL, Secret::from_environment()?.as_ref())?);
    let options = CommOptions::new().name("doctor").rank_and_size(rank, RANKS).store(store);
    rustcomms::connect(options.timeout(CALL).bootstrap_timeout(CALL))
}

/// One call of each form and size to warm up, one for the time, and one that is checked.
fn plan(spec: &'static Spec) -> Plan {
    let case = Case { dtype: DType::F32, redop: spec.reduces.then_some(ReduceOp::Sum), root: spec.rooted.then_some(0) };
    Plan {
        spec,
        cases: vec![case],
        sizes: if spec.sizing == Sizing::Nothing { vec![0] } else { SIZES.to_vec() },
        range: (0, 0),
        step: Step::Factor(2),
        notes: Vec::new(),
        iters: 1,
        warmup: 1,
        checks: 1,
        algo: None,
    }
}
