//! What goes wrong when it is planned, and bytes that nobody planned.
#![allow(clippy::unwrap_used, reason = "tests")]

mod bench;

use bench::Bench;
use martlet_device_io::{BusAddress, Portal, Submission, Waiter};
use martlet_dsa_abi::{Descriptor, Opcode, Status, Version};
use martlet_dsa_model::{DeviceConfig, Fault, FaultPoint, Faults, Mode, QueueConfig};
use martlet_fault_plan::{FOR_EVER, Rule};
use martlet_units::Instant;
use proptest::prelude::*;
use std::time::Duration;

fn planned(at: FaultPoint, nth: u64, fault: Fault) -> Bench {
    Bench::with_faults(DeviceConfig::sapphire_rapids(), Faults::once(at, nth, fault))
}

fn pages(bench: &Bench, count: usize) -> Vec<Descriptor> {
    (0..count).map(|n| bench.check_page(n, n + 1)).collect()
}

#[test]
fn an_operation_ends_with_the_planned_status() {
    let bench = planned(FaultPoint::Only(Opcode::COMPVAL), 1, Fault::Status(Status::HARDWARE));
    let record = bench.run_batch(&pages(&bench, 3));
    assert_eq!(record.status(), Status::BATCH_FAILED);
    let statuses = [1, 2, 3].map(|n| bench.status(n));
    assert_eq!(statuses, [Status::SUCCESS, Status::HARDWARE, Status::SUCCESS]);
}

#[test]
fn a_planned_page_fault_stops_in_the_middle_of_a_page() {
    let bench = planned(FaultPoint::Operation, 0, Fault::PageFault { after: 1000 });
    bench.data.write(2000, &[1]);
    let record = bench.run(bench.check_page(0, 0));
    assert_eq!((record.status(), record.completed()), (Status::PAGE_FAULT, 1000));
    assert_eq!(record.fault_address(), bench.at(1000));
    assert_eq!(bench.run(bench.check_page(0, 0)).completed(), 2000);
}

#[test]
fn a_list_fault_leaves_later_records_unwritten() {
    let bench = planned(FaultPoint::Batch, 0, Fault::ListFault { after: 2 });
    let record = bench.run_batch(&pages(&bench, 4));
    assert_eq!((record.status(), record.completed()), (Status::BATCH_LIST_FAULT, 2));
    let statuses = [1, 2, 3, 4].map(|n| bench.status(n));
    assert_eq!(statuses, [Status::SUCCESS, Status::SUCCESS, Status::NONE, Status::NONE]);
}

#[test]
fn what_hangs_never_ends_and_the_others_go_on() {
    let bench = planned(FaultPoint::Batch, 0, Fault::Hang);
    bench.write_list(&pages(&bench, 4));
    bench.submit(bench.batch(4));
    bench.submit(bench.check_page(0, 9));
    bench.submit(Descriptor::drain(bench.record_at(10)));
    bench.settle();
    assert_eq!([0, 1, 9, 10].map(|n| bench.status(n)), {
        [Status::NONE, Status::NONE, Status::SUCCESS, Status::NONE]
    });
    assert!(!bench.model.is_idle());
    let bench = planned(FaultPoint::Operation, 1, Fault::NoRecord);
    let record = bench.run_batch(&pages(&bench, 3));
    assert_eq!((record.status(), bench.status(2)), (Status::SUCCESS, Status::NONE));
}

#[test]
fn a_record_comes_late_and_another_comes_twice() {
    let late = Duration::from_millis(7);
    let bench = planned(FaultPoint::Batch, 0, Fault::Late(late));
    bench.write_list(&pages(&bench, 4));
    let begin = bench.seat.now();
    bench.submit(bench.batch(4));
    bench.stage.run_until(begin.after(late));
    assert_eq!((bench.status(0), bench.status(4)), (Status::NONE, Status::SUCCESS));
    bench.settle();
    assert_eq!(bench.status(0), Status::SUCCESS);

    let bench = planned(FaultPoint::Operation, 0, Fault::Twice(late));
    bench.submit(bench.check_page(0, 0));
    bench.seat.wait(None);
    assert_eq!(bench.status(0), Status::SUCCESS);
    bench.forget_records();
    bench.settle();
    assert_eq!(bench.status(0), Status::SUCCESS);
}

#[test]
fn a_batch_may_run_backwards() {
    let bench = planned(FaultPoint::Batch, 0, Fault::Reverse);
    bench.write_list(&pages(&bench, 8));
    bench.submit(bench.batch(8));
    bench.seat.wait(None);
    assert_eq!((bench.status(8), bench.status(1)), (Status::SUCCESS, Status::NONE));
    bench.settle();
    assert_eq!(bench.status(0), Status::SUCCESS);
}

#[test]
fn a_retry_storm_ends_when_the_plan_does() {
    let rule = Rule { at: FaultPoint::Submit, skip: 0, times: 1000, fault: Fault::Retry };
    let bench = Bench::with_faults(DeviceConfig::sapphire_rapids(), Faults::script([rule]));
    let tries = (1..).find(|_| bench.submit(bench.check_page(0, 0)) == Submission::Accepted);
    assert_eq!((tries, bench.model.counters().retries), (Some(1001), 1000));
}

#[test]
fn a_device_that_is_gone_or_halted_does_nothing_more() {
    let bench = planned(FaultPoint::Submit, 1, Fault::Gone);
    assert_eq!(bench.submit(bench.check_page(0, 0)), Submission::Accepted);
    assert_eq!(bench.submit(bench.check_page(0, 1)), Submission::Gone);
    bench.settle();
    assert_eq!((bench.status(0), bench.status(1)), (Status::NONE, Status::NONE));

    let bench = planned(FaultPoint::Submit, 0, Fault::Halt);
    assert_eq!(bench.submit(bench.check_page(0, 0)), Submission::Retry);
}

#[test]
fn a_seed_repeats_its_faults() {
    let run = |seed| {
        let faults = vec![
            (FaultPoint::Submit, Fault::Retry),
            (FaultPoint::Operation, Fault::PageFault { after: 9 }),
            (FaultPoint::Operation, Fault::NoRecord),
            (FaultPoint::Batch, Fault::Late(Duration::from_micros(50))),
            (FaultPoint::Batch, Fault::Hang),
        ];
        let config = DeviceConfig::sapphire_rapids();
        let bench = Bench::with_faults(config, Faults::random(seed, 30_000, faults));
        let list = pages(&bench, 8);
        let mut seen = Vec::new();
        for _ in 0..40 {
            bench.forget_records();
            bench.write_list(&list);
            seen.push((bench.submit(bench.batch(8)), Status::NONE));
            bench.settle();
            seen.extend((0..9).map(|n| (Submission::Accepted, bench.status(n))));
        }
        seen
    };
    assert!((1..4).all(|seed| run(seed) == run(seed)));
    assert_ne!(run(1), run(2));
}

#[test]
fn a_hang_for_ever_fills_a_shared_queue() {
    let rule = Rule { at: FaultPoint::Operation, skip: 0, times: FOR_EVER, fault: Fault::Hang };
    let bench = Bench::with_faults(DeviceConfig::sapphire_rapids(), Faults::script([rule]));
    let taken = (0..200).filter(|_| bench.submit(bench.check_page(0, 0)) == Submission::Accepted);
    assert_eq!(taken.count(), 128 + 4);
}

/// A descriptor whose fields are near what is legal, so that it gets far.
fn nearly_legal(base: u64) -> impl Strategy<Value = [u8; 64]> {
    let address = prop_oneof![
        (0_u64..262_144).prop_map(move |offset| base + offset),
        (0_u64..4096).prop_map(move |offset| base + offset * 64),
        any::<u64>(),
        (u64::MAX - 8192)..=u64::MAX,
    ];
    let addresses = proptest::collection::vec(address, 5);
    let size = prop_oneof![0_u32..70_000, any::<u32>(), (0_u32..64).prop_map(|n| n * 8)];
    let flags = prop_oneof![Just(0xc_u32), Just(0x8c), any::<u32>(), Just(0x4), Just(0xd)];
    (0_u8..0x22, flags, addresses, size, any::<[u8; 24]>(), any::<bool>()).prop_map(
        |(opcode, flags, at, size, tail, noise)| {
            let mut bytes = [0; 64];
            bytes[4..8].copy_from_slice(&flags.to_le_bytes());
            bytes[7] = opcode;
            bytes[8..16].copy_from_slice(&(at[0] & !31).to_le_bytes());
            bytes[16..24].copy_from_slice(&at[1].to_le_bytes());
            bytes[24..32].copy_from_slice(&at[2].to_le_bytes());
            bytes[32..36].copy_from_slice(&size.to_le_bytes());
            bytes[40..48].copy_from_slice(&at[3].to_le_bytes());
            if noise {
                bytes[40..].copy_from_slice(&tail);
            }
            bytes
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    /// Whatever comes through a portal or lies in a list, the device neither panics nor stops:
    /// all that it took ends, and a well-formed descriptor behind it succeeds.
    #[test]
    fn hostile_descriptors_end(seeds in proptest::collection::vec(nearly_legal(0), 1..24),
                               v2: bool, dedicated: bool, hidden in 0_u64..60) {
        let queue = QueueConfig {
            mode: if dedicated { Mode::Dedicated } else { Mode::Shared },
            ..QueueConfig::shared(128)
        };
        let version = if v2 { Version::V2 } else { Version::V1 };
        let config =
            DeviceConfig { queues: vec![queue], version, ..DeviceConfig::sapphire_rapids() };
        let bench = Bench::new(config);
        bench.model.hide(BusAddress(bench.at(0) + hidden * 4096), 8192);
        for (index, bytes) in seeds.iter().enumerate() {
            // Small addresses are meant relative to the data, so that descriptors also hit it.
            let mut bytes = *bytes;
            for at in [8, 16, 24, 40] {
                let mut word = [0; 8];
                word.copy_from_slice(&bytes[at..at + 8]);
                let address = u64::from_le_bytes(word);
                if address < 262_144 {
                    bytes[at..at + 8].copy_from_slice(&(address + bench.at(0)).to_le_bytes());
                }
            }
            bench.list.write(index * 64, &bytes);
            bench.portal.submit(&bytes);
        }
        bench.submit(bench.batch(seeds.len()));
        bench.stage.run_until(Instant(bench.seat.now().0 + 60_000_000_000));
        prop_assert!(bench.model.is_idle());
        prop_assert_eq!(bench.run(Descriptor::noop(bench.record_at(0))).status(), Status::SUCCESS);
    }
}
