//! Memory, addresses and time between a driver and a model of its device.
