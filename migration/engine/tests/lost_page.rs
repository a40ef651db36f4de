//! Pages that a host can't give any more: the migration fails and says which one, and the guest
//! runs on.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on may panic")]

mod fake;

use fake::{FakeFactory, FakeVmm, line};
use martlet_engine::{
    MigrateOptions, Migration, Outcome, Provider, RdmaAccept, ReceiveOptions, ReceiveStatus,
    Receiver, Report, SourceVmm,
};
use martlet_ram::RegionIndex;
use martlet_ram::testing::Spoiled;
use martlet_transport::Address;
use martlet_units::PAGE_SIZE;
use std::sync::Arc;
use std::time::Duration;

/// Far beyond what a migration of the fake guest takes.
const WAIT_MAX: Duration = Duration::from_secs(60);

/// A page that has content, has none beside it, and that the guest leaves alone.
const PAGE: u64 = fake::PAGES / 4 + 100;
const NAME: &str = "guest page 0x864 (page 2148 of memory region 0) can't be read or written";

/// Over connections, and by RDMA in software.
const WAYS: [&str; 2] = ["tcp:127.0.0.1:0", "rdma:127.0.0.1:0"];

fn receiver(way: &str) -> (Receiver, Arc<FakeFactory>) {
    let factory = Arc::new(FakeFactory::default());
    let listen: Address = way.parse().unwrap();
    let rdma = RdmaAccept { provider: Provider::Soft, ..RdmaAccept::default() };
    let options = ReceiveOptions { rdma, ..ReceiveOptions::default() };
    let receiver = Receiver::start(&listen, Arc::<FakeFactory>::clone(&factory), options).unwrap();
    (receiver, factory)
}

/// A running guest with content in the page.
fn booted() -> Arc<FakeVmm> {
    let vmm = FakeVmm::booted();
    let ram = SourceVmm::ram(&*vmm);
    // Word 0 of a page is the guest's own.
    let at = PAGE * PAGE_SIZE + 64;
    assert_eq!(rustix::io::pwrite(ram.regions()[0].file().unwrap().fd, &[7; 8], at), Ok(8));
    vmm
}

fn migrate(vmm: &Arc<FakeVmm>, to: &Receiver, verify: bool) -> Report {
    let vmm = Arc::<FakeVmm>::clone(vmm);
    let options = MigrateOptions { verify, ..MigrateOptions::default() };
    let migration = Migration::start(vmm, &to.address(), options).unwrap();
    migration.wait(WAIT_MAX).expect("a migration ends")
}

fn wait_for_listening(receiver: &Receiver) {
    while matches!(receiver.status(), ReceiveStatus::Active) {
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Fails, by the page; then the guest moves as if nothing had been.
fn fails_and_then_moves(
    source: &Arc<FakeVmm>,
    to: &(Receiver, Arc<FakeFactory>),
    heal: impl FnOnce(),
) {
    let (receiver, factory) = to;
    let report = migrate(source, receiver, false);
    assert_eq!(report.outcome, Outcome::Failed, "{report:?}");
    assert!(line(&report).unwrap().contains(NAME), "{report:?}");
    assert!(source.is_running());
    let before = source.writes();
    while source.writes() == before {
        std::thread::sleep(Duration::from_millis(1));
    }
    wait_for_listening(receiver);
    heal();
    let report = migrate(source, receiver, true);
    assert_eq!((report.outcome, line(&report)), (Outcome::Completed, None));
    let there = factory.last.lock().unwrap().clone().unwrap();
    there.check_memory();
    there.quit();
    source.quit();
}

#[test]
fn a_page_lost_at_the_source_fails_the_migration_and_not_the_guest() {
    for way in WAYS {
        let (source, to) = (booted(), receiver(way));
        let spoiled = Spoiled::new(&SourceVmm::ram(&*source), RegionIndex(0), PAGE);
        fails_and_then_moves(&source, &to, || drop(spoiled));
    }
}

#[test]
fn a_page_lost_at_the_destination_fails_the_migration_and_not_the_destination() {
    for way in WAYS {
        let (source, to) = (booted(), receiver(way));
        *to.1.lose.lock().unwrap() = Some(PAGE);
        fails_and_then_moves(&source, &to, || {});
        let (_, why) = to.0.failures();
        let why = why.unwrap();
        // This host's fault, not the connection's.
        assert!(
            way != WAYS[0] || why.starts_with(&format!("cannot receive guest memory: {NAME}")),
            "{why}"
        );
    }
}
