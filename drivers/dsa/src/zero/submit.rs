//! From a job to a device's queue, or to the CPU.
#![allow(unsafe_code)]
// UNSAFETY: the CPU's check reads pages by address.

use super::ZeroEngine;
use super::job::Job;
use crate::gate::{Ask, Grant, Outcome};
use crate::queue::Submitted;
use crate::range::RangeLength;
use crate::slots::{Busy, Piece, SlotState};
use crate::{CpuCheck, WorkQueue, cpu};
use martlet_dsa_abi::{BATCH_DESCRIPTORS_MIN, Descriptor};
use martlet_units::PAGE_SIZE;
use std::cell::Cell;
use std::ops::Range;
use std::sync::Arc;

/// Without batches, runs shorter than this are the CPU's: handing over a descriptor costs as much as
/// checking a page (0.25 to 0.3 us through the device file).
pub(super) const SINGLE_PAGES_MIN: u32 = 4;
/// Fewer pages don't measure the CPU: reading the clock would count.
const MEASURED_PAGES_MIN: u32 = 16;
/// The pattern that pages are compared with.
const ZERO: u64 = 0;

/// A gate's answer.
enum Answer {
    /// A device may have them.
    Granted(Grant),
    /// They are the CPU's.
    Refused,
    /// They had better be offered again when something else is done.
    Later,
}

impl<C: CpuCheck> ZeroEngine<C> {
    /// Gives away all that nobody has yet, job by job. What would only wait for this engine's own
    /// batches may stay; then there are such batches.
    pub(super) fn pump_all(&mut self) {
        for number in 0..self.open {
            if !self.pump((self.oldest + number) % super::JOBS) {
                return;
            }
        }
    }

    /// Gives away all of a job; false if something stays.
    fn pump(&mut self, job: usize) -> bool {
        loop {
            let left = self.jobs[job].left();
            let goes_on = match left {
                0 => return true,
                _ if self.batch_max > 1 && left < self.config.offload_pages_min => {
                    self.check_next_by_cpu(job, left);
                    true
                }
                // To choose pages takes time as well, and was in vain the last time.
                _ if self.batch_max > 1 && self.was_refused => self.ask_and_choose(job, left),
                _ => self.choose_and_ask(job),
            };
            if !goes_on {
                return false;
            }
        }
    }

    /// Offers the next pages as a number first; false if they stay.
    fn ask_and_choose(&mut self, job: usize, left: u32) -> bool {
        let pages = left.min(self.config.batch_pages);
        match self.ask(pages) {
            Answer::Granted(grant) => {
                self.was_refused = false;
                self.draft(job, grant.pages);
                self.submit_all(job, grant);
                self.check_draft_by_cpu(job);
                self.check_next_by_cpu(job, pages - grant.pages);
            }
            Answer::Refused => self.check_next_by_cpu(job, pages),
            Answer::Later => return false,
        }
        true
    }

    /// Chooses the next pages and offers them; false if they stay.
    fn choose_and_ask(&mut self, job: usize) -> bool {
        self.draft(job, self.config.batch_pages);
        let pages = self.draft.iter().map(|piece| piece.pages).sum();
        match self.ask(pages) {
            Answer::Granted(grant) => self.submit_all(job, grant),
            Answer::Refused => self.was_refused = pages >= self.config.offload_pages_min,
            Answer::Later => {
                let draft = self.draft.drain(..).rev();
                draft.for_each(|piece| self.jobs[job].again(piece));
                return false;
            }
        }
        self.check_draft_by_cpu(job);
        true
    }

    /// Chooses pages to offload, at most so many. Pieces that no device can or should check are
    /// checked on the way: those outside of its memory, and without batches those that are not
    /// worth a submission of their own, because they are short, or because content follows so
    /// densely that they would come back after a page or two.
    fn draft(&mut self, job: usize, pages_max: u32) {
        self.draft.clear();
        let Self { jobs, memory, draft, range, config, .. } = self;
        let most = range.pages().max(if self.batch_max > 1 { 1 } else { SINGLE_PAGES_MIN });
        let most = most.min(self.transfer_pages_max);
        let mut pages = 0;
        while pages < pages_max {
            // As many pages as the device finds in one piece; none where it finds nothing.
            let left = Cell::new(0);
            let on_bus = |address| {
                let (_, bytes) = memory.on_bus(address)?;
                left.set(u32::try_from(bytes / PAGE_SIZE).unwrap_or(u32::MAX));
                Some(left.get())
            };
            let most = most.min(pages_max - pages);
            let Some(piece) = jobs[job].take(most, on_bus) else { break };
            let is_too_short = self.batch_max == 1
                && config.offload_pages_min > 1
                && piece.pages.min(range.pages()) < SINGLE_PAGES_MIN;
            if left.get() == 0 || is_too_short || self.queues.is_empty() {
                let checked = check(&self.cpu, &mut jobs[job], range, piece);
                self.stats.cpu_pages += checked;
            } else {
                pages += piece.pages;
                draft.push(piece);
            }
        }
    }

    /// Sleeps, if the gate thinks that the CPU is needed less now than soon, and asks again.
    fn ask_after_pause(&self, queue: &WorkQueue, ask: Ask) -> Option<Grant> {
        let pause = self.gate.pause(ask.pages);
        if pause.is_zero() {
            return None;
        }
        queue.wait().let_pass(pause);
        self.gate.admit(queue.wait().now(), ask)
    }

    /// Asks for leave to offload so many pages.
    fn ask(&self, pages: u32) -> Answer {
        let pages_min = self.config.offload_pages_min.max(1);
        let Some(first) = self.queues.first().filter(|_| pages >= pages_min) else {
            return Answer::Refused;
        };
        let now = first.wait().now();
        let has_pending = self.has_busy_slot();
        let asks_again = has_pending && self.gate.asks_again();
        let channel = self.config.channel;
        let ask = Ask { pages, pages_min, has_pending, channel };
        let Some(grant) = self
            .gate
            .admit(now, ask)
            .or_else(|| if asks_again { None } else { self.ask_after_pause(first, ask) })
        else {
            return if asks_again { Answer::Later } else { Answer::Refused };
        };
        assert!(grant.queue < self.queues.len(), "a gate names one of the engine's queues");
        assert!(grant.pages <= pages, "a gate grants no more than it is asked for");
        if self.queues[grant.queue].is_given_up() {
            self.gate.finish(now, grant, Outcome::TimedOut);
            return Answer::Refused;
        }
        Answer::Granted(grant)
    }

    fn has_busy_slot(&self) -> bool {
        (0..self.slots.count()).any(|slot| matches!(self.slots.state(slot), SlotState::Busy(_)))
    }

    /// Submits as much of the draft as was granted, batch by batch, until one is not taken.
    fn submit_all(&mut self, job: usize, grant: Grant) {
        let now = self.queues[grant.queue].wait().now();
        let granted = self.cut_draft(grant.pages);
        let group = self.groups.begin(grant, now);
        let (mut from, mut refused) = (0, None);
        while from < granted && refused.is_none() {
            let to = granted.min(from + self.batch_max);
            let now = self.queues[grant.queue].wait().now();
            let Some(slot) = self.slots.take(now, &mut self.stats.disturbed) else { break };
            refused = self.submit(job, slot, from..to, group, grant);
            match refused {
                None => from = to,
                Some(_) => self.slots.put_unused(slot),
            }
        }
        self.draft.drain(..from);
        self.end_of_group(group, refused);
    }

    /// Cuts the draft so that its first pieces have so many pages; how many pieces that are.
    fn cut_draft(&mut self, pages: u32) -> usize {
        let mut left = pages;
        for index in 0..self.draft.len() {
            let piece = self.draft[index];
            if piece.pages > left {
                if left == 0 {
                    return index;
                }
                self.draft[index].pages = left;
                let (first, pages) = (piece.first + left, piece.pages - left);
                self.draft.insert(index + 1, Piece { first, pages });
                return index + 1;
            }
            left -= piece.pages;
        }
        self.draft.len()
    }

    /// Submits some pieces of the draft as one batch; what was in the way if it is not taken.
    fn submit(
        &mut self,
        job: usize,
        slot: usize,
        pieces: Range<usize>,
        group: usize,
        grant: Grant,
    ) -> Option<Outcome> {
        self.slots.set_items(slot, &self.draft[pieces]);
        let order = self.write_descriptors(job, slot);
        let queue = &self.queues[grant.queue];
        let tries_end = queue.wait().now().after(self.config.deadline);
        match queue.submit(&order, grant.tries.max(1), tries_end) {
            Submitted::Accepted => {
                let deadline = queue.wait().now().after(self.config.deadline);
                let submitted = self.groups.since(group);
                let busy = Busy { job, queue: grant.queue, group, submitted, deadline };
                self.slots.set_state(slot, SlotState::Busy(busy));
                self.groups.add(group);
                self.stats.batches += 1;
                None
            }
            Submitted::Full => {
                self.stats.rejected += 1;
                Some(Outcome::Rejected)
            }
            Submitted::Gone => {
                tracing::warn!(queue = queue.name(), "a DSA work queue is gone");
                queue.give_up();
                Some(Outcome::Gone)
            }
        }
    }

    /// Tells the gate, if that was the last of a grant's batches.
    pub(super) fn end_of_group(&mut self, group: usize, outcome: Option<Outcome>) {
        if let Some((grant, outcome)) = self.groups.end(group, outcome) {
            let now = self.queues[grant.queue].wait().now();
            self.gate.finish(now, grant, outcome);
        }
    }

    /// Writes the descriptors of a slot's pieces, and says what to submit: the batch, or a single
    /// descriptor, as version 1 devices refuse a batch of one.
    fn write_descriptors(&self, job: usize, slot: usize) -> Descriptor {
        let compare = |index: usize, piece: &Piece| {
            let host = self.jobs[job].address(piece.first);
            let (bus, _) = self.memory.on_bus(host).expect("was looked up for the draft");
            let bytes = piece.pages * u32::try_from(PAGE_SIZE).expect("4096");
            Descriptor::compare_pattern(bus.0, ZERO, bytes, self.slots.record_at(slot, index))
        };
        let items = self.slots.items(slot);
        let count = u32::try_from(items.len()).expect("at most a batch");
        if let (Some(piece), true) = (items.first(), count < BATCH_DESCRIPTORS_MIN) {
            return compare(0, piece);
        }
        for (index, piece) in items.iter().enumerate() {
            self.slots.set_descriptor(slot, index, &compare(index, piece));
        }
        Descriptor::batch(self.slots.list_at(slot), count, self.slots.batch_record_at(slot))
    }

    /// The CPU checks what is in the draft, and tells how long that took.
    fn check_draft_by_cpu(&mut self, job: usize) {
        let pages = self.draft.iter().map(|piece| piece.pages).sum();
        self.measured(pages, |engine| {
            for index in 0..engine.draft.len() {
                engine.check_by_cpu(job, engine.draft[index]);
            }
            engine.draft.clear();
        });
    }

    /// The CPU checks the next pages of a job, and tells how long that took.
    fn check_next_by_cpu(&mut self, job: usize, pages: u32) {
        self.measured(pages, |engine| {
            let mut left = pages;
            while left > 0 {
                let Some(piece) = engine.jobs[job].take_any(left) else { break };
                engine.check_by_cpu(job, piece);
                left -= piece.pages;
            }
        });
    }

    fn measured(&mut self, pages: u32, body: impl FnOnce(&mut Self)) {
        let clock = self.queues.first().filter(|_| pages >= MEASURED_PAGES_MIN).map(Arc::clone);
        let begin = clock.as_ref().map(|queue| queue.wait().now());
        body(self);
        if let (Some(queue), Some(begin)) = (clock, begin) {
            let took = queue.wait().now().since(begin);
            // On a model's virtual clock the CPU takes no time, which says nothing of a CPU.
            if !took.is_zero() {
                self.gate.cpu(pages, took);
            }
        }
    }

    /// The CPU checks a piece, now.
    pub(super) fn check_by_cpu(&mut self, job: usize, piece: Piece) {
        self.stats.cpu_pages += check(&self.cpu, &mut self.jobs[job], &mut self.range, piece);
    }
}

/// Checks a piece of a job; how many pages that were.
fn check(cpu: &impl CpuCheck, job: &mut Job, range: &mut RangeLength, piece: Piece) -> u64 {
    let mut zero_in_a_row = 0;
    for page in piece.first..piece.first + piece.pages {
        let address = cpu::pointer(job.address(page));
        // SAFETY: a page of a run of this job, which is mapped until the job is collected by the
        // promise of `PageRun::new`.
        if unsafe { cpu.is_zero(address) } {
            job.set_zero(Piece { first: page, pages: 1 });
            zero_in_a_row += 1;
        } else {
            range.on_zero(zero_in_a_row);
            range.on_content();
            zero_in_a_row = 0;
        }
    }
    range.on_zero(zero_in_a_row);
    u64::from(piece.pages)
}
