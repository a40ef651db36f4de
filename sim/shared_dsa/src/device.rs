//! A device as the simulation sees it: places in its queue, four batches at a time, one path to
//! memory. The same figures as the bit-exact model's; `tests/agrees.rs` compares the two.

use crate::clock::{Ps, float, ps};
use crate::constants::PAGE_BYTES;
use crate::sharing::Sharing;
use martlet_dsa_model::{ENGINES_MAX, Timing};
use martlet_units::BytesPerSec;
use std::collections::VecDeque;

/// Entries of all work queues together (Sapphire Rapids).
pub(crate) const ENTRIES: usize = 128;

/// Times of a device, in picoseconds.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DeviceTimes {
    /// A page, alone. A page that is not zero takes as long: when its difference is found, half a
    /// microsecond after the first read, the other reads are under way already.
    pub(crate) page: Ps,
    /// From the end of the work to the completion record.
    pub(crate) latency: Ps,
    /// Bytes a second that it reads while it works.
    pub(crate) bytes_per_sec: f64,
}

impl DeviceTimes {
    pub(crate) fn sapphire_rapids() -> DeviceTimes {
        let timing = Timing::sapphire_rapids();
        let BytesPerSec(rate) = timing.fabric.unwrap_or_default();
        let page = PAGE_BYTES * 1_000_000_000_000 / rate.max(1);
        DeviceTimes { page, latency: ps(timing.latency), bytes_per_sec: float(rate) }
    }

    /// What a batch occupies it for, alone.
    pub(crate) fn work(&self, pages: u32) -> Ps {
        self.page * u64::from(pages)
    }
}

/// One device.
#[derive(Debug)]
pub(crate) struct SharedDevice {
    serving: Sharing,
    waiting: VecDeque<(u64, Ps)>,
}

impl SharedDevice {
    pub(crate) fn new() -> SharedDevice {
        SharedDevice { serving: Sharing::new(), waiting: VecDeque::new() }
    }

    /// Whether it reads memory now.
    pub(crate) fn is_busy(&self) -> bool {
        self.serving.len() > 0
    }

    /// Takes a batch, or answers "retry".
    pub(crate) fn submit(&mut self, now: Ps, batch: u64, work: Ps) -> bool {
        if self.serving.len() < ENGINES_MAX {
            self.serve(now, batch, work);
            return true;
        }
        if self.waiting.len() >= ENTRIES {
            return false;
        }
        self.waiting.push_back((batch, work));
        true
    }

    fn serve(&mut self, now: Ps, batch: u64, work: Ps) {
        self.serving.add(now, work, batch);
        self.set_speed(now);
    }

    fn set_speed(&mut self, now: Ps) {
        let sharers = u32::try_from(self.serving.len()).unwrap_or(u32::MAX).max(1);
        self.serving.set_speed(now, 1.0 / f64::from(sharers));
    }

    pub(crate) fn next(&self) -> Option<Ps> {
        self.serving.next()
    }

    /// The batch that has ended by `now`, one at a time.
    pub(crate) fn take_done(&mut self, now: Ps) -> Option<u64> {
        let batch = self.serving.take_done(now)?;
        if let Some((next, work)) = self.waiting.pop_front() {
            self.serving.add(now, work, next);
        }
        self.set_speed(now);
        Some(batch)
    }
}
