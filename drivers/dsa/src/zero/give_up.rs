//! A queue that does not answer.

use super::ZeroEngine;
use crate::CpuCheck;
use crate::gate::{Latency, Outcome};
use crate::slots::SlotState;

impl<C: CpuCheck> ZeroEngine<C> {
    /// A batch is late: its queue is given up, with everything that this engine has there. What
    /// has come in is settled, the rest is the CPU's; its slots are not used again.
    pub(super) fn give_up(&mut self, queue: usize) {
        if self.queues[queue].give_up() {
            let queue = self.queues[queue].name();
            tracing::warn!(queue, "a DSA work queue does not answer: the CPU does its work");
        }
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
            self.slots.set_state(slot, SlotState::Lost);
            let mut items = Vec::new();
            self.slots.swap_items(slot, &mut items);
            items.iter().for_each(|piece| self.check_by_cpu(busy.job, *piece));
            self.slots.swap_items(slot, &mut items);
        }
    }
}
