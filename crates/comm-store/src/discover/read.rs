//! Reading variables: an empty one counts as not set, as manifests and scripts often leave them.

use comm_core::{Error, Result};

use crate::env::{self, torch};
use crate::meeting::PmiServer;

/// An environment.
pub(super) struct Vars<'a>(pub(super) &'a dyn Fn(&str) -> Option<String>);

impl Vars<'_> {
    pub(super) fn text(&self, name: &str) -> Option<String> {
        let value = (self.0)(name)?;
        let trimmed = value.trim();
        (!trimmed.is_empty()).then(|| trimmed.to_owned())
    }

    pub(super) fn has(&self, name: &str) -> bool {
        self.text(name).is_some()
    }

    pub(super) fn number(&self, name: &str) -> Result<Option<usize>> {
        let Some(v) = self.text(name) else { return Ok(None) };
        v.parse()
            .map(Some)
            .map_err(|_| Error::invalid(format!("{name} is '{}', which is not a rank or count", crate::shorten(&v))))
    }

    /// Whether a setting is on or off, if it is set.
    pub(super) fn switch(&self, name: &str) -> Result<Option<bool>> {
        let Some(v) = self.text(name) else { return Ok(None) };
        match v.to_ascii_lowercase().as_str() {
            "1" | "on" | "yes" | "true" => Ok(Some(true)),
            "0" | "off" | "no" | "false" => Ok(Some(false)),
            _ => Err(Error::invalid(format!(
                "{name} is '{}', which is neither 1, on, yes or true nor 0, off, no or false",
                crate::shorten(&v)
            ))),
        }
    }

    /// The first of `names` that is set.
    pub(super) fn first(&self, names: &[&str]) -> Result<Option<usize>> {
        for name in names {
            if let Some(n) = self.number(name)? {
                return Ok(Some(n));
            }
        }
        Ok(None)
    }

    /// `host:port` from the variables that users set for any launcher, with what `host` and `port` say
    /// for the one that is missing. A store that was named needs neither.
    pub(super) fn master(&self, host: Option<&str>, port: Option<u16>) -> Result<Option<String>> {
        if self.store().is_some() {
            return Ok(None);
        }
        let given = self.text(torch::MASTER_PORT);
        let port = match &given {
            None => port,
            Some(p) => Some(p.parse().ok().filter(|p| *p != 0).ok_or_else(|| {
                let shown = crate::shorten(p);
                Error::invalid(format!("{} is '{shown}', which is not a port from 1 to 65535", torch::MASTER_PORT))
            })?),
        };
        let addr = self.text(torch::MASTER_ADDR);
        Ok(addr.as_deref().or(host).zip(port).map(|(h, p)| address(h, p)))
    }

    /// The store that was named explicitly, which rank 0 must not host.
    pub(super) fn store(&self) -> Option<String> {
        self.text(env::STORE)
    }
}

/// An IPv6 address needs brackets before its port.
fn address(host: &str, port: u16) -> String {
    if host.contains(':') && !host.starts_with('[') { format!("[{host}]:{port}") } else { format!("{host}:{port}") }
}

/// What one launcher's variables say.
#[derive(Debug, Default)]
pub(super) struct Found {
    pub(super) rank: usize,
    pub(super) size: usize,
    pub(super) local_rank: Option<usize>,
    pub(super) local_size: Option<usize>,
    pub(super) node: Option<usize>,
    pub(super) nodes: Option<usize>,
    pub(super) store: Option<String>,
    /// The launcher hosts the store.
    pub(super) hosted: bool,
    /// The launcher's key-value server.
    pub(super) pmi: Option<PmiServer>,
    /// A name that no other job on this host has at the same time.
    pub(super) job: Option<String>,
    pub(super) run: String,
    /// The run without the number of its restarts, where that is not alike for all ranks.
    pub(super) unnumbered: Option<String>,
    pub(super) why: Vec<String>,
}

/// What looking for one launcher gave.
#[derive(Debug)]
pub(super) enum Reading {
    /// Nothing of it is there.
    Absent,
    /// It may be there, but something is missing, as the error tells. Another launcher may still decide.
    Incomplete(Error),
    Found(Box<Found>),
}

/// Rank and size from two variables that make sense only together.
pub(super) fn pair(vars: &Vars<'_>, rank: &str, size: &str) -> Result<Reading> {
    let lacks = |a: &str, b: &str| {
        Reading::Incomplete(Error::invalid(format!("{a} is set but {b} is not; set both or neither")))
    };
    Ok(match (vars.number(rank)?, vars.number(size)?) {
        (Some(r), Some(s)) => Reading::Found(Box::new(Found { rank: r, size: s, ..Found::default() })),
        (Some(_), None) => lacks(rank, size),
        (None, Some(_)) => lacks(size, rank),
        (None, None) => Reading::Absent,
    })
}
