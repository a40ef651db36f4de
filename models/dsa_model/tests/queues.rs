//! Queues, engines, batches and time.
#![allow(clippy::unwrap_used, reason = "tests")]

mod bench;

use bench::Bench;
use martlet_device_io::{Portal, Submission, Waiter};
use martlet_dsa_abi::{Descriptor, Status};
use martlet_dsa_model::{DeviceConfig, QueueConfig};

fn took(bench: &Bench, descriptor: Descriptor) -> u128 {
    bench.forget_records();
    let begin = bench.seat.now();
    bench.submit(descriptor);
    while bench.status(0) == Status::NONE {
        bench.seat.wait(None);
    }
    bench.seat.now().since(begin).as_nanos()
}

fn raised(size: u32) -> DeviceConfig {
    let queues = vec![QueueConfig { batch_max: 1024, ..QueueConfig::shared(size) }];
    DeviceConfig { queues, ..DeviceConfig::sapphire_rapids() }
}

#[test]
fn times_are_those_that_were_measured() {
    let bench = Bench::new(raised(128));
    // 1.01 us and the submission.
    let single = took(&bench, bench.check_page(0, 0));
    assert!((1_150..1_300).contains(&single), "{single} ns");
    let pages: Vec<Descriptor> = (0..128).map(|n| bench.check_page(n % 64, n + 1)).collect();
    bench.write_list(&pages);
    // About 18 us for 128 pages.
    let batch = took(&bench, bench.batch(128));
    assert!((17_000..18_500).contains(&batch), "{batch} ns");
    // 64 KiB at once: 3.11 us were measured.
    let range = Descriptor::compare_pattern(bench.at(0), 0, 65_536, bench.record_at(0));
    let range = took(&bench, range);
    assert!((2_900..3_500).contains(&range), "{range} ns");
}

#[test]
fn engines_share_one_path_to_memory() {
    let bench = Bench::new(raised(128));
    let range = |n: usize| Descriptor::compare_pattern(bench.at(0), 0, 262_144, bench.record_at(n));
    let alone = took(&bench, range(0));
    bench.forget_records();
    let begin = bench.seat.now();
    for n in 0..4 {
        bench.submit(range(n));
    }
    while (0..4).any(|n| bench.status(n) == Status::NONE) {
        bench.seat.wait(None);
    }
    let together = bench.seat.now().since(begin).as_nanos();
    // Four times the transfer and once the latency.
    assert!((35..41).contains(&(together * 10 / alone)), "{together} ns for four, {alone} for one");
}

#[test]
fn a_short_descriptor_overtakes_a_batch() {
    let mut config = raised(128);
    config.engines = vec![0];
    let bench = Bench::new(config);
    let pages: Vec<Descriptor> = (0..64).map(|n| bench.check_page(n, n + 2)).collect();
    bench.write_list(&pages);
    bench.submit(bench.batch(64));
    bench.submit(bench.check_page(0, 1));
    while bench.status(1) == Status::NONE {
        bench.seat.wait(None);
    }
    assert_eq!(bench.status(0), Status::NONE);
}

#[test]
fn a_shared_queue_says_when_it_is_full() {
    let mut config = DeviceConfig::sapphire_rapids();
    config.queues = vec![QueueConfig { threshold: 3, ..QueueConfig::shared(8) }];
    let bench = Bench::new(config);
    let long = |n| Descriptor::compare_pattern(bench.at(0), 0, 262_144, bench.record_at(n));
    let results: Vec<Submission> = (0..8).map(|n| bench.submit(long(n))).collect();
    // Four engines work, three entries wait.
    assert!(results[..7].iter().all(|result| *result == Submission::Accepted));
    assert_eq!(results[7], Submission::Retry);
    bench.settle();
    assert!((0..7).all(|n| bench.status(n) == Status::SUCCESS));
    assert_eq!((bench.status(7), bench.model.counters().retries), (Status::NONE, 1));
}

#[test]
fn a_dedicated_queue_loses_what_does_not_fit() {
    let mut config = DeviceConfig::sapphire_rapids();
    config.queues = vec![QueueConfig::dedicated(2)];
    let bench = Bench::new(config);
    let long = |n| Descriptor::compare_pattern(bench.at(0), 0, 262_144, bench.record_at(n));
    for n in 0..8 {
        assert_eq!(bench.submit(long(n)), Submission::Accepted);
    }
    bench.settle();
    let done = (0..8).filter(|n| bench.status(*n) == Status::SUCCESS).count();
    assert_eq!((done, bench.model.counters().overflows), (6, 2));
}

#[test]
fn a_queue_of_a_higher_priority_gets_more() {
    let mut config = DeviceConfig::sapphire_rapids();
    let queue = |priority| QueueConfig { priority, ..QueueConfig::shared(64) };
    (config.queues, config.engines) = (vec![queue(1), queue(15)], vec![0]);
    let bench = Bench::new(config);
    let second = bench.model.portal(1).unwrap();
    let long = |n| Descriptor::compare_pattern(bench.at(0), 0, 262_144, bench.record_at(n));
    for n in 0..32 {
        bench.submit(long(n));
        second.submit(&long(n + 32).to_bytes());
    }
    let done = |from: usize| (from..from + 32).filter(|n| bench.status(*n) != Status::NONE).count();
    while done(32) < 30 {
        bench.seat.wait(None);
    }
    assert!(done(0) <= 4, "{} of the low priority were done", done(0));
}

#[test]
fn batches_report_what_became_of_them() {
    let bench = Bench::new(DeviceConfig::sapphire_rapids());
    let bad = Descriptor::compare_pattern(bench.at(0), 0, 0, bench.record_at(2));
    let batch = [bench.check_page(0, 1), bad, bench.check_page(1, 3)];
    let record = bench.run_batch(&batch);
    assert_eq!((record.status(), record.completed()), (Status::BATCH_FAILED, 3));
    assert_eq!(bench.status(2), Status::TRANSFER_SIZE);
    assert_eq!((bench.status(1), bench.status(3)), (Status::SUCCESS, Status::SUCCESS));
    let nested = bench.batch(2);
    assert_eq!(bench.run_batch(&[bench.check_page(0, 1), nested]).status(), Status::BATCH_FAILED);
}

#[test]
fn a_list_that_ends_in_no_memory_fails_behind_its_last_descriptor() {
    let bench = Bench::new(DeviceConfig::sapphire_rapids());
    let end = bench.list.at().0 + 1024 * 64;
    for (index, n) in (1020..1024).zip(1..) {
        bench.list.write(index * 64, &bench.check_page(0, n).to_bytes());
    }
    let record = bench.run(Descriptor::batch(end - 4 * 64, 6, bench.record_at(0)));
    assert_eq!((record.status(), record.completed()), (Status::BATCH_LIST_FAULT, 4));
    assert_eq!(record.fault_address(), end);
    assert!((1..=4).all(|n| bench.status(n) == Status::SUCCESS));
}

#[test]
fn a_drain_ends_behind_everything_before_it() {
    let bench = Bench::new(DeviceConfig::sapphire_rapids());
    let long = |n| Descriptor::compare_pattern(bench.at(0), 0, 262_144, bench.record_at(n));
    (1..5).for_each(|n| assert_eq!(bench.submit(long(n)), Submission::Accepted));
    bench.submit(Descriptor::drain(bench.record_at(0)));
    bench.submit(bench.check_page(0, 5));
    while bench.status(0) == Status::NONE {
        bench.seat.wait(None);
    }
    assert!((1..5).all(|n| bench.status(n) == Status::SUCCESS));
}
