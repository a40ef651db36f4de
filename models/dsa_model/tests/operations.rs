//! What each operation does, and what it refuses.
#![allow(clippy::unwrap_used, reason = "tests")]

mod bench;

use bench::{Bench, PAGE};
use martlet_device_io::BusAddress;
use martlet_dsa_abi::{Descriptor, Flags, Opcode, Status, Version};
use martlet_dsa_model::{DeviceConfig, QueueConfig};
use proptest::prelude::*;

fn instant() -> Bench {
    Bench::new(DeviceConfig::instant())
}

/// A descriptor typed as bytes, for what the builders do not build.
fn raw(opcode: Opcode, flags: u32, edit: impl Fn(&mut [u8; 64]), completion: u64) -> Descriptor {
    let mut bytes = [0; 64];
    bytes[4..8].copy_from_slice(&(u32::from(opcode.0) << 24 | flags).to_le_bytes());
    bytes[8..16].copy_from_slice(&completion.to_le_bytes());
    edit(&mut bytes);
    Descriptor::from_bytes(&bytes)
}

#[test]
fn zero_pages_are_told_from_others() {
    let bench = instant();
    let record = bench.run(bench.check_page(0, 0));
    assert_eq!((record.status(), record.result(), record.completed()), (Status::SUCCESS, 0, 4096));
    bench.data.write(PAGE + 77, &[1]);
    let record = bench.run(bench.check_page(1, 0));
    assert_eq!((record.status(), record.result(), record.completed()), (Status::SUCCESS, 1, 77));
}

#[test]
fn a_range_names_its_first_difference() {
    let bench = instant();
    bench.data.write(5 * PAGE + 9, &[1]);
    let range = Descriptor::compare_pattern(bench.at(0), 0, 8 * 4096, bench.record_at(0));
    let record = bench.run(range);
    assert_eq!((record.result(), record.completed()), (1, 5 * 4096 + 9));
    // The pattern goes on where a page ends, at whatever address it began.
    let pattern = 0x0807_0605_0403_0201_u64;
    let bytes: Vec<u8> = pattern.to_le_bytes().into_iter().cycle().take(2 * PAGE).collect();
    bench.data.write(8 * PAGE + 3, &bytes);
    let range = |bytes| {
        Descriptor::compare_pattern(bench.at(8 * PAGE + 3), pattern, bytes, bench.record_at(0))
    };
    let record = bench.run(range(2 * 4096));
    assert_eq!((record.result(), record.completed()), (0, 2 * 4096));
    let record = bench.run(range(2 * 4096 + 1));
    assert_eq!((record.result(), record.completed()), (1, 2 * 4096));
}

#[test]
fn an_unexpected_result_fails_the_predicate() {
    let bench = instant();
    let expect = |result| bench.check_page(0, 0).with_expected_result(result);
    assert_eq!(bench.run(expect(0)).status(), Status::SUCCESS);
    assert_eq!(bench.run(expect(1)).status(), Status::SUCCESS_FALSE_PREDICATE);
}

#[test]
fn limits_are_those_of_the_queue() {
    let mut config = DeviceConfig::instant();
    config.queues = vec![QueueConfig { transfer_bytes_max: 4096, ..QueueConfig::shared(16) }];
    let bench = Bench::new(config);
    let sized = |bytes| Descriptor::compare_pattern(bench.at(0), 0, bytes, bench.record_at(0));
    assert_eq!(bench.run(sized(4096)).status(), Status::SUCCESS);
    assert_eq!(bench.run(sized(4097)).status(), Status::TRANSFER_SIZE);
    assert_eq!(bench.run(sized(0)).status(), Status::TRANSFER_SIZE);
    // The driver's default of 32 descriptors, which QEMU's batches of 128 exceed.
    let pages: Vec<Descriptor> = (0..33).map(|n| bench.check_page(n, n + 1)).collect();
    assert_eq!(bench.run_batch(&pages).status(), Status::DESCRIPTOR_COUNT);
    assert_eq!(bench.status(1), Status::NONE);
    assert_eq!(bench.run_batch(&pages[..32]).status(), Status::SUCCESS);
}

#[test]
fn a_batch_of_one_is_illegal_on_version_1() {
    let bench = instant();
    let one = [bench.check_page(0, 1)];
    assert_eq!(bench.run_batch(&one).status(), Status::DESCRIPTOR_COUNT);
    let bench = Bench::new(DeviceConfig { version: Version::V2, ..DeviceConfig::instant() });
    let one = [bench.check_page(0, 1)];
    assert_eq!(bench.run_batch(&one).status(), Status::SUCCESS);
}

#[test]
fn what_is_wrong_with_a_descriptor_is_named() {
    let bench = instant();
    let done = bench.record_at(0);
    let refuse = |opcode, flags, offset: usize, byte| {
        let descriptor = raw(opcode, flags, |bytes| bytes[offset] = byte, done);
        bench.run(descriptor).status()
    };
    assert_eq!(refuse(Opcode(0x55), 0xc, 40, 0), Status::BAD_OPCODE);
    // A copy, which this device does not have.
    assert_eq!(refuse(Opcode(0x03), 0xc, 32, 1), Status::BAD_OPCODE);
    assert_eq!(refuse(Opcode::NOOP, 0xc, 38, 1), Status::RESERVED_NOT_ZERO);
    assert_eq!(refuse(Opcode::NOOP, 0xc, 63, 1), Status::RESERVED_NOT_ZERO);
    assert_eq!(refuse(Opcode::NOOP, 0xc, 3, 0x80), Status::PRIVILEGE);
    assert_eq!(refuse(Opcode::NOOP, 0x1c, 36, 1), Status::INTERRUPT_HANDLE);
    assert_eq!(refuse(Opcode::NOOP, 0xc, 0, 9), Status::SUCCESS);
    let fenced = raw(Opcode::NOOP, 0xd, |_| {}, done);
    let record = bench.run(fenced);
    assert_eq!((record.status(), record.invalid_flags()), (Status::INVALID_FLAGS, 1));
    let blocking = bench.check_page(0, 0).with_flags(Flags::from_bits(0xe));
    assert_eq!(bench.run(blocking).invalid_flags(), 2);
    let unaligned_list = Descriptor::batch(bench.list.at().0 + 32, 2, done);
    assert_eq!(bench.run(unaligned_list).status(), Status::LIST_ALIGN);
}

#[test]
fn a_record_that_cannot_be_written_is_counted() {
    let bench = instant();
    for at in [bench.record_at(0) + 8, 0x1000, u64::MAX - 31] {
        bench.submit(Descriptor::noop(at));
    }
    bench.settle();
    assert_eq!(bench.model.counters().records_lost, 3);
    assert!(bench.model.is_idle());
}

#[test]
fn missing_pages_stop_an_operation_where_they_are() {
    let bench = instant();
    bench.model.hide(BusAddress(bench.at(2 * PAGE)), 4096);
    let range = |at| Descriptor::compare_pattern(at, 0, 4 * 4096, bench.record_at(0));
    let record = bench.run(range(bench.at(100)));
    assert_eq!((record.status(), record.completed()), (Status::PAGE_FAULT, 2 * 4096 - 100));
    assert_eq!((record.fault_address(), record.is_write_fault()), (bench.at(2 * PAGE), false));
    bench.model.show(BusAddress(bench.at(2 * PAGE)), 4096);
    assert_eq!(bench.run(range(bench.at(100))).status(), Status::SUCCESS);
    // No memory at all is the same to a process's address space.
    assert_eq!(bench.run(range(0x10_0000)).fault_address(), 0x10_0000);
}

proptest! {
    /// Any single bit anywhere in a range is found, and its place is named.
    #[test]
    fn any_bit_is_found(at in 0_usize..4 * PAGE, bit in 0_u8..8) {
        let bench = instant();
        bench.data.write(at, &[1 << bit]);
        let range = Descriptor::compare_pattern(bench.at(0), 0, 4 * 4096, bench.record_at(0));
        let record = bench.run(range);
        prop_assert_eq!((record.result(), record.completed() as usize), (1, at));
    }
}
