//! Slots of a send queue, counted by the poster.

use crate::work::{Completion, Side, Signal, WorkId};
use std::ops::Range;

/// Counts the slots of one queue pair's send queue, and picks the requests that are signalled.
///
/// Requests are numbered from 0 in the order of posting, and the number is their [`WorkId`]. Every
/// `slots / 4`-th asks for a completion, which frees the slots of all before it; so a queue that
/// is kept full never waits for more than a quarter of itself. The last request of a flush must
/// ask for one too, or nobody learns that it is done.
///
/// ```
/// # use martlet_verbs::{SendWindow, Flush, WorkId, Signal, Completion};
/// let mut window = SendWindow::new(512);
/// let (first, _) = window.take(Flush::MoreComes).unwrap();
/// let (last, signal) = window.take(Flush::Last).unwrap();
/// assert_eq!((first, last, signal), (WorkId(0), WorkId(1), Signal::Completion));
/// let done = window.on_completion(&Completion { id: last, ..Completion::default() });
/// assert_eq!(done, 0..2);
/// ```
#[derive(Clone, Copy, Debug)]
pub struct SendWindow {
    slots: u32,
    signal_every: u32,
    unsignalled: u32,
    /// Number of the next request.
    next: u64,
    /// All before this one are done.
    done: u64,
}

/// Whether the poster has more requests at hand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flush {
    /// Another request follows soon.
    MoreComes,
    /// This is the last one for now.
    Last,
}

impl SendWindow {
    /// For a queue of `slots` slots (`QueuePair::send_slots`), above 0.
    pub fn new(slots: u32) -> SendWindow {
        assert!(slots > 0, "a send queue has slots");
        SendWindow { slots, signal_every: (slots / 4).max(1), unsignalled: 0, next: 0, done: 0 }
    }

    /// Takes a slot for the next request: what to call it and whether to signal it. `None` if
    /// all are taken; poll first.
    pub fn take(&mut self, flush: Flush) -> Option<(WorkId, Signal)> {
        if self.free() == 0 {
            return None;
        }
        let id = WorkId(self.next);
        self.next += 1;
        self.unsignalled += 1;
        let signal = if flush == Flush::Last || self.unsignalled >= self.signal_every {
            self.unsignalled = 0;
            Signal::Completion
        } else {
            Signal::None
        };
        Some((id, signal))
    }

    /// Slots that can be taken now.
    pub fn free(&self) -> u32 {
        let used = u32::try_from(self.in_flight()).unwrap_or(u32::MAX);
        self.slots.saturating_sub(used)
    }

    /// Requests taken and not known to be done.
    pub fn in_flight(&self) -> u64 {
        self.next - self.done
    }

    /// The requests that this completion says are done (or failed): up to its own. Completions of
    /// receives, and numbers that are not in flight, change nothing.
    pub fn on_completion(&mut self, completion: &Completion) -> Range<u64> {
        let from = self.done;
        let WorkId(id) = completion.id;
        if completion.side == Side::Send && (self.done..self.next).contains(&id) {
            self.done = id + 1;
        }
        from..self.done
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_queue_always_has_a_completion_to_wait_for() {
        for slots in 1..40 {
            let mut window = SendWindow::new(slots);
            let mut signalled = std::collections::VecDeque::new();
            for _ in 0..500 {
                match window.take(Flush::MoreComes) {
                    Some((id, Signal::Completion)) => signalled.push_back(id),
                    Some((_, Signal::None)) => {}
                    None => {
                        let id = signalled.pop_front().expect("something is signalled");
                        let done = Completion { id, ..Completion::default() };
                        assert!(!window.on_completion(&done).is_empty());
                    }
                }
                assert!(window.in_flight() <= u64::from(slots));
            }
        }
    }

    #[test]
    fn a_completion_is_for_the_silent_ones_before_it_too() {
        let mut window = SendWindow::new(64);
        let _ = window.take(Flush::MoreComes);
        let (id, signal) = window.take(Flush::Last).unwrap();
        assert_eq!(signal, Signal::Completion);
        assert_eq!(window.on_completion(&Completion { id, ..Completion::default() }), 0..2);
    }

    #[test]
    fn foreign_numbers_retire_nothing() {
        let mut window = SendWindow::new(8);
        let _ = window.take(Flush::Last);
        let receive = Completion { side: Side::Receive, ..Completion::default() };
        assert!(window.on_completion(&receive).is_empty());
        let unknown = Completion { id: WorkId(9), ..Completion::default() };
        assert!(window.on_completion(&unknown).is_empty());
        assert_eq!(window.in_flight(), 1);
    }
}
