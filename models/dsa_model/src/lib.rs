//! A software Intel DSA, behind its binary interface: 64-byte descriptors come through a portal,
//! completion records and data go through memory by address.
//!
//! It does what the Intel Data Streaming Accelerator Architecture Specification (341204) says, as
//! far as Linux's `idxd` driver lets a user see it: shared work queues that answer "retry" when
//! they are full, dedicated ones that lose what does not fit, groups, engines that share the
//! device's path to memory, batches whose descriptors complete in no promised order, page faults
//! that stop an operation in its middle. Times are parameters with their origin ([`Timing`]);
//! faults are data ([`Faults`]).
//!
//! Of the operations it has those that check memory: no-op, batch, drain, compare pattern. What it
//! leaves out it refuses, as hardware without it would: all others, and everything of version 2 but
//! batches of one descriptor. Address spaces are one: every queue reaches what the bus reaches. The
//! device's configuration is fixed when it is made.
#![forbid(unsafe_code)]

mod check;
mod config;
mod device;
mod faults;
mod land;
mod memory;
mod operations;
mod portal;
mod schedule;
mod state;
mod timing;

pub use config::{ConfigError, DeviceConfig, ENGINES_MAX, Mode, QueueConfig};
pub use device::DsaModel;
pub use faults::{Fault, FaultPoint, Faults};
pub use operations::OPERATIONS;
pub use portal::QueuePortal;
pub use state::Counters;
pub use timing::Timing;
