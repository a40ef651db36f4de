//! Chunks: 512 pages of one region, and which of them are meant.

use crate::{CHUNK_PAGES, RegionIndex};
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

/// Pages of one region that are to be sent, all within one aligned group of [`CHUNK_PAGES`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chunk {
    /// The region.
    pub region: RegionIndex,
    /// Page number in the region of the chunk's bit 0; a multiple of [`CHUNK_PAGES`].
    pub first_page: u64,
    /// Which pages are meant. Bits past the end of the region are never set.
    pub bits: ChunkBits,
}

impl Chunk {
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
