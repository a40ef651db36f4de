//! Back to the begin, and the end.

use super::map::install;
use super::{Control, Mlx5Device};
use crate::firmware::{BringUpError, objects_of};
use crate::queues::{DeviceEvent, DeviceState, Faults};
use martlet_vdpa::VdpaError;
use std::sync::Arc;

const ACTION: &str = "reset";

impl Mlx5Device {
    pub(super) fn reset_all(&self, control: &mut Control) -> Result<(), VdpaError> {
        self.forget_guest(control);
        let mut faults = Faults::default();
        self.end_queues(control, &mut faults);
        let hidden = control.queues.destroy_again(&self.firmware);
        self.drop_logs(control);
        self.delete_if_at_once(control);
        control.queues.drop_retired(&self.firmware);
        let unnamed = control.queues.has_wrong_numbers || self.firmware.has_hidden_objects();
        if faults.is_empty() && hidden == 0 && control.kept.is_empty() && !unnamed {
            return Ok(());
        }
        // Something is left that can't be named or destroyed: the whole function begins anew.
        tracing::warn!("an mlx5 function is restarted, for it does not let go of everything");
        match self.restart_function(control) {
            Ok(()) => Ok(()),
            Err(error) => {
                let error = std::error::Error::source(&error)
                    .map_or(error.to_string(), |source| format!("{error}: {source}"));
                faults.add_host(format!("the function can't be restarted: {error}"));
                if self.firmware.is_gone() {
                    return Err(VdpaError::Gone { action: ACTION });
                }
                Err(faults.into_error(ACTION))
            }
        }
    }

    /// Everything that the VMM said goes.
    fn forget_guest(&self, control: &mut Control) {
        self.settle(control);
        control.outcome = None;
        install(control, None);
        control.queues.features = 0;
        control.queues.used = control.queues.list.len();
        control.has_features = false;
        for queue in &mut control.queues.list {
            queue.config = None;
            queue.at = None;
        }
        control.change(DeviceEvent::Reset);
    }

    /// Takes the function down and brings it up again: what was made on it is gone.
    fn restart_function(&self, control: &mut Control) -> Result<(), BringUpError> {
        let is_down = self.firmware.tear_down(&[]);
        if is_down {
            self.forget_function(control);
        }
        let setup = self.firmware.restart(is_down)?;
        // It has begun anew: if not before, then now there is nothing of the old any more.
        self.forget_function(control);
        control.keys = super::new_keys(&setup, self.firmware.options());
        control.queues.common.pd = setup.pd;
        control.setup = setup;
        Ok(())
    }

    /// The function is down: nothing that was made on it exists, and it reaches no memory.
    fn forget_function(&self, control: &mut Control) {
        control.keys.registry_mut().forget_all();
        let queues = &mut control.queues;
        queues.undestroyed.clear();
        queues.pending_changes.clear();
        queues.has_wrong_numbers = false;
        queues.table = None;
        queues.scratch = None;
        queues.log = None;
        for queue in &mut queues.list {
            queue.object = None;
            queue.counters = None;
        }
        queues.forget_retired();
        control.scratch = None;
        control.logs = super::dirty::DirtyLogs::default();
        control.kept.clear();
    }

    /// Ends all queues: the table first, which names them.
    pub(super) fn end_queues(&self, control: &mut Control, faults: &mut Faults) {
        if let Err(error) = control.queues.set_table(&self.firmware, &[]) {
            faults.add_general(error);
        }
        let all: Vec<usize> = (0..control.queues.list.len()).collect();
        faults.extend(control.queues.destroy(&self.firmware, &all, &self.guest));
    }

    /// A change of a virtqueue was answered late: one that should run may stand by now.
    pub(super) fn service_late_changes(&self, control: &mut Control) {
        if !self.firmware.take_late_changes() || control.state != DeviceState::Running {
            return;
        }
        let active = control.queues.active();
        let faults = control.queues.wake_up(&self.firmware, &active, &self.guest);
        if !faults.is_empty() {
            let error = faults.into_error("start queues again");
            tracing::warn!(%error, "after a late answer");
        }
    }
}

impl Drop for Mlx5Device {
    fn drop(&mut self) {
        let mut control = self.lock();
        let control = &mut *control;
        super::guest::Guest::disconnect(&*self.vectors);
        self.forget_guest(control);
        let mut faults = Faults::default();
        self.end_queues(control, &mut faults);
        self.drop_logs(control);
        control.queues.drop_counters(&self.firmware);
        control.queues.drop_retired(&self.firmware);
        control.queues.scratch = None;
        if let Some(scratch) = control.scratch.take() {
            control.kept.extend(scratch.destroy(&self.firmware));
        }
        self.drain_keys(control);
        if self.firmware.tear_down(&objects_of(&control.setup)) {
            self.forget_function(control);
            return;
        }
        // Memory that is lost until the process ends is better than a device that writes into what
        // someone else has by then.
        tracing::warn!("an mlx5 device does not go; its memory stays");
        std::mem::forget(Arc::clone(&self.firmware));
        std::mem::forget(std::mem::take(&mut control.queues.undestroyed));
        std::mem::forget(std::mem::take(&mut control.kept));
    }
}
