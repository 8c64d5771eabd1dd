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
        Self { id: identity(&name, boot.trim(), &net), name }
    }

    /// Whether both are one host, in one network namespace: containers on one machine are not.
    pub(crate) fn same(&self, other: &Self) -> bool {
        self.id == other.id
    }
}

/// The number of a network namespace means something on its machine only, where the first one has the same number
/// everywhere, and a machine may have many. So the name stands in for what is missing.
fn identity(name: &str, boot: &str, net: &str) -> String {
    let or_name = |part: &str| if part.is_empty() { format!("name:{name}") } else { part.to_owned() };
    format!("{}/{}", or_name(boot), or_name(net))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_boot_and_one_namespace_are_one_host() {
        let id = |name: &str, boot: &str, net: &str| Host { name: name.into(), id: identity(name, boot, net) };
        let a = id("a", "boot", "net:[1]");
        // Containers can have names of their own in the namespace of their host.
        assert!(a.same(&id("b", "boot", "net:[1]")));
        assert!(!a.same(&id("a", "boot", "net:[2]")));
        assert!(!a.same(&id("a", "other", "net:[1]")));
        // Without the one or the other, names decide.
        for (boot, net) in [("", "net:[1]"), ("boot", ""), ("", "")] {
            assert!(id("a", boot, net).same(&id("a", boot, net)));
            assert!(!id("a", boot, net).same(&id("b", boot, net)), "'{boot}' '{net}'");
        }
    }

    #[test]
    fn this_host_is_itself() {
        let h = Host::this();
        assert!(h.same(&Host::this()) && !h.id.is_empty());
        #[cfg(target_os = "linux")]
        assert!(h.id.contains("/net:["), "{}", h.id);
    }
}
