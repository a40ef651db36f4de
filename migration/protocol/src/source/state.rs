//! The source's states, and what leads from one to the next.

use super::types::{Decision, SourceAction, SourceEvent, SourceOutcome, SourcePhase};
use super::{Input, Source};
use crate::failure::{Failure, UndecidedReason};
use crate::limits;
use crate::permit::{CommittedPermit, OperatorOverride, Refusal, RunPermit};
use core::mem;
use martlet_units::Instant;
use martlet_wire::control::{
    Abandon, Answer, Commit, Committed, Control, Fate, Rehearsed, STATE_BYTES_MAX,
    State as SavedState, SwitchoverSoon,
};

/// What this side has of the right to run the guest. It stands beside the state, so that a step that
/// panics loses nothing of it.
#[derive(Debug)]
pub(super) enum Right {
    /// The VMM has it, or nobody here any more.
    NotHere,
    /// The guest is stopped.
    Held { permit: RunPermit, running: bool, since: Instant },
    /// It was given away.
    Given { permit: CommittedPermit, running: bool },
}

impl Right {
    fn take(&mut self) -> Right {
        mem::replace(self, Right::NotHere)
    }
}

#[derive(Clone, Debug)]
pub(super) enum State {
    SettingUp,
    Connecting {
        connected: bool,
        accepted: bool,
    },
    Sending {
        round: u32,
        sent: bool,
        received: bool,
    },
    Rehearsing {
        round: u32,
        saved: bool,
    },
    Deciding {
        round: u32,
    },
    Pausing {
        last_round: u32,
    },
    Switching {
        last_round: u32,
        pages_sent: bool,
        state_sent: bool,
    },
    Comparing {
        last_round: u32,
        ours: Option<[u8; 32]>,
        theirs: Option<[u8; 32]>,
    },
    Committing {
        /// How the control connection was lost, if it was.
        lost: Option<String>,
    },
    Undecided,
    Withdrawing {
        failure: Failure,
    },
    Confirming {
        committed: Committed,
    },
    Completed,
    Failed,
    Cancelled,
    GivenUp,
}

impl State {
    pub(super) fn phase(&self) -> SourcePhase {
        match self {
            State::SettingUp => SourcePhase::SettingUp,
            State::Connecting { .. } => SourcePhase::Connecting,
            State::Sending { .. } => SourcePhase::Sending,
            State::Rehearsing { .. } => SourcePhase::Rehearsing,
            State::Deciding { .. } => SourcePhase::Deciding,
            State::Pausing { .. } => SourcePhase::Pausing,
            State::Switching { .. } => SourcePhase::Switching,
            State::Comparing { .. } => SourcePhase::Comparing,
            State::Committing { .. } => SourcePhase::Committing,
            State::Undecided => SourcePhase::Undecided,
            State::Withdrawing { .. } => SourcePhase::Withdrawing,
            State::Confirming { .. } => SourcePhase::Confirming,
            State::Completed => SourcePhase::Completed,
            State::Failed => SourcePhase::Failed,
            State::Cancelled => SourcePhase::Cancelled,
            State::GivenUp => SourcePhase::GivenUp,
        }
    }
}

impl Source {
    /// One step that the table allows.
    pub(super) fn step(&mut self, now: Instant, state: State, input: Input) -> State {
        let phase = state.phase();
        match input {
            Input::Silence => self.fail(state, Failure::Silence),
            Input::Deadline { limit } => {
                self.fail(state, Failure::TooSlow { phase: phase.label(), limit })
            }
            Input::Event(SourceEvent::ControlLost { reason }) => match state {
                // The answer may still be had by a question, until the deadline.
                State::Committing { .. } => State::Committing { lost: Some(reason) },
                state => self.fail(state, Failure::ControlLost { reason }),
            },
            Input::Event(SourceEvent::Malformed { reason }) => match state {
                State::Committing { .. } => State::Committing { lost: Some(reason) },
                state => self.fail(state, Failure::Malformed { reason }),
            },
            Input::Event(SourceEvent::ChannelLost { reason }) => {
                self.fail(state, Failure::ChannelLost { reason })
            }
            Input::Event(SourceEvent::HostFailed { reason }) => {
                self.host_failed(state, Failure::Host { reason })
            }
            Input::Event(SourceEvent::Cancel { reason }) => {
                self.fail(state, Failure::Cancelled { reason })
            }
            Input::Event(SourceEvent::Received(message)) => self.on_message(now, state, message),
            Input::Paused => self.on_paused(now, state),
            Input::Event(event) => self.on_report(now, state, event),
        }
    }

    fn on_message(&mut self, now: Instant, state: State, message: Control) -> State {
        match (state, message) {
            (State::SettingUp, Control::SetupDone(done)) => {
                self.peer = Some(done);
                self.ping(now);
                let (count, token) = (self.config.setup.channels, done.token);
                self.actions.push_back(SourceAction::OpenChannels { count, token });
                State::Connecting { connected: false, accepted: false }
            }
            (State::Connecting { connected, .. }, Control::ChannelsReady) => {
                self.ping(now);
                self.begin_rounds(connected, true)
            }
            (State::Sending { round, sent, received }, Control::RoundReceived(got)) => {
                if received || got.round != round {
                    let what = format!("round {} received while {round} is sent", got.round);
                    let state = State::Sending { round, sent, received };
                    return self.fail(state, Failure::Contradiction { what });
                }
                self.end_round(now, round, sent, true)
            }
            (
                state @ (State::Switching { last_round, .. } | State::Comparing { last_round, .. }),
                Control::RoundReceived(got),
            ) => {
                if got.round == last_round {
                    return self.commit_if_due(now, state);
                }
                let what = format!("round {} received while {last_round} is sent", got.round);
                self.fail(state, Failure::Contradiction { what })
            }
            (State::Sending { round, sent, received }, Control::Pong(_)) => {
                if sent && received {
                    return self.end_round(now, round, sent, received);
                }
                State::Sending { round, sent, received }
            }
            (state @ State::Switching { .. }, Control::Pong(_)) => self.commit_if_due(now, state),
            (State::Rehearsing { round, saved: true }, Control::Rehearsed(rehearsed)) => {
                self.rehearsed = Some(rehearsed);
                self.decide(round)
            }
            (state @ State::Rehearsing { saved: false, .. }, Control::Rehearsed(_)) => {
                let what = "a rehearsal that was not asked for".to_owned();
                self.fail(state, Failure::Contradiction { what })
            }
            (State::Comparing { last_round, ours, theirs }, Control::Digest(digest)) => {
                if theirs.is_some() {
                    let what = "a second digest".to_owned();
                    let state = State::Comparing { last_round, ours, theirs };
                    return self.fail(state, Failure::Contradiction { what });
                }
                self.compare(now, last_round, ours, Some(digest.digest))
            }
            (state, message) => self.on_verdict(state, message),
        }
    }

    /// Messages that end something.
    fn on_verdict(&mut self, state: State, message: Control) -> State {
        match (state, message) {
            (State::Committing { .. } | State::Undecided, Control::Committed(committed)) => {
                // The permit is dropped here: the guest never runs in this process again.
                self.right = Right::NotHere;
                self.actions.push_back(SourceAction::MovedAway(committed));
                State::Confirming { committed }
            }
            (State::Committing { .. } | State::Undecided, message) => {
                let (Control::CommitRefused(why) | Control::Abandon(why)) = message else {
                    unreachable!("the table lets no other message through")
                };
                let proof = Refusal::from_message(&why);
                let failure = Failure::Refused { reason: why.reason };
                self.take_back(|permit| permit.revive(proof), failure)
            }
            (State::Confirming { committed }, Control::Alive(alive)) => {
                let (committed, alive) = (Some(committed), Some(alive));
                self.finish(SourceOutcome::Completed { committed, alive });
                State::Completed
            }
            (state, Control::Abandon(why)) => {
                self.fail(state, Failure::PeerGaveUp { reason: why.reason })
            }
            (state, message) => {
                unreachable!("the table lets {} through in {:?}", message.kind(), state.phase())
            }
        }
    }

    fn on_report(&mut self, now: Instant, state: State, event: SourceEvent) -> State {
        match (state, event) {
            (State::Connecting { accepted, .. }, SourceEvent::ChannelsConnected) => {
                self.begin_rounds(true, accepted)
            }
            (State::Sending { round, sent, received }, SourceEvent::RoundSent { round: done }) => {
                if done != round {
                    return self.wrong_round(State::Sending { round, sent, received });
                }
                self.end_round(now, round, true, received)
            }
            (State::Rehearsing { round, .. }, SourceEvent::Rehearsed { state: None }) => {
                self.rehearsed = Some(Rehearsed { load_ns: 0, start_ns: 0 });
                self.decide(round)
            }
            (State::Rehearsing { round, .. }, SourceEvent::Rehearsed { state: Some(saved) }) => {
                let waiting = State::Rehearsing { round, saved: true };
                if let Some(failure) = too_long(&saved) {
                    return self.fail(waiting, failure);
                }
                self.send(Control::Rehearse(SavedState::new(saved)));
                self.expect_within(now, limits::REHEARSAL_MAX);
                waiting
            }
            (State::Deciding { round }, SourceEvent::Decided(decision)) => {
                self.on_decision(round, decision)
            }
            (State::Sending { round, sent, received }, SourceEvent::ChannelsMove) => {
                if sent && !received {
                    self.expect_within(now, limits::ROUND_ACK_MAX);
                }
                State::Sending { round, sent, received }
            }
            (state, event) => self.on_switchover_report(now, state, event),
        }
    }

    /// The guest is stopped, and its permit is held.
    fn on_paused(&mut self, now: Instant, state: State) -> State {
        match state {
            State::Pausing { last_round } => {
                self.actions.push_back(SourceAction::RunLastRound { round: last_round });
                self.actions.push_back(SourceAction::SaveState);
                self.pinger.ping_again_after(now, limits::STOPPED_PING_INTERVAL);
                State::Switching { last_round, pages_sent: false, state_sent: false }
            }
            State::Withdrawing { failure } => {
                self.let_go_on();
                self.end(failure)
            }
            state @ (State::Failed | State::Cancelled) => {
                self.let_go_on();
                state
            }
            state => unreachable!("the table lets it through in {:?}", state.phase()),
        }
    }

    fn on_switchover_report(&mut self, now: Instant, state: State, event: SourceEvent) -> State {
        match (state, event) {
            (
                State::Switching { last_round, pages_sent, state_sent },
                SourceEvent::LastRoundSent { round },
            ) => {
                if round != last_round {
                    let state = State::Switching { last_round, pages_sent, state_sent };
                    return self.wrong_round(state);
                }
                self.end_switching(now, last_round, true, state_sent)
            }
            (
                State::Switching { last_round, pages_sent, .. },
                SourceEvent::StateSaved { bytes },
            ) => {
                if let Some(failure) = too_long(&bytes) {
                    let state = State::Switching { last_round, pages_sent, state_sent: false };
                    return self.fail(state, failure);
                }
                let clock = self.clock(now).map(Into::into);
                self.send(Control::FinalState(SavedState { clock, ..SavedState::new(bytes) }));
                self.end_switching(now, last_round, pages_sent, true)
            }
            (State::Switching { last_round, pages_sent, state_sent }, SourceEvent::CalledOff) => {
                if pages_sent || state_sent || !self.may_call_off() {
                    let state = State::Switching { last_round, pages_sent, state_sent };
                    let (event, phase) = ("a stop that can't be called off", state.phase().label());
                    return self.fail(state, Failure::Misuse { event, phase });
                }
                self.let_go_on();
                let called_off = Some(true);
                self.send(Control::SwitchoverSoon(SwitchoverSoon { last_round, called_off }));
                self.awaited_pong = Some(now.0);
                self.ping(now);
                State::Sending { round: last_round, sent: false, received: false }
            }
            (State::Comparing { last_round, theirs, .. }, SourceEvent::OwnDigest(ours)) => {
                self.compare(now, last_round, Some(ours), theirs)
            }
            (State::Undecided, SourceEvent::Overridden { by, answer }) => {
                self.on_override(by, answer)
            }
            (state, SourceEvent::Fate(answer)) => self.on_fate(state, &answer),
            (state, _) => unreachable!("the table lets it through in {:?}", state.phase()),
        }
    }

    fn on_decision(&mut self, round: u32, decision: Decision) -> State {
        let Some(next) = round.checked_add(1) else {
            let reason = "the rounds don't end".to_owned();
            return self.fail(State::Deciding { round }, Failure::Host { reason });
        };
        match decision {
            Decision::NextRound => {
                self.actions.push_back(SourceAction::RunRound { round: next });
                State::Sending { round: next, sent: false, received: false }
            }
            Decision::RehearseAgain => {
                self.actions.push_back(SourceAction::Rehearse);
                State::Rehearsing { round, saved: false }
            }
            Decision::Switchover => {
                self.send(Control::SwitchoverSoon(SwitchoverSoon {
                    last_round: next,
                    called_off: None,
                }));
                self.actions.push_back(SourceAction::Pause);
                State::Pausing { last_round: next }
            }
        }
    }

    fn begin_rounds(&mut self, connected: bool, accepted: bool) -> State {
        if !(connected && accepted) {
            return State::Connecting { connected, accepted };
        }
        self.actions.push_back(SourceAction::RunRound { round: 0 });
        State::Sending { round: 0, sent: false, received: false }
    }

    fn end_round(&mut self, now: Instant, round: u32, sent: bool, received: bool) -> State {
        if sent && !received {
            self.expect_within(now, limits::ROUND_ACK_MAX);
        }
        if !(sent && received) || self.awaited_pong.is_some() {
            return State::Sending { round, sent, received };
        }
        // The channels are empty now, so this measures the way and no queue.
        self.ping(now);
        if self.rehearsed.is_some() {
            return self.decide(round);
        }
        self.actions.push_back(SourceAction::Rehearse);
        State::Rehearsing { round, saved: false }
    }

    fn decide(&mut self, round: u32) -> State {
        self.actions.push_back(SourceAction::Decide);
        State::Deciding { round }
    }

    /// Commits if nothing but a sign of life was missing.
    fn commit_if_due(&mut self, now: Instant, state: State) -> State {
        match state {
            State::Switching { last_round, pages_sent, state_sent } => {
                self.end_switching(now, last_round, pages_sent, state_sent)
            }
            state => state,
        }
    }

    fn end_switching(
        &mut self,
        now: Instant,
        last_round: u32,
        pages_sent: bool,
        state_sent: bool,
    ) -> State {
        if !(pages_sent && state_sent) {
            return State::Switching { last_round, pages_sent, state_sent };
        }
        if !self.config.verify {
            if !self.is_heard(now) {
                // Nobody could say what became of a commit that nobody is there to read.
                self.ping_if_room(now, limits::STOPPED_PING_INTERVAL);
                return State::Switching { last_round, pages_sent, state_sent };
            }
            return self.commit(now, last_round);
        }
        self.send(Control::AskDigest);
        self.actions.push_back(SourceAction::ComputeDigest);
        State::Comparing { last_round, ours: None, theirs: None }
    }

    fn compare(
        &mut self,
        now: Instant,
        last_round: u32,
        ours: Option<[u8; 32]>,
        theirs: Option<[u8; 32]>,
    ) -> State {
        match (ours, theirs) {
            (Some(here), Some(there)) if here == there => self.commit(now, last_round),
            (Some(_), Some(_)) => {
                let state = State::Comparing { last_round, ours, theirs };
                self.fail(state, Failure::MemoryDiffers)
            }
            (None, _) | (_, None) => State::Comparing { last_round, ours, theirs },
        }
    }

    /// The right to run the guest leaves.
    fn commit(&mut self, now: Instant, last_round: u32) -> State {
        let Right::Held { permit, running, since } = self.right.take() else {
            let reason = "the right to run the guest is not here".to_owned();
            let state = State::Comparing { last_round, ours: None, theirs: None };
            return self.fail(state, Failure::Host { reason });
        };
        self.right = Right::Given { permit: permit.give_away(), running };
        // Even if the rest panics: the commit may be on its way.
        self.state = State::Committing { lost: None };
        let migration = self.config.setup.migration;
        let accepted = self.config.downtime_limit;
        let complete = limits::complete_max(accepted, now.since(since));
        let complete_within_ms = u32::try_from(complete.as_millis()).ok();
        self.send(Control::Commit(Commit { migration, last_round, running, complete_within_ms }));
        let round_trip = self.round_trip().unwrap_or_default();
        self.expect_within(now, limits::answer_max(accepted, complete, round_trip));
        State::Committing { lost: None }
    }

    /// A stopped guest goes on.
    fn let_go_on(&mut self) {
        match self.right.take() {
            Right::Held { permit, running, .. } => {
                self.actions.push_back(SourceAction::Resume { permit, running });
            }
            right => self.right = right,
        }
    }

    /// The guest that was given away goes on here after all.
    fn take_back(
        &mut self,
        revive: impl FnOnce(CommittedPermit) -> RunPermit,
        failure: Failure,
    ) -> State {
        if let Right::Given { permit, running } = self.right.take() {
            let permit = revive(permit);
            self.actions.push_back(SourceAction::Resume { permit, running });
        }
        self.end(failure)
    }

    fn on_fate(&mut self, state: State, answer: &Answer) -> State {
        let (lost, has_time) = match state {
            State::Committing { lost } => (lost, true),
            State::Undecided => (None, false),
            state => unreachable!("the table lets no answer through in {:?}", state.phase()),
        };
        let asked = self.peer.expect("a commit follows a SetupDone").instance;
        if let Some(proof) = Refusal::from_answer(answer, asked) {
            return self.take_back(|permit| permit.revive(proof), Failure::NeverArrived);
        }
        let reason = if answer.instance == asked {
            match answer.fate {
                Fate::Committed => {
                    self.right = Right::NotHere;
                    self.finish(SourceOutcome::Completed { committed: None, alive: None });
                    return State::Completed;
                }
                Fate::Pending if has_time => return State::Committing { lost },
                Fate::Pending => UndecidedReason::Pending,
                Fate::Abandoned | Fate::Unknown => unreachable!("is a proof"),
            }
        } else {
            UndecidedReason::OtherProcess
        };
        self.finish(SourceOutcome::Undecided { reason });
        State::Undecided
    }

    /// The process that got the commit knows better than any operator; without it, the operator
    /// answers for what follows.
    fn on_override(&mut self, by: OperatorOverride, answer: Option<Answer>) -> State {
        let asked = self.peer.expect("a commit follows a SetupDone").instance;
        if let Some(answer) = answer.filter(|answer| answer.instance == asked) {
            return self.on_fate(State::Undecided, &answer);
        }
        match by {
            OperatorOverride::RunHere(word) => {
                self.take_back(|permit| permit.revive_by_override(word), Failure::TakenBack)
            }
            OperatorOverride::GiveUp(_) => {
                // The permit is dropped here.
                self.right = Right::NotHere;
                self.finish(SourceOutcome::GivenUp);
                State::GivenUp
            }
        }
    }

    /// The way out of every failure.
    pub(super) fn fail(&mut self, state: State, failure: Failure) -> State {
        // The guest first.
        self.let_go_on();
        match state {
            State::SettingUp
            | State::Connecting { .. }
            | State::Sending { .. }
            | State::Rehearsing { .. }
            | State::Deciding { .. } => {
                self.tell_peer(&failure);
                self.end(failure)
            }
            State::Pausing { .. } => {
                self.tell_peer(&failure);
                State::Withdrawing { failure }
            }
            State::Switching { .. } | State::Comparing { .. } => {
                self.tell_peer(&failure);
                self.end(failure)
            }
            State::Committing { lost } => {
                let lost = lost.map(|reason| Failure::ControlLost { reason });
                let reason = UndecidedReason::Unconfirmed(lost.unwrap_or(failure));
                self.finish(SourceOutcome::Undecided { reason });
                State::Undecided
            }
            State::Confirming { committed } => {
                let committed = Some(committed);
                self.finish(SourceOutcome::Completed { committed, alive: None });
                State::Completed
            }
            State::Undecided
            | State::Withdrawing { .. }
            | State::Completed
            | State::Failed
            | State::Cancelled
            | State::GivenUp => state,
        }
    }

    /// A host failure while the guest is being stopped is taken for the pause's own: the VMM has
    /// set the guest running again, and no permit will come.
    fn host_failed(&mut self, state: State, failure: Failure) -> State {
        match state {
            State::Pausing { .. } => {
                self.let_go_on();
                self.tell_peer(&failure);
                self.end(failure)
            }
            State::Withdrawing { failure: first } => {
                self.let_go_on();
                self.end(first)
            }
            state => self.fail(state, failure),
        }
    }

    fn wrong_round(&mut self, state: State) -> State {
        let (event, phase) = ("another round than the one asked for", state.phase().label());
        self.fail(state, Failure::Misuse { event, phase })
    }

    fn tell_peer(&mut self, failure: &Failure) {
        let knows = matches!(failure, Failure::PeerGaveUp { .. });
        if self.control_open && !knows {
            self.send(Control::Abandon(Abandon::because(failure.to_string())));
        }
    }

    fn end(&mut self, failure: Failure) -> State {
        if matches!(failure, Failure::Cancelled { .. }) {
            self.finish(SourceOutcome::Cancelled);
            return State::Cancelled;
        }
        self.finish(SourceOutcome::Failed { reason: failure });
        State::Failed
    }

    fn finish(&mut self, outcome: SourceOutcome) {
        self.actions.push_back(SourceAction::Finish(outcome));
    }
}

fn too_long(state: &[u8]) -> Option<Failure> {
    (state.len() > STATE_BYTES_MAX).then(|| Failure::Host {
        reason: format!("the machine's state has {} bytes, at most {STATE_BYTES_MAX}", state.len()),
    })
}
