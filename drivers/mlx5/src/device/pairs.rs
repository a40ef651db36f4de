//! The number of queue pairs, as the guest changes it by its control queue.
//!
//! Fewer: the table of receive queues forgets them first, then they stop, and keep what they have.
//! More: they start, and then the table names them. Frames for pairs that remain go on.

use super::{Control, Mlx5Device};
use crate::queues::{DeviceState, Faults, Starting, Target};
use martlet_vdpa::VdpaError;

const ACTION: &str = "change the number of queue pairs";

impl Mlx5Device {
    pub(super) fn change_pairs(&self, control: &mut Control, pairs: u16) -> Result<(), VdpaError> {
        control.check_settled(ACTION)?;
        let used = usize::from(pairs) * 2;
        if pairs == 0 || used > control.queues.list.len() {
            let reason = format!("{pairs} of {}", self.identity.queues / 2);
            return Err(VdpaError::Invalid { action: ACTION, reason });
        }
        let before = control.queues.used;
        if control.state != DeviceState::Running || used == before {
            control.queues.used = used;
            return Ok(());
        }
        if used < before {
            self.shrink(control, before, used)
        } else {
            self.grow(control, before, used)
        }
    }

    fn shrink(&self, control: &mut Control, before: usize, used: usize) -> Result<(), VdpaError> {
        control.queues.used = used;
        let stay = control.queues.receivers(&control.queues.active());
        if let Err(error) = control.queues.set_table(&self.firmware, &stay) {
            // Frames may still be steered to those that would stop: nothing changes.
            control.queues.used = before;
            return Err(crate::queues::vdpa_error(ACTION, &error));
        }
        let tail: Vec<usize> = (used..before).collect();
        let tail = control.queues.with_object(&tail);
        let mut faults = control.queues.stop(&self.firmware, &tail, &self.guest);
        if !faults.is_empty() {
            // As before: where a queue is that was not stopped in order can't be made up.
            control.queues.used = before;
            let starting = Starting::begin(&control.queues.active(), Target::Running);
            faults.extend(starting.run(&self.firmware, &mut control.queues, &self.guest));
            return Err(faults.into_error(ACTION));
        }
        Ok(())
    }

    /// Ends those of these queues that still run.
    fn end_running(&self, control: &mut Control, which: &[usize]) -> Faults {
        let runs =
            |index: &usize| control.queues.object(*index).is_some_and(|object| !object.stands());
        let running: Vec<usize> = which.iter().copied().filter(runs).collect();
        for index in &running {
            control.queues.list[*index].at = None;
        }
        // Where they were is lost with them: they are out of order until a reset.
        control.queues.destroy(&self.firmware, &running, &self.guest)
    }

    fn grow(&self, control: &mut Control, before: usize, used: usize) -> Result<(), VdpaError> {
        control.queues.used = used;
        let added: Vec<usize> =
            control.queues.active().into_iter().filter(|index| *index >= before).collect();
        let starting = Starting::begin(&added, Target::Running);
        let faults = starting.run(&self.firmware, &mut control.queues, &self.guest);
        if faults.is_empty() {
            return Ok(());
        }
        // As before: the table first, then what was added.
        control.queues.used = before;
        let stay = control.queues.receivers(&control.queues.active());
        let table = control.queues.set_table(&self.firmware, &stay);
        let mut faults = faults;
        faults.forget_standing();
        if let Err(error) = table {
            faults.add_general(error);
        }
        let stopped = control.queues.stop(&self.firmware, &added, &self.guest);
        if !stopped.is_empty() {
            faults.extend(self.end_running(control, &added));
        }
        Err(faults.into_error(ACTION))
    }
}
