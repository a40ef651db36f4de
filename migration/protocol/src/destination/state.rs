//! The destination's states, and what leads from one to the next.

use super::types::{DestinationAction, DestinationEvent, DestinationOutcome, DestinationPhase};
use super::{Destination, Input};
use crate::clock_key::ClockKey;
use crate::failure::Failure;
use crate::limits;
use crate::permit::Arrival;
use martlet_units::{ClockOffset, Instant};
use martlet_wire::control::{
    Abandon, BOOT_ID_UNTOLD, Commit, Committed, Control, Digest, Fate, Rehearsed, RoundReceived,
    Setup, SetupDone, State as SavedState,
};

/// Where the final state is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Load {
    Missing,
    Loading,
    Loaded,
}

/// Where the comparison of memory is, if there is one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Check {
    NotAsked,
    /// Waits for the last round.
    Asked,
    Computing,
    Sent,
}

/// A data channel that is gone while it is not yet known whether it was still needed.
#[derive(Debug)]
pub(super) struct Lost {
    pub(super) last_barrier: Option<u32>,
    pub(super) reason: String,
}

#[derive(Debug)]
pub(super) enum State {
    /// While a step is being taken; never seen from outside.
    Between,
    Waiting,
    Building,
    Accepting,
    Receiving {
        rehearsing: bool,
        lost: Option<Lost>,
    },
    Armed {
        last_round: u32,
        load: Load,
        check: Check,
    },
    Committing {
        last_round: u32,
        load: Load,
        arrival: Arrival,
        commit_at: Instant,
    },
    Starting {
        commit_at: Instant,
        ready_at: Instant,
    },
    Running,
    Arrived,
    Abandoned,
}

impl State {
    pub(super) fn phase(&self) -> DestinationPhase {
        match self {
            State::Between => unreachable!("a step ends with a state"),
            State::Waiting => DestinationPhase::Waiting,
            State::Building => DestinationPhase::Building,
            State::Accepting => DestinationPhase::Accepting,
            State::Receiving { .. } => DestinationPhase::Receiving,
            State::Armed { .. } => DestinationPhase::Armed,
            State::Committing { .. } => DestinationPhase::Committing,
            State::Starting { .. } => DestinationPhase::Starting,
            State::Running => DestinationPhase::Running,
            State::Arrived => DestinationPhase::Arrived,
            State::Abandoned => DestinationPhase::Abandoned,
        }
    }
}

impl Destination {
    /// One step that the table allows.
    pub(super) fn step(&mut self, now: Instant, state: State, input: Input) -> State {
        match input {
            Input::Silence => self.fail(state, Failure::Silence),
            Input::Deadline { limit } => self.on_deadline(state, limit),
            Input::Event(DestinationEvent::ControlLost { reason }) => match state {
                State::Running => self.arrived(),
                state => self.fail(state, Failure::ControlLost { reason }),
            },
            Input::Event(DestinationEvent::Malformed { reason }) => match state {
                State::Running => self.arrived(),
                state => self.fail(state, Failure::Malformed { reason }),
            },
            Input::Event(DestinationEvent::ChannelLost { last_barrier, reason }) => {
                self.on_lost_channel(now, state, Lost { last_barrier, reason })
            }
            Input::Event(DestinationEvent::Cancel { reason }) => {
                self.fail(state, Failure::Cancelled { reason })
            }
            Input::Event(DestinationEvent::HostFailed { reason }) => {
                self.fail(state, Failure::Host { reason })
            }
            Input::Event(DestinationEvent::Received(message)) => {
                self.on_message(now, state, message)
            }
            Input::Event(event) => self.on_report(now, state, event),
        }
    }

    fn on_message(&mut self, now: Instant, state: State, message: Control) -> State {
        match (state, message) {
            (State::Waiting, Control::Setup(setup)) => self.on_setup(setup),
            (state, Control::Abandon(why)) => {
                self.fail(state, Failure::PeerGaveUp { reason: why.reason })
            }
            (State::Receiving { rehearsing, lost }, Control::Rehearse(saved)) => {
                if rehearsing {
                    let state = State::Receiving { rehearsing, lost };
                    return self.contradicts(state, "a rehearsal during a rehearsal");
                }
                let bytes = saved.bytes;
                let clock = None;
                let load = DestinationAction::LoadState { bytes, rehearsal: true, clock };
                self.actions.push_back(load);
                State::Receiving { rehearsing: true, lost }
            }
            (State::Armed { last_round, load, check }, Control::SwitchoverSoon(soon)) => {
                let is_early = load == Load::Missing && check == Check::NotAsked;
                if !(is_early && soon.called_off == Some(true) && soon.last_round == last_round) {
                    let state = State::Armed { last_round, load, check };
                    return self.contradicts(state, "a second switchover");
                }
                // Of the last one nobody had to be told.
                if self.rounds > last_round && self.rounds_told <= last_round {
                    self.tell_round(last_round);
                }
                State::Receiving { rehearsing: false, lost: None }
            }
            (State::Receiving { rehearsing, lost }, Control::SwitchoverSoon(soon)) => {
                self.arm(rehearsing, lost, soon.last_round)
            }
            (State::Armed { last_round, load, check }, Control::FinalState(saved)) => {
                if load != Load::Missing {
                    let state = State::Armed { last_round, load, check };
                    return self.contradicts(state, "a second final state");
                }
                let SavedState { bytes, clock, .. } = saved;
                let clock = clock.map(|clock| ClockOffset::from(clock).seen_by_peer());
                let load = DestinationAction::LoadState { bytes, rehearsal: false, clock };
                self.actions.push_back(load);
                State::Armed { last_round, load: Load::Loading, check }
            }
            (State::Armed { last_round, load, check }, Control::AskDigest) => {
                if check != Check::NotAsked {
                    let state = State::Armed { last_round, load, check };
                    return self.contradicts(state, "a second question for the digest");
                }
                // The pages were sent before the question; they are close behind or stuck.
                self.deadline =
                    Some((now.after(limits::COMMIT_COMPLETE_MAX), limits::COMMIT_COMPLETE_MAX));
                let check = self.check_when_in(last_round, Check::Asked);
                State::Armed { last_round, load, check }
            }
            (State::Armed { last_round, load, check }, Control::Commit(commit)) => {
                self.on_commit(now, last_round, load, check, commit)
            }
            (state, message) => {
                unreachable!("the table lets {} through in {:?}", message.kind(), state.phase())
            }
        }
    }

    fn on_setup(&mut self, setup: Setup) -> State {
        if self.ledger.fate(setup.migration) != Fate::Unknown {
            return self.contradicts(State::Waiting, "a migration that was tried here before");
        }
        self.migration = Some(setup.migration);
        self.channels = setup.channels;
        self.actions.push_back(DestinationAction::Build(setup));
        State::Building
    }

    fn arm(&mut self, rehearsing: bool, lost: Option<Lost>, last_round: u32) -> State {
        // The last round's barriers may have overtaken this message.
        let next = last_round == self.rounds;
        let newest = last_round.checked_add(1) == Some(self.rounds);
        if rehearsing || !(next || newest) {
            let state = State::Receiving { rehearsing, lost };
            return self.contradicts(state, "a switchover at the wrong time");
        }
        match lost {
            Some(lost) if lost.last_barrier != Some(last_round) => {
                let state = State::Receiving { rehearsing, lost: None };
                self.fail(state, Failure::ChannelLost { reason: lost.reason })
            }
            Some(_) | None => {
                self.actions.push_back(DestinationAction::Arm);
                State::Armed { last_round, load: Load::Missing, check: Check::NotAsked }
            }
        }
    }

    fn on_commit(
        &mut self,
        now: Instant,
        last_round: u32,
        load: Load,
        check: Check,
        commit: Commit,
    ) -> State {
        let complete = commit.complete_within_ms.map_or(limits::COMMIT_COMPLETE_MAX, |ms| {
            core::time::Duration::from_millis(u64::from(ms)).min(limits::COMPLETE_MAX)
        });
        self.deadline = Some((now.after(complete), complete));
        // From here on a failure is answered with a refusal, as the source waits for one.
        self.saw_commit = true;
        let state =
            State::Committing { last_round, load, arrival: Arrival::of(commit), commit_at: now };
        if Some(commit.migration) != self.migration {
            return self.contradicts(state, "a commit of another migration");
        }
        if commit.last_round != last_round {
            return self.contradicts(state, "a commit with another last round");
        }
        if load == Load::Missing {
            return self.contradicts(state, "a commit without a state");
        }
        match check {
            Check::NotAsked | Check::Sent => self.start_when_complete(now, state),
            Check::Asked | Check::Computing => {
                self.contradicts(state, "a commit before the digest it asked for")
            }
        }
    }

    fn on_report(&mut self, now: Instant, state: State, event: DestinationEvent) -> State {
        match (state, event) {
            (State::Building, DestinationEvent::Built) => {
                let (instance, token) = (self.ledger.instance(), self.config.token);
                let proof = |key: ClockKey| Some(key.proof(self.migration?));
                let clock_proof = self.config.clock_key.and_then(proof);
                // Wait first, then invite: the channels may be there before a thread could wake.
                let count = self.channels;
                self.actions.push_back(DestinationAction::AcceptChannels { count, token });
                let boot_id = BOOT_ID_UNTOLD;
                let takes_call_off = Some(true);
                let done = SetupDone { instance, token, boot_id, clock_proof, takes_call_off };
                self.send(Control::SetupDone(done));
                State::Accepting
            }
            (state @ State::Abandoned, DestinationEvent::Built) => {
                self.actions.push_back(DestinationAction::Discard);
                state
            }
            (State::Accepting, DestinationEvent::ChannelsConnected) => {
                self.send(Control::ChannelsReady);
                State::Receiving { rehearsing: false, lost: None }
            }
            (state, DestinationEvent::RoundReceived { round }) => self.on_round(now, state, round),
            (state, DestinationEvent::StateLoaded { load_ns }) => {
                self.on_loaded(now, state, Rehearsed { load_ns, start_ns: 0 })
            }
            (
                State::Armed { last_round, load, check: Check::Computing },
                DestinationEvent::OwnDigest(digest),
            ) => {
                self.send(Control::Digest(Digest { digest }));
                State::Armed { last_round, load, check: Check::Sent }
            }
            (State::Starting { commit_at, ready_at }, DestinationEvent::Started { at }) => {
                let committed =
                    Committed { commit_ns: commit_at.0, ready_ns: ready_at.0, started_ns: at.0 };
                self.send(Control::Committed(committed));
                if self.control_open { State::Running } else { self.arrived() }
            }
            (State::Running, DestinationEvent::Alive(alive)) => {
                self.send(Control::Alive(alive));
                self.arrived()
            }
            (state, event) => {
                let event = super::Kind::of(&event).label();
                let phase = state.phase().label();
                self.fail(state, Failure::Misuse { event, phase })
            }
        }
    }

    fn on_round(&mut self, now: Instant, state: State, round: u32) -> State {
        let next = self.rounds;
        let last = match &state {
            State::Armed { last_round, .. } | State::Committing { last_round, .. } => {
                Some(*last_round)
            }
            _ => None,
        };
        let wrong = match last {
            _ if round != next => Some(format!("round {round} where round {next} was expected")),
            Some(last) if round > last => Some(format!("round {round} behind the last, {last}")),
            Some(_) | None => None,
        };
        if let Some(what) = wrong {
            return self.fail(state, Failure::Contradiction { what });
        }
        let Some(rounds) = next.checked_add(1) else {
            return self.contradicts(state, "rounds without end");
        };
        self.rounds = rounds;
        match state {
            State::Armed { last_round, load, check } => {
                let check = self.check_when_in(last_round, check);
                State::Armed { last_round, load, check }
            }
            state @ State::Committing { .. } => self.start_when_complete(now, state),
            state => {
                self.tell_round(round);
                state
            }
        }
    }

    fn tell_round(&mut self, round: u32) {
        self.rounds_told = round + 1;
        self.send(Control::RoundReceived(RoundReceived { round }));
    }

    fn on_loaded(&mut self, now: Instant, state: State, times: Rehearsed) -> State {
        match state {
            State::Receiving { rehearsing: true, lost } => {
                self.send(Control::Rehearsed(times));
                State::Receiving { rehearsing: false, lost }
            }
            State::Armed { last_round, load: Load::Loading, check } => {
                State::Armed { last_round, load: Load::Loaded, check }
            }
            State::Committing { last_round, load: Load::Loading, arrival, commit_at } => {
                let state =
                    State::Committing { last_round, load: Load::Loaded, arrival, commit_at };
                self.start_when_complete(now, state)
            }
            state => {
                let (event, phase) = ("a state that was not to be loaded", state.phase().label());
                self.fail(state, Failure::Misuse { event, phase })
            }
        }
    }

    /// Starts the digest once it is asked for and the last pages are in.
    fn check_when_in(&mut self, last_round: u32, check: Check) -> Check {
        if check == Check::Asked && self.rounds > last_round {
            self.deadline = None;
            self.actions.push_back(DestinationAction::ComputeDigest);
            return Check::Computing;
        }
        check
    }

    /// The commit is here. If everything else is too, the right to run the guest is made.
    fn start_when_complete(&mut self, now: Instant, state: State) -> State {
        match state {
            State::Committing { last_round, load: Load::Loaded, arrival, commit_at }
                if self.rounds > last_round =>
            {
                let running = arrival.running();
                self.has_made_permit = true;
                let permit = arrival.into_permit();
                self.actions.push_back(DestinationAction::Start { permit, running });
                State::Starting { commit_at, ready_at: now }
            }
            state => state,
        }
    }

    /// A channel that brought its last barrier is not needed any more. In `Receiving` nobody has
    /// said yet which barrier is the last: a source that has sent everything and died may be seen
    /// to lose its channels before its last messages are read.
    fn on_lost_channel(&mut self, now: Instant, state: State, lost: Lost) -> State {
        match state {
            State::Receiving { rehearsing, lost: None } => {
                self.deadline =
                    Some((now.after(limits::LOST_CHANNEL_GRACE), limits::LOST_CHANNEL_GRACE));
                State::Receiving { rehearsing, lost: Some(lost) }
            }
            State::Receiving { rehearsing, lost: Some(first) } => {
                // The one that brought less decides.
                let less = if lost.last_barrier < first.last_barrier { lost } else { first };
                State::Receiving { rehearsing, lost: Some(less) }
            }
            State::Armed { last_round, .. } | State::Committing { last_round, .. }
                if lost.last_barrier == Some(last_round) =>
            {
                state
            }
            state => self.fail(state, Failure::ChannelLost { reason: lost.reason }),
        }
    }

    fn on_deadline(&mut self, state: State, limit: core::time::Duration) -> State {
        match state {
            State::Running => self.arrived(),
            State::Receiving { rehearsing, lost: Some(lost) } => {
                let state = State::Receiving { rehearsing, lost: None };
                self.fail(state, Failure::ChannelLost { reason: lost.reason })
            }
            state => {
                let phase = state.phase().label();
                self.fail(state, Failure::TooSlow { phase, limit })
            }
        }
    }

    fn arrived(&mut self) -> State {
        self.actions.push_back(DestinationAction::Finish(DestinationOutcome::Arrived));
        State::Arrived
    }

    fn contradicts(&mut self, state: State, what: &str) -> State {
        self.fail(state, Failure::Contradiction { what: what.to_owned() })
    }

    /// The way out of every failure before the start.
    pub(super) fn fail(&mut self, state: State, failure: Failure) -> State {
        let built = match state {
            State::Between => unreachable!("a step ends with a state"),
            State::Waiting => false,
            State::Building | State::Accepting | State::Receiving { .. } | State::Armed { .. } => {
                true
            }
            State::Committing { .. } => {
                self.send(Control::CommitRefused(Abandon::because(failure.to_string())));
                self.discard(failure);
                return State::Abandoned;
            }
            State::Starting { .. } | State::Running | State::Arrived | State::Abandoned => {
                return state;
            }
        };
        if !matches!(failure, Failure::PeerGaveUp { .. }) {
            self.send(Control::Abandon(Abandon::because(failure.to_string())));
        }
        if built {
            self.discard(failure);
        } else {
            self.finish(failure);
        }
        State::Abandoned
    }

    fn discard(&mut self, failure: Failure) {
        self.actions.push_back(DestinationAction::Discard);
        self.finish(failure);
    }

    fn finish(&mut self, reason: Failure) {
        let outcome = DestinationOutcome::Abandoned { reason };
        self.actions.push_back(DestinationAction::Finish(outcome));
    }
}
