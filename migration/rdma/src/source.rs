//! The source's machine: terms, epochs, failure. How runs become posts is in `feed`.

mod feed;
mod types;

pub use types::{Counters, Drain, MESSAGE_BYTES_MAX, Offered, SourceAction, SourceConfig};

use super::PageSpan;
use super::failure::{Failure, PeerFault};
use super::heartbeat::{HEARTBEAT_DEADLINE, Heartbeat};
use super::layout::{Layout, LayoutError, UnitIndex};
use super::phase::SourcePhase as Phase;
use super::queue::{Posted, Queue};
use super::units::Units;
use super::work::{LocalKey, QueueIndex, Registered, RemoteKey, WorkCompletion, WorkStatus};
use super::zero::ZeroLists;
use martlet_ram::RegionIndex;
use martlet_units::Instant;
use martlet_wire::rdma::{
    Grant, Pinning, QUEUES_MAX, RDMA_VERSION, RdmaMessage, RoundEnd, SPANS_MAX, Terms,
};
use std::collections::VecDeque;
use std::time::Duration;

/// With something in flight, or asked of the destination, something must come back within this. A
/// reliable connection gives up after some seconds by itself; this is for a device that says nothing
/// at all, and for a destination that says everything but what it was asked.
const STALL_MAX: Duration = Duration::from_secs(30);

/// The ends of epochs and what they wait for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Draining {
    why: Drain,
    /// The message that ends a round waits until all zero lists of the round are sent.
    end_due: bool,
}

/// What the closing of the queue pairs has come to.
#[derive(Clone, Copy, Debug)]
struct Closing {
    deadline: Instant,
    queues_closed: bool,
    /// Rounds that arrived, once the destination said that nothing more can land.
    revoked: Option<u32>,
    /// The last round was being drained when it began.
    last_round: Option<u32>,
}

/// The source's half of RDMA. See the module for the invariant that it keeps.
///
/// Events go in by the `on_` methods and runs by [`Source::offer`]; afterwards the owner takes
/// [`Source::poll_action`] and [`Source::poll_posts`] until both are empty, carries out what they
/// say, and calls [`Source::on_timeout`] at [`Source::poll_timeout`].
#[derive(Debug)]
pub struct Source {
    layout: Layout,
    config: SourceConfig,
    phase: Phase,
    units: Units,
    queues: Vec<Queue>,
    next_queue: usize,
    zeros: ZeroLists,
    /// First page of the epoch that was not taken yet: region and page.
    cursor: (RegionIndex, u64),
    /// First unit that was not looked at ahead of the cursor.
    ahead: Option<UnitIndex>,
    /// All units were looked at.
    ahead_ended: bool,
    /// Units ahead of the cursor that were asked for.
    asked_ahead: VecDeque<UnitIndex>,
    messages_waiting: usize,
    draining: Option<Draining>,
    next_round: u32,
    closing: Option<Closing>,
    cause: Option<Failure>,
    heartbeat: Heartbeat,
    /// When something came back the last time, or nothing was waited for.
    last_progress: Instant,
    actions: VecDeque<SourceAction>,
    counters: Counters,
}

impl Source {
    /// A source that offers its terms. `regions` are the lengths of guest memory in pages.
    ///
    /// # Panics
    /// If the configuration leaves no slot, no registration or no message under way at all.
    pub fn new(regions: &[u64], config: SourceConfig, now: Instant) -> Result<Source, LayoutError> {
        let layout = Layout::new(regions, config.chunk_bytes, config.unit_chunks)?;
        if !(1..=QUEUES_MAX).contains(&config.queues) {
            return Err(LayoutError::Queues(config.queues));
        }
        let SourceConfig { slots_max, registrations_max, messages_waiting_max, .. } = config;
        assert!(slots_max > 0 && registrations_max > 0 && messages_waiting_max > 0, "{config:?}");
        assert!(config.unit_writes_max > 0, "{config:?}");
        let terms = Terms {
            version: RDMA_VERSION,
            queues: config.queues,
            pinning: config.pinning,
            unit_chunks: config.unit_chunks,
            chunk_bytes: config.chunk_bytes,
            pinned_bytes_max: config.pinned_bytes_max.max(2 * layout.unit_bytes()),
        };
        Ok(Source {
            units: Units::new(&layout, 0, config.registrations_max),
            layout,
            phase: Phase::Offered,
            queues: (0..config.queues).map(|_| Queue::new()).collect(),
            next_queue: 0,
            zeros: ZeroLists::default(),
            cursor: (RegionIndex(0), 0),
            ahead: None,
            ahead_ended: false,
            asked_ahead: VecDeque::new(),
            messages_waiting: 0,
            draining: None,
            next_round: 0,
            closing: None,
            cause: None,
            heartbeat: Heartbeat::new(now),
            last_progress: now,
            actions: VecDeque::from([SourceAction::Send(RdmaMessage::Offer(terms))]),
            counters: Counters::default(),
            config,
        })
    }

    /// How guest memory is cut.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Why RDMA ended, if it did so early.
    pub fn cause(&self) -> Option<&Failure> {
        self.cause.as_ref()
    }

    /// What was done so far.
    pub fn counters(&self) -> Counters {
        let pinned_bytes = self.units.pinned_bytes();
        let (units_dropped, messages_waiting) = (self.units.drops(), self.messages_waiting);
        Counters { pinned_bytes, units_dropped, messages_waiting, ..self.counters }
    }

    /// Whether runs can be offered now.
    pub fn is_open(&self) -> bool {
        self.phase == Phase::Open
    }

    /// What to do next. Key requests and the like are gathered until this is called, so that many
    /// share a message.
    pub fn poll_action(&mut self) -> Option<SourceAction> {
        if let Some(action) = self.actions.pop_front() {
            return Some(action);
        }
        if !matches!(self.phase, Phase::Open | Phase::Draining) {
            return None;
        }
        let layout = &self.layout;
        let errands = &mut self.units.errands;
        if let Some(unit) = errands.register.pop_front() {
            return Some(SourceAction::Register { unit, pages: layout.unit_pages_of(unit) });
        }
        if let Some(unit) = errands.deregister.pop_front() {
            return Some(SourceAction::Deregister { unit });
        }
        let batch = |list: &mut VecDeque<UnitIndex>| {
            let spans = list.drain(..list.len().min(SPANS_MAX)).map(|unit| layout.to_wire(unit));
            spans.collect::<Vec<_>>()
        };
        if !errands.ask.is_empty() {
            return Some(SourceAction::Send(RdmaMessage::KeyRequest(batch(&mut errands.ask))));
        }
        if !errands.give_up.is_empty() {
            return Some(SourceAction::Send(RdmaMessage::KeyDrop(batch(&mut errands.give_up))));
        }
        if let Some(list) = self.zeros.take(self.phase == Phase::Draining) {
            self.counters.zero_lists += 1;
            return Some(SourceAction::Send(RdmaMessage::ZeroList(list)));
        }
        self.take_round_end().map(SourceAction::Send)
    }

    /// When [`Source::on_timeout`] is due.
    pub fn poll_timeout(&self) -> Option<Instant> {
        match (self.phase, &self.closing) {
            (Phase::Closed | Phase::Finished, _) => None,
            (_, Some(closing)) => Some(closing.deadline),
            (_, None) if self.is_waiting() => {
                Some(self.heartbeat.timeout().min(self.last_progress.after(STALL_MAX)))
            }
            (_, None) => Some(self.heartbeat.timeout()),
        }
    }

    /// The time has come, or passed.
    pub fn on_timeout(&mut self, now: Instant) {
        match (self.phase, self.closing) {
            (Phase::Closed | Phase::Finished, _) => {}
            (_, Some(closing)) if closing.deadline <= now => self.end_closing(false),
            (_, Some(_)) => {}
            (_, None) => {
                if let Some(silent) = self.heartbeat.is_lost(now) {
                    return self.fail(now, Failure::Silent(silent.as_millis()));
                }
                if !self.is_waiting() {
                    self.note_progress(now);
                }
                let stalled = now.since(self.last_progress);
                if stalled >= STALL_MAX {
                    return self.fail(now, Failure::Stalled(stalled.as_millis()));
                }
                if self.heartbeat.is_due(now) {
                    let beat = RdmaMessage::Heartbeat { sent_ns: now.0 };
                    self.actions.push_back(SourceAction::Send(beat));
                }
            }
        }
    }

    /// A message came from the destination.
    pub fn on_message(&mut self, now: Instant, message: &RdmaMessage) {
        self.heartbeat.on_message(now);
        if matches!(self.phase, Phase::Closed | Phase::Finished) {
            return;
        }
        let done = match (message, self.phase) {
            (RdmaMessage::Revoked { rounds }, _) => self.on_revoked(*rounds),
            (_, Phase::Closing) | (RdmaMessage::Heartbeat { .. }, _) => Ok(()),
            (RdmaMessage::Close { reason }, _) => Err(Failure::Closed(reason.clone())),
            (RdmaMessage::Accept(terms), Phase::Offered) => self.on_accept(terms),
            (RdmaMessage::KeyGrant(grants), Phase::Open | Phase::Draining) => {
                self.note_progress(now);
                grants.iter().try_for_each(|grant| self.on_grant(grant))
            }
            (RdmaMessage::KeyRefusal(spans), Phase::Open | Phase::Draining) => {
                // A refusal of what was not asked for is no reason to believe the peer.
                let refused = |span| match self.layout.from_wire(span) {
                    Ok(unit) if self.units.is_asked(unit) => Failure::Refused(*span),
                    Ok(_) => PeerFault::Key(*span, "refused, but not asked for").into(),
                    Err(fault) => fault.into(),
                };
                spans.first().map_or(Ok(()), |span| Err(refused(span)))
            }
            (RdmaMessage::KeyDropped(spans), Phase::Open | Phase::Draining) => spans
                .iter()
                .try_for_each(|span| {
                    let unit = self.layout.from_wire(span)?;
                    self.units.on_remote_gone(unit, span, &self.layout)
                })
                .map_err(Failure::Peer),
            (RdmaMessage::ZeroDone { sequence }, Phase::Open | Phase::Draining) => {
                self.note_progress(now);
                self.zeros.on_done(*sequence).map_err(Failure::Peer)
            }
            (message, phase) => {
                Err(PeerFault::Place { kind: message.kind(), phase: format!("{phase:?}") }.into())
            }
        };
        match done {
            Ok(()) => self.end_drain(),
            Err(failure) => self.fail(now, failure),
        }
    }

    /// The queue pairs are connected; each takes this many requests at once.
    ///
    /// # Panics
    /// If that was not asked for by [`SourceAction::Connect`] or there are no slots.
    pub fn on_connected(&mut self, now: Instant, slots: u32) {
        if self.phase == Phase::Closing || self.phase == Phase::Closed {
            return;
        }
        let slots = slots.min(self.config.slots_max);
        self.queues.iter_mut().for_each(|queue| queue.connect(slots));
        self.note_progress(now);
        self.become_phase(Phase::Open);
    }

    /// A unit is registered here, or can't be.
    pub fn on_registered(
        &mut self,
        now: Instant,
        unit: UnitIndex,
        result: Result<LocalKey, String>,
    ) {
        if !matches!(self.phase, Phase::Open | Phase::Draining) {
            return;
        }
        match result {
            Ok(key) => {
                if self.units.on_local(unit, key) {
                    self.release(unit);
                }
            }
            Err(reason) => self.fail(now, Failure::Host { what: "register guest memory", reason }),
        }
    }

    /// A unit is deregistered here.
    pub fn on_deregistered(&mut self, unit: UnitIndex) {
        if matches!(self.phase, Phase::Open | Phase::Draining) {
            self.units.on_local_gone(unit, &self.layout);
        }
    }

    /// A request of a queue pair ended. Call it for every completion, in order.
    pub fn on_completion(&mut self, now: Instant, queue: QueueIndex, completion: WorkCompletion) {
        if matches!(self.phase, Phase::Closed | Phase::Finished) {
            return;
        }
        let WorkCompletion { sequence, status } = completion;
        let known = self.queues.get(usize::from(queue.0)).and_then(|q| q.find(sequence));
        let Some(posted) = known else {
            return self.fail(now, Failure::Completion { queue, sequence });
        };
        match status {
            WorkStatus::SUCCESS => {
                self.note_progress(now);
                let place = usize::from(queue.0);
                while let Some(posted) = self.queues[place].retire_until(sequence) {
                    if let Posted::Write(message) = posted {
                        self.units.on_retired(message.unit, &self.layout);
                    }
                }
                self.end_drain();
            }
            WorkStatus::FLUSHED => self.fail(now, Failure::Flushed(queue)),
            status => {
                let pages = match posted {
                    Posted::Write(message) => Some(message.pages),
                    Posted::Marker => None,
                };
                self.fail(now, Failure::Work { queue, sequence, status, pages });
            }
        }
    }

    /// Ends it from this side: the owner's wish, or a queue pair is down. Pass on its completions
    /// first. In the last round that is how the end looks where it is heard of before the
    /// destination's word.
    pub fn give_up(&mut self, now: Instant, reason: impl Into<String>) {
        self.fail(now, Failure::GivenUp(reason.into()));
    }

    /// The connection of the messages is lost: the destination can't say any more that it closed.
    pub fn on_control_lost(&mut self, now: Instant, reason: impl Into<String>) {
        self.fail(now, Failure::Closed(reason.into()));
        if let Some(closing) = &mut self.closing {
            closing.deadline = now;
        }
    }

    /// All queue pairs of this side are closed and all their completions were passed on.
    pub fn on_queues_closed(&mut self) {
        if let Some(closing) = &mut self.closing {
            closing.queues_closed = true;
        }
        self.check_closing();
    }

    /// Ends a round: everything taken so far goes out, a marker behind it on each queue pair, and
    /// when all of that is done [`SourceAction::Drained`] says so, or, behind the `last` round,
    /// [`SourceAction::Finished`].
    ///
    /// # Panics
    /// If the source is not open.
    pub fn end_round(&mut self, last: bool) {
        let round = self.next_round;
        self.next_round += 1;
        self.queues.iter_mut().for_each(|queue| queue.markers.push_back(round));
        self.begin_drain(Drain::Round { round, last });
    }

    /// Ends an epoch within a round, so that the cursor may go anywhere: for an urgent page of
    /// postcopy, for a block list that changed. [`SourceAction::Drained`] says when.
    ///
    /// # Panics
    /// If the source is not open.
    pub fn jump(&mut self) {
        self.begin_drain(Drain::Jump);
    }

    /// Pages that were taken and of which nobody can say that they arrived: all that was not
    /// retired. They must be sent again, so they are dirty. Each is reported once.
    pub fn unretired(&self) -> impl Iterator<Item = PageSpan> {
        let queued = self.queues.iter().flat_map(Queue::unretired);
        let parked = self.units.parked().map(|message| message.pages);
        queued.chain(parked).chain(self.zeros.unretired())
    }

    fn begin_drain(&mut self, why: Drain) {
        assert_eq!(self.phase, Phase::Open, "an epoch ends twice");
        self.draining = Some(Draining { why, end_due: matches!(why, Drain::Round { .. }) });
        self.counters.drains += 1;
        self.become_phase(Phase::Draining);
        self.end_drain();
    }

    /// The message that ends a round, once nothing of the round is left to be told.
    fn take_round_end(&mut self) -> Option<RdmaMessage> {
        let zero_lists = self.zeros.sent();
        let draining = self.draining.as_mut()?;
        let Drain::Round { round, last } = draining.why else { return None };
        if !draining.end_due || !self.zeros.is_gathered_empty() {
            return None;
        }
        draining.end_due = false;
        self.end_drain();
        Some(RdmaMessage::RoundEnd(RoundEnd { round, last, zero_lists }))
    }

    /// Ends the drain if nothing is in flight any more.
    fn end_drain(&mut self) {
        let Some(draining) = self.draining else { return };
        if self.phase != Phase::Draining || draining.end_due {
            return;
        }
        let written = self.queues.iter().all(Queue::is_settled);
        let zeroed = self.zeros.is_settled();
        let last = matches!(draining.why, Drain::Round { last: true, .. });
        if !(written && zeroed) {
            return;
        }
        self.draining = None;
        (self.cursor, self.ahead, self.ahead_ended) = ((RegionIndex(0), 0), None, false);
        self.asked_ahead.clear();
        if last {
            self.become_phase(Phase::Finished);
            self.actions.push_back(SourceAction::Finished);
        } else {
            self.become_phase(Phase::Open);
            self.actions.push_back(SourceAction::Drained(draining.why));
        }
    }

    fn on_accept(&mut self, terms: &Terms) -> Result<(), Failure> {
        let changed = |what| Err(PeerFault::Terms(what).into());
        if terms.chunk_bytes != self.config.chunk_bytes {
            return changed("the chunk's length");
        }
        if terms.unit_chunks != self.config.unit_chunks {
            return changed("the chunks of a unit");
        }
        if terms.queues > self.config.queues {
            return changed("the number of queue pairs");
        }
        if terms.pinning == Pinning::All && self.config.pinning == Pinning::Dynamic {
            return changed("the pinning");
        }
        let least = 2 * self.layout.unit_bytes();
        if terms.pinned_bytes_max < least {
            return changed("the budget, below two units");
        }
        self.config.pinning = terms.pinning;
        let budget = match terms.pinning {
            Pinning::All if terms.pinned_bytes_max < self.layout.bytes() => {
                return changed("the budget, below all memory");
            }
            Pinning::All => u64::MAX,
            Pinning::Dynamic => terms.pinned_bytes_max.min(self.config.pinned_bytes_max).max(least),
        };
        self.units = Units::new(&self.layout, budget, self.config.registrations_max);
        self.queues.truncate(usize::from(terms.queues));
        self.config.queues = terms.queues;
        self.become_phase(Phase::Connecting);
        self.actions.push_back(SourceAction::Connect(*terms));
        Ok(())
    }

    fn on_grant(&mut self, grant: &Grant) -> Result<(), Failure> {
        let unit = self.layout.from_wire(&grant.span)?;
        let bytes = self.layout.unit_pages_of(unit).bytes();
        grant.address.checked_add(bytes).ok_or(PeerFault::Address(grant.span))?;
        let registered = Registered { address: grant.address, key: RemoteKey(grant.key) };
        if self.units.on_remote(unit, registered, &grant.span)? {
            self.release(unit);
        }
        Ok(())
    }

    /// The destination says that nothing more can land.
    fn on_revoked(&mut self, rounds: u32) -> Result<(), Failure> {
        let last = match (self.draining, &mut self.closing) {
            (_, Some(closing)) => {
                closing.revoked = Some(rounds);
                self.check_closing();
                return Ok(());
            }
            (Some(Draining { why: Drain::Round { round, last: true }, end_due: false }), None) => {
                round
            }
            (_, None) => {
                let kind = RdmaMessage::Revoked { rounds }.kind();
                return Err(PeerFault::Place { kind, phase: format!("{:?}", self.phase) }.into());
            }
        };
        // It closed its queue pairs behind the last marker; the acknowledgement of that marker may
        // never come, and need not.
        if rounds != last + 1 {
            let (found, expected) = (u64::from(rounds), u64::from(last) + 1);
            return Err(PeerFault::Sequence { what: "arrived rounds", found, expected }.into());
        }
        self.become_phase(Phase::Finished);
        self.actions.push_back(SourceAction::Finished);
        Ok(())
    }

    fn fail(&mut self, now: Instant, failure: Failure) {
        match self.phase {
            Phase::Closed | Phase::Finished => return,
            Phase::Closing => {
                // A flush was first, but what it came from is the cause.
                let known = matches!(self.cause, Some(Failure::Flushed(_)));
                if known && matches!(failure, Failure::Work { .. }) {
                    self.cause = Some(failure);
                }
                return;
            }
            Phase::Offered | Phase::Connecting | Phase::Open | Phase::Draining => {}
        }
        let last_round = match self.draining {
            Some(Draining { why: Drain::Round { round, last: true }, .. }) => Some(round),
            _ => None,
        };
        self.become_phase(Phase::Closing);
        let reason = failure.to_string();
        self.cause = Some(failure);
        self.closing = Some(Closing {
            deadline: now.after(HEARTBEAT_DEADLINE),
            queues_closed: false,
            revoked: None,
            last_round,
        });
        self.actions.push_back(SourceAction::CloseQueues);
        self.actions.push_back(SourceAction::Send(RdmaMessage::Close { reason }));
    }

    fn check_closing(&mut self) {
        let Some(closing) = self.closing else { return };
        if self.phase == Phase::Closing && closing.queues_closed && closing.revoked.is_some() {
            self.end_closing(true);
        }
    }

    fn end_closing(&mut self, revoked: bool) {
        let Some(closing) = self.closing else { return };
        let arrived = closing.last_round.zip(closing.revoked).is_some_and(|(last, n)| n > last);
        if arrived {
            // The failure was only the loss of an acknowledgement.
            self.cause = None;
            self.become_phase(Phase::Finished);
            self.actions.push_back(SourceAction::Finished);
        } else {
            self.become_phase(Phase::Closed);
            self.actions.push_back(SourceAction::Closed { revoked });
        }
    }

    fn become_phase(&mut self, next: Phase) {
        assert!(self.phase.may_become(next), "{:?} > {next:?}", self.phase);
        self.phase = next;
    }

    /// Whether something is in flight, or the destination owes an answer.
    fn is_waiting(&self) -> bool {
        let waits = |queue: &Queue| queue.in_flight() > 0 || queue.parked > 0;
        self.phase == Phase::Offered || self.queues.iter().any(waits) || !self.zeros.is_settled()
    }

    fn note_progress(&mut self, now: Instant) {
        self.last_progress = self.last_progress.max(now);
    }
}

#[cfg(test)]
mod tests;
