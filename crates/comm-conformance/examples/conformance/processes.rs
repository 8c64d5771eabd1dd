//! A world of processes: this program once per rank. A rank writes its report to standard output.

use std::fs::File;
use std::io::{Read, Seek, Write};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use comm_conformance::{RankReport, Report, Suite};
use comm_core::{CommOptions, Error, Result};
use comm_store::{TcpStoreServer, TcpStoreServerOptions, env};

use crate::TIMEOUT;

/// How long the others may still run when a rank has ended badly.
const GRACE: Duration = Duration::from_secs(20);

/// Processes of a world; those that are left are killed.
struct Ranks(Vec<Rank>);

struct Rank {
    child: Child,
    out: File,
    status: Option<ExitStatus>,
}

impl Drop for Ranks {
    fn drop(&mut self) {
        for r in self.0.iter_mut().filter(|r| r.status.is_none()) {
            // One that has ended already cannot be killed, which is fine.
            let _ = r.child.kill();
            let _ = r.child.wait();
        }
    }
}

/// Runs a world and collects what its ranks report.
pub(crate) fn world(suite: &Suite, size: usize, deadline: Duration) -> Report {
    match started(size) {
        Ok((server, ranks)) => {
            let reports = collected(ranks, deadline);
            drop(server);
            suite.merge(&reports)
        }
        Err(e) => suite.lost(size, &format!("its processes could not be started: {e}")),
    }
}

fn started(size: usize) -> std::io::Result<(TcpStoreServer, Ranks)> {
    let server = TcpStoreServerOptions::of_environment().and_then(|o| o.bind("127.0.0.1:0"));
    let server = server.map_err(std::io::Error::other)?;
    let mut ranks = Ranks(Vec::new());
    for rank in 0..size {
        let out = nameless()?;
        let mut c = Command::new(std::env::current_exe()?);
        c.args(std::env::args_os().skip(1))
            .arg("--child")
            .env(env::RANK, rank.to_string())
            .env(env::WORLD_SIZE, size.to_string())
            .env(env::STORE, server.local_addr().to_string())
            .env_remove("RUSTCOMMS_ALGO")
            .stdin(Stdio::piped())
            .stdout(out.try_clone()?);
        ranks.0.push(Rank { child: c.spawn()?, out, status: None });
    }
    Ok((server, ranks))
}

/// A file without a name: a pipe would stop a rank when nobody reads.
fn nameless() -> std::io::Result<File> {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let (process, k) = (std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
    let path = std::env::temp_dir().join(format!("rustcomms-conformance-{process}-{k}"));
    let f = File::options().read(true).write(true).create_new(true).open(&path)?;
    std::fs::remove_file(&path)?;
    Ok(f)
}

fn collected(mut ranks: Ranks, deadline: Duration) -> Vec<Option<RankReport>> {
    let mut until = Instant::now() + deadline;
    while ranks.0.iter().any(|r| r.status.is_none()) && Instant::now() < until {
        for r in ranks.0.iter_mut().filter(|r| r.status.is_none()) {
            r.status = r.child.try_wait().ok().flatten();
            if r.status.is_some_and(|s| !s.success()) {
                until = until.min(Instant::now() + GRACE);
            }
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    ranks.0.iter_mut().map(|r| RankReport::from_text(&text(&mut r.out).ok()?).ok()).collect()
}

fn text(f: &mut File) -> std::io::Result<String> {
    let mut s = Vec::new();
    f.rewind()?;
    f.read_to_end(&mut s)?;
    Ok(String::from_utf8_lossy(&s).into_owned())
}

/// A rank's part. It always reports; the collector judges.
pub(crate) fn rank(suite: &Suite, deadline: Duration) -> Result<bool> {
    end_with_parent(deadline);
    let options = CommOptions::new().name("conformance").timeout(TIMEOUT).bootstrap_timeout(TIMEOUT);
    let comm = backend_tcp::connect(options)?;
    let mut report = suite.run_rank(&comm);
    suite.finish(&comm, &mut report);
    let mut out = std::io::stdout().lock();
    out.write_all(report.to_text().as_bytes())
        .and_then(|()| out.flush())
        .map_err(|e| Error::io("writing the report", &e))?;
    Ok(true)
}

/// A rank does not outlive the program that started it: it ends with its standard input, or when it is late.
fn end_with_parent(deadline: Duration) {
    std::thread::spawn(|| {
        let mut b = [0u8; 1];
        while matches!(std::io::stdin().read(&mut b), Ok(1)) {}
        std::process::exit(99);
    });
    std::thread::spawn(move || {
        std::thread::sleep(deadline + Duration::from_secs(10));
        std::process::exit(98);
    });
}
