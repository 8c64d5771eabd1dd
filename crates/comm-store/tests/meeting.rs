//! Ranks in processes of their own, with the variables of launchers that tell no address.

mod common;

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpListener;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Barrier, Mutex};
use std::time::{Duration, Instant};

use comm_core::Store;
use comm_store::{discover, meeting};
use common::{LONG, Shared};
use rustix::io::{FdFlags, fcntl_setfd};

/// Set in the processes that are ranks.
const RANK: &str = "MEETING_TEST_RANK";

/// Not a test of its own: what the ranks of the others do.
#[test]
fn rank() {
    if std::env::var_os(RANK).is_none() {
        return;
    }
    let place = discover().unwrap();
    let until = Instant::now() + LONG;
    let met = meeting::open(&place, place.rank, until, &meeting::Means::default()).unwrap();
    // A second time is the same place.
    let again = meeting::open(&place, place.rank, until, &meeting::Means::default()).unwrap();
    assert_eq!((again.store.addr(), &again.run), (met.store.addr(), &met.run));
    met.store.set(&format!("{}/{}", met.run, place.rank), b"").unwrap();
    let all: Vec<String> = (0..place.size).map(|r| format!("{}/{r}", met.run)).collect();
    met.store.wait(&all.iter().map(String::as_str).collect::<Vec<_>>(), LONG).unwrap();
    println!("met at {} as {}", met.store.addr(), met.run);
    // Rank 0's process is where the store lives.
    let left = met.store.add("left", 1).unwrap();
    if left == place.size as i64 {
        met.store.set("all left", b"").unwrap();
    }
    if place.rank == 0 {
        met.store.wait(&["all left"], LONG).unwrap();
    }
}

/// A rank with these variables and no others of a launcher.
fn start(vars: &[(&str, String)]) -> Child {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "rank", "--nocapture", "--test-threads=1"]).env_clear().env(RANK, "1");
    for name in ["PATH", "TMPDIR", "LD_LIBRARY_PATH"] {
        command.envs(std::env::var_os(name).map(|v| (name, v)));
    }
    command.envs(vars.iter().map(|(k, v)| (*k, v)));
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

/// Waits for all, and returns where each says that it met.
fn ended(ranks: Vec<Child>) -> Vec<String> {
    let until = Instant::now() + 2 * LONG;
    let mut out = Vec::new();
    for (i, mut rank) in ranks.into_iter().enumerate() {
        while rank.try_wait().unwrap().is_none() {
            if Instant::now() > until {
                let _ = rank.kill();
                break;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        let got = rank.wait_with_output().unwrap();
        let text = String::from_utf8_lossy(&got.stdout).into_owned();
        assert!(got.status.success(), "rank {i}: {text} {}", String::from_utf8_lossy(&got.stderr));
        let met = text.lines().find_map(|l| l.split_once("met at ")).map(|(_, m)| m.to_owned());
        out.push(met.unwrap_or_else(|| panic!("rank {i}: {text}")));
    }
    out
}

fn openmpi(dir: &Shared, job: &str, rank: usize, size: usize) -> Child {
    start(&[
        ("OMPI_COMM_WORLD_RANK", rank.to_string()),
        ("OMPI_COMM_WORLD_SIZE", size.to_string()),
        ("OMPI_COMM_WORLD_LOCAL_RANK", rank.to_string()),
        ("OMPI_COMM_WORLD_LOCAL_SIZE", size.to_string()),
        ("PMIX_NAMESPACE", job.into()),
        ("XDG_RUNTIME_DIR", dir.0.display().to_string()),
    ])
}

fn files(dir: &Shared) -> usize {
    let below = std::fs::read_dir(&dir.0).unwrap().next().unwrap().unwrap().path();
    std::fs::read_dir(below).unwrap().count()
}

#[test]
fn ranks_on_one_host_meet_through_a_file_and_jobs_stay_apart() {
    let dir = Shared::new();
    // Rank 0 last, and two jobs at once; then one of the same name again.
    let jobs: Vec<Vec<Child>> =
        ["job@1", "job@2"].map(|job| (0..4).rev().map(|rank| openmpi(&dir, job, rank, 4)).collect()).into();
    let met: Vec<Vec<String>> = jobs.into_iter().map(ended).collect();
    for job in &met {
        assert!(job.iter().all(|m| *m == job[0] && m.starts_with("127.0.0.1:")), "{job:?}");
    }
    assert_ne!(met[0][0], met[1][0]);
    assert_eq!(files(&dir), 0);
    let again = ended((0..3).map(|rank| openmpi(&dir, "job@1", rank, 3)).collect());
    assert!(again.iter().all(|m| *m == again[0]), "{again:?}");
    assert_eq!(files(&dir), 0);
}

#[test]
fn a_job_whose_rank_0_was_killed_does_not_mislead_the_next_of_its_name() {
    let dir = Shared::new();
    let mut dead = openmpi(&dir, "job", 0, 2);
    common::eventually("rank 0 published", || {
        std::fs::read_dir(&dir.0).unwrap().next().is_some_and(|d| {
            std::fs::read_dir(d.unwrap().path())
                .unwrap()
                .any(|f| !f.unwrap().file_name().to_string_lossy().starts_with('.'))
        })
    });
    dead.kill().unwrap();
    dead.wait().unwrap();
    assert_eq!(files(&dir), 1);
    let late = openmpi(&dir, "job", 1, 2);
    std::thread::sleep(Duration::from_millis(50));
    let met = ended(vec![openmpi(&dir, "job", 0, 2), late]);
    assert_eq!(met[0], met[1]);
    assert_eq!(files(&dir), 0);
}

/// Answers one rank as Hydra does, until it hangs up; returns the commands.
fn pmi(
    stream: impl Read,
    mut out: impl Write,
    values: &Mutex<HashMap<String, String>>,
    barrier: &Barrier,
) -> Vec<String> {
    let mut asked = Vec::new();
    for line in BufReader::new(stream).lines() {
        let Ok(line) = line else { break };
        let words: HashMap<&str, &str> = line.split_whitespace().filter_map(|w| w.split_once('=')).collect();
        asked.push(words["cmd"].to_owned());
        let answer = match words["cmd"] {
            "initack" => "cmd=initack\ncmd=set size=3\ncmd=set rank=0\ncmd=set debug=0".to_owned(),
            "get_my_kvsname" => "cmd=my_kvsname kvsname=kvs".to_owned(),
            "get_maxes" => "cmd=maxes kvsname_max=256 keylen_max=64 vallen_max=1024".to_owned(),
            "put" => {
                values.lock().unwrap().insert(words["key"].to_owned(), words["value"].to_owned());
                "cmd=put_result rc=0 msg=success".to_owned()
            }
            "barrier_in" => {
                barrier.wait();
                "cmd=barrier_out".to_owned()
            }
            "get" => format!("cmd=get_result rc=0 msg=success value={}", values.lock().unwrap()[words["key"]]),
            "finalize" => "cmd=finalize_ack".to_owned(),
            other => panic!("{other}"),
        };
        out.write_all(format!("{answer}\n").as_bytes()).unwrap();
    }
    asked
}

/// Three ranks; `local` of them are on this host, says the launcher.
fn through_pmi(by_port: bool, local: usize) -> (Vec<String>, Vec<Vec<String>>) {
    let (values, barrier) = (Arc::new(Mutex::default()), Arc::new(Barrier::new(3)));
    let (mut ranks, mut servers) = (Vec::new(), Vec::new());
    for rank in 0..3 {
        let mut vars = vec![
            ("PMI_SIZE", "3".to_owned()),
            ("MPI_LOCALRANKID", (rank % local).to_string()),
            ("MPI_LOCALNRANKS", local.to_string()),
        ];
        let (values, barrier) = (Arc::clone(&values), Arc::clone(&barrier));
        if by_port {
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            vars.extend([("PMI_PORT", listener.local_addr().unwrap().to_string()), ("PMI_ID", rank.to_string())]);
            ranks.push(start(&vars));
            servers.push(std::thread::spawn(move || {
                let (stream, _) = listener.accept().unwrap();
                pmi(stream.try_clone().unwrap(), stream, &values, &barrier)
            }));
        } else {
            let (ours, theirs) = UnixStream::pair().unwrap();
            fcntl_setfd(&theirs, FdFlags::empty()).unwrap();
            vars.extend([("PMI_FD", theirs.as_raw_fd().to_string()), ("PMI_RANK", rank.to_string())]);
            ranks.push(start(&vars));
            drop(theirs);
            servers.push(std::thread::spawn(move || pmi(ours.try_clone().unwrap(), ours, &values, &barrier)));
        }
    }
    (ended(ranks), servers.into_iter().map(|s| s.join().unwrap()).collect())
}

#[test]
fn ranks_meet_through_the_launchers_server_and_say_goodbye_at_exit() {
    for (by_port, local) in [(false, 3), (false, 2), (true, 3)] {
        let (met, asked) = through_pmi(by_port, local);
        assert!(met.iter().all(|m| *m == met[0]), "{met:?}");
        assert!(local < 3 || met[0].starts_with("127.0.0.1:"), "nobody else needs to reach it: {met:?}");
        for commands in &asked {
            // One conversation for any number of meetings.
            assert_eq!(commands.iter().filter(|c| *c == "barrier_in").count(), 1, "{commands:?}");
            assert_eq!(commands.last().unwrap(), "finalize", "{commands:?}");
            assert!(!commands.iter().any(|c| c == "init"), "{commands:?}");
        }
    }
}
