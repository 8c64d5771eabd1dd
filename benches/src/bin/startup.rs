//! How long ranks take from being started to the end of their first `all_reduce`, and what they take at rest.
//!
//! The time runs from the moment at which the last rank's program was executed to that at which the slowest rank has
//! the result. Memory is read after an `all_reduce` of 1 MiB and a barrier, from `/proc/self/smaps_rollup`: `private` is
//! what the rank alone uses, `pss` counts pages shared with other ranks by their share. What a link costs is the
//! difference between worlds that are connected fully and worlds that are not.
//!
//! `cargo run --release -p benches --bin startup [-- WORLD...]`

use std::process::{Child, Command, ExitCode, Stdio};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use benches::median_of;
use rustcomms::store::{TcpStore, TcpStoreServer, env};
use rustcomms::{CommOptions, Error, Result, Store, launch, op};

const ROUNDS: usize = 9;
const LIMIT: Duration = Duration::from_secs(120);
const EXECUTED: &str = "bench/executed";

fn main() -> Result<ExitCode> {
    if launch::is_rank() {
        return rank().map(|()| ExitCode::SUCCESS);
    }
    let mut worlds: Vec<usize> = std::env::args().skip(1).filter_map(|a| a.parse().ok()).collect();
    if worlds.is_empty() {
        worlds = vec![1, 2, 4, 8, 16, 64];
    }
    println!(
        "# from the last rank's exec to the end of the first all_reduce of 8 B on the slowest rank; {ROUNDS} rounds"
    );
    println!(
        "{:>6} {:>6} {:>10} {:>10} {:>12} {:>8} {:>12} {:>10} {:>12}",
        "world", "links", "median ms", "worst ms", "1 MiB ms", "rss KiB", "private KiB", "pss KiB", "KiB per link"
    );
    for world in worlds {
        let mut bare = None;
        for connect in ["auto", "full"] {
            let rounds = if world > 16 { 3 } else { ROUNDS };
            let runs = (0..rounds).map(|_| round(world, connect)).collect::<Result<Vec<_>>>()?;
            let of = |f: fn(&Run) -> f64| runs.iter().map(f).collect::<Vec<f64>>();
            let middle = median_of;
            let (first, links, private) = (of(|r| r.first), runs[0].links, middle(of(|r| r.private)));
            let slope = bare.filter(|(l, _)| *l < links).map(|(l, p): (f64, f64)| (private - p) / (links - l));
            println!(
                "{world:>6} {links:>6} {:>10.1} {:>10.1} {:>12.1} {:>8.0} {private:>12.0} {:>10.0} {:>12}",
                middle(first.clone()) * 1e3,
                first.iter().copied().fold(0.0, f64::max) * 1e3,
                middle(of(|r| r.long)) * 1e3,
                middle(of(|r| r.rss)),
                middle(of(|r| r.pss)),
                slope.map_or_else(|| "-".into(), |s| format!("{s:.1}")),
            );
            bare = Some((links, private));
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// What one run has measured: seconds, and KiB of the rank that has most.
struct Run {
    links: f64,
    first: f64,
    long: f64,
    rss: f64,
    private: f64,
    pss: f64,
}

fn round(world: usize, connect: &str) -> Result<Run> {
    let io = |e: std::io::Error| Error::io("starting the ranks", &e);
    let server = TcpStoreServer::bind("127.0.0.1:0")?;
    let program = std::env::current_exe().map_err(io)?;
    let mut ranks: Vec<Child> = Vec::new();
    for rank in 0..world {
        let child = Command::new(&program)
            .env(env::RANK, rank.to_string())
            .env(env::WORLD_SIZE, world.to_string())
            .env(env::STORE, server.local_addr().to_string())
            .env(env::RUN_ID, "startup")
            .env("RUSTCOMMS_CONNECT", connect)
            .stdout(if rank == 0 { Stdio::piped() } else { Stdio::null() })
            .spawn()
            .map_err(io)?;
        ranks.push(child);
    }
    // `spawn` returns when the program has been executed.
    let executed = now();
    let store = TcpStore::connect(server.local_addr(), LIMIT)?;
    store.set(EXECUTED, executed.to_string().as_bytes())?;
    let first = ranks.remove(0).wait_with_output().map_err(io)?;
    let text = String::from_utf8_lossy(&first.stdout).into_owned();
    for mut r in ranks {
        r.wait().map_err(io)?;
    }
    let v: Vec<f64> = text.split_whitespace().filter_map(|w| w.parse().ok()).collect();
    let [links, first, long, rss, private, pss] = v[..] else {
        return Err(Error::invalid(format!("rank 0 of a world of {world} has failed; it said: {text}")));
    };
    Ok(Run { links, first, long, rss, private, pss })
}

fn rank() -> Result<()> {
    let comm = rustcomms::connect(CommOptions::new().timeout(LIMIT).bootstrap_timeout(LIMIT))?;
    let mut x = [1f64];
    comm.all_reduce(&mut x[..], op::Sum)?;
    let done = now();
    assert!((x[0] - comm.size() as f64).abs() < f64::EPSILON, "a wrong sum: {}", x[0]);
    let mut y = vec![1f32; 1 << 18];
    let start = now();
    comm.all_reduce(&mut y, op::Sum)?;
    let long = now() - start;
    assert!(y.iter().all(|v| (*v - comm.size() as f32).abs() < f32::EPSILON), "a wrong sum");
    drop(y);
    comm.barrier()?;
    let [rss, private, pss] = memory();
    let links = std::fs::read_dir("/proc/self/fd").map_or(0, |d| d.filter_map(link_of).count());
    let mut worst = [done, long, rss, private, pss, links as u64];
    comm.all_reduce(&mut worst[..], op::Max)?;
    if comm.rank() == 0 {
        let store = TcpStore::connect(std::env::var(env::STORE).unwrap_or_default().as_str(), LIMIT)?;
        let executed: u64 = String::from_utf8_lossy(&store.get(EXECUTED, LIMIT)?).parse().unwrap_or(done);
        let seconds = |ns: u64| ns as f64 / 1e9;
        let [done, long, rss, private, pss, links] = worst;
        println!("{links} {} {} {rss} {private} {pss}", seconds(done.saturating_sub(executed)), seconds(long));
    }
    comm.finalize(LIMIT)
}

/// Connected sockets; the store's is one of them, and the listening one does not count much either.
fn link_of(entry: std::io::Result<std::fs::DirEntry>) -> Option<()> {
    let target = std::fs::read_link(entry.ok()?.path()).ok()?;
    target.to_string_lossy().starts_with("socket:").then_some(())
}

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_nanos() as u64)
}

/// Resident, private and proportional memory in KiB.
fn memory() -> [u64; 3] {
    let text = std::fs::read_to_string("/proc/self/smaps_rollup").unwrap_or_default();
    let field = |name: &str| {
        let line = text.lines().find_map(|l| l.strip_prefix(name));
        line.and_then(|l| l.split_whitespace().next()).and_then(|v| v.parse::<u64>().ok()).unwrap_or(0)
    };
    [field("Rss:"), field("Private_Dirty:") + field("Private_Clean:"), field("Pss:")]
}
