//! The host-side control plane of rustcomms over an endpoint.
