//! A Slurm step: what `srun` tells its tasks.
//!
//! Only a *step* counts. `SLURM_JOB_ID` alone is also set in the shell of `sbatch` and `salloc`, where one process
//! runs. The first host of the step is taken for rank 0's, which holds unless `--distribution=arbitrary` says
//! otherwise; two steps of one job that run at once on one first host need a `MASTER_PORT` each. Steps of heterogeneous
//! jobs are read like others, which was not tried. The names, and the numbers of special steps, are general knowledge
//! of Slurm; no test here has run under a real one.

use comm_core::{Error, Result};

use super::hostlist;
use super::read::{Found, Reading, Vars};

/// What marks a step.
pub(super) const STEP_ID: &str = "SLURM_STEP_ID";
/// From this number on, step ids mean the batch script, an interactive shell and the like.
const FIRST_SPECIAL: usize = 0xffff_fff0;

/// The step's number of tasks, if this is a step of ranks.
pub(super) fn step_size(vars: &Vars<'_>) -> Result<Option<usize>> {
    match vars.number(STEP_ID)? {
        Some(id) if id < FIRST_SPECIAL => vars.first(&["SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"]),
        _ => Ok(None),
    }
}

/// Rank, size, hosts and a port that all ranks derive alike.
pub(super) fn read(vars: &Vars<'_>) -> Result<Reading> {
    let Some(step) = vars.number(STEP_ID)?.filter(|id| *id < FIRST_SPECIAL) else { return Ok(Reading::Absent) };
    let lacks = |name: &str| {
        Ok(Reading::Incomplete(Error::invalid(format!(
            "{STEP_ID} is set but {name} is not: start the ranks with srun, or set RUSTCOMMS_LAUNCHER=single for a world of one"
        ))))
    };
    let Some(rank) = vars.number("SLURM_PROCID")? else { return lacks("SLURM_PROCID") };
    let Some(size) = step_size(vars)? else { return lacks("SLURM_STEP_NUM_TASKS") };
    let job = vars.first(&["SLURM_JOB_ID", "SLURM_JOBID"])?;
    let node = vars.number("SLURM_NODEID")?;
    let mut why = Vec::new();

    let list = vars.text("SLURM_STEP_NODELIST");
    let hosts = list.as_deref().map(hostlist::hosts);
    let host = match &hosts {
        Some(Ok(hosts)) => hosts.first().cloned(),
        // Whoever names the address needs no list.
        Some(Err(e)) if !vars.has("MASTER_ADDR") && !vars.has("RUSTCOMMS_STORE") && size > 1 => {
            return Err(Error::invalid(format!(
                "SLURM_STEP_NODELIST is '{}', which cannot be read: {e}; set MASTER_ADDR and MASTER_PORT instead",
                crate::shorten(list.as_deref().unwrap_or_default())
            )));
        }
        Some(Err(e)) => {
            why.push(format!("SLURM_STEP_NODELIST is ignored: {e}"));
            None
        }
        None => vars.text("SLURM_LAUNCH_NODE_IPADDR"),
    };
    // Below the range that systems give to outgoing connections, mostly; jobs on one host rarely share the remainder.
    let port = job.map(|job| 20_000 + (job % 20_000) as u16);
    let store = vars.master(host.as_deref(), port)?;
    if let (Some(store), false) = (&store, vars.has("MASTER_ADDR")) {
        let from = if list.is_some() { "the first host of SLURM_STEP_NODELIST" } else { "SLURM_LAUNCH_NODE_IPADDR" };
        why.push(format!("store at {store}: {from}, and a port that follows from the job's number"));
    }
    Ok(Reading::Found(Box::new(Found {
        rank,
        size,
        local_rank: vars.number("SLURM_LOCALID")?,
        local_size: local_size(vars, node, size, &mut why),
        node,
        nodes: vars
            .first(&["SLURM_STEP_NUM_NODES", "SLURM_NNODES"])?
            .or_else(|| hosts.and_then(Result::ok).map(|h| h.len())),
        store,
        run: job.map_or_else(|| format!("slurm.{step}"), |job| format!("{job}.{step}")),
        why,
        ..Found::default()
    })))
}

/// The tasks on this node: fact, not the request that `SLURM_NTASKS_PER_NODE` is. It only informs, so what cannot be
/// read is left out.
fn local_size(vars: &Vars<'_>, node: Option<usize>, size: usize, why: &mut Vec<String>) -> Option<usize> {
    let list = vars.text("SLURM_STEP_TASKS_PER_NODE")?;
    let counts = match hostlist::counts(&list) {
        Ok(counts) => counts,
        Err(e) => {
            why.push(format!("SLURM_STEP_TASKS_PER_NODE is ignored: {e}"));
            return None;
        }
    };
    let sum = counts.iter().fold(0usize, |a, b| a.saturating_add(*b));
    if sum != size {
        why.push(format!("SLURM_STEP_TASKS_PER_NODE is ignored: its counts make {sum} tasks, the step has {size}"));
        return None;
    }
    counts.get(node?).copied()
}
