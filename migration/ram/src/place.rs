//! Where received pages go.
#![allow(unsafe_code)]
// UNSAFETY: pages that must become zero again are written through raw pointers.

use crate::backing::Held;
use crate::{BadRun, GuestRam, LostPage, PAGE_BYTES, RamBitmap, RamRegion, RawSlice, RegionIndex};
use core::ops::Range;
use martlet_bitmap::{PageBitmap, WORD_BITS};
use martlet_units::{PAGE_SIZE, PageCount};
use rustix::fs::FallocateFlags;
use std::sync::Arc;

/// From this many pages on (2 MiB), memory of this crate that becomes zero is given back to the host
/// as a hole. Below it, writing zeros is quicker than the call, and does not split a huge page.
const PUNCH_PAGES_MIN: u64 = 512;

/// From this many pages on, content for memory that was never touched is better written to the
/// region's file than through its mapping: no page fault for each page, and no page cleared only
/// to be overwritten. Shorter runs are not worth the two calls that this takes.
const FILE_PAGES_MIN: u32 = 16;

/// Why pages can't be made zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PlaceError {
    /// The peer's fault.
    #[error(transparent)]
    Run(#[from] BadRun),
    /// This host's fault.
    #[error(transparent)]
    Lost(#[from] LostPage),
}

/// Where the content of a run of pages is to be written.
#[derive(Clone, Copy, Debug)]
pub enum Target<'ram> {
    /// Through the mapping.
    Memory(RawSlice<'ram>),
    /// To the region's file, which is the same memory.
    File {
        /// The region whose file it is.
        region: RegionIndex,
        /// First byte in the file.
        offset: u64,
        /// How many.
        bytes: u64,
    },
}

/// Puts received pages into a waiting guest's memory. Shared by all channels of a migration.
///
/// The memory must be all zero when the first page comes, as it is when it is made; pages that the
/// source never touched are not sent at all. So a zero page that comes before any content needs
/// nothing done and stays untouched.
///
/// Runs come from the peer and are checked. A peer that sends one page over two channels at once
/// spoils that page of its own guest and nothing else.
#[derive(Debug)]
pub struct Placer {
    ram: Arc<GuestRam>,
    /// Pages that may hold something else than zeros.
    filled: RamBitmap,
}

impl Placer {
    /// For memory that is all zero.
    pub fn new(ram: Arc<GuestRam>) -> Placer {
        let filled = RamBitmap::new(&ram);
        Placer { ram, filled }
    }

    /// The memory that it fills.
    pub fn ram(&self) -> &GuestRam {
        &self.ram
    }

    /// Where the content of a data run is to be written. Counts as written from now on.
    pub fn data_target(
        &self,
        region: RegionIndex,
        first_page: u64,
        count: u32,
    ) -> Result<Target<'_>, BadRun> {
        let memory = self.ram.slice(region, first_page, count)?;
        let filled = self.filled.region(region);
        let pages = first_page..first_page + u64::from(count);
        let is_fresh =
            count >= FILE_PAGES_MIN && runs_within(filled, pages.clone()).next().is_none();
        filled.set_range(pages);
        let file = self.ram.region(region).and_then(RamRegion::file).filter(|_| is_fresh);
        Ok(file.map_or(Target::Memory(memory), |file| {
            let bytes = u64::from(count) * PAGE_SIZE;
            Target::File { region, offset: file.offset + first_page * PAGE_SIZE, bytes }
        }))
    }

    /// Makes a run of pages zero. Only pages that were given out as a data target since they were
    /// last zero are touched; returns how many these were.
    pub fn zero(
        &self,
        region: RegionIndex,
        first_page: u64,
        count: u32,
    ) -> Result<PageCount, PlaceError> {
        self.ram.slice(region, first_page, count)?;
        let filled = self.filled.region(region);
        let mut cleared = 0;
        for run in runs_within(filled, first_page..first_page + u64::from(count)) {
            self.clear(region, run.clone())?;
            cleared += run.end - run.start;
            filled.clear_range(run);
        }
        Ok(PageCount(cleared))
    }

    fn clear(&self, region: RegionIndex, run: Range<u64>) -> Result<(), LostPage> {
        let memory = &self.ram.regions()[usize::from(region.0)];
        let pages = run.end - run.start;
        if let Held::Pages { file, offset, is_own: true } = memory.held()
            && pages >= PUNCH_PAGES_MIN
        {
            let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            let (start, bytes) = (offset + run.start * PAGE_SIZE, pages * PAGE_SIZE);
            if rustix::fs::fallocate(file, flags, start, bytes).is_ok() {
                return Ok(());
            }
        }
        for page in run {
            // A hostile peer may make two channels clear one page. The vCPUs that read it later are
            // ordered behind the channels by the start.
            // SAFETY: the page that `host_ptr` gave, which lives as long as `self.ram`.
            unsafe { martlet_raw_memory::clear(memory.host_ptr(page), PAGE_BYTES) }
                .map_err(|_| self.ram.lost(region, page))?;
        }
        Ok(())
    }
}

/// The maximal runs of set bits within `range`.
fn runs_within(bitmap: &PageBitmap, range: Range<u64>) -> impl Iterator<Item = Range<u64>> {
    let mut next = range.start;
    core::iter::from_fn(move || {
        let start = find(bitmap, next, range.end, true);
        let end = find(bitmap, start, range.end, false);
        next = end;
        (start < range.end).then_some(start..end)
    })
}

/// The first page in `from..end` whose bit equals `set`, else `end`.
#[allow(clippy::cast_possible_truncation, reason = "a bitmap's words fit usize")]
fn find(bitmap: &PageBitmap, from: u64, end: u64, set: bool) -> u64 {
    let mut page = from;
    while page < end {
        let word = bitmap.word((page / WORD_BITS) as usize);
        let rest = if set { word } else { !word } >> (page % WORD_BITS);
        if rest != 0 {
            return (page + u64::from(rest.trailing_zeros())).min(end);
        }
        page = (page / WORD_BITS + 1) * WORD_BITS;
    }
    end
}

#[cfg(test)]
#[path = "place_tests.rs"]
mod tests;
