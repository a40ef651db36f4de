//! What each operation does, and what it refuses.
#![allow(clippy::unwrap_used, reason = "tests")]

mod bench;

use bench::{Bench, PAGE};
use martlet_device_io::BusAddress;
use martlet_dsa_abi::{DeltaResult, Descriptor, Flags, Opcode, Status, Version};
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
    let other = Descriptor::compare(bench.at(0), bench.at(8 * PAGE), 8 * 4096, bench.record_at(0));
    assert_eq!(bench.run(other).completed(), 5 * 4096 + 9);
}

#[test]
fn an_unexpected_result_fails_the_predicate() {
    let bench = instant();
    let expect = |result| bench.check_page(0, 0).with_expected_result(result);
    assert_eq!(bench.run(expect(0)).status(), Status::SUCCESS);
    assert_eq!(bench.run(expect(1)).status(), Status::SUCCESS_FALSE_PREDICATE);
}

#[test]
fn fills_copies_and_checksums() {
    let bench = instant();
    let pattern = 0x0807_0605_0403_0201;
    let fill = Descriptor::fill(bench.at(3), pattern, 5000, bench.record_at(0));
    assert_eq!(bench.run(fill).completed(), 5000);
    let expected: Vec<u8> = pattern.to_le_bytes().into_iter().cycle().take(5000).collect();
    assert_eq!(bench.read(3, 5000), expected);
    assert_eq!((bench.read(0, 3), bench.read(5003, 1)), (vec![0; 3], vec![0]));

    let copy = Descriptor::copy(bench.at(3), bench.at(20_000), 5000, bench.record_at(0));
    assert_eq!(bench.run(copy).status(), Status::SUCCESS);
    assert_eq!(bench.read(20_000, 5000), expected);

    bench.data.write(0, b"123456789");
    let crc = Descriptor::crc(bench.at(0), 9, 0, bench.record_at(0));
    // The check value of CRC-32/ISCSI.
    assert_eq!(bench.run(crc).crc(), 0xe306_9283);
    let copy = Descriptor::copy_crc(bench.at(4), bench.at(40_000), 5, 0x1234, bench.record_at(0));
    let record = bench.run(copy);
    assert_eq!(bench.read(40_000, 5), b"56789");
    let seeded = Descriptor::crc(bench.at(40_000), 5, 0x1234, bench.record_at(0));
    assert_eq!(record.crc(), bench.run(seeded).crc());
}

#[test]
fn a_dualcast_writes_twice() {
    let bench = instant();
    bench.data.write(0, &[7; 100]);
    let second = bench.at(9 * PAGE + 16);
    let cast = raw(
        Opcode::DUALCAST,
        0xc,
        |bytes| {
            bytes[16..24].copy_from_slice(&bench.at(0).to_le_bytes());
            bytes[24..32].copy_from_slice(&bench.at(4 * PAGE + 16).to_le_bytes());
            bytes[32..36].copy_from_slice(&100_u32.to_le_bytes());
            bytes[40..48].copy_from_slice(&second.to_le_bytes());
        },
        bench.record_at(0),
    );
    assert_eq!(bench.run(cast).status(), Status::SUCCESS);
    assert_eq!(bench.read(4 * PAGE + 16, 100), vec![7; 100]);
    assert_eq!(bench.read(9 * PAGE + 16, 100), vec![7; 100]);
}

#[test]
fn a_delta_goes_back_and_forth() {
    let bench = instant();
    let (old, new, to) = (bench.at(0), bench.at(PAGE), bench.at(8 * PAGE));
    bench.data.write(PAGE + 8, &[1; 8]);
    bench.data.write(PAGE + 4088, &[2]);
    let create = |most| Descriptor::create_delta(old, new, 4096, to, most, bench.record_at(0));
    let record = bench.run(create(80));
    assert_eq!((record.delta_result(), record.delta_bytes()), (DeltaResult::RECORDED, 20));
    assert_eq!(bench.read(8 * PAGE, 10), [1, 0, 1, 1, 1, 1, 1, 1, 1, 1]);
    assert_eq!(bench.read(8 * PAGE + 10, 4), [0xff, 1, 2, 0]);

    let apply = Descriptor::apply_delta(to, 20, old, 4096, bench.record_at(0));
    assert_eq!(bench.run(apply).status(), Status::SUCCESS);
    assert_eq!(bench.read(0, PAGE), bench.read(PAGE, PAGE));
    assert_eq!(bench.run(create(80)).delta_result(), DeltaResult::EQUAL);

    bench.data.fill(PAGE, 128, 3);
    let record = bench.run(create(80));
    assert_eq!((record.delta_result(), record.completed()), (DeltaResult::OVERFLOW, 64));
}

#[test]
fn a_delta_that_lies_is_refused() {
    let bench = instant();
    let entry = |at: usize, word: u16| bench.data.write(at, &word.to_le_bytes());
    let apply = || Descriptor::apply_delta(bench.at(0), 20, bench.at(PAGE), 64, bench.record_at(0));
    entry(0, 3);
    entry(10, 3);
    assert_eq!(bench.run(apply()).status(), Status::DELTA_OFFSET_ORDER);
    entry(10, 8);
    assert_eq!(bench.run(apply()).status(), Status::DELTA_OFFSET_RANGE);
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
    assert_eq!(refuse(Opcode::CACHE_FLUSH, 0xc, 32, 1), Status::BAD_OPCODE);
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
    let overlap = Descriptor::copy(bench.at(0), bench.at(50), 100, done);
    assert_eq!(bench.run(overlap).status(), Status::OVERLAP);
    let delta =
        |old, most| Descriptor::create_delta(old, bench.at(PAGE), 64, bench.at(9000), most, done);
    assert_eq!(bench.run(delta(bench.at(4), 80)).status(), Status::ADDRESS_ALIGN);
    assert_eq!(bench.run(delta(bench.at(0), 70)).status(), Status::DELTA_SIZE);
    assert_eq!(bench.run(delta(bench.at(0), 85)).status(), Status::DELTA_SIZE);
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
    let fill = Descriptor::fill(bench.at(PAGE), 1, 3 * 4096, bench.record_at(0));
    let record = bench.run(fill);
    assert_eq!((record.status(), record.completed()), (Status::PAGE_FAULT, 4096));
    assert!(record.is_write_fault());
    bench.model.show(BusAddress(bench.at(2 * PAGE)), 4096);
    assert_eq!(bench.run(fill).status(), Status::SUCCESS);
    // No memory at all is the same to a process's address space.
    assert_eq!(bench.run(range(0x10_0000)).fault_address(), 0x10_0000);
}

#[test]
fn a_descriptor_may_wait_for_pages_where_the_queue_allows() {
    let mut config = DeviceConfig::sapphire_rapids();
    config.queues = vec![QueueConfig { block_on_fault: true, ..QueueConfig::shared(16) }];
    let bench = Bench::new(config);
    bench.model.hide(BusAddress(bench.at(0)), 3 * 4096);
    let flags = bench.check_page(0, 0).flags() | Flags::BLOCK_ON_FAULT;
    let range = Descriptor::compare_pattern(bench.at(0), 0, 3 * 4096, bench.record_at(0));
    let begin = bench.stage.clock().now();
    bench.submit(range.with_flags(flags));
    martlet_device_io::Waiter::wait(&*bench.seat, None);
    assert_eq!(bench.record(0).status(), Status::SUCCESS);
    let took = bench.stage.clock().now().since(begin).as_nanos();
    assert!((41_400..44_000).contains(&took), "{took} ns");
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

    /// A delta record that the device made brings the old bytes to the new ones.
    #[test]
    fn deltas_are_exact(old in proptest::collection::vec(any::<u8>(), 512),
                        flips in proptest::collection::vec((0_usize..512, any::<u8>()), 0..8)) {
        let bench = instant();
        bench.data.write(0, &old);
        let mut new = old;
        flips.iter().for_each(|(at, byte)| new[*at] = *byte);
        bench.data.write(PAGE, &new);
        let (from, to) = (bench.at(0), bench.at(9 * PAGE));
        let done = bench.record_at(0);
        let record = bench.run(Descriptor::create_delta(from, bench.at(PAGE), 512, to, 640, done));
        if record.delta_bytes() > 0 {
            let apply = Descriptor::apply_delta(to, record.delta_bytes(), from, 512, done);
            prop_assert_eq!(bench.run(apply).status(), Status::SUCCESS);
        }
        prop_assert_eq!(bench.read(0, 512), new);
    }
}
