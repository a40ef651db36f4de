//! When the guest was last heard of.

use crate::clock;
use martlet_units::Instant;
use std::sync::atomic::{AtomicU64, Ordering};

/// Every byte that the guest writes to the debug port or sends through the serial port is a sign
/// of life. The time between the last at the source and the first at the destination is the
/// blackout as the guest's environment sees it.
#[derive(Debug, Default)]
pub(crate) struct Heartbeat {
    /// Nanoseconds on the monotonic clock; 0 for never.
    first: AtomicU64,
    last: AtomicU64,
}

impl Heartbeat {
    /// The guest is heard of now. Any vCPU's thread; takes no lock.
    pub(crate) fn beat(&self) {
        let now = clock::now().0;
        if self.first.load(Ordering::Relaxed) == 0 {
            // Several vCPUs may come first at once; the earliest to get here stays.
            let _ = self.first.compare_exchange(0, now, Ordering::Release, Ordering::Relaxed);
        }
        self.last.fetch_max(now, Ordering::Release);
    }

    /// The first since the machine was made.
    pub(crate) fn first(&self) -> Option<Instant> {
        some(self.first.load(Ordering::Acquire))
    }

    /// The last.
    pub(crate) fn last(&self) -> Option<Instant> {
        some(self.last.load(Ordering::Acquire))
    }
}

fn some(nanos: u64) -> Option<Instant> {
    (nanos != 0).then_some(Instant(nanos))
}
