//! Looks at every post and every completion, and knows nothing of how the source keeps its
//! promises.

use martlet_ram::RegionIndex;
use martlet_rdma::{PageSpan, Post, QueueIndex, Work, WorkSequence};
use std::collections::{BTreeMap, VecDeque};

/// What must never happen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Violation {
    /// A page was posted while an older post of it was in flight.
    TwoVersions,
    /// A page was posted while a zero list with it was not executed.
    WrittenBeforeZeroed,
    /// At the start the destination's memory was not the source's.
    StalePage,
    /// At the start a key could still be used.
    KeyOutlivesStart,
    /// Memory changed after the start, by a write of the source.
    WrittenAfterStart,
    /// More was registered than the budget allows.
    OverBudget,
    /// It did not come to an end.
    Stuck,
}

#[derive(Debug, Default)]
pub(crate) struct Checker {
    in_flight: BTreeMap<QueueIndex, VecDeque<(WorkSequence, Option<PageSpan>)>>,
    /// Writes in flight, and zero lists under way, of each page that has any.
    writing: BTreeMap<(RegionIndex, u64), u32>,
    zeroing: BTreeMap<(RegionIndex, u64), u32>,
    violations: Vec<Violation>,
    pub(crate) posts: u64,
    pub(crate) longest: u64,
}

impl Checker {
    pub(crate) fn on_posted(&mut self, queue: QueueIndex, post: &Post) {
        let pages = match post.work {
            Work::Write { pages, .. } => Some(pages),
            Work::Marker { .. } => None,
        };
        self.posts += 1;
        self.in_flight.entry(queue).or_default().push_back((post.sequence, pages));
        let Some(pages) = pages else { return };
        self.longest = self.longest.max(pages.bytes());
        for page in each(pages) {
            if self.zeroing.contains_key(&page) {
                self.note(Violation::WrittenBeforeZeroed);
            }
            let writes = self.writing.entry(page).or_insert(0);
            *writes += 1;
            if *writes > 1 {
                self.note(Violation::TwoVersions);
            }
        }
    }

    /// A completion of this request: it and all before it on its queue pair are done.
    pub(crate) fn on_retired(&mut self, queue: QueueIndex, sequence: WorkSequence) {
        let list = self.in_flight.entry(queue).or_default();
        while list.front().is_some_and(|(first, _)| *first <= sequence) {
            let Some((_, Some(pages))) = list.pop_front() else { continue };
            each(pages).for_each(|page| take(&mut self.writing, page));
        }
    }

    /// A page was given to the source as zero.
    pub(crate) fn on_zero_taken(&mut self, pages: PageSpan) {
        for page in each(pages) {
            if self.writing.contains_key(&page) {
                self.note(Violation::TwoVersions);
            }
            *self.zeroing.entry(page).or_insert(0) += 1;
        }
    }

    /// The destination has zeroed pages.
    pub(crate) fn on_zeroed(&mut self, pages: PageSpan) {
        each(pages).for_each(|page| take(&mut self.zeroing, page));
    }

    pub(crate) fn note(&mut self, violation: Violation) {
        if !self.violations.contains(&violation) {
            self.violations.push(violation);
        }
    }

    pub(crate) fn violations(&self) -> &[Violation] {
        &self.violations
    }
}

fn take(counts: &mut BTreeMap<(RegionIndex, u64), u32>, page: (RegionIndex, u64)) {
    if let Some(count) = counts.get_mut(&page) {
        *count -= 1;
        if *count == 0 {
            counts.remove(&page);
        }
    }
}

fn each(pages: PageSpan) -> impl Iterator<Item = (RegionIndex, u64)> {
    (pages.first_page()..pages.end()).map(move |page| (pages.region(), page))
}
