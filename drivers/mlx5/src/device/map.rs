//! The map of guest memory: keys are built, queues get them, old keys go.

use super::{Control, Mlx5Device};
use crate::memory::{Issued, MapRef};
use crate::queues::{DeviceState, Faults, Starting, Target};
use martlet_units::Instant;
use martlet_vdpa::{MapRun, VdpaError};

const ACTION: &str = "map memory";

impl Mlx5Device {
    pub(super) fn change_map(
        &self,
        control: &mut Control,
        runs: &[MapRun],
    ) -> Result<(), VdpaError> {
        control.check_settled(ACTION)?;
        let map = self.build_map(control, runs)?;
        if control.queues.map == map {
            return Ok(());
        }
        if map.is_none() && control.state == DeviceState::Running {
            let reason = "frames flow, and the new map is empty".to_owned();
            return Err(VdpaError::Invalid { action: ACTION, reason });
        }
        self.grow_log(control, end_of(runs))?;
        if control.state == DeviceState::Running {
            self.switch_map(control, map)?;
        } else {
            // Queues that stand get the new key with their start; until then they hold the old.
            install(control, map);
        }
        self.delete_if_at_once(control);
        Ok(())
    }

    /// Moves all queues from one key to the next. On an error they have the old one.
    fn switch_map(&self, control: &mut Control, map: Option<MapRef>) -> Result<(), VdpaError> {
        let active = control.queues.active();
        let mut faults = control.queues.stop(&self.firmware, &active, &self.guest);
        if !faults.is_empty() {
            faults.extend(self.start_again(control, &active));
            return Err(faults.into_error(ACTION));
        }
        let old = control.queues.map.clone();
        install(control, map);
        let mut faults = self.start_again(control, &active);
        if faults.is_empty() {
            return Ok(());
        }
        // Some don't run with the new key: all go back to the old one.
        tracing::warn!("queues refused a new memory key");
        control.queues.stop(&self.firmware, &active, &self.guest);
        install(control, old);
        let failed_again = self.start_again(control, &active);
        faults.forget_standing();
        faults.extend(failed_again);
        Err(faults.into_error(ACTION))
    }

    fn start_again(&self, control: &mut Control, which: &[usize]) -> Faults {
        let starting = Starting::begin(which, Target::Running);
        starting.run(&self.firmware, &mut control.queues, &self.guest)
    }

    /// Builds the keys of a map. On an error nothing is left of it.
    fn build_map(
        &self,
        control: &mut Control,
        runs: &[MapRun],
    ) -> Result<Option<MapRef>, VdpaError> {
        control.keys.registry_mut().begin_set_map(runs)?;
        loop {
            if let Some(outcome) = control.keys.registry_mut().poll_set_map() {
                return outcome;
            }
            self.drive_keys(control, true);
        }
    }

    /// Moves commands about keys on by a step; with `wait` waits for the device if there is
    /// nothing to issue.
    fn drive_keys(&self, control: &mut Control, wait: bool) -> (Issued, Option<Instant>) {
        let keys = &mut control.keys;
        // Memory is pinned without the firmware's lock.
        keys.prepare(self.firmware.now(), self.firmware.dma());
        let ((issued, timeout), until) = self.firmware.drive(|now, queue, dma, late| {
            late.retain(|late| !keys.on_late(late));
            let issued = keys.poll(now, queue, dma);
            (issued, keys.poll_timeout(now))
        });
        let until = until.into_iter().chain(timeout).min();
        if issued == Issued::Nothing && wait {
            self.firmware.wait_until(until);
        }
        (issued, until)
    }

    /// Without deferred deletion whoever lets a map go sees to its end, unless the device takes
    /// too long: then the service goes on with it.
    pub(super) fn delete_if_at_once(&self, control: &mut Control) {
        let end = self.firmware.now().after(self.firmware.options().deadlines.setup);
        while control.keys.registry_mut().must_delete(self.firmware.now()) {
            if self.firmware.now() >= end {
                warn_of_backlog(control);
                return;
            }
            self.drive_keys(control, true);
        }
        while control.keys.registry_mut().release_one() {}
    }

    /// A slice of deletion, without waiting: when to go on.
    pub(super) fn service_keys(&self, control: &mut Control) -> Option<Instant> {
        while self.drive_keys(control, false).0 == Issued::One {}
        let (_, until) = self.drive_keys(control, false);
        // One at a time: unpinning takes long.
        control.keys.registry_mut().release_one();
        until
    }

    /// Destroys all keys that nobody uses, and waits for it, for as long as a command of the setup
    /// may take. What is left then stays pinned and in the backlog: the service goes on with it.
    pub(super) fn drain_keys(&self, control: &mut Control) {
        let gone = VdpaError::Gone { action: ACTION };
        control.keys.registry_mut().begin_drain(gone);
        let end = self.firmware.now().after(self.firmware.options().deadlines.setup);
        loop {
            let now = self.firmware.now();
            if control.keys.registry_mut().poll_drained(now) {
                return;
            }
            if now >= end {
                warn_of_backlog(control);
                control.keys.registry_mut().end_drain();
                return;
            }
            self.drive_keys(control, true);
        }
    }
}

fn warn_of_backlog(control: &Control) {
    let counters = control.keys.registry().counters();
    tracing::warn!(
        keys = counters.backlog_keys,
        bytes = counters.pinned_bytes,
        "memory keys were not destroyed in time: their memory stays pinned"
    );
}

/// Makes a map the current one, for keys and queues.
pub(super) fn install(control: &mut Control, map: Option<MapRef>) {
    control.queues.map.clone_from(&map);
    control.keys.registry_mut().install(map);
}

/// Where a map ends.
pub(super) fn end_of(runs: &[MapRun]) -> u64 {
    runs.iter().map(|run| run.iova.0.saturating_add(run.memory.bytes())).max().unwrap_or(0)
}
