//! A card's interrupt line and the two registers that say why it rang.

use super::registers::{INTERRUPT_CONFIG, INTERRUPT_QUEUE};
use crate::clock;
use crate::devices::PulseIrq;
use martlet_units::Instant;
use martlet_vdpa::Notify;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// How long a guest that has not acknowledged an interrupt is not told again. The line of a real
/// card stays up meanwhile, which is no news either; but an edge that came while the line was
/// masked is lost, so the guest is told again some time.
const REPEAT_AFTER: Duration = Duration::from_millis(10);

/// Shared with the vDPA device, which rings from any thread.
pub(super) struct Interrupts {
    line: u32,
    status: AtomicU32,
    generation: AtomicU32,
    /// The guest is not here yet: what is rung is not heard.
    muted: AtomicBool,
    /// When the line was last pulsed, in nanoseconds.
    last_pulse: AtomicU64,
    pulse: OnceLock<PulseIrq>,
}

impl Interrupts {
    pub(super) fn new(line: u32, muted: bool) -> Arc<Interrupts> {
        Arc::new(Interrupts {
            line,
            status: AtomicU32::new(0),
            generation: AtomicU32::new(0),
            muted: AtomicBool::new(muted),
            last_pulse: AtomicU64::new(0),
            pulse: OnceLock::new(),
        })
    }

    /// Connects the line; once, before the guest runs.
    pub(super) fn connect(&self, pulse: PulseIrq) {
        assert!(self.pulse.set(pulse).is_ok(), "interrupts are connected once");
    }

    pub(super) fn unmute(&self) {
        self.muted.store(false, Ordering::Release);
    }

    fn ring(&self, why: u32) {
        if self.muted.load(Ordering::Acquire) {
            return;
        }
        // Before the line: who it wakes finds the reason. A driver reads the reasons, acknowledges
        // them and then looks at its queues (as Linux does, vm_interrupt in virtio_mmio.c): what
        // came before it acknowledged is found without another edge.
        let before = self.status.fetch_or(why, Ordering::AcqRel);
        let now = clock::now();
        let last = Instant(self.last_pulse.load(Ordering::Relaxed));
        if before & why != 0 && now.since(last) < REPEAT_AFTER {
            return;
        }
        self.last_pulse.store(now.0, Ordering::Relaxed);
        if let Some(pulse) = self.pulse.get() {
            pulse(self.line);
        }
    }

    /// A queue has something for the guest.
    pub(super) fn ring_queue(&self) {
        self.ring(INTERRUPT_QUEUE);
    }

    /// The configuration space or the status has changed.
    pub(super) fn ring_config(&self) {
        self.generation.fetch_add(1, Ordering::AcqRel);
        self.ring(INTERRUPT_CONFIG);
    }

    pub(super) fn notify_queue(self: &Arc<Self>) -> Notify {
        let interrupts = Arc::clone(self);
        Arc::new(move || interrupts.ring_queue())
    }

    pub(super) fn notify_config(self: &Arc<Self>) -> Notify {
        let interrupts = Arc::clone(self);
        Arc::new(move || interrupts.ring_config())
    }

    pub(super) fn status(&self) -> u32 {
        self.status.load(Ordering::Acquire)
    }

    pub(super) fn acknowledge(&self, bits: u32) {
        self.status.fetch_and(!bits, Ordering::AcqRel);
    }

    pub(super) fn generation(&self) -> u32 {
        self.generation.load(Ordering::Acquire)
    }

    /// Loads what was saved. Another device stands behind the card now, so its configuration space
    /// counts as changed.
    pub(super) fn load(&self, status: u32, generation: u32) {
        self.status.store(status & (INTERRUPT_QUEUE | INTERRUPT_CONFIG), Ordering::Release);
        self.generation.store(generation.wrapping_add(1), Ordering::Release);
    }
}
