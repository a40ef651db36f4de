//! What goes into the destination's machine and what comes out of it.

use crate::Failure;
use crate::clock_key::ClockKey;
use crate::permit::RunPermit;
use crate::reaction::labelled;
use martlet_units::{ClockOffset, Instant};
use martlet_wire::control::{Alive, Control, Setup};
use martlet_wire::frame::Kind;

/// What a destination tells its peers about itself.
#[derive(Clone, Copy, Debug)]
pub struct DestinationConfig {
    /// What this attempt's data channels must show; random and new.
    pub token: [u8; 16],
    /// What this host's clock is known by; `None` where the host does not tell.
    pub clock_key: Option<ClockKey>,
}

/// What happened at the destination.
#[derive(Clone, Debug)]
pub enum DestinationEvent {
    /// A message came on the control connection.
    Received(Control),
    /// The header of a message came that [`Destination::admits`](super::Destination::admits)
    /// does not let in; its body and whatever is behind it will not be read.
    Refused(Kind),
    /// What came on the control connection is no message for a destination; nothing more will be
    /// read from it, answers can still be sent.
    Malformed {
        /// What was wrong, as one line.
        reason: String,
    },
    /// The control connection is gone; nothing will come on it any more.
    ControlLost {
        /// How.
        reason: String,
    },
    /// [`DestinationAction::Build`] is done.
    Built,
    /// This host can't do its part: build the machine, load a state, digest or keep memory.
    HostFailed {
        /// What failed, and why.
        reason: String,
    },
    /// [`DestinationAction::AcceptChannels`] is done: all are there.
    ChannelsConnected,
    /// A data channel is gone, in order or not. Report it only after the `RoundReceived` that its
    /// barriers complete.
    ChannelLost {
        /// The last round whose barrier came on it.
        last_barrier: Option<u32>,
        /// How.
        reason: String,
    },
    /// The barrier of a round came on every channel, and all pages before it are in memory.
    RoundReceived {
        /// As the barriers said.
        round: u32,
    },
    /// [`DestinationAction::LoadState`] is done.
    StateLoaded {
        /// Loading the state into the waiting vCPUs.
        load_ns: u64,
    },
    /// [`DestinationAction::ComputeDigest`] is done.
    OwnDigest([u8; 32]),
    /// [`DestinationAction::Start`] is done.
    Started {
        /// When the vCPUs were told to run.
        at: Instant,
    },
    /// The guest gave its first sign of life, or none is to be expected soon. Report it within
    /// [`ALIVE_MAX`](crate::limits::ALIVE_MAX) of the start.
    Alive(Alive),
    /// The owner takes no guest any more. A commit that is not complete yet is refused; too late
    /// once the guest is being started.
    Cancel {
        /// Why.
        reason: String,
    },
}

/// What the destination is to do.
#[derive(Debug)]
pub enum DestinationAction {
    /// Send a message on the control connection.
    Send(Control),
    /// Build the machine that the source describes.
    Build(Setup),
    /// Let this many data channels in, numbered from 0, each showing the token.
    AcceptChannels {
        /// How many.
        count: u16,
        /// What they must show.
        token: [u8; 16],
    },
    /// Load a state into the waiting vCPUs and devices.
    LoadState {
        /// From the peer: anything may be in it.
        bytes: Vec<u8>,
        /// Whether another state will follow.
        rehearsal: bool,
        /// With the last state: how the source's clock differs from this side's, if it said so.
        clock: Option<ClockOffset>,
    },
    /// The blackout is near: stay awake.
    Arm,
    /// Digest the guest's memory.
    ComputeDigest,
    /// Run the guest, or leave it paused.
    Start {
        /// The right to run the guest, made from the commit.
        permit: RunPermit,
        /// Whether it is to run.
        running: bool,
    },
    /// Drop the machine; it never ran. Follows every `Build` that isn't followed by `Start`.
    Discard,
    /// It is over: end all work for the attempt and close its connections. Comes once.
    Finish(DestinationOutcome),
}

/// How an attempt ended at the destination.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DestinationOutcome {
    /// The guest is here.
    Arrived,
    /// It is not, and this attempt will never bring it here.
    Abandoned {
        /// Why.
        reason: Failure,
    },
}

labelled! {
    /// Where an attempt stands at the destination.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    pub enum DestinationPhase {
        /// Connected; no `Setup` yet.
        Waiting = "waiting for the setup",
        /// The machine is being built.
        Building = "building the machine",
        /// Data channels are being let in.
        Accepting = "waiting for data channels",
        /// Rounds come in.
        Receiving = "receiving memory",
        /// The guest is being stopped at the source; its last pages and its state come in.
        Armed = "receiving the last pages and the state",
        /// The commit is here, something else is not yet.
        Committing = "completing the commit",
        /// The guest is being started.
        Starting = "starting the guest",
        /// The guest runs, or is paused, and the source knows.
        Running = "waiting for the guest's first sign of life",
        /// The guest is here.
        Arrived = "arrived",
        /// The guest never ran here and never will.
        Abandoned = "abandoned",
    }
}

impl DestinationPhase {
    /// Whether nothing more will happen.
    pub fn is_over(self) -> bool {
        match self {
            DestinationPhase::Arrived | DestinationPhase::Abandoned => true,
            DestinationPhase::Waiting
            | DestinationPhase::Building
            | DestinationPhase::Accepting
            | DestinationPhase::Receiving
            | DestinationPhase::Armed
            | DestinationPhase::Committing
            | DestinationPhase::Starting
            | DestinationPhase::Running => false,
        }
    }
}
