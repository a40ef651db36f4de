//! The mlx5 vDPA driver: firmware commands in batches.
//!
//! | module | what |
//! |---|---|
//! | [`device`] | [`Mlx5Device`]: what a VMM sees |
//! | [`queues`] | virtqueues: their states, how they are stopped and started together |
//! | [`memory`] | memory keys |
//! | [`batch`] | the batch executor: a window of commands, a report for each; no I/O |
//! | [`command`] | the command queue: slots, mailboxes, permits, deadlines; no I/O |
//! | [`firmware`] | bring-up, events, pages; shared by all who drive something on the function |
//! | [`options`] | the switches |
#![cfg_attr(not(test), forbid(unsafe_code))]

pub mod batch;
pub mod command;
pub mod device;
pub mod firmware;
pub mod memory;
pub mod options;
pub mod queues;

pub use device::{Mlx5Device, Platform};
pub use options::Options;
