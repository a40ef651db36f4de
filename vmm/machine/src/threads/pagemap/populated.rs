//! Where a guest's memory can have been written at all.

use martlet_bitmap::PageBitmap;
use martlet_ram::{CHUNK_PAGES, RamRegion, mark_touched};
use martlet_units::PAGE_SIZE;
use std::io;
use std::ops::Range;

/// Where a region's file has pages.
#[derive(Debug)]
pub(super) struct Populated {
    /// How many it had before the runs were learnt; none if they are not known to be complete.
    pages: Option<u64>,
    /// Page numbers, in runs of whole chunks.
    runs: Vec<Range<u64>>,
    /// One bit a page, to learn with.
    bitmap: PageBitmap,
}

impl Populated {
    pub(super) fn new(region: &RamRegion) -> Populated {
        Populated { pages: None, runs: Vec::new(), bitmap: PageBitmap::new(region.pages()) }
    }

    /// The runs, if the file still has the pages that it had. Nobody punches holes into the memory
    /// of a guest that is being tracked, so the same number means the same pages.
    pub(super) fn runs(&self, region: &RamRegion) -> io::Result<Option<&[Range<u64>]>> {
        Ok((self.pages == Some(pages_of_file(region)?)).then_some(self.runs.as_slice()))
    }

    /// A page that comes while this looks for them makes the numbers differ the next time. So does
    /// one that was missed: the kernel may hide one for a moment (`mark_touched`).
    pub(super) fn learn(&mut self, region: &RamRegion) -> io::Result<()> {
        let pages = pages_of_file(region)?;
        self.bitmap.clear_range(0..region.pages());
        let found = mark_touched(region, &self.bitmap)?;
        self.pages = (found >= pages).then_some(pages);
        self.runs.clear();
        for run in self.bitmap.runs() {
            let start = run.start / CHUNK_PAGES * CHUNK_PAGES;
            let end = run.end.next_multiple_of(CHUNK_PAGES).min(region.pages());
            match self.runs.last_mut() {
                Some(last) if last.end >= start => last.end = end,
                _ => self.runs.push(start..end),
            }
        }
        Ok(())
    }
}

/// Pages that a region's file holds, in memory or swapped out (`shmem_recalc_inode`, mm/shmem.c).
fn pages_of_file(region: &RamRegion) -> io::Result<u64> {
    /// `st_blocks` counts these whatever the block size (stat(3type)).
    const BLOCK_BYTES: u64 = 512;
    let file = region.file().ok_or(io::ErrorKind::Unsupported)?;
    let blocks = u64::try_from(rustix::fs::fstat(file.fd)?.st_blocks).unwrap_or(0);
    Ok(blocks / (PAGE_SIZE / BLOCK_BYTES))
}
