//! What a device has done, for whoever looks at the model from outside.

use crate::nic::queue::{QueueCounts, QueueState};
use martlet_units::Instant;
use std::sync::atomic::{AtomicU64, Ordering};

/// A device's counters, as they stand at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Frames taken from transmit queues.
    pub frames_sent: u64,
    /// Frames put into receive queues.
    pub frames_received: u64,
    /// Frames that were taken and thrown away: no frame at all, or larger than any receive buffer.
    pub frames_dropped: u64,
    /// Accesses to memory that a key did not allow; each took a queue to state ERR.
    pub access_errors: u64,
    /// Rings that made no sense; each took a queue to state ERR.
    pub ring_errors: u64,
    /// Accesses that ended at the null key: in a hole of the map.
    pub null_accesses: u64,
    /// Pages written that lie beyond the end of the dirty log.
    pub pages_beyond_log: u64,
    /// Doorbells of queues.
    pub kicks: u64,
    /// Interrupts to the guest.
    pub interrupts: u64,
    /// When the first frame was served since frames last began to flow: since a queue became ready
    /// while none was.
    pub first_frame: Option<Instant>,
    /// When the last frame was served, ever.
    pub last_frame: Option<Instant>,
    /// Commands that were answered.
    pub commands: u64,
    /// Commands whose answer was an error, of either kind.
    pub commands_failed: u64,
    /// Doorbells for command entries that were not free, or not the device's.
    pub unexpected_commands: u64,
    /// Events that found their event queue full.
    pub events_lost: u64,
    /// Memory keys that exist.
    pub keys: u32,
    /// Pages of the host that the firmware has.
    pub firmware_pages: u64,
    /// The queues that exist, in order.
    pub queues: Vec<QueueStats>,
}

/// A queue, as it stands at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueStats {
    /// Its virtqueue index.
    pub index: u16,
    /// Its state.
    pub state: QueueState,
    /// `hw_available_index`.
    pub available: u16,
    /// `hw_used_index`.
    pub used: u16,
    /// What it counted.
    pub counts: QueueCounts,
}

/// A moment that may not have come.
const NEVER: u64 = u64::MAX;

/// The counters that the data path keeps.
#[derive(Debug)]
pub(crate) struct Counters {
    pub(crate) sent: AtomicU64,
    pub(crate) received: AtomicU64,
    pub(crate) dropped: AtomicU64,
    pub(crate) access_errors: AtomicU64,
    pub(crate) ring_errors: AtomicU64,
    pub(crate) kicks: AtomicU64,
    pub(crate) interrupts: AtomicU64,
    first: AtomicU64,
    last: AtomicU64,
}

impl Counters {
    pub(crate) fn new() -> Counters {
        let zero = || AtomicU64::new(0);
        Counters {
            sent: zero(),
            received: zero(),
            dropped: zero(),
            access_errors: zero(),
            ring_errors: zero(),
            kicks: zero(),
            interrupts: zero(),
            first: AtomicU64::new(NEVER),
            last: AtomicU64::new(NEVER),
        }
    }

    /// Frames begin to flow again.
    pub(crate) fn restart(&self) {
        self.first.store(NEVER, Ordering::Relaxed);
    }

    /// Frames were served.
    pub(crate) fn served(&self, now: Instant) {
        if self.first.load(Ordering::Relaxed) == NEVER {
            // Two queues may both be first; they agree to within a batch.
            self.first.store(now.0, Ordering::Relaxed);
        }
        self.last.store(now.0, Ordering::Relaxed);
    }

    /// Copies them into `stats`.
    pub(crate) fn read(&self, stats: &mut Stats) {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let moment =
            |counter: &AtomicU64| Some(get(counter)).filter(|at| *at != NEVER).map(Instant);
        stats.frames_sent = get(&self.sent);
        stats.frames_received = get(&self.received);
        stats.frames_dropped = get(&self.dropped);
        stats.access_errors = get(&self.access_errors);
        stats.ring_errors = get(&self.ring_errors);
        stats.kicks = get(&self.kicks);
        stats.interrupts = get(&self.interrupts);
        stats.first_frame = moment(&self.first);
        stats.last_frame = moment(&self.last);
    }
}

/// Adds to a counter that orders nothing.
pub(crate) fn add(counter: &AtomicU64, count: u64) {
    counter.fetch_add(count, Ordering::Relaxed);
}
