//! Why a command was not taken, and why it was not done.

use martlet_mlx5_abi::{CommandStatus, DeliveryStatus, Opcode};
use std::time::Duration;

/// Why a command was not taken. Nothing has been done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SubmitError {
    /// No slot or no permit is free, or the next one is somebody else's turn. Linux says EBUSY.
    #[error("the command queue is busy")]
    Busy,
    /// No mailboxes are free: the pool's limit, or the host's memory.
    #[error("no memory for {needed} command mailboxes")]
    NoMailboxes {
        /// How many it takes.
        needed: usize,
    },
    /// It could never be taken: its input or output is longer than a command can be, or shorter
    /// than a header.
    #[error("{opcode} with {in_bytes} bytes in and {out_bytes} out is no command")]
    BadLength {
        /// Of which command.
        opcode: Opcode,
        /// Bytes of its input.
        in_bytes: usize,
        /// Bytes of its output.
        out_bytes: usize,
    },
    /// An earlier command was not answered: nothing is sent until the function has begun anew.
    #[error("an earlier command was not answered")]
    Tainted,
    /// The device is gone.
    #[error("the device is gone")]
    Gone,
}

/// Why a command was not done, or may not have been. The device's fault, or that of who asked.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CommandError {
    /// It did not reach the firmware whole. Nothing has been done.
    #[error("{opcode} was not delivered: {status}")]
    Delivery {
        /// Which command.
        opcode: Opcode,
        /// What was wrong with it.
        status: DeliveryStatus,
    },
    /// The firmware refused it. Nothing has been done.
    #[error("{opcode} failed: {status}, syndrome {syndrome:#010x}")]
    Status {
        /// Which command.
        opcode: Opcode,
        /// What the firmware said.
        status: CommandStatus,
        /// The firmware's own code.
        syndrome: u32,
    },
    /// No answer in time. It may still be done, or may have been.
    #[error("{opcode} was not answered in {} ms", .waited.as_millis())]
    Timeout {
        /// Which command.
        opcode: Opcode,
        /// How long it was given.
        waited: Duration,
    },
    /// The answer carries another command's token. It may have been done.
    #[error("{opcode} came back with token {found:#04x} instead of {expected:#04x}")]
    Token {
        /// Which command.
        opcode: Opcode,
        /// What was written.
        expected: u8,
        /// What was found.
        found: u8,
    },
    /// The answer is shorter than it has to be, or says something impossible.
    #[error("{opcode} came back with nonsense: {what}")]
    Nonsense {
        /// Which command.
        opcode: Opcode,
        /// What about.
        what: &'static str,
    },
    /// It was never issued.
    #[error("{opcode} was not issued")]
    NotIssued {
        /// Which command.
        opcode: Opcode,
        /// Why.
        #[source]
        because: SubmitError,
    },
    /// It was never issued, because one before it failed.
    #[error("{opcode} was not issued after a failure")]
    Skipped {
        /// Which command.
        opcode: Opcode,
    },
    /// Another command was not answered, so this one's answer was not waited for. It may still be
    /// done, or may have been.
    #[error("{opcode} was given up with the function")]
    Tainted {
        /// Which command.
        opcode: Opcode,
    },
    /// The device is gone.
    #[error("{opcode} has no device any more")]
    Gone {
        /// Which command.
        opcode: Opcode,
    },
}

impl CommandError {
    /// Whether the device may have done what was asked all the same.
    pub(crate) fn may_be_done(&self) -> bool {
        match self {
            CommandError::Timeout { .. }
            | CommandError::Token { .. }
            | CommandError::Nonsense { .. }
            | CommandError::Tainted { .. }
            | CommandError::Gone { .. } => true,
            CommandError::Delivery { .. }
            | CommandError::Status { .. }
            | CommandError::NotIssued { .. }
            | CommandError::Skipped { .. } => false,
        }
    }

    /// Whether nothing more can be asked of the firmware: nobody knows what was done, or the
    /// firmware denies an object that it had told of, so that a number of its is wrong.
    pub(super) fn taints(&self) -> bool {
        let denied = [CommandStatus::BAD_RESOURCE, CommandStatus::BAD_INDEX];
        match self {
            CommandError::Status { status, .. } => denied.contains(status),
            other => other.may_be_done(),
        }
    }
}
