//! Intel Data Streaming Accelerator: the layouts of descriptors, completion records and
//! capability registers, byte for byte. No behaviour, no I/O. Of the operations
//! it has those that check memory; copies, fills, deltas and checksums are left out.
//!
//! Sources: the Intel Data Streaming Accelerator Architecture Specification (341204), cited here as
//! "DSA specification", and Linux's `include/uapi/linux/idxd.h`, against which a compiled probe
//! checks every offset and number (`tests/header.rs`). All fields are little-endian.
//!
//! Codes that hardware or another process may send are open types: an unknown number survives and
//! prints as a number.
#![forbid(unsafe_code)]

mod capability;
mod codes;
mod completion;
mod descriptor;
mod flags;

pub use capability::{OperationCapability, Version};
pub use codes::{Opcode, Status};
pub use completion::{COMPLETION_BYTES, CompletionRecord};
pub use descriptor::{DESCRIPTOR_BYTES, Descriptor, INTERRUPT_HANDLE_NONE};
pub use flags::Flags;

/// Largest number of work queue entries of a device, all work queues together (Sapphire and Emerald
/// Rapids: WQCAP says 128).
pub const DEVICE_ENTRIES: u32 = 128;
/// Bytes of a work queue's portal; a descriptor may be written to any 64-byte slot of it.
pub const PORTAL_BYTES: usize = 4096;
/// Smallest batch: a batch of one descriptor is refused by version 1 devices with
/// [`Status::DESCRIPTOR_COUNT`] (DSA specification, Batch descriptor).
pub const BATCH_DESCRIPTORS_MIN: u32 = 2;
/// Alignment of a batch's descriptor list, in bytes.
pub const DESCRIPTOR_LIST_ALIGN: usize = 64;
/// Alignment of a completion record, in bytes.
pub const COMPLETION_ALIGN: usize = 32;
