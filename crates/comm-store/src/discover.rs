//! Who am I: rank, size and store as the launcher's environment tells them.

use comm_core::{Error, Result};

use crate::env;

/// What the environment says about this process's place in a run.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Place {
    /// Which launcher's variables decided: `rustcomms`, `torchrun` or `single`.
    pub method: &'static str,
    /// Global rank.
    pub rank: usize,
    /// Number of ranks.
    pub size: usize,
    /// Rank on this host, if told.
    pub local_rank: Option<usize>,
    /// Ranks on this host, if told.
    pub local_size: Option<usize>,
    /// `host:port` of the store; `None` for a single process.
    pub store: Option<String>,
    /// Whether rank 0 must host the store, because the launcher does not.
    pub rank0_hosts: bool,
    /// Name of the run, with the restart count if there is one.
    pub run: String,
}

/// Reads the process's environment: `RUSTCOMMS_*` first, then torchrun's variables, else a world of one.
///
/// # Errors
///
/// `InvalidArgument` when the variables that decide are incomplete or not numbers, naming them.
pub fn discover() -> Result<Place> {
    discover_in(&|name| std::env::var(name).ok())
}

/// [`discover`] over any environment.
///
/// # Errors
///
/// As [`discover`].
pub fn discover_in(var: &dyn Fn(&str) -> Option<String>) -> Result<Place> {
    let run = var(env::RUN_ID);
    if let (Some(rank), Some(size)) = pair(var, env::RANK, env::WORLD_SIZE)? {
        let store = var(env::STORE);
        let rank0_hosts = store.is_none();
        return Ok(Place {
            method: "rustcomms",
            local_rank: number(var, env::LOCAL_RANK)?,
            local_size: number(var, env::LOCAL_WORLD_SIZE)?,
            store: store.or_else(|| master(var)),
            rank0_hosts,
            run: run.unwrap_or_else(|| "run".into()),
            ..place(rank, size)?
        });
    }
    if let (Some(rank), Some(size)) = pair(var, env::torch::RANK, env::torch::WORLD_SIZE)? {
        let restarts = var(env::torch::RESTART_COUNT).unwrap_or_else(|| "0".into());
        let torch_run = var(env::torch::RUN_ID).unwrap_or_else(|| "torchrun".into());
        return Ok(Place {
            method: "torchrun",
            local_rank: number(var, env::torch::LOCAL_RANK)?,
            local_size: number(var, env::torch::LOCAL_WORLD_SIZE)?,
            store: master(var),
            // torchrun writes Python's spelling of a boolean.
            rank0_hosts: var(env::torch::USE_AGENT_STORE).is_none_or(|v| v != "True"),
            run: run.unwrap_or_else(|| format!("{torch_run}.{restarts}")),
            ..place(rank, size)?
        });
    }
    Ok(Place { run: run.unwrap_or_else(|| "run".into()), ..place(0, 1)? })
}

fn place(rank: usize, size: usize) -> Result<Place> {
    if rank >= size {
        return Err(Error::invalid(format!(
            "rank {rank} is not below the world size {size} that the environment gives"
        )));
    }
    Ok(Place {
        method: "single",
        rank,
        size,
        local_rank: None,
        local_size: None,
        store: None,
        rank0_hosts: false,
        run: String::new(),
    })
}

fn master(var: &dyn Fn(&str) -> Option<String>) -> Option<String> {
    let (host, port) = (var(env::torch::MASTER_ADDR)?, var(env::torch::MASTER_PORT)?);
    // An IPv6 address needs brackets before its port.
    Some(if host.contains(':') && !host.starts_with('[') {
        format!("[{host}]:{port}")
    } else {
        format!("{host}:{port}")
    })
}

fn number(var: &dyn Fn(&str) -> Option<String>, name: &str) -> Result<Option<usize>> {
    match var(name) {
        None => Ok(None),
        Some(v) => v
            .trim()
            .parse()
            .map(Some)
            .map_err(|_| Error::invalid(format!("{name} is '{v}', which is not a rank or count"))),
    }
}

/// Two variables that make sense only together.
fn pair(var: &dyn Fn(&str) -> Option<String>, a: &str, b: &str) -> Result<(Option<usize>, Option<usize>)> {
    let both = (number(var, a)?, number(var, b)?);
    match both {
        (Some(_), None) => Err(Error::invalid(format!("{a} is set but {b} is not; set both or neither"))),
        (None, Some(_)) => Err(Error::invalid(format!("{b} is set but {a} is not; set both or neither"))),
        _ => Ok(both),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(pairs: &[(&str, &str)]) -> Result<Place> {
        let pairs: Vec<(String, String)> = pairs.iter().map(|(k, v)| ((*k).into(), (*v).into())).collect();
        discover_in(&|n| pairs.iter().find(|(k, _)| k == n).map(|(_, v)| v.clone()))
    }

    #[test]
    fn nothing_set_is_a_world_of_one() {
        let p = with(&[]).unwrap();
        assert_eq!((p.method, p.rank, p.size, p.store), ("single", 0, 1, None));
    }

    #[test]
    fn ours_win_over_torchruns() {
        let p = with(&[
            ("RUSTCOMMS_RANK", "1"),
            ("RUSTCOMMS_WORLD_SIZE", "4"),
            ("RUSTCOMMS_STORE", "h:1"),
            ("RANK", "7"),
            ("WORLD_SIZE", "8"),
        ])
        .unwrap();
        assert_eq!((p.method, p.rank, p.size, p.rank0_hosts), ("rustcomms", 1, 4, false));
        assert_eq!(p.store.as_deref(), Some("h:1"));
    }

    #[test]
    fn torchrun_with_and_without_agent_store() {
        let base = [("RANK", "2"), ("WORLD_SIZE", "3"), ("MASTER_ADDR", "::1"), ("MASTER_PORT", "29500")];
        let p = with(&base).unwrap();
        assert_eq!((p.method, p.rank0_hosts, p.store.as_deref()), ("torchrun", true, Some("[::1]:29500")));
        let agent =
            [&base[..], &[("TORCHELASTIC_USE_AGENT_STORE", "True"), ("TORCHELASTIC_RESTART_COUNT", "2")]].concat();
        let p = with(&agent).unwrap();
        assert!(!p.rank0_hosts);
        assert_eq!(p.run, "torchrun.2");
    }

    #[test]
    fn incomplete_or_absurd_variables_are_named() {
        assert!(with(&[("RUSTCOMMS_RANK", "1")]).unwrap_err().to_string().contains("RUSTCOMMS_WORLD_SIZE is not"));
        assert!(with(&[("RANK", "x"), ("WORLD_SIZE", "2")]).unwrap_err().to_string().contains("RANK is 'x'"));
        assert!(with(&[("RANK", "2"), ("WORLD_SIZE", "2")]).unwrap_err().to_string().contains("not below"));
    }
}
