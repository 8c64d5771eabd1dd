//! An environment: lines of `NAME=value`, where a name may be a number into the list below.
#![no_main]

use std::collections::HashMap;

use comm_store::{LAUNCHERS, discover_as_in, discover_in};

/// What launchers set.
const NAMES: [&str; 58] = [
    "RUSTCOMMS_RANK",
    "RUSTCOMMS_WORLD_SIZE",
    "RUSTCOMMS_LOCAL_RANK",
    "RUSTCOMMS_LOCAL_WORLD_SIZE",
    "RUSTCOMMS_NODE_RANK",
    "RUSTCOMMS_NNODES",
    "RUSTCOMMS_STORE",
    "RUSTCOMMS_RUN_ID",
    "RUSTCOMMS_LAUNCHER",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_USE_AGENT_STORE",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
    "JOB_COMPLETION_INDEX",
    "MPI_LOCALNRANKS",
    "MPI_LOCALRANKID",
    "MV2_COMM_WORLD_LOCAL_RANK",
    "MV2_COMM_WORLD_LOCAL_SIZE",
    "MV2_COMM_WORLD_RANK",
    "MV2_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "PALS_APID",
    "PALS_LOCAL_RANKID",
    "PALS_LOCAL_SIZE",
    "PALS_NODEID",
    "PALS_NRANKS",
    "PALS_RANKID",
    "PALS_SIZE",
    "PALS_WORLD_SIZE",
    "PMIX_NAMESPACE",
    "PMI_LOCAL_RANK",
    "PMI_LOCAL_SIZE",
    "PMI_RANK",
    "PMI_SIZE",
    "SLURM_JOBID",
    "SLURM_JOB_ID",
    "SLURM_LAUNCH_NODE_IPADDR",
    "SLURM_LOCALID",
    "SLURM_NNODES",
    "SLURM_NODEID",
    "SLURM_NTASKS",
    "SLURM_PROCID",
    "SLURM_STEP_ID",
    "SLURM_STEP_NODELIST",
    "SLURM_STEP_NUM_NODES",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_STEP_TASKS_PER_NODE",
    "SLURM_RESTART_COUNT",
];

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    let text = String::from_utf8_lossy(data);
    let vars: HashMap<&str, &str> = text
        .lines()
        .take(64)
        .filter_map(|line| {
            let (name, value) = line.split_once('=')?;
            let known = name.parse().ok().and_then(|i: usize| NAMES.get(i));
            Some((*known.unwrap_or(&name), value))
        })
        .collect();
    let read = |name: &str| vars.get(name).map(|v| (*v).to_owned());
    let check = |place: comm_store::Place| {
        assert!(place.rank < place.size);
        assert!(place.why.iter().map(String::len).sum::<usize>() < 64 << 10, "a long explanation");
    };
    match discover_in(&read) {
        Ok(place) => check(place),
        Err(e) => assert!(e.to_string().len() < 64 << 10, "a long error"),
    }
    for launcher in LAUNCHERS {
        if let Ok(place) = discover_as_in(launcher, &read) {
            check(place);
        }
    }
});
