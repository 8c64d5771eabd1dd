//! The suite that every backend of rustcomms must pass, ours or a stranger's: it makes every operation's calls in every
//! form, and compares what they leave in memory with results that it works out itself.
//!
//! It is not a benchmark and does not test what a backend does when peers die; and it depends on no backend: the
//! communicators, and the names of algorithms to force, are given to it.
//!
//! What is tried: operation, element type (structs of the user's too), operator, form (synchronous, asynchronous, as
//! a future, scoped, with the handle dropped at once, and with types chosen at run time), in or out of place or a buffer per rank,
//! worlds of several sizes, every root, counts from 0 to 1 Mi, uneven blocks with zeros, every forced algorithm. What is
//! looked at: every element of the results, identical bits on all ranks, inputs that must not change, outputs that must not be
//! written, and guard zones around them all. Values are such that every order of folding gives the same bits; or full
//! floats, with a tolerance that follows from the number of ranks and the type; or NaN, infinities and extreme integers.
//!
//! What a backend is allowed not to do stands in a [`Table`], written by hand: the suite compares it with the answers
//! of [`Communicator::supports`](comm_core::Communicator::supports), so that a backend cannot shrink its own duties.
//!
//! A stranger's backend whose ranks are threads of one process needs a function that makes the communicators of a
//! world:
//!
//! ```
//! use comm_conformance::{Suite, Table};
//! use comm_core::{CommOptions, Communicator, Result};
//!
//! fn my_world(size: usize) -> Result<Vec<Communicator>> {
//!     backend_sim::world(size, &CommOptions::new().name("mine"))
//! }
//!
//! let table = Table::from_toml("backend = \"sim\"")?;
//! # let suite = Suite::new(table.clone()).worlds(&[2]).filter("barrier");
//! # suite.run(my_world);
//! let suite = Suite::new(table).worlds(&[1, 3]);
//! # let suite = suite.filter("scan Out Sync f32 sum");
//! let report = suite.run(my_world);
//! println!("{report}");
//! assert_eq!(report.failed(), 0);
//! # Ok::<(), comm_core::Error>(())
//! ```
//!
//! Where ranks are processes, each calls [`Suite::run_rank`] and [`Suite::finish`], and somebody collects the
//! [`RankReport`]s (as text, see [`RankReport::to_text`]) and merges them with [`Suite::merge`]; or the ranks call
//! [`Suite::gather`] in between. The example `conformance` has threads and processes, and is what `cargo xtask conformance`
//! runs.

mod buffer;
mod case;
mod dynamic;
mod endings;
mod exec;
mod expect;
mod kind;
mod layout;
mod messages;
mod oper;
mod pairs;
mod plan;
mod program;
mod report;
mod scene;
mod suite;
mod table;
mod value;

pub use case::Algo;
pub use plan::{Level, WORLDS};
pub use program::{Played, Program, Vocabulary};
pub use report::{Failure, RankReport, Report};
pub use suite::Suite;
pub use table::Table;
