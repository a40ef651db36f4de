//! The page list of a direct key.
//!
//! A key of 1 GiB in pages of 4 KiB has 262144 entries. Real hardware keeps them in host memory that
//! the driver gave; the model keeps runs of pages that follow each other.

use crate::num::{low32, to_u64};
use martlet_device_io::BusAddress;

/// Bits of an entry that say something else than the address: rights, which vDPA leaves 0 and which
/// only count for paged access.
const FLAG_BITS: u64 = 0x7;

/// A list of pages of equal size.
#[derive(Debug)]
pub(crate) struct Pages {
    log: u32,
    count: u32,
    /// First page of each run, by its number, and where it is. In order.
    runs: Vec<(u32, u64)>,
}

impl Pages {
    /// An empty list of pages of `1 << log` bytes; `None` if there are no such pages.
    pub(crate) fn new(log: u32) -> Option<Pages> {
        (log < u64::BITS).then_some(Pages { log, count: 0, runs: Vec::new() })
    }

    /// How many pages it has.
    pub(crate) fn count(&self) -> u32 {
        self.count
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
            let more = self.run_length(at, later);
            let continues = self.runs.last().is_some_and(|(first, begin)| {
                at == begin.wrapping_add(u64::from(self.count - first).wrapping_mul(self.page()))
            });
            if !continues {
                self.runs.push((self.count, at));
            }
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
    use crate::num::to_usize;
    use proptest::prelude::*;

    fn bytes(entries: &[u64]) -> Vec<u8> {
        entries.iter().flat_map(|at| at.to_be_bytes()).collect()
    }

    #[test]
    fn pages_that_follow_each_other_are_one_run() {
        let mut pages = Pages::new(12).unwrap();
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
    fn a_list_may_come_in_parts() {
        let mut pages = Pages::new(12).unwrap();
        for at in [0x1000_u64, 0x2000, 0x3000, 0x4008] {
            pages.extend(&bytes(&[at]));
        }
        assert_eq!((pages.count(), pages.runs.len()), (4, 2));
        assert_eq!(pages.bytes(), 0x4000);
        assert!(Pages::new(64).is_none());
    }

    /// A list of short runs, now and then at an odd address.
    fn scattered() -> impl Strategy<Value = Vec<u64>> {
        let run = |odd: u32, pages_max: u64| {
            prop_oneof![
                60 => (1_u64..1 << 30, 1..pages_max).prop_map(|(at, pages)| (at << 12, pages)),
                odd => (1_u64..1 << 50, 1_u64..100).prop_map(|(at, pages)| (at << 3, pages)),
            ]
        };
        let lists = [run(0, 3), run(1, 3), run(0, 9)];
        let lists = lists.map(|run| proptest::collection::vec(run, 0..2500).boxed());
        proptest::strategy::Union::new(lists).prop_map(|runs| {
            let each = |(at, pages)| (0..pages).map(move |page| at + page * 4096);
            runs.into_iter().flat_map(each).collect()
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]
        #[test]
        fn every_page_is_found(entries in scattered(), part in 1_usize..80, cut in 0_u32..6000) {
            let mut pages = Pages::new(12).unwrap();
            for piece in entries.chunks(part) {
                pages.extend(&bytes(piece));
            }
            prop_assert_eq!(to_usize(pages.count()), entries.len());
            pages.truncate(cut);
            let left = entries.len().min(to_usize(cut));
            for (page, at) in (0..left).zip(&entries) {
                let (before, after, bus) = pages.find((to_u64(page) << 12) + 5).unwrap();
                prop_assert_eq!(bus, BusAddress(at + 5));
                // All of what is said to be next to it is.
                for next in 1..=usize::try_from((after + 4) >> 12).unwrap().saturating_sub(1) {
                    prop_assert_eq!(entries[page + next], at + (to_u64(next) << 12));
                }
                prop_assert!(before >= 5 && page + usize::try_from((after + 4) >> 12).unwrap() <= left);
            }
            prop_assert_eq!(pages.find(to_u64(left) << 12), None);
        }
    }
}
