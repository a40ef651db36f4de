//! The mlx5 vDPA driver: firmware commands in batches.

pub mod batch;
pub mod command;
pub mod memory;
