//! The destination's table: what each kind of event does in each phase. The machine asserts it at
//! every step, and a snapshot test prints it.

use super::types::{DestinationEvent, DestinationPhase};
use crate::reaction::Reaction::{self, Act, Ignore, Misuse, PeerFault};
use crate::reaction::labelled;
use DestinationPhase::{
    Abandoned, Accepting, Armed, Arrived, Building, Committing, Receiving, Running, Starting,
    Waiting,
};
use martlet_wire::frame::Kind as MessageKind;

labelled! {
    /// Kinds of events. `Got...` are messages of the peer.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    pub(crate) enum Kind {
        GotSetup = "Setup",
        GotRehearse = "Rehearse",
        GotSwitchoverSoon = "SwitchoverSoon",
        GotFinalState = "FinalState",
        GotAskDigest = "AskDigest",
        GotCommit = "Commit",
        GotAbandon = "Abandon",
        GotPing = "Ping",
        GotDestinationMessage = "a message that no source sends here",
        Built = "a built machine",
        HostFailed = "a failure of its host",
        ChannelsConnected = "connected channels",
        RoundReceived = "a round",
        StateLoaded = "a loaded state",
        OwnDigest = "a digest",
        Started = "a started guest",
        Alive = "a sign of life",
        Cancel = "a cancel",
        ChannelLost = "a lost channel",
        Malformed = "a malformed message",
        ControlLost = "a lost control connection",
        Silence = "silence",
        Deadline = "a deadline",
    }
}

impl Kind {
    pub(crate) fn of(event: &DestinationEvent) -> Kind {
        match event {
            DestinationEvent::Received(message) => Kind::of_message(message.kind()),
            DestinationEvent::Refused(message) => Kind::of_message(*message),
            DestinationEvent::Malformed { .. } => Kind::Malformed,
            DestinationEvent::ControlLost { .. } => Kind::ControlLost,
            DestinationEvent::Built => Kind::Built,
            DestinationEvent::HostFailed { .. } => Kind::HostFailed,
            DestinationEvent::ChannelsConnected => Kind::ChannelsConnected,
            DestinationEvent::ChannelLost { .. } => Kind::ChannelLost,
            DestinationEvent::RoundReceived { .. } => Kind::RoundReceived,
            DestinationEvent::StateLoaded { .. } => Kind::StateLoaded,
            DestinationEvent::OwnDigest(_) => Kind::OwnDigest,
            DestinationEvent::Started { .. } => Kind::Started,
            DestinationEvent::Alive(_) => Kind::Alive,
            DestinationEvent::Cancel { .. } => Kind::Cancel,
        }
    }

    pub(crate) fn of_message(message: MessageKind) -> Kind {
        match message {
            MessageKind::SETUP => Kind::GotSetup,
            MessageKind::REHEARSE => Kind::GotRehearse,
            MessageKind::SWITCHOVER_SOON => Kind::GotSwitchoverSoon,
            MessageKind::FINAL_STATE => Kind::GotFinalState,
            MessageKind::ASK_DIGEST => Kind::GotAskDigest,
            MessageKind::COMMIT => Kind::GotCommit,
            MessageKind::ABANDON => Kind::GotAbandon,
            MessageKind::PING => Kind::GotPing,
            _ => Kind::GotDestinationMessage,
        }
    }
}

/// Where a failure leads.
pub(crate) fn fallback(phase: DestinationPhase) -> DestinationPhase {
    match phase {
        Waiting | Building | Accepting | Receiving | Armed | Committing => Abandoned,
        // The guest is here; nothing takes it away.
        Starting | Running | Arrived | Abandoned => phase,
    }
}

pub(crate) fn reaction(phase: DestinationPhase, kind: Kind) -> Reaction<DestinationPhase> {
    match kind {
        Kind::GotSetup
        | Kind::GotRehearse
        | Kind::GotSwitchoverSoon
        | Kind::GotFinalState
        | Kind::GotAskDigest
        | Kind::GotCommit
        | Kind::GotAbandon
        | Kind::GotPing
        | Kind::GotDestinationMessage => on_message(phase, kind),
        Kind::Built
        | Kind::HostFailed
        | Kind::ChannelsConnected
        | Kind::RoundReceived
        | Kind::StateLoaded
        | Kind::OwnDigest
        | Kind::Started
        | Kind::Alive => on_report(phase, kind),
        Kind::Cancel
        | Kind::ChannelLost
        | Kind::Malformed
        | Kind::ControlLost
        | Kind::Silence
        | Kind::Deadline => on_end(phase, kind),
    }
}

fn on_message(phase: DestinationPhase, kind: Kind) -> Reaction<DestinationPhase> {
    match (phase, kind) {
        // Answered before the table is asked.
        (_, Kind::GotPing) => Ignore,
        (Waiting, Kind::GotSetup) => Act(&[Building]),
        (Receiving, Kind::GotRehearse) => Act(&[Receiving]),
        (Receiving, Kind::GotSwitchoverSoon) => Act(&[Armed]),
        (Armed, Kind::GotFinalState | Kind::GotAskDigest) => Act(&[Armed]),
        (Armed, Kind::GotSwitchoverSoon) => Act(&[Receiving]),
        (Armed, Kind::GotCommit) => Act(&[Committing, Starting]),
        (Waiting | Building | Accepting | Receiving | Armed, Kind::GotAbandon) => Act(&[Abandoned]),
        // A source that abandons after its commit contradicts itself; it gets a refusal.
        (Waiting | Building | Accepting | Receiving | Armed | Committing, _) => PeerFault,
        // The guest is here, whatever the source says now; or it never will be.
        (Starting | Running | Arrived | Abandoned, _) => Ignore,
    }
}

fn on_report(phase: DestinationPhase, kind: Kind) -> Reaction<DestinationPhase> {
    match (phase, kind) {
        (Building, Kind::Built) => Act(&[Accepting]),
        (Building | Accepting | Receiving | Armed | Committing, Kind::HostFailed) => {
            Act(&[Abandoned])
        }
        (Accepting, Kind::ChannelsConnected) => Act(&[Receiving]),
        (Receiving, Kind::RoundReceived | Kind::StateLoaded) => Act(&[Receiving]),
        (Armed, Kind::RoundReceived | Kind::StateLoaded | Kind::OwnDigest) => Act(&[Armed]),
        (Committing, Kind::RoundReceived | Kind::StateLoaded) => Act(&[Committing, Starting]),
        (Starting, Kind::Started) => Act(&[Running, Arrived]),
        (Running, Kind::Alive) => Act(&[Arrived]),
        // Whoever built it while the attempt was given up has to drop it.
        (Abandoned, Kind::Built) => Act(&[Abandoned]),
        // A round behind the last one, a second sign of life, or what no longer matters.
        (Starting | Running | Arrived, Kind::RoundReceived | Kind::Alive | Kind::HostFailed) => {
            Ignore
        }
        (Abandoned, _) => Ignore,
        // The data channels may run ahead of the control connection, but not of the channels' own
        // acceptance; and pages without end are the peer's doing.
        (_, Kind::RoundReceived) => PeerFault,
        (_, _) => Misuse,
    }
}

fn on_end(phase: DestinationPhase, kind: Kind) -> Reaction<DestinationPhase> {
    match (phase, kind) {
        (Waiting | Building | Accepting, _) => Act(&[Abandoned]),
        // Whether it is a failure depends on what the channel had already brought.
        (Receiving, Kind::ChannelLost) => Act(&[Receiving, Abandoned]),
        (Armed, Kind::ChannelLost) => Act(&[Armed, Abandoned]),
        (Receiving | Armed, _) => Act(&[Abandoned]),
        (Committing, Kind::ChannelLost) => Act(&[Committing, Abandoned]),
        // An owner who ends this process gives the right back first.
        (Committing, Kind::Deadline | Kind::Cancel) => Act(&[Abandoned]),
        // The source has let go of the guest: it is to run here if it can.
        (Committing, _) => Ignore,
        (Running, Kind::ControlLost | Kind::Malformed | Kind::Deadline) => Act(&[Arrived]),
        (Running, _) | (Starting | Arrived | Abandoned, _) => Ignore,
    }
}
