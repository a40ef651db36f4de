//! Network cards of the guest: virtio-mmio devices (virtio 1.3, 4.2) whose data path belongs to
//! vDPA devices.
//!
//! ```text
//! vCPU threads --MMIO--> Nic: registers, control queue      owner, engine --> Nics: suspend, resume,
//!                         | kick, set up, reset                                save, load, dirty log
//!                         v                                                     |
//!                    dyn VdpaDevice  <------------------------------------------+
//! ```
//! The vDPA device moves frames by itself. The machine sees registers only, and the control queue,
//! which it serves itself: so how many queue pairs are in use is known here and travels.
//!
//! What a guest writes is hostile. A queue that is not in its memory, or a control queue that
//! makes no sense, costs it the card until it resets it (`DEVICE_NEEDS_RESET`, 2.1).

mod backing;
mod control;
mod group;
mod interrupts;
mod lease;
mod life;
mod mmio;
mod nic;
mod pages;
mod queue;
mod registers;
mod saved;
mod service;
#[cfg(test)]
mod tests;
mod travel;

pub(crate) use group::Nics;
pub(crate) use lease::{Devices, Lease};
pub(crate) use pages::NicPages;
#[cfg(feature = "threads")]
pub(crate) use registers::MMIO_START;
pub(crate) use registers::{MMIO_END, MMIO_STRIDE};
pub(crate) use saved::{NicKind, SavedNic};

/// Most network cards of a machine: as many as there are interrupt lines for them.
pub(crate) const NICS_MAX: usize = registers::LINES.len();

const _: () = assert!(NICS_MAX <= martlet_guest_program::NICS_MAX);
