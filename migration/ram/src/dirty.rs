//! Dirty tracking as the engine sees it, whoever does it: the KVM log, the KVM dirty ring, or
//! userfaultfd with `PAGEMAP_SCAN`.

use crate::{GuestRam, RegionIndex};
use martlet_bitmap::PageBitmap;
use std::io;

/// Why pages could not be tracked. Always this host's fault: the migration is abandoned and the
/// guest runs on.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TrackError {
    /// There is a [`Tracker`](crate::Tracker) of this memory already.
    #[error("dirty tracking: another migration tracks this guest's pages")]
    AlreadyTracked,
    /// The host or a device refused.
    #[error("dirty tracking: {operation} failed")]
    Host {
        /// What was asked, e.g. `KVM_GET_DIRTY_LOG of region 1`.
        operation: String,
        /// What was answered.
        #[source]
        source: io::Error,
    },
}

impl TrackError {
    /// What the host or a device answered to this.
    pub fn host(operation: impl Into<String>, source: impl Into<io::Error>) -> TrackError {
        TrackError::Host { operation: operation.into(), source: source.into() }
    }
}

/// Finds the pages that somebody wrote: the vCPUs, a device, a thread of the VMM. Made for one
/// migration attempt; the pages are tracked from its making until its drop, which gives the guest
/// its full speed back. Several of them are put together by a [`Tracker`](crate::Tracker).
///
/// Order of calls, over and over: [`sync`](DirtySource::sync), then for the pages that are to be
/// sent [`rearm`](DirtySource::rearm), and only then are those pages read. A write that comes
/// after the rearm shows in a later sync; a write before it is in what is read. So a page is never
/// lost, however the calls of several rounds mix.
pub trait DirtySource: Send {
    /// Adds every page that was written, and not yet reported, to `into`. Never clears a bit
    /// there. May be called while vCPUs run or while they are stopped.
    fn sync(&mut self, into: &RamBitmap) -> Result<(), TrackError>;

    /// Catches the next write to the pages of `words`: bit `b` of `words[i]` is page
    /// `first_page + 64 * i + b` of `region`; `first_page` is a multiple of 64. Only pages that are
    /// read for sending afterwards may be named, whether or not a `sync` reported them: the first
    /// round names every page that was ever touched. A source that rearms while it syncs does
    /// nothing here.
    fn rearm(
        &mut self,
        region: RegionIndex,
        first_page: u64,
        words: &[u64],
    ) -> Result<(), TrackError>;
}

/// One dirty bitmap for each region of a guest.
#[derive(Debug)]
pub struct RamBitmap {
    regions: Box<[PageBitmap]>,
}

impl RamBitmap {
    /// Clear bitmaps for the regions of `ram`.
    pub fn new(ram: &GuestRam) -> RamBitmap {
        RamBitmap { regions: ram.regions().iter().map(|r| PageBitmap::new(r.pages())).collect() }
    }

    /// The bitmap of one region.
    pub fn region(&self, region: RegionIndex) -> &PageBitmap {
        &self.regions[usize::from(region.0)]
    }

    /// How many regions it covers.
    pub fn region_count(&self) -> usize {
        self.regions.len()
    }

    /// All bitmaps with their regions' numbers.
    pub fn iter(&self) -> impl Iterator<Item = (RegionIndex, &PageBitmap)> {
        (0..).map(RegionIndex).zip(self.regions.iter())
    }

    /// Dirty pages in all regions. Exact only while nobody writes.
    pub fn count(&self) -> u64 {
        self.regions.iter().map(PageBitmap::count).sum()
    }
}
