//! A device that does what it likes: writes anything to any memory that it has been given, at any
//! moment, and reads as anything in its registers. The driver neither panics nor hangs, and never
//! touches memory that is not its own (its blocks see to that by panics of their own).
#![allow(clippy::unwrap_used, reason = "tests")]

mod rig;

use martlet_device_io::{BusAddress, BusMemory, Dma, Registers, Waiter};
use martlet_mlx5::options::{Deadlines, Options};
use martlet_mlx5::{Mlx5Device, Platform};
use martlet_mlx5_model::{Latencies, Model, ModelConfig};
use martlet_simulation::Chance;
use martlet_soft_bus::{Addressing, Seat, SoftBus, SoftClock, Stage};
use martlet_units::Instant;
use martlet_vdpa::virtio::feature;
use martlet_vdpa::{Access, Iova, MapRun, QueueIndex, QueueState, VdpaDevice};
use proptest::prelude::*;
use rig::guest::Guest;
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// What the device does, from a seed.
struct Malice {
    chance: Mutex<Chance>,
    /// One in this many chances is taken.
    rarity: u64,
    bus: Arc<SoftBus>,
    seat: Arc<Seat>,
    /// The command page, once the driver has told it.
    page: Mutex<u64>,
}

impl Malice {
    fn draw(&self) -> u64 {
        self.chance.lock().unwrap().bits()
    }

    fn strikes(&self) -> bool {
        self.draw().is_multiple_of(self.rarity)
    }

    /// Writes garbage somewhere: into command entries, or into any memory that the bus has.
    fn spoil(&self) {
        if !self.strikes() {
            return;
        }
        let page = *self.page.lock().unwrap();
        let (choice, value) = (self.draw(), self.draw());
        let entry = page + (choice >> 8) % 32 * 64;
        let (at, bytes) = match choice % 6 {
            // Owner bits and statuses.
            0 => (entry + 63, vec![value.to_le_bytes()[0] & 0x1e]),
            1 => (entry + 60, value.to_le_bytes()[..4].to_vec()),
            // Outputs.
            2 => (entry + 32, [value.to_le_bytes(), self.draw().to_le_bytes()].concat()),
            // Anything anywhere: mailboxes, events, rings, logs.
            _ => {
                let at = (1 << 32) + ((self.draw() % (48 << 20)) & !7);
                let bytes = (0..16).flat_map(|_| self.draw().to_le_bytes()).collect();
                (at, bytes)
            }
        };
        // Most of the address space is empty.
        let _ = self.bus.write(BusAddress(at), &bytes);
    }
}

struct BadRegisters {
    honest: Arc<dyn Registers>,
    malice: Arc<Malice>,
}

impl Registers for BadRegisters {
    fn read32(&self, offset: u64) -> u32 {
        self.malice.spoil();
        if self.malice.strikes() {
            return u32::try_from(self.malice.draw() >> 32).unwrap();
        }
        self.honest.read32(offset)
    }

    fn write32(&self, offset: u64, value: u32) {
        if offset == 0x10 || offset == 0x14 {
            let half = u64::from(u32::from_be(value));
            let mut page = self.malice.page.lock().unwrap();
            *page = if offset == 0x10 { half << 32 } else { *page | half };
        }
        self.malice.spoil();
        self.honest.write32(offset, value);
    }

    fn read64(&self, offset: u64) -> u64 {
        self.honest.read64(offset)
    }

    fn write64(&self, offset: u64, value: u64) {
        self.honest.write64(offset, value);
    }
}

impl Waiter for Malice {
    fn now(&self) -> Instant {
        self.seat.now()
    }

    fn poll(&self) -> bool {
        self.spoil();
        self.seat.poll()
    }

    fn wait(&self, until: Option<Instant>) {
        self.spoil();
        self.seat.wait(until);
        self.spoil();
    }
}

fn wait(seat: &Seat, what: &str, poll: impl Fn() -> bool) {
    let end = seat.now().after(Duration::from_secs(20));
    while !poll() {
        assert!(seat.now() < end, "{what} hangs");
        seat.wait(Some(seat.now().after(Duration::from_micros(100))));
    }
}

fn run(seed: u64, rarity: u64, calls: &[u8]) {
    let stage = Stage::new(SoftClock::virtual_from(Instant(1_000_000)));
    let bus = SoftBus::new(Addressing::Iommu);
    // With time between a command and its answer, or without.
    let takes_time = seed.is_multiple_of(2);
    let latencies =
        if takes_time { Latencies::connectx6dx_from_series() } else { Latencies::zero() };
    let config = ModelConfig { queues: 8, latencies, ..ModelConfig::default() };
    let model = Model::new(config, Arc::clone(&bus) as _, stage.clock());
    let seat = stage.seat(Arc::clone(&model) as _);
    let malice = Arc::new(Malice {
        chance: Mutex::new(Chance::new(seed)),
        rarity,
        bus: Arc::clone(&bus),
        seat: Arc::clone(&seat),
        page: Mutex::default(),
    });
    let honest = model.registers();
    let platform = Platform {
        registers: Arc::new(BadRegisters { honest, malice: Arc::clone(&malice) }),
        dma: Arc::clone(&bus) as Arc<dyn Dma>,
        waiter: Arc::clone(&malice) as Arc<dyn Waiter>,
        vectors: model.vectors(),
    };
    let ms = Duration::from_millis;
    let deadlines = Deadlines { queues: ms(3), memory: ms(4), setup: ms(8) };
    let options = Options { deadlines, ..Options::MARTLET };
    let Ok(device) = Mlx5Device::open(platform, options) else { return };
    let guest = Guest::new(2, 0);
    let memory = guest.memory.host();
    let map = [MapRun { iova: Iova(0), memory, access: Access::ReadWrite }];
    let mut pages = 0;
    for call in calls {
        // Errors of all kinds are fine.
        match call % 14 {
            0 => drop(device.set_features(feature::VERSION_1)),
            1 => drop(device.set_map(&map)),
            2 => {
                for queue in 0..4 {
                    let index = QueueIndex(queue);
                    let _ = device.set_queue(index, guest.config(queue));
                    let _ = device.set_queue_state(index, QueueState::default());
                }
            }
            3 => drop(device.prepare()),
            4 => drop(device.start()),
            5 => {
                // Or it is left alone, and something else comes.
                if device.begin_suspend().is_ok() && call & 0x20 == 0 {
                    wait(&seat, "suspend", || device.poll_suspend().is_some());
                }
            }
            6 => {
                if device.begin_resume().is_ok() && call & 0x20 == 0 {
                    wait(&seat, "resume", || device.poll_resume().is_some());
                }
            }
            7 => drop(device.set_queue_pairs(u16::from(call % 3))),
            8 => drop(device.set_dirty_log(call & 0x10 != 0)),
            9 => device.take_dirty(&mut |_, word| pages += word.count_ones()),
            10 => drop(device.reset()),
            11 => drop(device.counters()),
            12 => drop(device.queue_state(QueueIndex(u16::from(*call)))),
            _ => {
                device.service();
                device.kick(QueueIndex(u16::from(*call)));
                device.read_config(0, &mut [0; 12]);
            }
        }
    }
    drop(device);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]

    #[test]
    fn a_hostile_device_does_no_harm(
        seed: u64,
        rarity in prop_oneof![2_u64..10, 10_u64..100, 100_u64..2000],
        calls in prop::collection::vec(any::<u8>(), 0..40),
    ) {
        // As a VMM begins, so that there is something to spoil.
        let usual = [0, 1, 2, 4, 5, 6, 8 | 0x10];
        run(seed, rarity, &[&usual, &calls[..]].concat());
    }
}
