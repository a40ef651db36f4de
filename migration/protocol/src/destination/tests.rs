//! The destination alone: its table, every cell of it, and what it promises.

use super::state::{Check, Load, Lost, State};
use super::table::{Kind, fallback, reaction};
use super::{
    Destination, DestinationAction, DestinationConfig, DestinationEvent, DestinationPhase, Input,
};
use crate::permit::Arrival;
use crate::reaction::{Reaction, print_table};
use crate::{Ledger, limits};
use core::time::Duration;
use martlet_units::{ClockOffset, Instant};
use martlet_wire::control::{
    Abandon, Alive, Commit, Control, Fate, InstanceId, MeasuredClock, MigrationId, Ping, Setup,
    State as SavedState, SwitchoverSoon, WireRange,
};
use martlet_wire::frame::Kind as MessageKind;

const T0: Instant = Instant(1_000_000_000);
const ID: MigrationId = MigrationId([7; 16]);
const LAST: u32 = 5;

fn setup(migration: MigrationId) -> Setup {
    Setup {
        migration,
        regions: vec![WireRange { start_gfn: 0, pages: 16 }],
        machine: Vec::new(),
        channels: 2,
        boot_id: [0; 16],
    }
}

fn commit() -> Commit {
    Commit { migration: ID, last_round: LAST, running: true, complete_within_ms: None }
}

fn committing(load: Load) -> State {
    State::Committing { last_round: LAST, load, arrival: Arrival::of(commit()), commit_at: T0 }
}

/// Every state with every combination of what it waits for.
fn states() -> Vec<State> {
    let mut states = vec![State::Waiting, State::Building, State::Accepting];
    for rehearsing in [false, true] {
        states.push(State::Receiving { rehearsing, lost: None });
        for last_barrier in [None, Some(LAST)] {
            let lost = Some(Lost { last_barrier, reason: reason() });
            states.push(State::Receiving { rehearsing, lost });
        }
    }
    for load in [Load::Missing, Load::Loading, Load::Loaded] {
        for check in [Check::NotAsked, Check::Asked, Check::Computing, Check::Sent] {
            states.push(State::Armed { last_round: LAST, load, check });
        }
    }
    states.extend([committing(Load::Loading), committing(Load::Loaded)]);
    states.push(State::Starting { commit_at: T0, ready_at: T0 });
    states.extend([State::Running, State::Arrived, State::Abandoned]);
    states
}

fn reason() -> String {
    "a reason".to_owned()
}

/// Events of every kind, with right and wrong values.
fn events() -> Vec<DestinationEvent> {
    let message = DestinationEvent::Received;
    let mut events = vec![
        message(Control::Setup(setup(ID))),
        message(Control::Rehearse(SavedState::new(vec![1]))),
        message(Control::FinalState(SavedState::new(vec![2]))),
        message(Control::AskDigest),
        message(Control::Commit(commit())),
        message(Control::Commit(Commit { last_round: LAST - 1, ..commit() })),
        message(Control::Commit(Commit { migration: MigrationId([8; 16]), ..commit() })),
        message(Control::Abandon(Abandon::because("a reason"))),
        message(Control::Ping(Ping { sent_ns: 1 })),
        message(Control::ChannelsReady),
        DestinationEvent::Built,
        DestinationEvent::HostFailed { reason: reason() },
        DestinationEvent::ChannelsConnected,
        DestinationEvent::StateLoaded { load_ns: 1 },
        DestinationEvent::OwnDigest([3; 32]),
        DestinationEvent::Started { at: T0 },
        DestinationEvent::Alive(Alive {
            cpu_ns: 0,
            load_begin_ns: None,
            load_end_ns: None,
            devices: None,
            wall_clock_ns: None,
            observed: None,
        }),
        DestinationEvent::Cancel { reason: reason() },
        DestinationEvent::Malformed { reason: reason() },
        DestinationEvent::ControlLost { reason: reason() },
    ];
    for round in [LAST - 1, LAST, LAST + 1, u32::MAX] {
        events.push(message(Control::SwitchoverSoon(SwitchoverSoon {
            last_round: round,
            called_off: None,
        })));
        events.push(DestinationEvent::RoundReceived { round });
        events.push(DestinationEvent::ChannelLost { last_barrier: Some(round), reason: reason() });
    }
    events.push(DestinationEvent::ChannelLost { last_barrier: None, reason: reason() });
    events
}

fn inputs() -> Vec<(Kind, Input)> {
    let mut inputs: Vec<(Kind, Input)> =
        events().into_iter().map(|event| (Kind::of(&event), Input::Event(event))).collect();
    inputs.push((Kind::Silence, Input::Silence));
    inputs.push((Kind::Deadline, Input::Deadline { limit: Duration::from_secs(1) }));
    inputs
}

/// A machine in some state; `rounds` were received.
fn machine(rounds: u32, state: State) -> Destination {
    let config = DestinationConfig { token: [9; 16], clock_key: None };
    let mut destination = Destination::new(T0, config, Ledger::new(InstanceId([1; 16])));
    destination.rounds = rounds;
    destination.state = state;
    let phase = destination.phase();
    if phase != DestinationPhase::Waiting {
        destination.migration = Some(ID);
        destination.channels = 2;
    }
    match phase {
        DestinationPhase::Starting | DestinationPhase::Running | DestinationPhase::Arrived => {
            destination.ledger.record_arrived(ID);
        }
        DestinationPhase::Abandoned => destination.ledger.record_abandoned(ID, false),
        _ => {}
    }
    destination
}

#[test]
fn the_table_is_as_reviewed() {
    insta::assert_snapshot!(print_table(DestinationPhase::ALL, Kind::ALL, reaction, fallback));
}

#[test]
fn all_states_and_kinds_are_tried() {
    for &phase in DestinationPhase::ALL {
        assert!(states().iter().any(|state| state.phase() == phase), "{phase:?}");
    }
    for &kind in Kind::ALL {
        assert!(inputs().iter().any(|(of, _)| *of == kind), "{kind:?}");
    }
}

/// Every input in every state: the machine obeys its table, starts only what it may start, and
/// never takes a promise back.
#[test]
fn every_cell_of_the_table_holds() {
    for index in 0..states().len() {
        for rounds in [0, LAST, LAST + 1, u32::MAX] {
            for (kind, input) in inputs() {
                check_cell(machine(rounds, states().swap_remove(index)), kind, input);
            }
        }
    }
}

fn check_cell(mut destination: Destination, kind: Kind, input: Input) {
    let from = destination.phase();
    let promised = destination.fate(ID);
    let told = format!("{from:?} {kind:?} after {} rounds", destination.rounds);
    let complete = matches!(
        (&destination.state, &input),
        (State::Committing { load: Load::Loaded, .. }, _)
            | (State::Armed { load: Load::Loaded, .. }, _)
            | (
                State::Committing { load: Load::Loading, .. },
                Input::Event(DestinationEvent::StateLoaded { .. })
            )
    );
    destination.advance(T0, kind, input);
    let to = destination.phase();

    let is_start = |action: &&DestinationAction| matches!(action, DestinationAction::Start { .. });
    let starts = destination.actions.iter().filter(is_start).count();
    assert_eq!(starts, usize::from(to == DestinationPhase::Starting && from != to), "{told}");
    if starts == 1 {
        assert!(complete && destination.rounds > LAST, "{told} started too early");
    }
    match promised {
        Fate::Abandoned | Fate::Committed => assert_eq!(destination.fate(ID), promised, "{told}"),
        Fate::Unknown | Fate::Pending => {}
    }
    let finished = destination
        .actions
        .iter()
        .filter(|action| matches!(action, DestinationAction::Finish(_)))
        .count();
    assert_eq!(finished, usize::from(to.is_over() && to != from), "{told} led to {to:?}");
    if reaction(from, kind) == Reaction::Ignore {
        assert!(to == from && destination.actions.is_empty(), "{told} is to be ignored");
    }
}

fn actions(destination: &mut Destination) -> Vec<DestinationAction> {
    core::iter::from_fn(|| destination.poll_action()).collect()
}

#[test]
fn a_commit_waits_for_pages_and_state() {
    for pages_first in [false, true] {
        let mut destination = machine(LAST, committing(Load::Loading));
        let pages = DestinationEvent::RoundReceived { round: LAST };
        let state = DestinationEvent::StateLoaded { load_ns: 1 };
        let [first, second] = if pages_first { [pages, state] } else { [state, pages] };
        destination.on_event(T0, first);
        assert_eq!(destination.fate(ID), Fate::Pending);
        assert!(actions(&mut destination).is_empty());
        destination.on_event(T0, second);
        assert!(matches!(
            actions(&mut destination)[..],
            [DestinationAction::Start { running: true, .. }]
        ));
        assert_eq!(destination.fate(ID), Fate::Committed);
    }
}

#[test]
fn an_incomplete_commit_is_refused_for_ever() {
    for event in [
        DestinationEvent::HostFailed { reason: reason() },
        DestinationEvent::ChannelLost { last_barrier: Some(LAST - 1), reason: reason() },
        DestinationEvent::ChannelLost { last_barrier: None, reason: reason() },
        DestinationEvent::Received(Control::Abandon(Abandon::because("?"))),
        // The owner ends this process.
        DestinationEvent::Cancel { reason: reason() },
    ] {
        let mut destination = machine(LAST, committing(Load::Loading));
        destination.on_event(T0, event);
        assert!(matches!(
            actions(&mut destination)[..],
            [
                DestinationAction::Send(Control::CommitRefused(_)),
                DestinationAction::Discard,
                DestinationAction::Finish(_),
            ]
        ));
        let state = DestinationEvent::StateLoaded { load_ns: 1 };
        destination.on_event(T0, state);
        destination.on_event(T0, DestinationEvent::RoundReceived { round: LAST });
        assert!(actions(&mut destination).is_empty());
        assert_eq!(destination.fate(ID), Fate::Abandoned);
        assert_eq!(destination.into_ledger().fate(ID), Fate::Abandoned);
    }
}

#[test]
fn a_lost_connection_does_not_stop_a_committed_guest() {
    let mut destination = machine(LAST, committing(Load::Loaded));
    destination.on_event(T0, DestinationEvent::ControlLost { reason: reason() });
    let lost = DestinationEvent::ChannelLost { last_barrier: Some(LAST), reason: reason() };
    destination.on_event(T0, lost);
    destination.on_event(T0, DestinationEvent::RoundReceived { round: LAST });
    assert_eq!(destination.phase(), DestinationPhase::Starting);
    destination.on_event(T0, DestinationEvent::Started { at: T0 });
    assert_eq!(destination.phase(), DestinationPhase::Arrived);
}

/// The source sent everything and died. Its data channels are seen to end before its last
/// messages are read.
#[test]
fn channels_lost_before_the_last_messages_are_read_may_have_done_their_work() {
    let mut destination = machine(LAST, State::Receiving { rehearsing: false, lost: None });
    destination.on_event(T0, DestinationEvent::RoundReceived { round: LAST });
    for _ in 0..2 {
        let last_barrier = Some(LAST);
        let lost = DestinationEvent::ChannelLost { last_barrier, reason: reason() };
        destination.on_event(T0, lost);
    }
    let soon = SwitchoverSoon { last_round: LAST, called_off: None };
    let saved = SavedState::new(vec![1]);
    for message in
        [Control::SwitchoverSoon(soon), Control::FinalState(saved), Control::Commit(commit())]
    {
        destination.on_event(T0, DestinationEvent::Received(message));
    }
    destination.on_event(T0, DestinationEvent::ControlLost { reason: reason() });
    destination.on_event(T0, DestinationEvent::StateLoaded { load_ns: 1 });
    assert_eq!(destination.phase(), DestinationPhase::Starting);
}

#[test]
fn a_channel_lost_too_early_is_noticed_in_time() {
    let mut destination = machine(LAST, State::Receiving { rehearsing: false, lost: None });
    let last_barrier = Some(LAST - 1);
    destination.on_event(T0, DestinationEvent::ChannelLost { last_barrier, reason: reason() });
    let at = destination.poll_timeout().unwrap();
    assert_eq!(at, T0.after(limits::LOST_CHANNEL_GRACE));
    destination.on_timeout(at);
    assert_eq!(destination.phase(), DestinationPhase::Abandoned);
}

#[test]
fn a_migration_is_tried_once() {
    let mut destination = machine(0, State::Building);
    destination.on_event(T0, DestinationEvent::ControlLost { reason: reason() });
    let config = DestinationConfig { token: [9; 16], clock_key: None };
    let mut second = Destination::new(T0, config, destination.into_ledger());
    second.on_event(T0, DestinationEvent::Received(Control::Setup(setup(ID))));
    assert_eq!(second.phase(), DestinationPhase::Abandoned);
    assert_eq!(second.fate(ID), Fate::Abandoned);
    let mut third = Destination::new(T0, config, second.into_ledger());
    let other = MigrationId([8; 16]);
    third.on_event(T0, DestinationEvent::Received(Control::Setup(setup(other))));
    assert_eq!(third.fate(other), Fate::Pending);
}

#[test]
fn pings_are_answered_while_the_machine_is_built() {
    let mut destination = machine(0, State::Building);
    destination.on_event(T0, DestinationEvent::Received(Control::Ping(Ping { sent_ns: 5 })));
    let told = actions(&mut destination);
    let [DestinationAction::Send(Control::Pong(pong))] = &told[..] else { panic!("{told:?}") };
    assert_eq!((pong.sent_ns, pong.answered_ns), (5, T0.0));
}

#[test]
fn a_machine_built_too_late_is_dropped() {
    let mut destination = machine(0, State::Building);
    destination.on_event(T0, DestinationEvent::ControlLost { reason: reason() });
    actions(&mut destination);
    destination.on_event(T0, DestinationEvent::Built);
    assert!(matches!(actions(&mut destination)[..], [DestinationAction::Discard]));
}

/// Found by the simulated world: with a data channel that is silent, the source waited for a digest
/// of pages that never came, with its guest stopped.
#[test]
fn a_digest_of_pages_that_never_come_is_not_waited_for() {
    let check = Check::NotAsked;
    let mut destination =
        machine(LAST, State::Armed { last_round: LAST, load: Load::Loaded, check });
    destination.on_event(T0, DestinationEvent::Received(Control::AskDigest));
    let at = T0.after(limits::COMMIT_COMPLETE_MAX);
    assert_eq!(destination.poll_timeout(), Some(at));
    destination.on_timeout(at);
    assert_eq!(destination.phase(), DestinationPhase::Abandoned);
}

#[test]
fn a_channel_lost_before_the_last_round_ends_the_attempt_when_that_is_announced() {
    let lost = Some(Lost { last_barrier: Some(LAST - 1), reason: reason() });
    let mut destination = machine(LAST, State::Receiving { rehearsing: false, lost });
    let soon = SwitchoverSoon { last_round: LAST, called_off: None };
    destination.on_event(T0, DestinationEvent::Received(Control::SwitchoverSoon(soon)));
    assert_eq!(destination.phase(), DestinationPhase::Abandoned);
}

#[test]
fn a_commit_that_contradicts_what_came_before_is_refused() {
    let armed = |load, check| State::Armed { last_round: LAST, load, check };
    let other = MigrationId([8; 16]);
    for (state, commit) in [
        (armed(Load::Loaded, Check::NotAsked), Commit { migration: other, ..commit() }),
        (armed(Load::Loaded, Check::NotAsked), Commit { last_round: LAST - 1, ..commit() }),
        (armed(Load::Loaded, Check::NotAsked), Commit { last_round: LAST + 1, ..commit() }),
        (armed(Load::Missing, Check::NotAsked), commit()),
        (armed(Load::Loaded, Check::Computing), commit()),
    ] {
        let told = format!("{state:?} {commit:?}");
        let mut destination = machine(LAST + 1, state);
        destination.on_event(T0, DestinationEvent::Received(Control::Commit(commit)));
        let refused = DestinationAction::Send(Control::CommitRefused(Abandon::because("")));
        let first = &actions(&mut destination)[0];
        assert_eq!(
            core::mem::discriminant(first),
            core::mem::discriminant(&refused),
            "{told} led to {first:?}"
        );
        assert_eq!(destination.fate(ID), Fate::Abandoned, "{told}");
    }
}

#[test]
fn a_silent_source_is_noticed_until_its_commit_and_not_after() {
    let armed = State::Armed { last_round: LAST, load: Load::Missing, check: Check::NotAsked };
    let receiving = State::Receiving { rehearsing: false, lost: None };
    for state in [State::Accepting, receiving, armed] {
        let mut destination = machine(LAST, state);
        destination.deadline = None;
        let at = destination.poll_timeout().unwrap();
        assert_eq!(at, T0.after(limits::SILENCE_MAX));
        destination.on_timeout(at);
        assert_eq!(destination.phase(), DestinationPhase::Abandoned);
    }
    let mut destination = machine(LAST, committing(Load::Loaded));
    destination.deadline = None;
    destination.on_timeout(T0.after(limits::SILENCE_MAX));
    assert_eq!(destination.phase(), DestinationPhase::Committing);
}

#[test]
fn the_final_state_is_loaded_with_the_clock_that_came_with_it() {
    for (sent, known) in [
        (None, None),
        (
            Some(MeasuredClock { offset_ns: 5, error_ns: 3 }),
            Some(ClockOffset { ns: -5, error: Duration::from_nanos(3) }),
        ),
    ] {
        let (load, check) = (Load::Missing, Check::NotAsked);
        let mut destination = machine(LAST, State::Armed { last_round: LAST, load, check });
        let saved = SavedState { clock: sent, ..SavedState::new(vec![1]) };
        destination.on_event(T0, DestinationEvent::Received(Control::FinalState(saved)));
        let loaded = actions(&mut destination).into_iter().find_map(|action| match action {
            DestinationAction::LoadState { rehearsal: false, clock, .. } => Some(clock),
            _ => None,
        });
        assert_eq!(loaded, Some(known));
    }
}

#[test]
fn a_malformed_message_gets_its_reason() {
    let mut destination = machine(LAST, State::Receiving { rehearsing: false, lost: None });
    destination.on_event(T0, DestinationEvent::Malformed { reason: "unknown kind 99".into() });
    let told = actions(&mut destination);
    let [DestinationAction::Send(Control::Abandon(why)), ..] = &told[..] else {
        panic!("{told:?}")
    };
    assert!(why.reason.contains("unknown kind 99"), "{}", why.reason);
}

#[test]
fn garbage_behind_a_commit_does_not_take_the_guest_away() {
    let mut destination = machine(LAST, committing(Load::Loaded));
    destination.on_event(T0, DestinationEvent::Malformed { reason: reason() });
    destination.on_event(T0, DestinationEvent::RoundReceived { round: LAST });
    assert_eq!(destination.phase(), DestinationPhase::Starting);
}

/// Nobody makes this side keep megabytes that it would then refuse.
#[test]
fn a_long_message_is_let_in_only_where_it_has_a_place() {
    let receiving = || State::Receiving { rehearsing: false, lost: None };
    let armed = || State::Armed { last_round: LAST, load: Load::Missing, check: Check::NotAsked };
    for index in 0..states().len() {
        let destination = machine(0, states().swap_remove(index));
        let admitted: Vec<MessageKind> =
            [MessageKind::SETUP, MessageKind::REHEARSE, MessageKind::FINAL_STATE]
                .into_iter()
                .filter(|kind| destination.admits(*kind))
                .collect();
        let phase = destination.phase();
        let wanted: &[MessageKind] = match phase {
            DestinationPhase::Waiting => &[MessageKind::SETUP],
            DestinationPhase::Receiving => &[MessageKind::REHEARSE],
            DestinationPhase::Armed => &[MessageKind::FINAL_STATE],
            _ => &[],
        };
        assert_eq!(admitted, wanted, "{phase:?}");
        assert!(destination.admits(MessageKind::PING));
    }
    for (state, kind) in [(receiving(), MessageKind::FINAL_STATE), (armed(), MessageKind::REHEARSE)]
    {
        let mut destination = machine(0, state);
        destination.on_event(T0, DestinationEvent::Refused(kind));
        assert_eq!(destination.phase(), DestinationPhase::Abandoned);
    }
}

#[test]
fn a_round_behind_the_last_one_is_named() {
    let armed = State::Armed { last_round: LAST, load: Load::Missing, check: Check::NotAsked };
    let mut destination = machine(LAST + 1, armed);
    destination.on_event(T0, DestinationEvent::RoundReceived { round: LAST + 1 });
    let told = actions(&mut destination);
    let [DestinationAction::Send(Control::Abandon(why)), ..] = &told[..] else {
        panic!("{told:?}")
    };
    assert!(why.reason.contains("round 6 behind the last, 5"), "{}", why.reason);
}

/// Whoever drove the machine panicked. What it never ran it never will, and says so.
#[test]
fn an_attempt_that_is_given_up_in_the_middle_keeps_its_promises() {
    for index in 0..states().len() {
        let destination = machine(LAST, states().swap_remove(index));
        let (phase, before) = (destination.phase(), destination.ledger.fate(ID));
        let after = destination.give_up().fate(ID);
        let wanted = match (phase, before) {
            (DestinationPhase::Waiting, _) => Fate::Unknown,
            (_, Fate::Unknown) => Fate::Abandoned,
            (_, promised) => promised,
        };
        assert_eq!(after, wanted, "{phase:?}");
    }
}

/// Not the other way round: what a stop called off was sent, the guest may write again.
#[test]
fn a_stop_may_be_called_off_until_the_state_is_there() {
    let armed = |load| State::Armed { last_round: LAST, load, check: Check::NotAsked };
    let soon = |called_off| {
        let soon = SwitchoverSoon { last_round: LAST, called_off };
        DestinationEvent::Received(Control::SwitchoverSoon(soon))
    };
    let mut destination = machine(LAST, armed(Load::Missing));
    destination.on_event(T0, soon(Some(true)));
    assert_eq!(destination.phase(), DestinationPhase::Receiving);
    destination.on_event(T0, DestinationEvent::RoundReceived { round: LAST });
    let next = SwitchoverSoon { last_round: LAST + 1, called_off: None };
    destination.on_event(T0, DestinationEvent::Received(Control::SwitchoverSoon(next)));
    assert_eq!(destination.phase(), DestinationPhase::Armed);
    // Found by the simulated world: its barriers had come before that was said.
    let mut destination = machine(LAST + 1, armed(Load::Missing));
    destination.on_event(T0, soon(Some(true)));
    let told = actions(&mut destination);
    assert!(matches!(told[..], [DestinationAction::Send(Control::RoundReceived(_))]), "{told:?}");
    for (load, called_off) in [(Load::Missing, None), (Load::Loading, Some(true))] {
        let mut destination = machine(LAST, armed(load));
        destination.on_event(T0, soon(called_off));
        assert_eq!(destination.phase(), DestinationPhase::Abandoned, "{load:?} {called_off:?}");
    }
}

#[test]
fn the_commit_says_how_long_the_rest_may_take() {
    for (said, holds) in [
        (Some(700), Duration::from_millis(700)),
        (None, limits::COMMIT_COMPLETE_MAX),
        (Some(u32::MAX), limits::COMPLETE_MAX),
    ] {
        let armed = State::Armed { last_round: LAST, load: Load::Loaded, check: Check::NotAsked };
        let mut destination = machine(LAST, armed);
        let commit = Commit { complete_within_ms: said, ..commit() };
        destination.on_event(T0, DestinationEvent::Received(Control::Commit(commit)));
        assert_eq!(destination.poll_timeout(), Some(T0.after(holds)));
        destination.on_timeout(T0.after(holds));
        let told = actions(&mut destination);
        let [DestinationAction::Send(Control::CommitRefused(_)), ..] = &told[..] else {
            panic!("{told:?}");
        };
    }
}
