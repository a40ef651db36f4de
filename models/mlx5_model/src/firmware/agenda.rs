//! What the firmware does next, and when.

use martlet_units::Instant;
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// Something that happens by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Event {
    /// The command of a slot is done.
    Done { slot: u8 },
    /// The driver is interrupted.
    Interrupt,
    /// The link goes up.
    LinkUp,
}

/// Events in the order of their moments; those of one moment in the order in which they were added.
#[derive(Debug, Default)]
pub(super) struct Agenda {
    heap: BinaryHeap<Reverse<(Instant, u64, Event)>>,
    added: u64,
}

impl Agenda {
    pub(super) fn add(&mut self, at: Instant, event: Event) {
        self.heap.push(Reverse((at, self.added, event)));
        self.added += 1;
    }

    /// Takes the next event that is due.
    pub(super) fn take_due(&mut self, now: Instant) -> Option<(Instant, Event)> {
        self.heap.peek().filter(|Reverse((at, _, _))| *at <= now)?;
        self.heap.pop().map(|Reverse((at, _, event))| (at, event))
    }

    /// When something is due next.
    pub(super) fn next(&self) -> Option<Instant> {
        self.heap.peek().map(|Reverse((at, _, _))| *at)
    }

    /// No command is answered any more.
    pub(super) fn forget_commands(&mut self) {
        self.heap.retain(|Reverse((_, _, event))| !matches!(event, Event::Done { .. }));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_come_in_order() {
        let mut agenda = Agenda::default();
        agenda.add(Instant(2), Event::LinkUp);
        agenda.add(Instant(1), Event::Interrupt);
        agenda.add(Instant(2), Event::Done { slot: 0 });
        assert_eq!(agenda.take_due(Instant(0)), None);
        assert_eq!(agenda.next(), Some(Instant(1)));
        assert_eq!(agenda.take_due(Instant(5)), Some((Instant(1), Event::Interrupt)));
        assert_eq!(agenda.take_due(Instant(5)), Some((Instant(2), Event::LinkUp)));
        assert_eq!(agenda.take_due(Instant(5)), Some((Instant(2), Event::Done { slot: 0 })));
        agenda.add(Instant(3), Event::LinkUp);
        agenda.add(Instant(1), Event::Done { slot: 1 });
        agenda.forget_commands();
        assert_eq!(agenda.next(), Some(Instant(3)));
    }
}
