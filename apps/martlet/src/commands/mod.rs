//! What each subcommand does.

pub(crate) mod bench;
pub(crate) mod demo;
pub(crate) mod follow;
pub(crate) mod migrate;
pub(crate) mod owner;
pub(crate) mod serve;
pub(crate) mod sim;
pub(crate) mod status;
