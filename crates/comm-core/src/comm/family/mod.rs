//! Communicators made from communicators: children, copies, and new memberships.

mod reconfigure;
mod split;

pub use self::reconfigure::Members;
