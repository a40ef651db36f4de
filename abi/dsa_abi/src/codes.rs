//! Operation and completion codes.

use core::fmt;

macro_rules! open_codes {
    ($type:ident { $($(#[$doc:meta])* $name:ident = $value:literal, $text:literal;)* }) => {
        impl $type {
            $($(#[$doc])* pub const $name: $type = $type($value);)*

            /// What the code means; `None` for one that this version does not know.
            pub const fn name(self) -> Option<&'static str> {
                match self {
                    $($type::$name => Some($text),)*
                    _ => None,
                }
            }
        }

        impl fmt::Debug for $type {
            fmt_code!($type);
        }

        impl fmt::Display for $type {
            fmt_code!($type);
        }
    };
}

macro_rules! fmt_code {
    ($type:ident) => {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            match self.name() {
                Some(name) => f.write_str(name),
                None => write!(f, "{} {:#x}", stringify!($type), self.0),
            }
        }
    };
}

/// What a descriptor asks for (byte 7 of it).
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Opcode(pub u8);

open_codes! { Opcode {
    /// Nothing; completes like an operation.
    NOOP = 0x00, "no-op";
    /// Runs a list of descriptors.
    BATCH = 0x01, "batch";
    /// Completes after everything that this process submitted to the work queue before.
    DRAIN = 0x02, "drain";
    /// Compares memory with a pattern of 8 bytes.
    COMPVAL = 0x06, "compare pattern";
} }

/// How an operation ended (byte 0 of a completion record, without [`Status::WRITE_FAULT`]).
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Status(pub u8);

open_codes! { Status {
    /// The record was not written yet.
    NONE = 0x00, "not completed";
    /// Done.
    SUCCESS = 0x01, "success";
    /// Done; with [`crate::Flags::CHECK_RESULT`], and the result was not the expected one.
    SUCCESS_FALSE_PREDICATE = 0x02, "success with false predicate";
    /// Stopped at a page that is not mapped, after the record's completed bytes: the descriptor did
    /// not ask to block on faults.
    PAGE_FAULT = 0x03, "page fault, partially completed";
    /// The host answered a page request with "invalid".
    PAGE_FAULT_INVALID = 0x04, "page request refused";
    /// A batch of which some descriptor did not succeed: their records say which.
    BATCH_FAILED = 0x05, "some descriptor of the batch failed";
    /// A batch whose descriptor list could not be read to its end; later records stay unwritten.
    BATCH_LIST_FAULT = 0x06, "page fault on the descriptor list";
    /// A delta record's offsets do not ascend.
    DELTA_OFFSET_ORDER = 0x07, "delta record offsets do not ascend";
    /// A delta record's offset leaves the destination.
    DELTA_OFFSET_RANGE = 0x08, "delta record offset out of range";
    /// A data integrity field is wrong.
    DIF_ERROR = 0x09, "DIF error";
    /// The operation does not exist, or the work queue may not do it.
    BAD_OPCODE = 0x10, "unsupported operation";
    /// A flag that the operation does not have.
    INVALID_FLAGS = 0x11, "invalid flags";
    /// A reserved field is not zero.
    RESERVED_NOT_ZERO = 0x12, "reserved field not zero";
    /// A transfer size of zero, or above the work queue's limit.
    TRANSFER_SIZE = 0x13, "transfer size out of range";
    /// A batch of fewer than two descriptors, or of more than the work queue's limit.
    DESCRIPTOR_COUNT = 0x14, "descriptor count out of range";
    /// A delta record size that is not allowed.
    DELTA_SIZE = 0x15, "delta record size out of range";
    /// Source and destination overlap.
    OVERLAP = 0x16, "overlapping buffers";
    /// The two destinations of a dualcast differ in their low 12 bits.
    DUALCAST_ALIGN = 0x17, "dualcast destinations not aligned";
    /// The descriptor list is not at a multiple of 64.
    LIST_ALIGN = 0x18, "descriptor list not aligned";
    /// No such interrupt handle.
    INTERRUPT_HANDLE = 0x19, "invalid interrupt handle";
    /// The completion record's address has no translation.
    COMPLETION_TRANSLATION = 0x1a, "completion record not mapped";
    /// The completion record is not at a multiple of 32.
    COMPLETION_ALIGN = 0x1b, "completion record not aligned";
    /// An address or a size that the operation wants aligned is not.
    ADDRESS_ALIGN = 0x1c, "address not aligned";
    /// Privileged descriptors are not allowed here.
    PRIVILEGE = 0x1d, "privilege error";
    /// A traffic class conflicts with the device's configuration.
    TRAFFIC_CLASS = 0x1e, "traffic class conflict";
    /// A readback address faulted.
    READBACK_FAULT = 0x1f, "page fault on the readback address";
    /// The hardware failed.
    HARDWARE = 0x20, "hardware error";
    /// The hardware failed in reading back.
    HARDWARE_READBACK = 0x21, "hardware error in destination readback";
    /// An address has no translation for another reason than a missing page.
    TRANSLATION = 0x22, "address translation failed";
} }

impl Status {
    /// Bits of the status byte that are the code: `DSA_COMP_STATUS_MASK`.
    pub const MASK: u8 = 0x7f;
    /// Set in the status byte if the access that faulted was a write.
    pub const WRITE_FAULT: u8 = 0x80;

    /// The code in a record's status byte.
    pub const fn from_byte(byte: u8) -> Status {
        Status(byte & Status::MASK)
    }

    /// Whether the operation did all that was asked, whatever its result.
    pub const fn is_success(self) -> bool {
        matches!(self, Status::SUCCESS | Status::SUCCESS_FALSE_PREDICATE)
    }
}
