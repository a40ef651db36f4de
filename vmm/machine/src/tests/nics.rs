//! A guest with network cards that loop its frames back.

use super::loopback::Loopback;
use super::*;
use martlet_guest_program::NicCounters;
use martlet_vdpa::VdpaDevice;

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

/// Waits for this many frames more, and asserts that none was lost, repeated or damaged.
pub(crate) fn assert_frames_flow(machine: &Machine, more: u64) {
    let before = frames(machine);
    wait_for("frames", || frames(machine).received >= before.received + more);
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
    let config = program("fill=8M,ws=1M,rate=1/ms,frames=20/ms", 64, 2);
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
