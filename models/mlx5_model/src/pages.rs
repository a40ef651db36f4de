//! The page list of a direct key.
//!
//! A key of 1 GiB in pages of 4 KiB has 262144 entries, and 256 GiB of guest memory have 64 M of
//! them for each device. Real hardware keeps them in host memory that the driver gave; the model
//! keeps runs of pages that follow each other, which are few for most memory, or else a short
//! number for each page.

use crate::num::{low32, to_u64, to_usize};
use martlet_device_io::BusAddress;

/// Bits of an entry that say something else than the address: rights, which vDPA leaves 0 and which
/// only count for paged access.
const FLAG_BITS: u64 = 0x7;

/// From this many runs on a list may be scattered page by page.
const MANY_RUNS: usize = 1024;

/// log2 of the unit in which scattered pages are numbered.
const LOG_FRAME: u32 = 12;

/// How far neighbours of a scattered page are looked for.
const NEIGHBOURS_MAX: usize = 64;

/// A list of pages of equal size.
#[derive(Debug)]
pub(crate) struct Pages {
    log: u32,
    count: u32,
    misaligned: u32,
    /// How many entries are to come at most; 0 for a list that is to stay in runs.
    expected: usize,
    places: Places,
}

/// Where the pages are.
#[derive(Debug)]
enum Places {
    /// First page of each run, by its number, and where it is. In order.
    Runs(Vec<(u32, u64)>),
    /// The frame of each page.
    Frames(Vec<u32>),
}

impl Pages {
    /// An empty list of pages of `1 << log` bytes, which will have `expected` entries; `None` if
    /// there are no such pages.
    pub(crate) fn new(log: u32, expected: usize) -> Option<Pages> {
        let places = Places::Runs(Vec::new());
        (log < u64::BITS).then_some(Pages { log, count: 0, misaligned: 0, expected, places })
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
            let more = match &mut self.places {
                Places::Frames(frames) => {
                    let Some(frame) = frame_at(at) else {
                        self.places = Places::Runs(runs_of(frames, self.log));
                        // Not numbered again: this list has addresses that have no number.
                        self.expected = 0;
                        continue;
                    };
                    frames.push(frame);
                    0
                }
                Places::Runs(_) => self.extend_runs(at, later),
            };
            self.misaligned += if self.inside(at) == 0 { 0 } else { low32(to_u64(more + 1)) };
            self.count = self.count.saturating_add(low32(to_u64(more + 1)));
            left = later.get(more..).unwrap_or_default();
        }
    }

    /// Appends a page to the runs, and as many of those behind it as continue its run.
    fn extend_runs(&mut self, at: u64, later: &[[u8; 8]]) -> usize {
        let more = self.run_length(at, later);
        let (count, page) = (self.count, self.page());
        let Places::Runs(runs) = &mut self.places else { return more };
        let continues = runs.last().is_some_and(|(first, begin)| {
            at == begin.wrapping_add(u64::from(count - first).wrapping_mul(page))
        });
        if continues {
            return more;
        }
        let scattered = runs.len() >= MANY_RUNS && runs.len() > to_usize(count) / 2;
        if scattered && self.expected > 0 {
            let frames = frames_of(runs, count, self.log);
            if let Some((mut frames, frame)) = frames.zip(frame_at(at)) {
                frames.reserve_exact(self.expected.saturating_sub(frames.len()));
                frames.push(frame);
                self.places = Places::Frames(frames);
                return 0;
            }
            // Not tried again.
            self.expected = 0;
        }
        runs.push((count, at));
        more
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

    /// Gives memory back that was kept for growing.
    pub(crate) fn finish(&mut self) {
        if let Places::Runs(runs) = &mut self.places
            && runs.len() < runs.capacity() / 2
        {
            runs.shrink_to_fit();
        }
    }

    /// Drops pages behind the first `count`: a list is padded.
    pub(crate) fn truncate(&mut self, count: u32) {
        self.count = self.count.min(count);
        match &mut self.places {
            Places::Runs(runs) => runs.retain(|(first, _)| *first < count),
            Places::Frames(frames) => frames.truncate(to_usize(count)),
        }
    }

    /// Bytes before `offset` and from it on that lie next to each other, and where it is.
    pub(crate) fn find(&self, offset: u64) -> Option<(u64, u64, BusAddress)> {
        let page = u32::try_from(offset >> self.log).ok().filter(|page| *page < self.count)?;
        match &self.places {
            Places::Runs(runs) => {
                let after = runs.partition_point(|(first, _)| *first <= page);
                let (first, at) = *runs.get(after.checked_sub(1)?)?;
                let end = runs.get(after).map_or(self.count, |(next, _)| *next);
                let before = offset - (u64::from(first) << self.log);
                let left = (u64::from(end - first) << self.log).checked_sub(before)?;
                Some((before, left, BusAddress(at.checked_add(before)?)))
            }
            Places::Frames(frames) => {
                let (frame, behind) = frames.get(to_usize(page)..)?.split_first()?;
                let step = self.page() >> LOG_FRAME;
                let neighbours = behind.iter().take(NEIGHBOURS_MAX).zip(1..);
                let next = neighbours.take_while(|(next, number)| {
                    u64::from(**next) == u64::from(*frame) + number * step
                });
                let pages = 1 + to_u64(next.count());
                let before = self.inside(offset);
                let at = (u64::from(*frame) << LOG_FRAME).checked_add(before)?;
                Some((before, pages.checked_mul(self.page())? - before, BusAddress(at)))
            }
        }
    }
}

/// The number of the frame at an address, if it has one.
fn frame_at(at: u64) -> Option<u32> {
    let aligned = at.is_multiple_of(1 << LOG_FRAME);
    u32::try_from(at >> LOG_FRAME).ok().filter(|_| aligned)
}

/// A frame for each of `count` pages, if all have one.
fn frames_of(runs: &[(u32, u64)], count: u32, log: u32) -> Option<Vec<u32>> {
    let mut frames = Vec::with_capacity(to_usize(count));
    for (number, (first, at)) in runs.iter().enumerate() {
        let end = runs.get(number + 1).map_or(count, |(next, _)| *next);
        for page in 0..end - first {
            frames.push(frame_at(at.checked_add(u64::from(page) << log)?)?);
        }
    }
    Some(frames)
}

/// Each page as a run, but for those that continue the one before.
fn runs_of(frames: &[u32], log: u32) -> Vec<(u32, u64)> {
    let (mut runs, mut expected) = (Vec::new(), None);
    for (number, frame) in (0..).zip(frames) {
        let at = u64::from(*frame) << LOG_FRAME;
        if expected != Some(at) {
            runs.push((number, at));
        }
        expected = at.checked_add(1 << log);
    }
    runs
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn bytes(entries: &[u64]) -> Vec<u8> {
        entries.iter().flat_map(|at| at.to_be_bytes()).collect()
    }

    fn runs(pages: &Pages) -> usize {
        match &pages.places {
            Places::Runs(runs) => runs.len(),
            Places::Frames(_) => usize::MAX,
        }
    }

    #[test]
    fn pages_that_follow_each_other_are_one_run() {
        let mut pages = Pages::new(12, 8).unwrap();
        pages.extend(&bytes(&[0x1000, 0x2000, 0x9000, 0xa000, 0x3000]));
        assert_eq!(runs(&pages), 3);
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
        let mut pages = Pages::new(12, 8).unwrap();
        for at in [0x1000_u64, 0x2000, 0x3000, 0x4008] {
            pages.extend(&bytes(&[at]));
        }
        assert_eq!((pages.count(), runs(&pages), pages.misaligned()), (4, 2, 1));
        assert_eq!(pages.bytes(), 0x4000);
        assert!(Pages::new(64, 8).is_none());
    }

    #[test]
    fn a_scattered_list_is_numbered_until_an_address_has_no_number() {
        let entries: Vec<u64> = (1..4000).map(|page| page * 0x3000).collect();
        let mut pages = Pages::new(12, 5000).unwrap();
        pages.extend(&bytes(&entries));
        assert_eq!(runs(&pages), usize::MAX);
        pages.extend(&bytes(&[1 << 60, (1 << 60) + 4096]));
        assert_eq!(runs(&pages), 4000);
        assert_eq!(pages.find(3998 << 12), Some((0, 4096, BusAddress(3999 * 0x3000))));
        assert_eq!(pages.find(3999 << 12), Some((0, 8192, BusAddress(1 << 60))));
    }

    /// A list of short runs; of some lists now and then an address has no frame number.
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
            let mut pages = Pages::new(12, entries.len()).unwrap();
            for piece in entries.chunks(part) {
                pages.extend(&bytes(piece));
            }
            pages.finish();
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
