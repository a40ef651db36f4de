//! Copies with checksums, deltas and fills: the same bytes from the device and from the CPU, whatever
//! goes wrong.
#![allow(clippy::unwrap_used, reason = "tests")]

mod bench;

use bench::{Bench, PAGE, Setup};
use martlet_dsa::{ApplyError, DeltaEncoder, Destination, Encoded, StableCopy, Unsettled, crc32c};
use martlet_dsa_abi::{Opcode, Status};
use martlet_dsa_model::{Fault, FaultPoint, Faults, QueueConfig};
use martlet_fault_plan::{FOR_EVER, FaultPlan, Rule};
use proptest::prelude::*;
use std::sync::Arc;
use std::time::Duration;

const DEADLINE: Duration = Duration::from_millis(5);

fn copier(bench: &Bench) -> StableCopy {
    let (queues, gate, memory) =
        (bench.queues.clone(), Arc::clone(&bench.gate), Arc::clone(&bench.memory));
    StableCopy::new(16, queues, gate, memory, &*bench.bus, DEADLINE).unwrap()
}

fn encoder(bench: &Bench) -> DeltaEncoder {
    let (queues, gate, memory) =
        (bench.queues.clone(), Arc::clone(&bench.gate), Arc::clone(&bench.memory));
    DeltaEncoder::new(8, queues, gate, memory, &*bench.bus, DEADLINE).unwrap()
}

fn destination(bench: &Bench) -> Destination {
    let (queues, gate, memory) =
        (bench.queues.clone(), Arc::clone(&bench.gate), Arc::clone(&bench.memory));
    Destination::new(queues, gate, memory, &*bench.bus, DEADLINE).unwrap()
}

fn scribble(bench: &Bench, page: usize) {
    let values = (1..=251).cycle();
    (0..PAGE).step_by(7).zip(values).for_each(|(at, value)| bench.guest.write(page, at, value));
}

fn content(bench: &Bench, first: usize, pages: usize) -> Vec<u8> {
    (first..first + pages).flat_map(|page| bench.guest.read(page)).collect()
}

fn always(at: FaultPoint, fault: Fault) -> Faults {
    FaultPlan::script([Rule { at, skip: 0, times: FOR_EVER, fault }])
}

#[test]
fn a_stable_copy_has_the_checksum_of_its_bytes() {
    let bench = Bench::new(Setup::default());
    (0..16).for_each(|page| scribble(&bench, page));
    let mut copier = copier(&bench);
    for (first, pages) in [(0, 1), (3, 4), (0, 16), (2, 0)] {
        let copied = copier.copy(bench.guest.run(first, pages));
        assert_eq!(copied.bytes, content(&bench, first, pages));
        assert_eq!(copied.crc, crc32c(0, copied.bytes));
    }
    assert_eq!(bench.model().counters().operations, 3, "by the device, but for the empty one");
}

#[test]
fn a_stable_copy_is_right_whatever_the_device_does() {
    let faults = [
        (FaultPoint::Submit, Fault::Retry),
        (FaultPoint::Submit, Fault::Gone),
        (FaultPoint::Operation, Fault::Status(Status::HARDWARE)),
        (FaultPoint::Operation, Fault::PageFault { after: 5000 }),
        (FaultPoint::Operation, Fault::Hang),
        (FaultPoint::Operation, Fault::NoRecord),
        (FaultPoint::Operation, Fault::Late(Duration::from_millis(9))),
    ];
    for (point, fault) in faults {
        let bench = Bench::new(Setup::default());
        let mut copier = copier(&bench);
        bench.model().set_faults(Faults::once(point, 0, fault));
        for round in 0..6 {
            scribble(&bench, round);
            let copied = copier.copy(bench.guest.run(0, 8));
            assert_eq!(copied.bytes, content(&bench, 0, 8), "{fault:?}");
            assert_eq!(copied.crc, crc32c(0, copied.bytes), "{fault:?}");
            bench.pass(Duration::from_millis(6));
        }
    }
}

#[test]
fn a_page_that_changed_goes_as_its_changes() {
    let bench = Bench::new(Setup::default());
    let mut encoder = encoder(&bench);
    scribble(&bench, 5);
    let page = bench.guest.run(5, 1);
    let mut sent = encoder.store(2, page).to_vec();
    assert_eq!(sent, bench.guest.read(5));
    assert_eq!(encoder.encode(2, page, 3990), Encoded::Unchanged);
    bench.guest.write(5, 8, 0xee);
    bench.guest.write(5, PAGE - 1, 0xdd);
    let Encoded::Delta(record) = encoder.encode(2, page, 3990) else { panic!("two words changed") };
    assert_eq!(record.len(), 20);
    assert_eq!(record[..2], [1, 0]);
    assert_eq!(record[10..12], [0xff, 0x01]);
    apply(record, &mut sent);
    assert_eq!(sent, bench.guest.read(5));
    // What was sent is what the next delta is made against.
    assert_eq!(encoder.encode(2, page, 3990), Encoded::Unchanged);
    (0..PAGE).for_each(|at| bench.guest.write(5, at, 0x11));
    assert_eq!(encoder.encode(2, page, 3990), Encoded::Whole(&bench.guest.read(5)));
    assert_eq!(encoder.encode(2, page, 3990), Encoded::Unchanged);
    assert_eq!(bench.model().counters().operations, 5);
}

fn apply(record: &[u8], page: &mut [u8]) {
    for entry in record.chunks(10) {
        let at = usize::from(u16::from_le_bytes([entry[0], entry[1]])) * 8;
        page[at..at + 8].copy_from_slice(&entry[2..]);
    }
}

#[test]
fn cleared_memory_is_zero_whoever_clears_it() {
    let faults = [
        None,
        Some((FaultPoint::Submit, Fault::Retry)),
        Some((FaultPoint::Submit, Fault::Gone)),
        Some((FaultPoint::Operation, Fault::Status(Status::HARDWARE))),
        Some((FaultPoint::Operation, Fault::PageFault { after: 3 * 4096 + 100 })),
    ];
    for fault in faults {
        let queue = QueueConfig { transfer_bytes_max: 5 * 4096, ..QueueConfig::shared(8) };
        let bench = Bench::new(Setup::with_queue(queue));
        let mut destination = destination(&bench);
        (0..64).for_each(|page| scribble(&bench, page));
        if let Some((point, fault)) = fault {
            bench.model().set_faults(always(point, fault));
        }
        destination.clear(bench.guest.run(1, 62)).unwrap();
        assert!((1..63).all(|page| bench.guest.is_zero(page)), "{fault:?}");
        assert!(!bench.guest.is_zero(0) && !bench.guest.is_zero(63));
        if fault.is_none() {
            assert_eq!(bench.model().counters().operations, 13);
        }
    }
}

#[test]
fn deltas_are_applied_whoever_applies_them() {
    for fault in [None, Some(Fault::Status(Status::HARDWARE)), Some(Fault::PageFault { after: 10 })]
    {
        let bench = Bench::new(Setup::default());
        let mut destination = destination(&bench);
        scribble(&bench, 3);
        let mut expected = bench.guest.read(3);
        let record = [[0, 0, 1, 2, 3, 4, 5, 6, 7, 8], [0xff, 1, 9, 9, 9, 9, 9, 9, 9, 9]];
        apply(record.as_flattened(), &mut expected);
        if let Some(fault) = fault {
            bench.model().set_faults(always(FaultPoint::Operation, fault));
        }
        destination.apply(bench.guest.run(3, 1), record.as_flattened()).unwrap();
        assert_eq!(bench.guest.read(3), expected, "{fault:?}");
    }
}

/// Records come from a peer: nothing is written by one that is not in order.
#[test]
fn a_hostile_record_changes_nothing() {
    let bench = Bench::new(Setup::default());
    let mut destination = destination(&bench);
    scribble(&bench, 3);
    let before = content(&bench, 2, 3);
    let twice = [[5_u8, 0, 1, 1, 1, 1, 1, 1, 1, 1]; 2];
    let long = vec![0; 5130];
    let records: [&[u8]; 5] =
        [&[], &[0; 9], &[0, 2, 1, 1, 1, 1, 1, 1, 1, 1], twice.as_flattened(), &long];
    for record in records {
        let error = destination.apply(bench.guest.run(3, 1), record).unwrap_err();
        assert_eq!(error, ApplyError::Record { bytes: record.len() });
    }
    assert_eq!(content(&bench, 2, 3), before);
    assert_eq!(bench.model().counters().accepted, 0);
}

/// A fill that is late may still come. Until it has, the destination says so and writes nothing.
#[test]
fn a_late_write_is_settled_before_anything_else_is_written() {
    let bench = Bench::new(Setup::default());
    let mut destination = destination(&bench);
    scribble(&bench, 0);
    let late = Fault::Late(Duration::from_millis(20));
    bench.model().set_faults(Faults::once(FaultPoint::Only(Opcode::MEMFILL), 0, late));
    assert_eq!(destination.clear(bench.guest.run(0, 1)), Err(Unsettled));
    assert!(!destination.is_settled());
    assert_eq!(destination.clear(bench.guest.run(1, 1)), Err(Unsettled));
    let record = [0, 0, 1, 1, 1, 1, 1, 1, 1, 1];
    let applied = destination.apply(bench.guest.run(2, 1), &record);
    assert_eq!(applied, Err(ApplyError::Unsettled(Unsettled)));
    bench.pass(Duration::from_millis(20));
    assert!(destination.is_settled());
    destination.clear(bench.guest.run(0, 1)).unwrap();
    assert!(bench.guest.is_zero(0));
    destination.apply(bench.guest.run(2, 1), &record).unwrap();
    assert!(!bench.guest.is_zero(2));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// The destination follows the source by deltas and whole pages, with faults on both sides, and
    /// has the same page after each step.
    #[test]
    fn source_and_destination_stay_the_same(
        seed: u64,
        steps in prop::collection::vec((prop::collection::vec((0_usize..4096, any::<u8>()), 0..500), 80_u32..5120), 1..12),
    ) {
        let bench = Bench::new(Setup::default());
        let faults = vec![
            (FaultPoint::Submit, Fault::Retry),
            (FaultPoint::Operation, Fault::Status(Status::HARDWARE)),
            (FaultPoint::Only(Opcode::CREATE_DELTA), Fault::PageFault { after: 2000 }),
            (FaultPoint::Only(Opcode::CREATE_DELTA), Fault::Hang),
            (FaultPoint::Only(Opcode::APPLY_DELTA), Fault::PageFault { after: 20 }),
        ];
        bench.model().set_faults(FaultPlan::random(seed, 200_000, faults));
        let (mut encoder, mut destination) = (encoder(&bench), destination(&bench));
        let (source, target) = (bench.guest.run(0, 1), bench.guest.run(1, 1));
        put(&bench, 1, encoder.store(0, source));
        for (writes, max) in steps {
            writes.iter().for_each(|(at, value)| bench.guest.write(0, *at, *value));
            match encoder.encode(0, source, max) {
                Encoded::Unchanged => {}
                Encoded::Delta(record) => {
                    prop_assert!(record.len() <= max as usize);
                    destination.apply(target, record).unwrap();
                }
                Encoded::Whole(page) => put(&bench, 1, page),
            }
            prop_assert_eq!(bench.guest.read(0), bench.guest.read(1));
        }
    }
}

fn put(bench: &Bench, page: usize, bytes: &[u8]) {
    bytes.iter().enumerate().for_each(|(at, byte)| bench.guest.write(page, at, *byte));
}
