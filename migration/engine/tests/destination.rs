//! A destination whose parts fail: what its owner and its source see of that.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on may panic")]

mod fake;

use fake::{FakeFactory, FakeVmm, Large, line};
use martlet_engine::{
    BuildRequest, DestinationVmm, Error, MigrateOptions, Migration, Outcome, ReceiveStatus,
    Receiver, Report,
};
use martlet_transport::{Address, Target, Until, connect_all};
use martlet_wire::hello::Hello;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

const LIMIT: Duration = Duration::from_secs(60);

fn receiver() -> (Receiver, Arc<FakeFactory>) {
    let factory = Arc::new(FakeFactory::default());
    let listen: Address = "tcp:127.0.0.1:0".parse().unwrap();
    let receiver =
        Receiver::start(&listen, Arc::<FakeFactory>::clone(&factory), Default::default()).unwrap();
    (receiver, factory)
}

fn begin(vmm: &Arc<FakeVmm>, to: &Receiver) -> Migration {
    let vmm = Arc::<FakeVmm>::clone(vmm);
    Migration::start(vmm, &to.address(), MigrateOptions::default()).unwrap()
}

fn migrate(vmm: &Arc<FakeVmm>, to: &Receiver) -> Report {
    begin(vmm, to).wait(LIMIT).expect("a migration ends")
}

fn moves_now(source: &Arc<FakeVmm>, receiver: &Receiver, factory: &FakeFactory) {
    assert!(source.is_running() && source.holds_permit());
    assert_eq!(migrate(source, receiver).outcome, Outcome::Completed);
    assert_eq!(receiver.wait(LIMIT), ReceiveStatus::Arrived);
    factory.last.lock().unwrap().take().unwrap().quit();
    source.quit();
}

/// A migration to a machine that is being built, and does not get done.
fn begin_to_build(vmm: &Arc<FakeVmm>, to: &Receiver, factory: &FakeFactory) -> Migration {
    factory.hold_build.store(true, Ordering::SeqCst);
    let migration = begin(vmm, to);
    while factory.builds.load(Ordering::SeqCst) == 0 {
        std::thread::yield_now();
    }
    migration
}

/// Waits until the next source may come; why the last attempt failed.
fn last_error(receiver: &Receiver) -> String {
    loop {
        match receiver.status() {
            ReceiveStatus::Listening { last_error: Some(error) } => return error,
            _ => std::thread::yield_now(),
        }
    }
}

#[test]
fn a_panic_ends_the_attempt_and_nothing_else() {
    let (receiver, factory) = receiver();
    let source = FakeVmm::booted();
    for flag in [&factory.panic_build, &factory.panic_load] {
        flag.store(true, Ordering::SeqCst);
        let report = migrate(&source, &receiver);
        flag.store(false, Ordering::SeqCst);
        assert_eq!(report.outcome, Outcome::Failed);
        let error = line(&report).unwrap();
        assert!(error.contains("internal error: a test wants it"), "{error}");
        let error = last_error(&receiver);
        assert!(error.contains("internal error: a test wants it"), "{error}");
        factory.last.lock().unwrap().take();
    }
    moves_now(&source, &receiver, &factory);
}

/// The source hears why before its guest's memory here is dropped, which takes the host seconds if
/// that is large: it does not wait, and nobody is left in doubt.
#[test]
fn a_refusal_does_not_wait_for_the_memory_to_be_dropped() {
    for panics in [false, true] {
        let (receiver, factory) = receiver();
        let source = FakeVmm::booted();
        let flag = if panics { &factory.panic_load } else { &factory.fail_load };
        flag.store(true, Ordering::SeqCst);
        factory.hold_drop.store(true, Ordering::SeqCst);
        let report = migrate(&source, &receiver);
        assert_eq!(report.outcome, Outcome::Failed);
        let error = line(&report).unwrap();
        let why = if panics { "a test wants it" } else { "load" };
        assert!(error.contains(why), "{error}");
        assert_eq!(receiver.status(), ReceiveStatus::Active, "it is being dropped");
        flag.store(false, Ordering::SeqCst);
        factory.hold_drop.store(false, Ordering::SeqCst);
        last_error(&receiver);
        moves_now(&source, &receiver, &factory);
    }
}

#[test]
fn a_panic_behind_the_start_takes_no_guest_away() {
    let (receiver, factory) = receiver();
    let source = FakeVmm::booted();
    factory.panic_resume.store(true, Ordering::SeqCst);
    assert_eq!(migrate(&source, &receiver).outcome, Outcome::Completed);
    assert_eq!(receiver.wait(LIMIT), ReceiveStatus::Arrived);
    let there = factory.last.lock().unwrap().take().unwrap();
    assert!(there.is_running() && !source.holds_permit());
    source.quit();
    there.quit();
}

/// It may move on, and its memory is not to stay for those who ask what became of it.
#[test]
fn a_machine_that_was_handed_out_is_its_owners_alone() {
    let factory = |_: &BuildRequest<'_>| -> Result<Arc<dyn DestinationVmm>, Error> {
        let vmm = FakeVmm::new();
        Ok(vmm)
    };
    let listen: Address = "tcp:127.0.0.1:0".parse().unwrap();
    let receiver = Receiver::start(&listen, Arc::new(factory), Default::default()).unwrap();
    let source = FakeVmm::booted();
    assert_eq!(migrate(&source, &receiver).outcome, Outcome::Completed);
    assert_eq!(receiver.wait(LIMIT), ReceiveStatus::Arrived);
    assert!(receiver.machine::<Large>().is_none(), "it is of another type, and stays");
    let machine = receiver.machine::<FakeVmm>().unwrap();
    assert!(receiver.machine::<FakeVmm>().is_none(), "there is one");
    let left = Arc::downgrade(&machine);
    machine.quit();
    drop(machine);
    // The attempt may still be about to end.
    let until = Instant::now() + LIMIT;
    while left.upgrade().is_some() {
        assert!(Instant::now() < until, "somebody keeps it");
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(receiver.status(), ReceiveStatus::Arrived);
    source.quit();
}

#[test]
fn a_stop_is_heard_while_a_machine_is_built() {
    let (receiver, factory) = receiver();
    let source = FakeVmm::booted();
    let migration = begin_to_build(&source, &receiver, &factory);
    receiver.stop();
    assert_eq!(receiver.wait(LIMIT), ReceiveStatus::Stopped);
    let report = migration.wait(LIMIT).unwrap();
    assert_eq!(report.outcome, Outcome::Failed);
    let error = line(&report).unwrap();
    assert!(error.contains("told to stop"), "{error}");
    source.quit();
}

/// The source goes away while its machine is built: the next one gets its turn.
#[test]
fn a_machine_that_nobody_wants_any_more_is_not_built_to_its_end() {
    let (receiver, factory) = receiver();
    let source = FakeVmm::booted();
    let migration = begin_to_build(&source, &receiver, &factory);
    migration.cancel();
    assert_eq!(migration.wait(LIMIT).unwrap().outcome, Outcome::Cancelled);
    last_error(&receiver);
    factory.hold_build.store(false, Ordering::SeqCst);
    moves_now(&source, &receiver, &factory);
}

/// Who has connected and said nothing yet keeps no other from the place.
#[test]
fn a_source_that_says_nothing_holds_nobody_up() {
    let (receiver, factory) = receiver();
    let (to, until) = (receiver.address(), Until::within(LIMIT));
    let target = Target::resolve(&to).unwrap().remove(0);
    let silent = connect_all(&to, &target, &vec![Hello::control(); 20], &until).unwrap();
    assert_eq!(receiver.status(), ReceiveStatus::Listening { last_error: None });
    moves_now(&FakeVmm::booted(), &receiver, &factory);
    drop(silent);
}

#[test]
fn an_arrival_shows_before_its_devices_are_back() {
    let (receiver, factory) = receiver();
    let source = FakeVmm::booted();
    factory.hold_resume.store(true, Ordering::SeqCst);
    let migration = begin(&source, &receiver);
    assert_eq!(receiver.wait(LIMIT), ReceiveStatus::Arrived);
    let there = factory.last.lock().unwrap().take().unwrap();
    there.hold_resume.store(false, Ordering::SeqCst);
    assert_eq!(migration.wait(LIMIT).unwrap().outcome, Outcome::Completed);
    source.quit();
    there.quit();
}
