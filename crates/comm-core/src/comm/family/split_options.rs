//! [`SplitOptions`]: what a child has of its own.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::observe::{Observer, Observers};
use crate::options::CommOptions;

/// Options of a child communicator. What is not set is the parent's. A name alone converts into them.
///
/// ```no_run
/// # use std::time::Duration;
/// # fn f(comm: &comm_core::Communicator) -> comm_core::Result<()> {
/// let plain = comm.dup("plain")?;
/// let strict = comm.dup(comm_core::SplitOptions::new("strict").timeout(Duration::from_secs(5)))?;
/// # drop((plain, strict)); Ok(()) }
/// ```
#[derive(Clone)]
pub struct SplitOptions {
    pub(super) name: String,
    timeout: Option<Duration>,
    heartbeat_timeout: Option<Duration>,
    pub(super) hints: BTreeMap<String, String>,
    observers: Vec<Arc<dyn Observer>>,
    inherit_observers: bool,
    pub(super) split_timeout: Option<Duration>,
}

impl fmt::Debug for SplitOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SplitOptions")
            .field("name", &self.name)
            .field("timeout", &self.timeout)
            .field("heartbeat_timeout", &self.heartbeat_timeout)
            .field("hints", &self.hints)
            .field("observers", &self.observers.len())
            .field("inherit_observers", &self.inherit_observers)
            .field("split_timeout", &self.split_timeout)
            .finish()
    }
}

impl SplitOptions {
    /// A child of this name, the same on all its members, and otherwise like its parent.
    pub fn new(name: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            timeout: None,
            heartbeat_timeout: None,
            hints: BTreeMap::new(),
            observers: Vec::new(),
            inherit_observers: true,
            split_timeout: None,
        }
    }

    /// Sets the default timeout of the child's operations.
    #[must_use]
    pub const fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = Some(timeout);
        self
    }

    /// Sets the silence after which a peer counts as dead, in the child's options. A backend whose children use the
    /// parent's connections watches those as the parent does.
    #[must_use]
    pub const fn heartbeat_timeout(mut self, timeout: Duration) -> Self {
        self.heartbeat_timeout = Some(timeout);
        self
    }

    /// Sets a hint; the parent's others stay.
    #[must_use]
    pub fn hint(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.hints.insert(name.into(), value.into());
        self
    }

    /// Adds an observer of the child alone, for as long as the child lives.
    #[must_use]
    pub fn observer(mut self, observer: Arc<dyn Observer>) -> Self {
        self.observers.push(observer);
        self
    }

    /// Whether the parent's observers, also those that come later, see the child's calls too. They do by default.
    #[must_use]
    pub const fn inherit_observers(mut self, inherit: bool) -> Self {
        self.inherit_observers = inherit;
        self
    }

    /// Sets the time that the creation may take; by default as long as any operation of the parent.
    #[must_use]
    pub const fn split_timeout(mut self, timeout: Duration) -> Self {
        self.split_timeout = Some(timeout);
        self
    }

    /// The child's options; rank and size as given.
    pub(super) fn inherit(&self, parent: &CommOptions, rank: Option<usize>, size: usize) -> CommOptions {
        let mut options = parent.clone();
        options.name = Some(self.name.clone());
        options.rank = rank;
        options.size = (size > 0).then_some(size);
        options.timeout = self.timeout.unwrap_or(options.timeout);
        options.heartbeat_timeout = self.heartbeat_timeout.unwrap_or(options.heartbeat_timeout);
        options.hints.extend(self.hints.clone());
        options
    }

    /// The child's observers.
    pub(super) fn observers_under(&self, parent: &Arc<Observers>) -> Arc<Observers> {
        let observers = Observers::below(self.inherit_observers.then(|| Arc::clone(parent)));
        for o in &self.observers {
            observers.register(Arc::clone(o)).detach();
        }
        observers
    }
}

impl From<&str> for SplitOptions {
    fn from(name: &str) -> Self {
        Self::new(name)
    }
}

impl From<String> for SplitOptions {
    fn from(name: String) -> Self {
        Self::new(name)
    }
}

impl From<&String> for SplitOptions {
    fn from(name: &String) -> Self {
        Self::new(name)
    }
}
