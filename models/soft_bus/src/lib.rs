//! Memory, addresses and time between a driver and a model of its device, in one process.
//!
//! [`SoftBus`] is the memory's side: an IOMMU that gives memory bus addresses and refuses every
//! access to others. [`Stage`] is the time's side: models take turns on it, in real time or in
//! virtual time, and their drivers wait there.

mod bus;
mod clock;
mod stage;

pub use bus::{Addressing, SoftBus};
pub use clock::SoftClock;
pub use stage::{Seat, Stage, Turn};
