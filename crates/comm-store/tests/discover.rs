//! Environments as the launchers make them, alone, inside each other, incomplete and wrong.

use comm_core::{ErrorKind, Result};
use comm_store::meeting::{Meeting, PmiServer};
use comm_store::{LAUNCHERS, Place, discover_as_in, discover_in};

/// Reads `NAME=value` pairs, separated by white space, later ones over earlier ones.
fn var(text: &str) -> impl Fn(&str) -> Option<String> {
    let pairs: Vec<(String, String)> = text
        .split_whitespace()
        .map(|pair| pair.split_once('=').map(|(k, v)| (k.to_owned(), v.to_owned())).unwrap())
        .collect();
    move |name| pairs.iter().rev().find(|(k, _)| k == name).map(|(_, v)| v.clone())
}

fn with(text: &str) -> Result<Place> {
    discover_in(&var(text))
}

/// The error's text.
fn refused(text: &str) -> String {
    let e = with(text).unwrap_err();
    assert!(matches!(e.kind(), ErrorKind::InvalidArgument { .. }), "{e}");
    e.to_string()
}

/// `method rank/size local/locals node/nodes store host? run`, with `-` for what is not told.
fn line(p: &Place) -> String {
    let show = |n: Option<usize>| n.map_or("-".to_owned(), |n| n.to_string());
    format!(
        "{} {}/{} {}/{} {}/{} {} {} {}",
        p.method,
        p.rank,
        p.size,
        show(p.local_rank),
        show(p.local_size),
        show(p.node),
        show(p.nodes),
        p.store.as_deref().unwrap_or("-"),
        if p.rank0_hosts { "rank0" } else { "-" },
        p.run
    )
}

const SALLOC: &str = "SLURM_JOB_ID=41234 SLURM_JOBID=41234 SLURM_JOB_NODELIST=gnode[10,20-22] SLURM_NODELIST=gnode[10,20-22] \
    SLURM_NNODES=4 SLURM_JOB_NUM_NODES=4 SLURM_TASKS_PER_NODE=4(x4) SLURM_NTASKS=16 SLURM_NPROCS=16 SLURM_CLUSTER_NAME=ada";
const SBATCH: &str = "SLURM_JOB_ID=41234 SLURM_JOB_NODELIST=gnode[10,20-22] SLURM_NNODES=4 SLURM_TASKS_PER_NODE=4(x4) \
    SLURM_NTASKS=16 SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NODEID=0 SLURM_GTIDS=0 SLURMD_NODENAME=gnode10";
/// Task 9 of `srun -N 3 -n 11` in that allocation.
const SRUN: &str = "SLURM_STEP_ID=3 SLURM_STEPID=3 SLURM_PROCID=9 SLURM_LOCALID=1 SLURM_NODEID=2 SLURM_STEP_NUM_TASKS=11 \
    SLURM_STEP_NUM_NODES=3 SLURM_STEP_TASKS_PER_NODE=4(x2),3 SLURM_STEP_NODELIST=gnode[10,20-21] SLURMD_NODENAME=gnode21 \
    SLURM_LAUNCH_NODE_IPADDR=10.0.0.9 SLURM_SRUN_COMM_HOST=10.0.0.9 SLURM_NTASKS_PER_NODE=4";
const TORCH: &str = "RANK=5 WORLD_SIZE=8 LOCAL_RANK=1 LOCAL_WORLD_SIZE=4 GROUP_RANK=1 GROUP_WORLD_SIZE=2 ROLE_RANK=5 \
    ROLE_WORLD_SIZE=8 ROLE_NAME=default MASTER_ADDR=h0 MASTER_PORT=29500 TORCHELASTIC_RUN_ID=j7 \
    TORCHELASTIC_RESTART_COUNT=2 TORCHELASTIC_MAX_RESTARTS=3 TORCHELASTIC_USE_AGENT_STORE=True OMP_NUM_THREADS=1";
const OMPI: &str = "OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=2 \
    OMPI_COMM_WORLD_NODE_RANK=7 OMPI_UNIVERSE_SIZE=8 PMIX_NAMESPACE=prterun-h0-77@1 PMIX_RANK=3";
const HYDRA: &str = "PMI_RANK=1 PMI_SIZE=6 PMI_FD=5 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=3";
const MV2: &str = "MV2_COMM_WORLD_RANK=2 MV2_COMM_WORLD_SIZE=4 MV2_COMM_WORLD_LOCAL_RANK=0 MV2_COMM_WORLD_LOCAL_SIZE=2";
const PALS: &str =
    "PALS_RANKID=13 PALS_LOCAL_RANKID=1 PALS_LOCAL_SIZE=12 PALS_NODEID=1 PALS_DEPTH=8 PALS_APID=ab-cd PMIX_RANK=13";
const MASTER: &str = "MASTER_ADDR=h0 MASTER_PORT=29500";

#[test]
fn each_launcher() {
    for (name, text, want) in [
        ("nothing", String::new(), "single 0/1 -/- -/- - - run"),
        (
            "rustcomms run",
            "RUSTCOMMS_RANK=1 RUSTCOMMS_WORLD_SIZE=4 RUSTCOMMS_LOCAL_RANK=1 RUSTCOMMS_LOCAL_WORLD_SIZE=2 \
             RUSTCOMMS_NODE_RANK=0 RUSTCOMMS_NNODES=2 RUSTCOMMS_STORE=h:1 RUSTCOMMS_RUN_ID=r9"
                .into(),
            "rustcomms 1/4 1/2 0/2 h:1 - r9",
        ),
        (
            "ours by hand",
            format!("RUSTCOMMS_RANK=1 RUSTCOMMS_WORLD_SIZE=4 {MASTER}"),
            "rustcomms 1/4 -/- -/- h0:29500 rank0 run",
        ),
        ("torchrun", TORCH.into(), "torchrun 5/8 1/4 1/2 h0:29500 - j7.2"),
        (
            "torch by hand",
            "RANK=2 WORLD_SIZE=3 MASTER_ADDR=::1 MASTER_PORT=29500".into(),
            "torchrun 2/3 -/- -/- [::1]:29500 rank0 torchrun.0",
        ),
        ("srun", format!("{SALLOC} {SRUN}"), "slurm 9/11 1/3 2/3 gnode10:21234 rank0 41234.3"),
        (
            "srun without a list",
            format!("{SRUN} SLURM_JOB_ID=7 SLURM_STEP_NODELIST="),
            "slurm 9/11 1/3 2/3 10.0.0.9:20007 rank0 7.3",
        ),
        ("srun, address by hand", format!("{SALLOC} {SRUN} {MASTER}"), "slurm 9/11 1/3 2/3 h0:29500 rank0 41234.3"),
        (
            "srun, host by hand",
            format!("{SALLOC} {SRUN} MASTER_ADDR=ib0"),
            "slurm 9/11 1/3 2/3 ib0:21234 rank0 41234.3",
        ),
        ("srun, port by hand", format!("{SALLOC} {SRUN} MASTER_PORT=5"), "slurm 9/11 1/3 2/3 gnode10:5 rank0 41234.3"),
        ("srun, store by hand", format!("{SALLOC} {SRUN} RUSTCOMMS_STORE=s:1"), "slurm 9/11 1/3 2/3 s:1 - 41234.3"),
        ("mpirun", format!("{OMPI} {MASTER}"), "openmpi 3/4 1/2 -/- h0:29500 rank0 prterun-h0-77@1"),
        ("hydra", format!("{HYDRA} {MASTER}"), "pmi 1/6 1/3 -/- h0:29500 rank0 pmi"),
        ("mpirun_rsh", format!("{MV2} {MASTER}"), "mvapich 2/4 0/2 -/- h0:29500 rank0 mvapich"),
        ("pals", format!("{PALS} {MASTER} WORLD_SIZE=24"), "pals 13/24 1/12 1/- h0:29500 rank0 ab-cd"),
        (
            "pals with pmi",
            format!("{PALS} {MASTER} PMI_RANK=13 PMI_SIZE=24"),
            "pmi 13/24 1/12 1/- h0:29500 rank0 ab-cd",
        ),
        (
            "indexed job",
            format!("JOB_COMPLETION_INDEX=2 WORLD_SIZE=3 {MASTER}"),
            "kubernetes 2/3 -/- -/- h0:29500 rank0 kubernetes",
        ),
        (
            "indexed job, our size",
            "JOB_COMPLETION_INDEX=2 RUSTCOMMS_WORLD_SIZE=3 RUSTCOMMS_STORE=s:9".into(),
            "kubernetes 2/3 -/- -/- s:9 - kubernetes",
        ),
        (
            "operator",
            format!("RANK=0 WORLD_SIZE=2 JOB_COMPLETION_INDEX=0 {MASTER}"),
            "torchrun 0/2 -/- -/- h0:29500 rank0 torchrun.0",
        ),
        (
            "one host",
            format!("{OMPI} OMPI_COMM_WORLD_LOCAL_RANK=3 OMPI_COMM_WORLD_LOCAL_SIZE=4"),
            "openmpi 3/4 3/4 0/1 - rank0 prterun-h0-77@1",
        ),
        ("run id by hand", format!("{OMPI} RUSTCOMMS_RUN_ID=x {MASTER}"), "openmpi 3/4 1/2 -/- h0:29500 rank0 x"),
        (
            "rustcomms run, restarted",
            "RUSTCOMMS_RANK=1 RUSTCOMMS_WORLD_SIZE=4 RUSTCOMMS_STORE=h:1 RUSTCOMMS_RUN_ID=r9.2 RUSTCOMMS_RESTART_COUNT=2 \
             TORCHELASTIC_RUN_ID=r9 TORCHELASTIC_RESTART_COUNT=2"
                .into(),
            "rustcomms 1/4 -/- -/- h:1 - r9.2",
        ),
    ] {
        let place = with(&text).unwrap_or_else(|e| panic!("{name}: {e}"));
        assert_eq!(line(&place), want, "{name}: {:?}", place.why);
        assert!(LAUNCHERS.contains(&place.method) && !place.why.is_empty(), "{name}");
        // Asked for by name, it reads the same.
        let forced = discover_as_in(place.method, &var(&text)).unwrap();
        assert_eq!(line(&forced), want, "{name}");
    }
}

#[test]
fn the_innermost_launcher_decides() {
    for (name, text, want, because) in [
        ("sbatch shell", SBATCH.into(), "single 0/1", "not a step"),
        ("salloc shell", SALLOC.into(), "single 0/1", "not a step"),
        ("batch step", format!("{SBATCH} SLURM_STEP_ID=4294967291"), "single 0/1", "not a step"),
        ("interactive step", format!("{SALLOC} SLURM_PROCID=0 SLURM_STEP_ID=4294967290"), "single 0/1", "not a step"),
        ("mpirun inside sbatch", format!("{SBATCH} {OMPI}"), "openmpi 3/4", "openmpi decides"),
        // The daemons of mpirun are a step of their own, whose variables the ranks inherit.
        (
            "mpirun whose daemons srun started",
            format!("{SBATCH} {SRUN} {OMPI}"),
            "openmpi 3/4",
            "slurm (rank 9 of 11) is not used",
        ),
        (
            "hydra whose proxies srun started",
            format!("{SBATCH} {SRUN} {HYDRA}"),
            "pmi 1/6",
            "slurm (rank 9 of 11) is not used",
        ),
        ("srun inside salloc", format!("{SALLOC} {SRUN}"), "slurm 9/11", "slurm decides"),
        ("srun --mpi=pmi2", format!("{SALLOC} {SRUN} PMI_RANK=9 PMI_SIZE=11"), "slurm 9/11", "srun itself set"),
        (
            "srun on Cray",
            format!("{SALLOC} {SRUN} PMI_RANK=9 PMI_SIZE=11 PALS_RANKID=9"),
            "slurm 9/11",
            "pals (rank 9 of 11) is not used",
        ),
        ("torchrun under srun", format!("{SALLOC} {SRUN} {TORCH}"), "torchrun 5/8", "slurm (rank 9 of 11) is not used"),
        ("torchrun under mpirun", format!("{OMPI} {TORCH}"), "torchrun 5/8", "openmpi (rank 3 of 4) is not used"),
        (
            "ours under torchrun",
            format!("{TORCH} RUSTCOMMS_RANK=0 RUSTCOMMS_WORLD_SIZE=2"),
            "rustcomms 0/2",
            "torchrun (rank 5 of 8) is not used",
        ),
        // Scripts export these for programs that read SLURM_PROCID themselves.
        (
            "WORLD_SIZE exported, srun",
            format!("{SRUN} SLURM_JOB_ID=1 WORLD_SIZE=11"),
            "slurm 9/11",
            "WORLD_SIZE is set but RANK is not",
        ),
        ("a bad loser", format!("{OMPI} SLURM_STEP_ID=x"), "openmpi 3/4", "SLURM_STEP_ID is 'x'"),
        ("auto", format!("{OMPI} RUSTCOMMS_LAUNCHER=auto"), "openmpi 3/4", "openmpi decides"),
        ("forced", format!("{OMPI} {SALLOC} {SRUN} RUSTCOMMS_LAUNCHER=slurm"), "slurm 9/11", "asked for"),
        (
            "forced to be alone",
            format!("{OMPI} JOB_COMPLETION_INDEX=4 RUSTCOMMS_LAUNCHER=single"),
            "single 0/1",
            "asked for",
        ),
    ] {
        let place = with(&text).unwrap_or_else(|e| panic!("{name}: {e}"));
        assert!(line(&place).starts_with(&format!("{want} ")), "{name}: {place:?}");
        assert!(place.why.iter().any(|w| w.contains(because)), "{name}: {:?}", place.why);
    }
}

#[test]
fn what_is_incomplete_or_wrong_is_named() {
    for (text, want) in [
        ("RUSTCOMMS_RANK=1", "RUSTCOMMS_RANK is set but RUSTCOMMS_WORLD_SIZE is not"),
        ("RUSTCOMMS_WORLD_SIZE=1", "RUSTCOMMS_WORLD_SIZE is set but RUSTCOMMS_RANK is not"),
        ("RUSTCOMMS_RANK=1 RUSTCOMMS_WORLD_SIZE=", "RUSTCOMMS_WORLD_SIZE is not"),
        ("RUSTCOMMS_RANK=1 RANK=0 WORLD_SIZE=1", "RUSTCOMMS_WORLD_SIZE is not"),
        ("RANK=0", "RANK is set but WORLD_SIZE is not"),
        ("RANK=x WORLD_SIZE=2", "RANK is 'x'"),
        ("RANK=-1 WORLD_SIZE=2", "RANK is '-1'"),
        ("RANK=0 WORLD_SIZE=99999999999999999999999", "WORLD_SIZE is '9"),
        ("RANK=2 WORLD_SIZE=2", "rank 2 is not below the world size 2"),
        ("RANK=0 WORLD_SIZE=0", "not below"),
        ("RANK=0 WORLD_SIZE=2 MASTER_ADDR=h MASTER_PORT=65536", "MASTER_PORT is '65536'"),
        ("RANK=0 WORLD_SIZE=2 MASTER_ADDR=h MASTER_PORT=0", "MASTER_PORT is '0'"),
        ("OMPI_COMM_WORLD_RANK=1", "OMPI_COMM_WORLD_SIZE is not"),
        ("OMPI_COMM_WORLD_SIZE=4 PMI_RANK=0 PMI_SIZE=2", "OMPI_COMM_WORLD_RANK is not"),
        ("OMPI_COMM_WORLD_RANK=4 OMPI_COMM_WORLD_SIZE=4", "not below the world size 4"),
        (
            "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=one",
            "OMPI_COMM_WORLD_LOCAL_RANK is 'one'",
        ),
        ("PMI_RANK=1", "PMI_SIZE is not"),
        ("MV2_COMM_WORLD_RANK=1", "MV2_COMM_WORLD_SIZE is not"),
        ("PALS_RANKID=0 PALS_LOCAL_SIZE=12", "set WORLD_SIZE to the -n of mpiexec"),
        ("JOB_COMPLETION_INDEX=1", "set WORLD_SIZE in the manifest"),
        ("SLURM_STEP_ID=0 SLURM_NTASKS=2", "SLURM_PROCID is not"),
        ("SLURM_STEP_ID=0 SLURM_PROCID=1", "SLURM_STEP_NUM_TASKS is not"),
        ("SLURM_STEP_ID=zero", "SLURM_STEP_ID is 'zero'"),
        ("SLURM_STEP_ID=0 SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_STEP_NODELIST=a[", "SLURM_STEP_NODELIST is 'a['"),
        ("SLURM_STEP_ID=0 SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_STEP_NODELIST=a[0-9999999]", "set MASTER_ADDR"),
        (
            "SLURM_STEP_ID=0 SLURM_PROCID=1 SLURM_NTASKS=2 PMI_RANK=0 PMI_SIZE=2",
            "set RUSTCOMMS_LAUNCHER to pmi or slurm",
        ),
        (
            "RUSTCOMMS_LAUNCHER=lsf",
            "there is no launcher 'lsf'; known are auto, rustcomms, torchrun, openmpi, pmi, slurm, mvapich, pals",
        ),
        ("RUSTCOMMS_LAUNCHER=slurm SLURM_JOB_ID=4", "SLURM_STEP_ID is not set"),
        ("RUSTCOMMS_LAUNCHER=slurm RANK=0 WORLD_SIZE=1", "start the ranks with srun"),
        ("RUSTCOMMS_LAUNCHER=torchrun RANK=0", "WORLD_SIZE is not"),
    ] {
        let e = refused(text);
        assert!(e.contains(want), "{text}: {e}");
    }
    for name in LAUNCHERS.iter().filter(|name| **name != "single") {
        let e = discover_as_in(name, &var("")).unwrap_err().to_string();
        assert!(e.contains(name) && e.contains(" not set"), "{e}");
    }
    assert!(discover_as_in("Slurm", &var("")).unwrap_err().to_string().contains("no launcher 'Slurm'"));
}

#[test]
fn what_only_informs_does_not_stop_a_run() {
    for (text, want, because) in [
        (
            format!("{SRUN} SLURM_JOB_ID=1 SLURM_STEP_TASKS_PER_NODE=4(y2)"),
            "slurm 9/11 1/- 2/3",
            "SLURM_STEP_TASKS_PER_NODE is ignored",
        ),
        (
            format!("{SRUN} SLURM_JOB_ID=1 SLURM_STEP_TASKS_PER_NODE=4(x2)"),
            "slurm 9/11 1/- 2/3",
            "make 8 tasks, the step has 11",
        ),
        (format!("{SRUN} {MASTER} SLURM_STEP_NODELIST=a["), "slurm 9/11 1/3 2/3", "SLURM_STEP_NODELIST is ignored"),
        (
            format!("{SRUN} SLURM_JOB_ID=1 SLURM_STEP_NUM_NODES=2"),
            "slurm 9/11 1/3 -/2",
            "the number of this host is ignored",
        ),
        (
            "RANK=3 WORLD_SIZE=4 LOCAL_RANK=3 LOCAL_WORLD_SIZE=1".into(),
            "torchrun 3/4 3/- -/-",
            "ranks on this host are ignored",
        ),
        ("RANK=3 WORLD_SIZE=4 LOCAL_WORLD_SIZE=9".into(), "torchrun 3/4 -/- -/-", "ranks on this host are ignored"),
    ] {
        let place = with(&text).unwrap();
        assert!(line(&place).starts_with(&format!("{want} ")), "{place:?}");
        assert!(place.why.iter().any(|w| w.contains(because)), "{:?}", place.why);
    }
}

#[test]
fn what_torchrun_does_not_number_is_told() {
    for (more, want) in [
        ("", Some("j7")),
        ("GROUP_WORLD_SIZE=", Some("j7")),
        ("RUSTCOMMS_RUN_ID=x", Some("x")),
        ("GROUP_WORLD_SIZE=1 GROUP_RANK=0", None),
        ("TORCHELASTIC_USE_AGENT_STORE=False", Some("j7")),
        ("TORCHELASTIC_RESTART_COUNT=", None),
        ("RANK=0 WORLD_SIZE=1 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1", None),
    ] {
        let place = with(&format!("{TORCH} {more}")).unwrap();
        assert_eq!(place.unnumbered.as_deref(), want, "{more}: {place:?}");
        assert_eq!(place.why.iter().any(|w| w.contains("agree in the store")), want.is_some(), "{:?}", place.why);
    }
    assert_eq!(with(OMPI).unwrap().unnumbered, None);
}

#[test]
fn without_an_address_the_error_says_what_to_set() {
    let one_host =
        with(&format!("{HYDRA} PMI_FD= MPI_LOCALNRANKS=6")).unwrap().require_meeting().unwrap_err().to_string();
    for part in ["pmi tells", "the 6 ranks", "MASTER_ADDR=127.0.0.1", "RUSTCOMMS_STORE"] {
        assert!(one_host.contains(part), "{one_host}");
    }
    let several = with(OMPI).unwrap();
    assert!(several.why.iter().any(|w| w.contains("nothing tells where the ranks meet")), "{:?}", several.why);
    let several = several.require_meeting().unwrap_err().to_string();
    assert!(several.contains("the host of rank 0") && !several.contains("127.0.0.1"), "{several}");
    assert_eq!(with(TORCH).unwrap().require_store().unwrap(), "h0:29500");
}

/// What the error advises leads to a meeting.
#[test]
fn on_one_host_the_error_says_how_to_meet_without_an_address() {
    for (text, told) in [
        ("RUSTCOMMS_RANK=1 RUSTCOMMS_WORLD_SIZE=4", Some("RUSTCOMMS_LOCAL_WORLD_SIZE=4")),
        ("RUSTCOMMS_RANK=1 RUSTCOMMS_WORLD_SIZE=4 RUSTCOMMS_LOCAL_WORLD_SIZE=4", None),
        ("RANK=1 WORLD_SIZE=4", Some(" LOCAL_WORLD_SIZE=4")),
        ("PMI_RANK=1 PMI_SIZE=4 PMI_FD=5 MPI_LOCALNRANKS=4 RUSTCOMMS_PMI=0", None),
    ] {
        let e = with(text).unwrap().require_meeting().unwrap_err().to_string();
        assert!(e.contains("RUSTCOMMS_RUN_ID") && told.is_none_or(|t| e.contains(t)), "{text}: {e}");
        let advised = with(&format!("{text} RUSTCOMMS_RUN_ID=mine {}", told.unwrap_or_default())).unwrap();
        assert!(matches!(advised.meeting, Meeting::LocalFile { .. }), "{text}: {advised:?}");
    }
    let far = with("RUSTCOMMS_RANK=1 RUSTCOMMS_WORLD_SIZE=4 RUSTCOMMS_LOCAL_WORLD_SIZE=2").unwrap();
    assert!(!far.require_meeting().unwrap_err().to_string().contains("RUN_ID"));
}

#[test]
fn half_an_address_is_mentioned() {
    const HAND: &str = "RUSTCOMMS_RANK=1 RUSTCOMMS_WORLD_SIZE=4";
    let ignored = |text: &str| with(text).unwrap().why.into_iter().find(|w| w.contains("is ignored"));
    for launcher in [HAND, "RANK=1 WORLD_SIZE=4", OMPI, HYDRA, MV2] {
        let e = ignored(&format!("{launcher} MASTER_ADDR=h0")).unwrap();
        assert!(e.starts_with("MASTER_ADDR is ignored, because MASTER_PORT is not set"), "{e}");
        let e = ignored(&format!("{launcher} MASTER_PORT=29500")).unwrap();
        assert!(e.starts_with("MASTER_PORT is ignored, because MASTER_ADDR is not set"), "{e}");
        assert_eq!(ignored(&format!("{launcher} {MASTER}")), None);
        assert_eq!(ignored(&format!("{launcher} MASTER_ADDR=h0 RUSTCOMMS_STORE=s:1")), None);
    }
    assert_eq!(ignored("MASTER_ADDR=h0"), None, "a world of one");
    // Slurm's variables tell a port.
    let place = with(&format!("{SALLOC} {SRUN} MASTER_ADDR=h0")).unwrap();
    assert_eq!((place.meeting, place.store.as_deref()), (Meeting::Address, Some("h0:21234")));
}

#[test]
fn the_use_of_pmi_is_switched_by_words_that_are_known() {
    for (word, used) in [("0", false), ("off", false), ("No", false), ("FALSE", false)].into_iter().chain([
        ("1", true),
        ("on", true),
        ("Yes", true),
        ("TRUE", true),
        ("", true),
    ]) {
        let place = with(&format!("{HYDRA} RUSTCOMMS_PMI={word}")).unwrap();
        assert_eq!(matches!(place.meeting, Meeting::Pmi(_)), used, "{word}");
        assert_eq!(place.why.iter().any(|w| w.contains("RUSTCOMMS_PMI says so")), !used, "{word}: {:?}", place.why);
    }
    // Whoever decides: on another machine the same script runs under mpiexec.
    for launcher in ["", HYDRA, MV2, OMPI, TORCH, SRUN] {
        for word in ["flase", "2", "of", "0.0"] {
            let e = refused(&format!("{launcher} RUSTCOMMS_PMI={word}"));
            assert!(e.contains(&format!("RUSTCOMMS_PMI is '{word}'")) && e.contains("off, no or false"), "{e}");
        }
    }
}

#[test]
fn the_name_of_a_run_is_bounded() {
    let name = |n: usize| "r".repeat(n);
    for launcher in ["", "RUSTCOMMS_RANK=1 RUSTCOMMS_WORLD_SIZE=4", OMPI, HYDRA, TORCH] {
        assert_eq!(with(&format!("{launcher} RUSTCOMMS_RUN_ID={}", name(256))).unwrap().run, name(256));
        for n in [257, 9000] {
            let e = refused(&format!("{launcher} RUSTCOMMS_RUN_ID={}", name(n)));
            assert!(e.contains(&format!("RUSTCOMMS_RUN_ID has {n} bytes, and may have 256")), "{e}");
        }
    }
    for text in [format!("{TORCH} TORCHELASTIC_RUN_ID={}", name(300)), format!("{OMPI} PMIX_NAMESPACE={}", name(300))] {
        assert!(refused(&text).contains("set RUSTCOMMS_RUN_ID to a shorter one"));
        assert_eq!(with(&format!("{text} RUSTCOMMS_RUN_ID=short")).unwrap().run, "short");
    }
}

#[test]
fn long_values_are_not_repeated_in_full() {
    let long = "x".repeat(9000);
    for name in ["RUSTCOMMS_PMI", "RUSTCOMMS_RUN_ID", "RUSTCOMMS_LAUNCHER", "RANK", "MASTER_PORT", "LOCAL_RANK"] {
        let e = refused(&format!("RANK=0 WORLD_SIZE=2 MASTER_ADDR=h {name}={long}"));
        assert!(e.contains(name) && e.len() < 1000, "{name}: {e}");
    }
}

#[test]
fn all_ranks_of_a_step_agree_and_fill_their_nodes() {
    let mut seen = std::collections::HashSet::new();
    let mut rank = 0;
    for (node, tasks) in [4, 4, 3].into_iter().enumerate() {
        for local in 0..tasks {
            let text = format!("{SALLOC} {SRUN} SLURM_PROCID={rank} SLURM_NODEID={node} SLURM_LOCALID={local}");
            let p = with(&text).unwrap();
            assert_eq!((p.rank, p.local_rank, p.local_size), (rank, Some(local), Some(tasks)));
            seen.insert((p.method, p.size, p.store, p.run, p.rank0_hosts));
            rank += 1;
        }
    }
    assert_eq!((rank, seen.len()), (11, 1));
}

#[test]
fn how_the_ranks_meet() {
    const LOCAL: &str = "OMPI_COMM_WORLD_LOCAL_RANK=3 OMPI_COMM_WORLD_LOCAL_SIZE=4";
    let fd = |n| Meeting::Pmi(PmiServer::Descriptor(n));
    let port = |addr: &str, id: &str| Meeting::Pmi(PmiServer::Port { addr: addr.into(), id: id.into() });
    let file = |job: &str| Meeting::LocalFile { job: job.into() };
    for (name, text, want, because) in [
        ("hydra", HYDRA.to_owned(), fd(5), "PMI_FD=5"),
        ("hydra, one host", format!("{HYDRA} MPI_LOCALNRANKS=6"), fd(5), "PMI_FD=5"),
        ("hydra, address by hand", format!("{HYDRA} {MASTER}"), Meeting::Address, "pmi decides"),
        ("hydra, store by hand", format!("{HYDRA} RUSTCOMMS_STORE=s:1"), Meeting::Address, "store at s:1"),
        ("hydra, alone", "PMI_RANK=0 PMI_SIZE=1 PMI_FD=5".into(), Meeting::Unknown, "pmi decides"),
        ("hydra, switched off", format!("{HYDRA} RUSTCOMMS_PMI=0"), Meeting::Unknown, "RUSTCOMMS_PMI says so"),
        (
            "switched off, one host",
            format!("{HYDRA} RUSTCOMMS_PMI=off MPI_LOCALNRANKS=6 RUSTCOMMS_RUN_ID=r"),
            file("pmi.r"),
            "in a file",
        ),
        ("a bad descriptor", format!("{HYDRA} PMI_FD=five"), Meeting::Unknown, "PMI_FD is ignored: 'five'"),
        ("a bad descriptor, unused", format!("{HYDRA} PMI_FD=five {MASTER}"), Meeting::Address, "PMI_FD is ignored"),
        (
            "hydra -pmi-port",
            "PMI_ID=1 PMI_PORT=h:4000 PMI_SIZE=4".into(),
            port("h:4000", "1"),
            "PMI_PORT=h:4000, PMI_ID=1",
        ),
        ("mpirun_rsh", format!("{MV2} PMI_PORT=h:4000 PMI_ID=2"), port("h:4000", "2"), "PMI_PORT=h:4000"),
        ("mpirun", OMPI.into(), Meeting::Unknown, "set MASTER_ADDR"),
        ("mpirun, one host", format!("{OMPI} {LOCAL}"), file("openmpi.prterun-h0-77@1.0"), "in a file"),
        (
            "mpirun 4, one host",
            format!(
                "{OMPI} {LOCAL} PMIX_NAMESPACE= OMPI_MCA_ess_base_jobid=7 OMPI_MCA_orte_precondition_transports=ab-cd"
            ),
            file("openmpi.7.ab-cd"),
            "in a file",
        ),
        ("mpirun, no name", format!("{OMPI} {LOCAL} PMIX_NAMESPACE="), Meeting::Unknown, "set MASTER_ADDR"),
        ("mpirun, run id by hand", format!("{OMPI} {LOCAL} RUSTCOMMS_RUN_ID=x"), file("openmpi.x"), "in a file"),
        ("run id, several hosts", format!("{OMPI} RUSTCOMMS_RUN_ID=x"), Meeting::Unknown, "set MASTER_ADDR"),
        ("mpirun, one host, address", format!("{OMPI} {LOCAL} {MASTER}"), Meeting::Address, "openmpi decides"),
        (
            "pals, one host",
            format!("{PALS} WORLD_SIZE=24 PALS_LOCAL_SIZE=24 PALS_LOCAL_RANKID=13 PALS_NODEID=0"),
            file("pals.ab-cd"),
            "in a file",
        ),
        ("torchrun", TORCH.into(), Meeting::Address, "torchrun decides"),
        ("nothing", String::new(), Meeting::Unknown, "no launcher"),
    ] {
        let place = with(&text).unwrap_or_else(|e| panic!("{name}: {e}"));
        assert_eq!(place.meeting, want, "{name}: {:?}", place.why);
        assert!(place.why.iter().any(|w| w.contains(because)), "{name}: {:?}", place.why);
        assert_eq!(place.require_meeting().is_ok(), place.size == 1 || want != Meeting::Unknown, "{name}");
    }
    assert!(refused("PMI_ID=1 PMI_PORT=h:4000").contains("start mpiexec without -pmi-port"));
    let all: std::collections::HashSet<_> = (0..4)
        .map(|rank| with(&format!("{OMPI} {LOCAL} OMPI_COMM_WORLD_RANK={rank} OMPI_COMM_WORLD_LOCAL_RANK={rank}")))
        .map(|place| place.unwrap().meeting)
        .collect();
    assert_eq!(all.len(), 1, "all ranks agree");
}
