//! Zero ranges on their way: gathered, sent as lists, acknowledged.

use super::failure::PeerFault;
use super::layout::PageSpan;
use martlet_wire::rdma::{ZERO_RANGES_MAX, ZeroList, ZeroRange};
use std::collections::VecDeque;

/// Lists that may wait for their acknowledgement. The destination holds a source to it.
pub(super) const ZERO_LISTS_MAX: usize = 8;

/// The source's zero ranges.
#[derive(Debug, Default)]
pub(super) struct ZeroLists {
    gathered: Vec<PageSpan>,
    /// Sequence of the newest list that was sent.
    sent: u64,
    /// The lists that are not acknowledged, the oldest first.
    waiting: VecDeque<Vec<PageSpan>>,
}

impl ZeroLists {
    /// Whether a range can be taken.
    pub(super) fn has_room(&self) -> bool {
        self.gathered.len() < ZERO_RANGES_MAX
    }

    pub(super) fn push(&mut self, pages: PageSpan) {
        let fits = |last: &PageSpan| last.pages() + pages.pages() <= u64::from(u32::MAX);
        let last = self.gathered.last_mut().filter(|last| fits(last));
        if !last.is_some_and(|last| last.try_extend(pages)) {
            assert!(self.has_room(), "a zero range without room");
            self.gathered.push(pages);
        }
    }

    /// The next list to send: a full one; any if nothing else is under way, or if `all` must go.
    pub(super) fn take(&mut self, all: bool) -> Option<ZeroList> {
        let go = all || self.waiting.is_empty() || !self.has_room();
        if self.gathered.is_empty() || self.waiting.len() >= ZERO_LISTS_MAX || !go {
            return None;
        }
        let spans = std::mem::take(&mut self.gathered);
        let range = |span: &PageSpan| ZeroRange {
            region: span.region().0,
            first_page: span.first_page(),
            count: u32::try_from(span.pages()).expect("runs count pages in 32 bits"),
        };
        let ranges = spans.iter().map(range).collect();
        self.sent += 1;
        self.waiting.push_back(spans);
        Some(ZeroList { sequence: self.sent, ranges })
    }

    /// All lists up to this one are executed.
    pub(super) fn on_done(&mut self, sequence: u64) -> Result<(), PeerFault> {
        let first = self.sent + 1 - self.waiting.len() as u64;
        if sequence < first || sequence > self.sent {
            let what = "acknowledged zero list";
            return Err(PeerFault::Sequence { what, found: sequence, expected: self.sent });
        }
        for _ in first..=sequence {
            self.waiting.pop_front();
        }
        Ok(())
    }

    /// Whether every range is executed.
    pub(super) fn is_settled(&self) -> bool {
        self.gathered.is_empty() && self.waiting.is_empty()
    }

    pub(super) fn is_gathered_empty(&self) -> bool {
        self.gathered.is_empty()
    }

    /// Sequence of the newest list that was sent; 0 if there was none.
    pub(super) fn sent(&self) -> u64 {
        self.sent
    }

    /// Ranges that may not be executed.
    pub(super) fn unretired(&self) -> impl Iterator<Item = PageSpan> {
        self.waiting.iter().flatten().chain(&self.gathered).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::super::layout::Layout;
    use super::*;
    use martlet_ram::RegionIndex;

    #[test]
    fn lists_are_acknowledged_in_order_and_bounded() {
        let layout = Layout::new(&[4096], 1 << 20, 1).unwrap();
        let page = |page| layout.pages(RegionIndex(0), page, 1).unwrap();
        let mut zeros = ZeroLists::default();
        zeros.push(page(1));
        zeros.push(page(2));
        let list = zeros.take(false).unwrap();
        let merged = ZeroRange { region: 0, first_page: 1, count: 2 };
        assert_eq!(list, ZeroList { sequence: 1, ranges: vec![merged] });
        zeros.push(page(9));
        assert_eq!(zeros.take(false), None, "waits for more, as a list is under way");
        for n in 1..ZERO_LISTS_MAX as u64 {
            assert_eq!(zeros.take(true).unwrap().sequence, 1 + n);
            zeros.push(page(9 + 2 * n));
        }
        assert_eq!(zeros.take(true), None, "too many lists");
        assert!(zeros.on_done(0).is_err() && zeros.on_done(9).is_err());
        zeros.on_done(7).unwrap();
        assert!(zeros.on_done(7).is_err());
        assert_eq!(zeros.unretired().count(), 2);
        zeros.on_done(8).unwrap();
        assert!(!zeros.is_settled());
        zeros.take(false).unwrap();
        zeros.on_done(9).unwrap();
        assert!(zeros.is_settled());
    }
}
