//! What happens next.

use core::cmp::{Ordering, Reverse};
use std::collections::BinaryHeap;

/// Events in the order of their time; at the same time in the order in which they were put in.
#[derive(Debug)]
pub struct Agenda<Time, Event> {
    put: u64,
    heap: BinaryHeap<Reverse<Entry<Time, Event>>>,
}

#[derive(Debug)]
struct Entry<Time, Event> {
    at: Time,
    number: u64,
    event: Event,
}

impl<Time: Ord, Event> PartialEq for Entry<Time, Event> {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl<Time: Ord, Event> Eq for Entry<Time, Event> {}

impl<Time: Ord, Event> PartialOrd for Entry<Time, Event> {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl<Time: Ord, Event> Ord for Entry<Time, Event> {
    fn cmp(&self, other: &Self) -> Ordering {
        self.at.cmp(&other.at).then(self.number.cmp(&other.number))
    }
}

impl<Time: Ord + Copy, Event> Default for Agenda<Time, Event> {
    fn default() -> Agenda<Time, Event> {
        Agenda { put: 0, heap: BinaryHeap::new() }
    }
}

impl<Time: Ord + Copy, Event> Agenda<Time, Event> {
    /// Puts an event at a time.
    pub fn put(&mut self, at: Time, event: Event) {
        self.put += 1;
        self.heap.push(Reverse(Entry { at, number: self.put, event }));
    }

    /// When the next event is.
    pub fn next_at(&self) -> Option<Time> {
        self.heap.peek().map(|Reverse(entry)| entry.at)
    }

    /// Takes the next event, with its time.
    pub fn take(&mut self) -> Option<(Time, Event)> {
        self.heap.pop().map(|Reverse(entry)| (entry.at, entry.event))
    }

    /// Takes the next event if its time has come.
    pub fn take_due(&mut self, now: Time) -> Option<(Time, Event)> {
        if self.next_at()? <= now { self.take() } else { None }
    }

    /// Forgets all events but those.
    pub fn retain(&mut self, keep: impl Fn(&Event) -> bool) {
        self.heap.retain(|Reverse(entry)| keep(&entry.event));
    }

    /// Whether nothing happens any more.
    pub fn is_empty(&self) -> bool {
        self.heap.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_come_in_order() {
        let mut agenda = Agenda::default();
        agenda.put(2, 'a');
        agenda.put(1, 'b');
        agenda.put(2, 'c');
        assert_eq!(agenda.take_due(0), None);
        assert_eq!(agenda.next_at(), Some(1));
        assert_eq!(agenda.take_due(5), Some((1, 'b')));
        assert_eq!(agenda.take_due(5), Some((2, 'a')));
        agenda.put(1, 'd');
        agenda.put(3, 'e');
        agenda.retain(|event| *event != 'c');
        assert_eq!(
            [agenda.take(), agenda.take(), agenda.take()],
            [Some((1, 'd')), Some((3, 'e')), None]
        );
        assert!(agenda.is_empty());
    }
}
