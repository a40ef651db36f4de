//! Guest memory as a migration sees it: regions, dirty pages, rounds, zero pages, runs.
//!
//! ```text
//! DirtySource --sync--> RamBitmap --Scanner--> Chunk (512 pages, one bit each)
//!     ^ rearm, just before the pages are read      |
//!     +--------------------------------------------+--> ZeroCheck --> PageBatch --> a channel
//! ```
//!
//! This crate holds no thread, socket or clock. Guest memory is never a reference here: a vCPU
//! or a device may write it at any moment, so it is a pointer and a length until the kernel or a
//! checked copy reads it.

mod dirty;
mod region;

pub use dirty::{DirtySource, RamBitmap, TrackError};
pub use region::{GuestRam, REGIONS_MAX, RamError, RamRegion, RegionIndex};

/// Pages in a chunk: the unit in which dirty pages are handed out and the unit that always takes
/// the same channel. 2 MiB, so that a chunk is one huge page where the host uses them.
pub const CHUNK_PAGES: u64 = 512;
