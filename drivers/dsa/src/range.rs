//! How many pages one descriptor takes.
//!
//! One descriptor for a run of pages costs the CPU a fraction of one for each page. But the device
//! stops at the first page with content, and the rest needs another trip. So runs grow where memory
//! is zero and shrink where it is not.

/// The most pages in a descriptor: 256 KiB, from where on a device gains nothing by more.
const PAGES_MAX: u32 = 64;
/// A run grows after this many runs of zero pages in a row.
const GROW_AFTER_RUNS: u32 = 4;

/// The length of a run, by what was found lately.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RangeLength {
    pages: u32,
    zero_in_a_row: u32,
}

impl RangeLength {
    pub(crate) fn new(pages: u32) -> RangeLength {
        RangeLength { pages: pages.clamp(1, PAGES_MAX), zero_in_a_row: 0 }
    }

    pub(crate) fn pages(&self) -> u32 {
        self.pages
    }

    /// Pages in a row that are zero.
    pub(crate) fn on_zero(&mut self, pages: u32) {
        self.zero_in_a_row = self.zero_in_a_row.saturating_add(pages);
        while self.pages < PAGES_MAX && self.zero_in_a_row >= self.pages * GROW_AFTER_RUNS {
            self.zero_in_a_row -= self.pages * GROW_AFTER_RUNS;
            self.pages *= 2;
        }
    }

    /// A page with content.
    pub(crate) fn on_content(&mut self) {
        if self.zero_in_a_row < self.pages * GROW_AFTER_RUNS / 2 {
            self.pages = (self.pages / 2).max(1);
        }
        self.zero_in_a_row = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_grow_over_zero_memory_and_shrink_over_content() {
        let mut length = RangeLength::new(1);
        (0..2000).for_each(|_| length.on_zero(1));
        assert_eq!(length.pages(), PAGES_MAX);
        // The first one after a long run of zero pages may be the only one.
        (0..7).for_each(|_| length.on_content());
        assert_eq!(length.pages(), 1);
        // Every other page: single pages stay.
        for _ in 0..100 {
            length.on_zero(1);
            length.on_content();
        }
        assert_eq!(length.pages(), 1);
        // One in sixteen: short runs.
        for _ in 0..1000 {
            (0..15).for_each(|_| length.on_zero(1));
            length.on_content();
        }
        assert!((2..=16).contains(&length.pages()), "{}", length.pages());
    }
}
