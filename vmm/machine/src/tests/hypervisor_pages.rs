//! Guest memory that KVM writes by itself: what arrives is what the source had.

use super::elf::{Scratch, boots, pvh};
use super::userfault::{Userfault, Way};
use super::*;
use crate::tests::Waited;
use crate::{Factory, FactoryConfig};
use martlet_ram::{DirtySource, RamBitmap};
use martlet_test_host::Want;
use std::task::Waker;

/// Where `guests/pages.s` keeps its numbers.
const FEATURES: Gpa = Gpa(0x8000);
const ROUNDS: Gpa = Gpa(0x8004);
const WRONG: Gpa = Gpa(0x8008);
const INTERRUPTS: Gpa = Gpa(0x800c);
const ENDED: Gpa = Gpa(0x8010);
const GONE: Gpa = Gpa(0x8014);
const BACK: Gpa = Gpa(0x8018);
/// The page that it lets go of.
const AWAY: u64 = 0x300;
/// Bits of what CPUID offers (Documentation/virt/kvm/x86/cpuid.rst).
const HAS_CLOCK: u32 = 1 << 3;
const HAS_END_OF_INTERRUPT: u32 = 1 << 6;
const HAS_PAGE_FAULTS: u32 = 1 << 14;
/// Interrupts of which KVM lets the guest end one without leaving, if it ever does.
const INTERRUPTS_MAX: u32 = 100;
/// How long KVM may take to tell of a page that is not there.
const TELLS_WITHIN: Duration = Duration::from_secs(5);

fn word(machine: &Machine, at: Gpa) -> u32 {
    let mut bytes = [0; 4];
    assert!(machine.memory.read(at, &mut bytes));
    u32::from_le_bytes(bytes)
}

fn wait_round(machine: &Machine) {
    let now = word(machine, ROUNDS);
    wait_for("another look at all pages", || {
        assert_eq!(machine.group.ended_because(), None);
        word(machine, ROUNDS) >= now + 2
    });
}

/// Copies the pages that were written since the last time.
fn copy_written(source: &Machine, tracker: &mut dyn DirtySource, target: &GuestMemory) {
    let written = RamBitmap::new(source.memory.ram());
    tracker.sync(&written).unwrap();
    let mut bytes = [0; PAGE_BYTES];
    for (index, bitmap) in written.iter() {
        let first = source.memory.ram().regions()[usize::from(index.0)].range().start().0;
        for word in 0..bitmap.word_count() {
            let bits = bitmap.take_word(word);
            tracker.rearm(index, word as u64 * 64, &[bits]).unwrap();
            for bit in (0..64).filter(|bit| bits >> bit & 1 == 1) {
                let gpa = Gpa((first + word as u64 * 64 + bit) * PAGE_SIZE);
                assert!(source.memory.read(gpa, &mut bytes) && target.write(gpa, &bytes));
            }
        }
    }
}

fn assert_equal(source: &Machine, target: &GuestMemory, when: &str) {
    if source.memory.ram().digest().unwrap() == target.ram().digest().unwrap() {
        return;
    }
    let (mut here, mut there) = ([0; PAGE_BYTES], [0; PAGE_BYTES]);
    for region in source.memory.ram().regions() {
        for page in region.range().start().0..region.range().end().0 {
            let gpa = Gpa(page * PAGE_SIZE);
            assert!(source.memory.read(gpa, &mut here) && target.read(gpa, &mut there));
            assert_eq!(here, there, "page {page:#x} {when}");
        }
    }
}

/// Has KVM tell the guest that interrupts have ended without its doing; says why it does not.
fn has_interrupts_ended(machine: &Machine) -> Result<(), String> {
    if word(machine, FEATURES) & HAS_END_OF_INTERRUPT == 0 {
        return Err("it offers none".into());
    }
    let (first, ended) = (word(machine, INTERRUPTS), word(machine, ENDED));
    wait_for("interrupts", || word(machine, INTERRUPTS) - first >= INTERRUPTS_MAX);
    let has_ended = word(machine, ENDED) > ended;
    has_ended.then_some(()).ok_or_else(|| format!("none in {INTERRUPTS_MAX} interrupts"))
}

/// Has KVM tell the guest of a page that is not there, and that it is; says why it does not.
fn has_page_faults(machine: &Machine) -> Result<(), String> {
    if word(machine, FEATURES) & HAS_PAGE_FAULTS == 0 {
        return Err("it offers none".into());
    }
    let gone = word(machine, GONE);
    let taken = Userfault::take_away(machine.memory.ram(), AWAY, Way::Minor);
    let taken = taken.map_err(|error| format!("no page can be taken from it: {error}"))?;
    let begin = Instant::now();
    while word(machine, GONE) == gone && begin.elapsed() < TELLS_WITHIN {
        std::thread::sleep(Duration::from_millis(1));
    }
    let (is_gone, back) = (word(machine, GONE) != gone, word(machine, BACK));
    taken.give_back().map_err(|error| format!("the page can't be given back: {error}"))?;
    if !is_gone {
        return Err(format!("none within {TELLS_WITHIN:?}"));
    }
    wait_for("the guest to hear of its page", || word(machine, BACK) > back);
    Ok(())
}

/// Moves the guest with nothing but its tracked pages, and compares all memory where the guest is
/// not there yet. Does something `meanwhile`, too.
fn move_and_compare(source: &Machine, mut meanwhile: impl FnMut()) -> Arc<Machine> {
    let factory = Factory::new(FactoryConfig::default()).unwrap();
    let target = destination(&factory, source);
    let memory = GuestMemory::new(target.ram());
    let mut tracker = source.track().unwrap();
    moving::copy_ram(source, &target.ram());
    for _ in 0..2 {
        let state = source.rehearse().unwrap().unwrap().state;
        let before = target.ram().digest().unwrap();
        target.load_state(&state, LoadFor::Rehearsal).unwrap();
        assert_eq!(target.ram().digest().unwrap(), before, "a rehearsal writes no memory");
        copy_written(source, &mut tracker, &memory);
        meanwhile();
    }
    target.arm(Duration::from_secs(1));
    source.begin_pause(Waker::noop());
    let paused = source.wait_paused().unwrap();
    copy_written(source, &mut tracker, &memory);
    let state = source.take_state().unwrap();
    assert_equal(source, &memory, "after the last pages");
    target.load_state(&state, START_HERE).unwrap();
    assert_equal(source, &memory, "after the last load");
    target.start(paused.permit, paused.was);
    drop(tracker);
    source.moved_away();
    factory.machine().expect("it arrived")
}

#[test]
fn what_kvm_writes_arrives_as_it_was() {
    if !has_kvm() {
        return;
    }
    let kernel = Scratch::new("pages", &pvh(&guests::pages()));
    let (mut ends, mut tells) = (true, true);
    for tracking in [Tracking::Log, Tracking::Ring] {
        let config = MachineConfig { tracking, ..boots(kernel.path(), 16) };
        let mut machine = match Machine::new(&config) {
            Ok(machine) => machine,
            Err(error) if tracking == Tracking::Ring => {
                let _ = Want::DirtyRing.found(&Err(error));
                continue;
            }
            Err(error) => panic!("{error}"),
        };
        machine.continue_by_owner().unwrap();
        wait_round(&machine);
        eprintln!("KVM offers {:#x}; 4 moves by its {tracking:?}", word(&machine, FEATURES));
        for _ in 0..2 {
            machine = move_and_compare(&machine, || {
                ends = ends && Want::KvmEndOfInterrupt.found(&has_interrupts_ended(&machine));
                tells = tells && Want::KvmPageFaults.found(&has_page_faults(&machine));
            });
            wait_round(&machine);
            assert_eq!(word(&machine, WRONG), 0);
        }
        // One that is paused when it comes has not met KVM here before it moves on.
        machine.pause_by_owner().unwrap();
        machine = move_and_compare(&machine, || {});
        machine = move_and_compare(&machine, || {});
        machine.continue_by_owner().unwrap();
        wait_round(&machine);
        assert_eq!(word(&machine, WRONG), 0);
        assert_ne!(system_time(&machine), [0x55; 32], "KVM tells the time here, too");
    }
}

/// The structure of kvmclock.
fn system_time(machine: &Machine) -> [u8; 32] {
    let mut bytes = [0; 32];
    assert!(machine.memory.read(Gpa(0x20_1000), &mut bytes));
    bytes
}

/// What a rehearsal looks up may be out of date: a page that was a table once, and holds data by now.
#[test]
fn a_rehearsal_writes_into_no_page_table() {
    /// Of `guests/timers.s`: its count, and its page tables.
    const TICKS: Gpa = Gpa(0x8000);
    const TABLES: std::ops::Range<u64> = 0xa000..0xe000;
    const PRESENT: u64 = 1;
    const ACCESSED: u64 = 1 << 5;
    if !has_kvm() {
        return;
    }
    let kernel = Scratch::new("tables", &pvh(&guests::timers(0, 11_932)));
    let source = running(&boots(kernel.path(), 16));
    wait_for("a tick", || word(&source, TICKS) > 0);
    let factory = Factory::new(FactoryConfig::default()).unwrap();
    let target = destination(&factory, &source);
    let memory = GuestMemory::new(target.ram());
    let state = source.rehearse().unwrap().unwrap().state;
    moving::copy_ram(&source, &target.ram());
    let mut entry = [0; 8];
    for at in TABLES.step_by(entry.len()).map(Gpa) {
        assert!(memory.read(at, &mut entry));
        let bits = u64::from_le_bytes(entry);
        if bits & PRESENT != 0 {
            assert!(memory.write(at, &(bits & !ACCESSED).to_le_bytes()));
        }
    }
    let before = target.ram().digest().unwrap();
    target.load_state(&state, LoadFor::Rehearsal).unwrap();
    assert_eq!(target.ram().digest().unwrap(), before);
}

/// Its flags (Documentation/virt/kvm/x86/msr.rst, MSR_KVM_SYSTEM_TIME_NEW): bit 1 says that the
/// guest was stopped.
fn is_told_of_a_stop(machine: &Machine) -> bool {
    system_time(machine)[29] & 1 << 1 != 0
}

#[test]
fn a_guest_that_stood_for_long_is_told_so() {
    if !has_kvm() {
        return;
    }
    let kernel = Scratch::new("stood", &pvh(&guests::pages()));
    let machine = running(&boots(kernel.path(), 16));
    wait_round(&machine);
    let has_clock = word(&machine, FEATURES) & HAS_CLOCK != 0;
    if !Want::KvmClock.found(&has_clock.then_some(()).ok_or("it offers none")) {
        return;
    }
    assert!(!is_told_of_a_stop(&machine));
    machine.pause_by_owner().unwrap();
    std::thread::sleep(Duration::from_millis(1200));
    machine.continue_by_owner().unwrap();
    wait_for("the guest to be told", || is_told_of_a_stop(&machine));
}
