//! `cargo xtask bench compare`: ours beside Open MPI and Gloo, same operations, sizes and counts, in the same run.
//!
//! Where the cores of a virtual machine lie (same core, same cache, different caches) changes results by 2 to 4 times, and changes within
//! minutes. So a round runs ours and the peers one after the other, with a probe of the placement ([`place`]) before and after each;
//! pairs whose probes disagree are dropped and repeated ([`rounds`]), and ratios are taken within pairs.

pub mod drive;
pub mod estimate;
pub mod limits;
pub mod options;
pub mod ours;
pub mod output;
pub mod place;
pub mod report;
pub mod rounds;
pub mod side;
pub mod stats;
