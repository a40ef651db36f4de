//! Booting a guest again: what a reset does.
//!
//! Everything but the devices' hosts is as at the power-on: memory is zero but for what the guest
//! boots from, vCPUs, interrupt controllers, timers and clocks have the state that was saved before
//! the first instruction. All that is written to memory is known to dirty tracking, so a migration
//! that is under way goes on and moves the guest that boots.
//!
//! Memory takes its time, a second for some GiB, and a device that does not answer takes seconds. The
//! machine's lock is free meanwhile, and nobody but the thread of a reset, or an owner who orders
//! one, waits for it.

use crate::clock;
use crate::machine::{Control, EndCause, Machine};
use crate::phase::{Event, Phase};
use crate::power_on::{self, PowerOn};
use crate::saved::SavedMachine;
use crate::vcpu::lock;
use martlet_engine::LoadFor;
use martlet_units::Instant;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

/// A guest that resets itself more often than this does nothing else, and costs its host a
/// processor and the writing of its memory.
const RESETS_MAX: usize = 10;
const RESETS_TIME: Duration = Duration::from_secs(1);

/// Whose wish a reset is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wish {
    Guest,
    Owner,
}

/// How often a guest was reset.
#[derive(Default)]
pub(crate) struct Resets {
    by_guest: AtomicU64,
    by_owner: AtomicU64,
    /// When it last did it by itself.
    recent: Mutex<VecDeque<Instant>>,
}

impl Resets {
    fn count(&self, wish: Wish) {
        let counter = match wish {
            Wish::Guest => &self.by_guest,
            Wish::Owner => &self.by_owner,
        };
        counter.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn get(&self) -> (u64, u64) {
        (self.by_guest.load(Ordering::Relaxed), self.by_owner.load(Ordering::Relaxed))
    }

    /// Whether the guest may reset itself now, and notes that it does.
    fn is_allowed(&self, now: Instant) -> bool {
        let mut recent = lock(&self.recent);
        if recent.len() == RESETS_MAX {
            if recent.front().is_some_and(|first| now.since(*first) < RESETS_TIME) {
                return false;
            }
            recent.pop_front();
        }
        recent.push_back(now);
        true
    }
}

impl Machine {
    /// Keeps what the guest boots from; before it runs.
    pub(crate) fn keep_power_on(&self) -> Result<(), String> {
        let state = {
            let mut control = lock(&self.control);
            self.group.begin_save(None);
            control.is_saving = true;
            let _ = self.group.wait_out();
            self.collect(&mut control, true)?
        };
        power_on::keep(&self.memory, state)
    }

    /// From now on the guest's wish to be reset is carried out.
    pub(crate) fn serve_resets(self: &Arc<Machine>) {
        let machine = Arc::downgrade(self);
        self.group.on_reset(move || {
            // The vCPU that asked for it has to leave the guest like all others.
            let machine = machine.clone();
            let reset = move || {
                if let Some(machine) = machine.upgrade() {
                    machine.reset_if_asked();
                }
            };
            let thread = std::thread::Builder::new().name("reset".into()).spawn(reset);
            if let Err(error) = thread {
                tracing::error!(%error, "the guest asked for a reset and there is no thread for it");
            }
        });
    }

    /// Why the guest stopped for good. A reset that can be done is none.
    pub(crate) fn ended(&self) -> Option<EndCause> {
        self.group.ended_because().filter(|cause| *cause != EndCause::Reset || !self.can_reset())
    }

    pub(crate) fn can_reset(&self) -> bool {
        self.memory.image().is_some()
    }

    /// Whether the guest waits for a reset.
    pub(crate) fn is_reset_asked(&self) -> bool {
        self.group.ended_because() == Some(EndCause::Reset)
    }

    /// Does what the guest asked for, unless its vCPUs are being stopped for a switchover: whoever
    /// ends that asks again.
    fn reset_if_asked(&self) {
        let control = lock(&self.control);
        if self.is_reset_asked() && matches!(control.phase, Phase::Here(_)) {
            self.reset(control, Wish::Guest);
        }
    }

    /// Resets a guest that is here. A failure is its end.
    pub(crate) fn reset(&self, mut control: MutexGuard<'_, Control>, wish: Wish) {
        if !self.can_reset() || control.step("reset it", Event::BeginReset).is_err() {
            return;
        }
        if control.permit.is_none() {
            self.group.begin_leave();
            control.permit = self.group.wait_out();
        }
        let is_allowed = match wish {
            Wish::Guest => self.resets.is_allowed(clock::now()),
            Wish::Owner => true,
        };
        drop(control);
        let booted = if is_allowed {
            self.boot_again()
        } else {
            Err(format!("it did so {RESETS_MAX} times within {RESETS_TIME:?}"))
        };
        let mut control = lock(&self.control);
        // Or it was quit meanwhile.
        if control.step("reset it", Event::EndReset).is_err() {
            return;
        }
        match booted {
            Ok(()) => {
                self.resets.count(wish);
                self.group.begin_anew();
                if let (Phase::Here(state), Some(permit)) = (control.phase, control.permit.take()) {
                    self.go_on(&mut control, permit, state);
                }
            }
            Err(reason) => self.group.end_for(EndCause::Crash(format!("reset: {reason}"))),
        }
    }

    /// Loads all of the power-on; the phase keeps everybody else away. What comes of it is nothing
    /// if the machine is quit meanwhile.
    fn boot_again(&self) -> Result<(), String> {
        let power_on = power_on::read(&self.memory)?;
        // Devices and the hypervisor write the guest's memory by themselves until they are reset.
        // Without the lock: a device is waited for, and an engine that gives up a stop meanwhile,
        // because the device does not answer, must not be.
        self.nics.reset();
        {
            let control = lock(&self.control);
            if !matches!(control.phase, Phase::Resetting(_)) {
                return Ok(());
            }
            self.load_power_on(&power_on)?;
        }
        self.fill(&power_on)
    }

    /// All but devices and memory. While no vCPU runs, under the lock.
    fn load_power_on(&self, power_on: &PowerOn) -> Result<(), String> {
        let SavedMachine { vcpus, vm, serial, board, .. } = power_on.state.clone();
        if vcpus.len() != self.group.len() {
            return Err(format!("states of {} vCPUs for {}", vcpus.len(), self.group.len()));
        }
        // The clocks show what they did at the power-on.
        let what_for = LoadFor::Start { source_clock: None };
        self.vm.begin_load();
        self.group.begin_load(vcpus.into_iter().map(Into::into).collect(), what_for);
        let loaded = self.vm.load(&vm, what_for).map_err(|error| error.to_string());
        let serial = self.bus.load_serial(&serial);
        self.bus.load_board(board.as_ref());
        let vcpus = self.group.wait_loaded().map_err(|(number, e)| format!("vCPU {number}: {e}"));
        loaded.and(serial).and(vcpus)
    }

    fn fill(&self, power_on: &PowerOn) -> Result<(), String> {
        if self.memory.clear() && power_on.put(&self.memory) {
            return Ok(());
        }
        Err("a page of guest memory can't be written".into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guest_that_does_nothing_but_reset_itself_may_not_for_ever() {
        let resets = Resets::default();
        let at = |ms: u64| Instant(ms * 1_000_000);
        assert!((0..10).all(|number| resets.is_allowed(at(number * 99))));
        assert!(!resets.is_allowed(at(999)));
        assert!(resets.is_allowed(at(1000)), "the first was a second ago");
        assert!(!resets.is_allowed(at(1098)));
        assert!((0..100).all(|number| resets.is_allowed(at(2000 + number * 101))));
    }
}
