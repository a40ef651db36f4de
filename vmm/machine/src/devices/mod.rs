//! Devices at ports: a serial port, the keyboard controller's reset, a debug port. Devices in
//! memory: network cards.

mod bus;
mod endpoint;
mod heartbeat;
mod serial;
pub(crate) mod virtio;

pub(crate) use bus::{Bus, Effect, PulseIrq};
pub(crate) use endpoint::Endpoint;
pub(crate) use serial::SavedSerial;
