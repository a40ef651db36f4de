//! What can go wrong in the firmware, as data.

use crate::latency::Class;
use martlet_fault_plan::FaultPlan;
use martlet_mlx5_abi::{CommandStatus, DeliveryStatus, Opcode};
use std::time::Duration;

/// Where something goes wrong: at commands, counted as they are picked up, or at a stop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Point {
    /// Any command.
    Any,
    /// A command with this opcode.
    Opcode(Opcode),
    /// A command of this class: MODIFYs of virtqueues are told apart by what they do.
    Class(Class),
    /// The interface is disabled by its register.
    Disable,
}

/// What goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The command is not even read: a bad delivery status.
    Delivery(DeliveryStatus),
    /// The command fails and changes nothing; also limits that are exceeded
    /// ([`CommandStatus::LIMIT`], [`CommandStatus::NO_RESOURCES`]).
    Status {
        /// What it says.
        status: CommandStatus,
        /// And why.
        syndrome: u32,
    },
    /// The command is done, and its answer carries another token, in the entry and the mailboxes.
    WrongToken,
    /// The command is never answered.
    Lost {
        /// Whether it is done all the same.
        executed: bool,
    },
    /// The answer is there, but no event tells so.
    LostEvent,
    /// The answer and its event are there, but no interrupt tells so.
    LostInterrupt,
    /// The answer comes this much later than it would have; others are not delayed.
    Late(Duration),
    /// The firmware is busy with the command for this much longer: all later ones wait.
    Slow(Duration),
    /// The command is done, and its answer is random behind a header that says so.
    Garbage,
    /// The firmware hangs when it picks the command up: no command is answered any more, and the
    /// health counter stands still. Frames pass as before.
    Hang,
    /// The device is gone when it picks the command up.
    Gone,
    /// The link goes down when the command is picked up, and up again after this long.
    LinkFlap(Duration),
    /// The firmware asks for pages when it picks the command up; a negative number offers them
    /// back.
    PageRequest(i32),
    /// At [`Point::Disable`]: the function goes on, and its interface never reads as disabled.
    /// Nothing happens if it is the fault of a command.
    NeverDisables,
}

/// What goes wrong, and when.
pub type Faults = FaultPlan<Point, Fault>;

impl Point {
    /// Whether a command is meant.
    pub(crate) fn means(self, opcode: Opcode, class: Class) -> bool {
        match self {
            Point::Any => true,
            Point::Opcode(wanted) => wanted == opcode,
            Point::Class(wanted) => wanted == class,
            Point::Disable => false,
        }
    }
}
