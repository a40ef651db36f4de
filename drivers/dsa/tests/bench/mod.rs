//! An engine on a model of the device, with memory to check.
#![allow(dead_code, unsafe_code, clippy::unwrap_used, reason = "tests; each uses a part")]
// UNSAFETY: guest memory is mapped and written by address, as a guest would.

mod gate;

pub(crate) use gate::OpenGate;

use martlet_device_io::{BusAddress, HostMemory};
use martlet_dsa::{
    CompletionWait, CpuCheck, EngineConfig, Gate, PageRun, QueueLimits, SeatWait, SharedMemory,
    WorkQueue, ZeroEngine, ZeroPages,
};
use martlet_dsa_model::{DeviceConfig, DsaModel, Faults, Mode, QueueConfig};
use martlet_soft_bus::{Addressing, SoftBus, SoftClock, Stage};
use martlet_units::Instant;
use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::sync::Arc;
use std::time::Duration;

pub(crate) const PAGE: usize = 4096;

/// Pages of a guest.
pub(crate) struct Guest {
    memory: *mut u8,
    pages: usize,
}

// SAFETY: memory that is freed once; tests write it from one thread.
unsafe impl Send for Guest {}
// SAFETY: as above.
unsafe impl Sync for Guest {}

impl Guest {
    pub(crate) fn new(pages: usize) -> Arc<Guest> {
        // SAFETY: the layout is not empty.
        let memory = unsafe { alloc_zeroed(Guest::layout(pages)) };
        assert!(!memory.is_null());
        Arc::new(Guest { memory, pages })
    }

    fn layout(pages: usize) -> Layout {
        Layout::from_size_align(pages * PAGE, PAGE).unwrap()
    }

    pub(crate) fn address(&self, page: usize) -> u64 {
        assert!(page <= self.pages);
        u64::try_from(self.memory.expose_provenance() + page * PAGE).unwrap()
    }

    pub(crate) fn host_memory(self: &Arc<Guest>) -> HostMemory {
        let bytes = u64::try_from(self.pages * PAGE).unwrap();
        // SAFETY: mapped as long as the guest, which is the owner.
        unsafe { HostMemory::new(self.address(0), bytes, self.clone()) }
    }

    pub(crate) fn write(&self, page: usize, offset: usize, value: u8) {
        assert!(page < self.pages && offset < PAGE);
        // SAFETY: inside of the memory.
        unsafe { self.memory.add(page * PAGE + offset).write_volatile(value) };
    }

    pub(crate) fn read(&self, page: usize) -> Vec<u8> {
        assert!(page < self.pages);
        // SAFETY: inside of the memory.
        (0..PAGE).map(|n| unsafe { self.memory.add(page * PAGE + n).read_volatile() }).collect()
    }

    pub(crate) fn run(&self, first: usize, pages: usize) -> PageRun {
        assert!(first + pages <= self.pages);
        // SAFETY: mapped as long as the guest, which tests keep.
        unsafe { PageRun::new(self.address(first), u32::try_from(pages).unwrap()) }
    }

    pub(crate) fn is_zero(&self, page: usize) -> bool {
        self.read(page).iter().all(|byte| *byte == 0)
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout; owners are gone.
        unsafe { dealloc(self.memory, Guest::layout(self.pages)) };
    }
}

/// The plainest check there is: the oracle as well as the engine's CPU.
pub(crate) struct PlainCheck;

impl CpuCheck for PlainCheck {
    unsafe fn is_zero(&self, page: *const u8) -> bool {
        // SAFETY: the caller's promise.
        (0..PAGE / 8).all(|word| unsafe { page.cast::<u64>().add(word).read_volatile() } == 0)
    }
}

#[derive(Clone, Debug)]
pub(crate) struct Setup {
    pub(crate) devices: Vec<DeviceConfig>,
    pub(crate) addressing: Addressing,
    /// Without batches, as through the file of a version 1 device.
    pub(crate) singly: bool,
    pub(crate) pages: usize,
    pub(crate) tries: u32,
    pub(crate) engine: EngineConfig,
}

impl Default for Setup {
    fn default() -> Setup {
        Setup {
            devices: vec![DeviceConfig::sapphire_rapids()],
            addressing: Addressing::Process,
            singly: false,
            pages: 512,
            tries: 5,
            engine: EngineConfig { offload_pages_min: 1, ..EngineConfig::default() },
        }
    }
}

impl Setup {
    pub(crate) fn with_queue(queue: QueueConfig) -> Setup {
        let device = DeviceConfig { queues: vec![queue], ..DeviceConfig::sapphire_rapids() };
        Setup { devices: vec![device], ..Setup::default() }
    }
}

pub(crate) struct Bench {
    pub(crate) stage: Arc<Stage>,
    pub(crate) bus: Arc<SoftBus>,
    pub(crate) models: Vec<Arc<DsaModel>>,
    pub(crate) queues: Vec<Arc<WorkQueue>>,
    pub(crate) guest: Arc<Guest>,
    pub(crate) memory: Arc<SharedMemory>,
    pub(crate) gate: Arc<dyn Gate>,
    setup: Setup,
}

impl Bench {
    pub(crate) fn new(setup: Setup) -> Bench {
        let bus = SoftBus::new(setup.addressing);
        let stage = Stage::new(SoftClock::virtual_from(Instant(1_000_000)));
        let (mut models, mut queues) = (Vec::new(), Vec::new());
        for config in &setup.devices {
            let clock = Arc::clone(stage.clock());
            let bus = Arc::clone(&bus);
            let model = DsaModel::new(config.clone(), bus, clock, Faults::default()).unwrap();
            let wait: Arc<dyn CompletionWait> = Arc::new(SeatWait::new(stage.seat(model.clone())));
            for (number, queue) in config.queues.iter().enumerate() {
                queues.push(work_queue(&setup, config, &model, number, queue, &wait));
            }
            models.push(model);
        }
        let guest = Guest::new(setup.pages);
        let memory = SharedMemory::pin(&*bus, &[guest.host_memory()]).unwrap();
        let gate = Arc::new(OpenGate::new(queues.len(), setup.tries));
        Bench { stage, bus, models, queues, guest, memory, gate, setup }
    }

    pub(crate) fn model(&self) -> &DsaModel {
        &self.models[0]
    }

    pub(crate) fn engine(&self) -> ZeroEngine<PlainCheck> {
        self.engine_with(self.setup.engine)
    }

    pub(crate) fn engine_with(&self, config: EngineConfig) -> ZeroEngine<PlainCheck> {
        let (gate, memory) = (Arc::clone(&self.gate), Arc::clone(&self.memory));
        ZeroEngine::new(config, self.queues.clone(), gate, memory, &*self.bus, PlainCheck).unwrap()
    }

    pub(crate) fn now(&self) -> Instant {
        self.stage.clock().now()
    }

    pub(crate) fn pass(&self, time: Duration) {
        self.stage.run_until(self.now().after(time));
    }

    /// Where the device finds a page; for addressing by process.
    pub(crate) fn bus_page(&self, page: usize) -> BusAddress {
        BusAddress(self.guest.address(page))
    }

    /// Checks pages and compares with the truth.
    pub(crate) fn assert_right(
        &self,
        engine: &mut ZeroEngine<PlainCheck>,
        first: usize,
        pages: usize,
    ) {
        let zero = engine.check(&[self.guest.run(first, pages)]);
        self.assert_answer(&zero, first, pages);
    }

    pub(crate) fn assert_answer(&self, zero: &ZeroPages, first: usize, pages: usize) {
        assert_eq!(zero.pages() as usize, pages);
        for page in 0..pages {
            let told = zero.is_zero(u32::try_from(page).unwrap());
            assert_eq!(told, self.guest.is_zero(first + page), "page {}", first + page);
        }
    }
}

fn work_queue(
    setup: &Setup,
    config: &DeviceConfig,
    model: &Arc<DsaModel>,
    number: usize,
    queue: &QueueConfig,
    wait: &Arc<dyn CompletionWait>,
) -> Arc<WorkQueue> {
    let counts = queue.mode == Mode::Dedicated;
    let limits = QueueLimits {
        batch_max: if setup.singly { 1 } else { queue.batch_max },
        transfer_bytes_max: queue.transfer_bytes_max,
        credits: counts.then_some(queue.size),
    };
    let portal = Box::new(model.portal(number).unwrap());
    WorkQueue::new(format!("wq{}.{number}", config.number), portal, Arc::clone(wait), limits)
}

/// Every third page has content, somewhere.
pub(crate) fn fill_some(guest: &Guest, pages: usize) {
    for page in (0..pages).step_by(3) {
        guest.write(page, page * 97 % PAGE, 1);
    }
}
