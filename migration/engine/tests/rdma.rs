//! Guest memory by RDMA from end to end, over the soft provider, with a guest that is a thread.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on may panic")]

mod fake;
#[path = "rdma/proxy.rs"]
mod proxy;

use fake::{FakeFactory, FakeVmm, line};
use martlet_engine::{
    MigrateOptions, Migration, Outcome, Provider, RdmaAccept, RdmaOptions, ReceiveOptions,
    ReceiveStatus, Receiver, Report,
};
use martlet_transport::Address;
use proxy::{Fault, Lie, Proxy};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

const TEST_MAX: Duration = Duration::from_secs(60);

fn receiver(queues_max: u16) -> (Receiver, Arc<FakeFactory>) {
    let factory = Arc::new(FakeFactory::default());
    let listen: Address = "rdma:127.0.0.1:0".parse().unwrap();
    let rdma = RdmaAccept { provider: Provider::Soft, queues_max };
    let options = ReceiveOptions { rdma, ..ReceiveOptions::default() };
    let receiver = Receiver::start(&listen, Arc::<FakeFactory>::clone(&factory), options).unwrap();
    (receiver, factory)
}

fn migrate_to(vmm: &Arc<FakeVmm>, to: &Address, options: MigrateOptions) -> Report {
    let vmm = Arc::<FakeVmm>::clone(vmm);
    let migration = Migration::start(vmm, to, options).unwrap();
    migration.wait(TEST_MAX).expect("a migration ends")
}

fn arrived(factory: &FakeFactory) -> Arc<FakeVmm> {
    factory.last.lock().unwrap().clone().expect("a machine was built")
}

fn rdma(rdma: RdmaOptions) -> MigrateOptions {
    MigrateOptions { rdma, ..MigrateOptions::default() }
}

/// Small chunks, so that a small guest has many.
fn small() -> RdmaOptions {
    RdmaOptions { chunk_bytes: 1 << 20, ..RdmaOptions::default() }
}

fn assert_moved(report: &Report) {
    assert_eq!((report.outcome, line(report)), (Outcome::Completed, None), "{report:?}");
}

#[test]
fn a_running_guest_moves_by_rdma() {
    for queues in [1, 2, 4] {
        for pin_all in [false, true] {
            let (receiver, factory) = receiver(8);
            let source = FakeVmm::booted();
            source.burst.store(50, Ordering::Relaxed);
            // 4 MiB at once, of 16 MiB that are touched.
            let options = RdmaOptions { pin_all, queues, pinned_bytes_max: 4 << 20, ..small() };
            let report = migrate_to(&source, &receiver.address(), rdma(options));
            assert_moved(&report);
            assert_eq!(receiver.wait(TEST_MAX), ReceiveStatus::Arrived);
            let there = arrived(&factory);
            assert!(there.is_running() && !source.holds_permit());
            let used = report.transfer.rdma.unwrap();
            assert_eq!((used.fell_back, used.pages_again), (None, 0));
            assert!(used.device.unwrap().starts_with("soft"));
            there.check_memory();
            source.quit();
            there.quit();
        }
    }
}

#[test]
fn memory_is_equal_before_the_guest_runs() {
    let (receiver, factory) = receiver(8);
    let source = FakeVmm::booted();
    let options = MigrateOptions { verify: true, ..rdma(small()) };
    let report = migrate_to(&source, &receiver.address(), options);
    assert_eq!(report.transfer.memory_equal, Some(true), "{report:?}");
    arrived(&factory).check_memory();
}

#[test]
fn many_last_pages_go_by_rdma() {
    let (receiver, factory) = receiver(8);
    let source = FakeVmm::booted();
    source.burst.store(4000, Ordering::Relaxed);
    let options = MigrateOptions {
        downtime_limit: Duration::from_secs(20),
        auto_converge: false,
        ..rdma(small())
    };
    let report = migrate_to(&source, &receiver.address(), options);
    assert_moved(&report);
    arrived(&factory).check_memory();
}

#[test]
fn a_failed_attempt_leaves_the_guest_here_and_the_next_one_moves_it() {
    let (receiver, factory) = receiver(8);
    let source = FakeVmm::booted();
    source.fail_save.store(true, Ordering::SeqCst);
    let report = migrate_to(&source, &receiver.address(), rdma(small()));
    assert_eq!(report.outcome, Outcome::Failed, "{report:?}");
    assert!(source.is_running());
    source.fail_save.store(false, Ordering::SeqCst);
    let report = migrate_to(&source, &receiver.address(), rdma(small()));
    assert_moved(&report);
    arrived(&factory).check_memory();
}

#[test]
fn a_queue_pair_that_breaks_in_mid_round_costs_nothing_but_time() {
    // In the first round, at its begin and later.
    for after in [1, 3 << 20, 9 << 20] {
        for (queues, pin_all) in [(1, false), (2, true)] {
            let (receiver, factory) = receiver(8);
            let proxy = Proxy::start(&receiver.address(), Fault::Cut { after });
            let source = FakeVmm::booted();
            source.burst.store(50, Ordering::Relaxed);
            source.await_writes(20_000);
            let options = RdmaOptions { queues, pin_all, ..small() };
            let options = MigrateOptions { verify: true, ..rdma(options) };
            let report = migrate_to(&source, &proxy.address(), options);
            assert_moved(&report);
            assert_eq!(report.transfer.memory_equal, Some(true));
            let used = report.transfer.rdma.unwrap();
            assert!(used.fell_back.is_some(), "after {after}: {used:?}");
            arrived(&factory).check_memory();
            source.quit();
        }
    }
}

#[test]
fn queue_pairs_that_break_in_the_blackout_are_replaced_by_the_stream() {
    // A few last pages, which the driver sends itself, and many, which the lane's thread does.
    for (burst, limit) in [(50, Duration::from_millis(300)), (4000, Duration::from_secs(20))] {
        let (receiver, factory) = receiver(8);
        let proxy = Proxy::start(&receiver.address(), Fault::CutInBlackout);
        let source = FakeVmm::booted();
        source.burst.store(burst, Ordering::Relaxed);
        let options = MigrateOptions {
            downtime_limit: limit,
            auto_converge: false,
            verify: true,
            ..rdma(small())
        };
        let report = migrate_to(&source, &proxy.address(), options);
        assert_moved(&report);
        assert_eq!(report.transfer.memory_equal, Some(true));
        assert!(report.transfer.rdma.unwrap().fell_back.is_some());
        arrived(&factory).check_memory();
        source.quit();
    }
}

#[test]
fn a_destination_without_queue_pairs_is_served_by_the_stream() {
    let (receiver, factory) = receiver(8);
    let proxy = Proxy::start(&receiver.address(), Fault::WrongPort);
    let source = FakeVmm::booted();
    let report = migrate_to(&source, &proxy.address(), rdma(small()));
    assert_moved(&report);
    let reason = report.transfer.rdma.unwrap().fell_back.unwrap();
    assert!(reason.contains("refused") || reason.contains("connect"), "{reason}");
    arrived(&factory).check_memory();
}

#[test]
fn an_explicit_provider_that_is_missing_is_told() {
    let (receiver, factory) = receiver(8);
    let source = FakeVmm::booted();
    let options = RdmaOptions { provider: Provider::Ibv, ..small() };
    let report = migrate_to(&source, &receiver.address(), rdma(options));
    assert_moved(&report);
    let reason = report.transfer.rdma.unwrap().fell_back.unwrap();
    assert!(reason.contains("provider ibv"), "{reason}");
    arrived(&factory).check_memory();
}

#[test]
fn a_lying_peer_ends_the_attempt_or_rdma_and_harms_no_guest() {
    let garbage = [Fault::GarbageToSource, Fault::GarbageToDestination];
    for fault in garbage.into_iter().chain(Lie::ALL.map(Fault::Lie)) {
        let (receiver, factory) = receiver(8);
        let proxy = Proxy::start(&receiver.address(), fault);
        let source = FakeVmm::booted();
        let report = migrate_to(&source, &proxy.address(), rdma(small()));
        if report.outcome == Outcome::Completed {
            assert!(report.transfer.rdma.unwrap().fell_back.is_some(), "{fault:?}");
            arrived(&factory).check_memory();
        } else {
            assert_eq!(report.outcome, Outcome::Failed, "{fault:?}: {report:?}");
            assert!(source.is_running());
            source.check_memory();
        }
        source.quit();
    }
}

#[test]
fn a_destination_without_rdma_refuses_it_in_one_line() {
    let factory = Arc::new(FakeFactory::default());
    let listen: Address = "tcp:127.0.0.1:0".parse().unwrap();
    let receiver =
        Receiver::start(&listen, Arc::<FakeFactory>::clone(&factory), Default::default()).unwrap();
    let Address::Tcp { host, port } = receiver.address() else { unreachable!() };
    let source = FakeVmm::booted();
    let report = migrate_to(&source, &Address::Rdma { host, port }, rdma(small()));
    assert_eq!(report.outcome, Outcome::Failed, "{report:?}");
    assert!(source.is_running());
}

#[test]
fn a_tcp_source_is_welcome_at_an_rdma_address() {
    let (receiver, factory) = receiver(8);
    let Address::Rdma { host, port } = receiver.address() else { unreachable!() };
    let source = FakeVmm::booted();
    let report = migrate_to(&source, &Address::Tcp { host, port }, MigrateOptions::default());
    assert_moved(&report);
    assert_eq!(report.transfer.rdma, None);
    arrived(&factory).check_memory();
}
