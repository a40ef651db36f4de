//! The pages of a job, and its answer.

use crate::PageRun;
use crate::slots::Piece;
use martlet_units::PAGE_SIZE;

/// Most pages of a job: 2 MiB.
pub const JOB_PAGES_MAX: usize = 512;
const WORD_BITS: usize = 64;

/// Which pages of a job are zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ZeroPages {
    words: [u64; JOB_PAGES_MAX / WORD_BITS],
    pages: u32,
}

impl ZeroPages {
    const NONE: ZeroPages = ZeroPages { words: [0; JOB_PAGES_MAX / WORD_BITS], pages: 0 };

    /// Whether this page of the job is zero.
    ///
    /// # Panics
    /// If the job has no such page.
    pub fn is_zero(&self, page: u32) -> bool {
        assert!(page < self.pages, "a page of the job");
        let page = page as usize;
        self.words[page / WORD_BITS] >> (page % WORD_BITS) & 1 != 0
    }

    /// How many pages the job had.
    pub fn pages(&self) -> u32 {
        self.pages
    }

    /// How many of them are zero.
    pub fn zero_pages(&self) -> u32 {
        self.words.iter().map(|word| word.count_ones()).sum()
    }

    /// As a bitmap, page 0 in the lowest bit of the first word.
    pub fn words(&self) -> &[u64; JOB_PAGES_MAX / WORD_BITS] {
        &self.words
    }

    fn set(&mut self, page: u32) {
        assert!(page < self.pages, "a page of the job");
        let page = page as usize;
        self.words[page / WORD_BITS] |= 1 << (page % WORD_BITS);
    }
}

/// One job.
pub(super) struct Job {
    /// The address of each page.
    addresses: Vec<u64>,
    /// The first page that nobody was given yet.
    next: u32,
    /// Pieces behind a page with content, which somebody was given before.
    again: Vec<Piece>,
    zero: ZeroPages,
}

impl Job {
    pub(super) fn new() -> Job {
        Job {
            addresses: Vec::with_capacity(JOB_PAGES_MAX),
            next: 0,
            again: Vec::with_capacity(JOB_PAGES_MAX),
            zero: ZeroPages::NONE,
        }
    }

    pub(super) fn reset(&mut self, runs: &[PageRun]) {
        self.addresses.clear();
        self.again.clear();
        self.next = 0;
        self.zero = ZeroPages::NONE;
        for run in runs {
            let pages = u64::from(run.pages());
            assert!(
                self.addresses.len() as u64 + pages <= JOB_PAGES_MAX as u64,
                "a job has at most {JOB_PAGES_MAX} pages"
            );
            self.addresses.extend((0..pages).map(|page| run.address() + page * PAGE_SIZE));
        }
        self.zero.pages = self.count();
    }

    fn count(&self) -> u32 {
        u32::try_from(self.addresses.len()).expect("at most 512")
    }

    pub(super) fn zero(&self) -> ZeroPages {
        self.zero
    }

    pub(super) fn set_zero(&mut self, piece: Piece) {
        for page in piece.first..piece.first + piece.pages {
            self.zero.set(page);
        }
    }

    pub(super) fn address(&self, page: u32) -> u64 {
        self.addresses[page as usize]
    }

    /// Takes the next pages that lie one behind the other, at most `pages_max`; `None` if all were
    /// taken. At most so many should stay in one piece as `limit` says for their first address.
    pub(super) fn take(
        &mut self,
        pages_max: u32,
        limit: impl Fn(u64) -> Option<u32>,
    ) -> Option<Piece> {
        let all = match self.again.pop() {
            Some(piece) => piece,
            None if self.next < self.count() => {
                Piece { first: self.next, pages: self.count() - self.next }
            }
            None => return None,
        };
        let was_given = all.first < self.next;
        let address = self.address(all.first);
        let limit = limit(address).unwrap_or(u32::MAX).min(pages_max).min(all.pages).max(1);
        let follows =
            |page: &u32| self.address(all.first + page) == address + u64::from(*page) * PAGE_SIZE;
        let pages = (1..limit).take_while(follows).last().unwrap_or(0) + 1;
        let rest = Piece { first: all.first + pages, pages: all.pages - pages };
        if !was_given {
            self.next = rest.first;
        } else if rest.pages > 0 {
            self.again.push(rest);
        }
        Some(Piece { first: all.first, pages })
    }

    /// Whether all pages were given to somebody.
    pub(super) fn is_given(&self) -> bool {
        self.again.is_empty() && self.next == self.count()
    }

    /// How many pages nobody was given, or were given back.
    pub(super) fn left(&self) -> u32 {
        let again: u32 = self.again.iter().map(|piece| piece.pages).sum();
        again + self.count() - self.next
    }

    /// Takes the next pages, wherever they lie; `None` if all were taken.
    pub(super) fn take_any(&mut self, pages_max: u32) -> Option<Piece> {
        let (all, is_new) = match self.again.pop() {
            Some(piece) => (piece, false),
            None => (Piece { first: self.next, pages: self.count() - self.next }, true),
        };
        let pages = all.pages.min(pages_max);
        let rest = Piece { first: all.first + pages, pages: all.pages - pages };
        if is_new {
            self.next = rest.first;
        } else {
            self.again(rest);
        }
        (pages > 0).then_some(Piece { first: all.first, pages })
    }

    /// Gives back the rest of a piece.
    pub(super) fn again(&mut self, rest: Piece) {
        if rest.pages > 0 {
            self.again.push(rest);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[expect(unsafe_code, reason = "a run's maker promises that it is mapped")]
    fn runs_are_taken_as_far_as_pages_follow_each_other() {
        // SAFETY: nothing here reads the pages.
        let run = |address, pages| unsafe { PageRun::new(address, pages) };
        let mut job = Job::new();
        job.reset(&[run(0x1000, 2), run(0x3000, 3), run(0x10_0000, 20), run(0x8000, 1)]);
        let mut pieces = Vec::new();
        while let Some(piece) = job.take(16, |address| (address == 0x10_0000).then_some(4)) {
            pieces.push((piece.first, piece.pages));
            if piece.first == 9 {
                job.again(Piece { first: 20, pages: 3 });
            }
        }
        assert_eq!(pieces, [(0, 5), (5, 4), (9, 16), (20, 3), (25, 1)]);
        job.set_zero(Piece { first: 5, pages: 2 });
        assert_eq!(job.zero().zero_pages(), 2);
        assert!(job.zero().is_zero(6) && !job.zero().is_zero(7));
        assert_eq!(job.zero().words()[0], 0x60);
    }
}
