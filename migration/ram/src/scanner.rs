//! Walks the dirty bitmap and hands out what is to be sent.

use crate::chunk::CHUNK_WORDS;
use crate::{Chunk, ChunkBits, DirtySource, RamBitmap, RegionIndex, TrackError};
use martlet_bitmap::WORD_BITS;
use std::sync::Arc;

/// Most pages that are rearmed with one call, 64 MiB. Small, so that few pages are written again
/// between the rearm and their reading and so sent twice; large, so that a rearm, which in KVM
/// takes the MMU lock and flushes TLBs, is one call for many pages.
pub const WINDOW_PAGES: u64 = 16_384;
const WINDOW_WORDS: usize = (WINDOW_PAGES / WORD_BITS) as usize;

/// Hands out the set pages of a [`RamBitmap`] chunk by chunk, from a cursor that goes through all
/// regions in order. A round ends when the cursor wraps.
///
/// A page is taken out of the bitmap, then rearmed, then handed out, and only the holder of the
/// chunk reads it: this order is what [`DirtySource`] asks for. Every page that was set when the
/// cursor came by is handed out once. One that is set behind the cursor waits for the next round,
/// one that is set ahead of it joins this round.
///
/// Allocates nothing after it was made.
#[derive(Debug)]
pub struct Scanner {
    dirty: Arc<RamBitmap>,
    /// Region and word of the next window.
    region: u16,
    word: usize,
    window: Window,
}

/// Words that were taken out of the bitmap and not all handed out yet.
#[derive(Debug)]
struct Window {
    words: [u64; WINDOW_WORDS],
    region: RegionIndex,
    /// Word number of `words[0]` in the region; a multiple of [`CHUNK_WORDS`].
    start: usize,
    /// How many of `words` are in use.
    len: usize,
    /// Pages of the region.
    pages: u64,
    /// Next one to hand out; a multiple of [`CHUNK_WORDS`].
    next: usize,
}

impl Scanner {
    /// A scanner with its cursor at the start.
    pub fn new(dirty: Arc<RamBitmap>) -> Scanner {
        let words = [0; WINDOW_WORDS];
        let window = Window { words, region: RegionIndex(0), start: 0, len: 0, pages: 0, next: 0 };
        Scanner { dirty, region: 0, word: 0, window }
    }

    /// The next chunk of this round, rearmed and not empty; `None` ends the round and puts the
    /// cursor back to the start.
    ///
    /// After an error nothing of the window is handed out and its pages are dirty again.
    pub fn next(&mut self, source: &mut dyn DirtySource) -> Result<Option<Chunk>, TrackError> {
        loop {
            if let Some(chunk) = self.window.take_chunk() {
                return Ok(Some(chunk));
            }
            if !self.take_window() {
                self.end_round();
                return Ok(None);
            }
            let (first_page, words) = self.window.dirty_part();
            if let Err(error) = source.rearm(self.window.region, first_page, words) {
                self.put_back();
                return Err(error);
            }
        }
    }

    /// As [`Scanner::next`], for the last round: nothing is rearmed, because nobody writes any
    /// more. Only while the guest and its devices are stopped, after a last sync.
    pub fn next_last(&mut self) -> Option<Chunk> {
        loop {
            if let Some(chunk) = self.window.take_chunk() {
                return Some(chunk);
            }
            if !self.take_window() {
                self.end_round();
                return None;
            }
        }
    }

    /// Ends a round early: what was not handed out is dirty as before, and the cursor is back at
    /// the start.
    pub fn abandon_round(&mut self) {
        self.put_back();
        self.end_round();
    }

    fn end_round(&mut self) {
        (self.region, self.word) = (0, 0);
    }

    /// Fills the empty window with the next words that are not all zero. False at the end of the
    /// last region.
    fn take_window(&mut self) -> bool {
        // So every word of the window is zero, those that the next region is too short for too.
        debug_assert_eq!(self.window.count(), 0, "would lose pages");
        while usize::from(self.region) < self.dirty.region_count() {
            let region = RegionIndex(self.region);
            let bitmap = self.dirty.region(region);
            let Some(word) = bitmap.next_nonzero_word(self.word) else {
                self.region += 1;
                self.word = 0;
                continue;
            };
            let start = word - word % CHUNK_WORDS;
            let len = (bitmap.word_count() - start).min(WINDOW_WORDS);
            for (offset, word) in self.window.words[..len].iter_mut().enumerate() {
                *word = bitmap.take_word(start + offset);
            }
            (self.window.region, self.window.pages) = (region, bitmap.pages());
            self.window.start = start;
            (self.window.len, self.window.next) = (len, 0);
            self.word = start + len;
            return true;
        }
        false
    }

    /// Undoes a `take_window`.
    fn put_back(&mut self) {
        let bitmap = self.dirty.region(self.window.region);
        for (offset, word) in self.window.words[..self.window.len].iter_mut().enumerate() {
            bitmap.or_word(self.window.start + offset, core::mem::take(word));
        }
        (self.region, self.word) = (self.window.region.0, self.window.start);
        self.window.next = self.window.len;
    }
}

impl Window {
    /// Takes out the next chunk that is not empty.
    fn take_chunk(&mut self) -> Option<Chunk> {
        while self.next < self.len {
            let first_word = self.start + self.next;
            let words = &mut self.words[self.next..self.next + CHUNK_WORDS];
            self.next += CHUNK_WORDS;
            if words.iter().all(|word| *word == 0) {
                continue;
            }
            let mut bits = ChunkBits::EMPTY;
            bits.0.copy_from_slice(words);
            words.fill(0);
            assert!(first_word.is_multiple_of(CHUNK_WORDS), "a window begins with a chunk");
            let index = (first_word / CHUNK_WORDS) as u64;
            let chunk = Chunk::within(self.pages, self.region, index, bits);
            return Some(chunk.expect("a bitmap has no bit behind its region's end"));
        }
        None
    }

    /// Page number of the first word with a set bit, and the words from there to the last such.
    fn dirty_part(&self) -> (u64, &[u64]) {
        let words = &self.words[..self.len];
        let first = words.iter().position(|word| *word != 0).unwrap_or(self.len);
        let last = words.iter().rposition(|word| *word != 0).map_or(first, |last| last + 1);
        ((self.start + first) as u64 * WORD_BITS, &words[first..last])
    }

    fn count(&self) -> u64 {
        self.words.iter().map(|word| u64::from(word.count_ones())).sum()
    }
}

#[cfg(test)]
#[path = "scanner_tests.rs"]
mod tests;
