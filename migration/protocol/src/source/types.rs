//! What goes into the source's machine and what comes out of it.

use crate::clock_key::ClockKey;
use crate::permit::{OperatorOverride, RunPermit};
use crate::reaction::labelled;
use crate::{Failure, UndecidedReason};
use core::time::Duration;
use martlet_wire::control::{Alive, Answer, Committed, Control, Setup};

/// What an attempt is to be.
#[derive(Clone, Debug)]
pub struct SourceConfig {
    /// The first message. Its migration id must be random and new.
    pub setup: Setup,
    /// What this process's clock is known by; `None` where the host does not tell.
    pub clock_key: Option<ClockKey>,
    /// Compare both sides' memory before the commit.
    pub verify: bool,
    /// The blackout that the owner accepts; the machine's own limit for it follows from this.
    pub downtime_limit: Duration,
}

/// What to do after a round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decision {
    /// Send what was dirtied meanwhile.
    NextRound,
    /// Measure stopping, saving and loading once more, then decide again.
    RehearseAgain,
    /// Stop the guest.
    Switchover,
}

/// What happened at the source.
#[derive(Debug)]
pub enum SourceEvent {
    /// A message came on the control connection.
    Received(Control),
    /// The control connection is gone; nothing will come on it any more.
    ControlLost {
        /// How.
        reason: String,
    },
    /// The peer sent what is no message, or none for this side. Nothing more will be read.
    Malformed {
        /// As the decoder said.
        reason: String,
    },
    /// [`SourceAction::OpenChannels`] is done: each channel was accepted.
    ChannelsConnected,
    /// A data channel is gone.
    ChannelLost {
        /// How.
        reason: String,
    },
    /// All pages of a round and its barriers were handed to the channels.
    RoundSent {
        /// The round of [`SourceAction::RunRound`].
        round: u32,
    },
    /// [`SourceAction::Rehearse`] is done.
    Rehearsed {
        /// A state good for loading; `None` from a VMM that does not rehearse.
        state: Option<Vec<u8>>,
    },
    /// The answer to [`SourceAction::Decide`].
    Decided(Decision),
    /// [`SourceAction::Pause`] is done: no vCPU runs.
    Paused {
        /// The right to run the guest, given up by the VMM.
        permit: RunPermit,
        /// Whether it ran before.
        running: bool,
    },
    /// All last pages and their barriers were handed to the channels.
    LastRoundSent {
        /// The round of [`SourceAction::RunLastRound`].
        round: u32,
    },
    /// [`SourceAction::SaveState`] is done.
    StateSaved {
        /// The state to run.
        bytes: Vec<u8>,
    },
    /// [`SourceAction::ComputeDigest`] is done.
    OwnDigest([u8; 32]),
    /// This host could not do what an action asked for. If that was the pause, the guest has been
    /// set running again.
    HostFailed {
        /// What failed, and why.
        reason: String,
    },
    /// What was handed to the channels is still on its way: some of it has left since the last time.
    ChannelsMove,
    /// The blackout would become too long: the guest is to run on, and the last round's pages are a
    /// round like any other. Only before `StateSaved` and `LastRoundSent`, and only if
    /// [`Source::may_call_off`](super::Source::may_call_off); `RoundSent` follows.
    CalledOff,
    /// The owner wants the guest to stay. Too late after the commit.
    Cancel {
        /// Why.
        reason: String,
    },
    /// The destination's answer to a query about this attempt, once the commit was sent. Each one
    /// while it is undecided is answered by a [`SourceAction::Finish`].
    Fate(Answer),
    /// An operator wants to end it, and the destination was asked just before. If the
    /// process that got the commit answered, its answer counts and not the operator.
    Overridden {
        /// What the operator wants.
        by: OperatorOverride,
        /// What was answered, if anybody did.
        answer: Option<Answer>,
    },
}

/// What the source is to do.
#[derive(Debug)]
pub enum SourceAction {
    /// Send a message on the control connection.
    Send(Control),
    /// Open this many data channels, each showing the token.
    OpenChannels {
        /// How many.
        count: u16,
        /// From `SetupDone`.
        token: [u8; 16],
    },
    /// Send what is dirty, and a barrier on each channel.
    RunRound {
        /// From 0.
        round: u32,
    },
    /// Decide what comes next, with what was measured.
    Decide,
    /// Measure stopping and saving, and get a state for the destination to load.
    Rehearse,
    /// Stop the guest.
    Pause,
    /// Read the dirty log once more, send the rest and the barriers. At the same time as
    /// `SaveState`.
    RunLastRound {
        /// One more than the last `RunRound`.
        round: u32,
    },
    /// Save the state of vCPUs and devices.
    SaveState,
    /// Digest the guest's memory.
    ComputeDigest,
    /// Give the permit back to the VMM. End a running `RunLastRound`, `SaveState` or
    /// `ComputeDigest` first.
    Resume {
        /// The right to run the guest.
        permit: RunPermit,
        /// Whether it ran before the pause.
        running: bool,
    },
    /// The guest runs at the destination, or is paused there as it was here. `Finish` follows
    /// within [`ALIVE_MAX`](crate::limits::ALIVE_MAX).
    MovedAway(Committed),
    /// It is over: end all work for the attempt and close its connections. Comes once, except
    /// that [`SourceOutcome::Undecided`] is followed by another when something settles it.
    Finish(SourceOutcome),
}

/// How an attempt ended at the source.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SourceOutcome {
    /// The guest has left.
    Completed {
        /// What the destination said with its confirmation; `None` if a query settled it.
        committed: Option<Committed>,
        /// What it said a moment later, if it did.
        alive: Option<Alive>,
    },
    /// The guest is here, as before.
    Failed {
        /// Why.
        reason: Failure,
    },
    /// The guest is here, as before, as the owner wished.
    Cancelled,
    /// Nobody knows where the guest is, and its operator gave it up here: it never runs here again.
    GivenUp,
    /// The guest is stopped here, and may run there. Ask the destination and report its answer
    /// with [`SourceEvent::Fate`].
    Undecided {
        /// Why nobody here can know.
        reason: UndecidedReason,
    },
}

labelled! {
    /// Where an attempt stands at the source.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    pub enum SourcePhase {
        /// `Setup` was sent.
        SettingUp = "setting up the destination",
        /// Data channels are being opened.
        Connecting = "opening data channels",
        /// A round is being sent.
        Sending = "sending a round",
        /// The VMM, then the destination, rehearse the switchover.
        Rehearsing = "rehearsing the switchover",
        /// The policy decides.
        Deciding = "deciding",
        /// The guest is being stopped.
        Pausing = "stopping the guest",
        /// The guest is stopped; its last pages and its state go over.
        Switching = "sending the last pages and the state",
        /// Both sides digest their memory.
        Comparing = "comparing memory",
        /// The right to run the guest was sent.
        Committing = "handing the guest over",
        /// It was sent, and it is not known whether it arrived.
        Undecided = "undecided",
        /// The attempt has failed; the guest, about to be stopped, has to be set running again.
        Withdrawing = "withdrawing",
        /// The guest has left; the destination may say how it is.
        Confirming = "waiting for the guest's first sign of life",
        /// The guest has left.
        Completed = "completed",
        /// The guest is here.
        Failed = "failed",
        /// The guest is here: the owner cancelled.
        Cancelled = "cancelled",
        /// The guest was given up by its operator.
        GivenUp = "given up",
    }
}

impl SourcePhase {
    /// Whether nothing more will happen by itself.
    pub fn is_over(self) -> bool {
        match self {
            SourcePhase::Completed
            | SourcePhase::Failed
            | SourcePhase::Cancelled
            | SourcePhase::GivenUp
            | SourcePhase::Undecided => true,
            SourcePhase::SettingUp
            | SourcePhase::Connecting
            | SourcePhase::Sending
            | SourcePhase::Rehearsing
            | SourcePhase::Deciding
            | SourcePhase::Pausing
            | SourcePhase::Switching
            | SourcePhase::Comparing
            | SourcePhase::Committing
            | SourcePhase::Withdrawing
            | SourcePhase::Confirming => false,
        }
    }
}
