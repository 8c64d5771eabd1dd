//! A backend of rustcomms with N ranks in one process.
