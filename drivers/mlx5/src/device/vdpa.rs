//! The device as the VMM's trait has it.

use super::{Mlx5Device, identity};
use crate::options::IndexReads;
use crate::queues::{DeviceEvent, DeviceState};
use martlet_device_io::Notify;
use martlet_units::Instant;
use martlet_vdpa::virtio::{feature, split};
use martlet_vdpa::{
    Counters, Identity, MapRun, QueueConfig, QueueIndex, QueueState, VdpaDevice, VdpaError,
};
use std::sync::TryLockError;
use std::time::Duration;

/// How often a device with something lazy to do wants to be serviced.
const LAZY_EVERY: Duration = Duration::from_millis(100);

fn invalid(action: &'static str, reason: impl Into<String>) -> VdpaError {
    VdpaError::Invalid { action, reason: reason.into() }
}

impl VdpaDevice for Mlx5Device {
    fn identity(&self) -> &Identity {
        &self.identity
    }

    fn read_config(&self, offset: u32, into: &mut [u8]) {
        self.guest.read_config(offset, into);
    }

    /// All fields of a network card are read-only.
    fn write_config(&self, _: u32, _: &[u8]) {}

    fn on_config_change(&self, notify: Notify) {
        self.guest.on_config_change(notify);
    }

    fn set_features(&self, features: u64) -> Result<(), VdpaError> {
        const ACTION: &str = "set features";
        let mut control = self.lock();
        if !matches!(control.state, DeviceState::Idle | DeviceState::Prepared) {
            return Err(control.wrong_state(ACTION));
        }
        let unknown = features & !self.identity.features;
        if unknown != 0 {
            return Err(invalid(ACTION, format!("{unknown:#x} were not offered")));
        }
        if features & feature::VERSION_1 == 0 {
            return Err(invalid(ACTION, "VERSION_1 is missing"));
        }
        control.queues.features = identity::queue_features(features);
        control.has_features = true;
        Ok(())
    }

    fn set_map(&self, runs: &[MapRun]) -> Result<(), VdpaError> {
        self.change_map(&mut self.lock(), runs)
    }

    fn set_queue(&self, queue: QueueIndex, config: QueueConfig) -> Result<(), VdpaError> {
        const ACTION: &str = "set a queue";
        let mut control = self.lock();
        if !matches!(control.state, DeviceState::Idle | DeviceState::Prepared) {
            return Err(control.wrong_state(ACTION));
        }
        if !config.size.is_power_of_two() || config.size > self.identity.queue_size_max {
            return Err(invalid(ACTION, format!("its size is {}", config.size)));
        }
        // virtio 1.3, 2.7: 16 bytes, 2 bytes, 4 bytes.
        let places = [(config.descriptors.0, 16), (config.driver.0, 2), (config.device.0, 4)];
        if let Some((at, align)) = places.into_iter().find(|(at, align)| at % align != 0) {
            return Err(invalid(ACTION, format!("{at:#x} is no multiple of {align}")));
        }
        // The rings end inside of the address space.
        let longest = u64::from(config.size) * split::DESCRIPTOR_BYTES;
        if places.iter().any(|(at, _)| at.checked_add(longest).is_none()) {
            return Err(invalid(ACTION, "it is beyond all memory"));
        }
        let list = &mut control.queues.list;
        let count = list.len();
        let entry = list.get_mut(usize::from(queue.0));
        let entry = entry.ok_or_else(|| invalid(ACTION, format!("{} of {count}", queue.0)))?;
        entry.config = Some(config);
        entry.at.get_or_insert_default();
        Ok(())
    }

    fn on_queue_used(&self, queue: QueueIndex, notify: Notify) {
        self.guest.on_used(usize::from(queue.0), notify);
    }

    fn set_queue_state(&self, queue: QueueIndex, state: QueueState) -> Result<(), VdpaError> {
        const ACTION: &str = "set a queue's state";
        let mut control = self.lock();
        control.check_settled(ACTION)?;
        if control.state == DeviceState::Running {
            return Err(control.wrong_state(ACTION));
        }
        let entry = control.queues.list.get_mut(usize::from(queue.0));
        let entry =
            entry.ok_or_else(|| invalid(ACTION, format!("there is no queue {}", queue.0)))?;
        entry.at = Some(state);
        Ok(())
    }

    fn queue_state(&self, queue: QueueIndex) -> Result<QueueState, VdpaError> {
        const ACTION: &str = "read a queue's state";
        let mut control = self.lock();
        control.check_settled(ACTION)?;
        if control.state == DeviceState::Running {
            return Err(control.wrong_state(ACTION));
        }
        let index = usize::from(queue.0);
        if self.firmware.options().index_reads == IndexReads::Fresh
            && control.state == DeviceState::Suspended
        {
            control.queues.read_again(&self.firmware, index, ACTION)?;
        }
        control
            .queues
            .at(index)
            .ok_or_else(|| invalid(ACTION, format!("queue {} has none", queue.0)))
    }

    fn set_queue_pairs(&self, pairs: u16) -> Result<(), VdpaError> {
        self.change_pairs(&mut self.lock(), pairs)
    }

    fn prepare(&self) -> Result<(), VdpaError> {
        const ACTION: &str = "prepare";
        let mut control = self.lock();
        control.check(DeviceEvent::Prepare, ACTION)?;
        self.ensure_answers(&mut control, ACTION)?;
        if control.queues.map.is_none() && !control.queues.active().is_empty() {
            return Err(invalid(ACTION, "it has no memory map"));
        }
        self.ensure_scratch(&mut control)?;
        let style = self.firmware.options().prepare;
        let faults = control.queues.prepare(&self.firmware, &self.guest, style);
        if !faults.is_empty() {
            self.firmware.taint();
            return Err(faults.into_error(ACTION));
        }
        control.queues.drop_retired(&self.firmware);
        control.change(DeviceEvent::Prepare);
        Ok(())
    }

    fn start(&self) -> Result<(), VdpaError> {
        const ACTION: &str = "start";
        let mut control = self.lock();
        control.check(DeviceEvent::Start, ACTION)?;
        self.ensure_answers(&mut control, ACTION)?;
        if control.queues.map.is_none() || !control.has_features {
            return Err(invalid(ACTION, "it has no memory map, or no features"));
        }
        self.guest.restart();
        let active = control.queues.active();
        let faults = self.start_all(&mut control, &active);
        if !faults.is_empty() {
            // All or nothing: this is not a switchover. Those that ran have told in their rings how
            // far they came.
            active.iter().for_each(|index| control.queues.list[*index].at = None);
            return Err(faults.into_error(ACTION));
        }
        control.queues.drop_retired(&self.firmware);
        control.change(DeviceEvent::Start);
        Ok(())
    }

    fn kick(&self, queue: QueueIndex) {
        self.guest.kick(usize::from(queue.0));
    }

    fn begin_suspend(&self) -> Result<(), VdpaError> {
        self.begin_suspending(&mut self.lock())
    }

    fn poll_suspend(&self) -> Option<Result<(), VdpaError>> {
        self.poll_suspending(&mut self.lock())
    }

    fn begin_resume(&self) -> Result<(), VdpaError> {
        self.begin_resuming(&mut self.lock())
    }

    fn poll_resume(&self) -> Option<Result<(), VdpaError>> {
        self.poll_resuming(&mut self.lock())
    }

    fn set_dirty_log(&self, on: bool) -> Result<(), VdpaError> {
        self.set_log(&mut self.lock(), on)
    }

    fn take_dirty(&self, mark: &mut dyn FnMut(u64, u64)) {
        self.take_log(&mut self.lock(), mark);
    }

    fn reset(&self) -> Result<(), VdpaError> {
        self.reset_all(&mut self.lock())
    }

    fn service(&self) -> Option<Instant> {
        let mut until = self.firmware.service();
        let mut control = match self.control.try_lock() {
            Ok(control) => control,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            // Who holds it moves everything on.
            Err(TryLockError::WouldBlock) => return Some(self.firmware.now().after(LAZY_EVERY)),
        };
        if control.operation.is_some() {
            return until;
        }
        if let Some(later) = self.service_recovery(&mut control) {
            return until.into_iter().chain([later]).min();
        }
        self.service_link(&mut control);
        // To unpin a piece takes long. A guest that leaves or arrives shall not wait for it.
        if control.is_in_switchover() {
            let later = self.firmware.now().after(LAZY_EVERY);
            return until.into_iter().chain([later]).min();
        }
        until = until.into_iter().chain(control.maps.service(&self.firmware)).min();
        control.queues.drop_retired(&self.firmware);
        until
    }

    /// By interrupts for used buffers: what hardware tells. Guests that poll ask for none.
    fn frame_times(&self) -> (Option<Instant>, Option<Instant>) {
        let (first, last) = self.guest.frames_ns();
        (first.map(Instant), last.map(Instant))
    }

    /// By the queues' own counters, one query each. What was dropped the device does not tell.
    fn counters(&self) -> Counters {
        let control = self.lock();
        let mut counters = Counters::default();
        for (index, read) in control.queues.read_counters(&self.firmware) {
            let frames = read.completed_desc.get();
            if index % 2 == 0 {
                counters.frames_received += frames;
            } else {
                counters.frames_sent += frames;
            }
            counters.access_errors += u64::from(read.invalid_buffer.get());
        }
        (counters.first_frame_ns, counters.last_frame_ns) = self.guest.frames_ns();
        counters
    }
}
