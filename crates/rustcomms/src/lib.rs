//! Collective communication for Rust.

pub use comm_core::*;
