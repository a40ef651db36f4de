//! Bytes typed from the documents (DSA specification, Descriptor Formats and Completion Record):
//! none of them came out of this crate's encoders. `tests/header.rs` compares with the kernel's
//! header the fields that these vectors fill.

use martlet_dsa_abi::{CompletionRecord, Descriptor, Flags, Opcode, OperationCapability, Status};
use proptest::prelude::*;

const COMPLETION: u64 = 0x0000_7fff_1234_5660;
const SOURCE: u64 = 0x0000_7f00_0abc_d000;

#[test]
fn compare_pattern() {
    let bytes = [
        0, 0, 0, 0, // PASID, left to ENQCMD
        0x0c, 0, 0, 0x06, // completion valid and requested; operation 6
        0x60, 0x56, 0x34, 0x12, 0xff, 0x7f, 0, 0, // completion record
        0x00, 0xd0, 0xbc, 0x0a, 0x00, 0x7f, 0, 0, // source
        0, 0, 0, 0, 0, 0, 0, 0, // pattern
        0x00, 0x10, 0, 0, // 4096 bytes
        0, 0, 0, 0, // no interrupt; reserved
        0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
    ];
    let descriptor = Descriptor::compare_pattern(SOURCE, 0, 4096, COMPLETION);
    assert_eq!(descriptor.to_bytes(), bytes);
    assert_eq!(Descriptor::from_bytes(&bytes), descriptor);
    assert_eq!(descriptor.opcode(), Opcode::COMPVAL);
    assert!(!descriptor.flags().contains(Flags::BLOCK_ON_FAULT));
}

#[test]
fn batch() {
    let bytes = [
        0, 0, 0, 0, 0x0c, 0, 0, 0x01, //
        0x60, 0x56, 0x34, 0x12, 0xff, 0x7f, 0, 0, // completion record
        0x00, 0xd0, 0xbc, 0x0a, 0x00, 0x7f, 0, 0, // list
        0, 0, 0, 0, 0, 0, 0, 0, //
        32, 0, 0, 0, // descriptors
        0, 0, 0, 0, //
        0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
    ];
    assert_eq!(Descriptor::batch(SOURCE, 32, COMPLETION).to_bytes(), bytes);
}

#[test]
fn a_record_of_a_read_that_faulted_and_of_a_write() {
    let mut bytes = [0; 32];
    bytes[0] = 0x03;
    bytes[4..8].copy_from_slice(&[0x00, 0x30, 0, 0]);
    bytes[8..16].copy_from_slice(&[0x00, 0x00, 0xbd, 0x0a, 0x00, 0x7f, 0, 0]);
    let record = CompletionRecord::from_bytes(&bytes);
    assert_eq!(record.status(), Status::PAGE_FAULT);
    assert!(!record.is_write_fault() && !record.status().is_success());
    assert_eq!(record.completed(), 0x3000);
    assert_eq!(record.fault_address(), SOURCE + 0x3000);
    bytes[0] = 0x83;
    let record = CompletionRecord::from_bytes(&bytes);
    assert_eq!(record.status(), Status::PAGE_FAULT);
    assert!(record.is_write_fault());
    let made = CompletionRecord::new(Status::PAGE_FAULT)
        .with_completed(0x3000)
        .with_fault_address(SOURCE + 0x3000)
        .with_write_fault();
    assert_eq!(made.to_bytes(), bytes);
}

#[test]
fn the_result_of_a_comparison() {
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&[0x01, 1, 0, 0, 0xff, 0x0f, 0, 0]);
    let record = CompletionRecord::from_bytes(&bytes);
    assert_eq!((record.result(), record.completed()), (1, 4095));
    assert!(record.status().is_success());
}

#[test]
fn unknown_codes_print_as_numbers() {
    assert_eq!(Opcode(0x77).to_string(), "Opcode 0x77");
    assert_eq!(Status(0x7e).to_string(), "Status 0x7e");
    assert_eq!(format!("{:?}", Status::DESCRIPTOR_COUNT), "descriptor count out of range");
}

proptest! {
    /// Whatever bytes another process submits: reading them never panics, and nothing is lost.
    #[test]
    fn any_bytes_are_a_descriptor_and_a_record(
        descriptor: [[u8; 32]; 2],
        record: [u8; 32],
    ) {
        let mut bytes = [0; 64];
        bytes.copy_from_slice(descriptor.as_flattened());
        let read = Descriptor::from_bytes(&bytes);
        prop_assert_eq!(read.to_bytes(), bytes);
        let _ = (format!("{read:?}"), read.reserved_are_zero());
        let _ = (read.expected_result(), read.is_privileged());
        let read = CompletionRecord::from_bytes(&record);
        prop_assert_eq!(read.to_bytes(), record);
        let _ = (format!("{read:?}"), read.status().is_success(), read.invalid_flags());
    }
    /// Whatever text sysfs gives: no panic, and what is printed is read.
    #[test]
    fn any_text_is_read_as_operations_or_not(text: String, words: [u64; 4]) {
        let _ = OperationCapability::parse(&text);
        let parts = words.iter().rev().flat_map(|word| [word >> 32, word & 0xffff_ffff]);
        let printed: Vec<String> = parts.map(|part| format!("{part:08x}")).collect();
        let read = OperationCapability::parse(&printed.join(","));
        prop_assert_eq!(read, Some(OperationCapability::from_words(words)));
    }
}
