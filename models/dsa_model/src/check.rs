//! What the device refuses before it does anything (DSA specification, "Descriptor checks").

use crate::QueueConfig;
use martlet_dsa_abi::{
    BATCH_DESCRIPTORS_MIN, COMPLETION_ALIGN, CompletionRecord, DELTA_ENTRY_BYTES,
    DELTA_INPUT_BYTES_MAX, DELTA_RECORD_BYTES_MIN, DELTA_WORD_BYTES, DESCRIPTOR_LIST_ALIGN,
    Descriptor, Flags, INTERRUPT_HANDLE_NONE, Opcode, OperationCapability, Status, Version,
};

/// Where a descriptor stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// In a work queue.
    Queue,
    /// In a batch's list.
    Batch,
}

/// Low bits in which the two destinations of a dualcast must agree.
const DUALCAST_MASK: u64 = 0xfff;

/// What a queue's descriptors are checked against.
#[derive(Clone, Copy)]
pub(crate) struct Rules<'a> {
    pub(crate) queue: &'a QueueConfig,
    pub(crate) operations: OperationCapability,
    pub(crate) version: Version,
}

/// Flags of every operation, wherever it stands.
const COMMON: Flags = Flags::COMPLETION_VALID
    .union(Flags::REQUEST_COMPLETION)
    .union(Flags::INTERRUPT)
    .union(Flags::COMPLETION_STEERING)
    .union(Flags::COMPLETION_CLASS);
/// Flags of every operation that writes memory.
const WRITING: Flags = Flags::CACHE_CONTROL
    .union(Flags::STRICT_ORDER)
    .union(Flags::DESTINATION_READBACK)
    .union(Flags::DURABLE);
const CLASSES_12: Flags = Flags::ADDRESS1_CLASS.union(Flags::ADDRESS2_CLASS);
const CLASSES_123: Flags = CLASSES_12.union(Flags::ADDRESS3_CLASS);

/// The flags that an operation has of its own.
fn own_flags(opcode: Opcode) -> Flags {
    match opcode {
        Opcode::BATCH => Flags::ADDRESS1_CLASS,
        Opcode::MEMMOVE | Opcode::APPLY_DELTA => WRITING | CLASSES_12,
        Opcode::MEMFILL => WRITING | Flags::ADDRESS2_CLASS,
        Opcode::COMPARE => Flags::CHECK_RESULT | CLASSES_12,
        Opcode::COMPVAL => Flags::CHECK_RESULT | Flags::ADDRESS1_CLASS,
        Opcode::CREATE_DELTA => Flags::CHECK_RESULT | WRITING | CLASSES_123,
        Opcode::DUALCAST => WRITING | CLASSES_123,
        Opcode::CRC => Flags::CRC_READ_SEED | Flags::ADDRESS1_CLASS | Flags::ADDRESS3_CLASS,
        Opcode::COPY_CRC => Flags::CRC_READ_SEED | WRITING | CLASSES_123,
        _ => Flags::NONE,
    }
}

/// Which of the 24 bytes that depend on the operation it uses, as a mask; the others are reserved.
fn own_bytes(opcode: Opcode) -> u32 {
    match opcode {
        Opcode::COMPARE | Opcode::COMPVAL => 0x00_0001,
        Opcode::CREATE_DELTA => 0x01_0fff,
        Opcode::APPLY_DELTA => 0x00_000f,
        Opcode::DUALCAST => 0x00_00ff,
        Opcode::CRC | Opcode::COPY_CRC => 0x00_ff0f,
        _ => 0,
    }
}

/// Whether the descriptor's completion record can be written at all. If not, hardware reports in
/// its software error register instead.
pub(crate) fn has_record(descriptor: &Descriptor) -> bool {
    let aligned = usize::try_from(descriptor.completion())
        .is_ok_and(|address| address.is_multiple_of(COMPLETION_ALIGN));
    descriptor.flags().contains(Flags::COMPLETION_VALID) && aligned
}

/// Refuses a descriptor with the record that says why.
pub(crate) fn check(
    descriptor: &Descriptor,
    place: Place,
    rules: Rules<'_>,
) -> Result<(), CompletionRecord> {
    let refuse = |status| Err(CompletionRecord::new(status));
    let opcode = descriptor.opcode();
    let nested = place == Place::Batch && matches!(opcode, Opcode::BATCH | Opcode::DRAIN);
    if !rules.operations.has(opcode) || nested {
        return refuse(Status::BAD_OPCODE);
    }
    check_flags(descriptor, place, rules)?;
    if !reserved_are_zero(descriptor) {
        return refuse(Status::RESERVED_NOT_ZERO);
    }
    if descriptor.is_privileged() {
        return refuse(Status::PRIVILEGE);
    }
    if !has_record(descriptor) && descriptor.flags().contains(Flags::COMPLETION_VALID) {
        return refuse(Status::COMPLETION_ALIGN);
    }
    if descriptor.flags().contains(Flags::INTERRUPT)
        && descriptor.interrupt_handle() != INTERRUPT_HANDLE_NONE
    {
        return refuse(Status::INTERRUPT_HANDLE);
    }
    check_size(descriptor, rules).map_or_else(refuse, |()| Ok(()))?;
    check_addresses(descriptor).map_or_else(refuse, |()| Ok(()))
}

fn check_flags(
    descriptor: &Descriptor,
    place: Place,
    rules: Rules<'_>,
) -> Result<(), CompletionRecord> {
    let flags = descriptor.flags();
    let mut allowed = COMMON | own_flags(descriptor.opcode());
    if place == Place::Batch {
        allowed = allowed | Flags::FENCE;
    }
    if rules.queue.block_on_fault {
        allowed = allowed | Flags::BLOCK_ON_FAULT;
    }
    let mut invalid = flags.without(allowed);
    if !flags.contains(Flags::COMPLETION_VALID) && flags.contains(Flags::REQUEST_COMPLETION) {
        invalid = invalid | Flags::REQUEST_COMPLETION;
    }
    if invalid == Flags::NONE {
        return Ok(());
    }
    Err(CompletionRecord::new(Status::INVALID_FLAGS).with_invalid_flags(invalid.bits()))
}

fn reserved_are_zero(descriptor: &Descriptor) -> bool {
    let opcode = descriptor.opcode();
    let own = own_bytes(opcode);
    let mut bytes = descriptor.specific_bytes().iter().enumerate();
    let specific = bytes.all(|(at, byte)| *byte == 0 || own >> at & 1 == 1);
    let unused_zero = match opcode {
        Opcode::NOOP | Opcode::DRAIN => {
            descriptor.source() == 0 && descriptor.destination() == 0 && descriptor.size() == 0
        }
        Opcode::BATCH | Opcode::CRC => descriptor.destination() == 0,
        _ => true,
    };
    descriptor.reserved_are_zero() && specific && unused_zero
}

fn check_size(descriptor: &Descriptor, rules: Rules<'_>) -> Result<(), Status> {
    let size = descriptor.size();
    let as_bytes = usize::try_from(size).unwrap_or(usize::MAX);
    match descriptor.opcode() {
        Opcode::NOOP | Opcode::DRAIN => return Ok(()),
        Opcode::BATCH => {
            let least = if rules.version >= Version::V2 { 1 } else { BATCH_DESCRIPTORS_MIN };
            let fits = (least..=rules.queue.batch_max).contains(&size);
            return if fits { Ok(()) } else { Err(Status::DESCRIPTOR_COUNT) };
        }
        _ => {}
    }
    if size == 0 || u64::from(size) > rules.queue.transfer_bytes_max {
        return Err(Status::TRANSFER_SIZE);
    }
    let is_delta = matches!(descriptor.opcode(), Opcode::CREATE_DELTA | Opcode::APPLY_DELTA);
    let fits_delta = as_bytes <= DELTA_INPUT_BYTES_MAX && as_bytes.is_multiple_of(DELTA_WORD_BYTES);
    if is_delta && !fits_delta {
        return Err(Status::TRANSFER_SIZE);
    }
    let record = match descriptor.opcode() {
        Opcode::CREATE_DELTA => (descriptor.delta_bytes_max(), DELTA_RECORD_BYTES_MIN),
        Opcode::APPLY_DELTA => (descriptor.delta_record_bytes(), DELTA_ENTRY_BYTES),
        _ => return Ok(()),
    };
    let (bytes, least) = (usize::try_from(record.0).unwrap_or(usize::MAX), record.1);
    let fits = bytes >= least
        && bytes.is_multiple_of(DELTA_ENTRY_BYTES)
        && u64::from(record.0) <= rules.queue.transfer_bytes_max;
    if fits { Ok(()) } else { Err(Status::DELTA_SIZE) }
}

fn check_addresses(descriptor: &Descriptor) -> Result<(), Status> {
    let (source, destination) = (descriptor.source(), descriptor.destination());
    let size = u64::from(descriptor.size());
    let overlap = |a: u64, a_bytes: u64, b: u64, b_bytes: u64| {
        a < b.saturating_add(b_bytes) && b < a.saturating_add(a_bytes)
    };
    let refuse_if = |wrong: bool, status| if wrong { Err(status) } else { Ok(()) };
    match descriptor.opcode() {
        Opcode::BATCH => {
            let at = usize::try_from(source).unwrap_or(1);
            refuse_if(!at.is_multiple_of(DESCRIPTOR_LIST_ALIGN), Status::LIST_ALIGN)
        }
        // Overlapping copies are a capability that this device does not claim (GENCAP bit 1).
        Opcode::MEMMOVE | Opcode::COPY_CRC => {
            refuse_if(overlap(source, size, destination, size), Status::OVERLAP)
        }
        Opcode::DUALCAST => {
            let second = descriptor.second_destination();
            let apart = (destination ^ second) & DUALCAST_MASK == 0;
            refuse_if(!apart, Status::DUALCAST_ALIGN)?;
            let any = overlap(source, size, destination, size)
                || overlap(source, size, second, size)
                || overlap(destination, size, second, size);
            refuse_if(any, Status::OVERLAP)
        }
        Opcode::CREATE_DELTA => {
            let record = descriptor.delta_address();
            let aligned = [source, destination, record].iter().all(|at| at.is_multiple_of(8));
            refuse_if(!aligned, Status::ADDRESS_ALIGN)?;
            let record_bytes = u64::from(descriptor.delta_bytes_max());
            let any = overlap(record, record_bytes, source, size)
                || overlap(record, record_bytes, destination, size);
            refuse_if(any, Status::OVERLAP)
        }
        Opcode::APPLY_DELTA => {
            let aligned = [source, destination].iter().all(|at| at.is_multiple_of(8));
            refuse_if(!aligned, Status::ADDRESS_ALIGN)?;
            let record_bytes = u64::from(descriptor.delta_record_bytes());
            refuse_if(overlap(source, record_bytes, destination, size), Status::OVERLAP)
        }
        _ => Ok(()),
    }
}
