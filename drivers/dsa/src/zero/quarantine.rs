//! Batches that nobody waits for any more, and how a device is heard of again.

use super::ZeroEngine;
use crate::CpuCheck;
use crate::gate::{Latency, Outcome};
use crate::slots::{Entry, SlotState};
use martlet_dsa_abi::{CompletionRecord, Status};
use martlet_units::Instant;

impl<C: CpuCheck> ZeroEngine<C> {
    /// A batch is late: its queue is given up, with everything that this engine has there. What
    /// has come in is settled, the rest is the CPU's and goes into quarantine.
    pub(super) fn give_up(&mut self, queue: usize) {
        if !self.queues[queue].is_silent() {
            let queue = self.queues[queue].name();
            tracing::warn!(queue, "a DSA work queue does not answer: the CPU does its work");
        }
        self.queues[queue].set_silent(true);
        for slot in 0..self.slots.count() {
            let SlotState::Busy(busy) = self.slots.state(slot) else { continue };
            if busy.queue != queue {
                continue;
            }
            let now = self.queues[queue].wait().now();
            if self.slots.status(slot).is_written() {
                self.settle(slot, &busy, Latency::AtMost(now.since(busy.submitted)));
                continue;
            }
            self.stats.timed_out += 1;
            self.end_of_group(busy.group, Some(Outcome::TimedOut));
            self.slots.hold(slot, queue, Entry::Taken);
            let mut items = Vec::new();
            self.slots.swap_items(slot, &mut items);
            items.iter().for_each(|piece| self.check_by_cpu(busy.job, *piece));
            self.slots.swap_items(slot, &mut items);
        }
    }

    /// Looks after batches in quarantine: whether they were done after all, whether their queue was
    /// drained, whether to have it drained.
    pub(super) fn visit_quarantine(&mut self) {
        for queue in 0..self.queues.len() {
            if !self.holds(queue) && !self.drains[queue].is_outstanding() {
                continue;
            }
            self.queues[queue].wait().poll();
            let now = self.queues[queue].wait().now();
            let drained = self.drains[queue].take_answer(&self.queues[queue]);
            let heard = self.release(queue, drained, now);
            if heard || drained {
                if self.queues[queue].is_silent() {
                    tracing::info!(
                        queue = self.queues[queue].name(),
                        "a DSA work queue answers again"
                    );
                }
                self.queues[queue].set_silent(false);
                self.gate.heard(now, queue);
            }
            if self.holds(queue) {
                self.drains[queue].order_if_due(&self.queues[queue], now);
            }
        }
    }

    fn holds(&self, queue: usize) -> bool {
        (0..self.slots.count()).any(|slot| {
            matches!(self.slots.state(slot), SlotState::Quarantined { queue: of, .. } if of == queue)
        })
    }

    /// Frees the slots of a queue that were heard of, or all of them once it was drained. Whether
    /// any was heard of.
    fn release(&mut self, queue: usize, drained: bool, now: Instant) -> bool {
        let mut heard = false;
        for slot in 0..self.slots.count() {
            let SlotState::Quarantined { queue: of, entry } = self.slots.state(slot) else {
                continue;
            };
            if of != queue {
                continue;
            }
            let is_done = self.is_done(slot);
            if is_done || drained {
                if entry == Entry::Taken {
                    self.queues[queue].entry_is_free();
                }
                self.slots.put(slot, now);
            }
            heard |= is_done;
        }
        heard
    }

    /// Whether the device will write nothing more there: the batch is done, and so are all
    /// descriptors that it ran.
    fn is_done(&self, slot: usize) -> bool {
        let count = self.slots.items(slot).len();
        let status = |record: CompletionRecord| record.status();
        let ran_all = count == 1
            || matches!(
                status(self.slots.batch_record(slot)),
                Status::SUCCESS | Status::BATCH_FAILED
            );
        let written = |item| status(self.slots.record(slot, item)) != Status::NONE;
        self.slots.status(slot).is_written() && (!ran_all || (0..count).all(written))
    }
}
