use super::*;
use crate::CHUNK_PAGES;
use crate::GuestRam;
use crate::tests::regions;
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};
use std::io;

type Page = (u16, u64);

/// A guest of which only page versions are known, tracked as KVM's log with manual protection
/// does it: a page stays in the log, and unprotected, from its first write until its rearm.
#[derive(Default)]
struct Guest {
    version: BTreeMap<Page, u64>,
    log: BTreeSet<Page>,
    /// Pages that `sync` reported and `rearm` did not name since: what `rearm` may name.
    reported: BTreeSet<Page>,
    rearms: Vec<(u16, u64, usize)>,
    fail_after: Option<usize>,
}

impl Guest {
    fn write(&mut self, page: Page) {
        *self.version.entry(page).or_default() += 1;
        self.log.insert(page);
    }
}

impl DirtySource for Guest {
    fn sync(&mut self, into: &RamBitmap) -> Result<(), TrackError> {
        for (region, page) in &self.log {
            into.region(RegionIndex(*region)).set(*page);
            self.reported.insert((*region, *page));
        }
        Ok(())
    }

    fn rearm(
        &mut self,
        region: RegionIndex,
        first_page: u64,
        words: &[u64],
    ) -> Result<(), TrackError> {
        if self.fail_after == Some(self.rearms.len()) {
            let source = io::Error::other("told to fail");
            return Err(TrackError::host("rearm", source));
        }
        assert!(first_page.is_multiple_of(64));
        assert!(words.len() as u64 * 64 <= WINDOW_PAGES);
        assert!(words.first() != Some(&0) && words.last() != Some(&0), "not trimmed");
        for page in pages_of(region.0, first_page, words) {
            assert!(self.reported.remove(&page), "{page:?} rearmed without a report");
            self.log.remove(&page);
        }
        self.rearms.push((region.0, first_page, words.len()));
        Ok(())
    }
}

fn pages_of(region: u16, first_page: u64, words: &[u64]) -> Vec<Page> {
    let bit = |place: usize| words[place / 64] >> (place % 64) & 1 == 1;
    let places = (0..words.len() * 64).filter(|place| bit(*place));
    places.map(|place| (region, first_page + place as u64)).collect()
}

fn chunk_pages(chunk: &Chunk) -> Vec<Page> {
    chunk.runs().flatten().map(|page| (chunk.region().0, page)).collect()
}

const LENGTHS: [u64; 4] = [1, 700, 64, WINDOW_PAGES + 1337];

fn layout() -> GuestRam {
    regions(&LENGTHS)
}

fn page() -> impl Strategy<Value = Page> {
    (0..4u16).prop_flat_map(|region| (Just(region), 0..LENGTHS[usize::from(region)]))
}

/// Pages near each other as well as far apart.
fn some_pages(most: usize) -> impl Strategy<Value = BTreeSet<Page>> {
    let stretch = (page(), 1..200u64).prop_map(|((region, first), count)| {
        let end = (first + count).min(LENGTHS[usize::from(region)]);
        (first..end).map(|page| (region, page)).collect::<Vec<_>>()
    });
    prop::collection::vec(stretch, 0..most).prop_map(|all| all.into_iter().flatten().collect())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn a_round_hands_out_every_page_once_after_its_rearm(dirty in some_pages(30)) {
        let ram = layout();
        let bitmap = Arc::new(RamBitmap::new(&ram));
        let mut guest = Guest::default();
        dirty.iter().for_each(|page| guest.write(*page));
        guest.sync(&bitmap).unwrap();
        let mut scanner = Scanner::new(Arc::clone(&bitmap));

        let mut seen = Vec::new();
        while let Some(chunk) = scanner.next(&mut guest).unwrap() {
            prop_assert!(!chunk.bits().is_empty());
            prop_assert!(chunk.first_page().is_multiple_of(CHUNK_PAGES));
            for page in chunk_pages(&chunk) {
                prop_assert!(!guest.log.contains(&page), "{:?} is not rearmed", page);
                seen.push(page);
            }
        }
        prop_assert!(seen.is_sorted());
        prop_assert_eq!(seen, dirty.into_iter().collect::<Vec<_>>());
        prop_assert_eq!(bitmap.count(), 0);
    }

    /// The whole discipline: whatever the guest writes between any two steps, what was sent last
    /// of each page is its last version.
    #[test]
    fn no_write_is_ever_lost(
        first in some_pages(20),
        writes in prop::collection::vec(prop::collection::vec(page(), 0..6), 1..60),
        chunks_between_syncs in 1..7usize,
    ) {
        let ram = layout();
        let bitmap = Arc::new(RamBitmap::new(&ram));
        let mut guest = Guest::default();
        let mut scanner = Scanner::new(Arc::clone(&bitmap));
        let mut sent = BTreeMap::new();
        first.iter().for_each(|page| guest.write(*page));
        for (step, batch) in writes.iter().enumerate() {
            if step % chunks_between_syncs == 0 {
                guest.sync(&bitmap).unwrap();
            }
            let chunk = scanner.next(&mut guest).unwrap();
            // Between the rearm and the reading, and after it.
            let (before, after) = batch.split_at(batch.len() / 2);
            before.iter().for_each(|page| guest.write(*page));
            for page in chunk.iter().flat_map(chunk_pages) {
                sent.insert(page, guest.version[&page]);
            }
            after.iter().for_each(|page| guest.write(*page));
        }
        // The guest stops in the middle of a round, perhaps of a window.
        guest.sync(&bitmap).unwrap();
        for _ in 0..2 {
            while let Some(chunk) = scanner.next_last() {
                for page in chunk_pages(&chunk) {
                    sent.insert(page, guest.version[&page]);
                }
            }
        }
        prop_assert_eq!(sent, guest.version);
    }
}

#[test]
fn windows_are_bounded_and_few() {
    let ram = regions(&[3 * WINDOW_PAGES + 100]);
    let bitmap = Arc::new(RamBitmap::new(&ram));
    let mut guest = Guest::default();
    (0..3 * WINDOW_PAGES + 100).for_each(|page| guest.write((0, page)));
    guest.sync(&bitmap).unwrap();
    let mut scanner = Scanner::new(bitmap);
    let mut pages = 0;
    while let Some(chunk) = scanner.next(&mut guest).unwrap() {
        pages += u64::from(chunk.count());
    }
    assert_eq!(pages, 3 * WINDOW_PAGES + 100);
    let starts: Vec<u64> = guest.rearms.iter().map(|(_, first, _)| *first).collect();
    assert_eq!(starts, [0, WINDOW_PAGES, 2 * WINDOW_PAGES, 3 * WINDOW_PAGES]);
    assert_eq!(guest.rearms.last(), Some(&(0, 3 * WINDOW_PAGES, 2)));
}

#[test]
fn pages_set_behind_the_cursor_wait_and_those_ahead_join() {
    let ram = regions(&[4 * WINDOW_PAGES]);
    let bitmap = Arc::new(RamBitmap::new(&ram));
    let mut guest = Guest::default();
    guest.write((0, WINDOW_PAGES));
    guest.sync(&bitmap).unwrap();
    let mut scanner = Scanner::new(Arc::clone(&bitmap));
    assert!(scanner.next(&mut guest).unwrap().is_some());
    guest.write((0, 0));
    guest.write((0, 3 * WINDOW_PAGES));
    guest.sync(&bitmap).unwrap();
    let chunk = scanner.next(&mut guest).unwrap().map(|chunk| chunk.first_page());
    assert_eq!(chunk, Some(3 * WINDOW_PAGES));
    assert!(scanner.next(&mut guest).unwrap().is_none(), "the round is over");
    let chunk = scanner.next(&mut guest).unwrap().map(|chunk| chunk.first_page());
    assert_eq!(chunk, Some(0));
}

#[test]
fn a_failed_rearm_keeps_the_pages_dirty() {
    let ram = regions(&[10, 2000]);
    let bitmap = Arc::new(RamBitmap::new(&ram));
    let mut guest = Guest { fail_after: Some(1), ..Guest::default() };
    let dirty = [(0, 9), (1, 3), (1, 1999)];
    dirty.iter().for_each(|page| guest.write(*page));
    guest.sync(&bitmap).unwrap();
    let mut scanner = Scanner::new(Arc::clone(&bitmap));
    assert!(scanner.next(&mut guest).unwrap().is_some());
    let error = scanner.next(&mut guest).unwrap_err();
    assert_eq!(error.to_string(), "dirty tracking: rearm failed");
    // Not in the window, from which they would go without a rearm.
    assert_eq!(bitmap.count(), 2);
    guest.fail_after = None;
    let mut seen = Vec::new();
    while let Some(chunk) = scanner.next(&mut guest).unwrap() {
        seen.extend(chunk_pages(&chunk));
    }
    assert_eq!(seen, dirty[1..]);
}

#[test]
fn a_round_that_is_abandoned_loses_nothing() {
    let ram = regions(&[10, 2000]);
    let bitmap = Arc::new(RamBitmap::new(&ram));
    let mut guest = Guest::default();
    let dirty = [(0, 9), (1, 3), (1, 600), (1, 1999)];
    dirty.iter().for_each(|page| guest.write(*page));
    guest.sync(&bitmap).unwrap();
    let mut scanner = Scanner::new(Arc::clone(&bitmap));
    let taken = [scanner.next_last(), scanner.next_last()];
    assert_eq!(taken.iter().flatten().flat_map(chunk_pages).collect::<Vec<_>>(), dirty[..2]);
    scanner.abandon_round();
    assert_eq!(bitmap.count(), 2, "what no round has is dirty");
    let mut seen = Vec::new();
    while let Some(chunk) = scanner.next(&mut guest).unwrap() {
        seen.extend(chunk_pages(&chunk));
    }
    assert_eq!(seen, dirty[2..]);
}
