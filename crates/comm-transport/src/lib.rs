//! Links and the endpoint that moves framed channels over them: what backends for CPU memory, and the
//! control plane of all backends, stand on.
//!
//! It is not a backend and knows no algorithms: an operation's logic is a [`Task`] that posts sends and
//! receives; `collectives` provides those. How ranks find each other is not known here either.

mod endpoint;
mod engine;
mod frame;
mod link;
mod overlay;
mod wait;

pub use endpoint::{
    EAGER, Endpoint, EndpointOptions, GroupId, GroupSpec, Message, OpId, Patience, PieceId, Port, Sink, Survivors, Task,
};
pub use engine::{Engine, Turned, Ward};
pub use frame::{FRAGMENT, HEADER, PROTOCOL, carries_data};
pub use link::{Link, MemLink, SocketLink};
pub use overlay::{Connect, Dialer, Prober, SMALL_WORLD};
pub use wait::Notify;
