//! Options of communicators and of single calls.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::device::StreamRef;
use crate::error::{Error, Result};
use crate::secret::Secret;
use crate::store::Store;
use crate::time::{Clock, RealClock};

/// Default time that an operation may take.
pub const DEFAULT_TIMEOUT: Duration = Duration::from_secs(600);
/// Default time that creation of a communicator may take.
pub const DEFAULT_BOOTSTRAP_TIMEOUT: Duration = Duration::from_secs(120);

/// One known hint: its name and what it does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HintSpec {
    /// The key.
    pub name: &'static str,
    /// What it does and which values it takes.
    pub doc: &'static str,
}

/// Hints that every backend knows. Backends add their own through
/// [`BackendInfo::hints`](crate::BackendInfo).
pub const CORE_HINTS: &[HintSpec] = &[HintSpec {
    name: "algo",
    doc: "algorithm to use, as `rustcomms perf` prints it (per call: for this call; per communicator: as RUSTCOMMS_ALGO)",
}];

/// Checks hint names against the known ones.
///
/// # Errors
///
/// `InvalidArgument` that names the nearest known hint.
pub fn check_hints<'a>(given: impl Iterator<Item = &'a str>, known: &[&[HintSpec]]) -> Result<()> {
    for name in given {
        let mut names = known.iter().flat_map(|k| k.iter()).map(|h| h.name);
        if names.any(|n| n == name) {
            continue;
        }
        let nearest = known.iter().flat_map(|k| k.iter()).map(|h| h.name).min_by_key(|n| distance(n, name));
        let known_list: Vec<_> = known.iter().flat_map(|k| k.iter()).map(|h| h.name).collect();
        return Err(Error::invalid(match nearest {
            Some(n) => format!("unknown hint '{name}'; did you mean '{n}'? Known hints: {}", known_list.join(", ")),
            None => format!("unknown hint '{name}'; this backend has no hints"),
        }));
    }
    Ok(())
}

/// Edit distance, for "did you mean".
fn distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, ca) in a.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, cb) in b.iter().enumerate() {
            let next = (diagonal + usize::from(ca != *cb)).min(row[j] + 1).min(row[j + 1] + 1);
            diagonal = std::mem::replace(&mut row[j + 1], next);
        }
    }
    row[b.len()]
}

/// Options of a communicator. What is not set comes from the environment the launcher provides.
#[derive(Clone)]
#[non_exhaustive]
pub struct CommOptions {
    /// The communicator's name: equal on all ranks, the rendezvous key. Default `world`.
    pub name: Option<String>,
    /// This process's rank; default from the launcher's environment.
    pub rank: Option<usize>,
    /// The number of ranks; default from the launcher's environment.
    pub size: Option<usize>,
    /// The store through which ranks find each other; default from the launcher's environment.
    pub store: Option<Arc<dyn Store>>,
    /// Time that an operation may take, counted from the call. Default 600 s or `RUSTCOMMS_TIMEOUT` (seconds).
    pub timeout: Duration,
    /// Time that creation may take. Default 120 s or `RUSTCOMMS_BOOTSTRAP_TIMEOUT` (seconds).
    pub bootstrap_timeout: Duration,
    /// Silence after which a peer counts as dead: stopped, or cut off. Default 30 s; at least 1 ms; [`Duration::MAX`]: never.
    /// Ranks may have different ones.
    ///
    /// Ranks send each other heartbeats where they send nothing else. A silent peer is first asked on a second way, which
    /// it answers even while its program is in a long reduce function or has no core to run on; it has a quarter of this
    /// time for that, at least 250 ms. Then calls fail with `PeerFailed` and the cause `NoHeartbeat`, on all ranks. A peer that
    /// was stopped for less than this time is not noticed. That a process has ended shows at once, whatever this says.
    ///
    /// torchcomms has no counterpart: there only the timeout of an operation tells that a peer is gone.
    pub heartbeat_timeout: Duration,
    /// Created without members, to be filled by `reconfigure`.
    pub dynamic: bool,
    /// Whether frames carry a checksum (always on in backend-sim). Default false; the same on all ranks.
    ///
    /// With it, changed or lost bytes are always `Corrupt` and never a result. Without it that is left to TCP's
    /// own checksum: what slips through there is noticed in a header (number, place and length of a frame), but not in the
    /// data, and bytes that are lost only by the next frame, when a call that had no more to come may be over.
    pub checksum: bool,
    /// What ranks prove to know before anything else they say is read; default `RUSTCOMMS_SECRET`, else none.
    pub secret: Option<Secret>,
    /// Over which network interfaces ranks connect to each other, as a comma-separated list of names (`eth0`), beginnings
    /// (`ib*`), networks (`10.0.0.0/8`) and exclusions (`!docker0`); default `RUSTCOMMS_INTERFACE`, else all.
    pub interface: Option<String>,
    /// Backend-specific settings; unknown names are errors.
    pub hints: BTreeMap<String, String>,
    /// Source of time.
    pub clock: Arc<dyn Clock>,
}

/// The variables with the default timeouts of operations and of creation.
const TIMEOUT_VARIABLE: &str = "RUSTCOMMS_TIMEOUT";
const BOOTSTRAP_VARIABLE: &str = "RUSTCOMMS_BOOTSTRAP_TIMEOUT";

/// What a variable says, in seconds.
fn seconds_of(variable: &str) -> Result<Option<Duration>> {
    let Some(text) = std::env::var_os(variable).filter(|v| !v.is_empty()) else { return Ok(None) };
    let seconds = text.to_str().and_then(|t| t.trim().parse::<f64>().ok()).filter(|s| *s > 0.0);
    match seconds.and_then(|s| Duration::try_from_secs_f64(s).ok()) {
        Some(d) => Ok(Some(d)),
        None => Err(Error::invalid(format!(
            "{variable} is '{}', which is no positive number of seconds",
            text.to_string_lossy()
        ))),
    }
}

impl Default for CommOptions {
    fn default() -> Self {
        Self::new()
    }
}

impl CommOptions {
    /// Defaults, with `RUSTCOMMS_TIMEOUT` and `RUSTCOMMS_BOOTSTRAP_TIMEOUT` (seconds) applied. A value that is no time is an error when a communicator
    /// is made, see [`check_environment`](Self::check_environment).
    #[must_use]
    pub fn new() -> Self {
        let timeout = |variable: &str, otherwise| seconds_of(variable).ok().flatten().unwrap_or(otherwise);
        Self {
            name: None,
            rank: None,
            size: None,
            store: None,
            timeout: timeout(TIMEOUT_VARIABLE, DEFAULT_TIMEOUT),
            bootstrap_timeout: timeout(BOOTSTRAP_VARIABLE, DEFAULT_BOOTSTRAP_TIMEOUT),
            heartbeat_timeout: Duration::from_secs(30),
            dynamic: false,
            checksum: false,
            secret: None,
            interface: None,
            hints: BTreeMap::new(),
            clock: Arc::new(RealClock),
        }
    }

    /// Whether what the environment says about defaults makes sense. Backends ask before the ranks meet, so that one
    /// rank's bad setting is its own error.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` that names the variable.
    pub fn check_environment() -> Result<()> {
        seconds_of(TIMEOUT_VARIABLE)?;
        seconds_of(BOOTSTRAP_VARIABLE)?;
        crate::reduce::check_environment()
    }

    /// Sets the name.
    #[must_use]
    pub fn name(mut self, name: impl Into<String>) -> Self {
        self.name = Some(name.into());
        self
    }

    /// Sets rank and world size instead of taking them from the environment.
    #[must_use]
    pub const fn rank_and_size(mut self, rank: usize, size: usize) -> Self {
        self.rank = Some(rank);
        self.size = Some(size);
        self
    }

    /// Sets the store.
    #[must_use]
    pub fn store(mut self, store: Arc<dyn Store>) -> Self {
        self.store = Some(store);
        self
    }

    /// Sets the default timeout of operations.
    #[must_use]
    pub const fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// Sets the time that creation may take.
    #[must_use]
    pub const fn bootstrap_timeout(mut self, timeout: Duration) -> Self {
        self.bootstrap_timeout = timeout;
        self
    }

    /// Sets the silence after which a peer counts as dead.
    #[must_use]
    pub const fn heartbeat_timeout(mut self, timeout: Duration) -> Self {
        self.heartbeat_timeout = timeout;
        self
    }

    /// Creates the communicator without members, to be filled by `reconfigure`.
    #[must_use]
    pub const fn dynamic(mut self) -> Self {
        self.dynamic = true;
        self
    }

    /// Adds a checksum to every frame.
    #[must_use]
    pub const fn checksum(mut self, on: bool) -> Self {
        self.checksum = on;
        self
    }

    /// Sets what ranks prove to know.
    #[must_use]
    pub fn secret(mut self, secret: Secret) -> Self {
        self.secret = Some(secret);
        self
    }

    /// The secret, or that of the environment.
    ///
    /// # Errors
    ///
    /// As [`Secret::from_environment`].
    pub fn effective_secret(&self) -> Result<Option<Secret>> {
        if self.secret.is_some() { Ok(self.secret.clone()) } else { Secret::from_environment() }
    }

    /// Sets the network interfaces.
    #[must_use]
    pub fn interface(mut self, interfaces: impl Into<String>) -> Self {
        self.interface = Some(interfaces.into());
        self
    }

    /// The network interfaces, or those of the environment.
    #[must_use]
    pub fn effective_interface(&self) -> Option<String> {
        let environment = || std::env::var_os("RUSTCOMMS_INTERFACE").map(|v| v.to_string_lossy().into_owned());
        self.interface.clone().or_else(environment).filter(|v| !v.trim().is_empty())
    }

    /// Sets a hint.
    #[must_use]
    pub fn hint(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.hints.insert(name.into(), value.into());
        self
    }

    /// Injects a clock.
    #[must_use]
    pub fn clock(mut self, clock: Arc<dyn Clock>) -> Self {
        self.clock = clock;
        self
    }

    /// The name, or the default name.
    #[must_use]
    pub fn effective_name(&self) -> &str {
        self.name.as_deref().unwrap_or("world")
    }
}

impl fmt::Debug for CommOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CommOptions")
            .field("name", &self.effective_name())
            .field("rank", &self.rank)
            .field("size", &self.size)
            .field("store", &self.store)
            .field("timeout", &self.timeout)
            .field("bootstrap_timeout", &self.bootstrap_timeout)
            .field("heartbeat_timeout", &self.heartbeat_timeout)
            .field("dynamic", &self.dynamic)
            .field("checksum", &self.checksum)
            .field("secret", &self.secret)
            .field("interface", &self.interface)
            .field("hints", &self.hints)
            .finish_non_exhaustive()
    }
}

/// Options of one call, for [`Communicator::with`](crate::Communicator::with).
#[derive(Clone, Debug, Default)]
pub struct CallOptions<'s> {
    pub(crate) timeout: Option<Duration>,
    pub(crate) tag: u32,
    pub(crate) stream: Option<StreamRef<'s>>,
    pub(crate) hints: Vec<(String, String)>,
}

impl<'s> CallOptions<'s> {
    /// No option set: the communicator's defaults apply.
    #[must_use]
    pub const fn new() -> Self {
        Self { timeout: None, tag: 0, stream: None, hints: Vec::new() }
    }

    /// Time that the call may take, counted from the call.
    #[must_use]
    pub const fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = Some(timeout);
        self
    }

    /// Tag of a point-to-point message. Messages of one pair match by tag and order.
    #[must_use]
    pub const fn tag(mut self, tag: u32) -> Self {
        self.tag = tag;
        self
    }

    /// The stream on which a GPU operation is enqueued.
    #[must_use]
    pub const fn stream(mut self, stream: StreamRef<'s>) -> Self {
        self.stream = Some(stream);
        self
    }

    /// A hint for this call; unknown names are errors.
    #[must_use]
    pub fn hint(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.hints.push((name.into(), value.into()));
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_misspelt_hint_names_the_nearest() {
        let e = check_hints(["alog"].into_iter(), &[CORE_HINTS]).unwrap_err();
        assert!(e.to_string().contains("did you mean 'algo'"), "{e}");
        check_hints(["algo"].into_iter(), &[CORE_HINTS]).unwrap();
        assert!(check_hints(["x"].into_iter(), &[]).unwrap_err().to_string().contains("no hints"));
    }

    #[test]
    fn distances() {
        assert_eq!(distance("algo", "algo"), 0);
        assert_eq!(distance("", "abc"), 3);
        assert_eq!(distance("kitten", "sitting"), 3);
    }
}
