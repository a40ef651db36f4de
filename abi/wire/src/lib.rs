//! What goes over a migration's connections, byte for byte. No behaviour, no I/O.
//!
//! Every connection starts with a [`hello::Hello`] one way and a [`hello::HelloReply`] the other.
//! After that a control or query connection carries [`control::Control`] messages, each behind a
//! [`frame::FrameHeader`]; a data connection carries pages and barriers as [`pages`] lays out.
//!
//! All numbers are little-endian. Every decoder takes bytes from a peer that may be anybody: it
//! checks before it allocates, never panics, and says what was wrong with which values.
#![forbid(unsafe_code)]

pub mod cbor;
pub mod control;
mod control_check;
pub mod frame;
pub mod fuzz;
pub mod hello;
pub mod pages;
pub mod rdma;
