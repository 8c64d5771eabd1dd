//! Collective communication for Rust.
