//! vCPUs: one thread each, ordered about together.

pub(crate) mod backend;
mod countdown;
mod group;
pub(crate) mod kick;
mod orders;
mod shared;
mod thread;

pub(crate) use group::Group;
pub(crate) use shared::{lock, try_lock};
