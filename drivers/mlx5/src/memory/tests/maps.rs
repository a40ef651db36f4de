//! Any map, any order, any failure: what the device reaches is what the map says.
#![allow(clippy::unwrap_used, reason = "tests")]

use super::support::{FAULTS, Fault, PAGE, Rig, at_once, config, everything, fake_memory, run};
use crate::memory::{MapRef, MemoryConfig, Refusal};
use martlet_vdpa::{Access, HostMemory, MapRun};
use proptest::collection::vec;
use proptest::prelude::*;
use std::time::Duration;

/// Pages of the memory that maps are made of.
const PAGES: u64 = 4096;

/// Runs: pages of hole before it, pages, first page of memory, access.
type Shape = Vec<(u64, u64, u64, u8)>;

fn any_shape() -> impl Strategy<Value = Shape> {
    // Often no hole; a few runs that are longer than a piece; few places, so that maps have
    // pieces in common.
    let hole = prop_oneof![3 => Just(0_u64), 1 => 1_u64..40];
    let pages = prop_oneof![1_u64..6, 10_u64..60];
    let place = (0_u64..4).prop_map(|place| place * 64);
    vec((hole, pages, place, 0_u8..5), 0..8)
}

fn map(memory: &HostMemory, shape: &Shape) -> Vec<MapRun> {
    let mut at = 3;
    let mut runs = Vec::new();
    for (hole, pages, place, access) in shape {
        at += hole;
        let access = match access {
            0 => Access::Read,
            1 => Access::Write,
            _ => Access::ReadWrite,
        };
        // Adjacent runs have adjacent memory mostly, so that a cut of a run makes no new memory.
        let offset = (at + place) % (PAGES - 64);
        runs.push(run(at * PAGE, memory, offset * PAGE, pages * PAGE, access));
        at += pages;
    }
    runs
}

fn memory() -> HostMemory {
    fake_memory(1 << 32, PAGES * PAGE)
}

/// What is done with a registry.
#[derive(Clone, Debug)]
enum Step {
    SetMap(Shape),
    /// A queue takes the current map.
    Hold,
    /// A queue lets go of what it has.
    Put(usize),
    Pass(u64),
    /// So many commands from now on, something goes wrong.
    Fault(usize, usize),
    PinFault(usize),
    Drain,
    /// What was given up is answered.
    Late,
    /// A map is begun, and after so many answers given up.
    Cancel(Shape, usize),
    /// The device answers in another order.
    Pick(usize),
}

fn any_step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => any_shape().prop_map(Step::SetMap),
        2 => Just(Step::Hold),
        2 => (0_usize..4).prop_map(Step::Put),
        2 => (0_u64..3000).prop_map(Step::Pass),
        3 => (0_usize..12, 0..FAULTS.len()).prop_map(|(at, fault)| Step::Fault(at, fault)),
        1 => (0_usize..8).prop_map(Step::PinFault),
        1 => Just(Step::Drain),
        1 => Just(Step::Late),
        1 => (any_shape(), 0_usize..6).prop_map(|(shape, answers)| Step::Cancel(shape, answers)),
        1 => (0_usize..5).prop_map(Step::Pick),
    ]
}

fn any_config() -> impl Strategy<Value = MemoryConfig> {
    let window = prop_oneof![Just(1_usize), Just(3), Just(24)];
    (window.clone(), window, 0_u8..4).prop_map(|(create, destroy, kind)| {
        let windows = MemoryConfig { create_window: create, destroy_window: destroy, ..config(16) };
        match kind {
            0 => at_once(windows),
            1 => everything(windows),
            _ => windows,
        }
    })
}

/// A registry, what its current map is, and what queues hold.
struct Story {
    rig: Rig,
    memory: HostMemory,
    current: Vec<MapRun>,
    queues: Vec<(Option<MapRef>, Vec<MapRun>)>,
}

impl Story {
    fn take(&mut self, step: Step) {
        match step {
            Step::SetMap(shape) => {
                let next = map(&self.memory, &shape);
                if self.rig.set_map(&next).is_ok() {
                    self.current = next;
                }
            }
            Step::Hold => {
                let map = self.rig.registry.current().cloned();
                self.queues.push((map, self.current.clone()));
            }
            Step::Put(queue) if queue < self.queues.len() => {
                self.queues.swap_remove(queue);
            }
            Step::Put(_) => {}
            Step::Pass(milliseconds) => self.rig.pass(Duration::from_millis(milliseconds)),
            Step::Fault(after, fault) => {
                let at = self.rig.answered() + after;
                self.rig.faults.insert(at, FAULTS[fault]);
            }
            Step::PinFault(after) => {
                let mut books = self.rig.world.books();
                books.pin_fault = Some(books.pins + 1 + after);
            }
            Step::Drain => {
                self.rig.drain();
                assert_eq!(self.rig.registry.counters().backlog_keys, 0);
            }
            Step::Late => self.rig.answer_late(),
            Step::Cancel(shape, answers) => self.cancel(&shape, answers),
            Step::Pick(pick) => self.rig.pick = pick,
        }
    }

    fn cancel(&mut self, shape: &Shape, answers: usize) {
        let next = map(&self.memory, shape);
        let registry = &mut self.rig.registry;
        registry.begin_set_map(&next).unwrap();
        self.rig.issue();
        for _ in 0..answers {
            self.rig.answer();
            self.rig.issue();
        }
        let error = martlet_vdpa::VdpaError::Gone { action: "map memory" };
        self.rig.registry.cancel_set_map(error);
        // What was too late for it is a map like any other.
        loop {
            let issued = self.rig.issue();
            if self.rig.registry.poll_set_map().is_some() {
                break;
            }
            assert!(self.rig.answer() || issued > 0);
        }
    }

    /// The current map and those of all queues are in force.
    fn check(&mut self) {
        self.rig.check(&self.current);
        let books = self.rig.world.books();
        for (map, runs) in &self.queues {
            for run in runs {
                let key = map.as_ref().unwrap().key();
                let found = books.translate(key, run.iova.0, run.access);
                assert_eq!(found, Some(run.memory.address()));
            }
        }
        drop(books);
        let counters = self.rig.registry.counters();
        assert_eq!(counters.pinned_bytes, self.rig.world.pinned_bytes());
        let ended = counters.keys_destroyed + counters.keys_live;
        assert!(
            counters.keys_created >= ended
                && counters.keys_created <= ended + counters.keys_abandoned
        );
    }

    /// Everything goes, but for what was abandoned.
    fn end(mut self) {
        self.queues.clear();
        self.rig.faults.clear();
        self.rig.registry.install(None);
        self.rig.drain();
        let counters = self.rig.registry.counters();
        assert_eq!((counters.keys_live, counters.backlog_keys, counters.maps_held), (0, 0, 0));
        assert_eq!(self.rig.world.pinned_bytes(), counters.abandoned_bytes);
        assert!(u64::try_from(self.rig.world.keys()).unwrap() <= counters.keys_abandoned);
        self.rig.world.no_crimes();
        self.rig.world.books().keys.clear();
        self.rig.registry.forget_all();
        assert_eq!(self.rig.world.pinned_bytes(), 0);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    #[test]
    fn any_map_is_what_the_device_reaches(
        shape in any_shape(),
        fragments in vec(1_u64..20, 0..5),
        piece in 0_u32..8,
    ) {
        let mut rig = Rig::new(config(1 << piece));
        rig.world.books().fragments = fragments;
        let map = map(&memory(), &shape);
        rig.set_map(&map).unwrap();
        rig.check(&map);
        rig.registry.install(None);
        rig.drain();
        prop_assert_eq!((rig.world.keys(), rig.world.pinned_bytes()), (0, 0));
    }

    #[test]
    fn whatever_happens(
        config in any_config(),
        fragments in vec(1_u64..20, 0..3),
        steps in vec(any_step(), 1..24),
    ) {
        let rig = Rig::new(config);
        rig.world.books().fragments = fragments;
        let mut story =
            Story { rig, memory: memory(), current: Vec::new(), queues: Vec::new() };
        for step in steps {
            story.take(step);
            story.check();
        }
        story.end();
    }
}

/// A fault that hits a command which was to make room: the build still ends, one way or the other.
#[test]
fn faults_while_room_is_made() {
    let memory = memory();
    for fault in FAULTS {
        let mut rig = Rig::new(config(16));
        let shape = vec![(0, 40, 0, 2)];
        rig.set_map(&map(&memory, &shape)).unwrap();
        rig.set_map(&map(&memory, &vec![(100, 5, 64, 2)])).unwrap();
        let at = rig.answered();
        rig.faults.insert(at, Fault::Refused(Refusal::NoRoom));
        for number in 1..12 {
            rig.faults.insert(at + number, fault);
        }
        let next = map(&memory, &vec![(0, 40, 128, 2)]);
        assert!(rig.set_map(&next).is_err(), "{fault:?}");
        rig.check(&map(&memory, &vec![(100, 5, 64, 2)]));
        rig.faults.clear();
        rig.set_map(&next).unwrap();
        rig.check(&next);
    }
}
