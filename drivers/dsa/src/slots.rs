//! Where batches lie: descriptors, completion records, and what is known of each.

use crate::StatusByte;
use martlet_device_io::{Dma, DmaBlock, DmaError};
use martlet_dsa_abi::{
    COMPLETION_BYTES, CompletionRecord, DESCRIPTOR_BYTES, DESCRIPTOR_LIST_ALIGN, Descriptor,
};
use martlet_units::Instant;
use std::collections::VecDeque;
use std::time::Duration;

/// How long a slot rests. Long for a device, which is done with a record once it has written it, and
/// short enough for 48 slots to keep one busy.
const REST: Duration = Duration::from_micros(20);
/// Before any use.
const LONG_AGO: Instant = Instant(0);

/// Consecutive pages of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    pub(crate) first: u32,
    pub(crate) pages: u32,
}

/// What a slot is used for.
#[derive(Clone, Copy, Debug)]
pub(crate) enum SlotState {
    Free,
    /// The device has it.
    Busy(Busy),
    /// The device has it, and nobody waits for it any more: it is never used again.
    Lost,
}

/// A batch that the device has.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Busy {
    pub(crate) job: usize,
    pub(crate) queue: usize,
    /// The grant that it is part of.
    pub(crate) group: usize,
    pub(crate) submitted: Instant,
    pub(crate) deadline: Instant,
}

struct Slot {
    state: SlotState,
    items: Vec<Piece>,
}

/// Slots for batches of up to so many descriptors, in one block of memory.
///
/// Slot by slot: the descriptors, their records, and the record of the batch. A slot rests after each
/// use: a record that a broken device writes twice finds it at rest, and is noticed there, instead of
/// being taken for the answer of the next batch.
pub(crate) struct Slots {
    /// Taken away, and leaked, if the device may still write to it at the end.
    block: Option<DmaBlock>,
    slots: Vec<Slot>,
    /// Free slots, and since when; the one that has rested longest is first.
    free: VecDeque<(usize, Instant)>,
    batch_max: usize,
    stride: usize,
}

impl Slots {
    pub(crate) fn new(dma: &dyn Dma, count: usize, batch_max: usize) -> Result<Slots, DmaError> {
        let bytes = batch_max * (DESCRIPTOR_BYTES + COMPLETION_BYTES) + COMPLETION_BYTES;
        let stride = bytes.next_multiple_of(DESCRIPTOR_LIST_ALIGN);
        let block = dma.alloc(stride * count, DESCRIPTOR_LIST_ALIGN)?;
        let slot = || Slot { state: SlotState::Free, items: Vec::with_capacity(batch_max) };
        Ok(Slots {
            block: Some(block),
            slots: (0..count).map(|_| slot()).collect(),
            free: (0..count).map(|slot| (slot, LONG_AGO)).collect(),
            batch_max,
            stride,
        })
    }

    pub(crate) fn count(&self) -> usize {
        self.slots.len()
    }

    pub(crate) fn state(&self, slot: usize) -> SlotState {
        self.slots[slot].state
    }

    pub(crate) fn set_state(&mut self, slot: usize, state: SlotState) {
        self.slots[slot].state = state;
    }

    /// The pieces that the slot's descriptors are about.
    pub(crate) fn items(&self, slot: usize) -> &[Piece] {
        &self.slots[slot].items
    }

    /// Says what pieces the slot's descriptors are about; at most as many as a batch has.
    pub(crate) fn set_items(&mut self, slot: usize, items: &[Piece]) {
        assert!(items.len() <= self.batch_max, "a batch of this slot");
        self.slots[slot].items.clear();
        self.slots[slot].items.extend_from_slice(items);
    }

    /// Swaps the slot's pieces with others; both keep their capacity.
    pub(crate) fn swap_items(&mut self, slot: usize, items: &mut Vec<Piece>) {
        std::mem::swap(&mut self.slots[slot].items, items);
    }

    /// The slot that is free for the longest, if it has rested. If its records were written
    /// meanwhile, that is counted in `disturbed`; what was late has come then.
    pub(crate) fn take(&mut self, now: Instant, disturbed: &mut u64) -> Option<usize> {
        let (slot, since) = *self.free.front()?;
        if since != LONG_AGO && now.since(since) < REST {
            return None;
        }
        self.free.pop_front();
        if !self.is_clean(slot) {
            *disturbed += 1;
            self.clear_records(slot);
        }
        Some(slot)
    }

    /// Puts a slot to rest, with its records cleared.
    pub(crate) fn put(&mut self, slot: usize, now: Instant) {
        self.clear_records(slot);
        self.slots[slot].state = SlotState::Free;
        self.free.push_back((slot, now));
    }

    /// Puts a slot back that was taken and given to nobody: it is the next one.
    pub(crate) fn put_unused(&mut self, slot: usize) {
        self.free.push_front((slot, LONG_AGO));
    }

    fn block(&self) -> &DmaBlock {
        self.block.as_ref().expect("is there until the drop")
    }

    fn base(&self, slot: usize) -> usize {
        assert!(slot < self.slots.len(), "a slot of this block");
        slot * self.stride
    }

    fn record_offset(&self, slot: usize, item: usize) -> usize {
        assert!(item <= self.batch_max, "a descriptor of this slot");
        self.base(slot) + self.batch_max * DESCRIPTOR_BYTES + item * COMPLETION_BYTES
    }

    /// The record of the batch is behind those of its descriptors.
    fn batch_record_offset(&self, slot: usize) -> usize {
        self.record_offset(slot, self.batch_max)
    }

    fn bus(&self, offset: usize) -> u64 {
        let offset = u64::try_from(offset).expect("inside of a block");
        self.block().at().0 + offset
    }

    /// Where the device writes the record of a descriptor.
    pub(crate) fn record_at(&self, slot: usize, item: usize) -> u64 {
        self.bus(self.record_offset(slot, item))
    }

    /// Where it writes that of the batch.
    pub(crate) fn batch_record_at(&self, slot: usize) -> u64 {
        self.bus(self.batch_record_offset(slot))
    }

    /// Where it reads the descriptors.
    pub(crate) fn list_at(&self, slot: usize) -> u64 {
        self.bus(self.base(slot))
    }

    /// Writes a descriptor of the list.
    pub(crate) fn set_descriptor(&self, slot: usize, item: usize, descriptor: &Descriptor) {
        assert!(item < self.batch_max, "a descriptor of this slot");
        self.block().write(self.base(slot) + item * DESCRIPTOR_BYTES, &descriptor.to_bytes());
    }

    /// The byte that says that a slot is done: of the batch, or of its only descriptor.
    pub(crate) fn status(&self, slot: usize) -> StatusByte<'_> {
        let offset = match self.slots[slot].items.len() {
            0 | 1 => self.record_offset(slot, 0),
            _ => self.batch_record_offset(slot),
        };
        StatusByte::new(self.block(), offset + CompletionRecord::STATUS_OFFSET)
    }

    pub(crate) fn record(&self, slot: usize, item: usize) -> CompletionRecord {
        self.read_record(self.record_offset(slot, item))
    }

    pub(crate) fn batch_record(&self, slot: usize) -> CompletionRecord {
        self.read_record(self.batch_record_offset(slot))
    }

    /// Reads a record. Its status byte is read first, with acquire: if it is written, so was the
    /// rest.
    fn read_record(&self, offset: usize) -> CompletionRecord {
        if self.block().load8(offset + CompletionRecord::STATUS_OFFSET) == 0 {
            return CompletionRecord::default();
        }
        let mut bytes = [0; COMPLETION_BYTES];
        self.block().read(offset, &mut bytes);
        CompletionRecord::from_bytes(&bytes)
    }

    fn is_clean(&self, slot: usize) -> bool {
        let records = self.slots[slot].items.len();
        let offsets = (0..records).map(|item| self.record_offset(slot, item));
        let mut offsets = offsets.chain([self.batch_record_offset(slot)]);
        offsets.all(|offset| self.block().load8(offset) == 0)
    }

    fn clear_records(&self, slot: usize) {
        let records = self.slots[slot].items.len();
        self.block().clear(self.record_offset(slot, 0), records * COMPLETION_BYTES);
        self.block().clear(self.batch_record_offset(slot), COMPLETION_BYTES);
    }

    /// Never gives the memory back: a device may still write to it.
    pub(crate) fn leak(&mut self) {
        std::mem::forget(self.block.take());
    }
}
