//! Communicators made from communicators: children, copies, and new memberships.

mod reconfigure;
mod split;
mod split_options;

pub use self::reconfigure::Members;
pub use self::split_options::SplitOptions;
