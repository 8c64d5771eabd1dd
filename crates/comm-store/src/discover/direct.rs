//! Our own variables, torchrun's, and those of a Kubernetes Indexed Job.

use comm_core::{Error, Result};

use super::read::{Found, Reading, Vars, pair};
use crate::env::{self, torch};

const INDEX: &str = "JOB_COMPLETION_INDEX";

/// `RUSTCOMMS_*`: what `rustcomms run` sets, or a user.
pub(super) fn rustcomms(vars: &Vars<'_>) -> Result<Reading> {
    match pair(vars, env::RANK, env::WORLD_SIZE)? {
        Reading::Found(mut f) => {
            f.local_rank = vars.number(env::LOCAL_RANK)?;
            f.local_size = vars.number(env::LOCAL_WORLD_SIZE)?;
            f.node = vars.number(env::NODE_RANK)?;
            f.nodes = vars.number(env::NNODES)?;
            f.store = vars.master(None, None)?;
            f.run = "run".into();
            Ok(Reading::Found(f))
        }
        // The size alone is what an Indexed Job lacks.
        Reading::Incomplete(_) if vars.has(INDEX) && !vars.has(env::RANK) => Ok(Reading::Absent),
        // These are nobody else's: no other launcher may decide instead.
        Reading::Incomplete(e) => Err(e),
        Reading::Absent => Ok(Reading::Absent),
    }
}

/// torchrun's, which programs in the field set by hand, too.
pub(super) fn torchrun(vars: &Vars<'_>) -> Result<Reading> {
    match pair(vars, torch::RANK, torch::WORLD_SIZE)? {
        Reading::Found(mut f) => {
            let restarts = vars.text(torch::RESTART_COUNT).unwrap_or_else(|| "0".into());
            let run = vars.text(torch::RUN_ID).unwrap_or_else(|| "torchrun".into());
            f.local_rank = vars.number(torch::LOCAL_RANK)?;
            f.local_size = vars.number(torch::LOCAL_WORLD_SIZE)?;
            f.node = vars.number(torch::GROUP_RANK)?;
            f.nodes = vars.number(torch::GROUP_WORLD_SIZE)?;
            f.store = vars.master(None, None)?;
            // torchrun writes Python's spelling of a boolean.
            f.hosted = vars.text(torch::USE_AGENT_STORE).is_some_and(|v| v == "True");
            f.run = format!("{run}.{restarts}");
            // Each agent counts the restarts that its own ranks caused. Without agents there are none.
            f.unnumbered = (vars.has(torch::RESTART_COUNT) && f.nodes.is_none_or(|n| n > 1)).then_some(run);
            Ok(Reading::Found(f))
        }
        other => Ok(other),
    }
}

/// A pod of an Indexed Job. Kubernetes tells only the index; the manifest must tell the rest.
pub(super) fn kubernetes(vars: &Vars<'_>) -> Result<Reading> {
    let Some(rank) = vars.number(INDEX)? else { return Ok(Reading::Absent) };
    let Some(size) = vars.first(&[env::WORLD_SIZE, torch::WORLD_SIZE])? else {
        return Ok(Reading::Incomplete(Error::invalid(format!(
            "{INDEX} is set, but nothing says how many ranks there are: set {} in the manifest to the Job's completions, or \
             RUSTCOMMS_LAUNCHER=single where each pod is a world of its own",
            torch::WORLD_SIZE
        ))));
    };
    Ok(Reading::Found(Box::new(Found {
        rank,
        size,
        local_rank: vars.number(torch::LOCAL_RANK)?,
        local_size: vars.number(torch::LOCAL_WORLD_SIZE)?,
        store: vars.master(None, None)?,
        run: "kubernetes".into(),
        ..Found::default()
    })))
}
