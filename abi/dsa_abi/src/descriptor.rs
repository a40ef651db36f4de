//! The work descriptor.

use crate::{Flags, Opcode};
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Bytes of a descriptor. In a batch's list they lie one behind the other.
pub const DESCRIPTOR_BYTES: usize = 64;
/// The interrupt handle of a descriptor that does not interrupt.
pub const INTERRUPT_HANDLE_NONE: u16 = 0;

/// Flags of every descriptor that is watched by its completion record.
const WATCHED: Flags = Flags::COMPLETION_VALID.union(Flags::REQUEST_COMPLETION);

/// One order to the device.
///
/// ```text
/// offset  size  field
///      0     4  PASID (20 bits), reserved (11), privileged (1)
///      4     4  flags (24 bits), operation (8)
///      8     8  completion record address
///     16     8  source | descriptor list
///     24     8  pattern to compare with
///     32     4  transfer size in bytes | number of descriptors
///     36     2  interrupt handle
///     38     2  reserved
///     40    24  depends on the operation
/// ```
///
/// ENQCMD puts the PASID of the thread in and clears the privileged bit; both are left zero.
#[derive(
    Clone,
    Copy,
    Debug,
    Default,
    PartialEq,
    Eq,
    FromBytes,
    IntoBytes,
    Immutable,
    KnownLayout,
    Unaligned,
)]
#[repr(C)]
pub struct Descriptor {
    pasid: U32,
    flags_opcode: U32,
    completion: U64,
    source: U64,
    pattern: U64,
    size: U32,
    interrupt_handle: U16,
    reserved: U16,
    specific: [u8; 24],
}

const _: () = assert!(size_of::<Descriptor>() == DESCRIPTOR_BYTES);

/// Where the part that depends on the operation has the result that a comparison expects.
const EXPECTED_RESULT: usize = 0;

impl Descriptor {
    /// An operation without addresses that writes its completion record at `completion` (a multiple
    /// of 32).
    pub fn new(opcode: Opcode, completion: u64) -> Descriptor {
        let mut descriptor = Descriptor { completion: completion.into(), ..Descriptor::default() };
        descriptor.set_code(WATCHED, opcode);
        descriptor
    }

    /// A no-op.
    pub fn noop(completion: u64) -> Descriptor {
        Descriptor::new(Opcode::NOOP, completion)
    }

    /// Completes after everything that this process submitted to the work queue before.
    pub fn drain(completion: u64) -> Descriptor {
        Descriptor::new(Opcode::DRAIN, completion)
    }

    /// Runs `count` descriptors, at least [`crate::BATCH_DESCRIPTORS_MIN`], that lie at `list` (a
    /// multiple of 64).
    pub fn batch(list: u64, count: u32, completion: u64) -> Descriptor {
        Descriptor::new(Opcode::BATCH, completion).with_source(list).with_size(count)
    }

    /// Compares `bytes` bytes at `source` with a pattern repeated.
    pub fn compare_pattern(source: u64, pattern: u64, bytes: u32, completion: u64) -> Descriptor {
        Descriptor::new(Opcode::COMPVAL, completion)
            .with_source(source)
            .with_pattern(pattern)
            .with_size(bytes)
    }

    /// The descriptor in memory or as it was submitted.
    pub fn from_bytes(bytes: &[u8; DESCRIPTOR_BYTES]) -> Descriptor {
        zerocopy::transmute!(*bytes)
    }

    /// The descriptor as it lies in memory.
    pub fn to_bytes(self) -> [u8; DESCRIPTOR_BYTES] {
        zerocopy::transmute!(self)
    }

    /// The same with these flags instead of its own.
    pub fn with_flags(mut self, flags: Flags) -> Descriptor {
        self.set_code(flags, self.opcode());
        self
    }

    /// The same with its result checked: another one than `expected` ends it with
    /// [`crate::Status::SUCCESS_FALSE_PREDICATE`].
    pub fn with_expected_result(self, expected: u8) -> Descriptor {
        let mut checked = self.with_flags(self.flags() | Flags::CHECK_RESULT);
        checked.specific[EXPECTED_RESULT] = expected;
        checked
    }

    fn with_source(mut self, source: u64) -> Descriptor {
        self.source = source.into();
        self
    }

    fn with_pattern(mut self, pattern: u64) -> Descriptor {
        self.pattern = pattern.into();
        self
    }

    fn with_size(mut self, size: u32) -> Descriptor {
        self.size = size.into();
        self
    }

    fn set_code(&mut self, flags: Flags, opcode: Opcode) {
        self.flags_opcode = (flags.bits() | u32::from(opcode.0) << 24).into();
    }

    /// The address space of the process that submitted it.
    pub fn pasid(&self) -> u32 {
        self.pasid.get() & 0x000f_ffff
    }

    /// Whether it asks for the kernel's rights.
    pub fn is_privileged(&self) -> bool {
        self.pasid.get() >> 31 != 0
    }

    /// The flags.
    pub fn flags(&self) -> Flags {
        Flags::from_bits(self.flags_opcode.get())
    }

    /// The operation.
    pub fn opcode(&self) -> Opcode {
        let [.., opcode] = self.flags_opcode.get().to_le_bytes();
        Opcode(opcode)
    }

    /// Where its completion record goes, if [`Flags::COMPLETION_VALID`] is set.
    pub fn completion(&self) -> u64 {
        self.completion.get()
    }

    /// Where the compared bytes are; the list of a batch.
    pub fn source(&self) -> u64 {
        self.source.get()
    }

    /// The pattern compared with.
    pub fn pattern(&self) -> u64 {
        self.pattern.get()
    }

    /// Transfer size in bytes; of a batch the number of descriptors.
    pub fn size(&self) -> u32 {
        self.size.get()
    }

    /// Which interrupt, with [`Flags::INTERRUPT`].
    pub fn interrupt_handle(&self) -> u16 {
        self.interrupt_handle.get()
    }

    /// The result that [`Flags::CHECK_RESULT`] expects.
    pub fn expected_result(&self) -> u8 {
        self.specific[EXPECTED_RESULT]
    }

    /// The 24 bytes that depend on the operation.
    pub fn specific_bytes(&self) -> &[u8; 24] {
        &self.specific
    }

    /// Whether the fields that no operation uses are zero: bits 20 to 30 of the first word, and
    /// bytes 38 and 39.
    pub fn reserved_are_zero(&self) -> bool {
        self.pasid.get() & 0x7ff0_0000 == 0 && self.reserved.get() == 0
    }
}
