//! One end of a reliable connection.

use crate::network::Segment;
use crate::work::{Completion, Request, Status};
use martlet_units::Instant;
use std::collections::VecDeque;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    Up,
    /// A request failed; all others flush.
    Error,
    /// One of the sides ended it; all flush.
    Disconnected,
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
    pub(crate) rnr_retries: u8,
    /// A write with immediate data that waits for a receive, and what came behind it.
    pub(crate) waiting: Option<u64>,
    pub(crate) held: Vec<Segment>,
    /// A retry or a failure is scheduled: nothing is processed meanwhile.
    pub(crate) is_stalled: bool,
    pub(crate) receives: VecDeque<u64>,
    completions: VecDeque<(Completion, usize)>,
}

impl End {
    pub(crate) fn new(slots: usize, rnr_retries: u8) -> End {
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
            rnr_retries,
            waiting: None,
            held: Vec::new(),
            is_stalled: false,
            receives: VecDeque::new(),
            completions: VecDeque::new(),
        }
    }

    pub(crate) fn has_slot(&self) -> bool {
        self.slots_used < self.slots
    }

    pub(crate) fn post(&mut self, request: Request, now: Instant) {
        self.slots_used += 1;
        self.wqes.push_back(Wqe {
            request,
            posted: now,
            sent: 0,
            is_sent: false,
            on_the_way: 0,
            failed: None,
        });
        if matches!(self.state, State::Error | State::Disconnected) {
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
        while let Some(id) = self.receives.pop_front() {
            let status = Status::FLUSHED;
            let completion = Completion { id, is_receive: true, status, immediate: None };
            self.completions.push_back((completion, 0));
        }
        (self.waiting, self.held) = (None, Vec::new());
    }

    /// One of the sides ends the connection.
    pub(crate) fn disconnect(&mut self) {
        if self.state == State::Up {
            self.state = State::Disconnected;
            self.flush();
        }
    }

    pub(crate) fn post_receive(&mut self, id: u64) {
        self.receives.push_back(id);
        if matches!(self.state, State::Error | State::Disconnected) {
            self.flush();
        }
    }

    pub(crate) fn close(&mut self) {
        self.state = State::Closed;
        self.flush();
    }

    fn push(&mut self, id: u64, status: Status) {
        let slots = 1 + std::mem::take(&mut self.silent);
        self.completions
            .push_back((Completion { id, is_receive: false, status, immediate: None }, slots));
    }

    /// Ends the oldest receive; false if there is none.
    pub(crate) fn take_receive(&mut self, immediate: u32) -> bool {
        let Some(id) = self.receives.pop_front() else { return false };
        let (status, immediate) = (Status::SUCCESS, Some(immediate));
        self.completions.push_back((Completion { id, is_receive: true, status, immediate }, 0));
        true
    }

    pub(crate) fn has_completion(&self) -> bool {
        !self.completions.is_empty()
    }

    /// Takes a completion; its slot, and those of the silent ones before, are free then.
    pub(crate) fn poll(&mut self) -> Option<Completion> {
        let (completion, slots) = self.completions.pop_front()?;
        self.slots_used -= slots;
        Some(completion)
    }
}
