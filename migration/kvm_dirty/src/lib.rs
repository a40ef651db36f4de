//! Dirty tracking by KVM, for any VMM: which pages the vCPUs wrote.
//!
//! The VMM says which memory slots its guest's memory is ([`KvmSlots`]), and picks one of two ways
//! when it makes the VM. Both are exact, and both are a part of a [`Tracker`](martlet_ram::Tracker):
//!
//! * [`KvmLog`]: a bit for each page in the kernel. Nothing to prepare; costs the reading of the
//!   whole log at each sync, a bit a page.
//! * [`KvmRings`]: a list for each vCPU. The VMM enables `KVM_CAP_DIRTY_LOG_RING_ACQ_REL` before it
//!   makes vCPUs, and their threads empty a full ring; the cost follows what is written.
//!
//! Descriptors of the VM and of vCPUs are duplicated, so that any version of any crate around KVM
//! will do.

mod log;
mod raw;
mod ring;
mod slots;

pub use log::KvmLog;
pub use ring::{KvmRing, KvmRings, RING_ENTRIES_MIN, RingShare};
pub use slots::KvmSlots;
