//! Timers go on across moves: no tick is lost for good and none comes twice.

use super::elf::{Scratch, boots, pvh};
use super::*;
use crate::tests::Waited;
use crate::{Factory, FactoryConfig, GuestStatus};
use std::task::Waker;

/// Where `guests/timers.s` keeps its numbers.
const TICKS: Gpa = Gpa(0x8000);
const FAULTS: Gpa = Gpa(0x8004);

/// The PIT's clock (Intel 8254).
const PIT_HZ: u32 = 1_193_182;
/// KVM's local APIC counts nanoseconds (arch/x86/kvm/lapic.h, APIC_BUS_CYCLE_NS_DEFAULT), here
/// divided by 16.
const APIC_HZ: u32 = 1_000_000_000 / 16;
const MOVES: u32 = 20;
/// Ticks a second of each attempt. Of a vCPU that gets no processor for longer than a period KVM
/// drops ticks, move or not; so a busy host has further attempts, with longer periods. A timer
/// that loses ticks over moves loses them at any rate.
const RATES: [u32; 3] = [100, 50, 20];
/// How long a guest may take to serve the ticks that wait for it.
const CATCHING_UP: Duration = Duration::from_secs(3);

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
        let state = source.rehearse().unwrap().unwrap().state;
        target.load_state(&state, LoadFor::Rehearsal).unwrap();
        std::thread::sleep(Duration::from_millis(pause_ms));
    }
    target.arm(Duration::from_secs(1));
    let begin = Instant::now();
    source.begin_pause(Waker::noop());
    let paused = source.wait_paused().unwrap();
    let state = source.take_state().unwrap();
    moving::copy_ram(source, &target.ram());
    target.load_state(&state, START_HERE).unwrap();
    target.start(paused.permit, paused.was);
    let stood = begin.elapsed();
    source.moved_away();
    (factory.machine().expect("it arrived"), stood)
}

/// Ticks that must have come at least and at most.
fn expected(timer: Timer, rate: u32, elapsed: Duration, stood: Duration) -> (f64, f64) {
    let ticks = |time: Duration| time.as_secs_f64() * f64::from(rate);
    // A timer that counts by itself stands while the guest stands; a deadline is a point in time.
    let (time, begun_anew) = match timer {
        Timer::TscDeadline => (elapsed, 0),
        Timer::ApicPeriodic => (elapsed - stood, 0),
        // KVM does not tell how far a period had come: each move begins a new one.
        Timer::Pit => (elapsed - stood, MOVES),
    };
    (ticks(time) * 0.99 - f64::from(begun_anew) - 2.0, ticks(time) * 1.01 + 2.0)
}

/// Moves a guest that counts its ticks; says what was wrong with their number.
fn count(timer: Timer, rate: u32, kernel: &std::path::Path) -> Result<(), String> {
    let mut machine = running(&boots(kernel, 16));
    wait_for("ticks", || {
        assert_eq!(machine.group.ended_because(), None);
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
    let moved = Instant::now();
    loop {
        std::thread::sleep(Duration::from_millis(100));
        let ticks = word(&machine, TICKS).wrapping_sub(first);
        let elapsed = begin.elapsed();
        assert_eq!((word(&machine, FAULTS), machine.status()), (0, GuestStatus::Running));
        let (least, most) = expected(timer, rate, elapsed, stood);
        let told = format!(
            "{timer:?}, {rate} Hz: {ticks} ticks, {least:.0} to {most:.0} expected, in {MOVES} \
             moves and {elapsed:.1?}, {stood:.1?} of them at rest"
        );
        if (least..=most).contains(&f64::from(ticks)) {
            eprintln!("{told}");
            return Ok(());
        }
        if f64::from(ticks) > most || moved.elapsed() > CATCHING_UP {
            eprintln!("{told}");
            return Err(told);
        }
    }
}

fn keeps_time(timer: Timer) {
    if !has_kvm() {
        return;
    }
    let khz = {
        let kernel = Scratch::new(&format!("rate-{timer:?}"), &pvh(&guests::timers(0, 0)));
        Machine::new(&boots(kernel.path(), 16)).unwrap().vm.tsc_khz()
    };
    let mut wrong = Vec::new();
    for rate in RATES {
        let (kind, period) = match timer {
            Timer::Pit => (0, PIT_HZ / rate),
            Timer::ApicPeriodic => (1, APIC_HZ / rate),
            Timer::TscDeadline => (2, khz * (1000 / rate)),
        };
        let kernel = Scratch::new(&format!("timer-{timer:?}"), &pvh(&guests::timers(kind, period)));
        match count(timer, rate, kernel.path()) {
            Ok(()) => return,
            Err(told) => wrong.push(told),
        }
    }
    panic!("{}", wrong.join("; "));
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

/// A guest whose local APIC's timer runs once.
fn once(name: &str, kind: u32) -> (Scratch, Arc<Machine>) {
    let kernel = Scratch::new(name, &pvh(&guests::timers(kind, APIC_HZ / 1000)));
    let machine = running(&boots(kernel.path(), 16));
    wait_for("a tick", || word(&machine, TICKS) > 0);
    (kernel, machine)
}

/// KVM keeps a tick that was not delivered to itself. A guest that lost one would wait for ever.
#[test]
fn no_tick_of_a_timer_that_runs_once_is_lost() {
    if !has_kvm() {
        return;
    }
    let (_kernel, mut machine) = once("once-again", 3);
    for number in 0..MOVES {
        machine = move_guest(&machine, number % 4 == 3).0;
        let ticks = word(&machine, TICKS);
        wait_for("a tick", || word(&machine, TICKS) != ticks);
    }
    assert_eq!((word(&machine, FAULTS), machine.status()), (0, GuestStatus::Running));
}

/// Nor does KVM tell that it was delivered, so it comes once more with each move: as interrupts may
/// for which there is no reason any more. Not oftener.
#[test]
fn a_tick_that_was_delivered_comes_at_most_once_more_with_a_move() {
    if !has_kvm() {
        return;
    }
    let (_kernel, mut machine) = once("once", 4);
    for number in 0..MOVES {
        machine = move_guest(&machine, number % 4 == 3).0;
    }
    std::thread::sleep(Duration::from_millis(100));
    let ticks = word(&machine, TICKS);
    eprintln!("{ticks} ticks in {MOVES} moves");
    assert!(ticks <= 1 + MOVES, "{ticks}");
    assert_eq!((word(&machine, FAULTS), machine.status()), (0, GuestStatus::Running));
}

/// How long a guest stands that then goes on where it was.
const STANDS: Duration = Duration::from_secs(2);

/// Lets a guest stand that is driven by the interval timer, and asserts that the ticks of that time
/// do not come when it goes on.
fn stands(name: &str, stand: impl Fn(&Machine)) {
    if !has_kvm() {
        return;
    }
    let rate = RATES[0];
    let kernel = Scratch::new(name, &pvh(&guests::timers(0, PIT_HZ / rate)));
    let machine = running(&boots(kernel.path(), 16));
    let ticks = || word(&machine, TICKS);
    wait_for("ticks", || ticks() > 3);
    let (begin, first) = (Instant::now(), ticks());
    stand(&machine);
    let stood = begin.elapsed();
    wait_for("ticks", || ticks() > first + rate);
    let (came, ran) = (ticks() - first, begin.elapsed() - STANDS);
    let most = ran.as_secs_f64() * f64::from(rate) * 1.01 + 3.0;
    eprintln!("{came} ticks in {ran:.2?} that it ran, {stood:.2?} until it went on");
    assert!(f64::from(came) <= most, "{came} ticks in {ran:.2?}: at most {most:.0} are due");
}

#[test]
fn ticks_of_a_pause_do_not_come_later() {
    stands("paused", |machine| {
        machine.pause_by_owner().unwrap();
        std::thread::sleep(STANDS);
        machine.continue_by_owner().unwrap();
    });
}

#[test]
fn ticks_of_a_switchover_that_failed_do_not_come_later() {
    stands("stayed", |machine| {
        machine.begin_pause(Waker::noop());
        let paused = machine.wait_paused().unwrap();
        std::thread::sleep(STANDS);
        machine.resume(Some(paused));
    });
}

/// Signals that wait are counted for each user (RLIMIT_SIGPENDING of getrlimit(2)), all of its
/// processes together; a guest is stopped all the same.
#[test]
fn a_guest_stops_where_the_host_queues_no_signals() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    if !has_kvm() {
        return;
    }
    let kernel = Scratch::new("unqueued", &pvh(&guests::timers(0, PIT_HZ / RATES[0])));
    let machine = running(&boots(kernel.path(), 16));
    wait_for("ticks", || word(&machine, TICKS) > 3);
    let before = getrlimit(Resource::Sigpending);
    setrlimit(Resource::Sigpending, Rlimit { current: Some(0), ..before }).unwrap();
    let (tell, told) = std::sync::mpsc::channel();
    let pausing = Arc::clone(&machine);
    std::thread::spawn(move || tell.send(pausing.pause_by_owner()));
    let paused = told.recv_timeout(PATIENCE);
    setrlimit(Resource::Sigpending, before).unwrap();
    paused.expect("it stops").unwrap();
}
