//! Devices at ports: a serial port, the keyboard controller's reset, a debug port.

mod bus;
mod endpoint;
mod heartbeat;
mod serial;

pub(crate) use bus::{Bus, Effect};
pub(crate) use endpoint::Endpoint;
pub(crate) use serial::SavedSerial;
