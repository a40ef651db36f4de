//! Pages that were sent before, as a list of what changed.
#![allow(unsafe_code)]
// UNSAFETY: buffers that a device reads and writes are seen as bytes, while it does neither.

use crate::buffer::Buffer;
use crate::cpu::{self, PAGE_BYTES};
use crate::gate::Gate;
use crate::operate::{Operator, Ran};
use crate::{PageRun, SharedMemory, WorkQueue};
use martlet_device_io::{Dma, DmaError};
use martlet_dsa_abi::{
    CompletionRecord, DELTA_ENTRY_BYTES, DELTA_RECORD_BYTES_MIN, DELTA_WORD_BYTES, DeltaEntry,
    DeltaResult, Descriptor, Status,
};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;
use zerocopy::{FromBytes, IntoBytes};

/// Words in a page.
const WORDS: usize = PAGE_BYTES / DELTA_WORD_BYTES;
/// The longest record of a page: every word changed.
pub(crate) const RECORD_BYTES_MAX: usize = WORDS * DELTA_ENTRY_BYTES;

/// How to send a page that was sent before. Whichever it is, the copy in the encoder is then what
/// the destination has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Encoded<'a> {
    /// Not at all: it is what it was.
    Unchanged,
    /// As a delta record, entries of [`DeltaEntry`], for
    /// [`Destination::apply`](crate::Destination::apply).
    Delta(&'a [u8]),
    /// As a whole: too much has changed. The page's content.
    Whole(&'a [u8]),
}

/// Keeps copies of pages that were sent, and tells how they changed since. Pages are sent from the
/// copies, never from guest memory, which may be newer.
pub struct DeltaEncoder {
    operator: Operator,
    memory: Arc<SharedMemory>,
    /// The pages as the destination has them. The device only reads them.
    sent: Buffer,
    slots: usize,
    /// The record that the device writes.
    staging: Buffer,
    /// The record that is handed out, made by the CPU or copied from the device's.
    record: Vec<u8>,
    /// A page's newest content, where the CPU compares.
    newest: Vec<u8>,
}

impl DeltaEncoder {
    /// For copies of `slots` pages, by the queues and with the gate as for
    /// [`ZeroEngine`](crate::ZeroEngine::new).
    pub fn new(
        slots: usize,
        queues: Vec<Arc<WorkQueue>>,
        gate: Arc<dyn Gate>,
        memory: Arc<SharedMemory>,
        dma: &dyn Dma,
        deadline: Duration,
    ) -> Result<DeltaEncoder, DmaError> {
        Ok(DeltaEncoder {
            operator: Operator::new(queues, gate, dma, deadline, 0)?,
            memory,
            sent: Buffer::new(dma, slots * PAGE_BYTES)?,
            slots,
            staging: Buffer::new(dma, RECORD_BYTES_MAX)?,
            record: Vec::with_capacity(RECORD_BYTES_MAX),
            newest: vec![0; PAGE_BYTES],
        })
    }

    /// Copies a page into a slot, instead of what was there, and returns what is to be sent.
    ///
    /// # Panics
    /// If there is no such slot, or for a run of more than one page.
    pub fn store(&mut self, slot: usize, page: PageRun) -> &[u8] {
        assert!(page.pages() == 1, "a slot takes one page");
        let copy = self.copy_mut(slot);
        cpu::copy_from(page, copy);
        copy
    }

    /// Says how to send a page whose last content sent is in a slot, with a delta record of at most
    /// `record_bytes_max` bytes: see `admission::delta_record_bytes_max` in the policy.
    ///
    /// # Panics
    /// As [`DeltaEncoder::store`].
    pub fn encode(&mut self, slot: usize, page: PageRun, record_bytes_max: u32) -> Encoded<'_> {
        assert!(page.pages() == 1, "a slot has one page");
        assert!(slot < self.slots, "a slot of this encoder");
        let max = (record_bytes_max as usize).clamp(DELTA_RECORD_BYTES_MIN, RECORD_BYTES_MAX);
        let max = max - max % DELTA_ENTRY_BYTES;
        let result =
            self.by_device(slot, page, max).unwrap_or_else(|| self.by_cpu(slot, page, max));
        match result {
            DeltaResult::EQUAL => Encoded::Unchanged,
            DeltaResult::RECORDED => {
                let record = std::mem::take(&mut self.record);
                let copy = self.copy_mut(slot);
                entries(&record).for_each(|(word, data)| set_word(copy, word, data));
                self.record = record;
                Encoded::Delta(&self.record)
            }
            _ => Encoded::Whole(self.store(slot, page)),
        }
    }

    fn copy_mut(&mut self, slot: usize) -> &mut [u8] {
        assert!(slot < self.slots, "a slot of this encoder");
        // SAFETY: the device never writes the copies. If it still reads one, for an answer that
        // nobody waits for any more, what it reads does not matter.
        let copies = unsafe { self.sent.bytes_mut() };
        &mut copies[slot * PAGE_BYTES..][..PAGE_BYTES]
    }

    /// What the device says, with the record in `record` if there is one; `None` if it says nothing
    /// that can be used.
    fn by_device(&mut self, slot: usize, page: PageRun, max: usize) -> Option<DeltaResult> {
        let (changed, _) = self.memory.on_bus(page.address())?;
        let (original, record) = (self.sent.at(slot * PAGE_BYTES), self.staging.at(0));
        let (page_bytes, limit) = (u32::try_from(PAGE_BYTES).ok()?, u32::try_from(max).ok()?);
        let create = |completion| {
            Descriptor::create_delta(original, changed.0, page_bytes, record, limit, completion)
        };
        let Ran::Done(answer) = self.operator.run(1, create) else { return None };
        self.check(&answer, max)
    }

    /// Takes over a record of the device, if it is one.
    fn check(&mut self, answer: &CompletionRecord, max: usize) -> Option<DeltaResult> {
        if !answer.status().is_success() && answer.status() != Status::SUCCESS_FALSE_PREDICATE {
            return None;
        }
        let result = answer.delta_result();
        if result != DeltaResult::RECORDED {
            let known = matches!(result, DeltaResult::EQUAL | DeltaResult::OVERFLOW);
            return known.then_some(result);
        }
        let bytes = answer.delta_bytes() as usize;
        // SAFETY: the device has written the completion record of its only operation.
        let staged = unsafe { self.staging.bytes() };
        let staged = staged.get(..bytes).filter(|_| bytes <= max && bytes > 0)?;
        if !is_record(staged) {
            return None;
        }
        self.record.clear();
        self.record.extend_from_slice(staged);
        Some(result)
    }

    fn by_cpu(&mut self, slot: usize, page: PageRun, max: usize) -> DeltaResult {
        cpu::copy_from(page, &mut self.newest);
        self.record.clear();
        // SAFETY: the device never writes the copies.
        let sent = unsafe { self.sent.bytes() };
        let old = sent.iter().as_slice()[slot * PAGE_BYTES..][..PAGE_BYTES]
            .as_chunks::<DELTA_WORD_BYTES>()
            .0;
        let new = self.newest.as_chunks::<DELTA_WORD_BYTES>().0;
        for (word, (_, new)) in (0_u16..).zip(old.iter().zip(new)).filter(|(_, (o, n))| o != n) {
            if self.record.len() + DELTA_ENTRY_BYTES > max {
                return DeltaResult::OVERFLOW;
            }
            let data = u64::from_le_bytes(*new).into();
            self.record.extend_from_slice(DeltaEntry { word: word.into(), data }.as_bytes());
        }
        if self.record.is_empty() { DeltaResult::EQUAL } else { DeltaResult::RECORDED }
    }
}

fn set_word(page: &mut [u8], word: usize, data: u64) {
    let words = page.as_chunks_mut::<DELTA_WORD_BYTES>().0;
    words[word] = data.to_le_bytes();
}

/// The entries of a record: words and what they are now.
pub(crate) fn entries(record: &[u8]) -> impl Iterator<Item = (usize, u64)> {
    let (entries, _) = record.as_chunks::<DELTA_ENTRY_BYTES>();
    entries.iter().filter_map(|bytes| {
        let entry = DeltaEntry::read_from_bytes(bytes).ok()?;
        Some((usize::from(entry.word.get()), entry.data.get()))
    })
}

/// Whether these bytes are a record for a page: whole entries whose words ascend and are in it.
pub(crate) fn is_record(record: &[u8]) -> bool {
    let whole = record.len().is_multiple_of(DELTA_ENTRY_BYTES) && record.len() <= RECORD_BYTES_MAX;
    whole
        && entries(record).all(|(word, _)| word < WORDS)
        && entries(record).zip(entries(record).skip(1)).all(|((one, _), (two, _))| one < two)
}

impl Drop for DeltaEncoder {
    fn drop(&mut self) {
        if !self.operator.is_settled() {
            self.staging.leak();
            self.sent.leak();
        }
    }
}

impl fmt::Debug for DeltaEncoder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeltaEncoder").field("slots", &self.slots).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(words: &[u16]) -> Vec<u8> {
        let entry = |word: &u16| DeltaEntry { word: (*word).into(), data: 1.into() };
        words.iter().flat_map(|word| entry(word).as_bytes().to_vec()).collect()
    }

    #[test]
    fn a_record_is_checked_before_it_is_believed() {
        assert!(is_record(&[]));
        assert!(is_record(&record(&[0, 1, 511])));
        assert!(!is_record(&record(&[512])));
        assert!(!is_record(&record(&[3, 3])));
        assert!(!is_record(&record(&[3, 2])));
        assert!(!is_record(&record(&[1])[..9]));
        let every: Vec<u16> = (0..512).collect();
        assert!(is_record(&record(&every)));
        assert_eq!(record(&every).len(), RECORD_BYTES_MAX);
    }
}
