//! How a device is heard of again.

use crate::queue::Submitted;
use crate::{StatusByte, WorkQueue};
use martlet_device_io::{Dma, DmaBlock, DmaError};
use martlet_dsa_abi::{COMPLETION_ALIGN, COMPLETION_BYTES, CompletionRecord, Descriptor, Status};
use martlet_units::Instant;
use std::time::Duration;

/// A queue with batches in quarantine is asked to drain this long after; twice as long each time it
/// does not take the order.
const DRAIN_PAUSE: Duration = Duration::from_millis(10);
/// The longest such time.
const DRAIN_PAUSE_MAX: Duration = Duration::from_secs(1);

/// An order to a queue to say when everything before it is done. A batch whose record was lost is
/// never heard of otherwise.
pub(crate) struct Drain {
    /// Its record. Taken away, and leaked, if the device may still write it at the end.
    block: Option<DmaBlock>,
    outstanding: bool,
    next: Option<Instant>,
    pause: Duration,
}

impl Drain {
    pub(crate) fn new(dma: &dyn Dma) -> Result<Drain, DmaError> {
        let block = Some(dma.alloc(COMPLETION_BYTES, COMPLETION_ALIGN)?);
        Ok(Drain { block, outstanding: false, next: None, pause: DRAIN_PAUSE })
    }

    fn block(&self) -> &DmaBlock {
        self.block.as_ref().expect("is there until the drop")
    }

    /// Whether the device owes the answer.
    pub(crate) fn is_outstanding(&self) -> bool {
        self.outstanding
    }

    /// Whether the device has drained since the last look. One that refuses to (its work queue's
    /// `op_config` may forbid it) is asked again much later.
    pub(crate) fn take_answer(&mut self, queue: &WorkQueue) -> bool {
        let status = StatusByte::new(self.block(), CompletionRecord::STATUS_OFFSET);
        if !self.outstanding || !status.is_written() {
            return false;
        }
        let code = Status::from_byte(self.block().load8(CompletionRecord::STATUS_OFFSET));
        self.block().clear(0, COMPLETION_BYTES);
        queue.entry_is_free();
        let drained = code == Status::SUCCESS;
        let pause = if drained { DRAIN_PAUSE } else { DRAIN_PAUSE_MAX };
        (self.outstanding, self.next, self.pause) = (false, None, pause);
        drained
    }

    /// Orders a drain, if that is due: some time after the first call since the last answer.
    pub(crate) fn order_if_due(&mut self, queue: &WorkQueue, now: Instant) {
        if self.outstanding || now < *self.next.get_or_insert(now.after(self.pause)) {
            return;
        }
        self.pause = (self.pause * 2).min(DRAIN_PAUSE_MAX);
        self.next = Some(now.after(self.pause));
        let order = Descriptor::drain(self.block().at().0);
        self.outstanding = queue.submit(&order, 1, now) == Submitted::Accepted;
    }
}

impl Drop for Drain {
    fn drop(&mut self) {
        if self.outstanding {
            std::mem::forget(self.block.take());
        }
    }
}
