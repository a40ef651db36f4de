//! Back to the begin, and the end.
//!
//! There is one way to get rid of what is on a function: it is stopped and begins anew. A reset does
//! that, and so does a function of which a command was not answered. In that case what the guest had
//! is made again: the map, and the queues where their rings say that they are. A frame that was in
//! flight may be lost, or sent once more; [`Recoveries`] counts them.
//!
//! A function that does not say that it has stopped is not made anew: it could serve the same rings
//! as the new one, and write memory that is somebody else's. Its guest goes on without a card.

use super::map::install;
use super::own_memory::OwnMemory;
use super::{Control, Mlx5Device, Recoveries};
use crate::command::End;
use crate::firmware::BringUpError;
use crate::memory::Maps;
use crate::queues::{DeviceEvent, DeviceState, Gates, OldObjects, Starting, Target};
use martlet_units::Instant;
use martlet_vdpa::VdpaError;
use std::sync::Arc;
use std::time::Duration;

const ACTION: &str = "reset";

/// What a function may still reach that was told to stop and has not said that it has: pinned
/// memory of the guest's behind its keys, and memory of the driver's own.
pub(super) struct Leftovers {
    pub(super) maps: Maps,
    objects: OldObjects,
    scratch: Option<OwnMemory>,
    logs: Vec<OwnMemory>,
}

impl Leftovers {
    /// **Only** when the function has stopped, or never knew of it.
    fn free(self) {
        let Leftovers { mut maps, objects, scratch, logs } = self;
        drop((objects, scratch, logs));
        maps.forget_all();
    }
}

/// How long a function that did not begin anew is left alone.
const PAUSE: Duration = Duration::from_secs(1);

impl Control {
    /// An error if a function may still serve queues that are known no more: it is not enough then
    /// that none is left to be stopped.
    pub(super) fn check_stopped(&self, action: &'static str) -> Result<(), VdpaError> {
        match self.unstopped {
            None => Ok(()),
            Some(_) => {
                let reason = "it was told to stop and has not stopped".to_owned();
                Err(VdpaError::Device { action, reason })
            }
        }
    }
}

impl Mlx5Device {
    pub(super) fn reset_all(&self, control: &mut Control) -> Result<(), VdpaError> {
        self.forget_guest(control);
        self.begin_anew(control).map_err(|error| self.not_up(&error, ACTION))
    }

    /// What Linux' driver does at a reset: queues and keys are destroyed, and the function stays up.
    /// Here only for measuring what that costs.
    pub fn reset_in_place(&self) -> Result<(), VdpaError> {
        let control = &mut *self.lock();
        self.forget_guest(control);
        let table = control.queues.set_table(&self.firmware, &[]);
        table.map_err(|error| crate::queues::vdpa_error(ACTION, &error))?;
        let all: Vec<usize> = (0..control.queues.list.len()).collect();
        let faults = control.queues.destroy(&self.firmware, &all, &self.guest);
        if control.maps.deletes_at_once() {
            control.maps.destroy_unused(&self.firmware);
        }
        if faults.is_empty() { Ok(()) } else { Err(faults.into_error(ACTION)) }
    }

    fn not_up(&self, error: &BringUpError, action: &'static str) -> VdpaError {
        if self.firmware.is_gone() {
            return VdpaError::Gone { action };
        }
        let source = std::error::Error::source(error).map(|source| format!(": {source}"));
        let reason = format!("it does not begin anew: {error}{}", source.unwrap_or_default());
        VdpaError::Device { action, reason }
    }

    /// Everything that the VMM said goes.
    fn forget_guest(&self, control: &mut Control) {
        self.settle(control);
        install(control, None, &[]);
        control.queues.features = 0;
        control.queues.used = control.queues.list.len();
        control.has_features = false;
        for queue in &mut control.queues.list {
            queue.config = None;
            queue.at = None;
        }
        control.logs.is_on = false;
        control.change(DeviceEvent::Reset);
    }

    /// Stops the function and brings it up again: what was made on it is gone.
    fn begin_anew(&self, control: &mut Control) -> Result<(), BringUpError> {
        let stopped = self.stop_function(control);
        control.retry_at = self.firmware.now().after(PAUSE);
        stopped?;
        let setup = self.firmware.start_anew()?;
        control.maps = super::new_maps(&setup, self.firmware.options());
        control.queues.common.pd = setup.pd;
        control.setup = setup;
        Ok(())
    }

    /// Stops the function. After a success it reaches no memory: all that was kept for it is free.
    /// After an error all of that is kept, for it may still be written; nothing is made on the
    /// function then until a later attempt succeeds.
    fn stop_function(&self, control: &mut Control) -> Result<(), BringUpError> {
        (0..control.queues.list.len()).for_each(|queue| self.guest.close(queue));
        let stopped = self.firmware.stop();
        let left = self.take_what_is_made(control);
        match stopped {
            Ok(()) => {
                left.free();
                control.unstopped.take().into_iter().for_each(Leftovers::free);
            }
            // At later attempts nothing is left that the function knows: it was sent nothing more.
            Err(_) if control.unstopped.is_some() => left.free(),
            Err(_) => control.unstopped = Some(left),
        }
        stopped
    }

    fn take_what_is_made(&self, control: &mut Control) -> Leftovers {
        let maps = super::new_maps(&control.setup, self.firmware.options());
        Leftovers {
            objects: control.queues.take_objects(),
            maps: std::mem::replace(&mut control.maps, maps),
            scratch: control.scratch.take(),
            logs: control.logs.take_memory(),
        }
    }

    /// Whether the function answers; one that does not begins anew before it is set up for a guest.
    pub(super) fn ensure_answers(
        &self,
        control: &mut Control,
        action: &'static str,
    ) -> Result<(), VdpaError> {
        match self.firmware.end() {
            None => Ok(()),
            Some(End::Gone) => Err(VdpaError::Gone { action }),
            Some(End::Tainted) => self.recover(control, action),
        }
    }

    /// Makes a function anew that does not answer, unless it stands: then its guest is about to go,
    /// or a resume comes first. When to try again, if that is so.
    pub(super) fn service_recovery(&self, control: &mut Control) -> Option<Instant> {
        let stands = control.state == DeviceState::Suspended;
        if self.firmware.end() != Some(End::Tainted) || stands {
            return None;
        }
        if self.firmware.now() >= control.retry_at
            && let Err(error) = self.recover(control, "begin anew")
        {
            tracing::warn!(%error, "an mlx5 function does not pass frames");
            control.retry_at = self.firmware.now().after(PAUSE);
        }
        self.firmware.end().map(|_| control.retry_at)
    }

    fn recover(&self, control: &mut Control, action: &'static str) -> Result<(), VdpaError> {
        let runs = std::mem::take(&mut control.queues.runs);
        let outcome = self.remake(control, &runs, action);
        if outcome.is_err() {
            self.firmware.taint();
            control.queues.runs = runs;
        }
        outcome
    }

    fn remake(
        &self,
        control: &mut Control,
        runs: &[martlet_vdpa::MapRun],
        action: &'static str,
    ) -> Result<(), VdpaError> {
        self.begin_anew(control).map_err(|error| self.not_up(&error, action))?;
        let map = control.maps.build(&self.firmware, runs)?;
        install(control, map, runs);
        let active = control.queues.active();
        let is_running = control.state == DeviceState::Running;
        let mut in_flight = 0;
        if is_running {
            // A start that was not answered may have happened: the rings know.
            active.iter().for_each(|index| control.queues.list[*index].at = None);
            let transmit = active.iter().filter(|index| *index % 2 == 1);
            in_flight = transmit.map(|index| u64::from(control.queues.in_flight(*index))).sum();
        }
        self.log_again(control)?;
        if is_running {
            let faults = self.start_all(control, &active);
            if !faults.is_empty() {
                return Err(faults.into_error(action));
            }
            self.guest.set_link(super::switch::query_link(&self.firmware).unwrap_or(false));
            self.guest.config_has_changed();
        }
        let Recoveries { count, frames_in_flight } = &mut control.recoveries;
        (*count, *frames_in_flight) = (*count + 1, *frames_in_flight + in_flight);
        tracing::warn!(in_flight, "an mlx5 function has begun anew");
        Ok(())
    }

    /// Starts queues and waits. A function that does not start them all is to begin anew.
    pub(super) fn start_all(
        &self,
        control: &mut Control,
        which: &[usize],
    ) -> crate::queues::Faults {
        let starting = Starting::begin(which, Target::Running);
        let faults = starting.run(&self.firmware, &mut control.queues, &self.guest);
        if !faults.is_empty() {
            self.firmware.taint();
        }
        faults
    }
}

impl Drop for Mlx5Device {
    fn drop(&mut self) {
        let mut control = self.lock();
        super::guest::Guest::disconnect(&*self.vectors);
        self.settle(&mut control);
        if self.stop_function(&mut control).is_err() {
            // The function may go on for longer than the device.
            std::mem::forget((control.unstopped.take(), Arc::clone(&self.firmware)));
        }
    }
}
