//! A bitmap of pages that several threads may write while one walks it.
//!
//! Bits are grouped in words of 64. Writers set bits with a release; a reader that takes a word
//! with [`PageBitmap::take_word`] swaps it for zero with an acquire, so each set bit is seen by
//! exactly one taker, and whatever its writer did before setting it is visible to that taker.

use core::ops::Range;
use core::sync::atomic::{AtomicU64, Ordering};

/// Bits in a word.
pub const WORD_BITS: u64 = u64::BITS as u64;

/// One bit for each of `pages` pages, all clear at first.
#[derive(Debug)]
pub struct PageBitmap {
    words: Box<[AtomicU64]>,
    pages: u64,
}

impl PageBitmap {
    /// A clear bitmap. Memory is one bit a page, taken from the kernel as zero pages.
    pub fn new(pages: u64) -> PageBitmap {
        let words = usize::try_from(pages.div_ceil(WORD_BITS)).expect("bitmap fits the host");
        PageBitmap { words: (0..words).map(|_| AtomicU64::new(0)).collect(), pages }
    }

    /// How many pages it covers.
    pub fn pages(&self) -> u64 {
        self.pages
    }

    /// How many words it has.
    pub fn word_count(&self) -> usize {
        self.words.len()
    }

    /// Sets one bit and says whether it was set before.
    ///
    /// # Panics
    /// If `page` is not below [`PageBitmap::pages`]; the same holds for every method here.
    pub fn set(&self, page: u64) -> bool {
        let (word, mask) = self.locate(page);
        self.words[word].fetch_or(mask, Ordering::Release) & mask != 0
    }

    /// Whether the bit is set.
    pub fn get(&self, page: u64) -> bool {
        let (word, mask) = self.locate(page);
        self.words[word].load(Ordering::Acquire) & mask != 0
    }

    /// Sets all bits of `range`.
    pub fn set_range(&self, range: Range<u64>) {
        assert!(range.end <= self.pages, "page {} of {}", range.end, self.pages);
        for (word, mask) in word_masks(range) {
            self.words[word].fetch_or(mask, Ordering::Release);
        }
    }

    /// Clears all bits of `range`.
    pub fn clear_range(&self, range: Range<u64>) {
        assert!(range.end <= self.pages, "page {} of {}", range.end, self.pages);
        for (word, mask) in word_masks(range) {
            self.words[word].fetch_and(!mask, Ordering::AcqRel);
        }
    }

    /// Adds the bits of a whole word, as a kernel's log hands them out. Bits past the last page
    /// are dropped.
    pub fn or_word(&self, word: usize, bits: u64) {
        let bits = bits & self.valid_mask(word);
        if bits != 0 {
            self.words[word].fetch_or(bits, Ordering::Release);
        }
    }

    /// Reads a word.
    pub fn word(&self, word: usize) -> u64 {
        self.words[word].load(Ordering::Acquire)
    }

    /// The first word at or after `from` that is not zero; `None` if there is none. Quicker than
    /// looking at each: a big guest's bitmap is mostly zero, and it is walked in the blackout.
    pub fn next_nonzero_word(&self, from: usize) -> Option<usize> {
        /// A cache line at a time, with one branch for all of it.
        const GROUP: usize = 8;
        let words = self.words.get(from..)?;
        let is_set = |word: &AtomicU64| word.load(Ordering::Relaxed) != 0;
        let zero_groups = words
            .chunks_exact(GROUP)
            .take_while(|group| group.iter().fold(0, |all, w| all | w.load(Ordering::Relaxed)) == 0)
            .count();
        let skipped = zero_groups * GROUP;
        Some(from + skipped + words[skipped..].iter().position(is_set)?)
    }

    /// Takes a word: returns its bits and leaves zero.
    pub fn take_word(&self, word: usize) -> u64 {
        // Most words of a big guest are zero; a plain load keeps their cache lines shared.
        if self.words[word].load(Ordering::Relaxed) == 0 {
            return 0;
        }
        self.words[word].swap(0, Ordering::Acquire)
    }

    /// How many bits are set. Exact only while nobody writes.
    pub fn count(&self) -> u64 {
        self.words.iter().map(|word| u64::from(word.load(Ordering::Relaxed).count_ones())).sum()
    }

    /// Whether no bit is set. Exact only while nobody writes.
    pub fn is_empty(&self) -> bool {
        self.words.iter().all(|word| word.load(Ordering::Relaxed) == 0)
    }

    /// The maximal runs of set bits in ascending order, without changing anything.
    pub fn runs(&self) -> Runs<'_> {
        Runs { bitmap: self, next: 0 }
    }

    fn locate(&self, page: u64) -> (usize, u64) {
        assert!(page < self.pages, "page {page} of {}", self.pages);
        (word_index(page), 1 << (page % WORD_BITS))
    }

    fn valid_mask(&self, word: usize) -> u64 {
        let rest = self.pages - (word as u64) * WORD_BITS;
        if rest >= WORD_BITS { u64::MAX } else { (1 << rest) - 1 }
    }

    /// The first page at or after `from` whose bit equals `set`; `pages` if there is none.
    fn find(&self, from: u64, set: bool) -> u64 {
        let mut page = from;
        while page < self.pages {
            let bits = self.word(word_index(page));
            let bits = if set { bits } else { !bits };
            let rest = bits >> (page % WORD_BITS);
            if rest != 0 {
                return (page + u64::from(rest.trailing_zeros())).min(self.pages);
            }
            page = (page / WORD_BITS + 1) * WORD_BITS;
        }
        self.pages
    }
}

/// Iterator over runs of set bits; see [`PageBitmap::runs`].
#[derive(Debug)]
pub struct Runs<'a> {
    bitmap: &'a PageBitmap,
    next: u64,
}

impl Iterator for Runs<'_> {
    type Item = Range<u64>;

    fn next(&mut self) -> Option<Range<u64>> {
        let start = self.bitmap.find(self.next, true);
        if start >= self.bitmap.pages {
            return None;
        }
        let end = self.bitmap.find(start, false);
        self.next = end;
        Some(start..end)
    }
}

fn word_index(page: u64) -> usize {
    (page / WORD_BITS) as usize
}

fn word_masks(range: Range<u64>) -> impl Iterator<Item = (usize, u64)> {
    let first = range.start / WORD_BITS;
    let last = if range.is_empty() { first } else { (range.end - 1) / WORD_BITS + 1 };
    (first..last).map(move |word| {
        let base = word * WORD_BITS;
        let low = range.start.saturating_sub(base);
        let high = (range.end - base).min(WORD_BITS);
        let mask = (u64::MAX << low) & (u64::MAX >> (WORD_BITS - high));
        (word_index(base), mask)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    #[derive(Clone, Debug)]
    enum Step {
        Set(u64),
        SetRange(u64, u64),
        ClearRange(u64, u64),
        Or(usize, u64),
        Take(usize),
    }

    const PAGES: u64 = 200;

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            (0..PAGES).prop_map(Step::Set),
            (0..=PAGES, 0..=PAGES).prop_map(|(a, b)| Step::SetRange(a.min(b), a.max(b))),
            (0..=PAGES, 0..=PAGES).prop_map(|(a, b)| Step::ClearRange(a.min(b), a.max(b))),
            (0..4usize, any::<u64>()).prop_map(|(w, b)| Step::Or(w, b)),
            (0..4usize).prop_map(Step::Take),
        ]
    }

    #[test]
    fn the_next_nonzero_word_is_found_from_anywhere() {
        const WORDS: usize = 40;
        let bitmap = PageBitmap::new(WORDS as u64 * 64 - 63);
        for word in 0..WORDS {
            bitmap.set(word as u64 * 64);
            for from in 0..WORDS + 2 {
                let expected = (from <= word).then_some(word);
                assert_eq!(bitmap.next_nonzero_word(from), expected, "from {from}");
            }
            assert_eq!(bitmap.take_word(word), 1);
        }
    }

    proptest! {
        #[test]
        fn behaves_like_a_set(steps in prop::collection::vec(step(), 0..40)) {
            let bitmap = PageBitmap::new(PAGES);
            let mut model = BTreeSet::new();
            for step in steps {
                match step {
                    Step::Set(page) => prop_assert_eq!(bitmap.set(page), !model.insert(page)),
                    Step::SetRange(a, b) => { bitmap.set_range(a..b); model.extend(a..b); }
                    Step::ClearRange(a, b) => {
                        bitmap.clear_range(a..b);
                        model.retain(|page| !(a..b).contains(page));
                    }
                    Step::Or(word, bits) => {
                        bitmap.or_word(word, bits);
                        let base = word as u64 * 64;
                        model.extend((0..64).filter(|i| bits >> i & 1 == 1).map(|i| base + i)
                            .filter(|page| *page < PAGES));
                    }
                    Step::Take(word) => {
                        let bits = bitmap.take_word(word);
                        let base = word as u64 * 64;
                        for i in 0..64 {
                            prop_assert_eq!(bits >> i & 1 == 1, model.remove(&(base + i)));
                        }
                    }
                }
                prop_assert_eq!(bitmap.count(), model.len() as u64);
                prop_assert_eq!(bitmap.is_empty(), model.is_empty());
                for from in 0..5u64 {
                    let next = model.range(from * 64..).next().map(|page| page / 64);
                    let found = bitmap.next_nonzero_word(usize::try_from(from).unwrap());
                    prop_assert_eq!(found.map(|word| word as u64), next);
                }
                let from_runs: BTreeSet<u64> = bitmap.runs().flatten().collect();
                prop_assert_eq!(&from_runs, &model);
            }
        }
    }
}
