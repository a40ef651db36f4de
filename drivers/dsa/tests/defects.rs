//! The seven defects of QEMU's series "Use Intel DSA accelerator to offload zero page checking in
//! multifd live migration" (v9), as they show in its code. Each has a test here that it would fail.
#![allow(clippy::unwrap_used, reason = "tests")]

mod bench;

use bench::{Bench, Setup, fill_some};
use martlet_dsa::{EngineConfig, PageRun};
use martlet_dsa_abi::Status;
use martlet_dsa_model::{DeviceConfig, Fault, FaultPoint, Faults, QueueConfig, Timing};
use martlet_fault_plan::{FOR_EVER, FaultPlan, Rule};
use std::time::Duration;

const DEADLINE: Duration = Duration::from_millis(5);

fn always(at: FaultPoint, fault: Fault) -> Faults {
    FaultPlan::script([Rule { at, skip: 0, times: FOR_EVER, fault }])
}

/// 1. A submission that fails is reported, ignored, and then waited for by a channel that nobody
///    wakes.
#[test]
fn defect_1_submit_failure_is_answered_by_the_cpu() {
    for fault in [Fault::Retry, Fault::Gone, Fault::Halt] {
        let bench = Bench::new(Setup::default());
        fill_some(&bench.guest, 512);
        bench.model().set_faults(always(FaultPoint::Submit, fault));
        let mut engine = bench.engine();
        let begin = bench.now();
        bench.assert_right(&mut engine, 0, 512);
        assert_eq!(engine.stats().cpu_pages, 512, "{fault:?}");
        assert_eq!(engine.stats().batches, 0);
        assert!(bench.now().since(begin) < DEADLINE, "nothing was waited for");
    }
}

/// 2. One completion with an error ends the thread that serves all channels.
#[test]
fn defect_2_an_error_is_one_batchs_and_no_other_channels() {
    let statuses = [Status::HARDWARE, Status::TRANSLATION, Status::BAD_OPCODE, Status(0x7e)];
    for (point, status) in [FaultPoint::Batch, FaultPoint::Operation]
        .into_iter()
        .zip([statuses, statuses])
        .flat_map(|(point, statuses)| statuses.into_iter().map(move |status| (point, status)))
    {
        let bench = Bench::new(Setup::default());
        fill_some(&bench.guest, 512);
        let (mut one, mut two) = (bench.engine(), bench.engine());
        bench.model().set_faults(Faults::once(point, 2, Fault::Status(status)));
        one.begin(&[bench.guest.run(0, 256)]);
        two.begin(&[bench.guest.run(256, 256)]);
        bench.assert_answer(&two.collect().unwrap(), 256, 256);
        bench.assert_answer(&one.collect().unwrap(), 0, 256);
        assert_eq!(one.stats().failed + two.stats().failed, 1, "{point:?} {status}");
        let by_device = two.stats().device_pages;
        bench.assert_right(&mut two, 0, 256);
        assert_eq!(two.stats().device_pages - by_device, 256, "and both go on");
    }
}

/// 3. A completion is polled for 12,800 times, 0.5 ms, which some 35 processes on a device exceed
///    without anything being wrong.
#[test]
fn defect_3_a_queue_that_is_only_long_is_waited_for() {
    let queue = QueueConfig { batch_max: 128, ..QueueConfig::shared(128) };
    let bench = Bench::new(Setup::with_queue(queue));
    let mut engines: Vec<_> = (0..50).map(|_| bench.engine()).collect();
    let begin = bench.now();
    for engine in &mut engines {
        engine.begin(&[bench.guest.run(0, 128)]);
        engine.begin(&[bench.guest.run(128, 128)]);
    }
    for engine in &mut engines {
        bench.assert_answer(&engine.collect().unwrap(), 0, 128);
        bench.assert_answer(&engine.collect().unwrap(), 128, 128);
        let stats = engine.stats();
        assert_eq!((stats.device_pages, stats.timed_out, stats.cpu_pages), (256, 0, 0));
    }
    // 100 batches, of 16.5 us each, and the last one waited for all of them.
    assert!(bench.now().since(begin) > Duration::from_micros(1600));
}

/// 4. Completions are awaited in the order of submission, by one thread: a batch that is done waits
///    for one that is not.
#[test]
fn defect_4_a_slow_batch_delays_nobody_else() {
    let devices = (0..2).map(|number| DeviceConfig { number, ..DeviceConfig::sapphire_rapids() });
    let bench = Bench::new(Setup { devices: devices.collect(), ..Setup::default() });
    fill_some(&bench.guest, 512);
    let late = Fault::Late(Duration::from_millis(3));
    bench.models[0].set_faults(always(FaultPoint::Batch, late));
    let (mut slow, mut fast) = (bench.engine(), bench.engine());
    let begin = bench.now();
    slow.begin(&[bench.guest.run(0, 32)]);
    fast.begin(&[bench.guest.run(32, 32)]);
    bench.assert_answer(&fast.collect().unwrap(), 32, 32);
    assert!(bench.now().since(begin) < Duration::from_micros(100));
    bench.assert_answer(&slow.collect().unwrap(), 0, 32);
    assert!(bench.now().since(begin) >= Duration::from_millis(3));
    assert_eq!((slow.stats().cpu_pages, fast.stats().cpu_pages), (0, 0));
}

/// 5. Batches of 128 descriptors, whatever the work queue takes: 32, unless someone raised it.
#[test]
fn defect_5_batches_are_split_to_the_queues_limit() {
    let queue = QueueConfig::shared(128);
    assert_eq!(queue.batch_max, 32, "the kernel's default");
    let bench = Bench::new(Setup::with_queue(queue));
    (0..512).step_by(2).for_each(|page| bench.guest.write(page, 0, 1));
    let mut engine = bench.engine();
    bench.assert_right(&mut engine, 0, 128);
    assert_eq!(bench.model().counters().batches, 4);
    let stats = engine.stats();
    assert_eq!((stats.failed, stats.cpu_pages, stats.device_pages), (0, 0, 128));
}

/// 6. A batch that fails on its descriptor list leaves records unwritten, on which assertions fire;
///    and the status byte is compared with its write bit.
#[test]
fn defect_6_records_that_were_not_written_are_the_cpus() {
    for after in [0, 1, 7, 31] {
        let bench = Bench::new(Setup::default());
        fill_some(&bench.guest, 512);
        bench.model().set_faults(Faults::once(FaultPoint::Batch, 0, Fault::ListFault { after }));
        let mut engine = bench.engine();
        bench.assert_right(&mut engine, 0, 32);
        let stats = engine.stats();
        assert_eq!(stats.device_pages, u64::from(after));
        assert_eq!(stats.cpu_pages, 32 - u64::from(after));
        bench.assert_right(&mut engine, 0, 32);
        assert_eq!(engine.stats().device_pages, u64::from(after) + 32);
    }
    // Bit 7 says that the access which faulted was a write. The code is in the other seven.
    let marked = Status(Status::PAGE_FAULT.0 | Status::WRITE_FAULT);
    let bench = Bench::new(Setup::default());
    fill_some(&bench.guest, 512);
    bench.model().set_faults(Faults::once(FaultPoint::Operation, 3, Fault::Status(marked)));
    let mut engine = bench.engine();
    bench.assert_right(&mut engine, 0, 32);
    let stats = engine.stats();
    assert_eq!((stats.faulted_pages, stats.cpu_pages, stats.failed), (1, 1, 0));
}

/// 7. No deadline, no way back to the CPU, no choice of device by load or place, and all of it in
///    global variables.
#[test]
fn defect_7_a_device_that_hangs_costs_one_deadline_and_another_one_is_used() {
    let devices = (0..2).map(|number| DeviceConfig { number, ..DeviceConfig::sapphire_rapids() });
    let bench = Bench::new(Setup { devices: devices.collect(), ..Setup::default() });
    fill_some(&bench.guest, 512);
    bench.models[0].set_faults(always(FaultPoint::Batch, Fault::Hang));
    let mut engine = bench.engine();
    let begin = bench.now();
    (0..20).for_each(|_| bench.assert_right(&mut engine, 0, 512));
    let took = bench.now().since(begin);
    assert!(took >= DEADLINE && took < DEADLINE * 2, "{took:?}");
    assert!(bench.queues[0].is_given_up() && !bench.queues[1].is_given_up());
    assert!(bench.models[1].counters().batches > 10);
    // Another engine in the same process does not pay for what was learned.
    let mut other = bench.engine();
    let begin = bench.now();
    bench.assert_right(&mut other, 0, 512);
    assert!(bench.now().since(begin) < DEADLINE / 2);
}

/// A device that hangs mid-way costs at most one deadline, once, however many batches, jobs and
/// channels were waiting for it.
#[test]
fn a_hang_is_paid_once_for_all_batches_that_wait() {
    let bench = Bench::new(Setup::default());
    fill_some(&bench.guest, 512);
    let mut engines: Vec<_> = (0..8).map(|_| bench.engine()).collect();
    let runs: Vec<PageRun> = (0..2).map(|n| bench.guest.run(n * 256, 256)).collect();
    for engine in &mut engines {
        bench.assert_right(engine, 0, 512);
    }
    bench.model().set_faults(always(FaultPoint::Batch, Fault::Hang));
    let begin = bench.now();
    for round in 0..5 {
        for engine in &mut engines {
            engine.begin(&runs[..1]);
            engine.begin(&runs[1..]);
        }
        for engine in &mut engines {
            bench.assert_answer(&engine.collect().unwrap(), 0, 256);
            bench.assert_answer(&engine.collect().unwrap(), 256, 256);
        }
        let took = bench.now().since(begin);
        assert!(took < DEADLINE + DEADLINE / 2, "round {round}: {took:?}");
    }
    assert!(engines.iter().all(|engine| engine.stats().timed_out > 0));
}

/// Real time and no latency at all: what is hard is not the waiting but the giving up.
#[test]
fn a_device_without_delays_is_given_up_as_well() {
    let device = DeviceConfig { timing: Timing::instant(), ..DeviceConfig::sapphire_rapids() };
    let engine = EngineConfig { offload_pages_min: 1, ..EngineConfig::default() };
    let bench = Bench::new(Setup { devices: vec![device], engine, ..Setup::default() });
    bench.model().set_faults(Faults::once(FaultPoint::Operation, 5, Fault::Hang));
    let mut engine = bench.engine();
    (0..3).for_each(|_| bench.assert_right(&mut engine, 0, 512));
    assert!(engine.stats().timed_out > 0);
}
