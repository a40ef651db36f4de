//! Connections of a migration: addresses, control connection, data channels.

mod address;

pub use address::{Address, ParseAddressError};
