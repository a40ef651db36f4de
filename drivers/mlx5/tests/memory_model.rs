//! Maps of a whole device on the model, in virtual time: every fault at every command about keys,
//! what deletion costs and when, and how much faster a window is.
#![allow(clippy::unwrap_used, reason = "tests")]
#![allow(unsafe_code)]
// UNSAFETY: memory is named by addresses that nothing lies at; no queue runs, so nobody looks there.

use martlet_device_io::HostMemory;
use martlet_fault_plan::FaultPlan;
use martlet_mlx5::options::Pace;
use martlet_mlx5::{Deletion, MemoryCounters, Update};
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
const DELETION_DELAY: Duration = Duration::from_secs(2);

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

/// Commands about keys.
fn key_commands(rig: &Rig) -> u64 {
    let stats = rig.device.command_stats();
    [Opcode::CREATE_MKEY, Opcode::DESTROY_MKEY].map(|opcode| stats.of(opcode).issued).iter().sum()
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
            let at = Point::Opcode(Opcode::CREATE_MKEY);
            rig.model.with_faults(|faults| *faults = FaultPlan::once(at, number, fault));
            let outcome = rig.device.set_map(&map(&memory, 8 * GIB));
            assert_eq!(outcome.is_ok(), goes_well, "{fault:?} at {number}: {outcome:?}");
            // What nobody uses goes, or the function begins anew.
            rig.pass(Duration::from_secs(6));
            let counters = rig.counters();
            assert_eq!((rig.keys(), counters.maps_held), (4, 1), "{fault:?} at {number}");
            assert_eq!(counters.pinned_bytes, 2 * GIB + 3 * MIB);
            assert_eq!((counters.keys_stuck, counters.backlog_keys), (0, 0));
            // The next attempt is as good as the first.
            rig.device.set_map(&map(&memory, 4 * GIB)).unwrap();
            rig.device.set_map(&map(&memory, 8 * GIB)).unwrap();
            let (bus, model) = (Arc::clone(&rig.bus), Arc::clone(&rig.model));
            drop(rig);
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
            // A key that exists keeps its memory.
            let left = u64::from(rig.keys()) - 4;
            assert!(left <= counters.keys_stuck as u64 + 1, "{fault:?} at {number}: {left}");
            let map = 2 * GIB + 3 * MIB;
            assert!(counters.pinned_bytes >= map && counters.pinned_bytes <= 2 * map);
            if left > 0 && number > 0 {
                assert!(counters.pinned_bytes > map, "{fault:?} at {number}");
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
    for fault in [Fault::Garbage, Fault::Gone, Fault::Hang] {
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
                assert!(rig.counters().pinned_bytes >= 2 * GIB + 3 * MIB);
            }
        }
    }
}

#[test]
fn a_piece_that_two_maps_share_outlives_the_first() {
    let memory = memory(16 * GIB);
    let rig = Rig::new(scattered(), ModelConfig::default(), Options::MARTLET);
    rig.device.set_map(&map(&memory, 0)).unwrap();
    let created = |rig: &Rig| rig.device.command_stats().of(Opcode::CREATE_MKEY).issued;
    let before = created(&rig);
    // The first piece stays, the second goes, the third is other memory.
    let second = vec![run(0, &memory, 0, GIB), run(4 * GIB, &memory, 8 * GIB, 3 * MIB)];
    rig.device.set_map(&second).unwrap();
    assert_eq!(created(&rig) - before, 2, "one piece, and the indirect key");
    rig.pass(Duration::from_secs(4));
    assert_eq!((rig.keys(), rig.counters().pinned_bytes), (3, GIB + 3 * MIB));
    // And a build that fails takes nothing that is shared with it.
    let at = Point::Opcode(Opcode::CREATE_MKEY);
    let fault = Fault::Status { status: CommandStatus::BAD_PARAMETER, syndrome: 1 };
    rig.model.with_faults(|faults| *faults = FaultPlan::once(at, 1, fault));
    rig.device.set_map(&map(&memory, 0)).unwrap_err();
    rig.pass(Duration::from_secs(4));
    assert_eq!((rig.keys(), rig.counters().pinned_bytes), (3, GIB + 3 * MIB));
}

#[test]
fn keys_go_two_seconds_later_or_when_the_device_goes() {
    let memory = memory(16 * GIB);
    let config = ModelConfig { latencies: Latencies::mkey_small(), ..ModelConfig::default() };
    let rig = Rig::new(scattered(), config, Options::MARTLET);
    rig.device.set_map(&map(&memory, 0)).unwrap();
    rig.device.set_map(&map(&memory, 8 * GIB)).unwrap();
    rig.pass(DELETION_DELAY - Duration::from_millis(10));
    assert_eq!((rig.keys(), rig.counters().pinned_bytes), (8, 2 * (2 * GIB + 3 * MIB)));
    rig.pass(Duration::from_millis(20));
    assert_eq!((rig.keys(), rig.counters().pinned_bytes), (4, 2 * GIB + 3 * MIB));
    // A map that comes back in time costs nothing.
    rig.device.set_map(&map(&memory, 0)).unwrap();
    let commands = rig.device.command_stats().issued();
    rig.device.set_map(&map(&memory, 8 * GIB)).unwrap();
    assert_eq!(rig.device.command_stats().issued(), commands);
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
    rig.pass(Duration::from_millis(10));
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
        let stats = rig.device.command_stats();
        let [created, destroyed] = [Opcode::CREATE_MKEY, Opcode::DESTROY_MKEY].map(|o| stats.of(o));
        assert_eq!((created.issued, destroyed.issued), (65, 65));
        assert_eq!(rig.keys(), 0);
        (create, destroy, (created.in_flight_max, destroyed.in_flight_max))
    };
    let (serial_create, serial_destroy, depth) = measure(Pace::Serial);
    assert_eq!(depth, (1, 1));
    let (create, destroy, depth) = measure(Pace::Batched { window: 31 });
    assert_eq!(depth, (31, 31));
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
        let destroyed = rig.device.command_stats().of(Opcode::DESTROY_MKEY).issued;
        let (outcome, time) = rig.time(|| rig.device.set_map(&map(128 * GIB)));
        outcome.unwrap();
        (time, destroyed, rig.device.command_stats().of(Opcode::DESTROY_MKEY).issued)
    };
    let (alone, _, destroyed) = measure(Duration::ZERO);
    assert_eq!(destroyed, 0);
    // In the middle of 65 deletions.
    let (beside, before, after) = measure(DELETION_DELAY + Duration::from_millis(3));
    assert!((2..50).contains(&before), "{before}");
    let slice = 8;
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
    assert_eq!(key_commands(&rig), 258 + 3);
    assert!(more * 10 < whole, "{whole:?}, then {more:?}");
    let (outcome, same) = rig.time(|| rig.device.set_map(&map));
    outcome.unwrap();
    assert_eq!((same, key_commands(&rig)), (Duration::ZERO, 261));
}
