//! The side that gives the guest away.

mod state;
mod table;
#[cfg(test)]
mod tests;
mod types;

pub use types::{Decision, SourceAction, SourceConfig, SourceEvent, SourceOutcome, SourcePhase};

use crate::clock::Pinger;
use crate::failure::Failure;
use crate::limits;
use crate::reaction::Reaction;
use core::time::Duration;
use martlet_units::{ClockOffset, Instant};
use martlet_wire::control::{Control, Rehearsed, SetupDone};
use state::{Right, State};
use std::collections::VecDeque;
use table::Kind;

/// One attempt to give a guest away. See the crate's documentation for how to drive it.
#[derive(Debug)]
pub struct Source {
    config: SourceConfig,
    state: State,
    right: Right,
    actions: VecDeque<SourceAction>,
    pinger: Pinger,
    /// When the phase, or the part of it that waits for the peer, has taken too long.
    deadline: Option<(Instant, Duration)>,
    control_open: bool,
    peer: Option<SetupDone>,
    rehearsed: Option<Rehearsed>,
    /// A stop was called off: no round begins before the answer to the ping of that moment. Rounds
    /// could overtake the message about it else.
    awaited_pong: Option<u64>,
    /// The next step panics once it has done everything.
    #[cfg(test)]
    panics_next: bool,
}

/// What makes the machine move.
#[derive(Debug)]
enum Input {
    Event(SourceEvent),
    /// [`SourceEvent::Paused`], whose permit is held already.
    Paused,
    Silence,
    Deadline {
        limit: Duration,
    },
}

impl Source {
    /// Starts an attempt on a control connection that was just accepted.
    pub fn new(now: Instant, config: SourceConfig) -> Source {
        let setup = Control::Setup(config.setup.clone());
        let mut source = Source {
            config,
            state: State::SettingUp,
            right: Right::NotHere,
            actions: VecDeque::from([SourceAction::Send(setup)]),
            pinger: Pinger::new(now),
            deadline: None,
            control_open: true,
            peer: None,
            rehearsed: None,
            awaited_pong: None,
            #[cfg(test)]
            panics_next: false,
        };
        source.deadline = source.phase_deadline(now, SourcePhase::SettingUp);
        source.ping(now);
        source
    }

    /// Tells what happened.
    pub fn on_event(&mut self, now: Instant, event: SourceEvent) {
        let mut kind = Kind::of(&event);
        match &event {
            SourceEvent::Received(message) => {
                self.pinger.silence().heard(now);
                if let Control::Pong(pong) = message {
                    self.awaited_pong.take_if(|asked| pong.sent_ns >= *asked);
                    if !self.pinger.on_pong(now, *pong) {
                        kind = Kind::GotUnaskedPong;
                    }
                }
            }
            SourceEvent::ControlLost { .. } => self.control_open = false,
            _ => {}
        }
        let is_deaf = matches!(event, SourceEvent::Malformed { .. });
        self.advance(now, kind, Input::Event(event));
        // The peer was told, if there was something to tell.
        self.control_open &= !is_deaf;
    }

    /// Looks at the clock. Harmless when called too early or too often.
    pub fn on_timeout(&mut self, now: Instant) {
        if let Some((_, limit)) = self.deadline.take_if(|(at, _)| *at <= now) {
            self.advance(now, Kind::Deadline, Input::Deadline { limit });
        }
        if self.ends_by_silence() && self.pinger.silent_at() <= now {
            self.advance(now, Kind::Silence, Input::Silence);
        }
        if self.pings() && self.pinger.next_ping() <= now {
            let interval = match self.phase() {
                SourcePhase::Switching => limits::STOPPED_PING_INTERVAL,
                _ => limits::PING_INTERVAL,
            };
            self.ping_if_room(now, interval);
        }
    }

    /// The next thing to do; `None` when there is nothing left to do before the next event.
    pub fn poll_action(&mut self) -> Option<SourceAction> {
        self.actions.pop_front()
    }

    /// When to call [`Source::on_timeout`]; `None` if nothing is waited for.
    pub fn poll_timeout(&self) -> Option<Instant> {
        let deadline = self.deadline.map(|(at, _)| at);
        let silence = self.ends_by_silence().then(|| self.pinger.silent_at());
        let ping = self.pings().then(|| self.pinger.next_ping());
        [deadline, silence, ping].into_iter().flatten().min()
    }

    /// Where the attempt stands.
    pub fn phase(&self) -> SourcePhase {
        self.state.phase()
    }

    /// What the destination said of itself, once it has.
    pub fn peer(&self) -> Option<&SetupDone> {
        self.peer.as_ref()
    }

    /// How long the destination took for the latest rehearsal. Known from the first
    /// [`SourceAction::Decide`] on.
    pub fn rehearsed(&self) -> Option<Rehearsed> {
        self.rehearsed
    }

    /// A round trip on the control connection: the shortest of the last few. Known from the first
    /// [`SourceAction::Decide`] on.
    pub fn round_trip(&self) -> Option<Duration> {
        self.pinger.round_trip()
    }

    /// How the destination's clock differs. Known from the first [`SourceAction::Decide`] on. It is
    /// one clock only if both sides have the same key and the pings agree: a host that was cloned
    /// or resumed from a snapshot has its twin's.
    pub fn clock(&self, now: Instant) -> Option<ClockOffset> {
        let measured = self.pinger.offset(now)?;
        let agrees = u128::from(measured.ns.unsigned_abs()) <= measured.error.as_nanos();
        Some(if self.keys_agree() && agrees { ClockOffset::ONE_CLOCK } else { measured })
    }

    /// Whether the destination has shown that it has the same clock.
    fn keys_agree(&self) -> bool {
        let here = self.config.clock_key.map(|key| key.proof(self.config.setup.migration));
        here.is_some() && self.peer.is_some_and(|peer| peer.clock_proof == here)
    }

    /// Whether the destination takes it that a stop is called off. Older ones give up then.
    pub fn may_call_off(&self) -> bool {
        self.peer.is_some_and(|peer| peer.takes_call_off == Some(true))
    }

    /// Changes the blackout that the owner accepts. Counts for a switchover not yet begun.
    pub fn set_downtime_limit(&mut self, limit: Duration) {
        self.config.downtime_limit = limit;
    }

    /// The one place where the state changes, as the table allows it.
    fn advance(&mut self, now: Instant, kind: Kind, input: Input) {
        let from = self.phase();
        let input = self.hold(now, input);
        // The state stays until the next one is known: whoever catches a panic finds the machine as
        // it was, and the permit with it.
        let state = self.state.clone();
        let (next, allowed): (State, &[SourcePhase]) = match table::reaction(from, kind) {
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
        #[cfg(test)]
        assert!(!core::mem::take(&mut self.panics_next), "a test wants it");
        let to = next.phase();
        let planned = to == from || to == table::fallback(from) || allowed.contains(&to);
        self.state = next;
        assert!(planned, "{kind:?} led from {from:?} to {to:?}");
        if to != from {
            self.deadline = self.phase_deadline(now, to);
        }
    }

    /// Takes the permit that an input brings, if the guest may still be here and has no other.
    fn hold(&mut self, now: Instant, input: Input) -> Input {
        let Input::Event(SourceEvent::Paused { permit, running }) = input else { return input };
        let has_left = matches!(
            self.phase(),
            SourcePhase::Confirming | SourcePhase::Completed | SourcePhase::GivenUp
        );
        if matches!(self.right, Right::NotHere) && !has_left {
            self.right = Right::Held { permit, running, since: now };
        }
        Input::Paused
    }

    /// How long a phase may take from its beginning. Some set a deadline on their way instead.
    fn phase_deadline(&self, now: Instant, phase: SourcePhase) -> Option<(Instant, Duration)> {
        let limit = match phase {
            SourcePhase::SettingUp => limits::SETUP_MAX,
            SourcePhase::Connecting => limits::CHANNELS_WAIT_MAX,
            SourcePhase::Switching => limits::blackout_max(self.config.downtime_limit),
            SourcePhase::Comparing => limits::DIGEST_MAX,
            SourcePhase::Confirming => limits::ALIVE_MAX,
            SourcePhase::Sending
            | SourcePhase::Rehearsing
            | SourcePhase::Deciding
            | SourcePhase::Pausing
            | SourcePhase::Undecided
            | SourcePhase::Withdrawing
            | SourcePhase::Completed
            | SourcePhase::Failed
            | SourcePhase::Cancelled
            | SourcePhase::GivenUp => return None,
            // Its deadline depends on what the commit says.
            SourcePhase::Committing => return self.deadline,
        };
        Some((now.after(limit), limit))
    }

    /// From now on the peer has this long.
    fn expect_within(&mut self, now: Instant, limit: Duration) {
        self.deadline = Some((now.after(limit), limit));
    }

    /// Whether the destination is to be pinged: as long as it may yet abandon.
    fn pings(&self) -> bool {
        let phase = self.phase();
        self.control_open
            && match phase {
                SourcePhase::SettingUp
                | SourcePhase::Connecting
                | SourcePhase::Sending
                | SourcePhase::Rehearsing
                | SourcePhase::Deciding
                | SourcePhase::Pausing
                | SourcePhase::Switching
                | SourcePhase::Comparing => true,
                SourcePhase::Committing
                | SourcePhase::Undecided
                | SourcePhase::Withdrawing
                | SourcePhase::Confirming
                | SourcePhase::Completed
                | SourcePhase::Failed
                | SourcePhase::Cancelled
                | SourcePhase::GivenUp => false,
            }
    }

    /// Whether silence means a lost peer. While the destination builds the machine its memory may
    /// be so scarce that nothing of it gets to run; that phase has a deadline of its own.
    fn ends_by_silence(&self) -> bool {
        self.pings() && self.phase() != SourcePhase::SettingUp
    }

    /// The regular one. A destination that owes many answers is not asked for more.
    fn ping_if_room(&mut self, now: Instant, interval: Duration) {
        if self.pinger.has_room() {
            self.ping(now);
        }
        self.pinger.ping_again_after(now, interval);
    }

    /// Whether the destination was heard so lately that it can be taken to be there.
    fn is_heard(&self, now: Instant) -> bool {
        let trips = self.round_trip().unwrap_or_default() * limits::UNHEARD_ROUND_TRIPS;
        now.since(self.pinger.heard_at()) <= limits::UNHEARD_MAX.max(trips)
    }

    fn ping(&mut self, now: Instant) {
        let ping = self.pinger.ping(now);
        self.send(Control::Ping(ping));
    }

    fn send(&mut self, message: Control) {
        self.actions.push_back(SourceAction::Send(message));
    }
}
