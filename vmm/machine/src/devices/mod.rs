//! Devices at ports: a serial port, the keyboard controller's reset, a debug port, a power button and
//! a clock. Devices in memory: network cards.

pub(crate) mod board;
mod bus;
mod endpoint;
mod heartbeat;
mod serial;
pub(crate) mod virtio;

pub(crate) use board::SavedBoard;
pub(crate) use bus::{
    Bus, Effect, PulseIrq, RESET_CONTROL, RESET_CONTROL_RESET, SERIAL, SERIAL_IRQ,
};
pub(crate) use endpoint::Endpoint;
pub(crate) use serial::SavedSerial;
