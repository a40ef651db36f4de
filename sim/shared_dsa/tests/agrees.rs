//! The simulation's device and the bit-exact model of one give the same times.
#![allow(clippy::unwrap_used, reason = "tests")]

use martlet_device_io::{Dma, DmaBlock, Portal, Submission, Waiter};
use martlet_dsa_abi::Descriptor;
use martlet_dsa_model::{DeviceConfig, DsaModel, Faults, QueueConfig};
use martlet_policy::admission::OffloadPolicy;
use martlet_shared_dsa::{Cell, simulate};
use martlet_soft_bus::{Addressing, SoftBus, SoftClock, Stage};
use martlet_units::Instant;
use std::sync::Arc;

const PAGES: usize = 128;
const BATCHES: usize = 64;

/// Pages a second that one device checks while `deep` batches of 128 are kept with it.
fn pages_per_second(deep: usize) -> f64 {
    let bus = SoftBus::new(Addressing::Process);
    let stage = Stage::new(SoftClock::virtual_from(Instant(1)));
    let mut config = DeviceConfig::sapphire_rapids();
    config.queues = vec![QueueConfig { batch_max: 1024, ..QueueConfig::shared(128) }];
    let clock = Arc::clone(stage.clock());
    let model = DsaModel::new(config, bus.clone(), clock, Faults::default()).unwrap();
    let seat = stage.seat(model.clone());
    let portal = model.portal(0).unwrap();
    let data = bus.alloc(PAGES * 4096, 4096).unwrap();
    let list = bus.alloc(PAGES * 64, 64).unwrap();
    let records = bus.alloc((PAGES + deep) * 32, 32).unwrap();
    for page in 0..PAGES {
        let at = |block: &DmaBlock, bytes: usize| block.at().0 + (page * bytes) as u64;
        let check = Descriptor::compare_pattern(at(&data, 4096), 0, 4096, at(&records, 32));
        list.write(page * 64, &check.to_bytes());
    }
    let record = |slot: usize| (PAGES + slot) * 32;
    let submit = |slot: usize| {
        records.clear(record(slot), 32);
        let batch = Descriptor::batch(list.at().0, 128, records.at().0 + record(slot) as u64);
        assert_eq!(portal.submit(&batch.to_bytes()), Submission::Accepted);
    };
    let begin = seat.now();
    (0..deep).for_each(submit);
    for done in 0..BATCHES {
        let slot = done % deep;
        while records.load8(record(slot)) == 0 {
            seat.wait(None);
        }
        if done + deep < BATCHES {
            submit(slot);
        }
    }
    (PAGES * BATCHES) as f64 / seat.now().since(begin).as_secs_f64()
}

#[test]
fn the_simulated_device_is_as_fast_as_the_modelled_one() {
    // One guest whose channels keep eight and more batches with the device: it is full.
    let cell = Cell {
        vms: 1,
        channels: 8,
        devices: 1,
        zero_percent: 100,
        policy: OffloadPolicy::Block,
        seed: 1,
    };
    let simulated = simulate(&cell).scan_bytes_per_sec / 4096.0;
    let modelled = pages_per_second(8);
    let off = (simulated - modelled).abs() / modelled;
    assert!(off < 0.03, "{simulated} pages/s simulated, {modelled} modelled");
}

#[test]
fn one_batch_at_a_time_takes_the_latency_of_the_queueing_model() {
    // 1 us and 128 times 0.129 us, and the submission.
    let batch = 128.0 / pages_per_second(1) * 1e6;
    assert!((17.0..18.5).contains(&batch), "{batch} us");
}
