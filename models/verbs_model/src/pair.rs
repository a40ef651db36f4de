//! One end of a reliable connection.

use crate::work::{Completion, Operation, Request, Status};
use martlet_units::Instant;
use std::collections::VecDeque;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    Up,
    /// A request failed; all others flush.
    Error,
    Closed,
}

/// A request between its post and its completion.
#[derive(Debug)]
pub(crate) struct Wqe {
    pub(crate) request: Request,
    pub(crate) posted: Instant,
    /// Bytes that were put on the wire, and whether all of it was.
    pub(crate) sent: u64,
    pub(crate) is_sent: bool,
    /// Segments on their way.
    pub(crate) on_the_way: u32,
    pub(crate) failed: Option<Status>,
}

#[derive(Debug)]
pub(crate) struct End {
    pub(crate) state: State,
    slots: usize,
    slots_used: usize,
    /// Completed requests that left no completion.
    silent: usize,
    pub(crate) wqes: VecDeque<Wqe>,
    /// Number of the first of `wqes`.
    pub(crate) oldest: u64,
    /// Number of the next one to put on the wire.
    pub(crate) next_sent: u64,
    /// Number of the next one that the peer processes.
    pub(crate) next_done: u64,
    pub(crate) last_start: Option<Instant>,
    pub(crate) last_arrival: Instant,
    pub(crate) rnr_tries: u8,
    /// A retry or a failure is scheduled: nothing is processed meanwhile.
    pub(crate) is_stalled: bool,
    pub(crate) receives: usize,
    completions: VecDeque<(Completion, usize)>,
}

impl End {
    pub(crate) fn new(slots: usize) -> End {
        End {
            state: State::Up,
            slots,
            slots_used: 0,
            silent: 0,
            wqes: VecDeque::new(),
            oldest: 0,
            next_sent: 0,
            next_done: 0,
            last_start: None,
            last_arrival: Instant(0),
            rnr_tries: 0,
            is_stalled: false,
            receives: 0,
            completions: VecDeque::new(),
        }
    }

    pub(crate) fn has_slot(&self) -> bool {
        self.slots_used < self.slots
    }

    pub(crate) fn post(&mut self, request: Request, now: Instant) {
        self.slots_used += 1;
        let is_write = matches!(request.operation, Operation::Write { .. });
        assert_eq!(is_write, request.bytes > 0, "a write has bytes, an immediate has none");
        self.wqes.push_back(Wqe {
            request,
            posted: now,
            sent: 0,
            is_sent: false,
            on_the_way: 0,
            failed: None,
        });
        if self.state == State::Error {
            self.flush();
        }
    }

    pub(crate) fn wqe(&mut self, number: u64) -> Option<&mut Wqe> {
        let place = usize::try_from(number.checked_sub(self.oldest)?).ok()?;
        self.wqes.get_mut(place)
    }

    /// The oldest request ends well.
    pub(crate) fn complete_oldest(&mut self) {
        let Some(wqe) = self.wqes.pop_front() else { return };
        self.oldest += 1;
        if wqe.request.signalled {
            self.push(wqe.request.id, Status::SUCCESS);
        } else {
            self.silent += 1;
        }
    }

    /// The oldest request fails, and all others flush.
    pub(crate) fn fail_oldest(&mut self, status: Status) {
        self.state = State::Error;
        if let Some(wqe) = self.wqes.pop_front() {
            self.oldest += 1;
            self.push(wqe.request.id, status);
        }
        self.flush();
    }

    fn flush(&mut self) {
        while let Some(wqe) = self.wqes.pop_front() {
            self.oldest += 1;
            self.push(wqe.request.id, Status::FLUSHED);
        }
        (self.next_sent, self.next_done) = (self.oldest, self.oldest);
    }

    pub(crate) fn close(&mut self) {
        self.state = State::Closed;
        self.flush();
        self.receives = 0;
    }

    fn push(&mut self, id: u64, status: Status) {
        let slots = 1 + std::mem::take(&mut self.silent);
        self.completions.push_back((Completion { id, status, immediate: None }, slots));
    }

    pub(crate) fn push_receive(&mut self, immediate: u32) {
        let completion = Completion { id: 0, status: Status::SUCCESS, immediate: Some(immediate) };
        self.completions.push_back((completion, 0));
    }

    /// Takes a completion; its slot, and those of the silent ones before, are free then.
    pub(crate) fn poll(&mut self) -> Option<Completion> {
        let (completion, slots) = self.completions.pop_front()?;
        self.slots_used -= slots;
        Some(completion)
    }
}
