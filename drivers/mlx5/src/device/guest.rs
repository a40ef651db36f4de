//! The guest's side of the device: doorbells, notifications, the configuration space. No lock that
//! anything waits under.

use crate::queues::Gates;
use martlet_device_io::{Notify, Registers, Vectors, Waiter};
use martlet_mlx5_abi::capability::VirtioCapabilities;
use martlet_vdpa::virtio::net_config;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

/// A moment that has not come.
const NEVER: u64 = u64::MAX;

const CONFIG_BYTES: usize = net_config::BYTES as usize;

/// What the guest sees.
pub(super) struct Guest {
    registers: Arc<dyn Registers>,
    clock: Arc<dyn Waiter>,
    doorbell: u64,
    queues: Vec<GuestQueue>,
    config: RwLock<[u8; CONFIG_BYTES]>,
    config_changed: RwLock<Option<Notify>>,
    first_frame: AtomicU64,
    last_frame: AtomicU64,
}

#[derive(Default)]
struct GuestQueue {
    is_open: AtomicBool,
    used: RwLock<Option<Notify>>,
}

/// What the configuration space says for ever.
pub(super) struct ConfigSpace {
    pub(super) mac: [u8; 6],
    pub(super) pairs: u16,
    pub(super) mtu: u16,
}

impl Guest {
    pub(super) fn new(
        registers: Arc<dyn Registers>,
        clock: Arc<dyn Waiter>,
        capabilities: &VirtioCapabilities,
        queues: usize,
        space: &ConfigSpace,
    ) -> Arc<Guest> {
        let mut config = [0; CONFIG_BYTES];
        config[net_config::MAC..][..6].copy_from_slice(&space.mac);
        config[net_config::MAX_PAIRS..][..2].copy_from_slice(&space.pairs.to_le_bytes());
        config[net_config::MTU..][..2].copy_from_slice(&space.mtu.to_le_bytes());
        Arc::new(Guest {
            registers,
            clock,
            doorbell: capabilities.doorbell_bar_offset.get(),
            queues: (0..queues).map(|_| GuestQueue::default()).collect(),
            config: RwLock::new(config),
            config_changed: RwLock::default(),
            first_frame: AtomicU64::new(NEVER),
            last_frame: AtomicU64::new(NEVER),
        })
    }

    /// Sends every vector's interrupts to the queues that use it.
    pub(super) fn connect(self: &Arc<Self>, vectors: &dyn Vectors) {
        for vector in 0..vectors.count() {
            // Not the other way round: the vectors may outlive the device.
            let guest = Arc::downgrade(self);
            let step = usize::from(vectors.count());
            let fired = move || {
                let Some(guest) = guest.upgrade() else { return };
                guest.stamp();
                for queue in guest.queues.iter().skip(usize::from(vector)).step_by(step) {
                    queue.notify();
                }
            };
            vectors.connect(vector, Some(Arc::new(fired)));
        }
    }

    /// Nothing goes to the guest any more.
    pub(super) fn disconnect(vectors: &dyn Vectors) {
        for vector in 0..vectors.count() {
            vectors.connect(vector, None);
        }
    }

    /// A queue has used buffers: frames were served.
    fn stamp(&self) {
        let now = self.clock.now().0;
        // Relaxed: figures for reports.
        let _ = self.first_frame.compare_exchange(NEVER, now, Ordering::Relaxed, Ordering::Relaxed);
        self.last_frame.store(now, Ordering::Relaxed);
    }

    /// Frames begin to flow (again).
    pub(super) fn restart(&self) {
        self.first_frame.store(NEVER, Ordering::Relaxed);
    }

    /// When the first and the last interrupt for used buffers came.
    pub(super) fn frames_ns(&self) -> (Option<u64>, Option<u64>) {
        let get =
            |moment: &AtomicU64| Some(moment.load(Ordering::Relaxed)).filter(|at| *at != NEVER);
        (get(&self.first_frame), get(&self.last_frame))
    }

    pub(super) fn on_used(&self, queue: usize, notify: Notify) {
        if let Some(queue) = self.queues.get(queue) {
            *queue.used.write().unwrap_or_else(PoisonError::into_inner) = Some(notify);
        }
    }

    pub(super) fn on_config_change(&self, notify: Notify) {
        let mut changed = self.config_changed.write().unwrap_or_else(PoisonError::into_inner);
        *changed = Some(notify);
    }

    /// The guest has put something into a queue.
    pub(super) fn kick(&self, queue: usize) {
        // Acquire: pairs with `open`. A kick that comes before it is made up for there.
        if self.queues.get(queue).is_some_and(|queue| queue.is_open.load(Ordering::Acquire)) {
            self.ring(queue);
        }
    }

    /// The queue's doorbell has its number as value (PRM, "Virtio emulation: doorbells").
    fn ring(&self, queue: usize) {
        if let Ok(number) = u32::try_from(queue) {
            self.registers.write32(self.doorbell, number);
        }
    }

    pub(super) fn read_config(&self, offset: u32, into: &mut [u8]) {
        let config = *self.config.read().unwrap_or_else(PoisonError::into_inner);
        let from = usize::try_from(offset).ok().and_then(|offset| config.get(offset..));
        let from = from.unwrap_or_default();
        let bytes = from.len().min(into.len());
        into.fill(0);
        into[..bytes].copy_from_slice(&from[..bytes]);
    }

    /// Publishes whether the link is up; whether that is news.
    pub(super) fn set_link(&self, up: bool) -> bool {
        let mut config = self.config.write().unwrap_or_else(PoisonError::into_inner);
        let status = if up { net_config::LINK_UP } else { 0 }.to_le_bytes();
        let place = &mut config[net_config::STATUS..][..2];
        let is_news = *place != status;
        place.copy_from_slice(&status);
        is_news
    }

    /// Tells the guest that the configuration space has changed.
    pub(super) fn config_has_changed(&self) {
        let changed = self.config_changed.read().unwrap_or_else(PoisonError::into_inner);
        if let Some(notify) = changed.as_ref() {
            notify();
        }
    }
}

impl GuestQueue {
    fn notify(&self) {
        let used = self.used.read().unwrap_or_else(PoisonError::into_inner);
        if let Some(notify) = used.as_ref() {
            notify();
        }
    }
}

impl Gates for Arc<Guest> {
    fn open(&self, queue: usize) {
        let Some(gate) = self.queues.get(queue) else { return };
        // Release: whoever kicks from now on reaches the queue that has just started.
        gate.is_open.store(true, Ordering::Release);
        self.ring(queue);
        gate.notify();
    }

    fn close(&self, queue: usize) {
        if let Some(gate) = self.queues.get(queue) {
            gate.is_open.store(false, Ordering::Release);
        }
    }
}
