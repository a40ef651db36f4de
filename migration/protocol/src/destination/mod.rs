//! The side that takes the guest in.

mod state;
mod table;
#[cfg(test)]
mod tests;
mod types;

pub use types::{
    DestinationAction, DestinationConfig, DestinationEvent, DestinationOutcome, DestinationPhase,
};

use crate::clock::Silence;
use crate::failure::Failure;
use crate::ledger::Ledger;
use crate::limits;
use crate::reaction::Reaction;
use core::mem;
use core::time::Duration;
use martlet_units::Instant;
use martlet_wire::control::{Control, Fate, MigrationId, Pong};
use martlet_wire::frame::{Kind as MessageKind, SMALL_BYTES_MAX};
use state::State;
use std::collections::VecDeque;
use table::Kind;

/// One attempt to take a guest in. See the crate's documentation for how to drive it.
#[derive(Debug)]
pub struct Destination {
    config: DestinationConfig,
    ledger: Ledger,
    state: State,
    actions: VecDeque<DestinationAction>,
    silence: Silence,
    /// When the phase, or the part of it that waits for the peer, has taken too long.
    deadline: Option<(Instant, Duration)>,
    control_open: bool,
    /// This attempt, once the source has named it.
    migration: Option<MigrationId>,
    channels: u16,
    /// Rounds received; the number of the next one.
    rounds: u32,
    /// Whether the source has sent the right to run the guest.
    saw_commit: bool,
    /// The right to run the guest was made here: there is no way back.
    has_made_permit: bool,
    /// Those that the source was told of.
    rounds_told: u32,
}

/// What makes the machine move.
#[derive(Debug)]
enum Input {
    Event(DestinationEvent),
    Silence,
    Deadline { limit: Duration },
}

impl Destination {
    /// Starts an attempt on a control connection that was just accepted. `ledger` is what this
    /// process remembers; take it back with [`Destination::into_ledger`].
    pub fn new(now: Instant, config: DestinationConfig, ledger: Ledger) -> Destination {
        let mut destination = Destination {
            config,
            ledger,
            state: State::Waiting,
            actions: VecDeque::new(),
            silence: Silence::new(now),
            deadline: None,
            control_open: true,
            migration: None,
            channels: 0,
            rounds: 0,
            saw_commit: false,
            has_made_permit: false,
            rounds_told: 0,
        };
        destination.deadline = phase_deadline(now, DestinationPhase::Waiting);
        destination
    }

    /// Tells what happened.
    pub fn on_event(&mut self, now: Instant, event: DestinationEvent) {
        let kind = Kind::of(&event);
        match &event {
            DestinationEvent::Received(message) => {
                self.silence.heard(now);
                if let Control::Ping(ping) = message
                    && !self.phase().is_over()
                {
                    self.send(Control::Pong(Pong { sent_ns: ping.sent_ns, answered_ns: now.0 }));
                }
            }
            DestinationEvent::ControlLost { .. } => self.control_open = false,
            _ => {}
        }
        self.advance(now, kind, Input::Event(event));
    }

    /// Whether the body of this message may be read: it has a place where the attempt stands, or is
    /// small, so that the machine itself can say what is wrong with it. Tell
    /// [`DestinationEvent::Refused`] instead of reading another one.
    pub fn admits(&self, message: MessageKind) -> bool {
        let is_small = message.body_bytes_max().is_some_and(|most| most <= SMALL_BYTES_MAX);
        is_small
            || matches!(table::reaction(self.phase(), Kind::of_message(message)), Reaction::Act(_))
    }

    /// Looks at the clock. Harmless when called too early or too often.
    pub fn on_timeout(&mut self, now: Instant) {
        if let Some((_, limit)) = self.deadline.take_if(|(at, _)| *at <= now) {
            self.advance(now, Kind::Deadline, Input::Deadline { limit });
        }
        if self.ends_by_silence() && self.silence.at() <= now {
            self.advance(now, Kind::Silence, Input::Silence);
        }
    }

    /// The next thing to do; `None` when there is nothing left to do before the next event.
    pub fn poll_action(&mut self) -> Option<DestinationAction> {
        self.actions.pop_front()
    }

    /// When to call [`Destination::on_timeout`]; `None` if nothing is waited for.
    pub fn poll_timeout(&self) -> Option<Instant> {
        let deadline = self.deadline.map(|(at, _)| at);
        let silence = self.ends_by_silence().then(|| self.silence.at());
        [deadline, silence].into_iter().flatten().min()
    }

    /// Where the attempt stands.
    pub fn phase(&self) -> DestinationPhase {
        self.state.phase()
    }

    /// This attempt, once the source has named it.
    pub fn migration(&self) -> Option<MigrationId> {
        self.migration
    }

    /// What became of an attempt, this one or an earlier one of this process.
    pub fn fate(&self, migration: MigrationId) -> Fate {
        let under_way = self.migration == Some(migration)
            && match self.phase() {
                DestinationPhase::Waiting
                | DestinationPhase::Building
                | DestinationPhase::Accepting
                | DestinationPhase::Receiving
                | DestinationPhase::Armed
                | DestinationPhase::Committing => true,
                DestinationPhase::Starting
                | DestinationPhase::Running
                | DestinationPhase::Arrived
                | DestinationPhase::Abandoned => false,
            };
        if under_way { Fate::Pending } else { self.ledger.fate(migration) }
    }

    /// Ends the use of this machine and gives the process's memory of attempts back.
    ///
    /// # Panics
    /// If the attempt is not over: its fate would be forgotten.
    pub fn into_ledger(self) -> Ledger {
        assert!(self.phase().is_over(), "the attempt is still {:?}", self.phase());
        self.ledger
    }

    /// Whether the right to run the guest was made here, even if a step panicked since.
    pub fn has_made_permit(&self) -> bool {
        self.has_made_permit
    }

    /// Ends the attempt wherever it stands, even in the middle of a step that panicked, and gives
    /// the process's memory of attempts back. Unless the right to run the guest was made, the
    /// attempt is abandoned for ever.
    pub fn give_up(mut self) -> Ledger {
        if let Some(migration) = self.migration
            && self.ledger.fate(migration) == Fate::Unknown
        {
            if self.has_made_permit {
                self.ledger.record_arrived(migration);
            } else {
                self.ledger.record_abandoned(migration, self.saw_commit);
            }
        }
        self.ledger
    }

    /// The one place where the state changes, as the table allows it.
    fn advance(&mut self, now: Instant, kind: Kind, input: Input) {
        let from = self.phase();
        let state = mem::replace(&mut self.state, State::Between);
        let (next, allowed): (State, &[DestinationPhase]) = match table::reaction(from, kind) {
            Reaction::Ignore => (state, &[]),
            Reaction::Act(allowed) => (self.step(now, state, input), allowed),
            Reaction::PeerFault => {
                let (message, phase) = (kind.label(), from.label());
                (self.fail(state, Failure::Unexpected { message, phase }), &[])
            }
            Reaction::Misuse => {
                let (event, phase) = (kind.label(), from.label());
                (self.fail(state, Failure::Misuse { event, phase }), &[])
            }
        };
        let to = next.phase();
        let planned = to == from || to == table::fallback(from) || allowed.contains(&to);
        assert!(planned, "{kind:?} led from {from:?} to {to:?}");
        self.state = next;
        if to != from {
            // The commit says how long the next phase may take.
            if to != DestinationPhase::Committing {
                self.deadline = phase_deadline(now, to);
            }
            self.record(to);
        }
    }

    /// Puts down what was decided, at the moment it is.
    fn record(&mut self, phase: DestinationPhase) {
        let Some(migration) = self.migration else { return };
        match phase {
            DestinationPhase::Starting => self.ledger.record_arrived(migration),
            DestinationPhase::Abandoned => {
                self.ledger.record_abandoned(migration, self.saw_commit);
            }
            DestinationPhase::Waiting
            | DestinationPhase::Building
            | DestinationPhase::Accepting
            | DestinationPhase::Receiving
            | DestinationPhase::Armed
            | DestinationPhase::Committing
            | DestinationPhase::Running
            | DestinationPhase::Arrived => {}
        }
    }

    /// Whether silence means a lost peer: wherever it pings, and its going away means that this
    /// attempt is over.
    fn ends_by_silence(&self) -> bool {
        match self.phase() {
            DestinationPhase::Accepting | DestinationPhase::Receiving | DestinationPhase::Armed => {
                true
            }
            DestinationPhase::Waiting
            | DestinationPhase::Building
            | DestinationPhase::Committing
            | DestinationPhase::Starting
            | DestinationPhase::Running
            | DestinationPhase::Arrived
            | DestinationPhase::Abandoned => false,
        }
    }

    fn send(&mut self, message: Control) {
        if self.control_open {
            self.actions.push_back(DestinationAction::Send(message));
        }
    }
}

/// How long a phase may take from its beginning.
fn phase_deadline(now: Instant, phase: DestinationPhase) -> Option<(Instant, Duration)> {
    let limit = match phase {
        DestinationPhase::Waiting => limits::SETUP_WAIT_MAX,
        DestinationPhase::Accepting => limits::CHANNELS_WAIT_MAX,
        DestinationPhase::Running => limits::ALIVE_MAX,
        DestinationPhase::Building
        | DestinationPhase::Receiving
        | DestinationPhase::Armed
        | DestinationPhase::Committing
        | DestinationPhase::Starting
        | DestinationPhase::Arrived
        | DestinationPhase::Abandoned => return None,
    };
    Some((now.after(limit), limit))
}
