//! The data path: "the hardware" that moves frames between virtqueues.
//!
//! Locks, in the order in which they are taken: `scratch` (whoever has it works), the keys, a
//! transmit queue, a receive queue. Doorbells take none of them.

pub(crate) mod bits;
pub(crate) mod frame;
pub(crate) mod hardware;
pub(crate) mod queue;
pub(crate) mod ring;
mod steering;
mod transmit;
pub(crate) mod view;

use crate::keys::{Key, Keys};
use crate::stats::{self, Counters, QueueStats, Stats};
use crate::vectors::VectorTable;
use bits::Bits;
use frame::Scratch;
use hardware::Wake;
use martlet_device_io::BusMemory;
use martlet_soft_bus::SoftClock;
use queue::{Queue, QueueState, direction_of};
use ring::{Direction, RingError};
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use steering::Steering;
use view::Reach;

/// How the data path behaves.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NicConfig {
    pub(crate) queues: u16,
    pub(crate) keys: u32,
    pub(crate) suppress_kicks: bool,
}

/// The data path of one device.
pub(crate) struct Nic {
    bus: Arc<dyn BusMemory>,
    clock: Arc<SoftClock>,
    suppress_kicks: bool,
    keys: RwLock<Keys>,
    queues: RwLock<Vec<Option<Arc<Queue>>>>,
    steering: RwLock<Steering>,
    /// Which queues exist, for their doorbell.
    listens: Vec<AtomicBool>,
    /// Queues to be looked at.
    pending: Bits,
    /// Transmit queues whose frames find no receive buffer at the moment.
    blocked: Bits,
    /// Transmit queues whose guest was asked not to kick: they are looked at without.
    hot: Bits,
    /// Looks in vain after which a hot queue's guest is asked to kick again.
    vain_looks_max: AtomicU32,
    running: AtomicU16,
    link: AtomicBool,
    gone: AtomicBool,
    scratch: Mutex<Scratch>,
    wake: OnceLock<Arc<Wake>>,
    pub(crate) vectors: VectorTable,
    pub(crate) counters: Counters,
}

impl Nic {
    pub(crate) fn new(
        config: NicConfig,
        bus: Arc<dyn BusMemory>,
        clock: Arc<SoftClock>,
    ) -> Arc<Nic> {
        Arc::new(Nic {
            bus,
            clock,
            suppress_kicks: config.suppress_kicks,
            keys: RwLock::new(Keys::new(config.keys)),
            queues: RwLock::new((0..config.queues).map(|_| None).collect()),
            steering: RwLock::default(),
            listens: (0..config.queues).map(|_| AtomicBool::new(false)).collect(),
            pending: Bits::new(config.queues),
            blocked: Bits::new(config.queues),
            hot: Bits::new(config.queues),
            vain_looks_max: AtomicU32::new(0),
            running: AtomicU16::new(0),
            link: AtomicBool::new(true),
            gone: AtomicBool::new(false),
            scratch: Mutex::default(),
            wake: OnceLock::new(),
            vectors: VectorTable::new(config.queues),
            counters: Counters::new(),
        })
    }

    pub(crate) fn keys(&self) -> RwLockReadGuard<'_, Keys> {
        self.keys.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn keys_mut(&self) -> RwLockWriteGuard<'_, Keys> {
        self.keys.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a key; its index, or `None` if there are too many.
    pub(crate) fn create_key(&self, key: Key) -> Option<u32> {
        self.keys_mut().create(key)
    }

    /// Removes a key: nothing goes through it any more when this returns. False if there is none.
    pub(crate) fn destroy_key(&self, index: u32) -> bool {
        let key = self.keys_mut().destroy(index);
        key.is_some()
    }

    /// Calls `body` with what reaches memory through the keys as they are now.
    pub(crate) fn reach<T>(&self, body: impl FnOnce(Reach<'_>) -> T) -> T {
        let keys = self.keys();
        body(Reach { bus: &*self.bus, keys: &keys })
    }

    pub(crate) fn bus(&self) -> &dyn BusMemory {
        &*self.bus
    }

    fn queues(&self) -> RwLockReadGuard<'_, Vec<Option<Arc<Queue>>>> {
        self.queues.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// The queue with this virtqueue index.
    pub(crate) fn queue(&self, index: u16) -> Option<Arc<Queue>> {
        self.queues().get(usize::from(index))?.clone()
    }

    /// Puts a queue to its index; false if there is one, or no such index.
    pub(crate) fn add_queue(&self, queue: Arc<Queue>) -> bool {
        let index = usize::from(queue.index);
        let mut queues = self.queues.write().unwrap_or_else(PoisonError::into_inner);
        let Some(slot) = queues.get_mut(index).filter(|slot| slot.is_none()) else { return false };
        if let Some(listens) = self.listens.get(index) {
            listens.store(true, Ordering::Relaxed);
        }
        *slot = Some(queue);
        true
    }

    /// Takes a queue away; its frames stay in its ring.
    pub(crate) fn remove_queue(&self, index: u16) {
        let mut queues = self.queues.write().unwrap_or_else(PoisonError::into_inner);
        let queue = queues.get_mut(usize::from(index)).and_then(Option::take);
        drop(queues);
        if let Some(listens) = self.listens.get(usize::from(index)) {
            listens.store(false, Ordering::Relaxed);
        }
        if let Some(queue) = queue {
            let mut work = queue.lock();
            if work.state == QueueState::Ready {
                self.count_running(false);
            }
            // Whoever still holds it passes no frame any more.
            work.state = QueueState::Suspended;
        }
    }

    /// A queue became ready, or is not ready any more.
    pub(crate) fn count_running(&self, ready: bool) {
        if !ready {
            self.running.fetch_sub(1, Ordering::AcqRel);
        } else if self.running.fetch_add(1, Ordering::AcqRel) == 0 {
            self.counters.restart();
        }
    }

    /// A queue can't go on: its state becomes ERR, and it is counted.
    fn fail(&self, queue: &Queue, work: &mut queue::Work, error: RingError) {
        if work.state == QueueState::Error {
            return;
        }
        let counter = match error {
            RingError::Access(_) => &self.counters.access_errors,
            RingError::Index { .. } | RingError::Chain { .. } | RingError::Descriptor { .. } => {
                &self.counters.ring_errors
            }
        };
        stats::add(counter, 1);
        tracing::debug!(queue = queue.index, ?error, "a virtqueue can't go on");
        if work.state == QueueState::Ready {
            self.count_running(false);
        }
        work.fail(error);
    }

    /// Counts what stopped a queue outside of the data path.
    pub(crate) fn count_error(&self, error: RingError) {
        let access = matches!(error, RingError::Access(_));
        let counters = &self.counters;
        stats::add(if access { &counters.access_errors } else { &counters.ring_errors }, 1);
    }

    /// The doorbell rang with this value. Never blocks.
    pub(crate) fn kick(&self, value: u32) {
        let index = crate::num::low16(value);
        let queue = self.listens.get(usize::from(index));
        let listens = queue.is_some_and(|listens| listens.load(Ordering::Relaxed));
        if !listens || self.is_gone() {
            return;
        }
        stats::add(&self.counters.kicks, 1);
        match direction_of(index) {
            Direction::Transmit => self.pending.set(index),
            Direction::Receive => self.room_came(),
        }
        self.wake();
    }

    /// There may be room for frames again that were not taken: who has them looks.
    pub(crate) fn room_came(&self) {
        self.blocked.drain_into(&self.pending);
        self.wake();
    }

    /// Wakes the thread that works for this device, if it sleeps.
    fn wake(&self) {
        if let Some(wake) = self.wake.get() {
            wake.wake();
        }
    }

    /// From now on a thread works for this device, and looks at hot queues this often in vain.
    pub(crate) fn adopt(&self, wake: &Arc<Wake>, vain_looks_max: u32) -> bool {
        self.vain_looks_max.store(vain_looks_max, Ordering::Relaxed);
        self.wake.set(Arc::clone(wake)).is_ok()
    }

    /// Whether a thread works for this device.
    pub(crate) fn has_thread(&self) -> bool {
        self.wake.get().is_some()
    }

    /// Whether there is something to be looked at.
    pub(crate) fn has_pending(&self) -> bool {
        !self.is_gone() && self.pending.any()
    }

    /// Whether queues are looked at without kicks.
    pub(crate) fn has_hot(&self) -> bool {
        !self.is_gone() && self.hot.any()
    }

    /// Whether the link is up.
    pub(crate) fn is_up(&self) -> bool {
        self.link.load(Ordering::SeqCst)
    }

    /// Takes the link up or down. Frames wait while it is down.
    pub(crate) fn set_link(&self, up: bool) {
        self.link.store(up, Ordering::SeqCst);
        if up {
            self.room_came();
        }
    }

    /// Whether the device has been taken away.
    pub(crate) fn is_gone(&self) -> bool {
        self.gone.load(Ordering::SeqCst)
    }

    /// Takes the device away: nothing is read or written any more once this returns.
    pub(crate) fn remove(&self) {
        self.gone.store(true, Ordering::SeqCst);
        // Whoever was at work has seen it before it gives this back.
        drop(self.scratch.lock().unwrap_or_else(PoisonError::into_inner));
    }

    /// Forgets queues, keys and tables; as after a reset of the function.
    pub(crate) fn reset(&self) {
        let limit = u16::try_from(self.listens.len()).unwrap_or(u16::MAX);
        (0..limit).for_each(|index| self.remove_queue(index));
        *self.steering.write().unwrap_or_else(PoisonError::into_inner) = Steering::default();
        let old = self.keys_mut().clear();
        drop(old);
    }

    /// Copies its counters.
    pub(crate) fn read_stats(&self, stats: &mut Stats) {
        self.counters.read(stats);
        stats.keys = self.keys().live();
        let queues: Vec<_> = self.queues().iter().flatten().map(Arc::clone).collect();
        for queue in queues {
            let work = queue.lock();
            stats.null_accesses += work.ring.view.null_accesses;
            stats.pages_beyond_log += work.ring.view.beyond_log;
            stats.queues.push(QueueStats {
                index: queue.index,
                state: work.state,
                available: work.ring.taken(),
                used: work.ring.published(),
                counts: work.counts,
            });
        }
    }
}
