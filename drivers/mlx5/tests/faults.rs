//! Every fault at every command of suspend, resume, set_map, a change of the number of queue pairs,
//! start and prepare: each ends in a stated condition, and from it frames flow again.
//!
//! | outcome | condition |
//! |---|---|
//! | suspend: success | every queue stands; indices are the rings'; no frame moves |
//! | suspend: error | running; frames flow on all queues, at once or when the function has begun anew |
//! | resume: success, error | the same |
//! | set_map: error | running with the old map, the same |
//! | change of pairs: error | as many pairs as before, and the same |
//! | start, prepare: error | as before: they can be tried again |
//! | device gone | every call says so; the end of the device does not hang |
//!
//! Whatever was not answered, or in a way that does not tell what was done, begins anew with the
//! next service, and nothing is sent to it before.
#![allow(clippy::unwrap_used, reason = "tests")]

mod rig;

use martlet_device_io::Registers;
use martlet_fault_plan::{FOR_EVER, FaultPlan, Rule};
use martlet_mlx5::DeviceState;
use martlet_mlx5::Options;
use martlet_mlx5::options::Deadlines;
use martlet_mlx5_abi::init_segment::nic_interface;
use martlet_mlx5_abi::{CommandStatus, DeliveryStatus};
use martlet_mlx5_model::{Fault, Faults, Latencies, Model, ModelConfig, Point};
use martlet_soft_bus::{Addressing, SoftBus, SoftClock, Stage};
use martlet_units::Instant;
use martlet_vdpa::{QueueIndex, VdpaDevice, VdpaError};
use rig::Rig;
use rig::guest::Guest;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::time::Duration;

const PAIRS: usize = 2;

fn status(status: CommandStatus) -> Fault {
    Fault::Status { status, syndrome: 0x1234 }
}

fn faults() -> Vec<Fault> {
    let ms = Duration::from_millis;
    vec![
        Fault::Delivery(DeliveryStatus::SIGNATURE),
        Fault::Delivery(DeliveryStatus::FIRMWARE),
        status(CommandStatus::INTERNAL),
        status(CommandStatus::LIMIT),
        status(CommandStatus::NO_RESOURCES),
        status(CommandStatus::RESOURCE_BUSY),
        status(CommandStatus::BAD_RESOURCE_STATE),
        Fault::WrongToken,
        Fault::Lost { executed: false },
        Fault::Lost { executed: true },
        Fault::LostEvent,
        Fault::LostInterrupt,
        Fault::Late(ms(12)),
        Fault::Late(ms(70)),
        Fault::Slow(ms(3)),
        Fault::Slow(ms(70)),
        Fault::Garbage,
        Fault::Hang,
        Fault::Gone,
        Fault::LinkFlap(ms(1)),
        Fault::PageRequest(40),
        Fault::PageRequest(-3),
    ]
}

/// How long the firmware takes.
#[derive(Clone, Copy, Debug)]
enum Time {
    /// No time at all: answers come before anything else happens.
    None,
    /// As long as the series measured: many commands are out at a time.
    Series,
}

/// A device that is about to do what is tested.
fn begin(name: &str, resumable: bool, time: Time) -> Rig {
    let latencies = match time {
        Time::None => Latencies::zero(),
        Time::Series => Latencies::connectx6dx_from_series(),
    };
    let config = ModelConfig { queues: 8, resumable, latencies, ..ModelConfig::default() };
    // Deadlines that are short in the test's own time as well.
    let ms = Duration::from_millis;
    let deadlines = Deadlines { queues: ms(20), memory: ms(100), setup: ms(150) };
    let options = Options { deadlines, ..Options::MARTLET };
    let mut rig = Rig::new(config, options, PAIRS, 65_530);
    match name {
        "start" | "prepare" => {}
        "arrive" => rig.device.prepare().unwrap(),
        "grow" => {
            rig.device.set_queue_pairs(1).unwrap();
            rig.device.start().unwrap();
            rig.pairs = 1;
            rig.assert_frames_flow();
        }
        _ => {
            rig.device.start().unwrap();
            rig.assert_frames_flow();
        }
    }
    if name == "resume" {
        rig.guest.offer(PAIRS);
        rig.suspend().unwrap();
    }
    rig
}

fn act(name: &str, rig: &mut Rig) -> Result<(), VdpaError> {
    match name {
        "start" => rig.device.start(),
        "prepare" => rig.device.prepare(),
        "arrive" | "resume" => rig.resume(),
        "suspend" => {
            rig.guest.offer(PAIRS);
            rig.suspend()
        }
        "set_map" => {
            // The same memory once more, further up: every queue gets another key.
            let mut map = rig.map();
            let mut above = map[0].clone();
            above.iova.0 = 1 << 31;
            map.push(above);
            rig.device.set_map(&map)
        }
        "shrink" => rig.device.set_queue_pairs(1).inspect(|()| rig.pairs = 1),
        "grow" => rig.device.set_queue_pairs(2).inspect(|()| rig.pairs = 2),
        "log" => rig.device.set_dirty_log(true),
        other => unreachable!("{other}"),
    }
}

/// Gets the device to pass frames, the way that the condition allows.
fn recover(name: &str, rig: &mut Rig, outcome: &Result<(), VdpaError>) {
    match (rig.device.state(), name) {
        (DeviceState::Suspended, "suspend") => {
            assert!(outcome.is_ok());
            for (queue, state) in (0..4).zip(rig.states()) {
                assert_eq!(state, rig.guest.at(queue), "queue {queue}");
            }
            let before = rig.model.stats().frames_sent;
            rig.exchange(2);
            assert_eq!(rig.model.stats().frames_sent, before, "it stands");
            rig.resume().unwrap();
        }
        (DeviceState::Running, _) => {}
        (DeviceState::Idle | DeviceState::Prepared, "start") => {
            assert!(outcome.is_err());
            rig.device.start().unwrap();
        }
        (DeviceState::Idle, "prepare") => {
            assert!(outcome.is_err());
            let again = rig.device.prepare();
            again.unwrap_or_else(|error| panic!("{error} after {outcome:?}"));
            rig.resume().unwrap();
        }
        (DeviceState::Prepared, "prepare") => rig.resume().unwrap(),
        (state, name) => panic!("{name} left the device {state:?}: {outcome:?}"),
    }
}

fn gone(rig: Rig) {
    // Noticed or not: at the latest when it is asked for something.
    let suspended = rig.suspend();
    assert!(suspended.is_err(), "a device that is gone says so");
    let _ = rig.device.reset();
    rig.device.service();
    rig.device.kick(QueueIndex(0));
    drop(rig.device);
}

fn one(name: &str, fault: Fault, command: u64, resumable: bool, time: Time) -> bool {
    let mut rig = begin(name, resumable, time);
    rig.model.with_faults(|faults| *faults = FaultPlan::once(Point::Any, command, fault));
    let outcome = act(name, &mut rig);
    let struck = rig.model.with_faults(|faults| {
        let struck = faults.struck();
        faults.clear();
        struck
    });
    if rig.model.is_gone() {
        gone(rig);
        return struck > 0;
    }
    // The firmware comes to itself, and the link; late answers come, and what was not answered begins
    // anew.
    rig.guest.takes_repeats = outcome.is_err();
    rig.pass(Duration::from_millis(150));
    // What a wrong number does is seen when something is asked of it.
    if fault == Fault::Garbage && outcome.is_ok() {
        rig.guest.takes_repeats = true;
        let _ = (name == "prepare" || name == "suspend").then(|| rig.resume());
        let _ = rig.suspend().and_then(|()| rig.resume());
        rig.pass(Duration::from_millis(150));
    } else {
        recover(name, &mut rig, &outcome);
    }
    check_all_works(&mut rig);
    // Whatever has happened: after a reset the device is as new.
    rig.device.reset().unwrap();
    rig.set_up();
    rig.device.start().unwrap();
    check_all_works(&mut rig);
    let Rig { device, model, bus, .. } = rig;
    drop(device);
    assert_eq!(model.stats().queues.len(), 0);
    assert_eq!(bus.entries(), 0, "nothing stays pinned or allocated");
    struck > 0
}

/// Frames flow, and it can be suspended.
fn check_all_works(rig: &mut Rig) {
    rig.assert_frames_flow();
    rig.pass(Duration::from_millis(200));
    rig.assert_frames_flow();
    rig.suspend().unwrap();
    rig.resume().unwrap();
    rig.assert_frames_flow();
}

/// Every fault at every command, as long as the command is reached.
fn exhaust(name: &'static str, resumable: bool, time: Time) {
    let mut cases = 0;
    for fault in faults() {
        for command in 0.. {
            let what = format!("{name}: {fault:?} at {command}, {time:?}, resumable: {resumable}");
            let run = std::panic::AssertUnwindSafe(|| one(name, fault, command, resumable, time));
            match std::panic::catch_unwind(run) {
                Ok(true) => cases += 1,
                Ok(false) => break,
                Err(_) => {
                    eprintln!("CASE {what}");
                    panic!("{what}")
                }
            }
        }
    }
    assert!(cases > 20, "{name}: {cases} cases");
}

macro_rules! operations {
    ($($test:ident: $name:literal, $resumable:literal, $time:ident;)*) => {
        $(
            #[test]
            fn $test() {
                exhaust($name, $resumable, Time::$time);
            }
        )*
    };
}

operations! {
    suspend: "suspend", true, None;
    suspend_without_resume: "suspend", false, None;
    resume: "resume", true, None;
    resume_without_resume: "resume", false, None;
    arrive: "arrive", true, None;
    arrive_without_resume: "arrive", false, None;
    set_map: "set_map", true, None;
    set_map_without_resume: "set_map", false, None;
    shrink: "shrink", true, None;
    grow: "grow", true, None;
    start: "start", true, None;
    prepare: "prepare", true, None;
    log: "log", true, None;
    suspend_in_time: "suspend", true, Series;
    suspend_without_resume_in_time: "suspend", false, Series;
    resume_in_time: "resume", true, Series;
    resume_without_resume_in_time: "resume", false, Series;
    arrive_in_time: "arrive", true, Series;
    set_map_in_time: "set_map", true, Series;
    grow_in_time: "grow", true, Series;
    start_in_time: "start", true, Series;
}

/// What is written to the command doorbell and to the command page's address.
struct Watched {
    registers: Arc<dyn Registers>,
    doorbells: AtomicU32,
    pages: AtomicU32,
}

impl Registers for Watched {
    fn read32(&self, offset: u64) -> u32 {
        self.registers.read32(offset)
    }

    fn write32(&self, offset: u64, value: u32) {
        match offset {
            0x14 => _ = self.pages.fetch_add(1, Ordering::Relaxed),
            0x18 => _ = self.doorbells.fetch_add(1, Ordering::Relaxed),
            _ => {}
        }
        self.registers.write32(offset, value);
    }

    fn read64(&self, offset: u64) -> u64 {
        self.registers.read64(offset)
    }

    fn write64(&self, offset: u64, value: u64) {
        self.registers.write64(offset, value);
    }
}

#[test]
fn nothing_is_sent_to_a_function_that_does_not_answer() {
    for number in 0..12 {
        let stage = Stage::new(SoftClock::virtual_from(Instant(1_000_000)));
        let bus = SoftBus::new(Addressing::Iommu);
        let config = ModelConfig { queues: 8, ..ModelConfig::default() };
        let model = Model::new(config, Arc::clone(&bus) as _, stage.clock());
        let watched = Arc::new(Watched {
            registers: model.registers(),
            doorbells: AtomicU32::new(0),
            pages: AtomicU32::new(0),
        });
        let registers = Arc::clone(&watched) as Arc<dyn Registers>;
        let mut rig =
            Rig::through(&stage, model, bus, registers, Options::MARTLET, Guest::new(PAIRS, 0));
        rig.device.start().unwrap();
        rig.assert_frames_flow();
        rig.model.with_faults(|faults| *faults = FaultPlan::once(Point::Any, number, Fault::Hang));
        let mut failed = rig.suspend().is_err();
        if !failed {
            failed = rig.resume().is_err();
        }
        assert!(failed, "at command {number}");
        assert_eq!(rig.device.state(), DeviceState::Running);
        let count =
            || (watched.doorbells.load(Ordering::Relaxed), watched.pages.load(Ordering::Relaxed));
        let before = count();
        assert!(rig.suspend().is_err() && rig.resume().is_err());
        assert!(rig.device.set_dirty_log(true).is_err());
        assert!(rig.device.set_queue_pairs(1).is_err());
        let mut map = rig.map();
        map[0].iova.0 = 1 << 31;
        assert!(rig.device.set_map(&map).is_err());
        rig.device.counters();
        assert_eq!(count(), before, "at command {number}");
        // Stopped, and begun anew.
        rig.guest.takes_repeats = true;
        rig.pass(Duration::from_millis(1));
        assert_eq!((count().1 - before.1, rig.device.recoveries().count), (2, 1));
        check_all_works(&mut rig);
        drop(rig.device);
        assert_eq!(rig.bus.entries(), 0);
    }
}

/// A page that the device wrote and did not log before it fell silent must not be missed.
#[test]
fn every_page_is_dirty_after_a_logging_function_has_begun_anew() {
    let mut rig = Rig::running(ModelConfig::default(), Options::MARTLET, PAIRS, 0);
    rig.device.set_dirty_log(true).unwrap();
    rig.model.with_faults(|faults| *faults = FaultPlan::once(Point::Any, 0, Fault::Hang));
    rig.suspend().unwrap_err();
    rig.guest.takes_repeats = true;
    rig.pass(Duration::from_millis(1));
    let taken = |rig: &Rig| {
        let mut pages = BTreeSet::new();
        rig.device.take_dirty(&mut |first, word| {
            pages.extend((0..64).filter(|bit| word >> bit & 1 == 1).map(|bit| first + bit));
        });
        pages.len() as u64
    };
    let all = rig.map()[0].memory.bytes() / 4096;
    assert_eq!(taken(&rig), all);
    assert_eq!(taken(&rig), 0);
    rig.assert_frames_flow();
    assert!((1..all).contains(&taken(&rig)), "it logs again");
}

/// Sees how a function is told to stop, and that nothing is taken from the bus before it says that
/// it has.
struct Stopping {
    registers: Arc<dyn Registers>,
    bus: Arc<SoftBus>,
    /// Pieces of memory on the bus when it was told.
    entries: AtomicUsize,
    tells: AtomicU32,
    looks: AtomicU32,
}

impl Registers for Stopping {
    fn read32(&self, offset: u64) -> u32 {
        let value = self.registers.read32(offset);
        let interface = nic_interface::from_register(u32::from_be(value));
        if offset == 0x14 && self.tells.load(Ordering::Relaxed) > 0 && interface == 0 {
            self.looks.fetch_add(1, Ordering::Relaxed);
            assert_eq!(self.bus.entries(), self.entries.load(Ordering::Relaxed));
        }
        value
    }

    fn write32(&self, offset: u64, value: u32) {
        let low = u32::from_be(value);
        match (offset, nic_interface::from_register(low)) {
            (0x14, nic_interface::DISABLED) => {
                let before = u32::from_be(self.registers.read32(0x14));
                assert_eq!(low & !0xfff, before & !0xfff, "the address stays");
                self.entries.store(self.bus.entries(), Ordering::Relaxed);
                self.tells.fetch_add(1, Ordering::Relaxed);
            }
            (0x14, _) => self.tells.store(0, Ordering::Relaxed),
            _ => {}
        }
        self.registers.write32(offset, value);
    }

    fn read64(&self, offset: u64) -> u64 {
        self.registers.read64(offset)
    }

    fn write64(&self, offset: u64, value: u64) {
        self.registers.write64(offset, value);
    }
}

/// A running device whose firmware has hung at a suspend.
fn hung(disable_time: Duration) -> (Rig, Arc<Stopping>) {
    let stage = Stage::new(SoftClock::virtual_from(Instant(1_000_000)));
    let bus = SoftBus::new(Addressing::Iommu);
    let config = ModelConfig { queues: 8, disable_time, ..ModelConfig::default() };
    let model = Model::new(config, Arc::clone(&bus) as _, stage.clock());
    let stopping = Arc::new(Stopping {
        registers: model.registers(),
        bus: Arc::clone(&bus),
        entries: AtomicUsize::new(0),
        tells: AtomicU32::new(0),
        looks: AtomicU32::new(0),
    });
    let registers = Arc::clone(&stopping) as Arc<dyn Registers>;
    let guest = Guest::new(PAIRS, 0);
    let mut rig = Rig::through(&stage, model, bus, registers, Options::MARTLET, guest);
    rig.device.start().unwrap();
    rig.assert_frames_flow();
    rig.model.with_faults(|faults| *faults = FaultPlan::once(Point::Any, 0, Fault::Hang));
    rig.suspend().unwrap_err();
    rig.guest.takes_repeats = true;
    (rig, stopping)
}

#[test]
fn nothing_is_freed_before_a_function_says_that_it_has_stopped() {
    let time = Duration::from_millis(20);
    let (mut rig, stopping) = hung(time);
    let begin = rig.now();
    rig.pass(Duration::from_millis(1));
    assert!(rig.now().since(begin) >= time && stopping.looks.load(Ordering::Relaxed) > 1);
    assert_eq!(rig.device.recoveries().count, 1);
    check_all_works(&mut rig);
    assert_eq!(rig.model.stats().unexpected_commands, 0);
    drop(rig.device);
    assert_eq!(rig.bus.entries(), 0);
}

/// A plan by which the function is never disabled.
fn never() -> Faults {
    let (at, fault) = (Point::Disable, Fault::NeverDisables);
    FaultPlan::script([Rule { at, skip: 0, times: FOR_EVER, fault }])
}

#[test]
fn a_function_that_does_not_stop_keeps_its_memory() {
    let (rig, stopping) = hung(Duration::ZERO);
    rig.model.with_faults(|faults| *faults = never());
    let (entries, pinned) = (rig.bus.entries(), rig.device.memory_counters().pinned_bytes);
    let begin = rig.now();
    rig.pass(Duration::from_millis(1));
    assert!(rig.now().since(begin) >= Duration::from_secs(3));
    let error = rig.suspend().unwrap_err().to_string();
    assert!(error.contains("has not stopped"), "{error}");
    assert_eq!(rig.device.state(), DeviceState::Running);
    // Later attempts only look.
    let begin = rig.now();
    let error = rig.device.reset().unwrap_err().to_string();
    assert!(error.contains("has not stopped in 3000 ms"), "{error}");
    let error = rig.device.start().unwrap_err().to_string();
    assert!(error.contains("has not stopped"), "{error}");
    rig.pass(Duration::from_secs(5));
    assert!(rig.now().since(begin) < Duration::from_secs(7));
    assert_eq!(stopping.tells.load(Ordering::Relaxed), 1);
    assert_eq!(rig.device.recoveries().count, 0);
    assert!(rig.bus.entries() >= entries);
    assert!(pinned > 0 && rig.device.memory_counters().pinned_bytes >= pinned);
    assert!(!rig.model.stats().queues.is_empty(), "it goes on");
    let Rig { device, bus, model, .. } = rig;
    drop(device);
    assert!(bus.entries() >= entries, "for as long as the process lives");
    assert_eq!(model.stats().unexpected_commands, 0, "and nothing new is begun");
}

#[test]
fn a_function_that_stops_late_begins_anew() {
    let (mut rig, _) = hung(Duration::from_secs(10));
    rig.pass(Duration::from_secs(5));
    assert_eq!(rig.device.recoveries().count, 0);
    rig.pass(Duration::from_secs(8));
    assert_eq!(rig.device.recoveries().count, 1);
    check_all_works(&mut rig);
    drop(rig.device);
    assert_eq!(rig.bus.entries(), 0, "what was kept is free");
}
