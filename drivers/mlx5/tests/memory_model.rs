//! Maps of a whole device on the model, in virtual time: every fault at every command about keys,
//! what deletion costs and when, and how much faster a window is.
#![allow(clippy::unwrap_used, reason = "tests")]
#![allow(unsafe_code)]
// UNSAFETY: memory is named by addresses that nothing lies at; no queue runs, so nobody looks there.

use martlet_device_io::HostMemory;
use martlet_fault_plan::FaultPlan;
use martlet_mlx5::options::Pace;
use martlet_mlx5::{Deletion, MemoryConfig, MemoryCounters, Update};
use martlet_mlx5::{Mlx5Device, Options, Platform};
use martlet_mlx5_abi::{CommandStatus, DeliveryStatus, Opcode};
use martlet_mlx5_model::{Class, Fault, Latencies, Model, ModelConfig, Point};
use martlet_soft_bus::{Addressing, Seat, SoftBus, SoftClock, Stage};
use martlet_units::Instant;
use martlet_vdpa::{Access, Iova, MapRun, VdpaDevice, VdpaError};
use std::sync::Arc;
use std::time::Duration;

const GIB: u64 = 1 << 30;
const MIB: u64 = 1 << 20;

struct Rig {
    bus: Arc<SoftBus>,
    stage: Arc<Stage>,
    model: Arc<Model>,
    seat: Arc<Seat>,
    device: Mlx5Device,
    /// Keys and pins that the device has without a map.
    own_keys: u32,
}

impl Rig {
    fn new(addressing: Addressing, config: ModelConfig, options: Options) -> Rig {
        let stage = Stage::new(SoftClock::virtual_from(Instant(1_000_000)));
        let bus = SoftBus::new(addressing);
        let model = Model::new(config, Arc::clone(&bus) as _, stage.clock());
        let seat = stage.seat(Arc::clone(&model) as _);
        let platform = Platform {
            registers: model.registers(),
            dma: Arc::clone(&bus) as _,
            waiter: Arc::clone(&seat) as _,
            vectors: model.vectors(),
        };
        let device = Mlx5Device::open(platform, options).unwrap();
        let own_keys = model.stats().keys;
        Rig { bus, stage, model, seat, device, own_keys }
    }

    fn now(&self) -> Instant {
        self.stage.clock().now()
    }

    fn keys(&self) -> u32 {
        self.model.stats().keys - self.own_keys
    }

    fn counters(&self) -> MemoryCounters {
        self.device.memory_counters()
    }

    /// Time passes, with service as often as the device wants it.
    fn pass(&self, time: Duration) {
        use martlet_device_io::Waiter;
        let end = self.now().after(time);
        while self.now() < end {
            let until = self.device.service().map_or(end, |until| until.min(end));
            self.seat.wait(Some(until.max(self.now().after(Duration::from_micros(1)))));
        }
    }

    fn time<T>(&self, body: impl FnOnce() -> T) -> (T, Duration) {
        let begin = self.now();
        let value = body();
        (value, self.now().since(begin))
    }
}

fn memory(bytes: u64) -> HostMemory {
    // SAFETY: no queue runs, so nobody reads or writes by the name.
    unsafe { HostMemory::new(1 << 44, bytes, Arc::new(0_u8)) }
}

fn run(iova: u64, memory: &HostMemory, offset: u64, bytes: u64) -> MapRun {
    let memory = memory.slice(offset, bytes).unwrap();
    MapRun { iova: Iova(iova), memory, access: Access::ReadWrite }
}

/// Three pieces, and a hole of more than 1 GiB.
fn map(memory: &HostMemory, offset: u64) -> Vec<MapRun> {
    vec![run(0, memory, offset, 2 * GIB), run(4 * GIB, memory, offset + 2 * GIB, 3 * MIB)]
}

fn scattered() -> Addressing {
    Addressing::Scattered { run_bytes: 1 << 20 }
}

/// What goes wrong at the command, and whether set_map goes well nevertheless.
fn faults() -> Vec<(Fault, bool)> {
    let status = |status| (Fault::Status { status, syndrome: 0x1234 }, false);
    let deadline = Options::MARTLET.deadlines.memory;
    vec![
        status(CommandStatus::LIMIT),
        status(CommandStatus::NO_RESOURCES),
        status(CommandStatus::RESOURCE_BUSY),
        status(CommandStatus::INTERNAL),
        status(CommandStatus::BAD_PARAMETER),
        (Fault::Delivery(DeliveryStatus::SIGNATURE), false),
        (Fault::Delivery(DeliveryStatus::IN_LENGTH), false),
        (Fault::WrongToken, false),
        (Fault::Lost { executed: true }, false),
        (Fault::Lost { executed: false }, false),
        (Fault::Late(deadline * 2), false),
        (Fault::Late(deadline / 4), true),
        (Fault::Slow(deadline / 4), true),
        (Fault::LostEvent, true),
        (Fault::LostInterrupt, true),
        (Fault::PageRequest(4), true),
    ]
}

#[test]
fn every_fault_at_every_creation_leaves_the_old_map_or_the_new_one() {
    let memory = memory(16 * GIB);
    for (fault, goes_well) in faults() {
        for number in 0..4 {
            let rig = Rig::new(scattered(), ModelConfig::default(), Options::MARTLET);
            rig.device.set_map(&map(&memory, 0)).unwrap();
            assert_eq!(rig.keys(), 4);
            let entries = rig.bus.entries();
            let at = Point::Opcode(Opcode::CREATE_MKEY);
            rig.model.with_faults(|faults| *faults = FaultPlan::once(at, number, fault));
            let outcome = rig.device.set_map(&map(&memory, 8 * GIB));
            assert_eq!(outcome.is_ok(), goes_well, "{fault:?} at {number}: {outcome:?}");
            let counters = rig.counters();
            // Whichever map it is: four keys of it, and those that go later or nobody knows of.
            assert_eq!(counters.maps_held, 1);
            let others = counters.backlog_keys as u64 + counters.keys_abandoned;
            assert!(counters.keys_live <= 4 + counters.backlog_keys as u64);
            assert!(u64::from(rig.keys()) <= 4 + others, "{fault:?} at {number}");
            // Late answers come, and what nobody uses goes.
            rig.pass(Duration::from_secs(6));
            let counters = rig.counters();
            let unknown = matches!(fault, Fault::Lost { .. } | Fault::WrongToken);
            assert_eq!(counters.keys_abandoned, u64::from(unknown), "{fault:?} at {number}");
            if !unknown {
                assert_eq!((rig.keys(), counters.keys_live), (4, 4), "{fault:?} at {number}");
                assert_eq!(counters.pinned_bytes, 2 * GIB + 3 * MIB);
                assert!(rig.bus.entries() <= entries + 8, "only mailboxes and pages may be more");
            }
            // The next attempt is as good as the first.
            rig.device.set_map(&map(&memory, 4 * GIB)).unwrap();
            rig.device.set_map(&map(&memory, 8 * GIB)).unwrap();
            let (bus, model) = (Arc::clone(&rig.bus), Arc::clone(&rig.model));
            drop(rig);
            // The function is torn down: nothing is left, of what was not known neither.
            assert_eq!((model.stats().keys, bus.entries()), (0, 0), "{fault:?} at {number}");
        }
    }
}

#[test]
fn every_fault_at_every_destruction_keeps_memory_pinned_under_its_key() {
    let memory = memory(16 * GIB);
    for (fault, _) in faults() {
        for number in 0..4 {
            let rig = Rig::new(scattered(), ModelConfig::default(), Options::MARTLET);
            rig.device.set_map(&map(&memory, 0)).unwrap();
            rig.device.set_map(&map(&memory, 8 * GIB)).unwrap();
            let at = Point::Opcode(Opcode::DESTROY_MKEY);
            rig.model.with_faults(|faults| *faults = FaultPlan::once(at, number, fault));
            rig.pass(Duration::from_secs(12));
            let counters = rig.counters();
            assert_eq!((counters.backlog_keys, counters.keys_live), (0, 4));
            // A key that may exist keeps its memory: the model knows which exist.
            let left = u64::from(rig.keys()) - 4;
            assert!(left <= counters.keys_abandoned && counters.keys_abandoned <= 1);
            assert!(counters.pinned_bytes <= 2 * GIB + 3 * MIB + counters.abandoned_bytes);
            if left == 1 && number > 0 {
                assert!(counters.abandoned_bytes > 0, "{fault:?} at {number}");
            }
            let bus = Arc::clone(&rig.bus);
            drop(rig);
            assert_eq!(bus.entries(), 0, "{fault:?} at {number}");
        }
    }
}

#[test]
fn garbage_and_a_device_that_goes_are_errors_or_maps_but_no_hang() {
    let memory = memory(16 * GIB);
    for fault in [Fault::Garbage, Fault::Gone] {
        for opcode in [Opcode::CREATE_MKEY, Opcode::DESTROY_MKEY] {
            for number in 0..4 {
                let rig = Rig::new(scattered(), ModelConfig::default(), Options::MARTLET);
                rig.device.set_map(&map(&memory, 0)).unwrap();
                let at = Point::Opcode(opcode);
                rig.model.with_faults(|faults| *faults = FaultPlan::once(at, number, fault));
                let outcome = rig.device.set_map(&map(&memory, 8 * GIB));
                if fault == Fault::Gone && opcode == Opcode::CREATE_MKEY {
                    assert!(matches!(outcome, Err(VdpaError::Gone { .. })), "{outcome:?}");
                }
                rig.pass(Duration::from_secs(6));
                // Memory that a key may reach is pinned, as long as nobody knows better.
                let counters = rig.counters();
                assert!(counters.pinned_bytes >= counters.abandoned_bytes);
                assert!(counters.pinned_bytes >= 2 * GIB + 3 * MIB);
            }
        }
    }
}

#[test]
fn keys_go_two_seconds_later_or_when_the_device_goes() {
    let memory = memory(16 * GIB);
    let config = ModelConfig { latencies: Latencies::mkey_small(), ..ModelConfig::default() };
    let rig = Rig::new(scattered(), config, Options::MARTLET);
    rig.device.set_map(&map(&memory, 0)).unwrap();
    rig.device.set_map(&map(&memory, 8 * GIB)).unwrap();
    rig.pass(MemoryConfig::DELETION_DELAY - Duration::from_millis(10));
    assert_eq!((rig.keys(), rig.counters().pinned_bytes), (8, 2 * (2 * GIB + 3 * MIB)));
    rig.pass(Duration::from_millis(20));
    assert_eq!((rig.keys(), rig.counters().pinned_bytes), (4, 2 * GIB + 3 * MIB));
    // A reset lets the map go; a map that comes back in time costs nothing.
    rig.device.reset().unwrap();
    let commands = rig.counters().commands;
    rig.device.set_map(&map(&memory, 8 * GIB)).unwrap();
    assert_eq!(rig.counters().commands, commands);
    rig.device.reset().unwrap();
    // Nobody waits for the two seconds when all of it is to go.
    let begin = rig.now();
    let Rig { device, stage, model, bus, .. } = rig;
    drop(device);
    assert!(stage.clock().now().since(begin) < Duration::from_millis(10));
    assert_eq!((model.stats().keys, bus.entries()), (0, 0));
}

#[test]
fn a_device_without_room_for_two_maps_lets_the_old_one_go_first() {
    let memory = memory(16 * GIB);
    // Room for one map of four keys and the driver's own, and for one more key.
    let config = ModelConfig { keys_max: 6, ..ModelConfig::default() };
    let rig = Rig::new(scattered(), config, Options::MARTLET);
    rig.device.set_map(&map(&memory, 0)).unwrap();
    // The old map stays in force until the new one is there: there is no room for both.
    let outcome = rig.device.set_map(&map(&memory, 8 * GIB));
    assert!(matches!(outcome, Err(VdpaError::Device { .. })), "{outcome:?}");
    assert_eq!(rig.keys(), 4);
    // What nobody uses has no two seconds then.
    rig.device.set_map(&[]).unwrap();
    rig.device.set_map(&map(&memory, 8 * GIB)).unwrap();
    assert_eq!(rig.keys(), 4);
}

/// 64 GiB at a time that is virtual: exact, on any machine.
#[test]
fn a_window_is_as_fast_as_the_series_measured() {
    let memory = memory(128 * GIB);
    let map = |offset| [run(0, &memory, offset, 64 * GIB)];
    let at_once =
        Options { deletion: Deletion::AtOnce, update: Update::Everything, ..Options::MARTLET };
    let measure = |memory: Pace| {
        let config = ModelConfig { latencies: Latencies::mkey_small(), ..ModelConfig::default() };
        let rig = Rig::new(Addressing::Iommu, config, Options { memory, ..at_once });
        let (outcome, create) = rig.time(|| rig.device.set_map(&map(0)));
        outcome.unwrap();
        let (outcome, destroy) = rig.time(|| rig.device.set_map(&[]));
        outcome.unwrap();
        let counters = rig.counters();
        assert_eq!((counters.keys_created, counters.keys_destroyed), (65, 65));
        assert_eq!(rig.keys(), 0);
        (create, destroy, counters)
    };
    let (serial_create, serial_destroy, counters) = measure(Pace::Serial);
    assert_eq!((counters.create_depth_max, counters.destroy_depth_max), (1, 1));
    let (create, destroy, counters) = measure(Pace::Batched { window: 31 });
    assert_eq!((counters.create_depth_max, counters.destroy_depth_max), (31, 31));
    // "3-5x" and "8x" for keys with few entries (vdpa/mlx5: Optimize MKEY operations).
    let ratio = |a: Duration, b: Duration| a.as_secs_f64() / b.as_secs_f64();
    let (faster, gone_faster) = (ratio(serial_create, create), ratio(serial_destroy, destroy));
    assert!((3.0..=5.0).contains(&faster), "{serial_create:?} became {create:?}");
    assert!((6.0..=9.0).contains(&gone_faster), "{serial_destroy:?} became {destroy:?}");
}

#[test]
fn a_new_map_waits_for_no_more_than_a_slice_of_deletion() {
    let memory = memory(256 * GIB);
    let map = |offset| [run(0, &memory, offset, 64 * GIB)];
    let measure = |wait: Duration| {
        let config = ModelConfig { latencies: Latencies::mkey_small(), ..ModelConfig::default() };
        let rig = Rig::new(Addressing::Iommu, config, Options::MARTLET);
        rig.device.set_map(&map(0)).unwrap();
        rig.device.set_map(&map(64 * GIB)).unwrap();
        rig.pass(wait);
        let destroyed = rig.counters().keys_destroyed;
        let (outcome, time) = rig.time(|| rig.device.set_map(&map(128 * GIB)));
        outcome.unwrap();
        (time, destroyed, rig.counters().keys_destroyed)
    };
    let (alone, _, destroyed) = measure(Duration::ZERO);
    assert_eq!(destroyed, 0);
    // In the middle of 65 deletions.
    let (beside, before, after) = measure(MemoryConfig::DELETION_DELAY + Duration::from_millis(3));
    assert!((2..50).contains(&before), "{before}");
    let slice = u64::try_from(MemoryConfig::default().lazy_window).unwrap();
    assert!(after - before <= slice, "{before} to {after}");
    // The slice's share of the firmware's serial section, and what had just begun.
    let serial = Latencies::mkey_small().get(Class::KeyDestroy).serial;
    let limit = alone + serial * u32::try_from(slice).unwrap() + Duration::from_micros(200);
    assert!(beside <= limit, "{alone:?} alone, {beside:?} beside");
}

#[test]
fn a_guest_of_256_gib_grows_for_the_price_of_what_it_grows_by() {
    let memory = memory(300 * GIB);
    let config = ModelConfig { latencies: Latencies::mkey_small(), ..ModelConfig::default() };
    let rig = Rig::new(Addressing::Iommu, config, Options::MARTLET);
    let mut map = vec![
        run(0, &memory, 0, 640 << 10),
        run(MIB, &memory, MIB, 2 * GIB - MIB),
        run(4 * GIB, &memory, 2 * GIB, 254 * GIB),
    ];
    let (outcome, whole) = rig.time(|| rig.device.set_map(&map));
    outcome.unwrap();
    assert_eq!(rig.keys(), 258);
    map[2] = run(4 * GIB, &memory, 2 * GIB, 256 * GIB);
    let (outcome, more) = rig.time(|| rig.device.set_map(&map));
    outcome.unwrap();
    assert_eq!(rig.counters().commands, 258 + 3);
    assert!(more * 10 < whole, "{whole:?}, then {more:?}");
    let (outcome, same) = rig.time(|| rig.device.set_map(&map));
    outcome.unwrap();
    assert_eq!((same, rig.counters().commands), (Duration::ZERO, 261));
}
