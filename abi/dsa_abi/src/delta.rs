//! Delta records: how a piece of memory changed, by words of 8 bytes.

use zerocopy::little_endian::{U16, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Bytes of one changed word in a delta record.
pub const DELTA_ENTRY_BYTES: usize = 10;
/// Bytes of a word: the granularity of a delta. Sources, destination and sizes are multiples of it.
pub const DELTA_WORD_BYTES: usize = 8;
/// Longest input of a delta, in bytes: an offset is a 16-bit count of words.
pub const DELTA_INPUT_BYTES_MAX: usize = 0x8_0000;
/// Smallest limit that a descriptor may set for a delta record, in bytes. Every limit is a multiple
/// of [`DELTA_ENTRY_BYTES`].
pub const DELTA_RECORD_BYTES_MIN: usize = 80;

/// One changed word.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct DeltaEntry {
    /// Where it is, in words from the begin; ascending in a record.
    pub word: U16,
    /// What it is now.
    pub data: U64,
}

const _: () = assert!(size_of::<DeltaEntry>() == DELTA_ENTRY_BYTES);

/// What creating a delta record found: the result byte of its completion record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeltaResult(pub u8);

impl DeltaResult {
    /// No difference; the record is empty.
    pub const EQUAL: DeltaResult = DeltaResult(0);
    /// The record holds all differences.
    pub const RECORDED: DeltaResult = DeltaResult(1);
    /// More differences than the record may hold; it is not usable.
    pub const OVERFLOW: DeltaResult = DeltaResult(2);
}
