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
///     16     8  source | fill pattern | descriptor list | delta record to apply
///     24     8  destination | second source | pattern to compare with
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
    destination: U64,
    size: U32,
    interrupt_handle: U16,
    reserved: U16,
    specific: [u8; 24],
}

const _: () = assert!(size_of::<Descriptor>() == DESCRIPTOR_BYTES);

/// Offsets in the part that depends on the operation.
mod specific {
    pub(super) const EXPECTED_RESULT: usize = 0;
    pub(super) const DELTA_ADDRESS: usize = 0;
    pub(super) const DELTA_BYTES_MAX: usize = 8;
    pub(super) const EXPECTED_RESULT_MASK: usize = 16;
    pub(super) const DELTA_RECORD_BYTES: usize = 0;
    pub(super) const SECOND_DESTINATION: usize = 0;
    pub(super) const CRC_SEED: usize = 0;
    pub(super) const CRC_SEED_ADDRESS: usize = 8;
}

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
            .with_destination(pattern)
            .with_size(bytes)
    }

    /// Compares `bytes` bytes at two places.
    pub fn compare(source: u64, other: u64, bytes: u32, completion: u64) -> Descriptor {
        Descriptor::new(Opcode::COMPARE, completion)
            .with_source(source)
            .with_destination(other)
            .with_size(bytes)
    }

    /// Copies `bytes` bytes.
    pub fn copy(source: u64, destination: u64, bytes: u32, completion: u64) -> Descriptor {
        Descriptor::new(Opcode::MEMMOVE, completion)
            .with_source(source)
            .with_destination(destination)
            .with_size(bytes)
    }

    /// Fills `bytes` bytes at `destination` with a pattern repeated.
    pub fn fill(destination: u64, pattern: u64, bytes: u32, completion: u64) -> Descriptor {
        Descriptor::new(Opcode::MEMFILL, completion)
            .with_source(pattern)
            .with_destination(destination)
            .with_size(bytes)
    }

    /// Computes the CRC-32C of `bytes` bytes, going on from `seed`. Zero is the seed of a new
    /// checksum; the result is the CRC-32/ISCSI of RFC 3720, and the seed of what follows.
    pub fn crc(source: u64, bytes: u32, seed: u32, completion: u64) -> Descriptor {
        Descriptor::new(Opcode::CRC, completion)
            .with_source(source)
            .with_size(bytes)
            .with_specific(specific::CRC_SEED, &seed.to_le_bytes())
    }

    /// Copies `bytes` bytes and computes their CRC-32C, as [`Descriptor::crc`] does.
    pub fn copy_crc(
        source: u64,
        destination: u64,
        bytes: u32,
        seed: u32,
        completion: u64,
    ) -> Descriptor {
        Descriptor::new(Opcode::COPY_CRC, completion)
            .with_source(source)
            .with_destination(destination)
            .with_size(bytes)
            .with_specific(specific::CRC_SEED, &seed.to_le_bytes())
    }

    /// Records at `record` how the `bytes` bytes at `changed` differ from those at `original`, in at
    /// most `record_bytes_max` bytes. Addresses and `bytes` are multiples of 8.
    pub fn create_delta(
        original: u64,
        changed: u64,
        bytes: u32,
        record: u64,
        record_bytes_max: u32,
        completion: u64,
    ) -> Descriptor {
        Descriptor::new(Opcode::CREATE_DELTA, completion)
            .with_source(original)
            .with_destination(changed)
            .with_size(bytes)
            .with_specific(specific::DELTA_ADDRESS, &record.to_le_bytes())
            .with_specific(specific::DELTA_BYTES_MAX, &record_bytes_max.to_le_bytes())
    }

    /// Changes the `bytes` bytes at `destination` by the `record_bytes` bytes of delta record at
    /// `record`.
    pub fn apply_delta(
        record: u64,
        record_bytes: u32,
        destination: u64,
        bytes: u32,
        completion: u64,
    ) -> Descriptor {
        Descriptor::new(Opcode::APPLY_DELTA, completion)
            .with_source(record)
            .with_destination(destination)
            .with_size(bytes)
            .with_specific(specific::DELTA_RECORD_BYTES, &record_bytes.to_le_bytes())
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
        self.with_flags(self.flags() | Flags::CHECK_RESULT)
            .with_specific(specific::EXPECTED_RESULT, &[expected])
    }

    fn with_source(mut self, source: u64) -> Descriptor {
        self.source = source.into();
        self
    }

    fn with_destination(mut self, destination: u64) -> Descriptor {
        self.destination = destination.into();
        self
    }

    fn with_size(mut self, size: u32) -> Descriptor {
        self.size = size.into();
        self
    }

    fn with_specific(mut self, offset: usize, bytes: &[u8]) -> Descriptor {
        let places = self.specific.iter_mut().skip(offset).zip(bytes);
        places.for_each(|(to, from)| *to = *from);
        self
    }

    fn set_code(&mut self, flags: Flags, opcode: Opcode) {
        self.flags_opcode = (flags.bits() | u32::from(opcode.0) << 24).into();
    }

    fn specific<const N: usize>(&self, offset: usize) -> [u8; N] {
        let mut bytes = [0; N];
        let places = bytes.iter_mut().zip(self.specific.iter().skip(offset));
        places.for_each(|(to, from)| *to = *from);
        bytes
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

    /// Source; the pattern of a fill; the list of a batch; the record of an apply.
    pub fn source(&self) -> u64 {
        self.source.get()
    }

    /// Destination; the second source of a comparison and of a delta; the pattern compared with.
    pub fn destination(&self) -> u64 {
        self.destination.get()
    }

    /// Transfer size in bytes; of a batch the number of descriptors.
    pub fn size(&self) -> u32 {
        self.size.get()
    }

    /// Which interrupt, with [`Flags::INTERRUPT`].
    pub fn interrupt_handle(&self) -> u16 {
        self.interrupt_handle.get()
    }

    /// The result that [`Flags::CHECK_RESULT`] expects of a comparison.
    pub fn expected_result(&self) -> u8 {
        let [result] = self.specific(specific::EXPECTED_RESULT);
        result
    }

    /// Which results [`Flags::CHECK_RESULT`] expects of creating a delta, as a mask by number.
    pub fn expected_result_mask(&self) -> u8 {
        let [mask] = self.specific(specific::EXPECTED_RESULT_MASK);
        mask
    }

    /// Where a delta record is created.
    pub fn delta_address(&self) -> u64 {
        u64::from_le_bytes(self.specific(specific::DELTA_ADDRESS))
    }

    /// How long the created delta record may be.
    pub fn delta_bytes_max(&self) -> u32 {
        u32::from_le_bytes(self.specific(specific::DELTA_BYTES_MAX))
    }

    /// How long the applied delta record is.
    pub fn delta_record_bytes(&self) -> u32 {
        u32::from_le_bytes(self.specific(specific::DELTA_RECORD_BYTES))
    }

    /// The second destination of a dualcast.
    pub fn second_destination(&self) -> u64 {
        u64::from_le_bytes(self.specific(specific::SECOND_DESTINATION))
    }

    /// What a CRC goes on from.
    pub fn crc_seed(&self) -> u32 {
        u32::from_le_bytes(self.specific(specific::CRC_SEED))
    }

    /// Where that is read from, with [`Flags::CRC_READ_SEED`].
    pub fn crc_seed_address(&self) -> u64 {
        u64::from_le_bytes(self.specific(specific::CRC_SEED_ADDRESS))
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
