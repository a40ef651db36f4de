//! The mlx5 vDPA driver: firmware commands in batches.
//!
//! | module | what |
//! |---|---|
//! | [`command`] | the command queue: slots, mailboxes, permits, deadlines; no I/O |
//! | [`batch`] | the batch executor: a window of commands, a report for each; no I/O |
//! | [`firmware`] | bring-up, events, pages; shared by all who drive something on the function |
//! | [`options`] | the switches |
#![forbid(unsafe_code)]

pub mod batch;
pub mod command;
pub mod firmware;
pub mod options;

pub use options::Options;
