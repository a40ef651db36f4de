//! From a completion record to the job's answer.

use super::ZeroEngine;
use super::verdict::Verdict;
use crate::CpuCheck;
use crate::gate::{Latency, Outcome};
use crate::slots::{Busy, Piece, SlotState};
use martlet_dsa_abi::Status;

/// What a batch's records come to.
#[derive(Clone, Copy, Debug, Default)]
struct Sum {
    faulted: u32,
    failed: bool,
    unwritten: bool,
}

impl<C: CpuCheck> ZeroEngine<C> {
    /// Waits for a batch until its deadline and settles it, one way or the other.
    pub(super) fn await_slot(&mut self, slot: usize) {
        let SlotState::Busy(busy) = self.slots.state(slot) else {
            unreachable!("only batches that the device has are waited for")
        };
        let queue = &self.queues[busy.queue];
        let status = self.slots.status(slot);
        match queue.await_record(status, busy.submitted, busy.deadline) {
            Some(latency) => self.settle(slot, &busy, latency),
            None => self.give_up(busy.queue),
        }
    }

    /// Reads the records of a batch whose own record was written.
    pub(super) fn settle(&mut self, slot: usize, busy: &Busy, latency: Latency) {
        let mut items = Vec::new();
        // The pieces are lent out of the slot, and given back: nothing is allocated.
        self.slots.swap_items(slot, &mut items);
        let sum = self.settle_items(slot, busy.job, &items);
        self.slots.swap_items(slot, &mut items);
        let queue = &self.queues[busy.queue];
        queue.entry_is_free();
        let now = queue.wait().now();
        let outcome = if sum.failed {
            Outcome::Failed
        } else {
            Outcome::Completed { latency, faulted: sum.faulted }
        };
        self.stats.failed += u64::from(sum.failed);
        self.stats.faulted_pages += u64::from(sum.faulted);
        self.end_of_group(busy.group, Some(outcome));
        if sum.unwritten {
            // The batch is done and some record is not there: it may still come.
            self.slots.set_state(slot, SlotState::Lost);
            self.give_up(busy.queue);
        } else {
            self.slots.put(slot, now);
        }
    }

    fn settle_items(&mut self, slot: usize, job: usize, items: &[Piece]) -> Sum {
        let mut sum = Sum::default();
        let single = items.len() == 1;
        let batch = if single { Status::SUCCESS } else { self.slots.batch_record(slot).status() };
        // The batch ran if it ended well, or if only some of its descriptors did not.
        let ran = matches!(batch, Status::SUCCESS | Status::BATCH_FAILED);
        let cut_short = batch == Status::BATCH_LIST_FAULT;
        if !ran {
            sum.failed = true;
        }
        for (index, piece) in items.iter().enumerate() {
            let record = self.slots.record(slot, index);
            let verdict = match ran || cut_short {
                true => Verdict::of(*piece, &record),
                false => Verdict::Error,
            };
            if verdict == Verdict::Unwritten && ran {
                sum.unwritten = true;
            }
            self.settle_item(job, *piece, verdict, &mut sum);
        }
        sum
    }

    fn settle_item(&mut self, job: usize, piece: Piece, verdict: Verdict, sum: &mut Sum) {
        let (zero, known) = match verdict {
            Verdict::Zero => (piece.pages, piece.pages),
            Verdict::Content { zero } => (zero, zero + 1),
            Verdict::Fault { zero } => (zero, zero),
            Verdict::Error | Verdict::Unwritten => (0, 0),
        };
        self.jobs[job].set_zero(Piece { first: piece.first, pages: zero });
        self.stats.device_pages += u64::from(known);
        let rest = Piece { first: piece.first + known, pages: piece.pages - known };
        match verdict {
            Verdict::Zero => self.range.on_zero(zero),
            Verdict::Content { .. } => {
                self.range.on_zero(zero);
                self.range.on_content();
                self.jobs[job].again(rest);
            }
            Verdict::Fault { .. } => {
                sum.faulted += rest.pages;
                self.check_by_cpu(job, rest);
            }
            Verdict::Error | Verdict::Unwritten => {
                sum.failed = true;
                self.check_by_cpu(job, rest);
            }
        }
    }
}
