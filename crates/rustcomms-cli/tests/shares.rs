//! What `rustcomms run` gives each rank of CPUs, threads and GPUs.

mod common;

use std::collections::BTreeSet;

use common::{Launcher, lines, run};
use rustix::thread::{CpuSet, sched_setaffinity};

/// CPUs that this process may use, as the kernel writes them.
fn allowed() -> BTreeSet<usize> {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let list = status.lines().find_map(|l| l.strip_prefix("Cpus_allowed_list:")).unwrap().trim().to_owned();
    let number = |t: &str| t.parse::<usize>().unwrap();
    list.split(',')
        .flat_map(|part| {
            let (a, b) = part.split_once('-').unwrap_or((part, part));
            number(a)..=number(b)
        })
        .collect()
}

const SHOW: &str = "grep Cpus_allowed_list: /proc/self/status | tr -d ' \\t'; echo omp=$OMP_NUM_THREADS";

#[test]
fn ranks_are_bound_to_cores() {
    let all = allowed();
    let (Some(first), Some(second)) = (all.first(), all.iter().nth(1)) else { return };
    // The launcher itself may use two CPUs, which may be threads of one core.
    let mut two = CpuSet::new();
    [first, second].into_iter().for_each(|c| two.set(*c));
    let start = move || {
        sched_setaffinity(None, &two).unwrap();
        Launcher::start(&["-n", "2", "--bind", "core", "-v"], SHOW)
    };
    // A thread of its own, because what it starts inherits its CPUs.
    let ended = std::thread::spawn(start).join().unwrap().end();
    assert_eq!(ended.code(), 0, "{}", ended.err);
    let [a, b] = [first, second].map(usize::to_string);
    let want = [
        format!("[0] Cpus_allowed_list:{a}"),
        format!("[1] Cpus_allowed_list:{b}"),
        "[0] omp=1".into(),
        "[1] omp=1".into(),
    ];
    assert_eq!(ended.lines(), lines(&want.iter().map(String::as_str).collect::<Vec<_>>()));
    for (rank, cpu) in [(0, &a), (1, &b)] {
        let text = format!("rustcomms run: rank {rank}: bound to CPUs {cpu}, OMP_NUM_THREADS=1\n");
        assert!(ended.err.contains(&text), "{}", ended.err);
    }
}

#[test]
fn lists_and_nodes() {
    let first = allowed().first().copied().unwrap().to_string();
    // More ranks than CPUs can share one.
    let ended = run(&["-n", "3", "--bind", &format!("list:{first}/{first}/{first}")], SHOW).fine();
    let want: Vec<String> =
        (0..3).flat_map(|r| [format!("[{r}] Cpus_allowed_list:{first}"), format!("[{r}] omp=1")]).collect();
    assert_eq!(ended.lines(), lines(&want.iter().map(String::as_str).collect::<Vec<_>>()));
    // A NUMA node is at most all.
    let ended = run(&["-n", "1", "--bind", "numa"], "grep Cpus_allowed_list: /proc/self/status").fine();
    assert!(String::from_utf8(ended.out).unwrap().starts_with("[0] Cpus_allowed_list:"));
    // Nothing is bound unless it is asked for.
    let ours = std::fs::read_to_string("/proc/self/status").unwrap();
    let ours = ours.lines().find(|l| l.starts_with("Cpus_allowed_list:")).unwrap();
    let ended = run(&["-n", "1"], "grep Cpus_allowed_list: /proc/self/status").fine();
    assert_eq!(ended.lines(), lines(&[&format!("[0] {ours}")]));
}

#[test]
fn threads_of_openmp() {
    let omp = |args: &[&str], set: Option<&str>| {
        let launcher = Launcher::with(args, &["/bin/sh", "-c", "echo ${OMP_NUM_THREADS-unset}"], |c| {
            c.envs(set.map(|n| ("OMP_NUM_THREADS", n)));
        });
        String::from_utf8(launcher.end().fine().out).unwrap()
    };
    assert_eq!(omp(&["-n", "1", "--omp-threads", "7"], Some("3")), "[0] 7\n");
    assert_eq!(omp(&["-n", "1", "--omp-threads", "auto"], Some("3")), "[0] 3\n");
    assert_eq!(omp(&["-n", "1", "--omp-threads", "keep"], Some("3")), "[0] 3\n");
    assert_eq!(omp(&["-n", "1", "--omp-threads", "keep"], None), "[0] unset\n");
    let all = std::thread::available_parallelism().unwrap();
    assert_eq!(omp(&["-n", "1", "--omp-threads", "auto"], None), format!("[0] {all}\n"));
}

#[test]
fn gpus_are_shared_out_in_every_generation() {
    let script = "echo $CUDA_VISIBLE_DEVICES $HIP_VISIBLE_DEVICES ${ROCR_VISIBLE_DEVICES-unset}; \
        [ $RUSTCOMMS_RESTART_COUNT = 1 ] || exit 3";
    let args = ["-n", "2", "--gpus-per-node", "4", "--max-restarts", "1", "--grace", "9"];
    let ended = Launcher::with(&args, &["/bin/sh", "-c", script], |c| {
        c.env_remove("HIP_VISIBLE_DEVICES").env_remove("ROCR_VISIBLE_DEVICES");
        c.env("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b,MIG-c,3,4");
    })
    .end();
    assert_eq!(ended.code(), 0, "{}", ended.err);
    let out = String::from_utf8(ended.out).unwrap();
    let mut got: Vec<&str> = out.lines().collect();
    got.sort_unstable();
    let [a, b] = ["[0] GPU-a,GPU-b 0,1 unset", "[1] MIG-c,3 2,3 unset"];
    assert_eq!(got, [a, a, b, b]);
}

#[test]
fn mistakes_are_explained() {
    for (args, text) in [
        (&["-n", "2", "--bind", "socket"][..], "it must be none, core, numa, or list:"),
        (&["-n", "2", "--bind", "list:0"], "--bind names CPUs for 1 ranks, but there are 2"),
        (&["-n", "1", "--bind", "list:1023"], "CPUs 1023 that this process may not use"),
        (&["-n", "1", "--omp-threads", "0"], "a number from 1 to 65536, auto or keep"),
        (&["-n", "2", "--gpus-per-node", "3"], "2 ranks cannot share 3 GPUs evenly"),
        (&["-n", "2", "--gpus-per-node", "0"], "--gpus-per-node must be at least 1"),
        (&["-n", "1", "--max-restarts", "-1"], "--max-restarts"),
    ] {
        let ended = run(args, "echo started");
        assert_eq!((ended.code(), &*ended.out), (2, &b""[..]), "{args:?}: {}", ended.err);
        assert!(ended.err.contains(text), "{args:?}: {}", ended.err);
    }
}
