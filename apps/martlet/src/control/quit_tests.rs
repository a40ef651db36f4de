//! The end of a process, with a pretended guest in it.

use super::*;
use crate::control::incoming::Place;
use crate::fake::{FakeAttempt, FakeGuest, FakeListen};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

type End = JoinHandle<Result<QuitCause, Failure>>;

fn migrating(status: Status) -> (Arc<Control>, Arc<FakeAttempt>) {
    let guest = FakeGuest::new();
    let control = Control::with_guest(Arc::clone(&guest) as _);
    control.migrate(&"unix:/x".parse().unwrap(), |_| ()).unwrap();
    let attempt = guest.last_attempt();
    attempt.reach(status, 1);
    (control, attempt)
}

fn end(control: &Arc<Control>) -> End {
    let control = Arc::clone(control);
    std::thread::spawn(move || control.wait_for_quit())
}

/// Waits for something that another thread does; a test that waits for ever has failed.
fn until(is: impl Fn() -> bool) {
    while !is() {
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn is_ending(control: &Control) -> bool {
    control.lock().quit.wish.is_some()
}

#[test]
fn an_undecided_guest_is_thrown_away_by_force_only() {
    let (control, attempt) = migrating(Status::Undecided);
    let refused = control.request_quit(QuitCause::Command, false).unwrap_err();
    assert!(refused.contains("undecided"), "{refused}");
    assert!(!is_ending(&control));
    control.request_quit(QuitCause::Command, true).unwrap();
    assert!(matches!(control.wait_for_quit(), Err(Failure::Undecided(_))));
    assert!(attempt.asked.lock().unwrap().is_empty());
}

#[test]
fn a_switchover_is_waited_for_however_long_it_takes() {
    for last in [Status::Failed, Status::Completed] {
        let (control, attempt) = migrating(Status::Device);
        control.request_quit(QuitCause::Command, false).unwrap();
        let end = end(&control);
        until(|| *attempt.asked.lock().unwrap() == ["cancel"]);
        assert!(
            control.migrate(&"unix:/y".parse().unwrap(), |_| ()).is_err(),
            "nothing new begins"
        );
        assert!(!end.is_finished());
        attempt.reach(last, 1);
        assert_eq!(end.join().unwrap().unwrap(), QuitCause::Command);
    }
}

#[test]
fn a_switchover_that_ends_undecided_calls_the_end_off() {
    let (control, attempt) = migrating(Status::Device);
    assert!(control.quit_by_signal());
    let end = end(&control);
    attempt.reach(Status::Undecided, 1);
    until(|| !is_ending(&control));
    assert!(!end.is_finished());
    // The second signal is force.
    assert!(control.quit_by_signal());
    assert!(matches!(end.join().unwrap(), Err(Failure::Undecided(_))));
}

#[test]
fn a_second_signal_does_not_wait_and_a_third_ends_at_once() {
    let (control, attempt) = migrating(Status::Device);
    assert!(control.quit_by_signal());
    let end = end(&control);
    until(|| *attempt.asked.lock().unwrap() == ["cancel"]);
    assert!(control.quit_by_signal());
    assert!(matches!(end.join().unwrap(), Err(Failure::Undecided(_))));
    assert!(!control.quit_by_signal());
}

#[test]
fn a_signal_that_was_refused_long_ago_is_no_force() {
    let (control, attempt) = migrating(Status::Undecided);
    assert!(control.quit_by_signal());
    attempt.reach(Status::Failed, 1);
    control.migrate(&"unix:/y".parse().unwrap(), |_| ()).unwrap();
    assert!(control.quit_by_signal());
    assert!(!control.is_forced());
}

#[test]
fn a_guest_that_arrives_while_its_process_ends_is_kept() {
    let listen = Arc::new(FakeListen::default());
    let control = Control::waiting(Arc::clone(&listen) as _);
    control.receive(&"unix:/x".parse().unwrap()).unwrap();
    let incoming = Arc::clone(&listen.opened.lock().unwrap()[0]);
    *incoming.status.lock().unwrap() = ReceiveStatus::Active;
    control.request_quit(QuitCause::Command, false).unwrap();
    let end = end(&control);
    until(|| incoming.stops() > 0);
    assert!(!end.is_finished());
    *incoming.status.lock().unwrap() = ReceiveStatus::Arrived;
    until(|| !is_ending(&control));
    until(|| control.run_state() == "running");
    // Now its owner knows.
    control.request_quit(QuitCause::Command, false).unwrap();
    assert_eq!(end.join().unwrap().unwrap(), QuitCause::Command);
}

/// A destination that was asked to end before its guest arrived.
fn asked_before_the_arrival() -> Arc<Control> {
    let listen = Arc::new(FakeListen::default());
    let incoming = listen.open(&"unix:/x".parse().unwrap());
    let control = Control::waiting(Arc::clone(&listen) as _);
    control.lock().incoming = Some(Place::Open(Arc::clone(&incoming) as _));
    *incoming.status.lock().unwrap() = ReceiveStatus::Active;
    control.request_quit(QuitCause::Command, false).unwrap();
    *incoming.status.lock().unwrap() = ReceiveStatus::Arrived;
    control
}

#[test]
fn a_guest_that_arrives_just_after_the_wish_to_end_is_kept() {
    let control = asked_before_the_arrival();
    assert!(matches!(control.settle(), Err(Obstacle::Refused(ARRIVED))), "not looked at yet");
    let welcomed = asked_before_the_arrival();
    welcomed.lock().guest = Some(FakeGuest::new());
    assert!(matches!(welcomed.settle(), Err(Obstacle::Refused(ARRIVED))), "already looked at");
    for control in [control, welcomed] {
        // Who asks again knows that it is here.
        control.request_quit(QuitCause::Command, false).unwrap();
        assert!(control.settle().is_ok());
    }
}

#[test]
fn a_guest_that_arrives_after_a_wish_by_force_is_ended() {
    let control = asked_before_the_arrival();
    control.request_quit(QuitCause::Command, true).unwrap();
    assert!(control.settle().is_ok());
}

#[test]
fn a_signal_that_was_refused_a_minute_ago_is_no_force() {
    let (control, _attempt) = migrating(Status::Undecided);
    assert!(control.quit_by_signal());
    let quit = &control.lock().quit;
    let refused = quit.refused_signal.unwrap();
    assert!(quit.insists(refused + INSISTING_MAX / 2));
    assert!(!quit.insists(refused + INSISTING_MAX));
}
