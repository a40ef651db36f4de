//! Back to the begin, and the end.

use super::map::install;
use super::{Control, Mlx5Device};
use crate::command::CommandError;
use crate::queues::{DeviceEvent, DeviceState, Faults};
use martlet_vdpa::VdpaError;

const ACTION: &str = "reset";

impl Mlx5Device {
    pub(super) fn reset_all(&self, control: &mut Control) -> Result<(), VdpaError> {
        self.settle(control);
        let mut faults = Faults::default();
        self.end_queues(control, &mut faults);
        if control.queues.drop_orphans(&self.firmware) > 0 {
            let opcode = martlet_mlx5_abi::Opcode::DESTROY_GENERAL_OBJECT;
            let what = "virtqueues that can't be destroyed keep their memory";
            faults.add_general(CommandError::Nonsense { opcode, what });
        }
        self.drop_logs(control);
        install(control, None);
        control.queues.features = 0;
        control.queues.used = control.queues.list.len();
        control.has_features = false;
        for queue in &mut control.queues.list {
            queue.config = None;
            queue.at = None;
        }
        control.change(DeviceEvent::Reset);
        self.delete_if_at_once(control);
        control.queues.drop_retired(&self.firmware);
        if faults.is_empty() { Ok(()) } else { Err(faults.into_error(ACTION)) }
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
        if let Err(error) = self.reset_all(control) {
            tracing::warn!(%error, "an mlx5 device goes");
        }
        control.queues.drop_counters(&self.firmware);
        control.queues.scratch = None;
        if let Some(scratch) = control.scratch.take() {
            // An error has been told; the memory stays then.
            let _ = scratch.destroy(&self.firmware);
        }
        self.drain_keys(control);
        if self.firmware.tear_down(&self.setup) {
            // Surely nothing reaches memory any more.
            control.keys.registry_mut().forget_all();
            control.queues.orphans.clear();
        }
    }
}
