//! One operation at a time.

use crate::drain::Drain;
use crate::gate::{Ask, Gate, Outcome};
use crate::queue::Submitted;
use crate::{StatusByte, WorkQueue};
use martlet_device_io::{Dma, DmaBlock, DmaError};
use martlet_dsa_abi::{COMPLETION_ALIGN, COMPLETION_BYTES, CompletionRecord, Descriptor, Status};
use std::sync::Arc;
use std::time::Duration;

/// What became of an operation.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Ran {
    /// The device did it, or stopped at a page that is not mapped.
    Done(CompletionRecord),
    /// The device did nothing or a part of it, and will do no more: all of it is the CPU's.
    Not,
    /// The device owes an answer. It may still do it.
    Late,
}

/// Runs operations one after the other: each is submitted and waited for.
pub(crate) struct Operator {
    queues: Vec<Arc<WorkQueue>>,
    gate: Arc<dyn Gate>,
    deadline: Duration,
    channel: u16,
    /// Taken away, and leaked, if the device may still write to it at the end.
    record: Option<DmaBlock>,
    drains: Vec<Drain>,
    /// The queue that owes an answer.
    late: Option<usize>,
}

impl Operator {
    pub(crate) fn new(
        queues: Vec<Arc<WorkQueue>>,
        gate: Arc<dyn Gate>,
        dma: &dyn Dma,
        deadline: Duration,
        channel: u16,
    ) -> Result<Operator, DmaError> {
        let record = Some(dma.alloc(COMPLETION_BYTES, COMPLETION_ALIGN)?);
        let drains = queues.iter().map(|_| Drain::new(dma)).collect::<Result<_, _>>()?;
        Ok(Operator { queues, gate, deadline, channel, record, drains, late: None })
    }

    /// The most bytes in a transfer, for all queues alike.
    pub(crate) fn transfer_bytes_max(&self) -> u64 {
        let limits = self.queues.iter().map(|queue| queue.limits().transfer_bytes_max);
        limits.min().unwrap_or(u64::MAX)
    }

    fn record(&self) -> &DmaBlock {
        self.record.as_ref().expect("is there until the drop")
    }

    /// Runs what `make` makes for a completion record's address. `pages` is what the gate is asked
    /// for. While an answer is owed, nothing runs.
    pub(crate) fn run(&mut self, pages: u32, make: impl FnOnce(u64) -> Descriptor) -> Ran {
        if !self.is_settled() {
            return Ran::Not;
        }
        let Some(first) = self.queues.first() else { return Ran::Not };
        let now = first.wait().now();
        let channel = self.channel;
        let ask = Ask { pages, pages_min: pages, has_pending: false, node: None, channel };
        let Some(grant) = self.gate.admit(now, ask) else { return Ran::Not };
        let queue = Arc::clone(&self.queues[grant.queue]);
        if queue.is_silent() {
            self.gate.finish(now, grant, Outcome::TimedOut);
            return Ran::Not;
        }
        let order = make(self.record().at().0);
        let refused = match queue.submit(&order, grant.tries.max(1), now.after(self.deadline)) {
            Submitted::Accepted => None,
            Submitted::Full => Some(Outcome::Rejected),
            Submitted::Gone => {
                queue.set_silent(true);
                Some(Outcome::Gone)
            }
        };
        if let Some(outcome) = refused {
            self.gate.finish(queue.wait().now(), grant, outcome);
            return Ran::Not;
        }
        let submitted = queue.wait().now();
        let status = StatusByte::new(self.record(), CompletionRecord::STATUS_OFFSET);
        let deadline = submitted.after(self.deadline);
        let Some(latency) = queue.await_record(status, submitted, deadline) else {
            queue.set_silent(true);
            self.late = Some(grant.queue);
            self.gate.finish(queue.wait().now(), grant, Outcome::TimedOut);
            return Ran::Late;
        };
        queue.entry_is_free();
        let record = self.take_record();
        let faulted = record.status() == Status::PAGE_FAULT;
        let good = record.status().is_success() || faulted;
        let outcome = match good {
            true => Outcome::Completed { latency, faulted: if faulted { pages } else { 0 } },
            false => Outcome::Failed,
        };
        self.gate.finish(queue.wait().now(), grant, outcome);
        if !good {
            tracing::debug!(operation = %order.opcode(), status = %record.status(), "DSA refuses");
            return Ran::Not;
        }
        Ran::Done(record)
    }

    fn take_record(&self) -> CompletionRecord {
        let mut bytes = [0; COMPLETION_BYTES];
        self.record().read(0, &mut bytes);
        self.record().fill(0, COMPLETION_BYTES, 0);
        CompletionRecord::from_bytes(&bytes)
    }

    /// Whether the device owes no answer, after a look whether it has given it, or whether its queue
    /// was drained.
    pub(crate) fn is_settled(&mut self) -> bool {
        let Some(late) = self.late else { return true };
        let queue = Arc::clone(&self.queues[late]);
        queue.wait().poll();
        let now = queue.wait().now();
        let drained = self.drains[late].take_answer(&queue);
        let written = StatusByte::new(self.record(), CompletionRecord::STATUS_OFFSET).is_written();
        if !written && !drained {
            self.drains[late].order_if_due(&queue, now);
            return false;
        }
        queue.entry_is_free();
        self.record().fill(0, COMPLETION_BYTES, 0);
        self.late = None;
        queue.set_silent(false);
        self.gate.heard(now, late);
        true
    }
}

impl Drop for Operator {
    fn drop(&mut self) {
        if !self.is_settled() {
            tracing::warn!("a DSA device still owes an answer: its record's memory is kept for it");
            std::mem::forget(self.record.take());
        }
    }
}
