//! The completion record.

use crate::Status;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Bytes of a completion record.
pub const COMPLETION_BYTES: usize = 32;

/// What the device says of an operation, at a multiple of 32 in memory.
///
/// The device writes the status byte last. A reader loads that byte alone, with acquire, until it
/// is not zero, and reads the rest then.
#[derive(
    Clone,
    Copy,
    Debug,
    Default,
    PartialEq,
    Eq,
    FromBytes,
    IntoBytes,
    Immutable,
    KnownLayout,
    Unaligned,
)]
#[repr(C)]
pub struct CompletionRecord {
    status: u8,
    result: u8,
    reserved: U16,
    bytes_completed: U32,
    fault_address: U64,
    specific: [u8; 16],
}

const _: () = assert!(size_of::<CompletionRecord>() == COMPLETION_BYTES);

impl CompletionRecord {
    /// Where the status byte is in the record.
    pub const STATUS_OFFSET: usize = 0;

    /// The record in memory.
    pub fn from_bytes(bytes: &[u8; COMPLETION_BYTES]) -> CompletionRecord {
        zerocopy::transmute!(*bytes)
    }

    /// The record as it lies in memory.
    pub fn to_bytes(self) -> [u8; COMPLETION_BYTES] {
        zerocopy::transmute!(self)
    }

    /// A record of an operation that ended like this, everything else zero.
    pub fn new(status: Status) -> CompletionRecord {
        CompletionRecord { status: status.0, ..CompletionRecord::default() }
    }

    /// Marks the access that faulted as a write, in the status byte.
    pub fn with_write_fault(mut self) -> CompletionRecord {
        self.status |= Status::WRITE_FAULT;
        self
    }

    /// Sets the result byte.
    pub fn with_result(mut self, result: u8) -> CompletionRecord {
        self.result = result;
        self
    }

    /// Sets the bytes, or for a batch the descriptors, that were completed.
    pub fn with_completed(mut self, completed: u32) -> CompletionRecord {
        self.bytes_completed = completed.into();
        self
    }

    /// Sets the address that faulted.
    pub fn with_fault_address(mut self, address: u64) -> CompletionRecord {
        self.fault_address = address.into();
        self
    }

    /// Sets the flags that are invalid.
    pub fn with_invalid_flags(mut self, flags: u32) -> CompletionRecord {
        let bytes = self.specific.iter_mut().zip((flags & 0x00ff_ffff).to_le_bytes());
        bytes.for_each(|(to, from)| *to = from);
        self
    }

    /// The status code, without the write bit.
    pub fn status(&self) -> Status {
        Status::from_byte(self.status)
    }

    /// Whether the access that faulted was a write.
    pub fn is_write_fault(&self) -> bool {
        self.status & Status::WRITE_FAULT != 0
    }

    /// The result byte: 0 for equal and 1 for different after a comparison.
    pub fn result(&self) -> u8 {
        self.result
    }

    /// Bytes completed; after a comparison that found a difference, where the first one is; after
    /// a batch, descriptors completed.
    pub fn completed(&self) -> u32 {
        self.bytes_completed.get()
    }

    /// The address that faulted, after a page fault.
    pub fn fault_address(&self) -> u64 {
        self.fault_address.get()
    }

    /// Which flags are invalid, after [`INVALID_FLAGS`](Status::INVALID_FLAGS).
    pub fn invalid_flags(&self) -> u32 {
        let [a, b, c, ..] = self.specific;
        u32::from_le_bytes([a, b, c, 0])
    }
}
