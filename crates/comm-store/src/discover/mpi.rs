//! The launchers of MPI libraries. None of them tells an address: ranks meet through the PMI server of Hydra and its
//! kin, through a file where all are on one host, or at `MASTER_ADDR` and `MASTER_PORT`.
//!
//! Tried with Open MPI 4.1.4 and Hydra 4.0.2. The names of Open MPI 5 are from its documentation; those of Intel MPI,
//! MVAPICH and PALS are general knowledge and what programs in the field read.

use comm_core::{Error, Result};

use super::read::{Found, Reading, Vars, pair};
use super::slurm;
use crate::meeting::PmiServer;

/// Adds what only a found place needs.
fn complete(reading: Reading, f: impl FnOnce(&mut Found) -> Result<()>) -> Result<Reading> {
    match reading {
        Reading::Found(mut found) => {
            f(&mut found)?;
            Ok(Reading::Found(found))
        }
        other => Ok(other),
    }
}

/// `mpirun` of Open MPI. `OMPI_COMM_WORLD_NODE_RANK` is not read: it ranks among all jobs of a node, and names no node.
pub(super) fn openmpi(vars: &Vars<'_>) -> Result<Reading> {
    match pair(vars, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")? {
        // Half of it is no other launcher's.
        Reading::Incomplete(e) => Err(e),
        reading => complete(reading, |f| {
            f.local_rank = vars.number("OMPI_COMM_WORLD_LOCAL_RANK")?;
            f.local_size = vars.number("OMPI_COMM_WORLD_LOCAL_SIZE")?;
            f.store = vars.master(None, None)?;
            // Both follow from mpirun's process id and host; Open MPI 4 adds a random number.
            let job = vars.text("PMIX_NAMESPACE").or_else(|| vars.text("OMPI_MCA_ess_base_jobid"));
            let random = vars.text("OMPI_MCA_orte_precondition_transports");
            f.job = job.as_ref().map(|job| format!("{job}.{}", random.as_deref().unwrap_or("0")));
            f.run = job.unwrap_or_else(|| "openmpi".into());
            Ok(())
        }),
    }
}

/// Whether `PMI_RANK` and `PMI_SIZE` come from `srun` itself (`--mpi=pmi2`, or the plugin of Cray systems), which knows
/// more under its own names. The size decides, because it is alike on all ranks: all must decide alike.
pub(super) fn pmi_of_srun(vars: &Vars<'_>) -> Result<bool> {
    let (size, step) = (vars.number("PMI_SIZE")?, slurm::step_size(vars)?);
    if size.is_none() || size != step {
        return Ok(false);
    }
    let (rank, task) = (vars.number("PMI_RANK")?, vars.number("SLURM_PROCID")?);
    match (rank, task) {
        (Some(rank), Some(task)) if rank != task => Err(Error::invalid(format!(
            "PMI_RANK is {rank} and SLURM_PROCID is {task}, in worlds of the same size: set RUSTCOMMS_LAUNCHER to pmi or slurm \
             on all ranks"
        ))),
        (Some(_), Some(_)) => Ok(true),
        _ => Ok(false),
    }
}

/// The PMI-1 server that `PMI_FD`, or `PMI_PORT` with `PMI_ID`, lead to. Who needs it is not known here, so what makes no
/// sense is left out.
fn server(vars: &Vars<'_>, why: &mut Vec<String>) -> Option<PmiServer> {
    if let Some(fd) = vars.text("PMI_FD") {
        let number = fd.parse().ok().map(PmiServer::Descriptor);
        if number.is_none() {
            why.push(format!("PMI_FD is ignored: '{}' is no descriptor", crate::shorten(&fd)));
        }
        return number;
    }
    let (addr, id) = (vars.text("PMI_PORT")?, vars.text("PMI_ID")?);
    (!id.contains(char::is_whitespace)).then_some(PmiServer::Port { addr, id })
}

/// Hydra's `mpiexec` of MPICH and Intel MPI, and others with PMI-1.
pub(super) fn pmi(vars: &Vars<'_>) -> Result<Reading> {
    let by_port = vars.has("PMI_PORT") && vars.has("PMI_ID") && !vars.has("PMI_RANK");
    if by_port && !vars.has("PMI_SIZE") {
        return Ok(Reading::Incomplete(Error::invalid(
            "PMI_PORT and PMI_ID are set, but nothing says how many ranks there are: start mpiexec without -pmi-port, or set \
             PMI_SIZE to its -n",
        )));
    }
    complete(pair(vars, if by_port { "PMI_ID" } else { "PMI_RANK" }, "PMI_SIZE")?, |f| {
        f.local_rank = vars.first(&["MPI_LOCALRANKID", "PMI_LOCAL_RANK", "PALS_LOCAL_RANKID"])?;
        f.local_size = vars.first(&["MPI_LOCALNRANKS", "PMI_LOCAL_SIZE", "PALS_LOCAL_SIZE"])?;
        f.node = vars.number("PALS_NODEID")?;
        f.store = vars.master(None, None)?;
        f.pmi = server(vars, &mut f.why);
        f.job = vars.text("PALS_APID");
        f.run = f.job.clone().unwrap_or_else(|| "pmi".into());
        Ok(())
    })
}

/// `mpirun_rsh` of MVAPICH.
pub(super) fn mvapich(vars: &Vars<'_>) -> Result<Reading> {
    match pair(vars, "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE")? {
        Reading::Incomplete(e) => Err(e),
        reading => complete(reading, |f| {
            f.local_rank = vars.number("MV2_COMM_WORLD_LOCAL_RANK")?;
            f.local_size = vars.number("MV2_COMM_WORLD_LOCAL_SIZE")?;
            f.store = vars.master(None, None)?;
            f.pmi = server(vars, &mut f.why);
            f.run = "mvapich".into();
            Ok(())
        }),
    }
}

/// `mpiexec` of HPE's PALS, where it does not set PMI's variables. It tells no size then, so the user must; sites' own
/// names for it are taken, too. The ranks on this host are never taken for all ranks.
pub(super) fn pals(vars: &Vars<'_>) -> Result<Reading> {
    const SIZES: [&str; 5] = ["PMI_SIZE", "PALS_SIZE", "PALS_NRANKS", "PALS_WORLD_SIZE", "WORLD_SIZE"];
    let Some(rank) = vars.number("PALS_RANKID")? else { return Ok(Reading::Absent) };
    let Some(size) = vars.first(&SIZES)? else {
        return Ok(Reading::Incomplete(Error::invalid(
            "PALS_RANKID is set, but nothing says how many ranks there are: set WORLD_SIZE to the -n of mpiexec",
        )));
    };
    Ok(Reading::Found(Box::new(Found {
        rank,
        size,
        local_rank: vars.number("PALS_LOCAL_RANKID")?,
        local_size: vars.number("PALS_LOCAL_SIZE")?,
        node: vars.number("PALS_NODEID")?,
        store: vars.master(None, None)?,
        job: vars.text("PALS_APID"),
        run: vars.text("PALS_APID").unwrap_or_else(|| "pals".into()),
        ..Found::default()
    })))
}
