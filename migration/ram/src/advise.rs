//! Advice to the kernel on guest memory, for the side that waits for a guest.
#![allow(unsafe_code)]
// UNSAFETY: madvise takes an address range; this module only names ranges of a region's mapping
// and only gives advice that leaves the content as it is.

use crate::RamRegion;
use core::ops::Range;
use martlet_units::PAGE_SIZE;
use rustix::io::Errno;
use rustix::mm::Advice;
use std::io;

/// Pages populated with one call, 128 MiB: so that a signal, which ends a call early, costs little.
const POPULATE_PAGES_MAX: u64 = 32_768;

impl RamRegion {
    /// Allocates and maps these pages, writable, without changing their content, so that whoever
    /// writes them first takes no page fault (`MADV_POPULATE_WRITE`, Linux 5.14). Older kernels
    /// give `InvalidInput`; then the pages come one by one as they are written.
    ///
    /// # Panics
    /// If the range leaves the region.
    pub fn populate(&self, pages: Range<u64>) -> io::Result<()> {
        let mut next = pages.start;
        while next < pages.end {
            let end = pages.end.min(next + POPULATE_PAGES_MAX);
            match self.advise(next..end, Advice::LinuxPopulateWrite) {
                Ok(()) => next = end,
                // Populated pages are passed over quickly, so the repetition makes progress.
                Err(Errno::INTR | Errno::AGAIN) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    #[expect(clippy::cast_possible_truncation, reason = "within a mapping, so within usize")]
    fn advise(&self, pages: Range<u64>, advice: Advice) -> Result<(), Errno> {
        assert!(pages.end <= self.pages(), "page {} of {}", pages.end, self.pages());
        if pages.is_empty() {
            return Ok(());
        }
        let bytes = ((pages.end - pages.start) * PAGE_SIZE) as usize;
        // SAFETY: the range is within the region's own mapping, as asserted, and neither advice
        // that is given here changes what the memory holds.
        unsafe { rustix::mm::madvise(self.host_ptr(pages.start).cast(), bytes, advice) }
    }
}

#[cfg(test)]
mod tests {
    use crate::tests::one_region;
    use crate::{PageBitmap, mark_touched};

    #[test]
    fn populated_pages_are_there_and_zero() {
        let ram = one_region(100);
        let region = &ram.regions()[0];
        region.populate(10..30).unwrap();
        region.populate(5..5).unwrap();
        let touched = PageBitmap::new(100);
        assert_eq!(mark_touched(region, &touched).unwrap(), 20);
        assert_eq!(touched.runs().collect::<Vec<_>>(), vec![10..30]);
        assert_eq!(ram.digest().unwrap(), one_region(100).digest().unwrap());
    }

    #[test]
    #[should_panic(expected = "page 101 of 100")]
    fn outside_is_refused() {
        let _ = one_region(100).regions()[0].populate(90..101);
    }
}
