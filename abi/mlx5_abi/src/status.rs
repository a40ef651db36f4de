//! How a command went: whether the firmware got it at all, and if so what it said.

use crate::number::open_enum;

open_enum! {
    /// Whether the command reached the firmware whole: bits 7:1 of an entry's last byte (PRM,
    /// "Command delivery status"; Linux `cmd.c`, `MLX5_CMD_DELIVERY_STAT_*`).
    DeliveryStatus(u8) {
        /// It did.
        OK = 0x0,
        /// A signature does not fit.
        SIGNATURE = 0x1,
        /// A mailbox carries another token than the entry.
        TOKEN = 0x2,
        /// The mailboxes are not numbered one after the other.
        BLOCK_NUMBER = 0x3,
        /// The address of the output mailboxes is not aligned.
        OUT_POINTER_ALIGN = 0x4,
        /// The address of the input mailboxes is not aligned.
        IN_POINTER_ALIGN = 0x5,
        /// The firmware failed.
        FIRMWARE = 0x6,
        /// The length of the input does not fit the opcode.
        IN_LENGTH = 0x7,
        /// The length of the output does not fit the opcode.
        OUT_LENGTH = 0x8,
        /// A reserved field is not zero.
        RESERVED = 0x9,
        /// The entry's type is not a command.
        DESCRIPTOR_TYPE = 0x10,
    }
}

open_enum! {
    /// What the firmware said: the first byte of the output (PRM, "Command return status";
    /// `device.h`, `MLX5_CMD_STAT_*`).
    CommandStatus(u8) {
        /// Done.
        OK = 0x0,
        /// Internal error.
        INTERNAL = 0x1,
        /// The opcode is not known or not supported.
        BAD_OPCODE = 0x2,
        /// A parameter is wrong.
        BAD_PARAMETER = 0x3,
        /// The function is not in a state for this.
        BAD_SYSTEM_STATE = 0x4,
        /// A resource that was named does not exist.
        BAD_RESOURCE = 0x5,
        /// A resource is in use.
        RESOURCE_BUSY = 0x6,
        /// Not ready yet.
        NOT_READY = 0x7,
        /// A limit is exceeded.
        LIMIT = 0x8,
        /// A resource is not in a state for this.
        BAD_RESOURCE_STATE = 0x9,
        /// An index is out of range.
        BAD_INDEX = 0xa,
        /// No resources left.
        NO_RESOURCES = 0xf,
        /// A queue pair is in the wrong state.
        BAD_QP_STATE = 0x10,
        /// A packet is wrong.
        BAD_PACKET = 0x30,
        /// Too many completions outstanding for the new size.
        BAD_SIZE = 0x40,
        /// The input's length is wrong.
        BAD_INPUT_LENGTH = 0x50,
        /// The output's length is wrong.
        BAD_OUTPUT_LENGTH = 0x51,
    }
}
