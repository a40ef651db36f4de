//! From a job to a device's queue, or to the CPU.
#![allow(unsafe_code)]
// UNSAFETY: the CPU's check reads pages by address.

use super::ZeroEngine;
use crate::gate::{Ask, Grant, Outcome};
use crate::queue::Submitted;
use crate::slots::{Busy, Piece, SlotState};
use crate::{CpuCheck, cpu};
use martlet_dsa_abi::{BATCH_DESCRIPTORS_MIN, Descriptor};
use martlet_units::{Instant, PAGE_SIZE};

/// Without batches, runs shorter than this are the CPU's: handing over a descriptor costs as much as
/// checking a page (0.25 to 0.3 us through the device file).
pub(super) const SINGLE_PAGES_MIN: u32 = 4;
/// Shorter pieces don't measure the CPU: reading the clock would count.
const MEASURED_PAGES_MIN: u32 = 16;
/// The pattern that pages are compared with.
const ZERO: u64 = 0;

impl<C: CpuCheck> ZeroEngine<C> {
    /// Gives away all of a job that nobody has yet, batch by batch.
    pub(super) fn pump(&mut self, job: usize) {
        while self.draft_batch(job) {
            if !self.offload(job) {
                self.check_draft_by_cpu(job);
            }
        }
    }

    /// Puts a batch together; false if the job has nothing left. Pieces that no device can or should
    /// check are checked on the way.
    fn draft_batch(&mut self, job: usize) -> bool {
        self.draft.clear();
        let mut pages = 0;
        while self.draft.len() < self.batch_max && pages < self.config.batch_pages {
            let most = self.range.pages().max(self.pages_min()).min(self.transfer_pages_max);
            let most = most.min(self.config.batch_pages - pages);
            let memory = &self.memory;
            let on_bus = |address| {
                let (_, left) = memory.on_bus(address)?;
                Some(u32::try_from(left / PAGE_SIZE).unwrap_or(u32::MAX))
            };
            let Some(piece) = self.jobs[job].take(most, on_bus) else { break };
            let reachable =
                on_bus(self.jobs[job].address(piece.first)).is_some_and(|left| left > 0);
            if !reachable || self.queues.is_empty() || self.is_too_short(piece) {
                self.check_by_cpu(job, piece);
                continue;
            }
            pages += piece.pages;
            self.draft.push(piece);
        }
        !self.draft.is_empty()
    }

    fn pages_min(&self) -> u32 {
        if self.batch_max > 1 { 1 } else { SINGLE_PAGES_MIN }
    }

    /// A piece that is not worth a submission of its own: it is short, or content follows so
    /// densely that it would come back after a page or two.
    fn is_too_short(&self, piece: Piece) -> bool {
        self.batch_max == 1
            && self.config.offload_pages_min > 1
            && piece.pages.min(self.range.pages()) < SINGLE_PAGES_MIN
    }

    /// Gives the draft to a device; false if none should or would take it.
    fn offload(&mut self, job: usize) -> bool {
        let pages: u32 = self.draft.iter().map(|piece| piece.pages).sum();
        if pages < self.config.offload_pages_min {
            return false;
        }
        let Some(first) = self.queues.first() else { return false };
        let now = first.wait().now();
        let Some(slot) = self.slots.take(now, &mut self.stats.disturbed) else { return false };
        let granted = self.ask(now, pages);
        if !granted.is_some_and(|grant| self.submit(job, slot, grant)) {
            self.slots.put_unused(slot);
            return false;
        }
        true
    }

    /// Asks for leave; not for a queue that nobody uses.
    fn ask(&self, now: Instant, pages: u32) -> Option<Grant> {
        let ask = Ask { pages, node: self.config.node, channel: self.config.channel };
        let grant = self.gate.admit(now, ask)?;
        let queue = self.queues.get(grant.queue).expect("a gate names one of the engine's queues");
        if queue.is_silent() {
            self.gate.finish(now, grant, Outcome::TimedOut);
            return None;
        }
        Some(grant)
    }

    fn submit(&mut self, job: usize, slot: usize, grant: Grant) -> bool {
        let queue = &self.queues[grant.queue];
        let order = self.write_draft(job, slot);
        let tries_end = queue.wait().now().after(self.config.deadline);
        let submitted = queue.submit(&order, grant.tries.max(1), tries_end);
        let outcome = match submitted {
            Submitted::Accepted => {
                let submitted = queue.wait().now();
                let deadline = submitted.after(self.config.deadline);
                let busy = Busy { job, grant, submitted, deadline };
                self.slots.swap_items(slot, &mut self.draft);
                self.slots.set_state(slot, SlotState::Busy(busy));
                self.stats.batches += 1;
                return true;
            }
            Submitted::Full => Outcome::Rejected,
            Submitted::Gone => {
                queue.set_silent(true);
                Outcome::Gone
            }
        };
        self.stats.rejected += u64::from(submitted == Submitted::Full);
        self.gate.finish(queue.wait().now(), grant, outcome);
        false
    }

    /// Writes the draft's descriptors, and says what to submit: the batch, or a single descriptor,
    /// as version 1 devices refuse a batch of one.
    fn write_draft(&self, job: usize, slot: usize) -> Descriptor {
        let compare = |index: usize, piece: &Piece| {
            let host = self.jobs[job].address(piece.first);
            let (bus, _) = self.memory.on_bus(host).expect("was looked up for the draft");
            let bytes = piece.pages * u32::try_from(PAGE_SIZE).expect("4096");
            Descriptor::compare_pattern(bus.0, ZERO, bytes, self.slots.record_at(slot, index))
        };
        let count = u32::try_from(self.draft.len()).expect("at most a batch");
        if let (Some(piece), true) = (self.draft.first(), count < BATCH_DESCRIPTORS_MIN) {
            return compare(0, piece);
        }
        for (index, piece) in self.draft.iter().enumerate() {
            self.slots.set_descriptor(slot, index, &compare(index, piece));
        }
        Descriptor::batch(self.slots.list_at(slot), count, self.slots.batch_record_at(slot))
    }

    fn check_draft_by_cpu(&mut self, job: usize) {
        let mut draft = std::mem::take(&mut self.draft);
        draft.drain(..).for_each(|piece| self.check_by_cpu(job, piece));
        self.draft = draft;
    }

    /// The CPU checks a piece, now.
    pub(super) fn check_by_cpu(&mut self, job: usize, piece: Piece) {
        let clock = self.queues.first().filter(|_| piece.pages >= MEASURED_PAGES_MIN);
        let begin = clock.map(|queue| queue.wait().now());
        for page in piece.first..piece.first + piece.pages {
            let address = cpu::pointer(self.jobs[job].address(page));
            // SAFETY: a page of a run of this job, which is mapped until the job is collected by
            // the promise of `PageRun::new`.
            if unsafe { self.cpu.is_zero(address) } {
                self.jobs[job].set_zero(Piece { first: page, pages: 1 });
                self.range.on_zero(1);
            } else {
                self.range.on_content();
            }
        }
        self.stats.cpu_pages += u64::from(piece.pages);
        if let (Some(queue), Some(begin)) = (self.queues.first(), begin) {
            self.gate.cpu(piece.pages, queue.wait().now().since(begin));
        }
    }
}
