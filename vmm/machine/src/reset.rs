//! Booting a guest again: what a reset does.
//!
//! Everything but the devices' hosts is as at the power-on: memory is zero but for what the guest
//! boots from, vCPUs, interrupt controllers, timers and clocks have the state that was saved before
//! the first instruction. All that is written to memory is known to dirty tracking, so a migration
//! that is under way goes on and moves the guest that boots.

use crate::boot;
use crate::config::MachineConfig;
use crate::machine::{Control, EndCause, Machine};
use crate::phase::Phase;
use crate::saved::SavedMachine;
use crate::vcpu::backend::Start;
use crate::vcpu::lock;
use martlet_engine::{LoadFor, RunState};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, MutexGuard};

/// What a guest that was booted here is booted from again. One that came from elsewhere has none:
/// its kernel is there.
pub(crate) struct PowerOn {
    config: MachineConfig,
    starts: Vec<Start>,
    /// Before the first instruction.
    state: SavedMachine,
}

/// How often a guest was reset.
#[derive(Default)]
pub(crate) struct Resets {
    by_guest: AtomicU64,
    by_owner: AtomicU64,
}

impl Resets {
    fn count(counter: &AtomicU64) {
        counter.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn get(&self) -> (u64, u64) {
        (self.by_guest.load(Ordering::Relaxed), self.by_owner.load(Ordering::Relaxed))
    }
}

impl Machine {
    /// Remembers how the guest begins; before it runs.
    pub(crate) fn remember_power_on(
        self: &Arc<Machine>,
        config: &MachineConfig,
        starts: Vec<Start>,
    ) -> Result<(), String> {
        let state = {
            let mut control = lock(&self.control);
            self.group.begin_save();
            control.is_saving = true;
            let _ = self.group.wait_out();
            self.collect(&mut control, true)?
        };
        let power_on = PowerOn { config: config.clone(), starts, state };
        assert!(self.power_on.set(power_on).is_ok(), "a machine is switched on once");
        let machine = Arc::downgrade(self);
        self.group.on_reset(move || {
            // The vCPU that asked for it has to leave the guest like all others.
            let machine = machine.clone();
            let reset = move || {
                if let Some(machine) = machine.upgrade() {
                    drop(machine.settled());
                }
            };
            let thread = std::thread::Builder::new().name("reset".into()).spawn(reset);
            if let Err(error) = thread {
                tracing::error!(%error, "the guest asked for a reset and there is no thread for it");
            }
        });
        Ok(())
    }

    /// Why the guest stopped for good. A reset that can be done is none.
    pub(crate) fn ended(&self) -> Option<EndCause> {
        self.group.ended_because().filter(|cause| *cause != EndCause::Reset || !self.can_reset())
    }

    fn can_reset(&self) -> bool {
        self.power_on.get().is_some()
    }

    /// The machine's lock, with a reset that the guest asked for done, unless its vCPUs are being
    /// stopped for a switchover: whoever ends that looks again.
    pub(crate) fn settled(&self) -> MutexGuard<'_, Control> {
        let mut control = lock(&self.control);
        self.reset_if_asked(&mut control);
        control
    }

    /// See [`Machine::settled`].
    pub(crate) fn reset_if_asked(&self, control: &mut Control) {
        let asked = self.group.ended_because() == Some(EndCause::Reset);
        if asked && matches!(control.phase, Phase::Here(_)) {
            self.reset(control, &self.resets.by_guest);
        }
    }

    /// Resets the guest on its owner's behalf.
    pub(crate) fn reset_for_owner(&self, control: &mut Control) {
        self.reset(control, &self.resets.by_owner);
    }

    /// The guest is here. A failure is its end.
    fn reset(&self, control: &mut Control, counter: &AtomicU64) {
        let Phase::Here(was) = control.phase else { return };
        let Some(power_on) = self.power_on.get() else { return };
        if was == RunState::Running && control.permit.is_none() {
            self.group.begin_leave();
            control.permit = self.group.wait_out();
        }
        match self.boot_again(power_on) {
            Ok(()) => {
                Resets::count(counter);
                self.group.begin_anew();
                if let Some(permit) = control.permit.take() {
                    self.go_on(control, permit, was);
                }
            }
            Err(reason) => self.group.end_for(EndCause::Crash(format!("reset: {reason}"))),
        }
    }

    /// While no vCPU runs.
    fn boot_again(&self, power_on: &PowerOn) -> Result<(), String> {
        // Devices and the hypervisor first: they write the guest's memory by themselves.
        self.nics.reset();
        let SavedMachine { vcpus, vm, serial, .. } = power_on.state.clone();
        // The clocks show what they did at the power-on.
        let what_for = LoadFor::Start { source_clock: None };
        self.vm.begin_load();
        self.group.begin_load(vcpus.into_iter().map(Into::into).collect(), what_for);
        let loaded = self.vm.load(&vm, what_for).map_err(|error| error.to_string());
        let serial = self.bus.load_serial(&serial);
        let entered = self.group.wait_loaded().map_err(|(number, e)| format!("vCPU {number}: {e}"));
        loaded.and(serial).and(entered)?;
        if !self.memory.clear() {
            return Err("a page of guest memory can't be cleared".into());
        }
        let starts = boot::prepare(&power_on.config, &self.memory, &*self.vm, &self.nics.places());
        if starts.map_err(|error| error.to_string())? != power_on.starts {
            return Err("what the guest boots from has changed since".into());
        }
        Ok(())
    }
}
