//! What identifies a host: two ranks with the same identity can reach each other over loopback.

use serde::{Deserialize, Serialize};

/// A host, as ranks compare it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Host {
    /// Its name, for people.
    pub(crate) name: String,
    /// Boot id and network namespace: equal means loopback works.
    pub(crate) id: String,
}

impl Host {
    pub(crate) fn this() -> Self {
        let name = rustix::system::uname().nodename().to_string_lossy().into_owned();
        let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        let net = std::fs::read_link("/proc/self/ns/net").map(|p| p.to_string_lossy().into_owned()).unwrap_or_default();
        let id = format!("{}/{net}", boot.trim());
        // Without any of it, only the name is left to compare.
        let id = if id == "/" { name.clone() } else { id };
        Self { name, id }
    }
}
