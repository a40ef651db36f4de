use super::*;
use crate::tests::Waited;
use crate::{EndCause, GuestStatus};
use martlet_engine::RunState;
use std::task::Waker;

#[test]
fn the_program_lives_and_its_owner_pauses_it() {
    if !has_kvm() {
        return;
    }
    let machine = Machine::new(&program("fill=8M,ws=1M,rate=1/tick,tick=100us", 32, 1)).unwrap();
    assert_eq!(machine.status(), GuestStatus::Paused);
    machine.continue_by_owner().unwrap();
    machine.continue_by_owner().unwrap();
    wait_ready(&machine);
    assert!(machine.first_heartbeat() <= machine.last_heartbeat());
    machine.pause_by_owner().unwrap();
    machine.pause_by_owner().unwrap();
    assert_eq!(machine.status(), GuestStatus::Paused);
    let stopped_at = heartbeats(&machine);
    std::thread::sleep(Duration::from_millis(5));
    assert_eq!(heartbeats(&machine), stopped_at);
    machine.continue_by_owner().unwrap();
    assert_sound(&machine);
    machine.quit();
    assert_eq!(machine.status(), GuestStatus::Gone);
    assert!(machine.continue_by_owner().is_err());
}

#[test]
fn thousands_of_stops_lose_nothing() {
    if !has_kvm() {
        return;
    }
    let machine = running(&program("fill=4M,ws=1M,rate=1/tick,tick=50us", 32, 2));
    wait_ready(&machine);
    for round in 0..2000 {
        if round % 2 == 0 {
            machine.pause_by_owner().unwrap();
            machine.continue_by_owner().unwrap();
        } else {
            machine.begin_pause(Waker::noop());
            let paused = machine.wait_paused().unwrap();
            assert_eq!(paused.was, RunState::Running);
            if round % 4 == 1 {
                machine.take_state().unwrap();
            }
            machine.resume(Some(paused));
        }
    }
    assert_sound(&machine);
}

#[test]
fn many_vcpus_stop_together() {
    if !has_kvm() {
        return;
    }
    let machine = running(&program("fill=4M,ws=1M,rate=64/tick,tick=2ms", 64, 64));
    wait_ready(&machine);
    let mut pauses = Vec::new();
    for _ in 0..5 {
        machine.begin_pause(Waker::noop());
        let begin = Instant::now();
        let paused = machine.wait_paused().unwrap();
        pauses.push(begin.elapsed());
        machine.take_state().unwrap();
        machine.resume(Some(paused));
        std::thread::sleep(Duration::from_millis(2));
    }
    pauses.sort();
    eprintln!("64 vCPUs are out after {pauses:?}");
    // A few milliseconds where nobody else wants the processors.
    assert!(pauses[0] < Duration::from_millis(200), "{pauses:?}");
    assert_sound(&machine);
}

#[test]
fn a_rehearsal_costs_little_and_changes_nothing() {
    if !has_kvm() {
        return;
    }
    let machine = running(&program("fill=4M,ws=1M,rate=1/tick,tick=50us", 32, 1));
    wait_ready(&machine);
    for round in 0..20 {
        let rehearsal = machine.rehearse().unwrap().unwrap();
        assert!(!rehearsal.state.is_empty());
        if round > 15 {
            eprintln!(
                "pause {:?}, save {:?}, {} bytes",
                rehearsal.pause,
                rehearsal.save,
                rehearsal.state.len()
            );
        }
    }
    assert_eq!(machine.status(), GuestStatus::Running);
    assert_sound(&machine);
    // A paused guest can be rehearsed too, and stays paused.
    machine.pause_by_owner().unwrap();
    let stopped_at = heartbeats(&machine);
    machine.rehearse().unwrap().unwrap();
    assert_eq!(machine.status(), GuestStatus::Paused);
    assert_eq!(heartbeats(&machine), stopped_at);
}

#[test]
fn the_owner_keeps_out_of_a_switchover() {
    if !has_kvm() {
        return;
    }
    let machine = running(&program("fill=4M,ws=1M,rate=1/tick,tick=50us", 32, 1));
    wait_ready(&machine);
    machine.pause_by_owner().unwrap();
    machine.begin_pause(Waker::noop());
    let paused = machine.wait_paused().unwrap();
    assert_eq!(paused.was, RunState::Paused);
    assert_eq!(machine.status(), GuestStatus::Switchover);
    let error = machine.continue_by_owner().unwrap_err();
    assert_eq!(error.to_string(), "cannot continue it: the guest is being moved away");
    assert!(machine.pause_by_owner().is_err());
    assert!(machine.rehearse().is_err());
    machine.resume(Some(paused));
    assert_eq!(machine.status(), GuestStatus::Paused);
    machine.continue_by_owner().unwrap();
    assert_sound(&machine);
}

#[test]
fn a_throttled_guest_loses_its_share() {
    if !has_kvm() {
        return;
    }
    let machine = running(&program("fill=1M,ws=1M,rate=1/tick,tick=50us", 32, 1));
    wait_ready(&machine);
    let beats_in = |time| {
        let before = heartbeats(&machine);
        std::thread::sleep(time);
        heartbeats(&machine) - before
    };
    let time = Duration::from_millis(600);
    let free = beats_in(time);
    machine.set_throttle(97);
    std::thread::sleep(Duration::from_millis(30));
    let (begin, before) = (Instant::now(), heartbeats(&machine));
    std::thread::sleep(time);
    // On a busy host its turn may come late.
    wait_for("a heartbeat", || heartbeats(&machine) > before);
    let (throttled, took) = (heartbeats(&machine) - before, begin.elapsed());
    eprintln!("heartbeats in {time:?}: {free}, throttled by 97 % {throttled} in {took:?}");
    // 10 to 20 ms of every 333, and a tick is 50 us; were it free there would be 20 000 a second.
    let limit = took.as_millis() * 10 / 3;
    assert!(u128::from(throttled) <= limit, "{throttled} in {took:?}");
    // A stop does not wait for the end of a sleep.
    let stops = (0..10).map(|_| {
        let begin = Instant::now();
        machine.pause_by_owner().unwrap();
        let stop = begin.elapsed();
        machine.continue_by_owner().unwrap();
        std::thread::sleep(Duration::from_millis(5));
        stop
    });
    let quickest = stops.min().unwrap();
    // The sleep is of 323 ms.
    assert!(quickest < Duration::from_millis(100), "{quickest:?}");
    machine.set_throttle(0);
    assert_sound(&machine);
}

#[test]
fn an_ended_guest_says_why_and_stays() {
    if !has_kvm() {
        return;
    }
    let machine = running(&program("fill=1M,ws=1M,rate=1/tick,tick=50us", 32, 2));
    wait_ready(&machine);
    machine.bus.write(0x80, 1, &[0]);
    // Without its page tables the program faults, and without an interrupt table that is a
    // triple fault.
    machine.pause_by_owner().unwrap();
    assert!(machine.memory.write(Gpa(0x5000), &[0; 8]));
    machine.continue_by_owner().unwrap();
    wait_for("the end", || machine.status() != GuestStatus::Running);
    let GuestStatus::Ended(EndCause::Crash(reason)) = machine.status() else {
        panic!("{:?}", machine.status());
    };
    eprintln!("ended: {reason}");
    machine.begin_pause(Waker::noop());
    let error = machine.wait_paused().unwrap_err().to_string();
    assert!(error.starts_with("cannot stop the guest: the guest has ended"), "{error}");
    assert!(machine.rehearse().is_err());
    assert!(machine.continue_by_owner().is_err());
}
