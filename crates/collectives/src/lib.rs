//! Collective algorithms as per-rank state machines, and the driver that runs them.
