//! What the device refuses before it does anything (DSA specification, "Descriptor checks").

use crate::QueueConfig;
use martlet_dsa_abi::{
    BATCH_DESCRIPTORS_MIN, COMPLETION_ALIGN, CompletionRecord, DESCRIPTOR_LIST_ALIGN, Descriptor,
    Flags, INTERRUPT_HANDLE_NONE, Opcode, OperationCapability, Status, Version,
};

/// Where a descriptor stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// In a work queue.
    Queue,
    /// In a batch's list.
    Batch,
}

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
/// The flags that an operation has of its own.
fn own_flags(opcode: Opcode) -> Flags {
    match opcode {
        Opcode::BATCH => Flags::ADDRESS1_CLASS,
        Opcode::COMPVAL => Flags::CHECK_RESULT | Flags::ADDRESS1_CLASS,
        _ => Flags::NONE,
    }
}

/// Which of the 24 bytes that depend on the operation it uses, as a mask; the others are reserved.
fn own_bytes(opcode: Opcode) -> u32 {
    match opcode {
        Opcode::COMPVAL => 0x00_0001,
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
    check_flags(descriptor)?;
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
    check_size(descriptor, rules).or_else(refuse)
}

fn check_flags(descriptor: &Descriptor) -> Result<(), CompletionRecord> {
    let flags = descriptor.flags();
    let mut invalid = flags.without(COMMON | own_flags(descriptor.opcode()));
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
            descriptor.source() == 0 && descriptor.pattern() == 0 && descriptor.size() == 0
        }
        Opcode::BATCH => descriptor.pattern() == 0,
        _ => true,
    };
    descriptor.reserved_are_zero() && specific && unused_zero
}

fn check_size(descriptor: &Descriptor, rules: Rules<'_>) -> Result<(), Status> {
    let size = descriptor.size();
    let refuse_unless = |good: bool, status| if good { Ok(()) } else { Err(status) };
    match descriptor.opcode() {
        Opcode::BATCH => {
            let least = if rules.version >= Version::V2 { 1 } else { BATCH_DESCRIPTORS_MIN };
            let fits = (least..=rules.queue.batch_max).contains(&size);
            refuse_unless(fits, Status::DESCRIPTOR_COUNT)?;
            let list = usize::try_from(descriptor.source()).unwrap_or(1);
            refuse_unless(list.is_multiple_of(DESCRIPTOR_LIST_ALIGN), Status::LIST_ALIGN)
        }
        Opcode::COMPVAL => {
            let fits = size > 0 && u64::from(size) <= rules.queue.transfer_bytes_max;
            refuse_unless(fits, Status::TRANSFER_SIZE)
        }
        _ => Ok(()),
    }
}
