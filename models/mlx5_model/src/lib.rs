//! A software mlx5: its firmware and its network queues, behind the binary interface of the real
//! one.
//!
//! What a driver sees is BAR 0, memory and interrupts, as bytes. The firmware reads commands from
//! the driver's memory and checks all of it; it answers after the time that real firmware was
//! measured to take ([`Latencies`]), in real or in virtual time; and it fails where it is told to
//! ([`Faults`]). The network card behind it passes frames between virtqueues in guest memory,
//! which it reaches through memory keys only, in
//! loopback: from the transmit queue of a pair to the receive queue that the table names for it.
//!
//! Where documents are silent, this is said at the place; the main sources are the "Ethernet
//! Adapters Programming Manual" (PRM), Linux' `mlx5_ifc.h` and `mlx5_ifc_vdpa.h`, and virtio 1.3.
//!
//! # Frames
//!
//! A transmit descriptor is completed when the frame is in a receive buffer, never before: without
//! one (or while the receive queue or the link is down) it stays in the ring. So a suspend loses no
//! frame and repeats none. A frame that was begun before a SUSPEND is finished before the SUSPEND is, so `hw_available_index` and
//! `hw_used_index` are equal then; frames that were not begun stay in the ring for whoever resumes
//! it. A queue that becomes ready is first looked at when its doorbell rings.

mod config;
mod faults;
mod firmware;
mod keys;
mod latency;
mod model;
mod nic;
mod num;
mod pages;
mod stats;
mod vectors;

pub use config::ModelConfig;
pub use faults::{Fault, Faults, Point};
pub use latency::{Class, Latencies, Latency};
pub use model::Model;
pub use nic::hardware::Hardware;
pub use nic::queue::{QueueCounts, QueueState};
pub use stats::{QueueStats, Stats};
