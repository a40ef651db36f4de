//! A small KVM machine whose guest can be moved away: memory, vCPUs, interrupt controllers, a
//! serial port; saved and restored completely.

mod config;
mod threads;
mod vcpu;

pub use config::{Accel, KernelConfig, SerialOut, Tracking};
