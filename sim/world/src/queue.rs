//! Virtual time: what happens next.

use core::time::Duration;
use martlet_simulation::Agenda;
use martlet_units::Instant;

/// Events in the order of their time, and the present.
#[derive(Debug)]
pub(crate) struct Queue<Event> {
    now: Instant,
    agenda: Agenda<Instant, Event>,
}

impl<Event> Queue<Event> {
    /// An empty queue at this time.
    pub(crate) fn new(now: Instant) -> Queue<Event> {
        Queue { now, agenda: Agenda::default() }
    }

    /// The present: the time of the event that was taken last.
    pub(crate) fn now(&self) -> Instant {
        self.now
    }

    /// Puts an event at a time, which is not in the past.
    pub(crate) fn put_at(&mut self, at: Instant, event: Event) {
        assert!(at >= self.now, "the past is over");
        self.agenda.put(at, event);
    }

    /// Puts an event this much later.
    pub(crate) fn put_after(&mut self, delay: Duration, event: Event) {
        self.put_at(self.now.after(delay), event);
    }

    /// Takes the next event and moves the present to its time.
    pub(crate) fn take(&mut self) -> Option<Event> {
        let (at, event) = self.agenda.take()?;
        self.now = at;
        Some(event)
    }
}
