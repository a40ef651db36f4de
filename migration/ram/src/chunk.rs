//! Chunks: 512 pages of one region, and which of them are meant.

use crate::{CHUNK_PAGES, GuestRam, RamRegion, RegionIndex};
use core::ops::Range;
use martlet_bitmap::WORD_BITS;

/// Words of 64 bits in a [`ChunkBits`].
pub const CHUNK_WORDS: usize = (CHUNK_PAGES / WORD_BITS) as usize;
/// Pages in a chunk, as a place in its bits.
#[expect(clippy::cast_possible_truncation, reason = "a small constant")]
const PAGES: u32 = CHUNK_PAGES as u32;
const WORD: u32 = u64::BITS;

/// One bit for each page of a chunk: bit `b` of word `w` is page `64 * w + b` of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct ChunkBits(pub [u64; CHUNK_WORDS]);

impl ChunkBits {
    /// No page.
    pub const EMPTY: ChunkBits = ChunkBits([0; CHUNK_WORDS]);
    /// All pages.
    pub const FULL: ChunkBits = ChunkBits([u64::MAX; CHUNK_WORDS]);

    /// Adds a page.
    ///
    /// # Panics
    /// If `page` is not below [`CHUNK_PAGES`]; the same holds for every method here.
    pub fn set(&mut self, page: u32) {
        self.0[(page / WORD) as usize] |= 1 << (page % WORD);
    }

    /// Takes a page out.
    pub fn clear(&mut self, page: u32) {
        self.0[(page / WORD) as usize] &= !(1 << (page % WORD));
    }

    /// Whether a page is in.
    pub fn get(&self, page: u32) -> bool {
        self.0[(page / WORD) as usize] >> (page % WORD) & 1 == 1
    }

    /// How many pages are in.
    pub fn count(&self) -> u32 {
        self.0.iter().map(|word| word.count_ones()).sum()
    }

    /// Whether no page is in.
    pub fn is_empty(&self) -> bool {
        self.0 == [0; CHUNK_WORDS]
    }

    /// The lowest page at or after `from`; `None` if there is none.
    pub fn next_set(&self, from: u32) -> Option<u32> {
        let page = self.find(from, true);
        (page < PAGES).then_some(page)
    }

    /// The number behind the highest page; 0 if there is none.
    fn end(&self) -> u32 {
        let last = (0..PAGES / WORD).rev().find(|word| self.0[*word as usize] != 0);
        last.map_or(0, |word| (word + 1) * WORD - self.0[word as usize].leading_zeros())
    }

    /// The maximal runs of pages, ascending.
    pub fn runs(&self) -> impl Iterator<Item = Range<u32>> {
        let bits = *self;
        let mut next = 0;
        core::iter::from_fn(move || {
            let start = bits.next_set(next)?;
            let end = bits.find(start, false);
            next = end;
            Some(start..end)
        })
    }

    /// The first page at or after `from` whose bit equals `set`; `PAGES` if there is none.
    fn find(&self, from: u32, set: bool) -> u32 {
        let mut page = from;
        while page < PAGES {
            let word = self.0[(page / WORD) as usize];
            let rest = if set { word } else { !word } >> (page % WORD);
            if rest != 0 {
                return page + rest.trailing_zeros();
            }
            page = (page / WORD + 1) * WORD;
        }
        PAGES
    }
}

/// Pages of one region that are to be sent, all within one aligned group of [`CHUNK_PAGES`]. Made
/// for a layout, and never names a page outside of it; whoever works on memory of another layout
/// refuses it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chunk {
    region: RegionIndex,
    first_page: u64,
    bits: ChunkBits,
}

impl Chunk {
    /// Chunk number `index` of a region; bit 0 of `bits` is its page `index * CHUNK_PAGES`. `None`
    /// if there is no such region, or a page would lie behind its end.
    pub fn new(ram: &GuestRam, region: RegionIndex, index: u64, bits: ChunkBits) -> Option<Chunk> {
        Chunk::within(ram.region(region)?.pages(), region, index, bits)
    }

    /// As [`Chunk::new`], for a region that has `pages` pages.
    pub(crate) fn within(
        pages: u64,
        region: RegionIndex,
        index: u64,
        bits: ChunkBits,
    ) -> Option<Chunk> {
        let first_page = index.checked_mul(CHUNK_PAGES)?;
        let chunk = Chunk { region, first_page, bits };
        (chunk.end_page()? <= pages).then_some(chunk)
    }

    /// Whether all its pages are in this memory.
    pub fn is_of(&self, ram: &GuestRam) -> bool {
        let pages = ram.region(self.region).map(RamRegion::pages);
        pages.zip(self.end_page()).is_some_and(|(pages, end)| end <= pages)
    }

    /// The region.
    pub fn region(&self) -> RegionIndex {
        self.region
    }

    /// Page number in the region of the chunk's bit 0; a multiple of [`CHUNK_PAGES`].
    pub fn first_page(&self) -> u64 {
        self.first_page
    }

    /// Which pages are meant.
    pub fn bits(&self) -> &ChunkBits {
        &self.bits
    }

    /// Takes a page out; see [`ChunkBits::clear`].
    pub(crate) fn clear(&mut self, page: u32) {
        self.bits.clear(page);
    }

    /// The number behind the last page that is meant.
    fn end_page(&self) -> Option<u64> {
        self.first_page.checked_add(u64::from(self.bits.end()))
    }

    /// The chunk's number in its region.
    pub fn index(&self) -> u64 {
        self.first_page / CHUNK_PAGES
    }

    /// How many pages are meant.
    pub fn count(&self) -> u32 {
        self.bits.count()
    }

    /// The maximal runs of pages as page numbers of the region, ascending.
    pub fn runs(&self) -> impl Iterator<Item = Range<u64>> {
        let base = self.first_page;
        self.bits.runs().map(move |run| base + u64::from(run.start)..base + u64::from(run.end))
    }

    /// The channel that carries it; see [`channel_of`].
    pub fn channel(&self, channels: u16) -> u16 {
        channel_of(self.region, self.index(), channels)
    }
}

/// The channel that carries chunk number `chunk` of `region`: the same one in every round, so that
/// a newer version of a page can't overtake an older one. Neighbouring chunks take different
/// channels, because guests write in stretches.
///
/// # Panics
/// If `channels` is zero.
#[expect(clippy::cast_possible_truncation, reason = "below a u16")]
pub fn channel_of(region: RegionIndex, chunk: u64, channels: u16) -> u16 {
    assert!(channels > 0, "no channel to choose");
    // The region is added so that the first chunks of many small regions spread as well.
    (chunk.wrapping_add(u64::from(region.0)) % u64::from(channels)) as u16
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    proptest! {
        #[test]
        fn bits_behave_like_a_set(
            pages in prop::collection::btree_set(0..PAGES, 0..300),
            gone in prop::collection::btree_set(0..PAGES, 0..300),
        ) {
            let mut bits = ChunkBits::EMPTY;
            pages.iter().for_each(|page| bits.set(*page));
            gone.iter().for_each(|page| bits.clear(*page));
            let left: BTreeSet<u32> = pages.difference(&gone).copied().collect();
            prop_assert_eq!(bits.count() as usize, left.len());
            prop_assert_eq!(bits.is_empty(), left.is_empty());
            prop_assert_eq!(bits.end(), left.last().map_or(0, |page| page + 1));
            prop_assert_eq!(bits.runs().flatten().collect::<BTreeSet<_>>(), left.clone());
            for page in 0..PAGES {
                prop_assert_eq!(bits.get(page), left.contains(&page));
                prop_assert_eq!(bits.next_set(page), left.range(page..).next().copied());
            }
            let runs: Vec<_> = bits.runs().collect();
            prop_assert!(runs.windows(2).all(|pair| pair[0].end < pair[1].start), "not maximal");
        }
    }

    #[test]
    fn a_chunk_outside_of_the_memory_cannot_be_made() {
        let ram = crate::tests::regions(&[CHUNK_PAGES + 3, 10]);
        let bits = |page| {
            let mut bits = ChunkBits::EMPTY;
            bits.set(page);
            bits
        };
        let new = |region, index, bits| Chunk::new(&ram, RegionIndex(region), index, bits);
        assert!(new(0, 0, ChunkBits::FULL).is_some());
        assert!(new(0, 1, bits(2)).is_some());
        assert!(new(0, 1, bits(3)).is_none());
        assert!(new(0, 1, ChunkBits::FULL).is_none());
        assert!(new(0, u64::MAX, bits(0)).is_none());
        assert!(new(0, u64::MAX / CHUNK_PAGES, bits(511)).is_none());
        assert!(new(1, 0, bits(10)).is_none());
        assert!(new(2, 0, ChunkBits::EMPTY).is_none());
    }

    #[test]
    fn full_and_empty() {
        assert_eq!(ChunkBits::FULL.runs().collect::<Vec<_>>(), vec![0..PAGES]);
        assert_eq!(ChunkBits::EMPTY.runs().count(), 0);
    }

    #[test]
    fn channels_are_even_and_neighbours_differ() {
        for channels in 1..=9 {
            let mut load = vec![0u32; usize::from(channels)];
            for chunk in 0..900 {
                let channel = channel_of(RegionIndex(1), chunk, channels);
                load[usize::from(channel)] += 1;
                let next = channel_of(RegionIndex(1), chunk + 1, channels);
                assert!(channels == 1 || channel != next);
            }
            let spread = load.iter().max().zip(load.iter().min()).map(|(a, b)| a - b);
            assert!(spread <= Some(1), "{load:?}");
        }
    }
}
