//! Ranks that come and go: four start, one is killed in the middle of an all_reduce, the rest go on, and another joins.
//!
//! ```text
//! cargo run --example elastic             # starts the processes itself
//!
//! # Under a launcher that lets the others go on: rank 1 crashes, the rest shrink. Nobody joins.
//! rustcomms run -n 4 --on-failure continue -- target/debug/examples/elastic
//! ```
//!
//! Members find each other by handles alone. Here these go through files; a store, a scheduler or a message would do.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode};
use std::time::{Duration, Instant};

use rustcomms::{CommOptions, Communicator, Error, ErrorKind, Result, launch, op};

/// Tells a process which member it is, and where handles are.
const MEMBER: &str = "ELASTIC_MEMBER";
const PLACE: &str = "ELASTIC_PLACE";
/// The one that is killed, and the one that comes.
const VICTIM: usize = 1;
const NEWCOMER: usize = 4;
const LIMIT: Duration = Duration::from_secs(30);

pub(crate) fn main() -> Result<ExitCode> {
    match (std::env::var(MEMBER), std::env::var_os(PLACE)) {
        (Ok(number), Some(place)) => {
            let number = number.parse().map_err(|_| Error::invalid(format!("{MEMBER} is '{number}'")))?;
            member(number, Path::new(&place))?;
        }
        _ if launch::is_rank() => outlive()?,
        _ => direct()?,
    }
    Ok(ExitCode::SUCCESS)
}

/// As a rank of a launcher, which must let the others go on when one fails.
fn outlive() -> Result<()> {
    let comm = rustcomms::connect(CommOptions::new().name("elastic").timeout(LIMIT))?;
    if comm.size() <= VICTIM {
        return Err(Error::invalid("this example needs at least 2 ranks: one is lost"));
    }
    if comm.rank() == VICTIM {
        let mut gradient = vec![1f32; 1 << 18];
        for _ in 0..10 {
            comm.all_reduce(&mut gradient, op::Avg)?;
        }
        // The worst that a rank can do: it says good-bye to nobody.
        std::process::abort();
    }
    let gone = train(&comm)?;
    let rest = comm.shrink(LIMIT)?;
    let mut sum = [comm.rank() as u64];
    rest.all_reduce(&mut sum, op::Sum)?;
    assert_eq!(sum[0], (0..comm.size()).filter(|r| *r != gone).sum::<usize>() as u64);
    if rest.rank() == 0 {
        println!("elastic: generation {} has {} ranks, all right", rest.generation(), rest.size());
    }
    // One that is lost here could still be gone on without; after finalize it is too late.
    rest.barrier()?;
    rest.finalize(LIMIT)
}

/// Starts the processes, kills one, starts another.
fn direct() -> Result<()> {
    let place = std::env::temp_dir().join(format!("rustcomms-elastic-{}", std::process::id()));
    std::fs::create_dir_all(&place).map_err(|e| Error::io("making a directory", &e))?;
    let ended = act(&place);
    // Nobody needs the handles any more.
    let _ = std::fs::remove_dir_all(&place);
    ended
}

fn act(place: &Path) -> Result<()> {
    let mut members = Vec::new();
    for n in 0..4 {
        members.push(start(n, place)?);
    }
    for n in 0..4 {
        await_file(&place.join(format!("running.{n}")))?;
    }
    std::thread::sleep(Duration::from_millis(50));
    members[VICTIM].0.kill().map_err(|e| Error::io("killing a member", &e))?;
    members.push(start(NEWCOMER, place)?);
    for (n, m) in members.iter_mut().enumerate() {
        let status = m.0.wait().map_err(|e| Error::io("waiting for a member", &e))?;
        if n != VICTIM && !status.success() {
            return Err(Error::invalid(format!("member {n} has failed: {status}")));
        }
    }
    Ok(())
}

/// A process that ends with this one.
struct Guard(Child);

impl Drop for Guard {
    fn drop(&mut self) {
        // One that has ended cannot be killed.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn start(number: usize, place: &Path) -> Result<Guard> {
    let started = std::env::current_exe().and_then(|exe| {
        let mut c = Command::new(exe);
        c.args(std::env::args_os().skip(1)).env(MEMBER, number.to_string()).env(PLACE, place).spawn()
    });
    started.map(Guard).map_err(|e| Error::io("starting a member", &e))
}

fn member(me: usize, place: &Path) -> Result<()> {
    let comm = rustcomms::connect(CommOptions::new().name("elastic").dynamic().timeout(LIMIT))?;
    // Without members yet, and without rank: who is who is said by the lists below.
    let three = if me == NEWCOMER {
        comm
    } else {
        let four = form(1, &comm, me, &[0, 1, 2, 3], place)?;
        leave(&place.join(format!("running.{me}")), "")?;
        let gone = train(&four)?;
        let rest: Vec<usize> = (0..4).filter(|n| *n != gone).collect();
        form(2, &four, me, &rest, place)?
    };
    let all = form(3, &three, me, &[NEWCOMER, 0, 2, 3], place)?;
    if all.rank() == 0 {
        println!("elastic: generation {} has {} ranks, all right", all.generation(), all.size());
    }
    all.finalize(LIMIT)
}

/// Works until a member is lost; returns its rank.
fn train(comm: &Communicator) -> Result<usize> {
    let mut gradient = vec![1f32; 1 << 18];
    loop {
        if let Err(e) = comm.all_reduce(&mut gradient, op::Avg) {
            return match e.kind() {
                ErrorKind::PeerFailed { rank, .. } => Ok(*rank),
                _ => Err(e),
            };
        }
    }
}

/// A communicator of `members`, whose ranks are their places in the list. `attempt` names it: all say the same number.
fn form(attempt: u64, comm: &Communicator, me: usize, members: &[usize], place: &Path) -> Result<Communicator> {
    let at = |n: usize| -> PathBuf { place.join(format!("{attempt}.{n}")) };
    leave(&at(me), &comm.init_handle()?)?;
    let handles: Vec<String> = members.iter().map(|n| await_file(&at(*n))).collect::<Result<_>>()?;
    let new = comm.reconfigure(attempt, handles, LIMIT, &[])?;
    let mut sum = [me as u64];
    new.all_reduce(&mut sum, op::Sum)?;
    assert_eq!(members[new.rank()], me);
    assert_eq!(sum[0], members.iter().sum::<usize>() as u64);
    Ok(new)
}

/// Writes a file that is there at once or not at all.
fn leave(path: &Path, text: &str) -> Result<()> {
    let draft = path.with_extension(format!("draft{}", std::process::id()));
    let written = std::fs::write(&draft, text).and_then(|()| std::fs::rename(&draft, path));
    written.map_err(|e| Error::io("leaving a file", &e))
}

fn await_file(path: &Path) -> Result<String> {
    let until = Instant::now() + LIMIT;
    loop {
        match std::fs::read_to_string(path) {
            Ok(text) => return Ok(text),
            Err(_) if Instant::now() < until => std::thread::sleep(Duration::from_millis(2)),
            Err(e) => return Err(Error::io(format!("waiting for {}", path.display()), &e)),
        }
    }
}
