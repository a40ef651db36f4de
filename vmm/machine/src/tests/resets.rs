use super::elf::{Scratch, boots, pvh};
use super::moving::move_guest_to;
use super::*;
use crate::{EndCause, Factory, FactoryConfig, GuestStatus};
use martlet_ram::RamBitmap;

/// Sends "k" and has its processor give up: a fault without an interrupt table.
const TRIPLE_FAULT: &[u8] = &[
    0x66, 0xba, 0xf8, 0x03, // mov dx, 0x3f8
    0xb0, b'k', // mov al, 'k'
    0xee, // out dx, al
    0x0f, 0x01, 0x1d, 0, 0, 0x20, 0, // lidt [0x200000], where memory is zero
    0x0f, 0x0b, // ud2
];

/// Counts up a word of memory that is zero at the power-on, sends it, and resets by port 0xcf9.
const COUNTER: &[u8] = &[
    0xfe, 0x05, 0, 0, 0x20, 0, // inc byte [0x200000]
    0xa0, 0, 0, 0x20, 0, // mov al, [0x200000]
    0x66, 0xba, 0xf8, 0x03, // mov dx, 0x3f8
    0xee, // out dx, al
    0x66, 0xba, 0xf9, 0x0c, // mov dx, 0xcf9
    0xb0, 0x06, // mov al, 6
    0xee, // out dx, al
    0xf4, // hlt
];

/// What a kernel sends until it was reset twice. Empty where KVM emulates such code and can't.
fn sent(name: &str, code: &[u8]) -> Vec<u8> {
    let kernel = Scratch::new(name, &pvh(code));
    let serial = Scratch::new(&format!("{name}-serial"), b"");
    let config =
        MachineConfig { serial: SerialOut::File(serial.path().into()), ..boots(kernel.path(), 16) };
    let machine = running(&config);
    let emulation_failed = GuestStatus::Ended(EndCause::Crash("KVM internal error 1".into()));
    wait_for("two resets", || machine.resets().0 >= 2 || machine.status() != GuestStatus::Running);
    if machine.status() == emulation_failed {
        eprintln!("skipped: KVM emulates this guest here, and not all of it");
        return Vec::new();
    }
    assert_eq!(machine.status(), GuestStatus::Running);
    machine.quit();
    std::fs::read(serial.path()).unwrap()
}

#[test]
fn a_triple_fault_boots_a_kernel_again() {
    if has_kvm() {
        let sent = sent("triple-fault", TRIPLE_FAULT);
        assert!(sent.is_empty() || sent.starts_with(b"kk"));
    }
}

#[test]
fn a_guest_that_is_reset_finds_its_memory_as_at_the_first_time() {
    if has_kvm() {
        assert!(sent("counter", COUNTER).starts_with(&[1, 1]));
    }
}

#[test]
fn a_kernel_that_changed_since_the_boot_is_not_booted() {
    if !has_kvm() {
        return;
    }
    let kernel = Scratch::new("changing", &pvh(&[0xeb, 0xfe]));
    let machine = running(&boots(kernel.path(), 16));
    std::fs::write(kernel.path(), b"no kernel").unwrap();
    machine.reset_by_owner().unwrap();
    let GuestStatus::Ended(EndCause::Crash(reason)) = machine.status() else {
        panic!("{:?}", machine.status());
    };
    assert!(reason.starts_with("reset: ") && reason.contains("changing"), "{reason}");
}

#[test]
fn an_owner_resets_a_guest_that_runs_or_is_paused() {
    if !has_kvm() {
        return;
    }
    for vcpus in [1, 3] {
        let machine = running(&program("fill=8M,ws=2M,rate=4/ms,tick=100us", 32, vcpus));
        wait_ready(&machine);
        machine.reset_by_owner().unwrap();
        assert_eq!((machine.status(), machine.resets()), (GuestStatus::Running, (0, 1)));
        wait_ready(&machine);
        machine.pause_by_owner().unwrap();
        machine.reset_by_owner().unwrap();
        assert_eq!(machine.status(), GuestStatus::Paused);
        assert_eq!(machine.guest_counters().map(|counters| counters.heartbeats), Some(0));
        machine.continue_by_owner().unwrap();
        wait_ready(&machine);
        assert_sound(&machine);
    }
}

/// Dirty tracking has seen all that the reset wrote: the guest that arrives is the one that boots.
#[test]
fn a_guest_that_is_reset_during_its_migration_arrives_whole() {
    if !has_kvm() {
        return;
    }
    for tracking in [Tracking::Log, Tracking::Ring] {
        let config =
            MachineConfig { tracking, ..program("fill=8M,ws=2M,rate=4/ms,tick=100us", 32, 2) };
        let Ok(source) = Machine::new(&config) else { continue };
        source.continue_by_owner().unwrap();
        wait_ready(&source);
        let mut tracker = source.track().unwrap();
        let before = RamBitmap::new(source.guest_ram());
        tracker.sync(&before).unwrap();
        source.reset_by_owner().unwrap();
        let dirty = RamBitmap::new(source.guest_ram());
        tracker.sync(&dirty).unwrap();
        // The memory that had been filled, at least.
        assert!(dirty.count() >= 2048, "{} pages", dirty.count());
        drop(tracker);
        wait_ready(&source);
        let machine = move_guest_to(&source, &Factory::new(FactoryConfig::default()).unwrap());
        assert_sound(&machine);
        let error = machine.reset_by_owner().unwrap_err().to_string();
        assert!(error.starts_with("cannot reset it: the guest came from"), "{error}");
    }
}

/// The wish comes from a vCPU that is on its way out.
#[test]
fn a_guest_that_resets_all_the_time_stays_where_it_can_be_reset() {
    if !has_kvm() {
        return;
    }
    let kernel = Scratch::new("restless", &pvh(&[0xb0, 0xfe, 0xe6, 0x64, 0xf4]));
    let source = running(&boots(kernel.path(), 16));
    let mut left = 0;
    for _ in 0..50 {
        let _ = source.rehearse().expect("a reset is no obstacle to a rehearsal");
        source.begin_pause();
        match source.wait_paused() {
            Ok(paused) => {
                left += 1;
                let _ = source.take_state();
                source.resume(paused.permit, paused.was);
            }
            Err(error) => {
                let text = error.to_string();
                assert!(text.contains("asked to be reset at this moment"), "{text}");
            }
        }
        let now = source.resets().0;
        wait_for("a reset", || source.resets().0 > now);
    }
    eprintln!("stopped {left} of 50 times");
}
