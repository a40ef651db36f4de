//! What operations do to memory, and what their completion records say.

use crate::crc::crc32c;
use crate::memory::{Memory, PAGE, PageFault, in_page};
use martlet_dsa_abi::{
    CompletionRecord, DELTA_ENTRY_BYTES, DeltaResult, Descriptor, Flags, Opcode, Status,
};

/// The operations that this device has (OPCAP).
pub const OPERATIONS: [Opcode; 12] = [
    Opcode::NOOP,
    Opcode::BATCH,
    Opcode::DRAIN,
    Opcode::MEMMOVE,
    Opcode::MEMFILL,
    Opcode::COMPARE,
    Opcode::COMPVAL,
    Opcode::CREATE_DELTA,
    Opcode::APPLY_DELTA,
    Opcode::DUALCAST,
    Opcode::CRC,
    Opcode::COPY_CRC,
];

const PAGE_BYTES: usize = 4096;
const _: () = assert!(PAGE_BYTES as u64 == PAGE);

/// Most bytes of a delta record that come from one page: every word of it changed.
const PAGE_DELTA_BYTES: usize = PAGE_BYTES / 8 * DELTA_ENTRY_BYTES;

/// An operation that ended before its end, after this many bytes.
struct Stop {
    record: CompletionRecord,
}

type Step<T> = Result<T, Stop>;

/// Runs a checked descriptor. With `fault_after`, its first address is not mapped behind so many
/// bytes.
pub(crate) fn run(
    memory: &Memory<'_>,
    descriptor: &Descriptor,
    fault_after: Option<u32>,
) -> CompletionRecord {
    let run = Run { memory, descriptor, fault_after };
    let result = match descriptor.opcode() {
        Opcode::MEMMOVE => run.copy(&[descriptor.destination()]),
        Opcode::DUALCAST => run.copy(&[descriptor.destination(), descriptor.second_destination()]),
        Opcode::MEMFILL => run.fill(),
        Opcode::COMPARE => run.compare(),
        Opcode::COMPVAL => run.compare_pattern(),
        Opcode::CREATE_DELTA => run.create_delta(),
        Opcode::APPLY_DELTA => run.apply_delta(),
        Opcode::CRC => run.crc(&[]),
        Opcode::COPY_CRC => run.crc(&[descriptor.destination()]),
        _ => Ok(CompletionRecord::new(Status::SUCCESS)),
    };
    result.unwrap_or_else(|stop| stop.record)
}

/// Bytes that an operation moves over the device's fabric, per byte of its transfer size: two
/// inputs or two outputs take twice as long as one (LightDSA: COMPARE runs at half of COMPVAL).
pub(crate) fn fabric_factor(opcode: Opcode) -> u64 {
    match opcode {
        Opcode::NOOP | Opcode::DRAIN | Opcode::BATCH => 0,
        Opcode::COMPARE | Opcode::CREATE_DELTA | Opcode::DUALCAST => 2,
        _ => 1,
    }
}

struct Run<'a> {
    memory: &'a Memory<'a>,
    descriptor: &'a Descriptor,
    fault_after: Option<u32>,
}

/// A part of an operation that stays inside of one page at each of its addresses.
#[derive(Clone, Copy)]
struct Piece {
    offset: u32,
    bytes: usize,
}

impl Piece {
    fn of(self, address: u64) -> u64 {
        address.wrapping_add(u64::from(self.offset))
    }
}

impl Run<'_> {
    /// The pieces of an operation, whose addresses these are.
    fn pieces(&self, addresses: &[u64], mut body: impl FnMut(Piece) -> Step<()>) -> Step<()> {
        let size = self.descriptor.size();
        let mut offset = 0_u32;
        while offset < size {
            let left = usize::try_from(size - offset).unwrap_or(usize::MAX).min(PAGE_BYTES);
            let at = |address: &u64| address.wrapping_add(u64::from(offset));
            let mut bytes =
                addresses.iter().fold(left, |bytes, address| in_page(at(address), bytes));
            if let Some(after) = self.fault_after {
                if after <= offset {
                    let first = addresses.first().map_or(0, at);
                    let write = self.descriptor.opcode() == Opcode::MEMFILL;
                    return Err(stopped(PageFault { at: first, write }, offset));
                }
                bytes = bytes.min(usize::try_from(after - offset).unwrap_or(usize::MAX));
            }
            body(Piece { offset, bytes })?;
            offset = offset.saturating_add(u32::try_from(bytes).unwrap_or(u32::MAX));
        }
        Ok(())
    }

    fn read(&self, address: u64, piece: Piece, into: &mut [u8; PAGE_BYTES]) -> Step<()> {
        let into = into.get_mut(..piece.bytes).unwrap_or_default();
        self.memory.read(piece.of(address), into).map_err(|fault| stopped(fault, piece.offset))
    }

    fn write(&self, address: u64, piece: Piece, from: &[u8; PAGE_BYTES]) -> Step<()> {
        let from = from.get(..piece.bytes).unwrap_or_default();
        self.memory.write(piece.of(address), from).map_err(|fault| stopped(fault, piece.offset))
    }

    fn done(&self) -> CompletionRecord {
        CompletionRecord::new(Status::SUCCESS).with_completed(self.descriptor.size())
    }

    fn copy(&self, destinations: &[u64]) -> Step<CompletionRecord> {
        let source = self.descriptor.source();
        let addresses: Vec<u64> =
            core::iter::once(source).chain(destinations.iter().copied()).collect();
        let mut page = [0; PAGE_BYTES];
        self.pieces(&addresses, |piece| {
            self.read(source, piece, &mut page)?;
            destinations.iter().try_for_each(|to| self.write(*to, piece, &page))
        })?;
        Ok(self.done())
    }

    fn fill(&self) -> Step<CompletionRecord> {
        let to = self.descriptor.destination();
        let page = pattern_page(self.descriptor.source());
        self.pieces(&[to], |piece| self.write(to, piece, &turned(&page, piece.offset)))?;
        Ok(self.done())
    }

    fn compare(&self) -> Step<CompletionRecord> {
        let (one, two) = (self.descriptor.source(), self.descriptor.destination());
        let (mut left, mut right) = ([0; PAGE_BYTES], [0; PAGE_BYTES]);
        let mut different = None;
        self.pieces(&[one, two], |piece| {
            if different.is_none() {
                self.read(one, piece, &mut left)?;
                self.read(two, piece, &mut right)?;
                different = first_difference(&left, &right, piece);
            }
            Ok(())
        })?;
        Ok(self.compared(different))
    }

    fn compare_pattern(&self) -> Step<CompletionRecord> {
        let at = self.descriptor.source();
        let pattern = pattern_page(self.descriptor.destination());
        let mut page = [0; PAGE_BYTES];
        let mut different = None;
        self.pieces(&[at], |piece| {
            if different.is_none() {
                self.read(at, piece, &mut page)?;
                different = if piece.offset.is_multiple_of(8) {
                    first_difference(&page, &pattern, piece)
                } else {
                    first_difference(&page, &turned(&pattern, piece.offset), piece)
                };
            }
            Ok(())
        })?;
        Ok(self.compared(different))
    }

    /// The record of a comparison; `different` is where the first difference is.
    fn compared(&self, different: Option<u32>) -> CompletionRecord {
        let result = u8::from(different.is_some());
        let expected = self.descriptor.expected_result();
        let status = self.predicate(result == expected);
        let completed = different.unwrap_or(self.descriptor.size());
        CompletionRecord::new(status).with_result(result).with_completed(completed)
    }

    fn predicate(&self, holds: bool) -> Status {
        if self.descriptor.flags().contains(Flags::CHECK_RESULT) && !holds {
            Status::SUCCESS_FALSE_PREDICATE
        } else {
            Status::SUCCESS
        }
    }

    fn create_delta(&self) -> Step<CompletionRecord> {
        let (old, new) = (self.descriptor.source(), self.descriptor.destination());
        let to = self.descriptor.delta_address();
        let most = self.descriptor.delta_bytes_max();
        let (mut left, mut right) = ([0; PAGE_BYTES], [0; PAGE_BYTES]);
        let mut entries = Vec::with_capacity(PAGE_DELTA_BYTES);
        let (mut written, mut overflow) = (0_u32, None);
        self.pieces(&[old, new], |piece| {
            if overflow.is_some() {
                return Ok(());
            }
            self.read(old, piece, &mut left)?;
            self.read(new, piece, &mut right)?;
            entries.clear();
            let room = usize::try_from(most - written).unwrap_or(usize::MAX);
            overflow = append_differences(&left, &right, piece, room, &mut entries);
            let at = to.wrapping_add(u64::from(written));
            let fault = |fault| delta_stopped(fault, piece.offset, written);
            self.memory.write(at, &entries).map_err(fault)?;
            written = written.saturating_add(u32::try_from(entries.len()).unwrap_or(u32::MAX));
            Ok(())
        })
        .map_err(|stop| Stop { record: stop.record.with_delta_bytes(written) })?;
        let result = match (overflow, written) {
            (Some(_), _) => DeltaResult::OVERFLOW,
            (None, 0) => DeltaResult::EQUAL,
            (None, _) => DeltaResult::RECORDED,
        };
        let mask = u32::from(self.descriptor.expected_result_mask());
        let status = self.predicate(mask >> result.0 & 1 == 1);
        Ok(CompletionRecord::new(status)
            .with_result(result.0)
            .with_completed(overflow.unwrap_or(self.descriptor.size()))
            .with_delta_bytes(written))
    }

    fn apply_delta(&self) -> Step<CompletionRecord> {
        let (from, to) = (self.descriptor.source(), self.descriptor.destination());
        let record_bytes = self.descriptor.delta_record_bytes();
        let words = self.descriptor.size() / 8;
        let mut done = 0_u32;
        let mut last = None;
        while done < record_bytes {
            let fault = |fault| stopped(fault, done);
            if self.fault_after.is_some_and(|after| after <= done) {
                let at = from.wrapping_add(u64::from(done));
                return Err(fault(PageFault { at, write: false }));
            }
            let mut entry = [0; DELTA_ENTRY_BYTES];
            self.memory.read(from.wrapping_add(u64::from(done)), &mut entry).map_err(fault)?;
            let [low, high, data @ ..] = entry;
            let word = u32::from(u16::from_le_bytes([low, high]));
            let wrong = match last {
                Some(last) if word <= last => Some(Status::DELTA_OFFSET_ORDER),
                _ if word >= words => Some(Status::DELTA_OFFSET_RANGE),
                _ => None,
            };
            if let Some(status) = wrong {
                return Err(Stop { record: CompletionRecord::new(status).with_completed(done) });
            }
            last = Some(word);
            self.memory.write(to.wrapping_add(u64::from(word) * 8), &data).map_err(fault)?;
            done += 10;
        }
        Ok(CompletionRecord::new(Status::SUCCESS).with_completed(done))
    }

    fn crc(&self, destinations: &[u64]) -> Step<CompletionRecord> {
        let source = self.descriptor.source();
        let addresses: Vec<u64> =
            core::iter::once(source).chain(destinations.iter().copied()).collect();
        let mut page = [0; PAGE_BYTES];
        let mut crc = self.crc_seed()?;
        self.pieces(&addresses, |piece| {
            self.read(source, piece, &mut page)?;
            destinations.iter().try_for_each(|to| self.write(*to, piece, &page))?;
            crc = crc32c(crc, page.get(..piece.bytes).unwrap_or_default());
            Ok(())
        })
        // What was done so far goes on from here.
        .map_err(|stop| Stop { record: stop.record.with_crc(crc) })?;
        Ok(self.done().with_crc(crc))
    }

    fn crc_seed(&self) -> Step<u32> {
        if !self.descriptor.flags().contains(Flags::CRC_READ_SEED) {
            return Ok(self.descriptor.crc_seed());
        }
        let mut seed = [0; 4];
        let at = self.descriptor.crc_seed_address();
        self.memory.read(at, &mut seed).map_err(|fault| stopped(fault, 0))?;
        Ok(u32::from_le_bytes(seed))
    }
}

fn stopped(fault: PageFault, done: u32) -> Stop {
    let record =
        CompletionRecord::new(Status::PAGE_FAULT).with_completed(done).with_fault_address(fault.at);
    Stop { record: if fault.write { record.with_write_fault() } else { record } }
}

fn delta_stopped(fault: PageFault, done: u32, written: u32) -> Stop {
    Stop { record: stopped(fault, done).record.with_delta_bytes(written) }
}

fn pattern_page(pattern: u64) -> [u8; PAGE_BYTES] {
    let mut page = [0; PAGE_BYTES];
    for word in page.chunks_exact_mut(8) {
        word.copy_from_slice(&pattern.to_le_bytes());
    }
    page
}

/// The pattern as it continues `offset` bytes behind its begin.
fn turned(page: &[u8; PAGE_BYTES], offset: u32) -> [u8; PAGE_BYTES] {
    let mut turned = *page;
    turned.rotate_left(usize::try_from(offset % 8).unwrap_or(0));
    turned
}

fn first_difference(
    left: &[u8; PAGE_BYTES],
    right: &[u8; PAGE_BYTES],
    piece: Piece,
) -> Option<u32> {
    let (left, right) = (left.get(..piece.bytes)?, right.get(..piece.bytes)?);
    if left == right {
        return None;
    }
    let at = left.iter().zip(right).position(|(one, two)| one != two)?;
    Some(piece.offset.saturating_add(u32::try_from(at).unwrap_or(u32::MAX)))
}

/// Appends an entry for each word that differs, `room` bytes at most; where the first one is that
/// has no room.
fn append_differences(
    old: &[u8; PAGE_BYTES],
    new: &[u8; PAGE_BYTES],
    piece: Piece,
    room: usize,
    entries: &mut Vec<u8>,
) -> Option<u32> {
    let words = old.chunks_exact(8).zip(new.chunks_exact(8)).take(piece.bytes / 8);
    for (word, (_, data)) in (piece.offset / 8..).zip(words).filter(|(_, (old, new))| old != new) {
        if entries.len() + DELTA_ENTRY_BYTES > room {
            return Some(word.saturating_mul(8));
        }
        // An input has at most 2^16 words.
        entries.extend_from_slice(&u16::try_from(word).unwrap_or(u16::MAX).to_le_bytes());
        entries.extend_from_slice(data);
    }
    None
}
