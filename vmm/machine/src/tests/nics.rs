//! A guest with network cards that loop its frames back.

use super::loopback::{Loopback, Mishap, Trouble};
use super::moving::{copy_ram, move_guest_to};
use super::*;
use crate::memory::GuestMemory;
use crate::tests::Waited;
use crate::{Factory, FactoryConfig, GuestStatus};
use martlet_engine::RunState;
use martlet_guest_program::NicCounters;
use martlet_ram::{GuestRam, RamBitmap, RamRegion};
use martlet_vdpa::{Capabilities, VdpaDevice};
use std::task::Waker;

pub(crate) const LOAD: &str = "fill=8M,ws=1M,rate=2/ms,tick=100us,frames=20/ms";

pub(crate) fn loopbacks(count: u8, pairs: u16) -> Vec<Arc<Loopback>> {
    (0..count).map(|number| Loopback::new(number, pairs)).collect()
}

pub(crate) fn as_devices(loopbacks: &[Arc<Loopback>]) -> Vec<Arc<dyn VdpaDevice>> {
    loopbacks.iter().map(|device| Arc::clone(device) as Arc<dyn VdpaDevice>).collect()
}

pub(crate) fn with_cards(config: &MachineConfig, cards: &[Arc<Loopback>]) -> Arc<Machine> {
    let machine = Machine::with_devices(config, as_devices(cards)).expect("a machine");
    machine.continue_by_owner().expect("a new guest starts");
    wait_ready(&machine);
    machine
}

pub(crate) fn frames(machine: &Machine) -> NicCounters {
    machine.guest_counters().expect("the built-in program").nic_total()
}

/// Waits until all cards run and for this many frames more, and asserts that none was lost,
/// repeated or damaged.
pub(crate) fn assert_frames_flow(machine: &Machine, more: u64) {
    let before = frames(machine);
    wait_for("frames", || {
        let now = frames(machine);
        now.refused || (now.runs && now.received >= before.received + more)
    });
    assert_frames_are_whole(machine);
}

pub(crate) fn assert_frames_are_whole(machine: &Machine) {
    let now = frames(machine);
    assert!(now.runs && !now.refused, "{now:?}");
    assert_eq!((now.lost, now.repeated, now.damaged, now.stalls), (0, 0, 0, 0), "{now:?}");
}

#[test]
fn frames_come_back_on_all_cards() {
    if !has_kvm() {
        return;
    }
    let cards = loopbacks(3, 4);
    let config = program(LOAD, 64, 2);
    let machine = with_cards(&config, &cards);
    assert_frames_flow(&machine, 5_000);
    for (nic, card) in machine.guest_counters().unwrap().nics().iter().zip(&cards) {
        eprintln!("{nic:?} {:?}", card.counters());
        assert!(nic.received > 100);
        assert_eq!(card.pairs(), 4);
        assert!(card.services() > 0);
    }
    assert_sound(&machine);
}

fn factory(cards: &[Arc<Loopback>]) -> Factory {
    Factory::with_devices(FactoryConfig::default(), as_devices(cards)).unwrap()
}

#[test]
fn no_frame_is_lost_on_the_way() {
    if !has_kvm() {
        return;
    }
    let mut cards = loopbacks(2, 4);
    let mut machine = with_cards(&program(LOAD, 32, 2), &cards);
    for _ in 0..4 {
        assert_frames_flow(&machine, 300);
        let next = loopbacks(2, 4);
        let before = frames(&machine).received;
        let arrived = move_guest_to(&machine, &factory(&next));
        assert_eq!(machine.status(), GuestStatus::Gone);
        for (here, there) in cards.iter().zip(&next) {
            // The source's device is as new, the destination's has the same frames to serve.
            assert!(!here.is_running() && here.features().is_none());
            assert_eq!((there.pairs(), there.is_running()), (4, true));
        }
        (machine, cards) = (arrived, next);
        assert_frames_flow(&machine, 500);
        assert!(frames(&machine).received > before);
        assert_sound(&machine);
    }
}

/// One card's frames go round its 16-bit indices, with moves at all places. What is waited for
/// between two moves is frames, of which a busy host passes few in any time.
#[test]
fn indices_wrap_across_moves() {
    if !has_kvm() {
        return;
    }
    let load = "fill=2M,ws=1M,rate=1/ms,tick=100us,frames=30/ms,window=128,verify=4";
    let mut machine = with_cards(&program(load, 32, 1), &loopbacks(1, 1));
    let mut moves = 0;
    while frames(&machine).index_wraps == 0 {
        machine = move_guest_to(&machine, &factory(&loopbacks(1, 1)));
        moves += 1;
        assert_frames_flow(&machine, 4000);
    }
    eprintln!("{moves} moves, {:?}", frames(&machine));
}

#[test]
fn a_destination_prepares_in_the_rehearsal_and_only_resumes_in_the_blackout() {
    if !has_kvm() {
        return;
    }
    let (here, there) = (loopbacks(2, 2), loopbacks(2, 2));
    let source = with_cards(&program(LOAD, 32, 1), &here);
    let factory = factory(&there);
    let target = destination(&factory, &source);
    for _ in 0..3 {
        target.load_state(&source.rehearse().unwrap().unwrap().state, LoadFor::Rehearsal).unwrap();
    }
    for card in &there {
        let calls = card.take_calls();
        assert_eq!(calls, ["set_features", "set_map", "set_queue_pairs", "prepare"]);
        assert!(!card.is_running());
    }
    here.iter().for_each(|card| drop(card.take_calls()));
    source.begin_suspend(Waker::noop());
    source.wait_suspended().unwrap();
    source.begin_pause(Waker::noop());
    let paused = source.wait_paused().unwrap();
    copy_ram(&source, &target.ram());
    target.load_state(&source.take_state().unwrap(), START_HERE).unwrap();
    target.start(paused.permit, paused.was);
    assert_eq!(observed(target.observer()).first_frames_ns, [None, None]);
    resume(&*target).unwrap();
    source.moved_away();
    for card in &there {
        assert_eq!(card.take_calls(), ["begin_resume", "resumed"]);
    }
    for card in &here {
        assert_eq!(card.take_calls(), ["begin_suspend", "suspended", "reset"]);
    }
    let machine = factory.machine().unwrap();
    assert_frames_flow(&machine, 100);
    assert_eq!(observed(source.observer()).last_frames_ns.len(), 2);
    wait_for("a frame of each card", || {
        observed(target.observer()).first_frames_ns.iter().all(Option::is_some)
    });
    // The devices belong to the guest that arrived.
    let description = machine.machine_description();
    let error =
        factory.build(&request(&description, &machine.memory.ram().layout())).err().unwrap();
    assert_eq!(
        error.to_string(),
        "cannot build the machine: another guest has the network devices"
    );
}

#[test]
fn an_abandoned_attempt_leaves_frames_flowing_and_devices_as_new() {
    if !has_kvm() {
        return;
    }
    let (here, there) = (loopbacks(2, 2), loopbacks(2, 2));
    let source = with_cards(&program(LOAD, 32, 1), &here);
    let factory = factory(&there);
    for _ in 0..3 {
        let target = destination(&factory, &source);
        target.load_state(&source.rehearse().unwrap().unwrap().state, LoadFor::Rehearsal).unwrap();
        let tracker = source.track().unwrap();
        source.begin_suspend(Waker::noop());
        source.wait_suspended().unwrap();
        source.begin_pause(Waker::noop());
        let paused = source.wait_paused().unwrap();
        target.load_state(&source.take_state().unwrap(), START_HERE).unwrap();
        drop(target);
        source.resume(Some(paused));
        drop(tracker);
        assert_frames_flow(&source, 300);
        assert!(there.iter().all(|card| card.features().is_none()));
    }
    let machine = move_guest_to(&source, &factory);
    assert_frames_flow(&machine, 300);
}

#[test]
fn a_device_that_does_not_stop_stops_the_attempt_only() {
    if !has_kvm() {
        return;
    }
    let cards = loopbacks(3, 2);
    let source = with_cards(&program(LOAD, 32, 2), &cards);
    let failures = [
        Trouble { begin_suspend: true, ..Trouble::default() },
        Trouble { suspend: true, ..Trouble::default() },
    ];
    for trouble in failures {
        cards[1].set_trouble(trouble);
        source.begin_suspend(Waker::noop());
        let error = source.wait_suspended().unwrap_err().to_string();
        assert!(error.starts_with("cannot suspend the devices: network card 1: cannot"), "{error}");
        assert!(cards.iter().all(|card| card.is_running()));
        assert_frames_flow(&source, 300);
    }
    cards[1].set_trouble(Trouble::default());
    let machine = move_guest_to(&source, &factory(&loopbacks(3, 2)));
    assert_frames_flow(&machine, 300);
}

#[test]
fn a_device_that_does_not_answer_keeps_nobody() {
    if !has_kvm() {
        return;
    }
    let cards = loopbacks(3, 2);
    let source = with_cards(&program(LOAD, 32, 2), &cards);
    cards[1].set_trouble(Trouble { silent: true, ..Trouble::default() });
    source.begin_suspend(Waker::noop());
    wait_for("the others stand", || {
        assert!(source.poll_suspended().is_pending());
        !cards[0].is_running() && !cards[2].is_running()
    });
    source.resume(None);
    wait_for("the others go on", || cards[0].is_running() && cards[2].is_running());
    // What it says in the end harms nobody.
    cards[1].set_trouble(Trouble::default());
    source.nics.settle().unwrap();
    assert_frames_flow(&source, 300);
    let machine = move_guest_to(&source, &factory(&loopbacks(3, 2)));
    assert_frames_flow(&machine, 300);
}

#[test]
fn a_device_that_does_not_go_on_is_told_and_the_guest_runs() {
    if !has_kvm() {
        return;
    }
    let there = loopbacks(2, 2);
    let source = with_cards(&program(LOAD, 32, 1), &loopbacks(2, 2));
    let factory = factory(&there);
    let target = destination(&factory, &source);
    there[1].set_trouble(Trouble { resume: true, ..Trouble::default() });
    source.begin_suspend(Waker::noop());
    source.wait_suspended().unwrap();
    source.begin_pause(Waker::noop());
    let paused = source.wait_paused().unwrap();
    copy_ram(&source, &target.ram());
    target.load_state(&source.take_state().unwrap(), START_HERE).unwrap();
    target.start(paused.permit, paused.was);
    let error = resume(&*target).unwrap_err().to_string();
    let expected = "cannot resume the devices: network card 1: cannot resume queue 3: told to fail";
    assert_eq!(error, expected);
    source.moved_away();
    let machine = factory.machine().unwrap();
    let before = machine.guest_counters().unwrap().nics()[0];
    wait_for("frames of the other card", || {
        machine.guest_counters().unwrap().nics()[0].received > before.received + 100
    });
    assert_sound(&machine);
}

#[test]
fn what_devices_write_is_tracked() {
    if !has_kvm() {
        return;
    }
    for tracking in [Tracking::Log, Tracking::Ring] {
        let config = MachineConfig { tracking, ..program(LOAD, 32, 1) };
        let source = with_cards(&config, &loopbacks(2, 2));
        let copy = Arc::new(GuestRam::create(&source.memory.ram().layout()).unwrap());
        let mut tracker = source.track().unwrap();
        copy_ram(&source, &copy);
        assert_frames_flow(&source, 500);
        source.begin_suspend(Waker::noop());
        source.wait_suspended().unwrap();
        source.begin_pause(Waker::noop());
        let paused = source.wait_paused().unwrap();
        let dirty = RamBitmap::new(source.memory.ram());
        tracker.sync(&dirty).unwrap();
        let memory = GuestMemory::new(copy);
        let (mut here, mut there) = ([0; PAGE_BYTES], [0; PAGE_BYTES]);
        for (region, bitmap) in dirty.iter() {
            let start = source.memory.ram().region(region).unwrap().range().start().0;
            for page in bitmap.runs().flatten() {
                let gpa = Gpa((start + page) * PAGE_SIZE);
                assert!(source.memory.read(gpa, &mut here) && memory.write(gpa, &here));
            }
        }
        let pages = |region: &RamRegion| region.range().start().0..region.range().end().0;
        for page in source.memory.guest().iter().flat_map(pages) {
            let gpa = Gpa(page * PAGE_SIZE);
            assert!(source.memory.read(gpa, &mut here) && memory.read(gpa, &mut there));
            assert!(here == there, "{tracking:?}: page {page:#x} was written and not reported");
        }
        source.resume(Some(paused));
        assert_frames_flow(&source, 500);
    }
}

#[test]
fn an_owners_pause_pauses_the_devices() {
    if !has_kvm() {
        return;
    }
    let cards = loopbacks(2, 2);
    let machine = with_cards(&program(LOAD, 32, 1), &cards);
    for _ in 0..3 {
        assert_frames_flow(&machine, 100);
        machine.pause_by_owner().unwrap();
        assert!(cards.iter().all(|card| !card.is_running()));
        machine.continue_by_owner().unwrap();
        assert!(cards.iter().all(|card| card.is_running()));
    }
    // A paused guest moves and stays paused, with all its devices.
    machine.pause_by_owner().unwrap();
    let stood = frames(&machine);
    let there = loopbacks(2, 2);
    let arrived = move_guest_to(&machine, &factory(&there));
    assert_eq!(arrived.status(), GuestStatus::Paused);
    assert!(there.iter().all(|card| !card.is_running()));
    assert_eq!(frames(&arrived), stood);
    arrived.continue_by_owner().unwrap();
    assert_frames_flow(&arrived, 300);
}

#[test]
fn devices_that_cannot_move_say_so_before_the_start() {
    if !has_kvm() {
        return;
    }
    let none = Capabilities::default();
    let machine = with_cards(&program(LOAD, 32, 1), &[Loopback::with(0, 1, none)]);
    let error = machine.track().err().unwrap();
    let cause = std::error::Error::source(&error).unwrap().to_string();
    assert_eq!(cause, "the device of network card 0 can't be suspended");
    // Its owner may still pause it.
    machine.pause_by_owner().unwrap();
    machine.continue_by_owner().unwrap();
    assert_frames_flow(&machine, 100);
}

#[test]
fn a_device_without_resume_is_built_again() {
    if !has_kvm() {
        return;
    }
    let some = Capabilities { suspend: true, dirty_log: true, resume: false };
    let card = Loopback::with(0, 2, some);
    let machine = with_cards(&program(LOAD, 32, 1), &[Arc::clone(&card)]);
    machine.begin_suspend(Waker::noop());
    machine.wait_suspended().unwrap();
    machine.begin_pause(Waker::noop());
    let paused = machine.wait_paused().unwrap();
    assert_eq!(paused.was, RunState::Running);
    card.take_calls();
    machine.resume(Some(paused));
    machine.nics.settle().unwrap();
    let calls = card.take_calls();
    assert_eq!(calls[..2], ["reset", "set_features"]);
    assert_eq!(calls[calls.len() - 2..], ["begin_resume", "resumed"]);
    assert_frames_flow(&machine, 300);
}

#[test]
fn a_destination_that_lacks_something_refuses_in_one_line() {
    if !has_kvm() {
        return;
    }
    let source = with_cards(&program(LOAD, 32, 1), &loopbacks(2, 4));
    let refusal = |cards: &[Arc<Loopback>]| {
        let layout = source.memory.ram().layout();
        let factory = factory(cards);
        factory.build(&request(&source.machine_description(), &layout)).err().unwrap().to_string()
    };
    let expected = [
        (
            vec![],
            "cannot build the machine: the guest has 2 network cards, there are devices for 0",
        ),
        (loopbacks(2, 2), "cannot build the machine: network card 0 needs 8 queues, there are 4"),
        (
            loopbacks(3, 4).split_off(1),
            "cannot build the machine: network card 0 has address 02:00:00:00:00:00, here \
             02:00:00:00:00:01",
        ),
    ];
    for (cards, text) in expected {
        assert_eq!(refusal(&cards), text);
    }
    // More of everything does no harm.
    let arrived = move_guest_to(&source, &factory(&loopbacks(3, 8)));
    assert_frames_flow(&arrived, 300);
}

/// Without KVM the program's accesses to the cards' registers come as faults. The only test with
/// such a machine: there is one guest a process.
#[test]
fn frames_flow_without_kvm() {
    let _one = one_threads_guest();
    let cards = loopbacks(2, 2);
    let config = MachineConfig { accel: Accel::Threads, ..program(LOAD, 64, 2) };
    let machine = with_cards(&config, &cards);
    assert_frames_flow(&machine, 500);
    machine.pause_by_owner().unwrap();
    assert!(cards.iter().all(|card| !card.is_running()));
    machine.continue_by_owner().unwrap();
    assert_frames_flow(&machine, 500);
    // To and fro: the state is saved and the guest goes on.
    let mut tracker = machine.track().unwrap();
    for _ in 0..3 {
        assert!(!machine.rehearse().unwrap().unwrap().state.is_empty());
        machine.begin_suspend(Waker::noop());
        machine.wait_suspended().unwrap();
        machine.begin_pause(Waker::noop());
        let paused = machine.wait_paused().unwrap();
        let dirty = RamBitmap::new(machine.memory.ram());
        tracker.sync(&dirty).unwrap();
        assert!(dirty.count() > 0 && !machine.take_state().unwrap().is_empty());
        machine.resume(Some(paused));
        assert_frames_flow(&machine, 300);
    }
    assert_sound(&machine);
}

#[test]
fn the_guest_sees_what_happens_to_a_frame() {
    if !has_kvm() {
        return;
    }
    let cards = loopbacks(1, 2);
    let machine = with_cards(&program(LOAD, 32, 1), &cards);
    let seen = |mishap| {
        let before = frames(&machine);
        cards[0].set_trouble(Trouble { mishap: Some(mishap), ..Trouble::default() });
        wait_for("frames", || frames(&machine).received > before.received + 500);
        let now = frames(&machine);
        [now.lost - before.lost, now.repeated - before.repeated, now.damaged - before.damaged]
    };
    assert_eq!(seen(Mishap::Repeated), [0, 1, 0]);
    assert_eq!(seen(Mishap::Lost), [1, 0, 0]);
    // What it was can't be told, so its number is missing, too.
    assert_eq!(seen(Mishap::Flipped), [1, 0, 1]);
    assert!(frames(&machine).outstanding() <= 128);
}

#[test]
fn a_card_that_asks_for_no_kicks_gets_none() {
    if !has_kvm() {
        return;
    }
    let cards = loopbacks(1, 2);
    cards[0].set_trouble(Trouble { quiet: true, ..Trouble::default() });
    let machine = with_cards(&program(LOAD, 32, 1), &cards);
    assert_frames_flow(&machine, 500);
    assert_eq!(frames(&machine).kicks, 0);
}
