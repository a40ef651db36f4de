//! From runs to posts: merging, keys ahead of the cursor, lists.

use super::super::layout::PageSpan;
use super::super::queue::{Message, Posted};
use super::super::units::Need;
use super::super::work::{Post, QueueIndex, Work};
use super::types::{MESSAGE_BYTES_MAX, Offered};
use super::{Phase, Source, UnitIndex};
use martlet_ram::{Run, RunKind};
use martlet_units::PAGE_SIZE;
use martlet_wire::rdma::Pinning;

const MESSAGE_PAGES_MAX: u64 = MESSAGE_BYTES_MAX / PAGE_SIZE;

/// A message that is shorter than this and could still grow waits while others of its queue pair
/// are in flight: the link is not idle, and the next run may go on where it ends.
const MESSAGE_PAGES_MIN: u64 = (1 << 20) / PAGE_SIZE;

/// Most requests of a list.
const LIST_MAX: usize = 64;

/// Most units that one call looks at ahead of the cursor: walking the dirty bitmap of a huge idle
/// guest must not hold up the completions.
const AHEAD_BURST: usize = 256;

impl Source {
    /// Takes as much of a run as there is room for, and leaves the rest in `run`. The pages must
    /// have been rearmed before: the NIC reads them at any time from now on until the drain.
    ///
    /// # Panics
    /// If the source is not open, the run is not of this guest, or starts before the end of one
    /// that was taken since the last drain: a page is posted at most once in an epoch, and this
    /// is where that is made sure of.
    pub fn offer(&mut self, run: &mut Run) -> Offered {
        assert_eq!(self.phase, Phase::Open, "pages offered to a source that is not open");
        while run.count > 0 {
            let count = u64::from(run.count);
            let span = self.layout.pages(run.region, run.first_page, count);
            let span = span.expect("a run of this guest");
            let start = (span.region(), span.first_page());
            assert!(start >= self.cursor, "page {start:?} behind the cursor {:?}", self.cursor);
            let taken = match run.kind {
                RunKind::Zero if self.zeros.has_room() => {
                    self.zeros.push(span);
                    self.counters.zero_pages += span.pages();
                    span
                }
                RunKind::Data if self.messages_waiting < self.config.messages_waiting_max => {
                    self.take_data(span)
                }
                RunKind::Zero | RunKind::Data => return Offered::Full,
            };
            self.cursor = (taken.region(), taken.end());
            run.first_page = taken.end();
            run.count -= u32::try_from(taken.pages()).expect("part of a run");
        }
        Offered::All
    }

    /// Whether the unit at the start of these pages is registered on both sides.
    pub fn is_registered(&self, pages: PageSpan) -> bool {
        self.units.is_ready(self.layout.unit_of(pages))
    }

    /// Asks for the unit at the start of these pages, because they will come next.
    pub fn expect(&mut self, pages: PageSpan) {
        if self.phase == Phase::Open {
            let unit = self.layout.unit_of(pages);
            self.units.demand(unit, &self.layout);
        }
    }

    /// Asks for keys ahead of the cursor, so that no page has to wait for one: of the next units
    /// that `is_wanted` says have a dirty page. With everything pinned, of all units. Call it now
    /// and then; each unit is looked at once an epoch.
    pub fn prefetch(&mut self, mut is_wanted: impl FnMut(PageSpan) -> bool) {
        if self.phase != Phase::Open || self.ahead_ended {
            return;
        }
        let at = self.unit_at_cursor();
        while self.asked_ahead.front().is_some_and(|unit| Some(*unit) < at) {
            self.asked_ahead.pop_front();
        }
        let pin_all = self.config.pinning == Pinning::All;
        let mut next = self.ahead.max(at);
        for _ in 0..AHEAD_BURST {
            let Some(unit) = next else {
                // Nothing to look at until the cursor goes back.
                self.ahead_ended = true;
                break;
            };
            let wanted = pin_all || is_wanted(self.layout.unit_pages_of(unit));
            if wanted {
                let enough = !pin_all && self.asked_ahead.len() >= self.config.units_ahead;
                let need = Need::Soon(at.unwrap_or(unit), unit);
                if enough || !self.units.try_ask(unit, &self.layout, need) {
                    break;
                }
                if !pin_all {
                    self.asked_ahead.push_back(unit);
                }
            }
            next = self.layout.next_unit(unit);
            self.ahead = next.or(self.ahead);
        }
    }

    /// Fills `out` with the next list for one queue pair, to be posted with one doorbell; `None`
    /// if nothing can be posted now. The list fits the queue pair's free slots.
    pub fn poll_posts(&mut self, out: &mut Vec<Post>) -> Option<QueueIndex> {
        out.clear();
        if !matches!(self.phase, Phase::Open | Phase::Draining) {
            return None;
        }
        let count = self.queues.len();
        for step in 0..count {
            let place = (self.next_queue + step) % count;
            self.fill(place, out);
            if let Some(last) = out.last_mut() {
                last.signalled = true;
                self.queues[place].end_list();
                self.counters.post_lists += 1;
                self.next_queue = (place + 1) % count;
                return Some(QueueIndex(u16::try_from(place).expect("at most 64 queues")));
            }
        }
        None
    }

    /// The keys of a unit are there: what waited for them goes to its queues.
    pub(super) fn release(&mut self, unit: UnitIndex) {
        let parked = std::mem::take(self.units.parked_mut(unit));
        for message in parked {
            let queue = self.layout.queue_of(message.pages, self.config.queues);
            let queue = &mut self.queues[usize::from(queue.0)];
            queue.parked -= 1;
            queue.ready.push_back(message);
        }
        self.units.ask_wanted(&self.layout);
    }

    fn unit_at_cursor(&self) -> Option<UnitIndex> {
        let (region, page) = self.cursor;
        match self.layout.pages(region, page, 1) {
            Some(next) => Some(self.layout.unit_of(next)),
            // The cursor is at the region's end.
            None => {
                let last = self.layout.pages(region, page.checked_sub(1)?, 1)?;
                self.layout.next_unit(self.layout.unit_of(last))
            }
        }
    }

    /// Takes the first part of a data run that one message can carry.
    fn take_data(&mut self, span: PageSpan) -> PageSpan {
        let queues = self.config.queues;
        let end = self.layout.message_end(span, queues);
        let unit = self.layout.unit_of(span);
        let queue = self.layout.queue_of(span, queues);
        let queue = &mut self.queues[usize::from(queue.0)];
        let is_ready = self.units.is_ready(unit);
        let tail =
            if is_ready { queue.ready.back_mut() } else { self.units.parked_mut(unit).last_mut() };
        // What goes on where a waiting message ends travels with it.
        if let Some(tail) = tail.filter(|tail| {
            tail.unit == unit
                && tail.pages.end() == span.first_page()
                && tail.pages.region() == span.region()
        }) {
            let room = MESSAGE_PAGES_MAX - tail.pages.pages();
            if room > 0 {
                let (part, _) = span.split_before(end.min(span.first_page() + room));
                assert!(tail.pages.try_extend(part), "it goes on there");
                return part;
            }
        }
        let (part, _) = span.split_before(end.min(span.first_page() + MESSAGE_PAGES_MAX));
        let message = Message { unit, pages: part };
        self.messages_waiting += 1;
        self.units.on_waiting(unit);
        if is_ready {
            queue.ready.push_back(message);
        } else {
            queue.parked += 1;
            self.units.parked_mut(unit).push(message);
            self.units.demand(unit, &self.layout);
        }
        part
    }

    fn fill(&mut self, place: usize, out: &mut Vec<Post>) {
        while self.queues[place].has_slot() && out.len() < LIST_MAX {
            let Some(message) = self.next_message(place) else { break };
            let queue = &mut self.queues[place];
            queue.ready.pop_front();
            let (sequence, signalled) = queue.take_slot(Posted::Write(message));
            self.messages_waiting -= 1;
            self.units.on_posted(message.unit);
            self.counters.writes += 1;
            self.counters.data_pages += message.pages.pages();
            let (local, remote) = self.units.keys(message.unit);
            let unit = self.layout.unit_pages_of(message.unit);
            let offset = (message.pages.first_page() - unit.first_page()) * PAGE_SIZE;
            let work = Work::Write {
                pages: message.pages,
                local,
                to: remote.address + offset,
                remote: remote.key,
            };
            out.push(Post { sequence, work, signalled });
        }
        let queue = &mut self.queues[place];
        let is_empty = queue.ready.is_empty() && queue.parked == 0;
        if is_empty
            && queue.has_slot()
            && out.len() < LIST_MAX
            && let Some(round) = queue.markers.pop_front()
        {
            let (sequence, signalled) = queue.take_slot(Posted::Marker);
            out.push(Post { sequence, work: Work::Marker { round }, signalled });
        }
    }

    /// The message to post next, if it may go now.
    fn next_message(&self, place: usize) -> Option<Message> {
        let queue = &self.queues[place];
        let message = *queue.ready.front()?;
        if self.units.in_flight(message.unit) >= self.config.unit_writes_max {
            return None;
        }
        let grows = self.phase == Phase::Open
            && message.pages.pages() < MESSAGE_PAGES_MIN
            && self.cursor == (message.pages.region(), message.pages.end())
            && message.pages.end() < self.layout.message_end(message.pages, self.config.queues);
        (!grows || queue.in_flight() == 0).then_some(message)
    }
}
