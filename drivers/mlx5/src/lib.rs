//! The mlx5 vDPA driver: firmware commands in batches.
//!
//! [`Mlx5Device`] is what a VMM sees, [`options`] are the switches. Inside:
//!
//! | module | what |
//! |---|---|
//! | `device` | the device's operations |
//! | `queues` | virtqueues: their states, how they are stopped and started together |
//! | `memory` | memory keys |
//! | `batch` | the batch executor: a window of commands, a report for each; no I/O |
//! | `command` | the command queue: slots, mailboxes, permits, deadlines; no I/O |
//! | `firmware` | bring-up, events, pages; shared by all who drive something on the function |
//!
//! # A switchover
//!
//! ```text
//! source                                          destination
//!   log on: one command a queue                     prepare: queues made, run and suspended on an
//!   |                                                        empty ring; keys built
//!   begin_suspend: MODIFY to SUSPEND for all, each  |
//!   |  followed by its QUERY; 16 at a time          |
//!   poll_suspend: all stand, indices are known      |
//!   take_dirty, queue_state: no command             set_queue_state: no command
//!                                                   begin_resume: one MODIFY a queue carries rings,
//!                                                   |  key, indices and the start; each queue is
//!                                                   |  kicked when its own is done
//!                                                   poll_resume: all run, the link is published
//! ```
//!
//! # What is not here
//!
//! Frames are steered by the receive queue table alone. On hardware a TIR and a flow rule lead to
//! that table, and transmit queues belong to a TIS (Linux `mlx5_vnet.c`, `create_tir`,
//! `add_fwd_to_tir`, `create_tis`); neither is set up yet.
#![cfg_attr(not(test), forbid(unsafe_code))]

mod batch;
mod command;
mod device;
mod firmware;
mod memory;
pub mod options;
mod queues;

pub use command::{CommandError, OpcodeStats, QueueStats, SubmitError};
pub use device::{Mlx5Device, Platform, Recoveries};
pub use firmware::BringUpError;
pub use memory::{Deletion, MemoryCounters, Update};
pub use options::Options;
pub use queues::DeviceState;
