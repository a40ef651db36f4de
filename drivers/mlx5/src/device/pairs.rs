//! The number of queue pairs, as the guest changes it by its control queue.
//!
//! Fewer: the table of receive queues forgets them first, then they stop, and keep what they have.
//! More: they start, and then the table names them. Frames for pairs that remain go on.

use super::{Control, Mlx5Device};
use crate::queues::{DeviceState, Starting, Target};
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
            control.queues.used = before;
            let active = control.queues.active();
            faults.extend(self.start_all(control, &active));
            return Err(faults.into_error(ACTION));
        }
        Ok(())
    }

    fn grow(&self, control: &mut Control, before: usize, used: usize) -> Result<(), VdpaError> {
        control.queues.used = used;
        let added: Vec<usize> =
            control.queues.active().into_iter().filter(|index| *index >= before).collect();
        let starting = Starting::begin(&added, Target::Running);
        let mut faults = starting.run(&self.firmware, &mut control.queues, &self.guest);
        if faults.is_empty() {
            return Ok(());
        }
        // As before: the table first, then what was added. Where it was its rings tell.
        control.queues.used = before;
        let stay = control.queues.receivers(&control.queues.active());
        if let Err(error) = control.queues.set_table(&self.firmware, &stay) {
            faults.add_general(error);
        }
        added.iter().for_each(|index| control.queues.list[*index].at = None);
        faults.extend(control.queues.destroy(&self.firmware, &added, &self.guest));
        Err(faults.into_error(ACTION))
    }
}
