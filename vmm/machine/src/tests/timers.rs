//! Timers go on across moves: no tick is lost for good and none comes twice.

use super::elf::{Scratch, boots, pvh};
use super::*;
use crate::{Factory, FactoryConfig, GuestStatus};

/// Where `guests/timers.s` keeps its numbers.
const TICKS: Gpa = Gpa(0x8000);
const FAULTS: Gpa = Gpa(0x8004);

const HZ: u32 = 100;
const PERIOD: Duration = Duration::from_millis(10);
/// The PIT's clock (Intel 8254).
const PIT_HZ: u32 = 1_193_182;
/// KVM's local APIC counts nanoseconds (arch/x86/kvm/lapic.h, APIC_BUS_CYCLE_NS_DEFAULT), here
/// divided by 16.
const APIC_HZ: u32 = 1_000_000_000 / 16;
const MOVES: u32 = 20;
/// A timer that loses ticks for good loses them each time; a busy host does not.
const ATTEMPTS: u32 = 4;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Timer {
    Pit,
    ApicPeriodic,
    TscDeadline,
}

fn word(machine: &Machine, at: Gpa) -> u32 {
    let mut bytes = [0; 4];
    assert!(machine.memory.read(at, &mut bytes));
    u32::from_le_bytes(bytes)
}

/// Moves a guest after its timer has ticked for a while; returns how long it stood. A slow move
/// has its state loaded long before it starts.
fn move_guest(source: &Machine, is_slow: bool) -> (Arc<Machine>, Duration) {
    let factory = Factory::new(FactoryConfig::default()).unwrap();
    let target = destination(&factory, source);
    for pause_ms in if is_slow { [100, 150] } else { [0, 0] } {
        let state = source.rehearse().unwrap().state;
        target.load_state(&state, LoadFor::Rehearsal).unwrap();
        std::thread::sleep(Duration::from_millis(pause_ms));
    }
    target.arm(Duration::from_secs(1));
    let begin = Instant::now();
    source.begin_pause();
    let paused = source.wait_paused().unwrap();
    let state = source.take_state().unwrap();
    moving::copy_ram(source, &target.ram());
    target.load_state(&state, START_HERE).unwrap();
    target.start(paused.permit, paused.was);
    let stood = begin.elapsed();
    source.moved_away();
    (factory.machine().expect("it arrived"), stood)
}

/// Ticks that came, and that should have come at least and at most.
fn count(timer: Timer, kernel: &std::path::Path) -> (u32, f64, f64) {
    let mut machine = running(&boots(kernel, 16));
    wait_for("ticks", || {
        assert_eq!(machine.group.ended_because(), None);
        assert_eq!(word(&machine, FAULTS), 0);
        word(&machine, TICKS) > 3
    });
    let (begin, first) = (Instant::now(), word(&machine, TICKS));
    let mut stood = Duration::ZERO;
    for number in 0..MOVES {
        std::thread::sleep(Duration::from_millis(150));
        let (moved, time) = move_guest(&machine, number % 2 == 1);
        machine = moved;
        stood += time;
    }
    std::thread::sleep(Duration::from_millis(300));
    let (elapsed, ticks) = (begin.elapsed(), word(&machine, TICKS).wrapping_sub(first));
    assert_eq!(word(&machine, FAULTS), 0);
    assert_eq!(machine.status(), GuestStatus::Running);
    let ticks_of = |time: Duration| time.as_secs_f64() * f64::from(HZ);
    // A timer that counts by itself stands while the guest stands; a deadline is a point in time.
    let (least, most) = match timer {
        Timer::TscDeadline => (elapsed, elapsed),
        Timer::ApicPeriodic => (elapsed - stood, elapsed - stood),
        // KVM does not tell how far a period had come: each move begins a new one.
        Timer::Pit => ((elapsed - stood).saturating_sub(PERIOD * MOVES), elapsed - stood),
    };
    eprintln!("{timer:?}: {ticks} ticks in {elapsed:?}, it stood for {stood:?} of them");
    (ticks, ticks_of(least) * 0.99 - 2.0, ticks_of(most) * 1.01 + 2.0)
}

fn keeps_time(timer: Timer) {
    if !has_kvm() {
        return;
    }
    let khz = {
        let kernel = Scratch::new(&format!("rate-{timer:?}"), &pvh(&guests::timers(0, 0)));
        Machine::new(&boots(kernel.path(), 16)).unwrap().vm.tsc_khz()
    };
    let (kind, period) = match timer {
        Timer::Pit => (0, PIT_HZ / HZ),
        Timer::ApicPeriodic => (1, APIC_HZ / HZ),
        Timer::TscDeadline => (2, khz * (1000 / HZ)),
    };
    let kernel = Scratch::new(&format!("timer-{timer:?}"), &pvh(&guests::timers(kind, period)));
    let mut told = Vec::new();
    for _ in 0..ATTEMPTS {
        let (ticks, least, most) = count(timer, kernel.path());
        if (least..=most).contains(&f64::from(ticks)) {
            return;
        }
        told.push(format!("{ticks} for {least:.0} to {most:.0}"));
    }
    panic!("{timer:?}: {}", told.join(", "));
}

#[test]
fn the_interval_timer_keeps_its_time_across_moves() {
    keeps_time(Timer::Pit);
}

#[test]
fn the_apic_timer_keeps_its_time_across_moves() {
    keeps_time(Timer::ApicPeriodic);
}

#[test]
fn the_tsc_deadline_keeps_its_time_across_moves() {
    keeps_time(Timer::TscDeadline);
}
