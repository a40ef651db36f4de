//! The register file as the guest reads and writes it (virtio 1.3, 4.2.2 and 4.2.3).

use super::backing::Backing;
use super::control::{Command, Control};
use super::group::Standing;
use super::nic::{Nic, State};
use super::queue::{Half, Queue};
use super::registers::{self as at, status};
use martlet_vdpa::QueueIndex;
use martlet_vdpa::virtio::{feature, net_config};
use std::sync::atomic::Ordering;

/// What registers read as that are not there.
const NOTHING: u32 = 0;

impl Nic {
    /// The guest reads `data` at an offset of the card's page.
    pub(super) fn read(&self, offset: u64, data: &mut [u8]) {
        data.fill(0);
        if let Some(config) = offset.checked_sub(at::CONFIG) {
            self.read_config(config, data);
        } else if data.len() == 4 && offset.is_multiple_of(4) {
            data.copy_from_slice(&self.read_register(offset).to_le_bytes());
        }
    }

    /// The configuration space is the device's, but for the number of pairs: the guest keeps the
    /// one that it began with.
    fn read_config(&self, offset: u64, data: &mut [u8]) {
        let Ok(offset) = u32::try_from(offset) else { return };
        self.device.read_config(offset, data);
        let pairs = self.pairs_max().to_le_bytes();
        let first = u32::try_from(net_config::MAX_PAIRS).expect("a small constant");
        for (place, byte) in (first..).zip(pairs) {
            let index = place.checked_sub(offset).and_then(|index| usize::try_from(index).ok());
            if let Some(to) = index.and_then(|index| data.get_mut(index)) {
                *to = byte;
            }
        }
    }

    fn read_register(&self, offset: u64) -> u32 {
        match offset {
            at::MAGIC_VALUE => at::MAGIC,
            at::VERSION => at::NOT_LEGACY,
            at::DEVICE_ID => martlet_vdpa::virtio::DEVICE_NET,
            at::VENDOR_ID => at::VENDOR,
            at::INTERRUPT_STATUS => self.interrupts.status(),
            at::CONFIG_GENERATION => self.interrupts.generation(),
            _ if at::SHARED_MEMORY.contains(&offset) => u32::MAX,
            _ => self.lock().read_register(offset, self.kind.features, self.kind.queue_size_max),
        }
    }

    /// The guest writes `data` at an offset of the card's page.
    pub(super) fn write(&self, offset: u64, data: &[u8], standing: &Standing) {
        // The configuration space of a network card is read only for a driver without
        // VIRTIO_NET_F_CTRL_MAC_ADDR's command (5.1.4.1).
        let Ok(bytes) = <[u8; 4]>::try_from(data) else { return };
        let value = u32::from_le_bytes(bytes);
        match offset {
            at::QUEUE_NOTIFY => self.notified(value, standing),
            at::INTERRUPT_ACK => self.interrupts.acknowledge(value),
            at::STATUS => self.write_status(value, standing),
            at::QUEUE_READY => self.write_ready(value),
            _ => self.lock().write_register(offset, value),
        }
    }

    fn notified(&self, number: u32, standing: &Standing) {
        if number < self.kickable.load(Ordering::Acquire) {
            if let Ok(index) = u16::try_from(number) {
                self.device.kick(QueueIndex(index));
            }
            return;
        }
        let mut state = self.lock();
        if state.place(number).is_some_and(|place| place + 1 == state.queues.len()) {
            self.serve_control(&mut state, standing);
        }
    }

    fn write_ready(&self, value: u32) {
        let mut state = self.lock();
        // Queues are fixed once the driver is ready: there is no VIRTIO_F_RING_RESET (2.6).
        if state.is_running() || state.status & status::NEEDS_RESET != 0 {
            return;
        }
        let Some(place) = state.place(state.queue_select) else { return };
        let Some(mut queue) = state.queues.get(place).copied() else { return };
        queue.ready = value & 1 != 0;
        if queue.ready {
            let checked = queue.check(self.kind.queue_size_max, self.memory.ram());
            if let Err(why) = checked {
                let why = format!("queue {}: {why}", state.queue_select);
                self.break_down(&mut state, &why);
                return;
            }
        }
        if let Some(to) = state.queues.get_mut(place) {
            *to = queue;
        }
    }

    fn write_status(&self, value: u32, standing: &Standing) {
        let mut state = self.lock();
        if value == 0 {
            self.reset(&mut state, standing);
            return;
        }
        // A driver only ever adds bits (2.1.1).
        let added = value & status::OF_DRIVER & !state.status;
        if added & status::FEATURES_OK != 0 && self.accepts(&state) {
            state.status |= status::FEATURES_OK;
        }
        state.status |= added & !(status::FEATURES_OK | status::DRIVER_OK);
        if added & status::DRIVER_OK != 0 && state.status & status::NEEDS_RESET == 0 {
            if state.status & status::FEATURES_OK == 0 {
                self.break_down(&mut state, "its driver is ready without its features");
                return;
            }
            state.status |= status::DRIVER_OK;
            self.driver_is_ready(&mut state, standing);
        }
    }

    /// Whether the features that the driver chose go together and were offered.
    pub(super) fn accepts(&self, state: &State) -> bool {
        let chosen = state.driver_features;
        let has = |feature| chosen & feature != 0;
        chosen & !self.kind.features == 0
            && has(feature::VERSION_1)
            && (!has(feature::NET_MQ) || has(feature::NET_CTRL_VQ))
    }

    /// Serves what is in the control queue, unless the devices stand: then it is looked at after
    /// the resume, here or at the destination.
    pub(super) fn serve_control(&self, state: &mut State, standing: &Standing) {
        let works = state.backing == Backing::Running && state.status & status::NEEDS_RESET == 0;
        if !works || standing.is_so() {
            return;
        }
        let Some(queue) = state.queues.last().filter(|queue| queue.ready).copied() else { return };
        let mut indices = state.control;
        let served = queue.check(self.kind.queue_size_max, self.memory.ram()).and_then(|queue| {
            let mut control = Control { memory: &self.memory, queue, indices: &mut indices };
            control.serve(|Command::SetPairs(pairs)| self.set_pairs(state, pairs))
        });
        state.control = indices;
        match served {
            Ok(true) => self.interrupts.ring_queue(),
            Ok(false) => {}
            Err(why) => self.break_down(state, &format!("control queue: {why}")),
        }
    }

    fn set_pairs(&self, state: &mut State, pairs: u16) -> bool {
        if !state.has_several_pairs() || pairs == 0 || pairs > self.pairs_max() {
            return false;
        }
        match self.device.set_queue_pairs(pairs) {
            Ok(()) => {
                state.pairs = pairs;
                true
            }
            Err(error) => {
                self.complain(&format!("{pairs} queue pairs were not set: {error}"));
                false
            }
        }
    }
}

impl State {
    fn selected(&self) -> Option<Queue> {
        self.queues.get(self.place(self.queue_select)?).copied()
    }

    fn read_register(&self, offset: u64, offered: u64, queue_size_max: u16) -> u32 {
        match offset {
            at::DEVICE_FEATURES => half(offered, self.device_features_select),
            at::QUEUE_SIZE_MAX => self.selected().map_or(NOTHING, |_| u32::from(queue_size_max)),
            at::QUEUE_READY => self.selected().map_or(NOTHING, |queue| u32::from(queue.ready)),
            at::STATUS => self.status,
            _ => NOTHING,
        }
    }

    fn write_register(&mut self, offset: u64, value: u32) {
        match offset {
            at::DEVICE_FEATURES_SELECT => self.device_features_select = value,
            at::DRIVER_FEATURES_SELECT => self.driver_features_select = value,
            at::DRIVER_FEATURES if self.status & status::FEATURES_OK == 0 => {
                match self.driver_features_select {
                    0 => Half::Low.set(&mut self.driver_features, value),
                    1 => Half::High.set(&mut self.driver_features, value),
                    _ => {}
                }
            }
            at::QUEUE_SELECT => self.queue_select = value,
            _ => self.write_queue(offset, value),
        }
    }

    fn write_queue(&mut self, offset: u64, value: u32) {
        let place = self.place(self.queue_select);
        let queue = place.and_then(|place| self.queues.get_mut(place));
        // A queue that is ready stays as it is (4.2.2.2).
        let Some(queue) = queue.filter(|queue| !queue.ready) else { return };
        match offset {
            at::QUEUE_SIZE => queue.size = value,
            at::QUEUE_DESCRIPTORS_LOW => Half::Low.set(&mut queue.descriptors, value),
            at::QUEUE_DESCRIPTORS_HIGH => Half::High.set(&mut queue.descriptors, value),
            at::QUEUE_DRIVER_LOW => Half::Low.set(&mut queue.driver, value),
            at::QUEUE_DRIVER_HIGH => Half::High.set(&mut queue.driver, value),
            at::QUEUE_DEVICE_LOW => Half::Low.set(&mut queue.device, value),
            at::QUEUE_DEVICE_HIGH => Half::High.set(&mut queue.device, value),
            _ => {}
        }
    }
}

fn half(features: u64, select: u32) -> u32 {
    let [a, b, c, d, e, f, g, h] = features.to_le_bytes();
    match select {
        0 => u32::from_le_bytes([a, b, c, d]),
        1 => u32::from_le_bytes([e, f, g, h]),
        _ => NOTHING,
    }
}
