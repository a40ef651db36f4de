//! Why an attempt failed, and why one is undecided.

use crate::limits::SILENCE_MAX;
use core::time::Duration;

/// Whose fault a failure was.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The other side: it gave up, or broke the protocol.
    Peer,
    /// What is between the two.
    Connection,
    /// This side's machine or kernel.
    Host,
    /// Nobody's: the owner asked for it.
    Owner,
}

/// Why an attempt ended without moving the guest. Displays as one line.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Failure {
    /// The peer ended the attempt.
    #[error("the peer gave up: {reason}")]
    PeerGaveUp {
        /// Its words.
        reason: String,
    },
    /// The destination had the commit and gave the right back.
    #[error("the destination could not start the guest: {reason}")]
    Refused {
        /// Its words.
        reason: String,
    },
    /// The destination, asked later, promised that it never ran the guest.
    #[error("the destination never got the guest to run")]
    NeverArrived,
    /// The destination can't be asked, and the operator took the guest back.
    #[error("taken back by its operator: the destination is gone and never ran the guest")]
    TakenBack,
    /// A message that has no place where the attempt stands.
    #[error("the peer sent {message} while {phase}")]
    Unexpected {
        /// The message's name.
        message: &'static str,
        /// Where this side stood.
        phase: &'static str,
    },
    /// Bytes that are no message, or none that this side takes.
    #[error("the peer sent what is no message for this side: {reason}")]
    Malformed {
        /// As the decoder said.
        reason: String,
    },
    /// A message or barrier in its place that contradicts what was said before.
    #[error("the peer contradicts itself: {what}")]
    Contradiction {
        /// With the values concerned.
        what: String,
    },
    /// Both sides have the last pages, and they are not the same.
    #[error("memory at the destination differs from the source's")]
    MemoryDiffers,
    /// The control connection broke.
    #[error("control connection lost: {reason}")]
    ControlLost {
        /// As the transport said.
        reason: String,
    },
    /// A data channel broke while it was needed.
    #[error("data channel lost: {reason}")]
    ChannelLost {
        /// As the transport said.
        reason: String,
    },
    /// The control connection is there, but nothing comes.
    #[error("nothing heard from the peer for {SILENCE_MAX:?}")]
    Silence,
    /// A step took too long.
    #[error("{phase} took longer than {limit:?}")]
    TooSlow {
        /// Where this side stood.
        phase: &'static str,
        /// What it had.
        limit: Duration,
    },
    /// This host could not do its part.
    #[error("{reason}")]
    Host {
        /// What failed, and why.
        reason: String,
    },
    /// Whoever drives this machine reported something that can't have happened.
    #[error("internal error: {event} reported while {phase}")]
    Misuse {
        /// Which event.
        event: &'static str,
        /// Where the machine stood.
        phase: &'static str,
    },
    /// The owner asked for it.
    #[error("cancelled: {reason}")]
    Cancelled {
        /// The owner's words.
        reason: String,
    },
}

impl Failure {
    /// Whose fault it was.
    pub fn fault(&self) -> Fault {
        match self {
            Failure::PeerGaveUp { .. }
            | Failure::Refused { .. }
            | Failure::NeverArrived
            | Failure::Unexpected { .. }
            | Failure::Malformed { .. }
            | Failure::Contradiction { .. }
            | Failure::TooSlow { .. } => Fault::Peer,
            Failure::ControlLost { .. } | Failure::ChannelLost { .. } | Failure::Silence => {
                Fault::Connection
            }
            Failure::MemoryDiffers | Failure::Host { .. } | Failure::Misuse { .. } => Fault::Host,
            Failure::Cancelled { .. } | Failure::TakenBack => Fault::Owner,
        }
    }
}

/// Why nobody here can know where the guest is. Displays as one line.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum UndecidedReason {
    /// The commit was sent and no answer to it came.
    #[error("the commit was sent but not confirmed: {0}")]
    Unconfirmed(Failure),
    /// The destination has not decided yet.
    #[error("the destination has not decided yet; ask again")]
    Pending,
    /// Another process answers at the destination's address.
    #[error("the destination process that got the commit is gone; another one answers")]
    OtherProcess,
}
