//! Virtual time: what happens next.

use core::cmp::Reverse;
use core::time::Duration;
use martlet_units::Instant;
use std::collections::BinaryHeap;

/// Events in the order of their time; at the same time in the order in which they were put in.
#[derive(Debug)]
pub(crate) struct Queue<Event> {
    now: Instant,
    count: u64,
    heap: BinaryHeap<Reverse<Entry<Event>>>,
}

#[derive(Debug)]
struct Entry<Event> {
    at: Instant,
    number: u64,
    event: Event,
}

impl<Event> PartialEq for Entry<Event> {
    fn eq(&self, other: &Self) -> bool {
        (self.at, self.number) == (other.at, other.number)
    }
}

impl<Event> Eq for Entry<Event> {}

impl<Event> PartialOrd for Entry<Event> {
    fn partial_cmp(&self, other: &Self) -> Option<core::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl<Event> Ord for Entry<Event> {
    fn cmp(&self, other: &Self) -> core::cmp::Ordering {
        (self.at, self.number).cmp(&(other.at, other.number))
    }
}

impl<Event> Queue<Event> {
    /// An empty queue at this time.
    pub(crate) fn new(now: Instant) -> Queue<Event> {
        Queue { now, count: 0, heap: BinaryHeap::new() }
    }

    /// The present: the time of the event that was taken last.
    pub(crate) fn now(&self) -> Instant {
        self.now
    }

    /// Puts an event at a time, which is not in the past.
    pub(crate) fn put_at(&mut self, at: Instant, event: Event) {
        assert!(at >= self.now, "the past is over");
        self.count += 1;
        self.heap.push(Reverse(Entry { at, number: self.count, event }));
    }

    /// Puts an event this much later.
    pub(crate) fn put_after(&mut self, delay: Duration, event: Event) {
        self.put_at(self.now.after(delay), event);
    }

    /// Takes the next event and moves the present to its time.
    pub(crate) fn take(&mut self) -> Option<Event> {
        let Reverse(entry) = self.heap.pop()?;
        self.now = entry.at;
        Some(entry.event)
    }
}
