//! One queue pair's send side: what waits, what is posted, which slots are free.

use super::layout::{PageSpan, UnitIndex};
use super::work::WorkSequence;
use std::collections::VecDeque;

/// Pages that go with one write: inside one unit, on one queue pair.
#[derive(Clone, Copy, Debug)]
pub(super) struct Message {
    pub(super) unit: UnitIndex,
    pub(super) pages: PageSpan,
}

/// What holds a slot of the send queue.
#[derive(Clone, Copy, Debug)]
pub(super) enum Posted {
    Write(Message),
    Marker,
}

/// The send side. A slot is taken by a post and freed by a completion of that request or of a
/// later one; nothing is ever posted without a free one.
#[derive(Debug)]
pub(super) struct Queue {
    slots: usize,
    signal_every: u32,
    unsignalled: u32,
    /// Sequence of the first entry of `posted`.
    oldest: u64,
    posted: VecDeque<Posted>,
    /// Messages whose keys are there.
    pub(super) ready: VecDeque<Message>,
    /// How many messages of this queue wait for a key, at their units.
    pub(super) parked: usize,
    /// Markers that go behind everything that waits.
    pub(super) markers: VecDeque<u32>,
}

impl Queue {
    pub(super) fn new() -> Queue {
        Queue {
            slots: 0,
            signal_every: 1,
            unsignalled: 0,
            oldest: 0,
            posted: VecDeque::new(),
            ready: VecDeque::new(),
            parked: 0,
            markers: VecDeque::new(),
        }
    }

    /// The queue pair is connected and takes this many requests. One in four is signalled: an
    /// unsignalled request holds its slot until a later one completes, so slots come back in
    /// quarters and three of them are at work.
    pub(super) fn connect(&mut self, slots: u32) {
        assert!(slots > 0, "a queue pair without slots");
        self.slots = slots as usize;
        self.signal_every = (slots / 4).max(1);
        self.posted.reserve(self.slots);
    }

    pub(super) fn has_slot(&self) -> bool {
        self.posted.len() < self.slots
    }

    pub(super) fn in_flight(&self) -> usize {
        self.posted.len()
    }

    /// Whether nothing waits and nothing is in flight.
    pub(super) fn is_settled(&self) -> bool {
        self.posted.is_empty()
            && self.ready.is_empty()
            && self.parked == 0
            && self.markers.is_empty()
    }

    /// Takes a slot; says the request's name and whether it must be signalled.
    pub(super) fn take_slot(&mut self, posted: Posted) -> (WorkSequence, bool) {
        assert!(self.has_slot(), "a request without a slot");
        let sequence = WorkSequence(self.oldest + self.posted.len() as u64);
        self.posted.push_back(posted);
        self.unsignalled += 1;
        let signalled = self.unsignalled >= self.signal_every;
        if signalled {
            self.unsignalled = 0;
        }
        (sequence, signalled)
    }

    /// The last request of a list is signalled, so that every slot comes back by itself.
    pub(super) fn end_list(&mut self) {
        self.unsignalled = 0;
    }

    /// The request is in flight; `None` if it is not.
    pub(super) fn find(&self, sequence: WorkSequence) -> Option<Posted> {
        let place = usize::try_from(sequence.0.checked_sub(self.oldest)?).ok()?;
        self.posted.get(place).copied()
    }

    /// Frees the oldest slot if it is not behind `sequence`.
    pub(super) fn retire_until(&mut self, sequence: WorkSequence) -> Option<Posted> {
        if self.oldest > sequence.0 {
            return None;
        }
        let posted = self.posted.pop_front()?;
        self.oldest += 1;
        Some(posted)
    }

    /// What was taken and not retired, in flight first.
    pub(super) fn unretired(&self) -> impl Iterator<Item = PageSpan> {
        let in_flight = self.posted.iter().filter_map(|posted| match posted {
            Posted::Write(message) => Some(message.pages),
            Posted::Marker => None,
        });
        in_flight.chain(self.ready.iter().map(|message| message.pages))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_come_back_by_the_completion_of_a_later_request() {
        let mut queue = Queue::new();
        queue.connect(8);
        let signals: Vec<bool> = (0..8).map(|_| queue.take_slot(Posted::Marker).1).collect();
        assert_eq!(signals, [false, true, false, true, false, true, false, true]);
        assert!(!queue.has_slot());
        assert!(queue.find(WorkSequence(3)).is_some() && queue.find(WorkSequence(8)).is_none());
        while queue.retire_until(WorkSequence(3)).is_some() {}
        assert_eq!(queue.in_flight(), 4);
        assert!(queue.find(WorkSequence(3)).is_none());
        assert_eq!(queue.take_slot(Posted::Marker).0, WorkSequence(8));
    }

    #[test]
    #[should_panic(expected = "without a slot")]
    fn nothing_is_posted_without_a_slot() {
        let mut queue = Queue::new();
        queue.connect(1);
        queue.take_slot(Posted::Marker);
        queue.take_slot(Posted::Marker);
    }
}
