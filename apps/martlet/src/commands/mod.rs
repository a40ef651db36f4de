//! What each subcommand does.

pub(crate) mod demo;
mod follow;
pub(crate) mod migrate;
pub(crate) mod owner;
pub(crate) mod serve;
pub(crate) mod status;
