//! The map of guest memory: keys are built, queues get them, old keys go.

use super::{Control, Mlx5Device};
use crate::memory::MapRef;
use crate::queues::DeviceState;
use martlet_vdpa::{MapRun, VdpaError};

const ACTION: &str = "map memory";

impl Mlx5Device {
    pub(super) fn change_map(
        &self,
        control: &mut Control,
        runs: &[MapRun],
    ) -> Result<(), VdpaError> {
        control.check_settled(ACTION)?;
        if matches!(control.state, DeviceState::Idle | DeviceState::Prepared) {
            self.ensure_answers(control, ACTION)?;
        }
        let map = control.maps.build(&self.firmware, runs)?;
        if control.queues.map == map {
            return Ok(());
        }
        if map.is_none() && control.state == DeviceState::Running {
            let reason = "frames flow, and the new map is empty".to_owned();
            return Err(VdpaError::Invalid { action: ACTION, reason });
        }
        self.grow_log(control, end_of(runs))?;
        if control.state == DeviceState::Running {
            self.switch_map(control, map, runs)?;
        } else {
            // Queues that stand get the new key with their start; until then they hold the old.
            install(control, map, runs);
        }
        if control.maps.deletes_at_once() {
            control.maps.destroy_unused(&self.firmware);
        }
        Ok(())
    }

    /// Moves all queues from one key to the next. On an error the old map is in force.
    fn switch_map(
        &self,
        control: &mut Control,
        map: Option<MapRef>,
        runs: &[MapRun],
    ) -> Result<(), VdpaError> {
        let active = control.queues.active();
        let mut faults = control.queues.stop(&self.firmware, &active, &self.guest);
        if !faults.is_empty() {
            faults.extend(self.start_all(control, &active));
            return Err(faults.into_error(ACTION));
        }
        let old = (control.queues.map.clone(), control.queues.runs.clone());
        install(control, map, runs);
        let faults = self.start_all(control, &active);
        if faults.is_empty() {
            return Ok(());
        }
        // Some don't run with the new key: the function begins anew with the old one.
        install(control, old.0, &old.1);
        Err(faults.into_error(ACTION))
    }
}

/// Makes a map the current one.
pub(super) fn install(control: &mut Control, map: Option<MapRef>, runs: &[MapRun]) {
    control.queues.map = map;
    control.queues.runs = runs.to_vec();
}

/// Where a map ends.
pub(super) fn end_of(runs: &[MapRun]) -> u64 {
    runs.iter().map(|run| run.iova.0.saturating_add(run.memory.bytes())).max().unwrap_or(0)
}
