//! A device: its registers, and its turns.

use crate::config::ModelConfig;
use crate::faults::Faults;
use crate::firmware::{self, Firmware, LOG_COMMAND_STRIDE, UARS_MAX, VIRTQ_DOORBELL_OFFSET};
use crate::nic::{Nic, NicConfig};
use crate::num::{high32, low32};
use crate::stats::Stats;
use martlet_device_io::{BusMemory, Notify, Registers, Vectors};
use martlet_mlx5_abi::init_segment::{
    self, CMDIF_REV_FW_SUB, CMDQ_ADDR_HIGH, CMDQ_ADDR_LOW, COMMAND_DOORBELL, COMMAND_INTERFACE,
    CommandQueueShape, FW_REV, INITIALIZING, INITIALIZING_BIT, UAR_EQ_ARM, UAR_EQ_UPDATE,
    UAR_PAGE_BYTES,
};
use martlet_soft_bus::{SoftClock, Turn};
use martlet_units::Instant;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Firmware 22.42.1000: the first ConnectX-6 Dx firmware that takes the commands of a batch at once
/// without hanging (mail to "vdpa/mlx5: Parallelize device suspend/resume").
const FIRMWARE: (u16, u16, u16) = (22, 42, 1000);

/// Virtqueues that a model can have.
const QUEUES_MAX: u16 = 1024;

/// Steps of the data path in one turn, where no thread makes them: guests may go on for ever.
const STEPS_MAX: u32 = 10_000;

/// As the moment of the next event: there is none.
const NOTHING_DUE: u64 = u64::MAX;

/// A software mlx5.
///
/// It is driven by turns: [`Turn`] for a stage of `soft_bus`, where its driver waits. In virtual
/// time a turn also moves frames; in real time a [`Hardware`](crate::Hardware) thread does, or if
/// there is none, turns do as well.
pub struct Model {
    clock: Arc<SoftClock>,
    nic: Arc<Nic>,
    firmware: Mutex<Firmware>,
    next_due: AtomicU64,
    shape: CommandQueueShape,
    ready_at: Instant,
}

impl Model {
    /// A device on a bus, with power on.
    pub fn new(config: ModelConfig, bus: Arc<dyn BusMemory>, clock: &Arc<SoftClock>) -> Arc<Model> {
        assert!((1..=QUEUES_MAX).contains(&config.queues), "a number of queues that can be had");
        assert!(config.queue_size_max.is_power_of_two(), "sizes are powers of two");
        assert!(config.log_command_entries <= 5, "the doorbell has 32 bits");
        let nic_config = NicConfig {
            queues: config.queues,
            keys: config.keys_max,
            suppress_kicks: config.suppress_kicks,
        };
        let nic = Nic::new(nic_config, bus, Arc::clone(clock));
        let ready_at = clock.now().after(config.boot_time);
        let shape = CommandQueueShape {
            log_entries: config.log_command_entries,
            log_stride: LOG_COMMAND_STRIDE,
        };
        let firmware = Firmware::new(config, ready_at, Arc::clone(&nic));
        Arc::new(Model {
            clock: Arc::clone(clock),
            nic,
            firmware: Mutex::new(firmware),
            next_due: AtomicU64::new(NOTHING_DUE),
            shape,
            ready_at,
        })
    }

    /// BAR 0.
    pub fn registers(self: &Arc<Self>) -> Arc<dyn Registers> {
        Arc::clone(self) as Arc<dyn Registers>
    }

    /// The queues' interrupt vectors.
    pub fn vectors(self: &Arc<Self>) -> Arc<dyn Vectors> {
        Arc::clone(self) as Arc<dyn Vectors>
    }

    pub(crate) fn nic(&self) -> &Arc<Nic> {
        &self.nic
    }

    fn firmware(&self) -> MutexGuard<'_, Firmware> {
        self.firmware.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What it has done so far.
    pub fn stats(&self) -> Stats {
        let mut stats = Stats::default();
        let firmware = self.firmware();
        stats.commands = firmware.commands;
        stats.commands_failed = firmware.failed;
        stats.unexpected_commands = firmware.unexpected;
        stats.events_lost = firmware.events.lost;
        stats.firmware_pages = firmware.page_count();
        drop(firmware);
        self.nic.read_stats(&mut stats);
        stats
    }

    /// Changes what goes wrong from now on.
    pub fn with_faults<T>(&self, body: impl FnOnce(&mut Faults) -> T) -> T {
        body(&mut self.firmware().faults)
    }

    /// Takes the link up or down.
    pub fn set_link(&self, up: bool) {
        self.firmware().set_link(up);
    }

    /// Whether the link is up.
    pub fn link(&self) -> bool {
        self.nic.is_up()
    }

    /// Resets the function, as PCI's function-level reset does: what its driver made is gone, and
    /// no memory is touched any more when this returns.
    pub fn reset(&self) {
        self.firmware().reset_function();
    }

    /// Pulls the device out: from now on it reads all ones, answers nothing, and touches no memory.
    pub fn remove(&self) {
        self.nic.remove();
    }

    /// Whether it has been pulled out.
    pub fn is_gone(&self) -> bool {
        self.nic.is_gone()
    }

    /// Moves frames until there is nothing to move, or for long enough; whether there is more.
    fn move_frames(&self) -> bool {
        for _ in 0..STEPS_MAX {
            self.nic.step();
            if !self.nic.has_pending() {
                return false;
            }
        }
        true
    }

    /// Gives the firmware a turn if something is due, unless somebody else is at it.
    pub(crate) fn turn_if_due(&self) {
        let due = self.next_due.load(Ordering::Acquire);
        if due == NOTHING_DUE || due > self.clock.now().0 {
            return;
        }
        if let Ok(firmware) = self.firmware.try_lock() {
            self.turn_firmware(firmware, self.clock.now());
        }
    }

    fn turn_firmware(
        &self,
        mut firmware: MutexGuard<'_, Firmware>,
        now: Instant,
    ) -> Option<Instant> {
        let next = firmware.turn(now);
        self.next_due.store(next.map_or(NOTHING_DUE, |at| at.0), Ordering::Release);
        next
    }

    fn read(&self, offset: u64) -> u32 {
        let (major, minor, sub) = FIRMWARE;
        let pair = |high: u16, low: u16| (u32::from(high) << 16) | u32::from(low);
        match offset {
            FW_REV => pair(minor, major),
            CMDIF_REV_FW_SUB => pair(COMMAND_INTERFACE, sub),
            CMDQ_ADDR_HIGH => self.firmware().queue_halves().0,
            CMDQ_ADDR_LOW => self.firmware().queue_halves().1 | self.shape.to_register(),
            INITIALIZING if self.clock.now() < self.ready_at => INITIALIZING_BIT,
            _ => 0,
        }
    }

    fn write(&self, offset: u64, value: u32) {
        match offset {
            CMDQ_ADDR_HIGH => self.firmware().set_queue_high(value),
            CMDQ_ADDR_LOW => {
                let now = self.clock.now();
                self.firmware().set_queue_low(value, now);
                self.next_due.store(now.0, Ordering::Release);
            }
            COMMAND_DOORBELL => {
                let now = self.clock.now();
                let mut firmware = self.firmware();
                firmware.doorbell(value, now);
                self.next_due.store(now.0, Ordering::Release);
            }
            _ => {
                let uar = u32::try_from(offset / UAR_PAGE_BYTES).unwrap_or(u32::MAX);
                match offset % UAR_PAGE_BYTES {
                    UAR_EQ_ARM => self.firmware().event_doorbell(uar, value, true),
                    UAR_EQ_UPDATE => self.firmware().event_doorbell(uar, value, false),
                    _ => {}
                }
            }
        }
    }

    /// Bytes of BAR 0.
    const BAR_BYTES: u64 = VIRTQ_DOORBELL_OFFSET + UAR_PAGE_BYTES;
}

impl Registers for Model {
    fn read32(&self, offset: u64) -> u32 {
        let outside = !offset.is_multiple_of(4) || offset >= Model::BAR_BYTES;
        if self.nic.is_gone() || outside {
            return init_segment::GONE;
        }
        self.read(offset).to_be()
    }

    fn write32(&self, offset: u64, value: u32) {
        if self.nic.is_gone() || !offset.is_multiple_of(4) {
            return;
        }
        if offset == VIRTQ_DOORBELL_OFFSET {
            // Virtio's own doorbells are little-endian (virtio 1.3, 4.1.5.2).
            self.nic.kick(value);
        } else {
            self.write(offset, u32::from_be(value));
        }
    }

    fn read64(&self, offset: u64) -> u64 {
        let high = offset.checked_add(4).map_or(init_segment::GONE, |at| self.read32(at));
        u64::from(self.read32(offset)) | (u64::from(high) << 32)
    }

    fn write64(&self, offset: u64, value: u64) {
        self.write32(offset, low32(value));
        if let Some(at) = offset.checked_add(4) {
            self.write32(at, high32(value));
        }
    }
}

impl Vectors for Model {
    fn count(&self) -> u16 {
        self.nic.vectors.count()
    }

    fn connect(&self, vector: u16, notify: Option<Notify>) {
        self.nic.vectors.connect(vector, notify);
    }
}

impl Turn for Model {
    fn turn(&self, now: Instant) -> Option<Instant> {
        let next = self.turn_firmware(self.firmware(), now);
        let more = !self.nic.has_thread() && self.move_frames();
        if more { Some(now) } else { next }
    }

    fn take_interrupt(&self) -> bool {
        self.firmware().take_interrupt()
    }
}

const _: () = {
    // Doorbell pages of event queues end where those of virtqueues begin.
    let uars = (2 + UARS_MAX as u64) * UAR_PAGE_BYTES;
    assert!(uars <= firmware::VIRTQ_DOORBELL_OFFSET);
};
