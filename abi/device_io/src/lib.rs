//! What a driver needs of a device and its surroundings: registers, a submission portal, memory
//! that the device reaches, and a place to wait. What a model of the device needs from the other
//! side of the same bus: that memory, by bus address.
//!
//! Everything a driver and its device say to each other goes through here, as bytes. So a driver
//! can't tell a model from hardware, and a model can't see more of a driver than hardware could.

mod bus;
mod dma;
mod portal;
mod registers;
mod vectors;
mod waiter;

pub use bus::{BusFault, BusMemory};
pub use dma::{BusAddress, BusRun, Dma, DmaBlock, DmaError, HostMemory, Pinned};
pub use portal::{DESCRIPTOR_BYTES, Portal, Submission};
pub use registers::Registers;
pub use vectors::{Notify, Vectors};
pub use waiter::Waiter;
