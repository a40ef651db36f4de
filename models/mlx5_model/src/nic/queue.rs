//! A virtqueue of the network card: its ring, its state and what it has counted.

use super::ring::{Direction, Ring, RingError};
use super::view::Reach;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// States of a virtqueue object (PRM, "VIRTIO_NET_Q object", field `state`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QueueState {
    /// Made, not started.
    Init,
    /// Passing frames.
    Ready,
    /// Stopped; its indices stand still.
    Suspended,
    /// Stopped for good.
    Error,
}

/// What a queue counts: the fields of the VIRTIO_Q_COUNTERS object.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QueueCounts {
    /// Chains taken from the driver's ring.
    pub received_descriptors: u64,
    /// Chains given back.
    pub completed_descriptors: u64,
    /// Accesses to memory that its key did not allow.
    pub error_completions: u32,
    /// Descriptors that made no sense.
    pub bad_descriptors: u32,
    /// Chains longer than the ring.
    pub chain_too_long: u32,
    /// Buffers that were too small, or frames that were no frames.
    pub invalid_buffers: u32,
}

/// What a queue may do with frames: the feature bits of its object.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Offloads {
    /// A frame may fill several receive buffers.
    pub(crate) mergeable: bool,
    /// Transmitted frames may want a checksum.
    pub(crate) checksum: bool,
    /// Received frames may be marked as checked.
    pub(crate) guest_checksum: bool,
}

/// A virtqueue.
#[derive(Debug)]
pub(crate) struct Queue {
    pub(crate) object: u32,
    pub(crate) index: u16,
    work: Mutex<Work>,
}

/// What changes while a queue works. Its lock is held for a batch of frames at most, so who has it
/// finds no frame half done.
#[derive(Debug)]
pub(crate) struct Work {
    pub(crate) state: QueueState,
    pub(crate) ring: Ring,
    pub(crate) offloads: Offloads,
    pub(crate) vector: Option<u16>,
    pub(crate) counts: QueueCounts,
    /// What took it to [`QueueState::Error`].
    pub(crate) error: Option<RingError>,
    /// How often it was looked at in vain since its last frame.
    pub(crate) idle_looks: u32,
}

/// Even queues receive, odd queues transmit (virtio 1.3, section 5.1.2).
pub(crate) fn direction_of(index: u16) -> Direction {
    if index.is_multiple_of(2) { Direction::Receive } else { Direction::Transmit }
}

impl Queue {
    pub(crate) fn new(object: u32, index: u16, work: Work) -> Queue {
        Queue { object, index, work: Mutex::new(work) }
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, Work> {
        self.work.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Work {
    /// A queue that was just made.
    pub(crate) fn new(ring: Ring, offloads: Offloads, vector: Option<u16>) -> Work {
        Work {
            state: QueueState::Init,
            ring,
            offloads,
            vector,
            counts: QueueCounts::default(),
            error: None,
            idle_looks: 0,
        }
    }

    /// Lets frames pass from now on. The ring is first looked at when its doorbell rings.
    pub(crate) fn start(&mut self) {
        self.state = QueueState::Ready;
        self.ring.forget();
        self.ring.forget_quiet();
        self.idle_looks = 0;
    }

    /// Stops it between two frames. The guest may kick whoever serves the ring next. On an error
    /// the queue is in state ERR.
    pub(crate) fn suspend(&mut self, reach: Reach<'_>) -> Result<(), RingError> {
        let stopped = self.ring.publish(reach).and_then(|_| self.ring.set_quiet(reach, false));
        match stopped {
            Ok(()) => self.state = QueueState::Suspended,
            Err(error) => self.fail(error),
        }
        self.ring.forget();
        stopped
    }

    /// Stops it for good.
    pub(crate) fn fail(&mut self, error: RingError) {
        self.state = QueueState::Error;
        self.error = Some(error);
        match error {
            RingError::Access(_) => self.counts.error_completions += 1,
            RingError::Index { .. } | RingError::Descriptor { .. } => {
                self.counts.bad_descriptors += 1;
            }
            RingError::Chain { .. } => self.counts.chain_too_long += 1,
        }
    }
}
