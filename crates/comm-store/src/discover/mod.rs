//! Who am I: rank, size and store as the launcher's environment tells them.

mod direct;
mod hostlist;
mod mpi;
mod read;
mod slurm;

use comm_core::{Error, ErrorKind, Result};
use read::{Found, Reading, Vars};

use crate::env::{self, torch};
use crate::meeting::Meeting;

/// Longest name of a run in bytes. It is a part of keys in the store, which have 8 KiB at most.
const MOST_RUN: usize = 256;

/// What the environment says about this process's place in a run.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Place {
    /// Which launcher's variables decided: one of [`LAUNCHERS`].
    pub method: &'static str,
    /// Global rank.
    pub rank: usize,
    /// Number of ranks.
    pub size: usize,
    /// Rank on this host, if told.
    pub local_rank: Option<usize>,
    /// Ranks on this host, if told.
    pub local_size: Option<usize>,
    /// Number of this host, from 0, if told.
    pub node: Option<usize>,
    /// Number of hosts, if told.
    pub nodes: Option<usize>,
    /// `host:port` of the store; `None` for a single process, and where nothing tells it: see
    /// [`require_store`](Self::require_store).
    pub store: Option<String>,
    /// Whether rank 0 must host the store, because the launcher does not.
    pub rank0_hosts: bool,
    /// How the ranks find the store.
    pub meeting: Meeting,
    /// Name of the run, with the restart count if there is one.
    pub run: String,
    /// Name of the run alone, where the launcher starts ranks again and does not number that alike for all of them. They must agree on a name in the store then, as [`meeting::open`](crate::meeting::open) does.
    pub unnumbered: Option<String>,
    /// What was found, what decided and why, in sentences for `rustcomms doctor`.
    pub why: Vec<String>,
}

impl Place {
    /// Whether the ranks can meet: at an address, through the launcher, or through a file.
    ///
    /// # Errors
    ///
    /// `Bootstrap`, saying what to set under this launcher, when several ranks have nothing of these.
    pub fn require_meeting(&self) -> Result<()> {
        if self.size == 1 || self.meeting != Meeting::Unknown { Ok(()) } else { self.require_store().map(drop) }
    }

    /// The store's address.
    ///
    /// # Errors
    ///
    /// `Bootstrap`, saying what to set under this launcher, when nothing tells the address. There may be another way to
    /// [meet](Self::meeting) all the same.
    pub fn require_store(&self) -> Result<&str> {
        self.store.as_deref().ok_or_else(|| {
            let far = "MASTER_ADDR is the host of rank 0, and MASTER_PORT a free port there";
            // How the ranks of one host are told that they are: most launchers tell it anyway.
            let told = match self.method {
                "rustcomms" => Some(env::LOCAL_WORLD_SIZE),
                "torchrun" => Some(torch::LOCAL_WORLD_SIZE),
                _ => None,
            };
            let example = match (self.local_size, told) {
                (Some(n), _) if n == self.size => format!(
                    "all ranks are on one host, so MASTER_ADDR=127.0.0.1 and any free port will do, and so will {} alone, a \
                     name that no other run has",
                    env::RUN_ID
                ),
                (None, Some(told)) => format!(
                    "{far}; if all ranks are on one host, {} and {told}={} will do, too",
                    env::RUN_ID,
                    self.size
                ),
                _ => far.to_owned(),
            };
            Error::new(ErrorKind::Bootstrap {
                what: format!(
                    "{} tells rank and size, but not where the {} ranks meet: set both MASTER_ADDR and MASTER_PORT on all ranks \
                     ({example}) or {}, or start the ranks with `rustcomms run`",
                    self.method,
                    self.size,
                    env::STORE
                ),
                arrived: Vec::new(),
                missing: Vec::new(),
            })
        })
    }
}

/// The launchers that are known, in the order in which they are asked. What comes first is what a user sets himself;
/// the launchers of MPI come before a Slurm step because they often run inside one, and the innermost launcher is the
/// one that counts.
pub const LAUNCHERS: [&str; 9] =
    ["rustcomms", "torchrun", "openmpi", "pmi", "slurm", "mvapich", "pals", "kubernetes", "single"];

/// How each is read, in the order of [`LAUNCHERS`], and how ranks get its variables.
type Reader = fn(&Vars<'_>) -> Result<Reading>;
const READERS: [(Reader, &str); 9] = [
    (direct::rustcomms, "RUSTCOMMS_RANK and RUSTCOMMS_WORLD_SIZE are not set: start the ranks with `rustcomms run`"),
    (direct::torchrun, "RANK and WORLD_SIZE are not set: start the ranks with torchrun"),
    (mpi::openmpi, "OMPI_COMM_WORLD_RANK and OMPI_COMM_WORLD_SIZE are not set: start the ranks with Open MPI's mpirun"),
    (mpi::pmi, "PMI_RANK and PMI_SIZE are not set: start the ranks with mpiexec of MPICH or Intel MPI"),
    (slurm::read, "SLURM_STEP_ID is not set, or is that of a batch script: start the ranks with srun"),
    (mpi::mvapich, "MV2_COMM_WORLD_RANK and MV2_COMM_WORLD_SIZE are not set: start the ranks with mpirun_rsh"),
    (mpi::pals, "PALS_RANKID is not set: start the ranks with mpiexec of PALS"),
    (direct::kubernetes, "JOB_COMPLETION_INDEX is not set: use a Job with completionMode Indexed"),
    (|_| Ok(Reading::Found(Box::new(alone()))), ""),
];

/// Reads the process's environment. The first of [`LAUNCHERS`] whose variables are there decides, or the one that
/// `RUSTCOMMS_LAUNCHER` names; without any it is a world of one.
///
/// # Errors
///
/// `InvalidArgument` when the variables that decide are incomplete or not numbers, when the name of the run is longer
/// than 256 bytes, or when `RUSTCOMMS_PMI` is neither on nor off, naming them.
pub fn discover() -> Result<Place> {
    discover_in(&process)
}

/// [`discover`] over any environment.
///
/// # Errors
///
/// As [`discover`].
pub fn discover_in(var: &dyn Fn(&str) -> Option<String>) -> Result<Place> {
    let vars = Vars(var);
    let place = match vars.text(env::LAUNCHER).filter(|name| name != "auto") {
        Some(name) => forced(&name, &vars)
            .map_err(|e| e.with_context(|| crate::in_call(&format!("{}={}", env::LAUNCHER, crate::shorten(&name)))))?,
        None => detect(&vars)?,
    };
    tracing::debug!(method = place.method, rank = place.rank, size = place.size, why = ?place.why, "place in the run");
    Ok(place)
}

/// Reads the variables of one launcher only, whatever `RUSTCOMMS_LAUNCHER` says.
///
/// # Errors
///
/// `InvalidArgument` when `launcher` is not one of [`LAUNCHERS`], its variables are not there, or as [`discover`].
pub fn discover_as(launcher: &str) -> Result<Place> {
    discover_as_in(launcher, &process)
}

/// [`discover_as`] over any environment.
///
/// # Errors
///
/// As [`discover_as`].
pub fn discover_as_in(launcher: &str, var: &dyn Fn(&str) -> Option<String>) -> Result<Place> {
    forced(launcher, &Vars(var))
}

/// What is not Unicode becomes something that an error can show.
fn process(name: &str) -> Option<String> {
    std::env::var_os(name).map(|v| v.to_string_lossy().into_owned())
}

fn alone() -> Found {
    Found { rank: 0, size: 1, run: "run".into(), ..Found::default() }
}

fn forced(name: &str, vars: &Vars<'_>) -> Result<Place> {
    let Some(at) = LAUNCHERS.iter().position(|l| *l == name) else {
        return Err(Error::invalid(format!(
            "there is no launcher '{}'; known are auto, {}",
            crate::shorten(name),
            LAUNCHERS.join(", ")
        )));
    };
    let (read, how) = READERS[at];
    match read(vars)? {
        Reading::Found(f) => finish(LAUNCHERS[at], *f, vars, vec![format!("{name} decides, because it is asked for")]),
        Reading::Incomplete(e) => Err(e),
        Reading::Absent => Err(Error::invalid(format!("the launcher {name} was asked for, but {how}"))),
    }
}

fn detect(vars: &Vars<'_>) -> Result<Place> {
    let (mut why, mut incomplete) = (Vec::new(), None);
    let mut decided: Option<(&'static str, Box<Found>)> = None;
    for (name, (read, _)) in LAUNCHERS.into_iter().zip(READERS) {
        if let Some((method, _)) = &decided {
            // Who comes later is only mentioned, so what is wrong with it does not matter.
            match read(vars) {
                Ok(Reading::Found(f)) if name != "single" => {
                    why.push(format!("{name} (rank {} of {}) is not used: {method} comes first", f.rank, f.size));
                }
                Ok(Reading::Incomplete(e)) => why.push(format!("{name} is not used: {method} comes first, and {e}")),
                Err(e) => why.push(format!("{name} is not used: {method} comes first, and {e}")),
                Ok(_) => {}
            }
            continue;
        }
        if name == "single" {
            if let Some(e) = incomplete.take() {
                return Err(e);
            }
            why.push("no launcher's variables are there".into());
            if vars.has("SLURM_JOB_ID") {
                why.push("this is a Slurm job, but not a step of one: srun starts ranks".into());
            }
        }
        if name == "pmi" && mpi::pmi_of_srun(vars)? {
            why.push("pmi is not used: srun itself set PMI_RANK and PMI_SIZE, and its own variables tell more".into());
            continue;
        }
        match read(vars)? {
            Reading::Found(f) => {
                why.push(format!("{name} decides: rank {} of {}", f.rank, f.size));
                decided = Some((name, f));
            }
            Reading::Incomplete(e) => {
                why.push(format!("{name} is not used: {e}"));
                incomplete.get_or_insert(e);
            }
            Reading::Absent => {}
        }
    }
    // `single` is always found.
    let (method, found) = decided.unwrap_or_else(|| ("single", Box::new(alone())));
    finish(method, *found, vars, why)
}

fn finish(method: &'static str, f: Found, vars: &Vars<'_>, mut why: Vec<String>) -> Result<Place> {
    let Found { rank, size, local_rank, mut local_size, mut node, mut nodes, .. } = f;
    if rank >= size {
        return Err(Error::invalid(format!(
            "rank {rank} is not below the world size {size} that the environment gives ({method})"
        )));
    }
    why.extend(f.why);
    if local_size.is_some_and(|n| n == 0 || n > size || local_rank.is_some_and(|r| r >= n)) {
        why.push(format!("ranks on this host are ignored: {local_size:?} does not fit rank {local_rank:?} of {size}"));
        local_size = None;
    }
    if local_size == Some(size) && nodes.is_none() {
        (node, nodes) = (Some(0), Some(1));
    }
    if let (Some(n), Some(all)) = (node, nodes)
        && n >= all
    {
        why.push(format!("the number of this host is ignored: {n} is not below {all}"));
        node = None;
    }
    let wants_pmi = vars.switch(env::PMI)?.unwrap_or(true);
    let explicit = if method == "single" { None } else { vars.store() };
    let rank0_hosts = method != "single" && explicit.is_none() && !f.hosted;
    let store = match explicit {
        Some(store) => {
            why.push(format!("store at {store}, which {} names; rank 0 does not host it", env::STORE));
            Some(store)
        }
        None => f.store,
    };
    let master = (vars.has(torch::MASTER_ADDR), vars.has(torch::MASTER_PORT));
    if size > 1 && store.is_none() && master.0 != master.1 {
        let (set, lacks) = match master.0 {
            true => (torch::MASTER_ADDR, torch::MASTER_PORT),
            false => (torch::MASTER_PORT, torch::MASTER_ADDR),
        };
        why.push(format!("{set} is ignored, because {lacks} is not set: the ranks meet there only if both are"));
    }
    let named = vars.text(env::RUN_ID);
    let pmi = f.pmi.filter(|_| {
        if !wants_pmi {
            why.push(format!("the launcher's PMI server is not used: {} says so", env::PMI));
        }
        wants_pmi
    });
    let meeting = match (&store, pmi) {
        (Some(_), _) => Meeting::Address,
        _ if size == 1 => Meeting::Unknown,
        (None, Some(server)) => {
            why.push(format!(
                "no store is named: rank 0 opens one, and the others hear of it from the launcher ({server})"
            ));
            Meeting::Pmi(server)
        }
        // Without a name, two runs of one user would meet each other.
        (None, None) => match named.clone().or(f.job).filter(|_| local_size == Some(size)) {
            Some(job) => {
                why.push(
                    "no store is named, and all ranks are on this host: rank 0 opens one, and leaves its address in a file \
                     below XDG_RUNTIME_DIR, TMPDIR or /tmp"
                        .into(),
                );
                Meeting::LocalFile { job: format!("{method}.{job}") }
            }
            None => {
                why.push(format!(
                    "nothing tells where the ranks meet: set MASTER_ADDR and MASTER_PORT, or {}",
                    env::STORE
                ));
                Meeting::Unknown
            }
        },
    };
    let (name_from, length) = match &named {
        Some(run) => (env::RUN_ID.to_owned(), run.len()),
        None => (format!("the name of the run that {method} gives"), f.run.len()),
    };
    if length > MOST_RUN {
        let instead = if named.is_some() { String::new() } else { format!("; set {} to a shorter one", env::RUN_ID) };
        return Err(Error::invalid(format!("{name_from} has {length} bytes, and may have {MOST_RUN}{instead}")));
    }
    let unnumbered = named.clone().or(f.unnumbered.clone()).filter(|_| f.unnumbered.is_some() && size > 1);
    if unnumbered.is_some() {
        why.push(
            "the launcher does not number restarts alike on all hosts: ranks agree in the store on a name for each"
                .into(),
        );
    }
    let run = named.unwrap_or(f.run);
    Ok(Place {
        method,
        rank,
        size,
        local_rank,
        local_size,
        node,
        nodes,
        store,
        rank0_hosts,
        meeting,
        run,
        unnumbered,
        why,
    })
}
