//! The device that a VMM sees.

mod dirty;
mod guest;
mod identity;
mod map;
mod own_memory;
mod pairs;
mod reset;
mod switch;
mod vdpa;

use crate::command::{Keep, QueueStats};
use crate::firmware::{BringUpError, Firmware, Setup};
use crate::memory::{KeyContext, Maps, MemoryConfig, MemoryCounters};
use crate::options::{Options, Pace, Prepare};
use crate::queues::{Common, DeviceEvent, DeviceState, Place, Queues, Scratch};
use dirty::DirtyLogs;
use guest::Guest;
use martlet_device_io::{Dma, Registers, Vectors, Waiter};
use martlet_mlx5_abi::message::object_type;
use martlet_units::Instant;
use martlet_vdpa::virtio::split;
use martlet_vdpa::{Identity, VdpaError};
use own_memory::OwnMemory;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use switch::Operation;

/// What a device is reached through.
#[derive(Clone)]
pub struct Platform {
    /// BAR 0.
    pub registers: Arc<dyn Registers>,
    /// Memory for the device.
    pub dma: Arc<dyn Dma>,
    /// Its clock and its interrupt.
    pub waiter: Arc<dyn Waiter>,
    /// Interrupt vectors that go to the guest: MSI-X from 1 on, for 0 is the driver's own.
    pub vectors: Arc<dyn Vectors>,
}

/// An mlx5 function as a vDPA network card.
///
/// Calls may come from any thread. Those that change something are done one after the other; a
/// kick, a read of the configuration space and [`service`](martlet_vdpa::VdpaDevice::service) wait
/// for none of them. When it is dropped, the function is taken down and everything that was made
/// on it is destroyed.
pub struct Mlx5Device {
    pub(crate) firmware: Arc<Firmware>,
    vectors: Arc<dyn Vectors>,
    identity: Identity,
    guest: Arc<Guest>,
    control: Mutex<Control>,
}

/// Everything that is changed under the lock.
struct Control {
    setup: Setup,
    state: DeviceState,
    operation: Option<Operation>,
    /// How a suspend or a resume ended that ended before it was asked after.
    outcome: Option<Result<(), VdpaError>>,
    queues: Queues,
    maps: Maps,
    scratch: Option<OwnMemory>,
    logs: DirtyLogs,
    /// What a function has that does not stop.
    unstopped: Option<reset::Leftovers>,
    /// The last event about the link that has been seen to.
    link_seen: u64,
    has_features: bool,
    recoveries: Recoveries,
    /// Not before then is a function that does not answer tried to be brought up.
    retry_at: Instant,
}

/// Functions that were made anew, because a command was not answered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Recoveries {
    /// How often.
    pub count: u64,
    /// Frames that transmit queues had taken or could have taken: each may have been sent or not, or
    /// twice.
    pub frames_in_flight: u64,
}

impl Mlx5Device {
    /// Brings a function up and makes it a network card. Waits, for seconds if the firmware does.
    pub fn open(platform: Platform, options: Options) -> Result<Mlx5Device, BringUpError> {
        let Platform { registers, dma, waiter, vectors } = platform;
        let clock = Arc::clone(&waiter);
        let (firmware, setup) = Firmware::bring_up(Arc::clone(&registers), dma, waiter, options)?;
        let firmware = Arc::new(firmware);
        let identity = identity::identity(&setup, &options);
        let space = identity::config_space(&setup, &options, &identity);
        let queues = usize::from(identity.queues);
        let guest = Guest::new(registers, clock, &setup.virtio, queues, &space);
        guest.connect(&*vectors);
        guest.set_link(switch::query_link(&firmware).unwrap_or(false));
        let control = Control {
            state: DeviceState::Idle,
            operation: None,
            outcome: None,
            queues: new_queues(&setup, queues, vectors.count()),
            maps: new_maps(&setup, &options),
            scratch: None,
            logs: DirtyLogs::default(),
            unstopped: None,
            link_seen: firmware.link_events(),
            has_features: false,
            recoveries: Recoveries::default(),
            retry_at: Instant(0),
            setup,
        };
        let control = Mutex::new(control);
        Ok(Mlx5Device { firmware, vectors, identity, guest, control })
    }

    /// What the command queue has counted.
    pub fn command_stats(&self) -> QueueStats {
        self.firmware.stats()
    }

    /// What was done about memory keys.
    pub fn memory_counters(&self) -> MemoryCounters {
        let control = self.lock();
        let mut counters = control.maps.counters();
        let kept = control.unstopped.as_ref().map(|left| left.maps.counters().pinned_bytes);
        counters.pinned_bytes += kept.unwrap_or(0);
        counters
    }

    /// How often its function was made anew.
    pub fn recoveries(&self) -> Recoveries {
        self.lock().recoveries
    }

    /// Where the device is.
    pub fn state(&self) -> DeviceState {
        self.lock().state
    }

    fn lock(&self) -> MutexGuard<'_, Control> {
        // A panic under the lock is a bug in this crate, and has been told.
        self.control.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// An error if the device is gone.
    fn check_there(&self, action: &'static str) -> Result<(), VdpaError> {
        if self.firmware.is_gone() { Err(VdpaError::Gone { action }) } else { Ok(()) }
    }

    /// The driver's own empty ring, made when it is first needed.
    fn ensure_scratch(&self, control: &mut Control) -> Result<(), VdpaError> {
        let wanted = self.firmware.options().prepare == Prepare::Suspended;
        if control.queues.scratch.is_some() || !wanted || !control.queues.is_resumable() {
            return Ok(());
        }
        let size = u64::from(self.identity.queue_size_max);
        let driver = size * split::DESCRIPTOR_BYTES;
        let driver_bytes = split::DRIVER_HEADER_BYTES + 2 * size;
        let device = (driver + driver_bytes).next_multiple_of(split::USED_BYTES);
        let bytes = device + split::DEVICE_HEADER_BYTES + split::USED_BYTES * size;
        let bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
        let own = OwnMemory::new(&self.firmware, control.setup.pd, bytes, "prepare")?;
        let place = Place { descriptors: 0, driver, device, key: own.key };
        let keep = Arc::clone(&own.block) as Keep;
        control.queues.scratch = Some(Scratch { place, keep });
        control.scratch = Some(own);
        Ok(())
    }
}

impl Control {
    /// The one place where the device's state changes.
    fn change(&mut self, event: DeviceEvent) {
        let state = self.state;
        let next = state.next(event);
        self.state = next.unwrap_or_else(|| panic!("the device is {state:?} at {event:?}"));
    }

    /// Whether an event is allowed; an error if not.
    fn check(&self, event: DeviceEvent, action: &'static str) -> Result<(), VdpaError> {
        match self.state.next(event) {
            Some(_) => Ok(()),
            None => Err(self.wrong_state(action)),
        }
    }

    /// Whether a guest is leaving or arriving: its pages are logged, or the device stands.
    fn is_in_switchover(&self) -> bool {
        match self.state {
            DeviceState::Prepared
            | DeviceState::Suspending
            | DeviceState::Suspended
            | DeviceState::Resuming => true,
            DeviceState::Idle | DeviceState::Running => self.queues.log.is_some(),
        }
    }

    fn wrong_state(&self, action: &'static str) -> VdpaError {
        let reason = format!("the device is {}", self.state.name());
        VdpaError::Invalid { action, reason }
    }

    /// An error while a suspend or a resume goes on.
    fn check_settled(&self, action: &'static str) -> Result<(), VdpaError> {
        match self.state {
            DeviceState::Suspending | DeviceState::Resuming => Err(self.wrong_state(action)),
            DeviceState::Idle
            | DeviceState::Prepared
            | DeviceState::Running
            | DeviceState::Suspended => Ok(()),
        }
    }
}

fn new_queues(setup: &Setup, count: usize, vectors: u16) -> Queues {
    Queues {
        list: (0..count).map(|_| Default::default()).collect(),
        features: 0,
        used: count,
        map: None,
        runs: Vec::new(),
        scratch: None,
        log: None,
        table: None,
        common: Common { pd: setup.pd, vectors },
        capabilities: setup.virtio,
        has_counters: setup.general.has_object_type(object_type::VIRTIO_Q_COUNTERS),
        retired: Arc::default(),
    }
}

fn new_maps(setup: &Setup, options: &Options) -> Maps {
    let context = KeyContext { pd: setup.pd, null_key: setup.null_mkey };
    Maps::new(memory_config(setup, options), context)
}

fn memory_config(setup: &Setup, options: &Options) -> MemoryConfig {
    let defaults = MemoryConfig::default();
    let entries = 1_u64.checked_shl(u32::from(setup.general.log_max_klm_list()));
    let serial = options.memory == Pace::Serial;
    MemoryConfig {
        entries_max: entries.unwrap_or(defaults.entries_max).min(defaults.entries_max),
        create_window: options.memory.window(),
        destroy_window: options.memory.window(),
        staged_bytes_max: if serial { usize::MAX } else { options.mailbox_bytes_max / 2 },
        update: options.update,
        deletion: options.deletion,
        ..defaults
    }
}

impl fmt::Debug for Mlx5Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mlx5Device").field("identity", &self.identity).finish_non_exhaustive()
    }
}
