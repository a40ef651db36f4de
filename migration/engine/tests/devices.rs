//! Devices that write guest memory by themselves stop and start in their turn, and lose nothing.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on may panic")]

mod fake;

use fake::{FakeFactory, FakeVmm, line};
use martlet_engine::{Fault, MigrateOptions, Migration, Outcome, Receiver, Report, Status};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::Waker;
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(60);

/// A guest with a card that has passed some frames, and where it can go.
fn scene() -> (Arc<FakeVmm>, Receiver, Arc<FakeFactory>) {
    let factory = Arc::new(FakeFactory::default());
    factory.plug.store(true, Ordering::SeqCst);
    let listen = "tcp:127.0.0.1:0".parse().unwrap();
    let receiver =
        Receiver::start(&listen, Arc::<FakeFactory>::clone(&factory), Default::default()).unwrap();
    let source = FakeVmm::booted();
    source.plug(false);
    source.await_writes(100);
    check_frames_flow(&source);
    (source, receiver, factory)
}

fn migrate(vmm: &Arc<FakeVmm>, to: &Receiver) -> Report {
    let vmm = Arc::<FakeVmm>::clone(vmm);
    let migration = Migration::start(vmm, &to.address(), MigrateOptions::default()).unwrap();
    migration.wait(LIMIT).expect("a migration ends")
}

/// Stops everything and compares what was written with what is there.
fn check(vmm: &FakeVmm) {
    use martlet_engine::SourceVmm;
    vmm.begin_suspend(Waker::noop());
    while vmm.poll_suspended().is_pending() {
        std::thread::yield_now();
    }
    vmm.check_memory();
}

/// The card goes on passing frames.
fn check_frames_flow(vmm: &FakeVmm) {
    let before = vmm.device.writes.load(Ordering::SeqCst);
    let begin = std::time::Instant::now();
    while vmm.device.writes.load(Ordering::SeqCst) == before {
        assert!(begin.elapsed() < LIMIT, "the card passes no frames");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_card_moves_with_its_guest() {
    let (source, receiver, factory) = scene();
    let report = migrate(&source, &receiver);
    assert_eq!((report.outcome, line(&report)), (Outcome::Completed, None));
    let there = factory.last.lock().unwrap().clone().unwrap();
    assert!(!source.device.suspended_late.load(Ordering::SeqCst), "vCPUs stop last");
    let switchover = report.switchover.unwrap();
    assert!(switchover.devices.resume.is_some(), "{switchover:?}");
    assert_eq!(switchover.devices.trouble, None);
    let names: Vec<_> = switchover.timeline.iter().map(|span| span.name).collect();
    assert!(names.contains(&"suspend devices") && names.contains(&"resume devices"), "{names:?}");
    check_frames_flow(&there);
    check(&there);
}

#[test]
fn a_card_that_does_not_suspend_keeps_its_guest_here() {
    let (source, receiver, _factory) = scene();
    source.device.fail_suspend.store(true, Ordering::SeqCst);
    let report = migrate(&source, &receiver);
    assert_eq!(report.outcome, Outcome::Failed);
    let error = line(&report).unwrap();
    assert!(error.contains("cannot suspend card 0"), "{error}");
    assert!(source.is_running());
    check_frames_flow(&source);
    // The next attempt is as good as the first.
    source.device.fail_suspend.store(false, Ordering::SeqCst);
    assert_eq!(migrate(&source, &receiver).outcome, Outcome::Completed);
}

#[test]
fn a_card_that_says_nothing_ends_the_attempt_and_a_cancel_is_heard_meanwhile() {
    let (source, receiver, _factory) = scene();
    source.device.is_silent.store(true, Ordering::SeqCst);
    let report = migrate(&source, &receiver);
    assert_eq!(report.outcome, Outcome::Failed);
    assert_eq!(report.error.map(|error| error.fault()), Some(Fault::Device));
    assert!(source.is_running());
    check_frames_flow(&source);
    let options =
        MigrateOptions { downtime_limit: Duration::from_secs(30), ..MigrateOptions::default() };
    let vmm = Arc::<FakeVmm>::clone(&source);
    let migration = Migration::start(vmm, &receiver.address(), options).unwrap();
    let begin = std::time::Instant::now();
    while migration.progress().status != Status::Device {
        assert!(begin.elapsed() < LIMIT, "{:?}", migration.progress());
        std::thread::sleep(Duration::from_millis(1));
    }
    migration.cancel();
    let report = migration.wait(Duration::from_secs(5)).expect("a cancel is heard");
    assert_eq!(report.outcome, Outcome::Cancelled);
    assert!(source.is_running());
    check_frames_flow(&source);
    source.device.is_silent.store(false, Ordering::SeqCst);
    assert_eq!(migrate(&source, &receiver).outcome, Outcome::Completed);
}

#[test]
fn a_failed_switchover_gives_the_card_back() {
    let (source, receiver, _factory) = scene();
    source.fail_save.store(true, Ordering::SeqCst);
    assert_eq!(migrate(&source, &receiver).outcome, Outcome::Failed);
    assert!(source.is_running());
    check_frames_flow(&source);
    check(&source);
}

#[test]
fn a_card_that_does_not_come_back_is_named() {
    let (source, receiver, factory) = scene();
    factory.fail_resume.store(true, Ordering::SeqCst);
    let report = migrate(&source, &receiver);
    assert_eq!(report.outcome, Outcome::Completed, "the guest is there all the same");
    let trouble = report.switchover.unwrap().devices.trouble.unwrap();
    assert!(trouble.contains("resume card 0"), "{trouble}");
}
