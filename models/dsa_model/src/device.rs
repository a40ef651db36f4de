//! The device as a whole.

use crate::state::{Life, State, Waiting};
use crate::{ConfigError, Counters, DeviceConfig, Fault, FaultPoint, Faults, Mode, QueuePortal};
use martlet_device_io::{BusAddress, BusMemory, DESCRIPTOR_BYTES, Submission};
use martlet_dsa_abi::Descriptor;
use martlet_soft_bus::{SoftClock, Turn};
use martlet_units::Instant;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A device. Its drivers get portals ([`DsaModel::portal`]) and memory on its bus; its time passes
/// on a [`Stage`](martlet_soft_bus::Stage), where it takes turns.
///
/// A driver that waits at the model's seat is woken by every completion record, as UMONITOR and
/// UMWAIT do it on hardware; by the interrupt that a descriptor may ask for as well.
pub struct DsaModel {
    state: Mutex<State>,
    bus: Arc<dyn BusMemory>,
    clock: Arc<SoftClock>,
}

impl DsaModel {
    /// A device that is set up and enabled.
    pub fn new(
        config: DeviceConfig,
        bus: Arc<dyn BusMemory>,
        clock: Arc<SoftClock>,
        faults: Faults,
    ) -> Result<Arc<DsaModel>, ConfigError> {
        config.validate()?;
        let state = Mutex::new(State::new(config, faults, clock.now()));
        Ok(Arc::new(DsaModel { state, bus, clock }))
    }

    /// The portal of a work queue; `None` if there is no such queue. As many as wanted: each
    /// process maps its own.
    pub fn portal(self: &Arc<DsaModel>, queue: usize) -> Option<QueuePortal> {
        self.lock().queues.get(queue)?;
        Some(QueuePortal::new(Arc::clone(self), queue))
    }

    /// Plans other faults from now on.
    pub fn set_faults(&self, faults: Faults) {
        self.lock().faults = faults;
    }

    /// Takes pages away: accesses fault, until [`DsaModel::show`].
    pub fn hide(&self, at: BusAddress, bytes: u64) {
        self.lock().absent.hide(at.0, bytes);
    }

    /// Gives pages back: the host has mapped them.
    pub fn show(&self, at: BusAddress, bytes: u64) {
        self.lock().absent.show(at.0, bytes);
    }

    /// Pulls the device out.
    pub fn unplug(&self) {
        self.lock().unplug();
    }

    /// What it did so far.
    pub fn counters(&self) -> Counters {
        self.lock().counters
    }

    /// Whether nothing is waiting, under way or about to complete.
    pub fn is_idle(&self) -> bool {
        let state = self.lock();
        state.landings.is_empty() && state.queues.iter().all(|queue| queue.open.is_empty())
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// One descriptor comes through a portal.
    pub(crate) fn submit(&self, queue: usize, bytes: &[u8; DESCRIPTOR_BYTES]) -> Submission {
        let mut state = self.lock();
        let is_shared = |state: &State| {
            state.queues.get(queue).is_some_and(|queue| queue.config.mode == Mode::Shared)
        };
        if is_shared(&state) {
            self.clock.advance(state.config.timing.enqcmd);
        }
        state.turn(self.clock.now(), &*self.bus);
        let result = state.take(queue, Descriptor::from_bytes(bytes));
        state.turn(self.clock.now(), &*self.bus);
        result
    }
}

impl Turn for DsaModel {
    fn turn(&self, now: Instant) -> Option<Instant> {
        self.lock().turn(now, &*self.bus)
    }

    fn take_interrupt(&self) -> bool {
        core::mem::take(&mut self.lock().woken)
    }
}

impl State {
    /// The portal's answer to a descriptor.
    fn take(&mut self, queue: usize, descriptor: Descriptor) -> Submission {
        let fault = match self.life {
            Life::Running => self.faults.strike(&FaultPoint::Submit),
            Life::Halted | Life::Gone => None,
        };
        match fault {
            Some(Fault::Gone) => self.unplug(),
            Some(Fault::Halt) => self.life = Life::Halted,
            _ => {}
        }
        let number = self.number();
        let life = self.life;
        let Some(queue) = self.queues.get_mut(queue) else { return Submission::Gone };
        let takes = life == Life::Running && fault != Some(Fault::Retry) && queue.has_room();
        match (life, takes, queue.config.mode) {
            (Life::Gone, ..) => Submission::Gone,
            (_, true, _) => {
                self.counters.accepted += 1;
                queue.open.insert(number);
                queue.waiting.push_back(Waiting { number, descriptor });
                Submission::Accepted
            }
            (_, false, Mode::Shared) => {
                self.counters.retries += 1;
                Submission::Retry
            }
            (_, false, Mode::Dedicated) => {
                self.counters.overflows += 1;
                Submission::Accepted
            }
        }
    }
}

impl core::fmt::Debug for DsaModel {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let state = self.lock();
        f.debug_struct("DsaModel")
            .field("number", &state.config.number)
            .field("life", &state.life)
            .field("counters", &state.counters)
            .finish_non_exhaustive()
    }
}
