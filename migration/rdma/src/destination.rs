//! The destination's machine: keys, zero lists, markers, revocation.

use super::failure::{Failure, PeerFault};
use super::heartbeat::{HEARTBEAT_DEADLINE, Heartbeat};
use super::layout::{Layout, LayoutError, PageSpan, UnitIndex};
use super::phase::DestinationPhase as Phase;
use super::work::{QueueIndex, Registered};
use super::zero::ZERO_LISTS_MAX;
use martlet_units::Instant;
use martlet_wire::rdma::{
    Grant, Pinning, RdmaMessage, RoundEnd, SPANS_MAX, Terms, WireSpan, ZeroList,
};
use std::collections::VecDeque;

/// What a destination agrees to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DestinationConfig {
    /// Most queue pairs.
    pub queues_max: u16,
    /// Most memory that is registered at once; a source that wants everything pinned gets it only
    /// if everything fits.
    pub pinned_bytes_max: u64,
}

impl DestinationConfig {
    /// Up to 8 queue pairs, no limit of memory.
    pub const DEFAULT: DestinationConfig =
        DestinationConfig { queues_max: 8, pinned_bytes_max: u64::MAX };
}

/// What the owner of a destination has to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DestinationAction {
    /// Send this to the source, in order.
    Send(RdmaMessage),
    /// Terms are agreed: let these queue pairs in, each with the receives for its markers posted.
    /// They must be the only ones that can use the memory that will be registered: a protection
    /// domain of their own.
    Accepted(Terms),
    /// Register these pages for the peer's writes, in the background and as many at once as there
    /// are threads for; then say [`Destination::on_registered`]. From now on, and for as long as
    /// it is registered, no page of it may be given back to the host (no hole punched): writes
    /// would go to the page that was there before.
    Register {
        /// Which unit.
        unit: UnitIndex,
        /// Its pages.
        pages: PageSpan,
    },
    /// Deregister a unit, in the background; then say [`Destination::on_deregistered`].
    Deregister {
        /// Which unit.
        unit: UnitIndex,
    },
    /// Make these pages zero, by writing zeros, then say [`Destination::on_zeroed`].
    Zero {
        /// Of the list.
        sequence: u64,
        /// Which pages.
        ranges: Vec<PageSpan>,
    },
    /// Post a receive for the next marker.
    PostReceive(QueueIndex),
    /// All of a round is in memory. For the last one: and no queue pair is left, so the guest may
    /// run.
    RoundArrived {
        /// Which round.
        round: u32,
        /// Nothing follows.
        last: bool,
    },
    /// Close all queue pairs and stop listening for more: that makes every key worthless at once.
    /// Then say [`Destination::on_queues_closed`].
    CloseQueues,
    /// No queue pair is left, nothing can land any more, and RDMA ended early by
    /// [`Destination::cause`].
    Closed,
}

/// How a unit stands here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Registration {
    Absent,
    Registering,
    Registered,
    Deregistering,
}

/// Receives for markers that each queue pair needs: the next round's can come before the program
/// has looked at this round's.
pub const MARKER_RECEIVES: u32 = 4;

/// The destination's half of RDMA. Everything a source says is checked before anything is done.
///
/// Revocation is by closing the queue pairs, not by deregistering: a key works only on a queue
/// pair of its protection domain, closing one takes microseconds, and deregistering takes some
/// milliseconds a GiB, which the guest would stand still for. The registrations are taken back
/// afterwards, in the background.
#[derive(Debug)]
pub struct Destination {
    regions: Box<[u64]>,
    config: DestinationConfig,
    phase: Phase,
    layout: Option<Layout>,
    units: Vec<Registration>,
    agreed_bytes: u64,
    pinned_bytes: u64,
    grants: VecDeque<Grant>,
    given_back: VecDeque<WireSpan>,
    refusals: VecDeque<WireSpan>,
    /// Rounds of which each queue pair has brought the marker.
    markers: Vec<u32>,
    rounds_arrived: u32,
    round_end: Option<RoundEnd>,
    zero_received: u64,
    zero_done: u64,
    zero_told: u64,
    queues_closed: bool,
    /// Why the first unit was refused; the source will end it for that.
    refused: Option<Failure>,
    cause: Option<Failure>,
    heartbeat: Heartbeat,
    actions: VecDeque<DestinationAction>,
}

impl Destination {
    /// A destination that waits for an offer. `regions` are the lengths of guest memory in pages,
    /// as `Setup` announced them.
    pub fn new(regions: &[u64], config: DestinationConfig, now: Instant) -> Destination {
        Destination {
            regions: regions.into(),
            config,
            phase: Phase::Waiting,
            layout: None,
            units: Vec::new(),
            agreed_bytes: 0,
            pinned_bytes: 0,
            grants: VecDeque::new(),
            given_back: VecDeque::new(),
            refusals: VecDeque::new(),
            markers: Vec::new(),
            rounds_arrived: 0,
            round_end: None,
            zero_received: 0,
            zero_done: 0,
            zero_told: 0,
            queues_closed: false,
            refused: None,
            cause: None,
            heartbeat: Heartbeat::new(now),
            actions: VecDeque::new(),
        }
    }

    /// Why RDMA ended, if it did so early.
    pub fn cause(&self) -> Option<&Failure> {
        self.cause.as_ref()
    }

    /// Bytes that are registered or on their way.
    pub fn pinned_bytes(&self) -> u64 {
        self.pinned_bytes
    }

    /// What to do next. Grants and the like are gathered until this is called, so that many share
    /// a message.
    pub fn poll_action(&mut self) -> Option<DestinationAction> {
        if let Some(action) = self.actions.pop_front() {
            return Some(action);
        }
        if self.phase != Phase::Open {
            return None;
        }
        let message = if !self.grants.is_empty() {
            RdmaMessage::KeyGrant(batch(&mut self.grants))
        } else if !self.refusals.is_empty() {
            RdmaMessage::KeyRefusal(batch(&mut self.refusals))
        } else if !self.given_back.is_empty() {
            RdmaMessage::KeyDropped(batch(&mut self.given_back))
        } else if self.zero_told < self.zero_done {
            self.zero_told = self.zero_done;
            RdmaMessage::ZeroDone { sequence: self.zero_done }
        } else {
            return None;
        };
        Some(DestinationAction::Send(message))
    }

    /// When [`Destination::on_timeout`] is due.
    pub fn poll_timeout(&self) -> Option<Instant> {
        matches!(self.phase, Phase::Waiting | Phase::Open).then(|| self.heartbeat.timeout())
    }

    /// The time has come, or passed.
    pub fn on_timeout(&mut self, now: Instant) {
        if !matches!(self.phase, Phase::Waiting | Phase::Open) {
            return;
        }
        if let Some(silent) = self.heartbeat.is_lost(now) {
            debug_assert!(silent >= HEARTBEAT_DEADLINE);
            return self.fail(Failure::Silent(silent.as_millis()));
        }
        if self.heartbeat.is_due(now) {
            let beat = RdmaMessage::Heartbeat { sent_ns: now.0 };
            self.actions.push_back(DestinationAction::Send(beat));
        }
    }

    /// A message came from the source.
    pub fn on_message(&mut self, now: Instant, message: &RdmaMessage) {
        self.heartbeat.on_message(now);
        if matches!(self.phase, Phase::Closing | Phase::Revoked) {
            return;
        }
        let done = match (message, self.phase) {
            (RdmaMessage::Heartbeat { .. }, _) => Ok(()),
            (RdmaMessage::Close { reason }, _) => Err(Failure::Closed(reason.clone())),
            (RdmaMessage::Offer(terms), Phase::Waiting) => self.on_offer(terms),
            (RdmaMessage::KeyRequest(spans), Phase::Open) => {
                spans.iter().try_for_each(|span| self.on_key_request(span)).map_err(Failure::Peer)
            }
            (RdmaMessage::KeyDrop(spans), Phase::Open) => {
                spans.iter().try_for_each(|span| self.on_key_drop(span)).map_err(Failure::Peer)
            }
            (RdmaMessage::ZeroList(list), Phase::Open) => {
                self.on_zero_list(list).map_err(Failure::Peer)
            }
            (RdmaMessage::RoundEnd(end), Phase::Open) => {
                self.on_round_end(*end).map_err(Failure::Peer)
            }
            (message, phase) => {
                Err(PeerFault::Place { kind: message.kind(), phase: format!("{phase:?}") }.into())
            }
        };
        match done {
            Ok(()) => self.end_round(),
            Err(failure) => self.fail(failure),
        }
    }

    /// A unit is registered for the peer's writes, or can't be.
    pub fn on_registered(&mut self, unit: UnitIndex, result: Result<Registered, String>) {
        let span = self.wire_span(unit);
        match result {
            Ok(registered) => {
                self.become_unit(unit, Registration::Registering, Registration::Registered);
                if self.phase == Phase::Revoked {
                    // It was under way when everything ended.
                    self.take_back(unit);
                    return;
                }
                let (address, key) = (registered.address, registered.key.0);
                self.grants.push_back(Grant { span, address, key });
            }
            Err(reason) => {
                let what = "register guest memory";
                self.refused = self.refused.take().or(Some(Failure::Host { what, reason }));
                self.become_unit(unit, Registration::Registering, Registration::Absent);
                self.unpin(unit);
                self.refusals.push_back(span);
            }
        }
    }

    /// A unit is deregistered.
    pub fn on_deregistered(&mut self, unit: UnitIndex) {
        self.become_unit(unit, Registration::Deregistering, Registration::Absent);
        self.unpin(unit);
        let span = self.wire_span(unit);
        self.given_back.push_back(span);
    }

    /// A marker came: a receive of this queue pair completed with this immediate data.
    pub fn on_marker(&mut self, queue: QueueIndex, round: u32) {
        if self.phase != Phase::Open {
            return;
        }
        let Some(seen) = self.markers.get_mut(usize::from(queue.0)) else {
            return self.fail(PeerFault::Queue(queue.0).into());
        };
        // A source ends no round before the one before it has drained, so a queue pair is never
        // more than one marker ahead of the slowest.
        if round != *seen || *seen > self.rounds_arrived {
            let (found, expected) = (u64::from(round), u64::from(self.rounds_arrived));
            return self.fail(PeerFault::Sequence { what: "marker", found, expected }.into());
        }
        *seen += 1;
        self.actions.push_back(DestinationAction::PostReceive(queue));
        self.end_round();
    }

    /// A zero list is executed; lists are executed in order.
    ///
    /// # Panics
    /// If it is not the next one.
    pub fn on_zeroed(&mut self, sequence: u64) {
        assert_eq!(sequence, self.zero_done + 1, "zero lists out of order");
        self.zero_done = sequence;
        self.end_round();
        self.end_closing();
    }

    /// The connection of the messages is lost.
    pub fn on_control_lost(&mut self, reason: impl Into<String>) {
        self.fail(Failure::Closed(reason.into()));
    }

    /// Ends it from this side: the owner's wish, or a queue pair is down. Pass on its completions
    /// first: a source that has finished drops its queue pairs, and the last marker may still wait
    /// to be polled.
    pub fn give_up(&mut self, reason: impl Into<String>) {
        self.fail(Failure::GivenUp(reason.into()));
    }

    /// All queue pairs are closed, and the listener: no key is of use to anybody.
    pub fn on_queues_closed(&mut self) {
        self.queues_closed = true;
        self.end_closing();
    }

    /// Says that nothing can land any more, once that is so. A zero list that is still being
    /// executed would land as well as a write: pages that came another way meanwhile would be lost.
    fn end_closing(&mut self) {
        let zeroed = self.zero_done == self.zero_received;
        if self.phase != Phase::Closing || !self.queues_closed || !zeroed {
            return;
        }
        self.become_phase(Phase::Revoked);
        let rounds = self.rounds_arrived;
        let done = match self.round_end {
            Some(RoundEnd { round, last, .. }) if self.cause.is_none() => {
                DestinationAction::RoundArrived { round, last }
            }
            _ => DestinationAction::Closed,
        };
        // The guest first, then the source, then the registrations.
        self.actions.push_back(done);
        self.actions.push_back(DestinationAction::Send(RdmaMessage::Revoked { rounds }));
        let registered = |unit: &UnitIndex| self.units[unit.place()] == Registration::Registered;
        let units = self.layout.iter().flat_map(Layout::all_units);
        let registered: Vec<UnitIndex> = units.filter(registered).collect();
        registered.into_iter().for_each(|unit| self.take_back(unit));
    }

    fn on_offer(&mut self, terms: &Terms) -> Result<(), Failure> {
        let impossible = |error: LayoutError| Failure::Host {
            what: "work by the source's RDMA terms",
            reason: error.to_string(),
        };
        let layout = Layout::new(&self.regions, terms.chunk_bytes, terms.unit_chunks);
        let layout = layout.map_err(impossible)?;
        let least = 2 * layout.unit_bytes();
        let mine = self.config.pinned_bytes_max.max(least);
        let pinning = if layout.bytes() <= mine { terms.pinning } else { Pinning::Dynamic };
        let pinned_bytes_max = match pinning {
            Pinning::All => mine,
            Pinning::Dynamic => terms.pinned_bytes_max.max(least).min(mine),
        };
        let queues = terms.queues.min(self.config.queues_max).max(1);
        let granted = Terms { queues, pinning, pinned_bytes_max, ..*terms };
        self.units = vec![Registration::Absent; layout.units() as usize];
        self.markers = vec![0; usize::from(queues)];
        self.agreed_bytes = pinned_bytes_max;
        self.layout = Some(layout);
        self.become_phase(Phase::Open);
        self.actions.push_back(DestinationAction::Accepted(granted));
        self.actions.push_back(DestinationAction::Send(RdmaMessage::Accept(granted)));
        Ok(())
    }

    fn on_key_request(&mut self, span: &WireSpan) -> Result<(), PeerFault> {
        let layout = self.layout.as_ref().expect("open");
        let unit = layout.from_wire(span)?;
        if self.units[unit.place()] != Registration::Absent {
            return Err(PeerFault::Key(*span, "asked for twice"));
        }
        let pages = layout.unit_pages_of(unit);
        let wanted = self.pinned_bytes + pages.bytes();
        if wanted > self.agreed_bytes {
            return Err(PeerFault::Budget { wanted, agreed: self.agreed_bytes });
        }
        self.pinned_bytes = wanted;
        self.units[unit.place()] = Registration::Registering;
        self.actions.push_back(DestinationAction::Register { unit, pages });
        Ok(())
    }

    fn on_key_drop(&mut self, span: &WireSpan) -> Result<(), PeerFault> {
        let unit = self.layout.as_ref().expect("open").from_wire(span)?;
        // One that is granted but not yet told of can't be given back either.
        let told = !self.grants.iter().any(|grant| grant.span == *span);
        if self.units[unit.place()] != Registration::Registered || !told {
            return Err(PeerFault::Key(*span, "given back, but not granted"));
        }
        self.take_back(unit);
        Ok(())
    }

    fn on_zero_list(&mut self, list: &ZeroList) -> Result<(), PeerFault> {
        let layout = self.layout.as_ref().expect("open");
        let expected = self.zero_received + 1;
        if list.sequence != expected {
            let what = "zero list";
            return Err(PeerFault::Sequence { what, found: list.sequence, expected });
        }
        // Told, not done: the source counts what it was told.
        let waiting = usize::try_from(list.sequence - self.zero_told).unwrap_or(usize::MAX);
        if waiting > ZERO_LISTS_MAX {
            return Err(PeerFault::ZeroLists(waiting));
        }
        let ranges = list.ranges.iter().map(|range| layout.range_from_wire(range));
        let ranges = ranges.collect::<Result<_, _>>()?;
        self.zero_received = list.sequence;
        self.actions.push_back(DestinationAction::Zero { sequence: list.sequence, ranges });
        Ok(())
    }

    fn on_round_end(&mut self, end: RoundEnd) -> Result<(), PeerFault> {
        if end.round != self.rounds_arrived || self.round_end.is_some() {
            let (found, expected) = (u64::from(end.round), u64::from(self.rounds_arrived));
            return Err(PeerFault::Sequence { what: "round's end", found, expected });
        }
        if end.zero_lists != self.zero_received {
            let (found, expected) = (end.zero_lists, self.zero_received);
            return Err(PeerFault::Sequence { what: "count of zero lists", found, expected });
        }
        self.round_end = Some(end);
        Ok(())
    }

    /// Ends the round if all of it is in memory.
    fn end_round(&mut self) {
        let Some(RoundEnd { round, last, zero_lists }) = self.round_end else { return };
        let marked = self.markers.iter().all(|seen| *seen > round);
        if self.phase != Phase::Open || !marked || self.zero_done < zero_lists {
            return;
        }
        self.rounds_arrived += 1;
        if last {
            // The guest must not run while anybody can write its memory.
            self.become_phase(Phase::Closing);
            self.actions.push_back(DestinationAction::CloseQueues);
        } else {
            self.round_end = None;
            self.actions.push_back(DestinationAction::RoundArrived { round, last });
        }
    }

    fn fail(&mut self, failure: Failure) {
        if matches!(self.phase, Phase::Closing | Phase::Revoked) {
            return;
        }
        self.become_phase(Phase::Closing);
        // What the source began needs no answer but the last one.
        if !matches!(failure, Failure::Closed(_)) {
            let reason = failure.to_string();
            self.actions.push_back(DestinationAction::Send(RdmaMessage::Close { reason }));
        }
        self.cause = Some(self.refused.take().unwrap_or(failure));
        self.actions.push_back(DestinationAction::CloseQueues);
    }

    fn take_back(&mut self, unit: UnitIndex) {
        self.become_unit(unit, Registration::Registered, Registration::Deregistering);
        self.actions.push_back(DestinationAction::Deregister { unit });
    }

    fn unpin(&mut self, unit: UnitIndex) {
        let layout = self.layout.as_ref().expect("a unit has a layout");
        self.pinned_bytes -= layout.unit_pages_of(unit).bytes();
    }

    fn wire_span(&self, unit: UnitIndex) -> WireSpan {
        self.layout.as_ref().expect("a unit has a layout").to_wire(unit)
    }

    fn become_unit(&mut self, unit: UnitIndex, from: Registration, to: Registration) {
        let entry = &mut self.units[unit.place()];
        assert_eq!(*entry, from, "{unit:?} can't become {to:?}");
        *entry = to;
    }

    fn become_phase(&mut self, next: Phase) {
        assert!(self.phase.may_become(next), "{:?} > {next:?}", self.phase);
        self.phase = next;
    }
}

/// The first entries of a list, as many as a message may have.
fn batch<T>(list: &mut VecDeque<T>) -> Vec<T> {
    list.drain(..list.len().min(SPANS_MAX)).collect()
}

#[cfg(test)]
#[path = "destination_tests.rs"]
mod tests;
