//! The page list of a direct key, as runs where pages follow each other.
//!
//! A key of 1 GiB in pages of 4 KiB has 262144 entries, and 256 GiB of guest memory have 64 M of
//! them for each device. Real hardware keeps them in host memory that the driver gave; the model
//! keeps runs, which are few unless memory is scattered page by page.

use crate::num::{low32, to_u64};
use martlet_device_io::BusAddress;

/// Bits of an entry that say something else than the address: rights, which vDPA leaves 0 and which
/// only count for paged access.
const FLAG_BITS: u64 = 0x7;

/// From this many runs on a list is taken to be scattered.
const MANY_RUNS: usize = 1024;

/// A list of pages of equal size.
#[derive(Debug)]
pub(crate) struct Pages {
    log: u32,
    count: u32,
    misaligned: u32,
    /// How many entries are to come at most.
    expected: usize,
    /// First page of each run, by its number, and where it is. In order.
    runs: Vec<(u32, u64)>,
}

impl Pages {
    /// An empty list of pages of `1 << log` bytes, which will have `expected` entries; `None` if
    /// there are no such pages.
    pub(crate) fn new(log: u32, expected: usize) -> Option<Pages> {
        let runs = Vec::new();
        (log < u64::BITS).then_some(Pages { log, count: 0, misaligned: 0, expected, runs })
    }

    /// How many pages it has.
    pub(crate) fn count(&self) -> u32 {
        self.count
    }

    /// How many of them do not lie at a multiple of their size. They are taken as they are; not all
    /// hardware may do so.
    pub(crate) fn misaligned(&self) -> u32 {
        self.misaligned
    }

    /// Their length in bytes.
    pub(crate) fn bytes(&self) -> u64 {
        u64::from(self.count).saturating_mul(self.page())
    }

    fn page(&self) -> u64 {
        1 << self.log
    }

    /// The part of an address inside of its page.
    pub(crate) fn inside(&self, at: u64) -> u64 {
        at & (self.page() - 1)
    }

    /// Appends pages as the device's list has them: big-endian words.
    pub(crate) fn extend(&mut self, bytes: &[u8]) {
        let (words, _) = bytes.as_chunks::<8>();
        let mut left = words;
        while let Some((first, later)) = left.split_first() {
            let at = u64::from_be_bytes(*first) & !FLAG_BITS;
            if self.continuation() != Some(at) {
                if self.runs.len() == MANY_RUNS {
                    // Scattered: most pages will be a run of their own.
                    self.runs.reserve_exact(self.expected.saturating_sub(MANY_RUNS));
                }
                self.runs.push((self.count, at));
            }
            let more = self.run_length(at, later);
            self.misaligned += if self.inside(at) == 0 { 0 } else { low32(to_u64(more + 1)) };
            self.count = self.count.saturating_add(low32(to_u64(more + 1)));
            left = later.get(more..).unwrap_or_default();
        }
    }

    /// How many entries continue a run behind a page at `at`. Eight at a time: most lists are few
    /// runs, and long.
    fn run_length(&self, at: u64, entries: &[[u8; 8]]) -> usize {
        let entry = |word: &[u8; 8]| u64::from_be_bytes(*word) & !FLAG_BITS;
        let (groups, _) = entries.as_chunks::<8>();
        let (mut next, mut length) = (at.wrapping_add(self.page()), 0);
        for group in groups {
            let mut differences = 0;
            let mut wanted = next;
            for word in group {
                differences |= entry(word) ^ wanted;
                wanted = wanted.wrapping_add(self.page());
            }
            if differences != 0 {
                break;
            }
            (next, length) = (wanted, length + group.len());
        }
        let rest = entries.get(length..).unwrap_or_default();
        let more = rest.iter().take_while(|word| {
            let continues = entry(word) == next;
            next = next.wrapping_add(self.page());
            continues
        });
        length + more.count()
    }

    /// Where the next page would continue the last run.
    fn continuation(&self) -> Option<u64> {
        let (first, at) = self.runs.last()?;
        Some(at.wrapping_add(u64::from(self.count - first).wrapping_mul(self.page())))
    }

    /// Gives memory back that was kept for growing.
    pub(crate) fn finish(&mut self) {
        if self.runs.len() < self.runs.capacity() / 2 {
            self.runs.shrink_to_fit();
        }
    }

    /// Drops pages behind the first `count`: a list is padded.
    pub(crate) fn truncate(&mut self, count: u32) {
        self.count = self.count.min(count);
        self.runs.retain(|(first, _)| *first < count);
    }

    /// Bytes before `offset` and from it on that lie next to each other, and where it is.
    pub(crate) fn find(&self, offset: u64) -> Option<(u64, u64, BusAddress)> {
        let page = u32::try_from(offset >> self.log).ok().filter(|page| *page < self.count)?;
        let after = self.runs.partition_point(|(first, _)| *first <= page);
        let (first, at) = *self.runs.get(after.checked_sub(1)?)?;
        let end = self.runs.get(after).map_or(self.count, |(next, _)| *next);
        let before = offset - (u64::from(first) << self.log);
        let left = (u64::from(end - first) << self.log).checked_sub(before)?;
        Some((before, left, BusAddress(at.checked_add(before)?)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(entries: &[u64]) -> Vec<u8> {
        entries.iter().flat_map(|at| at.to_be_bytes()).collect()
    }

    #[test]
    fn pages_that_follow_each_other_are_one_run() {
        let mut pages = Pages::new(12, 8).unwrap();
        pages.extend(&bytes(&[0x1000, 0x2000, 0x9000, 0xa000, 0x3000]));
        assert_eq!(pages.runs.len(), 3);
        assert_eq!(pages.find(0), Some((0, 0x2000, BusAddress(0x1000))));
        assert_eq!(pages.find(0x1fff), Some((0x1fff, 1, BusAddress(0x2fff))));
        assert_eq!(pages.find(0x2010), Some((0x10, 0x1ff0, BusAddress(0x9010))));
        assert_eq!(pages.find(0x4fff), Some((0xfff, 1, BusAddress(0x3fff))));
        assert_eq!(pages.find(0x5000), None);
        pages.truncate(3);
        assert_eq!(pages.find(0x2010), Some((0x10, 0xff0, BusAddress(0x9010))));
        assert_eq!(pages.find(0x3000), None);
    }

    #[test]
    fn runs_end_anywhere() {
        for broken in 0..40 {
            let mut entries: Vec<u64> = (0..40).map(|page| 0x10_0000 + page * 4096).collect();
            entries[broken] = 0x7000;
            let mut pages = Pages::new(12, 40).unwrap();
            pages.extend(&bytes(&entries));
            assert_eq!(pages.count(), 40);
            for (page, at) in (0..).zip(entries) {
                assert_eq!(pages.find(page << 12).unwrap().2, BusAddress(at));
            }
        }
    }

    #[test]
    fn a_list_may_come_in_parts() {
        let mut pages = Pages::new(12, 8).unwrap();
        for at in [0x1000_u64, 0x2000, 0x3000, 0x4008] {
            pages.extend(&bytes(&[at]));
        }
        assert_eq!((pages.count(), pages.runs.len(), pages.misaligned()), (4, 2, 1));
        assert_eq!(pages.bytes(), 0x4000);
        assert!(Pages::new(64, 8).is_none());
    }
}
