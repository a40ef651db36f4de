//! The zero check on a model that works: every shape of memory and of queue gives the truth.
#![allow(clippy::unwrap_used, reason = "tests")]

mod bench;

use bench::{Bench, PAGE, Setup, fill_some};
use martlet_dsa::EngineConfig;
use martlet_dsa_abi::Version;
use martlet_dsa_model::{DeviceConfig, Mode, QueueConfig, Timing};
use martlet_soft_bus::Addressing;
use proptest::prelude::*;
use std::time::Duration;

#[test]
fn pages_with_and_without_content_are_told_apart() {
    let bench = Bench::new(Setup::default());
    let mut engine = bench.engine();
    bench.assert_right(&mut engine, 0, 512);
    fill_some(&bench.guest, 512);
    bench.assert_right(&mut engine, 0, 512);
    bench.assert_right(&mut engine, 3, 100);
    bench.assert_right(&mut engine, 511, 1);
    bench.assert_right(&mut engine, 0, 0);
    let stats = engine.stats();
    assert_eq!((stats.cpu_pages, stats.device_pages), (0, 512 + 512 + 100 + 1));
    assert_eq!((stats.failed, stats.rejected, stats.timed_out), (0, 0, 0));
}

/// Zero memory costs one descriptor for 64 pages, once the engine has seen that it is zero.
#[test]
fn runs_of_zero_pages_become_ranges() {
    let bench = Bench::new(Setup::default());
    let mut engine = bench.engine();
    bench.assert_right(&mut engine, 0, 512);
    bench.assert_right(&mut engine, 0, 512);
    let before = bench.model().counters().operations;
    bench.assert_right(&mut engine, 0, 512);
    assert_eq!(bench.model().counters().operations - before, 8);
    // One page with content in the middle of a range: what is behind it is asked again.
    bench.guest.write(100, 17, 1);
    bench.assert_right(&mut engine, 0, 512);
    assert!(bench.model().counters().operations - before <= 8 + 8 + 2);
    assert_eq!(engine.stats().cpu_pages, 0);
}

#[test]
fn a_single_descriptor_goes_without_a_batch() {
    let bench = Bench::new(Setup::default());
    let mut engine = bench.engine();
    bench.guest.write(9, PAGE - 1, 1);
    bench.assert_right(&mut engine, 8, 1);
    bench.assert_right(&mut engine, 9, 1);
    let counters = bench.model().counters();
    assert_eq!((counters.batches, counters.operations), (0, 2));
    assert_eq!((engine.stats().failed, engine.stats().cpu_pages), (0, 0));
}

#[test]
fn few_pages_are_the_cpus() {
    let bench = Bench::new(Setup::default());
    let mut engine = bench.engine_with(EngineConfig::default());
    bench.assert_right(&mut engine, 0, 7);
    assert_eq!(bench.model().counters().accepted, 0);
    bench.assert_right(&mut engine, 0, 8);
    assert_eq!(bench.model().counters().accepted, 1);
}

#[test]
fn batches_are_as_long_as_the_queue_takes() {
    for batch_max in [1, 2, 3, 32, 1024] {
        let queue = QueueConfig { batch_max, ..QueueConfig::shared(16) };
        let bench = Bench::new(Setup::with_queue(queue));
        fill_some(&bench.guest, 512);
        let mut engine = bench.engine();
        bench.assert_right(&mut engine, 0, 512);
        bench.assert_right(&mut engine, 0, 512);
        assert_eq!(engine.stats().failed, 0, "batches of {batch_max}");
    }
}

#[test]
fn transfers_are_as_long_as_the_queue_takes() {
    let queue = QueueConfig { transfer_bytes_max: 3 * 4096 + 100, ..QueueConfig::shared(64) };
    let bench = Bench::new(Setup::with_queue(queue));
    let mut engine = bench.engine();
    (0..8).for_each(|_| bench.assert_right(&mut engine, 0, 512));
    assert_eq!((engine.stats().failed, engine.stats().cpu_pages), (0, 0));
}

/// Two jobs: the device works on the second while the first is collected.
#[test]
fn two_jobs_are_open_at_a_time() {
    let bench = Bench::new(Setup::default());
    fill_some(&bench.guest, 512);
    let mut engine = bench.engine();
    let runs: Vec<_> = (0..4).map(|n| bench.guest.run(n * 128, 128)).collect();
    engine.begin(&runs[..1]);
    engine.begin(&runs[1..2]);
    assert_eq!(engine.open_jobs(), 2);
    bench.assert_answer(&engine.collect().unwrap(), 0, 128);
    engine.begin(&runs[2..3]);
    bench.assert_answer(&engine.collect().unwrap(), 128, 128);
    engine.begin(&runs[3..]);
    bench.assert_answer(&engine.collect().unwrap(), 256, 128);
    bench.assert_answer(&engine.collect().unwrap(), 384, 128);
    assert!(engine.collect().is_none());
    // Dropped with a job open: nothing hangs, nothing is lost.
    engine.begin(&runs[..1]);
    let entries = bench.bus.entries();
    drop(engine);
    assert!(bench.bus.entries() < entries);
}

/// The device's time, not the driver's waiting, is what a job takes.
#[test]
fn a_batch_takes_what_the_device_takes() {
    let queue = QueueConfig { batch_max: 128, ..QueueConfig::shared(64) };
    let bench = Bench::new(Setup::with_queue(queue));
    let mut engine = bench.engine();
    let begin = bench.now();
    engine.check(&[bench.guest.run(0, 128)]);
    let took = bench.now().since(begin);
    // 16.5 us for the reads, 1 us for the answer, 0.2 us for ENQCMD.
    assert!(took >= Duration::from_micros(17) && took < Duration::from_micros(21), "{took:?}");
}

#[test]
fn a_dedicated_queue_never_overflows() {
    let bench = Bench::new(Setup::with_queue(QueueConfig::dedicated(3)));
    fill_some(&bench.guest, 512);
    let mut engine = bench.engine();
    (0..4).for_each(|_| bench.assert_right(&mut engine, 0, 512));
    let counters = bench.model().counters();
    assert_eq!(counters.overflows, 0);
    assert!(counters.accepted > 4, "{counters:?}");
    assert!(engine.stats().rejected > 0);
}

/// Without batches only runs are worth a submission; scattered content is the CPU's.
#[test]
fn the_device_file_of_a_version_1_device_gets_ranges() {
    let bench = Bench::new(Setup { singly: true, ..Setup::default() });
    let mut engine = bench.engine_with(EngineConfig::default());
    (0..4).for_each(|_| bench.assert_right(&mut engine, 0, 512));
    let counters = bench.model().counters();
    assert_eq!(counters.batches, 0);
    assert!(counters.operations >= 8, "{counters:?}");
    assert!(engine.stats().device_pages > 3 * 512, "{:?}", engine.stats());
    (0..512).step_by(2).for_each(|page| bench.guest.write(page, 0, 1));
    (0..4).for_each(|_| bench.assert_right(&mut engine, 0, 512));
    let before = bench.model().counters().operations;
    bench.assert_right(&mut engine, 0, 512);
    assert_eq!(bench.model().counters().operations, before);
    // It is zero again: ranges come back.
    (0..512).for_each(|page| bench.guest.write(page, 0, 0));
    (0..3).for_each(|_| bench.assert_right(&mut engine, 0, 512));
    assert!(bench.model().counters().operations > before);
    assert_eq!(engine.stats().failed, 0);
}

#[test]
fn pages_outside_of_the_pinned_memory_are_the_cpus() {
    let bench = Bench::new(Setup::default());
    let mut engine = bench.engine();
    let other = bench::Guest::new(16);
    other.write(3, 3, 3);
    fill_some(&bench.guest, 16);
    let zero = engine.check(&[bench.guest.run(0, 16), other.run(0, 16), bench.guest.run(1, 2)]);
    let told: Vec<u32> = (0..34).filter(|page| !zero.is_zero(*page)).collect();
    assert_eq!(told, [0, 3, 6, 9, 12, 15, 16 + 3]);
    assert_eq!(engine.stats().cpu_pages, 16);
}

#[test]
fn work_is_shared_by_two_devices() {
    let devices = (0..2).map(|number| DeviceConfig { number, ..DeviceConfig::sapphire_rapids() });
    let bench = Bench::new(Setup { devices: devices.collect(), ..Setup::default() });
    fill_some(&bench.guest, 512);
    let mut engine = bench.engine();
    (0..4).for_each(|_| bench.assert_right(&mut engine, 0, 512));
    assert!(bench.models.iter().all(|model| model.counters().batches > 10));
}

/// Each of the 32768 bits of a page, alone, makes it a page with content: by a descriptor of its own,
/// and as the last page of a range.
#[test]
fn every_single_bit_is_seen() {
    let bench = Bench::new(Setup { pages: 4, ..Setup::default() });
    let mut engine = bench.engine();
    (0..40).for_each(|_| bench.assert_right(&mut engine, 0, 4));
    for bit in 0..PAGE * 8 {
        bench.guest.write(3, bit / 8, 1 << (bit % 8));
        let alone = engine.check(&[bench.guest.run(3, 1)]);
        assert_eq!(alone.zero_pages(), 0, "bit {bit}");
        let range = engine.check(&[bench.guest.run(0, 4)]);
        assert_eq!(range.words()[0], 0b0111, "bit {bit}");
        bench.guest.write(3, bit / 8, 0);
    }
    assert_eq!(engine.check(&[bench.guest.run(0, 4)]).zero_pages(), 4);
    assert_eq!(engine.stats().cpu_pages, 0);
}

fn setups() -> impl Strategy<Value = Setup> {
    let queue =
        (any::<bool>(), 1_u32..20, prop::sample::select(vec![1_u32, 2, 5, 32, 128]), 0_u64..40)
            .prop_map(|(shared, size, batch_max, extra)| QueueConfig {
                batch_max,
                transfer_bytes_max: 4096 + extra * 2000,
                ..if shared { QueueConfig::shared(size) } else { QueueConfig::dedicated(size) }
            });
    let addressing = prop::sample::select(vec![
        Addressing::Process,
        Addressing::Iommu,
        Addressing::Scattered { run_bytes: 3 * 4096 },
    ]);
    let version = prop::sample::select(vec![Version::V1, Version::V2]);
    (prop::collection::vec(queue, 1..3), addressing, any::<(bool, bool)>(), version, 1_u32..200)
        .prop_map(|(queues, addressing, (singly, instant), version, batch_pages)| {
            let timing = if instant { Timing::instant() } else { Timing::sapphire_rapids() };
            let engines = vec![0, 0];
            let config = DeviceConfig::sapphire_rapids();
            let device = DeviceConfig { queues, version, timing, engines, ..config };
            let engine =
                EngineConfig { offload_pages_min: 1, batch_pages, ..EngineConfig::default() };
            let devices = vec![device];
            Setup { devices, addressing, singly, pages: 200, tries: 3, engine }
        })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    /// Any queue, any addresses, any content, any order of pages: the truth.
    #[test]
    fn every_answer_is_the_truth(
        setup in setups(),
        content in prop::collection::vec((0_usize..200, 0_usize..4096), 0..60),
        jobs in prop::collection::vec(prop::collection::vec((0_usize..200, 1_usize..60), 0..8), 1..6),
    ) {
        let dedicated = setup.devices[0].queues.iter().any(|queue| queue.mode == Mode::Dedicated);
        let bench = Bench::new(setup);
        content.iter().for_each(|(page, offset)| bench.guest.write(*page, *offset, 0x80));
        let mut engine = bench.engine();
        let clip = |(first, pages): &(usize, usize)| (*first, (*pages).min(200 - first));
        let mut expected: std::collections::VecDeque<Vec<(usize, usize)>> = Default::default();
        for job in &jobs {
            if engine.open_jobs() == 2 {
                compare(&bench, &engine.collect().unwrap(), &expected.pop_front().unwrap())?;
            }
            let pieces: Vec<_> = job.iter().map(clip).collect();
            let runs: Vec<_> = pieces.iter().map(|(f, n)| bench.guest.run(*f, *n)).collect();
            engine.begin(&runs);
            expected.push_back(pieces);
        }
        while let Some(zero) = engine.collect() {
            compare(&bench, &zero, &expected.pop_front().unwrap())?;
        }
        let stats = engine.stats();
        prop_assert_eq!((stats.failed, stats.timed_out, stats.faulted_pages), (0, 0, 0));
        prop_assert!(!dedicated || bench.model().counters().overflows == 0);
        drop(engine);
        prop_assert!(bench.model().is_idle());
    }

    /// Any single bit anywhere makes its page a page with content, and no other one.
    #[test]
    fn any_single_bit_is_seen(page in 0_usize..64, byte in 0_usize..4096, bit in 0_u32..8) {
        let bench = Bench::new(Setup { pages: 64, ..Setup::default() });
        let mut engine = bench.engine();
        (0..3).for_each(|_| bench.assert_right(&mut engine, 0, 64));
        bench.guest.write(page, byte, 1 << bit);
        bench.assert_right(&mut engine, 0, 64);
        bench.assert_right(&mut engine, page, 1);
        prop_assert_eq!(engine.stats().cpu_pages, 0);
    }
}

fn compare(
    bench: &Bench,
    zero: &martlet_dsa::ZeroPages,
    pieces: &[(usize, usize)],
) -> Result<(), TestCaseError> {
    let pages = pieces.iter().flat_map(|(first, pages)| *first..first + pages);
    let truth: Vec<bool> = pages.map(|page| bench.guest.is_zero(page)).collect();
    prop_assert_eq!(zero.pages() as usize, truth.len());
    let told: Vec<bool> = (0..zero.pages()).map(|page| zero.is_zero(page)).collect();
    prop_assert_eq!(told, truth);
    Ok(())
}
