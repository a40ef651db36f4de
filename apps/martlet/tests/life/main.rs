//! What an owner or a host does to martlet's processes while they live: logs that nobody reads,
//! signals, exit statuses, files that are left behind, limits of the host.

#[path = "../support/command.rs"]
mod command;
mod ending;
mod limits;
mod log;
mod outcome;
mod sockets;
