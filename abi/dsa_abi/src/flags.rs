//! A descriptor's flags.

use core::fmt;
use core::ops::BitOr;

/// The 24 flag bits of a descriptor; bits 16 to 23 depend on the operation.
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct Flags(u32);

impl Flags {
    /// No flag.
    pub const NONE: Flags = Flags(0);
    /// In a batch: waits for all descriptors before it.
    pub const FENCE: Flags = Flags(0x01);
    /// Waits for the host to map a missing page, which stalls an engine for about 14 us a page.
    pub const BLOCK_ON_FAULT: Flags = Flags(0x02);
    /// The completion record's address is valid.
    pub const COMPLETION_VALID: Flags = Flags(0x04);
    /// Writes a completion record in any case, not in case of an error only.
    pub const REQUEST_COMPLETION: Flags = Flags(0x08);
    /// Interrupts when done.
    pub const INTERRUPT: Flags = Flags(0x10);
    /// Reports when destination and completion record use different steering.
    pub const COMPLETION_STEERING: Flags = Flags(0x20);
    /// A result other than the expected one gives
    /// [`SUCCESS_FALSE_PREDICATE`](crate::Status::SUCCESS_FALSE_PREDICATE).
    pub const CHECK_RESULT: Flags = Flags(0x80);
    /// Traffic class of address 1 (source).
    pub const ADDRESS1_CLASS: Flags = Flags(0x200);
    /// Traffic class of the completion record.
    pub const COMPLETION_CLASS: Flags = Flags(0x1000);
    const MASK: u32 = 0x00ff_ffff;

    /// The low 24 bits of `bits`.
    pub const fn from_bits(bits: u32) -> Flags {
        Flags(bits & Flags::MASK)
    }

    /// As a number below 2^24.
    pub const fn bits(self) -> u32 {
        self.0
    }

    /// Whether all of `other` are set.
    pub const fn contains(self, other: Flags) -> bool {
        self.0 & other.0 == other.0
    }

    /// These without `other`.
    pub const fn without(self, other: Flags) -> Flags {
        Flags(self.0 & !other.0)
    }

    /// Both together, in constants.
    pub const fn union(self, other: Flags) -> Flags {
        Flags(self.0 | other.0)
    }
}

impl BitOr for Flags {
    type Output = Flags;

    fn bitor(self, other: Flags) -> Flags {
        self.union(other)
    }
}

impl fmt::Debug for Flags {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Flags({:#08x})", self.0)
    }
}
