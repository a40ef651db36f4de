use super::elf::{Scratch, boots, pvh};
use super::loopback::Trouble;
use super::moving::move_guest_to;
use super::*;
use crate::phase::{Event, Phase};
use crate::tests::Waited;
use crate::vcpu::lock;
use crate::{EndCause, Factory, FactoryConfig, GuestStatus};
use martlet_ram::RamBitmap;
use martlet_test_host::Want;
use std::task::Waker;

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

/// Asks the keyboard's controller for a reset, more than a tenth of a second after it began.
const RESTLESS: &[u8] = &[
    0x0f, 0x31, // rdtsc
    0x89, 0xc6, // mov esi, eax
    0x0f, 0x31, // wait: rdtsc
    0x29, 0xf0, // sub eax, esi
    0x3d, 0x00, 0x46, 0xc3, 0x23, // cmp eax, 600 million
    0x72, 0xf5, // jb wait
    0xb0, 0xfe, // mov al, 0xfe
    0xe6, 0x64, // out 0x64, al
    0xf4, // hlt
];

/// What a guest that resets itself all the time comes to.
fn is_restless(status: &GuestStatus) -> bool {
    let GuestStatus::Ended(EndCause::Crash(reason)) = status else { return false };
    reason == "reset: it did so 10 times within 1s"
}

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
        let why = "KVM emulates this guest here, and not all of it";
        return Want::RealMode.take(Err(why)).unwrap_or_default();
    }
    let status = machine.status();
    assert!(status == GuestStatus::Running || is_restless(&status), "{status:?}");
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

/// The file that it came from is not asked again.
#[test]
fn a_guest_is_reset_to_the_kernel_that_it_was_booted_from() {
    if !has_kvm() {
        return;
    }
    let kernel = Scratch::new("changing", &pvh(RESTLESS));
    let machine = running(&boots(kernel.path(), 16));
    std::fs::write(kernel.path(), b"no kernel").unwrap();
    wait_for("two resets", || {
        assert_eq!(machine.status(), GuestStatus::Running);
        machine.resets().0 >= 2
    });
}

#[test]
fn a_guest_that_does_nothing_but_reset_itself_ends() {
    if !has_kvm() {
        return;
    }
    let kernel = Scratch::new("looping", &pvh(COUNTER));
    let machine = running(&boots(kernel.path(), 16));
    wait_for("its end", || machine.status() != GuestStatus::Running);
    assert!(is_restless(&machine.status()), "{:?}", machine.status());
    assert!(machine.resets().0 >= 10);
}

/// Resets it while it runs and while it is paused.
fn is_reset_by_its_owner(machine: &Machine) {
    machine.reset_by_owner().unwrap();
    assert_eq!((machine.status(), machine.resets()), (GuestStatus::Running, (0, 1)));
    wait_ready(machine);
    machine.pause_by_owner().unwrap();
    machine.reset_by_owner().unwrap();
    assert_eq!(machine.status(), GuestStatus::Paused);
    assert_eq!(machine.guest_counters().map(|counters| counters.heartbeats), Some(0));
    machine.continue_by_owner().unwrap();
    wait_ready(machine);
    assert_sound(machine);
}

#[test]
fn an_owner_resets_a_guest_that_runs_or_is_paused() {
    if !has_kvm() {
        return;
    }
    for vcpus in [1, 3] {
        let machine = running(&program("fill=8M,ws=2M,rate=4/ms,tick=100us", 32, vcpus));
        wait_ready(&machine);
        is_reset_by_its_owner(&machine);
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
        let before = RamBitmap::new(source.memory.ram());
        tracker.sync(&before).unwrap();
        source.reset_by_owner().unwrap();
        let dirty = RamBitmap::new(source.memory.ram());
        tracker.sync(&dirty).unwrap();
        // The memory that had been filled, at least.
        assert!(dirty.count() >= 2048, "{} pages", dirty.count());
        drop(tracker);
        wait_ready(&source);
        let machine = move_guest_to(&source, &Factory::new(FactoryConfig::default()).unwrap());
        assert_sound(&machine);
    }
}

/// What it boots from has come with it, and goes on with it.
#[test]
fn a_guest_is_reset_wherever_it_has_arrived() {
    if !has_kvm() {
        return;
    }
    let mut machine = running(&program("fill=8M,ws=2M,rate=4/ms,tick=100us", 32, 2));
    for _ in 0..2 {
        wait_ready(&machine);
        machine = move_guest_to(&machine, &Factory::new(FactoryConfig::default()).unwrap());
        assert_sound(&machine);
        is_reset_by_its_owner(&machine);
    }
}

#[test]
fn a_guest_of_threads_is_reset() {
    let _one = one_threads_guest();
    let config = MachineConfig {
        accel: Accel::Threads,
        ..program("fill=8M,ws=2M,rate=4/ms,tick=100us", 32, 2)
    };
    let machine = running(&config);
    wait_ready(&machine);
    is_reset_by_its_owner(&machine);
}

/// All frames that were on their way are gone, and the cards are as new.
#[test]
fn a_guest_with_network_cards_is_reset() {
    if !has_kvm() {
        return;
    }
    let cards = nics::loopbacks(2, 2);
    let source = nics::with_cards(&program(nics::LOAD, 64, 2), &cards);
    nics::assert_frames_flow(&source, 100);
    source.reset_by_owner().unwrap();
    nics::assert_frames_flow(&source, 100);
    let there = nics::loopbacks(2, 2);
    let devices = nics::as_devices(&there);
    let factory = Factory::with_devices(FactoryConfig::default(), devices).unwrap();
    let machine = move_guest_to(&source, &factory);
    nics::assert_frames_flow(&machine, 100);
    machine.reset_by_owner().unwrap();
    nics::assert_frames_flow(&machine, 100);
}

/// A card that does not answer is waited for by the reset's thread alone: the engine gives up its
/// stop meanwhile.
#[test]
fn a_silent_card_keeps_only_the_reset_waiting() {
    if !has_kvm() {
        return;
    }
    let cards = nics::loopbacks(1, 2);
    let source = nics::with_cards(&program(nics::LOAD, 64, 1), &cards);
    cards[0].set_trouble(Trouble { silent: true, ..Trouble::default() });
    source.begin_suspend(Waker::noop());
    wait_for("the card to be told", || {
        assert!(source.poll_suspended().is_pending());
        cards[0].take_calls().contains(&"begin_suspend")
    });
    let begin = Instant::now();
    let resetting = Arc::clone(&source);
    let reset = std::thread::spawn(move || resetting.reset_by_owner());
    wait_for("the reset", || {
        matches!(lock(&source.control).phase, Phase::Resetting(_)) || reset.is_finished()
    });
    source.begin_pause(Waker::noop());
    assert!(source.poll_paused().is_pending());
    source.resume(None);
    // Half of what the reset waits for the card.
    assert!(begin.elapsed() < Duration::from_secs(5), "{:?}", begin.elapsed());
    assert!(!reset.is_finished());
    cards[0].set_trouble(Trouble::default());
    reset.join().unwrap().unwrap();
    source.nics.settle().unwrap();
    nics::assert_frames_flow(&source, 100);
}

/// KVM writes nowhere any more by itself.
#[test]
fn what_kvm_wrote_is_gone_with_a_reset() {
    /// Where `guests/pages.s` has KVM write, and how often it looked at all of it.
    const PAGES: std::ops::Range<u64> = 0x20_0000..0x20_5000;
    const ROUNDS: Gpa = Gpa(0x8004);
    if !has_kvm() {
        return;
    }
    let kernel = Scratch::new("reset-pages", &pvh(&guests::pages()));
    let source = running(&boots(kernel.path(), 16));
    let rounds = |machine: &Machine| {
        let mut bytes = [0; 4];
        assert!(machine.memory.read(ROUNDS, &mut bytes));
        u32::from_le_bytes(bytes)
    };
    wait_for("a look at all pages", || rounds(&source) > 0);
    let machine = move_guest_to(&source, &Factory::new(FactoryConfig::default()).unwrap());
    let before = rounds(&machine);
    wait_for("a look at all pages", || rounds(&machine) > before + 1);
    machine.pause_by_owner().unwrap();
    machine.reset_by_owner().unwrap();
    let mut page = [0; PAGE_BYTES];
    for at in PAGES.step_by(PAGE_BYTES) {
        assert!(machine.memory.read(Gpa(at), &mut page));
        assert_eq!(page, [0; PAGE_BYTES], "{at:#x}");
    }
    machine.continue_by_owner().unwrap();
    wait_for("a look at all pages", || rounds(&machine) > 1);
}

/// A kernel's own wish, too: by a triple fault, after a move.
#[test]
fn a_kernel_resets_itself_wherever_it_has_arrived() {
    if !has_kvm() {
        return;
    }
    let kernel = Scratch::new("travelling", &pvh(RESTLESS));
    let source = running(&boots(kernel.path(), 16));
    source.pause_by_owner().unwrap();
    let machine = move_guest_to(&source, &Factory::new(FactoryConfig::default()).unwrap());
    drop(kernel);
    machine.continue_by_owner().unwrap();
    wait_for("two resets", || {
        assert_eq!(machine.status(), GuestStatus::Running);
        machine.resets().0 >= 2
    });
}

/// An older martlet's source keeps it to itself.
#[test]
fn a_guest_that_came_without_what_it_boots_from_is_not_reset() {
    if !has_kvm() {
        return;
    }
    let machine = running(&program("fill=8M,ws=2M,rate=4/ms,tick=100us", 32, 1));
    wait_ready(&machine);
    let mut description = machine.description();
    description.memory.pop();
    description.power_on = None;
    let factory = Factory::new(FactoryConfig::default()).unwrap();
    let target = factory.build(&request(&description.encode(), &description.memory)).unwrap();
    machine.begin_pause(Waker::noop());
    let paused = machine.wait_paused().unwrap();
    moving::copy_ram(&machine, &target.ram());
    target.load_state(&machine.take_state().unwrap(), START_HERE).unwrap();
    target.start(paused.permit, paused.was);
    let machine = factory.machine().unwrap();
    assert_sound(&machine);
    let error = machine.reset_by_owner().unwrap_err().to_string();
    assert!(error.starts_with("cannot reset it: the guest came from"), "{error}");
}

/// While memory is cleared, its owner is not kept waiting.
#[test]
fn an_owner_pauses_a_guest_that_is_being_reset() {
    if !has_kvm() {
        return;
    }
    let machine = running(&program("fill=8M,ws=2M,rate=4/ms,tick=100us", 32, 2));
    wait_ready(&machine);
    let resetting = Arc::clone(&machine);
    let reset = std::thread::spawn(move || resetting.reset_by_owner());
    wait_for("the reset", || {
        let is_resetting = matches!(lock(&machine.control).phase, Phase::Resetting(_));
        if is_resetting {
            machine.pause_by_owner().unwrap();
            assert_eq!(machine.status(), GuestStatus::Paused);
        }
        is_resetting || reset.is_finished()
    });
    reset.join().unwrap().unwrap();
    machine.continue_by_owner().unwrap();
    wait_ready(&machine);
    assert_sound(&machine);
}

/// What is stopped is the guest that boots.
#[test]
fn a_stop_waits_for_a_reset() {
    if !has_kvm() {
        return;
    }
    let machine = running(&program("fill=8M,ws=2M,rate=4/ms,tick=100us", 32, 2));
    wait_ready(&machine);
    for is_cancelled in [true, false] {
        lock(&machine.control).step("reset it", Event::BeginReset).unwrap();
        machine.begin_pause(Waker::noop());
        assert!(machine.poll_paused().is_pending());
        if is_cancelled {
            machine.resume(None);
        }
        lock(&machine.control).step("reset it", Event::EndReset).unwrap();
        if is_cancelled {
            assert!(matches!(machine.poll_paused(), Poll::Ready(Err(_))));
            assert_sound(&machine);
        }
    }
    let paused = machine.wait_paused().unwrap();
    machine.take_state().unwrap();
    machine.resume(Some(paused));
    assert_sound(&machine);
}

/// The guest asked when its host had no thread for it.
#[test]
fn a_stop_asks_again_for_a_reset_that_never_began() {
    if !has_kvm() {
        return;
    }
    let machine = running(&program("fill=8M,ws=2M,rate=4/ms,tick=100us", 32, 2));
    wait_ready(&machine);
    machine.group.end_for(EndCause::Reset);
    machine.begin_pause(Waker::noop());
    let paused = machine.wait_paused().unwrap();
    assert_eq!(machine.resets(), (1, 0));
    machine.take_state().unwrap();
    machine.resume(Some(paused));
    wait_ready(&machine);
    assert_sound(&machine);
}

/// The wish comes from a vCPU that is on its way out.
#[test]
fn a_guest_that_resets_all_the_time_is_stopped() {
    if !has_kvm() {
        return;
    }
    let kernel = Scratch::new("restless", &pvh(RESTLESS));
    let source = running(&boots(kernel.path(), 16));
    for _ in 0..20 {
        let _ = source.rehearse().expect("a reset is no obstacle to a rehearsal");
        source.begin_pause(Waker::noop());
        let paused = source.wait_paused().unwrap();
        source.take_state().unwrap();
        source.resume(Some(paused));
        let now = source.resets().0;
        wait_for("a reset", || {
            assert_eq!(source.status(), GuestStatus::Running);
            source.resets().0 > now
        });
    }
}
