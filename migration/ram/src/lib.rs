//! Guest memory as a migration sees it: regions, dirty pages, rounds, zero pages, runs.
//!
//! ```text
//! DirtySource --sync--> RamBitmap --Scanner--> Chunk (512 pages, one bit each)
//!     ^ rearm, just before the pages are read      |
//!     +--------------------------------------------+--> ZeroFinder --> PageBatch --> a channel
//! ```
//!
//! This crate holds no thread, socket or clock. Guest memory is never a reference here: a vCPU
//! or a device may write it at any moment, so it is a pointer and a length until the kernel or a
//! checked copy reads it. The memory is this crate's own, or a VMM's: [`Backing`] says what follows
//! from that. A page of it may be lost (poisoned, or its backing gone): that is a
//! [`LostPage`] and not the process's end, for which the first region that is made installs a
//! handler of SIGBUS (see [`martlet_raw_memory`]).

mod access;
mod advise;
mod backing;
mod batch;
mod chunk;
mod digest;
mod dirty;
mod finder;
mod lost;
mod marker;
mod page_tables;
mod place;
mod region;
mod scanner;
mod slice;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
mod tracker;
mod untouched;
#[cfg(feature = "vm-memory")]
mod vm_memory;
mod zero;

pub use access::AccessError;
pub use backing::{Backing, RegionFile};
pub use batch::{BYTES_MAX, PageBatch, Pushed, RUNS_MAX, Run, RunKind};
pub use chunk::{CHUNK_WORDS, Chunk, ChunkBits, channel_of};
pub use dirty::{DirtySource, RamBitmap, TrackError};
pub use finder::{CpuFinders, ZeroFinder, ZeroFinders};
pub use lost::LostPage;
pub use marker::{DirtyMarker, MarkedPages};
pub use martlet_bitmap::PageBitmap;
pub use place::{PlaceError, Placer, Target};
pub use region::{GuestRam, REGIONS_MAX, RamError, RamRegion, RegionIndex};
pub use scanner::{Scanner, WINDOW_PAGES};
pub use slice::{BadRun, RawSlice};
pub use tracker::Tracker;
pub use untouched::mark_touched;
#[cfg(feature = "vm-memory")]
pub use vm_memory::VmMemoryPages;
pub use zero::ZeroCheck;

/// Pages in a chunk: the unit in which dirty pages are handed out and the unit that always takes
/// the same channel. 2 MiB, so that a chunk is one huge page where the host uses them.
pub const CHUNK_PAGES: u64 = 512;

/// Bytes in a page, for lengths and offsets in this process.
#[expect(clippy::cast_possible_truncation, reason = "a small constant")]
const PAGE_BYTES: usize = martlet_units::PAGE_SIZE as usize;

#[cfg(test)]
#[allow(unsafe_code)]
// UNSAFETY: tests stand in for the guest, which writes its memory.
mod tests {
    use super::*;
    use martlet_units::{Gfn, PageCount, PageRange};

    /// Memory of these lengths in pages, with holes between the regions.
    pub(crate) fn regions(lengths: &[u64]) -> GuestRam {
        let mut start = 0;
        let mut range = |length: &u64| {
            let range = PageRange::try_new(Gfn(start), PageCount(*length)).unwrap();
            start += length + 7;
            range
        };
        GuestRam::create(&lengths.iter().map(&mut range).collect::<Vec<_>>()).unwrap()
    }

    pub(crate) fn one_region(pages: u64) -> GuestRam {
        regions(&[pages])
    }

    /// Touches a page; with a byte that is not zero it has content.
    pub(crate) fn write_page(ram: &GuestRam, region: u16, page: u64, byte: u8) {
        let start = ram.regions()[usize::from(region)].host_ptr(page);
        // SAFETY: a mapped page that only this test's thread writes.
        unsafe { start.write_bytes(byte, PAGE_BYTES) };
    }

    pub(crate) fn page_is_zero(ram: &GuestRam, region: u16, page: u64) -> bool {
        let start = ram.regions()[usize::from(region)].host_ptr(page);
        // SAFETY: a mapped page.
        unsafe { ZeroCheck::detect().is_zero(start) }
    }
}
