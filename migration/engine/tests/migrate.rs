//! The engine from end to end in one process, over loopback, with a guest that is a thread.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on may panic")]

mod fake;

use fake::{FakeFactory, FakeVmm, blackout, line};
use martlet_engine::{
    MigrateOptions, Migration, Outcome, ReceiveStatus, Receiver, Report, Status, Then, Within,
};
use martlet_transport::{Address, GreetingError, Stream, Target, Until, connect_all};
use martlet_units::{ByteCount, BytesPerSec};
use martlet_wire::hello::Hello;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(60);

fn receiver() -> (Receiver, Arc<FakeFactory>) {
    let factory = Arc::new(FakeFactory::default());
    let listen: Address = "tcp:127.0.0.1:0".parse().unwrap();
    let receiver =
        Receiver::start(&listen, Arc::<FakeFactory>::clone(&factory), Default::default()).unwrap();
    (receiver, factory)
}

fn migrate(vmm: &Arc<FakeVmm>, to: &Receiver, options: MigrateOptions) -> Report {
    let vmm = Arc::<FakeVmm>::clone(vmm);
    let migration = Migration::start(vmm, &to.address(), options).unwrap();
    migration.wait(LIMIT).expect("a migration ends")
}

fn arrived(factory: &FakeFactory) -> Arc<FakeVmm> {
    factory.last.lock().unwrap().clone().expect("a machine was built")
}

#[test]
fn a_running_guest_moves() {
    for channels in [1, 3] {
        let (receiver, factory) = receiver();
        let source = FakeVmm::booted();
        source.await_writes(1000);
        let options = MigrateOptions { channels: Some(channels), ..MigrateOptions::default() };
        let report = migrate(&source, &receiver, options);
        assert_eq!((report.outcome, line(&report)), (Outcome::Completed, None));
        assert_eq!(receiver.wait(LIMIT), ReceiveStatus::Arrived);
        let there = arrived(&factory);
        assert!(there.is_running() && !source.holds_permit());
        assert_eq!(report.transfer.channels, channels);
        assert!(report.transfer.pages.untouched >= fake::PAGES / 2, "{:?}", report.transfer.pages);
        assert!(blackout(&report).is_some() && report.transfer.rounds >= 2, "{report:?}");
        // It goes on there.
        there.await_writes(source.writes() + 1);
        there.check_memory();
        source.quit();
        there.quit();
    }
}

/// Found by killing processes on a busy host: one rehearsal that a scheduler held up was believed
/// for ever, and the migration never ended.
#[test]
fn a_slow_rehearsal_is_repeated() {
    let (receiver, factory) = receiver();
    let source = FakeVmm::booted();
    source.slow_rehearsals.store(3, Ordering::SeqCst);
    let report = migrate(&source, &receiver, MigrateOptions::default());
    assert_eq!((report.outcome, line(&report)), (Outcome::Completed, None));
    // The first that is believed is the fourth. How many rounds there are is for the host's speed to
    // say, and a stop wants one behind its last round; but behind no round there are two.
    let rehearsals = source.rehearsals.load(Ordering::SeqCst);
    let most = u64::from(report.transfer.rounds);
    assert!((4..=most).contains(&rehearsals), "{rehearsals} in {most} rounds");
    arrived(&factory).check_memory();
}

#[test]
fn memory_is_compared_when_asked() {
    let (receiver, factory) = receiver();
    let source = FakeVmm::booted();
    let options = MigrateOptions { verify: true, ..MigrateOptions::default() };
    let report = migrate(&source, &receiver, options);
    assert_eq!(report.transfer.memory_equal, Some(true), "{report:?}");
    assert_eq!(blackout(&report), None);
    arrived(&factory).check_memory();
}

#[test]
fn cleaning_up_delays_no_report() {
    let (receiver, _factory) = receiver();
    let source = FakeVmm::booted();
    source.slow_farewell.store(true, Ordering::SeqCst);
    let report = migrate(&source, &receiver, MigrateOptions::default());
    assert!(report.transfer.destination_cpu.is_some(), "the sign of life was heard: {report:?}");
}

#[test]
fn a_paused_guest_stays_paused() {
    let (receiver, factory) = receiver();
    let source = FakeVmm::booted();
    source.await_writes(100);
    source.pause_by_owner();
    let report = migrate(&source, &receiver, MigrateOptions::default());
    assert_eq!(report.outcome, Outcome::Completed, "{report:?}");
    let there = arrived(&factory);
    assert!(there.holds_permit() && !there.is_running());
    assert_eq!(there.writes_in_memory(), source.writes());
}

#[test]
fn many_last_pages_go_through_the_lanes() {
    let (receiver, factory) = receiver();
    let source = FakeVmm::booted();
    source.burst.store(4000, Ordering::Relaxed);
    let options = MigrateOptions {
        channels: Some(2),
        downtime_limit: Duration::from_secs(20),
        auto_converge: false,
        ..MigrateOptions::default()
    };
    let report = migrate(&source, &receiver, options);
    assert_eq!(report.outcome, Outcome::Completed, "{report:?}");
    arrived(&factory).check_memory();
}

#[test]
fn a_cancelled_guest_stays_and_can_move_later() {
    let (receiver, factory) = receiver();
    let source = FakeVmm::booted();
    let vmm = Arc::<FakeVmm>::clone(&source);
    let slow = MigrateOptions {
        bandwidth: Some(martlet_units::BytesPerSec(1 << 20)),
        ..MigrateOptions::default()
    };
    let migration = Migration::start(vmm, &receiver.address(), slow).unwrap();
    while migration.progress().status != Status::Active {
        std::thread::sleep(Duration::from_millis(1));
    }
    migration.cancel();
    let report = migration.wait(LIMIT).unwrap();
    assert_eq!(report.outcome, Outcome::Cancelled, "{report:?}");
    assert!(source.is_running());
    while matches!(receiver.status(), ReceiveStatus::Active) {
        std::thread::sleep(Duration::from_millis(1));
    }
    assert!(matches!(receiver.status(), ReceiveStatus::Listening { last_error: Some(_) }));
    let report = migrate(&source, &receiver, MigrateOptions::default());
    assert_eq!(report.outcome, Outcome::Completed, "{report:?}");
    arrived(&factory).check_memory();
}

#[test]
fn a_destination_that_cannot_load_leaves_the_guest_here() {
    let (receiver, factory) = receiver();
    let source = FakeVmm::booted();
    factory.refuse.store(true, Ordering::SeqCst);
    let report = migrate(&source, &receiver, MigrateOptions::default());
    assert_eq!(report.outcome, Outcome::Failed);
    assert!(line(&report).unwrap().contains("asked to fail"), "{report:?}");
    factory.refuse.store(false, Ordering::SeqCst);
    factory.fail_load.store(true, Ordering::SeqCst);
    let report = migrate(&source, &receiver, MigrateOptions::default());
    assert_eq!(report.outcome, Outcome::Failed);
    factory.fail_load.store(false, Ordering::SeqCst);
    source.fail_save.store(true, Ordering::SeqCst);
    let report = migrate(&source, &receiver, MigrateOptions::default());
    assert_eq!(report.outcome, Outcome::Failed);
    assert!(source.is_running());
    source.fail_save.store(false, Ordering::SeqCst);
    let report = migrate(&source, &receiver, MigrateOptions::default());
    assert_eq!(report.outcome, Outcome::Completed, "{report:?}");
    arrived(&factory).check_memory();
}

fn connect(to: &Address, hello: Hello) -> Result<Vec<Stream>, GreetingError> {
    let target = Target::resolve(to).unwrap().remove(0);
    connect_all(to, &target, &[hello], &Until::within(LIMIT))
}

#[test]
fn connections_that_are_no_migrations_do_not_disturb() {
    let (receiver, factory) = receiver();
    let Address::Tcp { host, port } = receiver.address() else { unreachable!() };
    let scan = |bytes: &[u8]| {
        let mut stream = TcpStream::connect((host.as_str(), port)).unwrap();
        stream.write_all(bytes).unwrap();
        stream
    };
    let _open: Vec<TcpStream> =
        vec![scan(b""), scan(b"GET / HTTP/1.1\r\n\r\n"), scan(&[0; 64]), scan(b"\x89martlet")];
    // A data channel without an attempt, and one with a wrong token, are turned away.
    assert!(connect(&receiver.address(), Hello::data(0, [1; 16])).is_err());
    let source = FakeVmm::booted();
    let report = migrate(&source, &receiver, MigrateOptions::default());
    assert_eq!(report.outcome, Outcome::Completed, "{report:?}");
    // The place is taken now.
    assert!(connect(&receiver.address(), Hello::control()).is_err());
    arrived(&factory).check_memory();
}

#[test]
fn nobody_there_is_one_clear_line() {
    let source = FakeVmm::booted();
    let nowhere: Address = "unix:/nonexistent/socket".parse().unwrap();
    let migration = Migration::start(source.clone(), &nowhere, MigrateOptions::default()).unwrap();
    let report = migration.wait(LIMIT).unwrap();
    assert_eq!(report.outcome, Outcome::Failed);
    let error = line(&report).unwrap();
    assert!(error.contains("/nonexistent/socket") && !error.contains('\n'), "{error}");
    assert!(source.is_running());
}

/// A destination that listens and never answers, or a socket that nobody accepts, holds its owner
/// up for as long as a connection may take.
#[test]
fn a_cancel_ends_the_connecting_at_once() {
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = silent.local_addr().unwrap().port();
    let to = Address::Tcp { host: "127.0.0.1".to_owned(), port };
    let source = FakeVmm::booted();
    let migration = Migration::start(source.clone(), &to, MigrateOptions::default()).unwrap();
    let _greeting = silent.accept().unwrap();
    assert_eq!(migration.progress().status, Status::Setup);
    migration.cancel();
    // Half of what the greeting may take, so that a busy host does not decide.
    let report = migration.wait(Duration::from_secs(5)).expect("ends at once");
    assert_eq!((report.outcome, line(&report)), (Outcome::Cancelled, None));
    assert!(source.is_running());
}

/// One that greets, and then neither reads nor writes.
#[test]
fn a_cancel_is_heard_while_the_destination_is_silent() {
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = silent.local_addr().unwrap().port();
    let to = Address::Tcp { host: "127.0.0.1".to_owned(), port };
    let source = FakeVmm::booted();
    let migration = Migration::start(source.clone(), &to, MigrateOptions::default()).unwrap();
    let (mut stream, _) = silent.accept().unwrap();
    stream.read_exact(&mut [0; 64]).unwrap();
    stream.write_all(&martlet_wire::hello::HelloReply::accept(1).to_bytes()).unwrap();
    // The header of the setup, which is never answered.
    stream.read_exact(&mut [0; 16]).unwrap();
    migration.cancel();
    let report = migration.wait(Duration::from_secs(5)).expect("ends at once");
    assert_eq!(report.outcome, Outcome::Cancelled);
    assert!(source.is_running());
}

#[test]
fn a_migration_that_takes_too_long_does_what_its_owner_wants() {
    let endless = |then| MigrateOptions {
        auto_converge: false,
        // Nothing fits that.
        downtime_limit: Duration::from_nanos(1),
        within: Some(Within { limit: Duration::from_millis(500), then }),
        ..MigrateOptions::default()
    };
    let (receiver, factory) = receiver();
    let source = FakeVmm::booted();
    source.burst.store(4000, Ordering::Relaxed);
    let report = migrate(&source, &receiver, endless(Then::Cancel));
    assert_eq!(report.outcome, Outcome::Cancelled, "{report:?}");
    assert!(line(&report).unwrap().contains("within 500ms"));
    assert!(source.is_running());
    while matches!(receiver.status(), ReceiveStatus::Active) {
        std::thread::sleep(Duration::from_millis(1));
    }
    let report = migrate(&source, &receiver, endless(Then::Stop));
    assert_eq!(report.outcome, Outcome::Completed, "{report:?}");
    arrived(&factory).check_memory();
}

/// A guest that ends itself in the middle of its migration is no owner's cancel.
#[test]
fn a_guest_that_ends_fails_its_migration_and_both_sides_say_why() {
    let (receiver, _) = receiver();
    let vmm = FakeVmm::booted();
    let options =
        MigrateOptions { bandwidth: Some(BytesPerSec(1 << 20)), ..MigrateOptions::default() };
    let migration =
        Migration::start(Arc::<FakeVmm>::clone(&vmm), &receiver.address(), options).unwrap();
    let deadline = std::time::Instant::now() + LIMIT;
    while migration.progress().bytes_sent == ByteCount(0) {
        assert!(std::time::Instant::now() < deadline, "nothing is sent");
        std::thread::sleep(Duration::from_millis(1));
    }
    migration.guest_ended("shutdown");
    let report = migration.wait(LIMIT).expect("a migration ends");
    let error = line(&report).unwrap_or_default();
    assert_eq!(
        (report.outcome, error.as_str()),
        (Outcome::Failed, "the guest has ended: shutdown")
    );
    while let ReceiveStatus::Active = receiver.status() {
        assert!(std::time::Instant::now() < deadline, "the destination does not hear of it");
        std::thread::sleep(Duration::from_millis(1));
    }
    let ReceiveStatus::Listening { last_error: Some(error) } = receiver.status() else {
        panic!("{:?}", receiver.status());
    };
    assert!(error.contains("the guest has ended: shutdown"), "{error}");
}

/// What is shown is what was done, not what was handed on to be done.
#[test]
fn what_remains_is_what_was_not_sent() {
    let (receiver, _) = receiver();
    let vmm = FakeVmm::booted();
    while vmm.writes() < 10_000 {
        std::thread::sleep(Duration::from_millis(1));
    }
    let options =
        MigrateOptions { bandwidth: Some(BytesPerSec(4 << 20)), ..MigrateOptions::default() };
    let migration =
        Migration::start(Arc::<FakeVmm>::clone(&vmm), &receiver.address(), options).unwrap();
    let mut seen = 0;
    let report = loop {
        let now = migration.progress();
        if now.status == Status::Active && now.round == 0 && now.pages.untouched > 0 {
            let touched = now.total.0 - now.pages.untouched;
            let sent = now.pages.normal + now.pages.zero;
            if sent > 0 && sent < touched {
                assert_eq!(now.remaining.0, touched - sent, "{now:?}");
                assert!(now.rate > BytesPerSec(0), "{now:?}");
                seen += 1;
            }
        }
        if now.round > 0 || seen > 20 {
            // It was seen often enough; the rest may go fast.
            migration.set_bandwidth(None);
        }
        if let Some(report) = migration.wait(Duration::from_millis(1)) {
            break report;
        }
    };
    assert_eq!((report.outcome, line(&report)), (Outcome::Completed, None));
    assert!(seen > 0 && migration.progress().remaining.0 == 0);
}

/// What observers see comes to the source's owner as it is.
#[test]
fn both_sides_observers_are_heard() {
    let (receiver, _) = receiver();
    let vmm = FakeVmm::booted();
    vmm.await_writes(100);
    let report = migrate(&vmm, &receiver, MigrateOptions::default());
    let switchover = report.switchover.expect("the guest moved");
    let moments = |report: Option<Vec<u8>>| {
        let report = report.expect("an observer was heard");
        [0, 8].map(|at| u64::from_le_bytes(*report[at..].first_chunk().unwrap()))
    };
    let [_, last] = moments(switchover.source_observed);
    let [first, _] = moments(switchover.destination_observed);
    assert!(last > 0 && first > last, "{last} {first}");
}

/// A VMM that does not rehearse is moved all the same.
#[test]
fn a_rehearsal_is_no_duty() {
    let (receiver, _) = receiver();
    let vmm = FakeVmm::booted();
    vmm.rehearses_not.store(true, Ordering::SeqCst);
    let report = migrate(&vmm, &receiver, MigrateOptions::default());
    assert_eq!((report.outcome, line(&report)), (Outcome::Completed, None));
}

#[test]
fn who_has_subscribed_hears_of_the_end() {
    let (receiver, _) = receiver();
    let vmm = FakeVmm::booted();
    let options = MigrateOptions::default();
    let migration =
        Migration::start(Arc::<FakeVmm>::clone(&vmm), &receiver.address(), options).unwrap();
    let news = migration.subscribe().unwrap();
    let mut last = news.next(Duration::ZERO).expect("how it stands");
    while !last.status.is_final() {
        last = news.next(LIMIT).expect("there is always something new");
    }
    assert_eq!(last.status, Status::Completed);
    assert!(migration.wait(Duration::ZERO).is_some(), "the report is there, too");
}
