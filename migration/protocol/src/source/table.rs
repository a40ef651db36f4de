//! The source's table: what each kind of event does in each phase. The machine asserts it at every
//! step, and a snapshot test prints it.

use super::types::{Decision, SourceEvent, SourcePhase};
use crate::permit::OperatorOverride;
use crate::reaction::Reaction::{self, Act, Ignore, Misuse, PeerFault};
use crate::reaction::labelled;
use SourcePhase::{
    Cancelled, Committing, Comparing, Completed, Confirming, Connecting, Deciding, Failed, GivenUp,
    Pausing, Rehearsing, Sending, SettingUp, Switching, Undecided, Withdrawing,
};
use martlet_wire::control::Control;

labelled! {
    /// Kinds of events. `Got...` are messages of the peer.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    pub(crate) enum Kind {
        GotSetupDone = "SetupDone",
        GotChannelsReady = "ChannelsReady",
        GotRoundReceived = "RoundReceived",
        GotRehearsed = "Rehearsed",
        GotDigest = "Digest",
        GotCommitted = "Committed",
        GotCommitRefused = "CommitRefused",
        GotAlive = "Alive",
        GotAbandon = "Abandon",
        GotPong = "Pong",
        GotUnaskedPong = "a Pong that nobody asked for",
        GotSourceMessage = "a message that only a source sends",
        ChannelsConnected = "connected channels",
        RoundSent = "a sent round",
        RehearsalDone = "a rehearsal",
        DecidedNextRound = "a decision",
        DecidedRehearseAgain = "a decision",
        DecidedSwitchover = "a decision",
        Paused = "a paused guest",
        LastRoundSent = "a sent last round",
        StateSaved = "a saved state",
        OwnDigest = "a digest",
        ChannelsMove = "moving channels",
        CalledOff = "a stop that was called off",
        Fate = "a fate",
        OverriddenRunHere = "an operator's override",
        OverriddenGiveUp = "an operator's override",
        Cancel = "a cancel",
        HostFailed = "a host failure",
        ChannelLost = "a lost channel",
        ControlLost = "a lost control connection",
        Malformed = "what is no message",
        Silence = "silence",
        Deadline = "a deadline",
    }
}

impl Kind {
    pub(crate) fn of(event: &SourceEvent) -> Kind {
        match event {
            SourceEvent::Received(message) => Kind::of_message(message),
            SourceEvent::ControlLost { .. } => Kind::ControlLost,
            SourceEvent::Malformed { .. } => Kind::Malformed,
            SourceEvent::ChannelsConnected => Kind::ChannelsConnected,
            SourceEvent::ChannelLost { .. } => Kind::ChannelLost,
            SourceEvent::RoundSent { .. } => Kind::RoundSent,
            SourceEvent::Rehearsed { .. } => Kind::RehearsalDone,
            SourceEvent::Decided(Decision::NextRound) => Kind::DecidedNextRound,
            SourceEvent::Decided(Decision::RehearseAgain) => Kind::DecidedRehearseAgain,
            SourceEvent::Decided(Decision::Switchover) => Kind::DecidedSwitchover,
            SourceEvent::Paused { .. } => Kind::Paused,
            SourceEvent::LastRoundSent { .. } => Kind::LastRoundSent,
            SourceEvent::StateSaved { .. } => Kind::StateSaved,
            SourceEvent::OwnDigest(_) => Kind::OwnDigest,
            SourceEvent::HostFailed { .. } => Kind::HostFailed,
            SourceEvent::Cancel { .. } => Kind::Cancel,
            SourceEvent::Fate(_) => Kind::Fate,
            SourceEvent::Overridden { by: OperatorOverride::RunHere(_), .. } => {
                Kind::OverriddenRunHere
            }
            SourceEvent::Overridden { by: OperatorOverride::GiveUp(_), .. } => {
                Kind::OverriddenGiveUp
            }
            SourceEvent::ChannelsMove => Kind::ChannelsMove,
            SourceEvent::CalledOff => Kind::CalledOff,
        }
    }

    fn of_message(message: &Control) -> Kind {
        match message {
            Control::SetupDone(_) => Kind::GotSetupDone,
            Control::ChannelsReady => Kind::GotChannelsReady,
            Control::RoundReceived(_) => Kind::GotRoundReceived,
            Control::Rehearsed(_) => Kind::GotRehearsed,
            Control::Digest(_) => Kind::GotDigest,
            Control::Committed(_) => Kind::GotCommitted,
            Control::CommitRefused(_) => Kind::GotCommitRefused,
            Control::Alive(_) => Kind::GotAlive,
            Control::Abandon(_) => Kind::GotAbandon,
            Control::Pong(_) => Kind::GotPong,
            Control::Setup(_)
            | Control::Rehearse(_)
            | Control::SwitchoverSoon(_)
            | Control::FinalState(_)
            | Control::AskDigest
            | Control::Commit(_)
            | Control::Ping(_)
            | Control::Query(_)
            | Control::Answer(_) => Kind::GotSourceMessage,
        }
    }
}

/// Where a failure leads.
pub(crate) fn fallback(phase: SourcePhase) -> SourcePhase {
    match phase {
        SettingUp | Connecting | Sending | Rehearsing | Deciding | Switching | Comparing => Failed,
        // The guest is about to be stopped; it has to be waited for, to be set running again.
        Pausing => Withdrawing,
        // The commit may have arrived.
        Committing => Undecided,
        // The guest has left; what fails now can't bring it back.
        Confirming => Completed,
        Undecided | Withdrawing | Completed | Failed | Cancelled | GivenUp => phase,
    }
}

/// Where the machine's work for the attempt is over, so that late reports mean nothing.
fn is_late(phase: SourcePhase) -> bool {
    match phase {
        Undecided | Withdrawing | Completed | Failed | Cancelled | GivenUp => true,
        SettingUp | Connecting | Sending | Rehearsing | Deciding | Pausing | Switching
        | Comparing | Committing | Confirming => false,
    }
}

pub(crate) fn reaction(phase: SourcePhase, kind: Kind) -> Reaction<SourcePhase> {
    match kind {
        Kind::GotSetupDone
        | Kind::GotChannelsReady
        | Kind::GotRoundReceived
        | Kind::GotRehearsed
        | Kind::GotDigest
        | Kind::GotCommitted
        | Kind::GotCommitRefused
        | Kind::GotAlive
        | Kind::GotAbandon
        | Kind::GotPong
        | Kind::GotUnaskedPong
        | Kind::GotSourceMessage => on_message(phase, kind),
        Kind::ChannelsConnected
        | Kind::RoundSent
        | Kind::RehearsalDone
        | Kind::DecidedNextRound
        | Kind::DecidedRehearseAgain
        | Kind::DecidedSwitchover
        | Kind::Paused
        | Kind::LastRoundSent
        | Kind::StateSaved
        | Kind::OwnDigest
        | Kind::CalledOff => on_report(phase, kind),
        Kind::ChannelsMove => match phase {
            Sending => Act(&[Sending]),
            _ => Ignore,
        },
        Kind::Fate => match phase {
            Committing => Act(&[Committing, Undecided, Completed, Failed]),
            Undecided => Act(&[Undecided, Completed, Failed]),
            _ => Ignore,
        },
        Kind::OverriddenRunHere => match phase {
            Undecided => Act(&[Undecided, Completed, Failed]),
            _ => Ignore,
        },
        Kind::OverriddenGiveUp => match phase {
            Undecided => Act(&[Undecided, Completed, Failed, GivenUp]),
            _ => Ignore,
        },
        // Its answer may be had by a question.
        Kind::ControlLost | Kind::Malformed if phase == Committing => Act(&[Committing]),
        Kind::Cancel | Kind::HostFailed | Kind::ChannelLost => on_own_end(phase, kind),
        Kind::ControlLost | Kind::Malformed | Kind::Silence | Kind::Deadline => on_lost_peer(phase),
    }
}

fn on_message(phase: SourcePhase, kind: Kind) -> Reaction<SourcePhase> {
    match (phase, kind) {
        (Sending, Kind::GotPong) => Act(&[Sending, Rehearsing, Deciding]),
        // A sign of life, which the commit may have waited for.
        (Switching, Kind::GotPong) => Act(&[Switching, Comparing, Committing]),
        // Measured before the table is asked.
        (_, Kind::GotPong) => Ignore,
        (SettingUp, Kind::GotSetupDone) => Act(&[Connecting]),
        (Connecting, Kind::GotChannelsReady) => Act(&[Connecting, Sending]),
        (Sending, Kind::GotRoundReceived) => Act(&[Sending, Rehearsing, Deciding]),
        (Switching, Kind::GotRoundReceived) => Act(&[Switching, Comparing, Committing]),
        (Comparing, Kind::GotRoundReceived) => Act(&[Comparing]),
        // The last round's, which nobody waits for.
        (Committing | Confirming, Kind::GotRoundReceived) => Ignore,
        (Rehearsing, Kind::GotRehearsed) => Act(&[Deciding]),
        (Comparing, Kind::GotDigest) => Act(&[Comparing, Committing]),
        // Either may still come after the deadline for it, and proves the same then.
        (Committing | Undecided, Kind::GotCommitted) => Act(&[Confirming]),
        // An `Abandon` may cross the commit. It too is sent only by a destination that has not
        // started the guest and never will.
        (Committing | Undecided, Kind::GotCommitRefused | Kind::GotAbandon) => Act(&[Failed]),
        (Confirming, Kind::GotAlive) => Act(&[Completed]),
        (SettingUp | Connecting | Sending | Rehearsing | Deciding, Kind::GotAbandon)
        | (Switching | Comparing, Kind::GotAbandon) => Act(&[Failed]),
        (Pausing, Kind::GotAbandon) => Act(&[Withdrawing]),
        (phase, _) if is_late(phase) => Ignore,
        (_, _) => PeerFault,
    }
}

fn on_report(phase: SourcePhase, kind: Kind) -> Reaction<SourcePhase> {
    match (phase, kind) {
        (Connecting, Kind::ChannelsConnected) => Act(&[Connecting, Sending]),
        (Sending, Kind::RoundSent) => Act(&[Sending, Rehearsing, Deciding]),
        (Rehearsing, Kind::RehearsalDone) => Act(&[Rehearsing, Deciding]),
        (Deciding, Kind::DecidedNextRound) => Act(&[Sending]),
        (Deciding, Kind::DecidedRehearseAgain) => Act(&[Rehearsing]),
        (Deciding, Kind::DecidedSwitchover) => Act(&[Pausing]),
        (Pausing, Kind::Paused) => Act(&[Switching]),
        (Switching, Kind::LastRoundSent | Kind::StateSaved) => {
            Act(&[Switching, Comparing, Committing])
        }
        (Switching, Kind::CalledOff) => Act(&[Sending]),
        (Comparing, Kind::OwnDigest) => Act(&[Comparing, Committing]),
        // The permit goes back whenever it comes.
        (Withdrawing, Kind::Paused) => Act(&[Failed, Cancelled]),
        (Failed, Kind::Paused) => Act(&[Failed]),
        (Cancelled, Kind::Paused) => Act(&[Cancelled]),
        (phase, _) if is_late(phase) => Ignore,
        (_, _) => Misuse,
    }
}

fn on_own_end(phase: SourcePhase, kind: Kind) -> Reaction<SourcePhase> {
    match (phase, kind) {
        (
            SettingUp | Connecting | Sending | Rehearsing | Deciding | Switching | Comparing,
            Kind::Cancel,
        ) => Act(&[Cancelled]),
        (SettingUp | Connecting | Sending | Rehearsing | Deciding | Switching | Comparing, _) => {
            Act(&[Failed])
        }
        // If the pause itself failed there is nothing to wait for; if something else did, the
        // permit comes later and goes back then.
        (Pausing, Kind::HostFailed) => Act(&[Failed]),
        (Pausing, _) => Act(&[Withdrawing]),
        (Withdrawing, Kind::HostFailed) => Act(&[Failed, Cancelled]),
        (Withdrawing, _) => Ignore,
        // All that this side had to do is done.
        (Committing | Undecided | Confirming | Completed | Failed | Cancelled | GivenUp, _) => {
            Ignore
        }
    }
}

fn on_lost_peer(phase: SourcePhase) -> Reaction<SourcePhase> {
    match phase {
        SettingUp | Connecting | Sending | Rehearsing | Deciding | Switching | Comparing => {
            Act(&[Failed])
        }
        Pausing => Act(&[Withdrawing]),
        Committing => Act(&[Undecided]),
        Confirming => Act(&[Completed]),
        Undecided | Withdrawing | Completed | Failed | Cancelled | GivenUp => Ignore,
    }
}
