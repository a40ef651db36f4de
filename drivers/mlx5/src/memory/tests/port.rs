//! Keys through a real command queue: commands as bytes in entries and mailboxes, and a device that
//! answers when it likes, late or never.
#![allow(clippy::unwrap_used, reason = "tests")]

use super::support::{NULL_KEY, PAGE, PD, World, config, fake_memory, run};
use crate::command::{CommandQueue, Request};
use crate::memory::{Issued, KeyAnswer, KeyContext, KeyPort, MapRef, MemoryConfig};
use martlet_device_io::{BusAddress, BusMemory};
use martlet_mlx5_abi::Opcode;
use martlet_mlx5_abi::init_segment::CommandQueueShape;
use martlet_soft_bus::{Addressing, SoftBus};
use martlet_units::Instant;
use martlet_vdpa::{Access, HostMemory, MapRun, VdpaError};
use proptest::prelude::*;
use std::sync::Arc;
use std::time::Duration;

const DEADLINE: Duration = Duration::from_millis(100);

/// How a command is answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Answer {
    Good,
    Status(u8),
    Delivery(u8),
    BadToken,
    Never,
}

struct Setup {
    bus: Arc<SoftBus>,
    queue: CommandQueue,
    /// Slots that the device has.
    owned: u32,
    world: World,
    port: KeyPort,
    now: Instant,
    answers: Vec<(usize, Answer)>,
    answered: usize,
}

impl Setup {
    fn new(config: MemoryConfig, mailbox_bytes_max: usize) -> Setup {
        let bus = SoftBus::new(Addressing::Iommu);
        let shape = CommandQueueShape { log_entries: 5, log_stride: 6 };
        let queue = CommandQueue::new(bus.clone(), shape, mailbox_bytes_max).unwrap().unwrap();
        let context = KeyContext { pd: PD, null_key: NULL_KEY };
        Setup {
            bus,
            queue,
            owned: 0,
            world: World::default(),
            port: KeyPort::new(config, context, DEADLINE),
            now: Instant(1_000_000),
            answers: Vec::new(),
            answered: 0,
        }
    }

    fn entry(&self, slot: u32) -> (u64, [u8; 64]) {
        let at = self.queue.page_at().0 + u64::from(slot) * 64;
        let mut entry = [0; 64];
        self.bus.read(BusAddress(at), &mut entry).unwrap();
        (at, entry)
    }

    fn input(&self, slot: u32) -> Vec<u8> {
        let (_, entry) = self.entry(slot);
        let bytes = usize::try_from(u32::from_be_bytes(entry[4..8].try_into().unwrap())).unwrap();
        let mut input = entry[16..32].to_vec();
        let mut next = u64::from_be_bytes(entry[8..16].try_into().unwrap());
        while next != 0 {
            let mut mailbox = [0; 576];
            self.bus.read(BusAddress(next), &mut mailbox).unwrap();
            input.extend(&mailbox[..512]);
            next = u64::from_be_bytes(mailbox[560..568].try_into().unwrap());
        }
        input.truncate(bytes);
        input
    }

    /// Executes and answers the command in a slot.
    fn answer(&mut self, slot: u32, how: Answer) {
        let (at, entry) = self.entry(slot);
        let mut output = [0; 16];
        if let Answer::Status(status) = how {
            output[0] = status;
        } else if !matches!(how, Answer::Delivery(_)) {
            let input = self.input(slot);
            let mut books = self.world.books();
            let is_key = input[..2] != [0x09, 0x16];
            if is_key && let KeyAnswer::Done { index } = books.execute(&input) {
                output[8..12].copy_from_slice(&index.to_be_bytes());
                if how == Answer::BadToken {
                    books.lost.push(index);
                }
            }
        }
        self.bus.write(BusAddress(at + 0x20), &output).unwrap();
        let token = if how == Answer::BadToken { entry[0x3c] ^ 1 } else { entry[0x3c] };
        self.bus.store8(BusAddress(at + 0x3c), token).unwrap();
        let delivery = if let Answer::Delivery(status) = how { status << 1 } else { 0 };
        self.bus.store8(BusAddress(at + 0x3f), delivery).unwrap();
        self.owned &= !(1 << slot);
    }

    /// Lets the port and the device go on by one step each; whether anything happened.
    fn step(&mut self) -> bool {
        let mut issued = false;
        while self.port.poll(self.now, &mut self.queue, &self.world) == Issued::One {
            self.owned |= self.queue.poll_doorbell().unwrap();
            issued = true;
        }
        let how = |setup: &Setup| {
            let number = setup.answered;
            setup.answers.iter().find(|(at, _)| *at == number).map_or(Answer::Good, |(_, a)| *a)
        };
        // What will never be answered stays; the lowest of the others is next.
        while self.owned != 0 {
            let slot = self.owned.trailing_zeros();
            let answer = how(self);
            self.answered += 1;
            if answer == Answer::Never {
                self.owned &= !(1 << slot);
                continue;
            }
            self.answer(slot, answer);
            self.queue.on_completion(self.now, 1 << slot);
            return true;
        }
        issued
    }

    /// Lets time pass until the next deadline; whether there is one.
    fn wait(&mut self) -> bool {
        let due = [self.queue.poll_timeout(), self.port.poll_timeout(self.now)];
        let Some(due) = due.into_iter().flatten().min() else { return false };
        self.now = Instant(self.now.0.max(due.0));
        self.queue.on_timeout(self.now);
        true
    }

    fn set_map(&mut self, runs: &[MapRun]) -> Result<Option<MapRef>, VdpaError> {
        self.port.registry_mut().begin_set_map(runs)?;
        loop {
            let happened = self.step();
            if let Some(outcome) = self.port.registry_mut().poll_set_map() {
                if let Ok(map) = &outcome {
                    self.port.registry_mut().install(map.clone());
                }
                return outcome;
            }
            assert!(happened || self.wait(), "a set_map comes to an end");
        }
    }

    /// Until nothing is left to do.
    fn settle(&mut self) {
        loop {
            while self.step() {}
            while self.port.registry_mut().release_one() {}
            if !self.wait() {
                return;
            }
        }
    }

    /// Answers all that were never answered.
    fn answer_late(&mut self, how: Answer) {
        for slot in 0..31 {
            let (_, entry) = self.entry(slot);
            if entry[0x3f] & 1 == 1 {
                self.answer(slot, how);
            }
        }
        self.queue.on_poll(self.now);
        while let Some(late) = self.queue.poll_late() {
            assert!(self.port.on_late(&late));
        }
    }
}

fn memory() -> HostMemory {
    fake_memory(1 << 32, 1 << 30)
}

/// Three pieces.
fn map(memory: &HostMemory, offset: u64) -> Vec<MapRun> {
    vec![run(0, memory, offset * PAGE, 48 * PAGE, Access::ReadWrite)]
}

#[test]
fn a_long_list_goes_through_mailboxes() {
    let mut setup = Setup::new(MemoryConfig::default(), 64 << 20);
    setup.world.books().fragments = vec![1, 3, 2];
    let memory = memory();
    let runs = [run(0, &memory, 0, 64 << 20, Access::Read)];
    let map = setup.set_map(&runs).unwrap().unwrap();
    let books = setup.world.books();
    for page in [0, 1, 63, 64, 16383] {
        let found = books.translate(map.key(), page * PAGE + 7, Access::Read);
        assert_eq!(found, Some((1 << 32) + page * PAGE + 7));
    }
}

#[test]
fn a_window_of_commands_shares_the_queue_with_others() {
    let mut setup = Setup::new(MemoryConfig { create_window: 24, ..config(1) }, 1 << 20);
    // Another user has taken most slots and does not give them back for long.
    let mut input = [0; 16];
    input[..2].copy_from_slice(&[0x09, 0x16]);
    for _ in 0..29 {
        let request = Request::with_output(Opcode::CREATE_RQT, &input, 16);
        setup.queue.submit(setup.now, DEADLINE, &request).unwrap();
    }
    setup.queue.poll_doorbell();
    let memory = memory();
    setup.set_map(&[run(0, &memory, 0, 30 * PAGE, Access::ReadWrite)]).unwrap();
    assert_eq!(setup.port.registry().counters().create_depth_max, 3);
    assert_eq!(setup.queue.stats().of(Opcode::CREATE_MKEY).in_flight_max, 2);
    // Alone, the window is the limit.
    setup.queue.on_timeout(setup.now.after(DEADLINE));
    for slot in 0..31 {
        setup.answer(slot, Answer::Status(0));
    }
    setup.queue.on_poll(setup.now);
    setup.set_map(&[run(0, &memory, 100 * PAGE, 30 * PAGE, Access::ReadWrite)]).unwrap();
    assert_eq!(setup.queue.stats().of(Opcode::CREATE_MKEY).in_flight_max, 24);
}

#[test]
fn few_mailboxes_make_a_small_window_not_a_failure() {
    // 64 mailboxes in all; an input of 2048 entries takes 33.
    let mut setup = Setup::new(config(2048), 64 << 10);
    setup.world.books().fragments = vec![1];
    let memory = memory();
    setup.set_map(&[run(0, &memory, 0, 8 * 2048 * PAGE, Access::ReadWrite)]).unwrap();
    assert_eq!(setup.queue.stats().of(Opcode::CREATE_MKEY).in_flight_max, 1);
    // One that never fits is an error, and not a long wait.
    let runs = [run(1 << 40, &memory, 0, 2048 * PAGE, Access::ReadWrite)];
    let mut small = Setup::new(config(8192), 64 << 10);
    small.world.books().fragments = vec![1];
    let big = [run(1 << 40, &memory, 0, 8192 * PAGE, Access::ReadWrite)];
    assert!(small.set_map(&runs).is_ok());
    assert!(matches!(small.set_map(&big), Err(VdpaError::Host { .. })));
    small.settle();
    assert_eq!(small.world.pinned_bytes(), 2048 * PAGE);
}

#[test]
fn each_answer_means_what_it_says() {
    let memory = memory();
    // LIM_EXCEEDED, NO_RESOURCES, RESOURCE_BUSY, BAD_PARAMETER; in length, signature; token; none.
    let answers = [0x8, 0xf, 0x6, 0x3].map(Answer::Status);
    let answers = answers.into_iter().chain([0x7, 0x1].map(Answer::Delivery));
    for answer in answers.chain([Answer::BadToken, Answer::Never]) {
        for number in 0..4 {
            let mut setup = Setup::new(config(16), 1 << 20);
            setup.set_map(&map(&memory, 0)).unwrap();
            setup.answers.push((4 + number, answer));
            let error = setup.set_map(&map(&memory, 100)).unwrap_err();
            match answer {
                Answer::Never => assert!(matches!(error, VdpaError::Timeout { .. }), "{error}"),
                _ => assert!(matches!(error, VdpaError::Device { .. }), "{error}"),
            }
            setup.settle();
            let unknown = matches!(answer, Answer::BadToken | Answer::Never);
            let abandoned = if unknown && number < 3 { 16 * PAGE } else { 0 };
            let counters = setup.port.registry().counters();
            assert_eq!((counters.keys_live, counters.keys_abandoned), (4, u64::from(unknown)));
            assert_eq!(setup.world.pinned_bytes(), 48 * PAGE + abandoned);
            if answer == Answer::Never {
                // The direct keys behind an indirect one are gone by then.
                let late = if number < 3 { Answer::Good } else { Answer::Status(0x5) };
                setup.answer_late(late);
                setup.settle();
                assert_eq!(setup.world.keys(), 4);
                assert_eq!(setup.world.pinned_bytes(), 48 * PAGE);
            }
            setup.world.no_crimes();
        }
    }
}

#[test]
fn a_late_destruction_unpins() {
    let memory = memory();
    for how in [Answer::Good, Answer::Status(0x5)] {
        let mut setup = Setup::new(config(16), 1 << 20);
        setup.set_map(&map(&memory, 0)).unwrap();
        setup.set_map(&[]).unwrap();
        setup.answers.push((5, Answer::Never));
        setup.settle();
        assert_eq!(setup.world.pinned_bytes(), 16 * PAGE);
        setup.answer_late(how);
        setup.settle();
        let expected = if how == Answer::Good { 0 } else { 16 * PAGE };
        assert_eq!(setup.world.pinned_bytes(), expected);
        setup.world.no_crimes();
    }
}

#[test]
fn a_device_that_answers_nothing_is_an_error_in_time() {
    let memory = memory();
    let mut setup = Setup::new(config(1), 1 << 20);
    setup.answers = (0..200).map(|number| (number, Answer::Never)).collect();
    let begin = setup.now;
    // Every attempt fails, also when no slot is left.
    for _ in 0..40 {
        setup.set_map(&map(&memory, 0)).unwrap_err();
    }
    assert!(setup.now.since(begin) <= DEADLINE * 4);
    // Its answers come after all: nothing is left behind.
    setup.answer_late(Answer::Good);
    setup.answers.clear();
    setup.settle();
    let counters = setup.port.registry().counters();
    assert_eq!((counters.keys_abandoned, counters.backlog_keys), (0, 0));
    assert_eq!((setup.world.keys(), setup.world.pinned_bytes()), (0, 0));
    setup.set_map(&map(&memory, 0)).unwrap();
    setup.world.no_crimes();
}

fn any_answer() -> impl Strategy<Value = Answer> {
    prop_oneof![
        8 => Just(Answer::Good),
        2 => any::<u8>().prop_map(|status| Answer::Status(status.max(1))),
        1 => (1_u8..128).prop_map(Answer::Delivery),
        1 => Just(Answer::BadToken),
        1 => Just(Answer::Never),
    ]
}

proptest! {
    /// Whatever a device answers, every map is built or is an error, and memory is pinned while a
    /// key may reach it.
    #[test]
    fn any_answers(
        answers in proptest::collection::vec(any_answer(), 0..80),
        maps in proptest::collection::vec((0_u64..5, 1_u64..40), 1..8),
        late in any::<bool>(),
    ) {
        let memory = memory();
        let mut setup = Setup::new(config(8), 1 << 20);
        setup.answers = (0..).zip(answers).collect();
        let mut current = None;
        for (offset, pages) in maps {
            let runs = [run(0, &memory, offset * 64 * PAGE, pages * PAGE, Access::ReadWrite)];
            if let Ok(map) = setup.set_map(&runs) {
                current = Some((map.unwrap().key(), offset));
            }
            if let Some((key, offset)) = current {
                let found = setup.world.books().translate(key, 0, Access::Read);
                prop_assert_eq!(found, Some((1 << 32) + offset * 64 * PAGE));
            }
        }
        if late {
            setup.answer_late(Answer::Status(5));
        }
        setup.answers.clear();
        setup.port.registry_mut().install(None);
        setup.settle();
        let counters = setup.port.registry().counters();
        prop_assert_eq!((counters.keys_live, counters.backlog_keys), (0, 0));
        prop_assert_eq!(setup.world.pinned_bytes(), counters.abandoned_bytes);
        prop_assert!(setup.world.keys() <= usize::try_from(counters.keys_abandoned).unwrap());
        let unpinned = setup.world.books().crimes.iter().any(|crime| crime.contains("unpinned"));
        prop_assert!(!unpinned);
    }
}

#[test]
fn a_device_that_goes_ends_everything() {
    let memory = memory();
    let mut setup = Setup::new(config(16), 1 << 20);
    setup.set_map(&map(&memory, 0)).unwrap();
    setup.port.registry_mut().begin_set_map(&map(&memory, 100)).unwrap();
    while setup.port.poll(setup.now, &mut setup.queue, &setup.world) == Issued::One {}
    setup.queue.on_gone(setup.now);
    let outcome = loop {
        if let Some(outcome) = setup.port.registry_mut().poll_set_map() {
            break outcome;
        }
        setup.port.poll(setup.now, &mut setup.queue, &setup.world);
    };
    assert!(matches!(outcome, Err(VdpaError::Gone { .. })));
    // A drain ends as well; memory stays pinned until somebody knows better.
    setup.port.registry_mut().install(None);
    setup.port.registry_mut().begin_drain(VdpaError::Gone { action: "map memory" });
    while setup.port.poll(setup.now, &mut setup.queue, &setup.world) == Issued::One {}
    assert!(setup.port.registry_mut().poll_drained(setup.now));
    let counters = setup.port.registry().counters();
    assert_eq!((counters.maps_held, counters.abandoned_bytes), (0, 96 * PAGE));
    assert_eq!(setup.world.pinned_bytes(), 96 * PAGE);
    setup.world.books().keys.clear();
    setup.port.registry_mut().forget_all();
    assert_eq!(setup.world.pinned_bytes(), 0);
}
