//! What the algorithms cost in worlds that no machine here has: the schedules themselves, run on a simulated clock.
//!
//! It is not a model of the algorithms: nothing here knows how a ring or a tree works. Each rank's real
//! [`AnySchedule`](collectives::AnySchedule) is polled against a transport whose messages take the time that a [`Model`] of the
//! links says. It is not backend-sim either: no endpoint, no frames, no faults, no threads; one loop runs 100,000 ranks.
//!
//! * [`Model`]: latency, bandwidth, what messages, bytes and folds cost the processor; [`measure`] times operations between two
//!   processes, [`Measured::fit`] finds the model that explains them.
//! * [`Engine`]: the discrete-event simulation, of all ranks or of one for all.
//! * [`Case`]: an algorithm, a world and a size; chooses how it can be run within a budget of messages.
//! * [`report`], [`plot`]: the table and the picture.

mod case;
mod data;
mod engine;
mod fit;
pub mod measure;
mod model;
pub mod plot;
mod queue;
pub mod report;
#[cfg(test)]
mod tests;

pub use case::{Budget, Case, Mode, Row, algorithms};
pub use data::check;
pub use engine::{Counts, Engine, Patience, Symmetry};
pub use fit::{Fit, Measured, Timing};
pub use model::{Costs, Model, Rates};
