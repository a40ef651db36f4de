//! Batches of commands: tell all, then wait for all.
//!
//! A batch issues its items in order, at most a window's worth at a time. When the command queue
//! is busy it waits for one of its own commands to end, the oldest as a rule, and tries again; if
//! it has none outstanding, it asks again and again until its claim is honoured, which is what a
//! synchronous command does. It always drains: when something stops it from issuing, what has been
//! issued is waited for, and counts. So the report says for every item what became of it.
//!
//! Linux' executor (`drivers/vdpa/mlx5/core/resources.c`, `mlx5_vdpa_exec_async_cmds`) puts every
//! message into mailboxes at once, drops the results of what was issued before an error, and has a
//! barrier between two batches. Here mailboxes are filled when their command is issued, and an item
//! may follow another one without the rest having to be done.

#[cfg(test)]
mod tests;

use crate::command::{CommandError, CommandId, CommandQueue, Input, Output, Request, SubmitError};
use martlet_units::Instant;
use std::collections::VecDeque;
use std::time::Duration;

/// How often a batch that is refused, and has nothing outstanding, asks again when nothing else
/// happens: another user's command may end without an event for us.
const RETRY_EVERY: Duration = Duration::from_micros(50);

/// One command of a batch.
struct Item {
    request: Request,
    predecessor: Option<usize>,
    /// Under which number it was issued.
    id: Option<CommandId>,
    /// How it has ended.
    result: Option<Result<Output, CommandError>>,
}

impl Item {
    fn is_waiting(&self) -> bool {
        self.id.is_none() && self.result.is_none()
    }

    fn end(&mut self, result: Result<Output, CommandError>) {
        self.result = Some(result);
        // It is not issued again: what its input holds on to is not needed any more. (A command that
        // was given up keeps for itself what the device may still use.)
        self.request.input = Input::Bytes(Box::default());
        self.request.keep = None;
    }
}

/// Commands that are executed together.
pub(crate) struct Batch {
    /// Commands at a time, at least 1. With 1 the batch is a series.
    window: usize,
    /// How long each command has from its issue to its answer.
    deadline: Duration,
    items: Vec<Item>,
    /// Items that may be issued, in the order in which they are.
    ready: VecDeque<usize>,
    /// Items that may be issued after those: each follows an item that is done.
    followers: VecDeque<usize>,
    /// Issued and not done, oldest first.
    outstanding: VecDeque<usize>,
    /// Done and not yet given out by [`Batch::poll_item`].
    ended: VecDeque<usize>,
    /// Refused: nothing is tried until one of our own ends.
    is_held_back: bool,
    /// Since when it has been refused with nothing outstanding.
    refused_since: Option<Instant>,
}

impl Batch {
    /// An empty batch of commands that have `deadline` each from issue to answer, `window` at a time.
    pub(crate) fn new(window: usize, deadline: Duration) -> Batch {
        assert!(window >= 1, "a batch has a window");
        Batch {
            window,
            deadline,
            items: Vec::new(),
            ready: VecDeque::new(),
            followers: VecDeque::new(),
            outstanding: VecDeque::new(),
            ended: VecDeque::new(),
            is_held_back: false,
            refused_since: None,
        }
    }

    /// Adds an item; returns its number. Items without a predecessor are issued in the order of
    /// their numbers.
    pub(crate) fn push(&mut self, request: Request) -> usize {
        let number = self.add(request, None);
        self.ready.push_back(number);
        number
    }

    /// Adds an item that is issued as soon as another one has succeeded, and not at all if that
    /// fails. Items without a predecessor are issued first.
    ///
    /// # Panics
    /// If there is no item of that number.
    pub(crate) fn push_after(&mut self, request: Request, predecessor: usize) -> usize {
        assert!(predecessor < self.items.len(), "an item follows one before it");
        self.add(request, Some(predecessor))
    }

    fn add(&mut self, request: Request, predecessor: Option<usize>) -> usize {
        self.items.push(Item { request, predecessor, id: None, result: None });
        self.items.len() - 1
    }

    /// How many items it has.
    pub(crate) fn len(&self) -> usize {
        self.items.len()
    }

    /// Whether every item has ended.
    pub(crate) fn is_done(&self) -> bool {
        self.items.iter().all(|item| item.result.is_some())
    }

    /// What became of an item; `None` while it has not ended.
    pub(crate) fn result(&self, number: usize) -> Option<&Result<Output, CommandError>> {
        self.items.get(number)?.result.as_ref()
    }

    /// How many items have not ended.
    pub(crate) fn pending(&self) -> usize {
        self.items.iter().filter(|item| item.result.is_none()).count()
    }

    /// Bytes of the inputs of those items.
    pub(crate) fn pending_bytes(&self) -> usize {
        let pending = self.items.iter().filter(|item| item.result.is_none());
        pending.map(|item| item.request.input.bytes()).sum()
    }

    /// Whether an item has failed.
    pub(crate) fn has_failed(&self) -> bool {
        self.items.iter().any(|item| item.result.as_ref().is_some_and(Result::is_err))
    }

    /// What became of all items, in order. Empty while it is not done.
    pub(crate) fn results(&self) -> impl Iterator<Item = &Result<Output, CommandError>> {
        let count = if self.is_done() { self.items.len() } else { 0 };
        (0..count).filter_map(|number| self.result(number))
    }

    /// What became of all items, in order; those that have not ended are missing.
    pub(crate) fn into_results(self) -> Vec<Result<Output, CommandError>> {
        self.items.into_iter().filter_map(|item| item.result).collect()
    }

    /// The next item that has ended, in the order in which that was seen. Each once.
    pub(crate) fn poll_item(&mut self) -> Option<usize> {
        self.ended.pop_front()
    }

    /// Collects what has ended and issues what may be issued. Whether the batch is done. To be
    /// called after each `on_*` of the queue, and at [`Self::poll_timeout`]; afterwards the
    /// queue's doorbell is to be rung.
    pub(crate) fn poll(&mut self, now: Instant, queue: &mut CommandQueue) -> bool {
        self.collect(queue);
        self.issue(now, queue);
        self.is_done()
    }

    /// When to call [`Self::poll`] even if nothing has happened.
    pub(crate) fn poll_timeout(&self, now: Instant) -> Option<Instant> {
        self.refused_since.map(|_| now.after(RETRY_EVERY))
    }

    fn collect(&mut self, queue: &mut CommandQueue) {
        let mut index = 0;
        while let Some(number) = self.outstanding.get(index).copied() {
            let id = self.items[number].id.expect("what is outstanding was issued");
            match queue.take_done(id) {
                Some(completion) => {
                    self.outstanding.remove(index);
                    self.is_held_back = false;
                    self.end(number, completion.result);
                }
                None => index += 1,
            }
        }
    }

    /// An item has ended; those that follow it are ready, or end with it.
    fn end(&mut self, number: usize, result: Result<Output, CommandError>) {
        let succeeded = result.is_ok();
        self.items[number].end(result);
        self.ended.push_back(number);
        let follow = |item: &Item| item.predecessor == Some(number) && item.is_waiting();
        let followers = self.items.iter().enumerate().filter(|(_, item)| follow(item));
        let followers: Vec<usize> = followers.map(|(follower, _)| follower).collect();
        for follower in followers {
            if succeeded {
                self.followers.push_back(follower);
            } else {
                let opcode = self.items[follower].request.opcode;
                self.end(follower, Err(CommandError::Skipped { opcode }));
            }
        }
    }

    /// Nothing more is issued: what waits ends now. `because` is for the first of them.
    fn skip_all_waiting(&mut self, because: SubmitError) {
        let mut because = Some(because);
        let (ready, followers) = (self.ready.drain(..), self.followers.drain(..));
        let next: Vec<usize> = ready.chain(followers).collect();
        let rest: Vec<usize> = (0..self.items.len()).filter(|n| !next.contains(n)).collect();
        for number in next.into_iter().chain(rest) {
            if !self.items[number].is_waiting() {
                continue;
            }
            let opcode = self.items[number].request.opcode;
            let error = match because.take() {
                Some(because) => CommandError::NotIssued { opcode, because },
                None => CommandError::Skipped { opcode },
            };
            self.items[number].end(Err(error));
            self.ended.push_back(number);
        }
    }

    fn issue(&mut self, now: Instant, queue: &mut CommandQueue) {
        while !self.is_held_back && self.outstanding.len() < self.window {
            let Some(number) = self.ready.front().or_else(|| self.followers.front()).copied()
            else {
                return;
            };
            match queue.submit(now, self.deadline, &self.items[number].request) {
                Ok(id) => self.issued(number, id),
                Err(SubmitError::Busy | SubmitError::NoMailboxes { .. })
                    if !self.outstanding.is_empty() =>
                {
                    // One of our own gives back what is missing.
                    self.is_held_back = true;
                }
                Err(SubmitError::Busy) if !self.is_overdue(now) => {
                    self.refused_since.get_or_insert(now);
                    return;
                }
                Err(because) => {
                    self.refused_since = None;
                    self.skip_all_waiting(because);
                }
            }
        }
    }

    /// Whether it has been refused, with nothing outstanding, for as long as a command may take.
    fn is_overdue(&self, now: Instant) -> bool {
        self.refused_since.is_some_and(|since| now.since(since) >= self.deadline)
    }

    fn issued(&mut self, number: usize, id: CommandId) {
        self.ready.pop_front().or_else(|| self.followers.pop_front());
        self.refused_since = None;
        self.items[number].id = Some(id);
        self.outstanding.push_back(number);
    }
}
