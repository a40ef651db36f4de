//! A device that writes anything: it may lie about pages, but nothing panics, hangs, or is written
//! that the driver did not give it.
#![allow(clippy::unwrap_used, reason = "tests")]

mod bench;

use bench::{Guest, OpenGate, PlainCheck};
use martlet_device_io::{BusAddress, BusMemory, DESCRIPTOR_BYTES, Portal, Submission};
use martlet_dsa::{
    CompletionWait, EngineConfig, Gate, QueueLimits, SharedMemory, StatusByte, WorkQueue,
    ZeroEngine,
};
use martlet_dsa_abi::{Descriptor, Opcode};
use martlet_simulation::Chance;
use martlet_soft_bus::{Addressing, SoftBus, SoftClock};
use martlet_units::Instant;
use proptest::prelude::*;
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Writes noise where records belong: at once, later, or never.
struct Liar {
    bus: Arc<SoftBus>,
    noise: Mutex<Chance>,
    owed: Mutex<Vec<u64>>,
}

impl Liar {
    fn write(&self, noise: &mut Chance, record: u64) {
        let mut bytes = [0; 32];
        bytes.chunks_mut(8).for_each(|word| word.copy_from_slice(&noise.bits().to_le_bytes()));
        if noise.once_in(2) {
            // Something that is nearly right.
            bytes[0] = [1, 2, 3, 5, 6, 0x83, 0x14, 0][usize::from(bytes[0] % 8)];
            bytes[1] %= 3;
            bytes[6..8].fill(0);
            bytes[17..24].fill(0);
        }
        // Where nothing is any more, a device's write faults.
        let _ = self.bus.write(BusAddress(record), &bytes);
    }

    fn answer(&self, descriptor: &Descriptor) {
        let mut noise = self.noise.lock().unwrap();
        let mut records = vec![descriptor.completion()];
        if descriptor.opcode() == Opcode::BATCH {
            for index in 0..u64::from(descriptor.size()) {
                let mut bytes = [0; DESCRIPTOR_BYTES];
                self.bus.read(BusAddress(descriptor.source() + index * 64), &mut bytes).unwrap();
                records.push(Descriptor::from_bytes(&bytes).completion());
            }
            records.reverse();
        }
        for record in records {
            match noise.below(8) {
                0 => {}
                1 => self.owed.lock().unwrap().push(record),
                _ => self.write(&mut noise, record),
            }
        }
    }

    fn pay(&self) {
        let mut noise = self.noise.lock().unwrap();
        if noise.once_in(3) {
            let owed = std::mem::take(&mut *self.owed.lock().unwrap());
            owed.into_iter().for_each(|record| self.write(&mut noise, record));
        }
    }
}

struct LiarPortal(Arc<Liar>);

impl Portal for LiarPortal {
    fn submit(&self, descriptor: &[u8; DESCRIPTOR_BYTES]) -> Submission {
        let chance = self.0.noise.lock().unwrap().bits();
        match chance % 64 {
            0..8 => Submission::Retry,
            8 if chance.is_multiple_of(17) => Submission::Gone,
            _ => {
                self.0.answer(&Descriptor::from_bytes(descriptor));
                Submission::Accepted
            }
        }
    }
}

struct LiarWait(Arc<Liar>, SoftClock);

impl CompletionWait for LiarWait {
    fn now(&self) -> Instant {
        self.1.now()
    }

    fn poll(&self) {}

    fn wait(&self, _status: StatusByte<'_>, until: Instant) {
        self.0.pay();
        self.1.advance_to(until);
    }

    fn let_pass(&self, time: Duration) {
        self.1.advance(time);
    }
}

struct Host {
    bus: Arc<SoftBus>,
    queue: Arc<WorkQueue>,
    guest: Arc<Guest>,
    memory: Arc<SharedMemory>,
    gate: Arc<dyn Gate>,
}

fn host(seed: u64, batch_max: u32) -> Host {
    let bus = SoftBus::new(Addressing::Iommu);
    let liar = Arc::new(Liar {
        bus: bus.clone(),
        noise: Mutex::new(Chance::new(seed)),
        owed: Mutex::default(),
    });
    let limits = QueueLimits { batch_max, transfer_bytes_max: 1 << 20, credits: Some(40) };
    let wait = Arc::new(LiarWait(liar.clone(), SoftClock::virtual_from(Instant(1_000_000))));
    let queue = WorkQueue::new("wq0.0", Box::new(LiarPortal(liar)), wait, limits);
    let guest = Guest::new(256);
    let memory = SharedMemory::pin(&*bus, &[guest.host_memory()]).unwrap();
    Host { bus, queue, guest, memory, gate: Arc::new(OpenGate::new(1, 2)) }
}

const DEADLINE: Duration = Duration::from_millis(5);

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn an_engine_survives_it(seed: u64, batch_max in prop::sample::select(vec![1_u32, 7, 32])) {
        let host = host(seed, batch_max);
        let config = EngineConfig { offload_pages_min: 1, deadline: DEADLINE, ..EngineConfig::default() };
        let (queues, gate, memory) = (vec![host.queue.clone()], host.gate.clone(), host.memory.clone());
        let mut engine = ZeroEngine::new(config, queues, gate, memory, &*host.bus, PlainCheck).unwrap();
        for round in 0..20 {
            engine.begin(&[host.guest.run(0, 200)]);
            engine.begin(&[host.guest.run(100, 156), host.guest.run(round, 1)]);
            prop_assert_eq!(engine.collect().unwrap().pages(), 200);
            prop_assert_eq!(engine.collect().unwrap().pages(), 157);
        }
        let stats = engine.stats();
        prop_assert_eq!(stats.device_pages + stats.cpu_pages, 20 * 357);
        drop(engine);
        // Nothing of the guest's was written.
        prop_assert!((0..256).all(|page| host.guest.is_zero(page)));
    }
}
