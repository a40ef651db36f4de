//! A device on a bus with memory, as tests use it.
#![allow(dead_code, clippy::unwrap_used, reason = "tests; each uses a part")]

use martlet_device_io::{BusAddress, BusMemory, Dma, DmaBlock, Portal, Submission, Waiter};
use martlet_dsa_abi::{COMPLETION_BYTES, CompletionRecord, Descriptor, Status};
use martlet_dsa_model::{DeviceConfig, DsaModel, Faults, QueuePortal};
use martlet_soft_bus::{Addressing, Seat, SoftBus, SoftClock, Stage};
use martlet_units::Instant;
use std::sync::Arc;

pub(crate) const PAGE: usize = 4096;

pub(crate) struct Bench {
    pub(crate) bus: Arc<SoftBus>,
    pub(crate) stage: Arc<Stage>,
    pub(crate) model: Arc<DsaModel>,
    pub(crate) seat: Arc<Seat>,
    pub(crate) portal: QueuePortal,
    /// 1024 completion records and 1024 descriptors.
    pub(crate) records: DmaBlock,
    pub(crate) list: DmaBlock,
    /// 64 pages.
    pub(crate) data: DmaBlock,
}

impl Bench {
    pub(crate) fn new(config: DeviceConfig) -> Bench {
        Bench::with_faults(config, Faults::default())
    }

    pub(crate) fn with_faults(config: DeviceConfig, faults: Faults) -> Bench {
        let bus = SoftBus::new(Addressing::Process);
        let stage = Stage::new(SoftClock::virtual_from(Instant(1_000)));
        let clock = Arc::clone(stage.clock());
        let model = DsaModel::new(config, bus.clone(), clock, faults).unwrap();
        let seat = stage.seat(model.clone());
        let portal = model.portal(0).unwrap();
        let records = bus.alloc(1024 * 32, 64).unwrap();
        let list = bus.alloc(1024 * 64, 64).unwrap();
        let data = bus.alloc(64 * PAGE, PAGE).unwrap();
        Bench { bus, stage, model, seat, portal, records, list, data }
    }

    /// Where the `n`th record is.
    pub(crate) fn record_at(&self, n: usize) -> u64 {
        self.records.at().0 + n as u64 * 32
    }

    /// Where byte `offset` of the data is.
    pub(crate) fn at(&self, offset: usize) -> u64 {
        self.data.at().0 + offset as u64
    }

    pub(crate) fn record(&self, n: usize) -> CompletionRecord {
        let mut bytes = [0; COMPLETION_BYTES];
        self.records.read(n * 32, &mut bytes);
        CompletionRecord::from_bytes(&bytes)
    }

    pub(crate) fn status(&self, n: usize) -> Status {
        Status::from_byte(self.records.load8(n * 32))
    }

    pub(crate) fn forget_records(&self) {
        self.records.clear(0, self.records.bytes());
    }

    pub(crate) fn submit(&self, descriptor: Descriptor) -> Submission {
        self.portal.submit(&descriptor.to_bytes())
    }

    /// Lets everything happen that is going to within a second.
    pub(crate) fn settle(&self) {
        let until = Instant(self.seat.now().0 + 1_000_000_000);
        self.stage.run_until(until);
    }

    /// Runs one descriptor, whose record is the `0`th, to its end.
    pub(crate) fn run(&self, descriptor: Descriptor) -> CompletionRecord {
        self.forget_records();
        assert_eq!(self.submit(descriptor), Submission::Accepted);
        self.settle();
        self.record(0)
    }

    /// Puts descriptors into the list.
    pub(crate) fn write_list(&self, descriptors: &[Descriptor]) {
        for (index, descriptor) in descriptors.iter().enumerate() {
            self.list.write(index * 64, &descriptor.to_bytes());
        }
    }

    /// Runs descriptors as a batch whose record is the `0`th.
    pub(crate) fn run_batch(&self, descriptors: &[Descriptor]) -> CompletionRecord {
        self.write_list(descriptors);
        self.run(self.batch(descriptors.len()))
    }

    pub(crate) fn batch(&self, count: usize) -> Descriptor {
        Descriptor::batch(self.list.at().0, u32::try_from(count).unwrap(), self.record_at(0))
    }

    /// One page's comparison with zero, with the `n`th record.
    pub(crate) fn check_page(&self, page: usize, n: usize) -> Descriptor {
        Descriptor::compare_pattern(self.at(page * PAGE), 0, 4096, self.record_at(n))
    }

    pub(crate) fn read(&self, offset: usize, bytes: usize) -> Vec<u8> {
        let mut read = vec![0; bytes];
        self.bus.read(BusAddress(self.at(offset)), &mut read).unwrap();
        read
    }
}
