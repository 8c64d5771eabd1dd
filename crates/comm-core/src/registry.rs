//! Backends by name.

use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock};

use parking_lot::RwLock;

use crate::comm::Communicator;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::options::CommOptions;

/// Creates a communicator of one backend. Collective over its members.
pub type Factory = dyn Fn(Device, CommOptions) -> Result<Communicator> + Send + Sync;

fn table() -> &'static RwLock<BTreeMap<String, Arc<Factory>>> {
    static TABLE: OnceLock<RwLock<BTreeMap<String, Arc<Factory>>>> = OnceLock::new();
    TABLE.get_or_init(RwLock::default)
}

/// Makes a backend known under `name`; replaces an earlier one of that name.
///
/// Counterpart: `torchcomms.register_backend`.
pub fn register_backend<F>(name: &str, factory: F)
where
    F: Fn(Device, CommOptions) -> Result<Communicator> + Send + Sync + 'static,
{
    table().write().insert(name.to_owned(), Arc::new(factory));
}

/// The names of all known backends. Counterpart: `torchcomms.built_backends`.
#[must_use]
pub fn built_backends() -> Vec<String> {
    table().read().keys().cloned().collect()
}

/// Whether a backend of this name is known. Counterpart: `torchcomms.is_backend_built`.
#[must_use]
pub fn is_backend_built(name: &str) -> bool {
    table().read().contains_key(name)
}

/// Creates a communicator over the backend of this name. Collective over all its ranks.
///
/// Counterpart: `torchcomms.new_comm`.
///
/// # Errors
///
/// `Unsupported` for an unknown name, listing the known ones; else what the backend says.
pub fn new_comm(backend: &str, device: Device, options: CommOptions) -> Result<Communicator> {
    let factory = table().read().get(backend).cloned();
    match factory {
        Some(f) => f(device, options),
        None => Err(Error::unsupported(
            format!("backend '{backend}'"),
            format!("it is not built in; built in: [{}]", built_backends().join(", ")),
        )),
    }
}
