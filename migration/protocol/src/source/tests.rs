//! The source alone: its table, every cell of it, and the fate of the permit.

use super::state::{Right, State};
use super::table::{Kind, fallback, reaction};
use super::{
    Decision, Input, Source, SourceAction, SourceConfig, SourceEvent, SourceOutcome, SourcePhase,
};
use crate::clock_key::ClockKey;
use crate::reaction::{Reaction, print_table};
use crate::{Failure, OperatorOverride, OperatorsWord, RunPermit, UndecidedReason, limits};
use core::time::Duration;
use martlet_units::Instant;
use martlet_wire::control::{
    Abandon, Alive, Answer, Committed, Control, Digest, Fate, InstanceId, MeasuredClock,
    MigrationId, Pong, Rehearsed, RoundReceived, STATE_BYTES_MAX, Setup, SetupDone, WireRange,
};
use std::panic::{AssertUnwindSafe, catch_unwind};

const T0: Instant = Instant(1_000_000_000);
const HERE: InstanceId = InstanceId([1; 16]);
const ELSEWHERE: InstanceId = InstanceId([2; 16]);

fn config(verify: bool) -> SourceConfig {
    SourceConfig {
        setup: Setup {
            migration: MigrationId([7; 16]),
            regions: vec![WireRange { start_gfn: 0, pages: 16 }],
            machine: Vec::new(),
            channels: 2,
            boot_id: [0; 16],
        },
        clock_key: None,
        verify,
        downtime_limit: Duration::from_millis(300),
    }
}

fn done() -> SetupDone {
    SetupDone {
        instance: HERE,
        token: [9; 16],
        boot_id: [0; 16],
        clock_proof: None,
        takes_call_off: Some(true),
    }
}

/// What a machine in such a state has.
fn right_in(state: &State) -> Right {
    let permit = RunPermit::for_new_guest();
    match state.phase() {
        SourcePhase::Switching | SourcePhase::Comparing => {
            Right::Held { permit, running: true, since: T0 }
        }
        SourcePhase::Committing | SourcePhase::Undecided => {
            Right::Given { permit: permit.give_away(), running: true }
        }
        _ => Right::NotHere,
    }
}

fn committed() -> Committed {
    Committed { commit_ns: 1, ready_ns: 2, started_ns: 3 }
}

/// Every state with every combination of what it waits for.
fn states() -> Vec<State> {
    let flags = [(false, false), (false, true), (true, false)];
    let mut states = vec![State::SettingUp];
    for (connected, accepted) in flags {
        states.push(State::Connecting { connected, accepted });
    }
    for (sent, received) in flags {
        states.push(State::Sending { round: 4, sent, received });
    }
    for saved in [false, true] {
        states.push(State::Rehearsing { round: 4, saved });
    }
    states.push(State::Deciding { round: 4 });
    states.push(State::Deciding { round: u32::MAX });
    states.push(State::Pausing { last_round: 5 });
    for (pages_sent, state_sent) in flags {
        states.push(State::Switching { last_round: 5, pages_sent, state_sent });
    }
    for (ours, theirs) in [(None, None), (Some([3; 32]), None), (None, Some([3; 32]))] {
        states.push(State::Comparing { last_round: 5, ours, theirs });
    }
    states.push(State::Committing { lost: None });
    states.push(State::Undecided);
    for failure in [Failure::Silence, Failure::Cancelled { reason: String::new() }] {
        states.push(State::Withdrawing { failure });
    }
    states.push(State::Confirming { committed: committed() });
    states.extend([State::Completed, State::Failed, State::Cancelled, State::GivenUp]);
    states
}

fn some_reason() -> String {
    "a reason".to_owned()
}

/// Inputs of every kind, with right and wrong values.
fn inputs() -> Vec<(Kind, Input)> {
    let message = |message| SourceEvent::Received(message);
    let why = Abandon::because("a reason");
    let mut events = vec![
        message(Control::SetupDone(done())),
        message(Control::ChannelsReady),
        message(Control::Rehearsed(Rehearsed { load_ns: 1, start_ns: 1 })),
        message(Control::Committed(committed())),
        message(Control::CommitRefused(why.clone())),
        message(Control::Alive(Alive {
            cpu_ns: 0,
            load_begin_ns: None,
            load_end_ns: None,
            devices: None,
            wall_clock_ns: None,
            observed: None,
        })),
        message(Control::Abandon(why)),
        message(Control::Pong(Pong { sent_ns: 0, answered_ns: 0 })),
        message(Control::AskDigest),
        SourceEvent::ChannelsConnected,
        SourceEvent::ChannelsMove,
        SourceEvent::CalledOff,
        SourceEvent::Rehearsed { state: Some(vec![1]) },
        SourceEvent::Rehearsed { state: None },
        SourceEvent::Decided(Decision::NextRound),
        SourceEvent::Decided(Decision::RehearseAgain),
        SourceEvent::Decided(Decision::Switchover),
        SourceEvent::StateSaved { bytes: vec![1] },
        SourceEvent::ControlLost { reason: some_reason() },
        SourceEvent::Malformed { reason: some_reason() },
        SourceEvent::ChannelLost { reason: some_reason() },
        SourceEvent::HostFailed { reason: some_reason() },
        SourceEvent::Cancel { reason: some_reason() },
    ];
    for round in [3, 4, 5] {
        events.push(message(Control::RoundReceived(RoundReceived { round })));
        events.push(SourceEvent::RoundSent { round });
        events.push(SourceEvent::LastRoundSent { round });
    }
    for digest in [[3; 32], [4; 32]] {
        events.push(message(Control::Digest(Digest { digest })));
        events.push(SourceEvent::OwnDigest(digest));
    }
    for running in [true, false] {
        events.push(SourceEvent::Paused { permit: RunPermit::for_new_guest(), running });
    }
    for instance in [HERE, ELSEWHERE] {
        for fate in [Fate::Unknown, Fate::Committed, Fate::Abandoned, Fate::Pending] {
            let answer = Answer { instance, fate };
            events.push(SourceEvent::Fate(answer));
            events.push(SourceEvent::Overridden { by: run_here(), answer: Some(answer) });
            events.push(SourceEvent::Overridden { by: give_up(), answer: Some(answer) });
        }
    }
    for by in [run_here(), give_up()] {
        events.push(SourceEvent::Overridden { by, answer: None });
    }
    let mut inputs: Vec<(Kind, Input)> =
        events.into_iter().map(|event| (Kind::of(&event), Input::Event(event))).collect();
    let invented = Control::Pong(Pong { sent_ns: 7, answered_ns: 0 });
    inputs.push((Kind::GotUnaskedPong, Input::Event(SourceEvent::Received(invented))));
    inputs.push((Kind::Silence, Input::Silence));
    inputs.push((Kind::Deadline, Input::Deadline { limit: Duration::from_secs(1) }));
    inputs
}

/// A machine in some state, past its setup.
fn machine(verify: bool, state: State) -> Source {
    let mut source = Source::new(T0, config(verify));
    source.actions.clear();
    source.peer = Some(done());
    source.right = right_in(&state);
    source.state = state;
    source
}

/// Permits in the machine and on their way out of it, alive or inert.
fn permits(source: &Source) -> usize {
    let inside = usize::from(!matches!(source.right, Right::NotHere));
    let resumed = |action: &&SourceAction| matches!(action, SourceAction::Resume { .. });
    inside + source.actions.iter().filter(resumed).count()
}

#[test]
fn the_table_is_as_reviewed() {
    insta::assert_snapshot!(print_table(SourcePhase::ALL, Kind::ALL, reaction, fallback));
}

#[test]
fn all_states_and_kinds_are_tried() {
    for &phase in SourcePhase::ALL {
        assert!(states().iter().any(|state| state.phase() == phase), "{phase:?}");
    }
    for &kind in Kind::ALL {
        assert!(inputs().iter().any(|(of, _)| *of == kind), "{kind:?}");
    }
}

/// Every input in every state: the machine obeys its table, loses no permit, and says exactly once
/// that it is over.
#[test]
fn every_cell_of_the_table_holds() {
    for index in 0..states().len() {
        for (kind, input) in inputs() {
            for verify in [false, true] {
                let state = states().swap_remove(index);
                let input = match &input {
                    Input::Event(event) => Input::Event(copy(event)),
                    Input::Silence => Input::Silence,
                    Input::Deadline { limit } => Input::Deadline { limit: *limit },
                    Input::Paused => unreachable!("made inside only"),
                };
                check_cell(machine(verify, state), kind, input);
            }
        }
    }
}

/// Events hold permits and so can't be cloned; a test may make more guests.
fn copy(event: &SourceEvent) -> SourceEvent {
    match event {
        SourceEvent::Received(message) => SourceEvent::Received(message.clone()),
        SourceEvent::ControlLost { .. } => SourceEvent::ControlLost { reason: some_reason() },
        SourceEvent::Malformed { .. } => SourceEvent::Malformed { reason: some_reason() },
        SourceEvent::ChannelsConnected => SourceEvent::ChannelsConnected,
        SourceEvent::ChannelLost { .. } => SourceEvent::ChannelLost { reason: some_reason() },
        SourceEvent::RoundSent { round } => SourceEvent::RoundSent { round: *round },
        SourceEvent::Rehearsed { state } => SourceEvent::Rehearsed { state: state.clone() },
        SourceEvent::Decided(decision) => SourceEvent::Decided(*decision),
        SourceEvent::Paused { running, .. } => {
            SourceEvent::Paused { permit: RunPermit::for_new_guest(), running: *running }
        }
        SourceEvent::LastRoundSent { round } => SourceEvent::LastRoundSent { round: *round },
        SourceEvent::StateSaved { bytes } => SourceEvent::StateSaved { bytes: bytes.clone() },
        SourceEvent::OwnDigest(digest) => SourceEvent::OwnDigest(*digest),
        SourceEvent::HostFailed { .. } => SourceEvent::HostFailed { reason: some_reason() },
        SourceEvent::Cancel { .. } => SourceEvent::Cancel { reason: some_reason() },
        SourceEvent::Fate(answer) => SourceEvent::Fate(*answer),
        SourceEvent::Overridden { by, answer } => {
            let by = match by {
                OperatorOverride::RunHere(_) => run_here(),
                OperatorOverride::GiveUp(_) => give_up(),
            };
            SourceEvent::Overridden { by, answer: *answer }
        }
        SourceEvent::ChannelsMove => SourceEvent::ChannelsMove,
        SourceEvent::CalledOff => SourceEvent::CalledOff,
    }
}

fn run_here() -> OperatorOverride {
    OperatorOverride::RunHere(OperatorsWord::given_by_a_person())
}

fn give_up() -> OperatorOverride {
    OperatorOverride::GiveUp(OperatorsWord::given_by_a_person())
}

fn check_cell(mut source: Source, kind: Kind, input: Input) {
    let from = source.phase();
    let had = permits(&source);
    let brings = matches!(input, Input::Event(SourceEvent::Paused { .. }));
    let told = format!("{from:?} {kind:?}");
    let is_all_sent = match (&source.state, &input) {
        (State::Switching { pages_sent, state_sent, .. }, Input::Event(event)) => {
            (*pages_sent || matches!(event, SourceEvent::LastRoundSent { .. }))
                && (*state_sent || matches!(event, SourceEvent::StateSaved { .. }))
        }
        _ => true,
    };
    source.advance(T0, kind, input);
    let to = source.phase();

    let gone =
        matches!(to, SourcePhase::Confirming | SourcePhase::Completed | SourcePhase::GivenUp);
    let second = brings && (had == 1 || gone);
    let expected =
        if gone || second { had.min(permits(&source)) } else { had + usize::from(brings) };
    assert_eq!(permits(&source), expected, "{told} led to {to:?}");

    let finished =
        source.actions.iter().filter(|action| matches!(action, SourceAction::Finish(_))).count();
    let answers = [Kind::Fate, Kind::OverriddenRunHere, Kind::OverriddenGiveUp];
    let answered = answers.contains(&kind) && from == SourcePhase::Undecided;
    let ended = to.is_over() && to != from;
    assert_eq!(finished, usize::from(ended || answered), "{told} led to {to:?}");
    if reaction(from, kind) == Reaction::Ignore {
        assert!(to == from && source.actions.is_empty(), "{told} is to be ignored");
    }
    let committing =
        source.actions.iter().any(|a| matches!(a, SourceAction::Send(Control::Commit(_))));
    assert_eq!(committing, to == SourcePhase::Committing && from != to, "{told}");
    assert!(is_all_sent || !committing, "{told}: a commit before the last pages or the state");
    let resuming = source.actions.iter().any(|a| matches!(a, SourceAction::Resume { .. }));
    assert!(!(committing && resuming), "{told}");
}

/// Wherever a step panics: a guest that stood runs on, unless its commit may be on its way.
#[test]
fn a_step_that_panics_loses_no_permit() {
    for index in 0..states().len() {
        for (kind, input) in inputs() {
            let mut source = machine(false, states().swap_remove(index));
            let (from, told) = (source.phase(), format!("{:?} {kind:?}", source.phase()));
            let paused = matches!(input, Input::Event(SourceEvent::Paused { .. }));
            source.panics_next = true;
            let step = AssertUnwindSafe(|| source.advance(T0, kind, input));
            assert!(catch_unwind(step).is_err());
            source.on_event(T0, SourceEvent::HostFailed { reason: some_reason() });

            let to = source.phase();
            let stood = match from {
                SourcePhase::Switching | SourcePhase::Comparing => true,
                SourcePhase::Pausing | SourcePhase::Withdrawing => paused,
                _ => false,
            };
            let actions = actions(&mut source);
            let goes_on = actions.iter().any(|a| matches!(a, SourceAction::Resume { .. }));
            let commits =
                actions.iter().any(|a| matches!(a, SourceAction::Send(Control::Commit(_))));
            assert!(!stood || goes_on != commits, "{told} led to {to:?}");
            assert_eq!(commits, stood && to == SourcePhase::Committing, "{told} led to {to:?}");
        }
    }
}

fn actions(source: &mut Source) -> Vec<SourceAction> {
    core::iter::from_fn(|| source.poll_action()).collect()
}

fn undecided() -> Source {
    let mut source = machine(false, State::Committing { lost: None });
    source.deadline = Some((T0, Duration::from_secs(2)));
    source.on_event(T0, SourceEvent::ControlLost { reason: some_reason() });
    assert_eq!(source.phase(), SourcePhase::Committing, "the answer may be had by a question");
    source.on_timeout(T0);
    source
}

#[test]
fn undecided_stays_so_until_something_is_proved() {
    let mut source = undecided();
    assert_eq!(source.phase(), SourcePhase::Undecided);
    let told = actions(&mut source);
    let [SourceAction::Finish(SourceOutcome::Undecided { reason })] = &told[..] else {
        panic!("{told:?}");
    };
    assert_eq!(
        reason.to_string(),
        "the commit was sent but not confirmed: control connection lost: a reason"
    );
    for (instance, fate, why) in [
        (HERE, Fate::Pending, UndecidedReason::Pending),
        (ELSEWHERE, Fate::Unknown, UndecidedReason::OtherProcess),
        (ELSEWHERE, Fate::Abandoned, UndecidedReason::OtherProcess),
        (ELSEWHERE, Fate::Committed, UndecidedReason::OtherProcess),
    ] {
        source.on_event(T0, SourceEvent::Fate(Answer { instance, fate }));
        let told = actions(&mut source);
        let [SourceAction::Finish(SourceOutcome::Undecided { reason })] = &told[..] else {
            panic!("{fate:?} {told:?}");
        };
        assert_eq!(*reason, why);
    }
    assert_eq!(source.poll_timeout(), None);
    source.on_event(T0, SourceEvent::Cancel { reason: some_reason() });
    assert!(actions(&mut source).is_empty());
}

fn reason_of(outcome: &SourceAction) -> Option<String> {
    match outcome {
        SourceAction::Finish(SourceOutcome::Failed { reason }) => Some(reason.to_string()),
        _ => None,
    }
}

#[test]
fn the_destinations_promise_brings_the_guest_back() {
    let mut source = undecided();
    actions(&mut source);
    source.on_event(T0, SourceEvent::Fate(Answer { instance: HERE, fate: Fate::Abandoned }));
    let told = actions(&mut source);
    assert!(matches!(told[0], SourceAction::Resume { running: true, .. }), "{told:?}");
    assert_eq!(reason_of(&told[1]), Some(Failure::NeverArrived.to_string()));
}

#[test]
fn an_operator_decides_where_the_destination_is_gone() {
    for answer in [None, Some(Answer { instance: ELSEWHERE, fate: Fate::Unknown })] {
        let mut source = undecided();
        actions(&mut source);
        source.on_event(T0, SourceEvent::Overridden { by: run_here(), answer });
        let told = actions(&mut source);
        assert!(matches!(told[0], SourceAction::Resume { running: true, .. }), "{told:?}");
        assert_eq!(reason_of(&told[1]), Some(Failure::TakenBack.to_string()));

        let mut source = undecided();
        actions(&mut source);
        source.on_event(T0, SourceEvent::Overridden { by: give_up(), answer });
        let told = actions(&mut source);
        assert!(matches!(told[..], [SourceAction::Finish(SourceOutcome::GivenUp)]), "{told:?}");
        assert_eq!(source.phase(), SourcePhase::GivenUp);
    }
}

#[test]
fn the_destination_knows_better_than_an_operator() {
    for (fate, phase) in [
        (Fate::Committed, SourcePhase::Completed),
        (Fate::Abandoned, SourcePhase::Failed),
        (Fate::Pending, SourcePhase::Undecided),
    ] {
        for by in [run_here(), give_up()] {
            let mut source = undecided();
            let answer = Some(Answer { instance: HERE, fate });
            source.on_event(T0, SourceEvent::Overridden { by, answer });
            assert_eq!(source.phase(), phase, "{fate:?}");
        }
    }
}

#[test]
fn only_an_undecided_attempt_can_be_overridden() {
    let mut source = machine(false, State::Committing { lost: None });
    source.on_event(T0, SourceEvent::Overridden { by: run_here(), answer: None });
    assert_eq!(source.phase(), SourcePhase::Committing);
    assert!(actions(&mut source).is_empty());
}

#[test]
fn a_commit_confirmed_late_is_confirmed() {
    let mut source = machine(false, State::Committing { lost: None });
    source.deadline = Some((T0, Duration::from_secs(2)));
    source.on_timeout(T0);
    assert_eq!(source.phase(), SourcePhase::Undecided);
    source.on_event(T0, SourceEvent::Received(Control::Committed(committed())));
    assert_eq!(source.phase(), SourcePhase::Confirming);
    let late = source.poll_timeout().unwrap();
    assert_eq!(late, T0.after(limits::ALIVE_MAX));
    source.on_timeout(late);
    assert_eq!(source.phase(), SourcePhase::Completed);
    let told = actions(&mut source);
    assert!(matches!(
        told[..],
        [
            SourceAction::Finish(SourceOutcome::Undecided { .. }),
            SourceAction::MovedAway(_),
            SourceAction::Finish(SourceOutcome::Completed { committed: Some(_), alive: None }),
        ]
    ));
}

#[test]
fn a_cancel_while_pausing_waits_for_the_permit() {
    let mut source = machine(false, State::Pausing { last_round: 5 });
    source.on_event(T0, SourceEvent::Cancel { reason: some_reason() });
    assert_eq!(source.phase(), SourcePhase::Withdrawing);
    let told = actions(&mut source);
    assert!(matches!(told[..], [SourceAction::Send(Control::Abandon(_))]), "{told:?}");
    let permit = RunPermit::for_new_guest();
    source.on_event(T0, SourceEvent::Paused { permit, running: false });
    let told = actions(&mut source);
    assert!(matches!(
        told[..],
        [
            SourceAction::Resume { running: false, .. },
            SourceAction::Finish(SourceOutcome::Cancelled),
        ]
    ));
}

#[test]
fn a_silent_destination_is_noticed() {
    let mut source = machine(false, State::Deciding { round: 0 });
    source.deadline = None;
    let mut pings = 0;
    while source.phase() == SourcePhase::Deciding {
        let now = source.poll_timeout().unwrap();
        assert!(now <= T0.after(limits::SILENCE_MAX));
        source.on_timeout(now);
        pings += actions(&mut source)
            .iter()
            .filter(|action| matches!(action, SourceAction::Send(Control::Ping(_))))
            .count();
    }
    assert_eq!(source.phase(), SourcePhase::Failed);
    assert!((9..=10).contains(&pings), "{pings} pings");
}

#[test]
fn deadlines_are_as_documented() {
    let mut source = Source::new(T0, config(false));
    source.on_timeout(T0.after(limits::SETUP_MAX));
    let told = actions(&mut source);
    let failed = told.iter().find_map(reason_of);
    assert_eq!(failed.as_deref(), Some("setting up the destination took longer than 30s"));
}

#[test]
fn a_state_too_long_to_send_fails_before_the_commit() {
    let state = State::Switching { last_round: 5, pages_sent: true, state_sent: false };
    let mut source = machine(false, state);
    source.on_event(T0, SourceEvent::StateSaved { bytes: vec![0; STATE_BYTES_MAX + 1] });
    let told = actions(&mut source);
    assert!(matches!(told[0], SourceAction::Resume { .. }), "{told:?}");
    assert_eq!(source.phase(), SourcePhase::Failed);
}

#[test]
fn memory_that_differs_is_not_handed_over() {
    for ours_first in [true, false] {
        let state = State::Comparing { last_round: 5, ours: None, theirs: None };
        let mut source = machine(true, state);
        let ours = SourceEvent::OwnDigest([3; 32]);
        let theirs = SourceEvent::Received(Control::Digest(Digest { digest: [4; 32] }));
        let [first, second] = if ours_first { [ours, theirs] } else { [theirs, ours] };
        source.on_event(T0, first);
        assert!(actions(&mut source).is_empty());
        source.on_event(T0, second);
        let told = actions(&mut source);
        assert!(matches!(told[0], SourceAction::Resume { .. }), "{told:?}");
        assert!(matches!(told[1], SourceAction::Send(Control::Abandon(_))), "{told:?}");
        assert_eq!(reason_of(&told[2]), Some(Failure::MemoryDiffers.to_string()));
    }
}

/// What the final state says of the clocks, after a ping that took 100 ns there and back.
fn clock_sent(theirs: &ClockKey, offset_ns: i64) -> Option<MeasuredClock> {
    let mut config = config(false);
    config.clock_key = Some(ClockKey::new(b"here"));
    let clock_proof = Some(theirs.proof(config.setup.migration));
    let mut source = Source::new(T0, config);
    source.on_event(
        T0.after(Duration::from_nanos(100)),
        SourceEvent::Received(Control::Pong(Pong {
            sent_ns: T0.0,
            answered_ns: (T0.0 + 50).saturating_add_signed(offset_ns),
        })),
    );
    let last_round = 5;
    source.state = State::Switching { last_round, pages_sent: true, state_sent: false };
    source.peer = Some(SetupDone { clock_proof, ..done() });
    let saved = SourceEvent::StateSaved { bytes: vec![1] };
    source.on_event(T0.after(Duration::from_nanos(100)), saved);
    actions(&mut source).into_iter().find_map(|action| match action {
        SourceAction::Send(Control::FinalState(state)) => Some(state.clock),
        _ => None,
    })?
}

#[test]
fn the_final_state_says_how_the_clocks_differ() {
    let measured = |offset_ns| Some(MeasuredClock { offset_ns, error_ns: 50 });
    assert_eq!(clock_sent(&ClockKey::new(b"there"), 590_000_000_000), measured(590_000_000_000));
    assert_eq!(clock_sent(&ClockKey::new(b"there"), -30), measured(-30));
    // One host, and the pings agree.
    let one = Some(MeasuredClock { offset_ns: 0, error_ns: 0 });
    assert_eq!(clock_sent(&ClockKey::new(b"here"), -30), one);
}

/// A clone of a host has its twin's names.
#[test]
fn equal_names_are_not_one_clock_if_the_pings_say_otherwise() {
    let measured = MeasuredClock { offset_ns: 1_000_000_000_000, error_ns: 50 };
    assert_eq!(clock_sent(&ClockKey::new(b"here"), 1_000_000_000_000), Some(measured));
}

/// A frozen destination's source would be undecided, and its guest stopped, for as long as it is.
#[test]
fn a_destination_that_was_not_heard_lately_gets_no_commit() {
    let state = State::Switching { last_round: 5, pages_sent: true, state_sent: false };
    let mut source = machine(false, state);
    let late = T0.after(limits::UNHEARD_MAX + Duration::from_millis(1));
    source.on_event(late, SourceEvent::StateSaved { bytes: vec![1] });
    let told = actions(&mut source);
    let [SourceAction::Send(Control::FinalState(_)), SourceAction::Send(Control::Ping(ping))] =
        &told[..]
    else {
        panic!("{told:?}");
    };
    assert_eq!(source.phase(), SourcePhase::Switching);
    let pong = Control::Pong(Pong { sent_ns: ping.sent_ns, answered_ns: 0 });
    source.on_event(late, SourceEvent::Received(pong));
    let told = actions(&mut source);
    assert!(matches!(told[..], [SourceAction::Send(Control::Commit(_))]), "{told:?}");
}

/// 300 ms are accepted: a second in all, and half of it again on both sides of the commit.
#[test]
fn the_whole_blackout_has_one_bound() {
    let pausing = || machine(false, State::Pausing { last_round: 5 });
    let paused = || SourceEvent::Paused { permit: RunPermit::for_new_guest(), running: true };
    let mut source = pausing();
    source.on_event(T0, paused());
    actions(&mut source);
    let bound = Duration::from_secs(1);
    source.on_timeout(T0.after(bound));
    let told = actions(&mut source);
    assert!(matches!(told[0], SourceAction::Resume { .. }), "{told:?}");
    for (stopped, complete) in [(100, 900), (700, 500)] {
        let mut source = pausing();
        source.on_event(T0, paused());
        let now = T0.after(Duration::from_millis(stopped));
        source.pinger.silence().heard(now);
        source.on_event(now, SourceEvent::LastRoundSent { round: 5 });
        source.on_event(now, SourceEvent::StateSaved { bytes: vec![1] });
        let told = actions(&mut source);
        let Some(SourceAction::Send(Control::Commit(commit))) = told.last() else {
            panic!("{told:?}");
        };
        assert_eq!(commit.complete_within_ms, Some(complete));
        let answer = now.after(Duration::from_millis(u64::from(complete)) + bound / 2);
        assert_eq!(source.poll_timeout(), Some(answer));
        source.on_timeout(answer);
        assert_eq!(source.phase(), SourcePhase::Undecided);
    }
}

#[test]
fn a_stop_that_is_called_off_lets_the_guest_run_and_the_round_go_on() {
    let switching = |pages_sent, state_sent| {
        machine(false, State::Switching { last_round: 5, pages_sent, state_sent })
    };
    let mut source = switching(false, false);
    source.rehearsed = Some(Rehearsed { load_ns: 1, start_ns: 1 });
    source.on_event(T0, SourceEvent::CalledOff);
    let told = actions(&mut source);
    let [
        SourceAction::Resume { running: true, .. },
        SourceAction::Send(Control::SwitchoverSoon(soon)),
        SourceAction::Send(Control::Ping(ping)),
    ] = &told[..]
    else {
        panic!("{told:?}");
    };
    assert_eq!((soon.last_round, soon.called_off), (5, Some(true)));
    source.on_event(T0, SourceEvent::RoundSent { round: 5 });
    let received = Control::RoundReceived(RoundReceived { round: 5 });
    source.on_event(T0, SourceEvent::Received(received));
    // Found by the simulated world: the next rounds overtook what was said of this one.
    assert_eq!(source.phase(), SourcePhase::Sending);
    let pong = Control::Pong(Pong { sent_ns: ping.sent_ns, answered_ns: 0 });
    source.on_event(T0, SourceEvent::Received(pong));
    assert_eq!(source.phase(), SourcePhase::Deciding);
    for (pages_sent, state_sent) in [(true, false), (false, true)] {
        let mut source = switching(pages_sent, state_sent);
        source.on_event(T0, SourceEvent::CalledOff);
        let told = actions(&mut source);
        assert!(matches!(told[0], SourceAction::Resume { .. }), "{told:?}");
        assert_eq!(source.phase(), SourcePhase::Failed);
    }
    // An older destination would give up at the message.
    let mut source = switching(false, false);
    source.peer = Some(SetupDone { takes_call_off: None, ..done() });
    assert!(!source.may_call_off());
    source.on_event(T0, SourceEvent::CalledOff);
    assert_eq!(source.phase(), SourcePhase::Failed);
}

#[test]
fn what_is_no_message_is_the_peers_fault_and_it_is_told_so() {
    let mut source = machine(false, State::Deciding { round: 4 });
    source.on_event(T0, SourceEvent::Malformed { reason: some_reason() });
    let told = actions(&mut source);
    let [
        SourceAction::Send(Control::Abandon(why)),
        SourceAction::Finish(SourceOutcome::Failed { reason }),
    ] = &told[..]
    else {
        panic!("{told:?}");
    };
    assert!(why.reason.contains("a reason"), "{}", why.reason);
    assert_eq!(reason.fault(), crate::Fault::Peer);
}

#[test]
fn a_round_is_awaited_for_as_long_as_it_moves() {
    let mut source = machine(false, State::Sending { round: 4, sent: false, received: false });
    source.deadline = None;
    source.on_event(T0, SourceEvent::RoundSent { round: 4 });
    let mut now = T0;
    for _ in 0..3 {
        now = now.after(limits::ROUND_ACK_MAX - Duration::from_secs(1));
        source.pinger.silence().heard(now);
        source.on_event(now, SourceEvent::ChannelsMove);
        source.on_timeout(now);
        assert_eq!(source.phase(), SourcePhase::Sending);
    }
    now = now.after(limits::ROUND_ACK_MAX);
    source.pinger.silence().heard(now);
    source.on_timeout(now);
    assert_eq!(source.phase(), SourcePhase::Failed);
}

#[test]
fn a_guest_that_is_known_to_run_there_is_not_undecided() {
    let mut source = machine(false, State::Committing { lost: None });
    source.on_event(T0, SourceEvent::ControlLost { reason: some_reason() });
    source.on_event(T0, SourceEvent::Fate(Answer { instance: HERE, fate: Fate::Pending }));
    assert_eq!(source.phase(), SourcePhase::Committing);
    assert!(actions(&mut source).is_empty());
    source.on_event(T0, SourceEvent::Fate(Answer { instance: HERE, fate: Fate::Committed }));
    let told = actions(&mut source);
    assert!(
        matches!(told[..], [SourceAction::Finish(SourceOutcome::Completed { .. })]),
        "{told:?}"
    );
}
