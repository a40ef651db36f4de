//! What operations do to memory, and what their completion records say.

use crate::memory::{Memory, PAGE, PageFault, in_page};
use martlet_dsa_abi::{CompletionRecord, Descriptor, Flags, Opcode, Status};

/// The operations that this device has (OPCAP).
pub const OPERATIONS: [Opcode; 4] = [Opcode::NOOP, Opcode::BATCH, Opcode::DRAIN, Opcode::COMPVAL];

const PAGE_BYTES: usize = 4096;
const _: () = assert!(PAGE_BYTES as u64 == PAGE);

/// Runs a checked descriptor. With `fault_after`, its memory is not mapped behind so many bytes.
pub(crate) fn run(
    memory: &Memory<'_>,
    descriptor: &Descriptor,
    fault_after: Option<u32>,
) -> CompletionRecord {
    if descriptor.opcode() != Opcode::COMPVAL {
        return CompletionRecord::new(Status::SUCCESS);
    }
    match compare_pattern(memory, descriptor, fault_after) {
        Ok(different) => compared(descriptor, different),
        Err((fault, done)) => CompletionRecord::new(Status::PAGE_FAULT)
            .with_completed(done)
            .with_fault_address(fault.at),
    }
}

/// Bytes that an operation moves over the device's fabric.
pub(crate) fn fabric_bytes(descriptor: &Descriptor) -> u64 {
    if descriptor.opcode() == Opcode::COMPVAL { descriptor.size().into() } else { 0 }
}

/// Where the first byte is that differs from the pattern. A fault comes with what was compared
/// before it.
fn compare_pattern(
    memory: &Memory<'_>,
    descriptor: &Descriptor,
    fault_after: Option<u32>,
) -> Result<Option<u32>, (PageFault, u32)> {
    let pattern = pattern_from_any_byte(descriptor.pattern());
    let end = fault_after.map_or(descriptor.size(), |after| after.min(descriptor.size()));
    let at = |offset: u32| descriptor.source().wrapping_add(u64::from(offset));
    let mut page = [0; PAGE_BYTES];
    let mut offset = 0;
    while offset < end {
        let left = usize::try_from(end - offset).unwrap_or(usize::MAX).min(PAGE_BYTES);
        let piece = page.get_mut(..in_page(at(offset), left)).unwrap_or_default();
        memory.read(at(offset), piece).map_err(|fault| (fault, offset))?;
        let turn = usize::try_from(offset % 8).unwrap_or(0);
        let expected = pattern.get(turn..turn + piece.len()).unwrap_or_default();
        if piece != expected {
            let same = piece.iter().zip(expected).take_while(|(one, two)| one == two).count();
            return Ok(Some(offset.saturating_add(u32::try_from(same).unwrap_or(u32::MAX))));
        }
        offset = offset.saturating_add(u32::try_from(piece.len()).unwrap_or(u32::MAX));
    }
    match fault_after {
        Some(after) if after < descriptor.size() => Err((PageFault { at: at(after) }, after)),
        _ => Ok(None),
    }
}

/// A page of the pattern, and once more: for a piece that begins at any of its bytes.
fn pattern_from_any_byte(pattern: u64) -> [u8; PAGE_BYTES + 8] {
    let mut bytes = [0; PAGE_BYTES + 8];
    bytes.chunks_exact_mut(8).for_each(|word| word.copy_from_slice(&pattern.to_le_bytes()));
    bytes
}

/// The record of a comparison; `different` is where the first difference is.
fn compared(descriptor: &Descriptor, different: Option<u32>) -> CompletionRecord {
    let result = u8::from(different.is_some());
    let checks = descriptor.flags().contains(Flags::CHECK_RESULT);
    let wrong = checks && result != descriptor.expected_result();
    let status = if wrong { Status::SUCCESS_FALSE_PREDICATE } else { Status::SUCCESS };
    let completed = different.unwrap_or(descriptor.size());
    CompletionRecord::new(status).with_result(result).with_completed(completed)
}
