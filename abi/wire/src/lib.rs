//! What goes over a migration's connections, byte for byte. No behaviour, no I/O.
#![forbid(unsafe_code)]

pub mod control;
