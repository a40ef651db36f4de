//! A card as its driver sees it, register by register.

use super::registers::{self as at, status};
use super::*;
use crate::devices::PulseIrq;
use crate::memory::GuestMemory;
use crate::tests::loopback::{Loopback, Trouble};
use martlet_ram::GuestRam;
use martlet_units::{Gfn, Gpa, PageCount, PageRange};
use martlet_vdpa::virtio::feature;
use proptest::prelude::*;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

const PAGES: u64 = 64;
const OK: u32 = 1 | 2 | status::FEATURES_OK | status::DRIVER_OK;
/// Where the tests put things.
const CONTROL: u64 = 0x2_0000;
const COMMAND: u64 = 0x2_2000;
const ANSWER: u64 = 0x2_3000;

/// Stands in for a driver in a guest.
struct Driver {
    nics: Nics,
    memory: Arc<GuestMemory>,
    device: Arc<Loopback>,
    pulses: Arc<AtomicU32>,
    commands: u16,
}

impl Driver {
    fn new(pairs: u16) -> Driver {
        Driver::of(Loopback::new(7, pairs))
    }

    fn of(device: Arc<Loopback>) -> Driver {
        let range = PageRange::try_new(Gfn(0), PageCount(PAGES)).unwrap();
        let memory = Arc::new(GuestMemory::new(Arc::new(GuestRam::create(&[range]).unwrap())));
        let lease = Devices::new(vec![Arc::clone(&device) as _]).lend().unwrap();
        let nics = Nics::new(lease, &memory).unwrap();
        let pulses: Arc<AtomicU32> = Arc::default();
        let count = Arc::clone(&pulses);
        let pulse: PulseIrq = Arc::new(move |line: u32| {
            assert_eq!(line, 5_u32);
            count.fetch_add(1, Ordering::SeqCst);
        });
        nics.connect(&pulse);
        Driver { nics, memory, device, pulses, commands: 0 }
    }

    fn read(&self, offset: u64) -> u32 {
        let mut data = [0; 4];
        assert!(self.nics.read(MMIO_START + offset, &mut data));
        u32::from_le_bytes(data)
    }

    fn write(&self, offset: u64, value: u32) {
        self.nics.write(MMIO_START + offset, &value.to_le_bytes());
    }

    fn choose_features(&self, features: u64) -> bool {
        self.write(at::STATUS, 0);
        self.write(at::STATUS, 1);
        self.write(at::STATUS, 3);
        for (select, shift) in [(0, 0), (1, 32)] {
            self.write(at::DRIVER_FEATURES_SELECT, select);
            self.write(
                at::DRIVER_FEATURES,
                u32::try_from(features >> shift & 0xffff_ffff).unwrap(),
            );
        }
        self.write(at::STATUS, 3 | status::FEATURES_OK);
        self.read(at::STATUS) & status::FEATURES_OK != 0
    }

    fn set_queue(&self, number: u32, size: u32, place: u64) -> bool {
        self.write(at::QUEUE_SELECT, number);
        self.write(at::QUEUE_SIZE, size);
        let low = |address: u64| u32::try_from(address).unwrap();
        self.write(at::QUEUE_DESCRIPTORS_LOW, low(place));
        self.write(at::QUEUE_DRIVER_LOW, low(place + 0x800));
        self.write(at::QUEUE_DEVICE_LOW, low(place + 0x1000));
        self.write(at::QUEUE_READY, 1);
        self.read(at::QUEUE_READY) == 1
    }

    /// All queues and the control queue, up to DRIVER_OK.
    fn set_up(&self) {
        let features = ALL;
        assert!(self.choose_features(features));
        for queue in 0..4 {
            assert!(self.set_queue(queue, 16, 0x1_0000 + u64::from(queue) * 0x2000));
        }
        assert!(self.set_queue(4, 16, CONTROL));
        self.write(at::STATUS, OK);
    }

    fn put(&self, gpa: u64, bytes: &[u8]) {
        assert!(self.memory.write(Gpa(gpa), bytes));
    }

    fn get<const N: usize>(&self, gpa: u64) -> [u8; N] {
        let mut bytes = [0; N];
        assert!(self.memory.read(Gpa(gpa), &mut bytes));
        bytes
    }

    fn describe(&self, slot: u64, address: u64, length: u32, flags: u16, next: u16) {
        let at = CONTROL + slot * 16;
        self.put(at, &address.to_le_bytes());
        self.put(at + 8, &length.to_le_bytes());
        self.put(at + 12, &flags.to_le_bytes());
        self.put(at + 14, &next.to_le_bytes());
    }

    /// Puts a command into the control queue and tells the card.
    fn command(&mut self, bytes: &[u8]) {
        self.put(COMMAND, bytes);
        self.put(ANSWER, &[0xff]);
        self.describe(0, COMMAND, u32::try_from(bytes.len()).unwrap(), 1, 1);
        self.describe(1, ANSWER, 1, 2, 0);
        self.offer(0);
    }

    fn offer(&mut self, head: u16) {
        let slot = u64::from(self.commands % 16);
        self.put(CONTROL + 0x804 + slot * 2, &head.to_le_bytes());
        self.commands = self.commands.wrapping_add(1);
        self.put(CONTROL + 0x802, &self.commands.to_le_bytes());
        self.write(at::QUEUE_NOTIFY, 4);
    }

    fn answer(&self) -> u8 {
        self.get::<1>(ANSWER)[0]
    }

    fn needs_reset(&self) -> bool {
        self.read(at::STATUS) & status::NEEDS_RESET != 0
    }
}

const ALL: u64 = feature::VERSION_1 | feature::NET_MAC | feature::NET_MQ | feature::NET_CTRL_VQ;

#[test]
fn a_card_says_what_it_is() {
    let driver = Driver::new(2);
    assert_eq!(driver.read(at::MAGIC_VALUE), 0x7472_6976);
    assert_eq!((driver.read(at::VERSION), driver.read(at::DEVICE_ID)), (2, 1));
    driver.write(at::DEVICE_FEATURES_SELECT, 0);
    let low = driver.read(at::DEVICE_FEATURES);
    assert_eq!(u64::from(low), 1 << 5 | 1 << 16 | 1 << 17 | 1 << 22);
    driver.write(at::DEVICE_FEATURES_SELECT, 1);
    assert_eq!(driver.read(at::DEVICE_FEATURES), 1);
    driver.write(at::DEVICE_FEATURES_SELECT, 2);
    assert_eq!(driver.read(at::DEVICE_FEATURES), 0);
    // No shared memory: its length is all ones.
    assert_eq!((driver.read(0xb0), driver.read(0xb4)), (u32::MAX, u32::MAX));
    // The address, and the number of pairs at bytes 8 and 9, by accesses of any width.
    assert_eq!(driver.read(at::CONFIG), u32::from_le_bytes([2, 0, 0, 0]));
    let mut two = [0; 2];
    assert!(driver.nics.read(MMIO_START + at::CONFIG + 8, &mut two));
    assert_eq!(two, [2, 0]);
    let mut one = [0xff];
    assert!(driver.nics.read(MMIO_START + at::CONFIG + 9, &mut one));
    assert_eq!(one, [0]);
    // Registers are 32 bits wide; other accesses read nothing and change nothing.
    assert!(driver.nics.read(MMIO_START, &mut one));
    assert_eq!(one, [0]);
    driver.nics.write(MMIO_START + at::STATUS, &[1]);
    assert_eq!(driver.read(at::STATUS), 0);
    // There is one card only.
    assert!(!driver.nics.read(MMIO_START + 0x1000, &mut one));
    assert!(!driver.nics.read(0, &mut one) && !driver.nics.read(u64::MAX, &mut one));
}

#[test]
fn features_must_be_offered_and_go_together() {
    let driver = Driver::new(2);
    for bad in [
        0,
        feature::NET_MAC,
        feature::VERSION_1 | feature::NET_MQ,
        feature::VERSION_1 | feature::NET_MRG_RXBUF,
        feature::VERSION_1 | feature::ACCESS_PLATFORM,
        u64::MAX,
    ] {
        assert!(!driver.choose_features(bad), "{bad:#x}");
    }
    assert!(driver.choose_features(ALL));
    // They are fixed then.
    driver.write(at::DRIVER_FEATURES_SELECT, 0);
    driver.write(at::DRIVER_FEATURES, 0);
    driver.set_up();
    assert_eq!(driver.device.features(), Some(ALL | feature::ACCESS_PLATFORM));
    assert!(driver.device.is_running());
    driver.write(at::STATUS, 0);
    assert!(!driver.device.is_running() && driver.device.features().is_none());
    assert_eq!(driver.read(at::STATUS), 0);
}

#[test]
fn a_bad_queue_costs_the_card_until_its_reset() {
    let driver = Driver::new(2);
    for (size, place) in [(0, 0x1_0000), (3, 0x1_0000), (512, 0x1_0000), (16, PAGES * 4096)] {
        assert!(driver.choose_features(ALL));
        assert!(!driver.set_queue(0, size, place));
        assert!(driver.needs_reset());
        // It stays so, and nothing starts.
        assert!(!driver.set_queue(0, 16, 0x1_0000));
        driver.write(at::STATUS, OK);
        assert!(!driver.device.is_running());
    }
    assert_eq!(driver.pulses.load(Ordering::SeqCst), 0);
    driver.set_up();
    assert!(!driver.needs_reset() && driver.device.is_running());
    // Queues are fixed once the driver is ready.
    driver.write(at::QUEUE_SELECT, 0);
    driver.write(at::QUEUE_READY, 0);
    assert_eq!(driver.read(at::QUEUE_READY), 1);
    // A driver that is ready before its features are agreed breaks the card as well.
    driver.write(at::STATUS, 0);
    driver.write(at::STATUS, 3 | status::DRIVER_OK);
    assert!(driver.needs_reset());
}

#[test]
fn a_device_that_does_not_start_is_told() {
    let driver = Driver::new(2);
    driver.device.set_trouble(Trouble { start: true, ..Trouble::default() });
    driver.set_up();
    assert!(driver.needs_reset() && !driver.device.is_running());
    assert_eq!(driver.read(at::INTERRUPT_STATUS), 2);
    driver.device.set_trouble(Trouble::default());
    driver.set_up();
    assert!(!driver.needs_reset() && driver.device.is_running());
}

#[test]
fn the_control_queue_sets_pairs_and_nothing_else() {
    let mut driver = Driver::new(2);
    driver.set_up();
    assert_eq!(driver.device.pairs(), 1);
    driver.command(&[4, 0, 2, 0]);
    assert_eq!((driver.answer(), driver.device.pairs()), (0, 2));
    assert_eq!(driver.get::<2>(CONTROL + 0x1002), [1, 0]);
    assert_eq!(driver.get::<8>(CONTROL + 0x1004), [0, 0, 0, 0, 1, 0, 0, 0]);
    assert_eq!((driver.read(at::INTERRUPT_STATUS), driver.pulses.load(Ordering::SeqCst)), (1, 1));
    driver.write(at::INTERRUPT_ACK, 1);
    assert_eq!(driver.read(at::INTERRUPT_STATUS), 0);
    // No interrupts, please.
    driver.put(CONTROL + 0x800, &[1, 0]);
    for refused in [&[4, 0, 3, 0][..], &[4, 0, 0, 0], &[4, 1, 2, 0], &[0, 0, 1], &[4], &[0; 200]] {
        driver.command(refused);
        assert_eq!((driver.answer(), driver.device.pairs()), (1, 2), "{refused:?}");
    }
    driver.command(&[4, 0, 1, 0]);
    assert_eq!((driver.answer(), driver.device.pairs()), (0, 1));
    assert_eq!(driver.pulses.load(Ordering::SeqCst), 1);
    // The command may lie in several buffers, and there may be no answer.
    driver.put(COMMAND, &[4, 0, 2, 0]);
    driver.describe(3, COMMAND, 1, 1, 4);
    driver.describe(4, COMMAND + 1, 3, 0, 0);
    driver.offer(3);
    assert_eq!(driver.device.pairs(), 2);
    assert!(!driver.needs_reset());
}

#[test]
fn a_control_queue_that_makes_no_sense_costs_the_card() {
    let circle = |driver: &Driver| {
        driver.describe(0, COMMAND, 4, 1, 1);
        driver.describe(1, COMMAND, 4, 1, 0);
    };
    let outside = |driver: &Driver| driver.describe(0, PAGES * 4096 - 2, 4, 0, 0);
    let wraps = |driver: &Driver| driver.describe(0, u64::MAX, 4, 0, 0);
    let answer = |driver: &Driver| driver.describe(0, u64::MAX, 4, 2, 0);
    let next = |driver: &Driver| driver.describe(0, COMMAND, 4, 1, 16);
    let too_many = |driver: &Driver| driver.put(CONTROL + 0x802, &[200, 0]);
    let cases: [&dyn Fn(&Driver); 6] = [&circle, &outside, &wraps, &answer, &next, &too_many];
    for (case, make) in cases.into_iter().enumerate() {
        let mut driver = Driver::new(2);
        driver.set_up();
        make(&driver);
        if case == 5 {
            driver.write(at::QUEUE_NOTIFY, 4);
        } else {
            driver.offer(0);
        }
        assert!(driver.needs_reset(), "case {case}");
        assert_eq!(driver.read(at::INTERRUPT_STATUS) & 2, 2);
        driver.set_up();
        assert!(!driver.needs_reset());
    }
}

#[test]
fn what_the_driver_does_while_devices_stand_is_made_up_for() {
    let mut driver = Driver::new(2);
    driver.set_up();
    driver.nics.begin_suspend();
    driver.nics.wait_suspended().unwrap();
    driver.command(&[4, 0, 2, 0]);
    assert_eq!((driver.answer(), driver.device.pairs()), (0xff, 1));
    driver.nics.resume().unwrap();
    assert_eq!((driver.answer(), driver.device.pairs()), (0, 2));
    // A card that is set up meanwhile begins with the others.
    driver.nics.begin_suspend();
    driver.nics.wait_suspended().unwrap();
    driver.set_up();
    assert!(!driver.device.is_running() && !driver.needs_reset());
    let saved = driver.nics.save(false).unwrap();
    assert!(saved[0].runs && saved[0].indices.as_ref().is_some_and(|all| all.len() == 4));
    driver.nics.resume().unwrap();
    assert!(driver.device.is_running());
    // A card that runs can't leave.
    assert_eq!(driver.nics.save(false), Err("network card 0 does not stand".into()));
    assert!(driver.nics.save(true).unwrap()[0].indices.is_none());
    // Nobody has to wait for the suspend.
    driver.nics.begin_suspend();
    driver.nics.resume().unwrap();
    assert!(driver.device.is_running());
    // A card may be reset at any moment.
    driver.nics.begin_suspend();
    driver.write(at::STATUS, 0);
    driver.nics.wait_suspended().unwrap();
    assert!(driver.device.features().is_none());
    driver.nics.resume().unwrap();
    assert!(!driver.device.is_running());
}

#[test]
fn changes_of_the_link_ring() {
    let driver = Driver::new(1);
    assert!(driver.choose_features(feature::VERSION_1 | feature::NET_MAC));
    // With one pair there is no control queue, and queue 2 is nothing.
    driver.write(at::QUEUE_SELECT, 2);
    assert_eq!(driver.read(at::QUEUE_SIZE_MAX), 0);
    assert!(driver.set_queue(0, 16, 0x1_0000) && driver.set_queue(1, 16, 0x1_2000));
    driver.write(at::STATUS, OK);
    let (generation, config) = (driver.read(at::CONFIG_GENERATION), driver.read(at::CONFIG + 4));
    assert_eq!(config >> 16, 1);
    driver.device.set_link(false);
    assert_ne!(driver.read(at::CONFIG_GENERATION), generation);
    assert_eq!(driver.read(at::CONFIG + 4) >> 16, 0);
    assert_eq!((driver.read(at::INTERRUPT_STATUS), driver.pulses.load(Ordering::SeqCst)), (2, 1));
    driver.write(at::INTERRUPT_ACK, 2);
    assert_eq!(driver.read(at::INTERRUPT_STATUS), 0);
}

/// Cards of a destination with the same memory.
fn waiting(from: &Driver) -> (Nics, Arc<Loopback>) {
    let device = Loopback::new(7, 2);
    let lease = Devices::new(vec![Arc::clone(&device) as _]).lend().unwrap();
    (Nics::waiting(lease, &from.memory, &from.nics.kinds()).unwrap(), device)
}

#[test]
fn only_what_has_changed_is_prepared_again() {
    let mut driver = Driver::new(2);
    let (target, device) = waiting(&driver);
    let rehearse = |driver: &Driver| {
        target.load(&driver.nics.save(true).unwrap()).unwrap();
        device.take_calls()
    };
    assert_eq!(rehearse(&driver), Vec::<&str>::new());
    driver.set_up();
    let first = ["set_features", "set_map", "set_queue_pairs", "prepare"];
    assert_eq!(rehearse(&driver), first);
    assert_eq!(rehearse(&driver), Vec::<&str>::new());
    driver.command(&[4, 0, 2, 0]);
    assert_eq!(rehearse(&driver), ["set_queue_pairs", "prepare"]);
    driver.write(at::STATUS, 0);
    assert_eq!(rehearse(&driver), ["reset"]);
    driver.set_up();
    assert_eq!(rehearse(&driver), first);
    // Another queue is another card.
    driver.write(at::STATUS, 0);
    assert!(driver.choose_features(ALL));
    assert!(driver.set_queue(0, 32, 0x1_0000) && driver.set_queue(1, 16, 0x1_2000));
    driver.write(at::STATUS, OK);
    assert_eq!(rehearse(&driver), [&["reset"], &first[..]].concat());
}

#[test]
fn hostile_states_are_refused() {
    let driver = Driver::new(2);
    driver.set_up();
    driver.nics.begin_suspend();
    driver.nics.wait_suspended().unwrap();
    let good = driver.nics.save(false).unwrap().remove(0);
    let (target, _device) = waiting(&driver);
    let refused = |change: &dyn Fn(&mut SavedNic)| {
        let mut saved = good.clone();
        change(&mut saved);
        target.load(&[saved]).unwrap_err()
    };
    assert_eq!(refused(&|saved| saved.pairs = 3), "network card 0: 3 queue pairs in use");
    assert_eq!(refused(&|saved| saved.pairs = 0), "network card 0: 0 queue pairs in use");
    assert_eq!(
        refused(&|saved| saved.driver_features |= 1 << 40),
        "network card 0: features 0x10000000000 that it does not offer"
    );
    let driverless = "network card 0: it runs without its driver";
    assert_eq!(refused(&|saved| saved.status = 3), driverless);
    assert_eq!(refused(&|saved| saved.driver_features = 0), driverless);
    assert_eq!(refused(&|saved| saved.queues.truncate(3)), "network card 0: 3 queues, it has 5");
    assert_eq!(
        refused(&|saved| saved.indices.as_mut().unwrap().truncate(1)),
        "network card 0: indices of 1 queues, it has 4"
    );
    let error = refused(&|saved| {
        let queue = super::queue::Queue { size: 16, ready: true, ..Default::default() };
        let queue = super::queue::Queue { driver: 1 << 40, ..queue };
        saved.queues[1] = (&queue).into();
    });
    assert!(error.starts_with("network card 0: queue 1: driver's ring: "), "{error}");
    assert_eq!(target.load(&[]).unwrap_err(), "0 network cards for 1");
    target.load(&[good]).unwrap();
}

#[derive(Clone, Debug)]
enum Step {
    Write(u64, u32),
    WriteOther(u64, Vec<u8>),
    Read(u64, usize),
    Memory(u64, u16),
    SetUp,
    Suspend,
    Resume,
}

fn step() -> impl Strategy<Value = Step> {
    let register = prop_oneof![
        Just(at::STATUS),
        Just(at::QUEUE_SELECT),
        Just(at::QUEUE_SIZE),
        Just(at::QUEUE_READY),
        Just(at::QUEUE_NOTIFY),
        (0u64..0x110).prop_map(|offset| offset & !3),
        0u64..0x1000,
    ];
    let value = prop_oneof![0u32..20, any::<u32>(), (0u32..0x40).prop_map(|page| page << 12)];
    prop_oneof![
        8 => (register.clone(), value).prop_map(|(offset, value)| Step::Write(offset, value)),
        1 => (register.clone(), proptest::collection::vec(any::<u8>(), 0..9))
            .prop_map(|(offset, data)| Step::WriteOther(offset, data)),
        2 => (register, 0usize..9).prop_map(|(offset, length)| Step::Read(offset, length)),
        // The control queue's rings and whatever else is there.
        4 => (0u64..0x1800, prop_oneof![0u16..20, any::<u16>()])
            .prop_map(|(offset, value)| Step::Memory(CONTROL + (offset & !1), value)),
        2 => Just(Step::SetUp),
        1 => Just(Step::Suspend),
        1 => Just(Step::Resume),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// Whatever a guest writes wherever, the machine lives and keeps to what it owes the device
    /// (which asserts that), and a reset cures the card.
    #[test]
    fn hostile_guests_cost_themselves_a_card(steps in proptest::collection::vec(step(), 1..60)) {
        let driver = Driver::new(2);
        driver.device.set_trouble(Trouble { inert: true, ..Trouble::default() });
        for step in steps {
            match step {
                Step::Write(offset, value) => driver.write(offset, value),
                Step::WriteOther(offset, data) => driver.nics.write(MMIO_START + offset, &data),
                Step::Read(offset, length) => {
                    driver.nics.read(MMIO_START + offset, &mut vec![0; length]);
                }
                Step::Memory(gpa, value) => driver.put(gpa, &value.to_le_bytes()),
                Step::SetUp => driver.set_up(),
                Step::Suspend => {
                    driver.nics.begin_suspend();
                    driver.nics.wait_suspended().unwrap();
                    driver.nics.save(false).unwrap();
                }
                Step::Resume => driver.nics.resume().unwrap(),
            }
        }
        driver.nics.resume().unwrap();
        driver.set_up();
        prop_assert!(driver.device.is_running() && !driver.needs_reset());
    }
}

#[test]
fn a_guest_that_does_not_listen_is_not_told_all_the_time() {
    let driver = Driver::new(1);
    let interrupts = driver.nics.interrupts(0);
    for _ in 0..1000 {
        interrupts.ring_queue();
    }
    let told = driver.pulses.load(Ordering::SeqCst);
    assert!((1..1000).contains(&told), "{told}");
    driver.write(at::INTERRUPT_ACK, 1);
    interrupts.ring_queue();
    assert!(driver.pulses.load(Ordering::SeqCst) > told);
}
