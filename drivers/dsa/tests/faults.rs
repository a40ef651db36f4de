//! Whatever a device does wrong, the answer is right, and what it may still write to is left alone.
#![allow(clippy::unwrap_used, reason = "tests")]

mod bench;

use bench::{Bench, PAGE, Setup, fill_some};
use martlet_dsa::EngineConfig;
use martlet_dsa_abi::{Opcode, Status};
use martlet_dsa_model::{DeviceConfig, Fault, FaultPoint, Faults, QueueConfig};
use martlet_fault_plan::{FOR_EVER, FaultPlan, Rule};
use proptest::prelude::*;
use std::time::Duration;

const DEADLINE: Duration = Duration::from_millis(5);

#[test]
fn pages_that_are_not_mapped_are_finished_by_the_cpu() {
    let bench = Bench::new(Setup::default());
    let mut engine = bench.engine();
    (0..3).for_each(|_| bench.assert_right(&mut engine, 0, 512));
    // Ranges of 64 pages by now; one of them loses its tail.
    bench.guest.write(40, 1, 1);
    bench.model().hide(bench.bus_page(20), 44 * PAGE as u64);
    bench.assert_right(&mut engine, 0, 512);
    let stats = engine.stats();
    assert_eq!((stats.faulted_pages, stats.cpu_pages), (44, 44));
    assert_eq!((stats.failed, stats.timed_out), (0, 0));
    bench.model().show(bench.bus_page(20), 44 * PAGE as u64);
    bench.assert_right(&mut engine, 0, 512);
    assert_eq!(engine.stats().cpu_pages, 44);
}

/// The device stops in the middle of a page: what it has seen of that page does not count.
#[test]
fn a_fault_in_the_middle_of_a_page_leaves_the_page_to_the_cpu() {
    let bench = Bench::new(Setup::default());
    let mut engine = bench.engine();
    (0..3).for_each(|_| bench.assert_right(&mut engine, 0, 512));
    let device_pages = engine.stats().device_pages;
    bench.guest.write(2, 4000, 1);
    let after = u32::try_from(2 * PAGE + 512).unwrap();
    bench.model().set_faults(Faults::once(FaultPoint::Operation, 0, Fault::PageFault { after }));
    bench.assert_right(&mut engine, 0, 64);
    assert_eq!(engine.stats().device_pages - device_pages, 2);
    assert_eq!(engine.stats().faulted_pages, 62);
}

/// Whether its record comes late or never: nothing is submitted to the queue any more, and what the
/// device may write to is not freed.
#[test]
fn a_batch_that_is_not_answered_in_time_ends_its_queue() {
    let late = Fault::Late(Duration::from_millis(20));
    for (point, fault) in [
        (FaultPoint::Batch, late),
        (FaultPoint::Batch, Fault::NoRecord),
        (FaultPoint::Operation, Fault::NoRecord),
    ] {
        let bench = Bench::new(Setup::default());
        fill_some(&bench.guest, 512);
        let mut engine = bench.engine();
        bench.model().set_faults(Faults::once(point, 0, fault));
        bench.assert_right(&mut engine, 0, 32);
        assert!(bench.queues[0].is_given_up(), "{point:?}");
        let accepted = bench.model().counters().accepted;
        for _ in 0..3 {
            bench.assert_right(&mut engine, 0, 512);
            bench.pass(Duration::from_millis(20));
        }
        assert_eq!(bench.model().counters().accepted, accepted, "{point:?}");
        let entries = bench.bus.entries();
        drop(engine);
        assert_eq!(bench.bus.entries(), entries, "{point:?}");
    }
}

#[test]
fn a_device_that_hangs_for_ever_keeps_the_memory_that_it_may_write_to() {
    let bench = Bench::new(Setup::default());
    let mut engine = bench.engine();
    bench.model().set_faults(Faults::once(FaultPoint::Batch, 0, Fault::Hang));
    bench.assert_right(&mut engine, 0, 32);
    bench.pass(Duration::from_millis(100));
    bench.assert_right(&mut engine, 0, 1);
    let (before, guest) = (bench.bus.entries(), std::sync::Arc::downgrade(&bench.memory));
    drop(engine);
    // The descriptors stay; so does the guest's memory.
    assert_eq!(bench.bus.entries(), before);
    drop(bench);
    assert!(guest.upgrade().is_some());
}

#[test]
fn a_device_that_is_unplugged_is_missed_by_nobody() {
    let bench = Bench::new(Setup::default());
    fill_some(&bench.guest, 512);
    let mut engine = bench.engine();
    let begin = bench.now();
    engine.begin(&[bench.guest.run(0, 256)]);
    bench.model().unplug();
    engine.begin(&[bench.guest.run(256, 256)]);
    bench.assert_answer(&engine.collect().unwrap(), 0, 256);
    bench.assert_answer(&engine.collect().unwrap(), 256, 256);
    (0..10).for_each(|_| bench.assert_right(&mut engine, 0, 512));
    assert!(bench.now().since(begin) <= DEADLINE + DEADLINE / 2);
}

/// A record that is written twice disturbs no batch that comes after.
#[test]
fn a_record_that_is_written_twice_is_noticed() {
    for point in [FaultPoint::Batch, FaultPoint::Operation] {
        let bench = Bench::new(Setup::default());
        fill_some(&bench.guest, 512);
        let mut engine = bench.engine();
        let twice = Fault::Twice(Duration::from_micros(18));
        let rule = Rule { at: point, skip: 0, times: FOR_EVER, fault: twice };
        bench.model().set_faults(FaultPlan::script([rule]));
        (0..20).for_each(|_| bench.assert_right(&mut engine, 0, 512));
        let stats = engine.stats();
        assert!(stats.disturbed > 0, "{point:?}");
        assert_eq!((stats.timed_out, stats.failed, stats.cpu_pages), (0, 0, 0), "{point:?}");
    }
}

#[test]
fn descriptors_that_run_backwards_are_fine() {
    let bench = Bench::new(Setup::default());
    fill_some(&bench.guest, 512);
    let rule = Rule { at: FaultPoint::Batch, skip: 0, times: FOR_EVER, fault: Fault::Reverse };
    bench.model().set_faults(FaultPlan::script([rule]));
    let mut engine = bench.engine();
    bench.assert_right(&mut engine, 0, 512);
    assert_eq!(engine.stats().cpu_pages, 0);
}

/// A retry storm: a few tries, and the CPU.
#[test]
fn a_full_queue_is_tried_a_few_times() {
    let bench = Bench::new(Setup { tries: 3, ..Setup::default() });
    fill_some(&bench.guest, 512);
    let storm = Rule { at: FaultPoint::Submit, skip: 0, times: 5, fault: Fault::Retry };
    bench.model().set_faults(FaultPlan::script([storm]));
    let mut engine = bench.engine();
    // Three tries for the first batch, and the others of the grant are not tried.
    bench.assert_right(&mut engine, 0, 96);
    assert_eq!(bench.model().counters().retries, 3);
    assert_eq!((engine.stats().rejected, engine.stats().cpu_pages), (1, 96));
    // The next one is taken at its third try.
    bench.assert_right(&mut engine, 0, 96);
    assert_eq!(bench.model().counters().retries, 5);
    assert_eq!((engine.stats().rejected, engine.stats().device_pages), (1, 96));
}

/// The series' way: try until the queue takes it. It ends, at the deadline.
#[test]
fn trying_for_ever_ends_at_the_deadline() {
    let bench = Bench::new(Setup { tries: u32::MAX, ..Setup::default() });
    let rule = Rule { at: FaultPoint::Submit, skip: 0, times: FOR_EVER, fault: Fault::Retry };
    bench.model().set_faults(FaultPlan::script([rule]));
    let mut engine = bench.engine();
    let begin = bench.now();
    bench.assert_right(&mut engine, 0, 32);
    let took = bench.now().since(begin);
    assert!(took >= DEADLINE && took < DEADLINE * 2, "{took:?}");
    assert_eq!((engine.stats().rejected, engine.stats().cpu_pages), (1, 32));
}

fn faults() -> Vec<(FaultPoint, Fault)> {
    let statuses = [Status::HARDWARE, Status::PAGE_FAULT_INVALID, Status::TRANSLATION];
    let times = [Duration::from_micros(40), Duration::from_millis(2), Duration::from_millis(9)];
    let mut faults = vec![
        (FaultPoint::Submit, Fault::Retry),
        (FaultPoint::Batch, Fault::Reverse),
        (FaultPoint::Batch, Fault::ListFault { after: 0 }),
        (FaultPoint::Batch, Fault::ListFault { after: 9 }),
        (FaultPoint::Operation, Fault::PageFault { after: 0 }),
        (FaultPoint::Operation, Fault::PageFault { after: 1000 }),
        (FaultPoint::Only(Opcode::COMPVAL), Fault::Hang),
    ];
    for point in [FaultPoint::Batch, FaultPoint::Operation] {
        faults.extend(statuses.map(|status| (point, Fault::Status(status))));
        faults.extend(times.map(|time| (point, Fault::Late(time))));
        faults.push((point, Fault::NoRecord));
        // Shorter than a slot rests: see `Slots`.
        faults.push((point, Fault::Twice(Duration::from_micros(15))));
    }
    faults
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Any faults at any places, in any number: every answer is right.
    #[test]
    fn any_faults_leave_every_answer_right(
        seed: u64,
        per_million in prop::sample::select(vec![2_000_u32, 20_000, 200_000, 1_000_000]),
        content in prop::collection::vec((0_usize..256, 0_usize..4096), 0..40),
        batch_max in prop::sample::select(vec![1_u32, 4, 32]),
        gone_at in prop::option::of(0_usize..12),
    ) {
        let queue = QueueConfig { batch_max, ..QueueConfig::shared(32) };
        let device = DeviceConfig { queues: vec![queue; 2], ..DeviceConfig::sapphire_rapids() };
        let engine = EngineConfig { offload_pages_min: 1, ..EngineConfig::default() };
        let bench = Bench::new(Setup { devices: vec![device], pages: 256, engine, ..Setup::default() });
        bench.model().set_faults(FaultPlan::random(seed, per_million, faults()));
        let mut engine = bench.engine();
        for round in 0..12 {
            content.iter().for_each(|(page, at)| bench.guest.write(*page, *at, u8::from(round % 3 == 0)));
            engine.begin(&[bench.guest.run(0, 128)]);
            engine.begin(&[bench.guest.run(128, 128)]);
            if gone_at == Some(round) {
                bench.model().unplug();
            }
            bench.assert_answer(&engine.collect().unwrap(), 0, 128);
            bench.assert_answer(&engine.collect().unwrap(), 128, 128);
            bench.pass(Duration::from_millis(4));
        }
        let stats = engine.stats();
        prop_assert_eq!(stats.device_pages + stats.cpu_pages, 12 * 256);
    }
}
