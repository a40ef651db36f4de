//! Guests that touch a page which the host lost.

use super::userfault::{Userfault, Way};
use super::*;
use crate::GuestStatus;
use martlet_ram::testing::Spoiled;
use martlet_ram::{GuestRam, PageBitmap, RegionIndex, mark_touched};
use martlet_test_host::Want;
use std::io;

const REGION: RegionIndex = RegionIndex(0);

/// A page that the built-in guest checks over and over: in the midst of what it has filled.
fn page_in_use(ram: &GuestRam) -> u64 {
    let region = &ram.regions()[0];
    let touched = PageBitmap::new(region.pages());
    mark_touched(region, &touched).unwrap();
    let longest = touched.runs().max_by_key(|run| run.end - run.start).unwrap();
    longest.start.midpoint(longest.end)
}

/// Waits for the guest's end, and says why it came.
fn end_of(machine: &Machine) -> String {
    wait_for("the guest to touch the page", || machine.group.ended_because().is_some());
    assert_ne!(machine.status(), GuestStatus::Running);
    format!("{:?}", machine.group.ended_because())
}

#[test]
fn a_guest_that_touches_a_lost_page_ends_and_the_process_does_not() {
    if !has_kvm() {
        return;
    }
    let machine = running(&program("fill=8M,ws=1M,rate=1/tick,tick=100us", 32, 1));
    wait_ready(&machine);
    let page = page_in_use(machine.memory.ram());
    let _spoiled = Spoiled::new(machine.memory.ram(), REGION, page);
    let reason = end_of(&machine);
    assert!(reason.contains("KVM_RUN"), "{reason}");
}

/// A page that is poison to this process: what the kernel tells of hardware poison it tells of this.
fn poison(ram: &GuestRam, page: u64) -> io::Result<Userfault> {
    let poisoned = Userfault::take_away(ram, page, Way::Missing)?;
    poisoned.poison()?;
    Ok(poisoned)
}

#[test]
fn a_guest_that_touches_poison_ends_and_the_process_does_not() {
    if !has_kvm() {
        return;
    }
    let machine = running(&program("fill=8M,ws=1M,rate=1/tick,tick=100us", 32, 1));
    wait_ready(&machine);
    let page = page_in_use(machine.memory.ram());
    machine.pause_by_owner().unwrap();
    let poisoned = poison(machine.memory.ram(), page);
    let Some(poisoned) = Want::UffdPoison.take(poisoned) else { return };
    machine.continue_by_owner().unwrap();
    let (reason, gfn) = (end_of(&machine), machine.memory.ram().lost(REGION, page).gfn);
    assert!(reason.contains(&format!("guest page {gfn} ")), "{reason}");
    drop(poisoned);
}
