//! Zero pages found by a DSA on a model, in whole migrations: with the device well, and hanging.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on may panic")]

mod fake;

use fake::{FakeFactory, FakeVmm, line};
use martlet_dsa::{CompletionWait, QueueLimits, SeatWait, WorkQueue};
use martlet_dsa_model::{Counters, DeviceConfig, DsaModel, Fault, FaultPoint, Faults};
use martlet_engine::{DsaFinders, DsaQueue, MigrateOptions, Migration, Outcome, Receiver, Report};
use martlet_fault_plan::{FOR_EVER, Rule};
use martlet_policy::admission::{DeviceProfile, OffloadPolicy};
use martlet_soft_bus::{Addressing, SoftBus, SoftClock, Stage};
use std::sync::Arc;
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(60);

/// A device of Sapphire Rapids' speed in real time, which gets all the work that it takes.
fn device(faults: Faults) -> (DsaFinders, Arc<DsaModel>) {
    let bus = SoftBus::new(Addressing::Process);
    let stage = Stage::new(SoftClock::real());
    let config = DeviceConfig::sapphire_rapids();
    let limits = QueueLimits {
        batch_max: config.queues[0].batch_max,
        transfer_bytes_max: config.queues[0].transfer_bytes_max,
        credits: None,
    };
    let clock = Arc::clone(stage.clock());
    let model = DsaModel::new(config, Arc::clone(&bus) as _, clock, faults).unwrap();
    let seat = stage.seat(Arc::clone(&model) as _);
    let wait: Arc<dyn CompletionWait> = Arc::new(SeatWait::new(seat));
    let portal = Box::new(model.portal(0).unwrap());
    let queue = WorkQueue::new("wq0.0", portal, wait, limits);
    let queue = DsaQueue { queue, device: 0, profile: DeviceProfile::default() };
    (DsaFinders::new(OffloadPolicy::CpuWhenFull, vec![queue], None, bus), model)
}

/// Moves a guest with the device's help, and checks that all it wrote has arrived.
fn migrate(faults: Faults) -> (Report, Counters) {
    let (finders, model) = device(faults);
    let factory = Arc::new(FakeFactory::default());
    let listen = "tcp:127.0.0.1:0".parse().unwrap();
    let receiver =
        Receiver::start(&listen, Arc::<FakeFactory>::clone(&factory), Default::default()).unwrap();
    let source = FakeVmm::booted();
    source.await_writes(1000);
    let options = MigrateOptions {
        channels: Some(2),
        zero_finders: Arc::new(finders),
        ..MigrateOptions::default()
    };
    let vmm = Arc::<FakeVmm>::clone(&source);
    let migration = Migration::start(vmm, &receiver.address(), options).unwrap();
    let report = migration.wait(LIMIT).expect("a migration ends");
    assert_eq!((report.outcome, line(&report)), (Outcome::Completed, None));
    let there = factory.last.lock().unwrap().clone().unwrap();
    there.check_memory();
    (report, model.counters())
}

#[test]
fn a_device_checks_the_pages() {
    let (report, counters) = migrate(Faults::default());
    assert!(counters.accepted > 0, "the device got nothing to do");
    assert!(report.transfer.pages.normal > 0);
}

/// What was with the device when it hung is checked by the CPU after one deadline; the device gets
/// nothing more, so the deadline is paid once.
#[test]
fn a_device_that_hangs_in_the_middle_costs_one_deadline() {
    let hang = Rule { at: FaultPoint::Operation, skip: 20, times: FOR_EVER, fault: Fault::Hang };
    let (_, counters) = migrate(Faults::script([hang]));
    assert!(counters.accepted > 0, "it hung before it began");
    // Two channels with two jobs of up to 512 pages each, in batches of 32, and a drain each.
    assert!(counters.accepted < 20 + 2 * 2 * 16 + 2 * 2, "{counters:?}: it was trusted again");
}
